"""A chain of operators under the real driver, without Spark, whose epochs end wherever a seed says.

The chains are in inflight_chains.py; each operator has a sink. Spark's part is played as in test_driver_schedule.py: an action runs
the tasks of one operator after the other, each shard's in any order, some of them twice. What counts is what readers see over the
whole input.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from inflight_chains import STEPS, Chain, Input
from model import CountingIds, FakeBroadcast, FakeClock, empty_manifest, first_hash_of_shard
from pyspark.sql import types as T

from state_runtime import JobSettings, ParquetSink, Progress
from state_runtime.base.actor import Actor
from state_runtime.base.errors import TooMuchForOneTask
from state_runtime.base.progress import RowsAside
from state_runtime.base.trusted_clock import TrustedClock
from state_runtime.driver.context import DriverContext
from state_runtime.driver.epoch_budget import BudgetPlanner, EpochBudget
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.pipeline.compile import CompiledPipeline, Stage
from state_runtime.pipeline.source_names import PLAIN
from state_runtime.pipeline.source_position import BatchClock
from state_runtime.processors.operator import Operator
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import Manifest, SourcePosition
from state_runtime.spark.columns import HASH_COLUMN, INITIAL_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows
from state_runtime.store import open_store
from state_runtime.task.slicing import StageBudget
from tests.stored import read_states

__all__ = ["Frame", "Killed", "World", "WorldClock", "deadlines", "finish", "results", "start"]

FIRST_BATCH_MS = 1_700_000_000_000
EPOCHS_MAX = 2_000
"""Of all runs over so few rows; a row in flight that nobody can process would make epochs for ever."""
LATER_MS_MAX = 4_000
"""So long after its batch time a batch's epochs begin, where processing time counts."""


class Killed(BaseException):
    """SIGKILL: the process is gone."""


class Session:
    """Stands for Spark's, which makes frames without rows."""

    def createDataFrame(self, rows: list[Any], schema: Any) -> Frame:
        return Frame(rows)


class Frame(list[Input]):
    """A batch; it knows its session, as Spark's does."""

    sparkSession = Session()
    schema = None


class Accumulator:
    def __init__(self) -> None:
        self.value: list[Any] = []

    def add(self, update: list[Any]) -> None:
        self.value.extend(update)


@dataclass
class WorldClock(FakeClock):
    """The time of the batch that was begun last, or somewhat later."""

    world: World = field(kw_only=True)

    def now_ms(self) -> int:
        world = self.world
        later = world.draw.randrange(LATER_MS_MAX) if world.chain.tick_ms > LATER_MS_MAX else 0
        return FIRST_BATCH_MS + world.ticks * world.chain.tick_ms + later + world.off_ms


@dataclass
class Checkpoint:
    """Spark's checkpoint directory: batch n follows batch n - 1."""

    numbers = PLAIN

    world: World

    def clock(self, batch_id: int) -> BatchClock:
        self.world.ticks = batch_id
        return BatchClock(FIRST_BATCH_MS + batch_id * self.world.chain.tick_ms + self.world.off_ms, 0)

    def position(self, batch_id: int) -> SourcePosition:
        return SourcePosition(batch_id, "m", f"v1\n{{}}\n{batch_id}", "", "c", ())

    def new_log_lines(self, before: SourcePosition | None, after: SourcePosition) -> dict[int, list[str]]:
        return {}


