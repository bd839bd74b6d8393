"""Whether a root is still whose it was: what everybody proves who may have slept, right before he changes anything.

A process that slept (a suspended host, a paused virtual machine) may wake in a root that is another's by now: the job
was deleted, and a new one of the same name lies in the same place; or the folder was replaced by an older backup of
itself, in which the same job goes on another way. Nothing that the sleeper remembers holds there, although every name
that it knows by its number (snapshots, boundaries, terms, materializations) may exist.

What is unique to each process and each job says whose the root is:

    job.json            the job's uid; a new job of the same name has another one
    boundary/run-…      a run's own mark (snapshot/boundary.py): it goes with the root, and is not in a backup that is
                        older than the run
    terms/<n>.json      the run's term as the run wrote it; the same
    a newer run's mark  another run has been started: if it has fenced this one, the root is no longer this one's

A store has no conditional delete, so between a proof and the one request that follows it a gap of that request stays.
Whoever changes several objects proves it again and again, and writes data only under names that nobody else ever draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced, MissingSnapshot
from state_runtime.base.ids import Ids
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.boundary import Boundary, advance_boundary, take_back_boundary
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.paths import BOUNDARY_DIR, run_mark_path, run_mark_term, term_path
from state_runtime.snapshot.term_files import Term
from state_runtime.store import Store

__all__ = ["JobProof", "Ownership", "Proof", "advance_own_boundary"]


class Proof(Protocol):
    """What somebody has who changes a job's root from outside of its epochs."""

    @property
    def job_uid(self) -> str:
        """Of the job whose root it was."""

    def check(self) -> None:
        """
        Raises:
            Fenced: the root is not the caller's any more. Change nothing there.
        """


@dataclass(frozen=True)
class Ownership:
    """A run's claim to its root. Nothing is remembered: each call asks the store.

    Attributes:
        job_uid: of the job that the run was opened for.
        run: its term, as it was written.
    """

    root: Store
    job_uid: str
    run: Term

    def check(self) -> None:
        """Two small requests; a few more while another run is being started.

        Raises:
            Fenced: the root is another's by now, or a newer run has taken the job over. Change nothing there.
            StoreUnavailable, CorruptManifest: it is not known; change nothing either.
        """
        JobProof(self.root, self.job_uid).check()
        # Last, because this one listing tells of a deletion, of a backup and of a newer run: a sleep between the two
        # requests is noticed by it.
        names = self.root.list_names(BOUNDARY_DIR)
        if run_mark_path(self.run.term, self.run.run_uid).rpartition("/")[2] not in names:
            raise self._fenced("the mark of this run is gone")
        newest = max((t for t in map(run_mark_term, names) if t is not None), default=0)
        # A run that starts takes nothing from anybody before its fencing snapshot: it may be refused, or die.
        if newest > self.run.term and self._newest_snapshot_term() > self.run.term:
            raise self._fenced(f"term {newest} has taken the job over")

    def check_term(self) -> None:
        """Whether the run may write what belongs to it alone, its heartbeat and its next snapshot. One small request.

        Raises:
            Fenced: the term in this root is not this run's.
            StoreUnavailable: it is not known.
        """
        path = term_path(self.run.term)
        try:
            body = self.root.read(path, SMALL_JSON_BYTES_MAX)
        except FileNotFoundError:
            raise self._fenced("the term of this run is gone") from None
        if decode_document("term", Term, body, f"{self.root.url}/{path}").run_uid != self.run.run_uid:
            raise self._fenced("another run holds the term of this one")

    def _newest_snapshot_term(self) -> int:
        try:
            latest = Catalog.of_root(self.root).latest()
        except MissingSnapshot:
            return 0
        return latest.term if latest is not None else 0

    def _fenced(self, why: str) -> Fenced:
        return Fenced(
            f"{self.root.url} does not belong to the run of term {self.run.term} any more ({why}): the job was deleted "
            "and created anew, a backup was put in its place, or another run has taken it over. This run changes "
            "nothing there and stops"
        )


@dataclass(frozen=True)
class JobProof:
    """Of somebody who works on a job's root without running the job. One small request each time.

    Attributes:
        job_uid: empty where there was no job.json when the work began.
        may_be_gone: a root without a job.json is nobody's yet, which is right for whoever removes it.
    """

    root: Store
    job_uid: str
    may_be_gone: bool = False

    def check(self) -> None:
        """
        Raises:
            Fenced: the root was deleted, or belongs to another job by now.
            StoreUnavailable, CorruptManifest: it is not known.
        """
        info = read_job_info(self.root)
        if info is None and self.may_be_gone:
            return
        if info is None or info.uid != self.job_uid:
            raise Fenced(
                f"{self.root.url} {'was deleted' if info is None else 'is the root of another job by now'}, while this "
                "process slept or worked on it; it changes nothing more there. Look at the root, and repeat the "
                "command if it is still wanted"
            )


def advance_own_boundary(
    root: Store, decide: Callable[[Boundary], Boundary | None], proof: Proof, *, clock: Clock, ids: Ids
) -> Boundary:
    """`advance_boundary` of somebody who may have slept: nothing stays in a root that is another's by now.

    The proof is made right before the create. Who falls asleep between the two looks again after it: a boundary that
    was left in a root which was deleted meanwhile would keep a new job of that name from ever starting. It is taken
    back then. One that was written while the job lived stays, whoever runs the job by now: others may have acted on it.

    Raises:
        Fenced: the root is another's; nothing of this call is left in it.
        And what `advance_boundary` raises.
    """

    def look_again(written: Boundary) -> None:
        info = read_job_info(root)
        if info is not None and info.uid == proof.job_uid:
            return
        take_back_boundary(root, written)
        raise Fenced(
            f"{root.url} was deleted, or is the root of another job by now, while boundary {written.sequence} was "
            "written; it was taken back, and nothing else was changed"
        )

    return advance_boundary(root, decide, before=proof.check, after=look_again, clock=clock, ids=ids)
