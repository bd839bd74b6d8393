"""The savepoint that a schedule asks for: made, or skipped with a word."""

from __future__ import annotations

from orchestration.running.savepoints import Savepointer, failed
from state_runtime.base.errors import JobNotFound
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import ControlRequest
from state_runtime.snapshot.savepoint import SavepointRecord, list_savepoints

__all__ = ["periodic_savepoint"]


def periodic_savepoint(catalog: Catalog, maker: Savepointer, tags: tuple[str, ...]) -> SavepointRecord | str:
    """Make a savepoint, named by the time; of a job that does not run, of its newest snapshot.

    Returns:
        The record, COMPLETED; or why none was made: there is nothing to save, or nothing new since the last one.

    Raises:
        Unavailable: it could not be made; try again. And what `Savepointer.make` raises.
    """
    try:
        catalog.job_info()
    except JobNotFound as error:
        return str(error)
    newest = catalog.latest()
    if newest is None:
        return f"job {catalog.job!r} has no snapshot yet"
    for record in list_savepoints(catalog.root):
        if record.state == "COMPLETED" and record.snapshot_id == newest.snapshot_id:
            return f"savepoint {record.name!r} is of snapshot {newest.snapshot_id}, which is still the newest"
    made = maker.make(trigger="schedule", tags=tags, note="made by Dagster")
    if isinstance(made, ControlRequest):
        raise AssertionError("a savepoint that is waited for is not a request")
    problem = failed(made)
    if problem is not None:
        raise problem
    return made
