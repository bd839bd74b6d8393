"""The inputs of an epoch's tasks, and their preferred executors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark import Broadcast, SparkContext
from pyspark.sql import SparkSession

from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.context import DriverContext
from state_runtime.driver.driver_state import DriverState
from state_runtime.driver.due import did_due
from state_runtime.driver.epoch_budget import EpochBudget
from state_runtime.driver.single_task import LIMITS
from state_runtime.pipeline.compile import Stage
from state_runtime.pipeline.operators import arrow_schema
from state_runtime.placement.anchors import Placement
from state_runtime.processors.operator import EpochClock
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import ShardFilesEntry, TimeEntry
from state_runtime.snapshot.shard_versions import UNKNOWN_VERSIONS, ShardVersions
from state_runtime.task.listed_files import ListedFiles
from state_runtime.task.shard_access import TaskJob, root_id, state_folder
from state_runtime.task.single_task import SingleTaskLimits
from state_runtime.task.slicing import NO_LIMITS
from state_runtime.task.stage import StageTask

__all__ = ["StageTasks"]

_LOG = logging.getLogger(__name__)


class StageTasks:
    """Puts the inputs of tasks together, from the driver state at the moment of the call.

    Life cycle: made with the run → per action `job`, then `of_action` around planning and running it.

    Args:
        accumulator: takes acknowledgements to the driver.
    """

    def __init__(
        self, context: DriverContext, committer: Committer, state: DriverState, spark: SparkContext, accumulator: Any
    ) -> None:
        self._context = context
        self._committer = committer
        self._state = state
        self._spark = spark
        self._accumulator = accumulator

    def job(self, time: TimeEntry, late: TimeEntry) -> TaskJob:
        """Return the common input of all tasks of one attempt at the next epoch.

        Args:
            time: the epoch's clock, as tasks act by it.
            late: the clock that decides which rows are late.
        """
        context, last, head = self._context, self._committer.last, self._state.interval.head
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
            clock=EpochClock(time.batch_time_ms, time.watermark_ms, late.watermark_ms, head.epoch + 1),
            clocks={uid: (time.watermark_of(uid), late.watermark_of(uid)) for uid in {*time.clocks, *late.clocks}},
            settings=context.settings,
            pending=self._state.interval.segments,
            shards=self._flushed_files(),
            root_id=root_id(context.root.url),
            base_commit_id=last.commit_id,
            run_uid=self._committer.term.run_uid,
        )

    @contextmanager
    def of_action(
        self, job: TaskJob, budget: EpochBudget, batch: BatchProgress | None, *, in_one_task: bool
    ) -> Iterator[Callable[[Stage, int], StageTask]]:
        """Yield the function of each stage, by its number; valid until the action has ended.

        Args:
            batch: that the epoch continues, if any.
            in_one_task: one task gets the rows of all shards.
        """
        listed = self._share_listing()
        try:
            yield partial(self._stage_task, job, listed, budget, batch, in_one_task)
        finally:
            if listed is not None:
                _give_up(listed)

    def placement(self, spark: SparkSession) -> Placement:
        """Return the placement that keeps the shards of the run on their executors."""
        context, last, state = self._context, self._committer.last, self._state

        def wanted() -> tuple[int, Mapping[str, ShardVersions]]:
            # Before the first epoch the copies are those of the run before, which may have had another parallelism.
            if state.epochs == 0:
                return last.parallelism, {
                    uid: ShardVersions.decode(stored, last.parallelism) for uid, stored in last.versions.items()
                }
            return context.parallelism, state.shards.versions

        return Placement(
            spark,
            context.parallelism,
            enabled=context.settings.placement == "sticky",
            state_folder=partial(state_folder, self.job(TimeEntry(0), TimeEntry(0))),
            wanted=wanted,
            clock=context.clock,
        )

    def _stage_task(
        self,
        job: TaskJob,
        listed: Broadcast[Mapping[str, ListedFiles]] | None,
        budget: EpochBudget,
        batch: BatchProgress | None,
        in_one_task: bool,
        stage: Stage,
        number: int,
    ) -> StageTask:
        context, shards = self._context, self._state.shards
        uid = stage.operator.uid if stage.operator is not None else ""
        passes = batch.of_operator(uid) if batch is not None else ()
        # A shard may be visited for other reasons than due work: it was never visited, or its state becomes files.
        # A table is given whole, whatever an earlier epoch of the batch did.
        is_table = uid in context.pipeline.makes_tables
        was_done = stage.operator is not None and not is_table and did_due(stage.operator, batch)
        return StageTask(
            job=job.of_operator(uid),
            stage=number,
            operator=stage.operator,
            entry=next((e for e in context.entries if e.uid == uid), None),
            sinks=tuple(context.sinks[name] for name in stage.sinks),
            written=stage.written,
            sides=stage.sides,
            versions=shards.versions.get(uid, UNKNOWN_VERSIONS),
            trusted=shards.trusted.get(uid, frozenset()),
            emit=stage.emit,
            accumulator=self._accumulator,
            committed=shards.committed.get(uid, UNKNOWN_VERSIONS),
            pending=shards.pending.get(uid, frozenset()),
            listed=listed,
            passes=passes,
            unaggregated=arrow_schema(stage.input) if passes and stage.partial is not None else None,
            needed_rows=self._state.needed_rows,
            budget=replace(budget.stages.get(uid, NO_LIMITS), due_was_done=was_done),
            one_task=self._single_task_limits() if in_one_task else None,
        )

    def _single_task_limits(self) -> SingleTaskLimits:
        """Return the limits of one task for all shards. A task for a single shard spills to the host's disk when it
        would hold more than its bytes; the one for all shards does not spill."""
        return replace(LIMITS, bytes_max=min(LIMITS.bytes_max, self._context.settings.task_bytes_max))

    def _share_listing(self) -> Broadcast[Mapping[str, ListedFiles]] | None:
        files = self._state.files
        listed = files.of_tasks() if files is not None else {}
        return self._spark.broadcast(listed) if listed else None

    def _flushed_files(self) -> ShardFilesEntry | None:
        """Return the listing that no manifest names yet, if one was written since the newest checkpoint.

        Shards that changed after it are pending, and do not read it.
        """
        entry = self._state.files.flushed if self._state.files is not None else None
        return entry if entry != self._committer.last.shards else None


def _give_up(listed: Broadcast[Any]) -> None:
    """Remove a listing from the executors. Only tasks of an action that is over can still ask for it."""
    try:
        listed.destroy()
    except Exception:
        # The session may have ended, which also ends the run; the listing was removed with it.
        _LOG.info("the listing of files that tasks were given could not be taken back", exc_info=True)
