"""Savepoints of a job that runs: heard of with the heartbeat, begun between two epochs, copied beside the stream.

    request ──hear──▶ REQUESTED ──begin──▶ pinned ──worker──▶ IN_PROGRESS ──▶ COMPLETED | FAILED
    (control/)        (heartbeat's thread) (epochs' thread)   (a thread of its own)

What happens to the job is a checkpoint that would have come later, and two small requests to the store (the pin).
Whatever happens to a savepoint, the job goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from state_runtime.base import faults
from state_runtime.base.clock import Clock
from state_runtime.base.errors import Invalid, SnapshotInUse, StillstateError
from state_runtime.base.ids import Ids
from state_runtime.maintenance.convert.into_savepoint import convert_small
from state_runtime.maintenance.copy.make_savepoint import (
    PIN_LASTS_MS,
    Convert,
    SavepointWork,
    holder_of,
    resume_savepoint,
)
from state_runtime.snapshot.control import Answer, ControlAnswer, ControlRequest, answer, open_requests
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.pins import pin_snapshot, read_pins
from state_runtime.snapshot.savepoint_record import (
    SavepointRecord,
    check_tags,
    create_savepoint,
    list_savepoints,
    rewrite_savepoint,
)
from state_runtime.store import Store

__all__ = ["Savepoints"]

_LOG = logging.getLogger(__name__)
_JOIN_S = 10.0


@dataclass(frozen=True)
class _Asked:
    """A savepoint that somebody waits for."""

    request: ControlRequest
    record: SavepointRecord


class Savepoints:
    """The savepoints of one run. Nothing in here raises for what a savepoint meets; `hear` does for a store that does
    not answer.

    Life cycle: `start` once the run is fenced off others → (`hear` | `begin`)* → `wait` → `close`. What is then not
    complete is left for the next run, or for `stillstate savepoint --resume`.
    """

    def __init__(
        self,
        root: Store,
        info: JobInfo,
        term: int,
        *,
        clock: Clock,
        ids: Ids,
        prove: Callable[[], None] = lambda: None,
        convert: Convert = convert_small,
    ) -> None:
        self._info = info
        self._term = term
        self._work = SavepointWork(
            root=root,
            owner=f"{socket.gethostname()}:{os.getpid()}",
            clock=clock,
            ids=ids,
            prove=prove,
            convert=convert,
        )
        self._records: dict[str, SavepointRecord] = {}
        self._asked: list[_Asked] = []
        self._begun: deque[_Asked] = deque()
        self._left: deque[str] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stillstate-savepoints", daemon=True)

    def start(self) -> None:
        """Begin to work in a thread; first on what earlier runs left."""
        self._thread.start()

    # --- the heartbeat's thread ----------------------------------------------------------------------------------

    def hear(self, request: ControlRequest) -> None:
        """Take the name for a request, or refuse it. Repeat it after an error.

        Raises:
            StoreUnavailable, OutcomeUnknown: it is not known whether the name was taken.
        """
        try:
            record = self._records.setdefault(request.request_id, self._requested(request))
            create_savepoint(self._work.root, record, self._work.prove)
        except Invalid as error:
            _LOG.warning("savepoint %s is refused: %s", request.name, error)
            self._answer(request, "refused", str(error))
            return
        faults.reach("savepoint-requested")
        _LOG.info("savepoint %s is asked for (then: %s)", request.name, request.then)
        with self._changed:
            if self._closed:
                return  # void: the next run says so
            if all(a.request.request_id != request.request_id for a in self._asked):
                self._asked.append(_Asked(request, record))

    def _requested(self, request: ControlRequest) -> SavepointRecord:
        return SavepointRecord(
            name=request.name,
            uid=request.request_id,
            job=self._info.name,
            job_uid=self._info.uid,
            state="REQUESTED",
            trigger=request.trigger,
            requested_at_ms=request.at_ms,
            owner=self._work.owner,
            heartbeat_at_ms=self._work.clock.now_ms(),
            then=request.then,
            tags=check_tags(request.tags, request.note),
            note=request.note,
            format=request.format,
            independent=request.independent,
            drain_inflight=request.drain_inflight,
            term=self._term,
        )

    # --- the epochs' thread --------------------------------------------------------------------------------------

    def is_asked(self, *, batch_is_open: bool = False) -> bool:
        """Whether a checkpoint is wanted for a savepoint.

        Args:
            batch_is_open: rows may be in flight, which not every savepoint takes.
        """
        with self._changed:
            return any(
                a.request.then != "drain" and not (batch_is_open and a.request.takes_no_rows) for a in self._asked
            )

    @property
    def is_drain_asked(self) -> bool:
        """Whether the job is to end its input, for a savepoint of what is left then."""
        with self._changed:
            return any(a.request.then == "drain" for a in self._asked)

    def begin(self, manifest: Manifest) -> bool:
        """Make what was asked for from the newest snapshot; one after the end of all input only if the snapshot is, and
        one without rows in flight only if it has none.

        Returns:
            Whether one of them is the last thing that the run does.
        """
        with self._changed:
            chosen = [a for a in self._asked if _fits(a.request, manifest)]
            self._asked = [a for a in self._asked if a not in chosen]
        for asked in chosen:
            self._pin(asked.request.name, manifest.snapshot_id)
            record = asked.record.to(
                "IN_PROGRESS",
                self._work.clock.now_ms(),
                snapshot_id=manifest.snapshot_id,
                drained=manifest.drained,
            )
            with self._changed:
                self._begun.append(replace(asked, record=record))
                self._changed.notify_all()
        return any(a.request.then != "continue" for a in chosen)

    def _pin(self, name: str, snapshot_id: int) -> None:
        work = self._work
        try:
            work.prove()
            pin_snapshot(
                work.root, snapshot_id, reason="savepoint", holder=holder_of(name), clock=work.clock, ids=work.ids,
                lasts_ms=PIN_LASTS_MS,
            )  # fmt: skip
        except (StillstateError, OSError):
            # The copy pins it before it begins; until then the snapshot is one of the newest.
            _LOG.warning("the snapshot of savepoint %s could not be pinned yet", name, exc_info=True)

    # --- the run's end -------------------------------------------------------------------------------------------

    def wait(self, is_enough: Callable[[], bool]) -> bool:
        """Wait until all that was begun is complete, or failed for good; whether it is.

        Args:
            is_enough: asked now and then; ends the waiting.
        """
        with self._changed:
            while self._begun and self._thread.is_alive():
                if is_enough():
                    return False
                self._changed.wait(0.1)
            return not self._begun

    def close(self, reason: str) -> None:
        """End the work. What was asked for and not begun is void; what is not complete is left to others."""
        with self._changed:
            self._closed = True
            void, self._asked = self._asked, []
            self._work.ended.set()
            self._changed.notify_all()
        for asked in void:
            message = f"the run of term {self._term} ended before it made the snapshot: {reason}"
            try:
                abandoned = asked.record.to("ABANDONED", self._work.clock.now_ms(), message=message)
                rewrite_savepoint(self._work.root, abandoned, self._work.prove)
                self._answer(asked.request, "void", message)
            except (StillstateError, OSError):
                # The next run finds it REQUESTED by a run that is over.
                _LOG.warning("savepoint %s could not be marked as abandoned", asked.request.name, exc_info=True)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # --- the worker's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.look_back()
        while True:
            with self._changed:
                while not (self._begun or self._left or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
            self.do_one()

    def do_one(self) -> bool:
        """Make the savepoint whose turn it is, what was begun now before what was left; whether there was one."""
        with self._changed:
            begun = self._begun[0] if self._begun else None
            name = self._left.popleft() if begun is None and self._left else ""
        if begun is not None:
            self._make(begun)
            with self._changed:
                self._begun.popleft()
                self._changed.notify_all()
        elif name:
            self._go_on_with(name)
        return begun is not None or bool(name)

    def look_back(self) -> None:
        """Find what earlier runs left; they are over, since this one has fenced them. Whatever is then done about it
        proves whose root it is."""
        work = self._work
        try:
            records = list_savepoints(work.root)
            begun = {r.uid: r for r in records if r.state in ("IN_PROGRESS", "COMPLETED")}
            for request in open_requests(work.root, before_term=self._term):
                record = begun.get(request.request_id)
                if record is not None:
                    self._answer(request, "accepted", snapshot_id=record.snapshot_id)
                else:
                    self._answer(request, "void", f"term {request.term} ended without answering; ask again")
            held = {pin.holder for pin in read_pins(work.root) if pin.reason == "savepoint"}
            for record in records:
                if record.state == "COMPLETED" and holder_of(record.name) in held:
                    self._left.append(record.name)  # its owner ended before it had looked again and let go
                is_over = 0 < record.term < self._term and record.number == 1
                if record.state in ("REQUESTED", "IN_PROGRESS") and (is_over or record.is_stale(work.clock.now_ms())):
                    self._left.append(record.name)
        except Exception:
            # They wait for the next run, or for `--resume`.
            _LOG.exception("could not look for unfinished savepoints")

    def _go_on_with(self, name: str) -> None:
        try:
            record = resume_savepoint(self._work, name, force=True)
            _LOG.info("savepoint %s of an earlier run is %s", name, record.state)
        except Exception:
            _LOG.exception("savepoint %s of an earlier run could not be resumed", name)

    def _make(self, asked: _Asked) -> None:
        answered = False

        def watch(record: SavepointRecord) -> None:
            nonlocal answered
            if not answered:
                # The record is written, so whoever has the answer finds it.
                self._answer(asked.request, "accepted", snapshot_id=record.snapshot_id)
                answered = True
                faults.reach("savepoint-begun")

        try:
            record = replace(self._work, watch=watch).carry_out(asked.record)
            _LOG.info("savepoint %s of snapshot %d is %s", record.name, record.snapshot_id, record.state)
        except SnapshotInUse as error:
            _LOG.warning("%s", error)
        except Exception:
            # The job must go on, whatever happened here. The record gets stale, and others can resume the savepoint.
            _LOG.exception("savepoint %s", asked.request.name)

    def _answer(self, request: ControlRequest, given: Answer, message: str = "", snapshot_id: int = 0) -> None:
        now_ms = self._work.clock.now_ms()
        self._work.prove()
        answer(self._work.root, request, ControlAnswer(request.request_id, given, now_ms, message, snapshot_id))


def _fits(request: ControlRequest, manifest: Manifest) -> bool:
    """Whether a snapshot is one that was asked for."""
    if request.then == "drain" and not manifest.drained:
        return False
    return manifest.open_batch is None or not request.takes_no_rows
