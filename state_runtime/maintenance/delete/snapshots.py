"""Deletion of snapshots, savepoints and whole jobs. Boundary first, then data, the record last; refused if a holder
needs them.

    refuse ──▶ announce ──▶ settle ──▶ data ──▶ manifest            (snapshots; see snapshot/expiry_boundary.py)
    refuse ──▶ record DELETING ──▶ tombstone ──▶ data ──▶ record    (savepoints)
    refuse ──▶ tombstone ──▶ data ──▶ boundary                      (job roots)

A crash between two steps leaves either an expired snapshot or a complete one. The same call again finishes the
deletion, and so does garbage collection. An object that cannot be deleted is reported by its name, and the record that
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
"""Called with the number of objects done and the total."""


@dataclass(frozen=True)
class Failure:
    """An object that could not be deleted."""

    path: str
    message: str


@dataclass(frozen=True)
class Deleted:
    """The result of a deletion.

    Attributes:
        snapshot_ids: expired, and completely removed.
        kept: not expired after all, or not removed yet, because a holder appeared meanwhile: the holders, by id.
        objects, bytes: removed; bytes as far as they are recorded.
        failures: objects that are left; the same call again tries them again.
    """

    snapshot_ids: tuple[int, ...] = ()
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    objects: int = 0
    bytes: int = 0
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class DeletionPlan:
    """The expected result of deleting some snapshots.

    Attributes:
        given_up: those that have expired already, by an interrupted deletion.
        objects, bytes: objects that nothing else needs; bytes as far as they are recorded.
        shared_objects: objects of these snapshots that stay because others need them too.
    """

    snapshot_ids: tuple[int, ...]
    given_up: tuple[int, ...]
    objects: int
    bytes: int
    shared_objects: int


# --- who needs what --------------------------------------------------------------------------------------------------


def run_of(catalog: Catalog, clock: Clock) -> str:
    """Name the live run, for people; empty if no live run is known."""
    status = live_run(catalog, clock)
    return f"run {status.term} (process {status.pid} on {status.host})" if status is not None else ""


def needed_by(catalog: Catalog, existing: Existing, holders: Holders, clock: Clock) -> Holders:
    """Return the holders of each snapshot: pins, materializations, and for the newest one the current or next run.

    Raises:
        JobRootMismatch: the newest one is of another job, so it is unknown which one this job continues from; nothing
            may be deleted.
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
    # The folder of a snapshot that is not complete yet belongs to the run too.
    coming = {i: (f"{run or 'a run'} is making it",) for i in existing.snapshot_ids if i > newest.snapshot_id}
    return {**holders, newest.snapshot_id: mine, **coming}


def _refuse(needed: Holders, doomed: Iterable[int], root: Store) -> None:
    """Refuse to delete needed snapshots.

    Raises:
        SnapshotInUse: one of the doomed is needed; all holders are named.
    """
    found = [f"snapshot {i} is needed by {'; '.join(needed[i])}" for i in sorted(doomed) if i in needed]
    if found:
        raise SnapshotInUse(f"{root.url}: {'. '.join(found)}. Nothing was deleted")


