"""Choice of the operators that Spark can aggregate for before the shuffle, and the SQL for it.

Rows are aggregated before the shuffle only if the result is the same to the last digit in any case: counts, sums and
means of integers, sums of decimals, extremes of types with one order. Excluded are floats (their sum depends on the
order, and zero has two signs), functions that depend on the order of rows, and functions for which Spark would sort
(extremes of strings). See docs/design/0029-partial-rows.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import types as T

from state_runtime.processors.builtin.aggregate import AggregateOperator, AggregatePlan
from state_runtime.processors.builtin.partial_rows import LOWER_HALF, ROWS_COLUMN, slot_column, upper_column
from state_runtime.processors.builtin.partials import Combine, Scalar
from state_runtime.processors.builtin.windows import WindowOperator
from state_runtime.processors.declared.windows import TimeWindow
from state_runtime.processors.operator import Operator
from state_runtime.spark.sql import quoted

__all__ = ["PartialRows", "partial_rows"]

_PANE: Final = "__stillstate_pane"
_SMALL_INTEGERS: Final = (T.ByteType, T.ShortType, T.IntegerType)
_EXTREMES: Final = (*_SMALL_INTEGERS, T.LongType, T.BooleanType, T.DateType, T.TimestampType, T.DecimalType)
_KEYS: Final = (*_EXTREMES, T.BinaryType)
# The sum has ten digits more, and never exceeds Spark's 38 for any number of rows.
_SUMMED_DIGITS_MAX: Final = 28


@dataclass(frozen=True)
class PartialRows:
    """The SQL that makes partial rows of an operator's rows.

    Attributes:
        keys: key columns of the operator.
        pane: SQL that tells panes apart; "" if the operator has no panes.
        made: SQL and name of each column beside the keys.
    """

    keys: tuple[str, ...]
    pane: str
    made: tuple[tuple[str, str], ...]

    @property
    def by(self) -> tuple[str, ...]:
        """Return the SQL expressions by which rows are grouped."""
        keys = tuple(map(quoted, self.keys))
        return (*keys, f"{self.pane} AS {_PANE}") if self.pane else keys

    @property
    def aggregates(self) -> tuple[str, ...]:
        """Return the SQL of the other columns."""
        return tuple(f"{sql} AS {quoted(name)}" for sql, name in self.made)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the partial rows' columns."""
        return (*self.keys, *(name for _, name in self.made))


def partial_rows(operator: Operator, schema: T.StructType) -> PartialRows | None:
    """Return how an operator's rows can be aggregated before the shuffle; None if they cannot.

    Args:
        schema: of the columns that the operator reads.
    """
    if not isinstance(operator, AggregateOperator | WindowOperator) or not operator.plan.gathers:
        return None
    if not all(_is_key(schema[key].dataType) for key in operator.key_columns):
        return None
    slots = _slots(operator.plan, schema)
    if slots is None:
        return None
    made = (("count(1)", ROWS_COLUMN), *slots)
    if isinstance(operator, AggregateOperator):
        return PartialRows(operator.key_columns, "", made)
    if (
        type(schema[operator.time_column].dataType) is not T.TimestampType
        or operator.time_column in operator.key_columns
    ):
        return None
    time = quoted(operator.time_column)
    return PartialRows(
        operator.key_columns, _pane(operator.window, time), ((f"min({time})", operator.time_column), *made)
    )


def _slots(plan: AggregatePlan, schema: T.StructType) -> tuple[tuple[str, str], ...] | None:
    made: list[tuple[str, str]] = []
    number = 0
    for _, function in plan.functions:
        if not isinstance(function, Scalar):
            return None
        data_type = schema[function.column].dataType if function.column is not None else None
        for how in function.combines:
            columns = _columns(how, function.column, data_type, number)
            if columns is None:
                return None
            made += columns
            number += 1
    return tuple(made)


def _columns(
    how: Combine, column: str | None, data_type: T.DataType | None, number: int
) -> list[tuple[str, str]] | None:
    """Return SQL and names of a slot's columns; None if the operator has to see the rows themselves."""
    name, value = slot_column(number), quoted(column) if column is not None else "1"
    if how == "count":
        return [(f"count({value})", name)]
    if how in ("min", "max"):
        return [(f"{how}({value})", name)] if isinstance(data_type, _EXTREMES) else None
    if isinstance(data_type, T.LongType):
        upper, lower = f"sum(shiftright({value}, 32))", f"sum({value} & {LOWER_HALF}L)"
        return [(lower, name), (upper, upper_column(number))]
    is_exact = isinstance(data_type, _SMALL_INTEGERS) or (
        isinstance(data_type, T.DecimalType) and data_type.precision <= _SUMMED_DIGITS_MAX
    )
    return [(f"sum({value})", name)] if is_exact else None


def _is_key(data_type: T.DataType) -> bool:
    # A string with a collation has another equality.
    return isinstance(data_type, _KEYS) or data_type == T.StringType()


def _pane(window: TimeWindow, time: str) -> str:
    """Return SQL that tells the panes of a window apart, as `WindowOperator` cuts them, or finer, but never coarser."""
    since = f"(unix_micros({time}) - {window.start_us}L)"
    within = f"pmod({since}, {window.slide_us}L)"
    first = f"{since} - {within}"
    rest_us = window.size_us % window.slide_us
    return first if rest_us == 0 else f"{first} + IF({within} >= {rest_us}L, {rest_us}L, 0L)"
