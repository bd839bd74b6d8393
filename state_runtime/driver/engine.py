"""Execution of a planned epoch by Spark: one action, whose tasks restore, process, log and acknowledge.

The rest of the driver knows Spark's tasks only through `EpochRun`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from state_runtime.base.errors import ChangesPending, TooMuchForOneTask
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.driver.aggregated import Aggregated
from state_runtime.driver.context import DriverContext
from state_runtime.driver.driver_state import DriverState
from state_runtime.driver.epoch import EpochRun, LimitsOf, PlannedEpoch, TasksDone
from state_runtime.driver.epoch_plan import EpochPlan, plan_epoch
from state_runtime.driver.packed_outputs import pack_outputs
from state_runtime.driver.single_task import SingleTask, may_be_single_task
from state_runtime.driver.stage_tasks import StageTasks
from state_runtime.placement.anchors import AnchoredPlan, has_executors
from state_runtime.snapshot.commit import Committer
from state_runtime.spark.errors import typed_error
from state_runtime.spark.frames import Frames
from state_runtime.spark.prepared import frames_of
from state_runtime.task.acknowledgement import Acknowledgement
from state_runtime.task.shard_access import TaskJob

__all__ = ["SparkEngine"]

_LOG = logging.getLogger(__name__)

Discard = Callable[[list[Acknowledgement], int | None], None]
"""Removes the objects of a failed action's tasks; given an epoch, also its staged output that no task reported."""


