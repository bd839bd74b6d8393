"""Jobs for the Spark tests: input files, an order-sensitive processor, and an oracle by a Spark batch query."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import (
    DeltaSink,
    IcebergSink,
    JobSettings,
    KafkaSink,
    ParquetSink,
    SqlSink,
    StreamingJob,
    aggregates,
    windows,
)
from state_runtime.pipeline.sinks import Sink
from tests.job_settings import job_settings
from tests.kafka_topics import messages, values

if TYPE_CHECKING:
    from examples.servers.postgres import PostgresServer

SCHEMA = "id long, name string, amount long"
STEPS = "id long, name string, seen long, total long, previous long"
KEYS = 40
ROWS_PER_FILE = 60


def write_input(inbox: Path, first_file: int, files: int, seed: int = 7) -> None:
    """Write numbered input files; Spark's file source takes them in the order of their modification times."""
    inbox.mkdir(parents=True, exist_ok=True)
    for number in range(first_file, first_file + files):
        draw = random.Random(seed * 1_000_003 + number)
        first = number * ROWS_PER_FILE
        table = pa.table(
            {
                "id": pa.array(range(first, first + ROWS_PER_FILE), pa.int64()),
                # A null key now and then: Spark groups null with null.
                "name": pa.array(
                    [None if draw.random() < 0.02 else f"n{draw.randrange(KEYS)}" for _ in range(ROWS_PER_FILE)]
                ),
                "amount": pa.array([draw.randrange(-50, 50) for _ in range(ROWS_PER_FILE)], pa.int64()),
            }
        )
        temporary = inbox / f".{number:05d}.parquet"
        pq.write_table(table, temporary)
        os.utime(temporary, ns=(1_700_000_000_000_000_000 + number * 1_000_000_000,) * 2)
        temporary.rename(inbox / f"{number:05d}.parquet")


class Steps(StatefulProcessor):
    """One row per input row: how many the key has had, their sum, and the amount before: depends on the order."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("steps", "seen long, total long, last long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen, total, last = self.state.get() or (0, 0, None)
        for row in sorted(rows, key=lambda r: r.id):
            seen, total = seen + 1, total + row.amount
            yield Row(id=row.id, name=key[0], seen=seen, total=total, previous=last)
            last = row.amount
        self.state.update((seen, total, last))

    def close(self) -> None:
        pass


class StepsInPandas(Steps):
    """The same in the pandas flavour."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        seen, total, last = self.state.get() or (0, 0, None)
        frame = pd.concat(list(rows)).sort_values("id", ignore_index=True)
        amounts = frame["amount"].tolist()
        totals, previous = [], []
        for amount in amounts:
            total += amount
            totals.append(total)
            previous.append(last)
            last = amount
        self.state.update((seen + len(amounts), total, last))
        yield pd.DataFrame(
            {
                "id": frame["id"],
                "name": [key[0]] * len(amounts),
                "seen": range(seen + 1, seen + 1 + len(amounts)),
                "total": totals,
                "previous": pd.array(previous, dtype="Int64"),
            }
        )


class Flaky(Steps):
    """Fails in the middle of the first attempt of every task that has key n1: Spark runs the task again."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        context = TaskContext.get()
        if key[0] == "n1" and context is not None and context.attemptNumber() == 0:
            raise RuntimeError("a machine fault")


def settings(root: Path, **changes: Any) -> JobSettings:
    """Small settings, so that few epochs pass through every mechanism."""
    defaults: dict[str, Any] = {
        "parallelism": 2,
        "local_dir": str(root / "local"),
        "scratch_dir": str(root / "scratch"),
        "heartbeat_interval_s": 0.2,
        "materialize_max_segments": 4,
        "runs_max": 2,
    }
    return job_settings(**{**defaults, **changes})


class StepsWithNote(Steps):
    """Its state has a column more; what it gives is the same."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("steps", "seen long, total long, last long, note string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen, total, last, _ = self.state.get() or (0, 0, None, None)
        for row in sorted(rows, key=lambda r: r.id):
            seen, total = seen + 1, total + row.amount
            yield Row(id=row.id, name=key[0], seen=seen, total=total, previous=last)
            last = row.amount
        self.state.update((seen, total, last, f"of {key[0]}"))


