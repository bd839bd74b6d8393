"""Jobs on a Spark that lets nobody in: the public ways give the same, and what is lost is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.functions import current_timestamp, rand

from state_runtime.base.errors import InvalidPipeline, UserCodeError
from state_runtime.base.settings import JobSettings
from state_runtime.pipeline.compile import TransformStep, compile_pipeline
from state_runtime.pipeline.graph import Edge, Graph, SegmentNode, SourceNode
from state_runtime.pipeline.repeatable import cut_by_epochs, unrepeatable_columns
from state_runtime.pipeline.sources import cleans_up, open_sources, unrepeatable_source, unwatched
from state_runtime.spark.arrow import arrow_schema_of, arrow_type, spark_schema_of, spark_type
from state_runtime.spark.frames import PublicFrames
from state_runtime.spark.internals import INTERNALS, Internal
from state_runtime.spark.java_errors import chain_in_text, chain_of
from state_runtime.spark.java_process import log_broken_accumulators, write_no_checksums
from state_runtime.spark.needed_columns import columns_needed
from state_runtime.spark.plans import PlanNode, fits_pattern, has_python, job_watch, plan_of, plan_printed
from state_runtime.spark.prepared import frames_of

from ..refusal import everything_refused
from .jobs import assert_equals_batch, rows_of, two_step_job, windowed_job, write_input
from .test_sources import inbox, of, stateful_streams

pytestmark = pytest.mark.spark

ONCE = {"availableNow": True}


@pytest.fixture
def refused() -> Iterator[None]:
    with everything_refused():
        yield


@pytest.mark.usefixtures("refused")
def test_whole_jobs_run_by_public_ways_alone_and_say_once_what_they_go_without(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two operators in a chain with a restart between, equal to a batch; a window, equal to what it gives by inner ways.

    Each use says so once, however many runs there are."""
    with caplog.at_level(logging.WARNING):
        write_input(tmp_path / "in", 0, 2)
        two_step_job(tmp_path).run(spark, trigger=ONCE)
        write_input(tmp_path / "in", 2, 1)
        two_step_job(tmp_path).run(spark, trigger=ONCE)
    assert_equals_batch(spark, tmp_path)
    told = [r.getMessage() for r in caplog.records if "made in another way inside" in r.getMessage()]
    said = [message.partition(f": Spark {pyspark.__version__}")[0] for message in told]
    assert len(said) == len(set(said))
    asked = {Internal.PLANS, Internal.OPTIMIZED_PLANS, Internal.REBUILT_PLANS, Internal.PREPARED_FRAMES}
    asked |= {Internal.JOB_COUNT, Internal.JAVA_LOG, Internal.JAVA_EXCEPTIONS, Internal.ARROW_TYPES}
    assert {use.value for use in asked} <= set(said)


@pytest.mark.long
def test_a_window_is_the_same_by_public_ways(spark: SparkSession, tmp_path: Path) -> None:
    outputs = []
    for name in ("inner", "public"):
        write_input(tmp_path / name / "in", 0, 4)
        if name == "inner":
            windowed_job(tmp_path / name, parallelism=3).run(spark, trigger=ONCE)
        else:
            with everything_refused():
                windowed_job(tmp_path / name, parallelism=3).run(spark, trigger=ONCE)
        outputs.append(rows_of(spark.read.parquet(str(tmp_path / name / "out"))))
    assert outputs[0] == outputs[1]
    assert outputs[0]


def without_text(node: PlanNode) -> PlanNode:
    return PlanNode(node.kind, node.is_streaming, tuple(map(without_text, node.children)))


def test_a_plan_that_is_printed_is_the_plan(spark: SparkSession, tmp_path: Path) -> None:
    """Node by node, with which of them stream; subqueries have no place in it."""
    table = spark.createDataFrame([("a", 1)], "k string, w int")
    table.createOrReplaceTempView("table_of_keys")
    ticks = inbox(tmp_path, "a", [1])(spark)
    frames = [frame for _, frame, _ in stateful_streams(spark, tmp_path)]
    frames += [ticks.join(table, "k").where("k IN (SELECT k FROM table_of_keys) AND n > 1"), ticks.union(ticks), table]
    for frame in frames:
        assert without_text(plan_printed(frame)) == plan_of(frame)


