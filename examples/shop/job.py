"""The shop's job: what was paid in time, what each shop sells, and customers who order very much at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stillstate import DeltaSink, JobContext, KafkaSink, SqlSink, StreamingJob, aggregates, sources, windows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDER = "order LONG, customer LONG, shop INT, amount LONG, at TIMESTAMP"
PAYMENT = "paid_order LONG, method STRING, paid_at TIMESTAMP"
LATE = "30 minutes"
ORDERS_MIN = 8


def build(context: JobContext) -> StreamingJob:
    """Orders and payments in; paid orders into a Delta table, totals into PostgreSQL, alerts into Kafka."""
    servers, per_batch = os.environ["SHOP_KAFKA"], int(context.options["rows_per_batch"])

    def topic(spark: SparkSession, name: str, columns: str, at: str) -> DataFrame:
        source = sources.kafka(
            name, bootstrap_servers=servers, starting="earliest", max_offsets_per_trigger=per_batch // 2
        )
        content = source.load(spark).selectExpr(f"from_json(CAST(value AS STRING), '{columns}') AS c").select("c.*")
        return content.withWatermark(at, LATE)

    job = context.job()
    orders = job.read(lambda spark: topic(spark, "orders", ORDER, "at"), name="orders")
    payments = job.read(lambda spark: topic(spark, "payments", PAYMENT, "paid_at"), name="payments")

    paid = orders.key_by("order").interval_join(
        payments.key_by("paid_order"), lower="0 seconds", upper="10 minutes", uid="paid"
    )
    paid.write(DeltaSink(context.options["lake"]), name="paid")

    totals = orders.key_by("shop").aggregate(uid="totals", orders=aggregates.count(), sales=aggregates.sum("amount"))
    totals.write(SqlSink("shop_totals", dsn_env="SHOP_DATABASE", merge_on=["shop"]), name="totals")

    visits = orders.key_by("customer").window(
        windows.session("30 seconds"), uid="visits", output_mode="append", orders=aggregates.count()
    )
    alerts = visits.transform(
        lambda df: df.where(f"orders >= {ORDERS_MIN}").selectExpr("customer", "window.start AS began", "orders")
    )
    alerts.write(KafkaSink("alerts", bootstrap_servers=servers, key="customer"), name="alerts")
    return job
