"""`stillstate snapshots`, `describe` and `query`: list snapshots, and show their content."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot, StillstateError
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    OptionalJob,
    catalog_of,
    console,
    guarded,
    job_or_only,
    print_json,
    print_table,
)
from stillstate.orchestration.config.spec import load_spec

if TYPE_CHECKING:
    from state_runtime.maintenance.links import Shared
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.snapshot.manifest import Manifest
    from stillstate.orchestration.show import views

__all__ = ["register"]


@guarded
def snapshots(
    job: OptionalJob = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the snapshots and savepoints of a job, newest first.

    These are the points that it can go back to; savepoints are listed once they are complete.

    `rollback` and `--from-snapshot` take the name in the first column. `stillstate savepoints` also lists savepoints
    that are being made or that failed.
    """
    from stillstate.orchestration.show import views

    job_spec = job_or_only(load_spec(config), job)
    catalog = catalog_of(job_spec)
    catalog.job_info()
    rows = []
    for snapshot_id in reversed(catalog.snapshot_ids()[-limit:]):
        try:
            rows.append(views.SnapshotRow.of(catalog.manifest(snapshot_id)))
        except MissingSnapshot:
            continue  # a folder whose manifest is not written yet, or whose writer died: not a snapshot
        except StillstateError as error:
            rows.append(views.SnapshotRow.broken(snapshot_id, error))
    rows += _complete_savepoints(catalog)
    rows = sorted(rows, key=lambda row: (row.snapshot_id, row.savepoint), reverse=True)[:limit]
    if as_json:
        print_json([row.to_json_dict() for row in rows])
    else:
        print_table(views.snapshots_table(job_spec.name, rows))


def _complete_savepoints(catalog: Catalog) -> list[views.SnapshotRow]:
    from state_runtime.snapshot.locate import open_snapshot
    from state_runtime.snapshot.paths import savepoint_path
    from state_runtime.snapshot.savepoint_record import complete_savepoints
    from stillstate.orchestration.show import views

    rows = []
    for found in complete_savepoints(catalog.root):
        try:
            opened = open_snapshot(catalog.root.child(savepoint_path(found.name)), found.snapshot_id)
        except StillstateError as error:
            rows.append(views.SnapshotRow.broken(found.snapshot_id, error, savepoint=found.name))
        else:
            rows.append(views.SnapshotRow.of(opened.manifest, savepoint=found.name))
    return rows


@guarded
def describe(
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A snapshot id, or `latest`.")],
    job: Annotated[
        str | None,
        typer.Option("--job", "-j", help="The job; may be left out if there is only one.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a snapshot holds: states, tables, position.

    Also its operators, changelog and progress.
    """
    from stillstate.orchestration.show import views

    job_spec = job_or_only(load_spec(config), job)
    catalog = catalog_of(job_spec)
    catalog.job_info()
    snapshot_id = _snapshot_id(snapshot)
    manifest = catalog.latest() if snapshot_id is None else catalog.manifest(snapshot_id)
    if manifest is None:
        raise MissingSnapshot(f"job {job_spec.name!r} has no snapshot yet; the first epoch makes one")
    shared = _shared_by(catalog, manifest)
    if as_json:
        print_json({**views.manifest_json(manifest), "shared_by_link": dataclasses.asdict(shared)})
    else:
        out = console()
        for part in views.manifest_parts(job_spec.name, manifest, shared):
            out.print(part)


def _shared_by(catalog: Catalog, manifest: Manifest) -> Shared:
    """Return which files of a snapshot are hard links of others, from its manifest alone: no index is read."""
    from state_runtime.maintenance.links import find_links

    named = {segment.path for segment in manifest.segments}
    for layer in manifest.layers:
        named |= {table.path for table in layer.tables} | {log.path for log in layer.source_logs}
    if manifest.shards is not None:
        named.add(manifest.shards.path)
    return find_links(catalog.root).of_paths(named)


@guarded
def query(
    job: JobArgument,
    state: Annotated[str, typer.Argument(metavar="STATE", help="Name of the state, as `describe` lists it.")],
    operator: Annotated[
        str | None,
        typer.Option(
            "--operator",
            "-o",
            metavar="UID",
            help="The state's operator; may be left out if only one has a state of that name.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            "-k",
            metavar="COLUMN=VALUE",
            help="Read one key only; once per key column. Without `=VALUE` it is null.",
            show_default=False,
        ),
    ] = None,
    entry: Annotated[
        list[str] | None,
        typer.Option(
            "--entry",
            "-e",
            metavar="COLUMN=VALUE",
            help="Of a map, read only the entry with this map key; once per column of the map key.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            "-w",
            metavar="COLUMN=VALUE",
            help="Only rows with this value, in any column; reads the whole state.",
            show_default=False,
        ),
    ] = None,
    snapshot: Annotated[
        str, typer.Option("--snapshot", "-s", metavar="ID", help="A snapshot id, or `latest`.")
    ] = "latest",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000_000, help="Rows at most.")] = 20,
    columns: Annotated[
        str | None,
        typer.Option("--columns", metavar="A,B", help="Which columns to show, in this order.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header instead of a table.")] = False,
) -> None:
    """Query a state as of any snapshot: one key, or first rows.

    The job may run meanwhile.

    Binary values are hexadecimal, dates 2013-01-31, times 2013-01-31 12:00:00 in UTC, structs JSON. A missing key is no
    error: the result is empty, with exit code 0. Lists show the position of each element, maps show their keys, and
    `$timers` shows when a timer is due. Values that had expired at the snapshot's batch time are left out.
    """
    from state_runtime.reading.query import open_state
    from state_runtime.store import open_store
    from stillstate.orchestration.config.job_location import location_of
    from stillstate.orchestration.show import views

    if as_json and as_csv:
        raise InvalidConfiguration("--json and --csv are two forms of the same output; give one of them")
    spec = location_of(load_spec(config).job(job))
    store = open_store(spec.store, spec.storage_options)
    view = open_state(store, spec.name, state, operator=operator, snapshot=_snapshot_id(snapshot))
    rows = view.read(
        key=view.parse_key(key) if key else None,
        entry=view.parse_entry(entry) if entry else None,
        where=view.parse_where(where) if where else None,
        columns=columns.split(",") if columns is not None else None,
        limit=limit + 1,  # one more row shows whether there are more
    )
    found = views.StateRows.of(spec.name, view.manifest.snapshot_id, view.operator.uid, state, rows, limit)
    if as_json:
        print_json(found.to_json_dict())
    elif as_csv:
        print(views.state_csv(found), end="")
        if found.more:
            print(f"only the first {limit} rows; --limit gives more", file=sys.stderr)
    elif found.rows:
        print_table(views.state_table(found))
    else:
        print(f"{found.title}: no row{' of this key' if key else ''}{' with these values' if where else ''}")


def _snapshot_id(text: str) -> int | None:
    """Return the id behind a SNAPSHOT argument; None is the newest."""
    if text == "latest":
        return None
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    raise MissingSnapshot(f"{text[:40]!r} is not a snapshot; give a number as `snapshots` lists it, or `latest`")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate snapshots flights --limit 5")(snapshots)
    app.command(epilog="Example: stillstate describe latest --job flights")(describe)
    app.command(epilog="Example: stillstate query flights seen --operator legs --key tailnum=N14228")(query)
