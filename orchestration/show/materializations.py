"""Displays of the progress of a fold: a bar in a terminal, lines in a log file, JSON lines for programs."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from stillstate.orchestration.show.progress import Pace, form_of, print_json_line, rich_bar

__all__ = [
    "MaterializationBar",
    "MaterializationJson",
    "MaterializationLines",
    "MaterializationView",
    "materialization_view",
]


class MaterializationView(Protocol):
    """A display of the progress of a fold."""

    def show(self, done: int, total: int) -> None:
        """Show how many pieces are done."""
        ...

    def close(self) -> None:
        """End the display: the fold ended."""
        ...


class MaterializationBar:
    """A bar in a terminal."""

    def __init__(self, console: Console, job: str) -> None:
        self._bar = rich_bar(console, MofNCompleteColumn(), TextColumn("ranges"), TimeElapsedColumn())
        self._task = self._bar.add_task(f"materialize {job}", total=None)
        self._bar.start()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()


class MaterializationLines:
    """Lines for a log file, at most about one a second; the last one is always printed."""

    def __init__(self, console: Console, job: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console = console
        self._job = job
        self._pace = Pace(clock)

    def show(self, done: int, total: int) -> None:
        if self._pace.allows(at_all_events=done >= total):
            self._console.print(f"{self._job}: {done} of {total} ranges", markup=False, highlight=False)

    def close(self) -> None:
        """Do nothing: no line is held back."""


class MaterializationJson:
    """One JSON object per step."""

    def show(self, done: int, total: int) -> None:
        print_json_line({"done": done, "total": total})

    def close(self) -> None:
        """Do nothing: no line is held back."""


def materialization_view(job: str, *, as_json: bool = False, console: Console | None = None) -> MaterializationView:
    """Return the view that fits the output's destination."""
    console = Console(file=sys.stdout) if console is None else console
    form = form_of(console, as_json=as_json)
    if form == "json":
        return MaterializationJson()
    return MaterializationBar(console, job) if form == "bar" else MaterializationLines(console, job)
