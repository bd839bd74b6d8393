"""Changing the rows of one state in a database that is open for writing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from rocksdict import Rdict, WriteBatch

from state_runtime.state.rocksdb_codec import StateCodec, first_after
from state_runtime.state.rocksdb_database import unlogged
from state_runtime.state.row_codec import bytes_of_rows
from state_runtime.state.table import CLEAR_MARKER, entries_of, hashes_of, int64_values

__all__ = ["apply_changes", "forget_due", "keep_ranges", "remove_keys"]

_BATCH_ROWS = 1 << 16  # per RocksDB write batch: a few megabytes


def apply_changes(db: Rdict, codec: StateCodec, changes: pa.RecordBatch) -> None:
    """Write a sorted batch of changes. A clear marker comes before its key's rows, and is applied before them."""
    for first in range(0, changes.num_rows, _BATCH_ROWS):
        batch = changes.slice(first, _BATCH_ROWS)
        schema = codec.schema
        hashes, keys = hashes_of(batch), schema.keys_of(batch)
        deleted = batch.column(1).to_numpy(zero_copy_only=False)
        entries = entries_of(batch) if schema.entries is not None else None
        cleared = deleted & (entries == CLEAR_MARKER) if entries is not None else np.zeros(len(deleted), dtype=np.bool_)
        writes = WriteBatch(raw_mode=True)
        if bool(cleared.any()):
            for prefix in bytes_of_rows(codec.key_prefixes(hashes, keys).filter(pa.array(cleared))):
                writes.delete_range(prefix, first_after(prefix))
        row_keys = codec.row_keys(hashes, keys, entries, schema.entry_columns_of(batch))
        for key in bytes_of_rows(row_keys.filter(pa.array(deleted & ~cleared))):
            writes.delete(key)
        live = batch.filter(pa.array(~deleted))
        live_keys = row_keys.filter(pa.array(~deleted))
        times = [schema.times_of(live)] if schema.time else []
        values = codec.values.encode([*times, *schema.values_of(live)], live.num_rows)
        # The binding takes rows one by one, into a batch as into a table file; the batch is written at once.
        for key, value in zip(bytes_of_rows(live_keys), bytes_of_rows(values), strict=True):
            writes.put(key, value)
        if schema.time == "due":
            ever = times[0].is_valid()
            for key in bytes_of_rows(codec.due_keys(int64_values(times[0].filter(ever)), live_keys.filter(ever))):
                writes.put(key, b"")
        db.write(writes, unlogged())


def keep_ranges(db: Rdict, codec: StateCodec, ranges: Sequence[tuple[int, int]]) -> None:
    """Remove the rows outside of some closed ranges of hashes, which are in order.

    The index by time is in no order of hashes. The entry of a removed row is ignored, and removed when its time has
    come.
    """
    begin = codec.row_prefix
    for low, high in ranges:
        first, end = codec.range_bounds(low, high)
        _remove_range(db, begin, first)
        begin = end
    _remove_range(db, begin, first_after(codec.row_prefix))


def _remove_range(db: Rdict, begin: bytes, end: bytes) -> None:
    if begin < end:
        db.delete_range(begin, end, unlogged())


def remove_keys(db: Rdict, keys: list[bytes]) -> None:
    """Remove rows by their stored keys."""
    writes = WriteBatch(raw_mode=True)
    for key in keys:
        writes.delete(key)
    db.write(writes, unlogged())


def forget_due(db: Rdict, codec: StateCodec, through_ms: int) -> None:
    """Remove handled entries from the index by time; the rows stay."""
    db.delete_range(codec.due_prefix, codec.due_bound(through_ms), unlogged())
