"""`stillstate export`: a state of any snapshot as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stillstate.orchestration.commands.base import ConfigOption, JsonOption, guarded, print_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate export /data/state/flights@120 legs seen --to seen.parquet")(export)


@guarded
def export(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE",
            help="<store>/<job>, <store>/<job>@<id>, a savepoint's folder, or a job of stillstate.yaml.",
        ),
    ],
    operator: Annotated[str, typer.Argument(metavar="OPERATOR", help="Uid of the operator.")],
    state: Annotated[str, typer.Argument(metavar="STATE", help="Name of the state, as `describe` lists it.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="What to write: a .parquet, .arrow or .csv file.")],
    columns: Annotated[
        str | None,
        typer.Option("--columns", metavar="A,B", help="Which columns, in this order.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write all live rows of a state into a file.

    With a progress bar. The job may run meanwhile; the snapshot is only
    read.

    The file is complete or absent, also after a crash. Memory does not grow with the state.
    """
    from state_runtime import reading
    from state_runtime.reading.export import export_state
    from stillstate.orchestration.commands.places import named_place
    from stillstate.orchestration.show.progress import phase_bar
    from stillstate.orchestration.text import bytes_text, count_text

    where = named_place(place, config)
    snapshot = reading.open(where.text, where.options)
    wanted = snapshot.state(operator, state)
    with phase_bar(f"export {operator}/{state}") as bar:
        done = export_state(
            wanted,
            to,
            columns=columns.split(",") if columns is not None else None,
            overwrite=overwrite,
            on_progress=lambda share: bar.show("percent read", int(share * 100), 100),
        )
    if as_json:
        body = {"snapshot_id": snapshot.manifest.snapshot_id, "operator": operator, "state": state}
        print_json({**body, "file": str(to), "rows": done.rows, "bytes": done.bytes})
    else:
        print(
            f"{operator}/{state} of snapshot {snapshot.manifest.snapshot_id}: {count_text(done.rows)} rows, "
            f"{bytes_text(done.bytes)} in {to}"
        )
