"""The output of the job that is visible already when a run starts, by the commit logs of its sinks."""

from __future__ import annotations

import logging

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.driver.context import DriverContext
from state_runtime.snapshot.manifest import Manifest

__all__ = ["newest_published"]

_LOG = logging.getLogger(__name__)


def newest_published(context: DriverContext, last: Manifest) -> int:
    """Return the highest epoch that a sink of the job has published.

    Output is published after its manifest, so it is above the newest snapshot's epoch only if newer snapshots are lost:
    the job's root was restored from an older backup. The job continues with epochs above all published ones, and logs
    the consequences for readers of the output. No output is withdrawn: readers may have read it. A sink that takes
    output out when the job goes back may have taken out what this backup counts on, so the start is refused.

    Raises:
        InvalidConfiguration: such a sink has output that the newest snapshot does not know of.
        StoreUnavailable: a sink's place does not answer; start the job again.
    """
    newest = max(last.epoch, last.snapshot_id)
    found = 0
    for name, sink in context.pipeline.sinks.items():
        published = sink.newest_published_epoch(context.sinks[name])
        found = max(found, published)
        if published > newest and sink.on_rollback == "replace":
            raise InvalidConfiguration(
                f"sink {name!r} of job {context.job_name!r} holds output up to epoch {published}, but the newest "
                f"snapshot in {context.root.url} ends with epoch {newest}: an older backup was put in place. If the "
                "job went back since that backup was made, output that it counts on was taken out of the sink's place. "
                'Compare the two, and start once with on_rollback="continue": output of the epochs above stays, and '
                "the rows of their input come once more"
            )
        if published > newest:
            _LOG.warning(
                "sink %r of job %r holds output up to epoch %d, but the newest snapshot in %s ends with epoch %d: the "
                "snapshots after it are lost, probably because an older backup was put in place. The output of epochs "
                "%d to %d stays, and the rows of their input are processed and published once more, as epochs above "
                "it. To have each row once, remove the files that the sink's commit log names for those epochs; see "
                "docs/operations.md",
                name,
                context.job_name,
                published,
                context.root.url,
                newest,
                newest + 1,
                published,
            )
    return found
