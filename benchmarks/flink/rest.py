"""Flink's two REST interfaces: the JobManager's (jobs, checkpoints) and the SQL gateway's (statements, rows).

What an answer means is said by pure functions; the classes only ask.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Checkpoints",
    "FlinkFailed",
    "Gateway",
    "JobManager",
    "JobState",
    "Row",
    "checkpoints_of",
    "folded",
    "job_state",
]

POLL_S = 0.05
REQUEST_TIMEOUT_S = 30.0
TERMINAL = frozenset({"FINISHED", "FAILED", "CANCELED", "SUSPENDED"})
Row = tuple[str, ...]


class FlinkFailed(RuntimeError):
    """Flink refused a statement, lost a job, or did not answer in time."""


@dataclass(frozen=True)
class JobState:
    """A job, as the JobManager shows it.

    Attributes:
        running_ms: wall clock when all of its tasks had been deployed; 0 before.
        ended_ms: wall clock when it reached its last state; 0 before.
    """

    state: str
    running_ms: int
    ended_ms: int

    @property
    def ended(self) -> bool:
        """Whether it will do nothing any more."""
        return self.state in TERMINAL

    @property
    def runtime_s(self) -> float:
        """From all tasks running to the end."""
        return (self.ended_ms - self.running_ms) / 1000


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a job.

    Attributes:
        completed: how many, those before a restore not counted.
        newest_id: of the newest completed one; 0 if there is none.
        newest_end_ms: wall clock when it was acknowledged by all.
        durations_ms: end to end, of the newest ones that the history has.
        restored_ms: wall clock of the newest restore; 0 if there was none.
        path: of the newest completed one, for a later start from it.
        by_end: id and end of the completed ones that the history has, oldest first.
    """

    completed: int
    newest_id: int
    newest_end_ms: int
    durations_ms: tuple[float, ...]
    restored_ms: int
    path: str
    by_end: tuple[tuple[int, int], ...] = field(default=())

    def first_after(self, at_ms: float) -> int:
        """Wall clock of the end of the first checkpoint that was triggered and completed after a moment; 0 if none was."""
        return next((end for _, end in self.by_end if end > at_ms), 0)


def job_state(answer: Mapping[str, Any]) -> JobState:
    """Read what `/jobs/<id>` answers."""
    running = [vertex["start-time"] for vertex in answer.get("vertices", ())]
    running_ms = max(running) if running and min(running) > 0 else 0
    return JobState(str(answer["state"]), int(running_ms), max(0, int(answer.get("end-time", -1))))


def checkpoints_of(answer: Mapping[str, Any]) -> Checkpoints:
    """Read what `/jobs/<id>/checkpoints` answers."""
    done = [one for one in answer.get("history", ()) if one["status"] == "COMPLETED" and not one["is_savepoint"]]
    latest = answer.get("latest") or {}
    newest, restored = latest.get("completed") or {}, latest.get("restored") or {}
    return Checkpoints(
        completed=int(answer["counts"]["completed"]),
        newest_id=int(newest.get("id", 0)),
        newest_end_ms=int(newest.get("latest_ack_timestamp", 0)),
        durations_ms=tuple(float(one["end_to_end_duration"]) for one in done),
        restored_ms=int(restored.get("restore_timestamp", 0)),
        path=str(newest.get("external_path", "")),
        by_end=tuple(sorted((int(one["id"]), int(one["latest_ack_timestamp"])) for one in done)),
    )


def folded(changes: Iterable[tuple[str, Row]]) -> dict[Row, int]:
    """The rows that a changelog leaves, each with how often it is there.

    Raises:
        FlinkFailed: it takes away what was never there.
    """
    counts: dict[Row, int] = {}
    for kind, row in changes:
        step = -1 if kind in ("DELETE", "UPDATE_BEFORE") else 1
        counts[row] = counts.get(row, 0) + step
    if any(count < 0 for count in counts.values()):
        raise FlinkFailed("Flink's changelog takes a row back that it never gave")
    return {row: count for row, count in counts.items() if count}


