"""What the primary store holds of an operator's states, as sorted sources that are read a piece at a time.

Reading order of a state, newest first: pending segments, segments, layers from last to first (docs/format.md). The parts of a
segment that one shard wrote are small; neighbouring ones are folded together up to a bound, and each such group but the first
is laid down in a mapped file, so that the tail is not in private memory however long it is. Tables are read by row group.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.changelog.reader import check_index, index_range
from state_runtime.changelog.segment import PartEntry, decode_part
from state_runtime.changelog.versions import StateVersions, check_dropped
from state_runtime.errors import CorruptSegment
from state_runtime.limits import MIB
from state_runtime.restore.objects import HostObjects, WantedObject
from state_runtime.restore.shard_files import Bottom
from state_runtime.restore.stream import merge_sorted, windows
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry, TableEntry
from state_runtime.state.table import StateSchema, concat, hashes_of, slice_hash_range

__all__ = ["PrimaryStates", "TailGroup"]

_GROUP_BYTES = 32 * MIB
"""Decoded parts that are folded together."""


@dataclass(frozen=True)
class _Part:
    """A part of a segment that may hold rows of the state."""

    snapshot_id: int
    entry: PartEntry
    path: str
    load: Callable[[], pa.RecordBatch]


@dataclass(frozen=True)
class TailGroup:
    """Neighbouring parts, newest first."""

    parts: tuple[_Part, ...]


class PrimaryStates:
    """One operator's states in one hash range, on the primary store as of a snapshot (and what is pending after it).

    Args:
        entry: the description to read by: what `reconcile` returned.
        versions: per state.
        scratch: a private folder of this host for groups of parts; None keeps them in memory.
        bottom: what lies below all segments and tables: files of shards.
    """

    def __init__(
        self,
        objects: HostObjects,
        manifest: Manifest,
        pending: Sequence[SegmentEntry],
        entry: OperatorEntry,
        versions: dict[str, StateVersions],
        hash_range: tuple[int, int],
        scratch: Path | None,
        bottom: Bottom | None = None,
    ) -> None:
        self._bottom = bottom
        self._objects = objects
        self._manifest = manifest
        self._entry = entry
        self._versions = versions
        self._low, self._high = hash_range
        self._scratch = scratch
        self._now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
        self._segments = [s for s in (*manifest.state_segments, *pending) if s.snapshot_id >= entry.since]
        self._parts: dict[str, list[_Part]] | None = None

    def wanted(self, since: int) -> list[WantedObject]:
        """The segments and tables that a restore of everything newer than a snapshot reads, to be fetched together.

        Objects that tasks uploaded themselves are not among them: only the segments' indices name them.
        """
        segments = [WantedObject(s.path, s.bytes, s.digest) for s in self._segments if s.snapshot_id > since]
        tables = [
            WantedObject(t.path, t.bytes, t.digest)
            for number, layer in enumerate(self._manifest.layers)
            for t in layer.tables
            if self._overlaps(t.operator, t.hash_low, t.hash_high)
            and (t.last_snapshot_id or layer.last_snapshot_id) > since
            and (number > 0 or since < 0 or self._bottom is not None)
        ]
        files = self._bottom.wanted(self._low, self._high) if self._bottom is not None and since < 0 else []
        return [*segments, *tables, *files]

    def direct(self, since: int) -> list[WantedObject]:
        """The objects that tasks uploaded themselves, and that hold something of the range."""
        paths = {p.path: None for parts in self._all_parts().values() for p in parts if p.snapshot_id > since}
        packed = {segment.path for segment in self._segments}
        return [WantedObject(path) for path in paths if path not in packed]

    def read(self, state: str, low: int, high: int, since: int) -> Iterator[pa.RecordBatch]:
        """The state in a closed range, sorted, folded, of bounded batches.

        Args:
            since: -1 reads all of the state, and leaves out what is removed or has expired; else only what is newer than that
                snapshot, with the tombstones that hide older rows.

        Raises:
            MissingFile, CorruptSegment: see `changelog.reader.read_states`.
        """
        versions = self._versions.get(state)
        if versions is None:
            return iter(())
        whole = since < 0
        fold = partial(versions.fold, drop_deleted=whole, now_ms=self._now_ms if whole else None)
        since = max(since, versions.since - 1)
        sources = [*self._tail(state, versions, low, high, since)]
        for number in range(len(self._manifest.layers) - 1, -1, -1):
            if number == 0 and not whole and self._bottom is None:
                break
            sources += self._tables(number, state, versions, low, high, since)
        if whole and self._bottom is not None:
            self._bottom.check(self._versions)
            sources += self._bottom.sources(state, versions, low, high)
        return merge_sorted(sources, fold)

    def _overlaps(self, operator: str, low: int, high: int) -> bool:
        return operator == self._entry.uid and low <= self._high and high >= self._low

    # --- segments ------------------------------------------------------------------------------------------------

    def _all_parts(self) -> dict[str, list[_Part]]:
        """Per state its parts, newest first; read once.

        Raises:
            CorruptSegment: a part of a state that the operator does not have and did not drop.
        """
        if self._parts is None:
            parts: dict[str, list[_Part]] = {state: [] for state in self._versions}
            for segment in reversed(self._segments):
                for entry in reversed(self._index(segment)):
                    path = entry.path or segment.path
                    if entry.kind != "state" or not self._overlaps(entry.operator, entry.hash_low, entry.hash_high):
                        continue
                    if entry.state not in parts:
                        check_dropped(self._entry, entry.state, segment.snapshot_id, path)
                        continue
                    load = partial(self._load, segment, entry, path)
                    parts[entry.state].append(_Part(segment.snapshot_id, entry, path, load))
            self._parts = parts
        return self._parts

    def _index(self, segment: SegmentEntry) -> Sequence[PartEntry]:
        body = self._objects.read(WantedObject(segment.path, segment.bytes, segment.digest))
        tail = body.slice(*index_range(segment)).to_pybytes()
        return check_index(segment, tail, self._manifest.job_uid).parts

    def _load(self, segment: SegmentEntry, entry: PartEntry, path: str) -> pa.RecordBatch:
        wanted = WantedObject(path) if entry.path else WantedObject(path, segment.bytes, segment.digest)
        body = self._objects.read(wanted)
        if entry.offset + entry.length > body.size:
            raise CorruptSegment(f"{path} ends after {body.size:,} bytes; it was cut off")
        batch = decode_part(body.slice(entry.offset, entry.length), entry, path)
        return StateSchema.of(batch.schema).check_batch(batch, path)

    def _tail(
        self, state: str, versions: StateVersions, low: int, high: int, since: int
    ) -> Iterator[Iterator[pa.RecordBatch]]:
        groups: list[list[_Part]] = []
        size = 0
        for part in self._all_parts()[state]:
            if part.snapshot_id <= since or part.entry.hash_low > high or part.entry.hash_high < low:
                continue
            if not groups or size + part.entry.raw_bytes > _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.entry.raw_bytes
        for number, group in enumerate(groups):
            batches = [
                versions.read(slice_hash_range(part.load(), low, high), part.snapshot_id, part.path) for part in group
            ]
            folded = versions.fold(batches, drop_deleted=False)
            yield windows(self._laid_down(folded) if number else folded)

    def _laid_down(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in a mapped file that is gone with its last reader; the batch itself if there is no room for it."""
        if self._scratch is None:
            return batch
        try:
            descriptor, name = tempfile.mkstemp(prefix=".group-", dir=self._scratch)
            try:
                with os.fdopen(descriptor, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
                    writer.write_batch(batch)
                return pa.ipc.open_file(pa.memory_map(name)).get_batch(0)
            finally:
                os.unlink(name)
        except (OSError, pa.ArrowException):
            return batch  # disk full: silent on purpose (invariant 5)

    # --- tables --------------------------------------------------------------------------------------------------

    def _tables(
        self, number: int, state: str, versions: StateVersions, low: int, high: int, since: int
    ) -> list[Iterator[pa.RecordBatch]]:
        layer = self._manifest.layers[number]
        sources = []
        for table in layer.tables:
            if not self._overlaps(table.operator, table.hash_low, table.hash_high):
                continue
            newest = table.last_snapshot_id or layer.last_snapshot_id
            if table.state not in self._versions:
                if newest >= self._entry.since:
                    check_dropped(self._entry, table.state, newest, table.path)
            elif table.state == state and newest > since and table.hash_low <= high and table.hash_high >= low:
                sources.append(self._table(table, newest, versions, low, high))
        return sources

    def _table(
        self, table: TableEntry, snapshot_id: int, versions: StateVersions, low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a table in a range, one row group at a time."""
        body = self._objects.read(WantedObject(table.path, table.bytes, table.digest))
        where = f"{table.path} is not a table of {table.operator}/{table.state}"
        last: int | None = None
        try:
            file = pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True)
            if file.metadata.num_rows != table.rows:
                raise CorruptSegment(
                    f"{table.path} holds {file.metadata.num_rows} rows where the manifest says {table.rows}"
                )
            for number in _row_groups(file.metadata, low, high):
                batch = _row_group(file, number, table.path)
                hashes = hashes_of(batch)
                if last is not None and len(hashes) and int(hashes[0]) < last:
                    raise CorruptSegment(f"{table.path} is not sorted by key hash")
                last = int(hashes[-1]) if len(hashes) else last
                rows = slice_hash_range(batch, low, high)
                if rows.num_rows:
                    yield versions.read(rows, snapshot_id, table.path)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise CorruptSegment(f"{where}: {error}") from error


def _row_groups(metadata: pq.FileMetaData, low: int, high: int) -> Iterator[int]:
    """The row groups that may hold hashes of a range, by their statistics where there are any."""
    for number in range(metadata.num_row_groups):
        statistics = metadata.row_group(number).column(0).statistics
        if statistics is not None and statistics.has_min_max and (statistics.min > high or statistics.max < low):
            continue
        yield number


def _row_group(file: pq.ParquetFile, number: int, path: str) -> pa.RecordBatch:
    stored = file.read_row_group(number)
    schema = StateSchema.of(pa.schema([f.with_metadata(None) for f in stored.schema]))
    batches = stored.cast(schema.arrow).combine_chunks().to_batches()
    return schema.check_batch(concat(batches, schema.arrow), path)
