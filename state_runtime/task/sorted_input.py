"""A shard's input as passes, each in order of the key hashes: rows of this epoch, in memory or sorted on disk, and rows
that earlier epochs left.

The caller that takes rows from a pass gives an approximate number; keys of one hash stay together. Rows that were not
taken are left. A hash with more rows than may be held at once comes in pieces, which are read while an operator
processes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from state_runtime.changelog.inflight import RowsLeft, RowsPart
from state_runtime.changelog.rows import rows_batch
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.slices import cut, without_rows
from state_runtime.state.table import HASH_MAX, Hashes, Positions, concat

__all__ = ["KeyColumns", "MemoryPass", "RowPass", "SortedRows", "SpilledPass", "StoredPass", "Taken", "batch_of"]


@dataclass(frozen=True)
class Taken:
    """Some keys with their rows.

    Attributes:
        rest: of a hash that comes in pieces, the rows after `rows`; see `RowSlice.rest`.
    """

    rows: GroupedRows
    rest: Iterator[GroupedRows] | None = None

    def pieces(self) -> Iterator[GroupedRows]:
        """Yield all of the rows."""
        yield self.rows
        yield from self.rest or ()


class RowPass(Protocol):
    """The rows of one epoch.

    Attributes:
        epoch: that read them; 0 for the one that is under way.
    """

    epoch: int

    @property
    def rows_left(self) -> int: ...

    @property
    def bytes_left(self) -> int: ...

    @property
    def is_bounded(self) -> bool:
        """Whether all remaining rows are in memory in any case."""
        ...

    def take(self, rows_max: int) -> Taken | None:
        """Take the next keys: about `rows_max` rows, at least all of one key; None if no row is left."""
        ...

    def left(self) -> tuple[RowsLeft, ...]:
        """Return the remaining rows, by ranges of hashes in ascending order."""
        ...

    def none(self) -> GroupedRows:
        """Return no rows, in the columns of the pass."""
        ...


@dataclass(frozen=True)
class KeyColumns:
    """How an operator's rows are grouped."""

    names: tuple[str, ...]
    schema: pa.Schema

    def group(self, rows: pa.RecordBatch, hashes: Hashes, places: Positions) -> GroupedRows:
        """Sort and group rows."""
        return group_rows(rows, hashes, places, self.names, self.schema)


def batch_of(rows: GroupedRows) -> pa.RecordBatch:
    """Return grouped rows in the form in which they are stored in flight."""
    return rows_batch(np.repeat(rows.hashes, rows.stops - rows.starts), rows.sequence, rows.rows)


class MemoryPass:
    """This epoch's rows, all in memory."""

    epoch = 0
    is_bounded = True

    def __init__(self, rows: GroupedRows) -> None:
        self._rows = rows
        self._first = 0
        self._row_bytes = rows.rows.nbytes / max(1, rows.rows.num_rows)

    @property
    def rows_left(self) -> int:
        rows = self._rows
        return int(rows.stops[-1] - rows.starts[self._first]) if self._first < rows.groups else 0

    @property
    def bytes_left(self) -> int:
        return int(self.rows_left * self._row_bytes)

    def take(self, rows_max: int) -> Taken | None:
        rows, first = self._rows, self._first
        if first == rows.groups:
            return None
        end = max(first + 1, int(np.searchsorted(rows.stops, rows.starts[first] + rows_max, side="right")))
        while end < rows.groups and rows.hashes[end] == rows.hashes[end - 1]:
            end += 1
        self._first = end
        return Taken(cut(rows, first, end))

    def left(self) -> tuple[RowsLeft, ...]:
        if not self.rows_left:
            return ()
        low, high = int(self._rows.hashes[self._first]), int(self._rows.hashes[-1])
        return (RowsLeft(low, high, self.rows_left, self.bytes_left),)

    def none(self) -> GroupedRows:
        return without_rows(self._rows)


@dataclass(frozen=True)
class SortedRows:
    """Rows in the order of (hash, place), mapped from disk or in memory.

    Attributes:
        rows: data columns.
    """

    rows: pa.RecordBatch
    hashes: Hashes
    places: Positions

    def slice(self, first: int, end: int) -> SortedRows:
        """Return the rows from number `first` up to (without) `end`; nothing is copied."""
        return SortedRows(self.rows.slice(first, end - first), self.hashes[first:end], self.places[first:end])

    def __len__(self) -> int:
        return len(self.hashes)


