"""Copies and moves of jobs, snapshots and savepoints: nothing is lost, nothing is used by two, and a cut one ends when it is repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from local_job import LocalJob
from model import CountingIds, DictStore, FakeClock
from moved_job import INFO, Killed, WatchedStore, add_savepoint, all_states, furnish, into, made_job, states_of

from state_runtime.base.actor import Actor
from state_runtime.base.errors import (
    CorruptData,
    Fenced,
    InvalidConfiguration,
    JobNotFound,
    MissingFile,
    SnapshotInUse,
    StillstateError,
    StoreRefused,
)
from state_runtime.maintenance.delete.roots import delete_root, delete_savepoint
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.move.carry import MoveProgress
from state_runtime.maintenance.move.execute import MoveResult, abort_move, execute_move
from state_runtime.maintenance.move.plan import MoveMode, MovePlan, plan_move
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.document import encode_document
from state_runtime.snapshot.epoch_tasks import RunEpochs
from state_runtime.snapshot.expiry_boundary import advance_boundary, read_boundary
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.handover import read_moving, read_outcome
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from state_runtime.snapshot.paths import JOB_FILE, MOVED_FILE, MOVING_FILE, SAVEPOINTS_DIR
from state_runtime.snapshot.pins import pin_snapshot, read_pins
from state_runtime.snapshot.publication_log import is_published, record_published
from state_runtime.snapshot.savepoint_record import SavepointRecord, read_record, record_path, savepoint_names
from state_runtime.snapshot.term_files import RunStatus, read_epochs, read_status, write_epochs, write_status
from state_runtime.store import Created, Store, open_store

ENDS = ["disk to disk", "disk to s3", "s3 to disk", "s3 to s3"]
# Where one store and two are enough.
FEW_ENDS = pytest.mark.parametrize("ends", ["disk to disk", "disk to s3"], indirect=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> LocalJob:
    """Read only."""
    return made_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LocalJob:
    """Read only; with few files, for tests that begin anew at every operation."""
    job = made_job(tmp_path_factory.mktemp("small"), shapes=("value",), epochs=4)
    furnish(job.root)
    return job


@dataclass
class Ends:
    """A furnished job root, and a target that is empty."""

    job: LocalJob
    source: Store
    target: Store

    def plan(self, mode: str = "move", snapshot_id: int | None = None, **changed: Any) -> MovePlan:
        given: dict[str, Any] = {"mode": mode, "snapshot_id": snapshot_id, "clock": FakeClock(), **changed}
        return plan_move(self.source, self.target, **given)

    def go(self, mode: str = "move", snapshot_id: int | None = None, **changed: Any) -> MoveResult:
        given: dict[str, Any] = {
            "actor": Actor(FakeClock(), CountingIds(prefix=4), "here", 1), "threads": 1, **changed
        }  # fmt: skip
        return execute_move(self.source, self.target, self.plan(mode, snapshot_id), **given)

    def go_at(self, clock: FakeClock) -> MoveResult:
        return execute_move(
            self.source, self.target, self.plan(clock=clock), actor=Actor(clock, CountingIds(prefix=4), "h", 1)
        )

    def paths(self, store: Store) -> set[str]:
        return {found.path for found in store.list_objects("")}

    def bodies(self, store: Store) -> dict[str, bytes]:
        return {found.path: store.read(found.path, 1 << 30) for found in store.list_objects("")}


@pytest.fixture(params=ENDS)
def ends(request: pytest.FixtureRequest, tmp_path: Path, small: LocalJob) -> Ends:
    def end(kind: str, name: str) -> Store:
        if kind == "disk":
            return open_store(str(tmp_path / name))
        url, options = request.getfixturevalue("s3_location")
        return open_store(f"{url}/{name}", options)

    kinds = request.param.split(" to ")
    return Ends(small, into(end(kinds[0], "source"), small.root), end(kinds[1], "target"))


@pytest.fixture
def plain(job: LocalJob) -> Ends:
    """In memory: quick."""
    source, target = (WatchedStore({}, lambda *_: None, name=name) for name in ("source", "target"))
    made = Ends(job, into(source, job.root), target)
    furnish(made.source)
    return made


def run_in(root: Store, prefix: int = 40) -> Committer:
    """A run of the job that gets as far as its fencing snapshot."""
    catalog = Catalog.of_root(root, FakeClock())
    ids = CountingIds(prefix=prefix)
    info = open_job_root(root, "job", clock=FakeClock(), ids=ids)
    newest = catalog.latest()
    assert newest is not None
    return open_run(catalog, info, replace(newest, snapshot_id=0), actor=Actor(FakeClock(), ids, "there", 2))


# --- what arrives, and what stays ------------------------------------------------------------------------------------


def test_a_moved_job_is_all_there_and_its_source_is_gone(ends: Ends) -> None:
    """Every snapshot, savepoint and pin; the next run goes on where the job stood."""
    expected = all_states(ends.job, ends.source)
    saved = all_states(ends.job, ends.source.child("savepoints/before"))
    newest = max(expected)
    seen: list[MoveProgress] = []
    plan = ends.plan()
    assert (plan.what, plan.snapshots, plan.savepoints) == ("root", tuple(sorted(expected)), ("before",))
    result = ends.go(progress=seen.append)
    assert ends.paths(ends.source) == set()
    assert (result.objects, result.bytes, result.left) == (plan.objects, plan.bytes, ())
    assert (seen[-1].objects_done, seen[-1].bytes_done) == (plan.objects, plan.bytes)
    found = all_states(ends.job, ends.target)
    # The mover's fencing snapshot is one more, of the same content.
    assert found == {**expected, newest + 1: expected[newest]}
    assert all_states(ends.job, ends.target.child("savepoints/before")) == saved
    record = read_record(ends.target.child("savepoints/before"))
    assert record is not None
    assert record.state == "COMPLETED"
    assert [(p.snapshot_id, p.note) for p in read_pins(ends.target)] == [(3, "audit")]
    assert read_moving(ends.target) is None
    status = read_status(ends.target)
    assert status is not None
    assert (status.state, status.message) == ("stopped", f"moved from {ends.source.url}")
    committer = run_in(ends.target)
    assert (committer.term.term, committer.last.snapshot_id) == (2, newest + 2)
    assert states_of(ends.job, ends.target, committer.last) == expected[newest]


@pytest.mark.parametrize("mode", ["copy", "move"])
def test_the_word_on_published_output_goes_along(plain: Ends, mode: str) -> None:
    """The output folder may stay behind: at the new place nothing of it is needed. A move leaves no such file."""
    output = StagedOutput("out", 5, (StagedFile("staged", "final", 3, 1),))
    record_published(plain.source, [output])
    plain.go(mode)
    assert is_published(plain.target, [output])
    assert not is_published(plain.target, [replace(output, epoch=6)])
    assert plain.source.exists("published.json") == (mode == "copy")


@pytest.mark.parametrize("mode", ["copy", "move"])
def test_what_a_run_told_of_its_epochs_stays_with_the_run(plain: Ends, mode: str) -> None:
    """At the new place nobody has run an epoch yet. A copy leaves it, and a move leaves nothing."""
    committer = run_in(plain.source)
    write_status(plain.source, replace(live(committer), state="stopped"))
    told = RunEpochs(term=1, run_uid=committer.term.run_uid, epochs=())
    write_epochs(plain.source, told)
    assert read_epochs(plain.source) == told
    result = plain.go(mode)
    assert read_epochs(plain.target) is None
    assert (read_epochs(plain.source) is not None) == (mode == "copy")
    assert not result.left


def test_a_copied_job_leaves_its_source_as_it_was(ends: Ends) -> None:
    """Also one that runs: a copy needs no term, and no pin stays."""
    write_status(ends.source, live(run_in(ends.source)))
    before = ends.bodies(ends.source)
    expected = all_states(ends.job, ends.source)
    result = ends.go("copy")
    assert ends.bodies(ends.source) == before
    assert all_states(ends.job, ends.target) == expected
    assert (result.snapshots, result.savepoints) == (tuple(sorted(expected)), ("before",))
    assert [p.note for p in read_pins(ends.target)] == ["audit"]
    status = read_status(ends.target)
    assert status is not None
    assert (status.term, status.state) == (1, "stopped")
    assert run_in(ends.target, 41).term.term == 2


def live(committer: Committer) -> RunStatus:
    """The heartbeat of a run that is well."""
    term = committer.term
    return RunStatus(term.term, term.run_uid, "running", FakeClock().now_ms(), 0, 10.0, term.pid, term.host)


@FEW_ENDS
def test_a_snapshot_that_is_copied_or_moved_is_a_root_of_its_own(ends: Ends) -> None:
    expected = all_states(ends.job, ends.source)
    assert ends.plan("copy", 4).what == "snapshot"
    result = ends.go("copy", 4)
    assert result.snapshots == (4,)
    assert all_states(ends.job, ends.target) == {4: expected[4]}
    assert [pin.reason for pin in read_pins(ends.source)] == ["user"]
    other = Ends(ends.job, ends.source, ends.target.child("other"))
    other.go("move", 5)
    assert all_states(ends.job, other.target) == {5: expected[5]}
    assert all_states(ends.job, ends.source) == {i: rows for i, rows in expected.items() if i != 5}


@FEW_ENDS
def test_a_savepoint_is_copied_and_moved_by_itself(ends: Ends) -> None:
    folder = ends.source.child("savepoints/before")
    expected = all_states(ends.job, folder)
    kept = all_states(ends.job, ends.source)
    copied = Ends(ends.job, folder, ends.target.child("copied"))
    assert copied.plan("copy").what == "savepoint"
    copied.go("copy")
    moved = Ends(ends.job, folder, ends.target.child("moved"))
    moved.go("move", parent=ends.source)
    for target in (copied.target, moved.target):
        assert all_states(ends.job, target) == expected
        record = read_record(target)
        assert record is not None
        assert record.name == "before"
    assert ends.paths(folder) == set()
    assert all_states(ends.job, ends.source) == kept
    # A folder that belongs to no root any more moves too.
    again = Ends(ends.job, moved.target, ends.target.child("again"))
    again.go("move")
    assert all_states(ends.job, again.target) == expected
    assert ends.paths(moved.target) == set()


def test_a_source_that_may_only_be_read_is_copied(plain: Ends) -> None:
    """No pin can be placed, and nothing hangs on it."""

    def refuse(operation: str, path: str) -> None:
        if operation in ("create", "put", "delete"):
            raise StoreRefused(f"{operation} {path}: read-only")

    expected = all_states(plain.job, plain.source)
    assert isinstance(plain.source, WatchedStore)
    plain.source.watch = refuse
    plain.go("copy")
    assert all_states(plain.job, plain.target) == expected


def test_what_is_not_ours_stays_at_the_source_and_is_named(plain: Ends) -> None:
    plain.source.put("README.txt", b"mine")
    result = plain.go()
    assert result.left == ("README.txt",)
    assert plain.paths(plain.source) == {"README.txt"}
    assert "README.txt" not in plain.paths(plain.target)


# --- refusals --------------------------------------------------------------------------------------------------------


@FEW_ENDS
def test_a_target_that_holds_anything_is_refused(ends: Ends) -> None:
    """Unless it is the beginning of the very same move."""
    ends.target.put("something", b"x")
    with pytest.raises(InvalidConfiguration, match="not empty"):
        ends.go()
    assert ends.paths(ends.target) == {"something"}


def test_the_beginning_of_another_move_is_something_else(plain: Ends) -> None:
    stop_at(plain.target, lambda operation, path: path == JOB_FILE and operation == "create")
    with pytest.raises(Killed):
        plain.go("copy")
    go_on(plain.target)
    for mode, snapshot_id in (("move", None), ("copy", 4)):
        with pytest.raises(InvalidConfiguration, match="not empty"):
            plain.plan(mode, snapshot_id)
    other = WatchedStore({}, lambda *_: None, name="other")
    with pytest.raises(InvalidConfiguration, match="not empty"):
        Ends(plain.job, into(other, plain.job.root), plain.target).plan("copy")
    assert plain.plan("copy").resumes is not None


@FEW_ENDS
def test_a_job_that_runs_is_not_moved(ends: Ends) -> None:
    write_status(ends.source, live(run_in(ends.source)))
    before = ends.bodies(ends.source)
    with pytest.raises(SnapshotInUse, match=r"run 1 \(process 2 on there\)"):
        ends.go()
    assert ends.bodies(ends.source) == before
    assert ends.paths(ends.target) == set()


@pytest.mark.parametrize("reason", ["start", "read", "copy", "convert", "verify", "savepoint"])
def test_what_somebody_needs_is_not_moved(plain: Ends, reason: Any) -> None:
    """A child that starts from it, a reader, another copy: each is named."""
    pin_snapshot(plain.source, 4, reason=reason, holder="a child", clock=FakeClock(), ids=CountingIds(prefix=7))
    for snapshot_id in (None, 4):
        with pytest.raises(SnapshotInUse, match="a child"):
            plain.go("move", snapshot_id)
    assert plain.paths(plain.target) == set()
    plain.go("copy", 4)


def test_a_snapshot_that_somebody_pinned_or_the_job_goes_on_from_is_not_moved(plain: Ends) -> None:
    newest = max(all_states(plain.job, plain.source))
    with pytest.raises(SnapshotInUse, match="newest"):
        plain.go("move", newest)
    with pytest.raises(SnapshotInUse, match="somebody"):
        plain.go("move", 3)


def test_a_job_whose_savepoint_is_being_made_is_not_moved(plain: Ends) -> None:
    now = FakeClock().now_ms()
    record = SavepointRecord("now", "u", "job", "job-1", "IN_PROGRESS", "user", now, "there:9", now)
    plain.source.child("savepoints/now").put(record_path(1), encode_document("savepoint", record))
    with pytest.raises(SnapshotInUse, match="there:9"):
        plain.go()


def test_a_claimed_root_is_not_moved(plain: Ends) -> None:
    plain.source.put("claim.json", b"whatever")
    with pytest.raises(SnapshotInUse, match="claim"):
        plain.go()


@FEW_ENDS
def test_a_source_that_is_damaged_is_not_moved(ends: Ends) -> None:
    """And nothing of it is lost: the source is as it was, but for its fencing snapshot."""
    manifest = Catalog.of_root(ends.source).latest()
    assert manifest is not None
    table = manifest.layers[0].tables[0]
    body = ends.source.read(table.path, 1 << 30)
    ends.source.delete(table.path)
    ends.source.put(table.path, body[:-1])
    with pytest.raises(CorruptData, match=table.path):
        ends.go()
    ends.source.delete(table.path)
    with pytest.raises(MissingFile, match=table.path):
        ends.go()
    assert JOB_FILE not in ends.paths(ends.target)
    # Repaired, the same move ends.
    ends.source.put(table.path, body)
    ends.go()
    assert ends.paths(ends.source) == set()


def test_places_in_each_other_are_refused(plain: Ends) -> None:
    for source, target in ((plain.source, plain.source), (plain.source, plain.source.child("x"))):
        with pytest.raises(InvalidConfiguration, match="in each other"):
            plan_move(source, target, mode="copy", snapshot_id=None, clock=FakeClock())


def test_nothing_is_no_source(plain: Ends) -> None:
    with pytest.raises(JobNotFound):
        plan_move(plain.target, plain.source.child("x"), mode="copy", snapshot_id=None, clock=FakeClock())


# --- cut at any point ------------------------------------------------------------------------------------------------


def stop_at(store: Store, when: Callable[[str, str], bool]) -> None:
    assert isinstance(store, WatchedStore)

    def watch(operation: str, path: str) -> None:
        if when(operation, path):
            raise Killed

    _watch(store, watch)


def go_on(store: Store) -> None:
    _watch(store, lambda *_: None)


def _watch(store: Store, watch: Callable[[str, str], None]) -> None:
    assert isinstance(store, WatchedStore)
    store.watch = watch


class Counting:
    """Kills before the n-th operation that changes something, at either end."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.count = 0

    def __call__(self, operation: str, path: str) -> None:
        if operation in ("create", "put", "delete"):
            self.count += 1
            if self.count > self.last:
                raise Killed


