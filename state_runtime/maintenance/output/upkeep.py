"""Upkeep of all places that a job's sinks write to: each kind of sink in its own way.

ParquetSink     files of closed epochs become few (maintenance/output/compact.py)
DeltaSink       optimize and vacuum, by deltalake
IcebergSink     snapshots expire, and files that no other snapshot needs go
others          nothing: a database, a broker or a function of a user keeps its own house
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from state_runtime.base.actor import Actor
from state_runtime.maintenance.output.compact import compact, plan_folder
from state_runtime.pipeline.output_upkeep import OutputUpkeep, OutputWork
from state_runtime.pipeline.sinks import ParquetSink, Sink
from state_runtime.pipeline.staging import SinkSpec

__all__ = ["OutputPlace", "keep_output"]


@dataclass(frozen=True)
class OutputPlace:
    """A sink of a job, with what it is in that job."""

    name: str
    sink: Sink
    spec: SinkSpec

    @property
    def writer(self) -> str:
        """The identity under which it publishes."""
        return self.spec.staging_prefix.rpartition("/")[2]


def keep_output(
    place: OutputPlace,
    how: OutputUpkeep,
    actor: Actor,
    *,
    dry_run: bool = False,
    all_writers: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> OutputWork | None:
    """Keep a sink's place in order; each row stays there once, beside a running job and after a crash anywhere. None if
    there is nothing to do for such a sink.

    Args:
        dry_run: only say what would be done.
        all_writers: Parquet: also files of other jobs in the folder, and of earlier roots of this one.
        on_progress: gets the bytes that are done, and of all; Parquet only.

    Raises:
        CorruptData: a file cannot be read; nothing of it was removed. StoreUnavailable, OutcomeUnknown: start again.
    """
    if not isinstance(place.sink, ParquetSink):
        return place.sink.upkeep(how, now_ms=actor.clock.now_ms(), dry_run=dry_run)
    # Here, and not in the sink: a compaction is of a folder, with the files of any jobs.
    store, writers = place.spec.store(), None if all_writers else [place.writer]
    if dry_run:
        plan = plan_folder(store, actor, writers=writers, target_bytes=how.target_bytes, min_age_s=how.min_age_s)
        return OutputWork(
            place=store.url,
            files=plan.files,
            bytes=plan.bytes,
            inputs=plan.inputs,
            input_bytes=plan.input_bytes,
            outputs=len(plan.groups),
        )
    done = compact(
        store,
        actor,
        writers=writers,
        target_bytes=how.target_bytes,
        min_age_s=how.min_age_s,
        on_progress=on_progress,
    )
    return OutputWork(
        place=store.url,
        files=done.files,
        bytes=done.bytes,
        inputs=done.inputs,
        input_bytes=done.input_bytes,
        outputs=done.outputs,
        output_bytes=done.output_bytes,
        rows=done.rows,
    )
