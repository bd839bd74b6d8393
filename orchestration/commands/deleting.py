"""`stillstate delete`, `retention`, `gc`, `pin`, `unpin` and `pins`: what ends snapshots, and what keeps them."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from orchestration.commands.kept_plans import find_plan, keep_plan
from orchestration.config.spec import load_spec, to_policy
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.durations import parse_duration_s
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot
from state_runtime.base.ids import SYSTEM_IDS

if TYPE_CHECKING:
    from state_runtime.base.settings import RetentionPolicy
    from state_runtime.maintenance.delete.snapshots import Deleted
    from state_runtime.store import Store

__all__ = ["register"]

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
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


def _root(job: str, config: Path | None) -> Store:
    catalog = catalog_of(load_spec(config).job(job))
    catalog.job_info()
    return catalog.root


def _owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


@guarded
def delete(
    job: JobArgument,
    snapshots: Annotated[
        list[int] | None, typer.Argument(metavar="SNAPSHOT", help="Ids of snapshots.", show_default=False)
    ] = None,
    savepoint: Annotated[
        str | None, typer.Option("--savepoint", metavar="NAME", help="Delete this savepoint.", show_default=False)
    ] = None,
    root: Annotated[bool, typer.Option("--root", help="Delete the job with all of its snapshots.")] = False,
    with_savepoints: Annotated[
        bool, typer.Option("--with-savepoints", help="With --root: its savepoints too.")
    ] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Also snapshots whose manifest is lost or cannot be read.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete snapshots, a savepoint or a whole job. Refused, by name, if a run, a pin or anybody else needs it.

    From the first step on, nobody can open what is deleted; files that other snapshots need stay. If the command is
    interrupted, run it again to finish.
    """
    if sum((bool(snapshots), savepoint is not None, root)) != 1:
        raise InvalidConfiguration("give snapshot ids, or --savepoint NAME, or --root: one of the three")
    store = _root_or_rest(job, config) if root else _root(job, config)
    if savepoint is not None:
        done = _delete_savepoint(store, job, savepoint, dry_run=dry_run, yes=yes)
    elif root:
        done = _delete_root(store, job, with_savepoints=with_savepoints, dry_run=dry_run, yes=yes)
    else:
        done = _delete_snapshots(
            store, job, snapshots or [], damaged=damaged, dry_run=dry_run, yes=yes, as_json=as_json
        )
    if done is not None:
        _show_deleted(job, done, as_json=as_json)


def _root_or_rest(job: str, config: Path | None) -> Store:
    """Of a job that is half deleted only the rest may be there."""
    return catalog_of(load_spec(config).job(job)).root


def _delete_snapshots(
    root: Store, job: str, ids: list[int], *, damaged: bool, dry_run: bool, yes: bool, as_json: bool
) -> Deleted | None:
    from orchestration.show.deletions import confirm
    from orchestration.show.progress import count_bar
    from orchestration.text import bytes_text, count_text
    from state_runtime.maintenance.delete.snapshots import delete_snapshots, plan_deletion

    ids = list(dict.fromkeys(ids))
    plan = plan_deletion(root, ids, clock=SYSTEM_CLOCK, damaged=damaged)
    what = (
        f"{job}: {count_text(len(ids))} snapshots with {count_text(plan.objects)} objects ({bytes_text(plan.bytes)}) "
        "that "
        f"nothing else needs; {count_text(plan.shared_objects)} objects stay, because others need them."
    )
    if dry_run:
        if as_json:
            print_json({"job": job, **dataclasses.asdict(plan)})
        else:
            print(f"would delete {what}")
        return None
    confirm(f"Delete {what}", yes=yes)
    with count_bar(f"{job}: delete", "objects") as on_progress:
        return delete_snapshots(root, ids, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, damaged=damaged, on_progress=on_progress)


def _delete_savepoint(root: Store, job: str, name: str, *, dry_run: bool, yes: bool) -> Deleted | None:
    from orchestration.show.deletions import confirm
    from orchestration.show.progress import count_bar
    from orchestration.text import bytes_text
    from state_runtime.maintenance.delete.roots import delete_savepoint
    from state_runtime.snapshot.savepoint import read_savepoint

    record = read_savepoint(root, name)
    what = f"savepoint {name!r} of {job} ({record.state}, {bytes_text(record.total_bytes)})"
    if dry_run:
        print(f"would delete {what}")
        return None
    confirm(f"Delete {what}?", yes=yes)
    with count_bar(f"delete {name}", "objects") as on_progress:
        return delete_savepoint(root, name, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, owner=_owner(), on_progress=on_progress)


