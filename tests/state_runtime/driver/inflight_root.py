"""Job roots whose newest snapshot has rows in flight, made by the real driver without Spark: for tests of every tool that
meets one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from inflight_chains import STEPS, Chain, Input
from inflight_world import Killed, World, finish

from state_runtime.base import faults
from state_runtime.base.settings import JobSettings
from state_runtime.driver import engine
from state_runtime.driver.checkpointer import Checkpointer
from state_runtime.driver.epoch_budget import BudgetPlanner, EpochBudget
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import LocalStore, Store, open_store
from state_runtime.task import slicing
from tests.job_settings import job_settings

__all__ = ["BATCHES", "InflightRoot", "die_after", "go_on", "reads_of", "rows_in_flight"]

BATCHES: list[list[Input]] = [
    [(f"k{n % 23}", f"g{n % 4}", n % 7, 10_000 + 100 * n) for n in range(40)],
    [(f"k{n % 29}", f"g{n % 4}", n % 5, 30_000 + 50 * n) for n in range(60)],
    [(f"k{n % 5}", f"g{n % 3}", n % 5, 60_000 + n) for n in range(10)],
]


@dataclass
class InflightRoot:
    """A job root, and what made it.

    Attributes:
        manifest: the newest one; rows are in flight in it.
    """

    world: World
    settings: JobSettings
    root: Store
    manifest: Manifest

    @property
    def catalog(self) -> Catalog:
        return Catalog.of_root(self.root)


def rows_in_flight(folder: Path, *, checkpoints: int = 8, chain: Chain = STEPS, **settings: Any) -> InflightRoot:
    """A run over `BATCHES` that dies after so many checkpoints, whose tasks process one slice of few rows each epoch.

    Args:
        settings: of `JobSettings`, in place of those here.
    """
    world = World(folder, random.Random(1), [list(batch) for batch in BATCHES], chain)
    given: dict[str, Any] = {
        "parallelism": 3,
        "local_dir": str(folder / "local"),
        "materialize": False,
        "placement": "off",
        "checkpoint_mode": "unaligned",
        **settings,
    }
    made = job_settings(**given)
    die_after(world, made, checkpoints)
    root = open_store(str(folder / "store")).child("job")
    manifest = Catalog.of_root(root).latest()
    assert manifest is not None
    assert manifest.open_batch is not None
    assert manifest.open_batch.operators, "no rows are in flight: the tests that use this prove nothing"
    return InflightRoot(world, made, root, manifest)


def die_after(world: World, settings: JobSettings, checkpoints: int) -> None:
    """A run that is killed right after its n-th manifest."""
    written = 0

    def reach(point: str) -> None:
        nonlocal written
        world.reach(point)
        written += point == "manifest-written"
        if written == checkpoints:
            world.dead = True
            raise Killed(point)

    with contextlib.suppress(Killed):
        go_on(world, settings, reach)
    world.dead = False


@contextlib.contextmanager
def reads_of(root: Store) -> Iterator[list[str]]:
    """What is read of a folder meanwhile, by whomever: paths, those of ranges with their offset."""
    found: list[str] = []
    prefix = f"{root.url}/"

    def noted(store: LocalStore, path: str, at: str = "") -> None:
        whole = f"{store.url}/{path}"
        if whole.startswith(prefix):
            found.append(whole.removeprefix(prefix) + at)

    read, read_range, get_file = LocalStore.read, LocalStore.read_range, LocalStore.get_file

    def reading(store: LocalStore, path: str, bytes_max: int) -> bytes:
        noted(store, path)
        return read(store, path, bytes_max)

    def reading_range(store: LocalStore, path: str, offset: int, length: int) -> bytes:
        noted(store, path, f"@{offset}")
        return read_range(store, path, offset, length)

    def getting(store: LocalStore, path: str, local: Path) -> None:
        noted(store, path)
        get_file(store, path, local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read", reading)
        patch.setattr(LocalStore, "read_range", reading_range)
        patch.setattr(LocalStore, "get_file", getting)
        yield found


def go_on(world: World, settings: JobSettings, reach: Any = None) -> Manifest:
    """From where the store stands to the end of the input."""
    plan, remove = BudgetPlanner.plan, Checkpointer.remove

    def hurried(self: BudgetPlanner, *arguments: Any, **named: Any) -> EpochBudget:
        self._last_batch_fitted = False
        self._fits = lambda *_: False  # type: ignore[method-assign]
        budget = plan(self, *arguments, **named)
        stages = {
            uid: replace(
                b, deadline_ms=0, within_s=0.0, rows_per_s=0.0, keep_bytes=tuple(1 << 40 for _ in b.keep_bytes)
            )
            if b.deadline_ms is not None
            else b
            for uid, b in budget.stages.items()
        }
        return replace(budget, stages=stages)

    def unless_dead(self: Checkpointer, *arguments: Any) -> None:
        if not world.dead:
            remove(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "reach", reach or world.reach)
        patch.setattr(engine, "plan_epoch", world.plan)
        patch.setattr(Checkpointer, "remove", unless_dead)
        patch.setattr(BudgetPlanner, "plan", hurried)
        patch.setattr(slicing, "_FIRST_ROWS", 4)
        patch.setattr(slicing, "_ROWS_MIN", 1)
        patch.setattr(slicing, "_GROWTH", 1)
        return finish(world, settings)
