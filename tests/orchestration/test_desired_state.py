"""The sensor of the desired state and the check `matches_configuration`: what runs against what the file says, and
migrations that begin by themselves, once for each difference."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from job_roots import NO_SUCH_PID, SECRET, JobRoot
from migrated_house import House
from migrated_job import Died

from state_runtime.base.process_space import process_space
from state_runtime.base.settings import JobSettings
from state_runtime.snapshot.migration import Migration, RunSettings, read_migration, take_migration_over
from state_runtime.snapshot.term_files import RunStatus
from stillstate.assets.checks import MATCHES_CHECK
from stillstate.orchestration.config.driver_settings import driver_settings, section_digest
from stillstate.orchestration.config.reference import groups_below
from stillstate.orchestration.config.sections import MigrationSpec
from stillstate.orchestration.config.spec import JobSpec, load_spec, to_settings
from stillstate.orchestration.launchers.processes import is_owner_gone
from stillstate.orchestration.migration.desired import Desired, PastMigration, judge_desired
from stillstate.orchestration.migration.plan import Request
from stillstate.orchestration.recovery.health import Health
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.run_phases import RunPhase
from stillstate.orchestration.sensors.desired_state import SHOWN_EVERY_S, read_desired_cursor

SENSOR = "stillstate_desired_state"
FILE = "parallelism: 2\ncheckpoint: {interval_s: 5}\nrecovery: {heartbeat_timeout_s: 300, first_checkpoint_s: 20}"
CHECK = dg.AssetCheckKey(dg.AssetKey(["job", "stream"]), MATCHES_CHECK)
AUTOMATIC = f"{FILE}\nmigration: {{automatic: true}}"


@pytest.fixture
def house(world: Callable[..., World], tmp_path: Path) -> House:
    return House.of(world("job", extra=FILE), tmp_path)


@pytest.fixture
def automatic(world: Callable[..., World], tmp_path: Path) -> House:
    """Its clock is Dagster's own, which stamps runs."""
    here = world("job", extra=AUTOMATIC)
    here.clock.at_ms = time.time_ns() // 1_000_000
    return House.of(here, tmp_path)


def tick(house: House) -> tuple[list[dg.AssetCheckEvaluation], list[dg.RunRequest]]:
    """One tick, its events kept by the instance as the daemon would; the driver beats before it."""
    house.beat()
    house.follow()
    result = house.here.tick(SENSOR)
    for event in result.asset_events:
        house.here.instance.report_runless_asset_event(event)
    return [e for e in result.asset_events if isinstance(e, dg.AssetCheckEvaluation)], list(result.run_requests or [])


def only(house: House) -> dg.AssetCheckEvaluation:
    ((found,), _) = tick(house)
    return found


