"""A job over an inbox of small files with event time, run a few batches at a time; its output epoch by epoch."""

from __future__ import annotations

import datetime as dt
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from state_runtime import StreamingJob, foreach_epoch
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from tests.job_settings import job_settings

from .homes import Home

SCHEMA = "k string, at timestamp, n long"
START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
Batch = Sequence[tuple[str, int, int]]


def put(inbox: Path, number: int, rows: Batch) -> None:
    """One file, one batch: rows of (key, seconds after START, n)."""
    inbox.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "k": pa.array([k for k, _, _ in rows], pa.string()),
            "at": pa.array([START + dt.timedelta(seconds=s) for _, s, _ in rows], pa.timestamp("us", "UTC")),
            "n": pa.array([n for _, _, n in rows], pa.int64()),
        }
    )
    pq.write_table(table, inbox / f".{number:04d}.parquet")
    os.utime(inbox / f".{number:04d}.parquet", ns=(1_700_000_000_000_000_000 + number * 1_000_000_000,) * 2)
    (inbox / f".{number:04d}.parquet").rename(inbox / f"{number:04d}.parquet")


class TimedJob:
    """A job over an inbox whose output is collected epoch by epoch."""

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        build: Callable[[Any], Any],
        *,
        home: Home | None = None,
        **settings: Any,
    ) -> None:
        self.spark = spark
        self.folder = folder
        self.home = home or Home(str(folder / "store"))
        self.build = build
        self.settings = settings
        self.allow_dropped_state = False
        self.accept_session_settings = False
        self.clock: Clock = SYSTEM_CLOCK
        self.progress: list[Any] = []
        self.forever = False
        self.until: Callable[[list[tuple[Any, ...]]], bool] | None = None
        self.epochs: dict[int, list[tuple[Any, ...]]] = {}

    def source(self, name: str = "in") -> Callable[[SparkSession], DataFrame]:
        inbox = str(self.folder / name)
        return lambda spark: (
            spark.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(inbox)
            .withWatermark("at", "10 seconds")
        )

    def run(self, *batches: Batch, name: str = "in") -> list[list[tuple[Any, ...]]]:
        """Process the batches and what they make due; output rows of each epoch that had any, sorted."""
        first = len(list((self.folder / name).glob("*.parquet"))) if (self.folder / name).exists() else 0
        for number, batch in enumerate(batches):
            put(self.folder / name, first + number, batch)
        before = set(self.epochs)
        job = StreamingJob(
            "timed",
            store=self.home.url,
            storage_options=self.home.options,
            settings=job_settings(**{"parallelism": 3, "local_dir": str(self.folder / "local"), **self.settings}),
        )

        def collect(frame: DataFrame, epoch: int) -> None:
            # The newest epoch is published again by the next run: the same rows under the same number.
            self.epochs[epoch] = sorted((tuple(r) for r in frame.collect()), key=repr)
            if self.until is not None and self.until(self.epochs[epoch]):
                self.stop.set()

        job._clock = self.clock
        self.build(job.read(self.source(name))).write(foreach_epoch(collect))
        self.progress = []
        self.stop = threading.Event()
        job.run(
            self.spark,
            trigger=None if self.forever else {"availableNow": True},
            on_progress=self.progress.append,
            stop=self.stop,
            allow_dropped_state=self.allow_dropped_state,
            accept_session_settings=self.accept_session_settings,
        )
        return [rows for epoch, rows in sorted(self.epochs.items()) if rows and epoch not in before]

    def manifest(self) -> Any:
        return Catalog(open_store(self.home.url, self.home.options), "timed").latest()
