"""A job with branches: several steps read one stream, and branches come together again; and what it gives by a Spark batch query."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import ParquetSink, StreamingJob, aggregates, windows
from tests.job_settings import job_settings

SCHEMA = "id long, shop string, amount long, at timestamp"
FILES, ROWS = 4, 120
BEGIN_S = 1_700_000_000


def write_input(inbox: Path, files: int = FILES, first: int = 0, rows: int = ROWS) -> None:
    """Rows of two minutes a file, some of them twice, some without a shop, none late."""
    inbox.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + files):
        draw = random.Random(number)
        ids = [number * ROWS + draw.randrange(ROWS) for _ in range(rows)]
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "shop": pa.array([draw.choice(["a", "b", "c", "d", None]) for _ in ids]),
                "amount": pa.array([draw.randrange(100) for _ in ids], pa.int64()),
                "at": pa.array([(BEGIN_S + each) * 1_000_000 for each in ids], pa.timestamp("us", "UTC")),
            }
        )
        temporary = inbox / f".{number}"
        pq.write_table(table, temporary)
        # Spark takes files in the order of their times.
        os.utime(temporary, ns=((BEGIN_S + number) * 1_000_000_000,) * 2)
        temporary.rename(inbox / f"{number:03}.parquet")


class Running(StatefulProcessor):
    """How many rows an id has had, and the sum of what they say."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("sums", "rows long, amount long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count, total = self.state.get() or (0, 0)
        for row in rows:
            count, total = count + 1, total + row.amount
            yield Row(id=key[0], shop=row.shop, amount=row.amount, at=row.at)
        self.state.update((count, total))

    def close(self) -> None:
        pass


class Flaky(Running):
    """Fails in the first attempt of each task: Spark runs it again."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            raise RuntimeError("a machine fault")


class Slow(Running):
    """Takes two milliseconds a row, as code that asks another service does."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in super().handleInputRows(key, rows, timerValues):
            threading.Event().wait(0.002)
            yield row


def read(spark: SparkSession, root: Path, files: int = 1) -> DataFrame:
    return (
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", files)
        .parquet(str(root / "in"))
        .withWatermark("at", "10 seconds")
    )


def unchanged(frame: DataFrame) -> DataFrame:
    return frame


def diamond(
    root: Path,
    running: Running | None = None,
    *,
    files: int = 1,
    between: Callable[[DataFrame], DataFrame] = unchanged,
    **settings: Any,
) -> StreamingJob:
    """One source, three readers; one operator, three readers; three branches that come together before another one.

    Args:
        files: of a batch.
        between: of one branch, which changes no row.
    """
    made = job_settings(**{"parallelism": 3, "local_dir": str(root / "local"), **settings})
    job = StreamingJob("diamond", store=str(root / "store"), settings=made)
    rows = job.read(lambda spark: read(spark, root, files))
    first = rows.key_by("id").transform_with_state(
        running or Running(), "id long, shop string, amount long, at timestamp", uid="running", event_time_column="at"
    )
    cheap = first.transform(lambda df: between(df.where("amount < 50").select("id", "amount", "at")))
    dear = rows.transform(lambda df: df.where("amount >= 90").selectExpr("id", "amount * 10 AS amount", "at"))
    both = cheap.union(dear).union_by_name(
        first.transform(lambda df: df.where("shop = 'a'").select("at", "id")), allow_missing_columns=True
    )
    per_window = both.window(
        windows.tumbling("30 seconds"), uid="windows", output_mode="append", n=aggregates.count(),
        amount=aggregates.sum("amount"),
    )  # fmt: skip
    rows.aggregate(uid="all", n=aggregates.count(), most=aggregates.max("amount")).write(
        ParquetSink(str(root / "all")), name="all"
    )
    first.write(ParquetSink(str(root / "first")), name="first")
    both.write(ParquetSink(str(root / "both")), name="both")
    per_window.write(ParquetSink(str(root / "windows")), name="windows")
    per_window.key_by("n").aggregate(uid="alike", windows=aggregates.count()).write(
        ParquetSink(str(root / "alike")), name="alike"
    )
    return job


def found(spark: SparkSession, root: Path, name: str, *columns: str) -> Counter[tuple[Any, ...]]:
    return Counter(map(tuple, spark.read.parquet(str(root / name)).select(*columns).collect()))


def check_diamond(spark: SparkSession, root: Path, *, is_ended: bool) -> None:
    """Against a batch query of all input. The windows that are not over are in the state, unless the job was drained."""
    given = spark.read.schema(SCHEMA).parquet(str(root / "in"))
    cheap = given.where("amount < 50").select("id", "amount", "at")
    dear = given.where("amount >= 90").selectExpr("id", "amount * 10 AS amount", "at")
    ours = given.where("shop = 'a'").selectExpr("id", "CAST(NULL AS BIGINT) AS amount", "at")
    both = cheap.union(dear).union(ours)
    assert found(spark, root, "first", "id", "shop", "amount") == Counter(
        map(tuple, given.select("id", "shop", "amount").collect())
    )
    assert found(spark, root, "both", "id", "amount", "at") == Counter(map(tuple, both.collect()))
    latest = given.agg(F.max("at")).first()
    assert latest is not None
    over = both.groupBy(F.window("at", "30 seconds")).agg(F.count("*").alias("n"), F.sum("amount").alias("amount"))
    if not is_ended:
        over = over.where(F.col("window.end") <= F.lit(latest[0]) - F.expr("INTERVAL 10 SECONDS"))
    expected = over.selectExpr("window.end", "n", "amount")
    assert found(spark, root, "windows", "window.end", "n", "amount") == Counter(map(tuple, expected.collect()))
    everything = spark.read.parquet(str(root / "all")).orderBy(F.desc("epoch")).first()
    assert everything is not None
    assert (everything.n, everything.most) == (given.count(), 99)
    alike = spark.read.parquet(str(root / "alike")).groupBy("n").agg(F.max("windows").alias("windows"))
    counted = expected.groupBy("n").agg(F.count("*").alias("windows"))
    assert Counter(map(tuple, alike.collect())) == Counter(map(tuple, counted.collect()))
