"""The columns that travel beside a user's own through an epoch's plan; pure."""

from __future__ import annotations

__all__ = ["HASH_COLUMN", "INITIAL_COLUMN", "SEQUENCE_COLUMN", "WAKE_SEQUENCE"]

HASH_COLUMN = "__stillstate_hash"
SEQUENCE_COLUMN = "__stillstate_sequence"
INITIAL_COLUMN = "__stillstate_initial"

WAKE_SEQUENCE = -1
"""Stands in the sequence column of a row that only tells a shard that something is due. Its hash is the shard's first
one."""
