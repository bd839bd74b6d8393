"""The real driver, tasks, stores and sinks in one process without Spark, killed, failed and robbed of its disk by a seed.

Spark's part is played: an action runs every shard's task in some order, some of them twice. A kill is an exception that nothing
cleans up after. What counts is what a reader sees: each batch's output exactly once, and the state of an uninterrupted run.
"""

from __future__ import annotations

import gc
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model import CountingIds, FakeBroadcast, FakeClock, empty_manifest, first_hash_of_shard, seeds
from pyspark.sql import types as T

from state_runtime import JobSettings, ParquetSink, Progress
from state_runtime.base import faults
from state_runtime.base.actor import Actor
from state_runtime.base.errors import Fenced, OutcomeUnknown, StoreRefused, StoreUnavailable
from state_runtime.base.progress import RowsAside
from state_runtime.base.settings import CheckpointSettings, MaterializationSettings
from state_runtime.driver import engine
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.context import DriverContext
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.gc.background import BackgroundCollection
from state_runtime.maintenance.retention.background import BackgroundRetention
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.pipeline.compile import CompiledPipeline, Stage
from state_runtime.pipeline.graph import Edge, Graph, OperatorNode, Port, SourceNode
from state_runtime.pipeline.operators import AggregateStep
from state_runtime.pipeline.source_names import PLAIN
from state_runtime.pipeline.source_position import BatchClock
from state_runtime.pipeline.watermark import ClockInputs
from state_runtime.processors.builtin.aggregate import AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.window_state import OutputMode
from state_runtime.processors.declared.aggregates import count
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import Manifest, SourcePosition
from state_runtime.spark.columns import HASH_COLUMN, SEQUENCE_COLUMN, WAKE_SEQUENCE
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.keyhash import hash_rows
from state_runtime.store import Store, open_store
from state_runtime.task import persist_files
from tests.job_settings import job_settings
from tests.stored import read_source_log, read_states

KEYS = pa.schema([("k", pa.string())])
WHOLE = (0, (1 << 64) - 1)


class Killed(BaseException):
    """SIGKILL: the process is gone."""


def operator(mode: OutputMode = "update") -> AggregateOperator:
    plan = plan_aggregates({"n": count()}, KEYS, "counts")
    return AggregateOperator("counts", ("k",), "`k` string", KEYS, plan, "`n` bigint", mode=mode)


def pipeline(mode: OutputMode) -> CompiledPipeline:
    """Counts, and a sink that shows each epoch's rows under its number."""
    sinks = {"out": ParquetSink("out")}
    if mode != "complete":
        return CompiledPipeline((Stage(operator(), ("out",), T.StructType(), False),), sinks)
    counts = OperatorNode(AggregateStep("counts", {"n": count()}, mode), (Port(Edge(0), ("k",)),))
    return CompiledPipeline(
        (Stage(operator(mode), ("out",), T.StructType(), False, node=1),),
        sinks,
        graph=Graph((SourceNode("", None), counts)),
        clock_inputs={"counts": ClockInputs(frozenset({""}))},
        tables={"out": frozenset({"counts"})},
    )


