"""Migrations: what is planned; that the job has one driver in the end, whatever died in between, with the settings that
the record says; and that nothing of its state is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from migrated_job import ENDS, HOST, Died, Migrated, crashed

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    CorruptManifest,
    InvalidConfiguration,
    MissingSnapshot,
    SnapshotInUse,
    StoreNotCapable,
    StoreRefused,
    StoreUnavailable,
    Unavailable,
)
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.gc.collect import plan_gc
from state_runtime.maintenance.move.execute import execute_move
from state_runtime.maintenance.move.plan import plan_move
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.migration import Migration, RunSettings, read_migration, record_step
from state_runtime.snapshot.paths import migration_path, savepoint_path
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import list_savepoints
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store
from state_runtime.store.local import LocalStore
from stillstate.orchestration.config.effective_settings import effective_settings, refuse_while_migrating
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers.port import Liveness
from stillstate.orchestration.migration.effects import RolledBack
from stillstate.orchestration.migration.messages import error_of
from stillstate.orchestration.migration.plan import Found, Request, differences, plan_migration
from stillstate.orchestration.migration.steps import judge_watched
from stillstate.orchestration.recovery.observe import observe
from stillstate.orchestration.running import run
from stillstate.orchestration.running.run import run_job
from stillstate.orchestration.standby import CAUSE_ENV

TO_3 = Request(settings=RunSettings(parallelism=3), timeout_s=20)
BEFORE = RunSettings(2, "arrow")
TARGET = RunSettings(3, "arrow")


@pytest.fixture
def made(write_config: Callable[..., Path], tmp_path: Path) -> Migrated:
    """The job `job`, which runs with parallelism 2, as the file says."""
    config = write_config("job", extra="parallelism: 2\nrecovery: {heartbeat_timeout_s: 300}")
    return Migrated(config, tmp_path / "state").running()


# -- what is planned --------------------------------------------------------------------------------------------------


def found(**more: object) -> Found:
    given = {"running": BEFORE, "verdict": "healthy", "why": "", "snapshot_id": 7, "snapshot_bytes": 10, **more}
    return Found(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("running", "wanted", "changed"),
    [
        (RunSettings(2, "arrow"), RunSettings(2, "arrow"), []),
        (RunSettings(2, "arrow"), RunSettings(8, "arrow"), ["parallelism"]),
        (RunSettings(2, "arrow"), RunSettings(8, "rocksdb"), ["parallelism", "backend"]),
        (RunSettings(2, "arrow"), RunSettings(0, ""), []),
        (RunSettings(0, ""), RunSettings(8, "rocksdb"), []),
    ],
)
def test_what_either_leaves_open_is_no_difference(
    running: RunSettings, wanted: RunSettings, changed: list[str]
) -> None:
    assert [d.setting for d in differences(running, wanted)] == changed


def test_without_a_name_the_file_is_wanted_and_with_one_nothing_else_changes() -> None:
    file = RunSettings(8, "rocksdb")
    assert plan_migration("job", Request(), found(), file, 60).target == file
    named = plan_migration("job", TO_3, found(), file, 60)
    assert named.target == TARGET
    assert [d.setting for d in named.file_says] == ["parallelism", "backend"]
    assert named.timeout_s == 20
    assert "the file says" not in named.markdown()
    assert "The file says: parallelism 8" in named.markdown()
    assert "migration.automatic" not in named.markdown()
    undone = plan_migration("job", TO_3, found(), file, 60, is_automatic=True)
    assert "which Dagster begins by itself (`migration.automatic`): change the file too" in undone.markdown()


def test_what_runs_as_it_is_wanted_needs_no_migration_but_a_restart_may_be_meant() -> None:
    assert plan_migration("job", Request(), found(), BEFORE, 60).is_nothing
    restart = plan_migration("job", Request(is_restart=True), found(), BEFORE, 60)
    assert [c.setting for c in restart.changes] == ["code"]
    assert not plan_migration("job", Request(go_back_to="5"), found(), BEFORE, 60).is_nothing


@pytest.mark.parametrize(
    "asked",
    [
        Request(settings=RunSettings(parallelism=40_000)),
        Request(settings=RunSettings(parallelism=-1)),
        Request(checkpoints=0),
        Request(timeout_s=-1),
    ],
)
def test_a_number_that_cannot_be_is_refused(asked: Request) -> None:
    with pytest.raises(InvalidConfiguration):
        plan_migration("job", asked, found(), BEFORE, 60)


def test_a_job_that_is_just_coming_up_is_not_migrated() -> None:
    """Its savepoint would be of a run that is not there yet, or not any more."""
    with pytest.raises(InvalidConfiguration, match="once it runs"):
        plan_migration("job", TO_3, found(verdict="restarting"), BEFORE, 60)


def test_a_plan_changes_nothing(made: Migrated) -> None:
    before = sorted(o.path for o in made.job.root.list_objects(""))
    plan = made.migrator().plan(TO_3)
    assert (plan.before, plan.target, plan.was_running) == (BEFORE, TARGET, True)
    assert sorted(o.path for o in made.job.root.list_objects("")) == before
    assert read_migration(made.job.root) is None


def test_a_plan_to_a_snapshot_that_is_not_there_is_refused(made: Migrated) -> None:
    for place in ("77", "no-such-savepoint"):
        with pytest.raises(MissingSnapshot):
            made.migrator().plan(Request(go_back_to=place))


# -- the law ----------------------------------------------------------------------------------------------------------


def check(made: Migrated, last: Migration, step: str) -> None:
    """One driver, with the settings that the record says; no state lost; nothing held on to."""
    assert last == read_migration(made.job.root)
    assert last.step == step
    (live,) = made.drivers.live()
    assert RunSettings(live.parallelism, live.backend) == (TARGET if step == "kept" else BEFORE) == last.settings  # type: ignore[arg-type]
    held, _ = effective_settings(made.spec, made.job.root)
    assert held.parallelism == live.parallelism, "the next start has the same"
    made.job.checkpoint()
    for snapshot_id in Catalog(made.job.store, "job").snapshot_ids():
        made.drivers.rows_of(snapshot_id)
    made.job.check()
    (saved, *_) = [s for s in list_savepoints(made.job.root) if s.name == last.savepoint]
    assert saved.state == "COMPLETED"
    newest, kept = made.newest(), made.drivers.rows_of(saved.snapshot_id)
    assert all(made.job.rows[newest.snapshot_id][key] >= value for key, value in kept.items())
    assert not read_pins(made.job.root.child(savepoint_path(saved.name)))


def points(made: Migrated, request: Request) -> list[str]:
    """All points of a migration that nothing interrupts."""
    passed: list[str] = []
    migrator = made.migrator(passed.append)
    migrator.migrate(migrator.plan(request))
    return passed


@pytest.mark.parametrize(("behaviour", "step"), ENDS)
def test_a_new_run_is_kept_if_it_comes_up_and_taken_back_if_not(made: Migrated, behaviour: str, step: str) -> None:
    made.drivers.behaviour[3] = behaviour
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(TO_3))
    check(made, last, step)
    error = error_of(last, "job", migrator.failure)
    assert (error is None) == (step == "kept")
    if behaviour == "dies":
        assert "it broke" in str(error)
        assert "the last words" in str(error)
        assert "the last words" not in last.reason, "what a driver writes may be anything"
    if behaviour == "hangs":
        assert "0 of 1 checkpoints within 20 s" in str(error)


def test_a_new_run_that_is_stopped_before_its_first_checkpoint_is_not_kept_and_the_job_stays_stopped(
    made: Migrated,
) -> None:
    """It has restored nothing and committed nothing. The old run is not started either: somebody has stopped the job."""
    made.drivers.behaviour[3] = "stops"
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(TO_3))
    assert (last.step, last.was_running) == ("rolled-back", False)
    assert last.settings == BEFORE
    assert not made.drivers.live()
    error = error_of(last, "job", migrator.failure)
    assert "is stopped with parallelism 2" in str(error)
    assert "stopped after 0 checkpoints" in str(error)


def test_more_checkpoints_than_a_quiet_source_gives_are_not_missed_at_the_deadline(made: Migrated) -> None:
    """It gives one, on trial: every shard was restored, and the run has committed."""
    made.drivers.behaviour[3] = "quiet"
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(Request(settings=TO_3.settings, checkpoints=3, timeout_s=20)))
    check(made, last, "kept")
    assert last.reason == "1 checkpoint of the new run, whose source has nothing new"


@pytest.mark.parametrize("process", ["alive", "restarting", "unknown"])
def test_a_new_run_is_not_kept_without_a_checkpoint_however_quiet_its_source_is(process: Liveness) -> None:
    """A run that has restored nothing looks the same while no row comes, and fails at the first one."""
    migration = Migration(
        uid="u" * 32,
        number=1,
        step="watch",
        at_ms=0,
        began_ms=0,
        owner="here:1",
        before=BEFORE,
        target=TARGET,
        was_running=True,
        savepoint="s",
        checkpoints=1,
        timeout_s=20,
        run_term=7,
    )
    status = RunStatus(
        term=7, state="running", at_ms=3_600_000, started_at_ms=0, heartbeat_interval_s=2.0, quiet=True, advanced_at_ms=3_600_000,
        run_uid="r", pid=1, host="here", snapshot_id=9,
    )  # fmt: skip
    assert judge_watched(status, migration, process, made=0, is_late=False).is_up is None
    late = judge_watched(status, migration, process, made=0, is_late=True)
    assert (late.is_up, late.why) == (False, "0 of 1 checkpoints within 20 s")
    assert judge_watched(status, migration, process, made=1, is_late=False).is_up
    for state in ("stopped", "finished"):
        ended = replace(status, state=state)
        assert judge_watched(ended, migration, process, made=0, is_late=False).is_up is False
    several, busy = replace(migration, checkpoints=3), replace(status, quiet=False)
    assert judge_watched(status, several, process, made=1, is_late=False).is_up is None
    assert judge_watched(busy, several, process, made=1, is_late=True).is_up is False


def test_a_run_that_a_migration_starts_is_on_trial_and_no_other(
    made: Migrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a supervisor starts again while the migration watches; not the one that the job is taken back to."""
    started: list[bool] = []

    class Driver:
        def run(self, session: Any, *, started_by: Any, **_: Any) -> None:
            started.append(started_by.on_trial)

    def start() -> None:
        monkeypatch.setenv(CAUSE_ENV, "x")
        run_job(
            made.spec,
            made.config.parent,
            StartOptions(takeover=True),
            on_progress=lambda _: None,
            on_restore=lambda *_: None,
            on_copy=lambda _: None,
        )

    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(run, "refuse_missing_module", lambda *_: None)
    monkeypatch.setattr(run, "_session_and_job", lambda *_, **__: (SimpleNamespace(stop=lambda: None), Driver()))
    monkeypatch.setattr(run, "_show_stacks_on_request", lambda: None)
    start()
    passed: list[tuple[str, bool]] = []

    def on_point(point: str) -> None:
        start()
        passed.append((point, started[-1]))

    made.drivers.behaviour[3] = "dies"
    migrator = made.migrator(on_point)
    assert migrator.migrate(migrator.plan(TO_3)).step == "rolled-back"
    start()
    assert (started[0], started[-1]) == (False, False)
    assert {point.split()[-1] for point, on_trial in passed if on_trial} == {"start", "watch"}


