"""Three jobs, for drivers of several versions of Spark in turn: `python -m tests.spark.across_versions ROOT`.

A processor with an aggregate behind it, a window of event time, and a plain query: state of all kinds of operators whose types or
names come out of Spark.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyspark
from pyspark.sql import DataFrame, SparkSession

from state_runtime import ParquetSink, StreamingJob, build_session

from .jobs import settings, two_step_job, windowed_job

JOBS = ("steps", "windows", "queries")
_QUERY = """
    WITH per_name AS (
        SELECT window(at, '30 seconds') AS w, name, count(*) AS n, sum(amount) AS total, avg(amount) AS mean,
               max(struct(id, amount)) AS last, collect_set(amount % 3) AS rests
        FROM numbers WHERE amount > -45 GROUP BY 1, 2
    )
    SELECT w.end AS until, name, n, total, mean, last.amount AS last, size(rests) AS rests FROM per_name
"""


def query_job(root: Path) -> StreamingJob:
    def numbers(spark: SparkSession) -> DataFrame:
        read = spark.readStream.schema("id long, name string, amount long").option("maxFilesPerTrigger", 1)
        rows = read.parquet(str(root / "in")).selectExpr("*", "timestamp_seconds(id) AS at")
        return rows.withWatermark("at", "10 seconds")

    job = StreamingJob("queries", store=str(root / "store"), settings=settings(root))
    job.sql(_QUERY, numbers=numbers).write(ParquetSink(str(root / "out-queries")))
    return job


def run_all(spark: SparkSession, root: Path) -> None:
    """Let each job read what is there."""
    for job in (two_step_job(root), windowed_job(root, parallelism=2), query_job(root)):
        job.run(spark, trigger={"availableNow": True})


def main() -> None:
    conf = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}
    run_all(build_session("across", "local[2]", conf), Path(sys.argv[1]))
    print(pyspark.__version__)


if __name__ == "__main__":
    main()
