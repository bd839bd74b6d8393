"""The real driver, tasks, stores and sinks in one process without Spark, killed, failed and robbed of its disk by a seed.

Spark's part is played: an action runs every shard's task in some order, some of them twice. A kill is an exception that nothing
cleans up after. What counts is what a reader sees: each batch's output exactly once, and the state of an uninterrupted run.
"""

from __future__ import annotations

import gc
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model import CountingIds, FakeBroadcast, FakeClock, empty_manifest, seeds
from pyspark.sql import types as T

from state_runtime import JobSettings, ParquetSink, Progress
from state_runtime.base import faults
from state_runtime.base.errors import Fenced, OutcomeUnknown
from state_runtime.changelog.reader import read_source_log
from state_runtime.driver import epochs as driver
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.context import DriverContext
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.savepoints import Savepoints
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.pipeline.compile import CompiledPipeline, Stage
from state_runtime.pipeline.source_position import BatchClock
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.declared.aggregates import count
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import Manifest, SourcePosition
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, SHARD_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows
from state_runtime.store import Store, open_store
from tests.stored import read_states

KEYS = pa.schema([("k", pa.string())])
WHOLE = (0, (1 << 64) - 1)


class Killed(BaseException):
    """SIGKILL: the process is gone."""


def operator() -> AggregateOperator:
    plan = plan_aggregates({"n": count()}, KEYS, "counts")
    return AggregateOperator("counts", ("k",), "`k` string", KEYS, plan, "`n` bigint")


@dataclass
class Checkpoint:
    """Spark's checkpoint directory: batch n follows batch n - 1, and a source logs one line a batch."""

    folder: Path

    def clock(self, batch_id: int) -> BatchClock:
        return BatchClock(1_700_000_000_000 + batch_id, 0)

    def position(self, batch_id: int) -> SourcePosition:
        return SourcePosition(batch_id, "m", f"v1\n{{}}\n{batch_id}", "", "c", (0,))

    def new_log_lines(self, before: SourcePosition | None, after: SourcePosition) -> dict[int, list[str]]:
        first = before.batch_id + 1 if before is not None else 0
        return {0: [f"line {n}" for n in range(first, after.batch_id + 1)]}


class Accumulator:
    """One driver's accumulator, in its own process."""

    def __init__(self) -> None:
        self.value: list[Any] = []

    def add(self, update: list[Any]) -> None:
        self.value.extend(update)


@dataclass
class World:
    """What outlives a driver: store, disk, input; and what a seed does to it."""

    root: Path
    draw: random.Random
    batches: list[list[str]]
    ids: CountingIds = field(default_factory=CountingIds)
    dies_at: int = 0  # passage of any kill point; 0 is never
    fails_at: int = 0
    passed: int = 0
    dead: bool = False
    robbed: int = 0
    repeated: int = 0
    broadcasts: list[FakeBroadcast] = field(default_factory=list)

    def reach(self, point: str) -> None:
        if self.dead:
            raise Killed(point)
        self.passed += 1
        if self.passed == self.dies_at:
            self.dead = True
            raise Killed(point)
        if self.passed == self.fails_at:
            raise RuntimeError(f"a fault at {point}")

    def plan(
        self,
        frame: list[str],
        _: Any,
        parallelism: int,
        *,
        task: Callable[..., Any],
        wake: Mapping[str, Sequence[int]],
        **__: Any,
    ) -> SimpleNamespace:
        """Spark's action over a batch: tasks in any order; some attempts are lost and made again. Shards are woken as asked."""

        def collect() -> None:
            stage = SimpleNamespace(operator=operator(), sinks=("out",), emit=False)
            shards = list(range(parallelism))
            self.draw.shuffle(shards)
            for shard in shards:
                batch = rows_of_shard(frame, shard, parallelism, woken=shard in wake.get("counts", ()))
                attempts = 2 if self.draw.random() < 0.1 else 1
                for _ in range(attempts):
                    assert list(task(stage, 0)([batch] if batch.num_rows else [])) == []

        return SimpleNamespace(final=SimpleNamespace(collect=collect), event_time_ms=dict)

    def broadcast(self, value: Any) -> FakeBroadcast:
        self.broadcasts.append(FakeBroadcast(value))
        return self.broadcasts[-1]

    def rob(self, progress: Progress) -> None:
        """After an epoch, sometimes: the disk, or a shard's part of it, is gone."""
        state = self.root / "local" / "state"
        folders = [f for f in state.glob("*/*/*") if f.is_dir()] if state.exists() else []
        if folders and self.draw.random() < 0.15:
            self.robbed += 1
            for folder in folders if self.draw.random() < 0.3 else [self.draw.choice(folders)]:
                shutil.rmtree(folder)


