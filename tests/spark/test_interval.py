"""Several epochs in one checkpoint, through whole jobs: output at checkpoints only, and the same result as always."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime import Progress, StreamingJob, aggregates, foreach_epoch, windows
from state_runtime.base import faults
from state_runtime.base.clock import SYSTEM_CLOCK
from state_runtime.base.errors import InvalidConfiguration, StillstateError, StoreUnavailable
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import open_store

from .jobs import SCHEMA, Steps, assert_equals_batch, settings, two_step_job, write_input
from .timed import TimedJob

pytestmark = [pytest.mark.spark, pytest.mark.long]

ONCE = {"availableNow": True}
ATTEMPTS_OF_SPARK = 3  # of a task: the session is local[2,3]
SHARDS = 3  # with rows in each epoch: nearly all keys of the second operator fall into one of its two


def snapshots(root: Path, kind: str = "checkpoint") -> list[Manifest]:
    """All manifests of a kind, oldest first."""
    catalog = Catalog(open_store(str(root / "store")), "steps")
    newest = catalog.latest()
    assert newest is not None
    found = [catalog.manifest(number) for number in range(1, newest.snapshot_id + 1)]
    return [m for m in found if m.kind == kind]


def published(root: Path) -> set[Path]:
    return set((root / "out-steps").glob("part-*.parquet"))


def run(
    spark: SparkSession, root: Path, processor: StatefulProcessor | None = None, on_progress: Any = None, **changes: Any
) -> list[Progress]:
    seen: list[Progress] = []

    def note(progress: Progress) -> None:
        seen.append(progress)
        if on_progress is not None:
            on_progress(progress)

    two_step_job(root, processor, **changes).run(spark, trigger=ONCE, on_progress=note)
    return seen


def test_output_appears_at_checkpoints_only_and_is_that_of_one_checkpoint_an_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_input(tmp_path / "in", 0, 8)
    files: list[int] = []
    seen = run(
        spark, tmp_path, on_progress=lambda _: files.append(len(published(tmp_path))), checkpoint_batches=3,
        materialize=False,
    )  # fmt: skip
    assert [p.epochs for p in seen] == [1, 2, 3, 1, 2, 3, 1, 2, 2]
    assert [p.checkpoint_ms > 0 for p in seen] == [False, False, True, False, False, True, False, False, True]
    assert files[0] == files[1] == 0 < files[2] == files[3] == files[4] < files[5] == files[7] < files[8]
    checkpoints = snapshots(tmp_path)
    assert [m.progress.epochs for m in checkpoints if m.progress] == [3, 3, 2]
    assert [m.epoch for m in checkpoints] == [4, 7, 9], "the first snapshot is the fencing one"
    assert [len(m.segments) for m in checkpoints] == [1, 2, 3]
    assert sum(m.progress.input_rows for m in checkpoints if m.progress) == sum(p.input_rows for p in seen)
    assert sum(p.segment_bytes for p in seen) == checkpoints[-1].log_bytes
    assert [len({o.epoch for o in m.outputs}) for m in checkpoints] == [3, 3, 2]
    assert_equals_batch(spark, tmp_path)
    commits = list((tmp_path / "out-steps" / "_stillstate" / "commits").rglob("*.json"))
    assert len(commits) == 8, "one entry of the sink's log an epoch"


def test_a_run_goes_on_with_intervals_where_another_ended(spark: SparkSession, tmp_path: Path) -> None:
    """Epochs count on; local copies of the checkpoint still serve."""
    write_input(tmp_path / "in", 0, 4)
    run(spark, tmp_path, checkpoint_batches=3)
    write_input(tmp_path / "in", 4, 5)
    seen = run(spark, tmp_path, checkpoint_batches=100)
    assert (seen[0].local_restores, seen[0].primary_restores) == (SHARDS, 0)
    write_input(tmp_path / "in", 9, 2)
    run(spark, tmp_path)
    assert_equals_batch(spark, tmp_path)
    numbers = [o.epoch for m in snapshots(tmp_path) for o in m.outputs if o.sink == "steps"]
    assert numbers == sorted(set(numbers)), "no number is published twice"


class BreaksAt(Steps):
    """Raises when it sees a row: an epoch in the middle of an interval fails."""

    def __init__(self, row_id: int) -> None:
        self.row_id = row_id

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in super().handleInputRows(key, rows, timerValues):
            if row.id == self.row_id:
                raise RuntimeError("a bug")
            yield row


class AwayAt(Steps):
    """The store does not answer the task that has seen this row, in as many attempts as Spark makes of one action."""

    def __init__(self, row_id: int, flag: Path) -> None:
        self.row_id = row_id
        self.flag = flag

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in super().handleInputRows(key, rows, timerValues):
            if row.id == self.row_id and (not self.flag.exists() or self.flag.stat().st_size < ATTEMPTS_OF_SPARK):
                with self.flag.open("a") as flag:
                    flag.write("x")
                _be_away_once()
            yield row


def _be_away_once() -> None:
    """In a worker of Spark: the next request that a task makes after its rows fails."""
    reach = faults.reach

    def away(point: str) -> None:
        if point == "task-processed":
            faults.reach = reach
            raise StoreUnavailable("the store did not answer")

    faults.reach = away


def test_a_task_whose_store_is_away_for_a_moment_costs_an_epoch_and_no_run(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch is run again in the same process, in the middle of an interval; output and state are those of a calm day."""
    write_input(tmp_path / "in", 0, 6)
    seen = run(spark, tmp_path, AwayAt(4 * 60 + 5, tmp_path / "was-away"), checkpoint_batches=3, materialize=False)
    assert (tmp_path / "was-away").stat().st_size == ATTEMPTS_OF_SPARK
    assert [r.getMessage() for r in caplog.records if "is run again in 5 s: StoreUnavailable" in r.getMessage()]
    assert [p.epochs for p in seen][:6] == [1, 2, 3, 1, 2, 3]
    assert {m.term for m in snapshots(tmp_path)} == {1}, "no second run was needed"
    assert sum(p.primary_restores for p in seen) == 0, "the local copies still serve"
    assert_equals_batch(spark, tmp_path)


