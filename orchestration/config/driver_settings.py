"""The settings that a driver takes from `stillstate.yaml` when it starts, by name and as text; pure.

A run writes the settings that it was started with into its heartbeat, and they are compared with the file's current
ones. So settings that may hold a secret are left out: storage options, Spark's configuration and the job's options.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from state_runtime.base.settings import SettingsGroup
from stillstate.orchestration.config.spec import AvailableNow, JobSpec, ProcessingTime, to_settings

__all__ = ["driver_settings", "section_digest"]

_SECRET: Final[Any] = {"storage_options": True, "start_from": True, "migration": {"to_storage_options"}}


def driver_settings(job: JobSpec) -> dict[str, str]:
    """Return the settings of a driver that starts now, except parallelism and backend: a run reports these two."""
    found = {"entry_point": job.entry_point, "spark.master": job.spark.master, "trigger": _trigger_text(job)}
    for name, value in to_settings(job):
        if isinstance(value, SettingsGroup):
            found |= {f"{name}.{key}": _text(item) for key, item in value}
        elif name not in ("parallelism", "backend"):
            found[name] = _text(value)
    return found


def section_digest(job: JobSpec) -> str:
    """Return a digest that shows whether a job's part of the file has changed; it contains no storage options."""
    said = job.model_dump(mode="json", exclude=_SECRET)
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """Return a value as people write it in the file."""
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.15g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _trigger_text(job: JobSpec) -> str:
    if isinstance(job.trigger, ProcessingTime):
        return f"every {job.trigger.processing_time_s:.15g} s"
    return "available now" if isinstance(job.trigger, AvailableNow) else "as fast as possible"
