"""Log files of drivers: one for each run, in `launcher.log_dir`, the newest of a job kept."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from orchestration.config.spec import JobSpec
from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import Ids

__all__ = ["LOGS_KEPT", "new_log_file", "redacted"]

LOGS_KEPT: Final = 50  # of one job; a crash loop must not fill the disk with names


def new_log_file(job: JobSpec, clock: Clock, ids: Ids) -> IO[bytes]:
    """A new file that only this user can read, opened for appending, unbuffered; older ones beyond `LOGS_KEPT` go.

    Raises:
        InvalidConfiguration: the folder cannot be written.
    """
    folder = Path(job.launcher.log_dir)
    at = datetime.fromtimestamp(clock.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S")
    path = folder / f"{job.name}.{at}.{ids.short()[:8]}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder, job.name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise InvalidConfiguration(
            f"job {job.name!r}: launcher.log_dir {folder} cannot be written: "
            f"{error.strerror or error}; name a folder that this user can write"
        ) from error
    return open(path, "ab", buffering=0, opener=lambda *_: descriptor)


def redacted(job: JobSpec, text: str) -> str:
    """A text without the credentials of a job's stores."""
    text = job.storage_options.redact(text)
    start = job.start_from
    return start.storage_options.redact(text) if start is not None and start.storage_options is not None else text


def _prune(folder: Path, job: str) -> None:
    # Only names that we give ourselves, and never the newest ones.
    ours = re.compile(re.escape(job) + r"\.\d{8}T\d{6}\.[0-9a-f]{8}\.log\Z")
    logs = sorted(p for p in folder.iterdir() if ours.match(p.name))
    for old in logs[: max(0, len(logs) - LOGS_KEPT + 1)]:
        old.unlink(missing_ok=True)
