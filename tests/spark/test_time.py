"""Event time through whole jobs: watermarks, late rows, epochs without a batch, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime import StreamingJob, aggregates, windows
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidPipeline

from .timed import SCHEMA, START, Batch, TimedJob, put

pytestmark = pytest.mark.spark


def counts(mode: str) -> Callable[[Any], Any]:
    return lambda stream: (
        stream.key_by("k")
        .window(windows.tumbling("10 seconds"), uid="w", output_mode=mode, n=aggregates.count())
        .transform(lambda df: df.selectExpr("k", "unix_seconds(window.start) AS s", "n"))
    )


S0 = int(START.timestamp())


@contextmanager
def changed(spark: SparkSession, name: str, value: str) -> Iterator[str]:
    """With another value of a setting; the one that it has otherwise."""
    before = str(spark.conf.get(name))
    spark.conf.set(name, value)
    try:
        yield before
    finally:
        spark.conf.set(name, before)


def test_a_window_is_emitted_when_the_watermark_has_passed_it_although_no_row_comes(
    spark: SparkSession, tmp_path: Path
) -> None:
    bench = TimedJob(spark, tmp_path, counts("append"))
    assert bench.run([("a", 1, 1), ("b", 2, 1), ("a", 9, 1)], [("a", 25, 1)]) == [[("a", S0, 2), ("b", S0, 1)]]
    last = bench.manifest()
    assert last.time.watermark_ms == (S0 + 15) * 1000
    assert last.operators[0].next_due_ms == (S0 + 30) * 1000


def test_a_restart_continues_with_the_watermark_of_an_uninterrupted_run(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so if the session has another time zone than before."""
    batches: list[Batch] = [
        [("a", 1, 1), ("b", 2, 1)],
        [("a", 35, 1)],
        [("b", 3, 1), ("a", 14, 1), ("a", 24, 1)],  # the windows of 3 and 14 s ended before the watermark, 25 s
        [("c", 90, 1)],
    ]
    whole = TimedJob(spark, tmp_path / "whole", counts("append"))
    whole.run(*batches)
    parts = TimedJob(spark, tmp_path / "parts", counts("append"))
    emitted = [row for batch in batches[:-1] for epoch in parts.run(batch) for row in epoch]
    assert "timeZone" not in caplog.text
    parts.accept_session_settings = True
    with changed(spark, "spark.sql.session.timeZone", "Asia/Tokyo") as before:
        emitted += [row for epoch in parts.run(batches[-1]) for row in epoch]
    assert f"timeZone is 'Asia/Tokyo', and the run before had '{before}'" in caplog.text
    assert parts.manifest().time.event_time_ms == whole.manifest().time.event_time_ms
    # An idle moment after each batch moves the watermark on, as Spark's batches without data do.
    assert sorted((k, s - S0, n) for k, s, n in emitted) == [("a", 0, 1), ("a", 20, 1), ("a", 30, 1), ("b", 0, 1)]


def test_rows_behind_the_watermark_are_dropped_and_counted(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of the future makes all later rows late, and is warned of once."""
    bench = TimedJob(spark, tmp_path, counts("update"))
    bench.run([("a", 100, 1)])
    assert "ahead of the clock" not in caplog.text
    future = 3_000_000_000
    assert bench.run([("a", 1, 1), ("a", 101, 1), ("b", future, 1)], [("b", future + 1, 1)]) == [
        [("a", S0 + 100, 2), ("b", S0 + future, 1)],
        [("b", S0 + future, 2)],
    ]
    assert sum(p.late_rows for p in bench.progress) == 1
    assert caplog.text.count("ahead of the clock") == 1


class Jumping:
    """A clock that is a month ahead once a job has done an epoch."""

    def __init__(self, bench: TimedJob) -> None:
        self.bench = bench

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms() + (30 * 86_400_000 if self.bench.progress else 0)

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s()


def test_an_epoch_in_which_nothing_is_due_runs_no_spark_job(spark: SparkSession, tmp_path: Path) -> None:
    """Nor does a clock that has jumped meanwhile change what time it is, for its state and for its snapshot."""
    bench = TimedJob(spark, tmp_path, counts("append"))
    bench.clock = Jumping(bench)
    bench.run([("a", 12, 1)])
    without_batch = bench.progress[-1]
    assert len(bench.progress) == 2
    assert without_batch.watermark_ms == (S0 + 2) * 1000
    assert without_batch.phases_ms["process"] < bench.progress[0].phases_ms["process"]
    last = bench.manifest()
    assert last.time.watermark_ms == (S0 + 2) * 1000
    assert max(last.time.batch_time_ms, last.created_at_ms) <= SYSTEM_CLOCK.now_ms()


def test_windows_need_event_time(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "in", 0, [("a", 1, 1)])
    job = StreamingJob("timed", store=str(tmp_path / "store"))
    job.read(lambda s: s.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))).key_by("k").window(
        windows.tumbling("10 seconds"), uid="w", n=aggregates.count()
    )
    with pytest.raises(InvalidPipeline, match="withWatermark"):
        job.run(spark)


def test_a_window_of_windows_gets_its_rows_in_time(spark: SparkSession, tmp_path: Path) -> None:
    """What the first operator emits because the watermark passed it is not late for the second."""

    def build(stream: Any) -> Any:
        return (
            stream.key_by("k")
            .window(windows.tumbling("10 seconds"), uid="small", output_mode="append", n=aggregates.count())
            .transform(lambda df: df.selectExpr("k", "window_time(window) AS t", "n"))
            .key_by("k")
            .window(windows.tumbling("30 seconds"), uid="large", output_mode="append", n=aggregates.sum("n"))
            .transform(lambda df: df.selectExpr("k", "unix_seconds(window.start) AS s", "n"))
        )

    bench = TimedJob(spark, tmp_path, build)
    emitted = bench.run([("a", 1, 1), ("a", 11, 1), ("a", 21, 1), ("a", 22, 1)], [("a", 31, 1)], [("a", 100, 1)])
    # Of 60 to 90 s there is nothing; 31 s is in the second large window.
    assert [row for epoch in emitted for row in epoch] == [("a", S0, 4), ("a", S0 + 30, 1)]


def test_two_streams_are_joined_by_time(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "right", 0, [("a", 3, 30), ("a", 50, 31), ("b", 1, 32)])
    put(tmp_path / "right", 1, [("z", 200, 33)])

    def build(stream: Any) -> Any:
        def right(session: SparkSession) -> DataFrame:
            return bench.source("right")(session).selectExpr("k AS rk", "at AS rat", "n AS rn")

        return (
            stream.key_by("k")
            .interval_join(right, right_keys=["rk"], lower="0 seconds", upper="5 seconds", how="left_outer", uid="j")
            .transform(lambda df: df.select("k", "n", "rn"))
        )

    bench = TimedJob(spark, tmp_path, build)
    emitted = bench.run([("a", 1, 1), ("b", 2, 2)], [("z", 300, 3)])
    assert sorted((row for epoch in emitted for row in epoch), key=repr) == [("a", 1, 30), ("b", 2, None)]
