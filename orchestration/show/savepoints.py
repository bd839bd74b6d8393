"""Displays of savepoints: the progress of one that is being made, and a table of all."""

from __future__ import annotations

import sys
from typing import Final, Protocol

from rich.console import Console
from rich.progress import DownloadColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from state_runtime.snapshot.savepoint_record import SavepointRecord
from stillstate.orchestration.running.make_savepoint import SavepointRow
from stillstate.orchestration.show.progress import form_of, print_json_line, rich_bar
from stillstate.orchestration.show.tables import new_table
from stillstate.orchestration.text import bytes_text, count_text, duration_text

__all__ = [
    "SavepointBar",
    "SavepointJson",
    "SavepointSilence",
    "SavepointView",
    "savepoint_view",
    "savepoints_table",
]

_COLOURS: Final = {
    "COMPLETED": "green",
    "IN_PROGRESS": "cyan",
    "REQUESTED": "cyan",
    "FAILED": "red",
    "ABANDONED": "yellow",
    "DELETING": "dim",
    "UNREADABLE": "red",
}


class SavepointView(Protocol):
    """A display of the progress of a savepoint."""

    def show(self, record: SavepointRecord) -> None:
        """Show a change of the record."""
        ...

    def close(self) -> None:
        """End the display: the savepoint ended."""
        ...


class SavepointBar:
    """A bar in a terminal."""

    def __init__(self, console: Console, job: str) -> None:
        self._job = job
        self._bar = rich_bar(console, DownloadColumn(binary_units=True), TimeElapsedColumn(), transient=True)
        self._task = self._bar.add_task(f"{job}: savepoint asked for", total=None)
        self._bar.start()

    def show(self, record: SavepointRecord) -> None:
        text = f"{self._job}: savepoint {record.name} {record.state}"
        if record.message and record.is_open:
            text += f" (attempt {record.attempts}: {record.message})"
        total = record.total_bytes or None
        self._bar.update(self._task, completed=record.copied_bytes, total=total, description=text)

    def close(self) -> None:
        self._bar.stop()


class SavepointJson:
    """One JSON object per change of state."""

    def __init__(self) -> None:
        self._shown: tuple[str, str] | None = None

    def show(self, record: SavepointRecord) -> None:
        if (record.state, record.message) != self._shown:
            self._shown = (record.state, record.message)
            print_json_line({"name": record.name, "state": record.state, "message": record.message})

    def close(self) -> None:
        """Do nothing: no line is held back."""


class SavepointSilence:
    """Shows nothing: a log file gets the result only."""

    def show(self, record: SavepointRecord) -> None:
        """Do nothing: the result is shown."""

    def close(self) -> None:
        """Do nothing: no line is held back."""


def savepoint_view(job: str, *, as_json: bool) -> SavepointView:
    """Return the view that fits the destination of stderr."""
    console = Console(file=sys.stderr)
    form = form_of(console, as_json=as_json)
    if form == "json":
        return SavepointJson()
    return SavepointBar(console, job) if form == "bar" else SavepointSilence()


def savepoints_table(job: str, rows: list[SavepointRow]) -> Table:
    """Return a table of the savepoints of one job and the requests for them, one a line. It has a column for rows in
    flight if there are any."""
    some_wait = any(row.inflight_rows for row in rows)
    waiting = ["in flight>"] if some_wait else []
    table = new_table(
        f"Savepoints of {job}", "name", "state", "snapshot>", "format", "size>", *waiting, "age>", "tags", "trigger", ""
    )
    for row in rows:
        table.add_row(
            Text(row.name),
            Text(_state_text(row), style=_COLOURS.get(row.state, "")),
            str(row.snapshot_id) if row.snapshot_id else "-",
            row.format,
            bytes_text(row.bytes) if row.bytes else "-",
            *(["-" if row.inflight_rows is None else count_text(row.inflight_rows)] if some_wait else []),
            duration_text(row.age_s),
            Text(", ".join(row.tags)),
            Text(row.trigger),
            Text(_remark(row)),
        )
    return table


def _state_text(row: SavepointRow) -> str:
    if row.state != "IN_PROGRESS" or not row.bytes:
        return row.state
    return f"{row.state} {100 * row.copied_bytes // row.bytes}%"


def _remark(row: SavepointRow) -> str:
    parts = ["drained"] if row.drained else []
    if row.shared_files:
        parts.append(f"{row.shared_files} files ({bytes_text(row.shared_bytes)}) shared by link with {row.shared_with}")
    if row.state == "IN_PROGRESS" and row.attempts > 1:
        parts.append(f"attempt {row.attempts}")
    if row.next_attempt_s:
        parts.append(f"next attempt in {duration_text(row.next_attempt_s)}")
    if row.message:
        parts.append(row.message)
    if row.note:
        parts.append(row.note)
    return "; ".join(parts)
