"""Files on the host's disk that hold state: the common operations of both backends, and of restores.

They are stored in folders that no other user may enter, are made with mode 0600 under a name that does not exist yet,
and are read without following a link: another user of the host must neither read state nor place files here. The
description of a version is a JSON text after a line with its SHA-256, so that no flipped bit of it is trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from state_runtime.base.clock import Clock
from state_runtime.state.backend import StoredVersion

__all__ = [
    "UNREADABLE",
    "Described",
    "check_private_folder",
    "follows",
    "is_abandoned",
    "is_version_id",
    "make_own_folder",
    "make_private_folder",
    "open_new_private",
    "parsed_description",
    "read_sealed",
    "read_without_links",
    "sealed",
    "stored_versions",
    "write_private_file",
]

# Files that no version names were left by a killed attempt; a live attempt needs its files for minutes at most.
_ABANDONED_AFTER_S = 3600.0
_VERSION_ID = re.compile(r"[0-9a-f]{16}\Z")

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""All errors that a damaged JSON file can raise in its reader."""


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...


class Described(Protocol):
    """The description of a version, of either backend; see `StoredVersion` and `Stamp`."""

    @property
    def version(self) -> str: ...
    @property
    def parent(self) -> str: ...
    @property
    def files(self) -> Sequence[_Sized]: ...
    @property
    def snapshot_id(self) -> int: ...
    @property
    def epoch(self) -> str: ...
    @property
    def restored_from(self) -> str: ...


# --- folders and files -------------------------------------------------------------------------------------------


def make_own_folder(folder: Path) -> None:
    """Make a folder if it does not exist. Others may have access to it: files made in it must be private themselves.

    Raises:
        PermissionError: it belongs to another user, or is no folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of this user")


def make_private_folder(folder: Path) -> None:
    """Make a folder if it does not exist.

    Raises:
        PermissionError: it belongs to another user, or others have access to it, or it is no folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        check_private_folder(folder)
    except ValueError as error:
        raise PermissionError(str(error)) from error


def check_private_folder(folder: Path) -> None:
    """Check a folder. Raises ValueError: it is no folder to which only this user has access. OSError: it is missing."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{folder} is not a private folder of this user")


def open_new_private(path: Path) -> BinaryIO:
    """Open a new private file, for writing. Raises FileExistsError: the name exists, perhaps as a link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def write_private_file(path: Path, body: bytes | pa.Buffer) -> None:
    """Write a new private file. Raises FileExistsError: see `open_new_private`."""
    with open_new_private(path) as file:
        file.write(body)


def read_without_links(path: Path, bytes_max: int) -> bytes:
    """Read a file's bytes. Raises ValueError: there are more than expected. OSError: not there, or a link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise ValueError(f"{path.name} is larger than {bytes_max} bytes")
    return body


def is_abandoned(path: Path, clock: Clock) -> bool:
    """Return whether a file or folder that no version names was left behind. False if it is gone: its attempt ended."""
    try:
        return clock.now_ms() / 1000 - path.lstat().st_mtime > _ABANDONED_AFTER_S
    except FileNotFoundError:
        return False


# --- descriptions of versions ------------------------------------------------------------------------------------


def is_version_id(text: str) -> bool:
    """Return whether a text may be part of a path: ids come from manifests."""
    return _VERSION_ID.match(text) is not None


def sealed(body: bytes) -> bytes:
    """Return a description after a line with its digest."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_sealed(path: Path, bytes_max: int) -> bytes:
    """Read a description: the inverse of `sealed`.

    Raises:
        ValueError: the file was altered. OSError: not there, or a link.
    """
    digest, _, body = read_without_links(path, bytes_max).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError(f"{path.name} was altered: its first line has another digest")
    return body


def parsed_description(body: bytes | str, version: str, format_number: int) -> Any:
    """Return the JSON of a description; only its format and its version are checked yet.

    Raises:
        any of UNREADABLE.
    """
    described = json.loads(body)
    if described["format"] != format_number:
        raise ValueError(f"the description has format {described['format']!r}, and {format_number} is read here")
    if described["version"] != version:
        raise ValueError(f"the description is of version {described['version']!r}")
    return described


def follows(described: Described, keep: str, epoch: str) -> bool:
    """Return whether `ShardStore.prune` leaves a version because it follows from the kept one."""
    return described.parent == keep and epoch in ("", described.epoch)


def stored_versions(names: Iterable[str], read: Callable[[str], Described]) -> list[StoredVersion]:
    """Return the versions of some names, the newest snapshot first; unreadable ones are left out."""
    found = []
    for name in names:
        try:
            v = read(name)
        except UNREADABLE:
            continue
        found.append(StoredVersion(v.version, v.snapshot_id, v.restored_from, sum(f.bytes for f in v.files)))
    return sorted(found, key=lambda v: (v.snapshot_id, v.version), reverse=True)
