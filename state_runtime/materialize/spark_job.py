"""Materialization as a separate Spark batch job: each unit of the plan is a row, each task folds its units.

The session may be any with a SparkContext: the stream's own cluster, another one, or one thread. Tasks read and write
the store by the same port as the stream, so executors need no connectors; they need this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from state_runtime.base.clock import SYSTEM_CLOCK, Clock
from state_runtime.base.ids import SYSTEM_IDS, Ids
from state_runtime.base.settings import JobSettings, MaterializationMode
from state_runtime.materialize.grid import MaterializationSizes
from state_runtime.materialize.plan import MaterializationPlan, Unit
from state_runtime.materialize.run import Reached, materialize
from state_runtime.materialize.trigger import MaterializationResult, what_to_materialize
from state_runtime.materialize.write_tables import TablesContext, WrittenTables, fold_unit
from state_runtime.snapshot.catalog import Catalog
from state_runtime.spark.tasks import SparkSession, run_in_tasks
from state_runtime.store import Store, open_store

__all__ = ["Location", "SparkFold", "materialize_job"]


def materialize_job(
    spark: SparkSession,
    store_url: str,
    storage_options: Mapping[str, Any] | None,
    job: str,
    *,
    settings: JobSettings | None = None,
    mode: MaterializationMode = "auto",
    on_progress: Callable[[int, int], None] | None = None,
    sizes: MaterializationSizes | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> MaterializationResult:
    """Fold the changelog of a job's newest snapshot into its tables, as a Spark job.

    Safe at any moment: it changes no existing object. The running driver adopts the record with its next checkpoint, or
    the next run with its first. The caller decides whether a fold is due (`state_runtime.materialize.due`); this
    function folds all existing changelog.

    Args:
        settings: `materialization.ratio` decides which cells get a new base.
        mode: "auto", "minor" (deltas only) or "major" (every cell).
        on_progress: called with (done, total) units, by this thread.

    Raises:
        JobNotFound: there is no such job. CorruptData: the snapshot is damaged. Unavailable: try again later.
    """
    settings = settings or JobSettings()
    started_s = clock.monotonic_s()
    catalog = Catalog(open_store(store_url, storage_options), job, clock)
    catalog.job_info()
    manifest = what_to_materialize(catalog, mode, clock)
    if isinstance(manifest, MaterializationResult):
        return manifest
    place = Location(f"{store_url.rstrip('/')}/{job}", dict(storage_options or {}))
    fold = SparkFold(spark, place, place, f"materialize {job}")
    record = materialize(
        catalog.root,
        manifest,
        mode,
        settings=settings,
        clock=clock,
        ids=ids,
        fold=fold,
        sizes=sizes,
        on_progress=on_progress,
    )
    return MaterializationResult(
        mode=record.mode,
        reason="",
        ranges=record.ranges,
        read_bytes=record.read_bytes,
        written_bytes=record.written_bytes,
        rows=record.rows,
        log_bytes_folded=record.log_bytes,
        shared_tables=record.shared_tables,
        duration_s=clock.monotonic_s() - started_s,
        snapshot_id=record.snapshot_id,
        record_id=record.record_id,
    )


@dataclass(frozen=True)
class Location:
    """A folder laid out like a job root, as tasks open it."""

    url: str
    options: dict[str, Any] = field(repr=False)

    def open(self) -> Store:
        return open_store(self.url, self.options)


@dataclass(frozen=True)
class SparkFold:
    """Folds a plan's units in Spark tasks; a `FoldUnits`.

    Attributes:
        root, into: the root to read, and the folder to write tables to.
        title: of the Spark job, for people.
    """

    spark: SparkSession
    root: Location
    into: Location
    title: str

    def __call__(self, plan: MaterializationPlan, context: TablesContext, reached: Reached) -> WrittenTables:
        begin = partial(_begin_folding, self.root, self.into, context)
        group = f"stillstate-materialize-{context.writer}"
        title = f"{self.title} snapshot {context.snapshot_id}"
        return sum(run_in_tasks(self.spark, plan.units, begin, reached, group, title), WrittenTables())


def _begin_folding(root: Location, into: Location, context: TablesContext) -> Callable[[Unit], WrittenTables]:
    """Open the stores for folding. Runs in a Spark task. An attempt that dies leaves files that no record names."""
    return partial(fold_unit, root.open(), context=context, ids=SYSTEM_IDS, into=into.open())
