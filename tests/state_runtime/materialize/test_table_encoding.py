"""State tables as Parquet files: whatever the columns are, they read back, and columns of numbers are split and packed by LZ4."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.materialize.encoding import encode_table

TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.integers(0, 1 << 50).map(lambda n: dt.datetime.fromtimestamp(n // 1_000_000, dt.UTC).replace(tzinfo=None)),
    pa.decimal128(10, 2): st.integers(-(10**9), 10**9).map(lambda n: Decimal(n) / 100),
    pa.list_(pa.int64()): st.lists(st.integers(0, 9) | st.none(), max_size=3),
    pa.struct([("x", pa.int32()), ("y", pa.string())]): st.fixed_dictionaries({"x": st.integers(0, 9), "y": st.text(max_size=2)}),
}  # fmt: skip


def read(body: bytes) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True)


@given(st.data())
@examples(60)
def test_every_column_reads_back(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 30))
    columns = {}
    for number, (kind, values) in enumerate(TYPES.items()):
        drawn = data.draw(st.lists(values | st.none(), min_size=rows, max_size=rows))
        columns[f"value.c{number}"] = pa.array(drawn, kind)
    batch = pa.record_batch(columns)
    assert read(encode_table(batch)).read().equals(pa.Table.from_batches([batch]))


def test_numbers_are_split_and_packed_by_lz4_and_the_rest_by_zstd() -> None:
    batch = pa.record_batch(
        {
            "key_hash": pa.array([1, 2], pa.uint64()),
            "deleted": [False, True],
            "value.s": ["a", "b"],
            "value.t": pa.array([{"x": 1, "y": "a"}, None], pa.struct([("x", pa.int32()), ("y", pa.string())])),
        }
    )
    group = read(encode_table(batch)).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    split = {c.path_in_schema for c in columns if "BYTE_STREAM_SPLIT" in c.encodings}
    assert split == {"key_hash", "value.t.x"}
    assert {c.path_in_schema for c in columns if c.compression == "LZ4"} == split
    assert {c.compression for c in columns} == {"LZ4", "ZSTD"}


@pytest.mark.parametrize("inner", [pa.string(), pa.int64()], ids=str)
def test_two_columns_of_one_path_are_stored_all_the_same(inner: pa.DataType) -> None:
    """A column "a.b" and a field b of a column a: options go by path, and a text cannot be split."""
    values = pa.array([None, None], inner)
    batch = pa.record_batch({"a.b": pa.array([1, 2], pa.int64()), "a": pa.StructArray.from_arrays([values], ["b"])})
    found = read(encode_table(batch))
    assert found.read_row_group(0).column(0).to_pylist() == [1, 2]


def test_a_large_column_of_numbers_is_smaller_than_packed_whole() -> None:
    """What it is for; both sizes are of the same values in the same row groups."""
    totals = pa.array([n * 37 % 10_007 for n in range(200_000)], pa.int64())
    batch = pa.record_batch({"value.total": totals})
    whole = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_batches([batch]), whole, compression="zstd", use_dictionary=False, row_group_size=131_072
    )
    assert len(encode_table(batch)) < whole.getvalue().size
