"""The only place that reads the time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock", "time_text"]


class Clock(Protocol):
    """Wall clock for times that people read, monotonic clock for durations."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch (UTC)."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()

_FIRST_MS, _YEAR_10000_MS = -62_135_596_800_000, 253_402_300_800_000


def time_text(at_ms: int) -> str:
    """Return a time as `2013-01-01 12:00:00Z`; in milliseconds what no calendar has: a store may hold any number."""
    if not _FIRST_MS <= at_ms < _YEAR_10000_MS:
        return f"{at_ms} ms"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
