"""Checks of the content of an object that a snapshot needs: read through a local file, compared, and decoded. No
content is kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import CorruptData, CorruptSegment, MissingFile, StillstateError, StoreUnavailable
from state_runtime.base.limits import SOURCE_LOG_BYTES_MAX
from state_runtime.changelog.parts import PartEntry, decode_lines, decode_part, sha256
from state_runtime.changelog.reader import check_index, index_range
from state_runtime.changelog.rows import decode_rows
from state_runtime.maintenance.copy.objects import NeededObject
from state_runtime.maintenance.verify.report import Finding, FindingKind, kind_of_error
from state_runtime.reading.references import StoredRef
from state_runtime.restore.uploaded_files import Bottom, direct
from state_runtime.snapshot.manifest import OperatorEntry, SegmentEntry, TableEntry
from state_runtime.snapshot.shard_files import ShardFiles, ShardListing
from state_runtime.state.table import StateSchema, hashes_of
from state_runtime.store import Store

__all__ = ["Looked", "Subject", "decode_shard", "look_at"]

_ROWS = 1 << 16
_ALTERED = "a part of it has another digest than its segment's index says"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An object to check, with all known facts.

    Attributes:
        refs: the references to it; several for a direct object.
        snapshot_id: the first snapshot that needs it.
        within: for a direct object, the path of the segment whose index names it.
        segment, table: the manifest's entry, if the object is one.
        job_uids: the jobs that may have written it.
    """

    need: NeededObject
    refs: tuple[StoredRef, ...]
    snapshot_id: int
    job_uids: frozenset[str]
    within: str = ""
    segment: SegmentEntry | None = None
    table: TableEntry | None = None


@dataclass(frozen=True)
class Looked:
    """The result of checking one object.

    Attributes:
        size: 0 if it does not exist. was_read: whether its bytes were compared. rows: number of decoded rows.
    """

    subject: Subject
    size: int = 0
    was_read: bool = False
    rows: int = 0
    findings: tuple[Finding, ...] = ()


def look_at(root: Store, subject: Subject, scratch: Path, *, listed: int | None, read: bool, decode: bool) -> Looked:
    """Check one object. Runs in a separate thread.

    Args:
        scratch: a name for a local file, which is removed again.
        listed: its size in a listing; None asks the store.
        read: compare its bytes; decode: and decode them.
    """
    size = 0
    try:
        size = root.size(subject.need.path) if listed is None else listed
        if not subject.need.fits_size(size):
            # Ask for the object itself once more, before it is called damaged.
            size = root.size(subject.need.path)
        if not subject.need.fits_size(size):
            least = "" if subject.need.bytes >= 0 else "at least "
            why = f"it has {size:,} bytes where {least}{subject.need.bytes_known:,} were written"
            return Looked(subject, size, findings=_all("damaged", subject, why))
        if not read:
            return Looked(subject, size)
        if not _fetch(root, subject.need, scratch):
            return Looked(subject, size, True, findings=tuple(_bad_parts(subject, scratch)))
        return Looked(subject, size, True, _decoded_rows(subject, scratch) if decode else 0)
    except FileNotFoundError:
        return Looked(subject, findings=_all("missing", subject, "it is not there"))
    except StillstateError as error:
        return Looked(subject, size, findings=_all(kind_of_error(error), subject, str(error)))
    finally:
        scratch.unlink(missing_ok=True)


def _all(kind: FindingKind, subject: Subject, why: str) -> tuple[Finding, ...]:
    return tuple(Finding.of(kind, ref, why, subject.snapshot_id) for ref in subject.refs)


def _fetch(root: Store, need: NeededObject, scratch: Path) -> bool:
    """Read an object into a file; return whether it is the needed one.

    It is read again before it is called damaged. A truncated answer is a fault of the network, not of the data.

    Raises:
        MissingFile: it does not exist. StoreUnavailable: it cannot be read.
    """
    for _ in range(2):
        scratch.touch()
        try:
            root.get_file(need.path, scratch)
        except FileNotFoundError as error:
            raise MissingFile(f"{need.path} is missing in {root.url}") from error
        if need.is_in(scratch):
            return True
    size, got = root.size(need.path), scratch.stat().st_size
    if size != got:
        raise StoreUnavailable(f"{need.path} has {size:,} bytes in {root.url}, but {got:,} came, twice")
    return False


def _decoded_rows(subject: Subject, file: Path) -> int:
    """Decode all of an object whose digest is right; return its number of rows.

    Raises:
        CorruptSegment: it was written damaged: its rows, columns, order or identity are wrong.
    """
    ref = subject.refs[0]
    if ref.kind == "table" and subject.table is not None:
        return _rows_of_table(subject.table, file)
    if ref.kind == "segment" and subject.segment is not None:
        return _rows_of_segment(subject.segment, subject.job_uids, file)
    if ref.kind == "direct":
        data = pa.memory_map(str(file)).read_buffer()
        return sum(_rows_of_part(data, r.part, r.path) for r in subject.refs if r.part is not None)
    if ref.kind == "source-log":
        return _rows_of_log(ref, file)
    return 0  # `decode_shard` decodes the files of a shard together; the listing was decoded before


