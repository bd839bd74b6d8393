"""What a run's driver knows beside the newest manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

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
    """All of it at one moment."""

    interval: Interval
    shards: ShardIndex
    files: FileIndex | None
    batch: BatchProgress | None
    epochs: int


@dataclass(frozen=True, kw_only=True)
class EpochOutcome:
    """Where a run stands after an epoch, and what that adds to what is pending.

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
    """Where a run stands between two epochs. Nothing else writes into it, and each method that does is an event.

    Life cycle: `open` with the run → after each epoch `epoch_done`, then `checkpointed` if it ended in a checkpoint, or
    `epoch_pending` if it did not. `flushed`, and with the changelog off `listing_written`, come before either, and
    may come before an epoch's action is run once more. `back_to` an earlier moment after any of these but
    `checkpointed`.

    Not thread-safe: written under the driver's lock. Each part is a value that never changes, so that another
    thread may read one.
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
        """At the start of a run.

        Args:
            last: the snapshot that it goes on from.
            published: see `first_head`.

        Raises:
            MissingFile, CorruptSegment, CorruptManifest: the listing of files cannot be trusted. StoreUnavailable: try
                again.
        """
        parallelism = context.parallelism
        # Local copies have the columns of the run that wrote them; where those changed, the primary brings them to the
        # new ones.
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
                # The first checkpoint has all of the state as files, whatever it was before.
                stored = {o.uid for o in last.operators} & set(uids)
                shards = shards.visiting(dict.fromkeys(stored, every))
        interval = Interval(first_head(last, published), context.clock.monotonic_s())
        if context.drop_inflight:
            return DriverState(interval, shards, files, None, _given_up(last))
        return DriverState(interval, shards, files, _open_batch(context, last))

    # --- what is in them -----------------------------------------------------------------------------------------

    @property
    def interval(self) -> Interval:
        """The head, and what is pending since the newest manifest."""
        return self._interval

    @property
    def shards(self) -> ShardIndex:
        """The local version of each shard, and what is due in it."""
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
        """All of them, as they are now."""
        return Standing(self._interval, self._shards, self._files, self._batch, self._epochs)

    def take_dropped_rows(self) -> int:
        """Rows in flight that the run gave up at its start; once."""
        dropped, self._dropped_rows = self._dropped_rows, 0
        return dropped

    # --- what happens --------------------------------------------------------------------------------------------

    def back_to(self, before: Standing) -> None:
        """What came after that moment has failed and never happened; no manifest was written meanwhile."""
        self._interval, self._shards, self._files = before.interval, before.shards, before.files
        self._batch, self._epochs = before.batch, before.epochs

    def epoch_done(self, after: EpochOutcome) -> None:
        """An epoch's action succeeded, and what its tasks did is the new head."""
        self._shards, self._files, self._batch = after.shards, after.files, after.batch
        self._interval = self._interval.with_epoch(after.head, after.changes, after.outputs, after.rows)
        self._epochs += 1

    def epoch_pending(self, numbers: Progress) -> None:
        """The newest epoch ended without a checkpoint; its numbers are counted in the one to come."""
        self._interval = self._interval.counted(numbers)

    def flushed(self, segment: SegmentEntry | None) -> None:
        """The changes in memory were written to the primary store; None: there were none."""
        self._interval = self._interval.flushed(segment)
        self._shards = self._shards.flushed()

    def rows_flushed(self, segment: SegmentEntry, parts: Sequence[PartEntry], *, listed: bool) -> None:
        """Rows in flight were written to the primary store.

        Args:
            parts: those in the segment, with their places.
            listed: whether it lists all rows in flight.
        """
        self._interval = self._interval.rows_flushed(segment)
        if self._batch is not None:
            batch = self._batch.placed(segment, parts)
            self._batch = batch.listed(segment) if listed else batch

    def listing_written(self, files: FileIndex) -> None:
        """The listing of files was written to the primary store."""
        self._files = files

    def checkpointed(self, committed: Manifest, now_s: float) -> None:
        """A manifest has all of it: nothing is pending any more.

        Args:
            now_s: monotonic.
        """
        self._shards = self._shards.checkpointed()
        self._committed_rows = self._batch.needed if self._batch is not None else frozenset()
        self._interval = Interval(first_head(committed), now_s)
        if self._files is not None:
            self._files = self._files.checkpointed()


def _open_batch(context: DriverContext, last: Manifest) -> BatchProgress | None:
    """The batch that a snapshot leaves open, with the rows that are listed as in flight."""
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


def _given_up(last: Manifest) -> int:
    """Say which rows in flight the run gives up; how many."""
    waiting = last.open_batch.operators if last.open_batch is not None else ()
    for operator in waiting:
        _LOG.warning(
            "operator %s: about %d rows in flight in snapshot %d are dropped, as requested; they are lost",
            operator.uid,
            operator.rows,
            last.snapshot_id,
        )
    return sum(operator.rows for operator in waiting)
