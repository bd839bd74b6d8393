"""StreamingJob: the pipeline that a user writes, and the run of it."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from state_runtime.aggregates import Aggregate
from state_runtime.changelog.reader import read_source_log
from state_runtime.clock import SYSTEM_CLOCK, Clock
from state_runtime.driver import DriverContext, EpochDriver, typed_error
from state_runtime.errors import (
    Fenced,
    InvalidConfiguration,
    InvalidPipeline,
    NotSupportedYet,
    StillstateError,
    UserCodeError,
)
from state_runtime.ids import SYSTEM_IDS, Ids
from state_runtime.limits import MANIFEST_BYTES_MAX, MAX_PARALLELISM
from state_runtime.pipeline import (
    AggregateStep,
    CompiledPipeline,
    DeduplicateStep,
    LatestByStep,
    ProcessorStep,
    Step,
    TransformStep,
    VectorizedStep,
    WriteStep,
    compile_pipeline,
)
from state_runtime.processors.vectorized import VectorizedProcessor
from state_runtime.progress import Progress
from state_runtime.settings import JobSettings
from state_runtime.sinks import Sink
from state_runtime.snapshot.catalog import Catalog, JobInfo
from state_runtime.snapshot.commit import Committer, open_job_root, open_run, refuse_if_live
from state_runtime.snapshot.control import pending_stop
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import check_job_name, check_uid, manifest_path
from state_runtime.snapshot.terms import RunState, RunStatus, newest_term, write_status
from state_runtime.source import SparkCheckpoint
from state_runtime.store import Store, open_store

__all__ = ["JobContext", "KeyedStream", "RunResult", "Stream", "StreamingJob"]

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 30.0

Source = DataFrame | Callable[[SparkSession], DataFrame]


@dataclass(frozen=True)
class JobContext:
    """What an entry point gets: `def build(context: JobContext) -> StreamingJob`.

    Attributes:
        options: the job's own options, free in form.
        storage_options: for fsspec; may hold secrets, so they are in no repr.
    """

    name: str
    store: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: JobSettings = field(default_factory=JobSettings)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def job(self) -> StreamingJob:
        """An empty job with this name, store and these settings."""
        return StreamingJob(self.name, store=self.store, settings=self.settings, storage_options=self.storage_options)


@dataclass(frozen=True)
class RunResult:
    """How a run ended: "finished" (the source has an end), or "stopped" (someone asked)."""

    state: Literal["finished", "stopped"]
    last_snapshot_id: int
    epochs: int


class StreamingJob:
    """A streaming job with state snapshots.

    Example:
        job = StreamingJob("plane-delays", store="/data/state")
        (job.read(lambda spark: spark.readStream.schema(SCHEMA).parquet("/data/in"))
            .key_by("tailnum")
            .transform_with_state(PlaneDelays(), output_schema="tailnum string, delay int", uid="delays")
            .transform(lambda df: df.filter("delay > 15"))
            .key_by("tailnum").aggregate(uid="late", n=aggregates.count())
            .write(ParquetSink("/data/out")))
        job.run(build_session("plane-delays"))

    Args:
        name: folder of the job on the store: a-z, 0-9, `_`, `-`.
        store: path or URL of the store.
        settings: see `JobSettings`.
        storage_options: for fsspec; never stored, never shown.
    """

    def __init__(
        self,
        name: str,
        *,
        store: str,
        settings: JobSettings | None = None,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        self.name = check_job_name(name)
        self.settings = settings or JobSettings()
        self._store_url = store
        self._storage_options = dict(storage_options or {})
        self._store = open_store(store, self._storage_options)
        self._clock = clock
        self._ids = ids
        self._source: Source | None = None
        self._steps: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        return f"StreamingJob({self.name!r}, store={self._store.url!r})"

    def read(self, source: Source) -> Stream:
        """Begin the pipeline with any Spark stream: a streaming DataFrame, or a function that makes one."""
        if self._source is not None:
            raise InvalidPipeline(f"job {self.name!r} already reads a source; union the streams inside one read()")
        self._source = source
        return Stream(self, ())

    def run(
        self,
        spark: SparkSession,
        *,
        trigger: Mapping[str, Any] | None = None,
        takeover: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
    ) -> RunResult:
        """Run until the source ends, someone asks to stop, or an error.

        Starts from the newest snapshot of the job root, if there is one.

        Args:
            trigger: arguments of `DataStreamWriter.trigger`, e.g. `{"availableNow": True}`; None is as fast as possible.
            takeover: fence a run that seems alive, instead of being turned away by it.
            on_progress: called after every epoch.
            stop: set it to stop after the current epoch.

        Raises:
            InvalidPipeline, NotSupportedYet, InvalidConfiguration: before anything is written.
            JobAlreadyRunning, Fenced: another run owns the job.
            CorruptManifest, CorruptSegment, MissingFile, UnsupportedFormat: nothing is overwritten.
            UserCodeError, InvalidData: the epoch was not committed; the previous snapshot stands.
            StoreUnavailable, OutcomeUnknown: start again.
        """
        return _Run(self, spark, on_progress, stop or threading.Event()).go(trigger, takeover)

    def _extend(self, before: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
        if before is not self._steps and before != self._steps:
            raise InvalidPipeline(
                f"job {self.name!r}: the stream was already continued elsewhere. A pipeline is one chain; write() may hang "
                "any number of sinks on it, and two chains are two jobs"
            )
        self._steps = (*before, step)
        return self._steps


class Stream:
    """A stream of rows inside a job's pipeline."""

    def __init__(self, job: StreamingJob, steps: tuple[Step, ...]) -> None:
        self._job = job
        self._steps = steps

    def key_by(self, *columns: str) -> KeyedStream:
        """Partition by key columns for the stateful operator that follows."""
        if not columns:
            raise InvalidPipeline("key_by() needs at least one column")
        if len(set(columns)) != len(columns):
            raise InvalidPipeline(f"key_by{columns} names a column twice")
        return KeyedStream(self._job, self._steps, columns)

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> Stream:
        """Any stateless Spark code: select, filter, join with a static table, … It is called once per epoch.

        It must read its whole input: `limit` and the like are refused when the epoch ends.
        """
        if not callable(function):
            raise InvalidPipeline("transform() needs a function from DataFrame to DataFrame")
        return Stream(self._job, self._job._extend(self._steps, TransformStep(function)))

    def write(self, sink: Sink, *, name: str = "") -> Stream:
        """Hang a sink on the stream; the stream goes on.

        Args:
            name: of the sink in snapshots and metrics; by default `out`, `out-2`, …
        """
        if not isinstance(sink, Sink):
            raise InvalidPipeline(f"write() needs a sink (ParquetSink, foreach_epoch), not a {type(sink).__name__}")
        written = sum(isinstance(step, WriteStep) for step in self._steps)
        chosen = check_uid(name or ("out" if written == 0 else f"out-{written + 1}"), "sink name")
        return Stream(self._job, self._job._extend(self._steps, WriteStep(chosen, sink)))


