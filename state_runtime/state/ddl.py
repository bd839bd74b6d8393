"""The part of Spark's DDL that manifests hold, read without Spark; pure.

`spark.sql.ddl` writes it: backquoted names and Spark's simple type strings, with commas between columns. Names of
fields inside a type are backquoted if they contain characters of the syntax. Earlier versions did not quote them, so a
quote or an apostrophe may also be part of a bare name there. A type that is not understood (a user-defined one, an
interval, a type of a later Spark) is no error: the stored rows have their own schema.

A value column may end in `DEFAULT <literal>`: the value of rows that were stored before the column was added. Spark's
parser accepts it only for tables. Users set it in the metadata of a StructField, where Spark itself keeps defaults
(`default_clause`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from state_runtime.base.limits import JSON_DEPTH_MAX

__all__ = ["DdlColumn", "default_clause", "parse_ddl", "parse_value"]


@dataclass(frozen=True)
class DdlColumn:
    """One column.

    Attributes:
        type_text: as Spark writes it, for people and for comparisons: without the backquotes of fields, which earlier
            versions did not write.
        type: as Arrow stores it; None if this reader does not know the type.
        binary_equality: false for a string with a collation, whose hash Spark computes from other data than its bytes.
        default: value of rows that were stored before the column was added; None is null.
    """

    name: str
    type_text: str
    type: pa.DataType | None
    binary_equality: bool = True
    default: pa.Scalar | None = None

    @property
    def is_nested(self) -> bool:
        """Whether the type contains other types."""
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
_WITH_DEFAULT = re.compile(r"([^<]*?)\s+default\s+(.+)\Z", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(r"(|date|timestamp|timestamp_ltz|timestamp_ntz|x)\s*'((?:[^']|'')*)'\Z", re.IGNORECASE)
_BARE = re.compile(r"(true|false|[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?:bd|[lsydf])?\Z", re.IGNORECASE)
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)*)`|([^\s`,:<>()]+))(?:\s*:\s*|\s+)")
_FIELD = re.compile(r"\s*(?:`((?:[^`]|``)*)`\s*|([^:]*)):", re.DOTALL)
_QUOTED_NAME = re.compile(r"\s*`(?:[^`]|``)*`(?=\s*:|\s)")
_QUOTED_FIELD = re.compile(r"(?<=[<,])`((?:[^`]|``)*)`(?=:)")


def parse_ddl(text: str) -> tuple[DdlColumn, ...]:
    """Parse the columns of a DDL text.

    Raises:
        ValueError: not a list of columns.
    """
    columns: list[DdlColumn] = []
    for part in _split(text, has_defaults=True):
        named = _NAME.match(part)
        type_text = part[named.end() :].strip() if named else ""
        if named is None or not type_text:
            raise ValueError(f"column {len(columns) + 1} is not a name and a type")
        name = named[1].replace("``", "`") if named[1] is not None else named[2]
        with_default = _WITH_DEFAULT.match(type_text)
        type_text = with_default[1] if with_default is not None else type_text
        collation = _COLLATED.match(type_text.lower())
        by_bytes = collation is None or collation[1] == "utf8_binary"
        kind = _type(type_text, 0)
        default = _literal(with_default[2], kind) if with_default is not None else None
        type_text = _QUOTED_FIELD.sub(lambda found: found[1].replace("``", "`"), type_text)
        columns.append(DdlColumn(name, type_text, kind, by_bytes, default))
    if len({column.name for column in columns}) != len(columns):
        raise ValueError("a column is there twice")
    return tuple(columns)


def default_clause(metadata: Mapping[str, Any], type_text: str) -> str:
    """Return the clause of a column whose StructField has a default in its metadata, as Spark keeps it; empty if not.

    `EXISTS_DEFAULT` counts before `CURRENT_DEFAULT`; both hold a SQL literal as text: `0`, `'none'`, `DATE
    '2020-01-01'`.

    Raises:
        ValueError: not a literal, or not a value of the column's type. Expressions are not evaluated.
    """
    literal = metadata.get("EXISTS_DEFAULT", metadata.get("CURRENT_DEFAULT"))
    if literal is None:
        return ""
    kind = _type(type_text, 0)
    if not isinstance(literal, str) or kind is None or pa.types.is_nested(kind):
        raise ValueError(f"a default is the text of a SQL literal, and a column of {type_text} cannot have one here")
    _literal(literal.strip(), kind)
    return f" DEFAULT {literal.strip()}"


def parse_value(text: str, kind: pa.DataType | None) -> pa.Scalar:
    """Parse a value from its usual text form: numbers, true and false, dates, times (UTC), and hexadecimal binary.

    Raises:
        ValueError, pa.ArrowException: not a value of this type.
    """
    if kind is None or pa.types.is_nested(kind):
        raise ValueError("no text form")
    if pa.types.is_binary(kind):
        return pa.scalar(bytes.fromhex(text.removeprefix("0x")), kind)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        try:
            return pa.scalar(text).cast(pa.timestamp(kind.unit)).cast(pa.int64()).cast(kind)
        except pa.ArrowInvalid:
            pass  # it has an offset
    return pa.scalar(text).cast(kind)


def _literal(text: str, kind: pa.DataType | None) -> pa.Scalar | None:
    """Return the value of a SQL literal; None for NULL."""
    if text.lower() == "null":
        return None
    quoted, bare = _QUOTED.match(text), _BARE.match(text)
    if quoted is None and bare is None:
        raise ValueError(f"{text[:40]!r} is not a literal")
    word = quoted[1].lower() if quoted is not None else "a number"
    wanted: tuple[str, ...] = ("a number",)
    if kind is not None:
        for is_kind, words in (
            (pa.types.is_string, ("",)),
            (pa.types.is_binary, ("x",)),
            (pa.types.is_date, ("date",)),
            (pa.types.is_timestamp, ("timestamp", "timestamp_ltz", "timestamp_ntz")),
        ):
            wanted = words if is_kind(kind) else wanted
    plain = quoted[2].replace("''", "'") if quoted is not None else bare[1] if bare is not None else ""
    try:
        if word not in wanted:
            raise ValueError("a literal of another type")
        return parse_value(plain, kind)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{text[:40]!r} is not a literal of the type {kind}") from error


def _split(text: str, *, has_defaults: bool = False) -> Iterator[str]:
    """Yield the parts between the commas that are outside of brackets, quoted names and literals.

    Args:
        has_defaults: a part may hold literals; otherwise an apostrophe is part of a name.
    """
    depth, start, at, is_literal = 0, 0, 0, False
    begins = True  # at a name; only names may be quoted
    while at < len(text):
        name = _QUOTED_NAME.match(text, at) if begins and not is_literal else None
        if name is not None:
            at, begins = name.end(), False
            continue
        sign, begins = text[at], False
        if sign == "'" and depth == 0 and has_defaults:
            is_literal = not is_literal
        elif not is_literal:
            depth += (sign in "<(") - (sign in ">)")
            begins = sign in "<,"
            if sign == "," and depth == 0:
                yield text[start:at]
                start = at + 1
        at += 1
    if depth or is_literal:
        raise ValueError("brackets or quotes do not match")
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
        named = _FIELD.match(part)
        field = _type(part[named.end() :], depth) if named is not None else None
        if named is None or field is None:
            return None
        name = named[1].replace("``", "`") if named[1] is not None else named[2].strip()
        fields.append(pa.field(name, field))
    return pa.struct(fields)
