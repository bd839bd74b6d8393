"""In-flight rows as parts of the changelog: their columns, their encoding, and the checks of a reader.

A part is one Arrow IPC stream of one batch, sorted by (key_hash, place):

    key_hash   uint64   xxhash64 of the key columns, read as unsigned
    place      int64    of the row in the input of the epoch that read it; orders the rows of a key
    row.<c>    …        the columns that the operator reads
"""

from __future__ import annotations

import base64
import binascii

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import RESTORE_OR_GO_BACK, CorruptSegment
from state_runtime.base.limits import MIB
from state_runtime.changelog.parts import PartEntry, decode_part
from state_runtime.state.table import Hashes, Positions, check_names, widened, widens

__all__ = [
    "ROWS_PART_BYTES",
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
"""Approximate size in memory: a reader holds one part of a pass at a time."""


def rows_batch(hashes: Hashes, places: Positions, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows in flight in the columns in which they are stored.

    Args:
        hashes: unsigned, one per row.
        rows: in the order of (hash, place).
    """
    return pa.RecordBatch.from_arrays([pa.array(hashes), pa.array(places), *rows.columns], schema=_stored(rows.schema))


def _stored(rows: pa.Schema) -> pa.Schema:
    own = [pa.field(HASH, pa.uint64(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
    return pa.schema([*own, *(pa.field(f"{ROW}{f.name}", f.type) for f in rows)])


def rows_schema(stored: pa.Schema, where: str) -> pa.Schema:
    """Return the operator's input columns of a part.

    Raises:
        CorruptSegment: these are not the columns of in-flight rows.
    """
    rows = pa.schema([pa.field(f.name[len(ROW) :], f.type) for f in list(stored)[2:]])
    if not _stored(rows).equals(stored):
        raise CorruptSegment(f"{where}: the columns {stored.names} are not those of in-flight rows")
    return rows


def encode_columns(rows: pa.Schema) -> str:
    """Encode input columns as text."""
    return base64.b64encode(rows.remove_metadata().serialize().to_pybytes()).decode()


def decode_columns(text: str, where: str) -> pa.Schema:
    """Decode input columns: the inverse of `encode_columns`.

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
    """Return why rows of some columns cannot be read as those of others; empty if they can.

    The rules are those of state: columns may be added (null in stored rows), dropped, reordered and widened. Time zones
    only change how a session shows times, and make no difference.
    """
    for field_ in wanted:
        at = stored.get_field_index(field_.name)
        if at >= 0 and not widens(_anywhere(stored.field(at).type), _anywhere(field_.type)):
            return f"the column {field_.name!r} is {field_.type} now, and {stored.field(at).type} in them"
    return ""


def fit_rows(rows: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Convert rows to the columns that their operator reads now; see `misfit`."""
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
    """Return a type without the zones in which a session shows times, also in nested types."""
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        return pa.timestamp(data_type.unit, "UTC")
    if pa.types.is_struct(data_type):
        return pa.struct([f.with_type(_anywhere(f.type)) for f in data_type])
    if pa.types.is_list(data_type):
        return pa.list_(data_type.value_field.with_type(_anywhere(data_type.value_type)))
    if pa.types.is_map(data_type):
        return pa.map_(_anywhere(data_type.key_type), data_type.item_field.with_type(_anywhere(data_type.item_type)))
    return data_type


def decode_rows(data: bytes | pa.Buffer, part: PartEntry, where: str) -> pa.RecordBatch:
    """Decode a part in its stored columns, with digest and order checked.

    Raises:
        CorruptSegment: altered, or different from the index.
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
            f"{where}: in-flight rows of operator {part.operator!r} are not sorted, or have other hashes than the "
            f"index says. {RESTORE_OR_GO_BACK}"
        )
    return batch
