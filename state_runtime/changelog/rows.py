"""In-flight rows as parts of the changelog: their columns, how they are written, and what a reader checks.

A part is one Arrow IPC stream of one batch, sorted by (key_hash, place):

    key_hash   uint64   xxhash64 of the key columns, read as unsigned
    place      int64    of the row in the input of the epoch that read it; orders the rows of a key
    row.<c>    …        the columns that the operator reads

Large ones leave a task in objects of their own, several parts to an object, each upload begun as soon as one is full.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import CorruptSegment
from state_runtime.base.ids import Ids
from state_runtime.base.limits import MIB
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.changes import TaskChanges, UploadTotals
from state_runtime.changelog.parts import PartEntry, decode_part, encode_part, sha256
from state_runtime.changelog.upload import Upload, Uploader
from state_runtime.snapshot.paths import segment_path
from state_runtime.state.table import Hashes, Positions, check_names, widened, widens
from state_runtime.store import Store

__all__ = [
    "ROWS_PART_BYTES",
    "RowsWriter",
    "WrittenRows",
    "decode_columns",
    "decode_rows",
    "encode_columns",
    "fit_rows",
    "misfit",
    "rows_batch",
    "rows_schema",
]

HASH, PLACE, ROW = "key_hash", "place", "row."

ROWS_PART_BYTES = 8 * MIB
"""In memory, about: a reader holds one part of a pass at a time."""
_OBJECT_BYTES = 16 * MIB


def rows_batch(hashes: Hashes, places: Positions, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows in flight, in the columns in which they are stored.

    Args:
        hashes: unsigned, one per row.
        rows: in the order of (hash, place).
    """
    return pa.RecordBatch.from_arrays([pa.array(hashes), pa.array(places), *rows.columns], schema=_stored(rows.schema))


