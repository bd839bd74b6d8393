"""The recovery benchmark: its bounds, what a recovery is, and that a restart is what it is called."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import recovery
from benchmarks.engines import WorkerPlan
from benchmarks.pieces import Pieces
from benchmarks.recovery import app
from benchmarks.recovery_workloads import (
    PIECES,
    WORKLOAD,
    Scenario,
    WrongRestoreError,
    check_scenario,
    figures_of,
    recovery_ms,
)
from benchmarks.restarts import Run, RunFailed, run_once


def _piece(restore_ms: float | None = 1.0, **recoveries: float) -> dict[str, Any]:
    return {
        "restarts": [
            {"scenario": name, "recovery_ms": ms, "ready_ms": ms + 1, "restore_ms": restore_ms}
            for name, ms in recoveries.items()
        ]
    }


def test_the_promised_bounds_are_what_is_judged() -> None:
    assert WORKLOAD.keys == 5_000_000
    assert PIECES["on"].scenarios == ("primary", "local", "doubled")
    pieces = {
        "on": _piece(primary=100, local=20, doubled=131),
        "off-arrow": _piece(primary=90),
        "off-rocksdb": _piece(primary=50),
        "spark": _piece(restore_ms=None, primary=200),
    }
    figures = figures_of(pieces)
    assert {(f.figure, str(f.target), f.holds) for f in figures if f.target is not None} == {
        ("recovery: from primary, on / off-arrow", "<= 1.1", False),
        ("recovery: local copies / primary, on", "<= 0.2", True),
        ("recovery: twice the shards / the same, on", "<= 1.3", False),
    }
    assert [f.figure for f in figures if "spark" in f.figure] == [
        "recovery: from primary, on / spark",
        "to the first checkpoint: from primary, on / spark",
    ]
    assert all(f.target is None for f in figures_of(pieces, judged=False))
    assert figures_of({"spark": _piece(primary=1)}) == []


def test_a_recovery_is_what_the_first_epoch_takes_beyond_the_others() -> None:
    assert recovery_ms([1000, 210, 190, 200]) == 800
    assert recovery_ms([100, 210, 190]) == 0
    with pytest.raises(ValueError, match="no values"):
        recovery_ms([100])


@pytest.mark.parametrize(
    ("scenario", "local", "primary", "right"),
    [
        ("primary", 0, 2, True),
        ("primary", 2, 0, False),
        ("primary", 1, 1, False),
        ("local", 2, 0, True),
        ("local", 1, 1, False),
        ("local", 0, 0, False),
        ("doubled", 0, 2, True),
        ("doubled", 0, 1, False),
    ],
)
def test_a_restart_that_is_not_what_it_is_called_is_refused(
    scenario: Scenario, local: int, primary: int, right: bool
) -> None:
    numbers = {"local_restores": local, "primary_restores": primary, "state_rows": 10}
    if right:
        check_scenario(scenario, 2, numbers, 10)
        return
    with pytest.raises(WrongRestoreError, match=scenario):
        check_scenario(scenario, 2, numbers, 10)


def test_a_restart_that_lost_state_is_refused() -> None:
    with pytest.raises(WrongRestoreError, match="'state_rows': 3"):
        check_scenario("primary", 2, {"primary_restores": 2, "state_rows": 3}, 10)


def test_a_run_that_fails_says_why_with_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFailed, match="ours: MissingJava") as caught:
        run_once(Run(WorkerPlan("ours", WORKLOAD, tmp_path / "job", 1, ())), tmp_path / "run.log", 120)
    assert "Traceback" in str(caught.value)


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="not done within 0 s"):
        run_once(Run(WorkerPlan("ours", WORKLOAD, tmp_path / "job", 1, ())), tmp_path / "run.log", 0.01)
    assert not multiprocessing.active_children()


def test_the_table_of_earlier_pieces_is_made_without_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recovery, "RESULTS", tmp_path)
    Pieces(tmp_path / "pieces" / "recovery").write("on", _piece(primary=10, local=1, doubled=10))
    result = CliRunner().invoke(app, ["--table", "--strict"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "recovery.json").read_text())
    assert [f["ratio"] for f in report["figures"] if f["target"]] == [0.1, 1.0]