def windowed_job(root: Path, *, parallelism: int) -> StreamingJob:
    """Event time, a window whose rows Spark may aggregate first, and shards that wake without rows."""
    job = StreamingJob("windows", store=str(root / "store"), settings=settings(root, parallelism=parallelism))
    (
        job.read(
            lambda spark: (
                spark.readStream.schema("id long, name string, amount long")
                .option("maxFilesPerTrigger", 1)
                .parquet(str(root / "in"))
                .selectExpr("*", "timestamp_seconds(id) AS at")
                .withWatermark("at", "10 seconds")
            )
        )
        .key_by("name")
        .window(windows.tumbling("30 seconds"), uid="w", output_mode="append", n=aggregates.count(), t=aggregates.sum("amount"))
        .write(ParquetSink(str(root / "out")))
    )  # fmt: skip
    return job


def two_step_job(
    root: Path,
    processor: StatefulProcessor | None = None,
    *,
    name: str = "steps",
    store: str = "",
    storage_options: Mapping[str, Any] | None = None,
    files_per_trigger: int = 1,
    sinks: tuple[Sink, Sink] | None = None,
    **changes: Any,
) -> StreamingJob:
    """Two stateful operators with stateless code between them and a sink on each."""
    processor = processor or Steps()
    parquet = ParquetSink(str(root / "out-steps"), epoch_column=None), ParquetSink(str(root / "out-buckets"))
    of_steps, of_buckets = sinks or parquet
    job = StreamingJob(
        name,
        store=store or str(root / "store"),
        storage_options=storage_options,
        settings=settings(root, **changes),
    )
    keyed = job.read(
        lambda spark: (
            spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_per_trigger).parquet(str(root / "in"))
        )
    ).key_by("name")
    pandas = isinstance(processor, StepsInPandas)
    apply = keyed.transform_with_state_in_pandas if pandas else keyed.transform_with_state
    (
        apply(processor, STEPS, uid="steps")
        .write(of_steps, name="steps")
        .transform(positive)
        .key_by("bucket", "even")
        .aggregate(
            uid="buckets",
            n=aggregates.count(),
            n_previous=aggregates.count("previous"),
            total=aggregates.sum("total"),
            least=aggregates.min("name"),
            most=aggregates.max("total"),
            mean=aggregates.avg("previous"),
        )
        .write(of_buckets, name="buckets")
    )
    return job


def delta_sinks(root: Path) -> tuple[DeltaSink, DeltaSink]:
    """The sinks of the two-step job as Delta tables: all steps, and the newest row of each bucket."""
    return DeltaSink(str(root / "out-steps")), DeltaSink(str(root / "out-buckets"), merge_on=["bucket", "even"])


def iceberg_options(root: Path) -> dict[str, str]:
    """A catalog in a file, which needs no server."""
    return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/warehouse"}


def iceberg_sinks(root: Path) -> tuple[IcebergSink, IcebergSink]:
    """The same as Iceberg tables."""
    options = iceberg_options(root)
    steps = IcebergSink("shop.steps", catalog="lake", catalog_options=options)
    return steps, IcebergSink("shop.buckets", catalog="lake", catalog_options=options, merge_on=["bucket", "even"])


DATABASE_ENV = "STILLSTATE_TEST_DATABASE"
"""The variable with the address of the database of `sql_sinks`."""


def sql_sinks() -> tuple[SqlSink, SqlSink]:
    """The sinks of the two-step job as tables in PostgreSQL: all steps, and the newest row of each bucket."""
    return (
        SqlSink("steps", dsn_env=DATABASE_ENV),
        SqlSink("buckets", dsn_env=DATABASE_ENV, merge_on=["bucket", "even"]),
    )


def kafka_sinks(servers: str, end: str = "") -> tuple[KafkaSink, KafkaSink]:
    """The same as topics: all steps, and the newest record of each bucket."""
    steps = KafkaSink(f"steps{end}", bootstrap_servers=servers, key="name")
    return steps, KafkaSink(f"buckets{end}", bootstrap_servers=servers, key=["bucket", "even"])


def positive(frame: DataFrame) -> DataFrame:
    """Stateless code between the operators: drops rows, adds columns."""
    return frame.where("total > 0").selectExpr("*", "length(name) AS bucket", "seen % 2 = 0 AS even")


