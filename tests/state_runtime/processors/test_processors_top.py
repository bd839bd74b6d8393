"""`top_n` and `bottom_n` against a sort in plain Python: any types, nulls, ties, and parts that meet in any order."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples
from sliced import now_whole_now_sliced

from state_runtime import aggregates
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.compile import _COUNTS_EACH_ROW
from state_runtime.processors.builtin.aggregate import STATE, AggregateOperator, AggregatePlan, plan_aggregates
from state_runtime.processors.builtin.partials import Groups
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import fold
from state_runtime.state.version import OpenVersion

KEYS = pa.schema([("k", pa.int64())])
N = 3
BOTH = {"top": aggregates.top_n("v", N, by="by"), "bottom": aggregates.bottom_n("v", N, by="by")}
Row = tuple[int, Any, Any]
"""Key, value, and what it is chosen by."""


def order(value: Any) -> Any:
    """Spark's order: NaN above every number, texts by their bytes, and zeros are equal."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return (0, value.encode() if isinstance(value, str) else value)


def chosen(rows: list[tuple[Any, Any]], *, greatest: bool) -> list[Any]:
    """Of values and what they are chosen by, in source order. Sorts are stable: the later of equals is in front."""
    counted = [row for row in rows if row[1] is not None]
    if not greatest:
        counted.reverse()
    counted.sort(key=lambda row: order(row[1]))
    if greatest:
        counted.reverse()
    return [value for value, _ in counted[:N]]


def batch(rows: list[Row], value_type: pa.DataType, by_type: pa.DataType) -> pa.RecordBatch:
    types = (pa.int64(), value_type, by_type)
    return pa.RecordBatch.from_arrays(
        [pa.array([row[i] for row in rows], t) for i, t in enumerate(types)], names=["k", "v", "by"]
    )


def planned(value_type: pa.DataType, by_type: pa.DataType, wanted: dict[str, Aggregate] | None = None) -> AggregatePlan:
    return plan_aggregates(wanted or BOTH, pa.schema([("k", pa.int64()), ("v", value_type), ("by", by_type)]), "op")


NAIVE = st.datetimes(dt.datetime.fromisoformat("1960-01-01"), dt.datetime.fromisoformat("2030-01-01"))
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1])),
    (pa.float64(), st.sampled_from([0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.sampled_from(["", "a", "B", "ab", "ä", "\U0001f600", "\uffff"])),
    (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2030, 1, 1))),
    (pa.timestamp("us"), NAIVE),
    (pa.decimal128(38, 2), st.decimals(-999, 999, places=2)),
]


@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: f"{n}-{TYPES[n][0]}")
@given(data=st.data())
@examples(40)
def test_the_first_rows_of_a_sort_over_many_epochs(number: int, data: st.DataObject) -> None:
    """Against a sort of all rows so far: null values may win, rows without the other column never do, the later of
    equals comes first."""
    by_type, drawn = TYPES[number]
    row = st.tuples(st.integers(0, 2), st.none() | st.integers(0, 9), st.none() | drawn)
    epochs: list[list[Row]] = data.draw(st.lists(st.lists(row, min_size=1, max_size=14), min_size=1, max_size=4))
    operator = AggregateOperator("op", ("k",), "k long", KEYS, planned(pa.int64(), by_type), "")
    schema = operator.state_schemas[STATE]
    table = schema.empty()
    seen: dict[int, list[tuple[Any, Any]]] = {}
    for epoch, rows in enumerate(epochs, 1):
        for key, value, by in rows:
            seen.setdefault(key, []).append((value, by))
        hashes = np.array([k * 7919 for k, _, _ in rows], dtype=np.uint64)
        grouped = group_rows(batch(rows, pa.int64(), by_type), hashes, np.arange(len(rows)), ["k"], KEYS)
        version = OpenVersion.of_batches("v", {STATE: table}, {STATE: schema})
        result = operator.process(now_whole_now_sliced(grouped), version, EpochClock(0, epoch=epoch), 0)
        emitted = {r["k"]: (r["top"], r["bottom"]) for output in result.outputs for r in output.to_pylist()}
        table = fold([result.changes[STATE], table], schema, drop_deleted=True)
        assert emitted == {
            key: (chosen(seen[key], greatest=True), chosen(seen[key], greatest=False)) for key, _, _ in rows
        }


