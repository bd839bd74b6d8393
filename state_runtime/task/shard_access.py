"""One task's access to its shard's state: a usable local copy, else the primary store."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import ChangesPending, CorruptData, UnsupportedFormat
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.limits import MANIFEST_BYTES_MAX
from state_runtime.base.settings import JobSettings
from state_runtime.processors.operator import EpochClock, Operator
from state_runtime.restore.copy_ownership import HostedRoot, settle_in
from state_runtime.restore.disk import LocalDisk, remove_outdated
from state_runtime.restore.objects import HostObjects, WantedObject
from state_runtime.restore.shard import Restored, ShardRestore
from state_runtime.restore.uploaded_files import read_listing
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry, ShardFilesEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.shard_files import ShardListing
from state_runtime.snapshot.shard_versions import NO_VERSION, UNKNOWN_VERSIONS, ShardVersions
from state_runtime.state.backend import LocalCopyUnusable, ShardStore, Stamp, VersionFiles
from state_runtime.state.backends import discard, open_backend
from state_runtime.state.changed_rows import Changed
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.reader import StateReader
from state_runtime.state.version import OpenVersion
from state_runtime.store import Patience, Store, open_watched_store, shared_store

__all__ = ["RestoreNumbers", "ShardAccess", "TaskJob", "local_folder", "root_id", "rows_folder", "state_folder"]

_LOG = logging.getLogger(__name__)
# Folders and runs that this worker process has settled: once is enough, and an epoch does not wait for it again.
_SETTLED: set[tuple[Path, str]] = set()
# Other places of the root are asked only which local files may be removed here; an epoch waits briefly, then continues.
_PATIENCE = Patience(connect_s=2.0, read_s=3.0, call_s=5.0)


@dataclass(frozen=True)
class TaskJob:
    """The job's properties that every task of an epoch needs. `storage_options` may hold secrets, so repr omits them.

    Attributes:
        epoch: unique to the driver's attempt at the epoch.
        snapshot_id: that the epoch will end in, at the next checkpoint.
        base_snapshot_id: the newest committed one.
        pending: segments of later epochs, in order, which no manifest names yet.
        shards: with the changelog off the listing of files after later epochs, if it was written: no manifest names it
            yet.
        root_id: of the job root (see `root_id`); empty: that of the store's URL and the job's name.
        base_commit_id: of the newest committed snapshot; distinguishes it from any other with its id.
        run_uid: of the run; empty if nothing on the host is to be bound to the job.
        clocks: of the operators whose watermarks are not those of `clock`: what is due by, and what is late by, in ms.
    """

    name: str
    uid: str
    store_url: str
    storage_options: Mapping[str, Any]
    local_dir: str
    term: int
    epoch: str
    snapshot_id: int
    base_snapshot_id: int
    parallelism: int
    clock: EpochClock
    settings: JobSettings
    pending: tuple[SegmentEntry, ...] = ()
    shards: ShardFilesEntry | None = None
    root_id: str = ""
    base_commit_id: str = ""
    run_uid: str = ""
    clocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def of_operator(self, uid: str) -> TaskJob:
        """Return the same with the operator's own clock."""
        if uid not in self.clocks:
            return self
        watermark_ms, late_ms = self.clocks[uid]
        return replace(self, clock=replace(self.clock, watermark_ms=watermark_ms, late_watermark_ms=late_ms))

    def __repr__(self) -> str:
        return f"TaskJob({self.name!r}, term={self.term}, snapshot_id={self.snapshot_id})"

    def root(self) -> Store:
        """The job root."""
        return shared_store(self.store_url, self.storage_options).child(self.name)


