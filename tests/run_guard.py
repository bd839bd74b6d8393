"""What a test run has started ends with it, also if the run was killed and could end nothing.

A run (the pytest that was started by hand, not its workers) marks its environment, which all that it starts inherits,
drivers in sessions of their own included; and it starts this file as a process that waits for its end, and then ends
whatever has the mark. A supervisor that nobody ended starts its driver again for ever.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from time import monotonic

MARK = "STILLSTATE_TEST_RUN"
GRACE_S = 10.0
"""For what ends in order when it is told to: Java removes its folders, a job stops behind its epoch."""
ROUNDS_MAX = 20
HAS_GUARD = hasattr(os, "pidfd_open")  # Linux

_STARTED: list[subprocess.Popen[bytes]] = []  # held, so that no warning says that it still runs


def start(grace_s: float = GRACE_S) -> None:
    """Guard this process, unless it is part of a run that is guarded already."""
    if MARK in os.environ or not HAS_GUARD:
        return
    os.environ[MARK] = uuid.uuid4().hex
    nowhere = subprocess.DEVNULL
    _STARTED.append(
        subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), str(grace_s)],
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        )
    )


def guard(run_pid: int, grace_s: float) -> None:
    """Wait for the end of a run, and end what it has left."""
    if os.getppid() == run_pid:  # else it has ended already
        select.select([os.pidfd_open(run_pid)], [], [])
    mark = f"{MARK}={os.environ[MARK]}".encode()
    signal_all(mark, signal.SIGTERM, grace_s)
    # What was started meanwhile is found in the next round.
    for _ in range(ROUNDS_MAX):
        if not signal_all(mark, signal.SIGKILL, grace_s):
            break


def signal_all(mark: bytes, number: int, wait_s: float) -> bool:
    """Send a signal to each process with the mark, and wait until they have ended; whether there was one."""
    ends = select.poll()
    waited = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            process = os.pidfd_open(int(folder.name))
        except OSError:
            continue  # it has ended
        try:
            # Opened before: the number cannot be another process's by now.
            is_ours = mark in (folder / "environ").read_bytes().split(b"\0")
            if is_ours:
                signal.pidfd_send_signal(process, number)
        except OSError:
            is_ours = False  # it has ended, or is somebody else's
        if is_ours:
            ends.register(process, select.POLLIN)
            waited += 1
        else:
            os.close(process)
    found, until_s = waited > 0, monotonic() + wait_s
    while waited and (left_s := until_s - monotonic()) > 0:
        for process, _ in ends.poll(left_s * 1000):
            ends.unregister(process)
            os.close(process)
            waited -= 1
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]), float(sys.argv[2]))
