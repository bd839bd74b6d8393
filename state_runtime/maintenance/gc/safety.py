"""Whether a plan of garbage collection may be executed: looked at apart from the survey that made it, against the store
as it is now.

It knows no watermark and no floor by kind. It asks what must hold of any plan: nothing that a snapshot, a pin or a
materialization needs now, nothing young, nothing that was given up by nobody, and not nearly all there is.
"""

from __future__ import annotations

from collections.abc import Iterator

from state_runtime.base.clock import Clock
from state_runtime.maintenance.gc.collect import MIN_AGE_SAFE_S
from state_runtime.maintenance.gc.plan import GcPlan
from state_runtime.maintenance.marks import Marker, Marks, mark
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.savepoint_record import list_savepoints
from state_runtime.store import Store

__all__ = ["dangers_of_collection"]

_SMALL_PLAN_OBJECTS = 1000
"""A share says little of a root with few objects."""
_NAMED_MAX = 20


def dangers_of_collection(root: Store, plan: GcPlan, *, clock: Clock, share_max: float) -> list[str]:
    """Why a plan must not be executed now, for people; empty if it may be. Only reads, every manifest among it.

    Args:
        share_max: of the objects of the root that may be deleted at once, unless they are few.

    Raises:
        JobNotFound: the job is gone. CorruptData, UnsupportedFormat: what is needed cannot be read, so nothing may be
            deleted. StoreUnavailable: try again.
    """
    if unfit := plan.unfit(root, clock):
        return unfit
    _, _, marks = mark(root, Marker(root, clock), clock)
    found = [*_of_objects(plan, marks, share_max), *_of_what_was_given_up(root, plan)]
    more = len(found) - _NAMED_MAX
    return [*found[:_NAMED_MAX], f"and {more:,} more"] if more > 0 else found


def _of_objects(plan: GcPlan, marks: Marks, share_max: float) -> Iterator[str]:
    if plan.min_age_s < MIN_AGE_SAFE_S:
        yield f"its age floor is {plan.min_age_s:g} s, below {MIN_AGE_SAFE_S:g} s: clocks differ by more"
    for candidate in plan.candidates:
        if marks.keeps(candidate.path):
            yield f"{candidate.path} is needed now"
    many = len(plan.candidates)
    share = many / max(1, many + plan.needed_objects + plan.young_objects)
    if many > _SMALL_PLAN_OBJECTS and share > share_max:
        yield (
            f"it deletes {many:,} objects, {share:.0%} of all, more than {share_max:.0%}: if that is meant, allow a "
            "larger share"
        )


def _of_what_was_given_up(root: Store, plan: GcPlan) -> Iterator[str]:
    boundary = read_boundary(root)
    for snapshot_id in plan.given_up:
        if boundary.keeps(snapshot_id):
            yield f"snapshot {snapshot_id} has not expired"
    doomed = {name for name, _ in plan.savepoints}
    for record in list_savepoints(root) if doomed else ():
        if record.name in doomed and record.state == "COMPLETED":
            yield f"savepoint {record.name!r} is complete, and only retention or a user deletes it"
