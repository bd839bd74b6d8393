"""The metadata of checkpoints and runs as typed sets: a field is a metadata key, its type is the type that Dagster
plots; pure.

A plot follows its key, so a field that is renamed ends a plot and begins another. Dagster sorts plots by key: names
begin with their subject and end with their unit. Dagster's own `NamespacedMetadataSet` puts a prefix before each key
and leaves empty ones out, which would break existing plots and put holes into others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_type_hints

import dagster as dg

from state_runtime.base.progress import Progress
from state_runtime.base.source_state import SourceState
from stillstate.orchestration.probes.points import Point

__all__ = ["IntervalNumbers", "Number", "RunNumbers", "numbers_metadata", "rounded", "source_metadata"]

Number = dg.IntMetadataValue | dg.FloatMetadataValue


@dataclass(frozen=True, kw_only=True)
class IntervalNumbers:
    """The plotted numbers of a job's checkpoints: the newest one's size, and the content of its interval.

    Twelve, so that the page is seen at once. No number that is constant while a job is well: those are in tables. If an
    interval had more checkpoints than were read, `interval_input_rows` and `interval_log_bytes` are estimates: the mean
    of those read, times their number.

    Attributes:
        checkpoint_s: of the newest: from the last row processed to the durable manifest.
        epoch_max_s, epoch_p50_s, epoch_p99_s: durations of the epochs that ended in the checkpoints read.
        interval_log_bytes: changelog that was written.
        interval_rows_per_s: input rows by the time from the first to the last checkpoint read, in which the stream may
            have waited for rows; of one checkpoint, by its duration.
        inflight_rows: that were read and wait in the newest.
        lag_s: how far the watermark is behind the clock; 0 without one.
        log_bytes: the changelog that a restart from the newest replays.
    """

    checkpoint_s: float
    epoch_max_s: float
    epoch_p50_s: float
    epoch_p99_s: float
    inflight_rows: int
    interval_checkpoints: int
    interval_input_rows: int
    interval_log_bytes: int
    interval_rows_per_s: float
    lag_s: float
    log_bytes: int
    state_rows: int

    @staticmethod
    def of(points: Sequence[Point], count: int) -> IntervalNumbers:
        """Return the numbers of an interval.

        Args:
            points: checkpoints that were read, ascending; the last is the newest of all.
            count: checkpoints that there were.
        """
        newest = points[-1]
        last = newest.progress or Progress(snapshot_id=newest.snapshot_id)
        read = [point.progress for point in points if point.progress is not None] or [last]
        durations = sorted(progress.duration_ms / 1000 for progress in read)
        share = max(count, len(points)) / len(read)
        busy_s = sum(durations)
        rows = sum(progress.input_rows for progress in read)
        spanned_s = (newest.at_ms - points[0].at_ms) / 1000
        later_rows = sum(point.progress.input_rows for point in points[1:] if point.progress is not None)
        return IntervalNumbers(
            checkpoint_s=last.checkpoint_ms / 1000,
            epoch_max_s=durations[-1],
            epoch_p50_s=_quantile(durations, 0.50),
            epoch_p99_s=_quantile(durations, 0.99),
            inflight_rows=last.inflight.rows if last.inflight is not None else 0,
            interval_checkpoints=max(count, len(points)),
            interval_input_rows=round(rows * share),
            interval_log_bytes=round(sum(progress.segment_bytes for progress in read) * share),
            interval_rows_per_s=_rate(later_rows, spanned_s) if spanned_s > 0 else _rate(rows, busy_s),
            lag_s=max(0, last.timestamp_ms - last.watermark_ms) / 1000 if last.watermark_ms else 0.0,
            log_bytes=newest.log_bytes,
            state_rows=last.state_rows,
        )


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """The numbers with which a new run of the driver begins."""

    term: int
    snapshot_id: int
    restored_from: int
    operators: int
    log_bytes: int
    table_bytes: int
    restore_bytes: int

    @staticmethod
    def of(point: Point) -> RunNumbers:
        """Return the numbers of the snapshot by which the run took the job."""
        return RunNumbers(
            term=point.term,
            snapshot_id=point.snapshot_id,
            restored_from=point.restored_from,
            operators=point.operators,
            log_bytes=point.log_bytes,
            table_bytes=point.table_bytes,
            restore_bytes=point.total_bytes,
        )


def numbers_metadata(numbers: IntervalNumbers | RunNumbers) -> dict[str, Number]:
    """Return a set as Dagster's metadata, each number as the type that its field has: a plot never changes its type."""
    kinds = get_type_hints(type(numbers))
    return {
        name: dg.IntMetadataValue(value) if kinds[name] is int else dg.FloatMetadataValue(rounded(float(value)))
        for name, value in ((f.name, getattr(numbers, f.name)) for f in dataclasses.fields(numbers))
    }


def source_metadata(sources: Sequence[SourceState], now_ms: int) -> dict[str, Number]:
    """Return how far a job is behind its sources, and when the first of them removes what it has not read. Only numbers
    that a source has: a job has them always or never, so that a plot has no holes and none is empty.

    Args:
        sources: of a heartbeat.
        now_ms: of the heartbeat.
    """
    answered = [source for source in sources if source.asked_at_ms]
    if not answered:
        return {}
    found: dict[str, Number] = {
        "source_oldest_unread_s": dg.FloatMetadataValue(rounded(max(s.age_s(now_ms) for s in answered))),
    }
    for unit in sorted({s.unit for s in answered}):
        waiting = sum(max(0, s.behind) for s in answered if s.unit == unit)
        found[f"source_unread_{unit}"] = dg.IntMetadataValue(waiting)
    if any(s.unit == "files" for s in answered):
        found["source_unread_bytes"] = dg.IntMetadataValue(sum(max(0, s.behind_bytes) for s in answered))
    left_s = min(source.left_s(now_ms) for source in answered)
    if left_s != float("inf"):
        found["source_retention_left_h"] = dg.FloatMetadataValue(rounded(left_s / 3600))
    return found


def rounded(value: float) -> float:
    """Round for people: three digits behind the point below ten, one above."""
    return round(value, 3 if abs(value) < 10 else 1)


def _rate(rows: int, seconds: float) -> float:
    return rows / seconds if seconds > 0 else 0.0


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Return the quantile by nearest rank: a duration that occurred."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
