"""Which of Iceberg's types hold which columns of rows without a loss; pure."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.output_layout import OutputLayout, difference

__all__ = ["columns_for", "misfits"]

_PLAIN = {
    pa.bool_(): pa.bool_(),
    pa.int8(): pa.int32(),
    pa.int16(): pa.int32(),
    pa.int32(): pa.int32(),
    pa.int64(): pa.int64(),
    pa.float32(): pa.float32(),
    pa.float64(): pa.float64(),
    pa.date32(): pa.date32(),
    pa.time64("us"): pa.time64("us"),
    pa.timestamp("us"): pa.timestamp("us"),
    pa.string(): pa.string(),
    pa.large_string(): pa.string(),
    pa.binary(): pa.binary(),
    pa.large_binary(): pa.binary(),
}


def columns_for(schema: pa.Schema, where: str) -> pa.Schema:
    """Return a table's columns for some rows: narrow integers are `int` there, and instants are in UTC.

    Args:
        where: whose columns they are, for the message.

    Raises:
        InvalidPipeline: names the column that a table cannot have, and the cast to write.
    """
    return pa.schema([_field(field, field.name, where) for field in schema])


def _field(field: pa.Field, path: str, where: str) -> pa.Field:
    return pa.field(field.name, _type(field.type, path, where), nullable=True)


def _type(kind: pa.DataType, path: str, where: str) -> pa.DataType:
    types = pa.types
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_timestamp(kind) and kind.unit == "us":
        return pa.timestamp("us", "UTC")
    if types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return kind
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_field(kind.value_field, f"{path}.element", where).with_name("element"))
    if types.is_map(kind):
        key = _type(kind.key_type, f"{path}.key", where)
        return pa.map_(key, _type(kind.item_type, f"{path}.value", where))
    if types.is_struct(kind) and kind.num_fields:
        return pa.struct([_field(kind.field(n), f"{path}.{kind.field(n).name}", where) for n in range(kind.num_fields)])
    raise InvalidPipeline(
        f"{where}: an Iceberg table cannot have {path!r} of type {kind}; cast it in a transform, "
        f".transform(lambda df: df.withColumn({path!r}, df[{path!r}].cast('string')))"
    )


def misfits(rows: OutputLayout, table: OutputLayout) -> str:
    """Return why such rows do not fit into a table that is there; "" if they do. The rows may lack columns."""
    partition_by = rows.partition_by or table.partition_by
    what = difference(table, OutputLayout(rows.place, rows.columns, partition_by))
    if what:
        return what
    needed = _required(table.columns)
    if needed:
        return f"column {needed[0]} takes no null there, and rows of a stream may have some: make it optional"
    return ""


def _required(columns: Sequence[pa.Field]) -> list[str]:
    return [field.name for field in columns if not field.nullable]
