"""Reading changelog and state tables back: the state of any hash range of any snapshot, vectorised.

A shard of any parallelism is one hash range, so a restore after a rescale is the same read with other bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import RESTORE_OR_GO_BACK, CorruptSegment, missing_file
from state_runtime.base.limits import PART_BYTES_MAX, SEGMENT_INDEX_BYTES_MAX, SOURCE_LOG_BYTES_MAX
from state_runtime.changelog.inflight import InflightPass, RowsPart
from state_runtime.changelog.parts import PartEntry, decode_lines, decode_part, sha256
from state_runtime.changelog.segment import SegmentIndex, decode_index
from state_runtime.snapshot.manifest import FileEntry, Manifest, SegmentEntry, TableEntry
from state_runtime.state.table import StateSchema
from state_runtime.store import Store

__all__ = [
    "check_index",
    "fetch_part",
    "index_range",
    "read_index",
    "read_passes",
    "read_table",
    "stream_source_log",
]


def read_index(root: Store, segment: SegmentEntry, job_uids: Collection[str]) -> SegmentIndex:
    """Read and check the index of a segment: one range read.

    Args:
        job_uids: jobs that may have written it (`Manifest.job_uids`).

    Raises:
        MissingFile, CorruptSegment: the segment cannot be trusted. StoreUnavailable: try again.
    """
    return check_index(segment, _range(root, segment.path, *index_range(segment)), job_uids)


def read_passes(root: Store, manifest: Manifest) -> tuple[InflightPass, ...]:
    """Read the rows in flight of a snapshot, from its listing: one range read; empty without such rows. Each part names
    its segment.

    Raises:
        MissingFile, CorruptSegment: the listing cannot be trusted. StoreUnavailable: try again.
    """
    batch = manifest.open_batch
    if batch is None or not batch.listing:
        return ()
    listing = next(s for s in batch.segments if s.path == batch.listing)
    passes = read_index(root, listing, manifest.job_uids).passes
    held = {s.path for s in batch.segments}
    located = [replace(p, parts=tuple(_located(part, batch.listing) for part in p.parts)) for p in passes]
    unknown = [part.segment for p in located for part in p.parts if part.segment not in held]
    if unknown or {p.operator for p in located} != {o.uid for o in batch.operators}:
        raise CorruptSegment(
            f"{batch.listing} lists other rows in flight than snapshot {manifest.snapshot_id} names. "
            f"{RESTORE_OR_GO_BACK}"
        )
    return tuple(located)


def _located(part: RowsPart, listing: str) -> RowsPart:
    return part if part.segment else replace(part, segment=listing)


def index_range(segment: SegmentEntry) -> tuple[int, int]:
    """Return the offset and length of a segment's index.

    Raises:
        CorruptSegment: the manifest's numbers are impossible.
    """
    if segment.index_bytes > min(segment.bytes, SEGMENT_INDEX_BYTES_MAX):
        raise CorruptSegment(f"the manifest gives {segment.path} an index larger than itself")
    return segment.bytes - segment.index_bytes, segment.index_bytes


def check_index(segment: SegmentEntry, tail: bytes, job_uids: Collection[str]) -> SegmentIndex:
    """Decode and check the index of a segment from its tail.

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


def fetch_part(root: Store, segment_path: str, part: PartEntry) -> pa.RecordBatch:
    """Read one part of a segment: a range read, with digest and order checked, in the columns that it was written with.

    Raises:
        MissingFile, CorruptSegment: the file differs from the manifest.
    """
    path = part.path or segment_path
    batch = decode_part(_range(root, path, part.offset, part.length), part, path)
    return StateSchema.of(batch.schema).check_batch(batch, path)


def read_table(root: Store, table: TableEntry) -> pa.RecordBatch:
    """Read a state table file, checked against its manifest entry and for its order.

    Raises:
        MissingFile, CorruptSegment: the file differs from the manifest.
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
    if len(batches) > 1:  # one column has more than 2 GiB of text, which no batch can hold
        raise CorruptSegment(f"{table.path} has a column that is larger than a table's may be")
    batch = batches[0] if batches else schema.empty()
    return schema.check_batch(batch, table.path)


def _check_size(table: TableEntry, metadata: pq.FileMetaData) -> None:
    """Check the size of a table before memory is allocated for it.

    Raises:
        ValueError: the file declares a larger size than it can have.
    """
    size = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
    if metadata.num_rows != table.rows or not 0 <= size <= PART_BYTES_MAX:
        raise ValueError(
            f"it has {metadata.num_rows:,} rows and {size:,} bytes where the manifest says {table.rows:,} rows"
        )


def stream_source_log(root: Store, manifest: Manifest, source: int) -> Iterator[str]:
    """Yield a source's log of seen files, oldest first: texts of one or more lines, as stored.

    Raises:
        MissingFile, CorruptSegment: a file differs from the manifest. StoreUnavailable: try again.
    """
    for layer in manifest.layers:
        for entry in layer.source_logs:
            if entry.path.endswith(f"/source-{source}.log"):
                if entry.bytes > SOURCE_LOG_BYTES_MAX:
                    raise CorruptSegment(f"{entry.path} has {entry.bytes:,} bytes, more than {SOURCE_LOG_BYTES_MAX:,}")
                if data := _whole(root, entry):
                    yield data.decode()
    for segment in manifest.segments:
        for part in read_index(root, segment, manifest.job_uids).parts:
            if part.kind == "source" and part.operator == str(source):
                path = part.path or segment.path
                if lines := decode_lines(_range(root, path, part.offset, part.length), part, path):
                    yield "\n".join(lines)


def _range(root: Store, path: str, offset: int, length: int) -> bytes:
    try:
        return root.read_range(path, offset, length)
    except FileNotFoundError as error:
        raise missing_file(path, root.url) from error


def _whole(root: Store, entry: FileEntry) -> bytes:
    try:
        data = root.read(entry.path, entry.bytes)
    except FileNotFoundError as error:
        raise missing_file(entry.path, root.url) from error
    if len(data) != entry.bytes or sha256(data) != entry.digest:
        raise CorruptSegment(
            f"{entry.path} in {root.url} was altered: it has another size or digest than the manifest says. "
            f"{RESTORE_OR_GO_BACK}"
        )
    return data
