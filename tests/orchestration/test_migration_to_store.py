"""A job is moved to another store as it runs: one place that counts at any moment, one driver in the end, nothing lost,
whatever died in between; and back to where it was if it does not come up there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from migrated_job import ENDS, Died, Migrated, crashed

from state_runtime.base.errors import InvalidConfiguration, SnapshotInUse
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.expiry_boundary import advance_boundary
from state_runtime.snapshot.handover import read_moving, refuse_if_handed_over
from state_runtime.snapshot.migration import Migration, RunSettings, read_migration
from state_runtime.store import Store, open_store
from state_runtime.store.local import LocalStore
from stillstate.orchestration.config.driver_settings import section_digest
from stillstate.orchestration.config.effective_settings import effective_settings
from stillstate.orchestration.config.job_location import at_source, at_target, location_of
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers import Stopped, StopTimedOut
from stillstate.orchestration.migration.messages import error_of
from stillstate.orchestration.migration.plan import Request
from stillstate.orchestration.recovery.observe import observe

SETTINGS = "parallelism: 2\nrecovery: {heartbeat_timeout_s: 300}\nmigration: {to_store: elsewhere}"
MOVE = Request(is_move=True, timeout_s=20)
TO_3 = Request(is_move=True, settings=RunSettings(parallelism=3), timeout_s=20)


def fresh(write_config: Callable[..., Path], tmp_path: Path, number: int) -> Migrated:
    """A job of its own."""
    extra = SETTINGS.replace("elsewhere", f"elsewhere-{number}")
    config = write_config("job", extra=extra)
    config.write_text(config.read_text().replace("store: state\n", f"store: state-{number}\n"))
    return Migrated(config, tmp_path / f"state-{number}").running()


@pytest.fixture
def made(write_config: Callable[..., Path], tmp_path: Path) -> Migrated:
    config = write_config("job", extra=SETTINGS)
    return Migrated(config, tmp_path / "state").running()


def roots(made: Migrated) -> tuple[Store, Store]:
    """The old one, and the new one."""
    here, there = at_source(made.spec), at_target(made.spec)
    return open_store(here.store).child("job"), open_store(there.store).child("job")


def check(made: Migrated, last: Migration, step: str) -> None:
    """One driver, where everybody looks for the job; its rows; the other place is nobody's."""
    old, new = roots(made)
    home, other = (new, old) if step == "kept" else (old, new)
    assert last.step == step
    assert open_store(location_of(made.spec).store).child("job").url == home.url
    assert last == read_migration(home)
    (live,) = made.drivers.live()
    assert made.job.root.url == home.url, "the driver runs where everybody looks for it"
    held, _ = effective_settings(made.spec, home)
    assert held.parallelism == live.parallelism == last.settings.parallelism
    made.job.checkpoint()
    for snapshot_id in Catalog(made.job.store, "job").snapshot_ids():
        made.drivers.rows_of(snapshot_id)
    made.job.check()
    newest = made.newest()
    kept = made.drivers.rows_of(last.snapshot_id)
    assert all(made.job.rows[newest.snapshot_id][key] >= value for key, value in kept.items())
    assert read_job_info(other) is None
    refuse_if_handed_over(home)
    if step == "kept":
        with pytest.raises(SnapshotInUse, match="use it there"):
            refuse_if_handed_over(old)  # who has not read the new file does not begin the job anew
    else:
        assert read_moving(old) is None
        assert not list(new.list_objects("")), "and may be tried again"


@pytest.mark.parametrize(("behaviour", "step"), ENDS)
def test_a_job_that_is_moved_runs_there_or_where_it_was(made: Migrated, behaviour: str, step: str) -> None:
    made.drivers.behaviour[3] = behaviour
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(TO_3))
    check(made, last, step)
    assert (error_of(last, "job", migrator.failure) is None) == (step == "kept")


