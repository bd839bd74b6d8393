"""A condition on pairs of rows of two streams (`base/joining.py`), on Arrow columns.

Null is neither true nor false, as in SQL. NaN equals NaN and is above every other number, as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.joining import Column, Compared, Condition
from state_runtime.state.table import Mask

__all__ = ["holds"]


def holds(condition: Condition, of: Callable[[Column], pa.Array]) -> Mask:
    """Return for which pairs a condition is true.

    Args:
        of: gives a column of the pairs.
    """
    mask: Mask = pc.fill_null(_value(condition, of), False).to_numpy(zero_copy_only=False)
    return mask


def _value(condition: Condition, of: Callable[[Column], pa.Array]) -> pa.Array:
    if isinstance(condition, Column):
        return of(condition)
    if isinstance(condition, Compared):
        return _COMPARISONS[condition.by](of(condition.first), of(condition.second))
    made, *others = (_value(part, of) for part in condition.parts)
    if condition.by == "not":
        return pc.invert(made)
    for other in others:
        made = (pc.and_kleene if condition.by == "and" else pc.or_kleene)(made, other)
    return made


def _equal(first: pa.Array, second: pa.Array) -> pa.Array:
    same = pc.equal(first, second)
    if pa.types.is_floating(first.type):
        same = pc.or_(same, pc.and_(pc.is_nan(first), pc.is_nan(second)))
    return same


def _below(first: pa.Array, second: pa.Array) -> pa.Array:
    below = pc.less(first, second)
    if pa.types.is_floating(first.type):
        below = pc.or_(below, pc.and_not(pc.is_nan(second), pc.is_nan(first)))
    return below


def _equal_or_both_null(first: pa.Array, second: pa.Array) -> pa.Array:
    return pc.or_(pc.fill_null(_equal(first, second), False), pc.and_(pc.is_null(first), pc.is_null(second)))


_COMPARISONS: Final[Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]]] = {
    "=": _equal,
    "<=>": _equal_or_both_null,
    "<": _below,
    ">": lambda first, second: _below(second, first),
    "<=": lambda first, second: pc.invert(_below(second, first)),
    ">=": lambda first, second: pc.invert(_below(first, second)),
}