def execute(house: House, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    """What the daemon does with a request."""
    assert request.run_key is not None
    (config,) = request.run_config["ops"].values()
    return house.run({**request.tags, "dagster/run_key": request.run_key}, **config["config"])


def table(found: dg.AssetCheckEvaluation) -> str:
    return str(found.metadata["differences"].value)


# -- what is compared -------------------------------------------------------------------------------------------------


def test_a_job_that_runs_as_the_file_says_passes_and_that_is_stored_once(house: House) -> None:
    found = only(house)
    assert (found.check_name, found.passed) == (MATCHES_CHECK, True)
    assert found.asset_key == dg.AssetKey(["job", "stream"])
    for _ in range(3):
        house.made.job.clock.advance_s(60)
        assert tick(house) == ([], [])
    house.made.job.clock.advance_s(SHOWN_EVERY_S)
    assert only(house).passed, "once a day all the same: somebody may purge events"


def test_an_edit_warns_with_what_differs_and_with_what_applies_it(house: House) -> None:
    only(house)
    house.write("parallelism: 2", "parallelism: 3")
    house.write("interval_s: 5", "interval_s: 9")
    found = only(house)
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "|parallelism|2|3|migration or restart|" in table(found)
    assert "|checkpoint.interval_s|5|9|restart|" in table(found)
    assert "`stillstate migrate job`, or launch migrate_job" in str(found.description)
    assert "`stillstate migrate job --restart`" in str(found.description)
    assert tick(house) == ([], []), "nothing has changed since, and nobody asked for a migration"


def test_of_a_job_that_was_migrated_a_restart_takes_the_others_only(house: House) -> None:
    assert house.run(parallelism=3).success
    found = only(house)
    assert "|parallelism|3|2|migration|" in table(found)
    house.write("parallelism: 2", "parallelism: 3")
    assert only(house).passed


def test_a_job_that_does_not_run_is_compared_by_what_a_start_would_have(house: House) -> None:
    house.write("interval_s: 5", "interval_s: 9")
    assert not only(house).passed
    house.made.drivers.stop()
    found = only(house)
    assert found.passed
    assert "its next start has the settings of the file" in str(found.description)
    assert house.run(parallelism=3).success
    house.made.drivers.stop()
    found = only(house)
    assert not found.passed
    assert "the job would start with other settings" in str(found.description)


def test_a_job_that_comes_up_keeps_its_verdict_and_one_that_never_ran_has_none(
    world: Callable[..., World], flights: JobRoot
) -> None:
    here = world(extra="parallelism: 4")
    assert not here.tick(SENSOR).asset_events, "never started"
    flights.start("starting")
    assert not here.tick(SENSOR).asset_events
    flights.beat(parallelism=4, backend="arrow")
    (found,) = here.tick(SENSOR).asset_events
    assert found.passed
    assert "the driver says parallelism and backend" in str(found.description), "it is of an earlier version"


def test_what_a_run_does_not_say_is_no_difference(world: Callable[..., World], flights: JobRoot) -> None:
    here = world(extra="parallelism: 4\ncheckpoint: {interval_s: 9}")
    flights.start()
    flights.beat(settings=(("upload.timeout_s", "1"),))
    (found,) = here.tick(SENSOR).asset_events
    assert found.passed


def test_an_open_migration_is_said_and_not_green(house: House) -> None:
    def cut(point: str) -> None:
        if point == "done verify":
            raise Died

    migrator = house.made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(settings=RunSettings(parallelism=3))))
    found = only(house)
    assert not found.passed
    assert "the job is being migrated to parallelism 3" in str(found.description)


