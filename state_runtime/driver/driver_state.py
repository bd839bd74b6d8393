"""The driver state: all that a run's driver knows beside the newest manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from state_runtime.base.progress import Progress
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.reader import read_passes
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.context import DriverContext
from state_runtime.driver.file_index import FileIndex
from state_runtime.driver.interval import Interval, first_head
from state_runtime.driver.shard_index import ShardIndex
from state_runtime.pipeline.compatibility import usable_versions
from state_runtime.snapshot.manifest import Manifest, SegmentEntry, StagedOutput

__all__ = ["DriverState", "EpochOutcome", "Standing"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """The whole driver state at one moment."""

    interval: Interval
    shards: ShardIndex
    files: FileIndex | None
    batch: BatchProgress | None
    epochs: int


@dataclass(frozen=True, kw_only=True)
class EpochOutcome:
    """The driver state after an epoch, and the changes that the epoch adds to the pending ones.

    Attributes:
        head: a draft of the next manifest.
        shards, files, batch: after the epoch.
        changes, outputs, rows: of state, of sinks, of rows in flight.
    """

    head: Manifest
    shards: ShardIndex
    files: FileIndex | None
    batch: BatchProgress | None
    changes: Sequence[TaskChanges]
    outputs: Sequence[StagedOutput]
    rows: Sequence[TaskChanges] = ()


class DriverState:
    """The driver state between two epochs. Nothing else writes into it, and each method that does is an event.

    Life cycle: `open` with the run → after each epoch `epoch_done`, then `checkpointed` if it ended in a checkpoint, or
    `epoch_pending` if it did not. `flushed`, and with the changelog off `listing_written`, come before either, and
    may come before an epoch's action is run once more. `back_to` an earlier moment after any of these but
    `checkpointed`.

    Not thread-safe: written under the driver's lock. Each part is an immutable value, so another thread may read one
    part.
    """

    def __init__(
        self,
        interval: Interval,
        shards: ShardIndex,
        files: FileIndex | None,
        batch: BatchProgress | None = None,
        dropped_rows: int = 0,
    ) -> None:
        self._interval = interval
        self._shards = shards
        self._files = files
        self._batch = batch
        self._committed_rows = batch.needed if batch is not None else frozenset[str]()
        self._dropped_rows = dropped_rows
        self._epochs = 0

    @staticmethod
    def open(context: DriverContext, last: Manifest, published: int = 0) -> DriverState:
        """Return the state at the start of a run.

        Args:
            last: the snapshot that the run resumes from.
            published: see `first_head`.

        Raises:
            MissingFile, CorruptSegment, CorruptManifest: the listing of files cannot be trusted. StoreUnavailable: try
                again.
        """
        parallelism = context.parallelism
        # Local copies have the columns of the run that wrote them. Where columns changed, shards are restored from the
        # primary store, which brings them to the new columns.
        serving = usable_versions(last, context.entries) if last.parallelism == parallelism else {}
        uids = [o.uid for o in context.pipeline.operators]
        shards = ShardIndex.at_start(parallelism, serving, {o.uid: o.next_due_ms for o in last.operators}, uids)
        every = frozenset(range(parallelism))
        if context.on_trial:
            shards = shards.visiting(dict.fromkeys(uids, every))
        files: FileIndex | None = None
        if context.settings.changelog == "off":
            files = FileIndex.begin(context.root, last, parallelism, uids)
            if not files.complete:
                # The first checkpoint stores all of the state as files, in any case.
                stored = {o.uid for o in last.operators} & set(uids)
                shards = shards.visiting(dict.fromkeys(stored, every))
        interval = Interval(_awake(first_head(last, published)), context.clock.monotonic_s())
        if context.drop_inflight:
            return DriverState(interval, shards, files, None, _given_up(last))
        return DriverState(interval, shards, files, _open_batch(context, last))

    # --- contents ------------------------------------------------------------------------------------------------

    @property
    def interval(self) -> Interval:
        """The head, and the changes pending since the newest manifest."""
        return self._interval

    @property
    def shards(self) -> ShardIndex:
        """The local version of each shard, and its due work."""
        return self._shards

    @property
    def files(self) -> FileIndex | None:
        """The files of all shards; None with the changelog on."""
        return self._files

    @property
    def batch(self) -> BatchProgress | None:
        """How far the newest batch is; None if it is done."""
        return self._batch

    @property
    def needed_rows(self) -> frozenset[str]:
        """Digests of the parts of in-flight rows that the head or the newest checkpoint names."""
        return self._committed_rows | (self._batch.needed if self._batch is not None else frozenset())

    @property
    def epochs(self) -> int:
        """How many epochs the run has done."""
        return self._epochs

    def standing(self) -> Standing:
        """Return the whole state as of now."""
        return Standing(self._interval, self._shards, self._files, self._batch, self._epochs)

    def take_dropped_rows(self) -> int:
        """Return how many rows in flight the run dropped at its start; 0 after the first call."""
        dropped, self._dropped_rows = self._dropped_rows, 0
        return dropped

    # --- events --------------------------------------------------------------------------------------------------

    def back_to(self, before: Standing) -> None:
        """Return to an earlier moment. All later changes failed and never happened; no manifest was written since."""
        self._interval, self._shards, self._files = before.interval, before.shards, before.files
        self._batch, self._epochs = before.batch, before.epochs

    def epoch_done(self, after: EpochOutcome) -> None:
        """Make the work of an epoch's tasks the new head: its action succeeded."""
        self._shards, self._files, self._batch = after.shards, after.files, after.batch
        self._interval = self._interval.with_epoch(after.head, after.changes, after.outputs, after.rows)
        self._epochs += 1

    def epoch_pending(self, numbers: Progress) -> None:
        """Note that the newest epoch ended without a checkpoint; the next checkpoint counts its numbers."""
        self._interval = self._interval.counted(numbers)

    def flushed(self, segment: SegmentEntry | None) -> None:
        """Note that the changes in memory were written to the primary store; None: there were no changes."""
        self._interval = self._interval.flushed(segment)
        self._shards = self._shards.flushed()

    def rows_flushed(self, segment: SegmentEntry, parts: Sequence[PartEntry], *, listed: bool) -> None:
        """Note that rows in flight were written to the primary store.

        Args:
            parts: the parts in the segment, with their places.
            listed: whether the segment lists all rows in flight.
        """
        self._interval = self._interval.rows_flushed(segment)
        if self._batch is not None:
            batch = self._batch.placed(segment, parts)
            self._batch = batch.listed(segment) if listed else batch

    def listing_written(self, files: FileIndex) -> None:
        """Note that the listing of files was written to the primary store."""
        self._files = files

    def checkpointed(self, committed: Manifest, now_s: float) -> None:
        """Note that a manifest has the whole state: nothing is pending any more.

        Args:
            now_s: monotonic.
        """
        self._shards = self._shards.checkpointed()
        self._committed_rows = self._batch.needed if self._batch is not None else frozenset()
        self._interval = Interval(first_head(committed), now_s)
        if self._files is not None:
            self._files = self._files.checkpointed()


def _open_batch(context: DriverContext, last: Manifest) -> BatchProgress | None:
    """Return the batch that a snapshot leaves open, with the listed rows in flight."""
    batch = last.open_batch
    if batch is None:
        return None
    return BatchProgress.resumed(
        batch,
        read_passes(context.root, last),
        context.pipeline.operators,
        parallelism=context.parallelism,
        parallelism_before=last.parallelism,
    )


def _awake(head: Manifest) -> Manifest:
    """Return a head without the times at which sources had rows: no source was idle while no run could read it."""
    return head if head.time is None else replace(head, time=replace(head.time, seen_ms={}, idle=()))


def _given_up(last: Manifest) -> int:
    """Log which rows in flight the run drops. Return their number."""
    waiting = last.open_batch.operators if last.open_batch is not None else ()
    for operator in waiting:
        _LOG.warning(
            "operator %s: about %d rows in flight in snapshot %d are dropped, as requested; they are lost",
            operator.uid,
            operator.rows,
            last.snapshot_id,
        )
    return sum(operator.rows for operator in waiting)
