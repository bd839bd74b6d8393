"""Looking into the state that a real job left: every key is found by its hash, and is what Spark computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from state_runtime import query_state

from .jobs import ORACLE_BUCKETS, assert_equals_batch, two_step_job, write_input

pytestmark = pytest.mark.spark


def test_every_key_of_a_job_is_found_and_is_what_spark_computes(spark: SparkSession, tmp_path: Path) -> None:
    """A string key with nulls, and a composite key of an integer and a boolean; log and tables are there by now."""
    write_input(tmp_path / "in", 0, 6)
    two_step_job(tmp_path).run(spark, trigger={"availableNow": True})
    assert_equals_batch(spark, tmp_path)  # also makes the views
    store = str(tmp_path / "store")

    totals = spark.sql("SELECT name, count(*), sum(amount), max_by(amount, id) FROM input GROUP BY name").collect()
    assert any(row.name is None for row in totals)
    for name, *expected in totals:
        found = query_state(store, "steps", "steps", "steps", key={"name": name}).to_pylist()
        assert [list(row.values()) for row in found] == [[name, *expected]]
    assert query_state(store, "steps", None, "steps").num_rows == len(totals)
    assert query_state(store, "steps", None, "steps", key={"name": "nobody"}).num_rows == 0

    buckets = spark.sql(ORACLE_BUCKETS).collect()
    whole = query_state(store, "steps", "buckets", "aggregate")
    assert whole.num_rows == len(buckets)
    for row in buckets:
        key = {"bucket": row.bucket, "even": row.even}
        (found,) = query_state(store, "steps", "buckets", "aggregate", key=key).to_pylist()
        assert row.n in found.values()
        assert row.total in found.values()
        assert row.least in found.values()
