"""Jobs on Spark's own sources over restarts: what a source keeps for itself in Spark's checkpoint directory comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import window

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates
from state_runtime.base.errors import InvalidData, InvalidPipeline, MissingSource
from state_runtime.pipeline.source_position import COMPACT_INTERVAL_CONF
from state_runtime.pipeline.sources import unwatched
from state_runtime.snapshot.catalog import Catalog
from state_runtime.spark.jvm import analyzed, kinds_in
from state_runtime.store import open_store

from .jobs import settings, two_step_job, write_input

pytestmark = pytest.mark.spark


def counting(root: Path, read: Callable[[SparkSession], DataFrame]) -> StreamingJob:
    """The values of a source, counted by their last digit; each batch's counts are written."""
    job = StreamingJob("rate", store=str(root / "store"), settings=settings(root))
    job.read(read).key_by("digit").aggregate(uid="n", n=aggregates.count(), most=aggregates.max("value")).write(
        ParquetSink(str(root / "out")), name="out"
    )
    return job


def run_for(spark: SparkSession, job: StreamingJob, rows: int) -> None:
    """Until that many input rows were counted by this run."""
    seen, enough = 0, threading.Event()

    def count(progress: Progress) -> None:
        nonlocal seen
        seen += progress.input_rows
        if seen >= rows and not enough.is_set():
            enough.set()

    job.run(spark, trigger={"processingTime": "200 milliseconds"}, on_progress=count, stop=enough)
    assert enough.is_set()


RATES = {
    "rate": lambda spark: spark.readStream.format("rate").option("rowsPerSecond", 40).load(),
    "rate-micro-batch": lambda spark: (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 25).option("numPartitions", 2).load()
    ),
}


@pytest.mark.parametrize("source", RATES)
def test_a_source_that_makes_rows_goes_on_where_it_was(spark: SparkSession, tmp_path: Path, source: str) -> None:
    """A rate source counts from its time of creation, which it keeps in Spark's checkpoint directory: without it a second
    run cannot begin. Each value is there once, over both runs."""
    for _ in range(2):
        run_for(spark, counting(tmp_path, lambda s: RATES[source](s).selectExpr("value", "value % 10 AS digit")), 30)
    counts: list[Row] = (
        spark.read.parquet(str(tmp_path / "out")).groupBy("digit").agg({"n": "max", "most": "max"}).collect()
    )
    total, highest = sum(r["max(n)"] for r in counts), max(r["max(most)"] for r in counts)
    assert total == highest + 1 >= 60
    newest = Catalog(open_store(str(tmp_path / "store")), "rate").latest()
    assert newest is not None
    assert newest.source is not None
    assert newest.source.logs == ()
    assert [f.path for f in newest.source.files] == (["0/0"] if source == "rate" else [])


def test_a_source_that_keeps_nothing_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of a socket cannot be read again after a restart."""
    job = counting(
        tmp_path,
        lambda s: (
            s.readStream.format("socket")
            .option("host", "localhost")
            .option("port", 1)
            .load()
            .selectExpr("length(value) AS value", "length(value) % 10 AS digit")
        ),
    )
    with pytest.raises(InvalidPipeline, match="'socket', which keeps nothing of what it has sent"):
        job.run(spark, trigger={"availableNow": True})
    assert not (tmp_path / "store" / "rate").exists()


def test_an_input_file_that_does_not_fit_is_named_and_no_restart_is_tried(spark: SparkSession, tmp_path: Path) -> None:
    """The cause of what Spark raises is the last of its exceptions, and the first thing that the run says."""
    inbox = tmp_path / "in"
    job = counting(tmp_path, lambda s: s.readStream.schema("value long, digit long").parquet(str(inbox)))
    with pytest.raises(MissingSource, match=f"does not exist: {inbox}"):
        job.run(spark, trigger={"availableNow": True})
    inbox.mkdir()
    pq.write_table(pa.table({"value": ["x"], "digit": [1]}), inbox / "a.parquet")
    with pytest.raises(InvalidData, match=r"/in/a\.parquet has column 'value' as BINARY, and .* says bigint"):
        job.run(spark, trigger={"availableNow": True})
    status = Catalog(open_store(str(tmp_path / "store")), "rate").status()
    assert status is not None
    assert status.error_kind == "invalid"
    assert status.message.startswith("InvalidData: the input file file:")


def test_the_users_interval_of_compaction_is_that_of_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    """Spark computes where compacted files are; laid out for ten, a log cannot be read with another interval."""
    spark.conf.set(COMPACT_INTERVAL_CONF, "3")
    try:
        for first, files in ((0, 5), (5, 2), (7, 4)):
            write_input(tmp_path / "in", first, files)
            assert two_step_job(tmp_path).run(spark, trigger={"availableNow": True}).epochs >= files
    finally:
        spark.conf.unset(COMPACT_INTERVAL_CONF)
    rows = spark.read.parquet(str(tmp_path / "in")).count()
    assert spark.read.parquet(str(tmp_path / "out-steps")).count() == rows


def test_nothing_observes_event_times_for_a_watermark_that_nobody_waits_for(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The epoch observes them itself. The runtime has read the delays of the columns by then."""
    events = spark.readStream.schema("k string, at timestamp, on timestamp").parquet(str(tmp_path))
    left = events.where("k = 'a'").withWatermark("at", "1 second").select("k", "at")
    right = events.where("k = 'b'").withWatermark("on", "2 seconds").selectExpr("k", "on AS at")
    for frame in (left, left.where("k > ''"), left.union(right)):
        plain = unwatched(frame)
        assert plain.isStreaming
        assert plain.dtypes == frame.dtypes
        assert "EventTimeWatermark" in kinds_in(analyzed(frame))
        assert kinds_in(analyzed(plain)) == kinds_in(analyzed(frame)) - {"EventTimeWatermark"}


def test_a_stream_with_an_operator_of_sparks_keeps_sparks_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """It waits for it."""
    events = spark.readStream.schema("k string, at timestamp").parquet(str(tmp_path)).withWatermark("at", "1 second")
    counted = events.groupBy(window("at", "1 minute")).count()
    for frame in (counted, events.dropDuplicates(["k"]), events.dropDuplicates(["k"]).where("k > ''")):
        assert unwatched(frame) is frame
