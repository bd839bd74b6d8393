"""What the demo and its check share: the work folder with Dagster in it, and the replay of the flights."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from examples.flights.data import year_parquet
from examples.servers.dagster import DagsterStack

CONFIG: Final = Path(__file__).resolve().with_name("stillstate.yaml")
JOB: Final = "flights"
START_JOB, STOP_JOB, RECOVER_JOB = f"start_{JOB}", f"stop_{JOB}", f"recover_{JOB}"


class Stack(DagsterStack):
    """The demo's folder. The year of flights in it is kept over a fresh start: it is always the same.

    Args:
        work, port, fresh: see ``DagsterStack``.
    """

    def __init__(self, work: Path, *, port: int = 0, fresh: bool = False) -> None:
        super().__init__(work, demo="flights", config=CONFIG, job=JOB, leavings=("inbox",), port=port, fresh=fresh)
        self.inbox.mkdir(exist_ok=True)
        self.replay_log = self.work / "logs" / "replay.log"
        self._replay_process: subprocess.Popen[bytes] | None = None

    @property
    def year(self) -> Path:
        """The year's Parquet file, made when it is first asked for."""
        return year_parquet(self.work)

    @property
    def inbox(self) -> Path:
        """Where the replay delivers and the job reads."""
        return self.work / "inbox"

    @property
    def legs(self) -> Path:
        """The first operator's output."""
        return self.work / "output" / "legs"

    @property
    def by_carrier(self) -> Path:
        """The second operator's output."""
        return self.work / "output" / "by-carrier"

    def start_replay(self, days_per_s: float) -> None:
        """Start to deliver the flights, or go on with another speed: what is in the inbox already is not repeated."""
        if self._replay_process is not None:
            self._replay_process.kill()
            self._replay_process.wait()
        command = ["-m", "examples.flights.replay", "--inbox", str(self.inbox), "--work", str(self.work)]
        self._replay_process = self.spawn([*command, "--speed", str(days_per_s)], self.replay_log)

    def replay_exit_code(self) -> int | None:
        """The replay's exit code; None while it runs, or if it was not started."""
        return None if self._replay_process is None else self._replay_process.poll()
