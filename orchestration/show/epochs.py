"""Output of `stillstate epochs`: the tasks of one epoch with the slowest first, and the newest epochs; no I/O."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from state_runtime.snapshot.epoch_tasks import EpochTasks, OtherTasks, RunEpochs, TaskNumbers
from stillstate.orchestration.show.tables import new_table
from stillstate.orchestration.text import bytes_text, count_text, duration_text, time_text

__all__ = ["epochs_json", "epochs_table", "others_text", "tasks_table"]

_RESTORED: Final = {"": "", "local": "local", "stale": "local and log", "primary": "primary store"}


def epochs_json(job: str, told: RunEpochs | None) -> dict[str, Any]:
    """Return the document as it is, with the time of each task."""
    if told is None:
        return {"job": job, "term": None, "epochs": []}
    epochs = []
    for epoch in told.epochs:
        tasks = [{**asdict(task), "took_ms": task.took_ms} for task in epoch.tasks]
        epochs.append({**asdict(epoch), "tasks": tasks})
    return {"job": job, "term": told.term, "epochs": epochs}


def tasks_table(job: str, epoch: EpochTasks, limit: int) -> Table:
    """The tasks of one epoch, the slowest first."""
    table = new_table(
        f"Epoch {epoch.epoch} of {job}",
        "operator/shard",
        "took>",
        "rows in>",
        "processed>",
        "in flight>",
        "slices>",
        "changed>",
        "spilled>",
        "restored from",
        "restore>",
        "began",
        "last row",
        "executor",
    )
    for task in epoch.tasks[:limit]:
        table.add_row(
            Text(_name(task)),
            _took(task),
            count_text(task.input_rows),
            count_text(task.processed_rows),
            count_text(task.left_rows),
            count_text(task.slices),
            bytes_text(task.changed_bytes),
            bytes_text(task.spilled_bytes),
            _RESTORED.get(task.restored, task.restored),
            duration_text(task.restore_ms / 1000) if task.restored else "",
            _clock(task.began_at_ms),
            _clock(task.processed_at_ms),
            Text(task.executor),
        )
    return table


def others_text(epoch: EpochTasks, limit: int) -> str:
    """Return a line on what the table of an epoch leaves out; empty if it is complete."""
    cut = epoch.tasks[limit:]
    others = epoch.others
    parts = [others] if others is not None else []
    count = len(cut) + sum(o.tasks for o in parts)
    if not count:
        return ""
    each: list[TaskNumbers | OtherTasks] = [*cut, *parts]
    longest_ms = max(one.took_ms for one in each)
    return (
        f"{count_text(count)} more tasks, none above {duration_text(longest_ms / 1000)}: "
        f"{count_text(sum(one.input_rows for one in each))} rows in, "
        f"{count_text(sum(one.processed_rows for one in each))} processed, "
        f"{count_text(sum(one.left_rows for one in each))} in flight, "
        f"{bytes_text(sum(one.changed_bytes for one in each))} changed"
    )


def epochs_table(job: str, told: RunEpochs) -> Table:
    """The newest epochs, one a line, each with its slowest task."""
    table = new_table(
        f"Newest epochs of {job}, term {told.term}",
        "epoch>",
        "batch>",
        "tasks>",
        "processed>",
        "in flight>",
        "slowest",
        "took>",
        "alignment>",
        "snapshot>",
        "durable",
    )
    for epoch in told.epochs:
        each: list[TaskNumbers | OtherTasks] = [*epoch.tasks, *([epoch.others] if epoch.others is not None else [])]
        table.add_row(
            str(epoch.epoch),
            str(epoch.batch_id),
            count_text(len(epoch.tasks) + (epoch.others.tasks if epoch.others is not None else 0)),
            count_text(sum(one.processed_rows for one in each)),
            count_text(sum(one.left_rows for one in each)),
            Text(_name(epoch.tasks[0]) if epoch.tasks else "-"),
            _took(epoch.tasks[0]) if epoch.tasks else "-",
            duration_text(epoch.alignment_ms / 1000) if epoch.alignment_ms else "-",
            str(epoch.snapshot_id) if epoch.snapshot_id else "-",
            time_text(epoch.durable_at_ms) if epoch.snapshot_id else "not yet",
        )
    return table


def _name(task: TaskNumbers) -> str:
    return f"{task.operator}/{task.shard}"


def _took(task: TaskNumbers) -> str:
    return duration_text(task.took_ms / 1000) if task.began_at_ms else "-"


def _clock(at_ms: int) -> str:
    return time_text(at_ms).partition(" ")[2] if at_ms else "-"
