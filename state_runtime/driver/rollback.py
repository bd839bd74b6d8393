"""Going back in place: a job's root gets the content of an older snapshot, a savepoint or a copy, as its newest one.

    plan        reads only: which content, which of its objects the root lacks, which snapshots are abandoned; refuses
                an impossible rollback
    execute     1. objects that the root lacks are copied into it, under the same names; objects that it has are read,
                   and replaced if their bytes are not those that the manifest says (driver/go_back.py)
                2. a term is claimed and a fencing snapshot committed: the content, under the id after the newest one
                3. a garbage collection that was under way may have deleted some objects: they are copied again

Ids and epochs keep growing, and the manifest says which ids are no ancestors any more (`Manifest.abandoned`). So no
correct object is ever overwritten, and a second rollback to one of the abandoned snapshots undoes the first. A crash
before the fencing snapshot leaves the job as it was, and objects that garbage collection removes; repeat the rollback.

The newest snapshot may be unreadable: only its id is needed (`Catalog.latest_to_go_back_from`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot
from state_runtime.driver.go_back import bringing, past_of
from state_runtime.maintenance.copy.objects import CopyProgress, NeededObject, needed_objects
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.fencing import open_run, refuse_if_live, refuse_undelivered
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.kept_pin import kept_pin
from state_runtime.snapshot.lineage import check_belongs
from state_runtime.snapshot.locate import Place, open_snapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import write_stopped
from state_runtime.store import Store, open_store

__all__ = ["RollbackPlan", "execute_rollback", "plan_rollback"]


@dataclass(frozen=True, kw_only=True)
class RollbackPlan:
    """The plan of a rollback.

    Attributes:
        place: where the content is stored; empty if the job is to begin empty.
        target: the content; of a job that is to begin empty a manifest with the id 0.
        newest: of the job now (or its substitute, if it cannot be read).
        source: the root to copy from; None if a snapshot of the job's own root was named.
        objects: the objects that the root lacks, by name and size. Only `execute_rollback` compares the digests of
            objects that it has: that reads all of them.
    """

    place: str
    target: Manifest
    newest: Manifest
    source: Store | None
    objects: tuple[NeededObject, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes to copy, of those objects whose size is known before."""
        return sum(need.bytes_known for need in self.objects)

    @property
    def abandoned(self) -> int:
        """How many ids of snapshots are no ancestors any more."""
        return max(0, self.newest.snapshot_id - self.target.snapshot_id)


def plan_rollback(
    catalog: Catalog, place: str, *, takeover: bool = False, storage_options: Mapping[str, Any] | None = None
) -> RollbackPlan:
    """Plan a rollback; only reads.

    Args:
        place: `@<id>` of the job's own, or the place of a savepoint or a copy of this job (`Place`); empty: the job is
            to begin empty.
        takeover: also from a run that seems alive.
        storage_options: of the place.

    Raises:
        JobNotFound, MissingSnapshot, SnapshotExpired: there is no such job or snapshot.
        JobAlreadyRunning: a run seems alive. SnapshotInUse: another job claims the job's root, or the place.
        InvalidConfiguration: the place is of another job, or has another history; or see `refuse_undelivered`.
        CorruptData, UnsupportedFormat: the content cannot be read.
    """
    root, info = catalog.root, catalog.job_info()
    refuse_if_claimed(root)
    refuse_if_handed_over(root)
    if not takeover:
        refuse_if_live(catalog, catalog.clock)
    newest = catalog.latest_to_go_back_from()
    if newest is None:
        raise MissingSnapshot(
            f"job {catalog.job!r} in {root.url} has no snapshot to go back from; begin it with `stillstate run "
            f"{catalog.job} --from PLACE`"
        )
    check_belongs(newest, info, root.url, own=True)
    if not place:
        empty = Manifest(
            format_version=FORMAT_VERSION,
            job_uid=info.uid,
            snapshot_id=0,
            term=0,
            commit_id="",
            kind="fencing",
            created_at_ms=0,
            parallelism=newest.parallelism,
        )
        return RollbackPlan(place="", target=empty, newest=newest, source=None)
    where = Place.parse(place)
    source_root = open_store(where.root_url, storage_options) if where.root_url else root
    if source_root.url == root.url:
        if where.snapshot_id is None:
            raise InvalidConfiguration(f"{place} is the job itself; say which of its snapshots: @<id>")
        opened = open_snapshot(root, where.snapshot_id, catalog.clock)
        refuse_undelivered(opened.manifest, newest, catalog.job)
        return RollbackPlan(place=str(opened.place), target=opened.manifest, newest=newest, source=None)
    opened = open_snapshot(source_root, where.snapshot_id, catalog.clock)
    target = past_of(catalog, opened, newest)
    objects = tuple(need for need in needed_objects(opened.root, target).values() if not _is_there(root, need))
    return RollbackPlan(place=str(opened.place), target=target, newest=newest, source=opened.root, objects=objects)


def _is_there(root: Store, need: NeededObject) -> bool:
    try:
        return need.fits_size(root.size(need.path))
    except FileNotFoundError:
        return False


def execute_rollback(
    catalog: Catalog, plan: RollbackPlan, actor: Actor, *, progress: Callable[[CopyProgress], None] | None = None
) -> Manifest:
    """Go back. Atomic: the job's newest snapshot is the one before, or the fencing snapshot with the target's content.

    Not covered: a garbage collector that is suspended in the middle of a deletion while all of this happens (see
    `bringing`). `stillstate verify` would show the damage, and repeating the rollback repairs it.

    Returns:
        The fencing snapshot.

    Raises:
        JobAlreadyRunning, Fenced: see `open_run`. SnapshotExpired, MissingFile, CorruptData: the source lacks
            something, or it is damaged there; the job is as it was. StoreUnavailable, OutcomeUnknown: repeat it.
    """
    root, info = catalog.root, catalog.job_info()
    if plan.source is not None:
        with bringing(plan.source, root, plan.target, actor, progress):
            return _commit(catalog, plan.target, actor)
    if plan.target.snapshot_id == 0:
        return _commit(catalog, plan.target, actor)
    with kept_pin(
        root,
        plan.target.snapshot_id,
        reason="start",
        holder=f"the rollback of job {info.name!r}",
        actor=actor,
    ):
        return _commit(catalog, plan.target, actor)


def _commit(catalog: Catalog, target: Manifest, actor: Actor) -> Manifest:
    opened = open_run(catalog, catalog.job_info(), target, actor=actor, back_to=target)
    done = f"gone back to snapshot {target.snapshot_id}" if target.snapshot_id else "reset: begins empty"
    write_stopped(catalog.root, opened.term, opened.last.snapshot_id, done, actor.clock)
    return opened.last
