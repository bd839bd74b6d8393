"""The progress sensor, on job roots that state_runtime itself wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster_world import World
from job_roots import SECRET, FakeClock, JobRoot

from stillstate.assets.mount import Mount
from stillstate.orchestration.probes.points import POINTS_MAX
from stillstate.orchestration.sensors.publishing import CURSOR_VERSION, read_cursor

SENSOR = "stillstate_progress"


def tick(here: World) -> list[tuple[str, str]]:
    """One tick as the daemon does it: events are stored, then the cursor."""
    result = here.tick(SENSOR)
    for event in of_jobs(result):
        here.instance.report_runless_asset_event(event)
    return keys(result)


def of_jobs(result: dg.SensorResult) -> list[dg.AssetMaterialization]:
    events = [event for event in result.asset_events if isinstance(event, dg.AssetMaterialization)]
    return [event for event in events if event.asset_key != Mount().overview()]


def keys(result: dg.SensorResult) -> list[tuple[str, str]]:
    return [(e.asset_key.to_user_string(), (e.tags or {})["dagster/data_version"]) for e in of_jobs(result)]


def said(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    return str(result.skip_reason.skip_message)


def test_an_interval_has_one_event_for_the_newest_checkpoint(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(house="observation: {interval_s: 60}")
    flights.start()
    for _ in range(2):
        flights.checkpoint()
    assert tick(here) == [("flights/stream", "1"), ("flights/checkpoints", "3")]
    for _ in range(4):
        flights.checkpoint()
        here.clock.advance_s(14)
        assert tick(here) == [], "before the interval is over"
    here.clock.advance_s(14)
    (event,) = of_jobs(here.tick(SENSOR))
    assert (event.tags or {})["dagster/data_version"] == "7"
    assert event.metadata["interval_checkpoints"].value == 4
    assert event.metadata["interval_input_rows"].value == 400


def test_a_quiet_job_has_no_events(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    tick(here)
    here.clock.advance_s(3600)
    assert tick(here) == []


def test_a_new_term_and_its_first_checkpoint_are_published_at_once(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    tick(here)
    flights.start()
    assert tick(here) == [("flights/stream", "2")]
    flights.checkpoint()
    assert tick(here) == [("flights/checkpoints", "4")]
    flights.checkpoint()
    assert tick(here) == []


def test_a_drained_job_and_another_parallelism_are_published_at_once(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    tick(here)
    flights.checkpoint(parallelism=8)
    assert tick(here) == [("flights/checkpoints", "3")]
    flights.checkpoint(drained=True)
    assert tick(here) == [("flights/checkpoints", "4")]


def test_every_run_is_published_also_when_several_came_and_went(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    for _ in range(3):
        flights.start()
    assert tick(here) == [("flights/stream", "1"), ("flights/stream", "2"), ("flights/stream", "3")]


def test_a_run_whose_first_snapshot_was_given_up_is_published_all_the_same(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world()
    flights.start()
    for _ in range(POINTS_MAX + 5):
        flights.checkpoint()
    assert tick(here) == [("flights/stream", "1"), ("flights/checkpoints", str(POINTS_MAX + 6))]


@pytest.mark.parametrize("cursor", ["before", None, "garbage"])
def test_what_was_stored_before_the_daemon_died_is_not_stored_again(
    world: Callable[..., World], flights: JobRoot, cursor: str | None
) -> None:
    """Dagster stores a tick's events before its cursor."""
    here = world()
    flights.start()
    flights.checkpoint()
    tick(here)
    before = here.cursor if cursor == "before" else cursor
    flights.checkpoint()
    flights.start()
    flights.checkpoint()
    assert tick(here) == [("flights/stream", "2"), ("flights/checkpoints", "5")]
    here.cursor = before
    assert tick(here) == []
    flights.checkpoint()
    assert tick(here) == [], "the interval counts from the event that was stored"


