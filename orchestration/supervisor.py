"""Runs a driver of the local launcher, and starts it again in place if it dies: `python -m
stillstate.orchestration.supervisor CONFIG JOB RESTARTS STANDBY [ONCE …] -- COMMAND …`.

It is the driver's parent, so it learns of the driver's death at once and with its cause. A sensor that reads heartbeats
learns of it seconds later, and then needs a Dagster run before anything starts. The supervisor makes a few attempts in
a row without a new checkpoint; then it ends with the driver's exit code, and Dagster handles the loss. It does not
restart after an error that cannot pass by itself, after a requested stop, or when another run has taken the job over.
Safety does not depend on it: terms decide which driver may write.

How the driver ended     what happens
exit 0, a stop signal    a stop was requested, or its input ended: the supervisor ends
exit 2, 3, 5, 6, 7       the next start would end the same way: the supervisor ends
anything else            it is started again: at once, then after seconds that double

With `launcher.standby` a second driver waits while the first one works, and takes its place when it dies
(orchestration/standby.py).

The options ONCE (`--from-snapshot`, `--takeover`, …) are given to the first driver only: a second one would go back
again. So if the first driver died before it had taken the job, the supervisor ends, and the user decides what to do.

This module imports little before the driver is started: the driver's start must not wait for the supervisor's imports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from state_runtime.base.errors import FINAL_EXITS
from stillstate.orchestration.standby import CAUSE_ENV, RESTARTED, SETTLED_S, SUPERVISOR_ENV, Drivers

__all__ = ["Death", "decide_restart", "main", "supervise"]

PRELOAD_AFTER_S: Final = 30.0
PREPARE: Final = (sys.executable, "-m", "stillstate.orchestration.cli", "prepare")
_WAIT_MAX_S: Final = 30.0
_FINAL_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True)
class Death:
    """How a driver ended: as in `Popen.returncode`, negative for a signal."""

    code: int

    @property
    def is_final(self) -> bool:
        """Whether the same start would end the same way, or no start is wanted."""
        return self.code == 0 or self.code in FINAL_EXITS or -self.code in _FINAL_SIGNALS

    @property
    def cause(self) -> str:
        """The cause, for people."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {-self.code} ({signal.Signals(-self.code).name})"
        except ValueError:
            return f"signal {-self.code}"

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class Life:
    """The life of the driver that died: the job's progress at the driver's start and now, and how long it lived."""

    progress_before: int
    progress: int
    lived_s: float
    is_stop_asked: bool


def decide_restart(death: Death, life: Life, tried: int, restarts_max: int) -> int | None:
    """Return the number of the restart in its row, from 1 on; None: the supervisor ends."""
    if death.is_final or life.is_stop_asked:
        return None
    helped = life.progress != life.progress_before or life.lived_s >= SETTLED_S
    number = 1 if helped else tried + 1
    return number if number <= restarts_max else None


def restart_wait_s(number: int) -> float:
    """Return the seconds before a restart: 0 before the first of a row, then 2, 4, 8 …"""
    return 0.0 if number <= 1 else min(_WAIT_MAX_S, 2.0 ** (number - 1))


