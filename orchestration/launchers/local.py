"""Drivers as processes of this machine.

A driver is started in a session of its own, so that it outlives the Dagster run, the terminal and the code server
that started it. What it says goes to one log file per start. Readiness and end are read from its heartbeat on the
store, with the process id only as a second opinion: the same way a launcher on another machine would see it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from orchestration.config.begin_at import NEWEST, BeginAt
from orchestration.config.spec import CONFIG_ENV, JobSpec
from orchestration.launchers.log_files import new_log_file, redacted
from orchestration.launchers.port import Launched, LaunchFailed, Liveness, Stopped, StopTimedOut
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import JobAlreadyRunning, JobNotFound, Unavailable
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import request_stop
from state_runtime.snapshot.term_files import RunState, RunStatus
from state_runtime.store import open_store

__all__ = ["LocalLauncher", "process_of"]

LOG_LINES_SHOWN: Final = 20
LOG_TAIL_BYTES: Final = 64 * 1024
POLL_S: Final = 0.2
TERMINATE_WAIT_S: Final = 20.0  # after SIGTERM: one epoch and Spark's own shutdown
# A process is created a moment before it claims its term; the kernel's and the store's clocks differ by a tick.
CREATED_AFTER_CLAIM_MAX_S: Final = 2.0

_ENDED: Final[frozenset[RunState]] = frozenset({"stopped", "finished", "failed", "fenced"})


class LocalLauncher:
    """See `Launcher`.

    Args:
        config: the configuration file, passed on to the driver.
        job: what to start.
        command: what starts a driver, without the arguments `run JOB --config FILE …`.
        poll: waits between two looks at the store; returns at once in tests.
    """

    def __init__(
        self,
        config: Path,
        job: JobSpec,
        *,
        command: Sequence[str] = (sys.executable, "-m", "orchestration.cli"),
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        host: str | None = None,
        poll: Callable[[float], object] | None = None,
    ) -> None:
        self._config = config
        self._job = job
        self._command = tuple(command)
        self._clock = clock
        self._ids = ids
        self._host = socket.gethostname() if host is None else host
        self._poll: Callable[[float], object] = threading.Event().wait if poll is None else poll
        self._store = open_store(job.store, job.storage_options)
        self._catalog = Catalog(self._store, job.name, clock)

    def start(
        self,
        *,
        takeover: bool = False,
        until_idle: bool = False,
        allow_dropped_state: bool = False,
        allow_drained: bool = False,
        take_output: bool = False,
        begin: BeginAt = NEWEST,
    ) -> Launched:
        before = self._catalog.status()
        if before is not None and not takeover:
            self._refuse_if_live(before)
        log = new_log_file(self._job, self._clock, self._ids)
        with log:
            process = subprocess.Popen(
                [
                    *self._command,
                    "run",
                    self._job.name,
                    "--config",
                    str(self._config),
                    *(["--takeover"] if takeover else []),
                    *(["--until-idle"] if until_idle else []),
                    *(["--allow-dropped-state"] if allow_dropped_state else []),
                    *(["--allow-drained"] if allow_drained else []),
                    *(["--take-output"] if take_output else []),
                    *begin.arguments(),
                    # Its stderr is the log file already, so that even the death of Python itself leaves its words.
                    "--log-file",
                    "-",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in this terminal, or the end of this run, is not meant for it
                close_fds=True,
                cwd=self._config.parent,
                env=self._environment(),
            )
        return self._wait_until_running(process, 0 if before is None else before.term, Path(log.name))

    def stop(self) -> Stopped:
        status = self._catalog.status()
        if status is None:
            raise JobNotFound(f"job {self._job.name!r} has never run; there is nothing to stop")
        if status.state in _ENDED:
            return Stopped(self._job.name, status.term, status.state, f"it was already over: {status.state}")
        # Asked even when the process is gone, so that the recovery sensor knows that nobody wants it back.
        request_stop(self._store, self._job.name, status.term, clock=self._clock, ids=self._ids)
        if self.is_alive(status) == "dead":
            return Stopped(self._job.name, status.term, status.state, "its process was already gone")
        ended = self._wait_until_ended(status.term, self._job.launcher.stop_timeout_s)
        if ended is not None:
            return ended
        process = process_of(status, self._job.name) if status.host == self._host else None
        if process is None:
            raise StopTimedOut(
                f"job {self._job.name!r}: term {status.term} (process {status.pid} on {status.host}) did not "
                f"stop within {self._job.launcher.stop_timeout_s:g} s. It may be in a long epoch: call stop "
                "again, raise launcher.stop_timeout_s, or end the process on its host"
            )
        process.terminate()
        ended = self._wait_until_ended(status.term, TERMINATE_WAIT_S)
        if ended is not None:
            return Stopped(ended.job, ended.term, ended.state, f"{ended.how}, after SIGTERM")
        raise StopTimedOut(
            f"job {self._job.name!r}: process {status.pid} still runs {TERMINATE_WAIT_S:g} s after SIGTERM. "
            f"Look at its log in {self._job.launcher.log_dir}; `kill -9 {status.pid}` loses no data"
        )

    def is_alive(self, status: RunStatus) -> Liveness:
        if status.host != self._host:
            return "unknown"
        return "dead" if _living(status) is None else "alive"

    def end_lost(self, status: RunStatus) -> str:
        if status.host != self._host:
            return f"process {status.pid} is on {status.host}; the new run fences it"
        process = process_of(status, self._job.name)
        if process is None:
            return f"process {status.pid} is gone"
        # SIGKILL, since a hanging driver does not answer SIGTERM and a crash at any point is safe.
        process.kill()
        psutil.wait_procs([process], timeout=TERMINATE_WAIT_S)
        return f"killed process {status.pid}, which hung"

    def _environment(self) -> dict[str, str]:
        # The driver works in the configuration's folder, so a checkout that is not installed must be named.
        ours = str(Path(__file__).resolve().parents[2])
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != ours]
        return {
            **os.environ,
            CONFIG_ENV: str(self._config),
            "PYTHONPATH": os.pathsep.join([*paths, ours]),
            "PYTHONUNBUFFERED": "1",
        }

    def _refuse_if_live(self, status: RunStatus) -> None:
        timeout_s = (
            self._job.recovery.start_grace_s if status.state == "starting" else self._job.recovery.heartbeat_timeout_s
        )
        if status.is_live(self._clock.now_ms(), timeout_s) and self.is_alive(status) != "dead":
            raise JobAlreadyRunning(
                f"job {self._job.name!r} already runs: term {status.term}, process {status.pid} on "
                f"{status.host}, heard of {status.age_s(self._clock.now_ms()):.1f} s ago. "
                f"Stop it with `stillstate stop {self._job.name}`, or take it over with --takeover"
            )

    def _wait_until_running(self, process: subprocess.Popen[bytes], before: int, log: Path) -> Launched:
        deadline_s = self._clock.monotonic_s() + self._job.launcher.start_timeout_s
        trouble = ""
        while True:
            # The exit is looked at before the heartbeat: a driver that wrote its last heartbeat and ended in
            # between is then found by the next look instead of being missed.
            code = process.poll()
            try:
                status = self._catalog.status()
            except Unavailable as error:
                # The store's passing fault says nothing about the driver; the deadline bounds the waiting.
                status, trouble = None, f" (the store could not be read: {error})"
            if self._is_ready(status, process.pid, before) and status is not None and code in (None, 0):
                return Launched(
                    job=self._job.name,
                    term=status.term,
                    state=status.state,
                    pid=status.pid,
                    host=status.host,
                    log=str(log),
                )
            if code is not None:
                raise LaunchFailed(
                    f"the driver of {self._job.name!r} ended with exit code {code} before it ran{trouble}. "
                    f"The end of its log {log}:\n{self._tail(log)}",
                    code if 0 < code < 256 else 1,
                )
            if self._clock.monotonic_s() > deadline_s:
                # Nobody knows about it yet; a half-started driver must not surprise a later start.
                process.kill()
                process.wait(TERMINATE_WAIT_S)
                raise LaunchFailed(
                    f"the driver of {self._job.name!r} did not run within "
                    f"{self._job.launcher.start_timeout_s:g} s{trouble} and was ended; raise "
                    f"launcher.start_timeout_s if the machine is slow. The end of its log {log}:\n"
                    f"{self._tail(log)}"
                )
            self._poll(POLL_S)

    def _is_ready(self, status: RunStatus | None, pid: int, before: int) -> bool:
        return (
            status is not None
            and status.term > before
            and status.pid == pid
            and status.state in ("running", "finished", "stopped")
        )

    def _wait_until_ended(self, term: int, timeout_s: float) -> Stopped | None:
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            status = self._catalog.status()
            if status is not None and status.term > term:
                return Stopped(self._job.name, term, "fenced", f"term {status.term} took the job over meanwhile")
            if status is not None and status.state in _ENDED:
                return Stopped(self._job.name, term, status.state, f"its run ended: {status.state}")
            if status is not None and self.is_alive(status) == "dead":
                return Stopped(self._job.name, term, status.state, "its process ended without a last word")
            if self._clock.monotonic_s() > deadline_s:
                return None
            self._poll(POLL_S)

    def _tail(self, log: Path) -> str:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = deque(file.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines(), LOG_LINES_SHOWN)
        return redacted(self._job, "\n".join(f"  {line}" for line in lines) or "  (empty)")


def process_of(status: RunStatus, job: str) -> psutil.Process | None:
    """The process of a run on this host, if it lives and its command line says that it drives this job.

    The stricter question, asked before a signal is sent: process ids are used again.
    """
    process = _living(status)
    if process is None:
        return None
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return None
    at = arguments.index("run") if "run" in arguments else -1
    return process if at > 0 and job in arguments[at + 1 :] else None


def _living(status: RunStatus) -> psutil.Process | None:
    try:
        process = psutil.Process(status.pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None  # nobody has collected its exit code yet; it will never write again
        created_s = process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return process  # it exists, and that is all we may know; whoever sends a signal asks `process_of`
    if created_s > status.started_at_ms / 1000 + CREATED_AFTER_CLAIM_MAX_S:
        return None  # born after the run began: the id was given to someone else
    return process
