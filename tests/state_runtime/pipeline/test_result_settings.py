"""Settings of the session that change results: recorded, compared by what they mean, and refused if they differ."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
from pyspark.errors import PySparkException

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.pipeline.result_settings import (
    ALWAYS,
    WHERE_SET,
    changed_settings,
    refuse_other_settings,
    result_settings,
    same_zone,
)

ZONE = "spark.sql.session.timeZone"
ANSI = "spark.sql.ansi.enabled"
LEGACY = "spark.sql.legacy.sizeOfNull"
BEFORE = {ZONE: "UTC", ANSI: "true"}


class Conf:
    """A session's settings, as pyspark gives them: `get` knows Spark's defaults, and raises for a name without one."""

    def __init__(self, defaults: Mapping[str, str], given: Mapping[str, str]) -> None:
        self.defaults, self.getAll = defaults, given

    def get(self, key: str) -> str | None:
        try:
            return {**self.defaults, **self.getAll}[key]
        except KeyError:
            raise PySparkException(f"no {key}") from None


def refused(before: Mapping[str, str], now: Mapping[str, str], *, accept: bool = False) -> str:
    try:
        refuse_other_settings(7, before, now, job="days", accept=accept)
    except InvalidConfiguration as error:
        return str(error)
    return ""


def test_defaults_that_count_are_recorded_and_others_only_where_they_were_set() -> None:
    """Of a setting whose default differs between versions of Spark a record would refuse the move to the next one."""
    defaults = dict.fromkeys((*ALWAYS, *WHERE_SET, LEGACY, "spark.sql.shuffle.partitions"), "d")
    assert result_settings(Conf(defaults, {})) == dict.fromkeys(ALWAYS, "d")
    given = {WHERE_SET[0]: "false", LEGACY: "false", ANSI: "false", "spark.sql.shuffle.partitions": "7"}
    found = result_settings(Conf(defaults, given))
    assert found == {**dict.fromkeys(ALWAYS, "d"), ANSI: "false", WHERE_SET[0]: "false", LEGACY: "false"}


def test_a_setting_that_this_spark_does_not_have_is_left_out() -> None:
    """A later version may have removed one; the job starts nevertheless."""
    assert result_settings(Conf({ANSI: "true"}, {})) == {ANSI: "true"}


@pytest.mark.parametrize("name", [*ALWAYS, *WHERE_SET, LEGACY])
def test_another_value_of_any_recorded_setting_is_refused_with_both_values(name: str) -> None:
    """The message says what to do: set it back, or accept it once."""
    said = refused({name: "Asia/Tokyo"}, {name: "UTC"})
    assert f"{name} was 'Asia/Tokyo' and is 'UTC'" in said
    assert "snapshot 7" in said
    assert "--accept-session-settings (accept_session_settings=True)" in said


def test_all_that_differs_is_named_at_once() -> None:
    """Whoever sets one back must not meet the next one at the next start."""
    said = refused({**BEFORE, LEGACY: "true"}, {ZONE: "Asia/Tokyo", ANSI: "false"})
    assert [name in said for name in (ZONE, ANSI, LEGACY)] == [True, True, True]
    assert f"{LEGACY} was 'true' and is not set" in said


def test_a_snapshot_without_a_record_and_names_that_one_side_does_not_know_are_not_compared() -> None:
    """A record of an earlier version has fewer names; a value that nobody knows is no other value."""
    assert refused({}, {ZONE: "Asia/Tokyo", LEGACY: "true"}) == ""
    assert refused({ZONE: "UTC"}, BEFORE) == ""
    assert refused(BEFORE, {ZONE: "UTC"}) == ""
    assert changed_settings(BEFORE, {**BEFORE, LEGACY: "true"}) == [LEGACY]


def test_what_is_accepted_is_logged_and_starts(caplog: pytest.LogCaptureFixture) -> None:
    """The log is the place where a later reader finds why a day has two rows."""
    with caplog.at_level(logging.WARNING):
        assert refused(BEFORE, {**BEFORE, ANSI: "false"}, accept=True) == ""
        assert refused(BEFORE, BEFORE, accept=True) == ""
    (message,) = caplog.messages
    assert f"{ANSI} was 'true' and is 'false'" in message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("UTC", "Etc/UTC"),
        ("UTC", "Z"),
        ("GMT0", "+00:00"),
        ("Etc/GMT-2", "+02:00"),
        ("GMT+2", "UTC+02:00"),
        ("-0330", "-03:30"),
        ("Asia/Kolkata", "Asia/Calcutta"),
        ("Europe/Kyiv", "Europe/Kiev"),
    ],
)
def test_two_names_of_one_zone_are_no_change(one: str, other: str) -> None:
    """An image of another base system calls UTC otherwise; it must not stop a job."""
    assert same_zone(one, other)
    assert refused({ZONE: one}, {ZONE: other}) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("UTC", "Europe/London"),
        ("Europe/Berlin", "Europe/Paris"),  # the same since 1978
        ("Asia/Tokyo", "Asia/Seoul"),
        ("+02:00", "-02:00"),
        ("+02:00", "+02:30"),
        ("Africa/Johannesburg", "+02:00"),
        ("UTC", "a name that only Java knows"),
    ],
)
def test_zones_that_differ_at_any_time_since_1900_are_two(one: str, other: str) -> None:
    """The times of rows lie in the past."""
    assert not same_zone(one, other)
    assert not same_zone(other, one)


def test_the_case_of_a_value_is_no_change() -> None:
    """Spark takes `TRUE` and `corrected` for what it prints otherwise."""
    policy = "spark.sql.legacy.timeParserPolicy"
    assert refused({ANSI: "true", policy: "CORRECTED"}, {ANSI: "TRUE", policy: "corrected"}) == ""
