"""Names and types as Spark SQL writes them; pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import types as T

from state_runtime.base.errors import InvalidPipeline
from state_runtime.spark.arrow import spark_type
from state_runtime.state.ddl import DdlColumn, default_clause, parse_ddl

__all__ = ["ddl", "quoted", "struct_of_ddl", "type_sql"]

_NOT_NULL = re.compile(r"(.+?)\s+not\s+null\Z", re.IGNORECASE | re.DOTALL)
_PLAIN = re.compile(r"[^\s`'\":,<>()]+\Z")


def quoted(name: str) -> str:
    """Return a name in backquotes."""
    return "`" + name.replace("`", "``") + "`"


def type_sql(data_type: T.DataType, named: Callable[[str], str] = quoted) -> str:
    """Return a type as SQL reads it; `simpleString` leaves the names of fields unquoted.

    Args:
        named: writes the name of a field.
    """
    if isinstance(data_type, T.StructType):
        return f"struct<{','.join(f'{named(f.name)}:{type_sql(f.dataType, named)}' for f in data_type.fields)}>"
    if isinstance(data_type, T.ArrayType):
        return f"array<{type_sql(data_type.elementType, named)}>"
    if isinstance(data_type, T.MapType):
        return f"map<{type_sql(data_type.keyType, named)},{type_sql(data_type.valueType, named)}>"
    return data_type.simpleString()


def ddl(schema: T.StructType) -> str:
    """Return a schema as Spark's DDL, for manifests; with the defaults that columns carry in their metadata.

    Raises:
        InvalidPipeline: a default that is no literal of the column's type.
    """
    return ", ".join(_column_ddl(field) for field in schema.fields)


def struct_of_ddl(text: str) -> T.StructType:
    """Parse DDL by Spark; before Spark has been started, by Stillstate's own parser of the common types.

    Raises:
        Exception: Spark's own; ValueError: the same of Stillstate's.
    """
    try:
        parsed: Any = T.StructType.fromDDL(text)  # of a lone type it is no struct; the caller says so
        return parsed  # type: ignore[no-any-return]
    except PySparkRuntimeError as error:
        if "SESSION_OR_CONTEXT_NOT_EXISTS" not in str(error):
            raise
    return T.StructType([_field_of(column) for column in parse_ddl(text)])


def _field_of(column: DdlColumn) -> T.StructField:
    kind, nullable = column.type, True
    if kind is None and (found := _NOT_NULL.match(column.type_text)) is not None:
        kind, nullable = parse_ddl(f"x {found[1]}")[0].type, False
    if kind is None:
        raise ValueError(f"without Spark the type {column.type_text!r} is not known; give a StructType")
    return T.StructField(column.name, spark_type(kind), nullable)


def _column_ddl(field: T.StructField) -> str:
    type_text = type_sql(field.dataType, _quoted_if_needed)
    try:
        default = default_clause(field.metadata or {}, type_text)
    except ValueError as error:
        raise InvalidPipeline(f"column {field.name!r}: its default cannot be used: {error}") from error
    return f"{quoted(field.name)} {type_text}{default}"


def _quoted_if_needed(name: str) -> str:
    """Return a field's name for a manifest: plain names unquoted, as every version wrote them."""
    return name if _PLAIN.match(name) else quoted(name)
