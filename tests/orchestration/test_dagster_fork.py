"""`migrate_<job>` with `fork_of`, and `stillstate fork`: the plan first, then the end as it is; a run again goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from forked_job import NEW, OLD, SETTINGS, Forked, files_of
from job_roots import NO_SUCH_PID
from migrated_job import Died
from typer.testing import CliRunner

from state_runtime.base.process_space import process_space
from state_runtime.snapshot.migration import read_migration, take_migration_over
from stillstate.orchestration.cli import app
from stillstate.orchestration.commands import migrating
from stillstate.orchestration.migration.fork_plan import ForkRequest

FORK = ForkRequest(of=OLD)
STREAM = dg.AssetKey([NEW, "stream"])


class House:
    """The code location over both jobs, whose drivers the test plays."""

    def __init__(self, here: World, made: Forked) -> None:
        self.here, self.made = here, made
        here.launchers[OLD] = made.old_drivers  # type: ignore[assignment]
        here.launchers[NEW] = made.new_drivers  # type: ignore[assignment]
        here.polls.append(self.poll)
        self.follow()

    def poll(self, seconds: float) -> None:
        self.made.poll(seconds)
        self.follow()

    def follow(self) -> None:
        """Dagster's clock is the jobs'."""
        self.here.clock.at_ms = self.made.old.clock.at_ms

    def run(self, job: str = NEW, **config: Any) -> dg.ExecuteInProcessResult:
        self.follow()
        return self.here.defs.resolve_job_def(f"migrate_{job}").execute_in_process(
            run_config={"ops": {f"migrate_{job}_driver": {"config": config}}},
            instance=self.here.instance,
            raise_on_error=False,
        )

    def cut(self, wanted: str) -> None:
        """A process that forks dies at this point."""

        def on_point(point: str) -> None:
            if point == wanted:
                raise Died

        migrator = self.made.migrator(on_point)
        with pytest.raises(Died):
            migrator.fork(migrator.plan_fork(FORK))
        self.follow()


@pytest.fixture
def house(world: Callable[..., World], tmp_path: Path) -> House:
    here = world(OLD, NEW, extra=SETTINGS)
    made = Forked(tmp_path / "stillstate.yaml").running()
    return House(here, made)


def said(done: dg.ExecuteInProcessResult) -> str:
    return " ".join(str(e.step_failure_data.user_failure_data) for e in done.all_events if e.is_step_failure)


def shown(house: House, name: str) -> list[Any]:
    """What events of the new job's stream have under a name, newest first."""
    found = house.here.instance.fetch_observations(STREAM, limit=10).records
    metadata = [r.asset_observation.metadata for r in found if r.asset_observation is not None]
    return [m[name] for m in metadata if name in m]


def steps(house: House) -> list[str]:
    return [row.data["step"] for row in shown(house, "steps")[0].records]


def test_a_run_shows_its_plan_and_forks(house: House) -> None:
    done = house.run(fork_of=OLD)
    assert done.success, said(done)
    value = done.output_for_node(f"migrate_{NEW}_driver")
    assert (value["outcome"], value["fork_of"], value["term"]) == ("forked", OLD, house.made.new_drivers.runs[0].term)
    assert "/savepoints/fork-" in value["fork_at"]
    (plan,) = shown(house, "plan")
    assert "make a savepoint of job, which goes on running" in str(plan.value)
    assert steps(house) == ["save", "copy", "verify", "start", "watch", "kept"]
    assert [run.state for run in house.made.old_drivers.runs] == ["running"]


def test_a_run_that_was_taken_back_fails_with_the_reason(house: House) -> None:
    house.made.behaving("dies")
    done = house.run(fork_of=OLD)
    assert not done.success
    assert "it broke" in said(done)
    assert "which goes on; the objects copied for it were removed" in said(done)
    assert steps(house) == ["save", "copy", "verify", "start", "watch", "stop-new", "clear", "rolled-back"]
    assert [line.value for line in shown(house, "log_last_line")] == ["the last words"]
    assert len(house.made.old_drivers.live()) == 1


@pytest.mark.parametrize("point", ["done save", "done copy", "done verify", "done start", "recorded watch"])
@pytest.mark.parametrize("config", [{"fork_of": OLD}, {}, {"resume": True}])
def test_a_run_again_goes_on_with_a_fork_that_was_cut(house: House, point: str, config: dict[str, Any]) -> None:
    """Whoever launches it again asks for the same, or for nothing by name."""
    house.cut(point)
    done = house.run(**config)
    assert done.success, said(done)
    assert done.output_for_node(f"migrate_{NEW}_driver")["outcome"] == "forked"
    assert not shown(house, "plan"), "it was shown when it began"
    assert len(house.made.new_drivers.runs) == 1, "the driver that had come up was kept"


