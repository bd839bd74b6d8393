"""`stillstate delete`, `pin`, `unpin` and `pins`: delete snapshots, and keep them from being deleted."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.durations import parse_duration_s
from state_runtime.base.errors import InvalidConfiguration, MissingSnapshot
from state_runtime.base.ids import SYSTEM_IDS
from stillstate.orchestration.commands.base import (
    ConfigOption,
    JobArgument,
    JsonOption,
    OptionalJob,
    catalog_of,
    guarded,
    job_or_only,
    print_json,
    print_table,
)
from stillstate.orchestration.config.spec import load_spec

if TYPE_CHECKING:
    from state_runtime.maintenance.delete.snapshots import Deleted
    from state_runtime.store import Store

__all__ = ["register"]

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


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
    """Delete snapshots, a savepoint or a whole job.

    Refused if a run, a pin or another user needs it; the refusal names
    it.

    From the first step on, the deleted snapshots cannot be opened; files that other snapshots need are kept. If the
    command is interrupted, run it again to finish.
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
    """Return the job root, or what is left of it: a half-deleted job may have only some of its files."""
    return catalog_of(load_spec(config).job(job)).root


def _delete_snapshots(
    root: Store, job: str, ids: list[int], *, damaged: bool, dry_run: bool, yes: bool, as_json: bool
) -> Deleted | None:
    from state_runtime.maintenance.delete.snapshots import delete_snapshots, plan_deletion
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.progress import count_bar
    from stillstate.orchestration.text import bytes_text, count_text

    ids = list(dict.fromkeys(ids))
    plan = plan_deletion(root, ids, clock=SYSTEM_CLOCK, damaged=damaged)
    what = (
        f"{job}: {count_text(len(ids))} snapshots with {count_text(plan.objects)} objects ({bytes_text(plan.bytes)}) "
        f"that nothing else needs; {count_text(plan.shared_objects)} objects stay, because others need them."
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
    from state_runtime.maintenance.delete.roots import delete_savepoint
    from state_runtime.snapshot.savepoint_record import read_savepoint
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.progress import count_bar
    from stillstate.orchestration.text import bytes_text

    record = read_savepoint(root, name)
    what = f"savepoint {name!r} of {job} ({record.state}, {bytes_text(record.total_bytes)})"
    if dry_run:
        print(f"would delete {what}")
        return None
    confirm(f"Delete {what}?", yes=yes)
    with count_bar(f"delete {name}", "objects") as on_progress:
        return delete_savepoint(root, name, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS, owner=_owner(), on_progress=on_progress)


def _delete_root(root: Store, job: str, *, with_savepoints: bool, dry_run: bool, yes: bool) -> Deleted | None:
    from state_runtime.maintenance.delete.roots import delete_root
    from state_runtime.snapshot.paths import SNAPSHOTS_DIR
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.progress import count_bar

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
    from stillstate.orchestration.show.deletions import exit_code_of, show_failures
    from stillstate.orchestration.text import bytes_text, count_text

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
    """Keep a snapshot from deletion until the pin is removed.

    Neither retention nor `delete` deletes it.
    """
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
        typer.Option("--pin", metavar="UID", help="Only this pin, also if another user placed it.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove pins from a snapshot.

    Those that users placed, or the one that is named.
    """
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
    """List the pins: snapshot, holder, until when."""
    from state_runtime.snapshot.pins import read_pins
    from stillstate.orchestration.show.deletions import pins_table

    spec = job_or_only(load_spec(config), job)
    found = read_pins(_root(spec.name, config))
    if as_json:
        print_json([dataclasses.asdict(p) for p in found])
    else:
        print_table(pins_table(spec.name, found, SYSTEM_CLOCK.now_ms()))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate delete flights 17 18 --dry-run")(delete)
    app.command(epilog="Example: stillstate pin flights 17 --note 'before the upgrade'")(pin)
    app.command(epilog="Example: stillstate unpin flights 17")(unpin)
    app.command(epilog="Example: stillstate pins flights")(pins)
