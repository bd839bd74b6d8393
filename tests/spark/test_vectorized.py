"""Operators on many keys at once in whole jobs over restarts, compared with Spark batch queries over the same input."""

from __future__ import annotations

import datetime as dt
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import (
    JobSettings,
    KeyedBatch,
    ParquetSink,
    StreamingJob,
    VectorizedProcessor,
    aggregates,
    query_state,
)
from state_runtime.base.errors import InvalidData, InvalidPipeline, UserCodeError
from state_runtime.job import KeyedStream, Stream
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

from .jobs import newest_per_key, rows_of, settings

pytestmark = [pytest.mark.spark, pytest.mark.long]
SCHEMA = "id long, name string, amount long, at timestamp, tags array<string>, place struct<x:int,y:string>"
ROWS_PER_FILE = 50


@pytest.fixture
def spark_elsewhere(spark: SparkSession) -> Iterator[SparkSession]:
    """The session in another time zone: Spark hands timestamps over in it."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", str(before))


def write_input(inbox: Path, first_file: int, files: int) -> None:
    """Numbered files with null keys, null times and many equal times."""
    inbox.mkdir(parents=True, exist_ok=True)
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for number in range(first_file, first_file + files):
        draw = random.Random(number)
        ids = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "name": pa.array([None if draw.random() < 0.05 else f"n{draw.randrange(12)}" for _ in ids], pa.string()),
                "amount": pa.array([draw.randrange(-50, 50) for _ in ids], pa.int64()),
                "at": pa.array(
                    [None if draw.random() < 0.2 else start + dt.timedelta(hours=draw.randrange(9)) for _ in ids],
                    pa.timestamp("us", tz="UTC"),
                ),
                "tags": pa.array([[f"t{n}", None] if n % 3 else None for n in ids], pa.list_(pa.string())),
                "place": pa.array([{"x": n % 5, "y": str(n)} for n in ids], pa.struct([("x", pa.int32()), ("y", pa.string())])),
            }
        )  # fmt: skip
        temporary = inbox / f".{number:05d}.parquet"
        pq.write_table(table, temporary)
        os.utime(temporary, ns=(1_700_000_000_000_000_000 + number * 1_000_000_000,) * 2)
        temporary.rename(inbox / f"{number:05d}.parquet")


class Running(VectorizedProcessor):
    """The guide's example."""

    def states(self) -> Mapping[str, str]:
        return {"totals": "n long, total long"}

    def process(self, batch: KeyedBatch) -> Iterator[pa.Table]:
        amounts = batch.rows["amount"].fill_null(0).to_numpy()
        _, before = batch.state("totals")
        n_before = before["n"].fill_null(0).to_numpy()
        total_before = before["total"].fill_null(0).to_numpy()
        batch.update(
            "totals", {"n": n_before + batch.sizes, "total": total_before + np.add.reduceat(amounts, batch.starts)}
        )
        running = np.cumsum(amounts)
        running -= batch.per_row(running[batch.starts] - amounts[batch.starts] - total_before)
        yield pa.table(
            {
                "n": batch.per_row(n_before) + batch.row_in_key + 1,
                "total": running,
                **{name: batch.rows[name] for name in ("id", "name", "amount", "at")},
            }
        )


RUNNING = "id long, name string, amount long, at timestamp, n long, total long"
ORACLE_RUNNING = """
    SELECT id, name, amount, at, count(*) OVER w AS n, sum(amount) OVER w AS total FROM input
    WINDOW w AS (PARTITION BY name ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""
ORACLE_ONCE = """
    SELECT * FROM running JOIN (SELECT min(id) AS id FROM running GROUP BY name, pmod(amount, 3)) USING (id)
"""
ORACLE_LATEST = """
    SELECT name, at, id, tags, place FROM
        (SELECT *, row_number() OVER (PARTITION BY name ORDER BY at DESC NULLS LAST, id DESC) AS place_in_name FROM input)
    WHERE place_in_name = 1
"""

ORACLE_HIGHEST = """
    SELECT name, amount, at, id FROM
        (SELECT *, row_number() OVER (PARTITION BY name ORDER BY amount DESC, at ASC, id DESC) AS place_in_name FROM input)
    WHERE place_in_name = 1
