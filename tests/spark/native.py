"""Native Spark queries with every kind of state, and the same classes in a job of ours: for the import of the one into the other."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import ParquetSink, StreamingJob
from tests.job_settings import job_settings

from .homes import Home

SCHEMA = "k string, g int, v long, ts timestamp"
OUTPUT = "k string, g int, what string, n long, text string"
STARTED_MS = 1_700_000_000_000
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
HOUR_MS = 3_600_000
ATTEMPTS = 8


def write_rounds(inbox: Path, first: int, count: int) -> None:
    """Files of one round each; event time goes on by 40 seconds from round to round, with a late row in each."""
    inbox.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        rows = range(number * 8, number * 8 + 8)
        times = [STARTED_MS + number * 40_000 + (v % 8) * 1_000 - (200_000 if v % 8 == 7 else 0) for v in rows]
        table = pa.table(
            {
                "k": pa.array([None if v % 11 == 10 else f"k{v % 5}" for v in rows]),
                "g": pa.array([v % 2 for v in rows], pa.int32()),
                "v": pa.array(rows, pa.int64()),
                "ts": pa.array(times, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
            }
        )
        path = inbox / f"{number:05d}.parquet"
        pq.write_table(table, inbox / f".{number:05d}")
        os.utime(inbox / f".{number:05d}", ns=((1_700_000_000 + number) * 10**9,) * 2)
        (inbox / f".{number:05d}").rename(path)


class Everything(StatefulProcessor):
    """Values with nested columns, a list, a map, and timers in event time; it says all of its state with every row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.count = handle.getValueState(
            "count", "n long, last struct<at: timestamp, odd: boolean>, amount decimal(12,2)"
        )
        self.items = handle.getListState("items", "v long, name string")
        self.by_rest = handle.getMapState("by-rest", "rest int", "sum double, day date")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda r: r.v):
            n, _, amount = self.count.get() or (0, None, Decimal(0))
            self.count.update((n + 1, Row(at=row.ts, odd=bool(row.v % 2)), amount + Decimal("1.25")))
            self.items.appendValue((row.v, None if row.v % 3 else f"item {row.v}"))
            before = self.by_rest.getValue((row.v % 4,))
            self.by_rest.updateValue(
                (row.v % 4,), ((before[0] if before else 0.0) + row.v, dt.date(2024, 1, 1 + row.v % 28))
            )
            self.handle.registerTimer(_ms(row.ts) + 30_000 + 1_000 * (row.v % 7))
        yield self._said(key, "input", timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        fired_ms = expiredTimerInfo.getExpiryTimeInMs()
        if fired_ms % 3 == 0:
            self.by_rest.removeKey((fired_ms // 1_000 % 4,))
        yield self._said(key, f"timer {fired_ms}", timerValues)

    def _said(self, key: Any, what: str, timerValues: Any) -> Row:
        count = self.count.get()
        items = [tuple(item) for item in self.items.get()]
        entries = sorted((tuple(k), tuple(v)) for k, v in self.by_rest.iterator())
        text = f"{count} {items} {entries} {sorted(self.handle.listTimers())} {timerValues.getCurrentWatermarkInMs()}"
        return Row(k=key[0], g=key[1], what=what, n=count[0] if count else -1, text=text)

    def close(self) -> None:
        pass


class WithTtl(StatefulProcessor):
    """States with a TTL of an hour, in the pandas flavour and processing time; times that differ between runs are not said."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long", HOUR_MS)
        self.items = handle.getListState("items", "v long", HOUR_MS)
        self.by_rest = handle.getMapState("by-rest", "rest int", "n long", HOUR_MS)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frame = pd.concat(list(rows)).sort_values("v")
        n = (self.count.get() or (0,))[0] + len(frame)
        self.count.update((n,))
        self.items.appendList([(int(v),) for v in frame["v"]])
        for v in frame["v"]:
            before = self.by_rest.getValue((int(v) % 4,))
            self.by_rest.updateValue((int(v) % 4,), ((before[0] if before else 0) + 1,))
        if not list(self.handle.listTimers()):
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 100 * HOUR_MS)
        items, entries = [v for (v,) in self.items.get()], sorted((k[0], v[0]) for k, v in self.by_rest.iterator())
        text = f"{items} {entries} {len(list(self.handle.listTimers()))}"
        yield pd.DataFrame({"k": [key[0]], "g": [int(key[1])], "what": ["input"], "n": [n], "text": [text]})

    def close(self) -> None:
        pass


def _ms(at: dt.datetime) -> int:
    return int(at.timestamp() * 1000)


FLAVOURS: dict[str, tuple[type[StatefulProcessor], str]] = {
    "rows": (Everything, "eventTime"),
    "pandas": (WithTtl, "processingTime"),
}


def source(spark: SparkSession, inbox: Path, flavour: str) -> DataFrame:
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(inbox))
    return frame.withWatermark("ts", "50 seconds") if flavour == "rows" else frame


def run_native(spark: SparkSession, inbox: Path, checkpoint: Path, output: Path, flavour: str) -> None:
    """Spark's own query, until its input is processed."""
    processor, time_mode = FLAVOURS[flavour]
    keyed = source(spark, inbox, flavour).groupBy("k", "g")
    apply = keyed.transformWithState if flavour == "rows" else keyed.transformWithStateInPandas
    frame = apply(processor(), OUTPUT, "update", time_mode)
    with_conf = {
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.shuffle.partitions": "3",
        # The state store of Spark needs the checksum file system that our session replaces.
        "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
        "fs.file.impl.disable.cache": "true",
    }
    before = {name: spark.conf.get(name, None) for name in with_conf}
    for name, value in with_conf.items():
        spark.conf.set(name, value)
    try:
        writer = frame.writeStream.outputMode("update").option("checkpointLocation", str(checkpoint))
        writer = writer.foreachBatch(_Appended(output)).trigger(availableNow=True)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                writer.start().awaitTermination()
                break
            except StreamingQueryException as error:
                # Spark gives the worker that asks a processor for its states 10 s to start, which a busy machine may not.
                if attempt == ATTEMPTS or "failed to connect back" not in str(error):
                    raise
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


class _Appended:
    """Each batch's output in a folder of its own, so that a batch that is run again replaces it."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        frame.coalesce(1).write.mode("overwrite").parquet(str(self.output / f"batch={batch_id}"))


def job(
    root: Path, inbox: Path, flavour: str, name: str = "native", *, home: Home | None = None, **changed: Any
) -> StreamingJob:
    """A job of ours with the same class over the same input."""
    processor, time_mode = FLAVOURS[flavour]
    settings = job_settings(
        **{"parallelism": 2, "local_dir": str(root / "local"), "heartbeat_interval_s": 0.5, **changed}
    )
    home = home or Home(str(root / "store"))
    made = StreamingJob(name, store=home.url, storage_options=home.options, settings=settings)
    keyed = made.read(lambda spark: source(spark, inbox, flavour)).key_by("k", "g")
    apply = keyed.transform_with_state if flavour == "rows" else keyed.transform_with_state_in_pandas
    apply(processor(), OUTPUT, uid="everything", time_mode=time_mode, output_mode="update").write(
        ParquetSink(str(root / "out"), epoch_column=None), name="out"
    )
    return made


def rows_of(spark: SparkSession, *paths: Path) -> list[tuple[Any, ...]]:
    """All output rows, comparable."""
    found: list[tuple[Any, ...]] = []
    for path in paths:
        if path.exists():
            frame = spark.read.schema(OUTPUT).parquet(str(path))
            found += [tuple(row) for row in frame.select("k", "g", "what", "n", "text").collect()]
    return sorted(found, key=repr)
