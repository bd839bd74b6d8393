"""The job location while a job is moved to another store: `store`, or `migration.to_store`.

The file names both until it is edited, so all code that opens a job's root calls `location_of`; a job without
`to_store` costs nothing. The target decides, and one process writes it at a time. The job lives there if the move that
fills it is decided (`moved.json`), the root is whole (`job.json`), and the root was not left again (a tombstone). Each
of the two changes is one create-if-absent: so at any moment the job lives in one place, for all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.handover import read_outcome
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.store import Store, open_store
from stillstate.orchestration.config.secrets import Secrets
from stillstate.orchestration.config.sections import MigrationSpec
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.text import redacted_location

__all__ = ["at_source", "at_target", "is_home", "location_of", "moved_text"]

Open = Callable[[str, Mapping[str, Any] | None], Store]


def at_source(job: JobSpec) -> JobSpec:
    """Return the job as it is at `store`, wherever it lives."""
    return _settled(job, job.migration.to_storage_options)


def at_target(job: JobSpec) -> JobSpec:
    """Return the job as it is at `migration.to_store`."""
    options = job.migration.to_storage_options
    return _settled(job, job.storage_options).model_copy(
        update={
            "store": job.migration.to_store,
            "storage_options": job.storage_options if options is None else options,
        }
    )


def _settled(job: JobSpec, others: Secrets | None) -> JobSpec:
    """Return the job without a second place. The credentials of that place are kept: they are redacted in logs."""
    return job.model_copy(
        update={"migration": MigrationSpec(automatic=job.migration.automatic, to_storage_options=others)}
    )


def location_of(job: JobSpec, opened: Open = open_store) -> JobSpec:
    """Return the job with the store that it lives in now.

    Args:
        opened: opens a store.

    Raises:
        StoreUnavailable, CorruptManifest: the location cannot be determined.
    """
    if not job.migration.to_store:
        return job
    there = at_target(job)
    return there if is_home(opened(there.store, there.storage_options).child(job.name)) else at_source(job)


def is_home(root: Store) -> bool:
    """Whether a job that was to be moved to a root lives there now."""
    outcome = read_outcome(root)
    is_whole = outcome is not None and (outcome.mode, outcome.outcome) == ("move", "complete") and root.exists(JOB_FILE)
    return is_whole and not read_boundary(root).is_tombstone


def moved_text(job: JobSpec) -> str:
    """Return how the file has to be edited.

    Args:
        job: as it is where it lives.
    """
    return (
        f"job {job.name!r} was moved, and lives in {redacted_location(job.store)}: let `store` and `storage_options` "
        "say so in the file, and take `migration.to_store` out, in one edit"
    )
