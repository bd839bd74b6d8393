"""`migrate_<job>` and the commands: the plan first, then the end as it is; a run again goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from migrated_house import House
from migrated_job import Died, Migrated
from typer.testing import CliRunner

from state_runtime.snapshot.migration import RunSettings, read_migration
from stillstate.orchestration.cli import app
from stillstate.orchestration.commands import migrating
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.migration.plan import Request

SETTINGS = "parallelism: 2\nrecovery: {heartbeat_timeout_s: 300, first_checkpoint_s: 20}"
STREAM = dg.AssetKey(["job", "stream"])


@pytest.fixture
def house(world: Callable[..., World], tmp_path: Path) -> House:
    return House.of(world("job", extra=SETTINGS), tmp_path)


def said(done: dg.ExecuteInProcessResult) -> str:
    return " ".join(str(e.step_failure_data.user_failure_data) for e in done.all_events if e.is_step_failure)


def shown(house: House, name: str) -> list[Any]:
    """What events of the stream have under a name, newest first."""
    found = house.here.instance.fetch_observations(STREAM, limit=10).records
    metadata = [r.asset_observation.metadata for r in found if r.asset_observation is not None]
    return [m[name] for m in metadata if name in m]


def plans(house: House) -> list[str]:
    return [str(plan.value) for plan in shown(house, "plan")]


def steps(house: House) -> list[tuple[str, str]]:
    """Step and reason of the newest table of steps."""
    return [(row.data["step"], row.data["why"]) for row in shown(house, "steps")[0].records]


def test_a_run_shows_its_plan_and_migrates(house: House) -> None:
    done = house.run(parallelism=3)
    assert done.success
    value = done.output_for_node("migrate_job_driver")
    assert (value["outcome"], value["parallelism"], value["backend"]) == ("migrated", 3, "arrow")
    (plan,) = plans(house)
    assert "| parallelism | 2 | 3 |" in plan
    (live,) = house.made.drivers.live()
    assert live.parallelism == 3
    assert [step for step, _ in steps(house)] == ["save", "verify", "start", "watch", "kept"]


def test_a_run_moves_the_job_to_the_store_of_the_file_and_sensors_see_it_there(
    world: Callable[..., World], tmp_path: Path
) -> None:
    house = House.of(world("job", extra=f"{SETTINGS}\nmigration: {{to_store: elsewhere}}"), tmp_path)
    done = house.run(move=True)
    assert done.success, said(done)
    assert done.output_for_node("migrate_job_driver")["moved_to"].endswith("/elsewhere/job")
    (plan,) = plans(house)
    assert "| store |" in plan
    house.beat()
    house.follow()
    (alive,) = house.here.tick("stillstate_recovery").asset_events
    assert (alive.passed, alive.metadata["term"].value) == (True, house.made.drivers.live()[0].term)
    again = house.run(move=True)
    assert "names no other place to move it to" in said(again)


def test_a_run_that_was_taken_back_fails_with_the_reason(house: House) -> None:
    house.made.drivers.behaviour[3] = "dies"
    done = house.run(parallelism=3)
    assert not done.success
    assert "it broke" in said(done)
    assert "runs again with parallelism 2" in said(done)
    assert "rolled-back" in said(done)
    assert len(plans(house)) == 1, "also of a run that failed"
    done_steps = steps(house)
    assert [step for step, _ in done_steps] == [
        "save", "verify", "start", "watch", "stop-new", "restore", "start-old", "rolled-back",
    ]  # fmt: skip
    assert [step for step, why in done_steps if "it broke" in why] == ["stop-new"], "once, where it was decided"
    assert [line.value for line in shown(house, "log_last_line")] == ["the last words"]


def test_without_configuration_a_run_does_what_the_file_says(house: House) -> None:
    done = house.run()
    assert done.output_for_node("migrate_job_driver")["outcome"] == "nothing to do"
    assert read_migration(house.made.job.root) is None


def test_a_run_again_goes_on_with_what_was_cut(house: House) -> None:
    def cut(point: str) -> None:
        if point == "done start":
            raise Died

    migrator = house.made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(settings=RunSettings(parallelism=3), timeout_s=60)))
    other = house.run(parallelism=4)
    assert "something else is asked for" in said(other)
    assert house.run(parallelism=3).success
    assert [r.parallelism for r in house.made.drivers.runs] == [2, 3], "the driver that had come up was kept"


def test_a_start_by_hand_waits_for_the_end_of_a_migration(house: House) -> None:
    def cut(point: str) -> None:
        if point == "done verify":
            raise Died

    migrator = house.made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(is_restart=True)))
    house.follow()
    start = house.here.defs.resolve_job_def("start_job")
    done = start.execute_in_process(instance=house.here.instance, raise_on_error=False)
    assert "--resume" in said(done)
    assert house.here.recovery() == [], "and the recovery sensor leaves the job alone"
    recovered = house.here.defs.resolve_job_def("recover_job").execute_in_process(instance=house.here.instance)
    assert recovered.output_for_node("recover_job_driver")["outcome"] == "nothing to do"
    assert house.run().success
    assert len(house.made.drivers.live()) == 1


def test_it_takes_turns_with_what_starts_and_recovers_the_driver(write_config: Callable[..., Path]) -> None:
    tags = build_definitions(load_spec(write_config())).resolve_job_def("migrate_flights").run_tags
    assert tags["stillstate/job"] == "flights"
    assert tags["stillstate/action"] == "migrate"
    assert tags["dagster/max_retries"] == "0"


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def made(write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Migrated:
    found = Migrated(write_config("job", extra=SETTINGS), tmp_path / "state").running()
    monkeypatch.setattr(migrating, "_migrator", lambda job, config: found.migrator())
    return found


def call(made: Migrated, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "-c", str(made.config)])


def test_the_plan_is_shown_and_asked_about(made: Migrated) -> None:
    shown = call(made, "migrate", "job", "--parallelism", "3", "--dry-run")
    assert shown.exit_code == 0
    assert "make a savepoint and stop the driver" in shown.stdout
    unanswered = call(made, "rescale", "job", "3")
    assert unanswered.exit_code == 2
    assert "give --yes" in unanswered.stderr
    assert read_migration(made.job.root) is None


def test_a_rescale_ends_with_what_runs(made: Migrated) -> None:
    done = call(made, "rescale", "job", "3", "--yes")
    assert done.exit_code == 0, done.stderr
    assert "job runs with parallelism 3, backend arrow" in done.stdout
    again = call(made, "rescale", "job", "3", "--yes")
    assert "nothing to do" in again.stdout


def test_a_migration_that_was_taken_back_is_an_error(made: Migrated) -> None:
    made.drivers.behaviour[3] = "dies"
    done = call(made, "migrate", "job", "-p", "3", "--yes", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stderr.splitlines()[-1])["error"]["kind"] == "rolled-back"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--parallelism", "0"), "must be at least 1 (got 0)"),
        (("--resume", "--parallelism", "3"), "takes no other option"),
        (("--resume",), "no migration"),
        (("--from-snapshot", "99", "--yes"), "no snapshot 99"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(made: Migrated, arguments: tuple[str, ...], said: str) -> None:
    done = call(made, "migrate", "job", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_by_hand_nothing_starts_the_job_or_takes_it_back_in_the_middle(
    made: Migrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(point: str) -> None:
        if point == "done verify":
            raise Died

    migrator = made.migrator(cut)
    with pytest.raises(Died):
        migrator.migrate(migrator.plan(Request(is_restart=True)))
    for arguments in (["run", "job"], ["start", "job"], ["rollback", "job", "@3", "--yes"]):
        done = call(made, *arguments)
        assert (done.exit_code, "--resume" in done.stderr) == (2, True), arguments
    # What a launcher starts is the migration's own, or what a supervisor brings back.
    monkeypatch.setenv("STILLSTATE_START_CAUSE", "migration to something")
    assert "nowhere" in call(made, "run", "job").stderr


def test_a_driver_is_built_with_the_settings_of_the_last_migration(made: Migrated) -> None:
    """Whatever the file says: `run` is what every driver is."""
    assert call(made, "rescale", "job", "3", "--yes").exit_code == 0
    made.drivers.stop()
    folder = made.config.parent
    (folder / "held_probe.py").write_text("def build(context):\n    raise KeyError(context.settings.parallelism)\n")
    made.config.write_text(made.config.read_text().replace("nowhere.job:build", "held_probe:build"))
    done = call(made, "run", "job")
    assert done.exit_code == 7
    assert "KeyError: 3" in done.stderr
