"""The small language of Spark's `StreamTest` (a Scala trait beside its streaming suites), on our jobs and on Spark itself.

A query runs on while rows are added; a check looks at what it gave once nothing is left to do, batches without rows
included. A `MemoryStream` is a folder of files here: all files of one `Add` are one batch.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from state_runtime import Progress, StreamingJob, foreach_epoch
from state_runtime.driver.epochs import EpochDriver
from tests.job_settings import job_settings

__all__ = [
    "BROKEN",
    "Add",
    "AllRows",
    "Case",
    "Clear",
    "LastBatch",
    "NewRows",
    "OnOurJobs",
    "OnSpark",
    "Repeat",
    "Start",
    "Stop",
    "Streams",
    "Suite",
    "Watermark",
    "play",
]

PATIENCE_S = 120.0
BROKEN = "broken"
"""A file that is there until `Repeat`: for queries that fail as long as it is."""
TYPES = {"int": pa.int32(), "long": pa.int64(), "string": pa.string(), "timestamp": pa.timestamp("us", "UTC")}
TYPES["array<int>"] = pa.list_(pa.int32())


@dataclass(frozen=True)
class Streams:
    """The streams that a case reads, by name, as frames of one session."""

    spark: SparkSession
    root: Path
    schemas: Mapping[str, str]

    def __getitem__(self, name: str) -> DataFrame:
        return self.spark.readStream.schema(self.schemas[name]).parquet(str(self.root / name))


Query = Callable[[Streams], DataFrame]
Rows = Sequence[Any]
"""Rows as tuples; a row of one column may stand there without one. Times are texts in UTC."""


@dataclass(frozen=True)
class Add:
    """`AddData`, `MultiAddData`: rows of streams, seen in one batch. A stopped query sees them when it starts again.

    Attributes:
        files: how many files the rows of a stream are spread over: its partitions.
        fails: what the error says with which the batch ends the query (`ExpectFailure`).
    """

    rows: Mapping[str, Rows]
    files: int = 1
    fails: str = ""


@dataclass(frozen=True)
class NewRows:
    """`CheckNewAnswer`: the rows since the check before."""

    rows: Rows = ()


@dataclass(frozen=True)
class AllRows:
    """`CheckAnswer`: all rows so far."""

    rows: Rows = ()


@dataclass(frozen=True)
class LastBatch:
    """`CheckLastBatch`: the rows of the last batch; it may be one without input."""

    rows: Rows = ()


@dataclass(frozen=True)
class Watermark:
    """The watermark of the last batch that had input.

    Attributes:
        ours: on our jobs, where that is known to differ: after a restart Spark has forgotten what each source had seen
            (docs/design/0045-queries.md).
    """

    seconds: float
    ours: float | None = None


@dataclass(frozen=True)
class Stop:
    """`StopStream`."""


@dataclass(frozen=True)
class Start:
    """`StartStream` from the same checkpoint, with another query if one is given. Our jobs have another number of
    shards then, and no local copies.

    Attributes:
        refused: what a refusal of this start says.
    """

    query: Query | None = None
    schemas: Mapping[str, str] | None = None
    refused: str = ""


@dataclass(frozen=True)
class Clear:
    """The rows so far are forgotten, as by `MemorySink.clear()`."""


@dataclass(frozen=True)
class Repeat:
    """The batch that failed is tried again: what made it fail is gone."""


Step = Add | NewRows | AllRows | LastBatch | Watermark | Stop | Start | Clear | Repeat


@dataclass(frozen=True)
class Case:
    """One query of a test of Spark's, with what the test does and asserts.

    Attributes:
        test: the name in Spark's suite.
        part: of several queries of one test, which.
        schemas: of the streams.
        says: the words of an error, if that is what the test asserts.
        says_here: the words of ours, if it has others.
        refused: the words by which `job.query` refuses what the test asks for, today.
        conf: settings of the session.
        no_data_batches: `spark.sql.streaming.noDataMicroBatches.enabled`.
        quick: it is in `make test`.
    """

    test: str
    query: Query
    steps: Sequence[Step] = ()
    mode: Literal["append", "update", "complete"] = "append"
    part: str = ""
    schemas: Mapping[str, str] = field(default_factory=lambda: {"input": "value int"})
    says: Sequence[str] = ()
    says_here: Sequence[str] = ()
    refused: str = ""
    conf: Mapping[str, str] = field(default_factory=dict)
    no_data_batches: bool = True
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.test} ({self.part})" if self.part else self.test


@dataclass(frozen=True)
class Suite:
    """A suite of Spark's.

    Attributes:
        name: the Scala class.
        source: repository and commit from which it was read.
        cases: those that are played.
        not_run: tests that are not, and why.
    """

    name: str
    source: str
    cases: Sequence[Case]
    not_run: Mapping[str, str]


@dataclass
class Given:
    """What a query gave: the rows of each batch, and the watermark of each batch with input."""

    batches: list[list[tuple[Any, ...]]] = field(default_factory=list)
    watermarks_ms: list[int] = field(default_factory=list)

    def keep(self, frame: DataFrame) -> None:
        self.batches.append([tuple(_plain(value) for value in row) for row in frame.collect()])


class Engine(Protocol):
    """What a case is played on."""

    given: Given

    def start(self, query: Query, streams: Streams) -> None: ...

    def settle(self) -> None:
        """Wait until nothing is left to do. Raises what ended the query."""

    def stop(self) -> None: ...

    def at_once(self) -> Any:
        """A context in which no batch begins."""


class OnSpark:
    """Spark's own streaming."""

    def __init__(self, spark: SparkSession, root: Path, case: Case) -> None:
        self.given = Given()
        self._spark = spark
        self._checkpoint = root / "checkpoint"
        self._case = case
        self._query: StreamingQuery | None = None

    def start(self, query: Query, streams: Streams) -> None:
        writer = query(streams).writeStream.outputMode(self._case.mode)
        writer = writer.foreachBatch(lambda frame, _: self.given.keep(frame))
        self._query = writer.option("checkpointLocation", str(self._checkpoint)).start()

    def settle(self) -> None:
        assert self._query is not None
        self._query.processAllAvailable()
        with_input = [each for each in self._query.recentProgress if each["numInputRows"] > 0]
        if with_input and "watermark" in with_input[-1]["eventTime"]:
            self.given.watermarks_ms.append(_ms(with_input[-1]["eventTime"]["watermark"]))

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()

    def at_once(self) -> Any:
        assert self._query is not None
        return _no_batch_begins(self._query)


