"""The Dagster code location: everything that `stillstate.yaml` declares, loaded without Java and without Spark.

The `workspace.yaml` that `stillstate init` writes names this module. It reads `$STILLSTATE_CONFIG`, else
`stillstate.yaml` in the current folder or above it. After a change of the file's set of jobs, reload the code location.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from stillstate.assets.mount import Mount, Translator
from stillstate.assets.overview import overview_spec
from stillstate.assets.specs import build_asset_specs
from stillstate.orchestration.config.spec import JobSpec, Spec, load_spec
from stillstate.orchestration.jobs import build_alive_check, build_materialization_jobs
from stillstate.orchestration.jobs.checks import build_checks
from stillstate.orchestration.jobs.deletions import build_deletion_jobs
from stillstate.orchestration.jobs.driver import RECOVER, START, STOP, DriverWork, build_driver_job
from stillstate.orchestration.jobs.matches_check import build_matches_check
from stillstate.orchestration.jobs.migrate import MIGRATE
from stillstate.orchestration.jobs.output import build_output_job
from stillstate.orchestration.jobs.overview_check import build_overview_check
from stillstate.orchestration.jobs.prune import build_prune_job
from stillstate.orchestration.jobs.rollback import ROLLBACK
from stillstate.orchestration.jobs.savepoints import build_savepoint_job
from stillstate.orchestration.jobs.set_source import SET_SOURCE
from stillstate.orchestration.jobs.shared import build_shared_jobs
from stillstate.orchestration.jobs.upkeep import UpkeepJob
from stillstate.orchestration.jobs.verification import build_drill_job, build_verify_job
from stillstate.orchestration.resources import SparkSessionResource, StillstateResource
from stillstate.orchestration.sensors import build_materialization_sensor, build_progress_sensor, build_recovery_sensor
from stillstate.orchestration.sensors.checks import build_checks_sensor
from stillstate.orchestration.sensors.desired_state import build_desired_state_sensor
from stillstate.orchestration.sensors.failures import build_failures_sensor
from stillstate.orchestration.upkeep.checks import limits_of

__all__ = ["build_definitions", "defs"]


def build_definitions(
    file: Spec | Path | str,
    stillstate: StillstateResource | None = None,
    *,
    key_prefix: Sequence[str] | str = (),
    group: str | None = None,
    translator: Translator | None = None,
) -> dg.Definitions:
    """Build everything that one configuration declares: assets, checks, jobs, schedules, sensors and the resource.

    In your own code location, `dg.Definitions.merge` combines it with your definitions and with other files. With
    different prefixes no names collide, and streams of the same name do not take each other's slots among runs.

    Args:
        file: `stillstate.yaml`, or its loaded content.
        stillstate: replaces the resource in tests.
        key_prefix: before every asset key, and before the names of jobs, schedules, sensors and resources (with `_`).
        group: of all assets; absent: one group for each stream.
        translator: gets each asset, and returns it as it is to be shown; it may not change the key.

    Raises:
        InvalidConfiguration: every problem of the file; a prefix that Dagster's names cannot have; a translator that
            changes a key.
    """
    spec = file if isinstance(file, Spec) else load_spec(file)
    mount = Mount(
        # A string is a sequence too: of letters.
        key_prefix=(key_prefix,) if isinstance(key_prefix, str) else tuple(key_prefix),
        group=group,
        translator=translator,
        is_shared=spec.dagster.is_shared(len(spec.jobs)),
    )
    resource = stillstate or StillstateResource(config_file=str(spec.file))
    jobs = list(spec.jobs.values())
    made = _shared(mount, jobs) if mount.is_shared else _per_job(mount, jobs)
    drivers = {
        work.action: _driver_jobs(mount, jobs, resource, work)
        for work in (START, STOP, RECOVER, MIGRATE, ROLLBACK, SET_SOURCE)
    }
    names = list(spec.jobs)
    limits = {name: limits_of(job) for name, job in spec.jobs.items() if limits_of(job)}
    prune_job, prune_schedule = build_prune_job(mount, spec)
    return dg.Definitions(
        assets=[overview_spec(mount, len(names)), *build_asset_specs(mount, jobs), *made.assets],
        asset_checks=[build_overview_check(mount, names), *made.checks],
        jobs=[*_each_once(drivers), *made.folds, *made.upkeep, prune_job],
        schedules=[*made.schedules, prune_schedule],
        sensors=[
            build_progress_sensor(mount, names),
            build_recovery_sensor(mount, names, drivers["recover"]),
            build_desired_state_sensor(mount, names, drivers["migrate"]),
            build_materialization_sensor(mount, names, made.folds, made.materialize_op),
            build_checks_sensor(mount, limits),
            *([build_failures_sensor(mount, jobs)] if spec.notify is not None else []),
        ],
        resources={mount.resource: resource, mount.spark: SparkSessionResource()},
    )


@dataclass(frozen=True, kw_only=True)
class _Made:
    """The Dagster objects beside the jobs of drivers.

    Attributes:
        materialize_op: the op that gets the stream to fold, where one job folds all streams.
    """

    folds: Sequence[Any]  # asset jobs are resolved by `Definitions`; Dagster does not export the class
    materialize_op: str
    upkeep: Sequence[Any]
    assets: Sequence[dg.AssetsDefinition]
    checks: Sequence[dg.AssetChecksDefinition]
    schedules: Sequence[dg.ScheduleDefinition]


def _driver_jobs(
    mount: Mount, jobs: Sequence[JobSpec], resource: StillstateResource, work: DriverWork
) -> Mapping[str, dg.JobDefinition]:
    """Return the jobs of one kind of work by the stream's name: one job for each stream, or one for all."""
    if mount.is_shared:
        return dict.fromkeys((job.name for job in jobs), build_driver_job(mount, resource, work, jobs))
    return {job.name: build_driver_job(mount, resource, work, [job]) for job in jobs}


