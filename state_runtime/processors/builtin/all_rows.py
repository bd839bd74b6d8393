"""One group of all rows: an aggregate without a key has a key column of its own that is the same everywhere.

State, shards and lookups know keys only, so the group has one, under a name that no user's column can have. It is made
where the operator's input is cut to what it reads (pipeline/conditions.py), and is in no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

__all__ = ["ALL_ROWS", "emitted"]

ALL_ROWS: Final = "__stillstate_all"

Column = TypeVar("Column")


def emitted(keys: Sequence[Column], key_columns: Sequence[str]) -> Sequence[Column]:
    """Of what there is of each key column that which the output has: nothing where all rows are one group."""
    return () if tuple(key_columns) == (ALL_ROWS,) else keys
