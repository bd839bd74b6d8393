"""Dagster jobs that act on drivers: for each streaming job one to start, one to stop and one to recover it."""

from orchestration.jobs.driver import DriverJobs, build_driver_jobs
from orchestration.jobs.tags import (
    ACTION_TAG,
    ATTEMPT_TAG,
    JOB_TAG,
    PROGRESS_TAG,
    STREAK_TAG,
    TERM_TAG,
    recovery_run_key,
    recovery_run_tags,
)

__all__ = [
    "ACTION_TAG",
    "ATTEMPT_TAG",
    "JOB_TAG",
    "PROGRESS_TAG",
    "STREAK_TAG",
    "TERM_TAG",
    "DriverJobs",
    "build_driver_jobs",
    "recovery_run_key",
    "recovery_run_tags",
]
