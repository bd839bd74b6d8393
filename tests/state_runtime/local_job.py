"""A job without Spark: driver and tasks of one operator, on several hosts, on a real store and real local disks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from memory_reader import MemoryReader
from model import KEY_DDL, OPERATOR, CountingIds, FakeClock, HashOf, empty_manifest, spread
from shapes import SHAPES, Change, batch_of_change, check_same
from test_state_layouts_stored import entry_of_shape

from state_runtime.base.settings import JobSettings
from state_runtime.processors.operator import EpochClock
from state_runtime.snapshot.document import FORMAT_VERSION
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, TimeEntry
from state_runtime.snapshot.paths import manifest_path
from state_runtime.snapshot.shard_versions import NO_VERSION, ShardVersions
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.reader import StateReader
from state_runtime.state.table import StateSchema, slice_hash_range
from state_runtime.store import open_store
from state_runtime.task.shard_access import RestoreNumbers, ShardAccess, TaskJob
from tests.stored import write_segment, write_task_changes

JOB = "job"


@dataclass
class FakeOperator:
    """What a task asks an operator for to reach its state."""

    state_schemas: Mapping[str, StateSchema]
    uid: str = OPERATOR

    def entry(self) -> OperatorEntry:
        return OperatorEntry(self.uid, "test", KEY_DDL, tuple(entry_of_shape(shape) for shape in self.state_schemas))


@dataclass
class LocalJob:
    """Epochs that commit, restarts, rescaling; and beside it the plain history of changes.

    Attributes:
        host_of: where a shard runs; every host has a disk of its own.
        numbers: of the newest epoch, per shard what bringing its state back took.
    """

    folder: Path
    shapes: tuple[str, ...] = ("value", "list", "map", "timers", "rows-due", "value-expires")
    parallelism: int = 2
    settings: JobSettings = field(default_factory=JobSettings)
    hash_of: HashOf = spread
    store_url: str = ""
    host_of: Callable[[int], str] = lambda shard: "host"
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.store_url = self.store_url or str(self.folder / "store")
        self.operator = FakeOperator({shape: SHAPES[shape] for shape in self.shapes})
        self.root = open_store(self.store_url).child(JOB)
        self.ids = CountingIds()
        self.history: dict[str, list[pa.RecordBatch]] = {shape: [] for shape in self.shapes}
        self.manifest = self._put(
            replace(empty_manifest(), format_version=FORMAT_VERSION, parallelism=self.parallelism, snapshot_id=1)
        )
        self.versions = [NO_VERSION] * self.parallelism
        self.trusted = [False] * self.parallelism
        self.numbers: dict[int, RestoreNumbers] = {}

    def _put(self, manifest: Manifest) -> Manifest:
        manifest = replace(manifest, commit_id=f"commit-{manifest.snapshot_id}")
        self.root.create(manifest_path(manifest.snapshot_id), manifest.encode())
        return manifest

    def local(self, host: str = "host") -> Path:
        """The disk of a host."""
        return self.folder / host

    def shard_folder(self, shard: int, host: str = "host") -> Path:
        (found,) = self.local(host).glob(f"state/*/{OPERATOR}/{self.parallelism}-{shard}")
        return found

    def task_job(self, shard: int, **changed: Any) -> TaskJob:
        given: dict[str, Any] = {
            "name": JOB,
            "uid": "job-1",
            "store_url": self.store_url,
            "storage_options": {},
            "local_dir": str(self.local(self.host_of(shard))),
            "term": 1,
            "epoch": f"epoch-{self.ids.count}",
            "snapshot_id": self.manifest.snapshot_id + 1,
            "base_snapshot_id": self.manifest.snapshot_id,
            "parallelism": self.parallelism,
            "clock": EpochClock(self.now_ms),
            "settings": self.settings,
        }
        return TaskJob(**{**given, **changed})

    def access(self, shard: int, **changed: Any) -> ShardAccess:
        return ShardAccess(
            self.task_job(shard, **changed), self.operator, self._entry(), shard, committed=ShardVersions.of(self.versions)  # type: ignore[arg-type]
        )  # fmt: skip

    def _entry(self) -> OperatorEntry:
        return next((o for o in self.manifest.operators if o.uid == OPERATOR), self.operator.entry())

    def open(self, shard: int) -> tuple[ShardAccess, StateReader]:
        access = self.access(shard)
        return access, access.open(self.versions[shard], verify=not self.trusted[shard])

    def model(self, shard: int) -> MemoryReader:
        """What a shard must see."""
        low, high = hash_range_of_shard(shard, self.parallelism)
        history = {s: [slice_hash_range(b, low, high) for b in batches] for s, batches in self.history.items()}
        return MemoryReader(self.operator.state_schemas, history, self.now_ms)

    def check(self, reader: StateReader, shard: int) -> None:
        for shape in self.shapes:
            check_same(reader, self.model(shard), shape, self.hash_of, bound_only=True)

    def epoch(
        self, changes: Mapping[str, Change], *, visit: Iterable[int] | None = None, commit: bool = True, check: bool = True
    ) -> dict[int, str]:  # fmt: skip
        """One epoch over some shards (all that is changed must be theirs).

        Returns:
            Per visited shard where its state came from.
        """
        batches = {shape: batch_of_change(shape, change, self.hash_of) for shape, change in changes.items()}
        self.numbers, written, tasks = {}, list(self.versions), []
        for shard in range(self.parallelism) if visit is None else visit:
            access, reader = self.open(shard)
            self.numbers[shard] = access.numbers
            if check:
                self.check(reader, shard)
            attempt = self.ids.short()
            reader = access.tidied(attempt, self.versions[shard], reader)
            own = {s: slice_hash_range(b, *access.hash_range) for s, b in batches.items()}
            own = {s: b for s, b in own.items() if b.num_rows}
            tasks.append(
                write_task_changes(
                    self.root,
                    term=1,
                    operator=OPERATOR,
                    hash_range=access.hash_range,
                    changes=own,
                    inline_bytes_max=self.settings.checkpoint.inline_bytes_max,
                    ids=self.ids,
                )
            )
            written[shard], self.failed = access.write(
                attempt, reader, own, self.versions[shard], access.numbers.kind == "primary", {}
            )
        if commit:
            self._commit(tasks, batches, written, [*self.numbers])
        return {shard: numbers.kind for shard, numbers in self.numbers.items()}

    def _commit(
        self, tasks: list[Any], batches: Mapping[str, pa.RecordBatch], written: list[str], visited: list[int]
    ) -> None:
        snapshot_id = self.manifest.snapshot_id + 1
        segment = write_segment(
            self.root, tasks, job_uid=self.manifest.job_uid, term=1, snapshot_id=snapshot_id, ids=self.ids
        )
        self.manifest = self._put(
            replace(
                self.manifest,
                snapshot_id=snapshot_id,
                parallelism=self.parallelism,
                operators=(self._entry(),),
                segments=(*self.manifest.segments, *([segment] if segment is not None else [])),
                versions={OPERATOR: ShardVersions.of(written).encode()},
                time=TimeEntry(self.now_ms, 0),
            )
        )
        self.versions = written
        for shard in visited:
            self.trusted[shard] = True
        for shape, batch in batches.items():
            self.history[shape].insert(0, batch)

    def adopt(self, manifest: Manifest) -> None:
        """The newest manifest with other tables, as the driver commits a materialization."""
        self.manifest = self._put(replace(manifest, snapshot_id=self.manifest.snapshot_id + 1))

    def restart(self, parallelism: int | None = None) -> None:
        """A new run: nothing is trusted; with another parallelism no version is known."""
        self.manifest = self._put(replace(self.manifest, snapshot_id=self.manifest.snapshot_id + 1, kind="fencing"))
        if parallelism is not None and parallelism != self.parallelism:
            self.parallelism = parallelism
            self.versions = [NO_VERSION] * parallelism
        self.trusted = [False] * self.parallelism


__all__ = ["FakeClock", "FakeOperator", "LocalJob"]
