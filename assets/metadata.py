"""A snapshot as Dagster metadata; pure.

Dagster plots integer and float entries only, and a plot follows its name: names are stable, carry their units, and
are always present, so that a plot has no holes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dagster as dg

from assets.metadata_sets import CheckpointNumbers, Number, RunNumbers, numbers_metadata
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


def checkpoint_metadata(manifest: Manifest, complete: Progress | None = None) -> dict[str, Number]:
    """The numbers of one checkpoint, each under a stable name with its unit.

    Args:
        complete: the epoch's complete numbers, where they are known (`Catalog.progress`); a manifest's own times end
            where it is written.
    """
    progress = complete or manifest.progress or Progress(snapshot_id=manifest.snapshot_id)
    phases = {f"phase_{name}_s": dg.FloatMetadataValue(ms / 1000) for name, ms in sorted(progress.phases_ms.items())}
    return {**numbers_metadata(CheckpointNumbers.of(manifest, progress)), **phases}


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
        metadata=dict(numbers_metadata(RunNumbers.of(manifest))),
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
