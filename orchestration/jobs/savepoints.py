"""`savepoint_<job>`: a savepoint by schedule, kept by the rules of retention; or one that a person requests, kept until
it is deleted, as `stillstate savepoint` makes it."""

from collections.abc import Iterator

import dagster as dg

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.maintenance.links import find_links
from state_runtime.snapshot.savepoint_record import SavepointFormat, list_savepoints
from state_runtime.snapshot.waiting import waiting_in_savepoint
from stillstate.assets.mount import Mount
from stillstate.assets.upkeep import savepoints_metadata, savepoints_spec
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.tags import SAVEPOINT_TAG
from stillstate.orchestration.jobs.upkeep import UpkeepJob, asset_of, upkeep_job, upkeep_tags
from stillstate.orchestration.running.make_savepoint import savepointer_watching
from stillstate.orchestration.upkeep.scheduled_savepoint import SavepointWish, periodic_savepoint, requested_savepoint

__all__ = ["SavepointConfig", "build_savepoint_job", "savepoint_stream"]


class SavepointConfig(dg.Config):
    """What to make: the options of `stillstate savepoint`. Without options: the schedule's savepoint, which is skipped
    if the job has nothing new and is kept by the rules of retention.

    Attributes:
        name: a-z, 0-9, _ and -; empty: the time.
        tags: for rules of retention.
        note: why it is made.
        format: native, as the job writes it; or canonical, sorted Parquet tables.
        stop: then stop the job: no epoch follows the savepoint.
        drain: end the job's input first, so that all windows and event-time timers fire; then stop it.
        drain_inflight: process the rows that are in flight first, so that the savepoint has no rows in flight.
        independent: write the bytes again where a copy would be a hard link.
    """

    name: str = ""
    tags: list[str] = []
    note: str = ""
    format: SavepointFormat = "native"
    stop: bool = False
    drain: bool = False
    drain_inflight: bool = False
    independent: bool = False

    def wish(self) -> SavepointWish | None:
        """Return the requested savepoint; None without options.

        Raises:
            InvalidConfiguration: two options exclude each other.
        """
        if self.stop and self.drain:
            raise InvalidConfiguration("drain stops the job too; give one of stop and drain")
        wish = SavepointWish(
            name=self.name or None,
            then="drain" if self.drain else "stop" if self.stop else "continue",
            tags=tuple(self.tags),
            note=self.note,
            format=self.format,
            independent=self.independent,
            drain_inflight=self.drain_inflight,
        )
        return None if wish == SavepointWish() else wish


def build_savepoint_job(mount: Mount, job: JobSpec) -> UpkeepJob:
    """Build the job with its asset and schedule."""
    name = job.name

    @asset_of(savepoints_spec(mount, job), mount.resource)
    def savepoints(context: dg.AssetExecutionContext, config: SavepointConfig) -> Iterator[dg.MaterializeResult[None]]:
        yield from savepoint_stream(context, mount, name, config)

    made, schedules = upkeep_job(
        mount,
        job,
        "savepoint",
        dg.AssetSelection.assets(savepoints).without_checks(),
        f"Make a savepoint of {name}, running or not; with name, format, tags, stop and drain as its command.",
        {**upkeep_tags("savepoint", job.savepoints.timeout_s), SAVEPOINT_TAG: mount.tag(name)},
        [("", job.savepoints.schedule, "night", {})],
    )
    return UpkeepJob(job=made, assets=(savepoints,), schedules=schedules)


def savepoint_stream(
    context: dg.AssetExecutionContext, mount: Mount, name: str, config: SavepointConfig
) -> Iterator[dg.MaterializeResult[None]]:
    """Make a savepoint of a stream; skip a scheduled one if the stream has nothing new."""
    stillstate = stillstate_of(context, mount)
    with typed_failures():
        spec = stillstate.spec()
        now = spec.job(name)
        catalog = stillstate.catalog(now)
        clock, poll = stillstate.clock(), stillstate.poll()
        maker = savepointer_watching(catalog, lambda: stillstate.observe(spec, now), clock=clock, poll=poll)
        wish = config.wish()
        tags = tuple(now.savepoints.tags)
        made = (
            periodic_savepoint(catalog, maker, tags, clock=clock, poll=poll, say=context.log.warning)
            if wish is None
            else requested_savepoint(maker, wish, clock=clock, poll=poll, say=context.log.warning)
        )
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
            **savepoints_metadata(records, catalog.root.url, links, inflight_rows),
        },
        data_version=dg.DataVersion(made.name),
    )
