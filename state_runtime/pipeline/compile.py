"""Compilation of the user's graph to the stages of an epoch, checked on the source's schema before the stream
starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import ClassVar, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline, StillstateError, UserCodeError
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import raised_by_user, step_at
from state_runtime.pipeline.collations import refuse_collations
from state_runtime.pipeline.columns_read import SourceReads, columns_read, deciding_columns
from state_runtime.pipeline.conditions import conditioned
from state_runtime.pipeline.expectations import ExpectStep
from state_runtime.pipeline.future_rows import FutureStep, future_counts, highest_sql
from state_runtime.pipeline.graph import FUTURE, Graph, Node, OperatorNode, SegmentNode, SinkNode, SourceNode
from state_runtime.pipeline.inflight_fit import OperatorReads, functions_of
from state_runtime.pipeline.join_rows import Sides
from state_runtime.pipeline.operators import (
    AggregateStep,
    IntervalJoinStep,
    JoinedSides,
    LatestByStep,
    NoEventTime,
    OperatorStep,
    ProcessorStep,
    WindowStep,
    arrow_schema,
    build_operator,
    makes_table,
    output_schema,
)
from state_runtime.pipeline.output_layout import OutputLayout, refuse_layouts_beside
from state_runtime.pipeline.partial_rows import PartialRows, partial_rows
from state_runtime.pipeline.repeatable import warn_if_cut_by_epochs, warn_if_unrepeatable
from state_runtime.pipeline.side_outputs import OutputStep, side_schemas
from state_runtime.pipeline.sinks import Sink
from state_runtime.pipeline.sources import OpenedSources
from state_runtime.pipeline.spark_settings import session_settings
from state_runtime.pipeline.watermark import ClockInputs, Clocks, Policy, WatermarkColumn, watermark_columns
from state_runtime.processors.operator import LATE, Operator
from state_runtime.processors.renamed import Renamed
from state_runtime.processors.side_outputs import SideOutputs
from state_runtime.snapshot.manifest import Manifest, OperatorEntry
from state_runtime.spark.arrow import spark_schema_of
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN
from state_runtime.spark.plans import has_python, job_watch
from state_runtime.spark.sql import quoted
from state_runtime.state.key_groups import key_hash_sql

__all__ = [
    "CompiledPipeline",
    "Stage",
    "TransformStep",
    "UnionStep",
    "compile_pipeline",
    "refuse_other_output",
    "runtime_columns",
]

# Functions that count a repeated row again; the others take the last row, or are not affected.
_COUNTS_EACH_ROW: Final = frozenset(
    {"count", "sum", "avg", "variance", "variance_pop", "stddev", "stddev_pop", "collect", "top_n", "bottom_n"}
)


@dataclass(frozen=True)
class TransformStep:
    """The code of a segment: stateless Spark code.

    Attributes:
        every_epoch: its plan may differ in each epoch.
    """

    function: Callable[[DataFrame], DataFrame]
    every_epoch: bool = False
    kind: ClassVar[str] = "transform"

    @property
    def name(self) -> str:
        """The name of its function."""
        return str(getattr(self.function, "__name__", "function"))

    @property
    def where(self) -> str:
        """The step, for messages."""
        return f"transform({self.name})"


@dataclass(frozen=True)
class UnionStep:
    """The code of a segment that unites the rows of several streams, by the order or by the names of their columns."""

    by_name: bool = False
    allow_missing_columns: bool = False
    every_epoch: ClassVar[bool] = False
    kind: ClassVar[str] = "union"
    name: ClassVar[str] = ""
    where: ClassVar[str] = "union()"

    def function(self, first: DataFrame, *others: DataFrame) -> DataFrame:
        """Unite the frames. Rows of different frames have no order."""
        for other in others:
            if self.by_name:
                first = first.unionByName(other, allowMissingColumns=self.allow_missing_columns)
            else:
                first = first.union(other)
        return first


@dataclass(frozen=True)
class Stage:
    """The content of one `mapInArrow` of an epoch: an operator and the sinks on its output, or sinks alone.

    Attributes:
        output: Spark schema of the rows that it emits.
        emit: whether a later node reads it.
        initial: rows that the operator's state begins with, in its first epoch.
        input: the columns that it gets: those that its operator reads, or all in a stage of sinks.
        reads: SQL for them; all, if empty.
        partial: how Spark can aggregate its rows before the shuffle, if it can.
        node: index in the graph of its operator, or of the node that its sinks read.
        written: the columns that the sinks get, and of which of the output they are made; None: the output.
        sides: the side outputs that later nodes read; None: none.
    """

    operator: Operator | None
    sinks: tuple[str, ...]
    output: T.StructType
    emit: bool
    initial: DataFrame | None = None
    reads: tuple[str, ...] = ()
    partial: PartialRows | None = None
    input: T.StructType = field(default_factory=T.StructType)
    node: int = 0
    written: Renamed | None = None
    sides: SideOutputs | None = None

    @property
    def sink_schema(self) -> pa.Schema:
        """Return the schema of the rows that its sinks get."""
        return self.written.schema if self.written is not None else arrow_schema(self.output)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of `input`."""
        return tuple(self.input.names)

    @property
    def selected(self) -> tuple[str, ...]:
        """Return SQL for `input`."""
        return self.reads or tuple(map(quoted, self.columns))


