"""Somebody who slept wakes in a root that is another's by now: he changes nothing there.

Each test plays the work of a sleeper once for each of its requests to the store: before that request the root is deleted and a new
job of the same name begins in its place (or an older backup is put back), and then the sleeper goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from maintenance_root import FakeWorld, Job, dies_at_first_delete, dying
from model import CountingIds, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.base.errors import Fenced, SnapshotInUse, StillstateError
from state_runtime.base.progress import Progress
from state_runtime.base.settings import JobSettings, RetentionSettings, UploadSettings
from state_runtime.changelog.inflight import InflightPass, RowsLeft
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import begin_segment
from state_runtime.driver.heartbeat import Heartbeat
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.driver.task_history import TaskHistory, epoch_of
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.maintenance.delete.claimed import ClaimEnding, end_claim
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.delete.snapshots import delete_snapshots, give_up, remove_given_up
from state_runtime.maintenance.gc.background import BackgroundCollection
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.maintenance.marks import Marker, read_existing
from state_runtime.maintenance.retention.background import BackgroundRetention
from state_runtime.materialize import materialize
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import Claim, claim_root
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import request_savepoint
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.expiry_boundary import NO_BOUNDARY
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import InflightNumbers, OpenBatch, RowsLayout
from state_runtime.snapshot.ownership import JobProof
from state_runtime.snapshot.paths import manifest_path, term_path
from state_runtime.snapshot.pins import pin_snapshot, read_pins, unpin
from state_runtime.store import Store
from state_runtime.task.acknowledgement import Acknowledgement

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


def one_after_another(*hooks: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """All of them before each request."""

    def before(operation: str, path: str) -> None:
        for hook in hooks:
            hook(operation, path)

    return before


Make = Callable[[FakeWorld, Job], Callable[[Store], Any]]


def play(
    make: Make,
    epochs: int,
    begins: int = 1,
    *,
    then: Callable[[FakeWorld, Job], object] | None = None,
    counts: Callable[[str], bool] | None = None,
) -> list[str]:
    """What a sleeper spoilt of the next job, by the request before which it slept.

    Args:
        then: what the next job did before the sleeper wakes.
        counts: see `spoilt_by`.
    """
    world = FakeWorld()
    old = Job(world.connect(), world.clock)
    for _ in range(epochs):
        old.checkpoint()
    work = make(world, old)
    first, at_ms = dict(world.objects), world.clock.at_ms
    # The job is deleted while its run was not heard of for a day, and begins anew with rows of its own.
    world.clock.at_ms += DAY_MS
    for pin in read_pins(world.root()):
        unpin(world.root(), pin)
    delete_root(world.root(), clock=world.clock, ids=CountingIds(77), owner="h:2", with_savepoints=True, threads=1)
    assert not world.names()
    new = Job(world.connect(), world.clock, prefix=6)
    for _ in range(epochs // 2):
        new.checkpoint()
    if then is not None:
        then(world, new)
    return spoilt_by(world, work, first, at_ms, dict(world.objects), begins, counts)


def spoilt_by(
    world: FakeWorld,
    work: Callable[[Store], Any],
    first: dict[str, bytes],
    at_ms: int,
    second: dict[str, bytes],
    begins: int = 1,
    counts: Callable[[str], bool] | None = None,
) -> list[str]:
    """The work is begun in the `first` content of the store, and wakes in the `second`.

    Args:
        begins: the first request before which it sleeps.
        counts: which names count; and of those not the one that the request is for before which it sleeps, whatever it
            does. None: all count, and of that request only what it deletes does not.
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
            assert at > begins + 3, "the work asked the store for next to nothing"
            return spoilt
        # The one deletion that it was at is the gap that remains: a store has no conditional delete.
        lost = [n for n in second if world.objects.get(n) != second[n] and asleep.slept_before != f"delete {n}"]
        left = [n for n in world.objects if n not in second]
        if counts is not None:
            at_it = asleep.slept_before.partition(" ")[2]
            lost, left = ([n for n in names if counts(n) and n != at_it] for names in (lost, left))
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
    monkeypatch.setattr("state_runtime.maintenance.gc.background._THREADS", 1)


