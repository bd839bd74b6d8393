"""Output of the commands that delete: tables with reasons and sizes, results; and the question before a deletion."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.maintenance.delete.snapshots import Failure
from state_runtime.maintenance.gc.plan import GcPlan
from state_runtime.maintenance.retention.plan import RetentionPlan
from state_runtime.maintenance.retention.policy import Decision
from state_runtime.snapshot.pins import SnapshotPin
from stillstate.orchestration.show.tables import new_table
from stillstate.orchestration.text import bytes_text, count_text, duration_text, time_text

__all__ = [
    "confirm",
    "exit_code_of",
    "gc_json",
    "gc_tables",
    "pins_table",
    "retention_json",
    "retention_table",
    "show_failures",
]

_ROWS_MAX = 200
_FAILURES_MAX = 20


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation, if a person can answer.

    Raises:
        InvalidConfiguration: no person can, and --yes was not given. Exit: the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidConfiguration(f"{question} There is no terminal to ask: give --yes, or --dry-run to see the plan")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def show_failures(failures: Sequence[Failure], kept: Mapping[int, Sequence[str]]) -> None:
    """Print on stderr what was not deleted: each key with its reason."""
    for snapshot_id, holders in kept.items():
        print(f"snapshot {snapshot_id} stays: {'; '.join(holders)}", file=sys.stderr)
    for failure in failures[:_FAILURES_MAX]:
        print(f"{failure.path}: {failure.message}", file=sys.stderr)
    if len(failures) > _FAILURES_MAX:
        print(f"and {len(failures) - _FAILURES_MAX:,} more; --json lists all", file=sys.stderr)
    if failures:
        print("Repeat the command to try the rest again; `stillstate gc` removes it too.", file=sys.stderr)


def exit_code_of(failures: Sequence[Failure], kept: Mapping[int, Sequence[str]]) -> int:
    """Return 4 (try again) if something was not deleted."""
    return 4 if failures or kept else 0


def retention_table(plan: RetentionPlan) -> Table:
    """Return a table of every snapshot, its treatment and the reason; the newest first, and of many only the first."""
    deleted = plan.deleted
    title = (
        f"{plan.made.job}: {count_text(len(plan.kept))} kept, {count_text(len(deleted))} deleted "
        f"({bytes_text(plan.freed_bytes)} are freed; files that others need stay)"
    )
    table = new_table(title, "", "snapshot", "of", "state>", "freed>", "why")
    shown = plan.decisions[:_ROWS_MAX]
    for decision in shown:
        item = decision.item
        table.add_row(
            Text("keep", "green") if decision.kept else Text("delete", "red"),
            Text(item.name if item.kind == "checkpoint" else f"savepoint {item.name}"),
            time_text(item.created_at_ms),
            bytes_text(item.bytes),
            "" if decision.kept else bytes_text(decision.freed_bytes),
            Text("; ".join(decision.reasons) or "no rule keeps it"),
        )
    if len(plan.decisions) > len(shown):
        table.caption = f"and {len(plan.decisions) - len(shown):,} older ones; --json lists all"
    return table


def retention_json(plan: RetentionPlan) -> dict[str, Any]:
    """Return the plan for `--json`."""

    def row(decision: Decision) -> dict[str, Any]:
        item = decision.item
        return {
            "kind": item.kind,
            "name": item.name,
            "created_at_ms": item.created_at_ms,
            "bytes": item.bytes,
            "freed_bytes": decision.freed_bytes,
            "tags": list(item.tags),
            "kept": decision.kept,
            "reasons": list(decision.reasons),
        }

    return {
        "job": plan.made.job,
        "newest_snapshot_id": plan.made.newest_snapshot_id,
        "kept": len(plan.kept),
        "deleted": len(plan.deleted),
        "snapshots": [row(d) for d in plan.decisions],
    }


def gc_tables(plan: GcPlan) -> Iterator[Table | str]:
    """Yield the objects that would be deleted, by kind and reason; and those that are kept."""
    title = f"{plan.made.job}: {count_text(len(plan.candidates))} objects, {bytes_text(plan.bytes)} to delete"
    table = new_table(title, "kind", "objects>", "bytes>", "why")
    groups: dict[tuple[str, str], list[int]] = {}
    for candidate in plan.candidates:
        groups.setdefault((candidate.kind, candidate.reason), []).append(candidate.bytes)
    for (kind, reason), sizes in sorted(groups.items()):
        table.add_row(kind, count_text(len(sizes)), bytes_text(sum(sizes)), reason)
    for snapshot_id in plan.given_up:
        table.add_row("snapshot", "", "", f"{snapshot_id} has expired, and its deletion was interrupted")
    for name, why in plan.savepoints:
        table.add_row("savepoint", "", "", Text(f"{name}: {why}"))
    yield table if table.row_count else f"{plan.made.job}: nothing to delete"
    yield f"needed: {count_text(plan.needed_objects)} objects, {bytes_text(plan.needed_bytes)}"
    yield (
        f"too young to tell: {count_text(plan.young_objects)} objects, {bytes_text(plan.young_bytes)} "
        f"(younger than the newest snapshot less {duration_text(plan.min_age_s)})"
    )
    if plan.foreign_objects:
        yield f"not of Stillstate, kept: {plan.foreign_objects:,}, for example {', '.join(plan.foreign[:3])}"
    if plan.is_cut:
        yield "there is more than one plan may hold; apply it, and plan again"


def gc_json(plan: GcPlan) -> dict[str, Any]:
    """Return the plan for `--json`."""
    return {**dataclasses.asdict(plan), "bytes": plan.bytes}


def pins_table(job: str, pins: Sequence[SnapshotPin], now_ms: int) -> Table:
    """Return a table of the pins and their snapshots."""
    title = f"{job}: {len(pins)} pins"
    table = new_table(title, "snapshot>", "pin", "by", "reason", "since", "until", "note")
    for pin in pins:
        until = "taken off" if not pin.expires_at_ms else time_text(pin.expires_at_ms)
        table.add_row(
            str(pin.snapshot_id),
            pin.uid,
            Text(pin.holder),
            pin.reason,
            time_text(pin.created_at_ms),
            f"{until} (expired)" if pin.is_void(now_ms) else until,
            Text(pin.note),
        )
    return table
