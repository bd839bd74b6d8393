"""Which shard sits on which executor, and what local state an executor's host has."""
