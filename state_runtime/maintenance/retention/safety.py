"""Whether a plan of retention may be executed: checked apart from the planner, against the current state of the store.

The planner decides by rules; this module knows no rules. It checks the conditions that every plan must fulfil: a
snapshot to restart from is left, no snapshot in use is deleted, and the plan does not delete too much at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot
from state_runtime.maintenance.delete.snapshots import needed_by
from state_runtime.maintenance.marks import read_existing, read_holders
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.maintenance.retention.policy import check_share
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import list_savepoints
from state_runtime.store import Store

__all__ = ["dangers_of_retention"]


def dangers_of_retention(root: Store, plan: RetentionPlan, *, clock: Clock) -> list[str]:
    """Say why a plan must not be executed now, for people; empty if it may be. Only reads.

    Raises:
        JobNotFound: the job is gone. CorruptData, UnsupportedFormat: the needed objects cannot be read, so nothing may
            be deleted. StoreUnavailable: try again.
    """
    if unfit := plan.unfit(root, clock):
        return unfit
    found = [*_of_snapshots(Catalog.of_root(root, clock), plan, clock), *_of_savepoints(root, plan, clock)]
    try:
        check_share(plan.decisions, plan.share_max)
    except InvalidConfiguration as error:
        found.append(str(error))
    return found


def _of_snapshots(catalog: Catalog, plan: RetentionPlan, clock: Clock) -> Iterator[str]:
    doomed = {int(d.item.name) for d in plan.deleted if d.item.kind == "checkpoint"}
    existing = read_existing(catalog.root)
    needed = needed_by(catalog, existing, read_holders(catalog.root, clock)[0], clock)
    for snapshot_id in sorted(doomed & needed.keys()):
        yield f"snapshot {snapshot_id} is needed by {'; '.join(needed[snapshot_id])}"
    if doomed and not any(_is_restorable(catalog, i) for i in reversed(existing.snapshot_ids) if i not in doomed):
        yield "no snapshot that the job can restart from would be left"


def _is_restorable(catalog: Catalog, snapshot_id: int) -> bool:
    try:
        catalog.manifest(snapshot_id)
    except MissingSnapshot:
        return False  # not complete yet, or expired since
    return True


def _of_savepoints(root: Store, plan: RetentionPlan, clock: Clock) -> Iterator[str]:
    doomed = {d.item.name for d in plan.deleted if d.item.kind == "savepoint"}
    if not doomed:
        return
    records = list_savepoints(root)
    complete = [record for record in records if record.state == "COMPLETED"]
    newest = max(complete, key=lambda record: record.requested_at_ms, default=None)
    for record in records:
        if record.name not in doomed:
            continue
        holders, _ = read_holders(root.child(savepoint_path(record.name)), clock)
        if record is newest:
            yield f"savepoint {record.name!r} is the newest that is complete"
        if record.trigger == "user" and record.state == "COMPLETED":
            yield f"savepoint {record.name!r} was asked for by a user, and only a user deletes it"
        if record.is_open:
            yield f"savepoint {record.name!r} is {record.state}: {record.owner} is at work on it"
        for who in (name for names in holders.values() for name in names):
            yield f"savepoint {record.name!r} is needed by {who}"
