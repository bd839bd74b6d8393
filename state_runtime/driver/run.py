"""One run of a job: term, fencing, heartbeat, Spark's query, and the end."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from state_runtime.base.errors import (
    CorruptData,
    Fenced,
    InvalidConfiguration,
    InvalidPipeline,
    ProcessEnded,
    StillstateError,
    StoreUnavailable,
    UnsupportedFormat,
)
from state_runtime.base.limits import MAX_PARALLELISM
from state_runtime.base.process_space import process_space
from state_runtime.base.progress import Progress
from state_runtime.base.trusted_clock import TrustedClock
from state_runtime.changelog.reader import stream_source_log
from state_runtime.driver.advance import Advance
from state_runtime.driver.context import DriverContext
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.heartbeat import Heartbeat
from state_runtime.driver.interval import has_intervals
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.driver.scratch import Scratch
from state_runtime.driver.source_quiet import LongQuiet, SourceQuiet, is_idle
from state_runtime.driver.start_position import StartPosition
from state_runtime.pipeline.columns_read import CORRUPT_COLUMN_CONF, without_unread
from state_runtime.pipeline.compatibility import reconcile, refuse_drained
from state_runtime.pipeline.compile import CompiledPipeline, refuse_other_output
from state_runtime.pipeline.inflight_fit import refuse_misfits
from state_runtime.pipeline.odd_times import changed_zone
from state_runtime.pipeline.plan import JobPlan
from state_runtime.pipeline.result_settings import refuse_other_settings, result_settings
from state_runtime.pipeline.source_names import SourceNumbers, source_numbers
from state_runtime.pipeline.source_position import COMPACT_INTERVAL, COMPACT_INTERVAL_CONF, SparkCheckpoint
from state_runtime.pipeline.sources import (
    OpenedSources,
    cleans_up,
    unrepeatable_source,
    unwatched,
    warn_of_files_passed_over,
    warn_of_patterns,
)
from state_runtime.pipeline.spark_settings import (
    SHUFFLE_PARTITIONS_CONF,
    TIME_ZONE_CONF,
    PieceBounds,
    shuffles_as_wide_as_the_job,
)
from state_runtime.pipeline.watermark import POLICY_SETTING, policy_of
from state_runtime.restore.private_local_dir import private_local_dir
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.fencing import refuse_if_live
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SourcePosition
from state_runtime.snapshot.term_files import RunState
from state_runtime.sources.files_lag import folder_lags
from state_runtime.sources.watch import SourceWatch, opened_lags
from state_runtime.spark.errors import cause_of, is_of_ended_java, typed_error
from state_runtime.spark.java_log import JavaWarnings, WarningBook
from state_runtime.spark.plans import scheme_of, stream_sources
from state_runtime.spark.probes import probe_internals
from state_runtime.store import Store
from state_runtime.task.shard_access import root_id

__all__ = ["BY_HAND", "Allowed", "JobRun", "RunResult", "StartedBy", "is_part_of_stop"]

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 30.0
_CLAIM_TIMEOUT_S = 60.0
_WARNINGS_INTERVAL_S = 1.0


@dataclass(frozen=True)
class StartedBy:
    """The cause of a run's start, the program that restarts it if it dies, and its settings; see `RunStatus`.

    Attributes:
        on_trial: whether the run is kept depends on its first checkpoint. It restores every shard in its first epoch,
            which also comes while its source is quiet.
    """

    cause: str = ""
    supervisor_pid: int = 0
    settings: tuple[tuple[str, str], ...] = ()
    on_trial: bool = False


BY_HAND = StartedBy()


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """The costly things that a run may do; see the arguments of `StreamingJob.run`."""

    takeover: bool = False
    dropped_state: bool = False
    drained: bool = False
    take_output: bool = False
    drop_inflight: bool = False
    session_settings: bool = False


@dataclass(frozen=True)
class RunResult:
    """How a run ended: "finished" (the source has an end), or "stopped" (a stop was requested)."""

    state: Literal["finished", "stopped"]
    last_snapshot_id: int
    epochs: int


@dataclass(frozen=True)
class CheckedRun:
    """A run whose pipeline was found to fit its sources, its settings and the newest snapshot; nothing was written.

    Attributes:
        before: the snapshot to resume from, as it was found; None if there is none yet.
        fit: gives the operators' entries for a snapshot to resume from.
        session: the settings that change results.
    """

    allowed: Allowed
    beginning: StartPosition
    sources: OpenedSources
    pipeline: CompiledPipeline
    before: Manifest | None
    fit: Callable[..., tuple[OperatorEntry, ...]]
    session: Mapping[str, str]


class JobRun:
    """One run: term, fencing, heartbeat, Spark's query, and the end.

    Life cycle: compiled (`check`: nothing written) → fenced off others (term and fencing snapshot) → running → ended
    with a last heartbeat that says how.

    Attributes:
        term: of the run; 0 before it is claimed.
        driver, query: of the run, while it streams and after it; None before.
    """

    def __init__(
        self,
        plan: JobPlan,
        spark: SparkSession,
        on_progress: Callable[[Progress], None] | None,
        stop: threading.Event,
    ) -> None:
        self._plan = plan.expanded(spark)
        self._spark = spark
        self._on_progress = on_progress
        self._stop = stop
        self._clock = plan.clock
        self._ids = plan.ids
        self._watch = SourceWatch(opened_lags, plan.clock)
        self._advance = Advance(plan.clock, plan.settings.recovery.stall_timeout_s)
        self._java_warnings = JavaWarnings()
        self._warnings = WarningBook(lambda: self._java_warnings.take())
        self._catalog = Catalog(plan.store, plan.name, plan.clock)
        self._root: Store = self._catalog.root
        self.term = 0
        self.driver: EpochDriver | None = None
        self.query: StreamingQuery | None = None

    def check(self, allowed: Allowed, beginning: StartPosition) -> CheckedRun:
        """Check all that can be checked before anything is written; raises the errors of `StreamingJob.run`."""
        plan = self._plan
        sources = self._opened_sources()
        pipeline = plan.compiled(self._spark, sources)
        if not allowed.takeover:
            refuse_if_live(self._catalog, self._clock)
        fit = partial(
            reconcile,
            operators=pipeline.entries,
            dropped_by_processor=pipeline.dropped,
            allow_dropped_state=allowed.dropped_state,
        )
        session = result_settings(self._spark.conf)

        def decide(content: Manifest | None, info: JobInfo | None) -> None:
            if content is not None:
                refuse_other_settings(
                    content.snapshot_id, content.session, session, job=plan.name, accept=allowed.session_settings
                )
            refuse_drained(content, f"job {plan.name!r}", allow_drained=allowed.drained)
            refuse_misfits(content, pipeline.operator_reads, drop=allowed.drop_inflight, job=plan.name)
            self._parallelism(content, info)
            _check_outputs(content, pipeline)
            _source_numbers(sources, content, allowed)
            fit(content, snapshot_id=content.snapshot_id + 1 if content is not None else 1)

        # Checked again with the snapshot that the run really resumes from.
        before = beginning.look(decide)
        refuse_other_output(pipeline, before)
        return CheckedRun(
            allowed=allowed,
            beginning=beginning,
            sources=sources,
            pipeline=pipeline,
            before=before,
            fit=fit,
            session=session,
        )

    def go(self, checked: CheckedRun, trigger: Mapping[str, Any] | None, started_by: StartedBy = BY_HAND) -> RunResult:
        """See `StreamingJob.run`."""
        plan, allowed, beginning = self._plan, checked.allowed, checked.beginning
        sources, pipeline, fit = checked.sources, checked.pipeline, checked.fit
        local_dir = private_local_dir(plan.settings.local_dir)
        scratch = Scratch.of(plan.settings, local_dir)
        self._root.probe()
        host, pid, space, time_zone = socket.gethostname(), os.getpid(), process_space(), self._time_zone()
        clock = TrustedClock(self._clock, self._root.now_ms)
        withdraw = [name for name, sink in pipeline.sinks.items() if sink.on_rollback == "replace"]
        committer = beginning.open(self._empty, host=host, pid=pid, process_space=space, clock=clock, withdraw=withdraw)
        info, self.term = committer.info, committer.term.term
        # Another start may have been first: then a snapshot exists that was not there before.
        began_empty = checked.before is None and committer.last.snapshot_id == 1
        entries = fit(None if began_empty else committer.last, snapshot_id=committer.last.snapshot_id + 1)
        parallelism = self._parallelism(committer.last, info)
        ending = beginning.ending(info, f"{host}:{pid}")
        if ending is not None:
            self._on_progress = ending.watching(self._on_progress, committer)
        savepoints = self._savepoints(committer)
        heartbeat = Heartbeat(
            self._root,
            committer,
            self._plan.settings.checkpoint.heartbeat_interval_s,
            self._clock,
            self._stop,
            savepoints,
            self._advance,
            cause=started_by.cause,
            supervisor_pid=started_by.supervisor_pid,
            parallelism=parallelism,
            backend=self._plan.settings.backend,
            settings=started_by.settings,
            process_space=space,
            time_zone=time_zone,
            sources=lambda: self._watch.states,
        )
        checkpoint = self._spark_checkpoint(scratch, committer, _source_numbers(sources, committer.last, allowed))
        heartbeat.start()
        savepoints.start()
        state: RunState = "failed"
        message = error_kind = ""
        try:
            driver = self._driver(
                checked, entries, info, committer, checkpoint, parallelism, local_dir, savepoints, started_by
            )
            heartbeat.watch(driver)
            self.driver = driver
            with self._around_the_stream(scratch, parallelism):
                frame = self._frame_read(sources, pipeline)
                pieces = PieceBounds.of(self._spark.conf, hands_only_its_own=pipeline.hands_only_its_own)
                result = self._stream(
                    frame, driver, checkpoint, scratch, committer, trigger, heartbeat, savepoints, pieces
                )
            state = result.state
            return result
        except Fenced as error:
            state, message = "fenced", str(error)
            raise
        except BaseException as error:
            fenced = heartbeat.look_for_fencing()
            if fenced is not None:
                # The caller must know first that the job has another run by now; the other error is its cause.
                state, message = "fenced", fenced
                raise Fenced(fenced) from error
            message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            error_kind = error.kind if isinstance(error, StillstateError) else StillstateError.kind
            raise
        finally:
            savepoints.close(message or state)
            heartbeat.finish(state, message, error_kind)
            shutil.rmtree(checkpoint.folder, ignore_errors=True)
            if ending is not None:
                ending.close(_CLAIM_TIMEOUT_S)

    def _spark_checkpoint(self, scratch: Scratch, committer: Committer, numbers: SourceNumbers) -> SparkCheckpoint:
        # By place, not by uid: a copy of the root may run on this host too, and each run removes its own old folders.
        return SparkCheckpoint(
            scratch.folder / f"{self._plan.name}-{root_id(self._root.url)}-{committer.term.term}",
            int(self._spark.conf.get(COMPACT_INTERVAL_CONF, str(COMPACT_INTERVAL)) or COMPACT_INTERVAL),
            numbers,
        )

    @contextmanager
    def _around_the_stream(self, scratch: Scratch, parallelism: int) -> Iterator[None]:
        """Apply session settings, explain errors about the scratch folder, and log Java's warnings in a thread."""
        self._java_warnings, over = JavaWarnings.begin(self._spark), threading.Event()

        def tell() -> None:
            while not over.wait(_WARNINGS_INTERVAL_S):
                self._warnings.look()
            self._warnings.look()
            self._java_warnings.end()

        thread = threading.Thread(target=tell, name="stillstate-java-warnings", daemon=True)
        thread.start()
        try:
            with scratch.explained(), shuffles_as_wide_as_the_job(self._spark.conf, parallelism):
                yield
        finally:
            over.set()
            thread.join(_STOP_TIMEOUT_S)

    def _frame_read(self, sources: OpenedSources, pipeline: CompiledPipeline) -> DataFrame:
        """Return the streaming frame without unread columns, and without Spark watermarks that nothing waits for."""
        corrupt = str(self._spark.conf.get(CORRUPT_COLUMN_CONF))
        frames = [
            source.frame if read is None else without_unread(source.frame, read, corrupt)
            for source, read in zip(sources.inputs, pipeline.source_reads, strict=True)
        ]
        return unwatched(sources.stream(frames), sources.watermarks)

    def _opened_sources(self) -> OpenedSources:
        """Return the sources, if a job can be repeated on them.

        Raises:
            InvalidConfiguration, InvalidPipeline: it removes or forgets data that a restart would have to read again.
        """
        plan = self._plan
        probe_internals(self._spark)
        sources = plan.opened_sources(self._spark)
        frames = [source.frame for source in sources.inputs]
        if has_intervals(plan.settings) and any(map(cleans_up, frames)):
            raise InvalidConfiguration(
                f"job {plan.name!r}: cleanSource removes input files as soon as an epoch is over, but with a "
                "checkpoint interval they are needed until the checkpoint. Leave cleanSource off, or make a checkpoint "
                "after each epoch"
            )
        if name := next(filter(None, map(unrepeatable_source, frames)), ""):
            raise InvalidPipeline(
                f"job {plan.name!r} reads a source of format {name!r}, which keeps nothing of what it has sent: after "
                "a restart its rows could not be read again. Let the sender write files, or to a log such as Kafka"
            )
        for frame in frames:
            warn_of_patterns(frame, plan.name)
            warn_of_files_passed_over(frame, plan.name)
        return sources

    def _empty(self, info: JobInfo) -> Manifest:
        """Return the content of a job that has no snapshot yet."""
        return Manifest(
            format_version=FORMAT_VERSION,
            job_uid=info.uid,
            snapshot_id=0,
            term=0,
            commit_id="",
            kind="fencing",
            created_at_ms=0,
            parallelism=self._parallelism(None, info),
        )

    def _time_zone(self) -> str:
        """Return the time zone of the session. Warn if the run before had another one."""
        zone = str(self._spark.conf.get(TIME_ZONE_CONF))
        try:
            before = self._catalog.status()
        except (CorruptData, UnsupportedFormat) as error:
            _LOG.info("the time zone of the run before is not known: %s", error)
            return zone
        if before is not None and (text := changed_zone(before.time_zone, zone)):
            _LOG.warning("%s", text)
        return zone

    def _savepoints(self, committer: Committer) -> Savepoints:
        return Savepoints(
            self._root,
            committer.info,
            committer.term.term,
            clock=self._clock,
            ids=self._ids,
            prove=committer.ownership.check,
        )

    def _parallelism(self, before: Manifest | None, info: JobInfo | None) -> int:
        if info is not None and info.max_parallelism != MAX_PARALLELISM:
            raise InvalidConfiguration(
                f"job {info.name!r} was created with max_parallelism {info.max_parallelism}, and this version has "
                f"{MAX_PARALLELISM}: keys would belong to other shards. Start it with the version that created it; "
                "nothing was changed"
            )
        asked = self._plan.settings.parallelism
        if asked == 0:
            asked = before.parallelism if before is not None else self._spark.sparkContext.defaultParallelism
        if not 1 <= asked <= MAX_PARALLELISM:
            raise InvalidConfiguration(f"parallelism {asked} is outside 1 … {MAX_PARALLELISM}")
        return asked

    def _driver(
        self,
        checked: CheckedRun,
        entries: tuple[OperatorEntry, ...],
        info: JobInfo,
        committer: Committer,
        checkpoint: SparkCheckpoint,
        parallelism: int,
        local_dir: Path,
        savepoints: Savepoints,
        started_by: StartedBy,
    ) -> EpochDriver:
        plan, pipeline, allowed = self._plan, checked.pipeline, checked.allowed
        root = (plan.root_url, plan.storage_options)
        left = committer.last.left_epochs
        sinks = {
            name: replace(sink.spec(plan.name, info.uid, name, root), left_epochs=left)
            for name, sink in pipeline.sinks.items()
        }
        context = DriverContext(
            job_name=plan.name,
            store_url=plan.store_url,
            storage_options=plan.storage_options,
            root=self._root,
            local_dir=str(local_dir),
            settings=plan.settings,
            parallelism=parallelism,
            pipeline=pipeline,
            sinks=sinks,
            entries=entries,
            watermark_policy=policy_of(self._spark.conf.get(POLICY_SETTING, "min")),
            clock=self._clock,
            ids=self._ids,
            take_output=allowed.take_output,
            drop_inflight=allowed.drop_inflight,
            on_trial=started_by.on_trial,
            session=checked.session,
        )
        return EpochDriver(
            context,
            committer,
            checkpoint,
            self._spark,
            self._on_progress,
            savepoints,
            wait=self._stop.wait,
            skipped_rows=self._warnings.skipped_rows,
        )

    def _stream(
        self,
        source: DataFrame,
        driver: EpochDriver,
        checkpoint: SparkCheckpoint,
        scratch: Scratch,
        committer: Committer,
        trigger: Mapping[str, Any] | None,
        heartbeat: Heartbeat,
        savepoints: Savepoints,
        pieces: PieceBounds,
    ) -> RunResult:
        driver.publish_pending(self._spark)
        # Scratch of runs that were killed; they are fenced by now.
        for left in checkpoint.folder.parent.glob(f"{checkpoint.folder.name.rpartition('-')[0]}-*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch.keep_room()
        if committer.last.source is not None:
            scratch.retried(partial(self._prime, checkpoint, committer.last, committer.last.source))
        shuffles = str(self._spark.conf.get(SHUFFLE_PARTITIONS_CONF))

        def run_batch(frame: DataFrame, batch_id: int) -> None:
            # The query runs in a separate session, which takes this setting from the run that wrote its offsets.
            frame.sparkSession.conf.set(SHUFFLE_PARTITIONS_CONF, shuffles)
            pieces.ask(frame.sparkSession.conf)
            driver.run_batch(frame, batch_id)
            pieces.seen(driver.row_bytes)

        writer = source.writeStream.foreachBatch(run_batch).option("checkpointLocation", str(checkpoint.folder))
        if trigger:
            writer = writer.trigger(**trigger)
        query = self.query = writer.queryName(f"{self._plan.name} (term {committer.term.term})").start()
        begun = committer.last.source
        offsets = "" if begun is None else checkpoint.numbers.by_place(begun.offsets)
        read = [{} if of.name else of.options for of in stream_sources(source)]
        seen_lines = partial(partial, checkpoint.seen_lines)
        folders = folder_lags(read, partial(scheme_of, self._spark), seen_lines, self._clock)
        self._watch.follow(lambda: query.lastProgress, offsets, folders)
        heartbeat.running()
        self._advance.moved()
        empty = self._spark.createDataFrame([], source.schema)
        stopped = False
        source_is_quiet = SourceQuiet(query)
        is_long_quiet = LongQuiet(source_is_quiet.has_nothing, self._clock)
        following = self._advance.following(
            driver.mark,
            lambda: driver.is_held_up or (driver.has_nothing_to_do and source_is_quiet()),
            self._tasks_done,
        )
        try:
            while not query.awaitTermination(0.1):  # type: ignore[arg-type]
                scratch.keep_room()
                driver.look_at_sinks()
                driver.savepoint_if_asked()
                if self._stop.is_set() or heartbeat.fenced is not None or driver.is_ending:
                    stopped = True
                    driver.stop()
                    query.stop()
                    break
                if (driver.is_due() or (driver.is_unproven and is_long_quiet())) and is_idle(query):
                    driver.run_without_batch(empty)
                driver.checkpoint_if_due()
            stopped = stopped or driver.is_ending or self._stop.is_set()
            while not stopped and (driver.is_due() or driver.is_unproven) and not self._stop.is_set():
                # The source has ended; work that its last rows made due is still done.
                driver.run_without_batch(empty)
            if heartbeat.fenced is None:
                if savepoints.is_drain_asked and not self._stop.is_set():
                    stopped = True
                    driver.stop()
                    driver.drain(empty)
                driver.finish()
                self._wait_for_sinks(driver, heartbeat, stopped)
                self._wait_for_savepoints(driver, heartbeat, savepoints)
        except Exception as error:
            failure = driver.failure or typed_error(error)
            if failure is not error:
                _LOG.info("what Spark said of the error that ends this run", exc_info=error)
            if not is_part_of_stop(failure, self._stop):
                raise failure from cause_of(failure, error)
            _LOG.warning(
                "the run was asked to stop, and Spark's processes were ended with it: the epoch under way is "
                "abandoned, and the next run goes on from snapshot %d",
                committer.last.snapshot_id,
            )
            stopped = True
        finally:
            following.set()
            _end_query(query)
            self._watch.close()
            driver.stop()
            driver.close(_STOP_TIMEOUT_S)
        if driver.failure is not None and not is_part_of_stop(driver.failure, self._stop):
            raise driver.failure
        if heartbeat.fenced is not None:
            raise Fenced(heartbeat.fenced)
        return RunResult("stopped" if stopped else "finished", committer.last.snapshot_id, driver.epochs)

    def _tasks_done(self) -> tuple[tuple[int, int], ...]:
        """Return the stages that Spark works on now, with the number of ended tasks of each."""
        tracker = self._spark.sparkContext.statusTracker()
        stages = [(stage_id, tracker.getStageInfo(stage_id)) for stage_id in sorted(tracker.getActiveStageIds())]
        return tuple((stage_id, info.numCompletedTasks) for stage_id, info in stages if info is not None)

    def _prime(self, checkpoint: SparkCheckpoint, last: Manifest, position: SourcePosition) -> None:
        """Prepare Spark's checkpoint directory. Files of an earlier attempt are removed."""
        shutil.rmtree(checkpoint.folder, ignore_errors=True)
        logs = {index: stream_source_log(self._root, last, index) for index in position.logs}
        checkpoint.prime(position, logs)

    def _wait_for_sinks(self, driver: EpochDriver, heartbeat: Heartbeat, stopped: bool) -> None:
        """Give sinks that are away half a minute before the run ends. A run that was asked to stop ends well without
        them, which the log says; one whose source has ended does not."""
        begun_s = self._clock.monotonic_s()

        def is_enough() -> bool:
            self._advance.moved()
            return heartbeat.fenced is not None or self._clock.monotonic_s() - begun_s > _STOP_TIMEOUT_S

        try:
            driver.wait_for_sinks(is_enough)
        except StoreUnavailable:
            if not stopped and heartbeat.fenced is None:
                raise

    def _wait_for_savepoints(self, driver: EpochDriver, heartbeat: Heartbeat, savepoints: Savepoints) -> None:
        """Let savepoints be copied before the run ends.

        A run that was asked to stop after a savepoint waits for it until the run itself is stopped; any other run waits
        half a minute. Savepoints that are incomplete by then are copied by the next run, or by
        `stillstate savepoint --resume`.
        """
        begun_s, is_waiting = self._clock.monotonic_s(), driver.is_ending and not self._stop.is_set()

        def is_enough() -> bool:
            self._advance.moved()  # copying is an advance; it has separate numbers
            if heartbeat.fenced is not None or (is_waiting and self._stop.is_set()):
                return True
            return not is_waiting and self._clock.monotonic_s() - begun_s > _STOP_TIMEOUT_S

        savepoints.wait(is_enough)


def _source_numbers(sources: OpenedSources, content: Manifest | None, allowed: Allowed) -> SourceNumbers:
    """Return the numbers of the sources, from the snapshot to go on from; raises the errors of `source_numbers`."""
    position = content.source if content is not None else None
    return source_numbers(sources.names, position, allow_dropped=allowed.dropped_state)


def _check_outputs(content: Manifest | None, pipeline: CompiledPipeline) -> None:
    """Check that the pipeline has a sink for each output of a snapshot: resuming also publishes pending output.

    Raises:
        InvalidPipeline: the pipeline lacks a sink for it.
    """
    for output in content.outputs if content is not None else ():
        if output.files and output.sink not in pipeline.sinks:
            raise InvalidPipeline(
                f"the snapshot to go on from has unpublished output of sink {output.sink!r}, which the pipeline does "
                "not have. Give it a sink of that name with the same folder, or start the job once more as it was, "
                "which publishes the output"
            )


def is_part_of_stop(failure: BaseException, stop: threading.Event) -> bool:
    """Return whether an error that ended a run is part of its requested stop. A service manager sends its signal to
    Spark's Java and Python processes as well, and those end in the middle of an epoch. That costs as much as a kill:
    nothing that was committed."""
    return stop.is_set() and isinstance(failure, ProcessEnded)


def _end_query(query: StreamingQuery) -> None:
    try:
        if query.isActive:
            query.stop()
    except Exception as error:
        if not is_of_ended_java(error):
            raise
        # It ended with its process. The error that ended the run is the one to report.
        _LOG.info("the query went with Spark's Java process")
