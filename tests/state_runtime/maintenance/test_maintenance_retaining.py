"""Retention of a job: read, planned, executed; stale plans are refused; what somebody needs is kept and says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from maintenance_root import DAY_S, JOB, Death, FakeWorld, Job, dying
from model import CountingIds
from schedule import one_at_a_time

from state_runtime.base.errors import CorruptManifest, InvalidConfiguration, MissingFile
from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.gc.plan import GcPlan
from state_runtime.maintenance.retention import apply
from state_runtime.maintenance.retention.apply import Retained, apply_retention, make_retention_plan
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.maintenance.retention.safety import dangers_of_retention
from state_runtime.snapshot.paths import manifest_path, savepoint_path
from state_runtime.snapshot.pins import pin_snapshot
from state_runtime.snapshot.savepoint_record import SavepointRecord, create_savepoint, list_savepoints
from state_runtime.store import open_store

LAST_2 = RetentionPolicy(keep_last=2)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Somebody may act in the middle of another one's create."""
    with one_at_a_time():
        yield


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
def job(world: FakeWorld) -> Job:
    """Snapshots 1 … 6."""
    return Job(world.connect(), world.clock).checkpoints(5)


def planned(job: Job, policy: RetentionPolicy = LAST_2, share_max: float = 1.0) -> RetentionPlan:
    return make_retention_plan(job.root, policy, clock=job.clock, share_max=share_max)


def applied(job: Job, plan: RetentionPlan, root: Any = None) -> Retained:
    return apply_retention(root or job.root, plan, clock=job.clock, ids=CountingIds(9), owner="test", threads=1)


def kept(plan: RetentionPlan) -> list[str]:
    return sorted(d.item.name for d in plan.kept)


