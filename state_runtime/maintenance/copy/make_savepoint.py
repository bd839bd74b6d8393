"""Makes a savepoint from a snapshot: pinned, copied below `savepoints/<name>/`, completed; in several attempts, by the
current owner.

A crash at any point leaves a record of the progress, a pin that keeps the snapshot, and objects that need not be copied
again. Any process may continue from there (`resume_savepoint`): the job's next run does, and `stillstate savepoint
--resume`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from state_runtime.base import faults
from state_runtime.base.clock import Clock, time_text
from state_runtime.base.errors import (
    CorruptData,
    Fenced,
    InvalidConfiguration,
    MissingSnapshot,
    SnapshotInUse,
    StillstateError,
    Unavailable,
)
from state_runtime.base.ids import Ids
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.maintenance.copy.objects import CopyProgress, copy_snapshot
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, format_of
from state_runtime.snapshot.paths import JOB_FILE, manifest_path, savepoint_path
from state_runtime.snapshot.pins import pin_snapshot, read_pins, renew_pin, unpin
from state_runtime.snapshot.savepoint_record import (
    ATTEMPTS_MAX,
    HEARTBEAT_S,
    STALE_MS,
    SavepointFormat,
    SavepointRecord,
    SavepointTrigger,
    check_tags,
    create_savepoint,
    owner_number_of,
    read_savepoint,
    retry_wait_ms,
    rewrite_savepoint,
    take_back,
    take_over,
)
from state_runtime.snapshot.term_files import read_status
from state_runtime.store import Created, Store

__all__ = [
    "PIN_LASTS_MS",
    "Convert",
    "Filled",
    "LeftToOthers",
    "SavepointWork",
    "holder_of",
    "pin_for_savepoint",
    "release_pins",
    "resume_savepoint",
    "savepoint_of_stopped",
]

_LOG = logging.getLogger(__name__)

_THREADS = 8
"""Objects copied at the same time: the driver reads and compares them beside its stream."""

# The pin of a savepoint outlives its process, because any process may resume the copy: the snapshot is kept for this
# time after the last attempt began. (A pin that ends with the work is a `KeptPin`.)
PIN_LASTS_MS = 7 * 24 * 3600 * 1000


class LeftToOthers(Exception):
    """This process does not write the savepoint's content; the message says which process can."""


@dataclass(frozen=True)
class Filled:
    """The content of a savepoint's folder without its records: its data and its manifest."""

    objects: int
    bytes: int


Convert = Callable[[Store, Manifest, Store, SavepointRecord, Callable[[str, int, int], None], Clock, Ids], Filled]
"""Writes a snapshot of a root into a savepoint's folder in the format of the record, manifest last. The callable
argument is called with (phase, done, total). Raises what `write_converted` raises, and `LeftToOthers`."""


class _Ended(Exception):
    """The work on the savepoint was asked to end."""


