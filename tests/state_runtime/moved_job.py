"""A job root with everything that one may hold, to be copied, moved and verified; and stores that stop at a chosen operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from local_job import LocalJob
from model import ALL_HASHES, OPERATOR, CountingIds, DictStore, FakeClock
from test_restore import changes

from state_runtime.base.settings import CheckpointSettings, JobSettings
from state_runtime.maintenance.copy.objects import copy_snapshot
from state_runtime.maintenance.delete.snapshots import delete_snapshots
from state_runtime.materialize import apply, materialize
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.document import FORMAT_VERSION, encode_document
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.manifest import Manifest
from state_runtime.snapshot.paths import JOB_FILE
from state_runtime.snapshot.pins import pin_snapshot
from state_runtime.snapshot.savepoint_record import SavepointRecord, record_path
from state_runtime.store import Created, Store, StoredObject
from tests.job_settings import job_settings
from tests.stored import read_states

INFO = JobInfo("job-1", "job", 32768, FORMAT_VERSION, 1)
SHAPES = ("value", "map", "timers")

States = dict[str, list[str]]


def made_job(folder: Path, shapes: tuple[str, ...] = SHAPES, epochs: int = 5) -> LocalJob:
    """Epochs with inline and direct changes, tables, and a log above them; no pins, no savepoints. Snapshots 1 to `epochs` + 2."""
    settings = JobSettings(checkpoint=CheckpointSettings(inline_bytes_max=400))
    job, rng = LocalJob(folder, shapes=shapes, settings=settings), random.Random(4)
    for number in range(epochs):
        job.settings = job_settings(settings, inline_bytes_max=(1 << 20) if number % 2 else 400)
        job.epoch(changes(rng, job), check=False)
        if number == epochs // 2:
            record = materialize(job.root, job.manifest, settings=settings, clock=FakeClock(), ids=job.ids)
            job.adopt(apply(job.manifest, record))
    job.root.create(JOB_FILE, encode_document("job", INFO))
    return job


def furnish(root: Store) -> None:
    """A pin that somebody set, a savepoint that is complete, and a snapshot that was given up."""
    clock, ids = FakeClock(), CountingIds(prefix=5)
    pin_snapshot(root, 3, reason="user", holder="somebody", clock=clock, ids=ids, note="audit")
    add_savepoint(root, "before", min(5, Catalog.of_root(root).snapshot_ids()[-1]))
    delete_snapshots(root, [2], clock=clock, ids=ids)


def add_savepoint(root: Store, name: str, snapshot_id: int) -> None:
    clock, ids = FakeClock(), CountingIds(prefix=6)
    folder = root.child(f"savepoints/{name}")
    record = SavepointRecord(
        name, ids.uid(), "job", "job-1", "COMPLETED", "user", clock.now_ms(), "here:1", clock.now_ms(), snapshot_id=snapshot_id
    )  # fmt: skip
    folder.put(record_path(1), encode_document("savepoint", record))
    copy_snapshot(root, Catalog.of_root(root).manifest(snapshot_id), folder, rewrite=None, clock=clock, ids=ids)
    folder.create(JOB_FILE, encode_document("job", INFO))


def into(store: Store, source: Store) -> Store:
    """All objects of a root, in another store."""
    for found in source.list_objects(""):
        store.put(found.path, source.read(found.path, 1 << 30))
    return store


def states_of(job: LocalJob, root: Store, manifest: Manifest) -> States:
    """Rows as text: NaN is not equal to itself."""
    if not manifest.operators:
        return {}
    schemas = job.operator.state_schemas
    found = read_states(root, manifest, OPERATOR, schemas, *ALL_HASHES)
    return {state: [repr(row) for row in pa.Table.from_batches([batch]).to_pylist()] for state, batch in found.items()}


def all_states(job: LocalJob, root: Store) -> dict[int, States]:
    """By snapshot id, of all snapshots."""
    catalog = Catalog.of_root(root)
    return {i: states_of(job, root, catalog.manifest(i)) for i in catalog.snapshot_ids()}


class Killed(BaseException):
    """The process is gone: no handler of its own sees it."""


class WatchedStore(DictStore):
    """Calls `watch(operation, path)` before every operation; children share it. Objects may be shared with other instances."""

    def __init__(
        self, objects: dict[str, bytes], watch: Callable[[str, str], None], root: str = "", name: str = ""
    ) -> None:
        super().__init__(objects, root)
        self.watch = watch
        self.name = name

    @property
    def url(self) -> str:
        return f"dict://{self.name}/{self._root}".rstrip("/")

    def create(self, path: str, body: bytes) -> Created:
        self.watch("create", path)
        return super().create(path, body)

    def put(self, path: str, body: bytes) -> None:
        self.watch("put", path)
        super().put(path, body)

    def read(self, path: str, bytes_max: int) -> bytes:
        self.watch("read", path)
        return super().read(path, bytes_max)

    def get_file(self, path: str, local: Path) -> None:
        self.watch("read", path)
        local.write_bytes(DictStore.read(self, path, 1 << 60))

    def size(self, path: str) -> int:
        self.watch("size", path)
        return len(DictStore.read(self, path, 1 << 60))

    def list_names(self, path: str) -> list[str]:
        self.watch("list", path)
        return super().list_names(path)

    def list_objects(self, path: str) -> Iterator[StoredObject]:
        self.watch("list", path)
        return super().list_objects(path)

    def delete(self, path: str) -> None:
        self.watch("delete", path)
        super().delete(path)

    def child(self, name: str) -> WatchedStore:
        return WatchedStore(self.objects, self.watch, f"{self._at(name)}/", self.name)
