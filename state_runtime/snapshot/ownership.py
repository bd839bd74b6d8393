"""Whether a root still belongs to the same job and run: the proof that a process makes right before it changes a root.

A process that slept (a suspended host, a paused virtual machine) may wake in a root that is another's by now. Either
the job was deleted, and a new one of the same name uses the same place. Or an older backup replaced the folder, and the
same job continued differently. Nothing that the process remembers is valid there, although every name that it knows by
number (snapshots, boundaries, terms, materializations) may exist.

Facts that are unique to each process and each job show whose the root is:

    job.json            the job's uid; a new job of the same name has another one
    snapshots/<n>       the newest snapshot that a run has committed, with its commit id: not in a backup that is older,
                        nor in another job's root
    boundary/run-…      a run's own mark (expiry_boundary.py): it is removed with the root, and is not in a backup that
                        is older than the run
    terms/<n>.json      the run's term as the run wrote it; the same
    a newer run's mark  another run has been started: if it has fenced this one, the root is no longer this one's
    boundary/<n>.json   a process that acts on a boundary must find it, or a newer one; in an older backup snapshots
                        that expired since are valid again

A store has no conditional delete, so a gap of one request stays between a proof and the request that follows it. A
process that changes several objects repeats the proof, and writes data only under names that no other process draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from state_runtime.base.clock import Clock
from state_runtime.base.errors import CorruptData, Fenced, MissingSnapshot
from state_runtime.base.ids import Ids
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.expiry_boundary import (
    ExpiryBoundary,
    advance_boundary,
    newest_boundary_sequence,
    take_back_boundary,
)
from state_runtime.snapshot.paths import BOUNDARY_DIR, run_mark_path, run_mark_term, sequence_of, term_path
from state_runtime.snapshot.term_files import Term
from state_runtime.store import Store

__all__ = ["JobProof", "Landmark", "Ownership", "Proof", "advance_own_boundary"]


class Proof(Protocol):
    """The proof that a process makes when it changes a job's root from outside its epochs."""

    @property
    def job_uid(self) -> str:
        """Uid of the job that owned the root at the start."""

    def check(self, *, since: int = 0) -> None:
        """Check that the root is still the caller's.

        Args:
            since: sequence of the boundary that the caller acts on.

        Raises:
            Fenced: the root is not the caller's any more. Change nothing there.
        """

    def check_place(self) -> None:
        """Check that it is still the same root, even if another run has the job by now.

        Raises:
            Fenced: it was deleted, or replaced.
        """


@dataclass(frozen=True)
class Landmark:
    """A manifest that is known to be in the root: its first line, which has the digest of the rest."""

    path: str
    header: bytes

    def is_in(self, root: Store) -> bool:
        """Whether the root has this manifest. One small request."""
        try:
            return root.read_range(self.path, 0, len(self.header)) == self.header
        except (FileNotFoundError, CorruptData):
            return False


def _no_landmark() -> Landmark | None:
    """Return no landmark: the caller does not follow the run's snapshots."""
    return None


