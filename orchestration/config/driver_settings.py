"""The settings that a driver takes from `stillstate.yaml` when it starts, by name and as text; pure.

A run says in its heartbeat what it was started with, and whoever looks compares that with what the file says now. So
nothing that may hold a secret is here: not storage options, not Spark's configuration, not the job's own options.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from stillstate.orchestration.config.spec import AvailableNow, JobSpec, ProcessingTime

__all__ = ["driver_settings", "section_digest"]

_TAKEN: Final[dict[str, tuple[str, ...]]] = {
    "checkpoint": (
        "heartbeat_interval_s",
        "inline_bytes_max",
        "interval_s",
        "batches",
        "mode",
        "aligned_timeout_s",
        "unaligned_epoch_s",
        "max_inflight_bytes",
        "pending_bytes_max",
        "tolerable_failures",
        "drain_epochs_max",
    ),
    "upload": ("timeout_s", "attempts_max", "in_flight_bytes_max", "deadline_s", "bytes_per_s"),
    "local_recovery": ("enabled", "bytes_max", "copies_max"),
    "materialization": (
        "by",
        "interval_s",
        "min_bytes",
        "ratio",
        "max_segments",
        "replay_s",
        "takeover_s",
        "cells_max",
        "cell_bytes_max",
    ),
    "recovery": ("stall_timeout_s",),
    "retention": (
        "retained_checkpoints",
        "keep_last",
        "keep_within_s",
        "keep_hourly",
        "keep_daily",
        "keep_weekly",
        "keep_monthly",
        "keep_yearly",
        "keep_tags",
        "max_age_s",
        "max_count",
        "failed_ttl_s",
    ),
    "spark": ("master",),
}
"""What of each section is the driver's; the rest is Dagster's or the launcher's, which read the file anew."""

_BESIDE: Final = (
    "entry_point",
    "changelog",
    "compression",
    "placement",
    "partial_aggregation",
    "task_bytes_max",
    "local_dir",
    "scratch_dir",
)
"""The same of what stands in no section. `parallelism` and `backend` are not here: a run says what it has of those."""


_SECRET: Final[Any] = {"storage_options": True, "start_from": True, "migration": {"to_storage_options"}}


def driver_settings(job: JobSpec) -> dict[str, str]:
    """What a driver that starts now takes, but for parallelism and backend."""
    found = {name: _text(getattr(job, name)) for name in _BESIDE}
    found["trigger"] = _trigger_text(job)
    for section, names in _TAKEN.items():
        model = getattr(job, section)
        found |= {f"{section}.{name}": _text(getattr(model, name)) for name in names}
    return found


def section_digest(job: JobSpec) -> str:
    """Tells whether a job's part of the file has changed; of its storage options nothing goes into it."""
    said = job.model_dump(mode="json", exclude=_SECRET)
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """As people write it in the file."""
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.15g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _trigger_text(job: JobSpec) -> str:
    if isinstance(job.trigger, ProcessingTime):
        return f"every {job.trigger.processing_time_s:.15g} s"
    return "available now" if isinstance(job.trigger, AvailableNow) else "as fast as possible"
