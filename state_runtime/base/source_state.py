"""How far a job is behind one of its sources, for heartbeats; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["YOUNGER", "SourceState", "Unit"]

Unit = Literal["records", "files"]


@dataclass(frozen=True)
class SourceState:
    """What a source said when it was asked last. Only sources that can be asked beside the job are told of.

    Attributes:
        name: what it reads: topics, separated by commas, or their pattern; the place of a table.
        asked_at_ms: wall clock of the driver when it answered last; 0 if it never did.
        away_since_ms: since when it does not answer; 0 if it does.
        behind: records (offsets), or files, that the job has not read; -1 if it is not known where the job is, or while
            what waits is still being counted.
        oldest_unread_ms: the time of the oldest of those that were looked at; 0 if there are none.
        retention_left_s: in how many seconds the source removes the first record that the job has not read; of a table,
            the first version in its log. -1 if nothing waits, or if it removes nothing by time.
        said: why it does not answer.
        kept_s: for how long it keeps records, the shortest of what it reads; -1 if it removes nothing by time, or if
            that is not known.
        age_change_s: how much older the oldest unread record is than a few minutes ago, over the last quarter of an
            hour; negative: the job gains. None if the run has not looked for so long.
        unit: what `behind` counts.
        behind_bytes: of these files; -1 if that is not known.
        behind_versions: of a table, those that the job has not read to their end; -1 if that is not known.
    """

    name: str
    asked_at_ms: int = 0
    away_since_ms: int = 0
    behind: int = -1
    oldest_unread_ms: int = 0
    retention_left_s: float = -1.0
    said: str = ""
    kept_s: float = -1.0
    age_change_s: float | None = None
    unit: Unit = "records"
    behind_bytes: int = -1
    behind_versions: int = -1

    def age_s(self, now_ms: int) -> float:
        """Return the age of the oldest record that is known to wait; 0 if none does."""
        return max(0.0, (now_ms - self.oldest_unread_ms) / 1000) if self.oldest_unread_ms else 0.0

    def left_s(self, now_ms: int) -> float:
        """Return in how many seconds it removes a record that the job has not read, as was known when it answered last.
        If nothing waited then, it is at least so many. Negative: records may have gone; infinite: none goes by time."""
        at_least_s = self.retention_left_s if self.retention_left_s >= 0 else self.kept_s
        if not self.asked_at_ms or at_least_s < 0:
            return float("inf")
        return at_least_s - (now_ms - self.asked_at_ms) / 1000

    def away_s(self, now_ms: int) -> float:
        """Return for how long it has not answered; 0 if it does."""
        return max(0.0, (now_ms - self.away_since_ms) / 1000) if self.away_since_ms else 0.0


YOUNGER: Final[dict[str, Any]] = {"unit": "records", "behind_bytes": -1, "behind_versions": -1}
"""Fields that a stored heartbeat does not have while they say nothing."""
