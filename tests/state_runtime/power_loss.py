"""A disk that loses power: what is left of a folder if everything that was not synced is forgotten.

The calls but for syncs go to the real file system; `os` is patched in this one place, so that whatever code makes them is watched. A
file has the content that it had when it was last synced, a folder the names that it had when it was last synced. A
rename is one change, as on every file system with a journal: it is kept or forgotten in both of its folders.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CHANGES = ("mkdir", "link", "replace", "rename", "unlink", "rmdir", "fsync", "fdatasync")


class Disk:
    """Watches all changes below `top`, which was on the disk before.

    Attributes:
        after: called after every change and every sync; it may look at `survivors`, or kill the process by raising.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.after: Callable[[], None] = lambda: None
        self.syncs_of_folders = 0
        self._names: dict[int, dict[str, int]] = {}
        self._contents: dict[int, bytes] = {}
        self._renamed: list[tuple[Path, Path]] = []
        # An inode that is open is not given to another file.
        self._open: dict[int, int] = {}
        self._calls = {name: getattr(os, name) for name in _CHANGES}
        self._sync(top)
        for name in _CHANGES:
            monkeypatch.setattr(os, name, self._watched(name))

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def survivors(self) -> dict[str, bytes]:
        """Files that are there after a loss of power now, by path below `top`."""
        found: dict[str, bytes] = {}
        waiting = [("", self.top.stat().st_ino)]
        while waiting:
            prefix, inode = waiting.pop()
            for name, below in self._names.get(inode, {}).items():
                if below in self._names:
                    waiting.append((f"{prefix}{name}/", below))
                else:
                    found[prefix + name] = self._contents.get(below, b"")
        return found

    def _watched(self, name: str) -> Callable[..., Any]:
        call = self._calls[name]

        def watched(*args: Any, **named: Any) -> Any:
            if name in ("fsync", "fdatasync"):
                # The machine that runs the tests keeps its power: its own disk need not be waited for.
                self._sync(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
                self.after()
                return None
            result = call(*args, **named)
            if name in ("replace", "rename"):
                self._renamed.append((Path(args[0]).parent, Path(args[1]).parent))
            self.after()
            return result

        return watched

    def _sync(self, path: Path) -> None:
        if not path.is_relative_to(self.top):
            return
        both = {path} | {folder for pair in self._renamed if path in pair for folder in pair}
        self._renamed = [pair for pair in self._renamed if path not in pair]
        for at in both:
            status = os.stat(at)
            if status.st_ino not in self._open:
                self._open[status.st_ino] = os.open(at, os.O_RDONLY)
            if stat.S_ISDIR(status.st_mode):
                self.syncs_of_folders += 1
                self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(at)}
            else:
                self._contents[status.st_ino] = at.read_bytes()
