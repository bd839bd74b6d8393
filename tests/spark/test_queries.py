"""Plain streaming queries on snapshots: Spark's rows, batch by batch; names that state belongs to; what is refused."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from state_runtime import Progress, StreamingJob, foreach_epoch
from state_runtime.base.errors import InvalidPipeline, UserCodeError
from state_runtime.pipeline.graph import OperatorNode, SourceNode
from state_runtime.spark.internals import INTERNALS, Internal
from tests.job_settings import job_settings

from ..refusal import everything_refused
from .plain_queries import (
    ONCE,
    ORDERS,
    SPARKS_WAY,
    Batches,
    Dated,
    Query,
    by_sql,
    plain_job,
    queries,
    same_columns,
    sparks,
    stream,
    write_rows,
)
from .test_branches import jobs_of

pytestmark = pytest.mark.spark

IN_EACH_RUN = [
    "semi join, then windows",
    "the most of each window (NEXMark 5)",
    "windows in update mode",
    "applyInPandasWithState with a timeout",
    "a slower watermark beside",
    "dropDuplicates by a key without time",
    "left join, a number in its condition",
    "full join, both sides asked",
]


@pytest.fixture(autouse=True)
def settings_of_queries(spark: SparkSession) -> Iterator[None]:
    """transformWithState of Spark's own needs RocksDB."""
    provider = "spark.sql.streaming.stateStore.providerClass"
    wanted = {
        "spark.sql.session.timeZone": "UTC",
        provider: "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    }
    before = {name: spark.conf.get(name) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, str(value))
    for view in ("orders", "payments"):
        spark.catalog.dropTempView(view)


@pytest.mark.parametrize("name", IN_EACH_RUN)
def test_a_plain_query_gives_what_spark_gives_batch_by_batch(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Over a restart with other shards and without local copies; late rows and nulls in the input. One Spark job an
    epoch, but for those that Spark needs for a table."""
    check_batch_by_batch(spark, tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in queries(Path()) if name not in IN_EACH_RUN])
def test_every_plain_query_gives_what_spark_gives_batch_by_batch(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    check_batch_by_batch(spark, tmp_path, name)


def check_batch_by_batch(spark: SparkSession, root: Path, name: str) -> None:
    mode, query = queries(root)[name]
    _, sparks_query = queries(root)[SPARKS_WAY.get(name, name)]
    # By a key without time nothing is ever due: its clock must move all the same.
    late = 0.4 if name == "dropDuplicates by a key without time" else 0.05
    ours: Batches = []
    theirs: Batches = []
    since, jobs = jobs_of(spark), list[int]()
    for first, parallelism in ((0, 2), (3, 3)):
        write_rows(root, range(first, first + 3), late=late)
        shutil.rmtree(root / "local", ignore_errors=True)
        job = plain_job(root, query, mode, ours, parallelism=parallelism)
        job.run(spark, trigger=ONCE, on_progress=lambda progress: jobs.append(since()))
    for folder in ("orders", "payments"):
        shutil.rmtree(root / folder)
    for first in (0, 3):
        write_rows(root, range(first, first + 3), late=late)
        sparks(spark, root, sparks_query, mode, theirs)
    assert ours == (theirs if name != "aggregate of all rows" else without_repeats(theirs))
    assert ours or name == "null keys of an inner join"
    # None where only the clock moves; one more is the test's look at the rows, and tables are Spark's to hand out.
    tables = {"deduplicate, Python, a table, windows": 1, "a subquery on a table": 2}.get(name, 0)
    assert set(jobs[1:]) <= set(range(3 + tables))


def without_repeats(batches: Batches) -> Batches:
    """Spark tells an aggregate of all rows again in a batch without rows."""
    return [rows for number, rows in enumerate(batches) if number == 0 or rows != batches[number - 1]]


class Slow(Dated):
    """Takes its time, as code that asks another service does."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in super().handleInputRows(key, rows, timerValues):
            threading.Event().wait(0.01)
            yield row


@pytest.mark.long
def test_rows_in_flight_of_a_query_are_gone_on_with_by_other_shards(spark: SparkSession, tmp_path: Path) -> None:
    """A deduplicate, slow user code and windows, beside windows of another stream: stopped while rows wait; the rows of both
    runs are Spark's."""

    def query(spark: SparkSession) -> DataFrame:
        slow = stream(spark, tmp_path, "orders").dropDuplicates(["order", "at"]).groupBy("order")
        dated = slow.transformWithState(
            Slow(), "customer long, t timestamp", "Append", "EventTime", eventTimeColumnName="t"
        )
        beside = (
            stream(spark, tmp_path, "payments").groupBy(F.window("paid_at", "10 seconds")).agg(F.count("*").alias("n"))
        )
        return dated.groupBy(F.window("t", "10 seconds")).agg(F.count("*").alias("n")).union(beside)

    write_rows(tmp_path, range(3), rows=500)
    ours: Batches = []
    theirs: Batches = []
    waiting: list[int] = []
    stop = threading.Event()

    def stop_with_rows_in_flight(progress: Progress) -> None:
        waiting.append(progress.inflight.rows if progress.inflight else 0)
        if progress.batch_id > 0 and waiting[-1]:
            stop.set()

    unaligned = {"checkpoint_mode": "unaligned", "unaligned_epoch_s": 0.1}
    plain_job(tmp_path, query, "append", ours, **unaligned).run(
        spark, trigger=ONCE, on_progress=stop_with_rows_in_flight, stop=stop
    )
    assert waiting[-1] > 0, waiting
    shutil.rmtree(tmp_path / "local")
    plain_job(tmp_path, query, "append", ours, parallelism=3, **unaligned).run(spark, trigger=ONCE)
    sparks(spark, tmp_path, query, "append", theirs)
    found, wanted = (Counter(row for rows in batches for row in rows) for batches in (ours, theirs))
    assert found == wanted


# --- a query that has changed --------------------------------------------------------------------------------------


def sums(root: Path, *functions: str, key: str = "customer", where: str = "true", window: str = "10 seconds") -> Query:
    """Windows of orders by a key."""

    def query(spark: SparkSession) -> DataFrame:
        rows = stream(spark, root, "orders").where(where).withColumn("k", F.expr(key))
        return rows.groupBy(F.window("at", window), "k").agg(*map(F.expr, functions))

    return query


def renamed(root: Path) -> Query:
    return lambda spark: (
        stream(spark, root, "orders").selectExpr("customer AS c", "at AS t", "amount AS money")
        .groupBy(F.window("t", "10 seconds"), F.col("c").alias("k")).agg(F.sum("money").alias("a"))
    )  # fmt: skip


def with_payments(root: Path, *, first: bool) -> Query:
    """Windows of orders and of payments, in either order."""

    def query(spark: SparkSession) -> DataFrame:
        parts = [
            sums(root, "sum(amount) AS a")(spark).select("a"),
            stream(spark, root, "payments")
            .groupBy(F.window("paid_at", "10 seconds"))
            .agg(F.sum("paid").alias("a"))
            .select("a"),
        ]
        return parts[1].union(parts[0]) if first else parts[0].union(parts[1])

    return query


def nested(root: Path) -> Query:
    """Windows of windows: the inner ones look as the outer ones did."""
    return lambda spark: (
        sums(root, "sum(amount) AS a")(spark)
        .groupBy(F.window(F.window_time("window"), "10 seconds"), "k").agg(F.sum("a").alias("a"))
    )  # fmt: skip


def beside(root: Path, *conditions: str) -> Query:
    """Windows that only a filter tells apart."""

    def query(spark: SparkSession) -> DataFrame:
        first, *others = (sums(root, "count(*) AS n", where=condition)(spark) for condition in conditions)
        for other in others:
            first = first.union(other)
        return first

    return query


def ran(spark: SparkSession, root: Path, query: Query, into: Batches, first: int, **given: object) -> None:
    write_rows(root, range(first, first + 3))
    plain_job(root, query, "append", into, names=given.pop("names", None)).run(spark, trigger=ONCE, **given)  # type: ignore[arg-type]


GOES_ON: Mapping[str, tuple[Callable[[Path], Query], Callable[[Path], Query]]] = {
    "a function added": (lambda root: sums(root, "sum(amount) AS a"), lambda root: sums(root, "count(*) * 0 AS b", "sum(amount) AS a")),
    "a function dropped": (lambda root: sums(root, "sum(amount) AS a", "max(amount) AS b"), lambda root: sums(root, "max(amount) AS b")),
    "sums that changed their names": (
        lambda root: sums(root, "sum(order) AS a", "sum(amount) AS b"), lambda root: sums(root, "sum(amount) AS a", "sum(order) AS b")
    ),
    "columns renamed on the way": (lambda root: sums(root, "sum(amount) AS a"), renamed),
    "sources in another order": (lambda root: with_payments(root, first=False), lambda root: with_payments(root, first=True)),
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=pytest.mark.long if "dropped" in c or "renamed" in c else ()) for c in GOES_ON]
)
def test_a_changed_query_goes_on_with_the_state_of_what_it_still_says(
    spark: SparkSession, tmp_path: Path, change: str
) -> None:
    """The answer behind the change is that of the new query over all input."""
    before, after = (made(tmp_path) for made in GOES_ON[change])
    ours: Batches = []
    theirs: Batches = []
    ran(spark, tmp_path, before, [], 0)
    ran(spark, tmp_path, after, ours, 3)
    for folder in ("orders", "payments"):
        shutil.rmtree(tmp_path / folder)
    for first in (0, 3):
        theirs.clear()
        write_rows(tmp_path, range(first, first + 3))
        sparks(spark, tmp_path, after, "append", theirs)
    assert ours == theirs
    assert ours


