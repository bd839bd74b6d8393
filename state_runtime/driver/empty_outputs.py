"""Epochs without output rows, for sinks that require a file of every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_runtime.driver.context import DriverContext
from state_runtime.snapshot.manifest import StagedOutput

__all__ = ["with_empty_outputs"]


def with_empty_outputs(outputs: Sequence[StagedOutput], context: DriverContext, term: int) -> tuple[StagedOutput, ...]:
    """Return an epoch's staged output, with a file without rows for each sink that has none and requires every epoch.

    So an empty epoch is published like any other: after its manifest, and again after a crash between the two.
    """
    return tuple(
        _staged_empty(output, context, term) if context.sinks[output.sink].empty_epochs and not output.files else output
        for output in outputs
    )


def _staged_empty(output: StagedOutput, context: DriverContext, term: int) -> StagedOutput:
    (schema,) = [stage.sink_schema for stage in context.pipeline.stages if output.sink in stage.sinks]
    spec = context.sinks[output.sink]
    return replace(output, files=spec.stage_nothing(term, output.epoch, context.ids.short(), schema).files)
