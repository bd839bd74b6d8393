"""`dagster: {jobs: shared}`: one Dagster job for each kind of work, which is told the stream, and else the same as one
for each stream."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_test_daemon_workspace_context, instance_for_test
from dagster._core.workspace.load_target import ModuleTarget
from dagster._scheduler.scheduler import launch_scheduled_runs
from dagster._utils.schedules import cron_string_iterator
from dagster_world import FakeLauncher, World
from job_roots import FakeClock, JobRoot

from state_runtime.snapshot.savepoint_record import list_savepoints
from stillstate.orchestration.config.schedules import cron_of, is_cron, is_due
from stillstate.orchestration.config.sections import PER_JOB_MAX
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.upkeep.deletions import Retaining

ROOT = Path(__file__).resolve().parents[2]
STREAM_TAGS = {f"stillstate/{name}" for name in ("materialize", "savepoint", "upkeep")}
SHARED = "dagster: {jobs: shared}"
ACTIONS = {"start", "stop", "recover", "migrate", "rollback", "set_source"}
ACTIONS |= {"materialize", "savepoint", "retain", "collect", "compact_output", "verify", "drill"}


def config(op: str, **fields: Any) -> dict[str, Any]:
    return {"ops": {op: {"config": fields}}}


def run(world: World, name: str, run_config: dict[str, Any], **more: Any) -> dg.ExecuteInProcessResult:
    job = world.defs.resolve_job_def(name)
    return job.execute_in_process(instance=world.instance, run_config=run_config, raise_on_error=False, **more)


def why_failed(result: dg.ExecuteInProcessResult) -> str:
    (failure,) = [e for e in result.all_events if e.event_type_value == "STEP_FAILURE"]
    return str(failure.step_failure_data.error_display_string) + str(failure.step_failure_data.user_failure_data)


@pytest.fixture
def five(flights: JobRoot) -> JobRoot:
    """Snapshots 1 … 5 of a job whose run ended."""
    flights.start()
    assert flights.committer is not None
    for _ in range(4):
        flights.committer.commit(flights.committer.last)
    flights.beat("stopped")
    return flights


# --- what there is -------------------------------------------------------------------------------------------------


def test_nine_jobs_whatever_the_number_of_streams_and_the_same_assets_and_checks(
    write_config: Callable[..., Any],
) -> None:
    names = ("flights", "plane-delays", "trains")
    shared = build_definitions(load_spec(write_config(*names, house=SHARED)))
    own = build_definitions(load_spec(write_config(*names, house="dagster: {jobs: per_job}")))
    jobs = {job.name for job in shared.get_repository_def().get_all_jobs() if not job.name.startswith("__")}
    assert jobs == {*ACTIONS, "stillstate_prune"}
    one, other = shared.resolve_asset_graph(), own.resolve_asset_graph()
    assert one.get_all_asset_keys() == other.get_all_asset_keys()
    assert one.asset_check_keys == other.asset_check_keys
    assert one.executable_asset_keys == other.executable_asset_keys
    for key in other.get_all_asset_keys():
        assert one.get(key).parent_keys == other.get(key).parent_keys
        assert one.get(key).group_name == other.get(key).group_name


def test_beyond_a_stated_number_of_streams_they_share_jobs_unless_the_file_says_otherwise(
    write_config: Callable[..., Any],
) -> None:
    names = [f"job-{n}" for n in range(PER_JOB_MAX + 1)]

    def is_shared(count: int, house: str = "") -> bool:
        spec = load_spec(write_config(*names[:count], house=house))
        return spec.dagster.is_shared(len(spec.jobs))

    assert not is_shared(PER_JOB_MAX)
    assert is_shared(PER_JOB_MAX + 1)
    assert not is_shared(PER_JOB_MAX + 1, "dagster: {jobs: per_job}")
    assert is_shared(1, SHARED)


def test_the_page_that_is_opened_first_says_which_it_is(write_config: Callable[..., Any]) -> None:
    """Nobody chose it where a forty-first job was added."""
    defs = build_definitions(load_spec(write_config(house=SHARED)))
    (overview,) = [s for s in defs.resolve_all_asset_specs() if s.key.path == ["stillstate", "overview"]]
    assert overview.metadata["dagster_jobs"] == "shared"


# --- a run is about one stream ---------------------------------------------------------------------------------------


def test_the_stream_is_the_one_of_the_configuration_or_of_the_selected_asset(
    world: Callable[..., World], flights: JobRoot
) -> None:
    house = world("flights", "trains", house=SHARED)
    flights.start("stopped")
    assert run(house, "savepoint", config("savepoint_stream", stream="flights")).success
    assert len(list_savepoints(flights.catalog.root)) == 1
    flights.clock.advance_s(60)
    assert flights.committer is not None
    flights.committer.commit(flights.committer.last)
    assert run(house, "savepoint", {}, asset_selection=[dg.AssetKey(["flights", "savepoints"])]).success
    assert len(list_savepoints(flights.catalog.root)) == 2
    made = house.instance.fetch_materializations(dg.AssetKey(["flights", "savepoints"]), limit=10).records
    assert len(made) == 2
    assert not house.instance.fetch_materializations(dg.AssetKey(["trains", "savepoints"]), limit=10).records


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("materialize", "materialize_stream"),
        ("savepoint", "savepoint_stream"),
        ("retain", "retain_stream"),
        ("collect", "collect_stream"),
        ("compact_output", "compact_output_stream"),
        ("verify", "verify_stream"),
        ("drill", "drill_stream"),
    ],
)
def test_a_run_that_is_about_two_streams_or_an_unknown_one_is_refused(
    world: Callable[..., World], flights: JobRoot, name: str, op: str
) -> None:
    """It would hold the place of neither among runs."""
    house = world("flights", "trains", house=SHARED)
    flights.start("stopped")
    several = run(house, name, {})
    assert not several.success
    assert "2 streams are selected (flights, trains …), and a run is about one" in why_failed(several)
    unknown = run(house, name, config(op, stream="ships"))
    assert "stream 'ships' is not one of the selected streams" in why_failed(unknown)


def test_a_run_that_a_person_launched_gets_the_tag_by_which_the_queue_counts(
    world: Callable[..., World], flights: JobRoot
) -> None:
    house = world("flights", "trains", house=SHARED)
    flights.start("stopped")
    for name, op, tag in (
        ("savepoint", "savepoint_stream", "stillstate/savepoint"),
        ("collect", "collect_stream", "stillstate/upkeep"),
        ("compact_output", "compact_output_stream", "stillstate/upkeep"),
        ("start", "start_driver", "stillstate/job"),
        ("stop", "stop_driver", "stillstate/job"),
        ("recover", "recover_driver", "stillstate/job"),
        ("rollback", "rollback_driver", "stillstate/job"),
        ("materialize", "materialize_stream", "stillstate/materialize"),
        ("verify", "verify_stream", "stillstate/upkeep"),
        ("drill", "drill_stream", "stillstate/upkeep"),
    ):
        result = run(house, name, config(op, stream="flights"))
        stored = house.instance.get_run_by_id(result.run_id)
        assert stored is not None
        assert stored.tags[tag] == "flights", name


# --- deletions: plan → check → apply of that very plan ---------------------------------------------------------------


def test_what_was_planned_and_checked_is_deleted_and_nothing_else(world: Callable[..., World], five: JobRoot) -> None:
    house = world("flights", "trains", house=SHARED, extra="retention: {keep_last: 2, deleted_share_max: 0.7}")
    result = run(house, "retain", config("retain_stream", stream="flights"))
    assert result.success, why_failed(result)
    assert five.catalog.snapshot_ids() == [4, 5]
    (found,) = result.get_asset_check_evaluations()
    assert found.passed
    made = [e.asset_key.to_user_string() for e in result.all_events if e.is_step_materialization]
    assert made == ["flights/retained_snapshots", "flights/deleted_snapshots"]


@pytest.fixture
def nobody_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What deletes has guards of its own; these tests are about not getting as far."""

    def apply(*_: Any, **__: Any) -> None:
        raise AssertionError("the plan was executed")

    monkeypatch.setattr(Retaining, "apply", apply)


