"""Plans of epochs before, with other rows and functions: the rows are those of a plan made anew, or it is made anew."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from state_runtime import ParquetSink, StreamingJob, aggregates
from state_runtime.driver import epoch_plan
from state_runtime.driver.epoch_plan import EpochPlan
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.spark import prepared, rebound
from state_runtime.spark.jvm import analyzed, constructor_of, items, kind_of
from state_runtime.spark.prepared import PreparedFrames
from state_runtime.spark.probes import probe_internals
from state_runtime.spark.rebound import ReboundPlan, ReboundPlans
from tests.job_settings import job_settings

from . import branches
from .jobs import assert_equals_batch, rows_of, settings, two_step_job, windowed_job, write_input

pytestmark = pytest.mark.spark

ONCE = {"availableNow": True}
FILES = 7

Shape = Callable[[DataFrame], DataFrame]


@pytest.fixture
def plans(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many epochs had the plan of another ("again"), and how many were planned although it was tried ("missed")."""
    probe_internals(spark)  # the first run of a process tries it
    counted: Counter[str] = Counter()
    again = ReboundPlans.again

    def counting(self: ReboundPlans, shape: Hashable, *arguments: Any) -> ReboundPlan | None:
        plan = again(self, shape, *arguments)
        counted["missed" if plan is None else "again"] += 1
        return plan

    monkeypatch.setattr(ReboundPlans, "again", counting)
    return counted


def summing(root: Path, of: Shape, *, every_epoch: bool = False, **changes: Any) -> StreamingJob:
    """The user's code before an aggregate by key, whose rows have what that code made of them."""
    given = job_settings(settings(root), **changes)
    job = StreamingJob("sums", store=str(root / "store"), settings=given)
    (
        job.read(
            lambda spark: spark.readStream.schema("id long, name string, amount long")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(root / "in"))
        )
        .transform(of, every_epoch=every_epoch)
        .key_by("name")
        .aggregate(uid="sums", n=aggregates.count(), total=aggregates.sum("amount"))
        .write(ParquetSink(str(root / "out")))
    )  # fmt: skip
    return job


def sums_of(spark: SparkSession, root: Path) -> dict[str, tuple[int, int]]:
    """The last word of each key."""
    newest: dict[str, tuple[int, int]] = {}
    for row in spark.read.parquet(str(root / "out")).orderBy("n").collect():
        newest[row["name"]] = (row["n"], row["total"])
    return newest


def expected(rows: DataFrame) -> dict[str, tuple[int, int]]:
    grouped = rows.groupBy("name").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    return {row["name"]: (row["n"], row["total"]) for row in grouped.collect()}


def doubled(name: str) -> str:
    return 2 * name


def in_python(frame: DataFrame) -> DataFrame:
    """A function of the user's, which has a node of its own in the plan."""
    return frame.where("name IS NOT NULL").withColumn("name", F.udf(doubled, "string")("name"))


STAY: dict[str, Shape] = {
    "filtered": lambda frame: frame.where("amount > 0").withColumn("amount", F.col("amount") * 2),
    "exploded": lambda frame: frame.selectExpr("id", "name", "explode(array(amount, 2 * amount)) AS amount"),
    "twice": lambda frame: frame.union(frame.where("amount < 0")),
    "in Python": in_python,
    "grouped": lambda frame: frame.groupBy("name").agg(F.max("id").alias("id"), F.sum("amount").alias("amount")),
    "mapped": lambda frame: frame.mapInArrow(lambda batches: batches, frame.schema),
}


@pytest.mark.parametrize("of", STAY)
@pytest.mark.parametrize("kind", ["narrow", "wide", "partial"])
def test_the_rows_are_those_of_a_plan_made_anew(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: Counter[str], of: str, kind: str
) -> None:
    """With one task for all shards, a task for each, and rows aggregated by a plan of their own."""
    monkeypatch.setattr("state_runtime.driver.engine.SingleTask.choose", lambda *_, **__: kind == "narrow")
    write_input(tmp_path / "in", 0, FILES)
    job = summing(tmp_path, STAY[of], partial_aggregation="on" if kind == "partial" else "off")
    job.run(spark, trigger=ONCE)
    # A shape is learned when it comes for the second time.
    assert plans == {"again": FILES - 2}
    found, wanted = sums_of(spark, tmp_path), expected(STAY[of](spark.read.parquet(str(tmp_path / "in"))))
    if of == "grouped":  # a row for each epoch
        assert {name: total for name, (_, total) in found.items()} == {n: total for n, (_, total) in wanted.items()}
    else:
        assert found == wanted


