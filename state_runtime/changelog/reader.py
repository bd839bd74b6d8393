"""Reading changelog and state tables back: the state of any hash range of any snapshot, vectorised.

A shard of any parallelism is one hash range, so a restore after a rescale is the same read with other bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_runtime.changelog.segment import PartEntry, SegmentIndex, decode_index, decode_lines, decode_part, sha256
from state_runtime.changelog.versions import StateVersions, check_dropped
from state_runtime.errors import CorruptManifest, CorruptSegment, MissingFile
from state_runtime.limits import PART_BYTES_MAX, SEGMENT_INDEX_BYTES_MAX, SOURCE_LOG_BYTES_MAX
from state_runtime.restore.shard_files import Bottom, direct, read_listing
from state_runtime.snapshot.manifest import FileEntry, Manifest, OperatorEntry, SegmentEntry, TableEntry
from state_runtime.state.table import DELETED, StateSchema, concat, slice_hash_range
from state_runtime.store import Store

__all__ = [
    "check_index",
    "count_live",
    "fetch_part",
    "index_range",
    "read_index",
    "read_source_log",
    "read_states",
    "read_table",
]


def read_index(root: Store, segment: SegmentEntry, job_uids: Collection[str]) -> SegmentIndex:
    """The index of a segment: one range read, checked.

    Args:
        job_uids: jobs that may have written it (`Manifest.job_uids`).

    Raises:
        MissingFile, CorruptSegment: the segment cannot be trusted. StoreUnavailable: try again.
    """
    return check_index(segment, _range(root, segment.path, *index_range(segment)), job_uids)


def index_range(segment: SegmentEntry) -> tuple[int, int]:
    """Where the index of a segment lies in it: offset and length.

    Raises:
        CorruptSegment: the manifest's numbers cannot be.
    """
    if segment.index_bytes > min(segment.bytes, SEGMENT_INDEX_BYTES_MAX):
        raise CorruptSegment(f"the manifest gives {segment.path} an index larger than itself")
    return segment.bytes - segment.index_bytes, segment.index_bytes


def check_index(segment: SegmentEntry, tail: bytes, job_uids: Collection[str]) -> SegmentIndex:
    """The index of a segment from its tail, checked.

    Raises:
        CorruptSegment: see `read_index`.
    """
    index = decode_index(tail, segment.path)
    if index.job_uid not in job_uids or index.snapshot_id != segment.snapshot_id:
        raise CorruptSegment(
            f"{segment.path} belongs to snapshot {index.snapshot_id} of job {index.job_uid}, "
            f"not to snapshot {segment.snapshot_id} of {' or '.join(sorted(job_uids))}: files were swapped"
        )
    return index


def read_states(
    root: Store,
    manifest: Manifest,
    operator: str | OperatorEntry,
    schemas: Mapping[str, StateSchema],
    low: int,
    high: int,
) -> dict[str, pa.RecordBatch]:
    """The states of one operator in one hash range, as of a snapshot.

    Segments, layers and files of shards are read newest first and folded, so the newest row of an identity wins; tombstones, clear markers
    and rows whose TTL has run out are gone. What is older than its operator or state (`since`), or of a state that was
    dropped since, is passed over; rows of older columns are brought to the newest.

    Args:
        operator: uid, to read by the manifest's own description; or the description to read by (of a restart with changed
            states: what `reconcile` returned).
        schemas: the newest columns of its states.
        low, high: closed range of unsigned key hashes.

    Returns:
        Per state one sorted batch, each identity once.

    Raises:
        MissingFile, CorruptSegment: primary data is damaged: the message names the file. Nothing is guessed.
        CorruptManifest: it does not describe the operator. StoreUnavailable: try again.
    """
    entry = operator if isinstance(operator, OperatorEntry) else _described(manifest, operator)
    versions = {s.name: StateVersions(entry, s, schemas[s.name]) for s in entry.states if s.name in schemas}
    newest_first: dict[str, list[pa.RecordBatch]] = {state: [] for state in schemas}

    def add(state: str, snapshot_id: int, path: str, load: Callable[[], pa.RecordBatch]) -> None:
        if state not in versions:
            check_dropped(entry, state, snapshot_id, path)
        elif snapshot_id >= versions[state].since:
            batch = slice_hash_range(load(), low, high)
            newest_first[state].append(versions[state].read(batch, snapshot_id, path))

    for segment in reversed(manifest.state_segments):
        if segment.snapshot_id < entry.since:
            continue
        # Several epochs may be in one segment: its later parts are younger.
        for part in reversed(read_index(root, segment, manifest.job_uids).parts):
            if part.kind == "state" and part.operator == entry.uid and part.hash_high >= low and part.hash_low <= high:
                load = partial(fetch_part, root, segment.path, part)
                add(part.state, segment.snapshot_id, part.path or segment.path, load)
    for layer in reversed(manifest.layers):
        for table in layer.tables:
            newest = layer.newest_in(table)
            if (
                table.operator == entry.uid
                and newest >= entry.since
                and table.hash_low <= high
                and table.hash_high >= low
            ):
                add(table.state, newest, table.path, partial(read_table, root, table))
    objects = direct(root)
    listing = read_listing(objects, manifest)
    if listing is not None:
        bottom = Bottom(objects, listing, entry)
        bottom.check(versions)
        for state, version in versions.items():
            newest_first[state] += [
                concat(list(source), schemas[state].arrow) for source in bottom.sources(state, version, low, high)
            ]
    now_ms = manifest.time.batch_time_ms if manifest.time is not None else None
    states = {state: schema.empty() for state, schema in schemas.items()}
    for state, batches in newest_first.items():
        if batches:
            states[state] = versions[state].fold(batches, drop_deleted=True, now_ms=now_ms)
    return states


def _described(manifest: Manifest, uid: str) -> OperatorEntry:
    entry = next((o for o in manifest.operators if o.uid == uid), None)
    if entry is None:
        raise CorruptManifest(
            f"snapshot {manifest.snapshot_id} does not describe operator {uid!r}, whose state it should hold"
        )
    return entry


def fetch_part(root: Store, segment_path: str, part: PartEntry) -> pa.RecordBatch:
    """One part of a segment: a range read, checked by digest, sorted as it must be, in the columns of its time.

    Raises:
        MissingFile, CorruptSegment: see `read_states`.
    """
    path = part.path or segment_path
    batch = decode_part(_range(root, path, part.offset, part.length), part, path)
    return StateSchema.of(batch.schema).check_batch(batch, path)


def read_table(root: Store, table: TableEntry) -> pa.RecordBatch:
    """A state table file, checked against its manifest entry and sorted as it must be.

    Raises:
        MissingFile, CorruptSegment: see `read_states`.
    """
    data = _whole(root, FileEntry(table.path, table.bytes, table.digest))
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check_size(table, file.metadata)
        stored = file.read()
        schema = StateSchema.of(pa.schema([f.with_metadata(None) for f in stored.schema]))
        stored = stored.cast(schema.arrow)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptSegment(f"{table.path} is not a table of {table.operator}/{table.state}: {error}") from error
    batches = stored.combine_chunks().to_batches()
    batch = batches[0] if batches else schema.empty()
    return schema.check_batch(batch, table.path)


def _check_size(table: TableEntry, metadata: pq.FileMetaData) -> None:
    """Before memory is taken for it.

    Raises:
        ValueError: the file says that it is larger than it can be.
    """
    size = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
    if metadata.num_rows != table.rows or not 0 <= size <= PART_BYTES_MAX:
        raise ValueError(
            f"it has {metadata.num_rows:,} rows and {size:,} bytes where the manifest says {table.rows:,} rows"
        )


def read_source_log(root: Store, manifest: Manifest, source: int) -> list[str]:
    """All lines of a source's log of seen files, oldest first."""
    lines: list[str] = []
    for layer in manifest.layers:
        for entry in layer.source_logs:
            if entry.path.endswith(f"/source-{source}.log"):
                data = _whole(root, entry)
                if len(data) > SOURCE_LOG_BYTES_MAX:
                    raise CorruptSegment(f"{entry.path} has {len(data):,} bytes, more than {SOURCE_LOG_BYTES_MAX:,}")
                lines.extend(data.decode().split("\n") if data else [])
    for segment in manifest.segments:
        for part in read_index(root, segment, manifest.job_uids).parts:
            if part.kind == "source" and part.operator == str(source):
                path = part.path or segment.path
                lines.extend(decode_lines(_range(root, path, part.offset, part.length), part, path))
    return lines


def count_live(batch: pa.RecordBatch) -> int:
    """Rows that are not tombstones."""
    gone: Any = pc.sum(batch.column(batch.schema.get_field_index(DELETED))).as_py()
    return int(batch.num_rows - (gone or 0))


def _range(root: Store, path: str, offset: int, length: int) -> bytes:
    try:
        return root.read_range(path, offset, length)
    except FileNotFoundError as error:
        raise _missing(root, path) from error


def _whole(root: Store, entry: FileEntry) -> bytes:
    try:
        data = root.read(entry.path, entry.bytes)
    except FileNotFoundError as error:
        raise _missing(root, entry.path) from error
    if len(data) != entry.bytes or sha256(data) != entry.digest:
        raise CorruptSegment(
            f"{entry.path} in {root.url} was altered: it has another size or digest than the manifest says. "
            "Restore the file from a copy of the job root, or start from an older snapshot"
        )
    return data


def _missing(root: Store, path: str) -> MissingFile:
    return MissingFile(
        f"{path} is missing in {root.url} although a manifest names it. "
        "Restore the file from a copy of the job root, or start from an older snapshot"
    )
