"""Local runs: the state of one shard of one operator on the host's disk, in immutable versions.

    <local dir>/<job uid>/<operator>/<parallelism>-<shard>/
        <version>.json        which run files make the version, newest first, with size, rows and digest
        <version>-<n>.arrow   Arrow IPC files, sorted by key hash, memory-mapped

A *version* is the state after one attempt of one task; its id is unique, and the driver learns it from the task's
acknowledgement. Which version is the committed one is written in the manifest, so a re-executed task (retry, speculation,
stage re-run, or a batch that is run again after a crash) starts from the right one, whatever lies beside it.

Local versions are a copy: losing, truncating or altering them costs time, never data. Reading problems are reported as
`LocalCopyUnusable`, and the task restores from the primary store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from state_runtime.clock import Clock
from state_runtime.state.table import Hashes, Mask, StateSchema, fold, lookup

__all__ = ["LocalCopyUnusable", "LocalShard", "OpenVersion", "RunFile", "Version", "plan_merge"]

_FORMAT = 1
_ID = re.compile(r"[0-9a-f]{16}\Z")
_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,4}\.arrow\Z")
_VERSION_BYTES_MAX = 1 << 20
# Files that no version names are leavings of a killed attempt; a live attempt needs its files for minutes at most.
_ORPHAN_AGE_S = 3600.0


# Whatever a damaged JSON file can do to its reader.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class LocalCopyUnusable(Exception):
    """The local copy cannot serve; the reason is for metrics. Never leaves the task: the primary serves instead."""


@dataclass(frozen=True)
class RunFile:
    """One sorted run on disk."""

    file: str
    rows: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Version:
    """One version of a shard's states."""

    version: str
    parent: str
    runs: Mapping[str, tuple[RunFile, ...]] = field(default_factory=dict)


class LocalShard:
    """The local versions of one shard of one operator.

    Several attempts of a task, also of different drivers, may use the folder at once: every file has one writer and a
    unique name, and `prune` only removes what older versions name, or what was abandoned an hour ago.
    """

    def __init__(self, folder: Path, schemas: Mapping[str, StateSchema], clock: Clock) -> None:
        self._folder = folder
        self._schemas = schemas
        self._clock = clock

    def open(self, version: str, *, verify: bool) -> OpenVersion:
        """Map a version's runs.

        Args:
            version: id from the manifest or from the previous epoch.
            verify: also compare every run's digest: the first time a driver uses a version that an earlier run wrote.

        Raises:
            LocalCopyUnusable: missing, partial, altered, or not ours to trust.
        """
        try:
            self._check_folder()
            described = self._read_version(version)
            mapped = {
                state: [self._map(run, schema, verify) for run in described.runs.get(state, ())]
                for state, schema in self._schemas.items()
            }
        except (*_UNREADABLE, pa.ArrowException) as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        return OpenVersion(described, mapped, self._schemas)

    def write(
        self,
        version: str,
        base: OpenVersion,
        changes: Mapping[str, pa.RecordBatch],
        *,
        runs_max: int,
    ) -> Version:
        """Write the version that follows `base`: one new run per changed state, older runs merged where there are many.

        The version file is written last, under a temporary name first: a crash leaves files that no version names.

        Raises:
            OSError: disk full, read-only, … The epoch goes on without a local copy.
        """
        self._make_folder()
        written = 0
        runs: dict[str, tuple[RunFile, ...]] = dict(base.version.runs)
        for state, change in changes.items():
            if change.num_rows == 0:
                continue
            schema = self._schemas[state]
            old = list(runs.get(state, ()))
            merge_count = plan_merge([change.num_rows] + [r.rows for r in old], runs_max)
            merged = (
                fold([change, *base.mapped[state][: merge_count - 1]], schema, drop_deleted=merge_count == len(old) + 1)
                if merge_count > 1
                else change
            )
            runs[state] = (self._write_run(f"{version}-{written}.arrow", merged), *old[max(merge_count - 1, 0) :])
            written += 1
        described = Version(version, base.version.version, runs)
        self._write_version(described)
        return described

    def write_restored(self, version: str, states: Mapping[str, pa.RecordBatch]) -> Version:
        """Write a version from states that were rebuilt from the primary store; `states` are sorted and folded.

        Raises:
            OSError: see `write`.
        """
        self._make_folder()
        runs = {
            state: (self._write_run(f"{version}-{number}.arrow", batch),) if batch.num_rows else ()
            for number, (state, batch) in enumerate(states.items())
        }
        described = Version(version, "", runs)
        self._write_version(described)
        return described

    def prune(self, keep: str) -> None:
        """Remove versions that can no longer be a starting point: all but `keep` and those that follow from it.

        Called when `keep` is committed and the next epoch begins from it. A concurrent attempt of the same epoch also
        follows from `keep`, so its files stay.
        """
        versions = {name[:-5] for name in os.listdir(self._folder) if name.endswith(".json") and _ID.match(name[:-5])}
        kept_files: set[str] = set()
        old_files: set[str] = set()
        for version in versions:
            try:
                described = self._read_version(version)
            except _UNREADABLE:
                continue
            files = {run.file for runs in described.runs.values() for run in runs}
            if version == keep or described.parent == keep:
                kept_files |= files | {f"{version}.json"}
            else:
                old_files |= files
        doomed = ({f"{v}.json" for v in versions} | old_files) - kept_files
        gone = {name[:16] for name in doomed if name.endswith(".json")}
        now_s = self._clock.now_ms() / 1000
        for name in os.listdir(self._folder):
            if not (_FILE.match(name) or name.startswith(".tmp-")) or name in kept_files:
                continue
            path = self._folder / name
            try:
                if name[:16] in gone or now_s - path.lstat().st_mtime > _ORPHAN_AGE_S:
                    doomed.add(name)
            except FileNotFoundError:
                continue
        for name in doomed:
            (self._folder / name).unlink(missing_ok=True)

    def _check_folder(self) -> None:
        status = self._folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("not a private folder of this user")

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._check_folder()
        except ValueError as error:
            raise PermissionError(f"{self._folder}: {error}") from error

    def _read_version(self, version: str) -> Version:
        if not _ID.match(version):
            raise ValueError("not a version id")
        data = _read_no_follow(self._folder / f"{version}.json", _VERSION_BYTES_MAX)
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("the version file has another digest")
        described = json.loads(body)
        if described["format"] != _FORMAT or described["version"] != version:
            raise ValueError("another format or version")
        runs = {
            str(state): tuple(RunFile(str(r["file"]), int(r["rows"]), int(r["bytes"]), str(r["digest"])) for r in files)
            for state, files in described["runs"].items()
        }
        if any(not _FILE.match(run.file) for files in runs.values() for run in files):
            raise ValueError("a run has a foreign name")
        return Version(version, str(described["parent"]), runs)

    def _write_version(self, described: Version) -> None:
        body = json.dumps({"format": _FORMAT, **asdict(described)}).encode()
        body = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        temporary = self._folder / f".tmp-{described.version}"
        _write_private(temporary, body)
        os.replace(temporary, self._folder / f"{described.version}.json")

    def _map(self, run: RunFile, schema: StateSchema, verify: bool) -> pa.RecordBatch:
        path = self._folder / run.file
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != run.bytes:
            raise ValueError(f"{run.file} is not a file of {run.bytes} bytes")
        source = pa.memory_map(str(path))
        if verify and hashlib.sha256(source.read_buffer()).hexdigest() != run.digest:
            raise ValueError(f"{run.file} has another digest")
        reader = pa.ipc.open_file(source)
        if reader.num_record_batches != 1:
            raise ValueError(f"{run.file} has {reader.num_record_batches} batches")
        batch = reader.get_batch(0)
        if not batch.schema.equals(schema.arrow) or batch.num_rows != run.rows:
            raise ValueError(f"{run.file} has other columns or rows")
        return batch

    def _write_run(self, name: str, batch: pa.RecordBatch) -> RunFile:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        body = sink.getvalue()
        _write_private(self._folder / name, body)
        return RunFile(name, batch.num_rows, body.size, hashlib.sha256(body).hexdigest())


