"""What runs in a Spark task: restore → process → log → acknowledge.

One *stage* is a stateful operator and the sinks that hang directly on its output, or only sinks. It runs inside
`mapInArrow`: batches of one shard in, batches of the operator's output out. When the input is drained and the output
produced, the task hands an acknowledgement to the driver.

Acknowledgements travel as updates of a Spark accumulator: Spark delivers them with the success of the task that made
them, before the action returns, through any stateless code that a user puts between two operators (a filter or an
aggregation there would swallow acknowledgements that travel as rows). See docs/design/0002-acknowledgements.md.

Nothing that a task writes is visible to anyone until a manifest names it; so an attempt may die, run twice, or run
beside another at any point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError
from state_runtime.base.heap import freeze_heap_once
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.processors.builtin.partial_rows import rows_behind
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, Operator, RowSlice
from state_runtime.snapshot.local_versions import NO_VERSION, UNKNOWN_VERSIONS, LocalVersions
from state_runtime.snapshot.manifest import OperatorEntry
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN, WAKE_SEQUENCE
from state_runtime.spark.errors import marked
from state_runtime.spark.executor import executor_id
from state_runtime.state.backend import LocalCopyUnusable
from state_runtime.state.reader import StateReader
from state_runtime.state.table import concat
from state_runtime.task.acknowledgement import EMPTY_TASK, Acknowledgement
from state_runtime.task.listed_files import ListedFiles
from state_runtime.task.persist import Step, persist
from state_runtime.task.shard_access import ShardAccess, TaskJob

__all__ = ["Shared", "StageTask"]

_INTERNAL = (HASH_COLUMN, SHARD_COLUMN, SEQUENCE_COLUMN, INITIAL_COLUMN)

# As Spark's own spark.sql.execution.arrow.maxRecordsPerBatch has it.
_EMITTED_ROWS = 10_000


class Shared(Protocol):
    """What the tasks of an epoch look up in one copy for each executor: Spark's `Broadcast`."""

    @property
    def value(self) -> Mapping[str, ListedFiles]: ...


