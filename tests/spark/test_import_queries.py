"""A plain query that stops on Spark and goes on here by `job.query` of the same code, with its state: from there its rows
are those that Spark gives from the same checkpoint, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.importing.native import import_checkpoint

from . import native
from .plain_queries import ONCE, Batches, Query, plain_job, queries, sparks, stream, timed_out, write_rows
from .test_queries import sums, without_repeats

pytestmark = pytest.mark.spark

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "3",
    PROVIDER: native.ROCKSDB,
    # State stores of Spark need the checksum file system that our session replaces.
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}


@pytest.fixture(autouse=True)
def settings_of_queries(spark: SparkSession) -> Iterator[None]:
    yield from _with(spark, SETTINGS)
    for view in ("orders", "payments"):
        spark.catalog.dropTempView(view)


def _with(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def own_queries(root: Path) -> dict[str, tuple[str, Query]]:
    """Those that an import is about, beside those of `plain_queries`."""

    def functions(spark: SparkSession) -> DataFrame:
        amount = F.col("amount")
        calls = [
            F.count("*"), F.count("shop"), F.sum("amount"), F.sum(amount.cast("decimal(10,2)")), F.avg("amount"),
            F.min("shop"), F.max("at"), F.first("order", ignorenulls=True), F.last("shop", ignorenulls=True),
            F.max_by("order", "at"), F.min_by("shop", "at"), F.round(F.stddev("amount"), 9), F.round(F.var_pop("amount"), 9),
            F.bool_or(amount > 50), F.every(amount > 50), F.approx_count_distinct("order", 0.2),
            F.sum(amount.cast("double")), F.avg(amount.cast("double")),
            F.min(F.when(amount > 90, F.lit(float("nan"))).otherwise(amount.cast("double"))),
        ]  # fmt: skip
        called = [call.alias(f"f{number}") for number, call in enumerate(calls)]
        return (
            stream(spark, root, "orders")
            .groupBy(F.window("at", "20 seconds"), F.upper("shop").alias("s"), (F.col("customer") % 3).alias("c"))
            .agg(*called)
        )

    def top(spark: SparkSession) -> DataFrame:
        grouped = stream(spark, root, "orders").groupBy(F.window("at", "10 seconds"), "shop")
        return grouped.agg(F.sum("amount").alias("a"), F.count("*").alias("n")).orderBy("window", "shop").limit(5)

    def sessions(spark: SparkSession) -> DataFrame:
        by = F.session_window("at", "2 seconds"), F.col("customer")
        return stream(spark, root, "orders").groupBy(*by).agg(F.count("*").alias("n"))

    def patient(spark: SparkSession) -> DataFrame:
        # In the input each customer has rows in each file: of some of them later rows are left out.
        rows = stream(spark, root, "orders").where("order < 180 OR customer > 5")
        waits = partial(timed_out, after_ms=15_000)
        schema = "customer long, n long, late boolean"
        return rows.groupBy("customer").applyInPandasWithState(waits, schema, "n long", "Append", "EventTimeTimeout")

    return {
        "functions": ("append", functions),
        "applyInPandasWithState, patient": ("append", patient),
        "a table, sorted and cut": ("complete", top),
        "a table of sessions": ("complete", sessions),
    }


IN_EACH_RUN = ["windowed count"]
LONG = [
    "functions",
    "a table, sorted and cut",
    "a table of sessions",
    "sliding window in SQL",
    "windows of windows",
    "windows in update mode",
    "keys of event time itself",
    "generated rows",
    "aggregate",
    "aggregate of all rows",
    "distinct",
    "dropDuplicates by event time",
    "dropDuplicates by a key without time",
    "dropDuplicatesWithinWatermark",
    "deduplicate windows",
    "deduplicate, Python, a table, windows",
    "union of two streams, then windows",
    "a slower watermark beside",
    "deduplicate, then transformWithState with timers",
    "sessions",
    "sessions in SQL",
    "applyInPandasWithState",
    "applyInPandasWithState, patient",
    "join",
    "join, then windows",
    "windows joined on equal windows",
    "left join",
    "right join",
    "full join, both sides asked",
    "left join, also by what is paid",
    "semi join, then windows",
    "a join with one bound",
    "a join of all time",
    "sessions of own gaps",
    "windows of sessions",
]


@pytest.mark.parametrize("name", IN_EACH_RUN)
def test_a_query_goes_on_here_with_the_rows_that_spark_would_give(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    check_goes_on(spark, tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_every_query_goes_on_here_with_the_rows_that_spark_would_give(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    check_goes_on(spark, tmp_path, name)


def check_goes_on(spark: SparkSession, root: Path, name: str) -> None:
    """Late rows, nulls and open windows are in the input; the job has other shards than the query."""
    mode, query = {**queries(root), **own_queries(root)}[name]
    late = 0.4 if name == "dropDuplicates by a key without time" else 0.05
    write_rows(root, range(3), late=late)
    sparks(spark, root, query, mode, [])
    ours: Batches = []
    theirs: Batches = []
    job = plain_job(root, query, mode, ours, parallelism=2)
    result = import_checkpoint(spark, f"{root}/checkpoint", job, f"{root}/store/plain")
    assert result.rows > 0
    write_rows(root, range(3, 6), late=late)
    plain_job(root, query, mode, ours, parallelism=2).run(spark, trigger=ONCE)
    sparks(spark, root, query, mode, theirs)
    assert ours == (theirs if name != "aggregate of all rows" else without_repeats(theirs))
    assert ours


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("functions", PROVIDER, HDFS),
        ("dropDuplicatesWithinWatermark", PROVIDER, HDFS),
        ("left join", PROVIDER, HDFS),
        ("left join", "spark.sql.streaming.join.stateFormatVersion", "3"),
        ("functions", "spark.sql.streaming.aggregation.stateFormatVersion", "1"),
    ],
)
def test_other_providers_and_forms_of_state_are_read_as_well(
    spark: SparkSession, tmp_path: Path, name: str, setting: str, value: str
) -> None:
    with contextmanager(_with)(spark, {setting: value}):
        check_goes_on(spark, tmp_path, name)


def test_another_query_is_refused_and_nothing_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """A state that is taken for another one is wrong without a word."""
    write_rows(tmp_path, range(2))
    sparks(spark, tmp_path, sums(tmp_path, "sum(amount) AS s"), "append", [])

    def deduplicated(spark: SparkSession) -> DataFrame:
        return stream(spark, tmp_path, "orders").dropDuplicates(["order", "at"])

    def twice(spark: SparkSession) -> DataFrame:
        counts = sums(tmp_path, "sum(amount) AS s")(spark)
        return counts.groupBy(F.window(F.window_time("window"), "20 seconds")).agg(F.max("s").alias("m"))

    refused: dict[str, Query] = {
        r"columns \(sum bigint\) in the checkpoint, and \(max bigint\)": sums(tmp_path, "max(amount) AS s"),
        r"and \(sum bigint, count bigint\)": sums(tmp_path, "sum(amount) AS s", "count(*) AS n"),
        "its key has the columns .*k bigint.* and .*k string": sums(tmp_path, "sum(amount) AS s", key="shop"),
        "windows of 10 s in the checkpoint, and .* 20 s": sums(tmp_path, "sum(amount) AS s", window="20 seconds"),
        "in the job it is a dropDuplicates": deduplicated,
        "the job has an aggregation .* that the query .* does not have": twice,
    }
    for message, query in refused.items():
        job = plain_job(tmp_path, query, "append", [])
        with pytest.raises(InvalidConfiguration, match=message):
            import_checkpoint(spark, f"{tmp_path}/checkpoint", job, f"{tmp_path}/store/plain")
        assert not (tmp_path / "store" / "plain").exists()
    policy = {"spark.sql.streaming.multipleWatermarkPolicy": "max"}
    job = plain_job(tmp_path, sums(tmp_path, "sum(amount) AS s"), "append", [])
    with contextmanager(_with)(spark, policy), pytest.raises(InvalidConfiguration, match="Set it to min here"):
        import_checkpoint(spark, f"{tmp_path}/checkpoint", job, f"{tmp_path}/store/plain")


@pytest.mark.long
@pytest.mark.parametrize("function", ["collect_set", "collect_list"])
def test_what_spark_keeps_in_a_buffer_of_its_own_is_refused_by_name(
    spark: SparkSession, tmp_path: Path, function: str
) -> None:
    query = sums(tmp_path, "count(*) AS n", f"{function}(shop) AS shops")
    write_rows(tmp_path, range(1))
    sparks(spark, tmp_path, query, "append", [])
    with pytest.raises(
        InvalidConfiguration, match=rf"{function[:7]}.*\(orders.shop\) cannot be made of what Spark keeps"
    ):
        import_checkpoint(
            spark, f"{tmp_path}/checkpoint", plain_job(tmp_path, query, "append", []), f"{tmp_path}/store/plain"
        )
    assert not (tmp_path / "store" / "plain").exists()


def joined_by(root: Path, key: str, *, form: str = "paid > 0") -> Query:
    def query(spark: SparkSession) -> DataFrame:
        orders, payments = stream(spark, root, "orders").alias("o"), stream(spark, root, "payments").alias("p")
        near = f"{key} AND paid_at BETWEEN at AND at + INTERVAL 10 SECONDS AND {form}"
        return orders.join(payments, F.expr(near)).selectExpr(
            "o.order", "customer", "amount", "p.order AS of", "paid", "at"
        )

    return query


def test_a_join_by_other_keys_or_of_other_columns_is_refused_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Stored rows have met those of their key; under another one they would never meet what came before."""
    write_rows(tmp_path, range(2))
    sparks(spark, tmp_path, joined_by(tmp_path, "o.order = p.order"), "append", [])
    refused = {
        "kept by other keys in the checkpoint": joined_by(tmp_path, "o.amount = p.order"),
        "has 1 key columns in the checkpoint, and 2": joined_by(tmp_path, "o.order = p.order AND o.amount = p.paid"),
        r"its left side has the columns \(.*\) in the checkpoint, and \(.*shop": joined_by(
            tmp_path, "o.order = p.order", form="length(concat(shop, string(paid))) > 0"
        ),
    }
    for message, query in refused.items():
        job = plain_job(tmp_path, query, "append", [])
        with pytest.raises(InvalidConfiguration, match=message):
            import_checkpoint(spark, f"{tmp_path}/checkpoint", job, f"{tmp_path}/store/plain")
        assert not (tmp_path / "store" / "plain").exists()


@pytest.mark.long
def test_a_form_of_a_joins_state_that_is_not_known_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_rows(tmp_path, range(2))
    query = joined_by(tmp_path, "o.order = p.order")
    with contextmanager(_with)(spark, {"spark.sql.streaming.join.stateFormatVersion": "4"}):
        sparks(spark, tmp_path, query, "append", [])
    with pytest.raises(InvalidData, match="in the forms 2 and 3 of"):
        import_checkpoint(
            spark, f"{tmp_path}/checkpoint", plain_job(tmp_path, query, "append", []), f"{tmp_path}/store/plain"
        )
