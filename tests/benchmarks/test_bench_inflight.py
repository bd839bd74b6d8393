"""The benchmark of rows in flight: its input is what it says, and figures follow from what runs said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.inflight_workloads import (
    SHARDS,
    durable,
    figures_of,
    first_s,
    intervals_s,
    keys_of_shards,
    rows_per_s,
    write_file,
    written_once,
)
from state_runtime.state.key_groups import shard_of_hash
from state_runtime.state.keyhash import hash_rows


def line(at_s: float, rows: int, **inflight: int) -> dict[str, Any]:
    return {"what": "durable", "at_s": at_s, "rows": rows, "numbers": {"inflight": inflight or None}}


RUN: list[dict[str, Any]] = [
    {"what": "born", "at_s": 0.0}, {"what": "start", "at_s": 10.0},
    line(12.0, 0), line(13.0, 100, new_rows=300, bytes=900), line(15.0, 250, new_rows=0, bytes=400), line(16.0, 400),
    line(20.0, 400),
]  # fmt: skip


def test_a_file_has_so_many_rows_of_each_shard(tmp_path: Path) -> None:
    """Skew is one shard's rows; rows of the wrong shard would make every figure mean something else."""
    keys = keys_of_shards(50)
    assert write_file(tmp_path, 0, (700, 70), keys) == 770
    read = pq.read_table(tmp_path / "00000.parquet")
    shards = [shard_of_hash(int(h), SHARDS) for h in hash_rows([read.column("key").combine_chunks()])]
    assert np.bincount(shards).tolist() == [700, 70]


def test_a_checkpoint_that_processed_nothing_is_no_progress() -> None:
    """Else a run could look fast by checkpoints without rows."""
    assert [one["rows"] for one in durable(RUN)] == [100, 250, 400]


def test_what_a_run_said_makes_its_numbers() -> None:
    """From the start of the query, not of the process; intervals and rates between checkpoints with rows."""
    assert first_s(RUN) == 3.0
    assert intervals_s(RUN, 0) == [2.0, 1.0]
    assert intervals_s(RUN, 1) == [1.0]
    assert rows_per_s(RUN, 0) == 100.0
    assert written_once(RUN) == (300, 900)


def pieces(**changed: Any) -> dict[str, Any]:
    engines = ("unaligned", "aligned", "default", "spark")
    runs = {name: [1000.0] for name in ("unaligned", "aligned", "none", "spark")}
    return {
        "skew": {name: {"even_s": [1.0], "skewed_s": [1.4]} for name in engines},
        "backlog": {name: {"first_s": [20.0 if name == "spark" else 2.0], "backlog_s": [1.2], "even_s": [1.0]} for name in engines},
        "executors": {name: {"killed": 60.0, "undisturbed": 100.0} for name in engines},
        "kills": {name: {"killed_10": 60.0, "killed_30": 80.0, "undisturbed": 100.0} for name in engines},
        "standby": {"standby": {"killed_10": 60.0, "killed_30": 80.0, "undisturbed": 100.0}},
        "throughput": {"totals": runs, "slow": runs},
        "cap": {"rows_written": 10, "rows_waited": 10, "bytes_max": 100, "cap_bytes": 100, "stored_bytes": 5, "kept_bytes": 10},
        "memory": {name: {"small_mib": 100.0, "large_mib": 120.0} for name in ("totals", "slow", "totals-key", "slow-key")},
    } | changed  # fmt: skip


def test_each_promise_of_rows_in_flight_is_judged() -> None:
    """A figure that is left out would be a promise that nobody looks at."""
    figures = figures_of(pieces())
    judged = [f for f in figures if f.target is not None]
    assert all(f.holds for f in judged)
    titles = " | ".join(f.figure for f in judged)
    for part in ("one shard with 10 times", "20 batches waiting ÷ none", "first durable checkpoint: unaligned ÷ Spark",
                 "killed 10 s after", "by a driver that stood by", "an executor killed every 10 s", "unaligned ÷ aligned", "rows that waited", "max_inflight_bytes", "50 ÷ 1 times"):  # fmt: skip
        assert part in titles


@pytest.mark.parametrize(
    ("piece", "of", "part"),
    [
        ("skew", {"unaligned": {"even_s": [1.0], "skewed_s": [1.6]}}, "one shard with"),
        ("kills", {"unaligned": {"killed_10": 40.0, "killed_30": 80.0, "undisturbed": 100.0}}, "killed 10 s"),
        ("standby", {"standby": {"killed_10": 40.0, "killed_30": 80.0, "undisturbed": 100.0}}, "that stood by"),
        ("executors", {"unaligned": {"killed": 40.0, "undisturbed": 100.0}}, "an executor killed"),
        ("cap", {"rows_written": 11}, "rows that waited"),
        ("memory", {"slow-key": {"small_mib": 100.0, "large_mib": 131.0}}, "a user's processor, one key"),
    ],
    ids=["skew", "kills", "standby", "executors", "written twice", "memory"],
)
def test_a_promise_that_is_not_kept_is_said(piece: str, of: dict[str, Any], part: str) -> None:
    """The table's last word is not always yes."""
    figures = figures_of(pieces(**{piece: pieces()[piece] | of}))
    assert [f.figure for f in figures if f.target is not None and not f.holds and part in f.figure]


def test_a_share_of_the_rows_judges_nothing() -> None:
    """A small run shows that it works, and no more."""
    assert all(f.target is None for f in figures_of(pieces(), judged=False))
