"""The jobs of `benchmarks.inflight`, in a process of their own that says on a file what became durable when.

    python -m benchmarks.inflight_job PLAN.json

Ours and Spark's read the same files, one batch a file or all that wait in one, and give them to the same processor, which takes
a fixed time for each row: a slow one, as in the document of Flink's unaligned checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from benchmarks.engines import COMMON_CONF, PEER_CONF, set_up_python
from state_runtime import aggregates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_runtime.base.progress import Progress

__all__ = ["SCHEMA", "Durable", "Plan", "SlowTotals"]

SCHEMA = "key long, amount long"
OUTPUT = "key long, n long, total long"
POLL_S = 0.02


@dataclass(frozen=True)
class Plan:
    """What a process runs.

    Attributes:
        side: which engine.
        folder: of the job: state, output, and `said.jsonl`, to which a line is added for each durable checkpoint.
        inbox: what the source reads.
        operator: `slow` is the processor, `totals` a vectorised aggregate, `last` one that Spark does not begin for it: it gets
            every row.
        cost_us: of the processor, per row.
        files_per_batch: 0 is all that are there.
        until_rows: end when so many rows are durable; 0 is never: it is stopped or killed.
        settings: of ours, beside parallelism and local folder.
        master: Spark's; by default this process with so many cores.
        spark_home: of executors, where the master is a cluster.
        conf: Spark's, beside the common ones.
        counts_epochs: of ours, an epoch counts when it ends, be it durable or not.
        warm: files that a job of the same kind reads first, so that JVM and workers are warm.
        is_prepared: on a host that `stillstate prepare` was called on.
        stood_by: of ours, the process does before its start what a driver that stands by has done when it is called.
    """

    side: Literal["ours", "peer"]
    folder: str
    inbox: str
    operator: Literal["slow", "totals", "last"] = "slow"
    cost_us: float = 0.0
    files_per_batch: int = 0
    until_rows: int = 0
    parallelism: int = 2
    cores: int = 2
    master: str = ""
    spark_home: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    conf: dict[str, str] = field(default_factory=dict)
    counts_epochs: bool = False
    warm: str = ""
    is_prepared: bool = False
    stood_by: bool = False


@dataclass(frozen=True)
class Durable:
    """One durable checkpoint (of the peer: the end of a trigger), as its line says it.

    Attributes:
        at_s: wall clock.
        rows: processed by the run until then.
        numbers: of ours, of its `Progress`.
    """

    at_s: float
    rows: int
    numbers: dict[str, Any]


class SlowTotals(StatefulProcessor):
    """Counts and sums by key, and takes its time over each row."""

    def __init__(self, cost_us: float) -> None:
        self._cost_s = cost_us / 1e6

    def init(self, handle: Any) -> None:
        """One value a key."""
        self._totals = handle.getValueState("totals", "n long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Adds the rows."""
        n, total = self._totals.get() or (0, 0)
        for row in rows:
            if self._cost_s:
                until = time.perf_counter() + self._cost_s
                while time.perf_counter() < until:
                    continue
            n += 1
            total += row.amount
        self._totals.update((n, total))
        yield Row(key=key[0], n=n, total=total)

    def close(self) -> None:
        """Nothing is open."""


