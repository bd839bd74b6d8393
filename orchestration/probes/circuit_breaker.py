"""Whether a store may be asked, decided from its earlier answers; pure, gets the time as an argument.

closed ──2 failures in a row──▶ open (30 s) ──time is up──▶ one look ──answered──▶ closed
                                  ▲                            │
                                  └──────twice as long, ≤ 5 min┘ failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["FAILURES_TO_OPEN", "OPEN_FIRST_S", "OPEN_MAX_S", "CircuitBreaker"]

OPEN_FIRST_S: Final = 30.0
OPEN_MAX_S: Final = 300.0
FAILURES_TO_OPEN: Final = 2
"""In a row over all looks at the store: one job with a slow folder does not close the store to the others. The second
must begin after the first has failed: looks that fail together have one cause, which may be this machine."""


@dataclass
class CircuitBreaker:
    """The record of one store.

    Attributes:
        failures: in a row.
        since_s: when the first of them was; None while the store answers.
        failed_s: when the newest that counts was.
        open_until_s: no look begins before.
        open_for_s: how long it was last closed to looks; 0 if it is open to them.
        is_probing: one look was let through as a test.
    """

    failures: int = 0
    since_s: float | None = None
    failed_s: float = float("-inf")
    open_until_s: float = 0.0
    open_for_s: float = 0.0
    is_probing: bool = False

    def state(self, now_s: float) -> Literal["closed", "open", "half-open"]:
        """Return the state. `half-open`: one look may test the store, the others wait for it."""
        if not self.open_for_s:
            return "closed"
        return "open" if now_s < self.open_until_s else "half-open"

    def answered(self) -> None:
        """Record that a look got an answer, of any kind."""
        self.failures, self.since_s, self.failed_s = 0, None, float("-inf")
        self.open_for_s, self.is_probing = 0.0, False

    def failed(self, now_s: float, *, began_s: float, probe: bool) -> None:
        """Record that a look got no answer."""
        if began_s >= self.failed_s:
            self.failures, self.failed_s = self.failures + 1, now_s
        if self.since_s is None:
            self.since_s = now_s
        if probe:
            self.is_probing = False
            self._open(now_s, min(OPEN_MAX_S, 2 * self.open_for_s))
        elif not self.open_for_s and self.failures >= FAILURES_TO_OPEN:
            self._open(now_s, OPEN_FIRST_S)
        # else: the look began before the breaker opened, and says nothing new.

    def _open(self, now_s: float, for_s: float) -> None:
        self.open_for_s, self.open_until_s = for_s, now_s + for_s
