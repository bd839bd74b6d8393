"""Rows as the text that COPY takes, and what in rows decides how keys are compared; pure and vectorised.

The text is CSV as PostgreSQL and Arrow both understand it: text is always in quotes, and nothing at all is null. So a
text without characters, `\\N` and a lone `\\.` are texts like others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

__all__ = ["COPY_FORMAT", "csv_of", "null_patterns"]

COPY_FORMAT: Final = "(FORMAT csv)"
_ROWS: Final = 1 << 15
"""Rows that are text at a time: a few megabytes."""
_OPTIONS: Final = pyarrow.csv.WriteOptions(include_header=False, batch_size=_ROWS, quoting_style="needed")
_HEX: Final = np.array([[ord(f"{byte:02x}"[0]), ord(f"{byte:02x}"[1])] for byte in range(256)], np.uint8)


def csv_of(rows: pa.Table) -> Iterator[pa.Buffer]:
    """Yield rows as text, piece by piece."""
    for batch in rows.to_batches(max_chunksize=_ROWS):
        out = pa.BufferOutputStream()
        pyarrow.csv.write_csv(_with_plain_text(batch), out, _OPTIONS)
        yield out.getvalue()


def null_patterns(rows: pa.Table, keys: Sequence[str]) -> list[tuple[bool, ...]]:
    """Return which of the keys are null together in some row, each pattern once.

    PostgreSQL joins by `IS NOT DISTINCT FROM` only in comparing all with all. Rows of one pattern can be compared by
    `=` and `IS NULL`, for which it has indexes and hash joins.
    """
    nulls = pa.table({f"k{number}": pc.is_null(rows[key]) for number, key in enumerate(keys)})
    found = nulls.group_by(nulls.column_names).aggregate([])
    return sorted(tuple(row.values()) for row in found.to_pylist())


def _with_plain_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with bytes as PostgreSQL reads them: `\\x` and two digits for each."""
    columns = [_hex_of(column) if _is_binary(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _hex_of(column: pa.Array) -> pa.Array:
    column = column.cast(pa.large_binary())
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    seen = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    digits = pa.py_buffer(_HEX[seen].tobytes())
    moved = pa.py_buffer((2 * (offsets - offsets[0])).tobytes())
    text = pa.LargeStringArray.from_buffers(len(column), moved, digits)
    prefixed = pc.binary_join_element_wise(pa.scalar("\\x", pa.large_string()), text, pa.scalar("", pa.large_string()))
    return pc.if_else(pc.is_null(column), pa.scalar(None, pa.large_string()), prefixed)
