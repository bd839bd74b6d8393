"""A retention plan as a document: the policy's decision for each snapshot and savepoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.plans import PlanDocument
from state_runtime.maintenance.retention.policy import Decision

__all__ = ["RetentionPlan"]


@dataclass(frozen=True)
class RetentionPlan(PlanDocument):
    """The decisions of a retention policy."""

    KIND: ClassVar[str] = "retention-plan"

    policy: RetentionPolicy
    share_max: float
    decisions: tuple[Decision, ...]

    @property
    def kept(self) -> list[Decision]:
        return [d for d in self.decisions if d.kept]

    @property
    def is_empty(self) -> bool:
        return not self.deleted

    @property
    def deleted(self) -> list[Decision]:
        return [d for d in self.decisions if not d.kept]

    @property
    def freed_bytes(self) -> int:
        """Estimate the bytes that executing the plan would free: snapshots share most of their objects."""
        return sum(d.freed_bytes for d in self.decisions)
