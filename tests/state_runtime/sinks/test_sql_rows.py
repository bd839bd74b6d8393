"""Which rows a table in PostgreSQL gets, how they are merged, and what is said if it does not take them."""

from __future__ import annotations

import datetime as dt
import logging
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from sql_helpers import SCHEMA, UID, Database, staged

from examples.servers.postgres import PASSWORD, USER
from state_runtime.base.errors import CorruptData, InvalidConfiguration, InvalidPipeline, StoreRefused
from state_runtime.sinks.sql import SqlSink
from state_runtime.sinks.sql_owners import SqlOwners
from state_runtime.store import Created

pytestmark = pytest.mark.servers
SECRET = "a value of a row"


# --- values --------------------------------------------------------------------------------------------------------

EVERYTHING = pa.schema(
    [
        ("t", pa.string()),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("small", pa.int16()),
        ("middle", pa.int32()),
        ("large", pa.int64()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("money", pa.decimal128(38, 18)),
        ("day", pa.date32()),
        ("clock", pa.time64("us")),
        ("local", pa.timestamp("us")),
        ("instant", pa.timestamp("us", "UTC")),
        ("raw", pa.binary()),
    ]
)
LAST = dt.datetime.fromisoformat("9999-12-31T23:59:59.999999")
HOSTILE = [
    "",
    " ",
    "\\N",
    "\\.",
    "a\n\\.\nb",
    '"',
    '""',
    "'",
    ",",
    "\r\n",
    "\t",
    "NULL",
    "null",
    "ü€𝄞",
    "%s",
    "{}",
    "\x01",
]


@pytest.mark.parametrize("merge_on", [None, ["large"]], ids=["append", "merge"])
def test_each_value_comes_as_it_is(database: Database, merge_on: Any) -> None:
    """Nulls, the ends of each type, texts that mean something to COPY, and bytes of each kind."""
    extremes = {
        "t": "x", "flag": True, "tiny": -128, "small": -(2**15), "middle": -(2**31), "large": -(2**63),
        "single": 0.10000000149011612, "double": 5e-324, "money": Decimal("-99999999999999999999.999999999999999999"),
        "day": dt.date(1, 1, 1), "clock": dt.time(23, 59, 59, 999999), "local": LAST,
        "instant": dt.datetime(1, 1, 1, tzinfo=dt.UTC), "raw": bytes(range(256)),
    }  # fmt: skip
    rows = [extremes, dict.fromkeys(EVERYTHING.names)]
    rows += [{**dict.fromkeys(EVERYTHING.names), "t": text, "large": n} for n, text in enumerate(HOSTILE)]
    rows += [
        {**dict.fromkeys(EVERYTHING.names), "large": 100, "double": float("inf"), "single": float("-inf"), "raw": b""}
    ]
    database.publish(1, rows, EVERYTHING, merge_on=merge_on)
    found = database.rows()
    for row in found:
        row["single"] = None if row["single"] is None else pa.scalar(row["single"], pa.float32()).as_py()
    assert found == sorted(rows, key=str)
    kinds = database.execute(
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'totals' ORDER BY 1"
    )
    assert dict(kinds)["money"] == "numeric"
    assert dict(kinds)["instant"] == "timestamp with time zone"


def test_not_a_number_comes_as_it_is(database: Database) -> None:
    database.publish(1, [{"x": float("nan")}, {"x": -0.0}], pa.schema([("x", pa.float64())]))
    assert database.execute("SELECT x::text FROM totals ORDER BY 1") == [("-0",), ("NaN",)]


def test_a_table_that_is_there_may_have_wider_types_and_more_columns(database: Database) -> None:
    """Text for json, uuid and enumerations; defaults and identities for what the rows do not have."""
    database.execute("CREATE TYPE mood AS ENUM ('glad', 'sad')")
    database.execute("CREATE DOMAIN amount AS numeric(30, 4)")
    database.execute(
        "CREATE TABLE totals (number bigint GENERATED ALWAYS AS IDENTITY, doc jsonb, id uuid, feels mood, short varchar(9), "
        "n numeric, m bigint, paid amount, since timestamptz NOT NULL DEFAULT now())"
    )
    schema = pa.schema(
        [
            ("doc", pa.string()),
            ("id", pa.string()),
            ("feels", pa.string()),
            ("short", pa.string()),
            ("n", pa.int64()),
            ("m", pa.int32()),
            ("paid", pa.decimal128(20, 2)),
        ]
    )
    uid = "00000000-0000-0000-0000-00000000000a"
    row = {"doc": '{"a": [1, null]}', "id": uid, "feels": "sad", "short": "s", "n": 2**63 - 1, "m": 7, "paid": Decimal("1.25")}  # fmt: skip
    database.publish(1, [row], schema)
    assert database.execute("SELECT number, doc->'a'->>0, id::text, feels::text, n, m, paid FROM totals") == [
        (1, "1", uid, "sad", 2**63 - 1, 7, Decimal("1.2500"))
    ]


def test_names_are_what_they_are(database: Database) -> None:
    """Quotes, blanks, percent signs, braces, words of SQL and capital letters."""
    schema_name, table = 'my "sch%ma" {}', "SELECT %s; DROP"
    database.execute('CREATE SCHEMA "my ""sch%ma"" {}"')
    columns = ['"', "a b", "%s", "{}", "Group", "user"]
    schema = pa.schema([(name, pa.int64()) for name in columns])
    for epoch in (1, 2):
        row = {name: number if number < 2 else epoch for number, name in enumerate(columns)}
        how = {"table": f"{schema_name}.{table}", "merge_on": columns[:2]}
        database.publish(epoch, [row], schema, **how)
    assert database.rows('SELECT * FROM "my ""sch%ma"" {}"."SELECT %s; DROP"') == [row]
    assert database.execute('SELECT epoch, table_name FROM "my ""sch%ma"" {}".stillstate_epochs') == [(2, table)]


def test_an_epoch_column_and_new_columns_come_if_they_are_asked_for(database: Database) -> None:
    database.publish(7, [{"k": "a", "n": 1}], epoch_column="epoch")
    assert database.rows() == [{"k": "a", "n": 1, "epoch": 7}]
    wider = SCHEMA.append(pa.field("more", pa.string()))
    with pytest.raises(
        InvalidPipeline, match='no column more; let the sink add what is missing with new_columns="add"'
    ):
        database.sink(wider)
    database.publish(8, [{"k": "b", "n": 2, "more": "m"}], wider, new_columns="add")
    assert database.rows("SELECT k, epoch, more FROM totals") == [
        {"k": "a", "epoch": 7, "more": None},
        {"k": "b", "epoch": None, "more": "m"},
    ]


# --- merges --------------------------------------------------------------------------------------------------------


def test_rows_are_merged_and_removed_by_key(database: Database) -> None:
    """The last one of an epoch counts; null is a key like others; what is marked goes, also if it never was there."""
    schema = pa.schema([("k", pa.string()), ("n", pa.int64()), ("gone", pa.bool_())])

    def epoch(number: int, *rows: tuple[Any, int, Any]) -> None:
        given = [{"k": k, "n": n, "gone": gone} for k, n, gone in rows]
        database.publish(number, given, schema, merge_on=["k"], remove_where="gone")

    epoch(1, ("a", 1, False), ("b", 1, None), (None, 1, False), ("a", 2, False))
    assert database.rows() == [{"k": "a", "n": 2}, {"k": "b", "n": 1}, {"k": None, "n": 1}]
    epoch(2, ("a", 0, True), ("never", 0, True), (None, 7, False), ("c", 0, True), ("c", 3, False))
    assert database.rows() == [{"k": "b", "n": 1}, {"k": "c", "n": 3}, {"k": None, "n": 7}]
    epoch(3, (None, 0, True), ("b", 0, True))
    assert database.rows() == [{"k": "c", "n": 3}]


def test_keys_of_several_columns_are_merged_and_removed_one_by_one_with_nulls(database: Database) -> None:
    """Of different types, each of them null somewhere."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.bool_()), ("n", pa.int64()), ("gone", pa.bool_())])
    keys = [(1, True), (1, False), (1, None), (None, True), (None, None)]

    def epoch(number: int, gone: bool, wanted: list[tuple[Any, Any]]) -> None:
        rows = [{"a": a, "b": b, "n": number, "gone": gone} for a, b in wanted]
        database.publish(number, rows, schema, merge_on=["a", "b"], remove_where="gone")

    epoch(1, False, keys)
    epoch(2, False, keys[1:])
    assert {(r["a"], r["b"]): r["n"] for r in database.rows()} == {key: 1 if key == (1, True) else 2 for key in keys}
    assert len(database.rows()) == len(keys)
    epoch(3, True, keys[2:])
    assert [(r["a"], r["b"]) for r in database.rows()] == [(1, False), (1, True)]


def test_rows_of_keys_alone_are_merged(database: Database) -> None:
    for epoch in (1, 2):
        database.publish(epoch, [{"k": "a"}, {"k": f"b{epoch}"}], pa.schema([("k", pa.string())]), merge_on=["k"])
    assert [row["k"] for row in database.rows()] == ["a", "b1", "b2"]


def test_a_table_that_the_sink_makes_has_a_key(database: Database) -> None:
    """A primary key where no key can be null; an index in which null is equal to null otherwise."""
    database.publish(1, [{"k": "a", "n": 1}], merge_on=["k"], table="nullable")
    keys = pa.schema([pa.field("k", pa.string(), nullable=False), ("n", pa.int64())])
    database.publish(1, [{"k": "a", "n": 1}], keys, merge_on=["k"], table="strict", uid="1" * 32)
    asked = "SELECT i.indisprimary, i.indnullsnotdistinct FROM pg_index i WHERE i.indrelid = '{}'::regclass"
    assert database.execute(asked.format("nullable")) == [(False, True)]
    assert database.execute(asked.format("strict")) == [(True, False)]


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        ("k text PRIMARY KEY", True),
        ("k text NOT NULL UNIQUE", True),
        ("k text UNIQUE NULLS NOT DISTINCT", True),
        ("k text UNIQUE", False),
        ("k text", False),
        ("k text NOT NULL UNIQUE DEFERRABLE", False),
    ],
)
def test_rows_are_merged_only_into_a_table_that_has_each_key_once(database: Database, key: str, fits: bool) -> None:
    """With a unique index in which nulls differ, the row of the key null would come anew in each epoch."""
    database.execute(f"CREATE TABLE totals ({key}, n bigint)")
    if fits:
        database.publish(1, [{"k": "a", "n": 1}], merge_on=["k"])
        return
    with pytest.raises(InvalidPipeline, match=r'CREATE UNIQUE INDEX ON totals \("k"\) NULLS NOT DISTINCT. Nothing was'):
        database.sink(merge_on=["k"])


def test_partial_and_wider_indexes_are_no_keys(database: Database) -> None:
    database.execute("CREATE TABLE totals (k text NOT NULL, n bigint NOT NULL, PRIMARY KEY (k, n))")
    database.execute("CREATE UNIQUE INDEX ON totals (k) WHERE n > 0")
    database.execute("CREATE UNIQUE INDEX ON totals (lower(k))")
    with pytest.raises(InvalidPipeline, match="merge_on needs a unique index"):
        database.sink(merge_on=["k"])
    database.execute("CREATE UNIQUE INDEX ON totals (k) INCLUDE (n)")
    database.sink(merge_on=["k"])


def test_a_partitioned_table_takes_rows(database: Database) -> None:
    database.execute("CREATE TABLE totals (k text NOT NULL, n bigint, PRIMARY KEY (k)) PARTITION BY LIST (k)")
    database.execute("CREATE TABLE of_a PARTITION OF totals FOR VALUES IN ('a')")
    database.execute("CREATE TABLE others PARTITION OF totals DEFAULT")
    for epoch in (1, 2):
        database.publish(epoch, [{"k": "a", "n": epoch}, {"k": "b", "n": epoch}], merge_on=["k"])
    assert database.rows() == [{"k": "a", "n": 2}, {"k": "b", "n": 2}]


# --- refused before anything is written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("CREATE TABLE totals (k text, n integer)", "column n is integer there, which does not hold every int64"),
        ("CREATE TABLE totals (k text, n numeric(9, 0))", r"column n is numeric\(9,0\) there, which does not hold"),
        ("CREATE TABLE totals (k text, n text)", "column n is text there"),
        ("CREATE TABLE totals (k text, n bigint, more text NOT NULL)", "column more takes no null, has no default"),
        ("CREATE TABLE totals (k text, n bigint GENERATED ALWAYS AS (1) STORED)", "column n is computed by the server"),
        ("CREATE TABLE totals (k text, n bigint GENERATED ALWAYS AS IDENTITY)", "column n is computed by the server"),
        ("CREATE UNLOGGED TABLE totals (k text, n bigint)", "it is unlogged: a crash of the server would empty it"),
        ("CREATE VIEW totals AS SELECT 'a' AS k, 1::bigint AS n", "it is a view; name the table below it"),
        ("CREATE SEQUENCE totals", "it is no table"),
        ("CREATE TABLE totals (k text)", "it has no column n"),
    ],
)
def test_what_does_not_fit_the_table_is_refused_before_a_row(database: Database, made: str, message: str) -> None:
    database.execute(made)
    with pytest.raises(InvalidPipeline, match=rf"sink 'out': the table totals in 127.*{message}.*Nothing was changed"):
        database.sink()
    assert database.execute("SELECT to_regclass('stillstate_epochs')") == [(None,)]


def test_times_that_would_be_rounded_are_refused(database: Database) -> None:
    database.execute("CREATE TABLE totals (at timestamptz(3))")
    with pytest.raises(InvalidPipeline, match=r"column at is timestamp\(3\) with time zone there"):
        database.sink(pa.schema([("at", pa.timestamp("us", "UTC"))]))


def test_a_schema_that_is_not_there_is_named(database: Database) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"there is no schema for the table shop.totals in 127.*CREATE SCHEMA"
    ):
        database.sink(table="shop.totals")


def test_a_database_that_is_not_there_is_named(database: Database) -> None:
    with pytest.raises(InvalidConfiguration, match="there is no database for the table totals"):
        database.sink(dsn=database.server.url("nobody_made_it"))


def test_an_old_server_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_runtime.sinks.sql_table._OLDEST", 990_000)
    with pytest.raises(InvalidConfiguration, match=r"needs PostgreSQL 15 or newer, and 127.* is 15"):
        database.sink()


# --- rows that the table does not take --------------------------------------------------------------------------------


@pytest.mark.parametrize("merge_on", [None, ["n"]], ids=["append", "merge"])
@pytest.mark.parametrize(
    ("made", "value", "message"),
    [
        ("k text NOT NULL", None, "NotNullViolation, column 'k'"),
        ("k varchar(3)", SECRET, "StringDataRightTruncation, column 'k'"),
        ("k uuid", SECRET, "InvalidTextRepresentation, column 'k'"),
        ("k jsonb", SECRET, "InvalidTextRepresentation, column 'k'"),
        ("k text CONSTRAINT short CHECK (length(k) < 3)", SECRET, "CheckViolation, constraint 'short'"),
        ("k text CONSTRAINT known REFERENCES keys (k)", SECRET, "ForeignKeyViolation, constraint 'known'"),
        ("k text CONSTRAINT each UNIQUE", SECRET, "UniqueViolation, constraint 'each'"),
    ],
)  # fmt: skip
def test_rows_that_the_table_does_not_take_end_the_run_with_the_columns_name_and_no_value(
    database: Database, caplog: pytest.LogCaptureFixture, made: str, value: Any, message: str, merge_on: Any
) -> None:
    """Tried again it would be the same. What is staged comes once the table is put right."""
    caplog.set_level(logging.DEBUG)
    database.execute("CREATE TABLE keys (k text PRIMARY KEY)")
    database.execute(f"CREATE TABLE totals ({made}, n bigint NOT NULL UNIQUE)")
    if "UNIQUE" in made:
        database.execute("INSERT INTO totals VALUES (%s, 9)", [value])
    before = database.rows()
    sink, spec = database.sink(merge_on=merge_on)
    output = staged(spec, 1, [{"k": value, "n": 1}])
    with pytest.raises(InvalidPipeline, match=f"does not take the rows: {message}. What is staged stays") as told:
        sink.publish(spec, output, None)
    assert SECRET not in f"{told.value} {told.value.__cause__} {caplog.text}"
    assert told.value.__suppress_context__, "a traceback would show what PostgreSQL says, with the row"
    assert database.rows() == before
    database.execute("DROP TABLE totals")
    database.execute("CREATE TABLE totals (k text, n bigint NOT NULL UNIQUE)")
    sink.publish_again(spec, output, None)
    assert database.rows() == [{"k": value, "n": 1}]


def test_keys_that_only_the_database_takes_for_equal_are_explained(database: Database) -> None:
    database.execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    database.execute("CREATE TABLE totals (k text COLLATE loose PRIMARY KEY, n bigint)")
    with pytest.raises(InvalidPipeline, match="takes keys for equal that the rows have as different ones"):
        database.publish(1, [{"k": "a", "n": 1}, {"k": "A", "n": 2}], merge_on=["k"])


# --- who may, and what nobody sees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge_on", [None, ["k"]], ids=["append", "merge"])
def test_a_role_needs_what_the_page_says_and_no_more(database: Database, merge_on: Any) -> None:
    """The tables are there, and the role may make none."""
    database.publish(1, [{"k": "a", "n": 1}], merge_on=merge_on)
    role = f"writer_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    database.execute("REVOKE CREATE ON SCHEMA public FROM public")
    dsn = database.server.dsn(database.name).replace(f"user={USER}", f"user={role}")
    with pytest.raises(StoreRefused, match=r"cannot be written: InsufficientPrivilege. Grant the role"):
        database.publish(2, [{"k": "b", "n": 2}], merge_on=merge_on, dsn=dsn)
    database.execute(f"GRANT SELECT, INSERT, UPDATE ON stillstate_epochs TO {role}")
    database.execute(f"GRANT SELECT, INSERT ON stillstate_owners TO {role}")
    database.execute(f"GRANT INSERT{', SELECT, UPDATE' if merge_on else ''} ON totals TO {role}")
    database.publish(2, [{"k": "b", "n": 2}], merge_on=merge_on, dsn=dsn)
    assert database.rows() == [{"k": "a", "n": 1}, {"k": "b", "n": 2}]
    sink, _ = database.sink(merge_on=merge_on, dsn=dsn)
    assert SqlOwners(sink._table).create("owners/one/1.json", b"me") is Created.MINE


def test_documents_of_owners_are_created_once(database: Database) -> None:
    """Of any number of writers of one name the first one counts, and it knows itself again after a lost answer."""
    sink, _ = database.sink()
    owners, same = SqlOwners(sink._table), SqlOwners(sink._table)
    assert owners.list_names("owners/one") == []
    with pytest.raises(FileNotFoundError):
        owners.read("owners/one/1.json", 100)
    assert owners.create("owners/one/1.json", b"me") is Created.MINE
    assert owners.create("owners/one/1.json", b"me") is Created.MINE
    assert same.create("owners/one/1.json", b"you") is Created.LOST
    owners.create("owners/one_other/7.json", b"%s")
    assert owners.read("owners/one/1.json", 100) == b"me"
    assert owners.list_names("owners/one") == ["1.json"]
    with pytest.raises(CorruptData, match="has more than 1 bytes"):
        owners.read("owners/one/1.json", 1)


def test_without_an_address_libpqs_own_variables_count(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for psql; and a table without a schema is in the first one of the search path."""
    server = database.server
    database.execute("CREATE SCHEMA shop")
    given = {
        "HOST": "127.0.0.1",
        "PORT": str(server.port),
        "DATABASE": database.name,
        "USER": USER,
        "PASSWORD": PASSWORD,
    }
    for name, value in {**given, "OPTIONS": "-c search_path=shop,public"}.items():
        monkeypatch.setenv(f"PG{name}", value)
    sink = SqlSink("totals")
    sink.check(SCHEMA, "sink 'out'")
    spec = sink.spec("orders", UID, "out", (str(database.root), {}))
    sink.publish(spec, staged(spec, 1, [{"k": "a", "n": 1}]), None)
    monkeypatch.undo()
    assert database.rows("SELECT * FROM shop.totals") == [{"k": "a", "n": 1}]


def test_a_wrong_password_is_said_at_once_and_shown_nowhere(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-and-secret"
    monkeypatch.setenv("SHOP_DATABASE", database.server.url(database.name).replace(PASSWORD, wrong))
    sink = SqlSink("totals", dsn_env="SHOP_DATABASE")
    sink.check(SCHEMA, "sink 'out'")
    with pytest.raises(
        StoreRefused,
        match=r"cannot be written: OperationalError \(.*password authentication failed.*\). Grant the role",
    ) as told:
        sink.check_place(sink.layout(SCHEMA), (), "sink 'out'")
    shown = f"{told.value!r} {sink!r} {sink._table._address!r} {sink.layout(SCHEMA)!r} {sink.spec('j', 'u' * 32, 'out', ('r', {}))!r}"
    assert wrong not in shown + caplog.text
    assert told.value.__suppress_context__
