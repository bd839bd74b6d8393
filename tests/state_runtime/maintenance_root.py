"""A job root with real snapshots, without Spark, on any store; and what must hold of it whatever was deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fake_fs import FakeFs
from model import ALL_HASHES, OPERATOR, SCHEMA, STATE, CountingIds, FakeClock, StateWriter, empty_manifest, rows_of

from state_runtime.base.actor import Actor
from state_runtime.materialize import apply, materialize
from state_runtime.reading.references import references
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.snapshot.fencing import open_job_root, open_run
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.term_files import RunStatus, write_status
from state_runtime.store import FsspecStore, Store
from tests.stored import read_states

JOB = "job"
DAY_S = 86_400


class Killed(BaseException):
    """The process is gone."""


class TimedFs(FakeFs):
    """A file system whose listings say when an object was written, by a clock of its own; and that can be cut off."""

    def __init__(self, objects: dict[str, bytes], times: dict[str, int], clock: FakeClock) -> None:
        super().__init__(objects)
        self.times = times
        self.clock = clock
        self.storage_options: dict[str, Any] = {}

    def pipe_file(self, path: str, body: bytes, mode: str = "overwrite") -> None:
        super().pipe_file(path, body, mode)
        self.times[path] = self.clock.now_ms()

    def cp_file(self, source: str, target: str) -> None:
        super().cp_file(source, target)
        self.times[target] = self.clock.now_ms()

    def ls(self, path: str, detail: bool = False) -> list[Any]:
        names = super().ls(path)
        if not detail:
            return names
        return [
            {
                "name": name,
                "type": "file" if name in self.objects else "directory",
                "size": len(self.objects.get(name, b"")),
                "LastModified": datetime.fromtimestamp(self.times.get(name, 0) / 1000, UTC),
            }
            for name in names
        ]


@dataclass
class FakeWorld:
    """One store that several processes reach, each through a connection of its own."""

    clock: FakeClock = field(default_factory=FakeClock)
    objects: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def connect(
        self, before: Callable[[str, str], None] | None = None, after: Callable[[str, str], None] | None = None
    ) -> FsspecStore:
        fs = TimedFs(self.objects, self.times, self.clock)
        fs.before = before or fs.before
        fs.after = after or fs.after
        return FsspecStore(fs, "/store", "fake://store", retry_wait_max_s=0.0)

    def root(self, **hooks: Any) -> Store:
        return self.connect(**hooks).child(JOB)

    def names(self) -> set[str]:
        """Everything below the job root."""
        return {name.removeprefix(f"/store/{JOB}/") for name in self.objects}

    def copy(self) -> FakeWorld:
        return FakeWorld(FakeClock(self.clock.at_ms), dict(self.objects), dict(self.times))


class Job:
    """A job that commits real segments: every checkpoint changes something, and its rows are remembered."""

    def __init__(
        self,
        store: Store,
        clock: FakeClock | None = None,
        *,
        inline_bytes_max: int = 1 << 20,
        prefix: int = 5,
        name: str = JOB,
    ) -> None:
        self.store = store
        self.name = name
        self.clock = clock or FakeClock()
        self.ids = CountingIds(prefix=prefix)
        self.inline_bytes_max = inline_bytes_max
        self.rows: dict[int, dict[Any, Any]] = {}
        self.count = 0
        self.start()

    @property
    def root(self) -> Store:
        return self.catalog.root

    def start(self) -> Committer:
        """A new run."""
        self.catalog = Catalog(self.store, self.name, self.clock)
        info = open_job_root(self.catalog.root, self.name, clock=self.clock, ids=self.ids)
        self.committer = open_run(
            self.catalog, info, empty_manifest(info.uid), actor=Actor(self.clock, self.ids, "h", 1)
        )
        self.writer = StateWriter(
            self.catalog.root,
            parallelism=2,
            inline_bytes_max=self.inline_bytes_max,
            ids=self.ids,
            manifest=self.committer.last,
        )
        before = max(self.rows, default=0)
        self.rows[self.committer.last.snapshot_id] = dict(self.rows.get(before, {}))
        return self.committer

    def beat(self, state: str = "running") -> None:
        """The run says that it lives, or how it ended."""
        term = self.committer.term
        now_ms = self.clock.now_ms()
        write_status(
            self.root,
            RunStatus(term.term, term.run_uid, state, now_ms, term.started_at_ms, 2.0, 1, "elsewhere"),  # type: ignore[arg-type]
        )

    def checkpoint(self, seconds: float = 10.0) -> Manifest:
        """One epoch and its checkpoint."""
        self.clock.advance_s(seconds / 2)
        self.count += 1
        key, value = (f"k{self.count % 4}", 0.0), (self.count, "x")
        self.writer.manifest = self.committer.last
        draft = self.writer.epoch({key: value})
        self.clock.advance_s(seconds / 2)
        return self._commit(draft, {**self.rows[self.committer.last.snapshot_id], key: value})

    def _commit(self, draft: Manifest, rows: dict[Any, Any]) -> Manifest:
        committed = self.committer.commit(replace(draft, kind="checkpoint"))
        self.rows[committed.snapshot_id] = rows
        return committed

    def fold(self, mode: Any = "major") -> Manifest:
        """A materialization, and the checkpoint that adopts it."""
        last = self.committer.last
        record = materialize(self.root, last, mode, clock=self.clock, ids=self.ids)
        return self._commit(apply(last, record), dict(self.rows[last.snapshot_id]))

    def ended(self) -> Job:
        """Its run has stopped."""
        self.beat("stopped")
        return self

    def checkpoints(self, count: int) -> Job:
        for _ in range(count):
            self.checkpoint()
        return self

    # --- laws ---

    def check(self, root: Store | None = None, *, rows: bool = True) -> list[int]:
        """Every snapshot is complete and has its rows; and the newest is there. Returns the ids."""
        root = root or self.root
        catalog = Catalog.of_root(root, self.clock)
        ids = catalog.snapshot_ids()
        for snapshot_id in ids:
            manifest = catalog.manifest(snapshot_id)
            for ref in references(root, manifest):
                size = root.size(ref.path)
                assert ref.kind == "manifest" or ref.bytes in (-1, size), ref.path
            if rows and manifest.operators:
                state = read_states(root, manifest, OPERATOR, {STATE: SCHEMA}, *ALL_HASHES)[STATE]
                assert rows_of(state) == self.rows[snapshot_id], snapshot_id
        assert self.committer.last.snapshot_id in ids
        return ids


class Interrupt:
    """Counts requests, and does something before one of them; everything after it sees what it did."""

    def __init__(self, at: int = -1, do: Callable[[], None] | None = None) -> None:
        self.at = at
        self.do = do
        self.count = 0

    def __call__(self, operation: str, path: str) -> None:
        self.count += 1
        if self.count == self.at and self.do is not None:
            self.do()


class Death:
    """Dies before the n-th request, and stays dead."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def __call__(self, operation: str, path: str) -> None:
        self.count += 1
        if self.count >= self.at:
            raise Killed


def dies_at_first_delete(operation: str, path: str) -> None:
    """Gives up and removes nothing."""
    if operation == "delete":
        raise Killed


@contextmanager
def dying() -> Iterator[None]:
    """The process may be killed in here; we live on."""
    try:
        yield
    except Killed:
        return
