"""The command line, `stillstate`.

Reading commands (`jobs`, `snapshots`, `describe`, `query`) look at the store and nothing else, so they work from any
machine and start quickly: neither Spark nor Dagster is imported for them.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Final, ParamSpec

import typer

from orchestration.commands import convert as convert_command
from orchestration.commands import deleting as maintenance_commands
from orchestration.commands import export as reading_commands
from orchestration.commands import import_spark as import_command
from orchestration.commands import moving as moving_commands
from orchestration.commands.base import (
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
from orchestration.commands.begin_options import ClaimOption, FromOption, FromSnapshotOption
from orchestration.commands.savepoints import register as register_savepoints
from orchestration.config.spec import JobSpec, Spec, load_spec
from orchestration.folding.mode import FoldMode
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot, StillstateError

if TYPE_CHECKING:
    pass

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

TakeoverOption = Annotated[
    bool, typer.Option("--takeover", help="Take the job from a driver that still runs; it is fenced and ends.")
]
DroppedOption = Annotated[
    bool,
    typer.Option(
        "--allow-dropped-state",
        help="Start although operators or states of the newest snapshot are gone from the pipeline; theirs is not read "
        "again.",
    ),
]
DrainedOption = Annotated[
    bool,
    typer.Option("--allow-drained", help="Go on although the newest snapshot was drained: its windows have closed."),
]
IdleOption = Annotated[
    bool, typer.Option("--until-idle", help="Process the input that is there, then finish (availableNow).")
]


@app.command(epilog="Example: stillstate run flights --until-idle")
@guarded
def run(
    job: JobArgument,
    config: ConfigOption = None,
    takeover: TakeoverOption = False,
    until_idle: IdleOption = False,
    allow_dropped_state: DroppedOption = False,
    allow_drained: DrainedOption = False,
    place: FromOption = "",
    claim: ClaimOption = False,
    from_snapshot: FromSnapshotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a job in this process, with a live progress line, until it is stopped (Ctrl-C) or its input ends."""
    from orchestration.config.begin_at import BeginAt
    from orchestration.running.run import run_job
    from orchestration.show.runs import progress_view

    begin = BeginAt(place, claim, from_snapshot)
    spec = load_spec(config)
    job_spec = spec.job(job)
    with closing(progress_view(job, as_json=as_json)) as view:
        result = run_job(
            job_spec,
            spec.file.parent,
            on_progress=view.show,
            on_restore=view.restoring,
            on_copy=view.copying,
            takeover=takeover,
            until_idle=until_idle,
            allow_dropped_state=allow_dropped_state,
            allow_drained=allow_drained,
            begin=begin,
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


@app.command(epilog="Example: stillstate start flights")
@guarded
def start(
    job: JobArgument,
    config: ConfigOption = None,
    takeover: TakeoverOption = False,
    until_idle: IdleOption = False,
    allow_dropped_state: DroppedOption = False,
    allow_drained: DrainedOption = False,
    place: FromOption = "",
    claim: ClaimOption = False,
    from_snapshot: FromSnapshotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a job's driver in the background and wait until it runs."""
    from orchestration.config.begin_at import BeginAt
    from orchestration.launchers import build_launcher

    begin = BeginAt(place, claim, from_snapshot)
    spec = load_spec(config)
    launcher = build_launcher(spec, spec.job(job))
    launched = launcher.start(
        takeover=takeover,
        until_idle=until_idle,
        allow_dropped_state=allow_dropped_state,
        allow_drained=allow_drained,
        begin=begin,
    )
    if as_json:
        print_json(vars(launched))
    else:
        print(f"{job} is {launched.state}: term {launched.term}, process {launched.pid} on {launched.host}")
        print(f"log: {launched.log}")


@app.command(epilog="Example: stillstate stop flights")
@guarded
def stop(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Ask a job's driver to stop after its epoch, and wait until it has. It stays stopped."""
    from orchestration.launchers import build_launcher

    spec = load_spec(config)
    stopped = build_launcher(spec, spec.job(job)).stop()
    if as_json:
        print_json(vars(stopped))
    else:
        print(f"{job}: {stopped.how} (term {stopped.term})")


@app.command(epilog="Example: stillstate jobs --json")
@guarded
def jobs(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show all jobs: state, term, heartbeat, newest snapshot, speed."""
    from orchestration.show import views

    spec = load_spec(config)
    rows = [_job_row(spec, job) for job in spec.jobs.values()]
    if as_json:
        print_json([row.to_json_dict() for row in rows])
    else:
        print_table(views.jobs_table(rows))
    # A script should not take a store that could not be read for a job that is well.
    failed = next((row for row in rows if row.exit_code), None)
    if failed is not None:
        raise typer.Exit(failed.exit_code)


@app.command(epilog="Example: stillstate snapshots flights --limit 5")
@guarded
def snapshots(
    job: OptionalJob = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List a job's snapshots, newest first."""
    from orchestration.show import views

    job_spec = job_or_only(load_spec(config), job)
    catalog = catalog_of(job_spec)
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
        print_json([row.to_json_dict() for row in rows])
    else:
        print_table(views.snapshots_table(job_spec.name, rows))


@app.command(epilog="Example: stillstate describe latest --job flights")
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
    """Show what a snapshot holds: operators, states, changelog, tables, source position, progress."""
    from orchestration.show import views

    job_spec = job_or_only(load_spec(config), job)
    catalog = catalog_of(job_spec)
    catalog.job_info()
    snapshot_id = _snapshot_id(snapshot)
    manifest = catalog.latest() if snapshot_id is None else catalog.manifest(snapshot_id)
    if manifest is None:
        raise MissingSnapshot(f"job {job_spec.name!r} has no snapshot yet; the first epoch makes one")
    if as_json:
        print_json(views.manifest_json(manifest))
    else:
        out = console()
        for part in views.manifest_parts(job_spec.name, manifest):
            out.print(part)


@app.command(epilog="Example: stillstate query flights seen --operator legs --key tailnum=N14228")
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
    there is no error: the result is empty, and the exit code 0. Lists show the position of each element, maps their
        keys,
    `$timers` when a timer is due. What had expired at the snapshot's batch time is not shown.
    """
    from orchestration.show import views
    from state_runtime.reading.query import open_state
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
        print_json(found.to_json_dict())
    elif as_csv:
        print(views.state_csv(found), end="")
        if found.more:
            print(f"only the first {limit} rows; --limit gives more", file=sys.stderr)
    elif found.rows:
        print_table(views.state_table(found))
    else:
        print(f"{found.title}: no row{' of this key' if key else ''}{' with these values' if where else ''}")


@app.command(epilog="Example: stillstate materialize flights --mode major")
@guarded
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

    The job may run meanwhile: its driver takes the tables over with its next checkpoint, a job that does not run with
        its first.
    Nothing to fold is no error. A crash at any point leaves unused files, never damage.
    """
    from orchestration.folding.health import fold_numbers
    from orchestration.folding.session import fold_in_new_session, fold_summary
    from orchestration.show.folds import fold_view
    from orchestration.text import bytes_text, count_text, duration_text

    spec = load_spec(config).job(job)
    with closing(fold_view(job, as_json=as_json)) as view:
        result, log_left = fold_in_new_session(spec, mode=mode.value, on_progress=view.show)
    numbers = fold_numbers(result, log_left)
    if as_json:
        print_json({"job": job, **fold_summary(result, numbers)})
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
    from orchestration.launchers import build_launcher
    from orchestration.recovery.observe import observe
    from orchestration.show import views

    try:
        catalog = catalog_of(job)
        seen = observe(job, catalog, build_launcher(spec, job), SYSTEM_CLOCK)
        latest = catalog.latest()
    except StillstateError as error:
        return views.JobRow.broken(job.name, error)
    return views.JobRow.of(job.name, seen, latest, SYSTEM_CLOCK.now_ms())


convert_command.register(app)
import_command.register(app)
reading_commands.register(app)
maintenance_commands.register(app)
moving_commands.register(app)
register_savepoints(app)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
