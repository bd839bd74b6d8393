"""The epoch loop behind `foreachBatch`.

One call of `EpochDriver.run_batch` is one epoch; so is one of `run_without_batch`, when something is due and no row comes:

1. plan       the batch's frame through all stages: hash → repartitionById → mapInArrow, user code in between
2. process    one Spark action; tasks restore, process, log and acknowledge
3. segment    the acknowledged changes, packed into one object
4. manifest   create-if-absent of the next snapshot: from here on the epoch has happened
5. publish    sinks give staged output its final name
6. return     Spark writes its commit log, which is scratch

A crash between any two steps is repaired by the next run: before 4 the batch is run again from the previous snapshot, after
it the next run publishes what the manifest names and resumes behind the batch.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql import DataFrame, SparkSession

from state_runtime import errors, faults
from state_runtime.changelog.writer import TaskChanges, source_log_changes, write_segment
from state_runtime.clock import Clock
from state_runtime.compatibility import usable_versions
from state_runtime.epoch_plan import plan_epoch
from state_runtime.errors import CorruptData, InvalidPipeline, StillstateError
from state_runtime.ids import Ids
from state_runtime.materialize import BackgroundMaterializer
from state_runtime.pipeline import CompiledPipeline, Stage
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.progress import Progress
from state_runtime.settings import JobSettings
from state_runtime.sinks import SinkSpec, staged_outputs
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StagedOutput, TimeEntry
from state_runtime.source import SparkCheckpoint, same_offsets
from state_runtime.store import Store
from state_runtime.task import EMPTY_TASK, ERROR_MARK, NO_VERSION, Acknowledgement, StageTask, TaskJob
from state_runtime.watermark import Policy, advance, observed

__all__ = ["EpochDriver", "typed_error"]

_LOG = logging.getLogger(__name__)
_VERSION_CHARS = 16


class _Gather(AccumulatorParam[list[Any]]):
    """Collects acknowledgements on the driver."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:
        value1.extend(value2)
        return value1


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


