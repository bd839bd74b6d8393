"""`expect_or_drop`: each row either meets all conditions or is bad, once; bad rows come as they were, with the reason."""

from __future__ import annotations

import os
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
from state_runtime.base.errors import InvalidPipeline
from state_runtime.driver import engine
from state_runtime.job import Stream
from state_runtime.spark.frames import PublicFrames
from tests.job_settings import job_settings

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}
SCHEMA = "id long, shop string, at timestamp, paid string"
MINUTE_US = 60_000_000
ROWS = 40
CONDITIONS = {"parsed": "try_cast(paid AS INT) IS NOT NULL", "positive": "try_cast(paid AS INT) > 0"}


def write_input(folder: Path, files: range) -> None:
    """Write rows of which each file has some without an amount, with a text for it, and with one below 0."""
    folder.mkdir(exist_ok=True)
    for number in files:
        ids = np.arange(ROWS) + number * ROWS
        paid = [None if n % 10 == 3 else "much" if n % 10 == 6 else str(-n) if n % 10 == 9 else str(n + 1) for n in ids]
        at = (1000 + number * 30) * MINUTE_US + np.random.default_rng(number).integers(0, 30 * MINUTE_US, ROWS)
        columns = {"id": ids, "shop": [f"s{n % 3}" for n in ids], "at": pa.array(at, pa.timestamp("us", "UTC"))}
        temporary = folder / f".{number}"
        pq.write_table(pa.table({**columns, "paid": pa.array(paid, pa.string())}), temporary)
        # Spark takes files in the order of their times.
        os.utime(temporary, ns=((1_700_000_000 + number) * 1_000_000_000,) * 2)
        temporary.rename(folder / f"{number:03}.parquet")


class Bench:
    """A job over the input, and the numbers of its epochs."""

    def __init__(self, spark: SparkSession, tmp_path: Path, build: Callable[[Stream], Any]) -> None:
        self.spark, self.tmp_path, self._build = spark, tmp_path, build
        self.progress: list[Progress] = []

    def run(self, **settings: Any) -> None:
        chosen = job_settings(**{"local_dir": str(self.tmp_path / "local"), "parallelism": 2, **settings})
        job = StreamingJob("expects", store=str(self.tmp_path / "store"), settings=chosen)
        self._build(job.read(self.read))
        job.run(self.spark, trigger=ONCE, on_progress=self.progress.append)

    def read(self, spark: SparkSession) -> DataFrame:
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.tmp_path / "in"))
        return stream.withWatermark("at", "5 minutes")

    @property
    def bad_rows(self) -> int:
        return sum(each.bad_rows for each in self.progress)

    def written(self, name: str) -> DataFrame:
        return self.spark.read.parquet(str(self.tmp_path / name))

    def sink(self, name: str) -> ParquetSink:
        return ParquetSink(str(self.tmp_path / name))


