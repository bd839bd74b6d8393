"""Deleting snapshots, savepoints and whole jobs. Boundary first, then data, the record last; refused if somebody needs
them.

    refuse ──▶ announce ──▶ settle ──▶ data ──▶ manifest            (snapshots; see snapshot/expiry_boundary.py)
    refuse ──▶ record DELETING ──▶ tombstone ──▶ data ──▶ record    (savepoints)
    refuse ──▶ tombstone ──▶ data ──▶ boundary                      (job roots)

A crash between any two leaves something that is no snapshot any more, or still is one as a whole; the same call again
ends it, and so does garbage collection. An object that cannot be deleted is reported by its name, and the record that
leads to it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptManifest,
    Fenced,
    MissingSnapshot,
    SnapshotExpired,
    SnapshotInUse,
    StillstateError,
    UnsupportedFormat,
)
from state_runtime.base.ids import Ids
from state_runtime.maintenance.layout import DATA_KINDS, kind_of
from state_runtime.maintenance.marks import Existing, Holders, Marker, mark, read_existing, read_holders
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.fencing import live_run
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.lineage import check_belongs
from state_runtime.snapshot.ownership import JobProof, Proof, advance_own_boundary
from state_runtime.snapshot.paths import manifest_path
from state_runtime.store import Store

__all__ = [
    "Deleted",
    "DeletionPlan",
    "Failure",
    "OnProgress",
    "delete_objects",
    "delete_snapshots",
    "give_up",
    "needed_by",
    "plan_deletion",
    "remove_given_up",
    "run_of",
    "settle",
]

THREADS = 16
OnProgress = Callable[[int, int], None]
"""Objects that are done, and all of them."""


@dataclass(frozen=True)
class Failure:
    """An object that could not be deleted."""

    path: str
    message: str


@dataclass(frozen=True)
class Deleted:
    """What a deletion did.

    Attributes:
        snapshot_ids: given up, nothing of them is left.
        kept: not given up after all, or not removed yet, because of somebody who came while they were: who, by id.
        objects, bytes: removed; bytes as far as they are recorded.
        failures: what is left; the same call again tries it again.
    """

    snapshot_ids: tuple[int, ...] = ()
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    objects: int = 0
    bytes: int = 0
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class DeletionPlan:
    """What deleting some snapshots would do.

    Attributes:
        given_up: those of them that are given up already, by a deletion that was cut short.
        objects, bytes: that nothing else needs; bytes as far as they are recorded.
        shared_objects: that they need, and that stay because others need them too.
    """

    snapshot_ids: tuple[int, ...]
    given_up: tuple[int, ...]
    objects: int
    bytes: int
    shared_objects: int


# --- who needs what --------------------------------------------------------------------------------------------------


def run_of(catalog: Catalog, clock: Clock) -> str:
    """The live run, for people; empty if there is none that was heard of."""
    status = live_run(catalog, clock)
    return f"run {status.term} (process {status.pid} on {status.host})" if status is not None else ""


def needed_by(catalog: Catalog, existing: Existing, holders: Holders, clock: Clock) -> Holders:
    """Who needs each snapshot: pins and materializations, and the newest one whoever runs the job, or will.

    Raises:
        JobRootMismatch: the newest one is of another job, so which one this job goes on from is not known; nothing may
            be deleted.
        JobNotFound: the job was deleted meanwhile.
    """
    try:
        newest = catalog.latest()
    except (CorruptManifest, UnsupportedFormat) as error:
        lost = max(existing.snapshot_ids, default=0)
        raise type(error)(
            f"{error}. Nothing was deleted: snapshot {lost} is the newest, and a job always has a newest one to go on "
            f"from. First go back to an older one (`stillstate rollback {catalog.job} @ID`, or `stillstate run "
            f"{catalog.job} --from-snapshot ID`); after that the damaged one can be deleted with --damaged"
        ) from error
    if newest is None:
        return holders
    check_belongs(newest, catalog.job_info(), catalog.root.url, own=False)
    run = run_of(catalog, clock)
    reason = f"{run}, which goes on from it" if run else "the job's next run, which goes on from it"
    mine = (*holders.get(newest.snapshot_id, ()), reason)
    # The folder of one that is on its way belongs to the run too.
    coming = {i: (f"{run or 'a run'} is making it",) for i in existing.snapshot_ids if i > newest.snapshot_id}
    return {**holders, newest.snapshot_id: mine, **coming}


def _refuse(needed: Holders, doomed: Iterable[int], root: Store) -> None:
    """
    Raises:
        SnapshotInUse: one of the doomed is needed; all holders are named.
    """
    found = [f"snapshot {i} is needed by {'; '.join(needed[i])}" for i in sorted(doomed) if i in needed]
    if found:
        raise SnapshotInUse(f"{root.url}: {'. '.join(found)}. Nothing was deleted")


def plan_deletion(root: Store, snapshot_ids: Sequence[int], *, clock: Clock, damaged: bool = False) -> DeletionPlan:
    """What `delete_snapshots` would do now; only reads.

    Raises:
        What `delete_snapshots` raises.
    """
    marker = Marker(root, clock)
    given_up = _check(marker.catalog, snapshot_ids, clock, damaged=damaged)
    doomed = set(snapshot_ids)
    theirs: dict[str, int] = {}
    for snapshot_id in sorted(doomed):
        theirs |= marker.rest_of(snapshot_id)
    existing = read_existing(root, without=doomed if damaged else ())
    needed: set[str] = set()
    for snapshot_id in {*existing.snapshot_ids, *existing.boundary.going} - doomed:
        try:
            needed |= marker.of(snapshot_id)[0].keys()
        except MissingSnapshot:
            continue  # given up by somebody else since, or on its way
    own = {path: size for path, size in theirs.items() if path not in needed}
    return DeletionPlan(
        tuple(sorted(doomed)),
        tuple(sorted(given_up)),
        len(own),
        sum(abs(size) for size in own.values()),
        len(theirs) - len(own),
    )


def _check(catalog: Catalog, snapshot_ids: Sequence[int], clock: Clock, *, damaged: bool) -> set[int]:
    """Which of the doomed are given up already.

    Raises:
        MissingSnapshot, SnapshotInUse, CorruptData, UnsupportedFormat: see `delete_snapshots`.
    """
    root, doomed = catalog.root, set(snapshot_ids)
    existing = read_existing(root, without=doomed if damaged else ())
    holders, _ = read_holders(root, clock)
    given_up = {i for i in doomed if not existing.boundary.keeps(i)}
    unknown = doomed - set(existing.snapshot_ids) - given_up - ({*existing.boundary.kept} if damaged else set())
    if unknown:
        newest = ", ".join(map(str, existing.snapshot_ids[-5:])) or "none"
        raise MissingSnapshot(f"{root.url} has no snapshot {min(unknown)}; the newest are: {newest}")
    _refuse(needed_by(catalog, existing, holders, clock), doomed - given_up, root)
    if not damaged:
        for snapshot_id in doomed - given_up:
            try:
                catalog.manifest(snapshot_id)
            except SnapshotExpired:
                given_up.add(snapshot_id)  # by somebody else, just now
    return given_up


# --- snapshots -------------------------------------------------------------------------------------------------------


def delete_snapshots(
    root: Store,
    snapshot_ids: Sequence[int],
    *,
    clock: Clock,
    ids: Ids,
    damaged: bool = False,
    proof: Proof | None = None,
    marker: Marker | None = None,
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> Deleted:
    """Delete snapshots of a job. From the boundary on they are none, all of them at once; then what only they need is
    removed.

    Given up and removed before: fine. Repeated after a crash it ends what was begun.

    Args:
        damaged: also those whose manifest is lost or damaged: what they named is left to garbage collection.
        proof: of a caller that knows whose root it was before; else it is whose it is now.
        marker: of a caller that deletes again and again.
        on_progress: called in this thread.

    Returns:
        What was done; it is not complete if `kept` or `failures` say so.

    Raises:
        MissingSnapshot: there is none of an id. SnapshotInUse: one is needed; the message names by whom. Nothing was
            changed.
        CorruptData, UnsupportedFormat: what some snapshot needs cannot be known; nothing was removed.
        Fenced: the proof failed; nothing was changed since the last one.
        StoreUnavailable, OutcomeUnknown: they may be given up; repeat it.
    """
    marker = marker or Marker(root, clock)
    proof = proof or JobProof(root, marker.catalog.job_info().uid)
    refuse_if_handed_over(root)
    _check(marker.catalog, snapshot_ids, clock, damaged=damaged)
    existing = read_existing(root, without=snapshot_ids if damaged else ())
    if not existing.snapshot_ids:
        raise MissingSnapshot(f"{root.url} was moved or deleted meanwhile; there is nothing to delete")
    since = existing.boundary.sequence
    back = give_up(root, snapshot_ids, existing.snapshot_ids, proof, clock=clock, ids=ids, since=since)
    doomed = [i for i in snapshot_ids if i not in back]
    removed = remove_given_up(root, doomed, proof, marker=marker, clock=clock, on_progress=on_progress, threads=threads)
    return replace(removed, kept={**removed.kept, **back})


def give_up(
    root: Store,
    doomed: Collection[int],
    existing: Collection[int],
    proof: Proof,
    *,
    clock: Clock,
    ids: Ids,
    since: int = 0,
) -> dict[int, tuple[str, ...]]:
    """Announce and settle. Atomic in each step; a crash in between leaves snapshots `going`, which the next collector
    settles.

    Args:
        existing: all snapshots that there are, and `since`: sequence of the boundary that was read with them.
        proof: made before each boundary, so that a sleeper gives nothing up in a root that is another's by now.

    Returns:
        Who came meanwhile, by snapshots that are back for them.

    Raises:
        Fenced: the root is another's by now; nothing was changed.
        CorruptManifest, UnsupportedFormat, StoreUnavailable, OutcomeUnknown: as above; nothing may be removed.
    """
    proof = _Followed(root, proof, max(set(existing) - set(doomed), default=0))
    announced = advance_own_boundary(
        root, lambda now: now.announcing(doomed, existing), proof, clock=clock, ids=ids, since=since
    )
    going = set(doomed) & set(announced.going)
    return settle(root, going, proof, clock=clock, ids=ids, since=announced.sequence)


@dataclass(frozen=True)
class _Followed:
    """A proof that looks, too, whether the newest of the snapshots that stay is still there.

    Without it a sleeper could give up all snapshots of an older backup: the run of a term that the backup holds finds
    its own mark and its own newest snapshot there, and what a newer run had made since is gone.

    Attributes:
        newest: of those that stay; 0 if none does.
    """

    root: Store
    proof: Proof
    newest: int

    @property
    def job_uid(self) -> str:
        """See `Proof`."""
        return self.proof.job_uid

    def check(self, *, since: int = 0) -> None:
        """See `Proof`. One small request more."""
        self.proof.check(since=since)
        if not self._is_there():
            self.proof.check(since=since)

    def check_place(self) -> None:
        """See `Proof`. One small request more."""
        self.proof.check_place()
        if not self._is_there():
            self.proof.check_place()

    def _is_there(self) -> bool:
        """If not, it was given up itself meanwhile, and there is a newer one. That one may be another job's, in whose
        root the caller woke: he proves once more whose the root is.

        Raises:
            Fenced: there is none.
        """
        if not self.newest or self.root.exists(manifest_path(self.newest)):
            return True
        if max(read_existing(self.root).snapshot_ids, default=0) < self.newest:
            raise Fenced(
                f"{self.root.url} was replaced by an older backup: snapshot {self.newest}, which was to stay, is gone. No snapshot expired there; look at the root, and repeat the command if it is still wanted"
            )
        return False


def settle(
    root: Store, announced: Collection[int], proof: Proof, *, clock: Clock, ids: Ids, since: int = 0
) -> dict[int, tuple[str, ...]]:
    """Take those back that somebody pinned before they were announced; the others are gone. See `give_up`."""
    if not announced:
        return {}
    # After the announcement: a pin that counts was there before it.
    holders, _ = read_holders(root, clock)
    settled = advance_own_boundary(
        root, lambda now: now.settling(announced, holders.keys()), proof, clock=clock, ids=ids, since=since
    )
    return {i: holders[i] for i in announced if i in holders and settled.keeps(i)}


def remove_given_up(
    root: Store,
    doomed: Collection[int],
    proof: Proof,
    *,
    marker: Marker,
    clock: Clock,
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> Deleted:
    """Remove what only these snapshots need, then their manifests. Of one that is not gone by the boundary nothing is
    touched.

    No age counts here: a manifest named these objects, so nobody is about to name them for the first time.

    Args:
        proof: made before each few deletions, and after what is deleted was read: manifests are deleted by their
            number, which the root of another job has too.

    Raises:
        Fenced: the root is another's by now; nothing was removed since the last proof.
        CorruptData, UnsupportedFormat, StoreUnavailable: what others need cannot be known; nothing was removed.
    """
    boundary = read_boundary(root)
    gone = [i for i in sorted(doomed) if boundary.is_gone(i)]
    if not gone:
        return Deleted()
    theirs = {snapshot_id: marker.rest_of(snapshot_id) for snapshot_id in gone}
    _, holders, marks = mark(root, marker, clock)
    # What others gave up since was not asked what it needs, and is a snapshot in a backup that is older than that: so
    # their boundary must be there too, and not only the one that these were given up by.
    prove = partial(proof.check, since=max(boundary.sequence, marks.boundary_sequence))
    waiting = {i: holders[i] for i in gone if i in holders}
    # Once more, now that it is chosen: a materialization pins its snapshot, and then looks whether it is there.
    holders, needed = read_holders(root, clock, marker.records)
    waiting |= {i: holders[i] for i in gone if i in holders}
    removable = {
        path: size
        for snapshot_id, paths in theirs.items()
        if snapshot_id not in waiting
        for path, size in paths.items()
        if not marks.keeps(path) and not needed.keeps(path) and kind_of(path) in DATA_KINDS
    }
    # What leads to other objects after them, or a crash in between would lose where they are.
    leaves = sorted(p for p in removable if kind_of(p) not in ("segment", "listing"))
    failures = delete_objects(
        root, leaves, prove=prove, on_progress=_part(on_progress, 0, len(removable)), threads=threads
    )
    faults.reach("retention-data-removed")
    failed = {f.path for f in failures}
    blocked = {path for i in gone if failed & theirs[i].keys() for path in theirs[i]}
    leading = sorted(removable.keys() - set(leaves) - blocked)
    failures += delete_objects(
        root,
        leading,
        prove=prove,
        on_progress=_part(on_progress, len(leaves), len(removable)),
        threads=threads,
    )
    failed = {f.path for f in failures}
    left = failed | (removable.keys() - set(leaves) - set(leading))
    finished = [i for i in gone if i not in waiting and not left & theirs[i].keys()]
    # The record last: as long as it lies there, the next collector knows what it led to.
    failures += delete_objects(root, [manifest_path(i) for i in finished], prove=prove, threads=threads)
    for snapshot_id in finished:
        root.remove_empty_folders(manifest_path(snapshot_id).rpartition("/")[0])
    manifests = {f.path for f in failures}
    return Deleted(
        tuple(i for i in finished if manifest_path(i) not in manifests),
        waiting,
        len(removable.keys() - left),
        sum(abs(size) for path, size in removable.items() if path not in left),
        tuple(failures),
    )


def _part(on_progress: OnProgress | None, before: int, total: int) -> OnProgress | None:
    """Progress of a part of all."""
    return None if on_progress is None else lambda done, _: on_progress(before + done, total)


def delete_objects(
    root: Store,
    paths: Sequence[str],
    *,
    prove: Callable[[], None],
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> list[Failure]:
    """Delete objects one by one, several at a time: bulk requests of object stores hide which ones failed.

    Args:
        prove: called before each `threads` deletions, so that somebody who wakes in a root that is another's by now
            deletes no more than those that he was at. What it raises ends the deletion.

    Returns:
        Those that could not be deleted. The others are gone, also those that were not there.
    """
    failures: list[Failure] = []

    def delete(path: str) -> Failure | None:
        try:
            root.delete(path)
        except StillstateError as error:
            return Failure(path, str(error))
        return None

    if not paths:
        return failures
    with ThreadPoolExecutor(min(threads, len(paths)), thread_name_prefix="delete") as pool:
        for first in range(0, len(paths), threads):
            prove()
            for done, failure in enumerate(pool.map(delete, paths[first : first + threads]), first + 1):
                if failure is not None:
                    failures.append(failure)
                if on_progress is not None:
                    on_progress(done, len(paths))
    return failures
