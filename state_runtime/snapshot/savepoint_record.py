"""Savepoints: complete copies of a snapshot that a user requested by name, and their records.

    savepoints/<name>/                      a folder laid out like a job root (snapshot/locate.py)
    savepoints/<name>/savepoint.json        the record of its first owner
    savepoints/<name>/savepoint-<n>.json    of its n-th owner; the record with the highest number counts

The folder is created by its record (create-if-absent: a name belongs to one savepoint), the copied files follow, then
the manifest, then the record becomes COMPLETED:

    REQUESTED ──▶ IN_PROGRESS ──▶ COMPLETED ──▶ DELETING ──▶ gone
        │           │  ▲
        │           ▼  │ resumed
        ├───────▶ FAILED ────────────────────▶ DELETING
        └───────▶ ABANDONED ─────────────────▶ DELETING

Only its owner rewrites a record. A process that takes over (from a driver that died, or to delete a savepoint) creates
the record of the next number, and later writes of the owner before do not count. This needs no clock: a heartbeat only
shows when a take-over makes sense. Two processes that copy one savepoint write the same bytes to the same names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from state_runtime.base.clock import Clock
from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    MissingSnapshot,
    SavepointExists,
    SnapshotInUse,
    UnsupportedFormat,
    check,
)
from state_runtime.base.limits import (
    SAVEPOINT_NOTE_CHARS_MAX,
    SAVEPOINT_TAGS_MAX,
    SMALL_JSON_BYTES_MAX,
)
from state_runtime.snapshot.create_once import Proposal, create_next, read_newest
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.paths import SAVEPOINTS_DIR, check_job_name, check_uid, savepoint_path
from state_runtime.store import Store

__all__ = [
    "ALLOWED",
    "YOUNGER",
    "SavepointFormat",
    "SavepointRecord",
    "SavepointState",
    "SavepointThen",
    "SavepointTrigger",
    "check_tags",
    "complete_savepoints",
    "create_savepoint",
    "list_savepoints",
    "owner_number_of",
    "read_record",
    "read_savepoint",
    "record_path",
    "retry_wait_ms",
    "rewrite_savepoint",
    "savepoint_names",
    "take_back",
    "take_over",
]

_LOG = logging.getLogger(__name__)

SavepointState = Literal["REQUESTED", "IN_PROGRESS", "COMPLETED", "FAILED", "ABANDONED", "DELETING"]
SavepointTrigger = Literal["user", "schedule", "upgrade"]
SavepointThen = Literal["continue", "stop", "drain"]
SavepointFormat = Literal["native", "canonical"]
"""`native`: in the job's own format. `canonical`: see docs/formats.md."""

YOUNGER: Mapping[str, Any] = MappingProxyType({"format": "native", "independent": False, "drain_inflight": False})
"""Fields of records and requests that are younger than the format: not written while they have this default."""

ALLOWED: dict[SavepointState, tuple[SavepointState, ...]] = {
    "REQUESTED": ("REQUESTED", "IN_PROGRESS", "FAILED", "ABANDONED", "DELETING"),
    "IN_PROGRESS": ("IN_PROGRESS", "COMPLETED", "FAILED", "ABANDONED", "DELETING"),
    "COMPLETED": ("DELETING",),
    "FAILED": ("IN_PROGRESS", "DELETING"),
    "ABANDONED": ("DELETING",),
    "DELETING": ("DELETING",),
}
"""The allowed next states; REQUESTED, IN_PROGRESS and DELETING also allow themselves: a heartbeat, or a new owner."""

HEARTBEAT_S = 5.0
# An owner without a heartbeat for this time may be replaced: the time allows for a copy of one large object, a pause of
# the machine, and clocks that differ.
STALE_MS = 60_000
ATTEMPTS_MAX = 6
_BACK_OFF_MS = (1_000, 60_000)  # after the first failed attempt, and at most; doubled in between

_RECORD = re.compile(r"savepoint(?:-([1-9][0-9]{0,8}))?\.json\Z")


