"""Event times that are too far ahead of the clock make no other row late: counted, or set aside, over restarts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates, windows
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidPipeline
from state_runtime.driver import engine
from state_runtime.job import Stream
from state_runtime.spark.frames import PublicFrames
from tests.job_settings import job_settings

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}
SCHEMA = "id long, shop string, at timestamp"
MINUTE_US = 60_000_000
ROWS = 40
LAST_DAY_US = 253_402_218_000_000_000
"""9999-12-31T01:00:00Z"""
FUTURE = {5, 7}
"""Which rows of each file have such a time."""


def put(folder: Path, number: int, at_us: np.ndarray[Any, Any], first_id: int) -> None:
    folder.mkdir(exist_ok=True)
    ids = np.arange(len(at_us)) + first_id
    columns = {"id": ids, "shop": [f"s{n % 3}" for n in ids], "at": pa.array(at_us, pa.timestamp("us", "UTC"))}
    temporary = folder / f".{number}"
    pq.write_table(pa.table(columns), temporary)
    # Spark takes files in the order of their times.
    os.utime(temporary, ns=((1_700_000_000 + number) * 1_000_000_000,) * 2)
    temporary.rename(folder / f"{number:03}.parquet")


def write_input(folder: Path, files: range, *, is_well: bool = False) -> None:
    """Write rows whose times go on by half an hour a file, none of them late, but for those of the last day."""
    for number in files:
        at = (1000 + number * 30) * MINUTE_US + np.random.default_rng(number).integers(0, 30 * MINUTE_US, ROWS)
        if not is_well:
            at[sorted(FUTURE)] = LAST_DAY_US
        put(folder, number, at, number * ROWS)


def reader(folder: Path) -> Callable[[SparkSession], DataFrame]:
    def read(spark: SparkSession) -> DataFrame:
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))
        return stream.withWatermark("at", "5 minutes")

    return read


class Bench:
    """A job over the input, and the numbers of its epochs."""

    def __init__(self, spark: SparkSession, tmp_path: Path, build: Callable[[StreamingJob], None]) -> None:
        self.spark, self.tmp_path, self._build = spark, tmp_path, build
        self.progress: list[Progress] = []

    def run(self, clock: Any = SYSTEM_CLOCK, **settings: Any) -> None:
        chosen = job_settings(**{"local_dir": str(self.tmp_path / "local"), "parallelism": 2, **settings})
        job = StreamingJob("far", store=str(self.tmp_path / "store"), settings=chosen, clock=clock)
        self._build(job)
        job.run(self.spark, trigger=ONCE, on_progress=self.progress.append)

    def total(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.progress)


def counted(stream: Stream, out: Path) -> None:
    """Count the rows of each hour and shop; of each the last count that was written is true."""
    hourly = stream.key_by("shop").window(windows.tumbling("1 hour"), uid="hourly", n=aggregates.count())
    hourly.write(ParquetSink(str(out)), name="hourly")


def last_counts(spark: SparkSession, out: Path) -> Counter[tuple[str, int]]:
    rows = spark.read.parquet(str(out)).selectExpr("shop", "unix_seconds(window.start) AS s", "n").collect()
    found: Counter[tuple[str, int]] = Counter()
    for row in rows:
        found[row.shop, row.s] = max(found[row.shop, row.s], row.n)
    return found


def batch_counts(frame: DataFrame) -> Counter[tuple[str, int]]:
    hours = frame.groupBy("shop", F.window("at", "1 hour")).count()
    rows = hours.selectExpr("shop", "unix_seconds(window.start) AS s", "count AS n").collect()
    return Counter({(row.shop, row.s): row.n for row in rows})


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"checkpoint_mode": "aligned", "partial_aggregation": "off"}, id="plain"),
        pytest.param({"partial_aggregation": "on"}, id="aggregated before the shuffle"),
        pytest.param({"checkpoint_mode": "unaligned", "task_bytes_max": 1 << 20}, id="rows in flight"),
        pytest.param({"checkpoint_batches": 4}, id="a checkpoint each four epochs", marks=pytest.mark.long),
    ],
)
def test_rows_of_the_last_day_leave_all_others_in_time(
    spark: SparkSession, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Over a restart with other shards: nothing is late, all rows count as a batch query counts them, and each epoch
    says how many were too far ahead."""
    bench = Bench(
        spark, tmp_path, lambda job: counted(job.read(reader(tmp_path / "in"), max_ahead="1 hour"), tmp_path / "out")
    )
    write_input(tmp_path / "in", range(4))
    bench.run(**settings)
    write_input(tmp_path / "in", range(4, 8))
    bench.run(**settings, parallelism=3)
    assert bench.total("late_rows") == 0
    assert bench.total("future_rows") == 8 * len(FUTURE)
    assert {p.future_rows for p in bench.progress if p.input_rows} == {len(FUTURE)}
    assert last_counts(spark, tmp_path / "out") == batch_counts(spark.read.parquet(str(tmp_path / "in")))
    well = Bench(
        spark, tmp_path / "well", lambda job: counted(job.read(reader(tmp_path / "well-in")), tmp_path / "well-out")
    )
    write_input(tmp_path / "well-in", range(8), is_well=True)
    well.run(**settings)
    assert bench.progress[-1].watermark_ms <= well.progress[-1].watermark_ms < LAST_DAY_US // 1000


