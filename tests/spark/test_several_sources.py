"""Whole jobs that read several sources: what they give, where they go on, and by which clocks."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from state_runtime import ParquetSink, Progress, StreamingJob, aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.base.settings import JobSettings
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import open_store

from ..refusal import everything_refused
from .branches import ROWS, Slow, write_input
from .several import check_totals, check_windows, latest_s, read, several
from .test_branches import StopAfter, jobs_of

pytestmark = pytest.mark.spark

ONCE = {"available_now": True}


def newest(root: Path, job: str = "several") -> Manifest:
    manifest = Catalog(open_store(str(root / "store")), job).latest()
    assert manifest is not None
    return manifest


def check(spark: SparkSession, root: Path, *names: str) -> None:
    check_totals(spark, root, *names)
    until_s = min(latest_s(spark, root, name) for name in names)
    check_windows(spark, root, "windows", *names, until_s=until_s)
    check_windows(spark, root, "of-orders", "orders", until_s=latest_s(spark, root, "orders"))


def test_several_sources_give_what_a_batch_query_gives_each_operator_by_its_own_clock(
    spark: SparkSession, tmp_path: Path
) -> None:
    """An epoch is one Spark job, also with kept plans; orders are ahead of refunds, and their windows do not wait."""
    write_input(tmp_path / "orders", files=5)
    write_input(tmp_path / "refunds", files=3)
    since, jobs, rows, written = jobs_of(spark), list[int](), list[int](), list[int]()

    def seen(progress: Any) -> None:
        jobs.append(since())
        rows.append(progress.input_rows)
        written.append(progress.output_rows)

    several(tmp_path, ["orders", "refunds"]).run(spark, trigger=ONCE, on_progress=seen)
    check(spark, tmp_path, "orders", "refunds")
    assert set(jobs[1:]) == {1}
    assert [count for count in rows if count] == [2 * ROWS] * 3 + [ROWS] * 2
    manifest = newest(tmp_path)
    assert (manifest.format_version, manifest.source and manifest.source.names) == (6, ("orders", "refunds"))
    assert manifest.time is not None
    clocks = {o.uid: manifest.time.watermark_of(o.uid) // 1000 for o in manifest.operators}
    assert clocks["of-orders"] == latest_s(spark, tmp_path, "orders")
    assert clocks["windows"] == latest_s(spark, tmp_path, "refunds") < clocks["of-orders"]
    status = Catalog(open_store(str(tmp_path / "store")), "several").status()
    assert status is not None
    told = {step.name: step for step in status.steps if step.kind != "sink"}
    assert (told["orders"].rows, told["refunds"].rows, told["of-orders"].rows) == (5 * ROWS, 3 * ROWS, 5 * ROWS)
    assert sum(step.rows or 0 for step in status.steps if step.kind == "sink") == sum(written) > 0
    assert manifest.progress is not None
    assert sum(step.state_rows or 0 for step in status.steps) == manifest.progress.state_rows > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "rocksdb", "changelog": "off"},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"local_recovery": False}, marks=pytest.mark.long),
    ],
)
def test_sources_come_and_go_and_change_places_and_each_reads_on_where_it_was(
    spark: SparkSession, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """With other shards each time; also one that was away while its rows came."""
    for name, files in (("orders", 3), ("refunds", 2), ("visits", 2)):
        write_input(tmp_path / name, files=files)
    several(tmp_path, ["orders", "refunds"], **settings).run(spark, trigger=ONCE)
    write_input(tmp_path / "orders", files=2, first=3)
    several(tmp_path, ["visits", "refunds", "orders"], **settings, parallelism=2).run(spark, trigger=ONCE)
    check_totals(spark, tmp_path, "orders", "refunds", "visits")
    names = ("orders", "refunds", "visits")
    assert newest(tmp_path).source.names == names  # type: ignore[union-attr]

    without = several(tmp_path, ["refunds", "orders"], **settings, parallelism=4)
    with pytest.raises(InvalidPipeline, match="position of source 'visits'"):
        without.run(spark, trigger=ONCE)
    write_input(tmp_path / "visits", files=1, first=2)
    write_input(tmp_path / "refunds", files=1, first=2)
    without.run(spark, trigger=ONCE, allow_dropped_state=True)
    write_input(tmp_path / "orders", files=1, first=5)
    without.run(spark, trigger=ONCE)  # as a supervisor starts it again
    if "local_recovery" in settings:
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
    several(tmp_path, ["orders", "visits", "refunds"], **settings).run(spark, trigger=ONCE)
    check_totals(spark, tmp_path, *names)
    assert newest(tmp_path).source.names == names  # type: ignore[union-attr]


def test_a_job_of_one_source_without_a_name_goes_on_with_several(spark: SparkSession, tmp_path: Path) -> None:
    """Its snapshots have no names; the user says which source it was."""
    write_input(tmp_path / "orders", files=3)
    write_input(tmp_path / "refunds", files=2)
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))

    def counting(*names: str, was: str | None = None) -> StreamingJob:
        job = StreamingJob("several", store=str(tmp_path / "store"), settings=settings)
        first, *others = (
            job.read(lambda s, n=n: read(s, tmp_path, n or "orders"), name=n, was=was if n == "orders" else None)
            for n in names
        )
        rows = first.union(*others) if others else first
        rows.aggregate(uid="n", n=aggregates.count()).write(ParquetSink(str(tmp_path / "out")))
        return job

    counting("").run(spark, trigger=ONCE)
    assert newest(tmp_path).format_version == 4
    with pytest.raises(InvalidPipeline, match=r"the source without a name.*name='refunds', was=''"):
        counting("refunds", "orders").run(spark, trigger=ONCE)
    write_input(tmp_path / "orders", files=1, first=3)
    counting("refunds", "orders", was="").run(spark, trigger=ONCE)
    assert newest(tmp_path).source.names == ("orders", "refunds")  # type: ignore[union-attr]
    assert spark.read.parquet(str(tmp_path / "out")).selectExpr("max(n)").first() == (6 * ROWS,)


def test_rows_in_flight_of_several_sources_wait_over_runs_of_any_parallelism(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What the batch's rows are late by is each operator's own, over restarts too."""
    write_input(tmp_path / "orders", files=32)
    write_input(tmp_path / "refunds", files=20)
    names, stop = ["orders", "refunds"], threading.Event()

    def waits(progress: Progress) -> None:
        if progress.inflight is not None and progress.inflight.rows and progress.batch_id > 1:
            stop.set()

    unaligned = {"checkpoint_mode": "unaligned", "unaligned_epoch_s": 0.1}
    several(tmp_path, names, Slow(), files=8, **unaligned).run(spark, trigger=ONCE, on_progress=waits, stop=stop)
    manifest = newest(tmp_path)
    assert manifest.open_batch is not None
    assert manifest.open_batch.late_clocks, "rows that wait are late by clocks of their own"
    one = StopAfter(1)
    several(tmp_path, names[::-1], Slow(), files=8, **unaligned, parallelism=2).run(
        spark, trigger=ONCE, on_progress=one, stop=one.event
    )
    several(tmp_path, names, Slow(), files=8, checkpoint_mode="aligned").run(spark, trigger=ONCE)
    check(spark, tmp_path, "orders", "refunds")