@dataclass(frozen=True)
class CompiledPipeline:
    """A graph and its stages, in the graph's order.

    Attributes:
        layouts: of the sinks whose output readers take for a table.
        watermarks: the sources' columns with event time.
        dropped: per operator uid the states that its processor deletes (`deleteIfExists`).
        source_reads: of each input of `OpenedSources` the columns that are read; None for all.
        sources: the opened sources; None where no run reads any.
        clock_inputs: per operator uid where its rows come from.
        passed_by: segments whose rows no plan needs: the operator before has their sinks (`Stage.written`).
        tables: of each sink of a table the operators in complete mode that its rows come from.
        hands_only_its_own: whether the only rows handed to Python are those for operators and sinks; False if the
            source, a transform, an initial state or a sink may run its own Python code.
    """

    stages: tuple[Stage, ...]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    layouts: Mapping[str, OutputLayout] = field(default_factory=dict)
    watermarks: tuple[WatermarkColumn, ...] = ()
    dropped: Mapping[str, frozenset[str]] = field(default_factory=dict)
    source_reads: tuple[frozenset[str] | None, ...] = ()
    hands_only_its_own: bool = False
    graph: Graph = field(default_factory=Graph)
    sources: OpenedSources | None = None
    clock_inputs: Mapping[str, ClockInputs] = field(default_factory=dict)
    passed_by: frozenset[int] = frozenset()
    tables: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def clocks(self, policy: Policy) -> Clocks:
        """Return what moves the clocks of the operators.

        Args:
            policy: how several columns with event time are combined.
        """
        idle_after_ms = {
            node.name: node.idle_after_ms
            for node in self.graph.nodes
            if isinstance(node, SourceNode) and node.idle_after_ms is not None
        }
        held_back_ms = {
            node.uid: node.step.held_back_ms
            for node in self.graph.nodes
            if isinstance(node, OperatorNode) and isinstance(node.step, IntervalJoinStep)
        }
        return Clocks(self.watermarks, policy, self.clock_inputs, idle_after_ms, held_back_ms)

    @property
    def has_shared_rows(self) -> bool:
        """Return whether rows are read by several nodes: of a node, or of a batch that holds several sources."""
        return self.graph.has_branches or self.united is not None

    def observed(self, now_ms: int) -> tuple[str, ...]:
        """Return SQL of the aggregates to observe in a batch: the highest event times, then the rows of several
        sources, then those of `bounded_sources` that are too far ahead.

        Args:
            now_ms: the epoch's processing time.
        """
        highest = (highest_sql(column, now_ms) for column in self.watermarks if column.node is None)
        counts = self.united.counts if self.united is not None else ()
        return (*highest, *counts, *future_counts(self.watermarks, now_ms).values())

    @property
    def bounded_sources(self) -> tuple[str, ...]:
        """Names of the sources whose event times have a bound."""
        return tuple(future_counts(self.watermarks, 0))

    @cached_property
    def expectations(self) -> Mapping[int, ExpectStep]:
        """The steps that drop rows by conditions, by their places in the graph."""
        return {
            index: node.code
            for index, node in enumerate(self.graph.nodes)
            if isinstance(node, SegmentNode) and isinstance(node.code, ExpectStep)
        }

    @property
    def is_joined(self) -> bool:
        """Return whether a batch has the rows of both sides of a join, as that takes them."""
        return self.sources is not None and self.sources.joined is not None

    @property
    def united(self) -> OpenedSources | None:
        """Return the sources if a batch has the rows of several, to be taken apart; None if it has those of one."""
        return self.sources if self.sources is not None and self.sources.are_united else None

    @property
    def plans_stay(self) -> bool:
        """Return whether the plan of one epoch can be used for another."""
        return not any(isinstance(node, SegmentNode) and node.code.every_epoch for node in self.graph.nodes)

    @property
    def first_stages(self) -> frozenset[int]:
        """Numbers of the stages that read only rows which no other stage has read."""
        return self._stages_of_new_rows(all)

    @property
    def stages_with_new_rows(self) -> frozenset[int]:
        """Numbers of the stages that also read rows which no other stage has read, as behind a union."""
        return self._stages_of_new_rows(any)

    def _stages_of_new_rows(self, are_new: Callable[[Iterable[bool]], bool]) -> frozenset[int]:
        numbers = {stage.node: number for number, stage in enumerate(self.stages)}
        new: set[int] = set()  # nodes whose rows no stage has read
        found: set[int] = set()
        for index, node in enumerate(self.graph.nodes):
            if isinstance(node, SinkNode) or (node.inputs and not are_new(edge.node in new for edge in node.inputs)):
                continue
            if index in numbers:
                found.add(numbers[index])
            else:
                new.add(index)
        return frozenset(found)

    @property
    def entries(self) -> list[OperatorEntry]:
        """Return the descriptions of all operators, for manifests."""
        says = {node.uid: dict(node.says) for node in self.graph.nodes if isinstance(node, OperatorNode)}
        return [replace(each.entry(), says=says.get(each.uid, {})) for each in self.operators]

    @cached_property
    def makes_tables(self) -> frozenset[str]:
        """Return the uids of the operators in complete mode: each epoch that has work for them runs all their
        shards."""
        nodes = (node for node in self.graph.nodes if isinstance(node, OperatorNode))
        return frozenset(node.uid for node in nodes if makes_table(node.step))

    @cached_property
    def feeds_tables(self) -> frozenset[str]:
        """Return the uids of the operators whose rows may reach one of `makes_tables`, and of those."""
        found = set(self.makes_tables)
        for uid in reversed(list(self.clock_inputs)):  # in topological order
            if uid in found:
                found |= self.clock_inputs[uid].operators
        return frozenset(found)

    @property
    def operators(self) -> tuple[Operator, ...]:
        return tuple(stage.operator for stage in self.stages if stage.operator is not None)

    @property
    def operator_reads(self) -> dict[str, OperatorReads]:
        """Return by uid the input that each operator takes."""
        return {
            s.operator.uid: OperatorReads(
                arrow_schema(s.input), functions_of(s.operator.entry()), deciding_columns(s.operator)
            )
            for s in self.stages
            if s.operator is not None
        }


