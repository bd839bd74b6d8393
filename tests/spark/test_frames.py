"""Plans in few calls of the JVM: counted, and the same rows as pyspark's public ways give."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j import clientserver
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from state_runtime.driver import engine
from state_runtime.driver import epochs as driver
from state_runtime.spark import prepared
from state_runtime.spark.frames import Frames, PublicFrames
from state_runtime.spark.prepared import PreparedFrames, frames_of

from ..refusal import nothing_known
from .jobs import assert_equals_batch, rows_of, two_step_job, windowed_job, write_input

pytestmark = pytest.mark.spark

ONCE = {"availableNow": True}
CALLS_OF_AN_EPOCH = {"a task for each shard": 36, "narrow": 36}
"""Of the JVM, in the epoch of a chain of two operators with the user's code between them, from its frame to its checkpoint.

The plan is one of before, of which the nodes above the rows and the functions are made again. With pyspark's public
ways they are 135. Raise it for a reason only, and say in docs/design/0033-floor.md which."""


@dataclass
class Calls:
    """Calls of the JVM, by the thread that is inside `counted`."""

    counts: list[int] = field(default_factory=list)
    _thread: int = 0
    _now: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._thread, self._now = threading.get_ident(), 0
        try:
            yield
        finally:
            self._thread = 0
            self.counts.append(self._now)

    def called(self, command: str) -> None:
        # Python's collector gives objects of the JVM back whenever it likes.
        if threading.get_ident() == self._thread and not command.startswith("m\n"):
            self._now += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    send, run_batch = clientserver.ClientServerConnection.send_command, driver.EpochDriver.run_batch

    def counting_send(self: Any, command: str) -> Any:
        made.called(command)
        return send(self, command)

    def counting_run(self: Any, *arguments: Any) -> None:
        with made.counted():
            run_batch(self, *arguments)

    monkeypatch.setattr(clientserver.ClientServerConnection, "send_command", counting_send)
    monkeypatch.setattr(driver.EpochDriver, "run_batch", counting_run)
    return made


@pytest.mark.parametrize("kind", CALLS_OF_AN_EPOCH)
def test_an_epoch_calls_the_jvm_so_many_times_and_no_more(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, kind: str
) -> None:
    """Each call is a fifth of a millisecond and more on a busy machine, and hundreds of them were a quarter of a small epoch.

    The least of several epochs: now and then one has something else to do, such as a look at what is to be folded.
    """
    monkeypatch.setattr(engine.SingleTask, "choose", lambda *_, **__: kind == "narrow")
    write_input(tmp_path / "in", 0, 6)
    two_step_job(tmp_path).run(spark, trigger=ONCE)
    assert len(calls.counts) == 6
    assert min(calls.counts) == CALLS_OF_AN_EPOCH[kind], calls.counts


class Doubled:
    """A function of rows, as a stage's is: another one in each epoch."""

    def __init__(self, plus: int) -> None:
        self.plus = plus

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = [2 * n + self.plus for n in batch.column("odd name").to_pylist()]
            yield pa.RecordBatch.from_pydict({"x": pa.array(found, pa.int64())})


@pytest.mark.parametrize("ways", [PublicFrames, PreparedFrames])
def test_each_step_gives_the_rows_of_pysparks_public_one(spark: SparkSession, ways: Callable[..., Frames]) -> None:
    frames = ways(spark) if ways is PreparedFrames else ways()
    output = T.StructType([T.StructField("x", T.LongType())])
    aggregates_of = ("max(`odd name`)", "min(if(part = 9, part, null))", "count(1)")
    for plus in (0, 1):
        rows = frames.select(spark.range(0, 100, 1, 3), ("id AS `odd name`", "CAST(id % 4 AS INT) AS part", "'a' AS s"))
        observed, seen = frames.observe(rows, aggregates_of)
        placed = frames.numbered(observed, 4, "part")
        where = placed.selectExpr("part", "spark_partition_id() AS at").collect()
        assert {(r.part, r.at) for r in where} == {(n, n) for n in range(4)}
        made = frames.map_in_arrow(placed, (Doubled(plus), output), ("odd name", "part", "s"), 0)
        frames.run([made])
        assert list(seen(made)) == [99, None, 100]
        assert rows_of(made) == sorted(((2 * n + plus,) for n in range(100)), key=repr)
        kept = frames.kept("numbers", lambda: spark.range(3).toDF("n"))
        assert rows_of(rows.selectExpr("part AS n").unionByName(kept).where("n = 2")) == [(2,)] * 26


