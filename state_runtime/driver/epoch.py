"""One epoch as values, each made of the one before it; pure.

    EpochRequest → PlannedEpoch → EpochRun → TasksDone → EpochOutcome
             planned     an engine runs it   gathered   outcome_of

The request says what the epoch reads, the plan what it does, and the run what its tasks acknowledged. `TasksDone` has
the same in the order in which the rest of the driver needs it. The outcome is the driver state afterwards.
driver/epoch_line.py goes from one to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from state_runtime.base.errors import CorruptData, check
from state_runtime.base.progress import RowsAside
from state_runtime.changelog.changes import TaskChanges
from state_runtime.driver.batch_progress import BatchProgress, ShardRows
from state_runtime.driver.context import DriverContext
from state_runtime.driver.driver_state import EpochOutcome, Standing
from state_runtime.driver.due import woken
from state_runtime.driver.epoch_budget import EpochBudget
from state_runtime.driver.shard_index import ShardIndex, ShardStep
from state_runtime.pipeline.compile import Stage
from state_runtime.pipeline.inflight_fit import functions_of
from state_runtime.pipeline.source_position import same_offsets
from state_runtime.pipeline.watermark import END_OF_TIME_MS, Clocks
from state_runtime.processors.operator import EpochClock
from state_runtime.snapshot.manifest import Manifest, RowsLayout, SourcePosition, StagedOutput, TimeEntry
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = [
    "EpochLimits",
    "EpochRequest",
    "EpochRun",
    "EpochTimes",
    "LimitsOf",
    "PlannedEpoch",
    "SourceRead",
    "TasksDone",
    "advanced",
    "gathered",
    "holds_batch",
    "outcome_of",
    "planned",
    "row_bytes_after",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochRequest:
    """The request for an epoch.

    Attributes:
        batch_id: of the batch that it reads; None: it continues the open batch, or does due work.
        time_ms: its processing time.
        drains: it comes after the end of all input.
        unlimited: it has no time limit, in any checkpoint mode.
    """

    batch_id: int | None
    time_ms: int
    drains: bool = False
    unlimited: bool = False

    @property
    def reads(self) -> bool:
        return self.batch_id is not None


@dataclass(frozen=True)
class SourceRead:
    """The position of the source after an epoch, and what its logs of seen files got since the epoch before."""

    position: SourcePosition | None
    log_changes: tuple[TaskChanges, ...] = ()


@dataclass(frozen=True)
class EpochLimits:
    """Attributes: budget: the limits of the epoch's tasks; due_s: when (monotonic) a checkpoint is due that follows."""

    budget: EpochBudget
    due_s: float


LimitsOf = Callable[[BatchProgress | None], EpochLimits]
"""The limits of an epoch about a batch that begins now."""


@dataclass(frozen=True, kw_only=True)
class PlannedEpoch:
    """The plan of an epoch.

    Attributes:
        time: its clock, as the next manifest will have it.
        clock: the clock that its tasks get; in an epoch that drains, all of it but the watermark (`acting`).
        acting: the clock that its tasks act by.
        late: the clock that decides which rows are late.
        clocks: what moves the clocks.
        batch: the batch that it is about, as it is before; None if no batch is open or read.
        goes_on: whether the batch was open before.
        wake: per operator uid the shards that are visited even if no row comes.
        initial: uids of the operators that get their initial state in it.
    """

    request: EpochRequest
    time: TimeEntry
    clock: EpochClock
    acting: TimeEntry
    late: TimeEntry
    clocks: Clocks
    batch: BatchProgress | None
    goes_on: bool
    wake: Mapping[str, Sequence[int]]
    initial: frozenset[str]
    limits: EpochLimits

    @property
    def has_action(self) -> bool:
        """Return whether any task has something to do; otherwise the epoch only moves the clock."""
        return self.request.reads or bool(self.initial) or any(self.wake.values())


