"""Jobs on Spark's own sources over restarts: what a source keeps for itself in Spark's checkpoint directory comes back."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import rand, session_window, window

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidData, InvalidPipeline, MissingSource, Unavailable
from state_runtime.driver.epoch_plan import plan_epoch
from state_runtime.pipeline.compile import CompiledPipeline
from state_runtime.pipeline.graph import Graph, SourceNode
from state_runtime.pipeline.source_position import COMPACT_INTERVAL_CONF
from state_runtime.pipeline.sources import (
    OpenedSource,
    cleans_up,
    open_sources,
    unwatched,
    warn_of_files_passed_over,
    warn_of_patterns,
)
from state_runtime.pipeline.watermark import watermark_columns
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import TimeEntry
from state_runtime.spark.frames import PublicFrames
from state_runtime.spark.jvm import analyzed, kinds_in
from state_runtime.store import open_store

from .jobs import Steps, settings, two_step_job, write_input
from .timed import SCHEMA, START, put

pytestmark = pytest.mark.spark

POLICY_CONF: Final = "spark.sql.streaming.multipleWatermarkPolicy"
REDEFINITION_CONF: Final = "spark.sql.streaming.statefulOperator.allowMultiple"
S0: Final = int(START.timestamp()) * 1000


def counting(root: Path, read: Callable[[SparkSession], DataFrame]) -> StreamingJob:
    """The values of a source, counted by their last digit; each batch's counts are written."""
    job = StreamingJob("rate", store=str(root / "store"), settings=settings(root))
    job.read(read).key_by("digit").aggregate(uid="n", n=aggregates.count(), most=aggregates.max("value")).write(
        ParquetSink(str(root / "out")), name="out"
    )
    return job


def run_for(spark: SparkSession, job: StreamingJob, rows: int) -> None:
    """Until that many input rows were counted by this run."""
    seen, enough = 0, threading.Event()

    def count(progress: Progress) -> None:
        nonlocal seen
        seen += progress.input_rows
        if seen >= rows and not enough.is_set():
            enough.set()

    job.run(spark, trigger={"processingTime": "200 milliseconds"}, on_progress=count, stop=enough)
    assert enough.is_set()


RATES = {
    "rate": lambda spark: spark.readStream.format("rate").option("rowsPerSecond", 40).load(),
    "rate-micro-batch": lambda spark: (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 25).option("numPartitions", 2).load()
    ),
}


@pytest.mark.parametrize("source", RATES)
def test_a_source_that_makes_rows_goes_on_where_it_was(spark: SparkSession, tmp_path: Path, source: str) -> None:
    """A rate source counts from its time of creation, which it keeps in Spark's checkpoint directory: without it a second
    run cannot begin. Each value is there once, over both runs."""
    for _ in range(2):
        run_for(spark, counting(tmp_path, lambda s: RATES[source](s).selectExpr("value", "value % 10 AS digit")), 30)
    counts: list[Row] = (
        spark.read.parquet(str(tmp_path / "out")).groupBy("digit").agg({"n": "max", "most": "max"}).collect()
    )
    total, highest = sum(r["max(n)"] for r in counts), max(r["max(most)"] for r in counts)
    assert total == highest + 1 >= 60
    newest = Catalog(open_store(str(tmp_path / "store")), "rate").latest()
    assert newest is not None
    assert newest.source is not None
    assert newest.source.logs == ()
    assert [f.path for f in newest.source.files] == (["0/0"] if source == "rate" else [])


