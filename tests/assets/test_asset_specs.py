"""Assets of a job: keys, lineage, metadata; and a snapshot as numbers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from state_runtime.base.progress import InflightProgress, Progress
from state_runtime.snapshot.manifest import Manifest, OpenBatch, SegmentEntry
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets import (
    Mount,
    build_asset_specs,
    checkpoint_materialization,
    job_asset_specs,
    run_materialization,
)
from stillstate.assets.metadata import shape_of
from stillstate.assets.metadata_sets import IntervalNumbers, RunNumbers, numbers_metadata
from stillstate.assets.tables import CHECKPOINTS_MAX, checkpoints_table, phases_table
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.probes.points import POINTS_MAX, Point

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
    return job_asset_specs(Mount(), load_spec(file).job("plane-delays"))


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
    assert len(build_asset_specs(Mount(), load_spec(file).jobs.values())) == 4


def points(*durations_ms: float, at_ms: int = 1_357_000_000_000) -> tuple[Point, ...]:
    """Snapshots up to 12, one a second."""
    one = Point.of(manifest(Progress(snapshot_id=12, input_rows=1000, segment_bytes=111, checkpoint_ms=20.0)))
    first = one.snapshot_id - len(durations_ms) + 1
    return tuple(
        dataclasses.replace(
            one,
            snapshot_id=first + n,
            at_ms=at_ms - 1000 * (len(durations_ms) - 1 - n),
            progress=dataclasses.replace(one.progress, snapshot_id=first + n, duration_ms=ms),  # type: ignore[type-var]
        )
        for n, ms in enumerate(durations_ms)
    )


def event(newest: tuple[Point, ...], after: int) -> dg.AssetMaterialization:
    head = manifest(newest[-1].progress)
    return checkpoint_materialization(
        Mount().checkpoints("plane-delays"), "root-uid", head, newest, after=after, why="interval"
    )


def plots(shown: dg.AssetMaterialization) -> dict[str, float]:
    kinds = (dg.IntMetadataValue, dg.FloatMetadataValue)
    return {name: value.value for name, value in shown.metadata.items() if isinstance(value, kinds)}  # type: ignore[misc]


def test_an_interval_is_its_newest_snapshot_and_what_happened_meanwhile() -> None:
    shown = plots(event(points(9000.0, 100.0, 200.0, 300.0, 400.0), after=8))
    assert (shown["interval_checkpoints"], shown["interval_input_rows"], shown["interval_log_bytes"]) == (4, 4000, 444)
    assert (shown["epoch_p50_s"], shown["epoch_p99_s"], shown["epoch_max_s"]) == (0.3, 0.4, 0.4)
    assert (shown["checkpoint_s"], shown["log_bytes"]) == (0.02, 111)


def test_rows_a_second_count_the_time_in_which_a_stream_waits_for_rows() -> None:
    """One checkpoint a second of 1,000 rows is 1,000 rows a second, however short its epochs were."""
    assert plots(event(points(100.0, 200.0, 300.0, 400.0), after=8))["interval_rows_per_s"] == 1000.0
    assert plots(event(points(250.0), after=11))["interval_rows_per_s"] == 4000.0


def test_what_was_not_read_of_an_interval_is_an_estimate_and_is_said_to_be_one() -> None:
    shown = event(points(*[100.0] * POINTS_MAX), after=12 - 300)
    assert plots(shown)["interval_checkpoints"] == 300
    assert plots(shown)["interval_input_rows"] == 300_000
    assert f"numbers from the newest {POINTS_MAX} of them" in (shown.description or "")


def test_the_page_has_twelve_plots_that_end_in_their_units() -> None:
    """A plot follows its name; a missing one would be a hole."""
    names = list(plots(event(points(1.0), after=11)))
    assert names == sorted(names)
    assert len(names) == 12
    assert all(name.endswith(("_s", "_bytes", "_rows", "_checkpoints")) for name in names)
    empty = dataclasses.replace(points(1.0)[0], progress=None)
    assert list(plots(event((empty,), after=11))) == names


def test_what_stands_still_or_is_text_is_in_tables_of_bounded_size() -> None:
    newest = points(*[100.0] * POINTS_MAX)
    metadata = event(newest, after=1).metadata
    tables = {name: value for name, value in metadata.items() if isinstance(value, dg.MarkdownMetadataValue)}
    assert set(tables) == {"checkpoints", "operators", "phases"}
    _, _, *rows = (tables["checkpoints"].value or "").splitlines()
    assert len(rows) == CHECKPOINTS_MAX < POINTS_MAX
    assert rows[0].split("|")[1:5:2] == ["12", "checkpoint"]
    assert rows[0].split("|")[4] == "0.1"


def test_the_data_version_is_the_snapshot_s_id_and_of_a_run_its_term() -> None:
    shown = event(points(1.0), after=11)
    assert shown.asset_key == dg.AssetKey(["plane-delays", "checkpoints"])
    assert shown.tags == {
        "dagster/data_version": "12",
        "stillstate/term": "3",
        "stillstate/root": "root-uid",
        "stillstate/shape": "1-4-tables-open",
    }
    run = run_materialization(Mount().stream("plane-delays"), "root-uid", points(1.0)[0])
    assert run.asset_key == dg.AssetKey(["plane-delays", "stream"])
    assert run.tags["dagster/data_version"] == "3"
    assert run.metadata["term"].value == 3


def test_a_run_says_what_it_goes_on_from_and_why_it_was_started() -> None:
    (point,) = points(1.0)
    status = RunStatus(
        term=3, run_uid="u", state="running", at_ms=1, started_at_ms=1, heartbeat_interval_s=2.0, pid=7, host="h",
        cause="recovery of term 2",
    )  # fmt: skip
    run = run_materialization(Mount().stream("plane-delays"), "root-uid", point, status)
    assert "goes on from snapshot 11" in str(run.description)
    assert run.metadata["restored_from"].value == 11
    assert (run.metadata["cause"].value, run.metadata["process"].value) == ("recovery of term 2", "7 on h")
    newer = dataclasses.replace(status, term=4)
    assert "cause" not in run_materialization(Mount().stream("plane-delays"), "root-uid", point, newer).metadata


def test_a_run_that_went_back_goes_on_from_where_it_went_back_to() -> None:
    gone_back = dataclasses.replace(manifest(None), snapshot_id=12, abandoned=((3, 4), (8, 11)))
    assert Point.of(gone_back).restored_from == 7


def test_event_time_shows_as_a_lag_that_has_no_holes() -> None:
    """A plot of the watermark itself is a straight line; what matters is how far it is behind."""
    (one,) = points(1.0)
    behind = Progress(snapshot_id=12, timestamp_ms=100_000, watermark_ms=70_000)
    assert IntervalNumbers.of([dataclasses.replace(one, progress=behind)], 1).lag_s == 30.0
    assert IntervalNumbers.of([one], 1).lag_s == 0.0


def test_rows_in_flight_are_plotted_and_tabled_with_the_task_that_is_slowest() -> None:
    """The one slow shard is found on the page of the job's checkpoints; without rows in flight nothing is added to it."""
    (one,) = points(1.0)
    waiting = InflightProgress(rows=1_200, oldest_ms=90_000, slowest="legs/3", slowest_ms=4_000.0)
    behind = dataclasses.replace(one, progress=Progress(snapshot_id=12, inflight=waiting))
    assert IntervalNumbers.of([behind], 1).inflight_rows == 1_200
    assert IntervalNumbers.of([one], 1).inflight_rows == 0
    assert "|1,200|90.0|legs/3 4.0 s|" in str(checkpoints_table([one, behind]).value)
    assert "inflight" not in str(checkpoints_table([one]).value)


