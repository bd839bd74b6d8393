"""Ownership of an output folder: the one job root that may clean up below its staging identity there.

    <output>/_stillstate/owners/<job>-<uid>-<sink>/<number>.json      the document with the highest number counts

A job root and a copy of it have one job uid, so they stage under the same names in the same output folder. Each would
take the staged files of the other for leftovers of a killed run. So the first root to start owns the identity. A start
from any other place is refused before anything is removed, unless the owner is gone:

    the owner's place no longer holds this job      the root was moved or removed: the identity passes on
    it holds the very snapshot that this run made   it is this root, under another spelling of its place
    it holds the job                                refused: one of the two is a copy
    it cannot be looked at                          refused, unless `moved.json` here says that it was moved from there

With `take` a run gets the identity in all these cases, but never while the run of the owner appears to be alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from state_runtime.base.clock import Clock
from state_runtime.base.errors import SnapshotInUse, StillstateError, Unavailable
from state_runtime.base.limits import SMALL_JSON_BYTES_MAX
from state_runtime.snapshot.catalog import Catalog, read_job_info
from state_runtime.snapshot.create_once import Documents, Proposal, create_next, read_newest
from state_runtime.snapshot.document import decode_document, encode_document
from state_runtime.snapshot.fencing import live_run
from state_runtime.snapshot.handover import read_moving, read_outcome
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import sequence_of, snapshot_id_of
from state_runtime.store import Store

__all__ = ["OWNERS_DIR", "Claimant", "OutputOwner", "own_output"]

OWNERS_DIR = "_stillstate/owners"


@dataclass(frozen=True, kw_only=True)
class OutputOwner:
    """The job root that stages under an identity.

    Attributes:
        place: URL of the job root, without credentials.
        host: host of the run that wrote this: a path on a local disk has no meaning on other hosts.
        term, run_uid: of that run.
        since_term: files staged before this term are not the owner's to remove.
    """

    job: str
    job_uid: str
    place: str
    host: str
    term: int
    run_uid: str
    since_term: int


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """A run that wants to stage and publish.

    Attributes:
        root: of its job; `newest` is the fencing snapshot that the run has just made there.
        open_root: opens another job root by its URL, with the options of this one.
        take: the user has declared that the output belongs to this root, regardless of the owner's place.
    """

    job: str
    root: Store
    newest: Manifest
    host: str
    run_uid: str
    open_root: Callable[[str], Store]
    clock: Clock
    take: bool = False


def own_output(output: Documents, staging_prefix: str, claimant: Claimant) -> OutputOwner:
    """Make sure that a run's job root owns an identity in an output folder. Atomic between any number of starts.

    Args:
        output: the output folder, or a table of a database that holds such documents.
        staging_prefix: the folder where it stages; the last part is the identity.

    Returns:
        The document that counts.

    Raises:
        SnapshotInUse: another root owns it, or may own it; nothing was removed.
        CorruptManifest, UnsupportedFormat: the document cannot be read; nothing was removed.
        StoreUnavailable, OutcomeUnknown: start again.
    """
    folder = f"{OWNERS_DIR}/{staging_prefix.rpartition('/')[-1]}"
    newest = claimant.newest

    def last_number() -> int:
        return max((sequence_of(name) or 0 for name in output.list_names(folder)), default=0)

    def read(number: int) -> OutputOwner:
        path = _path(folder, number)
        return decode_document("output-owner", OutputOwner, output.read(path, SMALL_JSON_BYTES_MAX), path)

    def propose() -> Proposal[OutputOwner] | None:
        number = last_number()
        owner = read(number) if number else None
        if owner is not None and _is_mine(owner, claimant):
            return None
        if owner is not None:
            _refuse_if_needed(owner, claimant, output)
        mine = OutputOwner(
            job=claimant.job,
            job_uid=newest.job_uid,
            place=claimant.root.url,
            host=claimant.host,
            term=newest.term,
            run_uid=claimant.run_uid,
            # A folder without owner may have been used by earlier versions, from here or from the original of this
            # copy; and the user of `take` may be wrong. Files staged so far are kept, at any cost in space.
            since_term=_first_unused(output, staging_prefix) if owner is None or claimant.take else 0,
        )
        return Proposal(_path(folder, number + 1), encode_document("output-owner", mine), mine)

    created = create_next(
        output,
        propose,
        contended=lambda: Unavailable(f"too many drivers begin to write to {output.url} at once; start again"),
    )
    owner = created or read_newest(last_number, read, f"the owner of the output in {output.url}")
    if owner is None or not _is_mine(owner, claimant):
        raise SnapshotInUse(f"the output in {output.url} got another owner while this run started; start it again")
    return owner


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:020d}.json"


def _first_unused(output: Documents, staging_prefix: str) -> int:
    """Return the first term such that neither it nor a later one has staged files."""
    return 1 + max((snapshot_id_of(name) or 0 for name in output.list_names(staging_prefix)), default=0)


def _is_mine(owner: OutputOwner, claimant: Claimant) -> bool:
    return (owner.place, owner.job_uid) == (claimant.root.url, claimant.newest.job_uid)


def _refuse_if_needed(owner: OutputOwner, claimant: Claimant, output: Documents) -> None:
    """Refuse the run while the owner may need its staged files."""
    problem = _still_there(owner, claimant)
    if problem is None:
        return
    if claimant.take and not problem.is_running:
        return
    advice = (
        f"Stop that run first: `stillstate stop {owner.job}`, with its store"
        if problem.is_running
        else "Give this job an output folder or a job name of its own. If the job root there is not needed any more, "
        "delete it; or, if you are certain that no run of it will ever start again, start this one with --take-output "
        "(take_output=True)"
    )
    raise SnapshotInUse(
        f"the output of job {claimant.job!r} in {output.url} belongs to the job root {owner.place}, and this run is "
        f"of {claimant.root.url}: {problem.what}. Both have the same job uid, so each would remove what the other "
        f"has staged. Nothing was removed. {advice}"
    )


@dataclass(frozen=True)
class _Problem:
    what: str
    is_running: bool = False


def _still_there(owner: OutputOwner, claimant: Claimant) -> _Problem | None:
    """Return the reason not to pass the identity on; None if the owner's place holds nothing that needs it."""
    try:
        there = claimant.open_root(owner.place)
        info = read_job_info(there)
        if info is None or info.uid != owner.job_uid:
            # A path on another host's disk proves nothing here.
            if "://" in owner.place or owner.host == claimant.host or _was_moved(owner, claimant):
                return None
            return _Problem(f"that place is a folder of the host {owner.host!r} and cannot be looked at from here")
        if _is_same_root(there, claimant.newest) or _moves_here(there, claimant.root):
            return None
        run = live_run(Catalog.of_root(there, claimant.clock), claimant.clock)
    except (StillstateError, OSError) as error:
        if _was_moved(owner, claimant):
            return None
        return _Problem(f"that place cannot be looked at ({error})")
    if run is not None:
        return _Problem(f"a run of that root is alive (process {run.pid} on {run.host})", is_running=True)
    return _Problem("that root still exists, so one of the two is a copy of the other")


def _is_same_root(there: Store, newest: Manifest) -> bool:
    """Return whether a root shows the snapshot that this run has just made: then it is this root, spelled otherwise."""
    latest = Catalog.of_root(there).latest()
    return latest is not None and latest.commit_id == newest.commit_id


def _moves_here(there: Store, root: Store) -> bool:
    """Return whether a root is the remainder of one that was moved here: no run can use it any more."""
    moving = read_moving(there)
    return moving is not None and moving.role == "source" and moving.other_url == root.url


def _was_moved(owner: OutputOwner, claimant: Claimant) -> bool:
    """Return whether this root was completely moved here from the owner's place, by `stillstate move`."""
    outcome = read_outcome(claimant.root)
    if outcome is None or outcome.mode != "move" or outcome.outcome != "complete":
        return False
    return outcome.source_url == owner.place
