"""A Flink cluster on loopback: one JobManager, one TaskManager, and the SQL gateway that statements go to.

Lifecycle: made (nothing runs) → entered (all three are up) → left (all are killed). In between any of them may be killed
and started again, which is what the restarts measure.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.flink.distribution import Distribution
from benchmarks.flink.rest import FlinkFailed, Gateway, JobManager

__all__ = ["Cluster", "configuration"]

START_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 25
SLOTS = 2
_LOG4J = """\
rootLogger.level = INFO
rootLogger.appenderRef.console.ref = Console
appender.console.name = Console
appender.console.type = CONSOLE
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss,SSS} %-5p %c{1} - %m%n
"""


def configuration(ports: Mapping[str, int], folder: Path, settings: Mapping[str, str]) -> str:
    """Flink's configuration file: loopback, one TaskManager with two slots, and `settings` on top."""
    loopback = "127.0.0.1"
    lines = {
        "jobmanager.rpc.address": loopback,
        "jobmanager.bind-host": loopback,
        "jobmanager.rpc.port": str(ports["rpc"]),
        "rest.address": loopback,
        "rest.bind-address": loopback,
        "rest.port": str(ports["rest"]),
        "taskmanager.host": loopback,
        "taskmanager.bind-host": loopback,
        "taskmanager.numberOfTaskSlots": str(SLOTS),
        "parallelism.default": str(SLOTS),
        "io.tmp.dirs": str(folder / "tmp"),
        "sql-gateway.endpoint.rest.address": loopback,
        "sql-gateway.endpoint.rest.bind-address": loopback,
        "sql-gateway.endpoint.rest.port": str(ports["gateway"]),
        **settings,
    }
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


class Cluster:
    """The three processes and the two clients."""

    def __init__(self, flink: Distribution, folder: Path, settings: Mapping[str, str]) -> None:
        self._flink = flink
        self._folder = folder
        self._conf = folder / "conf"
        self._conf.mkdir(parents=True)
        (folder / "tmp").mkdir()
        ports = _free_ports("rpc", "rest", "gateway")
        (self._conf / "config.yaml").write_text(configuration(ports, folder, settings))
        (self._conf / "log4j.properties").write_text(_LOG4J)
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.jobmanager = JobManager(f"http://127.0.0.1:{ports['rest']}")
        self.gateway = Gateway(f"http://127.0.0.1:{ports['gateway']}")

    def __enter__(self) -> Cluster:
        try:
            for role in ("jobmanager", "taskmanager", "gateway"):
                self.start(role)
            self.wait("its slots", lambda: self.jobmanager.slots() == SLOTS)
            self.wait("the SQL gateway", lambda: bool(self.gateway.get("/info")))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def start(self, role: str) -> subprocess.Popen[bytes]:
        """Start a process; it need not be up when this returns."""
        if role not in self._commands:
            self._commands[role] = self._flink.command(role, self._conf, self._conf / "log4j.properties")
        environment = {**os.environ, "FLINK_CONF_DIR": str(self._conf)}
        with (self._folder / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(
                self._commands[role], env=environment, cwd=self._folder, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._processes[role] = process
        return process

    def kill(self, role: str) -> float:
        """Kill a process with signal 9 and return the wall clock, in seconds, of just before."""
        at_s = time.time()
        self._processes[role].send_signal(signal.SIGKILL)
        return at_s

    def wait_gone(self, role: str) -> None:
        """Return when a killed process is gone: what a supervisor waits for."""
        self._processes[role].wait()

    def wait(
        self, what: str, look: Callable[[], bool], timeout_s: float = START_TIMEOUT_S, every_s: float = 0.1
    ) -> None:
        """Look again and again; while a process is on its way up its REST interface refuses.

        Raises:
            FlinkFailed: it did not come in time; with the end of the logs.
        """
        pause, deadline_s, refused = threading.Event(), time.monotonic() + timeout_s, ""
        while True:
            try:
                if look():
                    return
            except FlinkFailed as error:
                refused = str(error)
            if time.monotonic() > deadline_s:
                raise FlinkFailed(f"waited {timeout_s:.0f} s for {what} of Flink. {refused}\n{self.log_tails()}")
            pause.wait(every_s)

    def cpu_seconds(self) -> float:
        """CPU time of JobManager and TaskManager until now."""
        times = [psutil.Process(self._processes[role].pid).cpu_times() for role in ("jobmanager", "taskmanager")]
        return float(sum(one.user + one.system for one in times))

    def log_tails(self) -> str:
        """The last lines of each process's log."""
        tails = []
        for log in sorted(self._folder.glob("*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            tails.append("\n".join([f"--- {log.name}", *lines[-LOG_TAIL_LINES:]]))
        return "\n".join(tails)

    def _end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _free_ports(*names: str) -> dict[str, int]:
    sockets = {name: socket.socket() for name in names}
    try:
        for one in sockets.values():
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in sockets.items()}
    finally:
        for one in sockets.values():
            one.close()
