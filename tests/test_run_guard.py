"""Nothing that a test run has started outlives it, however the run ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tests import run_guard
from tests.typed import ROOT

pytestmark = pytest.mark.skipif(not run_guard.HAS_GUARD, reason="this system cannot wait for a process by number")

RUN = """
import subprocess, sys
from tests import run_guard
run_guard.start(grace_s=0.2)
left = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
sys.stdin.read()
"""
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
ORDERLY = """
import os, signal, sys
def ends(*_):
    print("in order", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, ends)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
RISES = """
import os, signal, subprocess, sys
def rises(*_):
    print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True).pid, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, rises)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_this_run_is_guarded() -> None:
    assert os.environ[run_guard.MARK]


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize(("left", "says"), [(STUBBORN, ""), (ORDERLY, "in order"), (RISES, "a number")])
def test_what_a_run_has_left_ends_with_it(left: str, says: str, is_killed: bool) -> None:
    """It is told to end first; what does not, and what it starts then, in a session of its own, is killed."""
    environment = {name: value for name, value in os.environ.items() if name != run_guard.MARK}
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, left],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stdin is not None
    ends = [os.pidfd_open(int(run.stdout.readline()))]
    if is_killed:
        run.send_signal(signal.SIGKILL)
    run.stdin.close()
    if says == "a number":
        ends.append(os.pidfd_open(int(run.stdout.readline())))
    elif says:
        assert run.stdout.readline().strip() == says
    for process in ends:
        assert select.select([process], [], [], 60)[0], "it still runs"
        os.close(process)
    assert run.wait(60) == (-signal.SIGKILL if is_killed else 0)
    run.stdout.close()
