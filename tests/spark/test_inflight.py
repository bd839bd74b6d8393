"""Epochs that end before their batch, through whole jobs: rows in flight are in every snapshot, and the result is the batch's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from state_runtime import Progress, StreamingJob, foreach_epoch
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import open_store

from .jobs import (
    ORACLE_STEPS,
    SCHEMA,
    STEPS,
    Steps,
    assert_equals_batch,
    rows_of,
    settings,
    two_step_job,
    write_input,
)

pytestmark = pytest.mark.spark

ONCE = {"availableNow": True}
UNALIGNED: dict[str, Any] = {"checkpoint_mode": "unaligned", "unaligned_epoch_s": 0.3, "files_per_trigger": 100}


class Slow(Steps):
    """Takes two milliseconds a row, as code that asks another service does."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in super().handleInputRows(key, rows, timerValues):
            threading.Event().wait(0.002)
            yield row


def newest(root: Path) -> Manifest:
    found = Catalog(open_store(str(root / "store")), "steps").latest()
    assert found is not None
    return found


class Stopping:
    """Stops a run after so many epochs."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.event = threading.Event()
        self.seen: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)
        if len(self.seen) >= self.after:
            self.event.set()

    def run(self, job: StreamingJob, spark: SparkSession) -> list[Progress]:
        job.run(spark, trigger=ONCE, on_progress=self, stop=self.event)
        return self.seen


def test_a_batch_takes_several_epochs_and_its_result_is_that_of_one(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 30)
    seen = Stopping(1000).run(two_step_job(tmp_path, Slow(), **UNALIGNED), spark)
    assert len(seen) > 4
    waiting = [p.inflight.rows if p.inflight else 0 for p in seen]
    assert waiting[0] > 0
    assert waiting[-1] == 0
    assert waiting == sorted(waiting, reverse=True), "nothing is read before the batch is done"
    assert sum(p.input_rows for p in seen) == 30 * 60
    assert newest(tmp_path).open_batch is None
    assert_equals_batch(spark, tmp_path)


@pytest.mark.parametrize(
    "changes", [{}, {"changelog": "off"}, {"backend": "rocksdb"}, {"local_recovery": False}], ids=str
)
def test_runs_that_end_with_rows_in_flight_are_gone_on_with_at_any_parallelism(
    spark: SparkSession, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Stopped in the middle of a batch, again and again, each time before the rows of the last run are done."""
    write_input(tmp_path / "in", 0, 60)
    short = UNALIGNED | {"unaligned_epoch_s": 0.1}
    held: list[int] = []
    for parallelism in (2, 3, 3, 1):
        Stopping(1).run(two_step_job(tmp_path, Slow(), parallelism=parallelism, **short, **changes), spark)
        batch = newest(tmp_path).open_batch
        held.append(sum(o.rows for o in batch.operators) if batch is not None else 0)
    assert held[0] > held[1] > held[2] > 0
    seen = Stopping(1000).run(two_step_job(tmp_path, Slow(), checkpoint_mode="aligned", **changes), spark)
    assert seen[0].input_rows == 0
    assert newest(tmp_path).open_batch is None
    assert_equals_batch(spark, tmp_path)


def test_a_function_gets_of_each_epoch_the_rows_that_it_processed(spark: SparkSession, tmp_path: Path) -> None:
    """`foreach_epoch` while the batch goes on, over a restart with another parallelism: each row comes in one epoch, with what
    its key had had before."""
    write_input(tmp_path / "in", 0, 40)
    calls: dict[int, list[Row]] = {}

    def deliver(frame: DataFrame, epoch: int) -> None:
        assert epoch not in calls
        calls[epoch] = frame.collect()

    def job(parallelism: int) -> StreamingJob:
        mode = {name: value for name, value in UNALIGNED.items() if name != "files_per_trigger"}
        made = StreamingJob(
            "steps", store=str(tmp_path / "store"), settings=settings(tmp_path, parallelism=parallelism, **mode)
        )
        (
            made.read(lambda s: s.readStream.schema(SCHEMA).parquet(str(tmp_path / "in")))
            .key_by("name")
            .transform_with_state(Slow(), STEPS, uid="steps")
            .write(foreach_epoch(deliver))
        )
        return made

    Stopping(2).run(job(2), spark)
    assert newest(tmp_path).open_batch is not None, "nothing waits: the test proves nothing"
    assert len(calls) >= 2, "a stop may come an epoch late"
    Stopping(1000).run(job(3), spark)
    source = newest(tmp_path).source
    assert source is not None
    assert source.batch_id == 0
    spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")).createOrReplaceTempView("input")
    expected = spark.sql(ORACLE_STEPS)
    delivered = spark.createDataFrame([row for rows in calls.values() for row in rows], STEPS)
    assert rows_of(delivered.select(expected.columns)) == rows_of(expected)
