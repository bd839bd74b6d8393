"""Jobs that write Iceberg tables: exact over restarts, other shards, new roots and roots that were put back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from state_runtime.base.errors import InvalidPipeline, SnapshotInUse

from .jobs import (
    ROWS_PER_FILE,
    assert_iceberg_equals_batch,
    iceberg_options,
    iceberg_sinks,
    two_step_job,
    write_input,
)

pytestmark = pytest.mark.spark
AVAILABLE = {"availableNow": True}


def run(spark: SparkSession, root: Path, **changes: Any) -> None:
    two_step_job(root, sinks=iceberg_sinks(root), **changes).run(spark, trigger=AVAILABLE)


def steps_of(root: Path) -> Table:
    return load_catalog("lake", **iceberg_options(root)).load_table("shop.steps")


def test_iceberg_tables_are_exact_over_restarts_and_other_shards(spark: SparkSession, tmp_path: Path) -> None:
    """One table is appended to, the other has the newest row of each key."""
    for first, files, parallelism in ((0, 3, 2), (3, 2, 3)):
        write_input(tmp_path / "in", first, files)
        run(spark, tmp_path, parallelism=parallelism)
        assert_iceberg_equals_batch(spark, tmp_path)
    assert len(steps_of(tmp_path).snapshots()) == 1 + 5, "the owner is a commit, and an epoch is one"
    staged = list((tmp_path / "store").rglob("outputs/**/*.parquet"))
    assert 0 < len(staged) <= 2 * 3, "what is staged is kept for one more checkpoint at most"


def test_roots_that_are_made_anew_and_put_back_lose_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """A new root counts from 1 again, and its rows come; one that was put back knows less than the table and goes on
    above it: what it reads again comes again, and what is new is not skipped."""
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "local")
    run(spark, tmp_path)
    assert steps_of(tmp_path).scan().count() == 2 * ROWS_PER_FILE
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    write_input(tmp_path / "in", 1, 2)
    run(spark, tmp_path)
    for name in ("store", "local"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "copy").rename(tmp_path / "store")
    write_input(tmp_path / "in", 3, 1)
    run(spark, tmp_path)
    rows = steps_of(tmp_path).scan().to_arrow().column("id").to_pylist()
    assert set(rows) == set(range(4 * ROWS_PER_FILE))
    assert len(rows) == 7 * ROWS_PER_FILE


def test_a_copy_of_a_root_is_refused_while_the_original_is_there(spark: SparkSession, tmp_path: Path) -> None:
    """Both have one id and count their epochs alike: what the one has written, the other would take for its own."""
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    write_input(tmp_path / "in", 1, 1)
    copied = {"store": str(tmp_path / "copy"), "local_dir": str(tmp_path / "local-of-copy")}
    with pytest.raises(
        SnapshotInUse, match=r"in shop.steps of the catalog 'lake' belongs to the job root .*store/steps"
    ):
        run(spark, tmp_path, **copied)
    run(spark, tmp_path)
    assert_iceberg_equals_batch(spark, tmp_path)


def test_a_table_that_does_not_fit_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    steps, buckets = iceberg_sinks(tmp_path)
    steps.table, buckets.table = buckets.table, steps.table
    steps._log, buckets._log = buckets._log, steps._log
    with pytest.raises(InvalidPipeline, match="has other rows"):
        two_step_job(tmp_path, name="other", sinks=(steps, buckets)).run(spark, trigger=AVAILABLE)
    assert not (tmp_path / "store" / "other").exists()
