"""The stream-stream interval join: equal keys and times within a range, without a Python loop over rows or keys.

    left.key = right.key  and  left.time + lower <= right.time <= left.time + upper

Rows of both sides wait in state until the watermark says that no later row of the other side can match them. The
behaviour is that of Spark's stream-stream join with a time range, batch for batch:

- A row with event time at or below the late watermark is dropped. Then all new rows are matched, with stored ones and
  with each other; only then is state removed. So a row that arrives with its time already past still meets the stored
  rows.
- A left row is removed when `watermark - upper` has passed its time, a right row when `watermark + lower` has; Spark
  removes one millisecond later than necessary, and so does Stillstate (`due` below).
- Left outer: a left row that never matched is emitted, with nulls for the right side, when it is removed.
- A null key matches nothing, not even null. Left outer emits such a row when its time comes.
- A null time matches nothing, and no watermark passes it. Spark's left outer join keeps such a row for ever and never
  emits it; here it is dropped at once, which gives the same output without the leak.

The input holds both streams, told apart by a column:

    <key columns>        …        named as on the left side
    __stillstate_side    int      0 left, 1 right
    __stillstate_left    struct   the other columns of the left side; null for right rows
    __stillstate_right   struct   the other columns of the right side; null for left rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.processors.event_time import Times, check_event_time, micros_of, millis_up, plus
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.slices import process_slices
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Hashes, Mask, Positions, StateSchema, entries_of, hashes_of

__all__ = [
    "LEFT",
    "LEFT_COLUMN",
    "MATCHED",
    "RIGHT",
    "RIGHT_COLUMN",
    "SIDE_COLUMN",
    "IntervalJoinOperator",
    "IntervalJoinPlan",
    "plan_interval_join",
]

LEFT, RIGHT = "left", "right"
SIDE_COLUMN = "__stillstate_side"
LEFT_COLUMN = "__stillstate_left"
RIGHT_COLUMN = "__stillstate_right"
MATCHED = "__stillstate_matched"
"""Value column of the left state of a left outer join: whether the row has been emitted with a match."""

PLACE_BITS = 28
STORED_ROWS_PER_READ = 1 << 20
"""Stored rows of touched keys are read in pieces of about this size; a single key with more rows is one piece."""

SCALE_MAX = 1 << 62
"""Maximum of key and time combined on a scale of microseconds."""

How = Literal["inner", "left-outer"]


@dataclass(frozen=True)
class IntervalJoinPlan:
    """The inputs and output of the join, as Arrow schemas.

    Attributes:
        keys: key columns, named as on the left side.
        left, right: the other columns of each side, which the input's structs hold.
        left_time, right_time: names of the event-time columns among them.
        lower_us, upper_us: the range of `right time - left time`, both ends included, in microseconds.
    """

    keys: pa.Schema
    left: pa.Schema
    right: pa.Schema
    left_time: str
    right_time: str
    lower_us: int
    upper_us: int
    how: How

    @cached_property
    def output_schema(self) -> pa.Schema:
        """Keys, then the left side's other columns, then the right side's."""
        return pa.schema([*self.keys, *self.left, *self.right])

    @cached_property
    def state_values(self) -> Mapping[str, pa.Schema]:
        """The value columns of both states, for the manifest's DDL."""
        matched = [pa.field(MATCHED, pa.bool_())] if self.how == "left-outer" else []
        return {LEFT: pa.schema([*self.left, *matched]), RIGHT: self.right}

    @property
    def modes(self) -> str:
        """The settings that cannot change while there is state: stored rows hold when they are due, their time, and
        whether they matched."""
        return f"{self.how}, {self.right_time} from {self.lower_us} to {self.upper_us} µs after {self.left_time}"


