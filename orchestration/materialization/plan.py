"""Whether to request a materialization run now, decided from Dagster's earlier runs for the job; pure.

Runs do not pile up: one run at a time; none while another materialization is under way or waits to be adopted; and
after a run, whether it succeeded or failed, none for a while. A failing one is tried again for ever, with growing
pauses: the job does not suffer from it, only its log grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stillstate.orchestration.materialization.health import MaterializationHealth
from stillstate.orchestration.run_phases import ENDED, UNDER_WAY, RunPhase
from stillstate.orchestration.text import counted_text, time_text

__all__ = [
    "MaterializationDecision",
    "MaterializationRun",
    "decide_materialization",
    "failed_in_a_row",
    "materialization_run_key",
]

BACK_OFF_S: Final = 30.0  # after the first failure; doubled for each further one
BACK_OFF_MAX_S: Final = 3600.0
# After a success: the driver adopts it with its next checkpoint, and until then the log looks as long as before.
PAUSE_S: Final = 30.0


@dataclass(frozen=True)
class MaterializationRun:
    """One Dagster run that materialized, or should have.

    Attributes:
        after_record: the newest materialization when it was requested; None for one that a person or a schedule
            started.
        ended_s: when it ended, or was created if that is not known.
    """

    run_id: str
    phase: RunPhase
    after_record: int | None = None
    attempt: int = 0
    ended_s: float = 0.0


@dataclass(frozen=True)
class MaterializationDecision:
    """`attempt` is the number of the attempt to request now, None for no attempt; `reason` gives the reason for the
    tick's log."""

    attempt: int | None
    reason: str


def materialization_run_key(job: str, after_record: int, attempt: int) -> str:
    """Return the run key of one attempt of one materialization: Dagster never starts a second run for a key."""
    return f"{job}:materialize:{after_record}:{attempt}"


def failed_in_a_row(runs: Sequence[MaterializationRun]) -> int:
    """Return how many of the newest runs failed in a row.

    Runs that have not ended do not count. A run that a person ended did not fold, and it did not fail either: it ends
    the row as a success does.
    """
    count = 0
    for run in runs:
        if run.phase == "failed":
            count += 1
        elif run.phase in ENDED:
            break
    return count


def decide_materialization(
    why: str, health: MaterializationHealth, runs: Sequence[MaterializationRun], now_s: float, *, waiting: int | None
) -> MaterializationDecision:
    """Decide for a job whose log should be folded.

    Args:
        why: the reason why it is due.
        health: its materializations, as of now.
        runs: its runs, newest first.
        now_s: wall clock.
        waiting: a materialization that the driver has yet to adopt.
    """
    for run in runs:
        if run.phase in UNDER_WAY:
            return MaterializationDecision(None, f"run {run.run_id[:8]} is {run.phase}")
    if health.running:
        return MaterializationDecision(None, f"materialization {health.last_id} is under way")
    if waiting is not None:
        return MaterializationDecision(None, f"materialization {waiting} waits for the job's next checkpoint")
    last = next((run for run in runs if run.phase in ENDED), None)
    if last is not None:
        failed = failed_in_a_row(runs)
        pause_s = min(BACK_OFF_S * 2.0 ** min(failed - 1, 30), BACK_OFF_MAX_S) if failed else PAUSE_S
        next_s = last.ended_s + pause_s
        if next_s > now_s:
            after = f"after {counted_text(failed, 'failure')}" if failed else "after the last one"
            return MaterializationDecision(
                None, f"due ({why}); {after} the next run follows at {time_text(round(next_s * 1000))}"
            )
    same = [run.attempt for run in runs if run.after_record == health.last_id and run.phase != "abandoned"]
    return MaterializationDecision(1 + max(same, default=0), f"due ({why})")
