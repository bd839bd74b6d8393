"""Text that is UTF-8, looked for in columns; pure and vectorised.

Spark's strings are bytes: it takes whatever a source or a cast gives for text. Arrow, Parquet and Python take UTF-8
only, so every reader of a snapshot refuses other bytes. They are looked for where rows come in, before anything of
them is stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["broken_text", "is_readable"]

_ASCII_MAX = 0x7F


def is_readable(column: pa.Array) -> bool:
    """Whether all text in a column, that inside of nested values too, is UTF-8."""
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
    """The first column with text that is not UTF-8, and the position of the first such row; None if there is none.

    A field of a struct is named by its path.
    """
    for field, column in zip(rows.schema, rows.columns):
        if not is_readable(column):
            return _path(field.name, column), _first_row(column)
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
    """The columns inside a nested one. What lies below a null is there too: a reader looks at it."""
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
    """Whether a column is plain text of ASCII characters only: most is, and this takes a tenth of Arrow's own check."""
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
    """Position of the first value of a column that is not readable, by halves; there is one."""
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