def test_retention_that_slept_deletes_nothing_of_the_next_job_in_its_root() -> None:
    """Invariant 4: ids begin anew with the next job, and what the sleeper knows of them is of the one before."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        def work(root: Store) -> None:
            settings = JobSettings(retention=RetentionSettings(retained_checkpoints=3))
            retention = BackgroundRetention(root, settings, CountingIds(8), world.clock, ownership_of(old, root))
            retention._round([old.catalog.manifest(i) for i in old.catalog.snapshot_ids()])

        return work

    assert not play(make, 20)


def test_a_driver_s_collection_that_slept_deletes_nothing_of_the_next_job() -> None:
    """The same of what a driver collects once a day."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        delete_snapshots(world.root(), [2, 3], clock=world.clock, ids=CountingIds(9), threads=1)
        world.root().put(f"changelog/{1:020d}/00000000000000000009-orphan.seg", b"nobody's")
        world.clock.at_ms += 2 * DAY_MS
        old.checkpoint()

        def work(root: Store) -> None:
            settings = JobSettings()
            proof = ownership_of(old, root)
            BackgroundCollection(root, settings, CountingIds(8), world.clock, proof, "h:1")._collect()

        return work

    assert not play(make, 8)


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


def test_a_collection_that_slept_removes_no_boundary_of_the_next_job() -> None:
    """Boundaries are numbered from 1 in every root: without its own, what the next job gave up would be seen again."""

    def gives_up(world: FakeWorld, snapshot_ids: Sequence[int]) -> None:
        for snapshot_id in snapshot_ids:
            delete_snapshots(world.root(), [snapshot_id], clock=world.clock, ids=CountingIds(9), threads=1)

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        gives_up(world, [1, 2, 3])
        world.clock.at_ms += DAY_MS
        old.checkpoint()
        plan = plan_gc(world.root(), clock=world.clock, min_age_s=0, unsafe_min_age=True)
        assert len([c for c in plan.candidates if c.kind == "boundary"]) > 2
        return lambda root: apply_gc(root, plan, clock=world.clock, ids=CountingIds(8), owner="h:1", threads=1)

    assert not play(make, 8, then=lambda world, new: gives_up(world, [2]))


def test_who_slept_between_the_listing_and_the_boundary_still_sees_the_newest_snapshots() -> None:
    """All that he has listed was given up meanwhile; what came since needs files that the given up ones have too."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(5)

    def meanwhile() -> None:
        job.checkpoints(4)
        gone = [i for i in job.catalog.snapshot_ids() if i <= 6]
        delete_snapshots(job.root, gone, clock=world.clock, ids=CountingIds(77))

    asleep = Asleep(2, meanwhile)
    existing = read_existing(world.root(before=asleep))
    assert "boundary" in asleep.slept_before
    assert list(existing.snapshot_ids) == job.catalog.snapshot_ids()


def test_who_gives_snapshots_up_sees_that_the_newer_ones_have_gone_with_a_backup() -> None:
    """In the backup those that were to go are all that there is, and nothing else tells that it is older."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    backup = dict(world.objects)
    job.checkpoints(2)
    first = dict(world.objects)
    doomed = [i for i in read_existing(job.root).snapshot_ids if i <= 3]

    def gives_up(root: Store) -> None:
        delete_snapshots(root, doomed, clock=world.clock, ids=CountingIds(9), threads=1)

    assert not spoilt_by(world, gives_up, first, world.clock.at_ms, backup)


def test_a_newer_snapshot_of_the_next_job_is_no_successor_of_ones_own() -> None:
    """The snapshot that was to stay is gone there, as if it had been given up meanwhile; the numbers go on above it."""
    world = FakeWorld()
    old = Job(world.connect(), world.clock).checkpoints(5)
    first = dict(world.objects)
    world.clock.at_ms += DAY_MS
    delete_root(world.root(), clock=world.clock, ids=CountingIds(77), owner="h:2", threads=1)
    new = Job(world.connect(), world.clock, prefix=6).checkpoints(9)
    delete_snapshots(world.root(), range(1, 8), clock=world.clock, ids=CountingIds(78), threads=1)
    newest = old.committer.last.snapshot_id
    assert newest < 8 <= new.committer.last.snapshot_id
    second = {n: body for n, body in world.objects.items() if not n.startswith("boundary/0")}
    woken: list[str] = []

    def becomes(objects: dict[str, bytes]) -> None:
        world.objects.clear()
        world.objects.update(objects)

    def before(operation: str, path: str) -> None:
        if woken:
            woken.append(f"{operation} {path}")
        elif path.endswith(manifest_path(newest)) and proved:
            woken.append("")
            becomes(second)

    becomes(first)
    root = world.root(before=before)
    proved: list[int] = []

    class Watched:
        job_uid = old.committer.info.uid

        def check(self, *, since: int = 0) -> None:
            ownership_of(old, root).check(since=since)
            proved.append(since)

        def check_place(self) -> None:
            ownership_of(old, root).check_place()

    with pytest.raises(Fenced):
        give_up(root, [1, 2], read_existing(root).snapshot_ids, Watched(), clock=world.clock, ids=CountingIds(9))
    assert not [asked for asked in woken if asked.startswith(("create", "put"))], woken


