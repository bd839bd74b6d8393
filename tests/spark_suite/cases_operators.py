"""Spark's MultiStatefulOperatorsSuite: its inputs, and the rows that it expects."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .stream_test import Add, AllRows, Case, NewRows, Query, Streams, Suite

__all__ = ["OPERATORS"]

TWO = {"first": "value int", "second": "value int"}
TWO_LONGS = {"first": "value long", "second": "value long"}
TWO_DATED = {"first": "id string, timestamp timestamp", "second": "id string, timestamp timestamp"}


def _timed(streams: Streams, name: str = "input", delay: str = "0 seconds") -> DataFrame:
    return streams[name].withColumn("eventTime", F.timestamp_seconds("value")).withWatermark("eventTime", delay)


def _counts(frame: DataFrame, time: str = "eventTime") -> DataFrame:
    return frame.groupBy(F.window(time, "5 seconds").alias("window")).agg(F.count("*").alias("count"))


def _windows_of_windows(streams: Streams) -> DataFrame:
    wider = _counts(_timed(streams)).groupBy(F.window("window", "10 seconds"))
    counts = wider.agg(F.count("*").alias("count"), F.sum("count").alias("sum"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "count", "sum")


def _three_times_windows(streams: Streams) -> DataFrame:
    ten = _counts(_timed(streams)).groupBy(F.window(F.window_time("window"), "10 seconds"))
    sums = ten.agg(F.count("*").alias("count"), F.sum("count").alias("sum"))
    twenty = sums.groupBy(F.window(F.window_time("window"), "20 seconds"))
    again = twenty.agg(F.count("*").alias("count"), F.sum("sum").alias("sum"))
    return again.selectExpr("CAST(window.start AS LONG) AS s", "CAST(window.end AS LONG) AS e", "count", "sum")


def _once_then_windows(streams: Streams) -> DataFrame:
    once = _timed(streams, delay="10 seconds").dropDuplicates(["value", "eventTime"])
    windows = once.groupBy(F.window("eventTime", "5 seconds").alias("window"))
    counts = windows.agg(F.count("*").alias("count"), F.sum("value").alias("sum"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "count")


def _side(streams: Streams, name: str, number: int) -> DataFrame:
    named = streams[name].withColumnRenamed("value", f"value{number}")
    timed = named.withColumn(f"eventTime{number}", F.timestamp_seconds(f"value{number}"))
    return timed.withWatermark(f"eventTime{number}", "0 seconds")


def _joined_then_windows(streams: Streams) -> DataFrame:
    joined = _side(streams, "first", 1).join(_side(streams, "second", 2), F.expr("eventTime1 = eventTime2"), "inner")
    return _counts(joined, "eventTime1").select(F.col("window.start").cast("long").alias("start"), "count")


def _windows_then_once(streams: Streams) -> DataFrame:
    windows = _counts(_timed(streams)).withColumn("windowEnd", F.expr("window.end"))
    return windows.dropDuplicates(["count", "windowEnd"]).select(F.col("windowEnd").cast("long"), "count")


def _windows_then_once_by_time(streams: Streams) -> DataFrame:
    windows = _counts(_timed(streams)).withColumn("windowEnd", F.expr("window.end"))
    timed = windows.withColumn("windowTime", F.expr("window_time(window)"))
    micros = timed.withColumn("windowTimeMicros", F.expr("unix_micros(windowTime)"))
    once = micros.dropDuplicates(["count", "windowEnd", "windowTime"])
    return once.select(F.col("windowEnd").cast("long"), "windowTimeMicros", "count")


def _range_of_other_times(streams: Streams) -> DataFrame:
    first = streams["first"].withColumnRenamed("value", "value1")
    first = first.withColumn("eventTime1", F.timestamp_seconds("value1")).withColumn(
        "v1", F.timestamp_seconds("value1")
    )
    second = streams["second"].withColumn("eventTime2Start", F.timestamp_seconds("start"))
    second = second.withColumn("start2", F.timestamp_seconds("start")).withColumn("end2", F.timestamp_seconds("end"))
    near = F.expr("v1 >= start2 AND v1 < end2 AND eventTime1 = start2")
    joined = first.withWatermark("eventTime1", "0 seconds").join(
        second.withWatermark("eventTime2Start", "0 seconds"), near, "inner"
    )
    return _counts(joined, "eventTime1").select(F.col("window.start").cast("long").alias("start"), "count")


def _outer_then_windows(how: str, time: str) -> Query:
    def query(streams: Streams) -> DataFrame:
        first, second = (
            streams[name].toDF(f"id{number}", f"timestamp{number}").withWatermark(f"timestamp{number}", "0 seconds").alias(f"s{number}")
            for number, name in ((1, "first"), (2, "second"))
        )  # fmt: skip
        near = F.expr(
            "s1.id1 = s2.id2 AND (s1.timestamp1 BETWEEN s2.timestamp2 - INTERVAL 1 hour AND s2.timestamp2 + INTERVAL 1 hour)"
        )
        windows = first.join(second, near, how).groupBy(F.window(time, "10 minutes")).agg(F.count("*").alias("cnt"))
        return windows.selectExpr("CAST(window.start AS STRING) AS s", "CAST(window.end AS STRING) AS e", "cnt")

    return query


def _windows_joined(streams: Streams) -> DataFrame:
    first, second = (
        _timed(streams, name, "5 seconds").groupBy(F.window("eventTime", "10 seconds")).agg(F.sum("value").alias(f"sum_{name}"))
        for name in ("first", "second")
    )  # fmt: skip
    joined = first.join(second, "window", "inner")
    return joined.selectExpr("CAST(window.end AS LONG) AS window_end", "sum_first", "sum_second")


OPERATORS = Suite(
    "MultiStatefulOperatorsSuite",
    "LuciferYang/spark@1a3051b418c32fb3f8abbefc61a681382574fd9f",
    [
        Case("window agg -> window agg, append mode", _windows_of_windows, [
            Add({"input": range(10, 22)}), NewRows([(10, 2, 10)]),
            Add({"input": range(10, 30)}), NewRows(),
            Add({"input": [30, 31]}), NewRows([(20, 2, 12)]),
        ], quick=True),
        Case("agg -> agg -> agg, append mode", _three_times_windows, [
            Add({"input": range(38)}), NewRows([(0, 20, 2, 20)]),
            Add({"input": range(30, 61)}), NewRows([(20, 40, 2, 23), (40, 60, 2, 20)]),
        ]),
        Case("stream deduplication -> aggregation, append mode", _once_then_windows,
             [Add({"input": range(1, 16)}), NewRows([(0, 4)])]),
        Case("join -> window agg, append mode", _joined_then_windows, [
            Add({"first": range(1, 5), "second": range(1, 5)}), NewRows(),
            Add({"first": [5], "second": [5]}), NewRows([(0, 4)]),
        ], schemas=TWO),
        Case("aggregation -> stream deduplication, append mode", _windows_then_once,
             [Add({"input": [1, 5, 10, 15]}), NewRows([(5, 1), (10, 1), (15, 1)])], part="without event time"),
        Case("aggregation -> stream deduplication, append mode", _windows_then_once_by_time,
             [Add({"input": [1, 5, 10, 15]}), NewRows([(5, 4999999, 1), (10, 9999999, 1), (15, 14999999, 1)])],
             part="with event time"),
        Case("join with range join on non-time intervals -> window agg, append mode, shouldn't fail",
             _range_of_other_times,
             [Add({"first": [1, 2, 3, 4]}), Add({"second": [(1, 2), (2, 3), (3, 4), (4, 5)]}), NewRows()],
             schemas={"first": "value int", "second": "start int, end int"}),
        Case("stream-stream time interval left outer join -> aggregation, append mode",
             _outer_then_windows("leftOuter", "timestamp1"), [
            Add({"first": [("1", "2023-01-01 01:00:10"), ("2", "2023-01-01 01:00:30")],
                 "second": [("1", "2023-01-01 01:00:20")]}), AllRows(),
            Add({"first": [("5", "2023-01-01 01:15:00")], "second": [("6", "2023-01-01 01:15:00")]}), AllRows(),
            Add({"first": [("5", "2023-01-01 02:16:00")], "second": [("6", "2023-01-01 02:16:00")]}),
            AllRows([("2023-01-01 01:00:00", "2023-01-01 01:10:00", 2)]),
        ], schemas=TWO_DATED, quick=True),
        Case("stream-stream time interval right outer join -> aggregation, append mode",
             _outer_then_windows("rightOuter", "timestamp2"), [
            Add({"second": [("1", "2023-01-01 01:00:10"), ("2", "2023-01-01 01:00:30")],
                 "first": [("1", "2023-01-01 01:00:20")]}), AllRows(),
            Add({"second": [("5", "2023-01-01 01:15:00")], "first": [("6", "2023-01-01 01:15:00")]}), AllRows(),
            Add({"second": [("5", "2023-01-01 02:16:00")], "first": [("6", "2023-01-01 02:16:00")]}),
            AllRows([("2023-01-01 01:00:00", "2023-01-01 01:10:00", 2)]),
        ], schemas=TWO_DATED),
        Case("SPARK-49829 time window agg per each source followed by stream-stream join", _windows_joined, [
            Add({"first": [1, 2, 3, 4, 5], "second": [5, 6, 7, 8, 9]}), NewRows(),
            Add({"first": [11, 12, 13, 14, 15], "second": [15, 16, 17, 18, 19]}), NewRows([(10, 15, 35)]),
            Add({"first": [100], "second": [101]}), NewRows([(20, 65, 85)]),
        ], schemas=TWO_LONGS),
    ],
    {
        "stream-stream time interval join - output watermark for various intervals":
            "it asks an operator of Spark's for its watermark; the rows behind a join are asserted by the tests around it",
    },
)  # fmt: skip
