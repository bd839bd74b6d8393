"""Epochs without output rows, for sinks that require a file of every epoch, and for tables that have no row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from state_runtime.driver.context import DriverContext
from state_runtime.snapshot.manifest import StagedOutput

__all__ = ["with_empty_outputs"]


def with_empty_outputs(
    outputs: Sequence[StagedOutput], context: DriverContext, term: int, ran: Collection[str]
) -> tuple[StagedOutput, ...]:
    """Return an epoch's staged output, with a file without rows for each sink that has none and requires every epoch.

    So an empty epoch is published like any other: after its manifest, and again after a crash between the two. A sink
    of a table (complete mode) requires the epochs that computed the table, and no other: an empty one would replace it.

    Args:
        ran: uids of the operators of which a shard was visited.
    """

    def is_required(sink: str) -> bool:
        tables = context.pipeline.tables.get(sink)
        return context.sinks[sink].empty_epochs if tables is None else not tables.isdisjoint(ran)

    return tuple(
        _staged_empty(output, context, term) if not output.files and is_required(output.sink) else output
        for output in outputs
    )


def _staged_empty(output: StagedOutput, context: DriverContext, term: int) -> StagedOutput:
    (schema,) = [stage.sink_schema for stage in context.pipeline.stages if output.sink in stage.sinks]
    spec = context.sinks[output.sink]
    return replace(output, files=spec.stage_nothing(term, output.epoch, context.ids.short(), schema).files)
