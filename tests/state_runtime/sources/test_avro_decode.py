"""What a writer wrote is read as the reader's schema says; what cannot be read never touches its neighbours."""

from __future__ import annotations

import copy
import io
import json
import string
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_runtime.base.errors import InvalidData, StoreRefused, StoreUnavailable
from state_runtime.sources.avro_decode import Decoder
from state_runtime.sources.registry_client import NoSuchSchema
from tests.schema_registry import framed

Schema = dict[str, Any]
SHORT = st.text(string.printable, max_size=5)


def writers(*schemas: Schema) -> Callable[[int], str]:
    def by_id(number: int) -> str:
        if not 0 < number <= len(schemas):
            raise NoSuchSchema(f"the schema id {number} is not known to it")
        return json.dumps(schemas[number - 1])

    return by_id


def decoded(
    reader: Schema, values: Sequence[bytes | None], *schemas: Schema, on_error: Literal["fail", "null"] = "fail"
) -> Any:
    found = Decoder(reader, writers(*schemas), on_error, "here")(pa.array(values, pa.binary()))
    found.validate(full=True)
    return found.to_pylist()


# --- resolution ----------------------------------------------------------------------------------------------------


def _logical(kind: str, logical: str, **more: Any) -> Schema:
    return {"type": kind, "logicalType": logical, **more}


def _millis(value: datetime | time) -> Any:
    return value.replace(microsecond=value.microsecond // 1000 * 1000)


UTC_TIMES = st.datetimes(timezones=st.just(UTC))
PLAIN: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "boolean": ("boolean", st.booleans()),
    "int": ("int", st.integers(-(2**31), 2**31 - 1)),
    "long": ("long", st.integers(-(2**53), 2**53)),
    "float": ("float", st.floats(width=32, allow_nan=False)),
    "double": ("double", st.floats(allow_nan=False)),
    "bytes": ("bytes", st.binary(max_size=5)),
    "string": ("string", SHORT),
    "date": (_logical("int", "date"), st.dates()),
    "ms": (_logical("long", "timestamp-millis"), UTC_TIMES.map(_millis)),
    "us": (_logical("long", "timestamp-micros"), UTC_TIMES),
    "local ms": (_logical("long", "local-timestamp-millis"), st.datetimes().map(_millis)),
    "local us": (_logical("long", "local-timestamp-micros"), st.datetimes()),
    "time ms": (_logical("int", "time-millis"), st.times().map(_millis)),
    "time us": (_logical("long", "time-micros"), st.times()),
    "uuid": (_logical("string", "uuid"), st.uuids()),
    "decimal": (
        _logical("bytes", "decimal", precision=9, scale=2),
        st.decimals(-1_000_000, 1_000_000, places=2, allow_nan=False),
    ),
}
WIDER = {"int": ["long", "float", "double"], "long": ["float", "double"], "float": ["double"], "string": ["bytes"]}
DEFAULTS: list[tuple[Any, Any, Any]] = [
    ("int", 5, 5),
    ("string", "d", "d"),
    (["null", "long"], None, None),
    ("bytes", "\u00ff", b"\xff"),
    (_logical("bytes", "decimal", precision=5, scale=2), "\u0001\u0000", Decimal("2.56")),
    (_logical("long", "timestamp-millis"), 1500, datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)),
    (_logical("int", "date"), 1, date(1970, 1, 2)),
    ({"type": "array", "items": "bytes"}, ["\u0080"], [b"\x80"]),
    ({"type": "map", "values": "bytes"}, {"k": "\u0080"}, {"k": b"\x80"}),
]


