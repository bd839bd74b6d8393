"""One job of Spark over many small epochs, with everything on that runs beside them: `make soak-long`.

    python -m tests.soak.long --epochs 100000
    python -m tests.soak.long --minutes 75 --every 100

One process of the driver, its JVM and its Python workers live through it all: each epoch reads a few rows, changes the
state, makes a checkpoint and publishes; the log is folded, old checkpoints are given up and garbage is looked for, far
more often than a job's settings would ask for it. Every so many epochs the driver waits until its processes have been
measured: memory, open files, memory maps, threads; live heap of the JVM; files and bytes of the root and of the local
folder.

At the end the last quarter is held against the first, measure by measure: what has grown by more than the bound for
this distance is red. The state must be the count of all rows that were read, and the root must verify in full. Writes
tests/soak/reports/long.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from benchmarks.workers import is_python_worker, private_mib
from state_runtime import ParquetSink, StreamingJob, aggregates
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import MIB
from state_runtime.base.progress import Progress
from state_runtime.base.settings import JobSettings, MaterializationSettings, RetentionSettings
from state_runtime.maintenance import marks
from state_runtime.maintenance.gc import background as collection
from state_runtime.maintenance.gc import survey
from state_runtime.maintenance.gc.collect import plan_gc
from state_runtime.maintenance.retention import background
from state_runtime.maintenance.verify.roots import verify_root
from state_runtime.materialize import records
from state_runtime.reading.snapshot import open_snapshot_for_reading
from state_runtime.snapshot.catalog import Catalog
from state_runtime.spark.session import build_session
from state_runtime.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests" / "soak" / "reports" / "long.json"
JOB: Final = "long"
KEYS: Final = 2000
ROWS: Final = 20
"""Of an epoch."""
COLLECTION_EVERY_S: Final = 60.0
COLLECTION_FLOOR_S: Final = 600.0
RECORDS_KEPT_MS: Final = 300_000
WARM_UP_EPOCHS: Final = 2000
"""They are not held against later ones, or a tenth of a short run is not."""
SETTINGS: Final = JobSettings(
    parallelism=1,
    materialization=MaterializationSettings(max_segments=32),
    retention=RetentionSettings(retained_checkpoints=40),
)

Measures = dict[str, float]


@dataclass(frozen=True)
class Bound:
    """By how much a measure may have grown from one quarter to another.

    Attributes:
        noise: however near they are.
        growth: for each 10,000 epochs between them.
    """

    noise: float
    growth: float

    def most(self, epochs: float) -> float:
        """Between two moments that are so many epochs apart."""
        return self.noise + self.growth * epochs / 10_000


BOUNDS: Final[dict[str, Bound]] = {
    "ms_per_epoch": Bound(40, 2),
    "private_mib": Bound(4, 0.5),
    "rss_mib": Bound(6, 0.5),
    "jvm_private_mib": Bound(100, 5),
    "jvm_rss_mib": Bound(100, 5),
    "jvm_heap_mib": Bound(4, 0.5),
    "arrow_mib": Bound(1, 0.1),
    "objects": Bound(6000, 300),
    "files": Bound(8, 0.5),
    "maps": Bound(250, 5),
    "threads": Bound(8, 0.5),
    "mib": Bound(2, 0.2),
    "root_files": Bound(400, 5),
    "root_mib": Bound(6, 0.2),
    # Spark keeps its last hundred batches.
    "scratch_files": Bound(250, 0.5),
}
"""By the end of a measure's name: the longest that fits."""


def bound_of(measure: str) -> Bound:
    """Of one measure."""
    return BOUNDS[max((end for end in BOUNDS if measure.endswith(end)), key=len)]


@dataclass(frozen=True)
class Held:
    """One measure: the median of its first quarter and that of its last.

    Attributes:
        per_10_000: by how much it grew, for each 10,000 epochs between the two.
        most: by how much it may have grown.
    """

    measure: str
    first: float
    last: float
    per_10_000: float
    most: float

    @property
    def is_red(self) -> bool:
        return self.last - self.first > self.most