def test_a_source_that_keeps_nothing_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of a socket cannot be read again after a restart."""
    job = counting(
        tmp_path,
        lambda s: (
            s.readStream.format("socket")
            .option("host", "localhost")
            .option("port", 1)
            .load()
            .selectExpr("length(value) AS value", "length(value) % 10 AS digit")
        ),
    )
    with pytest.raises(InvalidPipeline, match="'socket', which keeps nothing of what it has sent"):
        job.run(spark, trigger={"availableNow": True})
    assert not (tmp_path / "store" / "rate").exists()


def test_an_input_file_that_does_not_fit_is_named_and_no_restart_is_tried(spark: SparkSession, tmp_path: Path) -> None:
    """The cause of what Spark raises is the last of its exceptions, and the first thing that the run says."""
    inbox = tmp_path / "in"
    job = counting(tmp_path, lambda s: s.readStream.schema("value long, digit long").parquet(str(inbox)))
    with pytest.raises(MissingSource, match=f"does not exist: {inbox}"):
        job.run(spark, trigger={"availableNow": True})
    inbox.mkdir()
    pq.write_table(pa.table({"value": ["x"], "digit": [1]}), inbox / "a.parquet")
    with pytest.raises(InvalidData, match=r"/in/a\.parquet has column 'value' as BINARY, and .* says bigint"):
        job.run(spark, trigger={"availableNow": True})
    status = Catalog(open_store(str(tmp_path / "store")), "rate").status()
    assert status is not None
    assert status.error_kind == "invalid"
    assert status.message.startswith("InvalidData: the input file file:")


def test_a_scratch_folder_may_have_any_name(spark: SparkSession, tmp_path: Path) -> None:
    """Spark takes it for a path and not for a URI: with an escaped one no job ran, and a second folder was made. Over a
    restart, which lays Spark's files out."""
    home = tmp_path / "scratch"
    for number in range(2):
        write_input(tmp_path / "in", number, 1)
        job = two_step_job(tmp_path, scratch_dir=str(home / "a b é%20#@[x]{y,z}+*?"))
        assert job.run(spark, trigger={"availableNow": True}).epochs > 0
    assert [path.name for path in home.iterdir()] == ["a b é%20#@[x]{y,z}+*?"]


