"""What a copy or move would do, and why it may not: found out before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    InvalidConfiguration,
    JobNotFound,
    MissingFile,
    MissingSnapshot,
    SnapshotInUse,
)
from state_runtime.maintenance.copy.objects import needed_objects, outputs_below_root
from state_runtime.maintenance.marks import CLOCK_SKEW_MS
from state_runtime.materialize.records import protected
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.fencing import live_run
from state_runtime.snapshot.handover import MoveMode, MoveOutcome, MoveWhat, Moving, read_moving, read_outcome
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import CLAIM_FILE, JOB_FILE, SAVEPOINTS_DIR
from state_runtime.snapshot.pins import SnapshotPin, read_pins
from state_runtime.snapshot.savepoint_record import list_savepoints, read_record, savepoint_names
from state_runtime.store import Store
from state_runtime.store.transfer import is_inside

__all__ = ["MovePlan", "complete_savepoints", "kept_pins", "live_manifests", "plan_move", "refuse_if_needed"]

# What `Store.probe` leaves if it is cut.
_PROBE = "_probe-"


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """A copy or move that may be executed.

    Attributes:
        what: a whole job root with its savepoints and pins, one snapshot of it, or a savepoint folder.
        snapshot_id: which one, if it is one; else 0.
        snapshots, savepoints, pins: what goes, by id and name.
        objects, bytes: data objects that go, each once; what the target has already counts too.
        inside: the store copies; no bytes pass through here.
        left: savepoint folders that are not complete, which stay behind (of a move: are removed with the root).
        resumes: the target holds the beginning of exactly this; None if it is empty (or all is done).
        outcome: how it was decided before; the source is not looked at any more then, and the numbers are 0.
    """

    mode: MoveMode
    what: MoveWhat
    source_url: str
    target_url: str
    job: JobInfo
    snapshot_id: int
    snapshots: tuple[int, ...]
    savepoints: tuple[str, ...]
    pins: tuple[SnapshotPin, ...]
    left: tuple[str, ...]
    objects: int
    bytes: int
    inside: bool
    resumes: Moving | None
    outcome: MoveOutcome | None


def plan_move(source: Store, target: Store, *, mode: MoveMode, snapshot_id: int | None, clock: Clock) -> MovePlan:
    """What would go, and whether it may. Nothing is written.

    Args:
        source: a job root or a savepoint folder.
        snapshot_id: only this snapshot of it; None is the whole folder.

    Raises:
        SnapshotInUse: somebody needs the source of a move, who is named; or the source is no whole root itself.
        InvalidConfiguration: the target holds something else, or lies in the source, or the other way round.
        JobNotFound, MissingSnapshot, SnapshotExpired: there is nothing to copy.
        CorruptData, UnsupportedFormat: not all of it is known; repair it, or copy a snapshot that is well.
        StoreUnavailable: try again.
    """
    _refuse_nested(source.url, target.url)
    resumes, outcome = _look_at_target(source.url, target, mode, snapshot_id or 0)
    if outcome is not None:
        return _decided(source, target, mode, snapshot_id or 0, resumes, outcome)
    info = Catalog.of_root(source, clock).job_info()
    what: MoveWhat = (
        "snapshot" if snapshot_id is not None else "savepoint" if read_record(source) is not None else "root"
    )
    if resumes is not None and (resumes.job_uid, resumes.what) != (info.uid, what):
        raise InvalidConfiguration(
            f"{target.url} was begun as the {mode} of another {resumes.what} that was in {source.url}; choose another "
            "target"
        )
    own = resumes.uid if resumes is not None else ""
    fenced = _refuse_source(source, own)
    complete, left = complete_savepoints(source, clock) if what == "root" else ([], [])
    if mode == "move":
        refuse_if_needed(source, what, snapshot_id, clock, mover=own, resumed=fenced)
    snapshots, objects, size = _sizes(source, snapshot_id, clock)
    if not snapshots:
        raise MissingSnapshot(f"job {info.name!r} in {source.url} has no snapshot yet: there is nothing to {mode}")
    for savepoint in complete:
        _, more_objects, more_bytes = _sizes(savepoint, None, clock)
        objects, size = objects + more_objects, size + more_bytes
    return MovePlan(
        mode=mode,
        what=what,
        source_url=source.url,
        target_url=target.url,
        job=info,
        snapshot_id=snapshot_id or 0,
        snapshots=tuple(snapshots),
        savepoints=tuple(s.url.rsplit("/", 1)[-1] for s in complete),
        pins=tuple(kept_pins(source, snapshot_id, clock.now_ms())),
        left=tuple(left),
        objects=objects,
        bytes=size,
        inside=is_inside(source, target),
        resumes=resumes,
        outcome=outcome,
    )


def _sizes(root: Store, snapshot_id: int | None, clock: Clock) -> tuple[list[int], int, int]:
    """Ids of the snapshots, and how many objects of how many bytes they need together."""
    seen: set[str] = set()
    snapshots, size = [], 0
    for manifest in live_manifests(Catalog.of_root(root, clock), snapshot_id):
        try:
            needed = needed_objects(root, manifest)
        except MissingFile:
            if snapshot_id is not None or read_boundary(root).keeps(manifest.snapshot_id):
                raise
            continue  # given up just now
        snapshots.append(manifest.snapshot_id)
        for need in [*needed.values(), *outputs_below_root(manifest)]:
            if need.path not in seen:
                seen.add(need.path)
                size += need.bytes_known
    return snapshots, len(seen), size


def live_manifests(catalog: Catalog, only: int | None = None) -> Iterator[Manifest]:
    """The manifests of all snapshots, oldest first, one at a time; those that are given up meanwhile are passed over.

    Args:
        only: just this one.

    Raises:
        MissingSnapshot, SnapshotExpired: `only` is not there.
    """
    if only is not None:
        yield catalog.manifest(only)
        return
    for snapshot_id in catalog.snapshot_ids():
        try:
            yield catalog.manifest(snapshot_id)
        except MissingSnapshot:
            continue  # a folder whose manifest is on its way, whose writer died, or that was given up just now


def complete_savepoints(source: Store, clock: Clock) -> tuple[list[Store], list[str]]:
    """The savepoint folders below a root that are snapshots, and the names of those that are not (yet)."""
    complete, left = [], []
    for name in savepoint_names(source):
        folder = source.child(f"{SAVEPOINTS_DIR}/{name}")
        record = read_record(folder)
        done = (record is None or record.state == "COMPLETED") and folder.exists(JOB_FILE)
        if done and next(live_manifests(Catalog.of_root(folder, clock)), None) is not None:
            complete.append(folder)
        else:
            left.append(name)
    return complete, left


def kept_pins(source: Store, snapshot_id: int | None, now_ms: int) -> Iterator[SnapshotPin]:
    """The pins that people set, which go with their snapshots; those of programs are about the root that they work
    on."""
    for pin in read_pins(source):
        if pin.reason == "user" and not pin.is_void(now_ms) and snapshot_id in (None, pin.snapshot_id):
            yield pin


def refuse_if_needed(
    source: Store, what: MoveWhat, snapshot_id: int | None, clock: Clock, *, mover: str = "", resumed: bool = False
) -> None:
    """Whether what is to be moved may be taken away from where it is.

    Args:
        mover: uid of the move, whose own pins do not count.
        resumed: an earlier attempt has turned all new runs away: one that is only starting is itself, or gives way.

    Raises:
        SnapshotInUse: a run, a reader, a copy or a child needs it, and is named.
    """
    catalog = Catalog.of_root(source, clock)
    holders = list(_holders(source, what, snapshot_id, clock, mover))
    if what == "root":
        holders += _users_of_root(source, catalog, clock, resumed)
        for name in savepoint_names(source):
            holders += _holders(source.child(f"{SAVEPOINTS_DIR}/{name}"), "savepoint", None, clock, mover)
    elif what == "snapshot" and snapshot_id == max(catalog.snapshot_ids(), default=0):
        holders.append(f"job {catalog.job!r}, which goes on from it as its newest: copy it, or move the whole root")
    if holders:
        raise SnapshotInUse(f"{source.url} cannot be moved: it is needed by {'; '.join(holders)}. Nothing was moved")


def _holders(folder: Store, what: MoveWhat, snapshot_id: int | None, clock: Clock, mover: str) -> Iterator[str]:
    """Who needs something of a folder; as deletion will count them, so that nothing is copied for hours and then not
    given up."""
    if folder.exists(CLAIM_FILE):
        yield "the job that has claimed it (claim.json)"
    now_ms = clock.now_ms() - CLOCK_SKEW_MS
    for pin in read_pins(folder):
        moves_along = what != "snapshot" and pin.reason == "user"
        own = mover != "" and pin.note == mover
        if not pin.is_void(now_ms) and snapshot_id in (None, pin.snapshot_id) and not moves_along and not own:
            yield f"{pin.holder} (a {pin.reason} pin on snapshot {pin.snapshot_id})"
    needed = protected(folder, now_ms)
    if needed.snapshots and (snapshot_id is None or snapshot_id in needed.snapshots):
        yield "a materialization that reads it"


def _users_of_root(source: Store, catalog: Catalog, clock: Clock, resumed: bool) -> Iterator[str]:
    run = live_run(catalog, clock)
    if run is not None and not (resumed and run.state == "starting"):
        yield f"run {run.term} (process {run.pid} on {run.host}); stop it with `stillstate stop {catalog.job}`"
    for record in list_savepoints(source):
        if record.is_open and not record.is_stale(clock.now_ms()):
            yield f"{record.owner}, which works on savepoint {record.name!r} ({record.state})"


def _refuse_nested(source_url: str, target_url: str) -> None:
    source, target = (url.rstrip("/") + "/" for url in (source_url, target_url))
    if target.startswith(source) or source.startswith(target):
        raise InvalidConfiguration(
            f"{target_url} and {source_url} lie in each other; choose a target outside the copied folder"
        )


def _refuse_source(source: Store, own: str) -> bool:
    """Whether an earlier attempt of the same move has fenced the source."""
    moving = read_moving(source)
    if moving is None or moving.uid == own:
        return moving is not None
    if moving.role == "source":
        raise SnapshotInUse(
            f"{source.url} is being moved to {moving.other_url}; finish that with `stillstate move`, or take it back "
            "with --abort"
        )
    if read_outcome(source) is None:
        raise SnapshotInUse(
            f"{source.url} is not complete: the {moving.mode} from {moving.other_url} has not ended; repeat that first"
        )
    return False


def _look_at_target(
    source_url: str, target: Store, mode: MoveMode, snapshot_id: int
) -> tuple[Moving | None, MoveOutcome | None]:
    """What a target that is not empty holds of this copy or move: its beginning, or all of it.

    Raises:
        InvalidConfiguration: something else.
    """
    moving, outcome = read_moving(target), read_outcome(target)
    names = [name for name in target.list_names("") if not name.startswith(_PROBE)]
    if moving is None and outcome is None and not names:
        return None, None
    begun = moving is not None and (moving.role, moving.mode, moving.other_url, moving.snapshot_id) == (
        "target",
        mode,
        source_url,
        snapshot_id,
    )
    done = moving is None and outcome is not None and (outcome.mode, outcome.source_url) == (mode, source_url)
    if not begun and not done:
        raise InvalidConfiguration(
            f"{target.url} is not empty ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}) and not of this "
            f"{mode}; nothing was overwritten. Choose a folder that does not exist yet"
        )
    if outcome is not None and outcome.outcome == "aborted":
        raise InvalidConfiguration(
            f"the {mode} to {target.url} was taken back; remove what it left, or choose another folder"
        )
    return moving, outcome


def _decided(
    source: Store, target: Store, mode: MoveMode, snapshot_id: int, resumes: Moving | None, outcome: MoveOutcome
) -> MovePlan:
    # The target has everything, and the source may be partly gone: only the end is left to do.
    info = read_job_info(target) or read_job_info(source)
    if info is None:
        raise JobNotFound(
            f"neither {source.url} nor {target.url} has a job.json; they were removed by something other than Stillstate"
        )
    what: MoveWhat = resumes.what if resumes is not None else "snapshot" if snapshot_id else "root"
    return MovePlan(
        mode=mode,
        what=what,
        source_url=source.url,
        target_url=target.url,
        job=info,
        snapshot_id=snapshot_id,
        snapshots=(),
        savepoints=(),
        pins=(),
        left=(),
        objects=0,
        bytes=0,
        inside=is_inside(source, target),
        resumes=resumes,
        outcome=outcome,
    )
