"""The as-of join in whole jobs: each order with the rate of its time, however the files of both came; held against a Spark batch query."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from tests.job_settings import job_settings

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}
ORDERS, RATES = "id long, currency string, at timestamp", "code string, rate double, since timestamp"
DELAY = "2 minutes"
SECOND_US = 1_000_000


def write_file(folder: Path, number: int, columns: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{number}"
    pq.write_table(pa.table(columns), temporary)
    # Spark takes files in the order of their times.
    os.utime(temporary, ns=((1_700_000_000 + number) * 1_000_000_000,) * 2)
    temporary.rename(folder / f"{number:03}.parquet")


def write_input(root: Path, files: range, behind_s: int = 60) -> None:
    """Two minutes a file, in any order within a file and with the one before; some currencies have no rates, some rates come
    twice for one time, some keys and times are null."""
    for number in files:
        drawn = np.random.default_rng(number)

        def times(count: int, drawn: Any = drawn, number: int = number) -> pa.Array:
            seconds = number * 120 + drawn.integers(-behind_s, 120, count)
            return pa.array(
                (1_700_000_000 + seconds) * SECOND_US, pa.timestamp("us", "UTC"), mask=drawn.random(count) < 0.05
            )

        codes = np.array(["EUR", "USD", "JPY", "CHF", None])
        write_file(
            root / "orders",
            number,
            {"id": np.arange(50) + 50 * number, "currency": codes[drawn.integers(0, 5, 50)], "at": times(50)},
        )
        write_file(
            root / "rates",
            number,
            {"code": codes[:3][drawn.integers(0, 3, 20)], "rate": drawn.random(20).round(6), "since": times(20)},
        )


def rated(root: Path, how: str = "left", tolerance: str | None = None, **given: Any) -> StreamingJob:
    settings = job_settings(**{"parallelism": 3, "local_dir": str(root / "local"), **given})
    job = StreamingJob("rated", store=str(root / "store"), settings=settings)

    def read(name: str, schema: str, time: str) -> Any:
        def stream(spark: SparkSession) -> DataFrame:
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / name))
            return frame.withWatermark(time, DELAY)

        return stream

    orders = job.read(read("orders", ORDERS, "at"), name="orders").key_by("currency")
    rates = job.read(read("rates", RATES, "since"), name="rates").key_by("code")
    joined = orders.as_of_join(rates, uid="rated", how=how, tolerance=tolerance)
    joined.write(ParquetSink(str(root / "out")), name="out")
    window = windows.tumbling("1 minute")
    counted = joined.window(
        window, uid="per-minute", output_mode="append", n=aggregates.count(), rate=aggregates.sum("rate")
    )
    counted.write(ParquetSink(str(root / "windows")), name="windows")
    return job


def found(spark: SparkSession, root: Path, name: str, *columns: str) -> Counter[tuple[Any, ...]]:
    return Counter(map(tuple, spark.read.parquet(str(root / name)).selectExpr(*columns).collect()))


def expected(spark: SparkSession, root: Path, how: str, tolerance: str | None) -> DataFrame:
    """By id, with the rate, of the orders that the watermark has passed at the end."""
    orders = spark.read.schema(ORDERS).parquet(str(root / "orders"))
    rates = spark.read.schema(RATES).parquet(str(root / "rates")).where("since IS NOT NULL")
    # Of several rates of one time the last one of the input counts.
    rates = rates.selectExpr("*", "monotonically_increasing_id() AS place")
    last = rates.groupBy("code", "since").agg({"place": "max"}).withColumnRenamed("max(place)", "place")
    rates = rates.join(last, ["code", "since", "place"]).drop("place")
    near = "" if tolerance is None else f"AND since >= at - INTERVAL {tolerance}"
    orders.createOrReplaceTempView("orders_given")
    rates.createOrReplaceTempView("rates_given")
    ends = spark.sql(
        f"SELECT least((SELECT max(at) FROM orders_given), (SELECT max(since) FROM rates_given)) - INTERVAL {DELAY} AS e"
    ).first()
    assert ends is not None
    joined = spark.sql(
        f"""SELECT o.id, o.at, o.currency, max_by(r.rate, r.since) AS rate FROM orders_given o LEFT JOIN rates_given r
        ON o.currency = r.code AND r.since <= o.at {near} GROUP BY o.id, o.at, o.currency"""
    )
    # What can have no rate does not wait.
    passed = joined.where(f"at IS NULL OR currency IS NULL OR at <= TIMESTAMP '{ends.e}'")
    return passed if how == "left" else passed.where("rate IS NOT NULL")


@pytest.mark.parametrize(
    ("how", "tolerance"), [("left", None), pytest.param("inner", "90 seconds", marks=pytest.mark.long)]
)
def test_each_order_has_the_rate_of_its_time(
    spark: SparkSession, tmp_path: Path, how: str, tolerance: str | None
) -> None:
    """Over a restart with other shards and without local copies; its time is the time of what follows, and nothing of it is late."""
    late: list[int] = []

    def seen(progress: Progress) -> None:
        late.append(progress.late_rows)

    write_input(tmp_path, range(4))
    rated(tmp_path, how, tolerance).run(spark, trigger=ONCE, on_progress=seen)
    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path, range(4, 8))
    rated(tmp_path, how, tolerance, parallelism=2).run(spark, trigger=ONCE, on_progress=seen)
    wanted = expected(spark, tmp_path, how, tolerance)
    assert found(spark, tmp_path, "out", "id", "at", "rate") == Counter(
        map(tuple, wanted.select("id", "at", "rate").collect())
    )
    assert sum(late) == 0
    minutes = found(spark, tmp_path, "windows", "window.start", "n", "round(rate, 4)")
    assert minutes
    sums = wanted.selectExpr("window(at, '1 minute') AS w", "rate").groupBy("w").agg({"*": "count", "rate": "sum"})
    complete = Counter(map(tuple, sums.selectExpr("w.start", "`count(1)`", "round(`sum(rate)`, 4)").collect()))
    assert not minutes - complete, "a window that is closed has all of its rows"


def test_a_join_that_has_another_tolerance_is_not_taken_for_the_old_one(spark: SparkSession, tmp_path: Path) -> None:
    """State would lack the versions that the longer one asks for."""
    write_input(tmp_path, range(2))
    rated(tmp_path, tolerance="1 minute").run(spark, trigger=ONCE)
    with pytest.raises(InvalidPipeline, match="at most 60000000 µs before"):
        rated(tmp_path, tolerance="1 hour").run(spark, trigger=ONCE)


def test_what_an_as_of_join_needs_is_said(spark: SparkSession, tmp_path: Path) -> None:
    job = StreamingJob("refused", store=str(tmp_path / "store"))
    keyed = job.read(lambda spark: spark.readStream.schema(ORDERS).parquet(str(tmp_path))).key_by("currency")
    rates = lambda spark: spark.readStream.schema(RATES).parquet(str(tmp_path))  # noqa: E731
    with pytest.raises(InvalidPipeline, match="must be left or inner"):
        keyed.as_of_join(rates, uid="rated", how="full")
    with pytest.raises(InvalidPipeline, match="tolerance='-1 day' must not be negative"):
        keyed.as_of_join(rates, uid="rated", tolerance="-1 day")
    keyed.as_of_join(rates, uid="rated", right_keys=["code"]).write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(InvalidPipeline, match="the left stream of the join has no event time"):
        job.run(spark, trigger=ONCE)
