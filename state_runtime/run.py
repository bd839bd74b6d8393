"""One run of a job: term, fencing, heartbeat, Spark's query, and the end."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from state_runtime.changelog.reader import read_source_log
from state_runtime.clock import Clock
from state_runtime.compatibility import reconcile
from state_runtime.driver import DriverContext, EpochDriver
from state_runtime.errors import Fenced, InvalidConfiguration, StillstateError
from state_runtime.gathering import typed_error
from state_runtime.interval import has_intervals
from state_runtime.limits import MANIFEST_BYTES_MAX, MAX_PARALLELISM
from state_runtime.operators import IntervalJoinStep
from state_runtime.pipeline import CompiledPipeline, compile_pipeline
from state_runtime.progress import Progress
from state_runtime.settings import JobSettings
from state_runtime.snapshot.catalog import Catalog, JobInfo
from state_runtime.snapshot.commit import Committer, open_job_root, open_run, refuse_if_live
from state_runtime.snapshot.control import pending_stop
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest, OperatorEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.terms import RunState, RunStatus, newest_term, write_status
from state_runtime.source import SparkCheckpoint
from state_runtime.store import Store
from state_runtime.streams import cleans_up, open_source
from state_runtime.watermark import Policy

if TYPE_CHECKING:
    from state_runtime.job import StreamingJob

__all__ = ["JobRun", "RunResult"]

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunResult:
    """How a run ended: "finished" (the source has an end), or "stopped" (someone asked)."""

    state: Literal["finished", "stopped"]
    last_snapshot_id: int
    epochs: int


class JobRun:
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

    def go(self, trigger: Mapping[str, Any] | None, takeover: bool, allow_dropped_state: bool) -> RunResult:
        """See `StreamingJob.run`."""
        job = self._job
        first = job._steps[0] if job._steps else None
        joined = first.streams if isinstance(first, IntervalJoinStep) else None
        source = open_source(self._spark, job.name, job._source, joined)
        if has_intervals(job.settings) and cleans_up(source.frame):
            raise InvalidConfiguration(
                f"job {job.name!r}: cleanSource removes input files as soon as an epoch is over, but with a checkpoint interval they "
                "are needed until the checkpoint. Leave cleanSource off, or make a checkpoint after each epoch"
            )
        pipeline = compile_pipeline(self._spark, source, job._steps, job.settings)
        if not takeover:
            refuse_if_live(self._catalog, self._clock)
        self._job._store.child(self._job.name).probe()
        info = open_job_root(self._root, self._job.name, clock=self._clock, ids=self._ids)
        before = self._catalog.latest()
        parallelism = self._parallelism(before, info)
        described = [operator.entry() for operator in pipeline.operators]
        fit = partial(
            reconcile,
            operators=described,
            dropped_by_processor=pipeline.dropped,
            allow_dropped_state=allow_dropped_state,
        )
        # Refused before anything is written; then once more on what is really gone on from.
        fit(before, snapshot_id=before.snapshot_id + 1 if before is not None else 1)
        empty = Manifest(FORMAT_VERSION, info.uid, 0, 0, "", "fencing", 0, parallelism)
        committer = open_run(
            self._catalog, info, empty, clock=self._clock, ids=self._ids, host=socket.gethostname(), pid=os.getpid()
        )
        entries = fit(committer.last if before is not None else None, snapshot_id=committer.last.snapshot_id + 1)
        heartbeat = _Heartbeat(self._root, committer, self._job.settings.heartbeat_interval_s, self._clock, self._stop)
        local_dir = _local_dir(self._job.settings)
        checkpoint = SparkCheckpoint(local_dir / "spark" / f"{self._job.name}-{info.uid[:8]}-{committer.term.term}")
        heartbeat.start()
        state: RunState = "failed"
        message = ""
        try:
            driver = self._driver(pipeline, entries, info, committer, checkpoint, parallelism, str(local_dir))
            heartbeat.watch(driver)
            result = self._stream(source.frame, driver, checkpoint, committer, trigger, heartbeat)
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

    def _parallelism(self, before: Manifest | None, info: JobInfo) -> int:
        if info.max_parallelism != MAX_PARALLELISM:
            raise InvalidConfiguration(
                f"job {info.name!r} was created with max_parallelism {info.max_parallelism}, and this version has {MAX_PARALLELISM}: "
                "keys would belong to other shards. Start it with the version that created it; nothing was changed"
            )
        asked = self._job.settings.parallelism
        if asked == 0:
            asked = before.parallelism if before is not None else self._spark.sparkContext.defaultParallelism
        if not 1 <= asked <= MAX_PARALLELISM:
            raise InvalidConfiguration(f"parallelism {asked} is outside 1 … {MAX_PARALLELISM}")
        return asked

    def _watermark_policy(self) -> Policy:
        """How several watermarks are combined: Spark's own setting."""
        value = self._spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy", "min")
        return "max" if str(value).lower() == "max" else "min"

    def _driver(
        self,
        pipeline: CompiledPipeline,
        entries: tuple[OperatorEntry, ...],
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
            entries=entries,
            watermark_policy=self._watermark_policy(),
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
        empty = self._spark.createDataFrame([], source.schema)
        stopped = False
        try:
            while not query.awaitTermination(0.1):  # type: ignore[arg-type]
                if self._stop.is_set() or heartbeat.fenced is not None:
                    stopped = True
                    with driver.lock:
                        driver.stop(0.0)
                    query.stop()
                    break
                if driver.is_due() and _is_idle(query):
                    driver.run_without_batch(empty)
                driver.checkpoint_if_due()
            while not stopped and driver.is_due() and not self._stop.is_set():
                # The source has ended; what its last rows made due still happens.
                driver.run_without_batch(empty)
            if heartbeat.fenced is None:
                driver.finish()
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
        restored, restoring = self._driver.restoring() if self._driver is not None else (0, 0)
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
                restored=restored,
                restoring=restoring,
            ),
        )


def _is_idle(query: StreamingQuery) -> bool:
    """Whether Spark neither works on a batch nor knows of data for one: then an epoch of our own is in nobody's way."""
    status = query.status
    return not status["isTriggerActive"] and not status["isDataAvailable"]


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
