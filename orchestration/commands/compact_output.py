"""`stillstate compact-output`: few large files in the place of many small ones, where a job's sinks write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from state_runtime.base.durations import parse_duration_s
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    catalog_of,
    guarded,
    print_json,
    this_process,
)
from stillstate.orchestration.config.spec import JobSpec, load_spec

if TYPE_CHECKING:
    from state_runtime.base.actor import Actor
    from state_runtime.maintenance.output.upkeep import OutputPlace
    from state_runtime.pipeline.output_upkeep import OutputUpkeep
    from stillstate.orchestration.upkeep.output import OutputNumbers

__all__ = ["register"]


@guarded
def compact_output(
    job: JobArgument,
    sink: Annotated[
        list[str] | None, typer.Option("--sink", metavar="NAME", help="Only this sink.", show_default=False)
    ] = None,
    target_mib: Annotated[
        int | None,
        typer.Option(
            "--target-mib",
            min=1,
            max=4096,
            help="Size of a new file. By default `output.target_mib`: 128.",
            show_default=False,
        ),
    ] = None,
    min_age: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Parquet: leave epochs alone that are younger. By default `output.min_age_s`: 1h.",
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Iceberg: let snapshots expire that are older. By default `output.history_s`: 5d.",
            show_default=False,
        ),
    ] = None,
    all_writers: Annotated[
        bool,
        typer.Option(
            "--all-writers", help="Parquet: also files of other jobs in the folder, and of earlier roots of this one."
        ),
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only show what would be done.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the output of a job anew as few large files.

    Of its Parquet folders, Delta and Iceberg tables; the job may run meanwhile, and nobody has to be told.

    Parquet: files of closed epochs become one, up to the target; each row stays there once. While the old files of a
    group are removed, whoever lists the folder sees their rows twice; whoever has listed it before finds them gone, and
    reads again. Delta: optimize, and vacuum by the table's own retention. Iceberg: old snapshots expire, with the files
    that only they have. Sinks of other kinds keep their own house.

    A crash anywhere is repaired by the next call, and by the next start of the job. The job's code is imported; Spark
    is not started.
    """
    from stillstate.orchestration.upkeep.output import output_json, output_text, places_of

    file = load_spec(config)
    spec = file.job(job)
    places = places_of(spec, file.file.parent, catalog_of(spec).job_info().uid, sink or ())
    how = _upkeep(spec, target_mib, min_age, history)
    done = _kept(job, places, how, this_process(), all_writers=all_writers, planned=plan)
    if as_json:
        print_json({"job": job, "plan": plan, "sinks": {name: output_json(work) for name, work in done.items()}})
    else:
        for name, work in done.items():
            print(output_text(name, work, planned=plan))


def _upkeep(spec: JobSpec, target_mib: int | None, min_age: str | None, history: str | None) -> OutputUpkeep:
    """Return what the job's section says, with what the command line says over it."""
    from dataclasses import replace

    from stillstate.orchestration.upkeep.output import upkeep_of

    how = upkeep_of(spec.output)
    if target_mib is not None:
        how = replace(how, target_bytes=target_mib * 1024 * 1024)
    if min_age is not None:
        how = replace(how, min_age_s=parse_duration_s(min_age))
    return how if history is None else replace(how, history_s=parse_duration_s(history))


def _kept(
    job: str, places: list[OutputPlace], how: OutputUpkeep, actor: Actor, *, all_writers: bool, planned: bool
) -> OutputNumbers:
    from stillstate.orchestration.show.progress import bytes_bar
    from stillstate.orchestration.upkeep.output import keep_outputs, plan_outputs

    if planned:
        return plan_outputs(places, how, actor, all_writers=all_writers)
    bars: dict[str, Callable[[int, int], None] | None] = {}
    with ExitStack() as stack:

        def show(name: str, done: int, total: int) -> None:
            if name not in bars:
                stack.close()
                bars[name] = stack.enter_context(bytes_bar(f"{job}: {name}"))
            bar = bars[name]
            if bar is not None:
                bar(done, total)

        return keep_outputs(places, how, actor, all_writers=all_writers, on_progress=show)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compact-output", epilog="Example: stillstate compact-output flights --plan")(compact_output)
