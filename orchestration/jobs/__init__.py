"""Dagster jobs: for each streaming job, those that start, stop, recover and migrate its driver, and fold its
changelog."""

from stillstate.orchestration.jobs.alive_check import build_alive_check
from stillstate.orchestration.jobs.materialize import MaterializationJobs, build_materialization_jobs
from stillstate.orchestration.jobs.tags import (
    ACTION_TAG,
    AFTER_TAG,
    ATTEMPT_TAG,
    JOB_TAG,
    MATERIALIZE_TAG,
    PROGRESS_TAG,
    STREAK_TAG,
    TERM_TAG,
    recovery_run_key,
    recovery_run_tags,
)

__all__ = [
    "ACTION_TAG",
    "AFTER_TAG",
    "ATTEMPT_TAG",
    "JOB_TAG",
    "MATERIALIZE_TAG",
    "PROGRESS_TAG",
    "STREAK_TAG",
    "TERM_TAG",
    "MaterializationJobs",
    "build_alive_check",
    "build_materialization_jobs",
    "recovery_run_key",
    "recovery_run_tags",
]
