"""Upkeep of what a job's sinks write, for the command line and for Dagster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from state_runtime.base.actor import Actor
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.maintenance.output.upkeep import OutputPlace, keep_output
from state_runtime.pipeline.graph import SinkNode
from state_runtime.pipeline.output_upkeep import OutputUpkeep, OutputWork
from stillstate.orchestration.config.spec import JobSpec
from stillstate.orchestration.config.upkeep import OutputSpec
from stillstate.orchestration.running.run import build_job
from stillstate.orchestration.text import bytes_text, counted_text

__all__ = ["OutputNumbers", "keep_outputs", "output_json", "output_text", "places_of", "plan_outputs", "upkeep_of"]

OutputNumbers = dict[str, OutputWork | None]
"""By sink; None where there is nothing to keep in order."""


def upkeep_of(output: OutputSpec) -> OutputUpkeep:
    """Return what a job's section `output` says."""
    return OutputUpkeep(
        target_bytes=output.target_mib * 1024 * 1024, min_age_s=output.min_age_s, history_s=output.history_s
    )


def places_of(job: JobSpec, folder: Path, job_uid: str, only: Sequence[str] = ()) -> list[OutputPlace]:
    """Return a job's sinks. Its code is imported and its pipeline built, as a start would do it; Spark is not started.

    Args:
        folder: of the configuration file.
        job_uid: of the job's root.
        only: names of sinks; none is all.

    Raises:
        InvalidConfiguration: there is no such sink. And the errors of `build_job`.
    """
    plan = build_job(job, folder).plan()
    root = (plan.root_url, plan.storage_options)
    sinks = {node.name: node.sink for node in plan.graph.nodes if isinstance(node, SinkNode)}
    unknown = sorted(set(only) - sinks.keys())
    if unknown:
        raise InvalidConfiguration(f"job {job.name!r} has no sink {unknown[0]!r}; it has {', '.join(sorted(sinks))}")
    return [
        OutputPlace(name, sink, sink.spec(job.name, job_uid, name, root))
        for name, sink in sinks.items()
        if not only or name in only
    ]


def plan_outputs(
    places: Sequence[OutputPlace], how: OutputUpkeep, actor: Actor, *, all_writers: bool = False
) -> OutputNumbers:
    """Return what `keep_outputs` would do; nothing is changed."""
    return {place.name: keep_output(place, how, actor, dry_run=True, all_writers=all_writers) for place in places}


def keep_outputs(
    places: Sequence[OutputPlace],
    how: OutputUpkeep,
    actor: Actor,
    *,
    all_writers: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> OutputNumbers:
    """Keep the places of all sinks in order, one after the other; see `keep_output`.

    Args:
        on_progress: gets a sink's name, the bytes that are done, and of all.
    """
    found: OutputNumbers = {}
    for place in places:
        found[place.name] = keep_output(
            place,
            how,
            actor,
            all_writers=all_writers,
            on_progress=None if on_progress is None else _named(place.name, on_progress),
        )
    return found


def _named(name: str, on_progress: Callable[[str, int, int], None]) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(name, done, total)


def output_json(work: OutputWork | None) -> dict[str, Any] | None:
    """Return the numbers of a sink for `--json`."""
    if work is None:
        return None
    return {
        "place": work.place,
        "files_before": work.files,
        "files_after": work.files_after,
        "bytes_before": work.bytes,
        "rewritten_files": work.inputs,
        "rewritten_bytes": work.input_bytes,
        "new_files": work.outputs,
        "new_bytes": work.output_bytes,
        "deleted_files": work.removed,
        "expired_versions": work.expired,
    }


def output_text(name: str, work: OutputWork | None, *, planned: bool = False) -> str:
    """Return the numbers of a sink in one line."""
    if work is None:
        return f"{name}: nothing to keep in order here"
    would = "would be " if planned else ""
    parts = []
    if work.inputs:
        size = "" if planned else f" of {bytes_text(work.output_bytes)}"
        parts.append(
            f"{counted_text(work.inputs, 'file')} of {bytes_text(work.input_bytes)} {would}written anew as "
            f"{work.outputs:,}{size}"
        )
    if work.expired:
        parts.append(f"{counted_text(work.expired, 'old version')} {would}expired")
    if work.removed:
        parts.append(f"{counted_text(work.removed, 'file')} that nothing needs {would}deleted")
    done = "; ".join(parts) or "nothing to do"
    return (
        f"{name}: {counted_text(work.files, 'file')} → {work.files_after:,} ({bytes_text(work.bytes)}) in "
        f"{work.place}: {done}"
    )