def plan_interval_join(
    left: pa.Schema,
    right: pa.Schema,
    *,
    left_keys: Sequence[str],
    right_keys: Sequence[str],
    left_time: str,
    right_time: str,
    lower_us: int,
    upper_us: int,
    how: str,
    uid: str,
) -> IntervalJoinPlan:
    """Check a join on the schemas of its inputs.

    Args:
        left, right: all columns of the two streams.
        left_keys, right_keys: equally many, in the same order.

    Raises:
        InvalidPipeline: a column is missing, has another type than its counterpart or a name twice in the output, or
            the range is empty.
    """
    where = f"operator {uid!r}, interval join"
    if how not in ("inner", "left-outer"):
        raise InvalidPipeline(f"{where}: how={how!r}; there are 'inner' and 'left-outer'")
    if lower_us > upper_us:
        raise InvalidPipeline(
            f"{where}: the range is empty: its lower end lies {lower_us - upper_us} µs above its upper end"
        )
    if len(left_keys) != len(right_keys) or not left_keys:
        raise InvalidPipeline(
            f"{where}: {len(left_keys)} keys on the left, {len(right_keys)} on the right; pair them up"
        )
    for side, schema, names, time in (("left", left, left_keys, left_time), ("right", right, right_keys, right_time)):
        missing = [name for name in names if schema.get_field_index(name) < 0]
        if missing:
            raise InvalidPipeline(
                f"{where}: the {side} side has no key column {missing[0]!r}; it has {', '.join(schema.names)}"
            )
        check_event_time(schema, time, f"{where}, {side} side")
        if time in names:
            raise InvalidPipeline(
                f"{where}: event-time column {time!r} of the {side} side is a key; keys must be equal, "
                "times lie in a range"
            )
    for ours, theirs in zip(left_keys, right_keys):
        if left.field(ours).type != right.field(theirs).type:
            raise InvalidPipeline(
                f"{where}: key {ours!r} has type {left.field(ours).type}, its counterpart {theirs!r} "
                f"{right.field(theirs).type}; cast one"
            )
    plan = IntervalJoinPlan(
        keys=pa.schema([left.field(name) for name in left_keys]),
        left=pa.schema([f for f in left if f.name not in left_keys]),
        right=pa.schema([f for f in right if f.name not in right_keys]),
        left_time=left_time,
        right_time=right_time,
        lower_us=lower_us,
        upper_us=upper_us,
        how=how,  # type: ignore[arg-type]  # checked above
    )
    names = [name.lower() for name in plan.output_schema.names]
    twice = sorted({name for name in plan.output_schema.names if names.count(name.lower()) > 1})
    if twice:
        raise InvalidPipeline(
            f"{where}: both sides have columns named {', '.join(map(repr, twice))} (Spark does not tell case apart); "
            "rename them on one side before the join, or leave out columns that are not needed"
        )
    return plan


@dataclass
class _Rows:
    """Rows of one side, new or stored.

    Attributes:
        group: number of the row's key among the epoch's keys.
        hashes: key hash of each row.
        micros: event time of each row.
        entries, matched: of stored rows their places, and (left outer) whether they matched in an earlier epoch.
    """

    group: Positions
    hashes: Hashes
    keys: list[pa.Array]
    values: list[pa.Array]
    micros: Times
    entries: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    matched: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.hashes)

    def pick(self, at: Positions) -> _Rows:
        """Return some of the rows."""
        taken = pa.array(at)
        return _Rows(
            group=self.group[at],
            hashes=self.hashes[at],
            keys=[k.take(taken) for k in self.keys],
            values=[v.take(taken) for v in self.values],
            micros=self.micros[at],
            entries=self.entries[at] if len(self.entries) else self.entries,
            matched=self.matched[at] if len(self.matched) else self.matched,
        )


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


class _Places:
    """Unique places of an epoch's new rows: the epoch is in the high bits, so that storing need not read the stored
    places."""

    def __init__(self, uid: str, clock: EpochClock) -> None:
        self._uid = uid
        self._base = np.uint64(clock.epoch << PLACE_BITS)
        self._taken = 0

    def next(self, count: int) -> Hashes:
        """Return `count` places, above all earlier ones; both sides share them, which does no harm.

        Raises:
            InvalidData: the epoch has no places left.
        """
        first, self._taken = self._taken + 1, self._taken + count
        if self._taken >= 1 << PLACE_BITS:
            raise InvalidData(
                f"operator {self._uid!r}: {self._taken:,} rows to keep in one task and epoch; at most 2^{PLACE_BITS} - "
                "1 have a place. Read less per epoch or use more shards"
            )
        places: Hashes = np.arange(first, self._taken + 1, dtype=np.uint64) | self._base
        return places