def test_checkpoints_that_waited_for_rows_say_so_in_the_table_and_among_the_phases() -> None:
    """Twelve plots are enough; a job none of whose newest checkpoints waited has no such column."""
    (one,) = points(1.0)
    late = Progress(snapshot_id=12, phases_ms={"process": 4_000.0, "alignment": 2_100.0})
    waited = dataclasses.replace(one, progress=late)
    header, _, first, second = str(checkpoints_table([one, waited]).value).splitlines()
    assert header.endswith("|restored|alignment_s|")
    assert (first.split("|")[-2], second.split("|")[-2]) == ("2.1", "0.0")
    assert "waited" not in str(checkpoints_table([one]).value)
    assert "|alignment|2.1|" in str(phases_table(late).value)


def test_rows_in_flight_that_come_and_go_are_no_other_format() -> None:
    """Each change of the shape is an event at once; a job whose bursts take two epochs would make thousands a day."""
    settled = manifest(None)
    batch = OpenBatch(late_watermark_ms=0, settled=(), begun="", listing="", segments=(), operators=())
    at_rest = dataclasses.replace(settled, format_version=4)
    assert shape_of(dataclasses.replace(at_rest, format_version=5, open_batch=batch)) == shape_of(at_rest)
    assert shape_of(at_rest) != shape_of(dataclasses.replace(at_rest, format_version=3))


def test_the_fields_of_a_set_are_its_keys_and_their_types_are_dagster_s() -> None:
    """A plot that was an integer once stays one, also when the number happens to be whole."""
    metadata = numbers_metadata(IntervalNumbers.of(points(1.0), 1))
    kinds = {"int": dg.IntMetadataValue, "float": dg.FloatMetadataValue}
    assert {name: type(value) for name, value in metadata.items()} == {
        f.name: kinds[str(f.type)] for f in dataclasses.fields(IntervalNumbers)
    }
    run = numbers_metadata(RunNumbers.of(points(1.0)[0]))
    assert list(run) == [
        "term", "snapshot_id", "restored_from", "operators", "log_bytes", "table_bytes", "restore_bytes",
    ]  # fmt: skip
