"""The command line, `stillstate`.

Reading commands (`jobs`, `snapshots`, `describe`, `query`) look at the store and nothing else, so they work from any machine
and start quickly: neither Spark nor Dagster is imported for them.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, ParamSpec

import typer
from rich.console import Console

from orchestration.spec import JobSpec, Spec, load_spec
from state_runtime.clock import SYSTEM_CLOCK
from state_runtime.errors import InvalidConfiguration, MissingSnapshot, StillstateError

if TYPE_CHECKING:
    from state_runtime.snapshot.catalog import Catalog

__all__ = ["app", "main"]

P = ParamSpec("P")

HELP: Final = """Run, watch and look into streaming jobs with Stillstate.

Jobs are declared in `stillstate.yaml`: the one that --config names, else $STILLSTATE_CONFIG, else the one in this
folder or above it.

Exit codes:
  0  done
  1  unforeseen (a bug, or a driver that was killed)
  2  invalid call, configuration or data: fix it
  3  fenced: another driver has the job
  4  unavailable: the store did not answer, or a driver did not stop; try again
  5  corrupt data: repair, or use an older snapshot
  6  written by a newer Stillstate: upgrade
  7  the job's own code raised
"""

# Our own text wraps by itself; rich would re-flow the table of exit codes above.
app = typer.Typer(
    name="stillstate",
    help=HELP.replace("Exit codes:\n", "\b\nExit codes:\n"),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a traceback with local variables could show storage options
)

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job in stillstate.yaml.")]
OptionalJob = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="Name of the job; may be left out if there is only one.", show_default=False),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The configuration file.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables, errors too.")]
TakeoverOption = Annotated[
    bool, typer.Option("--takeover", help="Take the job from a driver that still runs; it is fenced and ends.")
]
DroppedOption = Annotated[
    bool,
    typer.Option(
        "--allow-dropped-state",
        help="Start although operators or states of the newest snapshot are gone from the pipeline; theirs is not read again.",
    ),
]
IdleOption = Annotated[
    bool, typer.Option("--until-idle", help="Process the input that is there, then finish (availableNow).")
]


class FoldMode(StrEnum):
    """What `materialize --mode` takes."""

    auto = "auto"
    minor = "minor"
    major = "major"


def _guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn our errors into a message on stderr and the exit code of their kind."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except StillstateError as error:
            _fail(error, as_json=bool(kwargs.get("as_json")))

    return guarded


def _fail(error: StillstateError, *, as_json: bool) -> NoReturn:
    if as_json:
        body = {"kind": error.kind, "type": type(error).__name__, "exit_code": error.exit_code, "message": str(error)}
        print(json.dumps({"error": body}), file=sys.stderr)
    else:
        # Not through rich: it would wrap file:line prefixes and read brackets in paths as markup.
        message = str(error)
        gap = "\n" if "\n" in message else " "  # lines of file:line: stay where an editor finds them
        print(f"{type(error).__name__}:{gap}{message}", file=sys.stderr)
        cause = error.__cause__
        if error.kind == "user-code" and cause is not None:
            import traceback

            traceback.print_exception(cause, file=sys.stderr)
    raise typer.Exit(error.exit_code)


@app.command(epilog="Example: stillstate run flights --until-idle")
@_guarded
def run(
    job: JobArgument,
    config: ConfigOption = None,
    takeover: TakeoverOption = False,
    until_idle: IdleOption = False,
    allow_dropped_state: DroppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a job in this process, with a live progress line, until it is stopped (Ctrl-C) or its input ends."""
    from orchestration.runner import progress_view, run_job

    spec = load_spec(config)
    job_spec = spec.job(job)
    result = run_job(
        job_spec,
        spec.file.parent,
        progress_view(job, as_json=as_json),
        takeover=takeover,
        until_idle=until_idle,
        allow_dropped_state=allow_dropped_state,
    )
    summary = {
        "job": job,
        "state": result.state,
        "last_snapshot_id": result.last_snapshot_id,
        "epochs": result.epochs,
    }
    if as_json:
        _print_json(summary)
    else:
        print(f"{job} {result.state} after {result.epochs} epochs; newest snapshot {result.last_snapshot_id}")


