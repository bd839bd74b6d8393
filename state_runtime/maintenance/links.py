"""Files of a root that share their bytes with other files through hard links: on a local store a copy is a second name.

Such a copy protects against deletion only: if a disk error or a person overwrites a byte, all copies change. Object
stores copy the bytes; there this module finds nothing and sends no request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from state_runtime.snapshot.paths import SAVEPOINTS_DIR
from state_runtime.store import Store

__all__ = ["NOTHING_SHARED", "Links", "Shared", "find_links"]

JOB = ""
"""The owner of all files of a root that are outside its savepoints."""


@dataclass(frozen=True)
class Shared:
    """Files that share their bytes with other files.

    Attributes:
        files, bytes: number of the files, and their size.
        owners: the owners of the other files below the same root, in order: names of savepoints, "" for the job itself.
        elsewhere: how many of the files have names outside the root.
    """

    files: int = 0
    bytes: int = 0
    owners: tuple[str, ...] = ()
    elsewhere: int = 0

    def __str__(self) -> str:
        """Name the owners of the other files, for people."""
        names = ["the job" if owner == JOB else f"savepoint {owner}" for owner in self.owners]
        return ", ".join([*names, *(["files outside of the root"] if self.elsewhere else [])])


NOTHING_SHARED = Shared()


@dataclass(frozen=True)
class _File:
    path: str
    bytes: int
    names: int
    same: str


@dataclass(frozen=True)
class Links:
    """The files of a root whose bytes have several names."""

    by_path: Mapping[str, _File] = field(default_factory=dict)
    by_same: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of_owner(self, owner: str) -> Shared:
        """Return the files that a savepoint, or the job (""), shares with others."""
        return self.of_paths([path for path in self.by_path if _owner_of(path) == owner])

    def of_paths(self, paths: Collection[str]) -> Shared:
        """Return which of some files are shared with other owners, or with files outside the root."""
        files, size, elsewhere, owners = 0, 0, 0, set()
        for path in paths:
            found = self.by_path.get(path)
            if found is None:
                continue
            others = {_owner_of(p) for p in self.by_same[found.same]} - {_owner_of(path)}
            is_outside = found.names > len(self.by_same[found.same])
            if others or is_outside:
                files, size, elsewhere = files + 1, size + found.bytes, elsewhere + is_outside
                owners |= others
        return Shared(files, size, tuple(sorted(owners)), elsewhere)


def find_links(root: Store) -> Links:
    """Look at all files of a root. A store that does not share bytes receives no request.

    Raises:
        StoreUnavailable: the listing is not complete.
    """
    if not root.shares_bytes:
        return Links()
    files = {f.path: _File(f.path, f.bytes, f.names, f.same) for f in root.list_shared("")}
    same: dict[str, list[str]] = {}
    for file in files.values():
        same.setdefault(file.same, []).append(file.path)
    return Links(files, {key: tuple(paths) for key, paths in same.items()})


def _owner_of(path: str) -> str:
    top, _, rest = path.partition("/")
    return rest.partition("/")[0] if top == SAVEPOINTS_DIR else JOB