@dataclass
class World:
    """What outlives a driver: store, disk, input; and what a seed does to it."""

    root: Path
    draw: random.Random
    batches: list[list[Input]]
    chain: Chain = STEPS
    ticks: int = 0  # of the clock, one for each batch
    off_ms: int = 0  # that the clock is wrong by
    ids: CountingIds = field(default_factory=CountingIds)
    dies_at: int = 0  # passage of any kill point; 0 is never
    passed: int = 0
    dead: bool = False
    stops_after: int = 0  # epochs of a run; 0 is never
    losses: float = 0.0
    narrow: float = 0.0
    refused: int = 0
    narrow_epochs: int = 0
    repeats: float = 0.0
    driver: Any = None  # of the run that `finish` began
    epochs: list[Progress] = field(default_factory=list)
    late: Counter[str] = field(default_factory=Counter)

    def reach(self, point: str) -> None:
        if self.dead:
            raise Killed(point)
        self.passed += 1
        if self.passed == self.dies_at:
            self.dead = True
            raise Killed(point)

    def plan(
        self,
        frame: list[Input],
        _: Any,
        parallelism: int,
        *,
        task: Callable[..., Any],
        wake: Mapping[str, Sequence[int]],
        beginning: frozenset[str],
        in_one_task: bool,
        **__: Any,
    ) -> SimpleNamespace:
        """Spark's action: the operators one after the other, tasks in any order, some attempts lost and made again.

        A single-task one is one task of Spark's: if it fails, no acknowledgement of it arrives.
        """
        assert len(self.epochs) < EPOCHS_MAX, "it does not come to an end"

        def collect() -> None:
            rows, chain = self.chain.record(frame), self.chain.operators()
            last = len(chain) - 1
            for number, operator in enumerate(chain):
                stage = Stage(operator, (operator.uid,), T.StructType(), emit=number < last)
                outputs: dict[int, list[pa.RecordBatch]] = {}
                shards = list(range(parallelism))
                self.draw.shuffle(shards)
                initial = self.chain.initial.get(operator.uid) if operator.uid in beginning else None
                of_shards = {
                    shard: rows_of_shard(
                        rows, operator, shard, parallelism, woken=shard in wake.get(operator.uid, ()), initial=initial
                    )
                    for shard in shards
                }
                if in_one_task:
                    of_shards = {0: pa.concat_batches([*of_shards.values()])}
                for shard, batch in of_shards.items():
                    pieces = [batch.slice(at, 3) for at in range(0, batch.num_rows, 3)]
                    attempts = 2 if self.draw.random() < self.repeats else 1
                    for _ in range(attempts):
                        made = task(stage, number)
                        try:
                            outputs[shard] = list(made(pieces))
                        except TooMuchForOneTask:
                            made.accumulator.value.clear()
                            self.refused += 1
                            raise
                self.narrow_epochs += in_one_task and number == last
                emitted = [b for shard in sorted(outputs) for b in outputs[shard]]
                rows = (
                    pa.concat_batches(emitted)
                    if emitted
                    else pa.RecordBatch.from_pylist([], schema=operator.output_schema)
                )

        return SimpleNamespace(
            run=collect, event_time_ms=lambda: self.chain.event_times(frame), source_rows=tuple, aside=RowsAside
        )

    def wait(self, seconds: float) -> bool:
        return False

    def note(self, progress: Progress) -> None:
        """After an epoch: sometimes the disk, or a shard's part of it, is gone."""
        self.epochs.append(progress)
        if self.driver is not None and self.driver.epochs == self.stops_after:
            self.driver._stopping.set()
        self.late["rows"] += progress.late_rows
        state = self.root / "local" / "state"
        folders = [f for f in state.glob("*/*/*") if f.is_dir()] if state.exists() else []
        if folders and self.draw.random() < self.losses:
            for folder in folders if self.draw.random() < 0.3 else [self.draw.choice(folders)]:
                shutil.rmtree(folder)


def rows_of_shard(
    rows: pa.RecordBatch,
    operator: Operator,
    shard: int,
    parallelism: int,
    *,
    woken: bool,
    initial: pa.RecordBatch | None = None,
) -> pa.RecordBatch:
    """What a task gets, as `epoch_plan.py` plans it: its rows, a row that wakes it, and the rows of the initial state."""
    hashes, mine = of_shard(rows, operator, shard, parallelism)
    own = rows.take(pa.array(mine))
    columns = {name: own.column(name) for name in rows.schema.names}
    extra = [first_hash_of_shard(shard, parallelism)] if woken else []
    extra_hashes, begun = list(extra), pa.RecordBatch.from_pydict({})
    if initial is not None:
        initial_hashes, chosen = of_shard(initial, operator, shard, parallelism)
        begun = initial.take(pa.array(chosen))
        extra_hashes += initial_hashes[chosen].view("int64").tolist()
    empty = len(extra) + begun.num_rows
    columns = {name: pa.concat_arrays([c, pa.nulls(empty, c.type)]) for name, c in columns.items()}
    columns[HASH_COLUMN] = pa.array([*hashes[mine].view("int64").tolist(), *extra_hashes], pa.int64())
    places = [*mine.tolist(), *(WAKE_SEQUENCE for _ in extra), *range(begun.num_rows)]
    columns[SEQUENCE_COLUMN] = pa.array(places, pa.int64())
    if initial is not None:
        whole = [None] * (len(mine) + len(extra)) + begun.to_pylist()
        columns[INITIAL_COLUMN] = pa.array(whole, pa.struct(list(initial.schema)))
    return pa.RecordBatch.from_pydict(columns)