class SpilledPass:
    """This epoch's rows in several sorted runs.

    Args:
        runs: at least one; each has rows.
        rows_held_max: the maximum number of rows of one hash that are held at once.
    """

    epoch = 0
    is_bounded = False

    def __init__(self, runs: Sequence[SortedRows], keys: KeyColumns, rows_held_max: int) -> None:
        self._runs = runs
        self._keys = keys
        self._rows_held_max = rows_held_max
        self._at = [0] * len(runs)
        self._row_bytes = sum(r.rows.nbytes for r in runs) / sum(map(len, runs))

    @property
    def rows_left(self) -> int:
        return sum(len(run) - at for run, at in zip(self._runs, self._at))

    @property
    def bytes_left(self) -> int:
        return int(self.rows_left * self._row_bytes)

    def take(self, rows_max: int) -> Taken | None:
        if not self.rows_left:
            return None
        low = self._lowest()
        ends = self._ends(low)
        if self._count(ends) > self._rows_held_max:
            return self._in_pieces(ends)
        if self.rows_left <= rows_max:
            ends = [len(run) for run in self._runs]
        else:
            ends = self._ends(self._last_hash(low, rows_max))
        return Taken(self._grouped(self._go_to(ends)))

    def _lowest(self) -> int:
        return min(int(run.hashes[at]) for run, at in zip(self._runs, self._at) if at < len(run))

    def _ends(self, last: int) -> list[int]:
        """Return, per run, where the rows of hashes up to `last` end."""
        return [
            at + int(np.searchsorted(run.hashes[at:], np.uint64(last), side="right"))
            for run, at in zip(self._runs, self._at)
        ]

    def _count(self, ends: Sequence[int]) -> int:
        return sum(end - at for end, at in zip(ends, self._at))

    def _last_hash(self, low: int, rows_max: int) -> int:
        """Return the greatest hash up to which there are at most `rows_max` rows; at least the lowest hash."""
        fits, too_many = low, HASH_MAX
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._count(self._ends(middle)) <= rows_max:
                fits = middle
            else:
                too_many = middle
        return fits

    def _go_to(self, ends: list[int]) -> list[SortedRows]:
        taken = [run.slice(at, end) for run, at, end in zip(self._runs, self._at, ends) if end > at]
        self._at = ends
        return taken

    def _grouped(self, taken: Sequence[SortedRows]) -> GroupedRows:
        rows = concat([t.rows for t in taken], taken[0].rows.schema)
        return self._keys.group(
            rows, np.concatenate([t.hashes for t in taken]), np.concatenate([t.places for t in taken])
        )

    def _in_pieces(self, ends: list[int]) -> Taken:
        """Take the rows of one hash, in order of their places."""
        pieces = _pieces_by_place(self._go_to(ends), self._rows_held_max, self._grouped)
        return Taken(next(pieces), pieces)

    def left(self) -> tuple[RowsLeft, ...]:
        if not self.rows_left:
            return ()
        high = max(int(run.hashes[-1]) for run, at in zip(self._runs, self._at) if at < len(run))
        return (RowsLeft(self._lowest(), high, self.rows_left, self.bytes_left),)

    def none(self) -> GroupedRows:
        return self._grouped([self._runs[0].slice(0, 0)])


def _pieces_by_place(
    runs: Sequence[SortedRows], rows_max: int, grouped: Callable[[Sequence[SortedRows]], GroupedRows]
) -> Iterator[GroupedRows]:
    """Yield the rows of one hash, at most `rows_max` at a time, merged by their places."""
    done = 0
    while runs:
        last = _last_place(runs, rows_max)
        ends = [_end(run, last) for run in runs]
        piece = [run.slice(0, end) for run, end in zip(runs, ends) if end]
        runs = [run.slice(end, len(run)) for run, end in zip(runs, ends) if end < len(run)]
        yield replace(grouped(piece), first_place=done)
        done += sum(map(len, piece))


def _last_place(runs: Sequence[SortedRows], rows_max: int) -> int:
    """Return the greatest place up to which there are at most `rows_max` rows; at least the lowest place."""
    fits = min(int(run.places[0]) for run in runs)
    too_many = min((int(run.places[rows_max]) for run in runs if len(run) > rows_max), default=None)
    if too_many is None:
        too_many = max(int(run.places[-1]) for run in runs) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if sum(_end(run, middle) for run in runs) <= rows_max:
            fits = middle
        else:
            too_many = middle
    return fits


def _end(run: SortedRows, last_place: int) -> int:
    return int(np.searchsorted(run.places, np.int64(last_place), side="right"))


