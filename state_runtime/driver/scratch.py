"""The place of Spark's checkpoint directory of a run, and what happens when that disk is full or files are removed.

The directory has no lasting data: a run prepares a fresh one from the snapshot and removes it at its end. But Spark
cannot plan a batch without it. So, on a full disk, first local copies of state on that disk are removed, which costs a
restore and never data. If that is not enough the run ends with an error that says what to free.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from state_runtime.base.errors import InvalidConfiguration, Unavailable, is_typed
from state_runtime.base.limits import MIB
from state_runtime.base.settings import JobSettings
from state_runtime.restore.disk import oldest_copies
from state_runtime.spark.errors import cause_of, typed_error
from state_runtime.spark.java_errors import is_of_session, removed_scratch

__all__ = ["SCRATCH_FREE_BYTES_MIN", "Scratch"]

_LOG = logging.getLogger(__name__)
SCRATCH_FREE_BYTES_MIN = 16 * MIB
"""Local copies are removed while the disk has less: a batch writes some kilobytes, a position with a long log more."""
_CAUSES_MAX = 16
_FULL = ("No space left on device", "Disk quota exceeded")


@dataclass(frozen=True)
class Scratch:
    """The folder of Spark's checkpoint directories, private to the user.

    Attributes:
        state: the local copies of all jobs on this host; they are removed if they are on the same disk.
    """

    folder: Path
    state: Path

    @staticmethod
    def of(settings: JobSettings, local_dir: Path) -> Scratch:
        """Make the folder if it does not exist.

        Raises:
            InvalidConfiguration: it cannot be made, or belongs to another user. Unavailable: its disk is full.
        """
        own = Path(tempfile.gettempdir()) / f"stillstate-{os.getuid()}"
        place = Path(settings.scratch_dir or own).absolute()
        scratch = Scratch(place / "spark", local_dir / "state")
        try:
            for folder in (place, scratch.folder):
                scratch.retried(partial(folder.mkdir, parents=True, exist_ok=True, mode=0o700))
            # Another user may have made it first in a folder that all users can write to.
            found = [os.lstat(folder) for folder in ((place, scratch.folder) if place == own else (scratch.folder,))]
        except OSError as error:
            if is_full(error):
                raise scratch._unavailable() from error
            raise InvalidConfiguration(
                f"scratch_dir {place} cannot be used: {error}; choose a folder that you can write to"
            ) from error
        if any(not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() for status in found):
            raise InvalidConfiguration(
                f"{scratch.folder} is a link or belongs to another user; choose another scratch_dir"
            )
        return scratch

    def keep_room(self) -> None:
        """Remove local copies while the disk has less than `SCRATCH_FREE_BYTES_MIN`. Never fails."""
        if self._is_short():
            self.make_room()

    def make_room(self) -> bool:
        """Remove local copies on this disk, the longest unused first, until it has room again.

        Tasks that read one keep what they have open; the next epoch restores the shard from the store.

        Returns:
            Whether anything was removed. Never fails.
        """
        removed = 0
        for copy in oldest_copies(self.state) if self._shares_the_disk() else []:
            shutil.rmtree(copy, ignore_errors=True)
            removed += 1
            if not self._is_short():
                break
        if removed:
            _LOG.warning(
                "the disk of %s was full: %d local copies of shards below %s were removed; "
                "they are restored from the store",
                self.folder,
                removed,
                self.state,
            )
        return removed > 0

    def retried(self, write: Callable[[], None]) -> None:
        """Write; if the disk is full, write once more after local copies were removed.

        Raises:
            OSError: that of `write`.
        """
        try:
            write()
        except OSError as error:
            if not is_full(error) or not self.make_room():
                raise
            write()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replace any error about a full disk, or about files that were removed from here, by one short error.

        Raises:
            Unavailable: the disk is full. ScratchRemoved: files of it are gone. Any other error typed, or unchanged.
        """
        try:
            yield
        except Exception as error:
            typed = typed_error(error)
            is_told = is_typed(typed)
            removed = "" if is_told else self._removed(error)
            if removed:
                raise removed_scratch(removed) from error
            if is_told or not is_full(error):
                if typed is error:
                    raise
                raise typed from cause_of(typed, error)
            # For the next run: a supervisor starts it again by itself.
            self.make_room()
            raise self._unavailable() from error

    def _removed(self, error: BaseException) -> str:
        """Return the removed file of Spark's that Python looked for; empty: it is another error. `java_errors` knows
        the files that Java did not find."""
        for seen in _causes(error):
            name = str(seen.filename or "") if isinstance(seen, FileNotFoundError) else ""
            if name.startswith(f"{self.folder}{os.sep}") or is_of_session(name):
                return name
        return ""

    def _is_short(self) -> bool:
        free = _free_bytes(self.folder)
        return free is not None and free < SCRATCH_FREE_BYTES_MIN

    def _shares_the_disk(self) -> bool:
        try:
            return self.state.stat().st_dev == _existing(self.folder).stat().st_dev
        except OSError:
            return False

    def _unavailable(self) -> Unavailable:
        free = _free_bytes(self.folder)
        return Unavailable(
            f"a disk of the driver's host is full. Spark's scratch folder {self.folder} has "
            f"{'an unknown number of' if free is None else f'{free:,}'} bytes free: free space there, or set "
            "scratch_dir to a folder on a larger disk. If it has enough, look at spark.local.dir of all hosts. "
            "Nothing that was committed is lost; the next run goes on from the newest snapshot"
        )


def is_full(error: BaseException) -> bool:
    """Return whether an error, or a cause of it, is about a full disk; JVM errors say so only in their text."""
    return any(
        (isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(text in str(seen) for text in _FULL)
        for seen in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, up to a limit."""
    seen: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes of a folder's disk; None if they are not known."""
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def _existing(folder: Path) -> Path:
    return next((p for p in (folder, *folder.parents) if p.exists()), folder)
