"""Somebody who slept wakes in a root that is another's by now: he changes nothing there.

Each test plays the work of a sleeper once for each of its requests to the store: before that request the root is deleted and a new
job of the same name begins in its place (or an older backup is put back), and then the sleeper goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from maintenance_root import FakeWorld, Job
from model import CountingIds

from state_runtime.base.errors import Fenced, SnapshotInUse, StillstateError
from state_runtime.base.settings import JobSettings
from state_runtime.driver.heartbeat import Heartbeat
from state_runtime.driver.savepoints import Savepoints
from state_runtime.maintenance.copy.savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.maintenance.marks import Marker
from state_runtime.maintenance.retention.background import BackgroundRetention
from state_runtime.materialize import materialize
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.paths import term_path
from state_runtime.store import Store

DAY_MS = 86_400_000
REQUESTS_MAX = 400


class Asleep:
    """Falls asleep once, before the n-th request; `wakes_in` is what happens to the store meanwhile."""

    def __init__(self, at: int, wakes_in: Callable[[], None]) -> None:
        self.at = at
        self.count = 0
        self.wakes_in = wakes_in
        self.slept_before = ""

    def __call__(self, operation: str, path: str) -> None:
        self.count += 1
        if self.count == self.at:
            self.slept_before = f"{operation} {path}"
            self.wakes_in()


Make = Callable[[FakeWorld, Job], Callable[[Store], Any]]


def play(make: Make, epochs: int, begins: int = 1) -> list[str]:
    """What a sleeper spoilt of the next job, by the request before which it slept."""
    world = FakeWorld()
    old = Job(world.connect(), world.clock)
    for _ in range(epochs):
        old.checkpoint()
    work = make(world, old)
    first, at_ms = dict(world.objects), world.clock.at_ms
    # The job is deleted while its run was not heard of for a day, and begins anew with rows of its own.
    world.clock.at_ms += DAY_MS
    delete_root(world.root(), clock=world.clock, ids=CountingIds(77), owner="h:2", threads=1)
    assert not world.names()
    new = Job(world.connect(), world.clock, prefix=6)
    for _ in range(epochs // 2):
        new.checkpoint()
    return spoilt_by(world, work, first, at_ms, dict(world.objects), begins)


def spoilt_by(
    world: FakeWorld,
    work: Callable[[Store], Any],
    first: dict[str, bytes],
    at_ms: int,
    second: dict[str, bytes],
    begins: int = 1,
) -> list[str]:
    """The work is begun in the `first` content of the store, and wakes in the `second`.

    Args:
        begins: the first request before which it sleeps.
    """

    def becomes(objects: dict[str, bytes]) -> None:
        world.objects.clear()
        world.objects.update(objects)

    spoilt, later_ms = [], world.clock.at_ms
    for at in range(begins, REQUESTS_MAX):
        becomes(first)
        world.clock.at_ms = at_ms

        def meanwhile() -> None:
            becomes(second)
            world.clock.at_ms = later_ms

        asleep = Asleep(at, meanwhile)
        with contextlib.suppress(StillstateError, FileNotFoundError):
            work(world.root(before=asleep))
        if asleep.count < at:
            assert at > begins + 5, "the work asked the store for nothing"
            return spoilt
        # The one deletion that it was at is the gap that remains: a store has no conditional delete.
        lost = [n for n in second if world.objects.get(n) != second[n] and asleep.slept_before != f"delete {n}"]
        left = [n for n in world.objects if n not in second]
        if lost or left:
            spoilt.append(f"asleep before {asleep.slept_before}: lost {sorted(lost)[:3]}, left {sorted(left)[:3]}")
    raise AssertionError(f"after {REQUESTS_MAX} requests the work was not over")


def _in_place(*_: Any) -> Any:
    class Pool:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return

        map = staticmethod(map)

    return Pool()


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a pool would make the n-th request another one each time."""
    monkeypatch.setattr("state_runtime.maintenance.delete.snapshots.ThreadPoolExecutor", lambda *_, **__: _in_place())
    monkeypatch.setattr("state_runtime.maintenance.retention.background._THREADS", 1)


