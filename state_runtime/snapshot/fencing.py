"""Fencing: how a run takes a job over, and how every older run of it (a zombie: one that slept, or was cut off) stops.

A process on another machine cannot be ended. So from a certain moment on nothing that an older run does counts, and the
older run finds that out itself, before it publishes anything. In this order:

1. `open_run` claims the next term (snapshot/term_files.py). That alone stops no run. A crash leaves an unused number.
2. It checks whether another job has claimed the root (snapshot/claim.py), or the root is being moved
   (snapshot/handover.py), and leaves its mark beside the boundaries (snapshot/expiry_boundary.py).
3. It commits a *fencing snapshot*: the newest content, or that of an older snapshot which the job goes back to, under
   the new term. From here on an older run finds the id of its next snapshot taken. A crash leaves one more snapshot.

Where an older run is stopped (`Fenced`):

    its next commit         the id is taken by the fencing snapshot (`Committer.commit`)
    after its next commit   the id expired, or the root was removed, while it slept (`check_not_given_up`)
    an idle one             its heartbeat looks for the fencing snapshot of a newer term, or finds that its own snapshot
                            has expired (driver/heartbeat.py)

`refuse_if_live` only helps a person who starts a second driver. Nothing depends on it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import replace

import psutil

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock, time_text
from state_runtime.base.errors import (
    CorruptManifest,
    Fenced,
    InvalidConfiguration,
    JobAlreadyRunning,
    Unavailable,
    UnsupportedFormat,
)
from state_runtime.base.ids import Ids
from state_runtime.base.limits import CLAIM_ATTEMPTS_MAX, MAX_PARALLELISM
from state_runtime.base.process_space import is_our_space
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.claim import refuse_if_claimed
from state_runtime.snapshot.commit import Committer, check_not_given_up, next_manifest
from state_runtime.snapshot.create_once import Proposal, create_agreed, create_next
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.expiry_boundary import leave_mark, remove_older_marks
from state_runtime.snapshot.handover import refuse_if_handed_over
from state_runtime.snapshot.job_info import JobInfo, StartedFrom
from state_runtime.snapshot.lineage import (
    check_belongs,
    gone_back,
    undelivered_outputs,
    withdrawing,
    withdrawn_outputs,
)
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.ownership import Ownership
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.snapshot.publication_log import is_published
from state_runtime.snapshot.term_files import RunStatus, Term, claim_term
from state_runtime.store import Store

__all__ = ["live_run", "open_job_root", "open_run", "refuse_if_live", "refuse_undelivered"]

_LOG = logging.getLogger(__name__)

# A run without a heartbeat for this many intervals may be taken over without asking.
LIVE_INTERVALS = 5
# A starting run has no heartbeat interval yet: Java and Spark need some time.
STARTING_GRACE_S = 30.0


def open_job_root(
    root: Store,
    name: str,
    *,
    clock: Clock,
    ids: Ids,
    uid: str = "",
    started_from: StartedFrom | None = None,
    is_builder: bool = False,
) -> JobInfo:
    """Create the job root, or find it. Atomic; two first starts agree on one uid, and on the snapshot of the start.

    Args:
        uid: of a new job; drawn if empty.
        started_from: the snapshot that a new job begins with. The caller compares it with the returned one: another
            start may have been first.
        is_builder: whether the caller fills the root itself, with an import or a bootstrap.

    Raises:
        UnsupportedFormat: it belongs to a newer version. SnapshotInUse: it is being moved, or another process fills it
            (snapshot/handover.py).
    """
    # Before anything is written: a root that is still being filled receives its own job.json at the end.
    refuse_if_handed_over(root, is_builder=is_builder)
    found = read_job_info(root)
    if found is not None:
        return found
    info = JobInfo(
        uid=uid or ids.uid(),
        name=name,
        max_parallelism=MAX_PARALLELISM,
        format_version=FORMAT_VERSION,
        created_at_ms=clock.now_ms(),
        started_from=started_from,
    )
    counts = create_agreed(root, Proposal(JOB_FILE, encode_document("job", info), info), lambda: read_job_info(root))
    if counts is None:
        raise Fenced(f"job.json in {root.url} was removed while this run started; start it again")
    return counts


def live_run(catalog: Catalog, clock: Clock) -> RunStatus | None:
    """Return the newest run, if its heartbeat is fresh. This is not certain: a live run may be silent for a while."""
    status = catalog.status()
    if status is None:
        return None
    timeout_s = (
        max(LIVE_INTERVALS * status.heartbeat_interval_s, 5.0) if status.state == "running" else STARTING_GRACE_S
    )
    is_live = status.is_live(clock.now_ms(), timeout_s) and not _is_dead_here(status)
    return status if is_live else None


def refuse_if_live(catalog: Catalog, clock: Clock) -> None:
    """Refuse this driver if another one lives.

    This only helps a person who starts a second driver; safety comes from the fencing snapshot.

    Raises:
        JobAlreadyRunning: the newest run's heartbeat is fresh.
    """
    status = live_run(catalog, clock)
    if status is not None:
        raise JobAlreadyRunning(
            f"job {catalog.job!r} is run by term {status.term} (process {status.pid} on {status.host}), whose last "
            f"heartbeat was at {time_text(status.at_ms)}. Stop it with `stillstate stop {catalog.job}`, "
            "or take over with --takeover"
        )


def _is_dead_here(status: RunStatus) -> bool:
    """Whether the process certainly does not exist: known only on its own host, and not from another container."""
    if status.host != socket.gethostname() or not is_our_space(status.process_space) or status.pid == os.getpid():
        return False
    try:
        # A killed process whose parent has not collected it yet still has its number.
        return psutil.Process(status.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def open_run(
    catalog: Catalog,
    info: JobInfo,
    empty: Manifest,
    *,
    actor: Actor,
    back_to: int | Manifest | None = None,
    claimed_by: str = "",
    mover: str = "",
    decide: Callable[[Manifest | None], None] | None = None,
    withdraw: Collection[str] = (),
) -> Committer:
    """Claim the next term and take the job over from every older run.

    Args:
        empty: the content of a job that has no snapshot yet.
        mover: uid of the move that takes the job over to copy it elsewhere; empty for a run.
        back_to: an older snapshot to continue from instead of the newest; the caller has pinned it. Or such content
            itself (a copy of an older snapshot, or an empty one with the id 0): all its objects are in the root.
        claimed_by: uid of a job that may open a root which it has claimed.
        decide: called with exactly the content that the run would continue from, under the newest id (None: the job is
            empty), before the fencing snapshot is proposed. If it raises, the start ends, and no older run is fenced.
        withdraw: sinks that will take the output of epochs that the job went back behind out of their places. The
            fencing snapshot says so before they do.

    Returns:
        A committer whose `last` is the fencing snapshot: the newest content, output still to be published included.

    Raises:
        Fenced: a newer run took over while this one started, or the root expired.
        SnapshotInUse: another job has claimed the root, or it is being moved; only a term's number was used.
        JobRootMismatch: its files are of two jobs.
        CorruptManifest, UnsupportedFormat: the newest snapshot cannot be read, and no older one was named. Nothing is
            overwritten, and no older one is used.
        MissingSnapshot: there is no snapshot `back_to`.
        InvalidConfiguration: see `refuse_undelivered`.
    """

    # The content is read before the term is claimed, so that a damaged root costs nothing.
    def newest(*, has_claimed: bool) -> Manifest | None:
        # Only a caller that has named an older snapshot may leave an unreadable newest one behind.
        return catalog.latest() if back_to is None else catalog.latest_to_go_back_from(has_claimed=has_claimed)

    found = newest(has_claimed=False)
    if found is not None:
        check_belongs(found, info, catalog.root.url, own=True)
    target = catalog.manifest(back_to) if isinstance(back_to, int) else back_to
    if target is not None and found is not None:
        refuse_undelivered(target, found, catalog.job)
    term = claim_term(catalog.root, actor=actor, above=found.term if found is not None else 0)
    # Only after the term: a mover writes its file before it claims a term. So either this run sees the file, or the
    # mover's term is the newer one.
    refuse_if_handed_over(catalog.root, mover=mover)
    # After the term: a claimer fences the root after it has written its claim (snapshot/claim.py).
    refuse_if_claimed(catalog.root, by=claimed_by)
    # Before anything is committed; a deletion of the whole root removes the mark before the boundary.
    leave_mark(catalog.root, term)
    follows_ms = 0

    def propose() -> Proposal[Manifest]:
        nonlocal follows_ms
        latest = newest(has_claimed=True)
        if latest is None and found is not None:
            raise Fenced(f"the snapshots in {catalog.root.url} expired while term {term.term} was starting")
        if latest is None:
            # A first snapshot without the job.json above it would block a job that begins again.
            _refuse_removed(catalog.root, info, term)
        if latest is not None:
            # Also for a snapshot that appeared since: a run that slept while this root was removed may leave a snapshot
            # of the job that was here before.
            check_belongs(latest, info, catalog.root.url, own=True)
        last = latest or empty
        follows_ms = last.created_at_ms
        if last.term > term.term:
            raise Fenced(f"term {last.term} took over while term {term.term} was starting; this run stops")
        content = _back_to(target, last, catalog) if target is not None else last
        if decide is not None:
            # Here and not before: an older run may have committed since the caller looked. So the caller must decide on
            # the content of exactly this proposal.
            decide(replace(content, snapshot_id=last.snapshot_id) if latest is not None else None)
        content = withdrawing(replace(content, kind="fencing", previous=None), withdraw)
        manifest = next_manifest(content, last, info, term, actor)
        return Proposal(manifest_path(manifest.snapshot_id), manifest.encode(), manifest)

    def contended() -> Fenced:
        return Fenced(
            f"{CLAIM_ATTEMPTS_MAX} fencing snapshots were lost in a row: too many drivers start this job at once"
        )

    # A race is lost to an older run that finished one more epoch, or to a rival. The newest content is taken over, so
    # it is read again.
    fencing = create_next(catalog.root, propose, contended=contended)
    boundary = check_not_given_up(catalog.root, fencing, term, None)
    # A backup that replaced the root since the claim lacks the term: the next run would claim it again.
    Ownership(catalog.root, info.uid, term).check_term()
    # After the mark: a mark left in a root that was removed before proves nothing.
    _refuse_removed(catalog.root, info, term)
    _tidy_marks(catalog.root, term)
    return Committer(catalog.root, info, term, fencing, actor, boundary, follows_ms)


def _back_to(target: Manifest, last: Manifest, catalog: Catalog) -> Manifest:
    refuse_undelivered(target, last, catalog.job)
    return gone_back(target, last, is_delivered=_is_delivered(catalog.root, last))


def _is_delivered(root: Store, newest: Manifest) -> bool:
    """Return whether all output that the newest snapshot names is certainly published.

    Nobody is kept from going back by a document that only says so.
    """
    try:
        return is_published(root, newest.outputs)
    except (CorruptManifest, UnsupportedFormat):
        return False


def refuse_undelivered(target: Manifest, newest: Manifest, job: str) -> None:
    """Refuse to go back to a snapshot of a history that was left, if its output may not have been published then, or
    was taken out of a sink's place since.

    Sinks publish epochs in their order: they have newer ones by now, and would pass over it without a word.

    Raises:
        InvalidConfiguration: nothing was changed.
    """
    gone = withdrawn_outputs(target, newest)
    if gone:
        sink, first, last = gone[0]
        raise InvalidConfiguration(
            f"the output of epochs {first} to {last} of job {job!r}, which snapshot {target.snapshot_id} counts on, "
            f"was taken out of the place of sink {sink!r} when the job went back behind it. Go back to a snapshot "
            "before it: the input since then is read again, and its output is written again under new epoch numbers"
        )
    lost = undelivered_outputs(target, newest)
    if lost:
        epochs = sorted({output.epoch for output in lost})
        raise InvalidConfiguration(
            f"snapshot {target.snapshot_id} of job {job!r} names output of sink "
            f"{', '.join(sorted({repr(output.sink) for output in lost}))} (epochs {epochs[0]} to {epochs[-1]}) that "
            "may not have been published when the job went back from there, and cannot be any more: the sinks have "
            "newer epochs. Go back to a snapshot before it: the input since then is read again, and its output is "
            "written under new epoch numbers"
        )


def _refuse_removed(root: Store, info: JobInfo, run: Term) -> None:
    now = read_job_info(root)
    if now is None or now.uid != info.uid:
        raise Fenced(f"{root.url} was deleted, or moved elsewhere, while term {run.term} was starting")


def _tidy_marks(root: Store, run: Term) -> None:
    try:
        remove_older_marks(root, run)
    except Unavailable as error:
        _LOG.info("marks of older runs stay in %s until the next start: %s", root.url, error)