def rows_of_shard(keys: Sequence[str], shard: int, parallelism: int, *, woken: bool = False) -> pa.RecordBatch:
    column = pa.array(keys, pa.string())
    hashes = hash_rows([column])
    low, high = hash_range_of_shard(shard, parallelism)
    mine = np.flatnonzero((hashes >= np.uint64(low)) & (hashes <= np.uint64(high)))
    own = column.take(pa.array(mine)).to_pylist()
    wakers = [None] if woken else []
    return pa.RecordBatch.from_pydict(
        {
            "k": pa.array([*own, *wakers], pa.string()),
            HASH_COLUMN: pa.array([*hashes[mine].view("int64").tolist(), *(0 for _ in wakers)], pa.int64()),
            SHARD_COLUMN: pa.array(np.full(len(own) + len(wakers), shard, dtype=np.int32)),
            SEQUENCE_COLUMN: pa.array([*mine.tolist(), *(WAKE_SEQUENCE for _ in wakers)], pa.int64()),
        }
    )


def start(
    world: World, settings: JobSettings, savepoints: Callable[[Committer, Store], Savepoints] | None = None
) -> EpochDriver:
    """A run's beginning, as `JobRun` makes it."""
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    info = open_job_root(catalog.root, "job", clock=FakeClock(), ids=world.ids)
    empty = empty_manifest(info.uid, settings.parallelism)
    committer = open_run(catalog, info, empty, clock=FakeClock(), ids=world.ids, host="h", pid=1)
    last = committer.last
    entries = reconcile(
        last if last.operators else None, [operator().entry()], snapshot_id=last.snapshot_id + 1
    )  # fmt: skip
    sink = ParquetSink(str(world.root / "out"))
    store_url = str(world.root / "store")
    stage = Stage(operator(), ("out",), T.StructType(), False)
    context = DriverContext(
        job_name="job",
        store_url=store_url,
        storage_options={},
        root=catalog.root,
        local_dir=str(world.root / "local"),
        settings=settings,
        parallelism=settings.parallelism,
        pipeline=CompiledPipeline((stage,), {"out": sink}),
        sinks={"out": sink.spec("job", info.uid, "out", (f"{store_url}/job", {}))},
        entries=entries,
        watermark_policy="min",
        clock=FakeClock(),
        ids=world.ids,
    )
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(accumulator=lambda value, param: Accumulator(), broadcast=world.broadcast)
    )
    made = savepoints(committer, catalog.root) if savepoints is not None else None
    begun: Any = EpochDriver(context, committer, Checkpoint(world.root), spark, world.rob, made)  # type: ignore[arg-type]
    begun.publish_pending(spark)
    return begun


class Frame(list[str]):
    """A batch; it knows its session, as Spark's does."""

    sparkSession = None


def run(world: World, settings: JobSettings) -> None:
    """From where the store stands to the end of the input, unless something happens."""
    begun = start(world, settings)
    source = begun._committer.last.source
    first = source.batch_id + 1 if source is not None else 0
    for number in range(first, len(world.batches)):
        begun.run_batch(Frame(world.batches[number]), number)  # type: ignore[arg-type]
    with begun.lock:
        begun.stop()
    begun.finish()
    begun.close(0.0)


