"""Aggregate functions for `KeyedStream.aggregate` and for windows: `aggregates.count()`, `aggregates.sum("delay")`, …

They follow Spark SQL: nulls are ignored, an aggregate over nulls only is null (count: 0), integers sum to long
with an error on overflow, NaN is larger than any number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from state_runtime.base.errors import InvalidPipeline

__all__ = [
    "Aggregate",
    "any",
    "avg",
    "bottom_n",
    "collect",
    "collect_set",
    "count",
    "count_distinct",
    "count_distinct_approx",
    "every",
    "first",
    "last",
    "max",
    "max_by",
    "min",
    "min_by",
    "stddev",
    "stddev_pop",
    "sum",
    "top_n",
    "variance",
    "variance_pop",
]

COLLECT_LIMIT_MAX = 1_000_000
DISTINCT_LIMIT_MAX = 1_000_000
TOP_MAX = 10_000
# Bounds of the relative standard deviation: 2^4 … 2^14 registers. Spark allows more, too many for one key.
RSD_MIN, RSD_MAX = 0.0087, 0.39


@dataclass(frozen=True)
class Aggregate:
    """One aggregate function over a column.

    Attributes:
        function: its name in `processors/builtin/functions.py`.
        column: None only for counting rows.
        ignore_nulls: of `first` and `last`.
        limit: of `collect`, `collect_set`, `count_distinct`, `top_n` and `bottom_n`: how many elements at most.
        rsd: of `count_distinct_approx`: the relative standard deviation.
        condition: SQL; rows for which it is not true are not seen.
        by: of `max_by`, `min_by`, `top_n` and `bottom_n`: the column that chooses the rows.
        told: the column's text in `text`, if that is not its name.
    """

    function: str
    column: str | None
    ignore_nulls: bool = False
    limit: int = 0
    rsd: float = 0.0
    condition: str = ""
    by: str | None = None
    told: str = ""

    @property
    def over(self) -> str:
        """The rows and column that it covers: `delay`, `delay where delay > 0`, `delay by at`."""
        by = f" by {self.by}" if self.by is not None else ""
        condition = f" where {self.condition}" if self.condition else ""
        return self.told or f"{self.column or '*'}{by}{condition}"

    @property
    def text(self) -> str:
        """A description with everything that its stored state depends on: `sum(delay)`."""
        options = (", ignore nulls" if self.ignore_nulls else "") + (f", rsd {self.rsd:g}" if self.rsd else "")
        # A limit cannot be raised afterwards: elements beyond it were not kept.
        options += f", {self.limit}" if self.function in ("top_n", "bottom_n") else ""
        return f"{self.function}({self.over}{options})"

    def where(self, condition: str) -> Aggregate:
        """Limit the aggregate to rows for which a condition in SQL is true: SQL's FILTER (WHERE …).

        Example:
            aggregates.count().where("price >= 10000 AND channel = 'web'")
        """
        if self.function in ("first", "last") and not self.ignore_nulls:
            raise InvalidPipeline(
                f"{self.function}({self.column!r}).where(…) would take a row left out for a null; write "
                f"{self.function}({self.column!r}, ignore_nulls=True)"
            )
        return replace(self, condition=f"({self.condition}) AND ({condition})" if self.condition else condition)


def count(column: str | None = None) -> Aggregate:
    """Count rows, also as `count("*")`; with a column, count its non-null values."""
    return Aggregate("count", None if column == "*" else column)


def sum(column: str) -> Aggregate:
    """Sum a column; long for integers, double for floats, decimal(p+10, s) for decimals."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Take the smallest value."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Take the largest value."""
    return Aggregate("max", column)


def max_by(column: str, by: str) -> Aggregate:
    """Take the value of the row with the greatest value of another column: Spark's `max_by`.

    Rows whose `by` is null do not count; the value itself may be null and of any type. Among rows with equal `by` the
    later one wins: later epoch, and within it the order of the source. Spark's choice is not fixed.

    Args:
        by: a column of any type but maps, and structs and arrays of them; structs are compared field by field.

    Example:
        aggregates.max_by("status", "changed_at")
    """
    return Aggregate("max_by", column, by=by)


def min_by(column: str, by: str) -> Aggregate:
    """Take the value of the row with the smallest value of another column: the reverse of `max_by`. Among rows with
    equal `by` the later one wins here, too."""
    return Aggregate("min_by", column, by=by)


def top_n(column: str, n: int, by: str | None = None) -> Aggregate:
    """Collect values of the `n` rows with the greatest values of a column, the greatest first, as an array: SQL's
    `ROW_NUMBER() OVER (PARTITION BY key ORDER BY by DESC) <= n`, in windows too.

    Rows whose `by` is null do not count. Among rows with equal `by` the later one comes first, as in `max_by`. For
    whole rows use a struct column, and explode the array afterwards. An epoch rewrites the array of every key that it
    touches.

    Args:
        column: of any type.
        n: 1 to 10,000. It cannot be changed in a job with state: give the operator a new uid.
        by: as of `max_by`; None is the column itself.

    Example:
        aggregates.top_n("bidder", 10, by="price")
    """
    return _top("top_n", column, n, by)


def bottom_n(column: str, n: int, by: str | None = None) -> Aggregate:
    """Collect values of the `n` rows with the smallest values of a column, the smallest first: the reverse of `top_n`.
    Among rows with equal `by` the later one comes first here, too."""
    return _top("bottom_n", column, n, by)


def _top(function: Literal["top_n", "bottom_n"], column: str, n: int, by: str | None) -> Aggregate:
    if not 1 <= n <= TOP_MAX:
        raise InvalidPipeline(f"{function}({column!r}, {n}): n is 1 to {TOP_MAX:,}")
    return Aggregate(function, column, limit=n, by=by or column)


def avg(column: str) -> Aggregate:
    """Compute the mean as double, of integers and floats."""
    return Aggregate("avg", column)


def any(column: str) -> Aggregate:
    """Compute whether any value of a boolean column is true."""
    return Aggregate("any", column)


def every(column: str) -> Aggregate:
    """Compute whether all values of a boolean column are true."""
    return Aggregate("every", column)


def first(column: str, ignore_nulls: bool = False) -> Aggregate:
    """Take the value of the first row: earliest epoch, then the order of the source. Spark's order is not fixed."""
    return Aggregate("first", column, ignore_nulls=ignore_nulls)


