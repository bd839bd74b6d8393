"""Parts and tables of one operator, read from the objects that hold them and checked before anyone believes them.

A part is read by its range, a table by row group, so that of a large table little is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from state_runtime.base.errors import CorruptSegment, StillstateError
from state_runtime.changelog.parts import decode_part
from state_runtime.changelog.reader import check_index, index_range
from state_runtime.changelog.segment import SegmentIndex
from state_runtime.changelog.snapshot_state import StoredPart, StoredTable
from state_runtime.changelog.versions import StateVersions
from state_runtime.restore.objects import HostObjects, WantedObject, WantedRange
from state_runtime.restore.stream import windows
from state_runtime.snapshot.manifest import Manifest, SegmentEntry, TableEntry
from state_runtime.state.table import StateSchema, concat, hashes_of, slice_hash_range

__all__ = ["StoredRows"]


class StoredRows:
    """Reads what a snapshot stores of one operator.

    Args:
        segments: all that parts may lie in.
        operator: uid.
        strict: also check that values are what their types say, and that hashes lie in the range that the file is
            named for.
    """

    def __init__(
        self, objects: HostObjects, manifest: Manifest, segments: Sequence[SegmentEntry], operator: str, *, strict: bool
    ) -> None:
        self._objects = objects
        self._job_uids = manifest.job_uids
        self._packed = {s.path: WantedObject(s.path, s.bytes, s.digest) for s in segments}
        self._operator = operator
        self._strict = strict

    # --- segments ------------------------------------------------------------------------------------------------

    def expect_indexes(self, segments: Sequence[SegmentEntry]) -> None:
        """The indexes of these segments are read next; whoever reads by range may fetch them together."""
        self._objects.expect([self._index_of(segment) for segment in segments], keep=True)

    def index(self, segment: SegmentEntry) -> SegmentIndex:
        """The index of a segment.

        Raises:
            MissingFile, CorruptSegment, StoreUnavailable: see `changelog.reader.read_index`.
        """
        tail = self._objects.read_range(self._index_of(segment)).to_pybytes()
        return check_index(segment, tail, self._job_uids)

    def expect_parts(self, parts: Sequence[StoredPart]) -> None:
        """These parts are read next."""
        self._objects.expect([self._range_of(part) for part in parts])

    def part(self, stored: StoredPart) -> pa.RecordBatch:
        """A part in the columns of its time.

        Raises:
            MissingFile, CorruptSegment, StoreUnavailable: see `changelog.reader.fetch_part`.
        """
        batch = decode_part(self._objects.read_range(self._range_of(stored)), stored.part, stored.path)
        self.check(batch, *stored.hash_range, stored.path)
        return StateSchema.of(batch.schema).check_batch(batch, stored.path)

    def _index_of(self, segment: SegmentEntry) -> WantedRange:
        return WantedRange(self._packed[segment.path], *index_range(segment))

    def _range_of(self, stored: StoredPart) -> WantedRange:
        part = stored.part
        return WantedRange(self.object_of(stored), part.offset, part.length)

    def object_of(self, stored: StoredPart) -> WantedObject:
        """The object that holds a part: the packed segment, or one that a task uploaded itself."""
        return WantedObject(stored.part.path) if stored.part.path else self._packed[stored.segment]

    # --- tables --------------------------------------------------------------------------------------------------

    def table(self, stored: StoredTable, versions: StateVersions, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """The rows of a table in a closed range, in the newest columns, one row group at a time.

        Raises:
            MissingFile, CorruptSegment: the file is not what the manifest says. StoreUnavailable: try again.
        """
        table = stored.table
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
                    self.check(batch, table.hash_low, table.hash_high, table.path)
                    hashes = hashes_of(batch)
                    if last is not None and len(hashes) and int(hashes[0]) < last:
                        raise CorruptSegment(f"{table.path} is not sorted by key hash")
                    last = int(hashes[-1]) if len(hashes) else last
                    rows = slice_hash_range(batch, low, high)
                    for window in windows(rows):
                        yield versions.read(window, stored.snapshot_id, table.path)
        except StillstateError:
            raise  # some of them are OSErrors too
        except (pa.ArrowException, OSError, KeyError, ValueError, IndexError, OverflowError) as error:
            raise CorruptSegment(f"{table.path} is not a table of {table.operator}/{table.state}: {error}") from error

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, batch: pa.RecordBatch, low: int, high: int, where: str) -> None:
        """If the reader is strict, compare values with their types and hashes with the range they are stored under.

        Raises:
            CorruptSegment: values are none of their type, or hashes lie outside of the range.
        """
        if not self._strict:
            return
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptSegment(
                f"{where}: operator {self._operator!r} has values of another type than its columns'"
            ) from error
        hashes = hashes_of(batch)
        if len(hashes) and not (low <= int(hashes.min()) and int(hashes.max()) <= high):
            raise CorruptSegment(f"{where} has keys outside of the hash range that it is named for")


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
