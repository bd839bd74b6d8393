"""Retention and garbage collection, which have the same steps: plan, look, apply. The commands and Dagster's runs use
them.

plan      what would be deleted and why; only reads
dangers   why that plan must not be executed now, found in another way; only reads
apply     executes that same plan; objects that are needed by now make it stale, or are kept
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.delete.snapshots import Failure
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.maintenance.gc.plan import GcPlan
from state_runtime.maintenance.gc.safety import dangers_of_collection
from state_runtime.maintenance.plans import Kind
from state_runtime.maintenance.retention.apply import apply_retention, make_retention_plan
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.maintenance.retention.safety import dangers_of_retention
from state_runtime.store import Store
from stillstate.orchestration.config.spec import JobSpec, to_policy

__all__ = ["Collecting", "Deletions", "OnCount", "Outcome", "PlanT", "Retaining"]

OnCount = Callable[[int, int], None]

PlanT = TypeVar("PlanT", RetentionPlan, GcPlan)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of executing a plan.

    Attributes:
        snapshot_ids, savepoints: completely deleted ones.
        by_kind: objects that were deleted, where their kinds are told apart.
        kept: users that appeared while the plan was executed, by snapshot.
        stayed: objects of the plan that were already deleted, or are needed by now.
        document: all of it, for `--json`.
    """

    snapshot_ids: tuple[int, ...]
    savepoints: tuple[str, ...]
    objects: int
    bytes: int
    failures: tuple[Failure, ...]
    document: dict[str, Any]
    by_kind: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kept: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    stayed: int = 0

    @property
    def numbers(self) -> dict[str, int]:
        """Return the numbers of deleted objects, by names that keep their meaning."""
        return {
            "deleted_snapshots": len(self.snapshot_ids),
            "deleted_savepoints": len(self.savepoints),
            "deleted_objects": self.objects,
            "deleted_bytes": self.bytes,
            "failures": len(self.failures),
        }


class Deletions(ABC, Generic[PlanT]):
    """One kind of deletions of one job root."""

    kind: ClassVar[Kind]
    document: type[PlanT]

    def __init__(self, root: Store, actor: Actor) -> None:
        self._root = root
        self._actor = actor

    @abstractmethod
    def plan(self, on_listed: OnCount | None = None) -> PlanT:
        """Plan the deletions as of now; only read.

        Raises:
            JobNotFound: there is no such job. InvalidConfiguration: no rule says what to keep, or the plan is refused.
            CorruptData, UnsupportedFormat: something cannot be read; nothing is planned. StoreUnavailable: try again.
        """

    @abstractmethod
    def dangers(self, plan: PlanT) -> list[str]:
        """Return why a plan must not be executed now; empty if it may be. Raises the errors of `plan`."""

    @abstractmethod
    def apply(self, plan: PlanT, on_progress: OnCount | None = None) -> Outcome:
        """Execute a plan.

        Raises:
            InvalidConfiguration: it is stale, or of another job; nothing was deleted. And the errors of `plan`.
            OutcomeUnknown: repeat it. Fenced: another run took the root over meanwhile.
        """


