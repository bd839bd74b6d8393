"""The Dagster assets: for each job its stream and its checkpoints. Pure builders; nothing here acts."""

from __future__ import annotations

from stillstate.assets.metadata import checkpoint_materialization, run_materialization
from stillstate.assets.mount import Mount
from stillstate.assets.specs import build_asset_specs, job_asset_specs

__all__ = [
    "Mount",
    "build_asset_specs",
    "checkpoint_materialization",
    "job_asset_specs",
    "run_materialization",
]