def test_a_source_path_that_is_a_pattern_and_reads_nothing_is_told_once_at_the_start(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark refuses a folder that is not there; of `in[1]`, which is there, it looks for `in1`, and reads nothing."""
    for folder in ("in[1]", "plain"):
        put(tmp_path / folder, 0, [("a", 1, 1)])

    def of(name: str) -> DataFrame:
        return spark.readStream.schema(SCHEMA).parquet(str(tmp_path / name))

    job = StreamingJob("pattern", store=str(tmp_path / "store"), settings=settings(tmp_path))
    job.read(lambda _: of("in[1]").union(of("plain"))).write(ParquetSink(str(tmp_path / "out")), name="out")
    job.run(spark, trigger={"availableNow": True})
    told = [record.getMessage() for record in caplog.records if "for a pattern" in record.getMessage()]
    assert len(told) == 1
    assert not [word for word in (str(tmp_path / "in[1]"), "reads nothing", "rename it") if word not in told[0]]
    caplog.clear()
    for name in ("plain", "pl*n", "{plain,none}", "in?1?"):
        warn_of_patterns(of(name), "j")
    assert not caplog.records
    warn_of_patterns(of("none*"), "j")
    assert "comes later" in caplog.text
    assert cleans_up(spark.readStream.schema(SCHEMA).option("cleanSource", "delete").parquet(str(tmp_path / "plain")))


def test_the_users_interval_of_compaction_is_that_of_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    """Spark computes where compacted files are; laid out for ten, a log cannot be read with another interval."""
    spark.conf.set(COMPACT_INTERVAL_CONF, "3")
    try:
        for first, files in ((0, 5), (5, 2), (7, 4)):
            write_input(tmp_path / "in", first, files)
            assert two_step_job(tmp_path).run(spark, trigger={"availableNow": True}).epochs >= files
    finally:
        spark.conf.unset(COMPACT_INTERVAL_CONF)
    rows = spark.read.parquet(str(tmp_path / "in")).count()
    assert spark.read.parquet(str(tmp_path / "out-steps")).count() == rows


def inbox(folder: Path, name: str, *seconds: Sequence[int]) -> Callable[[SparkSession], DataFrame]:
    """A stream of one file a batch; each row has the second (after `START`) of its event time, and a key of its own."""
    for number, batch in enumerate(seconds):
        put(folder / name, number, [(f"{name}{second}", second, 1) for second in batch])
    path = str(folder / name)
    return lambda spark: spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(path)


def test_the_watermark_of_a_source_is_sparks_whatever_the_source_is_made_of(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Each input counts with its own delay and with the rows that pass its `withWatermark`, batch by batch. A union of a
    stream with one that is an hour behind would otherwise drop the rows of the second as late."""
    fast = inbox(tmp_path, "fast", [7_200, 7_230], [7_260])(spark)
    slow = inbox(tmp_path, "slow", [4_000, 4_020], [4_040])(spark)
    short, long = fast.withWatermark("at", "10 seconds"), slow.withWatermark("at", "1 hour")
    table = spark.createDataFrame([("fast7200", 1)], "k string, w int")
    by_rows = {
        "one": short.selectExpr("k", "at", "n + 1 AS m").where("k <> 'fast7260'"),
        "a union, then a watermark": fast.union(slow).withWatermark("at", "1 minute"),
    }
    by_inputs = {
        "the faster one first": short.union(long),
        "behind a join with a table": long.union(short).join(table, "k"),
        "one has none": short.union(slow),
        "with itself": short.union(short),
        "filtered by its time": short.where("at < timestamp'2024-01-01 02:00:20Z'"),
        "filtered by what is drawn": short.withColumn("r", rand(7)).where("r > 0.5"),
    }
    opened = {name: open_sources(spark, "job", of(frame)).inputs[0] for name, frame in {**by_rows, **by_inputs}.items()}
    asked = {name for name, source in opened.items() if any(column.node is not None for column in source.watermarks)}
    assert asked == set(by_inputs)
    assert {name for name, s in opened.items() if unwatched(s.frame, s.watermarks) is s.frame} == asked
    for name in ("behind a join with a table", "one has none", "filtered by its time"):
        ours, theirs = both_watermarks(opened[name], "min")
        assert ours == theirs, name
        assert ours[-1] > 0, name
    spark.conf.set(POLICY_CONF, "max")
    try:
        both = both_watermarks(opened["the faster one first"], "max")
    finally:
        spark.conf.unset(POLICY_CONF)
    assert both == ([0, S0 + 7_220_000],) * 2


def of(frame: DataFrame) -> Graph:
    return Graph((SourceNode("", frame),))


def both_watermarks(opened: OpenedSource, policy: Literal["min", "max"]) -> tuple[list[int], list[int]]:
    """Of each batch of a source: ours, and what Spark says of the same batch."""
    pipeline, ours = CompiledPipeline((), watermarks=opened.watermarks, graph=of(opened.frame)), []
    clocks = pipeline.clocks(policy)
    time: TimeEntry | None = None

    def epoch(batch: DataFrame, number: int) -> None:
        nonlocal time
        time = clocks.advanced(time, number)
        ours.append(time.watermark_ms)
        made = plan_epoch(
            batch, pipeline, 1, frames=PublicFrames, task=no_task, wake={}, beginning=frozenset(), is_batch=True
        )
        made.run()
        time = clocks.observed(time, made.event_time_ms())

    query = opened.frame.writeStream.foreachBatch(epoch).trigger(availableNow=True).start()
    query.awaitTermination()
    theirs = [dt.datetime.fromisoformat(p.eventTime["watermark"]) for p in query.recentProgress]
    return ours, [int(at.timestamp()) * 1000 for at in theirs]


def no_task(stage: object, number: int) -> Any:
    raise AssertionError((stage, number))


def test_rows_of_a_slower_input_are_not_late_and_the_snapshot_says_how_far_each_has_come(
    spark: SparkSession, tmp_path: Path
) -> None:
    """So the next run goes by the slower one too. The third batch would be late by the faster input's watermark."""
    fast = inbox(tmp_path, "fast", [7_200], [7_230], [7_260])(spark).withWatermark("at", "10 seconds")
    slow = inbox(tmp_path, "slow", [0, 20], [30], [4_400])(spark).withWatermark("at", "1 hour")
    job = StreamingJob("union", store=str(tmp_path / "store"), settings=settings(tmp_path))
    job.read(fast.union(slow)).key_by("k").window(
        windows.tumbling("10 minutes"), uid="w", output_mode="append", n=aggregates.count()
    ).write(ParquetSink(str(tmp_path / "out")), name="out")
    progress: list[Progress] = []
    job.run(spark, trigger={"availableNow": True}, on_progress=progress.append)
    assert sum(p.late_rows for p in progress) == 0
    newest = Catalog(open_store(str(tmp_path / "store")), "union").latest()
    assert newest is not None
    assert newest.time is not None
    assert newest.time.event_time_ms == {"input 1.at": S0 + 7_260_000, "input 2.at": S0 + 4_400_000}
    assert newest.time.watermark_ms == S0 + 800_000
    counted = spark.read.parquet(str(tmp_path / "out")).select("k").collect()
    # The window that ends before the watermark.
    assert sorted(row.k for row in counted) == ["slow0", "slow20", "slow30"]


def test_a_watermark_upon_another_one_is_refused_as_spark_refuses_it(spark: SparkSession, tmp_path: Path) -> None:
    """Spark says so at the end of its first batch."""
    marked = inbox(tmp_path, "a", [1])(spark).withWatermark("at", "1 second")
    for frame in (marked.withWatermark("at", "2 seconds"), marked.union(marked).withWatermark("at", "2 seconds")):
        with pytest.raises(
            InvalidPipeline, match=r"withWatermark\('at', …\) is called on a stream that has a watermark"
        ):
            open_sources(spark, "job", of(frame))
    spark.conf.set(REDEFINITION_CONF, "false")
    try:
        assert len(open_sources(spark, "job", of(marked.withWatermark("at", "2 seconds"))).watermarks) == 2
    finally:
        spark.conf.unset(REDEFINITION_CONF)


def test_nothing_observes_event_times_for_a_watermark_that_nobody_waits_for(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The epoch observes them itself. The runtime has read the delays of the columns by then."""
    events = spark.readStream.schema("k string, at timestamp, on timestamp").parquet(str(tmp_path))
    left = events.where("k = 'a'").withWatermark("at", "1 second").select("k", "at")
    right = events.where("k = 'b'").withWatermark("on", "2 seconds").selectExpr("k", "on AS at")
    for frame in (left, left.where("k > ''"), left.union(right)):
        plain = unwatched(frame, watermark_columns(frame.schema))
        assert plain.isStreaming
        assert plain.dtypes == frame.dtypes
        assert "EventTimeWatermark" in kinds_in(analyzed(frame))
        assert kinds_in(analyzed(plain)) == kinds_in(analyzed(frame)) - {"EventTimeWatermark"}


def stateful_streams(spark: SparkSession, tmp_path: Path) -> list[tuple[str, DataFrame, str]]:
    """What Spark calls it, a stream that it keeps state for, and the operator of ours that stands for it."""
    ticks = inbox(tmp_path, "a", [1])(spark).withWatermark("at", "1 second")
    others = inbox(tmp_path, "b", [1])(spark).withWatermark("at", "1 second").selectExpr("k AS key", "at AS on")
    wanted = (ticks.k == others.key) & (ticks["at"] == others["on"])

    def count(key: Any, frames: Any, state: Any) -> Any:
        return frames

    by_state = ticks.groupBy("k").applyInPandasWithState(count, "n long", "n long", "update", "NoTimeout")
    by_processor = ticks.groupBy("k").transformWithState(Steps(), "k string, n long", "Update", "None")
    return [
        ("groupBy", ticks.groupBy("k").count(), "aggregate"),
        ("groupBy", ticks.groupBy(window("at", "1 minute")).count().where("count > 1"), "window"),
        ("groupBy", ticks.groupBy(session_window("at", "1 minute")).count(), "window"),
        ("dropDuplicates", ticks.distinct(), "deduplicate"),
        ("dropDuplicates", ticks.dropDuplicates(["k"]), "deduplicate"),
        ("dropDuplicatesWithinWatermark", ticks.dropDuplicatesWithinWatermark(["k"]), "within_watermark=True"),
        ("applyInPandasWithState", by_state, "transform_with_state_in_pandas"),
        ("transformWithState", by_processor, "transform_with_state"),
        ("limit", ticks.limit(3), "processor"),
        ("a join of two streams", ticks.join(others, wanted), "interval_join"),
        ("intersect", ticks.select("k").intersect(others.select("key")), "interval_join"),
        ("groupBy", ticks.select("k").union(ticks.groupBy("k").count().select("k")), "aggregate"),
    ]


def test_a_stream_that_spark_keeps_state_for_is_refused_with_the_operator_to_use(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The state would lie in Spark's scratch: the first run went well, and no restart came up."""
    for what, frame, instead in stateful_streams(spark, tmp_path):
        with pytest.raises(InvalidPipeline, match=f"keeps state, {what}") as told:
            open_sources(spark, "job", of(frame))
        assert instead in str(told.value).partition("behind read()")[2], what


def test_tables_that_a_stream_is_joined_with_may_be_made_in_any_way(spark: SparkSession, tmp_path: Path) -> None:
    """Spark keeps no state for what does not stream."""
    ticks = inbox(tmp_path, "a", [1])(spark)
    table = spark.createDataFrame([("a", 1)], "k string, w int").groupBy("k").agg({"w": "max"}).distinct().limit(3)
    table.createOrReplaceTempView("table_of_keys")
    for frame in (ticks.join(table, "k"), ticks.where("k IN (SELECT k FROM table_of_keys)")):
        assert open_sources(spark, "job", of(frame)).inputs[0].frame is frame


AGED: Final = "maxFileAge"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ""),
        ({"maxFileAge": "2h"}, "maxFileAge (2h)"),
        ({"maxfileage": "2h", "maxFilesPerTrigger": 1}, "maxFileAge (2h)"),
        ({"latestFirst": True}, "maxFileAge (7d)"),
        ({"latestFirst": True, "maxFileAge": "2h", "maxFilesPerTrigger": 1}, ""),
        ({"latestFirst": True, "maxBytesPerTrigger": 1000}, ""),
        ({"maxFilesPerTrigger": 1}, ""),
    ],
)
def test_a_source_that_may_pass_over_old_files_is_told_at_the_start(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], told: str
) -> None:
    """Spark says nothing of files that `maxFileAge` passes over, and goes by no age if it takes the latest ones first
    and some at a time. Of `latestFirst` alone its own warning says that it ignores the age, and it does not."""
    put(tmp_path / "in", 0, [("a", 1, 1)])
    warn_of_files_passed_over(spark.readStream.schema(SCHEMA).options(**options).parquet(str(tmp_path / "in")), "j")
    assert [told in record.getMessage() and AGED in record.getMessage() for record in caplog.records] == [True] * bool(
        told
    )


