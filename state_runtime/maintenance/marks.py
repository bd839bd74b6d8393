"""What is needed below a job root, and by whom: the one place that deleting, retention and collection ask.

The order of reads carries the safety (docs/design/0017-deletion.md):

1. which snapshots there are, and the boundary. What a running job commits later goes on from the newest of them, so it
   names nothing that was unnamed before and is older.
2. pins and materializations, after the boundary. A pin counts only if it was placed before its snapshot was announced;
   so whoever sees the announcement sees the pin.
3. the manifests of everything that is a snapshot, or going, or pinned.

Any listing or file that cannot be read ends it with an error: what is not known is not garbage.
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
"""By so much clocks of machines may differ: nothing expires earlier than this after its time."""
_GAP_MAX = 1_000


@dataclass(frozen=True)
class Existing:
    """The snapshots of a root.

    Attributes:
        snapshot_ids: ascending, as the boundary has them; the last may still be on its way.
        given_up: gone, and something of them still lies there.
    """

    boundary: ExpiryBoundary
    snapshot_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()


def read_existing(root: Store, *, without: Collection[int] = ()) -> Existing:
    """All snapshots, not trusting the listing alone: ids are given one by one, so a listing that was cut short has
    gaps.

    Args:
        without: may be damaged, and are not looked for.

    Raises:
        StoreUnavailable: the listing lacks what is there. CorruptManifest: a snapshot that the boundary keeps is not
            there.
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
    # Behind the newest a listing that was cut short looks like an older one; and a running job commits meanwhile. Of a
    # listing that is older than the boundary everything may be given up by now, and newer ones be there all the same.
    first = following = max(found, default=boundary.snapshot_id) + 1
    while (found or boundary.snapshot_id) and boundary.keeps(following) and root.exists(manifest_path(following)):
        found.add(following)
        following += 1
        if following - first > _GAP_MAX:
            raise StoreUnavailable(f"the listing of snapshots in {root.url} ends long before they do; try again")
    return Existing(boundary, tuple(sorted(found)), tuple(sorted(i for i in listed if boundary.is_gone(i))))


def _gaps(found: Collection[int], boundary: ExpiryBoundary, root: Store) -> list[int]:
    """Ids that should be there, by the boundary or between two that are. A root that others were copied to one by one
    has gaps."""
    above = sorted(i for i in found if i > boundary.snapshot_id)
    first = boundary.snapshot_id + 1 if boundary.sequence else above[0] if above else 0
    between = (i for i in range(first, above[-1] if above else first) if i not in found)
    gaps = [*(i for i in boundary.kept if i not in found), *islice(between, _GAP_MAX + 1)]
    if not boundary.sequence and first > 1:
        gaps.append(first - 1)  # nothing was given up yet, so below the first there is nothing
    if len(gaps) > _GAP_MAX:
        raise StoreUnavailable(
            f"the listing of snapshots in {root.url} lacks more than {_GAP_MAX:,} of them; nothing was deleted, try "
            "again"
        )
    return gaps


Holders = Mapping[int, tuple[str, ...]]
"""Who needs a snapshot, for people, by its id."""


