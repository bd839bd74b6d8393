"""Spark's StreamingSessionWindowSuite: its inputs, and the rows that it expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .stream_test import Add, AllRows, Case, NewRows, Query, Step, Streams, Suite

__all__ = ["SESSIONS"]

COMPLETE = "must be append or update"
LINES = {"input": "value string, timestamp long"}
TEN_SECONDS = "10 seconds"


def _events(streams: Streams) -> DataFrame:
    timed = streams["input"].withColumn("eventTime", F.timestamp_seconds("timestamp"))
    return timed.withWatermark("eventTime", "30 seconds")


def _gap(word: str) -> Column:
    """A gap that depends on the word; of 0 seconds and less there is no session."""
    of_word = f"CASE {word} WHEN 'hello' THEN '1 second' WHEN 'structured' THEN '0 second' WHEN 'world' THEN '-10 seconds' ELSE '10 seconds' END"  # fmt: skip
    return F.expr(of_word)


def _sessions(frame: DataFrame, keys: Sequence[str], gap: Column | str) -> DataFrame:
    counts = frame.groupBy(F.session_window("eventTime", gap).alias("session"), *keys).agg(
        F.count("*").alias("numEvents")
    )
    begin, end = "CAST(session.start AS LONG)", "CAST(session.end AS LONG)"
    return counts.selectExpr(*keys, f"{begin} AS s", f"{end} AS e", f"{end} - {begin} AS durationMs", "numEvents")


def _words(gap: Column | str = TEN_SECONDS) -> Query:
    def query(streams: Streams) -> DataFrame:
        words = _events(streams).selectExpr("explode(split(value, ' ')) AS sessionId", "eventTime")
        return _sessions(words, ["sessionId"], gap)

    return query


def _triples(streams: Streams) -> DataFrame:
    single = streams["input"].withColumn("eventTime", F.timestamp_seconds("timestamp"))
    single = single.withColumn("sessionIdSingle", F.split("value", " "))
    double = single.withColumn("sessionIdDouble", F.arrays_zip("sessionIdSingle", "sessionIdSingle"))
    triple = double.withColumn("sessionIdTriple", F.arrays_zip("sessionIdDouble", "sessionIdSingle"))
    return triple.withWatermark("eventTime", "30 seconds")


def _nested(gap: Column | str = TEN_SECONDS) -> Query:
    def query(streams: Streams) -> DataFrame:
        words = _triples(streams).selectExpr("explode(sessionIdTriple) AS sessionId", "eventTime")
        return _sessions(words, ["sessionId"], gap)

    return query


def _two_columns(gap: Column | str = TEN_SECONDS) -> Query:
    def query(streams: Streams) -> DataFrame:
        words = _triples(streams).withColumn("one", F.explode("sessionIdTriple"))
        named = words.selectExpr(
            "one.sessionIdDouble AS aggKeyDouble", "one.sessionIdSingle AS aggKeySingle", "eventTime"
        )
        return _sessions(named, ["aggKeyDouble", "aggKeySingle"], gap)

    return query


def _of_all(streams: Streams) -> DataFrame:
    timed = (
        streams["input"].withColumn("eventTime", F.timestamp_seconds("value")).withWatermark("eventTime", "10 seconds")
    )
    sessions = timed.groupBy(F.session_window("eventTime", "5 seconds").alias("session"))
    return sessions.agg(F.count("*").alias("count"), F.sum("value").alias("sum"))


def _first_and_last(streams: Streams) -> DataFrame:
    words = _events(streams).selectExpr("explode(split(value, ' ')) AS sessionId", "eventTime")
    sessions = words.groupBy(F.session_window("eventTime", TEN_SECONDS).alias("session"), "sessionId").agg(
        F.first("eventTime").alias("firstTime"),
        F.last("eventTime").alias("lastTime"),
        F.min_by("eventTime", "eventTime").alias("minTime"),
        F.max_by("eventTime", "eventTime").alias("maxTime"),
    )
    times = [
        f"CAST({name} AS LONG) AS c{place}"
        for place, name in enumerate(("session.start", "session.end", "minTime", "maxTime"))
    ]
    return sessions.selectExpr("sessionId", *times)


def _one(word: str) -> tuple[Any, ...]:
    return (word,)


def _triple(word: str) -> tuple[Any, ...]:
    return (((word, word), word),)


def _pair(word: str) -> tuple[Any, ...]:
    return ((word, word), word)


FIRST: list[list[tuple[Any, ...]]] = [
    [("hello", 40, 51, 11, 2), ("world", 40, 51, 11, 2), ("streaming", 40, 51, 11, 2), ("spark", 40, 50, 10, 1),
     ("structured", 41, 51, 10, 1)],
    [("spark", 25, 35, 10, 1), ("streaming", 25, 35, 10, 1)],
]  # fmt: skip
JOINED = [("spark", 25, 50, 25, 3), ("streaming", 25, 51, 26, 4), ("hello", 40, 51, 11, 2), ("world", 40, 51, 11, 2),
          ("structured", 41, 51, 10, 1)]  # fmt: skip
AT_60 = [("hello", 60, 70, 10, 1), ("apache", 60, 70, 10, 1), ("spark", 60, 70, 10, 1)]
AT_90 = [("structured", 90, 100, 10, 1), ("streaming", 90, 100, 10, 1)]
BEGIN = Add({"input": [("hello world spark streaming", 40), ("world hello structured streaming", 41)]})
Named = Callable[[str], tuple[Any, ...]]


def _named(rows: Sequence[tuple[Any, ...]], name: Named) -> list[tuple[Any, ...]]:
    return [(*name(word), *rest) for word, *rest in rows]


def _complete(name: Named) -> list[Step]:
    return [
        BEGIN, NewRows(_named(FIRST[0], name)),
        Add({"input": [("spark streaming", 25)]}), NewRows(_named([*FIRST[0], *FIRST[1]], name)),
        Add({"input": [("spark streaming", 30)]}), NewRows(_named(JOINED, name)),
        Add({"input": [("hello apache spark", 60)]}), NewRows(_named([*JOINED, *AT_60], name)),
        Add({"input": [("structured streaming", 90)]}), NewRows(_named([*JOINED, *AT_60, *AT_90], name)),
    ]  # fmt: skip


def _append(closed: Sequence[tuple[Any, ...]], name: Named = _one) -> list[Step]:
    """At 0 seconds the rows are late."""
    return [
        BEGIN, NewRows(),
        Add({"input": [("spark streaming", 25)]}), NewRows(),
        Add({"input": [("spark streaming", 0)]}), NewRows(),
        Add({"input": [("spark streaming", 30)]}), NewRows(),
        Add({"input": [("hello apache spark", 60)]}), NewRows(),
        Add({"input": [("structured streaming", 90)]}), NewRows(_named(closed, name)),
    ]  # fmt: skip


WITH_GAPS = [("spark", 25, 50, 25, 3), ("streaming", 25, 51, 26, 4), ("hello", 40, 42, 2, 2)]
NOT_OF_ALL = ["Global aggregation with session window", "not supported"]
NOT_IN_UPDATE = ["output mode: update", "not supported", "for session window"]

SESSIONS = Suite(
    "StreamingSessionWindowSuite",
    "apache/spark@048eb08004cb2470adaa64148c2f984f0109a52f",
    [
        Case("complete mode - session window", _words(), _complete(_one),
             mode="complete", schemas=LINES),
        Case("complete mode - session window - nested tuple key", _nested(), _complete(_triple),
             mode="complete", schemas=LINES),
        Case("complete mode - session window - multiple col key", _two_columns(), _complete(_pair),
             mode="complete", schemas=LINES),
        Case("complete mode - session window - no key", _of_all, [Add({"input": [40]})], mode="complete", says=NOT_OF_ALL,
             says_here=["a session window needs another key beside it"]),
        Case("append mode - session window", _words(), _append(JOINED), schemas=LINES, quick=True),
        Case("SPARK-36465: dynamic gap duration", lambda s: _words(_gap("sessionId"))(s), _append(WITH_GAPS), schemas=LINES),
        Case("dynamic gap duration - nested tuple key",
             lambda s: _nested(_gap("sessionId.sessionIdSingle"))(s), _append(WITH_GAPS, _triple), schemas=LINES, quick=True),
        Case("dynamic gap duration - multiple col key",
             lambda s: _two_columns(_gap("aggKeySingle"))(s), _append(WITH_GAPS, _pair), schemas=LINES),
        Case("append mode - session window - no key", _of_all, [Add({"input": [40]})], says=NOT_OF_ALL,
             says_here=["a session window needs another key beside it"]),
        Case("update mode - session window", _words(), [Add({"input": [("hello", 40)]})],
             mode="update", schemas=LINES, says=NOT_IN_UPDATE),
        Case("update mode - session window - no key", _of_all, [Add({"input": [40]})], mode="update", says=NOT_IN_UPDATE),
        Case("session window with first/last function", _first_and_last, [
            *(Add({"input": [("a", second)]}) for second in (41, 42, 40)), AllRows(),
            *(Add({"input": [("b", second)]}) for second in (100, 101)), AllRows([("a", 40, 52, 40, 42)]),
        ], schemas=LINES),
    ],
    {
        "session window with async state checkpointing": "the rows of append mode, under settings of Spark's state store",
        "session window - with more aggregation functions and UDAFs":
            "an aggregate function in Scala, and `median`, which is refused by name",
    },
)  # fmt: skip
