"""Reading changelog and state tables back: the state of any hash range of any snapshot, vectorised.

A shard of any parallelism is one hash range, so a restore after a rescale is the same read with other bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_runtime.changelog.segment import PartEntry, SegmentIndex, decode_index, decode_lines, decode_part, sha256
from state_runtime.errors import CorruptSegment, MissingFile
from state_runtime.limits import SEGMENT_INDEX_BYTES_MAX, SOURCE_LOG_BYTES_MAX
from state_runtime.snapshot.manifest import FileEntry, Manifest, SegmentEntry, TableEntry
from state_runtime.state.table import DELETED, StateSchema, fold, slice_hash_range
from state_runtime.store import Store

__all__ = ["count_live", "fetch_part", "read_index", "read_source_log", "read_states", "read_table"]


def read_index(root: Store, segment: SegmentEntry, job_uid: str) -> SegmentIndex:
    """The index of a segment: one range read, checked.

    Raises:
        MissingFile, CorruptSegment: the segment cannot be trusted. StoreUnavailable: try again.
    """
    if segment.index_bytes > min(segment.bytes, SEGMENT_INDEX_BYTES_MAX):
        raise CorruptSegment(f"the manifest gives {segment.path} an index larger than itself")
    tail = _range(root, segment.path, segment.bytes - segment.index_bytes, segment.index_bytes)
    index = decode_index(tail, segment.path)
    if index.job_uid != job_uid or index.snapshot_id != segment.snapshot_id:
        raise CorruptSegment(
            f"{segment.path} belongs to snapshot {index.snapshot_id} of job {index.job_uid}, "
            f"not to snapshot {segment.snapshot_id} of {job_uid}: files were swapped"
        )
    return index


def read_states(
    root: Store,
    manifest: Manifest,
    operator: str,
    schemas: Mapping[str, StateSchema],
    low: int,
    high: int,
) -> dict[str, pa.RecordBatch]:
    """The states of one operator in one hash range, as of a snapshot.

    Layers and segments are read newest first and folded, so a key's newest row wins; tombstones are gone.

    Args:
        low, high: closed range of unsigned key hashes.

    Returns:
        Per state one sorted batch, each key once.

    Raises:
        MissingFile, CorruptSegment: primary data is damaged: the message names the file. Nothing is guessed.
        StoreUnavailable: try again.
    """
    newest_first: dict[str, list[pa.RecordBatch]] = {state: [] for state in schemas}
    for segment in reversed(manifest.segments):
        for part in read_index(root, segment, manifest.job_uid).parts:
            if part.kind != "state" or part.operator != operator or part.hash_high < low or part.hash_low > high:
                continue
            schema = schemas.get(part.state)
            if schema is None:
                raise CorruptSegment(
                    f"{segment.path} holds state {part.state!r} that operator {operator!r} does not have"
                )
            batch = schema.check_batch(fetch_part(root, segment.path, part), part.path or segment.path)
            newest_first[part.state].append(slice_hash_range(batch, low, high))
    for layer in reversed(manifest.layers):
        for table in layer.tables:
            if table.operator == operator and table.hash_low <= high and table.hash_high >= low:
                if table.state not in schemas:
                    raise CorruptSegment(
                        f"{table.path} holds state {table.state!r} that operator {operator!r} does not have"
                    )
                batch = schemas[table.state].check_batch(read_table(root, table), table.path)
                newest_first[table.state].append(slice_hash_range(batch, low, high))
    return {state: fold(batches, schemas[state], drop_deleted=True) for state, batches in newest_first.items()}


def fetch_part(root: Store, segment_path: str, part: PartEntry) -> pa.RecordBatch:
    """One part of a segment: a range read, checked by digest, sorted as it must be.

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
        stored = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        schema = StateSchema.of(pa.schema([f.with_metadata(None) for f in stored.schema]))
        stored = stored.cast(schema.arrow)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptSegment(f"{table.path} is not a table of {table.operator}/{table.state}: {error}") from error
    if stored.num_rows != table.rows:
        raise CorruptSegment(f"{table.path} holds {stored.num_rows} rows where the manifest says {table.rows}")
    batches = stored.combine_chunks().to_batches()
    batch = batches[0] if batches else schema.empty()
    return schema.check_batch(batch, table.path)


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
        for part in read_index(root, segment, manifest.job_uid).parts:
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
