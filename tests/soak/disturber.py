"""Does to the jobs of a soak what its plan says, one thing after the other, and waits until the job is itself again.

That is: until it has made a checkpoint that began after the disturbance, in time. Processes are really killed and
really stopped, and the disk is really full.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import dagster as dg
import psutil

from examples.flights.replay import delivered_flights
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import StillstateError
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import heartbeat_path
from state_runtime.snapshot.term_files import RunStatus
from stillstate.orchestration.launchers.processes import is_over
from tests.soak.disturbances import Disturbance, Kind, who_brought_back
from tests.soak.flights_folder import CLUSTERED, JOBS, SUPERVISED, FlightsFolder

__all__ = ["CHECKPOINT_S", "Disturber", "Failed", "Recovered", "choices", "wait_for"]

CHECKPOINT_S: Final = 180.0
"""A job that makes no checkpoint for so long has not recovered, on a machine that has nothing else to do."""
_ZOMBIE_ENDS_S: Final = 90.0
_WHILE_FULL: Final = 3
"""Checkpoints that each job makes on a full disk."""
_POLL_S: Final = 0.2
_ENDED_WELL: Final = ("SKIPPED", "SUCCESS")
_NEXT_FILE_S: Final = 60.0
_INTO_AN_EPOCH_S: Final = 1.5

T = TypeVar("T")


class Failed(AssertionError):
    """Something that must hold does not; the message says what was found."""


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float, *, poll_s: float = _POLL_S) -> T:
    """Ask until the answer is true.

    Raises:
        Failed: it was not in time.
    """
    pause, ends_s = threading.Event(), SYSTEM_CLOCK.monotonic_s() + timeout_s
    while not (found := probe()):
        if SYSTEM_CLOCK.monotonic_s() > ends_s:
            raise Failed(f"waited {timeout_s:g} s for {what}")
        pause.wait(poll_s)
    return found


def choices(*, with_disk: bool) -> dict[Kind, Sequence[str]]:
    """All that can be done here, and to whom; an empty name is all of them at once."""
    disk: dict[Kind, Sequence[str]] = {"full disk": [""]}
    return {
        "kill driver": JOBS,
        "zombie": JOBS,
        "kill worker": [SUPERVISED],
        "kill executor": [CLUSTERED],
        "kill daemon": [""],
        **(disk if with_disk else {}),
    }


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """A disturbance, and how it was survived.

    Attributes:
        at_s: after the soak began.
        by: who brought the job back.
        checkpoint_s: from the disturbance to the checkpoint after it; of several jobs the longest.
        note: what else was seen.
    """

    kind: Kind
    job: str
    at_s: float
    by: str
    checkpoint_s: float
    note: str = ""


@dataclass(frozen=True)
class _Before:
    """How a job stood when it was disturbed."""

    job: str
    term: int
    snapshot_id: int
    at_ms: int


class Disturber:
    """See the module.

    Args:
        seed: which of several workers or executors is killed.
        began_s: of the soak, by the monotonic clock.
        patience_s: for a checkpoint.
    """

    def __init__(
        self, folder: FlightsFolder, instance: dg.DagsterInstance, *, seed: int, began_s: float, patience_s: float
    ) -> None:
        self._folder = folder
        self._instance = instance
        self._drawn = random.Random(f"{seed}-victims")
        self._began_s = began_s
        self._patience_s = patience_s

    def play(self, disturbance: Disturbance) -> Recovered:
        """Do one, and wait until it is over.

        Raises:
            Failed: a job did not make its checkpoint in time, or something else that must follow did not.
        """
        plays: dict[Kind, Callable[[str], dict[str, Any]]] = {
            "kill driver": self._kill_driver,
            "kill worker": self._kill_worker,
            "kill executor": self._kill_executor,
            "kill daemon": self._kill_daemon,
            "zombie": self._zombie,
            "full disk": self._full_disk,
        }
        at_s = round(SYSTEM_CLOCK.monotonic_s() - self._began_s, 1)
        found = plays[disturbance.kind](disturbance.job)
        return Recovered(kind=disturbance.kind, job=disturbance.job, at_s=at_s, **found)

    def first_checkpoints(self) -> None:
        """Wait until each job has made one, in its first run."""
        for job in JOBS:
            self._checkpoint(_Before(job, 0, 0, 0))

    # --- what is done ------------------------------------------------------------------------------------------------

    def _kill_driver(self, job: str) -> dict[str, Any]:
        """Python and Java and their children, at once; not the supervisor, which is the one to notice."""
        driver = self._driver(job)
        self._wait_for_a_moment()
        all_of_it = [driver, *driver.children(recursive=True)]
        before = self._before(job)
        for process in all_of_it:
            _signal(process, signal.SIGKILL)
        return self._survived(before, self._checkpoint(before, later_term=True), f"{len(all_of_it)} processes killed")

    def _kill_worker(self, job: str) -> dict[str, Any]:
        """One of the Python processes that have the operators in them."""
        return self._kill_one(job, "a Python worker", _is_worker)

    def _kill_executor(self, job: str) -> dict[str, Any]:
        return self._kill_one(job, "an executor", _is_executor)

    def _kill_one(self, job: str, what: str, is_victim: Callable[[psutil.Process], bool]) -> dict[str, Any]:
        victims = wait_for(f"{what} of {job}", lambda: self._children(job, is_victim), self._patience_s)
        self._wait_for_a_moment()
        victim = self._drawn.choice(sorted(victims, key=lambda process: process.pid))
        before = self._before(job)
        with suppress(psutil.NoSuchProcess):
            victim.kill()
        # The first checkpoint after it may be of an epoch whose tasks had ended; the second needs all shards anew.
        return self._survived(before, self._checkpoint(before, many=2), f"one of {len(victims)} killed")

    def _kill_daemon(self, _: str) -> dict[str, Any]:
        """The jobs must not notice, and every sensor must tick again."""
        befores = [self._before(job) for job in JOBS]
        self._folder.kill_daemon()
        self._folder.start_daemon()
        from_s = SYSTEM_CLOCK.now_ms() / 1000
        found = [self._survived(before, self._checkpoint(before)) for before in befores]
        wait_for(
            "a tick of every sensor after the daemon was killed", lambda: self._have_ticked(from_s), self._patience_s
        )
        ticked_s = SYSTEM_CLOCK.now_ms() / 1000 - from_s
        return {
            # It is the soak that started the daemon again; whoever else had to help, a job noticed.
            "by": "; ".join(sorted({f["by"] for f in found} - {"itself"})) or "the soak",
            "checkpoint_s": max(f["checkpoint_s"] for f in found),
            "note": f"every sensor ticked again after {ticked_s:.0f} s",
        }

    def _zombie(self, job: str) -> dict[str, Any]:
        """A driver sleeps, another one is started in its place, and it wakes up."""
        driver = self._driver(job)
        self._wait_for_a_moment()
        all_of_it = [driver, *driver.children(recursive=True)]
        before = self._before(job)
        for process in all_of_it:
            _signal(process, signal.SIGSTOP)
        try:
            taken = self._folder.command("start", job, "--takeover")
            if taken.returncode != 0:
                raise Failed(f"{job} was not taken over: exit code {taken.returncode}: {taken.stderr[-1000:]}")
            slept = not _has_ended(driver)
        finally:
            for process in all_of_it:
                _signal(process, signal.SIGCONT)
        first = self._checkpoint(before, later_term=True)
        wait_for(f"the end of the driver of {job} that had slept", lambda: _has_ended(driver), _ZOMBIE_ENDS_S)
        how = f"it ended {self._state_of(job, before.term)}" if slept else "it was killed in its sleep"
        return self._survived(before, first, how)

    def _full_disk(self, _: str) -> dict[str, Any]:
        """Of local copies: kept full until each job has made some checkpoints, then free again."""
        befores = [self._before(job) for job in JOBS]
        self._folder.fill_local()
        try:
            found = [
                self._survived(b, self._checkpoint(b, many=_WHILE_FULL, meanwhile=self._folder.fill_local))
                for b in befores
            ]
        finally:
            self._folder.free_local()
        lost = sum(self._local_failures(before) for before in befores)
        for before in [self._before(job) for job in JOBS]:
            self._checkpoint(before)
        return {
            "by": "; ".join(sorted({f["by"] for f in found})),
            "checkpoint_s": max(f["checkpoint_s"] for f in found),
            "note": f"{lost} local writes failed",
        }

    # --- how jobs stand ----------------------------------------------------------------------------------------------

    def _wait_for_a_moment(self) -> None:
        """A drawn one soon after a file has come: an epoch is at work more often than not, in one part or another."""
        inbox = self._folder.inbox
        seen = delivered_flights(inbox)
        wait_for("the next file of flights", lambda: delivered_flights(inbox) > seen, _NEXT_FILE_S, poll_s=0.05)
        threading.Event().wait(self._drawn.uniform(0.0, _INTO_AN_EPOCH_S))

    def _driver(self, job: str) -> psutil.Process:
        return wait_for(f"a driver of {job} to disturb", lambda: self._folder.driver(job), self._patience_s)

    def _children(self, job: str, is_wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        driver = self._folder.driver(job)
        with suppress(psutil.Error):
            return [] if driver is None else [p for p in driver.children(recursive=True) if is_wanted(p)]
        return []

    def _before(self, job: str) -> _Before:
        status = wait_for(f"the heartbeat of {job}", lambda: self._folder.status(job), self._patience_s)
        newest = self._folder.newest(job)
        return _Before(job, status.term, 0 if newest is None else newest.snapshot_id, SYSTEM_CLOCK.now_ms())

    def _checkpoint(
        self,
        before: _Before,
        *,
        later_term: bool = False,
        many: int = 1,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """The newest checkpoint, once there are so many new ones."""

        def made() -> Manifest | None:
            meanwhile()
            newest = self._folder.newest(before.job)
            if newest is None or newest.kind != "checkpoint" or newest.created_at_ms < before.at_ms:
                return None
            is_later = newest.term > before.term if later_term else newest.term >= before.term
            return newest if is_later and newest.snapshot_id >= before.snapshot_id + many else None

        return wait_for(f"a checkpoint of {before.job} after snapshot {before.snapshot_id}", made, self._patience_s)

    def _survived(self, before: _Before, checkpoint: Manifest, note: str = "") -> dict[str, Any]:
        status = self._folder.status(before.job)
        term, cause = (checkpoint.term, status.cause) if status is not None else (checkpoint.term, "")
        return {
            "by": who_brought_back(before.term, term, cause),
            "checkpoint_s": round((checkpoint.created_at_ms - before.at_ms) / 1000, 1),
            "note": note,
        }

    def _state_of(self, job: str, term: int) -> str:
        path, root = heartbeat_path(term), self._folder.catalogs[job].root
        return str(decode_document("heartbeat", RunStatus, root.read(path, SMALL_JSON_BYTES_MAX), path).state)

    def _local_failures(self, before: _Before) -> int:
        catalog, lost = self._folder.catalogs[before.job], 0
        for snapshot_id in catalog.snapshot_ids(after=before.snapshot_id):
            with suppress(StillstateError):  # given up by retention meanwhile
                progress = catalog.manifest(snapshot_id).progress
                lost += 0 if progress is None else progress.local_failures
        return lost

    def _have_ticked(self, from_s: float) -> bool:
        """Whether every sensor has ended a tick that began after that moment."""
        states = [s for s in self._instance.all_instigator_state() if s.instigator_type.value == "SENSOR"]
        newest = (
            self._instance.get_ticks(s.instigator_origin_id, s.selector_id, after=from_s, limit=5) for s in states
        )
        return bool(states) and all(
            any(tick.end_timestamp and tick.status.value in _ENDED_WELL for tick in ticks) for ticks in newest
        )


def _is_worker(process: psutil.Process) -> bool:
    """A worker is a child of PySpark's daemon, which has the same command line."""
    parent = process.parent()
    return parent is not None and all("pyspark.daemon" in _command_line(p) for p in (process, parent))


def _is_executor(process: psutil.Process) -> bool:
    return "CoarseGrainedExecutorBackend" in _command_line(process)


def _command_line(process: psutil.Process) -> str:
    """Empty of one that is gone: Java leaves its start script behind as a zombie."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or is_over(process)
    except psutil.NoSuchProcess:
        return True


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
