"""A job that reads several sources, and what it gives by a Spark batch query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import ParquetSink, StreamingJob, aggregates, windows
from tests.job_settings import job_settings

from .branches import SCHEMA, Running, found, unchanged

DELAY_S = {"orders": 10, "refunds": 60, "visits": 30}


def read(spark: SparkSession, root: Path, name: str, files: int = 1) -> DataFrame:
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files).parquet(str(root / name))
    return frame.withWatermark("at", f"{DELAY_S[name]} seconds")


def several(
    root: Path, names: Sequence[str], running: Running | None = None, *, files: int = 1, **given: Any
) -> StreamingJob:
    """All sources in one stream, counted by source and by window; and the windows of orders alone.

    Args:
        names: of the sources, in the order in which they are read; one of them is `orders`.
        running: an operator before the windows of orders.
        files: of a batch, of each source.
    """
    settings = job_settings(**{"parallelism": 3, "local_dir": str(root / "local"), **given})
    job = StreamingJob("several", store=str(root / "store"), settings=settings)
    streams = {name: job.read(lambda spark, name=name: read(spark, root, name, files), name=name) for name in names}
    labelled = [
        streams[name].transform(lambda df, name=name: df.selectExpr(f"'{name}' AS source", "*"))
        for name in sorted(names)
    ]
    united = labelled[0].union(*labelled[1:]) if len(labelled) > 1 else labelled[0].transform(unchanged)
    united.key_by("source").aggregate(uid="per-source", n=aggregates.count(), amount=aggregates.sum("amount")).write(
        ParquetSink(str(root / "per-source")), name="per-source"
    )
    united.window(windows.tumbling("30 seconds"), uid="windows", output_mode="append", n=aggregates.count()).write(
        ParquetSink(str(root / "windows")), name="windows"
    )
    orders = streams["orders"]
    if running is not None:
        orders = orders.key_by("id").transform_with_state(running, SCHEMA, uid="running", event_time_column="at")
    orders.window(windows.tumbling("30 seconds"), uid="of-orders", output_mode="append", n=aggregates.count()).write(
        ParquetSink(str(root / "of-orders")), name="of-orders"
    )
    return job


def check_totals(spark: SparkSession, root: Path, *names: str) -> None:
    """Of each source each row was counted once."""
    rows = spark.read.parquet(str(root / "per-source")).groupBy("source")
    ours = rows.agg(F.max("n").alias("n"), F.max_by("amount", "epoch").alias("amount"))
    wanted = {}
    for name in names:
        counted = spark.read.schema(SCHEMA).parquet(str(root / name)).agg(F.count("*"), F.sum("amount")).first()
        assert counted is not None
        wanted[name] = tuple(counted)
    assert {row.source: (row.n, row.amount) for row in ours.collect()} == wanted


def check_windows(spark: SparkSession, root: Path, output: str, *names: str, until_s: int) -> None:
    """The windows that end by then, of all sources that are named."""
    given = [spark.read.schema(SCHEMA).parquet(str(root / name)) for name in names]
    united = given[0]
    for frame in given[1:]:
        united = united.union(frame)
    over = united.groupBy(F.window("at", "30 seconds")).agg(F.count("*").alias("n"))
    wanted = over.where(F.col("window.end") <= F.timestamp_seconds(F.lit(until_s))).selectExpr("window.end", "n")
    assert found(spark, root, output, "window.end", "n") == Counter(map(tuple, wanted.collect()))


def latest_s(spark: SparkSession, root: Path, name: str) -> int:
    """The watermark of a source at its end, in seconds."""
    row = spark.read.schema(SCHEMA).parquet(str(root / name)).agg(F.max("at").cast("long").alias("at")).first()
    assert row is not None
    return int(row["at"]) - DELAY_S[name]
