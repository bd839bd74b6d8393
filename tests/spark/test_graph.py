"""Whole jobs whose graph is not written from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from state_runtime import ParquetSink, StreamingJob, aggregates
from state_runtime.base.settings import JobSettings

pytestmark = pytest.mark.spark

SCHEMA = "k string, n long"


def test_a_sink_gets_the_rows_of_the_stream_that_it_was_written_to_wherever_its_line_stands(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also behind the lines of steps that come later in the stream; each row once."""
    spark.createDataFrame([("a", 1), ("b", 2), ("a", 3)], SCHEMA).write.parquet(str(tmp_path / "in"))
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    job = StreamingJob("sinks", store=str(tmp_path / "store"), settings=settings)
    raw = job.read(lambda session: session.readStream.schema(SCHEMA).parquet(str(tmp_path / "in")))
    large = raw.transform(lambda df: df.where("n > 1"))
    counted = large.key_by("k").aggregate(uid="n", total=aggregates.sum("n"))
    for name, stream in (("counted", counted), ("raw", raw), ("large", large), ("again", raw)):
        stream.write(ParquetSink(str(tmp_path / name)), name=name)
    job.run(spark, trigger={"available_now": True})
    found = {
        name: sorted(map(tuple, spark.read.parquet(str(tmp_path / name)).drop("epoch").collect()))
        for name in ("raw", "again", "large", "counted")
    }
    everything = [("a", 1), ("a", 3), ("b", 2)]
    totals = [("a", 3), ("b", 2)]
    assert found == {"raw": everything, "again": everything, "large": everything[1:], "counted": totals}
