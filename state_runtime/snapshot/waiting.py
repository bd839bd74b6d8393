"""How many rows are in flight in a savepoint: its manifest says it, its record does not."""

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
    """Rows in flight of all operators, about, and their bytes in memory."""

    rows: int
    bytes: int


def waiting_in(manifest: Manifest) -> Waiting:
    """What a snapshot has."""
    operators = manifest.open_batch.operators if manifest.open_batch is not None else ()
    return Waiting(sum(o.rows for o in operators), sum(o.bytes for o in operators))


def waiting_in_savepoint(root: Store, record: SavepointRecord) -> Waiting | None:
    """What a complete savepoint has; None of one that is not complete, is being deleted, or cannot be read.

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
        # Whoever verifies it or goes back to it is told; a list is not the place to fail.
        return None
