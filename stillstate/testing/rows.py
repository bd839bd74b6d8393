"""Rows as a test writes and reads them, and as operators have them: Python's and pandas' on one side, Arrow's on the
other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import Row

from state_runtime.base.errors import InvalidData
from state_runtime.processors.user.rows import row_class_of
from state_runtime.processors.user.value_codec import ValueCodec, read_column

__all__ = ["Rows", "as_batch", "as_rows"]

Rows: TypeAlias = Any
"""Tuples, dictionaries or `Row`s; a pandas frame; or an Arrow table or batch."""


def as_batch(rows: Rows, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return rows in the columns of a schema.

    Args:
        where: the caller, for messages.

    Raises:
        InvalidData: a column is missing or unknown, or a value does not fit its type.
    """
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if not isinstance(rows, pa.Table) and hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, pa.Table):
        _check_names(rows.column_names, schema, where)
        return _one_batch(rows.select(schema.names).cast(schema))
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise InvalidData(
            f"{where} takes a list of rows (tuples, dictionaries or Rows), a pandas frame or an Arrow table"
        )
    codec = ValueCodec(schema, where)
    plain = [codec.row_of(_values(row, schema, where), where.partition("(")[0]) for row in rows]
    return pa.RecordBatch.from_arrays(codec.columns(plain), schema=schema)


def as_rows(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    """Return Arrow rows as Spark gives them to Python: timestamps without a zone, in the time zone of the process."""
    found: list[Row] = []
    for batch in batches:
        kind = row_class_of(batch.schema.names)
        columns = [read_column(column) for column in batch.columns]
        found.extend(tuple.__new__(kind, values) for values in zip(*columns, strict=True))
    return found


def _values(row: Any, schema: pa.Schema, where: str) -> Any:
    """Return a row's values in the order of the schema."""
    if isinstance(row, Row) and hasattr(row, "__fields__"):
        row = dict(zip(row.__fields__, row, strict=True))
    if not isinstance(row, Mapping):
        return row
    _check_names(list(row), schema, where)
    return tuple(row[name] for name in schema.names)


def _check_names(names: Sequence[str], schema: pa.Schema, where: str) -> None:
    missing = [name for name in schema.names if name not in names]
    unknown = [name for name in names if name not in schema.names]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
        raise InvalidData(f"{where}: a row {what}; the columns are {', '.join(schema.names)}")


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
