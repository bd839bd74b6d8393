"""A Spark standalone cluster on loopback: a master and workers as processes, each worker a host with a disk of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pyspark

from ..conftest import ROOT

SPARK_HOME = Path(pyspark.__file__).parent
_READY = {
    "Master": re.compile(r"Starting Spark master at (spark://\S+)"),
    "Worker": re.compile(r"(Successfully registered)"),
}
_START_TIMEOUT_S = 120.0


class Daemon:
    """A master or a worker. Its lines are read as they come, so that its pipe never fills."""

    def __init__(self, kind: str, arguments: list[str], environment: dict[str, str]) -> None:
        java = Path(os.environ["JAVA_HOME"]) / "bin" / "java" if os.environ.get("JAVA_HOME") else Path("java")
        name = kind.lower()
        self.process = subprocess.Popen(
            [
                # Tests that are killed close its input, and it goes with them.
                "sh",
                "-c",
                '"$@" & read _; kill -9 $!',
                "sh",
                str(java),
                "-Xmx192m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",
                "-cp",
                f"{SPARK_HOME}/jars/*",
                f"org.apache.spark.deploy.{name}.{kind}",
                *arguments,
            ],
            # Without the Scala version a worker looks for the layout of a source tree.
            env={**os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_SCALA_VERSION": "2.13", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._said = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(_READY[kind],), daemon=True)
        self._reader.start()

    def _read(self, ready: re.Pattern[str]) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = ready.search(line)
            if found is not None and not self._ready.is_set():
                self._said = found[1]
                self._ready.set()
        self._ready.set()

    def said(self) -> str:
        """What it says when it is ready."""
        assert self._ready.wait(_START_TIMEOUT_S), f"not ready: {self.lines[-5:]}"
        assert self._said, f"ended: {self.lines[-20:]}"
        return self._said

    def executors(self) -> list[psutil.Process]:
        """Executors that it started and that live."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in child.cmdline():
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL, with everything that it started."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


class Standalone:
    """A master and `hosts` workers of one core each; host n has the address 127.0.0.<n + 2> and the disk `<folder>/host-n`."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder
        self.workers: dict[int, Daemon] = {}
        self._master = Daemon("Master", ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"], {})
        try:
            self.url = self._master.said()
            for host in range(hosts):
                self.start_host(host)
            for worker in self.workers.values():
                worker.said()
        except BaseException:
            self.close()
            raise

    def disk(self, host: int) -> Path:
        """Where the host's executors keep local state."""
        return self.folder / f"host-{host}"

    def start_host(self, host: int) -> None:
        """Start a worker with the disk that the host had before, if it had one."""
        disk, scratch = self.disk(host), self.folder / f"scratch-{host}"
        disk.mkdir(parents=True, exist_ok=True)
        arguments = ["--host", f"127.0.0.{host + 2}", "--port", "0", "--webui-port", "0", "--cores", "1"]
        arguments += ["--memory", "1g", "--work-dir", str(scratch / "work"), self.url]
        environment = {
            "STILLSTATE_LOCAL_DIR": str(disk),
            "SPARK_LOCAL_DIRS": str(scratch),
            "SPARK_LOCAL_IP": f"127.0.0.{host + 2}",
            "PYTHONPATH": str(ROOT),
        }
        self.workers[host] = Daemon("Worker", arguments, environment)

    def kill_executor(self, host: int) -> None:
        """SIGKILL the host's executor; the master starts another one there."""
        executors = self.workers[host].executors()
        assert executors, f"host {host} has no executor"
        for executor in executors:
            executor.kill()

    def kill_host(self, host: int) -> None:
        """SIGKILL the worker and its executor; its disk stays."""
        self.workers.pop(host).kill()

    def close(self) -> None:
        for daemon in [*self.workers.values(), self._master]:
            daemon.kill()
