"""Restoring a shard's state: from local copies, from local copies and the later changelog, or from the primary
store."""