"""


def source(root: Path, name: str, **changes: Any) -> tuple[StreamingJob, Stream]:
    job = StreamingJob(name, store=str(root / "store"), settings=settings(root, **changes))
    return job, job.read(
        lambda spark: spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "in"))
    )


def running_and_once(root: Path, **changes: Any) -> StreamingJob:
    """A vectorised processor, and behind it `deduplicate`."""
    job, stream = source(root, "running", **changes)
    (
        stream.key_by("name")
        .process(Running(), RUNNING, uid="running")
        .write(ParquetSink(str(root / "out-running"), epoch_column=None))
        .transform(lambda df: df.selectExpr("*", "pmod(amount, 3) AS remainder"))
        .key_by("name", "remainder")
        .deduplicate(uid="once")
        .write(ParquetSink(str(root / "out-once"), epoch_column=None))
    )
    return job


def latest(root: Path, **changes: Any) -> StreamingJob:
    job, stream = source(root, "latest", **changes)
    stream.key_by("name").latest_by("at", "id", "tags", "place", uid="latest").write(ParquetSink(str(root / "out")))
    return job


def highest(root: Path, **changes: Any) -> StreamingJob:
    """Two order columns of opposite directions, with Spark's place of nulls."""
    job, stream = source(root, "highest", **changes)
    kept = stream.key_by("name").latest_by(["amount", "at"], "id", uid="highest", ascending=[False, True])
    kept.write(ParquetSink(str(root / "out")))
    return job


def check_running_and_once(spark: SparkSession, root: Path) -> None:
    spark.read.schema(SCHEMA).parquet(str(root / "in")).createOrReplaceTempView("input")
    expected = spark.sql(ORACLE_RUNNING)
    expected.createOrReplaceTempView("running")
    assert rows_of(spark.read.parquet(str(root / "out-running")).select(expected.columns)) == rows_of(expected)
    once = spark.read.parquet(str(root / "out-once"))
    assert once.columns == [*[column.split()[0] for column in RUNNING.split(", ")], "remainder"]
    assert rows_of(once.select(expected.columns)) == rows_of(spark.sql(ORACLE_ONCE).select(expected.columns))


def check_latest(spark: SparkSession, root: Path, oracle: str = ORACLE_LATEST) -> None:
    spark.read.schema(SCHEMA).parquet(str(root / "in")).createOrReplaceTempView("input")
    expected = spark.sql(oracle)
    newest = newest_per_key(spark.read.parquet(str(root / "out")), ["name"])
    assert rows_of(newest.select(expected.columns)) == rows_of(expected)


def check_highest(spark: SparkSession, root: Path) -> None:
    check_latest(spark, root, ORACLE_HIGHEST)


@pytest.mark.parametrize(
    ("make", "check", "states"),
    [
        (running_and_once, check_running_and_once, {"running": {"totals": "`n` bigint, `total` bigint"}, "once": {"seen": ""}}),
        (
            latest,
            check_latest,
            {"latest": {"latest": "`at` timestamp, `id` bigint, `tags` array<string>, `place` struct<x:int,y:string>"}},
        ),
        (highest, check_highest, {"highest": {"latest": "`amount` bigint, `at` timestamp, `id` bigint"}}),
    ],
    ids=["process and deduplicate", "latest_by", "latest_by two columns"],
)  # fmt: skip
def test_output_over_restarts_equals_a_batch_recomputation(
    spark_elsewhere: SparkSession,
    tmp_path: Path,
    make: Callable[..., StreamingJob],
    check: Callable[[SparkSession, Path], None],
    states: dict[str, dict[str, str]],
) -> None:
    """The second run restores from the primary store with another parallelism, and folds the log into tables."""
    seen: list[Any] = []
    write_input(tmp_path / "in", 0, 3)
    make(tmp_path).run(spark_elsewhere, trigger={"availableNow": True})
    check(spark_elsewhere, tmp_path)
    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path / "in", 3, 4)
    job = make(tmp_path, parallelism=3)
    job.run(spark_elsewhere, trigger={"availableNow": True}, on_progress=seen.append)
    check(spark_elsewhere, tmp_path)
    assert sum(p.primary_restores for p in seen) > 0
    # A fold may end after the run that began it: the next one takes it over.
    write_input(tmp_path / "in", 7, 1)
    make(tmp_path, parallelism=3).run(spark_elsewhere, trigger={"availableNow": True})
    check(spark_elsewhere, tmp_path)
    newest = Catalog(open_store(str(tmp_path / "store")), job.name).latest()
    assert newest is not None
    assert newest.layers, "the log must have been folded into tables by now"
    assert {o.uid: {s.name: s.schema for s in o.states} for o in newest.operators} == states
    assert newest.progress is not None
    keys = ["SELECT DISTINCT name FROM input"]
    if make is running_and_once:
        keys.append("SELECT DISTINCT name, pmod(amount, 3) FROM input")
    assert newest.progress.state_rows == sum(spark_elsewhere.sql(sql).count() for sql in keys)
    # The same state can be looked into without the job, also one that has no value columns.
    queried = [query_state(str(tmp_path / "store"), job.name, uid, s) for uid, state in states.items() for s in state]
    assert sum(table.num_rows for table in queried) == newest.progress.state_rows