def compile_pipeline(
    spark: SparkSession, sources: OpenedSources, graph: Graph, settings: JobSettings
) -> CompiledPipeline:
    """Check a graph on the schemas that flow through it and build the stages.

    No row is read. User transforms are called once, with an empty frame of the right schema.

    Args:
        graph: of a `JobPlan`, which has refused unsupported graphs.

    Raises:
        InvalidPipeline: a step cannot run; the message names it and its line. UserCodeError: a transform raised.
    """
    return _compile(_Compiling(spark, sources, graph, settings)).compiled()


def schema_of_rows(
    spark: SparkSession, sources: OpenedSources, graph: Graph, settings: JobSettings, node: int
) -> T.StructType:
    """Return the schema of a node's rows, with the marks of columns with event time; raises what `compile_pipeline`
    raises."""
    return _compile(_Compiling(spark, sources, graph, settings)).schema_of(node)


def _compile(compiling: _Compiling) -> _Compiling:
    graph = compiling.graph
    for index, node in enumerate(graph.nodes):
        if isinstance(node, SinkNode):
            continue  # compiled with the node that it reads
        with step_at(node.at):
            if isinstance(node, SegmentNode):
                compiling.segment(index, node)
            elif isinstance(node, OperatorNode):
                compiling.operator(index, node)
            elif isinstance(node, SourceNode):
                compiling.source(index, node)
        compiling.sinks(index)
    return compiling


