"""What nothing reads is not scanned, shuffled or handed to Python; and no result depends on that."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.window import Window

from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates, windows
from state_runtime.pipeline.columns_read import CORRUPT_COLUMN_CONF, without_unread
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources
from state_runtime.pipeline.watermark import DELAY_METADATA, watermark_columns
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN
from state_runtime.spark.jvm import items
from state_runtime.spark.needed_columns import columns_needed
from state_runtime.spark.prepared import PreparedFrames
from state_runtime.spark.rebound import function_name
from state_runtime.spark.sql import quoted

pytestmark = pytest.mark.spark

SCHEMA = T.StructType(
    [
        T.StructField("k", T.StringType()),
        T.StructField("n", T.LongType()),
        T.StructField("at", T.TimestampType(), metadata={DELAY_METADATA: 1000}),
        T.StructField("url", T.StringType()),
        T.StructField("place", T.StructType([T.StructField("x", T.IntegerType(), nullable=False)])),
        T.StructField("tags", T.ArrayType(T.StringType())),
        T.StructField("odd `name`", T.IntegerType()),
        T.StructField("ends", T.TimestampType()),
    ]
)
ROWS = [
    (
        f"k{i % 3}",
        i,
        dt.datetime(2024, 1, 1, 0, 0, i, tzinfo=dt.UTC),
        f"u{i % 5}",
        (i % 2,) if i % 4 else None,
        ["a", "b"][: i % 3],
        i,
        dt.datetime(2024, 1, 1, 0, 1, i, tzinfo=dt.UTC),
    )
    for i in range(20)
]


def compiled(spark: SparkSession, tmp_path: Path, build: Callable[[Any], Any]) -> CompiledPipeline:
    job = StreamingJob("columns", store=str(tmp_path / "store"))
    build(job.read(lambda _: None))  # type: ignore[arg-type, return-value]
    opened = OpenedSource(spark.createDataFrame([], SCHEMA), watermark_columns(SCHEMA))
    return compile_pipeline(spark, OpenedSources.of_one(opened), job.plan().graph, JobSettings())


def added(frame: DataFrame) -> DataFrame:
    return frame.withColumn("twice", F.col("n") * 2).where("url LIKE 'u%'")


def looked(frame: DataFrame) -> DataFrame:
    """Takes a number out of the rows, which no plan shows."""
    greatest = frame.agg(F.max("`odd ``name```")).first()
    return frame.where(F.col("n") >= (greatest[0] if greatest and greatest[0] else 0) - 5)


@pytest.mark.parametrize(
    ("build", "reads", "of_source"),
    [
        (lambda s: s.key_by("k").aggregate(uid="u", n=aggregates.count()), ("k",), {"k"}),
        (lambda s: s.key_by("k").aggregate(uid="u", t=aggregates.sum("n")), ("k", "n"), {"k", "n"}),
        (
            lambda s: s.key_by("k", "at").aggregate(uid="u", output_mode="append", n=aggregates.count()),
            ("k", "at"), {"k", "at"},
        ),
        (
            lambda s: s.key_by("k").window(windows.tumbling("10 seconds"), uid="u", output_mode="append", n=aggregates.count()),
            ("k", "at"), {"k", "at"},
        ),
        (
            lambda s: s.key_by("k").window(windows.session("10 seconds"), uid="u", output_mode="append", n=aggregates.max("n")),
            ("k", "at", "n"), {"k", "at", "n"},
        ),
        (
            lambda s: s.key_by("k").window(windows.session(end_column="ends"), uid="u", n=aggregates.count()),
            ("k", "at", "ends"), {"k", "at", "ends"},
        ),
        (lambda s: s.key_by("k").latest_by("n", "url", uid="u"), ("k", "n", "url"), {"k", "n", "url"}),
        (lambda s: s.key_by("k").latest_by("n", uid="u"), ("k", "n", *(f for f in SCHEMA.names if f not in "kn")), None),
        (lambda s: s.key_by("k").deduplicate(uid="u"), (), None),
        (lambda s: s.write(ParquetSink("/nowhere")).key_by("k").aggregate(uid="u", n=aggregates.count()), None, None),
        (
            lambda s: s.transform(added).key_by("k").aggregate(uid="u", t=aggregates.sum("twice")),
            ("k", "twice"), {"k", "n", "url"},
        ),
        (
            lambda s: s.transform(added).transform(lambda f: f.drop("url")).key_by("k").aggregate(uid="u", t=aggregates.count()),
            ("k",), {"k", "url"},
        ),
        (lambda s: s.transform(lambda f: f.select("k", "url")).key_by("k").deduplicate(uid="u"), (), {"k", "url"}),
        (lambda s: s.transform(lambda f: f.select("k", "tags")).write(ParquetSink("/nowhere")), (), {"k", "tags"}),
        (lambda s: s.transform(lambda f: f.select("n")), (), {"n"}),
        (lambda s: s.transform(looked).key_by("k").aggregate(uid="u", n=aggregates.count()), ("k",), None),
    ],
)  # fmt: skip
def test_an_operator_reads_its_keys_and_arguments_and_of_the_source_what_these_are_made_of(
    spark: SparkSession, tmp_path: Path, build: Callable[[Any], Any], reads: tuple[str, ...], of_source: set[str] | None
) -> None:
    """User code and deduplicate, which emits whole rows, read all columns that they get; so does a sink."""
    pipeline = compiled(spark, tmp_path, build)
    if reads is not None:
        assert pipeline.stages[0].reads == tuple(map(quoted, reads))
    assert pipeline.source_reads == (None if of_source is None else frozenset(of_source),)


def _joined(frame: DataFrame) -> DataFrame:
    static = frame.sparkSession.createDataFrame([("u1", 1), ("u2", 2)], "url string, weight int")
    return frame.join(F.broadcast(static), "url")


def _ranked(frame: DataFrame) -> DataFrame:
    return frame.withColumn("r", F.row_number().over(Window.partitionBy("k").orderBy("n", "url"))).where("r < 4")


def _python(frame: DataFrame) -> DataFrame:
    return frame.withColumn("length", F.udf(lambda url: len(url), "int")("url")).where("length > 0 AND n > 3")


def _viewed(frame: DataFrame) -> DataFrame:
    frame.createOrReplaceTempView("events")
    return frame.sparkSession.sql("SELECT k, n, tags FROM events WHERE url > 'u1'")


def _in_frames(frame: DataFrame) -> DataFrame:
    plain = frame.drop("odd `name`")  # Spark itself cannot hand that to Python
    return plain.mapInArrow(lambda batches: batches, plain.schema)


TRANSFORMS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "added": added,
    "filtered": lambda frame: frame.where("size(tags) > 0"),
    "struct": lambda frame: frame.where("place IS NOT NULL AND place.x = 1"),
    "inside": lambda frame: frame.where("place.x IS NOT NULL"),
    "distinct": lambda frame: frame.distinct(),
    "first of each": lambda frame: frame.dropDuplicates(["url", "k"]).select("k", F.lit(1).cast("long").alias("n")),
    "with itself": lambda frame: frame.union(frame.where("url = 'u1'")),
    "joined with itself": lambda frame: frame.join(frame.select("n", F.col("url").alias("other")), "n").where("other > 'u2'"),
    "joined": _joined,
    "ranked": _ranked,
    "exploded": lambda frame: frame.withColumn("tag", F.explode("tags")).where("tag = 'a'"),
    "grouped": lambda frame: frame.groupBy("k", "url").agg(F.sum("n").alias("n")),
    "sorted": lambda frame: frame.orderBy("url", "n").limit(7),
    "python": _python,
    "in frames": _in_frames,
    "coalesced": lambda frame: frame.withColumn("n", F.coalesce(F.when(F.col("url") == "u1", 100), F.col("n"))),
    "subquery": lambda frame: frame.where(F.col("n") > F.lit(3)).where(
        frame.select(F.max("url")).scalar() >= F.col("url")
    ),
    "named": lambda frame: frame.alias("a").where("a.n > 3 AND a.url < 'u4'"),
    "viewed": _viewed,
    "moved": lambda frame: frame.repartition(3, "url").where("`odd ``name``` > 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_transforms_make_is_the_same_without_what_nothing_reads(spark: SparkSession, name: str) -> None:
    """Whatever shape Spark's plan has: where it cannot tell, everything is read."""
    transform = TRANSFORMS[name]
    wanted = ("k", "n")
    given = spark.createDataFrame([], SCHEMA)
    read = columns_needed(given, transform(given), wanted)
    rows = spark.createDataFrame(ROWS, SCHEMA)
    pruned = rows if read is None else without_unread(rows, read, "_corrupt_record")

    def results(frame: DataFrame) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in transform(frame).select(*wanted).collect())

    assert results(pruned) == results(rows)
    if name in ("added", "filtered", "struct", "python", "coalesced", "named", "viewed"):
        assert read is not None
        assert read < frozenset(SCHEMA.names)


