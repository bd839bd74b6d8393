"""What of Spark only its JVM has, behind attributes that pyspark calls its own: plans, jobs, the local file system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "analyzed",
    "batch_execution",
    "classes",
    "columns_of",
    "end_java",
    "fits_pattern",
    "has_python",
    "has_subqueries",
    "items",
    "java_of_process",
    "jobs_so_far",
    "kind_of",
    "kinds_in",
    "optimized",
    "paths_to",
    "use_java",
    "without",
    "write_no_checksums",
    "written",
]

_QUERY_ID: Final = "sql.streaming.queryId"


def classes(spark: SparkSession) -> Any:
    """The classes of the driver's Java, by their names as attributes."""
    return spark.sparkContext._jvm


def written(frame: DataFrame) -> Any:
    """A frame's plan as it was written."""
    return frame._jdf.queryExecution().logical()


def fits_pattern(spark: SparkSession, pattern: str) -> tuple[bool, bool]:
    """Whether any file or folder fits a pattern of Hadoop's, and whether one is called exactly so.

    Raises:
        Py4JJavaError: the file system does not answer, or the pattern is malformed.
    """
    path = classes(spark).org.apache.hadoop.fs.Path(pattern)
    files = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    return bool(files.globStatus(path)), bool(files.exists(path))


def analyzed(frame: DataFrame) -> Any:
    """A frame's plan with all names resolved."""
    return frame._jdf.queryExecution().analyzed()


def optimized(frame: DataFrame) -> Any:
    """A frame's plan as Spark's optimizer leaves it.

    Raises:
        Py4JJavaError: the optimizer computed a constant, and that failed.
    """
    return frame._jdf.queryExecution().optimizedPlan()


def batch_execution(frame: DataFrame) -> Any:
    """How Spark executes the batch that it has handed to `foreachBatch` in this thread: its plans.

    Args:
        frame: the batch.
    """
    query_id = classes(frame.sparkSession).java.util.UUID.fromString(
        frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    )
    return frame._jdf.sparkSession().sharedState().activeStreamingQueries().get(query_id).lastExecution()


def jobs_so_far(spark: SparkSession) -> int:
    """How many jobs Spark has started."""
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def write_no_checksums(context: SparkContext) -> None:
    """Local files of the driver's JVM get no `.crc` file beside them: two writes instead of one, for scratch.

    Said to the file system that Hadoop hands to everybody. Another class of file system would do the same, and break
    what wants this one: Spark's own stateful operators do.
    """
    jvm: Any = context._jvm
    jvm.org.apache.hadoop.fs.FileSystem.getLocal(context._jsc.hadoopConfiguration()).setWriteChecksum(False)


def java_of_process() -> Any:
    """PySpark's connection to the Java process that sessions of this process use; None before the first."""
    return SparkContext._gateway


def use_java(gateway: Any) -> bool:
    """Let sessions of this process use a Java process, unless they have one; says whether it is this one."""
    SparkContext._ensure_initialized(gateway=gateway)
    return SparkContext._gateway is gateway


def end_java(spark: SparkSession, wait_s: float = 300.0) -> None:
    """Stop a session and Spark's Java process, and wait until that has ended: it may have something to write.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then.
    """
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # what Java waits for
    gateway.proc.wait(wait_s)


def items(sequence: Any) -> list[Any]:
    """A Scala sequence's."""
    return [sequence.apply(number) for number in range(sequence.size())]


def kind_of(node: Any) -> str:
    """The class of a node of a plan, as `Filter`."""
    return str(node.getClass().getSimpleName())


def kinds_in(plan: Any) -> frozenset[str]:
    """The classes of all nodes of a plan."""
    return frozenset({kind_of(plan)}).union(*map(kinds_in, items(plan.children())))


def without(frame: DataFrame, kind: str) -> DataFrame:
    """A frame without the nodes of one class of its plan, each of which hands on its input."""
    jvm = classes(frame.sparkSession)

    def remade(node: Any) -> Any:
        children = [remade(child) for child in items(node.children())]
        if kind_of(node) == kind:
            return children[0]
        return node.withNewChildren(jvm.PythonUtils.toSeq(children)) if children else node

    datasets = getattr(jvm.org.apache.spark.sql.classic, "Dataset$").__getattr__("MODULE$")
    made = datasets.ofRows(frame.sparkSession._jsparkSession, remade(analyzed(frame)))
    return DataFrame(made, frame.sparkSession)


def columns_of(frame: DataFrame) -> dict[int, str]:
    """A frame's columns by the number that Spark's plans know them by."""
    return {int(a.exprId().id()): str(a.name()) for a in items(analyzed(frame).output())}


def has_subqueries(frame: DataFrame) -> bool:
    """Whether an expression of a frame's plan has a plan of its own."""
    return _has(frame, "PLAN_EXPRESSION")


def has_python(frame: DataFrame) -> bool:
    """Whether a frame's plan hands rows to Python: a UDF, or a function of Arrow batches or pandas frames."""
    return _has(frame, "PYTHON_UDF")


def _has(frame: DataFrame, pattern: str) -> bool:
    patterns = classes(frame.sparkSession).org.apache.spark.sql.catalyst.trees.TreePattern
    return bool(analyzed(frame).containsPattern(getattr(patterns, pattern)()))


def paths_to(is_it: Callable[[Any], bool], node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of each topmost node of a plan that is sought the nodes above it, outermost first."""
    if is_it(node):
        return [above]
    return [path for child in items(node.children()) for path in paths_to(is_it, child, (*above, node))]
