"""`top_n` and `bottom_n` against a sort in plain Python: any types, nulls, ties, and parts that meet in any order."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from by_another import (
    FEW_ROWS,
    TYPE_IDS,
    TYPES,
    batch,
    check_any_order,
    check_epochs,
    epochs_of,
    order,
    planned,
)
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime import aggregates
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.compile import _COUNTS_EACH_ROW
from state_runtime.processors.builtin.partials import Groups

N = 3
A_MAP = pa.map_(pa.string(), pa.int64())
BOTH = {"top": aggregates.top_n("v", N, by="by"), "bottom": aggregates.bottom_n("v", N, by="by")}


def chosen(rows: list[tuple[Any, Any]], *, greatest: bool) -> list[Any]:
    """Of values and what they are chosen by, in source order. Sorts are stable: the later of equals is in front."""
    counted = [row for row in rows if row[1] is not None]
    if not greatest:
        counted.reverse()
    counted.sort(key=lambda row: order(row[1]))
    if greatest:
        counted.reverse()
    return [value for value, _ in counted[:N]]


def both(rows: list[tuple[Any, Any]]) -> tuple[Any, ...]:
    return chosen(rows, greatest=True), chosen(rows, greatest=False)


@pytest.mark.parametrize(("by_type", "drawn"), TYPES, ids=TYPE_IDS)
@given(data=st.data())
@examples(40)
def test_the_first_rows_of_a_sort_over_many_epochs(
    by_type: pa.DataType, drawn: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """Against a sort of all rows so far: null values may win, rows without the other column never do, the later of
    equals comes first."""
    check_epochs(data.draw(epochs_of(drawn)), by_type, BOTH, both)


@given(FEW_ROWS, st.randoms(use_true_random=False))
@examples(150)
def test_it_does_not_matter_in_which_order_parts_meet(rows: list[tuple[Any, Any]], random: Any) -> None:
    """As those of panes and of sessions do."""
    check_any_order(rows, random, BOTH, both)


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
        (lambda: aggregates.top_n("v", 2, by="by"), A_MAP, "top_n cannot order by values of type map"),
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
    assert not planned(pa.int64(), pa.int64(), BOTH).gathers
