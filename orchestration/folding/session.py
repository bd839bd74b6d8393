"""Materialization from outside the driver: by the command line, and by Dagster. Both fold in a Spark session of their
own.

Nothing here relies on being alone: the store's own records keep two materializations, and the driver, apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from orchestration.config.spec import JobSpec, SparkSpec, to_settings
from orchestration.folding.health import log_bytes_left
from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.materialize.plan import Mode
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store

if TYPE_CHECKING:
    # It needs pyspark, which the Dagster code location and the rest of the command line must do without.
    from pyspark.sql import SparkSession

    from state_runtime.materialize.spark_job import MaterializationResult

__all__ = [
    "FoldView",
    "fold",
    "fold_in_new_session",
    "fold_summary",
    "fold_view",
    "spark_of",
]

_LINE_INTERVAL_S: Final = 1.0


def spark_of(spec: JobSpec) -> SparkSpec:
    """The session that folds outside the driver: `materialization.spark`, else the job's own settings."""
    return spec.materialization.spark or spec.spark


def fold(
    session: SparkSession, spec: JobSpec, *, mode: Mode = "auto", on_progress: Callable[[int, int], None] | None = None
) -> MaterializationResult:
    """Fold the log of a job's newest snapshot now, whether or not it is due.

    The running driver adopts the result with its next checkpoint, the next run with its first. A crash leaves garbage
    only.

    Args:
        mode: "auto" gives a new base to those parts of a state whose changes have grown large; "minor" to none, "major"
            to all.
        on_progress: is called with pieces done and pieces in all.

    Raises:
        JobNotFound, CorruptData, Unavailable: see `materialize_job`.
    """
    from state_runtime.materialize.spark_job import materialize_job

    return materialize_job(
        session,
        spec.store,
        spec.storage_options,
        spec.name,
        settings=to_settings(spec),
        mode=mode,
        on_progress=on_progress,
    )


# --- how it is shown -----------------------------------------------------------------------------------------------


class FoldView(Protocol):
    """Where the progress of a fold is shown."""

    def show(self, done: int, total: int) -> None:
        """So many pieces are done."""
        ...

    def close(self) -> None:
        """The fold ended."""
        ...


class FoldBar:
    """A bar in a terminal."""

    def __init__(self, console: Console, job: str) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("ranges"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task(f"materialize {job}", total=None)  # no total yet: the bar pulses
        self._bar.start()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()


class FoldLines:
    """Lines for a log file, at most about one a second."""

    def __init__(self, console: Console, job: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console = console
        self._job = job
        self._clock = clock
        self._shown_s: float | None = None

    def show(self, done: int, total: int) -> None:
        now_s = self._clock.monotonic_s()
        if done < total and self._shown_s is not None and now_s - self._shown_s < _LINE_INTERVAL_S:
            return
        self._shown_s = now_s
        self._console.print(f"{self._job}: {done} of {total} ranges", markup=False, highlight=False)

    def close(self) -> None:
        """Nothing is held back."""


class FoldJson:
    """One JSON object per step on stderr: stdout is for the result."""

    def show(self, done: int, total: int) -> None:
        print(json.dumps({"done": done, "total": total}), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is held back."""


def fold_view(job: str, *, as_json: bool = False, console: Console | None = None) -> FoldView:
    """The view that fits where the output goes."""
    if as_json:
        return FoldJson()
    console = Console(file=sys.stdout) if console is None else console
    return FoldBar(console, job) if console.is_terminal else FoldLines(console, job)


def fold_in_new_session(spec: JobSpec, view: FoldView, *, mode: Mode) -> tuple[MaterializationResult, int]:
    """Start a session, fold, stop it.

    Returns:
        The result, and the bytes of changelog that are left.
    """
    try:
        catalog = Catalog(open_store(spec.store, spec.storage_options), spec.name)
        catalog.job_info()  # before the start of Spark: a wrong name is known at once
        from state_runtime.spark.session import build_session

        spark = spark_of(spec)
        session = build_session(f"{spec.name}-materialize", spark.master, spark.conf)
        try:
            result = fold(session, spec, mode=mode, on_progress=view.show)
        finally:
            session.stop()
        return result, log_bytes_left(catalog, result.snapshot_id if result.record_id is not None else 0)
    finally:
        view.close()


def fold_summary(result: MaterializationResult, numbers: dict[str, int | float]) -> dict[str, Any]:
    """The result for `--json`."""
    return {"mode": result.mode, "reason": result.reason, "record_id": result.record_id, **numbers}