@dataclass(frozen=True, kw_only=True)
class EpochTimes:
    """When the parts of an epoch were done: monotonic seconds, except for `flushed_ms` and `last_row_at_ms`.

    Attributes:
        due_s: when a checkpoint was due that follows it.
        flushed_ms: the time to write a segment that the action needed before it could succeed; after `started_s` and
            before `planned_s`.
        last_row_at_ms: wall clock of the last row processed, in any task, 0 if no row was; None: no task ran.
    """

    started_s: float
    due_s: float
    planned_s: float
    processed_s: float
    flushed_ms: float = 0.0
    last_row_at_ms: int | None = None

    @staticmethod
    def of_nothing(now_s: float) -> EpochTimes:
        """Return the times of a checkpoint in which no epoch has just ended."""
        return EpochTimes(started_s=now_s, due_s=now_s, planned_s=now_s, processed_s=now_s)

    @property
    def phases(self) -> dict[str, float]:
        """Return how long the parts took, in milliseconds."""
        return {
            "plan": (self.planned_s - self.started_s) * 1000 - self.flushed_ms,
            "process": (self.processed_s - self.planned_s) * 1000,
        }


@dataclass(frozen=True, kw_only=True)
class EpochRun:
    """A planned epoch after it ran.

    Attributes:
        planned: as it finally ran: limits are dealt out again when an action is run once more.
        acknowledged: one per stage and shard; empty if there was nothing to do.
        event_times: per watermarked column the highest event time of the batch.
        source_rows: rows of the batch per source, if it has those of several.
        planned_s, processed_s: monotonic.
        flushed_ms, flushed_bytes: of a segment that the action needed.
        aside: rows that are too far ahead, or failed a condition.
    """

    planned: PlannedEpoch
    acknowledged: list[Acknowledgement]
    event_times: Mapping[str, int | None]
    planned_s: float
    processed_s: float
    flushed_ms: float = 0.0
    flushed_bytes: int = 0
    source_rows: tuple[int, ...] = ()
    aside: RowsAside = field(default_factory=RowsAside)

    @property
    def time(self) -> TimeEntry:
        """The epoch's clock, with the event times that were seen."""
        planned = self.planned
        if not planned.has_action:
            return planned.time
        return planned.clocks.observed(planned.time, self.event_times, reads=planned.request.reads)


@dataclass(frozen=True, kw_only=True)
class TasksDone:
    """The work of an epoch's tasks, collected in one pass.

    Attributes:
        ran: for each task of a stage with state, the operator's uid and the acknowledgement.
        steps: the same tasks, for the driver's shard index.
        rows: the same tasks, for the batch: the input that each task left.
        last_row_at_ms: see `EpochTimes`.
        row_bytes: width of the widest rows from Spark, in stages without state too; 0: no rows came.
    """

    ran: tuple[tuple[str, Acknowledgement], ...]
    steps: tuple[ShardStep, ...]
    rows: tuple[ShardRows, ...]
    last_row_at_ms: int | None
    row_bytes: int


def advanced(context: DriverContext, head: Manifest, batch_time_ms: int) -> TimeEntry:
    """Return the clock of the epoch that follows a head."""
    return context.clocks.advanced(head.time, batch_time_ms)


def holds_batch(head: Manifest, batch_id: int, position: Callable[[], SourcePosition]) -> bool:
    """Return whether Spark repeats a batch that the head holds.

    Args:
        position: Spark's position after the batch; only called if the batch is not new.

    Raises:
        CorruptData: it is another batch with that number: Spark's position does not belong to the head.
    """
    known = head.source
    if known is None or batch_id > known.batch_id:
        return False
    repeated = position()
    if batch_id == known.batch_id and same_offsets(repeated.offsets, known.offsets):
        _LOG.info("batch %d is in epoch %d already; not run again", batch_id, head.epoch)
        return True
    raise CorruptData(
        f"Spark runs batch {batch_id}, but epoch {head.epoch} already holds batch {known.batch_id} with other offsets. "
        "Spark's checkpoint directory was changed; start the job again, which makes a fresh one"
    )


