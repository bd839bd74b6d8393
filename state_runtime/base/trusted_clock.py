"""A wall clock whose jumps are not believed at once.

A wrong clock (a bad time server, a restored guest, a typing error) may jump by a month and back. The effects of a time
that was never reached cannot be undone: state expires, timers fire, history ages. The monotonic clock does not jump, so
it distinguishes a step of the wall clock from elapsed time.

    believed ──a step of more than CLOCK_JUMP_MS──▶ in doubt: time continues from before the step, at its usual speed
    in doubt ──the clock is back at the time reached by now──▶ believed
    in doubt ──the witness confirms the time of the clock──▶ believed
    in doubt ──no witness, and the step has lasted CLOCK_LASTS_S──▶ believed

The witness is a clock of another machine: the store's. While it contradicts a step, the step is not believed. A host
that was suspended makes a step too: with a witness it is believed at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.base.errors import StillstateError
from state_runtime.base.limits import CLOCK_JUMP_MS, CLOCK_LASTS_S

__all__ = ["TrustedClock"]

_LOG = logging.getLogger(__name__)

_ASK_EVERY_S = 60.0


@dataclass
class _Doubt:
    """A step that is not believed: its size, since when (monotonic), and when the witness was last asked."""

    step_ms: float
    since_s: float
    asked_s: float | None = None
    is_contradicted: bool = False
    is_confirmed: bool = False


class TrustedClock:
    """A clock as described above. For any thread.

    Args:
        witness_ms: returns the time of another machine's clock; None if there is none. Its exceptions are logged.
    """

    def __init__(self, clock: Clock, witness_ms: Callable[[], int | None]) -> None:
        self._clock = clock
        self._witness_ms = witness_ms
        self._lock = threading.Lock()
        self._at_s, self._at_ms = clock.monotonic_s(), float(clock.now_ms())
        self._doubt: _Doubt | None = None
        told_ms = self._told_ms()
        if told_ms is not None and abs(told_ms - self._at_ms) > CLOCK_JUMP_MS:
            _LOG.error(
                "this machine's clock is %.0f s ahead of the store's (negative: behind); the earlier of the two counts "
                "for processing time and for what snapshots are dated. Set the clock right",
                (self._at_ms - told_ms) / 1000,
            )
            self._at_ms = min(self._at_ms, told_ms)

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    def now_ms(self) -> int:
        """Return the time that is believed. While a step is in doubt, a call may ask the witness, at most once a
        minute; meanwhile other threads continue without waiting for the store's answer."""
        with self._lock:
            believed_ms, asks = self._go_on()
        if not asks:
            return believed_ms
        asked_s, told_ms = self._clock.monotonic_s(), self._told_ms()
        with self._lock:
            # An answer that took long says nothing of the clock as it is now: another one is asked for in a minute.
            if (self._clock.monotonic_s() - asked_s) * 1000 <= CLOCK_JUMP_MS / 2:
                self._hear(told_ms)
            return self._go_on()[0]

    def _go_on(self) -> tuple[int, bool]:
        """Update the believed time; return it, and whether this thread must ask the witness."""
        now_s, wall_ms = self._clock.monotonic_s(), self._clock.now_ms()
        went_on_ms = self._at_ms + (now_s - self._at_s) * 1000
        doubt = self._doubted(wall_ms - went_on_ms, now_s)
        asks = doubt is not None and (doubt.asked_s is None or now_s - doubt.asked_s >= _ASK_EVERY_S)
        if doubt is not None and asks:
            doubt.asked_s = now_s
        elif doubt is not None and self._is_over(doubt, now_s):
            doubt = self._doubt = None
        self._at_s, self._at_ms = now_s, float(wall_ms) if doubt is None else went_on_ms
        return int(self._at_ms), asks

    def _doubted(self, step_ms: float, now_s: float) -> _Doubt | None:
        """Return the doubt for a step: the present one or a new one; None if it is no step."""
        doubt = self._doubt
        if abs(step_ms) <= CLOCK_JUMP_MS:
            if doubt is not None:
                _LOG.warning("this machine's clock is right again, %.0f s after it jumped", now_s - doubt.since_s)
            self._doubt = None
        elif doubt is None or abs(step_ms - doubt.step_ms) > CLOCK_JUMP_MS:
            self._doubt = _Doubt(step_ms, now_s)
            _LOG.error(
                "this machine's clock jumped by %.0f s. It is not believed: processing time goes on from before the "
                "jump, and no timer fires and no state expires for it. It counts once the store's clock says the same, "
                "or (where the store has no clock of its own) after %.0f s. If the clock is wrong, set it right before",
                step_ms / 1000,
                CLOCK_LASTS_S,
            )
        return self._doubt

    def _is_over(self, doubt: _Doubt, now_s: float) -> bool:
        """Return whether a step is believed by now."""
        if doubt.is_confirmed:
            _LOG.warning(
                "the store's clock says the same: processing time follows the clock, by %.0f s", doubt.step_ms / 1000
            )
            return True
        if doubt.is_contradicted or now_s - doubt.since_s < CLOCK_LASTS_S:
            return False
        _LOG.error(
            "this machine's clock has been %.0f s off what it was for %.0f s: it is believed from now on. Timers fire "
            "and state expires by it",
            doubt.step_ms / 1000,
            now_s - doubt.since_s,
        )
        return True

    def _hear(self, told_ms: int | None) -> None:
        """Record the witness's time for the clock as it is now; None: no answer."""
        if self._doubt is not None and told_ms is not None:
            self._doubt.is_contradicted = abs(told_ms - self._clock.now_ms()) > CLOCK_JUMP_MS
            self._doubt.is_confirmed = not self._doubt.is_contradicted

    def _told_ms(self) -> int | None:
        try:
            return self._witness_ms()
        except (StillstateError, FileNotFoundError):
            _LOG.warning("the store could not be asked for the time", exc_info=True)
            return None
