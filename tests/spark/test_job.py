"""Whole jobs on a real Spark session, compared with Spark batch queries over the same input."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from state_runtime import JobSettings, ParquetSink, Progress, RunResult, StreamingJob, aggregates, foreach_epoch
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import (
    CorruptData,
    InvalidConfiguration,
    InvalidData,
    InvalidPipeline,
    StoreUnavailable,
    Unavailable,
    UnsupportedFormat,
    UserCodeError,
)
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.base.process_space import process_space
from state_runtime.driver import source_quiet
from state_runtime.driver.run import StartedBy
from state_runtime.pipeline.source_position import SparkCheckpoint
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.control import request_stop
from state_runtime.snapshot.document import FORMAT_VERSION, decode_document
from state_runtime.snapshot.paths import manifest_path, term_path
from state_runtime.snapshot.term_files import Term
from state_runtime.store import open_store
from tests.job_settings import job_settings

from .jobs import Flaky, Steps, StepsInPandas, assert_equals_batch, settings, two_step_job, write_input

pytestmark = pytest.mark.spark
AVAILABLE = {"availableNow": True}


def run(spark: SparkSession, job: StreamingJob, **how: Any) -> tuple[RunResult, list[Progress]]:
    """Run to the end of the input; also what each epoch reported."""
    seen: list[Progress] = []
    return job.run(spark, trigger=AVAILABLE, on_progress=seen.append, **how), seen


@pytest.mark.parametrize("processor", [Steps(), StepsInPandas()], ids=["rows", "pandas"])
def test_output_over_restarts_equals_a_batch_recomputation(spark: SparkSession, tmp_path: Path, processor: Any) -> None:
    """Three runs: the second restores from local runs, the third from the primary store with another parallelism."""
    write_input(tmp_path / "in", 0, 5)
    result, _ = run(spark, two_step_job(tmp_path, processor))
    assert result.state == "finished"
    assert_equals_batch(spark, tmp_path)

    write_input(tmp_path / "in", 5, 5)
    _, progress = run(spark, two_step_job(tmp_path, processor))
    # Four shards, of which one of the second operator may never have had a key.
    assert sum(p.local_restores for p in progress) >= 3
    assert sum(p.primary_restores for p in progress) == 0
    assert_equals_batch(spark, tmp_path)

    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path / "in", 10, 4)
    _, progress = run(spark, two_step_job(tmp_path, processor, parallelism=3))
    assert sum(p.primary_restores for p in progress) > 0
    assert_equals_batch(spark, tmp_path)
    newest = Catalog(open_store(str(tmp_path / "store")), "steps").latest()
    assert newest is not None
    assert newest.parallelism == 3
    assert newest.layers, "the log must have been folded into tables by now"
    assert newest.progress is not None
    assert newest.progress.state_rows == spark.sql("SELECT 1 FROM steps GROUP BY name").count() + len(
        spark.sql("SELECT DISTINCT length(name), seen % 2 FROM steps WHERE total > 0").collect()
    )


def test_an_attempt_that_failed_leaves_no_trace(spark: SparkSession, tmp_path: Path) -> None:
    """Spark repeats a stateful task; the repetition starts from the committed version, not from what the first did."""
    write_input(tmp_path / "in", 0, 6)
    run(spark, two_step_job(tmp_path, Flaky()))
    assert_equals_batch(spark, tmp_path)


def test_direct_objects_hold_large_changes(spark: SparkSession, tmp_path: Path) -> None:
    """With no inline bytes every task uploads its own object, and a restore from the primary reads them."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, two_step_job(tmp_path, inline_bytes_max=0, materialize=False))
    newest = Catalog(open_store(str(tmp_path / "store")), "steps").latest()
    assert newest is not None
    assert all(s.direct_bytes > 0 for s in newest.segments)
    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path / "in", 3, 2)
    run(spark, two_step_job(tmp_path, inline_bytes_max=0, materialize=False))
    assert_equals_batch(spark, tmp_path)


