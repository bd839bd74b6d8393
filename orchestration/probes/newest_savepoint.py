"""The newest savepoint of a job, as far as a look may read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from state_runtime.base.errors import CorruptData, UnsupportedFormat
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.paths import savepoint_path
from state_runtime.snapshot.savepoint_record import SavepointRecord, read_record, savepoint_names

__all__ = ["SavepointsSeen", "savepoints_seen"]

SAVEPOINTS_READ_MAX: Final = 20


@dataclass(frozen=True)
class SavepointsSeen:
    """The savepoints of a job, as a look saw them.

    Attributes:
        count: of all.
        newest: complete savepoint; None if the job has none, or too many to read (`is_known` is then False).
    """

    count: int
    newest: SavepointRecord | None = None
    is_known: bool = True


def savepoints_seen(catalog: Catalog) -> SavepointsSeen:
    """Read the savepoint records of a job, if they are few.

    Raises:
        StillstateError: the store does not answer.
    """
    names = savepoint_names(catalog.root)
    if len(names) > SAVEPOINTS_READ_MAX:
        return SavepointsSeen(len(names), is_known=False)
    newest = None
    for name in names:
        try:
            record = read_record(catalog.root.child(savepoint_path(name)))
        except (CorruptData, UnsupportedFormat):
            continue  # `stillstate savepoints` reports it
        if record is not None and record.state == "COMPLETED":
            newest = max(newest or record, record, key=lambda r: r.finished_at_ms)
    return SavepointsSeen(len(names), newest)
