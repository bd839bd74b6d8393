"""The first rows of each key, whole, in folders by value: against Spark's own window function and its own reader."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import JobSettings, ParquetSink, StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline

pytestmark = pytest.mark.spark

SCHEMA = "town string, bidder bigint, price bigint"
TOWNS = ["Köln", "a/b c", "x=1%", None, "007", "मुंबई", "กรุงเทพ", "e\u0301", "São 🙂", "a\u00a0b\u2028c", "[x]{y}?*'\"\\"]


def write_files(folder: Path, first: int, count: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(first, first + count):
        draw = random.Random(number)
        rows = [
            {"town": draw.choice(TOWNS), "bidder": 1000 * number + n, "price": draw.randrange(1 << 40)}
            for n in range(300)
        ]
        table = pa.Table.from_pylist(
            rows, schema=pa.schema([("town", pa.string()), ("bidder", pa.int64()), ("price", pa.int64())])
        )
        pq.write_table(table, folder / f"{number:05d}.parquet")


def job_in(root: Path, parallelism: int, partition_by: list[str]) -> StreamingJob:
    settings = JobSettings(local_dir=str(root / "local"), parallelism=parallelism)
    job = StreamingJob("job", store=str(root / "store"), settings=settings)
    (
        job.read(lambda s: s.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "in")))
        .transform(lambda rows: rows.selectExpr("town", "price", "struct(bidder, price) AS bid"))
        .key_by("town")
        .aggregate(
            uid="top",
            top=aggregates.top_n("bid", 5, by="price"),
            cheap=aggregates.bottom_n("price", 2).where("price % 2 = 0"),
        )
        .write(ParquetSink(str(root / "out"), partition_by=partition_by))
    )
    return job


def test_the_top_of_each_key_is_that_of_row_number_and_its_folder_is_read_by_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Over a restart with another parallelism."""
    for first, parallelism in ((0, 3), (3, 2)):
        write_files(tmp_path / "in", first, 3)
        job_in(tmp_path, parallelism, ["town"]).run(spark, trigger={"availableNow": True})
        shutil.rmtree(tmp_path / "local")
    spark.read.schema(SCHEMA).parquet(str(tmp_path / "in")).createOrReplaceTempView("input")
    spark.read.schema(
        "top array<struct<bidder bigint, price bigint>>, cheap array<bigint>, epoch bigint, town string"
    ).parquet(str(tmp_path / "out")).createOrReplaceTempView("output")
    ours = spark.sql(
        "SELECT newest.* FROM (SELECT town, max_by(struct(top, cheap), epoch) AS newest FROM output GROUP BY town) "
        "ORDER BY town"
    ).collect()
    expected = spark.sql(
        """
        SELECT collect_list(CASE WHEN high <= 5 THEN struct(bidder, price) END) AS top,
               slice(sort_array(collect_list(CASE WHEN price % 2 = 0 THEN price END)), 1, 2) AS cheap
        FROM (SELECT *, row_number() OVER (PARTITION BY town ORDER BY price DESC) AS high FROM input)
        GROUP BY town ORDER BY town
        """
    ).collect()
    assert [row.cheap for row in ours] == [row.cheap for row in expected]
    assert [row.top for row in ours] == [sorted(row.top, key=lambda bid: -bid.price) for row in expected]
    towns = {row.town for row in spark.sql("SELECT DISTINCT town FROM output").collect()}
    assert towns == set(TOWNS), "read by Spark as they were written"
    before = sorted((tmp_path / "store").rglob("*"))
    with pytest.raises(InvalidPipeline, match="partitioned by town, and the new ones by no column"):
        job_in(tmp_path, 2, []).run(spark, trigger={"availableNow": True})
    assert sorted((tmp_path / "store").rglob("*")) == before, "refused before another run is fenced"


def test_what_cannot_name_a_folder_stops_the_job_before_it_starts(spark: SparkSession, tmp_path: Path) -> None:
    """The schema is known when the job is built."""
    write_files(tmp_path / "in", 0, 1)
    with pytest.raises(InvalidPipeline, match=r"sink .*'cheap' of type list"):
        job_in(tmp_path, 2, ["cheap"]).run(spark, trigger={"availableNow": True})
    assert not (tmp_path / "out").exists()


def test_two_tables_in_one_folder_stop_the_job_before_it_starts(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would read the columns of one of them, whichever it finds first."""
    write_files(tmp_path / "in", 0, 1)
    out = str(tmp_path / "out")
    job = StreamingJob("job", store=str(tmp_path / "store"))
    (
        job.read(lambda s: s.readStream.schema(SCHEMA).parquet(str(tmp_path / "in")))
        .write(ParquetSink(out), name="all")
        .key_by("town")
        .aggregate(uid="n", n=aggregates.count())
        .write(ParquetSink(f"{out}/"), name="counts")
    )
    with pytest.raises(InvalidPipeline, match="the sinks 'all' and 'counts' both write to"):
        job.run(spark, trigger={"availableNow": True})
    assert not (tmp_path / "store/job").exists()


@pytest.mark.parametrize("kind", ["sliding", "session"])
def test_the_top_of_each_window_is_that_of_row_number(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Panes and parts of sessions meet in any order; rows come out of order of their event time."""
    inbox = tmp_path / "in"
    inbox.mkdir()
    for number in range(3):
        draw = random.Random(number)
        rows = [
            {"town": draw.choice(TOWNS), "at": 60_000_000 * draw.randrange(400), "price": 1000 * n + number}
            for n in range(200)
        ]
        schema = pa.schema([("town", pa.string()), ("at", pa.timestamp("us", "UTC")), ("price", pa.int64())])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), inbox / f"{number:05d}.parquet")
    schema_sql = "town string, at timestamp, price bigint"
    job = StreamingJob(
        "job", store=str(tmp_path / "store"), settings=JobSettings(local_dir=str(tmp_path / "local"), parallelism=2)
    )
    (
        job.read(
            lambda s: (
                s.readStream.schema(schema_sql)
                .option("maxFilesPerTrigger", 1)
                .parquet(str(inbox))
                .withWatermark("at", "10 hours")
            )
        )
        .key_by("town")
        .window(
            windows.sliding("20 minutes", "10 minutes") if kind == "sliding" else windows.session("10 minutes"),
            uid="top",
            top=aggregates.top_n("price", 3),
        )
        .write(ParquetSink(str(tmp_path / "out")))
    )
    job.run(spark, trigger={"availableNow": True})
    spark.read.schema(schema_sql).parquet(str(inbox)).createOrReplaceTempView("input")
    spark.read.parquet(str(tmp_path / "out")).createOrReplaceTempView("output")
    function = "window(at, '20 minutes', '10 minutes')" if kind == "sliding" else "session_window(at, '10 minutes')"
    expected = spark.sql(
        f"""
        SELECT town, {function} AS window, slice(reverse(sort_array(collect_list(price))), 1, 3) AS top
        FROM input GROUP BY town, {function} ORDER BY town, window.start
        """
    ).collect()
    # A session that grew has other bounds: what was emitted of its parts is not among the newest of its end.
    ours = spark.sql(
        "SELECT town, window, max_by(top, epoch) AS top FROM output GROUP BY town, window ORDER BY town, window.start"
    ).collect()
    assert [row for row in expected if row not in ours] == []
    assert len(ours) >= len(expected) > 20
    if kind == "sliding":
        assert ours == expected
