"""`stillstate drill`: whether the job could restart from its newest snapshot."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    catalog_of,
    guarded,
    print_json,
    this_process,
)
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]


@guarded
def drill(
    job: JobArgument,
    snapshot: Annotated[
        int | None,
        typer.Option("--snapshot", "-s", metavar="ID", help="Another than the newest snapshot.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try a restore: into a scratch folder, and compare.

    The snapshot is restored on this host as a restart would do it, and compared with the store.

    The number of rows and the digest of every state of every operator are compared. The job may run meanwhile, and only
    a pin is written to its store. The folder is removed at the end; the next drill removes the folder of a killed one.
    Neither Spark nor Java is needed. The exit code is 0 if the whole state was restored, 5 if something is damaged or
    was restored differently.
    """
    from stillstate.orchestration.show.progress import count_bar
    from stillstate.orchestration.upkeep.drill import drill_job, drill_json, drill_text

    spec = load_spec(config).job(job)
    actor = this_process()
    with count_bar(f"{job}: drill", "shards") as on_progress:
        report = drill_job(spec, catalog_of(spec), actor, snapshot_id=snapshot, on_progress=on_progress)
    if as_json:
        print_json(drill_json(report))
    else:
        for problem in report.problems:
            print(problem, file=sys.stderr)
        print(drill_text(report))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate drill flights")(drill)
