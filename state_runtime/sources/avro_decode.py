"""Records in a schema registry's wire format become an Arrow column: the part of `from_registry` that works on rows.

A value is a byte 0, four bytes with the id of the writer's schema, and the record. fastavro reads one record at a time;
Arrow takes a batch of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any, Final, Literal

import pyarrow as pa

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.sources.avro_types import AvroSchema, fastavro, parsed
from state_runtime.sources.registry_client import SCHEMAS_MAX, NoSuchSchema

__all__ = ["ADVICE", "HEAD_BYTES", "Decoder"]

ADVICE: Final = (
    'Nothing of the epoch was committed. With on_error="null" such records are null, and can be set aside with '
    "expect_or_drop"
)
HEAD_BYTES: Final = 5
_DAMAGED: Final = "the record is damaged, or was written with another schema than it says"
_UNRESOLVED: Final = (
    "the record cannot be read as the reader's schema says. Compare both schemas: names of records must agree (or be "
    "aliases), a field that the writer lacks needs a default, and types may only widen"
)
_UNFIT: Final = "a value does not fit the type that the reader's schema gives it (a decimal's scale, a logical type)"


class Decoder:
    """Reads values that were written with any schema of a registry.

    Args:
        reader: the schema whose columns come.
        writer_of: returns the text of a writer's schema by its id, or raises `NoSuchSchema`.
        on_error: what happens to a value that cannot be read.
        where: which column it is, for messages.
    """

    def __init__(
        self,
        reader: str | Mapping[str, Any],
        writer_of: Callable[[int], str],
        on_error: Literal["fail", "null"],
        where: str,
    ) -> None:
        self._reader = AvroSchema(reader, where)
        self._writer_of = writer_of
        self._fails = on_error == "fail"
        self._where = where
        self._writer = lru_cache(maxsize=SCHEMAS_MAX)(self._parsed_writer)
        self._read_one = fastavro().schemaless_reader
        self._unresolved = fastavro().read.SchemaResolutionError

    def __call__(self, column: pa.Array) -> pa.Array:
        """Return the records of a batch; null stays null.

        Raises:
            InvalidData: with on_error="fail", a value cannot be read; says which, and not what it has.
            StoreUnavailable, StoreRefused, InvalidConfiguration: of the registry, whatever `on_error` is.
        """
        writers: dict[bytes, tuple[Any, Any] | str] = {}
        rows: list[Any] = []
        for position, value in enumerate(column.to_pylist()):
            row, problem = None, ""
            if value is not None:
                head = value[:HEAD_BYTES]
                writer = writers.get(head)
                if writer is None:
                    writer = writers[head] = self._found(head)
                row, problem = (None, writer) if isinstance(writer, str) else self._row(value, *writer)
            if problem:
                self._set_aside(position, value, problem)
            rows.append(row)
        return self._column(rows, column)

    def _row(self, value: bytes, writer: Any, reader: Any) -> tuple[Any, str]:
        stream = BytesIO(value)
        stream.seek(HEAD_BYTES)
        try:
            row = self._read_one(stream, writer, reader)
        except self._unresolved:
            return None, _UNRESOLVED
        except Exception:  # fastavro raises whatever its parts do on bytes that are no record
            return None, _DAMAGED
        return (row, "") if stream.tell() == len(value) else (None, _DAMAGED)

    def _column(self, rows: list[Any], column: pa.Array) -> pa.Array:
        try:
            return pa.array(rows, self._reader.wire).cast(self._reader.column)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            kept = [row if self._fits(row) else None for row in rows]
        for position, (row, left) in enumerate(zip(rows, kept, strict=True)):
            if row is not None and left is None:
                self._set_aside(position, column[position].as_py(), _UNFIT)
        return pa.array(kept, self._reader.wire).cast(self._reader.column)

    def _fits(self, row: Any) -> bool:
        try:
            pa.array([row], self._reader.wire).cast(self._reader.column)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return False
        return True

    def _found(self, head: bytes) -> tuple[Any, Any] | str:
        """Return the writer's and the reader's schema for fastavro, or what is wrong."""
        if len(head) < HEAD_BYTES or head[0] != 0:
            return "it does not begin with a byte 0 and the id of a schema, so no serializer of a registry wrote it"
        try:
            writer = self._writer(_id_of(head))
        except NoSuchSchema as error:
            return f"the registry cannot give its schema: {error}"
        return writer, self._reader.parsed

    def _parsed_writer(self, schema_id: int) -> Any:
        text = self._writer_of(schema_id)
        try:
            return parsed(text, f"schema {schema_id}")[0]
        except InvalidConfiguration as error:
            raise NoSuchSchema(f"the schema id {schema_id} is no schema that fastavro can read") from error

    def _set_aside(self, position: int, value: bytes, problem: str) -> None:
        if not self._fails:
            return
        head = value[:HEAD_BYTES]
        schema = f" (schema id {_id_of(head)})" if len(head) == HEAD_BYTES and head[0] == 0 else ""
        raise InvalidData(f"{self._where}: row {position} of a batch{schema}: {problem}. {ADVICE}")


def _id_of(head: bytes) -> int:
    return int.from_bytes(head[1:], "big")
