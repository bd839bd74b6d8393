"""`python -m benchmarks.inflight`: does the time of a checkpoint depend on skew, backlog and backpressure, and at what price.

Each run is a process of its own (:mod:`benchmarks.inflight_job`), measured by what it says became durable when; each figure in
pieces, kept in benchmarks/results/pieces as soon as they are done. Prints one table and writes benchmarks/results/inflight.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import pyspark
import typer
from rich.progress import Progress

from benchmarks.inflight_job import Plan
from benchmarks.inflight_workloads import (
    ALIGNED,
    BACKLOG,
    CAP_BYTES,
    COST_US,
    DEFAULT,
    EVEN_ROWS,
    EXECUTOR_KILLED_EVERY_S,
    KILL_FILES,
    KILL_FILES_PER_BATCH,
    KILLS,
    PIECES,
    RESTARTS,
    SKEW,
    UNALIGNED,
    UNDISTURBED_S,
    durable,
    figures_of,
    first_s,
    intervals_s,
    keys_of_shards,
    rows_per_s,
    write_file,
    written_once,
)
from benchmarks.pieces import Benchmark, Options
from benchmarks.workers import is_python_worker, private_mib
from state_runtime.changelog.parts import PartEntry
from state_runtime.changelog.segment import FOOTER_BYTES, decode_index
from state_runtime.maintenance.layout import kind_of

__all__ = ["app"]

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 900.0
LOOK_EVERY_S = 0.05
TASK_BYTES = 8 << 20
LARGE = 50
ROW_BYTES = 32
"""Of a row in memory: key, amount, hash, place."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Only these pieces, e.g. [b]skew,backlog[/b].")] = "",
    scale: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Share of rows and repeats; below 1 nothing is judged.")
    ] = 1.0,
    table: Annotated[bool, typer.Option("--table", help="Measure nothing, show what there is.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the working folder with the stores and logs.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a target is missed.")] = False,
) -> None:
    """Measure rows in flight: checkpoint times under skew and backlog, restarts, kills, throughput, memory.

    Example: [b]python -m benchmarks.inflight --only backlog[/b]
    """
    Benchmark("inflight", PIECES, _measure, figures_of).run(Options(only, scale, table, keep, strict), RESULTS)


def _measure(name: str, folder: Path, *, scale: float, progress: Progress) -> Mapping[str, Any]:
    task = progress.add_task(name, total=None)

    def step(text: str) -> None:
        progress.update(task, description=f"{name}: {text}")

    try:
        of = {
            "skew": _skew, "backlog": _backlog, "kills": _kills, "standby": _standby, "executors": _executors,
            "throughput": _throughput, "cap": _cap, "memory": _memory,
        }[name]  # fmt: skip
        return of(_Bench(folder, scale, step))
    finally:
        progress.remove_task(task)


class _Bench:
    """The folder of a piece, and how its runs are made."""

    def __init__(self, folder: Path, scale: float, step: Any) -> None:
        self.folder, self.scale, self.step = folder, scale, step
        folder.mkdir(parents=True, exist_ok=True)
        self.keys = keys_of_shards()
        warm = folder / "warm"
        for number in range(4):
            write_file(warm, number, (2_000, 2_000), self.keys)
        self._warm = str(warm)
        self._has_archive = False

    def rows(self, rows: int) -> int:
        return max(100, round(rows * self.scale))

    def files(self, name: str, count: int, rows_of_shards: tuple[int, int], first: int = 0) -> int:
        """Write input; all of its rows."""
        return sum(write_file(self.folder / name, first + number, rows_of_shards, self.keys) for number in range(count))

    def plan(self, name: str, inbox: str, settings: Mapping[str, Any] | None, **more: Any) -> Plan:
        """A run's, of ours with these settings, or (None) of Spark's."""
        if more.get("is_prepared") and not self._has_archive:
            self.step("stillstate prepare")
            environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / PREPARED)}
            subprocess.run(PREPARE, check=True, env=environment, stdout=subprocess.DEVNULL)
            self._has_archive = True
        return Plan(
            side="peer" if settings is None else "ours",
            folder=str(self.folder / name),
            inbox=str(self.folder / inbox),
            settings=dict(settings or {}),
            **{"cost_us": COST_US, "warm": self._warm, **more},
        )

    def run(self, plan: Plan) -> list[dict[str, Any]]:
        """To its end; what it said."""
        with _process(plan) as process:
            process.wait(TIMEOUT_S)
            if process.returncode:
                raise RuntimeError(f"{plan.side} failed with {process.returncode}\n{_tail(plan)}")
        return _said(plan)


