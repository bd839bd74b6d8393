"""The commit protocol: terms, the fencing snapshot, create-if-absent of the next manifest, the boundary.

Order, and what a crash between two steps leaves (design section 7):

1. `open_run` claims a term and commits a *fencing snapshot*: the newest content under the new term. From then on an
   older run finds its next id taken. A crash before it leaves an unused term number; after it, one more snapshot.
2. `commit` creates `snapshots/<last + 1>/manifest.json`. It exists and is mine (same bytes, the commit id is inside):
   done. It exists and is not mine: fenced.
3. `commit` then reads `boundary.json`. An id at or below it was already collected once: a sleeper re-created an old
   name, and nobody will look at it: fenced.
4. An unknown outcome is raised as such; nothing is cleaned up. The next run reads what is there.

The caller publishes output only after `commit` returned.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

import psutil

from state_runtime.clock import Clock
from state_runtime.errors import Fenced, JobAlreadyRunning
from state_runtime.ids import Ids
from state_runtime.limits import CLAIM_ATTEMPTS_MAX, MAX_PARALLELISM, SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.catalog import Catalog, JobInfo, read_job_info
from state_runtime.snapshot.document import FORMAT_VERSION, decode_document, encode_document
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import BOUNDARY, JOB_FILE, manifest_path
from state_runtime.snapshot.terms import Term, claim_term, newest_term
from state_runtime.store import Created, Store

__all__ = ["Boundary", "Committer", "open_job_root", "open_run", "read_boundary", "refuse_if_live"]

# A run that has not been heard of for this many heartbeat intervals may be taken over without asking.
LIVE_INTERVALS = 5
# A run that starts has no heartbeat interval to go by yet: Java and Spark need a while.
STARTING_GRACE_S = 30.0


@dataclass(frozen=True)
class Boundary:
    """Highest snapshot id that garbage collection may have removed; it only grows."""

    snapshot_id: int


def read_boundary(root: Store) -> int:
    """The boundary, 0 where nothing was ever collected."""
    try:
        return decode_document("boundary", Boundary, root.read(BOUNDARY, SMALL_JSON_BYTES_MAX), BOUNDARY).snapshot_id
    except FileNotFoundError:
        return 0


def open_job_root(root: Store, name: str, *, clock: Clock, ids: Ids) -> JobInfo:
    """Create the job root, or check that it is this job's. Atomic; two first starts agree on one uid.

    Raises:
        JobRootMismatch: it belongs to another job. UnsupportedFormat: to a newer version.
    """
    found = read_job_info(root, name)
    if found is not None:
        return found
    info = JobInfo(ids.uid(), name, MAX_PARALLELISM, FORMAT_VERSION, clock.now_ms())
    if root.create(JOB_FILE, encode_document("job", info)) is Created.MINE:
        return info
    found = read_job_info(root, name)
    if found is None:
        raise Fenced(f"job.json in {root.url} was removed while this run started; start it again")
    return found


def refuse_if_live(catalog: Catalog, clock: Clock) -> None:
    """Turn this driver away if another one lives.

    Only a courtesy to whoever starts a second driver by hand; safety comes from the fencing snapshot.

    Raises:
        JobAlreadyRunning: the newest run's heartbeat is fresh.
    """
    status = catalog.status()
    if status is None:
        return
    timeout_s = (
        max(LIVE_INTERVALS * status.heartbeat_interval_s, 5.0) if status.state == "running" else STARTING_GRACE_S
    )
    if status.is_live(clock.now_ms(), timeout_s) and not _is_dead_here(status.host, status.pid):
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

    def __init__(self, root: Store, info: JobInfo, term: Term, last: Manifest, clock: Clock, ids: Ids) -> None:
        self._root = root
        self._clock = clock
        self._ids = ids
        self._fenced: str | None = None
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
                f"(newest term {newest_term(self._root)}, this is term {self.term.term}); this run stops and publishes nothing"
            )
            raise Fenced(self._fenced)
        try:
            _check_boundary(self._root, manifest.snapshot_id)
        except Fenced as error:
            self._fenced = str(error)
            raise
        self.last = manifest
        return manifest


def open_run(
    catalog: Catalog, info: JobInfo, empty: Manifest, *, clock: Clock, ids: Ids, host: str, pid: int
) -> Committer:
    """Claim the next term and take the job over from every older run.

    Args:
        empty: the content of a job that has no snapshot yet.

    Returns:
        A committer whose `last` is the fencing snapshot: the newest content, output still to be published included.

    Raises:
        Fenced: a newer run took over while this one started.
        CorruptManifest: the newest snapshot cannot be read. Nothing is overwritten, and no older one is used.
    """
    # The content is read before the term is claimed, so that a damaged root costs nothing.
    catalog.latest()
    term = claim_term(catalog.root, host=host, pid=pid, clock=clock, ids=ids)
    for _ in range(CLAIM_ATTEMPTS_MAX):
        last = catalog.latest() or empty
        if last.term > term.term:
            raise Fenced(f"term {last.term} took over while term {term.term} was starting; this run stops")
        fencing = _next(replace(last, kind="fencing", previous=None), last, info, term, clock, ids)
        if _create(catalog.root, fencing):
            _check_boundary(catalog.root, fencing.snapshot_id)
            return Committer(catalog.root, info, term, fencing, clock, ids)
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


def _check_boundary(root: Store, snapshot_id: int) -> None:
    # Only after the create: garbage collection advances the boundary before it deletes, so either it sees our
    # manifest, or we see its boundary.
    boundary = read_boundary(root)
    if snapshot_id <= boundary:
        raise Fenced(
            f"snapshot {snapshot_id} lies at or below the collected boundary {boundary}: this run slept while others went "
            "on, and its snapshot will never be read; it stops and publishes nothing"
        )
