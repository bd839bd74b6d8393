"""Checks with a limit in the yaml: numbers from the store, never green without data, stored when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from job_roots import FakeClock, JobRoot, checkpoint_of

from state_runtime.base.errors import StoreUnavailable
from state_runtime.snapshot.manifest import InflightNumbers, Manifest, OpenBatch, TimeEntry
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.probes.pool import ProbePool
from stillstate.orchestration.sensors import checks
from stillstate.orchestration.sensors.checks import CheckCursor, read_check_cursor
from stillstate.orchestration.upkeep.checks import Judged, judge

ALL = "checks: {replay_s: 1, state_growth: 2, savepoint_age_s: 3600, backlog_s: 600}"
SENSOR = "stillstate_checks"


def judged(root: JobRoot, config: Path) -> dict[str, Judged]:
    return {j.check: j for j in judge(load_spec(config).job("flights"), root.catalog)}


def commit(root: JobRoot, **changes: Any) -> Manifest:
    """A checkpoint whose segment has the right size."""
    assert root.committer is not None
    draft = replace(checkpoint_of(root.committer.last), **changes)
    newest = draft.segments[-1]
    root.catalog.root.put(newest.path, b"x" * newest.bytes)
    return root.committer.commit(draft)


def rows(root: JobRoot, count: int) -> Manifest:
    assert root.committer is not None
    progress = checkpoint_of(root.committer.last).progress
    assert progress is not None
    return commit(root, progress=replace(progress, state_rows=count))


def test_no_check_is_green_without_data(world: Callable[..., World], flights: JobRoot) -> None:
    house = world(extra=ALL)
    assert house.tick(SENSOR).asset_events == [], "a job that was never started has no verdict"
    flights.start()
    flights.clock.advance_s(400)
    found = {e.check_name: e for e in house.tick(SENSOR).asset_events}
    assert not found["state_growth"].passed
    assert found["state_growth"].severity is dg.AssetCheckSeverity.WARN
    assert "no snapshot is a day older" in found["state_growth"].description
    assert not found["backlog"].passed
    assert found["backlog"].severity is dg.AssetCheckSeverity.WARN
    assert "no watermark" in found["backlog"].description
    assert not found["savepoint_recent"].passed


def test_each_number_is_judged_by_its_limit(
    write_config: Callable[..., Path], flights: JobRoot, clock: FakeClock
) -> None:
    config = write_config(extra=ALL)
    flights.start()
    rows(flights, 100)
    clock.advance_s(86_400)
    assert flights.committer is not None
    rows(flights, 199)
    found = judged(flights, config)
    assert found["replay_time_bounded"].passed
    assert found["state_growth"].passed
    assert found["state_growth"].numbers["growth"] == 1.99
    rows(flights, 201)
    assert not judged(flights, config)["state_growth"].passed
    segment = checkpoint_of(flights.committer.last).segments[-1]
    commit(flights, segments=(replace(segment, bytes=40 << 20),))
    found = judged(flights, config)
    assert not found["replay_time_bounded"].passed
    assert "stillstate materialize flights" in found["replay_time_bounded"].text
    now_ms = clock.now_ms()
    commit(flights, time=TimeEntry(now_ms, now_ms - 599_000))
    assert judged(flights, config)["backlog"].passed
    clock.advance_s(2)
    assert not judged(flights, config)["backlog"].passed


def test_rows_in_flight_are_a_backlog_when_they_wait_long_or_grow(
    write_config: Callable[..., Path], flights: JobRoot, clock: FakeClock
) -> None:
    """Also of a job without a watermark, of which nothing else is known."""
    config = write_config(extra=ALL)
    flights.start()
    assert flights.committer is not None

    def waiting(rows: int) -> Judged:
        segment = checkpoint_of(flights.committer.last).segments[-1] if flights.committer is not None else None
        assert segment is not None
        numbers = InflightNumbers("legs", rows, 8 * rows, 1, clock.now_ms() - 60_000)
        batch = OpenBatch(0, listing=segment.path, segments=(segment,), operators=(numbers,))
        commit(flights, open_batch=batch)
        return judged(flights, config)["backlog"]

    for rows, passed in ((10, True), (20, True), (15, True), (16, True), (17, True), (18, False), (18, True)):
        found = waiting(rows)
        assert found.passed == passed, (rows, found.text)
        assert (found.numbers["inflight_rows"], found.numbers["inflight_age_s"]) == (rows, 60.0)
    assert "legs" in found.text
    clock.advance_s(541)
    found = judged(flights, config)["backlog"]
    assert not found.passed
    assert "the oldest since 2023-11-14 22:12:20Z" in found.text


def test_a_job_that_drops_all_of_its_rows_as_late_turns_red(
    write_config: Callable[..., Path], flights: JobRoot, clock: FakeClock
) -> None:
    """After three checkpoints with input: one batch may be late, and checkpoints without rows say nothing."""
    config = write_config()
    flights.start()
    assert flights.committer is not None
    reached = TimeEntry(clock.now_ms(), 4_000_000_000_000)

    def after(input_rows: int, late_rows: int) -> Judged:
        assert flights.committer is not None
        progress = checkpoint_of(flights.committer.last).progress
        assert progress is not None
        commit(flights, time=reached, progress=replace(progress, input_rows=input_rows, late_rows=late_rows))
        return judged(flights, config)["rows_on_time"]

    steps = ((100, 100), (100, 100), (100, 99), (5, 5), (0, 0), (5, 5), (0, 0), (5, 6), (0, 0), (1, 0))
    verdicts = [after(*step) for step in steps]
    assert [v.passed for v in verdicts] == [True] * 7 + [False, False, True]
    assert all(v.is_known for v in verdicts)
    assert "the watermark is at 2096-10-02" in verdicts[7].text
    assert "stillstate rollback flights" in verdicts[7].text


def test_a_savepoint_is_recent_until_it_is_not(
    world: Callable[..., World], flights: JobRoot, clock: FakeClock, write_config: Callable[..., Path]
) -> None:
    house = world(extra=ALL)
    flights.start()
    flights.beat("stopped")
    assert not judged(flights, write_config(extra=ALL))["savepoint_recent"].passed
    job = house.defs.resolve_job_def("savepoint_flights")
    assert job.execute_in_process(instance=house.instance).success
    assert judged(flights, write_config(extra=ALL))["savepoint_recent"].passed
    clock.advance_s(3601)
    assert "more than" in judged(flights, write_config(extra=ALL))["savepoint_recent"].text


def test_a_verdict_is_stored_when_it_changes_and_once_an_hour(world: Callable[..., World], flights: JobRoot) -> None:
    house = world(extra="checks: {replay_s: 1, late_checkpoints: null, source_lag_s: null, retention_margin_s: null}")
    flights.start()
    assert [e.passed for e in house.tick(SENSOR).asset_events] == [True]
    assert house.tick(SENSOR).asset_events == []
    flights.clock.advance_s(301)
    assert house.tick(SENSOR).asset_events == []
    flights.clock.advance_s(3600)
    assert [e.passed for e in house.tick(SENSOR).asset_events] == [True]
    assert flights.committer is not None
    segment = checkpoint_of(flights.committer.last).segments[-1]
    commit(flights, segments=(replace(segment, bytes=40 << 20),))
    flights.clock.advance_s(301)
    (event,) = house.tick(SENSOR).asset_events
    assert not event.passed
    assert event.severity is dg.AssetCheckSeverity.ERROR


def test_a_store_that_fails_takes_the_green_away_and_hides_no_other_job(
    world: Callable[..., World], tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = world("flights", "trains", extra="checks: {replay_s: 1}")
    for name in ("flights", "trains"):
        JobRoot(tmp_path / "state", name, clock).start()

    def judging(job: Any, catalog: Any) -> list[Judged]:
        if job.name == "flights":
            raise StoreUnavailable("the cable is out")
        return judge(job, catalog)

    monkeypatch.setattr(checks, "judge", judging)
    found = {e.asset_key.path[0]: e for e in house.tick(SENSOR).asset_events}
    assert not found["flights"].passed
    assert "the cable is out" in found["flights"].description
    assert found["trains"].passed


def test_a_look_that_hangs_is_given_up_and_not_begun_again_and_again(
    world: Callable[..., World], tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = world("flights", "trains", extra="checks: {replay_s: 1}", house="observation: {timeout_s: 0.5}")
    for name in ("flights", "trains"):
        JobRoot(tmp_path / "state", name, clock).start()
    gate, begun = threading.Event(), []

    def judging(job: Any, catalog: Any) -> list[Judged]:
        if job.name == "flights":
            begun.append(1)
            gate.wait(30)
        return judge(job, catalog)

    monkeypatch.setattr(checks, "judge", judging)
    lookout = ProbePool(share_s=0.0)
    monkeypatch.setattr(type(house.resource), "lookout", lambda self: lookout)
    found = {e.asset_key.path[0]: e for e in house.tick(SENSOR).asset_events}
    assert not found["flights"].passed
    assert "has not answered within" in found["flights"].description
    assert found["trains"].passed
    for _ in range(5):
        clock.advance_s(301)
        house.tick(SENSOR)
    assert len(begun) <= 2, "twice in vain, and the store is left alone for a while"
    gate.set()
    lookout = ProbePool(share_s=0.0)
    clock.advance_s(301)
    found = {e.asset_key.path[0]: e for e in house.tick(SENSOR).asset_events}
    assert found["flights"].passed


def test_a_check_is_there_if_it_has_a_limit(write_config: Callable[..., Path]) -> None:
    def names(extra: str) -> set[str]:
        graph = build_definitions(load_spec(write_config(extra=extra))).resolve_asset_graph()
        return {key.name for key in graph.asset_check_keys}

    safe = {"retention_plan_is_safe", "garbage_plan_is_safe"}
    always = {
        "all_jobs_well",
        "driver_alive",
        "matches_configuration",
        "materializations_succeed",
        "intact",
        "restorable",
        *safe,
    }
    usual = {*always, "replay_time_bounded", "rows_on_time", "source_lag", "retention_margin"}
    assert names("") == usual
    assert names(ALL) == {*usual, "state_growth", "savepoint_recent", "backlog"}
    off = "checks: {replay_s: null, late_checkpoints: null, source_lag_s: null, retention_margin_s: null}"
    assert names(off) == always


def test_a_person_can_run_the_checks(world: Callable[..., World], flights: JobRoot) -> None:
    house = world(extra=ALL)
    flights.start()
    checks = [c for c in house.defs.asset_checks or [] if isinstance(c, dg.AssetChecksDefinition)]
    (mine,) = [c for c in checks if c.op.name == "checks_flights"]
    with dg.DagsterInstance.ephemeral() as instance:
        job = dg.Definitions(
            asset_checks=[mine],
            jobs=[dg.define_asset_job("by_hand", selection=dg.AssetSelection.checks(mine))],
            resources={"stillstate": house.resource},
        ).resolve_job_def("by_hand")
        result = job.execute_in_process(instance=instance)
    assert {e.check_name: e.passed for e in result.get_asset_check_evaluations()}["replay_time_bounded"]


def test_a_cursor_that_is_not_understood_starts_anew() -> None:
    for text in (None, "", "x", "{}", '{"version": 9, "jobs": {}}', '{"version": 1, "jobs": {"a": [1]}}'):
        assert read_check_cursor(text) == {}
    assert read_check_cursor('{"version": 1, "jobs": {"a": [1, 2, "v"]}}') == {"a": CheckCursor(1, 2, "v")}
