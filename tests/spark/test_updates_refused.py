"""An operator that emits a key's row anew with every change does not feed one that counts each row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from state_runtime import JobSettings, StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources
from state_runtime.pipeline.watermark import DELAY_METADATA, watermark_columns

pytestmark = pytest.mark.spark

SCHEMA = T.StructType(
    [
        T.StructField("k", T.StringType()),
        T.StructField("place", T.StringType()),
        T.StructField("n", T.LongType()),
        T.StructField("at", T.TimestampType(), metadata={DELAY_METADATA: 1000}),
    ]
)
TEN = windows.tumbling("10 seconds")
MINUTE = windows.tumbling("1 minute")


def compiled(spark: SparkSession, tmp_path: Path, build: Callable[[Any], Any]) -> CompiledPipeline:
    job = StreamingJob("updates", store=str(tmp_path / "store"))
    build(job.read(lambda _: None))  # type: ignore[arg-type, return-value]
    opened = OpenedSource(spark.createDataFrame([], SCHEMA), watermark_columns(SCHEMA))
    return compile_pipeline(spark, OpenedSources.of_one(opened), job.plan().graph, JobSettings())


def summed(stream: Any) -> Any:
    return stream.key_by("k", "place").aggregate(uid="fine", n=aggregates.sum("n"))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (summed, lambda s: s.key_by("place").aggregate(uid="coarse", most=aggregates.max("n"), total=aggregates.sum("n"))),
        (summed, lambda s: s.transform(lambda f: f.where("n > 1")).key_by("place").aggregate(uid="coarse", c=aggregates.count())),
        (summed, lambda s: s.key_by("place").aggregate(uid="coarse", mean=aggregates.avg("n"))),
        (
            lambda s: s.key_by("k").latest_by("at", "place", "n", uid="fine"),
            lambda s: s.key_by("place").aggregate(uid="coarse", c=aggregates.count()),
        ),
        (
            lambda s: s.key_by("k", "place").window(TEN, uid="fine", output_mode="update", n=aggregates.count()),
            lambda s: s.key_by("place").window(MINUTE, uid="coarse", output_mode="append", c=aggregates.stddev("n")),
        ),
    ],
)  # fmt: skip
def test_each_update_would_be_counted_so_it_is_refused(
    spark: SparkSession, tmp_path: Path, first: Callable[[Any], Any], then: Callable[[Any], Any]
) -> None:
    """As Spark does; both operators are named, and the ways out."""
    with pytest.raises(
        InvalidPipeline, match=r"'coarse': .*would count each update again\. Operator 'fine' emits"
    ) as told:
        compiled(spark, tmp_path, lambda stream: then(first(stream)))
    assert 'output_mode="append"' in str(told.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda s: summed(s).key_by("place").aggregate(uid="coarse", most=aggregates.max("n"), kinds=aggregates.count_distinct_approx("k")),
        lambda s: summed(s).key_by("place").latest_by("n", "k", uid="coarse"),
        lambda s: summed(s).key_by("k", "place").deduplicate(uid="first").key_by("place").aggregate(uid="coarse", c=aggregates.count()),
        lambda s: s.key_by("k", "at")
        .aggregate(uid="fine", output_mode="append", n=aggregates.count())
        .key_by("k")
        .window(MINUTE, uid="coarse", output_mode="append", total=aggregates.sum("n")),
        lambda s: s.key_by("k")
        .window(TEN, uid="fine", output_mode="append", n=aggregates.count())
        .transform(lambda f: f.selectExpr("n", "window_time(window) AS t"))
        .key_by("t")
        .aggregate(uid="coarse", output_mode="append", total=aggregates.sum("n"), most=aggregates.max("n")),
        lambda s: s.key_by("k", "place")
        .window(TEN, uid="fine", output_mode="append", n=aggregates.count())
        .transform(lambda f: f.selectExpr("place", "n", "window_time(window) AS t"))
        .key_by("place")
        .window(MINUTE, uid="coarse", output_mode="append", total=aggregates.sum("n")),
    ],
)  # fmt: skip
def test_what_does_not_mind_an_update_and_what_has_none_is_taken(
    spark: SparkSession, tmp_path: Path, build: Callable[[Any], Any]
) -> None:
    """The greatest, how many different, the newest, the first of each; and what comes once."""
    assert compiled(spark, tmp_path, build).operators
