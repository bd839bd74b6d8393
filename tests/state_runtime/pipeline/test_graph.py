"""A graph that makes sense is taken, and any other is refused; of those that make sense, only chains are run so far."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_runtime import StreamingJob, aggregates
from state_runtime.base.errors import InvalidPipeline
from state_runtime.job import Stream
from state_runtime.pipeline import graph as graph_module
from state_runtime.pipeline.graph import (
    Edge,
    Graph,
    Node,
    OperatorNode,
    Port,
    SegmentNode,
    SinkNode,
    SourceNode,
    check_graph,
)
from state_runtime.pipeline.join_rows import lone_join
from state_runtime.pipeline.plan import refuse_unsupported
from state_runtime.pipeline.side_outputs import OutputStep, with_side_outputs
from state_runtime.pipeline.sinks import foreach_epoch


@dataclass(frozen=True)
class Step:
    uid: str


def read(name: str = "") -> SourceNode:
    return SourceNode(name, None)


def segment(*indices: int) -> SegmentNode:
    return SegmentNode(tuple(map(Edge, indices)), None)


def operator(uid: str, *indices: int, keys: tuple[str, ...] = ("k",)) -> OperatorNode:
    return OperatorNode(Step(uid), tuple(Port(Edge(index), keys) for index in indices))


def sink(name: str, index: int) -> SinkNode:
    return SinkNode(name, None, Edge(index))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph that makes sense: each node reads earlier ones, and its name is its own."""
    nodes: list[Node] = [read("0")]
    for index in range(1, draw(st.integers(1, 9))):
        rows = [n for n, node in enumerate(nodes) if not isinstance(node, SinkNode)]
        read_of = draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3))
        name = str(index)
        made: list[Node] = [read(name), segment(*read_of), operator(name, *read_of), sink(name, read_of[0])]
        nodes.append(draw(st.sampled_from(made)))
    return Graph(tuple(nodes))


def with_node(graph: Graph, index: int, node: Node) -> Graph:
    return Graph((*graph.nodes[:index], node, *graph.nodes[index + 1 :]))


def fed_by(node: Node, edges: tuple[Edge, ...]) -> Node:
    """The same node with other inputs."""
    if isinstance(node, SegmentNode):
        return replace(node, inputs=edges)
    if isinstance(node, OperatorNode):
        return replace(node, ports=tuple(Port(edge, ("k",)) for edge in edges))
    assert isinstance(node, SinkNode)
    return replace(node, input=edges[0])


@given(graphs())
def test_a_graph_whose_nodes_read_earlier_ones_is_taken(graph: Graph) -> None:
    """Whatever its branches are."""
    check_graph(graph)


@given(graphs(), st.data())
def test_an_edge_that_does_not_lead_to_an_earlier_node_is_refused(graph: Graph, data: st.DataObject) -> None:
    """So there is no cycle, whatever the edges are: along each the index falls."""
    fed = [index for index, node in enumerate(graph.nodes) if node.inputs]
    if not fed:
        return
    index = data.draw(st.sampled_from(fed))
    edges = graph.nodes[index].inputs
    wrong = data.draw(st.integers(index, len(graph.nodes) + 1) | st.integers(-3, -1))
    with pytest.raises(InvalidPipeline, match=f"reads node {wrong}, which does not come before it"):
        check_graph(with_node(graph, index, fed_by(graph.nodes[index], (*edges[:-1], Edge(wrong)))))


@given(graphs(), st.data())
def test_a_node_that_reads_a_sink_or_nothing_is_refused(graph: Graph, data: st.DataObject) -> None:
    """A sink is the end of its rows; and what is never fed would never do anything."""
    where = len(graph.nodes)
    behind = data.draw(st.sampled_from([segment(where), operator("new", where), sink("new", where)]))
    with pytest.raises(InvalidPipeline, match="a sink gives no rows"):
        check_graph(Graph((*graph.nodes, sink("end", 0), behind)))
    for alone in (segment(), operator("new")):
        with pytest.raises(InvalidPipeline, match="reads nothing"):
            check_graph(Graph((*graph.nodes, alone)))


