"""Copies and moves of a whole job root, of one snapshot, or of a savepoint folder between stores. An interrupted one
continues when it is repeated.

The order guarantees that an interrupted copy is either unusable or valid, and that the source loses nothing that the
target does not have:

1. `moving.json` at the target, create-if-absent: which move fills the target, and from where. Nothing is written into
   a target with other content.
2. Of a job root that is moved: `moving.json` at the source, a term, a fencing snapshot. No run commits there any more,
   and none starts (snapshot/handover.py).
3. Per snapshot, oldest first, its data and then its manifest; then pins, and the newest term, so that later runs count
   on from it; savepoint folders the same way (maintenance/move/carry.py).
4. Of a move: step 3 again for new savepoints and pins, until there is nothing new. Then all of the target is checked.
5. `moved.json` at the target: decided. The move cannot be taken back from here on.
6. `job.json`: from here on the target is a usable job root, savepoint or snapshot.
7. Of a move: the source is deleted, by the same deletion as everywhere.
8. `moving.json` is removed.

A repeat finds the documents and continues; objects in the target are accepted by their content
(maintenance/copy/objects.py). Taking a move back (`abort_move`) creates `moved.json` first, with the other outcome: so
of a mover and an abort, one wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    JobNotFound,
    MissingSnapshot,
    SnapshotInUse,
    StoreUnavailable,
    Unavailable,
)
from state_runtime.base.ids import Ids
from state_runtime.maintenance.delete.roots import delete_root, delete_savepoint
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.maintenance.layout import kind_of
from state_runtime.maintenance.move.carry import ROUNDS_MAX, Carrier, MoveProgress, create_document, read_job, stopped
from state_runtime.maintenance.move.plan import MovePlan, refuse_if_needed
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.create_once import Proposal, create_agreed
from state_runtime.snapshot.fencing import open_run
from state_runtime.snapshot.handover import MoveOutcome, Moving, read_moving, read_outcome
from state_runtime.snapshot.paths import JOB_FILE, MOVED_FILE, MOVING_FILE, SAVEPOINTS_DIR
from state_runtime.snapshot.savepoint_record import read_record
from state_runtime.snapshot.term_files import write_status
from state_runtime.store import Created, Store

__all__ = ["MoveProgress", "MoveResult", "abort_move", "execute_move", "let_go"]


@dataclass(frozen=True, kw_only=True)
class MoveResult:
    """A copy or move that is complete.

    Attributes:
        expired: snapshots that expired in the source while it was copied.
        left: objects at the source of a move that Stillstate did not write; they stay.
        objects, bytes: of data, each object once; objects_copied, bytes_copied: objects that the target did not have.
    """

    plan: MovePlan
    snapshots: tuple[int, ...] = ()
    savepoints: tuple[str, ...] = ()
    expired: tuple[int, ...] = ()
    objects: int = 0
    bytes: int = 0
    objects_copied: int = 0
    bytes_copied: int = 0
    seconds: float = 0.0
    left: tuple[str, ...] = ()


def execute_move(
    source: Store,
    target: Store,
    plan: MovePlan,
    *,
    parent: Store | None = None,
    full: bool = False,
    independent: bool = False,
    progress: Callable[[MoveProgress], None] | None = None,
    keep_source: bool = False,
    before_decided: Callable[[], None] = lambda: None,
    threads: int = 16,
    actor: Actor,
) -> MoveResult:
    """Execute a plan, in the order that the module documents. After an error or crash make a new plan and execute it.

    Args:
        parent: the job root that a savepoint folder belongs to; None if the folder is outside a job root.
        full: every object is read in the target and compared, even if the store copied it itself.
        independent: no object of the target shares its bytes with another file by hard link.
        progress: called in this thread.
        keep_source: end when the target is usable. The source stays and refuses all users, until the move is repeated
            without this option, or the target is deleted and the source is freed (`let_go`).
        before_decided: called when the target is complete and not yet usable; a repeat calls it again.
        actor: host and pid identify this process, for people.

    Raises:
        SnapshotInUse: the source of a move is needed, or the move was taken back; nothing of the target is usable.
        SnapshotExpired: the snapshot expired while it was copied. MissingFile, CorruptData: the source is damaged.
        InvalidConfiguration: something else was written into the target. JobNotFound: the source was deleted meanwhile.
        StoreUnavailable, OutcomeUnknown: repeat it.
    """
    started_s = actor.clock.monotonic_s()
    if plan.outcome is not None and plan.resumes is None:
        return MoveResult(plan=plan)
    if plan.resumes is None:
        target.probe()
    moving = plan.resumes or _begin(target, plan, actor)
    carrier = Carrier(
        source,
        target,
        plan,
        moving.uid,
        # Between stores this process copies the bytes. A move reads them back before it deletes the only other copy.
        verified=full or (plan.mode == "move" and not plan.inside),
        independent=independent,
        progress=progress,
        threads=threads,
        actor=actor,
    )
    if plan.outcome is None:
        if plan.mode == "move" and plan.what == "root":
            _take_over(source, target, plan, moving, actor)
        _carry_all(carrier, plan)
        _look_at_all(target, carrier, threads, actor)
    # Read before it is decided: the source of a copy may be deleted at any time.
    job = None if target.exists(JOB_FILE) else read_job(source, target)
    before_decided()
    if plan.outcome is None:
        _decide(source, target, moving, actor.clock)
    if job is not None:
        create_document(target, JOB_FILE, job, source)
    left: tuple[str, ...] = ()
    if plan.mode == "move" and not keep_source:
        if plan.what != "snapshot":
            carrier.give_pins_up()
        left = _give_up(source, parent, plan, moving.uid, actor)
    if not keep_source:
        target.delete(MOVING_FILE)
    return MoveResult(
        plan=plan,
        snapshots=tuple(carrier.snapshots),
        savepoints=tuple(carrier.savepoints),
        expired=tuple(carrier.expired),
        objects=carrier.objects,
        bytes=carrier.bytes,
        objects_copied=carrier.objects_copied,
        bytes_copied=carrier.bytes_copied,
        seconds=actor.clock.monotonic_s() - started_s,
        left=left,
    )


def abort_move(source: Store, target: Store, *, clock: Clock, ids: Ids) -> None:
    """Take a copy or move back: the source is free again, and the objects at the target will never be used.

    Raises:
        InvalidConfiguration: nothing is being moved between the two, or the move is decided already: repeat it to
            finish.
        OutcomeUnknown, StoreUnavailable: repeat it.
    """
    at_source, at_target = read_moving(source), read_moving(target)
    if at_source is not None and (at_source.role != "source" or at_source.other_url != target.url):
        at_source = None
    if at_target is not None and (at_target.role != "target" or at_target.other_url != source.url):
        at_target = None
    moving = at_target or at_source
    if moving is None:
        raise InvalidConfiguration(f"nothing is on its way from {source.url} to {target.url}; nothing was changed")
    outcome = MoveOutcome(moving.uid, "aborted", moving.mode, source.url, clock.now_ms())
    decided = create_agreed(target, Proposal(MOVED_FILE, outcome.encode(), outcome), lambda: read_outcome(target))
    if decided is None or decided.outcome != "aborted":
        raise InvalidConfiguration(
            f"{target.url} is complete already, so the {moving.mode} can only be finished: repeat `stillstate "
            f"{moving.mode}`"
        )
    let_go(source, moving.uid)


# --- steps -----------------------------------------------------------------------------------------------------------


def _begin(target: Store, plan: MovePlan, actor: Actor) -> Moving:
    """Claim the target for this move: from now on no job can be started there."""
    moving = Moving(
        uid=actor.ids.uid(),
        role="target",
        mode=plan.mode,
        what=plan.what,
        other_url=plan.source_url,
        job_uid=plan.job.uid,
        snapshot_id=plan.snapshot_id,
        at_ms=actor.clock.now_ms(),
        host=actor.host,
        pid=actor.pid,
    )
    mine = target.create(MOVING_FILE, moving.encode()) is Created.MINE
    # Check again after the create: a job may have been started there since the plan.
    if not mine or target.exists(JOB_FILE):
        if mine:
            target.delete(MOVING_FILE)
        raise InvalidConfiguration(f"{target.url} was taken by another copy or job meanwhile; choose another target")
    return moving


def _take_over(source: Store, target: Store, plan: MovePlan, moving: Moving, actor: Actor) -> None:
    """Fence the job at the source: no run commits there from here on, and none starts."""
    _stop_if_aborted(source, target, moving, read_outcome(target))
    own = replace(moving, role="source", other_url=target.url)
    # Before the create: an earlier attempt wrote exactly the same bytes.
    resumed = read_moving(source) is not None
    found = create_agreed(source, Proposal(MOVING_FILE, own.encode(), own), lambda: read_moving(source))
    if found is None or found.uid != moving.uid:
        where = found.other_url if found is not None else "elsewhere"
        raise SnapshotInUse(f"{source.url} is being moved to {where} by somebody else; nothing was moved")
    if found.term:
        return
    # From here on every run that starts finds the file. A run that looked before the create has an older term than the
    # one that is taken now.
    try:
        refuse_if_needed(source, "root", None, actor.clock, mover=moving.uid, resumed=resumed)
    except SnapshotInUse:
        let_go(source, moving.uid)
        raise
    catalog = Catalog.of_root(source, actor.clock)
    newest = catalog.latest()
    if newest is None:
        # Another mover was quicker, or the root was deleted.
        let_go(source, moving.uid)
        raise MissingSnapshot(f"the snapshots in {source.url} went while it was about to be moved; nothing was moved")
    committer = open_run(catalog, plan.job, newest, actor=actor, mover=moving.uid)
    write_status(source, stopped(committer.term, committer.last, f"moved to {target.url}", actor.clock))
    source.put(MOVING_FILE, replace(own, term=committer.term.term).encode())


def _carry_all(carrier: Carrier, plan: MovePlan) -> None:
    """Copy; if a root is moved, copy again until nothing new is found."""
    if plan.mode == "copy" or plan.what != "root":
        carrier.carry()
        return
    before = carrier.found_in_source()
    for _ in range(ROUNDS_MAX):
        carrier.carry()
        now = carrier.found_in_source()
        if now == before:
            return
        before = now
    raise Unavailable(
        f"{plan.source_url} changed {ROUNDS_MAX} times while it was moved; find out who works on it, and repeat the "
        "move"
    )


def _look_at_all(target: Store, carrier: Carrier, threads: int, actor: Actor) -> None:
    """Check that each object that a manifest in the target names exists, with its size. (Digests were compared during
    the copy.)"""
    for folder in [target, *(target.child(f"{SAVEPOINTS_DIR}/{name}") for name in carrier.savepoints)]:
        report = verify_root(folder, level="structure", threads=threads, clock=actor.clock, ids=actor.ids)
        for finding in report.findings:
            kind = StoreUnavailable if finding.kind == "unreachable" else CorruptData
            raise kind(
                f"{finding.path} in {folder.url} is {finding.kind} after it was copied: {finding.detail}. "
                "The source was not touched; repeat the copy"
            )


def _decide(source: Store, target: Store, moving: Moving, clock: Clock) -> None:
    """Record the move as complete, unless it was taken back before."""
    outcome = MoveOutcome(moving.uid, "complete", moving.mode, source.url, clock.now_ms())
    decided = create_agreed(target, Proposal(MOVED_FILE, outcome.encode(), outcome), lambda: read_outcome(target))
    _stop_if_aborted(source, target, moving, decided)


def _give_up(source: Store, parent: Store | None, plan: MovePlan, uid: str, actor: Actor) -> tuple[str, ...]:
    """Delete the moved source by the usual deletion. Return the objects that Stillstate did not write; they stay.

    Raises:
        SnapshotInUse: a new holder, which is named, needs the source; the target is complete. Repeat the move when the
            holder is done.
        Unavailable: some object could not be removed; repeat the move.
    """
    clock, ids, owner = actor.clock, actor.ids, actor.owner
    if plan.what == "snapshot":
        done = delete_snapshots(source, [plan.snapshot_id], clock=clock, ids=ids)
    elif plan.what == "savepoint" and parent is not None:
        name = source.url.rsplit("/", 1)[-1]
        if read_record(source) is None:
            return ()  # removed by an interrupted attempt
        done = delete_savepoint(parent, name, clock=clock, ids=ids, owner=owner)
    else:
        try:
            done = delete_root(source, clock=clock, ids=ids, owner=owner, with_savepoints=True, moved_by=uid)
        except JobNotFound:
            return ()  # removed by an interrupted attempt
    if done.kept:
        who = "; ".join(name for names in done.kept.values() for name in names)
        raise SnapshotInUse(
            f"{plan.target_url} is complete, but the source is needed by {who}: repeat the move when they are done"
        )
    failed = [f for f in done.failures if kind_of(f.path) is not None]
    if failed:
        raise Unavailable(
            f"{plan.target_url} is complete, but {len(failed)} objects could not be removed from {source.url}, among "
            f"them {failed[0].path}: {failed[0].message}. Repeat the move"
        )
    return tuple(f.path for f in done.failures)


def _stop_if_aborted(source: Store, target: Store, moving: Moving, outcome: MoveOutcome | None) -> None:
    if outcome is not None and outcome.outcome == "aborted":
        let_go(source, moving.uid)
        raise SnapshotInUse(f"the {moving.mode} to {target.url} was taken back; nothing more is done")


def let_go(source: Store, uid: str) -> None:
    """Free the source of a move that is taken back. Call it only if the target can no longer become usable."""
    found = read_moving(source)
    if found is not None and found.uid == uid and found.role == "source":
        source.delete(MOVING_FILE)
