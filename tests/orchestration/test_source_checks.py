"""The checks `source_lag` and `retention_margin`: what is red, what is yellow, and what needs nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from job_roots import FakeClock, JobRoot

from state_runtime.base.source_state import SourceState
from state_runtime.snapshot.term_files import RunState, RunStatus
from stillstate.assets.metadata_sets import source_metadata
from stillstate.orchestration.recovery.sources import RETENTION_TOLD_S, retention_level, source_trouble
from stillstate.orchestration.upkeep.judged import Judged
from stillstate.orchestration.upkeep.source_checks import judge_lag, judge_retention

NOW_MS = 1_700_000_000_000
HOUR_S, DAY_S = 3600.0, 86_400.0
READ = SourceState("orders", asked_at_ms=NOW_MS, behind=0, kept_s=7 * DAY_S)
SENSOR = "stillstate_checks"


def waiting(age_s: float, change_s: float | None = 60.0, left_s: float = 5 * DAY_S, **more: Any) -> SourceState:
    at_ms = NOW_MS - int(age_s * 1000)
    found = replace(READ, behind=12_345, oldest_unread_ms=at_ms, retention_left_s=left_s, age_change_s=change_s)
    return replace(found, **more)


def status(*sources: SourceState, state: RunState = "running") -> RunStatus:
    return RunStatus(3, "uid", state, NOW_MS, NOW_MS - 1000, 1.0, 7, "here", sources=sources)


def lag(*sources: SourceState, now_ms: int = NOW_MS, trigger_s: float = 0.0, is_live: bool = True) -> Judged:
    return judge_lag(status(*sources), now_ms, 600.0, trigger_s=trigger_s, is_live=is_live)


def margin(*sources: SourceState, now_ms: int = NOW_MS, state: RunState = "running") -> tuple[bool, bool]:
    found = judge_retention(status(*sources, state=state), now_ms, DAY_S)
    return found.passed, found.is_warning


@pytest.mark.parametrize(
    ("source", "passed"),
    [
        (READ, True),
        (waiting(599.0), True),
        (waiting(601.0), False),
        (waiting(601.0, 0.0), False),  # it keeps its distance
        (waiting(86_400.0, -0.5), True),  # it catches up
        (waiting(86_400.0, None), True),  # it has only begun
    ],
)
def test_records_that_wait_too_long_are_told_unless_the_job_gains_on_them(source: SourceState, passed: bool) -> None:
    """A job that catches up after an outage needs nobody."""
    found = lag(READ, source)
    assert (found.passed, found.is_warning, found.is_known) == (passed, not passed, True)


def test_a_job_that_nobody_runs_falls_behind_whatever_its_last_run_saw() -> None:
    """The records that waited then wait now, and are older."""
    gained = waiting(10.0, -5.0)
    assert lag(gained, is_live=False).passed
    later = lag(gained, now_ms=NOW_MS + 600_000, is_live=False)
    assert not later.passed
    assert "no run reads it" in later.text
    assert later.numbers == {
        "unread_records": 12_345.0, "oldest_unread_s": 610.0, "limit_s": 600.0, "oldest_unread_change_s": -5.0
    }  # fmt: skip


def test_files_are_not_counted_with_records() -> None:
    table = waiting(86_400.0, name="/lake/orders", behind=12, unit="files", behind_bytes=3_565_158)
    found = lag(waiting(10.0), table)
    assert not found.passed
    assert found.text.startswith("12 files (3.4 MiB) of /lake/orders are not read, the oldest of ")
    assert found.numbers == {
        "unread_records": 12_345.0, "unread_files": 12.0, "unread_bytes": 3_565_158.0, "oldest_unread_s": 86_400.0,
        "limit_s": 600.0, "oldest_unread_change_s": 60.0
    }  # fmt: skip
    assert not {"unread_records", "unread_versions"} & lag(table).numbers.keys()
    counting = replace(table, behind=-1, behind_bytes=-1)
    assert "how much waits in /lake/orders is not known, the oldest of" in lag(counting).text
    left = replace(table, retention_left_s=5 * HOUR_S)
    assert "delta.logRetentionDuration" in judge_retention(status(left), NOW_MS, DAY_S).text
    assert "the next version that is not read is removed at" in judge_retention(status(table), NOW_MS, DAY_S).text


def test_a_job_that_reads_once_an_hour_may_be_two_hours_behind() -> None:
    assert lag(waiting(7199.0), trigger_s=HOUR_S).passed
    assert not lag(waiting(7201.0), trigger_s=HOUR_S).passed


def test_jobs_whose_sources_say_nothing_pass_with_that_word_and_those_that_cannot_be_asked_do_not() -> None:
    for found in (lag(), judge_retention(status(), NOW_MS, DAY_S), judge_retention(None, NOW_MS, DAY_S)):
        assert found.passed
        assert found.text == "its sources say nothing of what waits in them"
    silent = replace(READ, asked_at_ms=0, said="source 'orders': Kafka does not answer")
    for found in (lag(silent), judge_retention(status(silent), NOW_MS, DAY_S)):
        assert (found.passed, found.is_known) == (False, False)
        assert "Kafka does not answer" in found.text


@pytest.mark.parametrize(
    ("left_s", "kept_s", "level"),
    [
        (24 * HOUR_S, -1.0, "ok"),
        (23 * HOUR_S, -1.0, "warn"),
        (6 * HOUR_S, 7 * DAY_S, "warn"),
        (5.9 * HOUR_S, 7 * DAY_S, "error"),
        (0.51 * HOUR_S, HOUR_S, "ok"),  # of a topic of one hour no day is ever left
        (0.49 * HOUR_S, HOUR_S, "warn"),
        (0.12 * HOUR_S, HOUR_S, "error"),
    ],
)
def test_the_nearer_records_go_the_worse_it_is_and_topics_that_keep_little_are_judged_by_that(
    left_s: float, kept_s: float, level: str
) -> None:
    """`driver_alive` goes by the same."""
    source = waiting(10.0, left_s=left_s, kept_s=kept_s)
    assert retention_level(source, NOW_MS, RETENTION_TOLD_S) == level
    assert margin(source) == (level == "ok", level == "warn")
    assert (source_trouble([source], NOW_MS) is not None) == (level == "error")


def test_retention_overtakes_a_job_that_does_not_run() -> None:
    """What waited goes at its time; if nothing waited, nothing that came since goes before the topic's time is over."""
    left, read = waiting(10.0, left_s=2 * DAY_S), READ
    for days, expected in ((0.5, (True, False)), (1.5, (False, True)), (1.8, (False, False)), (2.5, (False, False))):
        assert margin(left, now_ms=NOW_MS + int(days * DAY_S * 1000), state="failed") == expected, days
    for days, expected in ((5.9, (True, False)), (6.1, (False, True)), (6.8, (False, False))):
        assert margin(read, now_ms=NOW_MS + int(days * DAY_S * 1000), state="failed") == expected, days
    assert margin(read, now_ms=NOW_MS + int(6.8 * DAY_S * 1000), state="stopped") == (False, True)
    forever = replace(READ, kept_s=-1.0)
    assert margin(forever, now_ms=NOW_MS + int(999 * DAY_S * 1000), state="failed") == (True, False)


