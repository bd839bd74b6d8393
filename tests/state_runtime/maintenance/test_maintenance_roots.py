"""Deleting savepoints and whole jobs: refused by name, a tombstone first, nothing of others, resumable until it is gone."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from maintenance_root import JOB, Death, FakeWorld, Job, Killed, dying
from model import CountingIds, FakeClock
from schedule import one_at_a_time

from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptManifest,
    Fenced,
    JobNotFound,
    MissingSnapshot,
    SnapshotExpired,
    SnapshotInUse,
)
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.maintenance.delete import roots as module
from state_runtime.maintenance.delete.roots import delete_root, delete_savepoint
from state_runtime.maintenance.delete.snapshots import Deleted
from state_runtime.materialize.records import claim
from state_runtime.snapshot.claim import Claim, claim_root
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.epoch_tasks import RunEpochs
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.paths import JOB_FILE, migration_path, pin_path, savepoint_path
from state_runtime.snapshot.pins import SnapshotPin, pin_snapshot
from state_runtime.snapshot.savepoint_record import SavepointRecord, create_savepoint, read_record, read_savepoint
from state_runtime.snapshot.term_files import write_epochs
from state_runtime.store import Store, open_store


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Somebody may act in the middle of another one's create."""
    with one_at_a_time():
        yield


