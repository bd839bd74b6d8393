"""The columns that travel beside a user's own through an epoch's plan; pure."""

from __future__ import annotations

__all__ = ["CONDITION_COLUMN", "HASH_COLUMN", "INITIAL_COLUMN", "SEQUENCE_COLUMN", "WAKE_SEQUENCE"]

HASH_COLUMN = "__stillstate_hash"
SEQUENCE_COLUMN = "__stillstate_sequence"
INITIAL_COLUMN = "__stillstate_initial"
CONDITION_COLUMN = "__stillstate_where_"
"""Begins the names of the columns that aggregates with a condition read, numbered (pipeline/conditions.py)."""

WAKE_SEQUENCE = -1
"""Stands in the sequence column of a row that only tells a shard that something is due. Its hash is the shard's first
one."""