@pytest.mark.parametrize("point", ["recorded save", "done save", "done copy", "done verify", "done start"])
def test_a_fork_whose_process_has_ended_is_gone_on_with_whoever_began_it(house: House, point: str) -> None:
    """Of a job that never ran no driver says anything: the record alone does."""
    house.cut(point)
    left = read_migration(house.made.new_root)
    assert left is not None
    gone = f"{socket.gethostname()}:{NO_SUCH_PID}"
    take_migration_over(house.made.new_root, left, gone, house.made.old.clock, process_space())
    if point != "done start":
        (alive,) = [e for e in house.here.tick("stillstate_recovery").asset_events if e.asset_key == STREAM]
        assert isinstance(alive, dg.AssetCheckEvaluation)
        assert alive.severity is dg.AssetCheckSeverity.ERROR
        assert f"`stillstate migrate {NEW} --resume`" in str(alive.description)
    tick = house.here.tick("stillstate_desired_state")
    (request,) = tick.run_requests or []
    (seen,) = [e for e in tick.asset_events if e.asset_key == STREAM]
    assert f"the fork of job '{OLD}'" in str(seen.description)
    assert ":resume:1" in str(request.run_key)
    job = house.here.defs.resolve_job_def(str(request.job_name))
    done = job.execute_in_process(run_config=request.run_config, tags=request.tags, instance=house.here.instance)
    assert done.output_for_node(f"migrate_{NEW}_driver")["outcome"] == "forked"
    assert [run.state for run in house.made.new_drivers.runs] == ["running"]
    assert house.here.tick("stillstate_desired_state").run_requests in (None, [])


def test_in_the_middle_of_a_fork_nobody_else_starts_the_job(house: House) -> None:
    house.cut("done copy")
    start = house.here.defs.resolve_job_def(f"start_{NEW}")
    done = start.execute_in_process(instance=house.here.instance, raise_on_error=False)
    assert "--resume" in said(done)
    assert house.here.recovery() == []
    assert house.run().success


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fork_of": OLD, "parallelism": 3}, "only fork_at, timeout_s, verify and accept_session_settings"),
        ({"fork_of": OLD, "checkpoints": 2}, "only fork_at, timeout_s, verify and accept_session_settings"),
        ({"fork_at": "3"}, "name the job in fork_of too"),
        ({"fork_of": "nobody"}, "no job 'nobody'"),
        ({"fork_of": NEW}, "cannot be forked to itself"),
        ({"fork_of": OLD, "fork_at": "77"}, "77"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(house: House, config: dict[str, Any], words: str) -> None:
    done = house.run(**config)
    assert not done.success
    assert words in said(done)
    assert files_of(house.made.new_root) == {}


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(house: House, monkeypatch: pytest.MonkeyPatch) -> Forked:
    monkeypatch.setattr(migrating, "_migrator", lambda job, config: house.made.migrator())
    return house.made


def call(made: Forked, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["fork", OLD, NEW, *arguments, "-c", str(made.config)])


def test_the_plan_is_shown_and_asked_about(made: Forked) -> None:
    dry = call(made, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "1. make a savepoint of job, which goes on running" in dry.stdout
    assert "note: rows that job has put out before are in its output alone" in dry.stdout
    as_json = json.loads(call(made, "--dry-run", "--json").stdout)
    assert (as_json["job"], as_json["fork_of"]) == (NEW, OLD)
    unanswered = call(made)
    assert unanswered.exit_code == 2
    assert "give --yes" in unanswered.stderr
    assert read_migration(made.new_root) is None


def test_a_fork_ends_with_what_runs(made: Forked) -> None:
    done = call(made, "--yes")
    assert done.exit_code == 0, done.stderr
    (run,) = made.new_drivers.live()
    assert f"beside runs beside job: term {run.term}, the first checkpoint of the new run" in done.stdout
    again = call(made, "--yes")
    assert again.exit_code == 2
    assert "has begun already" in again.stderr


def test_a_fork_that_was_taken_back_is_an_error(made: Forked) -> None:
    made.behaving("dies")
    done = call(made, "--yes", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stderr.splitlines()[-1])["error"]["kind"] == "rolled-back"


def test_a_fork_that_was_cut_is_gone_on_with(made: Forked, house: House) -> None:
    assert "no migration" in call(made, "--resume").stderr
    house.cut("done copy")
    assert "takes no other option" in call(made, "--resume", "--at", "3").stderr
    other = CliRunner().invoke(app, ["fork", "third", NEW, "--resume", "-c", str(made.config)])
    assert "no fork of 'third'" in other.stderr
    done = call(made, "--resume")
    assert done.exit_code == 0, done.stderr


def test_a_job_that_is_not_in_the_file_is_refused(write_config: Callable[..., Path]) -> None:
    config = str(write_config(OLD, extra=SETTINGS))
    done = CliRunner().invoke(app, ["fork", OLD, NEW, "--yes", "-c", config])
    assert done.exit_code == 2
    assert "has no job 'beside'" in done.stderr
