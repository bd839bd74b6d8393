"""The processing time of a run's epochs, which timers and TTL use. It never decreases, and it never stops.

It is the clock's time, if that is trusted (base/trusted_clock.py). It can still be ahead of the clock: a wrong time may
have lasted until it was trusted, or an earlier run may have begun with it. A decrease would bring back state that has
expired in some places and not in others. A stop would hold all timers for as long as the clock was ahead. So processing
time runs at half speed until the clock has caught up: nothing is lost, and a timer that is due in a minute fires in
two.
"""

from __future__ import annotations

import logging

from state_runtime.base.clock import Clock
from state_runtime.base.limits import CLOCK_JUMP_MS
from state_runtime.snapshot.manifest import Manifest

__all__ = ["ProcessingTime"]

_LOG = logging.getLogger(__name__)

_CATCHING_UP_SPEED = 0.5


class ProcessingTime:
    """The processing time of one run; see above. The driver asks it from one thread at a time.

    Args:
        clock: a clock whose jumps are not trusted at once.
        last: the snapshot that the run resumes from.
        written_ms: when the run before wrote its last snapshot; 0: not known. `last` may be the fencing snapshot of
            this run, which is as old as the run.
    """

    def __init__(self, clock: Clock, last: Manifest, written_ms: int) -> None:
        self._clock = clock
        # The monotonic time of the last call, and the processing time then while it is ahead of the clock.
        self._asked_s, self._ahead_ms = clock.monotonic_s(), 0.0
        now_ms = clock.now_ms()
        ahead_ms = last.time.batch_time_ms - now_ms if last.time is not None else 0
        if ahead_ms > 0:
            # The time between two runs counts too, or processing time would stop in a job of short runs.
            went_by_ms = max(0, now_ms - written_ms) if written_ms else 0
            self._ahead_ms = now_ms + ahead_ms + went_by_ms * _CATCHING_UP_SPEED
        if ahead_ms > CLOCK_JUMP_MS:
            _LOG.error(
                "the job's processing time is %.0f s ahead of the clock: an earlier run had a clock that was wrong. It "
                "goes on at half speed until the clock has caught up; no row is lost, and timers and TTL take twice "
                "as long until then",
                ahead_ms / 1000,
            )

    def now_ms(self, head: Manifest, planned_ms: int | None = None) -> int:
        """Return the time of the epoch that follows a head.

        Args:
            planned_ms: when Spark planned the epoch's batch, by the clock of this machine; ignored if it is off by more
                than a clock may be.
        """
        now_ms = self._clock.now_ms()
        wanted_ms = now_ms
        if planned_ms is not None and now_ms - planned_ms <= CLOCK_JUMP_MS:
            wanted_ms = min(planned_ms, now_ms)
        reached_ms = head.time.batch_time_ms if head.time is not None else 0
        now_s = self._clock.monotonic_s()
        went_by_ms, self._asked_s = (now_s - self._asked_s) * 1000, now_s
        if not self._ahead_ms and wanted_ms >= reached_ms:
            return wanted_ms
        slow_ms = max(reached_ms, (self._ahead_ms or reached_ms) + went_by_ms * _CATCHING_UP_SPEED)
        self._ahead_ms = slow_ms if slow_ms > wanted_ms else 0.0
        return max(wanted_ms, int(slow_ms))
