"""Whether to request a recovery run now, decided from what Dagster already ran for the job; pure.

A *failure* is a term whose driver was lost. Each failure gets one run at a time; an attempt that did not help is
followed by another, later each time. Attempts in a row are counted over terms for as long as the job makes no
checkpoint, because a driver that starts and dies at once is one failure that repeats, not many new ones. A driver
that lived for a while ends the row even without a checkpoint: its source may simply have been quiet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestration.recovery.health import recovery_wait_s
from orchestration.run_phases import UNDER_WAY, RunPhase
from orchestration.text import duration_text

__all__ = ["SETTLED_S", "PastRun", "RecoveryPlan", "plan_recovery"]

# A driver that fails for a reason in its code or its state does so within its first epochs.
SETTLED_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One Dagster run for the job.

    Attributes:
        action: start, stop or recover.
        term: the failure that a recovery run was for; None for one that a person started.
        attempt: of that failure.
        streak: which attempt in a row it was, over all terms since the row began.
        progress: the job's progress marker when it was requested.
        ended_s: when it ended, or was created if that is not known.
    """

    run_id: str
    action: str
    phase: RunPhase
    term: int | None = None
    attempt: int = 0
    streak: int = 0
    progress: int | None = None
    ended_s: float = 0.0


@dataclass(frozen=True)
class RecoveryPlan:
    """`attempt` is the number of the attempt to request now, None for none; `reason` says why, for the tick's log.
    `streak` is to be noted with the request."""

    attempt: int | None
    reason: str
    streak: int = 0


def plan_recovery(
    term: int,
    progress: int,
    lived_s: float,
    runs: Sequence[PastRun],
    now_s: float,
    *,
    max_attempts: int,
    backoff_s: float,
) -> RecoveryPlan:
    """Decide about the failed `term` of one job.

    Args:
        term: the newest term, whose driver is lost.
        progress: the job's progress marker now.
        lived_s: from the start of the term to its last heartbeat.
        runs: the job's runs, newest first.
        now_s: wall clock.
        max_attempts: in a row without progress.
        backoff_s: wait before the second of them.
    """
    for run in runs:
        if run.phase in UNDER_WAY:
            return RecoveryPlan(None, f"run {run.run_id[:8]} ({run.action}) is {run.phase}")
    last = _last_in_row(term, progress, lived_s, runs)
    tried = 0 if last is None else last.streak
    if tried >= max_attempts:
        return RecoveryPlan(
            None,
            f"gave up after {tried} recoveries without a new checkpoint; look at the driver's log, then start "
            "the job or raise recovery.max_attempts",
        )
    if last is not None:
        wait_s = last.ended_s + recovery_wait_s(tried, backoff_s) - now_s
        if wait_s > 0:
            return RecoveryPlan(None, f"attempt {tried + 1} of {max_attempts} follows in {duration_text(wait_s)}")
    # Counted over everything that was ever requested for this term: Dagster ignores a run key that it has seen.
    number = 1 + max((run.attempt for run in runs if run.term == term and run.phase != "abandoned"), default=0)
    return RecoveryPlan(number, f"attempt {tried + 1} of {max_attempts}", tried + 1)


def _last_in_row(term: int, progress: int, lived_s: float, runs: Sequence[PastRun]) -> PastRun | None:
    """The newest recovery run, if the failure now is the same trouble going on."""
    for run in runs:
        if run.phase == "abandoned" or run.action == "stop":
            continue
        by_hand = run.action != "recover" or run.term is None
        helped = run.term != term and lived_s >= SETTLED_S
        return None if by_hand or helped or run.progress != progress else run
    return None
