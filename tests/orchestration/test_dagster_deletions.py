"""`retain_<job>` and `collect_<job>`: plan → check that blocks → apply of that very plan, on a real instance."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from job_roots import SECRET, JobRoot

from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.gc.plan import Candidate, GcPlan
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.snapshot.manifest import LayerEntry, TableEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.pins import pin_snapshot
from stillstate.orchestration.config.schedules import cron_of
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.upkeep.deletions import Collecting, Retaining

ORPHAN = f"changelog/{1:020d}/{1:020d}-x.seg"
DAY_S = 86_400
KEEP_2 = "retention: {keep_last: 2, deleted_share_max: 0.7}"


@pytest.fixture
def five(flights: JobRoot) -> JobRoot:
    """Snapshots 1 … 5 of a job whose run ended."""
    flights.start()
    assert flights.committer is not None
    for _ in range(4):
        flights.committer.commit(flights.committer.last)
    flights.beat("stopped")
    return flights


def run(world: World, name: str, config: dict[str, Any] | None = None, **more: Any) -> dg.ExecuteInProcessResult:
    job = world.defs.resolve_job_def(name)
    return job.execute_in_process(instance=world.instance, run_config=config, raise_on_error=False, **more)


def materialized(world: World, asset: str) -> list[Any]:
    """The materializations of an asset of flights, newest first."""
    records = world.instance.fetch_materializations(dg.AssetKey(["flights", asset]), limit=10).records
    return [record.asset_materialization for record in records]


def checked(result: dg.ExecuteInProcessResult) -> dg.AssetCheckEvaluation:
    (found,) = result.get_asset_check_evaluations()
    return found


def why_failed(result: dg.ExecuteInProcessResult) -> str:
    (failure,) = [e for e in result.all_events if e.event_type_value == "STEP_FAILURE"]
    return str(failure.step_failure_data.error_display_string) + str(failure.step_failure_data.user_failure_data)


def kept_plans(tmp_path: Path) -> list[str]:
    return sorted(f.name for f in (tmp_path / "logs" / "plans").glob("*.json"))


def doom(names: set[str]) -> Callable[..., RetentionPlan]:
    """A planner that has gone wrong: it dooms these, whoever needs them."""
    right = Retaining.plan

    def plan(self: Retaining, on_listed: Any = None) -> RetentionPlan:
        made = right(self)
        wrong = [dataclasses.replace(d, reasons=()) if d.item.name in names else d for d in made.decisions]
        return dataclasses.replace(made, decisions=tuple(wrong))

    return plan


def test_what_was_planned_and_checked_is_deleted_and_nothing_else(
    world: Callable[..., World], five: JobRoot, tmp_path: Path
) -> None:
    house = world(extra=KEEP_2)
    result = run(house, "retain_flights")
    assert result.success
    assert five.catalog.snapshot_ids() == [4, 5]
    (plan,), (done,) = materialized(house, "retained_snapshots"), materialized(house, "deleted_snapshots")
    assert plan.metadata["plan_digest"] == done.metadata["plan_digest"] == checked(result).metadata["plan_digest"]
    rows = [record.data for record in plan.metadata["plan"].records]
    assert [(row["what"], row["snapshot"]) for row in rows] == [
        ("delete", "3"), ("delete", "2"), ("delete", "1"), ("keep", "5"), ("keep", "4"),
    ]  # fmt: skip
    assert rows[0]["why"] == "no rule keeps it"
    assert "last 1 of 2" in rows[3]["why"]
    assert done.metadata["deleted_snapshots"].value == 3
    assert kept_plans(tmp_path) == []


def test_a_run_may_be_given_rules_of_its_own_which_count_instead_of_the_file_s(
    world: Callable[..., World], five: JobRoot
) -> None:
    """The error of a plan without a rule asked for one, and the run had no place for it."""

    def retained(house: World, **rules: object) -> dg.ExecuteInProcessResult:
        return run(house, "retain_flights", {"ops": {"flights__retained_snapshots": {"config": rules}}})

    without, with_rule = world(), world(extra="retention: {keep_last: 4}")
    assert not retained(with_rule, keep_last=-1).success
    result = retained(without, keep_last=4, keep_tags=["audit"])
    assert result.success, why_failed(result)
    assert five.catalog.snapshot_ids() == [2, 3, 4, 5]
    assert retained(with_rule, keep_last=3).success
    assert five.catalog.snapshot_ids() == [3, 4, 5]


def test_too_large_a_share_is_shown_and_stopped_unless_it_is_allowed(
    world: Callable[..., World], five: JobRoot
) -> None:
    house = world(extra="retention: {keep_last: 2}")
    stopped = run(house, "retain_flights")
    assert not stopped.success
    assert "3 of 5 snapshots, more than 50%" in str(checked(stopped).description)
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    assert materialized(house, "retained_snapshots")[0].metadata["deleted"].value == 3
    assert materialized(house, "deleted_snapshots") == []
    allowed = {"ops": {"flights__retained_snapshots": {"config": {"deleted_share_max": 0.7}}}}
    assert run(house, "retain_flights", allowed).success
    assert five.catalog.snapshot_ids() == [4, 5]


@pytest.mark.parametrize(
    ("doomed", "why"),
    [
        ({"5"}, "snapshot 5 is needed by the job's next run"),
        ({"1"}, "snapshot 1 is needed by a pin of me (the audit)"),
        ({"1", "2", "3", "4", "5"}, "no snapshot that the job can restart from would be left"),
    ],
)
def test_a_plan_that_is_not_safe_never_gets_as_far_as_deleting(
    world: Callable[..., World], five: JobRoot, monkeypatch: pytest.MonkeyPatch, doomed: set[str], why: str
) -> None:
    """Whatever went wrong in the planner: the check knows nothing of its rules."""
    house = world(extra="retention: {keep_last: 5, deleted_share_max: 1.0}")
    pin_snapshot(five.catalog.root, 1, reason="user", holder="me", clock=five.clock, ids=SYSTEM_IDS, note="the audit")
    monkeypatch.setattr(Retaining, "plan", doom(doomed))
    result = run(house, "retain_flights")
    assert not result.success
    assert why in str(checked(result).description)
    assert checked(result).blocking
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    assert not [e for e in result.all_events if e.step_key == "flights__deleted_snapshots" and e.is_step_start]


def test_a_plan_that_changed_after_it_was_looked_at_is_not_executed(
    world: Callable[..., World], five: JobRoot, tmp_path: Path
) -> None:
    house = world(extra=KEEP_2)
    run(house, "retain_flights", asset_selection=[dg.AssetKey(["flights", "retained_snapshots"])])
    digest = materialized(house, "retained_snapshots")[0].metadata["plan_digest"].value
    (file,) = (tmp_path / "logs" / "plans").glob("*.json")
    other = RetentionPlan.read(file)
    dataclasses.replace(other, share_max=0.9).write(file)
    config = {"ops": {"flights__deleted_snapshots": {"config": {"digest": digest}}}}
    refused = run(house, "retain_flights", config, asset_selection=[dg.AssetKey(["flights", "deleted_snapshots"])])
    assert "that was looked at" in why_failed(refused)
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]


def test_a_plan_that_somebody_looked_at_is_executed_by_its_digest(
    world: Callable[..., World], five: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = world(extra=KEEP_2)
    only = [dg.AssetKey(["flights", "deleted_snapshots"])]
    run(house, "retain_flights", asset_selection=[dg.AssetKey(["flights", "retained_snapshots"])])
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    assert "this run made no plan" in why_failed(run(house, "retain_flights", asset_selection=only))
    digest = materialized(house, "retained_snapshots")[0].metadata["plan_digest"].value
    config = {"ops": {"flights__deleted_snapshots": {"config": {"digest": digest}}}}
    with monkeypatch.context() as patch:
        patch.setattr(Retaining, "dangers", lambda self, plan: ["the moon is full"])
        assert "the moon is full" in why_failed(run(house, "retain_flights", config, asset_selection=only))
    assert five.catalog.snapshot_ids() == [1, 2, 3, 4, 5]
    assert run(house, "retain_flights", config, asset_selection=only).success
    assert five.catalog.snapshot_ids() == [4, 5]
    assert "was executed" in why_failed(run(house, "retain_flights", config, asset_selection=only))


def orphan(root: JobRoot) -> None:
    """An object that nothing leads to, three days older than the newest manifest (by what its file says)."""
    root.catalog.root.put(ORPHAN, b"orphan")
    manifest = root.store_path / root.name / manifest_path(root.catalog.snapshot_ids()[-1])
    at_s = manifest.stat().st_mtime + 3 * DAY_S
    os.utime(manifest, (at_s, at_s))
    root.clock.at_ms = int(at_s * 1000)  # a manifest of the future would count as written now


def test_garbage_is_planned_checked_and_collected(world: Callable[..., World], five: JobRoot) -> None:
    house = world()
    orphan(five)
    result = run(house, "collect_flights")
    assert result.success, why_failed(result)
    assert not five.catalog.root.exists(ORPHAN)
    (plan,), (done,) = materialized(house, "garbage"), materialized(house, "collected_garbage")
    assert plan.metadata["garbage_objects"].value == done.metadata["deleted_objects"].value == 1
    assert plan.metadata["plan_digest"] == done.metadata["plan_digest"]
    (row,) = [r.data for r in plan.metadata["plan"].records if r.data["what"] == "delete"]
    assert row["objects"] == 1
    assert run(house, "collect_flights").success
    assert len(materialized(house, "garbage")) == 2
    assert len(materialized(house, "collected_garbage")) == 1, "nothing was deleted, so nothing is said to be"


def test_what_a_snapshot_needs_is_never_collected_whatever_the_plan_says(
    world: Callable[..., World], five: JobRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = world()
    assert five.committer is not None
    table = TableEntry("tables/plane-day/legs/a.parquet", 5, "d", 1, "plane-day", "legs", 0, 2**64 - 1)
    five.catalog.root.put(table.path, b"table")
    draft = dataclasses.replace(five.committer.last, kind="checkpoint", layers=(LayerEntry(1, 1, (table,)),))
    five.committer.commit(draft)
    right = Collecting.plan

    def wrong(self: Collecting, on_listed: Any = None) -> GcPlan:
        made = right(self)
        return dataclasses.replace(made, candidates=(Candidate(table.path, "table", 5, 1, "oops"),))

    monkeypatch.setattr(Collecting, "plan", wrong)
    result = run(house, "collect_flights")
    assert not result.success
    assert f"{table.path} is needed now" in str(checked(result).description)
    assert five.catalog.root.exists(table.path)


@pytest.mark.parametrize("name", ["retain_flights", "collect_flights"])
def test_a_job_that_was_never_started_has_nothing_to_delete(world: Callable[..., World], name: str) -> None:
    house = world(extra=KEEP_2)
    assert run(house, name).success
    for asset in ("retained_snapshots", "deleted_snapshots", "garbage", "collected_garbage"):
        assert materialized(house, asset) == []


def test_no_secret_is_in_events_metadata_or_plans(world: Callable[..., World], five: JobRoot, tmp_path: Path) -> None:
    house = world(extra=f"storage_options: {{key: {SECRET}}}\n{KEEP_2}")
    orphan(five)
    for name in ("retain_flights", "collect_flights"):
        result = run(house, name)
        assert SECRET not in "".join(repr(event) for event in result.all_events)
        run(
            house,
            name,
            asset_selection=[dg.AssetKey(["flights", "retained_snapshots" if name[0] == "r" else "garbage"])],
        )
    plans = list((tmp_path / "logs" / "plans").glob("*.json"))
    assert len(plans) == 2
    assert not [file for file in plans if SECRET in file.read_text()]


def test_collection_is_on_every_six_hours_and_staggered_retention_only_if_asked_for(
    write_config: Callable[..., Path],
) -> None:
    names = [f"job-{number}" for number in range(30)]
    spec = load_spec(write_config(*names))
    defs = build_definitions(spec)
    crons = [defs.resolve_schedule_def(f"collect_job_{n}_schedule").cron_schedule for n in range(30)]
    assert len(set(crons)) > 25
    for cron in crons:
        hours = [int(hour) for hour in str(cron).split()[1].split(",")]
        assert [b - a for a, b in itertools.pairwise(hours)] == [6, 6, 6]
    schedules = {s.name: s for s in defs.get_repository_def().schedule_defs}
    assert not [name for name in schedules if name.startswith("retain_")]
    assert schedules["collect_job_0_schedule"].default_status is dg.DefaultScheduleStatus.RUNNING
    off = build_definitions(load_spec(write_config(extra="garbage: {schedule: off}\nretention: {schedule: 5 4 * * *}")))
    found = {s.name: s.cron_schedule for s in off.get_repository_def().schedule_defs}
    assert "collect_flights_schedule" not in found
    assert found["retain_flights_schedule"] == "5 4 * * *"


@pytest.mark.parametrize("action", ["retain", "collect"])
def test_one_of_a_job_at_a_time_and_never_before_a_recovery(write_config: Callable[..., Path], action: str) -> None:
    defs = build_definitions(load_spec(write_config("plane-delays")))
    tags = defs.resolve_job_def(f"{action}_plane_delays").run_tags
    assert tags["stillstate/upkeep"] == "plane-delays"
    assert tags["stillstate/slots"] == "upkeep"
    assert "stillstate/job" not in tags, "else it would hold up a recovery"
    assert int(tags["dagster/max_runtime"]) > 0
    assert int(tags["dagster/priority"]) < 0


def test_a_schedule_is_off_or_a_time_of_the_jobs_own() -> None:
    assert cron_of("off", "night", "x") is None
    assert cron_of("1 2 * * *", "night", "x") == "1 2 * * *"
    assert cron_of("auto", "night", "x") == cron_of("auto", "night", "x")
    assert cron_of("auto", "week", "x") != cron_of("auto", "week", "y")


def test_a_job_without_a_rule_is_told_where_to_write_one(world: Callable[..., World], five: JobRoot) -> None:
    """The run has no place for it: the file has."""
    done = run(world(), "retain_flights")
    assert not done.success
    said = repr([e.event_specific_data for e in done.all_events if e.is_step_failure])
    assert "jobs.flights.retention" in said
    assert "keep_last: 20" in said
