"""The JVM objects behind pyspark's, and the traversal of Spark's plans. Only for this folder: other folders get Python
values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from py4j.java_gateway import get_java_class
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from state_runtime.spark.internals import private

__all__ = [
    "analyzed",
    "classes",
    "columns_of",
    "constructor_of",
    "dataset_of",
    "execution_of",
    "has_method",
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
    """Return the classes of the driver's Java, by their names as attributes."""
    return private(spark.sparkContext, "_jvm")


def java_context(context: SparkContext) -> Any:
    """Return Java's `JavaSparkContext`."""
    return private(context, "_jsc")


def java_session(spark: SparkSession) -> Any:
    """Return Scala's `SparkSession`."""
    return private(spark, "_jsparkSession")


def java_frame(frame: DataFrame) -> Any:
    """Return Scala's `Dataset`."""
    return private(frame, "_jdf")


def execution_of(frame: DataFrame) -> Any:
    """Return Spark's `QueryExecution` of a frame, with its plans, each made when it is first asked for."""
    return java_frame(frame).queryExecution()


def analyzed(frame: DataFrame) -> Any:
    """Return a frame's plan with all names resolved."""
    return execution_of(frame).analyzed()


def object_of(package: Any, name: str) -> Any:
    """Return a Scala object of a package."""
    return getattr(package, f"{name}$").__getattr__("MODULE$")


def constructor_of(java_class: Any) -> Callable[..., Any]:
    """Return a function that makes objects of a Scala class, by its longest constructor.

    Versions of Spark add parameters at a constructor's end. Arguments for which this version has no parameter are left
    out: they must be those that ask for nothing. This takes some calls of the JVM: keep what it returns.
    """
    size = max(int(each.getParameterCount()) for each in get_java_class(java_class).getConstructors())
    return lambda *arguments: java_class(*arguments[:size])


def dataset_of(spark: SparkSession, plan: Any) -> Any:
    """Return Scala's `Dataset` of a plan."""
    return object_of(classes(spark).org.apache.spark.sql.classic, "Dataset").ofRows(java_session(spark), plan)


def has_method(java_object: Any, name: str) -> bool:
    """Return whether this version of Spark has a method."""
    return name in dir(java_object)


def is_adaptive(spark: SparkSession) -> bool:
    """Return whether Spark may change a plan while it runs; then it runs jobs to plan shared shuffles."""
    return str(spark.conf.get("spark.sql.adaptive.enabled", "true")).lower() == "true"


def items(sequence: Any) -> list[Any]:
    """Return the items of a Scala sequence."""
    return [sequence.apply(number) for number in range(sequence.size())]


def kind_of(node: Any) -> str:
    """Return the class of a plan node, as `Filter`."""
    return str(node.getClass().getSimpleName())


def kinds_in(plan: Any) -> frozenset[str]:
    """Return the classes of all nodes of a plan."""
    return frozenset({kind_of(plan)}).union(*map(kinds_in, items(plan.children())))


def columns_of(frame: DataFrame) -> dict[int, str]:
    """Return a frame's columns by the number that they have in Spark's plans."""
    return {int(a.exprId().id()): str(a.name()) for a in items(analyzed(frame).output())}


def paths_to(is_it: Callable[[Any], bool], node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return, for each topmost matching node of a plan, the nodes above it, outermost first."""
    if is_it(node):
        return [above]
    return [path for child in items(node.children()) for path in paths_to(is_it, child, (*above, node))]
