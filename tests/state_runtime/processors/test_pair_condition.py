"""Conditions on pairs of rows, against Python: null is neither true nor false, and NaN is the highest number."""

from __future__ import annotations

import math
import operator
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from state_runtime.base.joining import Column, Combined, Compared, Condition, columns_of
from state_runtime.processors.builtin.pair_condition import holds

NUMBERS = [None, -1.0, -0.0, 0.0, 2.5, math.inf, math.nan]
COLUMNS = {
    **{Column("left", f"n{i}"): pa.float64() for i in range(2)},
    **{Column("right", f"n{i}"): pa.float64() for i in range(2)},
    Column("left", "is"): pa.bool_(),
    Column("right", "is"): pa.bool_(),
}
numbers = st.sampled_from([column for column, kind in COLUMNS.items() if kind == pa.float64()])
truths = st.sampled_from([column for column, kind in COLUMNS.items() if kind == pa.bool_()])
leaves: st.SearchStrategy[Condition] = truths | st.builds(
    Compared, st.sampled_from(["=", "<=>", "<", "<=", ">", ">="]), numbers, numbers
)
conditions: st.SearchStrategy[Condition] = st.recursive(
    leaves,
    lambda inner: (
        st.builds(Combined, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3).map(tuple))
        | st.builds(Combined, st.just("not"), inner.map(lambda part: (part,)))
    ),
)
pairs = st.lists(
    st.fixed_dictionaries(
        {
            column: st.sampled_from([None, True, False] if kind == pa.bool_() else NUMBERS)
            for column, kind in COLUMNS.items()
        }
    ),
    max_size=6,
)


def order_of(number: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(number) else (False, number)


def model(condition: Condition, pair: dict[Column, Any]) -> bool | None:
    if isinstance(condition, Column):
        return pair[condition]
    if isinstance(condition, Compared):
        first, second = pair[condition.first], pair[condition.second]
        if condition.by == "<=>" and None in (first, second):
            return first is second
        if None in (first, second):
            return None
        compare = {
            "=": operator.eq,
            "<=>": operator.eq,
            "<": operator.lt,
            "<=": operator.le,
            ">": operator.gt,
            ">=": operator.ge,
        }
        return bool(compare[condition.by](order_of(first), order_of(second)))
    parts = [model(part, pair) for part in condition.parts]
    if condition.by == "not":
        return None if parts[0] is None else not parts[0]
    decides = condition.by == "or"
    return decides if decides in parts else None if None in parts else not decides


@given(conditions, pairs)
@examples(300)
def test_a_condition_is_true_where_sql_says_so(condition: Condition, rows: list[dict[Column, Any]]) -> None:
    arrays = {column: pa.array([row[column] for row in rows], kind) for column, kind in COLUMNS.items()}
    assert holds(condition, arrays.__getitem__).tolist() == [model(condition, row) is True for row in rows]
    assert set(columns_of(condition)) <= set(COLUMNS)
