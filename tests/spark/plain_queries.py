"""Plain streaming queries, and what Spark's own streaming gives for them, batch by batch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import StreamingJob, foreach_epoch
from tests.job_settings import job_settings

ORDERS = "order long, customer long, amount long, shop string, at timestamp"
PAYMENTS = "order long, paid long, paid_at timestamp"
BEGIN_S = 1_700_000_000
FILE_S = 10
ROWS = 60
ONCE = {"available_now": True}
SPARKS_WAY = {"left join, a number in its condition": "left join, the same number"}
"""Spark 4.3 takes `amount > 20` beside a range for a bound in time, and never gives rows without a match."""

Query = Callable[[SparkSession], DataFrame]
Batches = list[list[str]]


def write_rows(root: Path, files: range, rows: int = ROWS, late: float = 0.05) -> None:
    """Rows of ten seconds a file, in two folders; some late, some with nulls."""
    for number in files:
        draw = random.Random(number)

        def moments(draw: random.Random = draw, number: int = number) -> Iterator[int]:
            for _ in range(rows):
                behind_s = draw.uniform(20, 45) if draw.random() < late else 0
                yield int((BEGIN_S + number * FILE_S + draw.random() * FILE_S - behind_s) * 1e6)

        times = pa.timestamp("us", "UTC")
        own = range(number * rows, (number + 1) * rows)
        orders = {
            "order": pa.array([None if draw.random() < 0.03 else each for each in own], pa.int64()),
            "customer": pa.array([draw.randrange(20) for _ in own], pa.int64()),
            "amount": pa.array([draw.choice([None, *range(100)]) for _ in own], pa.int64()),
            "shop": pa.array([draw.choice(["a", "b", None]) for _ in own]),
            "at": pa.array(list(moments()), times),
        }
        payments = {
            "order": pa.array([max(0, draw.randrange(own.start - rows, own.stop)) for _ in own], pa.int64()),
            "paid": pa.array([draw.randrange(100) for _ in own], pa.int64()),
            "paid_at": pa.array(list(moments()), times),
        }
        for name, columns in (("orders", orders), ("payments", payments)):
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), folder / f".{number}")
            os.utime(folder / f".{number}", ns=((BEGIN_S + number) * 10**9,) * 2)
            (folder / f".{number}").rename(folder / f"{number:03}.parquet")


def stream(spark: SparkSession, root: Path, name: str, delay: str | None = "5 seconds") -> DataFrame:
    """A folder as a stream, a file each batch."""
    schema, time = (ORDERS, "at") if name == "orders" else (PAYMENTS, "paid_at")
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / name))
    return frame if delay is None else frame.withWatermark(time, delay)


def by_sql(root: Path, text: str) -> Query:
    """A query in SQL, over `orders` and `payments`."""

    def query(spark: SparkSession) -> DataFrame:
        for name in ("orders", "payments"):
            stream(spark, root, name).createOrReplaceTempView(name)
        return spark.sql(text)

    return query


def _twice(value: int | None) -> int | None:
    return None if value is None else value * 2


class Running(StatefulProcessor):
    """Rows and amounts of a customer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.sums = handle.getValueState("sums", "n long, total long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.sums.update((initialState.n, 0))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, total = self.sums.get() or (0, 0)
        for row in rows:
            n, total = n + 1, total + (row.amount or 0)
        self.sums.update((n, total))
        yield Row(customer=key[0], n=n, total=total)


class RunningInPandas(StatefulProcessor):
    """Rows of a customer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        (n,) = self.state.get() or (0,)
        n += sum(len(frame) for frame in rows)
        self.state.update((n,))
        yield pd.DataFrame({"customer": [key[0]], "n": [n]})


class Timed(StatefulProcessor):
    """Rows of a customer, told by a timer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.state = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (n,) = self.state.get() or (0,)
        self.state.update((n + sum(1 for _ in rows),))
        self.handle.registerTimer(timerValues.getCurrentWatermarkInMs() + 5_000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        (n,) = self.state.get() or (0,)
        yield Row(customer=key[0], n=n, told=expiredTimerInfo.getExpiryTimeInMs())


class Dated(StatefulProcessor):
    """A row for each, with its time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(customer=key[0], t=row.at)


def counted(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Rows of a customer."""
    (n,) = state.get if state.exists else (0,)
    n += sum(len(frame) for frame in frames)
    state.update((n,))
    yield pd.DataFrame({"customer": [key[0]], "n": [n], "late": [False]})


def timed_out(key: Any, frames: Iterator[pd.DataFrame], state: Any, after_ms: int = 4_000) -> Iterator[pd.DataFrame]:
    """Rows of a customer, told when no more have come for four seconds, or for longer."""
    (n,) = state.get if state.exists else (0,)
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"customer": [key[0]], "n": [n], "late": [True]})
        return
    times = [time for frame in frames for time in frame["at"]]
    state.update((n + len(times),))
    state.setTimeoutTimestamp(max(state.getCurrentWatermarkMs(), 0) + after_ms)
    yield pd.DataFrame({"customer": [], "n": [], "late": []}).astype({"customer": "int64", "n": "int64", "late": bool})


