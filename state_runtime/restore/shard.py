"""Restoring one shard of one operator: finding local copies, finding what they lack, and combining them.

    look     at the versions of this operator on this host, of any parallelism
    prove    each by the manifest of the snapshot whose state it claims to be
    plan     per state and hash range: copy, copy and tail, or primary (restore/plan.py)
    write    a new local version: hard links to the copies' files, and on top rows of the primary (restore/sources.py)

The result never depends on local copies: a copy that fails is left out of the plan, and the primary is used.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, MissingSnapshot, StillstateError, StoreUnavailable, UnsupportedFormat
from state_runtime.changelog.versions import StateVersions
from state_runtime.restore.disk import shard_folders
from state_runtime.restore.objects import HostObjects, WantedObject
from state_runtime.restore.plan import LocalCopy, RangePlan, plan_restore, proves
from state_runtime.restore.sources import BaseRange, PrimaryStates
from state_runtime.restore.uploaded_files import Bottom, install_shard
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry
from state_runtime.snapshot.shard_files import ShardFiles, ShardListing
from state_runtime.state.backend import Adopted, LocalCopyUnusable, ShardStore
from state_runtime.state.backends import backend_folder, open_backend
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.reader import StateReader
from state_runtime.state.sealed_files import make_own_folder
from state_runtime.state.table import StateSchema, concat
from state_runtime.state.version import OpenVersion

__all__ = ["Restored", "ShardRestore"]


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        reader: the state before the epoch.
        kind: "primary"; "stale" if local copies gave a part of it, with the later changelog or the primary for the
            rest; "" if the shard has no state anywhere, which is no restore.
        version: the local version that holds it now; "" if it could not be written, and is in memory only.
        local_failed: a copy that should be usable was not, or the version could not be written.
    """

    reader: StateReader
    kind: str
    version: str
    local_failed: bool


