"""A job that goes back takes its output back, or refuses to start, as its sinks say."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from state_runtime import DeltaSink, EpochInfo, ParquetSink, foreach_epoch
from state_runtime.base.errors import InvalidConfiguration, StoreUnavailable
from state_runtime.pipeline.commit_log import COMMITS_DIR
from state_runtime.pipeline.sinks import OnRollback, Sink
from state_runtime.pipeline.staging import SinkSpec
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, StagedOutput
from state_runtime.store import open_store

from .jobs import assert_delta_equals_batch, assert_equals_batch, two_step_job, write_input

pytestmark = pytest.mark.spark


def parquet(root: Path, on_rollback: OnRollback) -> tuple[Sink, Sink]:
    steps = ParquetSink(str(root / "out-steps"), epoch_column=None, on_rollback=on_rollback)
    return steps, ParquetSink(str(root / "out-buckets"), on_rollback=on_rollback)


def delta(root: Path, on_rollback: OnRollback) -> tuple[Sink, Sink]:
    """One table is appended to, the other has the newest row of each key."""
    steps = DeltaSink(str(root / "out-steps"), on_rollback=on_rollback)
    return steps, DeltaSink(str(root / "out-buckets"), merge_on=["bucket", "even"], on_rollback=on_rollback)


def snapshots(root: Path) -> list[Manifest]:
    catalog = Catalog(open_store(str(root / "store")), "steps")
    return [catalog.manifest(snapshot_id) for snapshot_id in catalog.snapshot_ids()]


@pytest.mark.parametrize(
    ("sinks", "assert_exact"), [(parquet, assert_equals_batch), (delta, assert_delta_equals_batch)]
)
def test_after_a_job_went_back_each_row_is_there_once(
    spark: SparkSession, tmp_path: Path, sinks: Callable[..., Any], assert_exact: Callable[..., None]
) -> None:
    written: list[int] = []

    def run(files: int, **how: Any) -> None:
        write_input(tmp_path / "in", sum(written), files)
        written.append(files)
        job = two_step_job(tmp_path, sinks=sinks(tmp_path, "replace"), parallelism=how.pop("parallelism", 2))
        job.run(spark, trigger={"availableNow": True}, **how)

    run(4)
    second = next(m for m in snapshots(tmp_path) if m.source is not None and m.source.batch_id == 1)
    left = snapshots(tmp_path)[-1]
    run(2, from_snapshot=second.snapshot_id, parallelism=3)
    assert_exact(spark, tmp_path)
    assert snapshots(tmp_path)[-1].left_epochs == ((second.epoch + 1, left.epoch),)
    with pytest.raises(
        InvalidConfiguration, match="was taken out of the place of sink 'buckets' when the job went back"
    ):
        run(0, from_snapshot=left.snapshot_id)
    run(1, from_snapshot=second.snapshot_id)
    assert_exact(spark, tmp_path)


def test_a_job_whose_sink_refuses_does_not_start_behind_its_output_and_goes_forward_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_input(tmp_path / "in", 0, 3)

    def run(**how: Any) -> None:
        job = two_step_job(tmp_path, sinks=parquet(tmp_path, "refuse"))
        job.run(spark, trigger={"availableNow": True}, **how)

    run()
    *_, first, last = [m.snapshot_id for m in snapshots(tmp_path) if m.kind == "checkpoint"]
    with pytest.raises(
        InvalidConfiguration, match=r"has output up to epoch 4, and job 'steps' went back behind epoch 4"
    ):
        run(from_snapshot=first)
    write_input(tmp_path / "in", 3, 1)
    run(from_snapshot=last)
    assert_equals_batch(spark, tmp_path)


def test_a_function_is_told_which_epochs_the_job_went_back_behind(spark: SparkSession, tmp_path: Path) -> None:
    told: list[EpochInfo] = []
    write_input(tmp_path / "in", 0, 3)

    def run(**how: Any) -> None:
        sinks = foreach_epoch(lambda df, epoch, info: told.append(info)), ParquetSink(str(tmp_path / "out"))
        two_step_job(tmp_path, sinks=sinks).run(spark, trigger={"availableNow": True}, **how)

    run()
    first, *_, last = [m for m in snapshots(tmp_path) if m.kind == "checkpoint"]
    run(from_snapshot=first.snapshot_id)
    before, behind = [t for t in told if t.epoch <= last.epoch], [t for t in told if t.epoch > last.epoch]
    assert {t.left_epochs for t in before} == {()}
    assert {t.left_epochs for t in behind} == {((first.epoch + 1, last.epoch),)}


def test_output_that_waited_for_a_sink_comes_also_if_later_output_goes(spark: SparkSession, tmp_path: Path) -> None:
    """A table that knows the last epoch that was left would pass over an older one."""
    away: list[str] = []

    class Away(DeltaSink):
        def publish(self, spec: SinkSpec, output: StagedOutput, spark: object) -> None:
            if output.epoch >= 3 and away:
                raise StoreUnavailable("the table does not answer")
            super().publish(spec, output, spark)

    def run(**how: Any) -> None:
        steps, buckets = (str(tmp_path / f"out-{name}") for name in ("steps", "buckets"))
        sinks = (
            Away(steps, on_rollback="replace"),
            DeltaSink(buckets, merge_on=["bucket", "even"], on_rollback="replace"),
        )
        two_step_job(tmp_path, sinks=sinks).run(spark, trigger={"availableNow": True}, **how)

    write_input(tmp_path / "in", 0, 4)
    away.append("steps")
    with suppress(StoreUnavailable):
        run()
    away.clear()
    second = next(m for m in snapshots(tmp_path) if m.source is not None and m.source.batch_id == 1)
    waiting = [output.epoch for output in snapshots(tmp_path)[-1].outputs if output.sink == "steps"]
    assert waiting[:1] == [second.epoch]
    run(from_snapshot=second.snapshot_id)
    assert_delta_equals_batch(spark, tmp_path)


def test_a_backup_from_before_is_refused_where_a_sink_takes_output_out(spark: SparkSession, tmp_path: Path) -> None:
    """What it counts on may be gone: nothing of the folder says that the job went back since."""

    def run(on_rollback: OnRollback, **how: Any) -> None:
        two_step_job(tmp_path, sinks=parquet(tmp_path, on_rollback)).run(spark, trigger={"availableNow": True}, **how)

    write_input(tmp_path / "in", 0, 2)
    run("replace")
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    write_input(tmp_path / "in", 2, 1)
    run("replace")
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "backup", tmp_path / "store")
    with pytest.raises(InvalidConfiguration, match="an older backup was put in place"):
        run("replace")
    run("continue", takeover=True)
    assert snapshots(tmp_path)[-1].epoch > 3


def test_no_fenced_run_has_staged_files_when_output_is_taken_out(spark: SparkSession, tmp_path: Path) -> None:
    """It could still give them their names."""
    seen: list[list[str]] = []

    class Watched(DeltaSink):
        def withdraw(self, spec: SinkSpec, left: Sequence[tuple[int, int]]) -> int:
            seen.append([o.path for o in spec.store().list_objects(spec.staging_prefix)])
            return super().withdraw(spec, left)

    def sinks() -> tuple[Sink, Sink]:
        steps, buckets = (
            Watched(str(tmp_path / f"out-{name}"), on_rollback="replace") for name in ("steps", "buckets")
        )
        return steps, buckets

    write_input(tmp_path / "in", 0, 2)
    two_step_job(tmp_path, sinks=sinks()).run(spark, trigger={"availableNow": True})
    *_, first, last = [m for m in snapshots(tmp_path) if m.kind == "checkpoint"]
    (folder,) = (tmp_path / "out-steps/_stillstate/staging").iterdir()
    late = folder / f"{last.term:020d}" / f"{last.epoch + 1:020d}-00000-{'a' * 16}-000.parquet"
    late.parent.mkdir(exist_ok=True)
    late.write_bytes(b"a file that a task of the first run stages when it is over")
    two_step_job(tmp_path, sinks=sinks()).run(spark, trigger={"availableNow": True}, from_snapshot=first.snapshot_id)
    assert seen == [[], []]


def test_an_epoch_with_few_rows_is_one_file_whatever_the_number_of_shards(spark: SparkSession, tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, 2)
    two_step_job(tmp_path, parallelism=7).run(spark, trigger={"availableNow": True})
    for name in ("out-steps", "out-buckets"):
        files = list((tmp_path / name).glob("*.parquet"))
        assert len(files) == 2, "one for each epoch"
        entries = list((tmp_path / name / COMMITS_DIR).rglob("*.json"))
        assert len(entries) == 2
        assert not list((tmp_path / name / "_stillstate/staging").rglob("*.parquet"))
    assert sum(pq.read_metadata(file).num_rows for file in (tmp_path / "out-steps").glob("*.parquet")) > 0
    assert_equals_batch(spark, tmp_path)