def test_a_newer_snapshot_that_was_given_up_itself_is_no_sign_of_a_backup() -> None:
    """Another collector was quicker: the run had gone on, and what was the newest is none any more."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    given: dict[str, Any] = {"clock": world.clock, "threads": 1}
    first, newest = dict(world.objects), job.committer.last.snapshot_id
    job.checkpoints(2)
    delete_snapshots(world.root(), [newest], ids=CountingIds(10), **given)
    second = dict(world.objects)

    def becomes(objects: dict[str, bytes]) -> None:
        world.objects.clear()
        world.objects.update(objects)

    for at in range(1, REQUESTS_MAX):
        becomes(first)
        asleep = Asleep(at, lambda: becomes(second))
        done = delete_snapshots(world.root(before=asleep), [1], ids=CountingIds(9), **given)
        assert done.snapshot_ids == (1,), f"asleep before {asleep.slept_before}"
        if asleep.slept_before.startswith("create"):
            return  # from here on the store has something of this deletion
    raise AssertionError("no end")


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


def test_a_run_whose_rows_in_flight_went_with_the_root_commits_no_manifest_that_names_them(
    hung: tuple[FakeWorld, Job, dict[str, bytes]],
) -> None:
    """The epoch changed no state: no other segment is missing in the backup."""
    world, job, _ = hung
    backup = dict(world.objects)
    committer, ids = job.committer, CountingIds(8)
    passed = InflightPass("a", 1, 5, RowsLayout(""), (), (RowsLeft(0, 9, 1, 1),))
    begun = begin_segment(
        job.root, [], job_uid=committer.info.uid, term=committer.term.term, snapshot_id=committer.last.snapshot_id + 1,
        ids=ids, uploader=Uploader(UploadSettings(), world.clock), passes=(passed,),
    )  # fmt: skip
    assert begun is not None
    listing = begun.result()
    waiting = InflightNumbers("a", 1, 1, 1, 5, layouts=(passed.layout,))
    batch = OpenBatch(0, (), "", listing.path, (listing,), (waiting,))
    draft = replace(committer.last, kind="checkpoint", open_batch=batch)
    restored(world, backup)
    with pytest.raises(Fenced, match="just written"):
        committer.commit(draft)
    assert dict(world.objects) == backup


def test_a_run_whose_root_is_removed_while_it_commits_is_never_told_that_it_has() -> None:
    """Before whichever request, the one included that reads the boundary which was listed just before: its output would be
    published, and the snapshot is gone."""
    slept_before = []
    for at in range(1, REQUESTS_MAX):
        world = FakeWorld()
        job = Job(world.connect(), world.clock).checkpoints(3)
        run, existing = job.committer, job.catalog.snapshot_ids()
        proof = JobProof(job.root, run.info.uid)
        give_up(job.root, existing[:1], existing, proof, clock=world.clock, ids=CountingIds(3))
        manifest = run.prepare(replace(run.last, kind="checkpoint"))
        asleep = Asleep(at, world.objects.clear)
        actor = Actor(world.clock, job.ids)
        # It has not seen the boundary yet that somebody else has written.
        committing = Committer(world.root(before=asleep), run.info, run.term, run.last, actor, NO_BOUNDARY)
        with contextlib.suppress(Fenced):
            committing.create(manifest)
            assert asleep.count < at, f"it was acknowledged, though the root was gone: {asleep.slept_before}"
        if asleep.count < at:
            break
        slept_before.append(asleep.slept_before)
    assert slept_before[-1].startswith("read /store/job/boundary/"), slept_before


@pytest.mark.parametrize("left", ["", "/store/job/job.json"], ids=["all of it", "all but job.json"])
def test_a_start_whose_root_is_removed_meanwhile_leaves_a_place_where_the_job_can_begin_anew(left: str) -> None:
    """Before whichever request up to the create of its fencing snapshot: that one request after the last look is not covered.
    Where the rest goes first, what the start has seen of snapshots counts."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    first, has_seen = dict(world.objects), not left

    def removed() -> None:
        kept = {name: body for name, body in world.objects.items() if name == left}
        world.objects.clear()
        world.objects.update(kept)

    for at in range(1, REQUESTS_MAX):
        world.objects.clear()
        world.objects.update(first)
        asleep = Asleep(at, removed)
        with contextlib.suppress(StillstateError):
            open_run(Catalog.of_root(world.root(before=asleep)), job.committer.info, empty_manifest(job.committer.info.uid), actor=Actor(world.clock, CountingIds(9), "h", 9))  # fmt: skip
            # A job without snapshots begins empty, as long as none was seen.
            assert not has_seen, f"it has begun, though all is gone: {asleep.slept_before}"
        if asleep.slept_before.startswith("create /store/job/snapshots/"):
            break
        has_seen = has_seen or asleep.slept_before.startswith("read /store/job/snapshots/")
        Job(world.connect(), world.clock, prefix=6).checkpoint()
    assert "/snapshots/" in asleep.slept_before, "it has no fencing snapshot"


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
        settings = JobSettings(retention=RetentionSettings(retained_checkpoints=3))
        retention = BackgroundRetention(root, settings, CountingIds(8), world.clock, ownership_of(job, root))
        retention._round(manifests)

    assert not spoilt_by(world, work, first, at_ms, second)


