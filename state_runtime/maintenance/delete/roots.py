"""Deleting whole folders: a job root, or a savepoint, which is laid out like one.

A tombstone comes first: from then on no reader finds a snapshot, no pin counts, and a run that starts or commits is
fenced. Then all that lies there goes, the data first; what is not ours stays and is named. Last goes what says that the
folder is being deleted: of a root its boundary, of a savepoint its record. A crash at any point leaves a folder that is
deleted for everybody; the same call again ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced, InvalidConfiguration, JobNotFound, MissingSnapshot, SnapshotInUse
from state_runtime.base.ids import Ids
from state_runtime.maintenance.delete.snapshots import THREADS, Deleted, Failure, OnProgress, delete_objects, run_of
from state_runtime.maintenance.layout import DATA_KINDS, ObjectKind, kind_of, number_in
from state_runtime.maintenance.marks import read_holders
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.claim import read_claim
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary, advance_boundary, read_boundary, take_back_boundary
from state_runtime.snapshot.handover import Moving, read_moving
from state_runtime.snapshot.ownership import JobProof
from state_runtime.snapshot.paths import SAVEPOINTS_DIR, check_job_name, savepoint_path
from state_runtime.snapshot.savepoint_record import owner_number_of, read_record, savepoint_names, take_over
from state_runtime.store import Store, StoredObject

__all__ = ["delete_root", "delete_savepoint", "remove_debris"]


def _nothing_to_prove() -> None:
    """Of whoever deletes what can only be his own."""


def delete_root(
    root: Store,
    *,
    clock: Clock,
    ids: Ids,
    owner: str,
    with_savepoints: bool = False,
    claimed_by: str = "",
    moved_by: str = "",
    job_uid: str = "",
    keep: Collection[ObjectKind] = (),
    prove: Callable[[], None] = _nothing_to_prove,
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> Deleted:
    """Delete a job with all of its snapshots. Atomic for readers and runs: from the tombstone on it is deleted.

    Args:
        owner: who deletes, `host:pid`.
        with_savepoints: its savepoints too; else they are in the way.
        claimed_by: uid of the job that has claimed it, if that is who deletes.
        moved_by: uid of the move that has carried it elsewhere, if that is who deletes.
        job_uid: of the job that is meant, if the caller knows it; else whichever is there now.
        keep: of what lies there this stays: the record of whoever deletes.
        prove: raises if the caller may not delete (any more); called before each step, and between deletions.

    Raises:
        Fenced: the root became another job's while this process slept; nothing of that job was changed.
        JobNotFound: there is nothing. SnapshotInUse: a run, a pin, a materialization, a savepoint or another job needs
            it; the message names it.
        CorruptManifest, UnsupportedFormat: somebody's need cannot be read; nothing was removed.
        StoreUnavailable, OutcomeUnknown: it may be deleted for readers; repeat it.
    """
    boundary = read_boundary(root)
    info = read_job_info(root)
    # What a copy or move that was taken back has left: never a job, so whatever was copied with it holds nothing.
    moving = read_moving(root)
    is_debris = info is None and moving is not None and moving.role == "target"
    if info is None and not boundary.is_tombstone and not is_debris:
        raise JobNotFound(f"there is no job in {root.url} (no job.json); nothing was deleted")
    if not boundary.is_tombstone:
        run = run_of(Catalog.of_root(root, clock), clock) if info is not None else ""
        _refuse(root, [f"{run}; stop it first"] if run else [])
        _refuse(root, _moved_away(moving, moved_by))
        if not is_debris:
            _refuse(root, _in_the_way(root, clock, claimed_by, with_savepoints=with_savepoints))
    proof = JobProof(root, job_uid or (info.uid if info is not None else ""), may_be_gone=True)

    def check() -> None:
        proof.check()
        prove()

    parts: list[Deleted] = []
    if is_debris:
        # With folders of savepoints that have no record yet.
        folders = [root.child(f"{SAVEPOINTS_DIR}/{name}") for name in savepoint_names(root)]
        parts += [_remove(folder, last="savepoint", prove=check, threads=threads) for folder in folders]
    elif with_savepoints:
        for name in _names(root):
            parts.append(delete_savepoint(root, name, clock=clock, ids=ids, owner=owner, claimed_by=claimed_by))

    def look_again(written: ExpiryBoundary) -> None:
        try:
            check()
        except Fenced:
            # Asleep before the create: a tombstone in the root of a new job would be its end.
            take_back_boundary(root, written)
            raise

    advance_boundary(
        root, lambda now: now.tombstone(), clock=clock, ids=ids, before=lambda _: check(), after=look_again
    )
    # Whoever came before the tombstone is seen now; whoever came after it has seen it.
    if not is_debris:
        _refuse(root, _in_the_way(root, clock, claimed_by, with_savepoints=False), given_up=True)
    removed = _remove(root, last="boundary", keep=keep, prove=check, on_progress=on_progress, threads=threads)
    return replace(
        removed,
        objects=removed.objects + sum(part.objects for part in parts),
        bytes=removed.bytes + sum(part.bytes for part in parts),
        failures=(*(failure for part in parts for failure in part.failures), *removed.failures),
    )


def delete_savepoint(
    root: Store,
    name: str,
    *,
    clock: Clock,
    ids: Ids,
    owner: str,
    claimed_by: str = "",
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> Deleted:
    """Delete a savepoint of a job, in any state that nobody is at work on. Its files are its own: nothing else needs
    them.

    Raises:
        MissingSnapshot: there is none of that name. SnapshotInUse: it is being made, or somebody reads or copies it, or
            another job has claimed it; the message names who.
        CorruptManifest, UnsupportedFormat: what it is cannot be read; nothing was removed.
        StoreUnavailable, OutcomeUnknown: it may be DELETING; repeat it.
    """
    folder = root.child(savepoint_path(name))
    record = read_record(folder)
    if record is None:
        raise MissingSnapshot(f"there is no savepoint {name!r} in {root.url}; `stillstate savepoints` lists them")
    if record.state != "DELETING":
        if record.is_open and not record.is_stale(clock.now_ms()):
            _refuse(folder, [f"{record.owner}, which is making it ({record.state}); let it end or fail first"])
        _refuse(folder, _in_the_way(folder, clock, claimed_by))
    mine = take_over(root, record, "DELETING", owner=owner, clock=clock)

    def check() -> None:
        # A name can be used again once its record is gone, so a sleeper may wake in another savepoint.
        now = read_record(folder)
        if now is None or (now.uid, now.number) != (mine.uid, mine.number):
            raise SnapshotInUse(
                f"savepoint {name!r} in {root.url} was deleted or taken over by somebody else while this process slept "
                "or worked on it; it changes nothing more there"
            )

    advance_boundary(folder, lambda now: now.tombstone(), clock=clock, ids=ids, before=lambda _: check())
    _refuse(folder, _in_the_way(folder, clock, claimed_by), given_up=True)
    return _remove(folder, last="savepoint", prove=check, on_progress=on_progress, threads=threads)


def remove_debris(folder: Store, *, clock: Clock, ids: Ids, threads: int = THREADS) -> Deleted:
    """Remove what a copy that will never be complete has written. Nobody may use it, so nobody is asked.

    Raises:
        StoreUnavailable, OutcomeUnknown: repeat it.
    """
    advance_boundary(folder, lambda now: now.tombstone(), clock=clock, ids=ids)
    return _remove(folder, last="boundary", prove=_nothing_to_prove, threads=threads)


def _in_the_way(root: Store, clock: Clock, claimed_by: str, *, with_savepoints: bool = True) -> list[str]:
    """Who needs something of a folder, for people."""
    holders, needed = read_holders(root, clock)
    found = [f"{who} (snapshot {i})" for i, names in sorted(holders.items()) for who in names]
    if needed.writers and not needed.snapshots:
        found.append("a materialization")
    claim = read_claim(root)
    if claim is not None and claim.job_uid != claimed_by:
        found.append(f"{claim}, which has claimed it and deletes it after its first checkpoint")
    if not with_savepoints:
        found += [f"its savepoint {name!r}" for name in _names(root)]
    return found


def _moved_away(moving: Moving | None, moved_by: str) -> list[str]:
    """The move that carries a root elsewhere, unless it is who asks."""
    if moving is None or moving.role != "source" or moving.uid == moved_by:
        return []
    return [f"the move to {moving.other_url}, which deletes it in the end; repeat that, or take it back with --abort"]


def _names(root: Store) -> list[str]:
    """Savepoints with a record."""
    found = []
    for name in savepoint_names(root):
        try:
            check_job_name(name)
        except InvalidConfiguration:
            continue  # nobody of ours made it: it stays, and is named
        if read_record(root.child(savepoint_path(name))) is not None:
            found.append(name)
    return found


def _refuse(root: Store, holders: Iterable[str], *, given_up: bool = False) -> None:
    """
    Raises:
        SnapshotInUse: there is one.
    """
    names = "; ".join(holders)
    if names:
        left = (
            "It is marked as deleted, and no object was removed: repeat the command when they are done"
            if given_up
            else "Nothing was changed"
        )
        raise SnapshotInUse(f"{root.url} is needed by {names}. {left}")


def _remove(
    root: Store,
    *,
    last: str,
    keep: Collection[ObjectKind] = (),
    prove: Callable[[], None],
    on_progress: OnProgress | None = None,
    threads: int,
) -> Deleted:
    """Remove all that is ours below a folder that is given up: data, then manifests, then what says so."""
    found = [o for o in (*root.list_objects(""), *root.list_debris()) if kind_of(o.path) not in keep]
    foreign = [o for o in found if kind_of(o.path) is None]
    steps = _ordered([o for o in found if kind_of(o.path) is not None], last)
    failures: list[Failure] = []
    removed: list[StoredObject] = []
    total, done = sum(map(len, steps)), 0
    for step in steps:
        if failures:
            break  # what comes later leads to what could not be removed
        before = done
        failures += delete_objects(
            root,
            [o.path for o in step],
            prove=prove,
            on_progress=None if on_progress is None else partial(_within, on_progress, before, total),
            threads=1 if step is steps[-1] else threads,
        )
        done += len(step)
        removed += step
    if not failures:
        root.remove_empty_folders("")
    left = {f.path for f in failures}
    failures += [Failure(o.path, "is not of Stillstate and was kept; remove it yourself") for o in foreign]
    gone = [o for o in removed if o.path not in left]
    ids = sorted(number_in(o.path) for o in gone if kind_of(o.path) == "manifest")
    return Deleted(tuple(ids), {}, len(gone), sum(o.bytes for o in gone), tuple(failures))


def _ordered(objects: list[StoredObject], last: str) -> list[list[StoredObject]]:
    """Steps, one after the other; the last in order of age, so that the newest says what counts until the end."""

    def step(found: StoredObject) -> int:
        kind = kind_of(found.path)
        if kind in DATA_KINDS:
            return 0
        if kind == last:
            return 4
        # A materialization's record after its pin: a pin without a record is one that is under way.
        return {"manifest": 1, "record": 3, "job": 3, "mark": 3, "boundary": 3}.get(kind or "", 2)

    steps: list[list[StoredObject]] = [[] for _ in range(5)]
    for found in objects:
        steps[step(found)].append(found)
    steps[4].sort(key=lambda o: owner_number_of(o.path) or number_in(o.path))
    return [s for s in steps if s]


def _within(on_progress: OnProgress, before: int, total: int, done: int, _: int) -> None:
    """Progress of one step as progress of all."""
    on_progress(before + done, total)
