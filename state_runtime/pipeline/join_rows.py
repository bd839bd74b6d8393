"""The input of a join: two streams as one, in the layout of `processors/sides.py`."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.collations import refuse_collations
from state_runtime.pipeline.graph import Graph, OperatorNode, SourceNode
from state_runtime.pipeline.key_names import way_to_key
from state_runtime.pipeline.watermark import WatermarkColumn, watermark_columns
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN, SIDE_COLUMN
from state_runtime.spark.sql import quoted, type_sql

__all__ = ["Sides", "lone_join"]


@dataclass(frozen=True)
class Sides:
    """The two streams of a join.

    Attributes:
        left_keys, right_keys: the columns that must be equal, pairwise in order.
    """

    left: DataFrame
    right: DataFrame
    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]

    @staticmethod
    def of(node: OperatorNode, left: DataFrame, right: DataFrame) -> Sides:
        """Return the sides that a node reads."""
        return Sides(left, right, node.ports[0].keys, node.ports[1].keys)

    def check(self, where: str) -> None:
        """Check that the sides have their keys.

        Args:
            where: the join, for messages.

        Raises:
            InvalidPipeline: one lacks a key, or has text with a collation.
        """
        for name, frame, keys in (("left", self.left, self.left_keys), ("right", self.right, self.right_keys)):
            for key in keys:
                if key not in frame.columns:
                    raise InvalidPipeline(
                        f"{where}: the {name} stream of the join has no key column {key!r}; it has "
                        f"{', '.join(frame.columns)}{way_to_key(key, frame.schema)}"
                    )
            refuse_collations(frame.schema, f"{where}: the {name} stream of the join")

    def united(self) -> DataFrame:
        """Return the rows of both, with a column that tells them apart."""
        sides = ((self.left, self.left_keys), (self.right, self.right_keys))
        others = [_others(frame, keys) for frame, keys in sides]
        united = []
        for number, (frame, keys) in enumerate(sides):
            named = [f"{quoted(key)} AS {quoted(name)}" for key, name in zip(keys, self.left_keys, strict=True)]
            whole = f"struct({', '.join(map(quoted, others[number].names))})"
            nothing = f"CAST(NULL AS {type_sql(others[1 - number])})"
            columns = (whole, nothing) if number == 0 else (nothing, whole)
            tagged = [f"{number} AS {SIDE_COLUMN}", f"{columns[0]} AS {LEFT_COLUMN}", f"{columns[1]} AS {RIGHT_COLUMN}"]
            united.append(frame.selectExpr(*named, *tagged))
        return united[0].union(united[1])

    @property
    def watermarks(self) -> tuple[WatermarkColumn, ...]:
        """The columns with event time of both sides, where the united frame has them."""
        wrapped = [
            T.StructField(LEFT_COLUMN, _others(self.left, self.left_keys)),
            T.StructField(RIGHT_COLUMN, _others(self.right, self.right_keys)),
        ]
        return tuple(found for field in wrapped for found in watermark_columns(T.StructType([field])))


def _others(frame: DataFrame, keys: tuple[str, ...]) -> T.StructType:
    return T.StructType([field for field in frame.schema.fields if field.name not in keys])


def lone_join(graph: Graph) -> OperatorNode | None:
    """Return the join of a graph whose only sources are its two sides, and read by nothing else. Their rows can then be
    united where Spark reads them, without a shuffle of the batch."""
    sources = [index for index, node in enumerate(graph.nodes) if isinstance(node, SourceNode)]
    if len(sources) != 2 or any(graph.sinks(n) or len(graph.readers(n)) != 1 for n in sources):
        return None
    (reader,), (other,) = map(graph.readers, sources)
    node = graph.nodes[reader]
    is_join = reader == other and isinstance(node, OperatorNode) and [e.node for e in node.inputs] == sources
    return node if is_join and isinstance(node, OperatorNode) else None