def test_retention_that_slept_deletes_nothing_of_the_next_job_in_its_root() -> None:
    """Invariant 4: ids begin anew with the next job, and what the sleeper knows of them is of the one before."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        def work(root: Store) -> None:
            settings = JobSettings(retained_checkpoints=3)
            retention = BackgroundRetention(root, settings, CountingIds(8), world.clock, ownership_of(old, root))
            retention._round([old.catalog.manifest(i) for i in old.catalog.snapshot_ids()])

        return work

    assert not play(make, 20)


def ownership_of(job: Job, root: Store) -> Any:
    return replace(job.committer.ownership, root=root)


def test_a_collection_that_slept_deletes_nothing_of_the_next_job() -> None:
    """The same, of `stillstate gc`; and it leaves no boundary, which would keep the new job from ever starting."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        delete_snapshots(world.root(), [2, 3], clock=world.clock, ids=CountingIds(9), threads=1)
        world.clock.at_ms += DAY_MS
        old.checkpoint()
        plan = plan_gc(world.root(), clock=world.clock, min_age_s=0, unsafe_min_age=True)
        return lambda root: apply_gc(root, plan, clock=world.clock, ids=CountingIds(8), owner="h:1", threads=1)

    assert not play(make, 8)


def test_a_deletion_of_snapshots_that_slept_leaves_the_next_job_alone() -> None:
    """A boundary that it leaves would give up the first snapshots of the new job, and the job with them."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        return lambda root: delete_snapshots(
            root, [2, 3, 4], clock=world.clock, ids=CountingIds(8), marker=Marker(root, world.clock), threads=1
        )

    # Before it has read job.json twice it knows of no job: then it is the new one's snapshots that it was asked to delete.
    assert not play(make, 8, begins=3)


def test_a_deletion_of_the_root_that_slept_leaves_the_next_job_alone() -> None:
    """Somebody else deleted it meanwhile, and a new job began: its tombstone would be that one's end."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        world.clock.at_ms += DAY_MS
        return lambda root: delete_root(root, clock=world.clock, ids=CountingIds(8), owner="h:1", threads=1)

    assert not play(make, 4)


# --- an older backup in the place of the root ---------------------------------------------------------------------


def restored(world: FakeWorld, backup: dict[str, bytes]) -> None:
    """The folder is removed, and an older copy of it put in its place."""
    world.objects.clear()
    world.objects.update(backup)


