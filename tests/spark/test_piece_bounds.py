"""In which pieces Spark hands rows to tasks of a job: bounded in bytes where rows are wide, in rows alone where not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from state_runtime import ParquetSink, StreamingJob, aggregates

from .jobs import settings

pytestmark = pytest.mark.spark

BOUND = "spark.sql.execution.arrow.maxBytesPerBatch"
WIDE = 4_096


def _with_bound(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        yield batch.append_column("bound", pa.array([context.getLocalProperty(BOUND)] * batch.num_rows, pa.string()))


def with_bound(frame: DataFrame) -> DataFrame:
    """Each row with what the task that has it was told."""
    return frame.mapInArrow(_with_bound, "number long, longest string, bound string")


def test_tasks_have_bytes_counted_but_for_the_batch_after_a_narrow_one(spark: SparkSession, tmp_path: Path) -> None:
    """It takes a fifth of Spark's time for narrow rows; a run that begins, or has just had wide rows, needs it."""
    inbox, out = tmp_path / "in", tmp_path / "out"
    inbox.mkdir()
    for number, width in enumerate([8, 8, 8, WIDE, 8, 8, 8]):
        path = inbox / f"{number}.parquet"
        pq.write_table(pa.table({"number": pa.array([number] * 50, pa.int64()), "text": ["x" * width] * 50}), path)
        os.utime(path, (1_700_000_000 + number,) * 2)
    job = StreamingJob("job", store=str(tmp_path / "store"), settings=settings(tmp_path))
    (
        job.read(lambda s: s.readStream.schema("number long, text string").option("maxFilesPerTrigger", 1).parquet(str(inbox)))
        .key_by("number")
        .aggregate(longest=aggregates.max("text"), uid="longest")
        .transform(with_bound)
        .write(ParquetSink(str(out)))
    )  # fmt: skip
    job.run(spark, trigger={"availableNow": True})
    rows = spark.read.parquet(str(out)).select("number", "bound").collect()
    by_batch = {row.number: row.bound for row in rows}
    default = str(spark.conf.get(BOUND))
    asked = [by_batch[number] not in (None, default, "67108864") for number in range(7)]
    assert asked == [False, False, True, True, True, False, True], by_batch
