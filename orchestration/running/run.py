"""Running one job in this process: entry point → session → epochs, with a progress line and a graceful stop."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestration.config.begin_at import NEWEST, BeginAt
from orchestration.config.entry_point import load_entry_point
from orchestration.config.spec import JobSpec, to_context, to_trigger
from orchestration.text import bytes_text, count_text
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration, StillstateError, UserCodeError
from state_runtime.base.progress import Progress
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.fencing import refuse_if_live
from state_runtime.store import open_store

if TYPE_CHECKING:
    from state_runtime import StreamingJob
    from state_runtime.driver.run import RunResult
    from state_runtime.maintenance.copy.objects import CopyProgress

__all__ = [
    "JsonLines",
    "LiveLine",
    "PlainLines",
    "ProgressView",
    "RestoreWatch",
    "copy_line",
    "progress_line",
    "progress_view",
    "restore_line",
    "run_job",
]

PLAIN_INTERVAL_S: Final = 1.0
RESTORE_INTERVAL_S: Final = 1.0

_LOG = logging.getLogger(__name__)


class ProgressView(Protocol):
    """Where the progress of a run is shown. Called from Spark's callback thread, and before the first epoch from
    another."""

    def restoring(self, done: int, total: int) -> None:
        """So many of the shards are brought back; the first epoch goes on when all are."""
        ...

    def copying(self, progress: CopyProgress) -> None:
        """What the job begins with is being copied; one more object is there."""
        ...

    def show(self, progress: Progress) -> None:
        """One epoch ended."""
        ...

    def close(self) -> None:
        """The run ended; whatever was held back is shown now."""
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
    """One line per epoch for a log file, at most about one a second; the last one is never lost."""

    def __init__(self, console: Console, job: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console = console
        self._job = job
        self._clock = clock
        self._shown_s: float | None = None
        self._held: Progress | None = None
        self._skipped = 0
        self._copied_s: float | None = None
        self._lock = threading.Lock()

    def restoring(self, done: int, total: int) -> None:
        self._console.print(Text(restore_line(self._job, done, total)), soft_wrap=True)

    def copying(self, progress: CopyProgress) -> None:
        now_s = self._clock.monotonic_s()
        is_last = progress.objects_done == progress.objects
        if is_last or self._copied_s is None or now_s - self._copied_s >= PLAIN_INTERVAL_S:
            self._copied_s = now_s
            self._console.print(Text(copy_line(self._job, progress)), soft_wrap=True)

    def show(self, progress: Progress) -> None:
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self._shown_s is not None and now_s - self._shown_s < PLAIN_INTERVAL_S:
                self._skipped += 1 if self._held is not None else 0
                self._held = progress
                return
            if self._held is not None:
                self._skipped += 1
            self._print(progress)
            self._shown_s = now_s

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
    """One JSON object per epoch on stdout, for programs; how a restore goes is in `jobs --json`."""

    def restoring(self, done: int, total: int) -> None:
        """Not an epoch."""

    def copying(self, progress: CopyProgress) -> None:
        """Not an epoch."""

    def show(self, progress: Progress) -> None:
        print(json.dumps(progress.to_json_dict()), flush=True)

    def close(self) -> None:
        """Nothing is held back."""


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


class RestoreWatch:
    """Shows how far the restore is, from this run's own heartbeats, until the first epoch is over.

    Args:
        wait: waits for so many seconds and says whether the watch is over; an event's in earnest.
    """

    def __init__(self, catalog: Catalog, view: ProgressView, wait: Callable[[float], bool], pid: int) -> None:
        self._catalog = catalog
        self._view = view
        self._wait = wait
        self._pid = pid

    def follow(self) -> None:
        """Look until `wait` says that it is enough. It never raises: the run goes on without it."""
        shown = (0, 0)
        while not self._wait(RESTORE_INTERVAL_S):
            try:
                status = self._catalog.status()
            except StillstateError as error:
                _LOG.debug("how far the restore is cannot be read: %s", error)
                continue
            if status is None or status.pid != self._pid:
                continue  # of the run before this one
            now = (status.restored, status.restoring)
            if status.restoring and now != shown:
                self._view.restoring(*now)
                shown = now


@contextmanager
def _watched(catalog: Catalog, view: ProgressView) -> Iterator[Callable[[Progress], None]]:
    """`view.show`, with a restore watch beside it until it is called first."""
    over = threading.Event()
    watch = RestoreWatch(catalog, view, over.wait, os.getpid())
    thread = threading.Thread(target=watch.follow, name="stillstate-restore-watch", daemon=True)

    def show(progress: Progress) -> None:
        if not over.is_set():
            over.set()
            thread.join()  # else its last line could come after the epoch's
        view.show(progress)

    thread.start()
    try:
        yield show
    finally:
        over.set()
        thread.join()


def progress_line(job: str, progress: Progress) -> str:
    """`flights  epoch 12  rows 1,000  5,120/s  state 3,801  checkpoint 9 ms  log 1.2 MiB`, and where shards came back
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
            # Between two checkpoints there is none to tell of.
            f"checkpoint {progress.checkpoint_ms:.0f} ms" if progress.checkpoint_ms else "checkpoint later",
            f"log {bytes_text(progress.log_bytes)}",
            *((f"restored {came_back}",) if came_back else ()),
        )
    )


