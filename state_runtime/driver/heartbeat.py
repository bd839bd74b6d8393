"""The heartbeat of a run: shows that it lives, and looks for requests and for a run that fenced it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced, StillstateError
from state_runtime.base.limits import MANIFEST_BYTES_MAX
from state_runtime.base.source_state import SourceState
from state_runtime.driver.advance import Advance
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.driver.task_history import TaskHistory
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import new_requests
from state_runtime.snapshot.epoch_tasks import RunEpochs
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.term_files import RunState, RunStatus, newest_term, write_epochs, write_status
from state_runtime.store import Store

__all__ = ["Heartbeat"]

_LOG = logging.getLogger(__name__)


class Heartbeat:
    """A separate thread, from the fencing snapshot to the end of the run.

    Errors of the store are logged, and the next heartbeat tries again: a heartbeat never ends a run by itself. Only its
    owner writes the file. Before each write it checks that the term in the root is still this run's, because a run that
    slept through the end of its job would overwrite the heartbeat of the job's next run. The work of the newest epochs'
    tasks goes into a document beside it, with the first heartbeat after an epoch.

    Args:
        advance: when the run last advanced. A stall is reported in this thread, because it does not hang with the run.
        cause, supervisor_pid, parallelism, backend, settings, process_space, time_zone: see `RunStatus`.
        sources: returns what is known of the sources now, without waiting.

    Attributes:
        fenced: the run that took over, once it is seen.
    """

    def __init__(
        self,
        root: Store,
        committer: Committer,
        interval_s: float,
        clock: Clock,
        stop: threading.Event,
        savepoints: Savepoints,
        advance: Advance | None = None,
        *,
        cause: str = "",
        supervisor_pid: int = 0,
        parallelism: int = 0,
        backend: str = "",
        settings: tuple[tuple[str, str], ...] = (),
        process_space: str = "",
        time_zone: str = "",
        sources: Callable[[], tuple[SourceState, ...]] = tuple,
    ) -> None:
        self._advance = Advance(clock) if advance is None else advance
        self._cause = cause
        self._supervisor_pid = supervisor_pid
        self._parallelism, self._backend, self._settings = parallelism, backend, settings
        self._process_space, self._time_zone = process_space, time_zone
        self._sources = sources
        self._error_kind = ""
        self._root = root
        self._committer = committer
        self._interval_s = interval_s
        self._clock = clock
        self._stop = stop
        self._savepoints = savepoints
        self._seen: set[str] = set()
        self._ended = threading.Event()
        self._state: RunState = "starting"
        self._driver: EpochDriver | None = None
        self._told_tasks = TaskHistory()
        self._thread = threading.Thread(target=self._loop, name="stillstate-heartbeat", daemon=True)
        self.fenced: str | None = None

    def start(self) -> None:
        """Write the first heartbeat, which must succeed (the store is known to work), and begin."""
        self._write("")
        self._thread.start()

    def watch(self, driver: EpochDriver) -> None:
        """Report this driver's progress from now on."""
        self._driver = driver

    def running(self) -> None:
        """Note that the stream has started."""
        self._state = "running"
        self._beat()

    def finish(self, state: RunState, message: str, error_kind: str = "") -> None:
        """Write the last heartbeat, which says how the run ended."""
        self._error_kind = error_kind
        self._ended.set()
        self._thread.join()
        self._state = state
        try:
            self._write(message)
            self._tell_tasks()
        except StillstateError:
            _LOG.exception("the last heartbeat of term %d could not be written", self._committer.term.term)

    def _loop(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        try:
            if self.fenced is not None:
                return
            self._write("")
            self._advance.tell_if_stalled()
            term = self._committer.term.term
            self._look_for_requests(term)
            # Without this, an idle run would learn only at its next commit that it is fenced.
            if self.fenced is None:
                self.fenced = self._fencing_snapshot(term)
            if self.fenced is None:
                self._tell_tasks()  # last: it is the least urgent
        except Fenced as error:
            self.fenced = str(error)
        except (StillstateError, FileNotFoundError):
            _LOG.warning("heartbeat of term %d failed; trying again", self._committer.term.term, exc_info=True)

    def _look_for_requests(self, term: int) -> None:
        for name, request in new_requests(self._root, term, self._seen).items():
            if request is not None and request.action == "stop":
                _LOG.info("stop requested (%s)", request.request_id)
                self._stop.set()
            elif request is not None:
                self._savepoints.hear(request)
            self._seen.add(name)

    def look_for_fencing(self) -> str | None:
        """Return which run took over; None if no run did, or if the store does not answer."""
        try:
            return self._fencing_snapshot(self._committer.term.term)
        except (StillstateError, FileNotFoundError):
            _LOG.warning("could not look for a newer run", exc_info=True)
            return None

    def _fencing_snapshot(self, term: int) -> str | None:
        if newest_term(self._root) <= term:
            return None
        next_id = self._committer.last.snapshot_id + 1
        if not self._root.exists(manifest_path(next_id)):
            if read_boundary(self._root).keeps(next_id):
                return None  # the run that claimed the newer term has not begun
            return (
                f"snapshot {next_id}, which this run (term {term}) would have made next, was made and expired by a "
                "newer run while this run slept; it stops and publishes nothing"
            )
        newest = Manifest.decode(self._root.read(manifest_path(next_id), MANIFEST_BYTES_MAX), manifest_path(next_id))
        if newest.term <= term:
            return None  # this run's own commit, just made
        taken = f"term {newest.term} took over from term {term} with snapshot {next_id}"
        return f"{taken}; this run stops and publishes nothing"

    def _write(self, message: str) -> None:
        last, term = self._committer.last, self._committer.term
        self._committer.ownership.check_term()
        restored, restoring = self._driver.restoring() if self._driver is not None else (0, 0)
        advanced_at_ms, quiet = self._advance.seen()
        write_status(
            self._root,
            RunStatus(
                term=term.term,
                run_uid=term.run_uid,
                state=self._state,
                at_ms=self._clock.now_ms(),
                started_at_ms=term.started_at_ms,
                heartbeat_interval_s=self._interval_s,
                pid=term.pid,
                host=term.host,
                snapshot_id=last.snapshot_id,
                batch_id=last.source.batch_id if last.source is not None else -1,
                message=message,
                progress=self._driver.progress if self._driver is not None else None,
                restored=restored,
                restoring=restoring,
                advanced_at_ms=advanced_at_ms,
                quiet=quiet,
                error_kind=self._error_kind,
                cause=self._cause,
                supervisor_pid=self._supervisor_pid,
                parallelism=self._parallelism,
                backend=self._backend,
                settings=self._settings,
                process_space=self._process_space,
                time_zone=self._time_zone,
                steps=self._driver.steps if self._driver is not None else (),
                sources=self._sources(),
                sinks=self._driver.sinks_away() if self._driver is not None else (),
            ),
        )

    def _tell_tasks(self) -> None:
        """Write the work of the newest epochs' tasks, if it has changed."""
        tasks = self._driver.tasks if self._driver is not None else self._told_tasks
        if tasks == self._told_tasks:
            return
        ownership, term = self._committer.ownership, self._committer.term
        ownership.check_term()  # once more: since the heartbeat this run may have slept
        write_epochs(self._root, RunEpochs(term=term.term, run_uid=term.run_uid, epochs=tasks.epochs))
        self._told_tasks = tasks
