"""A pipeline as a graph of nodes and edges, and its checks; pure, and independent of the engine that runs it.

Nodes are in topological order, and an edge has the index of an earlier node: a graph that `check_graph` has passed
has no cycle. A chain is a graph without branches. The engine decides how nodes read, compute and write. `at` is the
line of the job's own code that a node comes from, if it is known. See docs/design/0040-graph.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.usercode import step_at

__all__ = [
    "FUTURE",
    "Edge",
    "Graph",
    "Node",
    "OperatorNode",
    "OutputCode",
    "Port",
    "QueryNode",
    "SegmentNode",
    "SinkNode",
    "SourceNode",
    "check_graph",
    "is_given",
    "rewired",
    "side_outputs_of",
]

FUTURE: Final = "future"
"""The side output of a source: rows whose event time is too far ahead."""


@dataclass(frozen=True)
class Edge:
    """The rows that one node gives to another.

    Attributes:
        node: index in `Graph.nodes` of the node that gives them.
        output: name of a side output; "" is the node's main output.
    """

    node: int
    output: str = ""


@dataclass(frozen=True)
class Port:
    """An input of an operator: each row goes to the shard of its key.

    Attributes:
        keys: its key columns; empty if all rows are one group. Key columns of the operator's ports are matched by
            their order.
    """

    input: Edge
    keys: tuple[str, ...]


@dataclass(frozen=True)
class SourceNode:
    """The origin of rows, and of the watermark of all nodes below.

    Attributes:
        name: unique in the graph; "" for the only source of a job. Its positions in snapshots belong to it.
        was: the name that it had in snapshots until now; None: the same.
        idle_after_ms: how long no row of it may come before it holds no operator's clock back; None: for ever.
        clock_with: the sources that have one clock with it: each of them holds back what reads any of them.
        max_ahead_ms: how far an event time may be ahead of processing time to move clocks; None: as the settings say.
    """

    name: str
    read: Any
    at: str = ""
    was: str | None = None
    idle_after_ms: int | None = None
    clock_with: frozenset[str] = frozenset()
    max_ahead_ms: int | None = None

    @property
    def inputs(self) -> tuple[Edge, ...]:
        return ()


@dataclass(frozen=True)
class QueryNode:
    """A query in the engine's own words. Before a run it is replaced by the nodes that it is made of.

    Attributes:
        query: as the engine takes it.
        names: other names for its sources and operators, by those that they would have.
        allow_unbounded: its joins may keep rows for ever.
        streams: the names that it has for its inputs.
    """

    query: Any
    output_mode: Literal["append", "update", "complete"]
    names: Mapping[str, str]
    allow_unbounded: bool = False
    streams: tuple[str, ...] = ()
    inputs: tuple[Edge, ...] = ()
    at: str = ""

    @property
    def name(self) -> str:
        """The name of its function."""
        return str(getattr(self.query, "__name__", "query"))


def is_given(name: str) -> bool:
    """Return whether the user has named a source so: neither the only source of a job ("") nor a join's right one,
    which is made of the join's uid (`joined.right`)."""
    return name != "" and "." not in name


@dataclass(frozen=True)
class SegmentNode:
    """Stateless code between other nodes; it may have several inputs, as a union has.

    Attributes:
        renames: if it only gives its input's columns other names, an input's column by each name, or the two of which a
            window is made; so its input's operator can write them itself. Empty: it does more, or that is not known.
    """

    inputs: tuple[Edge, ...]
    code: Any
    at: str = ""
    renames: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputCode:
    """What is the same in all code of segments that take one output out of the rows of a step with several.

    Attributes:
        output: its name; "" is the main one.
    """

    output: str
    every_epoch: ClassVar[bool] = False
    kind: ClassVar[str] = "output"

    @property
    def name(self) -> str:
        """What people read for it."""
        return self.output or "main"

    @property
    def where(self) -> str:
        """The step, for messages."""
        return f"output({self.name!r})"


