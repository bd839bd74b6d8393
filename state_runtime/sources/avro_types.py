"""Columns of an Avro schema: which types of Arrow and Spark its fields have, and what is refused.

Values are taken as fastavro reads them into the *wire* type, which has Avro's unit (a `timestamp-millis` is one of
milliseconds), so that a default or a writer without the logical type, which are bare numbers, mean the same. The
*column* type is what Spark gets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from state_runtime.base.errors import InvalidConfiguration

__all__ = ["FIELDS_MAX", "AvroSchema", "fastavro", "parsed"]

FIELDS_MAX: Final = 10_000
"""Named types may be used again and again, so a small text can stand for any number of columns."""
_PRECISION_MAX: Final = 38
_UTC: Final = "UTC"

_PRIMITIVES: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Final[Mapping[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", _UTC),
    ("long", "timestamp-micros"): pa.timestamp("us", _UTC),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}


class AvroSchema:
    """A reader's schema with its columns.

    Args:
        given: the schema as JSON, text or parsed.
        where: whose it is, for messages.

    Attributes:
        parsed: for fastavro; defaults are the values that a reader would find.
        wire: the type of its records as fastavro reads them.
        column: the type that Spark gets.

    Raises:
        InvalidConfiguration: it is no Avro schema, not one of a record, or a field has no type in Spark.
    """

    def __init__(self, given: str | Mapping[str, Any], where: str) -> None:
        self.parsed, self._named = parsed(given, where)
        self._where = where
        self._fields = 0
        if not isinstance(self.parsed, dict) or self.parsed["type"] not in ("record", "error"):
            raise InvalidConfiguration(f"{where}: the schema must be one of a record, whose fields become columns")
        self.wire = self._type(self.parsed, (), "")
        self.column = _column_type(self.wire)

    def _type(self, schema: Any, inside: tuple[str, ...], path: str) -> pa.DataType:
        if isinstance(schema, list):
            return self._union(schema, inside, path)
        if isinstance(schema, str) and schema in self._named:
            return self._type(self._named[schema], inside, path)
        kind = schema if isinstance(schema, str) else schema["type"]
        logical = {} if isinstance(schema, str) else schema
        if logical.get("logicalType") == "decimal" and kind in ("bytes", "fixed"):
            return self._decimal(schema, path)
        if (kind, logical.get("logicalType")) in _LOGICAL:
            return _LOGICAL[kind, logical["logicalType"]]
        match kind:
            case "record" | "error":
                return self._record(schema, inside, path)
            case "array":
                return pa.list_(self._type(schema["items"], inside, f"{path}[]"))
            case "map":
                return pa.map_(pa.string(), self._type(schema["values"], inside, f"{path}{{}}"))
            case "enum":
                return pa.string()
            case "fixed":
                return pa.binary()
        if kind not in _PRIMITIVES:
            raise self._refused(path, f"has the type {kind}, which no column has; leave it out of the schema")
        return _PRIMITIVES[kind]

    def _record(self, schema: Mapping[str, Any], inside: tuple[str, ...], path: str) -> pa.DataType:
        name = schema["name"]
        if name in inside:
            raise self._refused(
                path, f"is a {name} within a {name}, and Spark has no type for that; leave it out of the schema"
            )
        if not schema["fields"]:
            raise self._refused(path, "is a record without fields, which no column has; leave it out of the schema")
        self._fields += len(schema["fields"])
        if self._fields > FIELDS_MAX:
            raise self._refused(path, f"is beyond {FIELDS_MAX} fields; leave out what the job does not read")
        made = []
        for field in schema["fields"]:
            below = f"{path}.{field['name']}" if path else field["name"]
            made.append(pa.field(field["name"], self._type(field["type"], (*inside, name), below)))
            if "default" in field:
                field["default"] = self._default(field["type"], field["default"])
        return pa.struct(made)

    def _union(self, schema: list[Any], inside: tuple[str, ...], path: str) -> pa.DataType:
        others = [each for each in schema if each != "null"]
        if len(others) == 1:
            return self._type(others[0], inside, path)
        names = ", ".join(each if isinstance(each, str) else each.get("name", each["type"]) for each in schema)
        raise self._refused(
            path,
            f"is a union of {names}, and a column has one type; keep null and one of the others in the schema (a "
            "record with another one is then one that cannot be resolved)",
        )

    def _decimal(self, schema: Mapping[str, Any], path: str) -> pa.DataType:
        precision = schema.get("precision")
        if not isinstance(precision, int) or precision > _PRECISION_MAX:
            raise self._refused(
                path,
                f"is a decimal of precision {precision}, and Spark's have 1 to {_PRECISION_MAX}; leave it out of the "
                "schema, or read its bytes (without logicalType, for writer and reader)",
            )
        return pa.decimal128(precision, schema.get("scale", 0))

    def _default(self, schema: Any, value: Any) -> Any:
        """Return a default as fastavro would read it; the schema has bytes as text and decimals as such bytes."""
        if isinstance(schema, list):
            if value is None:
                return None
            return self._default(next(each for each in schema if each != "null"), value)
        if isinstance(schema, str) and schema in self._named:
            schema = self._named[schema]
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in ("bytes", "fixed") and isinstance(value, str):
            raw = value.encode("iso-8859-1")
            if not isinstance(schema, str) and schema.get("logicalType") == "decimal":
                return Decimal(int.from_bytes(raw, "big", signed=True)).scaleb(-schema.get("scale", 0))
            return raw
        if kind == "array":
            return [self._default(schema["items"], each) for each in value]
        if kind == "map":
            return {key: self._default(schema["values"], each) for key, each in value.items()}
        if kind in ("record", "error"):
            return {
                field["name"]: self._default(field["type"], value[field["name"]])
                if field["name"] in value
                else field.get("default")
                for field in schema["fields"]
            }
        return value

    def _refused(self, path: str, why: str) -> InvalidConfiguration:
        return InvalidConfiguration(f"{self._where}: {path or 'the schema'} {why}")


def parsed(given: str | Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Return a schema as fastavro takes it, and its named types.

    Texts with the logical type `uuid` stay the texts that they are.

    Raises:
        InvalidConfiguration: it is no Avro schema.
    """
    named: dict[str, Any] = {}
    try:
        raw = json.loads(given) if isinstance(given, str) else json.loads(json.dumps(given))
        made = fastavro().parse_schema(_without_uuid(raw), named_schemas=named)
    except (ValueError, TypeError, KeyError, RecursionError, fastavro().schema.SchemaParseException) as error:
        raise InvalidConfiguration(f"{where}: that is no Avro schema ({type(error).__name__}: {error})") from error
    return made, named


