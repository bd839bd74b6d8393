"""A snapshot as Dagster metadata; pure.

Dagster plots integer and float entries only, and a plot follows its name: names are stable, carry their units, and
are always present, so that a plot has no holes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dagster as dg

from assets.specs import checkpoints_key, materialized_key, stream_key
from orchestration.folding.health import record_numbers
from orchestration.text import time_text
from state_runtime.base.progress import Progress
from state_runtime.materialize.records import Record
from state_runtime.snapshot.manifest import Manifest

__all__ = [
    "DATA_VERSION_TAG",
    "checkpoint_materialization",
    "checkpoint_metadata",
    "fold_materialization",
    "fold_metadata",
    "run_materialization",
]

DATA_VERSION_TAG: Final = "dagster/data_version"
TERM_TAG: Final = "stillstate/term"

Number = dg.IntMetadataValue | dg.FloatMetadataValue


def checkpoint_metadata(manifest: Manifest, complete: Progress | None = None) -> dict[str, Number]:
    """The numbers of one checkpoint, each under a stable name with its unit.

    Args:
        complete: the epoch's complete numbers, where they are known (`Catalog.progress`); a manifest's own times end
            where it is written.
    """
    progress = complete or manifest.progress or Progress(snapshot_id=manifest.snapshot_id)
    phases = {f"phase_{name}_s": _seconds(ms) for name, ms in sorted(progress.phases_ms.items())}
    return {
        "snapshot_id": dg.IntMetadataValue(manifest.snapshot_id),
        "term": dg.IntMetadataValue(manifest.term),
        "batch_id": dg.IntMetadataValue(progress.batch_id),
        "duration_s": _seconds(progress.duration_ms),
        "checkpoint_s": _seconds(progress.checkpoint_ms),
        "input_rows": dg.IntMetadataValue(progress.input_rows),
        "output_rows": dg.IntMetadataValue(progress.output_rows),
        "changed_rows": dg.IntMetadataValue(progress.changed_rows),
        "rows_per_s": dg.FloatMetadataValue(float(progress.rows_per_s)),
        "state_rows": dg.IntMetadataValue(progress.state_rows),
        "segment_bytes": dg.IntMetadataValue(progress.segment_bytes),
        "output_bytes": dg.IntMetadataValue(progress.output_bytes),
        "log_bytes": dg.IntMetadataValue(manifest.log_bytes),
        "log_segments": dg.IntMetadataValue(len(manifest.segments)),
        "table_bytes": dg.IntMetadataValue(manifest.table_bytes),
        "parallelism": dg.IntMetadataValue(manifest.parallelism),
        "local_restores": dg.IntMetadataValue(progress.local_restores),
        "primary_restores": dg.IntMetadataValue(progress.primary_restores),
        "stale_restores": dg.IntMetadataValue(progress.stale_restores),
        "moved_shards": dg.IntMetadataValue(progress.moved_shards),
        "restore_s": _seconds(progress.restore_ms),
        "restored_bytes": dg.IntMetadataValue(progress.restored_bytes),
        "local_failures": dg.IntMetadataValue(progress.local_failures),
        "epoch": dg.IntMetadataValue(progress.epoch),
        "epochs": dg.IntMetadataValue(progress.epochs),
        "uploads": dg.IntMetadataValue(progress.uploads),
        "upload_attempts": dg.IntMetadataValue(progress.upload_attempts),
        "upload_wait_s": _seconds(progress.upload_wait_ms),
        "late_rows": dg.IntMetadataValue(progress.late_rows),
        "watermark_lag_s": _seconds(
            max(0, progress.timestamp_ms - progress.watermark_ms) if progress.watermark_ms else 0
        ),
        **phases,
    }


def checkpoint_materialization(
    job: str, manifest: Manifest, complete: Progress | None = None
) -> dg.AssetMaterialization:
    """A checkpoint as a run-less materialization; its data version is the snapshot id."""
    return dg.AssetMaterialization(
        checkpoints_key(job),
        description=f"snapshot {manifest.snapshot_id} of {time_text(manifest.created_at_ms)}",
        metadata=dict(checkpoint_metadata(manifest, complete)),
        tags=_tags(manifest),
    )


def run_materialization(job: str, manifest: Manifest) -> dg.AssetMaterialization:
    """A new run of the driver, seen by its fencing snapshot: the stream goes on from there under a new term."""
    return dg.AssetMaterialization(
        stream_key(job),
        description=f"term {manifest.term} took over at {time_text(manifest.created_at_ms)}",
        metadata={
            "term": manifest.term,
            "snapshot_id": manifest.snapshot_id,
            "operators": len(manifest.operators),
            "log_bytes": manifest.log_bytes,
            "table_bytes": manifest.table_bytes,
            "restore_bytes": manifest.total_bytes,
        },
        tags=_tags(manifest),
    )


def fold_metadata(numbers: Mapping[str, int | float]) -> dict[str, Number]:
    """The numbers of a materialization (`FoldNumbers`), as integers and floats that Dagster plots."""
    return {
        name: dg.FloatMetadataValue(value) if isinstance(value, float) else dg.IntMetadataValue(value)
        for name, value in numbers.items()
    }


def fold_materialization(job: str, record: Record, log_bytes_left: int | None) -> dg.AssetMaterialization:
    """A fold that no Dagster run made (the driver did, or the command line), as a run-less materialization."""
    return dg.AssetMaterialization(
        materialized_key(job),
        description=f"{record.mode} materialization {record.record_id} of snapshot {record.snapshot_id}",
        metadata={"mode": record.mode, **fold_metadata(record_numbers(record, log_bytes_left))},
        tags={DATA_VERSION_TAG: str(record.record_id)},
    )


def _tags(manifest: Manifest) -> dict[str, str]:
    return {DATA_VERSION_TAG: str(manifest.snapshot_id), TERM_TAG: str(manifest.term)}


def _seconds(ms: float) -> dg.FloatMetadataValue:
    return dg.FloatMetadataValue(ms / 1000)