def fresh(small: LocalJob) -> Ends:
    source, target = (WatchedStore({}, lambda *_: None, name=name) for name in ("source", "target"))
    return Ends(small, into(source, small.root), target)


def cut_after(ends: Ends, writes: int, mode: str = "move") -> bool:
    """Whether the move was cut."""
    counting = Counting(writes)
    for store in (ends.source, ends.target):
        _watch(store, counting)
    try:
        ends.go(mode)
    except Killed:
        return True
    finally:
        for store in (ends.source, ends.target):
            go_on(store)
    return False


@pytest.mark.parametrize("mode", ["copy", "move"])
def test_a_cut_copy_or_move_ends_when_it_is_repeated(small: LocalJob, mode: str) -> None:
    """Killed before any of its writes; at every moment the job is whole at one of the two ends."""
    expected = all_states(small, fresh(small).source)
    newest = max(expected)
    writes, step = 0, 1
    while True:
        ends = fresh(small)
        was_cut = cut_after(ends, writes, mode)
        if JOB_FILE in ends.paths(ends.target):
            assert newest in all_states(small, ends.target)
        else:
            assert all_states(small, ends.source).items() >= expected.items()
        if was_cut:
            ends.go(mode)
        found = all_states(small, ends.target)
        assert {i: rows for i, rows in found.items() if i <= newest} == expected
        assert all(found[i] == expected[newest] for i in found if i > newest)
        assert [p.note for p in read_pins(ends.target)] == ["audit"]
        assert read_moving(ends.target) is None
        assert {p.reason for p in read_pins(ends.source)} == (set() if mode == "move" else {"user"})
        if mode == "move":
            assert ends.paths(ends.source) == set()
        else:
            assert all_states(small, ends.source) == expected
        if not was_cut:
            break
        writes += step
    assert writes > 20


