"""`stillstate run`, `start`, `stop` and `jobs`: drivers, and their health."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from state_runtime.base.clock import SYSTEM_CLOCK
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    VerboseOption,
    catalog_of,
    guarded,
    print_json,
    print_table,
)
from stillstate.orchestration.commands.begin_options import BeginOptions, with_begin_options
from stillstate.orchestration.commands.logs import logged_run
from stillstate.orchestration.config.effective_settings import effective_settings, refuse_while_migrating
from stillstate.orchestration.config.spec import load_spec

__all__ = ["register"]

LogFileOption = Annotated[
    str | None,
    typer.Option(
        "--log-file",
        metavar="FILE",
        help="Append the run's log to this file; `-` is stderr. By default a new file in launcher.log_dir.",
        show_default=False,
    ),
]


@guarded
@with_begin_options
def run(
    job: JobArgument,
    config: ConfigOption = None,
    *,
    options: BeginOptions,
    log_file: LogFileOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a job in this process, with a live progress line.

    It runs until it is stopped (Ctrl-C) or its input ends.

    Its log is a file in launcher.log_dir; the path is shown at the start and after an error. The log has the restored
    snapshot, warnings, tracebacks, and the output of Spark.

    If another driver of the job lives, this one ends with exit code 3. A driver counts as gone when its process on this
    machine is gone, or when it has missed 5 heartbeats (10 seconds by default; 30 while it starts). Then this driver
    takes the job over; if the other one was only suspended, it is fenced and publishes nothing more. --takeover does
    not wait for that.
    """
    from stillstate.orchestration.running.run import run_job
    from stillstate.orchestration.show.runs import progress_view

    asked = options.start_options()
    spec = load_spec(config)
    job_spec = spec.job(job)
    with (
        logged_run(job_spec, log_file, verbose=verbose, as_json=as_json) as log,
        closing(progress_view(job, as_json=as_json)) as view,
    ):
        result = run_job(
            job_spec,
            spec.file.parent,
            asked,
            begin_log=log.begin,
            spark_in_log=not verbose,
            is_current=lambda: load_spec(config).job(job) == job_spec,
            on_progress=view.show,
            on_restore=view.restoring,
            on_copy=view.copying,
        )
    summary = {
        "job": job,
        "state": result.state,
        "last_snapshot_id": result.last_snapshot_id,
        "epochs": result.epochs,
    }
    if as_json:
        print_json(summary)
    else:
        print(f"{job} {result.state} after {result.epochs} epochs; newest snapshot {result.last_snapshot_id}")


@guarded
@with_begin_options
def start(
    job: JobArgument,
    config: ConfigOption = None,
    *,
    options: BeginOptions,
    as_json: JsonOption = False,
) -> None:
    """Start a job in the background; wait until its driver runs."""
    from stillstate.orchestration.launchers import build_launcher

    asked = options.start_options()
    spec = load_spec(config)
    job_spec = spec.job(job)
    root = catalog_of(job_spec).root
    refuse_while_migrating(job, root)
    _, told = effective_settings(job_spec, root)
    if told:
        print(told, file=sys.stderr)
    launcher = build_launcher(spec, job_spec)
    launched = launcher.start(asked)
    if as_json:
        print_json(vars(launched))
    else:
        print(f"{job} is {launched.state}: term {launched.term}, process {launched.pid} on {launched.host}")
        print(f"log: {launched.log}")


@guarded
def stop(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Stop a job after its epoch, and wait until it has stopped.

    It stays stopped.
    """
    from stillstate.orchestration.launchers import build_launcher

    spec = load_spec(config)
    stopped = build_launcher(spec, spec.job(job)).stop()
    if as_json:
        print_json(vars(stopped))
    else:
        print(f"{job}: {stopped.how} (term {stopped.term})")


@guarded
def jobs(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show all jobs: health, newest snapshot, speed.

    Also their term, shards (the parallelism that a job runs with) and heartbeat.

    Each job is probed once, as Dagster's sensors do: if a store does not answer within observation.timeout_s, the job
    is shown as not seen, and the other jobs are still shown. Ages are as of the moment of the probe.
    """
    from stillstate.orchestration.launchers import build_launcher
    from stillstate.orchestration.probes.pool import ProbePool
    from stillstate.orchestration.probes.watch import watch_looks
    from stillstate.orchestration.show import views

    spec = load_spec(config)
    looks = watch_looks(spec, list(spec.jobs), build_launcher, lookout=ProbePool(), clock=SYSTEM_CLOCK).found
    rows = [views.JobRow.of(name, looks[name]) for name in spec.jobs]
    if as_json:
        print_json([row.to_json_dict() for row in rows])
    else:
        print_table(views.jobs_table(rows))
    # A script must not mistake a store that could not be read for a healthy job.
    failed = next((row for row in rows if row.health in (views.UNREADABLE, views.NOT_SEEN)), None)
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate run flights --until-idle")(run)
    app.command(epilog="Example: stillstate start flights")(start)
    app.command(epilog="Example: stillstate stop flights")(stop)
    app.command(epilog="Example: stillstate jobs --json")(jobs)
