"""What the status of a Dagster run means for Stillstate: defined only here; pure, and without Dagster.

Planners of recoveries and folds use the phase of earlier runs, never Dagster's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["ENDED", "PHASES", "UNDER_WAY", "RunPhase"]

RunPhase = Literal["waiting", "active", "succeeded", "failed", "canceled", "abandoned"]
"""`abandoned` is a run that was created and never submitted. Dagster submits it when its run key is requested again, so
it neither counts as an attempt nor blocks one. `canceled` is a run that a person ended."""

UNDER_WAY: Final[frozenset[RunPhase]] = frozenset({"waiting", "active"})
ENDED: Final[frozenset[RunPhase]] = frozenset({"succeeded", "failed", "canceled"})

PHASES: Final[Mapping[str, RunPhase]] = MappingProxyType(
    {
        "NOT_STARTED": "abandoned",
        "QUEUED": "waiting",
        "MANAGED": "waiting",
        "STARTING": "active",
        "STARTED": "active",
        # It is under way and continues later: another run of its kind would run in between.
        "SUSPENDED": "active",
        "CANCELING": "active",
        "SUCCESS": "succeeded",
        "FAILURE": "failed",
        "CANCELED": "canceled",
    }
)
"""By the value of a `DagsterRunStatus`. A test compares them with Dagster's own list."""
