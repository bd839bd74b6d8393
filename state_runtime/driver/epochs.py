"""The epochs of a run, one after the other: which one may begin, and who waits for it.

One call of `EpochDriver.run_batch` is one epoch, or as many as the batch takes. So is one call of `run_without_batch`,
when work is due and no row comes. driver/epoch_line.py has the steps of an epoch.

By default each epoch ends in a checkpoint; with a checkpoint interval, some do, and a checkpoint can be made without an
epoch. A requested savepoint needs a checkpoint: it comes after the epoch that is under way. Then Spark writes its
commit log, which is scratch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession

from state_runtime.base import faults
from state_runtime.base.errors import Fenced, StoreUnavailable
from state_runtime.base.fair_lock import FairLock
from state_runtime.base.progress import Progress
from state_runtime.base.sink_state import SinkState
from state_runtime.base.steps import Step
from state_runtime.driver.context import DriverContext
from state_runtime.driver.driver_state import DriverState
from state_runtime.driver.due import fires_at, is_anything_due
from state_runtime.driver.epoch import EpochRequest, advanced, holds_batch
from state_runtime.driver.epoch_line import EpochLine
from state_runtime.driver.newest_published import newest_published
from state_runtime.driver.processing_time import ProcessingTime
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.driver.task_history import TaskHistory
from state_runtime.pipeline.source_position import SparkCheckpoint
from state_runtime.pipeline.watermark import END_OF_TIME_MS
from state_runtime.snapshot.commit import Committer
from state_runtime.spark.errors import cause_of, typed_error

__all__ = ["EpochDriver"]

_LOG = logging.getLogger(__name__)

# How soon a run that is held up by a sink sees that it is to stop.
_HELD_UP_LOOK_S = 1.0


class EpochDriver:
    """Runs epochs of one run, one at a time: it decides which one begins, and `EpochLine` runs each of them.

    Life cycle: made after the fencing snapshot → `publish_pending` once → (`run_batch` | `run_without_batch` |
    `checkpoint_if_due` | `savepoint_if_asked`)* → `stop` → (`drain`) → `finish` → `close`. After an error it refuses
    further epochs; the error is kept in `failure`. A store that is away for a while is no such error yet: see
    `Retries`.

    Args:
        wait: waits the given seconds before a failed epoch is tried again; returns whether to abandon it instead.
        skipped_rows: returns how many rows the sources have skipped since its last call.

    Attributes:
        lock: held during an epoch. The query is stopped under this lock, so that no epoch is cut in the middle.
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
        self._committer = committer
        self._checkpoint = checkpoint
        self._savepoints = savepoints
        self._wait = threading.Event().wait if wait is None else wait
        self._state = DriverState.open(context, committer.last, newest_published(context, committer.last))
        self._time = ProcessingTime(committer.clock, committer.last, committer.follows_ms)
        self._line = EpochLine(
            context,
            committer,
            checkpoint,
            spark,
            self._state,
            on_progress=on_progress,
            wait=self._wait,
            skipped_rows=skipped_rows,
            is_savepoint_asked=self._is_savepoint_asked,
        )
        self._stopping = threading.Event()
        self.lock = FairLock()
        self.failure: BaseException | None = None
        self._is_at_work = False
        self._epochs_when_nothing_was_due = -1
        self._empty: DataFrame | None = None

    @property
    def epochs(self) -> int:
        """How many epochs the run has done."""
        return self._state.epochs

    @property
    def progress(self) -> Progress | None:
        """Numbers of the newest epoch."""
        return self._line.progress

    @property
    def tasks(self) -> TaskHistory:
        """The work of the newest epochs' tasks, one by one."""
        return self._line.tasks

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the pipeline, with their rows since the run began."""
        return self._line.steps.steps

    @property
    def row_bytes(self) -> int:
        """Of the newest rows that came from Spark, see `row_bytes_after`; 0 before the first."""
        return self._line.row_bytes

    def restoring(self) -> tuple[int, int]:
        """Shards done and in total, while the first epoch with shards of an earlier run is under way. Else (0, 0).

        For the heartbeat, from its thread: Spark delivers acknowledgements one by one as tasks end.
        """
        done, total = self._line.engine.arrived(), self._state.shards.shard_count
        return (0, 0) if done is None or self.epochs > 0 else (min(done, total), total)

    def mark(self) -> tuple[int, int, int]:
        """A value that changes whenever the run advances: epochs that ended, attempts that failed, acknowledgements
        that arrived. For any thread."""
        return self.epochs, self._line.retries.failures, self._line.engine.arrived() or 0

    # --- what the run calls --------------------------------------------------------------------------------------

    def publish_pending(self, spark: SparkSession) -> None:
        """Publish the output that the newest snapshot names; see `Checkpointer.publish_pending`."""
        self._line.checkpointer.publish_pending(spark)

    @property
    def is_ending(self) -> bool:
        """Whether a savepoint was requested after which the job stops, and nothing else is left to do."""
        return self._stopping.is_set() or (self._savepoints is not None and self._savepoints.is_drain_asked)

    def stop(self) -> None:
        """Let no further epoch of a batch begin, and wait for the one under way."""
        self._stopping.set()
        with self.lock:
            return

    def close(self, fold_timeout_s: float) -> None:
        """Wait, after `stop`, for a fold up to the timeout, then end it, and release the run's resources in Spark."""
        self._line.close(fold_timeout_s)

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Run as many epochs as the batch takes, after those that the batch before still takes. Spark calls this
        function.

        Raises:
            StillstateError: typed, also for errors of tasks; Spark's query ends with it.
        """
        self._finish_batch(frame)
        self._wait_while_held_up()
        with self._turn() as is_wanted:
            # Returning without work is safe: Spark's own commit log is scratch, the manifest is the truth.
            head = self._state.interval.head
            if is_wanted and not holds_batch(head, batch_id, lambda: self._checkpoint.position(batch_id)):
                planned_ms = self._checkpoint.clock(batch_id).batch_time_ms
                self._run(frame, batch_id, self._now_ms(planned_ms))
        self._finish_batch(frame)

    def _finish_batch(self, frame: DataFrame) -> None:
        """Continue the open batch, until it is done or the run is to stop. The lock is free between two epochs.

        Args:
            frame: of the source's columns.
        """
        is_open = self._state.batch is not None
        while is_open:
            self._wait_while_held_up()
            with self._turn() as is_wanted:
                is_open = is_wanted and self._state.batch is not None
                if is_open:
                    self._run(self._without_rows(frame), None, self._now_ms())

    def _wait_while_held_up(self) -> None:
        """Wait, without the lock, until an epoch may begin or the run is to stop."""
        while self.is_held_up and not self._stopping.is_set() and self.failure is None:
            if self._wait(_HELD_UP_LOOK_S):
                return

    def _without_rows(self, frame: DataFrame) -> DataFrame:
        if self._empty is None:
            self._empty = frame.sparkSession.createDataFrame([], frame.schema)
        return self._empty

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Hold the lock. Yield whether an epoch may begin."""
        with self.lock:
            if self._stopping.is_set() or self.failure is not None:
                yield False
                return
            with self._failing():
                yield True

    def is_due(self) -> bool:
        """Return whether an epoch without a batch has something to do: processing time has reached a timer, or the
        watermark moved."""
        with self.lock:
            is_due = self._is_due(self._now_ms()) and not self.is_held_up
            self._epochs_when_nothing_was_due = -1 if is_due else self.epochs
            return is_due

    @property
    def has_nothing_to_do(self) -> bool:
        """Return whether no epoch is under way, and nothing was due at the last call of `is_due`, which was after the
        last epoch. For any thread: it never blocks."""
        return not self._is_at_work and self._epochs_when_nothing_was_due == self.epochs

    @property
    def is_settled(self) -> bool:
        """Return whether all that was read is processed and checkpointed, so that its output is published. For any
        thread, as `has_nothing_to_do`."""
        return self.has_nothing_to_do and not self._state.interval.epochs and not self.sinks_away()

    def sinks_away(self) -> tuple[SinkState, ...]:
        """Return what waits for each sink that is away. For any thread."""
        return self._line.checkpointer.waiting.states()

    @property
    def is_held_up(self) -> bool:
        """Whether no epoch may begin, because too much output waits for a sink that is away. For any thread."""
        return self._line.checkpointer.waiting.is_full

    def look_at_sinks(self) -> None:
        """End the run if a sink that was away cannot take its output at all.

        Raises:
            StillstateError: of the sink.
        """
        waiting = self._line.checkpointer.waiting
        if waiting.has_failed and self.failure is None:
            with self.lock, self._failing():
                waiting.raise_failure()

    def wait_for_sinks(self, is_enough: Callable[[], bool]) -> None:
        """Wait, after `finish`, until the output that waits is published, or it is enough.

        Raises:
            StillstateError: see `look_at_sinks`.
            StoreUnavailable: a sink is still away. The next run publishes what waits for it.
        """
        waiting = self._line.checkpointer.waiting
        waiting.wait_until_empty(is_enough)
        self.look_at_sinks()
        for sink in waiting.states():
            raise StoreUnavailable(
                f"sink {sink.name!r} is away ({sink.said}): the output of {sink.epochs} epochs waits for it. It is "
                f"staged, and snapshot {self._committer.last.snapshot_id} names it: start the job again once the sink "
                "can be reached, and it is published"
            )

    @property
    def is_unproven(self) -> bool:
        """See `EpochLine.is_unproven`."""
        return self._line.is_unproven

    def run_without_batch(self, empty: DataFrame) -> None:
        """Run one epoch that Spark does not start. Do nothing if nothing is due any more, no batch is open, and the run
        has nothing to prove (`is_unproven`).

        Like Spark's own batches without data: for event time one whenever the watermark moved, for processing time when
        a timer is due. If no shard has anything to do, the epoch only moves the clock, and no Spark job runs.

        Args:
            empty: a frame of the source's columns without rows.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            now_ms = self._now_ms()
            is_wanted = (self.is_unproven or self._is_due(now_ms)) and not self.is_held_up
            if self._stopping.is_set() or self.failure is not None or not is_wanted:
                return
            with self._failing():
                self._run(empty, None, now_ms)

    def checkpoint_if_due(self) -> None:
        """Make a checkpoint between two epochs, if one is due: the source may be idle, and output waits for it.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self._stopping.is_set() or self.failure is not None or not self._line.checkpointer.is_due():
                return
            with self._failing():
                self._line.checkpoint()

    def savepoint_if_asked(self) -> None:
        """Begin the requested savepoints, after a checkpoint if anything is pending: between two epochs, for an idle
        source.

        Raises:
            StillstateError: see `run_batch`; of the checkpoint, never of a savepoint.
        """
        if not self._is_savepoint_asked():
            return
        with self.lock:
            if not self._stopping.is_set() and self.failure is None:
                self._checkpoint_and_begin()

    def drain(self, empty: DataFrame) -> None:
        """End all input, after `stop`: the watermark goes to its end, every window and event-time timer fires, and the
        last checkpoint records that. Timers of processing time that are not due stay.

        Args:
            empty: a frame of the source's columns without rows.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self.failure is not None:
                return
            with self._failing():
                while self._state.batch is not None:
                    self._run(empty, None, self._now_ms(), unlimited=True)
                # Timers fire timers, and each round is an epoch. Code whose timer always sets the next one never ends.
                epochs_max = self._context.settings.checkpoint.drain_epochs_max
                for _ in range(epochs_max):
                    self._run(empty, None, self._now_ms(), drains=True)
                    faults.reach("drain-epoch")
                    if not fires_at(self._context.pipeline.operators, self._state.shards, END_OF_TIME_MS):
                        break
                else:
                    _LOG.warning(
                        "after %d epochs (drain_epochs_max) timers still set timers; the rest of them stays", epochs_max
                    )
            self._checkpoint_and_begin()

    def finish(self) -> None:
        """Make the last checkpoint of a run that ends well: pending changes become durable, and their output visible.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self.failure is None:
                self._checkpoint_and_begin()

    def _checkpoint_and_begin(self) -> None:
        if self._state.interval.epochs:
            with self._failing():
                self._line.checkpoint()
        self._begin_savepoints()

    def _begin_savepoints(self) -> None:
        """Begin savepoints of the newest snapshot, which is the state of the run. It cannot expire before it is pinned,
        because it is the newest."""
        if self._savepoints is not None and self._savepoints.begin(self._committer.last):
            self._stopping.set()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error as the run's failure, and remove the objects of epochs that no reader will ever see."""
        self._is_at_work = True
        try:
            yield
        except BaseException as error:
            self.failure = typed_error(error)
            if not self._line.checkpointer.is_committing and not isinstance(self.failure, Fenced):
                self._line.checkpointer.remove(self._line.engine.so_far(), self._state.interval)
            raise self.failure from cause_of(self.failure, error)
        finally:
            self._is_at_work = False

    # --- an epoch ------------------------------------------------------------------------------------------------

    def _now_ms(self, planned_ms: int | None = None) -> int:
        return self._time.now_ms(self._state.interval.head, planned_ms)

    def _is_due(self, now_ms: int) -> bool:
        head = self._state.interval.head
        if self._state.batch is not None:
            return True
        if head.time is None or head.source is None:
            return False
        time = advanced(self._context, head, now_ms)
        return is_anything_due(self._context.pipeline.operators, self._state.shards, head.time, time)

    def _run(
        self,
        frame: DataFrame,
        batch_id: int | None,
        time_ms: int,
        *,
        drains: bool = False,
        unlimited: bool = False,
    ) -> None:
        """Run one epoch, of a batch or (None) without one, which continues an open batch; then begin the requested
        savepoints, if it ended in a checkpoint for them."""
        request = EpochRequest(batch_id, time_ms, drains=drains, unlimited=unlimited or drains)
        if self._line.run(frame, request):
            self._begin_savepoints()

    def _is_savepoint_asked(self) -> bool:
        """Return whether a checkpoint of the head would belong to a requested savepoint."""
        is_open = self._state.batch is not None
        return self._savepoints is not None and self._savepoints.is_asked(batch_is_open=is_open)
