"""The job of `benchmarks.restart`: counts and sums by key, from a folder of small files, to Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state_runtime import JobContext, ParquetSink, StreamingJob, aggregates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["KEYS", "SCHEMA", "build"]

SCHEMA = "key BIGINT, value DOUBLE"
KEYS = 20_000


def build(context: JobContext) -> StreamingJob:
    """Options: ``inbox`` and ``output``, folders."""
    inbox, output = str(context.options["inbox"]), str(context.options["output"])

    def rows(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 50).parquet(inbox)

    job = context.job()
    stream = job.read(rows).key_by("key")
    stream.aggregate(uid="by-key", rows=aggregates.count(), total=aggregates.sum("value")).write(
        ParquetSink(output), name="by-key"
    )
    return job
