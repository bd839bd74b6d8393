"""The folder of a soak under Dagster: three jobs, their input, a Dagster home with its daemon, a small disk for local copies.

    supervised   local[2]; its supervisor starts it again; the driver folds and gives old checkpoints up
    clustered    two executors of one core; only Dagster starts it again, folds it and gives its old checkpoints up
    unreachable  never started; its store accepts connections and never answers

Life of a `FlightsFolder`: made (written, nothing runs) → `start_daemon` and `kill_daemon`, as often as wanted →
`close`, from any state: nothing that was started here, directly or by Dagster, runs any more. All of it is known by a
word in its environment.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pyarrow.parquet as pq
import pyspark

from examples.flights.data import year_parquet
from examples.flights.replay import DAYS_IN_YEAR, delivered_flights, replay
from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.launchers.processes import process_of
from stillstate.orchestration.starter import instance_settings

__all__ = [
    "CLUSTERED",
    "INTERVAL_S",
    "JOBS",
    "PERIOD_MIN",
    "SCHEDULED",
    "SUPERVISED",
    "UNREACHABLE",
    "Feeder",
    "FlightsFolder",
    "FlightsStopped",
    "days_per_s",
]

ROOT: Final = Path(__file__).resolve().parents[2]
SUPERVISED: Final = "supervised"
CLUSTERED: Final = "clustered"
UNREACHABLE: Final = "unreachable"
JOBS: Final = (SUPERVISED, CLUSTERED)
INTERVAL_S: Final = 10.0
PERIOD_MIN: Final = 6
"""Each schedule is due once in so many minutes, two jobs' at different minutes: two cores bear a few runs a minute."""
SCHEDULED: Final = {
    SUPERVISED: ("retain", "collect", "verify", "drill", "savepoint"),
    CLUSTERED: ("retain", "collect", "verify", "drill", "savepoint", "materialize"),
    UNREACHABLE: ("collect",),
}
"""Jobs of Dagster that a schedule starts, of each stream."""
SLACK_MIN: Final = 15
"""The starts before the disturbances, and the last one, which goes on when the time is up."""
LOCAL_BYTES: Final = 96 << 20
_TOKEN: Final = "STILLSTATE_SOAK_TOKEN"
_STOP_S: Final = 60.0
_COMMAND_S: Final = 300.0
_BLOCK: Final = b"\xa5" * (1 << 20)


