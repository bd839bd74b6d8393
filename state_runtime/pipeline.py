"""From the steps that a user wrote to the stages of an epoch, checked on the source's schema before the stream starts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from state_runtime.aggregates import Aggregate
from state_runtime.errors import InvalidPipeline, StillstateError, UserCodeError
from state_runtime.limits import KEY_GROUP_BITS, MAX_PARALLELISM
from state_runtime.processors.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.deduplicate import SEEN, Deduplicate
from state_runtime.processors.handle import DeclaringHandle, check_state_name
from state_runtime.processors.latest import LATEST, plan_latest
from state_runtime.processors.operator import Operator
from state_runtime.processors.stateful import StatefulProcessorOperator
from state_runtime.processors.vectorized import VectorizedOperator, VectorizedProcessor
from state_runtime.settings import JobSettings
from state_runtime.sinks import Sink
from state_runtime.state.table import StateSchema
from state_runtime.task import HASH_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN

__all__ = [
    "AggregateStep",
    "CompiledPipeline",
    "DeduplicateStep",
    "LatestByStep",
    "ProcessorStep",
    "Stage",
    "Step",
    "TransformStep",
    "VectorizedStep",
    "WriteStep",
    "compile_pipeline",
    "shard_columns",
]


@dataclass(frozen=True)
class TransformStep:
    """Stateless Spark code."""

    function: Callable[[DataFrame], DataFrame]


@dataclass(frozen=True)
class ProcessorStep:
    """A `StatefulProcessor` behind a key."""

    uid: str
    keys: tuple[str, ...]
    processor: Any
    output_schema: T.StructType | str
    pandas: bool


@dataclass(frozen=True)
class AggregateStep:
    """Built-in aggregates behind a key."""

    uid: str
    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]


@dataclass(frozen=True)
class VectorizedStep:
    """A `VectorizedProcessor` behind a key."""

    uid: str
    keys: tuple[str, ...]
    processor: VectorizedProcessor
    output_schema: T.StructType | str


@dataclass(frozen=True)
class LatestByStep:
    """Of each key the row with the greatest value of `order`; no `columns` means all."""

    uid: str
    keys: tuple[str, ...]
    order: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class DeduplicateStep:
    """The first row of each key."""

    uid: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class WriteStep:
    """A sink that hangs on the stream at this point."""

    name: str
    sink: Sink


OperatorStep: TypeAlias = ProcessorStep | AggregateStep | VectorizedStep | LatestByStep | DeduplicateStep
Step: TypeAlias = TransformStep | OperatorStep | WriteStep


@dataclass(frozen=True)
class Stage:
    """What one `mapInArrow` of an epoch runs: an operator and the sinks on its output, or sinks alone.

    Attributes:
        output: Spark schema of what it emits.
        emit: whether a later step reads it.
    """

    operator: Operator | None
    sinks: tuple[str, ...]
    output: T.StructType
    emit: bool


@dataclass(frozen=True)
class CompiledPipeline:
    """Stages and the user's transforms between them, in order."""

    parts: tuple[Stage | TransformStep, ...]
    sinks: Mapping[str, Sink] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part for part in self.parts if isinstance(part, Stage))

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(stage.operator for stage in self.stages if stage.operator is not None)


def compile_pipeline(
    spark: SparkSession, source: T.StructType, steps: tuple[Step, ...], settings: JobSettings
) -> CompiledPipeline:
    """Check the steps on the schemas that flow through them and build the stages.

    No row is read. User transforms are called once, with an empty frame of the right schema.

    Raises:
        InvalidPipeline, NotSupportedYet: a step cannot run; the message names it. UserCodeError: a transform raised.
    """
    if not steps:
        raise InvalidPipeline("the pipeline has no steps; add key_by(…) with an operator, or write(…)")
    parts: list[Stage | TransformStep] = []
    schema = source
    sinks: dict[str, Sink] = {}
    uids: set[str] = set()
    _check_names(schema, "the source")
    for step in steps:
        if isinstance(step, TransformStep):
            schema = _transformed(spark, schema, step)
            parts.append(step)
        elif isinstance(step, WriteStep):
            if step.name in sinks:
                raise InvalidPipeline(f"two sinks are named {step.name!r}; give each write() a name of its own")
            sinks[step.name] = step.sink
            last = parts[-1] if parts else None
            if isinstance(last, Stage):
                parts[-1] = Stage(last.operator, (*last.sinks, step.name), last.output, last.emit)
            else:
                parts.append(Stage(None, (step.name,), schema, True))
        else:
            if step.uid in uids:
                raise InvalidPipeline(f"two operators have the uid {step.uid!r}; state belongs to one uid")
            uids.add(step.uid)
            operator = _operator(step, schema, settings)
            schema = from_arrow_schema(operator.output_schema)
            parts.append(Stage(operator, (), schema, True))
        _check_names(schema, f"step {type(step).__name__}")
    last = parts[-1]
    if isinstance(last, Stage):
        parts[-1] = Stage(last.operator, last.sinks, last.output, False)
    else:
        # Something must run the user's last transform; its rows go nowhere.
        parts.append(Stage(None, (), schema, False))
    return CompiledPipeline(tuple(parts), sinks)


