"""When a run counts as getting on, and that one which hangs says where."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Hashable

import pytest
from model import FakeClock

from state_runtime.driver.advance import ASK_SPARK_AFTER_S, Advance, stacks_of_all_threads


class Run:
    """A run as `Advance` sees it."""

    def __init__(self, stall_timeout_s: float = 900.0) -> None:
        self.clock = FakeClock()
        self.advance = Advance(self.clock, stall_timeout_s)
        self.mark: Hashable = (0, 0, 0)
        self.tasks: Hashable = ()
        self.idle = False
        self.asked = 0
        self.look()

    def look(self, after_s: float = 0.0) -> tuple[float, bool]:
        """Seconds since the run got on, and whether its source is quiet."""
        self.clock.advance_s(after_s)
        self.advance.look(self.mark, lambda: self.idle, self._tasks)
        at_ms, quiet = self.advance.seen()
        return (self.clock.now_ms() - at_ms) / 1000, quiet

    def _tasks(self) -> Hashable:
        self.asked += 1
        return self.tasks


def test_an_epoch_an_attempt_or_an_acknowledgement_is_getting_on() -> None:
    run = Run()
    run.look(ASK_SPARK_AFTER_S)  # the first answer of Spark is news too
    assert run.look(100.0) == (100.0, False)
    for mark in ((1, 0, 0), (1, 1, 0), (1, 1, 5)):
        run.mark = mark
        assert run.look(100.0) == (0.0, False)


def test_a_quiet_source_is_getting_on() -> None:
    run = Run()
    run.idle = True
    assert run.look(10_000.0) == (0.0, True)
    run.idle = False
    assert run.look(1.0) == (1.0, False)


def test_a_task_that_spark_ends_is_getting_on_and_spark_is_asked_only_when_nothing_else_moves() -> None:
    run = Run()
    run.look(1.0)
    assert run.asked == 0
    run.mark = (1, 0, 0)
    run.look()
    run.tasks = ((1, 3),)
    assert run.look(ASK_SPARK_AFTER_S) == (0.0, False)
    assert run.asked == 1
    assert run.look(ASK_SPARK_AFTER_S + 1)[0] == ASK_SPARK_AFTER_S + 1
    run.tasks = ((1, 4),)
    assert run.look(1.0) == (0.0, False)


def test_a_run_that_hangs_logs_its_stacks_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(stall_timeout_s=900)
    run.clock.advance_s(899)
    assert not run.advance.tell_if_stalled()
    run.clock.advance_s(1)
    with caplog.at_level(logging.ERROR):
        assert run.advance.tell_if_stalled()
        assert not run.advance.tell_if_stalled()
    assert "the run hangs" in caplog.text
    assert "Thread MainThread:" in caplog.text
    assert "test_advance.py" in caplog.text
    run.advance.moved()
    run.clock.advance_s(900)
    assert run.advance.tell_if_stalled()


def test_without_a_limit_nothing_is_said() -> None:
    run = Run(stall_timeout_s=0)
    run.clock.advance_s(1e6)
    assert not run.advance.tell_if_stalled()


def test_the_stacks_are_those_of_every_thread_the_main_one_first() -> None:
    """However many there are: calls from Java leave threads behind, and those stand at one and the same place."""
    go, there = threading.Event(), threading.Barrier(151)

    def waits_for_good() -> None:
        there.wait(30)
        go.wait(30)

    threads = [threading.Thread(target=waits_for_good) for _ in range(150)]
    for thread in threads:
        thread.start()
    there.wait(30)
    try:
        stacks = stacks_of_all_threads()
    finally:
        go.set()
        for thread in threads:
            thread.join()
    first, *others = stacks.split("\n\n")
    assert first.startswith("Thread MainThread:")
    assert "in test_the_stacks_are_those_of_every_thread_the_main_one_first" in first
    waiting = [stack for stack in others if "in waits_for_good" in stack]
    assert sum(int(stack.split()[0]) if "threads (" in stack else 1 for stack in waiting) == 150
    assert len(stacks) < 50_000


_WITH_GARBAGE = """
import gc
import threading
from state_runtime.driver import advance

go, there = threading.Event(), threading.Barrier(201)

def waits():
    there.wait(30)
    go.wait(30)

for _ in range(200):
    threading.Thread(target=waits, daemon=True).start()
there.wait(30)
enumerate_threads = threading.enumerate

def leaves_garbage():
    found = enumerate_threads()
    gc.collect()
    # Fewer than there are frames to be made.
    gc.set_threshold(100)
    cycle = [threading.local()]
    cycle[0].of, cycle = cycle, None
    return found

threading.enumerate = leaves_garbage
print(advance.stacks_of_all_threads(), "looks for garbage again:", gc.isenabled())
go.set()
"""


def test_stacks_are_told_while_there_is_garbage_that_needs_python_s_own_lock() -> None:
    """Else the process that hangs in a task hangs in its watch, too, and its heartbeat with it."""
    told = subprocess.run([sys.executable, "-c", _WITH_GARBAGE], capture_output=True, text=True, timeout=60, check=True)
    assert "in waits" in told.stdout
    assert "looks for garbage again: True" in told.stdout


def test_a_look_that_fails_is_taken_again() -> None:
    """Spark is ending, say: the thread must not die of it."""
    advance, looked = Advance(FakeClock()), threading.Event()
    calls: list[int] = []

    def mark() -> Hashable:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Java has gone")
        looked.set()
        return 0

    over = advance.following(mark, lambda: True, lambda: ())
    assert looked.wait(30)
    over.set()
