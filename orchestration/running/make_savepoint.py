"""Makes, resumes and lists savepoints of a job, whether it runs or not. Without Dagster; Spark only where a large
savepoint is written in another format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import (
    CorruptManifest,
    InvalidConfiguration,
    MissingSnapshot,
    StillstateError,
    Unavailable,
    UnsupportedFormat,
)
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.maintenance.convert.into_savepoint import convert_savepoint, convert_small
from state_runtime.maintenance.convert.snapshot import HERE_BYTES_MAX
from state_runtime.maintenance.copy.make_savepoint import (
    Convert,
    Filled,
)
from state_runtime.maintenance.copy.savepointer import Savepointer
from state_runtime.maintenance.links import Shared, find_links
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import (
    ControlRequest,
    open_requests,
)
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.savepoint_record import (
    SavepointRecord,
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

__all__ = ["SavepointRow", "failed", "savepoint_rows", "savepointer_of", "savepointer_watching"]

_RUNS: Final[frozenset[Verdict]] = frozenset({"healthy", "starting"})


def savepointer_of(spec: Spec, job: JobSpec, watch: Callable[[SavepointRecord], None]) -> Savepointer:
    """Return what makes savepoints of a job of the configuration.

    Args:
        watch: gets every change of a record that is waited for.
    """
    job = location_of(job)
    catalog = Catalog(open_store(job.store, job.storage_options), job.name)
    launcher = build_launcher(spec, job)
    return savepointer_watching(
        catalog, lambda: observe(job, catalog, launcher, SYSTEM_CLOCK), watch=watch, convert=_converter(job)
    )


def savepointer_watching(catalog: Catalog, look: Callable[[], Observation], **more: Any) -> Savepointer:
    """Return what makes savepoints of a job that is observed with `look`.

    Args:
        more: see `Savepointer`.
    """

    def runs() -> RunStatus | None:
        seen = look()
        return seen.status if seen.health.verdict in _RUNS else None

    return Savepointer(catalog, runs, **{"clock": SYSTEM_CLOCK, "ids": SYSTEM_IDS, "convert": convert_small, **more})


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
