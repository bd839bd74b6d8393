"""The commit protocol: terms, the fencing snapshot, create-if-absent of the next manifest, the boundary.

Order, and what a crash between two steps leaves (design section 7):

1. `open_run` claims a term, looks whether another job has claimed the root (snapshot/claim.py), and commits a *fencing
   snapshot*: the newest content (or that of an older snapshot, which is gone back to) under the new term. From then on
       an
   older run finds its next id taken. A crash before it leaves an unused term number; after it, one more snapshot.
2. `commit` creates `snapshots/<last + 1>/manifest.json`. It exists and is mine (same bytes, the commit id is inside):
   done. It exists and is not mine: fenced.
3. `commit` then reads the boundary (one listing as long as nothing was given up since). An id at or below it was
   already collected once: a sleeper re-created an old
   name, and nobody will look at it: fenced.
4. An unknown outcome is raised as such; nothing is cleaned up. The next run reads what is there.

The caller publishes output only after `commit` returned.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace

import psutil

from state_runtime.base.clock import Clock
from state_runtime.base.errors import Fenced, JobAlreadyRunning, Unavailable
from state_runtime.base.ids import Ids
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX, MAX_PARALLELISM
from state_runtime.snapshot.boundary import Boundary, boundary_for_run, leave_mark, read_boundary, remove_older_marks
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.job_info import JobInfo, StartedFrom
from state_runtime.snapshot.lineage import check_belongs, gone_back
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.snapshot.terms import RunStatus, Term, claim_term, newest_term
from state_runtime.store import Created, Store

__all__ = ["Committer", "live_run", "open_job_root", "open_run", "refuse_if_live"]

_LOG = logging.getLogger(__name__)

# A run that has not been heard of for this many heartbeat intervals may be taken over without asking.
LIVE_INTERVALS = 5
# A run that starts has no heartbeat interval to go by yet: Java and Spark need a while.
STARTING_GRACE_S = 30.0


def open_job_root(
    root: Store, name: str, *, clock: Clock, ids: Ids, uid: str = "", started_from: StartedFrom | None = None
) -> JobInfo:
    """Create the job root, or find it. Atomic; two first starts agree on one uid, and on what the job begins with.

    Args:
        uid: of a new job; drawn if empty.
        started_from: what a new job begins with. The caller compares it with what is returned: another start may have
            been first.

    Raises:
        UnsupportedFormat: it belongs to a newer version. SnapshotInUse: it is being moved (snapshot/handover.py).
    """
    # Before anything is written: a root that is still being filled gets its own job.json at the end.
    refuse_if_handed_over(root)
    found = read_job_info(root)
    if found is not None:
        return found
    info = JobInfo(uid or ids.uid(), name, MAX_PARALLELISM, FORMAT_VERSION, clock.now_ms(), started_from)
    if root.create(JOB_FILE, encode_document("job", info)) is Created.MINE:
        return info
    found = read_job_info(root)
    if found is None:
        raise Fenced(f"job.json in {root.url} was removed while this run started; start it again")
    return found


def live_run(catalog: Catalog, clock: Clock) -> RunStatus | None:
    """The newest run, if its heartbeat is fresh. Who must be sure does not ask here: a live run may be silent for a
    while."""
    status = catalog.status()
    if status is None:
        return None
    timeout_s = (
        max(LIVE_INTERVALS * status.heartbeat_interval_s, 5.0) if status.state == "running" else STARTING_GRACE_S
    )
    is_live = status.is_live(clock.now_ms(), timeout_s) and not _is_dead_here(status.host, status.pid)
    return status if is_live else None


def refuse_if_live(catalog: Catalog, clock: Clock) -> None:
    """Turn this driver away if another one lives.

    Only a courtesy to whoever starts a second driver by hand; safety comes from the fencing snapshot.

    Raises:
        JobAlreadyRunning: the newest run's heartbeat is fresh.
    """
    status = live_run(catalog, clock)
    if status is not None:
        raise JobAlreadyRunning(
            f"job {catalog.job!r} is run by term {status.term} (process {status.pid} on {status.host}), last heard of "
            f"{status.age_s(clock.now_ms()):.1f} s ago. Stop it with `stillstate stop {catalog.job}`, "
            "or take over with --takeover"
        )


def _is_dead_here(host: str, pid: int) -> bool:
    """Whether the process certainly does not exist: only knowable on its own host."""
    if host != socket.gethostname() or pid == os.getpid():
        return False
    try:
        # A killed process whose parent has not collected it yet still has its number.
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


class Committer:
    """Commits snapshots of one run.

    Life cycle: open (the fencing snapshot is committed) → commit* → fenced or dropped. After `Fenced` it refuses
    every further commit. Not thread-safe; the driver calls it from one thread at a time.
    """

    def __init__(
        self,
        root: Store,
        info: JobInfo,
        term: Term,
        last: Manifest,
        clock: Clock,
        ids: Ids,
        boundary: Boundary | None = None,
    ) -> None:
        self._root = root
        self._clock = clock
        self._ids = ids
        self._fenced: str | None = None
        self._boundary = boundary
        self.info = info
        self.term = term
        self.last = last

    def commit(self, draft: Manifest) -> Manifest:
        """Make `draft` the next snapshot. Durable when it returns.

        Identity fields (id, term, commit id, time) are filled in here.

        Raises:
            Fenced: another run owns the job; publish nothing, stop.
            OutcomeUnknown, StoreUnavailable: not confirmed; the run must end without cleaning up.
        """
        if self._fenced:
            raise Fenced(self._fenced)
        manifest = _next(draft, self.last, self.info, self.term, self._clock, self._ids)
        if not _create(self._root, manifest):
            self._fenced = (
                f"snapshot {manifest.snapshot_id} was committed by another run "
                f"(newest term {newest_term(self._root)}, this is term {self.term.term}); this run stops and publishes "
                "nothing"
            )
            raise Fenced(self._fenced)
        try:
            self._boundary = _check_boundary(self._root, manifest, self.term, self._boundary)
        except Fenced as error:
            self._fenced = str(error)
            raise
        self.last = manifest
        return manifest


def open_run(
    catalog: Catalog,
    info: JobInfo,
    empty: Manifest,
    *,
    clock: Clock,
    ids: Ids,
    host: str,
    pid: int,
    back_to: int | None = None,
    claimed_by: str = "",
    mover: str = "",
) -> Committer:
    """Claim the next term and take the job over from every older run.

    Args:
        empty: the content of a job that has no snapshot yet.
        mover: uid of the move that takes the job over to carry it elsewhere; empty of a run.
        back_to: an older snapshot to go on from instead of the newest; the caller has pinned it.
        claimed_by: uid of a job that may open a root which it has claimed.

    Returns:
        A committer whose `last` is the fencing snapshot: the newest content, output still to be published included.

    Raises:
        Fenced: a newer run took over while this one started, or the root was given up.
        SnapshotInUse: another job has claimed the root, or it is being moved; nothing but a term's number was used.
        JobRootMismatch: its files are of two jobs.
        CorruptManifest: the newest snapshot cannot be read. Nothing is overwritten, and no older one is used.
        MissingSnapshot: there is no snapshot `back_to`.
    """
    # The content is read before the term is claimed, so that a damaged root costs nothing.
    found = catalog.latest()
    if found is not None:
        check_belongs(found, info, catalog.root.url, own=True)
    target = catalog.manifest(back_to) if back_to is not None else None
    term = claim_term(
        catalog.root, host=host, pid=pid, clock=clock, ids=ids, above=found.term if found is not None else 0
    )
    # Only after the term: a mover writes its file before it claims one, so either we see the file, or its term is the
    # newer one.
    refuse_if_handed_over(catalog.root, mover=mover)
    # After the term: whoever claims the root fences it after that (snapshot/claim.py).
    refuse_if_claimed(catalog.root, by=claimed_by)
    # Before anything is committed; whoever deletes the root as a whole removes it before the boundary.
    leave_mark(catalog.root, term)
    for _ in range(CLAIM_ATTEMPTS_MAX):
        latest = catalog.latest()
        if latest is None and found is not None:
            raise Fenced(f"the snapshots in {catalog.root.url} were given up while term {term.term} was starting")
        if latest is not None:
            # Also one that came since: a run that slept while this root was removed leaves a snapshot of the job that
            # was here before.
            check_belongs(latest, info, catalog.root.url, own=True)
        last = latest or empty
        if last.term > term.term:
            raise Fenced(f"term {last.term} took over while term {term.term} was starting; this run stops")
        content = gone_back(target, last) if target is not None else last
        fencing = _next(replace(content, kind="fencing", previous=None), last, info, term, clock, ids)
        if _create(catalog.root, fencing):
            boundary = _check_boundary(catalog.root, fencing, term, None)
            # After the mark: one that was left where the root had been removed already is a sign of nothing.
            now = read_job_info(catalog.root)
            if now is None or now.uid != info.uid:
                raise Fenced(f"{catalog.root.url} was deleted, or moved elsewhere, while term {term.term} was starting")
            _tidy_marks(catalog.root, term)
            return Committer(catalog.root, info, term, fencing, clock, ids, boundary)
        # An older run finished one more epoch, or a rival claimed: read again, the newest content is what we take over.
    raise Fenced(f"{CLAIM_ATTEMPTS_MAX} fencing snapshots were lost in a row; too many drivers start this job at once")


def _next(draft: Manifest, last: Manifest, info: JobInfo, term: Term, clock: Clock, ids: Ids) -> Manifest:
    return replace(
        draft,
        format_version=FORMAT_VERSION,
        job_uid=info.uid,
        snapshot_id=last.snapshot_id + 1,
        term=term.term,
        commit_id=ids.uid(),
        created_at_ms=clock.now_ms(),
    )


def _create(root: Store, manifest: Manifest) -> bool:
    return root.create(manifest_path(manifest.snapshot_id), manifest.encode()) is Created.MINE


def _tidy_marks(root: Store, run: Term) -> None:
    try:
        remove_older_marks(root, run)
    except Unavailable as error:
        _LOG.info("marks of older runs stay in %s until the next start: %s", root.url, error)


def _check_boundary(root: Store, manifest: Manifest, run: Term, known: Boundary | None) -> Boundary:
    # Only after the create: garbage collection advances the boundary before it deletes, so either it sees our
    # manifest, or we see its boundary. Of a root that was deleted whole the boundary is gone too; so is this run's
    # mark.
    boundary, snapshot_id = known, manifest.snapshot_id
    sequence = boundary_for_run(root, run)
    if sequence is not None and (boundary is None or sequence != boundary.sequence):
        boundary = read_boundary(root)
        if boundary.sequence < sequence:
            sequence = None  # boundaries only advance, so the root was removed between the listing and the reading
    if sequence is None or boundary is None:
        raise Fenced(
            f"{root.url} was removed, or newer runs have taken it over, while this run slept before snapshot "
            f"{snapshot_id} was "
            "confirmed; it stops and publishes nothing"
        )
    if boundary.is_tombstone:
        raise Fenced(
            f"{root.url} was deleted as a whole: snapshot {snapshot_id} will never be read; this run stops and "
            "publishes nothing. "
            "Let `stillstate delete --root` end, then start the job anew"
        )
    if snapshot_id <= boundary.snapshot_id:
        raise Fenced(
            f"snapshot {snapshot_id} lies at or below the collected boundary {boundary.snapshot_id}: this run slept "
            "while others went "
            "on, and its snapshot will never be read; it stops and publishes nothing"
        )
    return boundary
