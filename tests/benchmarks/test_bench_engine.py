"""The engine benchmark: what is promised is what is measured, and its own figures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.engine import app, comparison_order, growth_figures, small_figures, tail_figures
from benchmarks.engine_workloads import COMPARISONS, GROWTH, SMALL, TAIL, quick_growth, quick_tail
from benchmarks.engines import Sample
from benchmarks.operators import OPERATORS
from benchmarks.workloads import Workload, quick, write_data
from state_runtime import JobSettings
from tests.job_settings import job_settings


def _workload(key: str) -> Workload:
    return next(workload for workload in COMPARISONS if workload.key == key)


def _samples(trigger_ms: list[float]) -> list[Sample]:
    return [Sample(batch, 100, ms, 1, 10) for batch, ms in enumerate(trigger_ms)]


@pytest.mark.parametrize(
    ("key", "rows", "keys", "target"),
    [
        ("value", 100_000, 200_000, ">= 12"),
        ("list", 100_000, 200_000, ">= 12"),
        ("map", 100_000, 200_000, ">= 12"),
        ("timers", 100_000, 200_000, ">= 12"),
        ("pandas", 100_000, 200_000, ">= 6"),
        ("vectorized", 100_000, 200_000, ">= 100"),
        ("aggregate", 200_000, 2_000_000, ">= 8"),
        ("aggregate-million", 1_000_000, 2_000_000, ">= 8"),
        ("sliding", 200_000, 20_000, ">= 5"),
        ("deduplicate", 200_000, 2_000_000, ">= 5"),
        ("join", 200_000, 500_000, ">= 5"),
    ],
)
def test_the_promised_sizes_and_targets_are_what_is_measured(key: str, rows: int, keys: int, target: str) -> None:
    workload = _workload(key)
    assert (workload.rows, workload.keys, str(workload.target)) == (rows, keys, target)
    assert workload.operator in OPERATORS


def test_growth_compares_the_same_updates_over_a_hundred_times_the_keys() -> None:
    assert (GROWTH.few.keys, GROWTH.many.keys) == (100_000, 10_000_000)
    assert GROWTH.few.rows == GROWTH.many.rows
    assert GROWTH.many.partitions == 2
    assert TAIL.workload.rounds * TAIL.workload.turns["ours"].per_round > 300
    assert [str(target) for target in (GROWTH.target, GROWTH.memory, TAIL.target)] == ["<= 1.3", "<= 400", "<= 2"]


def test_a_workload_without_a_peer_brings_the_one_that_has_it_and_its_data(tmp_path: Path) -> None:
    assert [workload.key for workload in comparison_order(["vectorized"])] == ["pandas", "vectorized"]
    assert [workload.key for workload in comparison_order(["map", "tail"])] == ["map"]
    pandas, vectorized = (write_data(quick(_workload(key)), tmp_path / key) for key in ("pandas", "vectorized"))
    assert pq.read_table(pandas[0]) == pq.read_table(vectorized[0])


def test_figures_judge_the_slow_against_the_median_and_memory_by_itself() -> None:
    time, memory = growth_figures(GROWTH, _samples([130, 120]), _samples([100, 100]), 401.0)
    assert (time.ratio, time.holds) == (1.25, True)
    assert (memory.ratio, memory.holds) == (None, False)
    assert growth_figures(GROWTH, _samples([1]), _samples([1]), 399.0)[1].holds
    assert tail_figures(TAIL, _samples([100] * 98 + [500, 500]))[0].holds is False
    assert tail_figures(TAIL, _samples([100] * 100 + [150]))[0].holds


def test_what_a_small_state_pays_is_looked_at_over_a_fold() -> None:
    """A log shorter than the bound is never folded: then both variants would do the same."""
    turns = SMALL.workload.turns["ours"]
    assert SMALL.workload.rounds * turns.per_round > JobSettings().materialization.max_segments
    assert all(job_settings(**settings) for settings in SMALL.variants.values())
    samples = {name: _samples([100.0 + 10 * n] * 4) for n, name in enumerate(SMALL.variants)}
    figures = small_figures(SMALL, samples, {name: [50.0] for name in SMALL.variants})
    assert [(f.ours, f.peer) for f in figures if f.figure.endswith("epoch")] == [
        (110.0, 100.0),
        (120.0, 100.0),
        (130.0, 100.0),
    ]
    assert all(f.ratio == 1.0 for f in figures if "CPU" in f.figure)


def test_repeated_ids_come_again_one_batch_later_and_never_else(tmp_path: Path) -> None:
    workload = quick(_workload("deduplicate"))
    batches = [pq.read_table(path)["key"].to_pylist() for path in write_data(workload, tmp_path)]
    assert all(len(set(keys)) == workload.rows for keys in batches)
    shared = [len({*before} & {*after}) for before, after in pairwise(batches)]
    assert shared == [workload.rows // 10] * len(shared)
    assert not {*batches[0]} & {*batches[2]}


def test_a_batch_of_events_is_one_second_after_the_one_before(tmp_path: Path) -> None:
    files = write_data(quick(_workload("join")), tmp_path)
    first, second = (pq.read_table(path) for path in files[:2])
    assert pc.max(first["ts"]).as_py() < pc.min(second["ts"]).as_py()
    assert {*first["side"].to_pylist()} == {0, 1}


def test_updates_of_growth_touch_every_key_at_most_once_a_batch(tmp_path: Path) -> None:
    workload = quick(GROWTH.few)
    for path in write_data(workload, tmp_path)[workload.prefill_batches :]:
        keys = pq.read_table(path)["key"].to_pylist()
        assert len(set(keys)) == len(keys) == workload.rows


def test_quick_runs_are_small_and_judge_nothing() -> None:
    growth, tail = quick_growth(GROWTH), quick_tail(TAIL)
    for workload in (*map(quick, COMPARISONS), growth.few, growth.many, tail.workload):
        assert workload.target is None
        assert workload.rows <= 2_000
        assert workload.batches <= 20
    assert growth.target is growth.memory is tail.target is None


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["--only", "list,z"], env={"TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert "unknown workload z" in result.output
    assert "tail" in result.output
