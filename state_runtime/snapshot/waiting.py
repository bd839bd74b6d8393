"""The number of rows in flight in a savepoint: its manifest has it, its record does not."""

from __future__ import annotations

from dataclasses import dataclass

from state_runtime.base.errors import CorruptData, MissingFile, MissingSnapshot, UnsupportedFormat
from state_runtime.snapshot.locate import open_snapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import SavepointRecord
from state_runtime.store import Store

__all__ = ["Waiting", "waiting_in", "waiting_in_savepoint"]


@dataclass(frozen=True)
class Waiting:
    """Approximate number of rows in flight of all operators, and their bytes in memory."""

    rows: int
    bytes: int


def waiting_in(manifest: Manifest) -> Waiting:
    """Return the rows in flight of a snapshot."""
    operators = manifest.open_batch.operators if manifest.open_batch is not None else ()
    return Waiting(sum(o.rows for o in operators), sum(o.bytes for o in operators))


def waiting_in_savepoint(root: Store, record: SavepointRecord) -> Waiting | None:
    """Return the rows in flight of a complete savepoint; None if it is incomplete, being deleted, or unreadable.

    Args:
        root: of the job.

    Raises:
        StoreUnavailable.
    """
    if record.state != "COMPLETED":
        return None
    try:
        return waiting_in(open_snapshot(root.child(savepoint_path(record.name)), record.snapshot_id).manifest)
    except (MissingFile, MissingSnapshot, CorruptData, UnsupportedFormat):
        # Verifying it or going back to it reports the error; a list must not fail.
        return None