def test_a_failure_in_the_middle_repeats_the_epochs_and_publishes_once(spark: SparkSession, tmp_path: Path) -> None:
    """The local copies of the checkpoint are still there: the repetition begins from them."""
    write_input(tmp_path / "in", 0, 9)
    seen: list[Progress] = []
    with pytest.raises(StillstateError):
        run(spark, tmp_path, BreaksAt(7 * 60 + 5), seen.append, checkpoint_batches=4, materialize=False)
    assert len(seen) == 7
    assert [m.epoch for m in snapshots(tmp_path)] == [5]
    before = published(tmp_path)
    again = run(spark, tmp_path, checkpoint_batches=4)
    assert again[0].batch_id == 4
    assert (again[0].local_restores, again[0].primary_restores) == (SHARDS, 0)
    assert before < published(tmp_path)
    assert_equals_batch(spark, tmp_path)


def test_a_run_that_fails_takes_back_what_its_epochs_staged_and_uploaded(spark: SparkSession, tmp_path: Path) -> None:
    """Uploaded parts, flushed segments and staged output of the interval: a job that fails over and over fills no store."""
    write_input(tmp_path / "in", 0, 5)
    before: set[str] = set()

    def objects() -> set[str]:
        found = [
            *(tmp_path / "store").rglob("*.seg"),
            *(tmp_path / "out-steps" / "_stillstate" / "staging").rglob("*.parquet"),
        ]
        return {str(path) for path in found}

    def note(progress: Progress) -> None:
        before.update(objects())

    with pytest.raises(StillstateError):
        run(
            spark, tmp_path, BreaksAt(3 * 60 + 5), note, checkpoint_batches=4, inline_bytes_max=0, pending_bytes_max=0,
            checkpoint_interval_s=86_400.0,
        )  # fmt: skip
    assert len(before) > 6, "the epochs before the failure wrote something"
    assert not before & objects()
    run(spark, tmp_path, checkpoint_batches=4)
    assert_equals_batch(spark, tmp_path)


