"""Snapshots as DataFrames, and DataFrames as snapshots that jobs begin with."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from inflight_root import rows_in_flight
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_runtime import JobSettings, StreamingJob, foreach_epoch, reading
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, InvalidData
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.importing.bootstrap import bootstrap
from state_runtime.reading.building import SnapshotBuilder
from state_runtime.reading.rows import RowLayout
from state_runtime.reading.spark_source import register
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.store import open_store

from .homes import Home
from .jobs import rows_of, two_step_job, write_input
from .seeded import keeps
from .timed import TimedJob

pytestmark = [pytest.mark.spark, pytest.mark.long]
SECRET = "s3cr3t/sentinel+7f1e"


STEPS = pa.table(
    {
        "name": [None, *(f"n{n}" for n in range(40))],
        "seen": list(range(41)),
        "total": [n * 10 for n in range(41)],
        "last": [None, *range(40)],
    }
)
BUCKETS = pa.table(
    {
        "bucket": pa.array([n // 2 for n in range(12)], pa.int32()),
        "even": [bool(n % 2) for n in range(12)],
        "n": list(range(12)),
    }
)


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A snapshot with two states, made without Spark, and a session that knows the format."""
    operators = [
        OperatorEntry(
            "steps", "stateful-processor", "`name` string",
            (StateEntry("steps", "value", "`seen` bigint, `total` bigint, `last` bigint"),),
        ),
        OperatorEntry("buckets", "aggregate", "`bucket` int, `even` boolean", (StateEntry("aggregate", "value", "`n` bigint"),)),
    ]  # fmt: skip
    root = tmp_path_factory.mktemp("read") / "steps"
    builder = SnapshotBuilder.create(
        open_store(str(root)), "steps", operators, mode="IMPORT", clock=SYSTEM_CLOCK, ids=SYSTEM_IDS
    )
    for operator, rows in zip(builder.operators, (STEPS, BUCKETS), strict=True):
        state = operator.states[0]
        builder.write(operator.uid, state.name, [RowLayout(operator, state).stored(rows)], in_order=False, bits=2)
    builder.commit()
    register(spark)
    return str(root)


def source(spark: SparkSession, place: object, **options: Any) -> DataFrame:
    return spark.read.format("stillstate").options(place=str(place), **options).load()


def explained(frame: DataFrame) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        frame.explain("extended")
        frame.explain("formatted")  # alone shows what was pushed
    return out.getvalue()


def test_states_are_dataframes_of_what_the_plain_reader_reads(spark: SparkSession, place: str) -> None:
    """Whole, by column, by hash range and by key; and the same snapshot however long the DataFrame lives."""
    snapshot = reading.open(place)
    for operator, state in (("steps", "steps"), ("buckets", "aggregate")):
        frame = source(spark, place, operator=operator, state=state, partitions=3)
        expected = snapshot.state(operator, state)
        assert frame.columns == list(expected.columns)
        assert frame.rdd.getNumPartitions() == 3
        assert rows_of(frame) == sorted((tuple(r.values()) for r in expected.to_arrow().to_pylist()), key=repr)
    steps = source(spark, place, operator="steps", state="steps")
    assert steps.count() == snapshot.state("steps", "steps").fingerprint().rows
    narrow = source(spark, place, operator="steps", state="steps", columns="total, name")
    assert narrow.columns == ["total", "name"]
    assert "seen" not in explained(narrow)
    assert rows_of(narrow) == rows_of(steps.select("total", "name"))
    asked = spark.read.format("stillstate").schema("seen long").options(operator="steps", state="steps").load(place)
    assert rows_of(asked) == rows_of(steps.select("seen"))
    lower = source(spark, place, operator="steps", state="steps", hash_range=f"0:{(1 << 63) - 1}")
    upper = source(spark, place, operator="steps", state="steps", hash_range=f"{1 << 63}:{(1 << 64) - 1}")
    assert rows_of(lower.union(upper)) == rows_of(steps)
    assert rows_of(lower) == rows_of(steps.where(F.xxhash64("name") >= 0))


def test_conditions_on_keys_are_pushed_to_the_snapshot(spark: SparkSession, place: str) -> None:
    """Explain shows it; the result is that of Spark's own filter; what names no whole key stays with Spark."""
    steps = source(spark, place, operator="steps", state="steps")
    all_rows = rows_of(steps)
    pushed = steps.where("name = 'n1'")
    plan = explained(pushed)
    assert re.search(r"PushedFilters: \[.*name.*n1", plan), plan
    assert rows_of(pushed) == [row for row in all_rows if row[0] == "n1"] != []
    several = steps.where(F.col("name").isin("n1", "n2", "nobody"))
    assert rows_of(several) == [row for row in all_rows if row[0] in ("n1", "n2")]
    assert rows_of(steps.where("name is null")) == [row for row in all_rows if row[0] is None] != []
    assert rows_of(steps.where("name = 'n1' AND seen > 1000000")) == []
    kept = steps.where("seen > 3")
    assert not re.search(r"PushedFilters: \[[^\]]", explained(kept))
    assert rows_of(kept) == [row for row in all_rows if row[1] > 3]
    buckets = source(spark, place, operator="buckets", state="aggregate")
    some = rows_of(buckets)
    assert rows_of(buckets.where("bucket = 2")) == [row for row in some if row[0] == 2]
    assert rows_of(buckets.where("bucket = 2 AND even")) == [row for row in some if row[0] == 2 and row[1]]


