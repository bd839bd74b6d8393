"""The common part of all launchers: a driver is known by its heartbeat on the store, and a stop is requested through
the store.

A process id is a second source, and only on the host that the run names.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import EXIT_OF_KIND, JobAlreadyRunning, JobNotFound, Unavailable
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import request_stop
from state_runtime.snapshot.term_files import RunState, RunStatus
from state_runtime.store import Store, open_store
from stillstate.orchestration.config.job_location import location_of
from stillstate.orchestration.config.spec import CONFIG_ENV, JobSpec
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions
from stillstate.orchestration.launchers.first_checkpoint import Waiting
from stillstate.orchestration.launchers.log_files import new_log_file, newest_log, redacted, tail
from stillstate.orchestration.launchers.port import (
    LOG_FOLLOWS,
    FirstCheckpoint,
    LastWords,
    Launched,
    LaunchFailed,
    Liveness,
    Stopped,
    StopTimedOut,
)
from stillstate.orchestration.launchers.processes import living, process_of
from stillstate.orchestration.text import time_text

__all__ = ["TERMINATE_WAIT_S", "Begun", "StoreLauncher"]

POLL_S: Final = 0.2
TERMINATE_WAIT_S: Final = 20.0  # after SIGTERM: one epoch and Spark's own shutdown
STACKS_SIGNAL: Final = signal.SIGUSR1
STACKS_WAIT_S: Final = 1.0
_ENDED: Final[frozenset[RunState]] = frozenset({"stopped", "finished", "failed", "fenced"})


@dataclass(frozen=True)
class Begun:
    """A process that was started, and the place of its output.

    Attributes:
        before: the newest term when it was started; the driver that it starts has a higher one.
        leaves: its successful end says nothing: it only hands the driver over to a cluster.
    """

    process: subprocess.Popen[bytes]
    log: Path
    before: int
    leaves: bool = False

    def exit_code(self) -> int | None:
        """Return the exit code if the process ended and the start with it; None: it lives, or has handed over."""
        code = self.process.poll()
        return None if self.leaves and code == 0 else code


class StoreLauncher(ABC):
    """Implements `Launcher` through the store. Adapters define how and where a driver is started.

    Args:
        config: the configuration file.
        job: what to start.
        host: this one's name.
        poll: waits between two looks at the store; returns at once in tests.
    """

    def __init__(
        self,
        config: Path,
        job: JobSpec,
        *,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        host: str | None = None,
        poll: Callable[[float], object] | None = None,
    ) -> None:
        self._config = config
        self._job = job
        self._clock = clock
        self._ids = ids
        self._host = socket.gethostname() if host is None else host
        self._poll: Callable[[float], object] = threading.Event().wait if poll is None else poll

    @cached_property
    def _store(self) -> Store:
        # Not before it is needed: code that only examines a process has hundreds of these.
        home = location_of(self._job)
        return open_store(home.store, home.storage_options)

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(self._store, self._job.name, self._clock)

    # --- defined by an adapter ---------------------------------------------------------------------------------------

    @abstractmethod
    def _launch(self, options: StartOptions, cause: str, before: int) -> Launched:
        """Start a driver, whose run has a higher term than `before`, and wait until it runs."""

    @abstractmethod
    def _is_here(self, status: RunStatus) -> bool:
        """Whether the run's process is on this host and visible."""

    # --- the port ----------------------------------------------------------------------------------------------------

    def start(self, options: StartOptions = AS_IT_IS, *, cause: str = "") -> Launched:
        before = self._catalog.status()
        if before is not None and not options.takeover:
            self._refuse_if_live(before)
        return self._launch(options, cause, 0 if before is None else before.term)

    def stop(self) -> Stopped:
        status = self._catalog.status()
        if status is None:
            raise JobNotFound(f"job {self._job.name!r} has never run; there is nothing to stop")
        over = f"it was already over: {status.state}" if status.state in _ENDED else ""
        if over and status.state != "failed":
            return Stopped(self._job.name, status.term, status.state, over)
        # Requested even when the process is gone, or the run has failed: its supervisor and the recovery sensor would
        # bring it back, and check whether a stop is requested.
        request_stop(self._store, self._job.name, status.term, clock=self._clock, ids=self._ids)
        gone = self._gone(status) or over
        if gone:
            return Stopped(self._job.name, status.term, status.state, gone)
        ended = self._wait_until_ended(status.term, self._job.launcher.stop_timeout_s)
        if ended is not None:
            return self.stop() if self._is_restart_of(status) else ended
        process = process_of(status, self._job.name) if self._is_here(status) else None
        if process is None:
            last = self._catalog.status() or status
            raise StopTimedOut(
                f"job {self._job.name!r}: term {status.term} (process {status.pid} on {status.host}) did not "
                f"stop within {self._job.launcher.stop_timeout_s:g} s; its last heartbeat was at "
                f"{time_text(last.at_ms)}. It may be in a long epoch: call stop "
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
        if not self._is_here(status):
            return "unknown"
        return "dead" if living(status.pid, status.started_at_ms) is None else "alive"

    def wait_for_checkpoint(self, launched: Launched, timeout_s: float) -> FirstCheckpoint:
        waiting = Waiting(
            launched,
            self._catalog,
            self.is_alive,
            lambda: self._tail(Path(launched.log)),
            silent_s=self._job.recovery.heartbeat_timeout_s,
            monotonic_s=self._clock.monotonic_s,
        )
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            found = waiting.look()
            if found is not None:
                return found
            if self._clock.monotonic_s() > deadline_s:
                return FirstCheckpoint(snapshot_id=None, how=f"no checkpoint within {timeout_s:g} s; the driver lives")
            self._poll(POLL_S)

    def last_words(self, status: RunStatus) -> LastWords | None:
        log = newest_log(self._job) if self._is_here(status) else None
        if log is not None:
            return LastWords(str(log), self._tail(log))
        # Its log is elsewhere; its last message is on the store.
        if not status.message:
            return None
        said = f"{status.state}: {redacted(self._job, status.message)}"
        return LastWords(f"heartbeat of term {status.term}, which ran on {status.host}", said)

    def end_lost(self, status: RunStatus) -> str:
        if not self._is_here(status):
            return (
                f"process {status.pid} is on {status.host}, out of reach; the new run fences it: from then on it "
                "commits and publishes nothing, and it ends once it sees that"
            )
        more = self._end_beside(status)
        process = process_of(status, self._job.name)
        if process is None:
            return f"process {status.pid}{more} is gone"
        # A driver of Stillstate answers this with the stacks of its threads, even if it hangs in C.
        with suppress(psutil.NoSuchProcess):
            process.send_signal(STACKS_SIGNAL)
            psutil.wait_procs([process], timeout=STACKS_WAIT_S)
            # SIGKILL, since a hanging driver does not answer SIGTERM and a crash at any point is safe.
            process.kill()
        psutil.wait_procs([process], timeout=TERMINATE_WAIT_S)
        return f"killed process {status.pid}{more}, which hung"

    # --- used or extended by adapters --------------------------------------------------------------------------------

    def _gone(self, status: RunStatus) -> str:
        """Return how a run that cannot obey any more has ended, for people; empty: it lives, as far as is known."""
        return "its process was already gone" if self.is_alive(status) == "dead" else ""

    def _end_beside(self, status: RunStatus) -> str:
        """End the process that would bring a lost run's driver back, before the driver; return a text, empty if nothing
        was ended."""
        return ""

    def _is_restart_of(self, status: RunStatus) -> bool:
        """Whether the newest run is a restart in place of another one: only its supervisor wants it, which did not know
        of the stop."""
        newest = self._catalog.status()
        if newest is None or newest.term <= status.term or not status.supervisor_pid:
            return False
        return (newest.host, newest.supervisor_pid) == (status.host, status.supervisor_pid)

    def _begin(
        self, command: Sequence[str], environment: Mapping[str, str], before: int, *, leaves: bool = False
    ) -> Begun:
        """Start a process in a separate session, so that it outlives the Dagster run, the terminal and the code server
        that started it. Its output goes to one log file per start."""
        log = new_log_file(self._job, self._clock, self._ids)
        with log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in this terminal, or the end of this run, is not meant for it
                close_fds=True,
                cwd=self._config.parent,
                env=environment,
            )
        return Begun(process, Path(log.name), before, leaves)

    def _environment(self) -> dict[str, str]:
        """Return the environment of a driver on this host."""
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
                f"{status.host}, last heartbeat at {time_text(status.at_ms)}. "
                f"Stop it with `stillstate stop {self._job.name}`, or take it over with --takeover"
            )

    def _wait_until_running(self, begun: Begun, is_ours: Callable[[RunStatus], bool]) -> Launched:
        """Wait for the heartbeat of the driver that was started.

        Args:
            is_ours: whether a run of a higher term is that of this start.

        Raises:
            LaunchFailed: it ended, or did not run in time; its remaining processes here were ended.
        """
        deadline_s = self._clock.monotonic_s() + self._job.launcher.start_timeout_s
        trouble = ""
        while True:
            # The exit is checked before the heartbeat: a driver that wrote its last heartbeat and ended in
            # between is then found by the next look instead of being missed.
            code = begun.exit_code()
            try:
                status = self._catalog.status()
            except Unavailable as error:
                # A temporary error of the store says nothing about the driver; the deadline bounds the waiting.
                status, trouble = None, f" (the store could not be read: {error})"
            if status is not None and status.term > begun.before and is_ours(status) and code in (None, 0):
                if status.state in ("running", "finished", "stopped"):
                    return self._launched(status, begun.log)
                if begun.leaves and status.state in _ENDED:
                    raise self._ended_early(
                        begun, status.message or status.state, EXIT_OF_KIND.get(status.error_kind, 1)
                    )
            if code is not None:
                exit_code = Unavailable.exit_code if trouble else code if 0 < code < 256 else 1
                raise self._ended_early(begun, f"exit code {code}{trouble}", exit_code)
            if self._clock.monotonic_s() > deadline_s:
                raise self._too_late(begun, trouble)
            self._poll(POLL_S)

    def _launched(self, status: RunStatus, log: Path) -> Launched:
        return Launched(
            job=self._job.name,
            term=status.term,
            state=status.state,
            pid=status.pid,
            host=status.host,
            log=str(log),
        )

    def _ended_early(self, begun: Begun, how: str, exit_code: int) -> LaunchFailed:
        return LaunchFailed(
            f"the driver of {self._job.name!r} ended with {redacted(self._job, how)} before it ran. "
            f"{LOG_FOLLOWS} {begun.log}:\n{self._tail(begun.log)}",
            exit_code,
        )

    def _too_late(self, begun: Begun, trouble: str) -> LaunchFailed:
        # No run of it is known yet; a half-started driver must not disturb a later start.
        if begun.process.poll() is None:
            os.killpg(begun.process.pid, signal.SIGKILL)  # its session; Java ends with its driver
            begun.process.wait(TERMINATE_WAIT_S)
        ended = (
            ". It was handed over to the cluster, which may still start it: end it with the cluster's own tools (the "
            "log has its id). If another driver of the job runs by then, it ends by itself"
            if begun.leaves
            else " and was ended"
        )
        return LaunchFailed(
            f"the driver of {self._job.name!r} did not run within {self._job.launcher.start_timeout_s:g} "
            f"s{trouble}{ended}; raise launcher.start_timeout_s if the machine is slow. {LOG_FOLLOWS} {begun.log}:\n"
            f"{self._tail(begun.log)}",
            Unavailable.exit_code if trouble else 1,
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
        return tail(self._job, log)
