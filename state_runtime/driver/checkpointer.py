"""The checkpoint of a run's driver: pending changes become a segment, a manifest, and then output visible to readers.

`commit`    the pending changes, folded and packed into one segment; then the manifest, create-if-absent of the next
            snapshot: from here on the epochs have happened
`publish`   sinks give staged output its final name; that of a sink that is away waits (driver/waiting_outputs.py)

They are the steps 6 and 7 of an epoch (driver/epoch_line.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pyspark.sql import SparkSession

from state_runtime.base import faults
from state_runtime.base.actor import Actor
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidPipeline, StillstateError
from state_runtime.base.patience import patience
from state_runtime.base.progress import ALIGNMENT, Progress, together, with_times
from state_runtime.changelog.changes import only_parts
from state_runtime.changelog.merge_changes import fold_changes
from state_runtime.changelog.upload import Uploader
from state_runtime.changelog.writer import begin_segment
from state_runtime.driver.context import DriverContext
from state_runtime.driver.driver_state import DriverState
from state_runtime.driver.epoch import EpochTimes
from state_runtime.driver.file_index import carried_source_logs
from state_runtime.driver.interval import Interval, is_checkpoint_due, objects_of
from state_runtime.driver.left_output import refuse_left_output, withdraw_left_output
from state_runtime.driver.numbers import checkpoint_ms, waited
from state_runtime.driver.publishing import PublishedOutputs, publish_all
from state_runtime.driver.waiting_outputs import WaitingOutputs
from state_runtime.maintenance.gc.background import BackgroundCollection
from state_runtime.maintenance.retention.background import BackgroundRetention
from state_runtime.materialize import BackgroundMaterializer
from state_runtime.materialize.process import FoldProcess
from state_runtime.pipeline.output_owner import Claimant
from state_runtime.pipeline.sinks import Sink
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import LayerEntry, Manifest, SegmentEntry, ShardFilesEntry, StagedOutput
from state_runtime.snapshot.publication_log import is_published, record_published
from state_runtime.snapshot.shard_files import bottom_is_of_shape
from state_runtime.store import open_store
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["Checkpointer", "Committed"]

_LOG = logging.getLogger(__name__)

# A leader that moves, or a database that starts again, is often back by then.
_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A manifest that was just created, and what publishing needs.

    Attributes:
        previous: the manifest before it.
        interval: the interval that it made durable.
        numbers, times, phases: of the epoch that ended in it, until now.
        durable_s: monotonic.
    """

    manifest: Manifest
    previous: Manifest
    interval: Interval
    numbers: Progress
    times: EpochTimes
    phases: Mapping[str, float]
    durable_s: float


