"""A processor in a test: rows in, rows out, state and time in hand, without Spark's Java."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from stillstate.errors import InvalidData, InvalidPipeline, UserCodeError
from stillstate.testing import ProcessorTester

from .processors import OUT, ROWS, Accounts, AccountsInColumns, AccountsInPandas, Rated


def at(minute: float) -> datetime:
    """A time without a zone: in that of the process, as Spark takes it."""
    return (datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(minutes=minute)).astimezone().replace(tzinfo=None)


def by_watermark(processor: Any, **more: Any) -> ProcessorTester:
    return ProcessorTester(processor, ROWS, OUT, key="user", watermark=("at", "10 seconds"), **more)


FLAVOURS = [
    pytest.param(lambda: by_watermark(Accounts(by_watermark=True), time_mode="eventTime"), id="rows"),
    pytest.param(
        lambda: by_watermark(AccountsInPandas(by_watermark=True), time_mode="eventTime", pandas=True), id="pandas"
    ),
]


@pytest.mark.parametrize("tester_of", FLAVOURS)
def test_a_tester_has_timers_late_rows_and_a_watermark(tester_of: Any) -> None:
    """The watermark follows the rows, as behind a batch of a job; what it has passed is late, and timers fire."""
    tester = tester_of()
    tester.send([("ann", at(0), 1)])
    assert tester.watermark == datetime(2026, 1, 1, 11, 59, 50, tzinfo=UTC)
    assert tester.send([("ann", at(0.5), 5), ("ann", at(0.5), 6)]) == [("ann", 2, 11, "sum")]
    assert tester.timers("ann") == [datetime(2026, 1, 1, 12, 0, 50, tzinfo=UTC)]
    assert tester.state("amounts", "ann") == [(5,), (6,)]
    assert tester.send([("ann", at(0.25), 7)]) == []
    assert tester.output("late") == [Row(user="ann", at=at(0.25), amount=7)]
    assert tester.advance_watermark(at(3)) == [("ann", 2, 11, "end")]
    assert (tester.state("sums", "ann"), tester.state("amounts", "ann")) == (None, None)
    assert tester.state("days", "ann") == {("2026-01-01",): (3,)}
    assert tester.timers("ann") == []


def test_a_tester_has_the_clock_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers of processing time fire when it is let pass, and values with a TTL are gone."""
    tester = ProcessorTester(
        Accounts(by_watermark=False, ttl_ms=90_000), ROWS, OUT, key="user", time_mode="processingTime"
    )
    assert sorted(tester.send([("ann", at(0), 1), ("bob", at(0), 2)])) == [("ann", 1, 1, "sum"), ("bob", 1, 2, "sum")]
    assert tester.advance_time("59 seconds") == []
    tester.send([("ann", at(0), 10)])
    assert tester.advance_time("1 second") == [("bob", 1, 2, "end")]
    assert tester.states("sums") == {("ann",): (2, 11)}
    assert tester.advance_time(timedelta(seconds=90)) == [("ann", 0, 0, "end")], "its TTL was over at 149 seconds"
    assert tester.now == datetime(2026, 1, 1, 0, 2, 30, tzinfo=UTC)
    with pytest.raises(ValueError, match="time does not go back"):
        tester.advance_time("-1 second")


@pytest.mark.parametrize("tester_of", [*FLAVOURS, pytest.param(lambda: by_watermark(AccountsInColumns(), outputs={"large": OUT}), id="columns")])  # fmt: skip
def test_state_is_set_and_read_as_the_processor_would(tester_of: Any) -> None:
    tester = tester_of()
    for key in ("ann", "bob"):
        tester.set_state("sums", key, (41, 410))
    tester.set_state("amounts", "ann", [(4,), (5,)])
    tester.set_state("days", "ann", {("2025-12-31",): (7,)})
    assert tester.states("sums") == {("ann",): (41, 410), ("bob",): (41, 410)}
    assert tester.send([("ann", at(0), 1)])[0] == ("ann", 42, 411, "sum")
    assert tester.state("days", "ann")[("2025-12-31",)] == (7,)
    tester.set_state("amounts", "ann", None)
    assert tester.state("amounts", "ann") is None
    tester.set_state("sums", "bob", None)
    assert tester.state("sums", "bob") is None
    with pytest.raises(InvalidPipeline, match=r"has no state 'sum'; it has .*sums"):
        tester.state("sum", "ann")


def test_columns_side_outputs_and_due_values() -> None:
    tester = by_watermark(AccountsInColumns(), outputs={"large": OUT})
    sums = [("ann", 2, 120, "sum"), ("bob", 1, 1, "sum")]
    assert sorted(tester.send([("ann", at(0), 60), ("bob", at(1), 1), ("ann", at(1), 60)])) == sums
    assert tester.output("large") == sums[:1]
    assert tester.send([("cid", at(0.1), 1)]) == []
    assert tester.output("late") == [Row(user="cid", at=at(0.1), amount=1)]
    assert tester.output("large") == []
    assert sorted(tester.advance_watermark(at(2))) == [("ann", 2, 120, "end"), ("bob", 1, 1, "end")]


