"""A root that is copied or moved: who may still use it. Documents at both ends, and what a starting run makes of them.

    moving.json     at the target of every copy and move, from before the first byte until after the last; and at the
                    source of the move of a whole job root, from before its copy until the root is gone
    moved.json      at the target: how it was decided. One create-if-absent, so that finishing and aborting cannot both
                    win

A run and a mover cannot both have the root. The mover writes `moving.json`, then claims a term, then commits a fencing
snapshot; a run claims its term, then looks for `moving.json`, then commits its fencing snapshot. A run that looked too
early has the older term, and the mover's fencing snapshot ends it as that of any newer run; what it committed by then
is moved too. A run that looked later finds the file and gives way. So nothing is ever committed to the source that the
target does not get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from state_runtime.base.errors import SnapshotInUse
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import (
    BUILDING_FILE,
    CONVERSION_FILE,
    JOB_FILE,
    MOVED_FILE,
    MOVING_FILE,
    SNAPSHOTS_DIR,
)
from state_runtime.store import Store

__all__ = ["MoveMode", "MoveOutcome", "MoveWhat", "Moving", "read_moving", "read_outcome", "refuse_if_handed_over"]

MoveMode = Literal["copy", "move"]
MoveWhat = Literal["root", "snapshot", "savepoint"]


@dataclass(frozen=True)
class Moving:
    """A copy or move under way, as one of its ends says it.

    Attributes:
        uid: of the move; the same at both ends.
        role: which end this is.
        other_url: where the other end is; no credentials.
        snapshot_id: which one, if it is one; else 0.
        term: at the source, that of the mover's fencing snapshot; 0 until it is there.
    """

    uid: str
    role: Literal["source", "target"]
    mode: MoveMode
    what: MoveWhat
    other_url: str
    job_uid: str
    snapshot_id: int
    at_ms: int
    host: str
    pid: int
    term: int = 0

    def encode(self) -> bytes:
        """The file's bytes."""
        return encode_document("moving", self)


@dataclass(frozen=True)
class MoveOutcome:
    """How a copy or move was decided, at its target; it stays there and says where the data came from."""

    uid: str
    outcome: Literal["complete", "aborted"]
    mode: MoveMode
    source_url: str
    at_ms: int

    def encode(self) -> bytes:
        """The file's bytes."""
        return encode_document("moved", self)


def read_moving(root: Store) -> Moving | None:
    """The copy or move that a root takes part in; None if there is no such work.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be trusted or read; leave the root alone.
    """
    try:
        data = root.read(MOVING_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("moving", Moving, data, f"{root.url}/{MOVING_FILE}")


def read_outcome(root: Store) -> MoveOutcome | None:
    """How the move to this root was decided, None if it was not.

    Raises:
        CorruptManifest, UnsupportedFormat: see `read_moving`.
    """
    try:
        data = root.read(MOVED_FILE, SMALL_JSON_BYTES_MAX)
    except FileNotFoundError:
        return None
    return decode_document("moved", MoveOutcome, data, f"{root.url}/{MOVED_FILE}")


def refuse_if_handed_over(root: Store, *, mover: str = "", is_builder: bool = False) -> None:
    """Keep everybody but its mover from changing a root that is going elsewhere, or has not wholly arrived.

    Call it after the first thing that a mover would see (a term, a savepoint's record), and before anything that would
    be lost.

    Args:
        mover: uid of the move whose own this call is.
        is_builder: whether the caller fills the root with rows: an import, a bootstrap, or the repetition of one.

    Raises:
        SnapshotInUse: it is being moved away, or copied, converted or imported to.
    """
    if not is_builder and root.exists(BUILDING_FILE) and not root.list_names(SNAPSHOTS_DIR):
        raise SnapshotInUse(
            f"{root.url} has no snapshot: the import or bootstrap that fills it has not ended, or was cut. It does not "
            "begin empty. Run the import (bootstrap) again, which starts over in this folder; or remove the folder to "
            "begin without it"
        )
    if root.exists(CONVERSION_FILE) and not root.list_names(SNAPSHOTS_DIR):
        raise SnapshotInUse(
            f"{root.url} is not complete: the conversion that fills it has not ended. Repeat `stillstate convert`: it "
            "goes on where it stopped; or remove the folder"
        )
    moving = read_moving(root)
    if moving is None or moving.uid == mover:
        return
    if moving.role == "source":
        raise SnapshotInUse(
            f"{root.url} is being moved to {moving.other_url} (by process {moving.pid} on {moving.host}): use it "
            f"there. If the move was cut, finish it with `stillstate move {root.url} {moving.other_url}`, or take it "
            "back with --abort"
        )
    outcome = read_outcome(root)
    if outcome is None or outcome.uid != moving.uid or outcome.outcome != "complete" or not root.exists(JOB_FILE):
        raise SnapshotInUse(
            f"{root.url} is not complete: the {moving.mode} from {moving.other_url} that fills it has not ended. "
            f"Repeat `stillstate {moving.mode}`: it goes on where it stopped"
        )