class SparkEngine:
    """Runs the planned epochs of one run, one at a time.

    Life cycle: made with the run → per epoch `run`, then `learn` if it succeeded → `close`.

    Args:
        flush: writes the pending changes as a segment, for tasks that need it from the primary store. Returns its bytes
            and the milliseconds that it took.
    """

    def __init__(
        self,
        context: DriverContext,
        committer: Committer,
        state: DriverState,
        spark: SparkSession,
        *,
        flush: Callable[[], tuple[int, float]],
        discard: Discard,
    ) -> None:
        self._context = context
        self._state = state
        self._spark = spark
        self._flush = flush
        self._discard = discard
        self._acknowledgements = Acknowledgements(spark.sparkContext)
        self._tasks = StageTasks(context, committer, state, spark.sparkContext, self._acknowledgements.accumulator)
        self._placement = self._tasks.placement(spark)
        able = frozenset(s.operator.uid for s in context.pipeline.stages if s.operator and s.partial is not None)
        self._aggregated = Aggregated(context.settings.partial_aggregation, able)
        self._single = SingleTask(may_be_single_task(context, has_executors=has_executors(spark)))
        self._made_frames: Frames | None = None

    # For any thread: Spark delivers acknowledgements one by one as tasks end.

    def arrived(self) -> int | None:
        """Count the tasks of the running action that have acknowledged; None if no action runs."""
        return self._acknowledgements.arrived()

    def so_far(self) -> list[Acknowledgement]:
        """Return the acknowledgements that have arrived; of a failed action, those of some of its tasks."""
        return self._acknowledgements.so_far()

    def run(self, frame: DataFrame, planned: PlannedEpoch, limits_of: LimitsOf) -> EpochRun:
        """Run the action of an epoch; no action if no task has anything to do.

        If a task needs changes from the primary store that only the driver holds, they are written and the action is
        run again. If the epoch is too much for one task, the action is run again with a task for each shard.

        Args:
            frame: the batch, or a frame of its columns without rows.
        """
        clock = self._context.clock
        if not planned.has_action:
            now_s = clock.monotonic_s()
            return EpochRun(planned=planned, acknowledged=[], event_times={}, planned_s=now_s, processed_s=now_s)
        flushed_bytes, flushed_ms, is_flushed = 0, 0.0, False
        in_one_task = self._single.choose(planned.limits.budget.within_s, goes_on=planned.goes_on)
        while True:
            seats = self._placement.for_epoch()
            if self._placement.has_filled:
                # Rows get their full time: executors may have been starting for most of it.
                budget = limits_of(planned.batch).budget
                planned = replace(planned, limits=replace(planned.limits, budget=budget))
            try:
                acknowledged, plan, planned_s = self._act(frame, planned, seats, in_one_task=in_one_task)
                break
            except Exception as error:
                typed = typed_error(error)
                # The output of its tasks will not be used: the action begins again.
                if isinstance(typed, TooMuchForOneTask) and in_one_task:
                    in_one_task = False
                    self._single.refused()
                    _LOG.info("epoch %d is run again with a task for each shard: %s", planned.clock.epoch, typed)
                    # The one task failed, so no acknowledgement reports what it staged.
                    self._discard(self.so_far(), planned.clock.epoch)
                elif isinstance(typed, ChangesPending) and not is_flushed:
                    is_flushed = True
                    self._discard(self.so_far(), None)
                    _LOG.info("epoch %d needs changes that were not written yet: %s", planned.clock.epoch, typed)
                    flushed_bytes, flushed_ms = self._flush()
                    if planned.goes_on:
                        planned = replace(planned, batch=self._state.batch)  # its rows have places on the store now
                else:
                    raise
            # The new attempt gets the full time again: tasks are not charged for the driver's work in between.
            planned = replace(planned, limits=limits_of(planned.batch))
        return EpochRun(
            planned=planned,
            acknowledged=acknowledged,
            event_times=plan.event_time_ms(),
            source_rows=plan.source_rows(),
            aside=plan.aside(),
            planned_s=planned_s,
            processed_s=clock.monotonic_s(),
            flushed_ms=flushed_ms,
            flushed_bytes=flushed_bytes,
        )

    def learn(self, run: EpochRun, tasks: TasksDone, process_ms: float) -> int:
        """Learn from an epoch that succeeded. Return how many shards moved to another executor in it."""
        moved = self._placement.ran((uid, a.shard, a.executor) for uid, a in tasks.ran)
        self._aggregated.seen(tasks.ran)
        self._single.seen(run.acknowledged, self._context.pipeline.stages, process_ms)
        return moved

    def close(self) -> None:
        """Release the run's resources in Spark."""
        self._placement.close()

    def _act(
        self, frame: DataFrame, planned: PlannedEpoch, seats: AnchoredPlan | None, *, in_one_task: bool
    ) -> tuple[list[Acknowledgement], EpochPlan, float]:
        """Run one Spark action. Return the acknowledgements, the plan, and when (monotonic) it was ready."""
        job: TaskJob = self._tasks.job(planned.acting, planned.late)
        pipeline = self._context.pipeline
        with self._tasks.of_action(job, planned.limits.budget, self._state.batch, in_one_task=in_one_task) as task:
            plan = plan_epoch(
                frame,
                pipeline,
                job.parallelism,
                frames=self._frames,
                task=task,
                wake=planned.wake,
                beginning=planned.initial,
                seats=seats,
                aggregated=self._aggregated.chosen(),
                is_batch=planned.request.reads,
                in_one_task=in_one_task,
                now_ms=planned.time.batch_time_ms,
            )
            planned_s = self._context.clock.monotonic_s()
            with self._acknowledgements.expecting(job.epoch):
                plan.run()
        acknowledged = self._acknowledgements.take(job.epoch, job.parallelism, pipeline.stages)
        return self._packed(acknowledged, job), plan, planned_s

    def _packed(self, acknowledged: list[Acknowledgement], job: TaskJob) -> list[Acknowledgement]:
        try:
            return pack_outputs(acknowledged, self._context.sinks, job.term, job.clock.epoch, self._context.ids)
        except Exception:
            self._discard(acknowledged, job.clock.epoch)
            raise

    def _frames(self) -> Frames:
        """Return the maker of the frames of an epoch's plan; it keeps the parts common to all epochs."""
        if self._made_frames is None:
            self._made_frames = frames_of(self._spark)
        return self._made_frames