@dataclass
class Checkpoint:
    """Spark's checkpoint directory: batch n follows batch n - 1, and a source logs one line a batch."""

    numbers = PLAIN

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
    mode: OutputMode = "update"
    ids: CountingIds = field(default_factory=CountingIds)
    dies_at: int = 0  # passage of any kill point; 0 is never
    fails_at: int = 0
    away_at: Callable[[str], bool] = lambda point: False
    waits: list[float] = field(default_factory=list)
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
        if self.away_at(point):
            raise StoreUnavailable(f"the store did not answer at {point}")

    def plan(
        self,
        frame: list[str],
        _: Any,
        parallelism: int,
        *,
        task: Callable[..., Any],
        wake: Mapping[str, Sequence[int]],
        in_one_task: bool,
        **__: Any,
    ) -> SimpleNamespace:
        """Spark's action over a batch: tasks in any order, or one for all shards; some attempts are lost and made again. Shards
        are woken as asked."""

        def collect() -> None:
            made = operator() if self.mode == "update" else operator(self.mode)
            stage = SimpleNamespace(operator=made, sinks=("out",), emit=False, written=None, sides=None)
            shards = list(range(parallelism))
            self.draw.shuffle(shards)
            of_shards = [
                [b for b in [rows_of_shard(frame, s, parallelism, woken=s in wake.get("counts", ()))] if b.num_rows]
                for s in shards
            ]
            for batches in [list(itertools.chain(*of_shards))] if in_one_task else of_shards:
                attempts = 2 if self.draw.random() < 0.1 else 1
                for _ in range(attempts):
                    assert list(task(stage, 0)(batches)) == []

        return SimpleNamespace(run=collect, event_time_ms=dict, source_rows=tuple, aside=RowsAside)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False

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
    wakers = [first_hash_of_shard(shard, parallelism)] if woken else []
    return pa.RecordBatch.from_pydict(
        {
            "k": pa.array([*own, *(None for _ in wakers)], pa.string()),
            HASH_COLUMN: pa.array([*hashes[mine].view("int64").tolist(), *wakers], pa.int64()),
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
    committer = open_run(catalog, info, empty, actor=Actor(FakeClock(), world.ids, "h", 1))
    last = committer.last
    entries = reconcile(
        last if last.operators else None, [operator().entry()], snapshot_id=last.snapshot_id + 1
    )  # fmt: skip
    sink = ParquetSink(str(world.root / "out"))
    store_url = str(world.root / "store")
    context = DriverContext(
        job_name="job",
        store_url=store_url,
        storage_options={},
        root=catalog.root,
        local_dir=str(world.root / "local"),
        settings=settings,
        parallelism=settings.parallelism,
        pipeline=pipeline(world.mode),
        sinks={"out": sink.spec("job", info.uid, "out", (f"{store_url}/job", {}))},
        entries=entries,
        watermark_policy="min",
        clock=FakeClock(),
        ids=world.ids,
    )
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(
            master="local[2]", accumulator=lambda value, param: Accumulator(), broadcast=world.broadcast
        )
    )
    made = savepoints(committer, catalog.root) if savepoints is not None else None
    begun: Any = EpochDriver(context, committer, Checkpoint(world.root), spark, world.rob, made, world.wait)  # type: ignore[arg-type]
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
    begun.stop()
    begun.finish()
    begun.close(0.0)


def some_settings(world: World) -> JobSettings:
    draw = world.draw
    return JobSettings(
        parallelism=draw.choice([1, 2, 3]),
        local_dir=str(world.root / "local"),
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        runs_max=2,
        checkpoint=CheckpointSettings(
            batches=draw.choice([1, 2, 3, 5, 100]),
            pending_bytes_max=draw.choice([0, 2_000, 1 << 24]),
            inline_bytes_max=draw.choice([0, 600, 1 << 18]),
        ),
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


def expected(batches: Sequence[Sequence[str]], mode: OutputMode = "update") -> list[dict[str, int]]:
    counts: Counter[str] = Counter()
    output = []
    for batch in batches:
        counts.update(batch)
        output.append({key: counts[key] for key in (counts if mode == "complete" else set(batch))})
    return output


def check(world: World, seed: int) -> None:
    where = f"STILLSTATE_TEST_SEED={seed}"
    assert published(world.root) == expected(world.batches, world.mode), where
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
        monkeypatch.setattr(engine, "plan_epoch", world.plan)
        monkeypatch.setattr(Checkpointer, "remove", unless_dead)

    return begin


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_whatever_ends_a_run_each_batch_is_published_once_and_the_state_is_whole(
    tmp_path: Path, playing: Callable[[World], None], mode: OutputMode
) -> None:
    """Kills and failures at any passage of any kill point, lost disks, lost attempts, other settings and shards each time. In
    complete mode each epoch's output is the whole table, of all shards, also of a batch that has rows of few or none."""
    ends: Counter[str] = Counter()
    for seed, draw in seeds(20 if mode == "update" else 12):
        few = 0 if mode == "complete" else 1
        batches = [
            [f"k{draw.randrange(12)}" for _ in range(draw.randrange(few if n else 1, 20))]
            for n in range(draw.randrange(4, 14))
        ]
        world = World(tmp_path / str(seed), draw, batches, mode)
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
    settings = JobSettings(parallelism=1, local_dir=str(tmp_path / "local"), materialization=MaterializationSettings(by="dagster"), placement="off", checkpoint=CheckpointSettings(batches=4, inline_bytes_max=0, pending_bytes_max=0))  # fmt: skip
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
        run(
            world,
            JobSettings(
                parallelism=2,
                local_dir=str(tmp_path / "local"),
                materialization=MaterializationSettings(by="dagster"),
                placement="off",
            ),
        )
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert found["between"] == {is_on}
    assert {"task-processed", "action-done", "before-manifest", "manifest-written"} <= found.keys()
    assert all(found[point] == {False} for point in ("task-processed", "action-done", "manifest-written"))


def test_all_that_works_beside_the_epochs_asks_whose_the_root_is(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Folds, retention and collection prove it before each effect; the driver is who tells them how."""
    world = World(tmp_path, random.Random(4), [["a"]])
    playing(world)
    settings = JobSettings(parallelism=2, local_dir=str(tmp_path / "local"), placement="off")
    checkpointer = start(world, settings)._line.checkpointer
    proofs = [
        checkpointer.materializer._prove,
        checkpointer.retention._proof.check,
        checkpointer.collection._proof.check,
    ]
    for prove in proofs:
        assert prove is not None
        prove()
    start(world, settings)
    for prove in proofs:
        assert prove is not None
        with pytest.raises(Fenced, match="has taken the job over"):
            prove()


def test_what_works_beside_the_epochs_is_told_of_each_checkpoint(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention and collection begin by themselves, if a checkpoint tells them that it is time to look."""
    world = World(tmp_path, random.Random(4), [["a"], ["b"], ["c"]])
    playing(world)
    told: Counter[str] = Counter()
    for beside in (BackgroundRetention, BackgroundCollection):
        monkeypatch.setattr(beside, "committed", lambda self, *_: told.update([type(self).__name__]))
    run(
        world,
        JobSettings(
            parallelism=2,
            local_dir=str(tmp_path / "local"),
            materialization=MaterializationSettings(by="dagster"),
            placement="off",
        ),
    )
    assert told == {"BackgroundRetention": 3, "BackgroundCollection": 3}


@pytest.mark.parametrize("error", [OutcomeUnknown, Fenced])
def test_nothing_is_taken_back_once_a_commit_was_tried(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The manifest is there, and its writer does not know: what it names is published by the next run."""
    world = World(tmp_path, random.Random(3), [["a", "b"], ["a"], ["c"]])
    playing(world)
    settings = JobSettings(parallelism=1, local_dir=str(tmp_path / "local"), materialization=MaterializationSettings(by="dagster"), placement="off", checkpoint=CheckpointSettings(batches=3, inline_bytes_max=0))  # fmt: skip
    create = Committer.create

    def lost_answer(committer: Committer, manifest: Manifest) -> Manifest:
        create(committer, manifest)
        raise error("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Committer, "create", lost_answer)
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
        parallelism=2,
        local_dir=str(tmp_path / "local"),
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        changelog="off",
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


# A store that is away is met at any of these before a manifest is tried.
BEFORE_THE_MANIFEST = ("task-started", "task-processed", "task-logged", "action-done", "segment-written", "before-manifest",
    "task-files-uploaded", "task-acknowledged", "pending-flushed", "epoch-pending")  # fmt: skip


def left(world: World) -> tuple[int, int]:
    """How many changelog objects are there, and how many staged files that were not published."""
    staged = world.root / "out" / "_stillstate" / "staging"
    return len(list((world.root / "store").rglob("*.seg"))), len(list(staged.rglob("*.parquet")))


def test_a_store_that_is_away_for_a_while_ends_no_run_and_changes_nothing(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """A run that ends costs a start of Spark and a restore. State, source position and output are those of a calm day, at
    any passage before a manifest, whatever was pending. What a task staged that failed goes with the next run."""
    waited: Counter[float] = Counter()
    points: Counter[str] = Counter()
    for seed, draw in seeds(15):
        batches = [
            [f"k{draw.randrange(12)}" for _ in range(draw.randrange(1, 20))] for _ in range(draw.randrange(4, 14))
        ]
        world = World(tmp_path / str(seed), draw, batches)
        weather = random.Random(seed)
        left = {"failures": 0}

        def is_away(point: str, weather: random.Random = weather, left: dict[str, int] = left) -> bool:
            if left["failures"] == 0 and weather.random() < 0.05:
                left["failures"] = weather.randrange(1, 4)
            if point not in BEFORE_THE_MANIFEST or left["failures"] == 0 or weather.random() < 0.5:
                return False
            left["failures"] -= 1
            points[point] += 1
            return True

        world.away_at = is_away
        playing(world)
        settings = job_settings(some_settings(world), tolerable_failures=1000)
        run(world, settings)
        check(world, seed)
        waited.update(world.waits)
        run(world, settings)
        check(world, seed)
        staged = list((world.root / "out" / "_stillstate" / "staging").rglob("*.parquet"))
        assert staged == [], f"STILLSTATE_TEST_SEED={seed}"
    assert waited[5.0] > 0
    assert waited[20.0] > 0
    assert min(points[p] for p in ("task-processed", "action-done", "segment-written", "before-manifest")) > 0, points


def calm(tmp_path: Path, **changed: Any) -> JobSettings:
    return job_settings(
        **{
            "parallelism": 1,
            "local_dir": str(tmp_path / "local"),
            "materialize": False,
            "placement": "off",
            "inline_bytes_max": 0,
            **changed,
        }
    )


@pytest.mark.parametrize("checkpoint_batches", [1, 3])
@pytest.mark.parametrize("point", ["segment-written", "pending-flushed", "epoch-pending", "before-manifest"])
def test_an_epoch_that_is_run_again_leaves_nothing_of_its_failed_attempts(
    tmp_path: Path, playing: Callable[[World], None], point: str, checkpoint_batches: int
) -> None:
    """Every second passage fails: a store that is away often would fill up otherwise."""
    batches = [[f"k{n}" for n in range(12)]] * 6
    passages = Counter[str]()

    def every_second_time(reached: str) -> bool:
        passages[reached] += 1
        return reached == point and passages[point] % 2 == 1

    found = []
    for name, away_at in (("calm", lambda _: False), ("away", every_second_time)):
        world = World(tmp_path / name, random.Random(5), batches, away_at=away_at)
        world.draw.random = lambda: 1.0  # type: ignore[method-assign]
        playing(world)
        run(world, calm(world.root, checkpoint_batches=checkpoint_batches, pending_bytes_max=0))
        check(world, 5)
        found.append(left(world))
    assert found[0] == found[1]
    assert world.waits == [5.0] * (passages[point] // 2)
    assert (passages[point] > 0) == (checkpoint_batches > 1 or point not in ("pending-flushed", "epoch-pending"))


@pytest.mark.parametrize("tolerable", [0, 1, 3])
def test_a_store_that_stays_away_ends_the_run_after_so_many_failures_in_a_row(
    tmp_path: Path, playing: Callable[[World], None], tolerable: int
) -> None:
    """A run that tried for ever would look as if it worked. Failures that others follow only later are not in a row."""
    world = World(tmp_path, random.Random(3), [["a"]] * 8)
    playing(world)
    settings = calm(tmp_path, tolerable_failures=tolerable)
    passages = Counter[str]()

    def every_second_time(point: str) -> bool:
        passages[point] += 1
        return point == "action-done" and passages[point] % 2 == 1

    world.away_at = every_second_time
    if tolerable > 0:
        run(world, settings)
        assert world.waits == [5.0] * 8
        world.waits.clear()
        world.batches.append(["b"])
    world.away_at = lambda point: point == "action-done"
    with pytest.raises(StoreUnavailable):
        run(world, settings)
    assert world.waits == [5.0, 20.0, 80.0][:tolerable]
    world.away_at = lambda point: False
    run(world, settings)
    check(world, 3)


def test_what_does_not_pass_is_not_tried_again(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, random.Random(3), [["a"], ["b"]])
    playing(world)

    def refused(point: str) -> None:
        if point == "action-done":
            raise StoreRefused("no permission")

    monkeypatch.setattr(faults, "reach", refused)
    with pytest.raises(StoreRefused):
        run(world, calm(tmp_path))
    assert world.waits == []


@pytest.mark.parametrize("look", ["read terms", "read_range snapshots", "size changelog"])
def test_a_look_before_the_create_that_fails_in_passing_is_retried(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """The commit's looks at term, predecessor and segment only read: nothing was tried yet, so nothing may have happened."""
    world = World(tmp_path, random.Random(3), [["a", "b"], ["a"], ["c"]])
    playing(world)
    world.draw.random = lambda: 1.0  # type: ignore[method-assign]
    operation, folder = look.split()
    failures = Counter[int]()
    real_looks = Committer._check_root

    def looks(committer: Committer, manifest: Manifest, objects: Collection[str]) -> None:
        store = type(committer._root)
        real = getattr(store, operation)

        def away_for_a_moment(self: Store, path: str, *arguments: Any) -> Any:
            if path.startswith(folder) and failures[manifest.snapshot_id] < 2:
                failures[manifest.snapshot_id] += 1
                raise StoreUnavailable(f"no answer to {operation} {path}")
            return real(self, path, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(store, operation, away_for_a_moment)
            real_looks(committer, manifest, objects)

    monkeypatch.setattr(Committer, "_check_root", looks)
    run(world, calm(tmp_path))
    assert failures, "the look was never asked for"
    assert world.waits, "no epoch was run again"
    check(world, 3)
    # Of each epoch one object of its task and one of its checkpoint.
    assert left(world) == (6, 0), "what failed attempts wrote is still there"


class Thief:
    """Takes away one of the objects that the second checkpoint of a run is the first to need, right before its manifest."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.number = number
        self.manifests: list[set[Path]] = []
        self.taken: list[Path] = []

    def reach(self, point: str) -> bool:
        if point == "manifest-written":
            self.manifests.append(set(self.root.rglob("*")))
        elif point == "before-manifest" and len(self.manifests) == 1 and not self.taken:
            data = [p for top in ("changelog", "files") for p in sorted((self.root / top).rglob("*")) if p.is_file()]
            new = [path for path in data if path not in self.manifests[0]]
            self.taken = new[self.number : self.number + 1]
            for path in self.taken:
                path.unlink()
        return False


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"checkpoint_batches": 3, "pending_bytes_max": 0, "inline_bytes_max": 1 << 20}, 3),
        ({"inline_bytes_max": 0}, 2),
        ({"changelog": "off"}, 3),
    ],
    ids=["several segments", "objects of tasks", "files of shards"],
)
def test_a_commit_looks_at_every_object_that_its_manifest_is_the_first_to_lead_to(
    tmp_path: Path,
    playing: Callable[[World], None],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    least: int,
) -> None:
    """A backup that was put in the root's place meanwhile may lack any of them, and have those before and after it."""
    monkeypatch.setattr(persist_files, "SMALL_FILE_BYTES_MAX", 0)
    noticed = 0
    for number in range(20):
        world = World(tmp_path / str(number), random.Random(3), [["a", "b", "c", "d"]] * 6)
        world.draw.random = lambda: 1.0  # type: ignore[method-assign]  # no attempt is repeated: all objects are needed
        thief = Thief(world.root / "store" / "job", number)
        world.away_at = thief.reach
        playing(world)
        settings = calm(world.root, **{"parallelism": 2, **changes})
        try:
            run(world, settings)
        except Fenced:
            noticed += 1
            assert len(thief.manifests) == 1, "no manifest names what is gone"
            continue
        assert not thief.taken, "a manifest leads to what is gone"
        break
    assert least <= noticed < 20


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("error", [OutcomeUnknown, StoreUnavailable])
def test_a_manifest_that_was_tried_is_never_tried_again_blindly(
    tmp_path: Path,
    playing: Callable[[World], None],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    is_there: bool,
) -> None:
    """It may be there: an epoch that is run again would be counted twice. The next run reads what is there."""
    world = World(tmp_path, random.Random(3), [["a", "b"], ["a"], ["c"]])
    playing(world)
    create = Committer.create

    def lost_answer(committer: Committer, manifest: Manifest) -> Manifest:
        if is_there:
            create(committer, manifest)
        raise error("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Committer, "create", lost_answer)
        with pytest.raises(error):
            run(world, calm(tmp_path))
    assert world.waits == []
    run(world, calm(tmp_path))
    check(world, 3)


@pytest.mark.parametrize("point", ["manifest-written", "before-publish", "one-output-published", "published"])
def test_an_epoch_that_has_happened_is_not_run_again(
    tmp_path: Path, playing: Callable[[World], None], point: str
) -> None:
    """After the manifest only its output is left to do, which the next run does."""
    world = World(tmp_path, random.Random(3), [["a", "b"], ["a"], ["c"]])
    playing(world)
    world.away_at = lambda reached: reached == point
    with pytest.raises(StoreUnavailable):
        run(world, calm(tmp_path))
    assert world.waits == []
    world.away_at = lambda reached: False
    run(world, calm(tmp_path))
    check(world, 3)


def test_a_run_that_is_asked_to_stop_does_not_wait_for_the_store(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, random.Random(3), [["a"]])
    playing(world)
    monkeypatch.setattr(world, "wait", lambda seconds: True)
    world.away_at = lambda point: point == "action-done"
    with pytest.raises(StoreUnavailable):
        run(world, calm(tmp_path, tolerable_failures=1000))
