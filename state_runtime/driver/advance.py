"""When a run last advanced. This distinguishes a run that hangs while its heart beats from a run with nothing to do.

A run advances when an epoch ends, is tried again, or is checkpointed; when a task of Stillstate acknowledges; when
Spark ends a task; or when the source was asked and has nothing new, and no epoch of Stillstate is under way or due.
A run that does none of these for a long time hangs: in a task, in a source that does not answer, or in user code that
is in a deadlock. The reader of the heartbeat decides how long is too long; see orchestration/recovery/health.py.
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
# Asking Spark costs a few calls to Java, so it is asked only when Stillstate itself has not advanced for a while.
ASK_SPARK_AFTER_S: Final = 5.0
# Of a stack, the innermost calls; of threads that are at the same place, the first names.
FRAMES_MAX: Final = 100
NAMES_MAX: Final = 5

_LOG = logging.getLogger(__name__)


class Advance:
    """When the run last advanced: written by a separate thread, read by the heartbeat's.

    Args:
        stall_timeout_s: time without an advance after which the stacks of all threads are logged, once; 0: never.
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
        """Return the wall clock of the last advance, and whether the source is quiet. For the heartbeat."""
        with self._lock:
            return self._at_ms, self._is_quiet

    def moved(self, *, quiet: bool = False) -> None:
        """Note that the run has advanced, or has nothing to do."""
        with self._lock:
            self._at_s, self._at_ms = self._clock.monotonic_s(), self._clock.now_ms()
            self._is_quiet, self._dumped = quiet, False

    def following(
        self, mark: Callable[[], Hashable], is_idle: Callable[[], bool], tasks_done: Callable[[], Hashable]
    ) -> threading.Event:
        """Look repeatedly, until the returned event is set. A separate thread does it, because the run's thread may be
        waiting for a hanging epoch."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_INTERVAL_S):
                try:
                    self.look(mark(), is_idle, tasks_done)
                except Exception:
                    # Spark is ending, or has died; the end of the run says why. A run that only seems to hang is
                    # found by its heartbeat.
                    _LOG.debug("how far the run is cannot be seen", exc_info=True)

        threading.Thread(target=follow, name="stillstate-advance", daemon=True).start()
        return over

    def look(self, mark: Hashable, is_idle: Callable[[], bool], tasks_done: Callable[[], Hashable]) -> None:
        """Look once whether the run has advanced.

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
        """Log the stacks of all threads if the run has not advanced for too long, once per stall. The heartbeat's
        thread calls this: it is never the one that hangs."""
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
    """Describe where every thread of this process is, innermost call first: file, line and function, no values. The
    main thread comes first. Threads at the same place are listed once, with their number.

    `faulthandler` would do the same, but stops after 100 threads, newest first: with that many calls from Java it omits
    the main thread, which is the one that hangs.
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
    """Return the frame of each thread, with Python's garbage collection suspended. In 3.11 (also 3.11.7) the call holds
    a lock that garbage, e.g. a `threading.local`, may need: the whole process would hang
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
