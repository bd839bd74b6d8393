"""Places as arguments: any folder laid out like a job root, and the storage options that open it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.config.spec import JobSpec, Spec, find_config, load_spec

__all__ = ["NamedPlace", "named_place"]


@dataclass(frozen=True)
class NamedPlace:
    """A place, as `open_place` and `open_store` take it.

    Attributes:
        options: of the configured job that keeps its state in the same store; empty: the environment's.
    """

    text: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def named_place(text: str, config: Path | None) -> NamedPlace:
    """Return the place that an argument means: a path or URL, or a job of `stillstate.yaml` with or without `@<id>`.

    Args:
        config: the file that was named. Without one it is searched for, and its absence is no error.

    Raises:
        InvalidConfiguration: the file cannot be read.
    """
    from stillstate.orchestration.config.job_location import location_of

    spec = _spec(config)
    name, at, number = text.partition("@")
    if spec is not None and name in spec.jobs and "/" not in text:
        job = location_of(spec.jobs[name])
        return NamedPlace(f"{job.store.rstrip('/')}/{name}{at}{number}", job.storage_options)
    job_there = next((job for job in spec.jobs.values() if _same_store(job, text)), None) if spec is not None else None
    return NamedPlace(text, job_there.storage_options if job_there is not None else {})


def _spec(config: Path | None) -> Spec | None:
    if config is None:
        try:
            config = find_config()
        except InvalidConfiguration:
            return None
    return load_spec(config)


def _same_store(job: JobSpec, text: str) -> bool:
    """Whether a place is in the file system of a job's store: for S3, in the same bucket."""
    one, other = urlsplit(job.store), urlsplit(text)
    return bool(one.scheme) and (one.scheme, one.netloc) == (other.scheme, other.netloc)
