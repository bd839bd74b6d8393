"""One standalone cluster for all tests of this folder, and drivers that never outlive their test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ROOT
from ..spark.jobs import write_input
from .standalone import SPARK_HOME, Standalone

HOSTS = 3
_TIMEOUT_S = 180


class Driver:
    """A driver process, given one input file at a time: each is an epoch."""

    def __init__(self, root: Path, master: str, *conf: str, environment: dict[str, str] | None = None) -> None:
        self._root = root
        self._log = (root / "driver.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.drive", str(root), master, *conf],
            cwd=ROOT,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def epoch(self) -> dict[str, Any]:
        """Give it one more file; the numbers of the epoch that took it."""
        self.give()
        return self.take()

    def give(self) -> None:
        """One more file."""
        write_input(self._root / "in", len(list((self._root / "in").glob("*.parquet"))), 1)

    def take(self) -> dict[str, Any]:
        """The numbers of the epoch that took the oldest file whose epoch nobody has seen yet."""
        while True:
            numbers = self.line()
            if numbers["input_rows"]:
                return numbers

    def line(self) -> dict[str, Any]:
        """The numbers of its next epoch."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended: {(self._root / 'driver.log').read_text()[-4000:]}"
        read: dict[str, Any] = json.loads(line)
        return read

    def log(self) -> list[str]:
        """What it logged, at level INFO."""
        return (self._root / "driver.log").read_text().splitlines()

    def moves(self) -> list[str]:
        """What it logged of seats, lost executors and restores: for the message of a failure."""
        return [line for line in self.log() if "seats" in line or "was lost" in line or "restored from" in line]

    def stop(self) -> None:
        """Stop it and wait for a good end."""
        self.process.communicate("stop\n", timeout=_TIMEOUT_S)
        assert self.process.returncode == 0, (self._root / "driver.log").read_text()[-4000:]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Three hosts. A test that kills one starts it again."""
    cluster = Standalone(tmp_path_factory.mktemp("cluster"), HOSTS)
    yield cluster
    cluster.close()


@pytest.fixture
def start_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Start a driver on a master's URL; its job root is the test's folder."""
    started: list[Driver] = []

    def start(master: str, *conf: str, environment: dict[str, str] | None = None) -> Driver:
        started.append(Driver(tmp_path, master, *conf, environment=environment))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()


@pytest.fixture
def own_spark_home(tmp_path: Path) -> Path:
    """A `SPARK_HOME` that `local-cluster` may write its executors' folders into: the installed one belongs to everybody."""
    home = tmp_path / "spark-home"
    home.mkdir()
    for part in SPARK_HOME.iterdir():
        (home / part.name).symlink_to(part)
    return home
