"""Folders of a local store that survive a loss of power.

A file is found again only if its own name and the names of all folders above it are on the disk. `fsync` of a file or
of a folder does not write its own name; only `fsync` of the folder above does. So folders are made from the top down,
and each is synced into the one above before anything is made inside. A process that is killed in between leaves at
most the last folder unsynced, and the next process that finds it syncs it once more.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DurableFolders", "fsync_path"]

_KNOWN_MAX = 1024


class DurableFolders:
    """Makes folders, and remembers which names are on the disk, because each sync waits for the disk.

    A store and its children share one. A folder is remembered by its inode, so a folder that another process has
    removed and made again is synced again. Drivers and folding processes make new folders as long as they live, so the
    memory is bounded: forgotten folders are synced once more.

    Args:
        top: the store's root.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._known: dict[Path, tuple[int, int]] = {}

    def make(self, folder: Path) -> None:
        """Make a folder below the top, or the top itself, with all folders above it. Durable when it returns.

        Raises:
            OSError: it cannot be made or synced; it may exist nevertheless.
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
        """Return the missing folders above the top, and the first one that exists: a process that was killed may have
        made it, and not synced it."""
        found = []
        for at in self._top.parents:
            found.append(at)
            if at.is_dir():
                break
        return found


def fsync_path(path: Path) -> None:
    """Write a file's bytes, or a folder's names, to the disk.

    Raises:
        OSError: they may not be on the disk.
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
        return  # a mount point: its name is not on a disk that is written here
    try:
        fsync_path(real.parent)
    except PermissionError:
        # A folder that may be passed through but not listed cannot be opened, so it cannot be synced alone.
        os.sync()