@st.composite
def kinds(draw: Any, name: str, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """A type, and what may stand in a field of it. `name` is for types that have one."""
    choice = draw(st.sampled_from([*PLAIN, "enum", "fixed", *(["array", "map", "record", "null"] if depth else [])]))
    if choice in PLAIN:
        return PLAIN[choice]
    if choice == "enum":
        return {"type": "enum", "name": name, "symbols": ["A", "B"]}, st.sampled_from("AB")
    if choice == "fixed":
        return {"type": "fixed", "name": name, "size": 3}, st.binary(min_size=3, max_size=3)
    if choice == "record":
        schema, values = draw(records(name, depth - 1))
        return schema, values
    inner, values = draw(kinds(f"{name}_", depth - 1))
    if choice == "array":
        return {"type": "array", "items": inner}, st.lists(values, max_size=3)
    if choice == "map":
        return {"type": "map", "values": inner}, st.dictionaries(SHORT, values, max_size=3)
    if isinstance(inner, list):
        return inner, values
    return ["null", inner], st.none() | values


@st.composite
def records(draw: Any, name: str, depth: int = 2) -> tuple[Schema, st.SearchStrategy[Any]]:
    fields = {f"f{n}": draw(kinds(f"{name}{n}", depth)) for n in range(draw(st.integers(1, 4)))}
    schema = {"type": "record", "name": name, "fields": [{"name": n, "type": kind} for n, (kind, _) in fields.items()]}
    return schema, st.fixed_dictionaries({n: values for n, (_, values) in fields.items()})


@st.composite
def readers(draw: Any, writer: Schema) -> tuple[Schema, dict[str, Any]]:
    """A later form of a schema: fields left out, renamed, widened, made nullable, added; and what is added has."""
    reader = copy.deepcopy(writer)
    kept = draw(st.lists(st.sampled_from(reader["fields"]), min_size=1, unique_by=lambda each: each["name"]))
    for field in kept:
        kind = field["type"]
        if isinstance(kind, str) and kind in WIDER:
            field["type"] = kind = draw(st.sampled_from([kind, *WIDER[kind]]))
        if not isinstance(kind, list) and draw(st.booleans()):
            field["type"] = ["null", kind]
        if draw(st.booleans()):
            field["aliases"] = [field["name"]]
            field["name"] = f"renamed_{field['name']}"
    added = {}
    for number, (kind, default, value) in enumerate(draw(st.lists(st.sampled_from(DEFAULTS), max_size=3))):
        kept.append({"name": f"added{number}", "type": kind, "default": default})
        added[f"added{number}"] = value
    reader["fields"] = draw(st.permutations(kept))
    return reader, added


def as_column(value: Any) -> Any:
    """A value of fastavro's as an Arrow column gives it back."""
    if isinstance(value, dict):
        return {key: as_column(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_column(each) for each in value]
    if isinstance(value, UUID):
        return str(value)
    return value


def same(found: Any, wanted: Any) -> bool:
    """Equal, with maps as pairs and times as the numbers that they are."""
    if isinstance(found, list) and isinstance(wanted, dict):
        return same(dict(found), wanted)
    if isinstance(wanted, dict):
        return set(found) == set(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, time):
        micros = ((wanted.hour * 60 + wanted.minute) * 60 + wanted.second) * 1_000_000 + wanted.microsecond
        return found == micros or (wanted.microsecond % 1000 == 0 and found * 1000 == micros)
    return bool(found == wanted) and type(found) is type(wanted)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_records_of_two_writers_are_read_as_fastavro_reads_them_by_the_readers_schema(data: st.DataObject) -> None:
    """Also beside each other in one batch; what is added has the default that the schema gives."""
    old, values = data.draw(records("R"))
    reader, added = data.draw(readers(old))
    given_values = data.draw(st.lists(values, min_size=1, max_size=4))
    payloads: list[bytes | None] = [framed(1, old, value) for value in given_values]
    raw: list[dict[str, Any]] = []
    for payload in payloads:
        read: Any = fastavro.schemaless_reader(io.BytesIO(payload[5:]), old, reader)  # type: ignore[index]
        raw.append({**read, **added})
    wanted = [as_column(each) for each in raw]
    found = decoded(reader, [*payloads, None, *payloads], old)
    for one, other in zip(found, [*wanted, None, *wanted], strict=True):
        assert one is None if other is None else same(one, other)
    # The reader's own schema is a writer's too, beside the older one.
    newer = [framed(2, reader, value) for value in raw]
    mixed = decoded(reader, [each for pair in zip(payloads, newer, strict=True) for each in pair], old, reader)
    assert mixed[::2] == mixed[1::2] == found[: len(payloads)]


def test_the_unit_of_a_time_is_the_one_of_whoever_wrote_it() -> None:
    """A bare number is one in the reader's unit."""

    def at(kind: Any) -> Schema:
        return {"type": "record", "name": "R", "fields": [{"name": "at", "type": kind}]}

    millis, micros = at(_logical("long", "timestamp-millis")), at(_logical("long", "timestamp-micros"))
    when = datetime(2026, 11, 29, 12, 0, 0, 123_000, UTC)
    number = int(when.timestamp() * 1000)
    for reader in (millis, micros):
        values = [framed(1, millis, {"at": when}), framed(2, micros, {"at": when})]
        assert decoded(reader, values, millis, micros) == [{"at": when}] * 2
    assert decoded(millis, [framed(1, at("long"), {"at": number})], at("long")) == [{"at": when}]
    assert decoded(micros, [framed(1, at("long"), {"at": number * 1000})], at("long")) == [{"at": when}]


# --- what cannot be read -------------------------------------------------------------------------------------------

READER: Schema = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "text", "type": "string"},
        {"name": "amount", "type": _logical("bytes", "decimal", precision=5, scale=1)},
    ],
}
FINER = copy.deepcopy(READER)
FINER["fields"][2]["type"]["scale"] = 2
OTHER: Schema = {"type": "record", "name": "R", "fields": [{"name": "text", "type": "string"}]}
NO_SCHEMA: Schema = {"type": "SENTINEL"}
VALUE = {"id": 1, "text": "SENTINEL", "amount": Decimal("1.2")}
GOOD = framed(1, READER, VALUE)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with a byte 0"),
    "short": (GOOD[:4], "does not begin with a byte 0"),
    "JSON": (b'{"id": "SENTINEL"}', "does not begin with a byte 0"),
    "nothing after the id": (GOOD[:5], "schema id 1.*damaged"),
    "half of it": (GOOD[:-3], "schema id 1.*damaged"),
    "more behind it": (GOOD + b"x", "schema id 1.*damaged"),
    "no UTF-8": (framed(1, READER, VALUE).replace(b"SENT", b"\xff\xff\xff\xff"), "schema id 1.*damaged"),
    "unknown": (framed(9, READER, VALUE), "schema id 9.*not known"),
    "a schema that is none": (framed(4, READER, VALUE), "schema id 4.*no schema that fastavro can read"),
    "no such field": (framed(2, OTHER, VALUE), "schema id 2.*cannot be read as the reader's schema says"),
    "a finer scale": (framed(3, FINER, {**VALUE, "amount": Decimal("1.23")}), "schema id 3.*does not fit"),
}
WRITERS = (READER, OTHER, FINER, NO_SCHEMA)


