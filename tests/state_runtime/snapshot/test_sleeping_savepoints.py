"""Whoever works on a savepoint and slept wakes in a root that is another's by now: it says nothing there.

Played as in test_sleepers.py: asleep once before each request. The next job, or the older backup, has a savepoint of the
same name, with a record and pins of its own. What the one request does that it was at remains: no store has a conditional
write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from maintenance_root import FakeWorld, Job
from model import CountingIds
from test_sleepers import REQUESTS_MAX, Asleep, one_at_a_time, ownership_of, play, restored

from state_runtime.base.errors import SnapshotInUse, StillstateError
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.copy.make_savepoint import (
    SavepointWork,
    holder_of,
    resume_savepoint,
    savepoint_of_stopped,
)
from state_runtime.snapshot.control import open_requests, request_savepoint
from state_runtime.snapshot.pins import pin_snapshot
from state_runtime.snapshot.savepoint_record import SavepointRecord, create_savepoint, read_savepoint, record_path
from state_runtime.store import Store

__all__ = ["one_at_a_time"]

Work = Callable[[Store], Any]


def begun(world: FakeWorld, job: Job, name: str, **changes: Any) -> SavepointRecord:
    """A savepoint that somebody has begun, and the pin of its snapshot."""
    now_ms, snapshot_id = world.clock.now_ms(), job.committer.last.snapshot_id
    record = SavepointRecord(
        name=name,
        uid=job.ids.uid(),
        job=job.name,
        job_uid=job.committer.info.uid,
        state="IN_PROGRESS",
        trigger="user",
        requested_at_ms=now_ms,
        owner="h:9",
        heartbeat_at_ms=now_ms,
        snapshot_id=snapshot_id,
        term=job.committer.term.term,
    )
    record = replace(record, **changes)
    create_savepoint(world.root(), record)
    pinned(world, job, name)
    return record


def pinned(world: FakeWorld, job: Job, name: str) -> None:
    snapshot_id = job.committer.last.snapshot_id
    pin_snapshot(world.root(), snapshot_id, reason="savepoint", holder=holder_of(name), clock=world.clock, ids=job.ids)


def of_the_sleeper(world: FakeWorld, job: Job, root: Store) -> SavepointWork:
    prove = ownership_of(job, root).check
    return SavepointWork(root, "h:1", world.clock, CountingIds(9), wait=lambda seconds: True, prove=prove)


def makes(world: FakeWorld, old: Job) -> Work:
    return lambda root: savepoint_of_stopped(of_the_sleeper(world, old, root), "s")


def goes_on(world: FakeWorld, old: Job) -> Work:
    begun(world, old, "s")
    pinned(world, old, "s")
    return lambda root: resume_savepoint(of_the_sleeper(world, old, root), "s", force=True)


def goes_on_after_a_failure(world: FakeWorld, old: Job) -> Work:
    """The files that it is to copy cannot be read, so the attempt fails, and so does the next one."""
    begun(world, old, "s")
    for name in [n for n in world.objects if n.endswith(".seg")]:
        world.objects[name] = b"damaged"
    return lambda root: resume_savepoint(of_the_sleeper(world, old, root), "s", force=True)


def finds_it_complete(world: FakeWorld, old: Job) -> Work:
    savepoint_of_stopped(SavepointWork(world.root(), "h:9", world.clock, CountingIds(31)), "s")
    pinned(world, old, "s")
    pinned(world, old, "s")
    return lambda root: resume_savepoint(of_the_sleeper(world, old, root), "s")


def runs(world: FakeWorld, old: Job) -> Work:
    """A run that is asked for two savepoints."""
    requests = [
        request_savepoint(world.root(), 1, name, clock=world.clock, ids=CountingIds(40 + i))
        for i, name in enumerate(("s", "t"))
    ]
    last = old.committer.last

    def work(root: Store) -> None:
        savepoints = Savepoints(
            root, old.committer.info, 1, clock=world.clock, ids=CountingIds(9), prove=ownership_of(old, root).check
        )
        for request in requests:
            savepoints.hear(request)
        savepoints.begin(last)
        while savepoints.do_one():
            pass
        savepoints.close("it ended")

    return work


def is_started_again(world: FakeWorld, old: Job) -> Work:
    """What a run finds that its predecessor has left: requests without an answer, pins of what is complete, and work."""
    for i, name in enumerate(("a", "b", "c")):
        request_savepoint(world.root(), 1, name, clock=world.clock, ids=CountingIds(40 + i))
    savepoint_of_stopped(SavepointWork(world.root(), "h:9", world.clock, CountingIds(31)), "t")
    pinned(world, old, "t")
    pinned(world, old, "t")
    begun(world, old, "s")

    def work(root: Store) -> None:
        savepoints = Savepoints(
            root, old.committer.info, 2, clock=world.clock, ids=CountingIds(9), prove=ownership_of(old, root).check
        )
        savepoints.look_back()
        while savepoints.do_one():
            pass

    return work


def theirs(world: FakeWorld, new: Job) -> None:
    """The next job's own savepoint of that name, whose snapshot it keeps."""
    begun(world, new, "s", owner="h:8")


WAYS = [makes, goes_on, goes_on_after_a_failure, finds_it_complete, runs, is_started_again]


