"""`accept_session_settings`: whoever starts a job can say that other settings of Spark's session are meant; a migration
says it to each of its runs, and nothing says it by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import FakeLauncher, World
from forked_job import Forked
from job_roots import JobRoot
from migrated_house import House
from migrated_job import Died, Migrated, crashed
from typer.testing import CliRunner

from state_runtime.snapshot.migration import RunSettings, encode_migration, read_migration
from stillstate.orchestration.cli import app
from stillstate.orchestration.commands import migrating
from stillstate.orchestration.migration.fork_plan import ForkRequest
from stillstate.orchestration.migration.plan import Request

SETTINGS = "parallelism: 2\nrecovery: {heartbeat_timeout_s: 300, first_checkpoint_s: 20}"
TO_3 = RunSettings(parallelism=3)


@pytest.fixture
def made(write_config: Callable[..., Path], tmp_path: Path) -> Migrated:
    return Migrated(write_config("job", extra=SETTINGS), tmp_path / "state").running()


def accepted(made: Migrated) -> list[bool]:
    """What each start after the first was told: that one is nobody's here."""
    return [options.accept_session_settings for options in made.drivers.options[1:]]


# --- a migration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize(("behaviour", "starts"), [("works", 1), ("dies", 2)])
def test_a_migration_says_it_to_each_of_its_runs(made: Migrated, behaviour: str, starts: int, accepts: bool) -> None:
    """Also to the run that it goes back to: that one has the file's settings of the session too."""
    made.drivers.behaviour[3] = behaviour
    migrator = made.migrator()
    plan = migrator.plan(Request(settings=TO_3, timeout_s=20, accept_session_settings=accepts))
    assert ("settings of Spark's session" in plan.markdown()) is accepts
    migrator.migrate(plan)
    assert accepted(made) == [accepts] * starts


def test_whoever_goes_on_with_a_migration_says_what_was_said_when_it_began(made: Migrated) -> None:
    request = Request(settings=TO_3, timeout_s=20, accept_session_settings=True)
    assert crashed(made, lambda m: m.migrate(m.plan(request)), 3) is None
    assert made.migrator().resume().step == "kept"
    assert accepted(made) == [True]


def test_a_migration_that_stands_still_because_of_them_is_gone_on_with(made: Migrated) -> None:
    """The run of before is refused for the same settings as the new one: somebody says afterwards that they are meant."""
    assert crashed(made, lambda m: m.migrate(m.plan(Request(settings=TO_3, timeout_s=20))), 3) is None
    assert crashed(made, lambda m: m.resume(accept_session_settings=True), 1) is None
    assert made.migrator().resume().step == "kept", "and it need not be said twice"
    assert accepted(made) == [True]


def test_what_was_accepted_for_one_migration_is_not_for_the_next(made: Migrated) -> None:
    for accepts, settings in ((True, TO_3), (False, RunSettings(parallelism=2))):
        migrator = made.migrator()
        migrator.migrate(migrator.plan(Request(settings=settings, timeout_s=20, accept_session_settings=accepts)))
    assert accepted(made) == [True, False]


def test_records_of_other_migrations_are_as_earlier_versions_wrote_them(made: Migrated) -> None:
    for accepts in (True, False):
        migrator = made.migrator()
        migrator.migrate(migrator.plan(Request(is_restart=True, timeout_s=20, accept_session_settings=accepts)))
        record = read_migration(made.job.root)
        assert record is not None
        assert (b"accept_session_settings" in encode_migration(record)) is accepts


@pytest.mark.parametrize("accepts", [True, False])
def test_a_fork_says_it_to_the_job_that_begins(write_config: Callable[..., Path], accepts: bool) -> None:
    made = Forked(write_config("job", "beside", extra=SETTINGS)).running()
    migrator = made.migrator()
    plan = migrator.plan_fork(ForkRequest(of="job", accept_session_settings=accepts))
    assert ("settings of Spark's session" in plan.markdown()) is accepts
    assert migrator.fork(plan).step == "kept"
    assert [options.accept_session_settings for options in made.new_drivers.options] == [accepts]


# --- by command ------------------------------------------------------------------------------------------------------


def test_the_commands_have_an_option_for_it(made: Migrated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrating, "_migrator", lambda job, config: made.migrator())

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["migrate", "job", *arguments, "-c", str(made.config)])

    alone = call("--accept-session-settings", "--yes")
    assert "nothing to do" in alone.stdout, "it is no change by itself"
    assert call("--restart", "--accept-session-settings", "--yes").exit_code == 0
    assert call("--restart", "--yes").exit_code == 0
    migrator = made.migrator(_dies_at("recorded start"))
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(is_restart=True, timeout_s=20)))
    assert call("--resume", "--accept-session-settings").exit_code == 0
    assert accepted(made) == [True, False, True]


def _dies_at(wanted: str) -> Callable[[str], None]:
    def cut(point: str) -> None:
        if point == wanted:
            raise Died

    return cut


# --- by Dagster ------------------------------------------------------------------------------------------------------


def run(here: World, action: str, **config: object) -> dg.ExecuteInProcessResult:
    return here.defs.resolve_job_def(f"{action}_flights").execute_in_process(
        run_config={"ops": {f"{action}_flights_driver": {"config": config}}}, instance=here.instance
    )


@pytest.mark.parametrize(("config", "accepts"), [({}, False), ({"accept_session_settings": True}, True)])
@pytest.mark.parametrize("action", ["start", "recover"])
def test_a_run_that_starts_a_driver_says_it_if_it_is_told_to(
    world: Callable[..., World], flights: JobRoot, action: str, config: dict[str, bool], accepts: bool
) -> None:
    here = world()
    flights.start()
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    here.clock.advance_s(60)
    assert run(here, action, **config).success
    assert launcher.accepted == [accepts]


def test_a_recovery_by_itself_never_says_it(world: Callable[..., World], flights: JobRoot) -> None:
    """State of before and rows of now may not fit each other: that is for a person to judge."""
    here = world()
    flights.start()
    launcher = here.launchers["flights"] = FakeLauncher(flights)
    here.clock.advance_s(60)
    (request,) = here.recovery()
    assert "accept_session_settings" not in str(request.run_config)
    job = here.defs.resolve_job_def("recover_flights")
    assert job.execute_in_process(run_config=request.run_config, instance=here.instance).success
    assert launcher.accepted == [False]


def test_a_run_that_migrates_says_it_also_of_a_migration_that_goes_on(
    world: Callable[..., World], tmp_path: Path
) -> None:
    house = House.of(world("job", extra=SETTINGS), tmp_path)
    assert house.run(restart=True, accept_session_settings=True).success
    assert house.run(restart=True).success
    for config in ({}, {"resume": True}):
        migrator = house.made.migrator(_dies_at("recorded start"))
        with pytest.raises(Died):
            migrator.migrate(migrator.plan(Request(is_restart=True, timeout_s=20)))
        assert house.run(accept_session_settings=True, **config).success
    assert accepted(house.made) == [True, False, True, True]
