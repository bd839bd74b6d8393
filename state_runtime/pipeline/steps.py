"""A pipeline's graph as the steps that people read; pure."""

from __future__ import annotations

from state_runtime.base.joining import CONDITION
from state_runtime.base.steps import Step
from state_runtime.pipeline.graph import Graph, Node, OperatorNode, SegmentNode, SinkNode, SourceNode

__all__ = ["steps_of"]


def steps_of(graph: Graph) -> tuple[Step, ...]:
    """Return a step for each node, at the node's index, without numbers."""
    return tuple(
        Step(
            kind=_kind(node),
            name=_name(node),
            reads=tuple(edge.node for edge in node.inputs),
            keys=_keys(node) if isinstance(node, OperatorNode) else (),
        )
        for node in graph.nodes
    )


def _kind(node: Node) -> str:
    if isinstance(node, SegmentNode):
        return str(node.code.kind)
    if isinstance(node, OperatorNode):
        return str(node.step.kind)
    return "source" if isinstance(node, SourceNode) else "sink" if isinstance(node, SinkNode) else "query"


def _name(node: Node) -> str:
    if isinstance(node, OperatorNode):
        return node.uid
    if isinstance(node, SegmentNode):
        return str(node.code.name)
    return node.name or str(getattr(node.read, "__name__", "")) if isinstance(node, SourceNode) else node.name


def _keys(node: OperatorNode) -> tuple[tuple[str, ...], ...]:
    """Return the key columns of each input; of a query its own keys, of which a window is two columns."""
    own = tuple(key for key in node.says if key not in ("", CONDITION))
    return tuple(own or port.keys for port in node.ports)
