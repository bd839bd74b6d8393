"""A restore drill: restore a snapshot's whole state into a scratch folder, as tasks do, and compare it.

The code that restores a shard in a task (`restore/shard.py`) restores each shard into local files of the job's own
backend; without any local copy, as after the loss of all hosts. The content of the files is compared with the content
that the snapshot's reader finds in the store: the number of live rows and an order-independent digest of each state.
Every object is fetched and its digest compared. One shard's files are on disk at a time.

    <folder>/.lock                   held while folders are made and removed
    <folder>/<job>-<pid>-<id>/.lock  held by a live drill; the next drill removes the folders of dead ones
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from state_runtime.base.actor import Actor
from state_runtime.base.errors import CorruptData, Unavailable, UnsupportedFormat
from state_runtime.base.limits import MAX_PARALLELISM, MIB
from state_runtime.changelog.reader import read_passes
from state_runtime.changelog.versions import StateVersions
from state_runtime.maintenance.verify.inflight import check_parts
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.reading.reader import SnapshotReader
from state_runtime.restore.objects import HostObjects
from state_runtime.restore.shard import ShardRestore
from state_runtime.restore.uploaded_files import read_listing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.kept_pin import kept_pin
from state_runtime.snapshot.manifest import Manifest, OperatorEntry
from state_runtime.state.backends import open_backend
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import StateSchema
from state_runtime.store import Store

__all__ = ["DrillReport", "DrilledState", "drill", "scratch_folder"]

_SHARD_BYTES = 256 * MIB
"""A larger shard is restored in parts: one part is held in memory while it is compared."""
_PROBLEMS_MAX = 100


@dataclass(frozen=True)
class DrilledState:
    """One state of one operator, all shards together."""

    operator: str
    state: str
    stored: Fingerprint
    restored: Fingerprint

    @property
    def is_equal(self) -> bool:
        return self.stored == self.restored


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """The result of a drill.

    Attributes:
        shards: number of pieces in which each operator was restored.
        problems: data that could not be restored, or that differs after the restore; for people.
        recorded_rows: live rows by the snapshot's own progress (including rows that have expired since); -1 if it has
            none.
        restore_s: of all restores, one after the other; a job restores its shards in parallel.
        inflight_rows: approximate number of rows in flight; every part of them was read and decoded.
    """

    job: str
    snapshot_id: int
    created_at_ms: int
    shards: int
    states: tuple[DrilledState, ...]
    problems: tuple[str, ...]
    recorded_rows: int
    bytes_read: int
    restore_s: float
    seconds: float
    inflight_rows: int = 0

    @property
    def rows(self) -> int:
        return sum(state.restored.rows for state in self.states)

    @property
    def is_restorable(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        return CorruptData.exit_code if self.problems else 0


def drill(
    catalog: Catalog,
    manifest: Manifest,
    folder: Path,
    *,
    backend: str,
    actor: Actor,
    on_progress: Callable[[int, int], None] | None = None,
) -> DrillReport:
    """Restore a snapshot into a scratch folder and compare. The job may run meanwhile; a pin keeps the snapshot.

    Args:
        folder: the drill makes a separate folder below it, and removes it again.
        on_progress: called with the shards done and the total.

    Raises:
        SnapshotExpired: it expired. Unavailable: no store, or no room on the disk: nothing is known; try again.
        InvalidConfiguration: the backend's library is not installed.
    """
    started_s = actor.clock.monotonic_s()
    with (
        kept_pin(catalog.root, manifest.snapshot_id, reason="verify", holder=f"a drill of {actor.owner}", actor=actor)
        as pin,
        scratch_folder(folder, catalog.job, actor) as scratch,
    ):  # fmt: skip
        restoring = _Drill(catalog.root, manifest, scratch, backend, actor)
        shards = restoring.shards
        total = shards * len(manifest.operators)
        for done, (operator, shard) in enumerate((o, s) for o in manifest.operators for s in range(shards)):
            pin.beat()
            if on_progress is not None:
                on_progress(done, total)
            restoring.shard(operator, shard)
        restoring.rows_in_flight()
        if on_progress is not None:
            on_progress(total, total)
        return restoring.report(catalog.job, actor.clock.monotonic_s() - started_s)


class _Drill:
    """The restores of one drill."""

    def __init__(self, root: Store, manifest: Manifest, scratch: Path, backend: str, actor: Actor) -> None:
        self._root, self._manifest, self._scratch = root, manifest, scratch
        self._backend, self._actor = backend, actor
        self._objects = HostObjects(lambda: root, scratch / "objects", manifest.total_bytes, actor.clock)
        self._reader = SnapshotReader(root, manifest, scratch=scratch)
        self._now_ms = manifest.time.batch_time_ms if manifest.time is not None else 0
        self._found: dict[tuple[str, str], tuple[Fingerprint, Fingerprint]] = {}
        self._problems: list[str] = []
        self._restore_s = 0.0
        self._waiting = 0
        in_parts = manifest.total_bytes // max(1, len(manifest.operators)) // _SHARD_BYTES
        self.shards = min(max(manifest.parallelism, in_parts, 1), MAX_PARALLELISM)

    def shard(self, operator: OperatorEntry, shard: int) -> None:
        """Restore one shard, compare it, and remove it."""
        folder = self._scratch / f"{shard}"
        try:
            self._compare(operator, shard, folder)
        except (CorruptData, UnsupportedFormat) as error:
            self._problem(f"operator {operator.uid!r}, shard {shard}: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def rows_in_flight(self) -> None:
        """Read the rows with which a run would continue."""
        try:
            passes = read_passes(self._root, self._manifest)
        except (CorruptData, UnsupportedFormat) as error:
            self._problem(f"rows in flight: {error}")
            return
        for finding in check_parts(self._root, self._manifest, passes, decode=True):
            if finding.kind == "unreachable":
                raise Unavailable(f"{finding.path}: {finding.detail}")
            self._problem(f"{finding.path}, {finding.whose}: {finding.detail}")
        self._waiting = sum(p.rows for p in passes)

    def _compare(self, operator: OperatorEntry, shard: int, folder: Path) -> None:
        low, high = hash_range_of_shard(shard, self.shards)
        schemas, stored = {}, {}
        for state in operator.states:
            schema: StateSchema | None = None
            found = Fingerprint()
            for batch in self._reader.read(operator.uid, state.name, (low, high)):
                schema = schema or StateSchema.of(batch.schema)
                found = found + Fingerprint.of(batch)
            # Some types are known only from rows: without rows nothing depends on them.
            schemas[state.name] = schema or StateVersions(operator, state).declared
            stored[state.name] = found
        started_s = self._actor.clock.monotonic_s()
        restored = self._restored(operator, shard, folder, schemas)
        self._restore_s += self._actor.clock.monotonic_s() - started_s
        for name, expected in stored.items():
            got = restored[name]
            before = self._found.get((operator.uid, name), (Fingerprint(), Fingerprint()))
            self._found[operator.uid, name] = (before[0] + expected, before[1] + got)
            if got != expected:
                self._problem(
                    f"operator {operator.uid!r}, state {name!r}, shard {shard}: {expected} in the store, "
                    f"{got} after the restore"
                )

    def _restored(
        self, operator: OperatorEntry, shard: int, folder: Path, schemas: Mapping[str, StateSchema]
    ) -> dict[str, Fingerprint]:
        """Restore a shard and return the fingerprints of its states, read from its files.

        Raises:
            Unavailable: there was no room for it. And what `ShardRestore.run` raises.
        """
        manifest = self._manifest
        store = open_backend(self._backend, folder / f"{self.shards}-{shard}", schemas, self._actor.clock)
        version = self._actor.ids.short()
        restored = ShardRestore(
            store=store,
            folder=folder,
            backend=self._backend,
            manifest=manifest,
            manifest_of=lambda _: manifest,
            pending=(),
            entry=operator,
            schemas=schemas,
            shard=shard,
            parallelism=self.shards,
            objects=self._objects,
            now_ms=self._now_ms,
            clock=self._actor.clock,
            listing=read_listing(self._objects, manifest),
        ).run(version, local=False)
        if not restored.version:
            raise Unavailable(f"{folder.parent} has no room for shard {shard} of operator {operator.uid!r}")
        # Opened again, with its digests: as a run would that starts on this host.
        reader = store.open(restored.version, self._now_ms, verify=True)
        return {name: Fingerprint.of(reader.whole(name)) for name in schemas}

    def _problem(self, text: str) -> None:
        if len(self._problems) < _PROBLEMS_MAX:
            self._problems.append(text)

    def report(self, job: str, seconds: float) -> DrillReport:
        progress = self._manifest.progress
        return DrillReport(
            job=job,
            snapshot_id=self._manifest.snapshot_id,
            created_at_ms=self._manifest.created_at_ms,
            shards=self.shards,
            states=tuple(DrilledState(*key, *both) for key, both in sorted(self._found.items())),
            problems=tuple(self._problems),
            recorded_rows=progress.state_rows if progress is not None else -1,
            bytes_read=self._objects.bytes_read,
            restore_s=round(self._restore_s, 3),
            inflight_rows=self._waiting,
            seconds=round(seconds, 3),
        )


@contextmanager
def scratch_folder(parent: Path, job: str, actor: Actor) -> Iterator[Path]:
    """Make a folder of this process; remove it afterwards, and first the folders of the job's dead drills.

    Raises:
        Unavailable: it cannot be made.
    """
    mine = parent / f"{job}-{actor.pid}-{actor.ids.short()}"
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(parent / ".lock"):
            _remove_left(parent, job)
            mine.mkdir(mode=0o700)
            descriptor = os.open(mine / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise Unavailable(f"the folder {mine} of the drill cannot be made: {error.strerror}") from error
    try:
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_left(parent: Path, job: str) -> None:
    """Remove the folders of the job's drills whose process is gone: their lock is free."""
    for folder in parent.glob(f"{job}-*-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
