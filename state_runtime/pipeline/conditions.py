"""Columns that are made for aggregates: of their conditions, and a key for an aggregate that has none.

A condition limits an aggregate to some of the rows (`aggregates.sum("price").where("price > 100")`, SQL's FILTER).

Every aggregate skips nulls; `max_by`, `min_by`, `top_n` and `bottom_n` skip rows with null in the column that they
choose by. So the condition becomes a column: the aggregate's column where the condition holds, else null. Spark
computes it where the operator's input is cut to the columns that it reads; it exists nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.graph import OperatorNode
from state_runtime.pipeline.operators import AggregateStep, WindowStep
from state_runtime.pipeline.repeatable import warn_if_unrepeatable
from state_runtime.processors.builtin.all_rows import ALL_ROWS
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.spark.columns import CONDITION_COLUMN
from state_runtime.spark.sql import quoted

__all__ = ["Conditioned", "conditioned"]


@dataclass(frozen=True)
class Conditioned:
    """An operator with a key, whose aggregates read columns that are null where their condition does not hold.

    Attributes:
        schema: of its input with these columns.
        columns: SQL by the name of each made column.
    """

    node: OperatorNode
    schema: T.StructType
    columns: Mapping[str, str]

    def select(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return SQL for some columns of `schema` over its input."""
        return tuple(f"{self.columns[n]} AS {quoted(n)}" if n in self.columns else quoted(n) for n in names)

    def told(self, read: T.StructType) -> T.StructType:
        """Return some columns of `schema` under readable names: a made column is called by its SQL."""
        return T.StructType([T.StructField(self.columns.get(f.name, f.name), f.dataType) for f in read.fields])


def conditioned(spark: SparkSession, node: OperatorNode, schema: T.StructType) -> Conditioned:
    """Make columns of conditions, and a key for an operator that has none; any other operator is left as it is.

    Args:
        schema: of its input.

    Raises:
        InvalidPipeline: a condition cannot be parsed, names a column that does not exist, or is not a condition.
    """
    step = node.step
    if not isinstance(step, AggregateStep | WindowStep):
        return Conditioned(node, schema, {})
    if node.keys and not any(a.condition for a in step.aggregates.values()):
        return Conditioned(node, schema, {})
    given = spark.createDataFrame([], schema)
    columns: dict[str, str] = {}
    aggregates: dict[str, Aggregate] = {}
    if not node.keys:
        columns[ALL_ROWS] = "true"
        given = given.selectExpr("*", f"{columns[ALL_ROWS]} AS {quoted(ALL_ROWS)}")
    for name, aggregate in step.aggregates.items():
        aggregates[name] = aggregate
        if aggregate.condition:
            made = f"{CONDITION_COLUMN}{len(columns.keys() - {ALL_ROWS})}"
            # A row with null in the column that chooses rows does not count; one with null in the value column would.
            of = aggregate.column if aggregate.by is None else aggregate.by
            value = quoted(of) if of is not None else "1"
            columns[made] = f"CASE WHEN ({aggregate.condition}) THEN {value} END"
            chosen = replace(aggregate, condition="", told=aggregate.over)
            aggregates[name] = replace(chosen, column=made) if aggregate.by is None else replace(chosen, by=made)
            given = _with(given, made, columns[made], f"operator {step.uid!r}, aggregate {name!r}", aggregate)
    warn_if_unrepeatable(given, f"operator {step.uid!r}")
    keyed = replace(node.ports[0], keys=node.keys or (ALL_ROWS,))
    return Conditioned(replace(node, step=replace(step, aggregates=aggregates), ports=(keyed,)), given.schema, columns)


def _with(given: DataFrame, name: str, sql: str, where: str, aggregate: Aggregate) -> DataFrame:
    try:
        return given.selectExpr("*", f"{sql} AS {quoted(name)}")
    except PySparkException as error:
        told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidPipeline(f"{where}: where({aggregate.condition!r}) cannot be used: {told}") from error
