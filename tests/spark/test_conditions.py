"""Aggregates over some of the rows only; beside Spark's own, they are in the parity suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import JobSettings, StreamingJob, aggregates
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources

pytestmark = pytest.mark.spark

SCHEMA = "k string, n bigint, d double"


def compiled(spark: SparkSession, tmp_path: Path, **wanted: aggregates.Aggregate) -> CompiledPipeline:
    job = StreamingJob("conditions", store=str(tmp_path / "store"))
    stream = job.read(lambda _: None)  # type: ignore[arg-type, return-value]
    stream.key_by("k").aggregate(uid="sums", **wanted)
    return compile_pipeline(
        spark,
        OpenedSources.of_one(OpenedSource(spark.createDataFrame([], SCHEMA), ())),
        job.plan().graph,
        JobSettings(),
    )


def test_what_a_condition_reads_is_computed_before_the_shuffle_and_no_more_is_sent(
    spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = compiled(spark, tmp_path, gains=aggregates.sum("n").where("d > 0"), rows=aggregates.count())
    (stage,) = pipeline.stages
    assert stage.reads == ("`k`", "CASE WHEN (d > 0) THEN `n` END AS `__stillstate_where_0`")
    assert stage.output.names == ["k", "gains", "rows"]


def test_another_condition_is_another_aggregate_to_stored_state(spark: SparkSession, tmp_path: Path) -> None:
    """Its name keeps its meaning over restarts, whatever the runtime calls the column."""

    def functions(**wanted: aggregates.Aggregate) -> dict[str, str]:
        return dict(compiled(spark, tmp_path, **wanted).operators[0].entry().functions)

    one = functions(a=aggregates.sum("n").where("d > 0"))
    assert one == {"a": "sum(n where d > 0)"}
    more = functions(b=aggregates.count().where("n > 1"), a=aggregates.sum("n").where("d > 0"))
    assert more == {"b": "count(* where n > 1)", **one}
    assert functions(a=aggregates.sum("n"))["a"] == "sum(n)"
    by = functions(a=aggregates.max_by("k", "d").where("n > 1"), b=aggregates.min_by("k", "d"))
    assert by == {"a": "max_by(k by d where n > 1)", "b": "min_by(k by d)"}


def test_a_condition_on_the_greatest_takes_the_rows_out_and_not_their_values(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A value that is null is one to choose; a row that is left out is none."""
    (stage,) = compiled(spark, tmp_path, a=aggregates.max_by("n", "d").where("k = 'x'")).stages
    assert stage.reads == ("`k`", "CASE WHEN (k = 'x') THEN `d` END AS `__stillstate_where_0`", "`n`")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aggregates.sum("n").where("d >"), r"'sums', aggregate 'a': where\('d >'\) cannot be used: .*PARSE_SYNTAX"),
        (lambda: aggregates.sum("n").where("e > 0"), r"where\('e > 0'\) cannot be used: .*`e`"),
        (lambda: aggregates.sum("n").where("d + 1"), r"where\('d \+ 1'\) cannot be used: .*DATATYPE_MISMATCH"),
        (lambda: aggregates.first("n").where("d > 0"), r"first\('n', ignore_nulls=True\)"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_when_the_job_is_built(
    spark: SparkSession, tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(InvalidPipeline, match=message):
        compiled(spark, tmp_path, a=make())
