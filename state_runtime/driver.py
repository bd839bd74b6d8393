"""The epoch loop behind `foreachBatch`.

One call of `EpochDriver.run_batch` is one epoch; so is one of `run_without_batch`, when something is due and no row comes:

1. plan       the batch's frame through all stages: hash → repartitionById → mapInArrow, user code in between
2. process    one Spark action; tasks restore, process, log and acknowledge
3. head       what the tasks acknowledged is added to what is pending (interval.py)

By default each epoch ends in a checkpoint; with a checkpoint interval, some do, and none is needed for one to be made:

4. segment    the pending changes, folded and packed into one object
5. manifest   create-if-absent of the next snapshot: from here on the epochs have happened
6. publish    sinks give staged output its final name

Then Spark writes its commit log, which is scratch.

A crash between any two steps is repaired by the next run: before 5 the epochs are run again from the previous snapshot, after
it the next run publishes what the manifest names and resumes behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from state_runtime import faults
from state_runtime.changelog.folding import fold_changes
from state_runtime.changelog.upload import Uploader, UploadPolicy
from state_runtime.changelog.writer import TaskChanges, source_log_changes, write_segment
from state_runtime.clock import Clock
from state_runtime.compatibility import usable_versions
from state_runtime.epoch_plan import plan_epoch
from state_runtime.errors import ChangesPending, CorruptData, Fenced, InvalidPipeline, StillstateError
from state_runtime.file_book import FileBook, carried_source_logs
from state_runtime.gathering import Gathering, typed_error
from state_runtime.ids import Ids
from state_runtime.interval import Interval, first_head, is_checkpoint_due, objects_of
from state_runtime.materialize import BackgroundMaterializer
from state_runtime.pipeline import CompiledPipeline, Stage
from state_runtime.placement import Placement
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.progress import Progress
from state_runtime.settings import JobSettings
from state_runtime.shard_access import TaskJob, local_folder
from state_runtime.shards import Shards, ShardStep
from state_runtime.sinks import SinkSpec, staged_outputs
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import (
    LayerEntry,
    OperatorEntry,
    SegmentEntry,
    ShardFilesEntry,
    StagedOutput,
    TimeEntry,
)
from state_runtime.snapshot.shard_files import bottom_is_of_shape
from state_runtime.source import SparkCheckpoint, same_offsets
from state_runtime.store import Store
from state_runtime.tally import checkpoint_ms, of_epoch, together, with_times
from state_runtime.task import Acknowledgement, StageTask
from state_runtime.watermark import Policy, advance, observed

__all__ = ["EpochDriver", "typed_error"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverContext:
    """What an `EpochDriver` works on; see the classes for what each part promises."""

    job_name: str
    store_url: str
    storage_options: Mapping[str, Any]
    root: Store
    local_dir: str
    settings: JobSettings
    parallelism: int
    pipeline: CompiledPipeline
    sinks: Mapping[str, SinkSpec]
    entries: tuple[OperatorEntry, ...]
    watermark_policy: Policy
    clock: Clock
    ids: Ids

    def __repr__(self) -> str:
        return f"DriverContext({self.job_name!r})"


@dataclass(frozen=True)
class _Processed:
    """An epoch's action, done.

    Attributes:
        time: the epoch's clock, with the event times that were seen.
        planned_s, processed_s: when (monotonic) the plan was ready, and when the action was done.
        flushed_ms, flushed_bytes: of a segment that had to be written before the action could succeed; between the two plans.
    """

    acknowledged: list[Acknowledgement]
    time: TimeEntry
    clock: EpochClock
    started_s: float
    planned_s: float
    processed_s: float
    flushed_ms: float = 0.0
    flushed_bytes: int = 0


class EpochDriver:
    """Runs epochs of one run, one at a time.

    Life cycle: made after the fencing snapshot → `publish_pending` once → (`run_batch` | `run_without_batch` |
    `checkpoint_if_due`)* → `stop` → `finish`. After an error it refuses further epochs; the error is kept in `failure`.

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
    ) -> None:
        self._context = context
        self._committer = committer
        self._checkpoint = checkpoint
        self._spark = spark
        self._on_progress = on_progress
        self._gathering = Gathering(spark.sparkContext)
        self._uploader = Uploader(UploadPolicy.of(context.settings), context.clock)
        self._materializer = BackgroundMaterializer(context.root, context.settings, context.ids, context.clock)
        self._stopping = threading.Event()
        self._acting = ""  # the attempt at an epoch whose action runs
        self._shards = self._first_shards()
        self._files: FileBook | None = None
        if context.settings.changelog == "off":
            uids = [o.uid for o in context.pipeline.operators]
            self._files = FileBook.begin(context.root, committer.last, context.parallelism, uids)
            if not self._files.complete:
                # The first checkpoint has all of the state as files, whatever it was before.
                every = frozenset(range(context.parallelism))
                stored = {o.uid for o in committer.last.operators} & set(uids)
                self._shards = self._shards.visiting(dict.fromkeys(stored, every))
        self._interval = Interval(first_head(committer.last), context.clock.monotonic_s())
        self._committing = False
        # Complete numbers of the newest checkpoint of this run; its manifest has them without the end.
        self._previous: Progress | None = None
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self.epochs = 0
        self.progress: Progress | None = None
        self._placement = self._place()

    def restoring(self) -> tuple[int, int]:
        """While the first epoch with shards of an earlier run is under way: shards that are done, and all. Else (0, 0).

        For the heartbeat, from its thread: Spark delivers acknowledgements one by one as tasks end.
        """
        acting, shards = self._acting, self._shards
        if not acting or self.epochs > 0:
            return 0, 0
        done = sum(a.epoch == acting for a in self._gathering.so_far())
        return min(done, total := sum(map(len, shards.trusted.values()))), total

    # --- what the run calls --------------------------------------------------------------------------------------

    def publish_pending(self, spark: SparkSession) -> None:
        """Publish what the newest snapshot names; idempotent. The first thing that a run does after fencing.

        Then what fenced runs staged and never committed is removed: no manifest can name it any more.
        """
        last = self._committer.last
        for output in last.outputs:
            self._publish(output, spark)
        for name, spec in self._context.sinks.items():
            named = {f.staged for output in last.outputs if output.sink == name for f in output.files}
            spec.remove_abandoned(self._committer.term.term, named)
        if self._files is None:
            self._materializer.look(last)

    def stop(self, timeout_s: float) -> None:
        """Let no further epoch begin. Call it with the lock held."""
        self._stopping.set()
        self._materializer.join(timeout_s)
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
        """Whether an epoch without a batch has something to do: processing time has reached a timer, or the watermark moved."""
        with self.lock:
            return self._is_due(self._context.clock.now_ms())

    def run_without_batch(self, empty: DataFrame) -> None:
        """One epoch that Spark does not start; nothing happens if nothing is due any more.

        As Spark's own batches without data: for event time one whenever the watermark moved, for processing time when a timer is
        due. If no shard has anything to do, the epoch is a new clock, and no Spark job runs.

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
            if self._stopping.is_set() or self.failure is not None or not self._is_checkpoint_due():
                return
            with self._failing():
                self._checkpoint_alone()

    def finish(self) -> None:
        """The last checkpoint of a run that ends well: what is pending becomes durable, and its output visible.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            if self.failure is None and self._interval.epochs:
                with self._failing():
                    self._checkpoint_alone()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error as the run's failure, and take back what the run leaves of epochs that nobody will ever see."""
        try:
            yield
        except BaseException as error:
            self.failure = typed_error(error)
            if not self._committing and not isinstance(self.failure, Fenced):
                self._remove(self._gathering.so_far(), self._interval)
            raise self.failure from error

    def _remove(self, acknowledged: Sequence[Acknowledgement], interval: Interval | None = None) -> None:
        """Remove output and changelog objects that no manifest names or ever will, as far as the stores answer.

        So a job that fails again and again does not fill its store. Of a killed driver they stay: its staged output is removed by
        the next run, the rest is for garbage collection.
        """
        context = self._context
        staged = [(s.sink, f.staged) for a in acknowledged for s in a.staged for f in s.files]
        objects = objects_of([a.changes for a in acknowledged])
        if interval is not None:
            staged += [(o.sink, f.staged) for o in interval.outputs for f in o.files]
            objects += [*interval.uploaded, *(s.path for s in interval.segments)]
        try:
            for sink, path in staged:
                context.sinks[sink].store().delete(path)
            for path in objects:
                context.root.delete(path)
        except (StillstateError, OSError):
            # They are unreachable and do no harm; the error that brought us here is the one to tell.
            _LOG.warning("what a failed epoch wrote could not be removed", exc_info=True)

    # --- what is due ---------------------------------------------------------------------------------------------

    def _is_due(self, now_ms: int) -> bool:
        head = self._interval.head
        if head.time is None or head.source is None:
            return False
        time = self._advanced(now_ms)
        operators = self._context.pipeline.operators
        if any(o.time_domain == "event" for o in operators) and time.watermark_ms > head.time.watermark_ms:
            return True
        return any(self._due_shards(o, time) for o in operators if o.time_domain == "processing")

    def _advanced(self, batch_time_ms: int) -> TimeEntry:
        context = self._context
        return advance(self._interval.head.time, batch_time_ms, context.pipeline.watermarks, context.watermark_policy)

    def _due_shards(self, operator: Operator, time: TimeEntry) -> list[int]:
        """The shards that something is due in."""
        now_ms = {"": None, "processing": time.batch_time_ms, "event": time.watermark_ms}[operator.time_domain]
        return [] if now_ms is None else self._shards.due(operator.uid, now_ms)

    def _woken(self, time: TimeEntry) -> dict[str, list[int]]:
        """Per operator uid the shards that the epoch visits although no row may come."""
        return {
            o.uid: sorted({*self._due_shards(o, time), *self._shards.unvisited.get(o.uid, ())})
            for o in self._context.pipeline.operators
        }

    def _is_checkpoint_due(self) -> bool:
        return is_checkpoint_due(self._interval, self._context.settings, self._context.clock.monotonic_s())

    # --- an epoch ------------------------------------------------------------------------------------------------

    def _run_epoch(self, frame: DataFrame, batch_id: int | None, batch_time_ms: int) -> None:
        """One epoch, of a batch or (None) without one; and what is due after it: a checkpoint, a flush, or nothing."""
        done = self._process(frame, batch_id is not None, batch_time_ms)
        faults.reach("action-done")
        numbers = replace(self._take(done, batch_id), segment_bytes=done.flushed_bytes)
        self.epochs += 1
        if self._is_checkpoint_due():
            self._report(self._commit(numbers, done, frame.sparkSession))
            return
        segment_bytes, flushed_ms = 0, done.flushed_ms
        if self._interval.holds_more_than(self._context.settings.pending_bytes_max) or self._shards.any_stranded:
            begun_s = self._context.clock.monotonic_s()
            segment_bytes = self._flush()
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
            {**_phases(done), "segment": flushed_ms},
        )
        self._interval = self._interval.counted(numbers)
        faults.reach("epoch-pending")
        self._report(replace(numbers, epochs=self._interval.epochs))

    def _process(self, frame: DataFrame, has_batch: bool, batch_time_ms: int) -> _Processed:
        """Plan and run the epoch's Spark action; none where there is neither a batch nor anything due.

        If a task needs from the primary what only the driver holds, that is written and the action run once more.
        """
        context = self._context
        started_s = context.clock.monotonic_s()
        time = self._advanced(batch_time_ms)
        wake = self._woken(time)
        stored = {o.uid for o in self._interval.head.operators}
        beginning = frozenset(
            s.operator.uid for s in context.pipeline.stages if s.operator and s.initial and s.operator.uid not in stored
        )
        job = self._task_job(time)
        if not (has_batch or beginning or any(wake.values())):
            now_s = context.clock.monotonic_s()
            return _Processed([], time, job.clock, started_s, now_s, now_s)
        flushed_ms, flushed_bytes = 0.0, 0
        try:
            acknowledged, event_times, planned_s = self._act(frame, job, wake, beginning)
        except Exception as error:
            if not isinstance(typed_error(error), ChangesPending):
                raise
            # What its tasks wrote will not be used: the action begins anew.
            self._remove(self._gathering.so_far())
            _LOG.info("epoch %d needs changes that were not written yet: %s", job.clock.epoch, typed_error(error))
            begun_s = context.clock.monotonic_s()
            flushed_bytes = self._flush()
            flushed_ms = (context.clock.monotonic_s() - begun_s) * 1000
            faults.reach("pending-flushed")
            job = self._task_job(time)
            acknowledged, event_times, planned_s = self._act(frame, job, wake, beginning)
        return _Processed(
            acknowledged,
            observed(time, event_times),
            job.clock,
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

    def _take(self, done: _Processed, batch_id: int | None) -> Progress:
        """Make what an epoch did the new head; its numbers as far as they are known."""
        context, interval = self._context, self._interval
        position = interval.head.source
        changes: list[TaskChanges] = [a.changes for a in done.acknowledged]
        if batch_id is not None:
            position = self._checkpoint.position(batch_id)
            for source, lines in self._checkpoint.new_log_lines(interval.head.source, position).items():
                changes.append(source_log_changes(source, lines))
        stages = context.pipeline.stages
        self._shards = self._shards.after(
            ShardStep(operator.uid, a.shard, a.version, a.next_due_ms, a.is_pending)
            for a in done.acknowledged
            if (operator := stages[a.stage].operator) is not None
        )
        if self._files is not None:
            self._files = self._files.after(a.files for a in done.acknowledged)
        head = replace(
            interval.head,
            epoch=done.clock.epoch,
            parallelism=context.parallelism,
            operators=tuple(
                replace(e, next_due_ms=self._shards.earliest_due_ms(e.uid)) for e in context.entries
            ),
            time=done.time,
            source=position,
        )  # fmt: skip
        staged = [s for a in done.acknowledged for s in a.staged]
        outputs = staged_outputs(staged, list(context.sinks.values()), done.clock.epoch)
        before = interval.numbers or self._committer.last.progress
        self._interval = interval.with_epoch(head, changes, outputs)
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

    # --- a checkpoint --------------------------------------------------------------------------------------------

    def _flush(self) -> int:
        """Write the changes in memory as one segment, folded; the bytes that it took.

        Raises:
            StoreUnavailable, OutcomeUnknown: the run ends; nobody can reach what was written.
        """
        segment = write_segment(
            self._context.root,
            fold_changes(self._interval.changes, self._context.settings.compression),
            job_uid=self._committer.info.uid,
            term=self._committer.term.term,
            snapshot_id=self._committer.last.snapshot_id + 1,
            ids=self._context.ids,
            uploader=self._uploader,
        )
        self._interval = self._interval.flushed(segment)
        if self._files is not None:
            self._files = self._files.written(
                self._context.root,
                term=self._committer.term.term,
                snapshot_id=self._committer.last.snapshot_id + 1,
                ids=self._context.ids,
            )
        self._shards = self._shards.flushed()
        return segment.total_bytes if segment is not None else 0

    def _checkpoint_alone(self) -> None:
        """A checkpoint that no epoch has just ended in; reported with the numbers of an epoch that did nothing else."""
        interval, now_s = self._interval, self._context.clock.monotonic_s()
        head = interval.head
        alone = _Processed([], head.time or TimeEntry(0), EpochClock(0, epoch=head.epoch), now_s, now_s, now_s)
        latest = interval.numbers or Progress()
        nothing = Progress(
            snapshot_id=latest.snapshot_id,
            batch_id=latest.batch_id,
            timestamp_ms=latest.timestamp_ms,
            state_rows=latest.state_rows,
            watermark_ms=latest.watermark_ms,
            epoch=head.epoch,
            epochs=0,
        )
        self._report(self._commit(nothing, alone, self._spark))

    def _commit(self, numbers: Progress, done: _Processed, spark: SparkSession) -> Progress:
        """Make everything since the newest manifest durable, then publish its output.

        Args:
            numbers: of the epoch that ends here; those before it are in the interval.

        Returns:
            The same, complete.
        """
        context, last = self._context, self._committer.last
        segment_bytes = self._flush()
        segment_s = context.clock.monotonic_s()
        faults.reach("segment-written")

        interval = self._interval
        layers, segments, files = self._below()
        draft = replace(
            interval.head,
            kind="checkpoint",
            layers=layers,
            shards=files,
            segments=segments,
            outputs=interval.outputs,
            versions=dict(self._shards.versions),
            previous=self._previous,
        )
        numbers = replace(
            numbers,
            segment_bytes=numbers.segment_bytes + segment_bytes,
            upload_attempts=numbers.upload_attempts + self._uploader.take().attempts,
            log_bytes=draft.log_bytes,
            log_segments=len(draft.segments),
            table_bytes=draft.total_bytes - draft.log_bytes,
            materializations=self._materializer.completed,
            materialization_failures=self._materializer.failures_in_a_row,
        )
        phases = _phases(done)
        phases["segment"] = (segment_s - done.processed_s) * 1000 + done.flushed_ms
        so_far = self._timed(numbers, done, phases)
        faults.reach("before-manifest")
        # A commit that fails may have happened.
        self._committing = True
        committed = self._committer.commit(replace(draft, progress=together(interval.numbers, so_far)))
        manifest_s = context.clock.monotonic_s()
        numbers = self._timed(numbers, done, phases)
        faults.reach("manifest-written")

        self._shards = self._shards.checkpointed()
        self._interval = Interval(first_head(committed), manifest_s)
        self._committing = False
        if self._files is not None:
            self._files = self._files.checkpointed()
        self._materializer.settled(committed)
        faults.reach("before-publish")
        for output in interval.outputs:
            self._publish(output, spark)
            faults.reach("one-output-published")
        for output in last.outputs:
            context.pipeline.sinks[output.sink].settle(context.sinks[output.sink], output)
        published_s = context.clock.monotonic_s()
        faults.reach("published")
        if self._files is None:
            self._materializer.start_if_due(committed)
        phases |= {"manifest": (manifest_s - segment_s) * 1000, "publish": (published_s - manifest_s) * 1000}
        complete = with_times(numbers, (published_s - done.started_s) * 1000, phases)
        self._previous = together(interval.numbers, complete)
        return replace(complete, epochs=self._previous.epochs)

    def _below(self) -> tuple[tuple[LayerEntry, ...], tuple[SegmentEntry, ...], ShardFilesEntry | None]:
        """What the next manifest names of the state: layers, segments, files of shards."""
        last, pending = self._committer.last, self._interval.segments
        if self._files is None:
            base = self._materializer.take(last)
            return base.layers, (*base.segments, *pending), base.shards
        in_shape = bottom_is_of_shape(last, self._context.parallelism)
        root, ids = self._context.root, self._context.ids
        return (*carried_source_logs(root, last, pending, in_shape=in_shape, ids=ids), self._files.entry)

    def _timed(self, numbers: Progress, done: _Processed, phases: Mapping[str, float]) -> Progress:
        """The numbers of an epoch with its times, if its checkpoint became durable now."""
        clock = self._context.clock
        durable_s = clock.monotonic_s()
        took_ms = checkpoint_ms(
            max((a.processed_at_ms for a in done.acknowledged), default=0),
            clock.now_ms(),
            own_ms=(durable_s - done.processed_s) * 1000,
            epoch_ms=(durable_s - done.started_s) * 1000,
        )
        return replace(with_times(numbers, (durable_s - done.started_s) * 1000, phases), checkpoint_ms=took_ms)

    def _publish(self, output: StagedOutput, spark: SparkSession) -> None:
        sink = self._context.pipeline.sinks.get(output.sink)
        if sink is None:
            raise InvalidPipeline(
                f"the newest snapshot has unpublished output of sink {output.sink!r}, which the pipeline no longer has. Start "
                "the job once with that sink, so that its output is published, then remove it"
            )
        sink.publish(self._context.sinks[output.sink], output, spark)

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
        known = self._interval.head.source
        if known is None or batch_id > known.batch_id:
            return False
        repeated = self._checkpoint.position(batch_id)
        if batch_id == known.batch_id and same_offsets(repeated.offsets, known.offsets):
            _LOG.info("batch %d is in epoch %d already; not run again", batch_id, self._interval.head.epoch)
            return True
        raise CorruptData(
            f"Spark runs batch {batch_id}, but epoch {self._interval.head.epoch} already holds batch "
            f"{known.batch_id} with other offsets. Spark's checkpoint directory was changed; start the job again, "
            "which makes a fresh one"
        )

    def _task_job(self, time: TimeEntry) -> TaskJob:
        context, last, head = self._context, self._committer.last, self._interval.head
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
            pending=self._interval.segments,
            shards=self._flushed_files(),
            has_pending=self._shards.any_pending,
        )

    def _flushed_files(self) -> ShardFilesEntry | None:
        """The listing that no manifest names yet, if it was written between two checkpoints."""
        entry = self._files.entry if self._files is not None else None
        return entry if entry != self._committer.last.shards else None

    def _stage_task(self, stage: Stage, number: int, job: TaskJob) -> StageTask:
        uid = stage.operator.uid if stage.operator is not None else ""
        shards = self._shards
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
            listed=self._files.of_tasks(uid) if self._files is not None else {},
        )

    def _place(self) -> Placement:
        context, last = self._context, self._committer.last
        job = self._task_job(TimeEntry(0))

        def wanted() -> tuple[int, Mapping[str, str]]:
            # Before the first epoch the copies are those of the run before, which may have had another parallelism.
            if self.epochs == 0:
                return last.parallelism, last.versions
            return context.parallelism, self._shards.versions

        return Placement(
            self._spark,
            context.parallelism,
            enabled=context.settings.placement == "sticky",
            state_folder=partial(local_folder, job, "state"),
            wanted=wanted,
        )

    def _first_shards(self) -> Shards:
        last, parallelism = self._committer.last, self._context.parallelism
        # Local copies have the columns of the run that wrote them; where those changed, the primary brings them to the new ones.
        serving = usable_versions(last, self._context.entries) if last.parallelism == parallelism else {}
        return Shards.at_start(
            parallelism,
            serving,
            {o.uid: o.next_due_ms for o in last.operators},
            (o.uid for o in self._context.pipeline.operators),
        )


def _log_restores(acknowledged: Sequence[Acknowledgement], operators: Sequence[Operator | None]) -> None:
    """A line per shard that had to be restored; their sums are in the progress."""
    for a in acknowledged:
        operator = operators[a.stage]
        if operator is not None and a.restored:
            _LOG.info(
                "operator %s, shard %d: restored from %s in %.0f ms, %d bytes of it from the primary store, on executor %s",
                operator.uid,
                a.shard,
                a.restored,
                a.restore_ms,
                a.restored_bytes,
                a.executor or "of the driver",
            )


def _phases(done: _Processed) -> dict[str, float]:
    return {
        "plan": (done.planned_s - done.started_s) * 1000 - done.flushed_ms,
        "process": (done.processed_s - done.planned_s) * 1000,
    }