def test_spark_passes_over_old_files_as_the_warning_says(spark: SparkSession, tmp_path: Path) -> None:
    """What Spark does, so that the warning stays true: the age is that beyond the newest file that was read."""

    def job(**options: Any) -> StreamingJob:
        made = StreamingJob("aged", store=str(tmp_path / "store"), settings=settings(tmp_path))
        read = spark.readStream.schema(SCHEMA).options(**options)
        made.read(lambda _: read.parquet(str(tmp_path / "in"))).write(ParquetSink(str(tmp_path / "out")), name="out")
        return made

    put(tmp_path / "in", 10_000, [("new", 1, 1)])
    job(latestFirst=True, maxFileAge="1h").run(spark, trigger={"availableNow": True})
    put(tmp_path / "in", 0, [("old", 1, 1)])  # 10,000 s older
    job(latestFirst=True, maxFileAge="1h").run(spark, trigger={"availableNow": True})
    assert [row.k for row in spark.read.parquet(str(tmp_path / "out")).collect()] == ["new"]
    job(latestFirst=True, maxFileAge="1h", maxFilesPerTrigger=1).run(spark, trigger={"availableNow": True})
    assert sorted(row.k for row in spark.read.parquet(str(tmp_path / "out")).collect()) == ["new", "old"]


