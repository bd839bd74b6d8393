"""The demo, to watch: Dagster with its web page, the flights job, and the year arriving in five minutes.

``python -m examples.flights.demo`` (or ``make demo``). Ctrl-C stops the job, the replay and Dagster, in this order.
Started again, it goes on where it stopped; ``--fresh`` begins a new year.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from datetime import date, timedelta
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from examples.flights.data import FLIGHTS_2013, FlightsChanged, FlightsMissing
from examples.flights.replay import DAYS_IN_YEAR, DEFAULT_SPEED, InboxNotContiguous, delivered_flights
from examples.flights.stack import CONFIG, JOB, START_JOB, STOP_JOB, Stack
from examples.servers.dagster import ROOT, DagsterRefused, NotADemoFolder, WaitedTooLong, free_port
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError
from state_runtime.snapshot.catalog import Catalog
from stillstate.orchestration.text import bytes_text, count_text

DEFAULT_WORK: Final = ROOT / ".demo"
"""Where ``stillstate.yaml`` beside this file puts everything if nothing else is said."""

_USUAL_PORT: Final = 3000
_REFRESH_S: Final = 0.5
_START_S: Final = 180.0
_NEW_YEAR: Final = date(2013, 1, 1)


class ProgressReader:
    """Adds up the epochs that were committed so far; each manifest is read once.

    Args:
        catalog: The job's snapshots.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._last = 0
        self.flights = 0
        self.checkpoint_ids: set[int] = set()
        self.log_bytes = 0
        self.table_bytes = 0
        self.state_rows = 0
        self.checkpoint_ms = 0.0

    @property
    def checkpoints(self) -> int:
        """How many there are."""
        return len(self.checkpoint_ids)

    def update(self) -> None:
        """Read what is new."""
        for snapshot_id in self._catalog.snapshot_ids(after=self._last):
            try:
                manifest = self._catalog.manifest(snapshot_id)
            except StillstateError:
                return  # its folder is there and its manifest is not, yet: read it the next time
            self._last = snapshot_id
            self.log_bytes, self.table_bytes = manifest.log_bytes, manifest.table_bytes
            if manifest.kind == "checkpoint" and manifest.progress is not None:
                self.checkpoint_ids.add(snapshot_id)
                self.flights += manifest.progress.input_rows
                self.state_rows = manifest.progress.state_rows
                self.checkpoint_ms = manifest.progress.checkpoint_ms


def what_to_look_at(stack: Stack) -> str:
    """The addresses with a line on what each shows, and what to try; plain lines, to be copied from."""
    url = stack.dagster.url
    # Only where the folder is not the one that the configuration names by itself.
    where = "" if stack.work == DEFAULT_WORK else f"FLIGHTS_WORK={stack.work} "
    return f"""
[bold]Dagster: {url}[/]

  {url}/asset-groups
      the asset graph: the stream, and its checkpoints
  {url}/assets/{JOB}/checkpoints
      the checkpoints; Metadata → Plots shows durations, bytes and rows
  {url}/automation
      the sensors: progress, recovery, materialization
  {url}/runs
      starts, stops and recoveries

Kill the driver, and watch it come back: the line "try" below has the command, with the number of its process.
Ask the command line, in another terminal:
  {where}{_program("stillstate")} jobs --config {_short(CONFIG)}

[bold]Ctrl-C stops everything.[/]
"""


