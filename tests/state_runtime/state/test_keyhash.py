"""Many keys hashed at once are hashed as each one alone, whatever their types and however Arrow holds them."""

from __future__ import annotations

import struct
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.errors import InvalidData, StillstateError
from state_runtime.state.keyhash import SEED, chain_rows, hash_key, hash_rows, value_hasher

NAN_WITH_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    def scaled(unscaled: int) -> Decimal:
        with localcontext(prec=60):
            return Decimal(unscaled).scaleb(-scale)

    # Around powers of 256 a BigInteger gets one byte more.
    edges = [sign * (1 << bits) + off for bits in range(7, 127, 8) for sign in (1, -1) for off in (-1, 0, 1)]
    near = st.sampled_from([e for e in edges if abs(e) < 10**digits])
    return (near | st.integers(-(10**digits) + 1, 10**digits - 1)).map(scaled)


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


FLOATS = st.floats() | st.sampled_from([0.0, -0.0, float("nan"), NAN_WITH_PAYLOAD])
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 23, 24, 31, 32, 33, 39, 63, 64, 65, 96, 127, 200])
BYTES = st.binary(max_size=9) | LENGTHS.flatmap(lambda n: st.binary(min_size=n, max_size=n))
TEXTS = st.text(max_size=12) | LENGTHS.map(lambda n: "é€😀a"[n % 4] * n)
SIMPLE: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), integers(8)),
    (pa.int16(), integers(16)),
    (pa.int32(), integers(32)),
    (pa.int64(), integers(64)),
    (pa.date32(), integers(32)),
    (pa.timestamp("us"), integers(64)),
    (pa.timestamp("us", "UTC"), integers(64)),
    (pa.float32(), st.floats(width=32) | st.sampled_from([-0.0, float("nan")])),
    (pa.float64(), FLOATS),
    (pa.decimal128(5, 2), decimals(5, 2)),
    (pa.decimal128(18, 0), decimals(18, 0)),
    (pa.decimal128(19, 4), decimals(19, 4)),
    (pa.decimal128(38, 18), decimals(38, 18)),
    (pa.string(), TEXTS),
    (pa.large_string(), TEXTS),
    (pa.binary(), BYTES),
    (pa.large_binary(), BYTES),
]


# Python's own dates and times, so that failing examples can be printed.
PRINTABLE = [
    (kind, st.integers(-700_000, 2_900_000) if pa.types.is_date32(kind) else st.integers(-(10**15), 10**17))
    if pa.types.is_temporal(kind)
    else (kind, values)
    for kind, values in SIMPLE
]


def some_fields(inner: list[Any]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    names = [f"f{i}" for i in range(len(inner))]
    kind = pa.struct([(name, k) for name, (k, _) in zip(names, inner)])
    return kind, st.fixed_dictionaries({name: st.none() | values for name, (_, values) in zip(names, inner)})


def some_elements(inner: Any) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    return pa.list_(inner[0]), st.lists(st.none() | inner[1], max_size=4)


TYPES = st.recursive(
    st.sampled_from(PRINTABLE),
    lambda inner: st.lists(inner, max_size=3).map(some_fields) | inner.map(some_elements),
    max_leaves=4,
)


def stored(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An array of exactly these values: dates and times are given as numbers, which Arrow takes only so."""
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        return pa.array(values, pa.int32() if pa.types.is_date32(kind) else pa.int64()).cast(kind)
    if pa.types.is_struct(kind):
        children = [stored([None if v is None else v[f.name] for v in values], f.type) for f in kind]
        if not children:
            return pa.array(values, kind)
        mask = pa.array([v is None for v in values], pa.bool_())
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_list(kind):
        ends = [0]
        for v in values:
            ends.append(ends[-1] + len(v or ()))
        elements = stored([e for v in values for e in v or ()], kind.value_type)
        mask = pa.array([v is None for v in values], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), elements, type=kind, mask=mask)
    return pa.array(values, kind)


@st.composite
def key_columns(draw: Any) -> list[pa.Array]:
    """Some columns, each a slice of a longer one."""
    rows = draw(st.integers(0, 30))
    columns = []
    for _ in range(draw(st.integers(1, 3))):
        kind, values = draw(TYPES)
        before, after = draw(st.integers(0, 9)), draw(st.integers(0, 2))
        size = before + rows + after
        pool = draw(st.lists(st.none() | values, min_size=1, max_size=8))
        picked = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
        columns.append(stored(picked, kind).slice(before, rows))
    return columns


def one_by_one(columns: list[pa.Array]) -> list[int]:
    return [hash_key([column.slice(row, 1) for column in columns]) for row in range(len(columns[0]))]


@examples(400)
@given(key_columns())
def test_many_keys_hash_as_each_one_alone(columns: list[pa.Array]) -> None:
    hashes = hash_rows(columns)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == one_by_one(columns), [column.type for column in columns]


@pytest.mark.parametrize(("kind", "values"), SIMPLE, ids=lambda v: str(v) if isinstance(v, pa.DataType) else "")
@examples(40)
@given(st.data())
def test_every_simple_type_hashes_as_each_value_alone(kind: Any, values: Any, data: Any) -> None:
    pool = data.draw(st.lists(st.none() | values, min_size=1, max_size=40))
    columns = [stored(pool, kind)]
    assert hash_rows(columns).tolist() == one_by_one(columns)


@examples(300)
@given(st.data())
def test_pythons_own_values_hash_as_the_columns_that_hold_them(data: Any) -> None:
    """A look-up of one entry of a map has the user's values in hand, and should not make columns of them."""
    picked = data.draw(st.lists(st.sampled_from(PRINTABLE), min_size=1, max_size=3))
    columns = [stored([data.draw(st.none() | values)], kind) for kind, values in picked]
    kinds = [column.type for column in columns]
    hashed = value_hasher(kinds)
    if any(pa.types.is_temporal(kind) for kind in kinds):
        assert hashed is None
    else:
        assert hashed is not None
        assert hashed([column[0].as_py() for column in columns]) == hash_key(columns)


def test_values_that_do_not_fit_their_type_have_no_hash() -> None:
    """Whoever asks makes a column of them then, and Arrow says which one it is."""
    for kind, value in ((pa.int64(), 1 << 63), (pa.int32(), 1 << 31), (pa.string(), "\ud800")):
        hashed = value_hasher([kind])
        assert hashed is not None
        with pytest.raises((OverflowError, ValueError)):
            hashed([value])
    for kind in (pa.struct([("a", pa.int64())]), pa.list_(pa.int64()), pa.timestamp("us", "UTC"), pa.date32()):
        assert value_hasher([pa.int64(), kind]) is None


@pytest.mark.parametrize("rows", [1, 11, 12, 13, 16_384, 16_385])
def test_rows_of_every_length_hash_alike_in_any_company(rows: int) -> None:
    """Around the borders of blocks, of stripes, and of where single long rows leave the others."""
    rng = np.random.default_rng(rows)
    sample = [rng.bytes(int(n)) for n in [*rng.integers(0, 140, 40), 5_000, 5_031, 32, 31, 0]]
    picked = [sample[i] for i in rng.integers(0, len(sample), rows)]
    expected = {value: hash_key([pa.array([value], pa.binary())]) for value in set(picked)}
    assert hash_rows([pa.array(picked, pa.binary())]).tolist() == [expected[value] for value in picked]


UNSIGNED = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])


