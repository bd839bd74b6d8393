"""The acknowledgement that a task sends to the driver for its epoch; values only, pure.

driver/acknowledgements.py and docs/design/0002-acknowledgements.md describe how it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from state_runtime.changelog.changes import TaskChanges, UploadTotals
from state_runtime.changelog.inflight import RowsLeft
from state_runtime.pipeline.staged import StagedFiles
from state_runtime.snapshot.shard_files import ShardFiles
from state_runtime.snapshot.shard_versions import NO_VERSION

__all__ = ["EMPTY_TASK", "Acknowledgement", "PersistedFiles"]

EMPTY_TASK = -1
"""The shard number of a task without input: its shard is not known."""


@dataclass(frozen=True)
class PersistedFiles:
    """A shard's files after an epoch with the changelog off.

    Attributes:
        shard: None if the shard's entry in the driver's listing is still right.
        schemas: of its columns, see `ShardListing.schemas`.
        uploaded: the new objects; all others must be in a listing already.
        totals: the cost of uploading them.
    """

    shard: ShardFiles | None = None
    schemas: Mapping[str, str] | None = None
    uploaded: tuple[str, ...] = ()
    totals: UploadTotals = field(default_factory=UploadTotals)


@dataclass(frozen=True, kw_only=True)
class Acknowledgement:
    """The work of one attempt of one task; the driver keeps one acknowledgement per stage and shard.

    Life cycle: made when the attempt has ended well → sent with its success → chosen among the attempts of its shard
    (`Acknowledgements.take`) → taken into the head.

    Attributes:
        epoch: unique to the driver's attempt at the epoch, to recognize late acknowledgements of an earlier action.
        shard: `EMPTY_TASK` for a task without input: it touched no state.
        version: local version after the epoch; `NO_VERSION` if it could not be written.
        input_rows: rows that came, each counted even if Spark aggregated them before the shuffle.
        partial_rows: the number of rows after that aggregation; 0 if Spark did not aggregate.
        row_bytes: bytes of a row in memory, in the piece with the widest rows on average; 0 if no row came.
        rows_added: live state rows gained.
        changed_rows: state rows that were written.
        late_rows: input rows that came too late.
        next_due_ms: lower bound of when this shard must be visited next, even without rows; None: never.
        changes: of the shard's state; empty with the changelog off.
        files: with the changelog off the shard's files, in place of `changes`.
        staged: the output.
        restored: where the state came from (`RestoreNumbers.kind`); `restore_ms` is the duration, and
            `restored_bytes` the bytes read from the primary store.
        local_failed: a local copy could not be read, written or tidied.
        processed_rows: rows that were processed, of this epoch and of earlier ones.
        left: per epoch that read them the shard's rows that are left: for this epoch's number, and for each earlier one
            whose rows the task was given.
        kept: the parts of this epoch's rows that are left; `kept_columns` has their columns.
        slices: number of slices in which the rows were processed, and how long that took.
        inflight_read_bytes: of rows of earlier epochs, read from the primary store.
        spilled_bytes: of rows that waited on the host's disk because they were too many for memory.
        began_at_ms: wall clock when the task began.
        processed_at_ms: wall clock when the last row was processed and its output staged: the snapshot follows.
        executor: that ran the attempt (`executor_id`).
    """

    epoch: str
    stage: int
    shard: int
    version: str = NO_VERSION
    input_rows: int = 0
    partial_rows: int = 0
    row_bytes: int = 0
    rows_added: int = 0
    changed_rows: int = 0
    late_rows: int = 0
    next_due_ms: int | None = None
    changes: TaskChanges = field(default_factory=TaskChanges)
    files: PersistedFiles = field(default_factory=PersistedFiles)
    staged: tuple[StagedFiles, ...] = ()
    restored: str = ""  # "" | "local" | "stale" | "primary"
    restore_ms: float = 0.0
    restored_bytes: int = 0
    local_failed: bool = False
    processed_rows: int = 0
    left: Mapping[int, tuple[RowsLeft, ...]] = field(default_factory=dict)
    kept: TaskChanges = field(default_factory=TaskChanges)
    kept_columns: str = ""
    slices: int = 0
    process_s: float = 0.0
    inflight_read_bytes: int = 0
    spilled_bytes: int = 0
    began_at_ms: int = 0
    processed_at_ms: int = 0
    executor: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether only the driver's memory has changes of the shard, or the reference to changes that were uploaded."""
        return self.files.shard is not None or bool(self.changes.parts)

    @property
    def is_done(self) -> bool:
        """Whether no row of the shard is left."""
        return not any(self.left.values())