@dataclass(frozen=True)
class SavepointRecord:
    """The known facts about a savepoint.

    Attributes:
        uid: of the request that it answers, or drawn; a name that is used again has another one.
        job, job_uid: the job whose state it is.
        trigger: why it was made.
        then: what the job does after it.
        term: of the run that was asked; 0 if the job did not run.
        snapshot_id: of the job; also the id of the folder's only snapshot. 0 while REQUESTED.
        drained: the state is that of a job whose input had ended: every window has closed. See `Manifest.drained`.
        copied_bytes, total_bytes, copied_objects, total_objects: of the copy; the totals are known once it has begun.
        attempts: number of copies that were begun.
        next_attempt_at_ms: when the next one begins after a failed one; 0 while one is under way.
        message: one line for people: why it failed, or the problem of the last attempt.
        owner: the process that works on it, `host:pid`.
        number: the owner's; also in the record's file name.
        format: format of the folder's snapshot.
        independent: no file shares its bytes with another by hard link.
        drain_inflight: the job was to process the rows in flight first, so that the savepoint has none.
    """

    name: str
    uid: str
    job: str
    job_uid: str
    state: SavepointState
    trigger: SavepointTrigger
    requested_at_ms: int
    owner: str
    heartbeat_at_ms: int
    then: SavepointThen = "continue"
    tags: tuple[str, ...] = ()
    note: str = ""
    term: int = 0
    snapshot_id: int = 0
    drained: bool = False
    finished_at_ms: int = 0
    copied_bytes: int = 0
    total_bytes: int = 0
    copied_objects: int = 0
    total_objects: int = 0
    attempts: int = 0
    next_attempt_at_ms: int = 0
    message: str = ""
    number: int = 1
    format: SavepointFormat = "native"
    independent: bool = False
    drain_inflight: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a process should be at work on it."""
        return self.state in ("REQUESTED", "IN_PROGRESS", "DELETING")

    def is_stale(self, now_ms: int) -> bool:
        """Whether its owner seems to be gone: it may be taken over. A heartbeat from the future is fresh."""
        return self.is_open and now_ms - self.heartbeat_at_ms > STALE_MS

    def to(self, state: SavepointState, now_ms: int, **changes: Any) -> SavepointRecord:
        """Return the record in its next state; the end time is set.

        Raises:
            StillstateError: that state cannot follow.
        """
        check(state in ALLOWED[self.state], f"savepoint {self.name!r} cannot go from {self.state} to {state}")
        is_end = state in ("COMPLETED", "FAILED", "ABANDONED")
        return replace(
            self,
            **{
                "state": state,
                "heartbeat_at_ms": now_ms,
                "finished_at_ms": now_ms if is_end else self.finished_at_ms if state == "DELETING" else 0,
                **changes,
            },
        )

    def failed_attempt(self, now_ms: int, message: str, *, again: bool) -> SavepointRecord:
        """Return the record after a failed attempt: waiting for the next one, or FAILED.

        Args:
            again: whether the reason may pass. If not, or after the last attempt, the savepoint is FAILED.
        """
        if not again or self.attempts >= ATTEMPTS_MAX:
            return self.to("FAILED", now_ms, message=message, next_attempt_at_ms=0)
        return self.to("IN_PROGRESS", now_ms, message=message, next_attempt_at_ms=now_ms + retry_wait_ms(self.attempts))


def retry_wait_ms(attempts: int) -> int:
    """Return the wait between the `attempts`-th failed attempt and the next one."""
    first, most = _BACK_OFF_MS
    return min(first << min(max(attempts - 1, 0), 30), most)


def check_tags(tags: tuple[str, ...], note: str) -> tuple[str, ...]:
    """Return the tags, each once, in order.

    Raises:
        InvalidConfiguration: too many, too long, or not of the characters of an uid.
    """
    for tag in tags:
        check_uid(tag, "tag")
    if len(tags) > SAVEPOINT_TAGS_MAX:
        raise InvalidConfiguration(f"{len(tags)} tags are more than {SAVEPOINT_TAGS_MAX}; give fewer")
    if len(note) > SAVEPOINT_NOTE_CHARS_MAX:
        raise InvalidConfiguration(
            f"the note has {len(note):,} characters, more than {SAVEPOINT_NOTE_CHARS_MAX:,}; shorten it"
        )
    return tuple(dict.fromkeys(tags))


def record_path(number: int) -> str:
    """Return the path of the n-th owner's record, below the savepoint's folder."""
    return "savepoint.json" if number == 1 else f"savepoint-{number}.json"


def owner_number_of(name: str) -> int | None:
    """Return the owner's number in a file name, or None for a name that is no record's."""
    found = _RECORD.match(name)
    if found is None:
        return None
    number = int(found.group(1) or 1)
    return number if record_path(number) == name else None


def savepoint_names(root: Store) -> list[str]:
    """Return the names of all folders below `savepoints/`, including those that have no record (any more)."""
    return root.list_names(SAVEPOINTS_DIR)


def read_record(folder: Store) -> SavepointRecord | None:
    """Read the record that counts in a savepoint's folder, at any place; None if it has no record.

    Raises:
        CorruptManifest, UnsupportedFormat: it cannot be read; nothing of the savepoint may be deleted.
    """

    def read(number: int) -> SavepointRecord:
        path = record_path(number)
        data = folder.read(path, SMALL_JSON_BYTES_MAX)
        return decode_document("savepoint", SavepointRecord, data, f"{folder.url}/{path}")

    return read_newest(lambda: _newest_number(folder), read, f"the record in {folder.url}")


def read_savepoint(root: Store, name: str) -> SavepointRecord:
    """Read the record of a savepoint of a job.

    Raises:
        MissingSnapshot: there is no savepoint of that name. CorruptManifest, UnsupportedFormat: see `read_record`.
    """
    record = read_record(root.child(savepoint_path(name)))
    if record is None:
        raise MissingSnapshot(f"there is no savepoint {name!r} in {root.url}; `stillstate savepoints` lists them")
    return record


def list_savepoints(root: Store) -> list[SavepointRecord]:
    """Read the records of all savepoints of a job, oldest first. Folders without a record have no owner; they are
    skipped.

    Raises:
        CorruptManifest, UnsupportedFormat: one cannot be read; nothing may be deleted.
    """
    found = []
    for name in savepoint_names(root):
        if not _is_name(name):
            continue
        record = read_record(root.child(savepoint_path(name)))
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda r: (r.requested_at_ms, r.name))


def complete_savepoints(root: Store) -> list[SavepointRecord]:
    """Return the COMPLETED savepoints, for a caller that wants to go back to one: unreadable records are skipped. (A
    deletion uses `list_savepoints`.)

    Raises:
        StoreUnavailable: it is not known.
    """
    found = []
    for name in savepoint_names(root):
        try:
            record = read_savepoint(root, name)
        except (CorruptData, MissingSnapshot, InvalidConfiguration, UnsupportedFormat) as error:
            _LOG.info("%s/%s/%s is passed over: %s", root.url, SAVEPOINTS_DIR, name, error)
            continue
        if record.state == "COMPLETED":
            found.append(record)
    return found


def create_savepoint(root: Store, record: SavepointRecord, prove: Callable[[], None] = lambda: None) -> None:
    """Take the name. Atomic; repeated with the same record it does nothing.

    Args:
        prove: called right before the create: a run that slept must not write into the next job's root.

    Raises:
        SavepointExists: the name is taken. OutcomeUnknown: the record may be there; repeat the call.
    """
    folder = root.child(savepoint_path(record.name))

    def propose() -> Proposal[SavepointRecord] | None:
        if _newest_number(folder) > record.number:
            return None
        prove()
        return _proposal(record)

    taken = SavepointExists(
        f"job {record.job!r} has a savepoint {record.name!r} already; choose another name, or delete that one first"
    )
    if create_next(folder, propose, contended=lambda: taken, attempts_max=1) is None:
        raise taken


def rewrite_savepoint(
    root: Store, record: SavepointRecord, prove: Callable[[], None] = lambda: None
) -> SavepointRecord:
    """Write the owner's record again; the record of a newer owner is not changed.

    Args:
        prove: called right before the write, as in `create_savepoint`.

    Raises:
        SnapshotInUse: another process took over (or deleted it); this owner has lost it and stops.
        StoreUnavailable: it may be written.
    """
    folder = root.child(savepoint_path(record.name))
    newest = _newest_number(folder)
    if newest != record.number:
        raise SnapshotInUse(
            f"savepoint {record.name!r} in {root.url} was "
            + (f"taken over by its owner number {newest}" if newest else "deleted")
            + f"; owner number {record.number} ({record.owner}) stops and touches nothing"
        )
    prove()
    folder.put(record_path(record.number), _encoded(record))
    return record


def take_back(folder: Store, record: SavepointRecord) -> None:
    """Remove a record exactly as its owner has just written it, even if it is not the newest. Another record of that
    number stays.

    Raises:
        StoreUnavailable: it may be there.
    """
    path = record_path(record.number)
    try:
        if folder.read(path, SMALL_JSON_BYTES_MAX) == _encoded(record):
            folder.delete(path)
    except FileNotFoundError:
        return


def take_over(
    root: Store,
    record: SavepointRecord,
    state: SavepointState,
    *,
    owner: str,
    clock: Clock,
    prove: Callable[[], None] = lambda: None,
    **changes: Any,
) -> SavepointRecord:
    """Become the next owner. Atomic: of several that try, one does.

    The caller has read `record` and found that it is stale, or not open. Only one thing is checked: that it still
    counts.

    Args:
        prove: called right before the create, as in `create_savepoint`.

    Raises:
        SnapshotInUse: another process was quicker. OutcomeUnknown: read it again.
    """
    mine = replace(record.to(state, clock.now_ms(), **changes), owner=owner, number=record.number + 1)
    folder = root.child(savepoint_path(record.name))

    def propose() -> Proposal[SavepointRecord] | None:
        if _newest_number(folder) != record.number:
            return None
        prove()
        return _proposal(mine)

    lost = SnapshotInUse(
        f"savepoint {record.name!r} in {root.url} was taken over by somebody else at the same time; look at it again"
    )
    # One attempt: the loser has to read the winner's record first.
    if create_next(folder, propose, contended=lambda: lost, attempts_max=1) is None:
        raise lost
    return mine


def _proposal(record: SavepointRecord) -> Proposal[SavepointRecord]:
    return Proposal(record_path(record.number), _encoded(record), record)


def _encoded(record: SavepointRecord) -> bytes:
    return encode_document("savepoint", record, younger=YOUNGER)


def _newest_number(folder: Store) -> int:
    return max((n for n in map(owner_number_of, folder.list_names("")) if n is not None), default=0)


def _is_name(name: str) -> bool:
    try:
        check_job_name(name)
    except InvalidConfiguration:
        return False  # a foreign name: this module never makes one
    return True
