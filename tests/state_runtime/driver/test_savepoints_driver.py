"""Savepoints of a running job, without Spark: the real driver, asked at any time, killed anywhere, with any settings."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_driver_schedule
from model import FakeClock, seeds
from test_driver_schedule import (
    WHOLE,
    Frame,
    Killed,
    World,
    check,
    operator,
    playing,
    rows_of_shard,
    some_settings,
    start,
)

from state_runtime import JobSettings
from state_runtime.base.errors import OutcomeUnknown, StoreUnavailable
from state_runtime.driver import savepoint_requests as savepoints
from state_runtime.driver.epochs import EpochDriver
from state_runtime.driver.savepoint_requests import Savepoints
from state_runtime.maintenance.copy import make_savepoint as savepoint_copy
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.aggregates import count
from state_runtime.processors.declared.windows import tumbling
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.control import (
    ControlRequest,
    new_requests,
    open_requests,
    read_answer,
    request_savepoint,
)
from state_runtime.snapshot.locate import open_snapshot
from state_runtime.snapshot.pins import read_pins
from state_runtime.snapshot.savepoint_record import (
    SavepointThen,
    create_savepoint,
    list_savepoints,
    read_savepoint,
    take_over,
)
from state_runtime.spark.columns import SEQUENCE_COLUMN
from state_runtime.store import Store, open_store
from tests.job_settings import job_settings
from tests.stored import read_source_log, read_states

__all__ = ["playing"]

TIME = pa.timestamp("us", "UTC")

THENS: tuple[SavepointThen, ...] = ("continue", "continue", "continue", "stop", "drain")


def root_of(world: World) -> Store:
    return open_store(str(world.root / "store")).child("job")


class Run:
    """A run's driver with its savepoints; their worker's turns are taken by hand."""

    def __init__(self, world: World, settings: JobSettings) -> None:
        self.world = world
        made: list[Savepoints] = []

        def savepoints(committer: Committer, root: Store) -> Savepoints:
            self.term = committer.term.term
            made.append(Savepoints(root, committer.info, self.term, clock=FakeClock(), ids=world.ids))
            return made[0]

        self.driver: EpochDriver = start(world, settings, savepoints)
        (self.savepoints,) = made
        self.root = root_of(world)
        self.seen: set[str] = set()
        self.savepoints.look_back()
        source = Catalog.of_root(self.root).latest()
        assert source is not None
        self.next = source.source.batch_id + 1 if source.source is not None else 0

    def ask(self, name: str, then: SavepointThen = "continue") -> ControlRequest:
        return request_savepoint(
            self.root, self.term, name, clock=FakeClock(), ids=self.world.ids, then=then, tags=("t",)
        )

    def beat(self) -> None:
        for name, request in new_requests(self.root, self.term, self.seen).items():
            assert request is not None
            self.savepoints.hear(request)
            self.seen.add(name)

    def batch(self) -> None:
        self.driver.run_batch(Frame(self.world.batches[self.next]), self.next)  # type: ignore[arg-type]
        self.next += 1

    def end(self) -> None:
        """As `JobRun` ends a run."""
        self.driver.stop()
        if self.savepoints.is_drain_asked:
            self.driver.drain(Frame([]))  # type: ignore[arg-type]
        self.driver.finish()
        while self.savepoints.do_one():
            pass
        self.savepoints.close("it stopped")


def whole_run(world: World, settings: JobSettings, *, asks: bool) -> None:
    run, draw = Run(world, settings), world.draw
    while run.next < len(world.batches) and not run.driver.is_ending:
        if asks and draw.random() < 0.4:
            name = draw.choice([f"s{world.ids.count}", f"s{world.ids.count}", "again"])
            run.ask(name, draw.choice(THENS))
        if draw.random() < 0.7:
            run.beat()
        if draw.random() < 0.5:
            run.driver.savepoint_if_asked()
        if not run.driver.is_ending:
            run.batch()
        if draw.random() < 0.5:
            run.savepoints.do_one()
    run.end()


def check_savepoints(world: World, seed: int, ends: Counter[str]) -> None:
    """Each is complete, or never began; its state is that of the batches that it names, and nothing holds a snapshot any more."""
    where = f"STILLSTATE_TEST_SEED={seed}"
    root = root_of(world)
    for record in list_savepoints(root):
        ends[record.state] += 1
        assert record.state in ("COMPLETED", "ABANDONED"), f"{where} {record}"
        if record.state == "ABANDONED":
            continue
        opened = open_snapshot(root.child(f"savepoints/{record.name}"))
        source = Catalog.of_root(root).manifest(record.snapshot_id)
        assert opened.manifest == replace(source, outputs=()), where
        ends["drained"] += opened.manifest.drained
        assert record.drained == opened.manifest.drained, where
        assert record.drained or record.then != "drain", where
        counts: Counter[str] = Counter()
        position = opened.manifest.source
        batches = world.batches[: position.batch_id + 1] if position is not None else []
        for batch in batches:
            counts.update(batch)
        if not opened.manifest.operators:
            assert not counts, where
            continue
        states = read_states(opened.root, opened.manifest, "counts", operator().state_schemas, *WHOLE)
        (state,) = states.values()
        assert state.num_rows == len(counts), where
        assert read_source_log(opened.root, opened.manifest, 0) == [f"line {n}" for n in range(len(batches))], where
    assert read_pins(root) == [], where
    assert open_requests(root, before_term=1 << 40) == [], where


def test_whatever_ends_a_run_its_savepoints_are_complete_or_void_and_the_job_is_exact(
    tmp_path: Path, playing: Callable[[World], None]
) -> None:
    """Asked before any batch and answered between any two, with any checkpoint interval, log or files; killed at any passage."""
    ends: Counter[str] = Counter()
    for seed, draw in seeds(25):
        batches = [
            [f"k{draw.randrange(12)}" for _ in range(draw.randrange(1, 20))] for _ in range(draw.randrange(4, 14))
        ]
        world = World(tmp_path / str(seed), draw, batches)
        playing(world)
        for _ in range(draw.randrange(1, 5)):
            world.passed, world.dead = 0, False
            world.dies_at = draw.randrange(1, 160) if draw.random() < 0.7 else 0
            try:
                whole_run(world, some_settings(world), asks=True)
                ends["ended"] += 1
            except Killed:
                ends["killed"] += 1
        world.dies_at, world.dead = 0, False
        whole_run(world, some_settings(world), asks=False)
        check(world, seed)
        check_savepoints(world, seed, ends)
    kinds = ("ended", "killed", "COMPLETED", "ABANDONED", "drained")
    assert all(ends[kind] > 0 for kind in kinds), f"a law without cases: {ends}"


def settings_of(tmp_path: Path, **changes: Any) -> JobSettings:
    given = {"parallelism": 1, "local_dir": str(tmp_path / "local"), "materialize": False, "placement": "off"}
    return job_settings(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path, playing: Callable[[World], None]) -> World:
    draw = random.Random(1)
    draw.random = lambda: 1.0  # type: ignore[method-assign]
    made = World(tmp_path, draw, [[f"k{n}", "k"] for n in range(6)])
    playing(made)
    return made


def snapshots(world: World) -> int:
    return len(Catalog.of_root(root_of(world)).snapshot_ids())


@pytest.mark.parametrize("changelog", ["on", "off"])
@pytest.mark.parametrize("idle", [True, False])
def test_a_savepoint_costs_the_stream_one_checkpoint_and_holds_what_was_pending(
    world: World, tmp_path: Path, changelog: str, idle: bool
) -> None:
    """With an interval that would not end for long: at once when the source is idle, else after the epoch under way."""
    run = Run(world, settings_of(tmp_path, checkpoint_batches=100, changelog=changelog))
    run.batch()
    run.batch()
    assert snapshots(world) == 1, "the fencing snapshot alone"
    request = run.ask("one")
    run.beat()
    assert read_savepoint(run.root, "one").state == "REQUESTED"
    if idle:
        run.driver.savepoint_if_asked()
    else:
        run.batch()
    assert snapshots(world) == 2
    run.savepoints.do_one()
    answer = read_answer(run.root, request)
    assert answer is not None
    assert (answer.answer, answer.snapshot_id) == ("accepted", 2)
    record = read_savepoint(run.root, "one")
    assert (record.state, record.snapshot_id, record.term, record.tags) == ("COMPLETED", 2, 1, ("t",))
    position = open_snapshot(run.root.child("savepoints/one")).manifest.source
    assert position is not None
    assert position.batch_id == (1 if idle else 2)
    while run.next < len(world.batches):
        run.batch()
    assert snapshots(world) == 2, "and the interval goes on as before"
    run.end()
    check(world, 0)


def test_nothing_pending_needs_no_checkpoint_and_several_requests_share_one(world: World, tmp_path: Path) -> None:
    run = Run(world, settings_of(tmp_path))
    run.batch()
    before = snapshots(world)
    for name in ("one", "two"):
        run.ask(name)
    run.beat()
    run.driver.savepoint_if_asked()
    while run.savepoints.do_one():
        pass
    assert snapshots(world) == before
    assert {r.snapshot_id for r in list_savepoints(run.root)} == {before}
    run.end()


def test_the_snapshot_is_pinned_before_the_next_epoch(world: World, tmp_path: Path) -> None:
    """While it is copied, the job goes on and retention may run."""
    run = Run(world, settings_of(tmp_path))
    run.ask("one")
    run.beat()
    run.batch()
    (pin,) = read_pins(run.root)
    assert (pin.snapshot_id, pin.reason, pin.holder) == (snapshots(world), "savepoint", "savepoint one")
    run.batch()
    run.savepoints.do_one()
    assert read_savepoint(run.root, "one").snapshot_id == pin.snapshot_id
    assert read_pins(run.root) == []


def test_no_epoch_follows_a_savepoint_that_the_job_stops_after(world: World, tmp_path: Path) -> None:
    """So whoever starts from it continues exactly where the job ended; and so does the job itself."""
    run = Run(world, settings_of(tmp_path, checkpoint_batches=100))
    run.batch()
    run.ask("one", "stop")
    run.beat()
    assert not run.driver.is_ending
    run.batch()
    assert run.driver.is_ending
    epochs = run.driver.epochs
    run.batch()
    assert run.driver.epochs == epochs
    run.end()
    newest = Catalog.of_root(run.root).latest()
    assert newest is not None
    assert replace(newest, outputs=()) == open_snapshot(run.root.child("savepoints/one")).manifest
    whole_run(world, settings_of(tmp_path), asks=False)
    check(world, 0)


def test_a_refused_request_to_stop_stops_nothing(world: World, tmp_path: Path) -> None:
    run = Run(world, settings_of(tmp_path))
    run.ask("one")
    run.beat()
    run.batch()
    refused = run.ask("one", "drain")
    run.beat()
    answer = read_answer(run.root, refused)
    assert answer is not None
    assert answer.answer == "refused"
    assert "'one' already" in answer.message
    assert not run.driver.is_ending
    run.batch()
    run.end()
    assert read_savepoint(run.root, "one").state == "COMPLETED"


def test_a_plain_savepoint_meanwhile_does_not_stand_for_that_of_the_drained_job(world: World, tmp_path: Path) -> None:
    """Both are asked for: one is of the state that the input goes on from, the other of its end."""
    run = Run(world, settings_of(tmp_path))
    run.batch()
    run.ask("end", "drain")
    run.ask("now")
    run.beat()
    run.driver.savepoint_if_asked()
    assert [r.name for r in list_savepoints(run.root) if r.state == "REQUESTED"] == ["end", "now"]
    run.savepoints.do_one()
    assert read_savepoint(run.root, "end").state == "REQUESTED"
    assert not read_savepoint(run.root, "now").drained
    run.end()
    assert read_savepoint(run.root, "end").drained


def test_a_drained_job_says_so_until_it_goes_on(world: World, tmp_path: Path) -> None:
    """The snapshot is refused as a start unless asked for; the first epoch after such a start clears the mark."""
    run = Run(world, settings_of(tmp_path, checkpoint_batches=100))
    run.batch()
    run.ask("one", "drain")
    run.beat()
    assert run.driver.is_ending
    run.batch()
    run.end()
    catalog = Catalog.of_root(run.root)
    newest = catalog.latest()
    assert newest is not None
    assert newest.drained
    assert newest.time is not None
    assert newest.time.watermark_ms == 0, "the watermark is still that of the input"
    assert read_savepoint(run.root, "one").drained
    again = Run(world, settings_of(tmp_path))
    fencing = catalog.latest()
    assert fencing is not None
    assert fencing.drained
    again.batch()
    newest = catalog.latest()
    assert newest is not None
    assert not newest.drained
    again.end()


def test_a_job_is_not_failed_by_a_savepoint_that_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the pin in the epoch's thread, nor by the copy beside it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("no")

    monkeypatch.setattr(savepoints, "pin_snapshot", refuse)
    monkeypatch.setattr(savepoint_copy, "copy_snapshot", refuse)
    run = Run(world, settings_of(tmp_path))
    run.savepoints._work = replace(run.savepoints._work, wait=lambda seconds: False)
    run.ask("one")
    run.beat()
    while run.next < len(world.batches):
        run.batch()
    run.end()
    check(world, 0)
    record = read_savepoint(run.root, "one")
    assert (record.state, record.message) == ("FAILED", "StoreUnavailable: no")


def test_a_name_whose_taking_is_not_confirmed_is_asked_for_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is there, the answer was lost: the next heartbeat must not refuse its own."""
    run = Run(world, settings_of(tmp_path))
    run.ask("one")
    with monkeypatch.context() as patch:

        def lost(root: Store, record: Any, prove: Callable[[], None]) -> None:
            create_savepoint(root, record, prove)
            raise OutcomeUnknown("no answer")

        patch.setattr(savepoints, "create_savepoint", lost)
        with pytest.raises(OutcomeUnknown):
            run.beat()
    run.beat()
    run.batch()
    run.end()
    assert read_savepoint(run.root, "one").state == "COMPLETED"


