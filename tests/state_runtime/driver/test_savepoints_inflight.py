"""Savepoints of a job whose batch takes several epochs: with the rows in flight, or, if asked so, once there are none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from inflight_chains import STEPS, Input
from inflight_laws import of_one_run, under
from inflight_world import Frame, World, finish, results, start
from model import FakeClock

from state_runtime.base.settings import JobSettings
from state_runtime.driver.savepoints import Savepoints
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import new_requests, request_savepoint
from state_runtime.snapshot.locate import open_snapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.savepoint import SavepointThen
from state_runtime.store import open_store
from state_runtime.task.slicing import Slicer

BATCHES: list[list[Input]] = [
    [(f"k{n}", f"g{n % 4}", n, 10_000 + n) for n in range(40)],
    [(f"k{n}", f"g{n % 4}", n, 30_000 + n) for n in range(20)],
]


class Run:
    """A run whose tasks process a few rows an epoch; its savepoints are made by hand."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.world = World(folder, random.Random(1), BATCHES)
        under(self.world, patch)
        patch.setattr(Slicer, "_is_one_slice", lambda *_: False)
        patch.setattr(Slicer, "_is_over", lambda slicer: slicer._deadline_s is not None)
        patch.setattr(Slicer, "_sized", lambda *_: 3)
        self.settings = JobSettings(
            parallelism=2, local_dir=str(folder / "local"), materialize=False, placement="off",
            checkpoint_mode="unaligned", retained_checkpoints=1_000,
        )  # fmt: skip
        self.root = open_store(str(folder / "store")).child("job")
        self.asked: dict[int, tuple[str, SavepointThen, bool]] = {}
        self.driver: Any = start(self.world, self.settings, savepoints=self._savepoints)
        note = self.driver._on_progress

        def noting(progress: Any) -> None:
            note(progress)
            if self.driver.epochs in self.asked:
                self._ask(*self.asked[self.driver.epochs])

        self.driver._on_progress = noting

    def _savepoints(self, committer: Committer) -> Savepoints:
        self.term = committer.term.term
        self.savepoints = Savepoints(self.root, committer.info, self.term, clock=FakeClock(), ids=self.world.ids)
        return self.savepoints

    def _ask(self, name: str, then: SavepointThen, drain_inflight: bool) -> None:
        request_savepoint(
            self.root, self.term, name, clock=FakeClock(), ids=self.world.ids, then=then, drain_inflight=drain_inflight
        )
        for request in new_requests(self.root, self.term, set()).values():
            assert request is not None
            self.savepoints.hear(request)

    def read(self) -> None:
        """All batches, as far as the run takes them."""
        for number, batch in enumerate(BATCHES):
            self.driver.run_batch(Frame(batch), number)

    def end(self) -> None:
        self.driver.stop()
        self.driver.finish()
        while self.savepoints.do_one():
            pass
        self.savepoints.close("it stopped")
        self.driver.close(0.0)

    def made(self, name: str) -> Manifest:
        return open_snapshot(self.root.child(f"savepoints/{name}")).manifest


def rows_in(manifest: Manifest) -> int:
    return sum(o.rows for o in manifest.open_batch.operators) if manifest.open_batch is not None else 0


def test_a_savepoint_is_made_at_once_with_the_rows_that_wait_and_one_without_when_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both asked for in the same epoch; the stream goes on. The one without stands at the end of the batch, not of the next."""
    run = Run(tmp_path, monkeypatch)
    run.asked = {2: ("as-it-is", "continue", False), 3: ("without", "continue", True)}
    run.read()
    run.end()
    as_it_is, without = run.made("as-it-is"), run.made("without")
    assert rows_in(as_it_is) > 0
    assert without.open_batch is None
    assert without.source is not None
    assert without.source.batch_id == 0
    assert without.epoch > as_it_is.epoch + 1
    newest = Catalog.of_root(run.root).latest()
    assert newest is not None
    assert newest.source is not None
    assert newest.source.batch_id == 1, "the stream went on"


def test_a_job_that_stops_after_a_savepoint_without_rows_in_flight_processes_them_and_reads_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`savepoint --stop --drain-inflight`, which is what a refused change of code is told to call. A later run of the job goes on
    behind it, and the result is that of a run that nobody stopped."""
    expected, _ = of_one_run(tmp_path / "aligned", BATCHES, STEPS, monkeypatch)
    run = Run(tmp_path / "stopped", monkeypatch)
    run.asked = {2: ("last", "stop", True)}
    run.read()
    assert run.driver.is_ending
    run.end()
    newest = Catalog.of_root(run.root).latest()
    assert newest is not None
    assert newest.snapshot_id == run.made("last").snapshot_id
    assert newest.open_batch is None
    assert newest.source is not None
    assert newest.source.batch_id == 0
    finish(run.world, run.settings)
    assert results(run.world) == expected


def test_a_job_that_stops_after_a_plain_savepoint_leaves_its_rows_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`savepoint --stop` is over within an epoch, however much waits; the rows are in it and in the job's newest snapshot."""
    run = Run(tmp_path, monkeypatch)
    run.asked = {2: ("last", "stop", False)}
    run.read()
    run.end()
    assert run.driver.epochs <= 4
    assert rows_in(run.made("last")) > 0
