"""Materialization outside the driver: by the command line, and by Dagster. Both fold in a separate Spark session.

Nothing here relies on being the only process: the store's own records keep two materializations, and the driver, apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.settings import MaterializationMode
from state_runtime.materialize.trigger import MaterializationResult, what_to_materialize
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from stillstate.orchestration.config.job_location import location_of
from stillstate.orchestration.config.spec import JobSpec, SparkSpec, to_settings
from stillstate.orchestration.materialization.health import log_bytes_left

if TYPE_CHECKING:
    # It needs pyspark, which the Dagster code location and the rest of the command line must not import.
    from pyspark.sql import SparkSession

__all__ = ["fold", "materialization_summary", "materialize_in_new_session", "nothing_to_materialize", "spark_of"]


def spark_of(spec: JobSpec) -> SparkSpec:
    """Return the session that folds outside the driver: `materialization.spark`, else the job's own settings."""
    return spec.materialization.spark or spec.spark


def fold(
    session: SparkSession,
    spec: JobSpec,
    *,
    mode: MaterializationMode = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> MaterializationResult:
    """Fold the log of a job's newest snapshot now, whether or not it is due.

    The running driver adopts the result with its next checkpoint, the next run with its first. A crash leaves only
    garbage.

    Args:
        mode: "auto" writes a new base for those parts of a state whose changes have grown large; "minor" for no part,
            "major" for all.
        on_progress: is called with the number of finished pieces and the number of all pieces.

    Raises:
        JobNotFound, CorruptData, Unavailable: see `materialize_job`.
    """
    from state_runtime.materialize.spark_job import materialize_job

    spec = location_of(spec)
    return materialize_job(
        session,
        spec.store,
        spec.storage_options,
        spec.name,
        settings=to_settings(spec),
        mode=mode,
        on_progress=on_progress,
    )


def nothing_to_materialize(catalog: Catalog, mode: MaterializationMode, clock: Clock) -> MaterializationResult | None:
    """Return why a fold would do nothing, from a look at the store; None if there is something to fold.

    Called before a Spark session is started for the fold: a start takes longer than most folds. The fold itself checks
    again.

    Raises:
        JobNotFound, CorruptData, Unavailable: as for the fold.
    """
    catalog.job_info()
    found = what_to_materialize(catalog, mode, clock)
    return found if isinstance(found, MaterializationResult) else None


def materialize_in_new_session(
    spec: JobSpec,
    *,
    mode: MaterializationMode,
    on_progress: Callable[[int, int], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[MaterializationResult, int]:
    """Start a session, fold, stop the session; start no session if there is nothing to fold.

    Returns:
        The result, and the bytes of changelog that are left.
    """
    spec = location_of(spec)
    catalog = Catalog(open_store(spec.store, spec.storage_options), spec.name, clock)
    nothing = nothing_to_materialize(catalog, mode, clock)
    if nothing is not None:
        return nothing, log_bytes_left(catalog, 0)
    from state_runtime.spark.session import build_session

    spark = spark_of(spec)
    session = build_session(f"{spec.name}-materialize", spark.master, spark.conf)
    try:
        result = fold(session, spec, mode=mode, on_progress=on_progress)
    finally:
        session.stop()
    return result, log_bytes_left(catalog, result.snapshot_id if result.record_id is not None else 0)


def materialization_summary(result: MaterializationResult, numbers: dict[str, int | float]) -> dict[str, Any]:
    """Return the result for `--json`."""
    return {"mode": result.mode, "reason": result.reason, "record_id": result.record_id, **numbers}
