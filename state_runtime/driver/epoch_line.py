"""One epoch from its input to its report, in a line:

1. read      the position of the source, and what its logs of seen files got
2. plan      the epoch's work, by the run's state (driver/epoch.py)
3. run       one action of the engine; tasks restore, process, log and acknowledge (driver/engine.py)
4. gather    the acknowledgements of the tasks, collected in one pass
5. state     the new driver state; it is pending until a manifest names it (driver/driver_state.py)
6. commit    if a checkpoint is due, by default after each epoch: segment, manifest (driver/checkpointer.py)
7. publish   the staged output of the sinks gets its final name
8. report    the epoch's numbers, and those of its tasks

With a checkpoint interval some epochs end without 6 and 7. A crash between any two steps is repaired by the next run:
before the manifest the epochs are run again from the previous snapshot. After the manifest the next run publishes the
output that the manifest names and resumes behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from state_runtime.base import faults
from state_runtime.base.heap import collection_paused
from state_runtime.base.progress import Progress, RowsAside, with_times
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import source_log_changes
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.context import DriverContext
from state_runtime.driver.driver_state import DriverState
from state_runtime.driver.empty_outputs import with_empty_outputs
from state_runtime.driver.engine import SparkEngine
from state_runtime.driver.epoch import (
    EpochLimits,
    EpochRequest,
    EpochRun,
    EpochTimes,
    SourceRead,
    TasksDone,
    gathered,
    outcome_of,
    planned,
    row_bytes_after,
)
from state_runtime.driver.epoch_budget import BudgetPlanner
from state_runtime.driver.numbers import of_epoch, of_rows_in_flight
from state_runtime.driver.retries import Retries
from state_runtime.driver.step_rows import StepRows
from state_runtime.driver.task_history import TaskHistory, epoch_of
from state_runtime.pipeline.odd_times import OddTimes
from state_runtime.pipeline.rows_aside import RowsAsideLog
from state_runtime.pipeline.source_position import SparkCheckpoint
from state_runtime.pipeline.staged import staged_outputs
from state_runtime.snapshot.commit import Committer

__all__ = ["EpochLine"]

_LOG = logging.getLogger(__name__)


class EpochLine:
    """Runs the epochs of one run, one at a time, and the checkpoints between them. Called under the driver's lock.

    Args:
        wait: see `Retries`.
        skipped_rows: returns how many rows the sources have skipped since its last call.
        is_savepoint_asked: whether a checkpoint of the head would belong to a requested savepoint.

    Attributes:
        progress: numbers of the newest epoch.
        tasks: the work of the newest epochs' tasks, one by one.
        steps: the steps of the pipeline, with their rows since the run began.
        row_bytes: of the newest rows that came from Spark, see `row_bytes_after`; 0 before the first.
    """

    def __init__(
        self,
        context: DriverContext,
        committer: Committer,
        checkpoint: SparkCheckpoint,
        spark: SparkSession,
        state: DriverState,
        *,
        on_progress: Callable[[Progress], None] | None,
        wait: Callable[[float], bool],
        skipped_rows: Callable[[], int],
        is_savepoint_asked: Callable[[], bool],
    ) -> None:
        self._context = context
        self._committer = committer
        self._checkpoint = checkpoint
        self._spark = spark
        self._state = state
        self._on_progress = on_progress
        self._skipped_rows = skipped_rows
        self._is_savepoint_asked = is_savepoint_asked
        self._uploader = Uploader(context.settings.upload, context.clock)
        self._odd_times = OddTimes(context.pipeline.watermarks)
        self._rows_aside = RowsAsideLog(context.pipeline.graph)
        self._budgets = BudgetPlanner(
            context.settings,
            context.pipeline.operators,
            context.parallelism,
            makes_tables=bool(context.pipeline.makes_tables),
        )
        self.checkpointer = Checkpointer(
            context, committer, state, self._uploader, lambda: self._budgets.is_catching_up
        )
        self.engine = SparkEngine(
            context,
            committer,
            state,
            spark,
            flush=self._flush,
            discard=lambda acknowledged, epoch: self.checkpointer.remove(acknowledged, None, epoch),
        )
        self.retries = Retries(
            state,
            committer,
            self.checkpointer,
            self.engine.so_far,
            tolerable=context.settings.checkpoint.tolerable_failures,
            wait=wait,
        )
        self.progress: Progress | None = None
        self.tasks = TaskHistory()
        self.steps = StepRows.begun(context.pipeline, committer.last)
        self.row_bytes = 0

    @property
    def is_unproven(self) -> bool:
        """Whether the run is on trial and has not yet shown that it can restore every shard and commit. The first epoch
        shows it, whether rows come or not."""
        return self._context.on_trial and self._state.epochs == 0

    def run(self, frame: DataFrame, request: EpochRequest) -> bool:
        """Run one epoch. Return whether it ended in a checkpoint for a requested savepoint.

        Args:
            frame: the batch, or a frame of its columns without rows.

        Raises:
            StillstateError: typed; the driver state may hold changes that never happened.
        """
        numbers, tasks, steps, aside, is_for_savepoint = self.retries.take(
            "epoch", partial(self._epoch, frame, request)
        )
        self.row_bytes = row_bytes_after(self.row_bytes, tasks)
        self.tasks, self.steps = self.tasks.after(epoch_of(numbers, tasks.ran)), steps
        self._rows_aside.look(aside)
        self._report(
            replace(
                numbers,
                skipped_rows=self._skipped_rows(),
                future_rows=sum(aside.future.values()),
                bad_rows=sum(aside.bad.values()),
            )
        )
        return is_for_savepoint

    def checkpoint(self) -> None:
        """Make a checkpoint of the pending changes, between two epochs.

        Raises:
            StillstateError: see `run`.
        """
        alone = partial(self.checkpointer.commit_alone, self._spark)
        self._report(self.retries.take("the checkpoint before epoch", alone))

    def close(self, fold_timeout_s: float) -> None:
        """Wait for a fold up to the timeout, then end it, and release the run's resources in Spark."""
        self.checkpointer.close(fold_timeout_s)
        self.engine.close()

    # --- the line ------------------------------------------------------------------------------------------------

    def _epoch(self, frame: DataFrame, request: EpochRequest) -> tuple[Progress, TasksDone, StepRows, RowsAside, bool]:
        started_s, proves = self._context.clock.monotonic_s(), self.is_unproven
        with collection_paused():
            source = self._read(request)
            limits_of = partial(self._limits_of, request)
            plan = planned(request, self._state.standing(), self._context, limits_of)
            run = self.engine.run(frame, plan, limits_of)
            faults.reach("action-done")
            tasks = gathered(run.acknowledged, self._context.pipeline.stages)
            times = _times_of(run, tasks, started_s)
            numbers = self._advance(run, tasks, source, times)
            steps = self.steps.after(run.acknowledged, run.source_rows, run.aside)
            # Asked after the action: a savepoint that was requested during it need not wait for the next epoch.
            is_for_savepoint = self._is_savepoint_asked()
            if self.checkpointer.is_due() or is_for_savepoint or proves:
                committed = self.checkpointer.commit(numbers, times)
                published = self.checkpointer.publish(committed, frame.sparkSession)
                return published, tasks, steps, run.aside, is_for_savepoint
        return self._leave_pending(numbers, times), tasks, steps, run.aside, False

    def _read(self, request: EpochRequest) -> SourceRead:
        before = self._state.interval.head.source
        if request.batch_id is None:
            return SourceRead(self._checkpoint.numbers.restated(before))
        position = self._checkpoint.position(request.batch_id)
        lines_of = self._checkpoint.new_log_lines(before, position)
        return SourceRead(position, tuple(source_log_changes(source, lines) for source, lines in lines_of.items()))

    def _limits_of(self, request: EpochRequest, batch: BatchProgress | None) -> EpochLimits:
        """Return the limits of an epoch that begins now; without a batch it has no time limit."""
        clock, interval = self._context.clock, self._state.interval
        interval_s, now_s = self._context.settings.checkpoint.interval_s, clock.monotonic_s()
        left_s = max(0.0, interval_s - (now_s - interval.began_s)) if interval_s else 0.0
        budget = self._budgets.plan(
            None if request.unlimited else batch,
            reads=request.reads,
            now_ms=clock.now_ms(),
            until_checkpoint_s=left_s,
        )
        return EpochLimits(budget, now_s + budget.due_after_s)

    def _advance(self, run: EpochRun, tasks: TasksDone, source: SourceRead, times: EpochTimes) -> Progress:
        """Make the work of an epoch the driver state. Return the numbers known until now."""
        context, state, clock = self._context, self._state, run.planned.clock
        if run.planned.has_action:
            self._odd_times.look(run.planned.request.time_ms, run.event_times)
        counted = state.interval.numbers or self._committer.last.progress
        staged = staged_outputs([s for a in run.acknowledged for s in a.staged], context.sinks, clock.epoch)
        outputs = with_empty_outputs(staged, context, self._committer.term.term, {uid for uid, _ in tasks.ran})
        after = outcome_of(run, tasks, state.standing(), context, source, outputs)
        state.epoch_done(after)

        moved = self.engine.learn(run, tasks, times.phases["process"])
        self._budgets.seen(tasks.ran)
        if run.planned.batch is not None:
            self._budgets.seen_of_batch(times.started_s, times.processed_s, is_done=after.batch is None)
        _log_restores(tasks)
        numbers = of_epoch(
            run.acknowledged,
            first_stages=context.pipeline.first_stages,
            source_rows=run.source_rows,
            snapshot_id=self._committer.last.snapshot_id + 1,
            batch_id=source.position.batch_id if source.position is not None else -1,
            clock=clock,
            state_rows_before=counted.state_rows if counted is not None else 0,
        )
        inflight = of_rows_in_flight(
            tasks.ran,
            run.planned.batch,
            after.batch,
            epoch=clock.epoch,
            now_ms=run.time.batch_time_ms,
            dropped_rows=state.take_dropped_rows(),
        )
        segment_bytes = numbers.segment_bytes + run.flushed_bytes
        return replace(numbers, moved_shards=moved, inflight=inflight, segment_bytes=segment_bytes)

    def _leave_pending(self, numbers: Progress, times: EpochTimes) -> Progress:
        """End an epoch without a checkpoint. Return its numbers.

        Its changes are flushed if they are too large for memory, or if nothing but the memory has them.
        """
        state = self._state
        segment_bytes, flushed_ms = 0, 0.0
        if (
            state.interval.holds_more_than(self._context.settings.checkpoint.pending_bytes_max)
            or state.shards.any_stranded
        ):
            segment_bytes, flushed_ms = self._flush()
        ended_s = self._context.clock.monotonic_s()
        numbers = with_times(
            replace(
                numbers,
                segment_bytes=numbers.segment_bytes + segment_bytes,
                upload_attempts=numbers.upload_attempts + self._uploader.take().attempts,
            ),
            (ended_s - times.started_s) * 1000,
            {**times.phases, "segment": times.flushed_ms + flushed_ms},
        )
        state.epoch_pending(numbers)
        faults.reach("epoch-pending")
        return replace(numbers, epochs=state.interval.epochs)

    def _flush(self) -> tuple[int, float]:
        """Write the changes in memory as a segment. Return its bytes, and the milliseconds that it took."""
        begun_s = self._context.clock.monotonic_s()
        written = self.checkpointer.flush()
        took_ms = (self._context.clock.monotonic_s() - begun_s) * 1000
        faults.reach("pending-flushed")
        return written, took_ms

    def _report(self, progress: Progress) -> None:
        self.progress, last = progress, self._committer.last
        self.tasks = self.tasks.durable(last.epoch, snapshot_id=last.snapshot_id, at_ms=last.created_at_ms)
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            # The epoch is done; an observer of the progress must not be able to end the job.
            _LOG.exception("the progress callback failed for epoch %d", progress.epoch)


def _times_of(run: EpochRun, tasks: TasksDone, started_s: float) -> EpochTimes:
    return EpochTimes(
        started_s=started_s,
        due_s=run.planned.limits.due_s,
        planned_s=run.planned_s,
        processed_s=run.processed_s,
        flushed_ms=run.flushed_ms,
        last_row_at_ms=tasks.last_row_at_ms,
    )


def _log_restores(tasks: TasksDone) -> None:
    """Log a line for each shard that had to be restored; the sums are in the progress."""
    for uid, a in tasks.ran:
        if a.restored:
            _LOG.info(
                "operator %s, shard %d: restored from %s in %.0f ms, %d bytes of it from the primary store, on "
                "executor %s",
                uid,
                a.shard,
                a.restored,
                a.restore_ms,
                a.restored_bytes,
                a.executor or "of the driver",
            )