def some_settings(world: World) -> JobSettings:
    draw = world.draw
    return JobSettings(
        parallelism=draw.choice([1, 2, 3]),
        local_dir=str(world.root / "local"),
        materialize=False,
        placement="off",
        runs_max=2,
        checkpoint_batches=draw.choice([1, 2, 3, 5, 100]),
        pending_bytes_max=draw.choice([0, 2_000, 1 << 24]),
        inline_bytes_max=draw.choice([0, 600, 1 << 18]),
        changelog=draw.choice(["on", "on", "on", "off"]),
        backend=draw.choice(["arrow"] * 5 + ["rocksdb"]),
    )


def published(root: Path) -> list[dict[str, int]]:
    """What a reader of the output sees, epoch by epoch; a key twice in one epoch fails."""
    epochs: dict[int, dict[str, int]] = {}
    for file in sorted((root / "out").glob("part-*.parquet")):
        for row in pq.read_table(file).to_pylist():
            epoch = epochs.setdefault(row["epoch"], {})
            assert row["k"] not in epoch, f"{row} twice"
            epoch[row["k"]] = row["n"]
    return [epochs[number] for number in sorted(epochs)]


def expected(batches: Sequence[Sequence[str]]) -> list[dict[str, int]]:
    counts: Counter[str] = Counter()
    output = []
    for batch in batches:
        counts.update(batch)
        output.append({key: counts[key] for key in set(batch)})
    return output


def check(world: World, seed: int) -> None:
    where = f"STILLSTATE_TEST_SEED={seed}"
    assert published(world.root) == expected(world.batches), where
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    newest = catalog.latest()
    assert newest is not None
    states = read_states(catalog.root, newest, "counts", operator().state_schemas, *WHOLE)
    (state,) = states.values()
    assert state.num_rows == len({key for batch in world.batches for key in batch}), where
    assert read_source_log(catalog.root, newest, 0) == [f"line {n}" for n in range(len(world.batches))], where


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Put a world under the driver."""

    def begin(world: World) -> None:
        remove = Checkpointer.remove if not hasattr(Checkpointer.remove, "original") else Checkpointer.remove.original

        def unless_dead(self: Checkpointer, *arguments: Any) -> None:
            if not world.dead:
                remove(self, *arguments)

        unless_dead.original = remove  # type: ignore[attr-defined]
        monkeypatch.setattr(faults, "reach", world.reach)
        monkeypatch.setattr(driver, "plan_epoch", world.plan)
        monkeypatch.setattr(Checkpointer, "remove", unless_dead)

    return begin


def test_whatever_ends_a_run_each_batch_is_published_once_and_the_state_is_whole(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Kills and failures at any passage of any kill point, lost disks, lost attempts, other settings and shards each time."""
    ends: Counter[str] = Counter()
    for seed, draw in seeds(30):
        batches = [
            [f"k{draw.randrange(12)}" for _ in range(draw.randrange(1, 20))] for _ in range(draw.randrange(4, 14))
        ]
        world = World(tmp_path / str(seed), draw, batches)
        playing(world)
        for _ in range(draw.randrange(1, 5)):
            world.passed, world.dead = 0, False
            world.dies_at, world.fails_at = 0, 0
            if draw.random() < 0.7:
                world.dies_at = draw.randrange(1, 120)
            else:
                world.fails_at = draw.randrange(1, 120)
            try:
                run(world, some_settings(world))
                ends["finished"] += 1
            except Killed:
                ends["killed"] += 1
            except RuntimeError:
                ends["failed"] += 1
        world.dies_at = world.fails_at = 0
        world.dead = False
        run(world, some_settings(world))
        check(world, seed)
        ends["robbed"] += world.robbed
    assert min(ends["finished"], ends["killed"], ends["failed"], ends["robbed"]) > 0, f"a law without cases: {ends}"


