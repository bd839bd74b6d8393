"""`verify_<job>` with `intact`, `drill_<job>` with `restorable`, and `stillstate drill`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from maintenance_root import Job
from typer.testing import CliRunner

from state_runtime.store import open_store
from stillstate.orchestration.cli import app
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The job `job` with real state, where `write_config("job")` puts the store."""
    return Job(open_store(str(tmp_path / "state"))).checkpoints(5).ended()


@pytest.fixture
def house(world: Callable[..., World], tmp_path: Path) -> World:
    return world("job", extra="local_dir: local\nverification: {sample_share: 1.0}")


def check(world: World, name: str, config: dict[str, Any] | None = None) -> dg.AssetCheckEvaluation:
    job = world.defs.resolve_job_def(name)
    result = job.execute_in_process(instance=world.instance, run_config=config, raise_on_error=False)
    (found,) = result.get_asset_check_evaluations()
    return found


def damage(job: Job, tmp_path: Path) -> str:
    path = job.committer.last.segments[0].path
    file = tmp_path / "state" / "job" / path
    body = bytearray(file.read_bytes())
    body[len(body) // 3] ^= 1
    file.write_bytes(bytes(body))
    return path


def full(world: World) -> dict[str, Any]:
    schedule = world.defs.resolve_schedule_def("verify_job_full_schedule")
    with dg.build_schedule_context(instance=world.instance) as context:
        (request,) = schedule.evaluate_tick(context).run_requests or []
    return dict(request.run_config)


def test_a_whole_job_is_intact_and_restorable(job: Job, house: World, tmp_path: Path) -> None:
    sample, all_of_it, drill = (
        check(house, "verify_job"),
        check(house, "verify_job", full(house)),
        check(house, "drill_job"),
    )
    assert sample.passed
    assert all_of_it.passed
    assert (sample.metadata["level"].value, all_of_it.metadata["level"].value) == ("sample", "full")
    assert all_of_it.metadata["objects_read"].value > 0
    assert drill.passed
    assert drill.metadata["rows"].value == 4
    assert [f.name for f in (tmp_path / "local" / "drills").iterdir()] == [".lock"]


def test_damage_is_an_error_of_both(job: Job, house: World, tmp_path: Path) -> None:
    path = damage(job, tmp_path)
    for found in (check(house, "verify_job"), check(house, "drill_job")):
        assert not found.passed
        assert found.severity is dg.AssetCheckSeverity.ERROR
        assert Path(path).name in str(found.description)


def test_nothing_to_look_at_is_not_green(house: World) -> None:
    for name in ("verify_job", "drill_job"):
        found = check(house, name)
        assert not found.passed
        assert found.severity is dg.AssetCheckSeverity.WARN
        assert "nothing is known yet" in str(found.description)


def test_a_store_that_cannot_be_reached_is_no_damage(job: Job, house: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from state_runtime.maintenance.verify import content

    def unreachable(*_: Any) -> bool:
        raise content.StoreUnavailable("the cable is out")

    monkeypatch.setattr(content, "_fetch", unreachable)
    found = check(house, "verify_job")
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.WARN


def test_samples_are_nightly_full_ones_weekly_drills_only_if_asked_for(write_config: Callable[..., Path]) -> None:
    found = {
        s.name: str(s.cron_schedule)
        for s in build_definitions(load_spec(write_config())).get_repository_def().schedule_defs
    }
    assert found["verify_flights_schedule"].endswith("* * *")
    assert not found["verify_flights_full_schedule"].endswith("*")
    assert "drill_flights_schedule" not in found
    text = "verification: {sample: off, full: off}\ndrill: {schedule: auto}"
    found = {
        s.name: str(s.cron_schedule)
        for s in build_definitions(load_spec(write_config(extra=text))).get_repository_def().schedule_defs
    }
    assert not [name for name in found if name.startswith("verify_")]
    assert not found["drill_flights_schedule"].endswith("*")


def test_the_command_says_what_came_back_and_ends_with_5_if_it_did_not(
    job: Job, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = str(write_config("job", extra="local_dir: local"))
    said = CliRunner().invoke(app, ["drill", "job", "-c", config])
    assert said.exit_code == 0, said.output
    assert f"job: snapshot {job.committer.last.snapshot_id} is restorable: 1 states, 4 rows" in said.stdout
    report = json.loads(CliRunner().invoke(app, ["drill", "job", "--json", "-c", config]).stdout)
    assert report["restorable"] is True
    assert report["states"][0]["restored_digest"] == report["states"][0]["stored_digest"]
    damage(job, tmp_path)
    bad = CliRunner().invoke(app, ["drill", "job", "-c", config])
    assert bad.exit_code == 5
    assert "NOT restorable" in bad.stdout
    assert CliRunner().invoke(app, ["drill", "job", "--snapshot", "77", "-c", config]).exit_code == 2
    assert "Example: stillstate drill flights" in CliRunner().invoke(app, ["drill", "--help"]).output
