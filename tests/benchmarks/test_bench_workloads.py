"""The data and the turns of the benchmark's workloads."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks.workloads import WORKLOADS, Workload, quick, write_data


def _workload(key: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.key == key)


def test_workload_names_are_unique() -> None:
    keys = [workload.key for workload in WORKLOADS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("key", "rows", "keys", "target"),
    [
        ("a", 100_000, 200_000, ">= 8"),
        ("b", 100_000, 200_000, ">= 4"),
        ("c", 200_000, 2_000_000, ">= 8"),
        ("c-uncounted", 200_000, 2_000_000, ">= 4"),
        ("d", 1_000, 10_000, "<= 0.7"),
        ("d-unguarded", 1_000, 10_000, "<= 0.7"),
    ],
)
def test_the_promised_sizes_and_targets_are_what_is_measured(key: str, rows: int, keys: int, target: str) -> None:
    workload = _workload(key)
    assert (workload.rows, workload.keys, str(workload.target)) == (rows, keys, target)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_every_engine_has_a_counted_batch_in_every_turn(workload: Workload) -> None:
    for turns in workload.turns.values():
        assert turns.warm >= 1
        assert turns.per_round - workload.drop_first >= 1


def test_prefill_inserts_every_key_once_and_batches_stay_in_the_key_space(tmp_path: Path) -> None:
    workload = quick(_workload("c"))
    files = write_data(workload, tmp_path)
    assert len(files) == workload.batches
    prefilled = [key for path in files[: workload.prefill_batches] for key in _keys(path)]
    assert sorted(prefilled) == list(range(workload.keys))
    for path in files[workload.prefill_batches :]:
        assert len(_keys(path)) == workload.rows
        assert pc.max(pq.read_table(path)["key"]).as_py() < workload.keys


def test_the_same_workload_gives_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    """Both engines, and every machine, see one input; the file source orders it by modification time."""
    workload = quick(_workload("a"))
    first = write_data(workload, tmp_path / "first")
    second = write_data(workload, tmp_path / "second")
    assert [pq.read_table(p) for p in first] == [pq.read_table(p) for p in second]
    times = [path.stat().st_mtime for path in first]
    assert times == sorted(set(times))


def test_variants_of_a_workload_share_their_data(tmp_path: Path) -> None:
    base = write_data(quick(_workload("d")), tmp_path / "base")
    variant = write_data(quick(_workload("d-unguarded")), tmp_path / "variant")
    assert pq.read_table(base[-1]) == pq.read_table(variant[-1])


def test_quick_runs_are_small_and_judge_nothing() -> None:
    for workload in map(quick, WORKLOADS):
        assert workload.target is None
        assert workload.rows <= 2_000
        assert workload.batches <= 20


def _keys(path: Path) -> list[int]:
    keys: list[int] = pq.read_table(path)["key"].to_pylist()
    return keys
