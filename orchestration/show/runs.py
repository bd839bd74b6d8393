"""Displays of the progress of a run: one line in a terminal, lines in a log file, JSON lines for programs."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.progress import InflightProgress, Progress
from stillstate.orchestration.show.progress import Pace, form_of
from stillstate.orchestration.text import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    from state_runtime.maintenance.copy.objects import CopyProgress

__all__ = [
    "JsonLines",
    "LiveLine",
    "PlainLines",
    "ProgressView",
    "copy_line",
    "inflight_text",
    "progress_line",
    "progress_view",
    "restore_line",
]


class ProgressView(Protocol):
    """A display of the progress of a run. Called from Spark's callback thread; before the first epoch from another."""

    def restoring(self, done: int, total: int) -> None:
        """Show how many of the shards are restored; the first epoch continues when all are."""
        ...

    def copying(self, progress: CopyProgress) -> None:
        """Show the copy of the snapshot that the job begins with; one more object is copied."""
        ...

    def show(self, progress: Progress) -> None:
        """Show an epoch that ended."""
        ...

    def close(self) -> None:
        """End the display: the run ended; show the lines that were held back."""
        ...


class LiveLine:
    """One line in a terminal that is rewritten after every epoch."""

    def __init__(self, console: Console, job: str) -> None:
        self._job = job
        self._live = Live(Text(f"{job}: starting"), console=console, refresh_per_second=8, transient=False)
        self._live.start()

    def restoring(self, done: int, total: int) -> None:
        self._live.update(Text(restore_line(self._job, done, total)))

    def copying(self, progress: CopyProgress) -> None:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(progress.bytes, 1), completed=min(progress.bytes_done, progress.bytes), width=30)
        row.add_row(Text(copy_line(self._job, progress)), bar)
        self._live.update(row)

    def show(self, progress: Progress) -> None:
        self._live.update(Text(progress_line(self._job, progress)))

    def close(self) -> None:
        self._live.stop()


class PlainLines:
    """One line per epoch for a log file, at most about one a second; the last one is always printed."""

    def __init__(self, console: Console, job: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console = console
        self._job = job
        self._epochs = Pace(clock)
        self._copies = Pace(clock)
        self._held: Progress | None = None
        self._skipped = 0
        self._lock = threading.Lock()

    def restoring(self, done: int, total: int) -> None:
        self._console.print(Text(restore_line(self._job, done, total)), soft_wrap=True)

    def copying(self, progress: CopyProgress) -> None:
        if self._copies.allows(at_all_events=progress.objects_done == progress.objects):
            self._console.print(Text(copy_line(self._job, progress)), soft_wrap=True)

    def show(self, progress: Progress) -> None:
        with self._lock:
            # A newer line replaces the one that is held back, which is only counted.
            self._skipped += 1 if self._held is not None else 0
            if self._epochs.allows():
                self._print(progress)
            else:
                self._held = progress

    def close(self) -> None:
        with self._lock:
            if self._held is not None:
                self._print(self._held)

    def _print(self, progress: Progress) -> None:
        more = f" (+{self._skipped} epochs between)" if self._skipped else ""
        self._console.print(
            Text(progress_line(self._job, progress) + more), soft_wrap=True, no_wrap=True, overflow="ignore"
        )
        self._held, self._skipped = None, 0


class JsonLines:
    """One JSON object per epoch on stdout, for programs; the progress of a restore is in `jobs --json`."""

    def restoring(self, done: int, total: int) -> None:
        """Do nothing: this is no epoch."""

    def copying(self, progress: CopyProgress) -> None:
        """Do nothing: this is no epoch."""

    def show(self, progress: Progress) -> None:
        print(json.dumps(progress.to_json_dict()), flush=True)

    def close(self) -> None:
        """Do nothing: no line is held back."""


def restore_line(job: str, done: int, total: int) -> str:
    """`flights  restoring  3 of 8 shards`"""
    return f"{job}  restoring  {count_text(done)} of {count_text(total)} shards"


def copy_line(job: str, progress: CopyProgress) -> str:
    """`flights  copying  12 of 40 objects  1.2 of 30.5 MiB`"""
    return "  ".join(
        (
            job,
            "copying",
            f"{count_text(progress.objects_done)} of {count_text(progress.objects)} objects",
            f"{bytes_text(progress.bytes_done)} of {bytes_text(progress.bytes)}",
        )
    )


def progress_line(job: str, progress: Progress) -> str:
    """`flights  epoch 12  rows 1,000  5,120/s  state 3,801  checkpoint 9 ms  log 1.2 MiB`, and where shards came
    from."""
    restores = {
        "local": progress.local_restores,
        "stale local": progress.stale_restores,
        "store": progress.primary_restores,
    }
    came_back = ", ".join(f"{count} {kind}" for kind, count in restores.items() if count)
    return "  ".join(
        (
            job,
            f"epoch {progress.epoch or progress.snapshot_id}",
            f"rows {count_text(progress.input_rows)}",
            f"{count_text(progress.rows_per_s)}/s",
            f"state {count_text(progress.state_rows)}",
            # Between two checkpoints there are no times of one to show.
            f"checkpoint {progress.checkpoint_ms:.0f} ms" if progress.checkpoint_ms else "checkpoint later",
            *((f"alignment {duration_text(progress.alignment_ms / 1000)}",) if progress.alignment_ms else ()),
            f"log {bytes_text(progress.log_bytes)}",
            *((f"skipped {count_text(progress.skipped_rows)} that are gone",) if progress.skipped_rows else ()),
            *((f"{count_text(progress.future_rows)} too far ahead",) if progress.future_rows else ()),
            *((f"{count_text(progress.bad_rows)} bad",) if progress.bad_rows else ()),
            *((f"restored {came_back}",) if came_back else ()),
            *((inflight_text(progress.inflight),) if progress.inflight is not None else ()),
        )
    )


def inflight_text(inflight: InflightProgress) -> str:
    """`in flight 12,000 (1.2 MiB, oldest 8 s)  slowest orders/3 2.1 s`."""
    size, age = bytes_text(inflight.bytes), duration_text(inflight.oldest_ms / 1000)
    text = f"in flight {count_text(inflight.rows)}" + (f" ({size}, oldest {age})" if inflight.rows else "")
    if inflight.slowest:
        text += f"  slowest {inflight.slowest} {duration_text(inflight.slowest_ms / 1000)}"
    return text


def progress_view(job: str, *, as_json: bool = False, console: Console | None = None) -> ProgressView:
    """Return the view that fits the output's destination."""
    console = Console(file=sys.stdout) if console is None else console
    form = form_of(console, as_json=as_json)
    if form == "json":
        return JsonLines()
    return LiveLine(console, job) if form == "bar" else PlainLines(console, job)