@pytest.mark.usefixtures("nobody_deletes")
def test_a_plan_that_is_not_safe_never_gets_as_far_as_deleting(world: Callable[..., World], five: JobRoot) -> None:
    house = world("flights", "trains", house=SHARED, extra="retention: {keep_last: 2}")
    result = run(house, "retain", config("retain_stream", stream="flights"))
    assert not result.success
    assert "the plan was executed" not in why_failed(result)
    (found,) = result.get_asset_check_evaluations()
    assert "3 of 5 snapshots, more than 50%" in str(found.description)
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    made = [e.asset_key.to_user_string() for e in result.all_events if e.is_step_materialization]
    assert made == ["flights/retained_snapshots"]


@pytest.mark.usefixtures("nobody_deletes")
def test_without_its_check_a_plan_is_looked_at_all_the_same(world: Callable[..., World], five: JobRoot) -> None:
    """A person may leave the check out of a run's selection; the store is asked whatever was selected."""
    house = world("flights", "trains", house=SHARED, extra="retention: {keep_last: 2}")
    job = house.defs.resolve_job_def("retain")
    keys = [dg.AssetKey(["flights", thing]) for thing in ("retained_snapshots", "deleted_snapshots")]
    subset = job.get_subset(asset_selection=set(keys), asset_check_selection=set())
    result = subset.execute_in_process(instance=house.instance, raise_on_error=False)
    assert not result.success
    assert "more than 50%" in why_failed(result)
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]


