"""Whether a job is as alive as its owner wants it: the verdict of the check `driver_alive`; pure.

level   when
ok      it runs, ended on purpose, or never began
warn    it starts, is silent, is being recovered, was recovered and has not shown yet that it can commit, or is being
        migrated
error   it is down and is not recovered (recovery is off, was abandoned, or has failed as often as another failure may),
        its migration is not continued (its process has ended, or a step has taken an hour), its root is damaged, or its
        store has not answered for two minutes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from stillstate.orchestration.recovery.health import Health, Verdict
from stillstate.orchestration.recovery.plan import RecoveryPlan
from stillstate.orchestration.text import time_text

__all__ = ["UNREACHABLE_S", "Alive", "AliveLevel", "judge_alive"]

AliveLevel = Literal["ok", "warn", "error"]

UNREACHABLE_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Alive:
    """One judgement.

    Attributes:
        headline: the text that a person reads first; it has the state without numbers that grow, so that it changes
            only when the state does.
        reason: one line with the numbers.
        attempt: of the present row of recoveries; 0 without one.
        next_s: wall clock of the next attempt, if one is planned.
        last_run_id: the newest recovery run of the row.
    """

    level: AliveLevel
    headline: str
    reason: str
    verdict: str
    attempt: int = 0
    next_s: float | None = None
    last_run_id: str = ""


def judge_alive(
    health: Health | None,
    plan: RecoveryPlan | None,
    *,
    now_s: float,
    is_recovered: bool,
    max_attempts: int,
    is_unproven: bool = False,
    trouble: str = "",
    unreachable_since_s: float | None = None,
) -> Alive:
    """Judge a job.

    Args:
        health: its driver's; None if its root could not be read.
        plan: of its recovery, if it needs one.
        is_recovered: whether this kind of loss is recovered at all.
        is_unproven: it was recovered, and its first checkpoint has not come.
        trouble: why the root could not be read.
        unreachable_since_s: since when its store does not answer; None if it does.
    """
    if health is None:
        return _unread(trouble, now_s, unreachable_since_s)
    verdict = health.verdict
    if verdict == "healthy" and is_unproven:
        headline = "the driver was brought back, and its first checkpoint has not come yet"
        return Alive(level="warn", headline=headline, reason=health.reason, verdict=verdict)
    if health.sink is not None:
        return Alive(
            level="error" if health.sink.holds_up else "warn",
            headline=f"the driver runs, and {health.sink.headline}",
            reason=health.reason,
            verdict=verdict,
        )
    if health.source is not None:
        headline = f"the driver runs, and {health.source.headline}"
        return Alive(level="warn", headline=headline, reason=health.reason, verdict=verdict)
    if health.is_well:
        return Alive(
            level="warn" if health.standing == "coming" else "ok",
            headline="no run has started yet" if health.standing == "new" else f"the driver {_said(verdict)}",
            reason=health.reason,
            verdict=verdict,
        )
    if health.standing == "migrating":
        stands = "the job is being migrated, and no process continues the migration"
        return Alive(
            level="error" if health.is_overdue else "warn",
            headline=stands if health.is_overdue else "the job is being migrated",
            reason=health.reason,
            verdict=verdict,
        )
    if not health.is_wanted:
        return Alive(
            level="error",
            headline=f"the driver {_said(verdict)} and cannot stop",
            reason=health.reason,
            verdict=verdict,
        )
    if plan is None or not is_recovered:
        return Alive(
            level="error",
            headline=f"the driver {_said(verdict)}, and recovery is switched off",
            reason=health.reason,
            verdict=verdict,
        )
    in_vain = plan.gave_up or plan.streak > max_attempts
    headline = f"the driver {_said(verdict)}: " + (
        "the newest snapshot is damaged, and a person decides"
        if plan.damage
        else "recovery gave up"
        if plan.gave_up
        else "no attempt has helped so far"
        if in_vain
        else "it is being recovered"
    )
    return Alive(
        level="error" if in_vain else "warn",
        headline=headline,
        reason=f"{health.reason}; {plan.reason}",
        verdict=verdict,
        attempt=plan.streak,
        next_s=plan.next_s,
        last_run_id=plan.last_run_id,
    )


def _said(verdict: Verdict) -> str:
    return f"has {verdict}" if verdict in ("failed", "stopped", "finished") else f"is {verdict}"


def _unread(trouble: str, now_s: float, unreachable_since_s: float | None) -> Alive:
    if unreachable_since_s is None:
        return Alive(level="error", headline="the job's root cannot be read", reason=trouble, verdict="unreadable")
    since_s = now_s - unreachable_since_s
    is_long = since_s >= UNREACHABLE_S
    return Alive(
        level="error" if is_long else "warn",
        headline="the store has not answered for minutes" if is_long else "the store does not answer",
        # A moment and not a duration: the text is read long after it was written.
        reason=f"no answer since {time_text(round(unreachable_since_s * 1000))}: {trouble}",
        verdict="unreachable",
    )
