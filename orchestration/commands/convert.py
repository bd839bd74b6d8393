"""`stillstate convert`: a snapshot in another format, in a separate folder."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer

from state_runtime.snapshot.manifest import SnapshotFormat
from stillstate.orchestration.commands.base import ConfigOption, JsonOption, guarded, print_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_runtime.maintenance.convert.snapshot import ConversionResult

__all__ = ["register"]


_LOCAL_MASTER: Final = "local[*]"

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLACE",
        help="<store>/<job>, <store>/<job>@<id>, a savepoint's folder, or a job of stillstate.yaml.",
    ),
]
TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="An empty folder; it becomes a new job root.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: stillstate convert /data/state/flights@120 /data/archive/flights-120 --to canonical")(
        convert
    )


@guarded
def convert(
    place: PlaceArgument,
    target: TargetArgument,
    to: Annotated[
        SnapshotFormat,
        typer.Option(
            "--to",
            help="changelog: tables and log; incremental: no log; canonical: one sorted Parquet set, nothing but live "
            "rows.",
        ),
    ],
    config: ConfigOption = None,
    here: Annotated[bool, typer.Option("--here", help="Never start Spark, however large the snapshot is.")] = False,
    master: Annotated[
        str, typer.Option("--master", metavar="URL", help="Spark master for large snapshots (over 256 MB).")
    ] = _LOCAL_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Convert a snapshot to another format, outside its job.

    With a progress bar. The source is only read.

    Before the target is published, it is compared with the source: number and digest of the rows of every state. After
    an error or a kill, run the command again; it continues. A job that is started from the target continues from the
    source's position.
    """
    from state_runtime.maintenance.convert.spark_job import convert_place
    from stillstate.orchestration.commands.places import named_place
    from stillstate.orchestration.show.progress import phase_bar

    source, into = named_place(place, config), named_place(target, config)
    with phase_bar(f"convert to {to}") as bar, ExitStack() as ended:

        def session() -> SparkSession:
            from state_runtime.spark.session import build_session

            spark = build_session("stillstate-convert", master)
            ended.callback(spark.stop)
            return spark

        result = convert_place(
            source.text,
            into.text,
            to,
            storage_options=source.options,
            target_options=into.options,
            session=None if here else session,
            on_progress=bar.show,
            holder=f"stillstate convert on {socket.gethostname()}",
        )
    if as_json:
        print_json(_summary(result, into.text))
    else:
        print(_text(result, into.text))


def _summary(result: ConversionResult, target: str) -> dict[str, str | int | float | bool]:
    return {
        "target": target,
        "snapshot_id": result.manifest.snapshot_id,
        "format": result.manifest.snapshot_format,
        "repeated": result.repeated,
        "rewritten": result.rewritten,
        "source_pinned": result.pinned,
        "tables_written": result.tables_written,
        "bytes_written": result.bytes_written,
        "objects_copied": result.objects_copied,
        "bytes_copied": result.bytes_copied,
        "states_compared": result.states,
        "seconds": round(result.seconds, 3),
    }


def _text(result: ConversionResult, target: str) -> str:
    from stillstate.orchestration.text import bytes_text, duration_text

    snapshot = f"snapshot {result.manifest.snapshot_id} ({result.manifest.snapshot_format}) in {target}"
    if result.repeated:
        return f"{snapshot} was converted before; nothing was done"
    return (
        f"{snapshot} in {duration_text(result.seconds)}: {result.tables_written} files with "
        f"{bytes_text(result.bytes_written)} written, {result.objects_copied} with {bytes_text(result.bytes_copied)} "
        f"copied; {result.states} states compared equal"
    )
