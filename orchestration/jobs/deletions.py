"""Retention and garbage collection in Dagster: plan → check that blocks → apply of that same plan.

The plan's step keeps the plan under its digest and puts the digest into its materialization; the check and the step
that deletes read it from there. So only the plan that was shown and checked is executed, even if other plans are made
meanwhile.
"""

from collections.abc import Iterator
from typing import Any, Final

import dagster as dg

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import RetentionPolicy
from state_runtime.maintenance.gc.plan import GcPlan
from state_runtime.maintenance.plans import Kind
from state_runtime.maintenance.retention.plan import RetentionPlan
from stillstate.assets.mount import Mount
from stillstate.assets.upkeep import (
    DIGEST,
    applied_spec,
    collection_plan_metadata,
    outcome_metadata,
    planned_spec,
    retention_plan_metadata,
)
from stillstate.orchestration.config.schedules import Period
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.tags import UPKEEP_TAG
from stillstate.orchestration.jobs.upkeep import UpkeepJob, actor_of, asset_of, started, upkeep_job, upkeep_tags
from stillstate.orchestration.resources import StillstateResource
from stillstate.orchestration.text import counted_text
from stillstate.orchestration.upkeep.deletions import Collecting, Deletions, Retaining
from stillstate.orchestration.upkeep.kept_plans import forget_plan, keep_plan_of_run, plan_of_run

__all__ = [
    "ACTIONS",
    "DELETION_TEXTS",
    "ApplyConfig",
    "PlanConfig",
    "apply_plan",
    "build_deletion_jobs",
    "check_plan",
    "plan_stream",
    "safe_spec",
]

_EVENTS_READ_MAX: Final = 20
_NAMED_MAX: Final = 20
_CHECKS: Final[dict[Kind, str]] = {"retention": "retention_plan_is_safe", "gc": "garbage_plan_is_safe"}
ACTIONS: Final[dict[Kind, str]] = {"retention": "retain", "gc": "collect"}
DELETION_TEXTS: Final[dict[Kind, str]] = {
    "retention": "Plan which snapshots of {} the rules keep, check the plan, delete the others.",
    "gc": "Find what nothing of {} needs, check the plan, delete it.",
}


class PlanConfig(dg.Config):
    """How to plan. All fields belong to retention.

    Attributes:
        deleted_share_max: the share of the snapshots that this plan may delete; 0 takes the file's.
        keep_last … keep_tags: rules of this plan; if any is given, they replace those of the file.
    """

    deleted_share_max: float = 0.0
    keep_last: int = 0
    keep_within_s: float = 0.0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    keep_yearly: int = 0
    keep_tags: list[str] = []

    def policy(self, job: JobSpec) -> RetentionPolicy | None:
        """Return the rules of this plan; None: those of the file.

        Raises:
            InvalidConfiguration: one is out of its bounds.
        """
        given = RetentionPolicy(
            keep_last=self.keep_last or None,
            keep_within_s=self.keep_within_s or None,
            keep_hourly=self.keep_hourly or None,
            keep_daily=self.keep_daily or None,
            keep_weekly=self.keep_weekly or None,
            keep_monthly=self.keep_monthly or None,
            keep_yearly=self.keep_yearly or None,
            keep_tags=tuple(self.keep_tags),
            failed_ttl_s=job.retention.failed_ttl_s,
        )
        return None if given.is_empty else given


class ApplyConfig(dg.Config):
    """Which plan to execute.

    Attributes:
        digest: of a plan of an earlier run that a person has reviewed; empty: the plan of this run.
    """

    digest: str = ""


def build_deletion_jobs(mount: Mount, job: JobSpec, kind: Kind) -> UpkeepJob:
    """Build `retain_<job>` or `collect_<job>` with its assets, its check and its schedule."""
    planned, check, applied = _planned(mount, job, kind), _check(mount, job, kind), _applied(mount, job, kind)
    section = job.retention if kind == "retention" else job.garbage
    period: Period = "night" if kind == "retention" else "six_hours"
    made, schedules = upkeep_job(
        mount,
        job,
        ACTIONS[kind],
        dg.AssetSelection.assets(planned, applied),
        DELETION_TEXTS[kind].format(job.name),
        {**upkeep_tags(ACTIONS[kind], section.timeout_s), UPKEEP_TAG: mount.tag(job.name)},
        [("", section.schedule, period, {})],
    )
    return UpkeepJob(job=made, assets=(planned, applied), checks=(check,), schedules=schedules)


def _planned(mount: Mount, job: JobSpec, kind: Kind) -> dg.AssetsDefinition:
    name = job.name

    @asset_of(planned_spec(mount, job, kind), mount.resource)
    def planned(context: dg.AssetExecutionContext, config: PlanConfig) -> Iterator[dg.MaterializeResult[None]]:
        yield from plan_stream(context, mount, name, kind, config)

    return planned