def test_a_repeat_does_not_fence_again_and_copies_only_what_is_not_there(plain: Ends) -> None:
    stop_at(plain.target, lambda operation, path: (operation, path) == ("create", MOVED_FILE))
    with pytest.raises(Killed):
        plain.go()
    go_on(plain.target)
    newest = max(all_states(plain.job, plain.source))
    result = plain.go()
    assert result.objects_copied == 0
    assert max(all_states(plain.job, plain.target)) == newest


def test_what_the_target_lost_or_had_altered_is_copied_again(ends: Ends) -> None:
    """By content, not by existence."""
    stop = Stop()
    if isinstance(ends.target, WatchedStore):
        stop_at(ends.target, lambda operation, path: (operation, path) == ("create", MOVED_FILE))
        with pytest.raises(Killed):
            ends.go()
        go_on(ends.target)
    else:
        with pytest.raises(Killed):
            ends.go(progress=stop)
    data = [p for p in sorted(ends.paths(ends.target)) if p.startswith(("changelog/", "tables/"))]
    body = ends.target.read(data[0], 1 << 30)
    ends.target.delete(data[0])
    ends.target.put(data[0], bytes([body[0] ^ 1]) + body[1:])
    ends.go(full=True)
    assert ends.target.read(data[0], 1 << 30) == body


