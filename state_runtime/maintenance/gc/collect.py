"""Garbage collection of a job root: deletes, in two passes, the objects that nothing needs and no writer will name.

The first pass (`plan_gc`) marks, lists and shows; it only reads. The second (`apply_gc`) does all of it again and
deletes the objects that both passes found. Each pass reads, in this order:

1. the watermark: when the newest manifest was written, by the store's own clock, but not later than now
2. the existing snapshots, pins, materializations, manifests (marks.py)
3. the listing of all objects
4. before anything is deleted: pins and materializations once more

A data object is garbage if nothing of 2 needs it and it is older than the watermark by more than the age floor. A job
names a new object in its next manifest or never. So an object that is older than the newest manifest and not named is
garbage. An object that is newer than the newest manifest is kept at any age: the job may be stopped, or its next
checkpoint a day away. Objects of the newest run have their snapshot's id in their name. Such an object is kept while
that id is newer than the newest snapshot, independent of the store's clock. For other objects the age floor allows for
jumps of the store's clock.

Nothing is deleted if a manifest, a pin or a record cannot be read, if a listing fails, or if a needed object is missing
(then the store is damaged, and the remaining objects may be needed for the repair). Names that Stillstate did not write
stay, and are reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import Ids
from state_runtime.base.settings import FAILED_TTL_S
from state_runtime.maintenance.delete.roots import delete_savepoint
from state_runtime.maintenance.delete.snapshots import (
    THREADS,
    Failure,
    OnProgress,
    delete_objects,
    remove_given_up,
    settle,
)
from state_runtime.maintenance.gc.plan import Candidate, GcPlan
from state_runtime.maintenance.gc.survey import Survey
from state_runtime.maintenance.layout import DATA_KINDS, ObjectKind
from state_runtime.maintenance.marks import read_holders
from state_runtime.maintenance.plans import check_fresh
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.ownership import JobProof, Proof
from state_runtime.snapshot.paths import SNAPSHOTS_DIR, snapshot_id_of
from state_runtime.store import Store

__all__ = ["MIN_AGE_S", "MIN_AGE_SAFE_S", "CollectionResult", "apply_gc", "plan_gc"]

MIN_AGE_S = 86_400.0
MIN_AGE_SAFE_S = 3_600.0
"""Clocks of stores jump; a lower floor is accepted only with `unsafe_min_age`."""
_FOLDERS_BY_TERM = ("changelog", "files")


@dataclass(frozen=True, kw_only=True)
class CollectionResult:
    """The result of a collection.

    Attributes:
        objects, bytes: number of deleted objects per kind, and deleted bytes.
        given_up: expired snapshots that are completely removed.
        kept: candidates of the plan that stayed because the second pass disagreed.
        failures: keys that could not be deleted, and why; the next collection tries them again.
    """

    objects: dict[ObjectKind, int] = field(default_factory=dict)
    bytes: int = 0
    given_up: tuple[int, ...] = ()
    savepoints: tuple[str, ...] = ()
    kept: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.objects.values())


def plan_gc(
    root: Store,
    *,
    clock: Clock,
    min_age_s: float = MIN_AGE_S,
    failed_ttl_s: float = FAILED_TTL_S,
    unsafe_min_age: bool = False,
    on_listed: OnProgress | None = None,
) -> GcPlan:
    """Plan a collection (the first pass). Only reads.

    Args:
        min_age_s: the age floor.
        failed_ttl_s: how long failed savepoints are kept.
        unsafe_min_age: allows a floor below an hour.
        on_listed: called periodically with the number of objects listed so far, and 0.

    Raises:
        InvalidConfiguration: the floor is not a number, or lower than allowed.
        MissingFile: a needed object, which is named with its snapshots, is missing or has another size; nothing is
            planned.
        CorruptData, UnsupportedFormat: something cannot be read; nothing is planned.
        StoreUnavailable: try again.
    """
    _check_age(min_age_s, unsafe=unsafe_min_age)
    if not (math.isfinite(failed_ttl_s) and failed_ttl_s > 0):
        raise InvalidConfiguration(f"failed_ttl_s = {failed_ttl_s!r} must be more than 0 seconds")
    survey = Survey.of(root, clock, min_age_s=min_age_s, failed_ttl_s=failed_ttl_s, on_listed=on_listed)
    return survey.plan(clock.now_ms())


def _check_age(min_age_s: float, *, unsafe: bool) -> None:
    if not (math.isfinite(min_age_s) and min_age_s >= 0) or (min_age_s == 0 and not unsafe):
        raise InvalidConfiguration(f"the age floor, {min_age_s!r} s, must be more than 0")
    if min_age_s < MIN_AGE_SAFE_S and not unsafe:
        raise InvalidConfiguration(
            f"an age floor of {min_age_s:g} s is below {MIN_AGE_SAFE_S:g} s: clocks of stores and machines differ by "
            "more. Take a higher one, or --unsafe-min-age if this store has one clock and it never jumps"
        )


def apply_gc(
    root: Store,
    plan: GcPlan,
    *,
    clock: Clock,
    ids: Ids,
    owner: str,
    proof: Proof | None = None,
    on_progress: OnProgress | None = None,
    threads: int = THREADS,
) -> CollectionResult:
    """Delete the objects that both the plan and this second pass found. Data first, then the objects that lead to it.

    Two collections may run at once, beside a running job, and after a crash of one: each deletes garbage, and a missing
    key is accepted.

    Args:
        proof: that the root is still the caller's; None: that it is still the same job's.

    Raises:
        InvalidConfiguration: the plan is of another job, or old. And what `plan_gc` raises; nothing was deleted then.
        OutcomeUnknown: a boundary may have been written; repeat it.
        Fenced: the root became another's while this process slept; nothing of that one was deleted.
    """
    catalog = Catalog.of_root(root, clock)
    info = catalog.job_info()
    check_fresh(plan.made, info, root.url, clock.now_ms())
    proof = proof or JobProof(root, info.uid)
    _check_age(plan.min_age_s, unsafe=True)
    # Snapshots that a collector announced and did not settle are settled here: they are gone, or kept again.
    settle(root, read_boundary(root).going, proof, clock=clock, ids=ids)
    survey = Survey.of(root, clock, min_age_s=plan.min_age_s, failed_ttl_s=plan.failed_ttl_s)
    # Compare size and time too, so that only objects that the plan showed are deleted. Safety does not depend on this:
    # each candidate of this pass is garbage by its own check.
    wanted = {(c.path, c.bytes, c.modified_ms) for c in plan.candidates}
    chosen = [c for c in survey.candidates() if (c.path, c.bytes, c.modified_ms) in wanted]
    # A second check: a holder that pinned since the survey verifies that its snapshot exists, and a fold's tables are
    # younger than the watermark. This check also helps if a listing of the survey was stale.
    _, needed = read_holders(root, clock)
    chosen = [c for c in chosen if not needed.keeps(c.path)]
    prove = partial(proof.check, since=survey.marks.boundary_sequence)
    done, failures = _delete(root, chosen, prove, on_progress, threads)
    given_up = remove_given_up(root, plan.given_up, proof, marker=survey.marker, clock=clock, threads=threads)
    failures += given_up.failures
    removed_bytes, due, savepoints = sum(c.bytes for c in done) + given_up.bytes, dict(survey.savepoints()), []
    for name, _ in plan.savepoints:
        if name in due:
            proof.check()
            part = delete_savepoint(root, name, clock=clock, ids=ids, owner=owner, threads=threads)
            failures += part.failures
            removed_bytes += part.bytes
            savepoints.append(name)
    _tidy(root, survey.term)
    return CollectionResult(
        objects=dict(Counter(c.kind for c in done)),
        bytes=removed_bytes,
        given_up=given_up.snapshot_ids,
        savepoints=tuple(savepoints),
        kept=len(plan.candidates) - len(chosen),
        failures=tuple(failures),
    )


def _delete(
    root: Store,
    chosen: Sequence[Candidate],
    prove: Callable[[], None],
    on_progress: OnProgress | None,
    threads: int,
) -> tuple[list[Candidate], list[Failure]]:
    """Return the candidates that are gone, and the failures."""
    gone: list[Candidate] = []
    failures: list[Failure] = []
    for step in _steps(chosen):
        if failures:
            break  # later objects lead to those that could not be deleted
        failures = delete_objects(root, [c.path for c in step], prove=prove, on_progress=on_progress, threads=threads)
        left = {f.path for f in failures}
        gone += [c for c in step if c.path not in left]
    return gone, failures


def _steps(chosen: Collection[Candidate]) -> list[list[Candidate]]:
    """Order the steps: data; objects that lead to data; answers after requests, or a request would be open again."""

    def step(candidate: Candidate) -> int:
        if candidate.kind in DATA_KINDS:
            return 0
        return {"answer": 2}.get(candidate.kind, 1)

    steps: list[list[Candidate]] = [[], [], []]
    for candidate in chosen:
        steps[step(candidate)].append(candidate)
    return [s for s in steps if s]


def _tidy(root: Store, term: int) -> None:
    """Remove empty folders that no run will write to any more."""
    for folder in _FOLDERS_BY_TERM:
        for name in root.list_names(folder):
            if name.isascii() and name.isdigit() and int(name) < term:
                root.remove_empty_folders(f"{folder}/{name}")
    boundary = read_boundary(root)
    for name in root.list_names(SNAPSHOTS_DIR):
        snapshot_id = snapshot_id_of(name)
        if snapshot_id is not None and boundary.is_gone(snapshot_id):
            root.remove_empty_folders(f"{SNAPSHOTS_DIR}/{name}")
