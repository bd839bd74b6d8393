"""Makes, resumes and lists savepoints of a job, whether it runs or not. Without Dagster; Spark only where a large
savepoint is written in another format."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import (
    CorruptManifest,
    InvalidConfiguration,
    MissingSnapshot,
    SnapshotInUse,
    StillstateError,
    Unavailable,
    UnsupportedFormat,
    check,
)
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.maintenance.convert.into_savepoint import convert_savepoint, convert_small
from state_runtime.maintenance.convert.snapshot import HERE_BYTES_MAX
from state_runtime.maintenance.copy.make_savepoint import (
    Convert,
    Filled,
    SavepointWork,
    resume_savepoint,
    savepoint_of_stopped,
)
from state_runtime.maintenance.links import Shared, find_links
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import (
    ControlAnswer,
    ControlRequest,
    open_requests,
    read_answer,
    request_savepoint,
    savepoint_request,
)
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.savepoint_record import (
    SavepointFormat,
    SavepointRecord,
    SavepointThen,
    SavepointTrigger,
    read_savepoint,
    savepoint_names,
)
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.snapshot.waiting import Waiting, waiting_in_savepoint
from state_runtime.store import Store, open_store
from stillstate.orchestration.config.job_location import location_of
from stillstate.orchestration.config.spec import JobSpec, Spec
from stillstate.orchestration.launchers import build_launcher
from stillstate.orchestration.recovery.health import Verdict
from stillstate.orchestration.recovery.observe import Observation, observe

__all__ = ["SavepointRow", "Savepointer", "failed", "savepoint_rows"]

POLL_S: Final = 0.2

_RUNS: Final[frozenset[Verdict]] = frozenset({"healthy", "starting"})


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
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        watch: Callable[[SavepointRecord], None] = lambda record: None,
        poll: Callable[[float], object] | None = None,
        convert: Convert = convert_small,
    ) -> None:
        self._catalog = catalog
        self._runs = runs
        self._clock = clock
        self._ids = ids
        self._watch = watch
        self._poll: Callable[[float], object] = threading.Event().wait if poll is None else poll
        owner = f"{socket.gethostname()}:{os.getpid()}"
        self._work = SavepointWork(catalog.root, owner, clock, ids, watch=watch, convert=convert)

    @staticmethod
    def of_job(spec: Spec, job: JobSpec, watch: Callable[[SavepointRecord], None]) -> Savepointer:
        """Make one for a job of the configuration."""
        job = location_of(job)
        catalog = Catalog(open_store(job.store, job.storage_options), job.name)
        launcher = build_launcher(spec, job)
        return Savepointer.watching(
            catalog, lambda: observe(job, catalog, launcher, SYSTEM_CLOCK), watch=watch, convert=_converter(job)
        )

    @staticmethod
    def watching(catalog: Catalog, look: Callable[[], Observation], **more: Any) -> Savepointer:
        """Make one for a job that is observed with `look`.

        Args:
            more: see the class.
        """

        def runs() -> RunStatus | None:
            seen = look()
            return seen.status if seen.health.verdict in _RUNS else None

        return Savepointer(catalog, runs, **more)

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
        at = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        return f"{at:%Y%m%dt%H%M%S}-{self._ids.short()[-4:]}"


def _converter(job: JobSpec) -> Convert:
    """Convert in this process; with Spark on this machine where the state is large, as `stillstate convert` does."""

    def convert(
        root: Store,
        manifest: Manifest,
        folder: Store,
        record: SavepointRecord,
        reached: Callable[[str, int, int], None],
        clock: Clock,
        ids: Ids,
    ) -> Filled:
        if manifest.total_bytes <= HERE_BYTES_MAX:
            return convert_small(root, manifest, folder, record, reached, clock, ids)
        from state_runtime.maintenance.convert.spark_job import in_tasks
        from state_runtime.spark.session import build_session

        session = build_session("stillstate-savepoint", "local[*]")
        try:
            fold, compare = in_tasks(
                session, root.url, folder.url, storage_options=job.storage_options, target_options=job.storage_options
            )
            return convert_savepoint(root, manifest, folder, record, reached, clock, ids, fold=fold, compare=compare)
        finally:
            session.stop()

    return convert


def _refuse(request: ControlRequest, given: ControlAnswer) -> None:
    if given.answer == "refused":
        raise InvalidConfiguration(f"savepoint {request.name!r} was refused: {given.message}")
    if given.answer == "void":
        raise Unavailable(f"savepoint {request.name!r} was not made: {given.message}")


@dataclass(frozen=True, kw_only=True)
class SavepointRow:
    """One line of `stillstate savepoints`.

    Attributes:
        inflight_rows, inflight_bytes: rows in flight, about; None while they are not known.
    """

    name: str
    state: str
    trigger: str
    age_s: float
    snapshot_id: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    tags: tuple[str, ...] = ()
    note: str = ""
    drained: bool = False
    attempts: int = 0
    next_attempt_s: float = 0.0
    owner: str = ""
    message: str = ""
    place: str = ""
    format: str = "native"
    shared_files: int = 0
    shared_bytes: int = 0
    shared_with: str = ""
    inflight_rows: int | None = None
    inflight_bytes: int | None = None

    @staticmethod
    def of(
        record: SavepointRecord, root_url: str, now_ms: int, shared: Shared, waiting: Waiting | None
    ) -> SavepointRow:
        """Return the row of a record, with the snapshots that share its files by hard link, and its rows in flight."""
        wait_ms = record.next_attempt_at_ms - now_ms if record.next_attempt_at_ms else 0
        return SavepointRow(
            name=record.name,
            state=record.state,
            trigger=record.trigger,
            age_s=_age_s(record.requested_at_ms, now_ms),
            snapshot_id=record.snapshot_id,
            bytes=record.total_bytes,
            copied_bytes=record.copied_bytes,
            tags=record.tags,
            note=record.note,
            drained=record.drained,
            attempts=record.attempts,
            next_attempt_s=max(0, wait_ms) / 1000,
            owner=record.owner,
            message=record.message,
            place=f"{root_url}/savepoints/{record.name}",
            format=record.format,
            shared_files=shared.files,
            shared_bytes=shared.bytes,
            shared_with=str(shared),
            inflight_rows=None if waiting is None else waiting.rows,
            inflight_bytes=None if waiting is None else waiting.bytes,
        )

    @staticmethod
    def of_request(request: ControlRequest, *, is_void: bool, now_ms: int) -> SavepointRow:
        """Return the row of a request that no record answers yet, or never will."""
        return SavepointRow(
            name=request.name,
            state="ABANDONED" if is_void else "REQUESTED",
            trigger=request.trigger,
            age_s=_age_s(request.at_ms, now_ms),
            tags=request.tags,
            note=request.note,
            message=f"the run that was asked (term {request.term}) is over"
            if is_void
            else "the run has not answered yet",
        )

    def to_json_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def savepoint_rows(catalog: Catalog, clock: Clock = SYSTEM_CLOCK) -> list[SavepointRow]:
    """Return all savepoints of a job and the open requests, newest first.

    A savepoint whose record cannot be read gets a row too; folders without a record are not shown.

    Raises:
        JobNotFound, StoreUnavailable.
    """
    catalog.job_info()
    now_ms = clock.now_ms()
    status = catalog.status()
    links = find_links(catalog.root)
    rows, known = [], set()
    for name in savepoint_names(catalog.root):
        try:
            record = read_savepoint(catalog.root, name)
        except (MissingSnapshot, InvalidConfiguration):
            continue
        except (CorruptManifest, UnsupportedFormat) as error:
            rows.append(SavepointRow(name=name, state="UNREADABLE", trigger="", age_s=0.0, message=str(error)))
            continue
        waiting = waiting_in_savepoint(catalog.root, record)
        rows.append(SavepointRow.of(record, catalog.root.url, now_ms, links.of_owner(name), waiting))
        known.add(record.uid)
    term = status.term if status is not None else 0
    for request in open_requests(catalog.root, before_term=term + 1):
        if request.request_id not in known:
            is_over = status is None or request.term < term or status.state not in ("starting", "running")
            rows.append(SavepointRow.of_request(request, is_void=is_over, now_ms=now_ms))
    return sorted(rows, key=lambda r: r.age_s)


def _age_s(at_ms: int, now_ms: int) -> float:
    return round(max(0, now_ms - at_ms) / 1000, 3)


def failed(record: SavepointRecord) -> StillstateError | None:
    """Return the error that a savepoint at rest without being COMPLETED ends the command with."""
    if record.state == "COMPLETED":
        return None
    if record.state == "IN_PROGRESS":
        return Unavailable(f"savepoint {record.name!r} is not complete: {record.message}")
    return Unavailable(f"savepoint {record.name!r} is {record.state}: {record.message or 'no reason is known'}")
