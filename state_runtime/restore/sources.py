"""What the primary store holds of an operator's states, as sorted sources that are read a piece at a time.

Reading order of a state, newest first: pending segments, segments, layers from last to first (docs/format.md). The
parts of a segment that one shard wrote are small; neighbouring ones are folded together up to a bound, and each such
group but the first is laid down in a mapped file, so that the tail is not in private memory however long it is. Tables
are read by row group.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import CorruptSegment, StillstateError
from state_runtime.base.limits import MIB
from state_runtime.changelog.reader import check_index, index_range
from state_runtime.changelog.segment import PartEntry, decode_part
from state_runtime.changelog.versions import StateVersions, check_dropped
from state_runtime.restore.objects import HostObjects, WantedObject, WantedRange, small_neighbours
from state_runtime.restore.stream import merge_sorted, whole_hashes, windows
from state_runtime.restore.uploaded_files import Bottom
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry, TableEntry
from state_runtime.state.table import StateSchema, concat, hashes_of, slice_hash_range

__all__ = ["BaseRange", "PrimaryStates", "TailGroup"]

_GROUP_BYTES = 32 * MIB
"""Decoded parts that are folded together."""


@dataclass(frozen=True)
class _Part:
    """A part of a segment that may hold rows of the state."""

    snapshot_id: int
    entry: PartEntry
    wanted: WantedRange
    load: Callable[[], pa.RecordBatch]

    @property
    def path(self) -> str:
        return self.wanted.object.path


@dataclass(frozen=True)
class TailGroup:
    """Neighbouring parts, newest first."""

    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class BaseRange:
    """Rows of the base in a closed range: no key twice, none removed, as of snapshot `newest`."""

    low: int
    high: int
    newest: int
    batches: Iterator[pa.RecordBatch]


class PrimaryStates:
    """One operator's states in one hash range, on the primary store as of a snapshot (and what is pending after it).

    Args:
        entry: the description to read by: what `reconcile` returned.
        versions: per state.
        scratch: a private folder of this host for groups of parts; None keeps them in memory.
        bottom: what lies below all segments and tables: files of shards.
        strict: also check that values are what their types say and that hashes lie where the file is named for: for
            whoever hands them to people and to other programs.
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
        *,
        strict: bool = False,
    ) -> None:
        self._bottom = bottom
        self._strict = strict
        self._objects = objects
        self._manifest = manifest
        self._entry = entry
        self._versions = versions
        self._low, self._high = hash_range
        self._scratch = scratch
        self._now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
        self._all_segments = (*manifest.state_segments, *pending)
        self._segments = [s for s in self._all_segments if s.snapshot_id >= entry.since]
        self._parts: dict[str, list[_Part]] | None = None

    def together(self, since: int) -> list[tuple[WantedObject, ...]]:
        """Small segments that are fetched as one: all of a group are read.

        Tasks of an epoch find the same groups, whatever operator and shard they are of.
        """
        wanted = {s.path for s in self._segments if s.snapshot_id > since}
        groups = small_neighbours([WantedObject(s.path, s.bytes, s.digest) for s in self._all_segments])
        return [group for group in groups if all(o.path in wanted for o in group)]

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
            since: -1 reads all of the state, and leaves out what is removed or has expired; else only what is newer
                than that snapshot, with the tombstones that hide older rows.

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
            below = self._bottom.sources(state, versions, low, high)
            sources += [self._each_checked(source, versions, low, high) for source in below]
        return merge_sorted(sources, fold)

    def base(self, state: str, low: int, high: int) -> list[BaseRange]:
        """The tables of the base in a closed range, each to be read as it is: with `read(…, since)` on top they are the
        state.

        None where rows of a table may not count as they are: where the columns changed since, or files of shards lie
            below. What
        expired since the fold is among them; look-ups pass it over, as they do in every local version.

        Returns:
            In ascending order of hash; ranges without a table are left out.
        """
        versions = self._versions.get(state)
        if versions is None or not versions.is_one or self._bottom is not None or not self._manifest.layers:
            return []
        layer = self._manifest.layers[0]
        found = []
        for table in layer.tables:
            newest = table.last_snapshot_id or layer.last_snapshot_id
            if (table.operator, table.state) != (self._entry.uid, state) or newest < versions.since:
                continue
            first, last = max(low, table.hash_low), min(high, table.hash_high)
            if first <= last:
                rows = self._table(table, newest, versions, first, last)
                found.append(BaseRange(first, last, newest, whole_hashes(rows)))
        found.sort(key=lambda r: r.low)
        # Never so with tables of ours; then all of them are merged instead.
        meet = any(later.low <= earlier.high for earlier, later in itertools.pairwise(found))
        return [] if meet else found

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
            self._objects.expect([_index_of(segment) for segment in self._segments], keep=True)
            for segment in reversed(self._segments):
                for entry in reversed(self._index(segment)):
                    path = entry.path or segment.path
                    if entry.kind != "state" or not self._overlaps(entry.operator, entry.hash_low, entry.hash_high):
                        continue
                    if entry.state not in parts:
                        check_dropped(self._entry, entry.state, segment.snapshot_id, path)
                        continue
                    packed = WantedObject(segment.path, segment.bytes, segment.digest)
                    wanted = WantedRange(WantedObject(path) if entry.path else packed, entry.offset, entry.length)
                    load = partial(self._load, wanted, entry)
                    parts[entry.state].append(_Part(segment.snapshot_id, entry, wanted, load))
            self._parts = parts
        return self._parts

    def _index(self, segment: SegmentEntry) -> Sequence[PartEntry]:
        tail = self._objects.read_range(_index_of(segment)).to_pybytes()
        return check_index(segment, tail, self._manifest.job_uids).parts

    def _load(self, wanted: WantedRange, entry: PartEntry) -> pa.RecordBatch:
        path = wanted.object.path
        batch = decode_part(self._objects.read_range(wanted), entry, path)
        self._check(batch, entry.hash_low, entry.hash_high, path)
        return StateSchema.of(batch.schema).check_batch(batch, path)

    def _check(self, batch: pa.RecordBatch, low: int, high: int, where: str) -> None:
        """Raises CorruptSegment if values are none of their type, or hashes lie outside of the range that they are
        stored under."""
        if not self._strict:
            return
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptSegment(
                f"{where}: operator {self._entry.uid!r} has values that are none of their type"
            ) from error
        hashes = hashes_of(batch)
        if len(hashes) and not (low <= int(hashes.min()) and int(hashes.max()) <= high):
            raise CorruptSegment(f"{where} has keys outside of the hash range that it is named for")

    def _each_checked(
        self, batches: Iterator[pa.RecordBatch], versions: StateVersions, low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._check(batch, low, high, versions.name)
            yield batch

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
            self._objects.expect([part.wanted for part in group])
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
        wanted = []
        for table in layer.tables:
            if not self._overlaps(table.operator, table.hash_low, table.hash_high):
                continue
            newest = layer.newest_in(table)
            if table.state not in self._versions:
                if newest >= self._entry.since:
                    check_dropped(self._entry, table.state, newest, table.path)
            elif table.state == state and newest > since and table.hash_low <= high and table.hash_high >= low:
                wanted.append((table, newest))
        in_order = sorted(wanted, key=lambda found: found[0].hash_low)
        if any(before.hash_high >= after.hash_low for (before, _), (after, _) in pairwise(in_order)):
            return [self._table(table, newest, versions, low, high) for table, newest in wanted]
        # Neighbours are one sorted source: of a layer one table is open at a time, however many it has.
        return [self._chained(in_order, versions, low, high)] if in_order else []

    def _chained(
        self, tables: Sequence[tuple[TableEntry, int]], versions: StateVersions, low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        for table, newest in tables:
            yield from self._table(table, newest, versions, low, high)

    def _table(
        self, table: TableEntry, snapshot_id: int, versions: StateVersions, low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a table in a range, one row group at a time."""
        where = f"{table.path} is not a table of {table.operator}/{table.state}"
        last: int | None = None
        try:
            source = self._objects.open(WantedObject(table.path, table.bytes, table.digest))
            with pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True) as file:
                if file.metadata.num_rows != table.rows:
                    raise CorruptSegment(
                        f"{table.path} holds {file.metadata.num_rows} rows where the manifest says {table.rows}"
                    )
                columns = versions.stored_columns(file.schema_arrow.names)
                for number in _row_groups(file.metadata, max(low, table.hash_low), min(high, table.hash_high), table):
                    batch = _row_group(file, number, columns, table.path)
                    self._check(batch, table.hash_low, table.hash_high, table.path)
                    hashes = hashes_of(batch)
                    if last is not None and len(hashes) and int(hashes[0]) < last:
                        raise CorruptSegment(f"{table.path} is not sorted by key hash")
                    last = int(hashes[-1]) if len(hashes) else last
                    rows = slice_hash_range(batch, low, high)
                    if rows.num_rows:
                        yield versions.read(rows, snapshot_id, table.path)
        except StillstateError:
            raise  # some of them are OSErrors too
        except (pa.ArrowException, OSError, KeyError, ValueError, IndexError, OverflowError) as error:
            raise CorruptSegment(f"{where}: {error}") from error


def _index_of(segment: SegmentEntry) -> WantedRange:
    return WantedRange(WantedObject(segment.path, segment.bytes, segment.digest), *index_range(segment))


def _row_groups(metadata: pq.FileMetaData, low: int, high: int, table: TableEntry) -> Iterator[int]:
    """The row groups that may hold hashes of a range, by their statistics where there are any."""
    if (low, high) == (table.hash_low, table.hash_high):
        yield from range(metadata.num_row_groups)
        return
    for number in range(metadata.num_row_groups):
        statistics = metadata.row_group(number).column(0).statistics
        if statistics is not None and statistics.has_min_max and (statistics.min > high or statistics.max < low):
            continue
        yield number


def _row_group(file: pq.ParquetFile, number: int, columns: Sequence[str], path: str) -> pa.RecordBatch:
    # A name that is the beginning of another's brings that along.
    stored = file.read_row_group(number, columns=columns).select(columns)
    if stored.num_rows != file.metadata.row_group(number).num_rows:
        raise CorruptSegment(f"{path}: row group {number} has another number of rows than the file says")
    try:
        schema = StateSchema.of(pa.schema([f.with_metadata(None) for f in stored.schema]))
    except CorruptSegment as error:
        raise CorruptSegment(f"{path}: {error}") from error
    batches = stored.cast(schema.arrow).combine_chunks().to_batches()
    return schema.check_batch(concat(batches, schema.arrow), path)
