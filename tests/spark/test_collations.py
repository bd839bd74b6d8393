"""Text with a collation is refused when the job is built, as Spark's streaming refuses it for keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from state_runtime import JobSettings, StreamingJob, VectorizedProcessor, aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.collations import refuse_collations
from state_runtime.pipeline.compile import CompiledPipeline, compile_pipeline
from state_runtime.pipeline.sources import OpenedSource, OpenedSources
from state_runtime.pipeline.watermark import DELAY_METADATA, watermark_columns

pytestmark = pytest.mark.spark

LCASE = "STRING COLLATE UTF8_LCASE"


class Names(StatefulProcessor):
    """Has a map by name, whose key is of the given type."""

    def __init__(self, key: str) -> None:
        self.key = key

    def init(self, handle: StatefulProcessorHandle) -> None:
        handle.getMapState("names", f"name {self.key}", f"last {LCASE}")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield from ()

    def close(self) -> None:
        pass


class Passing(VectorizedProcessor):
    def states(self) -> dict[str, Any]:
        return {"s": "n long"}

    def process(self, batch: Any) -> None:
        return None


def processed(stream: Any, *, key: str = "string", output: str = "n long", initial: DataFrame | None = None) -> Any:
    keyed = stream.transform(lambda rows: rows.select("k", "n")).key_by("k")
    return keyed.transform_with_state(Names(key), output, uid="op", initial_state=initial)


WAYS: dict[str, Callable[[Any], Any]] = {
    "key": lambda s: s.key_by("name").aggregate(uid="op", n=aggregates.count()),
    "struct in a key": lambda s: s.key_by("nested").aggregate(uid="op", n=aggregates.count()),
    "array in a key": lambda s: s.key_by("listed").deduplicate(uid="op"),
    "window": lambda s: s.key_by("name").window(windows.tumbling("1 minute"), uid="op", n=aggregates.count()),
    "session": lambda s: s.key_by("name").window(
        windows.session("1 minute"), uid="op", output_mode="append", n=aggregates.count()
    ),
    "deduplicate": lambda s: s.key_by("name").deduplicate(uid="op"),
    "latest": lambda s: s.key_by("k").latest_by("name", "n", uid="op"),
    "value of latest": lambda s: s.key_by("k").latest_by("n", "name", uid="op"),
    "vectorized": lambda s: s.key_by("name").process(Passing(), uid="op", output_schema="n long"),
    **{
        name: lambda s, a=aggregate: s.key_by("k").aggregate(uid="op", a=a)
        for name, aggregate in {
            "min": aggregates.min("name"),
            "max": aggregates.max("name"),
            "distinct": aggregates.count_distinct("name"),
            "set": aggregates.collect_set("nested"),
            "sketch": aggregates.count_distinct_approx("name"),
            "top": aggregates.top_n("name", 2),
            "top by": aggregates.top_n("n", 2, by="name"),
            "bottom of structs": aggregates.bottom_n("nested", 2, by="n"),
            "max by": aggregates.max_by("n", by="name"),
            "max by a struct": aggregates.max_by("n", by="nested"),
            "min by a condition": aggregates.min_by("n", by="name").where("n > 1"),
            "kept": aggregates.last("name"),
        }.items()
    },
}  # fmt: skip


def compiled(spark: SparkSession, tmp_path: Path, build: Callable[[Any], Any]) -> CompiledPipeline:
    frame = spark.sql(
        f"SELECT CAST('A' AS {LCASE}) AS name, 'k' AS k, 1L AS n, struct(CAST('A' AS {LCASE}) AS x) AS nested, "
        f"array(CAST('A' AS {LCASE})) AS listed, timestamp'2026-01-01' AS at"
    )
    marked = [
        T.StructField(f.name, f.dataType, True, {DELAY_METADATA: 0} if f.name == "at" else {}) for f in frame.schema
    ]
    schema = T.StructType(marked)
    job = StreamingJob("collated", store=str(tmp_path / "store"))
    build(job.read(lambda _: None))  # type: ignore[arg-type, return-value]
    opened = OpenedSource(spark.createDataFrame([], schema), watermark_columns(schema))
    return compile_pipeline(spark, OpenedSources.of_one(opened), job.plan().graph, JobSettings())


@pytest.mark.parametrize("way", WAYS)
def test_text_with_a_collation_is_refused_wherever_an_operator_reads_it(
    spark: SparkSession, tmp_path: Path, way: str
) -> None:
    """By their bytes `A` and `a` are two groups where Spark's batch query has one, and another text is the greatest."""
    with pytest.raises(
        InvalidPipeline,
        match=r"operator 'op': column '(name|nested|listed|CASE WHEN .* THEN `name` END)' has the collation UTF8_LCASE",
    ):
        compiled(spark, tmp_path, WAYS[way])
    # The way out that the message names.
    types = {"name": "STRING", "nested": "STRUCT<x: STRING>", "listed": "ARRAY<STRING>"}
    plain = ["k", "n", "at", *(f"CAST({name} AS {kind}) AS {name}" for name, kind in types.items())]
    compiled(spark, tmp_path, lambda s: WAYS[way](s.transform(lambda rows: rows.selectExpr(*plain))))