def test_a_filter_added_in_front_keeps_the_state(spark: SparkSession, tmp_path: Path) -> None:
    """As in Spark."""
    before, after = sums(tmp_path, "count(*) AS n"), sums(tmp_path, "count(*) AS n", where="amount > 20")
    ours: Batches = []
    theirs: Batches = []
    ran(spark, tmp_path, before, ours, 0)
    ran(spark, tmp_path, after, ours, 3)
    for folder in ("orders", "payments"):
        shutil.rmtree(tmp_path / folder)
    for first, query in ((0, before), (3, after)):
        write_rows(tmp_path, range(first, first + 3))
        sparks(spark, tmp_path, query, "append", theirs)
    assert ours == theirs


def test_state_of_another_meaning_is_refused_before_a_row(spark: SparkSession, tmp_path: Path) -> None:
    """Another key of the same type, another window, a changed function, an operator of the same shape in front: each
    would read the old state under a new meaning. The word that gives it up starts anew."""
    told: Batches = []
    ran(spark, tmp_path, sums(tmp_path, "sum(amount) AS a"), told, 0)
    before = len(told)
    refused = {
        "its keys are": [sums(tmp_path, "sum(amount) AS a", window="20 seconds")],
        'names={"window-k": "window-customer"}': [sums(tmp_path, "sum(amount) AS a", key="order % 20")],
        "is new, and sum\\(orders.amount\\) of snapshot": [sums(tmp_path, "sum(amount + 1) AS a")],
        "it is not sure which state is whose": [nested(tmp_path)],
    }
    for message, changed in refused.items():
        for query in changed:
            with pytest.raises(InvalidPipeline, match=message):
                plain_job(tmp_path, query, "append", told).run(spark, trigger=ONCE)
    assert len(told) == before
    asked = "SELECT o.order FROM orders o LEFT JOIN payments p ON o.order = p.order AND paid_at BETWEEN at AND at + INTERVAL 9 SECONDS AND paid {} amount"  # fmt: skip
    other = tmp_path / "other"
    ran(spark, other, by_sql(other, asked.format(">")), [], 0)
    with pytest.raises(InvalidPipeline, match="its keys and condition are"):
        plain_job(other, by_sql(other, asked.format("<")), "append", []).run(spark, trigger=ONCE)
    ran(spark, tmp_path, sums(tmp_path, "sum(amount + 1) AS a"), told, 3, allow_dropped_state=True)
    assert len(told) > before