def ids_of(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


def is_bad(number: int) -> bool:
    return number % 10 in (3, 6, 9)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"checkpoint_mode": "aligned", "partial_aggregation": "off"}, id="plain"),
        pytest.param({"partial_aggregation": "on"}, id="aggregated before the shuffle"),
        pytest.param({"checkpoint_mode": "unaligned"}, id="rows in flight"),
    ],
)
def test_each_row_is_good_or_bad_once_and_bad_rows_come_as_they_were_with_the_reason(
    spark: SparkSession, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Over a restart with other shards; a batch query says which rows are which."""

    def build(rows: Stream) -> None:
        checked = rows.expect_or_drop(**CONDITIONS)
        paid = checked.transform(lambda df: df.withColumn("paid", F.expr("CAST(paid AS INT)")))
        hourly = paid.key_by("shop").window(windows.tumbling("1 hour"), uid="hourly", paid=aggregates.sum("paid"))
        hourly.write(bench.sink("hourly"), name="hourly")
        paid.write(bench.sink("good"), name="good")
        checked.output("bad").write(bench.sink("bad"), name="bad")

    bench = Bench(spark, tmp_path, build)
    write_input(tmp_path / "in", range(3))
    bench.run(**settings)
    write_input(tmp_path / "in", range(3, 6))
    bench.run(**settings, parallelism=3)
    given = spark.read.parquet(str(tmp_path / "in"))
    assert ids_of(bench.written("good")) == [n for n in range(6 * ROWS) if not is_bad(n)]
    assert ids_of(bench.written("bad")) == [n for n in range(6 * ROWS) if is_bad(n)]
    as_they_came = bench.written("bad").select("id", "shop", "at", "paid")
    assert as_they_came.exceptAll(given).count() == 0
    reasons = {row.id: row.reason for row in bench.written("bad").select("id", "reason").collect()}
    assert reasons == {
        n: "positive" if n % 10 == 9 else "parsed, positive" for n in range(6 * ROWS) if is_bad(n)
    }  # null has failed
    assert bench.bad_rows == len(reasons)
    hours = bench.written("hourly").groupBy("shop", "window").agg(F.max("paid").alias("paid"))
    expected = given.where("try_cast(paid AS INT) > 0").groupBy("shop", F.window("at", "1 hour").alias("window"))
    wanted = expected.agg(F.sum(F.col("paid").cast("int")).alias("paid"))
    assert sorted(hours.selectExpr("shop", "unix_seconds(window.start) AS s", "paid").collect()) == sorted(
        wanted.selectExpr("shop", "unix_seconds(window.start) AS s", "paid").collect()
    )


def test_bad_rows_that_nothing_reads_are_dropped_counted_and_told_once(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In each epoch, also where the plan of an earlier one is taken again; a condition may be a column."""

    def build(rows: Stream) -> None:
        rows.expect_or_drop(parsed=F.expr(CONDITIONS["parsed"]), positive=CONDITIONS["positive"]).write(
            bench.sink("good")
        )

    bench = Bench(spark, tmp_path, build)
    write_input(tmp_path / "in", range(6))
    bench.run()
    assert [p.bad_rows for p in bench.progress if p.bad_rows] == [ROWS * 3 // 10] * 6
    assert ids_of(bench.written("good")) == [n for n in range(6 * ROWS) if not is_bad(n)]
    assert caplog.text.count("nothing reads output('bad')") == 1
    assert "expect_or_drop(parsed, positive)" in caplog.text


@pytest.mark.parametrize("ways", ["prepared", "public"])
def test_conditions_behind_an_operator_and_behind_each_other_count_what_they_drop(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: str
) -> None:
    """The rows of each step are counted where they are made, though a branch or a stage lies between; by the ways that
    are left where a version of Spark is made in another way inside, too."""
    if ways == "public":
        monkeypatch.setattr(engine, "frames_of", lambda _: PublicFrames())

    def build(rows: Stream) -> None:
        parsed = rows.expect_or_drop(parsed=CONDITIONS["parsed"])
        parsed.output("bad").write(bench.sink("unparsed"), name="unparsed")
        last = parsed.key_by("id").latest_by("at", uid="last")
        even = last.expect_or_drop(even="id % 2 = 0")
        even.expect_or_drop(large="id >= 100").write(bench.sink("good"), name="good")
        even.output("bad").write(bench.sink("odd"), name="odd")

    bench = Bench(spark, tmp_path, build)
    write_input(tmp_path / "in", range(5))
    bench.run()
    numbers = range(5 * ROWS)
    unparsed = [n for n in numbers if n % 10 in (3, 6)]
    odd = [n for n in numbers if n not in unparsed and n % 2]
    small = [n for n in numbers if n not in unparsed and n % 2 == 0 and n < 100]
    assert ids_of(bench.written("unparsed")) == unparsed
    assert ids_of(bench.written("odd")) == odd
    assert ids_of(bench.written("good")) == [n for n in numbers if n not in {*unparsed, *odd, *small}]
    assert bench.bad_rows == len(unparsed) + len(odd) + len(small)


def test_bad_rows_keep_their_event_time(spark: SparkSession, tmp_path: Path) -> None:
    """They may be counted by the hour: they are not late."""

    def build(rows: Stream) -> None:
        bad = rows.expect_or_drop(**CONDITIONS).output("bad")
        hourly = bad.key_by("reason").window(windows.tumbling("1 hour"), uid="bad-hourly", n=aggregates.count())
        hourly.write(bench.sink("out"))

    bench = Bench(spark, tmp_path, build)
    write_input(tmp_path / "in", range(4))
    bench.run()
    rows = bench.written("out").groupBy("reason", "window").agg(F.max("n").alias("n")).collect()
    assert sum(row.n for row in rows) == bench.bad_rows == 4 * ROWS * 3 // 10
    assert sum(p.late_rows for p in bench.progress) == 0


def test_a_condition_that_cannot_be_asked_is_refused_with_its_name(spark: SparkSession, tmp_path: Path) -> None:
    """Before a row is read."""
    write_input(tmp_path / "in", range(1))

    def refused(match: str, conditions: dict[str, Any], *, reads: bool = False) -> None:
        def build(rows: Stream) -> None:
            named = rows.transform(lambda df: df.withColumnRenamed("shop", "Reason")) if reads else rows
            checked = named.expect_or_drop(**conditions)
            (checked.output("bad") if reads else checked).write(bench.sink("out"))

        bench = Bench(spark, tmp_path, build)
        with pytest.raises(InvalidPipeline, match=match):
            bench.run()

    refused("needs a condition by name", {})
    refused("the condition 'n' must be SQL or a column", {"n": 1})
    refused("the condition 'n' cannot be resolved: .*nowhere", {"n": "nowhere > 1"})
    refused("the condition 'n' cannot be resolved", {"n": "id >"})
    refused("the condition 'n' is bigint, and must be a truth value", {"n": "id + 1"})
    refused("the rows have one of that name already", {"n": "id > 1"}, reads=True)
    with pytest.raises(InvalidPipeline, match=r'expect_or_drop\(\) has "bad"'):
        Bench(spark, tmp_path, lambda rows: rows.expect_or_drop(n="id > 1").output("worse")).run()
    assert not (tmp_path / "out").exists()
