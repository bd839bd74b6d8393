"""The work of an epoch that needs no row: timers, windows, and shards that were never visited; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.shard_index import ShardIndex
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.manifest import TimeEntry

__all__ = ["did_due", "fires_at", "is_anything_due", "woken"]


def is_anything_due(operators: Sequence[Operator], shards: ShardIndex, before: TimeEntry, time: TimeEntry) -> bool:
    """Return whether an epoch without a batch has something to do: processing time has reached a timer, or the
    watermark moved.

    Args:
        before: the head's clock.
        time: the clock that the epoch would have.
    """
    if any(o.time_domain == "event" and time.watermark_of(o.uid) > before.watermark_of(o.uid) for o in operators):
        return True
    return any(_due_shards(o, shards, time) for o in operators if o.time_domain == "processing")


def woken(
    operators: Sequence[Operator],
    shards: ShardIndex,
    time: TimeEntry,
    batch: BatchProgress | None,
    does_due: Collection[str],
    parallelism: int,
    *,
    makes_tables: Collection[str] = (),
    feeds_tables: Collection[str] = (),
) -> dict[str, list[int]]:
    """Return per operator uid the shards that an epoch visits even if no row comes.

    Args:
        time: the epoch's clock.
        batch: that the epoch continues, or begins.
        does_due: uids of the operators that do their due work in this epoch.
        makes_tables: uids of the operators in complete mode. If one has work, or an operator of `feeds_tables` before
            it, all their shards are visited: a shard that was not would be missing in the table.
    """
    found: dict[str, list[int]] = {}
    for operator in operators:
        uid = operator.uid
        visited = set(shards.unvisited.get(uid, ()))
        is_event = operator.time_domain == "event"
        if (not is_event or uid in does_due) and not did_due(operator, batch):
            visited.update(_due_shards(operator, shards, time))
        if batch is not None:
            visited.update(batch.rows_of_shards(uid, parallelism))
        found[uid] = sorted(visited)
    if batch is not None or any(found[uid] for uid in feeds_tables):
        found |= {uid: list(range(parallelism)) for uid in makes_tables}
    return found


def did_due(operator: Operator, batch: BatchProgress | None) -> bool:
    """Return whether an operator has done the work that the batch made due. Work that results from it (a timer that
    fired and set one that is due already) is due with the next batch, however many epochs this batch takes.

    By processing time each epoch has a separate clock: once the operator's rows are done, its timers fire when their
    time comes.
    """
    if batch is None:
        return False
    # True of shards without rows. Shards with rows are visited for them, and do their due work when the rows are done.
    has_begun = batch.begun_with == operator.uid
    return has_begun or (operator.time_domain == "event" and operator.uid in batch.settled)


def fires_at(operators: Sequence[Operator], shards: ShardIndex, watermark_ms: int) -> bool:
    """Return whether an event-time timer or window is left that such a watermark fires."""
    return any(shards.due(o.uid, watermark_ms) for o in operators if o.time_domain == "event")


def _due_shards(operator: Operator, shards: ShardIndex, time: TimeEntry) -> list[int]:
    watermark_ms = time.watermark_of(operator.uid)
    now_ms = {"": None, "processing": time.batch_time_ms, "event": watermark_ms}[operator.time_domain]
    return [] if now_ms is None else shards.due(operator.uid, now_ms)
