"""The files of runs in memory, and look-up in one of them: the parts of `OpenVersion`; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.state.ordering import stable_order
from state_runtime.state.runs import Run, RunFile
from state_runtime.state.search import matches, matches_of_entries
from state_runtime.state.table import (
    CLEAR_MARKER,
    ENTRY,
    HASH_MAX,
    Hashes,
    Mask,
    Positions,
    StateSchema,
    entries_of,
    hashes_of,
    int64_values,
)

__all__ = ["Asked", "Piece", "RunData", "Wanted", "due_order_of", "rows_of_piece"]

# A piece is marked before a search for at least the first number of rows, if it has at most the second number times as
# many rows.
_MARKED_MIN, _MARKED_ROWS_MAX = 1 << 10, 3
# One of eight to sixteen places is marked: the same share of absent rows is searched although it is not there.
_PLACES_PER_ROW = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, and without a pattern: 2^64 divided by the golden ratio


class RunData:
    """The rows of one file of a run, and its index by time."""

    def __init__(self, batch: pa.RecordBatch, due_order: pa.Array | None = None) -> None:
        self.batch = batch
        self._due_order = due_order

    @property
    def is_indexed(self) -> bool:
        """Whether the index by time exists already."""
        return self._due_order is not None or "due_order" in self.__dict__

    @cached_property
    def due_order(self) -> Positions:
        """Positions of the rows that are ever due, earliest first; for states with `due` only."""
        stored = self._due_order if self._due_order is not None else due_order_of(self.batch)
        return int64_values(stored)[: len(stored) - stored.null_count]

    @cached_property
    def has_clear_markers(self) -> bool:
        """Whether a key was cleared here; for the entries layout only."""
        return bool(np.any(entries_of(self.batch) == CLEAR_MARKER))

    @cached_property
    def due(self) -> npt.NDArray[np.int64]:
        """The `due` column; undefined where it is null."""
        return int64_values(self.batch.column(self.batch.num_columns - 1))


def rows_of_piece(batch: pa.RecordBatch, run: Run, file: RunFile) -> tuple[int, int]:
    """Return which rows of a run's file count: from a position up to (without) another."""
    low, hashes = max(run.low, file.low), hashes_of(batch)
    first = int(np.searchsorted(hashes, np.uint64(low), side="left")) if low else 0
    end = int(np.searchsorted(hashes, np.uint64(file.high), side="right")) if file.high < HASH_MAX else len(hashes)
    return first, max(first, end)


def due_order_of(batch: pa.RecordBatch) -> pa.Array:
    """Return the index by time of a batch with `due`: positions in order of due; the rest of the column is null."""
    times = batch.column(batch.num_columns - 1)
    at = np.flatnonzero(_is_due(times, batch.column(1)))
    # Stable: rows of one time stay in order of (hash, entry).
    order = at[stable_order(int64_values(times)[at])]
    absent = np.zeros(batch.num_rows, dtype=np.bool_)
    absent[len(order) :] = True
    return pa.array(np.concatenate([order, np.zeros(batch.num_rows - len(order), dtype=np.int64)]), mask=absent)


def _is_due(times: pa.Array, deleted: pa.Array) -> Mask:
    """Return which rows are ever due."""
    due: Mask = pc.and_not(times.is_valid(), deleted).to_numpy(zero_copy_only=False)
    return due


@dataclass(frozen=True)
class Wanted:
    """Rows to look for, sorted by hash; `entries` is None in the value layout."""

    hashes: Hashes
    keys: Sequence[pa.Array]
    entries: Hashes | None = None
    entry_columns: Sequence[pa.Array] = ()

    @cached_property
    def identities(self) -> Hashes:
        """See `identities_of`."""
        return identities_of(self.hashes, self.entries)

    def take(self, rows: Positions) -> Wanted:
        """Return some of the rows, in order."""
        if len(rows) == len(self.hashes):
            return self
        picked = pa.array(rows)
        return Wanted(
            self.hashes[rows],
            [k.take(picked) for k in self.keys],
            None if self.entries is None else self.entries[rows],
            [c.take(picked) for c in self.entry_columns],
        )


def identities_of(hashes: Hashes, entries: Hashes | None) -> Hashes:
    """Return for each row a number that is spread over 64 bits and depends on its hash and entry."""
    return (hashes if entries is None else hashes ^ (entries * _SPREAD)) * _SPREAD