def test_a_snapshot_tells_what_is_in_it(spark: SparkSession, place: str) -> None:
    catalog = Catalog.of_root(open_store(place))
    snapshots = source(spark, place, what="snapshots").orderBy("snapshot_id").collect()
    assert [row.snapshot_id for row in snapshots] == catalog.snapshot_ids()
    assert snapshots[-1].format in ("changelog", "incremental", "canonical")
    operators = source(spark, place).collect()
    assert {(row.operator, row.state, row.state_kind) for row in operators} == {
        ("steps", "steps", "value"),
        ("buckets", "aggregate", "value"),
    }
    manifest = catalog.latest()
    assert manifest is not None
    files = source(spark, f"{place}@{manifest.snapshot_id}", what="manifest").collect()
    assert {row.path for row in files} >= {t.path for t in manifest.layers[0].tables}
    assert files[-1].kind == "manifest"
    inflight = source(spark, place, what="inflight")
    assert inflight.columns == ["operator", "epoch", "read_at", "rows", "bytes", "columns"]
    assert inflight.count() == 0


def test_rows_in_flight_are_a_data_frame_of_input_columns(spark: SparkSession, tmp_path: Path) -> None:
    """By hash range, each row in one partition; the same that is read without Spark; of an operator without any an error."""
    register(spark)
    made = rows_in_flight(tmp_path, checkpoints=4, inline_bytes_max=1_500)
    place, operator = f"{tmp_path}/store/job@{made.manifest.snapshot_id}", "windows"
    expected = reading.open(place).inflight(operator).to_arrow().to_pylist()
    frame = source(spark, place, inflight=operator, partitions="3")
    assert frame.rdd.getNumPartitions() == 3
    assert sorted(r.asDict()["_place"] for r in frame.collect()) == sorted(r["_place"] for r in expected)
    assert frame.columns == list(expected[0])
    assert frame.count() == len(expected)
    half = source(spark, place, inflight=operator, hash_range=f"0:{(1 << 63) - 1}").collect()
    assert sorted(r["_key_hash"] for r in half) == sorted(r["_key_hash"] for r in expected if r["_key_hash"] < 1 << 63)
    listed = source(spark, place, what="inflight").groupBy("operator").sum("rows").collect()
    assert {r[0] for r in listed} == {"steps", "windows"}
    for options, why in (
        ({"inflight": "totals"}, "there are some of: steps, windows"),
        ({"inflight": "steps", "state": "seen"}, "leave out 'state'"),
    ):
        with pytest.raises(Exception, match=why):
            source(spark, place, **options).count()


def test_wrong_options_are_refused_and_credentials_are_shown_nowhere(spark: SparkSession, place: str) -> None:
    """A secret as an option of a read is refused without its value; one of `register` is in no plan and no error."""
    with pytest.raises(Exception, match="option 'secret' is not known") as caught:
        source(spark, place, operator="steps", state="steps", secret=SECRET)
    assert SECRET not in str(caught.value)
    for options, why in (
        ({"what": "everything"}, "use one of"),
        ({"operator": "nobody", "state": "steps"}, "no operator 'nobody'"),
        ({"state": "steps", "columns": "x"}, "no column 'x'"),
        ({"state": "steps", "hash_range": "a:b"}, "no whole number"),
    ):
        with pytest.raises(Exception, match=why):
            source(spark, place, **options).count()
    register(spark, storage_options={"secret": SECRET, "key": "k", "endpoint_url": "http://127.0.0.1:1"})
    try:
        frame = source(spark, place, state="steps")
        assert SECRET not in explained(frame)
        with pytest.raises(Exception, match="StoreUnavailable") as caught:
            source(spark, "s3://lake/state/steps", state="steps")
        assert SECRET not in str(caught.value)
    finally:
        register(spark)
    with pytest.raises(Exception, match="one DataFrame per state"):
        frame.write.format("stillstate").mode("append").save(place)


