"""Run tags: how our runs find each other, and what `dagster.yaml` limits by; pure."""

from typing import Final

from assets.specs import JOB_TAG

__all__ = [
    "ACTION_TAG",
    "AFTER_TAG",
    "ATTEMPT_TAG",
    "JOB_TAG",
    "MATERIALIZE_TAG",
    "PROGRESS_TAG",
    "STREAK_TAG",
    "TERM_TAG",
    "recovery_run_key",
    "recovery_run_tags",
]

MATERIALIZE_TAG: Final = "stillstate/materialize"
"""Not JOB_TAG, of which one run goes at a time: a long fold must not keep a lost driver from being recovered."""
AFTER_TAG: Final = "stillstate/after-record"
ACTION_TAG: Final = "stillstate/action"
TERM_TAG: Final = "stillstate/term"
ATTEMPT_TAG: Final = "stillstate/attempt"
PROGRESS_TAG: Final = "stillstate/progress"
STREAK_TAG: Final = "stillstate/streak"


def recovery_run_key(job: str, term: int, attempt: int) -> str:
    """One failure, one attempt, one run: Dagster never starts a second run for a key."""
    return f"{job}:{term}:{attempt}"


def recovery_run_tags(job: str, term: int, attempt: int, streak: int, progress: int) -> dict[str, str]:
    """What a later tick needs to know about this run."""
    return {
        JOB_TAG: job,
        ACTION_TAG: "recover",
        TERM_TAG: str(term),
        ATTEMPT_TAG: str(attempt),
        STREAK_TAG: str(streak),
        PROGRESS_TAG: str(progress),
    }
