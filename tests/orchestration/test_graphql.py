"""The calls of docs/graphql.md, as they stand there, against a real web server and daemon over a real job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster_graphql.schema import create_schema
from graphql import parse, validate
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.migration import read_migration
from state_runtime.snapshot.savepoint_record import list_savepoints
from state_runtime.snapshot.term_files import RunStatus
from state_runtime.store import open_store
from stillstate.orchestration.commands.begin_here import free_port

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "graphql.md").read_text()
QUERIES = {
    re.search(r"(?:query|mutation) (\w+)", text)[1]: text  # type: ignore[index]
    for text in re.findall(r"```graphql\n(.*?)```", PAGE, re.DOTALL)
}
VARIABLES = {name: json.loads(text) for name, text in re.findall(r"```json title=\"(\w+)\"\n(.*?)```", PAGE, re.DOTALL)}
WITHIN_S = 300
ENDED = ("SUCCESS", "FAILURE", "CANCELED")


@pytest.mark.parametrize("name", QUERIES)
def test_each_call_of_the_page_is_one_of_dagsters(name: str) -> None:
    assert validate(create_schema().graphql_schema, parse(QUERIES[name])) == []


class House:
    """Dagster over the folder of `stillstate init`, with its web server and daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {n: v for n, v in os.environ.items() if n not in ("STILLSTATE_CONFIG", "DAGSTER_HOME")}
        environment["PYTHONPATH"] = str(PROJECT)
        stillstate = [sys.executable, "-m", "stillstate.orchestration.cli"]
        subprocess.run([*stillstate, "init", str(folder)], check=True, env=environment, capture_output=True)
        self.port = free_port("127.0.0.1")
        self.log = folder / "dagster.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*stillstate, "dagster", "--port", str(self.port)],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close(self) -> None:
        """As Ctrl-C does."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def ask(self, query: str, variables: Any = None) -> Any:
        body = json.dumps({"query": query, "variables": variables or {}}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", body, {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            answer = json.loads(response.read())
        assert "errors" not in answer, answer
        return answer["data"]

    def jobs(self) -> set[tuple[str, str, str]]:
        """Location, repository and name of all jobs; none while Dagster still loads."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            found = self.ask(QUERIES["Jobs"])["repositoriesOrError"]
        except OSError:
            return set()
        nodes = found.get("nodes", ())
        return {(node["location"]["name"], node["name"], job["name"]) for node in nodes for job in node["jobs"]}

    def launch(self, name: str) -> Any:
        """The run of the page's variables, once it is over."""
        launched = self.ask(QUERIES["Launch"], VARIABLES[name])["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run = {"run": launched["run"]["runId"]}
        ended = within(lambda: ended_or_none(self.ask(QUERIES["Ended"], run)["runOrError"]))
        assert ended["status"] == "SUCCESS", (ended, self.log.read_text()[-3000:])
        return ended

    def status(self) -> RunStatus:
        """What the newest run says of itself."""
        found = Catalog(open_store(str(self.folder / "state")), "legs").status()
        assert found is not None
        return found


def within(look: Any) -> Any:
    return retry(retry=retry_if_result(lambda found: not found), stop=stop_after_delay(WITHIN_S), wait=wait_fixed(0.5))(
        look
    )()


def ended_or_none(run: Any) -> Any:
    assert run["__typename"] == "Run", run
    return run if run["status"] in ENDED else None


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "flights")
    try:
        yield made
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.spark
def test_the_calls_of_the_page_do_what_it_says(house: House) -> None:
    """Start, savepoint, rescale, back to an older snapshot, stop."""
    wanted = {
        ("stillstate.orchestration.definitions", "__repository__", v["job"]) for v in VARIABLES.values() if "job" in v
    }
    assert wanted <= within(house.jobs)

    house.launch("start")
    assert "driver_alive" in checks_of(house)

    house.launch("savepoint")
    root = Catalog(open_store(str(house.folder / "state")), "legs").root
    assert [record.trigger for record in list_savepoints(root)] == ["schedule"]

    assert house.status().parallelism == 2
    house.launch("rescale")
    assert house.status().parallelism == 3

    house.launch("restart")
    migration = read_migration(root)
    assert migration is not None
    assert migration.go_back_to == "1"
    assert house.status().term == migration.run_term

    house.launch("stop")
    assert house.status().state == "stopped"


def checks_of(house: House) -> set[str]:
    """The checks of the stream."""
    node = house.ask(QUERIES["Checks"], VARIABLES["checks"])["assetNodeOrError"]
    return {check["name"] for check in node["assetChecksOrError"]["checks"]}
