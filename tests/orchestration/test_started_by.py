"""What a launcher tells a driver about its start, and what a driver can be asked when it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stillstate.orchestration.config.spec import load_spec
from stillstate.orchestration.running.run import CAUSE_CHARS_MAX, WORKER_STACKS_CONF, _stacks_of_workers, _started_by
from stillstate.orchestration.standby import CAUSE_ENV, SUPERVISOR_ENV


def test_cause_and_supervisor_are_taken_from_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver starts itself has another cause, and no supervisor."""
    monkeypatch.setenv(CAUSE_ENV, "x" * (CAUSE_CHARS_MAX + 1))
    monkeypatch.setenv(SUPERVISOR_ENV, "42")
    assert _started_by() == ("x" * CAUSE_CHARS_MAX, 42)
    assert _started_by() == ("", 0)


@pytest.mark.parametrize("text", ["", "-1", "x", "４２"])
def test_a_supervisor_that_is_no_process_id_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SUPERVISOR_ENV, text)
    assert _started_by() == ("", 0)


def test_python_workers_tell_their_stacks_before_a_run_counts_as_stalled(write_config: Callable[..., Path]) -> None:
    job = load_spec(write_config(extra="recovery: {stall_timeout_s: 60}")).job("flights")
    assert _stacks_of_workers(job) == {WORKER_STACKS_CONF: "30"}
    off = load_spec(write_config(extra="recovery: {stall_timeout_s: 0}")).job("flights")
    assert _stacks_of_workers(off) == {}


HANGS = """
import threading
from stillstate.orchestration.running.run import _show_stacks_on_request
_show_stacks_on_request()
def hangs():
    print("ready", flush=True)
    threading.Event().wait(60)
hangs()
"""


def test_a_driver_that_hangs_shows_its_stacks_when_it_is_asked() -> None:
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        said = ""
        while "in hangs" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
    finally:
        process.kill()
        process.communicate()
