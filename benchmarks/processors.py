"""The StatefulProcessor classes of the benchmark.

Each class object is given to Spark's operator and to ours unchanged: neither engine gets code of its own. The
classes do the same small work per key (count, sum, last value), because the benchmark compares engines, and a
heavy user function would hide the difference between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

__all__ = ["INPUT_SCHEMA", "OUTPUT_SCHEMA", "RunningTotals", "RunningTotalsInPandas"]

INPUT_SCHEMA = "key long, amount long"
OUTPUT_SCHEMA = "key long, n long, total long, last long"
STATE_SCHEMA = "n long, total long, last long"


class RunningTotals(StatefulProcessor):
    """Row flavour: number, sum and last of the amounts of each key, over the whole stream."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one ValueState."""
        self._totals = handle.getValueState("totals", STATE_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Add the rows of one key and emit its new totals."""
        n, total, last = self._totals.get() or (0, 0, None)
        for row in rows:
            last = row.amount
            n += 1
            total += last
        self._totals.update((n, total, last))
        yield Row(key=key[0], n=n, total=total, last=last)

    def close(self) -> None:
        """Hold nothing that needs closing."""


class RunningTotalsInPandas(StatefulProcessor):
    """Pandas flavour of :class:`RunningTotals`: the same state, the same output."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one ValueState."""
        self._totals = handle.getValueState("totals", STATE_SCHEMA)

    def handleInputRows(
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Add the frames of one key and emit its new totals."""
        n, total, last = self._totals.get() or (0, 0, None)
        for frame in rows:
            amounts = frame["amount"]
            n += len(amounts)
            total += int(amounts.sum())
            last = int(amounts.iloc[-1])
        self._totals.update((n, total, last))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total], "last": [last]})

    def close(self) -> None:
        """Hold nothing that needs closing."""