def savepoint(job: Job, name: str, **changes: Any) -> None:
    now_ms = job.clock.now_ms()
    record = SavepointRecord(
        name, f"u-{name}", JOB, "j", "COMPLETED", "schedule", now_ms, "o", now_ms, finished_at_ms=now_ms
    )
    create_savepoint(job.root, replace(record, **changes))
    job.root.put(f"{savepoint_path(name)}/changelog/{1:020d}/x.seg", b"copied")


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_plan_is_shown_and_then_executed(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url, options = (str(tmp_path), None) if place == "local" else request.getfixturevalue("s3_location")
    job = Job(open_store(url, options)).checkpoints(5)
    plan = planned(job)
    assert job.check() == [1, 2, 3, 4, 5, 6]
    assert kept(plan) == ["5", "6"]
    assert applied(job, plan).snapshot_ids == (1, 2, 3, 4)
    assert job.check() == [5, 6]


def test_who_needs_a_snapshot_is_why_it_is_kept(job: Job) -> None:
    pin_snapshot(job.root, 2, reason="user", holder="somebody", clock=job.clock, ids=CountingIds(3), note="audit")
    why = {d.item.name: d.reasons for d in planned(job).decisions}
    assert why["2"] == ("a pin of somebody (audit)",)
    assert why["6"][0] == "the job's next run, which goes on from it"


def test_a_plan_says_what_it_would_free_and_not_how_large_what_it_deletes_is(job: Job) -> None:
    """Snapshots share most of their objects: what one that stays needs is not freed, and what several need is freed once."""
    job.fold()
    job.checkpoints(1)  # from here on the log of the older ones is needed by none that stays

    def data_bytes() -> int:
        return sum(found.bytes for folder in ("changelog", "tables") for found in job.root.list_objects(folder))

    plan, before = planned(job), data_bytes()
    applied(job, plan)
    assert plan.freed_bytes == before - data_bytes() > 0
    assert plan.freed_bytes < sum(d.item.bytes for d in plan.deleted)
    assert all(d.freed_bytes == 0 for d in plan.kept)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_listing_of_files_that_is_gone_is_damage_only_if_its_snapshot_is_still_there(
    job: Job, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """The driver gives checkpoints up while a plan is made. Between a manifest and the listing that it names, the plan
    ended as if the store were damaged."""
    driver = planned(job)

    def gone(objects: Any, manifest: Any) -> None:
        monkeypatch.undo()
        if given_up:
            applied(job, driver)
        raise MissingFile(f"files/{manifest.snapshot_id}.json is not there")

    monkeypatch.setattr(apply, "read_listing", gone)
    if given_up:
        assert kept(planned(job)) == ["5", "6"]
        assert planned(job).deleted == []
    else:
        with pytest.raises(MissingFile):
            planned(job)


def test_a_share_that_is_too_large_is_refused_and_nothing_is_written(job: Job, world: FakeWorld) -> None:
    before = dict(world.objects)
    with pytest.raises(InvalidConfiguration, match="4 of 6"):
        planned(job, share_max=0.5)
    assert world.objects == before


def test_newer_snapshots_do_not_make_a_plan_stale(job: Job) -> None:
    """A running job commits every few seconds."""
    plan = planned(job)
    job.checkpoints(3)
    assert applied(job, plan).snapshot_ids == (1, 2, 3, 4)
    assert job.check() == [5, 6, 7, 8, 9]


def test_a_plan_is_stale_once_somebody_needs_what_it_deletes(job: Job) -> None:
    plan = planned(job)
    pin_snapshot(job.root, 3, reason="copy", holder="copier", clock=job.clock, ids=CountingIds(3))
    with pytest.raises(InvalidConfiguration, match=r"stale: checkpoint 3 would be kept now \(copier"):
        applied(job, plan)
    assert job.check() == [1, 2, 3, 4, 5, 6]


def test_a_plan_of_another_job_or_an_old_one_is_refused(job: Job, world: FakeWorld) -> None:
    plan = planned(job)
    with pytest.raises(InvalidConfiguration, match="was made for job"):
        applied(job, replace(plan, made=replace(plan.made, job_uid="other")))
    world.clock.advance_s(8 * DAY_S)
    with pytest.raises(InvalidConfiguration, match="days old"):
        applied(job, plan)
    assert job.check() == [1, 2, 3, 4, 5, 6]


def test_an_altered_plan_is_no_plan(job: Job, tmp_path: Path) -> None:
    plan, file = planned(job), tmp_path / "plan"
    plan.write(file)
    assert RetentionPlan.read(file) == plan
    with pytest.raises(InvalidConfiguration, match="is a plan of retention and no plan of garbage collection"):
        GcPlan.read(file)
    file.write_bytes(file.read_bytes().replace(b'"keep_last":2', b'"keep_last":1'))
    with pytest.raises(CorruptManifest):
        RetentionPlan.read(file)


def test_a_death_at_any_request_is_ended_by_the_same_plan() -> None:
    prepared = FakeWorld()
    job = Job(prepared.connect(), prepared.clock).checkpoints(4)
    plan = planned(job)
    for at in range(1, 400):
        world = prepared.copy()
        death = Death(at)
        with dying():
            applied(job, plan, world.root(before=death))
        job.check(world.root(), rows=False)
        applied(job, plan, world.root())
        assert job.check(world.root(), rows=False) == [4, 5]
        assert not [n for n in world.names() if n.startswith(manifest_path(1))]
        if death.count < at:
            break
    assert at > 30


def test_a_manifest_that_cannot_be_read_is_no_reason_to_delete_others(job: Job) -> None:
    job.root.put(manifest_path(3), b"damaged")
    with pytest.raises(CorruptManifest):
        planned(job)


def test_savepoints_are_counted_apart_and_those_of_users_stay(job: Job) -> None:
    for number in range(4):
        job.clock.advance_s(60)
        savepoint(job, f"nightly-{number}", tags=("night",) if number == 0 else ())
    savepoint(job, "mine", trigger="user")
    savepoint(job, "busy", state="IN_PROGRESS", finished_at_ms=0)
    plan = planned(job, RetentionPolicy(keep_last=2, keep_tags=("night",)))
    assert kept(plan) == ["5", "6", "busy", "mine", "nightly-0", "nightly-3"]
    assert applied(job, plan).savepoints == ("nightly-2", "nightly-1")
    assert {r.name for r in list_savepoints(job.root)} == {"nightly-0", "nightly-3", "busy", "mine"}
    assert job.check() == [5, 6]


def test_the_look_before_an_unattended_deletion_stands_up_for_savepoints_whatever_the_plan_says(job: Job) -> None:
    """Apart from what made the plan: the newest that is complete, those of users, and those that somebody is at work on."""
    for number, state in enumerate(("COMPLETED", "COMPLETED", "FAILED")):
        job.clock.advance_s(60)
        savepoint(job, f"nightly-{number}", state=state)
    savepoint(job, "mine", trigger="user", requested_at_ms=0)
    savepoint(job, "busy", state="IN_PROGRESS", finished_at_ms=0)
    plan = planned(job)
    assert not dangers_of_retention(job.root, plan, clock=job.clock)
    spoilt = tuple(replace(d, reasons=()) if d.item.kind == "savepoint" else d for d in plan.decisions)
    assert sum(d.item.kind == "savepoint" for d in spoilt) == 5
    assert sorted(dangers_of_retention(job.root, replace(plan, decisions=spoilt), clock=job.clock)) == [
        "savepoint 'busy' is IN_PROGRESS: o is at work on it",
        "savepoint 'mine' was asked for by a user, and only a user deletes it",
        "savepoint 'nightly-1' is the newest that is complete",
    ]
