"""Which objects below a job root are needed, and by what. Deletion, retention and garbage collection all ask here.

The order of reads makes this safe (docs/design/0017-deletion.md):

1. The list of snapshots, and the boundary. A running job's later commits continue from the newest of these snapshots,
   so they name no older object that was unnamed before.
2. Pins and materializations, after the boundary. A pin counts only if it was placed before its snapshot was announced,
   so a reader that sees the announcement also sees the pin.
3. The manifests of all snapshots that are kept, announced as expired (`going`), or pinned.

A listing or file that cannot be read ends the work with an error: an object with unknown use is not garbage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptData,
    CorruptManifest,
    JobNotFound,
    MissingSnapshot,
    SnapshotExpired,
    StoreUnavailable,
    Unavailable,
    UnsupportedFormat,
)
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX
from state_runtime.materialize.records import Protected, Record, protected
from state_runtime.reading.references import Memo, references, sink_references
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary, read_boundary
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.lineage import check_belongs
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import OUTPUTS_DIR, SNAPSHOTS_DIR, manifest_path, snapshot_id_of
from state_runtime.snapshot.pins import SnapshotPin, read_pins
from state_runtime.store import Store

__all__ = [
    "CLOCK_SKEW_MS",
    "Existing",
    "Holders",
    "Marker",
    "Marks",
    "mark",
    "read_existing",
    "read_holders",
    "size_fits",
    "unless_deleted",
]

CLOCK_SKEW_MS = 3_600_000
"""The largest difference between the clocks of two machines: nothing expires earlier than this after its time."""
_GAP_MAX = 1_000


@dataclass(frozen=True)
class Existing:
    """The snapshots of a root.

    Attributes:
        snapshot_ids: ascending, by the boundary; the last one may not be complete yet.
        given_up: expired snapshots of which some objects are still stored.
    """

    boundary: ExpiryBoundary
    snapshot_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()


def read_existing(root: Store, *, without: Collection[int] = ()) -> Existing:
    """List all snapshots without trusting the listing alone. Ids are assigned one after another, so a truncated listing
    has gaps.

    Args:
        without: snapshots that may be damaged; their absence is accepted.

    Raises:
        StoreUnavailable: the listing lacks a snapshot that exists. CorruptManifest: a snapshot that the boundary keeps
            does not exist.
    """
    listed = {i for i in map(snapshot_id_of, root.list_names(SNAPSHOTS_DIR)) if i is not None}
    boundary = read_boundary(root)
    found = {i for i in listed if boundary.keeps(i)}
    for snapshot_id in _gaps(found, boundary, root):
        if root.exists(manifest_path(snapshot_id)):
            raise StoreUnavailable(
                f"the listing of snapshots in {root.url} lacks snapshot {snapshot_id}, which exists: it is cut short "
                "or stale. Nothing was deleted; try again"
            )
        if snapshot_id in without:
            continue
        if snapshot_id in boundary.kept and read_boundary(root).keeps(snapshot_id):
            raise CorruptManifest(
                f"snapshot {snapshot_id} in {root.url} has not expired, and it has no manifest. Nothing was "
                "deleted; restore "
                f"{manifest_path(snapshot_id)} from a copy, or delete the snapshot with `stillstate delete --damaged`"
            )
    # After the newest id, a truncated listing looks like an older one, and a running job commits meanwhile. If the
    # listing is older than the boundary, all its snapshots may have expired by now, and newer ones may still exist.
    first = following = max(found, default=boundary.snapshot_id) + 1
    while (found or boundary.snapshot_id) and boundary.keeps(following) and root.exists(manifest_path(following)):
        found.add(following)
        following += 1
        if following - first > _GAP_MAX:
            raise StoreUnavailable(f"the listing of snapshots in {root.url} ends long before they do; try again")
    return Existing(boundary, tuple(sorted(found)), tuple(sorted(i for i in listed if boundary.is_gone(i))))


def _gaps(found: Collection[int], boundary: ExpiryBoundary, root: Store) -> list[int]:
    """Return the ids that should exist but were not listed: those that the boundary keeps, or between two listed ids. A
    root that received snapshots one by one as copies has gaps."""
    above = sorted(i for i in found if i > boundary.snapshot_id)
    first = boundary.snapshot_id + 1 if boundary.sequence else above[0] if above else 0
    between = (i for i in range(first, above[-1] if above else first) if i not in found)
    gaps = [*(i for i in boundary.kept if i not in found), *islice(between, _GAP_MAX + 1)]
    if not boundary.sequence and first > 1:
        gaps.append(first - 1)  # no snapshot has expired yet, so none should exist below the first
    if len(gaps) > _GAP_MAX:
        raise StoreUnavailable(
            f"the listing of snapshots in {root.url} lacks more than {_GAP_MAX:,} of them; nothing was deleted, try "
            "again"
        )
    return gaps


Holders = Mapping[int, tuple[str, ...]]
"""By snapshot id: the names of the holders that need the snapshot, for people."""


def read_holders(root: Store, clock: Clock, records: dict[int, Record] | None = None) -> tuple[Holders, Protected]:
    """Read the pins that count, and the needs of materializations. Call this after the boundary was read.

    Args:
        records: see `protected`.

    Raises:
        CorruptManifest, UnsupportedFormat, StoreUnavailable: a pin or record cannot be read; nothing may be deleted.
    """
    now_ms = clock.now_ms() - CLOCK_SKEW_MS
    held: dict[int, list[str]] = {}
    for pin in read_pins(root):
        if not pin.is_void(now_ms):
            held.setdefault(pin.snapshot_id, []).append(_said(pin))
    needed = protected(root, now_ms, records)
    for snapshot_id in needed.snapshots:
        held.setdefault(snapshot_id, []).append("a materialization that reads it")
    return {i: tuple(names) for i, names in held.items()}, needed


def _said(pin: SnapshotPin) -> str:
    note = f" ({pin.note})" if pin.note else ""
    return (
        f"a pin of {pin.holder}{note}"
        if pin.reason == "user"
        else f"{pin.holder}, which holds a {pin.reason} pin{note}"
    )


@dataclass
class Marks:
    """The objects that are needed.

    Attributes:
        needed: size by path; if the exact size is not recorded, the negative of the minimum size.
        optional: objects that are kept if they exist: output that is staged below the root, and objects of a pinned
            snapshot that has expired.
        snapshot_ids: the snapshots that need these objects.
        boundary_sequence: sequence of the newest boundary that left a snapshot out. In an older backup of the root that
            snapshot still exists, so a deletion by these marks must prove that the boundary is there.
    """

    needed: dict[str, int] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    snapshot_ids: list[int] = field(default_factory=list)
    protected: Protected = field(default_factory=Protected)
    boundary_sequence: int = 0

    def keeps(self, path: str) -> bool:
        """Whether something needs the object at this path."""
        return path in self.needed or path in self.optional or self.protected.keeps(path)


def size_fits(wanted: int, found: int) -> bool:
    """Whether an object of size `found` may be the one with size `wanted` in `Marks.needed`."""
    return found == wanted if wanted >= 0 else found >= -wanted


class Marker:
    """Knows the objects that snapshots need. Manifests are immutable, so each manifest that was read is remembered for
    later calls.

    Attributes:
        memo, records: contents of segments and of materializations that were read.

    Args:
        is_proven: the caller proves, after each answer and before it acts on the answer, that the root is still its own
            (snapshot/ownership.py). Then an id means the same snapshot for ever, and its manifest is read once. Without
            the proof the caller may have slept, and the id may mean another snapshot now: each call reads the manifest.
    """

    def __init__(self, root: Store, clock: Clock, *, is_proven: bool = False) -> None:
        self._is_proven = is_proven
        self._root = root
        self._catalog = Catalog.of_root(root, clock)
        self.memo: Memo = {}
        self.records: dict[int, Record] = {}
        self._known: dict[int, tuple[str, Mapping[str, int], frozenset[str]]] = {}
        self._info: JobInfo | None = None

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def add(self, manifest: Manifest) -> tuple[Mapping[str, int], frozenset[str]]:
        """Return the objects that a snapshot needs: sizes by path, without its manifest; and paths of staged output.

        Raises:
            MissingFile, CorruptSegment, CorruptManifest, UnsupportedFormat, StoreUnavailable: see `references`.
        """
        known = self._known.get(manifest.snapshot_id)
        if known is not None and known[0] == manifest.commit_id:
            return known[1], known[2]
        self._check_belongs(manifest)
        needed: dict[str, int] = {}
        for ref in references(self._root, manifest, self.memo):
            if ref.kind != "manifest":
                needed[ref.path] = ref.bytes if ref.bytes >= 0 else min(needed.get(ref.path, 0), -ref.bytes_min)
        staged = frozenset(p for p in sink_references(manifest) if p.startswith(f"{OUTPUTS_DIR}/"))
        self._known[manifest.snapshot_id] = (manifest.commit_id, needed, staged)
        return needed, staged

    def _check_belongs(self, manifest: Manifest) -> None:
        """
        Raises:
            JobRootMismatch: the manifest is of another job; it says nothing about the needs of this one.
        """
        if self._info is None:
            self._info = read_job_info(self._root)
        if self._info is not None:
            check_belongs(manifest, self._info, self._root.url, own=False)

    def of(self, snapshot_id: int) -> tuple[Mapping[str, int], frozenset[str]]:
        """Do the same for a snapshot id.

        Raises:
            MissingSnapshot, SnapshotExpired: the snapshot does not exist. And what `add` raises.
        """
        known = self._known.get(snapshot_id)
        if known is not None and self._is_proven:
            return known[1], known[2]
        # The remembered needs are valid for a commit id, and not for a snapshot id.
        return self.add(self._catalog.manifest(snapshot_id))

    def rest_of(self, snapshot_id: int) -> Mapping[str, int]:
        """Return the objects that an expired snapshot needed, as far as they can be found: some may be removed already.

        Output that was staged for the snapshot is not included: the sink removes it.
        """
        known = self.recall(snapshot_id)
        if known is not None:
            return known
        try:
            manifest = self._catalog.manifest(snapshot_id)
        except (MissingSnapshot, CorruptData, UnsupportedFormat):
            return {}
        whole = replace(manifest, segments=(), shards=None, open_batch=None)
        pieces = [whole, *(replace(whole, layers=(), segments=(s,)) for s in manifest.stored_segments)]
        if manifest.shards is not None:
            pieces.append(replace(whole, layers=(), shards=manifest.shards))
        found: dict[str, int] = {}
        for piece in pieces:
            try:
                for ref in references(self._root, piece, self.memo):
                    if ref.kind != "manifest":
                        found[ref.path] = ref.bytes if ref.bytes >= 0 else -ref.bytes_min
            except (CorruptData, UnsupportedFormat, FileNotFoundError):
                continue  # its index is gone or damaged: the objects that it named are swept by age
        return found

    def recall(self, snapshot_id: int) -> Mapping[str, int] | None:
        """Return the objects that a snapshot needs, if they were read before."""
        known = self._known.get(snapshot_id)
        return known[1] if known is not None else None

    def forget_all_but(self, snapshot_ids: Iterable[int]) -> None:
        """Forget all other snapshots, to bound memory."""
        kept = set(snapshot_ids)
        self._known = {i: known for i, known in self._known.items() if i in kept}
        paths = {path for _, needed, _ in self._known.values() for path in needed}
        self.memo = {path: refs for path, refs in self.memo.items() if path in paths}


@contextmanager
def unless_deleted(root: Store) -> Iterator[None]:
    """Tell damage from a job that is deleted, or moved elsewhere, at this moment.

    Raises:
        JobNotFound: in place of `CorruptData`, if the job was deleted or moved.
    """
    try:
        yield
    except CorruptData as error:
        if read_job_info(root) is None:
            raise JobNotFound(f"{root.url} was deleted, or moved elsewhere, while it was looked at") from error
        raise


def mark(root: Store, marker: Marker, clock: Clock) -> tuple[Existing, Holders, Marks]:
    """Find all objects that are needed now, in the order of reads above.

    Raises:
        CorruptData, UnsupportedFormat: a snapshot cannot be read, so its needs are unknown; nothing may be deleted.
        JobRootMismatch: the same, because the snapshot is another job's. JobNotFound: the job was deleted meanwhile.
        StoreUnavailable, Unavailable: try again.
    """
    for _ in range(CLAIM_ATTEMPTS_MAX):
        with unless_deleted(root):
            marked = _mark_once(root, marker, clock)
        if marked is not None:
            return marked
    raise Unavailable(
        f"the newest snapshots in {root.url} expired {CLAIM_ATTEMPTS_MAX} times while they were read; try again"
    )


def _mark_once(root: Store, marker: Marker, clock: Clock) -> tuple[Existing, Holders, Marks] | None:
    """Mark once; None if the newest snapshot of the listing expired before it was read.

    Only through the newest snapshot is it known which older objects later snapshots share. Later ones are not in the
    listing, so the listing must be read again.
    """
    existing = read_existing(root)
    holders, needed = read_holders(root, clock, marker.records)
    marks = Marks(protected=needed, boundary_sequence=existing.boundary.sequence)
    wanted = {*existing.snapshot_ids, *existing.boundary.going, *holders}
    newest = max(existing.snapshot_ids, default=0)
    lost = 0
    for snapshot_id in sorted(wanted):
        if existing.boundary.is_gone(snapshot_id):
            marks.optional |= marker.rest_of(snapshot_id).keys()
            continue
        try:
            paths, staged = marker.of(snapshot_id)
        except SnapshotExpired:
            boundary = read_boundary(root)
            if boundary.keeps(snapshot_id):
                return None  # it expired, and then a backup in which it has not expired replaced the root
            lost = snapshot_id  # expired and removed since
            marks.boundary_sequence = max(marks.boundary_sequence, boundary.sequence)
            continue
        except MissingSnapshot:
            if snapshot_id == newest or snapshot_id not in existing.snapshot_ids:
                continue  # its manifest is not written yet, or the pin names a snapshot that never existed
            raise
        except CorruptData:
            boundary = read_boundary(root)
            if boundary.keeps(snapshot_id):
                raise
            lost = snapshot_id  # expired and removed while it was read
            marks.boundary_sequence = max(marks.boundary_sequence, boundary.sequence)
            continue
        for path, size in paths.items():
            marks.needed[path] = size if size >= 0 else min(size, marks.needed.get(path, 0))
        marks.optional |= staged
        marks.snapshot_ids.append(snapshot_id)
    return None if lost > max(marks.snapshot_ids, default=0) else (existing, holders, marks)
