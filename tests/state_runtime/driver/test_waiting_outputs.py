"""Sinks that are away: their staged output waits, state and checkpoints go on, and each row comes once."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from model import FakeClock, seeds
from test_driver_schedule import (
    Frame,
    Killed,
    World,
    check,
    playing,  # noqa: F401 - a fixture
    published,
    run,
    start,
)

from state_runtime import JobSettings, ParquetSink
from state_runtime.base.actor import Actor
from state_runtime.base.errors import Fenced, InvalidConfiguration, InvalidData, StoreUnavailable
from state_runtime.base.limits import PENDING_FILES_MAX
from state_runtime.base.settings import CheckpointSettings, MaterializationSettings
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.rollback import execute_rollback, plan_rollback
from state_runtime.driver.waiting_outputs import WaitingOutputs
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.lineage import pending_outputs
from state_runtime.snapshot.manifest import Manifest, StagedFile, StagedOutput
from state_runtime.snapshot.paths import PUBLISHED_FILE
from state_runtime.store import open_store

WAIT_S = 30.0
AWAY = StoreUnavailable("the target does not answer")


# --- what waits, alone -------------------------------------------------------------------------------------------------


@dataclass
class Target:
    """What sinks write to. It is away until it is told otherwise."""

    is_away: bool = True
    error: BaseException = AWAY
    epochs: list[tuple[str, int]] = field(default_factory=list)

    def publish(self, output: StagedOutput) -> None:
        if self.is_away:
            raise self.error
        self.epochs.append((output.sink, output.epoch))


def output(epoch: int, sink: str = "out", size: int = 10, files: int = 1) -> StagedOutput:
    return StagedOutput(sink, epoch, tuple(StagedFile(f"{sink}-{epoch}-{n}", "b", size, 1) for n in range(files)))


def waiting_for(target: Target, prove: Callable[[], object] = lambda: None, bytes_max: int = 100) -> WaitingOutputs:
    return WaitingOutputs(target.publish, prove, FakeClock(), bytes_max=bytes_max)


def test_newer_output_waits_behind_older_output_of_its_sink_and_of_no_other() -> None:
    target = Target()
    waiting = waiting_for(target)
    waiting.begin("out", [output(1), output(2)], AWAY)
    assert waiting.add("out", [output(3)])
    assert not waiting.add("other", [output(3, "other")]), "it is not away"
    assert [o.epoch for o in waiting.named] == [1, 2, 3]
    target.is_away = False
    assert waiting.wait_until_empty(lambda: False)
    assert target.epochs == [("out", 1), ("out", 2), ("out", 3)]
    assert not waiting.is_away("out")
    assert (waiting.named, waiting.states()) == ((), ())
    assert not waiting.add("out", [output(4)]), "nothing is before it any more"
    waiting.close(WAIT_S)


def test_what_waits_is_told_with_the_reason_and_since_when() -> None:
    target = Target()
    waiting = waiting_for(target)
    waiting.begin("out", [output(1), output(2, files=2)], AWAY)
    (state,) = waiting.states()
    assert (state.name, state.epochs, state.bytes, state.holds_up) == ("out", 2, 30, False)
    assert state.said == "StoreUnavailable: the target does not answer"
    assert state.away_since_ms == FakeClock().now_ms()
    waiting.close(WAIT_S)


@pytest.mark.parametrize("much", [[output(1, size=101)], [output(1, size=0, files=PENDING_FILES_MAX + 1)]])
def test_too_many_bytes_or_files_hold_up_the_job_until_the_sink_takes_them(
    much: list[StagedOutput], caplog: pytest.LogCaptureFixture
) -> None:
    target = Target()
    waiting = waiting_for(target)
    with caplog.at_level(logging.WARNING):
        waiting.begin("out", much, AWAY)
        waiting.add("out", [output(2)])
    assert waiting.is_full
    assert waiting.states()[0].holds_up
    assert sum("no epoch begins" in message for message in caplog.messages) == 1
    target.is_away = False
    assert waiting.wait_until_empty(lambda: False)
    assert not waiting.is_full
    waiting.close(WAIT_S)


def test_a_run_that_was_fenced_publishes_nothing_that_waited() -> None:
    """Its thread may wake an hour later, when the job has been rolled back by a newer run."""
    target = Target(is_away=False)

    def fenced() -> None:
        raise Fenced("term 2 has taken the job over")

    waiting = waiting_for(target, fenced)
    waiting.begin("out", [output(1)], AWAY)
    assert not waiting.wait_until_empty(lambda: False)
    assert target.epochs == []
    with pytest.raises(Fenced):
        waiting.raise_failure()
    waiting.close(WAIT_S)


def test_an_error_that_does_not_pass_is_the_runs_error() -> None:
    target = Target(error=InvalidData("the table has other columns now"))
    waiting = waiting_for(target)
    waiting.begin("out", [output(1)], AWAY)
    assert not waiting.wait_until_empty(lambda: False)
    with pytest.raises(InvalidData, match="other columns"):
        waiting.raise_failure()
    assert [o.epoch for o in waiting.named] == [1], "the next run gets it"
    waiting.close(WAIT_S)


def test_nothing_is_tried_any_more_once_it_is_closed() -> None:
    target, before = Target(), set(threading.enumerate())
    waiting = waiting_for(target)
    waiting.begin("out", [output(1)], AWAY)
    waiting.close(WAIT_S)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "away-out"]
    assert [o.epoch for o in waiting.named] == [1]


# --- in a run ----------------------------------------------------------------------------------------------------------


class Switch:
    """Lets all Parquet sinks be away, or answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_away = False
        self.settled: list[int] = []
        monkeypatch.setattr(ParquetSink, "settle", lambda sink, spec, output: self.settled.append(output.epoch))
        for name in ("publish", "publish_again"):
            monkeypatch.setattr(ParquetSink, name, self._switched(getattr(ParquetSink, name)))

    def _switched(self, real: Callable[..., None]) -> Callable[..., None]:
        def publish(*arguments: Any) -> None:
            if self.is_away:
                raise AWAY
            real(*arguments)

        return publish


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Switch:
    return Switch(monkeypatch)


