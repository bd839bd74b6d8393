"""The StatefulProcessor classes of the benchmark.

Each class object is given to Spark's operator and to ours unchanged: neither engine gets code of its own. The
classes do the same small work per key (count, sum, last value), because the benchmark compares engines, and a
heavy user function would hide the difference between them. The vectorised one is ours alone: Spark has no such interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from state_runtime import KeyedBatch, VectorizedProcessor

__all__ = [
    "COUNTED_SCHEMA",
    "DAY_COLUMNS",
    "OUTPUT_SCHEMA",
    "Appends",
    "DayStatistics",
    "OwnBids",
    "RunningTotals",
    "RunningTotalsInPandas",
    "RunningTotalsVectorized",
    "Timeouts",
    "TopBids",
    "TotalsByKind",
]

OUTPUT_SCHEMA = "key long, n long, total long, last long"
STATE_SCHEMA = "n long, total long, last long"
COUNTED_SCHEMA = "key long, n long, total long"
TIMEOUT_MS = 3_000
KINDS = 10
DAY_COLUMNS = (
    "day",
    *(f"{rank}_{what}" for what in ("bids", "bidders", "auctions") for rank in ("total", "rank1", "rank2", "rank3")),
)
_OWN_COLUMNS = ("bidder", "name", "item_name", "price", "url")
_DAY, _OWN_BID = Row(*DAY_COLUMNS), Row(*_OWN_COLUMNS)


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


class Appends(StatefulProcessor):
    """List state, row flavour: keeps every amount, without looking at what is there."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one ListState."""
        self._amounts = handle.getListState("amounts", "amount long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Append the rows of one key, one by one."""
        n, total = 0, 0
        for row in rows:
            self._amounts.appendValue((row.amount,))
            n += 1
            total += row.amount
        yield Row(key=key[0], n=n, total=total)

    def close(self) -> None:
        """Hold nothing that needs closing."""


class TotalsByKind(StatefulProcessor):
    """Map state, row flavour: reads and writes one entry a row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one MapState."""
        self._totals = handle.getMapState("totals", "kind long", "n long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Add the rows of one key to the entries of their kinds; emits the last one's."""
        n, total = 0, 0
        for row in rows:
            kind = (row.amount % KINDS,)
            n, total = self._totals.getValue(kind) or (0, 0)
            n, total = n + 1, total + row.amount
            self._totals.updateValue(kind, (n, total))
        yield Row(key=key[0], n=n, total=total)

    def close(self) -> None:
        """Hold nothing that needs closing."""


class Timeouts(StatefulProcessor):
    """Timers, row flavour: every key has one that its rows push on, and that ends the key's state when it fires."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one ValueState."""
        self._handle = handle
        self._open = handle.getValueState("open", "n long, total long, due_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Add the rows of one key and set its timer anew; emits nothing."""
        found = self._open.get()
        n, total, due_ms = found or (0, 0, 0)
        if found:
            self._handle.deleteTimer(due_ms)
        for row in rows:
            n += 1
            total += row.amount
            due_ms = int(row.ts.timestamp() * 1000) + TIMEOUT_MS
        self._handle.registerTimer(due_ms)
        self._open.update((n, total, due_ms))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:
        """Emit the totals of a key that has been silent, and forget it."""
        n, total, _ = self._open.get()
        self._open.clear()
        yield Row(key=key[0], n=n, total=total)

    def close(self) -> None:
        """Hold nothing that needs closing."""


class RunningTotalsVectorized(VectorizedProcessor):
    """:class:`RunningTotals` for all keys at once: the same state, the same output."""

    def states(self) -> Mapping[str, str]:
        """Declare the one state."""
        return {"totals": STATE_SCHEMA}

    def process(self, batch: KeyedBatch) -> pa.Table:
        """Add the rows of every key and emit its new totals."""
        amounts = batch.rows["amount"].to_numpy()
        _, before = batch.state("totals")
        totals = {
            "n": before["n"].fill_null(0).to_numpy() + batch.sizes,
            "total": before["total"].fill_null(0).to_numpy() + np.add.reduceat(amounts, batch.starts),
            "last": amounts[batch.stops - 1],
        }
        batch.update("totals", totals)
        return pa.table({"key": batch.keys["key"], **totals})


class TopBids(StatefulProcessor):
    """Row flavour: the ten highest prices of each auction, in one ValueState."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._top = handle.getValueState("top", "prices array<bigint>")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Merge the rows of one auction and emit its list."""
        before = self._top.get()
        prices = list(before[0]) if before else []
        prices.extend(row.price for row in rows)
        prices.sort(reverse=True)
        del prices[10:]
        self._top.update((prices,))
        yield Row(auction=key[0], top=prices)

    def close(self) -> None:
        """Hold nothing that needs closing."""


class DayStatistics(StatefulProcessor):
    """Row flavour: bids, different bidders and different auctions of a day, of each rank of prices; two MapStates."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the counts, and of each bidder and auction in which ranks it was seen, a bit each."""
        self._counts = handle.getValueState("counts", "counts array<bigint>")
        self._seen = [
            handle.getMapState("bidders", "id bigint", "ranks bigint"),
            handle.getMapState("auctions", "id bigint", "ranks bigint"),
        ]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Count the rows of one day and emit all twelve counts."""
        found = self._counts.get()
        counts = list(found[0]) if found else [0] * 12
        for row in rows:
            counts[0] += 1
            counts[row.rank] += 1
            for first, seen, value in zip((4, 8), self._seen, (row.bidder, row.auction), strict=True):
                before = seen.getValue((value,))
                ranks = before[0] if before else 0
                if ranks & 1 << row.rank:
                    continue
                counts[first] += not ranks
                counts[first + row.rank] += 1
                seen.updateValue((value,), (ranks | 1 << row.rank,))
        self._counts.update((counts,))
        yield _DAY(key[0], *counts)

    def close(self) -> None:
        """Hold nothing that needs closing."""


class OwnBids(StatefulProcessor):
    """Row flavour: a three-way join by hand; the bids of a person with each auction that the person opened."""

    PERSON, AUCTION = 0, 1

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare a state for each side."""
        self._name = handle.getValueState("name", "name string")
        self._items = handle.getListState("items", "item string")
        self._bids = handle.getListState("bids", "price bigint, url string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:
        """Keep the rows of one person; emit what they complete."""
        found = self._name.get()
        name = found[0] if found else None
        new_name, items, bids = name, [], []
        for row in rows:
            if row.kind == self.PERSON:
                new_name = row.text
            elif row.kind == self.AUCTION:
                items.append((row.text,))
            else:
                bids.append((row.price, row.text))
        old_items, old_bids = list(self._items.get()), list(self._bids.get())
        if new_name is not None and new_name != name:
            self._name.update((new_name,))
        for state, new in ((self._items, items), (self._bids, bids)):
            if new:
                state.appendList(new)
        if new_name is None:
            return
        # With a person who is new every pair is; else one with a new bid or a new item.
        pairs = [(item, bid) for item in (*old_items, *items) for bid in bids]
        pairs += [(item, bid) for item in (items if name is not None else (*old_items, *items)) for bid in old_bids]
        for item, bid in pairs:
            yield _OWN_BID(key[0], new_name, item[0], *bid)

    def close(self) -> None:
        """Hold nothing that needs closing."""
