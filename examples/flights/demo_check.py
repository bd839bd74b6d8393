"""The demo without a person: it kills the driver three times, once with all of the job's processes, and proves that the
result is right.

``python -m examples.flights.demo_check`` (or ``make demo-check``). Ends by itself; exit code 0 only if everything in
the printed list holds, 1 if something does not, 2 if it could not begin.

How a driver is killed *in the middle of an epoch*: its whole process group is frozen (SIGSTOP), the files of the epoch
are looked at while nothing moves, and only if the epoch is where it should be does SIGKILL follow; otherwise the
group is woken and the next epoch is tried. So each kill hits the moment that the list names, on a machine of any speed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

from rich.console import Console

from examples.flights import oracle
from examples.flights.data import FLIGHTS_2013, FlightsChanged, FlightsMissing
from examples.flights.demo import ProgressReader
from examples.flights.moments import MOMENTS, EpochFiles, Moment
from examples.flights.replay import DAYS_IN_YEAR
from examples.flights.screenshots import BrowserMissing, take_screenshots
from examples.flights.stack import CONFIG, JOB, RECOVER_JOB, START_JOB, STOP_JOB, Stack
from examples.servers.checklist import CheckFailed, Checklist
from examples.servers.dagster import ROOT, DagsterRefused, Materialization, NotADemoFolder, WaitedTooLong, wait_for
from state_runtime.base.errors import Fenced, StillstateError
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.spark.session import build_session
from stillstate.assets.metadata import DATA_VERSION_TAG
from stillstate.orchestration.jobs.tags import ACTION_TAG, JOB_TAG, TERM_TAG
from stillstate.orchestration.launchers.log_files import newest_log
from stillstate.orchestration.launchers.processes import process_of
from stillstate.orchestration.running.memory import has_room_for_standby

DEFAULT_WORK: Final = ROOT / ".demo-check"
CHECKPOINTS_MIN: Final = 20
SPEED: Final = DAYS_IN_YEAR / 400
"""Days of 2013 per second at first: slow enough that there is an epoch to kill when a driver stands by, which takes it
more than a minute after each start on two cores."""

SPEED_OF_REST: Final = DAYS_IN_YEAR / 80
"""Faster than the job: of what is not delivered when the second driver was turned away."""

KILLS: Final = ((0.10, MOMENTS[0], False), (0.35, MOMENTS[1], False), (0.70, MOMENTS[2], True))
"""After which share of the year's flights, and at which moment of an epoch, each kill happens; and whether it takes the
process beside the driver, too, which starts it again: then Dagster is left."""

# Bounds of the waits, in seconds; several times what two cores need.
_START_S: Final = 120.0
_PROGRESS_S: Final = 120.0
_MOMENT_S: Final = 60.0
_RECOVERY_S: Final = 120.0
_SECOND_DRIVER_S: Final = 120.0
_STANDBY_S: Final = 120.0
_STOP_S: Final = 90.0
_SENSOR_S: Final = 60.0

_MOMENT_POLL_S: Final = 0.0005  # some moments last a few milliseconds


@dataclass(frozen=True)
class Kill:
    """One driver that was killed."""

    term: int
    moment: str
    snapshot_id: int
    at_s: float
    is_of_all: bool


class Checker:
    """The steps of the check, in the order of ``run``."""

    def __init__(self, stack: Stack, checklist: Checklist) -> None:
        self._stack = stack
        self._list = checklist
        self._catalog = stack.catalog()
        self._progress = ProgressReader(self._catalog)
        self._kills: list[Kill] = []

    def run(self, screenshots: Path | None) -> None:
        """Check everything.

        Raises:
            CheckFailed, WaitedTooLong, DagsterRefused, StillstateError: Something does not hold.
        """
        self._start()
        for share, moment, is_of_all in KILLS:
            self._wait_for_flights(int(FLIGHTS_2013 * share))
            if not is_of_all:
                self._a_driver_stands_by()
            self._recovered(self._kill(moment, is_of_all=is_of_all))
            if len(self._kills) == 2:
                self._second_driver_is_turned_away()
                self._first_goes_on()
        self._wait_for_flights(FLIGHTS_2013)
        self._input_is_complete()
        self._one_recovery_run_per_failure()
        self._checkpoints_are_in_dagster()
        if screenshots is not None:
            self._take_screenshots(screenshots)
        self._stop()
        self._output_is_right()

    def _start(self) -> None:
        stack = self._stack
        self._list.note("making the year of flights, starting Dagster")
        year = stack.year
        stack.start_dagster()
        daemons = stack.dagster.daemons()
        self._list.holds(
            "Dagster's web server and daemon are up",
            all(daemons.values()),
            f"{stack.dagster.url}, {len(daemons)} daemons",
        )
        stack.start_replay(SPEED)
        self._list.note(f"replaying {year.name}, {SPEED:.1f} days a second; launching {START_JOB}")
        run_id = stack.dagster.launch(START_JOB)
        stack.dagster.wait_for_run(run_id, f"the Dagster job {START_JOB}", _START_S)
        status = self._running()
        self._list.holds(
            "the job was started through Dagster",
            status is not None and status.term == 1,
            f"run {run_id[:8]}, term {status.term if status else None}",
        )

    def _a_driver_stands_by(self) -> None:
        """Wait until the driver beside the one that works is ready, as it is at any time but the first minute after a
        start. A machine without room for one has none."""
        if not has_room_for_standby():
            self._list.note("no driver stands by: too little memory is free")
            return
        _, job = self._stack.spec()

        def is_ready() -> bool:
            log = newest_log(job)
            said = log.read_text("utf-8", errors="replace") if log is not None else ""
            return " stands by" in said.rpartition(" takes over")[2]

        wait_for("a driver that stands by", is_ready, _STANDBY_S)

    def _kill(self, moment: Moment, *, is_of_all: bool) -> Kill:
        status = self._catalog.status()
        if status is None or (process := process_of(status, JOB)) is None:
            raise CheckFailed(f"there is no driver to kill: {status}")
        group = os.getpgid(process.pid)
        if group != status.supervisor_pid:
            raise CheckFailed(f"process {process.pid} is in a group of another's; killing {group} is not safe")
        files = EpochFiles(self._stack.work, self._catalog, status.term)
        deadline, pause, tries = monotonic() + _MOMENT_S, threading.Event(), 0
        while True:
            if moment.holds(files) and (tries := tries + 1):
                os.killpg(group, signal.SIGSTOP)
                found = moment.holds(files)
                if found:
                    kill = Kill(status.term, moment.name, files.committed(), monotonic(), is_of_all)
                    os.killpg(group, signal.SIGKILL) if is_of_all else os.kill(process.pid, signal.SIGKILL)
                if not (found and is_of_all):
                    os.killpg(group, signal.SIGCONT)
                if found:
                    break
            if monotonic() > deadline:
                raise WaitedTooLong(f"waited {_MOMENT_S:g} s for an epoch in which {moment.name} ({tries} near misses)")
            pause.wait(_MOMENT_POLL_S)
        self._kills.append(kill)
        self._list.note(
            f"killed {f'process group {group}' if is_of_all else f'process {process.pid}'} (term {kill.term}) while "
            f"{kill.moment}, after snapshot {kill.snapshot_id}"
        )
        return kill

    def _recovered(self, kill: Kill) -> None:
        def next_term() -> RunStatus | None:
            status = self._running()
            return status if status is not None and status.term > kill.term else None

        status = wait_for("the driver to be brought back", next_term, _RECOVERY_S)
        back_s = monotonic() - kill.at_s

        def progressed() -> bool:
            newest = self._catalog.latest()
            return newest is not None and newest.term > kill.term and newest.kind == "checkpoint"

        wait_for(f"the first checkpoint of term {status.term}", progressed, _PROGRESS_S)
        self._list.holds(
            f"kill {len(self._kills)}{', of all of its processes' if kill.is_of_all else ''}, while {kill.moment}: "
            "back without help",
            status.term == kill.term + 1,
            f"term {kill.term} → {status.term}; running after {back_s:.0f} s, "
            f"next checkpoint after {monotonic() - kill.at_s:.0f} s",
        )

    def _second_driver_is_turned_away(self) -> None:
        self._list.note("starting a second driver by hand, beside the first")
        second = subprocess.run(
            [sys.executable, "-m", "stillstate.orchestration.cli", "run", JOB, "--config", str(CONFIG)],
            cwd=self._stack.work,
            env=self._stack.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECOND_DRIVER_S,
        )
        last_line = (second.stderr.strip() or second.stdout.strip() or "it said nothing").splitlines()[-1]
        self._list.note(f"the second driver said: {last_line}")
        self._list.holds(
            "a second driver beside the first is fenced and ends with its own exit code",
            second.returncode == Fenced.exit_code,
            f"exit code {second.returncode}",
        )

    def _first_goes_on(self) -> None:
        term = self._kills[-1].term + 1
        newest = self._catalog.latest()
        reached = newest.snapshot_id if newest is not None else 0
        self._stack.start_replay(SPEED_OF_REST)

        def new_checkpoint() -> Manifest | None:
            newest = self._catalog.latest()
            return newest if newest is not None and newest.snapshot_id > reached else None

        found = wait_for("the first driver's next checkpoint", new_checkpoint, _PROGRESS_S)
        status = self._running()
        self._list.holds(
            "and the first goes on",
            found.term == term and status is not None and status.term == term,
            f"snapshot {found.snapshot_id} of term {found.term}",
        )

    def _input_is_complete(self) -> None:
        self._list.holds(
            "the whole input is committed",
            self._progress.flights == FLIGHTS_2013,
            f"{self._progress.flights:,} flights",
        )
        self._list.holds(
            f"at least {CHECKPOINTS_MIN} checkpoints",
            self._progress.checkpoints >= CHECKPOINTS_MIN,
            f"{self._progress.checkpoints}",
        )

    def _one_recovery_run_per_failure(self) -> None:
        runs = self._stack.dagster.runs({JOB_TAG: JOB, ACTION_TAG: "recover"})
        terms = sorted(int(run.tags.get(TERM_TAG, "-1")) for run in runs)
        wanted = sorted(kill.term for kill in self._kills if kill.is_of_all)
        ok = terms == wanted and all(run.status == "SUCCESS" and run.job == RECOVER_JOB for run in runs)
        found = ", ".join(f"term {run.tags.get(TERM_TAG)}: {run.status}" for run in reversed(runs)) or "none"
        self._list.holds("exactly one recovery run, of the kill that left nothing", ok, found)

    def _checkpoints_are_in_dagster(self) -> None:
        newest = max(self._progress.checkpoint_ids)

        def published() -> list[Materialization] | None:
            found = self._stack.dagster.materializations((JOB, "checkpoints"))
            return found if found and int(found[0].tags[DATA_VERSION_TAG]) == newest else None

        events = wait_for("the newest checkpoint to be a materialization in Dagster", published, _SENSOR_S, poll_s=1)
        numbers = frozenset.intersection(*(frozenset(event.numbers) for event in events))
        needed = {"epoch_p50_s", "interval_log_bytes", "interval_input_rows", "state_rows", "log_bytes"}
        versions = [event.tags[DATA_VERSION_TAG] for event in events]
        self._list.holds(
            "every interval is one materialization in Dagster, with its numbers",
            len(set(versions)) == len(versions) and needed <= numbers,
            f"{len(events)} materializations, each with {len(numbers)} numbers",
        )

    def _take_screenshots(self, folder: Path) -> None:
        for path in take_screenshots(self._stack.dagster, folder):
            self._list.note(f"screenshot {path}")

    def _stop(self) -> None:
        run_id = self._stack.dagster.launch(STOP_JOB)
        self._stack.dagster.wait_for_run(run_id, f"the Dagster job {STOP_JOB}", _STOP_S)
        status = self._catalog.status()
        self._list.holds(
            "the job was stopped through Dagster",
            status is not None and status.state == "stopped",
            f"{status and status.state}",
        )

    def _output_is_right(self) -> None:
        self._list.note("recomputing the year with Spark SQL")
        spark = build_session("flights-oracle", master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})
        try:
            report = oracle.compare(
                spark, self._stack.legs, self._stack.by_carrier, self._stack.year, console=self._list.console
            )
        finally:
            spark.stop()
        self._list.holds(
            "one row a flight, equal to the recomputation row for row",
            report.legs_equal and report.legs_expected == FLIGHTS_2013,
            f"{report.legs_found:,} rows; {report.legs_missing} missing, {report.legs_surplus} surplus",
        )
        self._list.holds(
            "the newest figures of every carrier and airport are equal, too",
            report.equal,
            f"{report.keys_found} keys; {report.keys_missing} missing, {report.keys_surplus} surplus",
        )

    def _wait_for_flights(self, flights: int) -> None:
        """Wait until so many flights are committed; each step forward begins the wait anew."""
        self._list.note(f"waiting for {flights:,} committed flights")
        seen = -1

        def more() -> bool:
            if self._stack.replay_exit_code() not in (None, 0):
                raise CheckFailed(f"the replay ended with exit code {self._stack.replay_exit_code()}")
            self._progress.update()
            return self._progress.flights > seen

        while self._progress.flights < flights:
            seen = self._progress.flights
            wait_for(f"more than {seen:,} committed flights", more, _PROGRESS_S)

    def _running(self) -> RunStatus | None:
        status = self._catalog.status()
        return status if status is not None and status.state == "running" else None


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM end the check as Ctrl-C does, so that its processes end, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check(work: Path, *, port: int, screenshots: Path | None, console: Console) -> int:
    """Run the whole check; return the exit code. Nothing that it started runs afterwards."""
    checklist = Checklist(console, "demo-check")
    failures = (CheckFailed, WaitedTooLong, DagsterRefused, BrowserMissing, StillstateError, subprocess.TimeoutExpired)
    with _orderly_end(), Stack(work, port=port, fresh=True) as stack:
        try:
            Checker(stack, checklist).run(screenshots)
        except failures as error:
            checklist.print_table()
            console.print(stack.tails(), markup=False, highlight=False)
            console.print(f"demo-check failed: {type(error).__name__}: {error}", style="red", markup=False)
            console.print(f"Everything is still in {stack.work}", markup=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted")
            return 130
    checklist.print_table()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the demo without a person, kill its driver three times, and check that nothing was lost or repeated."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights.demo_check", description=main.__doc__)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for all data (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port of Dagster's web page (default: a free one)")
    parser.add_argument(
        "--screenshots", type=Path, metavar="DIR", help="take pictures of Dagster's pages with Chromium"
    )
    arguments = parser.parse_args(argv)
    # A log file has no width; rich would take 80 characters.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        return check(arguments.work, port=arguments.port, screenshots=arguments.screenshots, console=console)
    except (NotADemoFolder, FlightsMissing, FlightsChanged) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
