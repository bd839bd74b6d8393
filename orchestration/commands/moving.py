"""`stillstate copy`, `move` and `verify`: copy and move snapshots, savepoints and whole jobs between stores, and check
that they are complete."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.settings import VerifyLevel
from stillstate.orchestration.commands.base import ConfigOption, JsonOption, guarded, print_json, this_process

if TYPE_CHECKING:
    from state_runtime.maintenance.move.execute import MoveResult
    from state_runtime.maintenance.move.plan import MovePlan
    from state_runtime.snapshot.handover import MoveMode
    from state_runtime.store import Store

__all__ = ["register"]


Compare = Literal["default", "full"]
PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLACE",
        help="<store>/<job>: all of a job; <store>/<job>@<id>: one snapshot; <store>/<job>/savepoints/<name>. "
        "A job of stillstate.yaml may be named instead of <store>/<job>.",
    ),
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A folder that does not exist yet, on any store.")
]
CompareOption = Annotated[
    Compare,
    typer.Option(
        "--verify",
        help="full: read every object in the target and compare its digest, also where the store copies by itself.",
    ),
]
IndependentOption = Annotated[
    bool,
    typer.Option(
        "--independent",
        help="Copy the bytes where a copy would be a hard link (local stores): then damage to one is not damage "
        "to the other.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=256, help="Objects at a time.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: stillstate copy /data/state/flights@120 s3://backup/flights-120")(copy)
    app.command(epilog="Example: stillstate move /data/state/flights s3://lake/state/flights")(move)
    app.command(epilog="Example: stillstate verify s3://lake/state/flights --level full")(verify)


@guarded
def copy(
    place: PlaceArgument,
    target: TargetArgument,
    compare: CompareOption = "default",
    independent: IndependentOption = False,
    dry_run: DryRunOption = False,
    threads: ThreadsOption = 16,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a snapshot, a savepoint or a whole job to a store.

    The source is only read, and may be
    running.

    The copy has the same files under the same names, so it restores as the original does. If the command is
    interrupted, run it again: it continues. A copy of a whole job is a backup: run only one of the two. To run both,
    start a new job from a snapshot.
    """
    _carry("copy", place, target, compare, dry_run, threads, config, yes=True, independent=independent, as_json=as_json)


