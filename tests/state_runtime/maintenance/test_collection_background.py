"""What nobody needs goes without a person: once a day, beside the driver's epochs, by the rules of `stillstate gc`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from maintenance_root import DAY_S, JOB, FakeWorld, Job
from model import CountingIds

from state_runtime.base.errors import Fenced
from state_runtime.maintenance.gc.background import EVERY_S, FIRST_AFTER_S, BackgroundCollection
from state_runtime.materialize import materialize
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import SavepointRecord, create_savepoint
from state_runtime.store import Store
from tests.job_settings import job_settings


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
def job(world: FakeWorld) -> Job:
    return Job(world.connect(), world.clock).checkpoints(3)


def collection(job: Job, root: Store | None = None, **changes: Any) -> BackgroundCollection:
    root = root or job.root
    proof = replace(job.committer.ownership, root=root)
    return BackgroundCollection(root, job_settings(**changes), CountingIds(8), job.clock, proof, "h:1")


def savepoint(job: Job, name: str, state: Any) -> None:
    now_ms = job.clock.now_ms()
    record = SavepointRecord(
        name=name,
        uid=f"u-{name}",
        job=JOB,
        job_uid="j",
        state=state,
        trigger="user",
        requested_at_ms=now_ms,
        owner="o",
        heartbeat_at_ms=now_ms,
        finished_at_ms=now_ms,
    )
    create_savepoint(job.root, record)
    job.root.put(f"{savepoint_path(name)}/changelog/{1:020d}/x.seg", b"copied")


def abandoned(job: Job, world: FakeWorld) -> set[str]:
    """What is left of a failed savepoint and of a fold that nobody adopted."""
    before = world.names()
    savepoint(job, "bad", "FAILED")
    materialize(job.root, job.committer.last, "major", clock=job.clock, ids=job.ids)
    return {n for n in world.names() - before if n.startswith(("savepoints/bad", "tables/"))}


def collected(job: Job, collection: BackgroundCollection) -> set[str]:
    collection.committed()
    collection.join(60)
    job.check()
    return {o.path for o in job.root.list_objects("")}


def test_what_failed_savepoints_and_unadopted_folds_left_goes_without_a_person(job: Job, world: FakeWorld) -> None:
    garbage = abandoned(job, world)
    savepoint(job, "good", "COMPLETED")
    at_work = collection(job)
    job.clock.advance_s(8 * DAY_S)
    job.checkpoint()
    left = collected(job, at_work)
    assert garbage
    assert not garbage & left
    assert at_work.collected >= len(garbage) - 2, "the two objects of the savepoint count as one savepoint"
    assert at_work.failures_in_a_row == 0
    assert len([n for n in left if n.startswith("savepoints/good")]) == 2


def test_nothing_younger_than_the_floor_goes(job: Job, world: FakeWorld) -> None:
    """A fold may be adopted by the next checkpoint, and a savepoint that failed be looked at."""
    garbage = abandoned(job, world)
    at_work = collection(job)
    job.clock.advance_s(DAY_S / 2)
    job.checkpoint()
    assert garbage <= collected(job, at_work)
    assert at_work.collected == 0


def test_a_root_is_listed_once_a_day_and_not_by_runs_that_end_soon(job: Job, world: FakeWorld) -> None:
    requests: list[str] = []
    at_work = collection(job, world.root(before=lambda operation, _: requests.append(operation)))
    for seconds, due in ((0, False), (FIRST_AFTER_S - 1, False), (2, True), (EVERY_S / 2, False), (EVERY_S / 2, True)):
        job.clock.advance_s(seconds)
        requests.clear()
        collected(job, at_work)
        assert bool(requests) is due, seconds


def test_who_keeps_everything_keeps_this_too(job: Job, world: FakeWorld) -> None:
    garbage = abandoned(job, world)
    at_work = collection(job, retained_checkpoints=0)
    job.clock.advance_s(8 * DAY_S)
    job.checkpoint()
    assert garbage <= collected(job, at_work)


def test_a_collection_that_fails_is_tried_again_and_fails_no_checkpoint(job: Job, world: FakeWorld) -> None:
    broken = True

    def before(operation: str, path: str) -> None:
        if broken and operation == "list":
            raise PermissionError(13, "no")

    garbage = abandoned(job, world)
    at_work = collection(job, world.root(before=before))
    job.clock.advance_s(8 * DAY_S)
    job.checkpoint()
    assert garbage <= collected(job, at_work)
    assert at_work.failures_in_a_row == 1
    broken = False
    job.clock.advance_s(3_601)
    assert not garbage & collected(job, at_work)
    assert at_work.failures_in_a_row == 0


def test_a_run_that_was_fenced_collects_nothing(job: Job, world: FakeWorld) -> None:
    """Neither now nor later: the next run does."""
    garbage, requests = abandoned(job, world), list[str]()
    at_work = collection(job, world.root(before=lambda operation, _: requests.append(operation)))
    job.clock.advance_s(8 * DAY_S)
    job.start()
    job.checkpoint()
    assert garbage <= collected(job, at_work)
    with pytest.raises(Fenced):
        at_work._proof.check()
    job.clock.advance_s(2 * DAY_S)
    requests.clear()
    assert garbage <= collected(job, at_work)
    assert not requests, "it is not asked again whose the root is"
    assert not garbage & collected(job, fresh(job))


def fresh(job: Job) -> BackgroundCollection:
    at_work = collection(job)
    job.clock.advance_s(FIRST_AFTER_S)
    return at_work