@pytest.mark.parametrize("parallelism", [1, 5])
def test_a_checkpoint_writes_one_segment_and_one_manifest(
    spark: SparkSession, tmp_path: Path, parallelism: int
) -> None:
    """Invariant 6: whatever the parallelism and the number of operators, while changes are small enough to ride along."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, two_step_job(tmp_path, parallelism=parallelism, materialize=False))
    root = tmp_path / "store" / "steps"
    assert len(list((root / "changelog").rglob("*.seg"))) == 3
    assert len(list((root / "snapshots").rglob("manifest.json"))) == 1 + 3  # the fencing snapshot, and one per epoch


def test_a_damaged_local_copy_never_changes_the_result(spark: SparkSession, tmp_path: Path) -> None:
    """Invariant 5: bit flips and missing files on the local side fall back to the primary, with a metric."""
    write_input(tmp_path / "in", 0, 4)
    run(spark, two_step_job(tmp_path))
    runs = sorted((tmp_path / "local" / "state").rglob("*.arrow"))
    for number, path in enumerate(runs):
        if number % 2:
            path.unlink()
        else:
            body = bytearray(path.read_bytes())
            body[len(body) // 2] ^= 0x10
            path.write_bytes(body)
    write_input(tmp_path / "in", 4, 2)
    _, progress = run(spark, two_step_job(tmp_path))
    assert sum(p.local_failures for p in progress) > 0
    assert sum(p.primary_restores for p in progress) > 0
    assert_equals_batch(spark, tmp_path)


def test_a_local_copy_with_other_values_is_never_used(spark: SparkSession, tmp_path: Path) -> None:
    """A disk that lies without any error: files of the right size and form, whose totals are wrong. Only the digest tells."""
    write_input(tmp_path / "in", 0, 4)
    run(spark, two_step_job(tmp_path))
    for path in (tmp_path / "local" / "state").rglob("*/steps/*/*.arrow"):
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
            at = batch.schema.get_field_index("value.total")
            wrong = batch.set_column(at, batch.schema.field(at), pc.add(batch.column(at), 1))
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, wrong.schema) as writer:
                writer.write_batch(wrong)
            assert sink.tell() == path.stat().st_size
        path.write_bytes(sink.getvalue())
    write_input(tmp_path / "in", 4, 2)
    _, progress = run(spark, two_step_job(tmp_path))
    assert sum(p.local_failures for p in progress) == 2
    assert_equals_batch(spark, tmp_path)


def test_a_failing_local_write_never_fails_a_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """The local side is a copy: a file in the place of its folder makes every local write fail, and nothing else."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "state").write_text("not a folder")
    write_input(tmp_path / "in", 0, 4)
    _, progress = run(spark, two_step_job(tmp_path))
    assert all(p.local_failures > 0 for p in progress)
    assert_equals_batch(spark, tmp_path)


