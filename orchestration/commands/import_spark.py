"""`stillstate import-spark`: a stopped native Spark query becomes a snapshot of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.usercode import step_at
from stillstate.orchestration.commands.base import ConfigOption, JsonOption, guarded, print_json

if TYPE_CHECKING:
    from state_runtime import StreamingJob

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import-spark", epilog="Example: stillstate import-spark /data/checkpoints/flights --job flights")(
        import_spark
    )


@guarded
def import_spark(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT_DIR", help="The checkpointLocation of the stopped query.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="An empty folder: <store>/<job>. May be left out with --job: then it is the job's own.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", "-j", metavar="JOB", help="The job of stillstate.yaml that has the query, or its classes."
        ),
    ] = None,
    entry_point: Annotated[
        str | None,
        typer.Option("--entry-point", metavar="MODULE:FUNCTION", help="What builds the job, instead of --job."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="With --entry-point: an option of the job; any number."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            "--operator",
            metavar="ID=UID",
            help="Which operator of the job one of the query becomes, by Spark's operator id; only where the states' "
            "names do not tell.",
        ),
    ] = None,
    config: ConfigOption = None,
    master: Annotated[
        str, typer.Option("--master", metavar="URL", help="Spark master; with --job the job's.")
    ] = "local[*]",
    as_json: JsonOption = False,
) -> None:
    """Import the state of a stopped query of Spark's.

    State, timers, clocks and source position of the query, with a progress bar.

    The query's checkpoint is only read, by Spark's own state reader. The job must read the same source, and have the
    same query (`job.query`), or of a `transformWithState` the same processors with the same keys, time and output
    modes. Run it on the same input: it continues from the query's position.
    """
    from state_runtime.importing.native import import_checkpoint
    from state_runtime.spark.session import build_session
    from stillstate.orchestration.show.progress import phase_bar
    from stillstate.orchestration.text import bytes_text, count_text, duration_text

    given, chosen = _given(job, entry_point, target, option, config), _operators(operator)
    spark = build_session(f"{given.name}-import", given.master or master, given.conf)
    try:
        with phase_bar(f"import {given.name}") as bar:
            result = import_checkpoint(
                spark,
                checkpoint,
                given.build(),
                given.target,
                target_options=given.options,
                operators=chosen,
                on_progress=bar.show,
            )
    finally:
        spark.stop()
    if as_json:
        print_json(
            {
                "target": given.target,
                "snapshot_id": result.manifest.snapshot_id,
                "query_id": result.query_id,
                "batch_id": result.batch_id,
                "operators": {str(number): uid for number, uid in result.operators.items()},
                "states": result.states,
                "rows": result.rows,
                "bytes": result.bytes,
                "seconds": round(result.seconds, 3),
            }
        )
    else:
        print(
            f"batch {result.batch_id} of query {result.query_id} is snapshot {result.manifest.snapshot_id} in "
            f"{given.target}, in {duration_text(result.seconds)}: {result.states} states with "
            f"{count_text(result.rows)} rows, {bytes_text(result.bytes)}"
        )


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The named job, and where its snapshot goes."""

    name: str
    target: str
    options: Mapping[str, Any] = field(repr=False)
    build: Callable[[], StreamingJob]
    master: str = ""
    conf: Mapping[str, str] | None = None


def _given(
    job: str | None, entry_point: str | None, target: str | None, option: list[str] | None, config: Path | None
) -> _Given:
    from stillstate.orchestration.commands.places import named_place
    from stillstate.orchestration.config.entry_point import load_entry_point
    from stillstate.orchestration.config.spec import load_spec, to_context

    if (job is None) == (entry_point is None):
        raise InvalidConfiguration(
            "name the job with --job (of stillstate.yaml) or with --entry-point, and not with both"
        )
    if job is not None:
        spec = load_spec(config)
        found = spec.job(job)
        place = target or f"{found.store.rstrip('/')}/{found.name}"
        options = found.storage_options if target is None else named_place(place, config).options

        def build_configured() -> StreamingJob:
            with step_at():
                built: StreamingJob = load_entry_point(found.entry_point, spec.file.parent)(to_context(found))
            return built

        return _Given(
            name=found.name,
            target=place,
            options=options,
            build=build_configured,
            master=found.spark.master,
            conf=found.spark.conf,
        )
    if target is None:
        raise InvalidConfiguration("with --entry-point, say where the snapshot goes: TARGET is <store>/<job>")
    where = named_place(target, config)
    store, _, name = where.text.rstrip("/").rpartition("/")
    given_options = _pairs(option, "--option")

    def build_named() -> StreamingJob:
        from state_runtime.job import JobContext

        context = JobContext(name, store, given_options, storage_options=where.options)
        with step_at():
            built: StreamingJob = load_entry_point(str(entry_point), Path.cwd())(context)
        return built

    return _Given(name=name, target=where.text, options=where.options, build=build_named)


def _pairs(given: list[str] | None, what: str) -> dict[str, str]:
    pairs = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidConfiguration(f"{what} {text[:40]!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def _operators(given: list[str] | None) -> dict[int, str]:
    pairs = _pairs(given, "--operator")
    wrong = next((number for number in pairs if not (number.isascii() and number.isdigit())), None)
    if wrong is not None:
        raise InvalidConfiguration(f"--operator {wrong[:40]}=… needs Spark's operator id, a number from 0")
    return {int(number): uid for number, uid in pairs.items()}
