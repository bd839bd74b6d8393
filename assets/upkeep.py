"""The assets of a job's upkeep: savepoints, retained snapshots, garbage, compacted output; pure.

Work that deletes has two assets: one for the plan (the kept snapshots, the garbage) and, behind a check that blocks,
one for the deletions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import dagster as dg

from state_runtime.maintenance.gc.plan import GcPlan
from state_runtime.maintenance.links import Links, Shared
from state_runtime.maintenance.plans import Kind
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.pipeline.output_upkeep import OutputWork
from state_runtime.snapshot.paths import SAVEPOINTS_DIR
from state_runtime.snapshot.savepoint_record import SavepointRecord
from stillstate.assets.mount import Mount
from stillstate.assets.specs import shared_fields
from stillstate.assets.tables import unbroken
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.text import bytes_text, count_text, time_text

__all__ = [
    "DIGEST",
    "applied_spec",
    "collection_plan_metadata",
    "compacted_metadata",
    "compacted_spec",
    "outcome_metadata",
    "planned_spec",
    "retention_plan_metadata",
    "savepoints_metadata",
    "savepoints_spec",
]

DIGEST: Final = "plan_digest"
NO_LINKS: Final = Links()
NO_ROWS: Final[Mapping[str, int]] = MappingProxyType({})
_ROWS_MAX: Final = 200

Metadata = dict[str, Any]


def savepoints_spec(mount: Mount, job: JobSpec) -> dg.AssetSpec:
    """Return the spec of a job's savepoints."""
    schedule = "They are never made automatically." if job.savepoints.schedule == "off" else "A schedule makes them."
    spec = dg.AssetSpec(
        mount.savepoints(job.name),
        deps=[mount.checkpoints(job.name)],
        description=(
            f"Savepoints of `{job.name}`: complete copies of its state under a name. {schedule} "
            f"{mount.launch_text('savepoint', job.name)} makes one now; those that Dagster makes go by the rules of "
            "retention. The data version is the name."
        ),
        kinds={"spark"},
        metadata={"schedule": job.savepoints.schedule, "tags": ", ".join(job.savepoints.tags)},
        **shared_fields(mount, job),
    )
    return mount.shown(spec)


def planned_spec(mount: Mount, job: JobSpec, kind: Kind) -> dg.AssetSpec:
    """Return the spec of a plan's subject: the retained snapshots, or the present garbage."""
    what = {
        "retention": f"Which snapshots and savepoints of `{job.name}` the rules keep, and why; which would be deleted.",
        "gc": f"What nothing of `{job.name}` needs, and why; what stays.",
    }[kind]
    spec = dg.AssetSpec(
        mount.planned(job.name, kind),
        deps=[mount.checkpoints(job.name), mount.savepoints(job.name)],
        description=f"{what} Each materialization is a plan; nothing is deleted by it. The data version is its digest.",
        kinds={"spark"},
        **shared_fields(mount, job),
    )
    return mount.shown(spec)


def applied_spec(mount: Mount, job: JobSpec, kind: Kind) -> dg.AssetSpec:
    """Return the spec of the deletions that plans made."""
    planned = mount.planned(job.name, kind)
    spec = dg.AssetSpec(
        mount.applied(job.name, kind),
        deps=[planned],
        description=(
            "What was deleted. Each materialization executed the plan of that digest, after the check of "
            f"`{planned.path[-1]}` had passed in the same run."
        ),
        kinds={"spark"},
        **shared_fields(mount, job),
    )
    return mount.shown(spec)


def compacted_spec(mount: Mount, job: JobSpec) -> dg.AssetSpec:
    """Return the spec of a job's compacted output."""
    schedule = "It is never done automatically." if job.output.schedule == "off" else "A schedule does it."
    spec = dg.AssetSpec(
        mount.compacted(job.name),
        deps=[mount.stream(job.name)],
        description=(
            f"What the sinks of `{job.name}` write, kept in order: Parquet files of closed epochs become few large "
            f"ones, Delta tables are optimized and vacuumed, snapshots of Iceberg tables expire. {schedule} "
            f"{mount.launch_text('compact_output', job.name)} does it now; the job may run meanwhile."
        ),
        kinds={"parquet"},
        metadata={"schedule": job.output.schedule, "target_mib": job.output.target_mib},
        **shared_fields(mount, job),
    )
    return mount.shown(spec)


# --- plans -----------------------------------------------------------------------------------------------------------

_RETENTION_COLUMNS: Final = {
    "what": "string",
    "snapshot": "string",
    "of": "string",
    "state": "string",
    "freed": "string",
    "why": "string",
}
_COLLECTION_COLUMNS: Final = {"what": "string", "kind": "string", "objects": "int", "size": "string", "why": "string"}


def retention_plan_metadata(plan: RetentionPlan) -> Metadata:
    """Return a plan of retention as a table with its digest, and in numbers. Deleted snapshots come first."""
    rows = [
        {
            "what": "keep" if decision.kept else "delete",
            "snapshot": decision.item.name if decision.item.kind == "checkpoint" else f"savepoint {decision.item.name}",
            "of": unbroken(time_text(decision.item.created_at_ms)),
            "state": unbroken(bytes_text(decision.item.bytes)),
            "freed": "" if decision.kept else unbroken(bytes_text(decision.freed_bytes)),
            "why": "; ".join(decision.reasons) or "no rule keeps it",
        }
        for decision in [*plan.deleted, *plan.kept]
    ]
    return {
        "plan": _table(rows, _RETENTION_COLUMNS),
        DIGEST: dg.MetadataValue.text(plan.digest),
        "deleted": dg.MetadataValue.int(len(plan.deleted)),
        "kept": dg.MetadataValue.int(len(plan.kept)),
        "freed_bytes": dg.MetadataValue.int(plan.freed_bytes),
        "deleted_share": dg.MetadataValue.float(round(len(plan.deleted) / max(1, len(plan.decisions)), 4)),
    }