@pytest.mark.parametrize("ways", [PublicFrames, PreparedFrames])
def test_shared_rows_are_made_once_in_their_places_for_all_their_readers(
    spark: SparkSession, tmp_path: Path, ways: Callable[..., Frames]
) -> None:
    """Whatever the readers make of them: other columns, other rows; and also if Spark knows that there is no row."""
    frames = ways(spark) if ways is PreparedFrames else ways()

    def noted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            (tmp_path / os.urandom(8).hex()).touch()
            yield batch

    made = frames.map_in_arrow(spark.range(0, 90, 1, 3), (noted, T.StructType.fromDDL("id long")), ("id",), 0)
    _, shared = frames.shared(made)
    few = shared.where("id < 10").selectExpr(
        "id", "spark_partition_id() AS at", "monotonically_increasing_id() AS place"
    )
    frames.run([few, shared.selectExpr("CAST(id AS STRING) AS text"), shared.where("id % 2 = 0")])
    assert len(list(tmp_path.iterdir())) == 3, "a task for each partition, each of one batch"
    _, shared = frames.shared(spark.range(0, 90, 1, 3).toDF("id"))
    places = shared.selectExpr("id", "monotonically_increasing_id() AS place")
    frames.run([shared])
    assert rows_of(places) == sorted(
        (((n // 30) * 30 + n % 30, ((n // 30) << 33) + n % 30) for n in range(90)), key=repr
    )
    _, none = frames.shared(spark.range(0, 90, 1, 3).where("false").toDF("id"))
    frames.run([none, none.where("id > 3")])


def test_a_large_function_and_a_broadcast_in_one_arrive(spark: SparkSession) -> None:
    """A broadcast that a user's processor holds travels beside its function; a function of megabytes as one itself."""
    frames, shared, output = PreparedFrames(spark), spark.sparkContext.broadcast(7), "x long"

    def function(extra: bytes) -> Callable[..., Any]:
        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            list(batches)
            yield pa.RecordBatch.from_pydict({"x": [shared.value, len(extra)]})

        return run

    schema = T.StructType.fromDDL(output)
    for size in (1, 2 << 20):
        made = frames.map_in_arrow(spark.range(0, 1, 1, 1).toDF("n"), (function(bytes(size)), schema), ("n",), 0)
        assert rows_of(made) == sorted([(7,), (size,)], key=repr)
    shared.destroy()


@pytest.mark.parametrize("make", ["two steps", "windows"])
def test_a_job_planned_by_public_ways_gives_what_a_prepared_one_gives(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str
) -> None:
    """They are what is left where a version of Spark is made in another way inside."""
    outputs = []
    for ways in ("prepared", "public"):
        root = tmp_path / ways
        write_input(root / "in", 0, 4)
        if ways == "public":
            monkeypatch.setattr(engine, "frames_of", lambda _: PublicFrames())
        job = two_step_job(root) if make == "two steps" else windowed_job(root, parallelism=3)
        job.run(spark, trigger=ONCE)
        if make == "two steps":
            assert_equals_batch(spark, root)
        outputs.append(rows_of(spark.read.parquet(str(root / ("out" if make == "windows" else "out-steps")))))
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_where_spark_is_made_in_another_way_the_public_ways_are_taken(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, when a run begins, not found out in the middle of an epoch."""
    with nothing_known():
        assert isinstance(frames_of(spark), PreparedFrames)

    def other(*_: Any) -> Any:
        raise TypeError("'JavaPackage' object is not callable")

    with nothing_known(), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(prepared._ArrowFunctions, "of", other)
        assert isinstance(frames_of(spark), PublicFrames)
        monkeypatch.undo()
        assert isinstance(frames_of(spark), PublicFrames), "what is refused stays so"
    assert caplog.text.count("planned in more calls of Spark's Java than need be") == 1
