"""A seeded scheduler of store calls: drivers, zombies and a collector, one call at a time, and the laws they must keep.

Every actor runs the real commit protocol in a thread of its own, but only one of them runs at any moment: each waits
for its turn before every store call. Who goes next, who falls asleep for how long, who is killed, and which answers get
lost is drawn from one seed, so a run is repeated exactly by its seed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from fake_fs import FakeFs
from model import CountingIds, FakeClock, empty_manifest

from state_runtime.base import actor as acting
from state_runtime.base.errors import Fenced, OutcomeUnknown, StillstateError
from state_runtime.snapshot import commit, fencing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import decode_document
from state_runtime.snapshot.expiry_boundary import ExpiryBoundary, advance_boundary
from state_runtime.snapshot.manifest import Manifest, SegmentEntry
from state_runtime.snapshot.paths import BOUNDARY_DIR, SNAPSHOTS_DIR, manifest_path, snapshot_id_of
from state_runtime.store import FsspecStore, fsspec_store

JOB = "job"
STEPS_MAX = 5000


class Killed(BaseException):
    """The actor's process is gone, between two calls or with an answer on its way."""


@dataclass
class Plan:
    """How hostile a run is."""

    drivers: int = 3
    commits: int = 4
    collector: bool = True
    sleep_chance: float = 0.06
    lost_request_chance: float = 0.02
    lost_answer_chance: float = 0.04
    kill_chance: float = 0.004
    honours_create: bool = True
    same_ids: bool = False


@dataclass
class Actor:
    """A thread that waits for its turn."""

    name: str
    body: Callable[[Actor], None]
    go: Any = field(default_factory=threading.Lock)
    asleep_until: int = 0
    done: bool = False
    killed: bool = False
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.go.acquire()


