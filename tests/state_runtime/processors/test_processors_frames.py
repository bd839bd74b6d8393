"""Data frames of the pandas flavour: cut, handed out and gathered, as if each were made on its own."""

from __future__ import annotations

import datetime as dt
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
from state_runtime.processors.columns import from_python, to_python
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.user.frames import frames_to_batches, nullable_integers, split_frame, table_to_frame
from state_runtime.processors.user.handler_input import RowInput

ROWS = pa.RecordBatch.from_arrays(
    [
        pa.array([1, 2, 3, 4, 5], pa.int32()),
        pa.array([1, None, 3, 4, 5], pa.int64()),
        pa.array([0.5, 1.5, None, 3.5, 4.5], pa.float32()),
        pa.array(["a", None, "c", "d", "e"]),
        pa.array([True, False, True, None, True]),
        pa.array([dt.date(2013, 1, d) for d in range(1, 6)]),
        pa.array([dt.datetime(2013, 1, d, tzinfo=dt.UTC) for d in range(1, 6)], pa.timestamp("us", "UTC")),
        pa.array([Decimal(n) / 10 for n in range(5)], pa.decimal128(5, 1)),
    ],
    names=["i", "n", "f", "s", "b", "d", "t", "x"],
)


def test_a_shards_frame_has_sparks_dtypes() -> None:
    """int64; float64 for integers in a frame with a null among them; object for the rest."""
    (frame,) = split_frame(table_to_frame(ROWS), 0, 5, 10, nullable_integers(ROWS))
    assert [str(frame[c].dtype) for c in ("i", "n", "f", "s")] == ["int64", "float64", "float64", "object"]
    assert frame["d"].iloc[0] == dt.date(2013, 1, 1)
    assert np.isnan(frame["n"].iloc[1])
    assert frame["s"].iloc[1] is None


@given(st.lists(st.none() | st.integers(-9, 9), min_size=1, max_size=12), st.integers(1, 5))
@examples(60)
def test_a_null_makes_floats_of_integers_in_its_own_frame_only(numbers: list[int | None], rows_max: int) -> None:
    """Spark decides frame by frame; a neighbour's null must not change a key's dtype."""
    rows = pa.RecordBatch.from_arrays([pa.array(numbers, pa.int32()), pa.array(range(len(numbers)))], names=["n", "i"])
    pieces = split_frame(table_to_frame(rows), 0, len(numbers), rows_max, nullable_integers(rows))
    for low, piece in zip(range(0, len(numbers), rows_max), pieces, strict=True):
        given_here = numbers[low : low + rows_max]
        kind = "float64" if None in given_here else "int64"
        pd.testing.assert_series_equal(piece["n"], pd.Series(given_here, dtype=kind, name="n"))
        assert piece["i"].tolist() == list(range(low, low + len(given_here)))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
@examples(60)
def test_pieces_are_iloc_with_a_fresh_index(a: int, b: int, rows_max: int) -> None:
    """However a piece is cut, user code must not be able to tell."""
    start, stop = min(a, b), max(a, b)
    frame = table_to_frame(ROWS)
    pieces = list(split_frame(frame, start, stop, rows_max))
    assert [len(p) for p in pieces] == [min(rows_max, stop - low) for low in range(start, stop, rows_max)]
    low = start
    for piece in pieces:
        expected = frame.iloc[low : low + len(piece)].reset_index(drop=True)
        pd.testing.assert_frame_equal(piece, expected)
        assert isinstance(piece.index, pd.RangeIndex)
        assert piece.sum(numeric_only=True).equals(expected.sum(numeric_only=True))
        low += len(piece)


def mutate(piece: pd.DataFrame) -> None:
    """What user code does to a frame that it was given."""
    for name in piece.columns:
        if piece[name].dtype.kind in "fi":
            piece[name] += 1
            piece.loc[0, name] = 99
            piece[name].to_numpy()[:] = 77
    piece["new"] = 1
    piece.drop(columns=["new"], inplace=True)
    piece.sort_values(piece.columns[0], ascending=False, inplace=True)