def test_state_of_one_kind_of_operator_is_not_read_by_another(spark: SparkSession, tmp_path: Path) -> None:
    """The uid stays, the operator behind it does not: refused before a row is processed."""
    write_input(tmp_path / "in", 0, 1)
    latest(tmp_path).run(spark, trigger={"availableNow": True})
    job, stream = source(tmp_path, "latest")
    stream.key_by("name").deduplicate(uid="latest").write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(InvalidPipeline, match="'latest': it is a deduplicate now, and a latest-by in snapshot 2"):
        job.run(spark, trigger={"availableNow": True})


class Wrong(Running):
    """Updates with one value too few."""

    def process(self, batch: KeyedBatch) -> Any:
        batch.update("totals", {"n": batch.sizes[1:], "total": batch.sizes})


class Broken(Running):
    """Raises."""

    def process(self, batch: KeyedBatch) -> Any:
        raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (Wrong(), InvalidData, r"operator 'r', state 'totals': update\(\) got \d+ values in column 'n'"),
        (Broken(), UserCodeError, r"operator 'r', shard \d: the processor raised KeyError: 'no such thing'"),
    ],
    ids=["wrong", "broken"],
)
def test_errors_of_a_task_come_back_typed(
    spark: SparkSession, tmp_path: Path, processor: VectorizedProcessor, error: type[Exception], message: str
) -> None:
    """Nothing is committed."""
    write_input(tmp_path / "in", 0, 1)
    job, stream = source(tmp_path, "errors")
    stream.key_by("name").process(processor, RUNNING, uid="r").write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(error, match=message):
        job.run(spark, trigger={"availableNow": True})
    newest = Catalog(open_store(str(tmp_path / "store")), "errors").latest()
    assert newest is not None
    assert newest.source is None


