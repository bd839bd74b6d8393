"""`python -m benchmarks.restart`: kill -9 of a driver → its first checkpoint, by its supervisor (with a driver that stands
by, and without) and by Dagster alone, on a host that `stillstate prepare` was called on, and by its supervisor on one
where it was not.

A job reads a file every half second and is killed again and again, each time after it has made a few checkpoints. What a
restart took is read from what it left: the birth of the new process, its term, its first manifest. The parts:

    detect       kill → the new driver process is born
    launch       → it has claimed its term: imports, Java, the session, the plan. Of one that stood by: from the kill on
    restore      what the first epoch took to bring the shards back (the slowest of them)
    first epoch  the rest, until the first manifest: the query's start, the first plans, the rows that waited

Prints a table and writes benchmarks/results/restart.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.measure import new_console
from benchmarks.restart_job import KEYS
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers import LocalLauncher
from stillstate.orchestration.launchers.processes import process_of
from stillstate.orchestration.running.prepare import archive_of_host, make_archive
from stillstate.orchestration.starter import instance_settings

__all__ = ["Restart", "app", "restarts_of"]

Found = TypeVar("Found")
By = Literal["standby", "supervisor", "dagster", "plain"]
"""`plain` is by the supervisor, on a host that `stillstate prepare` was not called on; `standby` with
`launcher.standby`."""
RESULTS = Path(__file__).parent / "results" / "restart.json"
ROOT = Path(__file__).resolve().parent.parent
JOB = "restart"
AIMS_S: dict[By, float | None] = {"plain": None, "supervisor": 8.0, "standby": 8.0, "dagster": 20.0}
CHECKPOINTS_BETWEEN = 3
FILE_EVERY_S = 0.5
ROWS_PER_FILE = 1_000
LOOK_EVERY_S = 0.05
TIMEOUT_S = 240.0

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart, in seconds.

    Attributes:
        waiting_mib: private memory of what stood by, Java and Python, right before the kill; 0 without.
    """

    total_s: float
    detect_s: float
    launch_s: float
    restore_s: float
    first_epoch_s: float
    waiting_mib: float = 0.0


@app.command()
def main(
    times: Annotated[int, typer.Option(min=1, help="Kills of each kind.")] = 20,
    by: Annotated[
        str,
        typer.Option(help="`plain` (not prepared), `supervisor`, `standby`, `dagster`, with commas."),
    ] = "plain,supervisor,standby,dagster",
) -> None:
    """Measure restarts. Example: [b]python -m benchmarks.restart --times 5 --by supervisor[/b]"""
    found: dict[str, object] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    table = Table(title=f"kill -9 → first checkpoint, p50 of {times}, seconds")
    for column in ("by", "p50", "min", "max", "aim", "detect", "launch", "restore", "first epoch", "waiting MiB"):
        table.add_column(column, justify="left" if column == "by" else "right")
    with _caches() as caches:
        for name in by.split(","):
            kind = next((known for known in AIMS_S if known == name), None)
            if kind is None:
                raise typer.BadParameter(f"{name!r} is none of {', '.join(AIMS_S)}")
            restarts = _on_its_host(kind, times, caches)
            totals = [r.total_s for r in restarts]
            middle = {field: statistics.median(asdict(r)[field] for r in restarts) for field in asdict(restarts[0])}
            aim_s = AIMS_S[kind]
            table.add_row(
                kind,
                *(f"{value:.1f}" for value in (middle["total_s"], min(totals), max(totals))),
                "-" if aim_s is None else f"{aim_s:.1f}",
                *(f"{middle[field]:.1f}" for field in ("detect_s", "launch_s", "restore_s", "first_epoch_s")),
                f"{middle['waiting_mib']:.0f}",
            )
            found[kind] = {
                "p50": middle,
                "aim_s": aim_s,
                "cores": os.cpu_count(),
                "restarts": [asdict(r) for r in restarts],
            }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    new_console().print(table)


def restarts_of(by: By, times: int) -> list[Restart]:
    """Restarts of one kind, for a table of others."""
    with _caches() as caches:
        return _on_its_host(by, times, caches)


def _on_its_host(by: By, times: int, caches: Path) -> list[Restart]:
    """Where `stillstate prepare` was called, or was not."""
    os.environ["XDG_CACHE_HOME"] = str(caches / ("empty" if by == "plain" else "prepared"))
    if by != "plain" and archive_of_host() is None:
        make_archive()
    return _measured(by, times)


def _measured(by: By, times: int) -> list[Restart]:
    with _working_folder() as work, _input(work / "inbox"):
        config = _written_config(work, by)
        job = load_spec(config).job(JOB)
        catalog = Catalog(open_store(job.store), JOB)
        launcher = LocalLauncher(config, job)
        log = Path(launcher.start().log)
        try:
            with _daemon(work, config) if by == "dagster" else _nothing():
                return [
                    _one(catalog, number, times, waits_in=log if by == "standby" else None)
                    for number in range(1, times + 1)
                ]
        finally:
            _end(launcher, catalog)


