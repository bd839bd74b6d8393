"""A plan of garbage collection as a document: the objects to delete, and counts of those that stay."""

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
    """The findings of garbage collection: the first of its two passes.

    Attributes:
        min_age_s: the age floor: no younger object is a candidate.
        failed_ttl_s: how long failed savepoints are kept.
        given_up: expired snapshots whose deletion was begun and not finished.
        savepoints: name and reason of savepoints that have expired, or whose deletion was begun and not finished.
        needed_objects, needed_bytes: objects that something needs; bytes as far as they are recorded.
        young_objects, young_bytes: objects that nothing needs (yet), but too young to delete.
        foreign: the first names that Stillstate did not write; they stay. foreign_objects: how many there are.
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
