"""For how long a checkpoint waits for rows after it was due: `Progress.alignment_ms`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inflight_chains import STEPS, Input
from inflight_world import Frame, World, start

from state_runtime.base import faults
from state_runtime.base.progress import InflightProgress, Progress, together
from state_runtime.driver import engine
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.driver.epoch_budget import BudgetPlanner, EpochBudget
from state_runtime.driver.numbers import waited
from state_runtime.driver.stage_tasks import StageTasks
from state_runtime.placement.anchors import Placement
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest
from state_runtime.store import open_store
from state_runtime.task.acknowledgement import Acknowledgement
from tests.job_settings import job_settings

GOLDEN = Path(__file__).parents[1] / "golden" / "format-4"
ACTION_S = 3
"""What each epoch's action takes, by the driver's clock."""


class Job:
    """A run of few rows whose actions take `ACTION_S`.

    Args:
        after_rows_s: so much of it comes after the last row; 0: the clocks of tasks are not the driver's.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, after_rows_s: float = 0.0, **settings: Any) -> None:
        batches: list[list[Input]] = [[(f"k{n}", "g", n, 10_000 + n) for n in range(9)] for _ in range(3)]
        world = World(folder, random.Random(1), batches, replace(STEPS, ticks=0))
        plan: Callable[..., Any] = world.plan

        def slow(*arguments: Any, **named: Any) -> SimpleNamespace:
            made = plan(*arguments, **named)

            def run() -> None:
                made.run()
                self.driver._context.clock.advance_s(ACTION_S)

            return SimpleNamespace(
                run=run, event_time_ms=made.event_time_ms, source_rows=made.source_rows, aside=made.aside
            )

        take = Acknowledgements.take

        def taken(self_: Acknowledgements, *arguments: Any) -> list[Acknowledgement]:
            at_ms = self.driver._context.clock.now_ms() - int(after_rows_s * 1000)
            return [replace(a, processed_at_ms=at_ms) if after_rows_s else a for a in take(self_, *arguments)]

        patch.setattr(Acknowledgements, "take", taken)
        patch.setattr(faults, "reach", world.reach)
        patch.setattr(engine, "plan_epoch", slow)
        given = {
            "parallelism": 2,
            "local_dir": str(folder / "local"),
            "materialize": False,
            "placement": "off",
            **settings,
        }
        self.world = world
        self.driver: Any = start(world, job_settings(**given))
        for number, batch in enumerate(batches):
            self.driver.run_batch(Frame(batch), number)

    @property
    def waited_ms(self) -> list[float]:
        return [progress.alignment_ms for progress in self.world.epochs]

    @property
    def newest(self) -> Manifest:
        found = Catalog(open_store(str(self.world.root / "store")), "job").latest()
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("settings", "waited_ms"),
    [
        ({"checkpoint_mode": "aligned"}, [3_000, 3_000, 3_000]),
        ({"checkpoint_mode": "aligned", "checkpoint_interval_s": 2}, [1_000, 1_000, 1_000]),
        # The second epoch begins three seconds after the newest manifest: the checkpoint is due in its middle.
        ({"checkpoint_mode": "aligned", "checkpoint_interval_s": 5}, [0, 1_000, 0]),
        ({"checkpoint_mode": "aligned", "checkpoint_batches": 2}, [0, 3_000, 0]),
        ({"checkpoint_mode": "aligned-with-timeout", "aligned_timeout_s": 2.5}, [1_000, 500, 500]),
        ({"checkpoint_mode": "aligned-with-timeout"}, [1_000, 0, 0]),
        ({"checkpoint_mode": "unaligned", "unaligned_epoch_s": 1.0}, [2_000, 2_000, 2_000]),
        ({"checkpoint_mode": "unaligned", "unaligned_epoch_s": 4.0, "checkpoint_interval_s": 2}, [1_000, 1_000, 1_000]),
    ],
)
def test_a_checkpoint_waits_from_when_it_is_due_to_the_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], waited_ms: list[float]
) -> None:
    """Due is what the interval says, else the end of the time that the mode gives; the first epoch of a run has two seconds. An
    epoch that no checkpoint follows kept none waiting."""
    assert Job(tmp_path, monkeypatch, **settings).waited_ms == waited_ms


