"""The launcher port: start, stop and look at the driver of one job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from state_runtime.base.errors import StillstateError, Unavailable
from state_runtime.base.progress import Progress
from state_runtime.snapshot.term_files import RunState, RunStatus
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions

__all__ = [
    "LOG_FOLLOWS",
    "FirstCheckpoint",
    "LastWords",
    "LaunchFailed",
    "Launched",
    "Launcher",
    "Liveness",
    "StopTimedOut",
    "Stopped",
]

LOG_FOLLOWS: Final = "The end of its log"
"""In a message about a driver: from this line on the text is the driver's own, and may be long."""

Liveness = Literal["alive", "restarting", "dead", "unknown"]
"""What the operating system says about a driver's process; unknown on any host but its own. `restarting`: it is gone,
and its supervisor lives."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A driver that has claimed a term and reports that it runs (or already finished)."""

    job: str
    term: int
    state: RunState
    pid: int
    host: str
    log: str
    """Where its output goes."""


@dataclass(frozen=True, kw_only=True)
class FirstCheckpoint:
    """How a driver that was brought back continued.

    Attributes:
        snapshot_id: its first checkpoint; None if it made none.
        how: one line for people.
        at_ms: when that checkpoint was made; 0 without one.
        progress: numbers of that checkpoint.
    """

    snapshot_id: int | None
    how: str
    at_ms: int = 0
    progress: Progress | None = None


@dataclass(frozen=True)
class LastWords:
    """The end of a driver's log, without credentials."""

    log: str
    text: str


@dataclass(frozen=True)
class Stopped:
    """How a stop ended. `how` is one line for people."""

    job: str
    term: int
    state: RunState
    how: str


class LaunchFailed(StillstateError):
    """The driver ended, or did not get ready in time. `exit_code` is the driver's own: scripts see the cause."""

    kind = "launch-failed"

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        # An instance's code shadows the class's: the driver failed, for the reason that its code names.
        self.exit_code = exit_code  # type: ignore[misc]


class StopTimedOut(Unavailable):
    """The driver did not stop in time; it may still run."""


class Launcher(Protocol):
    """Start, stop and look at one job's driver. Safety never depends on this: terms decide which driver may write."""

    def start(self, options: StartOptions = AS_IT_IS, *, cause: str = "") -> Launched:
        """Start a driver and wait until it runs.

        The copy of a snapshot of another root that the driver begins with counts against the time limit of the start;
        if the start is ended for it, the next start finishes the copy.

        Args:
            cause: why, if not because a person wants it; the driver's heartbeat reports it.

        Raises:
            JobAlreadyRunning: a live driver holds the job, and `takeover` is not among the options.
            LaunchFailed: it ended or did not get ready; none of its processes is left running.
        """
        ...

    def stop(self) -> Stopped:
        """Ask the newest run to stop after its epoch and wait until it has. Fine if it does not run.

        Raises:
            JobNotFound: the job never ran.
            StopTimedOut: it may still run.
        """
        ...

    def is_alive(self, status: RunStatus) -> Liveness:
        """Return what is known about the process of a run."""
        ...

    def wait_for_checkpoint(self, launched: Launched, timeout_s: float) -> FirstCheckpoint:
        """Wait until a started driver has made a checkpoint, has shown that its source is quiet, or has ended well.
        After `timeout_s` it is left running: it lives.

        Raises:
            LaunchFailed: it ended before; the message has the end of its log.
        """
        ...

    def last_words(self, status: RunStatus) -> LastWords | None:
        """Return the end of the newest log of the job, if the run was on this host and the job has a log."""
        ...

    def end_lost(self, status: RunStatus) -> str:
        """Kill the remaining processes of a lost run, if they are certainly its own and on this host; return one line
        that reports it."""
        ...