def test_an_error_in_a_function_that_spark_calls_is_the_users(spark: SparkSession, tmp_path: Path) -> None:
    """In a step after an operator: none of our code is in its traceback. Nothing is committed."""
    write_input(tmp_path / "in", 0, 1)

    def broken(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for _ in frames:
            raise KeyError("no such thing")
        yield pd.DataFrame()

    job, stream = source(tmp_path, "errors")
    (
        stream.key_by("name")
        .aggregate(uid="counts", n=aggregates.count())
        .transform(lambda frame: frame.mapInPandas(broken, frame.schema))
        .write(ParquetSink(str(tmp_path / "out")))
    )
    with pytest.raises(
        UserCodeError, match=r"raised KeyError: 'no such thing' \(.*test_vectorized.py, line \d+, in broken"
    ):
        job.run(spark, trigger={"availableNow": True})
    newest = Catalog(open_store(str(tmp_path / "store")), "errors").latest()
    assert newest is not None
    assert newest.source is None


# --- what is refused when the job is built -------------------------------------------------------------------------


class ByEventTime(Running):
    """Would never fire: nothing has a watermark."""

    time_mode = "event"


def stating(states: Any) -> VectorizedProcessor:
    class States(Running):
        def states(self) -> Any:
            return states() if callable(states) else states

    return States()


def fail() -> None:
    raise KeyError("no such thing")


def compiled(spark: SparkSession, root: Path, then: Callable[[KeyedStream], Any]) -> CompiledPipeline:
    job, stream = source(root, "built")
    then(stream.key_by("name"))
    opened = OpenedSource(spark.createDataFrame([], SCHEMA), ())
    return compile_pipeline(spark, OpenedSources.of_one(opened), job.plan().graph, JobSettings())


@pytest.mark.parametrize(
    ("then", "error", "message"),
    [
        (lambda k: k.process(Running, RUNNING, uid="u"), InvalidPipeline, "an instance of a VectorizedProcessor, not Running"),
        (lambda k: k.process(object(), RUNNING, uid="u"), InvalidPipeline, "not object; a StatefulProcessor goes to"),
        (lambda k: k.process(Running(), "n lnog", uid="u"), InvalidPipeline, "the output of operator 'u' cannot be parsed"),
        (lambda k: k.process(Running(), "", uid="u"), InvalidPipeline, "the output of operator 'u' must name columns"),
        (lambda k: k.process(stating({}), RUNNING, uid="u"), InvalidPipeline, "of States names no state"),
        (lambda k: k.process(stating("n long"), RUNNING, uid="u"), InvalidPipeline, "must return a mapping of names"),
        (lambda k: k.process(stating({1: "n long"}), RUNNING, uid="u"), InvalidPipeline, "must return a mapping of names"),
        (lambda k: k.process(stating({"s": ""}), RUNNING, uid="u"), InvalidPipeline, "state 's' of operator 'u' must name"),
        (lambda k: k.process(stating({"s": "n lnog"}), RUNNING, uid="u"), InvalidPipeline, "state 's' of operator 'u' cannot"),
        (lambda k: k.process(stating({"$s": "n long"}), RUNNING, uid="u"), InvalidPipeline, "cannot name a state"),
        (lambda k: k.process(stating(fail), RUNNING, uid="u"), UserCodeError, "'u': states.. of States raised KeyError"),
        (lambda k: k.process(ByEventTime(), RUNNING, uid="u"), InvalidPipeline, 'time_mode "event" needs .* withWatermark'),
        (lambda k: k.latest_by("ts", uid="u"), InvalidPipeline, "operator 'u', latest_by: there is no column 'ts'"),
        (lambda k: k.latest_by("at", "x", uid="u"), InvalidPipeline, "operator 'u', latest_by: there is no column 'x'"),
        (lambda k: k.latest_by("tags", uid="u"), InvalidPipeline, "have no order"),
        (lambda k: k.latest_by(["at", "tags"], uid="u"), InvalidPipeline, r"\(column 'tags'\) have no order"),
        (lambda k: k.latest_by([], uid="u"), InvalidPipeline, "needs the names of order columns"),
        (lambda k: k.latest_by(["at", "id"], uid="u", ascending=[True]), InvalidPipeline, "2 order columns and 1 directions"),
        (lambda k: k.deduplicate(uid="a").key_by("x").deduplicate(uid="u"), InvalidPipeline, "'u': there is no key column 'x'"),
        (lambda k: k.deduplicate(uid="u").key_by("id").latest_by("at", uid="u"), InvalidPipeline, "two operators have the uid"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_when_the_job_is_built(
    spark: SparkSession, tmp_path: Path, then: Any, error: type[Exception], message: str
) -> None:
    """Before anything is written, with the operator in the message."""
    with pytest.raises(error, match=message):
        compiled(spark, tmp_path, then)


def test_schemas_flow_through_the_operators(spark: SparkSession, tmp_path: Path) -> None:
    """What a later step finds: the declared columns; keys, order and kept columns; the columns of the input."""
    pipeline = compiled(
        spark,
        tmp_path,
        lambda k: k.process(Running(), RUNNING, uid="a").key_by("id").latest_by("at", uid="b").key_by("n").deduplicate(uid="c"),
    )  # fmt: skip
    names = [stage.output.names for stage in pipeline.stages]
    running = ["id", "name", "amount", "at", "n", "total"]
    latest_names = ["id", "at", "name", "amount", "n", "total"]
    assert names == [running, latest_names, latest_names]
    assert [o.entry().kind for o in pipeline.operators] == ["vectorized", "latest-by", "deduplicate"]
