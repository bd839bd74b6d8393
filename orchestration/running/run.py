"""Runs one job in this process: entry point → session → epochs, with a graceful stop.

Progress is reported to callbacks; `orchestration/show/runs.py` has displays for them.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.errors import InvalidConfiguration, StillstateError, UserCodeError
from state_runtime.base.progress import Progress
from state_runtime.base.usercode import step_at
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.control import asked_to_stop
from state_runtime.snapshot.fencing import refuse_if_live
from state_runtime.store import open_store
from stillstate.orchestration.config.driver_settings import driver_settings
from stillstate.orchestration.config.effective_settings import effective_settings, is_tried, refuse_while_migrating
from stillstate.orchestration.config.entry_point import load_entry_point, refuse_missing_module
from stillstate.orchestration.config.job_location import location_of, moved_text
from stillstate.orchestration.config.spec import JobSpec, to_context, to_trigger
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions
from stillstate.orchestration.launchers.submit_command import driver_conf
from stillstate.orchestration.recovery.observe import progress_marker
from stillstate.orchestration.running.standby import Supervised, stand_by
from stillstate.orchestration.standby import CAUSE_ENV, RESTARTED, SUPERVISOR_ENV

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_runtime import StreamingJob
    from state_runtime.driver.run import RunResult
    from state_runtime.maintenance.copy.objects import CopyProgress
    from state_runtime.pipeline.plan import JobPlan

__all__ = ["RestoreWatch", "build_job", "opened_with_spark", "plan_with_spark", "run_job"]

RESTORE_INTERVAL_S: Final = 1.0
CAUSE_CHARS_MAX: Final = 1000
ONE_REQUEST_S: Final = 1.0
"""Signals within this time are one request to stop."""
SUBMITTED_ENV: Final = "STILLSTATE_SUBMITTED"  # set by orchestration/submitted.py
WORKER_STACKS_CONF: Final = "spark.python.worker.tracebackDumpIntervalSeconds"

_Settings = tuple[str, dict[str, str]]
"""Of a session: its master, and its other Spark settings."""

_LOG = logging.getLogger(__name__)


class RestoreWatch:
    """Reports the progress of the restore, from this run's own heartbeats, until the first epoch is over.

    Args:
        on_restore: is called with the number of restored shards and the number of shards to restore.
        wait: waits for a number of seconds and returns whether the watch is over, as `Event.wait` does.
        pid: of this run's process, to tell its heartbeats from those of the run before.
    """

    def __init__(
        self, catalog: Catalog, on_restore: Callable[[int, int], None], wait: Callable[[float], bool], pid: int
    ) -> None:
        self._catalog = catalog
        self._on_restore = on_restore
        self._wait = wait
        self._pid = pid

    def follow(self) -> None:
        """Look until `wait` returns that the watch is over. It never raises: the run continues without it."""
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
                self._on_restore(*now)
                shown = now


@contextmanager
def _watched(
    catalog: Catalog, on_restore: Callable[[int, int], None], on_progress: Callable[[Progress], None]
) -> Iterator[Callable[[Progress], None]]:
    """Yield `on_progress`, with a restore watch beside it until it is called first."""
    over = threading.Event()
    watch = RestoreWatch(catalog, on_restore, over.wait, os.getpid())
    thread = threading.Thread(target=watch.follow, name="stillstate-restore-watch", daemon=True)

    def show(progress: Progress) -> None:
        if not over.is_set():
            over.set()
            thread.join()  # else its last line could come after the epoch's
        on_progress(progress)

    thread.start()
    try:
        yield show
    finally:
        over.set()
        thread.join()


def run_job(
    spec: JobSpec,
    folder: Path,
    options: StartOptions = AS_IT_IS,
    *,
    on_progress: Callable[[Progress], None],
    on_restore: Callable[[int, int], None],
    on_copy: Callable[[CopyProgress], None],
    begin_log: Callable[[], int | None] = lambda: None,
    spark_in_log: bool = True,
    is_current: Callable[[], bool] = lambda: True,
) -> RunResult:
    """Run one job until it is stopped, its input ends, or it fails. Blocks.

    SIGTERM, SIGINT and SIGHUP ask for a stop after the current epoch; another one, a second later or more, ends the
    process the usual way (which loses nothing: the next run starts at the newest checkpoint).

    Args:
        spec: the job.
        folder: of the configuration file; entry points are looked for here first.
        on_progress: gets every epoch, in Spark's callback thread.
        on_restore: gets the number of restored shards before the first epoch, in a separate thread.
        on_copy: gets every object that is there while the snapshot that the job begins with is copied.
        begin_log: is called when the run is admitted, before Spark starts; returns the descriptor of a log file.
        spark_in_log: the stderr output of Spark's processes goes to that file instead.
        is_current: whether `spec` is still the file's; called by a standby driver.

    Raises:
        StillstateError: see `state_runtime.base.errors`; the command line turns it into an exit code.
    """
    _let_python_workers_import_from(folder)
    _show_stacks_on_request()
    cause, supervisor_pid = _started_by()
    supervised = Supervised.of_environment(supervisor_pid)
    is_submitted = bool(os.environ.pop(SUBMITTED_ENV, ""))
    stood_by: _StoodBy | None = None
    if supervised is not None and supervised.waits:
        cause, stood_by = _stood_by(supervised, spec, folder, is_current)
    file_says, spec = spec, location_of(spec)
    if spec.store != file_says.store:
        _LOG.warning("%s", moved_text(spec))
    catalog = Catalog(open_store(spec.store, spec.storage_options), spec.name)
    if not options.takeover:
        # The run itself checks it again; here it saves a second driver the start of Spark.
        refuse_if_live(catalog, SYSTEM_CLOCK)
    refuse_if_claimed(catalog.root)
    if not (cause or supervisor_pid):
        refuse_while_migrating(spec.name, catalog.root)
    spec, told = effective_settings(spec, catalog.root)
    if told:
        _LOG.warning("%s", told)
    refuse_missing_module(spec.entry_point, folder)
    settings = _session_of(spec, is_submitted=is_submitted)
    log = begin_log()
    if stood_by is None:
        session, job = _session_and_job(spec, folder, settings, stderr=log if spark_in_log else None)
    elif supervised is not None and stood_by.settings != settings:
        supervised.start_again(cause, "the job has other settings of Spark by now")
    else:
        session, job = stood_by.session, build_job(spec, folder)
    if supervised is not None:
        on_progress = _telling(supervised, on_progress)
    from state_runtime.driver.run import RunResult, StartedBy

    try:
        # After the session: SparkContext installs a SIGINT handler of its own, which would cancel the epoch.
        with _stop_on_signals() as stop, _watched(catalog, on_restore, on_progress) as show:
            if _is_unwanted(catalog, cause):
                return RunResult("stopped", progress_marker(catalog), 0)
            return job.run(
                session,
                trigger=to_trigger(spec, until_idle=options.until_idle),
                takeover=options.takeover,
                allow_dropped_state=options.allow_dropped_state,
                allow_drained=options.allow_drained,
                take_output=options.take_output,
                drop_inflight=options.drop_inflight,
                accept_session_settings=options.accept_session_settings,
                on_progress=show,
                stop=stop,
                start_from=options.begin.start_from(spec),
                from_snapshot=options.begin.from_snapshot,
                on_copy=on_copy,
                started_by=StartedBy(
                    cause, supervisor_pid, tuple(driver_settings(spec).items()), on_trial=is_tried(catalog.root)
                ),
            )
    finally:
        _end_session(session)


def _is_unwanted(catalog: Catalog, cause: str) -> bool:
    """Whether this is a restart in place of a run for which a stop was requested after its supervisor's last look: Java
    took seconds to start. Any other start is wanted."""
    status = catalog.status() if cause.startswith(RESTARTED) else None
    if status is None or not asked_to_stop(catalog.root, status.term):
        return False
    _LOG.warning("this restart ends before it begins: term %d, which it follows, was asked to stop", status.term)
    return True


def _session_and_job(
    spec: JobSpec, folder: Path, settings: _Settings, *, stderr: int | None
) -> tuple[SparkSession, StreamingJob]:
    """Start Java in parallel to the imports of the job's code and the driver."""
    # Imported late: the rest of the command line must start quickly, and without Spark installed.
    from state_runtime.spark.java_start import JavaStart

    master, conf = settings
    java = JavaStart(spec.name, master, conf, stderr=stderr)
    try:
        job = build_job(spec, folder)
        importlib.import_module("state_runtime.driver.run")
    except BaseException:
        java.undo()
        raise
    return java.session(), job


