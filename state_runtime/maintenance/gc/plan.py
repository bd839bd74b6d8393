"""A plan of garbage collection as a document: what would be deleted, and what stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from state_runtime.maintenance.layout import ObjectKind
from state_runtime.maintenance.plans import PlanDocument

__all__ = ["Candidate", "GcPlan"]


@dataclass(frozen=True)
class Candidate:
    """An object that garbage collection would delete.

    Attributes:
        modified_ms: by the store's clock.
        reason: one line for people.
    """

    path: str
    kind: ObjectKind
    bytes: int
    modified_ms: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class GcPlan(PlanDocument):
    """What garbage collection found: the first of its two passes.

    Attributes:
        min_age_s: the floor: nothing younger is a candidate.
        failed_ttl_s: how long savepoints that failed are kept.
        given_up: snapshots whose deletion was begun and not ended.
        savepoints: whose time is up, or whose deletion was begun and not ended: name and why.
        needed_objects, needed_bytes: that stay because something needs them; bytes as far as they are recorded.
        young_objects, young_bytes: that nothing needs (yet), too young to tell.
        foreign: names that are not of Stillstate, and stay; the first of them. foreign_objects: all.
        is_cut: whether there are more candidates than a plan may have.
    """

    KIND: ClassVar[str] = "gc-plan"

    min_age_s: float
    failed_ttl_s: float
    candidates: tuple[Candidate, ...] = ()
    given_up: tuple[int, ...] = ()
    savepoints: tuple[tuple[str, str], ...] = ()
    needed_objects: int = 0
    needed_bytes: int = 0
    young_objects: int = 0
    young_bytes: int = 0
    foreign: tuple[str, ...] = ()
    foreign_objects: int = 0
    is_cut: bool = False

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.candidates)

    @property
    def is_empty(self) -> bool:
        return not (self.candidates or self.given_up or self.savepoints)
