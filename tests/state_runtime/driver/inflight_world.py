"""A chain of three operators under the real driver, without Spark, whose epochs end wherever a seed says.

    rows (k, g, n, at) → steps: a StatefulProcessor with event-time timers, by k → windows of 10 s by g, append → totals by g

Each has a sink. Spark's part is played as in test_driver_schedule.py: an action runs the tasks of one operator after the other,
each shard's in any order, some of them twice. What counts is what readers see over the whole input.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from model import CountingIds, FakeBroadcast, FakeClock, empty_manifest
from pyspark.sql import Row
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from state_runtime import JobSettings, ParquetSink, Progress, aggregates
from state_runtime.base.errors import TooMuchForOneTask
from state_runtime.driver.context import DriverContext
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.governor import EpochBudget, Governor
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.pipeline.compile import CompiledPipeline, Stage
from state_runtime.pipeline.source_position import BatchClock
from state_runtime.pipeline.watermark import WatermarkColumn
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.windows import tumbling
from state_runtime.processors.operator import Operator
from state_runtime.processors.user.handle import StateDeclaration, layout_of
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import Manifest, SourcePosition
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows
from state_runtime.store import open_store
from state_runtime.task.slicing import StageBudget
from tests.stored import read_states

__all__ = ["SINKS", "Frame", "Input", "Killed", "World", "deadlines", "finish", "results", "start"]

TIME = pa.timestamp("us", "UTC")
INPUT = pa.schema([("k", pa.string()), ("g", pa.string()), ("n", pa.int64()), ("at", TIME)])
STEPS = pa.schema([("k", pa.string()), ("g", pa.string()), ("n", pa.int64()), ("at", TIME), ("what", pa.string())])
SINKS = ("steps", "windows", "totals")
DELAY_MS = 2_000

Input = tuple[str, str, int, int]
"""k, g, n, at (ms)."""


class Killed(BaseException):
    """SIGKILL: the process is gone."""


class Steps(StatefulProcessor):
    """Numbers the rows of each key, and says how many there were a while after the last of them."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "n long, g string, due long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, _, due = self.seen.get() or (0, "", 0)
        latest, g = 0, ""
        for row in rows:
            n += 1
            latest, g = max(latest, row.n), row.g
            yield Row(k=key[0], g=row.g, n=n, at=row.at, what="row")
        wanted = timerValues.getCurrentWatermarkInMs() // 1000 * 1000 + 5_000 + latest % 3 * 1000
        if wanted != due:
            if due:
                self.handle.deleteTimer(due)
            self.handle.registerTimer(wanted)
        self.seen.update((n, g, wanted))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        from datetime import UTC, datetime

        n, g, due = self.seen.get()
        at = datetime.fromtimestamp(timerValues.getCurrentWatermarkInMs() / 1000 + 1, UTC)
        yield Row(k=key[0], g=g, n=n, at=at, what=f"silent {due}")
        self.seen.update((n, g, 0))

    def close(self) -> None:
        pass