class Checkpointer:
    """Makes the pending changes of a run durable. Not thread-safe: called under the driver's lock.

    Attributes:
        is_committing: the create of a manifest was tried and its outcome is not known yet: nothing may be undone.
        materializer: folds beside the epochs.
        retention: lets old checkpoints expire beside the epochs.
        collection: removes unneeded objects, once a day.
        waiting: staged output of sinks that are away.
    """

    def __init__(
        self,
        context: DriverContext,
        committer: Committer,
        state: DriverState,
        uploader: Uploader,
        is_catching_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            is_catching_up: whether the job processes the backlog from before its start, so that other work waits.
        """
        self._is_catching_up = is_catching_up
        self._context = context
        self._committer = committer
        self._state = state
        self._uploader = uploader
        # Complete numbers of the newest checkpoint of this run; its manifest has them without the final times.
        self._previous: Progress | None = None
        # The newest checkpoint of this run; its output is published, but for what waits.
        self._published: Manifest | None = None
        self._folding = _fold_process(context, committer)
        self.materializer = BackgroundMaterializer(
            context.root,
            context.settings,
            context.ids,
            context.clock,
            self._folding.fold if self._folding is not None else None,
            committer.ownership.check,
        )
        self.retention = BackgroundRetention(
            context.root, context.settings, context.ids, context.clock, committer.ownership
        )
        term = committer.term
        self.collection = BackgroundCollection(
            context.root,
            context.settings,
            context.ids,
            committer.clock,
            committer.ownership,
            f"{term.host}:{term.pid}",
        )
        self.waiting = WaitingOutputs(
            self._publish_what_waited,
            committer.ownership.check,
            context.clock,
            bytes_max=context.settings.checkpoint.pending_output_bytes_max,
        )
        self.is_committing = False

    def publish_pending(self, spark: SparkSession) -> None:
        """Publish the output that the newest snapshot names, unless it is published; idempotent. A run calls this first
        after fencing.

        Before it, output that fenced runs staged and never committed is removed: no manifest can name it any more.
        Behind it, output of epochs that the job went back behind is, where a sink takes it out of its place.

        Raises:
            InvalidConfiguration, InvalidPipeline: see driver/left_output.py.
            SnapshotInUse: another job root stages under the same names; nothing was published or removed.
            MissingFile: see the sinks.
            Unavailable: a sink is away. A start needs every sink: whose its place is, and which epochs it has, must be
                known before the first epoch gets its number.
        """
        context, last, term = self._context, self._committer.last, self._committer.term
        claimant = Claimant(
            job=context.job_name,
            root=context.root,
            newest=last,
            host=term.host,
            run_uid=term.run_uid,
            open_root=lambda url: open_store(url, context.storage_options),
            clock=context.clock,
            take=context.take_output,
        )
        # All sinks are checked before one of them changes anything.
        since_terms = {name: context.pipeline.sinks[name].own(spec, claimant) for name, spec in context.sinks.items()}
        refuse_left_output(context, last.left_epochs)
        for name, spec in context.sinks.items():
            named = {f.staged for output in last.outputs if output.sink == name for f in output.files}
            spec.remove_abandoned(term.term, named, since_terms[name])
        if not is_published(context.root, last.outputs):
            done = publish_all(
                last.outputs,
                self._sink_of,
                lambda sink, output: sink.publish_again(context.sinks[output.sink], output, spark),
                context.clock,
            )
            for left in done.left.values():
                raise left.error
            record_published(context.root, last.outputs)
        # Behind the removal: a run that wakes up now finds nothing to publish. And behind the output that waited: a
        # table that knows a newer epoch would pass over it.
        withdraw_left_output(context, last.left_epochs, Actor(context.clock, context.ids))
        self._published = None
        if self._state.files is None:
            self.materializer.look(last)

    def close(self, fold_timeout_s: float) -> None:
        """Wait for a fold up to the timeout, then end it. Also record that output is published, for a start that has
        another output folder or none."""
        self.waiting.close(fold_timeout_s)
        self._leave_word()
        self.materializer.join(fold_timeout_s)
        self.retention.join(fold_timeout_s)
        self.collection.join(0)
        if self._folding is not None:
            self._folding.close()

    def is_due(self) -> bool:
        """Return whether a checkpoint is due after the newest epoch, or now."""
        return is_checkpoint_due(self._state.interval, self._context.settings, self._context.clock.monotonic_s())

    def flush(self, *, lists_rows: bool = False) -> int:
        """Write the changes in memory as one segment, folded, and rows in flight as another one. Return the bytes
        written.

        Args:
            lists_rows: the second segment lists all rows in flight, as a manifest needs it.

        Raises:
            StoreUnavailable, OutcomeUnknown: the run ends; no manifest names the written objects.
        """
        state, context = self._state, self._context
        snapshot_id = self._committer.last.snapshot_id + 1
        begin = partial(
            begin_segment,
            context.root,
            job_uid=self._committer.info.uid,
            term=self._committer.term.term,
            snapshot_id=snapshot_id,
            ids=context.ids,
            uploader=self._uploader,
        )
        interval, batch = state.interval, state.batch
        # Rows that were processed before they were written need not be written.
        rows = only_parts(interval.rows, batch.needed if batch is not None else frozenset())
        is_listed = batch is None or not batch.passes or bool(batch.listed_in)
        passes = batch.passes if batch is not None and lists_rows and not is_listed else ()
        begun = begin(fold_changes(interval.changes, context.settings.compression))
        rows_begun = begin(rows, passes=passes)
        segment = begun.result() if begun is not None else None
        rows_segment = rows_begun.result() if rows_begun is not None else None
        state.flushed(segment)
        if rows_begun is not None and rows_segment is not None:
            state.rows_flushed(rows_segment, rows_begun.parts, listed=bool(passes))
        if state.files is not None:
            term = self._committer.term.term
            state.listing_written(
                state.files.written(context.root, term=term, snapshot_id=snapshot_id, ids=context.ids)
            )
        return sum(s.total_bytes for s in (segment, rows_segment) if s is not None)

    def commit_alone(self, spark: SparkSession) -> Progress:
        """Make a checkpoint without an epoch that ends in it. Its numbers are those of an otherwise empty epoch."""
        interval = self._state.interval
        latest = interval.numbers or Progress()
        nothing = Progress(
            snapshot_id=latest.snapshot_id,
            batch_id=latest.batch_id,
            timestamp_ms=latest.timestamp_ms,
            state_rows=latest.state_rows,
            watermark_ms=latest.watermark_ms,
            epoch=interval.head.epoch,
            epochs=0,
        )
        times = EpochTimes.of_nothing(self._context.clock.monotonic_s())
        return self.publish(self.commit(nothing, times), spark)

    def commit(self, numbers: Progress, times: EpochTimes) -> Committed:
        """Make everything since the newest manifest durable.

        Args:
            numbers, times: of the epoch that ends here; those of earlier epochs are in the interval.
        """
        context, state, last = self._context, self._state, self._committer.last
        waited_ms = self._waited_ms(times)
        segment_bytes = self.flush(lists_rows=True)
        segment_s = context.clock.monotonic_s()
        faults.reach("segment-written")

        interval = state.interval
        layers, segments, files = self._below()
        draft = replace(
            interval.head,
            kind="checkpoint",
            layers=layers,
            shards=files,
            segments=segments,
            outputs=(*self.waiting.named, *interval.outputs),
            versions={uid: versions.encode() for uid, versions in state.shards.versions.items()},
            open_batch=state.batch.entry() if state.batch is not None else None,
            previous=self._previous,
        )
        numbers = replace(
            numbers,
            segment_bytes=numbers.segment_bytes + segment_bytes,
            upload_attempts=numbers.upload_attempts + self._uploader.take().attempts,
            log_bytes=draft.log_bytes,
            log_segments=len(draft.segments),
            table_bytes=draft.total_bytes - draft.log_bytes,
            materializations=self.materializer.completed,
            materialization_failures=self.materializer.failures_in_a_row,
        )
        phases, numbers = times.phases, waited(numbers, waited_ms)
        if waited_ms:
            phases[ALIGNMENT] = waited_ms
        phases["segment"] = (segment_s - times.processed_s) * 1000 + times.flushed_ms
        so_far = self._timed(numbers, times, phases)
        faults.reach("before-manifest")
        objects = self._uploaded(interval, draft)
        manifest = self._committer.prepare(_with_numbers(draft, together(interval.numbers, so_far)), objects)
        # Set only here: a failed create may have happened, while a failed read has changed nothing.
        self.is_committing = True
        committed = self._committer.create(manifest)
        manifest_s = context.clock.monotonic_s()
        numbers = self._timed(numbers, times, phases)
        faults.reach("manifest-written")

        state.checkpointed(committed, manifest_s)
        self.is_committing = False
        self.materializer.settled(committed)
        phases["manifest"] = (manifest_s - segment_s) * 1000
        return Committed(
            manifest=committed,
            previous=last,
            interval=interval,
            numbers=numbers,
            times=times,
            phases=phases,
            durable_s=manifest_s,
        )

    def publish(self, done: Committed, spark: SparkSession) -> Progress:
        """Make the output of a manifest that this run just created visible; then notify the work beside the epochs.

        Returns:
            The complete numbers of the checkpoint.
        """
        context = self._context
        faults.reach("before-publish")
        took_ms = self._publish_or_wait(done.interval.outputs, spark).took_ms
        self._published = done.manifest
        for output in done.previous.outputs:
            # What the newest manifest names may wait for its sink. Staged files of a sink that the pipeline no longer
            # has are left to garbage collection.
            if output.sink in context.sinks and output not in done.manifest.outputs:
                context.pipeline.sinks[output.sink].settle(context.sinks[output.sink], output)
        published_s = context.clock.monotonic_s()
        faults.reach("published")
        if self._state.files is None:
            self.materializer.start_if_due(done.manifest, can_wait=self._is_catching_up())
        self.retention.committed(done.manifest)
        self.collection.committed()
        of_sinks = {f"publish {name}": ms for name, ms in took_ms.items()} if len(took_ms) > 1 else {}
        phases = {**done.phases, "publish": (published_s - done.durable_s) * 1000, **of_sinks}
        complete = with_times(done.numbers, (published_s - done.times.started_s) * 1000, phases)
        self._previous = together(done.interval.numbers, complete)
        return replace(complete, epochs=self._previous.epochs)

    def _publish_or_wait(self, outputs: Sequence[StagedOutput], spark: SparkSession) -> PublishedOutputs:
        """Publish an interval's output; let that of sinks that are away wait."""
        context, waiting = self._context, self.waiting
        behind: dict[str, list[StagedOutput]] = {}
        for output in outputs:
            if waiting.is_away(output.sink):
                behind.setdefault(output.sink, []).append(output)
        # A sink may be back by now. Then nothing is before this output.
        late = {name for name, own in behind.items() if waiting.add(name, own)}
        done = publish_all(
            [output for output in outputs if output.sink not in late],
            self._sink_of,
            partial(self._publish_now, spark),
            context.clock,
        )
        for name, left in done.left.items():
            if not context.settings.checkpoint.pending_output_bytes_max:
                raise left.error
            waiting.begin(name, left.outputs, left.error)
        return done

    def _publish_now(self, spark: SparkSession, sink: Sink, output: StagedOutput) -> None:
        """Publish output for the first time. Epochs wait for it, so it is not tried for long."""
        can_wait = self._context.settings.checkpoint.pending_output_bytes_max > 0
        with patience(_PATIENCE_S if can_wait else float("inf")):
            sink.publish(self._context.sinks[output.sink], output, spark)

    def _publish_what_waited(self, output: StagedOutput) -> None:
        """Publish output in the thread of its sink. Such sinks have no Python of the user's, and need no session."""
        with patience(_PATIENCE_S):
            self._sink_of(output).publish_again(self._context.sinks[output.sink], output, None)

    def remove(
        self, acknowledged: Sequence[Acknowledgement], interval: Interval | None = None, staged_of: int | None = None
    ) -> None:
        """Remove output and changelog objects that no manifest names or ever will, as far as the stores answer.

        So a job that fails repeatedly does not fill its store. Objects of a killed driver stay: the next run removes
        the staged output, garbage collection the rest.

        Args:
            staged_of: an epoch that has not happened and whose tasks could not report the output that they staged.
        """
        context = self._context
        staged = [(s.sink, f.staged) for a in acknowledged for s in a.staged for f in s.files]
        objects = objects_of([changes for a in acknowledged for changes in (a.changes, a.kept)])
        if interval is not None:
            staged += [(o.sink, f.staged) for o in interval.outputs for f in o.files]
            objects += [*interval.uploaded, *(s.path for s in interval.segments)]
        try:
            for sink, path in staged:
                context.sinks[sink].store().delete(path)
            for path in objects:
                context.root.delete(path)
            if staged_of is not None:
                for spec in context.sinks.values():
                    spec.remove_epoch(self._committer.term.term, staged_of)
        except (StillstateError, OSError):
            # They are unreachable and do no harm; the original error is the one to report.
            _LOG.warning("what a failed epoch wrote could not be removed", exc_info=True)

    def _below(self) -> tuple[tuple[LayerEntry, ...], tuple[SegmentEntry, ...], ShardFilesEntry | None]:
        """Return the part of the state that the next manifest names: layers, segments, files of shards."""
        last, pending, files = self._committer.last, self._state.interval.segments, self._state.files
        if files is None:
            base = self.materializer.take(last)
            return base.layers, (*base.segments, *pending), base.shards
        in_shape = bottom_is_of_shape(last, self._context.parallelism)
        root, ids = self._context.root, self._context.ids
        return (*carried_source_logs(root, last, pending, in_shape=in_shape, ids=ids), files.entry)

    def _uploaded(self, interval: Interval, draft: Manifest) -> set[str]:
        """Return the objects that a manifest is the first to reference, and only indirectly."""
        files, record = self._state.files, self.materializer.record_of(draft)
        return {*interval.uploaded, *(files.uploaded if files is not None else ()), *([record] if record else [])}

    def _waited_ms(self, times: EpochTimes) -> float:
        """Return how long the checkpoint that begins now has waited for the rows of the epoch."""
        if times.last_row_at_ms is None:
            return 0.0
        now_s = self._context.clock.monotonic_s()
        return max(0.0, (now_s - times.due_s) * 1000 - self._since_last_row_ms(times, now_s))

    def _since_last_row_ms(self, times: EpochTimes, now_s: float) -> float:
        return checkpoint_ms(
            times.last_row_at_ms or 0,
            self._context.clock.now_ms(),
            own_ms=(now_s - times.processed_s) * 1000,
            epoch_ms=(now_s - times.started_s) * 1000,
        )

    def _timed(self, numbers: Progress, times: EpochTimes, phases: Mapping[str, float]) -> Progress:
        """Return the numbers of an epoch with its times, as if its checkpoint became durable now."""
        durable_s = self._context.clock.monotonic_s()
        took_ms = self._since_last_row_ms(times, durable_s)
        return replace(with_times(numbers, (durable_s - times.started_s) * 1000, phases), checkpoint_ms=took_ms)

    def _leave_word(self) -> None:
        """Record that the newest output is published, but only while this run is the newest: a folder that was removed
        or moved while the run slept must not get a file again."""
        published, root = self._published, self._context.root
        if published is None or self.waiting.named:
            return
        try:
            newest = Catalog.of_root(root, self._context.clock).latest()
            if newest is not None and newest.commit_id == published.commit_id:
                record_published(root, published.outputs)
        except (StillstateError, OSError):
            # The next start asks the sinks.
            _LOG.warning("it could not be noted that the output of the newest snapshot is published", exc_info=True)

    def _sink_of(self, output: StagedOutput) -> Sink:
        sink = self._context.pipeline.sinks.get(output.sink)
        if sink is None:
            raise InvalidPipeline(
                f"the newest snapshot has unpublished output of sink {output.sink!r}, which the pipeline no longer "
                "has. Start the job once with that sink, so that its output is published, then remove it"
            )
        return sink


def _with_numbers(draft: Manifest, numbers: Progress) -> Manifest:
    """Add the numbers to a draft. Those of rows in flight are only in manifests that have such rows: earlier versions
    can read all other manifests."""
    if draft.open_batch is not None:
        return replace(draft, progress=numbers)
    previous = replace(draft.previous, inflight=None, spilled_bytes=0) if draft.previous is not None else None
    return replace(draft, progress=replace(numbers, inflight=None, spilled_bytes=0), previous=previous)


def _fold_process(context: DriverContext, committer: Committer) -> FoldProcess | None:
    """Return a process that folds; None if the run's store or clock exist in this process only (tests), or if nothing
    is folded here."""
    settings = context.settings
    here_only = context.store_url.startswith("memory:") or context.clock is not SYSTEM_CLOCK
    folds = settings.materialization.by == "driver" or settings.materialization.driver_takes_over_after_s
    if here_only or not folds or settings.changelog == "off":
        return None
    url = f"{context.store_url.rstrip('/')}/{context.job_name}"
    return FoldProcess(context.root, url, context.storage_options, settings, committer.ownership)
