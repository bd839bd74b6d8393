"""Conditions that rows must meet: `expect_or_drop`, whose rows that fail are counted and can be set aside.

One segment evaluates each condition once and gives each row the names of those that it fails; behind it a segment takes
out the rows that fail none, and one the others, if something reads them. A condition that is null has failed. See
docs/design/0053-clocks-and-bad-rows.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.graph import OutputCode
from state_runtime.spark.columns import FAILED_COLUMN
from state_runtime.spark.sql import quoted

__all__ = ["BAD", "REASON", "ExpectStep", "ExpectedStep"]

BAD: Final = "bad"
"""The side output with the rows that fail."""
REASON: Final = "reason"
"""The column of `BAD` with the names of the conditions that failed."""
_BETWEEN: Final = ", "


@dataclass(frozen=True)
class ExpectStep:
    """The code of a segment that tells of each row which conditions it fails, in a column of the runtime.

    Attributes:
        conditions: by name, in SQL or as columns.
        is_read: whether something reads the rows that fail.
    """

    conditions: Mapping[str, str | Column] = field(compare=False)
    is_read: bool = False
    every_epoch: ClassVar[bool] = False
    kind: ClassVar[str] = "expect_or_drop"
    side_outputs: ClassVar[frozenset[str]] = frozenset({BAD})
    counts: ClassVar[str] = f"count({FAILED_COLUMN})"
    """SQL of the aggregate that counts the rows that fail, over the rows that it makes."""

    @property
    def name(self) -> str:
        """What people read for it."""
        return _BETWEEN.join(self.conditions)

    @property
    def where(self) -> str:
        """The step, for messages."""
        return f"expect_or_drop({self.name})"

    def check(self, rows: DataFrame) -> None:
        """Check the conditions on a frame without rows.

        Raises:
            InvalidPipeline: Spark cannot resolve one, or it is no truth value.
        """
        for name, condition in self.conditions.items():
            try:
                kind = rows.select(_column(condition)).schema.fields[0].dataType
            except (AnalysisException, ParseException) as error:
                told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise InvalidPipeline(f"expect_or_drop(): the condition {name!r} cannot be resolved: {told}") from error
            if not isinstance(kind, T.BooleanType):
                raise InvalidPipeline(
                    f"expect_or_drop(): the condition {name!r} is {kind.simpleString()}, and must be a truth value, "
                    "such as 'amount > 0'"
                )

    def function(self, rows: DataFrame) -> DataFrame:
        """Return all rows, with the names of the conditions that each fails; null if none."""
        failed = [F.when(_column(each), F.lit(None)).otherwise(F.lit(name)) for name, each in self.conditions.items()]
        names = F.concat_ws(_BETWEEN, *failed)
        return rows.select(*(F.col(quoted(n)) for n in rows.columns), F.nullif(names, F.lit("")).alias(FAILED_COLUMN))


@dataclass(frozen=True)
class ExpectedStep(OutputCode):
    """The code of a segment that takes one output out of the rows of an `ExpectStep`.

    Attributes:
        output: `BAD`, or "" for the rows that fail nothing.
    """

    def function(self, rows: DataFrame) -> DataFrame:
        """Return the rows of the output; those that fail have the reason as their last column.

        Raises:
            InvalidPipeline: they have a column of that name already.
        """
        own: list[Any] = [F.col(quoted(name)) for name in rows.columns if name != FAILED_COLUMN]
        if self.output != BAD:
            return rows.where(f"{FAILED_COLUMN} IS NULL").select(*own)
        if any(name.lower() == REASON for name in rows.columns):
            raise InvalidPipeline(
                f"output({BAD!r}) gives each row a column {REASON!r}, and the rows have one of that name already; "
                "rename it before expect_or_drop()"
            )
        return rows.where(f"{FAILED_COLUMN} IS NOT NULL").select(*own, F.col(FAILED_COLUMN).alias(REASON))


def _column(condition: str | Column) -> Column:
    return F.expr(condition) if isinstance(condition, str) else condition
