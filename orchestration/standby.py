"""The standby driver: started beside the working driver, with Java, Spark's session and the job's code loaded, so that
after a death neither their start nor Java's first compilation costs time.

This is the supervisor's side, and the messages between both sides; `orchestration/running/standby.py` is the driver's
side. Each supervised driver has two pipes. The supervisor calls the driver through the first: a standby reads one line
with the cause; the pipe's end means that the supervisor is gone. Through the second the driver reports that it is
ready, and that it has made its first checkpoint. Only then may the next standby start, so that it takes no cores from a
job that has just come back.

This module imports little, because a driver's start must not wait for its imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

__all__ = [
    "AT_WORK",
    "CAUSE_ENV",
    "PIPES_ENV",
    "READY",
    "RESTARTED",
    "SETTLED_S",
    "SUPERVISOR_ENV",
    "WAITS_ENV",
    "Driver",
    "Drivers",
    "call_line",
    "cause_of_call",
]

CAUSE_ENV: Final = "STILLSTATE_START_CAUSE"
"""Why a driver was started, for people."""
RESTARTED: Final = "restarted by its supervisor"
"""The beginning of the cause of a restart in place."""
SETTLED_S: Final = 600.0
"""A driver that fails because of its code or its state fails within its first epochs: one that lived for this long did
not die of its start. After it, restarts in place and recovery runs are counted from one again."""
SUPERVISOR_ENV: Final = "STILLSTATE_SUPERVISOR_PID"
PIPES_ENV: Final = "STILLSTATE_SUPERVISOR_PIPES"
"""Descriptors of the supervisor's two pipes: the driver reads calls from the first and writes to the second."""
WAITS_ENV: Final = "STILLSTATE_STANDBY"
"""Set for a driver that is to wait for its call."""
READY: Final = b"r"
AT_WORK: Final = b"w"
ENDED: Final = b""
END_WAIT_S: Final = 10.0


def call_line(cause: str) -> bytes:
    """Return the line that calls a standby."""
    return json.dumps({"cause": cause}).encode() + b"\n"


def cause_of_call(line: bytes) -> str | None:
    """Return the cause in a call; None: the supervisor is gone, or wrote something else."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    cause = said.get("cause") if isinstance(said, dict) else None
    return cause if isinstance(cause, str) else None


class Driver:
    """A driver process of this supervisor. Life cycle: started → (waits → `call`) → works → ends.

    Args:
        said: is called, in a thread, with each of `READY` and `AT_WORK` that the driver writes, and with `ENDED`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        waits: bool,
        said: Callable[[Driver, bytes], object],
    ) -> None:
        self.is_ready = False
        called, self._call = os.pipe()
        self._told, tells = os.pipe()
        pipes = {PIPES_ENV: f"{called},{tells}", **({WAITS_ENV: "1"} if waits else {})}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={**environment, **pipes},
                pass_fds=(called, tells),
            )
        except BaseException:
            os.close(self._call)
            os.close(self._told)
            raise
        finally:
            os.close(called)
            os.close(tells)
        self._said = said
        threading.Thread(target=self._listen, name="stillstate-supervised", daemon=True).start()

    def _listen(self) -> None:
        """Read until the process has ended; only this thread closes the descriptor."""
        while word := os.read(self._told, 1):
            self.is_ready |= word == READY
            self._said(self, word)
        os.close(self._told)
        self._said(self, ENDED)

    def call(self, cause: str) -> bool:
        """Let a standby begin; False: it is gone."""
        try:
            os.write(self._call, call_line(cause))
        except OSError:
            return False  # the other end is closed
        return True

    def end(self) -> None:
        """End a standby: it has changed nothing."""
        self.hang_up()
        try:
            self.process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def hang_up(self) -> None:
        """Close the call pipe: a working driver does not notice it, and a standby ends."""
        if self._call >= 0:
            with suppress(OSError):
                os.close(self._call)
            self._call = -1


class Drivers:
    """Starts drivers, each with a standby beside it if `keeps_one_waiting`. Used only by the supervisor's one thread,
    except for the messages of a driver.

    Args:
        command: of a start: the first driver's, and that of all later ones.
        keeps_one_waiting: asked behind each driver's first checkpoint.
        say: for the log.
    """

    def __init__(
        self,
        command: Callable[[bool], Sequence[str]],
        environment: Callable[[str], Mapping[str, str]],
        *,
        keeps_one_waiting: Callable[[], bool],
        say: Callable[[str], object],
    ) -> None:
        self._command = command
        self._environment = environment
        self._keeps_one_waiting = keeps_one_waiting
        self._say = say
        self._lock = threading.Lock()
        self._is_ending = False
        self._working: Driver | None = None
        self._waiting: Driver | None = None

    def start(self, cause: str) -> subprocess.Popen[bytes]:
        """Start the next driver: the standby, if there is one."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
            before, is_first = self._working, self._working is None
            if before is not None:
                before.hang_up()
            if waiting is not None and waiting.call(cause):
                self._say(f"process {waiting.process.pid} stood by and takes over")
                made = waiting
            else:
                if waiting is not None:
                    waiting.end()
                made = Driver(self._command(is_first), self._environment(cause), waits=False, said=self._heard)
            self._working = made
        return made.process

    def signal(self, number: int) -> None:
        """Pass a signal on to the working driver, and end the standby. Called in a signal handler."""
        self._is_ending = True
        if self._working is not None:
            with suppress(ProcessLookupError):
                self._working.process.send_signal(number)

    def end(self) -> None:
        """Start no more drivers."""
        self._is_ending = True
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.end()

    def _heard(self, driver: Driver, word: bytes) -> None:
        if word == READY:
            self._say(f"process {driver.process.pid} stands by")
        if word == ENDED and driver is self._waiting:
            self._say(f"process {driver.process.pid}, which stood by, has ended; the next start is an ordinary one")
        if word != AT_WORK or not self._keeps_one_waiting():
            return
        with self._lock:
            if driver is not self._working or self._waiting is not None or self._is_ending:
                return
            try:
                self._waiting = Driver(self._command(False), self._environment(""), waits=True, said=self._heard)
            except OSError as error:
                self._say(f"no driver stands by: {error}")
