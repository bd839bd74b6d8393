"""The seats in one process: what the plan does to a batch, and when there is none. On executors: tests/cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from state_runtime.placement.anchors import _HELD, AnchoredPlan, Placement, has_executors, obstacle

from ..state_runtime.model import FakeClock

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
        seated = AnchoredPlan(seats, SEATS).seat(batch, "shard")
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
    placement = Placement(
        spark, 2, enabled=True, state_folder=lambda: tmp_path, wanted=lambda: (2, {}), clock=FakeClock()
    )
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
            clock=FakeClock(),
        )
        assert placement.for_epoch() is None
        assert placement.for_epoch() is None
        assert session.asked == asked
        placement.close()


class FakeFrame:
    """Seats as `Placement` makes them; nothing is planned."""

    def __init__(self) -> None:
        self.rdd = self
        self.given_back = False

    def selectExpr(self, *_: str) -> FakeFrame:
        return self

    def repartitionById(self, *_: object) -> FakeFrame:
        return self

    def select(self, *_: object) -> FakeFrame:
        return self

    def persist(self) -> FakeFrame:
        return self

    def unpersist(self) -> None:
        self.given_back = True


class FakeExecutors(Fake):
    """A session whose tasks run where the test says.

    Attributes:
        takers: who runs the tasks of the next jobs, in order.
    """

    def __init__(self, slots: int) -> None:
        super().__init__("false")
        self.defaultParallelism = slots
        self.takers: list[str] = []
        self.frames: list[FakeFrame] = []

    def range(self, *_: int) -> FakeFrame:  # type: ignore[override]
        self.frames.append(FakeFrame())
        return self.frames[-1]

    def runJob(self, _: FakeFrame, function: object, partitions: list[int]) -> list[object]:
        if type(function).__name__ == "_Look":
            return []
        taken, self.takers = self.takers[: len(partitions)], self.takers[len(partitions) :]
        return list(taken)


@pytest.fixture
def after_a_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Placement, FakeExecutors, FakeClock]:
    """Six shards on three executors, of which `a` was lost and has just registered again."""
    monkeypatch.setattr("state_runtime.placement.anchors.col", lambda name: name)
    session, clock = FakeExecutors(3), FakeClock()
    placement = Placement(
        session,  # type: ignore[arg-type]
        6,
        enabled=True,
        state_folder=lambda: tmp_path,
        wanted=lambda: (6, {}),
        clock=clock,
    )
    session.takers = list("abcabc")
    assert placement.for_epoch() is not None
    placement.ran([("op", shard, "bcbbcc"[shard]) for shard in range(6)])
    return placement, session, clock


def test_seats_that_a_starting_executor_missed_are_given_back_before_anything_moves(
    after_a_loss: tuple[Placement, FakeExecutors, FakeClock],
) -> None:
    """Else it would have one shard of its two, or none, for good."""
    placement, session, _ = after_a_loss
    first = session.frames[0]
    for early in ("bcbcab", "bcbcbc"):
        session.takers = list(early)
        plan = placement.for_epoch()
        assert plan is not None
        assert plan.frame is first  # type: ignore[comparison-overlap]
        assert session.frames[-1].given_back
    session.takers = list("abcabc")
    plan = placement.for_epoch()
    assert plan is not None
    assert plan.frame is session.frames[-1]  # type: ignore[comparison-overlap]
    assert (first.given_back, session.frames[-1].given_back) == (True, False)
    placement.for_epoch()
    assert len(session.frames) == 4, "even seats are kept"


def test_executors_that_are_not_alike_keep_uneven_seats_after_some_time(
    after_a_loss: tuple[Placement, FakeExecutors, FakeClock],
) -> None:
    """One with more cores takes more seats, however often they are dealt out."""
    placement, session, clock = after_a_loss
    for second in range(90):
        clock.advance_s(1)
        session.takers = list("bbabbc")
        placement.for_epoch()
        assert session.frames[0].given_back == (second >= 60), "an epoch a second; patient for a minute"
    assert len(session.frames) == 1 + 60 + 1
    assert [frame.given_back for frame in session.frames] == [True] * 61 + [False]


def test_seats_are_given_back_some_times_however_long_an_epoch_takes(
    after_a_loss: tuple[Placement, FakeExecutors, FakeClock],
) -> None:
    """One try in the minute in which an executor starts would be none."""
    placement, session, clock = after_a_loss
    for _ in range(9):
        clock.advance_s(600)
        session.takers = list("bbabbc")
        placement.for_epoch()
    assert [frame.given_back for frame in session.frames] == [True] * 6 + [False]
