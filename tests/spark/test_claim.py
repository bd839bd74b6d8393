"""Whole jobs that begin from another job's snapshot; both write to one folder, so that the two outputs together are a recomputation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import StartFrom
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from tests.s3_server import CountingServer

from .homes import Home
from .jobs import StepsWithNote, assert_equals_batch, two_step_job, write_input

pytestmark = [pytest.mark.spark, pytest.mark.long]
ONCE = {"availableNow": True}


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        yield running


def test_a_fork_in_another_store_with_everything_changed_gives_the_output_of_one_job(
    spark: SparkSession, tmp_path: Path, server: CountingServer
) -> None:
    """Local → S3; parallelism, backend, changelog and the columns of a state are others. The old root goes after the first run."""
    write_input(tmp_path / "in", 0, 3)
    two_step_job(tmp_path).run(spark, trigger=ONCE)
    write_input(tmp_path / "in", 3, 2)
    copied: list[int] = []
    fork = two_step_job(
        tmp_path,
        StepsWithNote(),
        name="fork",
        store="s3://lake/state",
        storage_options=server.options,
        parallelism=3,
        backend="rocksdb",
        changelog="off",
        heartbeat_interval_s=5,
    )
    start = StartFrom(str(tmp_path / "store" / "steps"), storage_options={})
    fork.run(spark, trigger=ONCE, start_from=start, on_copy=lambda p: copied.append(p.objects_done))
    assert copied
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path / "in", 5, 2)
    fork = two_step_job(
        tmp_path, StepsWithNote(), name="fork", store="s3://lake/state", storage_options=server.options, parallelism=1,
        heartbeat_interval_s=5,
    )  # fmt: skip
    fork.run(spark, trigger=ONCE, start_from=start)
    assert_equals_batch(spark, tmp_path)


def test_a_claim_takes_the_job_over_and_the_old_root_is_gone(spark: SparkSession, tmp_path: Path, home: Home) -> None:
    """And going back to the snapshot that was taken over gives the same again, under higher epochs."""
    write_input(tmp_path / "in", 0, 3)
    place: dict[str, Any] = {"store": home.url, "storage_options": home.options, "heartbeat_interval_s": 5}
    two_step_job(tmp_path, **place).run(spark, trigger=ONCE)
    write_input(tmp_path / "in", 3, 2)
    heir = two_step_job(tmp_path, name="heir", parallelism=3, **place)
    heir.run(spark, trigger=ONCE, start_from=StartFrom(home.place("steps"), "CLAIM"))
    assert_equals_batch(spark, tmp_path)
    assert not home.is_there("steps")
    catalog = Catalog(open_store(home.url, home.options), "heir")
    first, newest = catalog.snapshot_ids()[0], catalog.latest()
    assert newest is not None
    for folder in ("out-steps", "out-buckets"):
        for path in (tmp_path / folder).glob("part-heir-*"):
            path.unlink()
    heir = two_step_job(tmp_path, name="heir", parallelism=2, **place)
    heir.run(spark, trigger=ONCE, from_snapshot=first)
    assert_equals_batch(spark, tmp_path)
    again = catalog.latest()
    assert again is not None
    assert again.abandoned == ((first + 1, newest.snapshot_id),)
