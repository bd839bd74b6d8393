"""Every page agrees on what a verdict means: the check, the overview, metrics, the table of jobs, recovery."""

from __future__ import annotations

from typing import get_args

import pytest

from stillstate.assets.overview import overview_row
from stillstate.orchestration.metrics.families import families
from stillstate.orchestration.probes.look import Look
from stillstate.orchestration.probes.vitals import vitals_of
from stillstate.orchestration.recovery.alive import AliveLevel, judge_alive
from stillstate.orchestration.recovery.health import STANDINGS, Health, Standing, Verdict
from stillstate.orchestration.recovery.observe import Observation
from stillstate.orchestration.show.views import JobRow, jobs_table

LEVELS: dict[Standing, tuple[AliveLevel, ...]] = {
    "well": ("ok",),
    "new": ("ok",),
    "ended": ("ok",),
    "coming": ("warn",),
    "migrating": ("warn", "error"),
    "lost": ("warn", "error"),
}
COLOURS: dict[Standing, str] = {
    "well": "green",
    "new": "dim",
    "ended": "cyan",
    "coming": "yellow",
    "migrating": "yellow",
    "lost": "red",
}


def test_each_verdict_has_one_standing() -> None:
    assert list(STANDINGS) == list(get_args(Verdict))
    assert set(STANDINGS.values()) == set(get_args(Standing)) == set(LEVELS)


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_no_page_calls_a_job_well_that_another_calls_ill(verdict: Verdict) -> None:
    """A fenced job was green for its check, and needed a look in the overview."""
    health = Health(verdict, "a reason")
    look = Look(at_ms=0, uid="u", seen=Observation(None, health))
    is_well = vitals_of(look).is_well
    level = judge_alive(health, None, now_s=0.0, is_recovered=False, max_attempts=3).level
    assert level in LEVELS[health.standing]
    assert is_well == (health.standing in ("well", "new", "ended", "coming"))
    assert is_well or level != "ok", "the check is green, and the overview is not"
    assert level != "error" or not is_well, "the check is red, and the overview is green"
    row = overview_row("flights", look, savepoint="", recovery="")
    assert (row.is_well, row.why) == (is_well, "" if is_well else "a reason")
    scraped = {
        sample.name: sample.value
        for family in families({"flights": vitals_of(look)}, {}, 0, is_file_read=True)
        for sample in family.samples
    }
    assert scraped["stillstate_job_well"] == is_well
    (health_cells,) = [c for c in jobs_table([JobRow.of("flights", look)]).columns if c.header == "health"]
    (cell,) = health_cells.cells
    assert getattr(cell, "style", None) == COLOURS[health.standing]
    assert health.needs_recovery == (health.standing == "lost")
    assert not (health.needs_recovery and is_well), "a job that is brought back is not well"


def test_a_job_that_another_run_took_over_has_ended_as_it_should() -> None:
    """The run that took over speaks for the job; there is nothing to bring back."""
    fenced = Health("fenced", "term 3 fenced: term 4 has taken the job over")
    assert (fenced.is_well, fenced.needs_recovery, fenced.may_be_migrating) == (True, False, True)