class OpenVersion:
    """A version's runs, mapped and ready for look-up. Values of the mapped batches stay valid after files are unlinked."""

    def __init__(
        self, version: Version, mapped: Mapping[str, Sequence[pa.RecordBatch]], schemas: Mapping[str, StateSchema]
    ) -> None:
        self.version = version
        self.mapped = mapped
        self._schemas = schemas

    @staticmethod
    def of_batches(
        version: str, states: Mapping[str, pa.RecordBatch], schemas: Mapping[str, StateSchema]
    ) -> OpenVersion:
        """A version that exists only in memory: freshly restored, or the empty state."""
        return OpenVersion(Version(version, ""), {s: [b] if b.num_rows else [] for s, b in states.items()}, schemas)

    def find(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[Mask, list[pa.Array]]:
        """Look many keys up at once, newest run first.

        Args:
            hashes: sorted, one per wanted key.
            keys: the wanted keys' columns.

        Returns:
            Which keys have a live value, and the value columns, one row per wanted key, null where there is none.
        """
        schema = self._schemas[state]
        count = len(hashes)
        position = np.full(count, -1, dtype=np.int64)
        pieces: list[list[pa.Array]] = []
        offset = 0
        open_keys = np.arange(count)
        for run in self.mapped[state]:
            if len(open_keys) == 0:
                break
            whole = len(open_keys) == count
            wanted = list(keys) if whole else [k.take(pa.array(open_keys)) for k in keys]
            at = lookup(run, schema, hashes if whole else hashes[open_keys], wanted)
            hit = at >= 0
            taken = pa.array(at[hit])
            # A tombstone ends the search for its key just as a value does.
            live = np.logical_not(run.column(1).take(taken).to_numpy(zero_copy_only=False))
            hits = open_keys[hit]
            rows = np.flatnonzero(live)
            position[hits[rows]] = offset + np.arange(len(rows))
            offset += len(rows)
            pieces.append([v.take(taken.take(pa.array(rows))) for v in schema.values_of(run)])
            open_keys = open_keys[~hit]
        found = position >= 0
        index = pa.array(position, mask=~found)
        values = [
            pa.concat_arrays([piece[i] for piece in pieces]).take(index) if offset else pa.nulls(count, f.type)
            for i, f in enumerate(schema.values)
        ]
        return found, values


def plan_merge(rows_newest_first: Sequence[int], runs_max: int) -> int:
    """How many of the newest runs to merge into one (1: none); pure.

    Tiered: nothing while there are at most `runs_max` runs. Then the newer half is merged, and as long as the next older
    run is not larger than twice what is merged already, it is taken along: so from 4 runs
    on each row is rewritten about log2(state / epoch) times over its life (twice that at worst), and small states stay in one or two runs.
    """
    if len(rows_newest_first) <= runs_max:
        return 1
    count = max(2, len(rows_newest_first) // 2)
    total = sum(rows_newest_first[:count])
    while count < len(rows_newest_first) and rows_newest_first[count] <= 2 * total:
        total += rows_newest_first[count]
        count += 1
    return count


def _read_no_follow(path: Path, bytes_max: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise ValueError(f"{path.name} is too large")
    return body


def _write_private(path: Path, body: bytes | pa.Buffer) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