def progress_view(job: str, *, as_json: bool = False, console: Console | None = None) -> ProgressView:
    """The view that fits where the output goes."""
    if as_json:
        return JsonLines()
    console = Console(file=sys.stdout) if console is None else console
    return LiveLine(console, job) if console.is_terminal else PlainLines(console, job)


def run_job(
    spec: JobSpec,
    folder: Path,
    view: ProgressView,
    *,
    takeover: bool = False,
    until_idle: bool = False,
    allow_dropped_state: bool = False,
    allow_drained: bool = False,
    begin: BeginAt = NEWEST,
) -> RunResult:
    """Run one job until it is stopped, its input ends, or it fails. Blocks.

    SIGTERM and SIGINT ask for a stop after the current epoch; a second one ends the process the usual way (which
    loses nothing: the next run starts at the newest checkpoint).

    Args:
        spec: the job.
        folder: of the configuration file; entry points are looked for here first.
        view: is told about every epoch, and closed at the end.
        begin: at which snapshot.

    Raises:
        StillstateError: see `state_runtime.base.errors`; the command line turns it into an exit code.
    """
    _let_python_workers_import_from(folder)
    try:
        catalog = Catalog(open_store(spec.store, spec.storage_options), spec.name)
        if not takeover:
            # Asked again by the run itself; here it saves a second driver the start of Spark.
            refuse_if_live(catalog, SYSTEM_CLOCK)
        refuse_if_claimed(catalog.root)
        build = load_entry_point(spec.entry_point, folder)
        # Imported late: the rest of the command line must start quickly, and without Spark installed.
        from state_runtime.spark.session import build_session

        job = _build(spec, build)
        session = build_session(spec.name, spec.spark.master, spec.spark.conf)
        try:
            # After the session: SparkContext installs a SIGINT handler of its own, which would cancel the epoch.
            with _stop_on_signals() as stop, _watched(catalog, view) as show:
                return job.run(
                    session,
                    trigger=to_trigger(spec, until_idle=until_idle),
                    takeover=takeover,
                    allow_dropped_state=allow_dropped_state,
                    allow_drained=allow_drained,
                    on_progress=show,
                    stop=stop,
                    start_from=begin.start_from(spec),
                    from_snapshot=begin.snapshot_id,
                    on_copy=view.copying,
                )
        finally:
            session.stop()
    finally:
        view.close()


def _build(spec: JobSpec, build: Any) -> StreamingJob:
    from state_runtime import StreamingJob

    try:
        job = build(to_context(spec))
    except StillstateError:
        raise
    except Exception as error:
        raise UserCodeError(f"entry_point {spec.entry_point!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(job, StreamingJob):
        raise InvalidConfiguration(
            f"entry_point {spec.entry_point!r} returned {type(job).__name__}, not a StreamingJob; "
            "end it with `return job`"
        )
    return job


def _let_python_workers_import_from(folder: Path) -> None:
    # Spark's Python workers unpickle the user's processor by its module name, so they need the same import path.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, paths)])


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; the handlers are put back after the first one and at the end."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may install handlers; tests and notebooks stop by other means
        return
    before: Mapping[signal.Signals, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        # A second signal must still work when an epoch hangs.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
