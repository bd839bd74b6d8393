"""One case through two engines: Spark's own operators in a real streaming query, and a `StreamingJob`, over the same files.

Both see the same batches (one file each, all there before the run starts, `availableNow`) and the same processing time: Spark's
query gets a `ManualClock` whose next value is set while a batch runs, and ours the same values through `SparkCheckpoint.clock`.
So every output row is comparable, the ones that hold times included. After the last file both may run epochs without data;
they are compared by what they put out, because Spark runs more of them than anything is due in.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import types as T

from benchmarks.engines import PEER_CONF
from state_runtime import JobSettings, StreamingJob, foreach_epoch
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.settings import CheckpointSettings, MaterializationSettings
from state_runtime.driver.epochs import EpochDriver
from state_runtime.job import Stream
from state_runtime.pipeline.source_position import BatchClock, SparkCheckpoint
from state_runtime.spark.arrow import arrow_schema_of

TIMEOUT_S = 120
FIRST_FILE_S = 1_700_000_000
SHOWN_ROWS = 12

SPARK_CONF = {
    **PEER_CONF,
    "spark.sql.session.timeZone": "UTC",
    # The state store of Spark needs the checksum file system that our session replaces.
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}


@dataclass(frozen=True)
class Batch:
    """One file of input, and the processing time at which both engines take it."""

    rows: Sequence[Mapping[str, Any]]
    at_ms: int = 1_000_000


@dataclass(frozen=True)
class Leg:
    """One run of both engines; several legs of a case go on from where the one before ended (a restart).

    Attributes:
        spark: the operator under test on Spark's stream.
        ours: the same in a job, given the stream to read.
        idle: processing times of the epochs without data after the last file; only processing-time timers need them.
        drops: the leg's code has dropped a state that the one before had; our run must be told.
    """

    spark: Callable[[DataFrame], DataFrame]
    ours: Callable[[StreamingJob, DataFrame], Stream]
    batches: Sequence[Batch]
    idle: Sequence[int] = ()
    drops: bool = False

    @property
    def times_ms(self) -> list[int]:
        return [*(batch.at_ms for batch in self.batches), *self.idle]


@dataclass(frozen=True)
class Case:
    """Input, operator and time: what both engines get.

    Attributes:
        schema: DDL of the input rows.
        watermark: event-time column and delay, as `withWatermark` takes them.
        source: further stateless steps on the input stream, in both engines.
        partitions: of the stateful operator, in both.
        counts_late: whether the number of late rows is comparable.
        conf: settings of the session.
    """

    schema: str
    legs: Sequence[Leg]
    watermark: tuple[str, str] | None = None
    source: Callable[[DataFrame], DataFrame] = lambda frame: frame
    output_mode: str = "update"
    partitions: int = 2
    counts_late: bool = True
    conf: Mapping[str, str] = field(default_factory=dict)

    def stream(self, spark: SparkSession, inbox: Path) -> DataFrame:
        """The input stream, one file a batch."""
        frame = spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1).parquet(str(inbox))
        if self.watermark is not None:
            frame = frame.withWatermark(*self.watermark)
        return self.source(frame)


@dataclass
class Answer:
    """What one engine put out.

    Attributes:
        batches: per data batch the rows, in a form that compares (`canonical`), sorted.
        idle: the same for the epochs without data that had output, per leg.
    """

    batches: list[list[str]] = field(default_factory=list)
    idle: list[list[list[str]]] = field(default_factory=list)
    late_rows: int = 0


class Both:
    """Runs one case through both engines, in a folder of its own."""

    def __init__(self, case: Case, spark: SparkSession, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.inbox = folder / "in"
        self.inbox.mkdir(parents=True)
        self.session = spark.newSession()
        for key, value in {**SPARK_CONF, "spark.sql.shuffle.partitions": str(case.partitions), **case.conf}.items():
            self.session.conf.set(key, value)
        self._files = 0

    def run(self) -> tuple[Answer, Answer]:
        """Spark's answer, then ours."""
        spark, ours = Answer(), Answer()
        for leg in self.case.legs:
            self._write(leg.batches)
            self.spark_leg(leg, spark)
            self.our_leg(leg, ours)
        return spark, ours

    def only(self, whose: str) -> Answer:
        """The answer of one engine alone: "spark" or "ours"."""
        answer = Answer()
        for leg in self.case.legs:
            self._write(leg.batches)
            (self.spark_leg if whose == "spark" else self.our_leg)(leg, answer)
        return answer

    def failures(self) -> tuple[Exception, Exception]:
        """What each engine fails with: Spark, then ours.

        Raises:
            AssertionError: one of them does not fail.
        """
        (leg,) = self.case.legs
        self._write(leg.batches)
        found: list[Exception] = []
        for run in (self.spark_leg, self.our_leg):
            try:
                run(leg, Answer())
            except Exception as error:
                found.append(error)
            else:
                raise AssertionError(f"{run.__name__} went on")
        return found[0], found[1]

    def _write(self, batches: Sequence[Batch]) -> None:
        schema = arrow_schema_of(T._parse_datatype_string(self.case.schema))
        for batch in batches:
            assert batch.rows, "a batch without rows is no batch"
            temporary = self.inbox / f".{self._files:05d}"
            pq.write_table(pa.Table.from_pylist([dict(row) for row in batch.rows], schema), temporary)
            os.utime(temporary, (FIRST_FILE_S + self._files,) * 2)
            temporary.rename(self.inbox / f"{self._files:05d}.parquet")
            self._files += 1

    def spark_leg(self, leg: Leg, answer: Answer) -> None:
        """Run a leg as a Spark streaming query."""
        frame = leg.spark(self.case.stream(self.session, self.inbox))
        times, done = leg.times_ms, threading.Event()
        clock = self.session._jvm.org.apache.spark.util.ManualClock(times[0])
        seen: list[list[str]] = []

        def take(batch: DataFrame, _: int) -> None:
            # Spark has fixed this batch's time already; what is set here is the time of the next.
            clock.setTime(times[min(len(seen) + 1, len(times) - 1)])
            rows = rows_of(batch)
            if done.is_set():
                return
            seen.append(rows)
            if leg.idle and len(seen) == len(times):
                done.set()

        query = start_query(self.session, frame, take, clock, self.case.output_mode, self.folder / "checkpoint")
        try:
            # In processing time Spark always runs one more batch, so a query whose idle batches count never ends by itself.
            while not query.awaitTermination(100):
                if done.is_set():
                    break
        finally:
            query.stop()
        if self.case.counts_late:
            answer.late_rows += sum(_late_rows(json.loads(p.json())) for p in query.recentProgress())
        count = len(leg.batches)
        answer.batches.extend(seen[:count])
        answer.idle.append([rows for rows in seen[count:] if rows])

    def our_leg(self, leg: Leg, answer: Answer) -> None:
        """Run a leg as a job of ours."""
        time = SharedTime(leg.times_ms, len(leg.batches))
        outputs: dict[int, list[str]] = {}
        epochs: list[tuple[int, int]] = []
        job = StreamingJob(
            "parity",
            store=str(self.folder / "store"),
            settings=JobSettings(
                parallelism=self.case.partitions,
                local_dir=str(self.folder / "local"),
                materialization=MaterializationSettings(max_segments=3),
                checkpoint=CheckpointSettings(mode="aligned"),
                runs_max=2,
            ),
            clock=time,
        )

        def take(frame: DataFrame, epoch: int) -> None:
            outputs[epoch] = rows_of(frame)

        leg.ours(job, self.case.stream(self.session, self.inbox)).write(foreach_epoch(take))

        def note(progress: Any) -> None:
            epochs.append((progress.snapshot_id, progress.input_rows))
            time.passed()
            if self.case.counts_late:
                answer.late_rows += progress.late_rows

        with time.shared():
            how = {"allow_dropped_state": True} if leg.drops else {}
            job.run(self.session, trigger={"availableNow": True}, on_progress=note, **how)
        answer.batches.extend(outputs.get(epoch, []) for epoch, rows in epochs if rows)
        answer.idle.append([outputs[epoch] for epoch, rows in epochs if not rows and outputs.get(epoch)])


