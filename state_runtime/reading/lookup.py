"""Reading the rows of one state of a snapshot, one key or one step of the hash range at a time.

A key's place in the state is its hash. So a look-up of one key reads, from new to old, the index of a segment and the
one part of it that holds the hash, until the key is found; then the state tables. A table is read one hash range after
the other, as the stored files are cut, so that a limited read of a large state ends early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from state_runtime.base.errors import CorruptSegment
from state_runtime.changelog.reader import fetch_part, read_index, read_table
from state_runtime.changelog.snapshot_state import SnapshotState
from state_runtime.changelog.versions import StateVersions
from state_runtime.restore.uploaded_files import Bottom, direct, read_listing
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.state.keyhash import hash_key
from state_runtime.state.table import (
    CLEAR_MARKER,
    HASH_MAX,
    StateSchema,
    concat,
    entries_of,
    hashes_of,
    same_keys,
    slice_hash_range,
)
from state_runtime.store import Store

__all__ = ["StateLookup", "repeated"]

# A scan goes from one stored file's lower bound to the next; more steps than this only take time.
_RANGES_MAX = 1024


@dataclass(frozen=True)
class StateLookup:
    """The stored rows of one state of one operator as of one snapshot.

    Every method may raise:
        MissingFile, CorruptSegment: stored data is damaged; the message names the file. StoreUnavailable: try again.
    """

    root: Store
    manifest: Manifest
    operator: OperatorEntry
    state: StateEntry
    versions: StateVersions

    def one(self, wanted: Sequence[pa.Array]) -> Iterator[pa.RecordBatch]:
        """Yield the live rows of one key; older files are not read once no row in them can count.

        Args:
            wanted: the key columns, of one row.
        """
        if not all(column.binary_equality for column in self.versions.keys):
            # For a string with a collation Spark does not hash its bytes: search everywhere.
            for batch in self.scan(0, HASH_MAX):
                yield _only_key(batch, wanted)
            return
        hashed = hash_key(wanted)
        newest_first: list[pa.RecordBatch] = []
        for source in self._sources(hashed, hashed):
            batch = _only_key(slice_hash_range(self._load(source), hashed, hashed), wanted)
            newest_first.append(batch)
            if batch.num_rows and (self.state.kind == "value" or CLEAR_MARKER in entries_of(batch)):
                break
        yield self._fold(newest_first)

    def scan(self, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Yield the live rows of a closed hash range, folded one part of the range after the other."""
        sources = list(self._sources(low, high))
        if not sources:
            yield self.versions.declared.empty()
            return
        cuts = sorted({low, *(source.low for source in sources if source.low > low)})
        cuts = cuts[:: -(-len(cuts) // _RANGES_MAX)]
        waiting = sorted(range(len(sources)), key=lambda number: sources[number].low, reverse=True)
        open_files: dict[int, pa.RecordBatch] = {}
        for start, end in zip(cuts, [*(cut - 1 for cut in cuts[1:]), high], strict=True):
            while waiting and sources[waiting[-1]].low <= end:
                number = waiting.pop()
                open_files[number] = self._load(sources[number])
            # Sources are numbered newest first, which is the order that folding needs.
            newest_first = [slice_hash_range(open_files[number], start, end) for number in sorted(open_files)]
            if newest_first:
                yield self._fold(newest_first)
            open_files = {number: batch for number, batch in open_files.items() if sources[number].high > end}

    def _fold(self, newest_first: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        now_ms = self.manifest.time.batch_time_ms if self.manifest.time is not None else None
        try:
            return self.versions.fold(newest_first, drop_deleted=True, now_ms=now_ms)
        except CorruptSegment as error:
            raise CorruptSegment(
                f"{self.versions.name} has other types in one file than in another: {error}"
            ) from error

    def _sources(self, low: int, high: int) -> Iterator[_Source]:
        """Yield the sources of this state's rows in a hash range, newest first; an index is read when its turn
        comes."""
        stored = SnapshotState(self.manifest, [self.operator])
        for segment in stored.segments(self.versions.since - 1):
            index = read_index(self.root, segment, self.manifest.job_uids)
            for found in stored.parts(segment, index, low, high):
                if found.state == self.state.name:
                    load = partial(fetch_part, self.root, segment.path, found.part)
                    yield _Source(found.path, found.snapshot_id, *found.hash_range, load)
        for at in stored.tables(low, high):
            if at.state == self.state.name:
                yield _Source(at.path, at.snapshot_id, *at.hash_range, partial(read_table, self.root, at.table))
        objects = direct(self.root)
        listing = read_listing(objects, self.manifest)
        if listing is None:
            return
        bottom = Bottom(objects, listing, self.operator)
        bottom.check({state.name for state in self.operator.states})
        for shard in bottom.shards(self.state.name, self.versions, low, high):
            for run in bottom.runs(shard, self.state.name, low, high):
                load = partial(_whole, run, listing.schema(shard, self.state.name).arrow)
                yield _Source(f"version {shard.version}", shard.snapshot_id, *shard.hash_range, load)

    def _load(self, source: _Source) -> pa.RecordBatch:
        """Return a part or table in the newest columns, checked against the manifest's and its own range."""
        batch = source.load()
        try:
            # Values go to people and into other programs: offsets and text are checked, regardless of their writer.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptSegment(
                f"{source.path}: {self.versions.name} holds values of another type than its own"
            ) from error
        hashes = hashes_of(batch)
        if len(hashes) and not (source.low <= int(hashes[0]) and int(hashes[-1]) <= source.high):
            raise CorruptSegment(
                f"{source.path}: {self.versions.name} has keys outside of the hash range that it is named for"
            )
        return self.versions.read(batch, source.snapshot_id, source.path)


@dataclass(frozen=True)
class _Source:
    """Where rows are stored, how new they are, the closed range of hashes that they may have, and how to read them."""

    path: str
    snapshot_id: int
    low: int
    high: int
    load: Callable[[], pa.RecordBatch]


def _whole(run: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    return concat(list(run), schema)


def _only_key(batch: pa.RecordBatch, wanted: Sequence[pa.Array]) -> pa.RecordBatch:
    """Return the rows of one key, clear markers included."""
    stored = StateSchema.of(batch.schema).keys_of(batch)
    return batch.filter(pa.array(same_keys(stored, [repeated(column, batch.num_rows) for column in wanted])))


def repeated(one: pa.Array, count: int) -> pa.Array:
    """Return a column with its one row repeated `count` times."""
    return pa.repeat(one[0], count)
