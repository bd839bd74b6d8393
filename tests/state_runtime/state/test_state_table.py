"""State tables against a dictionary: folding, look-up, grouping and hash ranges."""

from __future__ import annotations

import itertools
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import canonical
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
from shapes import SHAPES, Model, batch_of_change, changes_of, plain

from state_runtime.base.errors import CorruptSegment
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.search import lookup
from state_runtime.state.table import (
    StateSchema,
    adapt,
    concat,
    first_of_groups,
    fold,
    same_keys,
    slice_hash_range,
    widens,
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


def test_equal_times_of_different_units_are_equal() -> None:
    """What lies in memory is compared only where it means the same."""
    left = pa.array([1, 2, 3_000], pa.timestamp("ms", "UTC"))
    right = pa.array([1_000, 2, 3_000], pa.timestamp("us", "UTC"))
    assert same_keys([left], [right]).tolist() == [True, False, False]


@given(st.lists(st.tuples(keys, keys), max_size=20))
@examples(100)
def test_composite_keys_are_equal_only_in_all_columns(pairs: list[tuple[Key, Key]]) -> None:
    """("a", null) is not (null, "a")."""
    same = same_keys(key_columns([a for a, _ in pairs]), key_columns([b for _, b in pairs], negative_zero=True))
    assert same.tolist() == [a == b for a, b in pairs]


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


# --- many rows per key -------------------------------------------------------------------------------------------

ENTRY_SHAPES = [shape for shape in SHAPES if SHAPES[shape].entries is not None]


def live_rows(shape: str, batches: list[pa.RecordBatch], now_ms: int = -100) -> list[Any]:
    return plain(Model(shape, batches, now_ms).rows(shape))


@pytest.mark.parametrize("shape", SHAPES)
@given(st.data(), hash_functions, st.integers(0, 5))
@examples(40)
def test_folding_in_two_steps_leaves_the_same_rows(shape: str, data: Any, hash_of: HashOf, cut: int) -> None:
    """Whatever is folded with whatever, in every layout: clear markers must live on until nothing lies below them."""
    schema = SHAPES[shape]
    drawn = data.draw(st.lists(changes_of(shape), max_size=6))
    batches = [batch_of_change(shape, change, hash_of) for change in drawn]
    upper = fold(batches[:cut], schema, drop_deleted=False)
    lower = fold(batches[cut:], schema, drop_deleted=True)
    schema.check_batch(upper, "here")
    assert live_rows(shape, [upper, *batches[cut:]]) == live_rows(shape, batches)
    assert live_rows(shape, [upper, lower]) == live_rows(shape, batches)
    whole = fold([upper, lower], schema, drop_deleted=True)
    schema.check_batch(whole, "here")
    assert plain(whole.to_pylist()) == live_rows(shape, batches)


@pytest.mark.parametrize("shape", ENTRY_SHAPES)
@given(st.data(), hash_functions)
@examples(40)
def test_a_fold_holds_each_identity_once_and_one_clear_marker_per_key(shape: str, data: Any, hash_of: HashOf) -> None:
    """What a batch promises to whoever searches it."""
    drawn = data.draw(st.lists(changes_of(shape), max_size=6))
    folded = fold([batch_of_change(shape, c, hash_of) for c in drawn], SHAPES[shape], drop_deleted=False)
    names = [n for n in folded.schema.names if n.startswith(("key", "entry"))]
    identities = [repr({n: canonical(row[n]) for n in names}) for row in folded.to_pylist()]
    assert len(set(identities)) == len(identities)
    cleared = frozenset().union(*(change.cleared for change in drawn))
    assert sum(row["entry"] == 0 for row in folded.to_pylist()) == len(cleared)


@pytest.mark.parametrize("shape", ["value-expires", "map-expires", "list-expires"])
@given(st.data(), hash_functions, st.integers(-4, 12))
@examples(40)
def test_an_expired_row_goes_only_with_nothing_below_it(shape: str, data: Any, hash_of: HashOf, now_ms: int) -> None:
    """An expired row still hides the older one of its identity."""
    drawn = data.draw(st.lists(changes_of(shape), min_size=1, max_size=5))
    batches = [batch_of_change(shape, change, hash_of) for change in drawn]
    right = live_rows(shape, batches, now_ms)
    assert plain(fold(batches, SHAPES[shape], drop_deleted=True, now_ms=now_ms).to_pylist()) == right
    upper = fold(batches[:-1], SHAPES[shape], drop_deleted=False, now_ms=now_ms)
    assert live_rows(shape, [upper, batches[-1]], now_ms) == right


@pytest.mark.parametrize(
    "spacing", [1, 1 << 20, 1 << 43, 1 << 62], ids=["near", "apart", "beyond one number", "at the ends"]
)
@pytest.mark.parametrize("groups", [1, 2, 3000])
def test_entries_are_sorted_within_their_keys_whatever_their_distance(spacing: int, groups: int) -> None:
    """Key and entry are sorted as one number; where both do not fit, the low bits must still count."""
    rng = np.random.default_rng(spacing % 97 + groups)
    schema = SHAPES["list"]
    entries = np.unique(
        np.concatenate([rng.integers(1, 4, 3).astype(np.uint64) * np.uint64(spacing) + np.uint64(n) for n in range(4)])
    )
    rows = [(n, e) for n in range(groups) for e in entries.tolist()]
    newest = rng.integers(0, 3, len(rows))

    def batch(mine: list[tuple[int, int]]) -> pa.RecordBatch:
        count = len(mine)
        return schema.batch(
            np.array([n for n, _ in mine], dtype=np.uint64),
            None,
            [pa.array([str(n) for n, _ in mine], pa.string()), pa.nulls(count, pa.float64())],
            [pa.array([e % 1000 for _, e in mine], pa.int64()), pa.nulls(count, pa.string())],
            entries=np.array([e for _, e in mine], dtype=np.uint64),
        )

    parts = [batch([row for row, at in zip(rows, newest, strict=True) if at == number]) for number in range(3)]
    folded = fold(parts, schema, drop_deleted=True)
    assert folded.equals(batch(rows))


# --- schema evolution --------------------------------------------------------------------------------------------

OLD = StateSchema(
    pa.schema([("k", pa.string())]),
    pa.schema([("a", pa.int8()), ("b", pa.string()), ("c", pa.float32()), ("gone", pa.int64())]),
    entries=pa.schema([("m", pa.int32())]),
    time="expires",
)


def old_batch() -> pa.RecordBatch:
    """A clear marker, a row, a row of nulls."""
    return OLD.batch(
        np.array([5, 5, 6], dtype=np.uint64),
        np.array([True, False, False]),
        [pa.array(["x", "x", "y"])],
        [
            pa.array([None, 1, None], pa.int8()),
            pa.array([None, "b", None]),
            pa.array([None, 0.5, None], pa.float32()),
            pa.array([None, 7, None], pa.int64()),
        ],
        entries=np.array([0, 3, 4], dtype=np.uint64),
        entry_columns=[pa.array([None, 1, 2], pa.int32())],
        times=pa.array([None, 100, None], pa.int64()),
    )


def with_values(*fields: tuple[str, pa.DataType], **changed: Any) -> StateSchema:
    return replace(OLD, values=pa.schema(fields), **changed)


def test_a_batch_is_brought_to_a_newer_schema() -> None:
    """Added, dropped, reordered and widened at once; nothing else of the batch changes."""
    new = with_values(
        ("c", pa.float64()), ("new", pa.string()), ("n", pa.int64()), ("b", pa.string()), ("a", pa.int32())
    )
    adapted = adapt(old_batch(), new, {"n": pa.scalar(9)})
    assert adapted.schema.equals(new.arrow)
    assert new.check_batch(adapted, "here") is adapted
    values = adapted.select([f"value.{n}" for n in new.values.names]).to_pylist()
    nothing = dict.fromkeys(("value.c", "value.new", "value.n", "value.b", "value.a"))
    assert values == [
        nothing,
        {"value.c": 0.5, "value.new": None, "value.n": 9, "value.b": "b", "value.a": 1},
        {**nothing, "value.n": 9},
    ]
    others = ["key_hash", "deleted", "entry", "key.k", "entry.m", "expires"]
    assert adapted.select(others).equals(old_batch().select(others))


def test_a_batch_of_the_same_schema_is_left_as_it_is() -> None:
    """The usual case costs nothing."""
    batch = old_batch()
    assert adapt(batch, OLD) is batch


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(with_values(("a", pa.int16()), keys=pa.schema([("k", pa.int64())])), id="keys"),
        pytest.param(
            with_values(("a", pa.int16()), entries=pa.schema([("m", pa.int64())])), id="map keys are not widened"
        ),
        pytest.param(with_values(("a", pa.int16()), entries=None), id="another layout"),
        pytest.param(with_values(("a", pa.int16()), time=""), id="no time"),
        pytest.param(with_values(("a", pa.int16()), time="due"), id="another time"),
        pytest.param(with_values(("gone", pa.int32())), id="narrower"),
        pytest.param(with_values(("a", pa.float64())), id="integer to double"),
        pytest.param(with_values(("b", pa.int64())), id="text to number"),
        pytest.param(with_values(("c", pa.int64())), id="float to integer"),
    ],
)
def test_what_is_no_evolution_is_refused(wanted: StateSchema) -> None:
    """Nothing is guessed, and nothing is lost in a conversion."""
    with pytest.raises(CorruptSegment):
        adapt(old_batch(), wanted)


