"""`stillstate source set`: a new start position for a source of a stopped job, with its state kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    catalog_of,
    guarded,
    print_json,
    print_table,
    this_process,
)
from stillstate.orchestration.config.effective_settings import refuse_while_migrating
from stillstate.orchestration.config.spec import load_spec

if TYPE_CHECKING:
    from state_runtime.sources.kafka_offsets import Positions
    from state_runtime.sources.kafka_seek import Seek

__all__ = ["register"]

source_app = typer.Typer(
    no_args_is_help=True,
    help="Set where a source goes on: look, then do.",
    epilog="Example: stillstate source set shops orders --to 2026-11-28T12:00:00Z --dry-run",
    rich_markup_mode=None,
)


@source_app.callback()
def group() -> None:
    """Keep `set` a command of its own: Typer would make the group of one command that command."""


@source_app.command("set", epilog="Example: stillstate source set shops orders --to earliest --dry-run")
@guarded
def set_source(
    job: JobArgument,
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Its name, read(…, name=), or its topics, separated by commas."),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="earliest, latest, a time (2026-11-28T12:00:00Z: each partition's first record from then on), or the "
            'next offsets as JSON, {"orders": {"0": 17}}; partitions that it does not name stay where they are.',
            show_default=False,
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a source of topics go on elsewhere.

    The job keeps its state, and must not run. Kafka is asked what it has; shown is, by partition, from where the job
    would go on, how many records are skipped and how many are read again. What is read again counts again.

    A snapshot with the new position becomes the newest. Those before it have the old one: `stillstate rollback` takes
    the move back.
    """
    from state_runtime.driver.set_source import execute_set_source, plan_set_source
    from state_runtime.sources.kafka_seek import parse_to
    from stillstate.orchestration.running.kafka_sources import kafka_source
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.seeks import seek_table, seek_text, seek_values

    where = parse_to(to)
    spec = load_spec(config)
    found = spec.job(job)
    catalog = catalog_of(found)
    refuse_while_migrating(job, catalog.root)

    def find(old: Positions) -> Seek:
        return kafka_source(found, spec.file.parent, old).seek(old, where)

    plan = plan_set_source(catalog, source, find)
    shown, what = seek_values(job, plan), seek_text(job, plan)
    if not as_json:
        print_table(seek_table(plan))
    if dry_run:
        if as_json:
            print_json(shown)
        else:
            print(f"would do this: {what}")
        return
    confirm(what if yes else f"{what} Go on?", yes=yes)
    actor = this_process()
    made = execute_set_source(catalog, plan, actor)
    if as_json:
        print_json({**shown, "made": made.snapshot_id})
    else:
        print(f"{what}\n{job}: snapshot {made.snapshot_id} is the newest; the next start goes on from it")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(source_app, name="source")
