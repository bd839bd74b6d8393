"""Session windows: Spark's `session_window`, merged for all keys of a shard at once.

A row at time t opens the session [t, t + gap), or [t, end) with an end of its own; sessions of a key that overlap or
touch are one. The state has the open sessions, each under its start. An epoch sorts its rows by (key, time) and cuts
them where a row comes after the highest end so far. It puts the result among the stored sessions of the same keys and
cuts again in the same way. A stored session that became part of an earlier one leaves a tombstone.

A session closes when the watermark has reached its end plus the allowed lateness. As in Spark a row is late on its own
account, even if it could be merged: if the watermark of the epoch before reached its end. In append mode each session
is emitted once, when it closes. In update mode (which Spark does not have for sessions) an epoch emits each session
that it changed, in its new extent; emitted rows of its former parts are not retracted. In complete mode no session
closes, and an epoch emits all of them; late rows are dropped all the same, as in Spark (its
`SessionWindowStateStoreRestoreExec` asks for no output mode).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from state_runtime.processors.builtin.aggregate import AggregatePlan
from state_runtime.processors.builtin.all_rows import emitted
from state_runtime.processors.builtin.partials import Groups
from state_runtime.processors.builtin.window_state import (
    WINDOW,
    WINDOW_TYPE,
    OutputMode,
    Part,
    assemble,
    contained,
    event_times,
    members,
    order_by,
    running_max,
    window_column,
)
from state_runtime.processors.declared.windows import SessionWindow
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import LATE, EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.slices import process_slices
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Mask, Positions, StateSchema

__all__ = ["STATE", "SessionOperator", "session_values"]

STATE = "sessions"
_TIME = pa.timestamp("us", "UTC")


def session_values(plan: AggregatePlan) -> pa.Schema:
    """Return the value columns of the state: the end, and the aggregates' slots."""
    return pa.schema([pa.field("window.end", _TIME), *plan.slots])


