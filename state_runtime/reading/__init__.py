"""Reading any snapshot as data, and building snapshots from data: without the job, without Spark, in bounded memory.

snapshot = reading.open("s3://bucket/state/flights@120")
snapshot.state("legs", "seen").to_pandas()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from state_runtime.reading.snapshot import ReadableSnapshot

__all__ = ["open"]


def open(place: str, storage_options: Mapping[str, Any] | None = None) -> ReadableSnapshot:
    """Open a snapshot for reading; reads only its manifest.

    Args:
        place: `<store>/<job>` (its newest snapshot), `<store>/<job>@<id>`, or the folder of a savepoint.
        storage_options: for the store, as fsspec has them; never shown anywhere.

    Raises:
        InvalidConfiguration: no such store. JobNotFound, MissingSnapshot, SnapshotExpired: it does not exist.
        CorruptManifest, UnsupportedFormat: it cannot be trusted or read. StoreUnavailable: try again.
    """
    # Imported late: users who only need the columns of a state do not need these modules.
    from state_runtime.reading.snapshot import open_snapshot_for_reading

    return open_snapshot_for_reading(place, storage_options)