def operators() -> tuple[Operator, ...]:
    keys = pa.schema([("k", pa.string())])
    seen = layout_of(
        StateDeclaration("seen", "value", "", None, 0),
        keys,
        pa.schema([("n", pa.int64()), ("g", pa.string()), ("due", pa.int64())]),
        None,
    )
    steps = StatefulProcessorOperator(
        uid="steps", key_columns=("k",), key_ddl="`k` string", key_schema=keys, output_schema=STEPS,
        state_schemas={"seen": seen}, state_ddl={"seen": "`n` bigint, `g` string, `due` bigint"}, state_kinds={"seen": "value"},
        processor=Steps(), pandas=False, output_rows_per_batch=4, time_mode="event", event_time_column="at",
        output_event_time="at", slice_keys_max=3, slice_rows_max=5,
    )  # fmt: skip
    groups = pa.schema([("g", pa.string())])
    windows = plan_windows(
        uid="windows", key_columns=("g",), key_ddl="`g` string", key_schema=groups, schema=STEPS, time_column="at",
        window=tumbling("10 seconds"), mode="append", ddl=lambda schema: ", ".join(f"`{n}` bigint" for n in schema.names),
        aggregates={"rows": aggregates.count(), "most": aggregates.max("n")},
    )  # fmt: skip
    plan = plan_aggregates(
        {"windows": aggregates.count(), "rows": aggregates.sum("rows")}, windows.output_schema, "totals"
    )
    totals = AggregateOperator("totals", ("g",), "`g` string", groups, plan, "`windows` bigint, `rows` bigint")
    return steps, windows, totals


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
class Checkpoint:
    """Spark's checkpoint directory: batch n follows batch n - 1."""

    def clock(self, batch_id: int) -> BatchClock:
        return BatchClock(1_700_000_000_000 + batch_id, 0)

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
    ids: CountingIds = field(default_factory=CountingIds)
    dies_at: int = 0  # passage of any kill point; 0 is never
    passed: int = 0
    dead: bool = False
    losses: float = 0.0
    narrow: float = 0.0
    refused: int = 0
    narrow_epochs: int = 0
    repeats: float = 0.0
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
        narrow: bool,
        **__: Any,
    ) -> SimpleNamespace:
        """Spark's action: the operators one after the other, tasks in any order, some attempts lost and made again.

        A narrow one is one task of Spark's: if it fails, no acknowledgement of it arrives.
        """

        def collect() -> None:
            rows = pa.RecordBatch.from_arrays(
                [
                    pa.array([r[n] for r in frame], f.type)
                    if f.name != "at"
                    else pa.array([r[3] * 1000 for r in frame], TIME)
                    for n, f in enumerate(INPUT)
                ],
                schema=INPUT,
            )
            for number, operator in enumerate(operators()):
                stage = SimpleNamespace(operator=operator, sinks=(SINKS[number],), emit=number < 2)
                outputs: dict[int, list[pa.RecordBatch]] = {}
                shards = list(range(parallelism))
                self.draw.shuffle(shards)
                of_shards = {
                    shard: rows_of_shard(rows, operator, shard, parallelism, woken=shard in wake.get(operator.uid, ()))
                    for shard in shards
                }
                if narrow:
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
                self.narrow_epochs += narrow and number == 2
                emitted = [b for shard in sorted(outputs) for b in outputs[shard]]
                rows = (
                    pa.concat_batches(emitted)
                    if emitted
                    else pa.RecordBatch.from_pylist([], schema=operator.output_schema)
                )

        seen = max((r[3] for r in frame), default=None)
        return SimpleNamespace(run=collect, event_time_ms=lambda: {"at": seen})

    def wait(self, seconds: float) -> bool:
        return False

    def note(self, progress: Progress) -> None:
        """After an epoch: sometimes the disk, or a shard's part of it, is gone."""
        self.epochs.append(progress)
        self.late["rows"] += progress.late_rows
        state = self.root / "local" / "state"
        folders = [f for f in state.glob("*/*/*") if f.is_dir()] if state.exists() else []
        if folders and self.draw.random() < self.losses:
            for folder in folders if self.draw.random() < 0.3 else [self.draw.choice(folders)]:
                shutil.rmtree(folder)


def rows_of_shard(
    rows: pa.RecordBatch, operator: Operator, shard: int, parallelism: int, *, woken: bool
) -> pa.RecordBatch:
    hashes = hash_rows([rows.column(name) for name in operator.key_columns])
    low, high = hash_range_of_shard(shard, parallelism)
    mine = np.flatnonzero((hashes >= np.uint64(low)) & (hashes <= np.uint64(high)))
    own = rows.take(pa.array(mine))
    columns = {name: own.column(name) for name in rows.schema.names}
    if woken:
        columns = {name: pa.concat_arrays([c, pa.nulls(1, c.type)]) for name, c in columns.items()}
    extra = [0] if woken else []
    columns[HASH_COLUMN] = pa.array([*hashes[mine].view("int64").tolist(), *extra], pa.int64())
    columns[SHARD_COLUMN] = pa.array([shard] * (len(mine) + len(extra)), pa.int32())
    columns[SEQUENCE_COLUMN] = pa.array([*mine.tolist(), *(WAKE_SEQUENCE for _ in extra)], pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def start(world: World, settings: JobSettings, *, drop_inflight: bool = False) -> EpochDriver:
    """A run's beginning, as `JobRun` makes it."""
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    info = open_job_root(catalog.root, "job", clock=FakeClock(), ids=world.ids)
    committer = open_run(
        catalog, info, empty_manifest(info.uid, settings.parallelism), clock=FakeClock(), ids=world.ids, host="h", pid=1
    )
    last = committer.last
    described = [o.entry() for o in operators()]
    entries = reconcile(last if last.operators else None, described, snapshot_id=last.snapshot_id + 1)
    store_url = str(world.root / "store")
    sinks = {name: ParquetSink(str(world.root / name)) for name in SINKS}
    stages = tuple(Stage(o, (SINKS[n],), T.StructType(), n < 2) for n, o in enumerate(operators()))
    context = DriverContext(
        job_name="job",
        store_url=store_url,
        storage_options={},
        root=catalog.root,
        local_dir=str(world.root / "local"),
        settings=settings,
        parallelism=settings.parallelism,
        pipeline=CompiledPipeline(stages, sinks, (WatermarkColumn("at", "", DELAY_MS),)),
        sinks={name: sink.spec("job", info.uid, name, (f"{store_url}/job", {})) for name, sink in sinks.items()},
        entries=entries,
        watermark_policy="min",
        clock=FakeClock(),
        ids=world.ids,
        drop_inflight=drop_inflight,
    )
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(
            master="local[2]", accumulator=lambda value, param: Accumulator(), broadcast=FakeBroadcast
        )
    )
    begun: Any = EpochDriver(context, committer, Checkpoint(), spark, world.note, None, world.wait)  # type: ignore[arg-type]
    begun.publish_pending(spark)
    return begun


