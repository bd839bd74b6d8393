"""`stillstate materialize`: fold the changelog of a job into state tables now."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from state_runtime.base.settings import MaterializationMode
from stillstate.orchestration.commands.base import ConfigOption, JobArgument, JsonOption, guarded, print_json
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]


@guarded
def materialize(
    job: JobArgument,
    mode: Annotated[
        MaterializationMode,
        typer.Option(
            "--mode",
            "-m",
            help="auto: new base tables where changes have grown large; minor: none; major: all of them.",
        ),
    ] = "auto",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fold a job's changelog into state tables now.

    A Spark job in this process does it, with a progress bar.

    The job may run meanwhile: its driver starts to use the tables with its next checkpoint. A job that does not run
    starts to use them with the first checkpoint of its next run. It is no error if there is nothing to fold: the store
    is asked first, and then Spark is not started. A crash at any point leaves unused files, never damage.
    """
    from stillstate.orchestration.materialization.health import materialization_numbers
    from stillstate.orchestration.materialization.session import materialization_summary, materialize_in_new_session
    from stillstate.orchestration.show.materializations import materialization_view
    from stillstate.orchestration.text import bytes_text, count_text, duration_text

    spec = load_spec(config).job(job)
    with closing(materialization_view(job, as_json=as_json)) as view:
        result, log_left = materialize_in_new_session(spec, mode=mode, on_progress=view.show)
    numbers = materialization_numbers(result, log_left)
    if as_json:
        print_json({"job": job, **materialization_summary(result, numbers)})
    elif result.record_id is None:
        print(f"{job}: nothing was folded: {result.reason}")
    else:
        print(
            f"{job}: {result.mode} materialization {result.record_id} of snapshot {result.snapshot_id} in "
            f"{duration_text(result.duration_s)}: {bytes_text(result.log_bytes_folded)} of log folded, "
            f"{count_text(result.rows)} rows, {bytes_text(result.written_bytes)} written, "
            f"{result.shared_tables} tables kept, {bytes_text(log_left)} of log left"
        )


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate materialize flights --mode major")(materialize)