class InOneThread(World):
    """Kills at passages of the driver's own thread only."""

    def reach(self, point: str) -> None:
        if not threading.current_thread().name.startswith("away-"):
            super().reach(point)


def settings(root: Path, **checkpoint: Any) -> JobSettings:
    return JobSettings(
        parallelism=2,
        local_dir=str(root / "local"),
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        checkpoint=CheckpointSettings(**checkpoint),
    )


@pytest.fixture
def world(tmp_path: Path, playing: Callable[[World], None]) -> World:  # noqa: F811
    """Eight batches; nothing is drawn."""
    made = World(tmp_path, random.Random(3), [[f"k{n}", "k0", f"k{n % 3}"] for n in range(8)])
    made.draw.random = lambda: 1.0  # type: ignore[method-assign]
    playing(made)
    return made


def go_on(driver: EpochDriver, world: World, first: int, end: int) -> None:
    for number in range(first, end):
        driver.run_batch(Frame(world.batches[number]), number)  # type: ignore[arg-type]


def without_its_sink(world: World, switch: Switch, first: int, end: int) -> EpochDriver:
    """A run whose sink is away from a batch on."""
    driver = start(world, settings(world.root))
    go_on(driver, world, 0, first)
    switch.is_away = True
    go_on(driver, world, first, end)
    return driver


def snapshots(world: World) -> tuple[Catalog, dict[int, Manifest]]:
    """The job's catalog, and its checkpoints by their epochs."""
    catalog = Catalog(open_store(str(world.root / "store")), "job")
    return catalog, {m.epoch: m for m in map(catalog.manifest, catalog.snapshot_ids()) if m.kind == "checkpoint"}


def end(driver: EpochDriver) -> None:
    driver.stop()
    driver.finish()
    driver.wait_for_sinks(lambda: False)
    driver.close(WAIT_S)


def newest(world: World) -> Manifest:
    found = Catalog(open_store(str(world.root / "store")), "job").latest()
    assert found is not None
    return found


def staged(world: World) -> int:
    return len(list((world.root / "out" / "_stillstate" / "staging").rglob("*.parquet")))


