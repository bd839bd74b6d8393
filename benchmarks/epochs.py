"""Epochs of several jobs over the same files, in turns: what each takes by the clock, and of the processor's time of driver,
Java and workers together."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.engines import COMMON_CONF, set_up_python
from benchmarks.measure import new_console
from benchmarks.report import Figure, Report, Target, describe_machine, median, render_table, usable_cores, write_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_runtime import Progress, StreamingJob

__all__ = ["Taken", "Turns", "figures_of_pairs", "kinds_of", "report_epochs"]

RESULTS = Path(__file__).parent / "results"
WARM = 15
"""Epochs of a turn that do not count: plans are learnt, Java compiles."""

Pairs = Mapping[str, tuple[str, str]]
"""By title: a kind of job, and the kind that it is held against."""


@dataclass
class Taken:
    """What each epoch took, by the clock and of the processor."""

    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Turns:
    """What runs in which order.

    Attributes:
        epochs: that count, of each job in each turn.
        turns: how often each job runs.
        kinds: of jobs.
        job: makes the job of a kind in a folder.
        write: writes so many files of so many rows for all jobs: folder, rows, files.
        warm: epochs of a turn that do not count.
    """

    epochs: int
    turns: int
    kinds: Sequence[str]
    job: Callable[[Path, str], StreamingJob]
    write: Callable[[Path, int, int], None]
    warm: int = WARM

    def taken(self, spark: SparkSession, rows: int) -> Mapping[str, Taken]:
        """The epochs of each job, without those that warm it up."""
        found: dict[str, Taken] = defaultdict(Taken)
        with tempfile.TemporaryDirectory(prefix="stillstate-bench-") as folder:
            root = Path(folder)
            self.write(root, rows, self.warm + self.epochs)
            for turn in range(self.turns):
                for kind in self.kinds if turn % 2 == 0 else reversed(self.kinds):
                    watch = _EpochWatch(found[kind], self.warm)
                    self.job(root, kind).run(spark, trigger={"available_now": True}, on_progress=watch)
                    for left in ("store", "local", "out"):
                        shutil.rmtree(root / left, ignore_errors=True)
        return found


def report_epochs(
    name: str,
    rows: list[int] | None,
    turns: Turns,
    figures: Callable[[int, Mapping[str, Taken]], list[Figure]],
) -> None:
    """Measure epochs of several jobs in one session; print the table and write the results.

    Args:
        rows: of an epoch; one measurement for each.
        figures: of one measurement, by its rows.
    """
    set_up_python()
    from state_runtime.spark.session import build_session

    spark = build_session(name, master=f"local[{usable_cores()}]", conf=COMMON_CONF)
    found: list[Figure] = []
    samples: dict[str, Any] = {}
    try:
        for count in rows or [1_000, 100_000]:
            taken = turns.taken(spark, count)
            samples[str(count)] = {kind: {"ms": t.ms, "cpu_ms": t.cpu_ms} for kind, t in taken.items()}
            found += figures(count, taken)
    finally:
        spark.stop()
    settings = {"rows": rows, "epochs": turns.epochs, "turns": turns.turns, "all": COMMON_CONF}
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(name, made_at, tuple(found), describe_machine(), settings, samples)
    new_console().print(render_table(report))
    write_json(report, RESULTS / f"{name}.json")


def kinds_of(pairs: Pairs) -> list[str]:
    """Each kind once, in order."""
    return list(dict.fromkeys(kind for pair in pairs.values() for kind in pair))


def figures_of_pairs(pairs: Pairs, rows: int, taken: Mapping[str, Taken], target: Target | None = None) -> list[Figure]:
    """The medians of each pair.

    Args:
        target: of the processor's time.
    """
    found = []
    for title, (ours, other) in pairs.items():
        for what, name, goal in (("cpu_ms", "processor", target), ("ms", "clock", None)):
            mine, theirs = (median(getattr(taken[kind], what)) for kind in (ours, other))
            found.append(Figure(f"{rows:,} rows: {title}, {name}", "ms", mine, theirs, goal))
    return found


class _EpochWatch:
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
