"""The shop, end to end: Kafka in; Delta, PostgreSQL and Kafka out, exactly once, while everything is killed in turn.

``python -m examples.shop.demo`` (or ``make demo-kafka``). It starts a broker, a database and Dagster, sends orders and
payments, kills the job's driver, the broker, the database and all of the job's processes with SIGKILL, and at the end
compares each output with a recomputation from the topics. Exit code 0 only if everything in the printed list holds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Final

from deltalake import DeltaTable
from rich.console import Console

from examples.servers.checklist import CheckFailed, Checklist
from examples.servers.dagster import ROOT, DagsterRefused, NotADemoFolder, WaitedTooLong, wait_for
from examples.servers.kafka import BrokerMissing
from examples.shop.job import ORDERS_MIN
from examples.shop.oracle import Expected, expected_of, read_topic
from examples.shop.stack import JOB, ShopStack
from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.launchers.processes import process_of

DEFAULT_WORK: Final = ROOT / ".demo-kafka"
SECONDS: Final = 20_000
RATE: Final = 200.0
_START_S: Final = 180.0
_BACK_S: Final = 180.0
_WARNED_S: Final = 90.0
_DRAIN_S: Final = 600.0
_STOP_S: Final = 120.0
_TOLD_EVERY_S: Final = 10.0
_CHECKPOINTS_WITHOUT: Final = 3


class Demo:
    """The steps, in the order of `run`."""

    def __init__(self, stack: ShopStack, checklist: Checklist, seconds: int, rate: float) -> None:
        self._stack = stack
        self._list = checklist
        self._seconds, self._rate = seconds, rate
        self._told_s = monotonic()

    def run(self) -> None:
        """Check everything.

        Raises:
            CheckFailed, WaitedTooLong, DagsterRefused, StillstateError: something does not hold.
        """
        self._start()
        self._reads_beyond(0.15)
        self._kill_driver("the driver is killed", of_all=False)
        self._reads_beyond(0.35)
        self._kill_broker()
        self._reads_beyond(0.6)
        self._kill_database()
        self._reads_beyond(0.8)
        self._kill_driver("all of the job's processes are killed", of_all=True)
        self._all_is_read()
        self._stop()
        self._outputs_are_right()

    def _start(self) -> None:
        stack = self._stack
        self._list.note(f"Kafka {stack.broker.bootstrap}, PostgreSQL {stack.database.dsn()}; starting Dagster")
        stack.start_dagster()
        self._list.note(f"Dagster: {stack.dagster.url}/assets/{JOB}/stream")
        stack.start_producer(self._seconds, self._rate)
        run_id = stack.dagster.launch(f"start_{JOB}")
        stack.dagster.wait_for_run(run_id, f"the Dagster job start_{JOB}", _START_S)
        status = self._status()
        self._list.holds("the job was started through Dagster", status is not None, f"run {run_id[:8]}")

    def _kill_driver(self, what: str, *, of_all: bool) -> None:
        status = self._status()
        process = None if status is None else process_of(status, JOB)
        if status is None or process is None:
            raise CheckFailed(f"there is no driver to kill: {status}")
        group, at_s = os.getpgid(process.pid), monotonic()
        if of_all and group != status.supervisor_pid:
            raise CheckFailed(f"process {process.pid} is in a group of another's; killing {group} is not safe")
        os.killpg(group, signal.SIGKILL) if of_all else os.kill(process.pid, signal.SIGKILL)
        self._list.note(f"killed {'process group' if of_all else 'process'} {group if of_all else process.pid}")
        found = self._wait("a checkpoint of the next run", lambda: self._checkpoint_above(status.term), _BACK_S)
        self._list.holds(
            f"{what}, and the job is back without help",
            found > status.term,
            f"term {status.term} → {found}, next checkpoint after {monotonic() - at_s:.0f} s",
        )

    def _kill_broker(self) -> None:
        self._stack.broker.kill()
        self._list.note("killed the broker")
        warned = self._wait("Dagster's check driver_alive to warn", self._alive_warning, _WARNED_S)
        self._list.holds("the broker is killed, and Dagster says so", "nothing is read since" in warned, warned)
        self._stack.broker.start()
        self._list.note("the broker is back")

    def _kill_database(self) -> None:
        before = self._status() or self._gone()
        self._stack.database.kill()
        self._list.note("killed the database")
        away = self._wait("checkpoints without the database", lambda: self._goes_on_without_a_sink(before), _BACK_S)
        self._list.holds(
            "the database is killed, and state, checkpoints and the other sinks go on",
            away.term == before.term,
            f"term {away.term}, snapshot {before.snapshot_id} → {away.snapshot_id}; what waits: "
            + ", ".join(f"{sink.epochs} epochs of {sink.name}" for sink in away.sinks),
        )
        self._stack.database.start()
        self._list.note("the database is back")
        self._wait("what waited to be published", lambda: not (self._status() or self._gone()).sinks, _BACK_S)

    def _goes_on_without_a_sink(self, before: RunStatus) -> RunStatus | None:
        status = self._status()
        is_on = status is not None and status.sinks and status.snapshot_id >= before.snapshot_id + _CHECKPOINTS_WITHOUT
        return status if is_on else None

    def _alive_warning(self) -> str | None:
        """What the newest check of the driver says, if it warns of a source."""
        execution = self._stack.dagster.check((JOB, "stream"), "driver_alive")
        return execution if execution is not None and "source" in execution else None

    def _all_is_read(self) -> None:
        def all_read() -> bool:
            if self._stack.producer_exit_code() not in (None, 0):
                raise CheckFailed(f"the producer ended with exit code {self._stack.producer_exit_code()}")
            status = self._status()
            if self._stack.producer_exit_code() is None or status is None or not status.quiet:
                return False
            return len(status.sources) == 2 and all(s.behind == 0 and not s.away_since_ms for s in status.sources)

        self._wait("all events to be read", all_read, _DRAIN_S)
        behind = {s.name: s.behind for s in (self._status() or self._gone()).sources}
        self._list.holds("all events are read", set(behind.values()) == {0}, f"behind: {behind}")

    def _stop(self) -> None:
        run_id = self._stack.dagster.launch(f"stop_{JOB}")
        self._stack.dagster.wait_for_run(run_id, f"the Dagster job stop_{JOB}", _STOP_S)

    def _outputs_are_right(self) -> None:
        servers = self._stack.broker.bootstrap
        self._list.note("recomputing every output from the topics")
        expected = expected_of(read_topic(servers, "orders"), read_topic(servers, "payments"), ORDERS_MIN)
        self._compare("the Delta table of paid orders", self._paid(), Counter(expected.paid))
        self._compare("PostgreSQL's totals of each shop", self._totals(), Counter(_totals_of(expected)))
        self._compare("the topic of alerts", _alerts(read_topic(servers, "alerts")), Counter(expected.alerts))

    def _compare(self, what: str, found: Counter[Any], expected: Counter[Any]) -> None:
        missing, surplus = expected - found, found - expected
        self._list.holds(
            f"{what}: each row once, equal to the recomputation",
            found == expected and bool(expected),
            f"{found.total():,} rows; {missing.total()} missing, {surplus.total()} surplus",
        )

    def _paid(self) -> Counter[Any]:
        rows = DeltaTable(str(self._stack.lake)).to_pyarrow_table(columns=["order", "paid_at"]).to_pylist()
        return Counter((row["order"], row["paid_at"]) for row in rows)

    def _totals(self) -> Counter[Any]:
        return Counter(self._stack.database.execute("SELECT shop, orders, sales FROM shop_totals"))

    def _reads_beyond(self, share: float) -> None:
        self._list.note(f"waiting until {share:.0%} of the orders are in PostgreSQL's totals")
        wanted = int(share * self._seconds)
        self._wait(f"{wanted:,} orders", lambda: self._orders_out() >= wanted, _DRAIN_S)

    def _orders_out(self) -> int:
        exists = self._stack.database.execute("SELECT to_regclass('shop_totals') IS NOT NULL")[0][0]
        return (
            int(self._stack.database.execute("SELECT coalesce(sum(orders), 0) FROM shop_totals")[0][0]) if exists else 0
        )

    def _checkpoint_above(self, term: int) -> int | None:
        newest = self._stack.catalog().latest()
        return newest.term if newest is not None and newest.term > term and newest.kind == "checkpoint" else None

    def _status(self) -> RunStatus | None:
        status = self._stack.catalog().status()
        return status if status is not None and status.state == "running" else None

    def _gone(self) -> RunStatus:
        raise CheckFailed("the job does not run any more")

    def _wait(self, what: str, probe: Callable[[], Any], timeout_s: float) -> Any:
        """Wait, and say every ten seconds how far it is: a demo that is silent looks as if it hung."""

        def told() -> Any:
            found = probe()
            if not found and monotonic() - self._told_s > _TOLD_EVERY_S:
                self._told_s = monotonic()
                self._list.note(f"waiting for {what}; {self._how_far()}")
            return found

        return wait_for(what, told, timeout_s, poll_s=0.5)

    def _how_far(self) -> str:
        status = self._stack.catalog().status()
        if status is None:
            return "no run yet"
        epoch = status.progress.epoch if status.progress is not None else 0
        sources = ", ".join(
            f"{s.name} {'away' if s.away_since_ms else 'not read yet' if s.behind < 0 else f'{s.behind:,} behind'}"
            for s in status.sources
        )
        return f"term {status.term} {status.state}, epoch {epoch}" + (f", {sources}" if sources else "")


def _totals_of(expected: Expected) -> list[tuple[int, int, int]]:
    return [(shop, orders, sales) for shop, (orders, sales) in expected.totals.items()]


def _alerts(records: list[dict[str, Any]]) -> Counter[Any]:
    return Counter((r["customer"], datetime.fromisoformat(r["began"]).astimezone(UTC), r["orders"]) for r in records)


def demo(work: Path, *, port: int, seconds: int, rate: float, console: Console) -> int:
    """Run it; return the exit code. Nothing that it started runs afterwards."""
    checklist = Checklist(console, "demo-kafka")
    failures = (CheckFailed, WaitedTooLong, DagsterRefused, StillstateError, subprocess.TimeoutExpired)
    checklist.note("starting a Kafka broker and a PostgreSQL server")
    with ShopStack(work, port=port) as stack:
        try:
            Demo(stack, checklist, seconds, rate).run()
        except failures as error:
            checklist.print_table()
            console.print(stack.tails(), markup=False, highlight=False)
            console.print(f"demo-kafka failed: {type(error).__name__}: {error}", style="red", markup=False)
            console.print(f"Everything is still in {stack.work}", markup=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted")
            return 130
    checklist.print_table()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Kafka in; Delta, PostgreSQL and Kafka out, while driver, broker and database are killed in turn."""
    parser = argparse.ArgumentParser(prog="python -m examples.shop.demo", description=main.__doc__)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for all data (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port of Dagster's web page (default: a free one)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of event time, one order each (%(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="seconds of event time a second (%(default)s)")
    arguments = parser.parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        return demo(
            arguments.work, port=arguments.port, seconds=arguments.seconds, rate=arguments.rate, console=console
        )
    except (NotADemoFolder, BrokerMissing, FileNotFoundError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
