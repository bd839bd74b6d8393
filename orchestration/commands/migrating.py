"""`stillstate migrate` and `stillstate rescale`: a job gets other settings while it runs, or keeps its old ones.
`stillstate fork`: another job begins beside it with its state."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import Backend, VerifyLevel
from state_runtime.snapshot.migration import Migration, RunSettings
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    catalog_of,
    guarded,
    print_json,
    print_table,
    this_process,
)
from stillstate.orchestration.commands.begin_options import SessionSettingsOption
from stillstate.orchestration.config.spec import load_spec

if TYPE_CHECKING:
    from pathlib import Path

    from stillstate.orchestration.migration.fork_plan import ForkPlan, ForkRequest
    from stillstate.orchestration.migration.migrate import Migrator
    from stillstate.orchestration.migration.plan import MigrationPlan, Request

__all__ = ["register"]


VerifyOption = Annotated[
    VerifyLevel,
    typer.Option("--verify", help="How much of the savepoint is read before the new run starts; the job is down."),
]
CheckpointsOption = Annotated[
    int, typer.Option("--checkpoints", metavar="N", help="Checkpoints that the new run must make.")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        metavar="SECONDS",
        help="Within so long, else the job is taken back; 0: recovery.first_checkpoint_s.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@guarded
def migrate(
    job: JobArgument,
    parallelism: Annotated[
        int | None,
        typer.Option("--parallelism", "-p", metavar="N", help="Shards of every operator.", show_default=False),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option("--backend", help="What keeps a shard's state on local disk.", show_default=False),
    ] = None,
    from_snapshot: Annotated[
        str,
        typer.Option(
            "--from-snapshot",
            metavar="PLACE",
            help="Go back, on the way, to a snapshot (its id) or a savepoint (its name) of the job.",
            show_default=False,
        ),
    ] = "",
    restart: Annotated[
        bool, typer.Option("--restart", help="Also if no setting changes: the job's code is new.")
    ] = False,
    move: Annotated[
        bool,
        typer.Option(
            "--move",
            help=(
                "Move the job to the store that the file names in migration.to_store; the old root is deleted at "
                "the end."
            ),
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a migration whose process died, and with nothing else.")
    ] = False,
    accept_session_settings: SessionSettingsOption = False,
    checkpoints: CheckpointsOption = 1,
    timeout_s: TimeoutOption = 0.0,
    verify: VerifyOption = "full",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a running job: parallelism, backend, code, store.

    It can also continue from another snapshot.

    With options, only these change; without any, the job gets the settings of stillstate.yaml. The plan is shown first.
    Then the job stops with a savepoint, which is read and compared, and a new driver starts. If its first checkpoints
    do not come in time the job goes back to the savepoint, and runs as before (exit code 1).

    The result holds for every later start, until the next migration.
    """
    from stillstate.orchestration.migration.plan import Request

    if parallelism is not None and parallelism < 1:
        raise InvalidConfiguration(f"--parallelism must be at least 1 (got {parallelism})")
    settings = RunSettings(parallelism or 0, backend or "")
    request = Request(
        settings=settings,
        go_back_to=from_snapshot.removeprefix("@"),
        is_restart=restart,
        is_move=move,
        checkpoints=checkpoints,
        timeout_s=timeout_s,
        verify=verify,
        accept_session_settings=accept_session_settings,
    )
    migrator = _migrator(job, config)
    if resume:
        _refuse_more(request, Request(accept_session_settings=accept_session_settings), dry_run=dry_run)
        done = migrator.resume(accept_session_settings=accept_session_settings)
        _end(job, done, migrator.failure, as_json=as_json)
        return
    _carry_out(job, migrator, request, dry_run=dry_run, yes=yes, as_json=as_json)


