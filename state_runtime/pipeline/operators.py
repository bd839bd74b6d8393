"""Compilation of the user's operator steps to the operators that run in tasks, checked on the schemas of their
input."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from state_runtime.base.durations import parse_duration_us
from state_runtime.base.errors import InvalidPipeline, StillstateError, UserCodeError
from state_runtime.base.joining import JoinTerms
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import raised_by_user
from state_runtime.pipeline.collations import refuse_collations
from state_runtime.pipeline.graph import OperatorNode, Port
from state_runtime.pipeline.key_names import way_to_key
from state_runtime.pipeline.odd_times import hour_that_comes_twice
from state_runtime.pipeline.spark_settings import SessionSettings
from state_runtime.pipeline.watermark import LATENESS_METADATA, event_time_column
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.as_of_join import AsOfJoinOperator
from state_runtime.processors.builtin.deduplicate import SEEN, plan_deduplicate
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import check_keys_match, plan_interval_join
from state_runtime.processors.builtin.latest import LATEST, plan_latest
from state_runtime.processors.builtin.window_state import WINDOW, OutputMode
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.declared.windows import SessionWindow, TimeWindow
from state_runtime.processors.operator import Operator
from state_runtime.processors.user.connected import connected_input
from state_runtime.processors.user.handle import DeclaringHandle, check_map_key, check_state_name, layout_of
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator, VectorizedProcessor, plan_states, time_mode_of
from state_runtime.spark.arrow import arrow_schema_of, spark_schema_of
from state_runtime.spark.columns import DELAY_METADATA
from state_runtime.spark.sql import ddl, struct_of_ddl
from state_runtime.state.table import StateSchema, Time

__all__ = [
    "TIME_MODES",
    "AggregateStep",
    "AsOfJoinStep",
    "DeduplicateStep",
    "IntervalJoinStep",
    "LatestByStep",
    "OperatorStep",
    "ProcessorStep",
    "TimeMode",
    "VectorizedStep",
    "WindowStep",
    "build_operator",
    "makes_table",
    "output_schema",
]

_LOG = logging.getLogger(__name__)

TimeMode = Literal["none", "processing", "event"]
TIME_MODES: Final[Mapping[str, TimeMode]] = {"none": "none", "processingtime": "processing", "eventtime": "event"}
"""By Spark's own names, in lower case."""


@dataclass(frozen=True)
class ProcessorStep:
    """A `StatefulProcessor` behind a key."""

    uid: str
    processor: Any
    output_schema: T.StructType | str
    pandas: bool
    output_mode: str = "update"
    time_mode: TimeMode = "none"
    event_time_column: str = ""
    initial_state: DataFrame | None = None

    @property
    def kind(self) -> str:
        """The method that made it, as of all steps."""
        return "transform_with_state_in_pandas" if self.pandas else "transform_with_state"


@dataclass(frozen=True)
class AggregateStep:
    """Built-in aggregates behind a key.

    Attributes:
        forgets: in update mode too late rows are dropped, and keys that the watermark has passed are removed, as Spark
            does it: event time is among the keys. Append mode always does.
    """

    uid: str
    kind: ClassVar[str] = "aggregate"
    aggregates: Mapping[str, Aggregate]
    output_mode: OutputMode = "update"
    forgets: bool = False


@dataclass(frozen=True)
class WindowStep:
    """Built-in aggregates per key and window of event time.

    Attributes:
        time: in complete mode the column of a row's time, which may be without a watermark then; "": the one with event
            time.
    """

    uid: str
    kind: ClassVar[str] = "window"
    window: TimeWindow | SessionWindow
    aggregates: Mapping[str, Aggregate]
    output_mode: OutputMode
    allowed_lateness: str
    time: str = ""