def test_a_run_that_dies_after_it_has_committed_is_taken_back_to_the_savepoint(made: Migrated) -> None:
    made.drivers.behaviour[3] = "dies-later"
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(Request(settings=TO_3.settings, checkpoints=3, timeout_s=60)))
    check(made, last, "rolled-back")
    assert made.newest().abandoned, "the new run's checkpoints are no past any more"


def test_a_run_that_dies_before_it_has_committed_takes_nothing_back(made: Migrated) -> None:
    """Else output that was published before would come again."""
    made.drivers.behaviour[3] = "dies"
    migrator = made.migrator()
    check(made, migrator.migrate(migrator.plan(TO_3)), "rolled-back")
    assert not made.newest().abandoned


def test_a_job_goes_back_to_a_snapshot_on_the_way(made: Migrated) -> None:
    older = made.newest().snapshot_id - 1
    migrator = made.migrator()
    migrator.migrate(migrator.plan(Request(settings=TO_3.settings, go_back_to=str(older))))
    assert made.newest().abandoned
    (live,) = made.drivers.live()
    assert live.parallelism == 3


@pytest.mark.parametrize(("behaviour", "step"), [("works", "kept"), ("dies-later", "rolled-back")])
def test_what_went_back_on_the_way_is_at_the_savepoint_again_if_it_is_taken_back(
    made: Migrated, behaviour: str, step: str
) -> None:
    made.drivers.behaviour[3] = behaviour
    older = made.newest().snapshot_id - 1
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(Request(settings=TO_3.settings, go_back_to=str(older), checkpoints=2)))
    assert last.step == step
    if step == "rolled-back":
        check(made, last, step)


