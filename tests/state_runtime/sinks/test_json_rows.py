"""Rows as JSON are what a parser of JSON takes for these rows, whatever is in them."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_runtime.sinks.json_rows import json_objects, plain_texts, unwritable

AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC)
INNER = pa.struct([("t", pa.string()), ("l", pa.list_(pa.struct([("n", pa.int64())])))])
SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ('na"me\n', pa.string()),
        ("f", pa.float64()),
        ("b", pa.bool_()),
        ("l", pa.list_(pa.string())),
        ("s", INNER),
        ("m", pa.map_(pa.string(), pa.int32())),
        ("nothing", pa.null()),
    ]
)
TEXT = st.one_of(st.none(), st.text(max_size=5), st.sampled_from(['"', "\\", "\x00\x1f", "ü\n\t", "\\u0000", "\u2028"]))
ROW = st.fixed_dictionaries(
    {
        "i": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        'na"me\n': TEXT,
        "f": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        "b": st.one_of(st.none(), st.booleans()),
        "l": st.one_of(st.none(), st.lists(TEXT, max_size=3)),
        "s": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"t": TEXT, "l": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.just({"n": 1})), max_size=2))}
            ),
        ),
        "m": st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3)),
        "nothing": st.none(),
    }
)


@given(st.lists(ROW, max_size=5), st.integers(0, 2))
def test_any_rows_come_back_from_a_parser_as_they_were(rows: list[dict[str, Any]], skipped: int) -> None:
    """A part of a batch, too: nested arrays of a slice begin in the middle of their values."""
    as_arrow = [{**row, "m": None if row["m"] is None else list(row["m"].items())} for row in rows]
    batch = pa.RecordBatch.from_pylist(as_arrow, schema=SCHEMA).slice(skipped)
    assert [json.loads(text) for text in json_objects(batch).to_pylist()] == rows[skipped:]


def test_values_look_as_sparks_do() -> None:
    """But for nulls, which are written, and microseconds, which stay."""
    batch = pa.record_batch(
        {
            "d": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
            "at": pa.array([AT, None], pa.timestamp("us", "Europe/Berlin")),
            "local": pa.array([AT.replace(tzinfo=None), None], pa.timestamp("us")),
            "day": pa.array([AT.date(), None]),
            "raw": pa.array([b"\xff\x00", None]),
            "f": pa.array([float("nan"), float("-inf")]),
            "word": pa.array(["a", None]).dictionary_encode(),
            "by": pa.array([[(1, "x")], None], pa.map_(pa.int32(), pa.string())),
        }
    )
    first, second = json_objects(batch).to_pylist()
    assert first == (
        '{"d":1.50,"at":"2026-01-02T03:04:05.000678Z","local":"2026-01-02T03:04:05.000678","day":"2026-01-02",'
        '"raw":"/wA=","f":"NaN","word":"a","by":{"1":"x"}}'
    )
    assert json.loads(second) == {**dict.fromkeys(batch.schema.names), "f": "-Infinity"}


def test_bytes_that_are_no_text_become_the_character_for_that() -> None:
    """What is staged must be written at some time: an error here would come again at each start."""
    offsets = pa.py_buffer(np.array([0, 2, 3], "int32").tobytes())
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xffb")])
    assert json_objects(pa.record_batch({"x": broken})).to_pylist() == ['{"x":"a\ufffd"}', '{"x":"b"}']


def test_plain_texts_are_without_quotes() -> None:
    assert plain_texts(pa.array(['a"b', None])).to_pylist() == ['a"b', None]
    assert plain_texts(pa.array([1, None])).to_pylist() == ["1", None]
    assert plain_texts(pa.array([AT.date()])).to_pylist() == ["2026-01-02"]
    assert plain_texts(pa.array([[1], None])).to_pylist() == ["[1]", None]
    assert plain_texts(pa.array(["a", None]).dictionary_encode()).to_pylist() == ["a", None]


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.month_day_nano_interval()])
def test_types_without_a_form_in_json_are_found_wherever_they_are(kind: pa.DataType) -> None:
    inside = pa.list_(pa.struct([("a", pa.map_(pa.string(), kind))]))
    assert (unwritable(kind), unwritable(inside), unwritable(SCHEMA.field("s").type)) == (kind, kind, None)
