"""Processors of all flavours that use what there is: states of all kinds, TTL, timers, the watermark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import ConnectedBatch, KeyedBatch, ListOf, MapOf, TimedState, VectorizedProcessor

ROWS = "user string, at timestamp, amount long"
OUT = "user string, n long, total long, what string"
MINUTE_MS = 60_000


class Accounts(StatefulProcessor):
    """Sums of a user; a minute without rows ends them, by the clock of its time mode."""

    def __init__(self, *, by_watermark: bool, ttl_ms: int | None = None) -> None:
        self.by_watermark = by_watermark
        self.ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.sums = handle.getValueState("sums", "n long, total long", self.ttl_ms)
        self.amounts = handle.getListState("amounts", "amount long")
        self.days = handle.getMapState("days", "day string", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n, total = self.sums.get() or (0, 0)
        for row in self.listed(rows):
            n, total = n + 1, total + row.amount
            self.amounts.appendValue((row.amount,))
            day = (str(row.at.date()),)
            held = self.days.getValue(day)
            self.days.updateValue(day, ((held[0] if held else 0) + 1,))
        self.sums.update((n, total))
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        now_ms = (
            timerValues.getCurrentWatermarkInMs() if self.by_watermark else timerValues.getCurrentProcessingTimeInMs()
        )
        self.handle.registerTimer(now_ms + MINUTE_MS)
        yield self.given(key, n, total, "sum")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        n, total = self.sums.get() or (0, 0)
        yield self.given(key, n, total, "end")
        self.sums.clear()
        self.amounts.clear()

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.sums.update((initialState.n, initialState.total))

    def listed(self, rows: Iterator[Any]) -> list[Any]:
        return list(rows)

    def given(self, key: Any, n: int, total: int, what: str) -> Any:
        return Row(user=key[0], n=n, total=total, what=what)

    def close(self) -> None:
        pass


class AccountsInPandas(Accounts):
    """The same with frames."""

    def listed(self, rows: Iterator[pd.DataFrame]) -> list[Any]:
        return [row for frame in rows for row in frame.itertuples()]

    def given(self, key: Any, n: int, total: int, what: str) -> Any:
        return pd.DataFrame({"user": [key[0]], "n": [n], "total": [total], "what": [what]})


class AccountsInColumns(VectorizedProcessor):
    """Much the same for many keys at once; the last row's time decides when a user's sums end."""

    time_mode = "event"

    def states(self) -> Mapping[str, Any]:
        return {
            "sums": TimedState("n long, total long", due=True),
            "amounts": ListOf("amount long"),
            "days": MapOf("day string", "n long"),
        }

    def process(self, batch: KeyedBatch) -> Any:
        amounts = batch.rows["amount"].to_numpy()
        _, before = batch.state("sums")
        n = before["n"].fill_null(0).to_numpy() + batch.sizes
        total = before["total"].fill_null(0).to_numpy() + np.add.reduceat(amounts, batch.starts)
        last_ms = batch.last_rows()["at"].cast(pa.timestamp("us", "UTC")).cast("int64").to_numpy() // 1000
        batch.update("sums", {"n": n, "total": total}, due=last_ms + MINUTE_MS)
        batch.list_state("amounts").append({"amount": batch.rows["amount"]}, batch.key_of_row)
        days = {"day": pc.strftime(batch.last_rows()["at"], "%Y-%m-%d")}
        batch.map_state("days").put(days, {"n": batch.sizes}, np.arange(batch.num_keys))
        rows = pa.table({"user": batch.keys["user"], "n": n, "total": total, "what": ["sum"] * batch.num_keys})
        return {"": rows, "large": rows.filter(pc.greater(rows["total"], 100))}

    def process_due(self, name: str, batch: KeyedBatch) -> Any:
        values = batch.state(name).values
        ends = ["end"] * batch.num_keys
        return pa.table({"user": batch.keys["user"], "n": values["n"], "total": values["total"], "what": ends})


class Rated(VectorizedProcessor):
    """Orders of one stream with the newest rate of another one."""

    def states(self) -> Mapping[str, Any]:
        return {"rate": "rate double"}

    def process(self, batch: ConnectedBatch) -> Any:
        rates, orders = batch.input("rates"), batch.input("orders")
        batch.update(
            "rate", rates.last_rows().select(["rate"]).filter(pa.array(rates.sizes > 0)), where=rates.sizes > 0
        )
        rate = batch.state("rate").values["rate"].to_numpy(zero_copy_only=False)
        euros = orders.rows["amount"].to_numpy() * np.repeat(rate, orders.sizes)
        return pa.table({"id": orders.rows["id"], "euros": euros})