def _without_uuid(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_uuid(each) for each in schema]
    if isinstance(schema, dict):
        return {
            key: _without_uuid(value) for key, value in schema.items() if not (key == "logicalType" and value == "uuid")
        }
    return schema


def _column_type(wire: pa.DataType) -> pa.DataType:
    """Return the type that Spark gets: timestamps in microseconds, a time of the day as the number that it is."""
    if pa.types.is_struct(wire):
        return pa.struct([pa.field(field.name, _column_type(field.type)) for field in wire])
    if pa.types.is_list(wire):
        return pa.list_(_column_type(wire.value_type))
    if pa.types.is_map(wire):
        return pa.map_(wire.key_type, _column_type(wire.item_type))
    if pa.types.is_timestamp(wire):
        return pa.timestamp("us", wire.tz)
    if pa.types.is_time32(wire):
        return pa.int32()
    if pa.types.is_time64(wire):
        return pa.int64()
    return wire


def fastavro() -> Any:
    """Return the library.

    Raises:
        InvalidConfiguration: it is not installed.
    """
    try:
        import fastavro as library
        import fastavro.schema
    except ImportError as error:
        raise InvalidConfiguration(
            "from_registry needs the package fastavro for Avro: pip install 'stillstate[avro]'"
        ) from error
    return library
