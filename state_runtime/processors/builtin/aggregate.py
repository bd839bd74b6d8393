"""The built-in `aggregate`: keyed aggregate functions, without a Python loop over rows or keys.

A shard's rows are sorted by key hash for the look-up anyway, so each group is one contiguous range that is reduced at
once (processors/builtin/partials.py). The partial results are then merged with the looked-up state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.builtin.all_rows import emitted
from state_runtime.processors.builtin.functions import Over, plan_function
from state_runtime.processors.builtin.partial_rows import ROWS_COLUMN, SLOTS, are_partial, rows_behind
from state_runtime.processors.builtin.partials import (
    Groups,
    PartialFunction,
    Scalar,
    order_of,
)
from state_runtime.processors.builtin.window_state import OutputMode
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.event_time import is_late, micros_of, millis_up, nullable_millis
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult, TimeDomain, WokenWhenDue
from state_runtime.processors.slices import process_slices
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Mask, Positions, StateSchema, fold, removal_of

__all__ = ["STATE", "AggregateOperator", "AggregatePlan", "plan_aggregates"]

STATE = "aggregate"


@dataclass(frozen=True)
class AggregatePlan:
    """The aggregates of an operator, by output name; all their slots side by side are the value columns of its state.

    Attributes:
        texts: the description of each output, for the manifest: a name keeps its meaning over restarts.
    """

    functions: tuple[tuple[str, PartialFunction], ...]
    texts: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def slots(self) -> tuple[pa.Field, ...]:
        """Value columns of the state."""
        return tuple(slot for _, function in self.functions for slot in function.slots)

    @cached_property
    def outputs(self) -> tuple[pa.Field, ...]:
        """Output columns."""
        return tuple(pa.field(name, function.output) for name, function in self.functions)

    @property
    def columns(self) -> list[str]:
        """Input columns that the functions read."""
        return sorted({column for _, function in self.functions for column in function.columns})

    @property
    def ordered(self) -> bool:
        """Whether `reduce` needs the order of the rows."""
        return any(function.ordered for _, function in self.functions)

    def order(self, rows: GroupedRows, epoch: int) -> Positions | None:
        """Return the places of rows, if a function needs them.

        Args:
            epoch: the epoch that processes them.
        """
        return order_of(rows.epoch or epoch, rows.sequence, rows.first_place) if self.ordered else None

    @property
    def gathers(self) -> bool:
        """Whether all functions can work on partial rows."""
        return all(isinstance(function, Scalar) for _, function in self.functions)

    def read(self, rows: pa.RecordBatch) -> list[str]:
        """Return the columns of some rows that `reduce` reads, for partial and other rows."""
        if not are_partial(rows):
            return self.columns
        return [name for name in rows.schema.names if name == ROWS_COLUMN or name.startswith(SLOTS)]

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        """Return the slots of one row per group."""
        if are_partial(rows):
            return self._gather(rows, groups)
        return [slot for _, function in self.functions for slot in function.reduce(rows, groups, order)]

    def _gather(self, rows: pa.RecordBatch, groups: Groups) -> list[pa.Array]:
        slots: list[pa.Array] = []
        for _, function in self.functions:
            if not isinstance(function, Scalar):
                raise InvalidPipeline(f"partial rows came for {type(function).__name__}, which needs the rows")
            slots += function.gather(rows, groups, len(slots))
        return slots

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merge the slots of both sides, row by row; null on the old side where the state has no row."""
        return [
            slot
            for (_, function), before, after in zip(self.functions, self._split(old), self._split(new))
            for slot in function.merge(before, after)
        ]

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Merge the slots of many rows per group to one row each."""
        return [
            slot
            for (_, function), part in zip(self.functions, self._split(slots))
            for slot in function.merge_groups(part, groups)
        ]

    def finish(self, slots: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the output columns."""
        return [function.finish(part) for (_, function), part in zip(self.functions, self._split(slots))]

    def split(self, slots: Sequence[pa.Array]) -> Iterator[tuple[PartialFunction, Sequence[pa.Array]]]:
        """Yield each function with its slots."""
        return zip((function for _, function in self.functions), self._split(slots))

    def _split(self, slots: Sequence[pa.Array]) -> Iterator[Sequence[pa.Array]]:
        at = 0
        for _, function in self.functions:
            yield slots[at : at + len(function.slots)]
            at += len(function.slots)


def plan_aggregates(aggregates: Mapping[str, Aggregate], schema: pa.Schema, uid: str) -> AggregatePlan:
    """Plan types and state of the aggregates over an input schema.

    Raises:
        InvalidPipeline: a column is missing or has a type that the function cannot take, or there are no aggregates.
    """
    functions: list[tuple[str, PartialFunction]] = []
    for name, aggregate in aggregates.items():
        where = f"operator {uid!r}, aggregate {name!r}"
        data_type, by_type = (_type_of(column, schema, where) for column in (aggregate.column, aggregate.by))
        over = Over(
            name=name,
            aggregate=aggregate,
            column=aggregate.column or "",
            type=data_type,
            by_type=by_type,
            where=where,
            uid=uid,
        )
        functions.append((name, plan_function(over)))
    plan = AggregatePlan(tuple(functions), {name: aggregate.text for name, aggregate in aggregates.items()})
    names = [slot.name for slot in plan.slots]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidPipeline(f"operator {uid!r}: two aggregates keep state under {twice}; name one differently")
    return plan


def _type_of(column: str | None, schema: pa.Schema, where: str) -> pa.DataType | None:
    if column is None:
        return None
    if schema.get_field_index(column) < 0:
        raise InvalidPipeline(f"{where}: there is no column {column!r}; the input has {', '.join(schema.names)}")
    return schema.field(column).type