def root_id(url: str) -> str:
    """Return a digest of a job root's place: it separates a root from its copies on this host, which share its uid."""
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def local_folder(job: TaskJob, what: str) -> Path:
    """Return the folder of this host for one kind of files of the job: "state" or "objects".

    The executor's environment decides, because hosts may have other disks than the driver. The place of the job root is
    in the name, so that a root and its copies never share a folder, in two stores or in one. A root that was moved
    takes its folder along (`state_folder`).
    """
    place = job.root_id or root_id(f"{job.store_url.rstrip('/')}/{job.name}")
    return Path(os.environ.get("STILLSTATE_LOCAL_DIR") or job.local_dir) / what / f"{place}-{job.uid}"


def state_folder(job: TaskJob) -> Path:
    """Return `local_folder` of state, with the job's files from other places of its root (copy_ownership.py)."""
    folder = local_folder(job, "state")
    if job.run_uid and (folder, job.run_uid) not in _SETTLED:
        _SETTLED.add((folder, job.run_uid))
        mine = HostedRoot(job.root(), job.uid, job.term, job.run_uid, folder)
        settle_in(mine, lambda url: open_watched_store(url, job.storage_options, _PATIENCE), SYSTEM_CLOCK, SYSTEM_IDS)
    return folder


def rows_folder(job: TaskJob, operator: str) -> Path:
    """Return the folder of this host for an operator's rows that wait, of all shards."""
    return state_folder(job) / operator / "rows"


@dataclass(frozen=True)
class RestoreNumbers:
    """The cost of bringing a shard's state back.

    Attributes:
        kind: "" if it was at hand; "local" a matching copy of an earlier run; "stale" older copies and later changes
            from the primary; "primary".
        bytes: read from the primary store.
        local_failed: a local copy that should have been usable was not.
    """

    kind: str = ""
    ms: float = 0.0
    bytes: int = 0
    local_failed: bool = False


@lru_cache(maxsize=16)
def _disk(folder: Path) -> LocalDisk:
    """Return the disk object of this worker process, so that a folder is not measured by every task."""
    return LocalDisk(folder, SYSTEM_CLOCK)


@lru_cache(maxsize=1024)
def _warn_left_behind(folder: Path, why: str) -> None:
    """Warn once in a worker process, not in each epoch; `local_failures` counts all cases."""
    _LOG.warning("outdated local files in %s could not be removed: %s; they take up space", folder, why)


