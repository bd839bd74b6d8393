"""Side outputs: what an operator drops as late, and what user code sets aside, goes where the job sends it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import ParquetSink, Progress, StreamingJob, VectorizedProcessor, aggregates, windows
from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.base.settings import JobSettings
from state_runtime.job import Stream
from tests.job_settings import job_settings

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}
SCHEMA = "id long, shop string, at timestamp, paid long"
MINUTE_US = 60_000_000
ROWS = 60
FAR_US = 10_000 * MINUTE_US


def write_input(folder: Path, files: range) -> None:
    """Write rows of which each file has some that are an hour behind the file before; the last one of all closes
    everything."""
    folder.mkdir(exist_ok=True)
    for number in files:
        drawn = np.random.default_rng(number)
        ids = np.arange(ROWS) + number * ROWS
        at = number * 30 * MINUTE_US + drawn.integers(0, 30 * MINUTE_US, ROWS)
        at[::4] -= 60 * MINUTE_US
        at = np.maximum(at, 0) + 1000 * MINUTE_US
        at[-1] += FAR_US if number == 5 else 0
        columns = {
            "id": ids,
            "shop": [f"s{n % 7}" for n in ids],
            "at": pa.array(at, pa.timestamp("us", "UTC")),
            "paid": drawn.integers(1, 100, ROWS),
        }
        temporary = folder / f".{number}"
        pq.write_table(pa.table(columns), temporary)
        # Spark takes files in the order of their times.
        os.utime(temporary, ns=((1_700_000_000 + number) * 1_000_000_000,) * 2)
        temporary.rename(folder / f"{number:03}.parquet")


def read(spark: SparkSession, tmp_path: Path) -> DataFrame:
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    return stream.withWatermark("at", "5 minutes")


class Ids(StatefulProcessor):
    """Gives the id of each row that it gets."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        from pyspark.sql import Row

        ids = [row.id for row in rows]
        self.seen.update((len(ids),))
        return iter([Row(ids=ids)])

    def close(self) -> None:
        pass


OPERATORS = ("tumbling", "sliding", "session", "append", "once", "own")
AS_THEY_CAME = "id long, shop string, at timestamp, paid long"


def build(tmp_path: Path, **settings: Any) -> StreamingJob:
    """Each kind of operator that drops late rows, with a sink for them."""
    chosen = job_settings(**{"local_dir": str(tmp_path / "local"), "parallelism": 3, **settings})
    job = StreamingJob("late", store=str(tmp_path / "store"), settings=chosen)
    rows = job.read(lambda spark: read(spark, tmp_path))
    ids = aggregates.collect("id", limit=1000)
    by_shop = rows.key_by("shop")
    made: dict[str, Stream] = {
        "tumbling": by_shop.window(windows.tumbling("10 minutes"), uid="tumbling", ids=ids),
        "sliding": by_shop.window(
            windows.sliding("10 minutes", "3 minutes"), uid="sliding", output_mode="append", ids=ids
        ),
        "session": by_shop.window(windows.session("2 minutes"), uid="session", ids=ids),
        "append": rows.key_by("shop", "at").aggregate(uid="append", output_mode="append", ids=ids.where("paid > 0")),
        "once": rows.key_by("id").deduplicate(uid="once"),
        "own": by_shop.transform_with_state(Ids(), "ids array<long>", uid="own", time_mode="eventTime"),
    }
    for name, stream in made.items():
        stream.write(ParquetSink(str(tmp_path / name)), name=name)
        stream.output("late").write(ParquetSink(str(tmp_path / f"late-{name}")), name=f"late-{name}")
    return job


def ids_in(spark: SparkSession, folder: Path) -> list[int]:
    frame = spark.read.parquet(str(folder))
    column = "id" if "id" in frame.columns else "explode(ids) AS id"
    return sorted(row.id for row in frame.selectExpr(column).collect())


