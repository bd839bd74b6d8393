"""Records of a schema registry in Spark's plans and in a whole job."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime import JobContext, JobSettings, StreamingJob
from state_runtime.base.errors import InvalidConfiguration, InvalidData, StoreRefused
from state_runtime.sources import from_registry
from state_runtime.spark.errors import typed_error
from tests.conftest import ROOT
from tests.schema_registry import SchemaRegistry, framed

pytestmark = pytest.mark.spark

OLD: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "shop", "type": "string"},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
    ],
}
NEW: dict[str, Any] = {
    **OLD,
    "fields": [
        {"name": "channel", "type": "string"},
        *OLD["fields"][1:],
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
    ],
}


@pytest.fixture
def server() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as made:
        made.add(1, OLD)
        made.add(2, NEW, "orders-value")
        yield made


def old(number: int) -> bytes:
    return framed(1, OLD, {"id": number, "shop": f"s{number % 3}", "amount": Decimal(number) / 4})


def new(number: int) -> bytes:
    more = {"channel": f"c{number % 2}", "note": None}
    return framed(2, NEW, {"id": number, "shop": f"s{number % 3}", "amount": Decimal(number) / 4, **more})


def values(spark: SparkSession, *given: bytes | None) -> DataFrame:
    rows = [(None if value is None else bytearray(value),) for value in given]
    return spark.createDataFrame(rows, "value BINARY").coalesce(1)


def test_a_column_of_records_has_the_columns_of_the_schema(spark: SparkSession, server: SchemaRegistry) -> None:
    """The newest schema of the subject is the reader's; rows without a value stay without."""
    frame = values(spark, new(5), None, new(6)).withColumn(
        "more", from_registry("value", server.url, subject="orders-value")
    )
    assert frame.schema["more"].dataType.simpleString() == (
        "struct<channel:string,shop:string,amount:decimal(12,2),id:bigint,note:string>"
    )
    assert [row.more and tuple(row.more) for row in frame.collect()] == [
        ("c1", "s2", Decimal("1.25"), 5, None),
        None,
        ("c0", "s0", Decimal("1.50"), 6, None),
    ]


def test_a_process_asks_for_a_schema_once_for_all_columns(spark: SparkSession, server: SchemaRegistry) -> None:
    readers = {"old": OLD, "new": {**OLD, "fields": OLD["fields"][:1]}}
    columns = [from_registry("value", server.url, schema=schema, name=name) for name, schema in readers.items()]
    (row,) = values(spark, old(4)).select(*columns).collect()
    assert (row.old.id, row.old.shop, row.new.id) == (4, "s1", 4)
    assert server.asked == {"/schemas/ids/1": 1}


def test_what_cannot_be_read_is_typed_and_not_shown(spark: SparkSession, server: SchemaRegistry) -> None:
    frame = values(spark, old(1), b"SENTINEL")
    with pytest.raises(Exception) as raised:
        frame.select(from_registry("value", server.url, schema=OLD)).collect()
    typed = typed_error(raised.value)
    assert isinstance(typed, InvalidData)
    assert "row 1 of a batch" in str(typed)
    assert "SENTINEL" not in str(raised.value)
    kept = frame.select(from_registry("value", server.url, schema=OLD, on_error="null", name="o"))
    assert [row.o and row.o.id for row in kept.collect()] == [1, None]


def test_a_registry_that_refuses_ends_the_run_also_where_bad_records_are_null(
    spark: SparkSession, server: SchemaRegistry
) -> None:
    server.login = ("ann", "word")
    frame = values(spark, old(1)).select(from_registry("value", server.url, schema=OLD, on_error="null"))
    with pytest.raises(Exception) as raised:
        frame.collect()
    assert isinstance(typed_error(raised.value), StoreRefused)


JSON_BAD = {
    "no frame": b'{"id": 1}',
    "nothing": b"",
    "head": b"\0\0\0\0\1",
    "null": b"\0\0\0\0\1null",
    "a list": b"\0\0\0\0\1[]",
    "half": b'\0\0\0\0\1{"id": 1',
    "another type": b'\0\0\0\0\1{"id": "SENTINEL"}',
}


def test_json_is_read_behind_the_five_bytes_and_asks_nobody(spark: SparkSession) -> None:
    given = [b'\0\0\0\0\1{"id": 3, "more": 1}', None, *JSON_BAD.values()]
    column = from_registry("value", format="json", schema="id INT, name STRING", on_error="null", name="o")
    found = [row.o and tuple(row.o) for row in values(spark, *given).select(column).collect()]
    assert found == [(3, None), None, *[None] * len(JSON_BAD)]