@pytest.mark.parametrize("behaviour", ["dies", "hangs"])
def test_a_job_that_does_not_run_is_started_with_the_target_or_left_as_it_was(made: Migrated, behaviour: str) -> None:
    made.drivers.stop()
    made.drivers.behaviour[3] = behaviour
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(TO_3))
    assert (last.step, last.was_running) == ("rolled-back", False)
    assert not made.drivers.live()
    made.drivers.behaviour[3] = "works"
    migrator = made.migrator()
    check(made, migrator.migrate(migrator.plan(TO_3)), "kept")


def test_a_driver_that_was_lost_is_ended_before_the_savepoint(made: Migrated) -> None:
    """It may only hang: what it committed after the savepoint would be read again."""
    (lost,) = made.drivers.runs
    made.job.clock.advance_s(400)
    ended: list[bool] = []

    def on_point(point: str) -> None:
        if point == "done save":
            ended.append(lost.state != "running")

    migrator = made.migrator(on_point)
    plan = migrator.plan(TO_3)
    assert plan.was_running
    check(made, migrator.migrate(plan), "kept")
    assert ended == [True]


# -- a crash at every point -------------------------------------------------------------------------------------------

SCENARIOS = {
    "works": ("kept", TO_3),
    "dies": ("rolled-back", TO_3),
    "dies-later": ("rolled-back", Request(settings=TO_3.settings, checkpoints=2, timeout_s=60)),
    "no-start": ("rolled-back", TO_3),
    "hangs": ("rolled-back", TO_3),
}