def _each_once(drivers: Mapping[str, Mapping[str, dg.JobDefinition]]) -> list[dg.JobDefinition]:
    return list({made.name: made for by_stream in drivers.values() for made in by_stream.values()}.values())


def _shared(mount: Mount, jobs: Sequence[JobSpec]) -> _Made:
    """Build one job for each kind of work."""
    made = build_shared_jobs(mount, jobs)
    return _Made(
        folds=[made.fold],
        materialize_op=made.materialize_op,
        upkeep=made.upkeep,
        assets=made.assets,
        checks=made.checks,
        schedules=made.schedules,
    )


def _per_job(mount: Mount, jobs: Sequence[JobSpec]) -> _Made:
    """Build jobs for each stream."""
    folds = [build_materialization_jobs(mount, job) for job in jobs]
    upkeep = [u for job in jobs for u in _upkeep(mount, job)]
    return _Made(
        folds=[fold.job for fold in folds],
        materialize_op="",
        upkeep=[u.job for u in upkeep],
        assets=[*(fold.asset for fold in folds), *(a for u in upkeep for a in u.assets)],
        checks=[
            *(build_alive_check(mount, job) for job in jobs),
            *(build_matches_check(mount, job) for job in jobs),
            *(fold.check for fold in folds),
            *(c for u in upkeep for c in u.checks),
            *(made for job in jobs if (made := build_checks(mount, job)) is not None),
        ],
        schedules=[
            *(fold.schedule for fold in folds if fold.schedule is not None),
            *(schedule for u in upkeep for schedule in u.schedules),
        ],
    )


def _upkeep(mount: Mount, job: JobSpec) -> list[UpkeepJob]:
    """Build the upkeep jobs of a streaming job."""
    return [
        build_savepoint_job(mount, job),
        build_deletion_jobs(mount, job, "retention"),
        build_deletion_jobs(mount, job, "gc"),
        build_output_job(mount, job),
        build_verify_job(mount, job),
        build_drill_job(mount, job),
    ]


@dg.definitions
def defs() -> dg.Definitions:
    """Build the definitions for Dagster; a bad or missing configuration fails here, with every problem in one
    message."""
    return build_definitions(load_spec())