@pytest.mark.parametrize("value", JSON_BAD.values(), ids=JSON_BAD)
def test_json_that_is_none_ends_the_epoch_and_is_not_shown(spark: SparkSession, value: bytes) -> None:
    """Also for a reader of one of its fields."""
    column = from_registry("value", format="json", schema="id INT, name STRING", name="o")
    with pytest.raises(Exception) as raised:
        values(spark, value).select(column).select("o.name").collect()
    typed = typed_error(raised.value)
    assert isinstance(typed, InvalidData)
    assert "SENTINEL" not in str(typed)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"url": None, "schema": OLD}, "url is missing"),
        ({}, "give schema or subject"),
        ({"schema": OLD, "subject": "a"}, "give schema or subject"),
        ({"schema": 5}, "schema must be Avro's"),
        ({"schema": "id INT"}, "no Avro schema"),
        ({"schema": OLD, "format": "protobuf"}, "format must be"),
        ({"schema": OLD, "on_error": "skip"}, "on_error must be"),
        ({"subject": "unknown"}, "the subject unknown is not known"),
        ({"schema": "id INT", "format": "json"}, "JSON needs no registry; leave url out"),
        ({"url": None, "format": "json"}, "names no column"),
        ({"url": None, "format": "json", "schema": "id INT", "user_env": "A"}, "leave user_env out"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    spark: SparkSession, server: SchemaRegistry, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        from_registry("value", **{"url": server.url, **how})


# --- the job of docs/avro.md ---------------------------------------------------------------------------------------

IN_KAFKA = 'sources.kafka("orders", bootstrap_servers=context.options["kafka"], starting="earliest")'
IN_FILES = 'context.options["records"]'
RECORDS = "topic STRING, partition INT, offset LONG, value BINARY"


def job_of_page(root: Path, url: str) -> StreamingJob:
    """The page's job as it stands there, on files instead of a topic."""
    code = (ROOT / "docs" / "avro.md").read_text().split("```python\n")[1].split("```")[0]
    assert IN_KAFKA in code

    def records(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(RECORDS).option("maxFilesPerTrigger", 1).parquet(str(root / "in"))

    names: dict[str, Any] = {}
    exec(compile(code.replace(IN_KAFKA, IN_FILES), "avro.md", "exec"), names)
    settings = JobSettings(parallelism=2, local_dir=str(root / "local"))
    options: dict[str, Any] = {"registry": url, "records": records}
    job: StreamingJob = names["build"](JobContext("avro", str(root / "store"), options, settings=settings))
    return job


def write(root: Path, number: int, given: list[bytes]) -> None:
    (root / "in").mkdir(exist_ok=True)
    columns = {
        "topic": pa.array(["orders"] * len(given)),
        "partition": pa.array([0] * len(given), pa.int32()),
        "offset": pa.array(range(len(given)), pa.int64()),
        "value": pa.array(given, pa.binary()),
    }
    pq.write_table(pa.table(columns), root / "in" / f"{number}.parquet")


def test_the_job_of_the_page_totals_the_records_of_two_writers_and_sets_others_aside(
    spark: SparkSession, server: SchemaRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry asks for a password, which is in no file of the job."""
    server.login = ("ann", "SENTINEL-7f1e")
    # Of Python workers; a driver that is started with the variables gives them its own.
    monkeypatch.setitem(spark.sparkContext.environment, "REGISTRY_USER", "ann")
    monkeypatch.setitem(spark.sparkContext.environment, "REGISTRY_PASSWORD", "SENTINEL-7f1e")
    wanted: dict[tuple[str, str], Decimal] = {}
    for file in range(3):
        numbers = range(file * 20, file * 20 + 20)
        given = [new(n) if n % 3 else old(n) for n in numbers]
        for n in numbers:
            key = (f"s{n % 3}", f"c{n % 2}" if n % 3 else "counter")
            wanted[key] = wanted.get(key, Decimal(0)) + Decimal(n) / 4
        write(tmp_path, file, [*given, b"damaged", framed(9, OLD, {"id": 1, "shop": "x", "amount": Decimal(1)})])
        job_of_page(tmp_path, server.url).run(spark, trigger={"availableNow": True})
    totals: dict[tuple[str, str], Decimal] = {}
    for path in (tmp_path / "store" / "totals").rglob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            key = (row["shop"], row["channel"])
            totals[key] = max(totals.get(key, Decimal(0)), row["sales"])
    assert totals == wanted
    bad = [row for path in (tmp_path / "store" / "bad").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert len(bad) == 6
    assert {row["reason"] for row in bad} == {"an_order"}
    assert all(row["value"] is not None for row in bad)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"SENTINEL-7f1e" not in path.read_bytes(), path
