"""The aggregate functions: `FUNCTIONS` has a line for each, with the callable that plans it over a column.

A new function needs a class with the methods of `PartialFunction` in its own file, a line here, and its spelling in
`processors/declared/aggregates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.builtin.distinct import Distinct, registers_log2
from state_runtime.processors.builtin.distinct_exact import DistinctValues
from state_runtime.processors.builtin.extremes import ByExtreme
from state_runtime.processors.builtin.partials import Chosen, Collected, Combine, Moments, PartialFunction, Scalar
from state_runtime.processors.builtin.ranks import has_order
from state_runtime.processors.builtin.top import Top
from state_runtime.processors.declared.aggregates import Aggregate

__all__ = ["FUNCTIONS", "Over", "plan_function"]

_SUM_PRECISION_MAX = 38


@dataclass(frozen=True, kw_only=True)
class Over:
    """The input over which a function is planned.

    Attributes:
        name: of the output; its slots begin with it.
        column: of the input; empty for rows.
        type, by_type: of the columns that it reads; None if it reads no such column.
        where: operator and aggregate, for messages.
        uid: of the operator.
    """

    name: str
    aggregate: Aggregate
    column: str
    type: Any
    by_type: Any
    where: str
    uid: str

    def refused(self, why: str) -> InvalidPipeline:
        """Return the error for a type that the function cannot take."""
        return InvalidPipeline(f"{self.where}: {self.aggregate.function} {why}")

    def scalar(self, combine: Combine, output: pa.DataType) -> Scalar:
        """Return a function whose one slot is its result."""
        return Scalar(
            slots=(pa.field(self.name, output),),
            combines=(combine,),
            column=self.aggregate.column,
            output=output,
            divide=False,
            uid=self.uid,
        )


Plan: TypeAlias = Callable[[Over], PartialFunction]
"""Raises InvalidPipeline: the function cannot take that type."""


def plan_function(over: Over) -> PartialFunction:
    """Return the function of an aggregate, over a column.

    Raises:
        InvalidPipeline: it needs a column, or cannot take that type.
    """
    name = over.aggregate.function
    if over.aggregate.column is None and name != "count":
        raise over.refused("needs a column")
    if name != "count" and pa.types.is_null(over.type):
        if name in ("min", "max"):
            raise over.refused(f"cannot order values of type {over.type}")
        raise InvalidPipeline(f"{over.where}: column {over.column!r} has type void (nothing but null); cast it first")
    return FUNCTIONS[name](over)


def _count(over: Over) -> PartialFunction:
    return over.scalar("count", pa.int64())


def _sum(over: Over) -> PartialFunction:
    if pa.types.is_integer(over.type):
        return over.scalar("sum", pa.int64())
    if pa.types.is_floating(over.type):
        return over.scalar("sum", pa.float64())
    if pa.types.is_decimal128(over.type):
        digits = min(_SUM_PRECISION_MAX, over.type.precision + 10)
        return over.scalar("sum", pa.decimal128(digits, over.type.scale))
    raise over.refused(f"takes numbers, not {over.type}")


def _extreme(combine: Combine) -> Plan:
    def plan(over: Over) -> PartialFunction:
        if not has_order(over.type):
            raise over.refused(f"cannot order values of type {over.type}")
        if not pa.types.is_nested(over.type):
            return over.scalar(combine, over.type)
        return ByExtreme(
            name=over.name,
            column=over.column,
            by=over.column,
            output=over.type,
            by_type=over.type,
            greatest=combine == "max",
        )

    return plan


def _of_booleans(combine: Combine) -> Plan:
    def plan(over: Over) -> PartialFunction:
        if not pa.types.is_boolean(over.type):
            raise over.refused(f"takes booleans, not {over.type}")
        return over.scalar(combine, over.type)

    return plan


def _chosen(*, last: bool) -> Plan:
    return lambda over: Chosen(over.name, over.column, over.type, last, over.aggregate.ignore_nulls)


def _ordered_by(over: Over) -> str:
    by = over.aggregate.by
    if by is None or not has_order(over.by_type):
        raise over.refused(f"cannot order by values of type {over.by_type}")
    return by


def _by_extreme(*, greatest: bool) -> Plan:
    return lambda over: ByExtreme(
        name=over.name,
        column=over.column,
        by=_ordered_by(over),
        output=over.type,
        by_type=over.by_type,
        greatest=greatest,
    )


def _top(*, greatest: bool) -> Plan:
    return lambda over: Top(
        name=over.name,
        column=over.column,
        by=_ordered_by(over),
        element=over.type,
        by_type=over.by_type,
        n=over.aggregate.limit,
        greatest=greatest,
    )


def _collect(over: Over) -> PartialFunction:
    return Collected(over.name, over.column, over.type, over.aggregate.limit)


def _different(*, counts: bool) -> Plan:
    def plan(over: Over) -> PartialFunction:
        if not has_order(over.type):
            raise over.refused(f"cannot compare values of type {over.type}")
        return DistinctValues(
            name=over.name,
            column=over.column,
            element=over.type,
            limit=over.aggregate.limit,
            uid=over.uid,
            counts=counts,
        )

    return plan


def _count_distinct_approx(over: Over) -> PartialFunction:
    if pa.types.is_nested(over.type):
        raise over.refused(f"takes plain values, not {over.type}")
    return Distinct(over.name, over.column, registers_log2(over.aggregate.rsd))


def _check_number(over: Over) -> None:
    if not (pa.types.is_integer(over.type) or pa.types.is_floating(over.type)):
        raise over.refused(f"takes integers and floats, not {over.type}; cast it to double first")


def _avg(over: Over) -> PartialFunction:
    _check_number(over)
    slots = (pa.field(f"{over.name}.sum", pa.float64()), pa.field(f"{over.name}.count", pa.int64()))
    return Scalar(
        slots=slots, combines=("sum", "count"), column=over.column, output=pa.float64(), divide=True, uid=over.uid
    )


def _moments(*, sample: bool, root: bool) -> Plan:
    def plan(over: Over) -> PartialFunction:
        _check_number(over)
        return Moments(over.name, over.column, sample, root)

    return plan


FUNCTIONS: Final[Mapping[str, Plan]] = MappingProxyType(
    {
        "count": _count,
        "sum": _sum,
        "min": _extreme("min"),
        "max": _extreme("max"),
        "avg": _avg,
        "any": _of_booleans("max"),
        "every": _of_booleans("min"),
        "first": _chosen(last=False),
        "last": _chosen(last=True),
        "collect": _collect,
        "collect_set": _different(counts=False),
        "count_distinct": _different(counts=True),
        "count_distinct_approx": _count_distinct_approx,
        "max_by": _by_extreme(greatest=True),
        "min_by": _by_extreme(greatest=False),
        "top_n": _top(greatest=True),
        "bottom_n": _top(greatest=False),
        "variance": _moments(sample=True, root=False),
        "variance_pop": _moments(sample=False, root=False),
        "stddev": _moments(sample=True, root=True),
        "stddev_pop": _moments(sample=False, root=True),
    }
)
