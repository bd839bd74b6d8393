"""The built-in aggregates against a loop in plain Python: nulls, NaN, overflow, and every type that they take."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime import aggregates
from state_runtime.aggregates import Aggregate
from state_runtime.errors import InvalidData, InvalidPipeline
from state_runtime.processors.aggregate import STATE, AggregateOperator, plan_aggregates
from state_runtime.processors.grouping import group_rows
from state_runtime.state.local import OpenVersion
from state_runtime.state.table import StateSchema, fold

KEYS = pa.schema([("k", pa.int64())])
Rows = list[tuple[int, Any]]


class Aggregating:
    """One column, aggregated over epochs with the state carried along."""

    def __init__(self, data_type: pa.DataType, wanted: dict[str, Aggregate]) -> None:
        self.data_type = data_type
        plan = plan_aggregates(wanted, pa.schema([("k", pa.int64()), ("v", data_type)]), "op")
        self.operator = AggregateOperator("op", ("k",), "k long", KEYS, plan, "")
        self.schema: StateSchema = self.operator.state_schemas[STATE]
        self.table = self.schema.empty()
        self.live = 0

    def epoch(self, rows: Rows) -> dict[int, tuple[Any, ...]]:
        """What is emitted, by key."""
        data = pa.RecordBatch.from_arrays(
            [pa.array([k for k, _ in rows], pa.int64()), pa.array([v for _, v in rows], self.data_type)],
            names=["k", "v"],
        )
        hashes = np.array([k * 7919 for k, _ in rows], dtype=np.uint64)
        grouped = group_rows(data, hashes, np.arange(len(rows), dtype=np.int64), ["k"], KEYS)
        version = OpenVersion.of_batches("v", {STATE: self.table}, {STATE: self.schema})
        result = self.operator.process(grouped, version, None, 0)  # type: ignore[arg-type]
        emitted = [row for batch in result.outputs for row in batch.to_pylist()]
        if STATE in result.changes:
            self.table = fold([result.changes[STATE], self.table], self.schema, drop_deleted=True)
        self.live += result.rows_added
        assert self.live == self.table.num_rows
        assert len({row["k"] for row in emitted}) == len(emitted)
        return {row["k"]: tuple(v for name, v in row.items() if name != "k") for row in emitted}


def run_all(aggregating: Aggregating, epochs: list[Rows]) -> None:
    for rows in epochs:
        aggregating.epoch(rows)


def order(value: Any) -> Any:
    """Spark's order: NaN above every number."""
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)


def reference(function: str, values: list[Any]) -> Any:
    """Spark SQL's aggregate over all values so far."""
    present = [v for v in values if v is not None]
    if function == "rows":
        return len(values)
    if function == "count":
        return len(present)
    if not present:
        return None
    if function == "sum":
        return math.fsum(present) if isinstance(present[0], float) else sum(present)
    if function == "avg":
        return math.fsum(present) / len(present)
    return (min if function == "min" else max)(present, key=order)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        if math.isnan(expected) or math.isnan(found):
            return math.isnan(expected) and math.isnan(found)
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(expected) and bool(found == expected)


