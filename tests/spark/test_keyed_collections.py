"""Lists and maps of a vectorised processor in a whole job: kept over a restart with other shards, and read as any other state."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import KeyedBatch, ListOf, MapOf, ParquetSink, StreamingJob, VectorizedProcessor
from state_runtime.reading.snapshot import open_snapshot_for_reading
from tests.job_settings import job_settings

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}
ROWS = 80


def write_input(folder: Path, files: range) -> list[tuple[str, str, float]]:
    folder.mkdir(exist_ok=True)
    given = []
    for number in files:
        drawn = np.random.default_rng(number)
        columns = {
            "shop": [f"s{n}" for n in drawn.integers(0, 5, ROWS)],
            "sku": [f"a{n}" for n in drawn.integers(0, 9, ROWS)],
            "price": [float(n) for n in drawn.integers(1, 100, ROWS)],
        }
        pq.write_table(pa.table(columns), folder / f".{number}")
        (folder / f".{number}").rename(folder / f"{number:03}.parquet")
        given += list(zip(*columns.values(), strict=True))
    return given


class Prices(VectorizedProcessor):
    def states(self) -> dict[str, Any]:
        return {"newest": MapOf("sku string", "price double"), "history": ListOf("sku string, price double")}

    def process(self, batch: KeyedBatch) -> pa.Table:
        rows, of = batch.rows, batch.key_of_row
        newest = batch.map_state("newest")
        _, before = newest.get(rows.select(["sku"]), of)
        newest.put(rows.select(["sku"]), rows.select(["price"]), of)
        batch.list_state("history").append(rows.select(["sku", "price"]), of)
        change = pc.subtract(rows["price"], before["price"])
        return pa.table({"shop": rows["shop"], "sku": rows["sku"], "change": change})


def build(root: Path, parallelism: int, backend: str) -> StreamingJob:
    settings = job_settings(local_dir=str(root / "local"), parallelism=parallelism, backend=backend)
    job = StreamingJob("prices", store=str(root / "store"), settings=settings)
    rows = job.read(
        lambda spark: spark.readStream.schema("shop string, sku string, price double").parquet(str(root / "in"))
    )
    made = rows.key_by("shop").process(Prices(), "shop string, sku string, change double", uid="prices")
    made.write(ParquetSink(str(root / "out")))
    return job


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_lists_and_maps_go_on_with_other_shards_and_are_read_as_any_state(
    spark: SparkSession, tmp_path: Path, backend: str
) -> None:
    given = write_input(tmp_path / "in", range(1))
    build(tmp_path, 3, backend).run(spark, trigger=ONCE)
    before = {(shop, sku): price for shop, sku, price in given}
    shutil.rmtree(tmp_path / "local")
    more = write_input(tmp_path / "in", range(1, 2))
    build(tmp_path, 2, backend).run(spark, trigger=ONCE)
    rows = (
        spark.read.parquet(str(tmp_path / "out")).where("change IS NOT NULL").select("shop", "sku", "change").collect()
    )
    expected = Counter((shop, sku, price - before[shop, sku]) for shop, sku, price in more if (shop, sku) in before)
    assert Counter(map(tuple, rows)) == expected
    snapshot = open_snapshot_for_reading(str(tmp_path / "store" / "prices"))
    newest = {(shop, sku): price for shop, sku, price in [*given, *more]}
    read = snapshot.state("prices", "newest").to_arrow().to_pylist()
    assert {(row["shop"], row["sku"]): row["price"] for row in read} == newest
    history: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for row in sorted(
        snapshot.state("prices", "history").to_arrow().to_pylist(), key=lambda row: (row["shop"], row["position"])
    ):
        history[row["shop"]].append((row["sku"], row["price"]))
    wanted: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for shop, sku, price in [*given, *more]:
        wanted[shop].append((sku, price))
    assert history == wanted
