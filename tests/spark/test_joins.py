"""Joins anywhere in a job: behind operators, of branches, several in a row, with event time behind them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import ParquetSink, StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.job import Stream
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from tests.job_settings import job_settings

from ..refusal import everything_refused
from .branches import SCHEMA, found, write_input
from .test_branches import jobs_of

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}
DELAY_S, UPPER_S = 10, 60
BACK = "id AS order_id, amount AS back, at + INTERVAL 20 SECONDS AS back_at"
COLUMNS = ("id", "amount", "at", "back", "back_at")


def read(spark: SparkSession, root: Path, name: str, sql: str, time: str) -> DataFrame:
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / name))
    return frame.selectExpr(*sql.split(", ")).withWatermark(time, f"{DELAY_S} seconds")


def paid_back(
    root: Path, how: str = "inner", names: Sequence[str] = ("orders", "refunds"), **given: Any
) -> StreamingJob:
    """Orders, each once, with what was paid back for them; counted by window, and joined with themselves once more."""
    settings = job_settings(**{"parallelism": 3, "local_dir": str(root / "local"), **given})
    job = StreamingJob("paid", store=str(root / "store"), settings=settings)
    reads = {
        "orders": lambda spark: read(spark, root, "orders", "id, amount, at", "at"),
        "refunds": lambda spark: read(spark, root, "refunds", BACK, "back_at"),
    }
    streams = {name: job.read(reads[name], name=name) for name in names}
    once = streams["orders"].key_by("id", "amount", "at").deduplicate(uid="once")
    large = streams["refunds"].transform(lambda df: df.where("back >= 20"))
    joined = once.key_by("id").interval_join(
        large.key_by("order_id"), lower="-30 seconds", upper=f"{UPPER_S} seconds", uid="joined", how=how, event_time="left"
    )  # fmt: skip
    joined.write(ParquetSink(str(root / "joined")), name="joined")
    counted = joined.window(
        windows.tumbling("30 seconds"), uid="windows", output_mode="append", n=aggregates.count(), back=aggregates.sum("back")
    )  # fmt: skip
    counted.write(ParquetSink(str(root / "windows")), name="windows")
    same_amount(joined, once).write(ParquetSink(str(root / "twice")), name="twice")
    return job


def same_amount(joined: Stream, once: Stream) -> Stream:
    """A second join, behind the first one and of a stream that has been read by it."""
    other = once.transform(lambda df: df.selectExpr("amount AS same", "id AS other_id", "at AS other_at"))
    return joined.key_by("amount").interval_join(
        other.key_by("same"), lower="0 seconds", upper="5 seconds", uid="twice", event_time="right"
    )


def expected(spark: SparkSession, root: Path, how: str) -> DataFrame:
    orders = spark.read.schema(SCHEMA).parquet(str(root / "orders")).select("id", "amount", "at").distinct()
    refunds = spark.read.schema(SCHEMA).parquet(str(root / "refunds")).selectExpr(*BACK.split(", ")).where("back >= 20")
    near = F.expr(f"back_at BETWEEN at - INTERVAL 30 SECONDS AND at + INTERVAL {UPPER_S} SECONDS")
    return orders.join(refunds, (orders.id == refunds.order_id) & near, "left" if how != "inner" else "inner")


def watermark_s(spark: SparkSession, root: Path) -> int:
    """Of both sources at their end."""
    times = [
        spark.read.schema(SCHEMA)
        .parquet(str(root / name))
        .selectExpr(f"unix_timestamp(max(at)) + {ahead} AS s")
        .first()
        for name, ahead in (("orders", 0), ("refunds", 20))
    ]
    return min(int(row.s) for row in times if row is not None) - DELAY_S


def check(spark: SparkSession, root: Path, how: str) -> None:
    """Rows without a partner have come if no partner can come any more; windows if no row of theirs can."""
    now_s = watermark_s(spark, root)
    rows = expected(spark, root, how)
    came = rows.where(f"back IS NOT NULL OR unix_timestamp(at) + {UPPER_S} <= {now_s}")
    assert came.where("back IS NULL").count() > 0 or how == "inner"
    assert found(spark, root, "joined", *COLUMNS) == Counter(map(tuple, came.select(*COLUMNS).collect()))
    over = rows.groupBy(F.window("at", "30 seconds")).agg(F.count("*").alias("n"), F.sum("back").alias("back"))
    over = over.where(f"unix_timestamp(window.end) <= {now_s - UPPER_S}").selectExpr("window.end", "n", "back")
    assert over.count() > 5
    assert found(spark, root, "windows", "window.end", "n", "back") == Counter(map(tuple, over.collect()))
    orders = spark.read.schema(SCHEMA).parquet(str(root / "orders")).select("id", "amount", "at").distinct()
    other = orders.selectExpr("amount AS same", "id AS other_id", "at AS other_at")
    twice = came.join(other, F.expr("amount = same AND other_at BETWEEN at AND at + INTERVAL 5 SECONDS"))
    columns = ("id", "back_at", "other_id", "other_at")
    assert found(spark, root, "twice", *columns) == Counter(map(tuple, twice.select(*columns).collect()))


@pytest.mark.parametrize("how", ["left-outer", pytest.param("inner", marks=pytest.mark.long)])
def test_joins_behind_operators_and_joins_give_what_a_batch_query_gives(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    """Over runs of other parallelism, with sources in another order and without local copies; one Spark job an epoch."""
    for name in ("orders", "refunds"):
        write_input(tmp_path / name, files=3)
    since, jobs = jobs_of(spark), list[int]()
    paid_back(tmp_path, how).run(spark, trigger=ONCE, on_progress=lambda progress: jobs.append(since()))
    assert set(jobs[1:]) == {1}
    for name in ("orders", "refunds"):
        write_input(tmp_path / name, files=2, first=3)
    shutil.rmtree(tmp_path / "local")
    paid_back(tmp_path, how, ("refunds", "orders"), parallelism=2).run(spark, trigger=ONCE)
    check(spark, tmp_path, how)


def test_right_full_and_semi_joins_give_what_a_batch_query_gives(spark: SparkSession, tmp_path: Path) -> None:
    """In steps: each kind over the same streams, over a rescale without local copies; windows by the time of the right
    side."""
    kinds = {"right": "right", "full": "", "semi": "left"}

    def job(parallelism: int) -> StreamingJob:
        settings = job_settings(parallelism=parallelism, local_dir=str(tmp_path / "local"))
        made = StreamingJob("kinds", store=str(tmp_path / "store"), settings=settings)
        orders = made.read(lambda spark: read(spark, tmp_path, "orders", "id, amount, at", "at"), name="orders")
        refunds = made.read(lambda spark: read(spark, tmp_path, "refunds", BACK, "back_at"), name="refunds")
        large = refunds.transform(lambda df: df.where("back % 3 > 0")).key_by("order_id")
        range_ = {"lower": "-30 seconds", "upper": f"{UPPER_S} seconds"}
        for how, time in kinds.items():
            joined = orders.transform(lambda df: df.where("amount % 4 > 0")).key_by("id").interval_join(
                large, uid=how, how=how, event_time=time, **range_
            )  # fmt: skip
            joined.write(ParquetSink(str(tmp_path / how)), name=how)
            if how == "right":
                by_window = joined.window(
                    windows.tumbling("30 seconds"), uid="windows", output_mode="append", n=aggregates.count()
                )
                by_window.write(ParquetSink(str(tmp_path / "windows")), name="windows")
        return made

    for first, parallelism in ((0, 3), (3, 2)):
        for name in ("orders", "refunds"):
            write_input(tmp_path / name, files=3, first=first)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        job(parallelism).run(spark, trigger=ONCE)
    now_s = watermark_s(spark, tmp_path)
    orders = (
        spark.read.schema(SCHEMA).parquet(str(tmp_path / "orders")).where("amount % 4 > 0").select("id", "amount", "at")
    )
    refunds = spark.read.schema(SCHEMA).parquet(str(tmp_path / "refunds")).selectExpr(*BACK.split(", "))
    near = F.expr(f"id = order_id AND back_at BETWEEN at - INTERVAL 30 SECONDS AND at + INTERVAL {UPPER_S} SECONDS")
    for how in kinds:
        rows = orders.join(refunds.where("back % 3 > 0"), near, how)
        if how != "semi":
            rows = rows.withColumn("id", F.expr("coalesce(id, order_id)"))
            gone = f"at IS NULL AND unix_timestamp(back_at) + 30 <= {now_s} OR back_at IS NULL AND unix_timestamp(at) + {UPPER_S} <= {now_s}"  # fmt: skip
            came = rows.where(f"at IS NOT NULL AND back_at IS NOT NULL OR {gone}")
            assert came.where("at IS NULL").count() > 0
        else:
            came = rows
        columns = COLUMNS if how != "semi" else ("id", "amount", "at")
        assert found(spark, tmp_path, how, *columns) == Counter(map(tuple, came.select(*columns).collect()))
        if how == "right":
            over = rows.groupBy(F.window("back_at", "30 seconds")).agg(F.count("*").alias("n"))
            over = over.where(f"unix_timestamp(window.end) <= {now_s - 30}").selectExpr("window.end", "n")
            assert over.count() > 3
            assert found(spark, tmp_path, "windows", "window.end", "n") == Counter(map(tuple, over.collect()))


def test_windows_that_are_equal_are_joined(spark: SparkSession, tmp_path: Path) -> None:
    """The window is a key, and its time lies in a range of nothing; what comes behind is in time."""
    for name in ("orders", "refunds"):
        write_input(tmp_path / name, files=4)
    settings = job_settings(parallelism=3, local_dir=str(tmp_path / "local"))
    job = StreamingJob("windows", store=str(tmp_path / "store"), settings=settings)

    def counted(name: str, sql: str, time: str, value: str) -> Stream:
        rows = job.read(lambda spark: read(spark, tmp_path, name, sql, time), name=name)
        per_window = rows.transform(lambda df: df.selectExpr(f"{time} AS at", f"{value} AS v"))
        found = per_window.window(
            windows.tumbling("30 seconds"),
            uid=name,
            output_mode="append",
            n=aggregates.count(),
            total=aggregates.sum("v"),
        )
        return found.transform(
            lambda df: df.selectExpr(
                f"window.start AS {name}_start", f"window_time(window) AS {name}_at", f"total AS {name}"
            )
        )

    orders = counted("orders", "id, amount, at", "at", "amount")
    refunds = counted("refunds", BACK, "back_at", "back")
    both = orders.key_by("orders_start").interval_join(
        refunds.key_by("refunds_start"), lower="0 seconds", upper="0 seconds", uid="both", event_time="left"
    )
    both.write(ParquetSink(str(tmp_path / "both")), name="both")
    last = both.window(windows.tumbling("2 minutes"), uid="last", output_mode="append", most=aggregates.max("orders"))
    last.write(ParquetSink(str(tmp_path / "last")), name="last")
    job.run(spark, trigger=ONCE)

    def totals(name: str, sql: str, time: str, value: str) -> DataFrame:
        rows = spark.read.schema(SCHEMA).parquet(str(tmp_path / name)).selectExpr(*sql.split(", "))
        made = rows.groupBy(F.window(time, "30 seconds")).agg(F.sum(value).alias(name))
        return made.selectExpr(f"window.start AS {name}_start", "window.end AS end", name)

    now_s = watermark_s(spark, tmp_path)
    left = totals("orders", "id, amount, at", "at", "amount")
    right = totals("refunds", BACK, "back_at", "back").drop("end")
    wanted = left.join(right, left.orders_start == right.refunds_start).where(f"unix_timestamp(end) <= {now_s}")
    columns = ("orders_start", "orders", "refunds")
    assert found(spark, tmp_path, "both", *columns) == Counter(map(tuple, wanted.select(*columns).collect()))
    over = wanted.groupBy(F.window("orders_start", "2 minutes")).agg(F.max("orders").alias("most"))
    over = over.where(f"unix_timestamp(window.end) <= {now_s}").selectExpr("window.end", "most")
    assert over.count() > 1
    assert found(spark, tmp_path, "last", "window.end", "most") == Counter(map(tuple, over.collect()))


@pytest.mark.usefixtures("untried")
def test_joins_by_public_ways_alone_give_the_same(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("orders", "refunds"):
        write_input(tmp_path / name, files=4)
    with everything_refused():
        paid_back(tmp_path).run(spark, trigger=ONCE)
    check(spark, tmp_path, "inner")


def test_a_join_of_two_sources_goes_on_when_a_step_comes_between_or_another_source(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where only the join reads the two they are one stream to Spark; the positions are the same ones."""
    for name in ("orders", "refunds"):
        write_input(tmp_path / name, files=2)

    def job(kind: str) -> StreamingJob:
        settings = job_settings(parallelism=2, local_dir=str(tmp_path / "local"))
        made = StreamingJob("sides", store=str(tmp_path / "store"), settings=settings)
        orders = made.read(lambda spark: read(spark, tmp_path, "orders", "id, amount, at", "at"))
        if kind != "alone":
            orders = orders.transform(lambda df: df.select("id", "amount", "at"))
        joined = orders.key_by("id").interval_join(
            lambda spark: read(spark, tmp_path, "refunds", BACK, "back_at"),
            right_keys=["order_id"], lower="-30 seconds", upper=f"{UPPER_S} seconds", uid="joined",
        )  # fmt: skip
        if kind == "beside another source":
            made.read(lambda spark: read(spark, tmp_path, "more", "id, at", "at"), name="more").write(
                ParquetSink(str(tmp_path / "more-out")), name="more"
            )
        joined.write(ParquetSink(str(tmp_path / "joined")), name="joined")
        return made

    for number, kind in enumerate(("alone", "behind a step", "alone", "beside another source")):
        for name in ("orders", "refunds", *(["more"] if kind == "beside another source" else [])):
            write_input(tmp_path / name, files=2 if number == 0 else 1, first=number + 1 if number else 0)
        job(kind).run(spark, trigger=ONCE)
    manifest = Catalog(open_store(str(tmp_path / "store")), "sides").latest()
    assert manifest is not None
    assert manifest.source is not None
    assert manifest.source.names == ("", "joined.right", "more")
    assert "output columns are expected" not in caplog.text, "Spark would say so of each batch"
    orders = spark.read.schema(SCHEMA).parquet(str(tmp_path / "orders")).select("id", "amount", "at")
    refunds = spark.read.schema(SCHEMA).parquet(str(tmp_path / "refunds")).selectExpr(*BACK.split(", "))
    near = F.expr(f"back_at BETWEEN at - INTERVAL 30 SECONDS AND at + INTERVAL {UPPER_S} SECONDS")
    rows = orders.join(refunds, (orders.id == refunds.order_id) & near)
    assert found(spark, tmp_path, "joined", *COLUMNS) == Counter(map(tuple, rows.select(*COLUMNS).collect()))


