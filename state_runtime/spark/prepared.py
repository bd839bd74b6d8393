"""Frames made in fewer calls of the JVM: the parts that the plans of all epochs share are sent to Spark's JVM once.

pyspark sends every expression again for each frame that uses it, in several calls of the JVM each: the plan of one
aggregate took a hundred calls, and a fifth of the time of an epoch of a thousand rows. Here columns, types and the
constant parts of a Python function are made once for a run; then a step is one call, a function four
(docs/design/0033-floor.md).

These are internals of pyspark and of Spark. `frames_of` tries all of them, without a job; if a version has others, the
public API is used (spark/frames.py), with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.functions import expr

from state_runtime.spark.frames import OBSERVED, Frames, Planned, PublicFrames, Seen, StageFunction
from state_runtime.spark.internals import INTERNALS, Internal, private, private_of
from state_runtime.spark.jvm import (
    analyzed,
    classes,
    constructor_of,
    execution_of,
    is_adaptive,
    items,
    java_frame,
    java_session,
    kind_of,
    object_of,
)
from state_runtime.spark.rebound import ReboundPlan, ReboundPlans, function_name
from state_runtime.spark.sql import quoted

__all__ = ["PreparedFrames", "frames_of", "try_again"]

_PARTITION = "__stillstate_partition"
_COLUMNS_MAX = 1000
"""Kept expressions. Some have a number that moves on; a plan has far fewer."""
_FUNCTION_BYTES_MAX = 1 << 20
"""A larger function is sent as a separate broadcast, which pyspark makes."""


class PreparedFrames:
    """See `Frames`; constant parts are sent to the JVM once."""

    def __init__(self, spark: SparkSession) -> None:
        self._columns: dict[tuple[str, ...], Any] = {}
        self._python = _PythonFunctions(spark)
        self._functions: dict[tuple[tuple[str, ...], str], _ArrowFunctions] = {}
        self._kept: dict[str, DataFrame] = {}
        self._own_plans = _OwnPlans(spark)
        self._rebound = ReboundPlans()
        self._public = PublicFrames()

    def select(self, frame: DataFrame, sql: tuple[str, ...]) -> DataFrame:
        return _like(frame, java_frame(frame).select(self._made(frame, sql)))

    def numbered(self, frame: DataFrame, partitions: int, number: str) -> DataFrame:
        only = self._made(frame, (number,)).apply(0)
        return _like(frame, java_frame(frame).repartitionById(partitions, only))

    def observe(self, frame: DataFrame, sql: tuple[str, ...], name: str = OBSERVED) -> tuple[DataFrame, Seen]:
        first, rest = self._made(frame, sql[:1]).apply(0), self._made(frame, sql[1:])
        watched = _like(frame, java_frame(frame).observe(name, first, rest))
        return watched, partial(_observed, name)

    def map_in_arrow(
        self, frame: DataFrame, function: StageFunction, columns: tuple[str, ...], stage: int
    ) -> DataFrame:
        output = function[1]
        known = (columns, output.json())
        functions = self._functions.get(known)
        if functions is None:
            reads = self._made(frame, tuple(map(quoted, columns)))
            functions = self._functions[known] = _ArrowFunctions.of(frame.sparkSession, reads, output)
        made = self._python.made(function)
        if made is None:
            return self._public.map_in_arrow(frame, function, columns, stage)
        column = functions.column(function_name(stage), made)
        return _like(frame, java_frame(frame).mapInArrow(column, False, None))

    def aggregate(
        self, frame: DataFrame, beside: str, by: tuple[str, ...], made: tuple[str, ...], kept: tuple[str, ...]
    ) -> DataFrame:
        own = self._own_plans.of(frame, frame.columns.index(beside))
        grouped = own.groupBy(self._made(frame, (quoted(beside), *by)))
        first, rest = self._made(frame, made[:1]).apply(0), self._made(frame, made[1:])
        return _like(frame, grouped.agg(first, rest).select(self._made(frame, kept)))

    def kept(self, name: str, make: Callable[[], DataFrame]) -> DataFrame:
        frame = self._kept.get(name)
        if frame is None:
            frame = self._kept[name] = make()
        return frame

    def shared(self, frame: DataFrame) -> tuple[tuple[DataFrame, ...], DataFrame]:
        if is_adaptive(frame.sparkSession):
            # Spark would run the exchange to plan it.
            return self._public.shared(frame)
        partitions = max(1, int(execution_of(frame).toRdd().getNumPartitions()))  # 0 if Spark knows of no row
        numbered = self.select(frame, ("*", f"spark_partition_id() AS {_PARTITION}"))
        exchanged = self.numbered(numbered, partitions, _PARTITION)
        rows = _like(frame, self._own_plans.of(exchanged))
        return (exchanged,), self.select(rows, tuple(map(quoted, frame.columns)))

    def partitions(self, batch: DataFrame) -> int:
        given = analyzed(batch)
        # Of other batches no plan is kept (spark/rebound.py); to ask for their rows would be to plan them.
        return int(given.rdd().getNumPartitions()) if kind_of(given) == "LogicalRDD" else 0

    def run(self, frames: Sequence[DataFrame]) -> None:
        first, *others = (execution_of(frame).toRdd() for frame in frames)
        try:
            reduce(lambda rows, more: rows.union(more), others, first).count()
        finally:
            self._public.release()

    def again(self, shape: Hashable, batch: DataFrame, functions: Sequence[StageFunction]) -> Planned | None:
        if not self._rebound.knows(shape):
            return None
        made = [self._python.made(function) for function in functions]
        plan = self._rebound.again(shape, batch, made) if None not in made else None
        return None if plan is None else _Again(plan)

    def learns(self, shape: Hashable) -> bool:
        return self._rebound.learns(shape)

    def learn(self, shape: Hashable, batch: DataFrame, frames: Sequence[DataFrame]) -> None:
        self._rebound.learn(shape, batch, frames)

    def _made(self, frame: DataFrame, sql: tuple[str, ...]) -> Any:
        """Return a sequence of the JVM's columns. They are names and expressions that belong to no frame yet."""
        columns = self._columns.get(sql)
        if columns is None:
            if len(self._columns) >= _COLUMNS_MAX:
                self._columns.clear()
            columns = self._columns[sql] = private(frame, "_jcols")(*map(expr, sql))
        return columns