def test_a_store_that_does_not_answer_changes_no_verdict(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    only(house)
    folder = house.made.store / "job"
    folder.rename(folder.with_name("gone"))
    folder.write_text("not a folder")
    result = house.here.tick(SENSOR)
    assert result.asset_events == []
    assert "job" in str(result.skip_reason)


def test_it_is_judged_anew_when_a_migration_of_dagster_s_has_ended(house: House) -> None:
    """Whoever was told that it failed waits for a verdict that is younger."""
    assert only(house).passed
    house.here.submit(dg.RunRequest(run_key=None, job_name="migrate_job"), dg.DagsterRunStatus.FAILURE)
    assert only(house).passed
    assert tick(house) == ([], [])


def test_a_person_can_run_the_check(house: House) -> None:
    house.write("parallelism: 2", "parallelism: 3")
    house.beat()
    house.follow()
    found = [c for c in house.here.defs.asset_checks or [] if isinstance(c, dg.AssetChecksDefinition)]
    mine = [c for c in found if any(key.name == MATCHES_CHECK for key in c.check_keys)]
    with dg.DagsterInstance.ephemeral() as instance:
        job = dg.Definitions(
            asset_checks=mine,
            jobs=[dg.define_asset_job("by_hand", selection=dg.AssetSelection.checks(*mine))],
            resources={"stillstate": house.here.resource},
        ).resolve_job_def("by_hand")
        result = job.execute_in_process(instance=instance)
    (evaluation,) = result.get_asset_check_evaluations()
    assert not evaluation.passed


# -- the settings of a driver -----------------------------------------------------------------------------------------


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "something-else" if isinstance(value, str) else ("x",) if isinstance(value, tuple) else 7


CHOICES = {("materialization", "by"): "dagster", ("checkpoint", "mode"): "aligned"}
"""Of settings that take some words only: another than the default."""


def test_a_setting_that_a_driver_takes_is_one_that_it_says() -> None:
    """Else an edit of it would be green, and wait for a restart that nobody makes."""
    job = JobSpec(name="job", entry_point="a:b", store="s")
    for section, group in groups_below(JobSettings):
        for name in group.model_fields if section else ():
            now = getattr(job, section)
            value = CHOICES.get((section, name)) or _changed(getattr(now, name))
            other = job.model_copy(update={section: now.model_copy(update={name: value})})
            takes = to_settings(other) != to_settings(job)
            if takes:
                assert driver_settings(other) != driver_settings(job), f"{section}.{name}"


def test_nothing_that_may_be_secret_is_said(write_config: Callable[..., Path]) -> None:
    extra = (
        f"storage_options: {{key: {SECRET}}}\noptions: {{password: {SECRET}}}\n"
        f"spark: {{conf: {{spark.hadoop.secret: {SECRET}}}}}"
    )
    job = load_spec(write_config("job", extra=extra)).job("job")
    assert SECRET not in json.dumps(driver_settings(job)) + section_digest(job)


def test_a_heartbeat_of_an_earlier_version_says_no_settings() -> None:
    assert RunStatus.__dataclass_fields__["settings"].default == ()
    assert to_settings(JobSpec(name="j", entry_point="a:b", store="s")) == JobSettings()


# -- a migration that begins by itself --------------------------------------------------------------------------------


def test_without_being_asked_to_it_migrates_nothing(house: House) -> None:
    house.write("parallelism: 2", "parallelism: 3")
    assert tick(house)[1] == []


def test_with_automatic_a_difference_is_migrated_once(automatic: House) -> None:
    automatic.write("parallelism: 2", "parallelism: 3")
    (found,), (request,) = tick(automatic)
    assert "is asked for" in str(found.description)
    assert (request.job_name, request.tags["stillstate/action"]) == ("migrate_job", "migrate")
    ((again,)) = tick(automatic)[1]
    assert again.run_key == request.run_key, "until Dagster has made a run of it"
    done = execute(automatic, request)
    assert done.success
    (live,) = automatic.made.drivers.live()
    assert live.parallelism == 3
    found = only(automatic)
    assert found.passed
    assert tick(automatic) == ([], [])


def test_a_restart_s_settings_are_not_migrated(automatic: House) -> None:
    """A migration records none of them, so it would never end."""
    automatic.write("interval_s: 5", "interval_s: 9")
    (found,), requests = tick(automatic)
    assert (found.passed, requests) == (False, [])


@pytest.mark.parametrize("how", ["stopped", "dead"])
def test_a_job_that_was_stopped_or_is_down_is_not_migrated(automatic: House, how: str) -> None:
    assert automatic.run(parallelism=3).success
    if how == "stopped":
        automatic.made.drivers.stop()
    else:
        automatic.made.drivers.runs[-1].state = "failed"
        automatic.beat()
        automatic.made.job.clock.advance_s(100)
    automatic.follow()
    result = automatic.here.tick(SENSOR)
    (found,) = result.asset_events
    assert not result.run_requests
    assert "is not migrated by itself" in str(found.description)


def test_a_job_that_was_stopped_since_it_was_asked_for_stays_stopped(automatic: House) -> None:
    automatic.write("parallelism: 2", "parallelism: 3")
    (request,) = tick(automatic)[1]
    automatic.made.drivers.stop()
    done = execute(automatic, request)
    assert done.output_for_node("migrate_job_driver")["outcome"] == "nothing to do"
    assert not automatic.made.drivers.live()
    assert read_migration(automatic.made.job.root) is None


def test_a_file_that_has_changed_since_it_was_asked_for_is_not_overtaken(automatic: House) -> None:
    automatic.write("parallelism: 2", "parallelism: 3")
    (request,) = tick(automatic)[1]
    automatic.write("parallelism: 3", "parallelism: 2")
    assert execute(automatic, request).output_for_node("migrate_job_driver")["outcome"] == "nothing to do"
    assert automatic.made.drivers.live()[0].parallelism == 2


def test_what_was_taken_back_is_not_tried_again_until_the_file_changes(automatic: House) -> None:
    automatic.made.drivers.behaviour[3] = "dies"
    automatic.write("parallelism: 2", "parallelism: 3")
    (request,) = tick(automatic)[1]
    assert not execute(automatic, request).success
    (found,), requests = tick(automatic)
    assert requests == []
    assert "was taken back: watch: term" in str(found.description)
    assert "not tried again by itself until" in str(found.description)
    for _ in range(3):
        automatic.made.job.clock.advance_s(600)
        assert tick(automatic) == ([], [])
    automatic.here.cursors[SENSOR] = None
    assert tick(automatic)[1] == [], "nor by a daemon that has lost its cursor"
    automatic.made.drivers.behaviour[3] = "works"
    automatic.write("interval_s: 5", "interval_s: 9")
    (request,) = tick(automatic)[1]
    assert execute(automatic, request).success
    assert automatic.made.drivers.live()[0].parallelism == 3


def test_what_was_taken_back_and_edited_away_may_be_asked_for_anew(automatic: House) -> None:
    automatic.made.drivers.behaviour[3] = "dies"
    automatic.write("parallelism: 2", "parallelism: 3")
    execute(automatic, tick(automatic)[1][0])
    tick(automatic)
    automatic.write("parallelism: 3", "parallelism: 2")
    assert only(automatic).passed
    automatic.write("parallelism: 2", "parallelism: 3")
    assert len(tick(automatic)[1]) == 1


def test_another_target_than_the_one_that_was_taken_back_is_tried(automatic: House) -> None:
    automatic.made.drivers.behaviour[3] = "dies"
    automatic.write("parallelism: 2", "parallelism: 3")
    execute(automatic, tick(automatic)[1][0])
    automatic.write("parallelism: 3", "parallelism: 5")
    (request,) = tick(automatic)[1]
    assert execute(automatic, request).success


def test_a_run_that_failed_before_it_began_is_not_asked_for_again_and_that_is_said(automatic: House) -> None:
    automatic.write("parallelism: 2", "parallelism: 3")
    (request,) = tick(automatic)[1]
    automatic.here.submit(request, dg.DagsterRunStatus.FAILURE)
    (found,), requests = tick(automatic)
    assert requests == []
    assert "was asked for once, and failed" in str(found.description)
    assert "run" in found.metadata


def test_while_somebody_s_run_migrates_none_is_asked_for(automatic: House) -> None:
    by_hand = dg.RunRequest(run_key=None, job_name="migrate_job")
    automatic.here.submit(by_hand, dg.DagsterRunStatus.STARTED)
    automatic.write("parallelism: 2", "parallelism: 3")
    (found,), requests = tick(automatic)
    assert requests == []
    assert "is under way" in str(found.description)


# -- a run that dies in the middle ------------------------------------------------------------------------------------


def cut_off(house: House, point: str) -> dg.RunRequest:
    """The run that the sensor asked for dies at a point, and Dagster finds that out."""
    house.write("parallelism: 2", "parallelism: 3")
    (request,) = tick(house)[1]
    run = house.here.submit(request, dg.DagsterRunStatus.STARTED)

    def cut(at: str) -> None:
        if at == point:
            raise Died

    migrator = house.made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(settings=RunSettings(parallelism=3), timeout_s=60)))
    assert tick(house)[1] == [], "Dagster still takes it for alive"
    house.here.set_status(run, dg.DagsterRunStatus.FAILURE)
    return request


