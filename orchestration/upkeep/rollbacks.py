"""Rollback in place, for the command and Dagster's runs: the place that a name means, the text of a plan, and the
verification before it is executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData
from state_runtime.base.settings import VerifyLevel
from state_runtime.driver.rollback import RollbackPlan
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.locate import own_restore_point
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import read_savepoint
from stillstate.orchestration.text import bytes_text, count_text

__all__ = ["own_place", "refuse_damaged", "rollback_text", "rollback_values"]

_NAMED_MAX = 10


def own_place(catalog: Catalog, name: str) -> str:
    """Return the place of a restore point of this job, by the name that `stillstate snapshots` lists.

    Raises:
        SavepointNotFound: there is no savepoint of that name. InvalidConfiguration: it cannot be a name.
    """
    wanted = own_restore_point(name)
    if isinstance(wanted, int):
        return f"@{wanted}"
    read_savepoint(catalog.root, wanted)  # raises the error for a name that cannot be one
    return catalog.root.child(savepoint_path(wanted)).url


def rollback_text(job: str, plan: RollbackPlan) -> str:
    """Return the text of a plan for people."""
    data = (
        f"{count_text(len(plan.objects))} objects ({bytes_text(plan.bytes)}) are missing in the job's root and are "
        "copied; all others are read, and replaced where they are damaged. "
        if plan.source is not None
        else ""
    )
    return (
        f"{job}: {f'go back to {plan.place}' if plan.place else 'begin empty'}. {count_text(plan.abandoned)} newer "
        f"snapshot ids (up to {plan.newest.snapshot_id}) expire with its former history; {data}Input since then is "
        "read again. Output that was published since then stays, and comes again under higher epoch numbers; a sink "
        'with on_rollback="replace" takes it out at the next start, and one with "refuse" refuses that start.'
    )


def rollback_values(job: str, plan: RollbackPlan) -> dict[str, Any]:
    """Return the plan as a document."""
    return {
        "job": job,
        "place": plan.place,
        "snapshot_id": plan.target.snapshot_id,
        "newest": plan.newest.snapshot_id,
        "abandoned": plan.abandoned,
        "objects": len(plan.objects),
        "bytes": plan.bytes,
    }


def refuse_damaged(
    catalog: Catalog,
    plan: RollbackPlan,
    actor: Actor,
    level: VerifyLevel,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Verify the snapshot that a plan goes back to, before anything is changed: a snapshot of the job's own root is
    verified nowhere else.

    Raises:
        CorruptData: names the damaged or missing objects. StoreUnavailable: it cannot be read now.
    """
    if not plan.place:
        return  # begins empty
    report = verify_root(
        catalog.root if plan.source is None else plan.source,
        snapshot_ids=[plan.target.snapshot_id],
        level=level,
        progress=None if on_progress is None else lambda now: on_progress(now.bytes_done, now.bytes),
        clock=actor.clock,
        ids=actor.ids,
    )
    found = [f"{finding.path} ({finding.kind}: {finding.detail})" for finding in report.findings[:_NAMED_MAX]]
    if not found and not report.complete:
        found = [f"{plan.place} could not be read to its end"]
    if found:
        raise CorruptData(f"{catalog.job}: {'; '.join(found)}. Nothing was changed; choose another snapshot")