# --- what sensors and schedules request ------------------------------------------------------------------------------


def test_a_lost_driver_gets_a_run_of_the_shared_job_with_its_name_and_its_tag(
    world: Callable[..., World], flights: JobRoot, clock: FakeClock
) -> None:
    house = world("flights", "trains", house=SHARED)
    house.launchers.setdefault("flights", FakeLauncher(flights))
    flights.start()
    clock.advance_s(3600)
    (request,) = house.recovery()
    assert (request.job_name, request.run_key) == ("recover", "flights:1:1")
    assert request.tags["stillstate/job"] == "flights"
    assert request.run_config == config("recover_driver", term=1, stream="flights")
    result = run(house, "recover", dict(request.run_config))
    assert result.success, why_failed(result)
    assert house.launchers["flights"].starts == [True]
    house.submit(request, dg.DagsterRunStatus.STARTED)
    assert house.recovery() == [], "the run under way is found by its tag"


def schedule_requests(house: World, name: str, at: datetime) -> list[dg.RunRequest]:
    schedule = house.defs.resolve_schedule_def(name)
    context = dg.build_schedule_context(instance=house.instance, scheduled_execution_time=at)
    return list(schedule.evaluate_tick(context).run_requests or [])


def test_a_schedule_of_all_streams_requests_a_run_of_each_at_its_own_time(world: Callable[..., World]) -> None:
    house = world("flights", "trains", house=SHARED, extra="retention: {schedule: auto}")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    seen: dict[str, set[str]] = {}
    for minute in range(24 * 60):
        at = start + timedelta(minutes=minute)
        for request in schedule_requests(house, "retain_schedule", at):
            name = request.tags["stillstate/upkeep"]
            seen.setdefault(name, set()).add(f"{at:%M %H}")
            assert request.run_config == config("retain_stream", stream=name)
            keys = [key.to_user_string() for key in request.asset_selection or ()]
            assert keys == [f"{name}/retained_snapshots", f"{name}/deleted_snapshots"]
            assert request.tags["stillstate/slots"] == "upkeep"
            assert request.tags["dagster/max_runtime"] == str(6 * 3600)
    expected = {}
    for name in ("flights", "trains"):
        minute_of, hour_of, *_ = str(cron_of("auto", "night", name)).split()
        expected[name] = {f"{int(minute_of):02} {int(hour_of):02}"}
    assert seen == expected


def test_a_request_to_verify_names_the_check_of_its_stream_and_the_level(world: Callable[..., World]) -> None:
    house = world("flights", "trains", house=SHARED, extra="verification: {full: 5 4 * * *, sample: 'off'}")
    names = {schedule.name for schedule in house.defs.get_repository_def().schedule_defs}
    assert "verify_schedule" not in names
    requests = schedule_requests(house, "verify_full_schedule", datetime(2026, 1, 1, 4, 5, tzinfo=UTC))
    assert [r.run_config for r in requests] == [
        config("verify_stream", stream=name, level="full") for name in ("flights", "trains")
    ]
    assert [[k.to_user_string() for k in r.asset_check_keys or ()] for r in requests] == [
        ["flights/checkpoints:intact"],
        ["trains/checkpoints:intact"],
    ]