@dataclass(frozen=True)
class Ownership:
    """A run's claim to its root. Nothing is remembered: each call asks the store.

    Attributes:
        job_uid: of the job that the run was opened for.
        run: its term, as it was written.
        newest: returns the newest snapshot that the run has committed; if it is unknown, job.json is checked instead.
    """

    root: Store
    job_uid: str
    run: Term
    newest: Callable[[], Landmark | None] = _no_landmark

    def check(self, *, since: int = 0) -> None:
        """Send two small requests; a few more while another run is being started.

        Args:
            since: sequence of the boundary that the caller acts on; it, or a newer one, must be there.

        Raises:
            Fenced: the root is another's by now, or a newer run has taken the job over. Change nothing there.
            StoreUnavailable, CorruptManifest: it is not known; change nothing either.
        """
        # A backup may be put in place between the two requests, so the more important check is the last one. A caller
        # that acts on a boundary needs the boundary: its expired snapshots are expired in any backup that holds it. All
        # other callers need the newest snapshot: a backup that holds it is the root as the caller knows it.
        if since:
            self.check_place()
        self._check_marks(since)
        if not since:
            self.check_place()

    def _check_marks(self, since: int) -> None:
        """Make one listing, which shows a deletion, an older backup and a newer run."""
        starting = 0
        while True:
            names = self.root.list_names(BOUNDARY_DIR)
            if run_mark_path(self.run.term, self.run.run_uid).rpartition("/")[2] not in names:
                raise self._fenced("the mark of this run is gone")
            if max((s for s in map(sequence_of, names) if s is not None), default=0) < since:
                raise self._fenced(f"boundary {since} is gone")
            newest = max((t for t in map(run_mark_term, names) if t is not None), default=0)
            if newest <= max(self.run.term, starting):
                return
            # A run that starts takes nothing over before its fencing snapshot: it may be refused, or die.
            if self._newest_snapshot_term() > self.run.term:
                raise self._fenced(f"term {newest} has taken the job over")
            starting = newest  # list once more: the checks in between were about that run only

    def check_place(self) -> None:
        """See `Proof`. Sends one small request."""
        landmark = self.newest()
        while landmark is not None:
            is_there = landmark.is_in(self.root)
            before, landmark = landmark, self.newest()
            # The run may have continued meanwhile: then an older snapshot proves nothing, and may have expired.
            if landmark != before:
                continue
            if is_there:
                return
            raise self._fenced(f"{before.path}, which it has committed, is not there")
        JobProof(self.root, self.job_uid).check()

    def check_term(self) -> None:
        """Check that the run may write its own documents, its heartbeat and its next snapshot. One small request.

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
            "and created again, a backup was put in its place, or another run has taken it over. This run changes "
            "nothing there and stops"
        )


@dataclass(frozen=True)
class JobProof:
    """The proof of a process that works on a job's root without running the job. One small request each time.

    Attributes:
        job_uid: empty if there was no job.json when the work began.
        may_be_gone: accept a root without a job.json, which has no owner yet: for a process that removes the root.
    """

    root: Store
    job_uid: str
    may_be_gone: bool = False

    def check_place(self) -> None:
        """See `Proof`."""
        self.check()

    def check(self, *, since: int = 0) -> None:
        """Check that the root still belongs to the same job.

        Args:
            since: sequence of the boundary that the caller acts on; one listing more.

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
        if since and newest_boundary_sequence(self.root) < since:
            raise Fenced(
                f"{self.root.url} was replaced by an older backup (boundary {since} is gone), while this process slept "
                "or worked on it; it changes nothing more there. Look at the root; repeat the command if it is still "
                "wanted"
            )


def _check_follows(root: Store, written: ExpiryBoundary) -> None:
    """Check that the boundary before the new one exists. If the new one is the newest, only a replaced root lacks it.

    Raises:
        Fenced: the boundary that it follows is not there.
    """
    before = written.sequence - 1
    sequences = {s for s in map(sequence_of, root.list_names(BOUNDARY_DIR)) if s is not None}
    if before and before not in sequences and max(sequences, default=0) <= written.sequence:
        raise Fenced(f"{root.url} was replaced by an older backup: boundary {before} is gone")


def advance_own_boundary(
    root: Store,
    decide: Callable[[ExpiryBoundary], ExpiryBoundary | None],
    proof: Proof,
    *,
    clock: Clock,
    ids: Ids,
    since: int = 0,
) -> ExpiryBoundary:
    """Run `advance_boundary` for a process that may have slept: nothing stays in a root that is another's by now.

    The proof is made right before the create. Because the process may sleep between the two, it checks again after the
    create. A boundary in a root that was deleted meanwhile would prevent a new job of that name from ever starting. One
    in a backup that replaced the root would let unchecked snapshots expire. In both cases the boundary is taken back. A
    boundary that was written while the job lived stays, even if another run has the job by now: others may have acted
    on it.

    Args:
        since: sequence of the boundary that the decision was prepared with.

    Raises:
        Fenced: the root is another's; nothing of this call is left in it.
        And what `advance_boundary` raises.
    """

    def look_again(written: ExpiryBoundary) -> None:
        try:
            # While this boundary is the newest, these checks fail only if the root was replaced. A boundary that is not
            # the newest does not count any more, and may be removed too.
            proof.check_place()
            _check_follows(root, written)
        except Fenced as error:
            take_back_boundary(root, written)
            raise Fenced(
                f"{error}. Boundary {written.sequence} was written meanwhile; it was taken back, and nothing else was "
                "changed"
            ) from error

    def look_before(now: ExpiryBoundary) -> None:
        # The boundary that this proposal follows: in an older backup the next number has another meaning.
        proof.check(since=max(since, now.sequence))
        if since or now.sequence:
            proof.check_place()  # the newest snapshot too: the decision was made from the snapshots up to it

    return advance_boundary(root, decide, before=look_before, after=look_again, clock=clock, ids=ids)
