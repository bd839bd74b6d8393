"""One look at a job: its newest run and how it is. No Dagster in here; the command line uses it too."""

from __future__ import annotations

from dataclasses import dataclass

from orchestration.config.spec import JobSpec
from orchestration.launchers import Launcher
from orchestration.recovery.health import Health, HealthPolicy, decide
from state_runtime.base.clock import Clock
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import asked_to_stop
from state_runtime.snapshot.term_files import RunStatus

__all__ = ["Observation", "observe", "progress_marker"]


@dataclass(frozen=True)
class Observation:
    """What was seen at one moment."""

    status: RunStatus | None
    health: Health


def observe(job: JobSpec, catalog: Catalog, launcher: Launcher, clock: Clock) -> Observation:
    """Read the newest heartbeat and judge it."""
    policy = HealthPolicy(job.recovery.heartbeat_timeout_s, job.recovery.start_grace_s)
    status = catalog.status()
    process = "unknown" if status is None else launcher.is_alive(status)
    now_ms = clock.now_ms()
    health = decide(status, now_ms, policy, process)
    if status is not None and health.needs_recovery and asked_to_stop(catalog.root, status.term):
        # Looked for only now: it is a listing, and a healthy job is the common case.
        health = decide(status, now_ms, policy, process, stop_requested=True)
    return Observation(status, health)


def progress_marker(catalog: Catalog) -> int:
    """The newest checkpoint that did work. It stands still while a job dies again and again at one place.

    A fencing snapshot repeats the progress of the checkpoint below it, so a start alone does not move it.
    """
    latest = catalog.latest()
    return 0 if latest is None or latest.progress is None else latest.progress.snapshot_id
