"""Rows whose event time is too far ahead of the clock: they move no watermark, are counted, and can be set aside.

A row is too far ahead if its event time is beyond the epoch's processing time plus the source's `max_ahead`. Processing
time is the recorded one, so an epoch that is run again judges the same rows alike. Pure but for Spark's frames.

The bound is a number in the epoch's plan, and a plan serves for many epochs only while its numbers stay
(docs/design/0038-rebound.md). So the bound moves in steps of a 64th of `max_ahead`, upwards: a row may be ahead by that
much more. See docs/design/0053-clocks-and-bad-rows.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from state_runtime.pipeline.graph import FUTURE, OutputCode
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.spark.sql import quoted

__all__ = ["FutureStep", "bound_ms", "future_counts", "highest_sql"]

_STEPS: Final = 64
_STEP_MIN_MS: Final = 1000


def bound_ms(now_ms: int, max_ahead_ms: int) -> int:
    """Return the latest event time that is not too far ahead: at least `max_ahead_ms` after now, and less than a step
    more.

    Args:
        now_ms: the epoch's processing time.
    """
    step_ms = max(_STEP_MIN_MS, max_ahead_ms // _STEPS)
    return -(-now_ms // step_ms) * step_ms + max_ahead_ms


def highest_sql(column: WatermarkColumn, now_ms: int) -> str:
    """Return SQL of the aggregate that observes a column's highest event time; null if no row has one that counts."""
    if column.max_ahead_ms is None:
        return f"max({column.sql})"
    return f"max(CASE WHEN {column.sql} <= {bound_ms(now_ms, column.max_ahead_ms)} THEN {column.sql} END)"


def future_counts(columns: Sequence[WatermarkColumn], now_ms: int) -> dict[str, str]:
    """Return, for each source that has a bound, SQL of the aggregate that counts its rows beyond it.

    Args:
        columns: of all sources, with event time.
    """
    found: dict[str, list[str]] = {}
    for column in columns:
        if column.max_ahead_ms is not None:
            found.setdefault(column.source, []).append(f"{column.sql} > {bound_ms(now_ms, column.max_ahead_ms)}")
    return {source: f"count_if({' OR '.join(beyond)})" for source, beyond in found.items()}


@dataclass(frozen=True)
class FutureStep(OutputCode):
    """The code of a segment that takes the rows that are too far ahead out of a source's, or the others.

    Attributes:
        output: `FUTURE`, or "" for the rows that stay.
        columns: of the source, with event time; as the rows have them. Empty until the pipeline is compiled.
        now_ms: the processing time of the epoch that it is for.
    """

    columns: tuple[WatermarkColumn, ...] = ()
    now_ms: int = 0

    def at(self, now_ms: int) -> FutureStep:
        """Return the code of an epoch."""
        return replace(self, now_ms=now_ms)

    def function(self, rows: DataFrame) -> DataFrame:
        """Return the rows of the output. Those of `FUTURE` have no event time: what follows would go by it."""
        bounds = ((column, column.max_ahead_ms) for column in self.columns)
        beyond = [f"{c.sql} > {bound_ms(self.now_ms, ahead_ms)}" for c, ahead_ms in bounds if ahead_ms is not None]
        is_future = f"({' OR '.join(beyond)})"
        if self.output != FUTURE:
            return rows.where(f"{is_future} IS NOT TRUE")
        times = {column.name for column in self.columns}
        # A function of the column alone: it has the column's values, and not its mark.
        plain = [F.coalesce(F.col(quoted(n))).alias(n) if n in times else F.col(quoted(n)) for n in rows.columns]
        return rows.where(f"{is_future} IS TRUE").select(*plain)
