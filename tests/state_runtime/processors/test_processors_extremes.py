"""`max_by` and `min_by` against a loop in plain Python: any types, nulls, ties, and parts that meet in any order."""

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
from state_runtime.processors.builtin.aggregate import STATE, AggregateOperator, AggregatePlan, plan_aggregates
from state_runtime.processors.builtin.partials import Groups
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import fold
from state_runtime.state.version import OpenVersion

KEYS = pa.schema([("k", pa.int64())])
Row = tuple[int, Any, Any]
"""Key, value, and what it is chosen by."""


def order(value: Any) -> Any:
    """Spark's order: NaN above every number, texts by their bytes, and zeros are equal."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return (0, value.encode() if isinstance(value, str) else value)


def chosen(rows: list[tuple[Any, Any]], *, greatest: bool) -> Any:
    """Of values and what they are chosen by, in source order."""
    best: tuple[Any, Any] | None = None
    for value, by in rows:
        if by is None:
            continue
        if best is None or (order(by) >= order(best[1]) if greatest else order(by) <= order(best[1])):
            best = (value, by)
    return None if best is None else best[0]


def batch(rows: list[Row], value_type: pa.DataType, by_type: pa.DataType) -> pa.RecordBatch:
    types = (pa.int64(), value_type, by_type)
    return pa.RecordBatch.from_arrays(
        [pa.array([row[i] for row in rows], t) for i, t in enumerate(types)], names=["k", "v", "by"]
    )


BOTH = {"most": aggregates.max_by("v", "by"), "least": aggregates.min_by("v", "by")}


def planned(value_type: pa.DataType, by_type: pa.DataType, wanted: dict[str, Aggregate] | None = None) -> AggregatePlan:
    return plan_aggregates(wanted or BOTH, pa.schema([("k", pa.int64()), ("v", value_type), ("by", by_type)]), "op")


NAIVE = st.datetimes(dt.datetime.fromisoformat("1960-01-01"), dt.datetime.fromisoformat("2030-01-01"))
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1])),
    (pa.float64(), st.sampled_from([0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan])),
    (pa.float32(), st.sampled_from([0.0, -0.0, 1.5, math.nan])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.sampled_from(["", "a", "B", "ab", "ä", "\U0001f600", "\uffff"])),
    (pa.binary(), st.binary(max_size=2)),
    (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2030, 1, 1))),
    (pa.timestamp("us"), NAIVE),
    (pa.decimal128(38, 2), st.decimals(-999, 999, places=2)),
]


@pytest.mark.parametrize("number", range(len(TYPES)), ids=lambda n: f"{n}-{TYPES[n][0]}")
@given(data=st.data())
@examples(40)
def test_the_value_of_the_greatest_and_smallest_row_over_many_epochs(number: int, data: st.DataObject) -> None:
    """Against a loop over all rows: null values may win, rows without the other column never do, the later of equals
    does."""
    by_type, drawn = TYPES[number]
    row = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 9), st.none() | drawn)
    epochs: list[list[Row]] = data.draw(st.lists(st.lists(row, min_size=1, max_size=10), min_size=1, max_size=4))
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
        emitted = {r["k"]: (r["most"], r["least"]) for output in result.outputs for r in output.to_pylist()}
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
        (pa.null(), [None, None, None]),
    ],
    ids=str,
)
def test_the_value_is_of_any_type(data_type: pa.DataType, values: list[Any]) -> None:
    """Within an epoch and against the state; void (a NULL in SQL) is refused as everywhere."""
    wanted = {"x": aggregates.max_by("v", "by")}
    if pa.types.is_null(data_type):
        with pytest.raises(InvalidPipeline, match="nothing but null"):
            planned(data_type, pa.int64(), wanted)
        return
    plan = planned(data_type, pa.int64(), wanted)
    one = Groups(np.array([0]), 1)
    parts = [
        plan.reduce(batch([(0, value, by)], data_type, pa.int64()), one, np.array([place]))
        for place, (value, by) in enumerate(zip(values, (2, 1, 2), strict=True))
    ]
    both = plan.merge(plan.merge(parts[0], parts[1]), parts[2])
    assert plan.finish(both)[0].to_pylist() == [values[2]], "the later of the two with the greatest"


@pytest.mark.parametrize(
    ("wanted", "by_type", "message"),
    [
        (aggregates.max_by("other", "by"), pa.int64(), "there is no column 'other'; the input has k, v, by"),
        (aggregates.min_by("v", "other"), pa.int64(), "there is no column 'other'"),
        (aggregates.max_by("v", "by"), pa.list_(pa.int64()), "max_by cannot order by values of type list"),
        (aggregates.min_by("v", "by"), pa.null(), "min_by cannot order by values of type null"),
    ],
)
def test_what_has_no_order_is_refused_when_the_job_is_built(
    wanted: Aggregate, by_type: pa.DataType, message: str
) -> None:
    with pytest.raises(InvalidPipeline, match=f"operator 'op', aggregate 'a': .*{message}"):
        planned(pa.int64(), by_type, {"a": wanted})


def test_rows_aggregated_before_the_shuffle_are_not_asked_for() -> None:
    """What wins depends on the place of a row, which an aggregated one no longer has."""
    assert not planned(pa.int64(), pa.int64()).gathers