class _Compiling:
    """A graph whose nodes are compiled one after the other, each with the sinks that read it."""

    def __init__(self, spark: SparkSession, sources: OpenedSources, graph: Graph, settings: JobSettings) -> None:
        self._spark = spark
        self._sources = sources
        self.graph = graph
        self._settings = settings
        self._session = session_settings(spark.conf)
        self._reads = SourceReads(spark, [source.frame.schema for source in sources.inputs])
        # Of a node's rows: their schema; uid of the operator that emits a key's row each time it changes, or "".
        self._schemas: dict[int, T.StructType] = {}
        self._updates: dict[int, str] = {}
        self._tables: dict[int, frozenset[str]] = {}  # uids of the operators in complete mode that they come from
        self._table_sinks: dict[str, frozenset[str]] = {}
        self._inputs: dict[int, ClockInputs] = {}  # of a node's readers
        self._clock_inputs: dict[str, ClockInputs] = {}
        self._stages: list[Stage] = []
        self._layouts: dict[str, OutputLayout] = {}
        self._dropped: dict[str, frozenset[str]] = {}
        self._passed_by: set[int] = set()
        self._futures: dict[int, FutureStep] = {}
        self._has_other_python = any(has_python(source.frame) for source in sources.inputs)

    def schema_of(self, index: int) -> T.StructType:
        return self._schemas[index]

    def source(self, index: int, node: SourceNode) -> None:
        source = self._sources.of(index)
        if source.left is None:
            _check_names(source.frame.schema, f"source {source.name!r}" if source.name else "the source")
        self._reads.source(index, self._sources.nodes[index])
        self._schemas[index], self._updates[index], self._tables[index] = source.frame.schema, "", frozenset()
        self._inputs[index] = ClockInputs(sources=node.clock_with | {node.name})

    def segment(self, index: int, node: SegmentNode) -> None:
        before = [edge.node for edge in node.inputs]
        is_side = isinstance(node.code, OutputStep) and node.code.output != ""
        self._tables[index] = frozenset() if is_side else reduce(or_, (self._tables[n] for n in before))
        if self._tables[index] and not all(self._tables[n] for n in before):
            raise InvalidPipeline(
                f"{node.code.where} brings the table of {_named(self._tables[index])} in complete mode together with "
                "rows that come once; such a result is neither. Write them apart"
            )
        has_looked = job_watch(self._spark)
        frames = [self._reads.frame_of(n, self._schemas[n]) for n in before]
        code = node.code
        if isinstance(code, ExpectStep):
            code.check(frames[0])
        elif isinstance(code, FutureStep):
            code = self._futures[index] = self._of_source(code, before[0])
        made = _transformed(frames, code, is_table=bool(self._tables[index]))
        # A transform may run Spark jobs (`count`, `first`, a write): then its plan does not show all that it reads.
        self._reads.through(index, before, made, looked=has_looked())
        self._has_other_python |= has_python(made)
        if not isinstance(code, ExpectStep):  # whose own column the segments behind it take away
            _check_names(made.schema, code.where)
        self._schemas[index] = made.schema
        self._updates[index] = "" if is_side else next(filter(None, (self._updates[n] for n in before)), "")
        self._inputs[index] = self._inputs_of(node)

    def _of_source(self, code: FutureStep, index: int) -> FutureStep:
        """Return the code that takes rows that are too far ahead out of a source's, for that source."""
        source = self.graph.nodes[index]
        assert isinstance(source, SourceNode)
        ahead_ms = next((c.max_ahead_ms for c in self._sources.watermarks if c.source == source.name), None)
        if ahead_ms is None:
            which = f"source {source.name!r}" if source.name else "the source"
            raise InvalidPipeline(
                f"{which} has no output {FUTURE!r}: no event time of it is too far ahead, since nothing says how far "
                'one may be. Say read(…, max_ahead="1 hour"), or max_ahead_s in the job\'s settings, of a stream with '
                "withWatermark"
            )
        columns = watermark_columns(self._schemas[index])
        return replace(code, columns=tuple(replace(column, max_ahead_ms=ahead_ms) for column in columns))

    def operator(self, index: int, node: OperatorNode) -> None:
        step, before = node.step, [edge.node for edge in node.inputs]
        given, sides = self._given(node)
        _check_for_arrow(given)
        self._tables[index] = self._made_tables(node)
        self._updates[index] = _check_updates(step, next(filter(None, (self._updates[n] for n in before)), ""))
        self._clock_inputs[node.uid] = self._inputs_of(node)
        self._inputs[index] = ClockInputs(operators=frozenset({node.uid}))
        chosen = conditioned(self._spark, node, given)
        try:
            operator, given_up = build_operator(chosen.node, chosen.schema, sides, self._settings, self._session)
        except NoEventTime as error:
            raise self._with_remedy(error, node) from error
        if given_up:
            self._dropped[node.uid] = given_up
        self._schemas[index] = main = output_schema(step, operator, given)
        _check_names(main, f"step {type(step).__name__}")
        side_outputs = None
        if node.sides:
            side_outputs = SideOutputs(arrow_schema(main), side_schemas(node, operator, given, sides))
            structs = spark_schema_of(side_outputs.schema).fields[len(main.fields) :]
            self._schemas[index] = T.StructType([*main.fields, *structs])
        initial = _initial_state(step, operator) if isinstance(step, ProcessorStep) else None
        self._has_other_python |= initial is not None and has_python(initial)
        # Late rows are given as they came.
        names = columns_read(operator) if LATE not in node.sides else tuple(chosen.schema.names)
        reads = chosen.select(names)
        read = T.StructType([chosen.schema[name] for name in names]) if names else chosen.schema
        refuse_collations(chosen.told(read), f"operator {node.uid!r}")
        partial = partial_rows(operator, chosen.schema) if LATE not in node.sides else None
        for n in before:
            self._reads.by(n, () if sides is not None else reads)
        self._stage(index, operator, read, reads, initial=initial, partial=partial, sides=side_outputs)

    def _made_tables(self, node: OperatorNode) -> frozenset[str]:
        """Return the operators in complete mode that an operator's rows come from: it may be one itself.

        Raises:
            InvalidPipeline: it would read a table again in each epoch, or its rows may be in flight while others are in
                the table.
        """
        tables = reduce(or_, (self._tables[edge.node] for edge in node.inputs))
        if tables:
            raise InvalidPipeline(
                f"operator {node.uid!r} reads the table that {_named(tables)} gives anew in each epoch (complete mode) "
                'and would take each of its rows again. Give that output mode "update" or "append"'
            )
        if not makes_table(node.step):
            return frozenset()
        if self._settings.checkpoint.mode == "unaligned":
            raise InvalidPipeline(
                f"operator {node.uid!r}: with checkpoint mode unaligned an epoch ends while rows of its batch wait, "
                "and complete mode gives whole tables. Use checkpoint mode aligned, or another output mode"
            )
        return frozenset({node.uid})

    def _with_remedy(self, error: NoEventTime, node: OperatorNode) -> InvalidPipeline:
        before = self._inputs_of(node).operators
        for each in self.graph.nodes:
            if isinstance(each, OperatorNode) and isinstance(each.step, IntervalJoinStep) and each.uid in before:
                return InvalidPipeline(
                    f'{error}; the output of join {each.uid!r} has none unless interval_join(…, event_time="left") '
                    "says which side's it keeps"
                )
        return InvalidPipeline(
            f"{error}; call Spark's withWatermark on the stream that the job reads, or name the event_time_column of "
            "the operator before"
        )

    def _given(self, node: OperatorNode) -> tuple[T.StructType, JoinedSides | None]:
        """Return the schema of an operator's input, and of a join those of both sides."""
        if len(node.ports) == 1:
            return self._schemas[node.ports[0].input.node], None
        if self._sources.joined is not None:
            return self._sources.inputs[0].frame.schema, self._sources.joined
        left, right = (self._spark.createDataFrame([], self._schemas[edge.node]) for edge in node.inputs)
        sides = Sides.of(node, left, right)
        sides.check(f"operator {node.uid!r}")
        return sides.united().schema, (left.schema, right.schema)

    def sinks(self, index: int) -> None:
        """Compile the sinks on a node that has been compiled."""
        schema, sinks = self._schemas[index], self.graph.sinks(index)
        for node in sinks:
            with step_at(node.at):
                _check_for_arrow(schema)
                written = arrow_schema(schema)
                node.sink.check(written, f"sink {node.name!r}")
                if self._tables[index]:
                    _check_replaces(node, self._tables[index])
                    self._table_sinks[node.name] = self._tables[index]
                if (layout := node.sink.layout(written)) is not None:
                    self._layouts[node.name] = layout
                self._has_other_python |= node.sink.may_have_python
        if sinks and not isinstance(self.graph.nodes[index], OperatorNode):
            self._reads.by(index)
            if not self._is_written_by_operator(index):
                self._stage(index, None, schema)

    def _is_written_by_operator(self, index: int) -> bool:
        """Let the sinks of a segment read the operator before it, if the segment does no more than rename columns and
        nothing else reads it: so the rows need not leave the task between the two."""
        node = self.graph.nodes[index]
        if not isinstance(node, SegmentNode) or not node.renames or self.graph.readers(index):
            return False
        place = next((n for n, s in enumerate(self._stages) if s.node == node.inputs[0].node), None)
        if place is None or self._stages[place].operator is None or self._stages[place].sinks:
            return False
        self._passed_by.add(index)
        self._stages[place] = replace(
            self._stages[place],
            sinks=tuple(sink.name for sink in self.graph.sinks(index)),
            written=Renamed(tuple(node.renames.values()), arrow_schema(self._schemas[index])),
            emit=bool(set(self.graph.readers(node.inputs[0].node)) - self._passed_by),
        )
        return True

    def _inputs_of(self, node: SegmentNode | OperatorNode) -> ClockInputs:
        return reduce(or_, (self._inputs[edge.node] for edge in node.inputs), ClockInputs())

    def compiled(self) -> CompiledPipeline:
        if all(isinstance(node, SourceNode) for node in self.graph.nodes):
            raise InvalidPipeline("the pipeline has no steps; add key_by(…) with an operator, or write(…)")
        refuse_layouts_beside(self._layouts)
        if not self._stages:
            last = max(self._schemas)
            self._reads.by(last)
            self._stage(last, None, self._schemas[last])  # a stage must count the rows
        return CompiledPipeline(
            tuple(self._stages),
            {node.name: node.sink for node in self.graph.nodes if isinstance(node, SinkNode)},
            layouts=self._layouts,
            watermarks=self._sources.watermarks,
            dropped=self._dropped,
            source_reads=self._reads.columns,
            sources=self._sources,
            clock_inputs=self._clock_inputs,
            hands_only_its_own=not self._has_other_python,
            graph=Graph(tuple(self._as_compiled(index, node) for index, node in enumerate(self.graph.nodes))),
            passed_by=frozenset(self._passed_by),
            tables=self._table_sinks,
        )

    def _as_compiled(self, index: int, node: Node) -> Node:
        code = self._futures.get(index)
        return replace(node, code=code) if isinstance(node, SegmentNode) and code is not None else node

    def _stage(
        self,
        index: int,
        operator: Operator | None,
        read: T.StructType,
        reads: tuple[str, ...] = (),
        *,
        initial: DataFrame | None = None,
        partial: PartialRows | None = None,
        sides: SideOutputs | None = None,
    ) -> None:
        """Add a node's stage: all rows for its sinks, and for the nodes that read it, go through it."""
        names, emit = tuple(node.name for node in self.graph.sinks(index)), bool(self.graph.readers(index))
        self._stages.append(
            Stage(
                operator,
                names,
                self._schemas[index],
                emit,
                initial,
                input=read,
                reads=reads,
                partial=partial,
                node=index,
                sides=sides,
            )
        )


