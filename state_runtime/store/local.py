"""A store on a local (or mounted) file system. fsspec's own local `mode="create"` is exists-then-write, so the
create here is `os.link` of a finished, fsynced temporary file: name and content appear together or not at all.

A finished write survives a loss of power: the bytes, the name, and the names of all folders up to the root and of those
that were made above it (store/folders.py) are on the disk before it returns. A deletion does not guarantee this: after
a loss of power a deleted object may exist again."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from state_runtime.base.errors import CorruptData, OutcomeUnknown, StoreNotCapable, StoreRefused, StoreUnavailable
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import MIB
from state_runtime.store.folders import DurableFolders, fsync_path
from state_runtime.store.paths import check_relative_path
from state_runtime.store.port import Body, Created, SharedObject, Store, StoredObject, warn_single_writer

__all__ = ["LocalStore"]

# Error codes of os.link on file systems without hard links (vfat, exFAT, some network mounts).
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# Waiting does not help with these.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
_TEMPORARY = ".tmp-"
# Large files are synced piece by piece: a sync of a small file meanwhile (a checkpoint beside a fold) waits for one
# piece only.
_SYNC_BYTES = MIB


class LocalStore(Store):
    """See `Store`. `root` need not exist; folders are made by the first write.

    Args:
        single_writer: on a file system without hard links, check that the name is free and then rename, instead of
            refusing it.
        folders: of the parent store, if this one is a folder of it.
    """

    def __init__(self, root: Path, *, single_writer: bool = False, folders: DurableFolders | None = None) -> None:
        self._root = root
        self._folders = DurableFolders(root) if folders is None else folders
        self._single_writer = single_writer
        self._no_links = False

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    @property
    def url(self) -> str:
        return str(self._root)

    def create(self, path: str, body: Body) -> Created:
        final = self._at(path)
        body = memoryview(body).cast("B")
        with self._translated("create", path):
            temporary = self._write_temporary(final, body)
            try:
                appeared = self._appears(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)
            # An existing name is synced too: its writer may not have synced it yet, and the caller acts on the answer
            # that it exists.
            mine = appeared or _holds(final, body)
            try:
                _fsync_folder(final.parent)
            except OSError as error:
                raise OutcomeUnknown(
                    f"{path} is there in {self.url}, but its folder could not be synced: {error}. "
                    "Nothing was cleaned up; start again, and the run reads it back"
                ) from error
        return Created.MINE if mine else Created.LOST

    def _appears(self, temporary: Path, final: Path) -> bool:
        """Give a finished file its name; return False if the name is taken.

        Raises:
            StoreNotCapable: the file system has no hard links, and no single writer was declared.
        """
        try:
            os.link(temporary, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._single_writer:
                raise StoreNotCapable(
                    f"the file system of {self.url} has no hard links ({error.strerror}), so a file cannot appear "
                    "there complete and only once. Use another file system or an object store, or declare "
                    "`single_writer: true` if nothing else ever writes to this job"
                ) from error
            self._no_links = True
            if final.exists():
                return False
            os.replace(temporary, final)
        return True

    def probe(self) -> None:
        super().probe()
        if self._no_links:
            warn_single_writer(self.url)

    def put(self, path: str, body: Body) -> None:
        final = self._at(path)
        with self._translated("write", path):
            temporary = self._write_temporary(final, body)
            os.replace(temporary, final)
            _fsync_folder(final.parent)

    def put_file(self, local: Path, path: str) -> None:
        final = self._at(path)
        with self._translated("write", path):
            self._folders.make(final.parent)
            temporary = final.parent / f"{_TEMPORARY}{SYSTEM_IDS.uid()}"
            try:
                shutil.copyfile(local, temporary)
                fsync_path(temporary)
                os.replace(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)
            _fsync_folder(final.parent)

    def read(self, path: str, bytes_max: int) -> bytes:
        with self._translated("read", path), self._opened(path) as file:
            body = file.read(bytes_max + 1)
        if len(body) > bytes_max:
            raise CorruptData(f"{path} in {self.url} is larger than {bytes_max:,} bytes; it was not read")
        return body

    def get_file(self, path: str, local: Path) -> None:
        with self._translated("read", path):
            shutil.copyfile(self._at(path), local)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._translated("read", path), self._opened(path) as file:
            file.seek(offset)
            body = file.read(length)
        if len(body) != length:
            raise CorruptData(f"{path} in {self.url} ends after {offset + len(body):,} bytes; it was cut off")
        return body

    def size(self, path: str) -> int:
        with self._translated("look at", path):
            status = self._at(path).stat()
            if stat.S_ISDIR(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "is a folder, not an object", path)
            return status.st_size

    def list_names(self, path: str) -> list[str]:
        with self._translated("list", path):
            try:
                names = os.listdir(self._at(path) if path else self._root)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(n for n in names if not n.startswith(_TEMPORARY))

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        return self._listed_below(path, temporary=False)

    def list_debris(self) -> Iterator[StoredObject]:
        return self._listed_below("", temporary=True)

    @property
    def shares_bytes(self) -> bool:
        return True

    def list_shared(self, path: str) -> Iterator[SharedObject]:
        for found in self.list_objects(path):
            try:
                status = (self._root / found.path).lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                yield SharedObject(found.path, status.st_size, status.st_nlink, f"{status.st_dev}:{status.st_ino}")

    def _listed_below(self, path: str, *, temporary: bool) -> Iterator[StoredObject]:
        folders = [self._at(path) if path else self._root]
        while folders:
            with self._translated("list", path):
                inside, found = self._listed_in(folders.pop(), temporary=temporary)
            folders += inside
            yield from found

    def _listed_in(self, folder: Path, *, temporary: bool) -> tuple[list[Path], list[StoredObject]]:
        """Return folders and files of one folder. Files that are removed during the listing are left out."""
        folders: list[Path] = []
        found: list[StoredObject] = []
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return folders, found
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False) and entry.name.startswith(_TEMPORARY) == temporary:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                name = Path(entry.path).relative_to(self._root).as_posix()
                # A copy may be a link, or keep its source's time of writing: the time when the name was made counts.
                at_ms = max(status.st_mtime_ns, status.st_ctime_ns) // 1_000_000
                found.append(StoredObject(name, status.st_size, at_ms))
        return folders, found

    def copy(self, source: str, target: str) -> None:
        self.copy_from(self, source, target)

    def copy_from(self, other: LocalStore, source: str, target: str) -> None:
        """Copy like `copy`, from any local store."""
        final = self._at(target)
        with self._translated("copy", source):
            self._folders.make(final.parent)
            temporary = final.parent / f"{_TEMPORARY}{SYSTEM_IDS.uid()}"
            try:
                try:
                    os.link(other._at(source), temporary)
                except OSError as error:
                    # Another file system, or one without hard links.
                    if error.errno not in {*_NO_LINKS, errno.EXDEV, errno.EMLINK}:
                        raise
                    shutil.copyfile(other._at(source), temporary)
                    fsync_path(temporary)
                os.replace(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)
            _fsync_folder(final.parent)

    def move(self, source: str, target: str) -> None:
        final = self._at(target)
        with self._translated("move", source):
            self._folders.make(final.parent)
            try:
                os.replace(self._at(source), final)
            except FileNotFoundError:
                if not final.exists():
                    raise
            # Also if the target existed: the process that moved it may have been killed before this.
            _fsync_folder(final.parent)

    def delete(self, path: str) -> None:
        with self._translated("delete", path):
            try:
                self._at(path).unlink(missing_ok=True)
            except IsADirectoryError:
                return  # a folder is no object: no object has that name

    def remove_empty_folders(self, path: str) -> None:
        base = self._at(path) if path else self._root
        with self._translated("tidy", path):
            for folder, _, _ in os.walk(base, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise

    def child(self, name: str) -> LocalStore:
        return LocalStore(self._at(name), single_writer=self._single_writer, folders=self._folders)

    def _at(self, path: str) -> Path:
        return self._root / check_relative_path(path)

    def _opened(self, path: str) -> BinaryIO:
        """Open a file to read. A folder is no object: one with a file's name counts as missing."""
        try:
            return self._at(path).open("rb")
        except IsADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "is a folder, not an object", path) from error

    def _write_temporary(self, final: Path, body: Body) -> Path:
        self._folders.make(final.parent)
        temporary = final.parent / f"{_TEMPORARY}{SYSTEM_IDS.uid()}"
        try:
            body = memoryview(body).cast("B")
            with temporary.open("xb") as file:
                for start in range(0, len(body), _SYNC_BYTES):
                    file.write(body[start : start + _SYNC_BYTES])
                    file.flush()
                    if start + _SYNC_BYTES < len(body):
                        os.fdatasync(file.fileno())
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    @contextmanager
    def _translated(self, verb: str, path: str) -> Iterator[None]:
        """Convert errors of the operating system: FileNotFoundError stays, the rest becomes StoreRefused or
        StoreUnavailable."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            kind = StoreRefused if error.errno in _REFUSED else StoreUnavailable
            raise kind(
                f"cannot {verb} {path} in {self.url}: {error.strerror or error} ({name}). "
                "Check that the folder exists, is writable by this user and has space left"
            ) from error


def _holds(final: Path, body: memoryview) -> bool:
    """Return whether a file has exactly these bytes; False if it is gone."""
    try:
        with final.open("rb") as file:
            return file.read(len(body) + 1) == body
    except (FileNotFoundError, IsADirectoryError):
        return False


def _fsync_folder(path: Path) -> None:
    # Without it a loss of power can remove the new name although the data is on disk.
    fsync_path(path)
