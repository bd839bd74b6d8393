"""Side outputs in a graph: the rows of a step, taken apart by segments, one for each output that is read.

Behind this step all edges are to main outputs; plans, tasks and sinks know no other ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.expectations import BAD, ExpectedStep, ExpectStep
from state_runtime.pipeline.future_rows import FutureStep
from state_runtime.pipeline.graph import Edge, Graph, Node, OperatorNode, OutputCode, SegmentNode, SourceNode, rewired
from state_runtime.pipeline.operators import JoinedSides, arrow_schema
from state_runtime.processors.builtin.aggregate import AggregateOperator
from state_runtime.processors.builtin.sessions import SessionOperator
from state_runtime.processors.builtin.stream_join import StreamJoin
from state_runtime.processors.builtin.windows import WindowOperator
from state_runtime.processors.operator import LATE, LATE_OF_SIDE, Operator
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.spark.columns import OUTPUT_COLUMN
from state_runtime.spark.sql import quoted

__all__ = ["OutputStep", "side_schemas", "with_side_outputs"]


@dataclass(frozen=True)
class OutputStep(OutputCode):
    """The code of a segment that takes one output out of the rows of all outputs of an operator.

    Attributes:
        output: its name; "" is the main one.
    """

    def function(self, rows: DataFrame) -> DataFrame:
        """Return the rows of the output, with its columns."""
        sides = [name for name in rows.columns if name.startswith(OUTPUT_COLUMN)]
        if self.output:
            own = quoted(OUTPUT_COLUMN + self.output)
            return rows.where(f"{own} IS NOT NULL").select(f"{own}.*")
        nothing = " AND ".join(f"{quoted(name)} IS NULL" for name in sides)
        return rows.where(nothing).select(*(F.col(quoted(name)) for name in rows.columns if name not in sides))


def with_side_outputs(graph: Graph) -> Graph:
    """Return a graph in which a segment stands for each output of the steps whose side outputs are read, and of each
    `expect_or_drop`; any other graph as it is."""
    read: dict[int, list[str]] = {}
    for edge in (edge for node in graph.nodes for edge in node.inputs):
        names = read.setdefault(edge.node, [])
        if edge.output not in names:
            names.append(edge.output)
    made: list[Node] = []
    places: dict[Edge, Edge] = {}
    for index, node in enumerate(graph.nodes):
        moved, names = rewired(node, places.__getitem__), read.get(index, [])
        made.append(moved)
        places[Edge(index)] = Edge(len(made) - 1)
        apart = _taken_apart(moved, names)
        if apart is None:
            continue
        made[-1], codes = apart
        whole = places[Edge(index)]
        for name, code in codes.items():
            made.append(SegmentNode((whole,), code, at=node.at))
            places[Edge(index, name)] = Edge(len(made) - 1)
    return graph if len(made) == len(graph.nodes) else Graph(tuple(made))


def _taken_apart(node: Node, names: Sequence[str]) -> tuple[Node, dict[str, Any]] | None:
    """Return a node that gives the rows of several outputs, and the code that takes out each of them; None if it gives
    its main output only.

    Args:
        names: of its outputs that are read.
    """
    sides = tuple(sorted(filter(None, names)))
    if isinstance(node, SegmentNode) and isinstance(node.code, ExpectStep):
        code = replace(node.code, is_read=BAD in sides)
        return replace(node, code=code), {name: ExpectedStep(name) for name in names or ("",)}
    if isinstance(node, OperatorNode) and sides:
        return replace(node, sides=sides), {name: OutputStep(name) for name in names}
    if isinstance(node, SourceNode) and sides:
        return node, {name: FutureStep(name) for name in names}
    return None


def side_schemas(
    node: OperatorNode, operator: Operator, given: T.StructType, sides: JoinedSides | None
) -> dict[str, pa.Schema]:
    """Return the schemas of the side outputs of a node that are read.

    Args:
        given: schema of its input.
        sides: of an operator with two inputs.

    Raises:
        InvalidPipeline: it has no output of that name.
    """
    known = {name: arrow_schema(schema) for name, schema in _late(operator, given, sides).items()}
    if isinstance(operator, VectorizedOperator):
        known |= operator.outputs
    for name in node.sides:
        if name not in known:
            has = f"it has {', '.join(map(repr, known))}" if known else "it has its main output only"
            hint = "" if known or name != LATE else ": it drops no late rows, since it does not go by event time"
            raise InvalidPipeline(f"operator {node.uid!r} has no output {name!r}; {has}{hint}")
    return {name: known[name] for name in node.sides}


def _late(operator: Operator, given: T.StructType, sides: JoinedSides | None) -> dict[str, T.StructType]:
    """Return the schemas of the outputs with late rows: those of the inputs."""
    if sides is not None:
        found = list(operator.plan.sides.values()) if isinstance(operator, StreamJoin) else []
        if isinstance(operator, VectorizedOperator):
            found = [each.side for each in operator.inputs.values()]
        return {LATE_OF_SIDE[side.number]: sides[side.number] for side in found if side.time and side.drops_late}
    is_by_time = isinstance(operator, WindowOperator | SessionOperator) or (
        (isinstance(operator, AggregateOperator | VectorizedOperator) and operator.event_time != "")
        or (isinstance(operator, StatefulProcessorOperator) and operator.event_time_column != "")
    )
    return {LATE: given} if is_by_time else {}
