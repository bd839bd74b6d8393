"""Assets of a job: keys, lineage, metadata; and a snapshot as numbers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from assets import (
    build_asset_specs,
    checkpoint_materialization,
    checkpoint_metadata,
    job_asset_specs,
    run_materialization,
)
from assets.metadata_sets import CheckpointNumbers, RunNumbers, numbers_metadata
from orchestration.config.spec import load_spec
from state_runtime.base.progress import Progress
from state_runtime.snapshot.manifest import Manifest, SegmentEntry

SECRET = "s3cr3t-sentinel-7f1e"


@pytest.fixture(autouse=True)
def only_stable_dagster() -> Iterator[None]:
    with warnings.catch_warnings():
        for category in (dg.BetaWarning, dg.PreviewWarning, dg.SupersessionWarning, DeprecationWarning):
            warnings.simplefilter("error", category)
        yield


def manifest(progress: Progress | None) -> Manifest:
    return Manifest(
        format_version=1,
        job_uid="u",
        snapshot_id=12,
        term=3,
        commit_id="c",
        kind="checkpoint",
        created_at_ms=1_357_000_000_000,
        parallelism=4,
        segments=(SegmentEntry("changelog/a", 100, "d", 10, 12, 5, 11),),
        progress=progress,
    )


def specs(tmp_path: Path, job: str) -> tuple[dg.AssetSpec, dg.AssetSpec]:
    file = tmp_path / "stillstate.yaml"
    file.write_text(f"version: 1\njobs:\n  plane-delays: {{entry_point: 'a.b:c', store: 's3://bucket/x'{job}}}\n")
    return job_asset_specs(load_spec(file).job("plane-delays"))


def test_checkpoints_follow_the_stream(tmp_path: Path) -> None:
    stream, checkpoints = specs(tmp_path, ", owners: ['team:data', a@b.org], description: Delays.")
    assert stream.key == dg.AssetKey(["plane-delays", "stream"])
    assert checkpoints.key == dg.AssetKey(["plane-delays", "checkpoints"])
    assert [dep.asset_key for dep in checkpoints.deps] == [stream.key]
    assert "spark" in stream.kinds
    assert stream.group_name == checkpoints.group_name == "plane_delays"
    assert list(stream.owners) == ["team:data", "a@b.org"]
    assert (stream.description or "").startswith("Delays.")
    assert checkpoints.metadata["dagster/uri"] == "s3://bucket/x/plane-delays"
    assert checkpoints.freshness_policy is None


def test_freshness_is_what_the_user_said_and_not_for_jobs_that_end(tmp_path: Path) -> None:
    _, checkpoints = specs(tmp_path, ", checkpoint: {freshness_s: 600}")
    assert checkpoints.freshness_policy == dg.FreshnessPolicy.time_window(
        fail_window=timedelta(minutes=10), warn_window=timedelta(minutes=5)
    )
    _, ending = specs(tmp_path, ", checkpoint: {freshness_s: 600}, trigger: {available_now: true}")
    assert ending.freshness_policy is None


def test_no_secret_reaches_a_spec(tmp_path: Path) -> None:
    assert SECRET not in repr(specs(tmp_path, f", storage_options: {{key: {SECRET}}}"))


def test_every_job_of_a_file_has_its_assets(tmp_path: Path) -> None:
    file = tmp_path / "stillstate.yaml"
    file.write_text("version: 1\ndefaults: {entry_point: 'a:b', store: x}\njobs: {a: {}, b: {}}\n")
    assert len(build_asset_specs(load_spec(file).jobs.values())) == 4


def test_checkpoint_metadata_is_numbers_with_units() -> None:
    progress = Progress(
        snapshot_id=12,
        batch_id=9,
        input_rows=1000,
        rows_per_s=5000.5,
        state_rows=77,
        duration_ms=1500.0,
        checkpoint_ms=20.0,
        phases_ms={"plan": 5.0},
        segment_bytes=111,
    )
    metadata = checkpoint_metadata(manifest(progress))
    assert all(type(value) in (dg.IntMetadataValue, dg.FloatMetadataValue) for value in metadata.values())
    values = {name: entry.value for name, entry in metadata.items()}
    assert values["duration_s"] == 1.5
    assert values["checkpoint_s"] == 0.02
    assert values["phase_plan_s"] == 0.005
    assert (values["batch_id"], values["input_rows"], values["state_rows"]) == (9, 1000, 77)
    assert (values["log_bytes"], values["log_segments"], values["table_bytes"]) == (111, 1, 0)


def test_names_are_the_same_with_and_without_progress() -> None:
    """A plot follows its name; a missing one would be a hole."""
    assert set(checkpoint_metadata(manifest(None))) == set(checkpoint_metadata(manifest(Progress())))


def test_the_data_version_is_the_snapshot_id() -> None:
    event = checkpoint_materialization("plane-delays", manifest(Progress()))
    assert event.asset_key == dg.AssetKey(["plane-delays", "checkpoints"])
    assert event.tags == {"dagster/data_version": "12", "stillstate/term": "3"}
    run = run_materialization("plane-delays", manifest(None))
    assert run.asset_key == dg.AssetKey(["plane-delays", "stream"])
    assert run.metadata["term"].value == 3


def test_event_time_shows_as_a_lag_that_has_no_holes() -> None:
    """A plot of the watermark itself is a straight line; what matters is how far it is behind."""
    behind = Progress(snapshot_id=1, timestamp_ms=100_000, watermark_ms=70_000, late_rows=3)
    shown = checkpoint_metadata(manifest(None), behind)
    assert (shown["watermark_lag_s"].value, shown["late_rows"].value) == (30.0, 3)
    assert (
        checkpoint_metadata(manifest(None), Progress(snapshot_id=1, timestamp_ms=100_000))["watermark_lag_s"].value
        == 0.0
    )


def test_the_fields_of_a_set_are_its_keys_and_their_types_are_dagster_s() -> None:
    """A plot that was an integer once stays one, also when the number happens to be whole."""
    metadata = numbers_metadata(CheckpointNumbers.of(manifest(None), Progress(snapshot_id=12)))
    kinds = {"int": dg.IntMetadataValue, "float": dg.FloatMetadataValue}
    assert {name: type(value) for name, value in metadata.items()} == {
        f.name: kinds[str(f.type)] for f in dataclasses.fields(CheckpointNumbers)
    }
    run = numbers_metadata(RunNumbers.of(manifest(None)))
    assert list(run) == ["term", "snapshot_id", "operators", "log_bytes", "table_bytes", "restore_bytes"]


def test_the_keys_of_plots_that_exist_stay() -> None:
    assert set(checkpoint_metadata(manifest(None))) == {
        *("snapshot_id", "term", "batch_id", "duration_s", "checkpoint_s", "input_rows", "output_rows", "changed_rows"),
        *("rows_per_s", "state_rows", "segment_bytes", "output_bytes", "log_bytes", "log_segments", "table_bytes"),
        *("parallelism", "local_restores", "primary_restores", "stale_restores", "moved_shards", "restore_s"),
        *("restored_bytes", "local_failures", "epoch", "epochs", "uploads", "upload_attempts", "upload_wait_s"),
        *("late_rows", "watermark_lag_s"),
    }
