"""Materialization as a Spark job: beside a stopped, a running and a killed stream, and across parallelisms."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import Progress, StreamingJob
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.faults import FOLD_KILL_POINTS
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.settings import JobSettings, MaterializationMode
from state_runtime.materialize import Record, background, materialize
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.materialize.process import FoldProcess
from state_runtime.materialize.records import PIN_LIVE_MS, open_pins, read_pin
from state_runtime.materialize.spark_job import materialize_job
from state_runtime.materialize.trigger import MaterializationResult
from state_runtime.reading.query import open_state
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import materialization_path
from state_runtime.store import open_store

from ..conftest import ROOT
from .jobs import assert_equals_batch, two_step_job, write_input

SMALL = MaterializationSizes(table_bytes=2_000, small_bytes=0)


def run(spark: SparkSession, job: StreamingJob) -> None:
    job.run(spark, trigger={"availableNow": True})


def newest(root: Path) -> Manifest:
    manifest = Catalog(open_store(str(root / "store")), "steps").latest()
    assert manifest is not None
    return manifest


def fold(
    spark: SparkSession, root: Path, mode: MaterializationMode = "auto", **options: object
) -> MaterializationResult:
    return materialize_job(spark, str(root / "store"), None, "steps", mode=mode, **options)  # type: ignore[arg-type]


def state_of(root: Path) -> list[dict[str, Any]]:
    view = open_state(str(root / "store"), "steps", "steps")
    found: list[dict[str, Any]] = view.read().to_pylist()
    return found


def test_a_materialization_is_adopted_by_the_next_run_and_changes_no_state(spark: SparkSession, tmp_path: Path) -> None:
    """The log goes, the state stays; the next fold writes only what changed."""
    write_input(tmp_path / "in", 0, 5)
    run(spark, two_step_job(tmp_path, materialize=False))
    before, state = newest(tmp_path), state_of(tmp_path)
    seen: list[tuple[int, int]] = []
    result = fold(spark, tmp_path, sizes=SMALL, on_progress=lambda done, total: seen.append((done, total)))
    assert result.mode == "major"
    assert result.snapshot_id == before.snapshot_id
    assert result.log_bytes_folded == before.log_bytes
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert fold(spark, tmp_path).reason == "materialization 1 waits for the job's next checkpoint"
    write_input(tmp_path / "in", 5, 1)
    run(spark, two_step_job(tmp_path, materialize=False))
    after = newest(tmp_path)
    assert [s for s in after.segments if s.snapshot_id <= before.snapshot_id] == []
    assert len(after.layers) == 1
    assert {t.operator for t in after.layers[0].tables} == {"steps", "buckets"}
    assert_equals_batch(spark, tmp_path)
    assert state_of(tmp_path) != state


def versions_of_tables(root: Path) -> set[str]:
    return {t.path for layer in newest(root).layers for t in layer.tables}


def test_the_log_alone_restores_where_nothing_is_materialized(spark: SparkSession, tmp_path: Path) -> None:
    """Flink's ChangelogRecoveryITCase.testNonMaterialization: no table in the snapshot, the result exact after a loss of all
    local copies."""
    for first in (0, 2):
        write_input(tmp_path / "in", first, 2)
        run(spark, two_step_job(tmp_path, materialize=False))
        assert newest(tmp_path).layers == ()
        assert len(newest(tmp_path).segments) == first + 2
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
    assert_equals_batch(spark, tmp_path)


def test_each_run_goes_on_from_another_materialization_at_another_parallelism(
    spark: SparkSession, tmp_path: Path
) -> None:
    """ChangelogRecoveryITCase.testMaterialization and PeriodicMaterializationRescale: every restore finds other tables than the one
    before, under 2, 4 and 3 shards, always from the primary store; minor and major."""
    seen: list[set[str]] = []
    modes: tuple[MaterializationMode, ...] = ("auto", "minor", "major")
    for number, (parallelism, mode) in enumerate(zip((2, 4, 3), modes, strict=True)):
        write_input(tmp_path / "in", 2 * number, 2)
        run(spark, two_step_job(tmp_path, parallelism=parallelism, materialize=False))
        seen.append(versions_of_tables(tmp_path))
        result = fold(spark, tmp_path, mode, sizes=SMALL)
        assert result.record_id == number + 1
        assert result.log_bytes_folded > 0
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
    write_input(tmp_path / "in", 6, 1)
    run(spark, two_step_job(tmp_path, parallelism=1, materialize=False))
    assert_equals_batch(spark, tmp_path)
    seen.append(versions_of_tables(tmp_path))
    assert [bool(paths) for paths in seen] == [False, True, True, True]
    assert all(one != other for one, other in pairwise(seen))


def test_a_materialization_that_fails_fails_no_job_and_a_later_one_succeeds(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ChangelogRecoveryITCase.testFailedMaterialization: beside the driver; no restart, and the numbers say it."""
    failures = iter([OSError("no"), OSError("no")])

    def failing(self: FoldProcess, manifest: Manifest) -> Record:
        error = next(failures, None)
        if error is not None:
            raise error
        # Here, because a process takes longer to start than this job to end.
        return materialize(self._root, manifest, settings=JobSettings(), clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)

    monkeypatch.setattr(FoldProcess, "fold", failing)
    monkeypatch.setattr(background, "_BACK_OFF_S", (0.001, 0.001))
    write_input(tmp_path / "in", 0, 8)
    seen: list[Progress] = []
    two_step_job(tmp_path, materialize_max_segments=2).run(
        spark, trigger={"availableNow": True}, on_progress=seen.append
    )
    assert max(p.materialization_failures for p in seen) == 2
    assert seen[-1].materialization_failures == 0
    assert newest(tmp_path).term == 1
    assert next(failures, None) is None
    assert_equals_batch(spark, tmp_path)