@examples(300)
@given(st.lists(st.tuples(BYTES, UNSIGNED), min_size=1, max_size=60))
def test_the_vectorised_xxh64_is_the_librarys(rows: list[tuple[bytes, int]]) -> None:
    """Of any bytes with any seed: in a chain of columns the hash before is the seed."""
    seeds = np.array([seed for _, seed in rows], dtype=np.uint64)
    hashes = chain_rows(pa.array([data for data, _ in rows], pa.binary()), seeds)
    assert hashes.tolist() == [xxhash.xxh64_intdigest(data, seed) for data, seed in rows]


@examples(300)
@given(st.lists(st.tuples(integers(32), integers(64), UNSIGNED), min_size=1, max_size=40))
def test_numbers_hash_as_the_library_hashes_their_bytes(rows: list[tuple[int, int, int]]) -> None:
    """Four bytes and eight bytes have shorter ways of their own, here as in Spark."""
    seeds = np.array([seed for _, _, seed in rows], dtype=np.uint64)
    halves = chain_rows(pa.array([n for n, _, _ in rows], pa.int32()), seeds)
    words = chain_rows(pa.array([n for _, n, _ in rows], pa.int64()), seeds)
    for row, (half, word, seed) in enumerate(rows):
        assert halves[row] == xxhash.xxh64_intdigest(half.to_bytes(4, "little", signed=True), seed)
        assert words[row] == xxhash.xxh64_intdigest(word.to_bytes(8, "little", signed=True), seed)


def test_the_junk_under_a_null_is_not_hashed() -> None:
    """Arrow promises nothing of the bytes of a null row."""
    validity = pa.py_buffer(bytes([0b101]))
    numbers = pa.Array.from_buffers(pa.int64(), 3, [validity, pa.array([1, 2, 3]).buffers()[1]])
    text = pa.array(["a", "b" * 99, "c"])
    texts = pa.Array.from_buffers(pa.string(), 3, [validity, *text.buffers()[1:]])
    fields = pa.StructArray.from_arrays([numbers, text], ["n", "t"], mask=pa.array([False, True, False]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), text, mask=pa.array([False, True, False]))
    for column in (numbers, texts, fields, lists):
        assert int(hash_rows([column])[1]) == SEED == hash_key([column.slice(1, 1)])
    assert hash_rows([numbers, texts]).tolist() == one_by_one([numbers, texts])


def test_a_type_without_a_hash_and_uneven_columns_are_refused() -> None:
    for kind, value in ((pa.uint8(), 1), (pa.timestamp("ns"), 1), (pa.map_(pa.int8(), pa.int8()), [(1, 1)])):
        with pytest.raises(InvalidData, match="no hash"):
            hash_rows([pa.array([value], kind)])
    with pytest.raises(StillstateError, match="2 and of 1 rows"):
        hash_rows([pa.array([1, 2]), pa.array([1])])
    with pytest.raises(StillstateError, match="no column"):
        hash_rows([])
