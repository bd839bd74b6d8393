"""A job of two operators through a chain of parallelisms, and what cannot be rescaled."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from state_runtime import Progress
from state_runtime.errors import InvalidConfiguration
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.store import open_store

from .jobs import assert_equals_batch, two_step_job, write_input

pytestmark = pytest.mark.spark


def test_a_chain_of_parallelisms_gives_the_output_of_an_unscaled_run(spark: SparkSession, tmp_path: Path) -> None:
    """2 → 4 → 3 → 7 → 1 → 2, the fourth time without local copies: output equals a recomputation of the whole input."""
    seen: list[list[Progress]] = []
    for number, parallelism in enumerate((2, 4, 3, 7, 1, 2)):
        if parallelism == 7:
            shutil.rmtree(tmp_path / "local")
        write_input(tmp_path / "in", 2 * number, 2)
        progress: list[Progress] = []
        job = two_step_job(tmp_path, parallelism=parallelism)
        job.run(spark, trigger={"availableNow": True}, on_progress=progress.append)
        seen.append(progress)
    assert_equals_batch(spark, tmp_path)
    for number, progress in enumerate(seen[1:], 1):
        stale, primary = (sum(getattr(p, f"{kind}_restores") for p in progress) for kind in ("stale", "primary"))
        assert (primary > 0) == (number == 3), f"run {number}"
        assert (stale > 0) == (number != 3), f"run {number}"
        assert max(p.restore_ms for p in progress) > 0


def test_another_max_parallelism_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """Which shard a key belongs to follows from it."""
    write_input(tmp_path / "in", 0, 1)
    two_step_job(tmp_path).run(spark, trigger={"availableNow": True})
    store = open_store(str(tmp_path / "store"))
    root = store.child("steps")
    info = read_job_info(root)
    assert info is not None
    root.put(JOB_FILE, encode_document("job", replace(info, max_parallelism=4096)))
    newest = Catalog(store, "steps").latest()
    with pytest.raises(
        InvalidConfiguration, match=r"created with max_parallelism 4096.*has 32768.*nothing was changed"
    ):
        two_step_job(tmp_path).run(spark, trigger={"availableNow": True})
    assert Catalog(store, "steps").latest() == newest
