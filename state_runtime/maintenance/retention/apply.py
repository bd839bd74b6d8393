"""Retention of a job: read its snapshots, plan by its policy, execute the plan. maintenance/retention/policy.py defines
the meaning of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, InvalidConfiguration, MissingSnapshot
from state_runtime.base.ids import Ids
from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.delete.roots import delete_savepoint
from state_runtime.maintenance.delete.snapshots import (
    THREADS,
    Deleted,
    Failure,
    OnProgress,
    delete_snapshots,
    needed_by,
)
from state_runtime.maintenance.marks import CLOCK_SKEW_MS, Marker, read_existing, read_holders
from state_runtime.maintenance.plans import Made, check_fresh
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.maintenance.retention.policy import DELETED_SHARE_MAX, Decision, Item, check_share, plan_retention
from state_runtime.restore.uploaded_files import direct, read_listing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import SavepointRecord, list_savepoints
from state_runtime.snapshot.term_files import newest_term
from state_runtime.store import Store

__all__ = ["Retained", "apply_retention", "make_retention_plan"]

Objects = dict[str, int]
"""Sizes in bytes by path."""


@dataclass(frozen=True, kw_only=True)
class Retained:
    """The result of executing a plan.

    Attributes:
        savepoints: names of the deleted savepoints.
        kept: by snapshot, the holders that appeared while the plan was executed.
    """

    snapshot_ids: tuple[int, ...] = ()
    savepoints: tuple[str, ...] = ()
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    objects: int = 0
    bytes: int = 0
    failures: tuple[Failure, ...] = ()


def _read(root: Store, clock: Clock) -> tuple[list[Item], dict[str, Objects]]:
    """Read the snapshots and savepoints of a job with their holders, and the objects that each snapshot names. Reads
    every manifest.

    Raises:
        CorruptData, UnsupportedFormat: a manifest cannot be read; nothing is planned.
        StoreUnavailable: try again.
    """
    catalog = Catalog.of_root(root, clock)
    existing = read_existing(root)
    needed = needed_by(catalog, existing, read_holders(root, clock)[0], clock)
    items: list[Item] = []
    objects: dict[str, Objects] = {}
    for snapshot_id in existing.snapshot_ids:
        try:
            manifest = catalog.manifest(snapshot_id)
            objects[str(snapshot_id)] = _objects(root, manifest)
        except MissingSnapshot:
            continue  # not complete yet, or another process let it expire since
        except CorruptData:
            if read_boundary(root).keeps(snapshot_id):
                raise
            continue  # it expired after its manifest was read: its objects are removed before the manifest
        held = needed.get(snapshot_id, ())
        items.append(
            Item(
                kind="checkpoint",
                name=str(snapshot_id),
                order=snapshot_id,
                created_at_ms=manifest.created_at_ms,
                bytes=manifest.total_bytes,
                held=held,
            )
        )
    return [*items, *(_savepoint(root, record, clock) for record in list_savepoints(root))], objects


def _objects(root: Store, manifest: Manifest) -> Objects:
    """Return the objects of a snapshot. Objects that the index of a segment names are counted with the segment."""
    found = {s.path: s.total_bytes for s in manifest.stored_segments}
    for layer in manifest.layers:
        found |= {table.path: table.bytes for table in layer.tables}
        found |= {log.path: log.bytes for log in layer.source_logs}
    listing = read_listing(direct(root), manifest)
    if listing is not None and manifest.shards is not None:
        found[manifest.shards.path] = manifest.shards.bytes
        found |= {f.path: f.bytes for shard in listing.shards for f in shard.files if f.path}
    return found


def _with_freed(decisions: Sequence[Decision], objects: Mapping[str, Objects]) -> Iterator[Decision]:
    """Add to each decision the bytes that it would free. A savepoint shares its objects with nothing."""
    needed = {path for d in decisions if d.kept and d.item.kind == "checkpoint" for path in objects[d.item.name]}
    for decision in decisions:  # the newest first
        item = decision.item
        if decision.kept:
            yield decision
        elif item.kind == "savepoint":
            yield replace(decision, freed_bytes=item.bytes)
        else:
            own = {path: size for path, size in objects[item.name].items() if path not in needed}
            needed |= own.keys()
            yield replace(decision, freed_bytes=sum(own.values()))


def _savepoint(root: Store, record: SavepointRecord, clock: Clock) -> Item:
    held = []
    if record.trigger == "user" and record.state == "COMPLETED":
        held.append("a user asked for it, and deletes it")
    if record.is_open:
        held.append(f"{record.owner} is at work on it ({record.state})")
    holders, _ = read_holders(root.child(savepoint_path(record.name)), clock)
    held += [who for names in holders.values() for who in names]
    return Item(
        kind="savepoint",
        name=record.name,
        order=record.requested_at_ms,
        created_at_ms=record.requested_at_ms,
        bytes=record.total_bytes,
        restorable=record.state == "COMPLETED",
        tags=record.tags,
        failed_at_ms=record.finished_at_ms if record.state in ("FAILED", "ABANDONED") else 0,
        held=tuple(held),
    )


def make_retention_plan(
    root: Store,
    policy: RetentionPolicy,
    *,
    clock: Clock,
    share_max: float = DELETED_SHARE_MAX,
    refuse: bool = True,
) -> RetentionPlan:
    """Make a plan of the policy's decisions now; only reads.

    Args:
        share_max: the largest share that may be deleted. It is stored in the plan and checked again at execution.
        refuse: raise if the plan deletes a larger share. If False, such a plan can still be shown.

    Raises:
        InvalidConfiguration: the policy is empty, or deletes a larger share than allowed.
        CorruptData, UnsupportedFormat, StoreUnavailable: see `_read`.
    """
    plan = _planned(root, policy, clock=clock, share_max=share_max)
    if refuse:
        check_share(plan.decisions, share_max)
    return plan


def _planned(root: Store, policy: RetentionPolicy, *, clock: Clock, share_max: float) -> RetentionPlan:
    catalog = Catalog.of_root(root, clock)
    info = catalog.job_info()
    existing = read_existing(root)
    made = Made(
        job=info.name,
        job_uid=info.uid,
        place=root.url,
        at_ms=clock.now_ms(),
        newest_snapshot_id=max(existing.snapshot_ids, default=0),
        term=newest_term(root),
    )
    items, objects = _read(root, clock)
    decisions = plan_retention(items, policy, now_ms=clock.now_ms() - CLOCK_SKEW_MS)
    return RetentionPlan(made, policy, share_max, tuple(_with_freed(decisions, objects)))


def apply_retention(
    root: Store,
    plan: RetentionPlan,
    *,
    clock: Clock,
    ids: Ids,
    owner: str,
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> Retained:
    """Execute a plan. The same policy decides once more: the plan is stale if it would delete a snapshot that is kept
    now.

    Snapshots that are already deleted are accepted, so a plan that was interrupted can be executed again.

    Raises:
        InvalidConfiguration: the plan is stale; nothing was deleted. Make a new one.
        What `delete_snapshots` and `delete_savepoint` raise.
    """
    check_fresh(plan.made, Catalog.of_root(root, clock).job_info(), root.url, clock.now_ms())
    check_share(plan.decisions, plan.share_max)
    now = {
        (d.item.kind, d.item.name): d
        for d in _planned(root, plan.policy, clock=clock, share_max=plan.share_max).decisions
    }
    wanted = [d for d in plan.deleted if (d.item.kind, d.item.name) in now]
    for decision in wanted:
        current = now[decision.item.kind, decision.item.name]
        if current.kept or current.item.created_at_ms != decision.item.created_at_ms:
            raise InvalidConfiguration(
                f"the plan is stale: {decision.item.kind} {decision.item.name} would be kept now "
                f"({'; '.join(current.reasons) or 'it is another one'}). Nothing was deleted; make a new plan"
            )
    resumed = [d for d in plan.deleted if d.item.kind == "checkpoint" and d not in wanted]
    doomed = [int(d.item.name) for d in (*wanted, *resumed) if d.item.kind == "checkpoint"]
    deleted = (
        delete_snapshots(
            root, doomed, clock=clock, ids=ids, marker=Marker(root, clock), on_progress=on_progress, threads=threads
        )
        if doomed
        else Deleted()
    )
    objects, removed_bytes, failures, savepoints = deleted.objects, deleted.bytes, [*deleted.failures], []
    for decision in wanted:
        if decision.item.kind == "savepoint":
            part = delete_savepoint(root, decision.item.name, clock=clock, ids=ids, owner=owner, threads=threads)
            objects, removed_bytes = objects + part.objects, removed_bytes + part.bytes
            failures += part.failures
            savepoints.append(decision.item.name)
    return Retained(
        snapshot_ids=deleted.snapshot_ids,
        savepoints=tuple(savepoints),
        kept=deleted.kept,
        objects=objects,
        bytes=removed_bytes,
        failures=tuple(failures),
    )
