"""`stillstate epochs`: the newest epochs of a job, task by task."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from state_runtime.base.errors import InvalidConfiguration
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JsonOption,
    OptionalJob,
    catalog_of,
    console,
    guarded,
    job_or_only,
    print_json,
)
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]


@guarded
def epochs(
    job: OptionalJob = None,
    config: ConfigOption = None,
    epoch: Annotated[
        int | None,
        typer.Option("--epoch", "-e", min=1, help="The tasks of this epoch, not of the newest.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Tasks to show, slowest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the newest epochs by shard, the slowest first.

    Of an epoch with many tasks, the slowest 32 are shown, and the 8 others with most rows in flight; the rest is summed
    up. Epochs without tasks, which only move a clock, are left out. The data is as of the driver's last heartbeat; for
    a job that does not run, as of its last run.
    """
    from state_runtime.snapshot.term_files import read_epochs
    from stillstate.orchestration.show.epochs import epochs_json, epochs_table, others_text, tasks_table

    job_spec = job_or_only(load_spec(config), job)
    catalog = catalog_of(job_spec)
    catalog.job_info()
    told = read_epochs(catalog.root)
    chosen = [e for e in told.epochs if epoch in (None, e.epoch)] if told is not None else []
    if epoch is not None and not chosen:
        known = ", ".join(str(e.epoch) for e in told.epochs) if told is not None else ""
        raise InvalidConfiguration(
            f"the tasks of epoch {epoch} of job {job_spec.name!r} are not known; "
            + (f"known are those of epochs {known}" if known else "no epoch's are yet")
        )
    if as_json:
        of_it = replace(told, epochs=tuple(chosen)) if told is not None else None
        print_json(epochs_json(job_spec.name, of_it))
        return
    if told is None or not chosen:
        print(
            f"{job_spec.name}: its epochs have no task figures yet. They come with the first heartbeat "
            "after an epoch that had tasks; runs of earlier versions do not record them"
        )
        return
    out = console()
    out.print(tasks_table(job_spec.name, chosen[0], limit))
    if left_out := others_text(chosen[0], limit):
        print(left_out)
    out.print(epochs_table(job_spec.name, told))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate epochs flights")(epochs)
