"""Windows over an event-time column: `windows.tumbling("10 seconds")`, `windows.sliding(…)`, `windows.cumulative(…)`,
`windows.session(…)`.

They are Spark's `window` and `session_window`, and Flink's CUMULATE: a window includes its start and excludes its end,
starts are counted from 1970-01-01 00:00:00 UTC plus `start`, and rows without a time are in no window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from state_runtime.base.durations import parse_duration_us
from state_runtime.base.errors import InvalidPipeline

__all__ = ["SessionWindow", "TimeWindow", "cumulative", "session", "sliding", "tumbling"]

# Maximum number of windows that one row is in: each of them is a row of the output.
WINDOWS_PER_ROW_MAX = 10_000


@dataclass(frozen=True)
class TimeWindow:
    """Windows of `size_us` that begin every `slide_us` microseconds, one of them at `start_us`.

    Attributes:
        grows: they begin every `size_us` and end every `slide_us`, until they are `size_us` long.
    """

    size_us: int
    slide_us: int
    start_us: int = 0
    grows: bool = False

    @property
    def text(self) -> str:
        """The window's text in a manifest; state of other windows cannot be continued."""
        slide = "grows by" if self.grows else "slide"
        return f"size {self.size_us} us, {slide} {self.slide_us} us, start {self.start_us} us"


@dataclass(frozen=True)
class SessionWindow:
    """A window that continues while each next row comes before the rows so far have ended, or when they do.

    Attributes:
        gap_us: how long after its time a row ends.
        end_column: the column with the time at which each row ends, if that is not the same for all; `gap_us` is 0.
    """

    gap_us: int
    end_column: str = ""

    @property
    def text(self) -> str:
        """The window's text in a manifest."""
        return f"session, end {self.end_column}" if self.end_column else f"session, gap {self.gap_us} us"


def tumbling(size: str, start: str = "0 seconds") -> TimeWindow:
    """Make adjacent windows that do not overlap.

    Args:
        size: a duration, as in "10 seconds" or "1 hour 30 minutes".
        start: where a window begins, relative to 1970-01-01 00:00:00 UTC ("15 minutes": at a quarter past).

    Raises:
        InvalidPipeline: not a duration, or one that makes no window.
    """
    return sliding(size, size, start)


def sliding(size: str, slide: str, start: str = "0 seconds") -> TimeWindow:
    """Make overlapping windows of `size`, one beginning every `slide`; a row is in size/slide of them.

    Raises:
        InvalidPipeline: not a duration, or one that makes no window.
    """
    window = TimeWindow(parse_duration_us(size), parse_duration_us(slide), parse_duration_us(start))
    if window.size_us <= 0 or window.slide_us <= 0:
        raise InvalidPipeline(f"a window of {size!r} every {slide!r}: both must be longer than nothing")
    if window.slide_us > window.size_us:
        raise InvalidPipeline(f"a window of {size!r} every {slide!r} leaves rows out; the slide is at most the size")
    if abs(window.start_us) >= window.slide_us:
        raise InvalidPipeline(f"a window's start {start!r} must be shorter than its slide {slide!r}, as in Spark")
    if window.size_us > window.slide_us * WINDOWS_PER_ROW_MAX:
        raise InvalidPipeline(
            f"a window of {size!r} every {slide!r} puts a row into more than {WINDOWS_PER_ROW_MAX:,} windows; "
            "take a longer slide"
        )
    return window


def cumulative(size: str, step: str, start: str = "0 seconds") -> TimeWindow:
    """Make windows that begin together every `size` and grow by `step`: of a day by hours the first hour, the first two
    hours, … and the whole day. Flink's CUMULATE; a row is in up to size/step of them.

    Raises:
        InvalidPipeline: not a duration, or a size that is not a multiple of the step.
    """
    whole, step_us = tumbling(size, start), parse_duration_us(step)
    if step_us <= 0 or whole.size_us % step_us:
        raise InvalidPipeline(f"cumulative windows of {size!r} by {step!r}: the size must be a multiple of the step")
    if whole.size_us > step_us * WINDOWS_PER_ROW_MAX:
        raise InvalidPipeline(
            f"cumulative windows of {size!r} by {step!r} put a row into more than {WINDOWS_PER_ROW_MAX:,} windows; "
            "choose a longer step"
        )
    return replace(whole, slide_us=step_us, grows=True)


def session(gap: str = "", *, end_column: str = "") -> SessionWindow:
    """Make windows of a key's rows that follow one another within `gap`; a row exactly `gap` later still belongs.

    Args:
        gap: a duration, the same for all rows.
        end_column: instead of it, for a gap of each row's own: the column with the time at which a row's session ends
            if no other row of its key comes until then. A row without such a time, or with one that is not after the
            row's own, is in no session.

    Example:
        .transform(lambda df: df.withColumn("ends_at", F.expr("at + make_dt_interval(0, 0, 0, patience_seconds)")))
        .key_by("user").window(windows.session(end_column="ends_at"), uid="visits", n=aggregates.count())

    Raises:
        InvalidPipeline: not a duration, a duration of zero or less, both or none.
    """
    if bool(gap) == bool(end_column):
        raise InvalidPipeline(
            'a session has a gap, session("5 minutes"), or a column with the end of each row, '
            'session(end_column="ends_at")'
        )
    if end_column:
        return SessionWindow(0, end_column)
    window = SessionWindow(parse_duration_us(gap))
    if window.gap_us <= 0:
        raise InvalidPipeline(f"a session's gap {gap!r} must be longer than nothing")
    return window
