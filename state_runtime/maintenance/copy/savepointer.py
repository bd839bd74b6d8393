"""Makes and resumes savepoints of one job, whether it runs or not: by its driver if one lives, else in this process."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from state_runtime.base.clock import Clock, time_text
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot, SnapshotInUse, Unavailable, check
from state_runtime.base.ids import Ids
from state_runtime.maintenance.copy.make_savepoint import (
    Convert,
    SavepointWork,
    resume_savepoint,
    savepoint_of_stopped,
)
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import (
    ControlAnswer,
    ControlRequest,
    read_answer,
    request_savepoint,
    savepoint_request,
)
from state_runtime.snapshot.savepoint_record import (
    SavepointFormat,
    SavepointRecord,
    SavepointThen,
    SavepointTrigger,
    read_savepoint,
)
from state_runtime.snapshot.term_files import RunStatus

__all__ = ["Savepointer"]

POLL_S: Final = 0.2


class Savepointer:
    """Makes savepoints of one job: by the driver if one lives, else in this process.

    Args:
        runs: whether a driver lives, from its newest heartbeat.
        watch: gets every change of a record that is waited for.
        poll: waits between two looks at the store; returns at once in tests.
        convert: writes formats that the job does not write.
    """

    def __init__(
        self,
        catalog: Catalog,
        runs: Callable[[], RunStatus | None],
        *,
        clock: Clock,
        ids: Ids,
        convert: Convert,
        watch: Callable[[SavepointRecord], None] = lambda record: None,
        poll: Callable[[float], object] | None = None,
    ) -> None:
        self._catalog = catalog
        self._runs = runs
        self._clock = clock
        self._ids = ids
        self._watch = watch
        self._poll: Callable[[float], object] = threading.Event().wait if poll is None else poll
        owner = f"{socket.gethostname()}:{os.getpid()}"
        self._work = SavepointWork(catalog.root, owner, clock, ids, watch=watch, convert=convert)

    def make(
        self,
        name: str | None = None,
        *,
        then: SavepointThen = "continue",
        trigger: SavepointTrigger = "user",
        tags: tuple[str, ...] = (),
        note: str = "",
        format: SavepointFormat = "native",
        independent: bool = False,
        drain_inflight: bool = False,
        wait: bool = True,
    ) -> SavepointRecord | ControlRequest:
        """Make a savepoint of the running job, or of the newest snapshot of one that does not run.

        Args:
            name: by default the time, and some characters.
            then: what a running job does after it.
            format, independent, drain_inflight: see `SavepointRecord`.
            wait: until it is complete. Without it the request is returned, and its result is not known. A job that does
                not run is always waited for.

        Returns:
            The record, COMPLETED, FAILED or ABANDONED; or the request.

        Raises:
            JobNotFound, MissingSnapshot: there is nothing to save. SavepointExists, InvalidConfiguration: refused.
            Unavailable: the run ended before it answered.
        """
        self._catalog.job_info()
        chosen = name if name is not None else self.new_name()
        status = self._runs()
        if status is None:
            if then == "drain":
                raise InvalidConfiguration(
                    f"job {self._catalog.job!r} does not run: only a driver can drain it. Start it first"
                )
            if drain_inflight or format == "canonical":
                self._refuse_rows_in_flight()
            return savepoint_of_stopped(
                self._work,
                chosen,
                trigger=trigger,
                tags=tags,
                note=note,
                format=format,
                independent=independent,
            )
        request = request_savepoint(
            self._catalog.root, status.term, chosen, clock=self._clock, ids=self._ids, then=then, trigger=trigger,
            tags=tags, note=note, format=format, independent=independent, drain_inflight=drain_inflight,
        )  # fmt: skip
        return self._until_made(request) if wait else request

    def _refuse_rows_in_flight(self) -> None:
        newest = self._catalog.latest()
        if newest is not None and newest.open_batch is not None:
            raise InvalidConfiguration(
                f"snapshot {newest.snapshot_id} of job {self._catalog.job!r} has rows in flight, and the job does not "
                "run: only a driver can process them. Start it, or make a native savepoint, which keeps them"
            )

    def make_or_join(self, name: str, **asked: Any) -> SavepointRecord:
        """Call `make` and wait; or wait for the savepoint of this name that an earlier call, whose caller is gone, has
        requested or begun. Repeat it after any error.

        Args:
            asked: as of `make`; the same as the earlier call's.

        Raises:
            the errors of `make`, but never that the name is taken.
        """
        asked_for = self._asked_for(name)
        if asked_for is not None:
            return self._until_made(asked_for)
        try:
            found = read_savepoint(self._catalog.root, name)
        except MissingSnapshot:
            made = self.make(name, **asked)
            check(isinstance(made, SavepointRecord), "a savepoint that is waited for is made")
            assert isinstance(made, SavepointRecord)
            return made
        return self.resume(name) if found.state == "FAILED" else self.wait_for(name)

    def is_term_live(self, term: int) -> bool:
        """Whether the run of that term lives, as far as its heartbeat says."""
        status = self._runs()
        return status is not None and status.term == term

    def _asked_for(self, name: str) -> ControlRequest | None:
        """Return the request for it to the run that lives now, answered or not."""
        status = self._runs()
        return None if status is None else savepoint_request(self._catalog.root, status.term, name)

    def _until_made(self, request: ControlRequest) -> SavepointRecord:
        self._wait_for_answer(request)
        made = self.wait_for(request.name)
        while request.then != "continue" and self.is_term_live(request.term):
            self._poll(POLL_S)
        return made

    def resume(self, name: str) -> SavepointRecord:
        """Resume one whose owner is gone, or that failed; in this process. See `resume_savepoint`."""
        self._catalog.job_info()
        return resume_savepoint(self._work, name)

    def wait_for(self, name: str) -> SavepointRecord:
        """Wait until a savepoint is at rest; if its owner goes away meanwhile, resume it here."""
        while True:
            record = read_savepoint(self._catalog.root, name)
            self._watch(record)
            if not record.is_open or record.state == "DELETING":
                return record
            if record.is_stale(self._clock.now_ms()):
                try:
                    return self.resume(name)
                except SnapshotInUse:
                    continue  # another process was faster, or the run lives after all
                finally:
                    self._poll(POLL_S)
            self._poll(POLL_S)

    def _wait_for_answer(self, request: ControlRequest) -> None:
        while True:
            # In this order: a run that answers and ends in between is not taken for one that did not answer.
            runs = self._runs()
            given = read_answer(self._catalog.root, request)
            if given is not None:
                _refuse(request, given)
                return
            if runs is None or runs.term != request.term:
                raise Unavailable(
                    f"the run of term {request.term} ended before it made savepoint {request.name!r}, "
                    "so the request is void. Ask again: of a job that does not run, the newest snapshot is saved"
                )
            self._poll(POLL_S)

    def new_name(self) -> str:
        """Return a name made from the time."""
        digits = re.sub("[-:Z]", "", time_text(self._clock.now_ms())).replace(" ", "t")
        return f"{digits}-{self._ids.short()[-4:]}"


def _refuse(request: ControlRequest, given: ControlAnswer) -> None:
    if given.answer == "refused":
        raise InvalidConfiguration(f"savepoint {request.name!r} was refused: {given.message}")
    if given.answer == "void":
        raise Unavailable(f"savepoint {request.name!r} was not made: {given.message}")