def _delete_root(root: Store, job: str, *, with_savepoints: bool, dry_run: bool, yes: bool) -> Deleted | None:
    from orchestration.show.deletions import confirm
    from orchestration.show.progress import count_bar
    from state_runtime.maintenance.delete.roots import delete_root
    from state_runtime.snapshot.paths import SNAPSHOTS_DIR

    count = len(root.list_names(SNAPSHOTS_DIR))
    what = f"job {job!r} in {root.url} with all of its {count:,} snapshots"
    if dry_run:
        print(f"would delete {what}")
        return None
    confirm(f"Delete {what}?", yes=yes)
    with count_bar(f"delete {job}", "objects") as on_progress:
        return delete_root(
            root,
            clock=SYSTEM_CLOCK,
            ids=SYSTEM_IDS,
            owner=_owner(),
            with_savepoints=with_savepoints,
            on_progress=on_progress,
        )


def _show_deleted(job: str, done: Deleted, *, as_json: bool) -> None:
    from orchestration.show.deletions import exit_code_of, show_failures
    from orchestration.text import bytes_text, count_text

    if as_json:
        print_json({"job": job, **dataclasses.asdict(done)})
    else:
        ids = ", ".join(map(str, done.snapshot_ids[:10])) + (" …" if len(done.snapshot_ids) > 10 else "")
        print(
            f"{job}: deleted {count_text(len(done.snapshot_ids))} snapshots{f' ({ids})' if ids else ''}, "
            f"{count_text(done.objects)} objects, {bytes_text(done.bytes)}"
        )
        show_failures(done.failures, done.kept)
    _exit(exit_code_of(done.failures, done.kept))


def _exit(code: int) -> None:
    if code:
        raise typer.Exit(code)


# --- retention -------------------------------------------------------------------------------------------------------


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
        str | None, typer.Option(metavar="DURATION", help="Evict what is older.", show_default=False)
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
    """Show which snapshots the rules keep and why, and which would be deleted. Only looks.

    Without a rule here, those of the job's `retention` section count. Windows are measured from the newest snapshot,
    and the newest is always kept, as is whatever somebody needs.
    """
    from orchestration.show.deletions import retention_json, retention_table
    from state_runtime.base.settings import RetentionPolicy
    from state_runtime.maintenance.retention.apply import make_retention_plan
    from state_runtime.maintenance.retention.plan import write_retention_plan

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
    policy: RetentionPolicy = RetentionPolicy(**given) if any(given.values()) else to_policy(spec)
    plan = make_retention_plan(
        _root(job, config),
        policy,
        clock=SYSTEM_CLOCK,
        share_max=spec.retention.deleted_share_max if max_share is None else max_share,
    )
    said = keep_plan(spec, "retention", lambda file: write_retention_plan(file, plan), out)
    if as_json:
        print_json(retention_json(plan))
    else:
        print_table(retention_table(plan))
        print(said)


