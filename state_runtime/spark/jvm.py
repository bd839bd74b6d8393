"""The objects of Spark's JVM behind those of pyspark, and how its plans are walked. For this folder only: what leaves
it are values of Python's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from state_runtime.spark.internals import private

__all__ = [
    "analyzed",
    "classes",
    "columns_of",
    "dataset_of",
    "execution_of",
    "is_adaptive",
    "items",
    "java_context",
    "java_frame",
    "java_session",
    "kind_of",
    "kinds_in",
    "object_of",
    "paths_to",
]


def classes(spark: SparkSession) -> Any:
    """The classes of the driver's Java, by their names as attributes."""
    return private(spark.sparkContext, "_jvm")


def java_context(context: SparkContext) -> Any:
    """Java's `JavaSparkContext`."""
    return private(context, "_jsc")


def java_session(spark: SparkSession) -> Any:
    """Scala's `SparkSession`."""
    return private(spark, "_jsparkSession")


def java_frame(frame: DataFrame) -> Any:
    """Scala's `Dataset`."""
    return private(frame, "_jdf")


def execution_of(frame: DataFrame) -> Any:
    """What Spark makes of a frame: its plans, each when it is first asked for."""
    return java_frame(frame).queryExecution()


def analyzed(frame: DataFrame) -> Any:
    """A frame's plan with all names resolved."""
    return execution_of(frame).analyzed()


def object_of(package: Any, name: str) -> Any:
    """A Scala object of a package."""
    return getattr(package, f"{name}$").__getattr__("MODULE$")


def dataset_of(spark: SparkSession, plan: Any) -> Any:
    """Scala's `Dataset` of a plan."""
    return object_of(classes(spark).org.apache.spark.sql.classic, "Dataset").ofRows(java_session(spark), plan)


def is_adaptive(spark: SparkSession) -> bool:
    """Whether Spark may change a plan while it runs it: then some of its jobs run when it is planned."""
    return str(spark.conf.get("spark.sql.adaptive.enabled", "true")).lower() == "true"


def items(sequence: Any) -> list[Any]:
    """A Scala sequence's."""
    return [sequence.apply(number) for number in range(sequence.size())]


def kind_of(node: Any) -> str:
    """The class of a node of a plan, as `Filter`."""
    return str(node.getClass().getSimpleName())


def kinds_in(plan: Any) -> frozenset[str]:
    """The classes of all nodes of a plan."""
    return frozenset({kind_of(plan)}).union(*map(kinds_in, items(plan.children())))


def columns_of(frame: DataFrame) -> dict[int, str]:
    """A frame's columns by the number that Spark's plans know them by."""
    return {int(a.exprId().id()): str(a.name()) for a in items(analyzed(frame).output())}


def paths_to(is_it: Callable[[Any], bool], node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of each topmost node of a plan that is sought the nodes above it, outermost first."""
    if is_it(node):
        return [above]
    return [path for child in items(node.children()) for path in paths_to(is_it, child, (*above, node))]
