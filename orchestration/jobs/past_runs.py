"""Dagster's own record of Stillstate's runs: those that start, stop and recover drivers, and those that fold."""

from __future__ import annotations

from typing import Final

import dagster as dg

from stillstate.orchestration.jobs.tags import (
    ACTION_TAG,
    AFTER_TAG,
    ATTEMPT_TAG,
    DAMAGE_TAG,
    EXIT_TAG,
    JOB_TAG,
    KIND_TAG,
    MATERIALIZE_TAG,
    PROGRESS_TAG,
    RESUMES_TAG,
    STREAK_TAG,
    TARGET_TAG,
    TERM_TAG,
)
from stillstate.orchestration.materialization.plan import MaterializationRun
from stillstate.orchestration.migration.desired import PastMigration
from stillstate.orchestration.recovery.plan import PastRun
from stillstate.orchestration.run_phases import PHASES

__all__ = ["past_materializations", "past_migrations", "past_runs"]

MATERIALIZATIONS_READ_MAX: Final = 50
MIGRATIONS_READ_MAX: Final = 500
"""Of all jobs: one query reads them for all jobs."""
# The newest decide; the rest only keeps attempt numbers of one term apart.
RUNS_READ_MAX: Final = 100


def past_runs(instance: dg.DagsterInstance, tag: str) -> list[PastRun]:
    """Return the newest runs that started, stopped or recovered a job's driver, newest first.

    Args:
        tag: of the job (`Mount.tag`).
    """
    records = instance.get_run_records(dg.RunsFilter(tags={JOB_TAG: tag}), limit=RUNS_READ_MAX)
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
        exit_code=_number(tags.get(EXIT_TAG)) or 0,
        kind=tags.get(KIND_TAG, ""),
        damage=tags.get(DAMAGE_TAG, ""),
    )


def past_materializations(instance: dg.DagsterInstance, tag: str) -> list[MaterializationRun]:
    """Return the newest runs that folded a job's changelog, newest first."""
    records = instance.get_run_records(dg.RunsFilter(tags={MATERIALIZE_TAG: tag}), limit=MATERIALIZATIONS_READ_MAX)
    return [_materialize_run(record) for record in records]


def _materialize_run(record: dg.RunRecord) -> MaterializationRun:
    tags = record.dagster_run.tags
    return MaterializationRun(
        run_id=record.dagster_run.run_id,
        phase=PHASES[record.dagster_run.status.value],
        after_record=_number(tags.get(AFTER_TAG)),
        attempt=_number(tags.get(ATTEMPT_TAG)) or 0,
        ended_s=_ended_s(record),
    )


def past_migrations(instance: dg.DagsterInstance) -> dict[str, list[PastMigration]]:
    """Return the newest runs that migrated drivers, newest first, by the tag of the job (`Mount.tag`)."""
    filters = dg.RunsFilter(tags={ACTION_TAG: "migrate"})
    found: dict[str, list[PastMigration]] = {}
    for record in instance.get_run_records(filters, limit=MIGRATIONS_READ_MAX):
        tags = record.dagster_run.tags
        past = PastMigration(
            run_id=record.dagster_run.run_id,
            phase=PHASES[record.dagster_run.status.value],
            term=_number(tags.get(TERM_TAG)) or 0,
            target=tags.get(TARGET_TAG, ""),
            resumes=tags.get(RESUMES_TAG, ""),
            created_s=record.create_timestamp.timestamp(),
            ended_s=_ended_s(record),
        )
        found.setdefault(tags.get(JOB_TAG, ""), []).append(past)
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _ended_s(record: dg.RunRecord) -> float:
    return record.end_time or record.create_timestamp.timestamp()