@pytest.mark.parametrize(("value", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_ends_the_epoch_and_is_not_shown(value: bytes, words: str) -> None:
    with pytest.raises(InvalidData, match=f"here: row 2 of a batch.*{words}.*expect_or_drop") as raised:
        decoded(READER, [GOOD, None, value], *WRITERS)
    assert "SENTINEL" not in str(raised.value)


def test_what_cannot_be_read_is_null_and_its_neighbours_are_not() -> None:
    values = [each for value, _ in BAD.values() for each in (value, GOOD)]
    assert decoded(READER, values, *WRITERS, on_error="null") == [None, VALUE] * len(BAD)


@given(tails=st.lists(st.binary(max_size=20), max_size=5))
@settings(deadline=None)
def test_any_bytes_are_a_record_or_null_and_their_neighbours_stay(tails: list[bytes]) -> None:
    values = [each for tail in tails for each in (GOOD, GOOD[:5] + tail)]
    found = decoded(READER, [*values, GOOD], *WRITERS, on_error="null")
    assert found[::2] == [VALUE] * (len(tails) + 1)


@pytest.mark.parametrize("error", [StoreUnavailable, StoreRefused])
def test_a_registry_that_does_not_answer_makes_no_value_null(error: type[Exception]) -> None:
    def away(_: int) -> str:
        raise error("away")

    with pytest.raises(error):
        Decoder(READER, away, "null", "here")(pa.array([GOOD], pa.binary()))


def test_a_batch_asks_for_an_unknown_schema_once() -> None:
    asked = []

    def by_id(number: int) -> str:
        asked.append(number)
        raise NoSuchSchema("not known")

    decoder = Decoder(READER, by_id, "null", "here")
    assert decoder(pa.array([framed(9, READER, VALUE)] * 5)).null_count == 5
    assert asked == [9]


def test_an_empty_batch_and_one_of_nulls_have_the_columns() -> None:
    decoder = Decoder(READER, writers(), "fail", "here")
    for values in ([], [None, None]):
        found = decoder(pa.array(values, pa.binary()))
        assert (len(found), found.null_count, found.type.num_fields) == (len(values), len(values), 3)
