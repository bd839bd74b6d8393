"""What a person should know of the sources of a job; pure. `driver_alive` and the checks of sources go by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from state_runtime.base.source_state import SourceState
from stillstate.orchestration.text import bytes_text, counted_text, time_text

__all__ = [
    "AWAY_TOLD_S",
    "RETENTION_TOLD_S",
    "SourceTrouble",
    "behind_text",
    "loss_text",
    "retention_level",
    "source_trouble",
    "unread_text",
]

AWAY_TOLD_S: Final = 15.0
"""A broker that restarts, or a leader that moves, takes some seconds."""
RETENTION_TOLD_S: Final = 24 * 3600.0
"""Time for a person to look, also on a day off. A quarter of it is left for one who has to get up at night."""

_ERROR_SHARE: Final = 0.25
_OF_KEPT: Final = 0.5


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
        if retention_level(source, now_ms, RETENTION_TOLD_S) == "error":
            return SourceTrouble(f"a source removes {source.unit} before they are read", loss_text(source, now_ms))
    return None


def retention_level(source: SourceState, now_ms: int, limit_s: float) -> Literal["ok", "warn", "error"]:
    """Return how near it is that a source removes a record that the job has not read: nearer than the limit, or than a
    quarter of it.

    A source that keeps records for less than twice the limit is judged by half of what it keeps them for: of a topic of
    one hour no day is ever left.
    """
    within_s = min(limit_s, source.kept_s * _OF_KEPT) if source.kept_s > 0 else limit_s
    left_s = source.left_s(now_ms)
    if left_s < within_s * _ERROR_SHARE:
        return "error"
    return "warn" if left_s < within_s else "ok"


def behind_text(source: SourceState) -> str:
    """`12,345 records`, `12 files (3.4 MiB)`"""
    size = f" ({bytes_text(source.behind_bytes)})" if source.behind_bytes >= 0 else ""
    return counted_text(source.behind, source.unit.removesuffix("s")) + size


def unread_text(source: SourceState) -> str:
    """`12 files (3.4 MiB) of /lake/orders are not read`"""
    if source.behind < 0:
        return f"how much waits in {source.name} is not known"
    return f"{behind_text(source)} of {source.name} {'is' if source.behind == 1 else 'are'} not read"


def loss_text(source: SourceState, now_ms: int) -> str:
    """Return from when on a source removes what the job has not read, and what helps."""
    goes = time_text(now_ms + int(source.left_s(now_ms) * 1000))
    if source.behind > 0:
        how = f"it is {behind_text(source)} behind"
    else:
        how = "it had read all, and does not run" if source.behind == 0 else "how much waits is not known"
    if source.unit == "files":
        what = f"the log of source {source.name!r} may be cleaned from {goes} on of versions that the job has not read"
        longer = "the table a longer delta.logRetentionDuration"
    else:
        what = f"source {source.name!r} removes records from {goes} on that the job has not read"
        longer = "the topic a longer retention.ms"
    return f"{what}; {how}. Give the job more shards or cores, or {longer}"