def test_a_default_of_another_type_is_refused() -> None:
    """It comes from the user."""
    with pytest.raises(ValueError, match="default of value column 'new' is of type string"):
        adapt(old_batch(), with_values(("new", pa.int64())), {"new": pa.scalar("x")})


def test_fields_of_structs_come_go_and_widen() -> None:
    """Also inside each other, with null structs, and in a slice."""
    inner_old, inner_new = (
        pa.struct([("x", pa.int8()), ("y", pa.int8())]),
        pa.struct([("y", pa.int64()), ("z", pa.string())]),
    )
    old = StateSchema(OLD.keys, pa.schema([("s", pa.struct([("i", inner_old), ("f", pa.float32())]))]))
    new = StateSchema(OLD.keys, pa.schema([("s", pa.struct([("f", pa.float64()), ("i", inner_new)]))]))
    rows = [None, {"i": {"x": 1, "y": 2}, "f": 0.5}, {"i": None, "f": None}, {"i": {"x": 1, "y": None}, "f": 2.0}]
    batch = old.batch(
        np.arange(4, dtype=np.uint64), None, [pa.array(list("abcd"))], [pa.array(rows, old.values.field("s").type)]
    )
    right = [
        None,
        {"f": 0.5, "i": {"y": 2, "z": None}},
        {"f": None, "i": None},
        {"f": 2.0, "i": {"y": None, "z": None}},
    ]
    assert adapt(batch, new).column("value.s").to_pylist() == right
    assert adapt(batch.slice(1, 2), new).column("value.s").to_pylist() == right[1:3]


