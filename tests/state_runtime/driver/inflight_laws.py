"""What holds of a chain wherever its epochs end, as plain functions: test_inflight_schedule.py plays some seeds of each, and
`make soak-inflight` as many as it is told.

Each law plays one life of a job over drawn input, compares it with an aligned run that nothing disturbs, and says what it met.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inflight_chains import Chain, Input
from inflight_world import Killed, World, deadlines, finish, results

from state_runtime.base import faults
from state_runtime.base.errors import TasksDisagree, TooMuchForOneTask
from state_runtime.base.settings import CheckpointSettings, JobSettings, LocalRecoverySettings, MaterializationSettings
from state_runtime.driver import engine, stage_tasks
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.epoch_budget import BudgetPlanner
from state_runtime.driver.single_task import SingleTask
from state_runtime.processors import slices
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from state_runtime.task import slicing, stage
from state_runtime.task.gathered import gather
from state_runtime.task.single_task import SingleTaskLimits, by_shard
from state_runtime.task.slicing import Slicer

__all__ = [
    "LAWS",
    "Law",
    "Life",
    "drained_and_rescaled",
    "epochs_end_anywhere",
    "of_one_run",
    "one_task_for_all_shards",
    "some_settings",
    "tasks_that_disagree",
    "under",
]

REMOVE, PLAN = Checkpointer.remove, BudgetPlanner.plan


def under(world: World, patch: pytest.MonkeyPatch) -> None:
    """Put a world under the driver, whose slices are small and whose deadlines are the seed's."""

    def unless_dead(self: Checkpointer, *arguments: Any) -> None:
        if not world.dead:
            REMOVE(self, *arguments)

    def gathering(batches: Any, keys: Any, parallelism: int, _: int, folder: Path, ids: Any) -> Any:
        return gather(batches, keys, parallelism, world.draw.choice([1, 600, 1 << 27]), folder, ids)

    def narrowing(self: SingleTask, *_: Any, **__: Any) -> bool:
        return world.draw.random() < world.narrow

    def refusing(*arguments: Any) -> Any:
        for of_shard in by_shard(*arguments):
            if world.draw.random() < 0.05:
                raise TooMuchForOneTask("it takes too long")
            yield of_shard

    patch.setattr(faults, "reach", world.reach)
    patch.setattr(engine, "plan_epoch", world.plan)
    patch.setattr(Checkpointer, "remove", unless_dead)
    patch.setattr(BudgetPlanner, "plan", PLAN)
    patch.setattr(BudgetPlanner, "plan", deadlines(world.draw))
    patch.setattr(slicing, "_FIRST_ROWS", 2)
    patch.setattr(slicing, "_ROWS_MIN", 1)
    patch.setattr(slicing, "_GROWTH", 1)
    patch.setattr(slices, "HELD_BYTES_MIN", world.draw.choice([1, 300, 1 << 25]))
    patch.setattr(stage, "gather", gathering)
    patch.setattr(SingleTask, "choose", narrowing)
    patch.setattr(stage, "by_shard", refusing)
    rows_max = world.draw.choice([15, 1 << 16]) if world.narrow else 1 << 16
    patch.setattr(stage_tasks, "LIMITS", SingleTaskLimits(rows_max, time_max_s=float("inf")))


def some_settings(world: World, mode: str = "") -> JobSettings:
    draw = world.draw
    # In this order: a seed is an example, and stays the same one.
    parallelism = draw.choice([1, 2, 3, 5])
    batches = draw.choice([1, 1, 2, 5])
    pending_bytes_max = draw.choice([0, 2_000, 1 << 24])
    inline_bytes_max = draw.choice([0, 600, 1 << 18])
    changelog = draw.choice(["on", "on", "on", "off"])
    backend = draw.choice(["arrow"] * 5 + ["rocksdb"])
    drawn_mode = mode or draw.choice(["unaligned", "unaligned", "aligned-with-timeout", "aligned"])
    return JobSettings(
        parallelism=parallelism,
        local_dir=str(world.root / "local"),
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        runs_max=2,
        checkpoint=CheckpointSettings(
            batches=batches,
            pending_bytes_max=pending_bytes_max,
            inline_bytes_max=inline_bytes_max,
            mode=drawn_mode,
            # Tasks are repeated, and come to other rows, far more often than on a cluster: many times in a row even.
            tolerable_failures=1_000,
        ),
        changelog=changelog,
        backend=backend,
        local_recovery=LocalRecoverySettings(enabled=draw.random() < 0.7),
    )


def of_one_run(
    folder: Path, batches: list[list[Input]], chain: Chain, patch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], int]:
    """The same input in an aligned run that nothing disturbs, and how many rows were late."""
    world = World(folder, random.Random(0), batches, chain)
    under(world, patch)
    settings = JobSettings(
        parallelism=2,
        local_dir=str(folder / "local"),
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        checkpoint=CheckpointSettings(mode="aligned"),
    )
    finish(world, settings)
    return results(world), world.late["rows"]


