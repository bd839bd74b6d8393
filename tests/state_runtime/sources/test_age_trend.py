"""Whether a job gains on a source, although the age of what waits grows between two batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from state_runtime.sources.age_trend import WINDOW_S, AgeTrend

STEP_S = 5


def change(age_s: Callable[[float], float], seconds: float = 3600.0) -> float | None:
    """The change that is told in the end, of looks every five seconds."""
    trend, found = AgeTrend(), None
    for second in range(0, int(seconds), STEP_S):
        found = trend.change_s(second * 1000, age_s(second))
    return found


def teeth(rise: float) -> Callable[[float], float]:
    """Batches of two minutes; after each the oldest is older by `rise` of the time that went by."""
    return lambda second: 1000 + second // 120 * 120 * rise + second % 120


@pytest.mark.parametrize(("rise", "gains"), [(-0.5, True), (-0.1, True), (0.1, False), (1.0, False)])
def test_the_ages_at_the_ends_of_batches_decide(rise: float, gains: bool) -> None:
    found = change(teeth(rise))
    assert found is not None
    assert (found < 0) == gains


def test_a_source_that_nobody_reads_grows_older_by_the_clock() -> None:
    assert change(lambda second: second) == pytest.approx(WINDOW_S / 2, abs=STEP_S)


def test_a_job_that_keeps_its_distance_does_not_gain() -> None:
    assert change(lambda _: 7200.0) == 0.0


def test_a_run_says_nothing_before_it_has_looked_for_a_quarter_of_an_hour() -> None:
    """A restart in the middle of a batch has seen one side of a tooth."""
    assert change(lambda second: second, WINDOW_S * 0.9) is None
    assert change(lambda second: second, WINDOW_S) is not None


def test_after_a_pause_of_looks_nothing_is_told_of_the_time_between() -> None:
    """A broker that was away has left a hole; the ages before it are no half of a window."""
    trend = AgeTrend()
    assert trend.change_s(0, 1.0) is None
    assert trend.change_s(int(WINDOW_S * 1000), 900.0) == 899.0
    assert trend.change_s(int(WINDOW_S * 3000), 1.0) is None
