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
from dataclasses import replace
from pathlib import Path
from typing import Any

import inflight_laws
import pytest
from inflight_chains import ALARMS, BALANCES, CHAINS, JOINS, ONCE, STEPS, Chain, Input
from inflight_laws import (
    Law,
    Life,
    drained_and_rescaled,
    epochs_end_anywhere,
    of_one_run,
    one_task_for_all_shards,
    some_settings,
    tasks_that_disagree,
    under,
)
from inflight_root import BATCHES, die_after, go_on, reads_of, rows_in_flight
from inflight_world import Frame, World, finish, results, start
from model import seeds

from state_runtime.base import faults
from state_runtime.base.errors import StillstateError, StoreUnavailable
from state_runtime.base.settings import (
    CheckpointSettings,
    JobSettings,
    LocalRecoverySettings,
    MaterializationSettings,
    RetentionSettings,
)
from state_runtime.changelog.segment import FOOTER_BYTES, decode_index
from state_runtime.driver.acknowledgements import Acknowledgements
from state_runtime.snapshot.catalog import Catalog
from state_runtime.store import open_store
from state_runtime.task.slicing import Slicer
from tests.job_settings import job_settings

Playing = Callable[[World], None]


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Playing:
    """Put a world under the driver, whose slices are small and whose deadlines are the seed's."""
    return lambda world: under(world, monkeypatch)


def played(law: Law, chain: Chain, folder: Path, count: int) -> Counter[str]:
    """So many lives; what they met, all together."""
    seen: Counter[str] = Counter()
    for seed, draw in seeds(count):
        with pytest.MonkeyPatch.context() as patch:
            seen += law(Life(f"STILLSTATE_TEST_SEED={seed}", folder / str(seed), draw, chain, patch))
    return seen


of_every_chain = pytest.mark.parametrize(
    ("chain", "count"),
    [(STEPS, 10), (ONCE, 6), (JOINS, 6), (ALARMS, 6), (BALANCES, 6)],
    ids=[c.name for c in CHAINS],
)


@of_every_chain
def test_wherever_epochs_end_readers_see_what_an_aligned_run_gives(tmp_path: Path, chain: Chain, count: int) -> None:
    """Rows, timers, windows that close, joins, late rows, at every operator; nothing lost, doubled or late that was not."""
    seen = played(epochs_end_anywhere, chain, tmp_path, count)
    assert seen["more epochs than batches"], "no epoch ended before its batch: the test proves nothing"


@of_every_chain
def test_kills_rescales_and_modes_with_rows_in_flight_lose_nothing(tmp_path: Path, chain: Chain, count: int) -> None:
    """Each run ends somewhere, with rows in flight or not; the next has another parallelism, mode, backend, changelog."""
    seen = played(drained_and_rescaled, chain, tmp_path, count)
    assert min(seen["killed"], seen["stopped"], seen["rescaled with rows in flight"]) > 0, (
        f"a law without cases: {seen}"
    )


@of_every_chain
def test_one_task_for_all_shards_gives_what_a_task_for_each_gives(tmp_path: Path, chain: Chain, count: int) -> None:
    """Output, state, late rows, whichever epochs are narrow, with rows in flight, kills and rescales too; and one that is
    refused in the middle has not happened."""
    seen = played(one_task_for_all_shards, chain, tmp_path, count)
    assert min(seen["narrow"], seen["refused"]) > 0, f"a law without cases: {seen}"


def test_what_became_due_again_waits_for_the_next_batch_in_shards_that_are_visited_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with another parallelism and without the changelog visits every shard, to make files of its state; timers that
    fired in the open batch, and set others that are due already, fired once more in it."""

    def drawn(world: World, mode: str = "") -> JobSettings:
        draw = world.draw
        return JobSettings(
            parallelism=draw.choice([1, 2, 3, 5]),
            local_dir=str(world.root / "local"),
            materialization=MaterializationSettings(by="nobody"),
            placement="off",
            runs_max=2,
            checkpoint=CheckpointSettings(
                batches=draw.choice([1, 1, 2, 5]),
                pending_bytes_max=draw.choice([0, 2_000, 1 << 24]),
                inline_bytes_max=draw.choice([0, 600, 1 << 18]),
                mode=mode or draw.choice(["unaligned", "unaligned", "aligned-with-timeout", "aligned"]),
                tolerable_failures=1_000,
            ),
            changelog=draw.choice(["on", "on", "on", "off"]),
            backend=draw.choice(["arrow"] * 5 + ["rocksdb"]),
            local_recovery=LocalRecoverySettings(enabled=draw.random() < 0.7),
        )

    monkeypatch.setattr(inflight_laws, "some_settings", drawn)
    one_task_for_all_shards(Life("seed 7", tmp_path, random.Random(7), STEPS, monkeypatch))


@pytest.mark.parametrize("chain", CHAINS, ids=[c.name for c in CHAINS])
def test_tasks_that_come_to_other_rows_when_spark_repeats_them_double_nothing(tmp_path: Path, chain: Chain) -> None:
    """An executor is lost after its task; the second attempt is slower or faster, and leaves other rows than those that the
    output of the first was made without. Such an epoch is run again."""
    seen = played(tasks_that_disagree, chain, tmp_path, 6)
    assert seen["disagreements"], "no two attempts disagreed: the test proves nothing"


@pytest.mark.parametrize("checkpoint_batches", [1, 2])
def test_initial_state_comes_once_and_first_though_its_batch_takes_many_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_batches: int
) -> None:
    """Killed after the first checkpoint, whose epochs left most of the rows in flight, and again after two rescales: keys of the
    initial state whose rows still wait have it, once; so have those that no row ever comes for, and the second operator's."""
    with monkeypatch.context() as patch:
        expected, _ = of_one_run(tmp_path / "aligned", [list(batch) for batch in BATCHES], BALANCES, patch)
    given = {"checkpoint_batches": checkpoint_batches}
    made = rows_in_flight(tmp_path / "killed", checkpoints=1, chain=BALANCES, **given)
    assert made.manifest.source is not None
    assert made.manifest.source.batch_id == 0, "the first batch is not the one that is open"
    for parallelism in (5, 2):
        die_after(made.world, job_settings(made.settings, parallelism=parallelism), 1)
        newest = made.catalog.latest()
        assert newest is not None
        assert newest.source == made.manifest.source, "the first batch was done before the run was killed again"
        assert newest.open_batch is not None
    go_on(made.world, made.settings)
    assert results(made.world) == expected


