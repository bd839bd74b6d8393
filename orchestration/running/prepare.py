"""Make the archive of classes with which drivers of this host and user start faster; see `spark/class_archive.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import Unavailable
from state_runtime.spark.class_archive import archive_folder, archive_key, archive_name, archives_of, find_archive
from state_runtime.spark.java import require_java
from state_runtime.state.sealed_files import is_abandoned, make_private_folder
from stillstate.orchestration.running.memory import free_memory_bytes

__all__ = ["archive_of_host", "is_wanted_by_itself", "make_archive", "remove_archives"]

RUN_S_MAX: Final = 900.0
ROOM_BYTES: Final = 3 << 30
"""What a small job of Spark takes at most (1.1 GiB), and as much again for the job beside it to grow."""
_TAIL_LINES: Final = 5
_MAKING: Final = ".making-"


def archive_of_host() -> Path | None:
    """Return this host's complete archive; None without one.

    Raises:
        MissingJava: no Java 17 or newer.
    """
    return find_archive(archive_key(require_java()))


def is_wanted_by_itself() -> bool:
    """Return whether an archive is to be made without being asked for: there is none, nobody makes one now, and memory
    is left for another Java.

    Raises:
        MissingJava: no Java 17 or newer.
    """
    is_being_made = any(not is_abandoned(left, SYSTEM_CLOCK) for left in archive_folder().glob(f"{_MAKING}*"))
    return not is_being_made and free_memory_bytes() >= ROOM_BYTES and archive_of_host() is None


def make_archive() -> Path:
    """Run small jobs in a separate process, and keep the archive that its Java writes at its end.

    It takes about a minute, with low priority. The archive appears complete or not at all, and replaces an existing
    one.

    Raises:
        MissingJava: no Java 17 or newer. Unavailable: the job failed, or Java wrote no archive.
    """
    key = archive_key(require_java())
    try:
        return _made_in(archive_folder(), key)
    except OSError as error:
        raise Unavailable(f"the archive of classes cannot be made: {error}") from error


def _made_in(folder: Path, key: str) -> Path:
    make_private_folder(folder)
    _remove_leavings(folder)
    with tempfile.TemporaryDirectory(prefix=_MAKING, dir=folder) as work:
        made, log = Path(work) / "classes.jsa", Path(work) / "run.log"
        with log.open("wb") as said:
            try:
                code = subprocess.run(
                    [sys.executable, "-m", "stillstate.orchestration.running.first_run", work, str(made)],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    timeout=RUN_S_MAX,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code or not made.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise Unavailable(f"the small job that loads the classes ended with {code} and no archive:\n{tail}")
        target = folder / archive_name(key, made)
        os.replace(made, target)
    for older in archives_of(folder, key):
        if older != target:
            older.unlink(missing_ok=True)
    return target


def remove_archives() -> list[Path]:
    """Remove this host's archive and those of other Javas and Sparks; return the removed paths."""
    folder = archive_folder()
    found = sorted(folder.glob("*.jsa"))
    for archive in found:
        archive.unlink(missing_ok=True)
    if folder.exists():
        _remove_leavings(folder)
    return found


def _remove_leavings(folder: Path) -> None:
    """Remove the files of a killed `prepare`: no other code removes them."""
    for left in folder.glob(f"{_MAKING}*"):
        if is_abandoned(left, SYSTEM_CLOCK):
            shutil.rmtree(left, ignore_errors=True)
