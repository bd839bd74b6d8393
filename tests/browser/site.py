"""Dagster as people meet it: its web server, its daemon and the code location, as processes on a folder of the test's.

Life of a `Site`: made → `start` returns when the page lists the jobs and the daemon lives → `close` ends what was
started, the drivers that Dagster's runs started included. Closing works from any state.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from examples.servers.dagster import REPOSITORY, Dagster, DagsterRefused, free_port, wait_for
from stillstate.orchestration.starter import instance_settings

ROOT = Path(__file__).resolve().parents[2]
LOCATION = "stillstate"
START_S = 600.0
STOP_S = 30.0

_READY = """
query { workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError { __typename
            ... on RepositoryLocation { repositories { jobs { name } } } ... on PythonError { message } } } } }
        instance { daemonHealth { allDaemonStatuses { required healthy } } } }
"""
_LAUNCH = """
mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
    ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } } } }
"""
_CHECK = """
query ($path: [String!]!) { assetNodeOrError(assetKey: {path: $path}) { ... on AssetNode {
    assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization {
        evaluation { success severity description } } } } } } } }
"""
_NEWEST = """
query ($path: [String!]!) { assetOrError(assetKey: {path: $path}) { ... on Asset {
    assetMaterializations(limit: 1) { description metadataEntries { label ... on IntMetadataEntry { intValue } } } } } }
"""

_OBSERVED = """
query ($path: [String!]!) { assetOrError(assetKey: {path: $path}) { ... on Asset {
    assetObservations(limit: 20) { timestamp runId description } } } }
"""


class Site:
    """See the module.

    Args:
        folder: has `stillstate.yaml`; what Dagster and the drivers write goes there too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "stillstate.yaml"
        self.log = folder / "dagster.log"
        self.dagster = Dagster(f"http://127.0.0.1:{free_port()}")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        home = self.folder / "home"
        home.mkdir()
        (home / "dagster.yaml").write_text(instance_settings())
        workspace = self.folder / "workspace.yaml"
        workspace.write_text(
            "load_from:\n  - python_module:\n      module_name: tests.browser.location\n"
            f"      location_name: {LOCATION}\n"
        )
        port = self.dagster.url.rsplit(":", 1)[1]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dagster", "dev", "-w", str(workspace), "-h", "127.0.0.1", "-p", port],
                env={
                    **os.environ,
                    "DAGSTER_HOME": str(home),
                    "STILLSTATE_CONFIG": str(self.config),
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                },
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for("Dagster's page, its daemon and the code location", self._is_ready, START_S, poll_s=0.5)
        self.dagster.query("mutation { setNuxSeen }")

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"Dagster ended by itself:\n{self.log.read_text()[-4000:]}"
        try:
            data = self.dagster.query(_READY)
        except OSError:
            return False
        for entry in data["workspaceOrError"].get("locationEntries", []):
            found = entry["locationOrLoadError"] or {}
            assert found.get("__typename") != "PythonError", found["message"]
            daemons = [d["healthy"] for d in data["instance"]["daemonHealth"]["allDaemonStatuses"] if d["required"]]
            return bool(found.get("repositories")) and bool(daemons) and all(daemons)
        return False

    def launch(self, job: str, config: Mapping[str, Any] | None = None) -> str:
        """Launch a job as the page's button does; the run's id."""
        selector = {"repositoryLocationName": LOCATION, "repositoryName": REPOSITORY, "jobName": job}
        answer = self.dagster.query(_LAUNCH, params={"selector": selector, "runConfigData": dict(config or {})})
        launched = answer["launchRun"]
        if launched["__typename"] != "LaunchRunSuccess":
            raise DagsterRefused(f"{job} was not launched: {launched}")
        return str(launched["run"]["runId"])

    def ended(self, run_id: str, timeout_s: float) -> str:
        """Wait for the end of a run; how it ended."""

        def over() -> str | None:
            status = self.dagster.run_status(run_id)
            return status if status in ("SUCCESS", "FAILURE", "CANCELED") else None

        return wait_for(f"the end of run {run_id}", over, timeout_s, poll_s=0.5)

    def check(self, asset: tuple[str, ...], name: str) -> dict[str, Any] | None:
        """The newest verdict of a check; None if there is none."""
        checks = self.dagster.query(_CHECK, path=list(asset))["assetNodeOrError"]["assetChecksOrError"]["checks"]
        (found,) = [check for check in checks if check["name"] == name]
        execution = found["executionForLatestMaterialization"]
        return None if execution is None else execution["evaluation"]

    def numbers(self, asset: tuple[str, ...]) -> dict[str, int]:
        """The integers of an asset's newest materialization."""
        made = self.dagster.query(_NEWEST, path=list(asset))["assetOrError"].get("assetMaterializations", [])
        return {
            entry["label"]: entry["intValue"]
            for entry in (made[0]["metadataEntries"] if made else [])
            if entry.get("intValue") is not None
        }

    def observation(self, asset: tuple[str, ...], text: str) -> dict[str, Any] | None:
        """The newest event of an asset, other than a materialization, that says this: when, and in which run."""
        seen = self.dagster.query(_OBSERVED, path=list(asset))["assetOrError"].get("assetObservations", [])
        return next((event for event in seen if text in (event["description"] or "")), None)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        for _ in range(2):  # one of them may have started another while the list was made
            left = [process for process in psutil.process_iter() if self._is_ours(process)]
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=STOP_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get("STILLSTATE_CONFIG") == str(self.config)
        except psutil.Error:
            return False  # gone, or another user's
