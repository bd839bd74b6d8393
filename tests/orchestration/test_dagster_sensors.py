"""The two sensors, on job roots that state_runtime itself wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from job_roots import SECRET, FakeClock, JobRoot

from orchestration.jobs.past_runs import past_runs
from orchestration.sensors.progress import (
    CURSOR_VERSION,
    HISTORY_MAX,
    MANIFESTS_PER_TICK_MAX,
    JobCursor,
    read_cursor,
    read_progress,
)
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.control import request_stop
from state_runtime.snapshot.term_files import RunState


def keys(result: dg.SensorResult) -> list[tuple[str, str]]:
    return [(event.asset_key.to_user_string(), event.tags["dagster/data_version"]) for event in result.asset_events]


# -- progress ---------------------------------------------------------------------------------------------------


def test_every_checkpoint_is_published_once_with_its_snapshot_id(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    flights.checkpoint()
    first = here.tick("stillstate_progress")
    assert keys(first) == [("flights/stream", "1"), ("flights/checkpoints", "2"), ("flights/checkpoints", "3")]
    again = here.tick("stillstate_progress")
    assert keys(again) == []
    assert again.skip_reason is not None
    flights.checkpoint()
    assert keys(here.tick("stillstate_progress")) == [("flights/checkpoints", "4")]


def test_the_cursor_is_small_versioned_json(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    here.tick("stillstate_progress")
    data = json.loads(here.cursor or "")
    assert data["version"] == CURSOR_VERSION
    assert data["jobs"]["flights"][1] == 2
    assert read_cursor(here.cursor)["flights"].snapshot_id == 2


@pytest.mark.parametrize(
    "text", [None, "", "garbage", "[]", '{"version": 99, "jobs": {}}', '{"version":1,"jobs":{"a":5}}', "null"]
)
def test_a_cursor_that_is_not_understood_starts_again(text: str | None) -> None:
    """Publishing twice is harmless, publishing nothing is not."""
    assert read_cursor(text) == {}


def test_jobs_that_never_started_are_no_problem(world: Callable[..., World]) -> None:
    result = world("flights", "trains").tick("stillstate_progress")
    assert result.skip_reason is not None
    assert "no new snapshots" in str(result.skip_reason.skip_message)


def test_a_damaged_manifest_of_one_job_does_not_hide_the_others(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    here = world("flights", "trains")
    flights.start()
    flights.checkpoint()
    flights.damage(2)
    trains = JobRoot(tmp_path / "state", "trains", clock)
    trains.start()
    trains.checkpoint()
    result = here.tick("stillstate_progress")
    assert ("trains/checkpoints", "2") in keys(result)
    assert ("flights/checkpoints", "2") not in keys(result)
    assert result.skip_reason is not None
    assert "flights" in str(result.skip_reason.skip_message)
    assert "damaged" in str(result.skip_reason.skip_message)


def test_a_damaged_newest_manifest_is_said_on_every_tick_until_it_is_repaired(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    file = flights.store_path / "flights" / "snapshots" / f"{2:020d}" / "manifest.json"
    whole = file.read_bytes()
    flights.damage(2)
    for _ in range(2):
        result = here.tick("stillstate_progress")
        assert result.skip_reason is not None
        assert "damaged" in str(result.skip_reason.skip_message)
    file.write_bytes(whole)
    assert keys(here.tick("stillstate_progress")) == [("flights/checkpoints", "2")]


def test_a_damaged_manifest_below_newer_ones_is_passed(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    for _ in range(3):
        flights.checkpoint()
    flights.damage(2)
    result = here.tick("stillstate_progress")
    assert [version for _, version in keys(result)] == ["1", "3", "4"]
    assert here.tick("stillstate_progress").asset_events == []


def test_a_folder_whose_manifest_is_on_its_way_is_waited_for(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    folder = flights.store_path / "flights" / "snapshots" / f"{2:020d}"
    folder.mkdir()
    assert keys(here.tick("stillstate_progress")) == [("flights/stream", "1")]
    flights.checkpoint()
    assert keys(here.tick("stillstate_progress")) == [("flights/checkpoints", "2")]


def test_a_job_root_that_was_made_anew_starts_from_its_first_snapshot(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    """Its ids begin again, below those of the root that was removed."""
    here = world()
    flights.start()
    for _ in range(3):
        flights.checkpoint()
    here.tick("stillstate_progress")
    (tmp_path / "state").rename(tmp_path / "old")
    fresh = JobRoot(tmp_path / "state", "flights", clock)
    fresh.start()
    fresh.checkpoint()
    assert keys(here.tick("stillstate_progress")) == [("flights/stream", "1"), ("flights/checkpoints", "2")]


class CountingCatalog:
    """Counts manifests read, over a job with many snapshots."""

    def __init__(self, root: JobRoot, count: int) -> None:
        self.count, self.read, self.one = count, 0, root.catalog.manifest(1)
        self.uid = root.catalog.job_info()

    def job_info(self) -> Any:
        return self.uid

    def snapshot_ids(self, after: int = 0) -> list[int]:
        return list(range(after + 1, self.count + 1))

    def manifest(self, snapshot_id: int) -> Any:
        self.read += 1
        return self.one


def test_a_tick_reads_a_bounded_number_of_manifests(flights: JobRoot) -> None:
    flights.start()
    catalog = CountingCatalog(flights, 10_000)
    tick = read_progress({"flights": catalog}, {})  # type: ignore[dict-item]
    assert catalog.read == MANIFESTS_PER_TICK_MAX
    assert tick.cursors["flights"].snapshot_id == 10_000 - HISTORY_MAX + MANIFESTS_PER_TICK_MAX
    known = {"flights": JobCursor(catalog.uid.uid, 10)}
    assert read_progress({"flights": catalog}, known).cursors["flights"].snapshot_id == 10 + MANIFESTS_PER_TICK_MAX  # type: ignore[dict-item]


def test_published_metadata_is_numeric_and_free_of_secrets(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra=f"storage_options: {{key: {SECRET}}}")
    flights.start()
    flights.checkpoint()
    events = here.tick("stillstate_progress").asset_events
    assert all(isinstance(v, dg.IntMetadataValue | dg.FloatMetadataValue) for e in events for v in e.metadata.values())
    assert SECRET not in repr(events) + repr(here.cursor)


def test_materializations_are_stored_without_a_run(
    world: Callable[..., World], flights: JobRoot, instance: dg.DagsterInstance
) -> None:
    here = world()
    flights.start()
    flights.checkpoint(rows=1234)
    for event in here.tick("stillstate_progress").asset_events:
        instance.report_runless_asset_event(event)
    stored = instance.get_latest_materialization_event(dg.AssetKey(["flights", "checkpoints"]))
    assert stored is not None
    assert stored.asset_materialization is not None
    assert stored.asset_materialization.metadata["input_rows"].value == 1234
    assert instance.get_runs_count() == 0


# -- recovery ---------------------------------------------------------------------------------------------------


def test_a_healthy_stopped_finished_or_fenced_job_is_left_alone(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    assert here.recovery() == []
    flights.start()
    assert here.recovery() == []
    for state in ("stopped", "finished", "fenced"):
        flights.beat(state)
        here.clock.advance_s(3600)
        assert here.recovery() == [], state


def test_a_lost_driver_gets_exactly_one_run(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    term = flights.start()
    here.clock.advance_s(5)
    (request,) = here.recovery()
    assert request.run_key == f"flights:{term}:1"
    assert request.job_name == "recover_flights"
    assert request.tags["stillstate/job"] == "flights"
    assert request.tags["stillstate/action"] == "recover"
    # The daemon evaluates again before the run was dequeued: same key, which Dagster starts once.
    (repeated,) = here.recovery()
    assert repeated.run_key == request.run_key
    here.submit(request, dg.DagsterRunStatus.STARTED)
    for _ in range(3):
        assert here.recovery() == []


def test_a_failed_recovery_is_tried_again_later_and_gives_up_in_the_end(
    world: Callable[..., World], flights: JobRoot
) -> None:
    """How long each wait is, `test_driver_health.py` says; here it is only never at once."""
    here = world(extra="recovery: {max_attempts: 3, backoff_s: 600}")
    flights.start()
    asked = []
    for _ in range(5):
        here.clock.at_ms = _now_ms() + 2 * 3600_000  # long after every wait
        for request in here.recovery():
            asked.append(request.run_key)
            here.submit(request, dg.DagsterRunStatus.FAILURE)
            here.clock.at_ms = _now_ms()
            assert here.recovery() == [], "a failed attempt is not repeated at once"
    here.clock.at_ms = _now_ms() + 2 * 3600_000
    assert asked == ["flights:1:1", "flights:1:2", "flights:1:3"]
    reason = here.tick("stillstate_recovery").skip_reason
    assert reason is not None
    assert "gave up" in str(reason.skip_message)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000  # Dagster stamps its runs with the real clock


def test_a_stop_request_to_a_driver_that_died_is_respected(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    term = flights.start()
    request_stop(flights.store, "flights", term, clock=here.clock, ids=SYSTEM_IDS)
    here.clock.advance_s(3600)
    assert here.recovery() == []


def test_switched_off_recovery_only_reports(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra="recovery: {enabled: false}")
    flights.start()
    here.clock.advance_s(3600)
    result = here.tick("stillstate_recovery")
    assert not result.run_requests
    assert result.skip_reason is not None
    assert "switched off" in str(result.skip_reason.skip_message)


def test_a_damaged_job_does_not_leave_the_others_without_a_guard(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    here = world("flights", "trains")
    flights.start()
    (tmp_path / "state" / "flights" / "terms" / f"{1:020d}.heartbeat.json").write_text("{")
    trains = JobRoot(tmp_path / "state", "trains", clock)
    trains.start()
    clock.advance_s(60)
    assert [request.run_key for request in here.recovery()] == ["trains:1:1"]


def test_a_damaged_newest_manifest_is_not_recovered_from(world: Callable[..., World], flights: JobRoot) -> None:
    """The driver refuses it, so a recovery could only fail; a person must repair it."""
    here = world()
    flights.start()
    flights.checkpoint()
    flights.damage(2)
    here.clock.advance_s(60)
    result = here.tick("stillstate_recovery")
    assert not result.run_requests
    assert result.skip_reason is not None
    assert "damaged" in str(result.skip_reason.skip_message)


def execute(here: World, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    assert request.job_name is not None
    return here.defs.resolve_job_def(request.job_name).execute_in_process(
        run_config=dict(request.run_config),
        instance=here.instance,
        tags=dict(request.tags),
        raise_on_error=False,
    )


def test_the_recovery_run_starts_the_driver_once_and_repeats_do_nothing(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    here.clock.advance_s(60)
    (request,) = here.recovery()
    done = execute(here, request)
    assert done.success
    assert done.output_for_node("recover_flights_driver")["term"] == 2
    repeated = execute(here, request)
    assert repeated.output_for_node("recover_flights_driver")["outcome"] == "nothing to do"
    assert launcher.starts == [True]
    assert launcher.ended == [1]
    assert here.recovery() == []


def test_a_recovery_run_for_an_older_term_leaves_the_newer_failure_alone(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    here.clock.advance_s(60)
    (request,) = here.recovery()
    flights.start()
    here.clock.advance_s(60)
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    done = execute(here, request)
    assert done.output_for_node("recover_flights_driver")["outcome"] == "nothing to do"
    assert launcher.starts == []


def test_drivers_that_die_at_once_are_one_failure_until_a_checkpoint(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world(extra="recovery: {max_attempts: 3, backoff_s: 1}")
    flights.start()
    flights.checkpoint()
    here.launchers["flights"] = FakeLauncher(flights)
    here.clock.at_ms = _now_ms()
    keys_seen = []
    for _ in range(30):
        here.clock.advance_s(60)
        for request in here.recovery():
            keys_seen.append(request.run_key)
            assert execute(here, request).success
    assert keys_seen == ["flights:1:1", "flights:2:1", "flights:3:1"]
    flights.checkpoint()
    here.clock.advance_s(60)
    assert [request.run_key for request in here.recovery()] == ["flights:4:1"]


def test_past_runs_are_read_newest_first(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    here.clock.advance_s(60)
    (request,) = here.recovery()
    here.submit(request, dg.DagsterRunStatus.FAILURE)
    here.submit(request, dg.DagsterRunStatus.STARTED)
    runs = past_runs(here.instance, "flights")
    assert [(run.phase, run.term, run.attempt, run.streak, run.progress) for run in runs] == [
        ("active", 1, 1, 1, 0),
        ("failed", 1, 1, 1, 0),
    ]


@pytest.mark.parametrize("state", ["running", "stopped", "finished", "fenced"])
def test_a_recovery_by_hand_of_a_job_that_needs_none_does_nothing(
    world: Callable[..., World], flights: JobRoot, state: RunState
) -> None:
    here = world()
    flights.start(state)
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    done = execute(here, dg.RunRequest(job_name="recover_flights"))
    assert done.output_for_node("recover_flights_driver")["outcome"] == "nothing to do"
    assert launcher.starts == launcher.ended == []
