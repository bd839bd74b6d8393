"""What a demo checks, as a list that is printed at the end, whatever happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console
from rich.table import Table

__all__ = ["CheckFailed", "Checklist"]


class CheckFailed(AssertionError):
    """Something that must hold does not; the message says what was found."""


@dataclass
class Checklist:
    """What was checked, in order; printed at the end, whatever happened."""

    console: Console
    title: str
    started_s: float = field(default_factory=monotonic)
    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say what goes on."""
        self.console.print(f"[dim]{monotonic() - self.started_s:6.1f} s[/]  {text}", soft_wrap=True, highlight=False)

    def holds(self, what: str, condition: bool, found: str) -> None:
        """Record one check.

        Raises:
            CheckFailed: It does not hold; what follows would prove nothing.
        """
        self.rows.append((what, condition, found))
        self.note(f"{'[green]holds[/]' if condition else '[red]fails[/]'}  {what}: {found}")
        if not condition:
            raise CheckFailed(f"{what}: {found}")

    def print_table(self) -> None:
        """The whole list."""
        table = Table(title=f"{self.title}, {monotonic() - self.started_s:.0f} s")
        table.add_column("")
        table.add_column("what must hold")
        table.add_column("what was found")
        for what, condition, found in self.rows:
            table.add_row("[green]✓[/]" if condition else "[red]✗[/]", what, found)
        self.console.print(table)
