"""Whether a job's driver is well, decided from its newest heartbeat; pure.

verdict         recover?   when
never-started   no         no run has ever claimed a term
starting        no         it said so within `start_grace_s`
healthy         no         running, heartbeat within `heartbeat_timeout_s`
dead            yes        its process is gone from this host, and its heartbeat has stopped
silent          yes        its heartbeat is too old (other host, or a process that hangs)
failed          yes        it said that it failed
stopped         no         it was asked to stop, or it was about to when it died
finished        no         its input came to an end
fenced          no         another run took the job over, and speaks for it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from orchestration.launchers.port import Liveness
from state_runtime.snapshot.term_files import RunStatus

__all__ = ["Health", "HealthPolicy", "Verdict", "decide", "recovery_wait_s"]

Verdict = Literal["never-started", "starting", "healthy", "dead", "silent", "failed", "stopped", "finished", "fenced"]

BACKOFF_MAX_S: Final = 600.0  # a job that waits for a repaired store should come back within minutes of the repair
_BEATS_MISSED: Final = 2
_TO_RECOVER: Final = frozenset({"dead", "silent", "failed"})


@dataclass(frozen=True)
class HealthPolicy:
    """Limits in seconds; see `RecoverySpec`."""

    heartbeat_timeout_s: float = 30.0
    start_grace_s: float = 120.0


@dataclass(frozen=True)
class Health:
    """A verdict and one line that says why."""

    verdict: Verdict
    reason: str

    @property
    def needs_recovery(self) -> bool:
        """Whether the job should run and does not."""
        return self.verdict in _TO_RECOVER


def decide(
    status: RunStatus | None,
    now_ms: int,
    policy: HealthPolicy,
    process: Liveness,
    *,
    stop_requested: bool = False,
) -> Health:
    """Judge a driver.

    Args:
        status: its newest heartbeat, None if the job never ran.
        now_ms: this machine's wall clock. A driver whose clock is ahead looks younger than it is, so across hosts
            a loss is noticed later by the difference of the clocks, never earlier than the limit allows.
        policy: the limits.
        process: what is known about its process.
        stop_requested: whether this run was asked to stop. A run that dies while it stops stays stopped: bringing
            it back would undo what a person asked for.
    """
    if status is None:
        return Health("never-started", "no run has started yet")
    who = f"term {status.term} (process {status.pid} on {status.host})"
    age_s = status.age_s(now_ms)
    if status.state in ("stopped", "finished", "fenced"):
        return Health(status.state, f"{who} {status.state}" + (f": {status.message}" if status.message else ""))
    if status.state == "failed":
        health = Health("failed", f"{who} failed: {status.message or 'no message'}")
    elif process == "dead" and age_s > _BEATS_MISSED * status.heartbeat_interval_s:
        # Two containers may share a host name and not their processes. A heart that still beats outweighs a
        # process id that we cannot see.
        health = Health("dead", f"{who} is gone; its last heartbeat is {age_s:.1f} s old")
    elif status.state == "starting":
        if age_s <= policy.start_grace_s:
            return Health("starting", f"{who} has been starting for {age_s:.1f} s")
        health = Health("silent", f"{who} did not start within {policy.start_grace_s:g} s")
    elif age_s <= policy.heartbeat_timeout_s:
        return Health("healthy", f"{who} was heard of {age_s:.1f} s ago")
    else:
        limit = f"limit {policy.heartbeat_timeout_s:g} s"
        health = Health("silent", f"{who} was last heard of {age_s:.1f} s ago, {limit}")
    if stop_requested:
        return Health("stopped", f"{health.reason}; a stop had been requested")
    return health


def recovery_wait_s(attempts_before: int, backoff_s: float) -> float:
    """Seconds between the end of one recovery attempt and the next: nothing, then doubling up to a bound."""
    if attempts_before <= 0:
        return 0.0
    return min(BACKOFF_MAX_S, backoff_s * 2.0 ** min(attempts_before - 1, 32))
