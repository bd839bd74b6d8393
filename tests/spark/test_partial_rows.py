"""Rows that Spark aggregates before the shuffle give what the rows themselves give, to the last digit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates, reading, windows
from state_runtime.base.errors import InvalidData
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources
from state_runtime.spark.prepared import frames_of

pytestmark = pytest.mark.spark

SCHEMA = "k string, g int, n bigint, i int, d decimal(12,2), b boolean, at timestamp, on date, f double"
START = datetime(2026, 1, 1, tzinfo=UTC)
FILES = 5
EXACT: Mapping[str, aggregates.Aggregate] = {
    "rows": aggregates.count(),
    "values": aggregates.count("n"),
    "total": aggregates.sum("n"),
    "small": aggregates.sum("i"),
    "money": aggregates.sum("d"),
    "least": aggregates.min("n"),
    "latest": aggregates.max("at"),
    "first_day": aggregates.min("on"),
    "dearest": aggregates.max("d"),
    "mean": aggregates.avg("n"),
    "small_mean": aggregates.avg("i"),
    "some": aggregates.any("b"),
    "all": aggregates.every("b"),
    "gains": aggregates.sum("n").where("i > 0"),
}


def write_rows(folder: Path, largest: int) -> None:
    """Files of two row groups, so that two tasks read each; times go back and forth, some far."""
    folder.mkdir()
    draw = random.Random(11)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.1 else value

    for number in range(FILES):
        rows = []
        for _ in range(400):
            late_s = draw.choice((0, 0, 0, 30, 200))
            rows.append(
                {
                    "k": maybe(draw.choice("abcdefgh")),
                    "g": maybe(draw.randrange(3)),
                    "n": maybe(draw.randrange(-largest, largest)),
                    "i": maybe(draw.randrange(-(2**31), 2**31)),
                    "d": maybe(Decimal(draw.randrange(-(10**11), 10**11)) / 100),
                    "b": maybe(draw.random() < 0.5),
                    "at": maybe(START + timedelta(seconds=60 * number + draw.randrange(240) / 4 - late_s)),
                    "on": maybe((START + timedelta(days=draw.randrange(1000))).date()),
                    "f": maybe(draw.random()),
                }
            )
        table = pa.Table.from_pylist(rows, schema=ARROW)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=200)


ARROW = pa.schema(
    {
        "k": pa.string(), "g": pa.int32(), "n": pa.int64(), "i": pa.int32(), "d": pa.decimal128(12, 2), "b": pa.bool_(),
        "at": pa.timestamp("us", "UTC"), "on": pa.date32(), "f": pa.float64(),
    }
)  # fmt: skip

Build = Callable[[Any], Any]


def run(spark: SparkSession, root: Path, inbox: Path, mode: str, build: Build) -> tuple[dict[str, int], list[Any]]:
    """Play the files, an epoch each; sums of the numbers, and the rows and the state that came out."""
    store = root / mode / "store"
    settings = JobSettings(parallelism=3, partial_aggregation=mode, local_dir=str(root / mode / "local"))  # type: ignore[arg-type]
    job = StreamingJob("job", store=str(store), settings=settings)
    stream = job.read(
        lambda s: (
            s.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(inbox))
            .withWatermark("at", "40 seconds")
        )
    )
    build(stream).write(ParquetSink(str(root / mode / "out")))
    seen: list[Any] = []
    job.run(spark, trigger={"availableNow": True}, on_progress=seen.append)
    numbers = {name: sum(getattr(p, name) for p in seen) for name in ("input_rows", "late_rows", "changed_rows")}
    output = sorted(map(str, spark.read.parquet(str(root / mode / "out")).collect()))
    snapshot = reading.open(f"{store}/job")
    held = [str(snapshot.state(o.uid, s.name).fingerprint()) for o in snapshot.manifest.operators for s in o.states]
    return numbers, [output, held]


PIPELINES: Mapping[str, Build] = {
    "aggregate": lambda s: s.key_by("k", "g").aggregate(uid="a", **EXACT),
    "once": lambda s: s.key_by("g", "at").aggregate(uid="a", output_mode="append", **EXACT),
    "tumbling": lambda s: s.key_by("k").window(windows.tumbling("20 seconds"), uid="w", output_mode="append", **EXACT),
    "chain": lambda s: (
        s.key_by("k", "g")
        .window(
            windows.tumbling("20 seconds"),
            uid="w",
            output_mode="append",
            rows=aggregates.count(),
            n=aggregates.max("n"),
        )
        .key_by("g")
        .aggregate(uid="a", rows=aggregates.sum("rows"), mean=aggregates.avg("n"))
    ),
    "sliding": lambda s: s.key_by("k").window(windows.sliding("20 seconds", "6 seconds", "1 second"), uid="w", **EXACT),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_rows_aggregated_before_the_shuffle_give_the_same_output_and_state(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    """Nulls everywhere, late rows, sums beyond 2^53, two tasks with rows of each key."""
    write_rows(tmp_path / "in", 2**54)
    (plain, came_of_rows), (partial, came_of_partial) = (
        run(spark, tmp_path, tmp_path / "in", mode, PIPELINES[name]) for mode in ("off", "on")
    )
    assert came_of_rows[0], "there is output"
    assert came_of_partial == came_of_rows
    assert partial == plain
    assert plain["input_rows"] == FILES * 400
    assert (plain["late_rows"] > 0) == (name != "aggregate")


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_sum_fails_where_the_whole_leaves_the_range_of_long_and_only_there(
    spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    """What one task adds up may leave it, and the other one bring it back."""
    most = 2**63 - 1
    inbox = tmp_path / "in"
    inbox.mkdir()
    halves = [[most, most, -5], [-most, -most, 7]]
    table = pa.table({"k": ["a"] * 6, "n": pa.array([n for half in halves for n in half], pa.int64())})
    pq.write_table(table, inbox / "0.parquet", row_group_size=3)

    def build(stream: Any) -> Any:
        return stream.key_by("k").aggregate(uid="a", total=aggregates.sum("n"))

    _, (output, _) = run(spark, tmp_path, inbox, mode, build)
    assert "total=2" in output[0]
    pq.write_table(table.slice(0, 3), inbox / "1.parquet")
    with pytest.raises(InvalidData, match="leaves the range of long"):
        run(spark, tmp_path, inbox, mode, build)


def compiled(spark: SparkSession, tmp_path: Path, build: Build) -> CompiledPipeline:
    job = StreamingJob("partial", store=str(tmp_path / "store"))
    build(job.read(lambda _: None))  # type: ignore[arg-type, return-value]
    source = OpenedSource(spark.createDataFrame([], SCHEMA), ())
    return compile_pipeline(spark, OpenedSources.of_one(source), job.plan().graph, JobSettings())


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (("k",), {"x": aggregates.sum("f")}),
        (("k",), {"x": aggregates.avg("f")}),
        (("k",), {"x": aggregates.max("f")}),
        (("k",), {"x": aggregates.max("k")}),
        (("k",), {"x": aggregates.stddev("n")}),
        (("k",), {"x": aggregates.first("n")}),
        (("k",), {"x": aggregates.count(), "y": aggregates.collect("n")}),
        (("k",), {"x": aggregates.count_distinct_approx("n")}),
        (("f",), {"x": aggregates.count()}),
    ],
)
def test_what_depends_on_the_order_of_rows_or_needs_a_sort_is_left_to_the_operator(
    spark: SparkSession, tmp_path: Path, keys: tuple[str, ...], wanted: dict[str, aggregates.Aggregate]
) -> None:
    (stage,) = compiled(spark, tmp_path, lambda s: s.key_by(*keys).aggregate(uid="a", **wanted)).stages
    assert stage.partial is None


def test_spark_aggregates_once_and_before_the_one_shuffle(spark: SparkSession, tmp_path: Path) -> None:
    """Not in two halves with a shuffle of its own between them."""
    (stage,) = compiled(spark, tmp_path, PIPELINES["aggregate"]).stages
    assert stage.partial is not None
    frames, partial = frames_of(spark), stage.partial
    rows = frames.select(spark.createDataFrame([], SCHEMA), (*stage.selected, "true AS one"))
    kept = tuple(f"`{name}`" for name in partial.columns)
    made = frames.numbered(frames.aggregate(rows, "one", partial.by, partial.aggregates, kept), 3, "g")
    plan = made._jdf.queryExecution().executedPlan().toString()
    assert plan.count("HashAggregate") == 1, plan
    assert plan.count("Exchange") == 1, plan
    assert plan.index("Exchange") < plan.index("HashAggregate"), plan


def test_what_the_plan_within_observes_is_told_after_the_action(spark: SparkSession) -> None:
    frames = frames_of(spark)
    watched, seen = frames.observe(spark.range(0, 100, 1, 2).toDF("id"), ("max(id)", "min(id)"))
    watched = frames.select(watched, ("id", "true AS one"))
    made = frames.aggregate(watched, "one", ("id",), ("count(1) AS n",), ("id", "n"))
    frames.run([made])
    assert seen(watched) == [99, 0]
