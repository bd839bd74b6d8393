"""Rows as the records of a Kafka topic; pure, and column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidConfiguration, InvalidPipeline
from state_runtime.sinks.json_rows import json_objects, plain_texts, unwritable

__all__ = ["ANY_PARTITION", "Record", "RecordFormat"]

ANY_PARTITION: Final = -1
"""The key decides, or chance."""
NOW: Final = 0
"""As a time: when the client gets the record."""

Record = tuple[bytes | None, bytes | None, int, int, list[tuple[str, bytes | None]] | None]
"""Key, value, partition, time in milliseconds, headers."""

_OF_RECORDS: Final = ("key", "value", "headers", "partition", "timestamp")


@dataclass(frozen=True)
class RecordFormat:
    """How a row becomes a record.

    Attributes:
        form: "json": a row is one JSON object. "columns": rows have the columns of records, as for Spark's Kafka sink.
        key: columns whose values are the record's key, with "json".
        remove_where: boolean column: where it is true the record has no value.
    """

    form: Literal["json", "columns"] = "json"
    key: tuple[str, ...] = ()
    remove_where: str = ""

    def __post_init__(self) -> None:
        if self.form not in ("json", "columns"):
            raise InvalidConfiguration(f"KafkaSink: format={self.form!r} must be json or columns")
        if self.form == "columns" and self.key:
            raise InvalidConfiguration(
                'KafkaSink: key=… is for format="json"; with "columns" the column "key" of the rows is the key'
            )
        if self.remove_where and self.form == "json" and not self.key:
            raise InvalidConfiguration(f"KafkaSink: remove_where={self.remove_where!r} needs key, the key of what goes")

    def check(self, schema: pa.Schema, where: str) -> None:
        """Refuse rows that cannot become such records.

        Args:
            where: whose rows they are, for the message.

        Raises:
            InvalidPipeline: names the column and the remedy.
        """
        named = [*self.key, *([self.remove_where] if self.remove_where else [])]
        for name in named:
            if name not in schema.names:
                raise InvalidPipeline(f"{where}: there is no column {name!r}; it has {', '.join(schema.names)}")
        if self.remove_where and not pa.types.is_boolean(schema.field(self.remove_where).type):
            raise InvalidPipeline(
                f"{where}: remove_where needs a boolean column, and {self.remove_where!r} is "
                f"{schema.field(self.remove_where).type}; make one in a transform"
            )
        if self.form == "columns":
            self._check_columns(schema, where)
            return
        for field in schema:
            kind = unwritable(field.type)
            if kind is not None:
                raise InvalidPipeline(
                    f"{where}: {field.name!r} has the type {kind}, which JSON has no form for; cast it in a transform"
                )

    def _check_columns(self, schema: pa.Schema, where: str) -> None:
        if "value" not in schema.names:
            raise InvalidPipeline(
                f'{where}: format="columns" needs a column "value"; it has {", ".join(schema.names)}. Make one in a '
                'transform, or take format="json"'
            )
        for field in schema:
            if field.name == self.remove_where:
                continue
            if field.name not in _OF_RECORDS:
                raise InvalidPipeline(
                    f'{where}: format="columns" takes the columns {", ".join(_OF_RECORDS)}, and the rows have '
                    f"{field.name!r}. Drop it in a transform" + _ONE_TOPIC * (field.name == "topic")
                )
            if not _fits(field):
                raise InvalidPipeline(
                    f"{where}: the column {field.name!r} of a record must be {_WANTED[field.name]}, and is "
                    f"{field.type}; cast it in a transform"
                )

    def records(self, rows: pa.RecordBatch) -> Iterator[Record]:
        """Return the records of rows, in their order."""
        gone = rows.column(self.remove_where) if self.remove_where else None
        if gone is not None:
            rows = rows.drop_columns([self.remove_where])
        keys, values = self._keys(rows), self._values(rows)
        if gone is not None:
            values = pc.if_else(pc.fill_null(gone, False), pa.scalar(None, values.type), values)
        return zip(
            keys.to_pylist() if keys is not None else repeat(None, rows.num_rows),
            values.to_pylist(),
            _partitions(rows) if self.form == "columns" else repeat(ANY_PARTITION),
            _times_ms(rows) if self.form == "columns" else repeat(NOW),
            _headers(rows) if self.form == "columns" else repeat(None),
            strict=False,
        )

    def _keys(self, rows: pa.RecordBatch) -> pa.Array | None:
        if self.form == "columns":
            return _binary(rows.column("key")) if "key" in rows.schema.names else None
        if len(self.key) == 1:
            column = rows.column(self.key[0])
            return _binary(column if _is_binary(column.type) else plain_texts(column))
        return _binary(json_objects(rows.select(list(self.key)))) if self.key else None

    def _values(self, rows: pa.RecordBatch) -> pa.Array:
        return _binary(rows.column("value") if self.form == "columns" else json_objects(rows))


_ONE_TOPIC: Final = ": a sink writes to one topic, so that what an epoch has there is one transaction of one writer"
_WANTED: Final = {
    "key": "text or binary",
    "value": "text or binary",
    "headers": "an array of structs of a text `key` and a binary `value`",
    "partition": "an integer",
    "timestamp": "a timestamp",
}


def _fits(field: pa.Field) -> bool:
    kind, types = field.type, pa.types
    if field.name in ("key", "value"):
        return bool(_is_binary(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))
    if field.name == "partition":
        return bool(types.is_integer(kind))
    if field.name == "timestamp":
        return bool(types.is_timestamp(kind))
    if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_struct(kind.value_type):
        return False
    return {kind.value_type.field(n).name for n in range(kind.value_type.num_fields)} == {"key", "value"}


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _binary(column: pa.Array) -> pa.Array:
    return column.cast(pa.large_binary())


def _partitions(rows: pa.RecordBatch) -> Sequence[int] | repeat[int]:
    if "partition" not in rows.schema.names:
        return repeat(ANY_PARTITION)
    return [ANY_PARTITION if one is None else one for one in rows.column("partition").to_pylist()]


def _times_ms(rows: pa.RecordBatch) -> Sequence[int] | repeat[int]:
    if "timestamp" not in rows.schema.names:
        return repeat(NOW)
    column = rows.column("timestamp")
    column = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    return [int(one) for one in pc.fill_null(column, NOW).to_pylist()]


def _headers(rows: pa.RecordBatch) -> Sequence[Any] | repeat[Any]:
    if "headers" not in rows.schema.names:
        return repeat(None)
    return [
        None if one is None else [(header["key"], header["value"]) for header in one if header is not None]
        for one in rows.column("headers").to_pylist()
    ]