def test_what_user_code_declares_is_looked_at_where_it_is_compared_or_emitted(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A state's values are given back as they were: they may have a collation, as in Spark."""
    compiled(spark, tmp_path, processed)
    initial = spark.sql(f"SELECT CAST('A' AS {LCASE}) AS k, 1L AS n")
    for refused, where in (
        (lambda s: processed(s, key=LCASE), "the map key of state 'names' of operator 'op': column 'name'"),
        (lambda s: processed(s, output=f"name {LCASE}"), "the output of operator 'op': column 'name'"),
        (lambda s: processed(s, initial=initial), "operator 'op': initial_state: column 'k'"),
    ):
        with pytest.raises(InvalidPipeline, match=where):
            compiled(spark, tmp_path, refused)


def test_both_sides_of_a_join_are_looked_at(spark: SparkSession, tmp_path: Path) -> None:
    """Their rows are kept whole."""
    for left, right, which in ((LCASE, "STRING", "left"), ("STRING", LCASE, "right")):
        sides = [
            spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
            .selectExpr(f"CAST(value AS {kind}) AS {name}", f"timestamp AS {name}_at")
            .withWatermark(f"{name}_at", "1 second")
            for kind, name in ((left, "l"), (right, "r"))
        ]  # fmt: skip
        job = StreamingJob("joined", store=str(tmp_path / "store"))
        keyed = job.read(sides[0]).key_by("l")
        keyed.interval_join(sides[1], right_keys=("r",), lower="0 seconds", upper="1 second", uid="op")
        plan = job.plan()
        with pytest.raises(
            InvalidPipeline, match=f"the {which} stream of the join: column '{which[0]}' has the collation"
        ):
            plan.compiled(spark, plan.opened_sources(spark))


def test_what_is_refused_is_what_spark_refuses_to_compare_by_bytes(spark: SparkSession) -> None:
    """Its own check of state's keys (STATE_STORE_UNSUPPORTED_OPERATION_BINARY_INEQUALITY)."""
    types = [
        "STRING",
        "BINARY",
        "STRING COLLATE UTF8_BINARY",
        LCASE,
        "STRING COLLATE UNICODE",
        "STRING COLLATE UTF8_BINARY_RTRIM",
    ]
    types += [
        f"{nest}<{inner}{kind}>"
        for kind in types[2:4]
        for nest, inner in (("ARRAY", ""), ("STRUCT", "x: "), ("MAP", "INT, "))
    ]
    frame = spark.sql("SELECT " + ", ".join(f"CAST(NULL AS {kind}) AS c{number}" for number, kind in enumerate(types)))
    stable = spark._jvm.org.apache.spark.sql.catalyst.util.UnsafeRowUtils.isBinaryStable  # type: ignore[union-attr]
    for field, java_field in zip(frame.schema, frame._jdf.schema().fields(), strict=True):
        try:
            refuse_collations(T.StructType([field]), "here")
        except InvalidPipeline:
            assert not stable(java_field.dataType())
        else:
            assert stable(java_field.dataType())
