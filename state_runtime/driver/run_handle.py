"""The handle of a run: look at it, wait for it, end it; with the names of Spark's `StreamingQuery`.

Life cycle: made → `begin` (checked, then in a thread) or `run_here` (in the caller's thread) → ended, with a result or
an error. A thread that is still there when Python ends is asked to stop and waited for, before Spark's own end.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from state_runtime.base.errors import Unavailable, check
from state_runtime.base.progress import Progress
from state_runtime.driver.run import Allowed, CheckedRun, JobRun, RunResult, StartedBy
from state_runtime.driver.source_quiet import is_idle
from state_runtime.driver.start_position import StartPosition
from state_runtime.maintenance.convert.into_savepoint import convert_small
from state_runtime.maintenance.copy.savepointer import Savepointer
from state_runtime.pipeline.plan import JobPlan
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.savepoint_record import SavepointFormat, SavepointRecord, SavepointThen
from state_runtime.snapshot.term_files import RunStatus

__all__ = ["RunHandle"]

RECENT_MAX: Final = 100
"""How many epochs `recentProgress` has; the default of Spark's `spark.sql.streaming.numRecentProgressUpdates`."""
_END_TIMEOUT_S: Final = 60.0
_LOOK_INTERVAL_S: Final = 0.05


class RunHandle:
    """One run of a job: what `StreamingJob.start` returns. Its methods may be called from any thread.

    Example:
        query = job.start()
        query.processAllAvailable()
        print(query.lastProgress.input_rows, query.status["message"])
        query.savepoint("before-upgrade")
        query.stop()
    """

    def __init__(
        self,
        plan: JobPlan,
        spark: SparkSession,
        allowed: Allowed,
        beginning: StartPosition,
        *,
        trigger: Mapping[str, Any] | None,
        on_progress: Callable[[Progress], None] | None,
        stop: threading.Event,
        started_by: StartedBy,
    ) -> None:
        self._plan = plan
        self._spark = spark
        self._allowed = allowed
        self._beginning = beginning
        self._trigger = trigger
        self._started_by = started_by
        self._on_progress = on_progress
        self._stop = stop
        self._recent: deque[Progress] = deque(maxlen=RECENT_MAX)
        self._run = JobRun(plan, spark, self._note, stop)
        self._catalog = Catalog(plan.store, plan.name, plan.clock)
        self._ended = threading.Event()
        self._result: RunResult | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"RunHandle({self.name!r}, term={self._run.term}, {self.status['message']!r})"

    # --- how it runs ---------------------------------------------------------------------------------------------

    def begin(self) -> RunHandle:
        """Check the run in this thread, and carry it out in another one. For `StreamingJob.start`."""
        checked = self._run.check(self._allowed, self._beginning)
        # Spark's local properties (pool, job group) and the session are those of the thread that starts it, as for
        # Spark's own queries.
        target = inheritable_thread_target(self._spark)(lambda: self._go(checked))
        threading.Thread(target=target, name=f"stillstate-run-{self.name}", daemon=True).start()
        atexit.register(self._end_with_python)
        return self

    def run_here(self) -> RunResult:
        """Carry the run out in this thread. For `StreamingJob.run`."""
        try:
            return self._run.go(self._run.check(self._allowed, self._beginning), self._trigger, self._started_by)
        finally:
            self._ended.set()

    def _go(self, checked: CheckedRun) -> None:
        try:
            self._result = self._run.go(checked, self._trigger, self._started_by)
        except BaseException as error:
            self._error = error  # it is the handle's: `awaitTermination` raises it
        finally:
            self._ended.set()
            atexit.unregister(self._end_with_python)

    def _end_with_python(self) -> None:
        self._stop.set()
        self._ended.wait(_END_TIMEOUT_S)

    def _note(self, progress: Progress) -> None:
        self._recent.append(progress)
        if self._on_progress is not None:
            self._on_progress(progress)

    # --- looking -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The job's name."""
        return self._plan.name

    @property
    def id(self) -> str:
        """The id of the job's root; the same over all runs. Costs a request to the store."""
        return self._catalog.job_info().uid

    @property
    def runId(self) -> int:
        """The run's term: each run of a job has a higher one. 0 until it is claimed."""
        return self._run.term

    @property
    def isActive(self) -> bool:
        """Whether the run has not ended."""
        return not self._ended.is_set()

    @property
    def lastProgress(self) -> Progress | None:
        """The numbers of the newest epoch of this run; None before the first."""
        return self._recent[-1] if self._recent else None

    @property
    def recentProgress(self) -> list[Progress]:
        """The numbers of the newest hundred epochs of this run, oldest first."""
        return list(self._recent)

    @property
    def status(self) -> dict[str, Any]:
        """What the run does now: `message`, `isDataAvailable` and `isTriggerActive`, as Spark's `status` has them."""
        query = self._run.query
        if self._ended.is_set() or query is None:
            message = self._end_message() if self._ended.is_set() else "Starting: claims the job and restores its state"
            return {"message": message, "isDataAvailable": False, "isTriggerActive": False}
        return dict(query.status)

    def _end_message(self) -> str:
        if self._error is not None:
            return f"Terminated with exception: {type(self._error).__name__}: {self._error}"
        return (
            "Stopped" if self._result is None or self._result.state == "stopped" else "Finished: the source has ended"
        )

    @property
    def result(self) -> RunResult | None:
        """How the run ended, at which snapshot; None while it is active, and of one that failed."""
        return self._result

    def exception(self) -> BaseException | None:
        """Return the error that ended the run; None if it is active, or ended without one."""
        return self._error

    # --- waiting and ending --------------------------------------------------------------------------------------

    def awaitTermination(self, timeout: float | None = None) -> bool:
        """Wait until the run ends.

        Args:
            timeout: in seconds; None waits for ever.

        Returns:
            Whether it has ended.

        Raises:
            StillstateError: that ended the run; see `StreamingJob.run`.
        """
        if not self._ended.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self, timeout: float | None = None) -> None:
        """End the run after its current epoch, with a checkpoint, and wait for that. An error that ends it meanwhile is
        in `exception`.

        Args:
            timeout: in seconds; None waits for ever.

        Raises:
            Unavailable: the run did not end in that time; it still will.
        """
        self._stop.set()
        if not self._ended.wait(timeout):
            raise Unavailable(
                f"the run of job {self.name!r} did not end in {timeout} s; it ends after its current epoch. Wait for "
                "it with awaitTermination()"
            )

    def processAllAvailable(self) -> None:
        """Wait until all data that its sources have now is processed and checkpointed, and its output published. For
        tests and notebooks: with a source that always has more it may never return.

        Raises:
            StillstateError: that ended the run.
        """
        while self._is_begun() and (query := self._run.query) is not None:
            self._let_spark_finish(query)
            if self._is_settled(query):
                return
            self._ended.wait(_LOOK_INTERVAL_S)

    def _is_begun(self) -> bool:
        """Wait until the run streams; return False once it has ended.

        Raises:
            StillstateError: that ended it.
        """
        while self._run.query is None and not self._ended.wait(_LOOK_INTERVAL_S):
            pass
        return not self.awaitTermination(0)

    def _let_spark_finish(self, query: StreamingQuery) -> None:
        try:
            query.processAllAvailable()
        except Exception:
            # The error of the query is one of the run, which says it better; one that is not the run's own is raised.
            if not self._ended.wait(_END_TIMEOUT_S):
                raise

    def _is_settled(self, query: StreamingQuery) -> bool:
        driver = self._run.driver
        check(driver is not None, "a run that streams has a driver")
        assert driver is not None
        return driver.is_settled and is_idle(query)

    # --- savepoints ----------------------------------------------------------------------------------------------

    def savepoint(
        self,
        name: str | None = None,
        *,
        stop: bool = False,
        drain: bool = False,
        tags: tuple[str, ...] = (),
        note: str = "",
        format: SavepointFormat = "native",
        independent: bool = False,
    ) -> SavepointRecord:
        """Make a savepoint, within an epoch, and wait until it is complete. Of a run that has ended, the newest
        snapshot is saved.

        Args:
            name: by default the time, and some characters.
            stop: end the run after it; no epoch comes between.
            drain: first end the input: timers and windows give what they hold. Ends the run.
            tags, note: to find it by.
            format, independent: see `SavepointRecord`.

        Returns:
            Its record, in state COMPLETED; `<store>/<job>/savepoints/<name>` is a place to start from.

        Raises:
            SavepointExists, InvalidConfiguration: refused. Unavailable: the run ended before it answered, or the
                savepoint failed; the message says why.
        """
        then: SavepointThen = "drain" if drain else "stop" if stop else "continue"
        maker = Savepointer(
            self._catalog, self._live_status, clock=self._plan.clock, ids=self._plan.ids, convert=convert_small
        )
        made = maker.make(name, then=then, tags=tags, note=note, format=format, independent=independent)
        check(isinstance(made, SavepointRecord), "a savepoint that is waited for has a record")
        assert isinstance(made, SavepointRecord)
        if made.state != "COMPLETED":
            raise Unavailable(f"savepoint {made.name!r} is {made.state}: {made.message}")
        if then != "continue":
            self.awaitTermination()
        return made

    def _live_status(self) -> RunStatus | None:
        """Return the heartbeat of this run, if it lives."""
        if not self.isActive or not self._is_begun():
            return None
        status = self._catalog.status()
        return status if status is not None and status.term == self._run.term else None
