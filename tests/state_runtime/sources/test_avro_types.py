"""Each type of Avro has a column, or is refused by name with the way out."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.sources.avro_types import FIELDS_MAX, AvroSchema


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def field(kind: Any, name: str = "a", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def logical(kind: str, logical: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


COLUMNS: list[tuple[Any, pa.DataType]] = [
    ("boolean", pa.bool_()),
    ("int", pa.int32()),
    ("long", pa.int64()),
    ("float", pa.float32()),
    ("double", pa.float64()),
    ("bytes", pa.binary()),
    ("string", pa.string()),
    (logical("int", "date"), pa.date32()),
    (logical("int", "time-millis"), pa.int32()),
    (logical("long", "time-micros"), pa.int64()),
    (logical("long", "timestamp-millis"), pa.timestamp("us", "UTC")),
    (logical("long", "timestamp-micros"), pa.timestamp("us", "UTC")),
    (logical("long", "local-timestamp-millis"), pa.timestamp("us")),
    (logical("long", "local-timestamp-micros"), pa.timestamp("us")),
    (logical("long", "timestamp-nanos"), pa.int64()),
    (logical("string", "uuid"), pa.string()),
    (logical("bytes", "decimal", precision=38, scale=2), pa.decimal128(38, 2)),
    (logical("fixed", "decimal", precision=4, name="D", size=2), pa.decimal128(4, 0)),
    ({"type": "fixed", "name": "F", "size": 3}, pa.binary()),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.string()),
    ({"type": "array", "items": ["null", "int"]}, pa.list_(pa.int32())),
    ({"type": "map", "values": logical("int", "time-millis")}, pa.map_(pa.string(), pa.int32())),
    (record(field("int", "b"), name="N"), pa.struct([("b", pa.int32())])),
    (["null", "string"], pa.string()),
    (["string", "null"], pa.string()),
    (["string"], pa.string()),
]


@pytest.mark.parametrize(("kind", "column"), COLUMNS, ids=[json.dumps(kind) for kind, _ in COLUMNS])
def test_each_type_has_a_column(kind: Any, column: pa.DataType) -> None:
    assert AvroSchema(record(field(kind)), "here").column == pa.struct([("a", column)])


def test_a_named_type_is_known_by_its_name_within_a_namespace() -> None:
    inner = record(field("int", "b"), name="N")
    found = AvroSchema({**record(field(inner), field("N", "again")), "namespace": "com.x"}, "here").column
    assert found.field("again").type == found.field("a").type == pa.struct([("b", pa.int32())])


BAD: list[tuple[Any, str]] = [
    ("{", "no Avro schema"),
    ("[" * 100_000, "no Avro schema"),
    ({"type": "nothing"}, "no Avro schema.*nothing"),
    ({"type": {"type": "string"}}, "no Avro schema"),
    ('"string"', "one of a record"),
    ({"type": "map", "values": "int"}, "one of a record"),
    (record(field("Other")), "no Avro schema.*Other"),
    (record(field("int", default="x")), "no Avro schema"),
    (record(), "without fields"),
    (record(field("null")), "a has the type null"),
    (record(field(["null", "int", "string"])), "a is a union of null, int, string, and a column has one type; keep"),
    (record(field({"type": "array", "items": ["int", "string"]})), r"a\[\] is a union of int, string"),
    (record(field(record(field(["null", "R"]), name="N"))), "a.a is a R within a R"),
    (record(field(logical("bytes", "decimal", precision=39))), "a is a decimal of precision 39"),
    (record(field(logical("bytes", "decimal"))), "a is a decimal of precision None"),
]


@pytest.mark.parametrize(("schema", "words"), BAD, ids=[words for _, words in BAD])
def test_what_no_column_can_have_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^here: .*{words}"):
        AvroSchema(schema, "here")


def test_a_small_schema_does_not_make_any_number_of_columns() -> None:
    """Each type has two of the one before: 2 to the 60th fields."""
    kind: Any = record(field("int"), name="T0")
    for number in range(1, 60):
        kind = record(field(kind), field(f"T{number - 1}", "b"), name=f"T{number}")
    with pytest.raises(InvalidConfiguration, match=f"beyond {FIELDS_MAX} fields"):
        AvroSchema(kind, "here")
