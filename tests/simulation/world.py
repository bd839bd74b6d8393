"""One run of one seed: buckets, clocks, actors, laws. What may go wrong, and how often, is its plan."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import pytest
from model import CountingIds

from state_runtime.base.errors import CorruptData, Fenced, Invalid, JobRootMismatch, SnapshotInUse, Unavailable
from state_runtime.maintenance.copy import objects as copying
from state_runtime.maintenance.gc.collect import apply_gc, plan_gc
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.locate import OpenedSnapshot, open_snapshot
from state_runtime.snapshot.paths import JOB_FILE, manifest_path
from state_runtime.store import fsspec_store, port

from .formats import Format, PlainFormat, RealFormat
from .laws import Laws
from .stores import Bucket, Connection, Faults, QuickStore, StoreClock, WrongClock
from .threads import TurnThreads
from .turns import Actor, Turns, whoever_runs

Fate = Literal["none", "deleted", "restored"]
JOB, ROOT = "job", "/state/job"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True)
class Plan:
    """Who lives in a run, and how hostile it is.

    Attributes:
        drivers, commits: runs of the job, one after (or over) the other, and epochs of each.
        skew_ms, jump: how far clocks are off at most, and the chance per epoch that one jumps.
        store_jump_ms: how far the store's own clock goes back at most, now and then.
        pause_ms: how much time may pass between two epochs.
        floor_ms: age below which nothing is collected.
        real: the real formats.
        whole: drivers have all the threads that production has beside the epochs (runs.py).
        fate: what happens to the job's folder under its runs, with whole drivers.
    """

    drivers: int = 3
    commits: int = 5
    folders: int = 1
    collectors: int = 1
    retainers: int = 1
    readers: int = 1
    pinners: int = 1
    copiers: int = 1
    savers: int = 1
    children: int = 1
    movers: int = 0
    claims: bool = False
    switch: float = 0.3
    sleep: float = 0.03
    kill: float = 0.0005
    lost_request: float = 0.01
    lost_answer: float = 0.02
    torn_listing: float = 0.05
    honours_create: bool = True
    skew_ms: int = 0
    jump: float = 0.0
    pause_ms: int = 1_000
    store_jump_ms: int = 0
    floor_ms: int = 0
    same_ids: bool = False
    real: bool = False
    whole: bool = False
    fate: Fate = "none"

    @staticmethod
    def drawn(rng: random.Random, **given: Any) -> Plan:
        """A plan as a seed draws it: few actors in each run, so that those that are there meet often."""
        storm = rng.choice([0.0, 0.0, 0.01, 0.05])
        guests = rng.sample(["folders", "folders", "readers", "pinners", "copiers", "savers", "children", "movers"], 2)
        drawn: dict[str, Any] = {
            "drivers": rng.choice([1, 2, 2, 3]),
            "commits": rng.choice([4, 6, 9]),
            "collectors": rng.choice([0, 1, 1, 2]),
            "retainers": rng.choice([0, 1, 1, 2]),
            **{
                who: rng.choice([1, 1, 2]) if who in guests else 0
                for who in ("folders", "readers", "pinners", "copiers", "savers", "children", "movers")
            },
            "claims": rng.random() < 0.5,
            "switch": rng.choice([0.1, 0.3, 0.7]),
            "sleep": rng.choice([0.0, 0.02, 0.1]),
            "kill": rng.choice([0.0, 0.0, 0.0005, 0.003]),
            "lost_request": storm,
            "lost_answer": storm,
            "torn_listing": rng.choice([0.0, 0.1, 0.5]),
            "skew_ms": rng.choice([0, 0, HOUR_MS]),
            "jump": rng.choice([0.0, 0.0, 0.1]),
            "pause_ms": rng.choice([10, 1_000, 1_000, HOUR_MS, 6 * HOUR_MS]),
            "floor_ms": rng.choice([0, 0, 0, 1_000, DAY_MS]),
        }
        if drawn["claims"]:
            # A driver that was not heard of for minutes may be claimed from: it may be dead, or asleep.
            drawn["pause_ms"] = HOUR_MS
        # Drawn last: what a seed draws else is what it was before whole drivers were played.
        drawn["whole"] = rng.random() < 0.5
        if given.get("whole", drawn["whole"]):
            drawn |= _whole(rng, drawn)
        unknown = set(given) - {f.name for f in fields(Plan)}
        assert not unknown, unknown
        return Plan(**{**drawn, **given})


def _whole(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    """What is different where whole drivers play. Guests know nothing of a folder that is replaced under them: they stay away."""
    fate: Fate = rng.choice(["none", "deleted", "deleted", "restored", "restored"])
    changed: dict[str, Any] = {"fate": fate, "commits": rng.choice([6, 9, 14]), "sleep": rng.choice([0.02, 0.05, 0.1])}
    if fate != "none":
        guests = ("readers", "pinners", "copiers", "savers", "children", "movers", "collectors", "retainers")
        changed |= dict.fromkeys(guests, 0) | {"claims": False, "pause_ms": min(drawn["pause_ms"], HOUR_MS)}
    if fate == "restored":
        changed["folders"] = 0  # a command of people, who put the backup back themselves
    return changed


# What may end an actor without anything being wrong: it is fenced, the store failed, it came too late, what it asks for is in use.
EXPECTED = (Fenced, Unavailable, Invalid)


@dataclass
class World:
    """What all actors of a run share."""

    seed: int
    plan: Plan
    seen: Counter[str] = field(default_factory=Counter)
    given_up: dict[str, int] = field(default_factory=dict)
    collected: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        plan = self.plan
        self.turns = Turns(self.rng, switch=plan.switch, sleep=plan.sleep, kill=plan.kill, expected=EXPECTED)
        self.threading = TurnThreads(self.turns)
        self.clock = StoreClock()
        self.format: Format = RealFormat() if plan.real else PlainFormat()
        self.laws = Laws(self.turns, self.format.state_of)
        self.near, self.far = Bucket(self.clock, "near"), Bucket(self.clock, "far")
        self.laws.watch(self.near)
        self.laws.watch(self.far)
        self.faults = Faults(plan.lost_request, plan.lost_answer, plan.torn_listing, plan.honours_create)
        self.count = 0
        self.drivers_left = 0

    # --- what an actor gets ---

    def store(self, actor: Actor, path: str = "/state", bucket: Bucket | None = None) -> QuickStore:
        """An actor's own connection."""
        bucket = bucket or self.near
        connection = Connection(bucket, self.turns, actor, self.rng, self.faults)
        return QuickStore(connection, path, f"fake://{bucket.name}{path}", retry_wait_max_s=0.0)

    def root(self, actor: Actor) -> QuickStore:
        """The job's root."""
        return self.store(actor, ROOT)

    def open_store(self, url: str, options: object = None) -> QuickStore:
        """What `state_runtime.store.open_store` is here: `fake://<bucket>/<path>`, for whoever asks."""
        name, _, path = url.removeprefix("fake://").partition("/")
        return self.store(whoever_runs(), f"/{path}", self.laws.buckets[name])

    def ids(self) -> CountingIds:
        self.count += 1
        return CountingIds(0 if self.plan.same_ids else self.count)

    def wrong_clock(self) -> WrongClock:
        skew = self.plan.skew_ms
        return WrongClock(self.clock, self.rng.randint(-skew, skew) if skew else 0)

    def time_passes(self, clock: WrongClock) -> None:
        """Between two things that an actor does."""
        self.clock.at_ms += self.rng.randint(1, self.plan.pause_ms)
        if self.plan.store_jump_ms and self.rng.random() < 0.1:
            self.clock.at_ms -= self.rng.randint(0, self.plan.store_jump_ms)
        if self.plan.jump and self.rng.random() < self.plan.jump:
            clock.off_ms += self.rng.choice([-1, 1]) * self.rng.choice([1_000, HOUR_MS])

    def add(
        self, name: str, body: Callable[[World, Actor], None], *, essential: bool, asleep: int = 0, weight: int = 1
    ) -> Actor:
        return self.turns.add(
            Actor(name, lambda actor: body(self, actor), essential, weight=weight, asleep_until=asleep)
        )

    def snapshot_to_use(self, actor: Actor, clock: Any, *, old: float = 0.5) -> OpenedSnapshot | None:
        """The newest snapshot, or one that somebody once saw in a list, as people do."""
        catalog = Catalog.of_root(self.root(actor), clock)
        ids = catalog.snapshot_ids()
        if not ids:
            return None
        snapshot_id = ids[-1] if self.rng.random() >= old else self.rng.choice(ids)
        seen = actor.memory.setdefault("seen", [])
        if seen and self.rng.random() < 0.2:
            snapshot_id = self.rng.choice(seen)
        seen.append(snapshot_id)
        return open_snapshot(catalog.root, snapshot_id, clock)

    def run(self) -> World:
        """To the end, and all laws once more."""
        with one_at_a_time(self):
            self.turns.run()
            for actor in self.turns.actors:
                if actor.failure is not None:
                    error = actor.failure
                    kind = "corrupt" if isinstance(error, CorruptData) else "failed"
                    self.laws.broken(f"{actor.name} {kind}: {type(error).__name__}: {error}")
            if self.turns.endless:
                self.laws.broken("no end")
            self._check_terms()
            self.laws.check_all()
            if not self.violations:
                self._clean_up()
        return self

    def _clean_up(self) -> None:
        """Two months later, when all is quiet, two collections find everything that nobody needs, and break nothing.

        Two: the first settles what was announced and takes off void pins, the second removes what they held.
        """
        root = self.laws.quiet_store(self.near, ROOT)
        self.clock.at_ms += 60 * DAY_MS
        clock, ids = self.clock, self.ids()
        state = self.laws.root(self.near, ROOT)
        if not state.live or not root.exists(JOB_FILE):
            return
        try:
            for _ in range(2):
                plan = plan_gc(root, clock=clock, min_age_s=0, unsafe_min_age=True)
                apply_gc(root, plan, clock=clock, ids=ids, owner="the end", threads=1)
        except SnapshotInUse:
            self.seen["left in the middle of a move"] += 1
            return  # which must end, or be taken back, before anything is collected
        except JobRootMismatch:
            self.seen["left by a sleeper of the job before"] += 1
            return  # and named: nothing is collected before somebody has removed it
        newest_ms = self.near.modified_ms[f"{ROOT}/{manifest_path(state.live[-1])}"]
        for folder in ("changelog", "tables", "files"):
            for found in root.list_objects(folder):
                held = any(state.shows(i) for i in state.needed_by.get(found.path, ()))
                if not held and found.modified_ms < newest_ms:
                    self.laws.broken(f"at the end nothing needs {found.path}, and it was not collected")
        self.laws.check_all()

    def _check_terms(self) -> None:
        """One run a term; whoever was taken over is told of no commit that came after it."""
        opened = self.laws.opened_runs
        terms = [(start.job_uid, term) for term, start in opened]
        if len(set(terms)) < len(terms):
            self.laws.broken("two runs hold one term")
        mine: dict[tuple[str, int], str] = {}
        for _, path, manifest, _ in self.laws.acknowledged:
            if path != ROOT:
                continue
            if mine.setdefault((manifest.job_uid, manifest.snapshot_id), manifest.commit_id) != manifest.commit_id:
                self.laws.broken(f"two runs were told that snapshot {manifest.snapshot_id} is theirs")
            for term, start in opened:
                same = start.job_uid == manifest.job_uid
                if same and term > manifest.term and start.snapshot_id < manifest.snapshot_id:
                    self.laws.broken(f"term {manifest.term} got {manifest.snapshot_id} after term {term} took over")

    @property
    def violations(self) -> list[str]:
        return self.laws.violations

    def fingerprint(self) -> tuple[Any, ...]:
        """What a replay must give again."""
        return (self.turns.step, tuple(self.seen.items()), self.near.objects, self.far.objects, tuple(self.violations))


