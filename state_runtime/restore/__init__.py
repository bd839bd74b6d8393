"""How a shard's state comes back: from local copies, from local copies and the changelog since, or from the primary
store."""
