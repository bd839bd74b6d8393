"""`stillstate savepoint` and `stillstate savepoints`."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.snapshot.savepoint_record import SavepointFormat, SavepointTrigger
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    OptionalJob,
    catalog_of,
    guarded,
    job_or_only,
    print_json,
    print_table,
)
from stillstate.orchestration.config.spec import load_spec

if TYPE_CHECKING:
    from state_runtime.snapshot.control import ControlRequest
    from state_runtime.snapshot.savepoint_record import SavepointRecord, SavepointThen

__all__ = ["register"]


@guarded
def savepoint(
    job: JobArgument,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Its name: a-z, 0-9, _ and -. By default the time.", show_default=False),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", "-t", help="A tag, for rules of retention; any number of them.", show_default=False),
    ] = None,
    note: Annotated[str, typer.Option("--note", help="Why it is made.", show_default=False)] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Then stop the job: no epoch follows the savepoint.")] = False,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="End the job's input first: all windows and event-time timers fire. Then stop it."
        ),
    ] = False,
    drain_inflight: Annotated[
        bool,
        typer.Option(
            "--drain-inflight",
            help="Let the job process the rows that are in flight first, so that the savepoint has none: for code that "
            "reads other columns, and for other tools. Implied by --format canonical.",
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with savepoint NAME, whose process died or that failed.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is complete, or only ask the running job.")
    ] = True,
    format: Annotated[
        SavepointFormat,
        typer.Option(
            "--format",
            help=(
                "native: as the job writes it, copied inside the store. canonical: a sorted Parquet set, written "
                "by the process that makes the savepoint."
            ),
        ),
    ] = "native",
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Copy the bytes where a copy would be a hard link (local stores): then damage to one is not "
            "damage to the other.",
        ),
    ] = False,
    trigger: Annotated[SavepointTrigger, typer.Option("--trigger", help="The reason, for the record.")] = "user",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a savepoint: a named, complete copy of the state.

    It is kept until it is deleted.

    The running job makes it after its epoch and continues meanwhile; if the job does not run, this process copies the
    newest snapshot. The copy is made inside the store, in the format that the job writes. With --format canonical it is
    written again: by the driver if it is small (256 MB), else by this process once the snapshot is made. `rollback` and
    `--from-snapshot` go back to it by its name; another job starts from it with `run --from`.
    """
    from stillstate.orchestration.running.make_savepoint import savepointer_of
    from stillstate.orchestration.show.savepoints import savepoint_view

    if stop and drain:
        raise InvalidConfiguration("--drain stops the job too; give one of --stop and --drain")
    chosen = format != "native" or independent
    if resume and (name is None or stop or drain or drain_inflight or not wait or tag or note or chosen):
        raise InvalidConfiguration("--resume takes the NAME of a savepoint, and nothing else")
    then: SavepointThen = "drain" if drain else "stop" if stop else "continue"
    spec = load_spec(config)
    with closing(savepoint_view(job, as_json=as_json)) as view:
        maker = savepointer_of(spec, spec.job(job), view.show)
        made = (
            maker.resume(name)
            if resume and name is not None
            else maker.make(
                name,
                then=then,
                trigger=trigger,
                tags=tuple(tag or ()),
                note=note,
                format=format,
                independent=independent,
                drain_inflight=drain_inflight,
                wait=wait,
            )
        )
    _say(job, made, as_json=as_json)


def _say(job: str, made: SavepointRecord | ControlRequest, *, as_json: bool) -> None:
    """Show the result of a savepoint request."""
    from state_runtime.snapshot.control import ControlRequest
    from stillstate.orchestration.running.make_savepoint import failed
    from stillstate.orchestration.text import bytes_text

    if isinstance(made, ControlRequest):
        if as_json:
            print_json({"job": job, "name": made.name, "state": "REQUESTED", "request_id": made.request_id})
        else:
            print(f"{job}: savepoint {made.name} is asked for; `stillstate savepoints {job}` shows what becomes of it")
        return
    error = failed(made)
    if error is not None:
        raise error
    if as_json:
        print_json(dataclasses.asdict(made))
    else:
        print(
            f"{job}: savepoint {made.name} of snapshot {made.snapshot_id}{', drained' if made.drained else ''}: "
            f"{made.total_objects} objects, {bytes_text(made.total_bytes)}"
        )


@guarded
def savepoints(job: OptionalJob = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List a job's savepoints, also requested ones."""
    from stillstate.orchestration.running.make_savepoint import savepoint_rows
    from stillstate.orchestration.show.savepoints import savepoints_table

    job_spec = job_or_only(load_spec(config), job)
    rows = savepoint_rows(catalog_of(job_spec))
    if as_json:
        print_json([row.to_json_dict() for row in rows])
    else:
        print_table(savepoints_table(job_spec.name, rows))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate savepoint flights before-upgrade --tag release --note 'version 2' --stop")(
        savepoint
    )
    app.command(epilog="Example: stillstate savepoints flights --json")(savepoints)
