"""The identity of a job: the values of `job.json`; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ClaimMode", "JobInfo", "StartedFrom"]

ClaimMode = Literal["NO_CLAIM", "CLAIM"]


@dataclass(frozen=True)
class StartedFrom:
    """The snapshot that a job begins with: all first starts of the job must begin with the same one.

    Attributes:
        place: URL of the root that it is read from, without credentials.
        job, job_uid, snapshot_id, commit_id: identify the snapshot.
    """

    place: str
    job: str
    job_uid: str
    snapshot_id: int
    commit_id: str
    mode: ClaimMode

    def __str__(self) -> str:
        return f"{self.place}@{self.snapshot_id} ({self.mode})"


@dataclass(frozen=True)
class JobInfo:
    """`job.json`: written once by the first run.

    Attributes:
        started_from: None if the job began empty.
    """

    uid: str
    name: str
    max_parallelism: int
    format_version: int
    created_at_ms: int
    started_from: StartedFrom | None = None