# --- killed ------------------------------------------------------------------------------------------------------


def process(root: Path, module: str, *arguments: str, kill_at: str = "") -> tuple[int, str]:
    """A driver or a materialization to its end."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.spark.{module}", str(root), *arguments],
        cwd=ROOT,
        env={**os.environ, "STILLSTATE_KILL_AT": kill_at},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.kill
def test_a_materialization_killed_anywhere_leaves_the_job_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """SIGKILL as a process of its own, while the first base is written, a delta, and a base over another: what is left is garbage,
    a pin, or a record that is adopted."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, two_step_job(tmp_path, materialize=False))
    for number, (point, mode) in enumerate(zip(FOLD_KILL_POINTS, ("auto", "major", "minor", "major"), strict=True)):
        code, printed = process(tmp_path, "fold", mode, kill_at=point)
        assert code == -signal.SIGKILL, f"{point}: {code} {printed}"
        write_input(tmp_path / "in", 3 + number, 1)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        run(spark, two_step_job(tmp_path, materialize=False))
        assert_equals_batch(spark, tmp_path)
        if point == "fold-recorded":
            assert newest(tmp_path).layers, "a record that is complete is adopted, though its writer is dead"
        elif number == 0:
            assert newest(tmp_path).layers == ()
        else:
            # Nobody waits for the dead longer than a minute; this test does not wait at all.
            root = open_store(str(tmp_path / "store")).child("steps")
            assert open_pins(root)
        for record_id in open_pins(open_store(str(tmp_path / "store")).child("steps")):
            bury(tmp_path, record_id)


def bury(root: Path, record_id: int) -> None:
    """Make a pin as old as it must be to be nobody's."""
    store = open_store(str(root / "store")).child("steps")
    pin = read_pin(store, record_id)
    assert pin is not None
    store.put(
        materialization_path(record_id, started=True),
        encode_document("materialization-pin", replace(pin, heartbeat_ms=pin.heartbeat_ms - PIN_LIVE_MS)),
    )


@pytest.mark.kill
def test_a_driver_killed_while_its_thread_folds_goes_on_exactly(spark: SparkSession, tmp_path: Path) -> None:
    """At every point of the fold; the next run finds a dead pin, garbage, or a record to adopt."""
    files = 0
    for point in FOLD_KILL_POINTS:
        write_input(tmp_path / "in", files, 7)
        files += 7
        code, printed = process(tmp_path, "drive", kill_at=point)
        assert code == -signal.SIGKILL, f"{point}: {code} {printed}"
        for record_id in open_pins(open_store(str(tmp_path / "store")).child("steps")):
            bury(tmp_path, record_id)
    code, printed = process(tmp_path, "drive")
    assert code == 0, printed
    assert_equals_batch(spark, tmp_path)
    assert newest(tmp_path).layers