def planned(request: EpochRequest, before: Standing, context: DriverContext, limits_of: LimitsOf) -> PlannedEpoch:
    """Plan the requested epoch from the current driver state."""
    head, pipeline = before.interval.head, context.pipeline
    known = late = head.time or TimeEntry(0)
    batch = before.batch
    if batch is not None:
        # Its processing time is now, its watermark the batch's.
        late = batch.late
        time = replace(known, batch_time_ms=max(request.time_ms, known.batch_time_ms))
    else:
        time = advanced(context, head, request.time_ms)
        batch = BatchProgress.begun(late) if request.reads else None
    limits = limits_of(batch)
    # The end of all input is not recorded as the watermark: a run that resumes from here has the watermark of its
    # input.
    acting = replace(time, watermark_ms=END_OF_TIME_MS, clocks={}) if request.drains else time
    stored = {o.uid for o in head.operators}
    return PlannedEpoch(
        request=request,
        time=time,
        clock=EpochClock(time.batch_time_ms, time.watermark_ms, late.watermark_ms, head.epoch + 1),
        acting=acting,
        late=late,
        clocks=context.clocks,
        batch=batch,
        goes_on=before.batch is not None,
        wake=woken(
            pipeline.operators,
            before.shards,
            acting,
            batch,
            limits.budget.does_due,
            context.parallelism,
            makes_tables=pipeline.makes_tables,
            feeds_tables=pipeline.feeds_tables,
        ),
        initial=frozenset(
            s.operator.uid for s in pipeline.stages if s.operator and s.initial and s.operator.uid not in stored
        ),
        limits=limits,
    )


def gathered(acknowledged: Sequence[Acknowledgement], stages: Sequence[Stage]) -> TasksDone:
    """Collect the work of an epoch's tasks."""
    operators = {number: stage.operator for number, stage in enumerate(stages) if stage.operator is not None}
    functions = {number: functions_of(operator.entry()) for number, operator in operators.items()}
    ran = [(operators[a.stage].uid, a) for a in acknowledged if a.stage in operators]
    return TasksDone(
        ran=tuple(ran),
        steps=tuple(ShardStep(uid, a.shard, a.version, a.next_due_ms, a.is_pending) for uid, a in ran),
        rows=tuple(
            ShardRows(uid, a.shard, a.left, a.kept.parts, RowsLayout(a.kept_columns, functions[a.stage]))
            for uid, a in ran
        ),
        last_row_at_ms=max((a.processed_at_ms for a in acknowledged), default=None),
        row_bytes=max((a.row_bytes for a in acknowledged), default=0),
    )


def outcome_of(
    run: EpochRun,
    tasks: TasksDone,
    before: Standing,
    context: DriverContext,
    source: SourceRead,
    outputs: Sequence[StagedOutput],
) -> EpochOutcome:
    """Return the driver state after an epoch.

    Args:
        outputs: staged by the epoch, of each sink.
    """
    shards = before.shards.after(tasks.steps)
    head = replace(
        before.interval.head,
        epoch=run.planned.clock.epoch,
        parallelism=context.parallelism,
        operators=tuple(replace(e, next_due_ms=shards.earliest_due_ms(e.uid)) for e in context.entries),
        time=run.time,
        source=source.position,
        drained=run.planned.request.drains,
        session=dict(context.session),
    )
    return EpochOutcome(
        head=head,
        shards=shards,
        files=before.files.after(a.files for a in run.acknowledged) if before.files is not None else None,
        batch=_batch_after(run, tasks, context, shards),
        changes=(*(a.changes for a in run.acknowledged), *source.log_changes),
        outputs=tuple(outputs),
        rows=tuple(a.kept for a in run.acknowledged),
    )


def _batch_after(run: EpochRun, tasks: TasksDone, context: DriverContext, shards: ShardIndex) -> BatchProgress | None:
    """Return the batch after an epoch; None if it is done, or if no batch was open."""
    batch = run.planned.batch
    if batch is None:
        # No batch would name the rows.
        check(not any(left for a in run.acknowledged for left in a.left.values()), "rows are left without a batch")
        return None
    return batch.after(
        run.planned.clock.epoch,
        run.time.batch_time_ms,
        tasks.rows,
        context.pipeline.operators,
        parallelism=context.parallelism,
        did_due=run.planned.limits.budget.does_due,
        is_due=lambda uid: bool(shards.due(uid, run.time.watermark_of(uid))),
    )


def row_bytes_after(before: int, tasks: TasksDone) -> int:
    """Return the width of rows from Spark after an epoch: its own width, or the one before. An epoch that continues a
    batch gets no rows from Spark, and that batch may be the wide one."""
    return tasks.row_bytes or before
