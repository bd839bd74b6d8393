"""A file system in a dictionary with the few calls that `FsspecStore` makes, and faults before or after each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class FakeFs:
    """Calls `before(operation, path)` and `after(operation, path)` around every call; they may raise, or wait.

    `objects` may be shared by several instances: every writer gets its own connection to one store.
    """

    def __init__(self, objects: dict[str, bytes] | None = None, *, honours_create: bool = True) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.honours_create = honours_create
        self.before: Callable[[str, str], None] = lambda operation, path: None
        self.after: Callable[[str, str], None] = lambda operation, path: None
        # All objects are as old as the newest: whoever needs ages sets it.
        self.now_s: Callable[[], float] = lambda: 1_700_000_000.0

    def pipe_file(self, path: str, body: bytes, mode: str = "overwrite") -> None:
        operation = "create" if mode == "create" else "put"
        self.before(operation, path)
        if mode == "create" and self.honours_create and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(body)
        self.after(operation, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self.before("read", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def info(self, path: str) -> dict[str, Any]:
        self.before("info", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path])}

    def ls(self, path: str, detail: bool = False) -> list[Any]:
        self.before("list", path)
        below = f"{path}/"
        names = {below + name[len(below) :].split("/")[0] for name in self.objects if name.startswith(below)}
        if not names:
            raise FileNotFoundError(path)
        return [self._entry(name) for name in sorted(names)] if detail else sorted(names)

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self.objects:
            return {"name": name, "size": 0, "type": "directory"}
        return {"name": name, "size": len(self.objects[name]), "type": "file", "mtime": self.now_s()}

    def rm_file(self, path: str) -> None:
        self.before("delete", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]
        self.after("delete", path)

    def cp_file(self, source: str, target: str) -> None:
        self.before("copy", source)
        if source not in self.objects:
            raise FileNotFoundError(source)
        self.objects[target] = self.objects[source]
        self.after("copy", source)

    def get_file(self, path: str, local: str) -> None:
        self.before("read", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        Path(local).write_bytes(self.objects[path])
