"""Sorting of rows into the order that tables need, in bounded memory: rows that do not fit are spilled to files of this
host by leading bits of the hash."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from state_runtime.base.limits import MIB
from state_runtime.state.table import StateSchema, concat, entries_of, hashes_of

__all__ = ["sorted_rows"]

_BITS = 6  # buckets of one level: 64 open files


def sorted_rows(
    batches: Iterable[pa.RecordBatch], schema: StateSchema, *, bytes_max: int = 128 * MIB, scratch: Path | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield rows of one state, sorted by hash and entry; rows with equal hash and entry stay in order.

    Args:
        batches: of the state's columns, in any order.
        bytes_max: approximate bytes in memory at once; more only if more rows have the same hash.
        scratch: folder for spilled rows; a temporary folder inside it is removed at the end.

    Raises:
        OSError: no room on this host's disk.
    """
    yield from _sorted(iter(batches), schema, bytes_max, scratch, 0)


def _sorted(
    batches: Iterator[pa.RecordBatch], schema: StateSchema, bytes_max: int, scratch: Path | None, depth: int
) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size > bytes_max and depth + _BITS <= 64:
            break
    else:
        if size:
            yield _in_order(concat(held, schema.arrow), schema)
        return
    with tempfile.TemporaryDirectory(prefix=".sort-", dir=scratch) as folder:
        buckets = _spill(held, batches, schema, Path(folder), depth)
        del held
        for path in buckets:
            with pa.memory_map(str(path)) as file:
                yield from _sorted(iter(pa.ipc.open_stream(file)), schema, bytes_max, scratch, depth + _BITS)
            path.unlink()


def _spill(
    held: list[pa.RecordBatch], batches: Iterator[pa.RecordBatch], schema: StateSchema, folder: Path, depth: int
) -> list[Path]:
    """Write all rows to files by the next bits of their hash; return the files in that order."""
    count = 1 << _BITS
    shift = np.uint64(64 - _BITS - depth)
    with ExitStack() as stack:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}

        def put(batch: pa.RecordBatch) -> None:
            buckets = (hashes_of(batch) >> shift) & np.uint64(count - 1)
            order = np.argsort(buckets, kind="stable")
            moved = batch.take(pa.array(order))
            edges = np.searchsorted(buckets[order], np.arange(count + 1, dtype=np.uint64))
            for bucket in np.flatnonzero(np.diff(edges)).tolist():
                if bucket not in writers:
                    file = stack.enter_context(pa.OSFile(str(folder / f"{bucket:03d}"), "wb"))
                    writers[bucket] = stack.enter_context(pa.ipc.new_stream(file, schema.arrow))
                writers[bucket].write_batch(moved.slice(int(edges[bucket]), int(edges[bucket + 1] - edges[bucket])))

        while held:
            put(held.pop(0))
        for batch in batches:
            put(batch)
    return [folder / f"{bucket:03d}" for bucket in sorted(writers)]


def _in_order(batch: pa.RecordBatch, schema: StateSchema) -> pa.RecordBatch:
    hashes = hashes_of(batch)
    order = np.argsort(hashes, kind="stable") if schema.entries is None else np.lexsort((entries_of(batch), hashes))
    return batch.take(pa.array(order))