@dataclass(frozen=True)
class _Again:
    plan: ReboundPlan

    def run(self) -> None:
        self.plan.run()

    def seen(self, name: str = OBSERVED) -> Sequence[Any]:
        return self.plan.observed(name)


@dataclass(frozen=True)
class _ArrowFunctions:
    """The parts of a `mapInArrow` that stay while its function changes, as objects of the JVM."""

    columns: Any
    output_type: Any
    make_udf: Callable[..., Any]
    kind: Any
    nothing: Any

    @staticmethod
    def of(spark: SparkSession, columns: Any, output: T.StructType) -> _ArrowFunctions:
        jvm = classes(spark)
        return _ArrowFunctions(
            columns=columns,
            output_type=java_session(spark).parseDataType(output.json()),
            make_udf=constructor_of(jvm.org.apache.spark.sql.execution.python.UserDefinedPythonFunction),
            kind=private_of("pyspark.util", "PythonEvalType").SQL_MAP_ARROW_ITER_UDF,
            nothing=jvm.java.util.ArrayList(),
        )

    def column(self, name: str, function: Any) -> Any:
        """Return the argument of the JVM's `mapInArrow`."""
        # The last two, of 4.3: default and named arguments.
        udf = self.make_udf(name, function, self.output_type, self.kind, True, self.nothing, self.nothing)
        return udf.apply(self.columns)