@pytest.mark.parametrize("point", ["done save", "done verify", "done start", "recorded watch"])
def test_a_migration_of_ours_whose_run_died_is_gone_on_with(automatic: House, point: str) -> None:
    cut_off(automatic, point)
    (found,), (request,) = tick(automatic)
    assert "another one goes on with it" in str(found.description)
    assert ":resume:1" in str(request.run_key)
    assert execute(automatic, request).success
    (live,) = automatic.made.drivers.live()
    assert live.parallelism == 3
    assert only(automatic).passed


def test_going_on_is_tried_so_often(automatic: House) -> None:
    cut_off(automatic, "done verify")
    keys = []
    for _ in range(20):
        for request in tick(automatic)[1]:
            keys.append(request.run_key)
            automatic.here.submit(request, dg.DagsterRunStatus.FAILURE)
        automatic.made.job.clock.advance_s(700)
    assert len(keys) == len(set(keys)) == 5, "recovery.max_attempts"
    assert "tried in vain" in str(automatic.here.instance.get_latest_asset_check_evaluation_record(CHECK).event)


@pytest.mark.parametrize("began", ["a command on this host", "a run that a person launched"])
@pytest.mark.parametrize("point", ["done save", "done start"])
def test_a_migration_whose_process_has_ended_is_gone_on_with_whoever_began_it(
    world: Callable[..., World], tmp_path: Path, point: str, began: str
) -> None:
    """Its driver is gone too, and recovery leaves the job alone as long as the migration is open: within minutes
    somebody goes on, and until then the job is red. So it is although the file does not ask for migrations."""
    here = world("job", extra=FILE)
    here.clock.at_ms = time.time_ns() // 1_000_000
    house = House.of(here, tmp_path)
    job = here.defs.resolve_job_def("migrate_job")
    run = here.instance.create_run_for_job(job, tags=dict(job.tags))

    def cut(at: str) -> None:
        if at == point:
            raise Died

    migrator = house.made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(settings=RunSettings(parallelism=3), timeout_s=60)))
    if began == "a command on this host":
        left = read_migration(house.made.job.root)
        assert left is not None
        take_migration_over(
            house.made.job.root, left, f"{socket.gethostname()}:{NO_SUCH_PID}", house.made.job.clock, process_space()
        )
    else:
        house.here.set_status(run, dg.DagsterRunStatus.FAILURE)
    for driver in house.made.drivers.live():
        house.made.drivers._end(driver, "failed", "it was killed")
    house.follow()
    (alive,) = [
        e for e in house.here.tick("stillstate_recovery").asset_events if isinstance(e, dg.AssetCheckEvaluation)
    ]
    assert alive.severity is dg.AssetCheckSeverity.ERROR
    assert "no process continues the migration" in str(alive.description)
    (request,) = tick(house)[1]
    assert ":resume:1" in str(request.run_key)
    assert execute(house, request).success
    (live,) = house.made.drivers.live()
    assert live.parallelism == 3
    assert house.here.tick("stillstate_recovery").run_requests in (None, [])


