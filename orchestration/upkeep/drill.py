"""A restore drill of a job, for the command line and for Dagster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from state_runtime.base.actor import Actor
from state_runtime.base.errors import MissingSnapshot
from state_runtime.maintenance.verify.drill import DrillReport, drill
from state_runtime.restore.private_local_dir import private_local_dir
from state_runtime.snapshot.catalog import Catalog
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.text import bytes_text, count_text, duration_text

__all__ = ["drill_job", "drill_json", "drill_text", "drills_folder"]


def drills_folder(job: JobSpec) -> Path:
    """Return the folder that drills restore to: on the disk that a restore would use."""
    return private_local_dir(job.local_dir) / "drills"


def drill_job(
    job: JobSpec,
    catalog: Catalog,
    actor: Actor,
    *,
    snapshot_id: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DrillReport:
    """Restore a snapshot of the job into a scratch folder and compare; see `drill`.

    Args:
        snapshot_id: None is the newest.

    Raises:
        JobNotFound, MissingSnapshot: there is nothing to restore. And the errors of `drill`.
    """
    catalog.job_info()
    manifest = catalog.latest() if snapshot_id is None else catalog.manifest(snapshot_id)
    if manifest is None:
        raise MissingSnapshot(f"job {job.name!r} has no snapshot yet; the first epoch makes one")
    return drill(catalog, manifest, drills_folder(job), backend=job.backend, actor=actor, on_progress=on_progress)


def drill_json(report: DrillReport) -> dict[str, Any]:
    """Return a report for `--json`."""
    return {
        "job": report.job,
        "snapshot_id": report.snapshot_id,
        "created_at_ms": report.created_at_ms,
        "restorable": report.is_restorable,
        "shards": report.shards,
        "rows": report.rows,
        "recorded_rows": report.recorded_rows,
        "inflight_rows": report.inflight_rows,
        "bytes_read": report.bytes_read,
        "restore_s": report.restore_s,
        "seconds": report.seconds,
        "states": [
            {
                "operator": state.operator,
                "state": state.state,
                "stored_rows": state.stored.rows,
                "stored_digest": state.stored.digest,
                "restored_rows": state.restored.rows,
                "restored_digest": state.restored.digest,
                "equal": state.is_equal,
            }
            for state in report.states
        ],
        "problems": list(report.problems),
    }


def drill_text(report: DrillReport) -> str:
    """Return a report in one line."""
    verdict = "is restorable" if report.is_restorable else f"is NOT restorable: {len(report.problems)} problems"
    waiting = f"{count_text(report.inflight_rows)} rows in flight, " if report.inflight_rows else ""
    return (
        f"{report.job}: snapshot {report.snapshot_id} {verdict}: {count_text(len(report.states))} states, "
        f"{count_text(report.rows)} rows, {waiting}{bytes_text(report.bytes_read)} read, restored in "
        f"{duration_text(report.restore_s)}, all in {duration_text(report.seconds)}"
    )
