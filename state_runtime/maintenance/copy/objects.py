"""Copies of snapshots: all needed objects, at the same relative paths below another root; data first, manifest last.

So an interrupted copy is no snapshot, and a repeat continues from the existing objects. An existing object is accepted
by its content, never by name and size alone: it is read and compared, block by block. Damaged objects are replaced by
the source's object; the name gets the new bytes or keeps the old ones.

An intact object is never overwritten, and the source is only read.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from state_runtime.base.clock import Clock
from state_runtime.base.digests import digest_of_file
from state_runtime.base.errors import (
    RESTORE_OR_CHOOSE,
    CorruptData,
    CorruptManifest,
    InvalidConfiguration,
    MissingFile,
    SnapshotExpired,
    SnapshotInUse,
    StoreRefused,
    StoreUnavailable,
    missing_file,
)
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MANIFEST_BYTES_MAX, MIB
from state_runtime.reading.references import references
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import OUTPUTS_DIR, manifest_path
from state_runtime.store import Created, Store, transfer
from state_runtime.store.transfer import is_inside

__all__ = [
    "Copier",
    "CopyProgress",
    "CopyResult",
    "NeededObject",
    "copy_snapshot",
    "create_manifest",
    "needed_objects",
    "outputs_below_root",
]

# Futures that wait for a thread: enough that no thread is idle, few enough that a snapshot of a million objects does
# not need a million futures.
_QUEUED_PER_THREAD = 4


@dataclass(frozen=True, kw_only=True)
class NeededObject:
    """An object that a snapshot needs, and the known facts about its bytes.

    Attributes:
        bytes: -1 if only `bytes_min` is known.
        digest: SHA-256 of the whole object; empty if only digests of its parts are known.
        parts: offset, length and SHA-256 of each needed part.
        optional: it may be missing in the source, and is skipped then.
    """

    path: str
    bytes: int
    digest: str
    bytes_min: int = 0
    parts: tuple[tuple[int, int, str], ...] = ()
    optional: bool = False

    @property
    def bytes_known(self) -> int:
        """The size that is known before the object is read: exact, or the minimum."""
        return self.bytes if self.bytes >= 0 else self.bytes_min

    def fits_size(self, size: int) -> bool:
        """Whether an object of that size may be this one."""
        return size == self.bytes if self.bytes >= 0 else size >= self.bytes_min

    def is_in(self, file: Path) -> bool:
        """Whether a local file has its bytes: size and every known digest."""
        if not self.fits_size(file.stat().st_size) or (self.digest and digest_of_file(file) != self.digest):
            return False
        with file.open("rb") as opened:
            return all(_digest_of_part(opened, offset, length) == digest for offset, length, digest in self.parts)


@dataclass(frozen=True)
class CopyProgress:
    """Progress of a copy. Bytes that were in the target already count as done."""

    objects_done: int
    objects: int
    bytes_done: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """A copy that is complete.

    Attributes:
        manifest: as it was written to the target.
        objects, bytes: of all data that it needs, without the manifest.
        objects_copied, bytes_copied: of objects that the target did not have before.
    """

    manifest: Manifest
    objects: int
    bytes: int
    objects_copied: int
    bytes_copied: int
    seconds: float


def copy_snapshot(
    source: Store,
    manifest: Manifest,
    target: Store,
    *,
    rewrite: Callable[[Manifest], Manifest] | None = None,
    progress: Callable[[CopyProgress], None] | None = None,
    threads: int = 16,
    verified: bool = False,
    independent: bool = False,
    prove: Callable[[], None] = lambda: None,
    clock: Clock,
    ids: Ids,
) -> CopyResult:
    """Copy a snapshot with all objects that it needs. Atomic: the target has a complete snapshot or none.

    Repeat it after any error or crash: intact objects stay, the rest is copied. The caller writes `job.json`.

    Args:
        source: its root; only read. If possible, the caller has pinned the snapshot there.
        target: the root that receives the snapshot.
        rewrite: makes the target's manifest from the source's. A repeat must produce the same result; otherwise its own
            earlier manifest counts as another snapshot. None copies the manifest's bytes.
        progress: called in this thread, after each object.
        threads: objects at a time.
        verified, independent: see `Copier`.
        prove: called right before the manifest is created; raises if the target is not the caller's any more.

    Raises:
        SnapshotExpired: a file is gone because the snapshot expired meanwhile.
        MissingFile, CorruptData: the source is damaged; only complete objects were written.
        InvalidConfiguration: the target has another snapshot of that id, or that id has expired in the target.
        SnapshotInUse: the target was replaced during the copy; no snapshot was made of the remains.
        StoreUnavailable, OutcomeUnknown: repeat it.
    """
    started_s = clock.monotonic_s()
    try:
        body = _manifest_bytes(source, manifest) if rewrite is None else b""
        written = manifest if rewrite is None else rewrite(manifest)
        body = body or written.encode()
        if not read_boundary(target).keeps(written.snapshot_id):
            raise InvalidConfiguration(
                f"{target.url} has given snapshot {written.snapshot_id} up, so a copy there would never be read; "
                "choose another target"
            )
        objects = needed_objects(source, manifest)
        with Copier(
            source, target, progress=progress, threads=threads, verified=verified, independent=independent, ids=ids
        ) as copier:
            copier.copy([*objects.values(), *outputs_below_root(written)])
    except MissingFile as error:
        if not read_boundary(source).keeps(manifest.snapshot_id):
            raise SnapshotExpired(
                f"snapshot {manifest.snapshot_id} in {source.url} was abandoned while objects were copied to it "
                f"{target.url}; choose a newer one"
            ) from error
        raise
    prove()
    copier.check_still_there()
    create_manifest(target, written, body)
    return CopyResult(
        manifest=written,
        objects=copier.objects,
        bytes=copier.bytes,
        objects_copied=copier.objects_copied,
        bytes_copied=copier.bytes_copied,
        seconds=clock.monotonic_s() - started_s,
    )


def create_manifest(target: Store, manifest: Manifest, body: bytes) -> None:
    """Complete a copy: all objects that the manifest names are in the target.

    Raises:
        InvalidConfiguration: the target has another snapshot of that id.
        OutcomeUnknown, StoreUnavailable: see `Store.create`.
    """
    if target.create(manifest_path(manifest.snapshot_id), body) is not Created.MINE:
        raise InvalidConfiguration(
            f"{target.url} has another snapshot {manifest.snapshot_id}; nothing was overwritten. Choose an empty target"
        )


def needed_objects(root: Store, manifest: Manifest) -> dict[str, NeededObject]:
    """Return the data objects of a snapshot by path, each once, without the manifest.

    Raises:
        MissingFile, CorruptSegment, CorruptManifest, UnsupportedFormat, StoreUnavailable: see `references`.
    """
    found: dict[str, NeededObject] = {}
    for ref in references(root, manifest):
        if ref.kind == "manifest":
            continue
        need = found.setdefault(
            ref.path, NeededObject(path=ref.path, bytes=ref.bytes, digest=ref.digest, bytes_min=ref.bytes_min)
        )
        if (need.bytes, need.digest) != (ref.bytes, ref.digest):
            raise CorruptManifest(
                f"snapshot {manifest.snapshot_id} in {root.url} names {ref.path} with two sizes or digests"
            )
        part = ref.part
        if part is not None and (known := (part.offset, part.length, part.digest)) not in need.parts:
            found[ref.path] = replace(need, bytes_min=max(need.bytes_min, ref.bytes_min), parts=(*need.parts, known))
    return found


def outputs_below_root(manifest: Manifest) -> list[NeededObject]:
    """Return output that is staged below the job root for this snapshot and that the next run delivers again; later
    snapshots remove it.

    Output that other sinks staged is stored in their own folders, which are no part of a snapshot.
    """
    files = [file for output in manifest.outputs for file in output.files if file.staged.startswith(f"{OUTPUTS_DIR}/")]
    return [NeededObject(path=file.staged, bytes=file.bytes, digest="", optional=True) for file in files]


class Copier:
    """Copies objects between two roots, several at a time, each once. Use it as a context manager, from one thread.

    Args:
        verified: every object is read in the target and compared, even if no bytes would pass through this process.
        by_link: False: an object is written again even if the store could give it a second name.
        independent: no object of the target shares its bytes with another file: if the store copies by hard link, the
            bytes are read, compared and written instead, and an existing link is replaced.
        known: paths that are right in the target, by an earlier copy of this process; grows.
        progress: called in the caller's thread, after each object.

    Attributes:
        objects, bytes: of all requested objects; objects_copied, bytes_copied: of those that had to be copied.
        replaced: paths where the target had a different object.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        ids: Ids,
        verified: bool = False,
        by_link: bool = True,
        independent: bool = False,
        known: set[str] | None = None,
        progress: Callable[[CopyProgress], None] | None = None,
        threads: int = 16,
    ) -> None:
        self._source = source
        self._target = target
        self._ids = ids
        self._independent = independent and target.shares_bytes
        self._inside = is_inside(source, target) and not (target.shares_bytes and (self._independent or not by_link))
        self._verified = verified
        self._progress = progress
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="copy")
        self._scratch = tempfile.TemporaryDirectory(prefix="stillstate-copy-")
        self._present: dict[str, dict[str, int]] = {}
        self._known = known if known is not None else set()
        self._there: set[str] = set()
        self.objects = self.bytes = self.objects_copied = self.bytes_copied = 0
        self.replaced: list[str] = []

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._scratch.cleanup()

    def copy(self, needed: Iterable[NeededObject]) -> None:
        """Bring objects to the target; return when all of them are there. The first error ends the copy.

        Raises:
            MissingFile, CorruptData: of the source. StoreUnavailable: try again.
        """
        todo = list({need.path: need for need in needed if need.path not in self._known}.values())
        left_objects, left_bytes = len(todo), sum(need.bytes_known for need in todo)
        running: set[Future[tuple[NeededObject, int, bool]]] = set()
        for number, need in enumerate(todo):
            self._list_folder(need.path)
            # Draw the names in this thread: a source of ids need not be thread-safe.
            running.add(self._pool.submit(self._one, need, Path(self._scratch.name) / self._ids.short()))
            while len(running) >= self._threads * _QUEUED_PER_THREAD or (running and number == len(todo) - 1):
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    finished, size, was_copied = future.result()
                    if size or was_copied or not finished.optional:
                        self._there.add(finished.path)
                    self._count(finished, size, was_copied)
                    left_objects, left_bytes = left_objects - 1, left_bytes - finished.bytes_known
                    if self._progress is not None:
                        objects, in_all = self.objects + left_objects, self.bytes + left_bytes
                        self._progress(CopyProgress(self.objects, objects, self.bytes, in_all))

    def copy_what_is_gone(self, needed: Iterable[NeededObject]) -> None:
        """Copy again the objects that were copied, or found, and are missing now. One listing for each folder.

        Raises:
            as `copy`.
        """
        gone = self._gone()
        self._known -= gone
        self._present.clear()
        self.copy(need for need in needed if need.path in gone)

    def check_still_there(self) -> None:
        """Check that all copied and found objects still exist. If an older backup of the target replaced it meanwhile,
        some of them are missing, independent of the order of copies. One listing for each folder.

        Raises:
            SnapshotInUse: an object is gone; complete nothing with the rest.
        """
        gone = self._gone()
        if gone:
            raise SnapshotInUse(
                f"{min(gone)}, which was just copied, is not in {self._target.url} any more: it was deleted, or "
                "replaced by an older backup. Nothing was completed; repeat the copy"
            )

    def _gone(self) -> set[str]:
        return self._there - {found.path for top in self._present for found in self._target.list_objects(top)}

    def _count(self, need: NeededObject, size: int, was_copied: bool) -> None:
        self._known.add(need.path)
        if was_copied and need.path in self._present[need.path.partition("/")[0]]:
            self.replaced.append(need.path)
        self.objects += 1
        self.bytes += size
        self.objects_copied += was_copied
        self.bytes_copied += size if was_copied else 0

    def _list_folder(self, path: str) -> None:
        # One listing per folder, not one request per object: the target of a copy is mostly empty at first.
        top = path.partition("/")[0]
        if top not in self._present:
            linked = {found.path for found in self._target.list_shared(top)} if self._independent else set()
            listed = self._target.list_objects(top)
            self._present[top] = {found.path: found.bytes for found in listed if found.path not in linked}

    def _one(self, need: NeededObject, scratch: Path) -> tuple[NeededObject, int, bool]:
        """Copy one object if necessary. Return its size (0 for a missing optional one), and whether it was copied."""
        size = self._present[need.path.partition("/")[0]].get(need.path, -1)
        try:
            if size >= 0 and self._is_there(need, size, scratch):
                return need, size, False
            size = self._copy_inside(need) if self._inside else self._copy_through(need, scratch)
            if self._verified and not self._reads_back(need, scratch):
                if not _reads(self._source, need, scratch):
                    raise _altered(self._source, need.path, scratch.stat().st_size)
                raise StoreUnavailable(
                    f"{need.path} was copied to {self._target.url}, but reads back altered; repeat the copy, and check "
                    "that store"
                )
            return need, size, True
        except MissingFile:
            if need.optional:
                return need, 0, False
            raise
        finally:
            scratch.unlink(missing_ok=True)

    def _is_there(self, need: NeededObject, size: int, scratch: Path) -> bool:
        if not need.fits_size(size):
            return False
        if need.digest or need.parts:
            return self._reads_back(need, scratch)
        return need.bytes >= 0 or size == self._source_size(need)

    def _reads_back(self, need: NeededObject, scratch: Path) -> bool:
        try:
            return _reads(self._target, need, scratch)
        except MissingFile:
            return False

    def _source_size(self, need: NeededObject) -> int:
        try:
            return self._source.size(need.path)
        except FileNotFoundError as error:
            raise missing_file(need.path, self._source.url, RESTORE_OR_CHOOSE) from error

    def _copy_inside(self, need: NeededObject) -> int:
        size = self._source_size(need)
        if not need.fits_size(size):
            raise _altered(self._source, need.path, size)
        try:
            return transfer(self._source, need.path, self._target, need.path, bytes_expected=size)
        except FileNotFoundError as error:
            if self._source.exists(need.path):
                raise StoreRefused(
                    f"cannot write {need.path} to {self._target.url}: no such bucket or folder"
                ) from error
            raise missing_file(need.path, self._source.url, RESTORE_OR_CHOOSE) from error

    def _copy_through(self, need: NeededObject, scratch: Path) -> int:
        # Read twice: an answer that was truncated or altered on its way is no damage.
        if not (_reads(self._source, need, scratch) or _reads(self._source, need, scratch)):
            raise _altered(self._source, need.path, scratch.stat().st_size)
        size = scratch.stat().st_size
        try:
            self._target.put_file(scratch, need.path)
        except FileNotFoundError as error:
            raise StoreRefused(f"cannot write {need.path} to {self._target.url}: no such bucket or folder") from error
        return size