def test_a_batch_that_spark_repeats_is_not_applied_twice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its commit log Spark runs the committed batch again; the manifest knows better."""
    write_input(tmp_path / "in", 0, 3)
    first, _ = run(spark, two_step_job(tmp_path))
    prime = SparkCheckpoint.prime

    def without_commit(self: SparkCheckpoint, position: Any, logs: Any) -> None:
        prime(self, position, logs)
        (self.folder / "commits" / str(position.batch_id)).unlink()

    monkeypatch.setattr(SparkCheckpoint, "prime", without_commit)
    write_input(tmp_path / "in", 3, 2)
    _, progress = run(spark, two_step_job(tmp_path))
    assert [p.batch_id for p in progress] == [3, 4]
    assert progress[0].snapshot_id == first.last_snapshot_id + 2  # one fencing snapshot between
    assert_equals_batch(spark, tmp_path)


def test_a_position_of_another_input_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Spark's directory does not belong to the snapshot, nothing is applied to it."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, two_step_job(tmp_path))
    before = Catalog(open_store(str(tmp_path / "store")), "steps").snapshot_ids()
    monkeypatch.setattr(SparkCheckpoint, "prime", lambda *_: None)
    with pytest.raises(CorruptData, match="other offsets"):
        run(spark, two_step_job(tmp_path))
    assert len(Catalog(open_store(str(tmp_path / "store")), "steps").snapshot_ids()) == len(before) + 1


def test_a_stop_request_ends_the_run_after_an_epoch(spark: SparkSession, tmp_path: Path) -> None:
    """Anyone with access to the store can stop a job; the run says "stopped" and the next one goes on."""
    write_input(tmp_path / "in", 0, 8)
    store = open_store(str(tmp_path / "store"))

    def ask(progress: Progress) -> None:
        status = Catalog(store, "steps").status()
        assert status is not None
        request_stop(store, "steps", status.term, clock=SYSTEM_CLOCK, ids=SYSTEM_IDS)

    result = two_step_job(tmp_path).run(spark, on_progress=ask)
    assert result.state == "stopped"
    status = Catalog(store, "steps").status()
    assert status is not None
    assert (status.state, status.process_space) == ("stopped", process_space())
    term = decode_document("term", Term, store.child("steps").read(term_path(status.term), 10_000), "term")
    assert (term.run_uid, term.process_space) == (status.run_uid, process_space())
    run(spark, two_step_job(tmp_path))
    assert_equals_batch(spark, tmp_path)


def test_a_run_on_trial_commits_although_its_source_has_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first checkpoint is what it is kept for, and a migration does not wait for rows: neither of an idle source nor of
    one that has ended."""
    monkeypatch.setattr(source_quiet, "LONG_QUIET_S", 1.0)  # long enough to be asked in several times
    write_input(tmp_path / "in", 0, 1)
    for trigger, parallelism, restored in ((AVAILABLE, 1, 0), (AVAILABLE, 2, 2), (None, 3, 3)):
        job = StreamingJob("n", store=str(tmp_path / "store"), settings=settings(tmp_path, parallelism=parallelism))
        (
            job.read(lambda s: s.readStream.schema("name string").parquet(str(tmp_path / "in")))
            .key_by("name")
            .aggregate(uid="n", n=aggregates.count())
            .write(foreach_epoch(lambda *_: None))
        )
        stop, seen = threading.Event(), list[Progress]()

        def note(progress: Progress, stop: threading.Event = stop, seen: list[Progress] = seen) -> None:
            seen.append(progress)
            stop.set()

        no_longer = threading.Timer(120.0, stop.set)
        no_longer.start()
        result = job.run(spark, trigger=trigger, on_progress=note, stop=stop, started_by=StartedBy(on_trial=True))
        no_longer.cancel()
        (epoch,) = seen
        newest = Catalog(open_store(str(tmp_path / "store")), "n").latest()
        assert newest is not None
        assert (newest.snapshot_id, newest.kind) == (result.last_snapshot_id, "checkpoint")
        assert (epoch.input_rows > 0) == (restored == 0)
        assert epoch.local_restores + epoch.stale_restores + epoch.primary_restores == restored