def test_a_key_that_is_called_as_a_windows_time_is_is_a_key_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """A window is two columns in state; a source's column of that name beside it must not be lost under it."""
    write_rows(tmp_path, range(3))
    for path in (tmp_path / "orders").glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns(["window_end", *table.column_names[1:]]), path)
    schema = ORDERS.replace("order", "window_end")

    def query(spark: SparkSession) -> DataFrame:
        rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "orders"))
        return rows.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 seconds"), "window_end").count()

    ours: Batches = []
    theirs: Batches = []
    plain_job(tmp_path, query, "append", ours).run(spark, trigger=ONCE)
    sparks(spark, tmp_path, query, "append", theirs)
    assert ours == theirs
    assert len(ours) > 1


def test_operators_that_only_a_number_tells_apart_are_not_matched_on_doubt(spark: SparkSession, tmp_path: Path) -> None:
    """Two counts of the same windows, of other rows: exchanged, or one of them gone, their states would be exchanged
    without a word."""
    low, high = "amount < 50", "amount >= 50"
    ran(spark, tmp_path, beside(tmp_path, low, high), [], 0)
    for changed in (beside(tmp_path, high, low), beside(tmp_path, high)):
        with pytest.raises(InvalidPipeline, match="it is not sure which state is whose"):
            plain_job(tmp_path, changed, "append", []).run(spark, trigger=ONCE, allow_dropped_state=True)
    ran(spark, tmp_path, beside(tmp_path, low, high), [], 3)
    swapped = {"window-customer": "window-customer-2", "window-customer-2": "window-customer"}
    plain_job(tmp_path, beside(tmp_path, high, low), "append", [], names=swapped).run(spark, trigger=ONCE)


