"""Epochs that end before their batch: whatever deadlines, kills, lost disks, rescales and modes do, readers see what one
uninterrupted aligned run gives.

FLIP-76's test plan, and Flink's history: a rescale before the rows of the last one are processed, a restart with the same
parallelism after it, again and again.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inflight_world import Frame, Input, Killed, World, deadlines, finish, results, some_batches, start
from model import seeds

from state_runtime.base import faults
from state_runtime.base.errors import StoreUnavailable, TasksDisagree, TooMuchForOneTask
from state_runtime.base.settings import JobSettings
from state_runtime.changelog.segment import FOOTER_BYTES, decode_index
from state_runtime.driver import epochs as driver
from state_runtime.driver import stage_tasks
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.governor import Governor
from state_runtime.driver.narrow import Narrow
from state_runtime.processors import slices
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from state_runtime.task import slicing, stage
from state_runtime.task.gathered import gather
from state_runtime.task.narrow import NarrowLimits, by_shard
from state_runtime.task.slicing import Slicer


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Put a world under the driver, whose slices are small and whose deadlines are the seed's."""
    remove = Checkpointer.remove
    plan = Governor.plan

    def begin(world: World) -> None:
        def unless_dead(self: Checkpointer, *arguments: Any) -> None:
            if not world.dead:
                remove(self, *arguments)

        monkeypatch.setattr(faults, "reach", world.reach)
        monkeypatch.setattr(driver, "plan_epoch", world.plan)
        monkeypatch.setattr(Checkpointer, "remove", unless_dead)
        monkeypatch.setattr(Governor, "plan", plan)
        monkeypatch.setattr(Governor, "plan", deadlines(world.draw))
        monkeypatch.setattr(slicing, "_FIRST_ROWS", 2)
        monkeypatch.setattr(slicing, "_ROWS_MIN", 1)
        monkeypatch.setattr(slicing, "_GROWTH", 1)
        monkeypatch.setattr(slices, "HELD_BYTES_MIN", world.draw.choice([1, 300, 1 << 25]))

        def gathering(batches: Any, keys: Any, _: int, folder: Path, ids: Any) -> Any:
            return gather(batches, keys, world.draw.choice([1, 600, 1 << 27]), folder, ids)

        def narrowing(self: Narrow, *_: Any, **__: Any) -> bool:
            return world.draw.random() < world.narrow

        def refusing(*arguments: Any) -> Any:
            for of_shard in by_shard(*arguments):
                if world.draw.random() < 0.05:
                    raise TooMuchForOneTask("it takes too long")
                yield of_shard

        monkeypatch.setattr(stage, "gather", gathering)
        monkeypatch.setattr(Narrow, "choose", narrowing)
        monkeypatch.setattr(stage, "by_shard", refusing)
        rows_max = world.draw.choice([15, 1 << 16]) if world.narrow else 1 << 16
        monkeypatch.setattr(stage_tasks, "LIMITS", NarrowLimits(rows_max, time_max_s=float("inf")))

    return begin


def some_settings(world: World, mode: str = "") -> JobSettings:
    draw = world.draw
    return JobSettings(
        parallelism=draw.choice([1, 2, 3, 5]),
        local_dir=str(world.root / "local"),
        materialize=False,
        placement="off",
        runs_max=2,
        checkpoint_batches=draw.choice([1, 1, 2, 5]),
        pending_bytes_max=draw.choice([0, 2_000, 1 << 24]),
        inline_bytes_max=draw.choice([0, 600, 1 << 18]),
        changelog=draw.choice(["on", "on", "on", "off"]),
        backend=draw.choice(["arrow"] * 5 + ["rocksdb"]),
        checkpoint_mode=mode or draw.choice(["unaligned", "unaligned", "aligned-with-timeout", "aligned"]),
        local_recovery=draw.random() < 0.7,
    )


def of_one_run(tmp_path: Path, batches: Any, playing: Callable[[World], None]) -> tuple[dict[str, Any], int]:
    """The same input in an aligned run that nothing disturbs, and how many rows were late."""
    world = World(tmp_path, random.Random(0), batches)
    playing(world)
    finish(world, JobSettings(parallelism=2, local_dir=str(tmp_path / "local"), materialize=False, placement="off",
        checkpoint_mode="aligned"))  # fmt: skip
    return results(world), world.late["rows"]