def test_the_plan_of_branches_is_taken_again(spark: SparkSession, tmp_path: Path, plans: Counter[str]) -> None:
    """Of several plans, which read the rows of each other."""
    branches.write_input(tmp_path / "in", files=FILES)
    branches.diamond(tmp_path).run(spark, trigger=ONCE)
    branches.check_diamond(spark, tmp_path, is_ended=False)
    assert plans["again"] >= 2
    assert plans["missed"] == 0


def test_a_plan_of_branches_is_kept_for_each_number_of_partitions(
    spark: SparkSession, tmp_path: Path, plans: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shuffle that branches share has as many as the batch: places of rows stay what they are without it."""
    shapes: set[Hashable] = set()
    again = ReboundPlans.again

    def noting(self: ReboundPlans, shape: Hashable, *arguments: Any) -> ReboundPlan | None:
        shapes.add(shape)
        return again(self, shape, *arguments)

    monkeypatch.setattr(ReboundPlans, "again", noting)
    monkeypatch.setattr("state_runtime.driver.engine.SingleTask.choose", lambda *_, **__: False)
    for number in range(8):
        branches.write_input(tmp_path / "in", files=1, first=number, rows=60 if number % 2 else 1200)
    spark.conf.set("spark.sql.files.maxPartitionBytes", "4096")
    try:
        branches.diamond(tmp_path).run(spark, trigger=ONCE)
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    branches.check_diamond(spark, tmp_path, is_ended=False)
    assert len({shape[1] for shape in shapes}) > 1  # type: ignore[index]
    assert plans["missed"] == 0


def test_a_chain_and_a_run_that_goes_on_give_what_a_batch_query_gives(
    spark: SparkSession, tmp_path: Path, plans: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operators, with user code between them; each run begins to learn anew."""
    # On a slow machine epochs would be one task and several in turn, and plans of both be learnt.
    monkeypatch.setattr("state_runtime.driver.engine.SingleTask.choose", lambda *_, **__: False)
    for first in (0, 6):
        write_input(tmp_path / "in", first, 6)
        two_step_job(tmp_path).run(spark, trigger=ONCE)
        assert_equals_batch(spark, tmp_path)
    assert plans["again"] >= 6


def test_event_time_is_seen_and_windows_close_by_a_plan_of_before(
    spark: SparkSession, tmp_path: Path, plans: Counter[str]
) -> None:
    """The watermark comes out of the plan; shards that wake are a plan of their own."""
    write_input(tmp_path / "in", 0, 12)
    # From the eighth file on few keys come: the shards of the others have to be woken.
    for file in sorted((tmp_path / "in").glob("*.parquet"))[8:]:
        table = pq.read_table(file)
        few = table.set_column(1, "name", pa.array(["n1"] * table.num_rows))
        at = file.stat()
        pq.write_table(few, file)
        os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    job = windowed_job(tmp_path, parallelism=5)
    job.run(spark, trigger=ONCE)
    rows = spark.read.parquet(str(tmp_path / "in")).selectExpr("*", "timestamp_seconds(id) AS at")
    counted = rows.groupBy("name", F.window("at", "30 seconds").alias("window")).agg(F.count("*").alias("n"))
    closed = counted.where(f"unix_seconds(window.end) <= {12 * 60 - 1 - 10}").select("name", "window", "n")
    assert rows_of(spark.read.parquet(str(tmp_path / "out")).select("name", "window", "n")) == rows_of(closed)
    assert plans["again"] > 0


def test_rows_that_are_too_far_ahead_or_fail_a_condition_are_counted_by_a_plan_of_before(
    spark: SparkSession, tmp_path: Path, plans: Counter[str]
) -> None:
    """Each where it is made: in the batch, and behind rows that two readers share."""
    write_input(tmp_path / "in", 0, FILES)
    job = StreamingJob("aside", store=str(tmp_path / "store"), settings=settings(tmp_path))

    def read(session: SparkSession) -> DataFrame:
        given = session.readStream.schema("id long, name string, amount long").option("maxFilesPerTrigger", 1)
        at = "CASE WHEN id % 10 = 0 THEN TIMESTAMP '9000-01-01' ELSE timestamp_seconds(id) END AS at"
        return given.parquet(str(tmp_path / "in")).selectExpr("*", at).withWatermark("at", "1 second")

    rows = job.read(read, max_ahead="1000 days")
    rows.transform(lambda df: df.select("id")).write(ParquetSink(str(tmp_path / "all")), name="all")
    checked = rows.expect_or_drop(first="id % 4 > 0")
    checked.key_by("name").aggregate(uid="n", n=aggregates.count()).write(ParquetSink(str(tmp_path / "out")))
    seen: list[tuple[int, int]] = []
    job.run(
        spark, trigger=ONCE, on_progress=lambda p: seen.append((p.future_rows, p.bad_rows)) if p.input_rows else None
    )
    files = sorted((tmp_path / "in").glob("*.parquet"))
    ids = [pq.read_table(file)["id"].to_pylist() for file in files]
    assert seen == [(sum(n % 10 == 0 for n in each), sum(n % 4 == 0 for n in each)) for each in ids]
    assert plans["again"] >= 3


# --- what another epoch may have otherwise ---------------------------------------------------------------------------


def test_a_table_that_a_transform_reads_is_read_anew_in_each_epoch(
    spark: SparkSession, tmp_path: Path, plans: Counter[str]
) -> None:
    """A row that comes into it while the job runs is found by the next batch."""
    table, read = tmp_path / "table", Counter[str]()
    table.mkdir()
    write_input(tmp_path / "in", 0, FILES)

    def joined(frame: DataFrame) -> DataFrame:
        read["calls"] += 1
        pq.write_table(pa.table({"name": [f"n{n}" for n in range(5 * read["calls"])]}), table / "part.parquet")
        return frame.join(spark.read.parquet(str(table)), "name")

    summing(tmp_path, joined).run(spark, trigger=ONCE)
    assert plans["again"] == 0
    assert read["calls"] > FILES
    assert len(sums_of(spark, tmp_path)) > 15


@pytest.mark.parametrize(
    "value", ["unix_micros(current_timestamp())", "CAST(1e15 * rand() AS BIGINT)", "(SELECT max(id) FROM numbers)"]
)
def test_a_clock_random_numbers_and_a_subquery_are_new_in_each_epoch(
    spark: SparkSession, tmp_path: Path, plans: Counter[str], value: str
) -> None:
    spark.range(3).createOrReplaceTempView("numbers")
    write_input(tmp_path / "in", 0, FILES)
    summing(tmp_path, lambda frame: frame.withColumn("name", F.expr(f"CAST({value} AS STRING)"))).run(
        spark, trigger=ONCE
    )
    assert plans["again"] == 0
    if "SELECT" not in value:
        assert len(sums_of(spark, tmp_path)) >= FILES


def test_a_plan_that_sizes_decide_is_made_anew(spark: SparkSession, tmp_path: Path, plans: Counter[str]) -> None:
    """Spark hands a small side of a join to all tasks; that of the next batch may be large."""
    write_input(tmp_path / "in", 0, FILES)
    summing(tmp_path, lambda frame: frame.join(frame.selectExpr("id AS other"), F.expr("id = other"))).run(
        spark, trigger=ONCE
    )
    assert plans["again"] == 0
    assert sums_of(spark, tmp_path) == expected(spark.read.parquet(str(tmp_path / "in")))


def test_rows_that_are_not_the_batchs_are_planned_anew(
    spark: SparkSession, tmp_path: Path, plans: Counter[str]
) -> None:
    write_input(tmp_path / "in", 0, FILES)
    more = spark.sparkContext.parallelize([(1, "more", 1)], 1).toDF("id long, name string, amount long")
    summing(tmp_path, lambda frame: frame.union(more)).run(spark, trigger=ONCE)
    assert plans["again"] == 0
    assert sums_of(spark, tmp_path)["more"] == (FILES, FILES)


def test_a_transform_that_looks_at_rows_to_make_its_plan_is_called_in_each_epoch(
    spark: SparkSession, tmp_path: Path, plans: Counter[str]
) -> None:
    """What it saw of one batch is not true of the next."""
    write_input(tmp_path / "in", 0, FILES)

    def counted(frame: DataFrame) -> DataFrame:
        return frame.withColumn("name", F.lit(str(frame.agg(F.max("id")).first()[0])))  # type: ignore[index]

    summing(tmp_path, counted).run(spark, trigger=ONCE)
    assert plans["again"] == 0
    assert len(sums_of(spark, tmp_path)) == FILES


def test_a_job_of_another_query_meanwhile_does_not_keep_plans_from_being_kept(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: Counter[str]
) -> None:
    """It looks as if a transform had started it."""
    write_input(tmp_path / "in", 0, FILES)
    monkeypatch.setattr("state_runtime.driver.engine.SingleTask.choose", lambda *_, **__: False)
    started, watches = epoch_plan.job_watch, iter([lambda: True])
    monkeypatch.setattr(epoch_plan, "job_watch", lambda session: next(watches, None) or started(session))
    summing(tmp_path, STAY["filtered"]).run(spark, trigger=ONCE)
    assert plans == {"again": FILES - 3}


@pytest.mark.parametrize("every_epoch", [True, False])
def test_a_transform_is_called_in_each_epoch_if_that_is_asked_for(
    spark: SparkSession, tmp_path: Path, plans: Counter[str], every_epoch: bool
) -> None:
    """What it takes from outside by Python is then new in each of them; else it stays as it was."""
    write_input(tmp_path / "in", 0, FILES)
    calls: Counter[str] = Counter()

    def numbered(frame: DataFrame) -> DataFrame:
        calls["made"] += 1
        return frame.withColumn("name", F.lit(str(calls["made"])))

    summing(tmp_path, numbered, every_epoch=every_epoch).run(spark, trigger=ONCE)
    assert (plans["again"] == 0) == every_epoch
    assert len(sums_of(spark, tmp_path)) == (FILES if every_epoch else calls["made"] - 1)
    assert every_epoch or calls["made"] < FILES


@pytest.mark.usefixtures("untried")
def test_where_spark_is_made_in_another_way_each_epoch_is_planned(
    spark: SparkSession,
    tmp_path: Path,
    plans: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once, and no row is lost by it."""
    write_input(tmp_path / "in", 0, FILES)

    def other(*_: Any) -> Any:
        raise TypeError("'JavaPackage' object is not callable")

    monkeypatch.setattr(rebound._Node, "bound", other)
    with caplog.at_level(logging.WARNING):
        summing(tmp_path, STAY["filtered"]).run(spark, trigger=ONCE)
    assert caplog.text.count("each is planned from the start") == 1
    assert plans["again"] == 0
    assert sums_of(spark, tmp_path) == expected(STAY["filtered"](spark.read.parquet(str(tmp_path / "in"))))


SHAPE = "a shape"


@pytest.fixture
def as_streams_plan(spark: SparkSession) -> Iterator[None]:
    """Spark plans a stream's batches so."""
    name = "spark.sql.adaptive.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, "false")
    yield
    spark.conf.set(name, before)


def batch_of(frame: DataFrame) -> DataFrame:
    """As Spark hands a batch over."""
    execution = frame._jdf.queryExecution()
    return handed_over(frame, execution.toRdd(), execution.executedPlan())


def without_tasks(batch: DataFrame) -> DataFrame:
    """A batch of the same columns, of an RDD without partitions."""
    return handed_over(batch, batch.sparkSession.sparkContext._jsc.emptyRDD().rdd(), analyzed(batch))


def handed_over(like: DataFrame, rows: Any, lying_as: Any) -> DataFrame:
    spark = like.sparkSession
    jvm: Any = spark.sparkContext._jvm
    none = getattr(jvm.scala, "None$").__getattr__("MODULE$")
    given = constructor_of(jvm.org.apache.spark.sql.execution.LogicalRDD)(
        analyzed(like).output(), rows, lying_as.outputPartitioning(), lying_as.outputOrdering(),
        False, none, spark._jsparkSession, none, none, False,
    )  # fmt: skip
    datasets = getattr(jvm.org.apache.spark.sql.classic, "Dataset$").__getattr__("MODULE$")
    return DataFrame(datasets.ofRows(spark._jsparkSession, given), spark)


def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def learned(batch: DataFrame, frame: DataFrame) -> ReboundPlans:
    plans = ReboundPlans()
    assert not plans.learns(SHAPE)
    assert plans.learns(SHAPE)
    plans.learn(SHAPE, batch, [frame])
    assert plans.knows(SHAPE)
    return plans


@pytest.mark.usefixtures("as_streams_plan")
def test_batches_that_lie_otherwise_are_planned_where_a_plan_made_use_of_how_they_lie(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Rows that lie by key need no shuffle to be grouped by it; those of the next batch may not lie so."""
    rows = spark.range(0, 100, 1, 3).selectExpr("id % 7 AS k", "id")
    by_key = batch_of(rows.repartition(4, "k"))
    plans = learned(by_key, by_key.groupBy("k").count())
    assert plans.again(SHAPE, by_key, []) is not None
    assert plans.again(SHAPE, batch_of(rows.repartition(4, "id")), []) is None
    assert not plans.knows(SHAPE)


@pytest.mark.usefixtures("as_streams_plan")
def test_a_batch_of_other_columns_is_planned(spark: SparkSession) -> None:
    """A plan knows columns by numbers of Spark's; rows of others would be read as if they were these."""
    rows = spark.range(0, 100, 1, 3)
    batch = batch_of(rows.selectExpr("id AS k", "id"))
    plans = learned(batch, batch.selectExpr("k + 1 AS k"))
    assert plans.again(SHAPE, batch, []) is not None
    for _ in range(3):
        assert plans.again(SHAPE, batch_of(rows.selectExpr("id", "id AS k")), []) is None
        learns = plans.learns(SHAPE)
        plans.learn(SHAPE, batch, [batch.selectExpr("k + 1 AS k")] if learns else [])
    assert not plans.learns(SHAPE)  # they never come again as they were: it is not tried for ever


@pytest.mark.usefixtures("as_streams_plan")
@pytest.mark.parametrize("way", ["planned", "again"])
def test_a_batch_without_rows_has_no_event_time(spark: SparkSession, way: str) -> None:
    """Nor has one without a task: a source gives one after all files of a batch turned out to have no rows."""
    frames, at = PreparedFrames(spark), WatermarkColumn("n", "n", 1_000)
    full = batch_of(spark.range(0, 10, 1, 2).toDF("n"))
    for _ in range(2):
        watched, seen = frames.observe(full, ("max(n)",))
        frames.run([watched])
        if frames.learns(SHAPE):
            frames.learn(SHAPE, full, [watched])
    assert EpochPlan(lambda: None, (at,), partial(seen, watched)).event_time_ms() == {"n": 9}
    empty = without_tasks(full)
    if way == "again":
        plan = frames.again(SHAPE, empty, [])
        assert plan is not None
        done = EpochPlan(plan.run, (at,), plan.seen)
    else:
        watched, seen = frames.observe(empty, ("max(n)",))
        done = EpochPlan(partial(frames.run, [watched]), (at,), partial(seen, watched))
    done.run()
    assert done.event_time_ms() == {"n": None}
    assert EpochPlan(done.run, (at,), tuple).event_time_ms() == {"n": None}, "nothing was observed"


@pytest.mark.usefixtures("as_streams_plan")
def test_a_plan_whose_function_was_too_large_to_be_told_from_a_users_is_made_anew(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage's function can shrink; with the one of an epoch before, a task would write for that epoch."""
    output, frames = T.StructType.fromDDL("n long"), PreparedFrames(spark)
    batch = batch_of(spark.range(0, 10, 1, 2).toDF("n"))

    def learn() -> None:
        made = frames.map_in_arrow(batch, (unchanged, output), ("n",), 0)
        assert frames.learns(SHAPE)
        frames.learn(SHAPE, batch, [made])

    assert not frames.learns(SHAPE)
    with monkeypatch.context() as patched:
        patched.setattr(prepared, "_FUNCTION_BYTES_MAX", 0)
        learn()
    assert frames.again(SHAPE, batch, [(unchanged, output)]) is None
    learn()
    assert frames.again(SHAPE, batch, [(unchanged, output)]) is not None


@pytest.mark.usefixtures("as_streams_plan")
def test_a_plan_that_is_kept_holds_no_node_that_was_run(spark: SparkSession) -> None:
    """One that was run holds its shuffle, whose files Spark keeps for as long."""
    batch = batch_of(spark.range(0, 100, 1, 3).selectExpr("id % 7 AS k", "id"))
    grouped = batch.groupBy("k").count()
    execution = grouped._jdf.queryExecution()
    execution.toRdd().count()
    plans = learned(batch, grouped)
    kept = plans._shapes[SHAPE].template
    assert kept is not None
    identity = spark.sparkContext._jvm.java.lang.System.identityHashCode  # type: ignore[union-attr]

    def nodes_of(plan: Any) -> dict[int, str]:
        found = {identity(plan): kind_of(plan)}
        for child in items(plan.children()):
            found |= nodes_of(child)
        return found

    ran, held = nodes_of(execution.executedPlan()), nodes_of(kept.plans[0].plan)
    assert sorted(ran.values()) == sorted(held.values())
    assert "ShuffleExchangeExec" in held.values()
    assert not ran.keys() & held.keys()