class Stop:
    """Kills after a few objects."""

    def __call__(self, now: MoveProgress) -> None:
        if now.objects_done == 5:
            raise Killed


def test_a_target_that_is_not_complete_is_no_job(plain: Ends) -> None:
    """Nobody reads it, and nobody starts there: a start would make a job of its own in the middle of it."""
    stop_at(plain.target, lambda operation, path: (operation, path) == ("create", JOB_FILE))
    with pytest.raises(Killed):
        plain.go("copy")
    go_on(plain.target)
    with pytest.raises(JobNotFound):
        Catalog.of_root(plain.target)
    with pytest.raises(SnapshotInUse, match="not complete"):
        open_job_root(plain.target, "job", clock=FakeClock(), ids=CountingIds())
    plain.go("copy")
    assert run_in(plain.target).last.snapshot_id == max(all_states(plain.job, plain.source)) + 1


# --- a run and a mover -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later_s", [0, 3600])
def test_a_run_and_a_mover_cannot_both_have_the_job(small: LocalJob, later_s: int) -> None:
    """Before any operation of a run that starts, a whole move happens: what the run commits is moved, or one of the two gives way.

    Also if the run was silent for so long that the mover takes it for dead.
    """
    step, outcomes = 0, set()
    while (outcome := moved_before(fresh(small), step, later_s)) is not None:
        outcomes.add(outcome)
        step += 1
    assert "the run gave way" in outcomes
    assert "the mover gave way" in outcomes or later_s