def shard_columns(keys: tuple[str, ...], parallelism: int) -> list[str]:
    """SQL expressions of the runtime's columns: key hash, shard, and the row's place in the input."""
    hash_sql = f"xxhash64({', '.join(_quoted(k) for k in keys)})"
    group_sql = f"shiftrightunsigned({hash_sql}, {64 - KEY_GROUP_BITS})"
    return [
        "*",
        f"{hash_sql} AS {HASH_COLUMN}",
        f"CAST({group_sql} * {parallelism} DIV {MAX_PARALLELISM} AS INT) AS {SHARD_COLUMN}",
        f"monotonically_increasing_id() AS {SEQUENCE_COLUMN}",
    ]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _check_names(schema: T.StructType, where: str) -> None:
    names = [name.lower() for name in schema.names]
    for name in names:
        if names.count(name) > 1:
            raise InvalidPipeline(
                f"{where} has two columns named {name!r}; rename one (Spark does not tell case apart)"
            )
        if name.startswith("__stillstate"):
            raise InvalidPipeline(f"{where} has a column {name!r}; names beginning with __stillstate are the runtime's")


def _transformed(spark: SparkSession, schema: T.StructType, step: TransformStep) -> T.StructType:
    try:
        result = step.function(spark.createDataFrame([], schema))
    except StillstateError:
        raise
    except Exception as error:
        name = getattr(step.function, "__name__", "function")
        raise UserCodeError(
            f"transform({name}) raised {type(error).__name__} on an empty frame of its input schema: {error}"
        ) from error
    if not isinstance(result, DataFrame):
        raise InvalidPipeline(f"transform({getattr(step.function, '__name__', 'function')}) must return a DataFrame")
    return result.schema


def _operator(step: OperatorStep, schema: T.StructType, settings: JobSettings) -> Operator:
    keys = T.StructType([_key_field(schema, name, step.uid) for name in step.keys])
    if isinstance(step, AggregateStep):
        return _aggregate(step, keys, schema)
    if isinstance(step, ProcessorStep):
        declared = _declared_states(step)
        return StatefulProcessorOperator(
            uid=step.uid,
            key_columns=step.keys,
            key_ddl=ddl(keys),
            key_schema=_arrow(keys),
            # Spark parses DDL, so this cannot happen before there is a session.
            output_schema=_arrow(parse_schema(step.output_schema, f"the output of operator {step.uid!r}")),
            state_schemas={name: StateSchema(_arrow(keys), _arrow(value)) for name, value in declared.items()},
            state_ddl={name: ddl(value) for name, value in declared.items()},
            processor=step.processor,
            pandas=step.pandas,
            output_rows_per_batch=settings.output_rows_per_batch,
        )
    return _vectorized(step, keys, schema, settings)


def _aggregate(step: AggregateStep, keys: T.StructType, schema: T.StructType) -> AggregateOperator:
    plan = plan_aggregates(step.aggregates, _arrow(schema), step.uid)
    taken = set(step.keys) & set(step.aggregates)
    if taken:
        raise InvalidPipeline(
            f"operator {step.uid!r}: {sorted(taken)} are key columns; name the aggregates differently"
        )
    slots = pa.schema([pa.field(s.name, s.type) for s in plan.slots])
    return AggregateOperator(step.uid, step.keys, ddl(keys), _arrow(keys), plan, ddl(from_arrow_schema(slots)))