def test_dagsters_scheduler_makes_of_each_request_a_run_of_that_streams_assets_and_checks_alone(
    write_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own loop over its own server of the code location, from before the time to after it."""
    extra = (
        "materialization: {by: dagster, schedule: 5 4 * * *}\nsavepoints: {schedule: 5 4 * * *}\n"
        "retention: {schedule: 5 4 * * *}\ngarbage: {schedule: 'off'}\n"
        "verification: {full: 5 4 * * *, sample: 'off'}\ndrill: {schedule: 5 4 * * *}\noutput: {schedule: 5 4 * * *}"
    )
    monkeypatch.setenv("STILLSTATE_CONFIG", str(write_config("flights", "trains", house=SHARED, extra=extra)))
    target = ModuleTarget("stillstate.orchestration.definitions", "defs", str(ROOT), "stillstate")
    times: dict[str, Any] = {}
    with instance_for_test() as instance, create_test_daemon_workspace_context(target, instance) as workspace:
        for minute in (0, 6):
            at = datetime(2026, 1, 1, 4, minute, tzinfo=UTC)
            list(launch_scheduled_runs(workspace, logging.getLogger("daemon"), at, times))
        runs = instance.get_runs()
        made: dict[tuple[str, str], set[str]] = {}
        for one in runs:
            assert one.execution_plan_snapshot_id is not None
            plan = instance.get_execution_plan_snapshot(one.execution_plan_snapshot_id)
            steps = [s.key for s in plan.steps]
            assert len(steps) == 1, (one.job_name, steps, one.asset_selection, one.asset_check_selection)
            (step,) = plan.steps
            outputs = {
                properties.asset_key.to_user_string()
                if properties.asset_key is not None
                else f"{properties.asset_check_key.asset_key.to_user_string()}:{properties.asset_check_key.name}"
                for output in step.outputs
                if (properties := output.properties) is not None
                and (properties.asset_key is not None or properties.asset_check_key is not None)
            }
            tag = next(one.tags[name] for name in one.tags if name in STREAM_TAGS)
            made[one.job_name, tag] = outputs
    for name in ("flights", "trains"):
        assert made.pop(("materialize", name)) == {f"{name}/materialized_state"}
        assert made.pop(("savepoint", name)) == {f"{name}/savepoints"}
        things = {"retained_snapshots", "deleted_snapshots", "retained_snapshots:retention_plan_is_safe"}
        assert made.pop(("retain", name)) == {f"{name}/{thing}" for thing in things}
        assert made.pop(("compact_output", name)) == {f"{name}/compacted_output"}
        assert made.pop(("verify", name)) == {f"{name}/checkpoints:intact"}
        assert made.pop(("drill", name)) == {f"{name}/checkpoints:restorable"}
    assert made == {}


LINE_PARTS = ("*", "*/2", "*/7", "5", "1-3", "2-6/2", "3/2", "1,4", "0", "6")


def test_a_line_is_due_when_dagster_ticks_for_it() -> None:
    """Dagster's schedules tick by its own reading of cron; a tick for which nobody is due would be lost work."""
    seed = 20261123
    chance = random.Random(seed)
    start = datetime(2026, 2, 26, 22, 57, tzinfo=UTC)
    for _ in range(60):
        day = chance.choice(("*", "*", "1", "*/10", "28-31", "3/2"))
        line = f"{chance.choice(LINE_PARTS)} {chance.choice(LINE_PARTS)} {day} {chance.choice(('*', '2', '*/3', '3'))} "
        line += chance.choice(("*", "*", "0", "7", "1-5", "6,0"))
        assert is_cron(line)
        ticks = cron_string_iterator(start.timestamp(), line, "UTC")
        expected = [t for _, t in zip(range(20), ticks)]
        for tick in expected:
            assert due(line, tick), (seed, line, tick)
        minute = start
        while minute < min(expected[-1], start + timedelta(days=4)):
            assert due(line, minute) == (minute in expected), (seed, line, minute)
            minute += timedelta(minutes=1)


def due(line: str, at: datetime) -> bool:
    return is_due(line, (at.minute, at.hour, at.day, at.month, at.isoweekday() % 7))
