"""A plain query as nodes of a graph: its parts (spark/query_cut.py) get names, and operators of this runtime.

State belongs to names, so they must be the same at each start. An alias, a subquery's or a common table expression's
name is one; else it is made of what the operator does and its keys. The manifest keeps what keys and functions say, and
a start compares it (`pipeline/compatibility.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.settings import JobSettings
from state_runtime.base.usercode import step_at
from state_runtime.pipeline.compile import schema_of_rows
from state_runtime.pipeline.graph import (
    Edge,
    Graph,
    Node,
    OperatorNode,
    Port,
    QueryNode,
    SegmentNode,
    SourceNode,
    rewired,
)
from state_runtime.pipeline.operators import (
    AggregateStep,
    DeduplicateStep,
    IntervalJoinStep,
    OperatorStep,
    ProcessorStep,
    WindowStep,
)
from state_runtime.pipeline.sources import Source, open_sources, streaming_frame
from state_runtime.processors.builtin.window_state import OutputMode
from state_runtime.processors.declared.aggregates import COLLECT_LIMIT_MAX, DISTINCT_LIMIT_MAX, Aggregate
from state_runtime.processors.declared.windows import SessionWindow
from state_runtime.snapshot.paths import check_uid
from state_runtime.spark.query_cut import cut_query, streams_without_rows
from state_runtime.spark.query_parts import (
    Called,
    Deduplicated,
    Given,
    Grouped,
    Joined,
    Part,
    Processed,
    Read,
    Rows,
    Stateful,
)

__all__ = ["QueryStep", "SqlQuery", "with_queries"]

INPUT = ""
"""In `OperatorNode.says`: the digest of an operator's input, where a number in its name tells it from another one."""


@dataclass(frozen=True)
class QueryStep:
    """The code of a segment of a query: what stays Spark's."""

    function: Callable[..., DataFrame]
    every_epoch: ClassVar[bool] = False
    kind: ClassVar[str] = "rows"
    name: str = ""
    where: ClassVar[str] = "query()"


@dataclass(frozen=True)
class SqlQuery:
    """A query in SQL over named streams."""

    text: str
    streams: Mapping[str, Source]

    @property
    def __name__(self) -> str:
        return "sql"

    def __call__(self, spark: SparkSession, **given: DataFrame) -> DataFrame:
        """Return its frame. The streams are views of the session only for this moment: a view that has a name of theirs
        is there again afterwards.

        Args:
            given: the streams of the job, by their names.
        """
        catalog = spark.catalog
        streams = {**self.streams, **given}
        before = {
            name: spark.table(name)
            for name in streams
            if catalog.tableExists(name) and catalog.getTable(name).isTemporary
        }
        made: list[str] = []
        try:
            for name, source in streams.items():
                frame = source(spark) if callable(source) else source
                if not isinstance(frame, DataFrame):
                    raise InvalidPipeline(f"sql(): {name} must be a DataFrame, or a function that makes one")
                frame.createOrReplaceTempView(name)
                made.append(name)
            return spark.sql(self.text)
        finally:
            for name in made:
                if name in before:
                    before[name].createOrReplaceTempView(name)
                else:
                    catalog.dropTempView(name)


def with_queries(spark: SparkSession, job: str, graph: Graph, settings: JobSettings) -> Graph:
    """Return a graph in which each query is the nodes that it is made of.

    Raises:
        InvalidPipeline: a query cannot run; the message names what is not supported.
        UserCodeError: the user's function raised.
    """
    cut: dict[int, tuple[Part, ...]] = {}
    for index, node in enumerate(graph.nodes):
        if isinstance(node, QueryNode):
            with step_at(node.at):
                # What it reads of the job has to be known as nodes.
                before = _expanded(graph, cut, index) if node.inputs else None
                schemas = [_schema(spark, job, *before, edge, settings) for edge in node.inputs] if before else []
                cut[index] = _parts(spark, job, node, schemas)
    return _expanded(graph, cut, len(graph.nodes))[0]


