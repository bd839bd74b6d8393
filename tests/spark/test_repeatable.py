"""Code between operators that gives other rows when a task is repeated: it is found before the stream starts."""

from __future__ import annotations

import logging

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime.pipeline.compile import TransformStep, _transformed
from state_runtime.pipeline.repeatable import unrepeatable_columns

pytestmark = pytest.mark.spark


def test_random_numbers_and_clocks_are_found_by_column(spark: SparkSession) -> None:
    """Wherever they stand in the plan; what is a function of the row alone is not named."""
    rows = spark.createDataFrame([], "k string, t timestamp, n int")
    made = (
        rows.withColumn("draw", F.rand())
        .withColumn("id", F.expr("uuid()"))
        .withColumn("at", F.current_timestamp())
        .withColumn("age", F.unix_timestamp() - F.unix_timestamp("t"))
        .withColumn("today", F.current_date())
        .withColumn("bucket", F.xxhash64("k") % 10)
        .withColumn("now", F.col("t"))
        .filter("rand() < 0.5")
        .select("k", "draw", "id", "at", "age", "today", "bucket", "now")
    )
    expected = [f"column '{name}'" for name in ("age", "at", "draw", "id", "today")]
    assert unrepeatable_columns(made) == ["a condition", *expected]
    assert unrepeatable_columns(rows.withColumn("half", F.col("n") / 2).filter("n > 1").groupBy("k").count()) == []


def test_a_transform_that_is_not_repeatable_is_warned_of_once(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """State and output would disagree after a repeated task, and nothing would show it."""

    def drawn(frame: DataFrame) -> DataFrame:
        return frame.withColumn("draw", F.rand())

    schema = spark.createDataFrame([], "k string").schema
    with caplog.at_level(logging.WARNING):
        _transformed(spark, schema, TransformStep(drawn))
        _transformed(spark, schema, TransformStep(lambda frame: frame.filter("k > ''")))
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("state_runtime")]
    assert said.startswith("transform(drawn) gives other rows when Spark repeats a task or an epoch: column 'draw'.")
