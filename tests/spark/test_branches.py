"""Whole jobs with branches give what a batch query gives; nothing is computed twice, and an epoch is one Spark job."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates
from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.settings import JobSettings
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

from ..refusal import everything_refused
from .branches import ROWS, SCHEMA, Flaky, Slow, check_diamond, diamond, found, read, write_input

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
ONCE = {"available_now": True}


def jobs_of(spark: SparkSession) -> Callable[[], int]:
    """How many Spark jobs there have been since it was asked last."""
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()  # type: ignore[union-attr]
    before = int(scheduler.numTotalJobs())

    def since() -> int:
        nonlocal before
        now = int(scheduler.numTotalJobs())
        before, made = now, now - before
        return made

    return since


def test_branches_that_part_and_meet_give_what_a_batch_query_gives(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in")
    diamond(tmp_path).run(spark, trigger=ONCE)
    check_diamond(spark, tmp_path, is_ended=False)


def test_an_epoch_with_branches_is_one_job_and_its_rows_are_counted_once(spark: SparkSession, tmp_path: Path) -> None:
    """From its second epoch on also with kept plans."""
    write_input(tmp_path / "in", files=6)
    since = jobs_of(spark)
    jobs: list[int] = []
    rows: list[int] = []

    def seen(progress: Any) -> None:
        jobs.append(since())
        rows.append(progress.input_rows)

    diamond(tmp_path).run(spark, trigger=ONCE, on_progress=seen)
    assert len(jobs) > 6
    assert set(jobs[1:]) == {1}
    assert [count for count in rows if count] == [ROWS] * 6
    check_diamond(spark, tmp_path, is_ended=False)


def test_rows_that_meet_what_became_of_them_are_counted_once(spark: SparkSession, tmp_path: Path) -> None:
    """A step behind a union of the source and of an operator of it gets them twice; what came is what the source gave."""
    write_input(tmp_path / "in", files=3)
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    job = StreamingJob("meeting", store=str(tmp_path / "store"), settings=settings)
    rows = job.read(lambda session: read(session, tmp_path))
    once = rows.key_by("id").deduplicate(uid="once")
    once.union(rows).key_by("id").aggregate(uid="n", n=aggregates.count()).write(ParquetSink(str(tmp_path / "out")))
    seen: list[int] = []
    job.run(spark, trigger=ONCE, on_progress=lambda progress: seen.append(progress.input_rows))
    assert [count for count in seen if count] == [ROWS] * 3


@pytest.mark.parametrize("mode", ["aligned", "unaligned"])
def test_a_job_with_branches_goes_on_with_other_shards_and_without_local_copies(
    spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    write_input(tmp_path / "in", files=2)
    diamond(tmp_path, checkpoint_mode=mode).run(spark, trigger=ONCE)
    write_input(tmp_path / "in", files=2, first=2)
    diamond(tmp_path, checkpoint_mode=mode, parallelism=2, local_dir=str(tmp_path / "elsewhere")).run(
        spark, trigger=ONCE
    )
    check_diamond(spark, tmp_path, is_ended=False)


def test_a_repeated_task_above_branches_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", files=2)
    diamond(tmp_path, Flaky()).run(spark, trigger=ONCE)
    check_diamond(spark, tmp_path, is_ended=False)


def test_a_step_that_is_read_twice_runs_once(spark: SparkSession, tmp_path: Path) -> None:
    """Also code of the user's in Python, which might give other rows the second time; both readers get the same."""
    write_input(tmp_path / "in", files=2)
    calls = tmp_path / "calls"
    calls.mkdir()

    def marked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            name = os.urandom(8).hex()
            (calls / name).write_text(str(batch.num_rows))
            yield batch.append_column("drawn", pa.array([name] * batch.num_rows))

    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    job = StreamingJob("marked", store=str(tmp_path / "store"), settings=settings)
    rows = job.read(lambda session: read(session, tmp_path)).transform(
        lambda df: df.mapInArrow(marked, f"{SCHEMA}, drawn string")  # type: ignore[arg-type]
    )
    for name in ("left", "right"):
        rows.key_by("drawn").aggregate(uid=name, n=aggregates.count()).write(
            ParquetSink(str(tmp_path / name)), name=name
        )
    job.run(spark, trigger=ONCE)
    counted = {path.name: int(path.read_text()) for path in calls.iterdir() if path.read_text() != "0"}
    for name in ("left", "right"):
        assert dict(found(spark, tmp_path, name, "drawn", "n")) == dict.fromkeys(counted.items(), 1)
    assert sum(counted.values()) == 2 * ROWS


