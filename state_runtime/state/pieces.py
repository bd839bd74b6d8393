"""The files of runs in memory, and look-up in one of them: what `OpenVersion` is put together from; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.state.runs import Run, RunFile
from state_runtime.state.table import (
    HASH_MAX,
    Hashes,
    Mask,
    Positions,
    StateSchema,
    hashes_of,
    int64_values,
    lookup,
    lookup_entries,
)

__all__ = ["Piece", "RunData", "Wanted", "due_order_of", "rows_of_piece"]


class RunData:
    """The rows of one file of a run, and its index by time."""

    def __init__(self, batch: pa.RecordBatch, due_order: pa.Array | None = None) -> None:
        self.batch = batch
        self._due_order = due_order

    @cached_property
    def due_order(self) -> Positions:
        """Positions of the rows that are ever due, earliest first; for states with `due` only."""
        stored = self._due_order if self._due_order is not None else due_order_of(self.batch)
        return int64_values(stored)[: len(stored) - stored.null_count]

    @cached_property
    def due(self) -> npt.NDArray[np.int64]:
        """The `due` column; undefined where it is null."""
        return int64_values(self.batch.column(self.batch.num_columns - 1))


def rows_of_piece(batch: pa.RecordBatch, run: Run, file: RunFile) -> tuple[int, int]:
    """Which rows of a run's file count: from a position up to, without, another."""
    low, hashes = max(run.low, file.low), hashes_of(batch)
    first = int(np.searchsorted(hashes, np.uint64(low), side="left")) if low else 0
    end = int(np.searchsorted(hashes, np.uint64(file.high), side="right")) if file.high < HASH_MAX else len(hashes)
    return first, max(first, end)


def due_order_of(batch: pa.RecordBatch) -> pa.Array:
    """The index by time of a batch of a state with `due`: positions in order of due, the rest of the column is null."""
    times = batch.column(batch.num_columns - 1)
    never = pc.or_(times.is_null(), batch.column(1)).to_numpy(zero_copy_only=False)
    at = np.flatnonzero(~never)
    # Stable: rows of one time stay in order of (hash, entry).
    order = at[np.argsort(int64_values(times)[at], kind="stable")]
    absent = np.zeros(batch.num_rows, dtype=np.bool_)
    absent[len(order) :] = True
    return pa.array(np.concatenate([order, np.zeros(batch.num_rows - len(order), dtype=np.int64)]), mask=absent)


@dataclass(frozen=True)
class Wanted:
    """Rows to look for, sorted by hash; `entries` is None in the value layout."""

    hashes: Hashes
    keys: Sequence[pa.Array]
    entries: Hashes | None = None
    entry_columns: Sequence[pa.Array] = ()

    def take(self, rows: Positions) -> Wanted:
        """Some of them, in order."""
        if len(rows) == len(self.hashes):
            return self
        picked = pa.array(rows)
        return Wanted(
            self.hashes[rows],
            [k.take(picked) for k in self.keys],
            None if self.entries is None else self.entries[rows],
            [c.take(picked) for c in self.entry_columns],
        )


@dataclass(frozen=True)
class Piece:
    """The live rows of one file of a run.

    Attributes:
        age: of the run; the newest has the lowest.
        batch: the rows that no merge has taken away, a slice of `data.batch` from position `first` on. (What lies
            behind it belongs to another shard, see `RunFile`.)
        taken_ms: rows due by then were handled by an earlier epoch.
    """

    age: int
    batch: pa.RecordBatch
    data: RunData
    first: int
    taken_ms: int | None

    @cached_property
    def hash_range(self) -> tuple[np.uint64, np.uint64]:
        hashes = hashes_of(self.batch)
        return hashes[0], hashes[-1]

    def inside(self, hashes: Hashes) -> slice:
        """Which of some sorted hashes lie in the piece's range: pieces of one run have neighbouring ranges."""
        low, high = self.hash_range
        return slice(int(np.searchsorted(hashes, low, side="left")), int(np.searchsorted(hashes, high, side="right")))

    def ask(self, schema: StateSchema, wanted: Wanted, asked: Positions) -> tuple[Positions, Mask]:
        """Look some rows up, at least one.

        The key columns are not brought into the order of `asked` before the search by hash: most pieces have few of
        the hashes, and taking all keys for each piece was most of a look-up's time.

        Args:
            asked: which of the wanted rows, ascending.

        Returns:
            The position of each in the batch, -1 where it is not there; and whether the search for it is over, because
            it was found or its key was cleared.
        """
        rows = asked if len(asked) < len(wanted.hashes) else None
        hashes = wanted.hashes[asked]
        if wanted.entries is None:
            at = lookup(self.batch, schema, hashes, wanted.keys, rows)
            return at, at >= 0
        at, cleared = lookup_entries(
            self.batch, schema, hashes, wanted.keys, wanted.entries[asked], wanted.entry_columns, rows
        )
        return at, cleared | (at >= 0)

    def due_between(self, after_ms: int | None, through_ms: int) -> slice:
        """The places in the index by time with `after_ms < due <= through_ms`; a binary search."""
        order, due = self.data.due_order, self.data.due
        start = 0 if after_ms is None else bisect_right(order, after_ms, key=lambda at: due[at])
        return slice(start, bisect_right(order, through_ms, lo=start, key=lambda at: due[at]))

    def rows_at(self, places: slice) -> pa.RecordBatch:
        """The rows at places of the index, in order of due; without those that a merge has taken away."""
        at = self.data.due_order[places]
        inside = (at >= self.first) & (at < self.first + self.batch.num_rows)
        return self.data.batch.take(pa.array(at[inside]))