class SharedTime:
    """The processing time of our run: that of the batch which is next, so that both engines see the same.

    In the epochs without data Spark runs a batch at each time of the schedule; we run one only when something is due, so a time
    at which nothing is gets passed over.
    """

    def __init__(self, times_ms: Sequence[int], batches: int) -> None:
        self._times = list(times_ms)
        self._batches = batches
        self._epoch = 0

    def now_ms(self) -> int:
        """What the driver takes for the next epoch."""
        return self._times[min(self._epoch, len(self._times) - 1)]

    def monotonic_s(self) -> float:
        """Also moved by the schedule: its times are reached by waiting, and not by a jump of the clock."""
        return SYSTEM_CLOCK.monotonic_s() + (self.now_ms() - self._times[0]) / 1000

    def passed(self) -> None:
        """An epoch is over."""
        self._epoch += 1

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Give it to the driver: to its batches, which have Spark's time otherwise, and to the question what is due."""
        is_due, clock = EpochDriver.is_due, SparkCheckpoint.clock

        def due(driver: EpochDriver) -> bool:
            if self._epoch < self._batches:
                return False
            while not is_due(driver):
                if self._epoch + 1 >= len(self._times):
                    return False
                self._epoch += 1
            return self._epoch < len(self._times) or self._batches == len(self._times)

        def batch_clock(checkpoint: SparkCheckpoint, batch_id: int) -> BatchClock:
            return replace(clock(checkpoint, batch_id), batch_time_ms=self.now_ms())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EpochDriver, "is_due", due)
            patch.setattr(SparkCheckpoint, "clock", batch_clock)
            yield