def finish(world: World, settings: JobSettings, batches: int | None = None, *, drop_inflight: bool = False) -> Manifest:
    """From where the store stands to the end of the input, unless something happens; or to a stop after so many batches."""
    begun: Any = start(world, settings, drop_inflight=drop_inflight)
    source = begun._committer.last.source
    first = source.batch_id + 1 if source is not None else 0
    last = len(world.batches) if batches is None else min(len(world.batches), first + batches)
    for number in range(first, last):
        begun.run_batch(Frame(world.batches[number]), number)
    while begun.is_due() and batches is None:
        begun.run_without_batch(Frame())
    begun.stop()
    begun.finish()
    begun.close(0.0)
    newest: Manifest = begun._committer.last
    return newest


def deadlines(draw: random.Random) -> Callable[..., EpochBudget]:
    """In place of `Governor.plan`: the same plan, with deadlines that have passed already where the seed says so."""
    plan = Governor.plan

    def passed(budget: StageBudget, cap: int) -> StageBudget:
        if budget.deadline_ms is None or draw.random() < 0.3:
            return budget
        keep = tuple(draw.choice([0, cap, cap, cap]) for _ in budget.keep_bytes)
        return replace(budget, deadline_ms=0, within_s=0.0, keep_bytes=keep)

    def drawn(self: Governor, *arguments: Any, **named: Any) -> EpochBudget:
        # Whether what waits is thought to fit is anybody's guess.
        self._last_batch_fitted = draw.random() < 0.5
        self._fits = lambda *_: draw.random() < 0.3  # type: ignore[method-assign]
        budget = plan(self, *arguments, **named)
        return replace(budget, stages={uid: passed(b, 1 << 40) for uid, b in budget.stages.items()})

    return drawn


def results(world: World) -> dict[str, Any]:
    """What readers see over the whole input: of what is appended each row, of totals the last of each group; and the state."""
    found: dict[str, Any] = {}
    for sink in SINKS:
        rows = [r for f in sorted((world.root / sink).glob("part-*.parquet")) for r in pq.read_table(f).to_pylist()]
        if sink == "totals":
            newest: dict[str, Any] = {}
            for row in rows:  # files are named by epoch
                newest[row["g"]] = (row["windows"], row["rows"])
            found[sink] = newest
        else:
            found[sink] = sorted(str({k: v for k, v in row.items() if k != "epoch"}) for row in rows)
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    newest_manifest = catalog.latest()
    assert newest_manifest is not None
    for operator in operators():
        states = read_states(catalog.root, newest_manifest, operator.uid, operator.state_schemas, 0, (1 << 64) - 1)
        found[f"state of {operator.uid}"] = {
            name: sorted(map(str, batch.to_pylist())) for name, batch in states.items()
        }
    return found


def some_batches(draw: random.Random) -> list[list[Input]]:
    """Event time goes on, with late rows, quiet groups, a hot key."""
    now_ms, batches = 10_000, []
    for _ in range(draw.randrange(2, 7)):
        batch = []
        for _ in range(draw.randrange(0, 25)):
            key = "hot" if draw.random() < 0.3 else f"k{draw.randrange(9)}"
            batch.append((key, f"g{draw.randrange(4)}", draw.randrange(9), max(0, now_ms - draw.randrange(0, 6_000))))
        batches.append(batch)
        now_ms += draw.choice([0, 500, 4_000, 15_000])
    return batches
