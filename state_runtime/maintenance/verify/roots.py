"""Verification: is everything there that snapshots need, and is it what was written? Reading only, not even a pin is
placed.

    structure   every manifest decodes, its changelog has no gap that can be known of, and every object that it needs is
                there with its size
    sample      besides, a share of the objects is read and compared with its digest; which ones a seed says
    full        besides, every object is read, compared and decoded: parts, tables with their page checksums, files of
                shards; rows are counted, and compared where their number is recorded

What cannot be reached is not damaged: a fault of the store or the network is told as such, and what was read and is
wrong is read once more before it is called damaged. A snapshot that is given up while it is verified is passed over.

In memory: the manifest and the references of one snapshot; of every object in the listed folders 16 bytes, and about 70
of each that was looked at.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptManifest, MissingSnapshot, StillstateError
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MANIFEST_BYTES_MAX
from state_runtime.base.settings import VerifyLevel
from state_runtime.changelog.inflight import InflightPass
from state_runtime.changelog.reader import read_passes
from state_runtime.maintenance.copy.objects import NeededObject, outputs_below_root
from state_runtime.maintenance.verify.content import Looked, Subject, decode_shard, look_at
from state_runtime.maintenance.verify.inflight import check_parts, with_epochs
from state_runtime.maintenance.verify.report import (
    Finding,
    VerifyProgress,
    VerifyReport,
    broken_chain,
    kind_of_error,
)
from state_runtime.reading.references import StoredRef, references
from state_runtime.restore.uploaded_files import direct, read_listing
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import SNAPSHOTS_DIR, manifest_path, snapshot_id_of
from state_runtime.snapshot.shard_files import ShardFiles, ShardListing
from state_runtime.store import Store

__all__ = ["is_in_sample", "verify_root"]

_DATA_FOLDERS = ("changelog", "files", "tables")
_FINDINGS_MAX = 10_000
# So many objects in a row that cannot be reached: the store is away, and asking for a million more helps nobody.
_UNREACHABLE_MAX = 32
_QUEUED_PER_THREAD = 4


def verify_root(
    root: Store,
    *,
    snapshot_ids: Collection[int] | None = None,
    level: VerifyLevel,
    share: float = 0.1,
    seed: str = "",
    already: Callable[[str], bool] = lambda _: False,
    on_good: Callable[[str], None] | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    threads: int = 8,
    clock: Clock,
    ids: Ids,
) -> VerifyReport:
    """Verify snapshots of a job root, or of a folder that is laid out like one. Nothing is written.

    Args:
        snapshot_ids: None is all of them.
        share, seed: of "sample".
        already: objects whose content an earlier verification has found good, by path; only their size is looked at.
        on_good: told the path of each object that was read and is good; in the caller's thread, like `progress`.

    Raises:
        MissingSnapshot: one of `snapshot_ids` is not there.
        CorruptManifest, UnsupportedFormat: the boundary cannot be read, so nobody knows which snapshots there are.
        StoreUnavailable: not even listings can be had.
    """
    sampled = {"structure": 0.0, "sample": share, "full": 1.0}[level]
    started_s = clock.monotonic_s()
    asked = snapshot_ids is not None
    wanted, lost = _existing(root) if snapshot_ids is None else (sorted(snapshot_ids), [])
    # After the manifests were listed: what they need was there by then. Of one snapshot each object is asked for.
    sizes = _Sizes(root, _DATA_FOLDERS if len(wanted) > 1 else ())

    def is_read(path: str) -> bool:
        return is_in_sample(path, sampled, seed) and not already(path)

    with _Looking(
        root=root,
        sizes=sizes,
        is_read=is_read,
        decode=level == "full",
        on_good=on_good,
        progress=progress,
        threads=threads,
        ids=ids,
        of_snapshots=len(wanted),
    ) as looking:
        for snapshot_id in wanted:
            looking.snapshot(snapshot_id, asked=asked)
            if looking.is_away:
                break
        if not asked:
            looking.newest_outputs()
            looking.lost(lost)
        return VerifyReport(
            url=root.url,
            level=level,
            snapshots=tuple(looking.snapshots),
            objects=looking.objects,
            bytes=looking.bytes,
            objects_read=looking.objects_read,
            bytes_read=looking.bytes_read,
            rows=looking.rows,
            findings=tuple(looking.findings),
            findings_left_out=looking.left_out,
            complete=not looking.is_away,
            seconds=clock.monotonic_s() - started_s,
        )


def is_in_sample(path: str, share: float, seed: str) -> bool:
    """Whether an object is among the share that a seed picks; another seed picks others."""
    return _number(f"{seed}\0{path}") < share * 2.0**64


class _Looking:
    """One verification under way; a context manager, used from one thread.

    Attributes:
        is_away: the store does not answer any more.
    """

    def __init__(
        self,
        root: Store,
        sizes: _Sizes,
        is_read: Callable[[str], bool],
        decode: bool,
        on_good: Callable[[str], None] | None,
        progress: Callable[[VerifyProgress], None] | None,
        threads: int,
        ids: Ids,
        of_snapshots: int,
    ) -> None:
        self._root, self._sizes, self._is_read, self._decode = root, sizes, is_read, decode
        self._on_good, self._progress, self._ids = on_good, progress, ids
        self._of_snapshots = of_snapshots
        self._queued_max = threads * _QUEUED_PER_THREAD
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="verify")
        self._scratch = tempfile.TemporaryDirectory(prefix="stillstate-verify-")
        self._running: set[Future[Looked]] = set()
        self._seen: set[int] = set()
        self._decoded: set[tuple[str, int, str]] = set()
        self._bad: dict[str, list[int]] = {}
        self._unreachable_in_a_row = 0
        self._previous: Manifest | None = None
        self._passes: tuple[InflightPass, ...] = ()
        self._rows_known: set[str] = set()
        self._objects_done = self._bytes_done = 0
        self.snapshots: list[int] = []
        self.findings: list[Finding] = []
        self.left_out = 0
        self.is_away = False
        self.objects = self.bytes = self.objects_read = self.bytes_read = self.rows = 0

    def __enter__(self) -> _Looking:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._scratch.cleanup()

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, snapshot_id: int, *, asked: bool) -> None:
        """A manifest, and everything that it needs and no earlier one did.

        Raises:
            MissingSnapshot: it was asked for by its id, and is not there.
        """
        try:
            manifest = _read_manifest(self._root, snapshot_id)
        except MissingSnapshot:
            if asked:
                raise
            return  # its writer died or is about to finish, or it was given up since the listing
        except StillstateError as error:
            self._add(
                Finding(
                    kind=kind_of_error(error),
                    path=manifest_path(snapshot_id),
                    detail=str(error),
                    snapshot_ids=(snapshot_id,),
                )
            )
            return
        self._passes = self._listed(manifest)
        for broken in broken_chain(self._previous, manifest):
            self._add(
                Finding(kind="damaged", path=manifest_path(snapshot_id), detail=broken, snapshot_ids=(snapshot_id,))
            )
        for subject in self._subjects(manifest):
            self._submit(subject)
            if self.is_away:
                return
        self._drain()
        if self._passes and not self.is_away:
            self._check_rows_in_flight(manifest)
        if self._decode and manifest.shards is not None and not self.is_away:
            self._decode_shards(manifest)
        self._previous = manifest
        self.snapshots.append(snapshot_id)
        self._show()

    def newest_outputs(self) -> None:
        """Output below the root that the next run delivers again must be there, as long as no newer snapshot settled
        it."""
        newest = self._previous
        for need in outputs_below_root(newest) if newest is not None and not self.is_away else ():
            ref = StoredRef(kind="output", path=need.path, bytes=need.bytes, digest="")
            subject = Subject(
                need=need,
                refs=(ref,),
                snapshot_id=newest.snapshot_id if newest is not None else 0,
                job_uids=frozenset(),
            )
            looked = look_at(self._root, subject, self._new_scratch(), listed=None, read=False, decode=False)
            if (
                looked.findings
                and newest is not None
                and max(_existing(self._root)[0], default=0) == newest.snapshot_id
            ):
                for finding in looked.findings:
                    self._add(replace(finding, detail=f"{finding.detail}; the next run delivers it again"))

    def lost(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Snapshots that must be there and are not, as closed ranges of ids."""
        for low, high in ranges:
            # It may have been given up between the listing and the boundary, and a listing may be cut short.
            if not self._is_given_up(low):
                if self._root.exists(manifest_path(low)):
                    self._add(
                        Finding(
                            kind="unreachable",
                            path=manifest_path(low),
                            detail="the listing lacks it, and it exists",
                            snapshot_ids=(low,),
                        )
                    )
                    continue
                many = "it is not there" if low == high else f"all snapshots from {low} to {high} are not there"
                self._add(
                    Finding(
                        kind="missing",
                        path=manifest_path(low),
                        detail=f"{many}, and it has not expired",
                        snapshot_ids=(low,),
                    )
                )

    def _subjects(self, manifest: Manifest) -> Iterator[Subject]:
        """The objects of a snapshot, piece by piece, so that a piece that cannot be read hides no other."""
        nothing = replace(manifest, segments=(), layers=(), shards=None, open_batch=None)
        tables = {table.path: table for layer in manifest.layers for table in layer.tables}
        for segment in manifest.stored_segments:
            # The objects that its index names were looked at with it.
            if self._is_new(segment.path, manifest.snapshot_id):
                found = self._references(replace(nothing, segments=(segment,)), segment.path)
                for subject in _grouped(found, manifest):
                    is_segment = subject.need.path == segment.path
                    yield replace(subject, segment=segment) if is_segment else replace(subject, within=segment.path)
        for piece, where in (
            (replace(nothing, layers=manifest.layers), ""),
            (replace(nothing, shards=manifest.shards), manifest.shards.path if manifest.shards is not None else ""),
        ):
            for subject in _grouped(self._references(piece, where), manifest):
                if self._is_new(subject.need.path, manifest.snapshot_id):
                    yield replace(subject, table=tables.get(subject.need.path))

    def _references(self, piece: Manifest, where: str) -> list[StoredRef]:
        found: list[StoredRef] = []
        for attempt in range(2):
            found.clear()
            try:
                found.extend(ref for ref in references(self._root, piece) if ref.kind != "manifest")
                return found
            except StillstateError as error:
                # Twice, like everything: an answer that was cut on its way is no damage.
                if attempt and not self._is_given_up(piece.snapshot_id):
                    finding = Finding(
                        kind=kind_of_error(error), path=where, detail=str(error), snapshot_ids=(piece.snapshot_id,)
                    )
                    self._add(with_epochs(finding, self._passes))
        return found

    def _is_new(self, path: str, snapshot_id: int) -> bool:
        """Whether nobody has looked at an object yet; what was found about it before is about this snapshot too."""
        for number in self._bad.get(path, ()):
            found = self.findings[number]
            if snapshot_id not in found.snapshot_ids:
                self.findings[number] = replace(found, snapshot_ids=(*found.snapshot_ids, snapshot_id))
        return _number(path) not in self._seen

    def _is_given_up(self, snapshot_id: int) -> bool:
        return not read_boundary(self._root).keeps(snapshot_id)

    # --- objects -----------------------------------------------------------------------------------------------------

    def _submit(self, subject: Subject) -> None:
        path = subject.need.path
        self._seen.add(_number(path))
        self.objects += 1
        self.bytes += subject.need.bytes_known
        self._start(
            partial(
                look_at,
                self._root,
                subject,
                self._new_scratch(),
                listed=self._sizes.of(path),
                read=self._is_read(path),
                decode=self._decode,
            )
        )

    def _start(self, call: Callable[[], Looked]) -> None:
        self._running.add(self._pool.submit(call))
        if len(self._running) >= self._queued_max:
            self._take()

    def _drain(self) -> None:
        while self._running and not self.is_away:
            self._take()

    def _take(self) -> None:
        done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            self._note(future.result())
        self._show()

    def _note(self, looked: Looked) -> None:
        subject = looked.subject
        path = subject.need.path
        self._objects_done += bool(path)
        self._bytes_done += subject.need.bytes_known
        self.rows += looked.rows
        kinds = {finding.kind for finding in looked.findings}
        self._unreachable_in_a_row = self._unreachable_in_a_row + 1 if "unreachable" in kinds else 0
        self.is_away = self.is_away or self._unreachable_in_a_row >= _UNREACHABLE_MAX
        if kinds and self._is_given_up(subject.snapshot_id):
            # Another snapshot may need it, and is asked about it then.
            self._seen -= {_number(path), _number(subject.within)}
            return
        for finding in looked.findings:
            self._add(with_epochs(finding, self._passes), path, subject.within)
        if looked.was_read:
            self.objects_read += 1
            self.bytes_read += looked.size
            if not kinds and self._on_good is not None:
                self._on_good(path)

    def _add(self, finding: Finding, *about: str) -> None:
        """Keep a finding once; `about` are the paths that bring it up again with later snapshots."""
        key = replace(finding, detail="", snapshot_ids=())
        if any(replace(self.findings[n], detail="", snapshot_ids=()) == key for n in self._bad.get(finding.path, ())):
            return
        if len(self.findings) >= _FINDINGS_MAX:
            self.left_out += 1
            return
        self.findings.append(finding)
        for path in {finding.path, *about} - {""}:
            self._bad.setdefault(path, []).append(len(self.findings) - 1)

    # --- rows in flight ----------------------------------------------------------------------------------------------

    def _listed(self, manifest: Manifest) -> tuple[InflightPass, ...]:
        """The rows in flight of a snapshot; none where what lists them cannot be read, which is told then."""
        batch = manifest.open_batch
        for attempt in range(2):
            try:
                return read_passes(self._root, manifest)
            except StillstateError as error:
                # Twice, like everything: an answer that was cut on its way is no damage.
                if attempt and batch is not None and not self._is_given_up(manifest.snapshot_id):
                    whose = ", ".join(f"{o.uid} (since epoch {o.epoch})" for o in batch.operators)
                    ref = StoredRef(kind="segment", path=batch.listing, bytes=-1, digest="")
                    why = f"{error}; it lists the rows in flight of {whose}"
                    self._add(Finding.of(kind_of_error(error), ref, why, manifest.snapshot_id))
        return ()

    def _check_rows_in_flight(self, manifest: Manifest) -> None:
        """The parts are looked at with the segments that hold them; here, whether they are those that are listed."""
        for finding in check_parts(self._root, manifest, self._passes, decode=self._decode, known=self._rows_known):
            if not self._is_given_up(manifest.snapshot_id):
                self._add(finding)

    # --- files of shards ---------------------------------------------------------------------------------------------

    def _decode_shards(self, manifest: Manifest) -> None:
        try:
            listing = read_listing(direct(self._root), manifest)
        except StillstateError:
            return  # told by `_references` already
        for shard in listing.shards if listing is not None else ():
            version = (shard.operator, shard.shard, shard.version)
            # Without its library a database is compared by its digests only.
            can = shard.backend == "arrow" or importlib.util.find_spec("rocksdict") is not None
            if listing is not None and can and version not in self._decoded:
                self._decoded.add(version)
                self._start(partial(_look_at_shard, self._root, manifest, listing, shard))
        self._drain()

    # --- showing -----------------------------------------------------------------------------------------------------

    def _new_scratch(self) -> Path:
        return Path(self._scratch.name) / self._ids.short()

    def _show(self) -> None:
        if self._progress is not None:
            done, of = len(self.snapshots), self._of_snapshots
            self._progress(
                VerifyProgress(
                    snapshots_done=done,
                    snapshots=of,
                    objects_done=self._objects_done,
                    objects=self.objects,
                    bytes_done=self._bytes_done,
                    bytes=self.bytes,
                )
            )


