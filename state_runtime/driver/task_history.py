"""The driver's record of the tasks of its newest epochs, bounded at any parallelism; pure.

Of an epoch with many tasks the interesting ones are kept: the slowest, and those whose shards have most rows in flight.
These two differ where all tasks stop at a deadline. The others are summed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from state_runtime.base.progress import Progress
from state_runtime.snapshot.epoch_tasks import EpochTasks, OtherTasks, TaskNumbers
from state_runtime.task.acknowledgement import Acknowledgement

__all__ = ["EPOCHS_MAX", "MOST_LEFT_MAX", "SLOWEST_MAX", "TaskHistory", "epoch_of"]

EPOCHS_MAX = 10
SLOWEST_MAX = 32
MOST_LEFT_MAX = 8
_EXECUTOR_CHARS_MAX = 64


@dataclass(frozen=True)
class TaskHistory:
    """The newest epochs, newest first; each step makes a new value."""

    epochs: tuple[EpochTasks, ...] = ()

    def after(self, epoch: EpochTasks) -> TaskHistory:
        """Return the history with one more epoch. An epoch without tasks only moved a clock: it is not added, because
        it would push out epochs of interest."""
        return TaskHistory((epoch, *self.epochs)[:EPOCHS_MAX]) if epoch.tasks else self

    def durable(self, epoch: int, *, snapshot_id: int, at_ms: int) -> TaskHistory:
        """Return the history after a snapshot that ends with `epoch`."""
        if not any(e.epoch <= epoch and not e.snapshot_id for e in self.epochs):
            return self
        return TaskHistory(
            tuple(
                replace(e, snapshot_id=snapshot_id, durable_at_ms=at_ms)
                if e.epoch <= epoch and not e.snapshot_id
                else e
                for e in self.epochs
            )
        )


def epoch_of(numbers: Progress, acknowledged: Iterable[tuple[str, Acknowledgement]]) -> EpochTasks:
    """Return the record of one epoch.

    Args:
        numbers: of all of its tasks together.
        acknowledged: for each task the operator's uid and the acknowledgement.
    """
    found = sorted((_Ranked.of(uid, a) for uid, a in acknowledged), key=_slowest_first)
    slowest, rest = found[:SLOWEST_MAX], found[SLOWEST_MAX:]
    most_left = sorted((r for r in rest if r.left_rows), key=lambda r: -r.left_rows)[:MOST_LEFT_MAX]
    kept = {id(r) for r in most_left}
    return EpochTasks(
        epoch=numbers.epoch,
        batch_id=numbers.batch_id,
        tasks=tuple(_numbers(r) for r in sorted((*slowest, *most_left), key=_slowest_first)),
        others=_others([r for r in rest if id(r) not in kept]),
        alignment_ms=numbers.alignment_ms,
    )


class _Ranked(NamedTuple):
    """A task, for ranking: of a thousand, most are only summed up."""

    took_ms: int
    left_rows: int
    operator: str
    done: Acknowledgement

    @staticmethod
    def of(uid: str, a: Acknowledgement) -> _Ranked:
        took_ms = max(0, a.processed_at_ms - a.began_at_ms) if a.began_at_ms else 0
        return _Ranked(took_ms, sum(p.rows for parts in a.left.values() for p in parts) if a.left else 0, uid, a)


def _slowest_first(ranked: _Ranked) -> tuple[int, int, str, int]:
    return -ranked.took_ms, -ranked.left_rows, ranked.operator, ranked.done.shard


def _changed_bytes(a: Acknowledgement) -> int:
    return a.changes.bytes + a.files.totals.bytes


def _numbers(ranked: _Ranked) -> TaskNumbers:
    a = ranked.done
    return TaskNumbers(
        operator=ranked.operator,
        shard=a.shard,
        input_rows=a.input_rows,
        processed_rows=a.processed_rows,
        left_rows=ranked.left_rows,
        slices=a.slices,
        began_at_ms=a.began_at_ms,
        processed_at_ms=a.processed_at_ms,
        changed_bytes=_changed_bytes(a),
        uploaded_bytes=a.changes.uploads.bytes + a.files.totals.bytes,
        spilled_bytes=a.spilled_bytes,
        restored=a.restored,
        restore_ms=a.restore_ms,
        executor=a.executor[:_EXECUTOR_CHARS_MAX],
    )


def _others(ranked: Sequence[_Ranked]) -> OtherTasks | None:
    if not ranked:
        return None
    return OtherTasks(
        tasks=len(ranked),
        input_rows=sum(r.done.input_rows for r in ranked),
        processed_rows=sum(r.done.processed_rows for r in ranked),
        left_rows=sum(r.left_rows for r in ranked),
        changed_bytes=sum(_changed_bytes(r.done) for r in ranked),
        took_ms=max(r.took_ms for r in ranked),
    )
