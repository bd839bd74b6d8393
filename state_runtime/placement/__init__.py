"""Which executor each shard runs on, and which local state an executor's host has."""
