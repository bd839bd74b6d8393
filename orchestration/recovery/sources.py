"""What a person should know of the sources of a job that runs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from state_runtime.base.source_state import SourceState
from stillstate.orchestration.text import count_text, time_text

__all__ = ["AWAY_TOLD_S", "RETENTION_TOLD_S", "SourceTrouble", "source_trouble"]

AWAY_TOLD_S: Final = 15.0
"""A broker that restarts, or a leader that moves, takes some seconds."""
RETENTION_TOLD_S: Final = 6 * 3600.0
"""Time for a person to look, also at night."""


@dataclass(frozen=True)
class SourceTrouble:
    """A headline, and one line with moments and no durations."""

    headline: str
    reason: str


def source_trouble(sources: Sequence[SourceState], now_ms: int) -> SourceTrouble | None:
    """Return the first of the sources' troubles that needs a look: one that is away comes before records that go."""
    for source in sources:
        if source.away_s(now_ms) >= AWAY_TOLD_S:
            since = time_text(source.away_since_ms)
            return SourceTrouble("a source does not answer", f"nothing is read since {since}: {source.said}")
    for source in sources:
        if 0 <= source.retention_left_s < RETENTION_TOLD_S:
            goes = time_text(source.asked_at_ms + int(source.retention_left_s * 1000))
            return SourceTrouble(
                "a source removes records before they are read",
                f"source {source.name!r} removes records from {goes} on that the job has not read; it is "
                f"{count_text(source.behind)} behind. Give the job more shards or cores, or the topic a longer "
                "retention.ms",
            )
    return None
