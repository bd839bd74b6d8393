"""A source is called quiet only after it was asked and had nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model import FakeClock

from state_runtime.driver.source_quiet import LONG_QUIET_S, LongQuiet, SourceQuiet, is_idle


@dataclass
class Query:
    """Spark's query, as far as it says anything."""

    is_working: bool = False
    has_data: bool = False
    lastProgress: dict[str, Any] | None = None
    decoded: int = 0

    @property
    def status(self) -> dict[str, Any]:
        return {"message": "", "isTriggerActive": self.is_working, "isDataAvailable": self.has_data}

    def __getattribute__(self, name: str) -> Any:
        if name == "lastProgress":
            self.decoded += 1
        return super().__getattribute__(name)


def test_a_source_that_nobody_has_asked_is_not_quiet() -> None:
    """A query that opens its source says what an idle one says: no trigger is active, and no data is known."""
    query = Query()
    is_quiet = SourceQuiet(query)
    assert is_idle(query)
    assert not is_quiet()
    query.is_working = True  # its first trigger asks the source, which may take its time
    assert not is_quiet()
    query.is_working, query.lastProgress = False, {"batchId": 0}
    assert is_quiet()


def test_a_source_that_has_something_is_not_quiet() -> None:
    query = Query(lastProgress={"batchId": 3})
    is_quiet = SourceQuiet(query)
    query.has_data = True  # a batch has ended, and Spark has not looked since
    assert not is_quiet()
    query.has_data, query.is_working = False, True
    assert not is_quiet()
    query.is_working = False
    assert is_quiet()


def test_progress_is_decoded_until_it_is_there_and_never_again() -> None:
    query = Query()
    is_quiet = SourceQuiet(query)
    for _ in range(3):
        is_quiet()
    query.lastProgress = {"batchId": 0}
    before = query.decoded
    for _ in range(5):
        assert is_quiet()
    assert (before, query.decoded) == (3, 4)


def test_a_source_is_quiet_for_long_without_a_break() -> None:
    """Its rows may come every few seconds, and the next may be the one that a run on trial fails at."""
    clock, said = FakeClock(), [True]
    is_long_quiet = LongQuiet(lambda: said[-1], clock)
    for is_quiet in (True, False, True):
        said.append(is_quiet)
        for _ in range(int(LONG_QUIET_S)):
            assert not is_long_quiet()
            clock.advance_s(1.0)
    assert is_long_quiet()
    said.append(False)
    assert not is_long_quiet()


def test_a_source_that_is_asked_again_all_the_time_has_nothing_all_the_while() -> None:
    """A query without a trigger of its own is seldom seen between two questions: that breaks no silence."""
    query, clock = Query(lastProgress={"batchId": 3}), FakeClock()
    is_long_quiet = LongQuiet(SourceQuiet(query).has_nothing, clock)
    for second in range(int(LONG_QUIET_S)):
        query.is_working = second % 2 == 0
        assert not is_long_quiet()
        clock.advance_s(1.0)
    query.is_working = True
    assert is_long_quiet()
    query.has_data = True
    assert not is_long_quiet()