@pytest.mark.parametrize("mode", ["aligned", pytest.param("unaligned", marks=pytest.mark.long)])
def test_a_row_is_either_processed_or_late_and_late_rows_come_as_they_were(
    spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    """Over a restart with other shards, in plain epochs and with rows in flight."""
    write_input(tmp_path / "in", range(3))
    late: list[int] = []

    def seen(progress: Progress) -> None:
        late.append(progress.late_rows)

    build(tmp_path, checkpoint_mode=mode).run(spark, trigger=ONCE, on_progress=seen)
    write_input(tmp_path / "in", range(3, 6))
    build(tmp_path, checkpoint_mode=mode, parallelism=2).run(spark, trigger=ONCE, on_progress=seen)
    given = spark.read.parquet(str(tmp_path / "in"))
    last = ROWS * 6 - 1  # closes everything, and is itself in what stays open
    counted = 0
    for name in OPERATORS:
        processed, dropped = ids_in(spark, tmp_path / name), ids_in(spark, tmp_path / f"late-{name}")
        assert dropped, name
        assert len(set(dropped)) == len(dropped)
        assert not set(processed) & set(dropped), name
        assert {*processed, *dropped, last} == set(range(ROWS * 6)), name
        as_they_came = spark.read.parquet(str(tmp_path / f"late-{name}")).select("id", "shop", "at", "paid")
        assert as_they_came.exceptAll(given).count() == 0
        counted += len(dropped) if name != "sliding" else 0
    pairs = sum(late) - counted  # a row counts for each of its windows
    assert pairs >= len(ids_in(spark, tmp_path / "late-sliding"))


def test_late_rows_come_as_they_were_though_spark_aggregates_the_others(spark: SparkSession, tmp_path: Path) -> None:
    """Behind an aggregation before the shuffle there would be no rows to give."""
    write_input(tmp_path / "in", range(3))
    settings = job_settings(local_dir=str(tmp_path / "local"), parallelism=2, partial_aggregation="on")
    job = StreamingJob("summed", store=str(tmp_path / "store"), settings=settings)
    by_shop = job.read(lambda spark: read(spark, tmp_path)).key_by("shop")
    summed = by_shop.window(windows.tumbling("10 minutes"), uid="summed", paid=aggregates.sum("paid"))
    for name in ("late", "again"):
        summed.output("late").write(ParquetSink(str(tmp_path / name)), name=name)
    late: list[int] = []
    job.run(spark, trigger=ONCE, on_progress=lambda progress: late.append(progress.late_rows))
    given = spark.read.parquet(str(tmp_path / "in"))
    for name in ("late", "again"):
        found = spark.read.parquet(str(tmp_path / name)).select("id", "shop", "at", "paid")
        assert found.exceptAll(given).count() == 0
        assert found.count() == sum(late) > 0


class Check(VectorizedProcessor):
    """Passes what is paid for once; sets aside what is paid for again, and tells when a shop is new."""

    def states(self) -> dict[str, str]:
        return {"seen": "n long"}

    def process(self, batch: Any) -> Iterator[Any]:
        found, before = batch.state("seen")
        batch.update("seen", {"n": before["n"].fill_null(0).to_numpy() + batch.sizes})
        is_odd = pc.equal(pc.bit_wise_and(batch.rows["id"], 1), 1)
        yield {"": batch.rows.filter(pc.invert(is_odd)), "odd": pa.Table.from_batches([batch.rows.filter(is_odd)])}
        yield {"new": pa.table({"shop": batch.keys["shop"].filter(pa.array(~found))}), "odd": None}


def checked(tmp_path: Path, processor: VectorizedProcessor | None = None) -> Stream:
    settings = JobSettings(local_dir=str(tmp_path / "local"), parallelism=2)
    job = StreamingJob("checked", store=str(tmp_path / "store"), settings=settings)
    by_shop = job.read(lambda spark: read(spark, tmp_path)).key_by("shop")
    made = by_shop.process(
        processor or Check(),
        "id long, paid long",
        uid="check",
        outputs={"odd": "id int, shop string", "new": "shop string"},
    )
    made._job = job  # type: ignore[attr-defined]
    return made


def test_outputs_that_user_code_declares_go_to_steps_and_sinks_of_their_own(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_input(tmp_path / "in", range(2))
    stream = checked(tmp_path)
    stream.write(ParquetSink(str(tmp_path / "even")))
    odd = stream.output("odd")
    odd.transform(lambda df: df.where("id % 3 = 0")).write(ParquetSink(str(tmp_path / "odd")))
    odd.key_by("shop").aggregate(uid="per-shop", n=aggregates.count()).write(ParquetSink(str(tmp_path / "per-shop")))
    stream.output("new").write(ParquetSink(str(tmp_path / "new")))
    stream._job.run(spark, trigger=ONCE)  # type: ignore[attr-defined]
    given = spark.read.parquet(str(tmp_path / "in"))
    even, wanted = (spark.read.parquet(str(tmp_path / "even")).select("id", "paid"), given.where("id % 2 = 0"))
    assert sorted(even.collect()) == sorted(wanted.select("id", "paid").collect())
    assert ids_in(spark, tmp_path / "odd") == [n for n in range(2 * ROWS) if n % 2 and n % 3 == 0]
    shops = spark.read.parquet(str(tmp_path / "new")).select("shop").collect()
    assert sorted(row.shop for row in shops) == [f"s{n}" for n in range(7)]
    counts = spark.read.parquet(str(tmp_path / "per-shop")).groupBy("shop").max("n").collect()
    assert sum(row["max(n)"] for row in counts) == ROWS


class Undeclared(Check):
    def process(self, batch: Any) -> Iterator[Any]:
        yield {"others": batch.rows}


def test_rows_for_an_output_that_is_not_declared_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", range(1))
    stream = checked(tmp_path, Undeclared())
    stream.write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(InvalidData, match=r"output 'others'; it has the main output '' and 'odd', 'new'\. Declare it"):
        stream._job.run(spark, trigger=ONCE)  # type: ignore[attr-defined]


def test_late_rows_of_a_join_come_by_side(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", range(6))
    settings = JobSettings(local_dir=str(tmp_path / "local"), parallelism=2)
    job = StreamingJob("joined", store=str(tmp_path / "store"), settings=settings)

    def right(spark: SparkSession) -> DataFrame:
        return read(spark, tmp_path).selectExpr("id AS other", "shop AS store", "at AS seen")

    joined = (
        job.read(lambda spark: read(spark, tmp_path))
        .key_by("shop")
        .interval_join(right, right_keys=("store",), uid="pairs", lower="-1 minute", upper="1 minute")
    )
    joined.write(ParquetSink(str(tmp_path / "out")))
    for side in ("late_left", "late_right"):
        joined.output(side).write(ParquetSink(str(tmp_path / side)), name=side)
    late: list[int] = []
    job.run(spark, trigger=ONCE, on_progress=lambda progress: late.append(progress.late_rows))
    given = spark.read.parquet(str(tmp_path / "in"))
    left = spark.read.parquet(str(tmp_path / "late_left")).select("id", "shop", "at", "paid")
    others = spark.read.parquet(str(tmp_path / "late_right")).select("other", "store", "seen")
    assert left.exceptAll(given).count() == 0
    assert others.exceptAll(given.selectExpr("id", "shop", "at")).count() == 0
    assert left.count() + others.count() == sum(late) > 0


def test_an_output_that_is_not_there_is_refused_with_those_that_are(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", range(1))

    def refused(name: str, match: str, *, by_time: bool = False) -> None:
        settings = JobSettings(local_dir=str(tmp_path / "local"))
        job = StreamingJob("refused", store=str(tmp_path / "store"), settings=settings)
        by_shop = job.read(lambda spark: read(spark, tmp_path)).key_by("shop")
        window = windows.tumbling("1 hour")
        counted = (
            by_shop.window(window, uid="n", n=aggregates.count())
            if by_time
            else by_shop.aggregate(uid="n", n=aggregates.count())
        )
        counted.output(name).write(ParquetSink(str(tmp_path / "out")))
        with pytest.raises(InvalidPipeline, match=match):
            job.run(spark, trigger=ONCE)

    refused("late", "it has its main output only: it drops no late rows, since it does not go by event time")
    refused("early", "operator 'n' has no output 'early'; it has 'late'", by_time=True)
    job = StreamingJob("refused", store=str(tmp_path / "store"))
    with pytest.raises(InvalidPipeline, match="is read of the stream of the step that has it"):
        job.read(lambda spark: read(spark, tmp_path)).output("late")
    assert not (tmp_path / "out").exists()
