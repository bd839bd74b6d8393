"""A job with real snapshots whose drivers are played by the test, and a world in which a migration may die at any
point."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from maintenance_root import JOB, Job
from model import OPERATOR

from state_runtime.base.actor import Actor
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.maintenance.copy.make_savepoint import SavepointWork, savepoint_of_stopped
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import ControlAnswer, answer, new_requests, pending_stop
from state_runtime.snapshot.fencing import open_run
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.migration import Migration
from state_runtime.snapshot.term_files import RunState, RunStatus, write_status
from state_runtime.store import open_store
from stillstate.orchestration.config.driver_settings import driver_settings
from stillstate.orchestration.config.effective_settings import effective_settings, is_tried
from stillstate.orchestration.config.job_location import location_of
from stillstate.orchestration.config.spec import JobSpec, load_spec
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions
from stillstate.orchestration.launchers import LastWords, Launched, LaunchFailed, Stopped
from stillstate.orchestration.migration.migrate import Migrator, migrator_of

HOST = "here"


ENDS = [
    ("works", "kept"),
    ("quiet", "kept"),
    ("dies", "rolled-back"),
    ("hangs", "rolled-back"),
    ("no-start", "rolled-back"),
]
"""What the new driver does, and how its migration ends."""


class Died(BaseException):
    """The process that migrates is gone."""


class Migrating(Protocol):
    """A job, or two, of which processes migrate."""

    def migrator(self, on_point: Callable[[str], object] = ...) -> Migrator:
        """A new process."""
        ...


def crashed(made: Migrating, begin: Callable[[Migrator], Migration], at: int) -> Migration | None:
    """A process that dies at its `at`-th point; None if it did."""
    passed = 0

    def on_point(point: str) -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            raise Died

    try:
        return begin(made.migrator(on_point))
    except Died:
        return None


@dataclass
class Run:
    """One driver, played."""

    term: int
    pid: int
    parallelism: int
    backend: str
    state: RunState = "running"
    behaviour: str = "works"
    settings: tuple[tuple[str, str], ...] = ()
    on_trial: bool = False


@dataclass
class Drivers:
    """Launches drivers that do what the test says, at the launcher port; and plays them whenever somebody waits.

    Attributes:
        behaviour: of the next driver that is started, by its parallelism: `works`, `dies` (before a checkpoint),
            `dies-later` (after one), `stops` (before one, as somebody asks), `hangs` (no checkpoint), `quiet` (no
            input, so one if it is on trial), or `no-start`. Those that hang or are quiet say that their source is quiet.
    """

    job: Job
    spec: JobSpec
    behaviour: dict[int, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    options: list[StartOptions] = field(default_factory=list)
    on_poll: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._pids = itertools.count(100)

    # --- the port ----------------------------------------------------------------------------------------------------

    def start(self, options: StartOptions = AS_IT_IS, *, cause: str = "") -> Launched:
        self.options.append(options)
        home = location_of(self.spec)
        now, _ = effective_settings(self.spec, open_store(home.store).child(self.job.name))
        behaviour = self.behaviour.get(now.parallelism, "works")
        if behaviour == "no-start":
            raise LaunchFailed("the driver ended with exit code 2 before it ran", 2)
        for run in self.live():
            run.state = "fenced"  # what a fencing snapshot does to whoever ran
        self.job.store = open_store(home.store)
        catalog = Catalog(self.job.store, self.job.name, self.job.clock)
        refuse_if_handed_over(catalog.root)
        before = catalog.latest()
        assert before is not None
        pid = next(self._pids)
        committer = open_run(catalog, catalog.job_info(), before, actor=Actor(self.job.clock, self.job.ids, HOST, pid))
        self.job.catalog, self.job.committer = catalog, committer
        self.job.writer.root = catalog.root
        self.job.rows[committer.last.snapshot_id] = dict(self.rows_of(before.snapshot_id))
        settings = tuple(driver_settings(now).items())
        run = Run(committer.term.term, pid, now.parallelism, now.backend, behaviour=behaviour, settings=settings)
        run.on_trial = is_tried(catalog.root)
        self.runs.append(run)
        self._beat(run)
        return Launched(job=self.job.name, term=run.term, state="running", pid=pid, host=HOST, log="/logs/x.log")

    def stop(self) -> Stopped:
        run = self.runs[-1]
        if run.state == "running":
            self._end(run, "stopped")
        return Stopped(self.job.name, run.term, run.state, f"its run ended: {run.state}")

    def is_alive(self, status: RunStatus) -> Any:
        run = next((r for r in self.runs if r.pid == status.pid), None)
        return "alive" if run is not None and run.state == "running" else "dead"

    def wait_for_checkpoint(self, launched: Launched, timeout_s: float) -> Any:
        raise AssertionError("a migration watches by itself")

    def last_words(self, status: RunStatus) -> LastWords | None:
        return LastWords("/logs/x.log", "  the last words")

    def end_lost(self, status: RunStatus) -> str:
        for run in self.runs:
            if run.term == status.term and run.state == "running":
                run.state = "failed"
        return "gone"

    # --- the play ----------------------------------------------------------------------------------------------------

    def live(self) -> list[Run]:
        return [run for run in self.runs if run.state == "running"]

    def rows_of(self, snapshot_id: int) -> dict[Any, Any]:
        """What a snapshot holds, by the test's own book."""
        if snapshot_id in self.job.rows:
            return self.job.rows[snapshot_id]
        # Committed by a rollback of the code under test: its content is that of the savepoint it went back to.
        manifest = Catalog(self.job.store, self.job.name).manifest(snapshot_id)
        segment = manifest.segments[-1].snapshot_id if manifest.segments else 0
        self.job.rows[snapshot_id] = dict(self.job.rows[segment])
        return self.job.rows[snapshot_id]

    def poll(self, seconds: float) -> None:
        """Time passes: drivers beat, obey, commit, die."""
        self.job.clock.advance_s(max(seconds, 1.0))
        self.on_poll()
        for run in self.live():
            self._play(run)

    def _play(self, run: Run) -> None:
        self._obey(run)
        if run.state != "running":
            return
        if run.behaviour == "stops":
            self._end(run, "stopped")
            return
        if run.behaviour == "dies":
            self._end(run, "failed", "it broke")
            return
        has_committed = self.job.committer.last.kind == "checkpoint"
        if run.behaviour in ("works", "dies-later") or (
            run.on_trial and run.behaviour == "quiet" and not has_committed
        ):
            self.job.checkpoint()
        if run.behaviour == "dies-later":
            self._end(run, "failed", "it broke later")
            return
        self._beat(run)

    def _obey(self, run: Run) -> None:
        for request in new_requests(self.job.root, run.term, ()).values():
            if request is None or request.action != "savepoint":
                continue
            self.job.checkpoint()
            if request.then != "continue":
                self._end(run, "stopped")
            work = SavepointWork(self.job.root, f"{HOST}:{run.pid}", self.job.clock, SYSTEM_IDS)
            made = savepoint_of_stopped(work, request.name, trigger=request.trigger, tags=request.tags)
            given = ControlAnswer(request.request_id, "accepted", self.job.clock.now_ms(), "", made.snapshot_id)
            answer(self.job.root, request, given)
            return
        if pending_stop(self.job.root, run.term) is not None:
            self._end(run, "stopped")

    def _end(self, run: Run, state: RunState, message: str = "") -> None:
        run.state = state
        self._beat(run, message)

    def _beat(self, run: Run, message: str = "") -> None:
        write_status(
            self.job.root,
            RunStatus(
                term=run.term,
                run_uid=self.job.committer.term.run_uid,
                state=run.state,
                at_ms=self.job.clock.now_ms(),
                started_at_ms=self.job.committer.term.started_at_ms,
                heartbeat_interval_s=2.0,
                pid=run.pid,
                host=HOST,
                snapshot_id=self.job.committer.last.snapshot_id,
                message=message,
                quiet=run.behaviour in ("hangs", "quiet"),
                advanced_at_ms=self.job.clock.now_ms(),
                parallelism=run.parallelism,
                backend=run.backend,
                settings=run.settings,
            ),
        )