@app.command(epilog="Example: stillstate start flights")
@_guarded
def start(
    job: JobArgument,
    config: ConfigOption = None,
    takeover: TakeoverOption = False,
    until_idle: IdleOption = False,
    allow_dropped_state: DroppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a job's driver in the background and wait until it runs."""
    from orchestration.launchers import build_launcher

    spec = load_spec(config)
    launcher = build_launcher(spec, spec.job(job))
    launched = launcher.start(takeover=takeover, until_idle=until_idle, allow_dropped_state=allow_dropped_state)
    if as_json:
        _print_json(vars(launched))
    else:
        print(f"{job} is {launched.state}: term {launched.term}, process {launched.pid} on {launched.host}")
        print(f"log: {launched.log}")


@app.command(epilog="Example: stillstate stop flights")
@_guarded
def stop(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Ask a job's driver to stop after its epoch, and wait until it has. It stays stopped."""
    from orchestration.launchers import build_launcher

    spec = load_spec(config)
    stopped = build_launcher(spec, spec.job(job)).stop()
    if as_json:
        _print_json(vars(stopped))
    else:
        print(f"{job}: {stopped.how} (term {stopped.term})")


@app.command(epilog="Example: stillstate jobs --json")
@_guarded
def jobs(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show all jobs: state, term, heartbeat, newest snapshot, speed."""
    from orchestration import views

    spec = load_spec(config)
    rows = [_job_row(spec, job) for job in spec.jobs.values()]
    if as_json:
        _print_json([row.to_json_dict() for row in rows])
    else:
        _print_table(views.jobs_table(rows))
    # A script should not take a store that could not be read for a job that is well.
    failed = next((row for row in rows if row.exit_code), None)
    if failed is not None:
        raise typer.Exit(failed.exit_code)


@app.command(epilog="Example: stillstate snapshots flights --limit 5")
@_guarded
def snapshots(
    job: OptionalJob = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List a job's snapshots, newest first."""
    from orchestration import views

    job_spec = _job_or_only(load_spec(config), job)
    catalog = _catalog(job_spec)
    catalog.job_info()
    rows = []
    for snapshot_id in reversed(catalog.snapshot_ids()[-limit:]):
        try:
            rows.append(views.SnapshotRow.of(catalog.manifest(snapshot_id)))
        except MissingSnapshot:
            continue  # a folder whose manifest is still on its way, or whose writer died: not a snapshot
        except StillstateError as error:
            rows.append(views.SnapshotRow.broken(snapshot_id, error))
    if as_json:
        _print_json([row.to_json_dict() for row in rows])
    else:
        _print_table(views.snapshots_table(job_spec.name, rows))


@app.command(epilog="Example: stillstate describe latest --job flights")
@_guarded
def describe(
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A snapshot id, or `latest`.")],
    job: Annotated[
        str | None,
        typer.Option("--job", "-j", help="The job; may be left out if there is only one.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a snapshot holds: operators, states, changelog, tables, source position, progress."""
    from orchestration import views

    job_spec = _job_or_only(load_spec(config), job)
    catalog = _catalog(job_spec)
    catalog.job_info()
    snapshot_id = _snapshot_id(snapshot)
    manifest = catalog.latest() if snapshot_id is None else catalog.manifest(snapshot_id)
    if manifest is None:
        raise MissingSnapshot(f"job {job_spec.name!r} has no snapshot yet; the first epoch makes one")
    if as_json:
        _print_json(views.manifest_json(manifest))
    else:
        console = _console()
        for part in views.manifest_parts(job_spec.name, manifest):
            console.print(part)


@app.command(epilog="Example: stillstate query flights seen --operator legs --key tailnum=N14228")
@_guarded
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
            help="Of a map only the entry of this map key; once per column of it.",
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
    """Look into a state: one key, or the first rows of the table, as of any snapshot. The job may run meanwhile.

    Binary values are hexadecimal, dates 2013-01-31, times 2013-01-31 12:00:00 in UTC, structs JSON. A key that is not
    there is no error: the result is empty, and the exit code 0. Lists show the position of each element, maps their keys,
    `$timers` when a timer is due. What had expired at the snapshot's batch time is not shown.
    """
    from orchestration import views
    from state_runtime.query import open_state
    from state_runtime.store import open_store

    if as_json and as_csv:
        raise InvalidConfiguration("--json and --csv are two forms of the same output; give one of them")
    spec = load_spec(config).job(job)
    store = open_store(spec.store, spec.storage_options)
    view = open_state(store, spec.name, state, operator=operator, snapshot=_snapshot_id(snapshot))
    rows = view.read(
        key=view.parse_key(key) if key else None,
        entry=view.parse_entry(entry) if entry else None,
        where=view.parse_where(where) if where else None,
        columns=columns.split(",") if columns is not None else None,
        limit=limit + 1,  # one more, to know whether there is more
    )
    found = views.StateRows.of(spec.name, view.manifest.snapshot_id, view.operator.uid, state, rows, limit)
    if as_json:
        _print_json(found.to_json_dict())
    elif as_csv:
        print(views.state_csv(found), end="")
        if found.more:
            print(f"only the first {limit} rows; --limit gives more", file=sys.stderr)
    elif found.rows:
        _print_table(views.state_table(found))
    else:
        print(f"{found.title}: no row{' of this key' if key else ''}{' with these values' if where else ''}")


@app.command(epilog="Example: stillstate materialize flights --mode major")
@_guarded
def materialize(
    job: JobArgument,
    mode: Annotated[
        FoldMode,
        typer.Option(
            "--mode",
            "-m",
            help="auto: new base tables where changes have grown large; minor: none; major: all of them.",
        ),
    ] = FoldMode.auto,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fold a job's changelog into state tables now, as a Spark job in this process, with a progress bar.

    The job may run meanwhile: its driver takes the tables over with its next checkpoint, a job that does not run with its first.
    Nothing to fold is no error. A crash at any point leaves unused files, never damage.
    """
    from orchestration.folds import fold_numbers
    from orchestration.materialize import fold_in_new_session, fold_summary, fold_view
    from orchestration.text import bytes_text, count_text, duration_text

    spec = load_spec(config).job(job)
    result, log_left = fold_in_new_session(spec, fold_view(job, as_json=as_json), mode=mode.value)
    numbers = fold_numbers(result, log_left)
    if as_json:
        _print_json({"job": job, **fold_summary(result, numbers)})
    elif result.record_id is None:
        print(f"{job}: nothing was folded: {result.reason}")
    else:
        print(
            f"{job}: {result.mode} materialization {result.record_id} of snapshot {result.snapshot_id} in "
            f"{duration_text(result.duration_s)}: {bytes_text(result.log_bytes_folded)} of log folded, "
            f"{count_text(result.rows)} rows, {bytes_text(result.written_bytes)} written, "
            f"{result.shared_tables} tables kept, {bytes_text(log_left)} of log left"
        )


def _snapshot_id(text: str) -> int | None:
    """The id behind a SNAPSHOT argument; None is the newest."""
    if text == "latest":
        return None
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    raise MissingSnapshot(f"{text[:40]!r} is not a snapshot; give a number as `snapshots` lists it, or `latest`")


def _job_row(spec: Spec, job: JobSpec) -> Any:
    """One row of `jobs`; a store that cannot be read is a row of its own, so that the others still show."""
    from orchestration import views
    from orchestration.launchers import build_launcher
    from orchestration.observe import observe

    try:
        catalog = _catalog(job)
        seen = observe(job, catalog, build_launcher(spec, job), SYSTEM_CLOCK)
        latest = catalog.latest()
    except StillstateError as error:
        return views.JobRow.broken(job.name, error)
    return views.JobRow.of(job.name, seen, latest, SYSTEM_CLOCK.now_ms())


def _job_or_only(spec: Spec, name: str | None) -> JobSpec:
    if name is not None:
        return spec.job(name)
    if len(spec.jobs) > 1:
        raise InvalidConfiguration(f"{spec.file} has several jobs; name one of: {', '.join(sorted(spec.jobs))}")
    return next(iter(spec.jobs.values()))


def _catalog(job: JobSpec) -> Catalog:
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.store import open_store

    return Catalog(open_store(job.store, job.storage_options), job.name)


def _print_json(value: Any) -> None:
    print(json.dumps(value))


def _print_table(table: Any) -> None:
    _console().print(table)


def _console() -> Console:
    # Made for each use: tests and pagers replace stdout.
    console = Console(file=sys.stdout)
    # A pipe has no width; 80 columns would cut names that a `grep` looks for.
    return console if console.is_terminal else Console(file=sys.stdout, width=160)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