class ShardAccess:
    """One task's access to its shard's state: a usable local copy, else the primary store.

    Args:
        committed: the local versions of all shards at the newest checkpoint, if they are known. This shard's version
            is kept during later epochs, because a restart begins there. While other shards have no version yet, they
            may still need files of an earlier parallelism.
        pending: whether changes of this shard are in the driver's memory only, so that the primary does not have its
            state.

    Attributes:
        shard: its number.
        numbers: of the restore, once the state is open.
        listing: of the files that a restore read, if there is one.
    """

    def __init__(
        self,
        job: TaskJob,
        operator: Operator,
        entry: OperatorEntry | None,
        shard: int,
        *,
        committed: ShardVersions = UNKNOWN_VERSIONS,
        pending: bool = False,
    ) -> None:
        self._job = job
        self._committed = committed
        self._pending = pending
        self.shard = shard
        self._entry = entry if entry is not None else operator.entry()
        self._operator = operator
        self.hash_range = hash_range_of_shard(shard, job.parallelism)
        self._folder = state_folder(job) / operator.uid
        self._stamp = Stamp(job.snapshot_id, job.epoch)
        self._local = self._store(job.settings.backend)
        self._now_ms = job.clock.batch_time_ms
        self._restored: Restored | None = None
        self._tidied = False
        self._is_left_behind = False
        self.numbers = RestoreNumbers()
        self.listing: ShardListing | None = None

    def _store(self, backend: str) -> ShardStore:
        folder = self._folder / f"{self._job.parallelism}-{self.shard}"
        schemas, exported = self._operator.state_schemas, self._job.settings.changelog == "off"
        return open_backend(backend, folder, schemas, SYSTEM_CLOCK, self._stamp, exported=exported)

    def export(self, version: str) -> VersionFiles:
        """Return the files of a local version. Raises LocalCopyUnusable."""
        return self._local.export(version)

    @cached_property
    def root(self) -> Store:
        return self._job.root()

    def open(self, version: str, *, verify: bool) -> StateReader:
        """Open the state before the epoch.

        Args:
            version: the local version that holds it, by the driver's knowledge.
            verify: an earlier run wrote it, so it must be checked; without `local_recovery` it is not used.

        Raises:
            ChangesPending: see `restore`; also the errors of a restore from the primary.
        """
        if version != NO_VERSION and (not verify or self._job.settings.local_recovery.enabled):
            started_s = SYSTEM_CLOCK.monotonic_s()
            try:
                opened = self._local.open(version, self._now_ms, verify=verify)
            except LocalCopyUnusable:
                return self.restore(version, local_failed=True)  # silent on purpose (invariant 5); counted
            if verify:
                self.numbers = RestoreNumbers("local", (SYSTEM_CLOCK.monotonic_s() - started_s) * 1000)
            self._objects().clean()
            return opened
        return self.restore(version)

    def tidied(self, attempt: str, before: str, base: StateReader) -> StateReader:
        """Return the same state after some of the due upkeep; a failure costs only longer look-ups.

        It is done before the rows are processed, because all work after them counts as the checkpoint's time: removing
        the inputs of a large merge alone takes longer than a whole checkpoint does otherwise.

        Args:
            before: id of the local version `base`.
        """
        if self._restored is not None:
            return base
        try:
            self._remove_outdated(before)
        except OSError as error:
            self._is_left_behind = True
            _warn_left_behind(self._folder, error.strerror or str(error))
        try:
            tidied = self._local.tidied(attempt, base, now_ms=self._now_ms, runs_max=self._job.settings.runs_max)
        except (OSError, pa.ArrowException, LocalCopyUnusable):
            return base
        self._tidied = tidied is not base
        return tidied

    @property
    def from_primary(self) -> bool:
        """Whether the state before the epoch was restored (or the shard has no state), so that its local version is not
        the driver's."""
        return self._restored is not None

    def restore(self, version: str, *, local_failed: bool = False, local: bool = True) -> StateReader:
        """Restore the state before the epoch, from other local copies and the primary store (restore/shard.py).

        Args:
            version: the local version that should have been usable, and is not.
            local_failed: whether it is known to be damaged or missing.
            local: whether any other copy may be used.

        Raises:
            ChangesPending: the driver holds changes of the shard; nothing was read.
            MissingFile, CorruptSegment: the primary is damaged. StoreUnavailable: try again.
        """
        job = self._job
        if self._pending:
            raise ChangesPending(
                f"operator {self._operator.uid!r}, shard {self.shard}: its changes since snapshot "
                f"{job.base_snapshot_id} are not on the primary store yet"
            )
        started_s = SYSTEM_CLOCK.monotonic_s()
        objects = self._objects()
        local = local and job.settings.local_recovery.enabled
        try:
            self._restored = self._restore(objects, version, local)
        except (CorruptData, UnsupportedFormat):
            # Perhaps only this host's copy of an object is damaged (invariant 5). If it is the primary, the next read
            # finds that.
            if not objects.discard():
                raise
            local_failed = True
            self._restored = self._restore(objects, version, local)
        failed = local_failed or self._restored.local_failed
        elapsed_ms = (SYSTEM_CLOCK.monotonic_s() - started_s) * 1000
        self.numbers = RestoreNumbers(self._restored.kind, elapsed_ms, objects.bytes_read, failed)
        return self._restored.reader

    def _restore(self, objects: HostObjects, version: str, local: bool) -> Restored:
        job, schemas = self._job, self._operator.state_schemas
        manifest = self._manifest(objects, job.base_snapshot_id)
        if job.shards is not None:
            # Nothing else of the manifest counts any more: the listing is all of the state.
            manifest = replace(manifest, shards=job.shards, segments=(), layers=())
        self.listing = read_listing(objects, manifest)
        described = any(o.uid == self._operator.uid for o in manifest.operators)
        unwritten = not job.pending and job.shards is None
        if unwritten and not (described and (manifest.segments or manifest.layers or manifest.shards)):
            # The operator is new: it has no state anywhere, and this is not a restore.
            empty = {name: schema.empty() for name, schema in schemas.items()}
            reader = OpenVersion.of_batches(version, empty, schemas, self._now_ms)
            return Restored(reader, "", "", False)
        return ShardRestore(
            store=self._local,
            folder=self._folder,
            backend=job.settings.backend,
            manifest=manifest,
            manifest_of=lambda snapshot_id: self._manifest(objects, snapshot_id),
            pending=job.pending,
            entry=self._entry,
            schemas=schemas,
            shard=self.shard,
            parallelism=job.parallelism,
            objects=objects,
            now_ms=self._now_ms,
            clock=SYSTEM_CLOCK,
            without={version},
            listing=self.listing,
            unproven=job.shards is not None,
            copies_max=job.settings.local_recovery.copies_max,
        ).run(SYSTEM_IDS.short(), local=local)

    def _objects(self) -> HostObjects:
        settings = self._job.settings
        folder = local_folder(self._job, "objects")
        return HostObjects(lambda: self.root, folder, settings.local_recovery.bytes_max, SYSTEM_CLOCK)

    def _manifest(self, objects: HostObjects, snapshot_id: int) -> Manifest:
        """Return a snapshot's manifest, which all shards of the host need."""
        path = manifest_path(snapshot_id)
        wanted = WantedObject(path, bytes_max=MANIFEST_BYTES_MAX, of=self._job.base_commit_id)
        return Manifest.decode(objects.read(wanted).to_pybytes(), path)

    def write(
        self,
        attempt: str,
        base: StateReader,
        changes: Mapping[str, Changed],
        before: str,
        restored: bool,
        due_taken: Mapping[str, int],
    ) -> tuple[str, bool]:
        """Write the local version after the epoch. A failure costs only a restore from the primary later.

        Returns:
            The version that is the state after the epoch now, and whether writing it, or removing outdated files,
            failed.
        """
        if self._restored is not None and self._restored.kind and not self._restored.version:
            return NO_VERSION, True  # the disk had no room for the restored state
        held = self._restored.version if self._restored is not None else before
        if not changes and not due_taken and not self._tidied:
            return held or before, self._is_left_behind
        own = self._folder / f"{self._job.parallelism}-{self.shard}"
        if not _disk(self._folder.parent).has_room(self._job.settings.local_recovery.bytes_max, own):
            return NO_VERSION, True
        try:
            if self._restored is not None and not held:
                base = self._local.write_restored(SYSTEM_IDS.short(), {}, self._now_ms)
            self._local.write(
                attempt, base, changes, now_ms=self._now_ms, due_taken=due_taken, runs_max=self._job.settings.runs_max
            )
        except (OSError, pa.ArrowException, LocalCopyUnusable):
            return NO_VERSION, True
        return attempt, self._is_left_behind

    def _remove_outdated(self, before: str) -> None:
        """Remove local files that neither this epoch nor a restart from the newest checkpoint begins with."""
        committed = self._committed[self.shard] if self._committed else NO_VERSION
        self._local.prune(before, committed, epoch=self._job.epoch)
        self._discard_others()
        remove_outdated(self._folder, self._job.parallelism, self._committed)

    def _discard_others(self) -> None:
        """Remove this shard's files of another backend, which stay outdated."""
        for backend in ("arrow", "rocksdb"):
            if backend != self._job.settings.backend:
                discard(backend, self._folder / f"{self._job.parallelism}-{self.shard}", SYSTEM_CLOCK)
