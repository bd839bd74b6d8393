"""Two streams that share one processor: rows of both with equal keys meet in its state, whichever comes first."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime import (
    ConnectedBatch,
    ParquetSink,
    Progress,
    StreamingJob,
    TimedState,
    VectorizedProcessor,
    aggregates,
)
from state_runtime.base.errors import InvalidPipeline, UserCodeError
from tests.job_settings import job_settings

from .test_as_of_join import ORDERS, RATES, found, write_input

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}


class Known(VectorizedProcessor):
    """Counts both inputs of a key; passes an order if its currency has had a rate until this batch, and sets it aside if not."""

    def states(self) -> dict[str, str]:
        return {"seen": "orders long, rates long, newest double"}

    def process(self, batch: ConnectedBatch) -> Iterator[Any]:
        orders, rates = batch.input("orders"), batch.input("rates")
        _, before = batch.state("seen")
        counts = {
            "orders": before["orders"].fill_null(0).to_numpy() + orders.sizes,
            "rates": before["rates"].fill_null(0).to_numpy() + rates.sizes,
        }
        newest = rates.reduce(np.maximum, rates.rows["rate"].to_numpy(), -1.0)
        newest = np.maximum(newest, before["newest"].fill_null(-1.0).to_numpy())
        batch.update("seen", {**counts, "newest": newest})
        is_known = orders.per_row(counts["rates"] > 0)
        yield {
            "": pa.table({"id": orders.rows["id"], "newest": orders.per_row(newest)}).filter(pa.array(is_known)),
            "unknown": orders.rows.filter(pa.array(~is_known)),
            "counts": pa.table({"currency": batch.keys["currency"], **counts}),
        }


def connected(
    root: Path, processor: VectorizedProcessor, schema: str, outputs: dict[str, str], **given: Any
) -> StreamingJob:
    """Orders and rates; the second read of the orders is another step's, so that the two are no lone pair of sources."""
    settings = job_settings(**{"parallelism": 3, "local_dir": str(root / "local"), **given})
    job = StreamingJob("connected", store=str(root / "store"), settings=settings)

    def read(name: str, schema: str, time: str) -> Any:
        def stream(spark: SparkSession) -> DataFrame:
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / name))
            return frame.withWatermark(time, "1 second")

        return stream

    orders = job.read(read("orders", ORDERS, "at"), name="orders")
    rates = job.read(read("rates", RATES, "since"), name="rates")
    made = job.connect(orders=orders.key_by("currency"), rates=rates.key_by("code")).process(
        processor, schema, uid="connected", outputs=outputs
    )
    made.write(ParquetSink(str(root / "out")), name="out")
    for name in (*outputs, *(("late_left", "late_right") if processor.time_mode == "event" else ())):
        made.output(name).write(ParquetSink(str(root / name)), name=name)
    orders.key_by("currency").aggregate(uid="n", n=aggregates.count()).write(ParquetSink(str(root / "n")), name="n")
    return job


def test_rows_of_both_inputs_meet_by_key_over_a_restart_with_other_shards(spark: SparkSession, tmp_path: Path) -> None:
    outputs = {
        "unknown": "id long, currency string, at timestamp",
        "counts": "currency string, orders long, rates long",
    }
    write_input(tmp_path, range(3))
    connected(tmp_path, Known(), "id long, newest double", outputs).run(spark, trigger=ONCE)
    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path, range(3, 6))
    connected(tmp_path, Known(), "id long, newest double", outputs, parallelism=2).run(spark, trigger=ONCE)
    orders = spark.read.schema(ORDERS).parquet(str(tmp_path / "orders"))
    rates = spark.read.schema(RATES).parquet(str(tmp_path / "rates"))
    passed, aside = (found(spark, tmp_path, name, "id") for name in ("out", "unknown"))
    assert passed + aside == Counter((row.id,) for row in orders.collect())
    codes = {row.code for row in rates.collect()}
    known = Counter((row.id,) for row in orders.collect() if row.currency in codes)
    assert passed == known, "each file of orders comes with one of rates that has all codes"
    kept = spark.read.parquet(str(tmp_path / "counts"))
    last = kept.groupBy("currency").agg({"orders": "max", "rates": "max"}).collect()
    given = {name: Counter(row[0] for row in frame.select(key).collect()) for name, frame, key in
             (("orders", orders, "currency"), ("rates", rates, "code"))}  # fmt: skip
    assert {row.currency: (row["max(orders)"], row["max(rates)"]) for row in last} == {
        key: (given["orders"][key], given["rates"][key]) for key in given["orders"]
    }
    assert spark.read.parquet(str(tmp_path / "unknown")).select("id", "currency", "at").exceptAll(orders).count() == 0