@dataclass(frozen=True)
class _StoodBy:
    """The prepared parts of a standby driver."""

    settings: _Settings
    session: SparkSession


def _stood_by(
    supervised: Supervised, spec: JobSpec, folder: Path, is_current: Callable[[], bool]
) -> tuple[str, _StoodBy]:
    """Prepare everything that does not touch the job, wait for the call, and return its cause."""
    refuse_missing_module(spec.entry_point, folder)
    settings = _session_of(spec, is_submitted=False)
    session, _ = _session_and_job(spec, folder, settings, stderr=None)
    return stand_by(supervised, session, is_current)[:CAUSE_CHARS_MAX], _StoodBy(settings, session)


def _telling(supervised: Supervised, on_progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    def told(progress: Progress) -> None:
        on_progress(progress)
        supervised.at_work()

    return told


def _started_by() -> tuple[str, int]:
    """Return the cause of this start and the pid of the supervisor, as a launcher has put them into the environment.
    They are removed from it: processes that this one starts do not inherit them."""
    cause, supervisor = os.environ.pop(CAUSE_ENV, ""), os.environ.pop(SUPERVISOR_ENV, "")
    return cause[:CAUSE_CHARS_MAX], int(supervisor) if supervisor.isascii() and supervisor.isdigit() else 0


def _show_stacks_on_request() -> None:
    """Let SIGUSR1 write the stacks of all threads to stderr, even of a process that hangs in C; so does a crash."""
    try:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
    except (OSError, ValueError, AttributeError):
        _LOG.debug("stacks cannot be shown: stderr is no file here", exc_info=True)


def _session_of(spec: JobSpec, *, is_submitted: bool) -> _Settings:
    """Return the master and the settings of the driver's session; no master where `spark-submit` has set it."""
    master = spec.launcher.master or spec.spark.master
    return "" if is_submitted else master, {**_stacks_of_workers(spec), **driver_conf(spec)}


def _stacks_of_workers(spec: JobSpec) -> dict[str, str]:
    """Let Spark's Python workers, in which user code runs, report their stacks before a run counts as stalled."""
    if not spec.recovery.stall_timeout_s:
        return {}
    return {WORKER_STACKS_CONF: str(max(1, int(spec.recovery.stall_timeout_s / 2)))}


def _end_session(session: SparkSession) -> None:
    from state_runtime.spark.errors import is_of_ended_java

    try:
        session.stop()
    except Exception as error:
        if not is_of_ended_java(error):
            raise
        _LOG.info("the session went with Spark's Java process")


def plan_with_spark(spec: JobSpec, plan: JobPlan) -> JobPlan:
    """Return a job's plan with the nodes of its queries, for which Spark is started, and stopped again; no row is
    read."""
    from state_runtime.spark.session import build_session

    master, conf = _session_of(spec, is_submitted=False)
    session = build_session(spec.name, master, conf)
    try:
        return plan.expanded(session)
    finally:
        _end_session(session)


def opened_with_spark(spec: JobSpec, plan: JobPlan) -> None:
    """Open a job's sources as a start does, for which Spark is started, and stopped again; no row is read."""
    from state_runtime.spark.session import build_session

    master, conf = _session_of(spec, is_submitted=False)
    session = build_session(spec.name, master, conf)
    try:
        plan.expanded(session).opened_sources(session)
    finally:
        _end_session(session)


def build_job(spec: JobSpec, folder: Path) -> StreamingJob:
    """Import a job's code and build its pipeline. Imports pyspark, and starts nothing.

    Args:
        folder: of the configuration file; modules are found in it.

    Raises:
        InvalidConfiguration: there is no such entry point, or it returns no job. UserCodeError: it raised.
    """
    from state_runtime import StreamingJob

    build = load_entry_point(spec.entry_point, folder)
    try:
        with step_at():
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
def _stop_on_signals(clock: Clock = SYSTEM_CLOCK) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM, SIGINT and SIGHUP set. Signals shortly after the first one count with it: a signal
    to a group reaches a driver directly and once more from its supervisor, and `timeout` sends two. Later ones act as
    without a handler."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may install handlers; tests and notebooks stop by other means
        return
    before: Mapping[signal.Signals, Any] = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # A caller that ignores SIGHUP (`nohup`) wants the run to outlive the terminal.
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN or number != signal.SIGHUP
    }
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    asked_at_s: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at_s
        now_s = clock.monotonic_s()
        if number == signal.SIGHUP:
            _leave(terminals)
        if asked_at_s is None:
            asked_at_s = now_s
            stop.set()
        elif now_s - asked_at_s >= ONE_REQUEST_S:
            # The next signal must still work when an epoch hangs.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(terminals: Sequence[int]) -> None:
    """Redirect output from a closed terminal to nowhere: a failed write would make the last checkpoint fail."""
    if terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
