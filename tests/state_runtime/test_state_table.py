"""State tables against a dictionary: folding, look-up, grouping and hash ranges."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import (
    ALL_KEYS,
    SCHEMA,
    Changes,
    HashOf,
    Key,
    after,
    batch_of,
    canonical_key,
    changes,
    colliding,
    epochs,
    examples,
    hash_functions,
    key_columns,
    keys,
    rows_of,
)

from state_runtime.errors import CorruptSegment, StillstateError
from state_runtime.limits import MAX_PARALLELISM
from state_runtime.state.table import (
    StateSchema,
    concat,
    first_of_groups,
    fold,
    hash_range_of_shard,
    lookup,
    same_keys,
    slice_hash_range,
)


def newest_first(all_epochs: list[Changes], hash_of: HashOf) -> list[pa.RecordBatch]:
    return [batch_of(e, hash_of, negative_zero=n % 2 == 0) for n, e in enumerate(reversed(all_epochs))]


@given(epochs, hash_functions)
@examples(150)
def test_fold_keeps_each_keys_newest_row(all_epochs: list[Changes], hash_of: HashOf) -> None:
    """With nulls, NaN, both zeros, and different keys of one hash."""
    folded = fold(newest_first(all_epochs, hash_of), SCHEMA, drop_deleted=False)
    newest: dict[Key, object] = {}
    for changed in all_epochs:
        newest.update(changed)
    assert rows_of(folded) == newest


@given(epochs, hash_functions)
@examples(100)
def test_fold_without_tombstones_is_the_dictionary(all_epochs: list[Changes], hash_of: HashOf) -> None:
    """What a restore ends with."""
    assert rows_of(fold(newest_first(all_epochs, hash_of), SCHEMA, drop_deleted=True)) == after(all_epochs)


@given(epochs, hash_functions, st.integers(0, 9))
@examples(100)
def test_folding_in_two_steps_is_folding_at_once(all_epochs: list[Changes], hash_of: HashOf, cut: int) -> None:
    """Runs and layers are folded in any grouping; tombstones may only go at the bottom."""
    cut = min(cut, len(all_epochs))
    batches = newest_first(all_epochs, hash_of)
    upper = fold(batches[: len(all_epochs) - cut], SCHEMA, drop_deleted=False)
    lower = fold(batches[len(all_epochs) - cut :], SCHEMA, drop_deleted=True)
    assert rows_of(fold([upper, lower], SCHEMA, drop_deleted=True)) == after(all_epochs)


@given(changes, st.lists(keys, unique=True), hash_functions, st.booleans())
@examples(200)
def test_lookup_finds_every_key_and_no_other(
    stored: Changes, wanted: list[Key], hash_of: HashOf, negative_zero: bool
) -> None:
    """A binary search of hashes finds candidates; only equal keys are hits, wherever the hash collides."""
    run = batch_of(stored, hash_of)
    wanted = sorted(wanted, key=hash_of)
    hashes = np.array([hash_of(k) for k in wanted], dtype=np.uint64)
    found = lookup(run, SCHEMA, hashes, key_columns(wanted, negative_zero=negative_zero))
    pairs = list(zip(run.column(2).to_pylist(), run.column(3).to_pylist(), strict=True))
    for key, position in zip(wanted, found, strict=True):
        assert (position >= 0) == (key in stored)
        if position >= 0:
            assert canonical_key(*pairs[position]) == key


@given(st.lists(st.tuples(keys, st.integers(0, 3)), max_size=30), st.booleans())
@examples(200)
def test_groups_are_the_keys_and_keep_the_order_of_rows(rows: list[tuple[Key, int]], all_collide: bool) -> None:
    """Rows of a key stay together and in source order, even if all keys have one hash."""
    hash_of: HashOf = (lambda key: 7) if all_collide else colliding
    ordered = sorted(rows, key=lambda row: hash_of(row[0]))
    columns = key_columns([key for key, _ in ordered])
    hashes = np.array([hash_of(key) for key, _ in ordered], dtype=np.uint64)
    order, first = first_of_groups(hashes, columns)
    arranged = ordered if order is None else [ordered[i] for i in order]
    assert order is None or sorted(order) == list(range(len(ordered)))
    groups: list[list[tuple[Key, int]]] = []
    for row, begins in zip(arranged, first, strict=True):
        if begins:
            groups.append([])
        groups[-1].append(row)
    found = {group[0][0]: group for group in groups}
    assert len(found) == len(groups) == len({key for key, _ in rows})
    for key, group in found.items():
        assert group == [row for row in ordered if row[0] == key]


def test_equality_of_keys_is_sparks_grouping_equality() -> None:
    """null = null, NaN = NaN, 0.0 = -0.0; null is not NaN and not zero."""
    score = [None, float("nan"), 0.0, -0.0, 1.0]
    pairs = [(a, b) for a in range(5) for b in range(5)]
    left = pa.array([score[a] for a, _ in pairs], pa.float64(), from_pandas=False)
    right = pa.array([score[b] for _, b in pairs], pa.float64(), from_pandas=False)
    expected = [a == b or {a, b} == {2, 3} for a, b in pairs]
    assert same_keys([left], [right]).tolist() == expected


@given(st.lists(st.tuples(keys, keys), max_size=20))
@examples(100)
def test_composite_keys_are_equal_only_in_all_columns(pairs: list[tuple[Key, Key]]) -> None:
    """("a", null) is not (null, "a")."""
    same = same_keys(key_columns([a for a, _ in pairs]), key_columns([b for _, b in pairs], negative_zero=True))
    assert same.tolist() == [a == b for a, b in pairs]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4, 5, 7, 8, 16, 100, 1000, 32767, 32768])
def test_the_ranges_of_all_shards_are_all_hashes(parallelism: int) -> None:
    """No hash without an owner, none with two, in order."""
    ranges = [hash_range_of_shard(s, parallelism) for s in range(parallelism)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == (1 << 64) - 1
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert begin == end + 1


@given(st.integers(0, (1 << 64) - 1), st.integers(1, MAX_PARALLELISM))
@examples(400)
def test_a_hash_lies_in_the_range_of_the_shard_that_spark_sends_it_to(key_hash: int, parallelism: int) -> None:
    """The SQL that partitions the rows says floor(group * P / 32768), and state must be where the rows arrive."""
    shard = (key_hash >> 49) * parallelism // MAX_PARALLELISM
    low, high = hash_range_of_shard(shard, parallelism)
    assert low <= key_hash <= high


@pytest.mark.parametrize(("shard", "parallelism"), [(-1, 4), (4, 4), (0, 0), (0, 32769)])
def test_a_shard_that_cannot_be_is_an_error_of_ours(shard: int, parallelism: int) -> None:
    """Better loud than an empty range."""
    with pytest.raises(StillstateError, match="invariant broken"):
        hash_range_of_shard(shard, parallelism)


@given(changes, hash_functions, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
@examples(100)
def test_a_slice_holds_exactly_the_rows_of_its_range(stored: Changes, hash_of: HashOf, a: int, b: int) -> None:
    """Both ends belong to it."""
    low, high = min(a, b), max(a, b)
    sliced = rows_of(slice_hash_range(batch_of(stored, hash_of), low, high))
    assert sliced == {k: v for k, v in stored.items() if low <= hash_of(k) <= high}


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 4096])
def test_slices_of_all_shards_are_the_table(parallelism: int) -> None:
    """Rescaling is a range read: nothing is lost and nothing is there twice."""
    stored: Changes = {key: (n, None) for n, key in enumerate(ALL_KEYS)}
    for hash_of in (colliding, lambda key: ALL_KEYS.index(key) * ((1 << 64) // 25)):
        batch = batch_of(stored, hash_of)
        pieces = [slice_hash_range(batch, *hash_range_of_shard(s, parallelism)) for s in range(parallelism)]
        assert rows_of(concat([p for p in pieces if p.num_rows], SCHEMA.arrow)) == stored


def test_columns_that_are_no_state_are_refused() -> None:
    """A Parquet file under a table's name may hold anything."""
    good = SCHEMA.arrow
    assert StateSchema.of(good) == SCHEMA
    for bad in (
        pa.schema([]),
        pa.schema(list(good)[1:]),
        pa.schema([*good, pa.field("other", pa.int64())]),
        pa.schema([good.field(1), good.field(0), *list(good)[2:]]),
        pa.schema([pa.field("key_hash", pa.int64(), nullable=False), *list(good)[1:]]),
        pa.schema([*list(good)[:2], *list(good)[4:], *list(good)[2:4]]),
    ):
        with pytest.raises(CorruptSegment, match="not those of a state"):
            StateSchema.of(bad)


def test_an_unsorted_batch_is_refused() -> None:
    """Binary search in it would miss keys without a word."""
    stored = batch_of(dict.fromkeys(ALL_KEYS, (1, "x")))
    with pytest.raises(CorruptSegment, match="not sorted"):
        SCHEMA.check_batch(stored.take(pa.array([1, 0, *range(2, 25)])), "here")
    assert SCHEMA.check_batch(stored, "here") is stored
