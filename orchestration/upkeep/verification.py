"""Verification of a whole job, for Dagster's schedules; `stillstate verify` reaches the same function by a place."""

from __future__ import annotations

from collections.abc import Callable

from state_runtime.base.actor import Actor
from state_runtime.base.settings import VerifyLevel
from state_runtime.maintenance.verify.places import verify_place
from state_runtime.maintenance.verify.report import VerifyReport
from state_runtime.snapshot.catalog import Catalog
from stillstate.orchestration.config.spec import JobSpec

__all__ = ["verify_job"]


def verify_job(
    job: JobSpec,
    catalog: Catalog,
    actor: Actor,
    level: VerifyLevel,
    *,
    seed: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Verify all snapshots and savepoints of a job.

    Args:
        seed: of "sample": another one reads other files.
        on_progress: called with bytes done and bytes in all, of the folder under way.

    Raises:
        JobNotFound: there is no such job. And the errors of `verify_place`.
    """
    catalog.job_info()
    return verify_place(
        catalog.root,
        snapshot_id=None,
        level=level,
        share=job.verification.sample_share,
        seed=seed,
        progress=None if on_progress is None else lambda _, now: on_progress(now.bytes_done, now.bytes),
        clock=actor.clock,
        ids=actor.ids,
    )