class StoredPass:
    """The rows that an earlier epoch left, read part by part.

    Args:
        epoch: that read the rows.
        parts: in order of hash; each is read when its rows are due.
        ranges: closed, ascending: the remaining rows of the shard.
        read: returns a part's rows, checked.
        empty: no rows, in the columns that the operator reads.
    """

    is_bounded = False

    def __init__(
        self,
        epoch: int,
        parts: Sequence[RowsPart],
        ranges: Sequence[RowsLeft],
        read: Callable[[RowsPart], SortedRows],
        keys: KeyColumns,
        empty: pa.RecordBatch,
    ) -> None:
        self.epoch = epoch
        self._ranges = tuple(ranges)
        self._parts = [p for p in parts if any(_meets(p, r) for r in ranges)]
        self._read = read
        self._keys = keys
        self._empty = empty
        self._next = 0  # number of the part after the one that is held
        self._held: SortedRows | None = None
        self._at = 0
        self._is_touched = False

    @property
    def rows_left(self) -> int:
        return sum(left.rows for left in self.left())

    @property
    def bytes_left(self) -> int:
        return sum(left.bytes for left in self.left())

    def take(self, rows_max: int) -> Taken | None:
        # A range may have no row: this can happen to a range that was cut by shards, even if its share says otherwise.
        self._is_touched = True
        held = self._hold()
        if held is None:
            return None
        first, end = self._at, min(self._at + rows_max, len(held))
        end_of_hash = int(np.searchsorted(held.hashes, held.hashes[end - 1], side="right"))
        if end_of_hash > end:
            start_of_hash = int(np.searchsorted(held.hashes, held.hashes[end - 1], side="left"))
            end = start_of_hash if start_of_hash > first else end_of_hash
        if end == len(held) and self._goes_on(int(held.hashes[-1])):
            start = int(np.searchsorted(held.hashes, held.hashes[-1], side="left"))
            if start <= first:
                return self._in_pieces(held, first)
            end = start
        self._at = end
        return Taken(self._grouped(held.slice(first, end)))

    def _hold(self) -> SortedRows | None:
        """Return the part with the next rows; None if there are no more."""
        while self._held is None or self._at == len(self._held):
            if self._next == len(self._parts):
                self._held = None
                return None
            self._held, self._at = self._within_ranges(self._read(self._parts[self._next])), 0
            self._next += 1
        return self._held

    def _within_ranges(self, rows: SortedRows) -> SortedRows:
        kept = []
        for left in self._ranges:
            first = int(np.searchsorted(rows.hashes, np.uint64(left.hash_low), side="left"))
            end = int(np.searchsorted(rows.hashes, np.uint64(left.hash_high), side="right"))
            if first < end:
                kept.append(rows.slice(first, end))
        return kept[0] if len(kept) == 1 else _joined(kept, self._empty)

    def _goes_on(self, key_hash: int) -> bool:
        """Return whether the part after the held one has more rows of a hash."""
        return self._next < len(self._parts) and self._parts[self._next].part.hash_low == key_hash

    def _in_pieces(self, held: SortedRows, first: int) -> Taken:
        """Take the rows of a hash that several parts hold."""
        key_hash = int(held.hashes[first])
        after = self._next
        while after < len(self._parts) and self._parts[after].part.hash_low == key_hash:
            after += 1
        more, self._next = self._parts[self._next : after], after
        self._at = len(held)
        if more[-1].part.hash_high > key_hash:  # the part also has other hashes, for which it is read once more
            self._held = self._within_ranges(self._read(more[-1]))
            self._at = int(np.searchsorted(self._held.hashes, np.uint64(key_hash), side="right"))

        def rest() -> Iterator[GroupedRows]:
            done = len(held) - first
            for part in more:
                rows = self._read(part)
                piece = rows.slice(0, int(np.searchsorted(rows.hashes, np.uint64(key_hash), side="right")))
                yield replace(self._grouped(piece), first_place=done)
                done += len(piece)

        return Taken(self._grouped(held.slice(first, len(held))), rest())

    def _grouped(self, rows: SortedRows) -> GroupedRows:
        return replace(self._keys.group(rows.rows, rows.hashes, rows.places), epoch=self.epoch)

    def left(self) -> tuple[RowsLeft, ...]:
        if not self._is_touched:
            return self._ranges
        held = self._held if self._held is not None and self._at < len(self._held) else None
        later = self._parts[self._next :]
        if held is not None:
            lowest = int(held.hashes[self._at])
        elif later:
            lowest = later[0].part.hash_low
        else:
            return ()
        left = [replace(r, hash_low=max(r.hash_low, lowest)) for r in self._ranges if r.hash_high >= lowest]
        return tuple(_counted(r, held, self._at, later) for r in left)

    def none(self) -> GroupedRows:
        return self._grouped(SortedRows(self._empty, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)))


def _meets(held: RowsPart, left: RowsLeft) -> bool:
    return left.hash_low <= held.part.hash_high and held.part.hash_low <= left.hash_high


def _joined(kept: Sequence[SortedRows], empty: pa.RecordBatch) -> SortedRows:
    if not kept:
        return SortedRows(empty, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64))
    return SortedRows(
        concat([k.rows for k in kept], empty.schema),
        np.concatenate([k.hashes for k in kept]),
        np.concatenate([k.places for k in kept]),
    )


def _counted(left: RowsLeft, held: SortedRows | None, at: int, later: Sequence[RowsPart]) -> RowsLeft:
    """Count the rows that a range still has: exactly in the held part, in other parts by their share of the range."""
    rows = size = 0.0
    if held is not None:
        first = max(at, int(np.searchsorted(held.hashes, np.uint64(left.hash_low), side="left")))
        end = int(np.searchsorted(held.hashes, np.uint64(left.hash_high), side="right"))
        rows += max(0, end - first)
        size += max(0, end - first) * held.rows.nbytes / len(held)
    for other in later:
        low, high = max(left.hash_low, other.part.hash_low), min(left.hash_high, other.part.hash_high)
        if low <= high:
            share = (high - low + 1) / (other.part.hash_high - other.part.hash_low + 1)
            rows += other.part.rows * share
            size += other.part.raw_bytes * share
    return replace(left, rows=round(rows), bytes=round(size))