def test_only_what_loses_nothing_widens() -> None:
    """int8 to int64 step by step, float to double, and every type to itself."""
    types = [
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.bool_(),
        pa.date32(),
    ]
    allowed = {(a, b) for a, b in itertools.product(range(9), repeat=2) if a == b or a < b < 4 or (a, b) == (4, 5)}
    assert {(a, b) for a, b in itertools.product(range(9), repeat=2) if widens(types[a], types[b])} == allowed
    assert not widens(pa.struct([("x", pa.int64())]), pa.struct([("x", pa.int8())]))
    assert not widens(pa.list_(pa.int64()), pa.list_(pa.int8()))
    assert not widens(pa.map_(pa.int8(), pa.int8()), pa.map_(pa.int64(), pa.int8()))
    assert not widens(pa.decimal128(10, 2), pa.decimal128(10, 3))
    for old, new in (
        (pa.list_(pa.int8()), pa.list_(pa.int64())),
        (pa.list_(pa.field("element", pa.int8(), nullable=False)), pa.list_(pa.int8())),
        (pa.map_(pa.int8(), pa.int8()), pa.map_(pa.int8(), pa.int64())),
        (pa.decimal128(10, 2), pa.decimal128(12, 3)),
    ):
        assert widens(old, new)


@pytest.mark.parametrize(
    ("values", "old", "new"),
    [
        ([[1, None], None, []], pa.list_(pa.int8()), pa.list_(pa.field("element", pa.int64()))),
        ([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64())),
        ([[{"a": 1}], None, [None]], pa.list_(pa.struct([("a", pa.int8())])), pa.list_(pa.struct([("a", pa.int32())]))),
        ([Decimal("1.50"), None, Decimal("-99.99")], pa.decimal128(4, 2), pa.decimal128(8, 3)),
    ],
)  # fmt: skip
def test_what_lists_maps_and_decimals_hold_is_widened_where_it_is_read(
    values: list[Any], old: pa.DataType, new: pa.DataType
) -> None:
    """Of slices too."""
    keys = pa.schema([("k", pa.int64())])
    before, after = (StateSchema(keys, pa.schema([("v", t)])) for t in (old, new))
    rows = np.arange(3, dtype=np.int64)
    batch = before.batch(rows.astype(np.uint64), None, [pa.array(rows)], [pa.array(values, old)])
    assert adapt(batch, after).column("value.v").to_pylist() == values
    assert adapt(batch.slice(1), after).column("value.v").to_pylist() == values[1:]