def test_what_a_run_was_asked_for_and_did_not_begin_is_void_when_it_ends(world: World, tmp_path: Path) -> None:
    run = Run(world, settings_of(tmp_path))
    run.batch()
    heard = run.ask("heard")
    run.beat()
    run.savepoints.close("it failed")
    answer = read_answer(run.root, heard)
    assert answer is not None
    assert answer.answer == "void"
    assert "it failed" in answer.message
    assert read_savepoint(run.root, "heard").state == "ABANDONED"
    unheard = run.ask("unheard")
    Run(world, settings_of(tmp_path))
    answer = read_answer(run.root, unheard)
    assert answer is not None
    assert answer.answer == "void"
    assert [r.name for r in list_savepoints(run.root)] == ["heard"]


def test_somebody_who_took_a_savepoint_over_from_a_live_run_keeps_it(world: World, tmp_path: Path) -> None:
    """The run notices and goes on with its stream."""
    run = Run(world, settings_of(tmp_path))
    run.ask("one")
    run.beat()
    run.batch()
    theirs = take_over(
        run.root, read_savepoint(run.root, "one"), "DELETING", owner="x:1", clock=FakeClock()
    )  # fmt: skip
    assert run.savepoints.do_one()
    assert read_savepoint(run.root, "one") == theirs
    run.batch()
    run.end()


