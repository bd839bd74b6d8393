"""What people are told of a job's sources: that one is away, how far the job is behind, and that records will go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from state_runtime.base.source_state import SourceState
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.sections import RecoverySpec
from stillstate.orchestration.metrics.families import families
from stillstate.orchestration.probes.vitals import Vitals
from stillstate.orchestration.recovery.alive import judge_alive
from stillstate.orchestration.recovery.health import decide
from stillstate.orchestration.recovery.sources import AWAY_TOLD_S, source_trouble, unread_text
from stillstate.orchestration.show.views import JobRow, jobs_table

NOW_MS = 1_700_000_000_000
WELL = SourceState("orders", asked_at_ms=NOW_MS, behind=0)
AWAY = replace(WELL, away_since_ms=NOW_MS - 60_000, said="source 'orders': Kafka does not answer")
LATE = replace(WELL, behind=12_345, oldest_unread_ms=NOW_MS - 90_000, retention_left_s=1800.0)
TABLE = replace(LATE, name="/lake/orders", behind=12, unit="files", behind_bytes=3_565_158, behind_versions=4)


def status(*sources: SourceState) -> RunStatus:
    return RunStatus(3, "uid", "running", NOW_MS, NOW_MS - 1000, 1.0, 7, "here", sources=sources)


def test_a_source_that_is_away_makes_the_check_warn_and_the_job_is_not_recovered() -> None:
    """Its driver lives; a new one would find the same."""
    health = decide(status(WELL, AWAY), NOW_MS, RecoverySpec(), "alive")
    assert (health.verdict, health.needs_recovery) == ("healthy", False)
    alive = judge_alive(health, None, now_s=NOW_MS / 1000, is_recovered=True, max_attempts=3)
    assert (alive.level, alive.headline) == ("warn", "the driver runs, and a source does not answer")
    assert "nothing is read since 2023-11-14 22:12:20" in alive.reason


def test_a_source_is_not_called_away_for_the_seconds_of_a_brokers_restart() -> None:
    just = replace(AWAY, away_since_ms=NOW_MS - int(1000 * AWAY_TOLD_S) + 1)
    assert source_trouble([just], NOW_MS) is None
    assert decide(status(WELL), NOW_MS, RecoverySpec(), "alive").source is None


def test_records_that_go_before_they_are_read_are_told_with_the_moment() -> None:
    found = source_trouble([LATE], NOW_MS)
    assert found is not None
    assert "removes records from 2023-11-14 22:43:20" in found.reason
    assert source_trouble([replace(LATE, retention_left_s=7 * 3600.0)], NOW_MS) is None
    assert source_trouble([replace(LATE, retention_left_s=-1.0)], NOW_MS) is None


def test_of_a_table_it_is_its_log_that_is_cleaned() -> None:
    found = source_trouble([TABLE], NOW_MS)
    assert found is not None
    assert found.headline == "a source removes files before they are read"
    assert found.reason == (
        "the log of source '/lake/orders' may be cleaned from 2023-11-14 22:43:20Z on of versions that the job has not "
        "read; it is 12 files (3.4 MiB) behind. Give the job more shards or cores, or the table a longer "
        "delta.logRetentionDuration"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (LATE, "12,345 records of orders are not read"),
        (replace(LATE, behind=1), "1 record of orders is not read"),
        (TABLE, "12 files (3.4 MiB) of /lake/orders are not read"),
        (replace(TABLE, behind=1, behind_bytes=0), "1 file (0 B) of /lake/orders is not read"),
        (replace(TABLE, behind_bytes=-1), "12 files of /lake/orders are not read"),
        (replace(TABLE, behind=-1, behind_bytes=-1), "how much waits in /lake/orders is not known"),
    ],
)
def test_what_waits_is_told_in_the_sources_own_terms(source: SourceState, text: str) -> None:
    """A file is no record, and how many records it has is not known."""
    assert unread_text(source) == text


def test_the_table_of_jobs_says_how_far_a_job_is_behind() -> None:
    def said(*sources: SourceState) -> str:
        row = JobRow(job="a", health="healthy", seen_at_ms=NOW_MS, sources=sources)
        return str(next(iter(jobs_table([row]).columns[-1].cells)))

    assert said(WELL) == ""
    assert said(replace(LATE, retention_left_s=-1.0)) == (
        "12,345 records of orders are not read yet, the oldest of 1 min 30 s ago"
    )
    assert said(replace(TABLE, retention_left_s=-1.0)) == (
        "12 files (3.4 MiB) of /lake/orders are not read yet, the oldest of 1 min 30 s ago"
    )
    assert said(AWAY).startswith("nothing is read since")


def test_metrics_have_each_source_and_leave_out_what_is_not_known() -> None:
    vitals = Vitals(health="healthy", is_well=True, status=status(LATE, replace(AWAY, name="pay", behind=-1), TABLE))
    found = {
        (sample.name, sample.labels["source"]): sample.value
        for family in families({"shop": vitals}, {}, NOW_MS, True)
        for sample in family.samples
        if sample.name.startswith("stillstate_source_")
    }
    assert found == {
        ("stillstate_source_behind_records", "orders"): 12_345.0,
        ("stillstate_source_oldest_unread_age_seconds", "orders"): 90.0,
        ("stillstate_source_retention_left_seconds", "orders"): 1800.0,
        ("stillstate_source_away_seconds", "orders"): 0.0,
        ("stillstate_source_away_seconds", "pay"): 60.0,
        ("stillstate_source_behind_files", "/lake/orders"): 12.0,
        ("stillstate_source_behind_bytes", "/lake/orders"): 3_565_158.0,
        ("stillstate_source_oldest_unread_age_seconds", "/lake/orders"): 90.0,
        ("stillstate_source_retention_left_seconds", "/lake/orders"): 1800.0,
        ("stillstate_source_away_seconds", "/lake/orders"): 0.0,
    }
