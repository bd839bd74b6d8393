"""How a shard's epoch is cut for user code: passes, each of them in slices of keys; pure parts.

A *pass* is one of: rows of the initial state, input rows, due timers. A *slice* is what is in Python objects at a time.
The slices of the first two passes hold different keys, in order of their hashes, so what they change is put one after
the other; a later pass, and a later slice of timers, sees what was changed before it on top of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.processors.event_time import is_late
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.user.scope import SliceState
from state_runtime.state.table import Hashes, Positions, StateSchema, concat, first_of_groups, fold, hashes_of

__all__ = ["Changes", "DueTimers", "due_slices", "slices_of", "too_early"]


def slices_of(rows: GroupedRows, keys_max: int, rows_max: int) -> Iterator[GroupedRows]:
    """Cut groups into runs of at most so many keys and rows; a key's rows stay together, however many they are.

    Keys of equal hashes stay together too: what the slices change must be sorted when it is put one after the other.
    """
    first = 0
    while first < rows.groups:
        by_rows = int(np.searchsorted(rows.stops, rows.starts[first] + rows_max, side="right"))
        end = max(first + 1, min(first + keys_max, by_rows))
        while end < rows.groups and rows.hashes[end] == rows.hashes[end - 1]:
            end += 1
        yield rows if first == 0 and end == rows.groups else _cut(rows, first, end)
        first = end


def _cut(rows: GroupedRows, first: int, end: int) -> GroupedRows:
    low, high = int(rows.starts[first]), int(rows.stops[end - 1])
    return GroupedRows(
        rows=rows.rows.slice(low, high - low),
        starts=rows.starts[first:end] - low,
        stops=rows.stops[first:end] - low,
        hashes=rows.hashes[first:end],
        keys=[k.slice(first, end - first) for k in rows.keys],
        sequence=rows.sequence[low:high],
    )


@dataclass(frozen=True)
class DueTimers:
    """A slice of due timers, in the order in which they fire.

    Attributes:
        groups: of each timer the number of its key.
        times_ms: of each timer its time.
        hashes, keys: of the keys, sorted by hash.
    """

    groups: Positions
    times_ms: Positions
    hashes: Hashes
    keys: list[pa.Array]


def due_slices(due: pa.RecordBatch, schema: StateSchema, timers_max: int) -> Iterator[DueTimers]:
    """Cut what `StateReader.due` gave into slices; a key may be in several of them."""
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


class Changes:
    """What user code changed so far, pass by pass."""

    def __init__(self, schemas: Mapping[str, StateSchema]) -> None:
        self._schemas = schemas
        self._current: dict[str, list[pa.RecordBatch]] = {}
        self._newest_first: dict[str, list[pa.RecordBatch]] = {}
        self.rows_added = 0

    def take(self, states: Iterable[SliceState]) -> None:
        """Note what a slice changed. Slices between two `seal` hold different keys in order of their hashes."""
        for state in states:
            batch, gained = state.changes()
            if batch.num_rows:
                self._current.setdefault(state.name, []).append(batch)
            self.rows_added += gained

    def seal(self) -> Mapping[str, pa.RecordBatch]:
        """End a pass; what it changed, for the next one to see."""
        sealed = {name: concat(batches, self._schemas[name].arrow) for name, batches in self._current.items()}
        self._current = {}
        for name, batch in sealed.items():
            self._newest_first.setdefault(name, []).insert(0, batch)
        return sealed

    def folded(self) -> dict[str, pa.RecordBatch]:
        """Per state one sorted batch of all passes. States that did not change have an empty one."""
        return {
            name: fold(self._newest_first.get(name, []), schema, drop_deleted=False)
            for name, schema in self._schemas.items()
        }


def too_early(batch: pa.RecordBatch, column: str, late_watermark_ms: int) -> bool:
    """Whether a row's event time is at most the late watermark: Spark lets no operator emit such a row."""
    return bool(is_late(batch.column(column), late_watermark_ms).any())
