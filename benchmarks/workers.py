"""Worker processes: one per engine, driven in turns over a pipe by the process that prints the table.

An engine lives in a process of its own because two Spark sessions with different settings cannot share a JVM.
Both stay up for the whole workload and only one has work at any time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from benchmarks.engines import Sample, WorkerPlan, open_engine
from benchmarks.workloads import Side

__all__ = ["TreeWorker", "Turn", "Worker", "WorkerFailed", "is_python_worker", "private_mib", "settle"]

START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 25
QUIET_CPU_PERCENT = 15.0
SETTLE_TIMEOUT_S = 20.0
MEMORY_POLL_S = 0.05


class WorkerFailed(RuntimeError):
    """A worker process failed; the message has its error and the end of its log."""


@dataclass(frozen=True)
class Turn:
    """What a worker did in one turn.

    Attributes:
        cpu_ms: CPU time of its processes (driver, JVM, Python workers) over the whole turn. Unlike the duration it
            hardly depends on what else the machine does.
        private_mib: The most that one Python worker had of memory of its own while the turn ran (mapped files are not, the
            system takes them back when it needs them); only if it was watched.
    """

    samples: tuple[Sample, ...]
    cpu_ms: float
    private_mib: float = 0.0


@dataclass(frozen=True)
class _Failure:
    text: str


class _Process(Protocol):
    """What a handle needs of its process."""

    @property
    def pid(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...


class Worker:
    """The handle of one worker process.

    States: started (constructor) → ready (:meth:`wait_ready`) → any number of :meth:`run` → closed
    (:meth:`close`). As a context manager it is closed on the way out; a worker that does not end by itself is
    killed with its children.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.side: Side = plan.side
        self._log = plan.folder / "driver.log"
        self._connection, self._process = self._start(plan)

    def _start(self, plan: WorkerPlan) -> tuple[Connection, _Process]:
        # spawn: a forked child would inherit the parent's terminal state and rich's threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, plan, self._log))
        process.start()
        theirs.close()
        return ours, process

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Return when the engine's query is up and idle.

        Raises:
            WorkerFailed: It did not come up.
        """
        self._receive(START_TIMEOUT_S)

    def run(self, batches: int, timeout_s: float, *, watch_memory: bool = False) -> Turn:
        """Run the next batches and return what they cost.

        Args:
            watch_memory: Look at the memory of the Python workers all the time; such a turn is not one to be timed.

        Raises:
            WorkerFailed: The query failed or took longer than `timeout_s`.
        """
        before_s = _cpu_seconds(self._tree())
        self._connection.send((batches, timeout_s))
        private_mib = self._watch_memory(timeout_s) if watch_memory else 0.0
        answer = self._receive(timeout_s + 30)
        assert isinstance(answer, list)
        return Turn(tuple(answer), (_cpu_seconds(self._tree()) - before_s) * 1000, private_mib)

    def _watch_memory(self, timeout_s: float) -> float:
        """The most private memory of a Python worker until the answer is there."""
        most, deadline = 0.0, time.monotonic() + timeout_s
        while not self._connection.poll(MEMORY_POLL_S) and time.monotonic() < deadline:
            most = max([most, *(private_mib(process) for process in self._tree() if is_python_worker(process))])
        return most

    def cpu_percent(self, interval_s: float) -> float:
        """Return the CPU use of the worker and its children over `interval_s`; 100 is one core."""
        before_s = _cpu_seconds(self._tree())
        time.sleep(interval_s)
        return max(_cpu_seconds(self._tree()) - before_s, 0.0) / interval_s * 100

    def close(self) -> None:
        """Let the worker end; kill what is left of it after a while."""
        if self._process.is_alive():
            tree = self._tree()
            # A pipe that is broken already means that the worker is on its way down; the wait sees to that.
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(CLOSE_TIMEOUT_S)
            for process in tree:
                if process.is_running():
                    process.kill()
        self._connection.close()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _receive(self, timeout_s: float) -> object:
        try:
            if not self._connection.poll(timeout_s):
                raise WorkerFailed(f"{self.side}: no answer within {timeout_s:.0f} s\n{self._log_tail()}")
            answer = self._connection.recv()
        except EOFError:
            raise WorkerFailed(f"{self.side}: the worker process died\n{self._log_tail()}") from None
        if isinstance(answer, _Failure):
            raise WorkerFailed(f"{self.side}: {answer.text}\n{self._log_tail()}")
        return answer

    def _log_tail(self) -> str:
        if not self._log.exists():
            return "(it wrote no log)"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["last lines of its log:", *lines[-LOG_TAIL_LINES:]])


class TreeWorker(Worker):
    """A worker that runs the code of another checkout: benchmarks and runtime are imported from there.

    Args:
        tree: The checkout's root. Its plan and workload must have the fields that are sent.
    """

    def __init__(self, plan: WorkerPlan, tree: Path) -> None:
        self._tree_root = tree
        super().__init__(plan)

    def _start(self, plan: WorkerPlan) -> tuple[Connection, _Process]:
        ours, theirs = multiprocessing.Pipe()
        process = _Command(
            # -P: the folder that this process was started in is not to be imported from.
            [sys.executable, "-P", "-c", _SERVE_TREE, str(theirs.fileno())],
            cwd=self._tree_root,
            env={**os.environ, "PYTHONPATH": str(self._tree_root)},
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        ours.send((plan, self._log))
        return ours, process


_SERVE_TREE = """
import sys
from multiprocessing.connection import Connection
from benchmarks.workers import _serve
connection = Connection(int(sys.argv[1]))
_serve(connection, *connection.recv())
"""


class _Command(subprocess.Popen[bytes]):
    """A command, asked as a process of `multiprocessing` is."""

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


def settle(workers: list[Worker]) -> float:
    """Wait until no worker does background work of its last turn (compaction, garbage collection, uploads).

    Without it one engine's after-work would be charged to the other. Bounded by SETTLE_TIMEOUT_S.

    Returns:
        The CPU use, in percent of a core, that was left.
    """
    left = 0.0
    for _ in range(int(SETTLE_TIMEOUT_S)):
        left = sum(worker.cpu_percent(1.0 / len(workers)) for worker in workers)
        if left <= QUIET_CPU_PERCENT:
            break
    return left


def _cpu_seconds(tree: list[psutil.Process]) -> float:
    """CPU time of the processes and of their children that have ended: it never goes back."""
    total = 0.0
    for process in tree:
        # A Python worker may end between the listing and the look at it.
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def is_python_worker(process: psutil.Process) -> bool:
    """Whether a process runs Spark's tasks in Python."""
    # Spark's workers are forks of its daemon, so they have its command line.
    with contextlib.suppress(psutil.Error):
        return "pyspark.daemon" in process.cmdline()
    return False


def private_mib(process: psutil.Process) -> float:
    """Memory that no file backs and nobody shares; 0 for a process that is gone.

    `uss` of other systems than Linux counts the clean pages of mapped files, too.
    """
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    with contextlib.suppress(psutil.Error, OSError):
        if not rollup.exists():
            return float(process.memory_full_info().uss) / 2**20
        # Not `Private_Dirty`: that has pages of mapped files, too, until the system has written them back.
        for line in rollup.read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _serve(connection: Connection, plan: WorkerPlan, log: Path) -> None:
    """Run in the worker process: open the engine, serve turns until told to end."""
    # The JVM inherits the file descriptors, so Spark's log goes to the file and the table stays readable.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        engine = open_engine(plan)
        connection.send("ready")
        try:
            while (turn := connection.recv()) is not None:
                batches, timeout_s = turn
                connection.send(engine.run(batches, timeout_s))
        finally:
            engine.stop()
    except EOFError:
        # The process that prints the table is gone; there is nobody to answer.
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(_Failure(f"{type(error).__name__}: {error}"))