def _reads(root: Store, need: NeededObject, scratch: Path) -> bool:
    """Read an object into a file; return whether it is the needed one."""
    scratch.touch()
    try:
        root.get_file(need.path, scratch)
    except FileNotFoundError as error:
        raise missing_file(need.path, root.url, RESTORE_OR_CHOOSE) from error
    return need.is_in(scratch)


def _manifest_bytes(source: Store, manifest: Manifest) -> bytes:
    # The stored bytes: encoding a manifest of an older format again would change it.
    path = manifest_path(manifest.snapshot_id)
    try:
        body = source.read(path, MANIFEST_BYTES_MAX)
    except FileNotFoundError as error:
        raise missing_file(path, source.url, RESTORE_OR_CHOOSE) from error
    if Manifest.decode(body, f"{source.url}/{path}") != manifest:
        raise CorruptManifest(f"{source.url}/{path} is not the manifest that was read before; nothing was copied")
    return body


def _digest_of_part(file: BinaryIO, offset: int, length: int) -> str:
    hasher = hashlib.sha256()
    file.seek(offset)
    while length > 0 and (block := file.read(min(length, 4 * MIB))):
        hasher.update(block)
        length -= len(block)
    return hasher.hexdigest()


def _altered(root: Store, path: str, size: int) -> CorruptData:
    return CorruptData(
        f"{path} in {root.url} ({size:,} bytes) has another size or digest than its manifest says; it was not copied. "
        f"{RESTORE_OR_CHOOSE}"
    )
