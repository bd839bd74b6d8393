"""A job whose output is compacted between its runs, with other shards each time: its output stays that of a batch query."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.output.compact import compact
from state_runtime.store import open_store

from .jobs import assert_equals_batch, two_step_job, write_input

pytestmark = pytest.mark.spark


def test_a_job_goes_on_with_a_compacted_output_folder(spark: SparkSession, tmp_path: Path) -> None:
    actor = Actor(SYSTEM_CLOCK, SYSTEM_IDS)
    folders = [tmp_path / name for name in ("out-steps", "out-buckets")]
    for number in range(3):
        write_input(tmp_path / "in", 4 * number, 4)
        two_step_job(tmp_path, parallelism=2 + number % 2).run(spark, trigger={"availableNow": True})
        for folder in folders:
            before = len(list(folder.glob("*.parquet")))
            done = compact(open_store(str(folder)), actor, min_age_s=0)
            assert done.inputs > 1
            assert len(list(folder.glob("*.parquet"))) == before - done.inputs + done.outputs
        assert_equals_batch(spark, tmp_path)
