"""What a task does around an operator, without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from model import CountingIds, FakeClock, empty_manifest
from pyspark.sql import types as T

from state_runtime.base.actor import Actor
from state_runtime.base.settings import CheckpointSettings, JobSettings
from state_runtime.changelog.inflight import InflightPass, RowsLeft, RowsPart
from state_runtime.changelog.parts import PartEntry
from state_runtime.driver.batch_progress import BatchProgress
from state_runtime.driver.epoch_budget import EpochBudget
from state_runtime.driver.shard_index import ShardIndex
from state_runtime.driver.stage_tasks import StageTasks
from state_runtime.pipeline.compile import Stage
from state_runtime.pipeline.partial_rows import partial_rows
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.declared.aggregates import count
from state_runtime.processors.declared.aggregates import sum as sum_of
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock, RowSlice, ShardResult
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import RowsLayout
from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.state.backend import LocalCopyUnusable
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.reader import StateReader
from state_runtime.store import open_store
from state_runtime.task.acknowledgement import Acknowledgement
from state_runtime.task.shard_access import TaskJob
from state_runtime.task.sorted_input import KeyColumns, SortedRows
from state_runtime.task.stage import StageTask

KEYS = pa.schema([("k", pa.string())])


@dataclass
class Gather:
    """Stands for Spark's accumulator."""

    got: list[Acknowledgement] = field(default_factory=list)

    def add(self, more: list[Acknowledgement]) -> None:
        self.got += more


