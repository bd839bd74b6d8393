"""Finding text in columns that is not UTF-8; pure and vectorised.

Spark's strings are bytes: it accepts any bytes that a source or a cast gives as text. Arrow, Parquet and Python accept
only UTF-8, so every reader of a snapshot refuses other bytes. Rows are checked when they come in, before any of them is
stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["broken_text", "is_readable", "text_with_nul"]

_ASCII_MAX = 0x7F


def is_readable(column: pa.Array) -> bool:
    """Return whether all text in a column, also inside of nested values, is UTF-8."""
    if not _has_text(column.type):
        return True
    if pa.types.is_nested(column.type):
        return all(map(is_readable, _inside(column)))
    if _is_ascii(column):
        return True
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def broken_text(rows: pa.RecordBatch) -> tuple[str, int] | None:
    """Return the first column with text that is not UTF-8, and the position of the first such row; None without one.

    A field of a struct is named by its path.
    """
    for field, column in zip(rows.schema, rows.columns):
        if not is_readable(column):
            return _path(field.name, column), _first_row(column)
    return None


def text_with_nul(rows: pa.RecordBatch) -> tuple[str, int] | None:
    """Return the first column of text with a NUL character in it, and the position of the first such row; None without
    one. Nested columns are not looked into."""
    for field, column in zip(rows.schema, rows.columns):
        if _has_text(field.type) and not pa.types.is_nested(field.type):
            first = pc.index(pc.match_substring(column, "\x00"), True).as_py()
            if first >= 0:
                return field.name, first
    return None


@lru_cache(maxsize=256)
def _has_text(data_type: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(data_type):
        return _has_text(data_type.value_type)
    if types.is_nested(data_type):
        return any(_has_text(data_type.field(number).type) for number in range(data_type.num_fields))
    return bool(types.is_string(data_type) or types.is_large_string(data_type) or types.is_string_view(data_type))


def _inside(column: pa.Array) -> list[pa.Array]:
    """Return the columns inside a nested one. Values below a null are included: a reader looks at them."""
    if pa.types.is_struct(column.type):
        return [column.field(number) for number in range(column.type.num_fields)]
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
        return [column.values.slice(column.offset * width, len(column) * width)]
    start, stop = (column.offsets[at].as_py() for at in (0, -1))
    if pa.types.is_map(column.type):
        return [column.keys.slice(start, stop - start), column.items.slice(start, stop - start)]
    return [column.values.slice(start, stop - start)]


def _is_ascii(column: pa.Array) -> bool:
    """Return whether a column is ASCII text only: most text is, and this takes a tenth of Arrow's own check."""
    if pa.types.is_string(column.type):
        offset_type: type[np.signedinteger[Any]] = np.int32
    elif pa.types.is_large_string(column.type):
        offset_type = np.int64
    else:
        return False
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return True
    ends = np.frombuffer(offsets, dtype=offset_type, count=column.offset + len(column) + 1)[column.offset :]
    text = np.frombuffer(data, dtype=np.uint8)[int(ends[0]) : int(ends[-1])]
    return not len(text) or int(text.max()) <= _ASCII_MAX


def _first_row(column: pa.Array) -> int:
    """Return the position of the first unreadable value of a column, by bisection; it must exist."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_readable(column.slice(low, middle - low)) else (low, middle)
    return low


def _path(name: str, column: pa.Array) -> str:
    if not pa.types.is_struct(column.type):
        return name
    for field, inner in zip(column.type, _inside(column)):
        if not is_readable(inner):
            return _path(f"{name}.{field.name}", inner)
    return name
