"""Rows of a shard in an order that every attempt repeats, grouped by key."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from model import SCHEMA, HashOf, Key, canonical_key, examples, hash_functions, key_columns, keys, seeds

from state_runtime.processors.grouping import group_rows, order_of_rows

hashes = st.sampled_from([0, 1, 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)


@given(st.lists(st.tuples(hashes, st.integers(-(1 << 62), 1 << 62)), max_size=60))
@examples(300)
def test_the_order_of_rows_is_lexsort(pairs: list[tuple[int, int]]) -> None:
    """A quick sort of packed numbers must order exactly as the slow one, ties of both columns included."""
    key_hashes = np.array([h for h, _ in pairs], dtype=np.uint64)
    sequence = np.array([s for _, s in pairs], dtype=np.int64)
    assert order_of_rows(key_hashes, sequence).tolist() == np.lexsort((sequence, key_hashes)).tolist()


def test_the_order_of_many_rows_is_lexsort() -> None:
    """numpy sorts large arrays by other code than small ones."""
    for _, rng in seeds(5):
        generator = np.random.default_rng(rng.randrange(1 << 30))
        key_hashes = generator.integers(0, 500, 20_000).astype(np.uint64) << np.uint64(50)
        sequence = generator.permutation(20_000).astype(np.int64)
        assert np.array_equal(order_of_rows(key_hashes, sequence), np.lexsort((sequence, key_hashes)))


def grouped(rows: list[tuple[Key, int]], arrival: list[int], hash_of: HashOf) -> list[tuple[Key, list[int]]]:
    """Keys with the row numbers of each, for rows that arrive in some order."""
    arrived = [(rows[i], i) for i in arrival]
    columns = key_columns([row[0] for row, _ in arrived], negative_zero=len(rows) % 2 == 0)
    data = pa.RecordBatch.from_arrays(
        [*columns, pa.array([row[1] for row, _ in arrived], pa.int64())], names=["name", "score", "v"]
    )
    result = group_rows(
        data,
        np.array([hash_of(row[0]) for row, _ in arrived], dtype=np.uint64),
        np.array([i for _, i in arrived], dtype=np.int64),
        ["name", "score"],
        SCHEMA.keys,
    )
    values = result.rows.column("v").to_pylist()
    pairs = zip(result.keys[0].to_pylist(), result.keys[1].to_pylist(), strict=True)
    found = [
        (canonical_key(*pair), values[start:stop])
        for pair, start, stop in zip(pairs, result.starts, result.stops, strict=True)
    ]
    assert result.hashes.tolist() == [hash_of(key) for key, _ in found]
    assert sum(len(v) for _, v in found) == len(rows)
    return found


@given(st.lists(st.tuples(keys, st.integers(0, 99)), min_size=1, max_size=40), hash_functions, st.integers())
@examples(150)
def test_groups_do_not_depend_on_the_order_of_arrival(rows: list[tuple[Key, int]], hash_of: HashOf, seed: int) -> None:
    """Shuffle blocks come as they come; a re-executed task must see the same groups and the same rows in them."""
    in_order = list(range(len(rows)))
    shuffled = random.Random(seed).sample(in_order, len(rows))
    found = grouped(rows, in_order, hash_of)
    again = grouped(rows, shuffled, hash_of)
    expected: dict[Key, list[int]] = {}
    for key, value in rows:
        expected.setdefault(key, []).append(value)
    assert dict(found) == expected
    assert again == found