@dataclass
class SavepointWork:
    """The context for work on the savepoints of a job.

    Attributes:
        owner: for people, `host:pid`.
        ended: set it to end the work soon; any process can resume the savepoint.
        wait: sleeps for the given seconds or until the work is asked to end; returns whether it is. Returns at once in
            tests.
        watch: called on every change of a record, and with the copy's progress.
        convert: writes savepoints in another format than the job's own (maintenance/convert/into_savepoint.py).
        prove: raises if the root is not the caller's any more (snapshot/ownership.py); called before each write of a
            record or a pin.
    """

    root: Store
    owner: str
    clock: Clock
    ids: Ids
    ended: threading.Event = field(default_factory=threading.Event)
    wait: Callable[[float], bool] | None = None
    watch: Callable[[SavepointRecord], None] = lambda record: None
    prove: Callable[[], None] = lambda: None
    convert: Convert | None = None

    def carry_out(self, record: SavepointRecord) -> SavepointRecord:
        """Copy an own savepoint that is IN_PROGRESS; attempts, with pauses that double, until it is COMPLETED or
        FAILED.

        Never raises for errors of the store or the snapshot: the returned record has them.

        Raises:
            SnapshotInUse: another owner took it over. Fenced: the root is not the caller's any more.
        """
        while True:
            try:
                return self._attempt(record)
            except KeyboardInterrupt:
                self._hand_over(record)
                raise
            except _Ended:
                return self._hand_over(record)
            except LeftToOthers as left:
                return self._hand_over(record, str(left))
            except (SnapshotInUse, Fenced):
                raise
            except Exception as error:
                _LOG.warning("savepoint %s: attempt %d failed", record.name, record.attempts + 1, exc_info=True)
                again = isinstance(error, Unavailable | OSError) and not isinstance(error, CorruptData)
                record = self._after_failure(record, _one_line(error), again=again)
            if record.state != "IN_PROGRESS":
                return record
            pause_s = max(0, record.next_attempt_at_ms - self.clock.now_ms()) / 1000
            if (self.wait or self.ended.wait)(pause_s):
                return self._hand_over(record)

    def _attempt(self, record: SavepointRecord) -> SavepointRecord:
        now_ms = self.clock.now_ms()
        record = self._write(record.to("IN_PROGRESS", now_ms, attempts=record.attempts + 1, next_attempt_at_ms=0))
        pin_for_savepoint(self.root, record.name, record.snapshot_id, clock=self.clock, ids=self.ids, prove=self.prove)
        faults.reach("savepoint-pinned")
        folder = self.root.child(savepoint_path(record.name))
        job = self.root.read(JOB_FILE, SMALL_JSON_BYTES_MAX)
        if folder.create(JOB_FILE, job) is not Created.MINE:
            raise InvalidConfiguration(f"{folder.url} holds another job's {JOB_FILE}; nothing was overwritten")
        beaten_s = self.clock.monotonic_s()

        def progress(done: CopyProgress) -> None:
            nonlocal record, beaten_s
            faults.reach("savepoint-object-copied")
            if self.ended.is_set():
                raise _Ended
            record = _with_progress(record, done)
            self.watch(record)
            if self.clock.monotonic_s() - beaten_s >= HEARTBEAT_S:
                record = self._write(record.to("IN_PROGRESS", self.clock.now_ms()))
                beaten_s = self.clock.monotonic_s()

        def reached(phase: str, done: int, total: int) -> None:
            nonlocal record, beaten_s
            faults.reach("savepoint-converting")
            if self.ended.is_set():
                raise _Ended
            record = replace(record, message=f"{phase}: {done} of {total}")
            self.watch(record)
            if self.clock.monotonic_s() - beaten_s >= HEARTBEAT_S:
                record = self._write(record.to("IN_PROGRESS", self.clock.now_ms()))
                beaten_s = self.clock.monotonic_s()

        manifest = Catalog.of_root(self.root, self.clock).manifest(record.snapshot_id)
        if record.format == "native":
            result = self._copy(manifest, folder, record, progress)
        elif self.convert is not None:
            result = self.convert(self.root, manifest, folder, record, reached, self.clock, self.ids)
        else:
            raise LeftToOthers(f"format {record.format} is written by `stillstate savepoint … --resume`")
        faults.reach("savepoint-copied")
        numbers = {
            "copied_bytes": result.bytes,
            "total_bytes": result.bytes,
            "copied_objects": result.objects,
            "total_objects": result.objects,
        }
        record = self._write(record.to("COMPLETED", self.clock.now_ms(), message="", **numbers))
        faults.reach("savepoint-completed")
        return self.settle(record)

    def settle(self, record: SavepointRecord, *, is_mine: bool = True) -> SavepointRecord:
        """Finish a COMPLETED savepoint: check that the folder still exists, then release the snapshot.

        A store that does not answer is asked again, with pauses. If it stays away the pin stays too: the pin shows the
        job's next run, or `--resume`, that this check is missing, and they do it.

        Args:
            is_mine: this process has just written the record. A savepoint that another process completed may be damaged
                since: then its record stays, for people.

        Raises:
            SnapshotInUse: it was deleted while its owner slept; nothing is left of it.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                self._look_again(record, is_mine=is_mine)
            except (Unavailable, OSError):
                _LOG.warning("savepoint %s: whether it is still there is not known", record.name, exc_info=True)
                if attempt == ATTEMPTS_MAX or (self.wait or self.ended.wait)(retry_wait_ms(attempt) / 1000):
                    return record
            else:
                break
        release_pins(self.root, record.name, self.prove)
        return record

    def _copy(
        self, manifest: Manifest, folder: Store, record: SavepointRecord, progress: Callable[[CopyProgress], None]
    ) -> Filled:
        result = copy_snapshot(
            self.root,
            manifest,
            folder,
            rewrite=_without_outputs if manifest.outputs else None,
            progress=progress,
            threads=_THREADS,
            # Damage in the job's object would also be in a hard link to it, or in the store's own copy of it.
            verified=True,
            independent=record.independent,
            prove=self.prove,
            clock=self.clock,
            ids=self.ids,
        )
        return Filled(result.objects, result.bytes)

    def _after_failure(self, record: SavepointRecord, message: str, *, again: bool) -> SavepointRecord:
        """Record a failed attempt. If the store refuses this record, the next one includes it."""
        stored: SavepointRecord | None = None
        try:
            # The stored record may be newer than this process knows: the answer to its write may have been lost.
            stored = read_savepoint(self.root, record.name)
        except MissingSnapshot as error:
            raise SnapshotInUse(f"savepoint {record.name!r} was deleted while it was made; nothing goes on") from error
        except (StillstateError, OSError):
            _LOG.warning("savepoint %s: its record could not be read", record.name, exc_info=True)
        if stored is not None and stored.number == record.number and stored.state == "COMPLETED":
            return self.settle(stored)
        record = replace(record, attempts=record.attempts + 1)
        record = record.failed_attempt(self.clock.now_ms(), message, again=again)
        try:
            record = self._write(record)
            if record.state == "FAILED":
                release_pins(self.root, record.name, self.prove)
        except SnapshotInUse:
            raise
        except (StillstateError, OSError):
            _LOG.warning("savepoint %s: its record could not be written", record.name, exc_info=True)
        return record

    def _hand_over(self, record: SavepointRecord, why: str = "") -> SavepointRecord:
        """Release the savepoint: the next process may continue at once."""
        try:
            stored = read_savepoint(self.root, record.name)
            if stored.number != record.number or stored.state != "IN_PROGRESS":
                return stored
            said = why or f"{self.owner} ended; `--resume` goes on"
            return self._write(stored.to("IN_PROGRESS", 0, message=said))
        except (StillstateError, OSError):
            # The record becomes stale without a write.
            _LOG.warning("savepoint %s could not be handed over", record.name, exc_info=True)
            return record

    def _write(self, record: SavepointRecord) -> SavepointRecord:
        record = rewrite_savepoint(self.root, record, self.prove)
        self.watch(record)
        return record

    def _look_again(self, record: SavepointRecord, *, is_mine: bool) -> None:
        """Take back a COMPLETED record of a folder that was deleted while its owner slept.

        Raises:
            SnapshotInUse: the folder was deleted; nothing is left of it.
            StoreUnavailable: it is not known.
        """
        folder = self.root.child(savepoint_path(record.name))
        if folder.exists(manifest_path(record.snapshot_id)) and folder.exists(JOB_FILE):
            return
        if not is_mine and any(owner_number_of(found.path) is None for found in folder.list_objects("")):
            return
        # Keeps a record that an older backup restored under the same number. Removes this record even if a deletion
        # under way has written a later one.
        take_back(folder, record)
        raise SnapshotInUse(
            f"savepoint {record.name!r} in {self.root.url} was deleted while its owner ({record.owner}) slept; its "
            "record was taken back. Make another one if it is still wanted"
        )


def savepoint_of_stopped(
    work: SavepointWork,
    name: str,
    *,
    trigger: SavepointTrigger = "user",
    tags: tuple[str, ...] = (),
    note: str = "",
    format: SavepointFormat = "native",
    independent: bool = False,
) -> SavepointRecord:
    """Make a savepoint of the job's newest snapshot, without a driver. The job may run or start meanwhile; it is not
    changed.

    Returns:
        The record, COMPLETED or FAILED (or handed over, if the work was asked to end).

    Raises:
        InvalidConfiguration: name, tag or note. SavepointExists: the name is taken.
        JobNotFound, MissingSnapshot: there is nothing to save. CorruptManifest, UnsupportedFormat, StoreUnavailable.
    """
    root, clock = work.root, work.clock
    catalog = Catalog.of_root(root, clock)
    info = catalog.job_info()
    manifest = catalog.latest()
    if manifest is None:
        raise MissingSnapshot(f"job {info.name!r} in {root.url} has no snapshot yet; the first epoch makes one")
    now_ms = clock.now_ms()
    record = SavepointRecord(
        name=name,
        uid=work.ids.uid(),
        job=info.name,
        job_uid=info.uid,
        state="IN_PROGRESS",
        trigger=trigger,
        requested_at_ms=now_ms,
        owner=work.owner,
        heartbeat_at_ms=now_ms,
        tags=check_tags(tags, note),
        note=note,
        snapshot_id=manifest.snapshot_id,
        drained=manifest.drained,
        format=format,
        independent=independent,
    )
    create_savepoint(root, record)
    faults.reach("savepoint-requested")
    return work.carry_out(record)


def resume_savepoint(work: SavepointWork, name: str, *, force: bool = False) -> SavepointRecord:
    """Continue a savepoint whose owner is gone, or that failed. A COMPLETED one only loses its pin.

    Args:
        force: do not wait for a long silence of its owner: the caller knows that the owner is gone.

    Raises:
        MissingSnapshot: there is no savepoint of that name. SnapshotInUse: a process works on it, or it is being
            deleted, or it never began.
    """
    record = read_savepoint(work.root, name)
    now_ms = work.clock.now_ms()
    if record.state == "COMPLETED":
        return work.settle(record, is_mine=False)
    if record.state in ("DELETING", "ABANDONED"):
        raise SnapshotInUse(
            f"savepoint {name!r} is {record.state}{': ' + record.message if record.message else ''}; "
            "delete it, and make another one"
        )
    if record.is_open and not force and not _is_left(work.root, record, now_ms):
        raise SnapshotInUse(
            f"savepoint {name!r} is {record.state}, and the last sign of {record.owner} was at "
            f"{time_text(record.heartbeat_at_ms)}; wait, or end that process"
        )
    if record.state == "REQUESTED":
        # It has no snapshot yet, and a snapshot taken now would be later than requested.
        gone = take_over(
            work.root,
            record,
            "ABANDONED",
            owner=work.owner,
            clock=work.clock,
            prove=work.prove,
            message=f"the run that was asked (term {record.term}) ended before it made the snapshot",
        )
        release_pins(work.root, name, work.prove)
        return gone
    # Attempts of an owner that died count; those of a savepoint that FAILED do not.
    attempts = {"attempts": 0} if record.state == "FAILED" else {}
    record = take_over(
        work.root, record, "IN_PROGRESS", owner=work.owner, clock=work.clock, prove=work.prove, **attempts
    )
    return work.carry_out(record)


def _without_outputs(manifest: Manifest) -> Manifest:
    """Remove the outputs: a savepoint has no side effects, and the job itself publishes its checkpoint's output."""
    epoch = manifest.epoch or manifest.snapshot_id  # before format 3 there was no other number
    return replace(manifest, format_version=format_of(manifest), epoch=epoch, outputs=())


