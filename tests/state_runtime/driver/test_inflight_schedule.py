"""Epochs that end before their batch: whatever deadlines, kills, lost disks, rescales and modes do, readers see what one
uninterrupted aligned run gives.

FLIP-76's test plan, and Flink's history: a rescale before the rows of the last one are processed, a restart with the same
parallelism after it, again and again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inflight_world import Killed, World, deadlines, finish, results, some_batches
from model import seeds

from state_runtime.base import faults
from state_runtime.base.settings import JobSettings
from state_runtime.driver import epochs as driver
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.governor import Governor
from state_runtime.task import slicing


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
