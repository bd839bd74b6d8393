"""The documents about the runs of a job: per run a term, created once, and two that the run rewrites: a heartbeat, and
the task numbers of its newest epochs.

A term alone stops no run. The fencing snapshot stops an older run, see snapshot/fencing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX, SMALL_JSON_BYTES_MAX
from state_runtime.base.progress import Progress
from state_runtime.base.sink_state import SinkState
from state_runtime.base.source_state import YOUNGER, SourceState
from state_runtime.base.steps import Step
from state_runtime.snapshot.create_once import Proposal, create_next, read_newest
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.epoch_tasks import RunEpochs, decode_epochs, encode_epochs
from state_runtime.snapshot.paths import (
    TERMS_DIR,
    epochs_path,
    epochs_term_of,
    heartbeat_path,
    term_of,
    term_path,
)
from state_runtime.store import Store

__all__ = [
    "RunState",
    "RunStatus",
    "Term",
    "claim_term",
    "newest_term",
    "read_epochs",
    "read_status",
    "write_epochs",
    "write_status",
    "write_stopped",
]

RunState = Literal["starting", "running", "stopped", "finished", "failed", "fenced"]


@dataclass(frozen=True)
class Term:
    """One run of a job; the number only grows.

    Attributes:
        process_space: where `pid` is only this run (`base/process_space.py`); empty if the run did not record it.
    """

    term: int
    run_uid: str
    host: str
    pid: int
    started_at_ms: int
    process_space: str = ""


@dataclass(frozen=True)
class RunStatus:
    """The newest heartbeat of a run.

    Attributes:
        at_ms: wall clock of the driver's machine when it was written.
        message: one line for people: why it failed, which run fenced it.
        restored, restoring: while shards are restored after a start: the number done, and the total; 0 and 0 at other
            times.
        progress: complete numbers of the run's newest epoch.
        advanced_at_ms: wall clock of the run's last progress (an epoch or a task ended, or its source was quiet); 0 if
            the run did not record it.
        quiet: at `advanced_at_ms` this run had asked the source, and the source had nothing new; no epoch was under way
            or due.
        error_kind: of a run that failed, the kind of its error (`StillstateError.kind`).
        cause: one line for people: why this run was started, if not by a person.
        supervisor_pid: of the process on the same host that restarts the driver if it dies; 0: no such process.
        parallelism, backend: of the run; 0 and empty if the run did not record them.
        settings: others that it was started with, by their names in `stillstate.yaml` and as text; none may be secret.
            Empty if the run did not record them, and for jobs without a file.
        process_space: where `pid` is only the driver (`base/process_space.py`); empty if the run did not record it.
        time_zone: of the run's Spark session; empty if the run did not record it.
        sources: how far the run is behind those of its sources that can be asked.
        sinks: those that are away, and what waits for them.
        steps: its pipeline, and the rows of each step since the run began; empty if the run did not record it.
    """

    term: int
    run_uid: str
    state: RunState
    at_ms: int
    started_at_ms: int
    heartbeat_interval_s: float
    pid: int
    host: str
    snapshot_id: int = 0
    batch_id: int = -1
    message: str = ""
    progress: Progress | None = None
    restored: int = 0
    restoring: int = 0
    advanced_at_ms: int = 0
    quiet: bool = False
    error_kind: str = ""
    cause: str = ""
    supervisor_pid: int = 0
    parallelism: int = 0
    backend: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    process_space: str = ""
    time_zone: str = ""
    steps: tuple[Step, ...] = ()
    sources: tuple[SourceState, ...] = ()
    sinks: tuple[SinkState, ...] = ()

    def age_s(self, now_ms: int) -> float:
        """Return the seconds since the heartbeat; never negative, even if clocks differ."""
        return max(0.0, (now_ms - self.at_ms) / 1000)

    def is_live(self, now_ms: int, timeout_s: float) -> bool:
        """Whether the run reported within `timeout_s` that it works."""
        return self.state in ("starting", "running") and self.age_s(now_ms) <= timeout_s


def newest_term(store: Store) -> int:
    """Return the highest claimed term, 0 if the job never ran."""
    return max((t for t in map(term_of, store.list_names(TERMS_DIR)) if t is not None), default=0)


def claim_term(store: Store, *, actor: Actor, above: int = 0) -> Term:
    """Claim the next term. Atomic: two claimers get different terms.

    A claimed term says which run may write next; only the fencing snapshot takes the job away from an older run.

    Args:
        above: the term is higher than this one: that of a snapshot that another job has made.

    Raises:
        Fenced: others kept claiming; the job is contended.
        OutcomeUnknown: the store could not confirm; start again (terms may skip numbers).
    """

    def propose() -> Proposal[Term]:
        term = Term(
            term=max(newest_term(store), above) + 1,
            run_uid=actor.ids.uid(),
            host=actor.host,
            pid=actor.pid,
            started_at_ms=actor.clock.now_ms(),
            process_space=actor.process_space,
        )
        return Proposal(term_path(term.term), encode_document("term", term, younger={"process_space": ""}), term)

    def contended() -> Fenced:
        return Fenced(
            f"{CLAIM_ATTEMPTS_MAX} claims of a term were lost in a row: too many drivers start this job at once"
        )

    return create_next(store, propose, contended=contended)


def read_status(store: Store) -> RunStatus | None:
    """Read the newest run's heartbeat; a run that has claimed its term and has no heartbeat yet is "starting". None
    without a run.

    Raises:
        Unavailable: terms came and went while they were read; try again.
    """

    def read(term: int) -> RunStatus:
        try:
            data = store.read(heartbeat_path(term), SMALL_JSON_BYTES_MAX)
        except FileNotFoundError:
            return _starting(store, term)
        return decode_document("heartbeat", RunStatus, data, heartbeat_path(term))

    return read_newest(lambda: newest_term(store), read, f"the newest term in {store.url}")


def _starting(store: Store, term: int) -> RunStatus:
    claim = _read_term(store, term)
    return RunStatus(
        term=term,
        run_uid=claim.run_uid,
        state="starting",
        at_ms=claim.started_at_ms,
        started_at_ms=claim.started_at_ms,
        heartbeat_interval_s=0.0,
        pid=claim.pid,
        host=claim.host,
        process_space=claim.process_space,
    )


def _read_term(store: Store, term: int) -> Term:
    return decode_document("term", Term, store.read(term_path(term), SMALL_JSON_BYTES_MAX), term_path(term))


def write_status(store: Store, status: RunStatus) -> None:
    """Replace the heartbeat of a term. Only the run that owns the term calls it."""
    store.put(heartbeat_path(status.term), encode_document("heartbeat", status, younger_inside={"sources": YOUNGER}))


def write_stopped(store: Store, term: Term, snapshot_id: int, message: str, clock: Clock) -> None:
    """Record that a term was claimed to change the root and not to run: readers of the status see a job that has ended,
    and not one that is starting.

    Args:
        snapshot_id: that was made under the term.
        message: what was done.
    """
    status = RunStatus(
        term=term.term,
        run_uid=term.run_uid,
        state="stopped",
        at_ms=clock.now_ms(),
        started_at_ms=term.started_at_ms,
        heartbeat_interval_s=0.0,
        pid=term.pid,
        host=term.host,
        snapshot_id=snapshot_id,
        message=message,
    )
    write_status(store, status)


def read_epochs(store: Store) -> RunEpochs | None:
    """Read the task numbers of the newest epochs, of the newest run that recorded any; None if no run has.

    A job that was in this root before may have left such a document, if a version that did not know it deleted the job.
    The document counts only together with its own term.

    Raises:
        Unavailable: such documents came and went while they were read; try again.
    """

    def newest() -> int:
        names = store.list_names(TERMS_DIR)
        told = {t for t in map(epochs_term_of, names) if t is not None}
        return max(told.intersection(map(term_of, names)), default=0)

    def read(term: int) -> RunEpochs | None:
        told = decode_epochs(store.read(epochs_path(term), SMALL_JSON_BYTES_MAX), epochs_path(term))
        return told if _read_term(store, term).run_uid == told.run_uid else None

    return read_newest(newest, read, f"the newest epochs in {store.url}")


def write_epochs(store: Store, told: RunEpochs) -> None:
    """Replace the task numbers of a run's newest epochs. Only the run that owns the term calls it."""
    store.put(epochs_path(told.term), encode_epochs(told))