@pytest.fixture
def hung() -> tuple[FakeWorld, Job, dict[str, bytes]]:
    """A run that hangs after its fifth checkpoint, and a backup that was made after its second."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    backup = dict(world.objects)
    return world, job.checkpoints(3), backup


def test_a_run_that_hung_commits_nothing_to_a_backup_that_was_put_in_its_place(
    hung: tuple[FakeWorld, Job, dict[str, bytes]],
) -> None:
    """Its next snapshot would name segments that are not there, and be the newest one."""
    world, job, backup = hung
    restored(world, backup)
    with pytest.raises(Fenced, match="replaced while this run"):
        job.checkpoint()
    assert [n for n in world.objects if "/snapshots/" in n] == [n for n in backup if "/snapshots/" in n]


def test_a_run_that_hung_does_not_fence_the_one_that_goes_on_from_a_backup(
    hung: tuple[FakeWorld, Job, dict[str, bytes]],
) -> None:
    """The live run has come to the very snapshot that the hung one ended with; the next id is free for both."""
    world, job, backup = hung
    restored(world, backup)
    live = Job(world.connect(), world.clock, prefix=6)
    while live.committer.last.snapshot_id < job.committer.last.snapshot_id:
        live.checkpoint()
    with pytest.raises(Fenced):
        job.checkpoint()
    live.checkpoint()


def test_a_run_whose_new_segment_went_with_the_root_commits_no_manifest_that_names_it(
    hung: tuple[FakeWorld, Job, dict[str, bytes]],
) -> None:
    """The backup is of this moment: only what was written since is missing."""
    world, job, _ = hung
    backup = dict(world.objects)
    job.writer.manifest = job.committer.last
    draft = job.writer.epoch({("k", 0.0): (1, "x")})
    restored(world, backup)
    with pytest.raises(Fenced, match="just written"):
        job.committer.commit(draft)


def test_a_run_whose_term_is_another_runs_by_now_commits_nothing(
    hung: tuple[FakeWorld, Job, dict[str, bytes]],
) -> None:
    """A backup that is older than the run: the next run that starts there has its term."""
    world, job, _ = hung
    term = f"/store/job/{term_path(job.committer.term.term)}"
    other = replace(job.committer.term, run_uid="another-run")
    world.objects[term] = encode_document("term", other)
    before = dict(world.objects)
    with pytest.raises(Fenced, match="another run holds the term"):
        job.checkpoint()
    assert [n for n in world.objects if "/snapshots/" in n] == [n for n in before if "/snapshots/" in n]


def test_retention_that_slept_deletes_nothing_of_a_backup_in_which_the_job_goes_on() -> None:
    """The ids are those of the same job, and its uid is the same: the newer run that has fenced this one tells it."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(12)
    backup = dict(world.objects)
    job.checkpoints(8)
    first, manifests = dict(world.objects), [job.catalog.manifest(i) for i in job.catalog.snapshot_ids()]
    at_ms = world.clock.at_ms
    restored(world, backup)
    world.clock.at_ms += DAY_MS
    Job(world.connect(), world.clock, prefix=6).checkpoints(9)
    second = dict(world.objects)

    def work(root: Store) -> None:
        settings = JobSettings(retained_checkpoints=3)
        retention = BackgroundRetention(root, settings, CountingIds(8), world.clock, ownership_of(job, root))
        retention._round(manifests)

    spoilt = spoilt_by(world, work, first, at_ms, second)
    # Between the create of a boundary and the proof before it is a gap of one request.
    assert not [s for s in spoilt if "asleep before create" not in s]


# --- the other threads of a run -----------------------------------------------------------------------------------


def test_a_fold_that_slept_leaves_no_pin_and_no_record_in_the_next_jobs_root() -> None:
    """Both have a number, and the next job counts from 1; its tables have names of their own, and nothing names them."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        def work(root: Store) -> None:
            prove, last = ownership_of(old, root).check, old.committer.last
            materialize(root, last, "major", clock=world.clock, ids=CountingIds(8), prove=prove)

        return work

    gaps = ("asleep before create", "asleep before list /store/job/materializations")
    assert not [s for s in play(make, 4) if "/materializations/" in s and not s.startswith(gaps)]


def test_a_heartbeat_that_slept_does_not_speak_for_the_next_jobs_run() -> None:
    """Terms begin anew: its file has the name of the new run's."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        def work(root: Store) -> None:
            old.committer.ownership = ownership_of(old, root)
            savepoints = Savepoints(root, old.committer.info, 1, clock=world.clock, ids=CountingIds(8))
            beat = Heartbeat(root, old.committer, 1.0, world.clock, threading.Event(), savepoints)
            for _ in range(3):
                beat._beat()

        return work

    spoilt = play(make, 4)
    assert not [s for s in spoilt if "asleep before put" not in s]


def test_a_savepoint_that_was_deleted_while_its_owner_slept_is_not_said_to_be_complete() -> None:
    """Its folder is empty by then: a record without data would be a savepoint that nobody can start from."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)

    def sleeps(operation: str, path: str) -> None:
        record = world.objects.get(path)
        if operation == "put" and record is not None and b"IN_PROGRESS" in record and job_is_copied(world):
            for name in [n for n in world.objects if "/savepoints/" in n]:
                del world.objects[name]

    work = SavepointWork(world.root(before=sleeps), "h:1", world.clock, CountingIds(8), wait=lambda seconds: True)
    with pytest.raises(SnapshotInUse, match="deleted while its owner"):
        savepoint_of_stopped(work, "s")
    assert not [n for n in world.objects if "/savepoints/" in n]
    job.check()


def job_is_copied(world: FakeWorld) -> bool:
    return any("/savepoints/" in n and n.endswith("manifest.json") for n in world.objects)