class Retaining(Deletions[RetentionPlan]):
    """Retention: expires the snapshots that no rule keeps.

    Args:
        refuse: raise an error if the plan would delete too large a share. Without it, that is one of the dangers.
        rules_of: the job whose section the policy is.
    """

    kind = "retention"
    document = RetentionPlan

    def __init__(
        self,
        root: Store,
        actor: Actor,
        policy: RetentionPolicy,
        share_max: float,
        *,
        refuse: bool = True,
        rules_of: str = "",
    ) -> None:
        super().__init__(root, actor)
        self._policy = policy
        self._rules_of = rules_of
        self._share_max = share_max
        self._refuse = refuse

    @staticmethod
    def of_job(
        job: JobSpec,
        root: Store,
        actor: Actor,
        *,
        policy: RetentionPolicy | None = None,
        share_max: float | None = None,
        refuse: bool = True,
    ) -> Retaining:
        """Make it from the job's section, except for the given arguments."""
        return Retaining(
            root,
            actor,
            to_policy(job) if policy is None else policy,
            job.retention.deleted_share_max if share_max is None else share_max,
            refuse=refuse,
            rules_of=job.name if policy is None else "",
        )

    def plan(self, on_listed: OnCount | None = None) -> RetentionPlan:
        if self._rules_of and self._policy.is_empty:
            raise InvalidConfiguration(
                f"job {self._rules_of!r} has no rule of retention: the policy is empty, and would keep nothing. Add a "
                f"rule to stillstate.yaml, under jobs.{self._rules_of}.retention or defaults.retention, for example "
                "keep_last: 20; the command takes one as an option too (--keep-last 20)"
            )
        return make_retention_plan(
            self._root, self._policy, clock=self._actor.clock, share_max=self._share_max, refuse=self._refuse
        )

    def dangers(self, plan: RetentionPlan) -> list[str]:
        return dangers_of_retention(self._root, plan, clock=self._actor.clock)

    def apply(self, plan: RetentionPlan, on_progress: OnCount | None = None) -> Outcome:
        done = apply_retention(
            self._root,
            plan,
            clock=self._actor.clock,
            ids=self._actor.ids,
            owner=self._actor.owner,
            on_progress=on_progress,
        )
        return Outcome(
            snapshot_ids=done.snapshot_ids,
            savepoints=done.savepoints,
            objects=done.objects,
            bytes=done.bytes,
            failures=done.failures,
            kept=done.kept,
            document=dataclasses.asdict(done),
        )


class Collecting(Deletions[GcPlan]):
    """Garbage collection: removes objects that no snapshot refers to."""

    kind = "gc"
    document = GcPlan

    def __init__(
        self,
        root: Store,
        actor: Actor,
        *,
        min_age_s: float,
        failed_ttl_s: float,
        share_max: float,
        unsafe_min_age: bool = False,
    ) -> None:
        super().__init__(root, actor)
        self._min_age_s = min_age_s
        self._failed_ttl_s = failed_ttl_s
        self._share_max = share_max
        self._unsafe_min_age = unsafe_min_age

    @staticmethod
    def of_job(
        job: JobSpec, root: Store, actor: Actor, *, min_age_s: float | None = None, unsafe_min_age: bool = False
    ) -> Collecting:
        """Make it from the job's section, except for the given arguments."""
        return Collecting(
            root,
            actor,
            min_age_s=job.garbage.min_age_s if min_age_s is None else min_age_s,
            failed_ttl_s=job.retention.failed_ttl_s,
            share_max=job.garbage.deleted_share_max,
            unsafe_min_age=unsafe_min_age,
        )

    def plan(self, on_listed: OnCount | None = None) -> GcPlan:
        return plan_gc(
            self._root,
            clock=self._actor.clock,
            min_age_s=self._min_age_s,
            failed_ttl_s=self._failed_ttl_s,
            unsafe_min_age=self._unsafe_min_age,
            on_listed=on_listed,
        )

    def dangers(self, plan: GcPlan) -> list[str]:
        return dangers_of_collection(self._root, plan, clock=self._actor.clock, share_max=self._share_max)

    def apply(self, plan: GcPlan, on_progress: OnCount | None = None) -> Outcome:
        done = apply_gc(
            self._root,
            plan,
            clock=self._actor.clock,
            ids=self._actor.ids,
            owner=self._actor.owner,
            on_progress=on_progress,
        )
        return Outcome(
            snapshot_ids=done.given_up,
            savepoints=done.savepoints,
            objects=done.total,
            bytes=done.bytes,
            failures=done.failures,
            by_kind={str(kind): count for kind, count in done.objects.items()},
            stayed=done.kept,
            document=dataclasses.asdict(done),
        )
