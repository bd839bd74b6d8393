"""Objects of the primary store on this host, fetched once for all its tasks while shards are restored.

    <local dir>/objects/<root id>-<job uid>/
        <SHA-256 of the path>.obj         the object, complete; or several small ones, one after the other (SHA-256 of
                                          all paths)
        <SHA-256 of the path>.lock        held by the task that fetches it
        <SHA-256 of the path>.part-…      being fetched

A segment holds the changes of all shards, and after a rescale a table those of several: without this every task would
fetch them again. Small neighbours share a file, because making files takes longer than reading them. A fetched file is
mapped, so no task has it in private memory. Objects never change, so a file under its final name stays valid. A task
that visits a shard removes files a minute after their last use, and also files that crashes left. Manifests are the
exception: their names are not unique, and in a root that was replaced by an older copy of it, another manifest has the
same name. So manifests are shared within a checkpoint only (`WantedObject.of`).

All of this only saves time: if the disk is full or read-only, or belongs to another user, the object is read directly.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from state_runtime.base.clock import Clock
from state_runtime.base.digests import digest_of_file
from state_runtime.base.errors import RESTORE_OR_GO_BACK, CorruptData, CorruptSegment, StoreUnavailable, missing_file
from state_runtime.base.limits import KIB, SEGMENT_BYTES_MAX
from state_runtime.state.sealed_files import make_private_folder, open_new_private
from state_runtime.store import Store

__all__ = ["HostObjects", "WantedObject", "WantedRange", "small_neighbours"]

_UNUSED_S = 60.0
_FETCHES = 4
"""Objects that one task fetches at a time."""
_SMALL_FETCHES = 16
"""The same for small ones, which take time mainly to wait for an answer."""
_SMALL_BYTES = 256 * KIB
_TOGETHER = 32
"""Small objects per file."""


@dataclass(frozen=True)
class WantedObject:
    """An object below the job root.

    Attributes:
        bytes, digest: expected size and digest; 0 and "" if only its parts are known, which their reader checks.
        bytes_max: the largest accepted size in that case.
        of: of an object whose name is not unique: the owner that it was fetched for; others fetch it again.
    """

    path: str
    bytes: int = 0
    digest: str = ""
    bytes_max: int = SEGMENT_BYTES_MAX
    of: str = ""


@dataclass(frozen=True)
class WantedRange:
    """A range of bytes of an object."""

    object: WantedObject
    offset: int
    length: int


def small_neighbours(objects: Sequence[WantedObject]) -> list[tuple[WantedObject, ...]]:
    """Group the objects that should be fetched together; pure. Callers with the same list get, and share, the same
    groups.

    Only objects of known size and digest, which are compared, are grouped; a group has at least two.
    """
    groups = []
    for start in range(0, len(objects), _TOGETHER):
        small = [o for o in objects[start : start + _TOGETHER] if o.digest and 0 < o.bytes <= _SMALL_BYTES]
        if len(small) > 1:
            groups.append(tuple(small))
    return groups


class HostObjects:
    """One task's access to objects of the primary store, shared with the other tasks of the host.

    Attributes:
        bytes_read: bytes that this task has read from the primary.
    """

    def __init__(self, root: Callable[[], Store], folder: Path | None, bytes_max: int, clock: Clock) -> None:
        """Args:
        root: opens the job root.
        folder: None reads everything directly.
        bytes_max: the limit for all objects of the folder.
        """
        self._root = root
        self._folder = folder
        self._bytes_max = bytes_max
        self._clock = clock
        self._counting = threading.Lock()
        self._used: set[Path] = set()
        self._together: dict[str, pa.Buffer] = {}
        self.bytes_read = 0

    def discard(self) -> bool:
        """Remove the host's files that were read, because some data was damaged, and read directly from now on.

        Returns:
            Whether there were such files: if not, the primary itself is damaged.
        """
        used, self._used, self._folder, self._together = self._used, set(), None, {}
        for path in used:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # this process may no longer write there; this task reads nothing from it again
        return bool(used)

    def prefetch(self, wanted: Sequence[WantedObject], first: int) -> None:
        """Fetch several objects at a time; tasks that begin at different places do not wait for each other.

        Errors are left to `read`, which gets them again.
        """
        wanted = [w for w in wanted if w.path not in self._together]
        if self._folder is None or len(wanted) < 2:
            return
        start = first % len(wanted)
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(self._fetched, [*wanted[start:], *wanted[:start]]))

    def prefetch_together(self, groups: Sequence[Sequence[WantedObject]], first: int) -> None:
        """Fetch groups of small objects, each as one file; see `small_neighbours` and `prefetch`."""
        start = first % max(1, len(groups))
        for group in [*groups[start:], *groups[:start]]:
            size = sum(wanted.bytes for wanted in group)
            fetched = self._shared("\n".join(w.path for w in group), size, partial(self._fetch_group, group))
            if fetched is None:
                continue
            try:
                body = pa.memory_map(str(fetched)).read_buffer()
            except OSError:
                continue  # removed meanwhile; `read` fetches one by one
            if body.size != size:
                continue
            self._used.add(fetched)
            at = 0
            for wanted in group:
                self._together[wanted.path] = body.slice(at, wanted.bytes)
                at += wanted.bytes

    def read(self, wanted: WantedObject) -> pa.Buffer:
        """Return the object, mapped if possible.

        Raises:
            MissingFile: a manifest names it, and it is missing. CorruptSegment: its bytes differ. StoreUnavailable: try
                again.
        """
        if wanted.path in self._together:
            return self._together[wanted.path]
        fetched = self._fetched(wanted)
        if fetched is not None:
            try:
                mapped = pa.memory_map(str(fetched)).read_buffer()
                self._used.add(fetched)
                return mapped
            except OSError:
                pass  # removed or cut meanwhile: read from the store
        root = self._root()
        try:
            data = root.read(wanted.path, wanted.bytes or wanted.bytes_max)
        except FileNotFoundError as error:
            raise missing_file(wanted.path, root.url) from error
        self._count(len(data))
        if wanted.digest and (len(data) != wanted.bytes or hashlib.sha256(data).hexdigest() != wanted.digest):
            raise CorruptSegment(
                f"{wanted.path} in {root.url} was altered: it has another size or digest than the manifest says. "
                f"{RESTORE_OR_GO_BACK}"
            )
        return pa.py_buffer(data)

    def expect(self, ranges: Sequence[WantedRange], *, keep: bool = False) -> None:
        """Announce ranges that are read next: no effect here, because whole objects are fetched anyway. A reader by
        range fetches them together."""

    def read_range(self, wanted: WantedRange) -> pa.Buffer:
        """Return a range of an object. The whole object is read, so its digest is checked.

        Raises:
            MissingFile, CorruptSegment, StoreUnavailable: see `read`.
        """
        body = self.read(wanted.object)
        if wanted.offset + wanted.length > body.size:
            raise CorruptSegment(f"{wanted.object.path} ends after {body.size:,} bytes; it was cut off")
        return body.slice(wanted.offset, wanted.length)

    def open(self, wanted: WantedObject) -> pa.NativeFile:
        """Return the object as a file with random access.

        Raises:
            MissingFile, CorruptSegment, StoreUnavailable: see `read`; also while it is read.
        """
        return pa.BufferReader(self.read(wanted))

    def _fetched(self, wanted: WantedObject) -> Path | None:
        """Return the object's file, fetched now if needed; None if that is impossible."""
        return self._shared(f"{wanted.path} {wanted.of}".rstrip(), wanted.bytes, partial(self._fetch, wanted))

    def _shared(self, what: str, size: int, fetch: Callable[[Path], bool]) -> Path | None:
        """Return a file that all tasks of the host share, made now if needed; None if that is impossible.

        Args:
            size: 0 if unknown.
            fetch: writes it into an empty file, and returns whether it is right.
        """
        if self._folder is None:
            return None
        name = hashlib.sha256(what.encode()).hexdigest()[:32]
        final = self._folder / f"{name}.obj"
        try:
            make_private_folder(self._folder)
            if _is_intact(final, size):
                os.utime(final)
                return final
            with _locked(self._folder / f"{name}.lock"):
                if not _is_intact(final, size) and not self._make(final, size, fetch):
                    return None
            return final
        except (OSError, StoreUnavailable):
            # Disk full, read-only, another user's: silent on purpose (invariant 5), the caller reads directly. An error
            # of the store itself is raised then.
            return None

    def _make(self, final: Path, size: int, fetch: Callable[[Path], bool]) -> bool:
        taken = sum(entry.stat().st_size for entry in os.scandir(final.parent) if entry.is_file(follow_symlinks=False))
        if taken + size > self._bytes_max or shutil.disk_usage(final.parent).free < size:
            return False
        part = final.with_suffix(f".part-{os.getpid()}-{threading.get_ident()}")
        try:
            open_new_private(part).close()
            if not fetch(part):
                return False  # `read` checks once more, and reports the error
            os.replace(part, final)
        finally:
            part.unlink(missing_ok=True)
        return True

    def _fetch(self, wanted: WantedObject, part: Path) -> bool:
        self._root().get_file(wanted.path, part)
        size = part.lstat().st_size
        self._count(size)
        return size <= (wanted.bytes or wanted.bytes_max) and (
            not wanted.digest or digest_of_file(part) == wanted.digest
        )

    def _fetch_group(self, group: Sequence[WantedObject], part: Path) -> bool:
        with ThreadPoolExecutor(_SMALL_FETCHES) as pool:
            bodies = list(pool.map(self._read_small, group))
        if None in bodies:
            return False
        with part.open("wb") as file:
            file.writelines(body for body in bodies if body is not None)
        return True

    def _read_small(self, wanted: WantedObject) -> bytes | None:
        """Read an object of known digest; None if the digest differs."""
        try:
            body = self._root().read(wanted.path, wanted.bytes)
        except CorruptData:
            return None
        self._count(len(body))
        return body if hashlib.sha256(body).hexdigest() == wanted.digest else None

    def _count(self, size: int) -> None:
        with self._counting:
            self.bytes_read += size

    def clean(self) -> None:
        """Remove files that no task has used for a minute. Cheap if there are none; never fails.

        A mapped file stays readable for the tasks that have it open.
        """
        if self._folder is None:
            return
        now_s = self._clock.now_ms() / 1000
        try:
            names = os.listdir(self._folder)
            for name in names:
                path = self._folder / name
                if now_s - path.lstat().st_mtime > _UNUSED_S:
                    path.unlink(missing_ok=True)
            if not names:
                self._folder.rmdir()
        except OSError:
            return  # the folder does not exist, or another task was quicker


def _is_intact(path: Path, size: int) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and (not size or status.st_size == size)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process at the latest."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