def moved_before(ends: Ends, step: int, later_s: int) -> str | None:
    """The whole move before operation `step` of a run's start; None if the start does not have so many operations."""
    source = ends.source
    count, move = 0, ""

    def watch(operation: str, path: str) -> None:
        nonlocal count, move
        count += 1
        if count == step + 1:
            go_on(source)
            clock = FakeClock()
            clock.advance_s(later_s)
            try:
                execute_move(source, ends.target, ends.plan(clock=clock), actor=Actor(clock, CountingIds(prefix=4), "h", 1))  # fmt: skip
                move = "done"
            except (SnapshotInUse, Fenced):
                move = "refused"

    _watch(source, watch)
    try:
        run: Committer | None = run_in(source)
    except (StillstateError, FileNotFoundError, AssertionError):
        run = None
    go_on(source)
    if not move:
        return None
    if run is None:
        assert move == "done" or count
        return "the run gave way"
    if move == "done":
        assert Catalog.of_root(ends.target).manifest(run.last.snapshot_id) == run.last
        with pytest.raises(Fenced):
            run.commit(run.last)
        return "the run was taken along"
    assert JOB_FILE not in ends.paths(ends.target)
    run.commit(run.last)
    return "the mover gave way"


def test_what_a_run_commits_while_the_job_is_moved_is_never_lost(small: LocalJob) -> None:
    """Before any operation of a run that starts and commits, everything is copied and decided; then the run goes on, and only then
    the source goes. What it committed by then was copied, or it commits nothing."""
    step, outcomes = 0, set()
    while (outcome := copied_before(fresh(small), step)) is not None:
        outcomes.add(outcome)
        step += 1
    assert outcomes == {"turned away", "fenced", "went on"}


