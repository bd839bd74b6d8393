"""Whether a job's driver is well, decided from its newest heartbeat; pure.

verdict         recover?   when
never-started   no         no run has ever claimed a term
starting        no         it reported its start within `start_grace_s`
healthy         no         running, heartbeat within `heartbeat_timeout_s`
restarting      no         its process is gone, and its supervisor lives and is bringing it back
dead            yes        its process is gone from this host, and its heartbeat has stopped
silent          yes        its heartbeat is too old (other host, or a process that hangs)
stalled         yes        it has heartbeats, but for `stall_timeout_s` nothing has ended, though its source is not
quiet
failed          yes        it reported that it failed
stopped         no         a stop was requested, or was under way when it died
finished        no         its input came to an end
fenced          no         another run took the job over, and reports for it
migrating       no         it does not run, and a migration is under way, which starts and stops it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from state_runtime.snapshot.migration import Migration
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.sections import RecoverySpec
from stillstate.orchestration.launchers.port import Liveness
from stillstate.orchestration.recovery.sinks import SinkTrouble, sink_trouble
from stillstate.orchestration.recovery.sources import SourceTrouble, source_trouble
from stillstate.orchestration.text import time_text

__all__ = ["STANDINGS", "Health", "Standing", "Verdict", "decide", "recovery_wait_s", "while_migrating"]

Verdict = Literal[
    "never-started",
    "starting",
    "healthy",
    "restarting",
    "dead",
    "silent",
    "stalled",
    "failed",
    "stopped",
    "finished",
    "fenced",
    "migrating",
]
Standing = Literal["well", "new", "ended", "coming", "migrating", "lost"]
STANDINGS: Final[Mapping[Verdict, Standing]] = MappingProxyType(
    {
        "never-started": "new",
        "starting": "coming",
        "healthy": "well",
        "restarting": "coming",
        "dead": "lost",
        "silent": "lost",
        "stalled": "lost",
        "failed": "lost",
        "stopped": "ended",
        "finished": "ended",
        "fenced": "ended",
        "migrating": "migrating",
    }
)
"""The meaning of a verdict, for all users of it: checks, the overview, metrics, `stillstate jobs`, recovery and
migration.

