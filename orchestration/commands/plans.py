"""`stillstate retention` and `stillstate gc`: plan deletions, look at the plans and apply them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from state_runtime.base.durations import parse_duration_s
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    catalog_of,
    console,
    guarded,
    print_json,
    print_table,
    this_process,
)
from stillstate.orchestration.config.spec import load_spec

if TYPE_CHECKING:
    from state_runtime.base.settings import RetentionPolicy
    from state_runtime.maintenance.plans import Kind
    from state_runtime.store import Store
    from stillstate.orchestration.config.spec import JobSpec
    from stillstate.orchestration.upkeep.deletions import Outcome

__all__ = ["register"]

PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB|PLAN", help="A job, whose newest plan is meant, or a file of `plan --out`.", show_default=False
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Also write the plan to this file, for `apply` elsewhere.",
        show_default=False,
    ),
]
CountOption = typer.Option(min=1, show_default=False)

retention_app = typer.Typer(
    no_args_is_help=True,
    help="Keep snapshots by rules: plan, look, apply.",
    epilog="Example: stillstate retention plan flights --keep-last 10, then: stillstate retention apply flights",
    rich_markup_mode=None,
)
gc_app = typer.Typer(
    no_args_is_help=True,
    help="Collect what nothing needs: plan, look, apply.",
    epilog="Example: stillstate gc plan flights, then: stillstate gc apply flights",
    rich_markup_mode=None,
)


def _root(job: JobSpec) -> Store:
    catalog = catalog_of(job)
    catalog.job_info()
    return catalog.root


@retention_app.command("plan", epilog="Example: stillstate retention plan flights --keep-last 10 --keep-daily 7")
@guarded
def retention_plan(
    job: JobArgument,
    keep_last: Annotated[int | None, CountOption] = None,
    keep_within: Annotated[
        str | None, typer.Option(metavar="DURATION", help="For example 6h or 7d.", show_default=False)
    ] = None,
    keep_hourly: Annotated[int | None, CountOption] = None,
    keep_daily: Annotated[int | None, CountOption] = None,
    keep_weekly: Annotated[int | None, CountOption] = None,
    keep_monthly: Annotated[int | None, CountOption] = None,
    keep_yearly: Annotated[int | None, CountOption] = None,
    keep_tag: Annotated[list[str] | None, typer.Option(help="Savepoints with this tag.", show_default=False)] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Evict copies that are older.", show_default=False)
    ] = None,
    max_count: Annotated[int | None, CountOption] = None,
    max_share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Refuse a plan that deletes a larger share.", show_default=False),
    ] = None,
    out: OutOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which snapshots the rules keep and why, and which would be deleted. Nothing is deleted.

    Without a rule here, those of the job's `retention` section count. Windows are measured from the newest snapshot.
    The newest snapshot is always kept, and so is each one that a run, a pin or another user needs.
    """
    from state_runtime.base.settings import RetentionPolicy
    from stillstate.orchestration.show.deletions import retention_json, retention_table
    from stillstate.orchestration.upkeep.deletions import Retaining
    from stillstate.orchestration.upkeep.kept_plans import keep_plan

    spec = load_spec(config).job(job)
    given: dict[str, Any] = {
        "keep_last": keep_last,
        "keep_within_s": parse_duration_s(keep_within) if keep_within is not None else None,
        "keep_hourly": keep_hourly,
        "keep_daily": keep_daily,
        "keep_weekly": keep_weekly,
        "keep_monthly": keep_monthly,
        "keep_yearly": keep_yearly,
        "keep_tags": tuple(keep_tag or ()),
        "max_age_s": parse_duration_s(max_age) if max_age is not None else None,
        "max_count": max_count,
    }
    policy: RetentionPolicy | None = RetentionPolicy(**given) if any(given.values()) else None
    retaining = Retaining.of_job(spec, _root(spec), this_process(), policy=policy, share_max=max_share)
    plan = retaining.plan()
    said = keep_plan(spec, "retention", plan.write, out)
    if as_json:
        print_json(retention_json(plan))
    else:
        print_table(retention_table(plan))
        print(said)