def test_a_listed_file_that_vanished_is_told_in_the_log_or_ends_the_run_typed(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark lists, then plans, then reads. With `ignoreMissingFiles` rows of a file that vanished are fewer without a
    word; without it, a file that is gone when its batch is planned is passed over all the same."""

    def run(name: str, *, ignore: bool, at_planning: bool, tolerable_failures: int = 5) -> list[str]:
        folder = tmp_path / name
        for number in range(6):
            put(folder / "in", number, [(f"k{number}", number, 1)])

        def remove(number: int) -> None:
            (folder / "in" / f"{number:04d}.parquet").unlink(missing_ok=True)

        has_begun = threading.Event()

        def before_reading(frame: DataFrame) -> DataFrame:
            if has_begun.is_set() and not at_planning:
                remove(1)
            return frame

        def between_epochs(progress: Progress) -> None:
            has_begun.set()
            if at_planning:
                remove(3)

        read = spark.readStream.schema(SCHEMA).options(maxFilesPerTrigger=1, ignoreMissingFiles=ignore)
        given = settings(folder, tolerable_failures=tolerable_failures)
        job = StreamingJob(name, store=str(folder / "store"), settings=given)
        rows = job.read(lambda _: read.parquet(str(folder / "in"))).transform(before_reading, every_epoch=True)
        rows.write(ParquetSink(str(folder / "out")), name="out")
        job.run(spark, trigger={"availableNow": True}, on_progress=between_epochs)
        return sorted(row.k for row in spark.read.parquet(str(folder / "out")).collect())

    assert run("ignored", ignore=True, at_planning=False) == ["k0", "k2", "k3", "k4", "k5"]
    assert "ignoreMissingFiles is on for the source" in caplog.text
    told = [r.getMessage() for r in caplog.records if "Skipped missing file" in r.getMessage()]
    assert len(told) == 1, caplog.text
    assert "in/0001.parquet" in told[0]
    assert "rows of this file were passed over" in told[0]
    caplog.clear()

    assert run("planned", ignore=False, at_planning=True) == ["k0", "k1", "k2", "k4", "k5"]
    told = [
        r.getMessage() for r in caplog.records if "0003.parquet" in r.getMessage() and "passed over" in r.getMessage()
    ]
    assert len(told) == 1, caplog.text
    assert "ignoreMissingFiles" not in caplog.text

    with pytest.raises(Unavailable, match=r"in/0001\.parquet was removed after Spark had listed it"):
        run("refused", ignore=False, at_planning=False, tolerable_failures=1)
