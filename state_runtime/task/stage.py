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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError
from state_runtime.base.heap import freeze_heap_once
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.changelog.writer import TaskChanges
from state_runtime.pipeline.sinks import SinkSpec, StagedFiles
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.snapshot.manifest import OperatorEntry
from state_runtime.snapshot.shard_files import ShardFiles
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN, WAKE_SEQUENCE
from state_runtime.spark.errors import marked
from state_runtime.spark.executor import executor_id
from state_runtime.state.backend import LocalCopyUnusable
from state_runtime.state.reader import StateReader
from state_runtime.state.table import concat
from state_runtime.task.persist import Step, persist
from state_runtime.task.persist_files import PersistedFiles
from state_runtime.task.shard_access import NO_VERSION, ShardAccess, TaskJob

__all__ = ["EMPTY_TASK", "Acknowledgement", "StageTask"]

_INTERNAL = (HASH_COLUMN, SHARD_COLUMN, SEQUENCE_COLUMN, INITIAL_COLUMN)

EMPTY_TASK = -1

# As Spark's own spark.sql.execution.arrow.maxRecordsPerBatch has it.
_EMITTED_ROWS = 10_000


@dataclass(frozen=True)
class Acknowledgement:
    """What one attempt of one task did; the driver keeps one per stage and shard.

    Attributes:
        shard: `EMPTY_TASK` for a task without input: it touched no state, and nothing tells which shard it was.
        epoch: unique to the driver's attempt at the epoch, so that late ones of an earlier action are told apart.
        version: local version after the epoch; `NO_VERSION` if it could not be written.
        rows_added: live state rows gained.
        late_rows: input rows that came too late.
        next_due_ms: lower bound of when this shard must be visited next, rows or none; None: never.
        restored: where the state came from (`RestoreNumbers.kind`), how long that took, and what was read from the
            primary store.
        files: with the changelog off the shard's files, in place of `changes`.
        processed_at_ms: wall clock when the last row was processed and its output staged: what follows is the snapshot.
        executor: that ran the attempt (`copies.executor_id`).
    """

    epoch: str
    stage: int
    shard: int
    version: str
    input_rows: int
    rows_added: int
    changes: TaskChanges
    staged: tuple[StagedFiles, ...]
    restored: str  # "" | "local" | "stale" | "primary"
    local_failed: bool
    late_rows: int = 0
    next_due_ms: int | None = None
    processed_at_ms: int = 0
    restore_ms: float = 0.0
    restored_bytes: int = 0
    executor: str = ""
    files: PersistedFiles = field(default_factory=PersistedFiles)
    changed_rows: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether only the driver's memory has changes of the shard, or the way to those that the task uploaded."""
        return self.files.shard is not None or bool(self.changes.parts)


@dataclass(frozen=True)
class StageTask:
    """The function that `mapInArrow` runs. Pickled once per epoch and stage.

    Attributes:
        operator: None for a stage of sinks only.
        entry: how its stored state is read: the base snapshot may describe it as it was before a change.
        versions: local version ids of the operator's shards at the epoch's start, 16 characters each, joined.
        trusted: per shard "1" if this run wrote or verified that version, "0" if it comes from an earlier run and
            must be verified before use.
        emit: whether a later step of the pipeline reads the output.
        committed: like `versions`, at the newest checkpoint: older where several epochs end in one.
        listed: with the changelog off the files of the operator's shards, by shard.
        pending: per shard "1" if the driver's memory holds changes of it that the primary store does not have.
    """

    job: TaskJob
    stage: int
    operator: Operator | None
    entry: OperatorEntry | None
    sinks: tuple[SinkSpec, ...]
    versions: str
    trusted: str
    emit: bool
    accumulator: Any
    committed: str = ""
    pending: str = ""
    listed: Mapping[int, ShardFiles] = field(default_factory=dict)

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
            Acknowledgement(self.job.epoch, self.stage, shard, NO_VERSION, rows, 0, TaskChanges(), staged, "", False)
        )

    def _run_operator(self, operator: Operator, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = concat([b for b in batches if b.num_rows], pa.schema([]))
        if rows.num_rows == 0:
            # Nothing to do for this shard; its state stays the version that it is, unread.
            self._acknowledge(
                Acknowledgement(self.job.epoch, self.stage, EMPTY_TASK, NO_VERSION, 0, 0, TaskChanges(), (), "", False)
            )
            return
        # The rows say which shard this is. Spark's partition number does not, once user code unites two frames.
        shard = int(rows.column(SHARD_COLUMN)[0].as_py())
        before = self.versions[shard * 16 : shard * 16 + 16] or NO_VERSION
        attempt = SYSTEM_IDS.short()
        access = ShardAccess(
            self.job,
            operator,
            self.entry,
            shard,
            committed=self.committed,
            pending=self.pending[shard : shard + 1] == "1",
        )
        version = access.open(before, verify=self.trusted[shard : shard + 1] != "1")
        version = access.tidied(attempt, before, version)
        grouped, initial = _split_rows(operator, rows)
        emitted = False
        while True:
            stagings = [sink.open(self.job.term, self.job.clock.epoch, shard, attempt) for sink in self.sinks]
            result = operator.process(grouped, version, self.job.clock, shard, initial)
            try:
                for batch in result.outputs:
                    for staging in stagings:
                        staging.write(batch)
                    if self.emit and batch.num_rows:
                        emitted = True
                        yield from _in_pieces(batch)
                break
            except LocalCopyUnusable:
                # A block that nobody had looked at turned out damaged. What was handed on cannot be taken back, so then
                # the task fails, and the next run verifies.
                if emitted or access.from_primary:
                    raise
                attempt = SYSTEM_IDS.short()
                version = access.restore(before, local_failed=True, local=False)
        staged = tuple(staging.finish() for staging in stagings)
        faults.reach("task-processed")
        processed_at_ms = SYSTEM_CLOCK.now_ms()
        changed = {state: batch for state, batch in result.changes.items() if batch.num_rows}
        persisted = persist(
            self.job,
            operator,
            access,
            Step(
                attempt,
                before,
                version,
                changed,
                result.due_taken,
                access.numbers.kind == "primary",
                self.listed.get(shard),
            ),
        )
        self._acknowledge(
            Acknowledgement(
                self.job.epoch,
                self.stage,
                shard,
                persisted.version,
                grouped.rows.num_rows,
                result.rows_added,
                persisted.changes,
                staged,
                access.numbers.kind,
                access.numbers.local_failed or persisted.local_failed,
                result.late_rows,
                _next_due(operator, version.overlaid(changed, result.due_taken), self.job.clock),
                processed_at_ms,
                access.numbers.ms,
                access.numbers.bytes,
                files=persisted.files,
                changed_rows=sum(batch.num_rows for batch in changed.values()),
            )
        )
        faults.reach("task-acknowledged")

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