class _Sizes:
    """The sizes of all objects in some folders, as a listing has them: 16 bytes each, however long their names are."""

    def __init__(self, root: Store, folders: Collection[str]) -> None:
        keys, sizes = array("Q"), array("q")
        for folder in folders:
            for found in root.list_objects(folder):
                keys.append(_number(found.path))
                sizes.append(found.bytes)
        order = np.argsort(np.frombuffer(keys, np.uint64)) if keys else np.zeros(0, np.int64)
        self._keys = np.frombuffer(keys, np.uint64)[order] if keys else np.zeros(0, np.uint64)
        self._sizes = np.frombuffer(sizes, np.int64)[order] if keys else np.zeros(0, np.int64)

    def of(self, path: str) -> int | None:
        """None if it was not listed: it may be there all the same."""
        key = np.uint64(_number(path))
        at = int(np.searchsorted(self._keys, key))
        return int(self._sizes[at]) if at < len(self._keys) and self._keys[at] == key else None


def _look_at_shard(root: Store, manifest: Manifest, listing: ShardListing, shard: ShardFiles) -> Looked:
    low, high = shard.hash_range
    path = manifest.shards.path if manifest.shards is not None else ""
    ref = StoredRef(
        kind="listing", path=path, bytes=-1, digest="", operator=shard.operator, state="", hash_low=low, hash_high=high
    )
    subject = Subject(
        need=NeededObject(path="", bytes=-1, digest=""),
        refs=(ref,),
        snapshot_id=manifest.snapshot_id,
        job_uids=manifest.job_uids,
    )
    try:
        return Looked(subject, rows=decode_shard(root, listing, shard))
    except StillstateError as error:
        return Looked(subject, findings=(Finding.of(kind_of_error(error), ref, str(error), manifest.snapshot_id),))