def is_said(name: str) -> bool:
    """What readers and deletions go by. Data of copies has names that nobody else draws, and is garbage."""
    folder, _, last = name.rpartition("/")
    return folder.endswith(("/pins", "/control")) or last == "manifest.json" or last.startswith("savepoint")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_work_on_a_savepoint_that_slept_says_nothing_in_the_next_jobs_root(way: Callable[..., Work]) -> None:
    assert not play(way, 4, then=theirs, counts=is_said)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_work_on_a_savepoint_that_slept_says_nothing_in_a_backup_where_the_job_goes_on(
    way: Callable[..., Work],
) -> None:
    """Most names are the same there: terms, requests, the savepoint's number, and the pins that were there before."""
    world = FakeWorld()
    old = Job(world.connect(), world.clock).checkpoints(2)
    work = way(world, old)
    backup = dict(world.objects)
    old.checkpoints(2)
    first = dict(world.objects)
    restored(world, backup)
    going_on = Job(world.connect(), world.clock, prefix=6).checkpoints(2)
    with contextlib.suppress(StillstateError):
        begun(world, going_on, "s", owner="h:8")
    second = dict(world.objects)
    spoilt = []
    for at in range(1, REQUESTS_MAX):
        restored(world, first)
        asleep = Asleep(at, lambda: restored(world, second))
        with contextlib.suppress(StillstateError, FileNotFoundError):
            work(world.root(before=asleep))
        if asleep.count < at:
            break
        changed = {n for n in {*second, *world.objects} if is_said(n) and world.objects.get(n) != second.get(n)}
        if changed - {asleep.slept_before.partition(" ")[2]}:
            spoilt.append(f"asleep before {asleep.slept_before}: {sorted(changed)}")
    assert not spoilt


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_work_on_a_savepoint_is_done_by_whoever_does_not_sleep(way: Callable[..., Work]) -> None:
    """Else the laws above would hold of work that does nothing."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(4)
    work = way(world, job)
    if way is is_started_again:
        job.start()
    before = dict(world.objects)
    with contextlib.suppress(StillstateError):
        work(world.root())
    assert [n for n in {*before, *world.objects} if is_said(n) and world.objects.get(n) != before.get(n)]
    if way is not goes_on_after_a_failure:
        assert read_savepoint(world.root(), "s").state == "COMPLETED"
        assert not [n for n in world.objects if "/pins/" in n]
        assert not open_requests(world.root(), before_term=9)
    assert record_path(1) == "savepoint.json"


# --- a store that hangs right after COMPLETED -----------------------------------------------------------------------


def hangs_after_completed(world: FakeWorld, looks: int) -> tuple[Callable[[str, str], None], list[str]]:
    """What is done before each request: the owner sleeps before he writes COMPLETED, and somebody removes the savepoint
    meanwhile; then the store does not answer so many looks at its folder."""
    failed: list[str] = []

    def before(operation: str, path: str) -> None:
        record = world.objects.get(path)
        is_copied = any("/savepoints/" in n and n.endswith("manifest.json") for n in world.objects)
        if operation == "put" and record is not None and b"IN_PROGRESS" in record and is_copied:
            for name in [n for n in world.objects if "/savepoints/" in n]:
                del world.objects[name]
        completed = any(b"COMPLETED" in world.objects[n] for n in world.objects if n.endswith("savepoint.json"))
        if completed and operation != "put" and "/savepoints/" in path and len(failed) < looks:
            failed.append(f"{operation} {path}")
            raise TimeoutError("no answer")

    return before, failed


def savepoint_names_in(world: FakeWorld) -> list[str]:
    return [n for n in world.objects if "/savepoints/" in n]


def test_a_look_that_the_store_does_not_answer_is_repeated() -> None:
    """Else a record without data would stay: a savepoint that nobody can start from."""
    world = FakeWorld()
    Job(world.connect(), world.clock).checkpoints(2)
    before, failed = hangs_after_completed(world, looks=9)
    work = SavepointWork(world.root(before=before), "h:1", world.clock, CountingIds(8), wait=lambda seconds: False)
    with pytest.raises(SnapshotInUse, match="deleted while its owner"):
        savepoint_of_stopped(work, "s")
    assert len(failed) == 9
    assert not savepoint_names_in(world)


@pytest.mark.parametrize("who", ["the next run", "--resume"])
def test_a_look_that_the_store_never_answered_is_made_by_whoever_comes_next(who: str) -> None:
    """The pin says that nobody has looked yet."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    before, failed = hangs_after_completed(world, looks=REQUESTS_MAX)
    work = SavepointWork(world.root(before=before), "h:1", world.clock, CountingIds(8), wait=lambda seconds: False)
    savepoint_of_stopped(work, "s")
    assert failed
    assert len(savepoint_names_in(world)) == 1
    assert [n for n in world.objects if "/pins/" in n]
    if who == "--resume":
        with pytest.raises(SnapshotInUse, match="deleted while its owner"):
            resume_savepoint(SavepointWork(world.root(), "h:2", world.clock, CountingIds(9)), "s")
    else:
        savepoints = Savepoints(world.root(), job.committer.info, 2, clock=world.clock, ids=CountingIds(9))
        savepoints.look_back()
        while savepoints.do_one():
            pass
    assert not savepoint_names_in(world)


def test_the_record_of_a_damaged_savepoint_stays() -> None:
    """Its manifest is lost and its data is there: that is for people to look at, and `verify` says so."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    savepoint_of_stopped(SavepointWork(world.root(), "h:1", world.clock, CountingIds(8)), "s")
    (lost,) = [n for n in savepoint_names_in(world) if n.endswith("/manifest.json")]
    del world.objects[lost]
    pinned(world, job, "s")
    before = savepoint_names_in(world)
    resume_savepoint(SavepointWork(world.root(), "h:2", world.clock, CountingIds(9)), "s")
    assert savepoint_names_in(world) == before
    assert not [n for n in world.objects if "/pins/" in n]
