"""Common parts of the Dagster jobs that maintain a job beside its stream: tags, schedules, an asset of a spec."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from state_runtime.base.actor import Actor
from state_runtime.base.errors import JobNotFound
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.process_space import process_space
from state_runtime.snapshot.catalog import Catalog
from stillstate.assets.mount import Mount
from stillstate.orchestration.config.schedules import Period, cron_of
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.tags import ACTION_TAG, SLOTS_TAG
from stillstate.orchestration.resources import StillstateResource

__all__ = ["LogsSteps", "UpkeepJob", "actor_of", "asset_of", "started", "upkeep_job", "upkeep_tags"]

_SLOTS: Final = "upkeep"
_STEPS_LOGGED: Final = 10


@dataclass(frozen=True, kw_only=True)
class UpkeepJob:
    """The Dagster objects for one kind of work on one streaming job."""

    job: Any  # an asset job is resolved by `Definitions`; Dagster does not export the class
    assets: tuple[dg.AssetsDefinition, ...] = ()
    checks: tuple[dg.AssetChecksDefinition, ...] = ()
    schedules: tuple[dg.ScheduleDefinition, ...] = ()


class LogsSteps:
    """Logs about every tenth of the way."""

    def __init__(self, log: Any, what: str, unit: str) -> None:
        self._log = log
        self._what = what
        self._unit = unit
        self._logged = -1

    def __call__(self, done: int, total: int) -> None:
        step = done * _STEPS_LOGGED // total if total else 0
        if step != self._logged:
            self._logged = step
            self._log.info(f"{self._what}: {done:,} of {total:,} {self._unit}")


def upkeep_tags(action: str, timeout_s: float) -> dict[str, str]:
    """Return a run's tags: a few runs of all jobs at a time, and never before or instead of a recovery."""
    return {
        SLOTS_TAG: _SLOTS,
        ACTION_TAG: action,
        "dagster/priority": "-1",
        "dagster/max_runtime": str(int(timeout_s)),
        "dagster/max_retries": "0",  # the schedule comes again
    }


def upkeep_job(
    mount: Mount,
    job: JobSpec,
    action: str,
    selection: dg.AssetSelection,
    description: str,
    tags: dict[str, str],
    schedules: Sequence[tuple[str, str, Period, dict[str, Any]]],
) -> tuple[Any, tuple[dg.ScheduleDefinition, ...]]:
    """Build an asset job, and its schedules.

    Args:
        schedules: of each the suffix of its name, its line in the file, the period of `auto`, and run configuration.
    """
    made = dg.define_asset_job(
        mount.job_name(action, job.name),
        selection=selection,
        description=description,
        executor_def=dg.in_process_executor,  # the steps pass on a plan; another process would only cost its start
        tags=tags,
    )
    found = []
    for suffix, line, period, run_config in schedules:
        cron = cron_of(line, period, job.name)
        if cron is not None:
            found.append(
                dg.ScheduleDefinition(
                    name=f"{mount.job_name(action, job.name)}{suffix}_schedule",
                    job=made,
                    cron_schedule=cron,
                    execution_timezone="UTC",
                    run_config=run_config,
                    default_status=dg.DefaultScheduleStatus.RUNNING,
                    description=description,
                )
            )
    return made, tuple(found)


def asset_of(spec: dg.AssetSpec, *resources: str) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Return `@dg.asset` for a spec.

    Args:
        resources: keys of the resources that it needs.
    """
    return dg.asset(
        key=spec.key,
        deps=[dep.asset_key for dep in spec.deps],
        description=spec.description,
        group_name=spec.group_name,
        owners=list(spec.owners),
        kinds=set(spec.kinds),
        tags={key: value for key, value in spec.tags.items() if not key.startswith("dagster/kind/")},
        metadata=dict(spec.metadata),
        required_resource_keys=set(resources),
        output_required=False,  # there may be nothing to show, and then nothing was materialized
    )


def actor_of(stillstate: StillstateResource) -> Actor:
    """Return this process as an actor."""
    return Actor(stillstate.clock(), SYSTEM_IDS, socket.gethostname(), os.getpid(), process_space())


def started(catalog: Catalog, log: Any) -> bool:
    """Whether the job has a root; a schedule of a job that was never started has nothing to do, which is no failure.

    Raises:
        StoreUnavailable, CorruptManifest: this cannot be determined.
    """
    try:
        catalog.job_info()
    except JobNotFound as error:
        log.info(f"nothing to do: {error}")
        return False
    return True