@dataclass(frozen=True)
class VectorizedStep:
    """A `VectorizedProcessor` behind a key."""

    uid: str
    kind: ClassVar[str] = "process"
    processor: VectorizedProcessor
    output_schema: T.StructType | str
    outputs: Mapping[str, T.StructType | str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LatestByStep:
    """The row of each key with the greatest values of `order` (where `ascending` is set, the smallest), compared from
    left to right; no `columns` means all."""

    uid: str
    kind: ClassVar[str] = "latest_by"
    order: tuple[str, ...]
    columns: tuple[str, ...]
    ascending: tuple[bool, ...] = (False,)


@dataclass(frozen=True)
class DeduplicateStep:
    """The first row of each key."""

    uid: str
    kind: ClassVar[str] = "deduplicate"
    within_watermark: bool = False


@dataclass(frozen=True)
class IntervalJoinStep:
    """Rows of two streams with equal keys and times within a range.

    Attributes:
        event_time: the side whose event time is that of the output, "left" or "right"; "": the output has none; "both":
            a query says itself which columns carry it.
        waits_ms: of a query how far the clock of its output is behind its own; None: as long as rows may wait.
    """

    uid: str
    kind: ClassVar[str] = "interval_join"
    terms: JoinTerms
    event_time: str = ""
    waits_ms: int | None = None

    @property
    def held_back_ms(self) -> int:
        """How far the clock of its output is behind its own: a row waits for a later one of the other side, and comes
        with the time that it had."""
        if self.waits_ms is not None:
            return self.waits_ms
        waits_us = {"": 0, "left": self.terms.upper_us, "right": -self.terms.lower_us}[self.event_time]
        return max(0, -(-waits_us // 1000))


@dataclass(frozen=True)
class AsOfJoinStep:
    """Rows of the left stream, each with the newest row of the right one with an equal key, as of its own time.

    Attributes:
        terms: "inner" or "left-outer"; the range goes from minus the tolerance to 0.
    """

    uid: str
    kind: ClassVar[str] = "as_of_join"
    terms: JoinTerms


JoinedSides: TypeAlias = tuple[T.StructType, T.StructType]
"""The columns of both sides of a join."""


class NoEventTime(InvalidPipeline):
    """An operator goes by event time, and no column of its input carries any."""


OperatorStep: TypeAlias = (
    ProcessorStep
    | AggregateStep
    | WindowStep
    | VectorizedStep
    | LatestByStep
    | DeduplicateStep
    | IntervalJoinStep
    | AsOfJoinStep
)


def makes_table(step: OperatorStep) -> bool:
    """Return whether a step gives all its rows in each epoch that has work for it: complete mode. Of user code the mode
    changes nothing."""
    return isinstance(step, AggregateStep | WindowStep) and step.output_mode == "complete"


def build_operator(
    node: OperatorNode,
    schema: T.StructType,
    sides: JoinedSides | None,
    settings: JobSettings,
    session: SessionSettings,
) -> tuple[Operator, frozenset[str]]:
    """Build the operator of a node.

    Args:
        schema: of the node's input, with the mark on the column that carries event time.
        sides: of a join; None for other operators.
        session: the settings taken from Spark's session.

    Returns:
        The operator, and the states that its processor deletes (`deleteIfExists`).

    Raises:
        InvalidPipeline: it cannot run on this input; NoEventTime names no remedy.
        UserCodeError: a processor's `init` or `states` raised.
    """
    step: OperatorStep = node.step
    keys = T.StructType([_key_field(schema, name, step.uid) for name in node.keys])
    if isinstance(step, ProcessorStep):
        return _processor(step, keys, schema, settings, session)
    none: frozenset[str] = frozenset()
    if isinstance(step, AggregateStep):
        return _aggregate(step, keys, schema), none
    if isinstance(step, WindowStep):
        return _window(step, keys, schema), none
    if isinstance(step, IntervalJoinStep | AsOfJoinStep):
        assert sides is not None
        return _join(step, node.ports, keys, sides, settings), none
    operator = _vectorized(step, keys, schema, settings)
    if sides is not None and isinstance(step, VectorizedStep):
        operator = _connected(step, operator, node.ports, sides)
    return operator, none


def output_schema(step: OperatorStep, operator: Operator, given: T.StructType) -> T.StructType:
    """Return an operator's output schema, with the mark on the column that carries event time, if it has one.

    An interval join's output has one if the step says whose: rows come long after their own time, so operators behind
    it must go by a clock that is held back (`IntervalJoinStep.held_back_ms`). An as-of join's rows come when the
    watermark has reached their time, as windows do.

    Args:
        given: the operator's input.
    """
    schema = spark_schema_of(operator.output_schema)
    if isinstance(step, ProcessorStep):
        marked = step.event_time_column
        if marked and (
            marked not in schema.names or not isinstance(schema[marked].dataType, T.TimestampType | T.TimestampNTZType)
        ):
            raise InvalidPipeline(
                f"operator {step.uid!r}: event_time_column {marked!r} must be a timestamp column of its output, which "
                f"has {schema.simpleString()}"
            )
        metadata: dict[str, Any] = {DELAY_METADATA: 0}
    elif isinstance(step, DeduplicateStep) or (isinstance(step, AggregateStep) and step.output_mode == "append"):
        marked = event_time_column(given)
        metadata = given[marked].metadata if marked else {}
    elif isinstance(step, WindowStep):
        # Spark's window_time() looks for this metadata; it gives the time of a window's last microsecond.
        kind = "spark.timeWindow" if isinstance(step.window, TimeWindow) else "spark.sessionWindow"
        marked, metadata = WINDOW, {DELAY_METADATA: 0, kind: True}
        if lateness_us := parse_duration_us(step.allowed_lateness):
            metadata[LATENESS_METADATA] = lateness_us
    elif (
        isinstance(operator, IntervalJoinOperator)
        and isinstance(step, IntervalJoinStep)
        and step.event_time in ("left", "right")
    ):
        plan = operator.plan
        marked, metadata = plan.left_time if step.event_time == "left" else plan.right_time, {DELAY_METADATA: 0}
    elif isinstance(operator, AsOfJoinOperator):
        marked, metadata = operator.plan.left_time, {DELAY_METADATA: 0}
    else:
        return schema
    fields = [
        T.StructField(f.name, f.dataType, f.nullable, metadata if f.name == marked else {}) for f in schema.fields
    ]
    return T.StructType(fields)


def _aggregate(step: AggregateStep, keys: T.StructType, schema: T.StructType) -> AggregateOperator:
    plan = plan_aggregates(step.aggregates, arrow_schema(schema), step.uid)
    taken = set(keys.names) & set(step.aggregates)
    if taken:
        raise InvalidPipeline(
            f"operator {step.uid!r}: {sorted(taken)} are key columns; name the aggregates differently"
        )
    event_time = ""
    if step.output_mode == "append" or step.forgets:
        event_time = _needed_event_time(step.uid, schema, 'output_mode "append" needs')
        _check_in_time(step.uid, schema, event_time)
        if event_time not in keys.names:
            raise InvalidPipeline(
                f'operator {step.uid!r}: output_mode "append" emits a key once the watermark has passed its event '
                f"time, and {event_time!r} is not among its keys. Key by it, too; or aggregate over a time, with "
                '.window(…, output_mode="append"); or leave out output_mode: then a key is emitted whenever it changes'
            )
    slots = pa.schema([pa.field(s.name, s.type) for s in plan.slots])
    return AggregateOperator(
        uid=step.uid,
        key_columns=tuple(keys.names),
        key_ddl=ddl(keys),
        key_schema=arrow_schema(keys),
        plan=plan,
        state_ddl=ddl(spark_schema_of(slots)),
        event_time=event_time,
        mode=step.output_mode,
    )


def _window(step: WindowStep, keys: T.StructType, schema: T.StructType) -> Operator:
    time = step.time or _needed_event_time(step.uid, schema, "windows need")
    operator = plan_windows(
        uid=step.uid,
        key_columns=tuple(keys.names),
        key_ddl=ddl(keys),
        key_schema=arrow_schema(keys),
        schema=arrow_schema(schema),
        time_column=time,
        window=step.window,
        aggregates=step.aggregates,
        mode=step.output_mode,
        ddl=lambda columns: ddl(spark_schema_of(columns)),
        allowed_lateness=step.allowed_lateness,
        drops_late=bool(event_time_column(schema)),
    )
    _check_in_time(step.uid, schema, time, operator.lateness_us)
    return operator


def _check_in_time(uid: str, schema: T.StructType, event_time: str, lateness_us: int = 0) -> None:
    """Refuse a pipeline that would drop rows as late although no input was late: a window that stays open longer is
    emitted when the watermark has long passed its time.

    Args:
        event_time: the column of the operator's event time.
        lateness_us: how long after the watermark the operator itself takes rows.
    """
    emitted_us = int(schema[event_time].metadata.get(LATENESS_METADATA, 0))
    if emitted_us > lateness_us:
        raise InvalidPipeline(
            f"operator {uid!r}: the allowed_lateness of the window before lets rows come up to {emitted_us / 1e6:g} "
            "seconds after the watermark has passed their time, and this operator would drop them as late. Leave "
            "allowed_lateness out there and add it to the delay of withWatermark, which every operator goes by; or, if "
            "this is a window, give it at least that allowed_lateness, too"
        )


def _needed_event_time(uid: str, schema: T.StructType, who_needs: str) -> str:
    """Return the column with event time; refuse an input without one."""
    if found := event_time_column(schema):
        return found
    raise NoEventTime(f"operator {uid!r}: {who_needs} a column with event time")


def _join(
    step: IntervalJoinStep | AsOfJoinStep,
    ports: tuple[Port, ...],
    keys: T.StructType,
    sides: JoinedSides,
    settings: JobSettings,
) -> IntervalJoinOperator | AsOfJoinOperator:
    times = [event_time_column(side) for side in sides]
    for name, time in zip(("left", "right"), times):
        if not time and step.terms.has_range:
            raise InvalidPipeline(
                f"operator {step.uid!r}: the {name} stream of the join has no event time; call Spark's withWatermark "
                "on it"
            )
    plan = plan_interval_join(
        arrow_schema(sides[0]),
        arrow_schema(sides[1]),
        left_keys=ports[0].keys,
        right_keys=ports[1].keys,
        left_time=times[0],
        right_time=times[1],
        terms=step.terms,
        uid=step.uid,
    )
    made = AsOfJoinOperator if isinstance(step, AsOfJoinStep) else IntervalJoinOperator
    return made(
        uid=step.uid,
        key_columns=tuple(keys.names),
        key_ddl=ddl(keys),
        plan=plan,
        state_ddl={name: ddl(spark_schema_of(columns)) for name, columns in made.values_of(plan).items()},
        output_rows_per_batch=settings.output_rows_per_batch,
    )


def _vectorized(
    step: VectorizedStep | LatestByStep | DeduplicateStep,
    keys: T.StructType,
    schema: T.StructType,
    settings: JobSettings,
) -> VectorizedOperator:
    processor: Any
    kind: Literal["vectorized", "latest-by", "deduplicate"]
    key_columns = tuple(keys.names)
    times: dict[str, Time] = {}
    ttl_ms: dict[str, int] = {}
    entries: dict[str, T.StructType | None] = {}
    event_time = event_time_column(schema)
    modes = ""
    if isinstance(step, VectorizedStep):
        kind, processor = "vectorized", step.processor
        planned = _states_of(step)
        states, entries = planned.values, planned.entries
        times, ttl_ms = planned.times, planned.ttl_ms
        output = _declared_output(step)
        if time_mode_of(processor, step.uid) != "event" or step.inputs:
            event_time = ""
        else:
            event_time = _needed_event_time(step.uid, schema, 'time_mode "event" needs')
            _check_in_time(step.uid, schema, event_time)
    elif isinstance(step, LatestByStep):
        processor = plan_latest(key_columns, step.order, step.columns, arrow_schema(schema), step.uid, step.ascending)
        kind, modes = "latest-by", processor.modes
        states = {LATEST: T.StructType([schema[name] for name in processor.kept])}
        output = T.StructType([*keys.fields, *states[LATEST].fields])
        event_time = ""
    else:
        delay_ms = int(schema[event_time].metadata[DELAY_METADATA]) if event_time else 0
        processor = plan_deduplicate(
            key_columns, event_time, delay_ms, step.within_watermark, arrow_schema(schema), step.uid
        )
        if processor.event_time:
            _check_in_time(step.uid, schema, processor.event_time)
        kind, states, output = "deduplicate", {SEEN: T.StructType([])}, schema
        times, modes = {SEEN: processor.state_time}, processor.modes
    return VectorizedOperator(
        uid=step.uid,
        key_columns=key_columns,
        key_ddl=ddl(keys),
        key_schema=arrow_schema(keys),
        output_schema=arrow_schema(output),
        state_schemas={
            name: StateSchema(
                arrow_schema(keys),
                arrow_schema(value),
                None if entries.get(name) is None else arrow_schema(entries[name] or T.StructType([])),
                time=times.get(name, ""),
            )
            for name, value in states.items()
        },
        state_ddl={name: ddl(value) for name, value in states.items()},
        entry_ddl={name: ddl(entry) for name, entry in entries.items() if entry},
        kind=kind,
        processor=processor,
        output_rows_per_batch=settings.output_rows_per_batch,
        ttl_ms=ttl_ms,
        event_time=event_time,
        modes=modes,
        outputs=_declared_sides(step) if isinstance(step, VectorizedStep) else {},
    )


def _connected(
    step: VectorizedStep, operator: VectorizedOperator, ports: tuple[Port, ...], sides: JoinedSides
) -> VectorizedOperator:
    """Return an operator that knows the streams that it connects."""
    schemas = [arrow_schema(side) for side in sides]
    check_keys_match(schemas[0], schemas[1], ports[0].keys, ports[1].keys, f"operator {step.uid!r}, connect()")
    times = ["", ""]
    if time_mode_of(step.processor, step.uid) == "event":
        times = [event_time_column(side) for side in sides]
        for side, time in zip(sides, times):
            if time:
                _check_in_time(step.uid, side, time)
        if not any(times):
            raise NoEventTime(f'operator {step.uid!r}: time_mode "event" needs a column with event time')
    inputs = {
        name: connected_input(number, schemas[number], ports[number].keys, times[number])
        for number, name in enumerate(step.inputs)
    }
    return replace(operator, inputs=inputs)


@dataclass(frozen=True)
class _VectorizedStates:
    """The states that a vectorised processor names, by name.

    Attributes:
        values: their value columns.
        entries: of a map its key columns; none of a list; None of a state with one value.
    """

    values: dict[str, T.StructType]
    entries: dict[str, T.StructType | None]
    times: dict[str, Time]
    ttl_ms: dict[str, int]


def _states_of(step: VectorizedStep) -> _VectorizedStates:
    where = f"operator {step.uid!r}: states() of {type(step.processor).__name__}"
    try:
        declared = copy.deepcopy(step.processor).states()
    except StillstateError:
        raise
    except Exception as error:
        raise UserCodeError(f"{where} raised {raised_by_user(error)}") from error
    if not isinstance(declared, Mapping) or not all(isinstance(name, str) for name in declared):
        raise InvalidPipeline(f'{where} must return a mapping of names to schemas, as in {{"totals": "n long"}}')
    if not declared:
        raise InvalidPipeline(f"{where} names no state; stateless code needs no key and belongs into transform()")
    planned = plan_states(declared, step.processor, step.uid)
    schemas = {
        check_state_name(step.uid, name): parse_schema(each.schema, f"state {name!r} of operator {step.uid!r}")
        for name, each in planned.items()
    }
    entries: dict[str, T.StructType | None] = dict.fromkeys(planned)
    for name, each in planned.items():
        if each.kind == "list":
            entries[name] = T.StructType([])
        elif each.kind == "map":
            what = f"the map key of state {name!r} of operator {step.uid!r}"
            entries[name] = found = parse_schema(each.key, what)
            refuse_collations(found, what)
            check_map_key(name, arrow_schema(found))
    return _VectorizedStates(
        values=schemas,
        entries=entries,
        times={name: each.time for name, each in planned.items()},
        ttl_ms={name: each.ttl_ms for name, each in planned.items() if each.ttl_ms is not None},
    )


def _processor(
    step: ProcessorStep,
    keys: T.StructType,
    schema: T.StructType,
    settings: JobSettings,
    session: SessionSettings,
) -> tuple[StatefulProcessorOperator, frozenset[str]]:
    event_time = ""
    if step.time_mode == "event":
        event_time = _needed_event_time(step.uid, schema, "time_mode eventTime needs")
        _check_in_time(step.uid, schema, event_time)
    handle = _declared_states(step)
    key_schema = arrow_schema(keys)
    values: dict[str, T.StructType] = {}
    entries: dict[str, T.StructType] = {}
    for name, declared in handle.declared.items():
        values[name] = parse_schema(declared.schema, f"state {name!r} of operator {step.uid!r}")
        if session.is_avro:
            _check_nullable(name, values[name], step.uid)
        if declared.kind == "map":
            what = f"the map key of state {name!r} of operator {step.uid!r}"
            entries[name] = parse_schema(declared.entry_schema, what)
            refuse_collations(entries[name], what)
    operator = StatefulProcessorOperator(
        uid=step.uid,
        key_columns=tuple(keys.names),
        key_ddl=ddl(keys),
        key_schema=key_schema,
        output_schema=arrow_schema(_declared_output(step)),
        state_schemas={
            name: layout_of(
                declared,
                key_schema,
                arrow_schema(values[name]),
                arrow_schema(entries[name]) if name in entries else None,
            )
            for name, declared in handle.declared.items()
        },
        state_ddl={name: ddl(value) for name, value in values.items()},
        processor=step.processor,
        pandas=step.pandas,
        output_rows_per_batch=settings.output_rows_per_batch,
        frame_rows_max=session.frame_rows_max,
        state_kinds={name: declared.kind for name, declared in handle.declared.items()},
        entry_ddl={name: ddl(entry) for name, entry in entries.items()},
        ttls_ms={name: declared.ttl_ms for name, declared in handle.declared.items() if declared.ttl_ms},
        dropped=frozenset(handle.dropped),
        time_mode=step.time_mode,
        output_mode=step.output_mode,
        event_time_column=event_time,
        output_event_time=step.event_time_column,
        time_zone=session.time_zone,
    )
    if step.pandas:
        times = [f.name for f in (*schema.fields, *_declared_output(step).fields) if f.dataType == T.TimestampType()]
        if text := hour_that_comes_twice(step.uid, list(dict.fromkeys(times)), session.time_zone):
            _LOG.warning("%s", text)
    return operator, frozenset(handle.dropped)


def _check_nullable(state: str, schema: T.StructType, uid: str) -> None:
    """Refuse columns that cannot be null, as Spark does with Avro; Spark's other encoding accepts them."""
    fixed = [f.name for f in schema.fields if not f.nullable]
    if fixed:
        raise InvalidPipeline(
            f"[TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE] operator {uid!r}, state {state!r}: all columns must be "
            f"nullable while spark.sql.streaming.stateStore.encodingFormat is avro; {', '.join(fixed)} cannot be null. "
            "Leave NOT NULL out of the schema"
        )


def _declared_states(step: ProcessorStep) -> DeclaringHandle:
    """Return the states that the processor asks for, learnt as Spark learns them: by `init` and `close` of a copy, on
    the driver."""
    name = type(step.processor).__name__
    try:
        processor = copy.deepcopy(step.processor)
    except Exception as error:
        raise InvalidPipeline(
            f"operator {step.uid!r}: {name} cannot be copied ({type(error).__name__}: {error}), and every task gets a "
            "copy. Make what cannot be pickled (connections, locks, open files) in init(), not in __init__()"
        ) from error
    handle = DeclaringHandle(step.uid, step.time_mode)
    for method, arguments in (("init", (handle,)), ("close", ())):
        try:
            getattr(processor, method)(*arguments)
        except StillstateError:
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError(
                f"operator {step.uid!r}: {method}() of {name} raised {raised_by_user(error)}. It was called in the "
                "driver, to learn the states before the job starts"
            ) from error
    return handle


def parse_schema(schema: T.StructType | str, what: str) -> T.StructType:
    """Parse a schema: a StructType, or DDL ("n int, s string") parsed by Spark, or where it has not been started.

    Raises:
        InvalidPipeline: not a schema of columns.
    """
    try:
        parsed = struct_of_ddl(schema) if isinstance(schema, str) else schema
    except Exception as error:
        told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidPipeline(f"the schema of {what} cannot be parsed: {told} in {schema!r}") from error
    if not isinstance(parsed, T.StructType) or not parsed.fields:
        raise InvalidPipeline(f'the schema of {what} must name columns, as in "n int, s string"')
    return parsed


def _declared_output(step: ProcessorStep | VectorizedStep) -> T.StructType:
    # Spark parses DDL, so this needs a session.
    what = f"the output of operator {step.uid!r}"
    schema = parse_schema(step.output_schema, what)
    refuse_collations(schema, what)
    return schema


def arrow_schema(schema: T.StructType) -> pa.Schema:
    """Return a schema as state and output hold it."""
    nullable = T.StructType([T.StructField(f.name, f.dataType, True) for f in schema.fields])
    return arrow_schema_of(nullable)


def _declared_sides(step: VectorizedStep) -> dict[str, pa.Schema]:
    """Return the schemas of the side outputs that a step declares, by name."""
    made = {}
    for name, declared in step.outputs.items():
        what = f"output {name!r} of operator {step.uid!r}"
        schema = parse_schema(declared, what)
        refuse_collations(schema, what)
        made[name] = arrow_schema(schema)
    return made


_KEY_TYPES = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.FloatType,
    T.DoubleType,
    T.DecimalType,
    T.StringType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)


def _hashable(data_type: T.DataType) -> bool:
    """Return whether Spark can hash it, and state can compare it: all but maps, intervals and user-defined types."""
    if isinstance(data_type, T.StructType):
        return bool(data_type.fields) and all(_hashable(f.dataType) for f in data_type.fields)
    if isinstance(data_type, T.ArrayType):
        return _hashable(data_type.elementType)
    return isinstance(data_type, _KEY_TYPES)


def _key_field(schema: T.StructType, name: str, uid: str) -> T.StructField:
    if name not in schema.names:
        raise InvalidPipeline(
            f"operator {uid!r}: there is no key column {name!r}; the input has {', '.join(schema.names)}"
            f"{way_to_key(name, schema)}"
        )
    column = schema[name]
    if isinstance(column.dataType, T.NullType):
        raise InvalidPipeline(
            f"operator {uid!r}: key column {name!r} has type void (nothing but null); cast it to the type that it "
            "should have"
        )
    if not _hashable(column.dataType):
        raise InvalidPipeline(
            f"operator {uid!r}: key column {name!r} has type {column.dataType.simpleString()}; this version takes "
            "booleans, numbers, strings, binary, dates, timestamps, and structs and arrays of them as keys"
        )
    return column
