"""When a run last got on, so that one whose heart beats and whose epochs never end can be told from one with nothing to
do.

Getting on is: an epoch ended, was tried again, or checkpointed; a task of ours acknowledged; Spark ended a task; or
the source was asked, has nothing new, and no epoch of ours is under way or due. What waits for none of these for long
hangs: a task, a source that does not answer, user code in a deadlock. Who decides how long is long reads the
heartbeat; see orchestration/recovery/health.py.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Final

from state_runtime.base.clock import Clock

__all__ = ["Advance", "stacks_of_all_threads"]

LOOK_INTERVAL_S: Final = 1.0
# Asking Spark costs a few calls to Java, so it is asked only when nothing of our own has moved for a while.
ASK_SPARK_AFTER_S: Final = 5.0
# Of a stack, the innermost calls; of threads that stand at the same place, the first names.
FRAMES_MAX: Final = 100
NAMES_MAX: Final = 5

_LOG = logging.getLogger(__name__)


class Advance:
    """When the run last got on: noted by a thread of its own, read by the heartbeat's.

    Args:
        stall_timeout_s: without getting on for so long, the stacks of all threads are logged, once; 0: never.
    """

    def __init__(self, clock: Clock, stall_timeout_s: float = 0.0) -> None:
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._mark: Hashable = None
        self._tasks: Hashable = None
        self._at_s = clock.monotonic_s()
        self._at_ms = clock.now_ms()
        self._is_quiet = False
        self._dumped = False

    def seen(self) -> tuple[int, bool]:
        """Wall clock of when the run last got on, and whether its source is quiet. For the heartbeat."""
        with self._lock:
            return self._at_ms, self._is_quiet

    def moved(self, *, quiet: bool = False) -> None:
        """The run has got on, or has nothing to do."""
        with self._lock:
            self._at_s, self._at_ms = self._clock.monotonic_s(), self._clock.now_ms()
            self._is_quiet, self._dumped = quiet, False

    def following(
        self, mark: Callable[[], Hashable], is_idle: Callable[[], bool], tasks_done: Callable[[], Hashable]
    ) -> threading.Event:
        """Look again and again, in a thread of its own (the run's may wait for the epoch that hangs), until the event
        that this returns is set."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_INTERVAL_S):
                try:
                    self.look(mark(), is_idle, tasks_done)
                except Exception:
                    # Spark is ending, or has died; whoever ends the run says why. A run that only seems to stand is
                    # found by its heartbeat.
                    _LOG.debug("how far the run is cannot be seen", exc_info=True)

        threading.Thread(target=follow, name="stillstate-advance", daemon=True).start()
        return over

    def look(self, mark: Hashable, is_idle: Callable[[], bool], tasks_done: Callable[[], Hashable]) -> None:
        """Look once whether the run has got on.

        Args:
            mark: changes with every epoch, attempt and acknowledgement.
            is_idle: whether the source was asked and has nothing, and nothing else is under way or due.
            tasks_done: changes with every task that Spark ends; asked only when nothing else has moved.
        """
        now_s = self._clock.monotonic_s()
        if mark != self._mark:
            self._mark = mark
            self.moved()
        elif is_idle():
            self.moved(quiet=True)
        elif now_s - self._at_s >= ASK_SPARK_AFTER_S and (tasks := tasks_done()) != self._tasks:
            self._tasks = tasks
            self.moved()
        else:
            with self._lock:
                self._is_quiet = False

    def tell_if_stalled(self) -> bool:
        """Log the stacks of all threads if the run has not got on for too long; once each time. From the heartbeat's
        thread: whatever hangs, it is not that one."""
        with self._lock:
            stood_s = self._clock.monotonic_s() - self._at_s
            if self._dumped or not self._stall_timeout_s or stood_s < self._stall_timeout_s:
                return False
            self._dumped = True
        _LOG.error(
            "no epoch and no task has ended for %.0f s, and the source is not quiet: the run hangs. What its threads "
            "do (the stacks of hanging Python workers are above, from Spark):\n%s",
            stood_s,
            stacks_of_all_threads(),
        )
        return True


def stacks_of_all_threads() -> str:
    """Where every thread of this process stands, innermost call first: file, line and function, no values. The main
    thread comes first; threads that stand at the same place are told once, with how many they are.

    `faulthandler` would do the same, but ends after 100 threads, newest first: with as many calls from Java the main
    thread, which is the one that hangs, is left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    at: dict[str, list[str]] = {}
    for ident, frame in sorted(_frames().items(), key=lambda held: held[0] != main):
        calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES_MAX, lookup_lines=False)
        stack = "\n".join(f'  File "{call.filename}", line {call.lineno}, in {call.name}' for call in calls)
        at.setdefault(stack, []).append(names.get(ident, str(ident)))
    return "\n\n".join(f"{_named(threads)}:\n{stack}" for stack, threads in at.items())


def _frames() -> dict[int, FrameType]:
    """The frame of each thread. Not while Python may look for garbage: in 3.11 (also 3.11.7) the call holds a lock that
    garbage may need, e.g. a `threading.local`, and the whole process would hang
    (https://github.com/python/cpython/issues/106883)."""
    looks = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001 - Python documents it, for just this
    finally:
        if looks:
            gc.enable()


def _named(threads: list[str]) -> str:
    if len(threads) == 1:
        return f"Thread {threads[0]}"
    more = f" and {len(threads) - NAMES_MAX} more" if len(threads) > NAMES_MAX else ""
    return f"{len(threads)} threads ({', '.join(threads[:NAMES_MAX])}{more})"
