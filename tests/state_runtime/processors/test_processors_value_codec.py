"""Values of states: what user code may write, what it reads back at once and in a later epoch, in any time zone."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from pyspark.sql import Row

from state_runtime.base.errors import InvalidData
from state_runtime.processors.user.user_errors import InvalidStateValue, plain
from state_runtime.processors.user.value_codec import ValueCodec, local_timestamps

ZONES = ["UTC", "America/New_York", "Asia/Kolkata"]
UTC_TIME = pa.timestamp("us", "UTC")
STRUCT = pa.struct([("a", pa.int64()), ("t", UTC_TIME)])


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The process runs in another time zone."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def codec_of(*types: pa.DataType) -> ValueCodec:
    return ValueCodec(pa.schema([(f"c{n}", t) for n, t in enumerate(types)]), "here")


def later(codec: ValueCodec, *rows: Any) -> list[Any]:
    """What another epoch reads of rows that were written."""
    columns = codec.columns([codec.row_of(row, "update") for row in rows])
    for column, field in zip(columns, codec.schema, strict=True):
        assert column.type == field.type
    return codec.rows(columns)


def now(codec: ValueCodec, row: Any) -> Any:
    """What the same epoch reads."""
    return codec.row_of(row, "update")


NOON = dt.datetime(2024, 7, 1, 12, 0, 0, 5)  # noqa: DTZ001  (states hold wall clocks)
WRITTEN: list[tuple[pa.DataType, Any, Any]] = [
    (pa.int64(), np.int32(5), 5),
    (pa.float64(), np.float32(0.5), 0.5),
    (pa.float32(), 0.1, 0.10000000149011612),
    (pa.string(), "é", "é"),
    (pa.binary(), bytearray(b"ab"), b"ab"),
    (pa.date32(), dt.date(2024, 1, 2), dt.date(2024, 1, 2)),
    # Of another kind than declared, and nothing is lost.
    (pa.string(), 5, "5"),
    (pa.string(), np.str_("a"), "a"),
    (pa.binary(), "é", "é".encode()),
    (pa.int64(), 5.0, 5),
    (pa.int64(), np.float32(-3.0), -3),
    (pa.int32(), Decimal("7.00"), 7),
    (pa.float64(), 5, 5.0),
    (pa.float64(), 1 << 60, float(1 << 60)),
    (pa.float32(), 5, 5.0),
    (pa.bool_(), np.bool_(True), True),
    (pa.date32(), dt.datetime(2024, 1, 2), dt.date(2024, 1, 2)),  # noqa: DTZ001
    (pa.date32(), pd.Timestamp(2024, 1, 2), dt.date(2024, 1, 2)),
    (pa.date32(), np.datetime64("2024-01-02"), dt.date(2024, 1, 2)),
    (pa.duration("us"), dt.timedelta(1, 2, 3), dt.timedelta(1, 2, 3)),
    (pa.duration("us"), pd.Timedelta(days=1, microseconds=3), dt.timedelta(1, 0, 3)),
    (pa.list_(pa.float64()), [1, 0.5, np.float32(0.5), None], [1.0, 0.5, 0.5, None]),
    (pa.map_(pa.string(), pa.date32()), {5: dt.datetime(2024, 1, 2)}, {"5": dt.date(2024, 1, 2)}),  # noqa: DTZ001
    (STRUCT, (5.0, NOON), Row(a=5, t=NOON)),
    (pa.decimal128(5, 2), Decimal("1.5"), Decimal("1.50")),
    (pa.decimal128(5, 2), 7, Decimal("7.00")),
    (pa.decimal128(38, 10), Decimal("1234567890123456789012345678.5"), Decimal("1234567890123456789012345678.5")),
    (UTC_TIME, NOON, NOON),
    (UTC_TIME, pd.Timestamp(NOON), NOON),
    (pa.timestamp("us"), NOON, NOON),
    (pa.timestamp("us"), NOON.replace(tzinfo=dt.timezone(dt.timedelta(hours=9))), NOON),
    (STRUCT, (1, NOON), Row(a=1, t=NOON)),
    (STRUCT, [np.int64(1), NOON], Row(a=1, t=NOON)),
    (STRUCT, {"t": NOON}, Row(a=None, t=NOON)),
    (STRUCT, Row(x=1, y=None), Row(a=1, t=None)),
    (pa.list_(STRUCT), [(1, NOON), None, {"a": 2}], [Row(a=1, t=NOON), None, Row(a=2, t=None)]),
    (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
    (pa.map_(pa.string(), UTC_TIME), {"k": NOON, "n": None}, {"k": NOON, "n": None}),
    (pa.map_(pa.string(), pa.list_(STRUCT)), {"k": [(1, NOON)]}, {"k": [Row(a=1, t=NOON)]}),
]


@pytest.mark.parametrize(("data_type", "given_value", "read"), WRITTEN, ids=lambda v: str(v)[:30])
def test_what_is_written_is_read_as_spark_gives_it_now_and_later(
    zone: str, data_type: Any, given_value: Any, read: Any
) -> None:
    """Observed in Spark: Rows, lists, dictionaries, datetimes without a zone in the time zone of the process."""
    codec = codec_of(data_type, pa.int64())
    for found in (now(codec, (given_value, 1)), *later(codec, (given_value, 1), (None, 1))[:1]):
        assert repr(found[0]) == repr(read) or found[0] == read
        assert type(found[0]) is type(read) or (isinstance(read, Row) and found[0].__fields__ == read.__fields__)
        assert found[1] == 1
    assert later(codec, (None, None)) == [(None, None)]


def test_a_time_with_a_zone_is_the_same_moment(zone: str) -> None:
    """What is stored does not depend on the process; what is read is its wall clock."""
    codec = codec_of(UTC_TIME)
    moment = dt.datetime(2024, 7, 1, 3, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    (column,) = codec.columns([codec.row_of((moment,), "update"), codec.row_of((pd.Timestamp(moment),), "update")])
    assert column.cast(pa.int64()).to_pylist() == [int(moment.timestamp()) * 1_000_000] * 2
    wall_clock = moment.astimezone().replace(tzinfo=None)
    assert codec.rows([column])[0] == now(codec, (moment,)) == (wall_clock,)


moments = st.integers(-(10**15), 7 * 10**15).map(
    lambda us: dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=us)
)


@given(moments, st.sampled_from(ZONES))
@examples(60)
def test_moments_survive_any_time_zone(moment: dt.datetime, name: str) -> None:
    """Also in the hour that happens twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        codec = codec_of(UTC_TIME, pa.list_(UTC_TIME))
        (read,) = later(codec, (moment, [moment]))
        assert read[0].astimezone(dt.UTC) == read[1][0].astimezone(dt.UTC) == moment
        assert later(codec, read) == [read]
    time.tzset()