@dataclass(frozen=True)
class OperatorNode:
    """A keyed operator with state, which belongs to the `uid` of its step.

    Attributes:
        ports: one, or several, as a join has. The operator's clock is the lowest of their clocks.
        sides: the side outputs that are read, once its rows are taken apart (`pipeline/side_outputs.py`).
        says: of an operator of a query the expressions of its keys, which its state belongs to.
        kept: of an operator of a query, returns how the engine's own streaming keeps its state; for imports.
    """

    step: Any
    ports: tuple[Port, ...]
    at: str = ""
    sides: tuple[str, ...] = ()
    says: Mapping[str, str] = field(default_factory=dict)
    kept: Callable[[], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def uid(self) -> str:
        return str(self.step.uid)

    @property
    def inputs(self) -> tuple[Edge, ...]:
        return tuple(port.input for port in self.ports)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the key columns, under their names in state and output."""
        return self.ports[0].keys


@dataclass(frozen=True)
class SinkNode:
    """The node at which rows leave the job."""

    name: str
    sink: Any
    input: Edge
    at: str = ""

    @property
    def inputs(self) -> tuple[Edge, ...]:
        return (self.input,)


Node: TypeAlias = SourceNode | QueryNode | SegmentNode | OperatorNode | SinkNode


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order."""

    nodes: tuple[Node, ...] = ()

    def readers(self, index: int) -> tuple[int, ...]:
        """Return the indices of the nodes that read a node's rows, once for each edge; sinks are not included."""
        return tuple(
            reader
            for reader, node in enumerate(self.nodes)
            if not isinstance(node, SinkNode)
            for edge in node.inputs
            if edge.node == index
        )

    @property
    def has_branches(self) -> bool:
        """Whether a node has several readers."""
        return any(len(self.readers(index)) > 1 for index in range(len(self.nodes)))

    def sinks(self, index: int) -> tuple[SinkNode, ...]:
        """Return the sinks that read a node."""
        return tuple(node for node in self.nodes if isinstance(node, SinkNode) and node.input.node == index)


def rewired(node: Node, edge_of: Callable[[Edge], Edge]) -> Node:
    """Return a node whose inputs are other edges."""
    if isinstance(node, SegmentNode | QueryNode):
        return replace(node, inputs=tuple(map(edge_of, node.inputs)))
    if isinstance(node, OperatorNode):
        return replace(node, ports=tuple(replace(port, input=edge_of(port.input)) for port in node.ports))
    return node if isinstance(node, SourceNode) else replace(node, input=edge_of(node.input))


def check_graph(graph: Graph) -> None:
    """Check that each node reads earlier nodes only, and that no two nodes have the same name.

    Raises:
        InvalidPipeline: with the line of the wrong node.
    """
    names: set[str] = set()
    for index, node in enumerate(graph.nodes):
        name = _name(node)
        with step_at(node.at):
            if not node.inputs and not isinstance(node, SourceNode | QueryNode):
                raise InvalidPipeline(f"{name} reads nothing; give it the output of a source or of another step")
            for edge in node.inputs:
                _check_edge(graph, index, edge)
            if isinstance(node, OperatorNode) and len({len(port.keys) for port in node.ports}) > 1:
                raise InvalidPipeline(
                    f"{name} has inputs with {', '.join(str(len(port.keys)) for port in node.ports)} key columns; rows "
                    "of all inputs meet by equal keys, so name as many columns for each"
                )
            if not isinstance(node, SegmentNode | QueryNode) and name in names:
                raise InvalidPipeline(_taken(node))
            names.add(name)


def _check_edge(graph: Graph, index: int, edge: Edge) -> None:
    """Refuse an edge that does not come from an earlier node with an output."""
    name = _name(graph.nodes[index])
    if not 0 <= edge.node < index:
        raise InvalidPipeline(
            f"{name} is node {index} and reads node {edge.node}, which does not come before it; a step reads what was "
            "written before it in the same job, and a pipeline has no cycles"
        )
    if isinstance(before := graph.nodes[edge.node], SinkNode):
        raise InvalidPipeline(f"{name} reads {_name(before)}, and a sink gives no rows; read what the sink is fed from")
    if edge.output and not _has_output(before, edge.output):
        raise InvalidPipeline(
            f"{name} reads the output {edge.output!r} of {_name(before)}, which has its main output only"
        )


def _has_output(node: Node, output: str) -> bool:
    """Return whether a node may have a side output; which ones an operator has is known when it is compiled."""
    if isinstance(node, SourceNode):
        return output == FUTURE
    return isinstance(node, OperatorNode) or (isinstance(node, SegmentNode) and output in side_outputs_of(node))


def side_outputs_of(node: SegmentNode) -> frozenset[str]:
    """Return the names of the side outputs of a segment; most have none."""
    return getattr(node.code, "side_outputs", frozenset())


def _taken(node: SourceNode | OperatorNode | SinkNode) -> str:
    if isinstance(node, OperatorNode):
        return f"two operators have the uid {node.uid!r}; state belongs to one uid"
    if isinstance(node, SinkNode):
        return f"two sinks are named {node.name!r}; give each write() a name of its own"
    return (
        f'two sources are named {node.name!r}; name each one, read(…, name="orders"), so that its position in a '
        "snapshot can be told apart"
    )


def _name(node: Node) -> str:
    if isinstance(node, SegmentNode | QueryNode):
        return "a stateless step" if isinstance(node, SegmentNode) else f"query {node.name!r}"
    if isinstance(node, OperatorNode):
        return f"operator {node.uid!r}"
    return f"{'source' if isinstance(node, SourceNode) else 'sink'} {node.name!r}"