def test_columns_that_say_the_same_are_not_exchanged(spark: SparkSession, tmp_path: Path) -> None:
    """Sums over both sides of a join of a stream with itself: only their order tells them apart."""
    ran(spark, tmp_path, lambda spark: same_columns(spark, tmp_path, ["x.n", "y.n"]), [], 0)
    with pytest.raises(InvalidPipeline, match="several of its columns say the same"):
        ran(spark, tmp_path, lambda spark: same_columns(spark, tmp_path, ["y.n", "x.n"]), [], 3)
    ran(spark, tmp_path, lambda spark: same_columns(spark, tmp_path, ["x.n", "y.n"]), [], 3)


# --- names, sources, refusals --------------------------------------------------------------------------------------


def nodes_of(spark: SparkSession, root: Path, query: Query, **given: object) -> tuple[list[str], list[str]]:
    """Names of the sources and uids of the operators of a query."""
    write_rows(root, range(1))
    graph = plain_job(root, query, "append", [], **given).plan().expanded(spark).graph  # type: ignore[arg-type]
    sources = [node.name for node in graph.nodes if isinstance(node, SourceNode)]
    return sources, [node.uid for node in graph.nodes if isinstance(node, OperatorNode)]


def test_operators_and_sources_are_named_by_their_aliases_else_by_what_they_do(
    spark: SparkSession, tmp_path: Path
) -> None:
    text = (
        "WITH hot AS (SELECT customer, count(*) AS n, window(at, '10 seconds') AS w FROM orders "
        "GROUP BY customer, window(at, '10 seconds')) SELECT max(n) AS n, w FROM hot GROUP BY w"
    )
    assert nodes_of(spark, tmp_path, by_sql(tmp_path, text)) == (["orders"], ["hot", "window"])

    def aliased(spark: SparkSession) -> DataFrame:
        return sums(tmp_path, "count(*) AS n")(spark).alias("per_customer").where("n > 1")

    assert nodes_of(spark, tmp_path, aliased) == (["orders"], ["per_customer"])
    assert nodes_of(spark, tmp_path, sums(tmp_path, "count(*) AS n")) == (["orders"], ["window-customer"])
    names = {"window-customer": "per-customer", "orders": "shop-orders"}
    assert nodes_of(spark, tmp_path, sums(tmp_path, "count(*) AS n"), names=names) == (
        ["shop-orders"],
        ["per-customer"],
    )


