"""Plans of copies and moves: their content, and the reasons to refuse them, before anything is written."""

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

# `Store.probe` leaves files with this prefix if it is interrupted.
_PROBE = "_probe-"


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """A copy or move that may be executed.

    Attributes:
        what: a whole job root with its savepoints and pins, one snapshot of it, or a savepoint folder.
        snapshot_id: the id, if `what` is one snapshot; else 0.
        snapshots, savepoints, pins: those that are copied, by id and name.
        objects, bytes: data objects to copy, each once; includes objects that the target already has.
        inside: the store copies; no bytes pass through this process.
        left: savepoint folders that are not complete and are not copied (a move removes them with the root).
        resumes: the target holds the beginning of exactly this move; None if it is empty (or the move is done).
        outcome: the earlier decision; if set, the source is not read any more, and the numbers are 0.
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
    """Plan a copy or move, or refuse it. Nothing is written.

    Args:
        source: a job root or a savepoint folder.
        snapshot_id: only this snapshot of it; None is the whole folder.

    Raises:
        SnapshotInUse: a holder, which is named, needs the source of a move; or the source is incomplete itself.
        InvalidConfiguration: the target holds something else, or is inside the source, or the other way round.
        JobNotFound, MissingSnapshot, SnapshotExpired: there is nothing to copy.
        CorruptData, UnsupportedFormat: the source cannot be read completely; repair it, or copy an intact snapshot.
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
    """Return the ids of the snapshots, and the number and bytes of the objects that they need together."""
    seen: set[str] = set()
    snapshots, size = [], 0
    for manifest in live_manifests(Catalog.of_root(root, clock), snapshot_id):
        try:
            needed = needed_objects(root, manifest)
        except MissingFile:
            if snapshot_id is not None or read_boundary(root).keeps(manifest.snapshot_id):
                raise
            continue  # expired just now
        snapshots.append(manifest.snapshot_id)
        for need in [*needed.values(), *outputs_below_root(manifest)]:
            if need.path not in seen:
                seen.add(need.path)
                size += need.bytes_known
    return snapshots, len(seen), size


def live_manifests(catalog: Catalog, only: int | None = None) -> Iterator[Manifest]:
    """Yield the manifests of all snapshots, oldest first, one at a time; skip those that expire meanwhile.

    Args:
        only: yield only this snapshot.

    Raises:
        MissingSnapshot, SnapshotExpired: `only` does not exist.
    """
    if only is not None:
        yield catalog.manifest(only)
        return
    for snapshot_id in catalog.snapshot_ids():
        try:
            yield catalog.manifest(snapshot_id)
        except MissingSnapshot:
            continue  # a folder whose manifest is not written yet, whose writer died, or that expired just now


def complete_savepoints(source: Store, clock: Clock) -> tuple[list[Store], list[str]]:
    """Return the savepoint folders below a root that are snapshots, and the names of those that are not (yet)."""
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
    """Yield the pins that people set; they are copied with their snapshots. Pins of programs are only for the root that
    the program works on."""
    for pin in read_pins(source):
        if pin.reason == "user" and not pin.is_void(now_ms) and snapshot_id in (None, pin.snapshot_id):
            yield pin


def refuse_if_needed(
    source: Store, what: MoveWhat, snapshot_id: int | None, clock: Clock, *, mover: str = "", resumed: bool = False
) -> None:
    """Refuse to move a source that is needed where it is.

    Args:
        mover: uid of the move, whose own pins do not count.
        resumed: an earlier attempt already refuses all new runs. So a run in state "starting" is the mover itself, or
            gives way; it is ignored.

    Raises:
        SnapshotInUse: a run, a reader, a copy or a child needs the source, and is named.
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
    """Name the holders of a folder's snapshots, counted as deletion counts them. So a long copy does not end with a
    source that cannot be deleted."""
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
    """Return whether an earlier attempt of the same move has fenced the source."""
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
    """Return the part of this copy or move that a target already holds: its beginning, or all of it.

    Raises:
        InvalidConfiguration: the target holds something else.
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
    # The target is complete, and the source may be partly deleted: only the last steps are left.
    info = read_job_info(target) or read_job_info(source)
    if info is None:
        raise JobNotFound(
            f"neither {source.url} nor {target.url} has a job.json; they were removed by something other than "
            "Stillstate"
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
