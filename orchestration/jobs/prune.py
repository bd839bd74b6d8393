"""`stillstate_prune`: each night, old data of Stillstate's streams in Dagster's storage is deleted."""

from typing import Final

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.orchestration.config.spec import Spec
from stillstate.orchestration.jobs.driver import stillstate_of
from stillstate.orchestration.jobs.tags import ACTION_TAG, STREAM_TAGS, UPKEEP_TAG, prune_tag
from stillstate.orchestration.upkeep.pruning import prune

__all__ = ["build_prune_job"]

_SCHEDULE: Final = "25 4 * * *"
_ACTION: Final = "prune"
_RUNTIME_MAX_S: Final = 3600
"""It may be ended at any point, and continues in the next night."""


def build_prune_job(mount: Mount, spec: Spec) -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    """Build the job and its schedule; one for all streams of a file."""
    streams, keep_days = list(spec.jobs), spec.dagster.keep_days

    @dg.op(name=mount.name("stillstate_prune_storage"), required_resource_keys={mount.resource})
    def prune_storage(context: dg.OpExecutionContext) -> None:
        if not keep_days:
            context.log.info("nothing is deleted: dagster.keep_days is 0")
            return
        keys = [mount.overview()]
        keys += [key for name in streams for key in mount.keys_of(name)]
        tags = {mount.tag(name) for name in streams} | {prune_tag(mount)}
        clock = stillstate_of(context, mount).clock()
        done = prune(context.instance, keys, STREAM_TAGS, tags, keep_days=keep_days, clock=clock)
        if done.events is None:
            context.log.warning("Dagster's event storage is not an SQL database: events of streams are not deleted")
        context.log.info(f"deleted {done.runs:,} runs and {done.events or 0:,} events older than {keep_days:g} days")

    @dg.job(
        name=prune_tag(mount),
        description=f"Delete runs and events of our streams that are older than dagster.keep_days ({keep_days:g}) from "
        "Dagster's storage. The newest of each asset, check and stream stay; nothing of a stream itself is touched.",
        executor_def=dg.in_process_executor,
        tags={
            ACTION_TAG: _ACTION,
            UPKEEP_TAG: prune_tag(mount),
            "dagster/priority": "-1",
            "dagster/max_retries": "0",
            "dagster/max_runtime": str(_RUNTIME_MAX_S),
        },
    )
    def prune_job() -> None:
        prune_storage()

    schedule = dg.ScheduleDefinition(
        name=mount.name("stillstate_prune_schedule"),
        job=prune_job,
        cron_schedule=_SCHEDULE,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING if keep_days else dg.DefaultScheduleStatus.STOPPED,
    )
    return prune_job, schedule