def test_a_job_that_begins_with_state_goes_on_as_if_it_had_never_stopped(
    spark: SparkSession, tmp_path: Path, home: Home
) -> None:
    """Two built-in and processor states of one job, read as DataFrames, written as a snapshot, and gone on from: the same state in the
    end as that of the job that read everything."""
    for name, files in (("whole", range(2)), ("first", range(1)), ("second", range(1, 2))):
        write_input(tmp_path / name / "in", files.start, len(files))
    two_step_job(tmp_path / "whole").run(spark, trigger={"availableNow": True})
    two_step_job(tmp_path / "first").run(spark, trigger={"availableNow": True})
    register(spark)
    place = tmp_path / "first" / "store" / "steps"
    frames = {
        key: source(spark, place, operator=key[0], state=key[1])
        for key in (("steps", "steps"), ("buckets", "aggregate"))
    }
    job = two_step_job(tmp_path / "second", store=home.url, storage_options=home.options, heartbeat_interval_s=5)
    manifest = bootstrap(spark, home.place("steps"), job, frames, storage_options=home.options, bits=2)
    assert manifest.snapshot_format == "canonical"
    first = reading.open(str(place))
    seeded = reading.open(home.place("steps"), home.options)
    for operator, state in frames:
        assert seeded.state(operator, state).fingerprint() == first.state(operator, state).fingerprint()
    job.run(spark, trigger={"availableNow": True})
    whole = reading.open(str(tmp_path / "whole" / "store" / "steps"))
    second = reading.open(home.place("steps"), home.options)
    for operator, state in frames:
        assert second.state(operator, state).fingerprint() == whole.state(operator, state).fingerprint()
    with pytest.raises(InvalidConfiguration, match="has snapshots already"):
        bootstrap(spark, home.place("steps"), job, {}, storage_options=home.options)


def _bootstrapped(spark: SparkSession, folder: Path, place: Path, time: Any) -> Manifest:
    """A seed for the job with every kind of state, from a snapshot of it."""
    register(spark)
    snapshot = reading.open(str(place))
    frames = {("keeps", s.name): source(spark, place, operator="keeps", state=s.name) for s in snapshot.states()}
    assert {key[1] for key in frames} == {"sum", "log", "seen", "$timers"}
    job = StreamingJob("timed", store=str(folder / "store"), settings=JobSettings(local_dir=str(folder / "local")))
    stream = job.read(TimedJob(spark, folder, keeps).source())
    keeps(stream).write(foreach_epoch(lambda frame, epoch: None))
    (folder / "in").mkdir(parents=True)
    return bootstrap(spark, str(folder / "store" / "timed"), job, frames, time=time)


def test_values_lists_maps_and_timers_are_begun_with(spark: SparkSession, tmp_path: Path) -> None:
    """The order of lists, the entries of maps, and timers that come due only in the job that was begun with them."""
    first = [[("a", 1, 1), ("b", 2, 2)], [("a", 5, 3), ("a", 6, 4)]]
    second = [[("b", 20, 5), ("a", 21, 6)], [("c", 100, 7)]]
    whole = TimedJob(spark, tmp_path / "whole", keeps)
    before = whole.run(*first)
    after = whole.run(*second)
    assert [row for rows in after for row in rows if row[1].startswith("timer")]
    part = TimedJob(spark, tmp_path / "part", keeps)
    assert part.run(*first) == before
    seed = _bootstrapped(spark, tmp_path / "seeded", tmp_path / "part" / "store" / "timed", part.manifest().time)
    assert seed.operators[0].next_due_ms is not None
    seeded = TimedJob(spark, tmp_path / "seeded", keeps)
    assert seeded.run(*second) == after


def test_frames_that_do_not_fit_the_pipeline_are_refused_before_there_is_a_snapshot(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    job, place = two_step_job(tmp_path), str(tmp_path / "seed")
    good = spark.createDataFrame([("n1", 1, 2, 3)], "name string, seen long, total long, last long")

    def refused(kind: type[Exception], why: str, frame: DataFrame, key: tuple[str, str] = ("steps", "steps")) -> None:
        with pytest.raises(kind, match=why):
            bootstrap(spark, place, job, {key: frame}, bits=0)
        if (tmp_path / "seed" / "job.json").exists():
            assert Catalog.of_root(open_store(place)).latest() is None

    refused(InvalidConfiguration, "has no state steps/other; its pipeline has: steps/steps", good, ("steps", "other"))
    refused(InvalidConfiguration, "missing: last", good.drop("last"))
    refused(InvalidConfiguration, "unknown: more", good.withColumn("more", F.lit(1)))
    refused(InvalidData, "column 'seen' is string", good.withColumn("seen", F.lit("many")))
    refused(InvalidData, "a key that another row has", good.union(good))
    shutil.rmtree(tmp_path / "seed")
    bootstrap(spark, place, job, {("steps", "steps"): good.withColumn("seen", F.lit(1))}, bits=0)
    assert reading.open(place).state("steps", "steps").to_arrow().to_pylist() == [
        {"name": "n1", "seen": 1, "total": 2, "last": 3}
    ]
