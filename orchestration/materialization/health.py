"""Materializations of a job as recorded on the store, of any process: their health, and whether the next one is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from state_runtime.base.errors import CorruptData, UnsupportedFormat
from state_runtime.materialize.plan import due
from state_runtime.materialize.records import PIN_LIVE_MS, Pin, Record, open_pins, read_pin, read_record, record_ids
from state_runtime.materialize.trigger import MaterializationResult
from state_runtime.snapshot.catalog import Catalog
from stillstate.orchestration.config.spec import JobSpec, to_settings

__all__ = [
    "FAILURES_ALARMED",
    "MaterializationHealth",
    "log_bytes_left",
    "materialization_health",
    "materialization_numbers",
    "new_records",
    "record_numbers",
    "why_due",
]

FAILURES_ALARMED: Final = 3
"""Materializations that fail in a row before a notification is sent: one or two are a temporary fault of the store."""

_PINS_READ_MAX: Final = 16


def log_bytes_left(catalog: Catalog, folded_to: int) -> int:
    """Return the bytes of changelog after the snapshot `folded_to`, which a restart replays once that fold is
    adopted."""
    latest = catalog.latest()
    if latest is None:
        return 0
    return sum(segment.total_bytes for segment in latest.segments if segment.snapshot_id > folded_to)


def materialization_numbers(result: MaterializationResult, log_left: int) -> dict[str, int | float]:
    """Return the numbers of a call, by names that the command line's JSON and Dagster's plots share; all are always
    present."""
    return _numbers(result.snapshot_id, result.duration_s, result.log_bytes_folded, result.written_bytes, log_left) | {
        "ranges": result.ranges,
        "rows": result.rows,
        "read_bytes": result.read_bytes,
        "shared_tables": result.shared_tables,
    }


def record_numbers(record: Record, log_left: int | None) -> dict[str, int | float]:
    """Return the same numbers of a record; without the rest of the log if it is not known any more."""
    seconds = max(0, record.finished_at_ms - record.started_at_ms) / 1000
    return _numbers(record.snapshot_id, seconds, record.log_bytes, record.written_bytes, log_left) | {
        "ranges": record.ranges,
        "rows": record.rows,
        "read_bytes": record.read_bytes,
        "shared_tables": record.shared_tables,
    }


def _numbers(snapshot_id: int, seconds: float, folded: int, written: int, left: int | None) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {
        "snapshot_id": snapshot_id,
        "duration_s": float(seconds),
        "log_bytes_folded": folded,
        "written_bytes": written,
        "write_amplification": written / folded if folded else 0.0,
    }
    return numbers if left is None else {**numbers, "log_bytes_left": left}


# --- whether a fold is due, and the health of folds --------------------------------------------------------------


@dataclass(frozen=True)
class MaterializationHealth:
    """The job's newest materializations, of the driver, of Dagster, or of a person.

    Attributes:
        last_id: the newest that was begun; 0 if none was.
        running: the newest is under way: its record was updated less than a minute ago.
        failed_in_a_row: number of the newest ones that failed, or whose records were never updated again.
        last_done_at_ms: when the newest that succeeded ended; 0 if none did.
    """

    last_id: int = 0
    running: bool = False
    failed_in_a_row: int = 0
    last_done_at_ms: int = 0


def materialization_health(catalog: Catalog, now_ms: int) -> MaterializationHealth:
    """Read it from the store: the one place that has every materialization, also one whose process was killed.

    Raises:
        StoreUnavailable: nothing is known then.
    """
    root = catalog.root
    done, started = record_ids(root)
    if not done and not started:
        return MaterializationHealth()
    last_done = max(done, default=0)
    failed, running = 0, False
    for record_id in [n for n in reversed(open_pins(root)) if n > last_done][:_PINS_READ_MAX]:
        pin = _pin(catalog, record_id)
        if pin is not None and pin.state == "running" and now_ms - pin.heartbeat_ms < PIN_LIVE_MS:
            running = running or failed == 0
        else:
            failed += 1
    return MaterializationHealth(max([*done, *started]), running, failed, _done_at_ms(catalog, last_done))


def _pin(catalog: Catalog, record_id: int) -> Pin | None:
    try:
        return read_pin(catalog.root, record_id)
    except (CorruptData, UnsupportedFormat):
        return None  # its writer did not finish


def _done_at_ms(catalog: Catalog, record_id: int) -> int:
    if not record_id:
        return 0
    try:
        return read_record(catalog.root, record_id).finished_at_ms
    except (CorruptData, UnsupportedFormat, FileNotFoundError):
        return 0  # its user refuses it; here only the time is needed


def new_records(catalog: Catalog, after: int, limit: int) -> tuple[list[Record], list[str]]:
    """Return the records after an id, at most `limit`, ascending; and the errors of those that cannot be read.

    Raises:
        StoreUnavailable: nothing is known then.
    """
    found, problems = [], []
    for record_id in [n for n in record_ids(catalog.root)[0] if n > after][:limit]:
        try:
            found.append(read_record(catalog.root, record_id))
        except (CorruptData, UnsupportedFormat, FileNotFoundError) as error:
            problems.append(f"materialization {record_id}: {error}")
    return found, problems


def why_due(spec: JobSpec, catalog: Catalog, health: MaterializationHealth, now_ms: int) -> tuple[int, str] | None:
    """Return the newest snapshot and why its log should be folded now; None if it need not be."""
    latest = catalog.latest()
    if latest is None:
        return None
    since_s = (now_ms - health.last_done_at_ms) / 1000 if health.last_done_at_ms else None
    why = due(latest, to_settings(spec), since_s=since_s)
    return None if why is None else (latest.snapshot_id, why)