def test_wherever_epochs_end_readers_see_what_an_aligned_run_gives(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Rows, timers, windows that close, late rows, at every operator of the chain; nothing lost, doubled or late that was not."""
    more = 0
    for seed, draw in seeds(25):
        batches = some_batches(draw)
        expected, late = of_one_run(tmp_path / f"{seed}-aligned", batches, playing)
        world = World(tmp_path / str(seed), draw, batches)
        playing(world)
        finish(world, some_settings(world, "unaligned"))
        where = f"STILLSTATE_TEST_SEED={seed}"
        assert results(world) == expected, where
        assert world.late["rows"] == late, where
        more += len(world.epochs) > len(batches) + 2
    assert more, "no epoch ended before its batch: the test proves nothing"


def test_kills_rescales_and_modes_with_rows_in_flight_lose_nothing(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Each run ends somewhere, with rows in flight or not; the next has another parallelism, mode, backend, changelog."""
    seen: Counter[str] = Counter()
    for seed, draw in seeds(25):
        batches = some_batches(draw)
        expected, _ = of_one_run(tmp_path / f"{seed}-aligned", batches, playing)
        world = World(tmp_path / str(seed), draw, batches, losses=0.15, repeats=0.1)
        playing(world)
        for _ in range(draw.randrange(1, 6)):
            world.passed, world.dead = 0, False
            world.dies_at = draw.randrange(1, 200) if draw.random() < 0.7 else 0
            try:
                last = finish(world, some_settings(world), batches=draw.choice([None, 1, 2]))
                seen["stopped with rows in flight"] += last.open_batch is not None and bool(last.open_batch.operators)
                seen["stopped"] += 1
            except Killed:
                seen["killed"] += 1
        world.dies_at, world.dead = 0, False
        finish(world, some_settings(world))
        assert results(world) == expected, f"STILLSTATE_TEST_SEED={seed}"
    assert min(seen["killed"], seen["stopped"]) > 0, f"a law without cases: {seen}"


def test_one_task_for_all_shards_gives_what_a_task_for_each_gives(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Output, state, late rows, whichever epochs are narrow, with rows in flight, kills and rescales too; and one that is
    refused in the middle has not happened."""
    seen: Counter[str] = Counter()
    for seed, draw in seeds(25):
        batches = some_batches(draw)
        expected, late = of_one_run(tmp_path / f"{seed}-aligned", batches, playing)
        world = World(tmp_path / str(seed), draw, batches, narrow=0.7)
        playing(world)
        is_killed = draw.random() < 0.5
        if is_killed:
            world.dies_at = draw.randrange(1, 100)
            with suppress(Killed):
                finish(world, some_settings(world))
            world.dies_at, world.dead = 0, False
        finish(world, some_settings(world))
        assert results(world) == expected, f"STILLSTATE_TEST_SEED={seed}"
        assert is_killed or world.late["rows"] == late, f"STILLSTATE_TEST_SEED={seed}"
        left = [str(f) for f in world.root.glob("*/_stillstate/staging/*/*/*.parquet")]
        assert not left, f"STILLSTATE_TEST_SEED={seed}: {left}"
        seen["narrow"] += world.narrow_epochs
        seen["refused"] += world.refused
    assert min(seen["narrow"], seen["refused"]) > 0, f"a law without cases: {seen}"


def test_a_shard_that_did_not_change_since_a_flush_is_restored_from_it(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the changelog off: other shards changed since, so that the listing in memory is newer than the one on the store."""
    batches: list[list[Input]] = [[(f"k{n}", f"g{n % 4}", n, 10_000) for n in range(9)]]
    batches += [[(f"k{n}", f"g{n % 4}", n, 10_000)] for n in range(9)]
    expected, _ = of_one_run(tmp_path / "undisturbed", batches, playing)
    world = World(tmp_path / "disturbed", random.Random(0), batches)
    playing(world)

    def lose_the_disk(world: World, _: Any) -> None:
        shutil.rmtree(world.root / "local" / "state", ignore_errors=True)

    monkeypatch.setattr(World, "note", lose_the_disk)
    settings = replace(
        some_settings(world, "aligned"), parallelism=5, changelog="off", backend="arrow", checkpoint_batches=100
    )
    finish(world, settings)
    assert results(world) == expected


def test_tasks_that_come_to_other_rows_when_spark_repeats_them_double_nothing(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor is lost after its task; the second attempt is slower or faster, and leaves other rows than those that the
    output of the first was made without. Such an epoch is run again."""
    take, disagreements = Acknowledgements.take, 0

    def taking(self: Acknowledgements, *arguments: Any) -> Any:
        nonlocal disagreements
        try:
            return take(self, *arguments)
        except TasksDisagree:
            disagreements += 1
            raise

    monkeypatch.setattr(Acknowledgements, "take", taking)
    for seed, draw in seeds(6):
        batches = some_batches(draw)
        expected, late = of_one_run(tmp_path / f"{seed}-aligned", batches, playing)
        world = World(tmp_path / str(seed), draw, batches, repeats=0.2)
        playing(world)
        with monkeypatch.context() as patched:
            is_over = Slicer._is_over
            patched.setattr(Slicer, "_is_over", lambda self, of=is_over, w=world: of(self) and w.draw.random() < 0.5)
            finish(world, replace(some_settings(world, "unaligned"), tolerable_failures=1_000))
        assert results(world) == expected, f"STILLSTATE_TEST_SEED={seed}"
        assert world.late["rows"] == late, f"STILLSTATE_TEST_SEED={seed}"
    assert disagreements, "no two attempts disagreed: the test proves nothing"


def test_rows_that_are_given_up_are_said_and_nothing_else_is_lost(
    tmp_path: Path,
    playing: Callable[[World], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`--drop-inflight`: the batch ends there, the next one is read, and the log has the number of rows of each operator."""
    batches: list[list[Input]] = [[(f"k{n}", "g", n, 10_000) for n in range(40)], [("after", "g", 1, 11_000)]]
    world = World(tmp_path, random.Random(1), batches)
    playing(world)
    settings = JobSettings(
        parallelism=2,
        local_dir=str(tmp_path / "local"),
        materialize=False,
        placement="off",
        checkpoint_mode="unaligned",
    )
    with monkeypatch.context() as patched:
        patched.setattr(Slicer, "_is_one_slice", lambda *_: False)
        patched.setattr(Slicer, "_is_over", lambda _: True)
        patched.setattr(World, "note", lambda *_: begun._stopping.set())
        begun: Any = start(world, settings)
        begun.run_batch(Frame(batches[0]), 0)
        begun.finish()
        begun.close(0.0)
    stopped = begun._committer.last
    assert stopped.open_batch is not None
    waiting = {o.uid: o.rows for o in stopped.open_batch.operators}
    assert waiting["steps"] > 0
    ended = finish(world, settings, drop_inflight=True)
    assert ended.open_batch is None
    for uid, rows in waiting.items():
        assert f"operator {uid}: about {rows} rows" in caplog.text
    steps = [row for row in results(world)["steps"] if "'what': 'row'" in row]
    assert len(steps) == 41 - waiting["steps"]
    assert any("'after'" in row for row in steps)


def unnamed(world: World) -> set[str]:
    """Objects of the log that neither a manifest nor a segment that one names has."""
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    found = {str(path.relative_to(world.root / "store" / "job")) for path in world.root.rglob("changelog/**/*.seg")}
    named: set[str] = set()
    for snapshot_id in catalog.snapshot_ids():
        named |= {s.path for s in catalog.manifest(snapshot_id).stored_segments}
    for path in sorted(named):
        body = (world.root / "store" / "job" / path).read_bytes()
        length = int.from_bytes(body[-FOOTER_BYTES:][:8], "big") + FOOTER_BYTES
        named |= {part.path for part in decode_index(body[-length:], path).parts if part.path}
    return found - named


@pytest.mark.parametrize("where", ["tasks", "before-manifest"])
def test_an_epoch_that_fails_leaves_none_of_its_rows_in_the_store(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A job that fails again and again does not fill its store: neither with what tasks uploaded of rows in flight nor with
    the segments that the driver wrote of them."""
    batches: list[list[Input]] = [[(f"k{n}", "g", n, 10_000 + n) for n in range(40)]]
    world = World(tmp_path, random.Random(1), batches)
    playing(world)
    monkeypatch.setattr(Slicer, "_is_one_slice", lambda *_: False)
    monkeypatch.setattr(Slicer, "_is_over", lambda _: True)
    monkeypatch.setattr(Slicer, "_sized", lambda *_: 3)
    failures, take = iter([True, False] * 3), Acknowledgements.take

    def fails(point: str) -> None:
        if point == where and next(failures, False):
            raise StoreUnavailable("it does not answer")

    def taking(self: Acknowledgements, *arguments: Any) -> Any:
        fails("tasks")
        return take(self, *arguments)

    monkeypatch.setattr(Acknowledgements, "take", taking)
    monkeypatch.setattr(faults, "reach", fails)
    settings = JobSettings(
        parallelism=2,
        local_dir=str(tmp_path / "local"),
        materialize=False,
        placement="off",
        checkpoint_mode="unaligned",
        inline_bytes_max=0,
        retained_checkpoints=1_000,
    )
    finish(world, settings)
    assert next(failures, None) is None, "it did not fail"
    assert len(world.epochs) > 3
    assert not unnamed(world)
