"""Processes that a soak forks off one that has imported everything and used none of it, so that each takes as long as its work."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from typing import Any

__all__ = ["ended", "forked", "given_up", "hear_children", "killed"]

DUMP_S = 3.0


def hear_children() -> None:
    """Once, before the first is begun: the end of one waits until it is asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])


def forked(work: Any) -> int:
    """Begin a process that does some work; its pid. It ends with 0, or with 1 after its error went to stderr."""
    pid = os.fork()
    if pid:
        # A group of its own, with whatever it starts; whoever of the two is first makes it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int, limit_s: float) -> int | None:
    """Wait for a process; its exit code (minus the signal), or None if it goes on after the limit."""
    deadline_s = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        # Blocked by `hear_children`: the end of a child waits here until it is asked for.
        signal.sigtimedwait([signal.SIGCHLD], left_s)


def given_up(pid: int) -> None:
    """Kill a process that hangs, once it has said where each of its threads stands."""
    os.kill(pid, signal.SIGUSR1)
    if ended(pid, DUMP_S) is None:
        killed(pid)


def killed(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