class _PythonFunctions:
    """Functions in the JVM's form."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = classes(spark)
        self._context: Any = spark.sparkContext
        self._pickler = private_of("pyspark.serializers", "CloudPickleSerializer")()
        self._class = jvm.SimplePythonFunction
        self._nothing = jvm.java.util.ArrayList()
        self._environment: tuple[Any, ...] = ()
        self._environment_of: object = None

    def made(self, function: StageFunction) -> Any | None:
        """Return the function; None if it is too large for this way."""
        context = self._context
        registry = private(context, "_pickled_broadcast_vars")
        pickled = self._pickler.dumps(function)
        broadcasts = [private(broadcast, "_jbroadcast") for broadcast in registry]
        registry.clear()
        if len(pickled) > _FUNCTION_BYTES_MAX:
            return None
        return self._class(
            bytearray(pickled),
            *self._environments(),
            context.pythonExec,
            context.pythonVer,
            broadcasts or self._nothing,
            private(context, "_javaAccumulator"),
        )

    def _environments(self) -> tuple[Any, ...]:
        """Return variables and files of Python workers, which a user may add to."""
        context = self._context
        variables, files = dict(context.environment), list(private(context, "_python_includes"))
        if self._environment_of != (variables, files):
            java = private(context, "_jvm").java.util
            self._environment, self._environment_of = (java.HashMap(), java.ArrayList()), (variables, files)
            for name, value in variables.items():
                self._environment[0].put(name, value)
            for path in files:
                self._environment[1].add(path)
        return self._environment


class _OwnPlans:
    """Frames over the rows of another plan.

    All frames over them read one RDD. If a shuffle is on its top, a Spark job runs that shuffle, and all that is below
    it, once. Spark can be told that the tasks are partitioned by one column. Then it puts no shuffle before an
    aggregate by that column and others, and none between its two halves: each task aggregates its own rows. The column
    has a single value, so the claimed partitioning says nothing false about rows.
    """

    def __init__(self, spark: SparkSession) -> None:
        jvm = classes(spark)
        self._sequence = jvm.PythonUtils.toSeq
        self._array = jvm.java.util.ArrayList
        self._partitionings = jvm.org.apache.spark.sql.catalyst.plans.physical
        self._relation = constructor_of(jvm.org.apache.spark.sql.execution.LogicalRDD)
        self._frames = object_of(jvm.org.apache.spark.sql.classic, "Dataset")
        self._none = object_of(jvm.scala, "None")
        self._nothing = self._sequence(self._array())

    def of(self, frame: DataFrame, clustered_by: int | None = None) -> Any:
        """Return the rows of a frame, as a frame of the JVM.

        Args:
            clustered_by: index of the column; None to claim no partitioning.
        """
        session, execution = java_session(frame.sparkSession), execution_of(frame)
        rows, output = execution.toRdd(), execution.analyzed().output()
        if clustered_by is None:
            partitioning = self._partitionings.UnknownPartitioning(rows.getNumPartitions())
        else:
            column = self._array()
            column.add(output.apply(clustered_by))
            partitioning = self._partitionings.HashPartitioning(self._sequence(column), rows.getNumPartitions())
        # output, rdd, partitioning, ordering, streaming, source, session, statistics, constraints, shared ids
        none, nothing = self._none, self._nothing
        plan = self._relation(output, rows, partitioning, nothing, False, none, session, none, none, False)
        return self._frames.ofRows(session, plan)


def frames_of(spark: SparkSession) -> Frames:
    """Return the `Frames` of this session: prepared, if its version of Spark has everything that they use."""
    if not INTERNALS.is_refused(Internal.PREPARED_FRAMES):
        try:
            prepared = PreparedFrames(spark)
            if INTERNALS.begin_probe(Internal.PREPARED_FRAMES):
                _try(spark, prepared)
            return prepared
        except (AttributeError, TypeError, ValueError, ImportError, Py4JError, PySparkException) as error:
            INTERNALS.refuse(Internal.PREPARED_FRAMES, error)
    return PublicFrames()


def _try(spark: SparkSession, frames: PreparedFrames) -> None:
    """Plan every kind of step that an epoch has; no job runs."""
    frame, seen = frames.observe(frames.select(spark.range(0, 1, 1, 1), ("id", "CAST(0 AS INT) AS n")), ("max(id)",))
    output = T.StructType([T.StructField("id", T.LongType())])
    grouped = frames.aggregate(frame, "n", ("id",), ("count(1) AS rows",), ("id", "CAST(0 AS INT) AS n"))
    made = frames.map_in_arrow(frames.numbered(grouped, 1, "n"), (_nothing, output), ("id", "n"), 0)
    rows = execution_of(made).toRdd()
    if int(rows.getNumPartitions()) != 1:
        raise ValueError("rows are not where their number says")
    if not is_adaptive(spark):
        exchanged, read = frames.shared(made)
        execution_of(read).toRdd().union(execution_of(exchanged[0]).toRdd())
    seen(frame)


def try_again(spark: SparkSession, frames: PreparedFrames) -> None:
    """Plan an epoch from the plan of an earlier one; no job runs. `spark/rebound.py` refuses missing internals; a plan
    that cannot be used for another epoch is no refusal."""
    function = (_nothing, T.StructType([T.StructField("id", T.LongType())]))
    batch, shape = spark.createDataFrame([], "id long"), "a probe"
    made = frames.map_in_arrow(frames.numbered(batch, 1, "0"), function, ("id",), 0)
    frames.learns(shape)
    frames.learn(shape, batch, (made,))
    frames.again(shape, batch, (function,))


def _nothing(batches: Any) -> Any:
    return iter(())


def _observed(name: str, frame: DataFrame) -> Sequence[Any]:
    """Return the values that the plan of a frame observed, even if Spark notified no listener."""
    found = execution_of(frame).observedMetrics().get(name)
    return items(found.get().toSeq()) if found.isDefined() else ()


def _like(frame: DataFrame, jdf: Any) -> DataFrame:
    return DataFrame(jdf, frame.sparkSession)
