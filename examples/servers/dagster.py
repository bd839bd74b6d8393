"""A work folder with Dagster in it, other processes beside it, and a clean end of all of them; for demos.

Life of a ``DagsterStack``:

1. made: the work folder exists, nothing runs;
2. started: Dagster's web server and daemon answer; other processes may be started;
3. closed: nothing that the stack started, directly or through Dagster, runs any more. Closing works from any state.

Every process below the stack inherits a token in its environment, so that the end finds all of them, the drivers that
Dagster started in sessions of their own included, and nobody else's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import psutil

from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.launchers import build_launcher
from stillstate.orchestration.starter import instance_settings

ROOT: Final = Path(__file__).resolve().parents[2]
CODE_LOCATION: Final = "stillstate"
REPOSITORY: Final = "__repository__"

_TOKEN: Final = "STILLSTATE_DEMO_TOKEN"
_DAGSTER_START_S: Final = 90.0
_DAGSTER_STOP_S: Final = 20.0
_TAIL_LINES: Final = 25
_HTTP_TIMEOUT_S: Final = 15.0
_RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024

T = TypeVar("T")


class WaitedTooLong(TimeoutError):
    """Something did not happen in time; the message says what was waited for."""


class DagsterRefused(RuntimeError):
    """Dagster's web server answered with an error; the message has its words."""


class NotADemoFolder(ValueError):
    """The work folder holds something else. Name an empty or a new one."""


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float, *, poll_s: float = 0.25) -> T:
    """Ask ``probe`` until it returns something true.

    Raises:
        WaitedTooLong: It did not within ``timeout_s``.
    """
    pause = threading.Event()
    deadline = monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if monotonic() > deadline:
            raise WaitedTooLong(f"waited {timeout_s:g} s for {what}")
        pause.wait(poll_s)


@dataclass(frozen=True)
class DagsterRun:
    """One run of Dagster's."""

    run_id: str
    job: str
    status: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Materialization:
    """One materialization of an asset: its numbers by name, its tags, and the run that made it ("" for none)."""

    run_id: str
    numbers: Mapping[str, float]
    tags: Mapping[str, str]