class _Client:
    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str) -> dict[str, Any]:
        return self._ask(path, None, "GET")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask(path, body, "POST")

    def _ask(self, path: str, body: Mapping[str, Any] | None, method: str) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                found = json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise FlinkFailed(
                f"{method} {path}: {error.code}: {error.read().decode(errors='replace')[:4000]}"
            ) from error
        except (urllib.error.URLError, OSError) as error:
            raise FlinkFailed(f"{method} {path}: {error}") from error
        return dict(found)


class JobManager(_Client):
    """Jobs and their checkpoints."""

    def slots(self) -> int:
        """How many slots the TaskManagers offer."""
        return int(self.get("/overview")["slots-total"])

    def state(self, job: str) -> JobState:
        """Where a job is."""
        return job_state(self.get(f"/jobs/{job}"))

    def checkpoints(self, job: str) -> Checkpoints:
        """Its checkpoints."""
        return checkpoints_of(self.get(f"/jobs/{job}/checkpoints"))

    def cancel(self, job: str) -> None:
        """End a job; its retained checkpoints stay."""
        self._ask(f"/jobs/{job}", None, "PATCH")
        self.wait_ended(job, REQUEST_TIMEOUT_S)

    def wait_ended(self, job: str, timeout_s: float) -> JobState:
        """The job's last state.

        Raises:
            FlinkFailed: it did not end in time.
        """
        pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
        while not (state := self.state(job)).ended:
            if time.monotonic() > deadline_s:
                raise FlinkFailed(f"job {job} is still {state.state} after {timeout_s:.0f} s")
            pause.wait(POLL_S * 4)
        return state

    def failure(self, job: str) -> str:
        """Why a job failed, as far as the JobManager tells."""
        return str(self.get(f"/jobs/{job}/exceptions").get("exceptionHistory", {}))[:4000]


class Gateway(_Client):
    """A session of the SQL gateway."""

    def __init__(self, address: str) -> None:
        super().__init__(address + "/v2")
        self._session = ""

    def open(self, settings: Mapping[str, str]) -> None:
        """Begin a new session with its settings; the one before is let go."""
        self._session = self.post("/sessions", {"properties": dict(settings)})["sessionHandle"]

    def run(self, statement: str, timeout_s: float = 300.0) -> str:
        """Run a statement to its end, and return the id of the job that it started, if any.

        Raises:
            FlinkFailed: it was refused, or took too long.
        """
        return self._results(statement, timeout_s)[0]

    def rows(self, statement: str, timeout_s: float = 300.0) -> dict[Row, int]:
        """The rows that a query leaves when its input has ended."""
        return folded(self._results(statement, timeout_s)[1])

    def _results(self, statement: str, timeout_s: float) -> tuple[str, Sequence[tuple[str, Row]]]:
        operation = self.post(f"/sessions/{self._session}/statements", {"statement": statement})["operationHandle"]
        uri, job, changes = f"/sessions/{self._session}/operations/{operation}/result/0?rowFormat=JSON", "", []
        pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
        while True:
            answer = self.get(uri)
            kind = answer["resultType"]
            job = str(answer.get("jobID") or job)
            for one in answer.get("results", {}).get("data", ()):
                changes.append((str(one["kind"]), tuple(map(str, one["fields"]))))
            if kind == "EOS" or (kind == "PAYLOAD" and not answer.get("isQueryResult", True)):
                return job, changes
            uri = str(answer.get("nextResultUri") or uri).removeprefix("/v2")
            if time.monotonic() > deadline_s:
                raise FlinkFailed(f"not done within {timeout_s:.0f} s: {statement[:200]}")
            if kind == "NOT_READY" or not answer.get("results", {}).get("data"):
                pause.wait(POLL_S)