@pytest.mark.parametrize("behaviour", SCENARIOS)
def test_a_migration_that_dies_at_any_point_is_gone_on_with(
    write_config: Callable[..., Path], tmp_path: Path, behaviour: str
) -> None:
    step, request = SCENARIOS[behaviour]
    config = write_config("job", extra="parallelism: 2\nrecovery: {heartbeat_timeout_s: 300}")

    def fresh(number: int) -> Migrated:
        made = Migrated(config, tmp_path / f"state-{number}").running()
        made.drivers.behaviour[3] = behaviour
        return made

    whole = points(fresh(0), request)
    for at in range(1, len(whole) + 1):
        made = fresh(at)
        assert crashed(made, lambda m: m.migrate(m.plan(request)), at) is None
        check(made, made.migrator().resume(), step)


@pytest.mark.parametrize("behaviour", SCENARIOS)
def test_a_migration_whose_processes_all_die_ends_all_the_same(made: Migrated, behaviour: str) -> None:
    """Each process does one effect and dies before it can say so; the next one does it again and records it."""
    step, request = SCENARIOS[behaviour]
    made.drivers.behaviour[3] = behaviour
    last = crashed(made, lambda m: m.migrate(m.plan(request)), 2)
    for _ in range(30):
        if last is not None:
            break
        last = crashed(made, lambda m: m.resume(), 4)
    assert last is not None
    check(made, last, step)


