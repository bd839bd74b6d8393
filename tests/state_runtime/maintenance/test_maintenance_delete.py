"""Deleting snapshots: what only they need goes, what others need stays, whoever interrupts, whenever a process dies."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from maintenance_root import Death, FakeWorld, Interrupt, Job, dying
from model import CountingIds, FakeClock, seeds
from schedule import one_at_a_time

from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptManifest,
    MissingSnapshot,
    SnapshotExpired,
    SnapshotInUse,
    StoreUnavailable,
)
from state_runtime.maintenance import marks
from state_runtime.maintenance.delete import snapshots as delete
from state_runtime.maintenance.delete.snapshots import Deleted, delete_snapshots, plan_deletion
from state_runtime.materialize.records import claim
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.paths import boundary_path, manifest_path, pin_path
from state_runtime.snapshot.pins import SnapshotPin, pin_snapshot, read_pins, unpin
from state_runtime.store import Store, open_store


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Somebody may act in the middle of another one's create."""
    with one_at_a_time():
        yield


@pytest.fixture(params=["local", "s3", "fake"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """A job on each kind of store."""
    if request.param == "local":
        return Job(open_store(str(tmp_path / "store")))
    if request.param == "fake":
        world = FakeWorld()
        return Job(world.connect(), world.clock)
    url, options = request.getfixturevalue("s3_location")
    return Job(open_store(url, options))


def deleted(root: Store, *ids: int, clock: Clock | None = None, **options: Any) -> Deleted:
    return delete_snapshots(root, ids, clock=clock or FakeClock(), ids=CountingIds(9), threads=1, **options)


def objects(root: Store) -> set[str]:
    return {o.path for o in root.list_objects("")}


def pinned(root: Store, snapshot_id: int, **options: Any) -> SnapshotPin:
    return pin_snapshot(
        root, snapshot_id, reason="user", holder="somebody", clock=FakeClock(), ids=CountingIds(3), **options
    )


# --- what is deleted, on every store ---------------------------------------------------------------------------------


def test_what_only_the_deleted_ones_need_is_gone_and_all_others_are_complete(job: Job) -> None:
    job.checkpoints(3)
    job.fold()
    job.checkpoints(2)
    before = objects(job.root)
    done = deleted(job.root, 1, 2, 3, 4)
    assert done.snapshot_ids == (1, 2, 3, 4)
    assert not done.failures
    assert not done.kept
    assert job.check() == [5, 6, 7]
    gone = before - objects(job.root)
    # Three segments, which the fold took in, and four manifests.
    assert sorted(p.split("/")[0] for p in gone) == ["changelog"] * 3 + ["snapshots"] * 4
    assert done.objects == 3
    assert done.bytes > 0


def test_shared_files_stay_as_long_as_one_snapshot_needs_them(job: Job) -> None:
    """An older one here, which is younger than nothing that it shares."""
    job.checkpoints(4)
    assert deleted(job.root, 3, 4).objects == 0
    assert job.check() == [1, 2, 5]
    assert deleted(job.root, 2).objects == 0
    assert job.check() == [1, 5]


def test_objects_that_tasks_uploaded_themselves_go_with_their_segment(tmp_path: Path) -> None:
    job = Job(open_store(str(tmp_path / "store")), inline_bytes_max=0).checkpoints(3)
    job.fold()
    assert any("/direct-" in p for p in objects(job.root))
    deleted(job.root, 1, 2, 3, 4)
    assert not any(p.startswith("changelog/") for p in objects(job.root))
    assert job.check() == [5]


def test_the_job_goes_on_after_a_deletion_and_so_does_its_next_run(job: Job) -> None:
    job.checkpoints(3)
    deleted(job.root, 1, 2, 3)
    job.checkpoint()
    job.start()
    job.checkpoint()
    assert job.check() == [4, 5, 6, 7]


def test_a_plan_says_what_would_go_and_only_reads(job: Job) -> None:
    job.checkpoints(3)
    job.fold()
    before = objects(job.root)
    plan = plan_deletion(job.root, [1, 2, 3, 4], clock=FakeClock())
    assert objects(job.root) == before
    assert (plan.objects, plan.shared_objects, plan.given_up) == (3, 0, ())
    assert deleted(job.root, 1, 2, 3, 4).objects == plan.objects


def test_deleting_again_is_fine(job: Job) -> None:
    job.checkpoints(2)
    assert deleted(job.root, 1).snapshot_ids == (1,)
    again = deleted(job.root, 1)
    assert (again.objects, again.failures) == (0, ())
    assert job.check() == [2, 3]


# --- who is in the way -----------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
def five(world: FakeWorld) -> Job:
    """Snapshots 1 … 5 on a fake store; the job may make a sixth."""
    return Job(world.connect(), world.clock).checkpoints(4)


def test_the_newest_is_refused_and_the_run_is_named(five: Job) -> None:
    with pytest.raises(SnapshotInUse, match="next run, which goes on"):
        deleted(five.root, 2, 5, clock=five.clock)
    five.beat()
    with pytest.raises(SnapshotInUse, match=r"snapshot 5 is needed by run 1 \(process 1 on elsewhere\)"):
        deleted(five.root, 5, clock=five.clock)
    assert five.check() == [1, 2, 3, 4, 5]


def test_a_pinned_snapshot_is_never_deleted_and_its_holder_is_named(five: Job) -> None:
    pin = pinned(five.root, 3, note="for the audit")
    with pytest.raises(SnapshotInUse, match=r"snapshot 3 is needed by a pin of somebody \(for the audit\)"):
        deleted(five.root, 2, 3)
    assert five.check() == [1, 2, 3, 4, 5]
    unpin(five.root, pin)
    assert deleted(five.root, 2, 3).snapshot_ids == (2, 3)


def test_an_expired_pin_holds_nobody_but_clocks_may_differ_by_an_hour(five: Job) -> None:
    pinned(five.root, 3, lasts_ms=60_000)
    clock = FakeClock()
    clock.advance_s(3600)
    with pytest.raises(SnapshotInUse):
        deleted(five.root, 3, clock=clock)
    clock.advance_s(120)
    assert deleted(five.root, 3, clock=clock).snapshot_ids == (3,)


def test_a_materialization_that_reads_it_is_named(five: Job) -> None:
    assert claim(five.root, five.catalog.manifest(4), clock=five.clock, ids=CountingIds(4)) is not None
    with pytest.raises(SnapshotInUse, match="a materialization that reads it"):
        deleted(five.root, 4, clock=five.clock)


def test_an_unknown_snapshot_is_no_snapshot(five: Job) -> None:
    with pytest.raises(MissingSnapshot, match="no snapshot 77"):
        deleted(five.root, 1, 77)
    assert five.check() == [1, 2, 3, 4, 5]


def test_a_pin_that_cannot_be_read_stops_everything(five: Job) -> None:
    five.root.put(pin_path(2, "x"), b"damaged")
    with pytest.raises(CorruptManifest):
        deleted(five.root, 1)
    assert read_boundary(five.root).sequence == 0


def test_a_manifest_that_cannot_be_read_stops_the_removal(five: Job, world: FakeWorld) -> None:
    """What it names is not known, so nobody knows what is garbage."""
    five.root.put(manifest_path(4), b"damaged")
    before = {n for n in world.names() if not n.startswith("boundary")}
    with pytest.raises(CorruptManifest):
        deleted(five.root, 1, 2)
    assert {n for n in world.names() if not n.startswith("boundary")} == before


def test_a_damaged_snapshot_goes_if_that_is_asked_for(five: Job, world: FakeWorld) -> None:
    five.root.put(manifest_path(4), b"damaged")
    with pytest.raises(CorruptManifest):
        deleted(five.root, 4)
    assert deleted(five.root, 4, damaged=True).snapshot_ids == (4,)
    assert manifest_path(4) not in world.names()
    assert five.check() == [1, 2, 3, 5]


# --- listings are not trusted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [[1], [1, 2], [3], [3, 4, 5], [2, 7]])
def test_a_listing_that_was_cut_short_deletes_nothing(
    five: Job, monkeypatch: pytest.MonkeyPatch, hidden: list[int]
) -> None:
    """Ids are given one by one: what the listing does not show is found by them. Else files of hidden ones would be garbage."""
    five.fold()
    five.checkpoint()
    _hide(monkeypatch, five.root, hidden)
    with pytest.raises(StoreUnavailable, match="lacks snapshot"):
        deleted(five.root, 4 if hidden[0] != 3 else 2)
    monkeypatch.undo()
    assert five.check() == [1, 2, 3, 4, 5, 6, 7]


def test_a_listing_that_ends_early_is_completed_by_the_ids(five: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is one that a running job has overtaken."""
    _hide(monkeypatch, five.root, [4, 5])
    assert marks.read_existing(five.root).snapshot_ids == (1, 2, 3, 4, 5)


def _hide(monkeypatch: pytest.MonkeyPatch, root: Store, hidden: list[int]) -> None:
    whole, hide = type(root).list_names, {f"{i:020d}" for i in hidden}
    monkeypatch.setattr(
        type(root),
        "list_names",
        lambda self, path: [n for n in whole(self, path) if path != "snapshots" or n not in hide],
    )


def test_a_kept_snapshot_without_its_manifest_stops_everything(five: Job) -> None:
    deleted(five.root, 1, 3)
    five.root.delete(manifest_path(2))
    with pytest.raises(CorruptManifest, match="has not expired"):
        deleted(five.root, 4)


# --- deaths and faults -----------------------------------------------------------------------------------------------


def test_a_death_at_any_request_leaves_complete_snapshots_and_the_repetition_ends_it() -> None:
    reached = 0
    prepared = FakeWorld()
    job = Job(prepared.connect(), prepared.clock, inline_bytes_max=0).checkpoints(2)
    job.fold()
    for at in range(1, 400):
        world = prepared.copy()
        death = Death(at)
        with dying():
            deleted(world.root(before=death), 1, 2, 3)
        ids = job.check(world.root(), rows=False)
        assert ids in ([1, 2, 3, 4], [4])
        deleted(world.root(), 1, 2, 3)
        assert job.check(world.root(), rows=False) == [4]
        assert not [n for n in world.names() if n.startswith("changelog/")]
        assert [n for n in world.names() if n.startswith("snapshots/")] == [manifest_path(4)]
        if death.count < at:
            break
        reached = at
    assert reached > 20


def test_a_key_that_cannot_be_deleted_is_named_and_its_snapshot_stays_until_it_can() -> None:
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    job.fold()
    segment = job.catalog.manifest(2).segments[0].path

    def refuse(operation: str, path: str) -> None:
        if operation == "delete" and path.endswith(segment):
            raise PermissionError(errno.EACCES, "AccessDenied")

    done = deleted(world.root(before=refuse), 1, 2, 3, 4)
    assert [f.path for f in done.failures] == [segment]
    assert "AccessDenied" in done.failures[0].message
    assert done.snapshot_ids == (1,)
    assert manifest_path(2) in world.names()  # it leads to what is left
    assert job.check() == [5]
    assert deleted(job.root, 2, 3, 4).snapshot_ids == (2, 3, 4)
    assert segment not in world.names()


def test_a_lost_answer_of_the_boundary_is_no_failure() -> None:
    for at in (1, 2):
        world = FakeWorld()
        job = Job(world.connect(), world.clock).checkpoints(3)
        creates = 0

        def lose(operation: str, path: str, at: int = at) -> None:
            nonlocal creates
            creates += operation == "create"
            if operation == "create" and creates == at:
                raise TimeoutError("the answer was lost")

        creates = 0
        assert deleted(world.root(after=lose), 1, 2).snapshot_ids == (1, 2)
        assert job.check() == [3, 4]


# --- races -----------------------------------------------------------------------------------------------------------


class Pinner:
    """Somebody who pins snapshot 2, in the two steps that `pin_snapshot` has."""

    def __init__(self, world: FakeWorld) -> None:
        self.root = world.root()
        self.pin = SnapshotPin(2, "pinner", "user", "pinner", "", 0)
        self.holds = False

    def create(self) -> None:
        from state_runtime.snapshot.document import encode_document

        self.root.create(self.pin.path, encode_document("pin", self.pin))

    def look(self) -> None:
        """The second step: the pin counts, or is taken off."""
        self.holds = read_boundary(self.root).keeps(2)
        if not self.holds:
            unpin(self.root, self.pin)


@cache
def _prepared() -> tuple[FakeWorld, Job]:
    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(2)
    job.fold()
    return world, job


def race(
    first: int, second: int, *, others: Callable[[FakeWorld], None] | None = None, third: int = -1
) -> tuple[bool, list[int], FakeWorld]:
    """A deletion of 1 and 2; the pin's file is created before its request `first`, and looked after before `second`.

    Returns:
        Whether the pin counts, the snapshots that there are (all complete), and the world.
    """
    prepared, job = _prepared()
    world = prepared.copy()
    pinner = Pinner(world)
    steps: dict[int, list[Callable[[], None]]] = {}
    steps.setdefault(first, []).append(pinner.create)
    steps.setdefault(second, []).append(pinner.look)
    if others is not None:
        steps.setdefault(third, []).append(lambda: others(world))
    count = 0

    def before(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        for step in steps.pop(count, []):
            step()

    with suppress(SnapshotInUse):  # it was seen in time; nothing was changed
        deleted(world.root(before=before), 1, 2)
    for _, waiting in sorted(steps.items()):
        for step in waiting:
            step()
    return pinner.holds, job.check(world.root(), rows=False), world


REQUESTS = 45


def test_of_a_pin_and_a_deletion_one_sees_the_other_in_every_order() -> None:
    """A pin that counts keeps its snapshot; one that came too late says so. Never both, never neither with a loss."""
    outcomes = set()
    for first in range(1, REQUESTS):
        # Its second step matters only where the boundary is written in between.
        for second in range(first, REQUESTS, 5):
            holds, ids, _ = race(first, second)
            outcomes.add((holds, 2 in ids))
            assert not holds or 2 in ids, f"pinned before request {first}, looked before {second}: lost"
    assert outcomes >= {(True, True), (False, False)}


def test_without_the_look_at_pins_after_the_announcement_a_pinned_snapshot_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard of `settle`."""
    real = delete.read_holders

    def blind(root: Store, *args: Any) -> Any:
        return ({}, real(root, *args)[1])

    monkeypatch.setattr(delete, "read_holders", blind)
    monkeypatch.setattr(marks, "read_holders", blind)
    with pytest.raises(AssertionError, match="lost"):
        test_of_a_pin_and_a_deletion_one_sees_the_other_in_every_order()


def test_two_deletions_and_a_pin_in_any_order_lose_nothing_that_counts() -> None:
    """The second collector settles, removes, or finds everything done; what is kept is complete."""

    def delete_too(world: FakeWorld) -> None:
        with suppress(SnapshotInUse):
            delete_snapshots(world.root(), [1, 2], clock=FakeClock(), ids=CountingIds(11), threads=1)

    kept = 0
    for seed, rng in seeds(100):
        first = rng.randrange(1, REQUESTS)
        second = rng.randrange(first, REQUESTS)
        holds, ids, world = race(first, second, others=delete_too, third=rng.randrange(1, REQUESTS))
        assert not holds or 2 in ids, f"STILLSTATE_TEST_SEED={seed}"
        kept += holds
        deleted(world.root(), *({1, 2} - {p.snapshot_id for p in read_pins(world.root())}))
        _prepared()[1].check(world.root(), rows=False)
    assert kept > 5


def test_one_that_is_going_is_not_touched_and_the_next_collector_settles_it(five: Job, world: FakeWorld) -> None:
    """A collector died between its two steps, and a pin that counts was there in time."""
    pin = pinned(five.root, 2)
    boundary = read_boundary(five.root).announcing([1, 2], [1, 2, 3, 4, 5])
    assert boundary is not None
    from state_runtime.snapshot.expiry_boundary import advance_boundary

    advance_boundary(
        five.root, lambda now: now.announcing([1, 2], [1, 2, 3, 4, 5]), clock=five.clock, ids=CountingIds(8)
    )
    assert five.catalog.snapshot_ids() == [3, 4, 5]
    before = world.names()
    assert (
        delete.remove_given_up(
            five.root,
            [1, 2],
            five.committer.ownership,
            marker=marks.Marker(five.root, five.clock),
            clock=five.clock,
        )
        == Deleted()
    )
    assert world.names() == before
    proof = five.committer.ownership
    assert delete.settle(five.root, [1, 2], proof, clock=five.clock, ids=CountingIds(8)) == {2: ("a pin of somebody",)}
    assert five.check() == [2, 3, 4, 5]
    unpin(five.root, pin)
    assert deleted(five.root, 1, 2).snapshot_ids == (1, 2)
    assert five.check() == [3, 4, 5]


def test_the_files_of_one_that_is_going_stay_for_whoever_takes_it_back() -> None:
    """Two collectors whose clocks differ: for one of them the pin has expired, and the other brings the snapshot back."""
    from state_runtime.snapshot.expiry_boundary import advance_boundary

    world = FakeWorld()
    job = Job(world.connect(), world.clock).checkpoints(3)
    job.fold()
    pinned(job.root, 2, lasts_ms=3_600_000)
    advance_boundary(job.root, lambda now: now.announcing([2], [1, 2, 3, 4, 5]), clock=job.clock, ids=CountingIds(8))
    ahead = FakeClock()
    ahead.advance_s(4 * 3600)
    assert deleted(job.root, 1, 3, 4, clock=ahead).snapshot_ids == (1, 3, 4)
    proof = job.committer.ownership
    assert delete.settle(job.root, [2], proof, clock=FakeClock(), ids=CountingIds(8)) == {2: ("a pin of somebody",)}
    assert job.check() == [2, 5]


def test_a_pin_that_comes_after_the_announcement_is_told_so(five: Job) -> None:
    from state_runtime.snapshot.expiry_boundary import advance_boundary

    advance_boundary(five.root, lambda now: now.announcing([2], [1, 2, 3, 4, 5]), clock=five.clock, ids=CountingIds(8))
    with pytest.raises(SnapshotExpired):
        pinned(five.root, 2)
    assert not read_pins(five.root)


def test_a_boundary_under_a_collected_number_does_not_count(five: Job) -> None:
    """A collector slept while others went on and tidied up: the store has forgotten the number that it wanted to take."""
    woken: list[int] = []

    def others() -> None:
        for snapshot_id in (2, 3):
            deleted(five.root, snapshot_id)
        for sequence in range(1, read_boundary(five.root).sequence):
            five.root.delete(boundary_path(sequence))

    from state_runtime.snapshot.expiry_boundary import advance_boundary

    def decide(now: Any) -> Any:
        if not woken:
            woken.append(now.sequence)
            following = now.announcing([1], [1, 2, 3, 4, 5])
            others()
            return following
        woken.append(now.sequence)
        return now.announcing([1], [1, 4, 5])

    written = advance_boundary(five.root, decide, clock=five.clock, ids=CountingIds(8))
    assert woken == [0, 4]
    assert read_boundary(five.root) == written
    assert not written.keeps(2)
    assert written.going == (1,)


def test_a_commit_at_any_moment_of_a_deletion_is_complete() -> None:
    for at in range(1, REQUESTS, 4):
        world = FakeWorld()
        job = Job(world.connect(), world.clock).checkpoints(2)
        job.fold()
        interrupt = Interrupt(at, lambda job=job: job.checkpoints(2))  # type: ignore[misc]
        deleted(world.root(before=interrupt), 1, 2, 3)
        assert job.check()[:1] == [4]


def test_a_sleeper_that_creates_a_deleted_id_anew_is_no_snapshot(five: Job, world: FakeWorld) -> None:
    """Scenario 14: a store forgets deleted names."""
    body = five.root.read(manifest_path(2), 1 << 20)
    deleted(five.root, 1, 2)
    five.root.put(manifest_path(2), body)
    assert five.check() == [3, 4, 5]
    assert deleted(five.root, 2).snapshot_ids == (2,)
    assert manifest_path(2) not in world.names()
    assert five.check() == [3, 4, 5]


def test_a_manifest_that_names_what_is_not_data_deletes_nothing_of_it(five: Job) -> None:
    """A record of ours decides about data only, whatever it says."""
    from dataclasses import replace

    two = five.catalog.manifest(2)
    wrong = replace(two.segments[0], path="job.json", direct_bytes=0)
    five.root.put(manifest_path(2), replace(two, segments=(wrong,)).encode())
    deleted(five.root, 2)
    assert five.check() == [1, 3, 4, 5]
    assert Catalog.of_root(five.root).job == "job"


def test_progress_is_told_as_it_goes(five: Job) -> None:
    five.fold()
    told: list[tuple[int, int]] = []
    deleted(five.root, 1, 2, 3, 4, 5, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(n, 4) for n in range(1, 5)]