@dataclass
class Scheduler:
    """One run of one seed."""

    seed: int
    plan: Plan
    objects: dict[str, bytes] = field(default_factory=dict)
    acknowledged: list[Manifest] = field(default_factory=list)
    opened: list[tuple[int, Manifest]] = field(default_factory=list)  # term, and what its run started from
    collected_before: dict[str, int] = field(default_factory=dict)  # commit id → boundary when it was created
    fenced: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.back = threading.Lock()
        self.back.acquire()
        self.clock = FakeClock()
        self.actors: list[Actor] = []

    # --- turns ---

    def turn(self, actor: Actor) -> None:
        """Give the baton back and wait for the next turn."""
        self.back.release()
        actor.go.acquire()

    def _run_actor(self, actor: Actor) -> None:
        actor.go.acquire()
        try:
            actor.body(actor)
        except (Killed, Fenced, OutcomeUnknown):
            pass
        except BaseException as error:
            actor.failure = error
        actor.done = True
        self.back.release()

    def run(self) -> Scheduler:
        """Let the actors go until all have ended, then check the laws."""
        for number in range(self.plan.drivers):
            late = self.rng.randrange(60) * number
            self.actors.append(Actor(f"driver {number}", self._driver(number), asleep_until=late))
        if self.plan.collector:
            self.actors.append(Actor("collector", self._collect))
        threads = [threading.Thread(target=self._run_actor, args=(actor,), daemon=True) for actor in self.actors]
        for thread in threads:
            thread.start()
        while True:
            drivers_left = [a for a in self.actors if not a.done and a.name != "collector"]
            if not drivers_left:
                break
            ready = [a for a in self.actors if not a.done and a.asleep_until <= self.step]
            if not ready:
                self.step = min(a.asleep_until for a in self.actors if not a.done)
                continue
            actor = self.rng.choice(ready)
            if self.rng.random() < self.plan.sleep_chance:
                actor.asleep_until = self.step + self.rng.choice([5, 30, 200])
                continue
            self.step += 1
            if self.step > STEPS_MAX:
                self.violations.append(f"no end after {STEPS_MAX} steps")
                break
            actor.go.release()
            self.back.acquire()
        for actor in self.actors:
            while not actor.done:
                actor.killed = True
                actor.go.release()
                self.back.acquire()
        for thread in threads:
            thread.join()
        self._check()
        return self

    # --- actors ---

    def _root_of(self, actor: Actor) -> FsspecStore:
        fs = FakeFs(self.objects, honours_create=self.plan.honours_create)

        def before(operation: str, path: str) -> None:
            self.turn(actor)
            if actor.killed or self._dies(actor):
                raise Killed
            if operation == "create" and self.rng.random() < self.plan.lost_request_chance:
                raise ConnectionResetError("the request was lost")

        def after(operation: str, path: str) -> None:
            if operation == "create" and path.endswith("/manifest.json"):
                self._created(self.objects[path])
            if operation != "create" or actor.name == "collector":
                return
            if self._dies(actor):
                raise Killed
            if self.rng.random() < self.plan.lost_answer_chance:
                raise TimeoutError("the answer was lost")

        fs.before, fs.after = before, after
        return FsspecStore(fs, "/store", "fake://store", retry_wait_max_s=0.0)

    def _dies(self, actor: Actor) -> bool:
        return actor.name != "collector" and self.rng.random() < self.plan.kill_chance

    def _created(self, body: bytes) -> None:
        manifest = Manifest.decode(body, "created")
        folder = f"/store/{JOB}/{BOUNDARY_DIR}/"
        at = max((path for path in self.objects if path.startswith(f"{folder}0")), default=None)
        boundary = (
            decode_document("boundary", ExpiryBoundary, self.objects[at], at).snapshot_id if at is not None else 0
        )
        self.collected_before[manifest.commit_id] = boundary

    def _driver(self, number: int) -> Callable[[Actor], None]:
        def body(actor: Actor) -> None:
            ids = CountingIds(0 if self.plan.same_ids else number + 1)
            catalog = Catalog(self._root_of(actor), JOB, self.clock)
            info = fencing.open_job_root(catalog.root, JOB, clock=self.clock, ids=ids)
            committer: commit.Committer | None = None
            try:
                committer = fencing.open_run(
                    catalog, info, empty_manifest(info.uid), actor=acting.Actor(self.clock, ids, "h", 1)
                )
                self.opened.append((committer.term.term, committer.last))
                for _ in range(self.plan.commits):
                    last = committer.last
                    segment = SegmentEntry(f"changelog/{number}/{ids.uid()}", 1, "", 1, last.snapshot_id + 1, 1)
                    catalog.root.put(segment.path, b"s")
                    draft = replace(last, kind="checkpoint", segments=(*last.segments, segment))
                    self.acknowledged.append(committer.commit(draft))
            except Fenced as error:
                self.fenced.append(f"{actor.name}: {error}")
                if committer is not None:
                    self._stays_fenced(committer)
                raise

        return body

    def _stays_fenced(self, committer: commit.Committer) -> None:
        try:
            committer.commit(committer.last)
        except Fenced:
            return
        self.violations.append("a committer that was fenced committed once more")

    def _collect(self, actor: Actor) -> None:
        root = self._root_of(actor).child(JOB)
        catalog = Catalog(self._root_of(actor), JOB, self.clock)
        while True:
            ids = [i for i in map(snapshot_id_of, root.list_names(SNAPSHOTS_DIR)) if i is not None]
            newest = catalog.latest()
            if newest is None or not [i for i in ids if i < newest.snapshot_id]:
                continue
            doomed = [i for i in ids if i < newest.snapshot_id]
            # The boundary first, then the deletions: so a writer sees the boundary, or the collector its manifest.
            last = doomed[-1]
            advance_boundary(
                root,
                lambda now, last=last: replace(now, snapshot_id=last, kept=()) if last > now.snapshot_id else None,  # type: ignore[misc]
                clock=self.clock,
                ids=CountingIds(1_000),
            )
            for snapshot_id in doomed:
                root.delete(manifest_path(snapshot_id))

    # --- laws ---

    def _check(self) -> None:
        for actor in self.actors:
            if actor.failure is not None:
                self.violations.append(f"{actor.name} ended with {type(actor.failure).__name__}: {actor.failure}")
        known = [*(m for term, m in self.opened if m.term == term), *self.acknowledged]
        by_id: dict[int, Manifest] = {}
        for manifest in known:
            other = by_id.setdefault(manifest.snapshot_id, manifest)
            if other is not manifest:
                self.violations.append(f"two runs were told that snapshot {manifest.snapshot_id} is theirs")
            if self.collected_before.get(manifest.commit_id, 0) >= manifest.snapshot_id:
                self.violations.append(f"snapshot {manifest.snapshot_id} was acknowledged although it was collected")
        for manifest in self.acknowledged:
            for term, start in self.opened:
                if term > manifest.term and start.snapshot_id < manifest.snapshot_id:
                    self.violations.append(
                        f"term {manifest.term} got snapshot {manifest.snapshot_id} after term {term} took over"
                    )
        terms = [term for term, _ in self.opened]
        if len(set(terms)) < len(terms):
            self.violations.append("two runs hold one term")
        chain = [by_id[snapshot_id] for snapshot_id in sorted(by_id)]
        for before, later in itertools.pairwise(chain):
            if later.segments[: len(before.segments)] != before.segments:
                self.violations.append(f"snapshot {later.snapshot_id} lacks content of {before.snapshot_id}")
        self._check_store(chain)

    def _check_store(self, chain: list[Manifest]) -> None:
        """What a run that starts now would find."""
        try:
            latest = Catalog(FsspecStore(FakeFs(self.objects), "/store", "fake://store"), JOB, self.clock).latest()
        except StillstateError as error:
            self.violations.append(f"the store cannot be read: {error}")
            return
        if chain and (latest is None or latest.segments[: len(chain[-1].segments)] != chain[-1].segments):
            self.violations.append("the newest snapshot lacks acknowledged content")


class _NoLock(contextlib.nullcontext[None]):
    """FsspecStore's lock makes fsspec's memory file system atomic; the scheduler lets one call run at a time anyway."""


class InPlace:
    """In place of a pool of threads."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Replace the lock that would be held while an actor waits for its turn, and the threads that have no turn."""
    kept, pool = fsspec_store._MEMORY_LOCK, commit.ThreadPoolExecutor
    commit.ThreadPoolExecutor = InPlace  # type: ignore[misc,assignment]
    fsspec_store._MEMORY_LOCK = _NoLock()  # type: ignore[assignment]
    try:
        yield
    finally:
        fsspec_store._MEMORY_LOCK = kept
        commit.ThreadPoolExecutor = pool  # type: ignore[misc]


def run_seed(seed: int, plan: Plan | None = None) -> Scheduler:
    """Run one seed; the result holds what happened and which laws broke."""
    with one_at_a_time():
        return Scheduler(seed, plan or Plan()).run()
