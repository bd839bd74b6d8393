"""`stillstate rollback`: a job goes back, in place, to an older snapshot, a savepoint or a copy; or begins empty."""

from __future__ import annotations

from typing import Annotated

import typer

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import VerifyLevel
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    catalog_of,
    guarded,
    print_json,
    this_process,
)
from stillstate.orchestration.commands.places import NamedPlace, named_place
from stillstate.orchestration.config.effective_settings import refuse_while_migrating
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]


@guarded
def rollback(
    job: JobArgument,
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="PLACE",
            help="What `stillstate snapshots` lists (@ID, or the name of a savepoint), or where a copy of either lies "
            "(STORE/JOB, STORE/JOB@ID, a savepoint's folder).",
            show_default=False,
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Begin empty instead: no state, and the input is read from its start.")
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the job from a driver that still runs; it is fenced and ends.")
    ] = False,
    verify: Annotated[
        VerifyLevel,
        typer.Option("--verify", help="How much of the snapshot is read and verified first; see `stillstate verify`."),
    ] = "full",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done, and read nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an older snapshot, a savepoint or a copy.

    It becomes the newest snapshot of the job again; the next run continues from it.

    Nothing is overwritten: later snapshots of the job are kept (until garbage collection), and you can go back to them
    too. Output that was published since then is also kept; output that is made again has higher epoch numbers.
    """
    from state_runtime.driver.rollback import execute_rollback, plan_rollback
    from state_runtime.maintenance.copy.objects import CopyProgress
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.progress import bytes_bar, count_bar
    from stillstate.orchestration.upkeep.rollbacks import own_place, refuse_damaged, rollback_text, rollback_values

    if (place is None) != reset:
        raise InvalidConfiguration("give a PLACE to go back to, or --reset to begin empty: one of the two")
    spec = load_spec(config).job(job)
    catalog = catalog_of(spec)
    refuse_while_migrating(job, catalog.root)
    where = NamedPlace(place or "", spec.storage_options)
    if place is not None and "/" not in place and "@" not in place[1:]:
        where = NamedPlace(own_place(catalog, place), spec.storage_options)
    elif place is not None:
        where = named_place(place, config)
    plan = plan_rollback(catalog, where.text, takeover=takeover, storage_options=where.options)
    shown = rollback_values(job, plan)
    what = rollback_text(job, plan)
    if dry_run:
        if as_json:
            print_json(shown)
        else:
            print(f"would do this: {what}")
        return
    confirm(what if yes else f"{what} Go on?", yes=yes)
    actor = this_process()
    with bytes_bar(f"{job}: check") as read:
        refuse_damaged(catalog, plan, actor, verify, read)
    with count_bar(f"{job}: copy", "objects") as show:

        def progress(now: CopyProgress) -> None:
            if show is not None:
                show(now.objects_done, now.objects)

        made = execute_rollback(catalog, plan, actor, progress=progress)
    if as_json:
        print_json({**shown, "made": made.snapshot_id})
    else:
        print(f"{what}\n{job}: snapshot {made.snapshot_id} is the newest; the next start goes on from it")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate rollback flights before-upgrade --dry-run")(rollback)