def _vectorized(
    step: VectorizedStep | LatestByStep | DeduplicateStep,
    keys: T.StructType,
    schema: T.StructType,
    settings: JobSettings,
) -> VectorizedOperator:
    processor: Any
    kind: Literal["vectorized", "latest-by", "deduplicate"]
    if isinstance(step, VectorizedStep):
        kind, processor, states = "vectorized", step.processor, _states_of(step)
        output = parse_schema(step.output_schema, f"the output of operator {step.uid!r}")
    elif isinstance(step, LatestByStep):
        kind, processor = "latest-by", plan_latest(step.keys, step.order, step.columns, _arrow(schema), step.uid)
        states = {LATEST: T.StructType([schema[name] for name in processor.kept])}
        output = T.StructType([*keys.fields, *states[LATEST].fields])
    else:
        kind, processor, states = "deduplicate", Deduplicate(), {SEEN: T.StructType([])}
        output = schema
    return VectorizedOperator(
        uid=step.uid,
        key_columns=step.keys,
        key_ddl=ddl(keys),
        key_schema=_arrow(keys),
        output_schema=_arrow(output),
        state_schemas={name: StateSchema(_arrow(keys), _arrow(value)) for name, value in states.items()},
        state_ddl={name: ddl(value) for name, value in states.items()},
        kind=kind,
        processor=processor,
        output_rows_per_batch=settings.output_rows_per_batch,
    )


def _states_of(step: VectorizedStep) -> dict[str, T.StructType]:
    """The states that a vectorised processor names."""
    where = f"operator {step.uid!r}: states() of {type(step.processor).__name__}"
    try:
        declared = copy.deepcopy(step.processor).states()
    except StillstateError:
        raise
    except Exception as error:
        raise UserCodeError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(declared, Mapping) or not all(isinstance(name, str) for name in declared):
        raise InvalidPipeline(f'{where} must return a mapping of names to schemas, as in {{"totals": "n long"}}')
    if not declared:
        raise InvalidPipeline(f"{where} names no state; stateless code needs no key and belongs into transform()")
    return {
        check_state_name(step.uid, name): parse_schema(value, f"state {name!r} of operator {step.uid!r}")
        for name, value in declared.items()
    }


def _declared_states(step: ProcessorStep) -> dict[str, T.StructType]:
    """The states that the processor asks for, learnt as Spark learns them: `init` and `close` of a copy, on the driver."""
    handle = DeclaringHandle(step.uid)
    try:
        processor = copy.deepcopy(step.processor)
        processor.init(handle)
        processor.close()
        return {name: parse_schema(schema, f"state {name!r}") for name, schema in handle.declared.items()}
    except StillstateError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"operator {step.uid!r}: init() of {type(step.processor).__name__} raised {type(error).__name__}: {error}"
        ) from error


def parse_schema(schema: T.StructType | str, what: str) -> T.StructType:
    """A StructType, or DDL ("n int, s string") parsed by Spark.

    Raises:
        InvalidPipeline: not a schema of columns.
    """
    try:
        parsed = T.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    except Exception as error:
        raise InvalidPipeline(f"the schema of {what} cannot be parsed: {str(error).splitlines()[0]}") from error
    if not isinstance(parsed, T.StructType) or not parsed.fields:
        raise InvalidPipeline(f'the schema of {what} must name columns, as in "n int, s string"')
    return parsed


def ddl(schema: T.StructType) -> str:
    """A schema as Spark's DDL, for manifests."""
    return ", ".join(f"{_quoted(f.name)} {f.dataType.simpleString()}" for f in schema.fields)


def _arrow(schema: T.StructType) -> pa.Schema:
    # Time zones are metadata of a column; one canonical zone keeps stored schemas independent of the session.
    nullable = T.StructType([T.StructField(f.name, f.dataType, True) for f in schema.fields])
    return to_arrow_schema(nullable, timezone="UTC")


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


def _key_field(schema: T.StructType, name: str, uid: str) -> T.StructField:
    if name not in schema.names:
        raise InvalidPipeline(
            f"operator {uid!r}: there is no key column {name!r}; the input has {', '.join(schema.names)}"
        )
    column = schema[name]
    if isinstance(column.dataType, T.NullType):
        raise InvalidPipeline(
            f"operator {uid!r}: key column {name!r} has type void (nothing but null); cast it to the type that it should have"
        )
    if not isinstance(column.dataType, _KEY_TYPES):
        raise InvalidPipeline(
            f"operator {uid!r}: key column {name!r} has type {column.dataType.simpleString()}; this version takes "
            "booleans, numbers, strings, binary, dates and timestamps as keys"
        )
    return column
