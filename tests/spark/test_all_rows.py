"""Aggregates and windows without a key: one group, the same rows as Spark's batch query without GROUP BY."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates, reading, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.job import Stream
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources
from state_runtime.pipeline.watermark import watermark_columns
from tests.job_settings import job_settings

pytestmark = pytest.mark.spark

SCHEMA = "k string, n bigint, at timestamp"
START = datetime(2026, 1, 1, tzinfo=UTC)
WANTED = {
    "rows": aggregates.count(),
    "total": aggregates.sum("n"),
    "mean": aggregates.avg("n"),
    "gains": aggregates.sum("n").where("n > 0"),
}
SQL = "count(*) AS rows, sum(n) AS total, avg(n) AS mean, sum(n) FILTER (WHERE n > 0) AS gains"


def write_files(folder: Path, first: int, count: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(first, first + count):
        draw = random.Random(number)
        times = [START + timedelta(seconds=60 * number + draw.random() * 60) for _ in range(200)]
        table = pa.table(
            {
                "k": pa.array([draw.choice("abc") for _ in times], pa.string()),
                "n": pa.array([draw.choice([None, draw.randrange(-(2**40), 2**40)]) for _ in times], pa.int64()),
                "at": pa.array(times, pa.timestamp("us", "UTC")),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100)


def run(spark: SparkSession, root: Path, build: Callable[[Stream], Stream], **changes: Any) -> None:
    settings = job_settings(local_dir=str(root / "local"), **changes)
    job = StreamingJob("job", store=str(root / "store"), settings=settings)
    stream = job.read(
        lambda s: (
            s.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(root / "in"))
            .withWatermark("at", "1 minute")
        )
    )
    build(stream).write(ParquetSink(str(root / "out")))
    job.run(spark, trigger={"availableNow": True})


@pytest.mark.parametrize("partial", ["off", "on"])
def test_an_aggregate_without_a_key_is_that_of_all_rows(spark: SparkSession, tmp_path: Path, partial: Any) -> None:
    """Over a restart with another parallelism, with and without rows that Spark aggregated before the shuffle."""

    def build(stream: Stream) -> Stream:
        return stream.aggregate(uid="all", **WANTED)

    for first, parallelism in ((0, 3), (2, 2)):
        write_files(tmp_path / "in", first, 2)
        run(spark, tmp_path, build, parallelism=parallelism, partial_aggregation=partial)
        shutil.rmtree(tmp_path / "local")
        spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")).createOrReplaceTempView("input")
        emitted = spark.read.parquet(str(tmp_path / "out")).orderBy("epoch").collect()
        assert [field for field in emitted[-1].asDict() if field != "epoch"] == list(WANTED), "no key column"
        assert emitted[-1].asDict() | {"epoch": 0} == spark.sql(f"SELECT {SQL} FROM input").first().asDict() | {
            "epoch": 0
        }  # type: ignore[union-attr]
        assert [row.rows for row in emitted] == [200 * (number + 1) for number in range(first + 2)], "one row an epoch"
    state = reading.open(f"{tmp_path}/store/job").state("all", "aggregate").to_pandas()
    assert len(state) == 1


@pytest.mark.parametrize(
    ("window", "sql"),
    [
        (windows.tumbling("10 seconds"), "window(at, '10 seconds')"),
        (windows.sliding("20 seconds", "5 seconds"), "window(at, '20 seconds', '5 seconds')"),
        (windows.session("1 second"), "session_window(at, '1 second')"),
    ],
    ids=["tumbling", "sliding", "session"],
)
def test_windows_without_a_key_are_those_of_all_rows(
    spark: SparkSession, tmp_path: Path, window: Any, sql: str
) -> None:
    """All that the watermark closes, each once."""
    write_files(tmp_path / "in", 0, 2)
    write_files(tmp_path / "in", 50, 1)

    def build(stream: Stream) -> Stream:
        return stream.window(window, uid="w", output_mode="append", **WANTED)

    run(spark, tmp_path, build, parallelism=3)
    closed = START + timedelta(minutes=40)
    spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")).createOrReplaceTempView("input")
    expected = spark.sql(f"SELECT {sql} AS window, {SQL} FROM input GROUP BY {sql}").where(f"window.end < '{closed}'")
    emitted = spark.read.parquet(str(tmp_path / "out")).where(f"window.end < '{closed}'").drop("epoch")
    assert emitted.columns == expected.columns
    assert sorted(map(str, emitted.collect())) == sorted(map(str, expected.collect()))


def compiled(spark: SparkSession, tmp_path: Path, build: Callable[[Stream], Any]) -> CompiledPipeline:
    job = StreamingJob("all", store=str(tmp_path / "store"))
    build(job.read(lambda _: None))  # type: ignore[arg-type, return-value]
    frame = spark.createDataFrame([], SCHEMA)
    return compile_pipeline(
        spark,
        OpenedSources.of_one(OpenedSource(frame, watermark_columns(frame.schema))),
        job.plan().graph,
        JobSettings(),
    )


def test_no_more_than_what_is_aggregated_is_read(spark: SparkSession, tmp_path: Path) -> None:
    """The key is made of nothing; Spark can aggregate before the shuffle; a count of rows reads no column at all."""
    pipeline = compiled(
        spark, tmp_path, lambda s: s.aggregate(uid="all", total=aggregates.sum("n"), rows=aggregates.count())
    )
    (stage,) = pipeline.stages
    assert stage.reads == ("true AS `__stillstate_all`", "`n`")
    assert stage.partial is not None
    assert stage.output.names == ["total", "rows"]
    assert pipeline.source_reads == ({"n"},)
    counting = compiled(spark, tmp_path, lambda s: s.aggregate(uid="all", rows=aggregates.count()))
    assert counting.source_reads == (frozenset(),)


def test_a_key_of_no_columns_is_pointed_to_the_stream(tmp_path: Path) -> None:
    stream = StreamingJob("all", store=str(tmp_path / "store")).read(lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidPipeline, match=r"call aggregate\(\) or window\(\) on the stream itself"):
        stream.key_by()


def test_all_updates_of_keys_are_not_summed_up(spark: SparkSession, tmp_path: Path) -> None:
    """As behind any other aggregate; what is about all rows that were ever emitted is taken."""
    by_key = {"uid": "by-k", "n": aggregates.sum("n")}
    with pytest.raises(InvalidPipeline, match="'all': total would count each update again"):
        compiled(
            spark, tmp_path, lambda s: s.key_by("k").aggregate(**by_key).aggregate(uid="all", total=aggregates.sum("n"))
        )  # type: ignore[arg-type]
    pipeline = compiled(
        spark,
        tmp_path / "2",
        lambda s: s.key_by("k").aggregate(**by_key).aggregate(uid="all", most=aggregates.max("n")),
    )  # type: ignore[arg-type]
    assert [stage.output.names for stage in pipeline.stages] == [["k", "n"], ["most"]]
