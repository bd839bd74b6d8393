"""What goes by event time needs a column that has it, in the place where it looks for it, and says where one comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from state_runtime import StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.watermark import DELAY_METADATA

from .seeded import Keeps
from .timed import TimedJob

pytestmark = pytest.mark.spark


def ticks(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()


def refused(spark: SparkSession, tmp_path: Path, build: Callable[[StreamingJob], Any]) -> str:
    job = StreamingJob("timeless", store=str(tmp_path / "store"))
    build(job)
    plan = job.plan()
    with pytest.raises(InvalidPipeline) as told:
        plan.compiled(spark, plan.opened_sources(spark))
    return str(told.value)


def windowed(stream: Any) -> Any:
    return stream.window(windows.tumbling("1 minute"), uid="per-minute", n=aggregates.count())


def test_a_stream_without_a_watermark_is_told_of_with_watermark(spark: SparkSession, tmp_path: Path) -> None:
    message = refused(spark, tmp_path, lambda job: windowed(job.read(ticks).key_by("value")))
    assert message.startswith(
        "operator 'per-minute': windows need a column with event time; call Spark's withWatermark"
    )
    # The line of the step, in `windowed`.
    assert f" ({__file__}, line {windowed.__code__.co_firstlineno + 1})" in message


def test_behind_a_join_the_reason_is_the_join(spark: SparkSession, tmp_path: Path) -> None:
    """Both sides have a watermark: to call it once more would not help."""

    def build(job: StreamingJob) -> None:
        left = ticks(spark).withWatermark("timestamp", "1 second")
        right = ticks(spark).selectExpr("value AS id", "timestamp AS at").withWatermark("at", "1 second")
        joined = job.read(left).key_by("value").interval_join(
            right, right_keys=("id",), lower="0 seconds", upper="1 second", uid="join"
        )  # fmt: skip
        windowed(joined.key_by("value"))

    message = refused(spark, tmp_path, build)
    assert "the output of join 'join' has none unless interval_join(…, event_time=\"left\")" in message
    assert "withWatermark" not in message


def open_longer(job: StreamingJob) -> Any:
    """Windows that a minute's rows may still come into when the watermark has passed them."""
    minutes = job.read(marked).key_by("value").window(
        windows.tumbling("1 minute"), uid="minutes", output_mode="append", allowed_lateness="30 seconds", n=aggregates.count()
    )  # fmt: skip
    return minutes.transform(lambda rows: rows.selectExpr("value", "window_time(window) AS at", "n"))


def hours(stream: Any, **more: str) -> Any:
    return stream.key_by("value").window(windows.tumbling("1 hour"), uid="next", n=aggregates.sum("n"), **more)


BEHIND: dict[str, Callable[[Any], Any]] = {
    "window": hours,
    "a little": lambda s: hours(s, allowed_lateness="29 seconds"),
    "session": lambda s: s.key_by("value").window(windows.session("1 hour"), uid="next", n=aggregates.sum("n")),
    "append": lambda s: s.key_by("at").aggregate(uid="next", output_mode="append", n=aggregates.sum("n")),
    "deduplicate": lambda s: s.key_by("value").deduplicate(uid="next", within_watermark=True),
    "deduplicate by time": lambda s: s.key_by("value", "at").deduplicate(uid="next"),
    "behind one more": lambda s: hours(s.key_by("value").deduplicate(uid="once")),
    "rows": lambda s: s.key_by("value").transform_with_state(
        Keeps(), output_schema="value long", uid="next", time_mode="eventTime"
    ),
}  # fmt: skip


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_what_would_drop_windows_that_stay_open_longer_is_refused(
    spark: SparkSession, tmp_path: Path, behind: Callable[[Any], Any]
) -> None:
    """They are emitted when the watermark has long passed their time: they would be dropped as late, and no count would
    say of what."""
    message = refused(spark, tmp_path, lambda job: behind(open_longer(job)))
    assert message.startswith(
        "operator 'next': the allowed_lateness of the window before lets rows come up to 30 seconds"
    )


def test_windows_behind_windows_may_stay_open_as_long(spark: SparkSession, tmp_path: Path) -> None:
    job = StreamingJob("timed", store=str(tmp_path / "store"))
    hours(open_longer(job), allowed_lateness="30 seconds")
    plan = job.plan()
    compiled = plan.compiled(spark, plan.opened_sources(spark))
    assert [stage.operator.uid for stage in compiled.stages if stage.operator] == ["minutes", "next"]


def once(stream: Any) -> Any:
    return stream.aggregate(uid="once", output_mode="append", n=aggregates.count())


def marked(spark: SparkSession) -> DataFrame:
    return ticks(spark).withWatermark("timestamp", "1 second")


def test_an_aggregate_that_emits_once_needs_a_watermark(spark: SparkSession, tmp_path: Path) -> None:
    message = refused(spark, tmp_path, lambda job: once(job.read(ticks).key_by("value", "timestamp")))
    assert message.startswith(
        "operator 'once': output_mode \"append\" needs a column with event time; call Spark's withWatermark"
    )


@pytest.mark.parametrize("keyed", [lambda s: s.key_by("value"), lambda s: s], ids=["other keys", "no key"])
def test_an_aggregate_that_emits_once_needs_the_event_time_among_its_keys(
    spark: SparkSession, tmp_path: Path, keyed: Callable[[Any], Any]
) -> None:
    """Else there is no time after which a key cannot change any more."""
    message = refused(spark, tmp_path, lambda job: once(keyed(job.read(marked))))
    assert message.startswith("operator 'once': output_mode \"append\" emits a key once the watermark has passed")
    assert "'timestamp' is not among its keys. Key by it, too; or " in message


def test_what_an_aggregate_emits_once_has_the_event_time_of_its_key(spark: SparkSession, tmp_path: Path) -> None:
    """With its allowed delay; what an aggregate emits again and again has none."""
    job = StreamingJob("timed", store=str(tmp_path / "store"))
    once(job.read(marked).key_by("value", "timestamp"))
    plan = job.plan()
    compiled = plan.compiled(spark, plan.opened_sources(spark))
    assert compiled.stages[0].output["timestamp"].metadata == {DELAY_METADATA: 1000}

    def build(job: StreamingJob) -> None:
        anew = job.read(marked).key_by("value", "timestamp").aggregate(uid="anew", most=aggregates.max("value"))
        anew.window(windows.tumbling("1 minute"), uid="per-minute", most=aggregates.max("most"))

    message = refused(spark, tmp_path, build)
    assert "windows need a column with event time" in message


def test_windows_behind_windows_that_stay_open_as_long_lose_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """The minute's windows end with the hour's, and take a row when the watermark has passed both."""

    def build(stream: Any) -> Any:
        minutes = stream.key_by("k").window(
            windows.tumbling("1 minute"), uid="minutes", output_mode="append", allowed_lateness="30 seconds", n=aggregates.sum("n")
        )  # fmt: skip
        timed = minutes.transform(lambda rows: rows.selectExpr("k", "window_time(window) AS at", "n"))
        return timed.key_by("k").window(
            windows.tumbling("1 hour"), uid="hours", output_mode="append", allowed_lateness="30 seconds", n=aggregates.sum("n")
        )  # fmt: skip

    job = TimedJob(spark, tmp_path, build)
    epochs = job.run([("a", 3590, 1)], [("b", 3630, 1)], [("a", 3595, 1)], [("b", 3650, 1)], [("b", 3700, 1)])
    assert [(k, n) for rows in epochs for k, _, n in rows] == [("a", 2)]