class OnOurJobs:
    """A job of ours. Each start has another number of shards, and no local copies."""

    def __init__(self, spark: SparkSession, root: Path, case: Case) -> None:
        self.given = Given()
        self._spark = spark
        self._root = root
        self._case = case
        self._starts = 0
        self._run: _Run | None = None

    def start(self, query: Query, streams: Streams) -> None:
        shutil.rmtree(self._root / "local", ignore_errors=True)
        settings = job_settings(parallelism=2 + self._starts % 2, local_dir=str(self._root / "local"))
        self._starts += 1
        job = StreamingJob("suite", store=str(self._root / "store"), settings=settings)
        rows = job.query(lambda spark: query(streams), output_mode=self._case.mode, allow_unbounded=True)  # type: ignore[arg-type]
        rows.write(foreach_epoch(lambda frame, _: self.given.keep(frame), empty_epochs=True))
        self._run = _Run(job, self._spark, self.given, self._case.no_data_batches)
        self._run.begin()

    def settle(self) -> None:
        assert self._run is not None
        self._run.settle()

    def stop(self) -> None:
        if self._run is not None:
            self._run.end()

    def at_once(self) -> Any:
        assert self._run is not None
        return _no_batch_begins(self._run.query)


class _Run:
    """One run of a job, in a thread of its own.

    It is at rest when Spark has read all that there is, and the run's driver has looked afterwards and found nothing
    due. The driver looks all the time: each look wakes who waits here.
    """

    def __init__(self, job: StreamingJob, spark: SparkSession, given: Given, no_data_batches: bool) -> None:
        self._job = job
        self._spark = spark
        self._given = given
        self._no_data_batches = no_data_batches
        self._looked = threading.Condition()
        self._stop = threading.Event()
        self._driver: EpochDriver | None = None
        self._error: Exception | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._go, name="run")

    @property
    def query(self) -> StreamingQuery:
        """Spark's query below the run."""
        (found,) = (query for query in self._spark.streams.active if str(query.name).startswith(f"{self._job.name} ("))
        return found

    def begin(self) -> None:
        """Begin, and wait until the query runs."""
        self._thread.start()
        self._wait_until(lambda: self._driver is not None)
        self._raise()

    def settle(self) -> None:
        if not self._has_ended:
            # What ends the query ends the run as well, with an error that says more.
            with _ended_with_the_run(self):
                self.query.processAllAvailable()
        self._wait_until(lambda: self._is_at_rest)
        self._raise()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the run does not end"
        self._raise()

    def wait_for_end(self) -> None:
        self._wait_until(lambda: False)

    @property
    def _is_at_rest(self) -> bool:
        return self._driver is not None and (not self._no_data_batches or self._driver.has_nothing_to_do)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._looked:
            assert self._looked.wait_for(lambda: self._has_ended or is_so(), PATIENCE_S), "nothing moves"

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _go(self) -> None:
        looks = EpochDriver.is_due

        def look(driver: EpochDriver) -> bool:
            is_due = looks(driver) and self._no_data_batches
            with self._looked:
                self._driver = driver
                self._looked.notify_all()
            return is_due

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(EpochDriver, "is_due", look)
                self._job.run(self._spark, stop=self._stop, on_progress=self._note)
        except Exception as error:  # told where the case waits for it
            self._error = error
        finally:
            with self._looked:
                self._has_ended = True
                self._looked.notify_all()

    def _note(self, progress: Progress) -> None:
        if progress.input_rows:
            self._given.watermarks_ms.append(progress.watermark_ms)


