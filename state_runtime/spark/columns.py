"""The internal columns beside a user's own in an epoch's plan, and Spark's mark of a column with event time; pure."""

from __future__ import annotations

__all__ = [
    "CONDITION_COLUMN",
    "DELAY_METADATA",
    "FAILED_COLUMN",
    "HASH_COLUMN",
    "INITIAL_COLUMN",
    "OUTPUT_COLUMN",
    "SEQUENCE_COLUMN",
    "WAKE_SEQUENCE",
]

DELAY_METADATA = "spark.watermarkDelayMs"
"""Metadata of a column that carries event time: the allowed delay."""

HASH_COLUMN = "__stillstate_hash"
SEQUENCE_COLUMN = "__stillstate_sequence"
INITIAL_COLUMN = "__stillstate_initial"
OUTPUT_COLUMN = "__stillstate_output_"
"""Prefix of the names of the columns with rows of side outputs (processors/side_outputs.py)."""
CONDITION_COLUMN = "__stillstate_where_"
"""Prefix of the names of the columns that aggregates with a condition read, numbered (pipeline/conditions.py)."""
FAILED_COLUMN = "__stillstate_failed"
"""The names of the conditions that a row fails (pipeline/expectations.py)."""

WAKE_SEQUENCE = -1
"""Value of the sequence column in a row that only wakes a shard because something is due. The row's hash is the shard's
first one."""
