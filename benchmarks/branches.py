"""`python -m benchmarks.branches`: what a branch costs beside an operator of its own.

Three jobs over the same files, in turns: one aggregate; another one; and both as branches of one source. What the second
branch adds to an epoch is held against the epochs of its own job, by the processor's time of driver, Java and workers together
and by the clock. Prints one table and writes benchmarks/results/branches.json.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks.engines import COMMON_CONF, set_up_python
from benchmarks.measure import new_console
from benchmarks.report import Figure, Report, Target, describe_machine, median, render_table, usable_cores, write_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_runtime import Progress, StreamingJob

__all__ = ["EpochWatch", "Taken", "app", "report_epochs"]

RESULTS = Path(__file__).parent / "results"
KINDS = ("first", "second", "both")
WARM = 15
"""Epochs of a turn that do not count: plans are learnt, Java compiles."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of an epoch; may be given again.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="That count, of each job in each turn.")] = 25,
    turns: Annotated[int, typer.Option(min=1, help="How often each job runs.")] = 2,
) -> None:
    """Measure a branch; the median of all epochs of a job counts.

    Example: [b]python -m benchmarks.branches --rows 1000[/b]
    """
    report_epochs("branches", rows, epochs, turns, _measured, _figures)


def report_epochs(
    name: str,
    rows: list[int] | None,
    epochs: int,
    turns: int,
    measured: Callable[[SparkSession, int, int, int], Mapping[str, Taken]],
    figures: Callable[[int, Mapping[str, Taken]], list[Figure]],
) -> None:
    """Measure epochs of several jobs in one session; print the table and write the results.

    Args:
        rows: of an epoch; one measurement for each.
        measured: takes rows, epochs and turns, and returns what the epochs of each job took.
        figures: of one measurement, by its rows.
    """
    set_up_python()
    from state_runtime.spark.session import build_session

    spark = build_session(name, master=f"local[{usable_cores()}]", conf=COMMON_CONF)
    found: list[Figure] = []
    samples: dict[str, Any] = {}
    try:
        for count in rows or [1_000, 100_000]:
            taken = measured(spark, count, epochs, turns)
            samples[str(count)] = {kind: {"ms": t.ms, "cpu_ms": t.cpu_ms} for kind, t in taken.items()}
            found += figures(count, taken)
    finally:
        spark.stop()
    settings = {"rows": rows, "epochs": epochs, "turns": turns, "all": COMMON_CONF}
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(name, made_at, tuple(found), describe_machine(), settings, samples)
    new_console().print(render_table(report))
    write_json(report, RESULTS / f"{name}.json")


@dataclass
class Taken:
    """What each epoch took, by the clock and of the processor."""

    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def _figures(rows: int, taken: Mapping[str, Taken]) -> list[Figure]:
    found = []
    for what, target in (("cpu_ms", Target("<=", 1.2)), ("ms", None)):
        first, second, both = (median(getattr(taken[kind], what)) for kind in KINDS)
        name = "processor" if what == "cpu_ms" else "clock"
        found.append(
            Figure(f"{rows:,} rows: a branch / its own job, {name}", "ms", max(0.0, both - first), second, target)
        )
        found.append(Figure(f"{rows:,} rows: both in one job / two jobs, {name}", "ms", both, first + second))
    return found


def _measured(spark: SparkSession, rows: int, epochs: int, turns: int) -> Mapping[str, Taken]:
    """The epochs of each job, without those that warm it up."""
    found: dict[str, Taken] = defaultdict(Taken)
    with tempfile.TemporaryDirectory(prefix="stillstate-bench-") as folder:
        root = Path(folder)
        _write(root / "in", rows, WARM + epochs)
        for turn in range(turns):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                watch = EpochWatch(found[kind], WARM)
                _job(root, kind).run(spark, trigger={"available_now": True}, on_progress=watch)
                for left in ("store", "local", "out"):
                    shutil.rmtree(root / left, ignore_errors=True)
    return found


class EpochWatch:
    """Times epochs from one to the next.

    Args:
        warm: how many do not count.
    """

    def __init__(self, taken: Taken, warm: int) -> None:
        self._taken = taken
        self._left = warm
        self._before = (time.perf_counter(), _cpu_s())

    def __call__(self, progress: Progress) -> None:
        now = (time.perf_counter(), _cpu_s())
        if self._left <= 0 and progress.input_rows:
            self._taken.ms.append((now[0] - self._before[0]) * 1000)
            self._taken.cpu_ms.append((now[1] - self._before[1]) * 1000)
        self._left -= 1
        self._before = now


def _cpu_s() -> float:
    """Of this process and all below it, those that have ended included."""
    used = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used += times.user + times.system + times.children_user + times.children_system
    return used


def _write(folder: Path, rows: int, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        ids = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
        numbers = ids.to_numpy()
        table = pa.table({"id": ids, "a": numbers % 997, "b": numbers * 7 % 1_009, "amount": numbers % 100})
        pq.write_table(table, folder / f"{number:05}.parquet")


def _job(root: Path, kind: str) -> StreamingJob:
    from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates

    schema = "id long, a long, b long, amount long"
    settings = JobSettings(parallelism=usable_cores(), local_dir=str(root / "local"))
    job = StreamingJob(kind, store=str(root / "store"), settings=settings)
    rows = job.read(
        lambda spark: spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / "in"))
    )
    for name, key in (("first", "a"), ("second", "b")):
        if kind in (name, "both"):
            rows.key_by(key).aggregate(uid=name, n=aggregates.count(), total=aggregates.sum("amount")).write(
                ParquetSink(str(root / "out" / name)), name=name
            )
    return job


if __name__ == "__main__":
    app()