@pytest.mark.parametrize("backend", ["arrow", "rocksdb"])
def test_a_local_copy_that_is_lost_in_the_middle_makes_the_driver_write_what_it_holds(
    spark: SparkSession, tmp_path: Path, backend: str
) -> None:
    """Only it had the newest changes: it flushes them, and the epoch is run once more, from the primary."""
    write_input(tmp_path / "in", 0, 7)

    def lose(progress: Progress) -> None:
        if progress.batch_id == 3:
            shutil.rmtree(tmp_path / "local" / "state")

    seen = run(spark, tmp_path, on_progress=lose, checkpoint_batches=100, backend=backend, materialize=False)
    assert [p.primary_restores for p in seen[4:6]] == [SHARDS, 0]
    assert seen[4].segment_bytes > 0
    assert seen[4].input_rows == seen[3].input_rows
    (checkpoint,) = snapshots(tmp_path)
    assert len(checkpoint.segments) == 2
    assert {s.snapshot_id for s in checkpoint.segments} == {checkpoint.snapshot_id}
    shutil.rmtree(tmp_path / "local" / "state")
    write_input(tmp_path / "in", 7, 2)
    run(spark, tmp_path, backend=backend)
    assert_equals_batch(spark, tmp_path)


def test_changes_beyond_the_bound_are_written_before_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 6)
    seen = run(spark, tmp_path, checkpoint_batches=100, pending_bytes_max=0, materialize=False)
    assert all(p.segment_bytes > 0 for p in seen[:6])
    (checkpoint,) = snapshots(tmp_path)
    assert len(checkpoint.segments) == 6
    shutil.rmtree(tmp_path / "local" / "state")
    write_input(tmp_path / "in", 6, 2)
    assert run(spark, tmp_path, parallelism=3)[0].primary_restores >= SHARDS
    assert_equals_batch(spark, tmp_path)


def test_a_broken_local_disk_in_the_middle_costs_a_flush_and_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A shard whose local version could not be written is safe at once: its changes do not stay in memory only."""
    write_input(tmp_path / "in", 0, 5)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "state").write_text("no folder")
    seen = run(spark, tmp_path, checkpoint_batches=100, materialize=False)
    assert all(p.local_failures > 0 and p.segment_bytes > 0 for p in seen[:5])
    assert_equals_batch(spark, tmp_path)


def test_uploaded_changes_of_several_epochs_keep_their_order(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 5)
    run(spark, tmp_path, checkpoint_batches=100, inline_bytes_max=0)
    shutil.rmtree(tmp_path / "local" / "state")
    write_input(tmp_path / "in", 5, 1)
    assert run(spark, tmp_path)[0].primary_restores == SHARDS
    assert_equals_batch(spark, tmp_path)


@dataclass
class Ahead:
    """The system's clock, some seconds ahead."""

    seconds: float = 0.0

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s() + self.seconds


def forever(
    spark: SparkSession, root: Path, until: Any, clock: Ahead | None = None, **changes: Any
) -> tuple[list[Progress], Callable[[], None]]:
    """A run without an end, in a thread, until `until(progress)` holds; and how to stop it."""
    seen: list[Progress] = []
    stop, reached = threading.Event(), threading.Event()

    def note(progress: Progress) -> None:
        seen.append(progress)
        if until(progress):
            reached.set()

    job = two_step_job(root, **changes)
    if clock is not None:
        job._clock = clock
    thread = threading.Thread(target=lambda: job.run(spark, on_progress=note, stop=stop))
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    if not reached.wait(120):
        end()
        raise AssertionError([p.epoch for p in seen])
    return seen, end


