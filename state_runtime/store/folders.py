"""Folders of a local store that a loss of power does not take away.

A file is found again only if its own name and the names of all folders above it are on the disk: `fsync` of a file or
of a folder does not write its own name, only `fsync` of the folder above does. So a folder is made from the top down,
and each is synced into the one above before anything is made inside. A process that is killed in between leaves at
most the last folder unsynced, and whoever finds that syncs it once more.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DurableFolders", "fsync_path"]

_KNOWN_MAX = 1024


class DurableFolders:
    """Makes folders, and remembers which names are on the disk: each sync waits for the disk.

    A store and its children share one. What is remembered is a folder's inode; so a folder that somebody else has
    removed and made again is synced again. A driver makes new folders as long as it lives, and so does a folding
    process, so what is remembered is bounded: what was forgotten is synced once more.

    Args:
        top: the store's root.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._known: dict[Path, tuple[int, int]] = {}

    def make(self, folder: Path) -> None:
        """Make a folder that lies below the top, or the top itself, with all above it. Durable when it returns.

        Raises:
            OSError: it cannot be made or synced; it may be there nevertheless.
        """
        unsure = []
        at = folder
        while not self._is_known(at):
            unsure.append(at)
            if at == self._top:
                break
            at = at.parent
        if at == self._top and not at.is_dir():
            unsure += self._above()
        for at in reversed(unsure):
            if not at.is_dir():
                at.mkdir(exist_ok=True)
            _sync_name(at)
            status = at.stat()
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[at] = (status.st_dev, status.st_ino)

    def _is_known(self, folder: Path) -> bool:
        known = self._known.get(folder)
        if known is None:
            return False
        try:
            status = os.stat(folder)
        except OSError:
            return False
        return known == (status.st_dev, status.st_ino)

    def _above(self) -> list[Path]:
        """What is missing above the top, and the first folder that is there: a process that was killed may have made
        it, and not synced it."""
        found = []
        for at in self._top.parents:
            found.append(at)
            if at.is_dir():
                break
        return found


def fsync_path(path: Path) -> None:
    """Write a file's bytes, or a folder's names, to the disk.

    Raises:
        OSError: they may not be there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_name(folder: Path) -> None:
    """Write a folder's own name to the disk."""
    real = Path(os.path.realpath(folder))
    if os.path.ismount(real):
        return  # its name is not on a disk that we write to: it is mounted there, with what is on it
    try:
        fsync_path(real.parent)
    except PermissionError:
        # A folder that may be passed through but not listed cannot be opened, and so not be synced alone.
        os.sync()