class Dagster:
    """Dagster's web server, asked through GraphQL.

    Args:
        url: Where it listens, without a path.
        job: A job of Stillstate's that its code location has when it is ready, for `not_ready`.
    """

    def __init__(self, url: str, job: str = "") -> None:
        self.url = url
        self._start_job = f"start_{job}"
        # The server is on this machine: a proxy of the environment has no business with it.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def query(self, query: str, **variables: Any) -> dict[str, Any]:
        """Send one query.

        Raises:
            OSError: The server does not answer.
            DagsterRefused: It answers with errors.
        """
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        try:
            with self._http.open(request, timeout=_HTTP_TIMEOUT_S) as response:
                answer = json.loads(response.read(_RESPONSE_BYTES_MAX))
        except urllib.error.HTTPError as error:
            raise DagsterRefused(f"HTTP {error.code}: {error.read(2000).decode(errors='replace')}") from error
        if answer.get("errors"):
            raise DagsterRefused("; ".join(error["message"] for error in answer["errors"]))
        data: dict[str, Any] = answer["data"]
        return data

    def not_ready(self) -> str:
        """What is still missing before jobs can be launched; "" if nothing is.

        Raises:
            DagsterRefused: The code location cannot be loaded: it never will be ready.
        """
        try:
            data = self.query(_READY_QUERY)
        except OSError as error:
            return f"the web server does not answer ({error})"
        for location in data["workspaceOrError"].get("locationEntries", []):
            failure = location["locationOrLoadError"] or {}
            if failure.get("__typename") == "PythonError":
                raise DagsterRefused(f"the code location does not load: {failure['message']}")
        names = {job["name"] for r in data["repositoriesOrError"].get("nodes", []) for job in r["jobs"]}
        if self._start_job not in names:
            return f"the code location has no job {self._start_job} yet"
        daemons = data["instance"]["daemonHealth"]["allDaemonStatuses"]
        ill = [daemon["daemonType"] for daemon in daemons if daemon["required"] and not daemon["healthy"]]
        return f"daemons without a heartbeat: {', '.join(ill)}" if ill or not daemons else ""

    def daemons(self) -> dict[str, bool]:
        """The required daemons, and whether each is healthy."""
        statuses = self.query(_READY_QUERY)["instance"]["daemonHealth"]["allDaemonStatuses"]
        return {daemon["daemonType"]: bool(daemon["healthy"]) for daemon in statuses if daemon["required"]}

    def launch(self, job: str) -> str:
        """Launch a job with its default configuration; return the run's id.

        Raises:
            DagsterRefused: It was not launched.
        """
        selector = {"repositoryLocationName": CODE_LOCATION, "repositoryName": REPOSITORY, "jobName": job}
        answer = self.query(_LAUNCH_QUERY, params={"selector": selector, "runConfigData": {}})["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise DagsterRefused(f"{job} was not launched: {answer}")
        return str(answer["run"]["runId"])

    def runs(self, tags: Mapping[str, str]) -> list[DagsterRun]:
        """The runs that carry all these tags, newest first."""
        wanted = [{"key": key, "value": value} for key, value in tags.items()]
        answer = self.query(_RUNS_QUERY, filter={"tags": wanted})["runsOrError"]
        if answer["__typename"] != "Runs":
            raise DagsterRefused(f"runs with {dict(tags)}: {answer}")
        return [
            DagsterRun(r["runId"], r["jobName"], r["status"], {tag["key"]: tag["value"] for tag in r["tags"]})
            for r in answer["results"]
        ]

    def run_status(self, run_id: str) -> str:
        """The status of one run: QUEUED, STARTED, SUCCESS, FAILURE, …"""
        answer = self.query(_RUN_QUERY, run=run_id)["runOrError"]
        return str(answer.get("status", answer["__typename"]))

    def run_failures(self, run_id: str) -> list[str]:
        """What the failed steps of a run said."""
        events = self.query(_RUN_FAILURES_QUERY, run=run_id)["logsForRun"].get("events", [])
        errors = (event.get("error") for event in events)
        # The failure of the only step is repeated as the failure of the run.
        return list(dict.fromkeys(error["message"].strip() for error in errors if error))

    def wait_for_run(self, run_id: str, what: str, timeout_s: float) -> None:
        """Wait until a run has succeeded.

        Raises:
            WaitedTooLong: It goes on for longer.
            DagsterRefused: It failed.
        """

        def ended() -> str | None:
            status = self.run_status(run_id)
            return status if status in ("SUCCESS", "FAILURE", "CANCELED") else None

        status = wait_for(what, ended, timeout_s, poll_s=0.5)
        if status != "SUCCESS":
            raise DagsterRefused(f"{what}: run {run_id} ended as {status}: {self.run_failures(run_id)}")

    def materializations(self, path: tuple[str, ...], limit: int = 1000) -> list[Materialization]:
        """The newest materializations of an asset, newest first."""
        asset = self.query(_ASSET_QUERY, path=list(path), limit=limit)["assetOrError"]
        if asset["__typename"] != "Asset":
            raise DagsterRefused(f"asset {'/'.join(path)}: {asset}")
        return [
            Materialization(
                run_id=event["runId"] or "",
                numbers={
                    entry["label"]: float(entry["intValue"] if "intValue" in entry else entry["floatValue"])
                    for entry in event["metadataEntries"]
                    if entry.get("intValue") is not None or entry.get("floatValue") is not None
                },
                tags={tag["key"]: tag["value"] for tag in event["tags"]},
            )
            for event in asset["assetMaterializations"]
        ]

    def check(self, path: tuple[str, ...], name: str) -> str | None:
        """What the newest evaluation of an asset's check says, if it has not passed."""
        key = {"assetKey": {"path": list(path)}, "name": name}
        found = self.query(_CHECK_QUERY, **key)["assetCheckExecutions"]
        evaluation = found[0]["evaluation"] if found else None
        return None if evaluation is None or evaluation["success"] else str(evaluation["description"])


_CHECK_QUERY: Final = """
query ($assetKey: AssetKeyInput!, $name: String!) { assetCheckExecutions(assetKey: $assetKey, checkName: $name, limit: 1) {
    evaluation { success description } } }
"""
_READY_QUERY: Final = """
query { repositoriesOrError { ... on RepositoryConnection { nodes { name jobs { name } } } }
        workspaceOrError { ... on Workspace { locationEntries {
            locationOrLoadError { __typename ... on PythonError { message } } } } }
        instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }
"""
_LAUNCH_QUERY: Final = """
mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
    ... on LaunchRunSuccess { run { runId } } ... on Error { message }
    ... on RunConfigValidationInvalid { errors { message } } } }
"""
_RUNS_QUERY: Final = """
query ($filter: RunsFilter!) { runsOrError(filter: $filter, limit: 200) { __typename
    ... on Runs { results { runId jobName status tags { key value } } } ... on Error { message } } }
"""
_RUN_QUERY: Final = "query ($run: ID!) { runOrError(runId: $run) { __typename ... on Run { status } } }"
_RUN_FAILURES_QUERY: Final = """
query ($run: ID!) { logsForRun(runId: $run) { ... on EventConnection { events {
    ... on ExecutionStepFailureEvent { error { message } } ... on RunFailureEvent { error { message } } } } } }
"""
_ASSET_QUERY: Final = """
query ($path: [String!]!, $limit: Int!) { assetOrError(assetKey: {path: $path}) { __typename
    ... on Asset { assetMaterializations(limit: $limit) { tags { key value } runId metadataEntries { label
        ... on IntMetadataEntry { intValue } ... on FloatMetadataEntry { floatValue } } } } } }
"""


class DagsterStack:
    """The work folder, and what runs on it. Use it as a context manager; see the module for its life.

    Args:
        work: The folder; new, empty, or of an earlier demo of the same name.
        demo: The demo's name.
        config: Its ``stillstate.yaml``.
        job: The job that the demo is about.
        leavings: What a demo leaves in the folder, beside logs, stores and Dagster's own files.
        port: For Dagster's web page; 0 takes a free one.
        fresh: Remove what an earlier demo left in the folder.

    Attributes:
        variables: The environment of all processes.

    Raises:
        NotADemoFolder: The folder has content that no demo made; nothing was touched.
    """

    def __init__(
        self,
        work: Path,
        *,
        demo: str,
        config: Path,
        job: str,
        leavings: Sequence[str] = (),
        port: int = 0,
        fresh: bool = False,
    ) -> None:
        self.work = work.absolute()
        self.job, self.config = job, config
        _prepare(self.work, f".{demo}-demo", leavings, fresh=fresh)
        self.dagster_log = self.work / "logs" / "dagster.log"
        self._token = uuid.uuid4().hex
        self.variables = {
            **os.environ,
            "DAGSTER_HOME": str(self.work / "dagster"),
            "STILLSTATE_CONFIG": str(config),
            f"{demo.upper()}_WORK": str(self.work),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            _TOKEN: self._token,
        }
        self.dagster = Dagster(f"http://127.0.0.1:{port or free_port()}", job)
        self._dagster_process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a process on this folder."""
        return dict(self.variables)

    def spec(self) -> tuple[Spec, JobSpec]:
        """The configuration as the demo's processes see it."""
        spec = load_spec(self.config, environ=self.variables)
        return spec, spec.job(self.job)

    def catalog(self) -> Catalog:
        """The job's snapshots and its newest run."""
        _, job = self.spec()
        return Catalog(open_store(job.store, job.storage_options), self.job)

    def start_dagster(self) -> None:
        """Start web server and daemon, and wait until jobs can be launched.

        Raises:
            WaitedTooLong, DagsterRefused: It did not come up; see ``dagster_log``.
        """
        port = self.dagster.url.rsplit(":", 1)[1]
        command = ["-m", "dagster", "dev", "-w", str(ROOT / "workspace.yaml"), "-h", "127.0.0.1", "-p", port]
        process = self._dagster_process = self.spawn(command, self.dagster_log)
        missing = "it has not been asked yet"

        def ready() -> bool:
            nonlocal missing
            if process.poll() is not None:
                raise DagsterRefused(f"dagster dev ended with exit code {process.returncode}; see {self.dagster_log}")
            missing = self.dagster.not_ready()
            return not missing

        try:
            wait_for("Dagster's web server and daemon", ready, _DAGSTER_START_S, poll_s=0.5)
        except WaitedTooLong as error:
            raise WaitedTooLong(f"{error}: {missing}; see {self.dagster_log}") from None

    def stop_driver(self) -> str:
        """Ask the job's driver to stop after its epoch; one line that says how it ended. For the end of a demo."""
        spec, job = self.spec()
        if self.catalog().status() is None:
            return "it was never started"
        return build_launcher(spec, job).stop().how

    def tails(self) -> str:
        """The last lines of the newest logs, for a person who wants to know what went wrong."""
        logs = sorted((self.work / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime_ns)
        return "\n".join(f"--- the end of {log}\n{_tail(log)}" for log in logs[-3:])

    def close(self) -> None:
        """End everything that the stack started. Drivers that still run are killed; that loses no data."""
        if self._dagster_process is not None and self._dagster_process.poll() is None:
            # An orderly end first: Dagster's own processes say goodbye to each other.
            self._dagster_process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._dagster_process.wait(_DAGSTER_STOP_S)
        # Dagster first, so that its recovery sensor does not bring back what is ended here. Twice, since a process
        # may have started another one while the list was made.
        for _ in range(2):
            _kill([process for process in psutil.process_iter() if self._is_ours(process)])

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get(_TOKEN) == self._token
        except psutil.Error:
            return False  # gone, or another user's

    def spawn(self, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process of Python that ends with the stack."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends these in order
                cwd=self.work,
                env=self.variables,
            )


def _prepare(work: Path, marker_name: str, leavings: Sequence[str], *, fresh: bool) -> None:
    marker = work / marker_name
    if work.exists() and not marker.exists() and any(work.iterdir()):
        raise NotADemoFolder(f"{work} has content that no demo made; name an empty or a new folder with --work")
    if fresh and marker.exists():
        # Only what the demo itself makes.
        for name in ("dagster", "local", "logs", "output", "store", *leavings):
            shutil.rmtree(work / name, ignore_errors=True)
            if (work / name).exists():
                raise NotADemoFolder(f"{work / name} cannot be removed; end what uses it, or name another --work")
    for name in ("dagster", "logs"):
        (work / name).mkdir(parents=True, exist_ok=True)
    marker.touch()
    (work / "dagster" / "dagster.yaml").write_text(instance_settings())


def free_port(preferred: int = 0) -> int:
    """Return ``preferred`` if nothing on this machine listens there, else a port that is free now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    with log.open(errors="replace") as lines:
        return "".join(deque(lines, _TAIL_LINES))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
