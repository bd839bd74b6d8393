"""From the steps that a user wrote to the stages of an epoch, checked on the source's schema before the stream
starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline, StillstateError, UserCodeError
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import raised_by_user, step_at
from state_runtime.pipeline.collations import refuse_collations
from state_runtime.pipeline.columns_read import SourceReads, columns_read, deciding_columns
from state_runtime.pipeline.conditions import conditioned
from state_runtime.pipeline.inflight_fit import OperatorReads, functions_of
from state_runtime.pipeline.operators import (
    AggregateStep,
    LatestByStep,
    OperatorStep,
    ProcessorStep,
    WindowStep,
    arrow_schema,
    build_operator,
    output_schema,
)
from state_runtime.pipeline.output_layout import OutputLayout, refuse_layouts_beside
from state_runtime.pipeline.partial_rows import PartialRows, partial_rows
from state_runtime.pipeline.repeatable import warn_if_cut_by_epochs, warn_if_unrepeatable
from state_runtime.pipeline.sinks import Sink
from state_runtime.pipeline.sources import OpenedSource
from state_runtime.pipeline.spark_settings import session_settings
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.manifest import Manifest
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN
from state_runtime.spark.plans import has_python, job_watch
from state_runtime.spark.sql import quoted
from state_runtime.state.key_groups import key_hash_sql

__all__ = [
    "CompiledPipeline",
    "Stage",
    "Step",
    "TransformStep",
    "WriteStep",
    "compile_pipeline",
    "refuse_other_output",
    "runtime_columns",
]

# Functions to which a row that comes again counts again; the others take the last word, or do not mind.
_COUNTS_EACH_ROW: Final = frozenset(
    {"count", "sum", "avg", "variance", "variance_pop", "stddev", "stddev_pop", "collect", "top_n", "bottom_n"}
)


@dataclass(frozen=True)
class TransformStep:
    """Stateless Spark code.

    Attributes:
        every_epoch: it may give another plan in each epoch.
    """

    function: Callable[[DataFrame], DataFrame]
    every_epoch: bool = False


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
        input: the columns that it is given: those that its operator reads, or all of a stage of sinks.
        reads: SQL for them; all, if empty.
        partial: how Spark can aggregate its rows before the shuffle, if it can.
    """

    operator: Operator | None
    sinks: tuple[str, ...]
    output: T.StructType
    emit: bool
    initial: DataFrame | None = None
    reads: tuple[str, ...] = ()
    partial: PartialRows | None = None
    input: T.StructType = field(default_factory=T.StructType)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of `input`."""
        return tuple(self.input.names)

    @property
    def selected(self) -> tuple[str, ...]:
        """SQL for `input`."""
        return self.reads or tuple(map(quoted, self.columns))


@dataclass(frozen=True)
class CompiledPipeline:
    """Stages and the user's transforms between them, in order.

    Attributes:
        layouts: of the sinks whose output readers take for a table.
        watermarks: the source's columns with event time.
        dropped: per operator uid the states that its processor gave up (`deleteIfExists`).
        source_reads: the columns of the source that something reads; None for all.
        hands_only_its_own: whether no row is handed to Python but those that operators and sinks are given; not if the
            source, a transform, an initial state or a sink may have code of its own in Python.
    """

    parts: tuple[Stage | TransformStep, ...]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    layouts: Mapping[str, OutputLayout] = field(default_factory=dict)
    watermarks: tuple[WatermarkColumn, ...] = ()
    dropped: Mapping[str, frozenset[str]] = field(default_factory=dict)
    source_reads: frozenset[str] | None = None
    hands_only_its_own: bool = False

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part for part in self.parts if isinstance(part, Stage))

    @property
    def plans_stay(self) -> bool:
        """Whether the plan of one epoch does for another."""
        return not any(isinstance(part, TransformStep) and part.every_epoch for part in self.parts)

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(stage.operator for stage in self.stages if stage.operator is not None)

    @property
    def operator_reads(self) -> dict[str, OperatorReads]:
        """By uid what each operator takes."""
        return {
            s.operator.uid: OperatorReads(
                arrow_schema(s.input), functions_of(s.operator.entry()), deciding_columns(s.operator)
            )
            for s in self.stages
            if s.operator is not None
        }


def compile_pipeline(
    spark: SparkSession,
    source: OpenedSource,
    steps: tuple[Step, ...],
    settings: JobSettings,
    steps_at: tuple[str, ...] = (),
) -> CompiledPipeline:
    """Check the steps on the schemas that flow through them and build the stages.

    No row is read. User transforms are called once, with an empty frame of the right schema.

    Args:
        steps_at: the lines of the job's own code that the steps come from, as far as they are known.

    Raises:
        InvalidPipeline: a step cannot run; the message names it and its line. UserCodeError: a transform raised.
    """
    if not steps:
        raise InvalidPipeline("the pipeline has no steps; add key_by(…) with an operator, or write(…)")
    parts: list[Stage | TransformStep] = []
    schema = source.frame.schema
    sinks: dict[str, Sink] = {}
    layouts: dict[str, OutputLayout] = {}
    uids: set[str] = set()
    dropped: dict[str, frozenset[str]] = {}
    session = session_settings(spark.conf)
    if source.left is None:
        _check_names(schema, "the source")
    asked = SourceReads(spark, schema)
    updates = ""
    has_other_python = has_python(source.frame)
    for step, place in zip(steps, chain(steps_at, repeat(""))):
        with step_at(place):
            if not isinstance(step, TransformStep):
                _check_dots(schema)
            if isinstance(step, TransformStep):
                has_looked = job_watch(spark)
                made = _transformed(asked.frame_of(schema), step)
                # It may look at rows (`count`, `first`, a write): not all that it reads is in its plan then.
                asked.through(made, looked=has_looked())
                schema = made.schema
                has_other_python = has_other_python or has_python(made)
                parts.append(step)
            elif isinstance(step, WriteStep):
                if step.name in sinks:
                    raise InvalidPipeline(f"two sinks are named {step.name!r}; give each write() a name of its own")
                written = arrow_schema(schema)
                step.sink.check(written, f"sink {step.name!r}")
                if (layout := step.sink.layout(written)) is not None:
                    layouts[step.name] = layout
                sinks[step.name] = step.sink
                has_other_python = has_other_python or step.sink.may_have_python
                last = parts[-1] if parts else None
                if isinstance(last, Stage):
                    parts[-1] = replace(last, sinks=(*last.sinks, step.name))
                else:
                    parts.append(Stage(None, (step.name,), schema, True, input=schema))
                    asked.by()
            else:
                if step.uid in uids:
                    raise InvalidPipeline(f"two operators have the uid {step.uid!r}; state belongs to one uid")
                uids.add(step.uid)
                updates = _check_updates(step, updates)
                chosen = conditioned(spark, step, schema)
                operator, given_up = build_operator(chosen.step, chosen.schema, source, settings, session)
                if given_up:
                    dropped[step.uid] = given_up
                schema = output_schema(step, operator, schema)
                initial = _initial_state(step, operator) if isinstance(step, ProcessorStep) else None
                has_other_python = has_other_python or (initial is not None and has_python(initial))
                names = columns_read(operator)
                reads = chosen.select(names)
                read = T.StructType([chosen.schema[name] for name in names]) if names else chosen.schema
                refuse_collations(chosen.told(read), f"operator {step.uid!r}")
                asked.by(reads)
                partial = partial_rows(operator, chosen.schema)
                parts.append(
                    Stage(operator, (), schema, emit=True, initial=initial, reads=reads, partial=partial, input=read)
                )
            _check_names(schema, f"step {type(step).__name__}")
    refuse_layouts_beside(layouts)
    last = parts[-1]
    if isinstance(last, Stage):
        parts[-1] = replace(last, emit=False)
    else:
        # The user's last transform runs too; its rows go nowhere, and no Python needs to see them.
        asked.by()
        if not any(isinstance(part, Stage) for part in parts):
            # Somebody must count the rows.
            parts.append(Stage(None, (), schema, False, input=schema))
    return CompiledPipeline(
        tuple(parts),
        sinks,
        layouts=layouts,
        watermarks=source.watermarks,
        dropped=dropped,
        source_reads=asked.columns,
        hands_only_its_own=not has_other_python,
    )


def refuse_other_output(pipeline: CompiledPipeline, content: Manifest | None) -> None:
    """Look at the places of the sinks before a run changes anything.

    Args:
        content: the snapshot that the run goes on from.

    Raises:
        InvalidPipeline: a place holds what could not be read together with the new output. StoreUnavailable: start
            again.
    """
    outputs = content.outputs if content is not None else ()
    for name, layout in pipeline.layouts.items():
        pending = [file for output in outputs if output.sink == name for file in output.files]
        pipeline.sinks[name].check_place(layout, pending, f"sink {name!r}")


def runtime_columns(keys: tuple[str, ...], place: str = "monotonically_increasing_id()") -> list[str]:
    """SQL expressions of the runtime's columns: key hash, and the row's place in the input."""
    return [f"{key_hash_sql([quoted(k) for k in keys])} AS {HASH_COLUMN}", f"{place} AS {SEQUENCE_COLUMN}"]


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


def _transformed(given: DataFrame, step: TransformStep) -> DataFrame:
    """What a transform makes of a frame without rows."""
    try:
        result = step.function(given)
    except StillstateError:
        raise
    except Exception as error:
        name = getattr(step.function, "__name__", "function")
        raise UserCodeError(
            f"transform({name}) raised {raised_by_user(error)}. It was called with an empty frame of its input schema"
        ) from error
    if not isinstance(result, DataFrame):
        raise InvalidPipeline(f"transform({getattr(step.function, '__name__', 'function')}) must return a DataFrame")
    where = f"transform({getattr(step.function, '__name__', 'function')})"
    warn_if_unrepeatable(result, where)
    warn_if_cut_by_epochs(given, result, where)
    return result


def _check_updates(step: OperatorStep, updates: str) -> str:
    """Refuse to sum up what an operator emits again and again: Spark refuses it as well.

    Args:
        updates: uid of the operator before, if it emits a key's row anew whenever it changes; else "".

    Returns:
        The same for the operator after this one.
    """
    if isinstance(step, AggregateStep | WindowStep):
        counting = [name for name, aggregate in step.aggregates.items() if aggregate.function in _COUNTS_EACH_ROW]
        if updates and counting:
            raise InvalidPipeline(
                f"operator {step.uid!r}: {', '.join(counting)} would count each update again. Operator {updates!r} "
                "emits a key's row anew whenever it changes, so that several rows of one key come. Let it emit each "
                'result once (output_mode="append", of a window or of an aggregate keyed by its event time), aggregate '
                "the rows before it by the coarser key, or keep the key's last row in a processor and add the "
                "difference"
            )
        return step.uid if step.output_mode == "update" else ""
    if isinstance(step, LatestByStep):
        return step.uid
    return ""  # of user code and deduplicate: what they make of updates is theirs to say


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
    refuse_collations(initial.schema, where)
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