@guarded
def rescale(
    job: JobArgument,
    parallelism: Annotated[int, typer.Argument(metavar="N", help="Shards of every operator.", min=1)],
    checkpoints: CheckpointsOption = 1,
    timeout_s: TimeoutOption = 0.0,
    verify: VerifyOption = "full",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the parallelism of a running job.

    Short for `migrate --parallelism N`.
    """
    from stillstate.orchestration.migration.plan import Request

    request = Request(
        settings=RunSettings(parallelism=parallelism),
        checkpoints=checkpoints,
        timeout_s=timeout_s,
        verify=verify,
    )
    _carry_out(job, _migrator(job, config), request, dry_run=dry_run, yes=yes, as_json=as_json)


@guarded
def fork(
    job: JobArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another job of stillstate.yaml, which has not begun yet.")],
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="ID|NAME",
            help="Begin with this snapshot (its id) or savepoint (its name) of JOB. Without it: with a savepoint that "
            "is made now; of a JOB that does not run, with its newest snapshot.",
            show_default=False,
        ),
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a fork whose process died, and with nothing else.")
    ] = False,
    accept_session_settings: SessionSettingsOption = False,
    timeout_s: TimeoutOption = 0.0,
    verify: Annotated[
        VerifyLevel, typer.Option("--verify", help="How much of the copy is read before NEW starts; JOB goes on.")
    ] = "full",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin a job with the state of another one, beside it.

    To try new code or settings on the same input.

    The plan is shown first. JOB continues unchanged. The snapshot that NEW begins with is copied to NEW's root, read
    and compared, and a driver of NEW starts with the settings that the file has for it. If its first checkpoint does
    not come in time the driver is ended, and the copy is removed again (exit code 1).

    NEW writes from the first epoch after that place on; the rows before it are in the output of JOB alone.
    """
    from stillstate.orchestration.migration.fork_plan import ForkRequest
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.migrations import fork_table

    request = ForkRequest(
        of=job,
        at=at.removeprefix("@"),
        timeout_s=timeout_s,
        verify=verify,
        accept_session_settings=accept_session_settings,
    )
    migrator = _migrator(new, config)
    if resume:
        plain = ForkRequest(of=job, accept_session_settings=accept_session_settings)
        _refuse_more(request, plain, dry_run=dry_run)
        under_way = migrator.is_under_way()
        if under_way is not None and under_way.fork_of != job:
            raise InvalidConfiguration(
                f"{under_way} is under way, and no fork of {job!r}; `stillstate migrate {new} --resume` goes on with it"
            )
        done = migrator.resume(accept_session_settings=accept_session_settings)
        _end(new, done, migrator.failure, as_json=as_json)
        return
    plan = migrator.plan_fork(request)
    if not as_json:
        _show(plan, fork_table(plan), "note")
    if dry_run:
        if as_json:
            print_json(plan.to_json_dict())
        return
    confirm(f"{new}: begin with {plan.begins_with}?", yes=yes)
    _end(new, migrator.fork(plan), migrator.failure, as_json=as_json)


def _migrator(job: str, config: Path | None) -> Migrator:
    from stillstate.orchestration.launchers import build_launcher
    from stillstate.orchestration.migration.migrate import migrator_of

    spec = load_spec(config)
    job_spec = spec.job(job)
    actor = this_process()
    return migrator_of(
        job_spec,
        catalog_of,
        lambda at: build_launcher(spec, at),
        actor,
        jobs=spec.job,
        say=lambda line: print(f"{job}: {line}", file=sys.stderr, flush=True),
    )


def _refuse_more(request: Request | ForkRequest, plain: Request | ForkRequest, *, dry_run: bool) -> None:
    if request != plain or dry_run:
        raise InvalidConfiguration(
            "--resume continues the recorded migration; it takes no other option but --accept-session-settings"
        )


def _carry_out(job: str, migrator: Migrator, request: Request, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.migrations import plan_table

    plan = migrator.plan(request)
    shown: dict[str, Any] = plan.to_json_dict()
    if plan.is_nothing:
        if as_json:
            print_json({**shown, "outcome": "nothing to do"})
        else:
            print(
                f"{job} runs with {plan.before}, as it is wanted to; nothing to do (--restart restarts it all the same)"
            )
        return
    if not as_json:
        _show(plan, plan_table(plan), "the file says")
    if dry_run:
        if as_json:
            print_json(shown)
        return
    confirm(f"{job}: migrate to {plan.target}?", yes=yes)
    _end(job, migrator.migrate(plan), migrator.failure, as_json=as_json)


def _show(plan: MigrationPlan | ForkPlan, table: Any, notes_are: str) -> None:
    print_table(table)
    for number, step in enumerate(plan.steps(), 1):
        print(f"{number}. {step}")
    for note in plan.notes():
        print(f"{notes_are}: {note}")


def _end(job: str, done: Migration, failure: str, *, as_json: bool) -> None:
    from stillstate.orchestration.migration.messages import error_of

    error = error_of(done, job, failure)
    if error is not None:
        raise error
    if as_json:
        print_json(dataclasses.asdict(done))
    elif done.fork_of:
        print(f"{job} runs beside {done.fork_of}: term {done.run_term}, {done.reason}")
        print(f"it began with {done.fork_at}, and needs nothing of {done.fork_of} any more")
    elif done.to_root:
        print(f"{job} runs in {done.to_root}: term {done.run_term}, {done.reason}")
        print("let `store` and `storage_options` say so in the file, and take migration.to_store out, in one edit")
    else:
        print(f"{job} runs with {done.target}: term {done.run_term}, {done.reason}")
        print(
            f"savepoint {done.savepoint} is from before; `stillstate rollback {job} {done.savepoint}` goes back to it"
        )


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate migrate flights --backend rocksdb --dry-run")(migrate)
    app.command(epilog="Example: stillstate rescale flights 8 --yes")(rescale)
    app.command(epilog="Example: stillstate fork flights flights-next --dry-run")(fork)
