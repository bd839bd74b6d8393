"""What the status of a Dagster run means for us: the one place that says so; pure, and without Dagster.

Whoever plans recoveries and folds asks for the phase of earlier runs and never for Dagster's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["ENDED", "PHASES", "UNDER_WAY", "RunPhase"]

RunPhase = Literal["waiting", "active", "succeeded", "failed", "canceled", "abandoned"]
"""`abandoned` is a run that was created and never submitted; Dagster takes it up again when its run key is requested
again, so it is neither an attempt nor in the way. `canceled` is one that a person ended."""

UNDER_WAY: Final[frozenset[RunPhase]] = frozenset({"waiting", "active"})
ENDED: Final[frozenset[RunPhase]] = frozenset({"succeeded", "failed", "canceled"})

PHASES: Final[Mapping[str, RunPhase]] = MappingProxyType(
    {
        "NOT_STARTED": "abandoned",
        "QUEUED": "waiting",
        "MANAGED": "waiting",
        "STARTING": "active",
        "STARTED": "active",
        # It is under way and goes on later: another run of its kind would come between.
        "SUSPENDED": "active",
        "CANCELING": "active",
        "SUCCESS": "succeeded",
        "FAILURE": "failed",
        "CANCELED": "canceled",
    }
)
"""By the value of a `DagsterRunStatus`. A test compares them with Dagster's own list."""