def test_reading_a_stage_twice_keeps_the_state_right(spark: SparkSession, tmp_path: Path) -> None:
    """User code may read an operator's output twice; Spark runs the operator twice, one of its versions is taken."""
    write_input(tmp_path / "in", 0, 4)
    job = StreamingJob(
        "twice", store=str(tmp_path / "store"), settings=JobSettings(parallelism=2, local_dir=str(tmp_path / "local"))
    )
    (
        job.read(
            lambda s: (
                s.readStream.schema("id long, name string, amount long")
                .option("maxFilesPerTrigger", 1)
                .parquet(str(tmp_path / "in"))
            )
        )
        .key_by("name")
        .aggregate(uid="sums", total=aggregates.sum("amount"))
        .transform(lambda df: df.unionAll(df))
        .write(ParquetSink(str(tmp_path / "out")))
    )
    run(spark, job)
    spark.read.schema("id long, name string, amount long").parquet(str(tmp_path / "in")).createOrReplaceTempView("i")
    expected = {tuple(r) for r in spark.sql("SELECT name, sum(amount) FROM i GROUP BY name").collect()}
    out = spark.read.parquet(str(tmp_path / "out"))
    out.createOrReplaceTempView("o")
    actual = [tuple(r) for r in spark.sql("SELECT name, max_by(total, epoch) FROM o GROUP BY name").collect()]
    assert set(actual) == expected
    doubled = spark.sql("SELECT count(*) AS n FROM o GROUP BY name, epoch HAVING n <> 2").collect()
    assert doubled == []


def test_foreach_epoch_gets_each_epoch_once_and_again_only_after_a_crash(spark: SparkSession, tmp_path: Path) -> None:
    """The function is called after the checkpoint; if it fails, the next run repeats it with the same rows and id."""
    write_input(tmp_path / "in", 0, 4)
    calls: list[tuple[int, list[Row]]] = []
    fail_at = {"call": 3}

    def deliver(frame: DataFrame, epoch: int) -> None:
        calls.append((epoch, sorted(frame.collect(), key=repr)))
        if len(calls) == fail_at["call"]:
            raise RuntimeError("the database is down")

    def job() -> StreamingJob:
        made = StreamingJob(
            "calls",
            store=str(tmp_path / "store"),
            settings=JobSettings(parallelism=2, local_dir=str(tmp_path / "local")),
        )
        (
            made.read(
                lambda s: (
                    s.readStream.schema("id long, name string, amount long")
                    .option("maxFilesPerTrigger", 1)
                    .parquet(str(tmp_path / "in"))
                )
            )
            .key_by("name")
            .aggregate(uid="sums", total=aggregates.sum("amount"))
            .write(foreach_epoch(deliver))
        )
        return made

    with pytest.raises(UserCodeError, match="database is down"):
        run(spark, job())
    run(spark, job())
    epochs = [epoch for epoch, _ in calls]
    assert epochs[2] == epochs[3], "the failed epoch is delivered again first"
    assert calls[2] == calls[3]
    assert len(set(epochs)) == 4
    assert not list((tmp_path / "store" / "calls" / "outputs").rglob(f"{epochs[0]:020d}-*")), (
        "settled output is removed"
    )


def test_foreach_epoch_is_told_of_epochs_without_rows_where_it_wants_to_be(spark: SparkSession, tmp_path: Path) -> None:
    """With an empty frame of the same columns, after the checkpoint, again after a crash; else it is not called."""
    write_input(tmp_path / "in", 0, 3)
    told: dict[str, list[tuple[int, list[Row], list[str]]]] = {"each": [], "filled": []}
    fail_at = {"call": 2}

    def note(whose: str) -> Any:
        def deliver(frame: DataFrame, epoch: int) -> None:
            told[whose].append((epoch, frame.collect(), frame.columns))
            if whose == "each" and len(told[whose]) == fail_at["call"]:
                raise RuntimeError("the database is down")

        return deliver

    def job() -> StreamingJob:
        made, stream = _job(tmp_path)
        (
            stream.transform(lambda frame: frame.where("id < 0"))
            .write(foreach_epoch(note("filled")), name="filled")
            .write(foreach_epoch(note("each"), empty_epochs=True), name="each")
        )
        return made

    with pytest.raises(UserCodeError, match="database is down"):
        run(spark, job())
    run(spark, job())
    epochs = [epoch for epoch, _, _ in told["each"]]
    assert epochs == sorted(epochs)
    assert epochs[1] == epochs[2], "the failed epoch is told again first"
    assert len(set(epochs)) == len(epochs) - 1 == 3
    assert all(rows == [] and columns == ["id", "name", "amount"] for _, rows, columns in told["each"])
    assert told["filled"] == []