class Marks:
    """Which rows may be in a batch: a table with a mark for each row in it, by the upper bits of its identity.

    Newer runs have few of the wanted rows. A search for an absent row takes as long as one for a row that is there.
    Marks exclude nearly all absent rows, in a fraction of the time.
    """

    def __init__(self, identities: Hashes) -> None:
        bits = max(1, (_PLACES_PER_ROW * len(identities)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._marks: Mask = np.zeros(1 << bits, dtype=np.bool_)
        self._marks[self._places(identities)] = True

    def may_have(self, identities: Hashes) -> Mask:
        """Return for each wanted row whether it may be there; false is certain."""
        marked: Mask = self._marks[self._places(identities)]
        return marked

    def _places(self, identities: Hashes) -> Positions:
        places: Positions = (identities >> self._shift).view(np.int64)
        return places


@dataclass(frozen=True)
class Asked:
    """The answer of one piece to a look-up of rows.

    Attributes:
        found: numbers of the rows that it has, ascending.
        at: the position of each of them.
        answered: numbers of the rows whose search is over, because they were found or their key was cleared.
    """

    found: Positions
    at: Positions
    answered: Positions


@dataclass(frozen=True)
class Piece:
    """The live rows of one file of a run.

    Attributes:
        age: of the run; the newest has the lowest.
        batch: the rows that no merge has moved, a slice of `data.batch` from position `first` on. (Rows behind it
            belong to another shard, see `RunFile`.)
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
        """Return which of some sorted hashes are in the piece's range: pieces of one run have neighbouring ranges."""
        low, high = self.hash_range
        return slice(int(np.searchsorted(hashes, low, side="left")), int(np.searchsorted(hashes, high, side="right")))

    def ask(self, schema: StateSchema, wanted: Wanted, asked: Positions) -> Asked:
        """Look some rows up, at least one.

        The key columns are not brought into the order of `asked` before the search by hash: most pieces have few of
        the hashes, and taking all keys for each piece was most of a look-up's time.

        Args:
            asked: which of the wanted rows, ascending.
        """
        if not self._worth_marking(schema, len(asked)):
            return self._search(schema, wanted, asked)
        some = np.flatnonzero(self._marks.may_have(wanted.identities[asked]))
        if len(some) == 0:
            return Asked(some, some, some)
        said = self._search(schema, wanted, asked[some])
        found = some[said.found]
        return Asked(found, said.at, found)

    def _search(self, schema: StateSchema, wanted: Wanted, asked: Positions) -> Asked:
        rows = asked if len(asked) < len(wanted.hashes) else None
        hashes = wanted.hashes if rows is None else wanted.hashes[asked]
        if wanted.entries is None:
            found, at = matches(self.batch, schema, hashes, wanted.keys, rows)
            return Asked(found, at, found)
        found, at, cleared = matches_of_entries(
            self.batch, schema, hashes, wanted.keys, wanted.entries[asked], wanted.entry_columns, rows
        )
        return Asked(found, at, found if len(cleared) == 0 else np.union1d(found, cleared))

    def _worth_marking(self, schema: StateSchema, asked: int) -> bool:
        """Return whether marks save more than they cost. If keys were cleared, marks of rows are not enough."""
        if asked < _MARKED_MIN or self.batch.num_rows > _MARKED_ROWS_MAX * asked:
            return False
        return schema.entries is None or not self.data.has_clear_markers

    @cached_property
    def _marks(self) -> Marks:
        entries = entries_of(self.batch) if self.batch.schema.names[2] == ENTRY else None
        return Marks(identities_of(hashes_of(self.batch), entries))

    def due_between(self, after_ms: int | None, through_ms: int) -> slice:
        """Return the places in the index by time with `after_ms < due <= through_ms`; a binary search."""
        order, due = self.data.due_order, self.data.due
        start = 0 if after_ms is None else bisect_right(order, after_ms, key=lambda at: due[at])
        return slice(start, bisect_right(order, through_ms, lo=start, key=lambda at: due[at]))

    def rows_at(self, places: slice) -> pa.RecordBatch:
        """Return the rows at places of the index, in their order in the batch, without those that a merge has moved."""
        at = np.sort(self.data.due_order[places])
        inside = slice(int(np.searchsorted(at, self.first)), int(np.searchsorted(at, self.first + self.batch.num_rows)))
        return self.data.batch.take(pa.array(at[inside]))

    def earliest_due(self) -> int | None:
        """Return the least due of the rows, without the index; None if no row is ever due."""
        times = self.batch.column(self.batch.num_columns - 1)
        due = int64_values(times)[_is_due(times, self.batch.column(1))]
        return int(due.min()) if len(due) else None
