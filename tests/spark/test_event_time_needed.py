"""What goes by event time needs a column that has it, and says where one comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime import StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline

pytestmark = pytest.mark.spark


def ticks(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()


def refused(spark: SparkSession, tmp_path: Path, build: Callable[[StreamingJob], Any]) -> str:
    job = StreamingJob("timeless", store=str(tmp_path / "store"))
    build(job)
    plan = job.plan()
    with pytest.raises(InvalidPipeline) as told:
        plan.compiled(spark, plan.opened_source(spark))
    return str(told.value)


def windowed(stream: Any) -> Any:
    return stream.window(windows.tumbling("1 minute"), uid="per-minute", n=aggregates.count())


def test_a_stream_without_a_watermark_is_told_of_with_watermark(spark: SparkSession, tmp_path: Path) -> None:
    message = refused(spark, tmp_path, lambda job: windowed(job.read(ticks).key_by("value")))
    assert message.startswith(
        "operator 'per-minute': windows need a column with event time; call Spark's withWatermark"
    )


def test_behind_a_join_the_reason_is_the_join(spark: SparkSession, tmp_path: Path) -> None:
    """Both sides have a watermark: to call it once more would not help."""

    def build(job: StreamingJob) -> None:
        left = ticks(spark).withWatermark("timestamp", "1 second")
        right = ticks(spark).selectExpr("value AS id", "timestamp AS at").withWatermark("at", "1 second")
        joined = job.read(left).key_by("value").interval_join(
            right, right_keys=("id",), lower="0 seconds", upper="1 second", uid="join"
        )  # fmt: skip
        windowed(joined.key_by("value"))

    message = refused(spark, tmp_path, build)
    assert "the output of an interval join has none" in message
    assert "withWatermark" not in message
