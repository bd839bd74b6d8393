"""The driver of a job that is a plain query: `python -m tests.spark.drive_queries ROOT PARALLELISM`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import ParquetSink, StreamingJob
from state_runtime.spark.session import build_session

from ..job_settings import job_settings
from .plain_queries import ONCE, stream

CONF = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC"}


def paid_in_windows(root: Path, parallelism: int) -> StreamingJob:
    """Orders, each once, with what was paid for them, counted by windows: three operators and a branch of one."""

    def query(spark: SparkSession) -> DataFrame:
        near = F.expr("o.order = p.order AND paid_at > at - INTERVAL 5 SECONDS AND paid_at < at + INTERVAL 12 SECONDS")
        once = stream(spark, root, "orders").dropDuplicates(["order", "at"]).alias("o")
        joined = once.join(stream(spark, root, "payments").alias("p"), near, "left")
        return joined.groupBy(F.window("at", "10 seconds"), "shop").agg(
            F.count("*").alias("n"), F.sum("paid").alias("paid")
        )

    settings = job_settings(parallelism=parallelism, local_dir=str(root / "local"))
    job = StreamingJob("queries", store=str(root / "store"), settings=settings)
    job.query(query).write(ParquetSink(str(root / "out")))
    return job


def main(root: Path, parallelism: int) -> None:
    # Before the session: Spark's workers get their environment from the JVM, and the JVM's is this one.
    os.environ["STILLSTATE_DRIVER_PID"] = str(os.getpid())
    spark = build_session("queries", "local[2]", {**CONF, "spark.local.dir": str(root / "spark")})
    paid_in_windows(root, parallelism).run(spark, trigger=ONCE)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
