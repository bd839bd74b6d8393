"""The numbers of one epoch; the counterpart of Spark's `StreamingQueryProgress`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

__all__ = [
    "ALIGNMENT",
    "NOT_IN_MANIFESTS",
    "NO_ROWS_ASIDE",
    "InflightProgress",
    "Progress",
    "RowsAside",
    "together",
    "with_times",
]

ALIGNMENT: Final = "alignment"
"""A phase, not a field: earlier versions accept phases with any names, so they can read such manifests."""

# Numbers of epochs that are added up for the checkpoint in which they end. Other numbers are the newest epoch's.
_SUMMED = (
    "input_rows",
    "output_rows",
    "changed_rows",
    "duration_ms",
    "segment_bytes",
    "output_bytes",
    "local_restores",
    "primary_restores",
    "stale_restores",
    "restored_bytes",
    "moved_shards",
    "local_failures",
    "late_rows",
    "epochs",
    "uploads",
    "upload_attempts",
    "upload_wait_ms",
    "spilled_bytes",
)
_LONGEST = ("restore_ms", "checkpoint_ms")
NOT_IN_MANIFESTS: Final = ("skipped_rows", "future_rows", "bad_rows")
"""Fields that are of runs alone: an earlier version would refuse a manifest that has them."""


@dataclass(frozen=True)
class InflightProgress:
    """Rows that epochs read and did not process: those that wait now, and those processed or dropped.

    Attributes:
        rows, bytes: of the rows that wait after the epoch, approximately; bytes in memory.
        oldest_ms: how long the oldest of them have waited.
        new_rows: the waiting rows that this epoch read.
        processed_rows: rows that operators processed in this epoch, both new and from earlier ones.
        slices: number of slices in which tasks processed them.
        alignment_ms: that of the epoch; in snapshots of earlier versions the time between the ends of tasks.
        read_bytes: of rows from earlier epochs, read from the primary store.
        dropped_rows: rows that the run dropped as requested (`drop_inflight`).
        slowest: operator and shard of the task that took longest, as in "orders/3"; empty if none ran.
        slowest_ms: how long that task took.
    """

    rows: int = 0
    bytes: int = 0
    oldest_ms: int = 0
    new_rows: int = 0
    processed_rows: int = 0
    slices: int = 0
    alignment_ms: float = 0.0
    read_bytes: int = 0
    dropped_rows: int = 0
    slowest: str = ""
    slowest_ms: float = 0.0


@dataclass(frozen=True)
class RowsAside:
    """The rows of an epoch that did not count as the others do.

    Attributes:
        future: per source the rows whose event time is further ahead than its bound.
        bad: per step that drops rows by conditions, by its place in the graph, the rows that failed one.
    """

    future: Mapping[str, int] = field(default_factory=dict)
    bad: Mapping[int, int] = field(default_factory=dict)


NO_ROWS_ASIDE: Final = RowsAside()


@dataclass(frozen=True)
class Progress:
    """Numbers of one epoch, or (in a manifest) of all epochs that end in one checkpoint, together.

    Names carry their units; the same names are used in Dagster's metadata.

    Attributes:
        snapshot_id: the checkpoint in which the epoch ends, or will end.
        batch_id: Spark's micro-batch.
        timestamp_ms: the epoch's clock: Spark's batch timestamp, equal on a re-execution.
        input_rows: rows that reached the first stateful operator.
        output_rows: rows written to all sinks.
        rows_per_s: input rows / duration.
        state_rows: live rows in all states after the epoch (a key of a value state is one row).
        changed_rows: rows that the epoch wrote to the changelog, after folding.
        duration_ms: the whole epoch, from Spark's call to the published output.
        checkpoint_ms: from the last row processed (in any task) to the durable manifest; 0 if the epoch made no
            checkpoint. docs/operations.md says what it includes.
        phases_ms: plan, process, segment, manifest, publish; `publish NAME` of each sink, if several publish side by
            side; and `alignment`, the part of the first two that is
            `alignment_ms`, if it is not 0.
        segment_bytes: changelog bytes written in this epoch, direct objects included.
        log_bytes: changelog bytes that a restart would replay.
        log_segments: segments that a restart would replay.
        table_bytes: bytes of the state tables below that log.
        output_bytes: bytes of the staged output files.
        local_restores: shards that began this epoch from verified local runs of an earlier run.
        primary_restores: shards that were rebuilt from the primary store.
        late_rows: input rows that operators dropped as late.
        watermark_ms: the epoch's watermark; 0 if it has none.
        local_failures: local writes that failed, so that the shard restores from the primary store next time, and
            removals of outdated local files that failed.
        epoch: number of the epoch, over all runs.
        epochs: epochs since the last checkpoint, this one included: those that end in this one.
        stale_restores: shards that were rebuilt from an older local copy and the changelog since.
        restore_ms: the longest time that one shard took to restore.
        restored_bytes: read from the primary store for restores.
        moved_shards: shards that ran on another executor than in the epoch before.
        uploads: objects that tasks uploaded themselves.
        upload_attempts: attempts at those and at the segment; more than objects if one was slow.
        upload_wait_ms: time that tasks waited because too many bytes were in flight.
        materializations: materializations that this run has adopted, its own and those of others.
        materialization_failures: of its own, in a row; an alarm is due at 3.
        spilled_bytes: of rows that waited on hosts' disks because a task had more than it may hold.
        inflight: None unless rows are in flight after the epoch, or were before it.
        skipped_rows: rows that sources skipped because they are gone (Kafka with failOnDataLoss=false), since the epoch
            before; only those that the driver's Java reports. Not in manifests.
        future_rows: rows whose event time is further ahead of the clock than `max_ahead`. Not in manifests.
        bad_rows: rows that failed a condition of `expect_or_drop`. Not in manifests.
    """

    snapshot_id: int = 0
    batch_id: int = -1
    timestamp_ms: int = 0
    input_rows: int = 0
    output_rows: int = 0
    rows_per_s: float = 0.0
    state_rows: int = 0
    changed_rows: int = 0
    duration_ms: float = 0.0
    checkpoint_ms: float = 0.0
    phases_ms: dict[str, float] = field(default_factory=dict)
    segment_bytes: int = 0
    log_bytes: int = 0
    log_segments: int = 0
    table_bytes: int = 0
    output_bytes: int = 0
    local_restores: int = 0
    primary_restores: int = 0
    local_failures: int = 0
    late_rows: int = 0
    watermark_ms: int = 0
    epoch: int = 0
    epochs: int = 1
    stale_restores: int = 0
    restore_ms: float = 0.0
    restored_bytes: int = 0
    moved_shards: int = 0
    uploads: int = 0
    upload_attempts: int = 0
    upload_wait_ms: float = 0.0
    materializations: int = 0
    materialization_failures: int = 0
    spilled_bytes: int = 0
    inflight: InflightProgress | None = None
    skipped_rows: int = 0
    future_rows: int = 0
    bad_rows: int = 0

    @property
    def alignment_ms(self) -> float:
        """How long the checkpoint waited for rows: from when it was due to the last row processed, in any task. So
        with `checkpoint_ms` it is the time from due to durable.

        The checkpoint interval decides when a checkpoint is due; without one, the end of the time that the mode gives
        an epoch: none in `aligned`. 0 if the rows were done before, if no checkpoint followed, and in snapshots of
        versions that did not count it.
        """
        return self.phases_ms.get(ALIGNMENT, 0.0)

    def to_json_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)


def together(earlier: Progress | None, later: Progress) -> Progress:
    """Combine the numbers of two consecutive stretches of epochs to those of one."""
    if earlier is None:
        return later
    phases = {
        name: earlier.phases_ms.get(name, 0.0) + later.phases_ms.get(name, 0.0)
        for name in [*earlier.phases_ms, *(n for n in later.phases_ms if n not in earlier.phases_ms)]
    }
    summed = {name: getattr(earlier, name) + getattr(later, name) for name in _SUMMED}
    longest = {name: max(getattr(earlier, name), getattr(later, name)) for name in _LONGEST}
    both = replace(later, **summed, **longest, inflight=_both(earlier.inflight, later.inflight))
    return with_times(both, both.duration_ms, phases)


def _both(earlier: InflightProgress | None, later: InflightProgress | None) -> InflightProgress | None:
    """Return the rows that wait at the end of both, and the sums of the rest."""
    if earlier is None or later is None:
        return later or (replace(earlier, rows=0, bytes=0, oldest_ms=0, new_rows=0) if earlier is not None else None)
    slower = max((earlier, later), key=lambda each: each.slowest_ms)
    return replace(
        later,
        processed_rows=earlier.processed_rows + later.processed_rows,
        slices=earlier.slices + later.slices,
        alignment_ms=earlier.alignment_ms + later.alignment_ms,
        read_bytes=earlier.read_bytes + later.read_bytes,
        dropped_rows=earlier.dropped_rows + later.dropped_rows,
        slowest=slower.slowest,
        slowest_ms=slower.slowest_ms,
    )


def with_times(progress: Progress, duration_ms: float, phases_ms: Mapping[str, float]) -> Progress:
    """Return the numbers with their times, and the rate that follows."""
    rate = progress.input_rows / duration_ms * 1000 if duration_ms > 0 else 0.0
    return replace(progress, duration_ms=duration_ms, phases_ms=dict(phases_ms), rows_per_s=rate)
