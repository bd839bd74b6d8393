"""Savepoints of a job whose batch takes several epochs: with the rows in flight, or, if asked so, once there are none."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from inflight_chains import JOINS, STEPS, Chain, Input
from inflight_laws import of_one_run, under
from inflight_world import Frame, World, finish, results, start
from model import CountingIds, FakeClock

from state_runtime.base.settings import CheckpointSettings, MaterializationSettings, RetentionSettings
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import new_requests, request_savepoint
from state_runtime.snapshot.fencing import open_job_root
from state_runtime.snapshot.job_info import StartedFrom
from state_runtime.snapshot.lineage import taken_over
from state_runtime.snapshot.locate import open_snapshot
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.savepoint_record import SavepointThen
from state_runtime.store import open_store
from state_runtime.task.slicing import Slicer
from tests.job_settings import job_settings

BATCHES: list[list[Input]] = [
    [(f"k{n}", f"g{n % 4}", n, 10_000 + n) for n in range(40)],
    [(f"k{n}", f"g{n % 4}", n, 30_000 + n) for n in range(20)],
]


class Run:
    """A run whose tasks process a few rows an epoch; its savepoints are made by hand."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        batches: list[list[Input]] = BATCHES,
        chain: Chain = STEPS,
        parallelism: int = 2,
        **settings: Any,
    ) -> None:
        self.world = World(folder, random.Random(1), batches, chain)
        under(self.world, patch)
        patch.setattr(Slicer, "_is_one_slice", lambda *_: False)
        patch.setattr(Slicer, "_is_over", lambda slicer: slicer._deadline_s is not None)
        patch.setattr(Slicer, "_sized", lambda *_: 3)
        self.settings = job_settings(parallelism=parallelism, local_dir=str(folder / "local"), materialization=MaterializationSettings(by="dagster"), placement="off", checkpoint=CheckpointSettings(mode="unaligned"), retention=RetentionSettings(retained_checkpoints=1_000), **settings)  # fmt: skip
        self.root = open_store(str(folder / "store")).child("job")
        self.asked: dict[int, tuple[str, SavepointThen, bool]] = {}
        self.driver: Any = start(self.world, self.settings, savepoints=self._savepoints)
        note = self.driver._line._on_progress

        def noting(progress: Any) -> None:
            note(progress)
            if self.driver.epochs in self.asked:
                self._ask(*self.asked[self.driver.epochs])

        self.driver._line._on_progress = noting

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
        for number, batch in enumerate(self.world.batches):
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


TWO_STREAMS: list[list[Input]] = [
    [(side, f"k{n % 7}", f"g{n % 4}", n, 10_000 + 250 * n + side) for n in range(20) for side in (0, 1)],
    [(n % 2, f"k{n % 7}", f"g{n % 4}", n, 30_000 + n) for n in range(20)],
]


@pytest.mark.parametrize(
    ("chain", "batches", "mode", "settings"),
    [
        (STEPS, BATCHES, "NO_CLAIM", {"backend": "rocksdb"}),
        (STEPS, BATCHES, "CLAIM", {"changelog": "off"}),
        (JOINS, TWO_STREAMS, "NO_CLAIM", {"changelog": "off"}),
        (JOINS, TWO_STREAMS, "CLAIM", {"backend": "rocksdb"}),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_a_stopped_savepoint_with_rows_in_flight_goes_on_as_another_job_of_any_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: Chain, batches: list[list[Input]], mode: Any, settings: Any
) -> None:
    """`savepoint --stop`, another root and uid, a rescale, and once more in the middle of the same batch: output of the three jobs
    together, and the state of the last, are those of a run that nobody stopped. Of a join rows of both inputs wait."""
    expected, _ = of_one_run(tmp_path / "aligned", batches, chain, monkeypatch)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder, before, parallelism in ((first, None, 2), (second, first, 3)):
        with monkeypatch.context() as patch:
            if before is not None:
                taken_from(before, folder, mode)
            run = Run(folder, patch, batches, chain, parallelism, **settings)
            run.asked = {1: ("last", "stop", False)}
            run.read()
            run.end()
            assert rows_in(run.made("last")) > 0, "nothing waits: the test proves nothing"
    taken_from(second, third, mode)
    world = World(third, random.Random(1), batches, chain)
    under(world, monkeypatch)
    finish(world, job_settings(run.settings, parallelism=1, local_dir=str(third / "local")))
    for folder in (first, second):
        for sink in chain.sinks:
            shutil.copytree(folder / sink, third / sink, dirs_exist_ok=True)
    assert results(world) == expected


def taken_from(before: Path, folder: Path, mode: Any) -> None:
    """A root that begins with the savepoint of another job, as `driver/start_position.py` makes it."""
    source = open_store(str(before / "store")).child("job/savepoints/last")
    saved = open_snapshot(source).manifest
    target = open_store(str(folder / "store")).child("job")
    started = StartedFrom("there", "job", saved.job_uid, saved.snapshot_id, saved.commit_id, mode)
    clock, ids = FakeClock(), CountingIds(prefix=len(str(folder)))
    info = open_job_root(target, "job", clock=clock, ids=ids, uid=f"{folder.name:0>32}", started_from=started)
    copy_snapshot(source, saved, target, rewrite=lambda m: taken_over(m, started, info), clock=clock, ids=ids)