def refuse_other_output(pipeline: CompiledPipeline, content: Manifest | None) -> None:
    """Check the places of the sinks before a run changes anything.

    Args:
        content: the snapshot that the run continues from.

    Raises:
        InvalidPipeline: a place holds files that could not be read together with the new output.
        StoreUnavailable: start again.
    """
    outputs = content.outputs if content is not None else ()
    for name, layout in pipeline.layouts.items():
        pending = [file for output in outputs if output.sink == name for file in output.files]
        pipeline.sinks[name].check_place(layout, pending, f"sink {name!r}")


def runtime_columns(keys: tuple[str, ...], place: str = "monotonically_increasing_id()") -> list[str]:
    """Return SQL expressions of the runtime's columns: key hash, and the row's place in the input."""
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


def _check_for_arrow(schema: T.StructType) -> None:
    """Refuse rows that cannot be handed to Python."""
    for column in schema.fields:
        if (twice := _field_twice(column.dataType)) is not None:
            raise InvalidPipeline(
                f"the column {column.name!r} holds a struct with two fields {twice!r}, which Arrow does not have. Give "
                "them names of their own before the first operator or sink, as CAST(… AS STRUCT<a: …, b: …>) does"
            )
    dotted = [name for name in schema.names if "." in name]
    if dotted:
        raise InvalidPipeline(
            f"the column {dotted[0]!r} has a dot in its name, which Spark takes for a field of a struct when it hands "
            "rows to Python. Rename it before the first operator or sink: .transform(lambda df: "
            f"df.withColumnRenamed({dotted[0]!r}, {dotted[0].replace('.', '_')!r}))"
        )


