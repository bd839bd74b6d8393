"""Dagster's own record of our runs: those that start, stop and recover drivers, and those that fold."""

from __future__ import annotations

from typing import Final

import dagster as dg

from orchestration.folding.plan import FoldRun
from orchestration.jobs.tags import (
    ACTION_TAG,
    AFTER_TAG,
    ATTEMPT_TAG,
    JOB_TAG,
    MATERIALIZE_TAG,
    PROGRESS_TAG,
    STREAK_TAG,
    TERM_TAG,
)
from orchestration.recovery.plan import PastRun
from orchestration.run_phases import PHASES

__all__ = ["past_folds", "past_runs"]

FOLDS_READ_MAX: Final = 50
# The newest decide; the rest only keeps attempt numbers of one term apart.
RUNS_READ_MAX: Final = 100


def past_runs(instance: dg.DagsterInstance, job: str) -> list[PastRun]:
    """The newest runs that started, stopped or recovered the job's driver, newest first."""
    records = instance.get_run_records(dg.RunsFilter(tags={JOB_TAG: job}), limit=RUNS_READ_MAX)
    return [_past_run(record) for record in records]


def _past_run(record: dg.RunRecord) -> PastRun:
    tags = record.dagster_run.tags
    return PastRun(
        run_id=record.dagster_run.run_id,
        action=tags.get(ACTION_TAG, ""),
        phase=PHASES[record.dagster_run.status.value],
        term=_number(tags.get(TERM_TAG)),
        attempt=_number(tags.get(ATTEMPT_TAG)) or 0,
        streak=_number(tags.get(STREAK_TAG)) or 0,
        progress=_number(tags.get(PROGRESS_TAG)),
        ended_s=_ended_s(record),
    )


def past_folds(instance: dg.DagsterInstance, job: str) -> list[FoldRun]:
    """The newest runs of the job `materialize_<job>`, newest first."""
    records = instance.get_run_records(dg.RunsFilter(tags={MATERIALIZE_TAG: job}), limit=FOLDS_READ_MAX)
    return [_fold_run(record) for record in records]


def _fold_run(record: dg.RunRecord) -> FoldRun:
    tags = record.dagster_run.tags
    return FoldRun(
        run_id=record.dagster_run.run_id,
        phase=PHASES[record.dagster_run.status.value],
        after_record=_number(tags.get(AFTER_TAG)),
        attempt=_number(tags.get(ATTEMPT_TAG)) or 0,
        ended_s=_ended_s(record),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _ended_s(record: dg.RunRecord) -> float:
    return record.end_time or record.create_timestamp.timestamp()
