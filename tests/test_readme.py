"""README's blocks, as they are printed, typed into an empty folder one after the other."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate.orchestration.starter.folder import WRITTEN, text_of
from tests.s3_server import CountingServer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SECTION = README.split("\n## A job\n")[1].split("\n## ")[0]

NEEDS_ANOTHER_SYSTEM = ("stillstate import-spark",)
"""A stopped query of Spark; tests/state_runtime/importing has those."""
COMMAND_S_MAX = 240.0


def commands() -> list[str]:
    """The lines of the section's indented blocks, without their comments, in order."""
    text = re.sub(r"^```.*?^```$", "", SECTION, flags=re.MULTILINE | re.DOTALL)
    return [re.split(r"\s+#", line.strip())[0] for line in text.split("\n") if line.startswith("    ")]


def block(language: str) -> str:
    """The section's one block of a language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_init_writes_the_very_files_that_the_readme_shows() -> None:
    assert block("python") == text_of("flights_job.py.txt")
    assert block("yaml") == text_of("stillstate.yaml")


def test_all_that_init_writes_is_packaged() -> None:
    folder = ROOT / "orchestration" / "starter" / "files"
    assert {path.name for path in folder.iterdir()} == set(WRITTEN.values())


class Shell:
    """Types commands; `stillstate` and `python` are this environment's."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment

    def words(self, command: str) -> list[str]:
        first, *rest = shlex.split(command)
        return [sys.executable, *(["-m", "stillstate.orchestration.cli"] if first == "stillstate" else []), *rest]

    def run(self, command: str) -> str:
        """Its output; it must succeed."""
        ended = subprocess.run(
            self.words(command),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            stdin=subprocess.DEVNULL,
        )
        assert ended.returncode == 0, (
            f"{command}: exit code {ended.returncode}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
        )
        return ended.stdout

    def run_until(self, command: str, done: Callable[[str], bool]) -> None:
        """Start it, wait until it has done something, send what Ctrl-C sends; it must end as if nothing had failed."""
        log = self.folder.parent / "typed.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.words(command),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            wait_until(lambda: done(log.read_text()) or process.poll() is not None)
            assert process.poll() is None, f"{command}: ended by itself\n{log.read_text()[-3000:]}"
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(COMMAND_S_MAX) == 0, f"{command}: ended badly\n{log.read_text()[-3000:]}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@retry(retry=retry_if_result(lambda done: not done), stop=stop_after_delay(COMMAND_S_MAX), wait=wait_fixed(0.5))
def wait_until(done: Callable[[], bool]) -> bool:
    return done()


def has_loaded(typed: str) -> bool:
    """Whether the page that Dagster's command named shows both jobs."""
    found = re.search(r"Its page: (http://\S+)", typed)
    if found is None:
        return False
    query = json.dumps({"query": "{ assetNodes { assetKey { path } } }"}).encode()
    request = urllib.request.Request(f"{found[1]}/graphql", query, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=15) as response:
            nodes = json.loads(response.read())["data"]["assetNodes"]
    except OSError:
        return False
    paths = {tuple(node["assetKey"]["path"]) for node in nodes}
    return {("legs", "stream"), ("legs2", "stream")} <= paths


@pytest.mark.long
@pytest.mark.spark
def test_the_readmes_commands_do_what_they_say_in_an_empty_folder(tmp_path: Path) -> None:
    with CountingServer(bucket="archive") as server:
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("STILLSTATE_CONFIG", "DAGSTER_HOME")},
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.options["key"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "PYTHONPATH": str(ROOT),
        }
        shell = Shell(tmp_path, environment)
        store = tmp_path / "flights" / "state" / "legs"
        done = {
            "stillstate run legs": lambda typed: len(list(store.glob("snapshots/*/manifest.json"))) > 1,
            "stillstate dagster": has_loaded,
        }
        try:
            for command in commands():
                if command.startswith("cd "):
                    shell.folder = shell.folder / command.removeprefix("cd ")
                elif command in done:
                    shell.run_until(command, done[command])
                elif not command.startswith(NEEDS_ANOTHER_SYSTEM):
                    shell.run(command)
        finally:
            subprocess.run(shell.words("stillstate stop legs"), cwd=shell.folder, env=environment, check=False)
    catalog = Catalog(open_store(str(tmp_path / "flights" / "state"), {}), "legs2")
    newest = catalog.manifest(max(catalog.snapshot_ids()))
    assert newest.progress is not None
    assert newest.progress.state_rows > 0  # what the savepoint brought: it had read all input
    assert pq.read_table(tmp_path / "flights" / "out" / "legs").num_rows == 3 * 1000 + 5 * 200
    assert (tmp_path / "flights" / "archive" / "legs").is_dir()
