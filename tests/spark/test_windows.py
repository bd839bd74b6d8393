"""Windows and aggregate functions against Spark: the same rows, in a batch query and through the operators."""

from __future__ import annotations

import datetime as dt
import math
import os
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import aggregates, windows
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.spark.arrow import spark_schema_of
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.reader import StateReader
from state_runtime.state.version import OpenVersion

pytestmark = pytest.mark.spark

KEYS = pa.schema([("name", pa.string())])
SCHEMA = pa.schema(
    [
        *KEYS,
        ("at", pa.timestamp("us", "UTC")),
        ("i", pa.int32()),
        ("l", pa.int64()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("m", pa.decimal128(20, 3)),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("day", pa.date32()),
        ("place", pa.int64()),
        ("ends", pa.timestamp("us", "UTC")),
    ]
)
ROWS = 2_000


def odd_rows(seed: int = 3) -> pa.Table:
    """Nulls, NaN, both zeros, infinity in a key of its own, times before 1970, at borders, and equal ones."""
    draw = random.Random(seed)
    floats = (0.0, -0.0, 1.5, -2.25, 1e9, 1e-9, math.nan)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.15 else value

    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for place in range(ROWS):
        name = maybe(f"n{draw.randrange(12)}")
        second = draw.choice([draw.randrange(-120, 400), 10 * draw.randrange(-12, 40)])
        at = maybe(second * 1_000_000 + draw.choice([0, 0, 1, -1, draw.randrange(1_000_000)]))
        columns["name"].append(name)
        columns["at"].append(at)
        columns["i"].append(maybe(draw.randrange(-(1 << 31), 1 << 31)))
        columns["l"].append(maybe(draw.randrange(-(1 << 52), 1 << 52)))
        columns["f"].append(maybe(draw.choice([0.5, -1.25, 3.0, math.inf if name == "n1" else 7.0])))
        columns["d"].append(maybe(draw.choice(floats) if name == "n2" else draw.uniform(-5, 5)))
        columns["m"].append(maybe(Decimal(draw.randrange(-(10**15), 10**15)).scaleb(-3)))
        columns["s"].append(maybe(draw.choice(["", "a", "B", "ä", "\U0001f600", f"v{draw.randrange(900)}"])))
        columns["b"].append(maybe(draw.random() < 0.4))
        columns["day"].append(maybe(dt.date(1969, 1, 1) + dt.timedelta(days=draw.randrange(900))))
        columns["place"].append(place)
        gap_s = {None: 9, True: 4, False: -1}[columns["b"][-1]]
        columns["ends"].append(None if at is None else at + gap_s * 1_000_000)
    return pa.table({name: pa.array(values, SCHEMA.field(name).type) for name, values in columns.items()})


# Ours, and Spark's in SQL. Spark's `first` follows no order, so the comparison asks for the value at the first place.
FUNCTIONS: dict[str, tuple[Aggregate, str]] = {
    "rows": (aggregates.count(), "count(*)"),
    "count_i": (aggregates.count("i"), "count(i)"),
    "sum_i": (aggregates.sum("i"), "sum(i)"),
    "sum_l": (aggregates.sum("l"), "sum(l)"),
    "sum_f": (aggregates.sum("f"), "sum(f)"),
    "sum_d": (aggregates.sum("d"), "sum(d)"),
    "sum_m": (aggregates.sum("m"), "sum(m)"),
    "min_i": (aggregates.min("i"), "min(i)"),
    "max_l": (aggregates.max("l"), "max(l)"),
    "min_f": (aggregates.min("f"), "min(f)"),
    "min_d": (aggregates.min("d"), "min(d)"),
    "max_d": (aggregates.max("d"), "max(d)"),
    "max_m": (aggregates.max("m"), "max(m)"),
    "min_s": (aggregates.min("s"), "min(s)"),
    "max_s": (aggregates.max("s"), "max(s)"),
    "min_b": (aggregates.min("b"), "min(b)"),
    "min_day": (aggregates.min("day"), "min(day)"),
    "max_at": (aggregates.max("at"), "max(at)"),
    "avg_i": (aggregates.avg("i"), "avg(i)"),
    "avg_f": (aggregates.avg("f"), "avg(f)"),
    "any_b": (aggregates.any("b"), "any(b)"),
    "every_b": (aggregates.every("b"), "every(b)"),
    "variance_d": (aggregates.variance("d"), "variance(d)"),
    "variance_pop_l": (aggregates.variance_pop("l"), "var_pop(l)"),
    "stddev_f": (aggregates.stddev("f"), "stddev(f)"),
    "stddev_pop_i": (aggregates.stddev_pop("i"), "stddev_pop(i)"),
    "kinds_s": (aggregates.count_distinct_approx("s"), "approx_count_distinct(s)"),
    "kinds_d": (aggregates.count_distinct_approx("d", 0.2), "approx_count_distinct(d, 0.2)"),
    "kinds_m": (aggregates.count_distinct_approx("m", 0.01), "approx_count_distinct(m, 0.01)"),
    "kinds_f": (aggregates.count_distinct_approx("f", 0.39), "approx_count_distinct(f, 0.39)"),
    "first_s": (aggregates.first("s"), "min_by(s, place)"),
    "first_i": (aggregates.first("i", ignore_nulls=True), "min_by(i, place) FILTER (WHERE i IS NOT NULL)"),
    "last_s": (aggregates.last("s", ignore_nulls=True), "max_by(s, place) FILTER (WHERE s IS NOT NULL)"),
    "last_m": (aggregates.last("m"), "max_by(m, place)"),
    "different_s": (aggregates.count_distinct("s"), "count(DISTINCT s)"),
    "different_d": (aggregates.count_distinct("d"), "count(DISTINCT d)"),
    "different_m": (aggregates.count_distinct("m"), "count(DISTINCT m)"),
    "different_b": (aggregates.count_distinct("b"), "count(DISTINCT b)"),
    "set_s": (aggregates.collect_set("s"), "sort_array(collect_set(s))"),
    "set_day": (aggregates.collect_set("day"), "sort_array(collect_set(day))"),
    # Spark breaks ties as it likes, so the comparison orders by the place, too.
    "max_by_d": (aggregates.max_by("s", "d"), "max_by(s, struct(d, place)) FILTER (WHERE d IS NOT NULL)"),
    "max_by_b": (aggregates.max_by("m", "b"), "max_by(m, struct(b, place)) FILTER (WHERE b IS NOT NULL)"),
    "max_by_s": (aggregates.max_by("at", "s"), "max_by(at, struct(s, place)) FILTER (WHERE s IS NOT NULL)"),
    "min_by_d": (aggregates.min_by("i", "d"), "min_by(i, struct(d, -place)) FILTER (WHERE d IS NOT NULL)"),
    "min_by_m": (aggregates.min_by("s", "m"), "min_by(s, struct(m, -place)) FILTER (WHERE m IS NOT NULL)"),
    "min_by_day": (aggregates.min_by("day", "day"), "min_by(day, struct(day, -place)) FILTER (WHERE day IS NOT NULL)"),
    "collect_i": (
        aggregates.collect("i"),
        "transform(array_sort(collect_list(struct(place, i)) FILTER (WHERE i IS NOT NULL)), x -> x.i)",
    ),
}
WINDOWS = {
    "tumbling": (windows.tumbling("10 seconds"), "window(at, '10 seconds')"),
    "offset": (windows.tumbling("1 minute", "-7 seconds"), "window(at, '1 minute', '1 minute', '-7 seconds')"),
    "sliding": (windows.sliding("20 seconds", "5 seconds"), "window(at, '20 seconds', '5 seconds')"),
    "uneven": (
        windows.sliding("10 seconds", "4 seconds", "1.5 seconds"),
        "window(at, '10 seconds', '4 seconds', '1.5 seconds')",
    ),
    "session": (windows.session("4 seconds"), "session_window(at, '4 seconds')"),
    "session of own ends": (
        windows.session(end_column="ends"),
        "session_window(at, CASE WHEN b IS NULL THEN '9 seconds' WHEN b THEN '4 seconds' ELSE '-1 second' END)",
    ),
}


@pytest.fixture(scope="module")
def odd(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, DataFrame]:
    table = odd_rows()
    folder = tmp_path_factory.mktemp("odd")
    pq.write_table(table, folder / "rows.parquet")
    frame = spark.read.parquet(str(folder))
    frame.createOrReplaceTempView("odd")
    return table, frame


@pytest.fixture
def in_utc(spark: SparkSession) -> Iterator[SparkSession]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", str(before))


class Driven:
    """A window operator over epochs, its state in memory."""

    def __init__(self, window: Any, wanted: dict[str, Aggregate], mode: Any) -> None:
        self.operator = plan_windows(
            uid="op",
            key_columns=("name",),
            key_ddl="name string",
            key_schema=KEYS,
            schema=SCHEMA,
            time_column="at",
            window=window,
            aggregates=wanted,
            mode=mode,
            ddl=lambda schema: spark_schema_of(schema).simpleString(),
        )
        schemas = self.operator.state_schemas
        empty = {name: schema.empty() for name, schema in schemas.items()}
        self.reader: StateReader = OpenVersion.of_batches("v", empty, schemas, 0)
        self.snapshot = 0
        self.late = 0

    def epoch(self, rows: pa.Table, watermark_ms: int = 0, late_ms: int = 0) -> list[dict[str, Any]]:
        self.snapshot += 1
        batch = rows.combine_chunks().to_batches()[0] if rows.num_rows else pa.RecordBatch.from_pylist([], SCHEMA)
        hashes = hash_rows([batch.column(0)])
        grouped = group_rows(batch, hashes, batch.column("place").to_numpy(), ["name"], KEYS)
        clock = EpochClock(0, watermark_ms, late_ms, self.snapshot)
        result = self.operator.process([RowSlice(grouped)], self.reader, clock, 0)
        emitted = [row for produced in result.outputs for row in plain_rows(pa.table(produced))]
        self.reader = self.reader.overlaid(result.changes)
        self.late += result.late_rows
        return emitted


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with the window's ends as numbers."""
    rows = table.drop_columns(["window"]).to_pylist()
    window = table.column("window").combine_chunks()
    window = window if isinstance(window, pa.StructArray) else pa.concat_arrays(window.chunks)
    for number, ends in enumerate(("start", "end")):
        for row, at in zip(rows, window.field(number).cast(pa.int64()).to_pylist(), strict=True):
            row[ends] = at
    return rows


def by_window(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Of each window the last row."""
    return {(row["name"], row["start"], row["end"]): row for row in rows}


def same(found: Any, expected: Any) -> bool:
    """Equal, floats nearly so."""
    if isinstance(found, float) and isinstance(expected, float):
        if math.isnan(found) or math.isnan(expected):
            return math.isnan(found) and math.isnan(expected)
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return bool(found == expected)


def compare(found: dict[Any, dict[str, Any]], expected: dict[Any, dict[str, Any]]) -> None:
    assert set(found) == set(expected)
    for window, row in expected.items():
        for name, value in row.items():
            assert same(found[window][name], value), f"{name} of {window}: {found[window][name]!r}, Spark has {value!r}"


ALWAYS_OPEN, ALWAYS_CLOSED = -(1 << 45), 1 << 45


def spark_columns(name: str) -> list[str]:
    """Columns of Spark's queries over windows of a name: with a DISTINCT, Spark would keep a sketch of all other functions
    for each value of a window, and take ten times as long."""
    columns = [f"{text} AS {column}" for column, (_, text) in FUNCTIONS.items()]
    if "session" in name:
        # Several DISTINCT in one query over sessions are wrong in Spark 4.3: two booleans are counted as five values. And
        # collect_set of 4.1 takes each NaN for a value of its own.
        as_set = r"CAST(size(array_distinct(collect_list(\1))) AS BIGINT)"
        return [re.sub(r"count\(DISTINCT (\w+)\)", as_set, ", ".join(columns))]
    return [", ".join(c for c in columns if ("DISTINCT" in c) is distinct) for distinct in (False, True)]


@pytest.mark.parametrize("name", list(WINDOWS))
def test_windows_over_epochs_equal_a_spark_batch(in_utc: SparkSession, odd: Any, name: str) -> None:
    """Every function on odd data; the rows come in five epochs, and each window is emitted once at the end."""
    table, _ = odd
    window, sql = WINDOWS[name]
    expected: dict[Any, dict[str, Any]] = {}
    types: dict[str, str] = {}
    for columns in spark_columns(name):
        frame = in_utc.sql(f"SELECT name, {sql} AS window, {columns} FROM odd GROUP BY name, {sql}")
        for key, row in by_window(plain_rows(frame.toArrow())).items():
            expected.setdefault(key, {}).update(row)
        types |= {field.name: field.dataType.simpleString() for field in frame.schema}
    wanted = {column: function for column, (function, _) in FUNCTIONS.items()}
    append = Driven(window, wanted, "append")
    update = Driven(window, wanted, "update")
    updated: dict[Any, dict[str, Any]] = {}
    for start in range(0, ROWS, ROWS // 5):
        some = table.slice(start, ROWS // 5)
        assert append.epoch(some, ALWAYS_OPEN, ALWAYS_OPEN) == []
        updated |= by_window(update.epoch(some, ALWAYS_OPEN, ALWAYS_OPEN))
    compare(by_window(append.epoch(table.slice(0, 0), ALWAYS_CLOSED, ALWAYS_OPEN)), expected)
    # Sessions that were emitted and then grew stay in the output of update mode.
    compare({key: updated[key] for key in expected} if "session" in name else updated, expected)
    ours = spark_schema_of(append.operator.output_schema)
    assert {field.name: field.dataType.simpleString() for field in ours} == types


STREAMED = {"rows": aggregates.count(), "total": aggregates.sum("l"), "least": aggregates.min("s")}
STREAMED_SQL = ("count(*) AS rows", "sum(l) AS total", "min(s) AS least")
FILES = 8


def write_stream(folder: Path) -> list[pa.Table]:
    """Files that move on in time, with rows that come up to a minute late; one file has no new time at all."""
    draw = random.Random(11)
    tables = []
    for number in range(FILES):
        now = 15 * (number if number != 4 else 0) - 20
        rows = [
            {
                "name": f"n{draw.randrange(4)}",
                "at": None if draw.random() < 0.05 else (now - draw.choice([0, 1, 2, 5, 10, 60])) * 1_000_000 + draw.choice([0, 1]),
                "l": draw.randrange(100),
                "s": draw.choice(["a", "b", None]),
                "place": number * 100 + i,
            }
            for i in range(40)
        ]  # fmt: skip
        table = pa.table({n: pa.array([r.get(n) for r in rows], SCHEMA.field(n).type) for n in SCHEMA.names})
        tables.append(table)
        pq.write_table(table, folder / f".{number}")
        os.utime(folder / f".{number}", (1_700_000_000 + number,) * 2)
        (folder / f".{number}").rename(folder / f"{number}.parquet")
    return tables


@pytest.mark.parametrize(
    ("name", "mode"),
    [("tumbling", "append"), ("tumbling", "update"), ("uneven", "append"), ("uneven", "update"), ("session", "append")],
)
def test_every_batch_of_a_spark_stream_emits_what_our_epoch_does(
    in_utc: SparkSession, tmp_path: Path, name: str, mode: str
) -> None:
    """Watermark, late rows and closing, batch by batch, from the first batch with times before 1970 to the last."""
    (tmp_path / "in").mkdir()
    tables = write_stream(tmp_path / "in")
    window, sql = WINDOWS[name]
    schema = "name string, at timestamp, l long, s string, place long"
    stream = in_utc.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    grouped = stream.withWatermark("at", "5 seconds").groupBy("name", F.expr(sql).alias("window"))
    frame = grouped.agg(*(F.expr(text) for text in STREAMED_SQL))
    batches: dict[int, dict[Any, dict[str, Any]]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        batches[number] = by_window(plain_rows(batch.toArrow()))

    query = (
        frame.writeStream.outputMode(mode)
        .foreachBatch(keep)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert len(batches) == FILES + 1, "the last one has no rows: the watermark moved"
    driven = Driven(window, STREAMED, mode)
    watermark = late = highest = 0
    for number in range(FILES + 1):
        rows = tables[number] if number < FILES else tables[0].slice(0, 0)
        compare(by_window(driven.epoch(rows, watermark, late)), batches[number])
        times = [t for t in rows.column("at").cast(pa.int64()).to_pylist() if t is not None]
        highest = max([highest, *(t // 1000 for t in times)])
        late, watermark = watermark, max(watermark, highest - 5_000)
    assert driven.late > 0
    assert any(batches.values())