@given(graphs(), st.data())
def test_a_name_that_is_taken_is_refused(graph: Graph, data: st.DataObject) -> None:
    """State belongs to a uid, a position to the name of a source, output to that of a sink; each kind has its own."""
    node = data.draw(st.sampled_from([n for n in graph.nodes if not isinstance(n, SegmentNode)]))
    name = node.uid if isinstance(node, OperatorNode) else node.name
    kinds: list[Node] = [read(name), operator(name, 0), sink(name, 0)]
    for other in kinds:
        if isinstance(other, type(node)):
            with pytest.raises(InvalidPipeline, match=rf"^two \w+ (are named|have the uid) '{name}'"):
                check_graph(Graph((*graph.nodes, other)))


def test_the_ports_of_an_operator_have_as_many_keys_each() -> None:
    """Rows of both meet by equal keys, pair by pair."""
    ports = (Port(Edge(0), ("a", "b")), Port(Edge(1), ("c",)))
    with pytest.raises(InvalidPipeline, match=r"operator 'u' has inputs with 2, 1 key columns"):
        check_graph(Graph((read("l"), read("r"), OperatorNode(Step("u"), ports))))


WHAT_IS_SAID_OF = {
    "a source that nothing reads": ((read("a"), read("b"), operator("o", 0)), "no step reads source 'b'"),
    "a join of three": ((read("a"), read("b"), read("c"), operator("join", 0, 1, 2)), "'join' has 3 inputs"),
}


@pytest.mark.parametrize("name", WHAT_IS_SAID_OF)
def test_what_the_form_can_say_and_a_run_cannot_do_is_refused_by_name(name: str) -> None:
    """The graph itself is sound: only what runs it is not there."""
    nodes, said = WHAT_IS_SAID_OF[name]
    check_graph(Graph(nodes))
    with pytest.raises(InvalidPipeline, match=said):
        refuse_unsupported(Graph(nodes))


@given(graphs())
def test_graphs_are_run_whose_sources_are_all_read_and_whose_operators_have_two_inputs_at_most(graph: Graph) -> None:
    """With any branches, unions and joins."""
    sources = [index for index, node in enumerate(graph.nodes) if isinstance(node, SourceNode)]
    is_read = len(sources) == 1 or all(graph.readers(each) or graph.sinks(each) for each in sources)
    if is_read and all(len(node.ports) <= 2 for node in graph.nodes if isinstance(node, OperatorNode)):
        refuse_unsupported(graph)
    else:
        with pytest.raises(InvalidPipeline):
            refuse_unsupported(graph)


LONE = (read("l"), read("r"), operator("join", 0, 1))


@pytest.mark.parametrize(
    ("nodes", "is_lone"),
    [
        (LONE, True),
        ((*LONE, operator("behind", 2), sink("out", 3)), True),
        ((read("s"), operator("self", 0, 0)), False),
        ((*LONE, sink("raw", 0)), False),
        ((*LONE, operator("more", 0)), False),
        ((*LONE, read("x"), sink("all", 3)), False),
        ((read("l"), read("r"), segment(1), operator("join", 0, 2)), False),
        ((read("l"), read("r"), segment(0, 1)), False),
        ((read("l"), read("r"), operator("join", 1, 0)), False),
    ],
)
def test_two_sources_are_united_for_a_join_where_nothing_else_reads_them(
    nodes: tuple[Node, ...], is_lone: bool
) -> None:
    """In the order in which Spark has them."""
    check_graph(Graph(nodes))
    assert (lone_join(Graph(nodes)) is not None) == is_lone


