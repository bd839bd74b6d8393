"""The common parts of progress displays: the choice of the form, bars, the pace of lines, JSON lines.

Runs, folds and savepoints have separate displays (`runs.py`, `materializations.py`, `savepoints.py`), which choose by
`form_of`. Every other display is one bar on stderr, and nothing if stderr is no terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from state_runtime.base.clock import SYSTEM_CLOCK, Clock

__all__ = [
    "LINE_INTERVAL_S",
    "Form",
    "Pace",
    "PhaseBar",
    "bytes_bar",
    "count_bar",
    "form_of",
    "phase_bar",
    "print_json_line",
    "rich_bar",
]

Form = Literal["bar", "lines", "json"]
"""`bar` is redrawn in a terminal, `lines` go to a log file, `json` lines to a program."""

LINE_INTERVAL_S: Final = 1.0
"""A log file gets at most about one line a second: enough to see that work continues, and still readable afterwards."""

ShowCounts = Callable[[int, int], None]
"""Is called with the finished amount and the total; the total is 0 while it is not known."""


def form_of(console: Console, *, as_json: bool = False) -> Form:
    """Return the form of a progress display that fits its destination."""
    if as_json:
        return "json"
    return "bar" if console.is_terminal else "lines"


class Pace:
    """Holds back lines that would follow too soon."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, interval_s: float = LINE_INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._last_s: float | None = None

    def allows(self, *, at_all_events: bool = False) -> bool:
        """Whether a line may be printed now. If it may, it counts as printed.

        Args:
            at_all_events: it is printed without a pause, as the last line is.
        """
        now_s = self._clock.monotonic_s()
        is_soon = self._last_s is not None and now_s - self._last_s < self._interval_s
        if is_soon and not at_all_events:
            return False
        self._last_s = now_s
        return True


def print_json_line(value: Any) -> None:
    """Print one JSON object as a line on stderr: stdout is for the result."""
    print(json.dumps(value), file=sys.stderr, flush=True)


def rich_bar(console: Console, *counts: ProgressColumn, transient: bool = False, disable: bool = False) -> Progress:
    """Return a bar with a description on its left and `counts` on its right. A task without a total makes it pulse."""
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    return Progress(*columns, console=console, transient=transient, disable=disable)


@contextmanager
def count_bar(what: str, unit: str) -> Iterator[ShowCounts | None]:
    """Show a bar that counts items, on stderr while the block runs; yield None if stderr is no terminal."""
    with _bar_on_stderr(what, MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn()) as show:
        yield show


@contextmanager
def bytes_bar(what: str) -> Iterator[ShowCounts | None]:
    """Show a bar of bytes with its speed, on stderr while the block runs; yield None if stderr is no terminal."""
    counts = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with _bar_on_stderr(what, *counts) as show:
        yield show


@contextmanager
def _bar_on_stderr(what: str, *counts: ProgressColumn) -> Iterator[ShowCounts | None]:
    console = Console(file=sys.stderr)
    if form_of(console) != "bar":
        yield None
        return
    with rich_bar(console, *counts, transient=True) as progress:
        task = progress.add_task(what, total=None)
        # rich takes None, and not 0, as "not known yet".
        yield lambda done, total: progress.update(task, completed=done, total=total or None)


class PhaseBar:
    """A bar that starts again with each phase; without a terminal it does nothing."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._phase = ""
        self._bar = rich_bar(console, MofNCompleteColumn(), TimeElapsedColumn(), disable=form_of(console) != "bar")
        self._task = self._bar.add_task(title, total=None)

    def show(self, phase: str, done: int, total: int) -> None:
        """Show how much of a phase is done."""
        if phase != self._phase:
            self._phase = phase
            self._bar.reset(self._task, description=f"{self._title}: {phase}", total=total)
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> PhaseBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@contextmanager
def phase_bar(title: str, *, quiet: bool = False, console: Console | None = None) -> Iterator[PhaseBar]:
    """Show a bar on stderr while the block runs.

    Args:
        quiet: show nothing.
    """
    with PhaseBar(title, console or Console(stderr=True, quiet=quiet)) as bar:
        yield bar
