"""Small jobs that make Java load the classes that most jobs need, and write them into an archive:

    python -m stillstate.orchestration.running.first_run FOLDER ARCHIVE

They use only their folder. Java writes the archive when it ends, which takes longer than the jobs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime import JobContext, JobSettings, ParquetSink, StreamingJob, aggregates, windows
from state_runtime.spark.class_archive import JAVA_OPTIONS
from state_runtime.spark.java_process import end_java
from state_runtime.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Counts", "main", "small_jobs"]

_ROWS: Final = 1_000
_FILES: Final = 3
_NICE: Final = 10
_POLL_S: Final = 0.1


class Counts(StatefulProcessor):
    """Numbers the rows of each key."""

    def init(self, handle: Any) -> None:
        """One value a key."""
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Yield a row for each input row."""
        (n,) = self._seen.get() or (0,)
        for row in rows:
            n += 1
            yield Row(k=key[0], n=n, at=row.at)
        self._seen.update((n,))

    def close(self) -> None:
        """Do nothing: no resource is open."""


def main(folder: Path, archive: Path) -> None:
    """Run the jobs to the end of their input, and wait until Java has written the archive and has ended."""
    os.nice(_NICE)
    session = build_session(
        "stillstate-prepare",
        "local[2]",
        {JAVA_OPTIONS: f'"-XX:ArchiveClassesAtExit={archive}" -Xlog:cds*=off', "spark.sql.session.timeZone": "UTC"},
    )
    for run in small_jobs(session, folder):
        run(lambda: False)
    end_java(session)


def small_jobs(session: SparkSession, folder: Path) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Yield the jobs, each to be run to the end of its input, or until the function that it is given says that it is
    not wanted any more; they use only the folder."""
    _write_input(folder / "parquet", folder / "json")
    for build in (_counts, _minutes):
        yield partial(_run, session, folder, build)


def _run(
    session: SparkSession, folder: Path, build: Callable[[StreamingJob, Path], None], is_over: Callable[[], bool]
) -> None:
    settings = JobSettings(parallelism=2, local_dir=str(folder / "local"))
    job = JobContext(build.__name__.strip("_"), str(folder / "store"), {}, settings).job()
    build(job, folder)
    running = job.start(session, trigger={"availableNow": True})
    while not running.awaitTermination(_POLL_S):
        if is_over():
            running.stop()
            return


def _counts(job: StreamingJob, folder: Path) -> None:
    (
        job.read(lambda spark: _rows(spark, folder))
        .key_by("k")
        .transform_with_state(Counts(), "k long, n long, at timestamp", uid="counts")
        .write(ParquetSink(str(folder / "counts")))
        .transform(lambda rows: rows.where("n > 1"))
        .key_by("k")
        .aggregate(uid="totals", rows=aggregates.count(), most=aggregates.max("n"), mean=aggregates.avg("n"))
        .write(ParquetSink(str(folder / "totals")))
    )


def _minutes(job: StreamingJob, folder: Path) -> None:
    keyed = job.read(lambda spark: _rows(spark, folder).withWatermark("at", "10 seconds")).key_by("k")
    keyed.window(windows.tumbling("1 minute"), uid="minutes", rows=aggregates.count()).write(
        ParquetSink(str(folder / "minutes"))
    )


def _rows(spark: SparkSession, folder: Path) -> DataFrame:
    """Return input of two kinds of file, one of each per batch."""
    reader = spark.readStream.schema("k long, at timestamp").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder / "parquet")).unionByName(reader.json(str(folder / "json")))


def _write_input(parquet: Path, lines: Path) -> None:
    parquet.mkdir()
    lines.mkdir()
    for number in range(_FILES):
        at_us = [(number * _ROWS + n) * 1_000_000 for n in range(_ROWS)]
        table = pa.table({"k": [n % 50 for n in range(_ROWS)], "at": pa.array(at_us, pa.timestamp("us", "UTC"))})
        pq.write_table(table, parquet / f"{number}.parquet")
        lines_of = (json.dumps({"k": n % 50, "at": f"1970-01-01T00:{n % 60:02}:00Z"}) for n in range(_ROWS))
        (lines / f"{number}.json").write_text("\n".join(lines_of) + "\n")


if __name__ == "__main__":
    # Under its own name: Spark's Python workers import the processor from there.
    from stillstate.orchestration.running import first_run

    first_run.main(Path(sys.argv[1]), Path(sys.argv[2]))