def test_a_sink_hangs_on_the_node_that_it_was_written_on_whenever_that_was(tmp_path: Path) -> None:
    """It takes no rows away, so a stream with sinks goes on; without a word about chains."""
    job = StreamingJob("job", store=str(tmp_path))
    stream = job.read(lambda spark: spark)
    later = stream.key_by("k").aggregate(uid="n", n=aggregates.count())
    for each in (stream, later, stream):
        each.write(foreach_epoch(print))
    graph = job.plan().graph
    assert [[s.name for s in graph.sinks(index)] for index in (0, 1)] == [["out", "out-3"], ["out-2"]]
    assert [graph.readers(index) for index in (0, 1)] == [(1,), ()]


def of_one_uid(stream: Stream) -> None:
    stream.key_by("k").deduplicate(uid="u").key_by("k").deduplicate(uid="u")


def joined_by_other_keys(stream: Stream) -> None:
    stream.key_by("k").interval_join(
        lambda spark: spark.read.table("t"), right_keys=["a", "b"], lower="0 days", upper="1 day", uid="j"
    )


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (of_one_uid, "have the uid 'u'"),
        (joined_by_other_keys, "1, 2 key"),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_with_the_line_of_the_step(
    tmp_path: Path, build: Callable[[Stream], None], said: str
) -> None:
    """Before Spark is asked for anything."""
    job = StreamingJob("job", store=str(tmp_path))
    build(job.read(lambda spark: spark))  # type: ignore[arg-type, return-value]
    line = job._pipeline.graph.nodes[-1].at
    assert line.startswith(__file__)
    with pytest.raises(InvalidPipeline, match=rf"{said}.*\({re.escape(line)}\)$"):
        job.plan()


def test_the_form_names_no_engine() -> None:
    """Another one than Spark is going to run it (`tests/test_tidy.py` holds that it imports none)."""
    assert "spark" not in Path(str(graph_module.__file__)).read_text().lower()


# --- side outputs ----------------------------------------------------------------------------------------------------


@st.composite
def graphs_with_sides(draw: st.DrawFn) -> Graph:
    """A graph of which some edges read a side output."""
    graph = draw(graphs())
    nodes = []
    for node in graph.nodes:

        def edge(given: Edge) -> Edge:
            is_operator = isinstance(graph.nodes[given.node], OperatorNode)
            return replace(given, output=draw(st.sampled_from(("", "late", "odd")))) if is_operator else given

        nodes.append(graph_module.rewired(node, edge))
    return Graph(tuple(nodes))


@given(graphs_with_sides())
def test_each_edge_to_an_output_becomes_an_edge_to_what_takes_it_out(graph: Graph) -> None:
    """Nodes keep their order, and no edge names an output any more; a graph without side outputs stays as it is."""
    made = with_side_outputs(graph)
    check_graph(made)
    assert not any(edge.output for node in made.nodes for edge in node.inputs)
    taken = [index for index, node in enumerate(made.nodes) if isinstance(getattr(node, "code", None), OutputStep)]
    kept = [index for index in range(len(made.nodes)) if index not in taken]
    assert len(kept) == len(graph.nodes)
    if not taken:
        assert made is graph
    for index, node in zip(kept, graph.nodes, strict=True):
        for new, old in zip(made.nodes[index].inputs, node.inputs, strict=True):
            before = made.nodes[new.node]
            if isinstance(before, SegmentNode) and isinstance(before.code, OutputStep):
                assert (before.code.output, before.inputs[0].node) == (old.output, kept[old.node])
            else:
                assert (new.node, old.output) == (kept[old.node], "")
        if isinstance(node, OperatorNode):
            read = {edge.output for each in graph.nodes for edge in each.inputs if graph.nodes[edge.node] is node}
            operator = made.nodes[index]
            assert isinstance(operator, OperatorNode)
            assert set(operator.sides) == read - {""}


def test_only_operators_have_side_outputs() -> None:
    nodes = (read(), replace(sink("out", 0), input=Edge(0, "late")))
    with pytest.raises(InvalidPipeline, match="reads the output 'late' of source '', which has its main output only"):
        check_graph(Graph(nodes))
