"""A retention plan as a document: what a policy decides of each snapshot and savepoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.plans import Made, digest_of_plan, read_plan, write_plan
from state_runtime.maintenance.retention.policy import Decision

__all__ = ["RetentionPlan", "read_retention_plan", "write_retention_plan"]

_KIND = "retention-plan"


@dataclass(frozen=True)
class RetentionPlan:
    """What a retention policy decides."""

    made: Made
    policy: RetentionPolicy
    share_max: float
    decisions: tuple[Decision, ...]

    @property
    def digest(self) -> str:
        """See `digest_of_plan`."""
        return digest_of_plan(_KIND, self)

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
        """What executing it would free, about: snapshots share most of their objects."""
        return sum(d.freed_bytes for d in self.decisions)


def write_retention_plan(file: Path, plan: RetentionPlan) -> None:
    """Write a plan to a local file; see `write_plan`."""
    write_plan(file, _KIND, plan)


def read_retention_plan(file: Path) -> RetentionPlan:
    """Read a plan back; see `read_plan`."""
    return read_plan(file, _KIND, RetentionPlan)