class DamagedOnce:
    """The operator, over a local copy in which a damaged block is met: `after` batches of output were there before."""

    def __init__(self, inner: AggregateOperator, after: int) -> None:
        self.inner = inner
        self.after = after
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def process(
        self,
        slices: Iterable[RowSlice],
        state: StateReader,
        clock: EpochClock,
        shard: int,
        initial: GroupedRows | None = None,
    ) -> ShardResult:
        self.calls += 1
        result = self.inner.process(slices, state, clock, shard, initial)
        if self.calls == 1:
            result.outputs = self._broken(list(result.outputs))
        return result

    def _broken(self, outputs: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from outputs[: self.after]
        raise LocalCopyUnusable("a block is damaged")


def operator() -> AggregateOperator:
    plan = plan_aggregates({"n": count()}, KEYS, "counts")
    return AggregateOperator("counts", ("k",), "`k` string", KEYS, plan, "`n` bigint")


def rows(*keys: str, sequence: int = 0) -> pa.RecordBatch:
    column = pa.array(keys, pa.string())
    return pa.RecordBatch.from_pydict(
        {
            "k": column,
            HASH_COLUMN: pa.array(hash_rows([column]).view("int64")),
            SEQUENCE_COLUMN: pa.array(
                [sequence + n if sequence >= 0 else sequence for n in range(len(keys))], pa.int64()
            ),
        }
    )


@pytest.fixture
def job(tmp_path: Path) -> TaskJob:
    """The first epoch after the first fencing snapshot."""
    catalog = Catalog(open_store(str(tmp_path / "store")), "job")
    info = open_job_root(catalog.root, "job", clock=FakeClock(), ids=CountingIds())
    empty = empty_manifest(info.uid, 1)
    committer = open_run(catalog, info, empty, actor=Actor(FakeClock(), CountingIds(), "h", 1))
    return TaskJob(
        name="job",
        uid=info.uid,
        store_url=str(tmp_path / "store"),
        storage_options={},
        local_dir=str(tmp_path / "local"),
        term=1,
        epoch="e",
        snapshot_id=committer.last.snapshot_id + 1,
        base_snapshot_id=committer.last.snapshot_id,
        parallelism=1,
        clock=EpochClock(1_000),
        settings=JobSettings(checkpoint=CheckpointSettings(inline_bytes_max=1 << 20)),
    )


def stage_task(
    job: TaskJob, process: Any, versions: ShardVersions, gather: Gather, *, trusted: Iterable[int] = (), **other: Any
) -> StageTask:
    """The task of a pipeline with one operator and no sink."""
    return StageTask(
        job=job,
        stage=0,
        operator=process,
        entry=None,
        sinks=(),
        versions=versions,
        trusted=frozenset(trusted),
        emit=True,
        accumulator=gather,
        **other,
    )


def run(
    job: TaskJob, process: Any, version: str, *batches: pa.RecordBatch
) -> tuple[list[pa.RecordBatch], Acknowledgement]:
    """One task over some input: what it emits and acknowledges."""
    gather = Gather()
    task = stage_task(job, process, ShardVersions.of([version]), gather, trusted=[0])
    outputs = list(task(batches))
    (acknowledged,) = gather.got
    return outputs, acknowledged


def test_a_local_copy_that_turns_out_damaged_while_it_is_read_is_replaced_by_the_primary(job: TaskJob) -> None:
    """Before anything was handed on, a damaged block costs time and nothing else."""
    _, first = run(job, operator(), NO_VERSION, rows("a", "b", "a"))
    # No manifest names that epoch, so the primary has nothing: what the retry sees is the primary's.
    damaged = DamagedOnce(operator(), after=0)
    outputs, acknowledged = run(job, damaged, first.version, rows("a"))
    assert damaged.calls == 2
    assert [o.to_pylist() for o in outputs] == [[{"k": "a", "n": 1}]]
    assert acknowledged.local_failed
    assert acknowledged.version not in (first.version, NO_VERSION)


def test_what_was_handed_on_is_never_handed_on_again(job: TaskJob) -> None:
    """Later operators have seen it: the task fails, and the next one begins from the start."""
    _, first = run(job, operator(), NO_VERSION, rows("a", "b"))
    with pytest.raises(LocalCopyUnusable):
        run(job, DamagedOnce(operator(), after=1), first.version, rows("a"))


def test_a_row_that_wakes_a_shard_is_no_input(job: TaskJob) -> None:
    """It says which shard is meant, and is gone before the operator looks."""
    outputs, acknowledged = run(job, operator(), NO_VERSION, rows("", sequence=WAKE_SEQUENCE))
    assert outputs == []
    assert (acknowledged.shard, acknowledged.input_rows, acknowledged.changes.rows) == (0, 0, 0)


def test_spark_reads_the_output_in_pieces_while_the_task_works(job: TaskJob) -> None:
    """One large batch would be turned into rows after the last row was processed, while the checkpoint is made."""
    gather = Gather()
    task = stage_task(job, operator(), ShardVersions.none(1), gather, trusted=[0])
    keys = [f"k{n}" for n in range(25_000)]
    sizes = []
    for piece in task([rows(*keys)]):
        assert gather.got == [], "the snapshot follows the last row"
        sizes.append(piece.num_rows)
    assert sizes == [10_000, 10_000, 5_000]
    assert len(gather.got) == 1


@pytest.mark.parametrize("aggregated_first", [False, True])
def test_waiting_rows_have_the_columns_that_their_operator_reads_now(aggregated_first: bool) -> None:
    """Also where Spark aggregates the rows of this epoch first: those that wait lack a column that came since, and are brought
    to the columns that the operator reads of rows, not to those of aggregated ones."""
    read = T.StructType([T.StructField("k", T.StringType()), T.StructField("w", T.IntegerType())])
    columns = pa.schema([("k", pa.string()), ("w", pa.int32())])
    plan = plan_aggregates({"n": count(), "t": sum_of("w")}, columns, "counts")
    sums = AggregateOperator("counts", ("k",), "`k` string", KEYS, plan, "`n` bigint, `t` bigint")
    stage = Stage(sums, (), T.StructType(), emit=False, input=read, partial=partial_rows(sums, read))
    assert stage.partial is not None
    now = pa.schema([(name, pa.int64()) for name in stage.partial.columns]) if aggregated_first else columns
    whole = (0, (1 << 64) - 1)
    part = RowsPart("changelog/rows.seg", PartEntry("rows", "counts", "", "", 0, 0, "d", 2, 0, *whole))
    waits = InflightPass("counts", 1, 0, RowsLayout(""), (part,), (RowsLeft(*whole, 2, 20),))
    context: Any = SimpleNamespace(
        entries=(), sinks={}, parallelism=1, pipeline=SimpleNamespace(makes_tables=frozenset())
    )
    books: Any = SimpleNamespace(shards=ShardIndex.at_start(1, {}, {}, ["counts"]), needed_rows=frozenset())
    tasks = StageTasks(context, None, books, None, None)  # type: ignore[arg-type]
    budget = EpochBudget(None, {}, frozenset())
    job: Any = SimpleNamespace(of_operator=lambda uid: None)
    task = tasks._stage_task(job, None, budget, BatchProgress(0, passes=(waits,)), False, stage, 0)
    keys = pa.array(["a", "a"])
    stored = pa.RecordBatch.from_arrays([keys, pa.array([1, 2])], names=["k", "gone"])
    host: Any = SimpleNamespace(read=lambda held: SortedRows(stored, hash_rows([keys]), pa.array([0, 1]).to_numpy()))
    access: Any = SimpleNamespace(hash_range=whole)
    (found,) = task._stored_passes(access, host, KeyColumns(("k",), KEYS), pa.RecordBatch.from_pylist([], schema=now))
    taken = found.take(10)
    assert taken is not None
    assert taken.rows.rows.to_pylist() == [{"k": "a", "w": None}] * 2
