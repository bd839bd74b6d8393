"""A materialization, its driver and a garbage collector, interleaved at every request to the store; seeded, replayable.

The race of FLINK-28440: what a snapshot under construction is made of is deleted between its being read and its being named. Here
nobody waits for anybody: pins, records and the order of the steps must be enough.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from model import ALL_HASHES, OPERATOR, SCHEMA, STATE, CountingIds, DictStore, FakeClock, StateWriter, rows_of, seeds

from state_runtime.base.errors import CorruptData, MissingSnapshot
from state_runtime.base.settings import JobSettings, MaterializationSettings
from state_runtime.materialize import MaterializationSizes, Protected, Record, apply, fits, log, materialize, protected
from state_runtime.materialize.background import adoptable
from state_runtime.materialize.records import holds, open_pins
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import manifest_path
from tests.stored import read_states

pytestmark = pytest.mark.usefixtures("one_reader")
KEPT = 2  # snapshots
SEEDS = 4
SIZES = MaterializationSizes(table_bytes=1_500, small_bytes=0)


@pytest.fixture
def one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time, so that a seed gives one schedule."""
    monkeypatch.setattr(log, "_READERS", 1)


class HookedStore(DictStore):
    """Calls somebody before each request."""

    hook: Callable[[], None] | None = None

    def _at(self, path: str) -> str:
        if self.hook is not None:
            self.hook()
        return super()._at(path)


class Killed(BaseException):
    """The process of a materialization dies."""


class World:
    """A driver that commits and adopts, a collector in two passes, and a materialization that they interrupt anywhere."""

    def __init__(self, rng: random.Random, guard: Callable[[Any, int], Protected]) -> None:
        self.rng = rng
        self.guard = guard
        self.objects: dict[str, bytes] = {}
        self.driver = StateWriter(root=DictStore(self.objects), parallelism=2)
        self.clock = FakeClock()
        self.expected: dict[Any, Any] = {}
        self.marked: tuple[list[str], list[int]] | None = None
        self.refused: set[int] = set()
        self.own: Record | None = None
        self.adopted = self.deleted = 0

    def commit(self) -> None:
        """One checkpoint. It adopts what the driver folded itself, or what it finds."""
        root, manifest = self.driver.root, self.driver.manifest
        record = self.own if self.own is not None and fits(manifest, self.own) else None
        if record is None and self.rng.random() < 0.5:
            record = adoptable(root, manifest, self.clock, refused=self.refused)
        if record is not None:
            self.driver.manifest = apply(manifest, record)
        changed = {
            (str(self.rng.randrange(60)), 0.0): (self.rng.randrange(9), "x") if self.rng.random() < 0.8 else None
            for _ in range(8)
        }
        manifest = self.driver.epoch(changed)
        root.put(manifest_path(manifest.snapshot_id), manifest.encode())
        if record is not None and holds(manifest, record):
            self.own = None
            self.adopted += 1
        self.expected |= changed
        self.check()

    def manifests(self) -> dict[int, Manifest]:
        names = [int(name) for name in self.driver.root.list_names("snapshots")]
        return {
            n: Manifest.decode(self.driver.root.read(manifest_path(n), 1 << 20), "m")
            for n in names
            if self.driver.root.exists(manifest_path(n))
        }

    def mark(self) -> None:
        """First pass: everything that the newest snapshots do not name."""
        manifests = self.manifests()
        kept = sorted(manifests)[-KEPT:]
        needed = {path for n in kept for path in files_of(self.driver.root, manifests[n])}
        stored = [p for p in self.objects if p.startswith(("tables/", "changelog/"))]
        self.marked = ([p for p in stored if p not in needed], [n for n in manifests if n not in kept])

    def sweep(self) -> None:
        """Second pass: what materializations need stays."""
        if self.marked is None:
            return
        (paths, snapshots), self.marked = self.marked, None
        guard = self.guard(self.driver.root, self.clock.now_ms())
        manifests = self.manifests()
        pinned = {p for n in guard.snapshots if n in manifests for p in files_of(self.driver.root, manifests[n])}
        for n in snapshots:
            if n not in guard.snapshots:
                self.driver.root.delete(manifest_path(n))
        for path in paths:
            if path not in pinned and not guard.keeps(path):
                self.driver.root.delete(path)
                self.deleted += 1

    def interrupt(self) -> None:
        """What the others do between two requests of the materialization."""
        draw = self.rng.random()
        if draw < 0.12:
            self.commit()
        elif draw < 0.24:
            self.mark()
        elif draw < 0.36:
            self.sweep()
        elif draw < 0.364:
            raise Killed

    def materialization(self, *, adopts_itself: bool) -> None:
        """One, of the newest snapshot; in the driver's process its record is adopted without being looked for."""
        store = HookedStore(self.objects)
        manifest = self.driver.manifest
        store.hook = self.interrupt
        settings = JobSettings(materialization=MaterializationSettings(ratio=self.rng.choice([0.01, 0.5, 50])))
        ids = CountingIds(prefix=self.rng.randrange(1 << 40, 1 << 41))
        try:
            record = materialize(store, manifest, settings=settings, clock=self.clock, ids=ids, sizes=SIZES)
        except (Killed, MissingSnapshot, CorruptData):
            return  # died, or came too late: only the materialization failed
        if adopts_itself:
            self.own = record

    def check(self) -> None:
        """Invariants 1, 2 and 4: complete, the right state, nothing live deleted."""
        manifests = self.manifests()
        for n in sorted(manifests)[-KEPT:]:
            for path in files_of(self.driver.root, manifests[n]):
                assert path in self.objects, f"snapshot {n} names {path}, which was deleted"
        live = {key: value for key, value in self.expected.items() if value is not None}
        stored = read_states(self.driver.root, self.driver.manifest, OPERATOR, {STATE: SCHEMA}, *ALL_HASHES)[STATE]
        assert rows_of(stored) == live