def last(column: str, ignore_nulls: bool = False) -> Aggregate:
    """Take the value of the last row, in the same order."""
    return Aggregate("last", column, ignore_nulls=ignore_nulls)


def collect(column: str, limit: int = 1_000) -> Aggregate:
    """Collect the first `limit` non-null values as an array, in source order: Spark's `collect_list` with a bound.

    An epoch rewrites the whole array of every key that it touches.
    """
    if not 1 <= limit <= COLLECT_LIMIT_MAX:
        raise InvalidPipeline(f"collect({column!r}, limit={limit}): the limit is 1 to {COLLECT_LIMIT_MAX:,}")
    return Aggregate("collect", column, limit=limit)


def collect_set(column: str, limit: int = 10_000) -> Aggregate:
    """Collect the different non-null values as an array, in ascending order: Spark's `collect_set`, whose order is not
    fixed.

    An epoch rewrites the whole array of every key that it touches.

    Args:
        column: of any type but maps, and structs and arrays of them.
        limit: maximum number of values per key; more of them end the run with an error. It may be raised at any
            restart.
    """
    return _different("collect_set", column, limit)


def count_distinct(column: str, limit: int = 10_000) -> Aggregate:
    """Count different non-null values: SQL's COUNT(DISTINCT column), exactly.

    The state holds each key's values, as a sorted list that an epoch rewrites for every key that it touches. For keys
    with very many values use `count_distinct_approx`, or `deduplicate` by key and value followed by a count.

    Args:
        column: of any type but maps, and structs and arrays of them.
        limit: maximum number of values per key; more of them end the run with an error. It may be raised at any
        restart.
    """
    return _different("count_distinct", column, limit)


def _different(function: Literal["collect_set", "count_distinct"], column: str, limit: int) -> Aggregate:
    if not 1 <= limit <= DISTINCT_LIMIT_MAX:
        raise InvalidPipeline(f"{function}({column!r}, limit={limit}): the limit is 1 to {DISTINCT_LIMIT_MAX:,}")
    return Aggregate(function, column, limit=limit)


def count_distinct_approx(column: str, rsd: float = 0.05) -> Aggregate:
    """Count different non-null values approximately: Spark's `approx_count_distinct` (HyperLogLog++), the same number.

    Args:
        rsd: relative standard deviation of the result; 0.05 keeps up to 512 registers a key, 0.01 up to 16,384.
    """
    if not RSD_MIN <= rsd <= RSD_MAX:
        raise InvalidPipeline(f"count_distinct_approx({column!r}, rsd={rsd}): the deviation is {RSD_MIN} to {RSD_MAX}")
    return Aggregate("count_distinct_approx", column, rsd=rsd)


def variance(column: str) -> Aggregate:
    """Compute the sample variance as double; null for a single value, as Spark's `variance`."""
    return Aggregate("variance", column)


def variance_pop(column: str) -> Aggregate:
    """Compute the population variance as double: Spark's `var_pop`."""
    return Aggregate("variance_pop", column)


def stddev(column: str) -> Aggregate:
    """Compute the sample standard deviation as double; null for a single value, as Spark's `stddev`."""
    return Aggregate("stddev", column)


def stddev_pop(column: str) -> Aggregate:
    """Compute the population standard deviation as double: Spark's `stddev_pop`."""
    return Aggregate("stddev_pop", column)
