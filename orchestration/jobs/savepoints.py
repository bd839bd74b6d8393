"""`savepoint_<job>`: a savepoint by schedule or by hand, kept by the rules of retention."""

from collections.abc import Iterator

import dagster as dg

from assets.mount import Mount
from assets.upkeep import savepoints_metadata, savepoints_spec
from orchestration.config.spec import JobSpec
from orchestration.jobs.driver import stillstate_of, typed_failures
from orchestration.jobs.tags import SAVEPOINT_TAG
from orchestration.jobs.upkeep import UpkeepJob, asset_of, upkeep_job, upkeep_tags
from orchestration.running.savepoints import Savepointer
from orchestration.upkeep.savepoints import periodic_savepoint
from state_runtime.maintenance.links import find_links
from state_runtime.snapshot.savepoint import list_savepoints
from state_runtime.snapshot.waiting import waiting_in_savepoint

__all__ = ["build_savepoint_job", "savepoint_stream"]


def build_savepoint_job(mount: Mount, job: JobSpec) -> UpkeepJob:
    """The job with its asset and schedule."""
    name = job.name

    @asset_of(savepoints_spec(mount, job), mount.resource)
    def savepoints(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        yield from savepoint_stream(context, mount, name)

    made, schedules = upkeep_job(
        mount,
        job,
        "savepoint",
        dg.AssetSelection.assets(savepoints).without_checks(),
        f"Make a savepoint of {name}, named by the time; running or not.",
        {**upkeep_tags("savepoint", job.savepoints.timeout_s), SAVEPOINT_TAG: mount.tag(name)},
        [("", job.savepoints.schedule, "night", {})],
    )
    return UpkeepJob(job=made, assets=(savepoints,), schedules=schedules)


def savepoint_stream(
    context: dg.AssetExecutionContext, mount: Mount, name: str
) -> Iterator[dg.MaterializeResult[None]]:
    """Make a savepoint of a stream; nothing comes of it where there is nothing new."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        spec = stillstate.spec()
        now = spec.job(name)
        catalog = stillstate.catalog(now)
        clock, poll = stillstate.clock(), stillstate.poll()
        maker = Savepointer.watching(catalog, lambda: stillstate.observe(spec, now), clock=clock, poll=poll)
        tags = tuple(now.savepoints.tags)
        made = periodic_savepoint(catalog, maker, tags, clock=clock, poll=poll, say=context.log.warning)
        records = list_savepoints(catalog.root)
        if isinstance(made, str):
            context.log.info(f"skipped: {made}")
            return
        # One listing of the root, and only where the store can share bytes.
        links = find_links(catalog.root)
        waiting = {record.name: waiting_in_savepoint(catalog.root, record) for record in records}
        inflight_rows = {name: found.rows for name, found in waiting.items() if found is not None}
    yield dg.MaterializeResult(
        asset_key=mount.savepoints(name),
        metadata={
            "name": made.name,
            "snapshot_id": made.snapshot_id,
            "bytes": made.total_bytes,
            "objects": made.total_objects,
            "tags": ", ".join(made.tags),
            "inflight_rows": inflight_rows.get(made.name, 0),
            **savepoints_metadata(records, catalog.root.url, clock.now_ms(), links, inflight_rows),
        },
        data_version=dg.DataVersion(made.name),
    )
