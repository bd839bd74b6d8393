"""Jobs that write Delta tables: exact over restarts, other shards, new roots and roots that were put back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from state_runtime import EpochInfo, StreamingJob, foreach_epoch
from state_runtime.base.errors import InvalidPipeline
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

from .jobs import (
    KEYS,
    ROWS_PER_FILE,
    SCHEMA,
    assert_delta_equals_batch,
    delta_sinks,
    settings,
    two_step_job,
    write_input,
)

pytestmark = pytest.mark.spark
AVAILABLE = {"availableNow": True}


def run(spark: SparkSession, root: Path, **changes: Any) -> None:
    two_step_job(root, sinks=delta_sinks(root), **changes).run(spark, trigger=AVAILABLE)


def test_delta_tables_are_exact_over_restarts_and_other_shards(spark: SparkSession, tmp_path: Path) -> None:
    """One table is appended to, the other has the newest row of each key."""
    for files, parallelism in ((3, 2), (2, 3)):
        write_input(tmp_path / "in", 0 if parallelism == 2 else 3, files)
        run(spark, tmp_path, parallelism=parallelism)
        assert_delta_equals_batch(spark, tmp_path)
    assert len(DeltaTable(str(tmp_path / "out-steps")).history()) == 6, "the table was made, and an epoch is a commit"
    staged = list((tmp_path / "out-buckets" / "_stillstate" / "staging").rglob("*.parquet"))
    assert len(staged) <= 2 * 2, "rows that were merged are kept for one more checkpoint at most"


def test_a_root_that_is_made_anew_is_not_taken_for_the_old_one(spark: SparkSession, tmp_path: Path) -> None:
    """Its epochs count from 1 again: by the epoch alone the table would skip them."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, tmp_path)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "local")
    run(spark, tmp_path)
    rows = DeltaTable(str(tmp_path / "out-steps")).to_pyarrow_table()
    assert rows.num_rows == 2 * 3 * ROWS_PER_FILE, "it has read all of its input, and its rows come"


def test_a_root_that_was_put_back_from_an_older_copy_goes_on_above_what_the_table_has(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its snapshots know less than the table. What it reads again comes again, and what is new is not skipped."""
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    write_input(tmp_path / "in", 1, 2)
    run(spark, tmp_path)
    for name in ("store", "local"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "copy").rename(tmp_path / "store")
    write_input(tmp_path / "in", 3, 1)
    run(spark, tmp_path)
    rows = DeltaTable(str(tmp_path / "out-steps")).to_pyarrow_table().column("id").to_pylist()
    assert set(rows) == set(range(4 * ROWS_PER_FILE))
    assert len(rows) == 6 * ROWS_PER_FILE


def test_a_table_that_does_not_fit_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 1)
    run(spark, tmp_path)
    steps, buckets = delta_sinks(tmp_path)
    swapped = type(steps)(buckets.table, merge_on=["name"]), type(buckets)(steps.table)
    with pytest.raises(InvalidPipeline, match="has other rows"):
        two_step_job(tmp_path, name="other", sinks=swapped).run(spark, trigger=AVAILABLE)
    assert not (tmp_path / "store" / "other").exists()


def test_a_function_learns_who_writes(spark: SparkSession, tmp_path: Path) -> None:
    """The third argument is there if it is asked for; two are enough as ever."""
    write_input(tmp_path / "in", 0, 2)
    told: list[EpochInfo] = []
    counted: list[int] = []

    def three(frame: DataFrame, epoch: int, info: EpochInfo) -> None:
        assert (info.epoch, frame.count()) == (epoch, frame.count())
        told.append(info)

    job = StreamingJob("told", store=str(tmp_path / "store"), settings=settings(tmp_path))
    rows = job.read(lambda s: s.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in")))
    once = rows.key_by("name").deduplicate(uid="once")
    once.write(foreach_epoch(three), name="three").write(foreach_epoch(lambda df, epoch: counted.append(df.count())))
    job.run(spark, trigger=AVAILABLE)
    uid = Catalog(open_store(str(tmp_path / "store")), "told").job_info().uid
    assert {(info.root_id, info.sink, info.job, info.writer) for info in told} == {
        (uid, "three", "told", f"stillstate/{uid}/three")
    }
    assert sorted({info.epoch for info in told}) == [info.epoch for info in told]
    assert sum(counted) <= KEYS + 1


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (lambda df, epoch: None, False),
        (lambda df, epoch, place="here": None, False),
        (lambda df, epoch, *more: None, False),
        (lambda df, epoch, *, place="here": None, False),
        (lambda df, epoch, who: None, True),
        (lambda df, epoch, info=None: None, True),
        (print, False),
    ],
    ids=["two", "a default", "any", "by name", "three", "named info", "in C"],
)
def test_an_argument_that_a_function_has_for_itself_is_left_to_it(function: Any, asks: bool) -> None:
    """`lambda df, epoch, place=place: …` is how functions are made in a loop: its place must stay what it was."""
    assert foreach_epoch(function)._takes_info is asks  # type: ignore[attr-defined]