@dataclass(frozen=True)
class AggregateOperator(WokenWhenDue):
    """The operator; emits the new value of every key that the epoch touched (update mode), all keys (complete mode), or
    each key once (append mode), when the watermark has passed the event time among its key columns.

    In complete mode the driver has each epoch that has work run all shards (driver/due.py), so that their output
    together is the whole table.

    With event time rows at or below the late watermark are dropped, so that a key does not come back after it was
    emitted. A null time is never late and never passed, as in Spark.

    Attributes:
        event_time: the key column with event time, in append mode; in update mode if keys are forgotten by it; else
            empty.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    plan: AggregatePlan
    state_ddl: str
    event_time: str = ""
    mode: OutputMode = "append"

    @cached_property
    def output_schema(self) -> pa.Schema:
        return pa.schema([*emitted(list(self.key_schema), self.key_columns), *self.plan.outputs])

    @cached_property
    def _schema(self) -> StateSchema:
        return StateSchema(self.key_schema, pa.schema(self.plan.slots), time="due" if self.event_time else "")

    @property
    def state_schemas(self) -> Mapping[str, StateSchema]:
        return {STATE: self._schema}

    def entry(self) -> OperatorEntry:
        """Return the operator's description for manifests."""
        states = (StateEntry(STATE, "value", self.state_ddl, time=self._schema.time),)
        modes = f"{self.mode} by {self.event_time}" if self.event_time else ""
        return OperatorEntry(self.uid, "aggregate", self.key_ddl, states, modes, functions=dict(self.plan.texts))

    @property
    def time_domain(self) -> TimeDomain:
        """Without event time nothing is ever due."""
        return "event" if self.event_time else ""

    def process(
        self,
        slices: Iterable[RowSlice],
        version: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        """Reduce the epoch, combine with the state, emit."""
        body = self._once if self.event_time else self._all if self.mode == "complete" else self._changed
        return process_slices(slices, version, self.state_schemas, partial(body, clock), emits_anew=True)

    def _changed(
        self, clock: EpochClock, rows: GroupedRows, version: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        """Emit, in update mode, every key that has rows."""
        if rows.groups:
            changed = self._taken(clock, rows, version, result)
            yield self._emit(rows.keys, self._schema.values_of(changed))

    def _all(
        self, clock: EpochClock, rows: GroupedRows, version: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        """Emit, in complete mode, every key, once the shard is done with its rows."""
        if rows.groups:
            version = version.overlaid({STATE: self._taken(clock, rows, version, result)})
        for stored in version.iter_rows(STATE) if due else ():
            yield self._emit(self._schema.keys_of(stored), self._schema.values_of(stored))

    def _taken(self, clock: EpochClock, rows: GroupedRows, version: StateReader, result: ShardResult) -> pa.RecordBatch:
        """Return the keys that have rows, with them; they are the slice's changes."""
        found, slots = self._merged(rows, version, clock)
        result.changes[STATE] = changed = self._schema.batch(rows.hashes, None, rows.keys, slots)
        result.rows_added = int(rows.groups - np.count_nonzero(found))
        return changed

    def _once(
        self, clock: EpochClock, rows: GroupedRows, version: StateReader, result: ShardResult, *, due: bool
    ) -> Iterator[pa.RecordBatch]:
        """Remove the keys that the watermark has passed. Emit those, with these rows, in append mode; in update mode
        the keys that have rows."""
        rows = self._without_late(rows, clock, result)
        changed = self._schema.empty()
        if rows.groups:
            found, slots = self._merged(rows, version, clock)
            micros, valid = micros_of(rows.keys[self.key_columns.index(self.event_time)])
            times = nullable_millis(millis_up(micros), valid)
            changed = self._schema.batch(rows.hashes, None, rows.keys, slots, times=times)
            result.rows_added = int(rows.groups - np.count_nonzero(found))
            if self.mode == "update":
                yield self._emit(rows.keys, slots)
        if due:
            result.due_taken[STATE] = clock.watermark_ms
            passed = version.overlaid({STATE: changed}).due(STATE, clock.watermark_ms)
            changed = fold([removal_of(passed, self._schema), changed], self._schema, drop_deleted=False)
            result.rows_added -= passed.num_rows
            if passed.num_rows and self.mode == "append":
                yield self._emit(self._schema.keys_of(passed), self._schema.values_of(passed))
        result.changes[STATE] = changed

    def _without_late(self, rows: GroupedRows, clock: EpochClock, result: ShardResult) -> GroupedRows:
        """Return the rows that are not late; a partial row counts as its rows."""
        if rows.groups == 0:
            return rows
        late = is_late(rows.rows.column(self.event_time), clock.late_watermark_ms)
        return result.on_time(rows, late, rows_behind(rows.rows))

    def _merged(self, rows: GroupedRows, version: StateReader, clock: EpochClock) -> tuple[Mask, list[pa.Array]]:
        """Return per key whether the state has it, and its slots with these rows added."""
        found, before = version.find(STATE, rows.hashes, rows.keys)
        order = self.plan.order(rows, clock.epoch)
        slots = self.plan.reduce(rows.rows, Groups(rows.starts, rows.rows.num_rows), order)
        return found, self.plan.merge(before[: len(slots)], slots) if bool(found.any()) else slots

    def _emit(self, keys: Sequence[pa.Array], slots: Sequence[pa.Array]) -> pa.RecordBatch:
        columns = [*emitted(keys, self.key_columns), *self.plan.finish(slots)]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)
