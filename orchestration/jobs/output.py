"""`compact_output_<job>`: few large files in the place of many small ones, where a job's sinks write.

A run imports the job's code, to know its sinks; Spark is not started. It never touches the stream: a run that fails or
dies costs the job nothing, and the next one repairs what it has left.
"""

from collections.abc import Iterator
from typing import Any, Final

import dagster as dg

from stillstate.assets.mount import Mount
from stillstate.assets.upkeep import compacted_metadata, compacted_spec
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.jobs.driver import stillstate_of, typed_failures
from stillstate.orchestration.jobs.tags import UPKEEP_TAG
from stillstate.orchestration.jobs.upkeep import (
    LogsSteps,
    UpkeepJob,
    actor_of,
    asset_of,
    started,
    upkeep_job,
    upkeep_tags,
)

__all__ = ["ACTION", "OUTPUT_TEXT", "build_output_job", "compact_stream"]

ACTION: Final = "compact_output"
OUTPUT_TEXT: Final = "Keep what the sinks of {} write in order: fewer files, no versions that are too old."


def build_output_job(mount: Mount, job: JobSpec) -> UpkeepJob:
    """Build `compact_output_<job>` with its asset and its schedule."""
    name = job.name

    @asset_of(compacted_spec(mount, job), mount.resource)
    def compacted_output(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        yield from compact_stream(context, mount, name)

    made, schedules = upkeep_job(
        mount,
        job,
        ACTION,
        dg.AssetSelection.assets(compacted_output),
        OUTPUT_TEXT.format(name),
        {**upkeep_tags(ACTION, job.output.timeout_s), UPKEEP_TAG: mount.tag(name)},
        [("", job.output.schedule, "night", {})],
    )
    return UpkeepJob(job=made, assets=(compacted_output,), schedules=schedules)


def compact_stream(context: dg.AssetExecutionContext, mount: Mount, name: str) -> Iterator[dg.MaterializeResult[None]]:
    """Keep the output of a stream in order; do nothing for a stream that was never started."""
    # It builds the job's pipeline, and so imports pyspark: the code location loads without it.
    from stillstate.orchestration.upkeep.output import keep_outputs, output_text, places_of, upkeep_of

    stillstate = stillstate_of(context, mount)
    with typed_failures():
        file = stillstate.spec()
        now = file.job(name)
        catalog = stillstate.catalog(now)
        if not started(catalog, context.log):
            return
        places = places_of(now, file.file.parent, catalog.job_info().uid)
        steps: dict[str, Any] = {place.name: LogsSteps(context.log, place.name, "bytes") for place in places}
        done = keep_outputs(
            places,
            upkeep_of(now.output),
            actor_of(stillstate),
            on_progress=lambda sink, some, total: steps[sink](some, total),
        )
    for sink, work in done.items():
        context.log.info(output_text(sink, work))
    yield dg.MaterializeResult(asset_key=mount.compacted(name), metadata=compacted_metadata(done))
