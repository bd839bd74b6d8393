"""`max_by` and `min_by` against a loop in plain Python: any types, nulls, ties, and parts that meet in any order."""

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
from state_runtime.processors.builtin.partials import Groups
from state_runtime.processors.declared.aggregates import Aggregate

A_MAP = pa.map_(pa.string(), pa.int64())
BOTH = {"most": aggregates.max_by("v", "by"), "least": aggregates.min_by("v", "by")}


def chosen(rows: list[tuple[Any, Any]], *, greatest: bool) -> Any:
    """Of values and what they are chosen by, in source order."""
    best: tuple[Any, Any] | None = None
    for value, by in rows:
        if by is None:
            continue
        if best is None or (order(by) >= order(best[1]) if greatest else order(by) <= order(best[1])):
            best = (value, by)
    return None if best is None else best[0]


def both(rows: list[tuple[Any, Any]]) -> tuple[Any, ...]:
    return chosen(rows, greatest=True), chosen(rows, greatest=False)


@pytest.mark.parametrize(("by_type", "drawn"), TYPES, ids=TYPE_IDS)
@given(data=st.data())
@examples(40)
def test_the_value_of_the_greatest_and_smallest_row_over_many_epochs(
    by_type: pa.DataType, drawn: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """Against a loop over all rows: null values may win, rows without the other column never do, the later of equals
    does."""
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
        (aggregates.max_by("v", "by"), A_MAP, "max_by cannot order by values of type map"),
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
    assert not planned(pa.int64(), pa.int64(), BOTH).gathers