def _expanded(graph: Graph, cut: Mapping[int, Sequence[Part]], until: int) -> tuple[Graph, dict[int, int]]:
    """Return the first nodes of a graph, with the nodes of its queries, and the places of the graph's nodes there."""
    naming = _Naming.of(graph, [part for parts in cut.values() for part in parts])
    made: list[Node] = []
    places: dict[int, int] = {}
    for index, node in enumerate(graph.nodes[:until]):
        if isinstance(node, QueryNode):
            with step_at(node.at):
                made += _nodes(node, cut[index], naming, len(made), places)
        else:
            made.append(_moved(node, places))
        places[index] = len(made) - 1
    return Graph(tuple(made)), places


def _schema(
    spark: SparkSession, job: str, graph: Graph, places: Mapping[int, int], edge: Edge, settings: JobSettings
) -> T.StructType:
    """Return the schema of what a query reads of its job."""
    place = places[edge.node]
    nodes = sorted(_ancestors(graph, place))
    among = {node: number for number, node in enumerate(nodes)}
    part = Graph(tuple(_moved(graph.nodes[node], among) for node in nodes))
    sources = open_sources(spark, job, part, max_ahead_ms=settings.max_ahead_ms)
    return schema_of_rows(spark, sources, part, settings, among[place])


def _ancestors(graph: Graph, place: int) -> set[int]:
    found = {place}
    for edge in graph.nodes[place].inputs:
        found |= _ancestors(graph, edge.node)
    return found


@dataclass
class _Naming:
    """The names of a job's operators and sources.

    Attributes:
        operators, sources: those that are given.
        wanted: how many operators would have a name.
    """

    operators: set[str]
    sources: set[str]
    wanted: Counter[str]

    @staticmethod
    def of(graph: Graph, parts: Sequence[Part]) -> _Naming:
        """Return the names that are given by steps; those of queries are given one after the other."""
        return _Naming(
            {node.uid for node in graph.nodes if isinstance(node, OperatorNode)},
            {node.name for node in graph.nodes if isinstance(node, SourceNode)},
            Counter(part.name for part in parts if isinstance(part, Stateful)),
        )

    def source(self, name: str) -> str:
        """Return the name of a source of a query."""
        found = check_uid(next(each for each in _numbered(name) if each not in self.sources), "source name")
        self.sources.add(found)
        return found

    def operator(self, name: str, others: Mapping[str, str]) -> tuple[str, str]:
        """Return the name that an operator of a query would have, and its uid.

        Args:
            others: the names that the user gives instead, by those that they would have.
        """
        would_be = next(each for each in _numbered(name) if others.get(each, each) not in self.operators)
        uid = check_uid(others.get(would_be, would_be), "operator uid")
        self.operators.add(uid)
        return would_be, uid


def _numbered(name: str) -> Iterator[str]:
    """Yield a name, and then with numbers."""
    yield name
    yield from (f"{name}-{number}" for number in range(2, 10_000))


def _moved(node: Node, places: Mapping[int, int]) -> Node:
    """Return a node that reads its inputs at their new places."""
    return rewired(node, lambda edge: _moved_edge(edge, places))


def _moved_edge(edge: Edge, places: Mapping[int, int]) -> Edge:
    return replace(edge, node=places[edge.node])


def _parts(spark: SparkSession, job: str, node: QueryNode, schemas: Sequence[T.StructType]) -> tuple[Part, ...]:
    streams = dict(zip(node.streams, streams_without_rows(spark, schemas), strict=True))
    source = partial(node.query, **{name: frame for name, (frame, _) in streams.items()}) if streams else node.query
    frame = streaming_frame(spark, job, source, "query()")
    numbers = {number: name for name, (_, number) in streams.items()}
    try:
        return cut_query(
            frame, node.output_mode, node.names, given_streams=numbers, allow_unbounded=node.allow_unbounded
        )
    except (PySparkException, InvalidPipeline) as error:
        raise _refused(job, error) from error


