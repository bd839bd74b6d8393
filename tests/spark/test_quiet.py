"""What a run's heartbeat says of its source, with real queries: it is called quiet once it was asked and had nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming import StatefulProcessor

from state_runtime import StreamingJob, aggregates, foreach_epoch
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store

from .jobs import settings
from .timed import TimedJob

pytestmark = [pytest.mark.spark, pytest.mark.long]

LOOKED_FOR_MS = 3_000
"""For so long heartbeats are read: the run looks at its source once a second."""


class Gate:
    """A named pipe at which another process waits until the test opens it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        os.mkfifo(self.path)

    def open(self) -> None:
        """Let through whoever waits, and whoever comes later."""
        self.held = os.open(self.path, os.O_RDWR)
        os.write(self.held, b"x" * 64)


def wait_at(gate: str) -> None:
    Path(f"{gate}.reached").touch()
    with open(gate, "rb", buffering=0) as pipe:
        pipe.read(1)


class SlowSource(DataSource):
    """A source without rows, which is slow to open, or to say that it has none."""

    @classmethod
    def name(cls) -> str:
        return "slow"

    def schema(self) -> str:
        return "k string, n long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        if self.options["at"] == "opening":
            wait_at(self.options["gate"])
        return SlowReader(self.options["gate"] if self.options["at"] == "asking" else "")


class SlowReader(DataSourceStreamReader):
    def __init__(self, gate: str) -> None:
        self.gate = gate

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def latestOffset(self) -> dict[str, int]:
        if self.gate:
            wait_at(self.gate)
            self.gate = ""
        return {"at": 0}

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        yield from ()


@contextmanager
def running(run: Callable[[], object], stop: threading.Event, gate: Gate) -> Iterator[None]:
    """A run in a thread of its own, ended with the block, whatever happens."""
    failed: list[BaseException] = []

    def go() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        gate.open()
        thread.join(120)
    assert not thread.is_alive()
    assert failed == []


def statuses(catalog: Catalog, enough: Callable[[RunStatus], bool], timeout_s: float = 240.0) -> list[RunStatus]:
    """Heartbeats of a run that runs, each once, until one is enough."""
    found: dict[int, RunStatus] = {}
    deadline_s = time.monotonic() + timeout_s
    while True:
        assert time.monotonic() < deadline_s, f"not in time; the last: {list(found.values())[-1:]}"
        status = catalog.status() if catalog.root.exists("job.json") else None
        if status is not None and status.state == "running":
            found[status.at_ms] = status
            if enough(status):
                return list(found.values())
        os.sched_yield()


def for_a_while(catalog: Catalog) -> list[RunStatus]:
    """The heartbeats of a few seconds from now."""
    (first, *_) = statuses(catalog, lambda _: True)
    return statuses(catalog, lambda status: status.at_ms - first.at_ms >= LOOKED_FOR_MS)


@pytest.mark.parametrize("at", ["opening", "asking"])
def test_a_source_that_has_not_answered_yet_is_not_quiet(spark: SparkSession, tmp_path: Path, at: str) -> None:
    """Spark's own status is the same while a source is opened and while it has nothing."""
    spark.dataSource.register(SlowSource)
    gate, stop = Gate(tmp_path), threading.Event()
    job = StreamingJob("slow", store=str(tmp_path / "store"), settings=settings(tmp_path))
    job.read(lambda s: s.readStream.format("slow").option("gate", str(gate.path)).option("at", at).load()).key_by(
        "k"
    ).aggregate(uid="n", n=aggregates.count()).write(foreach_epoch(lambda *_: None))
    catalog = Catalog(open_store(str(tmp_path / "store")), "slow")
    with running(lambda: job.run(spark, stop=stop), stop, gate):
        while not Path(f"{gate.path}.reached").exists():
            os.sched_yield()
        assert not any(status.quiet for status in for_a_while(catalog))
        gate.open()
        assert statuses(catalog, lambda status: status.quiet)


class HangsInItsTimer(StatefulProcessor):
    """Its timer, soon after the input, waits at a gate."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 200)
        yield Row(k=key[0], what="seen", n=1)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        wait_at(self.gate)
        yield Row(k=key[0], what="fired", n=1)

    def close(self) -> None:
        pass


def test_a_timer_that_hangs_is_no_quiet_source(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing comes in, and yet the run does not get on: it has stalled, if that goes on."""
    gate = Gate(tmp_path)
    job = TimedJob(
        spark,
        tmp_path,
        lambda stream: stream.key_by("k").transform_with_state(
            HangsInItsTimer(str(gate.path)), "k string, what string, n long", uid="u", time_mode="processingTime"
        ),
        scratch_dir=str(tmp_path / "scratch"),
        heartbeat_interval_s=0.2,
    )
    job.forever = True
    job.stop = threading.Event()
    catalog = Catalog(open_store(str(tmp_path / "store")), "timed")

    with running(lambda: job.run([("a", 0, 1)]), _Later(job), gate):
        while not Path(f"{gate.path}.reached").exists():
            os.sched_yield()
        seen = for_a_while(catalog)
        assert not any(status.quiet for status in seen)
        assert len({status.advanced_at_ms for status in seen[len(seen) // 2 :]}) == 1, "it has not got on"
        gate.open()
        assert statuses(catalog, lambda status: status.quiet)


class _Later(threading.Event):
    """The event of whichever run the job has by then."""

    def __init__(self, job: TimedJob) -> None:
        super().__init__()
        self._job = job

    def set(self) -> None:
        self._job.stop.set()
