"""Times that make later rows late, or other days of them: told once, where Spark says nothing."""

from __future__ import annotations

import logging

import pytest
from pyspark.sql import types as T

from state_runtime.base.settings import JobSettings
from state_runtime.pipeline.odd_times import AHEAD_MAX_MS, OddTimes, changed_zone, hour_that_comes_twice, odd_times
from state_runtime.pipeline.operators import ProcessorStep, _processor
from state_runtime.pipeline.spark_settings import SessionSettings
from state_runtime.pipeline.watermark import WatermarkColumn

NOW = 1_700_000_000_000
AT = WatermarkColumn("at", "", 10_000)


def kinds(highest_ms: int | None, delay_ms: int = 10_000) -> set[str]:
    column = WatermarkColumn("at", "", delay_ms)
    return {kind for kind, _ in odd_times([column], NOW, {"at": highest_ms})}


@pytest.mark.parametrize(
    ("highest_ms", "odd"),
    [
        (None, set()),
        (NOW, set()),
        (1, set()),
        (0, {"early at"}),
        (-86_400_000, {"early at"}),
        (NOW + 10_000 + AHEAD_MAX_MS, set()),
        (NOW + 10_001 + AHEAD_MAX_MS, {"ahead at"}),
        (4_000_000_000_000, {"ahead at"}),
    ],
)
def test_times_are_odd_if_they_make_rows_late_that_come_in_time(highest_ms: int | None, odd: set[str]) -> None:
    """From before the watermark's beginning, or so far ahead of the clock that the watermark passes it."""
    assert kinds(highest_ms) == odd


def test_a_time_within_a_bound_is_not_odd() -> None:
    """Whoever allows an hour is not warned of half an hour; what is beyond it moves no watermark."""
    column = WatermarkColumn("at", "", 10_000, max_ahead_ms=3_600_000)
    assert list(odd_times([column], NOW, {"at": NOW + 1_800_000})) == []


def test_a_watermark_without_a_delay_is_odd_once_a_row_has_come() -> None:
    """All rows of a batch that are not later than those before it are late."""
    assert kinds(NOW, 0) == {"delay at"}
    assert kinds(None, 0) == set()


def test_each_oddity_is_told_once_in_a_run_and_for_each_column(caplog: pytest.LogCaptureFixture) -> None:
    """What is so in every epoch must not fill the log."""
    told = OddTimes([AT, WatermarkColumn("left.at", "", 0)])
    for _ in range(3):
        told.look(NOW, {"at": 4_000_000_000_000, "left.at": 4_000_000_000_000})
        told.look(NOW, {"at": -1, "left.at": None})
    about = [("'at'" in message, "'left.at'" in message) for message in caplog.messages]
    assert sorted(about) == [(False, True), (False, True), (True, False), (True, False)]


def test_a_time_zone_that_changed_over_a_restart_is_told_and_one_that_is_not_known_is_not() -> None:
    """A run of an earlier version did not say which it had."""
    assert changed_zone("", "UTC") == changed_zone("UTC", "UTC") == ""
    assert "'Asia/Tokyo', and the run before had 'UTC'" in changed_zone("UTC", "Asia/Tokyo")


@pytest.mark.parametrize(
    ("zone", "twice"),
    [("Europe/Berlin", True), ("America/St_Johns", True), ("UTC", False), ("Asia/Kolkata", False), ("+05:30", False), ("", False)],
)  # fmt: skip
def test_an_hour_comes_twice_where_clocks_are_put_back(zone: str, twice: bool) -> None:
    """And where no column has times it does not matter."""
    assert bool(hour_that_comes_twice("o", ["at"], zone)) == twice
    assert hour_that_comes_twice("o", [], zone) == ""


class Times:
    """A processor of pyspark's."""

    def init(self, handle: object) -> None:
        """No states."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("pandas", [True, False], ids=["pandas", "rows"])
def test_the_hour_that_comes_twice_is_told_of_processors_whose_frames_hold_times(
    caplog: pytest.LogCaptureFixture, pandas: bool
) -> None:
    """Rows of the other flavour hold times with their zone."""
    out = T.StructType([T.StructField("seen", T.TimestampType()), T.StructField("n", T.LongType())])
    schema = T.StructType([T.StructField("k", T.StringType()), T.StructField("at", T.TimestampType())])
    step = ProcessorStep("o", Times(), out, pandas=pandas)
    keys = T.StructType(schema.fields[:1])
    with caplog.at_level(logging.WARNING):
        _processor(step, keys, schema, JobSettings(), SessionSettings("Europe/Berlin"))
    assert ["(at, seen)" in message for message in caplog.messages] == [True] * pandas
