"""Dagster's own record of materialization runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import dagster as dg

from orchestration.folding.plan import FoldRun
from orchestration.jobs.tags import AFTER_TAG, ATTEMPT_TAG, MATERIALIZE_TAG

__all__ = ["past_folds"]

RUNS_READ_MAX: Final = 50

_PHASES: Final[Mapping[dg.DagsterRunStatus, Literal["waiting", "active", "succeeded", "failed", "abandoned"]]] = {
    dg.DagsterRunStatus.NOT_STARTED: "abandoned",
    dg.DagsterRunStatus.QUEUED: "waiting",
    dg.DagsterRunStatus.MANAGED: "waiting",
    dg.DagsterRunStatus.STARTING: "active",
    dg.DagsterRunStatus.STARTED: "active",
    dg.DagsterRunStatus.CANCELING: "active",
    dg.DagsterRunStatus.SUCCESS: "succeeded",
    dg.DagsterRunStatus.FAILURE: "failed",
    # A person ended it: it did not fold, and it did not fail either; the next one waits as after any other.
    dg.DagsterRunStatus.CANCELED: "succeeded",
}


def past_folds(instance: dg.DagsterInstance, job: str) -> list[FoldRun]:
    """The newest runs of the job `materialize_<job>`, newest first."""
    records = instance.get_run_records(dg.RunsFilter(tags={MATERIALIZE_TAG: job}), limit=RUNS_READ_MAX)
    return [_fold_run(record) for record in records]


def _fold_run(record: dg.RunRecord) -> FoldRun:
    tags = record.dagster_run.tags
    after, attempt = tags.get(AFTER_TAG, ""), tags.get(ATTEMPT_TAG, "")
    return FoldRun(
        run_id=record.dagster_run.run_id,
        phase=_PHASES[record.dagster_run.status],
        after_record=int(after) if after.isascii() and after.isdigit() else None,
        attempt=int(attempt) if attempt.isascii() and attempt.isdigit() else 0,
        ended_s=record.end_time or record.create_timestamp.timestamp(),
    )