ALL: dict[str, Aggregate] = {
    "rows": aggregates.count(),
    "count": aggregates.count("v"),
    "sum": aggregates.sum("v"),
    "min": aggregates.min("v"),
    "max": aggregates.max("v"),
    "avg": aggregates.avg("v"),
}
NAIVE_1960, NAIVE_2030 = dt.datetime.fromisoformat("1960-01-01"), dt.datetime.fromisoformat("2030-01-01")
floats = st.sampled_from([0.0, -0.5, 1.5, 1e6, -1e6, float("nan")])
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any], list[str]]] = [
    (pa.int8(), st.integers(-128, 127), list(ALL)),
    (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1), list(ALL)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1), list(ALL)),
    (pa.int64(), st.integers(-(1 << 50), 1 << 50), list(ALL)),
    (pa.float64(), floats, list(ALL)),
    (pa.float64(), st.sampled_from([1.0, math.inf]), list(ALL)),
    (pa.float64(), st.sampled_from([1.0, -math.inf, math.nan]), ["rows", "count", "min", "max"]),
    (pa.float32(), floats, list(ALL)),
    (pa.string(), st.sampled_from(["", "a", "B", "b", "ab", "ä", "\U0001f600", "\uffff"]), ["rows", "count", "min", "max"]),
    (pa.binary(), st.binary(max_size=2), ["rows", "count", "min", "max"]),
    (pa.bool_(), st.booleans(), ["rows", "count", "min", "max"]),
    (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2030, 1, 1)), ["rows", "count", "min", "max"]),
    (pa.timestamp("us"), st.datetimes(NAIVE_1960, NAIVE_2030), ["rows", "count", "min", "max"]),
    (pa.decimal128(5, 2), st.decimals(-999, 999, places=2), ["rows", "count", "sum", "min", "max"]),
    (pa.decimal128(38, 2), st.decimals(-999, 999, places=2), ["rows", "count", "sum", "min", "max"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: f"{n}-{TYPES[n][0]}")
@given(data=st.data())
@examples(40)
def test_aggregates_over_many_epochs_are_those_over_all_rows(number: int, data: st.DataObject) -> None:
    """Reduced per epoch and combined with the state, it must be as if all rows had been there at once."""
    data_type, values, functions = TYPES[number]
    row = st.tuples(st.integers(0, 4), st.none() | values)
    all_epochs: list[Rows] = data.draw(st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=4))
    aggregating = Aggregating(data_type, {name: ALL[name] for name in functions})
    seen: dict[int, list[Any]] = {}
    for rows in all_epochs:
        for key, value in rows:
            seen.setdefault(key, []).append(value)
        emitted = aggregating.epoch(rows)
        assert set(emitted) == {key for key, _ in rows}, "update mode: the keys of the epoch, and no other"
        for key, found in emitted.items():
            for name, value in zip(functions, found, strict=True):
                expected = reference(name, seen[key])
                if name == "sum" and pa.types.is_floating(data_type) and expected is not None:
                    expected = float(expected)
                assert same(value, expected), f"{name} of {seen[key]}: {value!r}, expected {expected!r}"


def test_one_epoch_equals_pandas_and_arrow() -> None:
    """An independent implementation each, on more rows."""
    generator = np.random.default_rng(7)
    keys, values = generator.integers(0, 300, 5000), generator.integers(-1000, 1000, 5000)
    missing = generator.random(5000) < 0.1
    rows: Rows = [(int(k), None if m else int(v)) for k, v, m in zip(keys, values, missing, strict=True)]
    emitted = Aggregating(pa.int32(), ALL).epoch(rows)
    frame = pd.DataFrame({"k": keys, "v": pd.array(np.where(missing, None, values), dtype="Int64")})
    by_key = frame.groupby("k")["v"]
    table = pa.table({"k": keys, "v": pa.array([v for _, v in rows], pa.int64())})
    in_arrow = table.group_by("k").aggregate([("v", f) for f in ("count", "sum", "min", "max", "mean")])
    from_arrow = {row.pop("k"): row for row in in_arrow.to_pylist()}
    for key, (rows_of_key, count, total, least, most, mean) in emitted.items():
        group = by_key.get_group(key)
        assert (rows_of_key, count, total) == (len(group), group.count(), group.sum())
        arrow = from_arrow[key]
        assert (count, total, least, most) == tuple(arrow[f"v_{f}"] for f in ("count", "sum", "min", "max"))
        assert same(mean, arrow["v_mean"])
    assert set(emitted) == set(from_arrow)


