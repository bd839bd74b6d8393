"""What becomes of output that was published behind the snapshot that the job has gone back to, sink by sink."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.driver.context import DriverContext
from state_runtime.maintenance.output.withdraw import withdraw_output

__all__ = ["refuse_left_output", "withdraw_left_output"]

_LOG = logging.getLogger(__name__)


def refuse_left_output(context: DriverContext, left: Sequence[tuple[int, int]]) -> None:
    """Refuse to start, if the newest output of a sink that wants it so is of an epoch that the job went back behind.

    Args:
        left: closed ranges of epochs, ascending.

    Raises:
        InvalidConfiguration: nothing was published or removed.
    """
    for name, sink in context.pipeline.sinks.items():
        if not left or sink.on_rollback != "refuse":
            continue
        newest = sink.newest_published_epoch(context.sinks[name])
        for first, last in left:
            if first <= newest <= last:
                ways = ' or on_rollback="replace"' if sink.can_withdraw else ""
                raise InvalidConfiguration(
                    f"sink {name!r} has output up to epoch {newest}, and job {context.job_name!r} went back behind "
                    f'epoch {first}: its rows would come again. The sink says on_rollback="refuse". Go forward again '
                    f"(stillstate rollback {context.job_name} @ID, a snapshot from before the rollback), take its "
                    f'output out yourself, and start with on_rollback="continue"{ways}'
                )


def withdraw_left_output(context: DriverContext, left: Sequence[tuple[int, int]], actor: Actor) -> None:
    """Take the output of left epochs out of the places of sinks that want it so; idempotent.

    The newest snapshot says already that they do: no start ever counts on that output again. A sink that has published
    a newer epoch has taken it out before, or was told to continue then.

    Raises:
        InvalidPipeline: a sink cannot tell it from other output. StoreUnavailable: start again.
    """
    for name, sink in context.pipeline.sinks.items():
        spec = context.sinks[name]
        if left and sink.on_rollback == "replace" and sink.newest_published_epoch(spec) <= left[-1][1]:
            taken = withdraw_output(sink, spec, left, actor)
            if taken:
                _LOG.warning(
                    "sink %r of job %r: the job went back, and output of epochs %s was taken out of %r (%d files or "
                    "commits)",
                    name,
                    context.job_name,
                    ", ".join(f"{first} to {last}" for first, last in left),
                    sink,
                    taken,
                )
