"""The operators of the benchmarks by name, each twice: Spark's own on a streaming DataFrame, and ours in a job.

A worker process imports this module; both functions see the same input files, and neither side gets a class of its own except
where the comparison says so (`vectorized`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from benchmarks import processors
from benchmarks.flink import events
from benchmarks.nexmark_queries import QUERIES
from state_runtime import aggregates, windows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_runtime import StreamingJob
    from state_runtime.job import KeyedStream, Stream

__all__ = ["OPERATORS", "our_operator", "peer_operator"]

DELAY = "2 seconds"
REMEMBERED = "5 seconds"
"""How long an event id is remembered; what comes again comes one second later."""
RANGE = ("0 seconds", "2 seconds")

Ours = Callable[["StreamingJob", "DataFrame"], "Stream"]
Peer = Callable[["DataFrame"], "DataFrame"]


def peer_operator(name: str, spark: SparkSession, schema: str, inbox: Path) -> tuple[DataFrame, str]:
    """Spark's operator over the files of a folder, and the output mode that its query needs."""
    if name in QUERIES:
        return QUERIES[name].peer(_read(spark, schema, inbox)), QUERIES[name].mode
    peer, _, output_mode = OPERATORS[name]
    return peer(_read(spark, schema, inbox)), output_mode


def our_operator(name: str, job: StreamingJob, schema: str, inbox: Path) -> Stream:
    """Our operator over the files of a folder; the job has nothing else yet."""
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    assert spark is not None, "the worker starts its session before the job"
    ours = QUERIES[name].ours if name in QUERIES else OPERATORS[name][1]
    frame = _read(spark, schema, inbox)
    return ours(job, events.as_events(frame) if schema == events.SCHEMA else frame)


def _read(spark: SparkSession, schema: str, inbox: Path) -> DataFrame:
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(inbox))


def _peer_rows(processor: Any, schema: str, time_mode: str = "None", delay: str = "") -> Peer:
    def build(frame: DataFrame) -> DataFrame:
        timed = frame.withWatermark("ts", delay) if delay else frame
        return timed.groupBy("key").transformWithState(processor, schema, "Update", time_mode)

    return build


def _our_rows(processor: Any, schema: str, time_mode: str = "none", delay: str = "") -> Ours:
    def build(job: StreamingJob, frame: DataFrame) -> Stream:
        timed = frame.withWatermark("ts", delay) if delay else frame
        keyed = job.read(timed).key_by("key")
        return keyed.transform_with_state(processor, output_schema=schema, uid="totals", time_mode=time_mode)

    return build


def _keyed(build: Callable[[KeyedStream], Stream], delay: str = "") -> Ours:
    def on(job: StreamingJob, frame: DataFrame) -> Stream:
        return build(job.read(frame.withWatermark("ts", delay) if delay else frame).key_by("key"))

    return on


def _peer_pandas(frame: DataFrame) -> DataFrame:
    processor = processors.RunningTotalsInPandas()
    return frame.groupBy("key").transformWithStateInPandas(processor, processors.OUTPUT_SCHEMA, "Update", "None")


def _our_pandas(keyed: KeyedStream) -> Stream:
    processor = processors.RunningTotalsInPandas()
    return keyed.transform_with_state_in_pandas(processor, output_schema=processors.OUTPUT_SCHEMA, uid="totals")


def _peer_aggregate(frame: DataFrame) -> DataFrame:
    return frame.groupBy("key").agg(
        F.count("*").alias("n"),
        F.sum("amount").alias("total"),
        F.min("amount").alias("lowest"),
        F.max("amount").alias("highest"),
        F.avg("amount").alias("mean"),
    )


def _our_aggregate(keyed: KeyedStream) -> Stream:
    return keyed.aggregate(
        uid="totals",
        n=aggregates.count(),
        total=aggregates.sum("amount"),
        lowest=aggregates.min("amount"),
        highest=aggregates.max("amount"),
        mean=aggregates.avg("amount"),
    )


def _peer_sliding(frame: DataFrame) -> DataFrame:
    window = F.window("ts", "10 seconds", "1 second")
    return (
        frame.withWatermark("ts", DELAY)
        .groupBy("key", window)
        .agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    )


def _our_sliding(keyed: KeyedStream) -> Stream:
    window = windows.sliding("10 seconds", "1 second")
    return keyed.window(
        window, uid="windows", output_mode="append", n=aggregates.count(), total=aggregates.sum("amount")
    )


def _sides(frame: DataFrame) -> tuple[DataFrame, DataFrame]:
    return (
        frame.where("side = 0").selectExpr("key", "ts", "amount").withWatermark("ts", DELAY),
        frame.where("side = 1")
        .selectExpr("key AS other_key", "ts AS other_ts", "amount AS other_amount")
        .withWatermark("other_ts", DELAY),
    )


def _peer_join(frame: DataFrame) -> DataFrame:
    left, right = _sides(frame)
    lower, upper = RANGE
    return left.join(
        right,
        F.expr(f"key = other_key AND other_ts >= ts + INTERVAL {lower} AND other_ts <= ts + INTERVAL {upper}"),
    )


def _our_join(job: StreamingJob, frame: DataFrame) -> Stream:
    left, right = _sides(frame)
    lower, upper = RANGE
    keyed = job.read(left).key_by("key")
    return keyed.interval_join(right, right_keys=("other_key",), lower=lower, upper=upper, uid="join")


OPERATORS: Mapping[str, tuple[Peer, Ours, str]] = {
    "row": (
        _peer_rows(processors.RunningTotals(), processors.OUTPUT_SCHEMA),
        _our_rows(processors.RunningTotals(), processors.OUTPUT_SCHEMA),
        "update",
    ),
    "pandas": (_peer_pandas, _keyed(_our_pandas), "update"),
    "vectorized": (
        _peer_pandas,
        _keyed(
            lambda keyed: keyed.process(processors.RunningTotalsVectorized(), processors.OUTPUT_SCHEMA, uid="totals")
        ),
        "update",
    ),
    "list": (
        _peer_rows(processors.Appends(), processors.COUNTED_SCHEMA),
        _our_rows(processors.Appends(), processors.COUNTED_SCHEMA),
        "update",
    ),
    "map": (
        _peer_rows(processors.TotalsByKind(), processors.COUNTED_SCHEMA),
        _our_rows(processors.TotalsByKind(), processors.COUNTED_SCHEMA),
        "update",
    ),
    "timers": (
        _peer_rows(processors.Timeouts(), processors.COUNTED_SCHEMA, "EventTime", DELAY),
        _our_rows(processors.Timeouts(), processors.COUNTED_SCHEMA, "eventTime", DELAY),
        "update",
    ),
    "aggregate": (_peer_aggregate, _keyed(_our_aggregate), "update"),
    "sliding": (_peer_sliding, _keyed(_our_sliding, DELAY), "append"),
    "deduplicate": (
        lambda frame: frame.withWatermark("ts", REMEMBERED).dropDuplicatesWithinWatermark(["key"]),
        _keyed(lambda keyed: keyed.deduplicate(uid="once", within_watermark=True), REMEMBERED),
        "append",
    ),
    "join": (_peer_join, _our_join, "append"),
}
