"""Deliver the year into an inbox folder, as files that arrive in event order at a chosen speed.

What a reader of the inbox may rely on:

* A file appears whole, by one rename; while it is written its name starts with "." and Spark does not see it.
* Files appear in event order, and their modification times grow strictly, by whole milliseconds: Spark's file
  source orders by modification time, in milliseconds, and knows no other order.
* A name says which flights are in the file: ``flights-0000001-0000842.parquet`` holds the ids 1 to 842, no
  gap.

The inbox is the only memory of the replay: after a kill at any moment it goes on behind the last file that is
there.
"""

from __future__ import annotations

import argparse
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from examples.flights.data import year_parquet

MINUTES_PER_DAY: Final = 24 * 60
DAYS_IN_YEAR: Final = 365
NS_PER_MS: Final = 1_000_000

DEFAULT_SPEED: Final = DAYS_IN_YEAR / 300
"""Days of 2013 per second: the year in five minutes."""

_DELIVERED_NAME: Final = re.compile(r"flights-(\d{7})-(\d{7})\.parquet")
_TEMPORARY_PREFIX: Final = ".arriving-"


class InboxNotContiguous(ValueError):
    """The inbox has a gap or an overlap, so it was not filled by this replay alone. Empty it and start again."""


@dataclass(frozen=True)
class Delivery:
    """One file to come: the flights ``first`` to ``last``, due when the days before it and its own have passed."""

    first: int
    last: int
    due_days: float

    @property
    def name(self) -> str:
        """The file's name in the inbox."""
        return f"flights-{self.first:07d}-{self.last:07d}.parquet"


def plan(year: pa.Table, delivered: int, days_per_file: int, days: int = DAYS_IN_YEAR) -> list[Delivery]:
    """Plan the files for the flights after number ``delivered``, each up to the end of a day (pure).

    Args:
        year: The year in event order; the n-th row is flight n.
        delivered: Flights that are already in the inbox.
        days_per_file: Days of 2013 in each file; the first file begins where the replay stopped.
        days: The last day to deliver, counted from 1.
    """
    if days_per_file < 1:
        raise ValueError(f"days per file is {days_per_file}; it must be at least 1")
    day_of = year["sched_dep_min"].to_numpy() // MINUTES_PER_DAY
    wanted = int(np.searchsorted(day_of, days))
    start = int(day_of[delivered]) if delivered < wanted else 0
    deliveries = []
    while delivered < wanted:
        end_day = min(int(day_of[delivered]) + days_per_file, days)
        last = int(np.searchsorted(day_of, end_day))
        deliveries.append(Delivery(delivered + 1, last, float(end_day - start)))
        delivered = last
    return deliveries


def delivered_flights(inbox: Path) -> int:
    """Count the flights in the inbox by the names of its files.

    Raises:
        InboxNotContiguous: The files do not hold the flights 1 to n without a gap or an overlap.
    """
    spans = sorted(
        (int(match[1]), int(match[2])) for path in inbox.iterdir() if (match := _DELIVERED_NAME.fullmatch(path.name))
    )
    delivered = 0
    for first, last in spans:
        if first != delivered + 1 or last < first:
            raise InboxNotContiguous(
                f"the inbox {inbox} has flights up to {delivered} and then a file with {first} to {last}; "
                "it was not filled by this replay alone: empty it and start again"
            )
        delivered = last
    return delivered