ENGINES: Mapping[str, Mapping[str, Any] | None] = {
    "unaligned": UNALIGNED,
    "aligned": ALIGNED,
    "default": DEFAULT,
    "spark": None,
}
PREPARED = "prepared"
"""Of an engine's name: unaligned, on a host that `stillstate prepare` was called on; and of its cache folder."""
STANDBY = "standby"
"""Of an engine's name: unaligned, in a process that stood by."""
PREPARE = (sys.executable, "-m", "stillstate.orchestration.cli", "prepare")


def _skew(bench: _Bench) -> dict[str, Any]:
    rows = bench.rows(EVEN_ROWS)
    even = bench.files("even", 10, (rows, rows))
    skewed = bench.files("skewed", 4, (SKEW * rows, rows))
    found: dict[str, Any] = {}
    for name, settings in ENGINES.items():
        bench.step(f"{name}, even")
        flat = bench.run(bench.plan(f"{name}-even", "even", settings, files_per_batch=1, until_rows=even))
        bench.step(f"{name}, one hot shard")
        hot = bench.run(bench.plan(f"{name}-skewed", "skewed", settings, files_per_batch=1, until_rows=skewed))
        found[name] = {"even_s": intervals_s(flat, 2), "skewed_s": intervals_s(hot, 1)}
    return found


def _backlog(bench: _Bench) -> dict[str, Any]:
    rows = bench.rows(EVEN_ROWS)
    even = bench.files("even", 10, (rows, rows))
    found: dict[str, Any] = {}
    for name in (*ENGINES, PREPARED):
        settings, host = ENGINES.get(name, UNALIGNED), {"is_prepared": name == PREPARED}
        found[name] = {"first_s": [], "backlog_s": []}
        for number in range(max(1, round(RESTARTS * bench.scale))):
            bench.step(f"{name}, no backlog")
            job, inbox = f"{name}-{number}", f"{name}-{number}-inbox"
            before = bench.files(inbox, 2, (rows, rows))
            bench.run(bench.plan(job, inbox, settings, until_rows=before))
            waiting = bench.files(inbox, BACKLOG, (rows, rows), first=2)
            bench.step(f"{name}, {BACKLOG} batches waiting, {number + 1}/{RESTARTS}")
            plan = bench.plan(job, inbox, settings, until_rows=waiting, **host)
            newest = _newest_run(bench.run(plan) if number == 0 else _until_durable(plan))
            found[name]["first_s"].append(first_s(newest))
            found[name]["backlog_s"] += intervals_s(newest, 2)
        if name == "unaligned":
            flat = bench.run(bench.plan("even-run", "even", settings, files_per_batch=1, until_rows=even))
            found[name]["even_s"] = intervals_s(flat, 2)
    return found


def _kills(bench: _Bench) -> dict[str, Any]:
    return _killed(bench, "unaligned", PREPARED, "aligned", "spark")


def _standby(bench: _Bench) -> dict[str, Any]:
    return _killed(bench, STANDBY)


def _killed(bench: _Bench, *engines: str) -> dict[str, Any]:
    rows = bench.rows(EVEN_ROWS)
    bench.files("inbox", KILL_FILES, (rows, rows))
    found: dict[str, Any] = {}
    for name in engines:
        bench.step(f"{name}, undisturbed")
        found[name] = {"undisturbed": _committed_per_minute(bench, name, f"{name}-undisturbed", UNDISTURBED_S, 1)}
        for after_s, kills in KILLS.items():
            cycles = max(1, round(kills * bench.scale))
            bench.step(f"{name}, killed {after_s:.0f} s after each of {cycles} starts")
            found[name][f"killed_{after_s:.0f}"] = _committed_per_minute(
                bench, name, f"{name}-{after_s:.0f}", after_s, cycles
            )
    return found


def _committed_per_minute(bench: _Bench, engine: str, job: str, lasts_s: float, lives: int) -> float:
    """Rows that were durable when a job was killed, so long after each start."""
    plan = bench.plan(
        job, "inbox", ENGINES.get(engine, UNALIGNED), warm="", files_per_batch=KILL_FILES_PER_BATCH,
        is_prepared=engine == PREPARED, stood_by=engine == STANDBY,
    )  # fmt: skip
    for _ in range(lives):
        _lives(plan, lasts_s)
    runs = _runs(_said(plan))
    return sum(max((line["rows"] for line in durable(run)), default=0) for run in runs) / (lives * lasts_s / 60)


def _lives(plan: Plan, lasts_s: float) -> None:
    """Start a run, and kill it so long after its query has started: what starts Python and Java is no engine's."""
    with _process(plan) as process:
        _said_after_start(plan, process, lambda run: any(line["what"] == "start" for line in run))
        time.sleep(lasts_s)  # what is measured is what a time brings


