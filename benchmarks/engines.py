"""The two engines behind one small interface: release the next batches, wait, say what each trigger cost.

An engine owns one Spark session with one running streaming query over a folder, `inbox`. A batch is one file of
it (`maxFilesPerTrigger` = 1), so linking n files into the inbox runs n batches, and an engine whose inbox is
exhausted is idle. Both engines read the same files, compute the same output and drop it.

Only this module of the benchmark imports pyspark at run time, and only inside a worker process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.workloads import Side, Workload
from state_runtime.base.allocator import TASKS_KEEP_FREED_MEMORY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from state_runtime import StreamingJob
    from state_runtime.base.progress import Progress

__all__ = ["Engine", "Sample", "WorkerPlan", "open_engine", "our_job", "peer_conf", "set_up_python"]

POLL_S = 0.2
STOP_TIMEOUT_S = 60.0

# Neutral: given to both engines. One file in two row groups becomes two read tasks; an idle query looks for
# files five times a second instead of a hundred, so that it takes no time from the engine whose turn it is.
COMMON_CONF: dict[str, str] = {
    "spark.driver.memory": "3g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.files.openCostInBytes": "65536",
    "spark.sql.streaming.pollingDelay": "200",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
    "spark.python.unix.domain.socket.enabled": "true",
    **TASKS_KEEP_FREED_MEMORY,
}

# What a user who wants speed from Spark's own operators sets.
PEER_CONF: dict[str, str] = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a worker process needs to open its engine.

    Attributes:
        settings: of ours, beside parallelism and local folder: fields of `JobSettings`, a group as a mapping.
        conf: Spark settings that win over the common ones.
        store: URL of the primary store of ours; a folder of the worker by default.
    """

    side: Side
    workload: Workload
    folder: Path
    cores: int
    files: tuple[Path, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    conf: tuple[tuple[str, str], ...] = ()
    store: str = ""
    storage_options: tuple[tuple[str, Any], ...] = ()

    @property
    def store_url(self) -> str:
        """The primary store of ours."""
        return self.store or str(self.folder / "store")

    @property
    def partitions(self) -> int:
        """Shuffle partitions of the stateful operator."""
        return self.workload.partitions or self.cores

    @property
    def output(self) -> str:
        """Folder of the sink, if the workload has one."""
        return str(self.folder / "output")

    @property
    def inbox(self) -> Path:
        """Folder that the query reads."""
        return self.folder / "inbox"


@dataclass(frozen=True)
class Sample:
    """What one trigger cost.

    Attributes:
        batch_id: Which file of the input it was, from 0. Not Spark's number: some of its triggers have no input.
        trigger_ms: Spark's `durationMs.triggerExecution` in both engines: from the look for new input to the
            commit log, the durable checkpoint included.
        checkpoint_ms: Ours: `Progress.checkpoint_ms`. Peer: the state stores' commit time divided by the tasks
            that run at once, plus the commit log.
        state_rows: Rows of state after the batch, as the engine itself counts them.
        phases_ms: Where the trigger's time went: Spark's `durationMs`, and in ours the phases of `Progress`.
        numbers: Of ours, all other numbers of `Progress`.
    """

    batch_id: int
    input_rows: int
    trigger_ms: float
    checkpoint_ms: float
    state_rows: int
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """A running streaming query of one side."""

    def run(self, batches: int, timeout_s: float) -> list[Sample]:
        """Run the next `batches` batches and return when the last is committed."""
        ...

    def stop(self) -> None:
        """Stop the query and the session."""
        ...


class EngineFailed(RuntimeError):
    """The streaming query ended or did not finish its batches in time."""


def open_engine(plan: WorkerPlan) -> Engine:
    """Start the session and the query of one side; the query is idle when this returns."""
    plan.inbox.mkdir(parents=True, exist_ok=True)
    set_up_python()
    return _Ours(plan) if plan.side == "ours" else _Peer(plan)


def set_up_python() -> None:
    """Let Spark's Python workers import what this process does; before the JVM starts."""
    # They are children of the JVM and import benchmarks.processors by name.
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


class _Inbox:
    """Hands the prepared files out, in order."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._files = plan.files
        self._inbox = plan.inbox
        self.released = 0

    def release(self, batches: int) -> None:
        """Link the next files into the inbox: atomic, and the modification time goes along."""
        chosen = self._files[self.released : self.released + batches]
        if len(chosen) < batches:
            raise EngineFailed(f"{self.released + batches} batches asked for, {len(self._files)} prepared")
        for path in chosen:
            os.link(path, self._inbox / path.name)
        self.released += batches


class _Peer:
    """Spark's own stateful operators on RocksDB with changelog checkpointing."""

    def __init__(self, plan: WorkerPlan) -> None:
        from pyspark.sql import SparkSession

        self._plan = plan
        self._inbox = _Inbox(plan)
        builder = SparkSession.builder.master(f"local[{plan.cores}]").appName("benchmark-peer")
        for key, value in peer_conf(plan).items():
            builder = builder.config(key, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("WARN")
        from benchmarks.operators import peer_operator

        output, output_mode = peer_operator(plan.workload.operator, self._spark, plan.workload.schema, plan.inbox)
        writer = output.writeStream.outputMode(output_mode).option(
            "checkpointLocation", str(plan.folder / "checkpoint")
        )
        writer = writer.format("parquet").option("path", plan.output) if plan.workload.sink else writer.format("noop")
        self._query: StreamingQuery = writer.start()

    def run(self, batches: int, timeout_s: float) -> list[Sample]:
        first = self._inbox.released
        self._inbox.release(batches)
        progress = _await_batches(self._query, first, batches, timeout_s)
        return [self._sample(first + number, one) for number, one in enumerate(progress)]

    def stop(self) -> None:
        self._query.stop()
        self._spark.stop()

    def _sample(self, batch: int, progress: Mapping[str, Any]) -> Sample:
        operator = next(iter(progress["stateOperators"]), {"commitTimeMs": 0, "numRowsTotal": 0})
        durations = progress["durationMs"]
        # commitTimeMs is the sum over the partitions, which run `cores` at a time.
        at_once = min(self._plan.cores, self._plan.partitions)
        return Sample(
            batch_id=batch,
            input_rows=progress["numInputRows"] // self._plan.workload.peer_reads,
            trigger_ms=durations["triggerExecution"],
            checkpoint_ms=operator["commitTimeMs"] / at_once + durations.get("commitOffsets", 0),
            state_rows=operator["numRowsTotal"],
            phases_ms=durations,
        )


class _Ours:
    """The same workload as a Stillstate job."""

    def __init__(self, plan: WorkerPlan) -> None:
        from state_runtime.spark.session import build_session

        self._inbox = _Inbox(plan)
        self._spark = build_session(
            "benchmark-ours", master=f"local[{plan.cores}]", conf={**COMMON_CONF, **dict(plan.conf)}
        )
        self._job = our_job(plan)
        self._stop = threading.Event()
        self._epochs: dict[int, Progress] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_job, name="job", daemon=True)
        self._thread.start()
        self._query = self._await_query()

    def run(self, batches: int, timeout_s: float) -> list[Sample]:
        first = self._inbox.released
        self._inbox.release(batches)
        progress = _await_batches(self._query, first, batches, timeout_s, failure=lambda: self._failure)
        return [self._sample(one) for one in progress]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)
        self._spark.stop()
        if self._failure is not None:
            raise EngineFailed("the job failed while it was stopped") from self._failure

    def _run_job(self) -> None:
        try:
            self._job.run(self._spark, on_progress=self._note, stop=self._stop)
        except BaseException as error:  # handed to the thread that waits for batches
            self._failure = error

    def _note(self, progress: Progress) -> None:
        # An epoch without input belongs to no batch; it has the number of the last one.
        if progress.input_rows:
            self._epochs[progress.batch_id] = progress

    def _await_query(self) -> StreamingQuery:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._failure is not None:
                raise EngineFailed("the job failed to start") from self._failure
            active = self._spark.streams.active
            if active:
                return active[0]
            time.sleep(POLL_S)
        raise EngineFailed(f"the job started no streaming query within {STOP_TIMEOUT_S:.0f} s")

    def _sample(self, spark_progress: Mapping[str, Any]) -> Sample:
        ours = self._epochs[spark_progress["batchId"]]
        durations = spark_progress["durationMs"]
        return Sample(
            batch_id=ours.batch_id,
            input_rows=ours.input_rows,
            trigger_ms=durations["triggerExecution"],
            checkpoint_ms=ours.checkpoint_ms,
            state_rows=ours.state_rows,
            phases_ms={**durations, **{phase: round(ms, 2) for phase, ms in ours.phases_ms.items()}},
            numbers=_numbers(ours),
        )