def test_what_cannot_be_united_is_refused_with_its_line(spark: SparkSession, tmp_path: Path) -> None:
    job, other = (StreamingJob(name, store=str(tmp_path / "store")) for name in ("one", "other"))
    rows = job.read(lambda session: read(session, tmp_path))
    with pytest.raises(InvalidPipeline, match="needs another stream"):
        rows.union()
    with pytest.raises(InvalidPipeline, match="streams of one job"):
        rows.union(other.read(lambda session: read(session, tmp_path)))
    with pytest.raises(InvalidPipeline, match=r"not a KeyedStream; keyed streams are united before key_by\(\)"):
        rows.union(rows.key_by("shop"))  # type: ignore[arg-type]
    write_input(tmp_path / "in", files=1)
    rows.union(rows.transform(lambda df: df.select("id"))).write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(InvalidPipeline, match=r"union\(\): .*NUM_COLUMNS_MISMATCH.*test_branches\.py, line \d+"):
        job.run(spark, trigger=ONCE)


@pytest.mark.usefixtures("untried")
def test_branches_by_public_ways_alone_give_the_same(spark: SparkSession, tmp_path: Path) -> None:
    """And the executors forget what was shared when an epoch is over."""
    write_input(tmp_path / "in", files=2)
    with everything_refused():
        diamond(tmp_path).run(spark, trigger=ONCE)
    check_diamond(spark, tmp_path, is_ended=False)
    assert spark.sparkContext._jsc.getPersistentRDDs().isEmpty()  # type: ignore[union-attr]


def test_branches_run_where_spark_may_change_plans(spark: SparkSession, tmp_path: Path) -> None:
    """To plan a shuffle that is shared would be to run it there."""
    write_input(tmp_path / "in", files=2)
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        diamond(tmp_path).run(spark, trigger=ONCE)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")
    check_diamond(spark, tmp_path, is_ended=False)


def test_shuffle_files_that_are_lost_in_the_middle_of_an_epoch_cost_no_row_and_double_none(tmp_path: Path) -> None:
    """A host of Spark's that went away: what others had read by then is made again, state and all, for who had not."""
    write_input(tmp_path / "in", files=3)
    command = [sys.executable, "-m", "tests.spark.lost_shuffle_files", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_rows_wait_at_a_slow_operator_above_branches_over_runs_of_any_parallelism(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Each run ends with rows in flight, which are in its snapshot; the next one goes on with them in other shards."""
    write_input(tmp_path / "in", files=12)
    held: list[int] = []
    for parallelism in (3, 2, 3):
        stop = StopAfter(1)
        diamond(
            tmp_path, Slow(), files=100, parallelism=parallelism, checkpoint_mode="unaligned", unaligned_epoch_s=0.2
        ).run(spark, trigger=ONCE, on_progress=stop, stop=stop.event)
        newest = Catalog(open_store(str(tmp_path / "store")), "diamond").latest()
        assert newest is not None
        held.append(sum(o.rows for o in newest.open_batch.operators) if newest.open_batch is not None else 0)
    assert held[0] > held[1] > 0
    diamond(tmp_path, files=100, checkpoint_mode="aligned").run(spark, trigger=ONCE)
    check_diamond(spark, tmp_path, is_ended=False)


class StopAfter:
    """Ends a run after so many epochs."""

    def __init__(self, epochs: int) -> None:
        self._left = epochs
        self.event = threading.Event()

    def __call__(self, progress: Progress) -> None:
        self._left -= 1
        if self._left <= 0:
            self.event.set()
