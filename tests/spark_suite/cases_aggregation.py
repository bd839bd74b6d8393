"""Spark's StreamingAggregationSuite: its inputs, and the rows that it expects."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .stream_test import BROKEN, Add, AllRows, Case, LastBatch, NewRows, Repeat, Start, Stop, Streams, Suite

__all__ = ["AGGREGATION"]

TWO = {"first": "value int", "second": "value int"}


def _counts(streams: Streams) -> DataFrame:
    return streams["input"].groupBy("value").agg(F.count("*"))


def _distinct(streams: Streams) -> DataFrame:
    values = streams["input"].select("*", F.explode("_2").alias("value"))
    return values.groupBy("_1").agg(F.size(F.collect_set("value")))


def _sorted(streams: Streams) -> DataFrame:
    return _counts(streams).toDF("value", "count").orderBy(F.col("count").desc())


def _windows(streams: Streams) -> DataFrame:
    timed = (
        streams["input"].withColumn("eventTime", F.timestamp_seconds("value")).withWatermark("eventTime", "10 seconds")
    )
    counts = timed.groupBy(F.window("eventTime", "5 seconds").alias("window")).agg(F.count("*").alias("count"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "count")


def _with_the_next(streams: Streams) -> DataFrame:
    both = streams["input"].select(F.explode(F.expr("array(value, value + 1)")).alias("value"))
    return both.groupBy("value").agg(F.count("*"))


def _two_keys(streams: Streams) -> DataFrame:
    return streams["input"].groupBy("value", F.col("value") + 1).agg(F.count("*"))


def _united(streams: Streams) -> DataFrame:
    counts = streams["second"].groupBy("value").agg(F.count("*"))
    return streams["first"].select("value", F.col("value") + 1).union(counts)


def _breaking(streams: Streams) -> DataFrame:
    """Fails at 4 as long as the file is there: Spark repeats tasks by itself."""
    broken = str(streams.root / BROKEN)

    def passed(value: int) -> int:
        if value == 4 and Path(broken).exists():
            raise RuntimeError("injected failure")
        return value

    return streams["input"].select(F.udf(passed, "int")("value").alias("value")).groupBy("value").agg(F.count("*"))


def _with_a_batch_aggregate(streams: Streams) -> DataFrame:
    numbers = streams.spark.createDataFrame([(n,) for n in range(1, 6)], "number int")
    parities = numbers.withColumn("parity", F.col("number") % 2).groupBy("parity").agg(F.count("*").alias("joinValue"))
    return streams["input"].join(parities, F.col("value") == F.col("parity"))


def _last(streams: Streams) -> DataFrame:
    return streams["input"].agg(F.last("value"))


def _lists(streams: Streams) -> DataFrame:
    groups = streams["input"].selectExpr("value AS group", "value").groupBy("group")
    return groups.agg(F.collect_list("value").alias("values"))


def _by_last_digit(streams: Streams) -> DataFrame:
    digits = streams["input"].selectExpr("value % 10 AS id", "value").groupBy("id")
    sums = F.sum("value").alias("sum_value"), F.avg("value").alias("avg_value")
    return digits.agg(*sums, F.max("value").alias("max_value"))


def _by_last_digit_with_lists(streams: Streams) -> DataFrame:
    digits = streams["input"].selectExpr("value % 10 AS id", "value").groupBy("id")
    sums = F.sum("value").alias("sum_value"), F.avg("value").alias("avg_value")
    return digits.agg(*sums, F.collect_list("value").alias("values"))


def _counted_at_once(streams: Streams) -> DataFrame:
    return streams["input"].coalesce(1).groupBy().count()


METRICS = "SPARK-35896: metrics in StateOperatorProgress are output correctly"
RECENT = "prune results by current_time or localtimestamp, complete mode"
NO_COALESCE = "SPARK-21977: coalesce(1) with 0 partition RDD should be repartitioned to 1"

AGGREGATION = Suite(
    "StreamingAggregationSuite",
    "LuciferYang/spark@b26b29a832c639d152274b2d3abef9605456f7ca",
    [
        Case("simple count, update mode", _counts, [
            Add({"input": [3]}), LastBatch([(3, 1)]),
            Add({"input": [3, 2]}), LastBatch([(3, 2), (2, 1)]),
            Stop(), Start(),
            Add({"input": [3, 2, 1]}), LastBatch([(3, 3), (2, 2), (1, 1)]),
            Add({"input": [4, 4, 4, 4]}), LastBatch([(4, 4)]),
        ], mode="update", quick=True),
        Case("count distinct", _distinct, [Add({"input": [(1, [1, 2])]}), LastBatch([(1, 2)])],
             mode="update", schemas={"input": "_1 int, _2 array<int>"}),
        Case("simple count, complete mode", _counts, [
            Add({"input": [3]}), LastBatch([(3, 1)]),
            Add({"input": [2]}), LastBatch([(3, 1), (2, 1)]),
            Stop(), Start(),
            Add({"input": [3, 2, 1]}), LastBatch([(3, 2), (2, 2), (1, 1)]),
            Add({"input": [4, 4, 4, 4]}), LastBatch([(4, 4), (3, 2), (2, 2), (1, 1)]),
        ], mode="complete"),
        Case("simple count, append mode", _counts, says=["append", "not supported"]),
        Case("sort after aggregate in complete mode", _sorted, [
            Add({"input": [3]}), LastBatch([(3, 1)]),
            Add({"input": [2, 3]}), LastBatch([(3, 2), (2, 1)]),
            Stop(), Start(),
            Add({"input": [3, 2, 1]}), LastBatch([(3, 3), (2, 2), (1, 1)]),
            Add({"input": [4, 4, 4, 4]}), LastBatch([(4, 4), (3, 3), (2, 2), (1, 1)]),
        ], mode="complete"),
        Case("state metrics - append mode", _windows, [
            Add({"input": [15]}), AllRows(),
            Add({"input": [10, 12, 14]}), AllRows(),
            Add({"input": [25]}), AllRows([(10, 3)]),
        ]),
        Case("state metrics - update/complete mode", _with_the_next, [
            Add({"input": [1]}), LastBatch([(1, 1), (2, 1)]),
            Add({"input": [2, 3]}), LastBatch([(2, 2), (3, 2), (4, 1)]),
        ], mode="update", part="update"),
        Case("state metrics - update/complete mode", _with_the_next, [
            Add({"input": [1]}), LastBatch([(1, 1), (2, 1)]),
            Add({"input": [2, 3]}), LastBatch([(1, 1), (2, 2), (3, 2), (4, 1)]),
        ], mode="complete", part="complete"),
        Case("multiple keys", _two_keys, [
            Add({"input": [1, 2]}), LastBatch([(1, 2, 1), (2, 3, 1)]),
            Add({"input": [1, 2]}), LastBatch([(1, 2, 2), (2, 3, 2)]),
        ], mode="update"),
        Case("SPARK-29438: ensure UNION doesn't lead streaming aggregation to use shifted partition IDs", _united, [
            Add({"first": [11, 12], "second": [21, 22]}, files=2), NewRows([(11, 12), (12, 13), (21, 1), (22, 1)]),
            Stop(), Start(),
            Add({"first": [13, 14], "second": [22, 23]}, files=3), NewRows([(13, 14), (14, 15), (22, 2), (23, 1)]),
        ], mode="update", schemas=TWO),
        Case("midbatch failure", _breaking, [
            Add({"input": [1, 2, 3, 4]}, fails="injected failure"),
            Repeat(), LastBatch([(1, 1), (2, 1), (3, 1), (4, 1)]),
        ], mode="update"),
        Case("SPARK-19690: do not convert batch aggregation in streaming query to streaming", _with_a_batch_aggregate, [
            Add({"input": [0, 1, 2, 3]}), LastBatch([(0, 0, 2), (1, 1, 3)]),
            Add({"input": [0, 1, 2, 3]}), LastBatch([(0, 0, 2), (1, 1, 3)]),
        ]),
        Case(NO_COALESCE, _counted_at_once, [
            Add({"input": [1]}), LastBatch([1]),
            Add({"input": []}), LastBatch([1]),
            Add({"input": [2, 3]}), LastBatch([3]),
            Add({"input": []}), LastBatch([3]),
        ], mode="complete"),
        Case("SPARK-22230: last should change with new batches", _last, [
            Add({"input": [1, 2, 3]}), LastBatch([3]),
            Add({"input": [4, 5, 6]}), LastBatch([6]),
            Add({"input": []}), LastBatch([6]),
            Add({"input": [0]}), LastBatch([0]),
        ], mode="complete"),
        Case("SPARK-23004: Ensure that TypedImperativeAggregate functions do not throw errors", _lists,
             [Add({"input": range(1, 129)}), AllRows([(n, (n,)) for n in range(1, 129)])],
             mode="update", conf={"spark.sql.shuffle.partitions": "1"}),
        Case("changing schema of state when restarting query", _by_last_digit, [
            Add({"input": [1, 11]}), LastBatch([(1, 12, 6.0, 11)]),
            Stop(), Add({"input": [21]}),
            Start(_by_last_digit_with_lists, refused="is new, and max|VALUE_SCHEMA_NOT_COMPATIBLE"),
        ], mode="update", conf={"spark.sql.shuffle.partitions": "1"}),
        Case(METRICS, _counts, [
            Add({"input": [3, 2, 1, 3]}), LastBatch([(3, 2), (2, 1), (1, 1)]),
            Add({"input": [1, 4]}), LastBatch([(1, 2), (4, 1)]),
        ], mode="update", part="update"),
        Case(METRICS, _counts, [
            Add({"input": [3, 2, 1, 3]}), LastBatch([(3, 2), (2, 1), (1, 1)]),
            Add({"input": [1, 4]}), LastBatch([(3, 2), (2, 1), (1, 2), (4, 1)]),
        ], mode="complete", part="complete"),
        Case(METRICS, _windows, [
            Add({"input": [3, 2, 1, 9]}), LastBatch(),
            Add({"input": [25]}), LastBatch([(0, 3), (5, 1)]),
        ], part="append"),
    ],
    {
        RECENT: "a clock that the test moves by hand",
        "prune results by current_date, complete mode": "a clock that the test moves by hand",
        "SPARK-21977: coalesce(1) with aggregation should still be repartitioned when it has non-empty grouping keys":
            "a source and plans of Spark's own",
        "simple count, update mode - recovery from checkpoint uses state format version 1":
            "it goes on from a checkpoint that an older Spark wrote",
        "changing schema of state when restarting query - schema check off": "a setting of Spark's state store",
        "test that avro encoding is not supported": "a setting of Spark's state store",
    },
)  # fmt: skip