def test_retention_that_slept_deletes_nothing_of_a_backup_in_which_nobody_has_started_the_job_yet() -> None:
    """No newer run tells it, and its own mark is in the backup. Its newest snapshot is not: what it would give up there is
    the newest one of the backup, and the job with it."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(12)
    backup = dict(world.objects)
    job.checkpoints(8)
    first, manifests = dict(world.objects), [job.catalog.manifest(i) for i in job.catalog.snapshot_ids()]

    def work(root: Store) -> None:
        settings = JobSettings(retention=RetentionSettings(retained_checkpoints=3))
        retention = BackgroundRetention(root, settings, CountingIds(8), world.clock, ownership_of(job, root))
        retention._round(manifests)

    assert not spoilt_by(world, work, first, world.clock.at_ms, backup)


def test_a_deletion_that_slept_removes_nothing_of_snapshots_that_a_backup_has_brought_back() -> None:
    """The backup is of the moment before they were given up, and the run's newest snapshot is in it."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(12)
    backup = dict(world.objects)
    manifests = [job.catalog.manifest(i) for i in job.catalog.snapshot_ids()]

    def work(root: Store) -> None:
        settings = JobSettings(retention=RetentionSettings(retained_checkpoints=3))
        retention = BackgroundRetention(root, settings, CountingIds(8), world.clock, ownership_of(job, root))
        retention._round(manifests)

    whole = FakeWorld(world.clock, dict(backup), dict(world.times))
    work(whole.root())
    gone = {n for n in backup if n not in whole.objects}
    assert gone, "nothing was given up"
    for at in range(1, REQUESTS_MAX):
        restored(world, backup)
        asleep = Asleep(at, lambda: restored(world, backup))
        with contextlib.suppress(StillstateError):
            work(world.root(before=asleep))
        if asleep.count < at:
            break
        job.check()