class KeyedStream:
    """A stream partitioned by key: a stateful operator must follow."""

    def __init__(self, job: StreamingJob, steps: tuple[Step, ...], keys: tuple[str, ...]) -> None:
        self._job = job
        self._steps = steps
        self._keys = keys

    def transform_with_state(
        self,
        processor: Any,
        output_schema: T.StructType | str,
        *,
        uid: str,
        output_mode: str = "update",
        time_mode: str = "none",
    ) -> Stream:
        """Run pyspark's `StatefulProcessor`, row flavour: as `GroupedData.transformWithState`.

        Args:
            processor: the same object that Spark takes.
            output_schema: StructType or DDL.
            uid: stable name of the operator: its state belongs to it.
            output_mode: append, update or complete; changes nothing in calls or rows, as in Spark.
            time_mode: only "none" in this version.
        """
        return self._processor(processor, output_schema, uid, output_mode, time_mode, pandas=False)

    def transform_with_state_in_pandas(
        self,
        processor: Any,
        output_schema: T.StructType | str,
        *,
        uid: str,
        output_mode: str = "update",
        time_mode: str = "none",
    ) -> Stream:
        """Run pyspark's `StatefulProcessor`, pandas flavour: as `GroupedData.transformWithStateInPandas`."""
        return self._processor(processor, output_schema, uid, output_mode, time_mode, pandas=True)

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> Stream:
        """Keyed aggregates, vectorised; emits the new values of the keys that an epoch touched (update mode).

        Example:
            .key_by("carrier").aggregate(uid="by-carrier", flights=aggregates.count(), worst=aggregates.max("delay"))
        """
        check_uid(uid, "operator uid")
        if not aggregates:
            raise InvalidPipeline(f"operator {uid!r}: name at least one aggregate, e.g. n=aggregates.count()")
        for name, aggregate in aggregates.items():
            if not isinstance(aggregate, Aggregate):
                raise InvalidPipeline(
                    f"operator {uid!r}: {name} must be one of state_runtime.aggregates, e.g. aggregates.count()"
                )
        return Stream(self._job, self._job._extend(self._steps, AggregateStep(uid, self._keys, dict(aggregates))))

    def process(self, processor: VectorizedProcessor, output_schema: T.StructType | str, *, uid: str) -> Stream:
        """Run a `VectorizedProcessor`: the rows and the state of all keys at once, in Arrow and numpy.

        Args:
            processor: an instance; every task gets a fresh copy.
            output_schema: StructType or DDL.
            uid: stable name of the operator: its state belongs to it.
        """
        check_uid(uid, "operator uid")
        if not isinstance(processor, VectorizedProcessor):
            raise InvalidPipeline(
                f"operator {uid!r}: process() needs an instance of a VectorizedProcessor, not "
                f"{getattr(processor, '__name__', type(processor).__name__)}; a StatefulProcessor goes to transform_with_state()"
            )
        step = VectorizedStep(uid, self._keys, processor, output_schema)
        return Stream(self._job, self._job._extend(self._steps, step))

    def latest_by(self, order: str, *columns: str, uid: str) -> Stream:
        """Keep of each key the row with the greatest value of a column; vectorised.

        Emits the row of every key for which another row took the place (update mode): the key columns, the order column and
        `columns`. Of equal values the later row in source order wins; null is below everything.

        Args:
            order: a column of numbers, text, binary, booleans, dates or timestamps.
            columns: what else to keep; none named means all columns.

        Example:
            .key_by("order_id").latest_by("changed_at", "status", "amount", uid="current")
        """
        check_uid(uid, "operator uid")
        return Stream(self._job, self._job._extend(self._steps, LatestByStep(uid, self._keys, order, columns)))

    def deduplicate(self, *, uid: str) -> Stream:
        """Pass the first row of each key and drop all later ones (append mode); vectorised. Rows keep all their columns.

        There is no watermark in this version: the state holds every key that was ever seen (the key columns and eight bytes
        each), and never shrinks.

        Example:
            .key_by("event_id").deduplicate(uid="once")
        """
        check_uid(uid, "operator uid")
        return Stream(self._job, self._job._extend(self._steps, DeduplicateStep(uid, self._keys)))

    def _processor(
        self,
        processor: Any,
        output_schema: T.StructType | str,
        uid: str,
        output_mode: str,
        time_mode: str,
        *,
        pandas: bool,
    ) -> Stream:
        check_uid(uid, "operator uid")
        if output_mode.lower() not in ("append", "update", "complete"):
            raise InvalidPipeline(f"operator {uid!r}: output_mode {output_mode!r} must be append, update or complete")
        if time_mode.lower() not in ("none", "processingtime", "eventtime"):
            raise InvalidPipeline(
                f"operator {uid!r}: time_mode {time_mode!r} must be none, processingTime or eventTime"
            )
        if time_mode.lower() != "none":
            raise NotSupportedYet(
                f"operator {uid!r}: time_mode {time_mode!r} (timers, TTL) comes with the state engine; use none in this version"
            )
        if not callable(getattr(processor, "handleInputRows", None)) or not callable(getattr(processor, "init", None)):
            raise InvalidPipeline(
                f"operator {uid!r}: {type(processor).__name__} is not a StatefulProcessor (init, handleInputRows); pass an "
                "instance, not the class"
            )
        step = ProcessorStep(uid, self._keys, processor, output_schema, pandas)
        return Stream(self._job, self._job._extend(self._steps, step))