def _job(tmp_path: Path, **settings: Any) -> Any:
    job = StreamingJob(
        "bad",
        store=str(tmp_path / "store"),
        settings=job_settings(parallelism=2, local_dir=str(tmp_path / "local"), **settings),
    )
    return job, job.read(
        lambda s: (
            s.readStream.schema("id long, name string, amount long")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(tmp_path / "in"))
        )
    )


def test_a_missing_key_column_is_refused_before_anything_is_written(spark: SparkSession, tmp_path: Path) -> None:
    """The message names the operator, the column and what there is."""
    write_input(tmp_path / "in", 0, 1)
    job, stream = _job(tmp_path)
    stream.key_by("nam").aggregate(uid="n", n=aggregates.count())
    with pytest.raises(InvalidPipeline, match=r"operator 'n'.*'nam'.*id, name, amount"):
        run(spark, job)
    assert not (tmp_path / "store").exists()


def test_a_void_key_column_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A column of nothing but null has no type to store."""
    write_input(tmp_path / "in", 0, 1)
    job, stream = _job(tmp_path)
    stream.transform(lambda df: df.selectExpr("*", "null AS nothing")).key_by("nothing").aggregate(
        uid="n", n=aggregates.count()
    )
    with pytest.raises(InvalidPipeline, match="void"):
        run(spark, job)


class Misfit(Steps):
    """Yields a text where the schema says long."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        yield Row(id="secret-value", name="x", seen=1, total=1, previous=1)


class Broken(Steps):
    """Raises in the third epoch."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        if (self.state.get() or (0,))[0] > 3:
            raise KeyError("no such thing")
        yield from super().handleInputRows(key, rows, timerValues)


def test_an_output_row_that_does_not_fit_is_refused_without_showing_it(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would store null or a truncated number; we refuse, and user data stays out of the message."""
    write_input(tmp_path / "in", 0, 1)
    with pytest.raises(InvalidData, match=r"operator 'steps'.*column 'id'.*int64") as caught:
        run(spark, two_step_job(tmp_path, Misfit()))
    assert "secret-value" not in str(caught.value)


def test_user_errors_fail_the_epoch_and_leave_the_last_snapshot_restorable(spark: SparkSession, tmp_path: Path) -> None:
    """The message names operator and shard; fixing the code and starting again gives the uninterrupted result."""
    write_input(tmp_path / "in", 0, 6)
    with pytest.raises(UserCodeError, match=r"operator 'steps', shard \d.*KeyError.*no such thing"):
        run(spark, two_step_job(tmp_path, Broken()))
    status = Catalog(open_store(str(tmp_path / "store")), "steps").status()
    assert status is not None
    assert status.state == "failed"
    assert "no such thing" in status.message
    run(spark, two_step_job(tmp_path))
    assert_equals_batch(spark, tmp_path)


def test_a_step_that_stops_reading_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """`limit` after an operator would leave shards half processed."""
    write_input(tmp_path / "in", 0, 1)
    job, stream = _job(tmp_path, output_rows_per_batch=1)
    stream.key_by("name").transform_with_state(
        Steps(), "id long, name string, seen long, total long, previous long", uid="s"
    ).transform(lambda df: df.limit(1)).write(ParquetSink(str(tmp_path / "out")))
    with pytest.raises(InvalidPipeline, match="limit"):
        run(spark, job)


def test_changed_state_schemas_are_refused_before_a_row_is_processed(spark: SparkSession, tmp_path: Path) -> None:
    """The message names operator, state, old and new schema; nothing is committed."""
    write_input(tmp_path / "in", 0, 2)
    run(spark, two_step_job(tmp_path))
    before = Catalog(open_store(str(tmp_path / "store")), "steps").snapshot_ids()

    class Changed(Steps):
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("steps", "seen int, total long, last long")

    with pytest.raises(InvalidPipeline, match=r"state 'steps'.*'seen' is int now, and bigint"):
        run(spark, two_step_job(tmp_path, Changed()))
    assert Catalog(open_store(str(tmp_path / "store")), "steps").snapshot_ids() == before


