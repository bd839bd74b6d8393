"""Plain queries in output mode complete: the whole table in each batch, in the query's order, as Spark gives it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import ParquetSink, StreamingJob, aggregates, foreach_epoch, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.job import Stream
from state_runtime.pipeline.sinks import read_staged
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.manifest import StagedFile, StagedOutput
from tests.job_settings import job_settings

from .plain_queries import ONCE, Batches, Query, by_sql, stream, write_rows
from .test_branches import jobs_of

pytestmark = pytest.mark.spark

TOP = """SELECT window(at, '10 seconds').start AS w, shop, count(*) AS n, sum(amount) AS total FROM orders
         GROUP BY window(at, '10 seconds'), shop ORDER BY total DESC NULLS LAST, w, shop LIMIT 4"""


def _sessions(root: Path, delay: str | None) -> Query:
    def query(spark: SparkSession) -> DataFrame:
        sessions = (
            stream(spark, root, "orders", delay)
            .groupBy(F.session_window("at", "2 seconds").alias("s"), "customer")
            .agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
        )
        return sessions.orderBy("customer", "s").selectExpr("customer", "s.start AS b", "s.end AS e", "n", "total")

    return query


def tables(root: Path) -> dict[str, Query]:
    """Queries whose rows have one order."""

    def without_watermark(spark: SparkSession) -> DataFrame:
        grouped = stream(spark, root, "orders", None).groupBy(F.window("at", "5 seconds").alias("w"))
        counted = grouped.agg(F.count("*").alias("n"), F.max_by("order", "amount").alias("most"))
        told = F.udf(lambda n: f"{n} rows", "string")("n").alias("told")
        return counted.orderBy(F.desc("w")).select("w", told, "most")

    def once(spark: SparkSession) -> DataFrame:
        rows = stream(spark, root, "orders").dropDuplicates(["customer", "at"])
        return rows.groupBy("customer").agg(F.count("*").alias("n")).orderBy("n", "customer")

    def vanishing(spark: SparkSession) -> DataFrame:
        return stream(spark, root, "orders").groupBy().agg(F.count("*").alias("n")).where("n < 100")

    return {
        "windows, sorted and cut": by_sql(root, TOP),
        "sessions with late rows": _sessions(root, "5 seconds"),
        "sessions without a watermark": _sessions(root, None),
        "windows without a watermark, sorted, Python": without_watermark,
        "deduplicate before": once,
        "a table that loses its rows": vanishing,
    }


IN_EACH_RUN = ["windows, sorted and cut", "a table that loses its rows"]


@pytest.fixture(autouse=True)
def settings_of_queries(spark: SparkSession) -> Iterator[None]:
    """Times as the input has them."""
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)
    for view in ("orders", "payments"):
        spark.catalog.dropTempView(view)


def keep(frame: DataFrame, into: Batches) -> None:
    """Keep a batch in its order, also without rows."""
    into.append([str(tuple(row)) for row in frame.collect()])


def job_of(root: Path, **given: Any) -> StreamingJob:
    settings = job_settings(**{"parallelism": 2, "local_dir": str(root / "local"), **given})
    return StreamingJob("tables", store=str(root / "store"), settings=settings)


def query_job(root: Path, query: Query, into: Batches, mode: str = "complete", **given: Any) -> StreamingJob:
    job = job_of(root, **given)
    job.query(query, output_mode=mode).write(foreach_epoch(lambda frame, epoch: keep(frame, into)))
    return job


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.long) for name in tables(Path())]
)
def test_a_query_in_complete_mode_gives_sparks_table_batch_by_batch(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    """In its order, over a restart with other shards and without local copies; late rows and nulls in the input, and a table that
    has no row any more. One Spark job an epoch: a sort does not run the tasks twice."""
    query = tables(tmp_path)[name]
    ours: Batches = []
    theirs: Batches = []
    since, jobs = jobs_of(spark), list[int]()
    for first, parallelism in ((0, 2), (3, 3)):
        write_rows(tmp_path, range(first, first + 3))
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        job = query_job(tmp_path, query, ours, parallelism=parallelism)
        job.run(spark, trigger=ONCE, on_progress=lambda progress: jobs.append(since()))
    for folder in ("orders", "payments"):
        shutil.rmtree(tmp_path / folder)
    for first in (0, 3):
        write_rows(tmp_path, range(first, first + 3))
        running = query(spark).writeStream.outputMode("complete").foreachBatch(lambda frame, _: keep(frame, theirs))
        running = running.option("checkpointLocation", f"file://{tmp_path}/checkpoint").trigger(availableNow=True)
        running.start().awaitTermination()
    assert ours == theirs
    assert len(ours) >= 6
    assert any(ours)
    assert set(jobs[1:]) <= {0, 2}, "the epoch's, and the test's look at the rows"


def test_a_limit_without_an_order_lets_every_task_finish(spark: SparkSession, tmp_path: Path) -> None:
    """Spark stops reading where it has enough, and a shard that was not processed to its end would be missing."""
    write_rows(tmp_path, range(3))
    rows: Batches = []
    state_rows: list[int] = []
    query = by_sql(tmp_path, "SELECT customer, count(*) AS n FROM orders GROUP BY customer LIMIT 3")
    query_job(tmp_path, query, rows).run(
        spark, trigger=ONCE, on_progress=lambda progress: state_rows.append(progress.state_rows)
    )
    assert [len(batch) for batch in rows] == [3, 3, 3]
    assert state_rows[-1] == 20, "all customers"


def test_a_query_may_go_from_update_to_complete_and_back_where_no_key_is_forgotten(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its state is the same. By event time the other modes forget keys, which a table would need, and complete mode does not
    know when."""
    query = by_sql(tmp_path, "SELECT customer, count(*) AS n FROM orders GROUP BY customer")
    rows: Batches = []
    counts: Counter[int] = Counter()
    for number, mode in enumerate(("update", "complete", "update")):
        write_rows(tmp_path, range(number, number + 1))
        came = pq.read_table(tmp_path / "orders" / f"{number:03}.parquet")["customer"].to_pylist()
        counts.update(came)
        query_job(tmp_path, query, rows, mode, parallelism=2 + number % 2).run(spark, trigger=ONCE)
        of = counts if mode == "complete" else set(came)
        assert sorted(rows[-1]) == sorted(str((customer, counts[customer])) for customer in of)
    other = tmp_path / "other"
    write_rows(other, range(1))
    text = "SELECT window(at, '10 seconds') AS w, count(*) AS n FROM orders GROUP BY window(at, '10 seconds')"
    windows_ = by_sql(other, text)
    query_job(other, windows_, rows, "append").run(spark, trigger=ONCE)
    with pytest.raises(InvalidPipeline, match="as append by window_end in snapshot"):
        query_job(other, windows_, rows, "complete").run(spark, trigger=ONCE)
    third = tmp_path / "third"
    write_rows(third, range(1))
    query_job(third, by_sql(third, text), rows).run(spark, trigger=ONCE)
    for mode in ("update", "append"):
        with pytest.raises(InvalidPipeline, match=f"it runs as {mode} by window_end now"):
            query_job(third, by_sql(third, text), rows, mode).run(spark, trigger=ONCE)