def test_connected_streams_by_name() -> None:
    """Rows of both meet; a watermark of one of them alone is that of the processor."""
    rates, orders = "code string, rate double", "id long, currency string, amount double"
    tester = ProcessorTester(
        Rated(),
        {"orders": orders, "rates": rates},
        "id long, euros double",
        key={"orders": "currency", "rates": "code"},
    )
    assert tester.send(rates=[("USD", 0.5)], orders=[(1, "USD", 10.0)]) == [(1, 5.0)]
    assert tester.send(orders=[{"id": 2, "currency": "USD", "amount": 4.0}]) == [(2, 2.0)]
    assert tester.states("rate") == {("USD",): (0.5,)}
    with pytest.raises(InvalidPipeline, match=r"send\(rows\): the inputs are orders=…, rates=…"):
        tester.send([(1,)])


def test_initial_state_comes_before_the_first_rows() -> None:
    initial = pd.DataFrame({"user": ["ann", "bob"], "n": [1, 2], "total": [10, 20]})
    tester = by_watermark(Accounts(by_watermark=True), time_mode="eventTime", initial_state=initial)
    assert tester.send([("ann", at(0), 1)])[0] == ("ann", 2, 11, "sum")
    assert tester.state("sums", "bob") == (2, 20)


@pytest.mark.parametrize(
    "rows",
    [
        [("ann", at(0), 1)],
        [Row(amount=1, at=at(0), user="ann")],
        [{"user": "ann", "at": at(0).astimezone(UTC), "amount": 1}],
        pd.DataFrame({"amount": [1], "user": ["ann"], "at": pd.to_datetime([at(0).astimezone(UTC)])}),
        pa.table({"user": ["ann"], "at": pa.array([at(0).astimezone(UTC)], pa.timestamp("us", "UTC")), "amount": [1]}),
    ],
    ids=["tuples", "Rows", "dictionaries", "pandas", "arrow"],
)
def test_rows_come_in_any_form(rows: Any) -> None:
    tester = by_watermark(Accounts(by_watermark=True), time_mode="eventTime")
    assert tester.send(rows)[0] == ("ann", 1, 1, "sum")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("ann", at(0))], "2 fields, the schema has 3"),
        ([{"user": "ann"}], "lacks at, amount; the columns are user, at, amount"),
        ([{"user": "ann", "at": at(0), "amount": 1, "x": 1}], "has x; the columns are"),
        ([("ann", at(0), "many")], "for field 'amount', which is declared as int64"),
        ("ann", "takes a list of rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_column(rows: Any, said: str) -> None:
    tester = by_watermark(Accounts(by_watermark=True), time_mode="eventTime")
    with pytest.raises(InvalidData, match=said):
        tester.send(rows)


class Poisoned(Accounts):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        raise ZeroDivisionError("an amount of zero")


def test_errors_of_the_processor_are_those_of_a_job_and_change_nothing() -> None:
    tester = by_watermark(Poisoned(by_watermark=True), time_mode="eventTime")
    with pytest.raises(UserCodeError, match="ZeroDivisionError: an amount of zero") as caught:
        tester.send([("ann", at(0), 1)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert tester.states("sums") == {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: by_watermark(Accounts, time_mode="eventTime"), "an instance, not the class"),
        (lambda: ProcessorTester(Accounts(by_watermark=True), ROWS, OUT, key="user", time_mode="eventTime"), "event time"),
        (lambda: by_watermark(Accounts(by_watermark=True), time_mode="event"), "must be none, processingTime or eventTime"),
        (lambda: ProcessorTester(Accounts(by_watermark=True), ROWS, OUT, key="nobody"), "no key column 'nobody'"),
        (lambda: ProcessorTester(Accounts(by_watermark=True), "user strin", OUT, key="user"), "cannot be parsed"),
        (lambda: ProcessorTester(Accounts(by_watermark=True), ROWS, OUT, key="user", watermark=("amount", "1 s")), "needs a timestamp"),
        (lambda: ProcessorTester(Accounts(by_watermark=True), ROWS, OUT, key="user").advance_watermark(at(0)), "needs a watermark"),
    ],
    ids=["class", "no watermark", "mode", "key", "schema", "mark", "advance"],
)  # fmt: skip
def test_what_no_job_could_run_is_refused(make: Any, said: str) -> None:
    with pytest.raises(InvalidPipeline, match=said):
        make()


class Again(StatefulProcessor):
    """Its timer always sets the next one, due at once."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() - 1)
        return iter(())

    def close(self) -> None:
        pass


def test_timers_that_never_end_are_an_error_and_no_hang() -> None:
    tester = ProcessorTester(Again(), "k long", "k long", key="k", time_mode="processingTime")
    with pytest.raises(InvalidPipeline, match="after 1000 epochs timers still set timers"):
        tester.send([(1,)])


def test_the_tester_starts_no_java() -> None:
    """It would take seconds, and many machines that run unit tests have none."""
    program = (
        "from pyspark import SparkContext\n"
        "from tests.testers.test_processor_tester import by_watermark, at, Accounts\n"
        "tester = by_watermark(Accounts(by_watermark=True), time_mode='eventTime')\n"
        "assert tester.send([('ann', at(0), 1)])[0] == ('ann', 1, 1, 'sum')\n"
        "assert SparkContext._active_spark_context is None and SparkContext._gateway is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": "", "JAVA_HOME": "/nowhere"}, timeout=120)
