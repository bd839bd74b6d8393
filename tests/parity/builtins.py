"""The built-in operators that Spark has, too: windows, aggregation, deduplication, the stream-stream join."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from state_runtime import StreamingJob, aggregates, windows
from state_runtime.job import Stream
from tests.parity import life
from tests.parity.cases import NOW_MS, at, case, stateful
from tests.parity.harness import Batch, Case, Leg

EVENTS = "key string, ts timestamp, n long, d double"


def events(
    seed: int, batches: int, *, rows: int = 40, keys: int = 5, late: float = 14.0, step: float = 4.0
) -> list[Batch]:
    """Events whose times advance by `step` seconds a batch and scatter back by `late`; some keys, times and values are null."""
    draw = random.Random(seed)
    made = []
    for number in range(batches):
        made.append(
            [
                {
                    "key": None if draw.random() < 0.05 else f"k{draw.randrange(keys)}",
                    "ts": None if draw.random() < 0.05 else at(round(20 + number * step - draw.random() * late, 3)),
                    "n": None if draw.random() < 0.1 else draw.randrange(-50, 50),
                    # Quarters add up exactly, in any order.
                    "d": draw.choice([None, draw.randrange(-99, 99) / 4]),
                }
                for _ in range(rows)
            ]
        )
    # A window's edge, exactly, and what the watermark closes at the very end.
    made[-1] += [{"key": "k0", "ts": at(second), "n": 1, "d": 0.25} for second in (10, 20, 30, 40)]
    made.append([{"key": "k9", "ts": at(500), "n": 1, "d": None}])
    return [Batch(rows, NOW_MS + number) for number, rows in enumerate(made)]


def _spark_aggregates() -> list[Any]:
    """Made late: a Spark column needs a session."""
    return [
        F.count("*").alias("rows"), F.count("n").alias("n"), F.sum("n").alias("total"), F.sum("d").alias("parts"),
        F.min("n").alias("least"), F.max("d").alias("most"), F.max("ts").alias("newest"), F.avg("n").alias("mean"),
        F.sum(F.when(F.expr("n > 0"), F.col("n"))).alias("gains"),
        F.count_if(F.expr("n > 0 AND d < 0")).alias("mixed"),
    ]  # fmt: skip


def _our_aggregates() -> dict[str, aggregates.Aggregate]:
    return {
        "rows": aggregates.count(), "n": aggregates.count("n"), "total": aggregates.sum("n"), "parts": aggregates.sum("d"),
        "least": aggregates.min("n"), "most": aggregates.max("d"), "newest": aggregates.max("ts"), "mean": aggregates.avg("n"),
        "gains": aggregates.sum("n").where("n > 0"), "mixed": aggregates.count().where("n > 0").where("d < 0"),
    }  # fmt: skip


def built_in(
    spark: Callable[[DataFrame], DataFrame],
    ours: Callable[[Stream], Stream],
    batches: Sequence[Batch],
    *,
    output_mode: str,
    watermark: tuple[str, str] | None = ("ts", "3 seconds"),
    counts_late: bool = True,
) -> Case:
    """A case of one leg over `EVENTS`."""
    # Spark counts late rows of an aggregation after it has added up the rows of each partition.
    leg = Leg(spark, lambda job, frame: ours(job.read(frame)), batches)
    return Case(EVENTS, [leg], watermark, output_mode=output_mode, counts_late=counts_late)


@case
def aggregate_without_windows() -> Case:
    """Keyed aggregates, update mode: the new values of the keys of a batch; null keys, null values."""
    return built_in(
        lambda frame: frame.groupBy("key").agg(*_spark_aggregates()),
        lambda stream: stream.key_by("key").aggregate(uid="agg", **_our_aggregates()),
        events(1, 4),
        output_mode="update",
        watermark=None,
    )


@case
def aggregate_by_event_time_append() -> Case:
    """Event time among the keys: a key is emitted once, when the watermark has passed its time; a null time never is."""
    return built_in(
        lambda frame: frame.groupBy("key", "ts").agg(*_spark_aggregates()),
        lambda stream: stream.key_by("key", "ts").aggregate(uid="once", output_mode="append", **_our_aggregates()),
        _coarsely(11),
        output_mode="append",
        counts_late=False,
    )


@case
def aggregate_by_event_time_into_a_window() -> Case:
    """Event time is the only key, goes on in what is emitted, and closes the windows behind."""
    return built_in(
        lambda frame: (
            frame.groupBy("ts")
            .agg(F.count("*").alias("rows"), F.max("n").alias("most"))
            .groupBy(F.window("ts", "5 seconds"))
            .agg(F.count("*").alias("seconds"), F.sum("rows").alias("rows"), F.max("most").alias("most"))
        ),
        lambda stream: (
            stream.key_by("ts")
            .aggregate(uid="once", output_mode="append", rows=aggregates.count(), most=aggregates.max("n"))
            .window(
                windows.tumbling("5 seconds"),
                uid="w",
                output_mode="append",
                seconds=aggregates.count(),
                rows=aggregates.sum("rows"),
                most=aggregates.max("most"),
            )
        ),
        _coarsely(12),
        output_mode="append",
        counts_late=False,
    )


@case
def tumbling_window_append() -> Case:
    """A window is emitted once, when the watermark has passed its end."""
    return built_in(
        lambda frame: frame.groupBy("key", F.window("ts", "10 seconds")).agg(*_spark_aggregates()),
        lambda stream: stream.key_by("key").window(
            windows.tumbling("10 seconds"), uid="w", output_mode="append", **_our_aggregates()
        ),
        events(2, 6),
        output_mode="append",
        counts_late=False,
    )


@case
def tumbling_window_update() -> Case:
    """A window is emitted in every batch that changes it, until it is closed."""
    return built_in(
        lambda frame: frame.groupBy("key", F.window("ts", "10 seconds")).agg(*_spark_aggregates()),
        lambda stream: stream.key_by("key").window(
            windows.tumbling("10 seconds"), uid="w", output_mode="update", **_our_aggregates()
        ),
        events(3, 6),
        output_mode="update",
        counts_late=False,
    )


@case
def sliding_window_append() -> Case:
    """Overlapping windows with an offset; a late row still counts in the windows that are open."""
    return built_in(
        lambda frame: frame.groupBy("key", F.window("ts", "10 seconds", "4 seconds", "1 second")).agg(
            *_spark_aggregates()
        ),
        lambda stream: stream.key_by("key").window(
            windows.sliding("10 seconds", "4 seconds", start="1 second"),
            uid="w",
            output_mode="append",
            **_our_aggregates(),
        ),
        events(4, 6),
        output_mode="append",
        counts_late=False,
    )


@case
def session_window_append() -> Case:
    """Sessions that rows prolong and join."""
    return built_in(
        lambda frame: frame.groupBy("key", F.session_window("ts", "2 seconds").alias("window")).agg(
            *_spark_aggregates()
        ),
        lambda stream: stream.key_by("key").window(
            windows.session("2 seconds"), uid="w", output_mode="append", **_our_aggregates()
        ),
        events(5, 6, rows=12),
        output_mode="append",
        counts_late=False,
    )


@case
def deduplicate_by_key() -> Case:
    """dropDuplicates without event time: the first row of each key, for ever."""
    return built_in(
        lambda frame: frame.dropDuplicates(["key", "n"]),
        lambda stream: stream.key_by("key", "n").deduplicate(uid="once"),
        [Batch(_unlike(batch.rows)) for batch in events(6, 4)],
        output_mode="append",
        watermark=None,
    )


@case
def deduplicate_with_event_time() -> Case:
    """Event time among the keys: late rows are dropped, and the watermark forgets keys."""
    return built_in(
        lambda frame: frame.dropDuplicates(["key", "ts"]),
        lambda stream: stream.key_by("key", "ts").deduplicate(uid="once"),
        [Batch(_unlike(_coarse(batch.rows), "key", "ts")) for batch in events(7, 6)],
        output_mode="append",
    )


@case
def deduplicate_within_watermark() -> Case:
    """dropDuplicatesWithinWatermark: a key is remembered for the delay."""
    return built_in(
        lambda frame: frame.dropDuplicatesWithinWatermark(["key", "n"]),
        lambda stream: stream.key_by("key", "n").deduplicate(uid="once", within_watermark=True),
        [Batch(_unlike(batch.rows)) for batch in events(8, 6)],
        output_mode="append",
    )


def _coarsely(seed: int) -> list[Batch]:
    """`events`, many at the same second."""
    return [Batch(_coarse(batch.rows)) for batch in events(seed, 6)]


def _coarse(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [{**row, "ts": row["ts"] and row["ts"].replace(microsecond=0)} for row in rows]


def _unlike(rows: Sequence[Any], *keys: str) -> list[dict[str, Any]]:
    """One row of each key in a batch: which of several is the first is free in Spark."""
    found = {tuple(row[name] for name in keys or ("key", "n")): dict(row) for row in rows}
    return list(found.values())


SIDES = "side int, key string, ts timestamp, n long, other_ts timestamp, m long"


def _join_batches(seed: int) -> list[Batch]:
    batches = []
    draw = random.Random(seed)
    for batch in events(seed, 6, rows=24, late=14.0):
        rows = []
        for row in batch.rows:
            left = draw.random() < 0.5
            rows.append(
                {
                    "side": 0 if left else 1, "key": row["key"], "ts": row["ts"] if left else None, "n": row["n"] if left else None,
                    "other_ts": None if left else row["ts"], "m": None if left else row["n"],
                }
            )  # fmt: skip
        if len(rows) == 1:
            # The end of both sides: an outer join lets go of what never matched.
            rows = [{**rows[0], "side": 0, "ts": at(500), "n": 1, "other_ts": None, "m": None}]
            rows += [{"side": 1, "key": "k9", "ts": None, "n": None, "other_ts": at(500), "m": 2}]
        batches.append(Batch(rows))
    return batches


def _join(how: str) -> Case:
    def sides(frame: DataFrame) -> tuple[DataFrame, DataFrame]:
        return (
            frame.where("side = 0").selectExpr("key", "ts", "n").withWatermark("ts", "2 seconds"),
            frame.where("side = 1").selectExpr("key AS other", "other_ts", "m").withWatermark("other_ts", "3 seconds"),
        )

    def spark(frame: DataFrame) -> DataFrame:
        left, right = sides(frame)
        condition = "key = other AND other_ts >= ts - INTERVAL 1 SECOND AND other_ts <= ts + INTERVAL 4 SECONDS"
        kind = {"inner": "inner", "left-outer": "left_outer"}[how]
        return left.join(right, F.expr(condition), kind).select("key", "ts", "n", "other_ts", "m")

    def ours(job: StreamingJob, frame: DataFrame) -> Stream:
        left, right = sides(frame)
        return (
            job.read(left)
            .key_by("key")
            .interval_join(right, right_keys=("other",), lower="-1 second", upper="4 seconds", how=how, uid="join")
        )

    # Spark's inner join drops null keys before it looks at the time, so it counts fewer rows as late.
    legs = [Leg(spark, ours, _join_batches(9 if how == "inner" else 10))]
    return Case(SIDES, legs, output_mode="append", counts_late=how != "inner")


@case
def interval_join_inner() -> Case:
    """Rows of two streams with equal keys, one within a range of time around the other."""
    return _join("inner")


@case
def interval_join_left_outer() -> Case:
    """And what never matched, when it no longer can."""
    return _join("left-outer")


@case
def chain_into_a_window() -> Case:
    """The event-time column of a processor's output feeds a window aggregation."""
    batches = [
        Batch(
            [
                {"key": f"k{n % 3}", "ts": at(10 + number * 5 + n * 0.7), "n": n, "d": None}
                for n in range(9)
            ],
            NOW_MS + number,
        )
        for number in range(5)
    ]  # fmt: skip
    first = stateful(
        life.Forwarding(), life.FORWARDED, batches, time_mode="eventTime", output_mode="append", event_time_column="at"
    )

    def spark(frame: DataFrame) -> DataFrame:
        window = F.window("at", "6 seconds")
        return first.spark(frame).groupBy("key", window).agg(F.count("*").alias("rows"), F.sum("n").alias("total"))

    def ours(job: StreamingJob, frame: DataFrame) -> Stream:
        return (
            first.ours(job, frame)
            .key_by("key")
            .window(
                windows.tumbling("6 seconds"),
                uid="w",
                output_mode="append",
                rows=aggregates.count(),
                total=aggregates.sum("n"),
            )
        )

    return Case(EVENTS, [Leg(spark, ours, batches)], ("ts", "2 seconds"), output_mode="append")
