"""An operator's states on the primary store, as sorted sources that are read a piece at a time.

`changelog/snapshot_state.py` defines which objects count, and their order. The parts of a segment that one shard wrote
are small. Neighbouring parts are folded together up to a bound, and each such group but the first is written to a
mapped file, so that even a long tail is not in private memory. Tables are read by row group.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from state_runtime.base.limits import MIB
from state_runtime.changelog.snapshot_state import SnapshotState, StoredPart, StoredTable
from state_runtime.changelog.versions import StateVersions
from state_runtime.restore.objects import HostObjects, WantedObject, small_neighbours
from state_runtime.restore.stored_rows import StoredRows
from state_runtime.restore.stream import merge_sorted, whole_hashes, windows
from state_runtime.restore.uploaded_files import Bottom
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, SegmentEntry
from state_runtime.state.table import slice_hash_range

__all__ = ["BaseRange", "PrimaryStates"]

_GROUP_BYTES = 32 * MIB
"""Decoded parts that are folded together."""


@dataclass(frozen=True)
class BaseRange:
    """Rows of the base in a closed range: each key at most once, no tombstones, as of snapshot `newest`."""

    low: int
    high: int
    newest: int
    batches: Iterator[pa.RecordBatch]


class PrimaryStates:
    """One operator's states in one hash range, on the primary store as of a snapshot (and pending changes after it).

    Args:
        entry: the description to read by, from `reconcile`.
        versions: per state; a stored state that is not among them must have been dropped.
        scratch: a private folder of this host for groups of parts; None keeps them in memory.
        bottom: files of shards, below all segments and tables.
        strict: also check values against their types, and hashes against the range in the file's name: for callers that
            give the rows to people and to other programs.
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
        self._versions = versions
        self._low, self._high = hash_range
        self._scratch = scratch
        self._now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
        self._segments = (*manifest.state_segments, *pending)
        known = tuple(state for state in entry.states if state.name in versions)
        self._stored = SnapshotState(manifest, [replace(entry, states=known)], pending=pending)
        self._rows = StoredRows(objects, manifest, self._segments, entry.uid, strict=strict)

    # --- fetching ------------------------------------------------------------------------------------------------

    def together(self, since: int) -> list[tuple[WantedObject, ...]]:
        """Group small segments that are fetched as one file: all of a group are read.

        Tasks of an epoch find the same groups, for any operator and shard.
        """
        wanted = {s.path for s in self._stored.segments(since)}
        groups = small_neighbours([WantedObject(s.path, s.bytes, s.digest) for s in self._segments])
        return [group for group in groups if all(o.path in wanted for o in group)]

    def wanted(self, since: int) -> list[WantedObject]:
        """Return the segments and tables that a restore of everything newer than a snapshot reads, to fetch together.

        Objects that tasks uploaded themselves are not among them: only the segments' indexes name them.
        """
        segments = [WantedObject(s.path, s.bytes, s.digest) for s in self._stored.segments(since)]
        tables = [
            WantedObject(t.path, t.table.bytes, t.table.digest)
            for t in self._tables
            if t.snapshot_id > since and self._is_read(t, since)
        ]
        files = self._bottom.wanted(self._low, self._high) if self._bottom is not None and since < 0 else []
        return [*segments, *tables, *files]

    def direct(self, since: int) -> list[WantedObject]:
        """Return the objects that tasks uploaded themselves and that hold rows of the range."""
        parts = [p for of_state in self._parts.values() for p in of_state if p.snapshot_id > since]
        uploaded = {p.path: self._rows.object_of(p) for p in parts if p.part.path}
        return [*uploaded.values()]

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, state: str, low: int, high: int, since: int) -> Iterator[pa.RecordBatch]:
        """Yield the state in a closed range, sorted and folded, in bounded batches.

        Args:
            since: -1 reads all of the state, without removed and expired rows; otherwise only rows newer than that
                snapshot, with the tombstones that hide older rows.

        Raises:
            MissingFile, CorruptSegment: the primary is damaged; the message names the file. StoreUnavailable: try
                again.
        """
        versions = self._versions.get(state)
        if versions is None:
            return iter(())
        whole = since < 0
        fold = partial(versions.fold, drop_deleted=whole, now_ms=self._now_ms if whole else None)
        sources = [*self._tail(state, versions, low, high, since), *self._layers(state, versions, low, high, since)]
        if whole and self._bottom is not None:
            self._bottom.check(self._versions)
            below = self._bottom.sources(state, versions, low, high)
            sources += [self._each_checked(source, versions, low, high) for source in below]
        return merge_sorted(sources, fold)

    def base(self, state: str, low: int, high: int) -> list[BaseRange]:
        """Return the tables of the base in a closed range, each to be read unchanged: together with `read(…, since)` on
        top of them they are the state.

        Empty if rows of a table may not count unchanged: if the columns changed since, or if there are files of shards
        below. Rows that expired since the fold are included; look-ups skip them, as in every local version.

        Returns:
            In ascending order of hash; ranges without a table are left out.
        """
        versions = self._versions.get(state)
        if versions is None or not versions.is_one or self._bottom is not None:
            return []
        found = []
        for stored in self._tables_of(state, low, high):
            if stored.layer == 0:
                first, last = max(low, stored.table.hash_low), min(high, stored.table.hash_high)
                rows = self._rows.table(stored, versions, first, last)
                found.append(BaseRange(first, last, stored.snapshot_id, whole_hashes(rows)))
        found.sort(key=lambda r: r.low)
        # Tables written by Stillstate never overlap; if tables do, all of them are merged instead.
        meet = any(later.low <= earlier.high for earlier, later in pairwise(found))
        return [] if meet else found

    # --- segments ------------------------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> dict[str, list[StoredPart]]:
        """Per state its parts, newest first; the indexes are read once."""
        segments = self._stored.segments()
        self._rows.expect_indexes(segments)
        parts: dict[str, list[StoredPart]] = {state: [] for state in self._versions}
        for segment in segments:
            for part in self._stored.parts(segment, self._rows.index(segment), self._low, self._high):
                parts[part.state].append(part)
        return parts

    def _tail(
        self, state: str, versions: StateVersions, low: int, high: int, since: int
    ) -> Iterator[Iterator[pa.RecordBatch]]:
        wanted = [
            part
            for part in self._parts[state]
            if part.snapshot_id > since and part.part.hash_low <= high and part.part.hash_high >= low
        ]
        for number, group in enumerate(_groups(wanted)):
            self._rows.expect_parts(group)
            batches = [
                versions.read(slice_hash_range(self._rows.part(part), low, high), part.snapshot_id, part.path)
                for part in group
            ]
            folded = versions.fold(batches, drop_deleted=False)
            yield windows(_laid_down(folded, self._scratch) if number else folded)

    # --- tables and files of shards below them -------------------------------------------------------------------

    @cached_property
    def _tables(self) -> list[StoredTable]:
        return [*self._stored.tables(self._low, self._high)]

    def _tables_of(self, state: str, low: int, high: int) -> list[StoredTable]:
        return [t for t in self._tables if t.state == state and t.table.hash_low <= high and t.table.hash_high >= low]

    def _is_read(self, stored: StoredTable, since: int) -> bool:
        """Return whether a table is read: not a table of the base if the reader has all of the base, and nothing is
        below it."""
        return stored.layer > 0 or since < 0 or self._bottom is not None

    def _layers(
        self, state: str, versions: StateVersions, low: int, high: int, since: int
    ) -> Iterator[Iterator[pa.RecordBatch]]:
        wanted = [t for t in self._tables_of(state, low, high) if t.snapshot_id > since and self._is_read(t, since)]
        for _, layer in itertools.groupby(wanted, key=lambda stored: stored.layer):
            tables = [*layer]
            in_order = sorted(tables, key=lambda stored: stored.table.hash_low)
            if any(before.table.hash_high >= after.table.hash_low for before, after in pairwise(in_order)):
                yield from (self._rows.table(stored, versions, low, high) for stored in tables)
            else:
                # Neighbours are one sorted source: at any time one table of a layer is open, however many it has.
                rows = (self._rows.table(stored, versions, low, high) for stored in in_order)
                yield itertools.chain.from_iterable(rows)

    def _each_checked(
        self, batches: Iterator[pa.RecordBatch], versions: StateVersions, low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._rows.check(batch, low, high, versions.name)
            yield batch


def _groups(parts: Sequence[StoredPart]) -> list[list[StoredPart]]:
    """Group neighbouring parts that are folded together."""
    groups: list[list[StoredPart]] = []
    size = 0
    for stored in parts:
        if not groups or size + stored.part.raw_bytes > _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(stored)
        size += stored.part.raw_bytes
    return groups


def _laid_down(batch: pa.RecordBatch, scratch: Path | None) -> pa.RecordBatch:
    """Return the batch in a mapped file that is removed with its last reader; the batch itself if the disk is full."""
    if scratch is None:
        return batch
    try:
        descriptor, name = tempfile.mkstemp(prefix=".group-", dir=scratch)
        try:
            with os.fdopen(descriptor, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            return pa.ipc.open_file(pa.memory_map(name)).get_batch(0)
        finally:
            os.unlink(name)
    except (OSError, pa.ArrowException):
        return batch  # disk full: silent on purpose (invariant 5)