@dataclass(frozen=True)
class IntervalJoinOperator(WokenWhenDue):
    """The operator; emits matches as they are found, and unmatched left rows of a left outer join when they are
    removed.

    Attributes:
        state_ddl: Spark's DDL of the value columns of `left` and `right` (`plan.state_values`).
        output_rows_per_batch: maximum rows of a batch, also for a key with many matches.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    plan: IntervalJoinPlan
    state_ddl: Mapping[str, str]
    output_rows_per_batch: int

    @property
    def key_schema(self) -> pa.Schema:
        return self.plan.keys

    @property
    def output_schema(self) -> pa.Schema:
        return self.plan.output_schema

    @cached_property
    def state_schemas(self) -> Mapping[str, StateSchema]:
        """Stored rows of both sides, each at its own place, due when no other row can match them any more."""
        return {
            name: StateSchema(self.plan.keys, values, pa.schema([]), "due")
            for name, values in self.plan.state_values.items()
        }

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests."""
        states = tuple(StateEntry(name, "rows", self.state_ddl[name], time="due") for name in (LEFT, RIGHT))
        return OperatorEntry(self.uid, "interval-join", self.key_ddl, states, self.plan.modes)

    @property
    def time_domain(self) -> TimeDomain:
        """The watermark removes rows."""
        return "event"

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Match, then remove rows that the watermark has passed; the latter also without input rows."""
        return process_slices(slices, version, self.state_schemas, partial(self._run, clock, _Places(self.uid, clock)))

    @property
    def _outer(self) -> bool:
        return self.plan.how == "left-outer"

    def _run(
        self,
        clock: EpochClock,
        places: _Places,
        rows: GroupedRows,
        version: StateReader,
        result: ShardResult,
        *,
        due: bool,
    ) -> Iterator[pa.RecordBatch]:
        clock = clock if due else clock.held
        left, right = (self._new_rows(rows, side, clock, result) for side in (LEFT, RIGHT))
        matched = np.zeros(len(left), dtype=np.bool_)
        flipped: list[_Rows] = []
        for stored in self._stored(RIGHT, left, rows, version):
            yield from self._match(left, stored, matched)
        if len(right):
            index = _TimeIndex(right)
            for stored in self._stored(LEFT, right, rows, version):
                now = np.zeros(len(stored), dtype=np.bool_)
                yield from self._match(stored, right, now, index)
                if self._outer:
                    flipped.append(stored.pick(np.flatnonzero(now & ~stored.matched)))
            yield from self._match(left, right, matched, index)
        flips = _together(flipped, self._side_columns(LEFT), self.plan.keys)
        for name, new in ((LEFT, left), (RIGHT, right)):
            gone = self._due(name, version, clock, result) if due else self.state_schemas[name].empty()
            yield from self._remove_and_store(name, new, matched, flips, gone, places, clock, result)

    def _due(self, name: str, version: StateReader, clock: EpochClock, result: ShardResult) -> pa.RecordBatch:
        result.due_taken[name] = clock.watermark_ms
        return version.due(name, clock.watermark_ms)

    def _remove_and_store(
        self,
        name: str,
        new: _Rows,
        matched: Mask,
        flipped: _Rows,
        gone: pa.RecordBatch,
        places: _Places,
        clock: EpochClock,
        result: ShardResult,
    ) -> Iterator[pa.RecordBatch]:
        """Remove the rows of one side that the watermark has passed, stored or new; keep new rows that may still match.

        Args:
            matched, flipped: of the left side, which new rows have a match, and the stored rows with their first match.
            gone: stored rows that are due.
        """
        due = self._due_of(name, new.micros)
        stays = due > clock.watermark_ms
        at = np.flatnonzero(stays)
        flags = []
        if name == LEFT and self._outer:
            yield from self._unmatched(gone, flipped)
            yield from self._with_nulls(new.pick(np.flatnonzero(~stays & ~matched)))
            flags = [matched[at]]
        flips = flipped if name == LEFT else None
        result.changes[name] = self._changes(name, new.pick(at), due[at], flags, gone, flips, places, clock)
        result.rows_added += len(at) - gone.num_rows

    # --- rows ----------------------------------------------------------------------------------------------------

    def _side_columns(self, side: str) -> pa.Schema:
        return self.plan.left if side == LEFT else self.plan.right

    def _due_of(self, side: str, micros: Times) -> Times:
        """Return the first watermark (ms) that removes a row: the earliest for Spark's `time <= watermark - …`."""
        if side == LEFT:
            return plus(millis_up(micros), 1 - (-self.plan.upper_us // 1000))
        return plus(millis_up(micros), 1 - self.plan.lower_us // 1000)

    def _new_rows(self, rows: GroupedRows, side: str, clock: EpochClock, result: ShardResult) -> _Rows:
        """Return the side's rows of the epoch that can contribute to the result."""
        columns = self._side_columns(side)
        if rows.groups == 0:
            return _together([], columns, self.plan.keys)
        tags = rows.rows.column(SIDE_COLUMN).to_numpy(zero_copy_only=False)
        at = np.flatnonzero(tags == (0 if side == LEFT else 1))
        structs = rows.rows.column(LEFT_COLUMN if side == LEFT else RIGHT_COLUMN)
        time = self.plan.left_time if side == LEFT else self.plan.right_time
        micros, valid = micros_of(_take(structs.field(structs.type.get_field_index(time)), at))
        keep = millis_up(micros) > clock.late_watermark_ms
        if valid is not None:
            result.late_rows += int(np.count_nonzero(~keep & valid))
            keep &= valid
        else:
            result.late_rows += len(at) - int(np.count_nonzero(keep))
        no_key = np.zeros(rows.groups, dtype=np.bool_)
        for key in rows.keys:
            if key.null_count:
                no_key |= key.is_null().to_numpy(zero_copy_only=False)
        group = np.repeat(np.arange(rows.groups), rows.stops - rows.starts)[at]
        if side == RIGHT or not self._outer:
            keep &= ~no_key[group]  # no null key on the right is kept, so none on the left finds a match
        if not bool(keep.all()):
            at, micros, group = at[keep], micros[keep], group[keep]
        taken = pa.array(at)
        values = structs.take(taken).flatten()
        return _Rows(
            group,
            rows.hashes[group],
            [_as(rows.rows.column(name).take(taken), f.type) for name, f in zip(self.key_columns, self.plan.keys)],
            [_as(values[structs.type.get_field_index(f.name)], f.type) for f in columns],
            micros,
        )

    def _stored(self, side: str, new: _Rows, rows: GroupedRows, version: StateReader) -> Iterator[_Rows]:
        """Yield stored rows of a side for the keys of the other side's new rows; a bounded number of keys at a time."""
        if len(new) == 0:
            return
        touched = new.group[np.append(True, new.group[1:] != new.group[:-1])]  # rows come key after key
        bounds = version.entry_bounds(side, rows.hashes[touched])
        touched, bounds = touched[bounds > 0], bounds[bounds > 0]
        piece = np.cumsum(bounds) // STORED_ROWS_PER_READ
        for keys in np.split(touched, np.flatnonzero(np.diff(piece)) + 1):
            if len(keys) == 0:
                continue
            taken = pa.array(keys)
            batch, offsets = version.read_entries(side, rows.hashes[keys], [k.take(taken) for k in rows.keys])
            if batch.num_rows:
                yield self._rows_of(side, batch, np.repeat(keys, np.diff(offsets)))

    def _rows_of(self, side: str, batch: pa.RecordBatch, group: Positions) -> _Rows:
        """Return stored rows as `_Rows`."""
        schema = self.state_schemas[side]
        values = schema.values_of(batch)
        time = self.plan.left_time if side == LEFT else self.plan.right_time
        matched = np.zeros(0, dtype=np.bool_)
        if side == LEFT and self._outer:
            matched = values.pop().to_numpy(zero_copy_only=False)
        micros, _ = micros_of(values[self._side_columns(side).get_field_index(time)])
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

    def _match(
        self, left: _Rows, right: _Rows, matched: Mask, index: _TimeIndex | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all pairs of two sets of rows; mark the left rows that have one."""
        if len(left) == 0 or len(right) == 0:
            return
        index = index or _TimeIndex(right)
        begin, counts = index.ranges(left, self.plan.lower_us, self.plan.upper_us)
        hits = np.flatnonzero(counts)
        matched[hits] = True
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
            yield self._output(
                left, np.repeat(hits[chosen], count), right, index.order[np.repeat(begin[chosen], count) + ordinal]
            )

    def _output(self, left: _Rows, left_at: Positions, right: _Rows, right_at: Positions) -> pa.RecordBatch:
        ours, theirs = pa.array(left_at), pa.array(right_at)
        columns = [c.take(ours) for c in (*left.keys, *left.values)] + [c.take(theirs) for c in right.values]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def _with_nulls(self, left: _Rows) -> Iterator[pa.RecordBatch]:
        """Yield left rows without a match, with nulls for the right side."""
        for start in range(0, len(left), self.output_rows_per_batch):
            columns = [c.slice(start, self.output_rows_per_batch) for c in (*left.keys, *left.values)]
            columns += [pa.nulls(len(columns[0]), f.type) for f in self.plan.right]
            yield pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def _unmatched(self, gone: pa.RecordBatch, flipped: _Rows) -> Iterator[pa.RecordBatch]:
        """Yield removed left rows that matched neither in an earlier epoch nor in this one."""
        if gone.num_rows == 0:
            return
        rows = self._rows_of(LEFT, gone, np.zeros(gone.num_rows, dtype=np.int64))
        now = _contains(flipped.hashes, flipped.entries, rows.hashes, rows.entries)
        yield from self._with_nulls(rows.pick(np.flatnonzero(~rows.matched & ~now)))

    # --- state ---------------------------------------------------------------------------------------------------

    def _changes(
        self,
        name: str,
        new: _Rows,
        due: Times,
        flags: list[Mask],
        gone: pa.RecordBatch,
        flipped: _Rows | None,
        places: _Places,
        clock: EpochClock,
    ) -> pa.RecordBatch:
        """Return new rows, rows that have matched for the first time, and tombstones, as a sorted batch."""
        schema = self.state_schemas[name]
        values = [*new.values, *(pa.array(flag) for flag in flags)]
        at = places.next(len(new))
        batches = [schema.batch(new.hashes, None, new.keys, values, entries=at, times=pa.array(due))]
        if flipped is not None and len(flipped):
            due = self._due_of(name, flipped.micros)
            kept = flipped.pick(np.flatnonzero(due > clock.watermark_ms))
            now = pa.array(np.ones(len(kept), dtype=np.bool_))
            due = pa.array(due[due > clock.watermark_ms])
            batches.append(
                schema.batch(kept.hashes, None, kept.keys, [*kept.values, now], entries=kept.entries, times=due)
            )
        if gone.num_rows:
            nothing = [pa.nulls(gone.num_rows, f.type) for f in schema.values]
            removed = np.ones(gone.num_rows, dtype=np.bool_)
            batches.append(
                schema.batch(
                    hashes_of(gone), removed, schema.keys_of(gone), nothing, entries=entries_of(gone),
                    times=pa.nulls(gone.num_rows, pa.int64()),
                )
            )  # fmt: skip
        if len(batches) == 1:
            return batches[0]
        merged = pa.concat_batches(batches)
        return merged.take(pa.array(np.lexsort((entries_of(merged), hashes_of(merged)))))


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


def _as(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    return column if column.type == data_type else column.cast(data_type)
