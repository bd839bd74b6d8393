"""`savepoint_<job>`: made with its tags, or skipped with a word; by schedule only if the yaml says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_world import World
from job_roots import FakeClock, JobRoot
from maintenance_root import Job as RealJob

from orchestration.config.spec import load_spec, to_policy
from orchestration.definitions import build_definitions
from orchestration.running.savepoints import savepoint_rows
from state_runtime.maintenance.retention.apply import make_retention_plan
from state_runtime.snapshot.savepoint import list_savepoints
from state_runtime.store import open_store

KEY = dg.AssetKey(["flights", "savepoints"])


def run(world: World) -> Any:
    job = world.defs.resolve_job_def("savepoint_flights")
    return job.execute_in_process(instance=world.instance, raise_on_error=False)


def events(world: World) -> list[Any]:
    return [r.asset_materialization for r in world.instance.fetch_materializations(KEY, limit=10).records]


def test_a_savepoint_is_made_tagged_and_shown_with_the_way_back(world: Callable[..., World], flights: JobRoot) -> None:
    house = world(extra="savepoints: {tags: [nightly]}")
    flights.start("stopped")
    assert run(house).success
    (record,) = list_savepoints(flights.catalog.root)
    assert (record.state, record.trigger, record.tags) == ("COMPLETED", "schedule", ("nightly",))
    assert record.name.startswith("20231114t"), "named by the time"
    (event,) = events(house)
    (row,) = [r.data for r in event.metadata["savepoints"].records]
    assert row["go back to it"] == f"stillstate rollback flights {record.name}"
    assert row["made by"] == "schedule: nightly"
    assert "state" not in row, "all are complete: a column for the others"
    assert event.metadata["place"].value.endswith("flights/savepoints/NAME")
    assert event.tags["dagster/data_version"] == record.name


def test_a_savepoint_whose_bytes_are_the_jobs_too_is_told_from_one_that_has_its_own(
    world: Callable[..., World], tmp_path: Path
) -> None:
    """Damage to a shared file is damage to the savepoint."""
    job = RealJob(open_store(str(tmp_path / "state")), FakeClock(), name="flights")
    job.checkpoints(2).ended()
    house = world()
    assert run(house).success
    assert files(house)[0].endswith("with the job")
    for segment in (tmp_path / "state" / "flights" / "changelog").rglob("*.seg"):
        body = segment.read_bytes()
        segment.unlink()
        segment.write_bytes(body)  # the same bytes, and a copy of its own
    job.start()
    job.ended()
    house.clock.advance_s(60)
    assert run(house).success
    now = files(house)
    assert (now[0].endswith("with the job"), now[1]) == (True, "its own")


def files(house: World) -> list[str]:
    """The column of the newest table, newest savepoint first."""
    return [r.data["files"] for r in events(house)[0].metadata["savepoints"].records]


def test_where_nothing_is_new_none_is_made(world: Callable[..., World], flights: JobRoot) -> None:
    house = world()
    assert run(house).success, "never started: skipped with a word"
    flights.start("stopped")
    assert run(house).success
    assert run(house).success
    assert len(list_savepoints(flights.catalog.root)) == 1
    assert flights.committer is not None
    flights.committer.commit(flights.committer.last)
    flights.clock.advance_s(60)
    assert run(house).success
    assert len(list_savepoints(flights.catalog.root)) == 2
    assert len(events(house)) == 2


def test_what_dagster_makes_goes_by_the_rules_and_what_a_user_made_does_not(
    world: Callable[..., World], flights: JobRoot, write_config: Callable[..., Path]
) -> None:
    house = world()
    flights.start("stopped")
    for _ in range(3):
        assert run(house).success
        assert flights.committer is not None
        flights.committer.commit(flights.committer.last)
        flights.clock.advance_s(60)
    policy = to_policy(load_spec(write_config(extra="retention: {keep_last: 1}")).job("flights"))
    plan = make_retention_plan(flights.catalog.root, policy, clock=flights.clock, share_max=1.0)
    savepoints = [d for d in plan.decisions if d.item.kind == "savepoint"]
    assert [d.kept for d in savepoints] == [True, False, False]
    assert [row.trigger for row in savepoint_rows(flights.catalog, flights.clock)] == ["schedule"] * 3


def test_a_schedule_is_there_if_the_file_has_one(write_config: Callable[..., Path]) -> None:
    def found(extra: str) -> dict[str, Any]:
        schedules = build_definitions(load_spec(write_config(extra=extra))).get_repository_def().schedule_defs
        return {s.name: s.cron_schedule for s in schedules if s.name.startswith("savepoint_")}

    assert found("") == {}
    assert found("savepoints: {schedule: 0 4 * * *}") == {"savepoint_flights_schedule": "0 4 * * *"}


def test_a_savepoint_waits_for_no_verification_and_holds_up_no_recovery(write_config: Callable[..., Path]) -> None:
    tags = build_definitions(load_spec(write_config())).resolve_job_def("savepoint_flights").run_tags
    assert tags["stillstate/savepoint"] == "flights"
    assert not {"stillstate/upkeep", "stillstate/job"} & set(tags)