def same_columns(spark: SparkSession, root: Path, summed: list[str]) -> DataFrame:
    """A window joined with itself, and sums of columns of both sides: by what they say they cannot be told apart."""

    def counts() -> DataFrame:
        # One frame on both sides never closes the windows of one of them in Spark 4.3.
        by = [F.window("at", "10 seconds").alias("w"), F.col("customer")]
        return stream(spark, root, "orders").groupBy(*by).agg(F.count("*").alias("n"), F.sum("amount").alias("s"))

    both = counts().alias("x").join(counts().alias("y"), F.expr("x.w = y.w AND x.customer < y.customer"))
    return both.groupBy("x.w").agg(*(F.sum(name).alias(f"f{place}") for place, name in enumerate(summed)))


def queries(root: Path) -> dict[str, tuple[str, Query]]:
    """Output mode and query, by name."""
    near = "o.order = p.order AND paid_at >= at - INTERVAL 5 SECONDS AND paid_at <= at + INTERVAL 12 SECONDS"

    def orders(spark: SparkSession, delay: str | None = "5 seconds") -> DataFrame:
        return stream(spark, root, "orders", delay)

    def payments(spark: SparkSession, delay: str | None = "5 seconds") -> DataFrame:
        return stream(spark, root, "payments", delay)

    def joined(spark: SparkSession, how: str = "inner", condition: str = near) -> DataFrame:
        return orders(spark).alias("o").join(payments(spark).alias("p"), F.expr(condition), how)

    def tumbling() -> Column:
        return F.window("at", "10 seconds")

    windowed = "SELECT customer, count(*) AS n, window(at, '10 seconds') AS w FROM orders GROUP BY customer, window(at, '10 seconds')"  # fmt: skip
    return {
        "windowed count": ("append", lambda spark: (
            orders(spark).where("shop IS NOT NULL").groupBy(tumbling(), "shop")
            .agg(F.count("*").alias("n"), F.sum(F.col("amount") + 1).alias("s"), F.avg("amount").alias("a"))
        )),
        "sliding window in SQL": ("append", by_sql(root, (
            "SELECT window.start AS begins, upper(shop) AS shop, sum(amount) * 2 + count(*) AS x, "
            "count(*) FILTER (WHERE amount > 50) AS big FROM orders "
            "GROUP BY window(at, '20 seconds', '5 seconds'), upper(shop) HAVING count(*) > 2"
        ))),
        "dropDuplicates by event time": ("append", lambda spark: orders(spark).dropDuplicates(["order", "at"])),
        "dropDuplicates for ever": ("append", lambda spark: orders(spark, None).dropDuplicates(["customer"]).select("customer")),
        "dropDuplicates by a key without time": ("append", lambda spark: orders(spark).dropDuplicates(["order"])),
        "deduplicate windows": ("append", lambda spark: (
            orders(spark).groupBy(tumbling(), "customer").agg(F.count("*").alias("n")).dropDuplicates(["window", "n"]).select("window", "n")
        )),
        "deduplicate windows by another key": ("append", lambda spark: (
            orders(spark).groupBy(tumbling(), "customer").agg(F.count("*").alias("n")).dropDuplicates(["customer"]).select("customer")
        )),
        "keys of event time itself": ("append", lambda spark: (
            orders(spark).groupBy("at").agg(F.count("*").alias("n"), F.first("shop", ignorenulls=True).alias("f"))
        )),
        "generated rows": ("append", lambda spark: (
            orders(spark).select("at", F.explode(F.sequence(F.lit(1), F.col("customer") % 3 + 1)).alias("part"), "amount")
            .groupBy(tumbling(), "part").agg(F.sum("amount").alias("s"))
        )),
        "a subquery on a table": ("append", by_sql(root, (
            "SELECT window.start AS s, count(*) AS n FROM orders WHERE amount > (SELECT avg(id) FROM range(60)) "
            "AND customer IN (SELECT id * 2 FROM range(8)) GROUP BY window(at, '10 seconds')"
        ))),
        "dropDuplicatesWithinWatermark": ("append", lambda spark: orders(spark).dropDuplicatesWithinWatermark(["customer"]).select("customer")),
        "distinct": ("append", lambda spark: orders(spark).select("at", "shop").distinct()),
        "join": ("append", lambda spark: joined(spark).where("paid > 10").select("o.order", "customer", "paid", "at", "paid_at")),
        "join, then windows": ("append", lambda spark: (
            joined(spark).where("paid > 10 OR customer < 5").groupBy(tumbling(), "customer")
            .agg(F.count("*").alias("n"), F.sum("paid").alias("paid"))
        )),
        "comma join with another condition, then windows": ("append", by_sql(root, (
            "SELECT window.end AS w, customer, max(paid) AS most FROM (SELECT o.*, p.paid FROM orders o, payments p "
            "WHERE o.order = p.order AND p.paid_at BETWEEN o.at - INTERVAL 5 SECONDS AND o.at + INTERVAL 12 SECONDS "
            "AND p.paid <> o.amount) GROUP BY window(at, '10 seconds'), customer"
        ))),
        "left join": ("append", lambda spark: joined(spark, "left").select("o.order", "customer", "at", "paid")),
        "left join, strict bounds, then windows": ("append", lambda spark: (
            joined(spark, "left", "o.order = p.order AND paid_at > at - INTERVAL 5 SECONDS AND paid_at < at + INTERVAL 12 SECONDS")
            .groupBy(tumbling()).agg(F.count("*").alias("n"), F.count("paid").alias("paid"))
        )),
        "windows of windows": ("append", lambda spark: (
            orders(spark).groupBy(tumbling(), "customer").agg(F.count("*").alias("n"))
            .groupBy(F.window(F.window_time("window"), "20 seconds")).agg(F.max("n").alias("most"), F.count("*").alias("customers"))
        )),
        "deduplicate, Python, a table, windows": ("append", lambda spark: (
            orders(spark).dropDuplicates(["order", "at"]).withColumn("twice", F.udf(_twice, "long")("amount"))
            .join(spark.range(0, 20, 2).withColumnRenamed("id", "customer"), "customer")
            .groupBy(tumbling()).agg(F.sum("twice").alias("s"), F.count("*").alias("n"))
        )),
        "union of two streams, then windows": ("append", lambda spark: (
            orders(spark).select("at", "customer").union(payments(spark, "12 seconds").selectExpr("paid_at", "paid % 20"))
            .groupBy(tumbling()).agg(F.count("*").alias("n"), F.max("customer").alias("m"))
        )),
        "a slower watermark beside": ("append", lambda spark: (
            orders(spark).groupBy(tumbling()).agg(F.count("*").alias("n"))
            .union(payments(spark, "15 seconds").groupBy(F.window("paid_at", "10 seconds")).agg(F.count("*").alias("n")))
        )),
        "one stream in two aggregates": ("append", lambda spark: (
            orders(spark).groupBy(tumbling(), "customer").agg(F.count("*").alias("n"))
            .union(orders(spark).groupBy(tumbling(), "customer").agg(F.sum("amount").alias("n")))
        )),
        "windows joined on equal windows": ("append", lambda spark: (
            orders(spark).groupBy(tumbling().alias("w"), "customer").agg(F.count("*").alias("n")).join(
                payments(spark).groupBy(F.window("paid_at", "10 seconds").alias("w2"), (F.col("order") % 20).alias("c2"))
                .agg(F.sum("paid").alias("s")), F.expr("w = w2 AND customer = c2 AND n < s"))
        )),
        "columns that say the same": ("append", lambda spark: same_columns(spark, root, ["x.n", "y.n", "x.s", "y.s"])),
        "the most of each window (NEXMark 5)": ("append", by_sql(root, (
            f"SELECT A.customer, A.n FROM ({windowed}) A JOIN (SELECT max(n) AS m, w FROM ({windowed}) GROUP BY w) B "
            "ON A.w = B.w AND A.n >= B.m"
        ))),
        "a common table expression used twice": ("append", by_sql(root, (
            f"WITH hot AS ({windowed}) SELECT customer, n FROM hot WHERE n > 2 UNION ALL SELECT n, customer FROM hot WHERE n <= 2"
        ))),
        "aggregate": ("update", lambda spark: (
            orders(spark, None).groupBy("customer")
            .agg(F.count("*").alias("n"), F.sum("amount").alias("s"), F.max_by("at", "order").alias("last"))
        )),
        "aggregate of all rows": ("update", by_sql(root, "SELECT count(*) AS n, sum(amount) AS s FROM (SELECT amount FROM orders)")),
        "sets and lists, the most by structs": ("append", lambda spark: (
            orders(spark).groupBy(tumbling(), "customer").agg(
                F.sort_array(F.collect_set("shop")).alias("shops"),
                F.sort_array(F.collect_set(F.expr("struct(shop, if(amount > 50, CAST('nan' AS DOUBLE), amount % 3 - 0.0D) AS x)"))).alias("pairs"),
                F.size(F.expr("collect_set(array(shop, upper(shop))) FILTER (WHERE amount > 20)")).alias("n"),
                F.max_by(F.struct("order", "at"), F.struct("shop", "amount", "order", "at")).alias("most"),
                F.expr("min_by(order, array(shop, CAST(amount AS STRING), CAST(order AS STRING)))").alias("least"),
            )
        )),
        "windows in update mode": ("update", lambda spark: (
            orders(spark).groupBy(tumbling(), "shop").agg(F.count("*").alias("n"), F.max("amount").alias("most"))
        )),
        "sessions": ("append", lambda spark: (
            orders(spark).groupBy(F.session_window("at", "5 seconds"), "customer")
            .agg(F.count("*").alias("n"), F.sum("amount").alias("s"), F.avg("amount").alias("a"))
        )),
        "sessions in SQL": ("append", by_sql(root, (
            "SELECT session_window.end AS e, upper(shop) AS shop, count(*) * 2 + max(amount) AS x FROM orders "
            "GROUP BY session_window(at, '500 milliseconds'), upper(shop) HAVING count(*) > 1"
        ))),
        "sessions behind a join": ("append", lambda spark: (
            joined(spark).groupBy(F.session_window("at", "5 seconds"), "customer").agg(F.count("*").alias("n"))
        )),
        "sessions of own gaps": ("append", lambda spark: (
            orders(spark).groupBy(
                F.session_window("at", F.when(F.expr("customer % 3 = 0"), "0 seconds").when(F.expr("amount > 80"), "9 seconds").otherwise("300 milliseconds")),
                "shop",
            ).agg(F.count("*").alias("n"), F.sum("amount").alias("s"), F.max_by("order", "at").alias("last"))
        )),
        "sessions of own gaps in SQL": ("append", by_sql(root, (
            "SELECT session_window, customer, count(*) AS n FROM orders "
            "GROUP BY session_window(at, concat(amount % 7 - 1, ' seconds')), customer HAVING count(*) > 1"
        ))),
        "windows of sessions": ("append", lambda spark: (
            orders(spark).groupBy(F.session_window("at", "3 seconds"), "customer").agg(F.count("*").alias("n"))
            .groupBy(F.window(F.window_time("session_window"), "20 seconds")).agg(F.sum("n").alias("n"))
        )),
        "transformWithState": ("update", lambda spark: (
            orders(spark, None).groupBy("customer")
            .transformWithState(Running(), "customer long, n long, total long", "Update", "None")
        )),
        "transformWithState, initial state": ("update", lambda spark: (
            orders(spark, None).groupBy("customer").transformWithState(
                Running(), "customer long, n long, total long", "Update", "None",
                initialState=spark.range(10).selectExpr("id AS customer", "100 AS n").groupBy("customer"))
        )),
        "transformWithState in pandas": ("update", lambda spark: (
            orders(spark, None).groupBy("customer")
            .transformWithStateInPandas(RunningInPandas(), "customer long, n long", "Update", "None")
        )),
        "deduplicate, then transformWithState with timers": ("append", lambda spark: (
            orders(spark).dropDuplicates(["order", "at"]).groupBy("customer")
            .transformWithState(Timed(), "customer long, n long, told long", "Append", "EventTime")
        )),
        "transformWithState with event time, then windows": ("append", lambda spark: (
            orders(spark).groupBy("customer")
            .transformWithState(Dated(), "customer long, t timestamp", "Append", "EventTime", eventTimeColumnName="t")
            .groupBy(F.window("t", "20 seconds")).agg(F.count("*").alias("n"))
        )),
        "applyInPandasWithState": ("update", lambda spark: (
            orders(spark, None).groupBy("customer").applyInPandasWithState(
                counted, "customer long, n long, late boolean", "n long", "Update", "NoTimeout")
        )),
        "applyInPandasWithState with a timeout": ("append", lambda spark: (
            orders(spark).groupBy("customer").applyInPandasWithState(
                timed_out, "customer long, n long, late boolean", "n long", "Append", "EventTimeTimeout")
        )),
        "no state": ("append", lambda spark: orders(spark).where("amount > 50").select("order", F.col("shop").alias("Shop"))),
        "right join": ("append", lambda spark: joined(spark, "right").select("customer", "p.order", "paid", "at")),
        "full join, both sides asked": ("append", lambda spark: (
            joined(spark, "full", f"{near} AND shop = 'a' AND paid % 3 > 0 AND paid <> amount").select("o.order", "amount", "paid")
        )),
        "left join, a number in its condition": ("append", lambda spark: (
            joined(spark, "left", f"{near} AND amount > 20 AND paid <= 70").select("o.order", "amount", "paid")
        )),
        SPARKS_WAY["left join, a number in its condition"]: ("append", lambda spark: (
            joined(spark, "left", f"{near} AND abs(amount) > 20 AND abs(paid) <= 70").select("o.order", "amount", "paid")
        )),
        "left join, also by what is paid": ("append", lambda spark: (
            joined(spark, "left", f"{near} AND (paid > amount OR p.order % 2 = 0 AND NOT paid <=> o.customer) AND abs(amount) < 60")
            .groupBy(tumbling(), "shop").agg(F.count("*").alias("n"), F.sum("paid").alias("paid"))
        )),
        "semi join in SQL": ("append", by_sql(root, (
            "SELECT customer, shop, at FROM orders o LEFT SEMI JOIN payments p ON o.order = p.order AND paid > amount AND "
            "shop <> 'b' AND paid_at BETWEEN at - INTERVAL 5 SECONDS AND at + INTERVAL 12 SECONDS"
        ))),
        "semi join, then windows": ("append", lambda spark: (
            joined(spark, "left_semi").groupBy(tumbling()).agg(F.count("*").alias("n"), F.sum("amount").alias("s"))
        )),
        "a join with one bound": ("append", lambda spark: (
            joined(spark, condition="o.order = p.order AND paid_at >= at - INTERVAL 5 SECONDS").select("at", "paid", "paid_at")
        )),
        "a join of all time": ("append", lambda spark: (
            orders(spark, None).alias("o").join(payments(spark, None).alias("p"), F.expr("o.order = p.order AND paid > amount"))
            .select("customer", "paid")
        )),
        "a join with a clock on one side": ("append", lambda spark: (
            orders(spark, None).alias("o").join(payments(spark).alias("p"), F.expr("o.order = p.order AND paid_at >= at"))
            .select("customer", "paid", "paid_at")
        )),
        "null keys of an inner join": ("append", lambda spark: (
            orders(spark).withColumn("order", F.expr(f"if(order >= {ROWS}, NULL, order)")).alias("o")
            .join(payments(spark).alias("p"), F.expr(near)).groupBy(tumbling(), "customer").agg(F.count("*").alias("n"))
        )),
    }  # fmt: skip