def _nodes(
    node: QueryNode, parts: Sequence[Part], naming: _Naming, first: int, places: Mapping[int, int]
) -> list[Node]:
    """Return the nodes of a query.

    Args:
        first: the index that the first of them gets.
        places: of the nodes before.
    """
    wanted = [part.name for part in parts if isinstance(part, Read)]
    sources = [naming.source(name) for name in wanted]
    names = iter(sources)
    operators: list[str] = []
    nodes: list[Node] = []
    edges: list[Edge] = []  # of the parts' rows
    for part in parts:
        if isinstance(part, Given):
            edges.append(_moved_edge(node.inputs[part.input], places))
            continue
        edges.append(Edge(first + len(nodes)))
        if isinstance(part, Read):
            nodes.append(SourceNode(next(names), part.frame, at=node.at, clock_with=frozenset(sources)))
        elif isinstance(part, Rows):
            inputs = tuple(edges[index] for index in part.inputs)
            code = QueryStep(part.function, part.name)
            nodes.append(SegmentNode(inputs, code, at=node.at, renames=part.renames))
        else:
            would_be, uid = naming.operator(part.name, node.names)
            operators.append(would_be)
            is_unsure = naming.wanted[part.name] > 1 or part.is_ambiguous
            says = {**part.says, **({INPUT: part.reads} if is_unsure else {})}
            nodes.append(_operator(part, uid, says, node, edges))
    unknown = [name for name, other in node.names.items() if name not in operators and other not in wanted]
    if unknown:
        raise InvalidPipeline(
            f"query(): names has {unknown[0]!r}, and the query has the operators {', '.join(operators) or 'none'} and "
            f"the sources {', '.join(sources)}"
        )
    return nodes


def _refused(job: str, error: Exception) -> InvalidPipeline:
    if isinstance(error, InvalidPipeline):
        return InvalidPipeline(f"job {job!r}: query(): {error}")
    told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return InvalidPipeline(f"job {job!r}: Spark refuses the query, too: {told}")


def _operator(
    part: Stateful, uid: str, says: Mapping[str, str], node: QueryNode, edges: Sequence[Edge]
) -> OperatorNode:
    """Return the operator of a part.

    Args:
        edges: of the parts before.
    """
    ports = [Port(edges[part.inputs[0]], part.keys)]
    if isinstance(part, Joined):
        ports.append(Port(edges[part.inputs[1]], part.right_keys))
    return OperatorNode(_step(part, uid, node.output_mode), tuple(ports), at=node.at, says=says, kept=part.kept)


def _step(part: Stateful, uid: str, output_mode: OutputMode) -> OperatorStep:
    if isinstance(part, Grouped):
        calls = {name: _aggregate(called) for name, called in part.calls.items()}
        # Of a GROUP BY without functions the keys are the answer.
        calls = calls or {"count": Aggregate("count", None)}
        if part.gap_us is not None:
            return WindowStep(
                uid=uid,
                window=SessionWindow(part.gap_us, part.end_column),
                aggregates=calls,
                output_mode=output_mode,
                allowed_lateness="0 seconds",
                time=part.event_time,
            )
        return AggregateStep(uid, calls, output_mode, forgets=bool(part.event_time))
    if isinstance(part, Deduplicated):
        return DeduplicateStep(uid, part.within_watermark)
    if isinstance(part, Joined):
        return IntervalJoinStep(uid, part.terms, event_time="both", waits_ms=part.held_back_ms)
    assert isinstance(part, Processed)
    return ProcessorStep(
        uid=uid,
        processor=part.processor,
        output_schema=part.output_schema,
        pandas=part.is_pandas,
        output_mode=output_mode,
        time_mode=part.time_mode,
        event_time_column=part.event_time,
        initial_state=part.initial,
    )


def _aggregate(called: Called) -> Aggregate:
    limit = {"collect": COLLECT_LIMIT_MAX, "collect_set": DISTINCT_LIMIT_MAX}.get(called.function, 0)
    return Aggregate(
        function=called.function,
        column=called.column,
        ignore_nulls=called.ignore_nulls,
        limit=limit,
        rsd=called.rsd,
        by=called.by,
        told=called.text,
    )