@pytest.mark.parametrize("batches", [1, 3])
def test_state_and_checkpoints_go_on_while_a_sink_is_away_and_it_gets_all_when_it_is_back(
    world: World, switch: Switch, batches: int
) -> None:
    driver = start(world, settings(world.root, batches=batches))
    go_on(driver, world, 0, 3)
    seen, before = len(published(world.root)), newest(world)
    switch.is_away = True
    go_on(driver, world, 3, 6)
    assert newest(world).epoch - before.epoch == 3
    assert len(published(world.root)) == seen, "no reader sees a part"
    assert {o.epoch for o in newest(world).outputs} == {5, 6, 7}, "what waits is named by the newest manifest"
    assert [s.epochs for s in driver.sinks_away()] == [3]
    assert not driver.is_settled
    switch.is_away = False
    go_on(driver, world, 6, 8)
    end(driver)
    check(world, 3)
    assert staged(world) == 0


def test_what_is_staged_stays_until_a_manifest_no_longer_names_it(world: World, switch: Switch) -> None:
    driver = without_its_sink(world, switch, 2, 5)
    assert switch.settled == [2, 3], "epochs 4 to 6 wait"
    switch.is_away = False
    assert driver._line.checkpointer.waiting.wait_until_empty(lambda: False)
    assert switch.settled == [2, 3], "the newest manifest names them: a start now would ask for them"
    go_on(driver, world, 5, 6)
    assert switch.settled == [2, 3, 4, 5, 6]
    end(driver)


def test_what_waited_when_a_run_was_killed_is_published_by_the_next_one(world: World, switch: Switch) -> None:
    driver = without_its_sink(world, switch, 2, 5)
    driver._line.checkpointer.waiting.close(WAIT_S)  # its threads go with the process
    switch.is_away = False
    assert len(published(world.root)) == 2
    run(world, settings(world.root))
    check(world, 3)


def test_a_run_that_ends_while_a_sink_is_away_says_what_waits_and_the_next_one_publishes_it(
    world: World, switch: Switch
) -> None:
    driver = without_its_sink(world, switch, 2, 8)
    driver.stop()
    driver.finish()
    with pytest.raises(StoreUnavailable, match="the output of 6 epochs waits"):
        driver.wait_for_sinks(lambda: True)
    driver.close(WAIT_S)
    switch.is_away = False
    run(world, settings(world.root))
    check(world, 3)