def test_names_for_what_a_query_does_not_have_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A name that was only written differently would begin with empty state."""
    with pytest.raises(
        InvalidPipeline, match="'windows', and the query has the operators window-customer and the sources orders"
    ):
        nodes_of(spark, tmp_path, sums(tmp_path, "count(*) AS n"), names={"windows": "per-customer"})


def test_queries_of_one_job_have_names_of_their_own_and_do_not_exchange_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Two queries would have one name: written in another order each would take the other's state."""
    write_rows(tmp_path, range(3))

    def job_of(*conditions: str) -> StreamingJob:
        job = StreamingJob(
            "plain", store=str(tmp_path / "store"), settings=job_settings(local_dir=str(tmp_path / "local"))
        )
        for number, condition in enumerate(conditions):
            stream_ = job.query(sums(tmp_path, "count(*) AS n", where=condition))
            stream_.write(foreach_epoch(lambda frame, epoch: None), name=f"out-{number}")
        return job

    graph = job_of("amount < 50", "amount >= 50").plan().expanded(spark).graph
    assert [n.name for n in graph.nodes if isinstance(n, SourceNode)] == ["orders", "orders-2"]
    assert [n.uid for n in graph.nodes if isinstance(n, OperatorNode)] == ["window-customer", "window-customer-2"]
    job_of("amount < 50", "amount >= 50").run(spark, trigger=ONCE)
    with pytest.raises(InvalidPipeline, match="it is not sure which state is whose"):
        job_of("amount >= 50", "amount < 50").run(spark, trigger=ONCE)
    job_of("amount < 50", "amount >= 50").run(spark, trigger=ONCE)


def test_a_stream_that_a_query_reads_twice_in_the_same_way_is_read_once(spark: SparkSession, tmp_path: Path) -> None:
    def query(spark: SparkSession) -> DataFrame:
        orders = stream(spark, tmp_path, "orders")
        by = [
            orders.groupBy(F.window("at", "10 seconds"), "customer").agg(F.sum("amount").alias(name))
            for name in ("a", "b")
        ]
        return by[0].select("a").union(by[1].select("b"))

    assert nodes_of(spark, tmp_path, query)[0] == ["orders"]


def test_sql_over_named_streams_leaves_no_view_behind(spark: SparkSession, tmp_path: Path) -> None:
    write_rows(tmp_path, range(3))
    rows: Batches = []
    job = StreamingJob("plain", store=str(tmp_path / "store"))
    text = "SELECT window(at, '10 seconds').start AS w, count(*) AS n FROM bids GROUP BY window(at, '10 seconds')"
    job.sql(text, bids=lambda spark: stream(spark, tmp_path, "orders")).write(
        foreach_epoch(lambda frame, epoch: rows.append([str(row) for row in frame.collect()]))
    )
    job.run(spark, trigger=ONCE)
    assert sum(map(len, rows)) > 1
    assert not spark.catalog.tableExists("bids")


def test_names_alone_need_no_step_of_their_own_before_a_sink(spark: SparkSession, tmp_path: Path) -> None:
    """The operator writes its rows under the query's names, unless something is computed of them, or read of them."""
    write_rows(tmp_path, range(1))

    def stages_of(query: Query, *, is_read: bool = False) -> list[tuple[str, ...]]:
        job = StreamingJob("plain", store=str(tmp_path / "store"), settings=job_settings(parallelism=2))
        rows = job.query(query)
        rows.write(foreach_epoch(print), name="rows")
        if is_read:
            rows.transform(lambda df: df.where("n > 1")).write(foreach_epoch(print), name="others")
        plan = job.plan().expanded(spark)
        stages = plan.compiled(spark, plan.opened_sources(spark)).stages
        return [stage.sinks for stage in stages]

    counted = sums(tmp_path, "count(*) AS n")
    assert stages_of(counted) == [("rows",)]
    assert stages_of(sums(tmp_path, "count(*) + 1 AS n")) == [(), ("rows",)]
    assert stages_of(lambda spark: counted(spark).where("n > 1")) == [(), ("rows",)]
    assert stages_of(counted, is_read=True) == [(), ("rows",), ("others",)]


