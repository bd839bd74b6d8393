"""The quick stable sort of integers orders as numpy's own."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples, seeds

from state_runtime.processors.grouping import group_rows
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.ordering import stable_order

_SIGNED = st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1]) | st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(_SIGNED, max_size=40))
@examples(300)
def test_it_is_numpys_stable_order(numbers: list[int]) -> None:
    """Of signed and of unsigned numbers, over their whole range."""
    for column in (np.array(numbers, dtype=np.int64), np.array(numbers, dtype=np.int64).view(np.uint64)):
        assert stable_order(column).tolist() == np.argsort(column, kind="stable").tolist()


@pytest.mark.parametrize("span_bits", [1, 20, 45, 50, 63])
def test_many_numbers_are_in_stable_order(span_bits: int) -> None:
    """Where all bits have room beside the place, and where they do not."""
    for _, rng in seeds(3):
        generator = np.random.default_rng(rng.randrange(1 << 30))
        numbers = generator.integers(-(1 << span_bits) // 2, (1 << span_bits) // 2, 20_000)
        assert np.array_equal(stable_order(numbers), np.argsort(numbers, kind="stable"))


def test_numbers_that_differ_in_low_bits_only_are_sorted_all_the_same() -> None:
    """There is no room for them beside the place, and here nothing else tells the numbers apart."""
    low = np.arange(4_096, dtype=np.uint64)[::-1]
    numbers = np.concatenate([low, low | np.uint64(1 << 63)])
    assert np.array_equal(stable_order(numbers), np.argsort(numbers, kind="stable"))


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1 << 12, (1 << 12) + 1])
def test_equal_numbers_keep_their_places(kind: type, count: int) -> None:
    """Nothing, one, and as many as a power of two and one more: the places take a bit more there."""
    for number in (0, np.iinfo(kind).min, np.iinfo(kind).max):
        assert stable_order(np.full(count, number, dtype=kind)).tolist() == list(range(count))


_BY_TYPE: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [None, -1, 0, 1]),
    (pa.float64(), [None, float("nan"), -0.0, 0.0, float("inf")]),
    (pa.string(), [None, "", "a", "ü"]),
    (pa.bool_(), [None, True, False]),
    (pa.decimal128(10, 2), [None, Decimal("1.50"), Decimal("-1.50")]),
    (pa.timestamp("us", "UTC"), [None, dt.datetime(2024, 5, 17, tzinfo=dt.UTC)]),
    (pa.struct([("a", pa.int64())]), [None, {"a": 1}, {"a": 2}]),
]


@pytest.mark.parametrize(("kind", "values"), _BY_TYPE, ids=[str(kind) for kind, _ in _BY_TYPE])
@given(st.data())
@examples(60)
def test_rows_of_keys_of_every_type_are_in_numpys_lexicographic_order(
    kind: pa.DataType, values: list[Any], data: Any
) -> None:
    """By hash and place, with duplicates, nulls, NaN, both zeros and no row at all, in whatever order rows arrive."""
    drawn = data.draw(st.lists(st.sampled_from(values), max_size=30))
    keys = pa.array(drawn, kind)
    hashes = hash_rows([keys])
    places = np.array(data.draw(st.permutations(range(len(drawn)))), dtype=np.int64)
    rows = pa.RecordBatch.from_arrays([keys, pa.array(np.arange(len(drawn)))], names=["k", "n"])
    grouped = group_rows(rows, hashes, places, ["k"], pa.schema([("k", kind)]))
    assert grouped.rows.column(1).to_pylist() == np.lexsort((places, hashes)).tolist()
    assert grouped.groups == len(set(hashes.tolist()))
