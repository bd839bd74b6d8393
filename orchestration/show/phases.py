"""Long work in phases, shown as one bar on stderr; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

__all__ = ["PhaseBar", "phase_bar"]


class PhaseBar:
    """A bar that begins anew with each phase; without a terminal it does nothing."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._phase = ""
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None)

    def show(self, phase: str, done: int, total: int) -> None:
        """So much of a phase is done."""
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
    """A bar on stderr while the block runs.

    Args:
        quiet: show nothing.
    """
    with PhaseBar(title, console or Console(stderr=True, quiet=quiet)) as bar:
        yield bar