@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 9), st.none() | st.sampled_from(["", "a", "b"])), min_size=1, max_size=12
    ),
    st.randoms(use_true_random=False),
)
@examples(150)
def test_it_does_not_matter_in_which_order_parts_meet(rows: list[tuple[Any, Any]], random: Any) -> None:
    """Panes and parts of sessions are merged as they are found: each row a part, in any order and any grouping."""
    plan = planned(pa.int64(), pa.string())
    each = Groups(np.arange(len(rows)), len(rows))
    slots = plan.reduce(batch([(0, v, by) for v, by in rows], pa.int64(), pa.string()), each, np.arange(len(rows)))
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    slots = [slot.take(pa.array(shuffled)) for slot in slots]
    cut = random.randrange(len(rows) + 1)
    parts = [
        plan.merge_groups([s.slice(start, stop - start) for s in slots], Groups(np.array([0]), stop - start))
        for start, stop in ((0, cut), (cut, len(rows)))
        if stop > start
    ]
    merged = parts[0] if len(parts) == 1 else plan.merge(*parts)
    expected = [chosen(rows, greatest=greatest) for greatest in (True, False)]
    assert [column.to_pylist()[0] for column in plan.finish(merged)] == expected


@pytest.mark.parametrize(
    ("data_type", "values"),
    [
        (pa.list_(pa.int64()), [[1, None], None, []]),
        (pa.struct([("x", pa.string())]), [{"x": "a"}, None, {"x": None}]),
        (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None, []]),
        (pa.decimal128(10, 2), [Decimal("1.25"), None, Decimal("-3.00")]),
    ],
    ids=str,
)
def test_the_value_is_of_any_type(data_type: pa.DataType, values: list[Any]) -> None:
    """Within an epoch and against the state, which has none for a key at first."""
    plan = planned(data_type, pa.int64(), {"x": aggregates.top_n("v", 2, by="by")})
    one = Groups(np.array([0]), 1)
    parts = [
        plan.reduce(batch([(0, value, by)], data_type, pa.int64()), one, np.array([place]))
        for place, (value, by) in enumerate(zip(values, (2, 1, 2), strict=True))
    ]
    nothing = [pa.nulls(1, slot.type) for slot in parts[0]]
    both = plan.merge(plan.merge(plan.merge(nothing, parts[0]), parts[1]), parts[2])
    assert plan.finish(both)[0].to_pylist() == [[values[2], values[0]]], "the later of equals first"


def test_without_another_column_it_chooses_by_its_own() -> None:
    assert aggregates.top_n("price", 3) == aggregates.top_n("price", 3, by="price")


def test_another_number_is_another_aggregate() -> None:
    """What was not kept cannot be told: a job that goes on with a larger n would miss rows without a word."""
    texts = {aggregates.top_n("price", n).text for n in (2, 3)} | {aggregates.bottom_n("price", 3).text}
    assert len(texts) == 3


def test_rows_that_come_again_count_again() -> None:
    """So it is refused behind an operator in update mode, which emits a key again and again."""
    assert {"top_n", "bottom_n"} <= _COUNTS_EACH_ROW


@pytest.mark.parametrize(
    ("wanted", "by_type", "message"),
    [
        (
            lambda: aggregates.top_n("other", 2, by="by"),
            pa.int64(),
            "there is no column 'other'; the input has k, v, by",
        ),
        (lambda: aggregates.bottom_n("v", 2, by="other"), pa.int64(), "there is no column 'other'"),
        (lambda: aggregates.top_n("v", 2, by="by"), pa.list_(pa.int64()), "top_n cannot order by values of type list"),
        (lambda: aggregates.bottom_n("v", 2, by="by"), pa.null(), "bottom_n cannot order by values of type null"),
    ],
)
def test_what_has_no_order_is_refused_when_the_job_is_built(wanted: Any, by_type: pa.DataType, message: str) -> None:
    with pytest.raises(InvalidPipeline, match=f"operator 'op', aggregate 'a': .*{message}"):
        planned(pa.int64(), by_type, {"a": wanted()})


@pytest.mark.parametrize("n", [0, -1, 10_001])
def test_a_number_out_of_bounds_is_refused(n: int) -> None:
    with pytest.raises(InvalidPipeline, match=r"n is 1 to 10,000"):
        aggregates.top_n("v", n)


def test_rows_aggregated_before_the_shuffle_are_not_asked_for() -> None:
    """Which of equals comes first depends on the place of a row, which an aggregated one no longer has."""
    assert not planned(pa.int64(), pa.int64()).gathers