well        it runs
new         it may be started
ended       it does not run, as it should be: it may be started
coming      it comes up by itself
migrating   its migration starts it
lost        it should run and does not: recover it
"""

BACKOFF_MAX_S: Final = 600.0  # a job that waits for a repaired store should come back within minutes of the repair
_BEATS_MISSED: Final = 2
MIGRATION_QUIET_S: Final = 3600.0
"""If a step takes longer, its migration is not continued until a person has looked."""


@dataclass(frozen=True)
class Health:
    """A verdict and one line with the reason: with moments and no durations, since it is read long after it was
    written.

    Attributes:
        is_wanted: no end of the run was requested.
        is_overdue: of one that is migrating: its migration is not continued.
        since_ms: when this began, as the driver has reported; 0: it has not.
        source, sink: of one that runs: what is wrong with one of its sources, or sinks.
    """

    verdict: Verdict
    reason: str
    is_wanted: bool = True
    is_overdue: bool = False
    since_ms: int = 0
    source: SourceTrouble | None = None
    sink: SinkTrouble | None = None

    @property
    def standing(self) -> Standing:
        """Return the meaning of the verdict for the job."""
        return STANDINGS[self.verdict]

    @property
    def is_well(self) -> bool:
        """Whether the job needs no look by a person: it runs, comes up by itself, or ended as it should."""
        return self.standing in ("well", "new", "ended", "coming")

    @property
    def needs_recovery(self) -> bool:
        """Whether the job should run and does not."""
        return self.standing == "lost" and self.is_wanted

    @property
    def may_be_migrating(self) -> bool:
        """Whether it looks like a driver that a migration has stopped or has not brought up; or, of a fork, not yet."""
        return self.standing in ("new", "ended", "lost")


def decide(
    status: RunStatus | None,
    now_ms: int,
    policy: RecoverySpec,
    process: Liveness,
    *,
    stop_requested: bool = False,
    is_near: bool = False,
) -> Health:
    """Judge a driver.

    Args:
        status: its newest heartbeat, None if the job never ran.
        now_ms: this machine's wall clock. A driver whose clock is ahead looks younger than it is, so across hosts a
            loss is noticed later by the difference of the clocks, never earlier than the limit allows.
        policy: the limits.
        process: what is known about its process.
        stop_requested: whether this run was asked to stop. A run that dies while it stops stays stopped: a recovery
            would undo the request of a person.
        is_near: its process would be visible here under its own number (`base/process_space.py`), so that a process
            that is not visible has ended, even if its heartbeat is recent.
    """
    if status is None:
        return Health("never-started", "no run has started yet")
    who = f"term {status.term} (process {status.pid} on {status.host})"
    age_s = status.age_s(now_ms)
    if status.state in ("stopped", "finished", "fenced"):
        said = f"{who} {status.state}" + (f": {status.message}" if status.message else "")
        return Health(status.state, said, since_ms=status.at_ms)
    stood_s = (status.at_ms - status.advanced_at_ms) / 1000 if status.advanced_at_ms else 0.0
    since_ms, heard = status.at_ms, f"its last heartbeat was at {time_text(status.at_ms)}"
    if process == "restarting" and age_s <= policy.start_grace_s:
        health = Health("restarting", f"{who} is gone; {heard}; its supervisor is bringing it back")
    elif status.state == "failed":
        health = Health("failed", f"{who} failed: {status.message or 'no message'}")
    elif process in ("dead", "restarting") and (
        (is_near and process == "dead") or age_s > _BEATS_MISSED * status.heartbeat_interval_s
    ):
        # Two containers may share a host name and not their processes. There a recent heartbeat outweighs a process id
        # that is not visible here.
        health = Health("dead", f"{who} is gone; {heard}")
    elif status.state == "starting" and stood_s < (policy.stall_timeout_s or float("inf")):
        if age_s <= policy.start_grace_s:
            began = time_text(status.started_at_ms)
            return Health("starting", f"{who} has been starting since {began}", since_ms=status.started_at_ms)
        health = Health("silent", f"{who} did not start within {policy.start_grace_s:g} s")
    elif age_s <= policy.heartbeat_timeout_s and policy.stall_timeout_s and stood_s >= policy.stall_timeout_s:
        # Both times are the driver's own, so its clock need not agree with this one.
        since_ms = status.advanced_at_ms
        health = Health(
            "stalled",
            f"{who} beats, and since {time_text(since_ms)} neither an epoch nor a task has ended, with input waiting; "
            "the stacks of its threads are in its log",
        )
    elif age_s <= policy.heartbeat_timeout_s:
        source, sink = source_trouble(status.sources, now_ms), sink_trouble(status.sinks, now_ms)
        also = "".join(f"; {trouble.headline}: {trouble.reason}" for trouble in (sink, source) if trouble is not None)
        reason = f"{who} runs; {heard}{also}"
        return Health("healthy", reason, since_ms=status.started_at_ms, source=source, sink=sink)
    else:
        health = Health("silent", f"{who} does not answer; {heard}, limit {policy.heartbeat_timeout_s:g} s")
    health = replace(health, since_ms=since_ms)
    if stop_requested and health.verdict == "stalled":
        # It lives, but cannot obey: neither stopped nor to be recovered. `stillstate stop` ends it.
        return replace(health, reason=f"{health.reason}; a stop has been requested", is_wanted=False)
    if stop_requested:
        return replace(health, verdict="stopped", reason=f"{health.reason}; a stop had been requested")
    return health


def while_migrating(
    health: Health, migration: Migration, job: str, now_ms: int, *, is_deserted: bool = False
) -> Health:
    """Return the health of a job that does not run because it is being migrated: it is not to be recovered.

    Args:
        is_deserted: the process that migrated it has certainly ended.
    """
    age_s = max(0.0, (now_ms - migration.at_ms) / 1000)
    return Health(
        "migrating",
        f"{migration} is under way, at this step since {time_text(migration.at_ms)}; recovery leaves the job alone "
        f"until it is over. If no process continues it: `stillstate migrate {job} --resume`, or launch migrate_<job> "
        f"in Dagster. The driver: {health.reason}",
        is_overdue=is_deserted or age_s > MIGRATION_QUIET_S,
        since_ms=migration.began_ms,
    )


def recovery_wait_s(attempts_before: int, backoff_s: float) -> float:
    """Return the seconds between the end of one recovery attempt and the next: nothing, then doubling up to a bound."""
    if attempts_before <= 0:
        return 0.0
    return min(BACKOFF_MAX_S, backoff_s * 2.0 ** min(attempts_before - 1, 32))
