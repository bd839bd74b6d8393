"""One group of all rows: an aggregate without a key gets a key column with the same value in every row.

State, shards and lookups need a key, so the group has one, under a name that no user's column can have. The column is
made where the operator's input is cut to the columns that it reads (pipeline/conditions.py), and is in no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

__all__ = ["ALL_ROWS", "emitted"]

ALL_ROWS: Final = "__stillstate_all"

Column = TypeVar("Column")


def emitted(keys: Sequence[Column], key_columns: Sequence[str]) -> Sequence[Column]:
    """Return the entries of the key columns that the output has: none if all rows are one group."""
    return () if tuple(key_columns) == (ALL_ROWS,) else keys