def test_beyond_the_bound_no_epoch_begins_until_the_sink_takes_some(
    world: World, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start(world, settings(world.root, pending_output_bytes_max=1))
    waiting = driver._line.checkpointer.waiting
    looks: list[int] = []

    def wait(seconds: float) -> bool:
        """The second time that the held up run looks, the sink is back."""
        looks.append(newest(world).epoch)
        if len(looks) == 2:
            switch.is_away = False
            assert waiting.wait_until_empty(lambda: False)
        return False

    monkeypatch.setattr(driver, "_wait", wait)
    go_on(driver, world, 0, 2)
    switch.is_away = True
    go_on(driver, world, 2, 3)
    assert driver.is_held_up
    assert not driver.is_due()
    go_on(driver, world, 3, 4)
    assert looks == [4, 4], "no epoch began"
    assert newest(world).epoch == 5
    go_on(driver, world, 4, 8)
    end(driver)
    check(world, 3)


def test_a_run_that_is_held_up_stops_when_it_is_asked_to(
    world: World, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start(world, settings(world.root, pending_output_bytes_max=1))
    switch.is_away = True
    go_on(driver, world, 0, 1)
    monkeypatch.setattr(driver, "_wait", lambda seconds: driver.stop())
    go_on(driver, world, 1, 2)
    assert newest(world).epoch == 2
    driver.close(WAIT_S)


def test_without_a_bound_a_sink_that_is_away_ends_the_run(world: World, switch: Switch) -> None:
    driver = start(world, settings(world.root, pending_output_bytes_max=0))
    switch.is_away = True
    with pytest.raises(StoreUnavailable):
        go_on(driver, world, 0, 1)
    driver.close(WAIT_S)
    switch.is_away = False
    run(world, settings(world.root))
    check(world, 3)


def test_a_start_needs_every_sink(world: World, switch: Switch) -> None:
    """What it has, and whose its place is, must be known before an epoch gets its number."""
    driver = start(world, settings(world.root))
    switch.is_away = True
    go_on(driver, world, 0, 2)
    driver._line.checkpointer.waiting.close(WAIT_S)
    with pytest.raises(StoreUnavailable):
        start(world, settings(world.root))
    switch.is_away = False
    run(world, settings(world.root))
    check(world, 3)


def test_an_older_snapshot_still_names_what_waits_in_the_newest_and_nothing_that_is_published(
    world: World, switch: Switch
) -> None:
    driver = without_its_sink(world, switch, 2, 6)
    _, by_epoch = snapshots(world)
    assert [o.epoch for o in pending_outputs(by_epoch[5], newest(world))] == [4, 5]
    assert [o.epoch for o in pending_outputs(by_epoch[3], newest(world))] == []
    driver._line.checkpointer.waiting.close(WAIT_S)


def test_a_history_that_was_left_with_output_that_waited_is_not_gone_back_to(world: World, switch: Switch) -> None:
    """The sink has newer epochs by then, and would pass over it."""
    driver = without_its_sink(world, switch, 2, 4)
    driver._line.checkpointer.waiting.close(WAIT_S)
    switch.is_away = False
    catalog, by_epoch = snapshots(world)
    actor = Actor(FakeClock(), world.ids, "h", 1)

    def go_back(epoch: int) -> None:
        execute_rollback(catalog, plan_rollback(catalog, f"@{by_epoch[epoch].snapshot_id}", takeover=True), actor)

    go_back(3)
    run(world, settings(world.root))
    for epoch in (4, 5):
        with pytest.raises(InvalidConfiguration, match="may not have been published"):
            go_back(epoch)
    assert newest(world).undelivered == (("out", 4, 5),)
    go_back(2)
    assert newest(world).undelivered == (("out", 4, 5),), "all output of the second history was published"


def test_a_damaged_word_about_what_is_published_keeps_nobody_from_going_back(world: World, switch: Switch) -> None:
    driver = start(world, settings(world.root))
    go_on(driver, world, 0, 3)
    end(driver)
    catalog, by_epoch = snapshots(world)
    catalog.root.put(PUBLISHED_FILE, b"half a docum")
    plan = plan_rollback(catalog, f"@{by_epoch[2].snapshot_id}", takeover=True)
    execute_rollback(catalog, plan, Actor(FakeClock(), world.ids, "h", 1))
    assert newest(world).undelivered == (("out", 4, 4),), "what is not known counts as not published"


def test_whatever_ends_runs_whose_sink_comes_and_goes_each_batch_is_published_once(
    tmp_path: Path,
    playing: Callable[[World], None],  # noqa: F811
    switch: Switch,
) -> None:
    """Kills at any passage of the driver's kill points, with a sink that is away for a drawn part of each run. The passages
    of a sink's own thread are not counted: a seed would not say which they are."""
    ends: Counter[str] = Counter()
    for seed, draw in seeds(12):
        batches = [[f"k{draw.randrange(9)}" for _ in range(draw.randrange(1, 9))] for _ in range(draw.randrange(4, 10))]
        world = InOneThread(tmp_path / str(seed), draw, batches)
        playing(world)
        for _ in range(draw.randrange(1, 4)):
            world.passed, world.dead, world.dies_at = 0, False, draw.randrange(1, 160)
            driver = None
            switch.is_away = False
            try:
                driver = start(world, settings(world.root, batches=draw.choice([1, 1, 2, 3])))
                source = driver._committer.last.source
                for number in range(source.batch_id + 1 if source is not None else 0, len(batches)):
                    switch.is_away = draw.random() < 0.6
                    go_on(driver, world, number, number + 1)
                switch.is_away = False
                end(driver)
                ends["finished"] += 1
            except Killed:
                ends["killed"] += 1
            if driver is not None:
                ends["waited"] += bool(driver.sinks_away())
                driver._line.checkpointer.waiting.close(WAIT_S)
        world.dies_at, world.dead, switch.is_away = 0, False, False
        run(world, settings(world.root))
        check(world, seed)
    assert min(ends["finished"], ends["killed"], ends["waited"]) > 0, f"a law without cases: {ends}"
