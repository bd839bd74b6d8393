"""A driver that stands by for another one: every step of a start is done that does not touch the job.

It has started Java, built the session, imported the job's code and run two of Stillstate's small jobs, which compile
what most jobs need; then it waits for its supervisor's call (`orchestration/standby.py`). It has read no store and
written only scratch files. If the loaded code was changed on disk meanwhile, it starts again in place, as a new process
would. If its supervisor ends, it ends.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.state.sealed_files import is_abandoned
from stillstate.orchestration.standby import (
    AT_WORK,
    CAUSE_ENV,
    PIPES_ENV,
    READY,
    SUPERVISOR_ENV,
    WAITS_ENV,
    cause_of_call,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Supervised", "stand_by"]

LINE_BYTES_MAX: Final = 64 * 1024
_FOLDER: Final = "stillstate-standby-"

_LOG = logging.getLogger(__name__)

Fingerprint = tuple[int, int]
"""A file's time of change, in nanoseconds, and its size in bytes."""


@dataclass
class Supervised:
    """This process's side of the pipes to its supervisor.

    Attributes:
        waits: whether it is to stand by.
        supervisor_pid: of the process at the other end.
    """

    calls: int
    tells: int
    waits: bool
    supervisor_pid: int = 0
    _has_told: set[bytes] = field(default_factory=set)

    @staticmethod
    def of_environment(supervisor_pid: int = 0) -> Supervised | None:
        """Build it from the environment that the supervisor has set; None without a supervisor. Processes that this one
        starts do not inherit these variables."""
        pipes, waits = os.environ.pop(PIPES_ENV, ""), os.environ.pop(WAITS_ENV, "")
        try:
            calls, tells = (int(number) for number in pipes.split(","))
            os.set_inheritable(calls, False)
            os.set_inheritable(tells, False)
        except (ValueError, OSError):
            return None
        return Supervised(calls, tells, bool(waits), supervisor_pid)

    def at_work(self) -> None:
        """Report, once, that the first checkpoint is made."""
        self._tell(AT_WORK)

    def is_called(self) -> bool:
        """Whether a call has come, or the supervisor is gone."""
        return bool(select.select([self.calls], [], [], 0)[0])

    def wait(self) -> str:
        """Report that this process is ready, wait for the call, and return its cause. End without a supervisor."""
        self._tell(READY)
        line = b""
        while not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
            piece = os.read(self.calls, 4096)
            if not piece:
                break
            line += piece
        cause = cause_of_call(line)
        if cause is None:
            _LOG.info("the supervisor has ended; this process is not needed any more")
            raise SystemExit(0)
        return cause

    def start_again(self, cause: str, why: str) -> NoReturn:
        """Become a new process in place, with the same id and the same pipes, as if it had never been a standby."""
        _LOG.warning("the standby process cannot be used: %s; a new driver starts", why)
        for pipe in (self.calls, self.tells):
            os.set_inheritable(pipe, True)
        os.environ |= {
            CAUSE_ENV: cause,
            SUPERVISOR_ENV: str(self.supervisor_pid),
            PIPES_ENV: f"{self.calls},{self.tells}",
        }
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 (its own command line)

    def _tell(self, word: bytes) -> None:
        if word in self._has_told:
            return
        self._has_told.add(word)
        with suppress(OSError):  # the supervisor is gone: the driver continues without it
            os.write(self.tells, word)


def stand_by(supervised: Supervised, session: SparkSession, is_current: Callable[[], bool]) -> str:
    """Warm the session, wait, and return the cause of the call.

    Args:
        is_current: whether the configuration is still the one that was loaded.
    """
    from stillstate.orchestration.running.first_run import small_jobs

    loaded = fingerprints(code_files())
    _remove_leavings(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        for run in small_jobs(session, Path(folder)):
            if supervised.is_called():
                break
            run(supervised.is_called)
    cause = supervised.wait()
    changed = changed_since(loaded)
    if changed is not None:
        supervised.start_again(cause, f"{changed} was changed")
    if not is_current():
        supervised.start_again(cause, "the configuration was changed")
    return cause


def _remove_leavings(folder: Path) -> None:
    """Remove the files of this user's processes that were killed while they ran the small jobs."""
    for left in folder.glob(f"{_FOLDER}*"):
        with suppress(OSError):
            if left.lstat().st_uid == os.getuid() and is_abandoned(left, SYSTEM_CLOCK):
                shutil.rmtree(left, ignore_errors=True)


def code_files() -> Iterator[Path]:
    """Yield the files of the loaded modules, except Python's own library; and the lists that a package manager rewrites
    with each installation: a module that is loaded after one would have another version than the loaded ones."""
    packages = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file:
            continue
        path = Path(file)
        # Packages may be in a folder of the library.
        if any(map(path.is_relative_to, packages)) or not any(map(path.is_relative_to, library)):
            yield path
    for entry in {*sys.path, *map(str, packages)} - {""}:
        yield from Path(entry).glob("*.dist-info/RECORD")


def fingerprints(paths: Iterable[Path]) -> dict[Path, Fingerprint]:
    """Return the fingerprints of the existing files."""
    found = {path: _fingerprint(path) for path in paths}
    return {path: print_ for path, print_ in found.items() if print_ is not None}


def changed_since(loaded: Mapping[Path, Fingerprint]) -> Path | None:
    """Return a file that was changed or removed; None if all are unchanged."""
    return next((path for path, before in loaded.items() if _fingerprint(path) != before), None)


def _fingerprint(path: Path) -> Fingerprint | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size)