def test_a_deletion_that_slept_removes_nothing_that_only_a_backups_snapshots_need() -> None:
    """While it asked who needs what, others gave more up; in the backup these are snapshots, and all that it acts on lies
    there too."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(4)
    job.fold()
    job.checkpoints(2)
    given: dict[str, Any] = {"clock": world.clock, "threads": 1}
    proof = JobProof(world.root(), job.committer.info.uid)
    give_up(
        world.root(), [1, 2], read_existing(world.root()).snapshot_ids, proof, clock=world.clock, ids=CountingIds(8)
    )
    backup = dict(world.objects)

    def is_whole(at: str) -> None:
        for snapshot_id in job.catalog.snapshot_ids():
            for ref in references(job.root, job.catalog.manifest(snapshot_id)):
                assert job.root.exists(ref.path) or at == f"delete /store/job/{ref.path}", (at, snapshot_id, ref.path)

    def gives_more_up() -> None:
        delete_snapshots(world.root(), [3, 4, 5], ids=CountingIds(9), **given)

    def goes_on(root: Store) -> None:
        proof = JobProof(root, job.committer.info.uid)
        remove_given_up(root, [1, 2], proof, marker=Marker(root, world.clock), **given)

    played = 0
    for given_up_at in range(1, REQUESTS_MAX):
        for asleep_at in range(given_up_at, REQUESTS_MAX):
            restored(world, backup)
            asleep = Asleep(asleep_at, lambda: restored(world, backup))
            another = Asleep(given_up_at, gives_more_up)
            with contextlib.suppress(StillstateError, FileNotFoundError):
                goes_on(world.root(before=one_after_another(another, asleep)))
            if asleep.count < asleep_at:
                break
            is_whole(asleep.slept_before)
            played += 1
        if another.count < given_up_at:
            break
    assert played > 100


def test_a_collection_that_slept_removes_nothing_that_only_a_backups_snapshots_need() -> None:
    """Of a person, who knows the job and not its newest snapshot: the job in the backup is the same one."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(4)
    job.fold()
    job.checkpoints(2)
    backup = dict(world.objects)
    given: dict[str, Any] = {"clock": world.clock, "threads": 1}
    with dying():
        dead = world.root(before=dies_at_first_delete)
        delete_snapshots(dead, [1, 2, 3, 4, 5], ids=CountingIds(8), **given)
    world.clock.at_ms += 2 * DAY_MS
    job.checkpoint()
    first, at_ms = dict(world.objects), world.clock.at_ms
    plan = plan_gc(world.root(), clock=world.clock)
    assert plan.candidates or plan.given_up
    plan = replace(plan, given_up=())  # that is the test above; here what is swept by age

    def collects(root: Store) -> None:
        apply_gc(root, plan, clock=world.clock, ids=CountingIds(9), owner="h:2", threads=1)

    assert not spoilt_by(world, collects, first, at_ms, backup)


def test_a_start_that_slept_fences_nothing_in_a_backup_that_was_put_in_its_place() -> None:
    """Its fencing snapshot would follow one that is not there, and be the newest: no later run could start."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    backup = dict(world.objects)
    job.checkpoints(3)
    first = dict(world.objects)

    def work(root: Store) -> None:
        open_run(Catalog.of_root(root), job.committer.info, empty_manifest(job.committer.info.uid), actor=Actor(world.clock, CountingIds(9), "h", 9))  # fmt: skip

    gaps = 0
    for at in range(1, REQUESTS_MAX):
        world.objects.clear()
        world.objects.update(first)
        asleep = Asleep(at, lambda: restored(world, backup))
        with contextlib.suppress(StillstateError):
            work(world.root(before=asleep))
        if asleep.count < at:
            break
        if asleep.slept_before.startswith("create") and "/snapshots/" in asleep.slept_before:
            gaps += 1
            continue
        following = Job(world.connect(), world.clock, prefix=6).checkpoint()
        missing = [r.path for r in references(job.root, following) if not job.root.exists(r.path)]
        assert not missing, asleep.slept_before
    assert gaps == 1


def test_a_start_whose_term_went_with_a_backup_does_not_begin() -> None:
    """The next run would claim the same term, and neither could tell the other's marks and data from its own. Before whichever
    request up to the first one after the fencing snapshot and the boundary."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    backup = dict(world.objects)
    job.checkpoints(3)
    first, asked = dict(world.objects), list[str]()

    def begun(before: Callable[[str, str], None]) -> Committer:
        world.objects.clear()
        world.objects.update(first)
        info = job.committer.info
        catalog = Catalog.of_root(world.root(before=before))
        return open_run(catalog, info, empty_manifest(info.uid), actor=Actor(world.clock, CountingIds(9), "h", 9))

    begun(lambda operation, path: asked.append(f"{operation} {path}"))
    created = next(n for n, request in enumerate(asked) if request.startswith("create /store/job/snapshots/"))
    last_look = next(n for n, request in enumerate(asked) if n > created and not request.startswith("list"))
    for at in range(1, last_look + 2):
        try:
            term = begun(Asleep(at, lambda: restored(world, backup))).term
        except StillstateError:
            continue
        stored = world.objects.get(f"/store/job/{term_path(term.term)}", b"")
        assert term.run_uid.encode() in stored, f"it has begun without its term: before {asked[at - 1]}"


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