def held(epochs: list[int], measured: list[Measures]) -> list[Held]:
    """Each measure, held against its bound.

    Args:
        epochs: after which there is a measurement, ascending; without the warm-up's.
    """
    quarter = max(len(epochs) // 4, 1)
    distance = statistics.median(epochs[-quarter:]) - statistics.median(epochs[:quarter])
    found = []
    for name in measured[0]:
        first, last = (statistics.median(m[name] for m in part) for part in (measured[:quarter], measured[-quarter:]))
        grown = (last - first) / max(distance, 1) * 10_000
        found.append(
            Held(name, round(first, 2), round(last, 2), round(grown, 2), round(bound_of(name).most(distance), 2))
        )
    return found


# --- the driver ----------------------------------------------------------------------------------------------------


@dataclass
class Driven:
    """What the driver's process knows of its epochs, and tells by lines of JSON; each is answered by one."""

    epochs: int
    every: int
    spark: SparkSession
    stop: threading.Event = field(default_factory=threading.Event)
    rows: int = 0
    seen: int = 0

    def epoch(self, progress: Progress) -> None:
        """One more."""
        self.rows += progress.input_rows
        self.seen += 1
        if self.seen % self.every == 0 and not self.stop.is_set():
            self.tell()
        if self.seen >= self.epochs:
            self.stop.set()

    def tell(self) -> None:
        """Wait until somebody has looked at this process."""
        gc.collect()
        jvm = self.spark._jvm
        assert jvm is not None
        jvm.java.lang.System.gc()
        java = jvm.java.lang.Runtime.getRuntime()
        heap = java.totalMemory() - java.freeMemory()
        say({"epoch": self.seen, "objects": len(gc.get_objects()), "arrow": pa.total_allocated_bytes(), "heap": heap})
        if json.loads(sys.stdin.readline()) == "stop":
            self.stop.set()


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def drive(folder: Path, epochs: int, every: int) -> None:
    """The driver's process, from its start to its end."""
    collection.FIRST_AFTER_S = collection.EVERY_S = COLLECTION_EVERY_S
    # Records of folds are kept for days, and a driver remembers them: here there are as many in minutes. And an hour by
    # which clocks may differ is a third of a soak.
    for module, name, value in (
        *((module, "RECORD_KEPT_MS", RECORDS_KEPT_MS) for module in (records, survey)),
        *((module, "CLOCK_SKEW_MS", 0) for module in (marks, survey, background)),
    ):
        setattr(module, name, value)
    collection.plan_gc = partial(plan_gc, min_age_s=COLLECTION_FLOOR_S, unsafe_min_age=True)  # type: ignore[assignment]

    def rows(spark: SparkSession) -> DataFrame:
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("startTimestamp", 1)
        return source.load().selectExpr(f"(value * 7919) % {KEYS} AS key")

    spark = build_session("soak-long", master="local[1]", conf={"spark.ui.enabled": "false"})
    settings = SETTINGS.model_copy(update={"local_dir": str(folder / "local"), "scratch_dir": str(folder / "scratch")})
    job = StreamingJob(JOB, store=str(folder / "store"), settings=settings)
    counts = job.read(rows).key_by("key").aggregate(uid="counts", n=aggregates.count())
    counts.write(ParquetSink(str(folder / "out")))
    driven = Driven(epochs, every, spark)
    job.run(spark, on_progress=driven.epoch, stop=driven.stop)
    say({"rows": driven.rows, "epochs": driven.seen})
    spark.stop()


# --- the looks -----------------------------------------------------------------------------------------------------


def role_of(process: psutil.Process) -> str:
    """What a child of the driver does; "" for one that is gone or does nothing for long."""
    try:
        if process.name() == "java":
            return "jvm"
        if is_python_worker(process):
            return "workers"
        return "folding" if "state_runtime.materialize.process" in process.cmdline() else ""
    except psutil.Error:
        return ""


def of_processes(driver: psutil.Process) -> Measures:
    """Of the driver and its children, those of one role together."""
    found: Measures = {}
    roles = [(driver, "driver"), *((child, role_of(child)) for child in driver.children(recursive=True))]
    for role in ("driver", "folding", "workers", "jvm"):
        for name in ("private_mib", "rss_mib", "files", "maps", "threads"):
            found[f"{role}_{name}"] = 0
    for process, role in roles:
        if role:
            for name, value in of_process(process).items():
                found[f"{role}_{name}"] += value
    return found


def of_process(process: psutil.Process) -> Measures:
    with process.oneshot():
        return {
            "private_mib": private_mib(process),
            "rss_mib": process.memory_info().rss / MIB,
            "files": process.num_fds(),
            "maps": len(Path(f"/proc/{process.pid}/maps").read_text().splitlines()),
            "threads": process.num_threads(),
        }


def of_folder(name: str, folder: Path) -> Measures:
    """Files and bytes; what goes while it is looked at does not count."""
    sizes = []
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                sizes.append(os.stat(os.path.join(place, file)).st_size)
            except FileNotFoundError:
                continue
    return {f"{name}_files": len(sizes), f"{name}_mib": sum(sizes) / MIB}


@dataclass
class Watched:
    """The driver's process, watched until it ends.

    Attributes:
        epochs, measured: after which epochs it was looked at, and what was found.
        ended: the driver's last line.
    """

    folder: Path
    asked: argparse.Namespace
    epochs: list[int] = field(default_factory=list)
    measured: list[Measures] = field(default_factory=list)
    ended: dict[str, Any] = field(default_factory=dict)
    begun_s: float = field(default_factory=time.monotonic)

    def watch(self) -> int:
        """Its exit code."""
        command = [sys.executable, "-m", "tests.soak.long", "--drive", str(self.folder)]
        command += ["--epochs", str(self.asked.epochs), "--every", str(self.asked.every)]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as driver:
            try:
                self._follow(driver)
                return driver.wait(120)
            finally:
                driver.kill()

    def _follow(self, driver: subprocess.Popen[str]) -> None:
        assert driver.stdout is not None
        assert driver.stdin is not None
        process = psutil.Process(driver.pid)
        looked_s, looked_epoch = self.begun_s, 0
        with Bar() as bar:
            task = bar.add_task("epochs", total=self.asked.epochs)
            for text in driver.stdout:
                line = json.loads(text)
                if "epoch" not in line:
                    self.ended = line
                    return
                ms = (time.monotonic() - looked_s) * 1000 / (line["epoch"] - looked_epoch)
                found = self._look(process, line, ms)
                self.epochs.append(line["epoch"])
                self.measured.append(found)
                bar.update(task, completed=line["epoch"])
                if not bar.console.is_terminal:
                    brief = ", ".join(f"{name} {found[name]:.1f}" for name in found if name.endswith("private_mib"))
                    print(f"epoch {line['epoch']:,}: {ms:.0f} ms each, {brief}", file=sys.stderr, flush=True)
                self.note([])
                is_over = time.monotonic() - self.begun_s > self.asked.minutes * 60
                driver.stdin.write(json.dumps("stop" if is_over else "go") + "\n")
                looked_s, looked_epoch = time.monotonic(), line["epoch"]

    def _look(self, process: psutil.Process, line: dict[str, Any], ms: float) -> Measures:
        own = {"ms_per_epoch": ms, "driver_objects": line["objects"], "driver_arrow_mib": line["arrow"] / MIB}
        return {
            **own,
            **of_processes(process),
            "jvm_heap_mib": line["heap"] / MIB,
            **of_folder("root", self.folder / "store"),
            **of_folder("local", self.folder / "local"),
            **of_folder("scratch", self.folder / "scratch"),
        }

    @property
    def count(self) -> int:
        """Epochs that are known of."""
        return int(self.ended.get("epochs", self.epochs[-1] if self.epochs else 0))

    def held(self) -> list[Held]:
        """All measures against their bounds, without the warm-up."""
        if not self.measured:
            return []
        warm = min(WARM_UP_EPOCHS, self.epochs[-1] // 10)
        kept = [at for at, epoch in enumerate(self.epochs) if epoch > warm]
        return held([self.epochs[at] for at in kept], [self.measured[at] for at in kept])

    def note(self, problems: list[str]) -> None:
        """Write what is known by now: a soak of hours may be cut."""
        names = self.measured[0] if self.measured else {}
        report = {
            "epochs": self.count,
            "every": self.asked.every,
            "seconds": round(time.monotonic() - self.begun_s, 1),
            "problems": problems,
            "held": [asdict(row) for row in self.held()],
            "at_epochs": self.epochs,
            "measured": {name: [round(m[name], 2) for m in self.measured] for name in names},
        }
        self.asked.report.parent.mkdir(parents=True, exist_ok=True)
        self.asked.report.write_text(json.dumps(report) + "\n")


def problems_of(watched: Watched, code: int) -> Iterator[str]:
    """What does not hold of the job itself."""
    if code != 0 or not watched.ended:
        yield f"the driver ended with exit code {code}"
        return
    store = str(watched.folder / "store")
    (state,) = open_snapshot_for_reading(f"{store}/{JOB}").states("counts")
    counted = sum(row["n"] for batch in state.batches() for row in batch.to_pylist())
    if counted != watched.ended["rows"]:
        yield f"the state counts {counted:,} rows, and {watched.ended['rows']:,} were read"
    report = verify_root(Catalog(open_store(store), JOB).root, level="full", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
    yield from (f"verify: {finding}" for finding in report.findings)


def shown(rows: list[Held], epochs: int) -> Table:
    table = Table(title=f"one driver over {epochs:,} epochs")
    for column in ("measure", "first quarter", "last quarter", "per 10,000 epochs", "may grow by", ""):
        table.add_column(column, justify="left" if column in ("measure", "") else "right")
    for row in rows:
        numbers = (f"{number:,.2f}" for number in (row.first, row.last, row.per_10_000, row.most))
        table.add_row(row.measure, *numbers, "red" if row.is_red else "")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100_000, help="of the job (100,000)")
    parser.add_argument("--every", type=int, default=250, help="epochs from one look to the next (250)")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="after which it ends early (a day)")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON with what was measured")
    parser.add_argument("--drive", type=Path, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.drive is not None:
        drive(asked.drive, asked.epochs, asked.every)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="soak-long-"))
    watched = Watched(folder, asked)
    problems = list(problems_of(watched, watched.watch()))
    rows = watched.held()
    problems += (
        f"{r.measure} grew by {r.last - r.first:,.2f}, and may grow by {r.most:,.2f}" for r in rows if r.is_red
    )
    Console(width=120).print(shown(rows, watched.count))
    watched.note(problems)
    if problems:
        for problem in problems:
            print(f"does not hold: {problem}", file=sys.stderr)
        print(f"All files stay in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
