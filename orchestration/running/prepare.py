"""Make the archive of classes with which drivers of this host and user start faster; see `spark/class_archive.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from state_runtime.base.errors import Unavailable
from state_runtime.spark.class_archive import archive_path, is_usable
from state_runtime.spark.java import require_java
from state_runtime.state.local_files import make_private_folder

__all__ = ["archive_of_host", "make_archive", "remove_archives"]

RUN_S_MAX: Final = 900.0
_TAIL_LINES: Final = 5


def archive_of_host() -> tuple[Path, bool]:
    """This host's archive, and whether it is there.

    Raises:
        MissingJava: no Java 17 or newer.
    """
    path = archive_path(require_java())
    return path, is_usable(path)


def make_archive() -> Path:
    """Run a small job in a process of its own, and keep the archive that its Java writes at its end.

    It takes about a minute, with low priority. The archive appears complete or not at all, and takes the place of one
    that is there.

    Raises:
        MissingJava: no Java 17 or newer. Unavailable: the job failed, or Java wrote none.
    """
    target, _ = archive_of_host()
    try:
        make_private_folder(target.parent)
    except OSError as error:
        raise Unavailable(f"the archive of classes cannot be made: {error}") from error
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as work:
        made, log = Path(work) / "classes.jsa", Path(work) / "run.log"
        with log.open("wb") as said:
            try:
                code = subprocess.run(
                    [sys.executable, "-m", "orchestration.running.first_run", work, str(made)],
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
        os.replace(made, target)
    return target


def remove_archives() -> list[Path]:
    """Remove this host's archive and those of other Javas and Sparks; gives what was removed."""
    folder = archive_of_host()[0].parent
    found = sorted(folder.glob("*.jsa"))
    for archive in found:
        archive.unlink(missing_ok=True)
    return found