def test_without_a_bound_the_same_rows_make_others_late(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Spark; the warning says what to set."""
    write_input(tmp_path / "in", range(4))
    bench = Bench(spark, tmp_path, lambda job: counted(job.read(reader(tmp_path / "in")), tmp_path / "out"))
    bench.run()
    assert bench.total("late_rows") > ROWS
    assert bench.total("future_rows") == 0
    assert "`max_ahead` of read(), or `max_ahead_s` in the job's settings" in caplog.text


@pytest.mark.parametrize("ways", ["prepared", pytest.param("public", marks=pytest.mark.long)])
def test_future_rows_are_taken_out_of_the_stream_where_they_are_read(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ways: str
) -> None:
    """They come as they were, once, over a restart; the main output has all others. By the ways that are left where a
    version of Spark is made in another way inside, too."""
    if ways == "public":
        monkeypatch.setattr(engine, "frames_of", lambda _: PublicFrames())

    def build(job: StreamingJob) -> None:
        rows = job.read(reader(tmp_path / "in"), max_ahead="1 hour")
        counted(rows, tmp_path / "out")
        rows.output("future").write(ParquetSink(str(tmp_path / "future")), name="future")

    bench = Bench(spark, tmp_path, build)
    for files in (range(3), range(3, 6)):
        write_input(tmp_path / "in", files)
        bench.run()
    given = spark.read.parquet(str(tmp_path / "in"))
    future = spark.read.parquet(str(tmp_path / "future")).select("id", "shop", "at")
    assert sorted(row.id for row in future.collect()) == [n for n in range(6 * ROWS) if n % ROWS in FUTURE]
    assert future.exceptAll(given).count() == 0
    assert last_counts(spark, tmp_path / "out") == batch_counts(given.where("year(at) < 9000"))
    assert (bench.total("late_rows"), bench.total("future_rows")) == (0, 6 * len(FUTURE))
    assert "further ahead" not in caplog.text


def test_the_bound_goes_by_processing_time_and_is_no_closer_than_it_says(spark: SparkSession, tmp_path: Path) -> None:
    """A row within it moves the watermark, one beyond it by more than a step does not."""
    now_us = SYSTEM_CLOCK.now_ms() * 1000
    put(tmp_path / "in", 0, np.array([now_us, now_us + 59 * MINUTE_US, now_us + 63 * MINUTE_US]), 0)
    bench = Bench(
        spark, tmp_path, lambda job: counted(job.read(reader(tmp_path / "in"), max_ahead="1 hour"), tmp_path / "out")
    )
    bench.run()
    assert bench.total("future_rows") == 1
    assert bench.progress[-1].watermark_ms == (now_us + 54 * MINUTE_US) // 1000


def test_one_source_with_such_rows_holds_neither_its_own_clock_nor_those_of_others_wrong(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Several named sources; of each only its own bound counts."""

    def build(job: StreamingJob) -> None:
        bad = job.read(reader(tmp_path / "bad"), name="bad", max_ahead="1 hour")
        well = job.read(reader(tmp_path / "well"), name="well")
        counted(bad.union(well), tmp_path / "out")
        bad.output("future").write(ParquetSink(str(tmp_path / "future")), name="future")

    bench = Bench(spark, tmp_path, build)
    for files in (range(3), range(3, 6)):
        write_input(tmp_path / "bad", files)
        write_input(tmp_path / "well", files, is_well=True)
        bench.run()
    given = [spark.read.parquet(str(tmp_path / name)) for name in ("bad", "well")]
    assert (bench.total("late_rows"), bench.total("future_rows")) == (0, 6 * len(FUTURE))
    assert spark.read.parquet(str(tmp_path / "future")).count() == 6 * len(FUTURE)
    expected = batch_counts(given[0].where("year(at) < 9000").union(given[1]))
    assert last_counts(spark, tmp_path / "out") == expected


def test_a_side_of_a_join_with_such_rows_leaves_the_join_in_time(spark: SparkSession, tmp_path: Path) -> None:
    """The two sides are one stream then, with the sides' times in structs."""

    def build(job: StreamingJob) -> None:
        def right(session: SparkSession) -> DataFrame:
            return reader(tmp_path / "right")(session).selectExpr("id AS other", "at AS seen")

        left = job.read(reader(tmp_path / "left"), name="left", max_ahead="1 hour").key_by("id")
        joined = left.interval_join(
            job.read(right, name="right").key_by("other"), uid="pairs", lower="-1 hour", upper="1 hour"
        )
        joined.write(ParquetSink(str(tmp_path / "out")))

    write_input(tmp_path / "left", range(5))
    write_input(tmp_path / "right", range(5), is_well=True)
    bench = Bench(spark, tmp_path, build)
    bench.run()
    assert (bench.total("late_rows"), bench.total("future_rows")) == (0, 5 * len(FUTURE))
    found = sorted(row.id for row in spark.read.parquet(str(tmp_path / "out")).select("id").collect())
    assert found == [n for n in range(5 * ROWS) if n % ROWS not in FUTURE]


def test_the_setting_bounds_a_plain_query(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose code stays as it is; told once in a run."""

    def hourly(session: SparkSession) -> DataFrame:
        return reader(tmp_path / "in")(session).groupBy("shop", F.window("at", "1 hour")).agg(F.count("*").alias("n"))

    def build(job: StreamingJob) -> None:
        job.query(hourly, output_mode="update").write(ParquetSink(str(tmp_path / "out")))

    write_input(tmp_path / "in", range(4))
    bench = Bench(spark, tmp_path, build)
    bench.run(max_ahead_s=3600)
    assert (bench.total("late_rows"), bench.total("future_rows")) == (0, 4 * len(FUTURE))
    assert last_counts(spark, tmp_path / "out") == batch_counts(spark.read.parquet(str(tmp_path / "in")))
    assert caplog.text.count("further ahead of the clock than max_ahead_s of the settings allows") == 1


def test_a_query_over_streams_of_the_job_gets_neither_future_rows_nor_bad_ones(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The way to set them aside of a query: its source is a read() of the job."""

    def hourly(session: SparkSession, orders: DataFrame) -> DataFrame:
        return orders.groupBy("shop", F.window("at", "1 hour")).agg(F.count("*").alias("n"))

    def build(job: StreamingJob) -> None:
        rows = job.read(reader(tmp_path / "in"), max_ahead="1 hour")
        checked = rows.expect_or_drop(not_first="id % 40 > 0")
        job.query(hourly, output_mode="update", orders=checked).write(ParquetSink(str(tmp_path / "out")), name="out")
        rows.output("future").write(ParquetSink(str(tmp_path / "future")), name="future")
        checked.output("bad").write(ParquetSink(str(tmp_path / "bad")), name="bad")

    write_input(tmp_path / "in", range(3))
    bench = Bench(spark, tmp_path, build)
    bench.run()
    given = spark.read.parquet(str(tmp_path / "in")).where("year(at) < 9000 AND id % 40 > 0")
    assert last_counts(spark, tmp_path / "out") == batch_counts(given)
    assert (bench.total("late_rows"), bench.total("future_rows"), bench.total("bad_rows")) == (0, 3 * len(FUTURE), 3)
    assert spark.read.parquet(str(tmp_path / "future")).count() == 3 * len(FUTURE)
    assert spark.read.parquet(str(tmp_path / "bad")).select("id", "reason").count() == 3


def test_a_bound_that_cannot_be_kept_is_refused_before_a_row_is_read(spark: SparkSession, tmp_path: Path) -> None:
    """A bound that is silently not kept would be worse than none."""
    write_input(tmp_path / "in", range(1))

    def without(session: SparkSession) -> DataFrame:
        return session.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))

    def united(session: SparkSession) -> DataFrame:
        return reader(tmp_path / "in")(session).union(reader(tmp_path / "in")(session))

    def refused(build: Callable[[StreamingJob], None], match: str, **settings: Any) -> None:
        with pytest.raises(InvalidPipeline, match=match):
            Bench(spark, tmp_path, build).run(**settings)

    def written(source: Any, **arguments: Any) -> Callable[[StreamingJob], None]:
        return lambda job: job.read(source, **arguments).write(ParquetSink(str(tmp_path / "out"))) and None

    refused(written(without, max_ahead="1 hour"), "max_ahead and no event time to bound")
    refused(written(united, max_ahead="1 hour"), r"Read each input by a read\(\) with a name")
    refused(written(united), r"Read each input by a read\(\) with a name", max_ahead_s=60)
    refused(written(reader(tmp_path / "in"), max_ahead="10 milliseconds"), "must be at least 1 second")

    def reads_none(job: StreamingJob) -> None:
        job.read(reader(tmp_path / "in")).output("future").write(ParquetSink(str(tmp_path / "out")))

    refused(reads_none, "the source has no output 'future'")

    def goes_by_time(job: StreamingJob) -> None:
        counted(job.read(reader(tmp_path / "in"), max_ahead="1 hour").output("future"), tmp_path / "out")

    refused(goes_by_time, "withWatermark")
    assert not (tmp_path / "out").exists()
    Bench(spark, tmp_path, written(without)).run(max_ahead_s=60)
    assert spark.read.parquet(str(tmp_path / "out")).count() == ROWS