def test_a_column_that_cannot_be_null_or_has_event_time_stays(spark: SparkSession) -> None:
    """Spark takes `n IS NOT NULL` for granted there and drops it from its plan: with nulls no row would be left."""
    schema = T.StructType(
        [T.StructField("k", T.StringType()), T.StructField("n", T.LongType(), nullable=False), SCHEMA["at"]]
    )
    given = spark.createDataFrame([], schema)
    needed = columns_needed(given, given.where("n IS NOT NULL"), ("k",))
    assert needed == {"k"}
    rows = spark.createDataFrame([("a", 1, None), ("b", 2, None)], schema)
    kept = without_unread(rows, needed, "_corrupt_record")
    assert kept.where("n IS NOT NULL").count() == 2
    assert kept.schema["at"].metadata == {DELAY_METADATA: 1000}
    assert kept.schema == schema


def test_the_column_of_malformed_records_is_found_in_whole_records(spark: SparkSession) -> None:
    """What is malformed depends on what is parsed."""
    rows = spark.createDataFrame([], "k string, n long, broken string")
    assert without_unread(rows, {"k", "broken"}, "broken") is rows
    assert without_unread(rows, {"k"}, "broken") is not rows
    assert spark.conf.get(CORRUPT_COLUMN_CONF) == "_corrupt_record"