@pytest.mark.parametrize(
    "epochs",
    [
        [[(1, (1 << 63) - 1), (1, 1)]],
        [[(1, -(1 << 63)), (1, -1)]],
        [[(1, (1 << 63) - 1)], [(1, 1)]],
        [[(1, -(1 << 63))], [(2, 5), (1, -1)]],
        [[(1, (1 << 63) - 1)] * 2],
        [[(1, (1 << 63) - 1)] * 3],
        [[(1, (1 << 62))] * 4],
        [[(0, 0), (1, (1 << 63) - 1), (1, 1), (2, 0)]],
    ],
    ids=str,
)
def test_a_sum_beyond_long_is_refused(epochs: list[Rows]) -> None:
    """Within an epoch or over several; numpy would wrap around without a word."""
    aggregating = Aggregating(pa.int64(), {"sum": aggregates.sum("v")})
    with pytest.raises(InvalidData, match="leaves the range of long"):
        run_all(aggregating, epochs)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=8))
@examples(150)
def test_a_sum_of_longs_is_exact_or_refused(values: list[int]) -> None:
    """Never something else."""
    aggregating = Aggregating(pa.int64(), {"sum": aggregates.sum("v")})
    try:
        found = aggregating.epoch([(1, v) for v in values])[1][0]
    except InvalidData:
        assert not -(1 << 63) <= sum(values) < 1 << 63
        return
    assert found == sum(values)


@pytest.mark.parametrize("values", [[(1 << 53) + 1], [1_700_000_000_000_000_000, 1], [-(1 << 63), 0]], ids=str)
def test_an_average_of_large_longs_is_a_double(values: list[int]) -> None:
    """Spark casts to double first; timestamps in microseconds or ids are beyond 2^53."""
    found = Aggregating(pa.int64(), {"avg": aggregates.avg("v")}).epoch([(1, v) for v in values])
    assert same(found[1][0], math.fsum(values) / len(values))


@pytest.mark.parametrize("epochs", [1, 2], ids=["one epoch", "two epochs"])
def test_a_decimal_sum_is_exact_or_refused(epochs: int) -> None:
    """Arrow's decimals wrap around at 38 digits as numpy's integers do; a wrong sign must not come out."""
    big = Decimal("9" * 38)
    aggregating = Aggregating(pa.decimal128(38, 0), {"sum": aggregates.sum("v")})
    with pytest.raises(InvalidData):
        run_all(aggregating, [[(1, big), (1, big)]] if epochs == 1 else [[(1, big)], [(1, big)]])


@pytest.mark.parametrize("precision", [1, 18, 27, 28, 29, 38])
def test_a_decimal_sum_of_any_precision_goes_on_over_epochs(precision: int) -> None:
    """The state of a sum has up to 38 digits, and adding two of those must work as long as the result fits."""
    aggregating = Aggregating(pa.decimal128(precision, 0), {"sum": aggregates.sum("v")})
    for count in range(1, 4):
        assert aggregating.epoch([(1, Decimal(3)), (2, None)]) == {1: (Decimal(3 * count),), 2: (None,)}


def test_an_epoch_without_rows_changes_nothing() -> None:
    """No output, no change."""
    aggregating = Aggregating(pa.int64(), ALL)
    aggregating.epoch([(1, 5)])
    before = aggregating.table
    assert aggregating.epoch([]) == {}
    assert aggregating.table.equals(before)


@pytest.mark.parametrize(
    ("aggregate", "data_type", "message"),
    [
        (aggregates.sum("other"), pa.int64(), "there is no column 'other'; the input has k, v"),
        (aggregates.sum("v"), pa.string(), "sum takes numbers, not string"),
        (aggregates.avg("v"), pa.string(), "avg takes integers and floats, not string"),
        (aggregates.avg("v"), pa.decimal128(5, 2), "cast it to double first"),
        (aggregates.min("v"), pa.list_(pa.int64()), "min cannot order values of type list"),
        (aggregates.max("v"), pa.null(), "max cannot order values of type null"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_when_the_job_is_built(
    aggregate: Aggregate, data_type: pa.DataType, message: str
) -> None:
    """With operator and aggregate in the message."""
    with pytest.raises(InvalidPipeline, match=f"operator 'op', aggregate 'a': .*{message}"):
        plan_aggregates({"a": aggregate}, pa.schema([("k", pa.int64()), ("v", data_type)]), "op")