# -- at the same time -------------------------------------------------------------------------------------------------


def test_of_two_migrations_the_second_is_refused(made: Migrated) -> None:
    one, other = made.migrator(), made.migrator()
    plan, second = one.plan(TO_3), other.plan(Request(settings=RunSettings(parallelism=5)))
    refused: list[str] = []

    def on_poll() -> None:
        made.drivers.on_poll = lambda: None
        with pytest.raises(SnapshotInUse, match="under way"):
            other.migrate(second)
        with pytest.raises(SnapshotInUse, match="under way"):
            other.plan(TO_3)
        refused.append("both")

    made.drivers.on_poll = on_poll
    check(made, one.migrate(plan), "kept")
    assert refused


@pytest.mark.parametrize(
    ("behaviour", "asleep_at", "step"),
    [("works", "recorded start", "kept"), ("dies", "recorded stop-new", "rolled-back")],
)
def test_whoever_was_relieved_has_no_further_effect(made: Migrated, behaviour: str, asleep_at: str, step: str) -> None:
    """It slept; somebody else has gone on, and ended. The sleeper must not start or stop anything."""
    made.drivers.behaviour[3] = behaviour
    runs = 0

    def relieved(point: str) -> None:
        nonlocal runs
        if point == asleep_at:
            check(made, made.migrator().resume(), step)
            runs = len(made.drivers.runs)

    sleeper = made.migrator(relieved)
    with pytest.raises(SnapshotInUse, match="somebody else"):
        sleeper.migrate(sleeper.plan(TO_3))
    assert len(made.drivers.runs) == runs
    assert [r.parallelism for r in made.drivers.live()] == [3 if step == "kept" else 2]


def test_a_store_that_does_not_answer_takes_nothing_back(made: Migrated) -> None:
    """What can pass by itself leaves the migration where it is."""
    calls = 0

    def on_point(point: str) -> None:
        nonlocal calls
        if point == "recorded watch":
            whole = type(made.job.root).list_names
            migrator._effects._catalog.status = lambda: (_ for _ in ()).throw(StoreUnavailable("away"))  # type: ignore[method-assign]
            assert whole is not None

    migrator = made.migrator(on_point)
    with pytest.raises(StoreUnavailable):
        migrator.migrate(migrator.plan(TO_3))
    now = read_migration(made.job.root)
    assert now is not None
    assert (now.step, now.is_open) == ("watch", True)
    check(made, made.migrator().resume(), "kept")


@pytest.mark.parametrize("step", ["save", "verify", "go-back", "start", "watch"])
@pytest.mark.parametrize("refusal", [StoreRefused("no space left"), StoreNotCapable("no create-if-absent")])
def test_a_refusal_at_any_step_starts_the_job_as_it_was(
    made: Migrated, monkeypatch: pytest.MonkeyPatch, step: str, refusal: Unavailable
) -> None:
    """A store that refuses has answered: nobody need come back later, and the job must not wait for somebody who does.
    At `save` the driver has stopped for its savepoint, which could not be written."""
    migrator = made.migrator()
    whole = migrator._effects.do

    def refused(migration: Migration) -> dict[str, Any]:
        if migration.step != step:
            return whole(migration)
        if step in ("save", "watch"):
            made.drivers.stop()
        raise refusal

    monkeypatch.setattr(migrator._effects, "do", refused)
    last = migrator.migrate(migrator.plan(replace(TO_3, go_back_to="@3")))
    assert last.step == "rolled-back"
    assert str(refusal) in last.reason
    (live,) = made.drivers.live()
    assert RunSettings(live.parallelism, live.backend) == BEFORE  # type: ignore[arg-type]