ORACLE_STEPS = """
    SELECT id, name,
           count(*) OVER w AS seen, sum(amount) OVER w AS total, lag(amount) OVER (PARTITION BY name ORDER BY id) AS previous
    FROM input
    WINDOW w AS (PARTITION BY name ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""
ORACLE_BUCKETS = """
    SELECT length(name) AS bucket, seen % 2 = 0 AS even, count(*) AS n, count(previous) AS n_previous, sum(total) AS total,
           min(name) AS least, max(total) AS most, avg(previous) AS mean
    FROM steps WHERE total > 0 GROUP BY 1, 2
"""


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    """All rows, comparable whatever their order."""
    return sorted((tuple(row) for row in frame.collect()), key=repr)


def assert_equals_batch(spark: SparkSession, root: Path) -> None:
    """Both outputs equal a recomputation of the whole input by Spark batch queries: no loss, no duplicate."""
    spark.read.schema(SCHEMA).parquet(str(root / "in")).createOrReplaceTempView("input")
    expected = spark.sql(ORACLE_STEPS)
    expected.createOrReplaceTempView("steps")
    actual = spark.read.parquet(str(root / "out-steps")).select(expected.columns)
    assert rows_of(actual) == rows_of(expected)
    buckets = spark.sql(ORACLE_BUCKETS)
    newest = newest_per_key(spark.read.parquet(str(root / "out-buckets")), ["bucket", "even"])
    assert rows_of(newest.select(buckets.columns)) == rows_of(buckets)


def assert_delta_equals_batch(spark: SparkSession, root: Path) -> None:
    """Both tables equal a recomputation of the whole input: no loss, no duplicate."""
    for name, expected in expected_tables(spark, root):
        table = DeltaTable(str(root / f"out-{name}")).to_pyarrow_table().select(expected.columns)
        actual = sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)
        assert actual == rows_of(expected)


def assert_iceberg_equals_batch(spark: SparkSession, root: Path) -> None:
    """The same of Iceberg tables."""
    for name, expected in expected_tables(spark, root):
        table = load_catalog("lake", **iceberg_options(root)).load_table(f"shop.{name}").scan().to_arrow()
        rows = table.select(expected.columns).to_pylist()
        assert sorted((tuple(row.values()) for row in rows), key=repr) == rows_of(expected)


def assert_sql_equals_batch(spark: SparkSession, root: Path, server: PostgresServer, database: str) -> None:
    """The same of the tables in a database."""
    for name, expected in expected_tables(spark, root):
        found = server.execute(f"SELECT {', '.join(expected.columns)} FROM {name}", database)
        assert sorted(found, key=repr) == rows_of(expected)


def expected_tables(spark: SparkSession, root: Path) -> Iterator[tuple[str, DataFrame]]:
    """What the two tables of the two-step job should have, by a query of the whole input."""
    spark.read.schema(SCHEMA).parquet(str(root / "in")).createOrReplaceTempView("input")
    for name, oracle in (("steps", ORACLE_STEPS), ("buckets", ORACLE_BUCKETS)):
        expected = spark.sql(oracle)
        expected.createOrReplaceTempView(name)
        yield name, expected


def assert_kafka_equals_batch(spark: SparkSession, root: Path, servers: str, end: str = "") -> None:
    """Both topics equal a recomputation of the whole input: no loss, no duplicate."""
    spark.read.schema(SCHEMA).parquet(str(root / "in")).createOrReplaceTempView("input")
    newest = {message.key(): json.loads(message.value()) for message in messages(servers, f"buckets{end}")}
    found = {"steps": values(servers, f"steps{end}"), "buckets": list(newest.values())}
    for name, oracle in (("steps", ORACLE_STEPS), ("buckets", ORACLE_BUCKETS)):
        expected = spark.sql(oracle)
        expected.createOrReplaceTempView(name)
        actual = sorted((tuple(row[column] for column in expected.columns) for row in found[name]), key=repr)
        assert actual == rows_of(expected)


def newest_per_key(updates: DataFrame, keys: Iterable[str]) -> DataFrame:
    """The last update of each key; two in one epoch would be a duplicate and stay visible."""
    names = list(keys)
    newest = updates.groupBy(*names).agg({"epoch": "max"}).withColumnRenamed("max(epoch)", "epoch")
    conditions = [updates[k].eqNullSafe(newest[k]) for k in [*names, "epoch"]]
    return updates.join(newest, conditions, "left_semi")