def test_what_comes_after_the_last_row_is_the_checkpoint_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are neighbours: together they are the time from due to durable."""
    job = Job(tmp_path, monkeypatch, after_rows_s=1.25, checkpoint_mode="aligned")
    assert job.waited_ms == [(ACTION_S - 1.25) * 1000] * 3
    assert [e.checkpoint_ms for e in job.world.epochs] == [1.25 * 1000] * 3


def test_the_manifest_has_it_and_earlier_versions_read_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse fields that they do not know, but not names of phases. Without a wait a manifest is as it was."""
    newest = Job(tmp_path / "waits", monkeypatch, checkpoint_mode="aligned").newest
    assert newest.progress is not None
    assert newest.progress.alignment_ms == 3_000
    assert newest.format_version == FORMAT_VERSION
    assert set(numbers_in(newest.encode())) <= set(numbers_in(golden()))
    old = Manifest.decode(golden(), "golden").progress
    assert old is not None
    assert old.alignment_ms == 0.0
    newest = Job(tmp_path / "does-not", monkeypatch, checkpoint_mode="aligned", checkpoint_interval_s=60).newest
    assert newest.progress is None or "alignment" not in newest.progress.phases_ms


def golden() -> bytes:
    """A manifest with numbers, as the first version of its format wrote it."""
    return next(body for p in sorted(GOLDEN.rglob("manifest.json")) if numbers_in(body := p.read_bytes()))


def numbers_in(manifest: bytes) -> dict[str, Any]:
    return json.loads(manifest.splitlines()[1])["progress"] or {}


def test_what_epochs_waited_is_in_the_numbers_of_their_checkpoint() -> None:
    """And beside the rows in flight, in whose numbers it stands once more."""
    numbers = waited(Progress(phases_ms={"alignment": 40.0}, inflight=InflightProgress(rows=3)), 40.0)
    both = together(Progress(phases_ms={"process": 5.0}, inflight=InflightProgress(rows=7)), numbers)
    assert both.alignment_ms == 40.0
    assert both.inflight is not None
    assert both.inflight.alignment_ms == 40.0
    assert waited(Progress(), 40.0).inflight is None


def test_what_waiting_for_executors_takes_is_not_taken_from_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every epoch after the loss of an executor would begin with its time used up, and process half a second's rows. A
    checkpoint that is due meanwhile is late all the same, and says so."""
    wait_s, plan, of_action = 5, BudgetPlanner.plan, StageTasks.of_action
    clocks: list[Any] = []
    dealt_s: list[float] = []
    since_s: list[float] = []

    def for_epoch(self: Placement) -> None:
        self.has_filled = True
        self._clock.advance_s(wait_s)
        clocks[:] = [self._clock]

    def dealt(self: BudgetPlanner, *given: Any, **named: Any) -> EpochBudget:
        dealt_s.extend(clock.monotonic_s() for clock in clocks)
        return plan(self, *given, **named)

    def acted(self: StageTasks, *given: Any, **named: Any) -> Any:
        since_s.append(clocks[0].monotonic_s() - dealt_s[-1] if dealt_s else float("inf"))
        return of_action(self, *given, **named)

    monkeypatch.setattr(Placement, "for_epoch", for_epoch)
    monkeypatch.setattr(BudgetPlanner, "plan", dealt)
    monkeypatch.setattr(StageTasks, "of_action", acted)
    waits = Job(tmp_path, monkeypatch, checkpoint_mode="unaligned", unaligned_epoch_s=1.0)
    assert since_s == [0.0] * 3
    assert waits.waited_ms == [(wait_s + ACTION_S - 1) * 1000] * 3
