"""From the steps that a user wrote to the stages of an epoch, checked on the source's schema before the stream
starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline, StillstateError, UserCodeError
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import raised_by_user
from state_runtime.pipeline.operators import OperatorStep, ProcessorStep, arrow_schema, build_operator, output_schema
from state_runtime.pipeline.repeatable import warn_if_unrepeatable
from state_runtime.pipeline.sinks import Sink
from state_runtime.pipeline.sources import OpenedSource
from state_runtime.pipeline.spark_settings import session_settings
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.processors.operator import Operator
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN
from state_runtime.spark.sql import quoted
from state_runtime.state.key_groups import key_hash_sql, shard_sql

__all__ = [
    "CompiledPipeline",
    "Stage",
    "Step",
    "TransformStep",
    "WriteStep",
    "compile_pipeline",
    "shard_columns",
]


@dataclass(frozen=True)
class TransformStep:
    """Stateless Spark code."""

    function: Callable[[DataFrame], DataFrame]


@dataclass(frozen=True)
class WriteStep:
    """A sink that hangs on the stream at this point."""

    name: str
    sink: Sink


Step: TypeAlias = TransformStep | OperatorStep | WriteStep


@dataclass(frozen=True)
class Stage:
    """What one `mapInArrow` of an epoch runs: an operator and the sinks on its output, or sinks alone.

    Attributes:
        output: Spark schema of what it emits.
        emit: whether a later step reads it.
        initial: rows that the operator's state begins with, in its first epoch.
    """

    operator: Operator | None
    sinks: tuple[str, ...]
    output: T.StructType
    emit: bool
    initial: DataFrame | None = None


@dataclass(frozen=True)
class CompiledPipeline:
    """Stages and the user's transforms between them, in order.

    Attributes:
        watermarks: the source's columns with event time.
        dropped: per operator uid the states that its processor gave up (`deleteIfExists`).
    """

    parts: tuple[Stage | TransformStep, ...]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    watermarks: tuple[WatermarkColumn, ...] = ()
    dropped: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part for part in self.parts if isinstance(part, Stage))

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(stage.operator for stage in self.stages if stage.operator is not None)


def compile_pipeline(
    spark: SparkSession, source: OpenedSource, steps: tuple[Step, ...], settings: JobSettings
) -> CompiledPipeline:
    """Check the steps on the schemas that flow through them and build the stages.

    No row is read. User transforms are called once, with an empty frame of the right schema.

    Raises:
        InvalidPipeline: a step cannot run; the message names it. UserCodeError: a transform raised.
    """
    if not steps:
        raise InvalidPipeline("the pipeline has no steps; add key_by(…) with an operator, or write(…)")
    parts: list[Stage | TransformStep] = []
    schema = source.frame.schema
    sinks: dict[str, Sink] = {}
    uids: set[str] = set()
    dropped: dict[str, frozenset[str]] = {}
    session = session_settings(spark.conf)
    if source.left is None:
        _check_names(schema, "the source")
    for step in steps:
        if not isinstance(step, TransformStep):
            _check_dots(schema)
        if isinstance(step, TransformStep):
            schema = _transformed(spark, schema, step)
            parts.append(step)
        elif isinstance(step, WriteStep):
            if step.name in sinks:
                raise InvalidPipeline(f"two sinks are named {step.name!r}; give each write() a name of its own")
            sinks[step.name] = step.sink
            last = parts[-1] if parts else None
            if isinstance(last, Stage):
                parts[-1] = replace(last, sinks=(*last.sinks, step.name))
            else:
                parts.append(Stage(None, (step.name,), schema, True))
        else:
            if step.uid in uids:
                raise InvalidPipeline(f"two operators have the uid {step.uid!r}; state belongs to one uid")
            uids.add(step.uid)
            operator, given_up = build_operator(step, schema, source, settings, session)
            if given_up:
                dropped[step.uid] = given_up
            schema = output_schema(step, operator, schema)
            initial = _initial_state(step, operator) if isinstance(step, ProcessorStep) else None
            parts.append(Stage(operator, (), schema, True, initial))
        _check_names(schema, f"step {type(step).__name__}")
    last = parts[-1]
    if isinstance(last, Stage):
        parts[-1] = replace(last, emit=False)
    else:
        # Something must run the user's last transform; its rows go nowhere.
        parts.append(Stage(None, (), schema, False))
    return CompiledPipeline(tuple(parts), sinks, source.watermarks, dropped)


def shard_columns(keys: tuple[str, ...], parallelism: int) -> list[str]:
    """SQL expressions of the runtime's columns: key hash, shard, and the row's place in the input."""
    hash_sql = key_hash_sql([quoted(k) for k in keys])
    return [
        f"{hash_sql} AS {HASH_COLUMN}",
        f"{shard_sql(hash_sql, parallelism)} AS {SHARD_COLUMN}",
        f"monotonically_increasing_id() AS {SEQUENCE_COLUMN}",
    ]


def _check_names(schema: T.StructType, where: str) -> None:
    names = [name.lower() for name in schema.names]
    for name in names:
        if names.count(name) > 1:
            raise InvalidPipeline(
                f"{where} has two columns named {name!r}; rename one (Spark does not tell case apart)"
            )
        if name.startswith("__stillstate"):
            raise InvalidPipeline(f"{where} has a column {name!r}; names beginning with __stillstate are the runtime's")


def _check_dots(schema: T.StructType) -> None:
    dotted = [name for name in schema.names if "." in name]
    if dotted:
        raise InvalidPipeline(
            f"the column {dotted[0]!r} has a dot in its name, which Spark takes for a field of a struct when it hands "
            "rows to Python. Rename it before the first operator or sink: .transform(lambda df: "
            f"df.withColumnRenamed({dotted[0]!r}, {dotted[0].replace('.', '_')!r}))"
        )


def _transformed(spark: SparkSession, schema: T.StructType, step: TransformStep) -> T.StructType:
    try:
        result = step.function(spark.createDataFrame([], schema))
    except StillstateError:
        raise
    except Exception as error:
        name = getattr(step.function, "__name__", "function")
        raise UserCodeError(
            f"transform({name}) raised {raised_by_user(error)}. It was called with an empty frame of its input schema"
        ) from error
    if not isinstance(result, DataFrame):
        raise InvalidPipeline(f"transform({getattr(step.function, '__name__', 'function')}) must return a DataFrame")
    warn_if_unrepeatable(result, f"transform({getattr(step.function, '__name__', 'function')})")
    return result.schema


def _initial_state(step: ProcessorStep, operator: Operator) -> DataFrame | None:
    """The rows that an operator's state begins with, checked: they are found by the same keys as the input's."""
    initial = step.initial_state
    if initial is None:
        return None
    where = f"operator {step.uid!r}: initial_state"
    if not isinstance(initial, DataFrame) or initial.isStreaming:
        raise InvalidPipeline(
            f"{where} must be a static DataFrame (spark.read…), not a {type(initial).__name__}; it needs no groupBy: "
            "the operator's key columns are its keys"
        )
    _check_names(initial.schema, where)
    for name, field_ in zip(step.keys, operator.key_schema, strict=True):
        if name not in initial.columns:
            raise InvalidPipeline(f"{where} has no key column {name!r}; it has {', '.join(initial.columns)}")
        given = arrow_schema(T.StructType([initial.schema[name]])).field(0).type
        if given != field_.type:
            raise InvalidPipeline(
                f"{where}: key column {name!r} is {given}, and {field_.type} in the input; equal keys of different "
                "types "
                "have different hashes. Cast it"
            )
    return initial