def steps(root: Path, **given: Any) -> tuple[StreamingJob, Stream]:
    job = job_of(root, **given)
    return job, job.read(lambda spark: stream(spark, root, "orders"), name="orders")


def test_steps_give_tables_too(spark: SparkSession, tmp_path: Path) -> None:
    """An aggregate, for which no row is late, and sessions, which drop late rows as Spark's do."""
    write_rows(tmp_path, range(3))
    job, orders = steps(tmp_path)
    counted: Batches = []
    sessions: Batches = []
    by_customer = orders.key_by("customer")
    by_customer.aggregate(uid="counts", output_mode="complete", n=aggregates.count()).write(
        foreach_epoch(lambda frame, epoch: keep(frame, counted)), name="counts"
    )
    by_customer.window(
        windows.session("1 second"), uid="sessions", output_mode="complete", n=aggregates.count()
    ).transform(lambda df: df.groupBy().sum("n")).write(
        foreach_epoch(lambda frame, epoch: keep(frame, sessions)), name="sessions"
    )
    late: list[int] = []
    job.run(spark, trigger=ONCE, on_progress=lambda progress: late.append(progress.late_rows))
    rows = pq.read_table(tmp_path / "orders")
    assert [len(batch) for batch in counted] == [20, 20, 20]
    assert sorted(counted[-1]) == sorted(str(each) for each in Counter(rows["customer"].to_pylist()).items())
    assert sessions == [[f"({60 * (number + 1) - sum(late[: number + 1])},)"] for number in range(3)]
    assert sum(late) > 0


def test_what_cannot_take_a_table_is_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    """Files that are added to those before, an operator that would take each row again, rows that come once beside it, and
    epochs that end before their batch."""
    write_rows(tmp_path, range(1))

    def refused(message: str, build: Callable[[Stream, Stream], Any], **given: Any) -> None:
        job, orders = steps(tmp_path, **given)
        table = orders.key_by("customer").aggregate(uid="counts", output_mode="complete", n=aggregates.count())
        build(table, orders)
        with pytest.raises(InvalidPipeline, match=message):
            job.run(spark, trigger=ONCE)

    nothing = foreach_epoch(lambda frame, epoch: None)
    refused(
        "adds the rows of each epoch to those before, and 'counts' gives the whole table",
        lambda table, orders: table.transform(lambda df: df.where("n > 1")).write(ParquetSink(str(tmp_path / "out"))),
    )
    refused(
        "operator 'sums' reads the table that 'counts' gives anew",
        lambda table, orders: table.key_by("n").aggregate(uid="sums", n=aggregates.count()).write(nothing),
    )
    refused(
        "brings the table of 'counts' in complete mode together with rows that come once",
        lambda table, orders: table.union(orders.transform(lambda df: df.selectExpr("customer", "amount AS n"))).write(
            nothing
        ),
    )
    refused("Use checkpoint mode aligned", lambda table, orders: table.write(nothing), checkpoint_mode="unaligned")
    assert not (tmp_path / "store" / "tables").exists()
    counts = "SELECT customer, count(*) AS n FROM {} GROUP BY customer {}"
    for text, message in (
        (counts.format("(SELECT * FROM orders LIMIT 5)", ""), "GlobalLimit is not supported"),
        (counts.format("orders", "LIMIT 0"), "gives no row, whatever its streams have"),
        (counts.format("orders", "OFFSET 1"), "Spark refuses the query, too"),
    ):
        with pytest.raises(InvalidPipeline, match=message):
            query_job(tmp_path, by_sql(tmp_path, text), []).run(spark, trigger=ONCE)


def test_a_table_of_many_files_is_read_in_their_order(spark: SparkSession, tmp_path: Path) -> None:
    """One task wrote it, sorted, a file after the other."""
    files = []
    for number in range(7):
        name = f"{number}.parquet"
        pq.write_table(pa.table({"n": [2 * number, 2 * number + 1]}), tmp_path / name)
        files.append(StagedFile(name, name, (tmp_path / name).stat().st_size, 2))
    frame = read_staged(spark, SinkSpec("out", str(tmp_path), {}), StagedOutput("out", 1, tuple(files)))
    assert [row.n for row in frame.collect()] == list(range(14))