@pytest.fixture(params=["local", "s3", "fake"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    if request.param == "local":
        store = open_store(str(tmp_path / "store"))
    elif request.param == "fake":
        store = FakeWorld().connect()
    else:
        url, options = request.getfixturevalue("s3_location")
        store = open_store(url, options)
    return Job(store).checkpoints(2).ended()


def removed(root: Store, *, clock: Clock | None = None, **options: Any) -> Deleted:
    return delete_root(root, clock=clock or FakeClock(), ids=CountingIds(9), owner="test", threads=1, **options)


def dropped(root: Store, name: str, *, clock: Clock | None = None, **options: Any) -> Deleted:
    return delete_savepoint(
        root, name, clock=clock or FakeClock(), ids=CountingIds(9), owner="test", threads=1, **options
    )


def savepoint(job: Job, name: str = "sp", **changes: Any) -> SavepointRecord:
    """A complete savepoint of the newest snapshot, as its owner makes one."""
    now_ms, last = job.clock.now_ms(), job.committer.last
    record = SavepointRecord(
        name, f"u-{name}", JOB, last.job_uid, "COMPLETED", "user", now_ms, "owner:1", now_ms, finished_at_ms=now_ms
    )
    record = replace(record, snapshot_id=last.snapshot_id, **changes)
    create_savepoint(job.root, record)
    folder = job.root.child(savepoint_path(name))
    folder.create(JOB_FILE, job.root.read(JOB_FILE, 1 << 20))
    copy_snapshot(job.root, last, folder, clock=job.clock, ids=job.ids)
    return record


def names(root: Store) -> set[str]:
    return {o.path for o in root.list_objects("")}


def test_a_deleted_job_leaves_nothing_and_another_can_begin_there(job: Job) -> None:
    job.fold()
    write_epochs(job.root, RunEpochs(term=1, run_uid="r", epochs=()))
    done = removed(job.root)
    assert (done.failures, done.snapshot_ids) == ((), (1, 2, 3, 4))
    assert names(job.root) == set()
    assert job.store.list_names("") == []
    again = Job(job.store).checkpoints(1)
    assert again.check() == [1, 2]


def test_of_a_deleted_job_what_its_deleter_records_there_may_stay(job: Job) -> None:
    """Another job can begin there all the same, and the record's numbers go on."""
    job.root.put(migration_path(1), b"somebody's record")
    done = removed(job.root, clock=job.clock, keep=("migration",))
    assert not done.failures
    assert [o.path for o in job.root.list_objects("")] == [migration_path(1)]
    Job(job.store).checkpoints(1).check()


def test_a_deleted_savepoint_leaves_nothing_and_the_job_is_as_it_was(job: Job) -> None:
    before = names(job.root)
    savepoint(job)
    savepoint(job, "other")
    dropped(job.root, "sp")
    assert names(job.root) == before | {n for n in names(job.root) if n.startswith("savepoints/other/")}
    assert job.check() == [1, 2, 3]
    assert job.check(job.root.child(savepoint_path("other"))) == [3]
    savepoint(job)
    assert read_savepoint(job.root, "sp").state == "COMPLETED"


def test_a_savepoint_is_not_harmed_by_the_deletion_of_what_it_was_copied_from(job: Job) -> None:
    """Its copy is its own: also where a copy is a hard link."""
    savepoint(job)
    folder = job.root.child(savepoint_path("sp"))
    with pytest.raises(SnapshotInUse, match="its savepoint 'sp'"):
        removed(job.root)
    elsewhere = job.store.child("elsewhere")
    for name in names(folder):
        elsewhere.put(name, folder.read(name, 1 << 30))
    removed(job.root, with_savepoints=True)
    assert names(job.root) == set()
    assert job.check(elsewhere) == [3]


# --- who is in the way -----------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
def fake(world: FakeWorld) -> Job:
    return Job(world.connect(), world.clock).checkpoints(2).ended()


def a_live_run(job: Job) -> str:
    job.beat()
    return r"run 1 \(process 1 on elsewhere\); stop it first"


def a_pin(job: Job) -> str:
    pin_snapshot(job.root, 2, reason="start", holder="job 'child'", clock=job.clock, ids=CountingIds(3))
    return "job 'child', which holds a start pin"


def a_fold(job: Job) -> str:
    assert claim(job.root, job.committer.last, clock=job.clock, ids=CountingIds(3)) is not None
    return "a materialization that reads it"


def a_claim(job: Job) -> str:
    claim_root(job.root, Claim("next", "child", "there/next", 0))
    return r"job 'next' \(there/next\), which has claimed it"


def a_savepoint(job: Job) -> str:
    savepoint(job)
    return "its savepoint 'sp'"


@pytest.mark.parametrize("holder", [a_live_run, a_pin, a_fold, a_claim, a_savepoint])
def test_a_job_that_somebody_needs_is_refused_and_they_are_named(fake: Job, holder: Callable[[Job], str]) -> None:
    said = holder(fake)
    with pytest.raises(SnapshotInUse, match=said):
        removed(fake.root, clock=fake.clock)
    assert read_boundary(fake.root).sequence == 0
    assert fake.check() == [1, 2, 3]


def test_the_claimer_may_delete_what_it_claimed(fake: Job) -> None:
    a_claim(fake)
    with pytest.raises(SnapshotInUse):
        removed(fake.root, claimed_by="another")
    removed(fake.root, claimed_by="child")
    assert names(fake.root) == set()


def test_a_pin_that_cannot_be_read_stops_everything(fake: Job) -> None:
    fake.root.put(pin_path(2, "x"), b"damaged")
    with pytest.raises(CorruptManifest):
        removed(fake.root)
    assert fake.check() == [1, 2, 3]


def test_a_savepoint_that_is_being_made_is_refused_and_a_stale_one_is_not(fake: Job) -> None:
    savepoint(fake, state="IN_PROGRESS", finished_at_ms=0)
    with pytest.raises(SnapshotInUse, match=r"owner:1, which is making it \(IN_PROGRESS\)"):
        dropped(fake.root, "sp", clock=fake.clock)
    fake.clock.advance_s(3600)
    dropped(fake.root, "sp", clock=fake.clock)
    with pytest.raises(MissingSnapshot):
        read_savepoint(fake.root, "sp")


def test_a_savepoint_that_a_child_copies_is_refused_and_named(fake: Job) -> None:
    savepoint(fake)
    folder = fake.root.child(savepoint_path("sp"))
    pin_snapshot(folder, 3, reason="start", holder="job 'child'", clock=fake.clock, ids=CountingIds(3))
    with pytest.raises(SnapshotInUse, match="job 'child', which holds a start pin"):
        dropped(fake.root, "sp", clock=fake.clock)
    assert read_savepoint(fake.root, "sp").state == "COMPLETED"
    assert fake.check(folder) == [3]


def test_an_unknown_savepoint_and_an_unknown_job_are_named(fake: Job) -> None:
    with pytest.raises(MissingSnapshot, match="no savepoint 'none'"):
        dropped(fake.root, "none")
    with pytest.raises(JobNotFound):
        removed(fake.store.child("none"))


def test_what_is_not_ours_stays_and_is_named(fake: Job, world: FakeWorld) -> None:
    fake.root.put("notes.txt", b"mine")
    done = removed(fake.root)
    assert [f.path for f in done.failures] == ["notes.txt"]
    assert names(fake.root) == {"notes.txt"}


# --- runs and pins at the same moment --------------------------------------------------------------------------------


def test_a_sleeping_run_never_commits_to_a_deleted_job(fake: Job, world: FakeWorld) -> None:
    """Scenario 64: from the tombstone on the root is unreadable as a whole."""

    def dies_behind_the_tombstone(operation: str, path: str) -> None:
        if operation != "create" and any(n.startswith("boundary/0") for n in world.names()):
            raise Killed

    with dying():
        removed(world.root(before=dies_behind_the_tombstone))
    assert read_boundary(fake.root).is_tombstone
    with pytest.raises(Fenced, match="was deleted as a whole"):
        fake.checkpoint()
    assert fake.catalog.snapshot_ids() == []
    with pytest.raises(Fenced):
        fake.start()
    with pytest.raises(SnapshotExpired):
        a_pin(fake)
    removed(fake.root)
    assert names(fake.root) == set()


def test_a_pin_at_any_moment_keeps_its_files_or_knows_that_it_came_too_late() -> None:
    """Its holder may still read all of the snapshot, although nobody finds it any more; a repetition ends the deletion."""
    prepared = FakeWorld()
    job = Job(prepared.connect(), prepared.clock).checkpoints(2).ended()
    outcomes = set()
    for at in range(1, 60):
        world = prepared.copy()
        holds: list[SnapshotPin] = []
        count = 0

        def before(operation: str, path: str, world: FakeWorld = world, at: int = at, holds: Any = holds) -> None:
            nonlocal count
            count += 1
            if count == at:
                try:
                    holds.append(
                        pin_snapshot(world.root(), 2, reason="copy", holder="c", clock=FakeClock(), ids=CountingIds(3))
                    )
                except SnapshotExpired:
                    return

        with suppress(SnapshotInUse):
            removed(world.root(before=before))
        outcomes.add(bool(holds))
        if holds:
            from state_runtime.reading.references import references

            manifest = job.catalog.manifest(2)
            assert all(world.root().exists(ref.path) for ref in references(world.root(), manifest))
            world.root().delete(holds[0].path)
        if any(n == JOB_FILE or n.startswith("boundary/0") for n in world.names()):
            removed(world.root())
        assert not world.names()
        if count < at:
            break
    assert outcomes == {True, False}


def test_without_the_look_after_the_tombstone_a_pin_that_counts_loses_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = module._refuse
    monkeypatch.setattr(
        module, "_refuse", lambda root, holders, given_up=False: None if given_up else real(root, holders)
    )
    with pytest.raises(AssertionError):
        test_a_pin_at_any_moment_keeps_its_files_or_knows_that_it_came_too_late()


def test_a_death_at_any_request_leaves_a_job_or_a_deleted_one_and_the_repetition_ends_it() -> None:
    prepared = FakeWorld()
    job = Job(prepared.connect(), prepared.clock).checkpoints(2).ended()
    savepoint(job)
    for at in range(1, 400):
        world = prepared.copy()
        death = Death(at)
        with dying():
            removed(world.root(before=death), with_savepoints=True)
        root = world.root()
        if root.exists(JOB_FILE) and not read_boundary(root).is_tombstone:
            job.check(root, rows=False)
        if world.names():
            removed(root, with_savepoints=True)
        assert not world.names()
        if death.count < at:
            break
    assert at > 30


def test_a_death_at_any_request_leaves_a_savepoint_or_one_that_is_being_deleted() -> None:
    prepared = FakeWorld()
    job = Job(prepared.connect(), prepared.clock).checkpoints(2).ended()
    before = prepared.names()
    savepoint(job)
    for at in range(1, 400):
        world = prepared.copy()
        death = Death(at)
        with dying():
            dropped(world.root(before=death), "sp")
        folder = world.root().child(savepoint_path("sp"))
        record = read_record(folder)
        if record is not None and record.state == "COMPLETED":
            assert job.check(folder, rows=False) == [3]
        if record is not None:
            dropped(world.root(), "sp")
        assert world.names() == before
        if death.count < at:
            break
    assert at > 15


def test_a_key_that_cannot_be_deleted_is_named_and_the_record_stays(fake: Job, world: FakeWorld) -> None:
    savepoint(fake)

    def refuse(operation: str, path: str) -> None:
        if operation == "delete" and "/savepoints/sp/changelog/" in path:
            raise PermissionError(errno.EACCES, "AccessDenied")

    done = dropped(world.root(before=refuse), "sp")
    assert done.failures
    assert read_savepoint(fake.root, "sp").state == "DELETING"
    assert dropped(fake.root, "sp").failures == ()


def test_a_savepoint_s_folder_that_was_copied_elsewhere_is_deleted_as_a_root(fake: Job) -> None:
    savepoint(fake)
    folder, copy = fake.root.child(savepoint_path("sp")), fake.store.child("copy")
    for name in names(folder):
        copy.put(name, folder.read(name, 1 << 30))
    removed(copy)
    assert names(copy) == set()
    assert fake.check(folder) == [3]


def test_an_older_record_never_counts_again_while_a_savepoint_goes(fake: Job, world: FakeWorld) -> None:
    """Records go from the oldest to the newest: one that says COMPLETED must not be the last."""
    savepoint(fake)
    order: list[str] = []
    dropped(
        world.root(before=lambda o, p: order.append(p) if o == "delete" and "savepoint" in p.split("/")[-1] else None),
        "sp",
    )
    assert [p.rpartition("/")[2] for p in order] == ["savepoint.json", "savepoint-2.json"]


def test_a_request_to_pin_in_a_folder_of_a_deleted_savepoint_is_told(fake: Job) -> None:
    savepoint(fake)
    folder = fake.root.child(savepoint_path("sp"))
    folder.put(
        "boundary/00000000000000000001.json",
        encode_document("boundary", replace(read_boundary(folder).tombstone(), sequence=1)),  # type: ignore[type-var]
    )
    with pytest.raises(SnapshotExpired):
        pin_snapshot(folder, 3, reason="start", holder="h", clock=fake.clock, ids=CountingIds(3))