def collection_plan_metadata(plan: GcPlan) -> Metadata:
    """Return a plan of garbage collection in the same way, by kind and reason."""
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for candidate in plan.candidates:
        groups[candidate.kind, candidate.reason].append(candidate.bytes)
    rows = [_row("delete", kind, len(sizes), sum(sizes), why) for (kind, why), sizes in sorted(groups.items())]
    rows += [
        _row("delete", "snapshot", 0, 0, f"{i} has expired, and its deletion was interrupted") for i in plan.given_up
    ]
    rows += [_row("delete", "savepoint", 0, 0, f"{name}: {why}") for name, why in plan.savepoints]
    rows += [
        _row("keep", "", plan.needed_objects, plan.needed_bytes, "needed"),
        _row("keep", "", plan.young_objects, plan.young_bytes, "too young to tell"),
        _row("keep", "", plan.foreign_objects, 0, "not of Stillstate"),
    ]
    return {
        "plan": _table(rows, _COLLECTION_COLUMNS),
        DIGEST: dg.MetadataValue.text(plan.digest),
        "garbage_objects": dg.MetadataValue.int(len(plan.candidates)),
        "garbage_bytes": dg.MetadataValue.int(plan.bytes),
        "needed_objects": dg.MetadataValue.int(plan.needed_objects),
        "needed_bytes": dg.MetadataValue.int(plan.needed_bytes),
    }


def _row(what: str, kind: str, objects: int, size: int, why: str) -> dict[str, str | int]:
    return {"what": what, "kind": kind, "objects": objects, "size": unbroken(bytes_text(size)), "why": why}


def _table(rows: Sequence[Mapping[str, str | int | float]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    schema = dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows[:_ROWS_MAX]], schema)


def outcome_metadata(numbers: Mapping[str, int], digest: str) -> Metadata:
    """Return the result of executing a plan."""
    return {
        DIGEST: dg.MetadataValue.text(digest),
        **{name: dg.MetadataValue.int(number) for name, number in numbers.items()},
    }


# --- output ----------------------------------------------------------------------------------------------------------

_OUTPUT_COLUMNS: Final = {"sink": "string", "files": "string", "written": "string", "gone": "string", "place": "string"}


def compacted_metadata(sinks: Mapping[str, OutputWork | None]) -> Metadata:
    """Return what was done for each sink as a table, and in numbers."""
    kept = {name: work for name, work in sinks.items() if work is not None}
    rows = [
        {
            "sink": name,
            "files": f"{count_text(work.files)} → {count_text(work.files_after)}",
            "written": unbroken(f"{bytes_text(work.input_bytes)} → {bytes_text(work.output_bytes)}"),
            "gone": f"{count_text(work.removed)} files, {count_text(work.expired)} versions",
            "place": work.place,
        }
        for name, work in kept.items()
    ]
    return {
        "sinks": _table(rows, _OUTPUT_COLUMNS),
        "files": dg.MetadataValue.int(sum(work.files_after for work in kept.values())),
        "rewritten_files": dg.MetadataValue.int(sum(work.inputs for work in kept.values())),
        "rewritten_bytes": dg.MetadataValue.int(sum(work.input_bytes for work in kept.values())),
        "deleted_files": dg.MetadataValue.int(sum(work.removed for work in kept.values())),
        "expired_versions": dg.MetadataValue.int(sum(work.expired for work in kept.values())),
    }


# --- savepoints ------------------------------------------------------------------------------------------------------

_SAVEPOINT_COLUMNS: Final = ("name", "state", "made by", "at", "size", "in flight", "files", "go back to it")


def savepoints_metadata(
    records: Sequence[SavepointRecord],
    root_url: str,
    links: Links = NO_LINKS,
    inflight_rows: Mapping[str, int] = NO_ROWS,
) -> Metadata:
    """Return all savepoints, newest first, each with the command that goes back to it; and their place (`run NEW --from
    PLACE`), which is shown once: the table would become too wide.

    Args:
        root_url: of the job root, without credentials.
        links: files of the root that share their bytes with others.
        inflight_rows: of savepoints by name, rows in flight; a column if there are any.
    """
    rows = [
        {
            "name": record.name,
            "state": record.state,
            "made by": f"{record.trigger}: {', '.join(record.tags)}" if record.tags else record.trigger,
            "at": unbroken(time_text(record.requested_at_ms)),
            "size": unbroken(bytes_text(record.total_bytes)),
            "in flight": count_text(inflight_rows.get(record.name, 0)),
            "files": _files_text(links.of_owner(record.name)) if record.state == "COMPLETED" else "",
            "go back to it": f"stillstate rollback {record.job} {record.name}" if record.state == "COMPLETED" else "",
        }
        for record in sorted(records, key=lambda record: record.requested_at_ms, reverse=True)
    ]
    unsaid = {"state"} if all(record.state == "COMPLETED" for record in records) else set()
    if not any(inflight_rows.get(record.name) for record in records):
        unsaid.add("in flight")
    columns = [column for column in _SAVEPOINT_COLUMNS if column not in unsaid]
    shown = [{column: row[column] for column in columns} for row in rows]
    return {
        "savepoints": _table(shown, dict.fromkeys(columns, "string")),
        "place": f"{root_url}/{SAVEPOINTS_DIR}/NAME",
        "complete": dg.MetadataValue.int(sum(record.state == "COMPLETED" for record in records)),
    }


def _files_text(shared: Shared) -> str:
    """Return whether a savepoint's files are its own: damage to a shared file is also damage to the savepoint."""
    if not shared.files:
        return "its own"
    return f"{shared.files} shared with {shared}"