@pytest.mark.parametrize("setting", ["local_dir", "scratch_dir"])
def test_a_folder_that_others_can_replace_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, setting: str
) -> None:
    """Positions of sources and copies of state lie there; and a run that is refused has fenced nobody."""
    write_input(tmp_path / "in", 0, 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "spark").symlink_to(elsewhere)
    place = tmp_path / ("link" if setting == "local_dir" else "shared")
    with pytest.raises(InvalidConfiguration, match=r"link"):
        two_step_job(tmp_path, **{setting: str(place)}).run(spark, trigger=AVAILABLE)
    assert not list(elsewhere.iterdir())
    assert not (tmp_path / "store" / "steps").exists()


def test_local_copies_give_way_while_a_job_runs_on_a_disk_that_fills_up(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's own writes cannot be repeated by us: there must be room before they fail. The result is the same."""
    write_input(tmp_path / "in", 0, 4)
    monkeypatch.setattr("state_runtime.driver.scratch._free_bytes", lambda _: 0)
    run(spark, two_step_job(tmp_path, scratch_dir=str(tmp_path / "scratch")))
    assert any("local copies of shards" in message for message in caplog.messages)
    assert_equals_batch(spark, tmp_path)


def test_a_disk_that_is_full_while_a_job_runs_ends_it_with_one_message(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4: a supervisor starts it again. What comes from Spark about it is a hundred lines of Java."""
    write_input(tmp_path / "in", 0, 2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def clock(checkpoint: SparkCheckpoint, batch_id: int) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(SparkCheckpoint, "clock", clock)
        with pytest.raises(Unavailable, match=r"scratch folder .* free space there, or set scratch_dir") as raised:
            run(spark, two_step_job(tmp_path))
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)
    run(spark, two_step_job(tmp_path))
    assert_equals_batch(spark, tmp_path)


def test_an_unwritable_store_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A file in the place of the store: typed, with the next step."""
    write_input(tmp_path / "in", 0, 1)
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreUnavailable, match="Check that the folder exists"):
        run(spark, two_step_job(tmp_path))


@pytest.mark.parametrize("damage", ["manifest", "segment", "format"])
def test_damaged_primary_data_stops_the_start_and_overwrites_nothing(
    spark: SparkSession, tmp_path: Path, damage: str
) -> None:
    """Truth that cannot be trusted is never stepped over, and what is left stays as it is."""
    write_input(tmp_path / "in", 0, 3)
    run(spark, two_step_job(tmp_path, materialize=False))
    catalog = Catalog(open_store(str(tmp_path / "store")), "steps")
    newest = catalog.latest()
    assert newest is not None
    root = tmp_path / "store" / "steps"
    if damage == "segment":
        path = root / newest.segments[0].path
        body = bytearray(path.read_bytes())
        body[20] ^= 1
        path.write_bytes(body)
    else:
        path = root / manifest_path(newest.snapshot_id)
        body = path.read_bytes()
        path.write_bytes(
            body.replace(f'"format": {FORMAT_VERSION}'.encode(), b'"format": 9') if damage == "format" else body[:-40]
        )
    damaged = path.read_bytes()
    shutil.rmtree(tmp_path / "local")
    write_input(tmp_path / "in", 3, 1)
    with pytest.raises(UnsupportedFormat if damage == "format" else CorruptData):
        run(spark, two_step_job(tmp_path, materialize=False))
    assert path.read_bytes() == damaged
    # The snapshot before the damage is still there, byte for byte readable.
    if damage != "segment":
        assert catalog.manifest(newest.snapshot_id - 1).snapshot_id == newest.snapshot_id - 1