@pytest.mark.usefixtures("refused")
def test_what_may_not_run_is_refused_by_what_is_printed(spark: SparkSession, tmp_path: Path) -> None:
    """State of Spark's, a source that forgets, and watermarks of which nobody could say what they saw."""
    for what, frame, _ in stateful_streams(spark, tmp_path):
        with pytest.raises(InvalidPipeline, match=f"keeps state, {what}"):
            open_sources(spark, "job", of(frame))
    reader = spark.readStream.format("socket").options(host="localhost", port=9)
    assert unrepeatable_source(reader.load()) == "socket"
    ticks = inbox(tmp_path, "c", [1])(spark)
    marked = ticks.withWatermark("at", "1 second")
    with pytest.raises(InvalidPipeline, match=r"withWatermark\('at', …\) is called on a stream that has"):
        open_sources(spark, "job", of(marked.select("at").withWatermark("at", "2 seconds")))
    for frame in (marked.union(ticks), marked.where("at > timestamp'2024-01-01'")):
        with pytest.raises(InvalidPipeline, match=r"as the last step of read\(\)"):
            open_sources(spark, "job", of(frame))
    opened = open_sources(
        spark, "job", of(ticks.where("n > 0").withWatermark("at", "1 second").select("k", "at"))
    ).inputs[0]
    assert [(column.name, column.node) for column in opened.watermarks] == [("at", None)]


@pytest.mark.usefixtures("refused")
def test_what_cannot_be_known_is_taken_for_the_safer_thing(spark: SparkSession, tmp_path: Path) -> None:
    given = spark.createDataFrame([], "k string, n int")
    marked = inbox(tmp_path, "a", [1])(spark).withWatermark("at", "1 second")
    assert has_python(given)
    assert job_watch(spark)()
    assert columns_needed(given, given, ("k",)) is None
    assert fits_pattern(spark, "x*") is None
    assert not cleans_up(marked)
    assert unwatched(marked, ()) is marked
    assert isinstance(frames_of(spark), PublicFrames)
    write_no_checksums(spark.sparkContext)
    log_broken_accumulators(spark.sparkContext)
    drawn = given.withColumn("draw", rand()).withColumn("at", current_timestamp()).where("k > 'a' AND rand() < 0.5")
    assert unrepeatable_columns(drawn) == ["a condition", "column 'at'", "column 'draw'"]
    assert unrepeatable_columns(given.selectExpr("concat(k, '[', n) AS s").where("n > 1")) == []
    assert cut_by_epochs(given, given.where("n > 1").orderBy("n").limit(3)) == ["limit", "orderBy"]


def test_an_error_is_told_by_its_text_where_java_is_not_asked(spark: SparkSession, refused: None) -> None:
    INTERNALS.refuse(Internal.JAVA_EXCEPTIONS, AttributeError("_origin"))
    with pytest.raises(PySparkException) as told:
        spark.range(1).selectExpr("nowhere")
    (thrown,) = chain_of(told.value)
    assert thrown.kind == "AnalysisException"
    assert thrown.message.startswith("[UNRESOLVED_COLUMN")
    trace = (
        "a.B: outer\n\tat x.Y(Z.scala:1)\nCaused by: java.io.IOException: two\nlines\n\tat x.Y(Z.scala:2)\n\t... 3 more"
    )
    causes = chain_in_text("QueryExecutionException", f"outer\n\nJVM stacktrace:\n{trace}\nCaused by: a.Without")
    assert [(t.kind, t.message) for t in causes] == [
        ("QueryExecutionException", "outer"),
        ("java.io.IOException", "two\nlines"),
        ("a.Without", ""),
    ]


def test_our_table_of_types_is_pysparks(spark: SparkSession) -> None:
    """What is stored does not depend on which of the two was asked."""
    schema = T.StructType.fromDDL(
        "a boolean, b byte, c short, d int, e long, f float, g double, h string, i binary, j date, k timestamp, "
        "l timestamp_ntz, m decimal(12, 3), n interval day to second, o array<struct<p: int, q: array<string>>>, "
        "r map<string, map<int, timestamp>>, s struct<t: void>"
    )
    arrow = arrow_schema_of(schema)
    assert pa.schema(list(arrow_type(schema))).equals(arrow)
    assert spark_type(pa.struct(list(arrow))) == spark_schema_of(arrow)
    for unknown in (lambda: spark_type(pa.month_day_nano_interval()), lambda: arrow_type(T.CalendarIntervalType())):
        with pytest.raises(InvalidPipeline, match="cast the column"):
            unknown()


def test_an_error_of_the_users_code_is_no_refusal(spark: SparkSession, tmp_path: Path) -> None:
    """Only what asks Spark is guarded: a TypeError of a transform would turn off whatever looked at it."""

    def fails(frame: DataFrame) -> DataFrame:
        raise TypeError("no such thing")

    before = set(INTERNALS._refused)
    graph = Graph((SourceNode("", inbox(tmp_path, "a", [1])), SegmentNode((Edge(0),), TransformStep(fails))))
    source = open_sources(spark, "job", graph)
    with pytest.raises(UserCodeError, match="no such thing"):
        compile_pipeline(spark, source, graph, JobSettings())
    assert before == INTERNALS._refused
