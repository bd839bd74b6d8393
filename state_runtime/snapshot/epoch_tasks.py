"""The numbers of the tasks of a run's newest epochs, one by one, as a document beside the run's heartbeat; pure.

Progress has the sums. This document shows the one slow task: its shard, its number of rows, its executor. It is for
people: no reader of snapshots needs it, and no decision uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document

__all__ = ["EpochTasks", "OtherTasks", "RunEpochs", "TaskNumbers", "decode_epochs", "encode_epochs"]


@dataclass(frozen=True, kw_only=True)
class TaskNumbers:
    """One shard of one operator in one epoch.

    Attributes:
        input_rows: rows that came.
        processed_rows: rows that were processed, of this epoch and of earlier ones.
        left_rows: rows of the shard that are in flight after the epoch.
        slices: number of slices in which the rows were processed.
        began_at_ms, processed_at_ms: wall clocks of the task's host: when it began, and when its last row was done.
        changed_bytes: of the state that it changed.
        uploaded_bytes: of them, those that the task itself uploaded to the primary store; the driver uploads the rest.
        spilled_bytes: of rows that waited on the host's disk.
        restored: where the state came from ("": it was there, "local", "stale", "primary").
        restore_ms: how long that took; it is part of the task's time.
        executor: that ran the task; empty for an unnamed one on the driver's host.
    """

    operator: str
    shard: int
    input_rows: int
    processed_rows: int
    left_rows: int
    slices: int
    began_at_ms: int
    processed_at_ms: int
    changed_bytes: int
    uploaded_bytes: int
    spilled_bytes: int
    restored: str
    restore_ms: float
    executor: str

    @property
    def took_ms(self) -> int:
        """Time from its begin to its last row; 0 if the begin is unknown."""
        return max(0, self.processed_at_ms - self.began_at_ms) if self.began_at_ms else 0


@dataclass(frozen=True, kw_only=True)
class OtherTasks:
    """The other tasks of an epoch, as sums.

    Attributes:
        took_ms: of the longest.
    """

    tasks: int
    input_rows: int
    processed_rows: int
    left_rows: int
    changed_bytes: int
    took_ms: int


@dataclass(frozen=True, kw_only=True)
class EpochTasks:
    """One epoch.

    Attributes:
        snapshot_id, durable_at_ms: the snapshot that made it durable, and when that was made; 0 before that.
        tasks: the slowest first.
        others: None if `tasks` are all.
        alignment_ms: how long its due checkpoint waited for its rows; 0 in documents of earlier versions.
    """

    epoch: int
    batch_id: int
    tasks: tuple[TaskNumbers, ...]
    others: OtherTasks | None = None
    snapshot_id: int = 0
    durable_at_ms: int = 0
    alignment_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunEpochs:
    """The document.

    Attributes:
        epochs: the newest first; epochs without a task are left out.
    """

    term: int
    run_uid: str
    epochs: tuple[EpochTasks, ...]


def encode_epochs(told: RunEpochs) -> bytes:
    """Return the bytes, within the limit of a reader: the oldest epochs are left out if the document is too large."""
    data = encode_document("epochs", told)
    while len(data) > SMALL_JSON_BYTES_MAX and told.epochs:
        told = replace(told, epochs=told.epochs[:-1])
        data = encode_document("epochs", told)
    return data


def decode_epochs(data: bytes, where: str) -> RunEpochs:
    """Parse a document in bytes that are bounded already.

    Raises:
        CorruptManifest, UnsupportedFormat: see `decode_document`.
    """
    return decode_document("epochs", RunEpochs, data, where)
