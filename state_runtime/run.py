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
from state_runtime.compatibility import reconcile, refuse_drained
from state_runtime.driver import DriverContext, EpochDriver
from state_runtime.errors import Fenced, InvalidConfiguration, InvalidPipeline
from state_runtime.gathering import typed_error
from state_runtime.heartbeat import Heartbeat
from state_runtime.interval import has_intervals
from state_runtime.limits import MAX_PARALLELISM
from state_runtime.operators import IntervalJoinStep
from state_runtime.pipeline import CompiledPipeline, compile_pipeline
from state_runtime.progress import Progress
from state_runtime.savepoints import Savepoints
from state_runtime.settings import JobSettings
from state_runtime.shard_access import root_id
from state_runtime.snapshot.catalog import Catalog, JobInfo
from state_runtime.snapshot.commit import Committer, refuse_if_live
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest, OperatorEntry
from state_runtime.snapshot.terms import RunState
from state_runtime.source import SparkCheckpoint
from state_runtime.start_from import Beginning
from state_runtime.store import Store
from state_runtime.streams import cleans_up, open_source
from state_runtime.watermark import Policy

if TYPE_CHECKING:
    from state_runtime.job import StreamingJob

__all__ = ["JobRun", "RunResult"]

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 30.0
_CLAIM_TIMEOUT_S = 60.0


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

    def go(
        self,
        trigger: Mapping[str, Any] | None,
        takeover: bool,
        allow_dropped_state: bool,
        allow_drained: bool,
        beginning: Beginning,
    ) -> RunResult:
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
        before = beginning.look()
        refuse_drained(before, f"job {self._job.name!r}", allow_drained=allow_drained)
        parallelism = self._parallelism(before, beginning.info)
        _check_outputs(beginning, pipeline)
        described = [operator.entry() for operator in pipeline.operators]
        fit = partial(
            reconcile,
            operators=described,
            dropped_by_processor=pipeline.dropped,
            allow_dropped_state=allow_dropped_state,
        )
        # Refused before anything is written; then once more on what is really gone on from.
        fit(before, snapshot_id=before.snapshot_id + 1 if before is not None else 1)
        self._root.probe()
        host, pid = socket.gethostname(), os.getpid()
        committer = beginning.open(
            lambda info: Manifest(FORMAT_VERSION, info.uid, 0, 0, "", "fencing", 0, parallelism), host=host, pid=pid
        )
        info = committer.info
        # Another start may have been first: then there is something to go on from that was not there before.
        began_empty = before is None and committer.last.snapshot_id == 1
        entries = fit(None if began_empty else committer.last, snapshot_id=committer.last.snapshot_id + 1)
        ending = beginning.ending(info, f"{host}:{pid}")
        if ending is not None:
            self._on_progress = ending.watching(self._on_progress, committer)
        savepoints = Savepoints(self._root, info, committer.term.term, clock=self._clock, ids=self._ids)
        heartbeat = Heartbeat(
            self._root, committer, self._job.settings.heartbeat_interval_s, self._clock, self._stop, savepoints
        )
        local_dir = _local_dir(self._job.settings)
        # By place, not by uid: a copy of the root may run on this host too, and each removes what it finds of its own.
        checkpoint = SparkCheckpoint(
            local_dir / "spark" / f"{self._job.name}-{root_id(self._root.url)}-{committer.term.term}"
        )
        heartbeat.start()
        savepoints.start()
        state: RunState = "failed"
        message = ""
        try:
            driver = self._driver(
                pipeline, entries, info, committer, checkpoint, parallelism, str(local_dir), savepoints
            )
            heartbeat.watch(driver)
            result = self._stream(source.frame, driver, checkpoint, committer, trigger, heartbeat, savepoints)
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
            savepoints.close(message or state)
            heartbeat.finish(state, message)
            shutil.rmtree(checkpoint.folder, ignore_errors=True)
            if ending is not None:
                ending.close(_CLAIM_TIMEOUT_S)

    def _parallelism(self, before: Manifest | None, info: JobInfo | None) -> int:
        if info is not None and info.max_parallelism != MAX_PARALLELISM:
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
        savepoints: Savepoints,
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
        return EpochDriver(context, committer, checkpoint, self._spark, self._on_progress, savepoints)

    def _stream(
        self,
        source: DataFrame,
        driver: EpochDriver,
        checkpoint: SparkCheckpoint,
        committer: Committer,
        trigger: Mapping[str, Any] | None,
        heartbeat: Heartbeat,
        savepoints: Savepoints,
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
                driver.savepoint_if_asked()
                if self._stop.is_set() or heartbeat.fenced is not None or driver.is_ending:
                    stopped = True
                    with driver.lock:
                        driver.stop()
                    query.stop()
                    break
                if driver.is_due() and _is_idle(query):
                    driver.run_without_batch(empty)
                driver.checkpoint_if_due()
            stopped = stopped or driver.is_ending
            while not stopped and driver.is_due() and not self._stop.is_set():
                # The source has ended; what its last rows made due still happens.
                driver.run_without_batch(empty)
            if heartbeat.fenced is None:
                if savepoints.is_drain_asked and not self._stop.is_set():
                    stopped = True
                    with driver.lock:
                        driver.stop()
                    driver.drain(empty)
                driver.finish()
                self._wait_for_savepoints(driver, heartbeat, savepoints)
        except Exception as error:
            raise driver.failure or typed_error(error) from error
        finally:
            if query.isActive:
                query.stop()
            with driver.lock:
                driver.stop()
            driver.close(_STOP_TIMEOUT_S)
        if driver.failure is not None:
            raise driver.failure
        if heartbeat.fenced is not None:
            raise Fenced(heartbeat.fenced)
        return RunResult("stopped" if stopped else "finished", committer.last.snapshot_id, driver.epochs)

    def _wait_for_savepoints(self, driver: EpochDriver, heartbeat: Heartbeat, savepoints: Savepoints) -> None:
        """The run ends after the copies. One that was to stop after a savepoint waits for it until somebody stops it; any other for
        half a minute: what is left then is gone on with by the next run, or by `stillstate savepoint --resume`."""
        begun_s, is_waiting = self._clock.monotonic_s(), driver.is_ending and not self._stop.is_set()

        def is_enough() -> bool:
            if heartbeat.fenced is not None or (is_waiting and self._stop.is_set()):
                return True
            return not is_waiting and self._clock.monotonic_s() - begun_s > _STOP_TIMEOUT_S

        savepoints.wait(is_enough)


def _check_outputs(beginning: Beginning, pipeline: CompiledPipeline) -> None:
    """Whoever claims a job publishes what that one staged and may not have published.

    Raises:
        InvalidPipeline: a sink of it is missing; nothing was claimed.
    """
    for output in beginning.to_publish:
        if output.files and output.sink not in pipeline.sinks:
            raise InvalidPipeline(
                f"the job that is claimed has output of sink {output.sink!r} that may be unpublished, and the pipeline has no such "
                "sink. Give it one with the same folder, or start the old job once more, which publishes it. Nothing was changed"
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