def copied_before(ends: Ends, step: int) -> str | None:
    """A move up to its last word before operation `step` of a run's start, and the rest of it after the run's first commit."""
    clock = FakeClock()
    clock.advance_s(3600)  # the mover takes the run for dead
    begun = False
    count = 0
    assert isinstance(ends.target, WatchedStore)
    quiet = DictStore(ends.target.objects)

    def watch(operation: str, path: str) -> None:
        nonlocal begun, count
        count += 1
        if count == step + 1:
            begun = True
            go_on(ends.source)
            stop_at(ends.target, lambda operation, path: path == JOB_FILE and MOVED_FILE in ends.paths(quiet))
            with pytest.raises(Killed):
                ends.go_at(clock)
            go_on(ends.target)

    _watch(ends.source, watch)
    committed = []
    outcome = "turned away"
    try:
        run = run_in(ends.source)
        committed.append(run.last)
        outcome = "fenced"
        committed.append(run.commit(run.last))
        outcome = "went on"
    except StillstateError:
        pass
    go_on(ends.source)
    if not begun:
        return None
    ends.go_at(clock)
    found = Catalog.of_root(ends.target)
    for manifest in committed:
        assert found.manifest(manifest.snapshot_id) == manifest
    return outcome


def test_a_run_that_starts_while_the_job_is_moved_is_turned_away(small: LocalJob) -> None:
    """Before any operation of the mover on the source, a run starts: one of the two ends, and nothing that was committed is lost."""
    step, seen = 0, set()
    while True:
        ends = fresh(small)
        source = ends.source
        assert isinstance(source, WatchedStore)
        starting = Starting(source, step)
        _watch(source, starting)
        try:
            ends.go()
            moved = True
        except (SnapshotInUse, Fenced):
            moved = False
        go_on(source)
        if starting.count <= step:
            break
        committed = starting.committed
        if moved:
            for run in committed:
                # It was taken along, and is fenced: it can commit nothing more.
                assert Catalog.of_root(ends.target).manifest(run.last.snapshot_id) == run.last
                with pytest.raises(Fenced):
                    run.commit(run.last)
        else:
            (run,) = committed
            assert run.commit(run.last).snapshot_id == run.last.snapshot_id
            assert JOB_FILE not in ends.paths(ends.target)
        seen.add((moved, bool(committed)))
        step += 1
    assert {(True, False), (False, True)} <= seen


class Starting:
    """A run that starts, as far as it gets, before an operation."""

    def __init__(self, source: Store, step: int) -> None:
        self.source, self.step, self.count = source, step, 0
        self.committed: list[Committer] = []

    def __call__(self, operation: str, path: str) -> None:
        self.count += 1
        if self.count == self.step + 1:
            go_on(self.source)
            try:
                run = run_in(self.source)
            except (StillstateError, AssertionError, FileNotFoundError):
                return
            write_status(self.source, live(run))
            self.committed.append(run)