def mixed(root: Path, into: Batches, parallelism: int) -> StreamingJob:
    """Steps, then SQL over a stream of theirs and a source, then a function over what that gave, then steps."""
    settings = job_settings(parallelism=parallelism, local_dir=str(root / "local"))
    job = StreamingJob("mixed", store=str(root / "store"), settings=settings)
    orders = job.read(lambda spark: stream(spark, root, "orders"), name="orders")
    once = orders.key_by("order", "at").deduplicate(uid="once").transform(lambda df: df.where("shop IS NOT NULL"))
    text = """SELECT window(o.at, '10 seconds') AS w, shop, count(*) AS n, sum(paid) AS paid FROM orders o JOIN payments p
              ON o.order = p.order AND paid_at BETWEEN at - INTERVAL 5 SECONDS AND at + INTERVAL 9 SECONDS GROUP BY ALL"""
    per_shop = job.sql(
        text, orders=once, payments=lambda spark: stream(spark, root, "payments"), names={"window-shop": "shops"}
    )
    most = job.query(
        lambda spark, found: found.groupBy("w").agg(F.max("n").alias("n"), F.count("*").alias("k")), found=per_shop
    )
    most.transform(lambda df: df.selectExpr("w.end AS end", "n", "k")).write(
        foreach_epoch(lambda frame, epoch: into.append(sorted(str(tuple(row)) for row in frame.collect())))
    )
    return job


def test_a_query_reads_streams_of_its_job_as_it_reads_sources(spark: SparkSession, tmp_path: Path) -> None:
    """Both ways mix, over a restart with other shards; the rows are those of Spark's one query."""

    def whole(spark: SparkSession) -> DataFrame:
        once = stream(spark, tmp_path, "orders").dropDuplicates(["order", "at"]).where("shop IS NOT NULL").alias("o")
        near = F.expr("o.order = p.order AND paid_at BETWEEN at - INTERVAL 5 SECONDS AND at + INTERVAL 9 SECONDS")
        both = once.join(stream(spark, tmp_path, "payments").alias("p"), near)
        per_shop = both.groupBy(F.window("at", "10 seconds").alias("w"), "shop").agg(F.count("*").alias("n"))
        return (
            per_shop.groupBy("w")
            .agg(F.max("n").alias("n"), F.count("*").alias("k"))
            .selectExpr("w.end AS end", "n", "k")
        )

    ours: Batches = []
    theirs: Batches = []
    for first, parallelism in ((0, 2), (3, 3)):
        write_rows(tmp_path, range(first, first + 3))
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        mixed(tmp_path, ours, parallelism).run(spark, trigger=ONCE)
    sparks(spark, tmp_path, whole, "append", theirs)
    assert Counter(row for rows in ours for row in rows) == Counter(row for rows in theirs for row in rows)
    assert sum(map(len, theirs)) > 2
    assert not spark.catalog.tableExists("orders")


def test_what_a_query_cannot_do_with_a_stream_of_its_job_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_rows(tmp_path, range(1))
    jobs = [StreamingJob(name, store=str(tmp_path / "store")) for name in ("one", "other")]
    orders = [job.read(lambda spark: stream(spark, tmp_path, "orders", None), name="orders") for job in jobs]
    with pytest.raises(InvalidPipeline, match="orders is a stream of another job"):
        jobs[0].sql("SELECT * FROM orders", orders=orders[1])
    with pytest.raises(InvalidPipeline, match="go to a function"):
        jobs[0].query(stream(spark, tmp_path, "orders"), orders=orders[0])
    with pytest.raises(InvalidPipeline, match="orders=str must be a stream"):
        jobs[0].query(lambda spark, orders: orders, orders="orders")  # type: ignore[arg-type]
    jobs[0].query(lambda spark, orders: orders.withWatermark("at", "5 seconds"), orders=orders[0]).write(
        foreach_epoch(print)
    )
    with pytest.raises(InvalidPipeline, match="call it where the job reads that stream"):
        jobs[0].plan().expanded(spark)


