"""How samples become figures, and when the benchmark refuses to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.engines import Sample
from benchmarks.main import app
from benchmarks.measure import DisagreementError, Measured, check_agreement, figures_of, measure
from benchmarks.workers import Turn
from benchmarks.workloads import NO_ROW_COUNT, WORKLOADS, Side, Turns, Workload


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


class _Engine:
    """A worker that only says what it was asked to do."""

    def __init__(self, side: str, told: list[tuple[str, int]]) -> None:
        self._side = side
        self._told = told
        self._done = 0

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_ready(self) -> None:
        pass

    def cpu_percent(self, _interval_s: float) -> float:
        return 0.0

    def run(self, batches: int, _timeout_s: float) -> Turn:
        self._told.append((self._side, batches))
        samples = tuple(Sample(self._done + n, 100, 1, 1, 1) for n in range(batches))
        self._done += batches
        return Turn(samples, 1.0)


def test_neither_engine_rests_for_the_whole_warm_up_of_the_other(tmp_path: Path) -> None:
    """One that rests for a minute loses its Python workers, and its first triggers that count would start them."""
    told: list[tuple[str, int]] = []
    turns: dict[Side, Turns] = {"ours": Turns(warm=100, per_round=5), "peer": Turns(warm=3, per_round=2)}
    workload = replace(_workload("a"), rows=10, keys=20, prefill_batches=2, rounds=3, turns=turns)
    measured = measure(workload, tmp_path, 2, lambda *_: None, lambda plan: _Engine(plan.side, told))  # type: ignore[arg-type,return-value]
    warm_ups = told[2:-6]
    assert told[:2] == [("ours", 2), ("peer", 2)]
    assert max(batches for _, batches in warm_ups) == 10
    assert {side: sum(b for s, b in warm_ups if s == side) for side in turns} == {"ours": 100, "peer": 3}
    assert [s for s, _ in warm_ups].index("peer") < 5
    assert {side: len(samples) for side, samples in measured.samples.items()} == {"ours": 15, "peer": 6}
    assert min(sample.batch_id for sample in measured.samples["ours"]) == 102