@dataclass(frozen=True)
class SessionOperator(WokenWhenDue):
    """Aggregates per key and session; for the other attributes see `WindowOperator`.

    Attributes:
        drops_late: False in complete mode without a watermark.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    plan: AggregatePlan
    state_ddl: str
    time_column: str
    window: SessionWindow
    mode: OutputMode
    lateness_us: int
    drops_late: bool = True

    @cached_property
    def output_schema(self) -> pa.Schema:
        keys = emitted(list(self.key_schema), self.key_columns)
        return pa.schema([*keys, pa.field(WINDOW, WINDOW_TYPE), *self.plan.outputs])

    @cached_property
    def _schema(self) -> StateSchema:
        return StateSchema(self.key_schema, session_values(self.plan), pa.schema([]), "due")

    @property
    def state_schemas(self) -> Mapping[str, StateSchema]:
        return {STATE: self._schema}

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests."""
        state = StateEntry(STATE, "rows", self.state_ddl, time="due")
        modes = f"{self.mode}, {self.window.text}, lateness {self.lateness_us} us"
        return OperatorEntry(self.uid, "sessions", self.key_ddl, (state,), modes, functions=dict(self.plan.texts))

    @property
    def time_domain(self) -> TimeDomain:
        """Sessions close by event time; in complete mode they stay."""
        return "" if self.mode == "complete" else "event"

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Cut rows into sessions, merge them with the stored ones, emit, remove closed ones."""
        body = self._all if self.mode == "complete" else self._run
        return process_slices(slices, version, self.state_schemas, partial(body, clock))

    def _all(
        self, clock: EpochClock, rows: GroupedRows, reader: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        """Emit, in complete mode, every session, once the shard is done with its rows."""
        new, group = self._cut_rows(rows, clock, result)
        if len(new):
            changed, used, used_group = self._merge(rows, new, group, reader)
            removed = used.only(self._no_longer(used, used_group, changed, rows))
            result.changes[STATE] = changes = assemble(self._schema, changed, removed)
            result.rows_added = int(np.count_nonzero(~changed.stored)) - len(removed)
            reader = reader.overlaid({STATE: changes})
        for stored in reader.iter_rows(STATE) if due else ():
            yield self._emit(Part.of(stored, self._schema))

    def _run(
        self, clock: EpochClock, rows: GroupedRows, reader: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        clock = clock if due else clock.held
        new, group = self._cut_rows(rows, clock, result)
        expired = self._due(reader, clock, result) if due else self._none
        changed, merged_away = self._none, self._none
        if len(new):
            changed, used, used_group = self._merge(rows, new, group, reader)
            merged_away = used.only(self._no_longer(used, used_group, changed, rows))
            if len(expired):
                # A session that was merged in this epoch is processed with the merged session.
                key = members(expired, rows.hashes, rows.keys, self.key_schema)
                expired = expired.only(~contained(key, expired.at, used_group, used.at))
        closing = changed.due <= clock.watermark_ms
        closed, open_ = changed.only(closing), changed.only(~closing)
        removed = closed.only(closed.stored).and_(merged_away).and_(expired)
        if len(open_) or len(removed):
            result.changes[STATE] = assemble(self._schema, open_, removed)
        result.rows_added = int(np.count_nonzero(~open_.stored)) - len(removed)
        emitted = changed if self.mode == "update" else closed.and_(expired)
        if len(emitted):
            yield self._emit(emitted)

    def _due(self, reader: StateReader, clock: EpochClock, result: ShardResult) -> Part:
        result.due_taken[STATE] = clock.watermark_ms
        return Part.of(reader.due(STATE, clock.watermark_ms), self._schema)

    @property
    def _none(self) -> Part:
        return Part.of(self._schema.empty(), self._schema)

    def _due_ms(self, ends: Positions) -> Positions:
        """Return the first watermark that closes a session."""
        return -(-(ends + self.lateness_us) // 1000)

    def _cut_rows(self, rows: GroupedRows, clock: EpochClock, result: ShardResult) -> tuple[Part, Positions]:
        """Return sessions of the epoch's rows alone, sorted by (key, start), and per session the number of its key."""
        if rows.groups == 0:
            return self._none, np.zeros(0, dtype=np.int64)
        times, keep = event_times(rows.rows, self.time_column)
        ends, keep = self._ends(rows.rows, times, keep)
        late = self._due_ms(ends) <= clock.late_watermark_ms
        late &= self.drops_late
        late = late if keep is None else late & keep
        result.late_rows += int(np.count_nonzero(late))
        if bool(late.any()):
            result.give(LATE, lambda: rows.rows.filter(pa.array(late)))
        keep = ~late if keep is None else keep & ~late
        group = np.repeat(np.arange(rows.groups, dtype=np.int64), rows.stops - rows.starts)
        picked = np.arange(len(times)) if keep is None else np.flatnonzero(keep)
        if len(picked) == 0:
            return self._none, np.zeros(0, dtype=np.int64)
        picked = picked[order_by(group[picked], times[picked])]
        group, times, ends = group[picked], times[picked], ends[picked]
        first = _begins(group, times, ends)
        groups = Groups.of(first)
        order = self.plan.order(rows, clock.epoch)
        read = [name for name in self.plan.columns if name != self.time_column]
        batch = rows.rows.select([self.time_column, *read]).take(pa.array(picked))
        slots = self.plan.reduce(batch, groups, None if order is None else order[picked])
        ends = np.maximum.reduceat(ends, groups.starts)
        return self._sessions(rows, group[groups.starts], times[groups.starts], ends, slots), group[groups.starts]

    def _ends(self, rows: pa.RecordBatch, times: Positions, keep: Mask | None) -> tuple[Positions, Mask | None]:
        """Return when the session of each row alone would end, and which rows have one (None: all).

        Args:
            keep: which rows have a time.
        """
        if not self.window.end_column:
            return times + self.window.gap_us, keep
        ends, valid = event_times(rows, self.window.end_column)
        longer = ends > times
        for there in (keep, valid):
            longer = longer if there is None else longer & there
        return ends, longer

    def _sessions(
        self, rows: GroupedRows, group: Positions, starts: Positions, ends: Positions, slots: list[pa.Array]
    ) -> Part:
        at = pa.array(group)
        return Part(
            hashes=rows.hashes[group],
            keys=[k.take(at) for k in rows.keys],
            at=starts,
            slots=[pa.array(ends).cast(_TIME), *slots],
            due=self._due_ms(ends),
            stored=np.zeros(len(starts), dtype=np.bool_),
        )

    def _merge(
        self, rows: GroupedRows, new: Part, group: Positions, reader: StateReader
    ) -> tuple[Part, Part, Positions]:
        """Return the changed sessions; the stored ones that were merged into them, sorted by (key, start), with the
        numbers of their keys."""
        touched = np.unique(group)
        at = pa.array(touched)
        batch, offsets = reader.read_entries(STATE, rows.hashes[touched], [k.take(at) for k in rows.keys])
        stored = Part.of(batch, self._schema)
        both = stored.and_(new)
        both_group = np.concatenate((np.repeat(touched, np.diff(offsets)), group))
        order = order_by(both_group, both.at)
        both, both_group = both.take(order), both_group[order]
        ends = both.slots[0].cast(pa.int64()).to_numpy(zero_copy_only=False)
        first = _begins(both_group, both.at, ends)
        session = np.cumsum(first) - 1
        changed = np.zeros(int(session[-1]) + 1, dtype=np.bool_)
        changed[session[~both.stored]] = True
        parts = np.flatnonzero(changed[session])
        both, both_group, ends, first = both.take(parts), both_group[parts], ends[parts], first[parts]
        groups = Groups.of(first)
        slots = self.plan.merge_groups(both.slots[1:], groups)
        ends = np.maximum.reduceat(ends, groups.starts)
        merged = self._sessions(rows, both_group[groups.starts], both.at[groups.starts], ends, slots)
        # A stored session with the start of a merged one is overwritten; it may come after a new one of the same
        # start.
        same_start = both.stored & (both.at == both.at[groups.starts][groups.group_of_row])
        overwritten = np.logical_or.reduceat(same_start, groups.starts)
        merged = Part(
            hashes=merged.hashes, keys=merged.keys, at=merged.at, slots=merged.slots, due=merged.due, stored=overwritten
        )
        used = np.flatnonzero(both.stored)
        return merged, both.take(used), both_group[used]

    def _no_longer(self, used: Part, used_group: Positions, changed: Part, rows: GroupedRows) -> Mask:
        """Return which of the stored sessions that were merged are not the start of the merged one."""
        key = members(changed, rows.hashes, rows.keys, self.key_schema)
        return ~contained(used_group, used.at, key, changed.at)

    def _emit(self, sessions: Part) -> pa.RecordBatch:
        ends = sessions.slots[0].cast(pa.int64()).to_numpy(zero_copy_only=False)
        window = window_column(sessions.at, ends)
        return pa.RecordBatch.from_arrays(
            [*emitted(sessions.keys, self.key_columns), window, *self.plan.finish(sessions.slots[1:])],
            schema=self.output_schema,
        )


def _begins(group: Positions, starts: Positions, ends: Positions) -> Mask:
    """Return which parts begin a session: those that start after all ends so far of their group. A part that starts
    exactly at such an end belongs to it.

    Args:
        group, starts: in order.
    """
    first = np.ones(len(starts), dtype=np.bool_)
    first[1:] = (group[1:] != group[:-1]) | (starts[1:] > running_max(group, ends)[:-1])
    return first