def _field_twice(data_type: T.DataType) -> str | None:
    """Return a name that two fields of one struct have, at any depth; None without one."""
    if isinstance(data_type, T.StructType):
        names = data_type.names
        within = (_field_twice(each.dataType) for each in data_type.fields)
        return next((name for name in names if names.count(name) > 1), None) or next(filter(None, within), None)
    if isinstance(data_type, T.ArrayType):
        return _field_twice(data_type.elementType)
    if isinstance(data_type, T.MapType):
        return _field_twice(data_type.keyType) or _field_twice(data_type.valueType)
    return None


def _transformed(given: Sequence[DataFrame], step: TransformStep | UnionStep, *, is_table: bool = False) -> DataFrame:
    """Return the frame that a stateless step makes of frames without rows.

    Args:
        is_table: in each epoch it sees a whole table.
    """
    try:
        result = step.function(*given)
    except StillstateError:
        raise
    except Exception as error:
        if isinstance(step, UnionStep) and isinstance(error, AnalysisException):
            raise InvalidPipeline(f"{step.where}: {str(error).splitlines()[0]}") from error
        raise UserCodeError(
            f"{step.where} raised {raised_by_user(error)}. It was called with an empty frame of its input schema"
        ) from error
    if not isinstance(result, DataFrame):
        raise InvalidPipeline(f"{step.where} must return a DataFrame")
    warn_if_unrepeatable(result, step.where)
    if isinstance(step, TransformStep) and not is_table:
        warn_if_cut_by_epochs(given[0], result, step.where)
    return result


