"""A processor on rows that a test gives it, without Spark's Java: the operator of a job's tasks, in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql import types as T

from state_runtime.base.durations import parse_duration_us
from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.settings import JobSettings
from state_runtime.pipeline.graph import Edge, OperatorNode, Port
from state_runtime.pipeline.operators import (
    TIME_MODES,
    ProcessorStep,
    VectorizedStep,
    arrow_schema,
    build_operator,
    parse_schema,
)
from state_runtime.pipeline.spark_settings import SessionSettings
from state_runtime.pipeline.watermark import ClockInputs, WatermarkColumn
from state_runtime.processors.event_time import micros_of
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import LATE, LATE_OF_SIDE, EpochClock, RowSlice
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, SIDE_COLUMN
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator, VectorizedProcessor
from state_runtime.snapshot.manifest import TimeEntry
from state_runtime.spark.columns import DELAY_METADATA
from state_runtime.state.changed_rows import on_top
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.version import OpenVersion
from stillstate.testing.clocks import START, HeldClocks, HeldTime, millis_of, time_of
from stillstate.testing.rows import Rows, as_batch, as_rows
from stillstate.testing.state_access import ByHandle, InColumns, read_state, read_timers, written_state

__all__ = ["ProcessorTester"]

Schema: TypeAlias = "T.StructType | str"

_UID: Final = "tested"
_SETTLING_EPOCHS_MAX: Final = 1000
_NOTHING_DUE_MS: Final = -(2**62)


@dataclass(frozen=True)
class _Input:
    """One stream that the processor reads."""

    name: str
    schema: T.StructType
    keys: tuple[str, ...]
    time: str

    @property
    def others(self) -> T.StructType:
        """Its columns without the keys."""
        return T.StructType([field for field in self.schema.fields if field.name not in self.keys])


class ProcessorTester:
    """Runs a processor on rows, epoch by epoch: its timers, TTLs, late rows and watermark as in a job.

    It takes a `StatefulProcessor` (rows, or pandas with `pandas=True`) or a `VectorizedProcessor`, also one of two
    connected streams. What runs is the operator of a job's tasks, on one shard whose state is in memory; each epoch
    gets a copy of the processor. Errors are those of a job: `UserCodeError` with the processor's own as its cause.

    Example:
        tester = ProcessorTester(Sessions(), "user string, at timestamp", "user string, clicks long", key="user",
                                 time_mode="eventTime", watermark=("at", "10 seconds"))
        assert tester.send([("ann", datetime(2026, 1, 1, 12, 0))]) == []
        assert tester.advance_watermark(datetime(2026, 1, 1, 13, 0)) == [Row(user="ann", clicks=1)]
        assert tester.state("clicks", "ann") is None

    Args:
        processor: an instance.
        rows: schema of the input; of connected streams one for each by the name that the processor has for it.
        output_schema: of the processor's output.
        key: the key columns, or the only one; of connected streams that have other names of them, by stream.
        pandas: the processor is of the flavour of `transformWithStateInPandas`.
        time_mode: "none", "processingTime" or "eventTime" of a `StatefulProcessor`; a vectorised one has its own.
        watermark: column and delay of the input, as of `withWatermark`; of connected streams by stream.
        outputs: schemas of the side outputs that `process(…, outputs=…)` declares.
        initial_state: what `transform_with_state(initial_state=…)` gets, as a pandas frame or an Arrow table.
        now: processing time at the beginning.
        time_zone: in which pandas processors see timestamps.

    Raises:
        InvalidPipeline, UserCodeError: no job could run it so.
    """

    def __init__(
        self,
        processor: Any,
        rows: Schema | Mapping[str, Schema],
        output_schema: Schema,
        *,
        key: str | Sequence[str] | Mapping[str, str | Sequence[str]],
        pandas: bool = False,
        time_mode: str = "none",
        watermark: tuple[str, str] | Mapping[str, tuple[str, str]] | None = None,
        outputs: Mapping[str, Schema] | None = None,
        initial_state: Any = None,
        now: datetime = START,
        time_zone: str = "UTC",
    ) -> None:
        self._processor = processor
        given = dict(rows) if isinstance(rows, Mapping) else {"": rows}
        keys = key if isinstance(key, Mapping) else dict.fromkeys(given, key)
        marks = watermark if isinstance(watermark, Mapping) else {name: watermark for name in given if watermark}
        self._inputs = [_input(name, schema, keys[name], marks.get(name)) for name, schema in given.items()]
        step = _step(processor, output_schema, pandas, time_mode, outputs, tuple(n for n in given if n))
        self._schema = self._inputs[0].schema if len(self._inputs) == 1 else _united(self._inputs)
        node = OperatorNode(step, tuple(Port(Edge(number), each.keys) for number, each in enumerate(self._inputs)))
        sides = None if len(self._inputs) == 1 else (self._inputs[0].schema, self._inputs[1].schema)
        operator, _ = build_operator(node, self._schema, sides, JobSettings(), SessionSettings(time_zone))
        assert isinstance(operator, StatefulProcessorOperator | VectorizedOperator)
        self._operator = operator
        self._side_schemas = {
            name: arrow_schema(parse_schema(s, f"output {name!r}")) for name, s in (outputs or {}).items()
        }
        self._initial = initial_state
        self._held = HeldTime(millis_of(now))
        self._clocks = HeldClocks(
            columns=tuple(
                WatermarkColumn(each.time, "", int(each.schema[each.time].metadata[DELAY_METADATA]), source=each.name)
                for each in self._inputs
                if each.time
            ),
            inputs={_UID: ClockInputs(sources=frozenset(each.name for each in self._inputs))},
            held=self._held,
        )
        self._time: TimeEntry | None = None
        self._epoch = 0
        self._state: Mapping[str, pa.RecordBatch] = {n: s.empty() for n, s in operator.state_schemas.items()}
        self._sides: dict[str, list[Row]] = {}

    # --- rows and time -------------------------------------------------------------------------------------------

    def send(self, rows: Rows = (), /, **inputs: Rows) -> list[Row]:
        """Process rows as one epoch, and what they make due: the watermark moves as behind a batch in a job, and timers
        that it has reached fire.

        Args:
            rows: tuples, dictionaries or Rows; a pandas frame; or an Arrow table.
            inputs: of connected streams, by their names.

        Returns:
            The output, in its order.
        """
        self._sides = {}
        return [*self._run(self._rows_of(rows, inputs)), *self._settle()]

    def advance_time(self, by: str | timedelta) -> list[Row]:
        """Let processing time pass, and return what that makes due: timers of mode "processingTime".

        Args:
            by: a duration, such as "90 seconds".
        """
        self._sides = {}
        self._held.pass_by(by)
        return self._settle()

    def advance_watermark(self, to: datetime) -> list[Row]:
        """Move the watermark, as rows of all inputs would that are later by the delay, and return what that makes due.

        Args:
            to: the new watermark. A lower one than there is changes nothing, as in a job.
        """
        if not self._clocks.columns:
            raise InvalidPipeline(
                'advance_watermark() needs a watermark: ProcessorTester(…, watermark=("at", "0 seconds"))'
            )
        self._sides = {}
        self._held.push_watermark(to)
        return self._settle()

    @property
    def now(self) -> datetime:
        """Processing time."""
        return time_of(self._held.now_ms)

    @property
    def watermark(self) -> datetime | None:
        """The watermark by which the next rows are late; None before there is one."""
        watermark_ms = self._time.watermark_of(_UID) if self._time is not None else 0
        return time_of(watermark_ms) if watermark_ms else None

    def output(self, name: str) -> list[Row]:
        """Return the rows that the newest call gave to a side output: one that is declared, or "late" ("late_left" and
        "late_right" of connected streams), the rows that were dropped as late."""
        return self._sides.get(name, [])

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self, name: str, key: Any) -> Any:
        """Return the state of a key as the processor would read it: a tuple, a list of them, or a dictionary of them;
        None if it has none.

        Args:
            key: a value, or a tuple of the key columns.
        """
        return self._visited(name, [self._key_of(key)]).get(self._key_of(key))

    def states(self, name: str) -> dict[Any, Any]:
        """Return a state of all keys, by key (a tuple of its columns)."""
        stored = self._state[self._known(name)]
        schema = self._operator.state_schemas[name]
        keys = schema.keys_of(stored)
        return self._visited(name, list(dict.fromkeys(as_rows([pa.RecordBatch.from_arrays(keys, schema=schema.keys)]))))

    def set_state(self, name: str, key: Any, value: Any, *, due: datetime | None = None) -> None:
        """Set the state of a key as the processor would write it; None clears it.

        Args:
            value: a tuple (or Row, or dictionary), a list of them, or a dictionary of them, by the kind of the state.
            due: of a `TimedState(due=True)`: when the key falls due.
        """
        self._known(name)
        operator = self._operator
        if isinstance(operator, StatefulProcessorOperator):
            stand_in: Any = ByHandle(copy.deepcopy(self._processor), written_state(name, operator.kind_of(name), value))
        else:
            due_ms = None if due is None else millis_of(due)
            stand_in = InColumns(name, operator.state_schemas[name], is_set=True, value=value, due=due_ms)
        self._visit(stand_in, [self._key_of(key)])

    def timers(self, key: Any) -> list[datetime]:
        """Return the times for which a `StatefulProcessor` has set timers of a key, in order."""
        found: dict[Any, list[int]] = {}
        if isinstance(self._operator, StatefulProcessorOperator) and self._operator.time_mode != "none":
            self._visit(ByHandle(copy.deepcopy(self._processor), read_timers(found)), [self._key_of(key)])
        return [time_of(due_ms) for times in found.values() for due_ms in times]

    def _visited(self, name: str, keys: Sequence[Row]) -> dict[Any, Any]:
        operator = self._operator
        found: dict[Any, Any] = {}
        self._known(name)
        if isinstance(operator, StatefulProcessorOperator):
            visit = read_state(name, operator.kind_of(name), found)
            self._visit(ByHandle(copy.deepcopy(self._processor), visit), keys)
            return found
        reads = InColumns(name, operator.state_schemas[name])
        self._visit(reads, keys)
        return reads.found

    def _visit(self, stand_in: Any, keys: Sequence[Row]) -> None:
        """Let a stand-in handle rows of some keys that have nothing but the key. Nothing is due meanwhile."""
        if keys:
            self._process(stand_in, self._grouped(self._only_keys(keys)), self._clock(_NOTHING_DUE_MS, _NOTHING_DUE_MS))

    def _known(self, name: str) -> str:
        if name not in self._operator.state_ddl:
            raise InvalidPipeline(
                f"{type(self._processor).__name__} has no state {name!r}; it has {', '.join(self._operator.state_ddl)}"
            )
        return name

    def _key_of(self, key: Any) -> Row:
        values = key if isinstance(key, tuple | list) else (key,)
        return as_rows([as_batch([tuple(values)], self._operator.key_schema, "key()")])[0]

    def _only_keys(self, keys: Sequence[Row]) -> pa.RecordBatch:
        rows = as_batch(keys, self._operator.key_schema, "key()")
        schema, names = arrow_schema(self._schema), self._operator.key_columns
        columns = [
            rows.column(names.index(field.name)) if field.name in names else pa.nulls(len(keys), field.type)
            for field in schema
        ]
        if SIDE_COLUMN in schema.names:
            columns[schema.get_field_index(SIDE_COLUMN)] = pa.array([0] * len(keys), schema.field(SIDE_COLUMN).type)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    # --- epochs --------------------------------------------------------------------------------------------------

    def _rows_of(self, rows: Rows, inputs: Mapping[str, Rows]) -> dict[str, pa.RecordBatch]:
        given = {**({"": rows} if not inputs else {}), **inputs}
        names = [each.name for each in self._inputs]
        if unknown := [name for name in given if name not in names and (name or len(rows))]:
            said = f"send({unknown[0]}=…)" if unknown[0] else "send(rows)"
            raise InvalidPipeline(
                f"{said}: the inputs are {', '.join(f'{n}=…' for n in names) if names != [''] else 'rows'}"
            )
        return {
            each.name: as_batch(given.get(each.name, ()), arrow_schema(each.schema), f"send({each.name})")
            for each in self._inputs
        }

    def _run(self, given: Mapping[str, pa.RecordBatch]) -> list[Row]:
        """Run an epoch of the inputs' rows."""
        before, time = self._time, self._clocks.advanced(self._time, self._held.now_ms)
        late_ms = before.watermark_of(_UID) if before is not None else 0
        initial = self._initial_rows() if self._epoch == 0 else None
        rows = given[""] if "" in given else _together(self._inputs, given, arrow_schema(self._schema))
        self._time = self._clocks.observed(
            time, {each.time: _newest_ms(each, given) for each in self._inputs if each.time}
        )
        clock = EpochClock(time.batch_time_ms, time.watermark_of(_UID), late_ms, self._epoch + 1)
        return self._process(copy.deepcopy(self._processor), self._grouped(rows), clock, initial)

    def _settle(self) -> list[Row]:
        """Run epochs without rows as long as the clock makes any due, as a job does while its source is quiet."""
        found: list[Row] = []
        for _ in range(_SETTLING_EPOCHS_MAX):
            if not self._is_due(self._clocks.advanced(self._time, self._held.now_ms)):
                return found
            found += self._run({each.name: as_batch((), arrow_schema(each.schema), "") for each in self._inputs})
        raise InvalidPipeline(
            f"after {_SETTLING_EPOCHS_MAX} epochs timers still set timers that are due at once: a job would never be "
            "idle"
        )

    def _is_due(self, time: TimeEntry) -> bool:
        if self._operator.time_domain == "event":
            return time.watermark_of(_UID) > (self._time.watermark_of(_UID) if self._time is not None else 0)
        timed = [n for n, s in self._operator.state_schemas.items() if s.time == "due"]
        return self._operator.time_domain == "processing" and any(
            self._reader().due(name, time.batch_time_ms).num_rows for name in timed
        )

    def _clock(self, watermark_ms: int, late_ms: int) -> EpochClock:
        return EpochClock(self._held.now_ms, watermark_ms, late_ms, self._epoch + 1)

    def _reader(self) -> OpenVersion:
        return OpenVersion.of_batches("", self._state, self._operator.state_schemas, self._held.now_ms)

    def _process(
        self, processor: Any, rows: GroupedRows, clock: EpochClock, initial: GroupedRows | None = None
    ) -> list[Row]:
        reader = self._reader()
        result = replace(self._operator, processor=processor).process([RowSlice(rows)], reader, clock, 0, initial)
        late = LATE_OF_SIDE if len(self._inputs) == 2 else (LATE,)
        result.sides = {name: [] for name in (*late, *self._side_schemas)}
        found = as_rows(list(result.outputs))
        after = on_top(reader, result.changes, result.due_taken)
        self._state = {name: after.whole(name) for name in self._operator.state_schemas}
        self._epoch += 1
        for name, batches in result.sides.items():
            self._sides.setdefault(name, []).extend(as_rows(batches))
        return found

    def _grouped(self, rows: pa.RecordBatch) -> GroupedRows:
        operator = self._operator
        keys = [rows.column(name) for name in operator.key_columns]
        places = np.arange(rows.num_rows, dtype=np.int64)
        return group_rows(rows, hash_rows(keys), places, operator.key_columns, operator.key_schema)

    def _initial_rows(self) -> GroupedRows | None:
        if self._initial is None:
            return None
        given = self._initial if isinstance(self._initial, pa.Table) else pa.Table.from_pandas(self._initial)
        return self._grouped(as_batch(given, given.schema, "initial_state"))