def _executors(bench: _Bench) -> dict[str, Any]:
    """The failures of FLIP-76's own test: not the job but a host of its tasks dies, again and again."""
    rows = bench.rows(EVEN_ROWS)
    bench.files("inbox", KILL_FILES, (rows, rows))
    home = _spark_home(bench.folder / "spark-home")
    lasts_s = max(3 * EXECUTOR_KILLED_EVERY_S, UNDISTURBED_S * bench.scale)
    found: dict[str, Any] = {}
    for name in ("unaligned", "aligned", "spark"):
        found[name] = {}
        for kind in ("undisturbed", "killed"):
            bench.step(f"{name} on two executors, {kind}")
            plan = bench.plan(
                f"{name}-{kind}", "inbox", ENGINES[name], warm="", files_per_batch=KILL_FILES_PER_BATCH,
                master="local-cluster[2,1,1024]", spark_home=str(home), conf=TWO_EXECUTORS,
            )  # fmt: skip
            kills, ended = _with_executors_killed(plan, lasts_s, is_disturbed=kind == "killed")
            done = max((line["rows"] for line in durable(_said(plan))), default=0)
            found[name][kind] = done / (lasts_s / 60)
            found[name] |= {"kills": kills, "ended_by_itself": ended}
    return found


TWO_EXECUTORS: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "1g",
    # A killed executor is no fault of the tasks on it: neither engine is to give up for it.
    "spark.task.maxFailures": "100",
    "spark.deploy.maxExecutorRetries": "-1",
}


def _spark_home(folder: Path) -> Path:
    """One that executors may write their folders into: the installed one belongs to everybody."""
    folder.mkdir(parents=True)
    for part in Path(pyspark.__file__).parent.iterdir():
        (folder / part.name).symlink_to(part)
    return folder


def _with_executors_killed(plan: Plan, lasts_s: float, *, is_disturbed: bool) -> tuple[int, bool]:
    """Run so long after the start of the query, and kill the executor that has lived longest every so often; how many were,
    and whether the run ended before its time."""
    kills = 0
    with _process(plan) as process:
        _said_after_start(plan, process, lambda run: any(line["what"] == "start" for line in run))
        ends_s = time.monotonic() + lasts_s
        while process.poll() is None and time.monotonic() < ends_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(EXECUTOR_KILLED_EVERY_S, ends_s - time.monotonic())))
            if is_disturbed and time.monotonic() < ends_s:
                kills += _kill_oldest_executor(process.pid)
        return kills, process.poll() is not None


def _kill_oldest_executor(pid: int) -> int:
    """Of a driver; how many were killed: 0 if it has none just now."""
    executors = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in child.cmdline():
                    executors.append((child.create_time(), child))
    if not executors:
        return 0
    min(executors, key=lambda found: found[0])[1].kill()
    return 1


def _until_durable(plan: Plan) -> list[dict[str, Any]]:
    """Start a run, and kill it once a checkpoint is durable; what it said."""
    with _process(plan) as process:
        _said_after_start(plan, process, lambda run: bool(durable(run)))
    return _said(plan)