def test_a_long_absence_is_one_event(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    tick(here)
    for _ in range(60):
        flights.checkpoint()
    here.clock.advance_s(3600)
    (event,) = of_jobs(here.tick(SENSOR))
    assert (event.tags or {})["dagster/data_version"] == "62"
    assert event.metadata["interval_checkpoints"].value == 60
    assert event.metadata["interval_input_rows"].value == 6000
    assert f"numbers from the newest {POINTS_MAX}" in (event.description or "")


def test_a_manifest_is_read_once_and_a_tick_reads_a_bounded_number(
    world: Callable[..., World], flights: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = type(flights.catalog).manifest

    def counting(self: object, snapshot_id: int) -> object:
        read.append(snapshot_id)
        return whole(self, snapshot_id)  # type: ignore[arg-type]

    flights.start()
    for _ in range(60):
        flights.checkpoint()
    here = world()
    monkeypatch.setattr(type(flights.catalog), "manifest", counting)
    tick(here)
    assert len(read) == POINTS_MAX
    for _ in range(60):
        tick(here)
    assert len(read) == POINTS_MAX + 60, "a tick that publishes nothing reads the newest only"
    flights.checkpoint()
    here.clock.advance_s(3600)
    read.clear()
    tick(here)
    assert sorted(read) == [61, 62]


def test_jobs_that_never_started_are_no_problem(world: Callable[..., World]) -> None:
    assert said(world("flights", "trains").tick(SENSOR)) == "no new snapshots"


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
    result = here.tick(SENSOR)
    assert ("trains/checkpoints", "2") in keys(result)
    assert ("flights/checkpoints", "2") not in keys(result)
    assert "flights" in said(result)
    assert "damaged" in said(result)


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
        assert "damaged" in said(here.tick(SENSOR))
    file.write_bytes(whole)
    assert ("flights/checkpoints", "2") in tick(here)


def test_a_damaged_manifest_below_newer_ones_is_passed_and_named(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    for _ in range(3):
        flights.checkpoint()
    flights.damage(2)
    result = here.tick(SENSOR)
    assert ("flights/checkpoints", "4") in keys(result)
    assert "damaged" in said(result)


def test_a_folder_whose_manifest_is_on_its_way_is_waited_for(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    (flights.store_path / "flights" / "snapshots" / f"{2:020d}").mkdir()
    assert tick(here) == [("flights/stream", "1")]
    flights.checkpoint()
    assert tick(here) == [("flights/checkpoints", "2")]


def test_a_job_root_that_was_made_anew_starts_from_its_first_snapshot(
    world: Callable[..., World], flights: JobRoot, tmp_path: Path, clock: FakeClock
) -> None:
    """Its ids begin again, below those of the root that was removed."""
    here = world()
    flights.start()
    for _ in range(3):
        flights.checkpoint()
    tick(here)
    (tmp_path / "state").rename(tmp_path / "old")
    fresh = JobRoot(tmp_path / "state", "flights", clock)
    fresh.start()
    fresh.checkpoint()
    assert tick(here) == [("flights/stream", "1"), ("flights/checkpoints", "2")]


def test_published_metadata_is_free_of_secrets(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra=f"storage_options: {{key: {SECRET}}}")
    flights.start()
    flights.checkpoint()
    events = here.tick(SENSOR).asset_events
    assert SECRET not in repr(events) + repr(here.cursor)


def test_materializations_are_stored_without_a_run(
    world: Callable[..., World], flights: JobRoot, instance: dg.DagsterInstance
) -> None:
    here = world()
    flights.start()
    flights.checkpoint(rows=1234)
    tick(here)
    stored = instance.get_latest_materialization_event(dg.AssetKey(["flights", "checkpoints"]))
    assert stored is not None
    assert stored.asset_materialization is not None
    assert stored.asset_materialization.metadata["interval_input_rows"].value == 1234
    assert instance.get_runs_count() == 0


def test_the_cursor_is_small_versioned_json(world: Callable[..., World], flights: JobRoot) -> None:
    here = world()
    flights.start()
    flights.checkpoint()
    here.tick(SENSOR)
    data = json.loads(here.cursor or "")
    assert data["version"] == CURSOR_VERSION
    assert data["jobs"]["flights"][1] == 2
    assert read_cursor(here.cursor).jobs["flights"].snapshot_id == 2


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "garbage", "[]", '{"version": 99, "jobs": {}}', '{"version":2,"jobs":{"a":5}}', "null"),
        '{"version":2,"start":"","overview":[0,""],"jobs":{"a":["uid",1,1]}}',
        '{"version":2,"start":"","overview":[0],"jobs":{}}',
        '{"version":1,"jobs":{"flights":["uid",7]}}',
    ],
)
def test_a_cursor_that_is_not_understood_is_as_good_as_none(text: str | None) -> None:
    """Then Dagster's own record says what was published."""
    assert read_cursor(text).jobs == {}