@pytest.mark.parametrize("columns", [["i", "n", "f", "s"], ["f"], ["i"], ["f", "s"], ["s"]], ids="-".join)
def test_a_piece_may_be_changed_and_no_other_key_notices(columns: list[str]) -> None:
    """Spark hands out frames that may be written to; here they are cut from one."""
    frame = table_to_frame(ROWS.select(columns))
    expected = [frame.iloc[n : n + 1].reset_index(drop=True).copy() for n in range(5)]
    for number in range(5):
        piece = next(iter(split_frame(frame, number, number + 1, 10)))
        pd.testing.assert_frame_equal(piece, expected[number])
        mutate(piece)


OUT = pa.schema([("k", pa.string()), ("n", pa.int64()), ("f", pa.float64())])


def gathered(frames: list[Any], schema: pa.Schema = OUT) -> list[dict[str, Any]]:
    return [row for batch in frames_to_batches(frames, schema, "the output") for row in batch.to_pylist()]


def test_frames_of_one_layout_come_out_in_order() -> None:
    """One conversion for all of them, and nothing is mixed up."""
    frames = [pd.DataFrame({"k": [f"a{n}", f"b{n}"], "n": [n, n + 1], "f": [n / 2, n / 4]}) for n in range(50)]
    assert gathered(frames) == [row for f in frames for row in f.to_dict("records")]


def test_frames_of_mixed_layouts_lose_no_row() -> None:
    """Another order of columns, extra columns, other dtypes, an int where floats were declared, no rows at all."""
    frames = [
        pd.DataFrame({"k": ["a"], "n": [1], "f": [0.5]}),
        pd.DataFrame({"f": [1.5], "n": [2], "k": ["b"]}),
        pd.DataFrame({"k": ["c"], "n": [3], "f": [2]}),
        pd.DataFrame({"k": ["d"], "n": np.array([4], dtype=np.int32), "f": np.array([0.5], dtype=np.float32)}),
        pd.DataFrame({"k": pd.array(["e"], dtype="string"), "n": pd.array([None], dtype="Int64"), "f": [3.5]}),
        pd.DataFrame({"k": ["f"], "n": [6], "f": [4.5], "more": ["ignored"]}),
        pd.DataFrame({"k": [], "n": [], "f": []}),
        pd.DataFrame({"k": [None], "n": [7], "f": [None]}),
        pd.DataFrame({"k": ["h"], "n": [8], "f": [5.5]}, index=[77]),
    ]
    found = sorted(gathered(frames), key=lambda row: (row["k"] is None, row["k"]))
    assert [(row["k"], row["n"]) for row in found] == [
        ("a", 1),
        ("b", 2),
        ("c", 3),
        ("d", 4),
        ("e", None),
        ("f", 6),
        ("h", 8),
        (None, 7),
    ]


