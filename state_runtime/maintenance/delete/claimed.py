"""The end of a claimed root: once the claimer has its own checkpoint, it needs nothing of the old root.

The root is deleted as a whole (maintenance/delete/roots.py). While a holder needs a part of it (a pin, a fold, a
savepoint below it), only the unneeded checkpoints are deleted, through the boundary. The remaining ones are named, and
the claimer's next run tries again. A crash leaves the claim or the tombstone in place, so that run can continue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import SnapshotInUse
from state_runtime.base.ids import Ids
from state_runtime.base.progress import Progress
from state_runtime.maintenance.delete.roots import delete_root
from state_runtime.maintenance.delete.snapshots import THREADS, Failure, delete_snapshots
from state_runtime.maintenance.marks import read_existing, read_holders
from state_runtime.snapshot.catalog import read_job_info
from state_runtime.snapshot.claim import read_claim
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.ownership import JobProof
from state_runtime.snapshot.pins import start_pins, unpin
from state_runtime.store import Store

__all__ = ["ClaimEnding", "Remains", "end_claim"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remains:
    """The remains of a claimed root.

    Attributes:
        gone: the folder is no root any more.
        holders: the holders that need the remains, for people; empty if none.
        failures: objects that could not be deleted, or that Stillstate did not write.
    """

    gone: bool
    holders: str = ""
    failures: tuple[Failure, ...] = ()


def end_claim(
    root: Store,
    claimer_uid: str,
    *,
    owner: str,
    clock: Clock,
    ids: Ids,
    prove: Callable[[], None] = lambda: None,
    threads: int = THREADS,
) -> Remains:
    """Delete a root that a job has claimed, except for parts with other holders. Repeat it after a crash, or when the
    holders are done.

    Args:
        claimer_uid: the job that claimed the root; it has its own checkpoint.
        owner: the process that deletes, `host:pid`.
        prove: raises if the run that claimed the root has lost its own job: then the root may still be needed.

    Raises:
        Fenced: the run has lost its job; or the claimed root is another job's by now. Nothing more was changed.
        CorruptManifest, UnsupportedFormat: a pin or record cannot be read; nothing was removed.
        StoreUnavailable, OutcomeUnknown: the root may have its tombstone; repeat it.
    """
    # Read before the claim: while the claim exists, the root is the one that was claimed.
    info = read_job_info(root)
    claim = read_claim(root)
    if claim is not None and claim.job_uid != claimer_uid:
        return Remains(False, f"{claim}, which has claimed it")
    boundary = read_boundary(root)
    if claim is None and not boundary.is_tombstone:
        if not any(True for _ in root.list_objects("")):
            root.remove_empty_folders("")  # a crash left them
        return Remains(True)
    prove()
    for pin in start_pins(root, claimer_uid):
        unpin(root, pin)
    try:
        deleted = delete_root(
            root,
            clock=clock,
            ids=ids,
            owner=owner,
            claimed_by=claimer_uid,
            job_uid=info.uid if info is not None else "",
            prove=prove,
            threads=threads,
        )
    except SnapshotInUse as error:
        if not read_boundary(root).is_tombstone and info is not None:
            _delete_unneeded(root, _ClaimerProof(root, info.uid, prove=prove), clock, ids, threads)
        return Remains(False, str(error))
    left = [f for f in deleted.failures if root.exists(f.path)]
    return Remains(not root.list_names("boundary"), "", tuple(left))


@dataclass(frozen=True)
class _ClaimerProof(JobProof):
    """Proves that the root is still the claimed one, and that the claimer still has its own job."""

    prove: Callable[[], None] = lambda: None

    def check(self, *, since: int = 0) -> None:
        """See `Proof`."""
        super().check(since=since)
        self.prove()


def _delete_unneeded(root: Store, proof: _ClaimerProof, clock: Clock, ids: Ids, threads: int) -> None:
    """Delete the unneeded checkpoints; the newest stays with the needed ones, so that the remains are still a root."""
    snapshot_ids = read_existing(root).snapshot_ids
    held, _ = read_holders(root, clock)
    doomed = [i for i in snapshot_ids[:-1] if i not in held]
    if doomed:
        delete_snapshots(root, doomed, clock=clock, ids=ids, proof=proof, threads=threads)


class ClaimEnding:
    """Ends a job's claim beside its run, once the run has made a checkpoint. Failures are logged; the next run tries
    again.

    Life cycle: made → `watching` → (first checkpoint: a thread begins) → `close`.

    Args:
        source: opens the claimed root.
    """

    def __init__(self, source: Callable[[], Store], claimer_uid: str, owner: str, actor: Actor) -> None:
        self._source = source
        self._uid = claimer_uid
        self._owner = owner
        self._actor = actor
        self._thread: threading.Thread | None = None
        self._prove: Callable[[], None] = lambda: None

    def watching(
        self, on_progress: Callable[[Progress], None] | None, committer: Committer
    ) -> Callable[[Progress], None]:
        """Return the function to call after each epoch instead of `on_progress`."""
        self._prove = committer.ownership.check

        def watch(progress: Progress) -> None:
            if self._thread is None and committer.last.kind == "checkpoint":
                self._thread = threading.Thread(target=self._run, name="stillstate-claim", daemon=True)
                self._thread.start()
            if on_progress is not None:
                on_progress(progress)

        return watch

    def close(self, timeout_s: float) -> None:
        """Wait up to the timeout when the run ends; the next run finishes the rest."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        url = "(not opened)"
        try:
            root = self._source()
            url = root.url
            left = end_claim(
                root,
                self._uid,
                owner=self._owner,
                clock=self._actor.clock,
                ids=self._actor.ids,
                prove=self._prove,
            )
        except Exception:
            _LOG.warning("the claimed root %s could not be removed; the next run tries again", url, exc_info=True)
            return
        if left.holders:
            _LOG.warning(
                "not all of the claimed root %s could be removed: %s. The next run tries again", url, left.holders
            )
        for failure in left.failures:
            _LOG.warning("of the claimed root %s this is left: %s: %s", url, failure.path, failure.message)
        if left.gone and not left.failures:
            _LOG.info("the claimed root %s is gone", url)