def test_who_has_ended_is_known_on_his_own_host_only() -> None:
    here, now_ms = socket.gethostname(), time.time_ns() // 1_000_000

    def is_gone(owner: str, at_ms: int, space: str) -> bool:
        return is_owner_gone(replace(OPEN, owner=owner, at_ms=at_ms, owner_space=space))

    ours = process_space()
    assert not is_gone(f"{here}:{os.getpid()}", now_ms, ours)
    assert is_gone(f"{here}:{NO_SUCH_PID}", now_ms, ours)
    assert is_gone(f"{here}:{os.getpid()}", 0, ours), "the number was given to another process since"
    for owner in (f"elsewhere:{NO_SUCH_PID}", "", "h", f"{here}:x"):
        assert not is_gone(owner, now_ms, ours)
    for space in ("", "another:4026531836"):
        assert not is_gone(f"{here}:{NO_SUCH_PID}", now_ms, space), "another container may have this host's name"


def test_a_migration_whose_process_may_live_elsewhere_is_left_to_it(automatic: House) -> None:
    def cut(at: str) -> None:
        if at == "done verify":
            raise Died

    migrator = automatic.made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(settings=RunSettings(parallelism=3))))
    assert tick(automatic)[1] == []


def test_a_resume_that_finds_nothing_to_go_on_with_does_nothing(automatic: House) -> None:
    automatic.write("parallelism: 2", "parallelism: 3")
    done = automatic.run(resume=True)
    assert done.output_for_node("migrate_job_driver")["outcome"] == "nothing to do"
    assert automatic.made.drivers.live()[0].parallelism == 2