@dataclass(frozen=True)
class StageTask:
    """The function that `mapInArrow` runs. Pickled once per epoch and stage.

    Attributes:
        operator: None for a stage of sinks only.
        entry: how its stored state is read: the base snapshot may describe it as it was before a change.
        versions: local versions of the operator's shards at the epoch's start.
        trusted: the shards whose version this run wrote or verified; any other version comes from an earlier run and
            must be verified before use.
        emit: whether a later step of the pipeline reads the output.
        accumulator: takes acknowledgements to the driver.
        committed: like `versions`, at the newest checkpoint: older where several epochs end in one.
        pending: the shards of which the driver's memory holds changes that the primary store does not have.
        listed: with the changelog off what the driver's listing says of all shards, by operator uid; None if there is
            no listing.
    """

    job: TaskJob
    stage: int
    operator: Operator | None
    entry: OperatorEntry | None
    sinks: tuple[SinkSpec, ...]
    versions: LocalVersions
    trusted: frozenset[int]
    emit: bool
    accumulator: Any
    committed: LocalVersions = UNKNOWN_VERSIONS
    pending: frozenset[int] = frozenset()
    listed: Shared | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_heap_once()
        try:
            faults.reach("task-started")
            if self.operator is None:
                context = TaskContext.get()
                yield from self._run_sinks(batches, context.partitionId() if context is not None else 0)
            else:
                yield from self._run_operator(self.operator, batches)
        except StillstateError as error:
            raise marked(error) from error

    def _run_sinks(self, batches: Iterable[pa.RecordBatch], shard: int) -> Iterator[pa.RecordBatch]:
        attempt = SYSTEM_IDS.short()
        stagings = [sink.open(self.job.term, self.job.clock.epoch, shard, attempt) for sink in self.sinks]
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            for staging in stagings:
                staging.write(batch)
            if self.emit:
                yield batch
        staged = tuple(staging.finish() for staging in stagings)
        self._acknowledge(
            Acknowledgement(epoch=self.job.epoch, stage=self.stage, shard=shard, input_rows=rows, staged=staged)
        )

    def _run_operator(self, operator: Operator, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = concat([b for b in batches if b.num_rows], pa.schema([]))
        if rows.num_rows == 0:
            # Nothing to do for this shard; its state stays the version that it is, unread.
            self._acknowledge(Acknowledgement(epoch=self.job.epoch, stage=self.stage, shard=EMPTY_TASK))
            return
        # The rows say which shard this is. Spark's partition number does not, once user code unites two frames.
        shard = int(rows.column(SHARD_COLUMN)[0].as_py())
        before = self.versions[shard] if self.versions else NO_VERSION
        attempt = SYSTEM_IDS.short()
        access = ShardAccess(
            self.job, operator, self.entry, shard, committed=self.committed, pending=shard in self.pending
        )
        version = access.open(before, verify=shard not in self.trusted)
        version = access.tidied(attempt, before, version)
        grouped, initial = _split_rows(operator, rows)
        emitted = False
        while True:
            stagings = [sink.open(self.job.term, self.job.clock.epoch, shard, attempt) for sink in self.sinks]
            result = operator.process([RowSlice(grouped)], version, self.job.clock, shard, initial)
            try:
                for batch in result.outputs:
                    for staging in stagings:
                        staging.write(batch)
                    if self.emit and batch.num_rows:
                        emitted = True
                        yield from _in_pieces(batch)
                break
            except LocalCopyUnusable:
                # A block that nobody had looked at turned out damaged. What was handed on cannot be taken back: if
                # there is any, the task fails, and the next run verifies.
                if emitted or access.from_primary:
                    raise
                attempt = SYSTEM_IDS.short()
                version = access.restore(before, local_failed=True, local=False)
        staged = tuple(staging.finish() for staging in stagings)
        faults.reach("task-processed")
        behind = rows_behind(grouped.rows)
        processed_at_ms = SYSTEM_CLOCK.now_ms()
        changed = {state: batch for state, batch in result.changes.items() if batch.num_rows}
        persisted = persist(
            self.job,
            operator,
            access,
            Step(
                attempt=attempt,
                before=before,
                base=version,
                changes=changed,
                due_taken=result.due_taken,
                restored=access.numbers.kind == "primary",
                listed=self._listed(operator.uid, shard),
            ),
        )
        self._acknowledge(
            Acknowledgement(
                epoch=self.job.epoch,
                stage=self.stage,
                shard=shard,
                version=persisted.version,
                input_rows=grouped.rows.num_rows if behind is None else int(behind.sum()),
                partial_rows=0 if behind is None else grouped.rows.num_rows,
                rows_added=result.rows_added,
                changed_rows=sum(batch.num_rows for batch in changed.values()),
                late_rows=result.late_rows,
                next_due_ms=_next_due(operator, version.overlaid(changed, result.due_taken), self.job.clock),
                changes=persisted.changes,
                files=persisted.files,
                staged=staged,
                restored=access.numbers.kind,
                restore_ms=access.numbers.ms,
                restored_bytes=access.numbers.bytes,
                local_failed=access.numbers.local_failed or persisted.local_failed,
                processed_at_ms=processed_at_ms,
            )
        )
        faults.reach("task-acknowledged")

    def _listed(self, operator: str, shard: int) -> Mapping[str, str] | None:
        """What the driver's listing says of a shard; see `ListedFiles.paths`."""
        listed = self.listed.value.get(operator) if self.listed is not None else None
        return listed.paths(shard) if listed is not None else None

    def _acknowledge(self, acknowledgement: Acknowledgement) -> None:
        self.accumulator.add([replace(acknowledgement, executor=executor_id())])


def _in_pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """What is handed to Spark at a time: it works on one piece while the next is written, and on little once the last
    row is processed."""
    for start in range(0, batch.num_rows, _EMITTED_ROWS):
        yield batch.slice(start, _EMITTED_ROWS)


def _split_rows(operator: Operator, rows: pa.RecordBatch) -> tuple[GroupedRows, GroupedRows | None]:
    """The input rows and those of the initial state, each grouped by key; rows that only wake the shard are gone."""
    sequence = rows.column(SEQUENCE_COLUMN).to_numpy(zero_copy_only=False)
    first = rows.schema.get_field_index(INITIAL_COLUMN)
    if first < 0:
        keep = sequence != WAKE_SEQUENCE
        return _group(operator, rows if bool(keep.all()) else rows.filter(pa.array(keep))), None
    is_initial = rows.column(first).is_valid().to_numpy(zero_copy_only=False)
    data = rows.filter(pa.array((sequence != WAKE_SEQUENCE) & ~is_initial))
    initial = rows.filter(pa.array(is_initial))
    columns = dict(zip((f.name for f in initial.schema.field(first).type), initial.column(first).flatten()))
    columns |= {name: initial.column(name) for name in (HASH_COLUMN, SEQUENCE_COLUMN)}
    return _group(operator, data), _group(operator, pa.RecordBatch.from_pydict(columns))


def _group(operator: Operator, rows: pa.RecordBatch) -> GroupedRows:
    hashes = rows.column(HASH_COLUMN).to_numpy(zero_copy_only=False).view(np.uint64)
    sequence = rows.column(SEQUENCE_COLUMN).to_numpy(zero_copy_only=False)
    data = rows.drop_columns([name for name in _INTERNAL if name in rows.schema.names])
    return group_rows(data, hashes, sequence, operator.key_columns, operator.key_schema)


def _next_due(operator: Operator, after: StateReader, clock: EpochClock) -> int | None:
    """When the operator must look at this shard again, whether or not rows come."""
    timed = (name for name, schema in operator.state_schemas.items() if schema.time == "due")
    due_ms = min((due for due in map(after.next_due, timed) if due is not None), default=None)
    return None if due_ms is None else operator.wake_ms(due_ms, clock)
