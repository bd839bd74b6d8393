"""The part of Spark's DDL that manifests hold, read without Spark; pure.

`pipeline.ddl` writes it: backquoted names and Spark's simple type strings, with commas between columns. A type that is not
understood (a user-defined one, an interval, a type of a later Spark) is no error: what is stored has its own schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.limits import JSON_DEPTH_MAX

__all__ = ["DdlColumn", "parse_ddl"]


@dataclass(frozen=True)
class DdlColumn:
    """One column.

    Attributes:
        type_text: as Spark writes it, for people.
        type: as Arrow stores it; None if this reader does not know the type.
        binary_equality: false for a string with a collation, whose hash Spark takes of something else than its bytes.
    """

    name: str
    type_text: str
    type: pa.DataType | None
    binary_equality: bool = True

    @property
    def is_nested(self) -> bool:
        """Whether the type holds others; names inside it are not quoted, so that `type` is a good guess only."""
        return "<" in self.type_text


_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"(?:decimal|dec|numeric)(?:\(\s*(\d{1,2})\s*(?:,\s*(\d{1,2})\s*)?\))?\Z")
_CHARS = re.compile(r"(?:varchar|char)\(\s*\d+\s*\)\Z")
_COLLATED = re.compile(r"string\s+collate\s+(\S+)\Z")
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^\s`,:<>()]+))(?:\s*:\s*|\s+)")


def parse_ddl(text: str) -> tuple[DdlColumn, ...]:
    """The columns of a DDL text.

    Raises:
        ValueError: not a list of columns.
    """
    columns: list[DdlColumn] = []
    for part in _split(text):
        named = _NAME.match(part)
        type_text = part[named.end() :].strip() if named else ""
        if named is None or not type_text:
            raise ValueError(f"column {len(columns) + 1} is not a name and a type")
        name = named[1].replace("``", "`") if named[1] is not None else named[2]
        collation = _COLLATED.match(type_text.lower())
        by_bytes = collation is None or collation[1] == "utf8_binary"
        columns.append(DdlColumn(name, type_text, _type(type_text, 0), by_bytes))
    if len({column.name for column in columns}) != len(columns):
        raise ValueError("a column is there twice")
    return tuple(columns)


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that lie outside of brackets and backquotes."""
    depth, start, quoted = 0, 0, False
    for at, sign in enumerate(text):
        if sign == "`":
            quoted = not quoted
        elif not quoted:
            if sign in "<(":
                depth += 1
            elif sign in ">)":
                depth -= 1
            elif sign == "," and depth == 0:
                yield text[start:at]
                start = at + 1
    if depth or quoted:
        raise ValueError("brackets or backquotes do not match")
    yield text[start:]


def _type(text: str, depth: int) -> pa.DataType | None:
    text = text.strip()
    lower = text.lower()
    if lower in _PLAIN:
        return _PLAIN[lower]
    decimal = _DECIMAL.match(lower)
    if decimal is not None:
        precision, scale = int(decimal[1] or 10), int(decimal[2] or 0)
        return pa.decimal128(precision, scale) if 1 <= precision <= 38 and scale <= precision else None
    if _CHARS.match(lower) or _COLLATED.match(lower):
        return pa.string()
    if not lower.endswith(">") or depth >= JSON_DEPTH_MAX:
        return None
    kind, _, rest = text[:-1].partition("<")
    return _nested(kind.strip().lower(), rest, depth + 1)


def _nested(kind: str, inner: str, depth: int) -> pa.DataType | None:
    try:
        parts = list(_split(inner)) if inner.strip() else []
    except ValueError:
        return None
    if kind == "array" and len(parts) == 1:
        element = _type(parts[0], depth)
        return None if element is None else pa.list_(element)
    if kind == "map" and len(parts) == 2:
        key, value = (_type(part, depth) for part in parts)
        return None if key is None or value is None else pa.map_(key, value)
    if kind != "struct":
        return None
    fields = []
    for part in parts:
        name, colon, rest = part.partition(":")
        field = _type(rest, depth) if colon else None
        if field is None:
            return None
        fields.append(pa.field(name.strip().strip("`"), field))
    return pa.struct(fields)
