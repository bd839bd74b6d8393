"""Whether to request a recovery run now, decided from Dagster's earlier runs for the job; pure.

A *failure* is a term whose driver was lost. Each failure gets one run at a time; an attempt that did not help is
followed by another, with growing pauses. Attempts in a row are counted over terms for as long as the job makes no
checkpoint, because a driver that starts and dies at once is one failure that repeats, not many new ones. A driver that
lived for a while ends the row even without a checkpoint: its source may simply have been quiet (unless it stalled: then
it lived and did nothing).

How often a row is tried depends on why the driver ended (`StillstateError.kind`). Each cause has a separate count: an
attempt for a killed driver does not use up the one for damaged data.

why                          attempts in a row
invalid, unsupported         none: the same start gets the same answer until something is changed
corrupt, user-code           one: a read may have been cut short, and user code may have called a service that was down
unavailable                  without end, at most ten minutes apart: the store or the source will be repaired
refused                      `recovery.max_attempts`: an output folder that is read-only, a full disk, no permission;
                             the answer stays the same until a person grants, pays or mounts
anything else, or killed     `recovery.max_attempts`

When they are used up, one run is requested that fails on purpose: so the alerts for failed runs are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from state_runtime.base.errors import (
    CorruptData,
    Invalid,
    StoreRefused,
    Unavailable,
    UnsupportedFormat,
    UserCodeError,
    kind_of_exit,
)
from stillstate.orchestration.recovery.health import Verdict, recovery_wait_s
from stillstate.orchestration.run_phases import UNDER_WAY, RunPhase
from stillstate.orchestration.standby import SETTLED_S
from stillstate.orchestration.text import counted_text, time_text

__all__ = [
    "GIVE_UP",
    "Loss",
    "PastRun",
    "RecoveryPlan",
    "attempts_allowed",
    "plan_recovery",
]

GIVE_UP: Final = "give-up"
"""The action of the run that fails on purpose."""

_FEW: Final[Mapping[str, int]] = MappingProxyType(
    {Invalid.kind: 0, UnsupportedFormat.kind: 0, CorruptData.kind: 1, UserCodeError.kind: 1}
)
_WITHOUT_END: Final = Unavailable.kind
_REFUSED: Final = StoreRefused.kind


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One Dagster run for the job.

    Attributes:
        action: start, stop, recover or give-up.
        term: the failure that a recovery run was for; None for one that a person started.
        attempt: of that failure.
        streak: which attempt in a row it was, over all terms since the row began.
        progress: the job's progress marker when it was requested.
        ended_s: when it ended, or was created if that is not known.
        exit_code: of the driver that it started, if that ended before it ran; 0: it ran, or that is not known.
        kind: of the error that it was to recover from (`RecoveryPlan.kind`).
        damage: the damage that it found in the newest snapshot, and why it has left the choice to a person; for people.
    """

    run_id: str
    action: str
    phase: RunPhase
    term: int | None = None
    attempt: int = 0
    streak: int = 0
    progress: int | None = None
    ended_s: float = 0.0
    exit_code: int = 0
    kind: str = ""
    damage: str = ""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A driver that was lost.

    Attributes:
        term: the newest term.
        progress: the job's progress marker now.
        lived_s: from the start of the term to its last heartbeat.
        kind: of the error that ended it; empty if it reported none.
    """

    term: int
    progress: int
    lived_s: float
    verdict: Verdict = "dead"
    kind: str = ""


@dataclass(frozen=True)
class RecoveryPlan:
    """`attempt` is the number of the attempt to request now, None for no attempt; `reason` gives the reason for the
    tick's log.

    Attributes:
        streak: to be noted with the request.
        gave_up: no attempt will follow.
        tell: the run that fails on purpose is to be requested now.
        next_s: wall clock of the next attempt, if one only waits for its time.
        last_run_id: the newest recovery run of this row.
        kind: of the error that ended the driver, as far as that is known; to be noted with the request.
        damage: the damage that the newest run of this row found in a snapshot, if a person has to decide.
    """

    attempt: int | None
    reason: str
    streak: int = 0
    gave_up: bool = False
    tell: bool = False
    next_s: float | None = None
    last_run_id: str = ""
    kind: str = ""
    damage: str = ""


def attempts_allowed(kind: str, max_attempts: int) -> int | None:
    """Return how many attempts in a row an error of a kind gets; None: without end."""
    return None if kind == _WITHOUT_END else min(max_attempts, _FEW.get(kind, max_attempts))


def plan_recovery(
    loss: Loss, runs: Sequence[PastRun], now_s: float, *, max_attempts: int, backoff_s: float
) -> RecoveryPlan:
    """Decide about a lost driver.

    Args:
        runs: the job's runs, newest first.
        now_s: wall clock.
        max_attempts: in a row without progress, of errors that can pass.
        backoff_s: wait before the second of them.
    """
    row = _row(loss, runs)
    last = row[0] if row else None
    streak, last_id = (0, "") if last is None else (last.streak, last.run_id)
    for run in runs:
        if run.phase in UNDER_WAY:
            reason = f"run {run.run_id[:8]} ({run.action}) is {run.phase}"
            return RecoveryPlan(None, reason, streak, last_run_id=run.run_id if run.action == "recover" else last_id)
    kind = loss.kind
    if last is not None and last.term == loss.term and last.exit_code:
        # It died before it had a term to report in. A refusal has the exit code of an unavailable store: it stays a
        # refusal.
        said = kind_of_exit(last.exit_code)
        kind = kind if (kind, said) == (_REFUSED, _WITHOUT_END) else said
    tried = _tried(row, kind)
    allowed = attempts_allowed(kind, max_attempts)
    if allowed is not None and tried >= allowed:
        told = any(run.action == GIVE_UP and run.term == loss.term and run.phase != "abandoned" for run in runs)
        damage = "" if last is None else last.damage
        why = f"gave up: {damage}" if damage else _why_gave_up(kind, tried, max_attempts)
        return RecoveryPlan(
            None, why, streak, gave_up=True, tell=not told, last_run_id=last_id, kind=kind, damage=damage
        )
    of = "without end" if allowed is None else f"of {allowed}"
    if last is not None:
        next_s = last.ended_s + recovery_wait_s(tried, backoff_s)
        if next_s > now_s:
            reason = f"attempt {tried + 1} {of} follows at {time_text(round(next_s * 1000))}"
            return RecoveryPlan(None, reason, streak, next_s=next_s, last_run_id=last_id, kind=kind)
    # Counted over all requests for this term: Dagster ignores a run key that it has seen.
    number = 1 + max(
        (r.attempt for r in runs if r.term == loss.term and r.action != GIVE_UP and r.phase != "abandoned"), default=0
    )
    return RecoveryPlan(number, f"attempt {tried + 1} {of}", streak + 1, last_run_id=last_id, kind=kind)


def _tried(row: Sequence[PastRun], kind: str) -> int:
    """Return how many attempts of a row an error of this kind has had. A run that is no longer among the runs counts as
    the oldest of those that are."""
    if not row:
        return 0
    of_it = [_cause_of(run.kind) == _cause_of(kind) for run in row]
    return sum(of_it) + of_it[-1] * max(0, row[-1].streak - 1)


def _cause_of(kind: str) -> str:
    """Return the cause by which attempts are counted: kinds without a rule of their own are one cause."""
    return kind if kind in _FEW or kind in (_WITHOUT_END, _REFUSED) else ""


def _why_gave_up(kind: str, tried: int, max_attempts: int) -> str:
    if kind in _FEW and tried <= _FEW[kind]:
        what = "is not tried again" if _FEW[kind] == 0 else "came back after one more start"
        return f"gave up: an error of kind {kind!r} {what}; it does not pass by itself. Repair it, then start the job"
    after = f"gave up after {counted_text(tried, 'recovery attempt')}"
    if kind == _REFUSED:
        return (
            f"{after}: the store, or a sink's output folder, refuses what the job asks for; waiting "
            "does not help. Grant the permission, free space or mount it writable, then start the job"
        )
    return (
        f"{after} without a new checkpoint (recovery.max_attempts {max_attempts}); look at "
        "the driver's log, then start the job or raise recovery.max_attempts"
    )


def _row(loss: Loss, runs: Sequence[PastRun]) -> list[PastRun]:
    """Return the recovery runs of the present trouble, newest first; empty if the failure is a new one."""
    row: list[PastRun] = []
    for run in runs:
        if run.phase == "abandoned" or run.action not in ("start", "recover"):
            continue
        by_hand = run.action != "recover" or run.term is None
        helped = run.term != loss.term and loss.lived_s >= SETTLED_S and loss.verdict != "stalled"
        if by_hand or (not row and (helped or run.progress != loss.progress)):
            break
        row.append(run)
        if run.streak <= 1:
            break
    return row
