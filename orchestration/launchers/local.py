"""Drivers as processes of this machine, each with a supervisor, which starts it again in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import FINAL_KINDS
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.base.process_space import is_our_space
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.config.start_options import StartOptions
from stillstate.orchestration.launchers.port import Launched, Liveness
from stillstate.orchestration.launchers.processes import is_over, living
from stillstate.orchestration.launchers.through_store import TERMINATE_WAIT_S, StoreLauncher
from stillstate.orchestration.standby import CAUSE_ENV

__all__ = ["LocalLauncher"]

SUPERVISOR_MODULE: Final = "stillstate.orchestration.supervisor"


class LocalLauncher(StoreLauncher):
    """Implements `Launcher` with a process of this machine.

    Args:
        config: the configuration file, passed on to the driver.
        command: the program that starts a driver, without the arguments `run JOB --config FILE …`.
    """

    def __init__(
        self,
        config: Path,
        job: JobSpec,
        *,
        command: Sequence[str] = (sys.executable, "-m", "stillstate.orchestration.cli"),
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        host: str | None = None,
        poll: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(config, job, clock=clock, ids=ids, host=host, poll=poll)
        self._command = tuple(command)

    def _launch(self, options: StartOptions, cause: str, before: int) -> Launched:
        # Its stderr is the log file already, so that even the death of Python itself leaves its last output.
        driver = [*self._command, "run", self._job.name, "--config", str(self._config), "--log-file", "-"]
        driver += options.always()
        environment = {**self._environment(), CAUSE_ENV: cause}
        begun = self._begin(self._supervised(driver, options.once()), environment, before)
        return self._wait_until_running(begun, lambda status: begun.process.pid in (status.pid, status.supervisor_pid))

    def is_alive(self, status: RunStatus) -> Liveness:
        if not self._is_here(status):
            return "unknown"
        is_gone = living(status.pid, status.started_at_ms) is None
        # A driver that failed is as good as gone while Spark still ends in it.
        may_restart = (is_gone or status.state == "failed") and status.error_kind not in FINAL_KINDS
        if may_restart and _supervisor_of(status, self._job.name) is not None:
            return "restarting"
        return "dead" if is_gone else "alive"

    def _is_here(self, status: RunStatus) -> bool:
        return status.host == self._host and is_our_space(status.process_space)

    def _gone(self, status: RunStatus) -> str:
        if self.is_alive(status) == "restarting" and self._end_supervisor(status):
            return "its supervisor was bringing it back, and was ended"
        return super()._gone(status)

    def _end_beside(self, status: RunStatus) -> str:
        return " and its supervisor" if self._end_supervisor(status) else ""

    def _end_supervisor(self, status: RunStatus) -> bool:
        supervisor = _supervisor_of(status, self._job.name)
        if supervisor is None:
            return False
        ours = [supervisor]
        with suppress(psutil.NoSuchProcess):
            supervisor.suspend()  # so that it starts nothing between this look at its children and its end
            ours += [child for child in supervisor.children() if child.pid != status.pid]
        for process in ours:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=TERMINATE_WAIT_S)
        return True

    def _supervised(self, driver: Sequence[str], once: Sequence[str]) -> list[str]:
        """Return the command. `once` is for the first start only: a restart that goes back again would undo later
        work."""
        restarts = self._job.launcher.restarts
        if not restarts:
            return [*driver, *once]
        standby = str(self._job.launcher.standby).lower()
        ours = [sys.executable, "-m", SUPERVISOR_MODULE, str(self._config), self._job.name, str(restarts), standby]
        return [*ours, *once, "--", *driver]


def _supervisor_of(status: RunStatus, job: str) -> psutil.Process | None:
    """Return the process that would start the run's driver again, if it lives and its command line says so."""
    if not status.supervisor_pid:
        return None
    try:
        process = psutil.Process(status.supervisor_pid)
        if is_over(process):
            return None
        arguments = process.cmdline()
    except psutil.Error:
        return None
    return process if SUPERVISOR_MODULE in arguments and job in arguments else None