def _said_after_start(plan: Plan, process: Any, is_enough: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Wait until a process has said what is waited for."""
    before = len(_runs(_said(plan)))
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        has_ended = process.poll() is not None
        if any(map(is_enough, _runs(_said(plan))[before:])):
            return
        if has_ended or time.monotonic() > deadline:
            raise RuntimeError(f"{plan.side} did not come so far\n{_tail(plan)}")
        time.sleep(LOOK_EVERY_S)


def _throughput(bench: _Bench) -> dict[str, Any]:
    settings: Mapping[str, Mapping[str, Any] | None] = {
        "unaligned": UNALIGNED,
        "aligned": ALIGNED,
        "none": {"checkpoint": {"mode": "aligned", "interval_s": 86_400.0, "pending_bytes_max": 1 << 30}},
        "spark": None,
    }
    found: dict[str, Any] = {}
    for operator, rows, count in (("totals", 1_000_000, 12), ("slow", 30_000, 12)):
        inbox = f"{operator}-inbox"
        total = bench.files(inbox, count, (bench.rows(rows), bench.rows(rows)))
        found[operator] = {name: [] for name in settings}
        for turn in range(3):
            for name, of in settings.items():
                bench.step(f"{operator}, {name}, {turn + 1}/3")
                plan = bench.plan(
                    f"{operator}-{name}-{turn}", inbox, of, operator=operator, cost_us=0.0, files_per_batch=1,
                    until_rows=total,
                )  # fmt: skip
                found[operator][name].append(rows_per_s(bench.run(replace(plan, counts_epochs=name == "none")), 4))
                shutil.rmtree(plan.folder)
    return found


def _cap(bench: _Bench) -> dict[str, Any]:
    cap = max(1 << 20, round(CAP_BYTES * bench.scale))
    settings = {"checkpoint": {"mode": "unaligned", "max_inflight_bytes": cap}}
    rows = bench.rows(EVEN_ROWS) * 5
    total = bench.files("inbox", BACKLOG, (rows, rows))
    bench.step("a backlog larger than the cap")
    plan = bench.plan("job", "inbox", settings, cost_us=COST_US / 5, until_rows=total)
    lines = bench.run(plan)
    waited, bytes_max = written_once(lines)
    parts = _parts(Path(plan.folder) / "store")
    return {
        "rows_waited": waited,
        "bytes_max": bytes_max,
        "cap_bytes": cap,
        "rows_written": sum(p.rows for p in parts),
        "stored_bytes": sum(p.length for p in parts),
        "kept_bytes": sum(p.rows for p in parts) * ROW_BYTES,
    }


def _parts(store: Path) -> list[PartEntry]:
    """The parts of rows in flight that were written, whether a snapshot still names them or not."""
    found = []
    for path in sorted(store.rglob("*.seg")):
        if kind_of(str(path.relative_to(store / "job"))) != "segment":
            continue  # of a task; the index of a segment says what is in it
        body = path.read_bytes()
        length = int.from_bytes(body[-FOOTER_BYTES:][:8], "big") + FOOTER_BYTES
        found += [p for p in decode_index(body[-length:], str(path)).parts if p.kind == "rows"]
    return found


def _memory(bench: _Bench) -> dict[str, Any]:
    settings = {**ALIGNED, "task_bytes_max": TASK_BYTES}
    small = bench.rows(TASK_BYTES // ROW_BYTES)
    one_key = [bench.keys[0][:1], bench.keys[1]]
    found: dict[str, Any] = {}
    for name, operator, keys, rows in (
        ("totals", "last", None, LARGE * small),
        ("slow", "slow", None, LARGE * small // 5),
        ("totals-key", "last", one_key, LARGE * small),
        ("slow-key", "slow", one_key, LARGE * small),
    ):
        found[name] = {}
        for size, count in (("small_mib", small), ("large_mib", rows)):
            bench.step(f"{name}, {count:,} rows in a shard")
            inbox = bench.folder / f"{name}-{size}"
            total = write_file(inbox, 0, (count, 100), keys or bench.keys)
            plan = bench.plan(
                f"{name}-{size}-job", inbox.name, settings, operator=operator, cost_us=0.0, until_rows=total
            )
            found[name][size] = _watched(plan)
    return found


def _watched(plan: Plan) -> float:
    """The most private memory of a Python worker during a run, in MiB."""
    most = 0.0
    with _process(plan) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
                most = max([most, *(private_mib(child) for child in children if is_python_worker(child))])
            time.sleep(LOOK_EVERY_S)
        if process.returncode:
            raise RuntimeError(f"{plan.side} failed with {process.returncode}\n{_tail(plan)}")
    return most


# --- processes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(plan: Plan) -> Any:
    """A run's process; with all of its children it is killed on the way out."""
    folder = Path(plan.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    with open(folder / "job.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.inflight_job", str(folder / "plan.json")],
            stdout=log, stderr=log, start_new_session=True,
            # Both engines start Java as on a host that `stillstate prepare` was not called on, unless the plan says so.
            env={
                **os.environ,
                "XDG_CACHE_HOME": str(folder.parent / PREPARED if plan.is_prepared else folder / "cache"),
                **_cluster_environment(plan),
            },
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid).children(recursive=True)
            for child in [psutil.Process(process.pid), *tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL)
        process.wait()


def _cluster_environment(plan: Plan) -> dict[str, str]:
    """What executors need to start, and to find what this process imports."""
    if not plan.spark_home:
        return {}
    # Without the Scala version Spark looks for the layout of a source tree.
    return {"SPARK_HOME": plan.spark_home, "SPARK_SCALA_VERSION": "2.13", "SPARK_LOCAL_IP": "127.0.0.1"}


def _said(plan: Plan) -> list[dict[str, Any]]:
    path = Path(plan.folder) / "said.jsonl"
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]  # the last line of a killed process may be torn
    return [json.loads(line) for line in whole.splitlines() if line]


def _runs(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The lines of each process by itself."""
    runs: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["what"] == "born":
            runs.append([])
        runs[-1].append(line)
    return runs


def _newest_run(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return _runs(lines)[-1]


def _tail(plan: Plan) -> str:
    lines = (Path(plan.folder) / "job.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(["last lines of its log:", *lines[-25:]])


if __name__ == "__main__":
    app()