def windowed() -> Any:
    """Counts per key and ten seconds, each put out once, when the watermark has passed its end."""
    return plan_windows(
        uid="counts",
        key_columns=("k",),
        key_ddl="`k` string",
        key_schema=pa.schema([("k", pa.string())]),
        schema=pa.schema([("k", pa.string()), ("at", TIME)]),
        time_column="at",
        window=tumbling("10 seconds"),
        aggregates={"n": count()},
        mode="append",
        ddl=lambda schema: ", ".join(f"`{field.name}` bigint" for field in schema),
    )


def timed_rows(items: list[str], shard: int, parallelism: int, *, woken: bool = False) -> pa.RecordBatch:
    """Rows written as `<key>:<second>`."""
    keys, seconds = zip(*(item.split(":") for item in items)) if items else ((), ())
    batch = rows_of_shard(keys, shard, parallelism, woken=woken)
    places = batch.column(SEQUENCE_COLUMN).to_pylist()
    micros = [int(seconds[place]) * 1_000_000 if place >= 0 else None for place in places]
    return batch.append_column("at", pa.array(micros, TIME))


@pytest.mark.parametrize("changes", [{}, {"checkpoint_batches": 100}, {"changelog": "off"}], ids=str)
def test_draining_puts_every_open_window_out_once(
    tmp_path: Path, playing: Callable[[World], None], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """No watermark ever came: nothing is out before, everything after, and nothing is left in the state."""
    draw = random.Random(1)
    draw.random = lambda: 1.0  # type: ignore[method-assign]
    items = [[f"k{n}:{7 * batch + n}" for n in range(6)] for batch in range(4)]
    world = World(tmp_path, draw, items)
    playing(world)
    monkeypatch.setattr(test_driver_schedule, "operator", windowed)
    monkeypatch.setattr(test_driver_schedule, "rows_of_shard", timed_rows)
    run = Run(world, settings_of(tmp_path, parallelism=3, **changes))
    for _ in items:
        run.batch()
    run.ask("end", "drain")
    run.beat()
    run.driver.savepoint_if_asked()
    files = tmp_path / "out"
    assert not list(files.glob("part-*.parquet"))
    run.end()
    rows = [row for file in files.glob("part-*.parquet") for row in pq.read_table(file).to_pylist()]
    found = Counter((row["k"], int(row["window"]["start"].timestamp()), row["n"]) for row in rows)
    counts = Counter((key, int(second) // 10 * 10) for batch in items for key, second in (i.split(":") for i in batch))
    assert found == Counter((key, start, n) for (key, start), n in counts.items())
    saved = open_snapshot(run.root.child("savepoints/end"))
    assert saved.manifest.drained
    states = read_states(saved.root, saved.manifest, "counts", windowed().state_schemas, *WHOLE)
    assert [state.num_rows for state in states.values()] == [0]
