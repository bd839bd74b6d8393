"""The rows of one shard in one epoch, grouped by key; vectorised, and in an order that a re-execution repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from state_runtime.state.ordering import stable_order
from state_runtime.state.table import Hashes, Mask, Positions, first_of_groups

__all__ = ["GroupedRows", "filter_rows", "group_rows", "order_of_rows"]


@dataclass(frozen=True)
class GroupedRows:
    """Rows sorted by key hash, equal keys together, rows of a key in source order.

    Attributes:
        rows: the data columns, without the runtime's own.
        starts: position of each group's first row.
        stops: position after each group's last row.
        hashes: one per group, sorted.
        keys: the key columns, one row per group.
        sequence: per row its place in the epoch's input; orders rows of different keys as the source had them.
        epoch: the epoch that read the rows, if another one processes them; else 0.
        first_place: number of rows of its one key that came in pieces before this one.
    """

    rows: pa.RecordBatch
    starts: Positions
    stops: Positions
    hashes: Hashes
    keys: list[pa.Array]
    sequence: Positions
    epoch: int = 0
    first_place: int = 0

    @property
    def groups(self) -> int:
        return len(self.starts)


def group_rows(
    rows: pa.RecordBatch, hashes: Hashes, sequence: Positions, key_columns: Sequence[str], key_schema: pa.Schema
) -> GroupedRows:
    """Sort and group.

    Args:
        rows: data columns in the order of arrival, which differs between attempts, as shuffle blocks do.
        hashes: key hash of each row.
        sequence: position of each row in the input of the shuffle (source partition and row number). Ordering by it
            makes the rows of a key come in source order, and a re-executed task see exactly the same input.
        key_schema: types of the keys in the state; Spark delivers timestamps in the session's time zone, stored ones
            are in UTC.
    """
    order = order_of_rows(hashes, sequence)
    sorted_hashes = hashes[order]
    sorted_sequence = sequence[order]
    rows = rows.take(pa.array(order))
    keys = [_as(rows.column(name), field.type) for name, field in zip(key_columns, key_schema)]
    regroup, first = first_of_groups(sorted_hashes, keys)
    if regroup is not None:
        rows = rows.take(pa.array(regroup))
        sorted_sequence = sorted_sequence[regroup]
        keys = [_as(rows.column(name), field.type) for name, field in zip(key_columns, key_schema)]
    starts = np.flatnonzero(first)
    stops = np.append(starts[1:], len(sorted_hashes))[: len(starts)]
    at = pa.array(starts)
    return GroupedRows(
        rows=rows,
        starts=starts,
        stops=stops,
        hashes=sorted_hashes[starts],
        keys=[k.take(at) for k in keys],
        sequence=sorted_sequence,
    )


def filter_rows(rows: GroupedRows, keep: Mask) -> GroupedRows:
    """Return only some rows; keys without remaining rows are removed."""
    if bool(keep.all()):
        return rows
    kept = np.concatenate(([0], np.cumsum(keep)))
    starts, stops = kept[rows.starts], kept[rows.stops]
    there = starts < stops
    picked = pa.array(there)
    return replace(
        rows,
        rows=rows.rows.filter(pa.array(keep)),
        starts=starts[there],
        stops=stops[there],
        hashes=rows.hashes[there],
        keys=[k.filter(picked) for k in rows.keys],
        sequence=rows.sequence[keep],
    )


def order_of_rows(hashes: Hashes, sequence: Positions) -> Positions:
    """Return the permutation that sorts by (hash, sequence)."""
    if bool(np.all(sequence[1:] >= sequence[:-1])):
        return stable_order(hashes)
    # Rows of a source partition arrive in order, so a stable sort finds and merges few runs.
    arrival = np.argsort(sequence, kind="stable")
    ordered: Positions = arrival[stable_order(hashes[arrival])]
    return ordered


def _as(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    return column if column.type == data_type else column.cast(data_type)