@gc_app.command("plan", epilog="Example: stillstate gc plan flights")
@guarded
def gc_plan(
    job: JobArgument,
    min_age: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Nothing younger is touched. By default `garbage.min_age_s`: 24h.",
            show_default=False,
        ),
    ] = None,
    unsafe_min_age: Annotated[
        bool, typer.Option("--unsafe-min-age", help="Allow less than an hour: for a store whose clock never jumps.")
    ] = False,
    out: OutOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find objects that no snapshot needs: objects without a snapshot, deletions that were cut short, expired data.
    Nothing is deleted.

    A job may run meanwhile. Refused if a needed object is missing or cannot be read: then nothing is garbage.
    """
    from stillstate.orchestration.show.deletions import gc_json, gc_tables
    from stillstate.orchestration.show.progress import count_bar
    from stillstate.orchestration.upkeep.deletions import Collecting
    from stillstate.orchestration.upkeep.kept_plans import keep_plan

    spec = load_spec(config).job(job)
    min_age_s = None if min_age is None else parse_duration_s(min_age)
    collecting = Collecting.of_job(
        spec, _root(spec), this_process(), min_age_s=min_age_s, unsafe_min_age=unsafe_min_age
    )
    with count_bar(f"list {job}", "objects") as on_listed:
        plan = collecting.plan(on_listed)
    said = keep_plan(spec, "gc", plan.write, out)
    if as_json:
        print_json(gc_json(plan))
        return
    for part in gc_tables(plan):
        if isinstance(part, str):
            console().print(part, markup=False, highlight=False)
        else:
            print_table(part)
    print(said)


@retention_app.command("apply", epilog="Example: stillstate retention apply flights")
@guarded
def retention_apply(plan_file: PlanArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Execute a job's newest retention plan, or one in a file. Refused if it is stale: if it is of another job, is old,
    or would delete a snapshot that is to be kept now."""
    from stillstate.orchestration.text import bytes_text, count_text

    with _applied("retention", plan_file, config, as_json=as_json) as (job, done):
        if not as_json:
            print(
                f"{job}: deleted {count_text(len(done.snapshot_ids))} snapshots and {len(done.savepoints)} savepoints, "
                f"{count_text(done.objects)} objects, {bytes_text(done.bytes)}"
            )


@gc_app.command("apply", epilog="Example: stillstate gc apply flights")
@guarded
def gc_apply(plan_file: PlanArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check again, and delete the objects that are in the plan and still garbage. Safe beside a running job, and twice
    at once."""
    from stillstate.orchestration.text import bytes_text, count_text

    with _applied("gc", plan_file, config, as_json=as_json) as (job, done):
        if as_json:
            return
        kinds = ", ".join(f"{count_text(n)} {kind}" for kind, n in sorted(done.by_kind.items())) or "nothing"
        print(f"{job}: deleted {kinds}; {bytes_text(done.bytes)}")
        if done.snapshot_ids or done.savepoints:
            print(f"ended the deletion of {len(done.snapshot_ids)} snapshots and {len(done.savepoints)} savepoints")
        if done.stayed:
            print(f"{done.stayed:,} objects of the plan stay: they are gone already, or not garbage any more")


@contextmanager
def _applied(kind: Kind, plan_file: str, config: Path | None, *, as_json: bool) -> Iterator[tuple[str, Outcome]]:
    """Execute a plan; the block prints what was deleted, and this function then what was not."""
    from stillstate.orchestration.show.deletions import exit_code_of, show_failures
    from stillstate.orchestration.show.progress import count_bar
    from stillstate.orchestration.upkeep.deletions import Collecting, Retaining
    from stillstate.orchestration.upkeep.kept_plans import find_plan

    twin: type[Retaining] | type[Collecting] = Retaining if kind == "retention" else Collecting
    found = find_plan(plan_file, config, kind)
    plan: Any = twin.document.read(found.file)
    job = plan.made.job
    found.check_job(job)
    spec = load_spec(config).job(job)
    with count_bar(f"retention of {job}" if kind == "retention" else f"collect {job}", "objects") as on_progress:
        done = twin.of_job(spec, _root(spec), this_process()).apply(plan, on_progress)
    found.executed()
    if as_json:
        print_json({"job": job, **done.document})
    yield job, done
    if not as_json:
        show_failures(done.failures, done.kept)
    code = exit_code_of(done.failures, done.kept)
    if code:
        raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(retention_app, name="retention")
    app.add_typer(gc_app, name="gc")