def _input(name: str, rows: Schema, key: str | Sequence[str], mark: tuple[str, str] | None) -> _Input:
    schema = parse_schema(rows, f"the rows of {name}" if name else "the rows")
    keys = (key,) if isinstance(key, str) else tuple(key)
    if mark is None:
        return _Input(name, schema, keys, "")
    column, delay = mark
    if column not in schema.names or not isinstance(schema[column].dataType, T.TimestampType | T.TimestampNTZType):
        raise InvalidPipeline(
            f"watermark={mark!r} needs a timestamp column of the rows, which have {schema.simpleString()}"
        )
    metadata = {DELAY_METADATA: parse_duration_us(delay) // 1000}
    fields = [
        T.StructField(f.name, f.dataType, f.nullable, metadata if f.name == column else {}) for f in schema.fields
    ]
    return _Input(name, T.StructType(fields), keys, column)


def _step(
    processor: Any,
    output_schema: Schema,
    pandas: bool,
    time_mode: str,
    outputs: Mapping[str, Schema] | None,
    inputs: tuple[str, ...],
) -> ProcessorStep | VectorizedStep:
    if isinstance(processor, type):
        raise InvalidPipeline(f"ProcessorTester takes an instance, not the class: {processor.__name__}()")
    if len(inputs) not in (0, 2):
        raise InvalidPipeline(f"rows: connected streams are two, not {len(inputs)}")
    if isinstance(processor, VectorizedProcessor):
        return VectorizedStep(_UID, processor, output_schema, dict(outputs or {}), inputs)
    if inputs or outputs:
        raise InvalidPipeline("only a VectorizedProcessor has two inputs or side outputs")
    mode = TIME_MODES.get(time_mode.lower())
    if mode is None:
        raise InvalidPipeline(f"time_mode {time_mode!r} must be none, processingTime or eventTime")
    return ProcessorStep(_UID, processor, output_schema, pandas, time_mode=mode)


def _united(inputs: Sequence[_Input]) -> T.StructType:
    """Return the columns of two streams as one; see `processors/sides.py`."""
    first, second = inputs
    return T.StructType(
        [
            *(first.schema[name] for name in first.keys),
            T.StructField(SIDE_COLUMN, T.IntegerType()),
            T.StructField(LEFT_COLUMN, first.others),
            T.StructField(RIGHT_COLUMN, second.others),
        ]
    )


def _together(inputs: Sequence[_Input], given: Mapping[str, pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of two streams as one."""
    parts = []
    for number, each in enumerate(inputs):
        rows = given[each.name]
        keys = [rows.column(name) for name in each.keys]
        struct = schema.field((LEFT_COLUMN, RIGHT_COLUMN)[number]).type
        others = pa.StructArray.from_arrays([rows.column(f.name) for f in struct], fields=list(struct))
        nothing = pa.nulls(rows.num_rows, schema.field((RIGHT_COLUMN, LEFT_COLUMN)[number]).type)
        side = pa.array(np.full(rows.num_rows, number), schema.field(SIDE_COLUMN).type)
        parts.append([*keys, side, *((others, nothing) if number == 0 else (nothing, others))])
    columns = [
        pa.concat_arrays([left.cast(f.type), right.cast(f.type)]) for left, right, f in zip(*parts, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _newest_ms(each: _Input, given: Mapping[str, pa.RecordBatch]) -> int | None:
    micros, valid = micros_of(given[each.name].column(each.time))
    seen = micros if valid is None else micros[valid]
    return int(seen.max()) // 1000 if len(seen) else None