def _bad_parts(subject: Subject, file: Path) -> Iterator[Finding]:
    """Find the damaged parts of an object with a wrong digest, as far as its index shows them: operator, state, hash
    range, and reason."""
    ref = subject.refs[0]
    data = pa.memory_map(str(file)).read_buffer() if file.stat().st_size else pa.py_buffer(b"")
    if subject.segment is not None and data.size == subject.segment.bytes:
        try:
            offset, length = index_range(subject.segment)
            index = check_index(subject.segment, data.slice(offset, length).to_pybytes(), subject.job_uids)
        except CorruptData:
            index = None
        found = False
        for part in index.parts if index is not None else ():
            if not part.path and not _is_intact(data, part):
                found = True
                yield Finding.of("damaged", _ref_of(ref, part), _ALTERED, subject.snapshot_id)
        if found:
            return
    elif ref.kind == "direct":
        for one in subject.refs:
            if one.part is not None and not _is_intact(data, one.part):
                yield Finding.of("damaged", one, _ALTERED, subject.snapshot_id)
        return
    yield from _all("damaged", subject, "its digest is another than its manifest says")


def decode_shard(root: Store, listing: ShardListing, shard: ShardFiles) -> int:
    """Decode the files of one shard; return their number of rows, older ones of a key included.

    Raises:
        CorruptData, MissingFile: the files are not a version of the shard. StoreUnavailable: try again.
    """
    bottom = Bottom(direct(root), listing, OperatorEntry(uid=shard.operator, kind="", key_schema="", states=()))
    low, high = shard.hash_range
    return sum(
        batch.num_rows for state in shard.columns for run in bottom.runs(shard, state, low, high) for batch in run
    )


def _ref_of(ref: StoredRef, part: PartEntry) -> StoredRef:
    return StoredRef(
        kind=ref.kind,
        path=ref.path,
        bytes=ref.bytes,
        digest="",
        operator=part.operator,
        state=part.state,
        hash_low=part.hash_low,
        hash_high=part.hash_high,
    )


def _is_intact(data: pa.Buffer, part: PartEntry) -> bool:
    return bool(part.offset + part.length <= data.size and sha256(data.slice(part.offset, part.length)) == part.digest)


def _rows_of_segment(segment: SegmentEntry, job_uids: frozenset[str], file: Path) -> int:
    data = pa.memory_map(str(file)).read_buffer()
    offset, length = index_range(segment)
    index = check_index(segment, data.slice(offset, length).to_pybytes(), job_uids)
    if sum(part.rows for part in index.parts) != segment.rows:
        raise CorruptSegment(f"{segment.path} indexes other rows than the {segment.rows:,} that the manifest says")
    return sum(_rows_of_part(data, part, segment.path) for part in index.parts if not part.path)


def _rows_of_part(data: pa.Buffer, part: PartEntry, where: str) -> int:
    body = data.slice(part.offset, part.length)
    if part.kind == "source":
        return len(decode_lines(body.to_pybytes(), part, where))
    if part.kind == "rows":
        return int(decode_rows(body, part, where).num_rows)
    batch = decode_part(body, part, where)
    StateSchema.of(batch.schema).check_batch(batch, where)
    _check_range(batch, part.hash_low, part.hash_high, where)
    return int(batch.num_rows)


def _rows_of_table(table: TableEntry, file: Path) -> int:
    rows, last = 0, -1
    try:
        with pq.ParquetFile(file, memory_map=True, page_checksum_verification=True) as parquet:
            schema = StateSchema.of(pa.schema([f.with_metadata(None) for f in parquet.schema_arrow]))
            for batch in parquet.iter_batches(batch_size=_ROWS):
                batch = batch.cast(schema.arrow)
                schema.check_batch(batch, table.path)
                _check_range(batch, table.hash_low, table.hash_high, table.path)
                hashes = hashes_of(batch)
                if len(hashes):
                    if int(hashes[0]) < last:
                        raise CorruptSegment(f"{table.path} is not sorted by key hash")
                    last = int(hashes[-1])
                rows += batch.num_rows
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptSegment(f"{table.path} is not a table of {table.operator}/{table.state}: {error}") from error
    if rows != table.rows:
        raise CorruptSegment(f"{table.path} holds {rows:,} rows where the manifest says {table.rows:,}")
    return rows


def _rows_of_log(ref: StoredRef, file: Path) -> int:
    if ref.bytes > SOURCE_LOG_BYTES_MAX:
        raise CorruptSegment(f"{ref.path} has {ref.bytes:,} bytes, more than {SOURCE_LOG_BYTES_MAX:,}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptSegment(f"{ref.path} is not text: {error}") from error
    return text.count("\n") + 1 if text else 0


def _check_range(batch: pa.RecordBatch, low: int, high: int, where: str) -> None:
    hashes = hashes_of(batch)
    if len(hashes) and bool(np.any((hashes < np.uint64(low)) | (hashes > np.uint64(high)))):
        raise CorruptSegment(f"{where} holds keys outside of its hash range [{low:016x}, {high:016x}]")
