"""The asset that folds a job's changelog in a separate Spark job, the Dagster job and schedule that run it, and its
check.

A run starts a Spark session through dagster-pyspark, folds, and stops the session. It never touches the stream: the
driver adopts the result with its next checkpoint, and a run that fails or dies costs the job nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from state_runtime.base.settings import MaterializationMode
from stillstate.assets.metadata import materialization_metadata
from stillstate.assets.mount import Mount
from stillstate.assets.specs import materialized_spec
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.checks import result_of, stream_check
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.past_runs import past_materializations
from stillstate.orchestration.jobs.tags import ACTION_TAG, MATERIALIZE_TAG
from stillstate.orchestration.jobs.upkeep import LogsSteps, asset_of
from stillstate.orchestration.materialization.health import (
    FAILURES_ALARMED,
    MaterializationHealth,
    log_bytes_left,
    materialization_health,
    materialization_numbers,
)
from stillstate.orchestration.materialization.plan import failed_in_a_row
from stillstate.orchestration.materialization.session import fold, nothing_to_materialize
from stillstate.orchestration.text import counted_text

__all__ = [
    "CHECK_NAME",
    "MaterializationJobs",
    "MaterializeConfig",
    "build_materialization_jobs",
    "materialization_evaluation",
    "materialization_of_stream",
    "materialization_tags",
    "materializations_of_stream",
    "materializations_spec",
]

CHECK_NAME: Final = "materializations_succeed"


class MaterializeConfig(dg.Config):
    """How to fold.

    Attributes:
        mode: auto writes a new base table for those parts of a state whose changes have grown large, minor for no part,
            major for all.
    """

    mode: MaterializationMode = "auto"


@dataclass(frozen=True)
class MaterializationJobs:
    """The Dagster objects for the materialization of one job."""

    asset: dg.AssetsDefinition
    check: dg.AssetChecksDefinition
    job: Any  # an asset job is resolved by `Definitions`; Dagster does not export the class
    schedule: dg.ScheduleDefinition | None


def build_materialization_jobs(mount: Mount, job: JobSpec) -> MaterializationJobs:
    """Build them; names are Dagster identifiers (`-` becomes `_`)."""
    asset = _asset(mount, job)
    asset_job = dg.define_asset_job(
        mount.job_name("materialize", job.name),
        # The check reads the past and says nothing about this run.
        selection=dg.AssetSelection.assets(asset).without_checks(),
        description=f"Fold the changelog of {job.name} into state tables, in a separate Spark job.",
        executor_def=dg.in_process_executor,  # one step: a second process would only cost a second start
        tags={**materialization_tags(job.materialization.timeout_s), MATERIALIZE_TAG: mount.tag(job.name)},
    )
    schedule = None
    if job.materialization.schedule:
        schedule = dg.ScheduleDefinition(
            name=f"{mount.job_name('materialize', job.name)}_schedule",
            job=asset_job,
            cron_schedule=job.materialization.schedule,
            execution_timezone="UTC",
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description=f"Folds the changelog of {job.name}, whether or not it has grown much.",
        )
    check = stream_check(mount, job.name, materializations_spec(mount, job.name), materializations_of_stream)
    return MaterializationJobs(asset, check, asset_job, schedule)


def materialization_tags(timeout_s: float) -> dict[str, str]:
    """Return the tags of a run that folds."""
    return {
        ACTION_TAG: "materialize",
        "dagster/max_runtime": str(int(timeout_s)),
        # Only the sensor tries again.
        "dagster/max_retries": "0",
    }


def _asset(mount: Mount, job: JobSpec) -> dg.AssetsDefinition:
    name = job.name

    @asset_of(materialized_spec(mount, job), mount.resource, mount.spark)
    def materialized_state(
        context: dg.AssetExecutionContext, config: MaterializeConfig
    ) -> Iterator[dg.MaterializeResult[None]]:
        yield from materialization_of_stream(context, mount, name, config.mode)

    return materialized_state


def materialization_of_stream(
    context: dg.AssetExecutionContext, mount: Mount, name: str, mode: MaterializationMode
) -> Iterator[dg.MaterializeResult[None]]:
    """Fold the changelog of a stream. If there is nothing to fold, do not start Spark and do not materialize."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        now = stillstate.spec().job(name)
        catalog = stillstate.catalog(now)
        result = nothing_to_materialize(catalog, mode, stillstate.clock())
        if result is None:
            with _session(getattr(context.resources, mount.spark).of_job(now)) as session:
                result = fold(session, now, mode=mode, on_progress=LogsSteps(context.log, name, "ranges"))
        left = log_bytes_left(catalog, result.snapshot_id if result.record_id is not None else 0)
    if result.record_id is None:
        context.log.info(f"nothing was folded: {result.reason}")
        return
    yield dg.MaterializeResult(
        asset_key=mount.materialized(name),
        metadata={"mode": result.mode, **materialization_metadata(materialization_numbers(result, left))},
        data_version=dg.DataVersion(str(result.record_id)),
    )


@contextmanager
def _session(lazy: Any) -> Iterator[Any]:
    """Yield the session of a `LazyPySparkResource` and stop it at the end; a session that this process had before is
    left to its owner."""
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession() is not None
    session = lazy.spark_session
    try:
        if not found:
            session.sparkContext.setLogLevel("ERROR")
        yield session
    finally:
        if not found:
            session.stop()


def materializations_spec(mount: Mount, name: str) -> dg.AssetCheckSpec:
    """Return the spec of the check of a stream's materializations."""
    return dg.AssetCheckSpec(
        CHECK_NAME,
        asset=mount.materialized(name),
        description=f"Fails after {FAILURES_ALARMED} materializations in a row failed, by the driver or by Dagster. "
        "The job goes on; its log, and so a restart, grows until one succeeds.",
    )


def materializations_of_stream(context: dg.AssetCheckExecutionContext, mount: Mount, name: str) -> dg.AssetCheckResult:
    """Judge the health of a stream's materializations."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        catalog = stillstate.catalog(stillstate.spec().job(name))
        health = materialization_health(catalog, stillstate.clock().now_ms())
    failed_runs = failed_in_a_row(past_materializations(context.instance, mount.tag(name)))
    return result_of(materialization_evaluation(mount, name, health, failed_runs))


def materialization_evaluation(
    mount: Mount, job: str, health: MaterializationHealth, failed_runs: int
) -> dg.AssetCheckEvaluation:
    """Return the check's verdict.

    Args:
        health: from the store: failures of every fold that got as far as beginning.
        failed_runs: Dagster runs in a row that failed, also before they began (no Java, no store).
    """
    failed = max(health.failed_in_a_row, failed_runs)
    passed = failed < FAILURES_ALARMED
    return dg.AssetCheckEvaluation(
        asset_key=mount.materialized(job),
        check_name=CHECK_NAME,
        passed=passed,
        severity=dg.AssetCheckSeverity.ERROR,
        description=(
            f"{counted_text(failed, 'failure')} in a row"
            if passed
            else f"{failed} materializations in a row failed; the log grows until one succeeds. "
            "Look at the driver's log and at "
            f"the runs of {mount.launch_text('materialize', job)}"
        ),
        metadata={"failed_in_a_row": dg.IntMetadataValue(failed), "last_id": dg.IntMetadataValue(health.last_id)},
    )