def test_a_job_scans_and_shuffles_only_what_it_reads(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark plans the epoch: the scan below the stream, and what each task is handed."""
    plans: list[str] = []
    run = PreparedFrames.run

    def running(self: PreparedFrames, frames: Any) -> None:
        run(self, frames)
        plans.extend(str(frame._jdf.queryExecution().executedPlan().toString()) for frame in frames)

    monkeypatch.setattr(PreparedFrames, "run", running)
    source = tmp_path / "in"
    spark.createDataFrame(ROWS, SCHEMA).coalesce(1).write.parquet(str(source))
    job = StreamingJob("scan", store=str(tmp_path / "store"), settings=JobSettings(local_dir=str(tmp_path / "local")))
    (
        job.read(lambda s: s.readStream.schema(SCHEMA).parquet(str(source)))
        .transform(lambda frame: frame.withColumn("twice", F.col("n") * 2))
        .key_by("k")
        .aggregate(uid="sums", total=aggregates.sum("twice"))
        .write(ParquetSink(str(tmp_path / "out")))
    )
    executions = spark._jsparkSession.sharedState().statusStore()
    earlier = int(executions.executionsCount())
    job.run(spark, trigger={"availableNow": True})
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    out = {row["k"]: row["total"] for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert out == {f"k{i}": sum(2 * n for n in range(20) if n % 3 == i) for i in range(3)}
    epoch = [str(execution.physicalPlanDescription()) for execution in items(executions.executionsList())[earlier:]]
    scan = re.search(r"ReadSchema: (.*)", "\n".join(epoch))
    handed = re.search(rf"{function_name(0)}\(([^)]*)\)", "\n".join(plans))
    assert scan is not None
    assert handed is not None
    assert scan[1] == "struct<k:string,n:bigint,at:timestamp>"
    names = [name.partition("#")[0] for name in handed[1].split(", ")]
    assert names == ["k", "twice", HASH_COLUMN, SEQUENCE_COLUMN]