def files_of(root: Any, manifest: Manifest) -> set[str]:
    """All that a snapshot needs besides its manifest; segments have no objects of their own here."""
    return {s.path for s in manifest.segments} | {t.path for layer in manifest.layers for t in layer.tables}


def play(seed: int, rng: random.Random, guard: Callable[[Any, int], Protected]) -> World:
    world = World(rng, guard)
    try:
        for _ in range(3):
            world.commit()
        for _ in range(3):
            world.materialization(adopts_itself=rng.random() < 0.5)
            world.clock.advance_s(1)
            if rng.random() < 0.5:
                world.mark()
                world.sweep()
            world.commit()
            world.mark()
            world.sweep()
    except AssertionError as error:
        raise AssertionError(f"STILLSTATE_TEST_SEED={seed}: {error}") from error
    return world


def test_no_interleaving_of_driver_materialization_and_collector_loses_a_file() -> None:
    adopted = deleted = 0
    for seed, rng in seeds(SEEDS):
        world = play(seed, rng, protected)
        adopted += world.adopted
        deleted += world.deleted
    assert adopted > SEEDS, "most of what is folded comes into a manifest"
    assert deleted > SEEDS, "and the collector has something to do"


Guard = Callable[[Any, int], Protected]


def without(*fields: str) -> Guard:
    """A collector that forgets a part of what it must keep."""

    def guard(root: Any, now_ms: int) -> Protected:
        return replace(protected(root, now_ms), **dict.fromkeys(fields, frozenset()))

    return guard


def directed(guard: Guard, *, commits: int, during: bool) -> World:
    """One materialization, collected at every request (or right after it), adopted by its own driver, and a last check."""
    world = World(random.Random(5), guard)
    for _ in range(3):
        world.commit()
    left = [commits]

    def collect() -> None:
        if not open_pins(world.driver.root) and world.own is None:
            return  # before the pin nobody can know of the fold; it finds its snapshot gone, and that is all
        while left[0]:
            left[0] -= 1
            world.commit()
        world.mark()
        world.sweep()

    world.interrupt = collect if during else lambda: None  # type: ignore[method-assign]
    world.materialization(adopts_itself=True)
    collect()
    world.commit()
    return world


@pytest.mark.parametrize(("commits", "during"), [(0, True), (4, True), (0, False)])
def test_the_worst_moments_are_harmless(commits: int, during: bool) -> None:
    assert directed(protected, commits=commits, during=during).adopted == 1


def test_without_its_writers_the_tables_of_an_unfinished_fold_are_lost() -> None:
    with pytest.raises(AssertionError, match="which was deleted"):
        directed(without("writers"), commits=0, during=True)


def test_without_its_paths_the_tables_of_a_record_are_lost_before_it_is_adopted() -> None:
    with pytest.raises(AssertionError, match="which was deleted"):
        directed(without("paths"), commits=0, during=False)


def test_without_the_pinned_snapshot_a_fold_fails_for_nothing() -> None:
    """Its files go while they are read; that costs the materialization, not the job."""
    assert directed(without("snapshots"), commits=4, during=True).adopted == 0