def deliver(year: pa.Table, inbox: Path, delivery: Delivery) -> Path:
    """Put one file into the inbox, whole, with a later modification time than every file before it."""
    rows = year.slice(delivery.first - 1, delivery.last - delivery.first + 1)
    temporary = inbox / f"{_TEMPORARY_PREFIX}{delivery.name}"
    pa.parquet.write_table(rows, temporary)
    modified_ms = max(temporary.stat().st_mtime_ns // NS_PER_MS, _newest_ms(inbox) + 1)
    os.utime(temporary, ns=(modified_ms * NS_PER_MS, modified_ms * NS_PER_MS))
    path = inbox / delivery.name
    os.replace(temporary, path)
    return path


def _newest_ms(inbox: Path) -> int:
    times = (path.stat().st_mtime_ns for path in inbox.iterdir() if _DELIVERED_NAME.fullmatch(path.name))
    return max(times, default=0) // NS_PER_MS


def replay(
    year: pa.Table,
    inbox: Path,
    *,
    days_per_s: float | None,
    days_per_file: int = 1,
    days: int = DAYS_IN_YEAR,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = monotonic,
) -> Iterator[Delivery]:
    """Deliver what is not yet delivered; yield each file after it has arrived.

    A replay that cannot keep up with its speed delivers as fast as it can and does not skip anything.

    Args:
        year: The year in event order.
        inbox: The folder, made if it is not there. One replay at a time may fill it.
        days_per_s: Days of 2013 per second; None delivers everything at once.
        days_per_file: Days of 2013 in each file.
        days: The last day to deliver, counted from 1; a later replay delivers the rest.
        wait: Waits so many seconds; true means stop, as ``threading.Event.wait`` does.
        clock: Monotonic seconds.

    Raises:
        InboxNotContiguous: The inbox was filled by something else, too.
    """
    if days_per_s is not None and not days_per_s > 0:
        raise ValueError(f"the speed is {days_per_s} days per second; it must be above 0")
    inbox.mkdir(parents=True, exist_ok=True)
    for leftover in inbox.glob(f"{_TEMPORARY_PREFIX}*"):
        leftover.unlink()  # of a replay that was killed while it wrote
    started = clock()
    for delivery in plan(year, delivered_flights(inbox), days_per_file, days):
        if days_per_s is not None and wait(max(0.0, started + delivery.due_days / days_per_s - clock())):
            return
        deliver(year, inbox, delivery)
        yield delivery


def main(argv: list[str] | None = None) -> int:
    """Replay the flights of 2013 into a folder; run again after a kill, it goes on where it stopped."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parser = argparse.ArgumentParser(prog="python -m examples.flights.replay", description=main.__doc__)
    parser.add_argument("--inbox", type=Path, required=True, help="folder that the job reads")
    parser.add_argument("--work", type=Path, help="folder for the year's Parquet file; default: beside the inbox")
    parser.add_argument(
        "--speed", type=float, default=DEFAULT_SPEED, help="days of 2013 per second (default %(default).2f)"
    )
    parser.add_argument("--days-per-file", type=int, default=1, help="days of 2013 in each file (default 1)")
    parser.add_argument("--days", type=int, default=DAYS_IN_YEAR, help="stop after this day of the year (default 365)")
    parser.add_argument("--all", action="store_true", help="deliver everything at once")
    arguments = parser.parse_args(argv)
    if not arguments.all and not arguments.speed > 0:
        parser.error(f"--speed is {arguments.speed:g}; it must be above 0")
    if not 1 <= arguments.days <= DAYS_IN_YEAR:
        parser.error(f"--days is {arguments.days}; it must be 1 to {DAYS_IN_YEAR}")
    if arguments.days_per_file < 1:
        parser.error(f"--days-per-file is {arguments.days_per_file}; it must be at least 1")
    year = pa.parquet.read_table(year_parquet(arguments.work or arguments.inbox.absolute().parent))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    deliveries = replay(
        year,
        arguments.inbox,
        days_per_s=None if arguments.all else arguments.speed,
        days_per_file=arguments.days_per_file,
        days=arguments.days,
        wait=threading.Event().wait,
    )
    try:
        with Progress(*columns) as progress:
            task = progress.add_task("flights", total=year.num_rows, completed=0)
            for delivery in deliveries:
                date = year["flight_date"][delivery.last - 1]
                progress.update(task, completed=delivery.last, description=f"flights up to {date}")
    except InboxNotContiguous as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
