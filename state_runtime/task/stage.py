"""The function that runs in a Spark task: restore → process → log → acknowledge.

One *stage* is a stateful operator and the sinks that are attached directly to its output, or only sinks. It runs inside
`mapInArrow`: batches of one shard in, batches of the operator's output out. When the input is drained and the output
produced, the task sends an acknowledgement to the driver.

Acknowledgements travel as updates of a Spark accumulator: Spark delivers them with the success of the task that made
them, before the action returns, through any stateless code that a user puts between two operators (a filter or an
aggregation there would swallow acknowledgements that travel as rows). See docs/design/0002-acknowledgements.md.

No reader sees the objects that a task writes until a manifest names them. So an attempt may die, run twice, or run
beside another at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyspark import TaskContext

from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError
from state_runtime.base.heap import freeze_heap
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import KIB, MIB
from state_runtime.changelog.changes import TaskChanges
from state_runtime.changelog.inflight import InflightPass, RowsPart, left_of_shard
from state_runtime.changelog.parts_writer import PartsWriter
from state_runtime.changelog.rows import encode_columns, fit_rows
from state_runtime.pipeline.staging import SinkSpec, Staging
from state_runtime.processors.builtin.partial_rows import are_partial
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.processors.renamed import Renamed
from state_runtime.processors.side_outputs import SideOutputs
from state_runtime.snapshot.manifest import OperatorEntry
from state_runtime.snapshot.shard_versions import NO_VERSION, UNKNOWN_VERSIONS, ShardVersions
from state_runtime.spark.errors import marked
from state_runtime.spark.executor import executor_id
from state_runtime.state.backend import LocalCopyUnusable
from state_runtime.state.changed_rows import on_top
from state_runtime.state.reader import StateReader
from state_runtime.task.acknowledgement import EMPTY_TASK, Acknowledgement
from state_runtime.task.gathered import gather, readable, row_bytes_of
from state_runtime.task.held_changes import HeldChanges
from state_runtime.task.host_rows import HostRows
from state_runtime.task.keep_rows import begin_keeping
from state_runtime.task.listed_files import ListedFiles
from state_runtime.task.persist import Persisted, Step, changes_writer, persist, uploader
from state_runtime.task.shard_access import ShardAccess, TaskJob, rows_folder
from state_runtime.task.single_task import SingleTaskLimits, by_shard
from state_runtime.task.slicing import NO_LIMITS, Slicer, StageBudget
from state_runtime.task.sorted_input import KeyColumns, RowPass, SortedRows, StoredPass

__all__ = ["Shared", "StageTask"]

# The default of Spark's own spark.sql.execution.arrow.maxRecordsPerBatch.
_EMITTED_ROWS = 10_000
# Rows for a sink that a task gives to the driver, in place of a file: of one task, and of all tasks of an operator. The
# tasks of a source are not counted beforehand, and may be a thousand.
_SENT_BYTES = 256 * KIB
_SENT_BYTES_OF_SINK = 4 * MIB
_SENT_BYTES_OF_SOURCE = 16 * KIB


class Shared(Protocol):
    """The data of an epoch's tasks that each executor has once: Spark's `Broadcast`."""

    @property
    def value(self) -> Mapping[str, ListedFiles]: ...


@dataclass(frozen=True)
class StageTask:
    """The function that `mapInArrow` runs. Pickled once per epoch and stage.

    Attributes:
        operator: None for a stage of sinks only.
        entry: describes how its state is stored: the base snapshot may have it as it was before a change.
        versions: local versions of the operator's shards at the epoch's start.
        trusted: the shards whose version this run wrote or verified; any other version comes from an earlier run and
            must be verified before use.
        emit: whether a later step of the pipeline reads the output.
        accumulator: takes acknowledgements to the driver.
        committed: like `versions`, at the newest checkpoint: older where several epochs end in one.
        pending: the shards of which the driver's memory holds changes that the primary store does not have.
        listed: with the changelog off the driver's listing of all shards, by operator uid; None if there is no
            listing.
        passes: rows of all shards that earlier epochs left; each range belongs to one shard.
        unaggregated: the columns for rows of earlier epochs, if Spark aggregates the rows of this epoch before the
            shuffle. None if it does not, or if no rows wait: then such rows are converted to the columns of this
            epoch's rows.
        needed_rows: digests of the parts that these or the newest checkpoint name.
        budget: limits of its tasks in this epoch.
        written: what the sinks get of the operator's output; None: all.
        sides: the side outputs of the operator that something reads; None: its main output alone.
        one_task: the limits, if the one task of the stage has the rows of all shards (task/single_task.py); None: each
            task has the rows of one shard.
    """

    job: TaskJob
    stage: int
    operator: Operator | None
    entry: OperatorEntry | None
    sinks: tuple[SinkSpec, ...]
    versions: ShardVersions
    trusted: frozenset[int]
    emit: bool
    accumulator: Any
    committed: ShardVersions = UNKNOWN_VERSIONS
    pending: frozenset[int] = frozenset()
    listed: Shared | None = None
    passes: tuple[InflightPass, ...] = ()
    unaggregated: pa.Schema | None = None
    needed_rows: frozenset[str] = frozenset()
    budget: StageBudget = NO_LIMITS
    one_task: SingleTaskLimits | None = None
    written: Renamed | None = None
    sides: SideOutputs | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_heap()
        try:
            faults.reach("task-started")
            if self.operator is None:
                context = TaskContext.get()
                yield from self._run_sinks(batches, context.partitionId() if context is not None else 0)
            else:
                for of_shard in self._by_shard(batches):
                    yield from self._run_operator(self.operator, of_shard)
        except StillstateError as error:
            raise marked(error) from error

    def _run_sinks(self, batches: Iterable[pa.RecordBatch], shard: int) -> Iterator[pa.RecordBatch]:
        attempt = SYSTEM_IDS.short()
        stagings = self._stagings(shard, attempt, _SENT_BYTES_OF_SOURCE)
        rows = row_bytes = 0
        for batch in batches:
            rows += batch.num_rows
            row_bytes = max(row_bytes, row_bytes_of(batch))
            for staging in stagings:
                staging.write(batch)
            if self.emit:
                yield batch
        staged = tuple(staging.finish() for staging in stagings)
        self._acknowledge(
            Acknowledgement(
                epoch=self.job.epoch,
                stage=self.stage,
                shard=shard,
                input_rows=rows,
                row_bytes=row_bytes,
                staged=staged,
            )
        )

    def _stagings(self, shard: int, attempt: str, sent_bytes_max: int) -> list[Staging]:
        term, epoch = self.job.term, self.job.clock.epoch
        return [sink.open(term, epoch, shard, attempt, sent_bytes_max=sent_bytes_max) for sink in self.sinks]

    def _by_shard(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Iterable[pa.RecordBatch]]:
        """Yield the input of each shard of this task, in their order."""
        if self.one_task is None:
            yield batches
        else:
            yield from by_shard(batches, self.job.parallelism, self.one_task, SYSTEM_CLOCK)

    def _run_operator(self, operator: Operator, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        began_s, began_ms = SYSTEM_CLOCK.monotonic_s(), SYSTEM_CLOCK.now_ms()
        keys = KeyColumns(operator.key_columns, operator.key_schema)
        folder = rows_folder(self.job, operator.uid)
        rows = readable(batches, operator.uid)
        given = gather(rows, keys, self.job.parallelism, self.job.settings.task_bytes_max, folder, SYSTEM_IDS)
        if given is None:
            # Nothing to do for this shard; its state stays at its version, unread.
            self._acknowledge(Acknowledgement(epoch=self.job.epoch, stage=self.stage, shard=EMPTY_TASK))
            return
        shard, rows_max = given.shard, given.slice_rows_max
        before = self.versions[shard] if self.versions else NO_VERSION
        attempt = SYSTEM_IDS.short()
        access = ShardAccess(
            self.job, operator, self.entry, shard, committed=self.committed, pending=shard in self.pending
        )
        version = access.open(before, verify=shard not in self.trusted)
        version = access.tidied(attempt, before, version)
        host = self._host_rows(folder, access)
        emitted = False
        while True:
            stagings = self._stagings(shard, attempt, min(_SENT_BYTES, _SENT_BYTES_OF_SINK // self.job.parallelism))
            passes = [*self._stored_passes(access, host, keys, given.empty), given.begin()]
            slicer = Slicer(
                passes, self.budget, SYSTEM_CLOCK, shard=shard, began_s=began_s, began_ms=began_ms, rows_max=rows_max
            )
            result = operator.process(slicer.slices(), version, self.job.clock, shard, given.initial)
            held = HeldChanges(folder, SYSTEM_IDS, operator.uid, access.hash_range, self._sends(operator.uid, access))
            result.hold = held.keep
            try:
                for batch in result.outputs if self.sides is None else self.sides.of(result):
                    for staging in stagings:
                        staging.write(batch if self.written is None else self.written.of(batch))
                    if self.emit and batch.num_rows:
                        emitted = True
                        yield from _in_pieces(batch)
                break
            except LocalCopyUnusable:
                held.abandon()
                # A block that was not checked before is damaged. Output that was passed on cannot be withdrawn: then
                # the task fails, and the next run verifies.
                if emitted or access.from_primary:
                    raise
                attempt = SYSTEM_IDS.short()
                version = access.restore(before, local_failed=True, local=False)
        staged = tuple(staging.finish() for staging in stagings)
        faults.reach("task-processed")
        processed_at_ms = SYSTEM_CLOCK.now_ms()
        changed = {state: batch for state, batch in result.changes.items() if batch.num_rows}
        step = Step(
            attempt=attempt,
            before=before,
            base=version,
            changes=changed,
            due_taken=result.due_taken,
            restored=access.numbers.kind == "primary",
            listed=self._listed(operator.uid, shard),
            writer=held.writer,
            sent=frozenset(held.sent),
        )
        left = {p.epoch or self.job.clock.epoch: p.left() for p in passes}
        # Due work that was not done stays due.
        due_until = self.job.clock if slicer.did_due else self.job.clock.held
        kept, persisted = self._persist(operator, access, host, passes[-1], step)
        self._acknowledge(
            Acknowledgement(
                epoch=self.job.epoch,
                stage=self.stage,
                shard=shard,
                version=persisted.version,
                input_rows=given.input_rows,
                partial_rows=given.partial_rows,
                row_bytes=given.row_bytes,
                rows_added=result.rows_added,
                changed_rows=sum(batch.num_rows for batch in changed.values()),
                late_rows=result.late_rows,
                next_due_ms=_next_due(operator, on_top(version, changed, result.due_taken), due_until),
                changes=persisted.changes,
                files=persisted.files,
                staged=staged,
                restored=access.numbers.kind,
                restore_ms=access.numbers.ms,
                restored_bytes=access.numbers.bytes,
                local_failed=access.numbers.local_failed or persisted.local_failed or host.has_failed,
                processed_rows=slicer.rows_done,
                left=left,
                kept=kept,
                kept_columns=encode_columns(given.empty.schema) if kept.parts else "",
                slices=slicer.count,
                process_s=slicer.took_s,
                inflight_read_bytes=host.bytes_read,
                spilled_bytes=given.spilled_bytes,
                began_at_ms=began_ms,
                processed_at_ms=processed_at_ms,
            )
        )
        faults.reach("task-acknowledged")

    def _persist(
        self, operator: Operator, access: ShardAccess, host: HostRows, own: RowPass, step: Step
    ) -> tuple[TaskChanges, Persisted]:
        """Make a shard's step durable, and the rows of this epoch that it leaves; both uploads run in parallel."""
        if not own.rows_left:
            return TaskChanges(), persist(self.job, operator, access, step)
        uploads = uploader(self.job.settings.upload)
        rows = begin_keeping(self.job, operator.uid, access, host, own, uploads, SYSTEM_IDS)
        try:
            persisted = persist(self.job, operator, access, step)
        except BaseException:
            rows.abandon()
            raise
        return rows.result(), persisted

    def _sends(self, operator: str, access: ShardAccess) -> Callable[[], PartsWriter] | None:
        """Return what begins to send changes during processing; without a changelog files are sent at the end."""
        if self.job.settings.changelog == "off":
            return None
        return lambda: changes_writer(self.job, operator, access)

    def _host_rows(self, folder: Path, access: ShardAccess) -> HostRows:
        keeps = self.job.settings.local_recovery.enabled
        host = HostRows(folder, self.job.epoch, lambda: access.root, SYSTEM_CLOCK, SYSTEM_IDS, keeps=keeps)
        host.remove_outdated(self.needed_rows)
        return host

    def _stored_passes(
        self, access: ShardAccess, host: HostRows, keys: KeyColumns, empty: pa.RecordBatch
    ) -> list[RowPass]:
        """Return the passes that earlier epochs left for the shard, oldest first."""

        wanted = empty.schema if not are_partial(empty) or self.unaggregated is None else self.unaggregated

        def read(held: RowsPart) -> SortedRows:
            rows = host.read(held)
            return rows if are_partial(rows.rows) else replace(rows, rows=fit_rows(rows.rows, wanted))

        low, high = access.hash_range
        found: list[RowPass] = []
        for passed in sorted(self.passes, key=lambda p: p.epoch):
            ranges = left_of_shard(passed, low, high)
            if ranges:
                found.append(StoredPass(passed.epoch, passed.parts, ranges, read, keys, empty))
        return found

    def _listed(self, operator: str, shard: int) -> Mapping[str, str] | None:
        """Return the driver's listing of a shard; see `ListedFiles.paths`."""
        listed = self.listed.value.get(operator) if self.listed is not None else None
        return listed.paths(shard) if listed is not None else None

    def _acknowledge(self, acknowledgement: Acknowledgement) -> None:
        self.accumulator.add([replace(acknowledgement, executor=executor_id())])


def _in_pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in pieces for Spark: it works on one piece while the next is written, and little is left for it
    once the last row is processed."""
    for start in range(0, batch.num_rows, _EMITTED_ROWS):
        yield batch.slice(start, _EMITTED_ROWS)


def _next_due(operator: Operator, after: StateReader, clock: EpochClock) -> int | None:
    """Return when the operator must look at this shard again, whether or not rows come.

    Args:
        clock: due work is done up to this time.
    """
    timed = (name for name, schema in operator.state_schemas.items() if schema.time == "due")
    due_ms = min((due for due in map(after.next_due, timed) if due is not None), default=None)
    return None if due_ms is None else operator.wake_ms(due_ms, clock)
