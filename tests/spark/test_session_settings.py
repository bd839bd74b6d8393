"""Settings of the session that change results, through whole jobs: in each manifest, and a start under others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import StreamingJob, aggregates, foreach_epoch
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.driver.start_position import StartFrom
from state_runtime.pipeline.result_settings import ALWAYS, result_settings

from ..job_settings import job_settings
from .test_time import changed
from .timed import TimedJob

pytestmark = pytest.mark.spark

ZONE = "spark.sql.session.timeZone"


def job(bench: TimedJob, name: str) -> StreamingJob:
    made = StreamingJob(name, store=bench.home.url, settings=job_settings(parallelism=3))
    days(made.read(bench.source())).write(foreach_epoch(lambda frame, _: frame.collect()))
    return made


def days(stream: Any) -> Any:
    """Rows by day: which day a row falls on is decided by the session's time zone."""
    dated = stream.transform(lambda df: df.selectExpr("date_trunc('DAY', at) AS day", "n", "at"))
    return dated.key_by("day").aggregate(uid="days", n=aggregates.count())


def test_spark_has_each_setting_that_is_recorded(spark: SparkSession) -> None:
    """Of a misspelled name there would never be a value, and never a refusal."""
    assert result_settings(spark.conf).keys() == set(ALWAYS)


def test_a_start_in_another_time_zone_is_refused_until_it_is_accepted_once(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing is written by the refused start. The snapshots of the accepted one have the new zone, so it needs no word
    again; the way back to an older snapshot has the old one."""
    bench = TimedJob(spark, tmp_path, days)
    with changed(spark, ZONE, "UTC"):
        bench.run([("a", 1, 1)])
        first = bench.manifest()
        assert first.session == result_settings(spark.conf)
    with changed(spark, ZONE, "Etc/UTC"):
        bench.run([("a", 2, 1)])
    before = bench.manifest()
    assert before.session[ZONE] == "Etc/UTC"
    with changed(spark, ZONE, "Asia/Tokyo"):
        with pytest.raises(InvalidConfiguration, match="timeZone was 'Etc/UTC' and is 'Asia/Tokyo'"):
            bench.run([("a", 3, 1)])
        assert bench.manifest() == before
        bench.accept_session_settings = True
        bench.run()
        assert bench.manifest().session[ZONE] == "Asia/Tokyo"
        bench.accept_session_settings = False
        bench.run([("a", 4, 1)])
        with pytest.raises(InvalidConfiguration, match=f"snapshot {bench.manifest().snapshot_id} was made under other"):
            job(bench, "timed").run(spark, trigger={"availableNow": True}, from_snapshot=before.snapshot_id)
        origin = StartFrom(f"{bench.home.url}/timed@{first.snapshot_id}")
        with pytest.raises(InvalidConfiguration, match="timeZone was 'UTC' and is 'Asia/Tokyo'"):
            job(bench, "fork").run(spark, trigger={"availableNow": True}, start_from=origin)
    with changed(spark, ZONE, "UTC"):
        job(bench, "fork").run(spark, trigger={"availableNow": True}, start_from=origin)


def test_a_setting_of_before_that_is_set_no_more_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Settings of `spark.sql.legacy.` are there to make other results."""
    name = "spark.sql.legacy.castComplexTypesToString.enabled"
    bench = TimedJob(spark, tmp_path, days)
    spark.conf.set(name, "true")
    try:
        bench.run([("a", 1, 1)])
    finally:
        spark.conf.unset(name)
    with pytest.raises(InvalidConfiguration, match=f"{name} was 'true' and is not set"):
        bench.run([("a", 2, 1)])