def test_an_operator_that_is_added_while_rows_are_in_flight_begins_with_its_initial_state(tmp_path: Path) -> None:
    """Its first epoch has no batch: the rows that it gets are those that waited above it."""
    before = replace(BALANCES, operators=lambda: BALANCES.operators()[:1])
    made = rows_in_flight(tmp_path, checkpoints=2, chain=before)
    made.world.chain = BALANCES
    die_after(made.world, job_settings(made.settings, parallelism=2), 2)
    go_on(made.world, made.settings)
    sums = results(made.world)["sums"]  # which looks at each row's initial state, and at that of each key
    assert sum(n for (_, what), n in sums.items() if what == "row")


@pytest.mark.parametrize(
    ("inline_bytes_max", "changelog", "backend"),
    [(1 << 18, "on", "arrow"), (0, "on", "arrow"), (0, "on", "rocksdb"), (0, "off", "arrow")],
)
def test_a_restart_in_place_reads_neither_state_nor_rows_in_flight_from_the_store(
    tmp_path: Path, inline_bytes_max: int, changelog: Any, backend: Any
) -> None:
    """The host has what the newest snapshot names, rows in flight too. What is read are documents, and of all segments the
    listing of what is in flight: an index, one range."""
    made = rows_in_flight(
        tmp_path, checkpoints=4, inline_bytes_max=inline_bytes_max, changelog=changelog, backend=backend
    )
    before, batch = len(made.world.epochs), made.manifest.open_batch
    assert batch is not None
    listing = next(s for s in batch.segments if s.path == batch.listing)
    with reads_of(made.root) as reads:
        die_after(made.world, made.settings, 3)
    data = [read for read in reads if read.startswith(("changelog/", "tables/"))]
    assert data == [f"{listing.path}@{listing.bytes - listing.index_bytes}"]
    epochs = made.world.epochs[before:]
    assert sum(e.local_restores for e in epochs) > 0
    assert not any(e.primary_restores or e.stale_restores or e.restored_bytes for e in epochs)
    assert sum(e.inflight.processed_rows for e in epochs if e.inflight is not None) > 0
    assert not any(e.inflight.read_bytes for e in epochs if e.inflight is not None)


def test_a_shard_that_did_not_change_since_a_flush_is_restored_from_it(
    tmp_path: Path, playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the changelog off: other shards changed since, so that the listing in memory is newer than the one on the store."""
    batches: list[list[Input]] = [[(f"k{n}", f"g{n % 4}", n, 10_000) for n in range(9)]]
    batches += [[(f"k{n}", f"g{n % 4}", n, 10_000)] for n in range(9)]
    expected, _ = of_one_run(tmp_path / "undisturbed", batches, STEPS, monkeypatch)
    world = World(tmp_path / "disturbed", random.Random(0), batches)
    playing(world)

    def lose_the_disk(world: World, _: Any) -> None:
        shutil.rmtree(world.root / "local" / "state", ignore_errors=True)

    monkeypatch.setattr(World, "note", lose_the_disk)
    settings = job_settings(
        some_settings(world, "aligned"), parallelism=5, changelog="off", backend="arrow", checkpoint_batches=100
    )
    finish(world, settings)
    assert results(world) == expected


def test_rows_that_are_given_up_are_said_and_nothing_else_is_lost(
    tmp_path: Path,
    playing: Playing,
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
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        checkpoint=CheckpointSettings(mode="unaligned"),
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


def test_rows_that_an_epoch_without_a_batch_leaves_fail_it(
    tmp_path: Path, playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an epoch has no deadline. Should a task stop all the same, no manifest would name what it left."""
    batches: list[list[Input]] = [[(f"k{n}", f"g{n}", n, 10_000) for n in range(40)], [("k", "g", 1, 30_000)]]
    world = World(tmp_path, random.Random(1), batches)
    playing(world)
    monkeypatch.setattr(Slicer, "_is_one_slice", lambda *_: False)
    monkeypatch.setattr(Slicer, "_is_over", lambda _: True)
    with pytest.raises(StillstateError, match="rows are left without a batch"):
        finish(world, job_settings(some_settings(world, "unaligned"), parallelism=1))


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
    tmp_path: Path, playing: Playing, monkeypatch: pytest.MonkeyPatch, where: str
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
        materialization=MaterializationSettings(by="dagster"),
        placement="off",
        checkpoint=CheckpointSettings(mode="unaligned", inline_bytes_max=0),
        retention=RetentionSettings(retained_checkpoints=1_000),
    )
    finish(world, settings)
    assert next(failures, None) is None, "it did not fail"
    assert len(world.epochs) > 3
    assert not unnamed(world)
