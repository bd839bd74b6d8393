"""Merging sorted sources of one state without holding any of them in memory; pure and vectorised.

A source is an iterator of batches in order of key hash (and entry), like the row groups of a table. The merge
repeatedly takes from all sources the rows up to a hash that each has in memory, and folds them. So a few batches of
each source are in memory at a time, for any size of state. All rows of one hash are in one result, so that results can
become pieces of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from state_runtime.base.limits import MIB
from state_runtime.state.table import HASH_MAX, bounded_slices, concat, hashes_of

__all__ = ["WINDOW_ROWS", "merge_sorted", "whole_hashes", "windows"]

WINDOW_ROWS = 1 << 17
"""Rows of one source that are processed together: a few megabytes, and enough for vectorised work."""
_WINDOW_BYTES = 64 * MIB

Batches = Iterator[pa.RecordBatch]


def windows(batch: pa.RecordBatch, rows_max: int = WINDOW_ROWS) -> Batches:
    """Yield a sorted batch in slices of bounded rows and bytes, without a copy."""
    for (part,) in bounded_slices([batch], _WINDOW_BYTES):
        for start in range(0, part.num_rows, rows_max):
            yield part.slice(start, rows_max)


def whole_hashes(batches: Batches) -> Batches:
    """Yield sorted batches, cut so that no hash is in two of them; copied only where a cut went through a hash."""
    held: pa.RecordBatch | None = None
    for batch in batches:
        if batch.num_rows == 0:
            continue
        if held is None:
            held = batch
            continue
        more = int(np.searchsorted(hashes_of(batch), hashes_of(held)[-1], side="right"))
        if more:
            held = concat([held, batch.slice(0, more)], held.schema)
        if more < batch.num_rows:
            yield held
            held = batch.slice(more)
    if held is not None:
        yield held


def merge_sorted(
    newest_first: Sequence[Batches], fold: Callable[[Sequence[pa.RecordBatch]], pa.RecordBatch]
) -> Batches:
    """Merge sorted sources.

    Args:
        newest_first: sources of one state in one hash range.
        fold: returns the rows that stay of sorted batches, newest first; sorted; see `state_runtime.state.table.fold`.
            It gets bounded bytes at a time, unless one hash has more.

    Yields:
        Batches in ascending order of hash; no hash is in two of them; none is empty.
    """
    cursors = [_Cursor(source) for source in newest_first]
    while cuts := [cut for cursor in cursors if (cut := cursor.complete_through()) is not None]:
        parts = [cursor.take_through(min(cuts)) for cursor in cursors]
        for some in bounded_slices([part for part in parts if part is not None]):
            merged = fold(some)
            if merged.num_rows:
                yield merged


class _Cursor:
    """One source, from the merge's position. Two of its batches may have rows of one hash."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._rows: pa.RecordBatch | None = None
        self._ended = False

    def complete_through(self) -> int | None:
        """Return a hash up to which every row is in memory, with at least one row; None at the end."""
        while True:
            rows = self._rows
            if rows is not None and rows.num_rows:
                if self._ended:
                    return HASH_MAX
                hashes = hashes_of(rows)
                if hashes[0] != hashes[-1]:
                    # The next batch may have more rows of the last hash.
                    return int(hashes[-1]) - 1
            elif self._ended:
                return None
            self._read_on()

    def _read_on(self) -> None:
        following = next(self._batches, None)
        if following is None:
            self._ended = True
        elif self._rows is None or self._rows.num_rows == 0:
            self._rows = following
        else:
            self._rows = concat([self._rows, following], following.schema)

    def take_through(self, cut: int) -> pa.RecordBatch | None:
        """Return the next rows with a hash up to `cut`, which is at most what every cursor has in memory."""
        if self._rows is None:
            return None
        end = int(np.searchsorted(hashes_of(self._rows), np.uint64(cut), side="right"))
        taken, self._rows = self._rows.slice(0, end), self._rows.slice(end)
        return taken
