"""Spark's EventTimeWatermarkSuite: its inputs, the rows and the watermarks that it expects."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .stream_test import (
    Add,
    AllRows,
    Case,
    Clear,
    LastBatch,
    NewRows,
    Query,
    Start,
    Step,
    Stop,
    Streams,
    Suite,
    Watermark,
)

__all__ = ["EVENT_TIME"]

TWO = {"first": "value int", "second": "value int"}
NOW_S = 1_700_000_000
MONTH_S = 31 * 86_400
"""Spark's month of a delay."""


def _timed(streams: Streams, name: str = "input", delay: str = "10 seconds") -> DataFrame:
    return streams[name].withColumn("eventTime", F.timestamp_seconds("value")).withWatermark("eventTime", delay)


def _windows(delay: str = "10 seconds") -> Query:
    def query(streams: Streams) -> DataFrame:
        windows = _timed(streams, delay=delay).groupBy(F.window("eventTime", "5 seconds").alias("window"))
        counts = windows.agg(F.count("*").alias("count"))
        return counts.select(F.col("window.start").cast("long").alias("start"), "count")

    return query


def _windows_without_watermark(streams: Streams) -> DataFrame:
    timed = streams["input"].withColumn("eventTime", F.timestamp_seconds("value"))
    counts = timed.groupBy(F.window("eventTime", "5 seconds").alias("window")).agg(F.count("*").alias("count"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "count")


def _windows_by_another_name(streams: Streams) -> DataFrame:
    windows = _timed(streams).select(F.window("eventTime", "5 seconds").alias("aliasWindow")).groupBy("aliasWindow")
    counts = windows.agg(F.count("*").alias("count"))
    return counts.select(F.col("aliasWindow.start").cast("long").alias("start"), "count")


def _moments(streams: Streams) -> DataFrame:
    counts = _timed(streams).groupBy("eventTime").agg(F.count("*").alias("count"))
    return counts.select(F.col("eventTime").cast("long"), "count")


def _sum_of_two(streams: Streams) -> DataFrame:
    first, second = (
        _timed(streams, name, delay).select("value")
        for name, delay in (("first", "10 seconds"), ("second", "5 seconds"))
    )
    return first.union(second).agg(F.sum("value"))


def _two_watermarks(streams: Streams) -> DataFrame:
    first, second = (
        _timed(streams, name, delay) for name, delay in (("first", "10 seconds"), ("second", "15 seconds"))
    )
    return first.union(second).select(F.col("eventTime").cast("int"))


def _watermark_twice(streams: Streams) -> DataFrame:
    timed = (
        streams["input"].withColumn("first", F.timestamp_seconds("_1")).withColumn("second", F.timestamp_seconds("_2"))
    )
    again = timed.withWatermark("first", "1 minute").select("*").withWatermark("second", "2 minutes")
    return again.groupBy(F.window("second", "1 minute")).count()


def _two_event_times(streams: Streams) -> DataFrame:
    first = streams["first"].selectExpr("_1 AS id1", "timestamp_seconds(_2) AS ts1").withWatermark("ts1", "1 minute")
    second = streams["second"].selectExpr("_1 AS id2", "timestamp_seconds(_2) AS ts2").withWatermark("ts2", "2 minutes")
    joined = first.join(second, F.expr("id1 = id2 AND ts1 = ts2 + INTERVAL 10 SECONDS")).selectExpr("id1", "ts1", "ts2")
    return joined.dropDuplicates().selectExpr("id1", "CAST(ts1 AS LONG) AS ts1", "CAST(ts2 AS LONG) AS ts2")


def _symbols(streams: Streams) -> DataFrame:
    groups = streams["input"].withWatermark("eventTime", "2 seconds").groupBy("symbol", "eventTime")
    return groups.agg(F.count("price").alias("count")).select("symbol", "eventTime", "count")


def _watermark(name: str, seconds: float) -> list[Step]:
    """`checkWatermark`: the watermark under which one more row, of the first second, is read."""
    return [Add({name: [1]}), Watermark(seconds)]


def _dummy(seconds: float, **rows: list[int]) -> list[Step]:
    """`getWatermarkAfterData`: the watermark under which a row that means nothing is read behind others."""
    return [Add(rows), Add({"first": [0]}), Watermark(seconds)]


METRICS = "event time and watermark metrics"
ONCE = "event time and watermark metrics with Trigger.Once (SPARK-24699)"
NO_DATA = [Add({"input": range(10, 16)}), NewRows(), Add({"input": [25]})]
STATS = "it looks into a class of Spark's"
OF_SPARK = "it asserts an error of `withWatermark` itself, before there is a query"
CHECKPOINT = "it goes on from a checkpoint that an older Spark wrote"
COMPATIBLE = "a setting that brings rules of Spark 3.3 back"

EVENT_TIME = Suite(
    "EventTimeWatermarkSuite",
    "LuciferYang/spark@99206aedbf78259d8c91b0abab642ab2b4d27b54",
    [
        Case(METRICS, _windows_without_watermark, [
            Add({"input": [15]}), LastBatch([(15, 1)]),
            Add({"input": [10, 12, 14]}), LastBatch([(10, 3), (15, 1)]),
        ], mode="complete", part="without watermark"),
        Case(METRICS, _windows(), [
            Add({"input": [15]}), AllRows(), Watermark(0),
            Add({"input": [10, 12, 14]}), AllRows(), Watermark(5),
            Add({"input": [25]}), AllRows([(10, 3)]), Watermark(5),
        ], part="with watermark"),
        Case(ONCE, _windows(), [
            Add({"input": [15]}), NewRows(), Watermark(0), Stop(), Start(),
            Add({"input": [10, 12, 14]}), NewRows(), Watermark(5), Stop(), Start(),
            Add({"input": [25]}), NewRows(), Watermark(5), Stop(), Start(),
            Add({"input": [50]}), NewRows([(10, 3)]), Watermark(15), Stop(), Start(),
            Add({"input": [50]}), NewRows([(15, 1), (25, 1)]), Watermark(40),
        ], no_data_batches=False),
        Case("append mode", _windows(), [
            Add({"input": range(10, 16)}), NewRows(),
            Add({"input": [25]}), NewRows([(10, 5)]),
            Add({"input": [10]}), NewRows(),
        ], quick=True),
        Case("update mode", _windows(), [
            Add({"input": range(10, 16)}), NewRows([(10, 5), (15, 1)]),
            Add({"input": [25]}), NewRows([(25, 1)]),
            Add({"input": [10, 25]}), NewRows([(25, 2)]),
            Add({"input": [10]}), NewRows(),
        ], mode="update", quick=True, conf={"spark.sql.shuffle.partitions": "10"}),
        Case("delay in months and years handled correctly", _windows("2 years 5 months"), [
            Add({"input": [NOW_S]}), AllRows(),
            Add({"input": [NOW_S]}), AllRows(), Watermark(NOW_S - 29 * MONTH_S),
        ], schemas={"input": "value long"}),
        Case("recovery", _windows(), [
            Add({"input": range(10, 16)}), AllRows(),
            Add({"input": [25]}), AllRows([(10, 5)]),
            Stop(), Clear(), Start(),
            Add({"input": [10, 27, 30]}), AllRows([(15, 1)]),
            Stop(), Start(),
            Add({"input": [17]}), AllRows([(15, 1)]),
            Add({"input": [40]}), NewRows([(25, 2)]),
        ]),
        Case("watermark with 2 streams", _sum_of_two, [
            *_dummy(0, first=[11]), *_dummy(1, second=[6]), *_dummy(1, second=[8]), *_dummy(3, first=[21]),
            *_dummy(11, second=[17, 28, 39]), *_dummy(21, first=[31]), *_dummy(31, first=[41]), *_dummy(34, first=[51]),
            *_dummy(90, first=[100], second=[100]), *_dummy(105, first=[120], second=[110]),
            *_dummy(120, first=[130], second=[125]), *_dummy(120, first=[100], second=[100]),
            *_dummy(120, first=[140], second=[100]), *_dummy(130, first=[100], second=[135]),
            *_dummy(185, first=[200], second=[190]),
            Stop(), Start(), Add({"first": [0]}), Watermark(185),
            Add({"second": [200]}), Add({"first": [0]}), Watermark(185, ours=190), *_dummy(190, first=[200]),
        ], mode="complete", schemas=TWO),
        Case("complete mode", _windows(), [
            Add({"input": [10, 11, 12]}), LastBatch([(10, 3)]),
            Add({"input": [25]}), LastBatch([(10, 3), (25, 1)]),
            Add({"input": [25]}), LastBatch([(10, 3), (25, 2)]),
            Add({"input": [10]}), LastBatch([(10, 4), (25, 2)]),
            Add({"input": [25]}), LastBatch([(10, 4), (25, 3)]),
        ], mode="complete"),
        Case("group by on raw timestamp", _moments, [
            Add({"input": [10]}), AllRows(),
            Add({"input": [25]}), AllRows([(10, 1)]),
        ]),
        Case("overriding watermark should not be allowed by default", _watermark_twice, [Add({"input": [(100, 200)]})],
             schemas={"input": "_1 long, _2 long"}, says=["Redefining watermark is disallowed"]),
        Case("multiple event time columns in an input DataFrame for stateful operator is not allowed", _two_event_times,
             [Add({"first": [("A", 200), ("B", 300)], "second": [("A", 190), ("C", 350)]})],
             schemas={"first": "_1 string, _2 long", "second": "_1 string, _2 long"},
             says=["More than one event time columns are available."],
             says_here=["gets several columns with event time"]),
        Case("SPARK-21565: watermark operator accepts attributes from replacement", _symbols,
             [Add({"input": [("a", 100, "1970-01-01 00:00:00.1")]}), AllRows()],
             schemas={"input": "symbol string, price int, eventTime timestamp"}),
        Case("SPARK-27340 Alias on TimeWindow expression cause watermark metadata lost", _windows_by_another_name, [
            Add({"input": range(10, 16)}), NewRows(),
            Add({"input": [25]}), NewRows([(10, 5)]),
            Add({"input": [10]}), NewRows(),
        ]),
        Case("test no-data flag", _windows(), [*NO_DATA, NewRows([(10, 5)])], part="with"),
        Case("test no-data flag", _windows(), [*NO_DATA, NewRows()], part="without", no_data_batches=False),
        Case("MultipleWatermarkPolicy: max", _two_watermarks, [
            Add({"first": [20], "second": [30]}), LastBatch([20, 30]), *_watermark("first", 15),
            Stop(), Start(), *_watermark("first", 15),
            Add({"first": [120], "second": [130]}), LastBatch([120, 130]), *_watermark("first", 115),
            Add({"first": [150]}), LastBatch([150]), *_watermark("first", 140),
        ], schemas=TWO, conf={"spark.sql.streaming.multipleWatermarkPolicy": "max"}),
        Case("MultipleWatermarkPolicy: min", _two_watermarks, [
            Add({"first": [20], "second": [30]}), LastBatch([20, 30]), *_watermark("first", 10),
            Stop(), Start(), *_watermark("first", 10),
            Add({"first": [120], "second": [130]}), LastBatch([120, 130]), *_watermark("second", 110),
            Add({"second": [150]}), LastBatch([150]), *_watermark("second", 110),
        ], schemas=TWO),
    ],
    {
        "EventTimeStats": STATS,
        "EventTimeStats: avg on large values": STATS,
        "EventTimeStats: zero merge zero": STATS,
        "EventTimeStats: non-zero merge zero": STATS,
        "EventTimeStats: zero merge non-zero": STATS,
        "error on bad column": OF_SPARK,
        "error on wrong type": OF_SPARK,
        "delay threshold should not be negative.": OF_SPARK,
        "SPARK-35815: Support ANSI intervals for delay threshold": "it looks at a plan, before there is a query",
        "recovery from Spark ver 2.3.1 commit log without commit metadata (SPARK-24699)": CHECKPOINT,
        "MultipleWatermarkPolicy: recovery from Spark ver 2.3.1 checkpoints ensures min policy": CHECKPOINT,
        "overriding watermark should not fail in compatibility mode": COMPATIBLE,
        "stateful operator should pick the first occurrence of event time column if there is multiple event time "
        "columns in compatibility mode": COMPATIBLE,
        "EventTime watermark should be ignored in batch query.": "a batch query",
        "MultipleWatermarkPolicy: recovery from checkpoints ignores session conf":
            "the policy is asked at each start here; Spark keeps that of the first start",
        "MultipleWatermarkPolicy: fail on incorrect conf values": "it asserts an error of Spark's settings",
    },
)  # fmt: skip