def test_an_idle_source_does_not_keep_output_waiting_longer_than_the_interval(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Time passes, and no row comes: the checkpoint is made between two epochs.

    The wall clock does not move with it, as if it had been set back: that is not believed, so the checkpoint has the date of the
    time that went by.
    """
    write_input(tmp_path / "in", 0, 2)
    clock = Ahead()

    def until(progress: Progress) -> bool:
        if progress.batch_id == 1:
            clock.seconds = 1_000_000.0
        return progress.checkpoint_ms > 0

    seen, end = forever(spark, tmp_path, until, clock, checkpoint_interval_s=86_400.0)
    assert published(tmp_path), "nobody asked the run to end"
    end()
    newest = Catalog(open_store(str(tmp_path / "store")), "steps").latest()
    assert newest is not None
    assert newest.created_at_ms - SYSTEM_CLOCK.now_ms() > 900_000_000
    assert [(p.input_rows > 0, p.checkpoint_ms > 0, p.epochs) for p in seen] == [
        (True, False, 1),
        (True, False, 2),
        (False, True, 2),
    ]
    assert_equals_batch(spark, tmp_path)


def test_a_run_that_is_stopped_makes_a_checkpoint_first(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 3)
    seen, end = forever(spark, tmp_path, lambda p: p.batch_id == 2, checkpoint_interval_s=86_400.0)
    assert not published(tmp_path)
    end()
    assert [p.checkpoint_ms > 0 for p in seen] == [False, False, False, True]
    assert_equals_batch(spark, tmp_path)


def test_epochs_without_a_batch_happen_inside_an_interval(spark: SparkSession, tmp_path: Path) -> None:
    """The watermark moves on by the head: windows close as with a checkpoint an epoch, and in the same epochs."""

    def build(stream: Any) -> Any:
        return (
            stream.key_by("k")
            .window(windows.tumbling("10 seconds"), uid="w", output_mode="append", n=aggregates.count())
            .transform(lambda df: df.selectExpr("k", "unix_seconds(window.start) AS s", "n"))
        )

    batches = [[("a", 1, 1), ("b", 2, 1)], [("a", 35, 1)], [("c", 90, 1)], [("c", 91, 1), ("a", 130, 1)]]
    each = TimedJob(spark, tmp_path / "each", build)
    expected = each.run(*batches)
    some = TimedJob(spark, tmp_path / "some", build, checkpoint_batches=100)
    assert some.run(*batches) == expected
    assert some.epochs.keys() == each.epochs.keys()
    assert replace(some.manifest().time, batch_time_ms=0) == replace(each.manifest().time, batch_time_ms=0)
    assert len(some.progress) == len(each.progress) + 1, "the last checkpoint is reported by itself"
    assert some.manifest().progress.epochs == len(each.progress)


def test_a_job_without_state_takes_intervals_too(spark: SparkSession, tmp_path: Path) -> None:
    """Only sinks: what is pending is output."""
    write_input(tmp_path / "in", 0, 3)
    got: dict[int, int] = {}
    job = StreamingJob("plain", store=str(tmp_path / "store"), settings=settings(tmp_path, checkpoint_batches=2))
    job.read(lambda s: s.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))).write(
        foreach_epoch(lambda df, epoch: got.update({epoch: df.count()}))
    )
    job.run(spark, trigger=ONCE)
    assert got == {2: 60, 3: 60, 4: 60}


@pytest.mark.parametrize(
    ("clean", "batches", "refused"), [("delete", 2, True), ("off", 2, False), ("delete", 1, False)]
)
def test_input_that_spark_removes_before_the_checkpoint_is_refused(
    spark: SparkSession, tmp_path: Path, clean: str, batches: int, refused: bool
) -> None:
    """A crash would leave a hole: Spark's log counts the epoch as done, the newest manifest does not."""
    write_input(tmp_path / "in", 0, 1)
    changed = settings(tmp_path, checkpoint_batches=batches)
    job = StreamingJob("plain", store=str(tmp_path / "store"), settings=changed)
    job.read(
        lambda s: (
            s.readStream.schema(SCHEMA).option("cleanSource", clean).parquet(str(tmp_path / "in")).where("id >= 0")
        )
    ).write(foreach_epoch(lambda df, epoch: None))
    if refused:
        with pytest.raises(InvalidConfiguration, match="cleanSource"):
            job.run(spark, trigger=ONCE)
        assert not (tmp_path / "store").exists(), "refused before anything is written"
    else:
        job.run(spark, trigger=ONCE)