@dataclass
class ShardRestore:
    """The restore of one shard; one use.

    Attributes:
        store: of the shard; the new version goes there.
        folder: of the operator, with a folder per shard in it.
        manifest: of the snapshot to restore; `pending` is newer.
        manifest_of: returns that of any older snapshot.
        without: local versions that are known to be unusable.
        listing: the files of shards that the manifest names, if it does.
        unproven: the listing is newer than the manifest, which then proves nothing.
        copies_max: maximum number of versions of one shard whose manifests are read.
    """

    store: ShardStore
    folder: Path
    backend: str
    manifest: Manifest
    manifest_of: Callable[[int], Manifest]
    pending: tuple[SegmentEntry, ...]
    entry: OperatorEntry
    schemas: Mapping[str, StateSchema]
    shard: int
    parallelism: int
    objects: HostObjects
    now_ms: int
    clock: Clock
    without: set[str] = field(default_factory=set)
    listing: ShardListing | None = None
    unproven: bool = False
    copies_max: int = 4
    _rows: int = 0
    _known: dict[int, Manifest | None] = field(default_factory=dict)

    def run(self, version: str, *, local: bool) -> Restored:
        """Restore into a new local version.

        Args:
            version: its id.
            local: whether local copies may be used.

        Raises:
            MissingFile, CorruptSegment, CorruptManifest: the primary is damaged, and no local copy has the lost rows.
            StoreUnavailable: try again.
        """
        proven = self._proven() if local else {}
        with self._downloaded(proven) as downloaded:
            return self._put_together(version, proven, downloaded)

    def _put_together(
        self, version: str, proven: Mapping[LocalCopy, Path], downloaded: Mapping[LocalCopy, Path]
    ) -> Restored:
        failed = False
        copies = {**proven, **downloaded}
        while True:
            plans = self._plan([*copies])
            self._rows = 0
            faults.reach("restore-begun")
            try:
                reader = self._write(version, plans, copies)
                faults.reach("restore-written")
            except LocalCopyUnusable:
                failed = bool(proven)
                used = {r.copy for ranges in plans.values() for r in ranges if r.copy is not None}
                # The next attempt finds out which copy failed. That is rare, and the primary can always be used.
                copies = {copy: folder for copy, folder in copies.items() if copy not in used}
                continue
            except StillstateError:
                raise  # errors of the primary; some of them are OSErrors too
            except (OSError, pa.ArrowException):
                reader = self._in_memory(version)
                return Restored(reader, "primary" if self._rows else "", "", True)
            stale = any(r.copy in proven for ranges in plans.values() for r in ranges)
            found = self._rows or any(r.copy in downloaded for ranges in plans.values() for r in ranges)
            return Restored(reader, "stale" if stale else "primary" if found else "", version, failed)

    # --- local copies --------------------------------------------------------------------------------------------

    def _proven(self) -> dict[LocalCopy, Path]:
        """Return the proven copies on this host that overlap the shard, with their folders."""
        low, high = hash_range_of_shard(self.shard, self.parallelism)
        found: dict[LocalCopy, Path] = {}
        for parallelism, shard, folder in shard_folders(self.folder):
            first, last = hash_range_of_shard(shard, parallelism)
            if first > high or last < low:
                continue
            place = backend_folder(self.backend, folder)
            stored = [v for v in self._store(folder).versions() if v.version not in self.without]
            for version in stored[: self.copies_max]:
                copy = LocalCopy(parallelism, shard, version.version, version.snapshot_id)
                if self._is_listed(parallelism, shard, version.version):
                    # The listing names it, so it is the state of the shard as of the listing, whenever it was written.
                    found[self._listed_copy(parallelism, shard, version.version)] = place
                    break
                manifest = self._manifest(version.snapshot_id)
                if manifest is not None and proves(manifest, self.entry.uid, copy, version.restored_from):
                    found[copy] = place
                    break  # older ones of the same shard have a longer tail
        return found

    def _is_listed(self, parallelism: int, shard: int, version: str) -> bool:
        if self.listing is None:
            return False
        listed = self.listing.by_shard.get((self.entry.uid, shard))
        return (
            listed is not None and (listed.parallelism, listed.version) == (parallelism, version) and self._fits(listed)
        )

    def _fits(self, listed: ShardFiles) -> bool:
        """Return whether listed files can become those of a local version: same backend, same columns."""
        columns = {state: schema.arrow for state, schema in self.schemas.items()}
        listing = self.listing
        return (
            listing is not None
            and listed.backend == self.backend
            and {state: listing.schema(listed, state).arrow for state in listed.columns} == columns
        )

    def _listed_copy(self, parallelism: int, shard: int, version: str) -> LocalCopy:
        shards = self.manifest.shards
        return LocalCopy(parallelism, shard, version, shards.snapshot_id if shards is not None else 0)

    @contextmanager
    def _downloaded(self, proven: Mapping[LocalCopy, Path]) -> Iterator[Mapping[LocalCopy, Path]]:
        """Download listed files of shards, for which no local copy is usable, as versions in a scratch folder. Their
        hard links outlive it.

        So files of the same backend are taken over unchanged, and the next upload has only the later changes.
        """
        missing = self._missing(proven)
        if self.listing is None or not missing:
            yield {}
            return
        found: dict[LocalCopy, Path] = {}
        scratch: Path | None = None
        try:
            try:
                make_own_folder(self.folder)
                scratch = Path(tempfile.mkdtemp(prefix=".files-", dir=self.folder))
                wanted = [WantedObject(f.path, f.bytes, f.digest) for s in missing for f in s.files if f.path]
                self.objects.prefetch(wanted, self.shard)
                for listed in missing:
                    folder = scratch / f"{listed.parallelism}-{listed.shard}"
                    install_shard(self.objects, listed, self._store(folder), backend_folder(self.backend, folder))
                    copy = self._listed_copy(listed.parallelism, listed.shard, listed.version)
                    found[copy] = backend_folder(self.backend, folder)
            except StillstateError:
                raise  # errors of the primary; some of them are OSErrors too
            except (OSError, LocalCopyUnusable):
                pass  # disk full, read-only: silent on purpose (invariant 5), missing files are read instead
            yield found
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)

    def _missing(self, proven: Mapping[LocalCopy, Path]) -> list[ShardFiles]:
        """Return the listed shards that no local copy replaces, and whose files can be taken over."""
        if self.listing is None:
            return []
        holes = [(r.low, r.high) for ranges in self._plan([*proven]).values() for r in ranges if r.copy is None]
        found = {}
        for low, high in holes:
            for listed in self.listing.of_operator(self.entry.uid, low, high):
                if self._fits(listed):
                    found[listed.shard] = listed
        if found and not self.store.adopts_several:
            if proven and len(holes) < len(self.schemas):
                return []  # one version is used already, and this backend cannot take over a second one
            low, high = hash_range_of_shard(self.shard, self.parallelism)
            best = max(found.values(), key=lambda s: min(high, s.hash_range[1]) - max(low, s.hash_range[0]))
            return [best]
        return [found[shard] for shard in sorted(found)]

    def _store(self, folder: Path) -> ShardStore:
        return open_backend(self.backend, folder, self.schemas, self.clock)

    def _manifest(self, snapshot_id: int) -> Manifest | None:
        """Return the manifest of a snapshot; None if it cannot be read: then it proves nothing."""
        if snapshot_id == self.manifest.snapshot_id:
            return self.manifest
        if not 0 < snapshot_id < self.manifest.snapshot_id:
            return None
        if snapshot_id not in self._known:
            try:
                manifest = self.manifest_of(snapshot_id)
                self._known[snapshot_id] = manifest if manifest.job_uid == self.manifest.job_uid else None
            except (MissingSnapshot, CorruptData, UnsupportedFormat, StoreUnavailable, FileNotFoundError):
                self._known[snapshot_id] = None  # probably removed by garbage collection; the primary is used
        return self._known[snapshot_id]

    # --- putting it together -------------------------------------------------------------------------------------

    def _plan(self, copies: list[LocalCopy]) -> Mapping[str, tuple[RangePlan, ...]]:
        low, high = hash_range_of_shard(self.shard, self.parallelism)
        return plan_restore(
            self.manifest, self.entry, [*self.schemas], low, high, copies, alike=not self.store.adopts_several
        )

    def _primary(self, plans: Mapping[str, tuple[RangePlan, ...]], scratch: Path | None) -> PrimaryStates:
        versions = {
            s.name: StateVersions(self.entry, s, self.schemas[s.name])
            for s in self.entry.states
            if s.name in self.schemas
        }
        hash_range = hash_range_of_shard(self.shard, self.parallelism)
        bottom = None
        if self.listing is not None:
            bottom = Bottom(self.objects, self.listing, self.entry, scratch)
        primary = PrimaryStates(
            objects=self.objects,
            manifest=self.manifest,
            pending=self.pending,
            entry=self.entry,
            versions=versions,
            hash_range=hash_range,
            scratch=scratch,
            bottom=bottom,
        )
        since = min((r.since for ranges in plans.values() for r in ranges), default=-1)
        self.objects.prefetch_together(primary.together(since), self.shard)
        self.objects.prefetch(primary.wanted(since), self.shard)
        self.objects.prefetch(primary.direct(since), self.shard)
        return primary

    def _write(
        self, version: str, plans: Mapping[str, tuple[RangePlan, ...]], copies: Mapping[LocalCopy, Path]
    ) -> StateReader:
        primary = self._primary(plans, self.folder)
        adopted: dict[LocalCopy, dict[str, list[tuple[int, int]]]] = {}
        for state, ranges in plans.items():
            for part in ranges:
                if part.copy is not None:
                    adopted.setdefault(part.copy, {}).setdefault(state, []).append((part.low, part.high))
        taken_over = [
            Adopted(copies[copy], copy.version, {s: tuple(r) for s, r in ranges.items()})
            for copy, ranges in adopted.items()
        ]
        snapshot_id = self.manifest.snapshot_id
        # No manifest names the pending changes, so no manifest proves the version.
        restored_from = "" if self.pending or self.unproven else self.manifest.commit_id
        below: dict[str, list[BaseRange]] = {}
        if self.store.lays_below:
            # The base becomes a separate run, below the later changes.
            below = {
                state: [r for part in ranges if part.copy is None for r in primary.base(state, part.low, part.high)]
                for state, ranges in plans.items()
            }
        return self.store.write_restored(
            version,
            {state: self._stream(primary, state, ranges, below.get(state, ())) for state, ranges in plans.items()},
            self.now_ms,
            below={
                state: [(r.low, self._counted(r.batches)) for r in ranges] for state, ranges in below.items() if ranges
            },
            adopted=taken_over,
            snapshot_id=snapshot_id,
            restored_from=restored_from,
        )

    def _stream(
        self, primary: PrimaryStates, state: str, ranges: tuple[RangePlan, ...], below: Sequence[BaseRange] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows on top of local copies and of an unchanged base; in other ranges all of the state."""
        for part in ranges:
            at = part.low
            for base in below if part.copy is None else ():
                if not part.low <= base.low <= part.high:
                    continue
                if at < base.low:
                    yield from self._counted(primary.read(state, at, base.low - 1, -1))
                yield from self._counted(primary.read(state, base.low, base.high, base.newest))
                at = base.high + 1
            if at <= part.high:
                yield from self._counted(primary.read(state, at, part.high, part.since))

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._rows += batch.num_rows
            yield batch

    def _in_memory(self, version: str) -> OpenVersion:
        """Restore the state without a local disk, all of it in memory: the last resort."""
        plans = self._plan([])
        primary = self._primary(plans, None)
        states = {
            state: concat([b for b in self._stream(primary, state, plans[state]) if b.num_rows], schema.arrow)
            for state, schema in self.schemas.items()
        }
        return OpenVersion.of_batches(version, states, self.schemas, self.now_ms)