def test_the_sensor_stores_both_and_again_when_a_warning_becomes_an_error(
    world: Callable[..., World], flights: JobRoot, clock: FakeClock
) -> None:
    house = world(extra="checks: {replay_s: null, late_checkpoints: null}")
    flights.start()

    def seen(*sources: SourceState) -> dict[str, tuple[bool, str]]:
        flights.beat(sources=sources)
        clock.advance_s(301)
        flights.beat(sources=sources)
        return {e.check_name: (e.passed, e.severity.value) for e in house.tick(SENSOR).asset_events}

    assert {name: passed for name, (passed, _) in seen().items()} == {"source_lag": True, "retention_margin": True}
    now = {"asked_at_ms": clock.now_ms() + 301_000}
    near = waiting(10.0, left_s=20 * HOUR_S, **now)
    assert seen(near)["retention_margin"] == (False, "WARN")
    assert seen(replace(near, asked_at_ms=clock.now_ms() + 301_000)) == {}, "as before"
    nearer = waiting(10.0, left_s=2 * HOUR_S, asked_at_ms=clock.now_ms() + 301_000)
    assert seen(nearer)["retention_margin"] == (False, "ERROR")


def test_a_job_that_can_be_asked_has_plots_and_another_has_none() -> None:
    """Names and types are stable; without a time limit there is nothing to plot of it."""
    found = source_metadata([READ, waiting(90.0, left_s=30 * HOUR_S, name="pay")], NOW_MS)
    assert {name: value.value for name, value in found.items()} == {
        "source_oldest_unread_s": 90.0, "source_unread_records": 12_345, "source_retention_left_h": 30.0
    }  # fmt: skip
    assert isinstance(found["source_unread_records"], dg.IntMetadataValue)
    assert isinstance(found["source_oldest_unread_s"], dg.FloatMetadataValue)
    kept = [replace(READ, kept_s=-1.0)]
    assert source_metadata(kept, NOW_MS).keys() == {"source_oldest_unread_s", "source_unread_records"}
    table = waiting(90.0, left_s=30 * HOUR_S, name="lake", behind=12, unit="files", behind_bytes=7)
    of_table = {name: value.value for name, value in source_metadata([table], NOW_MS).items()}
    assert of_table == {
        "source_oldest_unread_s": 90.0, "source_unread_files": 12, "source_unread_bytes": 7,
        "source_retention_left_h": 30.0
    }  # fmt: skip
    both = source_metadata([READ, table], NOW_MS)
    assert (both["source_unread_records"].value, both["source_unread_files"].value) == (0, 12)
    assert source_metadata([replace(READ, asked_at_ms=0)], NOW_MS) == source_metadata([], NOW_MS) == {}


def test_dagsters_record_of_checkpoints_has_the_numbers(
    world: Callable[..., World], flights: JobRoot, clock: FakeClock
) -> None:
    """It plots what an event of the asset has; the numbers are of the heartbeat."""
    house = world()
    flights.start()
    flights.beat(sources=(waiting(90.0, left_s=30 * HOUR_S),))
    flights.checkpoint()
    clock.advance_s(300)
    flights.beat(sources=(waiting(90.0, left_s=30 * HOUR_S),))
    events = [e for e in house.tick("stillstate_progress").asset_events if isinstance(e, dg.AssetMaterialization)]
    (of_checkpoints,) = [e for e in events if e.asset_key.path[-1] == "checkpoints"]
    assert of_checkpoints.metadata["source_unread_records"].value == 12_345
    assert "source_retention_left_h" in of_checkpoints.metadata