def plain_job(
    root: Path,
    query: Query,
    mode: str,
    into: Batches,
    names: Mapping[str, str] | None = None,
    *,
    allow_unbounded: bool = True,
    **given: Any,
) -> StreamingJob:
    """A job of a query; the rows of each epoch go to `into`."""
    settings = job_settings(**{"parallelism": 2, "local_dir": str(root / "local"), **given})
    job = StreamingJob("plain", store=str(root / "store"), settings=settings)
    job.query(query, output_mode=mode, names=names, allow_unbounded=allow_unbounded).write(
        foreach_epoch(lambda frame, epoch: _keep(frame, into))
    )
    return job


def sparks(spark: SparkSession, root: Path, query: Query, mode: str, into: Batches) -> int:
    """Run a query on Spark's own streaming, from its checkpoint if there is one; returns the late rows that it counts."""
    running = (
        query(spark).writeStream.outputMode(mode).foreachBatch(lambda frame, epoch: _keep(frame, into))
        .option("checkpointLocation", f"file://{root}/checkpoint").trigger(availableNow=True).start()
    )  # fmt: skip
    running.awaitTermination()
    return sum(
        each.get("numRowsDroppedByWatermark", 0)
        for progress in running.recentProgress
        for each in progress["stateOperators"]
    )


def _keep(frame: DataFrame, into: Batches) -> None:
    if rows := sorted(str(tuple(row)) for row in frame.collect()):
        into.append(rows)
