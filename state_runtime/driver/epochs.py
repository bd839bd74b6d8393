"""The epoch loop behind `foreachBatch`.

One call of `EpochDriver.run_batch` is one epoch; so is one of `run_without_batch`, when something is due and no row
comes:

1. plan       the batch's frame through all stages: hash → repartitionById → mapInArrow, user code in between
2. process    one Spark action; tasks restore, process, log and acknowledge
3. head       what the tasks acknowledged is the new head, and is added to what is pending (books.py)

By default each epoch ends in a checkpoint (checkpointer.py: segment, manifest, publication); with a checkpoint
interval, some do, and none is needed for one to be made. A savepoint that was asked for needs one: it comes after the
epoch that is under way.

Then Spark writes its commit log, which is scratch.

A crash between any two steps is repaired by the next run: before the manifest the epochs are run again from the
previous snapshot, after it the next run publishes what the manifest names and resumes behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession

from state_runtime.base import faults
from state_runtime.base.errors import ChangesPending, Fenced, StillstateError, TooMuchForOneTask, can_pass
from state_runtime.base.fair_lock import FairLock
from state_runtime.base.heap import collection_paused
from state_runtime.base.progress import Progress
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import source_log_changes
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.driver.aggregated import Aggregated
from state_runtime.driver.batch_book import BatchBook
from state_runtime.driver.books import Books
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.context import DriverContext
from state_runtime.driver.due import fires_at, is_anything_due, woken
from state_runtime.driver.empty_outputs import with_empty_outputs
from state_runtime.driver.epoch_plan import plan_epoch
from state_runtime.driver.governor import EpochBudget, Governor
from state_runtime.driver.head import (
    Processed,
    advanced,
    batch_after,
    gone_on,
    holds_batch,
    next_head,
    of_operators,
    steps_of,
)
from state_runtime.driver.narrow import Narrow, may_be_narrow
from state_runtime.driver.numbers import of_epoch, of_rows_in_flight, with_times
from state_runtime.driver.processing_time import ProcessingTime
from state_runtime.driver.published import newest_published
from state_runtime.driver.savepoints import Savepoints
from state_runtime.driver.stage_tasks import StageTasks
from state_runtime.driver.task_book import TaskBook, epoch_of
from state_runtime.pipeline.odd_times import OddTimes
from state_runtime.pipeline.source_position import SparkCheckpoint
from state_runtime.pipeline.staged import staged_outputs
from state_runtime.pipeline.watermark import END_OF_TIME_MS, observed
from state_runtime.placement.seats import SeatedPlan, has_executors
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.commit import Committer
from state_runtime.spark.errors import cause_of, typed_error
from state_runtime.spark.frames import Frames
from state_runtime.spark.prepared import frames_of
from state_runtime.task.acknowledgement import Acknowledgement
from state_runtime.task.shard_access import TaskJob

__all__ = ["EpochDriver", "row_bytes_after"]

_LOG = logging.getLogger(__name__)

Done = TypeVar("Done")
"""What a step that succeeded gives."""

# From the first wait to the longest. With the default of three failures a store may be away for about two minutes:
# Spark's action and the store's own repetitions take time too.
_RETRY_WAIT_S = 5.0
_RETRY_WAIT_GROWTH = 4.0
_RETRY_WAIT_MAX_S = 120.0


class EpochDriver:
    """Runs epochs of one run, one at a time: it keeps the order of the steps, and others do them.

    Life cycle: made after the fencing snapshot → `publish_pending` once → (`run_batch` | `run_without_batch` |
    `checkpoint_if_due` | `savepoint_if_asked`)* → `stop` → (`drain`) → `finish` → `close`. After an error it refuses
    further epochs; the error is kept in `failure`. A store that is away for a while is no such error yet: see
    `_tolerating`.

    Args:
        wait: waits for so many seconds before a failed epoch is tried again, and says whether to give up instead.
        skipped_rows: how many rows the sources have passed over since it was last asked.

    Attributes:
        lock: held during an epoch: whoever stops the query takes it, so that no epoch is cut in the middle.
        progress: numbers of the newest epoch.
        tasks: what the tasks of the newest epochs did, one by one.
        row_bytes: of the newest rows that came from Spark, see `row_bytes_after`; 0 before the first.
    """

    def __init__(
        self,
        context: DriverContext,
        committer: Committer,
        checkpoint: SparkCheckpoint,
        spark: SparkSession,
        on_progress: Callable[[Progress], None] | None,
        savepoints: Savepoints | None = None,
        wait: Callable[[float], bool] | None = None,
        skipped_rows: Callable[[], int] = lambda: 0,
    ) -> None:
        self._context = context
        self._skipped_rows = skipped_rows
        self._wait: Callable[[float], bool] = threading.Event().wait if wait is None else wait
        self._committer = committer
        self._checkpoint = checkpoint
        self._spark = spark
        self._on_progress = on_progress
        self._acknowledgements = Acknowledgements(spark.sparkContext)
        self._uploader = Uploader(context.settings.upload, context.clock)
        self._time = ProcessingTime(committer.clock, committer.last, committer.follows_ms)
        self._odd_times = OddTimes(context.pipeline.watermarks)
        self._stopping = threading.Event()
        self._books = Books.open(context, committer.last, newest_published(context, committer.last))
        self._governor = Governor(context.settings, context.pipeline.operators, context.parallelism)
        self._checkpointer = Checkpointer(
            context, committer, self._books, self._uploader, lambda: self._governor.is_catching_up
        )
        self._tasks = StageTasks(
            context, committer, self._books, spark.sparkContext, self._acknowledgements.accumulator
        )
        self._savepoints = savepoints
        self.lock = FairLock()
        self.failure: BaseException | None = None
        self.progress: Progress | None = None
        self.tasks = TaskBook()
        self.row_bytes = 0
        self._failures = 0
        self._is_at_work = False
        self._epochs_when_nothing_was_due = -1
        self._placement = self._tasks.placement(spark)
        able = frozenset(s.operator.uid for s in context.pipeline.stages if s.operator and s.partial is not None)
        self._aggregated = Aggregated(context.settings.partial_aggregation, able)
        self._narrow = Narrow(may_be_narrow(context, has_executors=has_executors(spark)))
        self._made_frames: Frames | None = None
        self._batch_began_s, self._batch_epochs = context.clock.monotonic_s(), 0
        self._empty: DataFrame | None = None

    @property
    def epochs(self) -> int:
        """How many epochs the run has done."""
        return self._books.epochs

    def restoring(self) -> tuple[int, int]:
        """While the first epoch with shards of an earlier run is under way: shards that are done, and all. Else (0, 0).

        For the heartbeat, from its thread: Spark delivers acknowledgements one by one as tasks end.
        """
        done, total = self._acknowledgements.arrived(), self._books.shards.shard_count
        return (0, 0) if done is None or self.epochs > 0 else (min(done, total), total)

    def mark(self) -> tuple[int, int, int]:
        """Changes whenever the run gets on: epochs that ended, attempts that failed, acknowledgements that came. For
        any thread."""
        return self.epochs, self._failures, self._acknowledgements.arrived() or 0

    # --- what the run calls --------------------------------------------------------------------------------------

    def publish_pending(self, spark: SparkSession) -> None:
        """Publish what the newest snapshot names; see `Checkpointer.publish_pending`."""
        self._checkpointer.publish_pending(spark)

    @property
    def is_ending(self) -> bool:
        """Whether a savepoint was asked for after which the job is to stop, and nothing but that is left to do."""
        return self._stopping.is_set() or (self._savepoints is not None and self._savepoints.is_drain_asked)

    def stop(self) -> None:
        """Let no further epoch of a batch begin, and wait for the one that is under way."""
        self._stopping.set()
        with self.lock:
            return

    def close(self, fold_timeout_s: float) -> None:
        """After `stop`: wait so long for a fold, then end it, and give up what the run holds of Spark."""
        self._checkpointer.close(fold_timeout_s)
        self._placement.close()

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """As many epochs as the batch takes, after those that the one before it still takes; the function that Spark
        calls.

        Raises:
            StillstateError: typed, also for errors of tasks; Spark's query ends with it.
        """
        self._finish_batch(frame)
        with self._turn() as is_wanted:
            # Returning without work is safe: Spark's own commit log is scratch, the manifest is the truth.
            head = self._books.interval.head
            if is_wanted and not holds_batch(head, batch_id, lambda: self._checkpoint.position(batch_id)):
                planned_ms = self._checkpoint.clock(batch_id).batch_time_ms
                self._run_epoch(frame, batch_id, self._now_ms(planned_ms))
        self._finish_batch(frame)

    def _finish_batch(self, frame: DataFrame) -> None:
        """Go on with the open batch, until it is done or the run is to stop. Between two epochs others have their turn.

        Args:
            frame: of the source's columns.
        """
        is_open = True
        while is_open:
            with self._turn() as is_wanted:
                is_open = is_wanted and self._books.batch is not None
                if is_open:
                    self._run_epoch(self._without_rows(frame), None, self._now_ms())

    def _without_rows(self, frame: DataFrame) -> DataFrame:
        if self._empty is None:
            self._empty = frame.sparkSession.createDataFrame([], frame.schema)
        return self._empty

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """The lock, and whether an epoch may begin."""
        with self.lock:
            if self._stopping.is_set() or self.failure is not None:
                yield False
                return
            with self._failing():
                yield True

    def is_due(self) -> bool:
        """Whether an epoch without a batch has something to do: processing time has reached a timer, or the watermark
        moved."""
        with self.lock:
            is_due = self._is_due(self._now_ms())
            self._epochs_when_nothing_was_due = -1 if is_due else self.epochs
            return is_due

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether no epoch is under way, and nothing was due when `is_due` was last asked, which was after the last
        epoch. For any thread: it waits for none."""
        return not self._is_at_work and self._epochs_when_nothing_was_due == self.epochs

    @property
    def is_unproven(self) -> bool:
        """Whether the run is on trial and has not shown yet that it can restore every shard and commit: the first epoch
        shows it, whether rows come or not."""
        return self._context.on_trial and self.epochs == 0

    def run_without_batch(self, empty: DataFrame) -> None:
        """One epoch that Spark does not start; nothing happens if nothing is due any more, no batch is open, and the
        run has nothing to prove.

        As Spark's own batches without data: for event time one whenever the watermark moved, for processing time when a
        timer is due. If no shard has anything to do, the epoch is a new clock, and no Spark job runs.

        Args:
            empty: a frame of the source's columns without rows.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            now_ms = self._now_ms()
            is_wanted = self.is_unproven or self._is_due(now_ms)
            if self._stopping.is_set() or self.failure is not None or not is_wanted:
                return
            with self._failing():
                self._run_epoch(empty, None, now_ms)

    def checkpoint_if_due(self) -> None:
        """A checkpoint between two epochs, if the time for one is up: the source may be idle, and output waits for it.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self._stopping.is_set() or self.failure is not None or not self._checkpointer.is_due():
                return
            with self._failing():
                self._report(self._commit_alone())

    def savepoint_if_asked(self) -> None:
        """Begin the savepoints that were asked for, after a checkpoint if anything is pending: between two epochs, for
        an idle source.

        Raises:
            StillstateError: see `run_batch`; of the checkpoint, never of a savepoint.
        """
        if not self._is_savepoint_asked():
            return
        with self.lock:
            if not self._stopping.is_set() and self.failure is None:
                self._checkpoint_and_begin()

    def drain(self, empty: DataFrame) -> None:
        """The end of all input, after `stop`: the watermark goes to its end, every window and event-time timer fires,
        and the last checkpoint says that it did. Timers of processing time that are not due stay.

        Args:
            empty: a frame of the source's columns without rows.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self.failure is not None:
                return
            with self._failing():
                while self._books.batch is not None:
                    self._run_epoch(empty, None, self._now_ms(), unlimited=True)
                # Timers fire timers: each round is an epoch. Code that sets the next one from the one that fires never
                # ends.
                epochs_max = self._context.settings.checkpoint.drain_epochs_max
                for _ in range(epochs_max):
                    self._run_epoch(empty, None, self._now_ms(), drains=True)
                    faults.reach("drain-epoch")
                    if not fires_at(self._context.pipeline.operators, self._books.shards, END_OF_TIME_MS):
                        break
                else:
                    _LOG.warning(
                        "after %d epochs (drain_epochs_max) timers still set timers; the rest of them stays", epochs_max
                    )
            self._checkpoint_and_begin()

    def finish(self) -> None:
        """The last checkpoint of a run that ends well: what is pending becomes durable, and its output visible.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self.failure is None:
                self._checkpoint_and_begin()

    def _checkpoint_and_begin(self) -> None:
        if self._books.interval.epochs:
            with self._failing():
                self._report(self._commit_alone())
        self._begin_savepoints()

    def _commit_alone(self) -> Progress:
        return self._tolerating("the checkpoint before epoch", lambda: self._checkpointer.commit_alone(self._spark))

    def _begin_savepoints(self) -> None:
        """Of the newest snapshot, which is what the run stands at. It cannot be given up before it is pinned: it is the
        newest."""
        if self._savepoints is not None and self._savepoints.begin(self._committer.last):
            self._stopping.set()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error as the run's failure, and take back what the run leaves of epochs that nobody will ever see."""
        self._is_at_work = True
        try:
            yield
        except BaseException as error:
            self.failure = typed_error(error)
            if not self._checkpointer.is_committing and not isinstance(self.failure, Fenced):
                self._checkpointer.remove(self._acknowledgements.so_far(), self._books.interval)
            raise self.failure from cause_of(self.failure, error)
        finally:
            self._is_at_work = False

    # --- an epoch ------------------------------------------------------------------------------------------------

    def _now_ms(self, planned_ms: int | None = None) -> int:
        return self._time.now_ms(self._books.interval.head, planned_ms)

    def _is_due(self, now_ms: int) -> bool:
        head = self._books.interval.head
        if self._books.batch is not None:
            return True
        if head.time is None or head.source is None:
            return False
        time = advanced(self._context, head, now_ms)
        return is_anything_due(self._context.pipeline.operators, self._books.shards, head.time, time)

    def _run_epoch(
        self,
        frame: DataFrame,
        batch_id: int | None,
        batch_time_ms: int,
        *,
        drains: bool = False,
        unlimited: bool = False,
    ) -> None:
        """One epoch, of a batch or (None) without one, which goes on with a batch that is open; and what is due after
        it: a checkpoint, a flush, or nothing.

        Args:
            drains: it is one after the end of all input.
            unlimited: it takes as long as it takes, whatever the mode says.
        """

        proves = self.is_unproven

        def epoch() -> tuple[Progress, Processed, bool]:
            with collection_paused():
                done = self._process(
                    frame, batch_id is not None, batch_time_ms, drains=drains, unlimited=unlimited or drains
                )
                faults.reach("action-done")
                numbers = replace(self._take(done, batch_id, drains=drains), segment_bytes=done.flushed_bytes)
                # Asked after the action: a savepoint that was asked for during it need not wait for the next epoch.
                is_asked = self._is_savepoint_asked()
                if self._checkpointer.is_due() or is_asked or proves:
                    return self._checkpointer.commit(numbers, done, frame.sparkSession), done, is_asked
            return self._leave_pending(numbers, done), done, False

        numbers, done, is_asked = self._tolerating("epoch", epoch)
        self.row_bytes = row_bytes_after(self.row_bytes, done.acknowledged)
        ran = of_operators(done.acknowledged, self._context.pipeline.stages)
        self.tasks = self.tasks.after(epoch_of(numbers, ((o.uid, a) for o, a in ran)))
        self._report(replace(numbers, skipped_rows=self._skipped_rows()))
        if is_asked:
            self._begin_savepoints()

    def _is_savepoint_asked(self) -> bool:
        """Whether a checkpoint of the head would be a savepoint's."""
        is_open = self._books.batch is not None
        return self._savepoints is not None and self._savepoints.is_asked(batch_is_open=is_open)

    def _tolerating(self, what: str, step: Callable[[], Done]) -> Done:
        """Take a step; again, while what makes it fail can pass, and at most `tolerable_failures` times in a row.

        A run that ends costs a start of Spark and a restore; a store that is away for two minutes should not. A step
        that failed has not happened: the books are as before it, and what it staged and uploaded is removed as far as
        the stores answer, and never named by a manifest.

        Not tried again: anything after a manifest's create was tried, because it may have happened; what comes after
        the manifest; an error that the same call gets again.
        """
        failures, tolerable = 0, self._context.settings.checkpoint.tolerable_failures
        while True:
            before, last = self._books.standing(), self._committer.last
            try:
                return step()
            except Exception as error:
                typed = typed_error(error)
                failures += 1
                self._failures += 1
                is_open = self._checkpointer.is_committing or self._committer.last is not last
                if is_open or not can_pass(typed) or failures > tolerable:
                    raise
                made = self._books.interval.since(before.interval)
                self._checkpointer.remove(self._acknowledgements.so_far(), made)
                self._books.back_to(before)
                wait_s = min(_RETRY_WAIT_MAX_S, _RETRY_WAIT_S * _RETRY_WAIT_GROWTH ** (failures - 1))
                _LOG.warning(
                    "%s %d failed (%d of at most %d times in a row) and is run again in %.0f s: %s: %s",
                    what, before.interval.head.epoch + 1, failures, tolerable, wait_s, type(typed).__name__, typed,
                )  # fmt: skip
                if self._wait(wait_s):
                    raise

    def _process(
        self, frame: DataFrame, has_batch: bool, batch_time_ms: int, *, drains: bool, unlimited: bool
    ) -> Processed:
        """Plan and run the epoch's Spark action; none where there is neither a batch nor anything due.

        If a task needs from the primary what only the driver holds, that is written and the action run once more; and
        if it is too much for one task, with a task for each shard.
        """
        context, head = self._context, self._books.interval.head
        started_s = context.clock.monotonic_s()
        late_ms = head.time.watermark_ms if head.time is not None else 0
        batch = self._books.batch
        if batch is not None:
            time, late_ms = gone_on(head, batch_time_ms), batch.late_watermark_ms
        else:
            time = advanced(context, head, batch_time_ms)
            batch = BatchBook.begun(late_ms) if has_batch else None
        budget, due_s = self._budget(None if unlimited else batch, reads=has_batch)
        # The end of all input is not noted as the watermark: a run that goes on from here nevertheless has the one of
        # its input.
        acting = replace(time, watermark_ms=END_OF_TIME_MS) if drains else time
        wake = woken(
            context.pipeline.operators, self._books.shards, acting, batch, budget.does_due, context.parallelism
        )
        stored = {o.uid for o in head.operators}
        beginning = frozenset(
            s.operator.uid for s in context.pipeline.stages if s.operator and s.initial and s.operator.uid not in stored
        )
        job = self._tasks.job(acting, late_ms)
        clock = replace(job.clock, watermark_ms=time.watermark_ms)
        if not (has_batch or beginning or any(wake.values())):
            now_s = context.clock.monotonic_s()
            return Processed(
                acknowledged=[],
                time=time,
                clock=clock,
                batch=batch,
                budget=budget,
                started_s=started_s,
                due_s=due_s,
                planned_s=now_s,
                processed_s=now_s,
            )
        flushed_ms, flushed_bytes, is_flushed = 0.0, 0, False
        narrow = self._narrow.choose(budget.within_s, goes_on=self._books.batch is not None)
        while True:
            seats = self._placement.for_epoch()
            if self._placement.has_filled:
                # Rows get the time that they would have had: executors may have been starting for most of it.
                budget, _ = self._budget(None if unlimited else batch, reads=has_batch)
            try:
                acknowledged, event_times, planned_s = self._act(
                    frame, job, wake, beginning, budget, seats, is_batch=has_batch, narrow=narrow
                )
                break
            except Exception as error:
                typed = typed_error(error)
                # What its tasks wrote will not be used: the action begins anew.
                if isinstance(typed, TooMuchForOneTask) and narrow:
                    self._give_up_narrow(job, typed)
                    narrow = False
                elif isinstance(typed, ChangesPending) and not is_flushed:
                    self._checkpointer.remove(self._acknowledgements.so_far())
                    _LOG.info("epoch %d needs changes that were not written yet: %s", job.clock.epoch, typed)
                    flushed_bytes, flushed_ms = self._flush()
                    is_flushed = True
                    if self._books.batch is not None:
                        batch = self._books.batch  # its rows have places on the store now
                else:
                    raise
            # With the time that there was before: what was done meanwhile is not the tasks'.
            budget, due_s = self._budget(None if unlimited else batch, reads=has_batch)
            job = self._tasks.job(acting, late_ms)
        self._odd_times.look(batch_time_ms, event_times)
        return Processed(
            acknowledged=acknowledged,
            time=observed(time, event_times),
            clock=clock,
            batch=batch,
            budget=budget,
            started_s=started_s,
            due_s=due_s,
            planned_s=planned_s,
            processed_s=context.clock.monotonic_s(),
            flushed_ms=flushed_ms,
            flushed_bytes=flushed_bytes,
        )

    def _budget(self, batch: BatchBook | None, *, reads: bool) -> tuple[EpochBudget, float]:
        """What the epoch that begins now may take, without a batch whatever it takes; and when (monotonic) a checkpoint
        is due."""
        clock, interval = self._context.clock, self._books.interval
        interval_s, now_s = self._context.settings.checkpoint.interval_s, clock.monotonic_s()
        left_s = max(0.0, interval_s - (now_s - interval.began_s)) if interval_s else 0.0
        budget = self._governor.plan(batch, reads=reads, now_ms=clock.now_ms(), until_checkpoint_s=left_s)
        return budget, now_s + budget.due_after_s

    def _act(
        self,
        frame: DataFrame,
        job: TaskJob,
        wake: Mapping[str, Sequence[int]],
        beginning: frozenset[str],
        budget: EpochBudget,
        seats: SeatedPlan | None,
        *,
        is_batch: bool,
        narrow: bool,
    ) -> tuple[list[Acknowledgement], Mapping[str, int | None], float]:
        """One Spark action; the acknowledgements, the event times seen, and when (monotonic) the plan was ready."""
        with self._tasks.of_action(job, budget, self._books.batch, narrow=narrow) as task:
            plan = plan_epoch(
                frame,
                self._context.pipeline,
                job.parallelism,
                frames=self._frames,
                task=task,
                wake=wake,
                beginning=beginning,
                seats=seats,
                aggregated=self._aggregated.chosen(),
                is_batch=is_batch,
                narrow=narrow,
            )
            planned_s = self._context.clock.monotonic_s()
            with self._acknowledgements.expecting(job.epoch):
                plan.run()
        acknowledged = self._acknowledgements.take(job.epoch, job.parallelism, self._context.pipeline.stages)
        return acknowledged, plan.event_time_ms(), planned_s

    def _give_up_narrow(self, job: TaskJob, why: StillstateError) -> None:
        """The next action has a task for each shard. Nothing that the one task staged stays: it failed, so no
        acknowledgement tells of it."""
        self._narrow.refused()
        _LOG.info("epoch %d is run again with a task for each shard: %s", job.clock.epoch, why)
        self._checkpointer.remove(self._acknowledgements.so_far(), None, job.clock.epoch)

    def _frames(self) -> Frames:
        """What makes the frames of an epoch's plan; it keeps what all epochs have in common."""
        if self._made_frames is None:
            self._made_frames = frames_of(self._spark)
        return self._made_frames

    def _take(self, done: Processed, batch_id: int | None, *, drains: bool) -> Progress:
        """Make what an epoch did the new head; its numbers as far as they are known."""
        context, books, before = self._context, self._books, self._books.interval
        stages = context.pipeline.stages
        position = before.head.source
        changes: list[TaskChanges] = [a.changes for a in done.acknowledged]
        if batch_id is not None:
            position = self._checkpoint.position(batch_id)
            for source, lines in self._checkpoint.new_log_lines(before.head.source, position).items():
                changes.append(source_log_changes(source, lines))
        shards = books.shards.after(steps_of(done, stages))
        batch = batch_after(done, context, shards)
        staged = staged_outputs([s for a in done.acknowledged for s in a.staged], context.sinks, done.clock.epoch)
        books.epoch_done(
            next_head(before.head, done, context, shards, position=position, drained=drains),
            shards,
            books.files.after(a.files for a in done.acknowledged) if books.files is not None else None,
            batch,
            changes,
            with_empty_outputs(staged, context, self._committer.term.term),
            [a.kept for a in done.acknowledged],
        )
        ran = list(of_operators(done.acknowledged, stages))
        moved = self._placement.ran((o.uid, a.shard, a.executor) for o, a in ran)
        self._aggregated.seen((o.uid, a) for o, a in ran)
        self._narrow.seen(done.acknowledged, stages, done.phases["process"])
        self._note_batch(done, batch, ((o.uid, a) for o, a in ran))
        for operator, acknowledgement in ran:
            _log_restore(operator, acknowledgement)
        counted = before.numbers or self._committer.last.progress
        numbers = of_epoch(
            done.acknowledged,
            snapshot_id=self._committer.last.snapshot_id + 1,
            batch_id=position.batch_id if position else -1,
            clock=done.clock,
            state_rows_before=counted.state_rows if counted is not None else 0,
        )
        inflight = of_rows_in_flight(
            [(o.uid, a) for o, a in ran],
            done.batch,
            batch,
            epoch=done.clock.epoch,
            now_ms=done.time.batch_time_ms,
            dropped_rows=books.take_dropped_rows(),
        )
        return replace(numbers, moved_shards=moved, inflight=inflight)

    def _note_batch(self, done: Processed, batch: BatchBook | None, ran: Iterable[tuple[str, Acknowledgement]]) -> None:
        """Let the governor learn from an epoch, and from its batch if that is done."""
        self._governor.seen(ran)
        if done.batch is None:
            return
        if self._batch_epochs == 0:
            self._batch_began_s = done.started_s
        self._batch_epochs += 1
        if batch is None:
            self._governor.batch_done(done.processed_s - self._batch_began_s, self._batch_epochs)
            self._batch_epochs = 0

    def _leave_pending(self, numbers: Progress, done: Processed) -> Progress:
        """The end of an epoch without a checkpoint; its numbers.

        What it changed is flushed if it is too much to be held in memory, or if nothing but the memory has it.
        """
        books = self._books
        segment_bytes, flushed_ms = 0, 0.0
        if (
            books.interval.holds_more_than(self._context.settings.checkpoint.pending_bytes_max)
            or books.shards.any_stranded
        ):
            segment_bytes, flushed_ms = self._flush()
        ended_s = self._context.clock.monotonic_s()
        numbers = with_times(
            replace(
                numbers,
                segment_bytes=numbers.segment_bytes + segment_bytes,
                upload_attempts=numbers.upload_attempts + self._uploader.take().attempts,
            ),
            (ended_s - done.started_s) * 1000,
            {**done.phases, "segment": done.flushed_ms + flushed_ms},
        )
        books.epoch_pending(numbers)
        faults.reach("epoch-pending")
        return replace(numbers, epochs=books.interval.epochs)

    def _flush(self) -> tuple[int, float]:
        """Write the changes in memory as a segment; its bytes, and the milliseconds that it took."""
        begun_s = self._context.clock.monotonic_s()
        written = self._checkpointer.flush()
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
            # The epoch is done; whoever watches it must not be able to end the job.
            _LOG.exception("the progress callback failed for epoch %d", progress.epoch)


def _log_restore(operator: Operator, a: Acknowledgement) -> None:
    """A line for a shard that had to be restored; the sums are in the progress."""
    if a.restored:
        _LOG.info(
            "operator %s, shard %d: restored from %s in %.0f ms, %d bytes of it from the primary store, on executor %s",
            operator.uid,
            a.shard,
            a.restored,
            a.restore_ms,
            a.restored_bytes,
            a.executor or "of the driver",
        )


def row_bytes_after(before: int, acknowledged: Iterable[Acknowledgement]) -> int:
    """How wide rows from Spark are after an epoch: its own, or as before. An epoch that goes on with a batch gets none
    from Spark, and the batch may be the wide one."""
    return max((a.row_bytes for a in acknowledged), default=0) or before