def test_a_heartbeat_that_slept_tells_nothing_of_its_epochs_in_the_next_jobs_root() -> None:
    """The same of the document beside it: it is proved anew, for the run may have slept since the heartbeat."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        def work(root: Store) -> None:
            old.committer.ownership = ownership_of(old, root)
            savepoints = Savepoints(root, old.committer.info, 1, clock=world.clock, ids=CountingIds(8))
            beat = Heartbeat(root, old.committer, 1.0, world.clock, threading.Event(), savepoints)
            driver: Any = SimpleNamespace(
                tasks=TaskHistory(), steps=(), restoring=lambda: (0, 0), progress=None, sinks_away=tuple
            )
            beat.watch(driver)
            for number in range(1, 4):
                done = Acknowledgement(epoch="e", stage=0, shard=0, input_rows=1)
                driver.tasks = driver.tasks.after(epoch_of(Progress(epoch=number, batch_id=number), [("op", done)]))
                beat._beat()

        return work

    spoilt = play(make, 4)
    assert any("epochs.json" in s for s in spoilt), "the one request at which it falls asleep after the proof remains"
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


def test_a_savepoint_whose_copies_went_with_a_backup_is_no_snapshot() -> None:
    """The run's newest snapshot is in the backup, and so is the savepoint's record; the first files that it has copied
    are not, and the later ones are copied after it."""
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    first, backup = dict(world.objects), dict[str, bytes]()

    def work(root: Store) -> None:
        prove = ownership_of(job, root).check
        work = SavepointWork(root, "h:1", world.clock, CountingIds(9), wait=lambda seconds: True, prove=prove)
        savepoint_of_stopped(work, "s")

    def keep(operation: str, path: str) -> None:
        if not backup and any(name.endswith("savepoints/s/job.json") for name in world.objects):
            backup.update(world.objects)

    work(world.root(before=keep))
    seen = 0
    for at in range(1, REQUESTS_MAX):
        restored(world, first)
        asleep = Asleep(at, lambda: restored(world, backup))
        with contextlib.suppress(StillstateError, FileNotFoundError):
            work(world.root(before=asleep))
        if asleep.count < at:
            break
        if asleep.slept_before.startswith("create") and asleep.slept_before.endswith("/manifest.json"):
            continue  # the one request of the gap
        folder = job.root.child("savepoints/s")
        for snapshot_id in Catalog.of_root(folder).snapshot_ids():
            manifest = Catalog.of_root(folder).manifest(snapshot_id)
            missing = [r.path for r in references(folder, manifest) if not folder.exists(r.path)]
            assert not missing, f"asleep before {asleep.slept_before}"
            seen += 1
    assert seen > 5


def job_is_copied(world: FakeWorld) -> bool:
    return any("/savepoints/" in n and n.endswith("manifest.json") for n in world.objects)


def test_savepoints_of_a_run_that_slept_say_nothing_in_a_backup_of_its_root() -> None:
    """The record that it would write anew is another's there: whoever goes on from the backup gives the same names."""
    world = FakeWorld()
    old = Job(world.connect(), world.clock).checkpoints(2)
    backup = dict(world.objects)
    old.checkpoints(2)
    request = request_savepoint(world.root(), 1, "s", clock=world.clock, ids=CountingIds(8))
    first = dict(world.objects)
    restored(world, backup)
    Job(world.connect(), world.clock, prefix=6).checkpoint()
    theirs = request_savepoint(world.root(), 2, "s", clock=world.clock, ids=CountingIds(18))
    info = old.committer.info
    Savepoints(world.root(), info, 2, clock=world.clock, ids=CountingIds(19), prove=lambda: None).hear(theirs)

    def work(root: Store) -> None:
        prove = ownership_of(old, root).check
        savepoints = Savepoints(root, info, 1, clock=world.clock, ids=CountingIds(9), prove=prove)
        savepoints.hear(request)
        savepoints.close("it ended")

    gaps = ("asleep before create", "asleep before put")
    spoilt = spoilt_by(world, work, first, world.clock.at_ms, dict(world.objects))
    assert not [s for s in spoilt if not s.startswith(gaps)]


