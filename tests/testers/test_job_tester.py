"""A whole job in a test: its own code, rows by hand, and restarts, other shards and other code in the middle."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from state_runtime import JobContext, ParquetSink, StreamingJob, aggregates, windows
from stillstate.errors import InvalidConfiguration, InvalidPipeline, StillstateError
from stillstate.testing import JobTester

pytestmark = pytest.mark.spark


def at(minute: float) -> datetime:
    return (datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(minutes=minute)).astimezone().replace(tzinfo=None)


def stays_empty(path: Path) -> bool:
    return not any(path.iterdir())


def per_shop(context: JobContext) -> StreamingJob:
    """Two steps with state, of which the second goes by event time."""
    job = context.job()
    source = context.options["orders"]
    rows = job.read(
        lambda s: (
            s.readStream.schema("id long, shop string, at timestamp").parquet(source).withWatermark("at", "10 seconds")
        )
    ).transform(lambda df: df.where("id > 0"))
    once = rows.key_by("id", "at").deduplicate(uid="once")
    hourly = once.key_by("shop").window(
        windows.tumbling("1 minute"), uid="w", output_mode="append", n=aggregates.count()
    )
    hourly.transform(lambda df: df.select("shop", F.col("window.start").alias("start"), "n")).write(
        ParquetSink(context.options["out"])
    )
    return job


def counted(context: JobContext) -> StreamingJob:
    """A plain query."""

    def query(spark: SparkSession) -> Any:
        orders = spark.readStream.schema("id long, shop string").parquet(context.options["orders"])
        return orders.groupBy("shop").count()

    job = context.job()
    job.query(query, output_mode="update").write(ParquetSink(context.options["out"]))
    return job


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "orders").mkdir()
    (tmp_path / "out").mkdir()
    return {"orders": str(tmp_path / "orders"), "out": str(tmp_path / "out")}


def test_a_job_is_restarted_and_rescaled_in_the_middle_of_a_test(spark: SparkSession, options: dict[str, str]) -> None:
    """Its code reads and writes what the test gives and takes; the folders that it names stay as they are."""
    with JobTester(per_shop, options=options, spark=spark) as tester:
        assert list(tester.sources) == ["orders"]
        assert tester.send([(1, "a", at(0.1)), (1, "a", at(0.1)), (0, "a", at(0.2)), (2, "b", at(0.3))]) == []
        tester.restart(parallelism=3)
        assert sorted(tester.send([(3, "a", at(1.5)), (4, "a", at(-5))])) == [("a", at(0), 1), ("b", at(0), 1)]
        assert tester.state("w", "windows", shop="a")[0].n == 1
        assert tester.advance_watermark(at(10)) == [Row(shop="a", start=at(1), n=1)]
        assert tester.send([(5, "a", at(9))]) == [], "late by the watermark that was pushed"
    assert stays_empty(Path(options["orders"]))
    assert stays_empty(Path(options["out"]))


def test_a_query_goes_on_with_other_code(spark: SparkSession, options: dict[str, str]) -> None:
    with JobTester(counted, options=options, spark=spark) as tester:
        assert sorted(tester.send(orders=[(1, "a"), (2, "b"), (3, "a")])) == [("a", 2), ("b", 1)]
        assert tester.send([(4, "a")]) == [("a", 3)]

        def added(context: JobContext) -> StreamingJob:
            job = counted(context)
            rows = job.read(lambda s: s.readStream.schema("shop string").parquet(options["out"]), name="more")
            rows.key_by("shop").deduplicate(uid="once").write(ParquetSink(options["out"]), name="shops")
            return job

        tester.restart(added, parallelism=1)
        assert tester.send(orders=[(5, "a")], more=[("x",), ("x",)]) == {"out": [("a", 4)], "shops": [("x",)]}
        with pytest.raises(InvalidPipeline, match=r"send\(rows\): the job reads orders, more; .* send\(orders=…\)"):
            tester.send([("x",)])
        with pytest.raises(InvalidPipeline, match=r"send\(nothing=…\): the job reads orders, more"):
            tester.send(nothing=[])


def test_a_job_begins_with_the_state_that_a_test_sets(spark: SparkSession, options: dict[str, str]) -> None:
    def build(context: JobContext) -> StreamingJob:
        job = context.job()
        rows = job.read(lambda s: s.readStream.schema("shop string, amount long").parquet(options["orders"]))
        rows.key_by("shop").aggregate(uid="sums", total=aggregates.sum("amount")).write(ParquetSink(options["out"]))
        return job

    with JobTester(build, options=options, spark=spark) as tester:
        tester.set_state("sums", "aggregate", [Row(shop="a", total=40)])
        assert tester.send([("a", 2)]) == [Row(shop="a", total=42)]
        assert tester.state("sums", "aggregate") == [Row(shop="a", total=42)]
        with pytest.raises(InvalidConfiguration, match="set states before the first rows"):
            tester.set_state("sums", "aggregate", [Row(shop="a", total=1)])


def test_code_that_does_not_fit_the_state_is_refused_by_restart(spark: SparkSession, options: dict[str, str]) -> None:
    with JobTester(counted, options=options, spark=spark) as tester:
        tester.send([(1, "a")])
        with pytest.raises(InvalidPipeline, match=r"position of source .orders., which the pipeline does not read"):
            tester.restart(per_shop)
        assert tester.send([(2, "a")]) == [("a", 2)], "it goes on as it was"


def test_a_tester_that_cannot_be_made_leaves_no_folder(
    spark: SparkSession, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(StillstateError, match="/nowhere/at/all"):
        JobTester(counted, options={**options, "orders": "/nowhere/at/all"}, spark=spark)
    assert stays_empty(tmp_path / "temporary")
