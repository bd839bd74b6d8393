"""`rollback_<job>`: plan → check → apply of that very plan, on a real instance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from click.testing import Result
from dagster_world import World
from maintenance_root import Job
from typer.testing import CliRunner

from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.store import open_store
from stillstate.orchestration.cli import app


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Snapshots 1 (of the start) to 5, with real segments, where `write_config` puts the store of the job `job`."""
    made = Job(open_store(str(tmp_path / "state")))
    made.checkpoints(4)
    made.beat()
    return made


def rolled_back(here: World, job: Job, later_s: int = 3600, **config: object) -> dg.ExecuteInProcessResult:
    here.clock.at_ms = job.clock.at_ms + later_s * 1000
    return here.defs.resolve_job_def("rollback_job").execute_in_process(
        run_config={"ops": {"rollback_job_driver": {"config": config}}}, instance=here.instance, raise_on_error=False
    )


def why_failed(done: dg.ExecuteInProcessResult) -> str:
    (failure,) = [e for e in done.all_events if e.is_step_failure]
    return str(failure.step_failure_data.user_failure_data)


def shown(here: World) -> list[str]:
    """Descriptions of the stream's observations, oldest first."""
    records = here.instance.fetch_observations(dg.AssetKey(["job", "stream"]), limit=10).records
    return [str(r.asset_observation.description) for r in reversed(records) if r.asset_observation is not None]


@pytest.mark.parametrize("to", ["@3", "before"])
def test_a_rollback_by_dagster_is_planned_shown_checked_and_applied(
    world: Callable[..., World], job: Job, to: str
) -> None:
    """Whoever has Dagster's pages only can go back too."""
    job.beat("stopped")
    work = SavepointWork(job.root, "h:1", job.clock, job.ids, wait=lambda seconds: False)
    assert savepoint_of_stopped(work, "before").state == "COMPLETED"
    here = world("job")
    planned = rolled_back(here, job, to=to, plan_only=True)
    assert planned.success, why_failed(planned)
    assert job.catalog.snapshot_ids() == [1, 2, 3, 4, 5], "only looked at"
    done = rolled_back(here, job, to=to)
    assert done.success, why_failed(done)
    made = job.catalog.latest()
    assert made is not None
    assert (made.snapshot_id, made.kind) == (6, "fencing")
    assert made.abandons(4) is (to == "@3")
    assert done.output_for_node("rollback_job_driver")["next"] == "start_job"
    plan = "the plan of a rollback"
    assert shown(here) == [plan, plan, "snapshot 6 is the newest; the next start goes on from it"]


def damaged_segment_of(job: Job, snapshot_id: int) -> str:
    path = job.catalog.manifest(snapshot_id).segments[-1].path
    body = bytearray(job.root.read(path, 1 << 20))
    body[len(body) // 3] ^= 1
    job.root.delete(path)
    job.root.put(path, bytes(body))
    return path


def test_a_rollback_by_dagster_to_what_is_damaged_changes_nothing(world: Callable[..., World], job: Job) -> None:
    """A snapshot of the job's own root is not read by `execute_rollback`: the next start would find the damage."""
    path = damaged_segment_of(job, 3)
    here = world("job")
    done = rolled_back(here, job, to="@3")
    assert not done.success
    assert path in why_failed(done)
    assert "Nothing was changed" in why_failed(done)
    assert job.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    assert shown(here) == ["the plan of a rollback"]
    assert rolled_back(here, job, to="@2").success


def test_a_rollback_by_command_to_what_is_damaged_changes_nothing(write_config: Callable[..., Path], job: Job) -> None:
    """The command went back to a snapshot of the job's own unread: the next start found the damage, and the snapshots
    above it were its past no more."""
    path, config = damaged_segment_of(job, 3), str(write_config("job"))

    def go(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["rollback", "job", *arguments, "--takeover", "--yes", "-c", config])

    refused = go("@3")
    assert refused.exit_code == 5
    assert path in refused.stderr
    assert "Nothing was changed" in refused.stderr
    assert job.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    assert go("@3", "--verify", "structure").exit_code == 0, "whoever insists: names and sizes only"
    assert go("@2").exit_code == 0


def test_a_rollback_by_dagster_takes_nothing_from_a_run_that_lives_unless_it_is_told_to(
    world: Callable[..., World], job: Job
) -> None:
    here = world("job")
    assert not rolled_back(here, job, 0, to="@3").success
    assert job.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    for wrong in ({}, {"to": "@3", "reset": True}):
        assert "one of the two" in why_failed(rolled_back(here, job, **wrong))
    assert rolled_back(here, job, 0, to="@3", takeover=True).success
