"""Rows as bytes: every type comes back, equal keys have equal bytes, and what does not add up is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import canonical as canonical_key
from model import examples
from test_keyhash import NAN_WITH_PAYLOAD, SIMPLE, TYPES, stored

from state_runtime.base.errors import InvalidData
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.row_codec import RowCodec, bytes_of_rows


@st.composite
def columns(draw: Any) -> list[pa.Array]:
    rows = draw(st.integers(0, 12))
    made = []
    for _ in range(draw(st.integers(0, 10))):
        kind, values = draw(TYPES)
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        size = before + rows + after
        picked = draw(st.lists(st.none() | values, min_size=size, max_size=size))
        made.append(stored(picked, kind).slice(before, rows))
    return made


def same(left: pa.Array, right: pa.Array) -> bool:
    """Bit for bit, as far as values go: by printing, because NaN is in it."""
    return left.type.equals(right.type) and repr(left.to_pylist()) == repr(right.to_pylist())


@examples(100)
@given(columns(), st.integers(0, 5))
def test_rows_come_back(made: list[pa.Array], skipped: int) -> None:
    count = len(made[0]) if made else 4
    codec = RowCodec([column.type for column in made])
    rows = codec.encode(made, count)
    assert len(rows) == count
    assert rows.null_count == 0
    for kept in (rows, pa.array(bytes_of_rows(rows), pa.large_binary())):
        back = codec.decode(kept.slice(min(skipped, count)))
        for before, after in zip(made, back, strict=True):
            after.validate(full=True)
            assert same(before.slice(min(skipped, count)), after), before.type


@pytest.mark.parametrize(("kind", "values"), SIMPLE, ids=lambda v: str(v) if isinstance(v, pa.DataType) else "")
@examples(30)
@given(st.data())
def test_every_simple_type_comes_back(kind: Any, values: Any, data: Any) -> None:
    column = stored(data.draw(st.lists(st.none() | values, min_size=1, max_size=20)), kind)
    codec = RowCodec([kind])
    (back,) = codec.decode(codec.encode([column], len(column)))
    # Dates and times that Python cannot print are compared by Arrow.
    assert same(column, back) if not pa.types.is_temporal(kind) else column.equals(back)


def test_maps_and_rare_types_come_back() -> None:
    text, number = pa.string(), pa.int32()
    cases = [
        pa.array([[("a", [1, None]), ("b", None)], None, []], pa.map_(text, pa.list_(number))),
        pa.array([[{"a": 1}, None], [], None], pa.large_list(pa.struct([("a", number)]))),
        pa.array([None, None, None], pa.null()),
        pa.array([[None], None, []], pa.list_(pa.null())),
        pa.array([{}, None, {}], pa.struct([])),
        pa.array([1, None, 255], pa.uint8()),
        pa.array([1, None, -1], pa.duration("us")),
    ]
    codec = RowCodec([c.type for c in cases])
    for slicing in (slice(0, 3), slice(1, 3), slice(2, 3)):
        given_columns = [c[slicing] for c in cases]
        back = codec.decode(codec.encode(given_columns, len(given_columns[0])))
        for before, after in zip(given_columns, back, strict=True):
            after.validate(full=True)
            assert after.equals(before), before.type


@examples(100)
@given(columns())
def test_keys_have_equal_bytes_exactly_if_they_are_equal(made: list[pa.Array]) -> None:
    """Grouping equality, as the hash sees it too: equal bytes have equal hashes, so a key is found under its hash."""
    if not made:
        return
    codec = RowCodec([column.type for column in made], canonical=True)
    rows = bytes_of_rows(codec.encode(made, len(made[0])))
    hashes = hash_rows(made).tolist()
    canonical = [canonical_key(row) for row in zip(*(column.to_pylist() for column in made))]
    for i in range(len(rows)):
        for j in range(i):
            assert (rows[i] == rows[j]) == (canonical[i] == canonical[j])
            assert rows[i] != rows[j] or hashes[i] == hashes[j]


def test_zeros_and_nans_are_one_key_only_where_keys_are_meant() -> None:
    zeros = pa.array([0.0, -0.0, float("nan"), NAN_WITH_PAYLOAD], pa.float64())
    nested = pa.StructArray.from_arrays([zeros], ["d"])
    for column in (zeros, nested, pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), zeros)):
        exact = bytes_of_rows(RowCodec([column.type]).encode([column], 4))
        equal = bytes_of_rows(RowCodec([column.type], canonical=True).encode([column], 4))
        assert len(set(exact)) == 4
        assert equal[0] == equal[1] != equal[2] == equal[3]


@examples(100)
@given(columns(), st.data())
def test_rows_that_do_not_add_up_are_refused_or_read_as_something(made: list[pa.Array], data: Any) -> None:
    """Never a crash, never a read outside the row: the error, or columns that Arrow finds valid."""
    count = len(made[0]) if made else 1
    codec = RowCodec([column.type for column in made])
    rows = bytes_of_rows(codec.encode(made, count))
    if not rows:
        return
    at = data.draw(st.integers(0, count - 1))
    row = bytearray(rows[at])
    cut = data.draw(st.integers(0, len(row)))
    row[cut:] = data.draw(st.binary(max_size=12) | st.just(bytes(row[cut + 1 :])))
    rows[at] = bytes(row)
    try:
        back = codec.decode(pa.array(rows, pa.large_binary()))
    except (ValueError, pa.ArrowInvalid):
        return
    for column in back:
        column.validate(full=not pa.types.is_decimal(column.type))


def test_some_first_columns_can_be_read_alone() -> None:
    codec = RowCodec([pa.int64(), pa.string()])
    rows = codec.encode([pa.array([7, None]), pa.array(["a", "bc"])], 2)
    (first,) = codec.decode(rows, first=1)
    assert first.to_pylist() == [7, None]


def test_a_type_that_cannot_be_stored_is_refused() -> None:
    for kind in (pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.string_view())):
        with pytest.raises(InvalidData, match="cannot be stored row by row"):
            RowCodec([kind])


def test_rows_cost_no_more_than_their_values() -> None:
    """Half a kilobyte of nulls is two bits: nothing is padded."""
    rows = RowCodec([pa.string(), pa.int64()]).encode([pa.array(["abc", None]), pa.array([1, None])], 2)
    assert [len(row) for row in bytes_of_rows(rows)] == [1 + 4 + 8 + 3, 1 + 4 + 8]
    assert np.frombuffer(bytes_of_rows(rows)[0], np.uint8)[0] == 0