class EpochDriver:
    """Runs epochs of one run, one at a time.

    Life cycle: made after the fencing snapshot → `publish_pending` once → `run_batch`* → `stop`. After an error it refuses
    further epochs; the error is kept in `failure`.
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
        self._on_progress = on_progress
        self._accumulator: Accumulator[list[Any]] = spark.sparkContext.accumulator([], _Gather())
        self._materializer = BackgroundMaterializer(context.root, context.settings, context.ids)
        self._stopping = threading.Event()
        self._versions, self._trusted = self._initial_versions()
        self._next_due = self._initial_next_due()
        # Held during an epoch: whoever stops the query takes it, so that no epoch is cut in the middle.
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self.epochs = 0
        self.progress: Progress | None = None

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

    def stop(self, timeout_s: float) -> None:
        """Let no further epoch begin. Call it with the lock held."""
        self._stopping.set()
        self._materializer.join(timeout_s)

    def run_batch(self, frame: DataFrame, batch_id: int) -> None:
        """One epoch; the function that Spark calls.

        Raises:
            StillstateError: typed, also for errors of tasks; Spark's query ends with it.
        """
        with self.lock:
            if self._stopping.is_set() or self.failure is not None:
                # Returning without work is safe: Spark's own commit log is scratch, the manifest is the truth.
                return
            try:
                if not self._already_committed(batch_id):
                    self._run_epoch(frame, batch_id, self._checkpoint.clock(batch_id).batch_time_ms)
            except BaseException as error:
                self.failure = typed_error(error)
                raise self.failure from error

    def is_due(self) -> bool:
        """Whether an epoch without a batch has something to do: processing time has reached a timer, or the watermark moved."""
        with self.lock:
            return self._is_due(self._context.clock.now_ms())

    def run_without_batch(self, empty: DataFrame) -> None:
        """One epoch that Spark does not start; nothing happens if nothing is due any more.

        As Spark's own batches without data: for event time one whenever the watermark moved, for processing time when a timer is
        due. If no shard has anything to do, the epoch is a manifest with the new clock, and no Spark job runs.

        Args:
            empty: a frame of the source's columns without rows.

        Raises:
            StillstateError: see `run_batch`.
        """
        with self.lock:
            now_ms = self._context.clock.now_ms()
            last = self._committer.last
            if self._stopping.is_set() or self.failure is not None or last.source is None or not self._is_due(now_ms):
                return
            try:
                self._run_epoch(empty, None, now_ms)
            except BaseException as error:
                self.failure = typed_error(error)
                raise self.failure from error

    def _is_due(self, now_ms: int) -> bool:
        last = self._committer.last.time
        if last is None or self._committer.last.source is None:
            return False
        time = self._advanced(now_ms)
        operators = self._context.pipeline.operators
        if any(o.time_domain == "event" for o in operators) and time.watermark_ms > last.watermark_ms:
            return True
        return any(self._due_shards(o, time) for o in operators if o.time_domain == "processing")

    def _advanced(self, batch_time_ms: int) -> TimeEntry:
        context = self._context
        return advance(self._committer.last.time, batch_time_ms, context.pipeline.watermarks, context.watermark_policy)

    def _due_shards(self, operator: Operator, time: TimeEntry) -> list[int]:
        """The shards that something is due in."""
        now_ms = {"": None, "processing": time.batch_time_ms, "event": time.watermark_ms}[operator.time_domain]
        if now_ms is None:
            return []
        known = self._next_due[operator.uid]
        return [shard for shard, due_ms in enumerate(known) if due_ms is not None and due_ms <= now_ms]

    def _run_epoch(self, frame: DataFrame, batch_id: int | None, batch_time_ms: int) -> None:
        """One epoch, of a batch or (None) without one."""
        context, last = self._context, self._committer.last
        started_s = context.clock.monotonic_s()
        time = self._advanced(batch_time_ms)
        job = self._task_job(time)
        acknowledged, time, planned_s = self._process(frame, batch_id is not None, time, job)
        processed_s = context.clock.monotonic_s()
        faults.reach("action-done")

        position = self._checkpoint.position(batch_id) if batch_id is not None else last.source
        changes: list[TaskChanges] = [a.changes for a in acknowledged]
        if position is not None and batch_id is not None:
            for source, lines in self._checkpoint.new_log_lines(last.source, position).items():
                changes.append(source_log_changes(source, lines))
        segment = write_segment(
            context.root,
            changes,
            job_uid=self._committer.info.uid,
            term=self._committer.term.term,
            snapshot_id=job.snapshot_id,
            ids=context.ids,
        )
        segment_s = context.clock.monotonic_s()
        faults.reach("segment-written")

        outputs = staged_outputs(
            [s for a in acknowledged for s in a.staged], list(context.sinks.values()), job.snapshot_id
        )
        versions, trusted, next_due = self._advance(acknowledged)
        operators = (
            replace(e, next_due_ms=min((due for due in next_due[e.uid] if due is not None), default=None))
            for e in context.entries
        )
        draft = replace(
            self._materializer.take(last),
            kind="checkpoint",
            parallelism=context.parallelism,
            operators=tuple(operators),
            time=time,
            source=position,
            outputs=outputs,
            versions=versions,
            previous=self.progress,
        )
        if segment is not None:
            draft = replace(draft, segments=(*draft.segments, segment))
        phases = {
            "plan": (planned_s - started_s) * 1000,
            "process": (processed_s - planned_s) * 1000,
            "segment": (segment_s - processed_s) * 1000,
        }
        progress = self._progress(acknowledged, draft, job, position.batch_id if position else -1, segment, phases)
        draft = replace(draft, progress=progress)
        faults.reach("before-manifest")
        committed = self._committer.commit(draft)
        manifest_s = context.clock.monotonic_s()
        faults.reach("manifest-written")

        self._versions, self._trusted, self._next_due = versions, trusted, next_due
        self._materializer.settled(committed)
        faults.reach("before-publish")
        for output in outputs:
            self._publish(output, frame.sparkSession)
        for output in last.outputs:
            context.pipeline.sinks[output.sink].settle(context.sinks[output.sink], output)
        published_s = context.clock.monotonic_s()
        faults.reach("published")
        if context.settings.materialize:
            self._materializer.start_if_due(committed)
        self.epochs += 1
        duration_s = published_s - started_s
        self.progress = replace(
            progress,
            duration_ms=duration_s * 1000,
            rows_per_s=progress.input_rows / duration_s if duration_s > 0 else 0.0,
            checkpoint_ms=(manifest_s - processed_s) * 1000,
            phases_ms={
                **phases,
                "manifest": (manifest_s - segment_s) * 1000,
                "publish": (published_s - manifest_s) * 1000,
            },
        )
        self._report(self.progress)

    def _process(
        self, frame: DataFrame, has_batch: bool, time: TimeEntry, job: TaskJob
    ) -> tuple[list[Acknowledgement], TimeEntry, float]:
        """Plan and run the epoch's one Spark action; none where there is neither a batch nor anything due.

        Returns:
            The acknowledgements, the clock with the event times that were seen, and when (monotonic seconds) the plan was ready.
        """
        context = self._context
        wake = {o.uid: self._due_shards(o, time) for o in context.pipeline.operators}
        stored = {o.uid for o in self._committer.last.operators}
        beginning = frozenset(
            s.operator.uid for s in context.pipeline.stages if s.operator and s.initial and s.operator.uid not in stored
        )
        if not (has_batch or beginning or any(wake.values())):
            return [], time, context.clock.monotonic_s()
        plan = plan_epoch(
            frame,
            context.pipeline,
            job.parallelism,
            task=lambda stage, number: self._stage_task(stage, number, job),
            wake=wake,
            beginning=beginning,
        )
        planned_s = context.clock.monotonic_s()
        self._accumulator.value.clear()
        plan.final.collect()
        return self._acknowledged(job), observed(time, plan.event_time_ms()), planned_s

    def _report(self, progress: Progress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            # The epoch is committed; whoever watches it must not be able to end the job.
            _LOG.exception("the progress callback failed for snapshot %d", progress.snapshot_id)

    def _already_committed(self, batch_id: int) -> bool:
        """Whether Spark repeats a batch that the newest snapshot holds.

        Raises:
            CorruptData: it is another batch of that number: Spark's position does not belong to the snapshot.
        """
        committed = self._committer.last.source
        if committed is None or batch_id > committed.batch_id:
            return False
        repeated = self._checkpoint.position(batch_id)
        if batch_id == committed.batch_id and same_offsets(repeated.offsets, committed.offsets):
            _LOG.info("batch %d is in snapshot %d already; not run again", batch_id, self._committer.last.snapshot_id)
            return True
        raise CorruptData(
            f"Spark runs batch {batch_id}, but snapshot {self._committer.last.snapshot_id} already holds batch "
            f"{committed.batch_id} with other offsets. Spark's checkpoint directory was changed; start the job again, "
            "which makes a fresh one"
        )

    def _task_job(self, time: TimeEntry) -> TaskJob:
        context, last = self._context, self._committer.last
        late_ms = last.time.watermark_ms if last.time is not None else 0
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
            clock=EpochClock(time.batch_time_ms, time.watermark_ms, late_ms, last.snapshot_id + 1),
            inline_bytes_max=context.settings.inline_bytes_max,
            runs_max=context.settings.runs_max,
            backend=context.settings.backend,
        )

    def _stage_task(self, stage: Stage, number: int, job: TaskJob) -> Any:
        uid = stage.operator.uid if stage.operator is not None else ""
        return StageTask(
            job=job,
            stage=number,
            operator=stage.operator,
            entry=next((e for e in self._context.entries if e.uid == uid), None),
            sinks=tuple(self._context.sinks[name] for name in stage.sinks),
            versions=self._versions.get(uid, ""),
            trusted=self._trusted.get(uid, ""),
            emit=stage.emit,
            accumulator=self._accumulator,
        )

    def _acknowledged(self, job: TaskJob) -> list[Acknowledgement]:
        """One acknowledgement per stage and shard.

        A stage that Spark re-ran (lost shuffle files) acknowledges some shards twice. Input order is reproduced, so both
        attempts hold the same result; the newest is the one whose output Spark kept.
        """
        chosen: dict[tuple[int, int], Acknowledgement] = {}
        empty = Counter[int]()
        for acknowledgement in self._accumulator.value:
            if acknowledgement.epoch != job.epoch:
                continue  # a late task of an action that failed
            if acknowledgement.shard == EMPTY_TASK:
                empty[acknowledgement.stage] += 1
            else:
                chosen[(acknowledgement.stage, acknowledgement.shard)] = acknowledgement
        for number, stage in enumerate(self._context.pipeline.stages):
            if stage.operator is None:
                continue
            finished = sum(1 for key in chosen if key[0] == number) + empty[number]
            if finished < job.parallelism:
                raise InvalidPipeline(
                    f"operator {stage.operator.uid!r}: only {finished} of {job.parallelism} shards were processed to the end. A "
                    "step after it stops reading early (limit, take, head); remove it, or put it into the consumer of the output"
                )
        return [chosen[key] for key in sorted(chosen)]

    def _initial_versions(self) -> tuple[dict[str, str], dict[str, str]]:
        last, parallelism = self._committer.last, self._context.parallelism
        # Local copies have the columns of the run that wrote them; where those changed, the primary brings them to the new ones.
        serving = usable_versions(last, self._context.entries) if last.parallelism == parallelism else {}
        versions: dict[str, str] = {}
        for operator in self._context.pipeline.operators:
            known = serving.get(operator.uid, "")
            usable = len(known) == parallelism * _VERSION_CHARS
            versions[operator.uid] = known if usable else NO_VERSION * parallelism
        return versions, dict.fromkeys(versions, "0" * parallelism)

    def _initial_next_due(self) -> dict[str, list[int | None]]:
        """The manifest knows the earliest of all shards; which one it was shows when they are visited."""
        known = {o.uid: o.next_due_ms for o in self._committer.last.operators}
        parallelism = self._context.parallelism
        return {o.uid: [known.get(o.uid)] * parallelism for o in self._context.pipeline.operators}

    def _advance(
        self, acknowledged: Sequence[Acknowledgement]
    ) -> tuple[dict[str, str], dict[str, str], dict[str, list[int | None]]]:
        """Versions after the epoch, whose were written by this run, and what is due next. An unvisited shard keeps what it had."""
        versions = {uid: _split(joined, _VERSION_CHARS) for uid, joined in self._versions.items()}
        trusted = {uid: list(flags) for uid, flags in self._trusted.items()}
        next_due = {uid: list(times) for uid, times in self._next_due.items()}
        stages = self._context.pipeline.stages
        for acknowledgement in acknowledged:
            operator = stages[acknowledgement.stage].operator
            if operator is not None:
                versions[operator.uid][acknowledgement.shard] = acknowledgement.version
                trusted[operator.uid][acknowledgement.shard] = "1"
                next_due[operator.uid][acknowledgement.shard] = acknowledgement.next_due_ms
        return (
            {uid: "".join(shards) for uid, shards in versions.items()},
            {uid: "".join(flags) for uid, flags in trusted.items()},
            next_due,
        )

    def _publish(self, output: StagedOutput, spark: SparkSession) -> None:
        sink = self._context.pipeline.sinks.get(output.sink)
        if sink is None:
            raise InvalidPipeline(
                f"the newest snapshot has unpublished output of sink {output.sink!r}, which the pipeline no longer has. Start "
                "the job once with that sink, so that its output is published, then remove it"
            )
        sink.publish(self._context.sinks[output.sink], output, spark)

    def _progress(
        self,
        acknowledged: Sequence[Acknowledgement],
        draft: Manifest,
        job: TaskJob,
        batch_id: int,
        segment: Any,
        phases: Mapping[str, float],
    ) -> Progress:
        """The numbers as far as they are known before the manifest; times after it are only in the callback."""
        before = self._committer.last.progress
        first_stage = min((a.stage for a in acknowledged), default=0)
        files = [f for output in draft.outputs for f in output.files]
        total_ms = sum(phases.values())
        input_rows = sum(a.input_rows for a in acknowledged if a.stage == first_stage)
        return Progress(
            snapshot_id=job.snapshot_id,
            batch_id=batch_id,
            timestamp_ms=job.clock.batch_time_ms,
            input_rows=input_rows,
            output_rows=sum(f.rows for f in files),
            rows_per_s=input_rows / total_ms * 1000 if total_ms > 0 else 0.0,
            state_rows=(before.state_rows if before is not None else 0) + sum(a.rows_added for a in acknowledged),
            changed_rows=sum(a.changes.rows for a in acknowledged),
            duration_ms=total_ms,
            checkpoint_ms=phases["segment"],
            phases_ms=dict(phases),
            segment_bytes=segment.total_bytes if segment is not None else 0,
            log_bytes=draft.log_bytes,
            log_segments=len(draft.segments),
            table_bytes=draft.table_bytes,
            output_bytes=sum(f.bytes for f in files),
            local_restores=sum(a.restored == "local" for a in acknowledged),
            primary_restores=sum(a.restored == "primary" for a in acknowledged),
            local_failures=sum(a.local_failed for a in acknowledged),
            late_rows=sum(a.late_rows for a in acknowledged),
            watermark_ms=job.clock.watermark_ms,
        )


def _split(joined: str, width: int) -> list[str]:
    return [joined[i : i + width] for i in range(0, len(joined), width)]


_MARKED = re.compile(re.escape(ERROR_MARK) + r"(\w+)\] (.*?) \[/stillstate-error\]", re.DOTALL)


def typed_error(error: BaseException) -> BaseException:
    """The error as ours: errors of tasks come back from Spark as text with a mark."""
    if isinstance(error, StillstateError):
        return error
    match = _MARKED.search(str(error))
    if match is not None:
        cls = getattr(errors, match.group(1), None)
        if isinstance(cls, type) and issubclass(cls, StillstateError):
            return cls(match.group(2))
    return error
