"""In which pieces Spark hands rows to tasks of a job: bounded in bytes where rows are wide, in rows alone where not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import ParquetSink, StreamingJob, aggregates
from state_runtime.pipeline.sinks import ForeachEpoch
from state_runtime.spark.plans import has_python

from .jobs import settings

pytestmark = pytest.mark.spark

BOUND = "spark.sql.execution.arrow.maxBytesPerBatch"
WIDE = 4_096


class Told(StatefulProcessor):
    """Each key with what the task that has it was told."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "text string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        context = TaskContext.get()
        assert context is not None
        self._seen.update((max(row.text for row in rows),))
        yield Row(number=key[0], bound=context.getLocalProperty(BOUND))

    def close(self) -> None:
        pass


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
        .transform_with_state(Told(), "number long, bound string", uid="told")
        .write(ParquetSink(str(out)))
    )  # fmt: skip
    job.run(spark, trigger={"availableNow": True})
    rows = spark.read.parquet(str(out)).select("number", "bound").collect()
    by_batch = {row.number: row.bound for row in rows}
    default = str(spark.conf.get(BOUND))
    asked = [by_batch[number] not in (None, default, "67108864") for number in range(7)]
    assert asked == [False, False, True, True, True, False, True], by_batch


def test_a_frame_that_hands_rows_to_python_is_known_by_its_plan(spark: SparkSession) -> None:
    """By whichever of pyspark's ways; what Java does alone is none."""
    rows = spark.range(3).selectExpr("id", "CAST(id AS STRING) AS text")

    @F.udf("long")
    def one_by_one(value: int) -> int:
        return value

    def all_of_them(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    assert not has_python(rows.where("id > 1").groupBy("text").count().orderBy("text"))
    assert has_python(rows.select(one_by_one("id").alias("n")).selectExpr("n + 1"))
    assert has_python(rows.where(one_by_one("id") > 1))
    assert has_python(rows.mapInArrow(all_of_them, rows.schema).select("id"))
    assert has_python(rows.mapInPandas(all_of_them, rows.schema).join(rows, "id"))
    assert has_python(rows.groupBy("text").applyInPandas(lambda frame: frame, rows.schema))


def with_python(frame: DataFrame) -> DataFrame:
    return frame.mapInArrow(_unchanged, frame.schema)


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


@pytest.mark.parametrize("where", ["source", "transform", "sink", "nowhere"])
def test_a_pipeline_with_other_python_says_so(spark: SparkSession, tmp_path: Path, where: str) -> None:
    """Its rows are not those that are measured."""
    job = StreamingJob("job", store=str(tmp_path / "store"), settings=settings(tmp_path))

    def read(session: SparkSession) -> DataFrame:
        frame = session.readStream.format("rate").load()
        return with_python(frame) if where == "source" else frame

    stream = job.read(read).key_by("value").aggregate(n=aggregates.count(), uid="n")
    if where == "transform":
        stream = stream.transform(with_python)
    sink = ForeachEpoch(lambda frame, epoch: None) if where == "sink" else ParquetSink(str(tmp_path / "out"))
    stream.write(sink)
    plan = job.plan()
    pipeline = plan.compiled(spark, plan.opened_sources(spark))
    assert pipeline.hands_only_its_own == (where == "nowhere")
