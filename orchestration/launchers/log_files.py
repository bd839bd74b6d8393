"""Log files of drivers: one for each run, in `launcher.log_dir`; the newest of each job are kept."""

from __future__ import annotations

import os
import re
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from state_runtime.base import secrets
from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import Ids
from stillstate.orchestration.config.launcher import secret_values
from stillstate.orchestration.config.spec import JobSpec

__all__ = ["LOGS_KEPT", "new_log_file", "newest_log", "private_file", "redacted", "tail"]

LOG_LINES_SHOWN: Final = 20
LOG_TAIL_BYTES: Final = 64 * 1024

LOGS_KEPT: Final = 50  # of one job; a crash loop must not fill the disk


def new_log_file(job: JobSpec, clock: Clock, ids: Ids) -> IO[bytes]:
    """Create a file that only this user can read, opened for appending, unbuffered; delete older ones beyond
    `LOGS_KEPT`.

    Raises:
        InvalidConfiguration: the folder cannot be written.
    """
    folder = Path(job.launcher.log_dir)
    path = folder / _new_name(job, clock, ids, ".log")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder, job.name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise _unwritable(job, folder, error) from error
    return open(path, "ab", buffering=0, opener=lambda *_: descriptor)


def private_file(job: JobSpec, clock: Clock, ids: Ids, suffix: str) -> Path:
    """Create an empty file beside the logs that only this user can read; the caller removes it.

    Raises:
        InvalidConfiguration: the folder cannot be written.
    """
    folder = Path(job.launcher.log_dir)
    path = folder / _new_name(job, clock, ids, suffix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise _unwritable(job, folder, error) from error
    return path


def redacted(job: JobSpec, text: str) -> str:
    """Return a text without the credentials of a job's stores, and without those in its Spark settings."""
    values = (*secret_values(job.spark.conf), *secret_values(job.launcher.conf))
    return secrets.redacted(job.redact(text), values, secrets.SECRET_CHARS_MIN)


def newest_log(job: JobSpec) -> Path | None:
    """Return the job's newest log; None if it has no log, or the folder cannot be read."""
    try:
        return max(_logs(Path(job.launcher.log_dir), job.name), default=None)
    except OSError:
        return None


def tail(job: JobSpec, log: Path) -> str:
    """Return the last lines of a log, without the credentials of the job's stores."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = deque(file.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines(), LOG_LINES_SHOWN)
    except OSError as error:
        return f"  (it cannot be read: {error.strerror or error})"
    return redacted(job, "\n".join(f"  {line}" for line in lines) or "  (empty)")


def _new_name(job: JobSpec, clock: Clock, ids: Ids, suffix: str) -> str:
    at = datetime.fromtimestamp(clock.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S")
    return f"{job.name}.{at}.{ids.short()[:8]}{suffix}"


def _unwritable(job: JobSpec, folder: Path, error: OSError) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"job {job.name!r}: launcher.log_dir {folder} cannot be written: "
        f"{error.strerror or error}; name a folder that this user can write"
    )


def _logs(folder: Path, job: str) -> list[Path]:
    """Return the logs with Stillstate's own names, oldest first: the names begin with the time."""
    ours = re.compile(re.escape(job) + r"\.\d{8}T\d{6}\.[0-9a-f]{8}\.log\Z")
    return sorted(p for p in folder.iterdir() if ours.match(p.name))


def _prune(folder: Path, job: str) -> None:
    logs = _logs(folder, job)  # never the newest ones
    for old in logs[: max(0, len(logs) - LOGS_KEPT + 1)]:
        old.unlink(missing_ok=True)
