"""The Dagster code location: everything that `stillstate.yaml` declares, loaded without Java and without Spark.

`workspace.yaml` names this module. Which file is read: `$STILLSTATE_CONFIG`, else `stillstate.yaml` in the current
folder or above it. After a change of the file's set of jobs, reload the code location.
"""

import dagster as dg

from assets.specs import build_asset_specs
from orchestration.config.spec import Spec, load_spec
from orchestration.jobs import build_driver_jobs, build_fold_jobs
from orchestration.resources import STILLSTATE, StillstateResource
from orchestration.sensors import build_materialization_sensor, build_progress_sensor, build_recovery_sensor

__all__ = ["build_definitions", "defs"]


def build_definitions(spec: Spec, stillstate: StillstateResource | None = None) -> dg.Definitions:
    """Definitions for one configuration; `stillstate` replaces the resource in tests."""
    resource = stillstate or StillstateResource(config_file=str(spec.file))
    jobs = {name: build_driver_jobs(job, resource) for name, job in spec.jobs.items()}
    folds = {name: build_fold_jobs(job) for name, job in spec.jobs.items()}
    names = list(jobs)
    return dg.Definitions(
        assets=[*build_asset_specs(spec.jobs.values()), *(fold.asset for fold in folds.values())],
        asset_checks=[fold.check for fold in folds.values()],
        jobs=[*(d for job in jobs.values() for d in job.all()), *(fold.job for fold in folds.values())],
        schedules=[fold.schedule for fold in folds.values() if fold.schedule is not None],
        sensors=[
            build_progress_sensor(names),
            build_recovery_sensor(names, {name: job.recover for name, job in jobs.items()}),
            build_materialization_sensor(names, {name: fold.job for name, fold in folds.items()}),
        ],
        resources={STILLSTATE: resource, **{key: r for fold in folds.values() for key, r in fold.resources.items()}},
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Loaded by Dagster; a bad or missing configuration fails here with every problem in one message."""
    return build_definitions(load_spec())
