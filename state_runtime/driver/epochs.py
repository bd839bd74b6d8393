"""The epoch loop behind `foreachBatch`.

One call of `EpochDriver.run_batch` is one epoch; so is one of `run_without_batch`, when something is due and no row
comes:

1. plan       the batch's frame through all stages: hash → repartitionById → mapInArrow, user code in between
2. process    one Spark action; tasks restore, process, log and acknowledge
3. head       what the tasks acknowledged is added to what is pending (interval.py)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from state_runtime.base import faults
from state_runtime.base.errors import ChangesPending, CorruptData, Fenced
from state_runtime.base.heap import collection_paused
from state_runtime.base.progress import Progress
from state_runtime.changelog.upload import Uploader, UploadPolicy
from state_runtime.changelog.writer import TaskChanges, source_log_changes
from state_runtime.driver.acknowledgements import Gathering
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.context import DriverContext, Processed, Standing
from state_runtime.driver.epoch_plan import plan_epoch
from state_runtime.driver.file_book import FileBook
from state_runtime.driver.interval import Interval, first_head
from state_runtime.driver.numbers import of_epoch, with_times
from state_runtime.driver.savepoints import Savepoints
from state_runtime.driver.shard_book import Shards, ShardStep
from state_runtime.pipeline.compatibility import usable_versions
from state_runtime.pipeline.compile import Stage
from state_runtime.pipeline.sinks import staged_outputs
from state_runtime.pipeline.source_position import SparkCheckpoint, same_offsets
from state_runtime.pipeline.watermark import END_OF_TIME_MS, advance, observed
from state_runtime.placement.seats import Placement
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import ShardFilesEntry, TimeEntry
from state_runtime.spark.errors import cause_of, typed_error
from state_runtime.task.shard_access import TaskJob, local_folder, root_id
from state_runtime.task.stage import Acknowledgement, StageTask

__all__ = ["EpochDriver"]

_LOG = logging.getLogger(__name__)

# Timers that fire timers while a job is drained: each round is an epoch. Code that sets the next timer from the one
# that fires never ends.
_DRAIN_EPOCHS_MAX = 100


class EpochDriver:
    """Runs epochs of one run, one at a time.

    Life cycle: made after the fencing snapshot → `publish_pending` once → (`run_batch` | `run_without_batch` |
        `checkpoint_if_due` |
    `savepoint_if_asked`)* → `stop` → (`drain`) → `finish` → `close`. After an error it refuses further epochs; the
    error is kept in `failure`.

    Attributes:
        lock: held during an epoch: whoever stops the query takes it, so that no epoch is cut in the middle.
        progress: numbers of the newest epoch.
    """

    def __init__(
        self,
        context: DriverContext,
        committer: Committer,
        checkpoint: SparkCheckpoint,
        spark: SparkSession,
        on_progress: Callable[[Progress], None] | None,
        savepoints: Savepoints | None = None,
    ) -> None:
        self._context = context
        self._committer = committer
        self._checkpoint = checkpoint
        self._spark = spark
        self._on_progress = on_progress
        self._gathering = Gathering(spark.sparkContext)
        self._uploader = Uploader(UploadPolicy.of(context.settings), context.clock)
        self._stopping = threading.Event()
        self._acting = ""  # the attempt at an epoch whose action runs
        self._standing = self._first_standing()
        self._checkpointer = Checkpointer(context, committer, self._standing, self._uploader)
        self._savepoints = savepoints
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self.epochs = 0
        self.progress: Progress | None = None
        self._placement = self._place()

    def restoring(self) -> tuple[int, int]:
        """While the first epoch with shards of an earlier run is under way: shards that are done, and all. Else (0, 0).

        For the heartbeat, from its thread: Spark delivers acknowledgements one by one as tasks end.
        """
        acting, shards = self._acting, self._standing.shards
        if not acting or self.epochs > 0:
            return 0, 0
        done = sum(a.epoch == acting for a in self._gathering.so_far())
        return min(done, total := sum(map(len, shards.trusted.values()))), total

    # --- what the run calls --------------------------------------------------------------------------------------

    def publish_pending(self, spark: SparkSession) -> None:
        """Publish what the newest snapshot names; see `Checkpointer.publish_pending`."""
        self._checkpointer.publish_pending(spark)

    @property
    def is_ending(self) -> bool:
        """Whether a savepoint was asked for after which the job is to stop, and nothing but that is left to do."""
        return self._stopping.is_set() or (self._savepoints is not None and self._savepoints.is_drain_asked)

    def stop(self) -> None:
        """Let no further epoch of a batch begin. Call it with the lock held."""
        self._stopping.set()

    def close(self, fold_timeout_s: float) -> None:
        """After `stop`: wait so long for a fold, then end it, and give up what the run holds of Spark."""
        self._checkpointer.close(fold_timeout_s)
        self._placement.close()

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """One epoch; the function that Spark calls.

        Raises:
            StillstateError: typed, also for errors of tasks; Spark's query ends with it.
        """
        with self.lock:
            if self._stopping.is_set() or self.failure is not None:
                # Returning without work is safe: Spark's own commit log is scratch, the manifest is the truth.
                return
            with self._failing():
                if not self._already_run(batch_id):
                    self._run_epoch(frame, batch_id, self._checkpoint.clock(batch_id).batch_time_ms)

    def is_due(self) -> bool:
        """Whether an epoch without a batch has something to do: processing time has reached a timer, or the watermark
        moved."""
        with self.lock:
            return self._is_due(self._context.clock.now_ms())

    def run_without_batch(self, empty: DataFrame) -> None:
        """One epoch that Spark does not start; nothing happens if nothing is due any more.

        As Spark's own batches without data: for event time one whenever the watermark moved, for processing time when a
        timer is due. If no shard has anything to do, the epoch is a new clock, and no Spark job runs.

        Args:
            empty: a frame of the source's columns without rows.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            now_ms = self._context.clock.now_ms()
            if self._stopping.is_set() or self.failure is not None or not self._is_due(now_ms):
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
                self._report(self._checkpointer.commit_alone(self._spark))

    def savepoint_if_asked(self) -> None:
        """Begin the savepoints that were asked for, after a checkpoint if anything is pending: between two epochs, for
        an idle source.

        Raises:
            StillstateError: see `run_batch`; of the checkpoint, never of a savepoint.
        """
        if self._savepoints is None or not self._savepoints.is_asked:
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
                for _ in range(_DRAIN_EPOCHS_MAX):
                    self._run_epoch(empty, None, self._context.clock.now_ms(), drains=True)
                    faults.reach("drain-epoch")
                    if not self._fires_at_the_end():
                        break
                else:
                    _LOG.warning("after %d epochs timers still set timers; the rest of them stays", _DRAIN_EPOCHS_MAX)
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
        if self._standing.interval.epochs:
            with self._failing():
                self._report(self._checkpointer.commit_alone(self._spark))
        self._begin_savepoints()

    def _begin_savepoints(self) -> None:
        """Of the newest snapshot, which is what the run stands at. It cannot be given up before it is pinned: it is the
        newest."""
        if self._savepoints is not None and self._savepoints.begin(self._committer.last):
            self._stopping.set()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error as the run's failure, and take back what the run leaves of epochs that nobody will ever see."""
        try:
            yield
        except BaseException as error:
            self.failure = typed_error(error)
            if not self._checkpointer.is_committing and not isinstance(self.failure, Fenced):
                self._checkpointer.remove(self._gathering.so_far(), self._standing.interval)
            raise self.failure from cause_of(self.failure, error)

    # --- what is due ---------------------------------------------------------------------------------------------

    def _is_due(self, now_ms: int) -> bool:
        head = self._standing.interval.head
        if head.time is None or head.source is None:
            return False
        time = self._advanced(now_ms)
        operators = self._context.pipeline.operators
        if any(o.time_domain == "event" for o in operators) and time.watermark_ms > head.time.watermark_ms:
            return True
        return any(self._due_shards(o, time) for o in operators if o.time_domain == "processing")

    def _advanced(self, batch_time_ms: int) -> TimeEntry:
        context = self._context
        return advance(
            self._standing.interval.head.time, batch_time_ms, context.pipeline.watermarks, context.watermark_policy
        )

    def _due_shards(self, operator: Operator, time: TimeEntry) -> list[int]:
        """The shards that something is due in."""
        now_ms = {"": None, "processing": time.batch_time_ms, "event": time.watermark_ms}[operator.time_domain]
        return [] if now_ms is None else self._standing.shards.due(operator.uid, now_ms)

    def _fires_at_the_end(self) -> bool:
        """Whether an event-time timer or window is left that the end of all input fires."""
        shards = self._standing.shards
        events = [o.uid for o in self._context.pipeline.operators if o.time_domain == "event"]
        return any(shards.due(uid, END_OF_TIME_MS) for uid in events)

    def _woken(self, time: TimeEntry) -> dict[str, list[int]]:
        """Per operator uid the shards that the epoch visits although no row may come."""
        return {
            o.uid: sorted({*self._due_shards(o, time), *self._standing.shards.unvisited.get(o.uid, ())})
            for o in self._context.pipeline.operators
        }

    # --- an epoch ------------------------------------------------------------------------------------------------

    def _run_epoch(self, frame: DataFrame, batch_id: int | None, batch_time_ms: int, *, drains: bool = False) -> None:
        """One epoch, of a batch or (None) without one; and what is due after it: a checkpoint, a flush, or nothing.

        Args:
            drains: it is one after the end of all input.
        """
        with collection_paused():
            done = self._process(frame, batch_id is not None, batch_time_ms, drains=drains)
            faults.reach("action-done")
            numbers = replace(self._take(done, batch_id, drains=drains), segment_bytes=done.flushed_bytes)
            self.epochs += 1
            is_asked = self._savepoints is not None and self._savepoints.is_asked
            committed = None
            if self._checkpointer.is_due() or is_asked:
                committed = self._checkpointer.commit(numbers, done, frame.sparkSession)
        if committed is not None:
            self._report(committed)
            if is_asked:
                self._begin_savepoints()
            return
        segment_bytes, flushed_ms = 0, done.flushed_ms
        if (
            self._standing.interval.holds_more_than(self._context.settings.pending_bytes_max)
            or self._standing.shards.any_stranded
        ):
            begun_s = self._context.clock.monotonic_s()
            segment_bytes = self._checkpointer.flush()
            flushed_ms += (self._context.clock.monotonic_s() - begun_s) * 1000
            faults.reach("pending-flushed")
        ended_s = self._context.clock.monotonic_s()
        numbers = with_times(
            replace(
                numbers,
                segment_bytes=numbers.segment_bytes + segment_bytes,
                upload_attempts=numbers.upload_attempts + self._uploader.take().attempts,
            ),
            (ended_s - done.started_s) * 1000,
            {**done.phases, "segment": flushed_ms},
        )
        self._standing.interval = self._standing.interval.counted(numbers)
        faults.reach("epoch-pending")
        self._report(replace(numbers, epochs=self._standing.interval.epochs))

    def _process(self, frame: DataFrame, has_batch: bool, batch_time_ms: int, *, drains: bool) -> Processed:
        """Plan and run the epoch's Spark action; none where there is neither a batch nor anything due.

        If a task needs from the primary what only the driver holds, that is written and the action run once more.
        """
        context = self._context
        started_s = context.clock.monotonic_s()
        time = self._advanced(batch_time_ms)
        # The end of all input is not noted as the watermark: a run that goes on from here nevertheless has the one of
        # its input.
        acting = replace(time, watermark_ms=END_OF_TIME_MS) if drains else time
        wake = self._woken(acting)
        stored = {o.uid for o in self._standing.interval.head.operators}
        beginning = frozenset(
            s.operator.uid for s in context.pipeline.stages if s.operator and s.initial and s.operator.uid not in stored
        )
        job = self._task_job(acting)
        clock = replace(job.clock, watermark_ms=time.watermark_ms)
        if not (has_batch or beginning or any(wake.values())):
            now_s = context.clock.monotonic_s()
            return Processed([], time, clock, started_s, now_s, now_s)
        flushed_ms, flushed_bytes = 0.0, 0
        try:
            acknowledged, event_times, planned_s = self._act(frame, job, wake, beginning)
        except Exception as error:
            if not isinstance(typed_error(error), ChangesPending):
                raise
            # What its tasks wrote will not be used: the action begins anew.
            self._checkpointer.remove(self._gathering.so_far())
            _LOG.info("epoch %d needs changes that were not written yet: %s", job.clock.epoch, typed_error(error))
            begun_s = context.clock.monotonic_s()
            flushed_bytes = self._checkpointer.flush()
            flushed_ms = (context.clock.monotonic_s() - begun_s) * 1000
            faults.reach("pending-flushed")
            job = self._task_job(acting)
            acknowledged, event_times, planned_s = self._act(frame, job, wake, beginning)
        return Processed(
            acknowledged,
            observed(time, event_times),
            clock,
            started_s,
            planned_s,
            context.clock.monotonic_s(),
            flushed_ms,
            flushed_bytes,
        )

    def _act(
        self, frame: DataFrame, job: TaskJob, wake: Mapping[str, Sequence[int]], beginning: frozenset[str]
    ) -> tuple[list[Acknowledgement], Mapping[str, int | None], float]:
        """One Spark action; the acknowledgements, the event times seen, and when (monotonic) the plan was ready."""
        plan = plan_epoch(
            frame,
            self._context.pipeline,
            job.parallelism,
            task=lambda stage, number: self._stage_task(stage, number, job),
            wake=wake,
            beginning=beginning,
            seats=self._placement.for_epoch(),
        )
        planned_s = self._context.clock.monotonic_s()
        self._gathering.clear()
        self._acting = job.epoch
        try:
            plan.final.collect()
        finally:
            self._acting = ""
        acknowledged = self._gathering.take(job.epoch, job.parallelism, self._context.pipeline.stages)
        return acknowledged, plan.event_time_ms(), planned_s

    def _take(self, done: Processed, batch_id: int | None, *, drains: bool) -> Progress:
        """Make what an epoch did the new head; its numbers as far as they are known."""
        context, interval = self._context, self._standing.interval
        position = interval.head.source
        changes: list[TaskChanges] = [a.changes for a in done.acknowledged]
        if batch_id is not None:
            position = self._checkpoint.position(batch_id)
            for source, lines in self._checkpoint.new_log_lines(interval.head.source, position).items():
                changes.append(source_log_changes(source, lines))
        stages = context.pipeline.stages
        self._standing.shards = self._standing.shards.after(
            ShardStep(operator.uid, a.shard, a.version, a.next_due_ms, a.is_pending)
            for a in done.acknowledged
            if (operator := stages[a.stage].operator) is not None
        )
        if self._standing.files is not None:
            self._standing.files = self._standing.files.after(a.files for a in done.acknowledged)
        head = replace(
            interval.head,
            epoch=done.clock.epoch,
            parallelism=context.parallelism,
            operators=tuple(
                replace(e, next_due_ms=self._standing.shards.earliest_due_ms(e.uid)) for e in context.entries
            ),
            time=done.time,
            source=position,
            drained=drains,
        )  # fmt: skip
        staged = [s for a in done.acknowledged for s in a.staged]
        outputs = staged_outputs(staged, list(context.sinks.values()), done.clock.epoch)
        before = interval.numbers or self._committer.last.progress
        self._standing.interval = interval.with_epoch(head, changes, outputs)
        moved = self._placement.ran(
            (operator.uid, a.shard, a.executor)
            for a in done.acknowledged
            if (operator := stages[a.stage].operator) is not None
        )
        _log_restores(done.acknowledged, [stage.operator for stage in stages])
        numbers = of_epoch(
            done.acknowledged,
            snapshot_id=self._committer.last.snapshot_id + 1,
            batch_id=position.batch_id if position else -1,
            clock=done.clock,
            state_rows_before=before.state_rows if before is not None else 0,
        )
        return replace(numbers, moved_shards=moved)

    def _report(self, progress: Progress) -> None:
        self.progress = progress
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            # The epoch is done; whoever watches it must not be able to end the job.
            _LOG.exception("the progress callback failed for epoch %d", progress.epoch)

    # --- what tasks get and give ---------------------------------------------------------------------------------

    def _already_run(self, batch_id: int) -> bool:
        """Whether Spark repeats a batch that the head holds.

        Raises:
            CorruptData: it is another batch of that number: Spark's position does not belong to the head.
        """
        known = self._standing.interval.head.source
        if known is None or batch_id > known.batch_id:
            return False
        repeated = self._checkpoint.position(batch_id)
        if batch_id == known.batch_id and same_offsets(repeated.offsets, known.offsets):
            _LOG.info("batch %d is in epoch %d already; not run again", batch_id, self._standing.interval.head.epoch)
            return True
        raise CorruptData(
            f"Spark runs batch {batch_id}, but epoch {self._standing.interval.head.epoch} already holds batch "
            f"{known.batch_id} with other offsets. Spark's checkpoint directory was changed; start the job again, "
            "which makes a fresh one"
        )

    def _task_job(self, time: TimeEntry) -> TaskJob:
        context, last, head = self._context, self._committer.last, self._standing.interval.head
        late_ms = head.time.watermark_ms if head.time is not None else 0
        return TaskJob(
            name=context.job_name,
            uid=self._committer.info.uid,
            store_url=context.store_url,
            storage_options=context.storage_options,
            local_dir=context.local_dir,
            term=self._committer.term.term,
            epoch=context.ids.uid(),
            snapshot_id=last.snapshot_id + 1,
            base_snapshot_id=last.snapshot_id,
            parallelism=context.parallelism,
            clock=EpochClock(time.batch_time_ms, time.watermark_ms, late_ms, head.epoch + 1),
            settings=context.settings,
            pending=self._standing.interval.segments,
            shards=self._flushed_files(),
            has_pending=self._standing.shards.any_pending,
            root_id=root_id(context.root.url),
            base_commit_id=last.commit_id,
        )

    def _flushed_files(self) -> ShardFilesEntry | None:
        """The listing that no manifest names yet, if it was written between two checkpoints."""
        entry = self._standing.files.entry if self._standing.files is not None else None
        return entry if entry != self._committer.last.shards else None

    def _stage_task(self, stage: Stage, number: int, job: TaskJob) -> StageTask:
        uid = stage.operator.uid if stage.operator is not None else ""
        shards = self._standing.shards
        return StageTask(
            job=job,
            stage=number,
            operator=stage.operator,
            entry=next((e for e in self._context.entries if e.uid == uid), None),
            sinks=tuple(self._context.sinks[name] for name in stage.sinks),
            versions=shards.versions.get(uid, ""),
            trusted=shards.trusted.get(uid, ""),
            emit=stage.emit,
            accumulator=self._gathering.accumulator,
            committed=shards.committed.get(uid, ""),
            pending=shards.pending.get(uid, ""),
            listed=self._standing.files.of_tasks(uid) if self._standing.files is not None else {},
        )

    def _place(self) -> Placement:
        context, last = self._context, self._committer.last
        job = self._task_job(TimeEntry(0))

        def wanted() -> tuple[int, Mapping[str, str]]:
            # Before the first epoch the copies are those of the run before, which may have had another parallelism.
            if self.epochs == 0:
                return last.parallelism, last.versions
            return context.parallelism, self._standing.shards.versions

        return Placement(
            self._spark,
            context.parallelism,
            enabled=context.settings.placement == "sticky",
            state_folder=partial(local_folder, job, "state"),
            wanted=wanted,
        )

    def _first_standing(self) -> Standing:
        context, last, parallelism = self._context, self._committer.last, self._context.parallelism
        # Local copies have the columns of the run that wrote them; where those changed, the primary brings them to the
        # new ones.
        serving = usable_versions(last, context.entries) if last.parallelism == parallelism else {}
        uids = [o.uid for o in context.pipeline.operators]
        shards = Shards.at_start(parallelism, serving, {o.uid: o.next_due_ms for o in last.operators}, uids)
        files: FileBook | None = None
        if context.settings.changelog == "off":
            files = FileBook.begin(context.root, last, parallelism, uids)
            if not files.complete:
                # The first checkpoint has all of the state as files, whatever it was before.
                every = frozenset(range(parallelism))
                stored = {o.uid for o in last.operators} & set(uids)
                shards = shards.visiting(dict.fromkeys(stored, every))
        return Standing(Interval(first_head(last), context.clock.monotonic_s()), shards, files)


def _log_restores(acknowledged: Sequence[Acknowledgement], operators: Sequence[Operator | None]) -> None:
    """A line per shard that had to be restored; their sums are in the progress."""
    for a in acknowledged:
        operator = operators[a.stage]
        if operator is not None and a.restored:
            _LOG.info(
                "operator %s, shard %d: restored from %s in %.0f ms, %d bytes of it from the primary store, on "
                "executor %s",
                operator.uid,
                a.shard,
                a.restored,
                a.restore_ms,
                a.restored_bytes,
                a.executor or "of the driver",
            )