@dataclass(frozen=True)
class Life:
    """One example of a law.

    Attributes:
        name: what it is drawn from; in the message of what fails.
    """

    name: str
    folder: Path
    draw: random.Random
    chain: Chain
    patch: pytest.MonkeyPatch

    def begin(self, **disturbed: float) -> tuple[World, dict[str, Any], int]:
        """The world, and what an aligned run gives over the same input."""
        batches = self.chain.batches(self.draw)
        expected, late = of_one_run(self.folder / "aligned", batches, self.chain, self.patch)
        world = World(self.folder / "disturbed", self.draw, batches, self.chain, **disturbed)  # type: ignore[arg-type]
        under(world, self.patch)
        return world, expected, late


Law = Callable[[Life], Counter[str]]
"""Plays a life, and says how often what was met.

Raises:
    AssertionError: the law is broken.
"""


def epochs_end_anywhere(life: Life) -> Counter[str]:
    """Rows, timers, windows that close, joins, late rows, at every operator; nothing lost, doubled or late that was not."""
    world, expected, late = life.begin()
    finish(world, some_settings(world, "unaligned"))
    assert results(world) == expected, life.name
    assert world.late["rows"] == late, life.name
    return Counter({"more epochs than batches": len(world.epochs) > len(world.batches) + 2})


def drained_and_rescaled(life: Life) -> Counter[str]:
    """Each run ends somewhere, with rows in flight or not; the next has another parallelism, mode, backend, changelog."""
    seen: Counter[str] = Counter()
    draw = life.draw
    world, expected, _ = life.begin(losses=0.15, repeats=0.1)
    rescaled_again = 0
    for _ in range(draw.randrange(2, 8)):
        world.passed, world.dead = 0, False
        world.dies_at = draw.randrange(1, 200) if draw.random() < 0.5 else 0
        world.stops_after = draw.randrange(1, 4) if draw.random() < 0.8 else 0
        settings = some_settings(world)
        is_rescaled = _rescales_rows(world, settings)
        rescaled_again = rescaled_again + 1 if is_rescaled else 0
        seen["rescaled with rows in flight"] += is_rescaled
        seen["rescaled again before they were done"] += rescaled_again > 1
        try:
            last = finish(world, settings, batches=draw.choice([None, 1, 2, 2]))
            seen["stopped with rows in flight"] += last.open_batch is not None and bool(last.open_batch.operators)
            seen["stopped"] += 1
        except Killed:
            seen["killed"] += 1
    world.dies_at, world.dead, world.stops_after = 0, False, 0
    finish(world, some_settings(world))
    assert results(world) == expected, life.name
    return seen


def _rescales_rows(world: World, settings: JobSettings) -> bool:
    """Whether a run with these settings is about to cut rows in flight anew."""
    newest = Catalog(open_store(str(world.root / "store")), "job").latest()
    batch = newest.open_batch if newest is not None else None
    return batch is not None and bool(batch.operators) and newest.parallelism != settings.parallelism


def one_task_for_all_shards(life: Life) -> Counter[str]:
    """Output, state, late rows, whichever epochs are narrow, with rows in flight, kills and rescales too; and one that is
    refused in the middle has not happened."""
    world, expected, late = life.begin(narrow=0.7)
    is_killed = life.draw.random() < 0.5
    if is_killed:
        world.dies_at = life.draw.randrange(1, 100)
        with suppress(Killed):
            finish(world, some_settings(world))
        world.dies_at, world.dead = 0, False
    finish(world, some_settings(world))
    assert results(world) == expected, life.name
    assert is_killed or world.late["rows"] == late, life.name
    left = [str(f) for f in world.root.glob("*/_stillstate/staging/*/*/*.parquet")]
    assert not left, f"{life.name}: {left}"
    return Counter({"narrow": world.narrow_epochs, "refused": world.refused})


def tasks_that_disagree(life: Life) -> Counter[str]:
    """An executor is lost after its task; the second attempt is slower or faster, and leaves other rows than those that the
    output of the first was made without. Such an epoch is run again."""
    take, is_over, disagreements = Acknowledgements.take, Slicer._is_over, 0

    def taking(self: Acknowledgements, *arguments: Any) -> Any:
        nonlocal disagreements
        try:
            return take(self, *arguments)
        except TasksDisagree:
            disagreements += 1
            raise

    world, expected, late = life.begin(repeats=0.2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Acknowledgements, "take", taking)
        patched.setattr(Slicer, "_is_over", lambda self: is_over(self) and world.draw.random() < 0.5)
        finish(world, some_settings(world, "unaligned"))
    assert results(world) == expected, life.name
    assert world.late["rows"] == late, life.name
    return Counter({"disagreements": disagreements})


LAWS: dict[str, Law] = {
    "epochs end anywhere": epochs_end_anywhere,
    "drained and rescaled": drained_and_rescaled,
    "one task for all shards": one_task_for_all_shards,
    "tasks that disagree": tasks_that_disagree,
}