def peer_conf(plan: WorkerPlan) -> dict[str, str]:
    """Return the peer's whole configuration."""
    return {
        **COMMON_CONF,
        **PEER_CONF,
        "spark.sql.shuffle.partitions": str(plan.partitions),
        **dict(plan.workload.peer_conf),
        **dict(plan.conf),
    }


def _numbers(progress: Progress) -> dict[str, float]:
    """The plain numbers of a progress, for the JSON file."""
    fields = progress.to_json_dict()
    return {name: round(value, 2) for name, value in fields.items() if isinstance(value, int | float)}


def our_job(plan: WorkerPlan) -> StreamingJob:
    """The plan's workload as a job; without a sink its output ends in the JVM."""
    from benchmarks.operators import our_operator
    from state_runtime import JobContext, ParquetSink
    from state_runtime.base.settings import JobSettings

    context = JobContext(
        name="benchmark",
        store=plan.store_url,
        options={},
        # A batch is one epoch, as it is the peer's: with a deadline the first ones of a start leave rows in flight, and
        # what is compared per batch would be of a part of it. Rows in flight have a benchmark of their own.
        settings=JobSettings(
            parallelism=plan.partitions,
            local_dir=str(plan.folder / "local"),
            **{"checkpoint": {"mode": "aligned"}, **dict(plan.settings)},
        ),
        storage_options=dict(plan.storage_options),
    )
    job = context.job()
    stream = our_operator(plan.workload.operator, job, plan.workload.schema, plan.inbox)
    if plan.workload.sink:
        stream.write(ParquetSink(plan.output))
    else:
        # Without a reader our output would never leave the Python task, while the peer's ends in the JVM.
        stream.transform(_unchanged)
    return job


def _unchanged(frame: DataFrame) -> DataFrame:
    return frame


def _await_batches(
    query: StreamingQuery,
    first: int,
    batches: int,
    timeout_s: float,
    failure: Any = lambda: None,
) -> list[Mapping[str, Any]]:
    """Wait until Spark has reported the batches with input number first … first + batches - 1, and return their progress.

    Spark reports a trigger after its commit log entry is written; the peer's triggers without input (a watermark that moved)
    are passed over. Polling is slow on purpose: each poll runs in the driver that is being measured.

    Raises:
        EngineFailed: The query ended, or `timeout_s` passed.
    """
    last = first + batches - 1
    deadline = time.monotonic() + timeout_s
    while True:
        newest = query.lastProgress
        if newest is not None and newest["batchId"] >= last:
            found = [one for one in query.recentProgress if one["numInputRows"] > 0]
            if len(found) > last:
                return found[first : last + 1]
        cause = failure() or (None if query.isActive else query.exception())
        if cause is not None or not query.isActive:
            raise EngineFailed(f"the query ended before batch {last}: {cause}") from cause
        if time.monotonic() > deadline:
            raise EngineFailed(f"batch {last} was not done within {timeout_s:.0f} s")
        time.sleep(POLL_S)
