"""Processors about life and death: when objects are made and closed, what survives, what may be called when, and chains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from tests.parity.zoo import SAID


class Attributes(StatefulProcessor):
    """Counts its calls in an attribute: fresh in every batch, shared by the keys of a partition, timers after all input."""

    def __init__(self) -> None:
        self.calls = 0
        self.classes = ["from the driver"]

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._keys: set[Any] = set()
        self.calls += 100

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        self.calls += 1
        self._keys.add(key)
        self.classes.append(key[0])
        number = sum(row.n for row in rows)
        now = timerValues.getCurrentProcessingTimeInMs()
        self._handle.registerTimer(now - number)
        # Keys come in no fixed order, so the key is not said; that each number comes once is the point.
        yield Row(key="", seq=self.calls, op="rows", said=f"{len(self._keys)} {len(self.classes)} {now}")

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:
        self.calls += 1
        # Timers fire in the order of their times over all keys.
        yield Row(
            key=key[0],
            seq=self.calls,
            op="timer",
            said=f"{expiredTimerInfo.getExpiryTimeInMs()} {sorted(self.classes)}",
        )

    def close(self) -> None:
        pass


class Closing(StatefulProcessor):
    """Writes down every init, call and close of its tasks."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def _note(self, what: str) -> None:
        context = TaskContext.get()
        if context is not None:
            with open(Path(self._folder) / f"{context.taskAttemptId()}-{os.getpid()}", "a") as file:
                file.write(f"{what}\n")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._note("init")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        self._note("rows")
        yield Row(key=key[0], seq=0, op="rows", said="")
        self._note("drained")

    def close(self) -> None:
        self._note("close")


class First(StatefulProcessor):
    """Fills two states, one of which the next version of the code deletes."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._kept = handle.getValueState("kept", "n long")
        self._dropped = handle.getListState("dropped", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for row in rows:
            self._kept.update((row.n,))
            self._dropped.appendValue((row.n,))
        yield Row(key=key[0], seq=0, op="first", said=f"{self._kept.get()} {list(self._dropped.get())}")

    def close(self) -> None:
        pass


class Second(StatefulProcessor):
    """The next version: one state deleted, one new, one that never was."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._kept = handle.getValueState("kept", "n long")
        handle.deleteIfExists("dropped")
        handle.deleteIfExists("never was")
        self._new = handle.getMapState("new", "n long", "s string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for row in rows:
            self._new.updateValue((row.n,), ("new",))
        yield Row(key=key[0], seq=1, op="second", said=f"{self._kept.get()} {sorted(self._new.iterator())}")

    def close(self) -> None:
        pass


class Third(StatefulProcessor):
    """And one after it that declares the deleted name again: nothing of the old may come back."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._kept = handle.getValueState("kept", "n long")
        self._again = handle.getListState("dropped", "n long")
        self._new = handle.getMapState("new", "n long", "s string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        held = f"{self._kept.get()} {list(self._again.get())} {sorted(self._new.iterator())}"
        yield Row(key=key[0], seq=2, op="third", said=held)

    def close(self) -> None:
        pass


class FailsIn(StatefulProcessor):
    """Does one thing that ends the query."""

    def __init__(self, what: str) -> None:
        self._what = what

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._value = handle.getValueState("v", "n long")
        self._list = handle.getListState("l", "n long", 5 if self._what == "ttl" else None)
        if self._what == "duplicate":
            handle.getValueState("v", "n long")
        names = {"empty name": "", "reserved name": "$x", "name in blanks": " x ", "name default": "default"}
        if self._what in names:
            handle.getMapState(names[self._what], "n long", "n long")
        if self._what == "ttl below zero":
            handle.getValueState("below", "n long", -1)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Any:
        actions: dict[str, Callable[[], Any]] = {
            "timer": lambda: self._handle.registerTimer(5),
            "late state": lambda: self._handle.getValueState("late", "n long"),
            "empty list": lambda: self._list.put([]),
            "empty append": lambda: self._list.appendList([]),
            "fields": lambda: self._value.update((1, 2)),
            "raises": lambda: {}["the key"],
            "returns none": lambda: None,
        }
        done = actions.get(self._what, lambda: None)()
        if self._what == "returns none":
            return done
        return iter([Row(key=key[0], seq=0, op=self._what, said="went on")])

    def close(self) -> None:
        pass


class Forwarding(StatefulProcessor):
    """Hands rows on with an event time, at once and from timers: what a chain begins with."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        total = (self._sum.get() or (0,))[0]
        for row in rows:
            total += row.n
            self._handle.registerTimer(int(row.ts.timestamp() * 1000) + 2_000)
            yield Row(key=key[0], at=row.ts, n=row.n, total=total)
        self._sum.update((total,))

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:
        # Not older than the watermark: this is when the watermark passes.
        when = datetime.fromtimestamp((timerValues.getCurrentWatermarkInMs() + 1) / 1000, UTC)
        yield Row(key=key[0], at=when, n=1000, total=self._sum.get()[0])

    def close(self) -> None:
        pass


FORWARDED = "key string, at timestamp, n long, total long"
__all__ = ["FORWARDED", "SAID", "Attributes", "Closing", "FailsIn", "First", "Forwarding", "Second", "Third"]
