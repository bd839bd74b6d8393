"""What a Dagster run's status means is said in one place, for recoveries and folds alike."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from stillstate import orchestration
from stillstate.orchestration.materialization.plan import MaterializationRun, failed_in_a_row
from stillstate.orchestration.run_phases import ENDED, PHASES, UNDER_WAY, RunPhase


def test_every_status_of_dagster_has_a_phase() -> None:
    """A status that is unknown would stop the sensors: a new version of Dagster that has one is noticed here."""
    assert set(PHASES) == {status.value for status in dg.DagsterRunStatus}
    assert set(PHASES.values()) == set(get_args(RunPhase))
    assert {*ENDED, *UNDER_WAY, "abandoned"} == set(get_args(RunPhase))
    assert not ENDED & UNDER_WAY


def test_a_run_that_dagster_calls_finished_has_ended() -> None:
    finished = {status.value for status in FINISHED_STATUSES}
    assert {status for status, phase in PHASES.items() if phase in ENDED} == finished


def test_statuses_are_translated_in_one_place_only() -> None:
    folder = Path(orchestration.__file__).parent
    naming = {
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "DagsterRunStatus")
        or (isinstance(node, ast.Constant) and node.value == "CANCELED")
    }
    assert naming == {"run_phases.py", "run_statuses.py"}, "their meaning, and Dagster's own objects for queries"


def test_a_fold_that_a_person_ended_is_no_failure() -> None:
    assert (
        failed_in_a_row(
            [MaterializationRun("a", "failed"), MaterializationRun("b", "canceled"), MaterializationRun("c", "failed")]
        )
        == 1
    )