@pytest.mark.usefixtures("untried")
def test_several_sources_by_public_ways_alone_give_the_same(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "orders", files=2)
    write_input(tmp_path / "refunds", files=2)
    with everything_refused():
        several(tmp_path, ["refunds", "orders"]).run(spark, trigger=ONCE)
    check(spark, tmp_path, "orders", "refunds")


def test_a_source_without_rows_holds_back_unless_it_may_be_idle(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "orders", files=3)
    (tmp_path / "refunds").mkdir()
    for number, idle_after in enumerate((None, "1 millisecond")):
        settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
        job = StreamingJob(f"idle-{number}", store=str(tmp_path / "store"), settings=settings)
        orders = job.read(lambda session: read(session, tmp_path, "orders"), name="orders")
        refunds = job.read(lambda session: read(session, tmp_path, "refunds"), name="refunds", idle_after=idle_after)
        counted = orders.union(refunds).window(
            windows.tumbling("30 seconds"), uid="w", output_mode="append", n=aggregates.count()
        )
        counted.write(ParquetSink(str(tmp_path / f"out-{number}")))
        job.run(spark, trigger=ONCE)
        time = newest(tmp_path, job.name).time
        assert time is not None
        if idle_after is None:
            assert time.watermark_ms == 0
        else:
            assert time.watermark_ms // 1000 == latest_s(spark, tmp_path, "orders")
            assert sorted(time.seen_ms) == ["refunds"]
            check_windows(spark, tmp_path, "out-1", "orders", until_s=time.watermark_ms // 1000)


def test_a_source_with_watermarks_inside_it_is_seen_by_spark_beside_one_that_is_not(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Each operator by its own: what Spark's nodes saw and what the batch shows are told apart."""
    write_input(tmp_path / "orders", files=3)
    write_input(tmp_path / "refunds", files=2)
    write_input(tmp_path / "visits", files=3)
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    job = StreamingJob("several", store=str(tmp_path / "store"), settings=settings)
    both = job.read(
        lambda session: read(session, tmp_path, "refunds").union(read(session, tmp_path, "visits")), name="both"
    )
    orders = job.read(lambda session: read(session, tmp_path, "orders"), name="orders")
    for name, rows in (("both", both), ("orders", orders)):
        counted = rows.window(windows.tumbling("30 seconds"), uid=name, output_mode="append", n=aggregates.count())
        counted.write(ParquetSink(str(tmp_path / f"of-{name}")), name=name)
    came: list[int] = []
    job.run(spark, trigger=ONCE, on_progress=lambda progress: came.append(progress.input_rows))
    time = newest(tmp_path).time
    assert time is not None
    assert sorted(time.event_time_ms) == ["both.input 1.at", "both.input 2.at", "orders.at"]
    reached = {name: latest_s(spark, tmp_path, name) for name in ("orders", "refunds", "visits")}
    assert time.watermark_of("orders") // 1000 == reached["orders"]
    assert time.watermark_of("both") // 1000 == min(reached["refunds"], reached["visits"]) < reached["orders"]
    check_windows(spark, tmp_path, "of-both", "refunds", "visits", until_s=time.watermark_of("both") // 1000)
    check_windows(spark, tmp_path, "of-orders", "orders", until_s=reached["orders"])
    assert sum(came) == 8 * ROWS


def test_sources_that_cannot_be_told_apart_are_refused_with_their_line(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "orders", files=1)
    frame = read(spark, tmp_path, "orders")

    def job_of(*reads: tuple[str, Any]) -> StreamingJob:
        job = StreamingJob("refused", store=str(tmp_path / "store"))
        for name, source in reads:
            job.read(source, name=name).write(ParquetSink(str(tmp_path / (name or "out"))))
        return job

    with pytest.raises(InvalidPipeline, match=r"two sources are named ''.*test_several_sources\.py, line \d+"):
        job_of(("", frame), ("", lambda session: frame)).plan()
    with pytest.raises(InvalidPipeline, match=r"source 'b' has the DataFrame of another source.*line \d+"):
        job_of(("a", frame), ("b", frame)).run(spark, trigger=ONCE)
    job = job_of(("a", frame))
    job.read(frame, name="unread")
    with pytest.raises(InvalidPipeline, match=r"no step reads source 'unread'"):
        job.plan()
    with pytest.raises(InvalidPipeline, match="at least 1 millisecond"):
        job.read(frame, name="c", idle_after="0 seconds")
    assert not (tmp_path / "store").exists()
