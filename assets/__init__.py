"""What exists: for each job its stream and its checkpoints, as Dagster shows them. Pure builders; nothing here acts."""

from __future__ import annotations

from assets.metadata import checkpoint_materialization, checkpoint_metadata, run_materialization
from assets.specs import build_asset_specs, checkpoints_key, job_asset_specs, stream_key

__all__ = [
    "build_asset_specs",
    "checkpoint_materialization",
    "checkpoint_metadata",
    "checkpoints_key",
    "job_asset_specs",
    "run_materialization",
    "stream_key",
]