def read_holders(root: Store, clock: Clock, records: dict[int, Record] | None = None) -> tuple[Holders, Protected]:
    """Pins that count, and what materializations need. To be read after the boundary.

    Args:
        records: see `protected`.

    Raises:
        CorruptManifest, UnsupportedFormat, StoreUnavailable: somebody's need cannot be read; nothing may be deleted.
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
    """What is needed.

    Attributes:
        needed: size by path; of an object whose size is not recorded, minus what it has at least.
        optional: is kept if it is there: output that is staged below the root, and what a snapshot needs that is gone
            and pinned.
        snapshot_ids: whose needs these are.
        boundary_sequence: of the newest boundary that left a snapshot out. In a backup of the root that is older than
            it that snapshot is one, so whoever deletes by these marks proves that the boundary is there.
    """

    needed: dict[str, int] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    snapshot_ids: list[int] = field(default_factory=list)
    protected: Protected = field(default_factory=Protected)
    boundary_sequence: int = 0

    def keeps(self, path: str) -> bool:
        """Whether something needs it."""
        return path in self.needed or path in self.optional or self.protected.keeps(path)


def size_fits(wanted: int, found: int) -> bool:
    """Whether an object of that size may be what `Marks.needed` says."""
    return found == wanted if wanted >= 0 else found >= -wanted


class Marker:
    """Knows what snapshots need. Manifests are immutable, so what was read once stays known: for whoever asks again and
    again.

    Attributes:
        memo, records: what was read of segments and of materializations.

    Args:
        is_proven: whoever asks proves, after what it is told and before it acts on it, that the root is still its own
            (snapshot/ownership.py). Then an id is one snapshot for ever, and is not read again. Anybody else may have
            slept, and the same id be another snapshot by now: its manifest is read again each time.
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
        """What a snapshot needs: sizes by path, without its manifest; and what is staged for it below the root.

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
            JobRootMismatch: it is of another job; of what this one needs it says nothing.
        """
        if self._info is None:
            self._info = read_job_info(self._root)
        if self._info is not None:
            check_belongs(manifest, self._info, self._root.url, own=False)

    def of(self, snapshot_id: int) -> tuple[Mapping[str, int], frozenset[str]]:
        """The same by id.

        Raises:
            MissingSnapshot, SnapshotExpired: it is not there. And what `add` raises.
        """
        known = self._known.get(snapshot_id)
        if known is not None and self._is_proven:
            return known[1], known[2]
        # What is known is told by the commit, and not by the id.
        return self.add(self._catalog.manifest(snapshot_id))

    def rest_of(self, snapshot_id: int) -> Mapping[str, int]:
        """What a snapshot that is gone needed, as far as it can be found out: pieces of it may be removed already.

        Without the output that was staged for it: the sink removes that.
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
                continue  # its index is gone or damaged: where it led to is swept by age
        return found

    def recall(self, snapshot_id: int) -> Mapping[str, int] | None:
        """What a snapshot needs, if it was read before."""
        known = self._known.get(snapshot_id)
        return known[1] if known is not None else None

    def forget_all_but(self, snapshot_ids: Iterable[int]) -> None:
        """Bound what is known."""
        kept = set(snapshot_ids)
        self._known = {i: known for i, known in self._known.items() if i in kept}
        paths = {path for _, needed, _ in self._known.values() for path in needed}
        self.memo = {path: refs for path, refs in self.memo.items() if path in paths}


@contextmanager
def unless_deleted(root: Store) -> Iterator[None]:
    """What looks like damage may be a job that is deleted, or moved elsewhere, at this moment.

    Raises:
        JobNotFound: in place of `CorruptData`, if it is.
    """
    try:
        yield
    except CorruptData as error:
        if read_job_info(root) is None:
            raise JobNotFound(f"{root.url} was deleted, or moved elsewhere, while it was looked at") from error
        raise


def mark(root: Store, marker: Marker, clock: Clock) -> tuple[Existing, Holders, Marks]:
    """Everything that is needed now, in the order of reads above.

    Raises:
        CorruptData, UnsupportedFormat: a snapshot cannot be read, so what it needs is not known; nothing may be
            deleted.
        JobRootMismatch: the same, because it is another job's. JobNotFound: the job was deleted meanwhile.
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
    """None if the newest snapshot of the listing was given up before it was read.

    What later ones share with older ones is known through it alone: they are not in the listing, so it must be read
        anew.
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
                return None  # it was given up, and then a backup was put here in which it is not
            lost = snapshot_id  # given up and removed since
            marks.boundary_sequence = max(marks.boundary_sequence, boundary.sequence)
            continue
        except MissingSnapshot:
            if snapshot_id == newest or snapshot_id not in existing.snapshot_ids:
                continue  # its manifest is still on its way, or somebody pinned what never was
            raise
        except CorruptData:
            boundary = read_boundary(root)
            if boundary.keeps(snapshot_id):
                raise
            lost = snapshot_id  # the same, while it was read
            marks.boundary_sequence = max(marks.boundary_sequence, boundary.sequence)
            continue
        for path, size in paths.items():
            marks.needed[path] = size if size >= 0 else min(size, marks.needed.get(path, 0))
        marks.optional |= staged
        marks.snapshot_ids.append(snapshot_id)
    return None if lost > max(marks.snapshot_ids, default=0) else (existing, holders, marks)