CHANGING = {
    "Europe/Berlin": dt.datetime(2024, 10, 27, 1, tzinfo=dt.UTC),
    "America/New_York": dt.datetime(2024, 3, 10, 7, tzinfo=dt.UTC),
    "Australia/Lord_Howe": dt.datetime(2024, 4, 6, 15, tzinfo=dt.UTC),
    "Asia/Riyadh": dt.datetime(1947, 3, 13, 20, 53, 8, tzinfo=dt.UTC),  # within a quarter of an hour
    "Asia/Kathmandu": dt.datetime(1985, 12, 31, 18, 30, tzinfo=dt.UTC),
}


@given(st.lists(st.none() | moments, max_size=30), st.sampled_from(sorted(CHANGING)))
@examples(60)
def test_a_column_of_moments_is_read_as_each_of_them_alone(column: list[dt.datetime | None], name: str) -> None:
    """Python's own conversion is the oracle, also around the moments at which the clocks change."""
    around = [CHANGING[name] + dt.timedelta(seconds=30 * step) for step in range(-40, 41)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        together = [*column, *around]
        alone = [None if m is None else m.astimezone().replace(tzinfo=None) for m in together]
        assert local_timestamps(pa.array(together, UTC_TIME)) == alone
    time.tzset()


MISFITS: list[tuple[pa.DataType, Any]] = [
    (STRUCT, (1,)),
    (STRUCT, (1, NOON, 2)),
    (STRUCT, {"unknown": 1}),
    (STRUCT, "s3cr3t"),
    (UTC_TIME, "s3cr3t"),
    (UTC_TIME, 5),
    (pa.list_(pa.int64()), "s3cr3t"),
    (pa.list_(STRUCT), [("s3cr3t",)]),
    (pa.map_(pa.string(), pa.int64()), 7),
    (pa.decimal128(5, 2), Decimal("1.234")),
    (pa.decimal128(5, 2), Decimal("12345.00")),
    (pa.decimal128(5, 2), -1000),
    (pa.decimal128(5, 2), Decimal("NaN")),
    (pa.decimal128(5, 2), 1.5),
    (pa.decimal128(10, 2), Decimal("5.259")),
    (pa.int64(), True),
    (pa.int64(), "s3cr3t"),
    (pa.int64(), 1.5),
    (pa.int64(), float("nan")),
    (pa.int64(), Decimal("1.5")),
    (pa.float64(), True),
    (pa.float64(), (1 << 60) + 1),
    (pa.float64(), "s3cr3t"),
    (pa.float64(), Decimal("0.5")),
    (pa.float32(), (1 << 24) + 1),
    (pa.float32(), 1e300),
    (pa.bool_(), 1),
    (pa.string(), 7.5),
    (pa.string(), True),
    (pa.string(), b"s3cr3t"),
    (pa.binary(), 7),
    (pa.date32(), NOON),
    (pa.date32(), 5),
    (pa.duration("us"), 5),
    (pa.duration("us"), pd.Timedelta(nanoseconds=1)),
    (pa.list_(pa.int64()), ["s3cr3t"]),
    (pa.list_(pa.date32()), [NOON]),
    (STRUCT, ("s3cr3t", NOON)),
]


@pytest.mark.parametrize(("data_type", "value"), MISFITS, ids=str)
def test_what_spark_would_store_as_null_or_cut_off_is_refused_at_once(data_type: pa.DataType, value: Any) -> None:
    """By the name of the field, without the value; the next call works."""
    codec = codec_of(pa.int64(), data_type)
    with pytest.raises(
        InvalidStateValue, match=r"here: update\(\) got a \w+ for field 'c1', which is declared as"
    ) as caught:
        codec.row_of((1, value), "update")
    assert "s3cr3t" not in str(caught.value)
    assert codec.row_of((1, None), "update") == (1, None)


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        (pa.int32(), 1 << 40),
        (pa.list_(pa.int16()), [1 << 20]),
        (pa.string(), "\ud800s3cr3t"),
    ],
    ids=repr,
)
def test_what_only_a_column_shows_is_refused_when_it_is_made(zone: str, data_type: pa.DataType, value: Any) -> None:
    """Ranges of numbers: looked at a column at a time."""
    codec = codec_of(data_type)
    with pytest.raises(InvalidData, match="here: column 'c0' is declared as") as caught:
        codec.columns([codec.row_of((value,), "update")])
    assert "s3cr3t" not in str(caught.value)