def _named(uids: Iterable[str]) -> str:
    return " and ".join(map(repr, sorted(uids)))


def _check_replaces(node: SinkNode, tables: frozenset[str]) -> None:
    """Refuse a sink that would put the tables of all epochs one after the other.

    Raises:
        InvalidPipeline
    """
    if not node.sink.replaces:
        raise InvalidPipeline(
            f"sink {node.name!r}: {node.sink!r} adds the rows of each epoch to those before, and {_named(tables)} "
            "gives the whole table in each (complete mode). Write it with foreach_epoch(function), which gets all of "
            'the table to put it in the place of the last one; or use output mode "update"'
        )


def _check_updates(step: OperatorStep, updates: str) -> str:
    """Refuse to sum up rows that an operator emits again and again: Spark refuses it as well.

    Args:
        updates: uid of the operator before, if it emits a key's row each time it changes; else "".

    Returns:
        The same for the operator after this one.
    """
    if isinstance(step, AggregateStep | WindowStep):
        counting = [name for name, aggregate in step.aggregates.items() if aggregate.function in _COUNTS_EACH_ROW]
        if updates and counting:
            raise InvalidPipeline(
                f"operator {step.uid!r}: {', '.join(counting)} would count each update again. Operator {updates!r} "
                "emits a key's row each time it changes, so that several rows of one key come. Let it emit each "
                'result once (output_mode="append", of a window or of an aggregate keyed by its event time), aggregate '
                "the rows before it by the coarser key, or keep the key's last row in a processor and add the "
                "difference"
            )
        return step.uid if step.output_mode == "update" else ""
    if isinstance(step, LatestByStep):
        return step.uid
    return ""  # user code and deduplicate decide themselves what to emit for updates


def _initial_state(step: ProcessorStep, operator: Operator) -> DataFrame | None:
    """Return the checked rows that an operator's state begins with: they are found by the same keys as the input's."""
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
    for name, field_ in zip(operator.key_columns, operator.key_schema, strict=True):
        if name not in initial.columns:
            raise InvalidPipeline(f"{where} has no key column {name!r}; it has {', '.join(initial.columns)}")
        given = arrow_schema(T.StructType([initial.schema[name]])).field(0).type
        if given != field_.type:
            raise InvalidPipeline(
                f"{where}: key column {name!r} is {given}, and {field_.type} in the input; equal keys of different "
                "types have different hashes. Cast it"
            )
    return initial
