"""The stream-stream interval join: equal keys and times within a range, without a Python loop over rows or keys.

    left.key = right.key  and  left.time + lower <= right.time <= left.time + upper

Rows of both sides wait in state until the watermark says that no later row of the other side can match them. The
behaviour is that of Spark's stream-stream join, batch for batch:

- A row with event time at or below the late watermark is dropped. Then all new rows are matched, with stored ones and
  with each other; only then is state removed. So a row that arrives with its time already past still meets the stored
  rows.
- A left row is removed when `watermark - upper` has passed its time, a right row when `watermark + lower` has; Spark
  removes one millisecond later than necessary, and so does Stillstate (`JoinTerms.stays_ms`). Without such an end of
  the range it stays for ever.
- Outer: a row of the side that never matched is emitted, with nulls for the other side, when it is removed; one that a
  condition on its side alone rules out comes at once, and does not wait.
- Left semi: a left row is emitted once, with its first match, and does not wait any more.
- A null key matches nothing, not even null. An outer side emits such a row when its time comes.
- A null time matches nothing if there is a range, and no watermark passes it. Spark's outer join keeps such a row for
  ever and never emits it; here it is dropped at once, which gives the same output without the leak.

The input holds both streams: see `processors/sides.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_runtime.base.joining import Column
from state_runtime.processors.builtin.interval_join_plan import LEFT, RIGHT, IntervalJoinPlan
from state_runtime.processors.builtin.pair_condition import holds
from state_runtime.processors.builtin.stream_join import StreamJoin
from state_runtime.processors.event_time import Times, micros_of, millis_up, plus
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import (
    EpochClock,
    ShardResult,
)
from state_runtime.processors.places import STORED_ROWS_PER_READ, Places
from state_runtime.processors.sides import JoinSide, SideRows
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Hashes, Mask, Positions, entries_of, hashes_of, in_order

__all__ = ["IntervalJoinOperator"]

SCALE_MAX = 1 << 62
"""Maximum of key and time combined on a scale of microseconds."""

_NEVER: Final = np.iinfo(np.int64).max
"""When a row is due that stays for ever; null in state."""


@dataclass
class _Rows:
    """Rows of one side, new or stored.

    Attributes:
        group: number of the row's key among the epoch's keys.
        hashes: key hash of each row.
        micros: event time of each row.
        entries, matched: of stored rows their places, and (outer sides) whether they matched in an earlier epoch.
        now: whether they matched in this one.
    """

    group: Positions
    hashes: Hashes
    keys: list[pa.Array]
    values: list[pa.Array]
    micros: Times
    entries: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    matched: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    now: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.now = np.zeros(len(self.hashes), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.hashes)

    def pick(self, at: Positions) -> _Rows:
        """Return some of the rows."""
        taken = pa.array(at)
        picked = _Rows(
            group=self.group[at],
            hashes=self.hashes[at],
            keys=[k.take(taken) for k in self.keys],
            values=[v.take(taken) for v in self.values],
            micros=self.micros[at],
            entries=self.entries[at] if len(self.entries) else self.entries,
            matched=self.matched[at] if len(self.matched) else self.matched,
        )
        picked.now = self.now[at]
        return picked


class _TimeIndex:
    """Rows in order of (key, time), to find the rows of a key within a range of time by binary search.

    Key and time are combined to one number, on a scale of microseconds since the earliest row. If that does not fit a
    long, a scale of ranks is used, which takes two more searches.
    """

    def __init__(self, rows: _Rows) -> None:
        self._first, self._last = int(rows.micros.min()), int(rows.micros.max())
        self._ranked: Times | None = None
        self._stride = self._last - self._first + 2
        self._beyond = int(rows.group.max()) + 1  # represents all keys that have no row here
        if (self._beyond + 1) * self._stride > SCALE_MAX:
            self._ranked = np.sort(rows.micros)
            self._stride = len(rows) + 1
        numbers = rows.group * self._stride + self._before(rows.micros)
        self.order: Positions = np.argsort(numbers, kind="stable")
        self._numbers = numbers[self.order]

    def _before(self, micros: Times) -> Positions:
        """Return where on the scale a time begins: rows of earlier times are below."""
        if self._ranked is not None:
            return np.searchsorted(self._ranked, micros, side="left")
        place: Positions = np.clip(micros, self._first, self._last) - self._first + (micros > self._last)
        return place

    def _after(self, micros: Times) -> Positions:
        """Return where on the scale a time ends: rows of later times are there or above."""
        if self._ranked is not None:
            return np.searchsorted(self._ranked, micros, side="right")
        place: Positions = np.clip(micros, self._first, self._last) - self._first + (micros >= self._first)
        return place

    def ranges(self, left: _Rows, lower_us: int, upper_us: int) -> tuple[Positions, Positions]:
        """Return per left row the first match's position in `order`, and the number of matches."""
        base = np.minimum(left.group, self._beyond) * self._stride
        low = base + self._before(plus(left.micros, lower_us))
        begin = np.searchsorted(self._numbers, low, side="left")
        high = base + self._after(plus(left.micros, upper_us))
        return begin, np.searchsorted(self._numbers, high, side="left") - begin


