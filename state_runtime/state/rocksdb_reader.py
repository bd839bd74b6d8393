"""Reading a version in RocksDB: look-ups, scans, and due rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rocksdict import Rdict

from state_runtime.base.errors import check
from state_runtime.state.reader import EntryFinder, EntryView
from state_runtime.state.rocksdb_codec import StateCodec, first_after
from state_runtime.state.rocksdb_database import reading
from state_runtime.state.rocksdb_description import RocksVersion
from state_runtime.state.row_codec import bytes_of_rows
from state_runtime.state.table import (
    HASH_MAX,
    Hashes,
    Mask,
    Positions,
    StateSchema,
    concat,
    entries_of,
    expired,
    hashes_of,
    int64_values,
)
from state_runtime.state.version import OpenVersion

__all__ = ["RocksReader"]

_WHOLE_ROWS = 1 << 16  # read at a time: a few megabytes
_STALE_ROWS_FIRST, _STALE_ROWS_MAX = 16, 4096  # of the index by time that `next_due` looks past


class RocksReader:
    """A version of a shard's states in RocksDB: a `StateReader`. Stays readable after the version's files are unlinked.

    Every method may raise LocalCopyUnusable: RocksDB compares a block's checksum when it reads it.

    Attributes:
        described: the version, with all states of the schemas.
        folder: of the database.
        codecs: per state its codec.
    """

    def __init__(
        self,
        db: Rdict,
        folder: Path,
        described: RocksVersion,
        schemas: Mapping[str, StateSchema],
        now_ms: int,
    ) -> None:
        self._db = db
        self._schemas = schemas
        self._now_ms = now_ms
        self.folder = folder
        self.described = described
        self.codecs = {state: StateCodec(schema, described.states[state].number) for state, schema in schemas.items()}

    def find(
        self, state: str, hashes: Hashes, keys: Sequence[pa.Array], columns: Sequence[str] | None = None
    ) -> tuple[Mask, list[pa.Array]]:
        """See `StateReader.find`. A row is stored as one value, so all of its columns are read."""
        codec = self.codecs[state]
        found, values = self._answer(codec, codec.row_keys(hashes, keys))
        if columns is None:
            return found, values
        return found, [values[codec.schema.values.get_field_index(name)] for name in columns]

    def find_entries(
        self,
        state: str,
        hashes: Hashes,
        keys: Sequence[pa.Array],
        entries: Hashes,
        entry_columns: Sequence[pa.Array],
    ) -> tuple[Mask, list[pa.Array]]:
        """See `StateReader.find_entries`."""
        codec = self.codecs[state]
        return self._answer(codec, codec.row_keys(hashes, keys, entries, entry_columns))

    def entry_finder(
        self, state: str, key_hash: int, key: Sequence[pa.Array], view: Callable[[pa.RecordBatch], EntryView]
    ) -> EntryFinder:
        """See `StateReader.entry_finder`. A look-up scans the rows of one key and entry: one row, unless map keys share
        a hash."""
        codec = self.codecs[state]
        (prefix,) = bytes_of_rows(codec.key_prefixes(np.array([key_hash], dtype=np.uint64), key))

        def find(entry: int, wanted: Any) -> Any:
            start = prefix + entry.to_bytes(8, "big")
            for stored, values in self._scan(start, first_after(start), None):
                batch, _ = self._batch(codec, stored, values)
                rows = view(batch)
                for at in range(batch.num_rows):
                    if rows.is_at(at, wanted):
                        return rows.value_at(at)
            return None

        return find

    def _answer(self, codec: StateCodec, row_keys: pa.Array) -> tuple[Mask, list[pa.Array]]:
        with reading(self.folder):
            stored = self._get(bytes_of_rows(row_keys))
            found: Mask = stored.is_valid().to_numpy(zero_copy_only=False)
            columns = codec.values.decode(stored.drop_null())
        at = np.cumsum(found) - 1
        if codec.schema.time:
            # The time is stored first and returned last.
            columns = [*columns[1:], columns[0]]
        if codec.schema.time == "expires":
            gone = np.flatnonzero(found)[expired(columns[-1], self._now_ms)]
            found[gone] = False
        index = pa.array(at, mask=~found)
        return found, [column.take(index) for column in columns]

    def _get(self, keys: list[bytes]) -> pa.Array:
        wanted: list[Any] = keys  # one of the types that rocksdict accepts
        return pa.array(self._db.get(wanted) if keys else [], pa.large_binary())

    def entry_bounds(self, state: str, hashes: Hashes) -> Positions:
        """See `StateReader.entry_bounds`: exact except for expired rows and keys that share a hash."""
        codec = self.codecs[state]
        ends = self._scan_each(bytes_of_rows(codec.hash_prefixes(hashes)), [], None)
        counted = np.array([0, *ends], dtype=np.int64)
        return counted[1:] - counted[:-1]

    def read_entries(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[pa.RecordBatch, Positions]:
        """See `StateReader.read_entries`."""
        codec = self.codecs[state]
        stored: list[bytes] = []
        values: list[bytes] = []
        ends = self._scan_each(bytes_of_rows(codec.key_prefixes(hashes, keys)), stored, values)
        batch, live = self._batch(codec, stored, values)
        kept = np.concatenate(([0], np.cumsum(live)))
        return batch, kept[np.array([0, *ends], dtype=np.int64)].astype(np.int64)

    def iter_entries(
        self, state: str, key_hash: int, key: Sequence[pa.Array], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        """See `StateReader.iter_entries`."""
        check(rows_max > 0, f"rows_max is {rows_max}")
        codec = self.codecs[state]
        (prefix,) = bytes_of_rows(codec.key_prefixes(np.array([key_hash], dtype=np.uint64), key))
        for stored, values in self._scan(prefix, first_after(prefix), rows_max):
            batch, _ = self._batch(codec, stored, values)
            if batch.num_rows:
                yield batch

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        """See `StateReader.due`."""
        codec = self.codecs[state]
        entries: list[bytes] = []
        for stored, _ in self._scan(codec.due_prefix, codec.due_bound(through_ms), None):
            entries += stored
        batch, _ = self._due_rows(codec, entries)
        return batch.take(pa.array(np.lexsort((_entries(batch, codec.schema), hashes_of(batch)))))

    def next_due(self, state: str, after_ms: int | None = None) -> int | None:
        """See `StateReader.next_due`. Skips rows that were removed since, but at most a few thousand."""
        codec = self.codecs[state]
        looked_at, last = 0, None
        start = codec.due_prefix if after_ms is None else codec.due_bound(after_ms)
        for stored, _ in self._scan(start, first_after(codec.due_prefix), _STALE_ROWS_FIRST):
            batch, due = self._due_rows(codec, stored)
            if batch.num_rows:
                return int(_times(batch).min())
            looked_at, last = looked_at + len(stored), int(due[-1])
            if looked_at >= _STALE_ROWS_MAX:
                return last
        return None

    def whole(self, state: str) -> pa.RecordBatch:
        """See `StateReader.whole`."""
        return concat(list(self.read_range(state, 0, HASH_MAX, _WHOLE_ROWS)), self._schemas[state].arrow)

    def iter_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        """See `StateReader.iter_rows`."""
        return self.read_range(state, 0, HASH_MAX, _WHOLE_ROWS)

    def read_range(self, state: str, low: int, high: int, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yield the live rows in a closed range of hashes, sorted by (hash, entry), `rows_max` at a time.

        Different keys of one hash are in order of their bytes, so their entries are sorted here: rows of one hash
        come together.
        """
        codec = self.codecs[state]
        start, end = codec.range_bounds(low, high)
        waiting: pa.RecordBatch | None = None
        for stored, values in self._scan(start, end, rows_max):
            batch, _ = self._batch(codec, stored, values)
            waiting = batch if waiting is None else concat([waiting, batch], codec.schema.arrow)
            hashes = hashes_of(waiting)
            whole = int(np.searchsorted(hashes, hashes[-1], side="left")) if len(hashes) else 0
            if whole:
                yield _in_order(waiting.slice(0, whole), codec.schema)
                waiting = waiting.slice(whole)
        if waiting is not None and waiting.num_rows:
            yield _in_order(waiting, codec.schema)

    def overlaid(
        self, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int] | None = None
    ) -> OpenVersion:
        """See `StateReader.overlaid`."""
        return OpenVersion.on_top_of(self, changes, self._schemas, self._now_ms, due_taken)

    def sweep(self, state: str, cursor: str, rows_max: int, now_ms: int) -> tuple[list[bytes], str]:
        """Check about `rows_max` rows, from a cursor on.

        Returns:
            The keys of the expired rows, and the next cursor.
        """
        codec = self.codecs[state]
        start = max(bytes.fromhex(cursor), codec.row_prefix)
        for stored, values in self._scan(start, first_after(codec.row_prefix), rows_max):
            with reading(self.folder):
                (times,) = codec.values.decode(pa.array(values, pa.large_binary()), first=1)
            doomed = [stored[at] for at in np.flatnonzero(expired(times, now_ms)).tolist()]
            return doomed, (stored[-1] + b"\0").hex() if len(stored) == rows_max else ""
        return [], ""

    def _due_rows(self, codec: StateCodec, entries: list[bytes]) -> tuple[pa.RecordBatch, Positions]:
        """Return the rows of some entries of the index by time, if they are still due then; and the times of all the
        entries."""
        with reading(self.folder):
            index = pa.array(entries, pa.large_binary())
            due = codec.due_times(index)
            rows = bytes_of_rows(codec.row_keys_of(index))
            values = self._get(rows)
            there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
            batch = codec.batch(pa.array(rows, pa.large_binary()).take(pa.array(there)), values.drop_null())
        times = batch.column(batch.num_columns - 1)
        still = (int64_values(times) == due[there]) & times.is_valid().to_numpy(zero_copy_only=False)
        return batch.filter(pa.array(still)), due

    def _batch(self, codec: StateCodec, stored: list[bytes], values: list[bytes]) -> tuple[pa.RecordBatch, Mask]:
        """Return stored rows as a batch of the live ones, and a mask of the live ones."""
        with reading(self.folder):
            batch = codec.batch(pa.array(stored, pa.large_binary()), pa.array(values, pa.large_binary()))
        if codec.schema.time != "expires":
            return batch, np.ones(batch.num_rows, dtype=np.bool_)
        live: Mask = ~expired(codec.schema.times_of(batch), self._now_ms)
        return batch.filter(pa.array(live)) if not bool(live.all()) else batch, live

    def _scan_each(self, prefixes: list[bytes], keys: list[bytes], values: list[bytes] | None) -> list[int]:
        """Read all rows with some prefixes; append them to `keys` and `values`.

        Returns:
            The number of rows up to the end of each prefix.
        """
        ends, count = [], 0
        with reading(self.folder):
            rows = self._db.iter()
            for prefix in prefixes:
                rows.seek(prefix)
                while rows.valid():
                    key = rows.key()
                    if not key.startswith(prefix):
                        break
                    count += 1
                    if values is not None:
                        keys.append(key)
                        values.append(rows.value())
                    rows.next()
                else:
                    # At the end, or before a damaged block: only the status shows which.
                    rows.status()
                ends.append(count)
        return ends

    def _scan(self, start: bytes, end: bytes, rows_max: int | None) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield keys and values from `start` up to (without) `end`, `rows_max` at a time; never an empty part."""
        rows = self._db.iter()
        rows.seek(start)
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            with reading(self.folder):
                while rows.valid() and (rows_max is None or len(keys) < rows_max):
                    key = rows.key()
                    if key >= end:
                        break
                    keys.append(key)
                    values.append(rows.value())
                    rows.next()
                if not rows.valid():
                    rows.status()
            if not keys:
                return
            yield keys, values


def _in_order(batch: pa.RecordBatch, schema: StateSchema) -> pa.RecordBatch:
    if schema.entries is None:
        return batch
    hashes, entries = hashes_of(batch), entries_of(batch)
    if bool(np.all((hashes[:-1] < hashes[1:]) | (entries[:-1] <= entries[1:]))):
        return batch
    return batch.take(pa.array(np.lexsort((entries, hashes))))


def _times(batch: pa.RecordBatch) -> Positions:
    return int64_values(batch.column(batch.num_columns - 1))


def _entries(batch: pa.RecordBatch, schema: StateSchema) -> Hashes:
    return entries_of(batch) if schema.entries is not None else np.zeros(batch.num_rows, dtype=np.uint64)