def _stored(rows: pa.Schema) -> pa.Schema:
    own = [pa.field(HASH, pa.uint64(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
    return pa.schema([*own, *(pa.field(f"{ROW}{f.name}", f.type) for f in rows)])


def rows_schema(stored: pa.Schema, where: str) -> pa.Schema:
    """The operator's input columns of a part.

    Raises:
        CorruptSegment: these are not the columns of in-flight rows.
    """
    rows = pa.schema([pa.field(f.name[len(ROW) :], f.type) for f in list(stored)[2:]])
    if not _stored(rows).equals(stored):
        raise CorruptSegment(f"{where}: the columns {stored.names} are not those of in-flight rows")
    return rows


def encode_columns(rows: pa.Schema) -> str:
    """Input columns as text."""
    return base64.b64encode(rows.remove_metadata().serialize().to_pybytes()).decode()


def decode_columns(text: str, where: str) -> pa.Schema:
    """The inverse of `encode_columns`.

    Raises:
        CorruptSegment: it is no schema.
    """
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
        check_names(schema)
    except (binascii.Error, ValueError, pa.ArrowException, OSError) as error:
        raise CorruptSegment(f"{where}: the columns of in-flight rows cannot be read: {error}") from error
    return schema


def misfit(stored: pa.Schema, wanted: pa.Schema) -> str:
    """Why rows of some columns cannot be read as those of others; empty if they can.

    By the rules of state: columns may be added (null in what is stored), dropped, reordered and widened. Time zones are
    how a session shows times, and no difference.
    """
    for field_ in wanted:
        at = stored.get_field_index(field_.name)
        if at >= 0 and not widens(_anywhere(stored.field(at).type), _anywhere(field_.type)):
            return f"the column {field_.name!r} is {field_.type} now, and {stored.field(at).type} in them"
    return ""


def fit_rows(rows: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Rows in the columns that their operator reads now; see `misfit`."""
    if rows.schema.equals(wanted):
        return rows
    columns = []
    for field_ in wanted:
        at = rows.schema.get_field_index(field_.name)
        if at < 0:
            columns.append(pa.nulls(rows.num_rows, field_.type))
            continue
        column = rows.column(at)
        if not pa.types.is_struct(column.type):
            columns.append(column if column.type == field_.type else column.cast(field_.type))
        else:
            columns.append(widened(column, field_.type))
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def _anywhere(data_type: pa.DataType) -> pa.DataType:
    is_zoned = pa.types.is_timestamp(data_type) and data_type.tz is not None
    return pa.timestamp(data_type.unit, "UTC") if is_zoned else data_type


def decode_rows(data: bytes | pa.Buffer, part: PartEntry, where: str) -> pa.RecordBatch:
    """A part in the columns in which it is stored: its digest compared, and sorted as it must be.

    Raises:
        CorruptSegment: altered, or not what the index says.
    """
    batch = decode_part(data, part, where)
    rows_schema(batch.schema, where)
    hashes = batch.column(0).to_numpy(zero_copy_only=False)
    places = batch.column(1).to_numpy(zero_copy_only=False)
    same = hashes[1:] == hashes[:-1]
    in_order = bool(np.all((hashes[1:] > hashes[:-1]) | (same & (places[1:] >= places[:-1]))))
    within = not len(hashes) or (int(hashes[0]), int(hashes[-1])) == (part.hash_low, part.hash_high)
    if batch.column(0).null_count or batch.column(1).null_count or not in_order or not within:
        raise CorruptSegment(
            f"{where}: in-flight rows of operator {part.operator!r} are not sorted, or have other hashes than the index "
            "says. Restore the file from a copy of the job root, or start from an older snapshot"
        )
    return batch


@dataclass(frozen=True)
class WrittenRows:
    """Parts on their way, in order of hash. Life cycle: made by `RowsWriter.finish` → `result` once, or `abandon`.

    Attributes:
        objects: of each part the number of the upload whose object it goes to; none if all ride in the acknowledgement.
        inline: the bodies of the parts then.
    """

    parts: tuple[PartEntry, ...]
    objects: tuple[int, ...]
    uploads: tuple[Upload, ...]
    inline: tuple[bytes, ...] = field(repr=False)

    def result(self) -> TaskChanges:
        """Wait for the uploads.

        Raises:
            StoreUnavailable: one failed; the epoch fails and is run again.
        """
        if not self.uploads:
            return TaskChanges(self.parts, self.inline)
        paths = [upload.result() for upload in self.uploads]
        placed = tuple(replace(part, path=paths[number]) for part, number in zip(self.parts, self.objects))
        return TaskChanges(placed, (b"",) * len(placed), sum((u.totals for u in self.uploads), UploadTotals()))

    def abandon(self) -> None:
        """The task fails for another reason: what was uploaded is deleted."""
        for upload in self.uploads:
            upload.abandon()


class RowsWriter:
    """Encodes what a task leaves of its input, part by part.

    Life cycle: `add` in order of hash → `finish`, or `abandon` on the way.

    Args:
        root: opens the job root; only called for an upload.
        on_part: is given each part with its bytes, which are not held here longer than their upload takes.
    """

    def __init__(
        self,
        root: Callable[[], Store],
        uploader: Uploader,
        *,
        term: int,
        operator: str,
        settings: JobSettings,
        ids: Ids,
        on_part: Callable[[PartEntry, pa.Buffer], None] = lambda part, body: None,
    ) -> None:
        self._root = root
        self._uploader = uploader
        self._term = term
        self._operator = operator
        self._settings = settings
        self._ids = ids
        self._on_part = on_part
        self._parts: list[PartEntry] = []
        self._objects: list[int] = []
        self._uploads: list[Upload] = []
        self._waiting: list[pa.Buffer] = []  # of the last parts, which are in no object yet
        self._waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """One more part.

        Args:
            batch: as `rows_batch` gives it; with at least one row.

        Raises:
            StoreUnavailable: no room for an upload within its deadline.
        """
        body = encode_part(batch, self._settings.compression)
        hashes = batch.column(0)
        part = PartEntry(
            kind="rows",
            operator=self._operator,
            state="",
            path="",
            offset=self._waiting_bytes,
            length=len(body),
            digest=sha256(body),
            rows=batch.num_rows,
            raw_bytes=batch.nbytes,
            hash_low=hashes[0].as_py(),
            hash_high=hashes[-1].as_py(),
        )
        self._on_part(part, body)
        self._waiting.append(body)
        self._waiting_bytes += len(body)
        self._parts.append(part)
        self._objects.append(len(self._uploads))
        if self._waiting_bytes >= _OBJECT_BYTES:
            self._upload()

    def finish(self) -> WrittenRows:
        """Begin the last upload, unless all of it is small enough to ride along.

        Raises:
            StoreUnavailable: see `add`.
        """
        if self._uploads or self._waiting_bytes > self._settings.inline_bytes_max:
            self._upload()
        inline = tuple(body.to_pybytes() for body in self._waiting)
        return WrittenRows(tuple(self._parts), tuple(self._objects), tuple(self._uploads), inline)

    def abandon(self) -> None:
        """See `WrittenRows.abandon`."""
        for upload in self._uploads:
            upload.abandon()

    def _upload(self) -> None:
        if not self._waiting:
            return
        whole = self._waiting[0] if len(self._waiting) == 1 else pa.py_buffer(b"".join(self._waiting))
        path = partial(segment_path, self._term)
        name = f"rows-{self._operator}"
        self._uploads.append(self._uploader.begin(self._root(), lambda: path(f"{name}-{self._ids.uid()}.seg"), whole))
        self._waiting, self._waiting_bytes = [], 0