@retention_app.command("apply", epilog="Example: stillstate retention apply flights")
@guarded
def retention_apply(plan_file: PlanArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Execute a job's newest plan of retention, or one in a file. Refused if it is stale: of another job, old, or if it
    would delete what is to be kept now."""
    from orchestration.show.deletions import exit_code_of, show_failures
    from orchestration.show.progress import count_bar
    from orchestration.text import bytes_text, count_text
    from state_runtime.maintenance.retention.apply import apply_retention
    from state_runtime.maintenance.retention.plan import read_retention_plan

    found = find_plan(plan_file, config, "retention")
    plan = read_retention_plan(found.file)
    job = plan.made.job
    found.check_job(job)
    with count_bar(f"retention of {job}", "objects") as on_progress:
        done = apply_retention(
            _root(job, config), plan, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, owner=_owner(), on_progress=on_progress
        )
    found.executed()
    if as_json:
        print_json({"job": job, **dataclasses.asdict(done)})
    else:
        print(
            f"{job}: deleted {count_text(len(done.snapshot_ids))} snapshots and {len(done.savepoints)} savepoints, "
            f"{count_text(done.objects)} objects, {bytes_text(done.bytes)}"
        )
        show_failures(done.failures, done.kept)
    _exit(exit_code_of(done.failures, done.kept))


# --- garbage collection ----------------------------------------------------------------------------------------------


@gc_app.command("plan", epilog="Example: stillstate gc plan flights")
@guarded
def gc_plan(
    job: JobArgument,
    min_age: Annotated[str, typer.Option(metavar="DURATION", help="Nothing younger is touched.")] = "24h",
    unsafe_min_age: Annotated[
        bool, typer.Option("--unsafe-min-age", help="Allow less than an hour: for a store whose clock never jumps.")
    ] = False,
    out: OutOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what nothing needs: objects without a snapshot, deletions that were cut short, what expired. Only looks.

    A job may run meanwhile. Refused if anything that is needed is missing or cannot be read: then nothing is garbage.
    """
    from orchestration.show.deletions import gc_json, gc_tables
    from orchestration.show.progress import count_bar
    from state_runtime.maintenance.gc.collect import plan_gc
    from state_runtime.maintenance.gc.plan import write_gc_plan

    spec = load_spec(config).job(job)
    with count_bar(f"list {job}", "objects") as on_listed:
        plan = plan_gc(
            _root(job, config),
            clock=SYSTEM_CLOCK,
            min_age_s=parse_duration_s(min_age),
            failed_ttl_s=spec.retention.failed_ttl_s,
            unsafe_min_age=unsafe_min_age,
            on_listed=on_listed,
        )
    said = keep_plan(spec, "gc", lambda file: write_gc_plan(file, plan), out)
    if as_json:
        print_json(gc_json(plan))
        return
    for part in gc_tables(plan):
        if isinstance(part, str):
            console().print(part, markup=False, highlight=False)
        else:
            print_table(part)
    print(said)


@gc_app.command("apply", epilog="Example: stillstate gc apply flights")
@guarded
def gc_apply(plan_file: PlanArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Look again, and delete what is in the plan and still garbage. Safe beside a running job, and twice at once."""
    from orchestration.show.deletions import exit_code_of, show_failures
    from orchestration.show.progress import count_bar
    from orchestration.text import bytes_text, count_text
    from state_runtime.maintenance.gc.collect import apply_gc
    from state_runtime.maintenance.gc.plan import read_gc_plan

    found = find_plan(plan_file, config, "gc")
    plan = read_gc_plan(found.file)
    job = plan.made.job
    found.check_job(job)
    with count_bar(f"collect {job}", "objects") as on_progress:
        done = apply_gc(
            _root(job, config), plan, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, owner=_owner(), on_progress=on_progress
        )
    found.executed()
    if as_json:
        print_json({"job": job, **dataclasses.asdict(done)})
    else:
        kinds = ", ".join(f"{count_text(n)} {kind}" for kind, n in sorted(done.objects.items())) or "nothing"
        print(f"{job}: deleted {kinds}; {bytes_text(done.bytes)}")
        if done.given_up or done.savepoints:
            print(f"ended the deletion of {len(done.given_up)} snapshots and {len(done.savepoints)} savepoints")
        if done.kept:
            print(f"{done.kept:,} objects of the plan stay: they are gone already, or not garbage any more")
        show_failures(done.failures, {})
    _exit(exit_code_of(done.failures, {}))


# --- pins ------------------------------------------------------------------------------------------------------------


@guarded
def pin(
    job: JobArgument,
    snapshot: Annotated[int, typer.Argument(metavar="SNAPSHOT", help="Id of a snapshot.")],
    note: Annotated[str, typer.Option("--note", help="Why.", show_default=False)] = "",
    lasts: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="Until then; else until `unpin`.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a snapshot until the pin is taken off: neither retention nor `delete` takes it."""
    from state_runtime.snapshot.pins import pin_snapshot

    catalog = catalog_of(load_spec(config).job(job))
    catalog.manifest(snapshot)
    placed = pin_snapshot(
        catalog.root,
        snapshot,
        reason="user",
        holder=_owner(),
        clock=SYSTEM_CLOCK,
        ids=SYSTEM_IDS,
        note=note,
        lasts_ms=int(parse_duration_s(lasts) * 1000) if lasts is not None else 0,
    )
    if as_json:
        print_json({"job": job, **dataclasses.asdict(placed)})
    else:
        print(f"{job}: snapshot {snapshot} is pinned ({placed.uid})")


@guarded
def unpin(
    job: JobArgument,
    snapshot: Annotated[int, typer.Argument(metavar="SNAPSHOT", help="Id of a snapshot.")],
    uid: Annotated[
        str | None,
        typer.Option("--pin", metavar="UID", help="Only this pin, whoever placed it.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take pins off a snapshot: those that users placed, or the one that is named."""
    from state_runtime.snapshot.pins import read_pins
    from state_runtime.snapshot.pins import unpin as take_off

    root = _root(job, config)
    found = [
        p
        for p in read_pins(root)
        if p.snapshot_id == snapshot and (p.uid == uid if uid is not None else p.reason == "user")
    ]
    if not found:
        raise MissingSnapshot(f"job {job!r} has no such pin of snapshot {snapshot}; `stillstate pins {job}` lists them")
    for placed in found:
        take_off(root, placed)
    if as_json:
        print_json({"job": job, "snapshot_id": snapshot, "unpinned": [p.uid for p in found]})
    else:
        print(f"{job}: {len(found)} pins taken off snapshot {snapshot}")


@guarded
def pins(job: OptionalJob = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List who holds which snapshot, and until when."""
    from orchestration.show.deletions import pins_table
    from state_runtime.snapshot.pins import read_pins

    spec = job_or_only(load_spec(config), job)
    found = read_pins(_root(spec.name, config))
    if as_json:
        print_json([dataclasses.asdict(p) for p in found])
    else:
        print_table(pins_table(spec.name, found, SYSTEM_CLOCK.now_ms()))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate delete flights 17 18 --dry-run")(delete)
    app.add_typer(retention_app, name="retention")
    app.add_typer(gc_app, name="gc")
    app.command(epilog="Example: stillstate pin flights 17 --note 'before the upgrade'")(pin)
    app.command(epilog="Example: stillstate unpin flights 17")(unpin)
    app.command(epilog="Example: stillstate pins flights")(pins)
