"""Dagster's run statuses for queries, by their meaning for Stillstate (run_phases.py)."""

from __future__ import annotations

from typing import Final

import dagster as dg

from stillstate.orchestration.run_phases import ENDED, PHASES

__all__ = ["CANCELING", "FINISHED", "WITH_WORKER"]

FINISHED: Final = tuple(dg.DagsterRunStatus(status) for status, phase in PHASES.items() if phase in ENDED)
CANCELING: Final = dg.DagsterRunStatus.CANCELING
WITH_WORKER: Final = (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, CANCELING)
"""A process does such a run, or has begun to; a suspended run has no process."""