def test_a_moved_root_cannot_be_deleted_or_moved_elsewhere_in_between(plain: Ends) -> None:
    stop_at(plain.target, lambda operation, path: (operation, path) == ("create", MOVED_FILE))
    with pytest.raises(Killed):
        plain.go()
    go_on(plain.target)
    with pytest.raises(SnapshotInUse, match="the move to"):
        delete_root(plain.source, clock=FakeClock(), ids=CountingIds(prefix=9), owner="x", with_savepoints=True)
    elsewhere = Ends(plain.job, plain.source, WatchedStore({}, lambda *_: None, name="elsewhere"))
    with pytest.raises(SnapshotInUse, match="being moved"):
        elsewhere.go()
    with pytest.raises(SnapshotInUse, match="being moved"):
        run_in(plain.source)
    plain.go()


# --- taking it back --------------------------------------------------------------------------------------------------


def test_a_move_is_taken_back_or_ends_whenever_it_was_cut(small: LocalJob) -> None:
    """Killed before any of its writes, then aborted: the source is whole and runs again, or it was too late and the move ends."""
    expected = all_states(small, fresh(small).source)
    writes, seen = 1, set()
    while True:
        ends = fresh(small)
        if not cut_after(ends, writes):
            break
        try:
            abort_move(ends.source, ends.target, clock=FakeClock(), ids=CountingIds(prefix=11))
        except InvalidConfiguration:
            if MOVED_FILE in ends.paths(ends.target):
                ends.go()
                assert ends.paths(ends.source) == set()
                seen.add("ended")
        else:
            assert all_states(small, ends.source).items() >= expected.items()
            assert run_in(ends.source).last.snapshot_id > max(expected)
            with pytest.raises(StillstateError):
                ends.plan()
            with pytest.raises(SnapshotInUse):
                open_job_root(ends.target, "job", clock=FakeClock(), ids=CountingIds())
            delete_root(ends.target, clock=FakeClock(), ids=CountingIds(prefix=12), owner="x", with_savepoints=True)
            assert ends.paths(ends.target) == set()
            seen.add("aborted")
        writes += 1
    assert seen == {"aborted", "ended"}


def test_a_mover_that_was_aborted_meanwhile_decides_nothing(plain: Ends) -> None:
    """It only slept: of the two one wins, and the source is free."""

    def watch(operation: str, path: str) -> None:
        if (operation, path) == ("create", MOVED_FILE):
            go_on(plain.target)
            abort_move(plain.source, plain.target, clock=FakeClock(), ids=CountingIds(prefix=13))

    _watch(plain.target, watch)
    with pytest.raises(SnapshotInUse, match="taken back"):
        plain.go()
    outcome = read_outcome(plain.target)
    assert outcome is not None
    assert outcome.outcome == "aborted"
    assert read_moving(plain.source) is None
    assert run_in(plain.source).last.snapshot_id > 8


def test_there_is_nothing_to_take_back_where_nothing_is_moved(plain: Ends) -> None:
    with pytest.raises(InvalidConfiguration, match="nothing is on its way"):
        abort_move(plain.source, plain.target, clock=FakeClock(), ids=CountingIds())


# --- what comes meanwhile --------------------------------------------------------------------------------------------


def test_a_savepoint_or_pin_that_came_meanwhile_is_moved_too(plain: Ends) -> None:
    """Between the listing and the deletion: whatever is whole by then goes along."""

    def watch(operation: str, path: str) -> None:
        if (operation, path) == ("create", JOB_FILE):  # of the savepoint: all of the root is copied by then
            go_on(plain.target)
            add_savepoint(plain.source, "late", 4)
            pin_snapshot(
                plain.source, 6, reason="user", holder="late", clock=FakeClock(), ids=CountingIds(prefix=15), note="late"
            )  # fmt: skip

    _watch(plain.target, watch)
    result = plain.go()
    assert set(result.savepoints) == {"before", "late"}
    assert {pin.note for pin in read_pins(plain.target)} == {"audit", "late"}
    assert all_states(plain.job, plain.target.child("savepoints/late"))
    assert plain.paths(plain.source) == set()


