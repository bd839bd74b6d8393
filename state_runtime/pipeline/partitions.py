"""Rows in folders by the values of columns, as Hive and Spark lay them out (`day=2024-05-17/…`); pure.

A folder's name holds the value as text. An ASCII character that is no letter, digit, `_`, `.` or `-` is written as `%`
and two hexadecimal digits, which Spark's and Arrow's readers both decode. All other characters are written unchanged,
as in Hive and Spark, because readers disagree about the meaning of `%C3`. Null and empty text are written as
`__HIVE_DEFAULT_PARTITION__`, which readers take for null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData, InvalidPipeline

__all__ = ["NAME_BYTES_MAX", "check_partition_columns", "folder_values", "in_folders"]

NAME_BYTES_MAX = 240
"""Maximum length of one folder's name: file systems allow 255 bytes."""
_FOLDER_BYTES_MAX = 600
"""Maximum length of the names of all levels: S3 allows 1,024 with the URL of the output and the file's name."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,80}\Z")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-\u0080-\U0010ffff]")


def check_partition_columns(partition_by: Sequence[str], schema: pa.Schema, where: str) -> None:
    """Refuse partition columns whose values cannot be read back from a folder's name.

    Args:
        schema: of the rows.
        where: whose columns they are, for the message.

    Raises:
        InvalidPipeline: a column is missing, is named twice, or has a type without one short text; or no other column
            is left.
    """
    for name in partition_by:
        if schema.get_field_index(name) < 0:
            raise InvalidPipeline(
                f"{where}: there is no column {name!r} to partition by; it has {', '.join(schema.names)}"
            )
        kind = schema.field(name).type
        if not (
            pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date(kind)
        ):
            raise InvalidPipeline(
                f"{where}: a folder cannot be named by {name!r} of type {kind}, only by text, integers, booleans and "
                f"dates; make one in a transform, e.g. to_date({name})"
            )
        if name.startswith(("_", ".")) or not _PLAIN.match(name):
            raise InvalidPipeline(
                f"{where}: no folder can be named after the column {name!r}; rename it to at most 80 letters, digits, "
                "'_', '.' and '-', the first a letter or a digit: readers pass over other folders"
            )
    if len(set(partition_by)) < len(partition_by):
        raise InvalidPipeline(f"{where}: partition_by names a column twice: {', '.join(partition_by)}")
    if len(partition_by) == len(schema.names):
        raise InvalidPipeline(f"{where}: all columns would be in the names of folders; leave one for the files")


def in_folders(batch: pa.RecordBatch, partition_by: Sequence[str], where: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of a batch by folder, in their order, without the columns that the folder's name holds.

    Args:
        where: whose rows they are, for the message.

    Raises:
        InvalidData: a text is too long for a folder's name.
    """
    if not partition_by:
        yield "", batch
        return
    rest = batch.select([name for name in batch.schema.names if name not in partition_by])
    code = np.zeros(batch.num_rows, dtype=np.int64)
    columns = [_with_one_null(batch.column(name)) for name in partition_by]
    encoded = [pc.dictionary_encode(column, null_encoding="encode") for column in columns]
    for column in encoded:
        # Made dense again each time: the number of existing combinations is bounded, that of possible ones is not.
        numbers = code * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        _, code = np.unique(numbers, return_inverse=True)
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    ordered = rest if len(starts) == 1 else rest.take(pa.array(order))
    values = [column.take(pa.array(order[starts])).dictionary_decode().to_pylist() for column in encoded]
    ends = [*starts[1:].tolist(), batch.num_rows]
    for start, end, *of_columns in zip(starts.tolist(), ends, *values, strict=True):
        names = [_name(name, _text(value), where) for name, value in zip(partition_by, of_columns, strict=True)]
        folder = "/".join(names)
        if len(folder.encode()) > _FOLDER_BYTES_MAX:
            raise InvalidData(f"{where}: the folder {folder[:80]}… is too long; partition by fewer or shorter columns")
        yield folder, ordered.slice(start, end - start)


def folder_values(path: str) -> dict[str, str | None]:
    """Return the values that the folders of a file's path name, as text: the inverse of `in_folders`."""
    pairs = (folder.partition("=") for folder in path.split("/")[:-1])
    return {name: None if value == _NULL else unquote(value) for name, _, value in pairs}


def _with_one_null(column: pa.Array) -> pa.Array:
    """Replace every value that is read back as null by null; otherwise two parts would have the same folder."""
    if not pa.types.is_string(column.type):
        return column
    return pc.if_else(pc.is_in(column, pa.array(["", _NULL])), pa.scalar(None, pa.string()), column)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _NULL if value is None else str(value)


def _name(column: str, text: str, where: str) -> str:
    name = f"{column}={_escaped(text)}"
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidData(
            f"{where}: a value of {column!r} has {len(text):,} characters, and a folder's name takes {NAME_BYTES_MAX} "
            "bytes; partition by a shorter text, made in a transform"
        )
    return name


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text)
