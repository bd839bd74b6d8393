"""A processor with every kind of state, and its job: what begins with state must go on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

OUTPUT = "k string, kind string, what string"


class Keeps(StatefulProcessor):
    """A sum, all numbers in order, how often each parity came, and a timer half a minute after each row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.sum = handle.getValueState("sum", "n long")
        self.log = handle.getListState("log", "n long")
        self.seen = handle.getMapState("seen", "parity string", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = (self.sum.get() or (0,))[0]
        for row in sorted(rows, key=lambda r: r.n):
            total += row.n
            self.log.appendValue((row.n,))
            parity = ("odd" if row.n % 2 else "even",)
            self.seen.updateValue(parity, ((self.seen.getValue(parity) or (0,))[0] + 1,))
            self.handle.registerTimer(int(row["at"].timestamp() * 1000) + 30_000)
        self.sum.update((total,))
        yield self._row(key, "rows", total)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self._row(key, f"timer {expiredTimerInfo.getExpiryTimeInMs()}", self.sum.get()[0])

    def _row(self, key: Any, kind: str, total: int) -> Row:
        log = [row[0] for row in self.log.get()]
        seen = sorted((k[0], v[0]) for k, v in self.seen.iterator())
        return Row(k=key[0], kind=kind, what=f"{total} {log} {seen}")

    def close(self) -> None:
        pass


def keeps(stream: Any) -> Any:
    return stream.key_by("k").transform_with_state(Keeps(), OUTPUT, uid="keeps", time_mode="eventTime")