def test_a_place_that_has_no_room_leaves_the_job_where_it_was(made: Migrated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has stopped by then, and a refusal does not pass by waiting."""
    _, new = roots(made)
    whole = LocalStore._write_temporary

    def no_room(self: LocalStore, final: Path, body: Any) -> Path:
        if final.suffix == ".seg" and str(final).startswith(new.url.removeprefix("file://")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, final, body)

    monkeypatch.setattr(LocalStore, "_write_temporary", no_room)
    migrator = made.migrator()
    last = migrator.migrate(migrator.plan(MOVE))
    assert "No space left" in last.reason
    check(made, last, "rolled-back")


def test_a_driver_that_had_to_be_killed_is_waited_for_until_it_is_taken_for_gone(made: Migrated) -> None:
    """Its last heartbeat is young, and the place that it ran in could not be given up."""
    made.drivers.behaviour[3] = "hangs"
    stop = made.drivers.stop

    def hears_nothing() -> Stopped:
        if made.drivers.runs[-1].parallelism == 3:
            raise StopTimedOut("it hears nothing")
        return stop()

    made.drivers.stop = hears_nothing  # type: ignore[method-assign]
    migrator = made.migrator()
    check(made, migrator.migrate(migrator.plan(TO_3)), "rolled-back")


def test_a_place_that_is_being_given_up_is_no_home(made: Migrated) -> None:
    """Its deletion takes a while, and the job runs where it was."""
    cut(made, "done move")
    _, new = roots(made)
    assert location_of(made.spec).store == at_target(made.spec).store
    advance_boundary(new, lambda now: now.tombstone(), clock=made.job.clock, ids=SYSTEM_IDS)
    assert location_of(made.spec).store == at_source(made.spec).store


def test_a_plan_names_both_places_and_changes_nothing(made: Migrated) -> None:
    old, new = roots(made)
    plan = made.migrator().plan(MOVE)
    assert [(c.setting, c.runs_with, c.wanted) for c in plan.changes] == [("store", old.url, new.url)]
    assert any(new.url in step for step in plan.steps())
    assert "take `migration.to_store` out" in plan.markdown()
    assert not list(new.list_objects(""))
    assert read_migration(old) is None


def test_credentials_of_neither_place_are_shown_wherever_the_job_is(write_config: Callable[..., Path]) -> None:
    """A log of the job may hold both."""
    extra = "storage_options: {secret: of-the-old-one}\nmigration: {to_store: x, to_storage_options: {secret: of-the-new-one}}"
    job = load_spec(write_config("job", extra=extra)).job("job")
    assert at_target(job).storage_options["secret"] == "of-the-new-one"
    for one in (job, at_source(job), at_target(job)):
        assert one.redact("of-the-old-one, of-the-new-one") == "***, ***"
        assert "of-the" not in repr(one)
        assert "of-the" not in section_digest(one)


def test_without_being_asked_to_nothing_is_moved(made: Migrated) -> None:
    assert made.migrator().plan(Request()).is_nothing


def test_a_place_that_holds_something_else_is_refused_before_the_job_stops(made: Migrated) -> None:
    roots(made)[1].put("something", b"else")
    with pytest.raises(InvalidConfiguration, match="not empty"):
        made.migrator().plan(MOVE)
    assert made.drivers.live()


def test_a_job_whose_file_names_no_place_is_not_moved(write_config: Callable[..., Path], tmp_path: Path) -> None:
    made = Migrated(write_config("job", extra="parallelism: 2"), tmp_path / "state").running()
    with pytest.raises(InvalidConfiguration, match="names no other place"):
        made.migrator().plan(MOVE)


def test_a_job_that_was_moved_is_not_moved_again_before_the_file_is_edited(made: Migrated) -> None:
    migrator = made.migrator()
    migrator.migrate(migrator.plan(MOVE))
    with pytest.raises(InvalidConfiguration, match="names no other place"):
        made.migrator().plan(MOVE)
    rescale = made.migrator()
    assert rescale.migrate(rescale.plan(Request(settings=RunSettings(parallelism=3)))).step == "kept"
    assert read_migration(roots(made)[1]) is not None
    text = made.config.read_text().replace("migration: {to_store: elsewhere}", "store: elsewhere")
    made.config.write_text(text.replace("  store: state\n", ""))
    edited = load_spec(made.config).job("job")
    assert open_store(location_of(edited).store).child("job").url == roots(made)[1].url
    assert effective_settings(edited, open_store(edited.store).child("job"))[0].parallelism == 3


def test_what_has_committed_there_stays_there(made: Migrated) -> None:
    """Its output is published under numbers that the old root would use again."""
    made.drivers.behaviour[3] = "dies-later"
    migrator = made.migrator()
    asked = Request(is_move=True, settings=RunSettings(parallelism=3), checkpoints=3, timeout_s=60)
    last = migrator.migrate(migrator.plan(asked))
    assert "it had committed there" in last.reason
    assert last.settings == RunSettings(2, "arrow"), "with what it ran well before"
    check(made, last, "kept")


def test_a_file_that_has_lost_the_place_meanwhile_starts_nothing_anew(made: Migrated) -> None:
    cut(made, "done move")
    text = made.config.read_text().replace("migration: {to_store: elsewhere}", "local_dir: local")
    made.config.write_text(text)
    made.spec = made.drivers.spec = load_spec(made.config).job("job")
    with pytest.raises(InvalidConfiguration, match="let it say so again"):
        made.migrator().resume()
    with pytest.raises(SnapshotInUse):
        made.drivers.start()


def cut(made: Migrated, wanted: str, request: Request = TO_3) -> None:
    def on_point(point: str) -> None:
        if point == wanted:
            raise Died

    migrator = made.migrator(on_point)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(request))


@pytest.mark.parametrize("point", ["done save", "done verify", "recorded move", "done move", "recorded start"])
def test_recovery_leaves_the_job_alone_wherever_it_is(made: Migrated, point: str) -> None:
    cut(made, point)
    home = open_store(location_of(made.spec).store)
    seen = observe(made.spec, Catalog(home, "job"), made.drivers, made.job.clock)  # type: ignore[arg-type]
    assert seen.health.verdict == "migrating"
    check(made, made.migrator().resume(), "kept")


SCENARIOS = {"works": "kept", "dies": "rolled-back", "no-start": "rolled-back", "dies-later": "kept"}


def asked(behaviour: str) -> Request:
    return Request(
        is_move=True,
        settings=RunSettings(parallelism=3),
        timeout_s=20,
        checkpoints=2 if behaviour == "dies-later" else 1,
    )


@pytest.mark.long
@pytest.mark.parametrize("behaviour", SCENARIOS)
def test_a_move_that_dies_at_any_point_is_gone_on_with(
    write_config: Callable[..., Path], tmp_path: Path, behaviour: str
) -> None:
    request = asked(behaviour)

    def one(number: int) -> Migrated:
        found = fresh(write_config, tmp_path, number)
        found.drivers.behaviour[3] = behaviour
        return found

    whole: list[str] = []
    first = one(0)
    migrator = first.migrator(whole.append)
    migrator.migrate(migrator.plan(request))
    for at in range(1, len(whole) + 1):
        made = one(at)
        assert crashed(made, lambda m: m.migrate(m.plan(request)), at) is None
        check(made, made.migrator().resume(), SCENARIOS[behaviour])


@pytest.mark.parametrize("behaviour", SCENARIOS)
def test_a_move_whose_processes_all_die_ends_all_the_same(made: Migrated, behaviour: str) -> None:
    made.drivers.behaviour[3] = behaviour
    request = asked(behaviour)
    last = crashed(made, lambda m: m.migrate(m.plan(request)), 2)
    for _ in range(30):
        if last is not None:
            break
        last = crashed(made, lambda m: m.resume(), 4)
    assert last is not None
    check(made, last, SCENARIOS[behaviour])


# -- and inside the steps that write to both places -------------------------------------------------------------------


class Writes:
    """Lets the process die before its `at`-th write to a store, once a step has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.count = 0
        for name in ("create", "put", "delete"):
            monkeypatch.setattr(LocalStore, name, self._counted(getattr(LocalStore, name)))

    def _counted(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: Store, *given: Any, **more: Any) -> Any:
            self.count += 1
            if self.left == 0 and threading.current_thread() is threading.main_thread():
                raise Died
            self.left -= 1
            return whole(store, *given, **more)

        return counted


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "behaviour"), [("move", "works"), ("leave", "works"), ("go-home", "dies"), ("start-old", "dies")]
)
def test_a_move_that_dies_before_any_of_its_writes_is_gone_on_with(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, behaviour: str
) -> None:
    writes = Writes(monkeypatch)

    def run(number: int, at: int) -> tuple[Migrated, Migration | None, int]:
        made = fresh(write_config, tmp_path, number)
        made.drivers.behaviour[3] = behaviour
        began, start = 0, made.drivers.start

        def start_whole(options: StartOptions, *, cause: str) -> Any:
            writes.left = -1  # a driver is a process of its own
            return start(options, cause=cause)

        made.drivers.start = start_whole  # type: ignore[method-assign]

        def on_point(point: str) -> None:
            nonlocal began
            if point == f"recorded {step}":
                began, writes.left = writes.count, at
            if point == f"done {step}":
                began, writes.left = writes.count - began, -1

        migrator = made.migrator(on_point)
        try:
            last = migrator.migrate(migrator.plan(TO_3))
        except Died:
            last = None
        writes.left = -1
        return made, last, began

    _, _, many = run(0, -1)
    assert many > 0
    died = 0
    for at in range(many):
        made, last, _ = run(at + 1, at)
        died += last is None
        check(made, last or made.migrator().resume(), SCENARIOS[behaviour])
    assert died, "or nothing was cut"