@pytest.mark.parametrize("step", ["hear", "close", "look_back"])
def test_savepoints_of_a_run_that_slept_say_nothing_in_the_next_jobs_root(step: str) -> None:
    """Names of savepoints are given by people, who give the same ones to the next job."""

    def make(world: FakeWorld, old: Job) -> Callable[[Store], Any]:
        ids = CountingIds(8)
        request = request_savepoint(world.root(), 1, "s", clock=world.clock, ids=ids)

        def work(root: Store) -> None:
            savepoints = Savepoints(
                root,
                old.committer.info,
                1 if step != "look_back" else 2,
                clock=world.clock,
                ids=CountingIds(9),
                prove=ownership_of(old, root).check,
            )
            if step == "look_back":
                savepoints.look_back()
                return
            savepoints.hear(request)
            if step == "close":
                savepoints.close("it ended")

        return work

    gaps = ("asleep before create", "asleep before put")
    assert not [s for s in play(make, 4) if not s.startswith(gaps)]


def test_a_claim_that_slept_leaves_its_source_alone_once_its_own_job_is_gone() -> None:
    """What the job began with may be all that is left of it."""
    world = FakeWorld()
    source = Job(world.connect(), world.clock).checkpoints(3)
    child = Catalog(world.connect(), "child", world.clock)
    info = open_job_root(child.root, "child", clock=world.clock, ids=CountingIds(6))
    committer = open_run(child, info, empty_manifest(info.uid), actor=Actor(world.clock, CountingIds(7), "h", 1))  # fmt: skip
    claim_root(source.root, Claim("child", info.uid, child.root.url, 0))
    world.clock.at_ms += DAY_MS
    ending = ClaimEnding(lambda: source.root, info.uid, "h:1", Actor(world.clock, CountingIds(8)))
    ending.watching(None, committer)
    whole = dict(world.objects)
    for name in [n for n in whole if n.startswith("/store/child/")]:
        del world.objects[name]
    before = dict(world.objects)
    ending._run()
    assert world.objects == before
    world.objects.update(whole)
    ending._run()
    left = [name for name in world.objects if name.startswith("/store/job/")]
    assert not left, "with its own job in place the claimed root goes"


def claimed_and_pinned(world: FakeWorld) -> str:
    """A root that a job has claimed, of whose snapshots somebody else holds the oldest; the uid of that job."""
    source = Job(world.connect(), world.clock).checkpoints(4)
    claim_root(source.root, Claim("child", "claimer", "memory://store/child", 0))
    clock, ids = world.clock, CountingIds(9)
    pin_snapshot(source.root, 1, reason="read", holder="other:1", clock=clock, ids=ids)
    pin_snapshot(source.root, 4, reason="start", holder="h:1", note="claimer", clock=clock, ids=ids)
    world.clock.at_ms += DAY_MS
    return "claimer"


def test_the_end_of_a_claim_that_slept_deletes_nothing_of_the_next_job_in_that_root() -> None:
    """Not even where somebody's need had kept the root from being deleted as a whole: then single snapshots go."""
    world = FakeWorld()
    uid = claimed_and_pinned(world)
    first, at_ms = dict(world.objects), world.clock.at_ms
    world.objects.clear()
    Job(world.connect(), world.clock, prefix=6).checkpoints(3)

    def ends(root: Store) -> None:
        end_claim(root, uid, owner="h:1", clock=world.clock, ids=CountingIds(10), threads=1)

    assert not spoilt_by(world, ends, first, at_ms, dict(world.objects))


@pytest.mark.parametrize("step", range(1, 8))
def test_a_claimer_that_lost_its_own_job_changes_nothing_more_in_what_it_claimed(step: int) -> None:
    """From the n-th proof on it has: its pins stay too, since whoever has the job now may have begun there anew."""
    world = FakeWorld()
    uid = claimed_and_pinned(world)
    begun, seen = dict(world.objects), list[dict[str, bytes]]()

    def prove() -> None:
        seen.append(dict(world.objects))
        if len(seen) == step:
            raise Fenced("this run has lost its job")

    with contextlib.suppress(Fenced):
        end_claim(world.root(), uid, owner="h:1", clock=world.clock, ids=CountingIds(10), prove=prove)
    assert len(seen) == step, "before each effect it is asked, and after a no nothing is"
    taken_back = {name for name in seen[-1] if "/boundary/" in name} - set(begun)
    assert world.objects == {n: v for n, v in seen[-1].items() if n not in taken_back or n in world.objects}
    if step == 1:
        assert any(p.reason == "start" for p in read_pins(world.root()))