class FlightsFolder:
    """See the module.

    Args:
        folder: new or empty.
        hole: the address of a store that accepts and never answers.
    """

    def __init__(self, folder: Path, hole: str) -> None:
        self.folder = folder
        self.config = folder / "stillstate.yaml"
        self.home = folder / "home"
        self.inbox = folder / "inbox"
        self.local = folder / "local"
        self.told = folder / "told.jsonl"
        self.daemon_log = folder / "logs" / "daemon.log"
        for made in (self.home, self.inbox, self.local, self.daemon_log.parent):
            made.mkdir(parents=True)
        (self.home / "dagster.yaml").write_text(instance_settings())
        self.config.write_text(_configuration(hole))
        self.year = year_parquet(folder)
        self._token = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "DAGSTER_HOME": str(self.home),
            "STILLSTATE_CONFIG": str(self.config),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "SPARK_HOME": str(_own_spark_home(folder / "spark-home")),
            _TOKEN: self._token,
        }
        spec = load_spec(self.config, environ=self.environment)
        self.catalogs = {job: Catalog(open_store(spec.job(job).store), job) for job in JOBS}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._is_mounted = False
        self._rows: dict[Path, int] = {}

    # --- the disk for local copies -----------------------------------------------------------------------------------

    def mount_local(self) -> str:
        """Give local copies a small disk of their own; empty, or why that cannot be done here."""
        size = f"size={LOCAL_BYTES},mode=0700"
        asked = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.local)], capture_output=True, text=True
        )
        self._is_mounted = asked.returncode == 0
        return "" if self._is_mounted else (asked.stderr.strip() or f"mount ended with {asked.returncode}")

    def fill_local(self) -> None:
        """Take all room that there is, also what was freed since the last call."""
        with (self.local / "ballast").open("ab", buffering=0) as ballast:
            for size in (len(_BLOCK), 4096):
                with _until_full():
                    while ballast.write(_BLOCK[:size]) == size:
                        pass

    def free_local(self) -> None:
        (self.local / "ballast").unlink()

    # --- what the jobs have made -------------------------------------------------------------------------------------

    def legs(self, job: str) -> Path:
        return self.folder / "out" / job / "legs"

    def by_carrier(self, job: str) -> Path:
        return self.folder / "out" / job / "by-carrier"

    def rows_of(self, job: str) -> int:
        """Rows of the first output, one a flight; published files only."""
        folder = self.legs(job)
        for file in folder.rglob("*.parquet"):
            staged = any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)
            if not staged and file not in self._rows:
                self._rows[file] = pq.read_metadata(file).num_rows
        return sum(rows for file, rows in self._rows.items() if file.is_relative_to(folder))

    def newest(self, job: str) -> Manifest | None:
        """The newest snapshot; None also while it cannot be read, for it is asked again."""
        with suppress(StillstateError):
            return self.catalogs[job].latest()
        return None

    def status(self, job: str) -> RunStatus | None:
        """The newest heartbeat; None also while it cannot be read."""
        with suppress(StillstateError):
            return self.catalogs[job].status()
        return None

    def driver(self, job: str) -> psutil.Process | None:
        """The process that drives a job, once it says that it runs."""
        status = self.status(job)
        return process_of(status, job) if status is not None and status.state == "running" else None

    # --- processes ---------------------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The product's own command line, on this folder."""
        return subprocess.run(
            [sys.executable, "-m", "stillstate.orchestration.cli", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
        )

    def start_daemon(self) -> None:
        """Dagster's daemon, which starts the code location's process."""
        with self.daemon_log.open("ab") as output:
            self._daemon = subprocess.Popen(
                [
                    Path(sys.executable).with_name("dagster-daemon"),
                    "run",
                    "-m",
                    "stillstate.orchestration.definitions",
                    "-a",
                    "defs",
                ],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_daemon(self) -> None:
        """SIGKILL; its code location finds out by itself."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait(_STOP_S)

    def stop_daemon(self) -> None:
        """In order: runs that are under way come to their end."""
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(_STOP_S)

    def daemon_exit(self) -> int | None:
        """How the daemon ended; None while it runs."""
        return None if self._daemon is None else self._daemon.poll()

    def ours(self) -> list[psutil.Process]:
        """Whatever lives of what was started here."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_TOKEN) == self._token
        except psutil.Error:
            return False  # gone, or another user's

    def close(self) -> None:
        # Twice: one of them may have started another while the list was made. The daemon first, which starts most.
        with suppress(subprocess.TimeoutExpired):
            self.kill_daemon()
        for _ in range(2):
            left = self.ours()
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=_STOP_S)
        if self._is_mounted:
            subprocess.run(["umount", str(self.local)], check=True)
            self._is_mounted = False


class FlightsStopped(RuntimeError):
    """The feeder met an error; see its cause."""


class Feeder:
    """Delivers the year at a steady pace beside the soak, a file a day of 2013.

    Args:
        days_per_s: of 2013.
    """

    def __init__(self, folder: FlightsFolder, days_per_s: float) -> None:
        self._folder = folder
        self._days_per_s = days_per_s
        self._is_over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._deliver, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """Deliver nothing more; how many flights there are.

        Raises:
            FlightsStopped: they had stopped to come before.
        """
        self._is_over.set()
        self._thread.join(_STOP_S)
        if self._error is not None:
            raise FlightsStopped(f"no more flights came: {self._error!r}") from self._error
        return delivered_flights(self._folder.inbox)

    def _deliver(self) -> None:
        try:
            year = pq.read_table(self._folder.year)
            for _ in replay(year, self._folder.inbox, days_per_s=self._days_per_s, wait=self._is_over.wait):
                pass
        except Exception as error:
            self._error = error  # told by stop()


def days_per_s(minutes: float) -> float:
    """A file each five seconds; fewer where the year would be over before the soak, with its start and its end."""
    return min(0.2, DAYS_IN_YEAR / ((minutes + SLACK_MIN) * 60))


@contextmanager
def _until_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _own_spark_home(home: Path) -> Path:
    """`local-cluster` writes its executors' folders into it: the installed one belongs to everybody."""
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        (home / part.name).symlink_to(part)
    return home


def _every(minute: int) -> str:
    """A cron line: once in the period, at this minute of it."""
    return f'"{minute % PERIOD_MIN}-59/{PERIOD_MIN} * * * *"'


def _configuration(hole: str) -> str:
    """The file; schedules are spread over the minutes of their period."""
    return f"""\
version: 1
observation: {{interval_s: {INTERVAL_S:g}}}
notify: {{command: [sh, -c, "cat >> told.jsonl && echo >> told.jsonl"]}}
defaults:
  entry_point: examples.flights.job:build
  store: store
  parallelism: 2
  path_options: [inbox, legs, by_carrier]
  trigger: {{processing_time_s: 0.5}}
  checkpoint: {{heartbeat_interval_s: 1}}
  # A process that is gone is seen at once; one that only sleeps must be replaced by the soak, not by Dagster before it.
  recovery: {{heartbeat_timeout_s: 60, backoff_s: 1}}
  migration: {{automatic: true}}
  launcher: {{log_dir: logs}}
jobs:
  {SUPERVISED}:
    local_dir: local/{SUPERVISED}
    scratch_dir: scratch/{SUPERVISED}
    options: {{inbox: inbox, legs: out/{SUPERVISED}/legs, by_carrier: out/{SUPERVISED}/by-carrier}}
    spark: {{master: "local[2]", conf: {{spark.ui.enabled: false, spark.driver.memory: 1g}}}}
    materialization: {{min_bytes: 65536, max_segments: 20}}
    retention: {{retained_checkpoints: 30, keep_last: 30, deleted_share_max: 1.0, schedule: {_every(0)}}}
    garbage: {{min_age_s: 3600, schedule: {_every(1)}}}
    verification: {{sample: {_every(2)}, full: {_every(4)}}}
    drill: {{schedule: {_every(3)}}}
    savepoints: {{schedule: {_every(5)}}}
  {CLUSTERED}:
    local_dir: local/{CLUSTERED}
    scratch_dir: scratch/{CLUSTERED}
    options: {{inbox: inbox, legs: out/{CLUSTERED}/legs, by_carrier: out/{CLUSTERED}/by-carrier}}
    spark:
      master: "local-cluster[2,1,700]"
      conf: {{spark.ui.enabled: false, spark.cores.max: 2, spark.driver.memory: 1g, spark.executor.memory: 700m}}
    materialization:
      by: dagster
      min_bytes: 65536
      max_segments: 40
      schedule: {_every(5)}
      spark: {{master: "local[1]", conf: {{spark.ui.enabled: false, spark.driver.memory: 1g}}}}
    retention: {{retained_checkpoints: 0, keep_last: 15, deleted_share_max: 1.0, schedule: {_every(3)}}}
    garbage: {{min_age_s: 3600, schedule: {_every(4)}}}
    verification: {{sample: {_every(5)}, full: {_every(1)}}}
    drill: {{schedule: {_every(0)}}}
    savepoints: {{schedule: {_every(2)}}}
    launcher: {{restarts: 0}}
  {UNREACHABLE}:
    store: s3://bucket/state
    storage_options:
      {{key: k, secret: s, region: us-east-1, endpoint_url: "{hole}", connect_timeout_s: 2, read_timeout_s: 5, attempts_max: 1}}
    options: {{inbox: inbox, legs: out/{UNREACHABLE}/legs, by_carrier: out/{UNREACHABLE}/by-carrier}}
    garbage: {{schedule: {_every(2)}}}
    verification: {{sample: off, full: off}}
"""