JOB = JobSpec(name="job", entry_point="a:b", store="s", parallelism=3, migration=MigrationSpec(automatic=True))
BEAT = RunStatus(
    term=7,
    run_uid="u",
    state="running",
    at_ms=0,
    started_at_ms=0,
    heartbeat_interval_s=2.0,
    pid=1,
    host="h",
    parallelism=2,
    backend="arrow",
)
OPEN = Migration(
    uid="m",
    number=3,
    step="start",
    at_ms=1_000_000,
    began_ms=1_000_000,
    owner="h:1",
    before=RunSettings(2, "arrow"),
    target=RunSettings(3, "arrow"),
    was_running=True,
    savepoint="s",
    checkpoints=1,
    timeout_s=60,
)


def past(phase: RunPhase = "failed", **more: Any) -> PastMigration:
    return PastMigration(run_id="r", phase=phase, created_s=900.0, ended_s=1100.0, **more)


def judged(record: Migration | None, runs: list[PastMigration], now_s: float) -> Desired:
    seen = Observation(BEAT, Health("healthy", ""))
    found = judge_desired(JOB, seen, record, runs, now_s=now_s, launch="migrate_job")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("runs", "now_s", "next_"),
    [
        ([past(term=7, target="3-arrow")], 1100.0, "resume"),
        ([past("active", term=7)], 1100.0, "leave"),
        ([past("canceled", term=7)], 1100.0, "leave"),
        ([past()], 1100.0, "resume"),
        ([], 1100.0, "leave"),
        ([past(resumes="m"), past(term=7)], 1105.0, "leave"),
        ([past(resumes="m"), past(term=7)], 1111.0, "resume"),
        ([past(resumes="m"), past(resumes="m"), past(term=7)], 1111.0, "leave"),
        ([past("abandoned", resumes="m"), past(term=7)], 1111.0, "resume"),
        ([past(resumes="other"), past(term=7)], 1105.0, "resume"),
        ([past(resumes="m")] * 5, 99_999.0, "leave"),
    ],
)
def test_who_goes_on_with_an_open_migration_and_when(runs: list[PastMigration], now_s: float, next_: str) -> None:
    """What a failed run has left, each time later, and not without end."""
    assert judged(OPEN, runs, now_s).next == next_


def test_a_migration_that_somebody_has_gone_on_with_since_is_not_taken_away() -> None:
    """His process may live, on another host."""
    assert judged(replace(OPEN, at_ms=1_200_000), [past(term=7)], 1300.0).next == "leave"
    assert judged(replace(OPEN, at_ms=800_000), [past(term=7)], 1300.0).next == "leave"


# -- the cursor, and one job for all streams --------------------------------------------------------------------------


def test_a_cursor_that_is_not_understood_starts_anew() -> None:
    for text in (None, "", "garbage", "[]", '{"version": 9}', '{"version":1,"jobs":{"a":5}}', "null"):
        assert read_desired_cursor(text) == ({}, "")


def test_with_shared_jobs_the_request_names_the_stream(world: Callable[..., World], tmp_path: Path) -> None:
    here = world("job", extra=AUTOMATIC, house="dagster: {jobs: shared}")
    house = House.of(here, tmp_path)
    house.write("parallelism: 2", "parallelism: 3")
    (found,), (request,) = tick(house)
    assert request.job_name == "migrate"
    assert request.run_config["ops"]["migrate_driver"]["config"]["stream"] == "job"
    assert "migrate (with `stream: job`)" in str(found.description)
    done = here.defs.resolve_job_def("migrate").execute_in_process(
        run_config=dict(request.run_config), instance=here.instance, tags=dict(request.tags)
    )
    assert done.success
    assert house.made.drivers.live()[0].parallelism == 3
