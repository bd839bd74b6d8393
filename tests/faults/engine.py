"""The real driver loop and the real tasks, in one process, without Spark: a plan is a loop over shards.

The operators of a pipeline are a chain: each counts, per key, the rows that the one before it emitted. `plan_epoch`, the
accumulator and Spark's checkpoint directory are stood in for; everything else is what runs in production.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from model import FakeBroadcast, empty_manifest
from pyspark.sql import types as T

from state_runtime.base.actor import Actor
from state_runtime.base.clock import Clock
from state_runtime.base.errors import StillstateError
from state_runtime.base.ids import Ids
from state_runtime.base.progress import Progress, RowsAside
from state_runtime.base.settings import JobSettings
from state_runtime.driver import engine
from state_runtime.driver.context import DriverContext
from state_runtime.driver.epochs import EpochDriver
from state_runtime.pipeline.compile import CompiledPipeline, Stage
from state_runtime.pipeline.sinks import ParquetSink
from state_runtime.pipeline.source_names import PLAIN
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.declared.aggregates import count
from state_runtime.snapshot import fencing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.manifest import SourcePosition
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows
from state_runtime.store import open_store
from state_runtime.task.stage import StageTask

JOB, SINK = "job", "out"
KEYS = pa.schema([("k", pa.string())])
TASK_ATTEMPTS = 3
Batch = Sequence[str]


def operator(number: int) -> AggregateOperator:
    """The n-th of the chain."""
    uid = f"counts-{number}"
    return AggregateOperator(uid, ("k",), "`k` string", KEYS, plan_aggregates({"n": count()}, KEYS, uid), "`n` bigint")


def pipeline(operators: int, out: str, options: Mapping[str, Any]) -> CompiledPipeline:
    """The chain, with a sink on its last operator."""
    return CompiledPipeline(
        tuple(
            Stage(operator(n), (SINK,) if n == operators - 1 else (), T.StructType(), n < operators - 1)
            for n in range(operators)
        ),
        {SINK: ParquetSink(out, storage_options=options)},
    )


def by_shard(keys: Batch, parallelism: int, wake: Sequence[int]) -> list[list[pa.RecordBatch]]:
    """A stage's input, as Spark would shuffle it; a shard without rows gets no batch."""
    column = pa.array(keys, pa.string())
    hashes = hash_rows([column])
    lows = np.array([hash_range_of_shard(s, parallelism)[0] for s in range(parallelism)], dtype=np.uint64)
    shards = np.searchsorted(lows, hashes, side="right") - 1
    order = np.argsort(shards, kind="stable")
    bounds = np.searchsorted(shards[order], np.arange(parallelism + 1))
    whole = _rows(column.take(pa.array(order)), hashes[order], np.arange(len(keys))[order])
    found = [[whole.slice(low, high - low)] if high > low else [] for low, high in itertools.pairwise(bounds)]
    for shard in wake:
        found[shard].append(_rows(pa.nulls(1, pa.string()), lows[shard : shard + 1], np.array([WAKE_SEQUENCE])))
    return found


def _rows(keys: pa.Array, hashes: Any, sequence: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "k": keys,
            HASH_COLUMN: pa.array(hashes.view("int64")),
            SEQUENCE_COLUMN: pa.array(sequence, pa.int64()),
        }
    )


class Gather:
    """Stands for Spark's accumulator."""

    def __init__(self, value: list[Any]) -> None:
        self.value = value

    def add(self, more: list[Any]) -> None:
        self.value.extend(more)


