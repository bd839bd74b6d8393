"""The condition of a job in numbers against the limits of its `checks` section; from its store alone, whether it runs
or not.

A check without data is never green: it reports the missing data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from typing import Final

from state_runtime.base.errors import MissingSnapshot
from state_runtime.materialize.plan import replay_s
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.savepoint_record import list_savepoints
from stillstate.orchestration.config.sections import ProcessingTime
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.text import duration_text, time_text
from stillstate.orchestration.upkeep.judged import CheckName, Judged
from stillstate.orchestration.upkeep.source_checks import judge_lag, judge_retention

__all__ = ["CheckName", "Judged", "judge", "limits_of"]

_DAY_MS: Final = 86_400_000
_GROWING: Final = 3
"""Checkpoints in a row with more rows in flight than the one before: a single one is a batch that was just read."""
_LATE_LOOK: Final = 20
"""Snapshots that are read to find those with input."""


def limits_of(job: JobSpec) -> dict[CheckName, float]:
    """Return the checks that a job has: those with a limit."""
    checks = job.checks
    found: dict[CheckName, float | None] = {
        "replay_time_bounded": checks.replay_s,
        "rows_on_time": checks.late_checkpoints,
        "state_growth": checks.state_growth,
        "savepoint_recent": checks.savepoint_age_s,
        "backlog": checks.backlog_s,
        "source_lag": checks.source_lag_s,
        "retention_margin": checks.retention_margin_s,
    }
    return {name: limit for name, limit in found.items() if limit is not None}


def judge(job: JobSpec, catalog: Catalog) -> list[Judged]:
    """Judge a job by its newest snapshot, its savepoints and the newest heartbeat.

    Raises:
        JobNotFound: it was never started. CorruptData, UnsupportedFormat: the newest snapshot cannot be read.
        StoreUnavailable: nothing is known.
    """
    catalog.job_info()
    limits = limits_of(job)
    newest = catalog.latest()
    judges: dict[CheckName, Callable[[Catalog, Manifest, float], Judged]] = {
        "replay_time_bounded": _replay,
        "rows_on_time": _on_time,
        "state_growth": _growth,
        "savepoint_recent": _savepoint,
        "backlog": _backlog,
        "source_lag": partial(_lag, job),
        "retention_margin": _retention,
    }
    if newest is None:
        return [_unknown(name, "the job has no snapshot yet") for name in limits]
    return [judges[name](catalog, newest, limit) for name, limit in limits.items()]


def _unknown(check: CheckName, why: str) -> Judged:
    return Judged(check, False, f"nothing is known: {why}", is_known=False)


def _replay(catalog: Catalog, newest: Manifest, limit_s: float) -> Judged:
    seconds = replay_s(newest.log_bytes)
    numbers = {"replay_s": round(seconds, 3), "limit_s": limit_s, "log_bytes": newest.log_bytes}
    text = f"a restart replays about {duration_text(seconds)} of log"
    if seconds <= limit_s:
        return Judged("replay_time_bounded", True, text, numbers=numbers)
    more = f"{text}, more than {duration_text(limit_s)}: fold it (`stillstate materialize {catalog.job}`)"
    return Judged("replay_time_bounded", False, more, numbers=numbers)


def _on_time(catalog: Catalog, newest: Manifest, limit: float) -> Judged:
    """Whether the newest checkpoints that had input dropped all of it as late. A watermark that is ahead of its rows
    never falls, so this does not pass by itself."""
    late = 0
    for manifest in islice(_newest_first(catalog, newest), _LATE_LOOK):
        numbers = manifest.progress
        if manifest.kind != "checkpoint" or numbers is None or not numbers.input_rows:
            continue
        if numbers.late_rows < numbers.input_rows:
            break
        late += 1
        if late >= limit:
            break
    found = {"late_checkpoints": late, "limit": limit}
    if late < limit:
        return Judged("rows_on_time", True, "rows come before the watermark has passed their time", numbers=found)
    reached = newest.time.watermark_ms if newest.time is not None else 0
    text = (
        f"the newest {late} checkpoints with input dropped as many rows as late as came in: the watermark is at "
        f"{time_text(reached)}. If a row with a wrong time moved it there, bound such times (`max_ahead_s`) and go "
        f"back to a snapshot before it (`stillstate rollback {catalog.job}`)"
    )
    return Judged("rows_on_time", False, text, numbers=found)


def _newest_first(catalog: Catalog, newest: Manifest) -> Iterator[Manifest]:
    """Yield the existing snapshots, the newest first."""
    yield newest
    for snapshot_id in reversed([i for i in catalog.snapshot_ids() if i < newest.snapshot_id]):
        try:
            yield catalog.manifest(snapshot_id)
        except MissingSnapshot:
            continue  # expired meanwhile


def _growth(catalog: Catalog, newest: Manifest, limit: float) -> Judged:
    before = _a_day_before(catalog, newest)
    if before is None:
        return _unknown("state_growth", "no snapshot is a day older than the newest; `retention.keep_daily` keeps some")
    rows_before, rows = _rows(before), _rows(newest)
    if not rows_before:
        return _unknown("state_growth", f"snapshot {before.snapshot_id}, a day ago, had no rows or did not count them")
    times = rows / rows_before
    numbers = {"growth": round(times, 4), "limit": limit, "rows": rows, "rows_a_day_before": rows_before}
    text = f"{times:.2f} times the rows of snapshot {before.snapshot_id}, a day before"
    return Judged(
        "state_growth", times <= limit, text if times <= limit else f"{text}: more than {limit:g}", True, numbers
    )


def _rows(manifest: Manifest) -> int:
    return manifest.progress.state_rows if manifest.progress is not None else 0


def _a_day_before(catalog: Catalog, newest: Manifest) -> Manifest | None:
    """Return the newest snapshot that is at least a day older than the newest of all; found in a few reads."""
    ids = [i for i in catalog.snapshot_ids() if i < newest.snapshot_id]
    found: Manifest | None = None
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        try:
            manifest = catalog.manifest(ids[middle])
        except MissingSnapshot:  # expired meanwhile; newer ones may still exist
            low = middle + 1
            continue
        if manifest.created_at_ms <= newest.created_at_ms - _DAY_MS:
            found, low = manifest, middle + 1
        else:
            high = middle
    return found


def _savepoint(catalog: Catalog, newest: Manifest, limit_s: float) -> Judged:
    complete = [record for record in list_savepoints(catalog.root) if record.state == "COMPLETED"]
    if not complete:
        return Judged("savepoint_recent", False, "there is no savepoint that is complete", numbers={"limit_s": limit_s})
    last = max(complete, key=lambda record: record.finished_at_ms)
    age_s = max(0, catalog.clock.now_ms() - last.finished_at_ms) / 1000
    numbers = {"age_s": age_s, "limit_s": limit_s}
    text = f"the newest savepoint, {last.name!r}, was complete at {time_text(last.finished_at_ms)}"
    if age_s <= limit_s:
        return Judged("savepoint_recent", True, text, numbers=numbers)
    return Judged(
        "savepoint_recent", False, f"{text}, more than {duration_text(limit_s)} before this look", numbers=numbers
    )


def _backlog(catalog: Catalog, newest: Manifest, limit_s: float) -> Judged:
    """Judge the backlog by the watermark and by rows in flight: how long the oldest has waited, and whether their
    number grows from checkpoint to checkpoint."""
    now_ms, time = catalog.clock.now_ms(), newest.time
    waiting = newest.open_batch.operators if newest.open_batch is not None else ()
    numbers: dict[str, float] = {"limit_s": limit_s}
    told, wrong = [], []
    if time is not None and time.watermark_ms:
        numbers["behind_s"] = behind_s = max(0, now_ms - time.watermark_ms) / 1000
        told.append(text := f"the watermark is at {time_text(time.watermark_ms)}")
        wrong += [f"{text}, more than {duration_text(limit_s)} behind the clock"] if behind_s > limit_s else []
    if waiting:
        oldest_ms = min(o.read_at_ms for o in waiting)
        numbers["inflight_age_s"] = age_s = max(0, now_ms - oldest_ms) / 1000
        numbers["inflight_rows"] = rows = _in_flight(newest)
        text = f"about {rows:,} rows are in flight ({', '.join(o.uid for o in waiting)})"
        oldest = f"{text}, the oldest since {time_text(oldest_ms)}"
        told.append(oldest)
        wrong += [f"{oldest}, longer than {duration_text(limit_s)}"] if age_s > limit_s else []
        before = _in_flight_before(catalog, newest)
        if len(before) == _GROWING and all(low < high for low, high in pairwise((*before, rows))):
            wrong.append(f"{text}, more at each of the last checkpoints: {', '.join(f'{n:,}' for n in before)} before")
    if not told:
        return _unknown("backlog", "the job has no watermark, which says how far its input has come")
    return Judged("backlog", not wrong, "; ".join(wrong or told), numbers=numbers)


def _in_flight(manifest: Manifest) -> int:
    return sum(o.rows for o in manifest.open_batch.operators) if manifest.open_batch is not None else 0


def _in_flight_before(catalog: Catalog, newest: Manifest) -> list[int]:
    """Return the rows in flight in the existing snapshots before the newest, the oldest first."""
    found = []
    for snapshot_id in [i for i in catalog.snapshot_ids() if i < newest.snapshot_id][-_GROWING:]:
        try:
            found.append(_in_flight(catalog.manifest(snapshot_id)))
        except MissingSnapshot:
            continue  # expired meanwhile
    return found


def _lag(job: JobSpec, catalog: Catalog, newest: Manifest, limit_s: float) -> Judged:
    status, now_ms = catalog.status(), catalog.clock.now_ms()
    trigger_s = job.trigger.processing_time_s if isinstance(job.trigger, ProcessingTime) else 0.0
    is_live = status is not None and status.is_live(now_ms, job.recovery.heartbeat_timeout_s)
    return judge_lag(status, now_ms, limit_s, trigger_s=trigger_s, is_live=is_live)


def _retention(catalog: Catalog, newest: Manifest, limit_s: float) -> Judged:
    return judge_retention(catalog.status(), catalog.clock.now_ms(), limit_s)
