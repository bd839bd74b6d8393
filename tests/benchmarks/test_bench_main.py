"""How samples become figures, and when the benchmark refuses to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.engines import Sample
from benchmarks.main import app
from benchmarks.measure import DisagreementError, Measured, check_agreement, figures_of
from benchmarks.workloads import NO_ROW_COUNT, WORKLOADS, Workload


def _workload(key: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.key == key)


def _samples(trigger_ms: Sequence[float], state_rows: int = 10, checkpoint_ms: float = 5) -> list[Sample]:
    return [Sample(batch, 100, ms, checkpoint_ms, state_rows) for batch, ms in enumerate(trigger_ms)]


def _measured(ours: Sequence[Sample], peer: Sequence[Sample]) -> Measured:
    return Measured({"ours": ours, "peer": peer}, {"ours": [1, 2, 3], "peer": [20, 30, 90]})


def test_throughput_is_rows_over_the_median_trigger() -> None:
    measured = _measured(_samples([900, 1000, 30_000]), _samples([9_000, 8_000]))
    rows = figures_of(_workload("a"), measured)[0]
    assert (rows.unit, rows.ours, round(rows.peer), rows.holds) == ("rows/s", 100_000, 11_765, True)


def test_the_floor_compares_triggers_and_informs_about_checkpoints_and_cpu() -> None:
    measured = _measured(_samples([150] * 3, checkpoint_ms=20), _samples([200] * 3, checkpoint_ms=60))
    figures = figures_of(_workload("d"), measured)
    assert [(f.unit, f.ours, f.peer, f.holds) for f in figures] == [
        ("ms", 150, 200, False),
        ("ms", 20, 60, None),
        ("ms", 20, 60, None),
        ("ms", 2, 30, None),
    ]


def test_engines_that_hold_different_state_are_not_compared() -> None:
    samples = {"ours": _samples([1, 1], state_rows=10), "peer": _samples([1, 1], state_rows=11)}
    with pytest.raises(DisagreementError, match=r"batch 0: state_rows is 10 in ours and 11"):
        check_agreement(_workload("a"), samples)


def test_only_batches_that_both_ran_are_compared() -> None:
    check_agreement(_workload("a"), {"ours": _samples([1, 1, 1]), "peer": _samples([1])})


def test_a_peer_that_does_not_count_its_state_is_still_checked_for_its_input() -> None:
    workload = replace(_workload("c"), peer_conf=NO_ROW_COUNT)
    ours, peer = _samples([1], state_rows=10), _samples([1], state_rows=0)
    check_agreement(workload, {"ours": ours, "peer": peer})
    with pytest.raises(DisagreementError, match="input_rows"):
        check_agreement(workload, {"ours": ours, "peer": [replace(peer[0], input_rows=99)]})


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["--only", "a,z"], env={"TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert "unknown workload z" in result.output
    assert "d-unguarded" in result.output