def start_query(
    session: SparkSession, frame: DataFrame, take: Callable[[DataFrame, int], None], clock: Any, mode: str, folder: Path
) -> Any:
    """Start a streaming query with a clock of our own, which Spark's public API has no argument for.

    `DataStreamWriter` makes the sink; the query manager that it would call takes the clock.
    """
    jvm = session._jvm
    writer = frame.writeStream.foreachBatch(take)._jwrite
    function = writer.getClass().getDeclaredField("foreachBatchWriter")
    function.setAccessible(True)
    sinks = jvm.org.apache.spark.sql.execution.streaming.sources
    sink = sinks.ForeachBatchSink(function.get(writer), frame._jdf.exprEnc())
    none = jvm.scala.Option.empty()
    modes = {"append": "Append", "update": "Update", "complete": "Complete"}
    output_mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, modes[mode])()
    return session._jsparkSession.streams().startQuery(
        none,
        none,
        jvm.scala.Option.apply(str(folder)),
        frame._jdf,
        jvm.PythonUtils.toScalaMap({}),
        sink,
        output_mode,
        False,
        True,
        jvm.org.apache.spark.sql.streaming.Trigger.AvailableNow(),
        clock,
        none,
        none,
    )


def _late_rows(progress: Mapping[str, Any]) -> int:
    return sum(operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"])


def rows_of(frame: DataFrame) -> list[str]:
    """All rows as text that compares, sorted: the order inside a batch is free."""
    return sorted(canonical(row) for row in frame.collect())


def canonical(value: Any) -> str:
    """A value as text: equal texts are equal values of equal types, whatever the order of a map's entries."""
    if isinstance(value, Row):
        names = getattr(value, "__fields__", None) or [str(i) for i in range(len(value))]
        return "(" + ", ".join(f"{name}={canonical(part)}" for name, part in zip(names, value)) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{canonical(k)}: {canonical(v)}" for k, v in value.items())) + "}"
    if isinstance(value, np.ndarray):
        # What an empty array's dtype is depends on the other rows of its Arrow batch in Spark.
        value = value.tolist()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(canonical(part) for part in value) + "]"
    if value is pd.NaT:
        return "NaT"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if isinstance(value, datetime) and value.tzinfo is not None:
        # The same zone under another class (zoneinfo, pytz) is the same zone.
        return f"{value.replace(tzinfo=None)!r} {value.tzname()}"
    if isinstance(value, bytes | bytearray):
        return repr(bytes(value))
    return repr(value)


def differences(spark: Answer, ours: Answer) -> list[str]:
    """What differs, batch by batch, in words; empty if nothing does."""
    found: list[str] = []
    if len(spark.batches) != len(ours.batches):
        found.append(f"Spark ran {len(spark.batches)} batches with data, we {len(ours.batches)}")
    for number, (theirs, mine) in enumerate(zip(spark.batches, ours.batches)):
        found.extend(_unequal(f"batch {number}", theirs, mine))
    for number, (theirs_idle, mine_idle) in enumerate(zip(spark.idle, ours.idle)):
        if len(theirs_idle) != len(mine_idle):
            found.append(
                f"leg {number}: Spark has output in {len(theirs_idle)} epochs without data, we in {len(mine_idle)}"
            )
        flat = max(len(theirs_idle), len(mine_idle))
        for index in range(flat):
            theirs = theirs_idle[index] if index < len(theirs_idle) else []
            mine = mine_idle[index] if index < len(mine_idle) else []
            found.extend(_unequal(f"leg {number}, epoch without data {index}", theirs, mine))
    if spark.late_rows != ours.late_rows:
        found.append(f"Spark dropped {spark.late_rows} late rows, we {ours.late_rows}")
    return found


def _unequal(where: str, theirs: list[str], mine: list[str]) -> list[str]:
    if theirs == mine:
        return []
    only_theirs, only_mine = list(theirs), []
    for row in mine:
        if row in only_theirs:
            only_theirs.remove(row)
        else:
            only_mine.append(row)
    lines = [f"{where}: {len(theirs)} rows in Spark, {len(mine)} in ours"]
    # Rows that begin alike stand side by side, and of each only what is around their first difference is worth reading.
    for number in range(min(max(len(only_theirs), len(only_mine)), SHOWN_ROWS)):
        left = only_theirs[number] if number < len(only_theirs) else ""
        right = only_mine[number] if number < len(only_mine) else ""
        same = next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
        for whose, row in (("only Spark", left), ("only ours ", right)):
            if row:
                around = max(0, same - 120)
                lines.append(
                    f"  {whose}: {row[:60]} … {row[around : same + 200]}" if around > 60 else f"  {whose}: {row[:320]}"
                )
    return lines