@contextmanager
def _ended_with_the_run(run: _Run) -> Iterator[None]:
    """Let the run say why its query failed."""
    try:
        yield
    except Exception:
        run.wait_for_end()
        if run._error is None:
            raise


@contextmanager
def _no_batch_begins(query: StreamingQuery) -> Iterator[None]:
    """Hold the lock under which Spark asks its sources what is new, as `StreamTest` does for `MultiAddData`."""
    lock = query._jsq.streamingQuery().awaitProgressLock()
    lock.lock()
    try:
        yield
    finally:
        lock.unlock()


def play(case: Case, engine: Engine, spark: SparkSession, root: Path) -> None:
    """Play a case: its steps, and what they assert."""
    played = _Played(case, engine, spark, root)
    try:
        for number, step in enumerate(case.steps):
            played.step(step, f"step {number}, {step}")
    finally:
        played.end()


class _Played:
    """A case that is being played.

    Attributes:
        checked: how many batches a check has seen.
        added: how many `Add` there were.
    """

    def __init__(self, case: Case, engine: Engine, spark: SparkSession, root: Path) -> None:
        self._case = case
        self._engine = engine
        self._spark = spark
        self._root = root
        self._schemas = dict(case.schemas)
        self._query = case.query
        self._runs = False
        self.checked = 0
        self.added = 0
        for name in case.schemas:
            (root / name).mkdir(parents=True)
        (root / BROKEN).touch()
        self._start()

    def step(self, step: Step, where: str) -> None:
        batches = self._engine.given.batches
        match step:
            case Add():
                self._add(step)
            case NewRows():
                self._same([row for batch in batches[self.checked :] for row in batch], step.rows, where)
            case AllRows():
                self._same([row for batch in batches for row in batch], step.rows, where)
            case LastBatch():
                self._same(batches[-1] if batches else [], step.rows, where)
            case Watermark():
                differs = step.ours is not None and isinstance(self._engine, OnOurJobs)
                wanted_s = step.ours if differs and step.ours is not None else step.seconds
                assert self._engine.given.watermarks_ms[-1] == round(wanted_s * 1000), where
            case Stop():
                self._stop()
            case Start():
                self._restart(step)
            case Clear():
                batches.clear()
                self.checked = 0
            case Repeat():
                (self._root / BROKEN).unlink()
                self._start_and_settle()

    def end(self) -> None:
        if self._runs:
            self._stop()

    def _start(self) -> None:
        self._engine.start(self._query, Streams(self._spark, self._root, self._schemas))
        self._runs = True

    def _start_and_settle(self) -> None:
        self._start()
        self._engine.settle()

    def _stop(self) -> None:
        self._runs = False
        self._engine.stop()

    def _restart(self, step: Start) -> None:
        self._query = step.query or self._query
        self._schemas |= step.schemas or {}
        if not step.refused:
            self._start()
            return
        with pytest.raises(Exception, match=step.refused):
            self._start_and_settle()
        self._stop()

    def _add(self, step: Add) -> None:
        with self._engine.at_once() if self._runs else nullcontext():
            for name, rows in step.rows.items():
                for part in range(step.files):
                    self._write(name, rows[part :: step.files], f"{self.added:03}-{part}")
        self.added += 1
        if not self._runs:
            return
        if not step.fails:
            self._engine.settle()
            return
        with pytest.raises(Exception, match=step.fails):
            self._engine.settle()
        self._stop()

    def _write(self, name: str, rows: Rows, file: str) -> None:
        columns = [part.split() for part in self._schemas[name].split(", ")]
        tuples = [row if isinstance(row, tuple) else (row,) for row in rows]
        table = pa.table(
            {
                column: pa.array(
                    [_time(row[place]) if kind == "timestamp" else row[place] for row in tuples], TYPES[kind]
                )
                for place, (column, kind) in enumerate(columns)
            }
        )
        hidden = self._root / name / f".{file}"
        pq.write_table(table, hidden)
        # Files of one batch are read in the order of their times.
        os.utime(hidden, ns=((1_700_000_000 + self.added) * 10**9,) * 2)
        hidden.rename(self._root / name / f"{file}.parquet")

    def _same(self, rows: list[tuple[Any, ...]], expected: Rows, where: str) -> None:
        self.checked = len(self._engine.given.batches)
        wanted = [row if isinstance(row, tuple) else (row,) for row in expected]
        assert Counter(rows) == Counter(wanted), where


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)


def _ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def _plain(value: Any) -> Any:
    """A value as the cases write it: times as texts in UTC, rows as tuples."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value
