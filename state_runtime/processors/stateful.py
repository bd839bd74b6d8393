"""pyspark's own `StatefulProcessor`, both flavours, driven a shard at a time.

Spark asks its state store over a socket for every `get` and `update`. Here a shard's keys are looked up at once before
the first call, user code works on Python values, and what it changed is written at once after the last call.
"""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined]  # what namedtuple is made of
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import TimerValues

from state_runtime.errors import InvalidData
from state_runtime.processors.columns import from_python, to_python
from state_runtime.processors.frames import frames_to_batches, split_frame, table_to_frame
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.guard import guarded, guarded_iterator
from state_runtime.processors.handle import Handle
from state_runtime.processors.operator import EpochClock, ShardResult
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.local import OpenVersion
from state_runtime.state.table import StateSchema

__all__ = ["StatefulProcessorOperator"]


@dataclass(frozen=True)
class StatefulProcessorOperator:
    """An operator around a user's `StatefulProcessor`.

    Attributes:
        processor: as the user made it; every task gets a copy of its own through Spark's closure.
        pandas: the flavour of `transformWithStateInPandas` (iterators of frames), else rows.
        state_ddl: Spark's DDL of each state's value columns, for the manifest.
    """

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    output_schema: pa.Schema
    state_schemas: Mapping[str, StateSchema]
    state_ddl: Mapping[str, str]
    processor: Any
    pandas: bool
    output_rows_per_batch: int
    frame_rows_max: int = 10_000

    def entry(self) -> OperatorEntry:
        """How a manifest describes the operator."""
        states = tuple(StateEntry(name, "value", ddl) for name, ddl in sorted(self.state_ddl.items()))
        return OperatorEntry(self.uid, "stateful-processor", self.key_ddl, states)

    def process(self, rows: GroupedRows, version: OpenVersion, clock: EpochClock, shard: int) -> ShardResult:
        """Call the user's code once per key, in the order of the key hashes; `close()` is always called."""
        result = ShardResult(iter(()))
        result.outputs = self._run(rows, version, shard, result)
        return result

    def _run(
        self, rows: GroupedRows, version: OpenVersion, shard: int, result: ShardResult
    ) -> Iterator[pa.RecordBatch]:
        handle = Handle(self.uid, self.state_schemas, rows, version)
        timer_values = TimerValues(-1, -1)
        guard = partial(guarded, self.uid, shard)
        guard(lambda: self.processor.init(handle))
        handle.initialized()
        try:
            produce = self._frames if self.pandas else self._rows
            yield from produce(rows, handle, timer_values, guard)
        finally:
            guard(self.processor.close)
        for name, state in handle.states.items():
            result.changes[name], gained = state.changes(rows)
            result.rows_added += gained

    def _rows(
        self, rows: GroupedRows, handle: Handle, timer_values: TimerValues, guard: Callable[[Callable[[], Any]], Any]
    ) -> Iterator[pa.RecordBatch]:
        names = rows.rows.schema.names
        row_class = row_class_of(names)
        made = list(map(partial(tuple.__new__, row_class), zip(*map(to_python, rows.rows.columns))))
        keys = list(zip(*map(to_python, rows.keys)))
        handle_input = self.processor.handleInputRows
        cursor = handle.cursor
        pending: list[Any] = []

        def call() -> Iterator[list[Any]]:
            nonlocal pending
            starts, stops = rows.starts.tolist(), rows.stops.tolist()
            for group, key in enumerate(keys):
                cursor.group = group
                pending.extend(handle_input(key, iter(made[starts[group] : stops[group]]), timer_values))
                if len(pending) >= self.output_rows_per_batch:
                    full, pending = pending, []
                    yield full
            yield pending

        yield from (self._batch_of_rows(p) for p in guarded_iterator(call(), guard) if p)

    def _batch_of_rows(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """User rows as a batch: matched by name, missing columns are null, others are ignored (Spark's rule)."""
        wanted = self.output_schema.names
        where = f"the output of operator {self.uid!r}"
        if any(getattr(row, "__fields__", None) != wanted for row in rows):
            rows = [_ordered(row, wanted, self.uid) for row in rows]
        columns = list(zip(*rows)) if wanted else []
        return pa.RecordBatch.from_arrays(
            [from_python(column, f, lambda: where) for column, f in zip(columns, self.output_schema)],
            schema=self.output_schema,
        )

    def _frames(
        self, rows: GroupedRows, handle: Handle, timer_values: TimerValues, guard: Callable[[Callable[[], Any]], Any]
    ) -> Iterator[pa.RecordBatch]:
        keys = list(zip(*map(to_python, rows.keys)))
        handle_input = self.processor.handleInputRows
        cursor = handle.cursor
        frame = table_to_frame(rows.rows)
        where = f"the output of operator {self.uid!r}"

        def call() -> Iterator[list[Any]]:
            pending: list[Any] = []
            starts, stops = rows.starts.tolist(), rows.stops.tolist()
            for group, key in enumerate(keys):
                cursor.group = group
                pieces = split_frame(frame, starts[group], stops[group], self.frame_rows_max)
                produced = handle_input(key, pieces, timer_values)
                pending.extend(produced)
                if len(pending) >= 8192:
                    yield pending
                    pending = []
            yield pending

        for pending in guarded_iterator(call(), guard):
            yield from frames_to_batches(pending, self.output_schema, where)


def row_class_of(names: Sequence[str]) -> type[Row]:
    """A `Row` class for one schema, several times faster than `Row` and used like it.

    Instances are made in C (`tuple.__new__`), and a field is read by a C descriptor, as in a namedtuple, where `Row` searches
    its list of names in Python on every access. Names that a tuple has already (`count`, `index`) stay the tuple's, as in Row.
    """
    members: dict[str, Any] = {"__fields__": list(names)}
    for position, name in enumerate(names):
        if name.isidentifier() and not hasattr(Row, name):
            members[name] = _tuplegetter(position, name)
    return type("Row", (Row,), members)


def _ordered(row: Any, wanted: Sequence[str], uid: str) -> tuple[Any, ...]:
    if not hasattr(row, "asDict"):
        raise InvalidData(
            f"operator {uid!r}: handleInputRows yielded a {type(row).__name__}; yield pyspark.sql.Row objects, "
            "or use transform_with_state_in_pandas for data frames"
        )
    fields = row.asDict()
    return tuple(fields.get(name) for name in wanted)
