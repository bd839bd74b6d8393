"""What is known of a sink into PostgreSQL without a server: what is refused, and what rows are as text."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sql_helpers import SCHEMA, UID, staged

from state_runtime.base.errors import InvalidConfiguration, InvalidData, InvalidPipeline
from state_runtime.sinks.sql import SqlSink
from state_runtime.sinks.sql_copy import csv_of, null_patterns
from state_runtime.sinks.sql_types import TableColumn, misfits, type_for

SECRET = "s3cret-pass"
DSN = f"postgresql://me:{SECRET}@db.example:6543/shop"


@pytest.mark.parametrize(
    ("table", "how", "message"),
    [
        ("", {}, "names no table"),
        ("a.b.c", {}, "names no table"),
        ("shop.", {}, "names no table"),
        (".totals", {}, "names no table"),
        ("t" * 64, {}, "names no table"),
        ("ü" * 32, {}, "names no table"),
        ("a\x00b", {}, "names no table"),
        ("t", {"new_columns": "drop"}, "must be refuse or add"),
        ("t", {"remove_where": "gone"}, "needs merge_on"),
        ("t", {"remove_where": "k", "merge_on": ["k"]}, "is a key, and is not in the table"),
        ("t", {"dsn": "host=a", "dsn_env": "B"}, "give dsn or dsn_env, not both"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(table: str, how: Any, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        SqlSink(table, **how)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (pa.field("odd", pa.null()), "CAST(`odd` AS STRING), or leave it out"),
        (pa.field("odd", pa.duration("us")), "CAST(`odd` AS STRING)"),
        (pa.field("odd", pa.list_(pa.int64())), "to_json(`odd`), which a column of type jsonb takes, too"),
        (pa.field("odd", pa.map_(pa.string(), pa.int64())), "to_json(`odd`)"),
        (
            pa.field("odd", pa.struct([("start", pa.int64()), ("end", pa.int64())])),
            "its fields (`odd`.start, `odd`.end)",
        ),
        (pa.field("xmin", pa.int64()), "cannot have a column 'xmin'"),
        (pa.field("c" * 64, pa.int64()), "names have 1 to 63 bytes"),
        (pa.field("", pa.int64()), "names have 1 to 63 bytes"),
    ],
)
def test_columns_that_a_table_cannot_have_are_refused_when_the_job_is_built(field: pa.Field, message: str) -> None:
    with pytest.raises(InvalidPipeline) as told:
        SqlSink("totals").check(SCHEMA.append(field), "sink 'out'")
    assert message in str(told.value)


@pytest.mark.parametrize("count", [0, 1601])
def test_a_table_has_neither_no_column_nor_more_than_postgresql_takes(count: int) -> None:
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(count)])
    with pytest.raises(InvalidPipeline, match="has 1 to 1,600 columns"):
        SqlSink("totals").check(schema, "sink 'out'")


def test_keys_and_marks_are_columns_of_the_rows() -> None:
    with pytest.raises(InvalidPipeline, match="there is no column 'id'; it has k, n"):
        SqlSink("totals", merge_on=["id"]).check(SCHEMA, "sink 'out'")
    with pytest.raises(InvalidPipeline, match="remove_where needs a boolean column, and 'n' is int64"):
        SqlSink("totals", merge_on=["k"], remove_where="n").check(SCHEMA, "sink 'out'")
    with pytest.raises(InvalidPipeline, match="the rows have a column 'n', and the sink adds one of that name"):
        SqlSink("totals", epoch_column="n").check(SCHEMA, "sink 'out'")


# --- secrets -------------------------------------------------------------------------------------------------------


def test_an_address_is_shown_without_its_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DATABASE", DSN)
    for sink in (SqlSink("shop.totals", dsn=DSN), SqlSink("shop.totals", dsn_env="SHOP_DATABASE")):
        sink.check(SCHEMA, "sink 'out'")
        spec = sink.spec("orders", UID, "out", ("/store/orders", {}))
        shown = f"{sink!r} {sink.layout(SCHEMA)!r} {spec!r} {sink._table._address!r} {pickle.dumps(spec)!r}"
        assert SECRET not in shown
        assert "shop.totals in db.example:6543/shop" in shown


def test_an_address_that_is_none_is_not_repeated() -> None:
    """What libpq says of it has a part of it: here the password."""
    for dsn in (
        f"postgresql//me:{SECRET}@host/db",
        f"host=a {SECRET}",
        f"postgresql://me:{SECRET}%@host/db",
        f"postgresql://me:x@{SECRET}@host/db",
        f"postgresql://me:7/{SECRET}@host/db",
        f"postgresql://me:{SECRET}/x@host/db",
    ):
        sink = SqlSink("totals", dsn=dsn)
        with pytest.raises(InvalidConfiguration, match="dsn is no address of a database") as told:
            sink.layout(SCHEMA)
        assert SECRET not in f"{told.value} {told.value.__cause__}"
        assert told.value.__suppress_context__ or told.value.__context__ is None


def test_an_address_is_not_pickled() -> None:
    """It would travel to each task that mentions the sink."""
    with pytest.raises(TypeError, match="the address of a database is not pickled"):
        pickle.dumps(SqlSink("totals", dsn=DSN)._table._address)


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_DATABASE", raising=False)
    with pytest.raises(InvalidConfiguration, match="the environment variable SHOP_DATABASE is not set"):
        SqlSink("totals", dsn_env="SHOP_DATABASE").layout(SCHEMA)


def test_the_place_of_a_table_is_completed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGHOST": "db.example", "PGPORT": "7", "PGDATABASE": "shop"}.items():
        monkeypatch.setenv(name, value)
    assert SqlSink("totals").layout(SCHEMA).place == "the table totals in db.example:7/shop"
    assert SqlSink("totals", dsn="dbname=other").layout(SCHEMA).place == "the table totals in db.example:7/other"
    assert SqlSink("totals", dsn="service=here").layout(SCHEMA).place == "the table totals in service here"


def test_without_psycopg_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidConfiguration, match=r"pip install 'stillstate\[postgres\]'"):
        SqlSink("totals", dsn=DSN).layout(SCHEMA)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_text_that_no_database_holds_is_refused_before_the_checkpoint(tmp_path: Path) -> None:
    """Staged and named by a snapshot it would stand before each start: no change of the table could let it in."""
    spec = SqlSink("totals").spec("orders", UID, "out", (str(tmp_path), {}))
    with pytest.raises(InvalidData, match="row 1 of a batch has text in 'k' that PostgreSQL does not hold") as told:
        staged(spec, 1, [{"k": None, "n": 1}, {"k": "a\x00b", "n": 2}])
    assert "regexp_replace('k', '\\x00', '')" in str(told.value)
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    with pytest.raises(InvalidData, match="make_valid_utf8"):
        spec.open(1, 1, 0, "attempt").write(pa.record_batch([broken], names=["k"]))
    assert staged(spec, 1, [{"k": "a\\x00b", "n": 2}]).files


def test_rows_as_text_tell_null_from_nothing_and_bytes_from_text() -> None:
    rows = pa.table({"t": ["", None, 'a"\n,'], "b": [b"\x00\xff", b"", None], "n": [1, None, 3]})
    assert b"".join(map(bytes, csv_of(rows))) == b'"","\\x00ff",1\n,"\\x",\n"a""\n,",,3\n'
    assert b"".join(map(bytes, csv_of(rows.slice(1)))) == b',"\\x",\n"a""\n,",,3\n'
    assert list(csv_of(rows.slice(0, 0))) == []


def test_rows_as_text_are_bounded() -> None:
    pieces = list(csv_of(pa.table({"n": range(100_000)})))
    assert len(pieces) == 4
    assert b"".join(map(bytes, pieces)).count(b"\n") == 100_000


def test_each_pattern_of_nulls_in_keys_is_found_once() -> None:
    rows = pa.table({"a": [1, None, None, None, 2], "b": [None, None, "x", "y", "z"]})
    assert null_patterns(rows, ["a", "b"]) == [(False, False), (False, True), (True, False), (True, True)]
    assert null_patterns(rows, ["b"]) == [(False,), (True,)]
    assert null_patterns(rows.slice(0, 0), ["a"]) == []


@pytest.mark.parametrize(
    ("kind", "modifier", "fits"),
    [
        (pa.decimal128(10, 2), ((10 << 16) | 2) + 4, True),
        (pa.decimal128(10, 2), ((12 << 16) | 4) + 4, True),
        (pa.decimal128(10, 2), ((12 << 16) | 5) + 4, False),
        (pa.decimal128(10, 2), ((10 << 16) | 1) + 4, False),
        (pa.decimal128(10, 2), -1, True),
        (pa.int64(), ((19 << 16) | 0) + 4, True),
        (pa.int64(), ((18 << 16) | 0) + 4, False),
        (pa.int64(), ((30 << 16) | (-2 & 0x7FF)) + 4, False),
        (pa.float64(), -1, False),
    ],
)
def test_digits_of_a_numeric_column_are_compared(kind: pa.DataType, modifier: int, fits: bool) -> None:
    """None before the point may be lost, and none behind it."""
    column = TableColumn("x", "numeric", "numeric", modifier)
    assert (misfits(pa.schema([("x", kind)]), [column]) == "") is fits


def test_each_type_has_one_in_sql() -> None:
    assert type_for(pa.decimal128(38, 18)) == "numeric(38, 18)"
    assert type_for(pa.timestamp("us", "Europe/Berlin")) == "timestamptz"
    assert type_for(pa.large_string()) == type_for(pa.string()) == "text"
    assert type_for(pa.timestamp("ns")) is None, "it would be rounded"