@guarded
def move(
    place: PlaceArgument,
    target: TargetArgument,
    compare: CompareOption = "default",
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    abort: Annotated[
        bool, typer.Option("--abort", help="Take back a move that was cut; the source is free again.")
    ] = False,
    threads: ThreadsOption = 16,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a snapshot, a savepoint or a whole job.

    The source is deleted last, after the whole target was compared.

    The job must be stopped, and it cannot be started while it is moved. If the command is interrupted at any point, run
    it again: it continues.
    """
    if abort:
        from state_runtime.maintenance.move.execute import abort_move

        source, into = _ends(place, target, config)[:2]
        abort_move(source, into, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)
        if as_json:
            print_json({"aborted": True, "source": source.url, "target": into.url})
        else:
            print(f"{source.url} is free again; what lies in {into.url} is not used by anybody, remove it")
        return
    _carry("move", place, target, compare, dry_run, threads, config, yes=yes, as_json=as_json)


def _ends(place: str, target: str, config: Path | None) -> tuple[Store, Store, int | None, Store | None]:
    """Return source, target, the snapshot that is meant, and the job root that the source is a savepoint of."""
    from state_runtime.snapshot.locate import Place
    from state_runtime.store import open_store
    from stillstate.orchestration.commands.places import named_place

    named, to = named_place(place, config), named_place(target, config)
    where = Place.parse(named.text)
    if Place.parse(to.text).snapshot_id is not None:
        raise InvalidConfiguration(f"{target} names a snapshot; the target is a folder that does not exist yet")
    source = open_store(where.root_url, named.options)
    parent = _parent_of(source, named.options)
    return source, open_store(to.text.rstrip("/"), to.options), where.snapshot_id, parent


def _parent_of(folder: Store, options: Mapping[str, Any]) -> Store | None:
    """Return the job root that a folder is a savepoint of, judged by its path."""
    from state_runtime.snapshot.paths import SAVEPOINTS_DIR
    from state_runtime.store import open_store

    above, _, _ = folder.url.rpartition("/")
    root, _, name = above.rpartition("/")
    return open_store(root, options) if name == SAVEPOINTS_DIR and root else None


def _carry(
    mode: MoveMode,
    place: str,
    target: str,
    compare: Compare,
    dry_run: bool,
    threads: int,
    config: Path | None,
    *,
    yes: bool,
    independent: bool = False,
    as_json: bool,
) -> None:
    from state_runtime.maintenance.move.execute import execute_move
    from state_runtime.maintenance.move.plan import plan_move
    from stillstate.orchestration.show.deletions import confirm
    from stillstate.orchestration.show.moves import plan_text, result_text
    from stillstate.orchestration.show.progress import bytes_bar

    source, into, snapshot_id, parent = _ends(place, target, config)
    plan = plan_move(source, into, mode=mode, snapshot_id=snapshot_id, clock=SYSTEM_CLOCK)
    if dry_run:
        _show(plan, None, f"would {plan_text(plan)}", as_json=as_json)
        return
    question = plan_text(plan)
    confirm(f"{question[:1].upper()}{question[1:]}?", yes=yes)
    with bytes_bar(f"{mode} {plan.job.name}") as bar:
        result = execute_move(
            source,
            into,
            plan,
            parent=parent,
            full=compare == "full",
            independent=independent,
            progress=None if bar is None else lambda now: bar(now.bytes_done, now.bytes),
            threads=threads,
            actor=this_process(),
        )
    _show(plan, result, result_text(result), as_json=as_json)


def _show(plan: MovePlan, result: MoveResult | None, text: str, *, as_json: bool) -> None:
    from stillstate.orchestration.show.moves import move_json

    if as_json:
        print_json(move_json(plan, result))
    else:
        print(text)


@guarded
def verify(
    place: PlaceArgument,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            "--level",
            help="structure: manifests, and that every file is there with its size; sample: also read a share of the "
            "files; "
            "full: read and decode all of them.",
        ),
    ] = "structure",
    share: Annotated[
        float, typer.Option("--share", min=0.0, max=100.0, help="Of sample: how many percent of the files.")
    ] = 10.0,
    seed: Annotated[
        str,
        typer.Option("--seed", metavar="TEXT", help="Of sample: another seed reads other files.", show_default=False),
    ] = "",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help=(
                "A file that records what was verified; the same command with the same file continues where it "
                "was interrupted."
            ),
            show_default=False,
        ),
    ] = None,
    threads: ThreadsOption = 8,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that the files of snapshots are there and undamaged.

    Each missing or damaged file is named, with the state that it holds. Nothing
    is written to the store.

    The exit code is 0 if nothing was found, 5 if something is missing or damaged, 6 if something was written by a newer
    version, and 4 if something could not be reached, which says nothing about the data.
    """
    from state_runtime.maintenance.verify.places import FoundGood, verify_place
    from state_runtime.snapshot.catalog import Catalog
    from state_runtime.snapshot.locate import Place
    from state_runtime.store import open_store
    from stillstate.orchestration.commands.places import named_place
    from stillstate.orchestration.show.moves import report_json, show_report
    from stillstate.orchestration.show.progress import bytes_bar

    named = named_place(place, config)
    where = Place.parse(named.text)
    root = open_store(where.root_url, named.options)
    job = Catalog.of_root(root).job
    noted: Any = FoundGood(report, place=str(where), level=level) if report is not None else nullcontext()
    with noted as good, bytes_bar(f"verify {job}") as bar:
        found = verify_place(
            root,
            snapshot_id=where.snapshot_id,
            level=level,
            share=share / 100,
            seed=seed,
            good=good,
            parent=_parent_of(root, named.options),
            progress=None if bar is None else lambda _, now: bar(now.bytes_done, now.bytes),
            threads=threads,
            clock=SYSTEM_CLOCK,
            ids=SYSTEM_IDS,
        )
    if as_json:
        print_json(report_json(job, found))
    else:
        show_report(job, found)
    if found.exit_code:
        raise typer.Exit(found.exit_code)