def _is_left(root: Store, record: SavepointRecord, now_ms: int) -> bool:
    """Whether no process is at work on an open savepoint."""
    if record.state != "REQUESTED":
        return record.is_stale(now_ms)
    # The requested run does not update the record during a long epoch: look at the run's status.
    status = read_status(root)
    return status is None or status.term != record.term or not status.is_live(now_ms, STALE_MS / 1000)


def pin_for_savepoint(
    root: Store,
    name: str,
    snapshot_id: int,
    *,
    clock: Clock,
    ids: Ids,
    prove: Callable[[], None] = lambda: None,
) -> None:
    """Keep the snapshot until the savepoint is complete; an existing pin is renewed.

    Args:
        prove: called right before each change.

    Raises:
        SnapshotExpired: the snapshot expired.
    """
    holder = holder_of(name)
    for pin in read_pins(root):
        if (pin.snapshot_id, pin.reason, pin.holder) != (snapshot_id, "savepoint", holder):
            continue
        prove()
        if pin.is_void(clock.now_ms()):
            unpin(root, pin)  # it kept nothing: the new pin checks again whether the snapshot exists
        else:
            renew_pin(root, pin, lasts_ms=PIN_LASTS_MS, clock=clock)
            return
    prove()
    pin_snapshot(root, snapshot_id, reason="savepoint", holder=holder, clock=clock, ids=ids, lasts_ms=PIN_LASTS_MS)


def release_pins(root: Store, name: str, prove: Callable[[], None] = lambda: None) -> None:
    """Release the savepoint's pins on snapshots of the job. A store's refusal is logged: the pin expires later.

    Args:
        prove: called right before each pin is removed; if it raises, the pin is another's by now.
    """
    try:
        for pin in read_pins(root):
            if pin.reason == "savepoint" and pin.holder == holder_of(name):
                prove()
                unpin(root, pin)
    except (StillstateError, OSError):
        _LOG.warning("the pin of savepoint %s could not be taken off", name, exc_info=True)


def holder_of(name: str) -> str:
    """Return the holder name in a savepoint's pin."""
    return f"savepoint {name}"


def _with_progress(record: SavepointRecord, done: CopyProgress) -> SavepointRecord:
    return replace(
        record,
        copied_bytes=done.bytes_done,
        total_bytes=done.bytes,
        copied_objects=done.objects_done,
        total_objects=done.objects,
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]
