"""Whether a job gains on a source: how the age of the oldest unread record changes; pure but for its samples."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["WINDOW_S", "AgeTrend"]

WINDOW_S: Final = 900.0
"""Long enough for several batches, whose ends let the age fall."""
_COMPLETE: Final = 0.95


class AgeTrend:
    """The ages of the last quarter of an hour.

    Between two batches the age grows, and falls when one ends. So the lowest of the later half is compared with the
    lowest of the earlier half.
    """

    def __init__(self) -> None:
        self._ages: deque[tuple[int, float]] = deque()

    def change_s(self, now_ms: int, age_s: float) -> float | None:
        """Add an age, and return the change; negative: the job gains. None until the window is full."""
        self._ages.append((now_ms, age_s))
        while self._ages[0][0] < now_ms - WINDOW_S * 1000:
            self._ages.popleft()
        middle_ms = now_ms - WINDOW_S * 500
        earlier = [age for at_ms, age in self._ages if at_ms < middle_ms]
        if now_ms - self._ages[0][0] < WINDOW_S * 1000 * _COMPLETE:
            return None
        return min(age for at_ms, age in self._ages if at_ms >= middle_ms) - min(earlier)