class Silence(VectorizedProcessor):
    """Tells the keys for which nothing came from either input for a second after a row."""

    time_mode = "event"

    def states(self) -> dict[str, TimedState]:
        return {"until": TimedState("until long", due=True)}

    def process(self, batch: ConnectedBatch) -> Any:
        micros = [batch.input(name).rows[time].cast("int64").fill_null(0).to_numpy() for name, time in
                  (("orders", "at"), ("rates", "since"))]  # fmt: skip
        until = np.maximum(
            batch.input("orders").reduce(np.maximum, micros[0], 0), batch.input("rates").reduce(np.maximum, micros[1], 0)
        ) // 1000 + 1_000  # fmt: skip
        _, before = batch.state("until")
        until = np.maximum(until, before["until"].fill_null(0).to_numpy())
        batch.update("until", {"until": until}, due=until)
        return pa.table({"id": batch.input("orders").rows["id"], "until": batch.input("orders").per_row(until)})

    def process_due(self, name: str, batch: ConnectedBatch) -> Any:
        assert batch.input("orders").rows.num_rows == 0
        none = pa.nulls(batch.num_keys, pa.int64())
        return pa.table({"id": none, "until": batch.state(name).values["until"]})


def test_late_rows_of_either_input_are_dropped_and_given_by_side(spark: SparkSession, tmp_path: Path) -> None:
    """By the lower of both watermarks; what is due comes without rows, too."""
    write_input(tmp_path, range(5), behind_s=400)
    late: list[int] = []

    def seen(progress: Progress) -> None:
        late.append(progress.late_rows)

    connected(tmp_path, Silence(), "id long, until long", {}).run(spark, trigger=ONCE, on_progress=seen)
    orders = spark.read.schema(ORDERS).parquet(str(tmp_path / "orders"))
    rates = spark.read.schema(RATES).parquet(str(tmp_path / "rates"))
    left = spark.read.parquet(str(tmp_path / "late_left")).select("id", "currency", "at")
    right = spark.read.parquet(str(tmp_path / "late_right")).select("code", "rate", "since")
    assert left.exceptAll(orders).count() == right.exceptAll(rates).count() == 0
    assert left.count() + right.count() == sum(late) > 0
    assert left.count() > 0 < right.count()
    passed = found(spark, tmp_path, "out", "id")
    due = passed.pop((None,))
    assert due > 0
    assert passed + Counter((row.id,) for row in left.collect()) == Counter((row.id,) for row in orders.collect())


class Rows(Known):
    def process(self, batch: Any) -> Any:
        return batch.rows


def test_what_connected_streams_cannot_be_asked_for_is_said(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path, range(1))
    with pytest.raises((UserCodeError, InvalidPipeline), match=r"read the rows of one, as in batch.input\('orders'\)"):
        connected(tmp_path, Rows(), "id long", {}).run(spark, trigger=ONCE)
    job = StreamingJob("refused", store=str(tmp_path / "store"))
    orders, rates = (
        job.read(
            lambda spark, schema=schema, name=name: spark.readStream.schema(schema).parquet(str(tmp_path / name)),
            name=name,
        )  # type: ignore[misc]
        for name, schema in (("orders", ORDERS), ("rates", RATES))
    )
    with pytest.raises(InvalidPipeline, match=r"connect\(\) takes two streams by name, and got 1"):
        job.connect(orders=orders.key_by("id"))
    with pytest.raises(InvalidPipeline, match=r"connect\(\): rates must be a stream with key_by"):
        job.connect(orders=orders.key_by("id"), rates=rates)  # type: ignore[arg-type]
    both = job.connect(orders=orders.key_by("id"), rates=rates.key_by("code"))
    both.process(Known(), "id long, newest double", uid="both").write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(InvalidPipeline, match="key 'id' has type int64, its counterpart 'code' string; cast one"):
        job.run(spark, trigger=ONCE)