@dataclass
class Migrated:
    """The job, its drivers, and processes that migrate it, one after the other."""

    config: Path
    store: Path

    def __post_init__(self) -> None:
        self.job = Job(open_store(str(self.store)))
        self.job.checkpoints(3)
        self.spec = replace_spec(load_spec(self.config).job(JOB), store=str(self.store))
        self.drivers = Drivers(self.job, self.spec)
        self.said: list[str] = []
        self._process = itertools.count(5000)

    def running(self) -> Migrated:
        self.drivers.start()
        self.job.checkpoint()
        return self

    def migrator(self, on_point: Callable[[str], object] = lambda point: None) -> Migrator:
        """A new process."""
        return migrator_of(
            self.spec,
            lambda at: Catalog(open_store(location_of(at).store), JOB, self.job.clock),
            lambda at: self.drivers,
            Actor(self.job.clock, SYSTEM_IDS, HOST, next(self._process)),
            poll=self.drivers.poll,
            say=self.said.append,
            on_point=on_point,
        )

    def newest(self) -> Any:
        found = Catalog(open_store(location_of(self.spec).store), JOB).latest()
        assert found is not None
        return found

    def with_file(self, **settings: Any) -> Migrated:
        """The file says something else from now on."""
        self.spec = replace_spec(self.spec, **settings)
        self.drivers.spec = self.spec
        return self


def replace_spec(spec: JobSpec, **settings: Any) -> JobSpec:
    return spec.model_copy(update=settings)


__all__ = ["ENDS", "HOST", "OPERATOR", "Died", "Drivers", "Migrated", "crashed", "replace", "replace_spec"]