@dataclass(frozen=True)
class IntervalJoinOperator(StreamJoin):
    """The operator; emits matches as they are found, and unmatched rows of outer sides when they are removed. A stored
    row is due when no other row can match it any more."""

    kind = "interval-join"

    @staticmethod
    def values_of(plan: IntervalJoinPlan) -> Mapping[str, pa.Schema]:
        """See `StreamJoin.values_of`; rows of an outer side say whether they have matched."""
        return plan.state_values

    @property
    def modes(self) -> str:
        return self.plan.modes

    def _run(
        self,
        clock: EpochClock,
        places: Places,
        rows: GroupedRows,
        version: StateReader,
        result: ShardResult,
        *,
        due: bool,
    ) -> Iterator[pa.RecordBatch]:
        clock = clock if due else clock.held
        left = yield from self._new_rows(self._left, rows, clock, result)
        right = yield from self._new_rows(self._right, rows, clock, result)
        flips: dict[str, list[_Rows]] = {LEFT: [], RIGHT: []}
        for stored in self._stored(self._right, left, rows, version):
            yield from self._match(left, stored)
            flips[RIGHT] += self._first_matches(self._right, stored)
        if len(right):
            index = _TimeIndex(right)
            for stored in self._stored(self._left, right, rows, version):
                yield from self._match(stored, right, index)
                flips[LEFT] += self._first_matches(self._left, stored)
            yield from self._match(left, right, index)
        for side, new in ((self._left, left), (self._right, right)):
            first = _together(flips[side.name], side.columns, self.plan.keys)
            if self.plan.is_semi and side.name == LEFT:
                yield from self._left_rows(first)
                yield from self._left_rows(new.pick(np.flatnonzero(new.now)))
            gone = self._due(side.name, version, clock, result) if due else self.state_schemas[side.name].empty()
            yield from self._remove_and_store(side, new, first, gone, places, clock, result)

    @property
    def _left(self) -> JoinSide:
        return self.plan.sides["left"]

    @property
    def _right(self) -> JoinSide:
        return self.plan.sides["right"]

    def _due(self, name: str, version: StateReader, clock: EpochClock, result: ShardResult) -> pa.RecordBatch:
        result.due_taken[name] = clock.watermark_ms
        return version.due(name, clock.watermark_ms)

    def _first_matches(self, side: JoinSide, stored: _Rows) -> list[_Rows]:
        """Return which stored rows have matched now and never before, if that is to be noted."""
        is_noted = side.is_outer or (self.plan.is_semi and side.name == LEFT)
        return [stored.pick(np.flatnonzero(stored.now & ~stored.matched))] if is_noted else []

    def _remove_and_store(
        self,
        side: JoinSide,
        new: _Rows,
        flipped: _Rows,
        gone: pa.RecordBatch,
        places: Places,
        clock: EpochClock,
        result: ShardResult,
    ) -> Iterator[pa.RecordBatch]:
        """Remove the rows of one side that the watermark has passed, stored or new; keep new rows that may still match.

        Args:
            flipped: stored rows with their first match.
            gone: stored rows that are due.
        """
        stays = _due_of(side, new.micros) > clock.watermark_ms
        if side.is_outer:
            yield from self._unmatched(side, gone, flipped)
            yield from self._with_nulls(side, new.pick(np.flatnonzero(~stays & ~new.now)))
        if self.plan.is_semi and side.name == LEFT:
            stays &= ~new.now
        kept = new.pick(np.flatnonzero(stays))
        # What is due goes anyway.
        flipped = flipped.pick(np.flatnonzero(_due_of(side, flipped.micros) > clock.watermark_ms))
        result.changes[side.name] = self._changes(side, kept, flipped, gone, places)
        result.rows_added += len(kept) - gone.num_rows - (0 if side.is_outer else len(flipped))

    # --- rows ----------------------------------------------------------------------------------------------------

    def _new_rows(
        self, side: JoinSide, rows: GroupedRows, clock: EpochClock, result: ShardResult
    ) -> Generator[pa.RecordBatch, None, _Rows]:
        """Return the side's rows of the epoch that can contribute to the result; yield those that are answered already:
        nothing can match them."""
        if rows.groups == 0:
            return _together([], side.columns, self.plan.keys)
        given = SideRows(side, self.plan.keys, rows)
        keep, (_, valid) = given.on_time(clock, result), given.times
        if side.when:
            never = ~given.column(side.when).fill_null(False).to_numpy(zero_copy_only=False)
            yield from self._with_nulls(side, _picked(given, given.group, keep & never))
            keep &= ~never
        if valid is not None and self.plan.terms.has_range:
            keep &= valid
        no_key = given.has_no_key[given.group]
        if not side.is_outer:
            keep &= ~no_key
        # A key that no row of the other side has.
        return _picked(given, np.where(no_key, rows.groups + side.number, given.group), keep)

    def _stored(self, side: JoinSide, new: _Rows, rows: GroupedRows, version: StateReader) -> Iterator[_Rows]:
        """Yield stored rows of a side for the keys of the other side's new rows; a bounded number of keys at a time."""
        group = new.group[new.group < rows.groups]
        if len(group) == 0:
            return
        touched = group[np.append(True, group[1:] != group[:-1])]  # rows come key after key
        bounds = version.entry_bounds(side.name, rows.hashes[touched])
        touched, bounds = touched[bounds > 0], bounds[bounds > 0]
        piece = np.cumsum(bounds) // STORED_ROWS_PER_READ
        for keys in np.split(touched, np.flatnonzero(np.diff(piece)) + 1):
            if len(keys) == 0:
                continue
            taken = pa.array(keys)
            batch, offsets = version.read_entries(side.name, rows.hashes[keys], [k.take(taken) for k in rows.keys])
            if batch.num_rows:
                yield self._rows_of(side, batch, np.repeat(keys, np.diff(offsets)))

    def _rows_of(self, side: JoinSide, batch: pa.RecordBatch, group: Positions) -> _Rows:
        """Return stored rows as `_Rows`."""
        schema = self.state_schemas[side.name]
        values = schema.values_of(batch)
        matched = np.zeros(batch.num_rows, dtype=np.bool_)
        if side.is_outer:
            matched = values.pop().to_numpy(zero_copy_only=False)
        micros = np.zeros(batch.num_rows, dtype=np.int64)
        if side.time:
            micros, _ = micros_of(values[side.columns.get_field_index(side.time)])
        return _Rows(
            group=group,
            hashes=hashes_of(batch),
            keys=schema.keys_of(batch),
            values=values,
            micros=micros,
            entries=entries_of(batch),
            matched=matched,
        )

    # --- output --------------------------------------------------------------------------------------------------

    def _match(self, left: _Rows, right: _Rows, index: _TimeIndex | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all pairs of two sets of rows, of a semi join none; note which rows have one."""
        if len(left) == 0 or len(right) == 0:
            return
        index = index or _TimeIndex(right)
        begin, counts = index.ranges(left, self.plan.terms.lower_us, self.plan.terms.upper_us)
        hits = np.flatnonzero(counts)
        condition = self.plan.terms.condition
        if condition is None:
            left.now[hits] = True
            if self.plan.is_semi:
                return
        begin, ends = begin[hits], np.cumsum(counts[hits])
        firsts = ends - counts[hits]
        total = int(ends[-1]) if len(hits) else 0
        for start in range(0, total, self.output_rows_per_batch):
            stop = min(start + self.output_rows_per_batch, total)
            # The pairs start … stop: the left rows whose pairs overlap this range, the first and last perhaps in part.
            chosen = slice(int(np.searchsorted(ends, start, "right")), int(np.searchsorted(firsts, stop, "left")))
            low = np.maximum(firsts[chosen], start)
            count = np.minimum(ends[chosen], stop) - low
            ordinal = np.arange(start, stop) - np.repeat(firsts[chosen], count)
            left_at = np.repeat(hits[chosen], count)
            right_at = index.order[np.repeat(begin[chosen], count) + ordinal]
            if condition is not None:
                true = holds(condition, partial(self._column, left, left_at, right, right_at))
                left_at, right_at = left_at[true], right_at[true]
                left.now[left_at] = True
            right.now[right_at] = True
            if len(left_at) and not self.plan.is_semi:
                yield self._output(left, left_at, right, right_at)

    def _column(self, left: _Rows, left_at: Positions, right: _Rows, right_at: Positions, of: Column) -> pa.Array:
        """Return a column of pairs."""
        rows, at = (left, left_at) if of.side == LEFT else (right, right_at)
        return _take(rows.values[self.plan.sides[of.side].columns.get_field_index(of.name)], at)

    def _output(self, left: _Rows, left_at: Positions, right: _Rows, right_at: Positions) -> pa.RecordBatch:
        ours, theirs = pa.array(left_at), pa.array(right_at)
        columns = [c.take(ours) for c in (*left.keys, *left.values)] + [c.take(theirs) for c in right.values]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def _left_rows(self, rows: _Rows) -> Iterator[pa.RecordBatch]:
        """Yield left rows, without anything of the right side."""
        for start in range(0, len(rows), self.output_rows_per_batch):
            columns = [c.slice(start, self.output_rows_per_batch) for c in (*rows.keys, *rows.values)]
            yield pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def _with_nulls(self, side: JoinSide, rows: _Rows) -> Iterator[pa.RecordBatch]:
        """Yield a side's rows without a match, with nulls for the other side."""
        for start in range(0, len(rows), self.output_rows_per_batch):
            keys = [c.slice(start, self.output_rows_per_batch) for c in rows.keys]
            own = [c.slice(start, self.output_rows_per_batch) for c in rows.values]
            nulls = [pa.nulls(len(keys[0]), f.type) for f in (self.plan.right if side.name == LEFT else self.plan.left)]
            columns = [*own, *nulls] if side.name == LEFT else [*nulls, *own]
            yield pa.RecordBatch.from_arrays([*keys, *columns], schema=self.output_schema)

    def _unmatched(self, side: JoinSide, gone: pa.RecordBatch, flipped: _Rows) -> Iterator[pa.RecordBatch]:
        """Yield removed rows that matched neither in an earlier epoch nor in this one."""
        if gone.num_rows == 0:
            return
        rows = self._rows_of(side, gone, np.zeros(gone.num_rows, dtype=np.int64))
        now = _contains(flipped.hashes, flipped.entries, rows.hashes, rows.entries)
        yield from self._with_nulls(side, rows.pick(np.flatnonzero(~rows.matched & ~now)))

    # --- state ---------------------------------------------------------------------------------------------------

    def _changes(
        self, side: JoinSide, new: _Rows, flipped: _Rows, gone: pa.RecordBatch, places: Places
    ) -> pa.RecordBatch:
        """Return new rows, rows that have matched for the first time, and tombstones, as a sorted batch."""
        schema = self.state_schemas[side.name]
        new.entries = places.next(len(new))
        batches = [self._kept(side, new, new.now)]
        removed = [gone] if gone.num_rows else []
        if len(flipped):
            noted = self._kept(side, flipped, np.ones(len(flipped), dtype=np.bool_))
            (batches if side.is_outer else removed).append(noted)
        for each in removed:
            nothing = [pa.nulls(each.num_rows, f.type) for f in schema.values]
            deleted = np.ones(each.num_rows, dtype=np.bool_)
            batches.append(
                schema.batch(
                    hashes_of(each), deleted, schema.keys_of(each), nothing, entries=entries_of(each),
                    times=pa.nulls(each.num_rows, pa.int64()),
                )
            )  # fmt: skip
        if len(batches) == 1:
            return batches[0]
        return in_order(pa.concat_batches(batches))

    def _kept(self, side: JoinSide, rows: _Rows, matched: Mask) -> pa.RecordBatch:
        """Return rows of a side as its state has them."""
        due = _due_of(side, rows.micros)
        values = [*rows.values, *([pa.array(matched)] if side.is_outer else [])]
        times = pa.array(due, mask=due == _NEVER)
        return self.state_schemas[side.name].batch(
            rows.hashes, None, rows.keys, values, entries=rows.entries, times=times
        )


def _picked(given: SideRows, group: Positions, keep: Mask) -> _Rows:
    """Return some of a side's new rows."""
    return _Rows(group[keep], *given.picked(keep), given.times[0][keep])


def _due_of(side: JoinSide, micros: Times) -> Times:
    """Return the first watermark (ms) that removes a row: the earliest for Spark's `time <= watermark - …`."""
    if side.stays_ms is None:
        return np.full(len(micros), _NEVER)
    return plus(millis_up(micros), side.stays_ms)


def _together(parts: list[_Rows], columns: pa.Schema, keys: pa.Schema) -> _Rows:
    """Return rows of several reads in one piece."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]

    def joined(arrays: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)

    def stacked(arrays: list[list[pa.Array]], schema: pa.Schema) -> list[pa.Array]:
        if not arrays:
            return [pa.nulls(0, f.type) for f in schema]
        return [pa.concat_arrays([part[i] for part in arrays]) for i in range(len(schema))]

    return _Rows(
        group=joined([p.group for p in parts], np.int64),
        hashes=joined([p.hashes for p in parts], np.uint64),
        keys=stacked([p.keys for p in parts], keys),
        values=stacked([p.values for p in parts], columns),
        micros=joined([p.micros for p in parts], np.int64),
        entries=joined([p.entries for p in parts], np.uint64),
        matched=joined([p.matched for p in parts], np.bool_),
    )


def _contains(hashes: Hashes, entries: Hashes, wanted_hashes: Hashes, wanted_entries: Hashes) -> Mask:
    """Return which wanted (hash, entry) pairs are among the given ones; both sides have no duplicate pairs."""
    there = np.zeros(len(wanted_hashes), dtype=np.bool_)
    if len(hashes) == 0:
        return there
    all_hashes, all_entries = np.concatenate((wanted_hashes, hashes)), np.concatenate((wanted_entries, entries))
    order = np.lexsort((all_entries, all_hashes))  # stable: of equal pairs the wanted one comes first
    before, after = order[:-1], order[1:]
    same = (all_hashes[before] == all_hashes[after]) & (all_entries[before] == all_entries[after])
    there[before[same]] = True
    return there


def _take(column: pa.Array, at: Positions) -> pa.Array:
    return column.take(pa.array(at))