def test_columns_without_names_are_taken_by_position() -> None:
    """pd.DataFrame([row]) has the labels 0, 1, 2; blocks of equal dtype lie together, positions are what counts."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.float64()), ("c", pa.int64()), ("d", pa.float64())])
    assert gathered([pd.DataFrame([[1, 2.0, 3, 4.0]])], schema) == [{"a": 1, "b": 2.0, "c": 3, "d": 4.0}]
    mixed = pa.schema([("a", pa.string()), ("b", pa.int64()), ("c", pa.string())])
    assert gathered([pd.DataFrame([["x", 1, "y"]])], mixed) == [{"a": "x", "b": 1, "c": "y"}]


def test_columns_of_times_come_out_whole() -> None:
    """pandas keeps columns of one time type in one block."""
    schema = pa.schema([("a", pa.timestamp("us")), ("b", pa.timestamp("us")), ("n", pa.int64())])
    times = [f"2013-01-0{d}" for d in range(1, 5)]
    frames = [
        pd.DataFrame({"a": pd.to_datetime(times[:2]), "b": pd.to_datetime(times[2:]), "n": [1, 2]}),
        pd.DataFrame({"a": pd.to_datetime(times[2:]), "b": pd.to_datetime(times[:2]), "n": [3, 4]}),
    ]
    assert [(r["a"].day, r["b"].day, r["n"]) for r in gathered(frames, schema)] == [
        (1, 3, 1),
        (2, 4, 2),
        (3, 1, 3),
        (4, 2, 4),
    ]


def test_columns_of_times_with_a_zone_and_categories_come_out_whole() -> None:
    """Extension types have blocks of their own."""
    schema = pa.schema([("a", pa.timestamp("us", "UTC")), ("b", pa.timestamp("us", "UTC")), ("c", pa.string())])
    at = pd.to_datetime(["2013-01-01", "2013-01-02"], utc=True)
    frame = pd.DataFrame({"a": at, "b": at[::-1], "c": pd.Categorical(["x", "y"])})
    found = gathered([frame, frame], schema)
    assert [(r["a"].day, r["b"].day, r["c"]) for r in found] == [(1, 2, "x"), (2, 1, "y")] * 2


def test_a_missing_column_is_invalid_data_that_names_it() -> None:
    """And says which columns there are."""
    with pytest.raises(InvalidData, match=r"column 'f' is declared but the frame has \['k', 'n'\]"):
        gathered([pd.DataFrame({"k": ["a"], "n": [1]})])


@pytest.mark.parametrize(
    ("column", "values"),
    [("n", ["x"]), ("n", [1.5]), ("k", [1]), ("f", ["x"]), ("n", [dt.date(2013, 1, 1)]), ("n", [1 << 70]), ("k", [b"\xff"])],
)  # fmt: skip
def test_values_of_another_type_are_invalid_data_without_the_value(column: str, values: list[Any]) -> None:
    """Spark would store null or cut a number short; we refuse, and the message holds no row."""
    frame = {"k": ["a"], "n": [1], "f": [0.5], column: values}
    with pytest.raises(InvalidData, match=f"column '{column}' is declared as"):
        gathered([pd.DataFrame(frame)])


@pytest.mark.parametrize("wrong", [None, 7, {"k": "a"}, [1, 2], "frame"])
def test_what_is_no_frame_is_invalid_data(wrong: Any) -> None:
    """The message says what to yield."""
    with pytest.raises(InvalidData, match="yield pandas data frames"):
        gathered([wrong])


POINTS = pa.struct([("x", pa.int64()), ("inner", pa.struct([("y", pa.string())]))])


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        (POINTS, {"x": 1, "z": 2}),
        (POINTS, Row(x=1, z=2)),
        (POINTS, {"x": 1, "inner": {"y": "a", "z": 2}}),
        (POINTS, {"x": 1, "inner": Row(y="a", z=2)}),
        (pa.list_(POINTS), [{"x": 1}, {"z": 2}]),
        (pa.map_(pa.string(), POINTS), {"k": {"z": 2}}),
    ],
    ids=str,
)
def test_a_field_that_a_struct_lacks_is_refused_with_its_name(data_type: pa.DataType, value: Any) -> None:
    """Arrow drops it, and what was meant by it is null; at any depth, of rows and of frames."""
    with pytest.raises(InvalidData, match=r"column 'c'.*the struct has no field 'z'"):
        from_python([None, value], pa.field("c", data_type), lambda: "here")
    if "Row" not in repr(value):  # in a frame, a Row is taken by place
        with pytest.raises(InvalidData, match=r"column 'c'.*the struct has no field 'z'"):
            gathered([pd.DataFrame({"c": [None, value]})], pa.schema([("c", data_type)]))


# --- columns -----------------------------------------------------------------------------------------------------

TYPED: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text(max_size=4)),
    (pa.bool_(), st.booleans()),
    (pa.binary(), st.binary(max_size=4)),
    (pa.date32(), st.dates()),
    (pa.decimal128(10, 2), st.decimals(-1000, 1000, places=2)),
    (pa.list_(pa.int64()), st.lists(st.none() | st.integers(0, 9), max_size=3)),
    (pa.struct([("a", pa.int64()), ("b", pa.string())]), st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.text(max_size=2)})),
]  # fmt: skip


@given(st.data())
@examples(150)
def test_python_values_survive_a_column(data: st.DataObject) -> None:
    """Nulls included, of every type that a state or an output can have."""
    data_type, strategy = data.draw(st.sampled_from(TYPED))
    values = data.draw(st.lists(st.none() | strategy, max_size=8))
    column = from_python(values, pa.field("c", data_type), lambda: "here")
    assert column.type == data_type
    assert to_python(column) == values == column.to_pylist()
    assert to_python(column.slice(1)) == values[1:]


_ZONES = [None, "UTC", "Europe/Berlin", "America/St_Johns", "+05:30", "Etc/GMT+3"]
_MICROS = st.integers(-60_000_000_000_000_000, 250_000_000_000_000_000)


@pytest.mark.parametrize("zone", _ZONES)
@given(st.lists(st.none() | _MICROS | st.sampled_from([1_729_990_800_000_000, 1_729_994_400_000_000]), max_size=5))
@examples(60)
def test_times_are_the_ones_that_arrow_gives(zone: str | None, micros: list[int | None]) -> None:
    """The same moments in the same zone: also in the hour that comes twice, where only `fold` tells them apart."""
    column = pa.array(micros, pa.timestamp("us", zone))
    made, expected = to_python(column), column.to_pylist()
    assert made == expected
    assert [repr(v) for v in made] == [repr(v) for v in expected]
    assert [v and (v.tzinfo, v.fold) for v in made] == [v and (v.tzinfo, v.fold) for v in expected]


@pytest.mark.parametrize("data_type", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date32()], ids=str)
def test_a_time_beyond_pythons_years_is_refused_as_arrow_refuses_it(data_type: pa.DataType) -> None:
    """Made by numpy it would come to user code as a number."""
    whole = pa.int32() if pa.types.is_date32(data_type) else pa.int64()
    column = pa.array([0, 2**31 - 1 if whole == pa.int32() else 2**62], whole).cast(data_type)
    with pytest.raises((ValueError, OverflowError)):
        column.to_pylist()
    with pytest.raises((ValueError, OverflowError)):
        to_python(column)


MOMENT = pa.timestamp("us", "Asia/Tokyo")
LAST_OF_UTC = pa.array([0, 253_402_300_799_999_999], pa.int64()).cast(MOMENT)
"""Its year is 9999 in UTC and 10000 in Tokyo."""


@pytest.mark.parametrize(
    "column",
    [
        LAST_OF_UTC,
        pa.array([0, 2**62], pa.int64()).cast(pa.timestamp("us")),
        pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()),
        pa.StructArray.from_arrays([LAST_OF_UTC], ["t"]),
        pa.ListArray.from_arrays([0, 1, 2], LAST_OF_UTC),
    ],
    ids=lambda column: str(column.type),
)
def test_a_time_that_python_cannot_represent_names_its_column_and_is_no_fault_of_user_code(column: pa.Array) -> None:
    """The conversion for user code overflows before that code is called: as a value and as a key."""
    rows = pa.record_batch([column], names=["opened"])
    starts = np.array([0, 1])
    shard = GroupedRows(rows, starts, starts + 1, np.array([1, 2], np.uint64), [column], starts)
    flavour = RowInput("o", ["opened"], rows.schema, 10, 10)
    for convert in (flavour.inputs, flavour.keys):
        with pytest.raises(InvalidData, match=r"operator 'o': column 'opened' .* years are 1 to 9999"):
            list(convert(shard))


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns"])
def test_a_local_time_that_does_not_exist_says_so(zone: str) -> None:
    """The hour that the clocks skip in spring: with the zone and a way out, and without the value."""
    skipped = {"Europe/Berlin": "2013-03-31 02:30", "America/St_Johns": "2013-03-10 02:30"}[zone]
    frame = pd.DataFrame({"at": pd.to_datetime(["2013-01-01 00:00", skipped])})
    schema = pa.schema([("at", pa.timestamp("us", "UTC"))])
    with pytest.raises(InvalidData, match=rf"column 'at'.*does not exist .* time zone {zone}.*shift_forward") as told:
        list(frames_to_batches([frame], schema, "here", zone))
    assert "02:30" not in str(told.value)
    moved = frame.assign(at=frame["at"].dt.tz_localize(zone, nonexistent="shift_forward"))
    assert len(list(frames_to_batches([moved], schema, "here", zone))) == 1


def test_nan_and_null_are_not_the_same() -> None:
    """pandas mixes them up; a state must not."""
    column = from_python([float("nan"), None, 1.0], pa.field("c", pa.float64()), lambda: "here")
    assert column.null_count == 1
    values = to_python(column)
    assert values[0] != values[0]
    assert values[1:] == [None, 1.0]


def test_a_value_of_another_kind_is_converted_where_nothing_is_lost() -> None:
    """As in states (docs/parity.md)."""
    midnight = dt.datetime(2024, 1, 2)  # noqa: DTZ001
    for data_type, value, stored in (
        (pa.string(), 7, "7"),
        (pa.int64(), 5.0, 5),
        (pa.int64(), Decimal("7.00"), 7),
        (pa.float64(), 5, 5.0),
        (pa.binary(), "a", b"a"),
        (pa.date32(), midnight, midnight.date()),
        (pa.decimal128(5, 2), 7, Decimal("7.00")),
        (pa.float32(), float("inf"), float("inf")),
    ):
        column = from_python([None, value], pa.field("c", data_type), lambda: "here")
        assert column.to_pylist() == [None, stored]


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        (pa.int32(), "s3cr3t"),
        (pa.int32(), 1 << 40),
        (pa.int64(), 1.5),
        (pa.int64(), float("nan")),
        (pa.int64(), Decimal("1.5")),
        (pa.int64(), True),
        (pa.float64(), True),
        (pa.float64(), (1 << 60) + 1),
        (pa.float32(), 1e300),
        (pa.string(), 7.5),
        (pa.string(), True),
        (pa.string(), b"s3cr3t"),
        (pa.bool_(), "s3cr3t"),
        (pa.date32(), 5),
        (pa.date32(), 7.5),
        (pa.date32(), Decimal("5.25")),
        (pa.timestamp("us"), 5),
        (pa.timestamp("us", "UTC"), 5.5),
        (pa.duration("us"), Decimal(5)),
        (pa.list_(pa.int64()), [7.5]),
        (pa.list_(pa.float32()), [1e300]),
        (pa.list_(pa.list_(pa.date32())), [[5]]),
        (pa.map_(pa.string(), pa.float64()), {"s3cr3t": True}),
        (pa.map_(pa.timestamp("us"), pa.string()), [(5, "s3cr3t")]),
        (pa.struct([("a", pa.string()), ("b", pa.int64())]), ("s3cr3t", 7.5)),
        (pa.struct([("a", pa.string())]), {"a": b"s3cr3t"}),
        (pa.date32(), dt.datetime(2024, 1, 2, 3)),  # noqa: DTZ001
        (pa.duration("us"), 5),
        (pa.date32(), "s3cr3t"),
        (pa.decimal128(5, 2), Decimal("1.2345")),
        (pa.list_(pa.int64()), ["s3cr3t"]),
        (pa.struct([("a", pa.int64())]), {"a": "s3cr3t"}),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_named_by_place_and_type_only(data_type: pa.DataType, value: Any) -> None:
    """Never by itself: rows do not belong into logs."""
    with pytest.raises(InvalidData, match=f"here: column 'c' is declared as .* value 3 of 3 is a {type(value).__name__}") as caught:  # fmt: skip
        from_python([None, None, value], pa.field("c", data_type), lambda: "here")
    assert "s3cr3t" not in str(caught.value)
