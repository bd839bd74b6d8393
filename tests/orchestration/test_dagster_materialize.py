"""The materialization sensor, its check and its asset, on job roots that state_runtime itself wrote."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from fold_roots import begin, fail, finish
from job_roots import SECRET, FakeClock, JobRoot

from state_runtime.materialize.records import PIN_LIVE_MS
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.materialization.health import MaterializationHealth, materialization_health
from stillstate.orchestration.materialization.plan import (
    BACK_OFF_MAX_S,
    BACK_OFF_S,
    PAUSE_S,
    MaterializationRun,
    decide_materialization,
    failed_in_a_row,
)
from stillstate.orchestration.sensors.materialize import RECORDS_PER_TICK_MAX, read_materialization_cursor

SENSOR = "stillstate_materialization"
BY_DAGSTER = "materialization: {by: dagster, min_bytes: 1000}"  # the roots' checkpoints log more


def requests(here: World) -> list[dg.RunRequest]:
    return list(here.tick(SENSOR).run_requests or [])


def checks(result: dg.SensorResult) -> list[bool]:
    return [event.passed for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]


def folds(result: dg.SensorResult) -> list[str]:
    return [
        (event.tags or {})["dagster/data_version"]
        for event in result.asset_events
        if isinstance(event, dg.AssetMaterialization)
    ]


@pytest.fixture
def grown(flights: JobRoot) -> JobRoot:
    """A job whose log has grown beyond what `BY_DAGSTER` allows."""
    flights.start()
    flights.checkpoint()
    return flights


# --- runs ----------------------------------------------------------------------------------------------------------


def test_a_log_that_has_grown_gets_one_run(world: Callable[..., World], grown: JobRoot) -> None:
    here = world(extra=BY_DAGSTER)
    (request,) = requests(here)
    assert request.job_name == "materialize_flights"
    assert request.run_key == "flights:materialize:0:1"
    assert request.tags["stillstate/materialize"] == "flights"
    (repeated,) = requests(here)  # before the run was dequeued: the same key, which Dagster starts once
    assert repeated.run_key == request.run_key
    here.submit(request, dg.DagsterRunStatus.STARTED)
    grown.checkpoint()
    for _ in range(3):
        assert requests(here) == []


def test_where_streams_share_a_job_the_request_names_the_stream_and_its_asset_and_no_check(
    world: Callable[..., World], grown: JobRoot
) -> None:
    here = world("flights", "trains", extra=BY_DAGSTER, house="dagster: {jobs: shared}")
    (request,) = requests(here)
    assert (request.job_name, request.run_key) == ("materialize", "flights:materialize:0:1")
    assert request.tags["stillstate/materialize"] == "flights"
    assert request.run_config == {"ops": {"materialize_stream": {"config": {"stream": "flights"}}}}
    assert request.asset_selection == [dg.AssetKey(["flights", "materialized_state"])]
    assert request.asset_check_keys == [], "of none given Dagster would make all"


@pytest.mark.parametrize("by", ["driver", "nobody"])
def test_nobody_but_dagster_s_own_jobs_get_a_run(world: Callable[..., World], grown: JobRoot, by: str) -> None:
    assert requests(world(extra=f"materialization: {{by: {by}, min_bytes: 1000}}")) == []


def test_a_short_log_and_a_job_that_never_ran_get_none(world: Callable[..., World], grown: JobRoot) -> None:
    assert requests(world("flights", "trains", extra="materialization: {by: dagster}")) == []


def test_a_materialization_under_way_is_not_joined_by_a_run(
    world: Callable[..., World], grown: JobRoot, clock: FakeClock
) -> None:
    """The driver or a person began it; two would fold the same."""
    here = world(extra=BY_DAGSTER)
    begin(grown)
    assert requests(here) == []
    clock.advance_s(PIN_LIVE_MS / 1000 + 1)
    (request,) = requests(here)  # whoever began it is gone
    assert request.run_key == "flights:materialize:1:1"


def test_a_record_that_waits_for_the_driver_starts_no_second_run(
    world: Callable[..., World], grown: JobRoot, clock: FakeClock
) -> None:
    """The log looks as long as before until the next checkpoint; a stopped job may make none for days."""
    here = world(extra=BY_DAGSTER)
    record = finish(grown)
    clock.advance_s(3600)
    result = here.tick(SENSOR)
    assert not result.run_requests
    assert result.skip_reason is not None
    assert f"materialization {record.record_id} waits" in str(result.skip_reason.skip_message)


def test_a_failed_run_is_followed_by_others_each_later_than_the_last(
    world: Callable[..., World], grown: JobRoot
) -> None:
    here = world(extra=BY_DAGSTER)
    here.clock.at_ms = _now_ms()
    keys = []
    for failures in range(1, 5):
        (request,) = requests(here)
        keys.append(request.run_key)
        here.submit(request, dg.DagsterRunStatus.FAILURE)
        assert requests(here) == []
        here.clock.at_ms = _now_ms() + int((BACK_OFF_S * 2 ** (failures - 1) + 2) * 1000)
    assert keys == [f"flights:materialize:0:{n}" for n in range(1, 5)]


def _now_ms() -> int:
    """Dagster dates runs by the real clock."""
    return int(time.time() * 1000)


def test_the_pauses_double_and_end_at_an_hour() -> None:
    for failures, pause_s in ((1, BACK_OFF_S), (2, 2 * BACK_OFF_S), (20, BACK_OFF_MAX_S), (5000, BACK_OFF_MAX_S)):
        runs = [MaterializationRun(str(n), "failed", 0, n, ended_s=1000.0) for n in range(failures, 0, -1)]
        health = MaterializationHealth()
        assert decide_materialization("bytes", health, runs, 1000 + pause_s - 1, waiting=None).attempt is None
        assert decide_materialization("bytes", health, runs, 1000 + pause_s + 1, waiting=None).attempt == failures + 1


def test_after_a_success_the_driver_gets_time_to_adopt_it() -> None:
    runs = [MaterializationRun("a", "succeeded", 0, 1, ended_s=1000.0)]
    assert (
        decide_materialization("bytes", MaterializationHealth(1), runs, 1000 + PAUSE_S - 1, waiting=None).attempt
        is None
    )
    assert (
        decide_materialization("bytes", MaterializationHealth(1), runs, 1000 + PAUSE_S + 1, waiting=None).attempt == 1
    )


def test_runs_that_were_never_submitted_are_neither_failures_nor_in_the_way() -> None:
    runs = [
        MaterializationRun("a", "abandoned", 0, 1),
        MaterializationRun("b", "failed", 0, 1),
        MaterializationRun("c", "succeeded"),
    ]
    assert failed_in_a_row(runs) == 1
    assert decide_materialization("bytes", MaterializationHealth(), runs, 1e9, waiting=None).attempt == 2


# --- what is shown -------------------------------------------------------------------------------------------------


def test_folds_of_the_driver_become_materializations_once(world: Callable[..., World], grown: JobRoot) -> None:
    here = world()
    finish(grown)
    finish(grown)
    result = here.tick(SENSOR)
    assert folds(result) == ["1", "2"]
    newest = [event for event in result.asset_events if isinstance(event, dg.AssetMaterialization)][-1]
    assert newest.asset_key == dg.AssetKey(["flights", "materialized_state"])
    numbers = {k: v.value for k, v in newest.metadata.items()}
    assert numbers["log_bytes_folded"] == 2000
    assert numbers["written_bytes"] == 500
    assert numbers["write_amplification"] == 0.25
    assert numbers["shared_tables"] == 7
    assert numbers["log_bytes_left"] == 0
    assert numbers["duration_s"] == 1.5
    assert folds(here.tick(SENSOR)) == []
    finish(grown)
    assert folds(here.tick(SENSOR)) == ["3"]


def test_what_a_run_published_is_not_published_again(
    world: Callable[..., World], grown: JobRoot, instance: dg.DagsterInstance
) -> None:
    here = world()
    finish(grown)
    for event in here.tick(SENSOR).asset_events:
        instance.report_runless_asset_event(event)
    here.cursors.clear()  # as if the cursor had been lost
    assert folds(here.tick(SENSOR)) == []


def test_a_run_under_way_publishes_its_own(world: Callable[..., World], grown: JobRoot) -> None:
    """Between its record and its event, the sensor would publish the same."""
    here = world(extra=BY_DAGSTER)
    (request,) = requests(here)
    here.submit(request, dg.DagsterRunStatus.STARTED)
    finish(grown)
    assert folds(here.tick(SENSOR)) == []


def test_a_tick_publishes_a_bounded_number(world: Callable[..., World], grown: JobRoot) -> None:
    here = world()
    for _ in range(RECORDS_PER_TICK_MAX + 3):
        finish(grown)
    assert len(folds(here.tick(SENSOR))) == RECORDS_PER_TICK_MAX
    assert len(folds(here.tick(SENSOR))) == 3


def test_a_damaged_record_is_said_and_passed(world: Callable[..., World], grown: JobRoot) -> None:
    here = world()
    finish(grown)
    file = grown.store_path / "flights" / "materializations" / f"{1:020d}.json"
    file.write_bytes(file.read_bytes()[:20])
    finish(grown)
    result = here.tick(SENSOR)
    assert folds(result) == ["2"]
    assert "materialization 1:" in str(result.skip_reason.skip_message)  # type: ignore[union-attr]


def test_three_failures_in_a_row_alarm_and_a_success_ends_it(world: Callable[..., World], grown: JobRoot) -> None:
    here = world()
    assert checks(here.tick(SENSOR)) == [True]
    seen = []
    for _ in range(3):
        fail(grown)
        seen += checks(here.tick(SENSOR))
    assert seen == [True, True, False]
    assert checks(here.tick(SENSOR)) == []  # said once, not every ten seconds
    finish(grown)
    assert checks(here.tick(SENSOR)) == [True]


def test_a_killed_materialization_counts_as_failed_once_it_is_silent(
    world: Callable[..., World], grown: JobRoot, clock: FakeClock
) -> None:
    for _ in range(3):
        begin(grown)
        clock.advance_s(PIN_LIVE_MS / 1000 + 1)
    assert materialization_health(grown.catalog, clock.now_ms()).failed_in_a_row == 3
    begin(grown)
    health = materialization_health(grown.catalog, clock.now_ms())
    assert (health.running, health.failed_in_a_row) == (True, 3)
    assert checks(world().tick(SENSOR)) == [False]


def test_runs_that_fail_before_they_begin_alarm_too(world: Callable[..., World], grown: JobRoot) -> None:
    """Without Java no pin is ever written."""
    here = world(extra=BY_DAGSTER)
    for number in range(3):
        request = dg.RunRequest(run_key=f"k{number}", job_name="materialize_flights")
        here.submit(request, dg.DagsterRunStatus.FAILURE)
    assert checks(here.tick(SENSOR)) == [False]


def test_the_check_can_be_run_by_hand(world: Callable[..., World], grown: JobRoot) -> None:
    here = world()
    for _ in range(3):
        fail(grown)
    (check,) = (c for c in here.defs.resolve_asset_graph().asset_check_keys if c.name == "materializations_succeed")
    done = (
        here.defs.resolve_implicit_global_asset_job_def()
        .get_subset(asset_selection=set(), asset_check_selection={check})
        .execute_in_process(instance=here.instance)
    )
    (evaluation,) = done.get_asset_check_evaluations()
    assert not evaluation.passed
    assert evaluation.metadata["failed_in_a_row"].value == 3


def test_one_unreadable_store_does_not_stop_the_others(
    world: Callable[..., World], grown: JobRoot, clock: FakeClock
) -> None:
    trains = JobRoot(grown.store_path, "trains", clock)
    trains.start()
    trains.checkpoint()
    grown.damage(2)
    here = world("flights", "trains", extra=BY_DAGSTER)
    result = here.tick(SENSOR)
    assert [request.job_name for request in result.run_requests or []] == ["materialize_trains"]
    assert checks(result) == [True, True]


def test_the_cursor_is_small_versioned_json_and_another_starts_anew(
    world: Callable[..., World], grown: JobRoot
) -> None:
    here = world()
    finish(grown)
    here.tick(SENSOR)
    data = json.loads(here.cursors[SENSOR] or "")
    assert data["version"] == 1
    assert read_materialization_cursor(here.cursors[SENSOR])[0]["flights"].record_id == 1
    for text in ("", "x", "[]", '{"version": 2, "jobs": {}}', '{"version": 1, "jobs": {"flights": [1]}}'):
        assert read_materialization_cursor(text) == ({}, "")
    trap = json.dumps({"version": 1, "jobs": {"gone": ["u", 1, 0]}})
    here.cursors[SENSOR] = trap
    here.tick(SENSOR)
    assert set(read_materialization_cursor(here.cursors[SENSOR])[0]) == {"flights"}


# --- definitions ---------------------------------------------------------------------------------------------------


def test_a_schedule_exists_where_one_is_configured(write_config: Callable[..., Path]) -> None:
    plain = build_definitions(load_spec(write_config())).get_repository_def().schedule_defs
    assert not [schedule for schedule in plain if schedule.name.startswith("materialize_")]
    config = write_config("plane-delays", extra="materialization: {by: dagster, schedule: '0 3 * * *'}")
    all_of_them = build_definitions(load_spec(config)).get_repository_def().schedule_defs
    (schedule,) = (schedule for schedule in all_of_them if schedule.name.startswith("materialize_"))
    assert schedule.cron_schedule == "0 3 * * *"
    assert schedule.job_name == "materialize_plane_delays"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING


def test_the_materialization_job_is_limited_by_a_tag_of_its_own(write_config: Callable[..., Path]) -> None:
    """A fold of an hour must not keep a lost driver from being recovered."""
    job = build_definitions(load_spec(write_config())).resolve_job_def("materialize_flights")
    assert job.tags["stillstate/materialize"] == "flights"
    assert "stillstate/job" not in job.tags
    assert job.tags["dagster/max_retries"] == "0"
    assert int(job.tags["dagster/max_runtime"]) == 6 * 3600


def test_the_tables_follow_the_checkpoints(write_config: Callable[..., Path]) -> None:
    config = write_config(extra=f"storage_options: {{key: {SECRET}}}\nowners: ['team:data']")
    defs = build_definitions(load_spec(config))
    (spec,) = [s for s in defs.resolve_all_asset_specs() if s.key.path[-1] == "materialized_state"]
    assert [dep.asset_key.path for dep in spec.deps] == [["flights", "checkpoints"]]
    assert spec.group_name == "flights"
    assert list(spec.owners) == ["team:data"]
    assert {"dagster/kind/spark", "dagster/kind/parquet"} <= set(spec.tags)
    assert SECRET not in repr(defs.get_repository_def().get_all_jobs())


def test_a_run_without_spark_s_package_says_what_to_install(
    write_config: Callable[..., Path], grown: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dagster_pyspark", None)
    job = build_definitions(load_spec(write_config())).resolve_job_def("materialize_flights")
    done: Any = job.execute_in_process(raise_on_error=False)
    assert not done.success
    assert "pip install 'stillstate[spark]'" in repr([e.event_specific_data for e in done.all_events])
