"""Rows of window states in columns, and the operations of tumbling, sliding and session windows; pure and vectorised.

The state has the entries layout: `entry` is a start in microseconds, `due` the watermark in milliseconds at which the
row must be processed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import check
from state_runtime.state.search import lookup
from state_runtime.state.table import (
    Hashes,
    Mask,
    Positions,
    StateSchema,
    entries_of,
    entry_of_time,
    first_of_groups,
    hashes_of,
    time_of_entry,
)

__all__ = [
    "WINDOW",
    "WINDOW_TYPE",
    "OutputMode",
    "Part",
    "assemble",
    "contained",
    "event_times",
    "grouped_by_key",
    "members",
    "order_by",
    "running_max",
    "search",
    "union_of_intervals",
    "window_column",
]

WINDOW = "window"
OutputMode = Literal["update", "append", "complete"]
_TIME = pa.timestamp("us", "UTC")
WINDOW_TYPE = pa.struct([pa.field("start", _TIME), pa.field("end", _TIME)])


@dataclass(frozen=True)
class Part:
    """Rows of a window state in columns, as they are read, merged and written.

    Attributes:
        hashes, keys: the key of each row.
        at: its place in time: `entry` as a number.
        slots: the value columns.
        due: milliseconds.
        stored: whether the state has the row now.
    """

    hashes: Hashes
    keys: Sequence[pa.Array]
    at: Positions
    slots: Sequence[pa.Array]
    due: Positions
    stored: Mask

    def __len__(self) -> int:
        return len(self.hashes)

    @staticmethod
    def of(batch: pa.RecordBatch, schema: StateSchema) -> Part:
        """Make a part of rows as the state has them."""
        return Part(
            hashes=hashes_of(batch),
            keys=schema.keys_of(batch),
            at=time_of_entry(entries_of(batch)),
            slots=schema.values_of(batch),
            due=pc.fill_null(schema.times_of(batch), np.iinfo(np.int64).max).to_numpy(zero_copy_only=False),
            stored=np.ones(batch.num_rows, dtype=np.bool_),
        )

    def take(self, positions: Positions) -> Part:
        at = pa.array(positions)
        return Part(
            hashes=self.hashes[positions],
            keys=[k.take(at) for k in self.keys],
            at=self.at[positions],
            slots=[s.take(at) for s in self.slots],
            due=self.due[positions],
            stored=self.stored[positions],
        )

    def only(self, keep: Mask) -> Part:
        """Return the rows that a mask keeps; self if it keeps all."""
        return self if bool(keep.all()) else self.take(np.flatnonzero(keep))

    def and_(self, other: Part) -> Part:
        """Return the rows of both, one after the other."""
        if len(other) == 0:
            return self
        if len(self) == 0:
            return other
        return Part(
            hashes=np.concatenate((self.hashes, other.hashes)),
            keys=[pa.concat_arrays([a, b]) for a, b in zip(self.keys, other.keys)],
            at=np.concatenate((self.at, other.at)),
            slots=[pa.concat_arrays([a, b]) for a, b in zip(self.slots, other.slots)],
            due=np.concatenate((self.due, other.due)),
            stored=np.concatenate((self.stored, other.stored)),
        )


def grouped_by_key(part: Part) -> tuple[Part, Positions]:
    """Return the rows sorted by (key, at), and per row the number of its key."""
    hashes, at = part.hashes, part.at
    ordered = (hashes[:-1] < hashes[1:]) | ((hashes[:-1] == hashes[1:]) & (at[:-1] <= at[1:]))
    if not bool(ordered.all()):
        part = part.take(np.lexsort((at, hashes)))
    # Keys that share a hash are moved apart; the move is stable, so `at` stays in order within each.
    regroup, first = first_of_groups(part.hashes, part.keys)
    if regroup is not None:
        part = part.take(regroup)
    return part, np.cumsum(first) - 1


def members(part: Part, hashes: Hashes, keys: Sequence[pa.Array], key_schema: pa.Schema) -> Positions:
    """Return per row of `part` the position of its key among sorted keys, -1 if its key is not among them."""
    order = np.argsort(part.hashes, kind="stable")
    index = StateSchema(key_schema, pa.schema([]))
    found = np.empty(len(part), dtype=np.int64)
    at = pa.array(order)
    found[order] = lookup(
        index.batch(hashes, None, keys, []), index, part.hashes[order], [k.take(at) for k in part.keys]
    )
    return found


def assemble(schema: StateSchema, written: Part, removed: Part) -> pa.RecordBatch:
    """Return the changes of an epoch: rows with their values, and tombstones."""
    gone = np.zeros(len(written) + len(removed), dtype=np.bool_)
    gone[len(written) :] = True
    nothing = Part(
        hashes=removed.hashes,
        keys=removed.keys,
        at=removed.at,
        slots=[pa.nulls(len(removed), field.type) for field in schema.values],
        due=removed.due,
        stored=removed.stored,
    )
    both = written.and_(nothing)
    entries = entry_of_time(both.at)
    ordered = (both.hashes[:-1] < both.hashes[1:]) | (
        (both.hashes[:-1] == both.hashes[1:]) & (entries[:-1] <= entries[1:])
    )
    if not bool(ordered.all()):
        order = np.lexsort((entries, both.hashes))
        both, gone, entries = both.take(order), gone[order], entries[order]
    due = pa.array(both.due, mask=gone)
    return schema.batch(both.hashes, gone, both.keys, both.slots, entries=entries, times=due)


def event_times(rows: pa.RecordBatch, column: str) -> tuple[Positions, Mask | None]:
    """Return microseconds, and which rows have a time (None: all)."""
    times = rows.column(column)
    valid = None if times.null_count == 0 else times.is_valid().to_numpy(zero_copy_only=False)
    numbers = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    if valid is not None:
        numbers = pc.fill_null(numbers, 0)
    return numbers.to_numpy(zero_copy_only=False), valid


def _pack(group: Positions, at: Positions) -> tuple[Positions, int, int] | None:
    """Return (group, at) as one number of the same order: `group * span + at - base`; None if it needs over 62 bits."""
    if len(at) == 0:
        return at, 1, 0
    base = int(at.min())
    span = int(at.max()) - base + 1
    if (int(group[-1]) + 1) * span >= 1 << 62:
        return None
    return group * span + (at - base), span, base


def window_column(starts_us: Positions, ends_us: Positions) -> pa.Array:
    """Return the output column `window`."""
    return pa.StructArray.from_arrays(
        [pa.array(starts_us).cast(_TIME), pa.array(ends_us).cast(_TIME)], fields=list(WINDOW_TYPE)
    )


def union_of_intervals(group: Positions, first: Positions, last: Positions) -> tuple[Positions, Positions]:
    """Return the numbers in intervals [first, last] of groups, each once; rows are in order of (group, first) and of
    (group, last)."""
    start = first.copy()
    follows = np.flatnonzero(group[1:] == group[:-1]) + 1
    start[follows] = np.maximum(first[follows], last[follows - 1] + 1)
    counts = np.maximum(last - start + 1, 0)
    offsets = np.cumsum(counts) - counts
    return np.repeat(group, counts), np.repeat(start - offsets, counts) + np.arange(int(counts.sum()))


def order_by(group: Positions, at: Positions) -> Positions:
    """Return the stable order by (group, at)."""
    if len(at):
        base, span = int(at.min()), int(at.max()) - int(at.min()) + 1
        if (int(group.max()) + 1) * span < 1 << 62:
            order: Positions = np.argsort(group * span + (at - base), kind="stable")
            return order
    return np.lexsort((at, group))


def search(group: Positions, at: Positions, owner: Positions, wanted: Positions) -> Positions:
    """Return per (owner, wanted) the number of rows before it; rows are sorted by (group, at)."""
    packed = _pack(group, at)
    if packed is None:
        # Too far apart for one number: replace times by their ranks.
        values = np.unique(np.concatenate((at, wanted)))
        at, wanted = np.searchsorted(values, at), np.searchsorted(values, wanted)
        packed = _pack(group, at)
        check(packed is not None, "ranks of times fit")
        assert packed is not None
    codes, span, base = packed
    position: Positions = np.searchsorted(codes, owner * span + np.clip(wanted - base, 0, span))
    return position


def contained(key: Positions, at: Positions, group: Positions, among: Positions) -> Mask:
    """Return which pairs (key, at) are among the pairs (group, among), which are sorted; key -1 never is."""
    there = np.zeros(len(key), dtype=np.bool_)
    some = np.flatnonzero(key >= 0)
    position = search(group, among, key[some], at[some])
    inside = position < len(group)
    some, position = some[inside], position[inside]
    there[some] = (group[position] == key[some]) & (among[position] == at[some])
    return there


def running_max(group: Positions, values: Positions) -> Positions:
    """Return per row the highest value so far in its group; groups are numbered upwards from 0 and contiguous."""
    if len(values) == 0:
        return values
    base, span = int(values.min()), int(values.max()) - int(values.min()) + 1
    if (int(group[-1]) + 1) * span < 1 << 62:
        highest: Positions = np.maximum.accumulate(group * span + (values - base)) - group * span + base
        return highest
    levels, rank = np.unique(values, return_inverse=True)
    found: Positions = levels[running_max(group, rank.astype(np.int64))]
    return found