class _Run:
    """One run: term, fencing, heartbeat, Spark's query, and the end.

    Life cycle: compiled (nothing written) → fenced off others (term and fencing snapshot) → running → ended with a last
    heartbeat that says how.
    """

    def __init__(
        self,
        job: StreamingJob,
        spark: SparkSession,
        on_progress: Callable[[Progress], None] | None,
        stop: threading.Event,
    ) -> None:
        self._job = job
        self._spark = spark
        self._on_progress = on_progress
        self._stop = stop
        self._clock = job._clock
        self._ids = job._ids
        self._catalog = Catalog(job._store, job.name, job._clock)
        self._root: Store = self._catalog.root

    def go(self, trigger: Mapping[str, Any] | None, takeover: bool) -> RunResult:
        """See `StreamingJob.run`."""
        source = self._source_frame()
        pipeline = compile_pipeline(self._spark, source.schema, self._job._steps, self._job.settings)
        if not takeover:
            refuse_if_live(self._catalog, self._clock)
        self._job._store.child(self._job.name).probe()
        info = open_job_root(self._root, self._job.name, clock=self._clock, ids=self._ids)
        before = self._catalog.latest()
        parallelism = self._parallelism(before)
        if before is not None:
            _check_compatible(before, pipeline)
        empty = Manifest(FORMAT_VERSION, info.uid, 0, 0, "", "fencing", 0, parallelism)
        committer = open_run(
            self._catalog, info, empty, clock=self._clock, ids=self._ids, host=socket.gethostname(), pid=os.getpid()
        )
        heartbeat = _Heartbeat(self._root, committer, self._job.settings.heartbeat_interval_s, self._clock, self._stop)
        local_dir = _local_dir(self._job.settings)
        checkpoint = SparkCheckpoint(local_dir / "spark" / f"{self._job.name}-{info.uid[:8]}-{committer.term.term}")
        heartbeat.start()
        state: RunState = "failed"
        message = ""
        try:
            driver = self._driver(pipeline, info, committer, checkpoint, parallelism, str(local_dir))
            heartbeat.watch(driver)
            result = self._stream(source, driver, checkpoint, committer, trigger, heartbeat)
            state = result.state
            return result
        except Fenced as error:
            state, message = "fenced", str(error)
            raise
        except BaseException as error:
            fenced = heartbeat.look_for_fencing()
            if fenced is not None:
                # Whatever broke, the job has another run by now: that is what the caller must know.
                state, message = "fenced", fenced
                raise Fenced(fenced) from error
            message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise
        finally:
            heartbeat.finish(state, message)
            shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def _source_frame(self) -> DataFrame:
        source = self._job._source
        if source is None:
            raise InvalidPipeline(f"job {self._job.name!r} reads nothing; begin with job.read(…)")
        if isinstance(source, DataFrame):
            frame = source
        else:
            try:
                frame = source(self._spark)
            except StillstateError:
                raise
            except Exception as error:
                raise UserCodeError(f"job {self._job.name!r}: read() raised {type(error).__name__}: {error}") from error
        if not isinstance(frame, DataFrame) or not frame.isStreaming:
            raise InvalidPipeline(f"job {self._job.name!r}: read() needs a streaming DataFrame (spark.readStream…)")
        return frame

    def _parallelism(self, before: Manifest | None) -> int:
        asked = self._job.settings.parallelism
        if asked == 0:
            asked = before.parallelism if before is not None else self._spark.sparkContext.defaultParallelism
        if not 1 <= asked <= MAX_PARALLELISM:
            raise InvalidConfiguration(f"parallelism {asked} is outside 1 … {MAX_PARALLELISM}")
        return asked

    def _driver(
        self,
        pipeline: CompiledPipeline,
        info: JobInfo,
        committer: Committer,
        checkpoint: SparkCheckpoint,
        parallelism: int,
        local_dir: str,
    ) -> EpochDriver:
        job = self._job
        options = job._storage_options
        root = (_child_url(job._store_url, job.name), options)
        sinks = {name: sink.spec(job.name, info.uid, name, root) for name, sink in pipeline.sinks.items()}
        context = DriverContext(
            job_name=job.name,
            store_url=job._store_url,
            storage_options=options,
            root=self._root,
            local_dir=local_dir,
            settings=job.settings,
            parallelism=parallelism,
            pipeline=pipeline,
            sinks=sinks,
            clock=self._clock,
            ids=self._ids,
        )
        return EpochDriver(context, committer, checkpoint, self._spark, self._on_progress)

    def _stream(
        self,
        source: DataFrame,
        driver: EpochDriver,
        checkpoint: SparkCheckpoint,
        committer: Committer,
        trigger: Mapping[str, Any] | None,
        heartbeat: _Heartbeat,
    ) -> RunResult:
        driver.publish_pending(self._spark)
        # Scratch of runs that were killed; they are fenced by now.
        for scratch in checkpoint.folder.parent.glob(f"{checkpoint.folder.name.rpartition('-')[0]}-*"):
            shutil.rmtree(scratch, ignore_errors=True)
        position = committer.last.source
        if position is not None:
            logs = {index: read_source_log(self._root, committer.last, index) for index in position.logs}
            checkpoint.prime(position, logs)
        writer = source.writeStream.foreachBatch(driver.run_batch).option(
            "checkpointLocation", checkpoint.folder.as_uri()
        )
        if trigger:
            writer = writer.trigger(**trigger)
        query = writer.queryName(f"{self._job.name} (term {committer.term.term})").start()
        heartbeat.running()
        stopped = False
        try:
            while not query.awaitTermination(0.1):  # type: ignore[arg-type]
                if self._stop.is_set() or heartbeat.fenced is not None:
                    stopped = True
                    with driver.lock:
                        driver.stop(0.0)
                    query.stop()
                    break
        except Exception as error:
            raise driver.failure or typed_error(error) from error
        finally:
            if query.isActive:
                query.stop()
            with driver.lock:
                driver.stop(_STOP_TIMEOUT_S)
        if driver.failure is not None:
            raise driver.failure
        if heartbeat.fenced is not None:
            raise Fenced(heartbeat.fenced)
        return RunResult("stopped" if stopped else "finished", committer.last.snapshot_id, driver.epochs)


