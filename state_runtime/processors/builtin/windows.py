"""Tumbling, sliding and cumulative windows over an event-time column, without a Python loop over rows, keys or windows.

The state keeps *panes*, not windows: the stretches of time between two neighbouring borders of windows. A row is in one
pane, a pane in up to size/slide windows, and a window is a range of panes. So an epoch writes each touched (key, pane)
once; one row per (key, window) would be size/slide times as much. A tumbling window is its one pane.

Panes are numbered. With `per_slide` panes between two starts of windows (two if the slide does not divide the size,
else one), window number w begins at `start + w·slide` and holds the panes w·per_slide … w·per_slide + length - 1.
Cumulative windows are numbered by their last panes: window w ends with pane w, and begins with the first pane of its
cycle, the panes between two starts.

Time, in Spark's terms. A window *closes* when the watermark has reached its end plus the allowed lateness. A row counts
for those of its windows that the watermark of the epoch before had not closed. For the others it is late, and
`late_rows` counts every pair of a row and a window that it came too late for. In update mode an epoch emits each window
that it changed; closed ones disappear silently. In append mode it emits each window once, when it closes.

A pane is due (`due`, ms) when its last window closes; then it is removed. This time never moves, so a pane is only
written for its rows and for its removal. In append mode a closing window may end with panes that are due later, so the
panes due within a window's size are read as well. A shard is woken at every close of a window that holds one of its
panes. The watermark has milliseconds, windows have microseconds; a close is rounded up to the next millisecond, which
is the first watermark that reaches it.

Earlier versions of this code moved `due` in append mode, to the next close of a window that begins with the pane. Such
a pane is due early; then it gets its proper time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from state_runtime.base.durations import parse_duration_us
from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.builtin.aggregate import AggregatePlan, plan_aggregates
from state_runtime.processors.builtin.all_rows import emitted
from state_runtime.processors.builtin.partial_rows import rows_behind
from state_runtime.processors.builtin.partials import Groups
from state_runtime.processors.builtin.ranges import reduce_ranges
from state_runtime.processors.builtin.sessions import SessionOperator, session_values
from state_runtime.processors.builtin.window_state import (
    WINDOW,
    WINDOW_TYPE,
    OutputMode,
    Part,
    assemble,
    contained,
    event_times,
    grouped_by_key,
    members,
    order_by,
    search,
    union_of_intervals,
    window_column,
)
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.declared.windows import SessionWindow, TimeWindow
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import LATE, EpochClock, RowSlice, ShardResult, TimeDomain
from state_runtime.processors.slices import process_slices
from state_runtime.snapshot.manifest import DUE_WHEN_REMOVED, OperatorEntry, StateEntry
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Hashes, Mask, Positions, StateSchema, entry_of_time

__all__ = ["STATE", "WindowOperator", "plan_windows"]

Numbers = TypeVar("Numbers", int, Positions)

STATE = "windows"
# Windows emitted at a time: bounds the memory of the output, and of the pairs of windows and panes for it.
_WINDOWS_PER_BATCH = 1 << 18


@dataclass(frozen=True)
class WindowOperator:
    """Aggregates per key and window.

    Attributes:
        state_ddl: DDL of the slots.
        time_column: event time.
        mode: the output mode.
        lateness_us: how much longer than in Spark a window stays open.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    plan: AggregatePlan
    state_ddl: str
    time_column: str
    window: TimeWindow
    mode: OutputMode
    lateness_us: int

    @cached_property
    def output_schema(self) -> pa.Schema:
        keys = emitted(list(self.key_schema), self.key_columns)
        return pa.schema([*keys, pa.field(WINDOW, WINDOW_TYPE), *self.plan.outputs])

    @cached_property
    def _schema(self) -> StateSchema:
        return StateSchema(self.key_schema, pa.schema(self.plan.slots), pa.schema([]), "due")

    @property
    def state_schemas(self) -> Mapping[str, StateSchema]:
        return {STATE: self._schema}

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests. Its panes are useless for windows of another shape."""
        state = StateEntry(STATE, "rows", self.state_ddl, time="due")
        modes = f"{self.mode}, {self.window.text}, lateness {self.lateness_us} us"
        if self.mode == "append" and self._length > 1:
            modes += DUE_WHEN_REMOVED
        return OperatorEntry(self.uid, "windows", self.key_ddl, (state,), modes, functions=dict(self.plan.texts))

    @property
    def time_domain(self) -> TimeDomain:
        """Windows close by event time."""
        return "event"

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Assign rows to panes, merge them with the stored ones, emit windows, remove closed panes."""
        return process_slices(slices, version, self.state_schemas, partial(self._run, clock))

    def _run(
        self, clock: EpochClock, rows: GroupedRows, reader: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        clock = clock if due else clock.held
        new, group = self._panes(rows, clock, result)
        stored = self._due(reader, clock, result) if due else self._part(self._schema.empty())
        if len(stored) and len(new):
            # A touched pane is processed with the epoch's rows for it.
            key = members(stored, rows.hashes, rows.keys, self.key_schema)
            stored = stored.only(~contained(key, stored.at, group, new.at))
        if self.mode == "update" and self._length > 1 and len(new):
            merged, around = self._merge_around(rows, new, group, reader)
            outputs = self._changed_windows(around, group, new.at, clock)
        else:
            merged = self._merge(new, reader)
            outputs = self._of_their_own(merged) if self.mode == "update" else iter(())
        if self.mode == "append":
            outputs = (
                self._closed_windows(merged, stored, clock)
                if self._length > 1
                else self._closed_panes(merged, stored, clock)
            )
        closing = self._passed(merged.due, clock)
        gone, early = self._removed_or_early(stored, clock)
        removed = merged.only(closing & merged.stored).and_(gone)
        merged = merged.only(~closing).and_(early)
        if len(merged) or len(removed):
            result.changes[STATE] = assemble(self._schema, self._as_stored(merged), self._as_stored(removed))
        result.rows_added = int(np.count_nonzero(~merged.stored)) - len(removed)
        yield from outputs

    def wake_ms(self, due_ms: int, clock: EpochClock) -> int:
        """Return the wake time: in append mode a pane has windows that close before it is due."""
        if self.mode == "update":
            return due_ms
        windows = -(-self.window.size_us // self.window.slide_us)  # maximum number of windows that hold a pane
        # The pane's last window closes in the millisecond before `due_ms`; other windows may do so, too.
        earliest = self._last_closed(due_ms - 1) + 1 - (windows - 1)
        return self._closes_ms(max(earliest, self._last_closed(clock.watermark_ms) + 1))

    # Geometry: numbers of panes and windows, times and closes; microseconds unless the name says otherwise.

    @cached_property
    def _per_slide(self) -> int:
        return 1 if self.window.size_us % self.window.slide_us == 0 else 2

    @cached_property
    def _length(self) -> int:
        """Number of panes of a window."""
        whole = self.window.size_us // self.window.slide_us
        return whole if self._per_slide == 1 else 2 * whole + 1

    def _pane_of(self, times: Positions) -> Positions:
        since = times - self.window.start_us
        slide = self.window.slide_us
        number = since // slide  # rounds down, also before 1970
        if self._per_slide == 1:
            return number
        second = (since - number * slide) >= self.window.size_us % slide
        return 2 * number + second

    def _start_of_pane(self, panes: Positions) -> Positions:
        if self._per_slide == 1:
            return self._slid(panes)
        inner = (panes & 1) * (self.window.size_us % self.window.slide_us)
        return self._slid(panes >> 1) + inner

    def _slid(self, number: Numbers) -> Numbers:
        return number * self.window.slide_us + self.window.start_us

    def _start_of_window(self, windows: Positions) -> Positions:
        return self._slid(self._first_pane(windows) if self.window.grows else windows)

    def _end_of_window(self, windows: Numbers) -> Numbers:
        return self._slid(windows) + (self.window.slide_us if self.window.grows else self.window.size_us)

    def _first_pane(self, windows: Positions) -> Positions:
        if self.window.grows:
            return windows - windows % self._length
        return windows * self._per_slide

    def _last_pane(self, windows: Numbers) -> Numbers:
        return windows if self.window.grows else windows * self._per_slide + self._length - 1

    def _first_window(self, panes: Positions) -> Positions:
        """Return the number of the first window that holds a pane."""
        if self.window.grows:
            return panes
        if self._per_slide == 1:
            return panes - (self._length - 1)
        return (panes - self._length + 2) >> 1

    def _last_window(self, panes: Numbers) -> Numbers:
        if self.window.grows:
            return panes - panes % self._length + self._length - 1
        return panes if self._per_slide == 1 else panes >> 1

    def _closes_ms(self, windows: Numbers) -> Numbers:
        """Return the first watermark that closes a window."""
        return -(-(self._end_of_window(windows) + self.lateness_us) // 1000)

    def _last_closed(self, watermark_ms: int) -> int:
        """Return the number of the last window that a watermark has closed."""
        end_us = self._end_of_window(0) + self.lateness_us
        return (watermark_ms * 1000 - end_us) // self.window.slide_us

    def _passed(self, due_ms: Positions, clock: EpochClock) -> Mask:
        passed: Mask = due_ms <= clock.watermark_ms
        return passed

    # Steps.

    def _panes(self, rows: GroupedRows, clock: EpochClock, result: ShardResult) -> tuple[Part, Positions]:
        """Return the epoch's rows by (key, pane), in that order, and per pane the number of its key; late rows are
        dropped."""
        if rows.groups == 0:
            return self._part(self._schema.empty()), np.zeros(0, dtype=np.int64)
        times, valid = event_times(rows.rows, self.time_column)
        panes = self._pane_of(times)
        group = np.repeat(np.arange(rows.groups, dtype=np.int64), rows.stops - rows.starts)
        keep = valid
        if len(panes):
            closed = self._last_closed(clock.late_watermark_ms)
            first, last = self._first_window(panes), self._last_window(panes)
            late = np.clip(closed - first + 1, 0, last - first + 1)
            if valid is not None:
                late = np.where(valid, late, 0)
            behind = rows_behind(rows.rows)
            result.late_rows += int(late.sum() if behind is None else (late * behind).sum())
            open_ = last > closed
            never = ~open_ if valid is None else ~open_ & valid
            if behind is None and bool(never.any()):
                result.give(LATE, lambda: rows.rows.filter(pa.array(never)))
            keep = open_ if valid is None else open_ & valid
        order = self.plan.order(rows, clock.epoch)
        picked = None if keep is None or bool(keep.all()) else np.flatnonzero(keep)
        group, panes = (group, panes) if picked is None else (group[picked], panes[picked])
        if not bool(np.all((group[:-1] < group[1:]) | (panes[:-1] <= panes[1:]))):
            inner = order_by(group, panes)
            picked = inner if picked is None else picked[inner]
            group, panes = group[inner], panes[inner]
        first_of = np.ones(len(panes), dtype=np.bool_)
        first_of[1:] = (group[1:] != group[:-1]) | (panes[1:] != panes[:-1])
        groups = Groups.of(first_of)
        read = [name for name in self.plan.read(rows.rows) if name != self.time_column]
        batch = rows.rows.select([self.time_column, *read])
        if picked is not None:
            batch = batch.take(pa.array(picked))
            order = None if order is None else order[picked]
        slots = self.plan.reduce(batch, groups, order) if groups.count else self._no_slots
        group, panes = group[groups.starts], panes[groups.starts]
        at = pa.array(group)
        keys = [k.take(at) for k in rows.keys]
        due = self._closes_ms(self._last_window(panes))
        return Part(
            hashes=rows.hashes[group],
            keys=keys,
            at=panes,
            slots=slots,
            due=due,
            stored=np.zeros(len(panes), dtype=np.bool_),
        ), group

    @property
    def _no_slots(self) -> list[pa.Array]:
        return [pa.nulls(0, slot.type) for slot in self.plan.slots]

    def _due(self, reader: StateReader, clock: EpochClock, result: ShardResult) -> Part:
        """Return the stored panes of all windows that close: in append mode also those that are due later."""
        result.due_taken[STATE] = through_ms = clock.watermark_ms
        closed = self._last_closed(clock.watermark_ms)
        if self.mode == "append" and closed > self._last_closed(clock.late_watermark_ms):
            through_ms = max(through_ms, self._closes_ms(self._last_window(self._last_pane(closed))))
        return self._part(reader.due(STATE, through_ms))

    def _removed_or_early(self, due: Part, clock: EpochClock) -> tuple[Part, Part]:
        """Split due panes into those whose last window has closed, and those whose last window has not, with their
        proper time."""
        due = due.only(self._passed(due.due, clock))
        due = replace(due, due=self._closes_ms(self._last_window(due.at)))
        passed = self._passed(due.due, clock)
        return due.only(passed), due.only(~passed)

    def _part(self, batch: pa.RecordBatch) -> Part:
        """Return stored rows; `at` is the number of the pane."""
        part = Part.of(batch, self._schema)
        return Part(
            hashes=part.hashes,
            keys=part.keys,
            at=self._pane_of(part.at),
            slots=part.slots,
            due=part.due,
            stored=part.stored,
        )

    def _as_stored(self, part: Part) -> Part:
        """Invert `_part`."""
        return Part(
            hashes=part.hashes,
            keys=part.keys,
            at=self._start_of_pane(part.at),
            slots=part.slots,
            due=part.due,
            stored=part.stored,
        )

    def _merge(self, new: Part, reader: StateReader) -> Part:
        """Return the touched panes, each looked up separately."""
        if len(new) == 0:
            return new
        entries = entry_of_time(self._start_of_pane(new.at))
        hashes, keys = new.hashes, new.keys
        order = None
        same = hashes[1:] == hashes[:-1]
        if bool(np.any(same & (entries[1:] < entries[:-1]))):
            # Keys that share a hash: pairs must be in order of (hash, entry).
            order = np.lexsort((entries, hashes))
            hashes, entries, keys = hashes[order], entries[order], [k.take(pa.array(order)) for k in keys]
        found, columns = reader.find_entries(STATE, hashes, keys, entries, [])
        if order is not None:
            back = np.argsort(order)
            found, columns = found[back], [c.take(pa.array(back)) for c in columns]
        return self._merged(new, found, columns[:-1])

    def _merged(self, new: Part, found: Mask, slots: Sequence[pa.Array]) -> Part:
        if not bool(found.any()):
            return new
        return replace(new, slots=self.plan.merge(slots, new.slots), stored=found)

    def _merge_around(
        self, rows: GroupedRows, new: Part, group: Positions, reader: StateReader
    ) -> tuple[Part, tuple[Part, Positions]]:
        """Return the touched panes, and all panes of their keys including these, sorted, with the keys' numbers."""
        touched = np.unique(group)
        at = pa.array(touched)
        stored, stored_group = self._read(reader, rows.hashes[touched], [k.take(at) for k in rows.keys], touched)
        order, twice = _side_by_side(stored, stored_group, new, group)
        position = np.full(len(new), -1, dtype=np.int64)
        position[order[twice + 1] - len(stored)] = order[twice]
        picked = pa.array(position, mask=position < 0)
        merged = self._merged(new, position >= 0, [s.take(picked) for s in stored.slots])
        kept = np.delete(order, twice)
        return merged, (stored.and_(merged).take(kept), np.concatenate((stored_group, group))[kept])

    def _read(
        self, reader: StateReader, hashes: Hashes, keys: Sequence[pa.Array], numbers: Positions
    ) -> tuple[Part, Positions]:
        """Return all stored panes of some keys, sorted by (key, pane), and per pane the number of its key."""
        batch, offsets = reader.read_entries(STATE, hashes, keys)
        return self._part(batch), np.repeat(numbers, np.diff(offsets))

    def _of_their_own(self, merged: Part) -> Iterator[pa.RecordBatch]:
        """Emit tumbling windows: each is its pane."""
        if len(merged) == 0:
            return
        yield self._emit(merged.keys, merged.at, merged.slots)

    def _changed_windows(
        self, around: tuple[Part, Positions], group: Positions, touched: Positions, clock: EpochClock
    ) -> Iterator[pa.RecordBatch]:
        """Emit every window that is not late and holds a touched pane."""
        first, last = self._first_window(touched), self._last_window(touched)
        first = np.maximum(first, self._last_closed(clock.late_watermark_ms) + 1)
        yield from self._windows(*around, *union_of_intervals(group, first, last))

    def _closed_panes(self, merged: Part, due: Part, clock: EpochClock) -> Iterator[pa.RecordBatch]:
        """Emit, in append mode, the tumbling windows that close now; each is its pane."""
        return self._of_their_own(merged.only(self._passed(merged.due, clock)).and_(due))

    def _closed_windows(self, merged: Part, due: Part, clock: EpochClock) -> Iterator[pa.RecordBatch]:
        """Do the same for windows of many panes: those that the watermark has closed since the epoch before, which
        emitted the earlier ones."""
        emitted, closed = self._last_closed(clock.late_watermark_ms), self._last_closed(clock.watermark_ms)
        if closed == emitted:
            return iter(())
        part, group = grouped_by_key(merged.and_(due))
        first = np.maximum(self._first_window(part.at), emitted + 1)
        last = np.minimum(self._last_window(part.at), closed)
        return self._windows(part, group, *union_of_intervals(group, first, last))

    def _windows(self, part: Part, group: Positions, owner: Positions, windows: Positions) -> Iterator[pa.RecordBatch]:
        """Emit windows, given by their key's number and their own number, from panes sorted by (key, pane)."""
        low = search(group, part.at, owner, self._first_pane(windows))
        high = search(group, part.at, owner, self._last_pane(windows) + 1)
        reduced = reduce_ranges(self.plan, part.slots)
        for start in range(0, len(windows), _WINDOWS_PER_BATCH):
            some = slice(start, start + _WINDOWS_PER_BATCH)
            at = pa.array(low[some])
            yield self._emit([k.take(at) for k in part.keys], windows[some], reduced(low[some], high[some]))

    def _emit(self, keys: Sequence[pa.Array], windows: Positions, slots: Sequence[pa.Array]) -> pa.RecordBatch:
        window = window_column(self._start_of_window(windows), self._end_of_window(windows))
        keys = emitted(keys, self.key_columns)
        return pa.RecordBatch.from_arrays([*keys, window, *self.plan.finish(slots)], schema=self.output_schema)


def _side_by_side(stored: Part, stored_group: Positions, new: Part, group: Positions) -> tuple[Positions, Positions]:
    """Return the order of stored and new panes by (key, pane), and the positions in it where a stored pane is followed
    by the new one of the same place."""
    both_group, both_at = np.concatenate((stored_group, group)), np.concatenate((stored.at, new.at))
    # Stable, so that of two panes of a place the stored one comes first.
    order = order_by(both_group, both_at)
    both_group, both_at = both_group[order], both_at[order]
    return order, np.flatnonzero((both_group[1:] == both_group[:-1]) & (both_at[1:] == both_at[:-1]))


# --- planning --------------------------------------------------------------------------------------------------------


def _check_names(
    uid: str, schema: pa.Schema, key_columns: Sequence[str], times: Mapping[str, str], plan: AggregatePlan
) -> None:
    """Check that the columns with times exist, and that the names of the output are different.

    Args:
        times: these columns, by what they are.

    Raises:
        InvalidPipeline
    """
    where = f"operator {uid!r}"
    for what, name in times.items():
        if schema.get_field_index(name) < 0:
            raise InvalidPipeline(f"{where}: there is no {what} {name!r}; the input has {', '.join(schema.names)}")
        kind = schema.field(name).type
        if not pa.types.is_timestamp(kind) or kind.tz is None:
            raise InvalidPipeline(f"{where}: {what} {name!r} must be a timestamp, not {kind}; cast it")
    if not plan.functions:
        raise InvalidPipeline(f"{where}: windows need at least one aggregate, as in n=aggregates.count()")
    taken = {WINDOW.lower(), *(name.lower() for name in key_columns)}
    clash = sorted(name for name, _ in plan.functions if name.lower() in taken)
    if clash or WINDOW in {name.lower() for name in key_columns}:
        raise InvalidPipeline(
            f"{where}: {clash or [WINDOW]} would be in the output twice: it has the key columns, {WINDOW!r} and the "
            "aggregates; rename"
        )


def plan_windows(
    *,
    uid: str,
    key_columns: Sequence[str],
    key_ddl: str,
    key_schema: pa.Schema,
    schema: pa.Schema,
    time_column: str,
    window: TimeWindow | SessionWindow,
    aggregates: Mapping[str, Aggregate],
    mode: OutputMode,
    ddl: Callable[[pa.Schema], str],
    allowed_lateness: str = "0 seconds",
    drops_late: bool = True,
) -> WindowOperator | SessionOperator:
    """Make the operator of a window step.

    Args:
        schema: of the input.
        ddl: writes Arrow columns as Spark's DDL.
        allowed_lateness: how long after the watermark a window stays open.
        drops_late: of sessions in complete mode, whether there is a watermark.

    Raises:
        InvalidPipeline: a column, type, name, mode or duration does not fit.
    """
    plan = plan_aggregates(aggregates, schema, uid)
    times = {"event-time column": time_column}
    if isinstance(window, SessionWindow) and window.end_column:
        times["end_column"] = window.end_column
    _check_names(uid, schema, key_columns, times, plan)
    lateness_us = parse_duration_us(allowed_lateness)
    if lateness_us < 0:
        raise InvalidPipeline(f"operator {uid!r}: the allowed lateness {allowed_lateness!r} is negative")
    if isinstance(window, SessionWindow):
        return SessionOperator(
            uid=uid,
            key_columns=tuple(key_columns),
            key_ddl=key_ddl,
            key_schema=key_schema,
            plan=plan,
            state_ddl=ddl(session_values(plan)),
            time_column=time_column,
            window=window,
            mode=mode,
            lateness_us=lateness_us,
            drops_late=drops_late,
        )
    if mode == "complete":
        raise InvalidPipeline(
            f'operator {uid!r}: output_mode "complete" is for aggregates and sessions. Write the windows as a plain '
            'query, job.query(…, output_mode="complete") with groupBy(window(…)), or make a column of the window '
            'before, and aggregate(…, output_mode="complete") with it as a key'
        )
    return WindowOperator(
        uid=uid,
        key_columns=tuple(key_columns),
        key_ddl=key_ddl,
        key_schema=key_schema,
        plan=plan,
        state_ddl=ddl(pa.schema(plan.slots)),
        time_column=time_column,
        window=window,
        mode=mode,
        lateness_us=lateness_us,
    )