def _grouped(refs: list[StoredRef], manifest: Manifest) -> Iterator[Subject]:
    """One subject per object."""
    by_path: dict[str, list[StoredRef]] = {}
    for ref in refs:
        by_path.setdefault(ref.path, []).append(ref)
    for path, same in by_path.items():
        parts = tuple((p.offset, p.length, p.digest) for p in (ref.part for ref in same) if p is not None)
        need = NeededObject(
            path=path,
            bytes=same[0].bytes,
            digest=same[0].digest,
            bytes_min=max(ref.bytes_min for ref in same),
            parts=parts,
        )
        yield Subject(need=need, refs=tuple(same), snapshot_id=manifest.snapshot_id, job_uids=manifest.job_uids)


def _existing(root: Store) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of the snapshots that are there, and ranges of those that should be: ids count up by one, and only a boundary
    takes one away."""
    listed = [snapshot_id_of(name) for name in root.list_names(SNAPSHOTS_DIR)]
    boundary = read_boundary(root)
    found = sorted(i for i in listed if i is not None and boundary.keeps(i))
    lost = [(i, i) for i in boundary.kept if i not in found]
    live = [i for i in found if i > boundary.snapshot_id]
    lost += [(low + 1, high - 1) for low, high in pairwise(live) if high > low + 1]
    return found, lost


def _read_manifest(root: Store, snapshot_id: int) -> Manifest:
    path = manifest_path(snapshot_id)
    try:
        data = root.read(path, MANIFEST_BYTES_MAX)
    except FileNotFoundError as error:
        raise MissingSnapshot(f"there is no snapshot {snapshot_id} in {root.url}") from error
    manifest = Manifest.decode(data, f"{root.url}/{path}")
    if manifest.snapshot_id != snapshot_id:
        raise CorruptManifest(f"{root.url}/{path} says that it is snapshot {manifest.snapshot_id}")
    return manifest


def _number(text: str) -> int:
    """64 bits that stand for a path."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