def test_a_list_that_is_changed_after_it_was_written_changes_nothing() -> None:
    """Spark stores a copy too."""
    codec = codec_of(pa.list_(pa.int64()), pa.map_(pa.string(), pa.int64()))
    numbers, names = [1], {"k": 1}
    row = codec.row_of((numbers, names), "update")
    numbers.append(2)
    names["x"] = 2
    assert row == ([1], {"k": 1})


def test_named_tuples_rows_and_lists_are_rows() -> None:
    """By position, as in Spark."""
    codec = codec_of(pa.int64(), pa.string())
    for given_row in ((1, "x"), [1, "x"], Row(1, "x"), Row(z=1, a="x"), pd.Series([1, "x"]), (v for v in (1, "x"))):
        row = codec.row_of(given_row, "update")
        assert (type(row), row) == (tuple, (1, "x"))


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(-5, 5)), st.one_of(st.none(), st.text(max_size=2))), max_size=9)
)
@examples(60)
def test_rows_of_plain_types_are_taken_as_they_are(rows: list[tuple[Any, ...]]) -> None:
    """Whether by the set of known types or by a look at the row, which adds to it."""
    codec = codec_of(pa.int64(), pa.string())
    for row in rows:
        assert codec.row_of(row, "update") == row
        assert tuple(map(type, row)) in codec.plain
    assert (bool, str) not in codec.plain
    assert later(codec, *rows) == rows


@pytest.mark.parametrize("width", range(1, 7))
def test_the_quick_look_at_a_row_takes_what_the_known_types_have_and_nothing_else(width: int) -> None:
    """It is written out for few fields; a bool is no int, a Row no tuple, and nulls are known once they were seen."""
    codec = codec_of(*[pa.int64()] * width)
    good = tuple(range(width))
    rows: list[Any] = [good, (*good, 1), good[1:], list(good), Row(*good), None, "x" * width, 7]
    rows += [(*good[:n], odd, *good[n + 1 :]) for n in range(width) for odd in (True, None, 1.0, "1", np.int64(1))]
    for _ in range(2):
        for row in rows:
            assert codec.is_plain(row) == (type(row) is tuple and tuple(map(type, row)) in codec.plain)
        for row in rows[-5 * width + 1 :: 5]:  # those with a null
            codec.row_of(row, "update")
    assert codec.is_plain((*good[:-1], None))


_BEYOND = pa.array([0, 2**62], pa.int64()).cast(pa.timestamp("us", "UTC"))


@pytest.mark.parametrize(
    "column",
    [
        _BEYOND,
        pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()),
        pa.StructArray.from_arrays([_BEYOND], ["t"]),
        pa.ListArray.from_arrays([0, 1, 2], _BEYOND),
        pa.StringArray.from_buffers(2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_stored_value_that_python_cannot_represent_is_no_fault_of_user_code(column: pa.Array) -> None:
    """State that was imported holds what Spark takes. `state.get()` says which field it is, and where to correct it; a row
    beside it can be read one at a time."""
    codec = ValueCodec(pa.schema([("n", pa.int64()), ("opened", column.type)]), "operator 'o', state 's'")
    columns = [pa.array([1, 2]), column]
    expected = rf"operator 'o', state 's': a stored value of 'opened' \({re.escape(str(column.type))}\).*imported from"
    for read in (lambda: codec.rows(columns), lambda: codec.row_at(columns)(1)):
        with pytest.raises(InvalidStateValue, match=expected) as told:
            read()
        assert type(plain(told.value)) is InvalidData
        assert "4611686018427387904" not in str(told.value)
    assert codec.row_at(columns)(0)[0] == 1
