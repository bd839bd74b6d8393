"""A new position of a source, for people and as a document; pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from stillstate.orchestration.text import count_text, time_text

if TYPE_CHECKING:
    from state_runtime.driver.set_source import SetSourcePlan
    from state_runtime.sources.kafka_seek import PartitionMove

__all__ = ["moved_most", "seek_table", "seek_text", "seek_values"]

_PARTITIONS_SHOWN = 50


def seek_text(job: str, plan: SetSourcePlan) -> str:
    """Return what a move does."""
    moves, time = plan.seek.moves, plan.newest.time
    skipped, again = sum(move.skipped for move in moves), sum(move.again for move in moves)
    told = [f"{count_text(skipped)} records are skipped"] if skipped else []
    told += [f"{count_text(again)} records are read again, and count again"] if again else []
    late = ""
    if again and time is not None and time.watermark_ms:
        late = f" What is older than the watermark, {time_text(time.watermark_ms)}, is late."
    return (
        f"{job}: source {plan.source} goes on elsewhere than in snapshot {plan.newest.snapshot_id}: "
        f"{' and '.join(told) or 'no record is skipped or read again'}. The state is kept.{late}"
    )


def moved_most(plan: SetSourcePlan) -> list[PartitionMove]:
    """Return the partitions in order; of many only those that move most."""
    most = sorted(plan.seek.moves, key=lambda move: -(move.skipped + move.again))[:_PARTITIONS_SHOWN]
    return sorted(most, key=lambda move: (move.topic, move.partition))


def seek_table(plan: SetSourcePlan) -> Table:
    """Return the partitions that move most."""
    moves, most = plan.seek.moves, moved_most(plan)
    table = Table("topic", "partition", "was", "will be", "skipped", "again", box=None)
    for move in most:
        was = "-" if move.was is None else f"{move.was:,}"
        numbers = (was, f"{move.will_be:,}", f"{move.skipped:,}", f"{move.again:,}")
        table.add_row(move.topic, str(move.partition), *numbers)
    if len(moves) > len(most):
        table.add_row(f"… and {count_text(len(moves) - len(most))} more partitions", *[""] * 5)
    return table


def seek_values(job: str, plan: SetSourcePlan) -> dict[str, Any]:
    """Return a move as a document."""
    moves = plan.seek.moves
    return {
        "job": job,
        "source": plan.source,
        "snapshot_id": plan.newest.snapshot_id,
        "skipped": sum(move.skipped for move in moves),
        "again": sum(move.again for move in moves),
        "partitions": [asdict(move) for move in moves],
    }