def test_a_run_that_fails_between_two_checkpoints_leaves_what_manifests_name(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Run after run fails at the same place: the store does not grow by it."""
    draw = random.Random(5)
    world = World(tmp_path, draw, [[f"k{n}" for n in range(12)]] * 6)
    playing(world)
    settings = JobSettings(
        parallelism=1, local_dir=str(tmp_path / "local"), materialize=False, placement="off", checkpoint_batches=4,
        inline_bytes_max=0, pending_bytes_max=0,
    )  # fmt: skip
    draw.random = lambda: 1.0  # type: ignore[method-assign]
    sizes: list[int] = []

    def left() -> Mapping[str, int]:
        return {
            "segments": len(list((tmp_path / "store").rglob("*.seg"))),
            "staged": len(list((tmp_path / "out" / "_stillstate" / "staging").rglob("*.parquet"))),
        }

    for _ in range(4):
        world.passed = 0
        world.fails_at = 14
        with pytest.raises(RuntimeError):
            run(world, settings)
        assert left() == {"segments": 0, "staged": 0}
        sizes.append(world.passed)
    assert sizes == [14] * 4
    world.fails_at = 0
    run(world, settings)
    check(world, 5)
    assert left()["segments"] > 0


@pytest.mark.parametrize("is_on", [True, False])
def test_the_driver_looks_for_no_garbage_while_a_checkpoint_is_made(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """A collection of the whole heap takes longer than the checkpoint. Between epochs it is as the user has it."""
    world = World(tmp_path, random.Random(4), [["a", "b"], ["a"], ["c"]])
    playing(world)
    found: dict[str, set[bool]] = {}
    monkeypatch.setattr(faults, "reach", lambda point: found.setdefault(point, set()).add(gc.isenabled()))
    monkeypatch.setattr(world, "rob", lambda progress: found.setdefault("between", set()).add(gc.isenabled()))
    (gc.enable if is_on else gc.disable)()
    try:
        run(world, JobSettings(parallelism=2, local_dir=str(tmp_path / "local"), materialize=False, placement="off"))
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert found["between"] == {is_on}
    assert {"task-processed", "action-done", "before-manifest", "manifest-written"} <= found.keys()
    assert all(found[point] == {False} for point in ("task-processed", "action-done", "manifest-written"))


@pytest.mark.parametrize("error", [OutcomeUnknown, Fenced])
def test_nothing_is_taken_back_once_a_commit_was_tried(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The manifest is there, and its writer does not know: what it names is published by the next run."""
    world = World(tmp_path, random.Random(3), [["a", "b"], ["a"], ["c"]])
    playing(world)
    settings = JobSettings(
        parallelism=1, local_dir=str(tmp_path / "local"), materialize=False, placement="off", checkpoint_batches=3,
        inline_bytes_max=0,
    )  # fmt: skip
    commit = Committer.commit

    def lost_answer(committer: Committer, draft: Manifest) -> Manifest:
        commit(committer, draft)
        raise error("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Committer, "commit", lost_answer)
        with pytest.raises(error):
            run(world, settings)
    assert published(tmp_path) == []
    run(world, settings)
    check(world, 3)


def test_a_listing_that_tasks_were_given_is_taken_back_when_the_action_has_ended(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Each epoch gives tasks a newer one: those that nobody reads any more would fill the disks of all executors."""
    world = World(tmp_path, random.Random(6), [["a", "b"], ["a"], ["c"]])
    playing(world)
    settings = JobSettings(
        parallelism=2, local_dir=str(tmp_path / "local"), materialize=False, placement="off", changelog="off"
    )
    run(world, settings)
    assert len(world.broadcasts) == 2, "before the first epoch there is nothing to tell"
    assert all(broadcast.destroyed for broadcast in world.broadcasts)
    world.passed, world.fails_at = 0, 2
    world.batches.append(["d"])
    with pytest.raises(RuntimeError):
        run(world, settings)
    assert len(world.broadcasts) == 3
    assert all(broadcast.destroyed for broadcast in world.broadcasts), "an action that fails has ended too"
    world.fails_at = 0
    run(world, settings)
    check(world, 6)
