"""What people are told of a job's sinks that are away: what waits, whether the job goes on, and since when."""

from __future__ import annotations

from dataclasses import replace

from state_runtime.base.sink_state import SinkState
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.config.sections import RecoverySpec
from stillstate.orchestration.metrics.families import families
from stillstate.orchestration.probes.vitals import Vitals
from stillstate.orchestration.recovery.alive import judge_alive
from stillstate.orchestration.recovery.health import decide
from stillstate.orchestration.recovery.sinks import sink_trouble
from stillstate.orchestration.recovery.sources import AWAY_TOLD_S
from stillstate.orchestration.show.views import JobRow, jobs_table

NOW_MS = 1_700_000_000_000
AWAY = SinkState("totals", NOW_MS - 60_000, epochs=12, bytes=34_000, said="StoreUnavailable: no answer")
FULL = replace(AWAY, holds_up=True)


def status(*sinks: SinkState) -> RunStatus:
    return RunStatus(3, "uid", "running", NOW_MS, NOW_MS - 1000, 1.0, 7, "here", sinks=sinks)


def judged(*sinks: SinkState) -> tuple[str, str, str]:
    health = decide(status(*sinks), NOW_MS, RecoverySpec(), "alive")
    assert (health.verdict, health.needs_recovery) == ("healthy", False), "a new driver would find the same"
    alive = judge_alive(health, None, now_s=NOW_MS / 1000, is_recovered=True, max_attempts=3)
    return alive.level, alive.headline, alive.reason


def test_a_sink_that_is_away_makes_the_check_warn_and_one_that_holds_up_the_job_makes_it_fail() -> None:
    level, headline, reason = judged(AWAY)
    assert (level, headline) == ("warn", "the driver runs, and a sink is away")
    assert "does not take output since 2023-11-14 22:12:20" in reason
    assert "12 epochs" in reason
    level, headline, reason = judged(FULL)
    assert (level, headline) == ("error", "the driver runs, and a sink that is away holds the job up")
    assert "checkpoint.pending_output_bytes_max" in reason
    assert judged()[0] == "ok"


def test_a_sink_is_not_called_away_for_the_seconds_of_a_restart_unless_the_job_waits_for_it() -> None:
    just = NOW_MS - int(1000 * AWAY_TOLD_S) + 1
    assert sink_trouble([replace(AWAY, away_since_ms=just)], NOW_MS) is None
    assert sink_trouble([replace(FULL, away_since_ms=just)], NOW_MS) is not None


def test_the_table_of_jobs_and_the_metrics_tell_what_waits() -> None:
    row = JobRow(job="a", health="healthy", seen_at_ms=NOW_MS, sinks=(AWAY,))
    assert "sink 'totals' does not take output" in str(next(iter(jobs_table([row]).columns[-1].cells)))
    vitals = Vitals(health="healthy", is_well=True, status=status(FULL))
    found = {
        (sample.name, sample.labels["sink"]): sample.value
        for family in families({"a": vitals}, {}, NOW_MS, True)
        for sample in family.samples
        if sample.name.startswith("stillstate_sink_")
    }
    assert found == {
        ("stillstate_sink_away_seconds", "totals"): 60.0,
        ("stillstate_sink_waiting_epochs", "totals"): 12.0,
        ("stillstate_sink_waiting_bytes", "totals"): 34_000.0,
        ("stillstate_sink_holds_up", "totals"): 1.0,
    }
