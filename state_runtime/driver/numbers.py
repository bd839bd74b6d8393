"""From acknowledgements to the numbers of an epoch, and from epochs to those of a checkpoint; pure.

A measurement in a task goes into its `Acknowledgement`; `of_epoch` is the only place that sums them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_runtime.base.progress import InflightProgress, Progress
from state_runtime.changelog.changes import UploadTotals
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.processors.operator import EpochClock
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["checkpoint_ms", "of_epoch", "of_rows_in_flight", "waited"]


def of_epoch(
    acknowledged: Sequence[Acknowledgement],
    *,
    first_stages: frozenset[int],
    source_rows: Sequence[int],
    snapshot_id: int,
    batch_id: int,
    clock: EpochClock,
    state_rows_before: int,
) -> Progress:
    """Sum the work of an epoch's tasks; the driver adds the times and the sizes of segments.

    Args:
        first_stages: the stages that get only rows which no other stage has seen. Branches of a source get the same
            rows, or fewer, so the stage with the most rows tells how many came.
        source_rows: how many rows came from each of several sources; (): of one source the stages tell it.
    """
    rows: dict[int, int] = {}
    for a in acknowledged:
        rows[a.stage] = rows.get(a.stage, 0) + a.input_rows
    came = {stage: count for stage, count in rows.items() if stage in first_stages} or dict(sorted(rows.items())[:1])
    files = [f for a in acknowledged for staged in a.staged for f in staged.files]
    uploads = sum((a.changes.uploads for a in acknowledged), UploadTotals())
    return Progress(
        snapshot_id=snapshot_id,
        batch_id=batch_id,
        timestamp_ms=clock.batch_time_ms,
        input_rows=sum(source_rows) if source_rows else max(came.values(), default=0),
        output_rows=sum(f.rows for f in files),
        state_rows=state_rows_before + sum(a.rows_added for a in acknowledged),
        changed_rows=sum(a.changed_rows for a in acknowledged),
        segment_bytes=sum(a.files.totals.bytes for a in acknowledged),
        output_bytes=sum(f.bytes for f in files),
        local_restores=sum(a.restored == "local" for a in acknowledged),
        primary_restores=sum(a.restored == "primary" for a in acknowledged),
        stale_restores=sum(a.restored == "stale" for a in acknowledged),
        restore_ms=max((a.restore_ms for a in acknowledged), default=0.0),
        restored_bytes=sum(a.restored_bytes for a in acknowledged),
        local_failures=sum(a.local_failed for a in acknowledged),
        late_rows=sum(a.late_rows for a in acknowledged),
        watermark_ms=clock.watermark_ms,
        epoch=clock.epoch,
        uploads=uploads.uploads,
        upload_attempts=uploads.attempts,
        upload_wait_ms=uploads.wait_ms,
        spilled_bytes=sum(a.spilled_bytes for a in acknowledged),
    )


def of_rows_in_flight(
    acknowledged: Sequence[tuple[str, Acknowledgement]],
    before: BatchProgress | None,
    after: BatchProgress | None,
    *,
    epoch: int,
    now_ms: int,
    dropped_rows: int,
) -> InflightProgress | None:
    """Count the rows that wait after an epoch, and its tasks' work on them; None if no rows wait or waited before.

    Args:
        acknowledged: for each task the operator's uid and the acknowledgement.
        before, after: the batch; None if none is open.
        dropped_rows: dropped since the epoch before.
    """
    passes = after.passes if after is not None else ()
    if not passes and not (before is not None and before.passes) and not dropped_rows:
        return None
    took = [(a.processed_at_ms - a.began_at_ms, uid, a.shard) for uid, a in acknowledged if a.began_at_ms]
    slowest_ms, uid, shard = max(took, default=(0, "", 0))
    return InflightProgress(
        rows=sum(p.rows for p in passes),
        bytes=sum(p.bytes for p in passes),
        oldest_ms=max((now_ms - p.read_at_ms for p in passes), default=0),
        new_rows=sum(p.rows for p in passes if p.epoch == epoch),
        processed_rows=sum(a.processed_rows for _, a in acknowledged),
        slices=sum(a.slices for _, a in acknowledged),
        read_bytes=sum(a.inflight_read_bytes for _, a in acknowledged),
        dropped_rows=dropped_rows,
        slowest=f"{uid}/{shard}" if uid else "",
        slowest_ms=float(slowest_ms),
    )


def waited(progress: Progress, alignment_ms: float) -> Progress:
    """Return the numbers of an epoch with the time that its checkpoint waited for its rows; `phases_ms` has it too, see
    `Progress.alignment_ms`."""
    inflight = progress.inflight
    return (
        replace(progress, inflight=replace(inflight, alignment_ms=alignment_ms)) if inflight is not None else progress
    )


def checkpoint_ms(processed_at_ms: int, durable_at_ms: int, *, own_ms: float, epoch_ms: float) -> float:
    """Return how long a checkpoint took: from the last row processed, in any task, to the durable manifest.

    The two ends are wall clocks of two hosts. So the difference is limited by two durations of the driver's monotonic
    clock: at least its time after the action, at most the time of the whole epoch.

    Args:
        processed_at_ms: the latest of all tasks; 0 if no row was processed.
        durable_at_ms: on the driver.
        own_ms: from the end of the action to the durable manifest.
        epoch_ms: from the beginning of the epoch to the durable manifest.
    """
    measured_ms = float(durable_at_ms - processed_at_ms) if processed_at_ms else own_ms
    return min(max(measured_ms, own_ms), max(epoch_ms, own_ms))