def test_a_copy_of_a_job_that_goes_on_holds_all_that_its_boundary_keeps(plain: Ends) -> None:
    """Snapshots come and others are given up while it is copied: the boundary that is copied last may keep newer ones."""

    def watch(operation: str, path: str) -> None:
        if operation == "create" and path.startswith("snapshots/"):
            go_on(plain.target)
            run = run_in(plain.source)
            for _ in range(3):
                run.commit(run.last)
            newest = run.last.snapshot_id
            delete_snapshots(plain.source, [newest - 1], clock=FakeClock(), ids=CountingIds(prefix=21), threads=1)

    _watch(plain.target, watch)
    result = plain.go("copy")
    there = Catalog.of_root(plain.target).snapshot_ids()
    kept = read_boundary(plain.target)
    assert kept.kept
    assert kept.snapshot_id > 6
    assert set(kept.kept) <= set(there)
    assert result.snapshots == tuple(there)
    assert verify_root(plain.target, clock=FakeClock(), ids=CountingIds(prefix=22), level="full").findings == ()


@pytest.mark.parametrize("how", ["given up", "gone"])
def test_a_job_that_is_deleted_while_it_is_copied_is_no_copy(plain: Ends, how: str) -> None:
    def watch(operation: str, path: str) -> None:
        if operation == "create" and path.startswith("snapshots/"):
            go_on(plain.target)
            advance_boundary(plain.source, lambda now: now.tombstone(), clock=FakeClock(), ids=CountingIds(prefix=21))
            for found in list(plain.source.list_objects("")):
                if how == "gone":
                    plain.source.delete(found.path)

    _watch(plain.target, watch)
    with pytest.raises(JobNotFound, match="was deleted, or moved elsewhere, while it was copied"):
        plain.go("copy")
    assert not plain.target.exists(JOB_FILE)
    assert not plain.target.exists(MOVED_FILE)
    delete_root(plain.target, clock=FakeClock(), ids=CountingIds(prefix=22), owner="somebody")
    assert plain.paths(plain.target) == set()


@pytest.mark.parametrize("mode", ["copy", "move"])
@pytest.mark.parametrize("before", ["snapshots/", "savepoint"])
def test_a_savepoint_that_is_deleted_while_its_job_is_carried_stays_behind(
    plain: Ends, before: str, mode: MoveMode
) -> None:
    deleted: list[str] = []

    def watch(operation: str, path: str) -> None:
        if operation in ("create", "put") and path.startswith(before) and not deleted and savepoint_names(plain.target):
            deleted.append("before")
            delete_savepoint(plain.source, "before", clock=FakeClock(), ids=CountingIds(prefix=21), owner="somebody")

    _watch(plain.target, watch)
    result = plain.go(mode)
    assert deleted
    assert result.savepoints == ()
    assert not any(path.startswith(SAVEPOINTS_DIR) for path in plain.paths(plain.target))
    assert plain.target.exists(JOB_FILE)


def test_a_target_that_loses_what_it_was_given_keeps_the_source(plain: Ends) -> None:
    """Read back before anything is decided."""

    class Losing(WatchedStore):
        def put_file(self, local: Path, path: str) -> None:
            DictStore.put(self, path, local.read_bytes()[:-1] + b"?")

        def child(self, name: str) -> WatchedStore:
            return Losing(self.objects, self.watch, f"{self._at(name)}/", self.name)

    ends = Ends(plain.job, plain.source, Losing({}, lambda *_: None, name="losing"))
    expected = all_states(plain.job, plain.source)
    with pytest.raises(StillstateError, match="reads back altered"):
        ends.go()
    assert all_states(plain.job, plain.source).items() >= expected.items()
    assert MOVED_FILE not in ends.paths(ends.target)


@FEW_ENDS
def test_documents_of_a_move_hold_no_credentials(ends: Ends) -> None:
    """Only URLs without them."""
    from model import SECRET

    ends.go("copy")
    assert all(SECRET.encode() not in body for body in ends.bodies(ends.target).values())


def test_a_marker_is_refused_by_name_only_once(plain: Ends) -> None:
    """Of two movers with one target, the second finds it taken."""
    plan = plain.plan("copy")
    assert plain.target.create(MOVING_FILE, b"x") is Created.MINE
    with pytest.raises(InvalidConfiguration, match="taken"):
        execute_move(plain.source, plain.target, plan, actor=Actor(FakeClock(), CountingIds(), "here", 1))  # fmt: skip


def test_the_furniture_is_what_the_tests_say(plain: Ends) -> None:
    """A snapshot that was given up is none."""
    assert 2 not in all_states(plain.job, plain.source)
    assert INFO.uid == "job-1"
