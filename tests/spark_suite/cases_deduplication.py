"""Spark's two suites of deduplication: their inputs, and the rows that they expect."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .stream_test import Add, AllRows, Case, LastBatch, NewRows, Query, Start, Stop, Streams, Suite

__all__ = ["DEDUPLICATION", "WITHIN_WATERMARK"]

PAIRS = {"input": "_1 string, _2 int"}
TRIPLES = {"input": "_1 string, _2 int, _3 string"}
AVRO = "it sets the encoding of Spark's state store; our state has one format"
CHECKPOINT = "it goes on from a checkpoint that an older Spark wrote"
FIVE_TIMES = [value for _ in range(5) for value in range(10, 16)]


def _timed(streams: Streams, delay: str = "10 seconds") -> DataFrame:
    """Numbers that are seconds, too."""
    return streams["input"].withColumn("eventTime", F.timestamp_seconds("value")).withWatermark("eventTime", delay)


def _timed_pairs(streams: Streams, delay: str) -> DataFrame:
    return streams["input"].withColumn("eventTime", F.timestamp_seconds("_2")).withWatermark("eventTime", delay)


def _seconds(streams: Streams) -> DataFrame:
    return _timed(streams).dropDuplicates().select(F.col("eventTime").cast("long"))


def _windows(streams: Streams) -> DataFrame:
    windows = _timed(streams).dropDuplicates().groupBy(F.window("eventTime", "5 seconds").alias("window"))
    return windows.agg(F.count("*").alias("count")).select(F.col("window.start").cast("long").alias("start"), "count")


def _sums(streams: Streams) -> DataFrame:
    named = streams["input"].selectExpr("_1 AS str", "_2 AS num")
    return named.dropDuplicates().groupBy("str").agg(F.sum("num"))


def _by_id_and_time(streams: Streams) -> DataFrame:
    timed = streams["input"].withColumn("time", F.timestamp_seconds("time")).withWatermark("time", "1 second")
    return timed.dropDuplicates(["id", "time"]).select("id")


def _by_id(streams: Streams) -> DataFrame:
    timed = streams["input"].withColumn("time", F.timestamp_seconds("time")).withWatermark("time", "1 second")
    return timed.dropDuplicates(["id"]).select("id", F.col("time").cast("long"))


def _united(streams: Streams) -> DataFrame:
    return streams["first"].select("value").union(streams["second"].dropDuplicates(["value"]))


def _collated(name: str, column: str) -> Query:
    def query(streams: Streams) -> DataFrame:
        others = [F.col("_2").alias("int")] if column == "_1" else []
        text = F.expr(f"CAST({column} AS STRING COLLATE {name})").alias("str")
        return streams["input"].select(text, *others).dropDuplicates(["str"])

    return query


def _by_first(streams: Streams) -> DataFrame:
    return streams["input"].dropDuplicates(["_1"])


def _within(delay: str, *more: str) -> Query:
    def query(streams: Streams) -> DataFrame:
        once = _timed_pairs(streams, delay).dropDuplicatesWithinWatermark(["_1"])
        return once.select("_1", F.col("eventTime").cast("long"), *more)

    return query


def _joined_without_watermark(streams: Streams) -> DataFrame:
    other = streams["other"].select(F.col("_1").alias("key"), F.timestamp_seconds("_2").alias("time"))
    keys = streams["input"].select(F.col("value").alias("key")).dropDuplicatesWithinWatermark()
    return keys.join(other.withWatermark("Time", "10 seconds"), "key")


EXPIRES = [
    Add({"input": FIVE_TIMES}), AllRows(range(10, 16)),
    Add({"input": [25]}), NewRows([25]),
    Add({"input": [10]}), NewRows(),
]  # fmt: skip
NOT_WITHOUT_WATERMARK = [
    "dropDuplicatesWithinWatermark is not supported",
    "streaming DataFrames/DataSets without watermark",
]

DEDUPLICATION = Suite(
    "StreamingDeduplicationSuite",
    "apache/spark@043b09636e8290ce3a68211c048e4326abeb90c8",
    [
        Case("deduplicate with all columns", lambda s: s["input"].dropDuplicates(), [
            Add({"input": ["a"]}), LastBatch(["a"]),
            Add({"input": ["a"]}), LastBatch(),
            Add({"input": ["b"]}), LastBatch(["b"]),
        ], schemas={"input": "value string"}, quick=True),
        Case("deduplicate with some columns", _by_first, [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 2)]}), LastBatch(),
            Add({"input": [("b", 1)]}), LastBatch([("b", 1)]),
        ], schemas=PAIRS),
        Case("multiple deduplicates", lambda s: s["input"].dropDuplicates().dropDuplicates(["_1"]), [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 2)]}), LastBatch(),
            Add({"input": [("b", 1)]}), LastBatch([("b", 1)]),
        ], schemas=PAIRS),
        Case("SPARK-35896: metrics in StateOperatorProgress are output correctly", _seconds,
             [*EXPIRES, Add({"input": [10]}), NewRows()]),
        Case("deduplicate with watermark", _seconds, [*EXPIRES, Add({"input": [45]}), NewRows([45])]),
        Case("deduplicate with aggregate - append mode", _windows, [
            Add({"input": FIVE_TIMES}), LastBatch(),
            Add({"input": [25]}), LastBatch([(10, 5)]),
            Add({"input": [10]}), LastBatch(),
            Add({"input": [40]}), LastBatch([(15, 1), (25, 1)]),
        ], quick=True),
        Case("deduplicate with aggregate - update mode", _sums, [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 1)]}), LastBatch(),
            Add({"input": [("a", 2)]}), LastBatch([("a", 3)]),
            Add({"input": [("b", 1)]}), LastBatch([("b", 1)]),
        ], mode="update", schemas=PAIRS),
        Case("deduplicate with aggregate - complete mode", _sums, [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 2)]}), LastBatch([("a", 3)]),
            Add({"input": [("b", 1)]}), LastBatch([("a", 3), ("b", 1)]),
        ], mode="complete", schemas=PAIRS),
        Case("deduplicate with file sink", lambda s: s["input"].dropDuplicates(), [
            Add({"input": ["a"]}), AllRows(["a"]),
            Add({"input": ["a"]}), AllRows(["a"]),
            Add({"input": ["b"]}), AllRows(["a", "b"]),
        ], schemas={"input": "value string"}),
        Case("SPARK-19841: watermarkPredicate should filter based on keys", _by_id_and_time, [
            Add({"input": [(1, 1), (1, 1), (1, 2)]}), AllRows([1, 2]),
            Add({"input": [(1, 1), (2, 3), (2, 4)]}), NewRows([3, 4]),
            Add({"input": [(1, 0), (1, 1), (3, 5), (3, 6)]}), NewRows([5, 6]),
            Add({"input": [(1, 0), (4, 7)]}), NewRows([7]),
        ], schemas={"input": "time int, id int"}),
        Case("SPARK-21546: dropDuplicates should ignore watermark when it's not a key", _by_id,
             [Add({"input": [(1, 1), (1, 2), (2, 2)]}), AllRows([(1, 1), (2, 2)])],
             schemas={"input": "id int, time int"}),
        Case("test no-data flag", _seconds, [
            Add({"input": range(10, 16)}), AllRows(range(10, 16)),
            Add({"input": [25]}), NewRows([25]),
        ], part="with"),
        Case("test no-data flag", _seconds, [
            Add({"input": range(10, 16)}), AllRows(range(10, 16)),
            Add({"input": [25]}), NewRows([25]),
        ], part="without", no_data_batches=False),
        Case("SPARK-29438: ensure UNION doesn't lead streaming deduplication to use shifted partition IDs", _united, [
            Add({"first": [11, 12], "second": [21, 22]}, files=2), NewRows([11, 12, 21, 22]),
            Stop(), Start(),
            Add({"first": [13, 14, 15], "second": [22, 23]}, files=3), NewRows([13, 14, 15, 23]),
        ], schemas={"first": "value int", "second": "value int"}),
        Case("SPARK-35880: custom metric numDroppedDuplicateRows in state operator progress", _by_first, [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 2), ("b", 3)]}), LastBatch([("b", 3)]),
            Add({"input": [("a", 5), ("b", 2), ("c", 9)]}), LastBatch([("c", 9)]),
        ], schemas=PAIRS, part="without watermark"),
        Case("SPARK-35880: custom metric numDroppedDuplicateRows in state operator progress", _seconds, [
            Add({"input": FIVE_TIMES}), AllRows(range(10, 16)),
            Add({"input": [14]}), NewRows(),
            Add({"input": [25]}), NewRows([25]),
            Add({"input": [10]}), NewRows(),
            Add({"input": [26, 26]}), NewRows([26]),
        ], part="with watermark"),
        Case("SPARK-39650: duplicate with specific keys should allow input to change schema", _by_first, [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 2), ("b", 3)]}), LastBatch([("b", 3)]),
            Stop(), Start(schemas=TRIPLES),
            Add({"input": [("a", 5, "a"), ("b", 2, "b"), ("c", 9, "c")]}), LastBatch([("c", 9, "c")]),
        ], schemas=PAIRS),
        Case("collation aware deduplication", _collated("UTF8_BINARY", "_1"), [
            Add({"input": [("a", 1)]}), LastBatch([("a", 1)]),
            Add({"input": [("a", 2)]}), LastBatch(),
            Add({"input": [("ä", 1)]}), LastBatch([("ä", 1)]),
        ], schemas=PAIRS),
        Case("non-binary collation aware deduplication not supported", _collated("UTF8_LCASE", "value"),
             [Add({"input": ["a"]})], schemas={"input": "value string"}, says=["UTF8_LCASE"]),
    ],
    {
        "SPARK-39650: recovery from checkpoint having all columns as value schema": CHECKPOINT,
        "SPARK-39650: recovery from checkpoint with changes on key schema are not allowed": CHECKPOINT,
        "test that avro encoding is not supported": AVRO,
    },
)  # fmt: skip

WITHIN_WATERMARK = Suite(
    "StreamingDeduplicationWithinWatermarkSuite",
    "apache/spark@0ac1030a2a208010e6defa75091fee9e5cdaf0e2",
    [
        Case("deduplicate without event time column should result in error",
             lambda s: s["input"].dropDuplicatesWithinWatermark(),
             schemas={"input": "value string"}, says=NOT_WITHOUT_WATERMARK, part="all columns"),
        Case("deduplicate without event time column should result in error",
             lambda s: s["input"].withColumn("newcol", F.col("value")).dropDuplicatesWithinWatermark(["newcol"]),
             schemas={"input": "value string"}, says=NOT_WITHOUT_WATERMARK, part="one column"),
        Case("deduplicate without event time column should result in error", _joined_without_watermark,
             schemas={"input": "value string", "other": "_1 string, _2 int"}, says=NOT_WITHOUT_WATERMARK,
             part="joined with a stream that has a watermark"),
        Case("deduplicate with all columns with event time column in DataFrame",
             lambda s: _timed(s).dropDuplicatesWithinWatermark().select(F.col("eventTime").cast("long")), [
            Add({"input": FIVE_TIMES}), AllRows(range(10, 16)),
            Add({"input": range(13, 18)}), NewRows([16, 17]),
            Add({"input": [5]}), NewRows(),
            Add({"input": [35]}), NewRows([35]),
            Add({"input": [55]}), NewRows([55]),
        ]),
        Case("deduplicate with subset of columns which event time column is not in subset", _within("2 seconds"), [
            Add({"input": [("a", 17)]}), NewRows([("a", 17)]),
            Add({"input": [("a", 16)]}), NewRows(),
            Add({"input": [("a", 13)]}), NewRows(),
            Add({"input": [("b", 22), ("c", 21)]}), NewRows([("b", 22), ("c", 21)]),
            Add({"input": [("a", 21)]}), NewRows([("a", 21)]),
            Add({"input": [("d", 25)]}), NewRows([("d", 25)]),
        ], schemas=PAIRS, quick=True),
        Case("SPARK-39650: duplicate with specific keys should allow input to change schema", _within("10 second"), [
            Add({"input": [("a", 1)]}), NewRows([("a", 1)]),
            Add({"input": [("a", 2), ("b", 3)]}), NewRows([("b", 3)]),
            Stop(), Start(_within("10 second", "_3"), TRIPLES),
            Add({"input": [("a", 5, "a"), ("b", 2, "b"), ("c", 9, "c")]}), NewRows([("c", 9, "c")]),
        ], schemas=PAIRS),
        Case("SPARK-46676: canonicalization of StreamingDeduplicateWithinWatermarkExec should work",
             _within("10 second"), [Add({"input": [("a", 1)]}), NewRows([("a", 1)])], schemas=PAIRS),
        Case("SPARK-50492: drop event time column after dropDuplicatesWithinWatermark",
             lambda s: (
                 s["input"].withColumn("first", F.timestamp_seconds("_1")).withWatermark("first", "10 seconds")
                 .dropDuplicatesWithinWatermark(["_2"]).select("_2")
             ), [Add({"input": [(1, 2)]}), AllRows([2])], schemas={"input": "_1 int, _2 int"}),
    ],
    {
        "deduplicate in batch DataFrame": "a batch query",
        "incremental cleanup factor does not change dropDuplicatesWithinWatermark output":
            "the rows of the test with a subset of columns, under a setting of Spark's state store",
        "Partition key extraction - DedupeWithinWatermark": "it looks into Spark's state store",
    },
)  # fmt: skip
