"""Clocks of a job that a test moves: processing time stands still, and the watermark may be pushed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta

from state_runtime.base.durations import parse_duration_us
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.watermark import Clocks, Policy
from state_runtime.snapshot.manifest import TimeEntry

__all__ = ["START", "HeldClocks", "HeldPipeline", "HeldTime", "millis_of", "time_of"]

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Processing time at the beginning of a test."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def millis_of(at: datetime) -> int:
    """Return a time in milliseconds; one without a zone is in that of the process, as for Spark."""
    return ((at if at.tzinfo is not None else at.astimezone()) - _EPOCH) // timedelta(milliseconds=1)


def time_of(ms: int) -> datetime:
    """Return milliseconds as a time."""
    return _EPOCH + timedelta(milliseconds=ms)


@dataclass
class HeldTime:
    """What a test has set.

    Attributes:
        watermark_ms: the watermark is at least that; None: rows alone move it.
    """

    now_ms: int
    watermark_ms: int | None = None

    def pass_by(self, by: str | timedelta) -> None:
        """Let processing time pass.

        Raises:
            ValueError: it would go back.
        """
        passed_us = by // timedelta(microseconds=1) if isinstance(by, timedelta) else parse_duration_us(by)
        if passed_us < 0:
            raise ValueError(f"advance_time({by!r}): time does not go back")
        self.now_ms += passed_us // 1000

    def push_watermark(self, to: datetime) -> None:
        """Let the watermark be at least as high from now on; a lower one than before changes nothing."""
        self.watermark_ms = max(millis_of(to), millis_of(to) if self.watermark_ms is None else self.watermark_ms)


@dataclass(frozen=True)
class HeldClocks(Clocks):
    """A job's clocks, in which a test has a hand. Its own rule moves them."""

    held: HeldTime | None = None

    def advanced(self, last: TimeEntry | None, batch_time_ms: int) -> TimeEntry:
        """See `Clocks.advanced`."""
        held = self.held
        if held is None:
            return super().advanced(last, batch_time_ms)
        if held.watermark_ms is not None:
            last = TimeEntry(held.now_ms) if last is None else last
            reached: Mapping[str, int] = {column.name: held.watermark_ms + column.delay_ms for column in self.columns}
            seen = last.event_time_ms
            last = replace(last, event_time_ms={**seen, **{n: max(ms, seen.get(n, ms)) for n, ms in reached.items()}})
        return super().advanced(last, held.now_ms)


@dataclass(frozen=True)
class HeldPipeline(CompiledPipeline):
    """A compiled pipeline whose clocks are a test's."""

    held: HeldTime | None = None

    @classmethod
    def of(cls, pipeline: CompiledPipeline, held: HeldTime) -> HeldPipeline:
        """Return a pipeline with other clocks."""
        return cls(**{f.name: getattr(pipeline, f.name) for f in fields(pipeline)}, held=held)

    def clocks(self, policy: Policy) -> Clocks:
        """See `CompiledPipeline.clocks`."""
        made = super().clocks(policy)
        return HeldClocks(**{f.name: getattr(made, f.name) for f in fields(made)}, held=self.held)