def _check(mount: Mount, job: JobSpec, kind: Kind) -> dg.AssetChecksDefinition:
    name = job.name
    spec = safe_spec(mount, name, kind)

    @dg.asset_check(
        asset=spec.asset_key,
        name=spec.name,
        blocking=True,
        description=spec.description,
        required_resource_keys={mount.resource},
    )
    def is_safe(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return check_plan(context, mount, name, kind)

    return is_safe


def _applied(mount: Mount, job: JobSpec, kind: Kind) -> dg.AssetsDefinition:
    name = job.name

    @asset_of(applied_spec(mount, job, kind), mount.resource)
    def applied(context: dg.AssetExecutionContext, config: ApplyConfig) -> Iterator[dg.MaterializeResult[None]]:
        yield from apply_plan(context, mount, name, kind, config.digest)

    return applied


def safe_spec(mount: Mount, name: str, kind: Kind) -> dg.AssetCheckSpec:
    """Return the spec of the check that a stream's plan must pass before it is executed."""
    return dg.AssetCheckSpec(
        _CHECKS[kind],
        asset=mount.planned(name, kind),
        blocking=True,
        description="Whether the plan may be executed, looked at against the store again and apart from the planner: "
        "nothing that a run, a pin, a restart or a person needs, and not too much at once.",
    )


def _deletions(
    kind: Kind, stillstate: StillstateResource, job: JobSpec, config: PlanConfig | None = None
) -> Deletions[RetentionPlan] | Deletions[GcPlan]:
    root, actor = stillstate.catalog(job).root, actor_of(stillstate)
    if kind == "retention":
        asked = config or PlanConfig()
        share_max = asked.deleted_share_max or None
        # A plan that deletes too large a share is shown too; the check stops it.
        return Retaining.of_job(job, root, actor, policy=asked.policy(job), share_max=share_max, refuse=False)
    return Collecting.of_job(job, root, actor)


def plan_stream(
    context: dg.AssetExecutionContext, mount: Mount, name: str, kind: Kind, config: PlanConfig
) -> Iterator[dg.MaterializeResult[None]]:
    """Plan the deletions of a stream, and keep the plan; do nothing for a stream that was never started."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        now = stillstate.spec().job(name)
        if not started(stillstate.catalog(now), context.log):
            return
        deletions: Any = _deletions(kind, stillstate, now, config)
        plan = deletions.plan()
        keep_plan_of_run(now, deletions, plan, stillstate.clock())
    metadata = retention_plan_metadata(plan) if isinstance(plan, RetentionPlan) else collection_plan_metadata(plan)
    yield dg.MaterializeResult(
        asset_key=mount.planned(name, kind), metadata=metadata, data_version=dg.DataVersion(plan.digest)
    )


def check_plan(
    context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext,
    mount: Mount,
    name: str,
    kind: Kind,
    digest: str = "",
) -> dg.AssetCheckResult:
    """Check a stream's plan against the store.

    Args:
        digest: of the plan; empty: the plan of this run.
    """
    stillstate = stillstate_of(context, mount)
    key = mount.planned(name, kind)
    with typed_failures():
        now = stillstate.spec().job(name)
        deletions: Any = _deletions(kind, stillstate, now)
        digest = digest or _digest_of_run(context.instance, context.run, key)
        found = deletions.dangers(plan_of_run(now, deletions, digest))
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=_CHECKS[kind],
        passed=not found,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(found[:_NAMED_MAX]) or "nothing that is needed would be deleted",
        metadata={DIGEST: digest, "dangers": len(found)},
    )


def apply_plan(
    context: dg.AssetExecutionContext, mount: Mount, name: str, kind: Kind, asked: str, made: str = ""
) -> Iterator[dg.MaterializeResult[None]]:
    """Execute a stream's plan.

    Args:
        asked: digest of a plan that a person has reviewed; empty: the plan of this run.
        made: digest of the plan of this run, if the caller knows it.
    """
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        now = stillstate.spec().job(name)
        deletions: Any = _deletions(kind, stillstate, now)
        digest = asked or made or _digest_of_run(context.instance, context.run, mount.planned(name, kind))
        plan = plan_of_run(now, deletions, digest)
        if asked:
            # No check of this run has seen the plan.
            _refuse(deletions.dangers(plan))
        if plan.is_empty:
            forget_plan(now, kind, digest)
            context.log.info("the plan deletes nothing")
            return
        done = deletions.apply(plan)
        forget_plan(now, kind, digest)
    yield dg.MaterializeResult(
        asset_key=mount.applied(name, kind),
        metadata=outcome_metadata(done.numbers, digest),
        data_version=dg.DataVersion(digest),
    )
    for snapshot_id, holders in done.kept.items():
        context.log.warning(f"snapshot {snapshot_id} stays: {'; '.join(holders)}")
    if done.failures:
        named = "; ".join(f"{f.path}: {f.message}" for f in done.failures[:_NAMED_MAX])
        raise dg.Failure(
            description=f"{counted_text(len(done.failures), 'object')} could not be deleted; the next "
            f"collection tries again: {named}",
            allow_retries=False,
        )


def _digest_of_run(instance: dg.DagsterInstance, run: dg.DagsterRun, key: dg.AssetKey) -> str:
    """Return the digest of the plan of this run, or of the run that it re-executes from a failure.

    Raises:
        InvalidConfiguration: it made no plan.
    """
    mine = {run.run_id, run.root_run_id, run.parent_run_id}
    for record in instance.fetch_materializations(key, limit=_EVENTS_READ_MAX).records:
        event = record.asset_materialization
        if event is not None and record.run_id in mine and DIGEST in event.metadata:
            return str(event.metadata[DIGEST].value)
    raise InvalidConfiguration(
        f"this run made no plan: materialize {key.to_user_string()} together with what depends on it, or give the "
        "digest of a plan that was looked at. Nothing was deleted"
    )


def _refuse(dangers: list[str]) -> None:
    """Raise an error if a plan has dangers.

    Raises:
        InvalidConfiguration: it has any.
    """
    if dangers:
        raise InvalidConfiguration(f"{'; '.join(dangers[:_NAMED_MAX])}. Nothing was deleted; make a new plan")