def test_a_view_that_has_the_name_of_a_stream_is_there_again(spark: SparkSession, tmp_path: Path) -> None:
    write_rows(tmp_path, range(1))
    spark.range(7).createOrReplaceTempView("taken")
    job = StreamingJob("plain", store=str(tmp_path / "store"))
    job.sql("SELECT amount FROM taken", taken=lambda spark: stream(spark, tmp_path, "orders")).write(
        foreach_epoch(print)
    )
    job.plan().expanded(spark)
    assert spark.table("taken").count() == 7
    spark.catalog.dropTempView("taken")


def test_the_time_of_day_is_one_for_an_epoch_and_new_in_each(spark: SparkSession, tmp_path: Path) -> None:
    """In columns, filters and aggregates, in what the watermark goes by, on both sides of an operator."""
    write_rows(tmp_path, range(3))

    def query(spark: SparkSession) -> DataFrame:
        read = stream(spark, tmp_path, "orders", None).withColumn("came", F.current_timestamp())
        once = read.withWatermark("came", "1 hour").where("came < now() + INTERVAL 1 HOUR")
        once = once.dropDuplicates(["order", "came"])
        micros = "unix_micros(CAST(localtimestamp() AS TIMESTAMP)) AS ntz, unix_micros(came) AS came"
        told = once.selectExpr(
            "unix_micros(current_timestamp()) AS left", "unix_date(current_date()) AS day", *micros.split(", ")
        )
        by = told.groupBy("left", "day", "ntz", "came")
        return by.agg(F.count("*").alias("n"), F.max(F.expr("unix_micros(now())")).alias("now"))

    epochs: list[list[Row]] = []
    job = StreamingJob("plain", store=str(tmp_path / "store"), settings=job_settings(parallelism=2))
    job.query(query, output_mode="update").write(foreach_epoch(lambda frame, epoch: epochs.append(frame.collect())))
    begin_us = time.time_ns() // 1000
    job.run(spark, trigger=ONCE)
    end_us = time.time_ns() // 1000
    assert [len(rows) for rows in epochs] == [1, 1, 1]
    found = [rows[0] for rows in epochs]
    orders = [pq.read_table(path)["order"] for path in sorted((tmp_path / "orders").glob("*.parquet"))]
    assert [row.n for row in found] == [len(column.unique()) for column in orders]
    times = [at for row in found for at in (row.came, row.left)]
    assert begin_us <= times[0]
    assert times == sorted(set(times))
    assert times[-1] <= end_us
    for row in found:
        assert row.left == row.now == row.ntz
        assert row.day == row.left // 86_400_000_000


REFUSED: Mapping[str, tuple[str, str, str]] = {
    "row_number": ("append", "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY customer ORDER BY at) r FROM orders) WHERE r = 1", "Spark refuses the query, too"),
    "anti join": ("append", "SELECT o.order FROM orders o LEFT ANTI JOIN payments p ON o.order = p.order", "Spark refuses the query, too"),
    "left join by a difference": ("append", "SELECT o.order FROM orders o LEFT JOIN payments p ON o.order = p.order AND paid_at BETWEEN at AND at + INTERVAL 1 MINUTE AND abs(paid - amount) < 5", "is not supported beside equal columns and a range of time"),
    "no bound": ("append", "SELECT o.order FROM orders o JOIN payments p ON o.order = p.order", "rows of its left and right side would be kept for ever"),
    "one bound": ("append", "SELECT o.order FROM orders o JOIN payments p ON o.order = p.order AND paid_at >= at", "rows of its left side would be kept for ever.*allow_unbounded"),
    "no equal column": ("append", "SELECT o.order FROM orders o JOIN payments p ON paid_at BETWEEN at AND at + INTERVAL 1 MINUTE", "columns that must be equal"),
    "limit": ("append", "SELECT * FROM orders LIMIT 5", "GlobalLimit is not supported"),
    "no event time": ("append", "SELECT customer, count(*) FROM orders GROUP BY customer", "Spark refuses the query, too"),
    "time of day in a join": ("append", "SELECT o.order FROM orders o JOIN payments p ON o.order = p.order AND paid_at BETWEEN at AND at + INTERVAL 9 SECONDS AND (o.at < now() OR p.paid_at < now())", "Make a column of it before"),
    "percentile": ("update", "SELECT percentile(amount, 0.5) FROM orders", "the aggregate function percentile.*is not supported"),
    "nulls in a set": ("update", "SELECT collect_set(amount) RESPECT NULLS FROM orders", "RESPECT NULLS is not supported here"),
    "nulls in a list": ("update", "SELECT collect_list(amount) RESPECT NULLS FROM orders", "RESPECT NULLS is not supported here"),
    "average of decimals": ("update", "SELECT avg(CAST(amount AS DECIMAL(30, 2))) FROM orders", "cast it to double first"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED])