def test_a_savepoint_that_finds_no_room_starts_the_job_as_it_was(
    made: Migrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota below `savepoints/`, as the disk says it."""
    whole = LocalStore._write_temporary

    def no_room(self: LocalStore, final: Path, body: Any) -> Path:
        if "savepoints" in final.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, final, body)

    monkeypatch.setattr(LocalStore, "_write_temporary", no_room)
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(TO_3))
    assert last.step == "rolled-back"
    assert "No space left" in last.reason
    assert [run.parallelism for run in made.drivers.live()] == [2]


def test_nothing_is_gone_on_with_where_nothing_is_under_way(made: Migrated) -> None:
    with pytest.raises(InvalidConfiguration, match="no migration"):
        made.migrator().resume()


# -- what others see --------------------------------------------------------------------------------------------------


def died_at(made: Migrated, wanted: str) -> None:
    def on_point(point: str) -> None:
        if point == wanted:
            raise Died

    migrator = made.migrator(on_point)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(TO_3))


def test_recovery_leaves_a_job_alone_that_is_being_migrated_and_says_so(made: Migrated) -> None:
    died_at(made, "done verify")
    made.job.clock.advance_s(7200)
    seen = observe(made.spec, Catalog(made.job.store, "job"), made.drivers, made.job.clock)  # type: ignore[arg-type]
    assert (seen.health.verdict, seen.health.needs_recovery, seen.health.is_overdue) == ("migrating", False, True)
    assert "stillstate migrate job --resume" in seen.health.reason
    with pytest.raises(SnapshotInUse, match="--resume"):
        refuse_while_migrating("job", made.job.root)
    check(made, made.migrator().resume(), "kept")
    refuse_while_migrating("job", made.job.root)


def test_settings_of_a_run_are_the_records_and_not_the_files(made: Migrated) -> None:
    """A restart by anybody must not bring back what was changed, nor try again what was taken back."""
    migrator = made.migrator()
    migrator.migrate(migrator.plan(TO_3))
    held, told = effective_settings(made.spec, made.job.root)
    assert held.parallelism == 3
    assert "parallelism 3 and not 2" in told
    made.with_file(parallelism=3)
    assert effective_settings(made.spec, made.job.root)[1] == ""
    made.with_file(parallelism=5)
    made.drivers.behaviour[5] = "dies"
    migrator = made.migrator()
    assert migrator.migrate(migrator.plan(Request(timeout_s=20))).step == "rolled-back"
    assert effective_settings(made.spec, made.job.root)[0].parallelism == 3


def test_the_file_is_what_a_migration_without_a_name_goes_to(made: Migrated) -> None:
    migrator = made.migrator()
    migrator.migrate(migrator.plan(TO_3))
    plan = made.migrator().plan(Request())
    assert plan.target == BEFORE, "the file still says 2"
    made.with_file(parallelism=3)
    assert made.migrator().plan(Request()).is_nothing


def test_a_damaged_record_stops_a_start(made: Migrated) -> None:
    died_at(made, "done verify")
    newest = read_migration(made.job.root)
    assert newest is not None
    path = migration_path(newest.number)
    body = bytearray(made.job.root.read(path, 1 << 20))
    body[-20] ^= 1
    made.job.root.delete(path)
    made.job.root.put(path, bytes(body))
    with pytest.raises(CorruptManifest):
        effective_settings(made.spec, made.job.root)


def test_a_step_that_cannot_follow_is_not_recorded(made: Migrated) -> None:
    died_at(made, "recorded save")
    now = read_migration(made.job.root)
    assert now is not None
    with pytest.raises(Exception, match="cannot go from save to kept"):
        record_step(made.job.root, now, "kept", made.job.clock)


def test_a_damaged_savepoint_starts_the_job_as_it_was(made: Migrated) -> None:
    def on_point(point: str) -> None:
        if point == "recorded verify":
            (record,) = list_savepoints(made.job.root)
            folder = made.job.root.child(savepoint_path(record.name))
            path = next(o.path for o in folder.list_objects("changelog"))
            body = bytearray(folder.read(path, 1 << 20))
            body[len(body) // 3] ^= 1
            folder.delete(path)
            folder.put(path, bytes(body))

    migrator = made.migrator(on_point)
    last = migrator.migrate(migrator.plan(TO_3))
    assert (last.step, [r.parallelism for r in made.drivers.live()]) == ("rolled-back", [2])
    assert isinstance(error_of(last, "job"), RolledBack)
    assert "is damaged" in last.reason


# -- what else goes on in the root ------------------------------------------------------------------------------------


def test_collection_keeps_the_records_and_deleting_the_job_removes_them(made: Migrated) -> None:
    migrator = made.migrator()
    migrator.migrate(migrator.plan(TO_3))
    root, clock = made.job.root, made.job.clock
    records = {o.path for o in root.list_objects("migrations")}
    assert len(records) == 5, "save, verify, start, watch, kept"
    clock.advance_s(30 * 86_400)
    made.job.checkpoint()
    plan = plan_gc(root, clock=clock, min_age_s=0, unsafe_min_age=True)
    assert not records & ({c.path for c in plan.candidates} | set(plan.foreign))
    made.drivers.stop()
    deleted = delete_root(root, clock=clock, ids=SYSTEM_IDS, owner="h:1", with_savepoints=True)
    assert not deleted.failures
    assert not list(root.list_objects(""))


def test_a_job_that_is_moved_keeps_what_came_of_its_migration(made: Migrated, tmp_path: Path) -> None:
    migrator = made.migrator()
    migrator.migrate(migrator.plan(TO_3))
    made.drivers.stop()
    clock = made.job.clock
    target = open_store(str(tmp_path / "elsewhere")).child("job")
    plan = plan_move(made.job.root, target, mode="move", snapshot_id=None, clock=clock)
    execute_move(made.job.root, target, plan, actor=Actor(clock, SYSTEM_IDS, "h", 1))
    assert effective_settings(made.spec, target)[0].parallelism == 3


def test_a_job_is_not_moved_away_under_its_migration(made: Migrated, tmp_path: Path) -> None:
    died_at(made, "done verify")
    target = open_store(str(tmp_path / "elsewhere")).child("job")
    with pytest.raises(SnapshotInUse, match="migration"):
        plan_move(made.job.root, target, mode="move", snapshot_id=None, clock=made.job.clock)


def test_a_migration_whose_process_lives_is_left_to_it(made: Migrated) -> None:
    """Its number is somebody else's by then, if the machine has been started anew."""
    died_at(made, "done verify")
    migration = read_migration(made.job.root)
    assert migration is not None
    after_its_start = int((psutil.Process(os.getppid()).create_time() + 1) * 1000)
    before = replace(migration, number=migration.number + 1, owner=f"{HOST}:{os.getppid()}", at_ms=after_its_start)
    made.job.root.create(migration_path(before.number), encode_document("migration", before))
    with pytest.raises(SnapshotInUse, match="lives"):
        made.migrator().resume()
    reused = replace(before, number=before.number + 1, at_ms=after_its_start - 10_000)
    made.job.root.create(migration_path(reused.number), encode_document("migration", reused))
    check(made, made.migrator().resume(), "kept")


def test_a_run_with_other_settings_is_not_taken_for_the_new_one(made: Migrated) -> None:
    """Somebody has started it by other means, between two attempts."""
    died_at(made, "done verify")
    made.drivers.start()
    assert made.drivers.live()[0].parallelism == 2
    check(made, made.migrator().resume(), "kept")
    assert [r.parallelism for r in made.drivers.runs] == [2, 2, 3]