class _Said:
    """The file of lines."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = Path(folder) / "said.jsonl"
        self._lock = threading.Lock()

    def line(self, what: str, **fields: Any) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            print(json.dumps({"what": what, "at_s": time.time(), **fields}), file=file)


def main() -> None:
    """Run a plan; the exit code is 0 once `until_rows` are durable."""
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    set_up_python()
    said = _Said(plan.folder)
    said.line("born", pid=os.getpid())
    spark = _session(plan)
    said.line("session")
    if plan.stood_by:
        # Not at the top: Python workers of both engines import this module.
        from stillstate.orchestration.running.first_run import small_jobs

        small = Path(plan.folder) / "small" / str(os.getpid())
        small.mkdir(parents=True)
        for run in small_jobs(spark, small):
            run()
        said.line("ready")
    if plan.warm:
        warm = Plan(**{**asdict(plan), "folder": f"{plan.folder}/warm", "inbox": plan.warm, "warm": "", "cost_us": 0.0})
        _run(spark, warm, _Said(warm.folder), available_now=True)
        said.line("warm")
    _run(spark, plan, said, available_now=False)
    said.line("ended")
    spark.stop()


def _run(spark: SparkSession, plan: Plan, said: _Said, *, available_now: bool) -> None:
    run = _run_ours if plan.side == "ours" else _run_peer
    run(spark, plan, said, {"availableNow": True} if available_now else None)


def _session(plan: Plan) -> SparkSession:
    conf, master = {**COMMON_CONF, **plan.conf}, plan.master or f"local[{plan.cores}]"
    if plan.side == "ours":
        from state_runtime.spark.session import build_session

        return build_session("inflight", master=master, conf=conf)
    from pyspark.sql import SparkSession as Session

    builder = Session.builder.master(master).appName("inflight")
    for key, value in {**conf, **PEER_CONF, "spark.sql.shuffle.partitions": str(plan.parallelism)}.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    return session


def _rows(spark: SparkSession, plan: Plan) -> DataFrame:
    reader = spark.readStream.schema(SCHEMA)
    if plan.files_per_batch:
        reader = reader.option("maxFilesPerTrigger", plan.files_per_batch)
    return reader.parquet(plan.inbox)


def _run_ours(spark: SparkSession, plan: Plan, said: _Said, trigger: dict[str, Any] | None) -> None:
    from state_runtime import JobContext
    from state_runtime.base.settings import JobSettings

    settings = JobSettings(parallelism=plan.parallelism, local_dir=f"{plan.folder}/local", **plan.settings)
    context = JobContext(name="job", store=f"{plan.folder}/store", options={}, settings=settings, storage_options={})
    job = context.job()
    keyed = job.read(_rows(spark, plan)).key_by("key")
    if plan.operator == "slow":
        stream = keyed.transform_with_state(SlowTotals(plan.cost_us), output_schema=OUTPUT, uid="totals")
    elif plan.operator == "last":
        stream = keyed.aggregate(uid="totals", n=aggregates.count(), last=aggregates.last("amount"))
    else:
        stream = keyed.aggregate(uid="totals", n=aggregates.count(), total=aggregates.sum("amount"))
    stream.transform(_unchanged)  # its output ends in the JVM, as the peer's does
    stop, done, pending = threading.Event(), 0, 0

    def note(progress: Progress) -> None:
        nonlocal done, pending
        pending += progress.inflight.processed_rows if progress.inflight is not None else progress.input_rows
        if progress.checkpoint_ms > 0 or plan.counts_epochs:
            done, pending = done + pending, 0
            said.line("durable", rows=done, numbers=progress.to_json_dict())
        if plan.until_rows and done >= plan.until_rows:
            stop.set()

    said.line("start")
    job.run(spark, trigger=trigger, on_progress=note, stop=stop)


def _run_peer(spark: SparkSession, plan: Plan, said: _Said, trigger: dict[str, Any] | None) -> None:
    from pyspark.sql import functions as F

    frame = _rows(spark, plan)
    if plan.operator == "slow":
        grouped = frame.groupBy("key").transformWithState(SlowTotals(plan.cost_us), OUTPUT, "Update", "None")
    else:
        grouped = frame.groupBy("key").agg(F.count(F.lit(1)).alias("n"), F.sum("amount").alias("total"))
    writer = grouped.writeStream.outputMode("update").format("noop")
    writer = writer.option("checkpointLocation", f"{plan.folder}/checkpoint")
    said.line("start")
    query = (writer.trigger(**trigger) if trigger is not None else writer).start()
    seen, done = -1, 0
    while query.isActive or seen < _newest(query):
        for one in query.recentProgress:
            if one["batchId"] > seen and one["numInputRows"] > 0:
                seen, done = one["batchId"], done + one["numInputRows"]
                said.line("durable", rows=done, numbers=one["durationMs"])
        if plan.until_rows and done >= plan.until_rows:
            query.stop()
        time.sleep(POLL_S)
    if query.exception() is not None:
        raise RuntimeError(str(query.exception()))


def _newest(query: Any) -> int:
    progress = query.lastProgress
    return -1 if progress is None or progress["numInputRows"] == 0 else int(progress["batchId"])


def _unchanged(frame: DataFrame) -> DataFrame:
    return frame


if __name__ == "__main__":
    # Under its own name: Spark's Python workers import the processor from there.
    from benchmarks import inflight_job

    run: Callable[[], None] = inflight_job.main
    run()