@dataclass
class InProcess:
    """Stands for Spark: an "action" runs the tasks of all stages, shard by shard.

    Attributes:
        repeats: asked per task that succeeded, whether it is run once more, as speculation and lost shuffle files do.
    """

    repeats: Callable[[], bool] = lambda: False

    @property
    def session(self) -> Any:
        context = SimpleNamespace(
            master="local[1]",
            accumulator=lambda value, _: Gather(value),
            broadcast=FakeBroadcast,
        )
        return SimpleNamespace(sparkContext=context)

    def plan(
        self,
        frame: Any,
        chain: CompiledPipeline,
        parallelism: int,
        *,
        task: Callable[[Stage, int], StageTask],
        wake: Mapping[str, Sequence[int]],
        beginning: frozenset[str],
        in_one_task: bool,
        **_: Any,
    ) -> Any:
        """In place of `plan_epoch`."""

        def collect() -> None:
            keys: Batch = frame.keys
            for number, stage in enumerate(chain.stages):
                assert stage.operator is not None
                emitted: list[str] = []
                shards = by_shard(keys, parallelism, wake.get(stage.operator.uid, ()))
                for batches in [list(itertools.chain(*shards))] if in_one_task else shards:
                    emitted += self._run(task(stage, number), batches)
                keys = emitted

        return SimpleNamespace(run=collect, event_time_ms=dict, source_rows=tuple, aside=RowsAside)

    def _run(self, task: StageTask, batches: list[pa.RecordBatch]) -> list[str]:
        for attempt in range(1, TASK_ATTEMPTS + 1):
            try:
                outputs = list(task(batches))
                if self.repeats():
                    outputs = list(task(batches))
                return [key for batch in outputs for key in batch.column("k").to_pylist()]
            except StillstateError as error:
                if attempt == TASK_ATTEMPTS:
                    # As Spark tells it: as text, in an error of its own.
                    raise RuntimeError(f"Job aborted: {error}") from error
        raise AssertionError("not reached")


class Position:
    """Stands for Spark's checkpoint directory: batch n is the n-th, and its log of seen files has one line of it."""

    numbers = PLAIN

    def clock(self, batch_id: int) -> Any:
        return SimpleNamespace(batch_time_ms=1000 + batch_id)

    def position(self, batch_id: int) -> SourcePosition:
        return SourcePosition(batch_id, "", f"v1\n{{}}\n{batch_id}", "", "", (0,))

    def new_log_lines(self, before: SourcePosition | None, after: SourcePosition) -> dict[int, list[str]]:
        first = before.batch_id + 1 if before is not None else 0
        return {0: [f"file {n}" for n in range(first, after.batch_id + 1)]}


class Run:
    """One run of the job: opened, then driven batch by batch."""

    def __init__(
        self,
        store_url: str,
        options: Mapping[str, Any],
        out: str,
        settings: JobSettings,
        *,
        operators: int,
        clock: Clock,
        ids: Ids,
        spark: InProcess,
        on_progress: Callable[[Progress], None] | None = None,
        job: str = JOB,
        committer: Committer | None = None,
        take_output: bool = False,
    ) -> None:
        """Args:
        committer: of a run that was opened already.
        """
        catalog = Catalog(open_store(store_url, options), job)
        if committer is None:
            info = fencing.open_job_root(catalog.root, job, clock=clock, ids=ids)
            empty = empty_manifest(info.uid, settings.parallelism)
            committer = fencing.open_run(catalog, info, empty, actor=Actor(clock, ids, "h", 1))
        self.committer: Committer = committer
        info = committer.info
        chain = pipeline(operators, out, options if "://" in out else {})
        context = DriverContext(
            job_name=job,
            store_url=store_url,
            storage_options=options,
            root=catalog.root,
            local_dir=settings.local_dir,
            settings=settings,
            parallelism=settings.parallelism,
            pipeline=chain,
            sinks={n: s.spec(job, info.uid, n, (f"{store_url}/{job}", options)) for n, s in chain.sinks.items()},
            entries=tuple(o.entry() for o in chain.operators),
            watermark_policy="min",
            clock=clock,
            ids=ids,
            take_output=take_output,
        )
        self.driver = EpochDriver(
            context, self.committer, Position(), spark.session, on_progress, wait=lambda seconds: False  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self, batches: Sequence[Batch]) -> None:
        """All batches that the newest snapshot does not have, what waits after them, and the last checkpoint."""
        spark = SimpleNamespace(createDataFrame=lambda rows, schema: frame_of(rows))

        def frame_of(keys: Batch) -> Any:
            return SimpleNamespace(keys=keys, sparkSession=spark, schema=None)

        self.driver.publish_pending(spark)  # type: ignore[arg-type]
        source = self.committer.last.source
        for batch_id in range(source.batch_id + 1 if source is not None else 0, len(batches)):
            self.driver.run_batch(frame_of(batches[batch_id]), batch_id)
        while self.driver.is_due():  # rows in flight
            self.driver.run_without_batch(frame_of(()))
        self.driver.finish()
        self.driver.stop()
        self.driver.close(0.0)


@contextmanager
def without_spark(spark: InProcess) -> Iterator[None]:
    """Drivers plan on `spark`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "plan_epoch", spark.plan)
        yield
