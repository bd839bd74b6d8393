"""The code location over job roots of a test, with a clock and launchers that the test holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
from job_roots import FakeClock, JobRoot

from state_runtime.base.clock import Clock
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.config.start_options import AS_IT_IS, StartOptions
from stillstate.orchestration.definitions import build_definitions
from stillstate.orchestration.launchers import FirstCheckpoint, LastWords, Launched, Launcher, LaunchFailed
from stillstate.orchestration.probes.pool import ProbePool
from stillstate.orchestration.resources import StillstateResource


class FakeLauncher:
    """Says what the test wants about a process, and records starts."""

    def __init__(self, root: JobRoot | None = None) -> None:
        self.root = root
        self.starts: list[bool] = []
        self.ended: list[int] = []
        self.begins: list[int | str | None] = []
        self.accepted: list[bool] = []
        self.causes: list[str] = []
        self.outcome: FirstCheckpoint | LaunchFailed = FirstCheckpoint(snapshot_id=7, how="checkpoint 7")
        self.before_term = False
        self.words: LastWords | None = None

    def start(self, options: StartOptions = AS_IT_IS, *, cause: str = "") -> Launched:
        assert self.root is not None
        self.starts.append(options.takeover)
        self.begins.append(options.begin.from_snapshot)
        self.accepted.append(options.accept_session_settings)
        self.causes.append(cause)
        if isinstance(self.outcome, LaunchFailed) and self.before_term:
            raise self.outcome
        term = self.root.start()
        return Launched(job=self.root.name, term=term, state="running", pid=7, host="h", log="/logs/x.log")

    def stop(self) -> Any:
        raise AssertionError("nobody asked for a stop")

    def wait_for_checkpoint(self, launched: Launched, timeout_s: float) -> FirstCheckpoint:
        if isinstance(self.outcome, LaunchFailed):
            raise self.outcome
        return self.outcome

    def last_words(self, status: Any) -> LastWords | None:
        return self.words

    def is_alive(self, status: Any) -> Any:
        return "dead"

    def end_lost(self, status: Any) -> str:
        self.ended.append(status.term)
        return "gone"


class World:
    """Definitions over a configuration, a clock and launchers that the test holds."""

    def __init__(self, config: Path, clock: FakeClock, instance: dg.DagsterInstance) -> None:
        launchers: dict[str, FakeLauncher] = {}
        polls: list[Callable[[float], object]] = []

        class TestResource(StillstateResource):
            def clock(self) -> Clock:
                return clock

            def poll(self) -> Callable[[float], object] | None:
                return polls[-1] if polls else None

            def lookout(self) -> ProbePool:
                return ProbePool(share_s=0.0)  # a test looks twice at one moment of its clock

            def launcher(self, spec: Spec, job: JobSpec) -> Launcher:
                return launchers.setdefault(job.name, FakeLauncher())

        self.launchers = launchers
        self.polls = polls
        self.instance = instance
        self.clock = clock
        self.resource = TestResource(config_file=str(config))
        self.defs = build_definitions(load_spec(config), self.resource)
        self.cursors: dict[str, str | None] = {}

    def tick(self, name: str) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursors.get(name), resources={"stillstate": self.resource}
        ) as context:
            result = self.defs.resolve_sensor_def(name)(context)
        assert isinstance(result, dg.SensorResult)
        self.cursors[name] = result.cursor
        return result

    @property
    def cursor(self) -> str | None:
        """Of the progress sensor."""
        return self.cursors.get("stillstate_progress")

    @cursor.setter
    def cursor(self, text: str | None) -> None:
        self.cursors["stillstate_progress"] = text

    def recovery(self) -> list[dg.RunRequest]:
        return list(self.tick("stillstate_recovery").run_requests or [])

    def submit(self, request: dg.RunRequest, status: dg.DagsterRunStatus) -> dg.DagsterRun:
        """What the daemon does with a request, up to `status`."""
        assert request.job_name is not None
        job = self.defs.resolve_job_def(request.job_name)
        run = self.instance.create_run_for_job(
            job,
            run_config=dict(request.run_config),
            tags={**job.tags, **request.tags, "dagster/run_key": request.run_key or ""},
            status=dg.DagsterRunStatus.NOT_STARTED,
        )
        self.set_status(run, status)
        return run

    def set_status(self, run: dg.DagsterRun, status: dg.DagsterRunStatus) -> None:
        if status is dg.DagsterRunStatus.FAILURE:
            self.instance.report_run_failed(run)
        elif status is dg.DagsterRunStatus.SUCCESS:
            self.instance.report_dagster_event(
                dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name), run.run_id
            )
        elif status is dg.DagsterRunStatus.STARTED:
            self.instance.report_dagster_event(
                dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name), run.run_id
            )
        elif status is not dg.DagsterRunStatus.NOT_STARTED:
            raise AssertionError(status)
