"""Slices of due timers for user code, and the check of rows that it may not emit; pure parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.processors.event_time import is_late
from state_runtime.state.table import Hashes, Positions, StateSchema, first_of_groups, hashes_of, int64_values

__all__ = ["DueTimers", "due_slices", "too_early"]


@dataclass(frozen=True)
class DueTimers:
    """A slice of due timers, in the order in which they fire.

    Attributes:
        groups: per timer the number of its key.
        times_ms: per timer its time.
        hashes, keys: of the keys, sorted by hash.
    """

    groups: Positions
    times_ms: Positions
    hashes: Hashes
    keys: list[pa.Array]


def due_slices(due: pa.RecordBatch, schema: StateSchema, timers_max: int) -> Iterator[DueTimers]:
    """Cut the result of `StateReader.due` into slices, in order of time; a key may be in several of them."""
    due = due.take(pa.array(np.argsort(int64_values(schema.times_of(due)), kind="stable")))
    for low in range(0, due.num_rows, timers_max):
        piece = due.slice(low, timers_max)
        order = np.argsort(hashes_of(piece), kind="stable")
        at = pa.array(order)
        keys = [k.take(at) for k in schema.keys_of(piece)]
        regroup, first = first_of_groups(hashes_of(piece)[order], keys)
        if regroup is not None:
            order = order[regroup]
            keys = [k.take(pa.array(regroup)) for k in keys]
        groups = np.empty(len(order), dtype=np.int64)
        groups[order] = np.cumsum(first) - 1
        picked = pa.array(first)
        times = schema.times_of(piece).to_numpy(zero_copy_only=False)
        yield DueTimers(groups, times, hashes_of(piece)[order][first], [k.filter(picked) for k in keys])


def too_early(batch: pa.RecordBatch, column: str, late_watermark_ms: int) -> bool:
    """Return whether a row's event time is at or below the late watermark: Spark lets no operator emit such a row."""
    return bool(is_late(batch.column(column), late_watermark_ms).any())