@pytest.mark.parametrize("is_seen_by_spark", [False, True])
def test_a_side_that_is_idle_holds_back_no_join_that_alone_reads_it(
    spark: SparkSession, tmp_path: Path, is_seen_by_spark: bool
) -> None:
    """Also if Spark alone sees its event times, because a filter stands behind its watermark."""
    write_input(tmp_path / "orders", files=3)
    (tmp_path / "refunds").mkdir()
    settings = job_settings(parallelism=2, local_dir=str(tmp_path / "local"))
    job = StreamingJob("idle", store=str(tmp_path / "store"), settings=settings)

    def orders_of(session: SparkSession) -> DataFrame:
        rows = read(session, tmp_path, "orders", "id, amount, at", "at")
        return rows.where("at > TIMESTAMP '2000-01-01'") if is_seen_by_spark else rows

    orders = job.read(orders_of, name="orders")
    refunds = job.read(
        lambda session: read(session, tmp_path, "refunds", BACK, "back_at"), name="refunds", idle_after="1 millisecond"
    )
    joined = orders.key_by("id").interval_join(
        refunds.key_by("order_id"), lower="0 seconds", upper="5 seconds", uid="j", how="left", event_time="left"
    )
    joined.window(windows.tumbling("30 seconds"), uid="w", output_mode="append", n=aggregates.count()).write(
        ParquetSink(str(tmp_path / "out"))
    )
    job.run(spark, trigger=ONCE)
    manifest = Catalog(open_store(str(tmp_path / "store")), "idle").latest()
    assert manifest is not None
    assert manifest.time is not None
    last = (
        spark.read.schema(SCHEMA).parquet(str(tmp_path / "orders")).selectExpr("unix_timestamp(max(at)) AS s").first()
    )
    assert last is not None
    assert manifest.time.watermark_of("j") == (last.s - DELAY_S) * 1000
    assert manifest.time.watermark_of("w") == (last.s - DELAY_S - 5) * 1000
    assert spark.read.parquet(str(tmp_path / "out")).count() > 8


def test_what_cannot_be_joined_is_refused_with_its_line(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "orders", files=1)
    job, other = (StreamingJob(name, store=str(tmp_path / "store")) for name in ("one", "other"))
    rows = job.read(lambda session: read(session, tmp_path, "orders", "id, amount, at", "at"))
    range_ = {"lower": "0 seconds", "upper": "5 seconds", "uid": "j"}
    with pytest.raises(InvalidPipeline, match="one of another job"):
        rows.key_by("id").interval_join(other.read(lambda session: session.range(1)).key_by("id"), **range_)
    with pytest.raises(InvalidPipeline, match="leave out right_keys"):
        rows.key_by("id").interval_join(rows.key_by("id"), right_keys=["id"], **range_)
    with pytest.raises(InvalidPipeline, match="event_time='right' of a left-outer join must be left"):
        rows.key_by("id").interval_join(rows, how="left", event_time="right", **range_)
    timeless = rows.key_by("id").aggregate(uid="n", n=aggregates.count())
    rows.key_by("id").interval_join(timeless.key_by("id"), **range_).write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(
        InvalidPipeline, match=r"the right stream of the join has no event time.*test_joins\.py, line \d+"
    ):
        job.run(spark, trigger=ONCE)
