"""From an epoch's action to the next head: its clock, its position, and what is known of its shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from state_runtime.base.errors import CorruptData, check
from state_runtime.driver.batch_book import BatchBook, ShardRows
from state_runtime.driver.context import DriverContext
from state_runtime.driver.governor import EpochBudget
from state_runtime.driver.shard_book import ShardBook, ShardStep
from state_runtime.pipeline.compile import Stage
from state_runtime.pipeline.inflight_fit import functions_of
from state_runtime.pipeline.source_position import same_offsets
from state_runtime.pipeline.watermark import advance
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.snapshot.manifest import Manifest, RowsLayout, SourcePosition, TimeEntry
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["Processed", "advanced", "batch_after", "gone_on", "holds_batch", "next_head", "of_operators", "steps_of"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Processed:
    """An epoch's action, done.

    Attributes:
        acknowledged: one per stage and shard; empty if no action was needed.
        time: the epoch's clock, with the event times that were seen.
        clock: what its tasks were told of it.
        batch: the batch that it was about, as it was before; None if no batch was open, nor read.
        budget: what its tasks were allowed.
        due_s: when (monotonic) a checkpoint was due that follows it.
        planned_s, processed_s: when the plan was ready, and when the action was done.
        flushed_ms, flushed_bytes: of a segment that had to be written before the action could succeed; between the two
            plans.
    """

    acknowledged: list[Acknowledgement]
    time: TimeEntry
    clock: EpochClock
    batch: BatchBook | None
    budget: EpochBudget
    started_s: float
    due_s: float
    planned_s: float
    processed_s: float
    flushed_ms: float = 0.0
    flushed_bytes: int = 0

    @property
    def phases(self) -> dict[str, float]:
        """How long its parts took, in milliseconds."""
        return {
            "plan": (self.planned_s - self.started_s) * 1000 - self.flushed_ms,
            "process": (self.processed_s - self.planned_s) * 1000,
        }


def advanced(context: DriverContext, head: Manifest, batch_time_ms: int) -> TimeEntry:
    """The clock of the epoch that follows a head."""
    return advance(head.time, batch_time_ms, context.pipeline.watermarks, context.watermark_policy)


def gone_on(head: Manifest, now_ms: int) -> TimeEntry:
    """The clock of an epoch that goes on with an open batch: its processing time is now, its watermark the batch's."""
    time = head.time or TimeEntry(0)
    return replace(time, batch_time_ms=max(now_ms, time.batch_time_ms))


def holds_batch(head: Manifest, batch_id: int, position: Callable[[], SourcePosition]) -> bool:
    """Whether Spark repeats a batch that the head holds.

    Args:
        position: that Spark has after the batch; only asked for if the batch is not new.

    Raises:
        CorruptData: it is another batch of that number: Spark's position does not belong to the head.
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


def of_operators(
    acknowledged: Sequence[Acknowledgement], stages: Sequence[Stage]
) -> Iterator[tuple[Operator, Acknowledgement]]:
    """The acknowledgements of stages with state, each with its operator."""
    for a in acknowledged:
        operator = stages[a.stage].operator
        if operator is not None:
            yield operator, a


def steps_of(done: Processed, stages: Sequence[Stage]) -> Iterator[ShardStep]:
    """What the shard book must know of an epoch."""
    for operator, a in of_operators(done.acknowledged, stages):
        yield ShardStep(operator.uid, a.shard, a.version, a.next_due_ms, a.is_pending)


def batch_after(done: Processed, context: DriverContext, shards: ShardBook) -> BatchBook | None:
    """The batch after an epoch; None if it is done, or if there was none.

    Args:
        shards: the book after it.
    """
    if done.batch is None:
        # Nothing would name them.
        check(not any(left for a in done.acknowledged for left in a.left.values()), "rows are left without a batch")
        return None
    rows = [
        ShardRows(o.uid, a.shard, a.left, a.kept.parts, RowsLayout(a.kept_columns, functions_of(o.entry())))
        for o, a in of_operators(done.acknowledged, context.pipeline.stages)
    ]
    return done.batch.after(
        done.clock.epoch,
        done.time.batch_time_ms,
        rows,
        context.pipeline.operators,
        parallelism=context.parallelism,
        did_due=done.budget.does_due,
        is_due=lambda uid: bool(shards.due(uid, done.time.watermark_ms)),
    )


def next_head(
    before: Manifest,
    done: Processed,
    context: DriverContext,
    shards: ShardBook,
    *,
    position: SourcePosition | None,
    drained: bool,
) -> Manifest:
    """The head after an epoch.

    Args:
        shards: the book after it.
        position: of the source after it.
        drained: whether it was an epoch after the end of all input.
    """
    return replace(
        before,
        epoch=done.clock.epoch,
        parallelism=context.parallelism,
        operators=tuple(replace(e, next_due_ms=shards.earliest_due_ms(e.uid)) for e in context.entries),
        time=done.time,
        source=position,
        drained=drained,
    )
