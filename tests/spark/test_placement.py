"""The seats in one process: what the plan does to a batch, and when there is none. On executors: tests/cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from state_runtime.placement import _HELD, Placement, SeatedPlan, has_executors, obstacle

pytestmark = pytest.mark.spark
SEATS = (2, 0, 3, 1)


def with_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        partition = pa.array([context.partitionId()] * batch.num_rows, pa.int32())
        yield batch.append_column("partition", partition)


def test_a_batch_keeps_its_rows_and_columns_and_each_shard_is_on_its_seat(spark: SparkSession) -> None:
    """Also a shard whose seat has gone from the cached frame keeps its rows."""
    seats = spark.createDataFrame([(0,), (1,), (2,)], f"{_HELD} int").repartitionById(4, col(_HELD)).persist()
    try:
        batch = spark.range(0, 1000).selectExpr(
            "id", "CAST(id % 4 AS INT) AS shard", "IF(id % 3 = 0, NULL, 'x') AS name"
        )
        seated = SeatedPlan(seats, SEATS).seat(batch, "shard")
        assert seated.schema == batch.schema
        rows = seated.mapInArrow(with_partition, "id long, shard int, name string, partition int").collect()
        assert sorted((r.id, r.shard, r.name) for r in rows) == sorted(tuple(r) for r in batch.collect())
        assert {(r.shard, r.partition) for r in rows} == set(enumerate(SEATS))
        plan = seated._jdf.queryExecution().executedPlan().toString()
        assert "ShuffledHashJoin" in plan
        assert plan.split("InMemoryTableScan")[0].count("Exchange") == 1, f"the join adds none: {plan}"
    finally:
        seats.unpersist()


def test_in_one_process_nothing_is_added_to_a_plan(spark: SparkSession, tmp_path: Path) -> None:
    """Local mode pays nothing for what it does not need; it still knows where shards ran."""
    assert not has_executors(spark)
    placement = Placement(spark, 2, enabled=True, state_folder=lambda: tmp_path, wanted=lambda: (2, {}))
    assert placement.for_epoch() is None
    assert placement.ran([("a", 0, "x"), ("a", 1, "x"), ("b", 0, "x")]) == 0
    assert placement.ran([("a", 0, "y"), ("a", 1, "x")]) == 1
    assert placement.ran([("b", 0, "x"), ("a", 0, "y")]) == 0
    placement.close()


def test_a_session_that_cannot_pin_says_why(spark: SparkSession) -> None:
    """Spark's own defaults are in the way of both."""
    assert obstacle(spark) == ""
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        assert "spark.sql.adaptive.enabled" in obstacle(spark)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", str(before))


class Fake:
    """A session on executors, as far as `Placement` looks before it takes seats; taking them fails."""

    def __init__(self, shuffle_locality: str) -> None:
        self.sparkContext = self
        self.master = "spark://somewhere:7077"
        self.applicationId = "app"
        self.defaultParallelism = 4
        self.conf = self
        self._values = {"spark.shuffle.reduceLocality.enabled": shuffle_locality, "spark.sql.adaptive.enabled": "false"}
        self.asked = 0

    def getConf(self) -> Fake:
        return self

    def get(self, key: str, default: str | None = None) -> str | None:
        return self._values.get(key, default)

    def range(self, *_: int) -> None:
        self.asked += 1
        raise RuntimeError("an executor died")


def test_seats_that_cannot_be_taken_do_not_end_the_epoch(tmp_path: Path) -> None:
    """Each epoch tries again; a session in which it makes no sense never does."""
    fine, hindered = Fake("false"), Fake("true")
    for session, asked in ((fine, 2), (hindered, 0)):
        placement = Placement(
            session,  # type: ignore[arg-type]
            4,
            enabled=True,
            state_folder=lambda: tmp_path,
            wanted=lambda: (4, {}),
        )
        assert placement.for_epoch() is None
        assert placement.for_epoch() is None
        assert session.asked == asked
        placement.close()
