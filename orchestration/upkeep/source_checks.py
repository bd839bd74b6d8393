"""Judges how far a job is behind its sources, and how soon they remove what it has not read; pure, from a heartbeat.

A job that is down is judged by what its last run was told: what was unread then is unread now, and grows older.
Sources that cannot be asked beside the job say nothing, and a job that has only such passes with that word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from state_runtime.base.source_state import SourceState
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.recovery.sources import loss_text, retention_level, unread_text
from stillstate.orchestration.text import duration_text, time_text
from stillstate.orchestration.upkeep.judged import CheckName, Judged

__all__ = ["judge_lag", "judge_retention"]

_SAY_NOTHING: Final = "its sources say nothing of what waits in them"
_TRIGGERS: Final = 2
"""A job that reads at each trigger is behind by the time since the last one, and by its batch."""


def judge_lag(status: RunStatus | None, now_ms: int, limit_s: float, *, trigger_s: float, is_live: bool) -> Judged:
    """Judge the age of the oldest record that the job has not read. It passes while the job gains: one that catches up
    after an outage needs nobody.

    Args:
        trigger_s: the job reads every so many seconds; 0: all the time.
        is_live: whether the run that the heartbeat is of works now.
    """
    sources = _that_answered(status)
    if sources is None:
        return _unknown("source_lag", status)
    if not sources:
        return Judged("source_lag", True, _SAY_NOTHING)
    limit_s = max(limit_s, _TRIGGERS * trigger_s)
    oldest = max(sources, key=lambda source: source.age_s(now_ms))
    age_s = oldest.age_s(now_ms)
    numbers = {**_unread(sources), "oldest_unread_s": age_s, "limit_s": limit_s}
    if oldest.age_change_s is not None:
        numbers["oldest_unread_change_s"] = oldest.age_change_s
    if not age_s:
        unknown = "; ".join(unread_text(source) for source in sources if source.behind < 0)
        return Judged("source_lag", True, unknown or "all that was there has been read", numbers=numbers)
    # Moments and no ages: a verdict is stored when it changes, and read later.
    oldest_at = time_text(oldest.oldest_unread_ms)
    text = f"{unread_text(oldest)}, the oldest of {oldest_at}"
    if age_s <= limit_s:
        return Judged("source_lag", True, text, numbers=numbers)
    if is_live and oldest.age_change_s is None:
        return Judged("source_lag", True, f"{text}; the run has only begun to read", numbers=numbers)
    if is_live and oldest.age_change_s is not None and oldest.age_change_s < 0:
        return Judged("source_lag", True, f"{text}; the job gains on it", numbers=numbers)
    does = "the job does not gain on it" if is_live else "no run reads it"
    told = f"{text}, more than {duration_text(limit_s)}, and {does}"
    return Judged("source_lag", False, told, numbers=numbers, is_warning=True)


def judge_retention(status: RunStatus | None, now_ms: int, limit_s: float) -> Judged:
    """Judge how soon a source removes a record that the job has not read; for a job that was stopped, a warning at
    most: somebody wanted it so."""
    sources = _that_answered(status)
    if sources is None:
        return _unknown("retention_margin", status)
    if not sources:
        return Judged("retention_margin", True, _SAY_NOTHING)
    nearest = min(sources, key=lambda source: source.left_s(now_ms))
    left_s = nearest.left_s(now_ms)
    if left_s == float("inf"):
        return Judged("retention_margin", True, "no source removes records by time")
    numbers = {"retention_left_h": left_s / 3600, "limit_h": limit_s / 3600}
    levels = {source.name: retention_level(source, now_ms, limit_s) for source in sources}
    wrong = [source for source in sources if levels[source.name] != "ok"]
    if not wrong:
        goes = time_text(now_ms + int(left_s * 1000))
        what = "record" if nearest.unit == "records" else "version"
        text = f"the next {what} that is not read is removed at {goes} or later, from {nearest.name}"
        return Judged("retention_margin", True, text, numbers=numbers)
    is_error = "error" in levels.values() and status is not None and status.state not in ("stopped", "finished")
    told = "; ".join(loss_text(source, now_ms) for source in wrong)
    return Judged("retention_margin", False, told, numbers=numbers, is_warning=not is_error)


def _unread(sources: Sequence[SourceState]) -> dict[str, float]:
    """Return how much waits: records and files apart, and only what there can be."""
    found: dict[str, float] = {}
    for source in sources:
        name = f"unread_{source.unit}"
        found[name] = found.get(name, 0.0) + max(0, source.behind)
        if source.unit == "files":
            found["unread_bytes"] = found.get("unread_bytes", 0.0) + max(0, source.behind_bytes)
    return found


def _that_answered(status: RunStatus | None) -> Sequence[SourceState] | None:
    """Return the sources that have answered; empty if the job has none that can be asked, None if none has yet."""
    sources = status.sources if status is not None else ()
    answered = [source for source in sources if source.asked_at_ms]
    return answered if answered or not sources else None


def _unknown(check: CheckName, status: RunStatus | None) -> Judged:
    said = next((source.said for source in status.sources if source.said), "") if status is not None else ""
    return Judged(check, False, f"nothing is known: {said or 'no source has answered yet'}", is_known=False)