def supervise(
    start: Callable[[str], subprocess.Popen[bytes]],
    look: Callable[[], tuple[int | None, bool]],
    restarts_max: int,
    *,
    cause: str,
    wait: Callable[[float], bool],
    monotonic_s: Callable[[], float],
    say: Callable[[str], object],
    may_go_on: Callable[[int], bool] = lambda pid: True,
) -> int:
    """Run a driver until it ends for good; return its exit code.

    Args:
        start: starts a driver for a cause.
        look: returns the job's progress (its newest checkpoint; None: it cannot be read), and whether a stop was
            requested.
        cause: of the first start.
        wait: waits for a number of seconds, and returns whether the supervisor was asked to end meanwhile.
        may_go_on: whether the first driver, of this process id, has come so far that the next one can continue from
            there.
    """
    is_first, tried = True, 0
    progress = 0  # before the first restart nothing is compared
    process = start(cause)
    while True:
        begun_s = monotonic_s()
        death = Death(process.wait())
        if wait(0) or death.is_final:
            return death.exit_code
        before, (seen, is_stop_asked) = progress, look()
        progress = before if seen is None else seen
        life = Life(before, progress, monotonic_s() - begun_s, is_stop_asked)
        number = decide_restart(death, life, tried, restarts_max)
        if number is None or (is_first and not may_go_on(process.pid)):
            say(f"the driver ended by {death.cause}; it is not started again here")
            return death.exit_code
        is_first = False
        tried = number
        said = f"{RESTARTED} after {death.cause} (restart {number} of {restarts_max} in a row)"
        say(said)
        # A stop that was requested meanwhile is still valid: it applies to the job, not to the run that has died.
        wait_s = restart_wait_s(number)
        if wait(wait_s) or (wait_s and look()[1]):
            say("it is not started again: a stop was asked for")
            return death.exit_code
        process = start(said)


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor; see the module."""
    config, job, restarts, standby = arguments[:4]
    border = arguments.index("--")
    once, command = list(arguments[4:border]), list(arguments[border + 1 :])
    first_cause = os.environ.pop(CAUSE_ENV, "")
    is_ending = False

    def say(line: str) -> None:
        print(f"supervisor of {job!r}: {line}", file=sys.stderr, flush=True)

    drivers = Drivers(
        lambda is_first: [*command, *(once if is_first else [])],
        lambda cause: {**os.environ, SUPERVISOR_ENV: str(os.getpid()), CAUSE_ENV: cause},
        keeps_one_waiting={"true": lambda: True, "false": lambda: False, "auto": _memory_is_left}[standby],
        say=say,
    )

    def end(number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        drivers.signal(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)

    def wait(seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while not is_ending and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.2))
        return is_ending

    ended = threading.Event()
    threading.Thread(target=_beside, args=(config, job, say, ended.wait), daemon=True).start()
    try:
        return supervise(
            drivers.start,
            lambda: _look(config, job, say),
            int(restarts),
            cause=first_cause,
            wait=wait,
            monotonic_s=time.monotonic,
            say=say,
            may_go_on=lambda pid: not once or _has_taken_the_job(config, job, pid, say),
        )
    finally:
        ended.set()
        drivers.end()


def _memory_is_left() -> bool:
    from stillstate.orchestration.running.memory import has_room_for_standby

    return has_room_for_standby()


def _beside(config: str, job: str, say: Callable[[str], object], wait: Callable[[float], bool]) -> None:
    """Do what can wait for the driver's start: import what a death makes necessary, and prepare the host.

    Args:
        wait: waits for a number of seconds, and returns whether the supervisor ends.
    """
    while not wait(PRELOAD_AFTER_S):
        progress, _ = _look(config, job, lambda line: None)
        if progress:
            break
    else:
        return
    from state_runtime.base.errors import StillstateError
    from stillstate.orchestration.config.spec import load_spec
    from stillstate.orchestration.running.prepare import is_wanted_by_itself

    try:
        if not load_spec(config).job(job).launcher.prepare or not is_wanted_by_itself():
            return
    except (StillstateError, OSError) as error:
        say(f"this host is not prepared: {error}")
        return
    say("prepares this host, so that drivers start faster: once, with low priority (launcher.prepare)")
    # A group of its own: it has children, and all of them end with the supervisor.
    making = subprocess.Popen(PREPARE, stdin=subprocess.DEVNULL, start_new_session=True)
    while making.poll() is None:
        if wait(1.0):
            os.killpg(making.pid, signal.SIGKILL)
            making.wait()


def _has_taken_the_job(config: str, job: str, pid: int, say: Callable[[str], object]) -> bool:
    """Whether that process does the newest run, and has committed the snapshot that the run begins with."""
    from state_runtime.base.errors import StillstateError
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.store import open_store
    from stillstate.orchestration.config.job_location import location_of
    from stillstate.orchestration.config.spec import load_spec

    try:
        spec = location_of(load_spec(config).job(job))
        status = Catalog(open_store(spec.store, spec.storage_options), job).status()
    except StillstateError as error:
        say(f"the job's root cannot be read: {type(error).__name__}")
        return False
    return status is not None and status.pid == pid and status.snapshot_id > 0


def _look(config: str, job: str, say: Callable[[str], object]) -> tuple[int | None, bool]:
    # Imported after the driver's start: two imports at the same time would make the start longer.
    from state_runtime.base.errors import StillstateError
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.snapshot.control import asked_to_stop
    from state_runtime.store import open_store
    from stillstate.orchestration.config.job_location import location_of
    from stillstate.orchestration.config.spec import load_spec
    from stillstate.orchestration.recovery.observe import progress_marker

    try:
        spec = location_of(load_spec(config).job(job))
        catalog = Catalog(open_store(spec.store, spec.storage_options), job)
        status = catalog.status()
        return progress_marker(catalog), status is not None and asked_to_stop(catalog.root, status.term)
    except StillstateError as error:
        # The store is unavailable or the root is damaged: the next driver reports that itself, and is counted.
        say(f"the job's root cannot be read: {type(error).__name__}")
        return None, False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
