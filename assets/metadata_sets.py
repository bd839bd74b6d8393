"""The metadata of checkpoints and runs as typed sets: a field is a metadata key, its type is what Dagster plots; pure.

A plot follows its key, so a field that is renamed ends a plot and begins another. Dagster's own `NamespacedMetadataSet`
puts a prefix before each key and leaves empty ones out, which would break plots that exist and put holes into others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import get_type_hints

import dagster as dg

from state_runtime.base.progress import Progress
from state_runtime.snapshot.manifest import Manifest

__all__ = ["CheckpointNumbers", "Number", "RunNumbers", "numbers_metadata"]

Number = dg.IntMetadataValue | dg.FloatMetadataValue


@dataclass(frozen=True, kw_only=True)
class CheckpointNumbers:
    """The numbers of one checkpoint."""

    snapshot_id: int
    term: int
    batch_id: int
    duration_s: float
    checkpoint_s: float
    input_rows: int
    output_rows: int
    changed_rows: int
    rows_per_s: float
    state_rows: int
    segment_bytes: int
    output_bytes: int
    log_bytes: int
    log_segments: int
    table_bytes: int
    parallelism: int
    local_restores: int
    primary_restores: int
    stale_restores: int
    moved_shards: int
    restore_s: float
    restored_bytes: int
    local_failures: int
    epoch: int
    epochs: int
    uploads: int
    upload_attempts: int
    upload_wait_s: float
    late_rows: int
    watermark_lag_s: float

    @staticmethod
    def of(manifest: Manifest, progress: Progress) -> CheckpointNumbers:
        """From a snapshot, and from the numbers of the epoch that ended with it."""
        lag_ms = max(0, progress.timestamp_ms - progress.watermark_ms) if progress.watermark_ms else 0
        return CheckpointNumbers(
            snapshot_id=manifest.snapshot_id,
            term=manifest.term,
            batch_id=progress.batch_id,
            duration_s=progress.duration_ms / 1000,
            checkpoint_s=progress.checkpoint_ms / 1000,
            input_rows=progress.input_rows,
            output_rows=progress.output_rows,
            changed_rows=progress.changed_rows,
            rows_per_s=progress.rows_per_s,
            state_rows=progress.state_rows,
            segment_bytes=progress.segment_bytes,
            output_bytes=progress.output_bytes,
            log_bytes=manifest.log_bytes,
            log_segments=len(manifest.segments),
            table_bytes=manifest.table_bytes,
            parallelism=manifest.parallelism,
            local_restores=progress.local_restores,
            primary_restores=progress.primary_restores,
            stale_restores=progress.stale_restores,
            moved_shards=progress.moved_shards,
            restore_s=progress.restore_ms / 1000,
            restored_bytes=progress.restored_bytes,
            local_failures=progress.local_failures,
            epoch=progress.epoch,
            epochs=progress.epochs,
            uploads=progress.uploads,
            upload_attempts=progress.upload_attempts,
            upload_wait_s=progress.upload_wait_ms / 1000,
            late_rows=progress.late_rows,
            watermark_lag_s=lag_ms / 1000,
        )


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """What a new run of the driver begins with."""

    term: int
    snapshot_id: int
    operators: int
    log_bytes: int
    table_bytes: int
    restore_bytes: int

    @staticmethod
    def of(manifest: Manifest) -> RunNumbers:
        """From the snapshot by which the run took the job."""
        return RunNumbers(
            term=manifest.term,
            snapshot_id=manifest.snapshot_id,
            operators=len(manifest.operators),
            log_bytes=manifest.log_bytes,
            table_bytes=manifest.table_bytes,
            restore_bytes=manifest.total_bytes,
        )


def numbers_metadata(numbers: CheckpointNumbers | RunNumbers) -> dict[str, Number]:
    """A set as Dagster's metadata, each number as the type that its field has: a plot never changes its type."""
    kinds = get_type_hints(type(numbers))
    return {
        name: dg.IntMetadataValue(value) if kinds[name] is int else dg.FloatMetadataValue(float(value))
        for name, value in ((f.name, getattr(numbers, f.name)) for f in dataclasses.fields(numbers))
    }