class _Heartbeat:
    """Says that the run lives, and looks for requests and for whoever fenced it; in a thread of its own.

    A store that fails is logged and asked again: a heartbeat never ends a run by itself. Only its owner writes the file.
    """

    def __init__(
        self, root: Store, committer: Committer, interval_s: float, clock: Clock, stop: threading.Event
    ) -> None:
        self._root = root
        self._committer = committer
        self._interval_s = interval_s
        self._clock = clock
        self._stop = stop
        self._ended = threading.Event()
        self._state: RunState = "starting"
        self._driver: EpochDriver | None = None
        self._thread = threading.Thread(target=self._loop, name="stillstate-heartbeat", daemon=True)
        self.fenced: str | None = None

    def start(self) -> None:
        """Write the first heartbeat (it must succeed: the store is known to work) and begin."""
        self._write("")
        self._thread.start()

    def watch(self, driver: EpochDriver) -> None:
        """Report this driver's progress from now on."""
        self._driver = driver

    def running(self) -> None:
        """The stream has started."""
        self._state = "running"
        self._beat()

    def finish(self, state: RunState, message: str) -> None:
        """The last heartbeat, saying how the run ended."""
        self._ended.set()
        self._thread.join()
        self._state = state
        try:
            self._write(message)
        except StillstateError:
            _LOG.exception("the last heartbeat of term %d could not be written", self._committer.term.term)

    def _loop(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        try:
            self._write("")
            term = self._committer.term.term
            request = pending_stop(self._root, term)
            if request is not None and not self._stop.is_set():
                _LOG.info("stop requested (%s)", request.request_id)
                self._stop.set()
            # An idle run would only learn at its next commit that it is fenced.
            if self.fenced is None:
                self.fenced = self._fencing_snapshot(term)
        except (StillstateError, FileNotFoundError):
            _LOG.warning("heartbeat of term %d failed; trying again", self._committer.term.term, exc_info=True)

    def look_for_fencing(self) -> str | None:
        """Who took over, if someone did; None also if the store does not answer."""
        try:
            return self._fencing_snapshot(self._committer.term.term)
        except (StillstateError, FileNotFoundError):
            _LOG.warning("could not look for a newer run", exc_info=True)
            return None

    def _fencing_snapshot(self, term: int) -> str | None:
        if newest_term(self._root) <= term:
            return None
        next_id = self._committer.last.snapshot_id + 1
        if not self._root.exists(manifest_path(next_id)):
            return None
        newest = Manifest.decode(self._root.read(manifest_path(next_id), MANIFEST_BYTES_MAX), manifest_path(next_id))
        if newest.term <= term:
            return None  # our own commit, just made
        return f"term {newest.term} took over from term {term} with snapshot {next_id}; this run stops and publishes nothing"

    def _write(self, message: str) -> None:
        last, term = self._committer.last, self._committer.term
        write_status(
            self._root,
            RunStatus(
                term=term.term,
                run_uid=term.run_uid,
                state=self._state,
                at_ms=self._clock.now_ms(),
                started_at_ms=term.started_at_ms,
                heartbeat_interval_s=self._interval_s,
                pid=term.pid,
                host=term.host,
                snapshot_id=last.snapshot_id,
                batch_id=last.source.batch_id if last.source is not None else -1,
                message=message,
                progress=self._driver.progress if self._driver is not None else None,
            ),
        )


def _check_compatible(before: Manifest, pipeline: CompiledPipeline) -> None:
    """Refuse a pipeline that does not fit the stored state, before a row is processed.

    Raises:
        InvalidPipeline: an operator or state is gone, or a schema changed.
    """
    operators = {operator.uid: operator.entry() for operator in pipeline.operators}
    for old in before.operators:
        new = operators.get(old.uid)
        if new is None:
            raise InvalidPipeline(
                f"snapshot {before.snapshot_id} holds state of operator {old.uid!r}, which the pipeline no longer has. Put it "
                "back (operators match by uid), or start a job with another name"
            )
        if new.kind != old.kind:
            raise InvalidPipeline(
                f"operator {old.uid!r}: it is a {new.kind} now, and a {old.kind} in snapshot {before.snapshot_id}, whose state "
                "it cannot read. Give the changed operator a new uid"
            )
        if new.key_schema != old.key_schema:
            raise InvalidPipeline(
                f"operator {old.uid!r}: its keys are ({new.key_schema}) now, and ({old.key_schema}) in snapshot "
                f"{before.snapshot_id}; state cannot be found under other keys. Give the changed operator a new uid"
            )
        new_states = {state.name: state for state in new.states}
        for state in old.states:
            now = new_states.get(state.name)
            if now is None or now.schema != state.schema:
                raise InvalidPipeline(
                    f"operator {old.uid!r}, state {state.name!r}: the schema is ({now.schema if now else 'gone'}) now, and "
                    f"({state.schema}) in snapshot {before.snapshot_id}. Schema evolution comes with the state engine; "
                    "until then give the changed operator a new uid"
                )


def _local_dir(settings: JobSettings) -> Path:
    """The folder of local copies; private to the user."""
    folder = (
        Path(settings.local_dir) if settings.local_dir else Path(tempfile.gettempdir()) / f"stillstate-{os.getuid()}"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidConfiguration(
            f"local_dir {folder} cannot be used: {error}; choose a folder that you can write to"
        ) from error
    return folder.absolute()


def _child_url(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"
