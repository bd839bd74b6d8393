"""Aggregate functions for `KeyedStream.aggregate`: `aggregates.count()`, `aggregates.sum("delay")`, …

They follow Spark SQL: nulls are ignored, an aggregate over nothing but nulls is null (count: 0), integers sum to long with
an error on overflow, NaN is larger than any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Aggregate", "avg", "count", "max", "min", "sum"]


@dataclass(frozen=True)
class Aggregate:
    """One aggregate function over a column; `column` is None only for counting rows."""

    function: Literal["count", "sum", "min", "max", "avg"]
    column: str | None


def count(column: str | None = None) -> Aggregate:
    """Rows, or with a column its non-null values."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum; long for integers, double for floats, decimal(p+10, s) for decimals."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Smallest value."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Largest value."""
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    """Mean as double, of integers and floats."""
    return Aggregate("avg", column)
