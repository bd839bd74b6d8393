"""A run whose first checkpoint decides whether it is kept: it restores every shard and commits, also while no row comes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inflight_laws import under
from inflight_root import BATCHES
from inflight_world import Frame, World, start

from state_runtime.base.errors import MissingFile
from state_runtime.base.settings import CheckpointSettings, JobSettings, MaterializationSettings
from state_runtime.driver.epochs import EpochDriver


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path, random.Random(0), BATCHES)
    under(made, monkeypatch)
    return made


def settings(parallelism: int) -> JobSettings:
    """Without a trial, hours go by until the first checkpoint."""
    return JobSettings(
        parallelism=parallelism,
        placement="off",
        materialization=MaterializationSettings(by="dagster"),
        checkpoint=CheckpointSettings(interval_s=3_600),
    )


@contextmanager
def run(world: World, parallelism: int, *, on_trial: bool = False) -> Iterator[EpochDriver]:
    driver = start(world, settings(parallelism), on_trial=on_trial)
    yield driver
    driver.stop()
    driver.close(0.0)


def process(world: World) -> None:
    """All that there is, up to the last window that it closes."""
    with run(world, 2) as driver:
        for number, batch in enumerate(world.batches):
            driver.run_batch(Frame(batch), number)
        while driver.is_due():
            driver.run_without_batch(Frame())
        driver.finish()


def restored(driver: EpochDriver) -> set[int]:
    """How many shards of each operator the run has restored."""
    return {len(shards) for shards in driver._state.shards.trusted.values()}


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_run_on_trial_restores_every_shard_and_commits_without_a_row(world: World, parallelism: int) -> None:
    """Else it is kept although nobody has read its state, and the first row finds out what is wrong."""
    process(world)
    with run(world, parallelism) as driver:
        driver.run_without_batch(Frame())
        assert (driver.epochs, driver._committer.last.kind) == (0, "fencing"), "any other run has nothing to do"
    with run(world, parallelism, on_trial=True) as driver:
        assert (driver.is_due(), driver.is_unproven) == (False, True)
        driver.run_without_batch(Frame())
        assert restored(driver) == {parallelism}
        assert (driver._committer.last.kind, driver._committer.last.term) == ("checkpoint", driver._committer.term.term)
        assert not driver.is_unproven
        driver.run_without_batch(Frame())
        assert driver.epochs == 1, "once is enough"


def test_a_run_on_trial_fails_at_what_it_cannot_restore_before_a_row_comes(world: World) -> None:
    process(world)
    shutil.rmtree(world.root / "local")
    shutil.rmtree(world.root / "store" / "job" / "changelog")
    with run(world, 3, on_trial=True) as driver:
        last = driver._committer.last
        with pytest.raises(MissingFile):
            driver.run_without_batch(Frame())
        assert driver._committer.last is last


def test_rows_that_come_first_are_the_trial(world: World) -> None:
    """Then it need not wait for them to stop; and the shards that none of them is of are restored as well."""
    process(world)
    with run(world, 3, on_trial=True) as driver:
        driver.run_batch(Frame(BATCHES[0][:1]), len(BATCHES))
        assert restored(driver) == {3}
        assert not driver.is_unproven
        assert driver._committer.last.kind == "checkpoint"


def test_a_job_that_never_had_a_row_passes_its_trial(world: World) -> None:
    """It has no position of its source to go on from, and the one that follows begins with the first batch."""
    with run(world, 2, on_trial=True) as driver:
        driver.run_without_batch(Frame())
        assert (driver._committer.last.kind, driver._committer.last.source) == ("checkpoint", None)
    process(world)