class _NoLock(contextlib.nullcontext[None]):
    """FsspecStore's lock makes fsspec's memory file system atomic; here one call runs at a time anyway."""


class InPlace:
    """In place of a pool of threads, whose order no seed decides."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.map = map

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        return


class _Scratch:
    """In place of `tempfile`: one folder for the process; an object that passes through has a name of its own there."""

    folder: ClassVar[Any] = None

    class TemporaryDirectory:
        def __init__(self, **_: Any) -> None:
            if _Scratch.folder is None:
                _Scratch.folder = tempfile.TemporaryDirectory(prefix="simulation-")
            self.name = _Scratch.folder.name

        def cleanup(self) -> None:
            return


POOLS = (
    "state_runtime.snapshot.commit",
    "state_runtime.materialize.log",
    "state_runtime.maintenance.copy.objects",
    "state_runtime.maintenance.delete.snapshots",
)
THREADS = (
    "state_runtime.driver.heartbeat",
    "state_runtime.driver.savepoint_requests",
    "state_runtime.maintenance.gc.background",
    "state_runtime.maintenance.retention.background",
    "state_runtime.materialize.background",
)
OPENS_STORES = ("state_runtime.snapshot.locate", "state_runtime.driver.start_position")


@contextlib.contextmanager
def one_at_a_time(world: World) -> Iterator[None]:
    """Nothing but turns decides who goes on: no lock is held over a call, and no threads beside the actors' own."""
    log = logging.getLogger("state_runtime")
    level = log.level
    # What fails and is tried again is told in logs, thousands of times here.
    log.setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec_store, "_MEMORY_LOCK", _NoLock())
        for module in POOLS:
            patch.setattr(f"{module}.ThreadPoolExecutor", InPlace)
        for module in OPENS_STORES:
            patch.setattr(f"{module}.open_store", world.open_store)
        for module in THREADS:
            patch.setattr(f"{module}.threading", world.threading)
        patch.setattr("state_runtime.materialize.background.give_way", lambda: None)
        patch.setattr("state_runtime.maintenance.retention.background._ROUND_MIN", 2)
        # A driver collects again and again, by the run's own floor.
        patch.setattr("state_runtime.maintenance.gc.background.FIRST_AFTER_S", 0.0)
        patch.setattr("state_runtime.maintenance.gc.background.EVERY_S", 3.0)
        patch.setattr("state_runtime.maintenance.gc.background.AGAIN_AFTER_S", 3.0)
        patch.setattr("state_runtime.maintenance.gc.background._THREADS", 1)
        floor = {"min_age_s": world.plan.floor_ms / 1000, "unsafe_min_age": True}
        patch.setattr("state_runtime.maintenance.gc.background.plan_gc", functools.partial(plan_gc, **floor))
        # So that each deletion has a proof of its own: the gap is one request.
        patch.setattr("state_runtime.maintenance.retention.background._THREADS", 1)
        if not world.plan.real:
            patch.setattr("state_runtime.materialize.run.fold_snapshot", PlainFormat.fold_snapshot)
        patch.setattr(copying, "tempfile", _Scratch)
        patch.setattr(port, "SYSTEM_IDS", world.ids())
        try:
            yield
        finally:
            log.setLevel(level)