def _one(catalog: Catalog, number: int, times: int, *, waits_in: Path | None) -> Restart:
    status = _status(catalog)
    _wait("checkpoints before the kill", lambda: _checkpoints_of(catalog, status.term) >= CHECKPOINTS_BETWEEN)
    if waits_in is not None:
        _wait("a driver that stands by", lambda: waits_in.read_text(errors="replace").count(" stands by") >= number)
    waiting_mib = 0.0 if waits_in is None else _waiting_mib(_status(catalog))
    process = process_of(_status(catalog), JOB)
    if process is None:
        raise RuntimeError("the driver is gone before it was killed")
    killed_s = time.time()
    process.send_signal(signal.SIGKILL)
    after = _wait("a new term", lambda: _later_term(catalog, status.term))
    born_s = psutil.Process(after.pid).create_time()
    first = _wait("its first checkpoint", lambda: _first_of(catalog, after.term))
    total_s = first.created_at_ms / 1000 - killed_s
    restore_s = (first.progress.restore_ms if first.progress is not None else 0.0) / 1000
    claimed_s, begun_s = after.started_at_ms / 1000, max(born_s, killed_s)  # who stood by was born before
    made = Restart(
        total_s=total_s,
        detect_s=begun_s - killed_s,
        launch_s=claimed_s - begun_s,
        restore_s=restore_s,
        first_epoch_s=first.created_at_ms / 1000 - claimed_s - restore_s,
        waiting_mib=waiting_mib,
    )
    Console().print(f"[dim]{number} of {times}: {made.total_s:.1f} s ({after.cause or 'started'})[/]")
    return made


def _waiting_mib(status: RunStatus) -> float:
    """Private memory of the children of the supervisor that are not the driver, with theirs."""
    beside = [p for p in psutil.Process(status.supervisor_pid).children() if p.pid != status.pid]
    all_of_them = [process for one in beside for process in (one, *one.children(recursive=True))]
    return sum(process.memory_full_info().uss for process in all_of_them) / (1 << 20)


def _status(catalog: Catalog) -> RunStatus:
    status = catalog.status()
    if status is None:
        raise RuntimeError("the job has not run")
    return status


def _later_term(catalog: Catalog, term: int) -> RunStatus | None:
    status = _status(catalog)
    return status if status.term > term else None


def _checkpoints_of(catalog: Catalog, term: int) -> int:
    newest = [catalog.manifest(i) for i in catalog.snapshot_ids()[-CHECKPOINTS_BETWEEN - 1 : -1]]
    return sum(manifest.term == term and manifest.kind == "checkpoint" for manifest in newest)


def _first_of(catalog: Catalog, term: int) -> Manifest | None:
    manifests = (catalog.manifest(i) for i in catalog.snapshot_ids()[-10:-1])
    return next((m for m in manifests if m.term == term and m.kind == "checkpoint"), None)


def _wait(what: str, look: Callable[[], Found | None]) -> Found:
    pause, deadline_s = threading.Event(), time.monotonic() + TIMEOUT_S
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited {TIMEOUT_S:.0f} s for {what}")
        pause.wait(LOOK_EVERY_S)


# --- around it --------------------------------------------------------------------------------------------------------


def _written_config(work: Path, by: By) -> Path:
    config = work / "stillstate.yaml"
    config.write_text(
        "version: 1\n"
        "jobs:\n"
        f"  {JOB}:\n"
        "    entry_point: benchmarks.restart_job:build\n"
        "    store: state\n"
        "    parallelism: 2\n"
        "    local_dir: local\n"
        "    options: {inbox: inbox, output: output}\n"
        "    path_options: [inbox, output]\n"
        "    trigger: {processing_time_s: 0.2}\n"
        '    spark: {master: "local[2]", conf: {spark.driver.memory: 1g}}\n'
        f"    launcher: {{restarts: {0 if by == 'dagster' else 50}, standby: {str(by == 'standby').lower()}}}\n"
        "    recovery: {max_attempts: 50}\n"
    )
    return config


@contextmanager
def _caches() -> Iterator[Path]:
    """Cache folders of this run, and the user's own again after it."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="stillstate-restart-cache-") as folder:
        try:
            yield Path(folder)
        finally:
            os.environ.pop("XDG_CACHE_HOME", None)
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


@contextmanager
def _working_folder() -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="stillstate-restart-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _input(inbox: Path) -> Iterator[None]:
    """A file of rows again and again, each complete when it appears."""
    inbox.mkdir(parents=True)
    over, random = threading.Event(), np.random.default_rng(7)

    def write() -> None:
        number = 0
        while not over.wait(FILE_EVERY_S):
            table = pa.table({"key": random.integers(0, KEYS, ROWS_PER_FILE), "value": random.random(ROWS_PER_FILE)})
            hidden = inbox / f".{number:08d}.parquet"
            pq.write_table(table, hidden)
            hidden.rename(inbox / f"{number:08d}.parquet")
            number += 1

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _daemon(work: Path, config: Path) -> Iterator[None]:
    """Dagster's daemon with the project's own instance settings; what it launches it launches in processes."""
    home = work / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(instance_settings())
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "STILLSTATE_CONFIG": str(config),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "dagster._daemon", "run", "-m", "stillstate.orchestration.definitions"]
    with (work / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=work, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end(launcher: LocalLauncher, catalog: Catalog) -> None:
    status = catalog.status()
    if status is not None:
        launcher.end_lost(status)


if __name__ == "__main__":
    app()