def _program(name: str) -> Path:
    """One of this environment's programs, as a shell outside of it can call it."""
    return _short(Path(sys.executable).with_name(name))


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def status_table(stack: Stack, catalog: Catalog, progress: ProgressReader) -> Table:
    """How far the replay and the job are."""
    progress.update()
    status = catalog.status()
    delivered = delivered_flights(stack.inbox)
    table = Table.grid(padding=(0, 2))
    day = _NEW_YEAR + timedelta(days=DAYS_IN_YEAR * delivered / FLIGHTS_2013 - 1) if delivered else _NEW_YEAR
    table.add_row("replay", f"{delivered:,} of {FLIGHTS_2013:,} flights delivered, about {day}")
    if status is None:
        table.add_row("job", "not started")
        return table
    age_s = status.age_s(SYSTEM_CLOCK.now_ms())
    if status.state == "running":
        table.add_row("try", f"kill -9 {status.pid}")
    table.add_row("job", f"{status.state}, run {status.term}, process {status.pid}, heartbeat {age_s:.1f} s ago")
    table.add_row(
        "done",
        f"{progress.flights:,} flights in {progress.checkpoints:,} checkpoints; the last took "
        f"{progress.checkpoint_ms:.0f} ms",
    )
    table.add_row(
        "state",
        f"{count_text(progress.state_rows)} rows; changelog {bytes_text(progress.log_bytes)}, "
        f"tables {bytes_text(progress.table_bytes)}",
    )
    if progress.flights >= FLIGHTS_2013:
        table.add_row("", "[green]The year is over.[/] Compare the result with a recomputation (after Ctrl-C):")
        table.add_row("", f"  {_program('python')} -m examples.flights.oracle --year {_short(stack.year)} \\")
        table.add_row("", f"    --legs {_short(stack.legs)} --by-carrier {_short(stack.by_carrier)}")
    return table


def watch(stack: Stack, console: Console) -> None:
    """Show the progress until Ctrl-C.

    Raises:
        KeyboardInterrupt: The only end without an error.
        DagsterRefused: The replay ended with an error.
    """
    catalog = stack.catalog()
    progress = ProgressReader(catalog)
    pause = threading.Event()
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            live.update(Panel(status_table(stack, catalog, progress), title=JOB))
            if stack.replay_exit_code() not in (None, 0):
                raise DagsterRefused(f"the replay ended with exit code {stack.replay_exit_code()}")
            pause.wait(_REFRESH_S)


def start_and_watch(stack: Stack, speed: float, console: Console) -> None:
    """Start everything, then watch; see there for how it ends."""
    console.print("Preparing the year's flights, and starting Dagster …")
    year = stack.year
    stack.start_dagster()
    console.print(what_to_look_at(stack), soft_wrap=True, highlight=False)
    stack.start_replay(speed)
    console.print(f"{year.name} is being replayed; launching the Dagster job {START_JOB} …")
    launched = stack.dagster.launch(START_JOB)
    stack.dagster.wait_for_run(launched, f"the Dagster job {START_JOB}", _START_S)
    watch(stack, console)


def run(work: Path, *, speed: float, port: int, fresh: bool, console: Console) -> int:
    """Run the demo until Ctrl-C (or SIGTERM); return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Stack(work, port=port, fresh=fresh) as stack:
        try:
            start_and_watch(stack, speed, console)
        except (WaitedTooLong, DagsterRefused, StillstateError, InboxNotContiguous) as error:
            console.print(f"[red]{type(error).__name__}:[/] {error}")
            console.print(stack.tails(), markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            console.print(f"Stopping, as the Dagster job {STOP_JOB} would …")
        try:
            console.print(f"The job: {stack.stop_driver()}.")
        except (StillstateError, KeyboardInterrupt) as error:
            # A second Ctrl-C, or a driver that does not answer: it is killed with the rest, which loses no data.
            console.print(f"[yellow]The job did not stop in order ({error or 'interrupted'}).[/]")
    console.print("All stopped. Run the same command again to go on, or with --fresh for a new year.")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Start Dagster, the flights job and the replay; show the progress until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights.demo", description=main.__doc__)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for all data (default %(default)s)")
    parser.add_argument("--port", type=int, help="port of the web page (default 3000, or a free one if that is taken)")
    parser.add_argument("--fresh", action="store_true", help="begin a new year in an old folder")
    parser.add_argument(
        "--speed", type=float, default=DEFAULT_SPEED, help="days of 2013 per second (default %(default).2f)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.speed > 0:
        parser.error(f"--speed is {arguments.speed:g}; it must be above 0")
    console = Console()
    try:
        return run(
            arguments.work,
            speed=arguments.speed,
            port=free_port(_USUAL_PORT) if arguments.port is None else arguments.port,
            fresh=arguments.fresh,
            console=console,
        )
    except (NotADemoFolder, FlightsMissing, FlightsChanged) as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
