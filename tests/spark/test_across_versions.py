"""Stored state does not depend on the version of Spark: a job goes from one to another and back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from state_runtime import reading
from state_runtime.spark.versions import OLDEST

from .across_versions import JOBS, run_all
from .jobs import assert_equals_batch, rows_of, write_input

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROOT = Path(__file__).resolve().parent.parent.parent
OUTPUTS = ("out-steps", "out-buckets", "out", "out-queries")


def python_of_the_oldest() -> Path:
    """The interpreter of the environment that `make test-versions` makes."""
    oldest = ".".join(map(str, OLDEST))
    python = ROOT / ".venvs" / oldest / "bin" / "python"
    if pyspark.__version__.startswith(f"{oldest}."):
        pytest.skip(f"this is Spark {oldest}; the test is run by the newest")
    if not python.exists():
        pytest.skip(f"no environment with Spark {oldest} beside this one: make test-versions")
    return python


def run_elsewhere(python: Path, root: Path) -> str:
    done = subprocess.run(
        [str(python), "-m", "tests.spark.across_versions", str(root)],
        cwd=ROOT,
        # What names this process's own Spark and Python would reach the other one.
        env={name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def stored(root: Path, job: str) -> tuple[Any, ...]:
    """What the newest snapshot says: clocks but for the time of day, operators with their types, and each state's rows."""
    snapshot = reading.open(f"{root}/store/{job}")
    manifest, time = snapshot.manifest, snapshot.manifest.time
    assert time is not None
    clocks = (time.watermark_ms, time.event_time_ms, time.clocks)
    rows = {(state.operator, state.name): state.fingerprint() for state in snapshot.states()}
    assert sum(each.rows for each in rows.values())
    return manifest.operators, clocks, rows


def test_a_job_goes_from_the_oldest_spark_to_the_newest_and_back_with_the_same_snapshot(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Each job is begun on the oldest, goes on on the newest, and ends on the oldest; beside it the same three runs on the
    newest alone. Types, names of a query's operators, clocks, rows of state and output are the same, and no row is lost or
    twice."""
    python = python_of_the_oldest()
    mixed, alone = tmp_path / "mixed", tmp_path / "alone"
    versions: list[str] = []
    for turn in range(3):
        for root in (mixed, alone):
            write_input(root / "in", 2 * turn, 2)
        run_all(spark, alone)
        if turn == 1:
            run_all(spark, mixed)
        else:
            versions.append(run_elsewhere(python, mixed))
    assert {tuple(map(int, version.split(".")[:2])) for version in versions} == {OLDEST}
    for job in JOBS:
        assert stored(mixed, job) == stored(alone, job)
    for name in OUTPUTS:
        ours, theirs = (rows_of(spark.read.parquet(str(root / name))) for root in (mixed, alone))
        assert ours == theirs
        assert ours
    assert_equals_batch(spark, mixed)