def test_what_is_not_supported_is_refused_by_name_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    mode, text, message = REFUSED[name]
    if (
        "RESPECT NULLS" in text
        and not spark.sql("SELECT collect_set(n) RESPECT NULLS FROM VALUES (null) AS t(n)").head()[0]
    ):
        pytest.skip(f"Spark {spark.version} leaves nulls out all the same, and so does a job")
    write_rows(tmp_path, range(1))
    with pytest.raises(InvalidPipeline, match=message):
        plain_job(tmp_path, by_sql(tmp_path, text), mode, [], allow_unbounded=False).run(spark, trigger=ONCE)
    assert not (tmp_path / "store" / "plain").exists()


def test_a_table_is_read_anew_in_each_epoch_and_a_subquery_that_could_not_be_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The optimizer settles the files of a table: joined tables are hidden from it, a subquery's cannot be."""
    write_rows(tmp_path, range(2))
    spark.range(10).selectExpr("id AS customer").write.parquet(str(tmp_path / "table"))
    v1 = "spark.sql.sources.useV1SourceList"
    before = str(spark.conf.get(v1))
    spark.conf.set(v1, "")
    try:
        table = spark.read.parquet(str(tmp_path / "table"))
        rows: Batches = []
        plain_job(
            tmp_path,
            lambda spark: stream(spark, tmp_path, "orders").join(table, "customer").select("customer"),
            "append",
            rows,
        ).run(spark, trigger=ONCE)
        assert {row for batch in rows for row in batch} <= {f"({n},)" for n in range(10)}
        assert len(rows) == 2
        table.createOrReplaceTempView("small")
        text = "SELECT * FROM orders WHERE amount > (SELECT max(customer) FROM small)"
        with pytest.raises(InvalidPipeline, match="join with the table instead"):
            nodes_of(spark, tmp_path, by_sql(tmp_path, text))
    finally:
        spark.conf.set(v1, before)
        spark.catalog.dropTempView("small")


def test_what_is_given_to_query_is_named_if_it_is_wrong(spark: SparkSession, tmp_path: Path) -> None:
    def broken(spark: SparkSession) -> DataFrame:
        raise KeyError("shop")

    def timed_twice(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path, "orders").withWatermark("at", "9 seconds").groupBy("at").count()

    write_rows(tmp_path, range(1))
    for query, error, message in (
        (broken, UserCodeError, "query\\(\\) raised KeyError"),
        (timed_twice, InvalidPipeline, "Redefining watermark is disallowed"),
        (lambda spark: spark.range(3), InvalidPipeline, "needs a streaming DataFrame"),
    ):
        with pytest.raises(error, match=message):
            plain_job(tmp_path, query, "append", []).run(spark, trigger=ONCE)
    with pytest.raises(InvalidPipeline, match="must be append, update or complete"):
        StreamingJob("plain", store=str(tmp_path)).query(broken, output_mode="completed")


def test_another_spark_refuses_plain_queries_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    write_rows(tmp_path, range(1))
    with everything_refused():
        with pytest.raises(InvalidPipeline, match="write the pipeline in steps"):
            plain_job(tmp_path, sums(tmp_path, "count(*) AS n"), "append", []).plan().expanded(spark)
        assert INTERNALS.is_refused(Internal.QUERY_PLANS)
