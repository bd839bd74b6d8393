"""The asset that folds a job's changelog in a Spark job of its own, the Dagster job and schedule that run it, and its
check.

A run starts a Spark session through dagster-pyspark, folds, and stops it. It never touches the stream: the driver
adopts the result with its next checkpoint, and a run that fails or dies costs the job nothing.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from assets.metadata import fold_metadata
from assets.specs import materialized_key, materialized_spec
from orchestration.config.spec import JobSpec
from orchestration.folding.health import FAILURES_ALARMED, FoldHealth, fold_health, fold_numbers, log_bytes_left
from orchestration.folding.mode import FoldMode
from orchestration.folding.plan import failed_in_a_row
from orchestration.folding.session import fold, spark_of
from orchestration.jobs.driver import typed_failures
from orchestration.jobs.past_runs import past_folds
from orchestration.jobs.tags import ACTION_TAG, MATERIALIZE_TAG
from orchestration.resources import STILLSTATE, StillstateResource
from state_runtime.base.errors import InvalidConfiguration

__all__ = ["CHECK_NAME", "FoldConfig", "FoldJobs", "build_fold_jobs", "fold_evaluation"]

CHECK_NAME: Final = "materializations_succeed"
_STEPS_LOGGED: Final = 10


class FoldConfig(dg.Config):
    """How to fold.

    Attributes:
        mode: auto gives a new base table to those parts of a state whose changes have grown large, minor to none, major
            to all.
    """

    mode: FoldMode = FoldMode.auto


@dataclass(frozen=True)
class FoldJobs:
    """What Dagster has for the materialization of one job."""

    asset: dg.AssetsDefinition
    check: dg.AssetChecksDefinition
    job: Any  # an asset job is resolved by `Definitions`; Dagster does not export the class
    schedule: dg.ScheduleDefinition | None
    resources: dict[str, dg.ResourceDefinition]


def build_fold_jobs(job: JobSpec) -> FoldJobs:
    """Build them; names are Dagster identifiers (`-` becomes `_`)."""
    asset = _asset(job)
    asset_job = dg.define_asset_job(
        f"materialize_{job.identifier}",
        # The check is a look at the past and would say nothing of this run.
        selection=dg.AssetSelection.assets(asset).without_checks(),
        description=f"Fold the changelog of {job.name} into state tables, in a Spark job of its own.",
        executor_def=dg.in_process_executor,  # one step: a second process would only cost a second start
        tags={
            MATERIALIZE_TAG: job.name,
            ACTION_TAG: "materialize",
            "dagster/max_runtime": str(int(job.materialization.timeout_s)),
            # The sensor is the only one that tries again.
            "dagster/max_retries": "0",
        },
    )
    schedule = None
    if job.materialization.schedule:
        schedule = dg.ScheduleDefinition(
            name=f"materialize_{job.identifier}_schedule",
            job=asset_job,
            cron_schedule=job.materialization.schedule,
            execution_timezone="UTC",
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description=f"Folds the changelog of {job.name}, whether or not it has grown much.",
        )
    return FoldJobs(asset, _check(job), asset_job, schedule, {_spark_key(job): _lazy_pyspark(job)})


def _spark_key(job: JobSpec) -> str:
    return f"spark_{job.identifier}"


def _lazy_pyspark(job: JobSpec) -> dg.ResourceDefinition:
    """`LazyPySparkResource` with the session settings of the job; it is imported when a run needs it, for it imports
    pyspark."""

    @dg.resource(
        description=f"LazyPySparkResource of dagster-pyspark: the session in which {job.name} is materialized."
    )
    def lazy_pyspark(context: dg.InitResourceContext) -> Any:
        try:
            library = importlib.import_module("dagster_pyspark")
        except ImportError as error:
            raise InvalidConfiguration(
                f"materializing {job.name} needs Spark in the environment of the Dagster run: "
                f"pip install 'stillstate[spark]' ({error})"
            ) from error
        from state_runtime.spark.session import session_conf

        spark = spark_of(job)
        return library.LazyPySparkResource(
            spark_config=session_conf(f"{job.name}-materialize", spark.master, spark.conf)
        )

    return lazy_pyspark


def _asset(job: JobSpec) -> dg.AssetsDefinition:
    spec = materialized_spec(job)
    name = job.name

    @dg.asset(
        key=spec.key,
        deps=[dep.asset_key for dep in spec.deps],
        description=spec.description,
        group_name=spec.group_name,
        owners=list(spec.owners),
        kinds=set(spec.kinds),
        tags={key: value for key, value in spec.tags.items() if not key.startswith("dagster/kind/")},
        metadata=dict(spec.metadata),
        required_resource_keys={STILLSTATE, _spark_key(job)},
        output_required=False,  # there may be nothing to fold, and then nothing was materialized
    )
    def materialized_state(
        context: dg.AssetExecutionContext, config: FoldConfig
    ) -> Iterator[dg.MaterializeResult[None]]:
        stillstate: StillstateResource = getattr(context.resources, STILLSTATE)
        with typed_failures():
            now = stillstate.spec().job(name)
            catalog = stillstate.catalog(now)
            catalog.job_info()  # before the start of Spark
            with _session(getattr(context.resources, _spark_key(job))) as session:
                result = fold(session, now, mode=config.mode.value, on_progress=_Steps(context, name))
            left = log_bytes_left(catalog, result.snapshot_id if result.record_id is not None else 0)
        if result.record_id is None:
            context.log.info(f"nothing was folded: {result.reason}")
            return
        yield dg.MaterializeResult(
            metadata={"mode": result.mode, **fold_metadata(fold_numbers(result, left))},
            data_version=dg.DataVersion(str(result.record_id)),
        )

    return materialized_state


@contextmanager
def _session(lazy: Any) -> Iterator[Any]:
    """The session of a `LazyPySparkResource`, stopped at the end; one that this process had before is left to its
    owner."""
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


class _Steps:
    """Logs about every tenth of the way."""

    def __init__(self, context: dg.AssetExecutionContext, name: str) -> None:
        self._context = context
        self._name = name
        self._logged = -1

    def __call__(self, done: int, total: int) -> None:
        step = done * _STEPS_LOGGED // total if total else 0
        if step != self._logged:
            self._logged = step
            self._context.log.info(f"{self._name}: {done} of {total} ranges")


def _check(job: JobSpec) -> dg.AssetChecksDefinition:
    name = job.name

    @dg.asset_check(
        asset=materialized_key(name),
        name=CHECK_NAME,
        description=f"Fails after {FAILURES_ALARMED} materializations in a row failed, by the driver or by Dagster. "
        "The job goes on; "
        "its log, and so a restart, grows until one succeeds.",
        required_resource_keys={STILLSTATE},
    )
    def materializations_succeed(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        stillstate: StillstateResource = getattr(context.resources, STILLSTATE)
        with typed_failures():
            catalog = stillstate.catalog(stillstate.spec().job(name))
            health = fold_health(catalog, stillstate.clock().now_ms())
        failed_runs = failed_in_a_row(past_folds(context.instance, name))
        seen = fold_evaluation(name, health, failed_runs)
        return dg.AssetCheckResult(
            passed=seen.passed, metadata=seen.metadata, severity=seen.severity, description=seen.description
        )

    return materializations_succeed


def fold_evaluation(job: str, health: FoldHealth, failed_runs: int) -> dg.AssetCheckEvaluation:
    """The check's verdict.

    Args:
        health: what the store knows: failures of everybody who got as far as beginning.
        failed_runs: Dagster runs in a row that failed, also before they began (no Java, no store).
    """
    failed = max(health.failed_in_a_row, failed_runs)
    passed = failed < FAILURES_ALARMED
    return dg.AssetCheckEvaluation(
        asset_key=materialized_key(job),
        check_name=CHECK_NAME,
        passed=passed,
        severity=dg.AssetCheckSeverity.ERROR,
        description=(
            f"{failed} failures in a row"
            if passed
            else f"{failed} materializations in a row failed; the log grows until one succeeds. "
            "Look at the driver's log and at "
            f"the runs of materialize_{job.replace('-', '_')}"
        ),
        metadata={"failed_in_a_row": dg.IntMetadataValue(failed), "last_id": dg.IntMetadataValue(health.last_id)},
    )
