"""One look at a job: its newest run and the run's health. Without Dagster; the command line uses it too."""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.base.process_space import process_space
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import asked_to_stop
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.migration import Migration, read_migration
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.launchers import Launcher
from stillstate.orchestration.launchers.port import Liveness
from stillstate.orchestration.launchers.processes import is_hidden, is_owner_gone
from stillstate.orchestration.recovery.health import Health, decide, while_migrating

__all__ = ["Observation", "observe", "progress_marker", "progress_of"]


@dataclass(frozen=True)
class Observation:
    """The result of a look at one moment.

    Attributes:
        migration: that is under way, of a job that does not run.
    """

    status: RunStatus | None
    health: Health
    migration: Migration | None = None


def observe(job: JobSpec, catalog: Catalog, launcher: Launcher, clock: Clock) -> Observation:
    """Read the newest heartbeat and judge it."""
    policy = job.recovery
    status, process = _heard_and_seen(catalog, launcher)
    is_near = status is not None and _is_near(status)
    now_ms = clock.now_ms()
    health = decide(status, now_ms, policy, process, is_near=is_near)
    if status is not None and health.needs_recovery and asked_to_stop(catalog.root, status.term):
        # Read only now: it is a listing, and a healthy job is the common case.
        health = decide(status, now_ms, policy, process, stop_requested=True, is_near=is_near)
    if health.may_be_migrating:
        # The same: another listing, only for jobs that do not run.
        migration = read_migration(catalog.root)
        if migration is not None and migration.is_open:
            is_deserted = is_owner_gone(migration)
            health = while_migrating(health, migration, job.name, now_ms, is_deserted=is_deserted)
            return Observation(status, health, migration)
    return Observation(status, health)


def _is_near(status: RunStatus) -> bool:
    """Whether a process of its host that is not visible has certainly ended."""
    return bool(status.process_space) and status.process_space == process_space() and not is_hidden(status.pid)


def _heard_and_seen(catalog: Catalog, launcher: Launcher) -> tuple[RunStatus | None, Liveness]:
    """Return the newest heartbeat, and what is known of its process."""
    status = catalog.status()
    process = "unknown" if status is None else launcher.is_alive(status)
    if process == "dead":
        # Between the two reads it may have written its last heartbeat and ended; this read certainly finds that one.
        again = catalog.status()
        if again is not None and again != status:
            return again, launcher.is_alive(again)
    return status, process


def progress_marker(catalog: Catalog) -> int:
    """Return `progress_of` the newest manifest."""
    return progress_of(catalog.latest())


def progress_of(newest: Manifest | None) -> int:
    """Return the newest checkpoint that did work. It stays the same while a job dies again and again at one place.

    A fencing snapshot repeats the progress of the checkpoint below it, so a start alone does not move it.
    """
    return 0 if newest is None or newest.progress is None else newest.progress.snapshot_id