def plan_deletion(root: Store, snapshot_ids: Sequence[int], *, clock: Clock, damaged: bool = False) -> DeletionPlan:
    """Return what `delete_snapshots` would do now; only reads.

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
            continue  # expired meanwhile by another process, or not complete yet
    own = {path: size for path, size in theirs.items() if path not in needed}
    return DeletionPlan(
        tuple(sorted(doomed)),
        tuple(sorted(given_up)),
        len(own),
        sum(abs(size) for size in own.values()),
        len(theirs) - len(own),
    )


def _check(catalog: Catalog, snapshot_ids: Sequence[int], clock: Clock, *, damaged: bool) -> set[int]:
    """Return which of the doomed have expired already.

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
                given_up.add(snapshot_id)  # another process let it expire just now
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
    """Delete snapshots of a job. The boundary lets all of them expire at once; then the objects that only they need are
    removed.

    Snapshots that expired or were removed before are accepted. A repeat after a crash finishes the deletion.

    Args:
        damaged: also delete snapshots with a lost or damaged manifest: garbage collection removes the objects that they
            named.
        proof: of a caller that already has one; the default proves that the root stays with its current job.
        marker: of a caller that deletes repeatedly.
        on_progress: called in this thread.

    Returns:
        The work that was done; it is not complete if `kept` or `failures` is not empty.

    Raises:
        MissingSnapshot: an id has no snapshot. SnapshotInUse: one is needed; the message names the holder. Nothing was
            changed.
        CorruptData, UnsupportedFormat: the needs of some snapshot cannot be known; nothing was removed.
        Fenced: the proof failed; nothing was changed since the last one.
        StoreUnavailable, OutcomeUnknown: they may have expired; repeat it.
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
    """Announce snapshots as expired, and settle them. Each step is atomic. A crash in between leaves snapshots `going`;
    the next collector settles them.

    Args:
        existing: all existing snapshots, and `since`: sequence of the boundary that was read with them.
        proof: made before each boundary, so that after a sleep nothing expires in a root that is another's by now.

    Returns:
        By id the holders that appeared meanwhile, for the snapshots that they kept from expiring.

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
    """A proof that also checks that the newest of the remaining snapshots is still there.

    Without this check a process that slept could let all snapshots of an older backup expire: a run whose term the
    backup holds finds its own mark and newest snapshot there, while the snapshots of a newer run are missing.

    Attributes:
        newest: the newest of the remaining snapshots; 0 if none remains.
    """

    root: Store
    proof: Proof
    newest: int

    @property
    def job_uid(self) -> str:
        """See `Proof`."""
        return self.proof.job_uid

    def check(self, *, since: int = 0) -> None:
        """See `Proof`. Sends one more small request."""
        self.proof.check(since=since)
        if not self._is_there():
            self.proof.check(since=since)

    def check_place(self) -> None:
        """See `Proof`. Sends one more small request."""
        self.proof.check_place()
        if not self._is_there():
            self.proof.check_place()

    def _is_there(self) -> bool:
        """Return whether the newest remaining snapshot is there. If not, it expired meanwhile, and a newer one exists.
        The newer one may be another job's, in whose root the caller woke: the caller then repeats its proof.

        Raises:
            Fenced: there is no newer one.
        """
        if not self.newest or self.root.exists(manifest_path(self.newest)):
            return True
        if max(read_existing(self.root).snapshot_ids, default=0) < self.newest:
            raise Fenced(
                f"{self.root.url} was replaced by an older backup: snapshot {self.newest}, which was to stay, is gone. "
                "No snapshot expired there; look at the root, and repeat the command if it is still wanted"
            )
        return False


def settle(
    root: Store, announced: Collection[int], proof: Proof, *, clock: Clock, ids: Ids, since: int = 0
) -> dict[int, tuple[str, ...]]:
    """Take back those with a pin that was placed before the announcement; the others are gone. See `give_up`."""
    if not announced:
        return {}
    # Read after the announcement: a pin that counts was placed before it.
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
    """Remove the objects that only these snapshots need, then their manifests. Nothing is removed of a snapshot that is
    not gone by the boundary.

    There is no age floor here: a manifest named these objects, so no writer is about to name them for the first time.

    Args:
        proof: made before every few deletions, and after the read of the objects to delete: manifests are deleted by
            their number, and the root of another job has the same numbers.

    Raises:
        Fenced: the root is another's by now; nothing was removed since the last proof.
        CorruptData, UnsupportedFormat, StoreUnavailable: the needs of others cannot be known; nothing was removed.
    """
    boundary = read_boundary(root)
    gone = [i for i in sorted(doomed) if boundary.is_gone(i)]
    if not gone:
        return Deleted()
    theirs = {snapshot_id: marker.rest_of(snapshot_id) for snapshot_id in gone}
    _, holders, marks = mark(root, marker, clock)
    # The needs of snapshots that others let expire since were not read, and such a snapshot is valid in an older
    # backup. So their boundary must be there too, and not only the boundary of these snapshots.
    prove = partial(proof.check, since=max(boundary.sequence, marks.boundary_sequence))
    waiting = {i: holders[i] for i in gone if i in holders}
    # Read once more after the choice: a materialization pins its snapshot, and then looks whether the snapshot exists.
    holders, needed = read_holders(root, clock, marker.records)
    waiting |= {i: holders[i] for i in gone if i in holders}
    removable = {
        path: size
        for snapshot_id, paths in theirs.items()
        if snapshot_id not in waiting
        for path, size in paths.items()
        if not marks.keeps(path) and not needed.keeps(path) and kind_of(path) in DATA_KINDS
    }
    # Objects that lead to other objects are removed after them; otherwise a crash in between would lose their paths.
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
    # The manifest last: while it is stored, the next collector knows the objects that it named.
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
    """Turn the progress of a part into the progress of the whole."""
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
        prove: called before each `threads` deletions. A process that slept and wakes in another owner's root deletes at
            most the group that it had begun. An error that `prove` raises ends the deletion.

    Returns:
        Those that could not be deleted. All others are gone, also those that did not exist.
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