def of_shard(
    rows: pa.RecordBatch, operator: Operator, shard: int, parallelism: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The hashes of all rows, and which of them are the shard's."""
    hashes = hash_rows([rows.column(name) for name in operator.key_columns])
    low, high = hash_range_of_shard(shard, parallelism)
    return hashes, np.flatnonzero((hashes >= np.uint64(low)) & (hashes <= np.uint64(high)))


def start(
    world: World,
    settings: JobSettings,
    *,
    drop_inflight: bool = False,
    on_trial: bool = False,
    savepoints: Callable[[Committer], Savepoints] = lambda committer: None,  # type: ignore[assignment, return-value]
) -> EpochDriver:
    """A run's beginning, as `JobRun` makes it."""
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    clock = WorldClock(world=world)
    info = open_job_root(catalog.root, "job", clock=clock, ids=world.ids)
    trusted = TrustedClock(clock, lambda: None)
    committer = open_run(
        catalog, info, empty_manifest(info.uid, settings.parallelism), actor=Actor(trusted, world.ids, "h", 1)
    )
    last = committer.last
    world.ticks = last.source.batch_id if last.source is not None else 0
    operators = world.chain.operators()
    described = [o.entry() for o in operators]
    entries = reconcile(last if last.operators else None, described, snapshot_id=last.snapshot_id + 1)
    store_url = str(world.root / "store")
    sinks = {name: ParquetSink(str(world.root / name)) for name in world.chain.sinks}
    begins: Any = world.chain.initial  # `World.plan` adds the rows; the driver asks whether there are any
    stages = tuple(
        Stage(o, (o.uid,), T.StructType(), o is not operators[-1], initial=begins.get(o.uid)) for o in operators
    )
    context = DriverContext(
        job_name="job",
        store_url=store_url,
        storage_options={},
        root=catalog.root,
        local_dir=str(world.root / "local"),
        settings=settings,
        parallelism=settings.parallelism,
        pipeline=CompiledPipeline(stages, sinks, watermarks=world.chain.watermarks),
        sinks={name: sink.spec("job", info.uid, name, (f"{store_url}/job", {})) for name, sink in sinks.items()},
        entries=entries,
        watermark_policy="min",
        clock=clock,
        ids=world.ids,
        drop_inflight=drop_inflight,
        on_trial=on_trial,
    )
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(
            master="local[2]", accumulator=lambda value, param: Accumulator(), broadcast=FakeBroadcast
        )
    )
    begun: Any = EpochDriver(
        context, committer, Checkpoint(world), spark, world.note, savepoints(committer), world.wait
    )  # type: ignore[arg-type]
    begun.publish_pending(spark)
    return begun


def finish(world: World, settings: JobSettings, batches: int | None = None, *, drop_inflight: bool = False) -> Manifest:
    """From where the store stands to the end of the input, unless something happens; or to a stop after so many batches."""
    begun: Any = start(world, settings, drop_inflight=drop_inflight)
    world.driver = begun
    source = begun._committer.last.source
    first = source.batch_id + 1 if source is not None else 0
    last = len(world.batches) if batches is None else min(len(world.batches), first + batches)
    for number in range(first, last):
        begun.run_batch(Frame(world.batches[number]), number)
    for _ in range(world.chain.ticks if batches is None else 0):
        while not begun._stopping.is_set() and begun.is_due():
            begun.run_without_batch(Frame())
        world.ticks += 1
    begun.stop()
    begun.finish()
    begun.close(0.0)
    newest: Manifest = begun._committer.last
    return newest


def deadlines(draw: random.Random) -> Callable[..., EpochBudget]:
    """In place of `BudgetPlanner.plan`: the same plan, with deadlines that have passed already where the seed says so."""
    plan = BudgetPlanner.plan

    def passed(budget: StageBudget, cap: int) -> StageBudget:
        if budget.deadline_ms is None or draw.random() < 0.3:
            return budget
        keep = tuple(draw.choice([0, cap, cap, cap]) for _ in budget.keep_bytes)
        return replace(budget, deadline_ms=0, within_s=0.0, keep_bytes=keep)

    def drawn(self: BudgetPlanner, *arguments: Any, **named: Any) -> EpochBudget:
        # Whether what waits is thought to fit is anybody's guess.
        self._last_batch_fitted = draw.random() < 0.5
        self._fits = lambda *_: draw.random() < 0.3  # type: ignore[method-assign]
        budget = plan(self, *arguments, **named)
        return replace(budget, stages={uid: passed(b, 1 << 40) for uid, b in budget.stages.items()})

    return drawn


def results(world: World) -> dict[str, Any]:
    """What readers see over the whole input, and the state; see `Chain.seen`."""
    sinks = {
        # Files are named by epoch.
        sink: [r for f in sorted((world.root / sink).glob("part-*.parquet")) for r in pq.read_table(f).to_pylist()]
        for sink in world.chain.sinks
    }
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    newest = catalog.latest()
    assert newest is not None
    states: dict[str, list[dict[str, Any]]] = {}
    for operator in world.chain.operators():
        found = read_states(catalog.root, newest, operator.uid, operator.state_schemas, 0, (1 << 64) - 1)
        states |= {f"{operator.uid}.{name}": batch.to_pylist() for name, batch in found.items()}
    return world.chain.seen(sinks, states)
