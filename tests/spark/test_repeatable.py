"""Code between operators that gives other rows when a task is repeated: it is found before the stream starts."""

from __future__ import annotations

import logging

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from state_runtime.pipeline.compile import TransformStep, _transformed
from state_runtime.pipeline.repeatable import cut_by_epochs, unrepeatable_columns

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

    rows = spark.createDataFrame([], "k string")
    with caplog.at_level(logging.WARNING):
        _transformed([rows], TransformStep(drawn))
        _transformed([rows], TransformStep(lambda frame: frame.filter("k > ''")))
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("state_runtime")]
    assert said.startswith("transform(drawn) gives other rows when Spark repeats a task or an epoch: column 'draw'.")


def test_what_needs_all_rows_of_the_stream_is_found_and_what_is_done_to_static_tables_is_not(
    spark: SparkSession,
) -> None:
    """Only in the step that does it. A `groupBy` counts each epoch anew, as a `distinct` does."""
    given = spark.createDataFrame([], "k string, n int").where("n > 0")
    newest = F.row_number().over(Window.partitionBy("k").orderBy("n"))
    table = spark.createDataFrame([("a", 1)], "k string, w int").orderBy("w").limit(1).distinct()
    made = {
        "orderBy": given.orderBy("n"),
        "limit, orderBy": given.orderBy("n").limit(3),
        "window functions": given.withColumn("r", newest),
        "distinct": given.select("k").distinct().dropDuplicates(["k"]),
        "groupBy": given.join(table, "k").groupBy("k").count().where("count > 1"),
        "": given.join(table.groupBy("k").agg(F.max("w").alias("w")), "k").where("w > 1"),
    }
    for expected, frame in made.items():
        assert ", ".join(cut_by_epochs(given, frame)) == expected
    assert cut_by_epochs(made["orderBy"], made["orderBy"].where("k > 'a'")) == []


def test_a_job_that_sorts_an_epoch_is_warned(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    def newest_ten(frame: DataFrame) -> DataFrame:
        return frame.orderBy(F.desc("k")).limit(10)

    with caplog.at_level(logging.WARNING):
        _transformed([spark.createDataFrame([], "k string")], TransformStep(newest_ten))
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("state_runtime")]
    assert said.startswith("transform(newest_ten) uses limit, orderBy, which sees the rows of one epoch at a time")
