"""A shard's rows in slices, as a task gives them to an operator that must not have all of them at once."""

from __future__ import annotations

from itertools import count

from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import RowSlice
from state_runtime.processors.slices import slices_of

_TURN = count()


def in_slices(rows: GroupedRows, keys_max: int = 2) -> list[RowSlice]:
    """One pass over the rows, a few keys at a time, and what is due with the last of them."""
    pieces = list(slices_of(rows, keys_max, 1 << 30)) or [rows]
    return [RowSlice(p, is_last=p is pieces[-1], begins_pass=n == 0) for n, p in enumerate(pieces)]


def now_whole_now_sliced(rows: GroupedRows) -> list[RowSlice]:
    """In turns in one slice and in several: no law of an operator may depend on which."""
    return in_slices(rows) if next(_TURN) % 2 else [RowSlice(rows)]
