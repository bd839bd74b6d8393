"""The bound on event times: never closer than it says, at most a step further, and one number for many epochs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from state_runtime.pipeline.future_rows import bound_ms, future_counts, highest_sql
from state_runtime.pipeline.watermark import Clocks, WatermarkColumn

YEAR_MS = 366 * 86_400_000
times_ms = st.integers(0, 100 * YEAR_MS)
aheads_ms = st.integers(1000, 100 * YEAR_MS)


@given(now_ms=times_ms, ahead_ms=aheads_ms)
def test_a_time_within_the_bound_is_never_beyond_it(now_ms: int, ahead_ms: int) -> None:
    """And one that is a step further always is."""
    step_ms = max(1000, ahead_ms // 64)
    assert now_ms + ahead_ms <= bound_ms(now_ms, ahead_ms) < now_ms + ahead_ms + step_ms


@given(now_ms=times_ms, later_ms=st.integers(0, YEAR_MS), ahead_ms=aheads_ms)
def test_the_bound_never_falls_and_stays_for_a_step(now_ms: int, later_ms: int, ahead_ms: int) -> None:
    """A plan of an epoch serves another one only while it has the same numbers."""
    before, after = bound_ms(now_ms, ahead_ms), bound_ms(now_ms + later_ms, ahead_ms)
    step_ms = max(1000, ahead_ms // 64)
    assert before <= after
    assert (after - before) // step_ms <= -(-later_ms // step_ms)


def test_only_columns_with_a_bound_are_observed_with_one_and_counted() -> None:
    """Of a source each of its columns counts; a source without a bound has the plan that it had."""
    free, bounded = (
        WatermarkColumn("a.at", "t", 5, source="a"),
        WatermarkColumn("b.at", "u", 5, source="b", max_ahead_ms=1000),
    )
    other = WatermarkColumn("b.until", "v", 5, source="b", max_ahead_ms=1000)
    assert highest_sql(free, 2000) == "max(t)"
    assert highest_sql(bounded, 2000) == "max(CASE WHEN u <= 3000 THEN u END)"
    assert future_counts([free], 2000) == {}
    assert future_counts([free, bounded, other], 2000) == {"b": "count_if(u > 3000 OR v > 3000)"}


def test_a_source_of_which_only_such_rows_come_is_silent() -> None:
    """Its clock tells nothing, so it holds nobody back when it may be left out."""
    columns = (
        WatermarkColumn("a.at", "", 0, source="a"),
        WatermarkColumn("b.at", "", 0, source="b", max_ahead_ms=1000),
    )
    clocks = Clocks(columns, idle_after_ms={"b": 10})
    time = clocks.observed(clocks.advanced(None, 0), {"a.at": 5, "b.at": 3})
    time = clocks.observed(clocks.advanced(time, 20), {"a.at": 50, "b.at": None})
    assert clocks.advanced(time, 21).watermark_ms == 50
