"""Spark's own plans and expressions, taken apart and put together again; for `job.query`.

These are internals of Spark: without them no plain query can be run (`Internal.QUERY_PLANS`), and pipelines that are
written as steps go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.columns import DELAY_METADATA
from state_runtime.spark.jvm import (
    analyzed,
    classes,
    constructor_of,
    dataset_of,
    items,
    java_context,
    java_session,
    kind_of,
    object_of,
)

__all__ = ["WINDOW_END", "WINDOW_START", "Catalyst", "distinct_names", "id_of", "is_marked", "is_window"]

WINDOW_START: Final = 0
WINDOW_END: Final = 1
"""Places of both times in Spark's window struct."""

# Leaves that are tables. Spark's optimizer settles what is read of them; they are to be read anew in each epoch.
_TABLES: Final = frozenset({"LogicalRelation", "DataSourceV2Relation", "HiveTableRelation"})

_CLOCKS: Final = frozenset({"CurrentTimestamp", "Now", "CurrentDate", "LocalTimestamp"})


class Catalyst:
    """Makers of plan nodes and expressions."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = classes(spark)
        self._spark = spark
        self._java = java_session(spark)
        self._package = jvm.org.apache.spark.sql.catalyst
        self._expressions = self._package.expressions
        self._to_sequence = jvm.PythonUtils.toSeq
        self._some = jvm.scala.Some
        self._none = object_of(jvm.scala, "None")
        self._nothing = self._to_sequence([])
        self._literals = object_of(self._expressions, "Literal")
        self._names = object_of(self._expressions, "NamedExpression")
        self._types = jvm.org.apache.spark.sql.types
        self._metadata = self._types.MetadataBuilder
        self._unmarked = self._metadata().build()
        self._relation = constructor_of(jvm.org.apache.spark.sql.execution.LogicalRDD)
        self._unpartitioned = self._package.plans.physical.UnknownPartitioning(0)

    def sequence(self, of: Sequence[Any]) -> Any:
        """Return a Scala sequence."""
        return self._to_sequence(list(of))

    def analyzed(self, frame: DataFrame) -> Any:
        """Return a frame's plan with all names resolved."""
        return analyzed(frame)

    def refused_by_spark(self, plan: Any, output_mode: str) -> None:
        """Let Spark check a streaming plan for an output mode.

        Raises:
            Py4JJavaError: with an AnalysisException.
        """
        checker = object_of(self._package.analysis, "UnsupportedOperationChecker")
        modes = object_of(self._package.streaming, "InternalOutputModes")
        checker.checkForStreaming(plan, modes.apply(output_mode))

    def clocks_held(self, plan: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return a plan with stand-ins for what reads a clock (current_timestamp, now, current_date, localtimestamp),
        and a function that puts the clocks back.

        The optimizer makes a constant of a clock; a plan that is used for many batches must keep it. The stand-in is
        Spark's own for streaming queries: the optimizer takes it for an expression that may change.

        Raises:
            InvalidPipeline: a node that cannot be made anew reads a clock.
        """
        held: list[Any] = []

        def stand_in(expression: Any) -> Any:
            if kind_of(expression) not in _CLOCKS:
                return None
            held.append(expression)
            zone = self._some(self._java.sessionState().conf().sessionLocalTimeZone())
            return self._expressions.CurrentBatchTimestamp(len(held) - 1, expression.dataType(), zone)

        def back(expression: Any) -> Any:
            return held[expression.timestampMs()] if kind_of(expression) == "CurrentBatchTimestamp" else None

        made = self.with_expressions(plan, stand_in)
        return made, lambda optimized: self.with_expressions(optimized, back) if held else optimized

    def with_expressions(self, node: Any, instead: Callable[[Any], Any]) -> Any:
        """Return a plan with other expressions in it: `instead` gives one for an expression, or None to look below it.

        Raises:
            InvalidPipeline: one is to be replaced in a node of a kind that cannot be made anew.
        """
        logical = self._package.plans.logical
        children = items(node.children())
        below = [self.with_expressions(child, instead) for child in children]
        if any(new is not old for new, old in zip(below, children, strict=True)):
            node = node.withNewChildren(self.sequence(below))
        before = items(node.expressions())
        made = [self.with_leaves(each, instead) for each in before]
        if all(new is old for new, old in zip(made, before, strict=True)):
            return node
        kind = kind_of(node)
        if kind == "Project":
            return logical.Project(self.sequence(made), node.child())
        if kind == "Filter":
            return logical.Filter(made[0], node.child())
        if kind == "Aggregate":
            keys = len(items(node.groupingExpressions()))
            return logical.Aggregate(self.sequence(made[:keys]), self.sequence(made[keys:]), node.child(), node.hint())
        raise InvalidPipeline(
            "current_timestamp, now(), current_date and localtimestamp may stand in columns and filters of a query on "
            f"a stream, and here one is in {kind}: {node.simpleString(25)}. Make a column of it before"
        )

    def is_aggregated(self, expression: Any) -> bool:
        """Return whether an expression calls an aggregate function."""
        return bool(expression.containsPattern(self._package.trees.TreePattern.AGGREGATE_EXPRESSION()))

    def optimized(self, plan: Any) -> Any:
        """Return the plan that Spark would run: its rules decide which rows pass a watermark.

        Tables and clocks are as they were: what they hold, and the time, is Spark's to settle in each epoch.
        """
        tables: dict[int, Any] = {}

        def without(node: Any) -> Any:
            if kind_of(node) not in _TABLES or node.isStreaming():
                return None
            rows = java_context(self._spark.sparkContext).emptyRDD().rdd()
            tables[int(rows.id())] = node
            return self._leaf_of(node.output(), rows, is_streaming=False)

        def back(node: Any) -> Any:
            number = self.number_of(node)
            return tables.get(number) if number is not None else None

        held, with_clocks = self.clocks_held(plan)
        shielded = self.with_leaves(held, without)
        done = with_clocks(self._java.sessionState().optimizer().execute(shielded))
        return self.with_leaves(done, back) if tables else done

    def stream_without_rows(self, schema: T.StructType) -> tuple[DataFrame, int]:
        """Return a streaming frame that stands for rows of a schema, and the number by which plans know it
        (`number_of`)."""
        output = self.analyzed(self._spark.createDataFrame([], schema)).output()
        rows = java_context(self._spark.sparkContext).emptyRDD().rdd()
        leaf = self._leaf_of(output, rows, is_streaming=True)
        return self.frame(leaf), int(rows.id())

    def number_of(self, leaf: Any) -> int | None:
        """Return the number of a leaf that stands for rows; None of any other one."""
        return int(leaf.rdd().id()) if kind_of(leaf) == "LogicalRDD" else None

    def _leaf_of(self, output: Any, rows: Any, *, is_streaming: bool) -> Any:
        none, nothing = self._none, self._nothing
        return self._relation(
            output, rows, self._unpartitioned, nothing, is_streaming, none, self._java, none, none, False
        )

    def with_leaves(self, node: Any, instead: Callable[[Any], Any]) -> Any:
        """Return a plan with other nodes in it: `instead` gives one for a node, or None to look below it."""
        other = instead(node)
        if other is not None:
            return other
        children = items(node.children())
        made = [self.with_leaves(child, instead) for child in children]
        if all(new is old for new, old in zip(made, children, strict=True)):
            return node
        return node.withNewChildren(self.sequence(made))

    def frame(self, plan: Any, session: SparkSession | None = None) -> DataFrame:
        """Return the frame of a plan.

        Args:
            session: that it is to be planned in.
        """
        spark = session or self._spark
        return DataFrame(dataset_of(spark, plan), spark)

    def project(self, expressions: Sequence[Any], plan: Any) -> Any:
        """Return a projection."""
        return self._package.plans.logical.Project(self.sequence(expressions), plan)

    def in_one_task(self, plan: Any) -> Any:
        """Return a plan whose rows are all brought to one task."""
        return self._package.plans.logical.Repartition(1, True, plan)

    def filter(self, condition: Any, plan: Any) -> Any:
        """Return a filter."""
        return self._package.plans.logical.Filter(condition, plan)

    def named(self, expression: Any, name: str, *, marked: Any = None) -> Any:
        """Return a column of an expression, with a name, and with other names in structs that have one twice.

        Args:
            marked: a column whose mark of event time it gets; None: it has none.
        """
        metadata = self._unmarked
        if marked is not None:
            metadata = self._metadata().putLong(DELAY_METADATA, marked.metadata().getLong(DELAY_METADATA)).build()
        alias = self._expressions.Alias
        value = self.with_distinct_names(expression)
        return alias(value, name, self._names.newExprId(), self._nothing, self._some(metadata), self._nothing)

    def with_distinct_names(self, expression: Any) -> Any:
        """Return a value in whose structs no name is there twice: Arrow takes no others."""
        given = _type_of(expression.dataType())
        made = distinct_names(given)
        return expression if made == given else self._cast(expression, self._java.parseDataType(made.json()))

    def with_names_of(self, column: Any, attribute: Any) -> Any:
        """Return a column with the names that an attribute has in its structs; None if it has another type."""
        have, wanted = column.dataType(), attribute.dataType()
        if have.sameType(wanted):
            return column
        is_named_otherwise = self._types.DataType.equalsStructurally(have, wanted, True)
        return self._cast(column, wanted.asNullable()) if is_named_otherwise else None

    def _cast(self, expression: Any, data_type: Any) -> Any:
        return self._expressions.Cast(expression, data_type, self._none)

    def as_attribute(self, expression: Any, attribute: Any) -> Any:
        """Return a column that a plan takes for an attribute which it knows."""
        of = attribute
        alias = self._expressions.Alias
        return alias(expression, of.name(), of.exprId(), of.qualifier(), self._some(of.metadata()), self._nothing)

    def field_of(self, struct: Any, place: int) -> Any:
        """Return a field of a struct."""
        return self._expressions.GetStructField(struct, place, self._none)

    def window(self, start: Any, end: Any) -> Any:
        """Return the struct of a window's times; null if they are."""
        fields = [self.literal("start"), start, self.literal("end"), end]
        made = self._expressions.CreateNamedStruct(self.sequence(fields))
        return self._expressions.If(self._expressions.IsNull(start), self._literals.create(None, made.dataType()), made)

    def all_of(self, conditions: Sequence[Any]) -> Any:
        """Return the condition that is true where several are."""
        first, *others = conditions
        for other in others:
            first = self._expressions.And(first, other)
        return first

    def literal(self, value: Any) -> Any:
        """Return a constant."""
        return self._literals.apply(value)

    def where(self, condition: Any, value: Any) -> Any:
        """Return a value where a condition is true, else null."""
        return self._expressions.If(condition, value, self._literals.create(None, value.dataType()))

    def schema_of(self, attributes: Sequence[Any]) -> T.StructType:
        """Return the schema of columns."""
        return T.StructType([T.StructField(str(each.name()), _type_of(each.dataType())) for each in attributes])

    def grouping_of(self, aggregate: Any) -> tuple[list[Any], list[Any], list[Any]] | None:
        """Return an aggregate's keys, its function calls, and the results made of them; None if Spark cannot tell."""
        found = object_of(self._package.planning, "PhysicalAggregation").unapply(aggregate)
        if not found.isDefined():
            return None
        of = found.get()
        return items(of.productElement(0)), items(of.productElement(1)), items(of.productElement(2))

    def equal_keys(self, join: Any) -> tuple[list[Any], list[Any], list[Any]] | None:
        """Return the keys of both sides of a join, and its other conditions; None if nothing must be equal."""
        found = object_of(self._package.planning, "ExtractEquiJoinKeys").unapply(join)
        if not found.isDefined():
            return None
        of = found.get()
        rest = of.productElement(3)
        others = self._conjuncts(rest.get()) if rest.isDefined() else []
        return items(of.productElement(1)), items(of.productElement(2)), others

    def _conjuncts(self, condition: Any) -> list[Any]:
        if kind_of(condition) == "And":
            return [part for side in items(condition.children()) for part in self._conjuncts(side)]
        return [condition]

    def watermark_of_state(self, evicted: Any, other: Sequence[Any], condition: Any, watermark_ms: int) -> int | None:
        """Return up to which event time Spark forgets rows of a join's side, by a condition; None if it does not.

        Args:
            evicted: the columns of the side.
            other: the columns with event time of the other side.
        """
        helper = object_of(self._package.analysis, "StreamingJoinHelper")
        columns = object_of(self._expressions, "AttributeSet")
        found = helper.getStateValueWatermark(
            columns.apply(evicted), columns.apply(self.sequence(other)), self._some(condition), self._some(watermark_ms)
        )
        return int(found.get()) if found.isDefined() else None


def distinct_names(data_type: T.DataType) -> T.DataType:
    """Return a type in whose structs no name is there twice."""
    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(distinct_names(data_type.elementType), data_type.containsNull)
    if isinstance(data_type, T.MapType):
        key, value = distinct_names(data_type.keyType), distinct_names(data_type.valueType)
        return T.MapType(key, value, data_type.valueContainsNull)
    if not isinstance(data_type, T.StructType):
        return data_type
    fields: dict[str, T.StructField] = {}
    for field in data_type.fields:
        name = field.name
        while name in fields:
            name = f"{name}_"
        fields[name] = T.StructField(name, distinct_names(field.dataType), field.nullable, field.metadata)
    return T.StructType(list(fields.values()))


def _type_of(java_type: Any) -> T.DataType:
    field = {"name": "value", "type": json.loads(str(java_type.json())), "nullable": True, "metadata": {}}
    return T.StructType.fromJson({"type": "struct", "fields": [field]})["value"].dataType


def id_of(attribute: Any) -> int:
    """Return the number by which plans know a column."""
    return int(attribute.exprId().id())


def is_marked(attribute: Any) -> bool:
    """Return whether a column carries event time."""
    return bool(attribute.metadata().contains(DELAY_METADATA))


def is_window(attribute: Any) -> bool:
    """Return whether a column is a struct, as windows are."""
    return kind_of(attribute.dataType()) == "StructType"
