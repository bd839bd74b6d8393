"""Two jobs of one file, `job` that has run for a while and `beside` that is to begin with its state; their drivers are
played, and processes that fork may die at any point."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maintenance_root import Job
from migrated_job import HOST, Drivers
from model import CountingIds, StateWriter, empty_manifest

from state_runtime.base.actor import Actor
from state_runtime.base.ids import SYSTEM_IDS
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.commit import Committer
from state_runtime.store import Store, open_store
from stillstate.orchestration.config.spec import JobSpec, load_spec
from stillstate.orchestration.migration.migrate import Migrator, migrator_of

OLD, NEW = "job", "beside"
SETTINGS = "parallelism: 2\nrecovery: {heartbeat_timeout_s: 300, first_checkpoint_s: 20}"


class NotBegun(Job):
    """A job that has no root yet, and whose first driver another job's state is brought for."""

    def start(self) -> Committer | None:  # type: ignore[override]
        self.catalog = Catalog(self.store, self.name, self.clock)
        self.ids = CountingIds(prefix=6)
        self.writer = StateWriter(
            self.root,
            parallelism=2,
            inline_bytes_max=self.inline_bytes_max,
            ids=self.ids,
            manifest=empty_manifest("0" * 32),
        )
        return None


@dataclass
class ForkDrivers(Drivers):
    """Drivers of the new job; what it begins with is in the book of the other one."""

    book: Callable[[int], dict[Any, Any]] = lambda snapshot_id: {}

    def rows_of(self, snapshot_id: int) -> dict[Any, Any]:
        if snapshot_id not in self.job.rows:
            self.job.rows[snapshot_id] = dict(self.book(snapshot_id))
        return self.job.rows[snapshot_id]


@dataclass
class Forked:
    """Both jobs, their drivers, and processes that fork, one after the other."""

    config: Path

    def __post_init__(self) -> None:
        spec = load_spec(self.config)
        self.specs = {name: spec.job(name) for name in (OLD, NEW)}
        self.old = Job(open_store(self.specs[OLD].store), name=OLD)
        self.old.checkpoints(3)
        self.new = NotBegun(open_store(self.specs[NEW].store), self.old.clock, name=NEW)
        self.old_drivers = Drivers(self.old, self.specs[OLD])
        self.new_drivers = ForkDrivers(self.new, self.specs[NEW], book=self.old_drivers.rows_of)
        self.said: list[str] = []
        self._process = itertools.count(6000)

    def running(self) -> Forked:
        self.old_drivers.start()
        self.old.checkpoint()
        return self

    def ended(self) -> Forked:
        self.old_drivers.start()
        self.old.checkpoint()
        self.old_drivers.stop()
        return self

    def behaving(self, behaviour: str) -> Forked:
        """What drivers of the new job do; see `Drivers`."""
        self.new_drivers.behaviour[2] = behaviour
        return self

    def poll(self, seconds: float) -> None:
        """Time passes for both."""
        self.old_drivers.poll(seconds)
        self.new_drivers.poll(0.0)

    def drivers_of(self, job: JobSpec) -> Drivers:
        return self.old_drivers if job.name == OLD else self.new_drivers

    def migrator(self, on_point: Callable[[str], object] = lambda point: None) -> Migrator:
        """A new process."""
        return migrator_of(
            self.specs[NEW],
            lambda at: Catalog(open_store(at.store), at.name, self.old.clock),
            self.drivers_of,
            Actor(self.old.clock, SYSTEM_IDS, HOST, next(self._process)),
            jobs=lambda name: self.specs[name],
            poll=self.poll,
            say=self.said.append,
            on_point=on_point,
        )

    @property
    def old_root(self) -> Store:
        return open_store(self.specs[OLD].store).child(OLD)

    @property
    def new_root(self) -> Store:
        return open_store(self.specs[NEW].store).child(NEW)

    def old_files(self) -> dict[str, bytes]:
        """Everything in the root of the job that is forked, byte for byte."""
        return files_of(self.old_root)


def files_of(root: Store) -> dict[str, bytes]:
    return {o.path: root.read(o.path, 1 << 24) for o in root.list_objects("")}
