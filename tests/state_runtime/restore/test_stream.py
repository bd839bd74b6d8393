"""Sorted sources of a state, whatever the batches they come in."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
from model import seeds

from state_runtime.restore.stream import whole_hashes
from state_runtime.state.table import hashes_of


def test_a_sorted_source_stays_whole_however_it_is_cut() -> None:
    """A batch may be empty, at the beginning, in the middle or at the end, and one hash may lie in several: all rows come,
    in their order, and no hash in two batches, because a run is made of them piece by piece."""
    cut_through = empty_between = 0
    for seed, rng in seeds(200):
        rows = _rows(rng, rng.randrange(30))
        edges = sorted(rng.choices(range(len(rows) + 1), k=rng.randrange(8)))
        batches = [rows.slice(a, b - a) for a, b in pairwise([0, *edges, len(rows)])]
        empty_between += any(not len(b) for b in batches[1:-1])
        cut_through += any(len(a) and len(b) and hashes_of(a)[-1] == hashes_of(b)[0] for a, b in pairwise(batches))
        whole = list(whole_hashes(iter(batches)))
        found = [row for batch in whole for row in batch.to_pylist()]
        assert found == rows.to_pylist(), f"seed {seed}"
        assert all(len(batch) for batch in whole), f"seed {seed}"
        assert all(hashes_of(a)[-1] < hashes_of(b)[0] for a, b in pairwise(whole)), f"seed {seed}"
    assert cut_through > 20
    assert empty_between > 20


def _rows(rng: random.Random, count: int) -> pa.RecordBatch:
    hashes = np.array(sorted(rng.randrange(12) for _ in range(count)), dtype=np.uint64)
    return pa.RecordBatch.from_arrays([pa.array(hashes), pa.array(range(count))], names=["hash", "n"])
