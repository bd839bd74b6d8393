"""Local runs: the state of one shard of one operator on the host's disk, in immutable versions.

    <local dir>/state/<root id>-<job uid>/<operator>/<parallelism>-<shard>/
        <version>.json        which files make the version's runs (state/runs.py), with size, rows and check value
        <version>-<n>.arrow   Arrow IPC files, sorted by key hash (and entry), memory-mapped

A *version* is the state after one attempt of one task; its id is unique, and the driver learns it from the task's
acknowledgement. Which version is the committed one is written in the manifest, so a re-executed task (retry,
speculation, stage re-run, or a batch that is run again after a crash) starts from the right one, whatever lies beside
it.

Local versions are a copy: losing, truncating or altering them costs time, never data. Reading problems are reported as
`LocalCopyUnusable`, and the task restores from the primary store.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from state_runtime.base.clock import Clock
from state_runtime.base.fields import fields_of
from state_runtime.base.limits import MIB
from state_runtime.state.backend import (
    NO_STAMP,
    Adopted,
    LocalCopyUnusable,
    LocalFile,
    Stamp,
    StoredVersion,
    VersionFiles,
)
from state_runtime.state.reader import StateReader
from state_runtime.state.runs import (
    BUDGET_ROWS_MIN,
    Layout,
    Merge,
    Run,
    RunFile,
    add_run,
    budget_rows,
    record_piece,
    side_by_side,
    start_merge,
)
from state_runtime.state.table import HASH_MAX, Hashes, StateSchema, concat, fold, hashes_of, slice_hash_range
from state_runtime.state.version import OpenVersion, RunData, Version, due_order_of, rows_of_piece

__all__ = ["LocalShard", "cut_hash", "describe_whole", "encode_run", "parse_description", "read_run"]

_FORMAT = 4
_DUE_ORDER = "due_order"  # only in local files: positions of the rows in order of `due`, see RunData
_ID = re.compile(r"[0-9a-f]{16}\Z")
_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,4}\.arrow\Z")
_VERSION_BYTES_MAX = 1 << 20
# Files that no version names are leavings of a killed attempt; a live attempt needs its files for minutes at most.
_ORPHAN_AGE_S = 3600.0
# A restored run is written in pieces of this size, so that no more of it is in private memory.
_PIECE_BYTES = 32 * MIB
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_FIRST_NEW = 5000  # number of a version's first new run; those below are outputs of merges
_SAMPLES = 128  # per file, to find where a merge's next range ends


# Whatever a damaged JSON file can do to its reader.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class LocalShard:
    """The local versions of one shard of one operator.

    Several attempts of a task, also of different drivers, may use the folder at once: every file has one writer and a
    unique name, and `prune` only removes what older versions name, or what was abandoned an hour ago.

    Args:
        stored: versions will be exported, so files get their SHA-256 while they are written.
    """

    def __init__(
        self,
        folder: Path,
        schemas: Mapping[str, StateSchema],
        clock: Clock,
        *,
        stamp: Stamp = NO_STAMP,
        stored: bool = False,
        merge_rows_min: int = BUDGET_ROWS_MIN,
    ) -> None:
        self._stamp = stamp
        self._stored = stored
        self._merge_rows_min = merge_rows_min
        self._folder = folder
        self._schemas = schemas
        self._clock = clock

    def open(self, version: str, now_ms: int, *, verify: bool) -> OpenVersion:
        """Map a version's runs: see `ShardStore.open`."""
        return self._open(version, now_ms, verify, lambda state, file: True)

    def _open(self, version: str, now_ms: int, verify: bool, is_wanted: Callable[[str, RunFile], bool]) -> OpenVersion:
        """Map those files of a version that are wanted; nothing is known of the others, and they must not be looked
        at."""
        try:
            self._check_folder()
            described = self._read_version(version)
            mapped = {
                state: {
                    file.file: self._map(file, schema, verify)
                    for file in described.states[state].files
                    if is_wanted(state, file)
                }
                for state, schema in self._schemas.items()
                if state in described.states
            }
        except (*_UNREADABLE, pa.ArrowException) as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        return OpenVersion(described, mapped, self._schemas, now_ms)

    def write(
        self,
        version: str,
        base: StateReader,
        changes: Mapping[str, pa.RecordBatch],
        *,
        now_ms: int,
        due_taken: Mapping[str, int],
        runs_max: int,
    ) -> None:
        """One new run per changed state: see `ShardStore.write`. A base that was not tidied is now.

        The version file is written last, under a temporary name first: a crash leaves files that no version names.
        """
        base = self.tidied(version, base, now_ms=now_ms, runs_max=runs_max)
        self._make_folder()
        with self._removed_if_it_fails(version):
            self._write(version, base, changes, due_taken)

    def tidied(self, version: str, base: StateReader, *, now_ms: int, runs_max: int) -> OpenVersion:
        """A bounded piece of the merges that are due: see `ShardStore.tidied`.

        Merges that reach the oldest run drop what has expired.
        """
        if not isinstance(base, OpenVersion):
            raise TypeError(f"a version follows one that this backend opened, not a {type(base).__name__}")
        merging = {
            state: started
            for state, layout in base.version.states.items()
            if (started := start_merge(layout, runs_max)).merges and state in self._schemas
        }
        if base.tidied_for == version or not merging:
            return base.tidied_as(version, {}, {})
        self._make_folder()
        names = (f"{version}-{number}.arrow" for number in itertools.count())
        mapped: dict[str, dict[str, RunData]] = {}
        with self._removed_if_it_fails(version):
            for state, layout in merging.items():
                # As much as the newest epoch changed is what keeps up with it.
                budget = budget_rows(layout, _newest_rows(layout), runs_max, self._merge_rows_min)
                mapped[state] = dict(base.mapped.get(state, {}))
                merging[state] = self._merge(layout, mapped[state], self._schemas[state], budget, names, now_ms)
        return base.tidied_as(version, merging, mapped)

    def _write(
        self,
        version: str,
        base: OpenVersion,
        changes: Mapping[str, pa.RecordBatch],
        due_taken: Mapping[str, int],
    ) -> None:
        names = (f"{version}-{number}.arrow" for number in itertools.count(_FIRST_NEW))
        states = dict(base.version.states)
        for state, through_ms in due_taken.items():
            # Before the new run is added: what the epoch itself wrote, nobody has looked at yet.
            states[state] = states.get(state, Layout()).with_taken(through_ms)
        for state, change in changes.items():
            if change.num_rows == 0:
                continue
            written, _ = self._write_run(next(names), change, self._schemas[state])
            states[state] = add_run(states.get(state, Layout()), written)
        if self._stored:
            # Once after the changelog was on, so that not every export has to.
            states = {state: layout.with_files(self._digested) for state, layout in states.items()}
        self._write_version(Version(version, base.version.version, states, self._stamp.snapshot_id, self._stamp.epoch))

    def _merge(
        self,
        layout: Layout,
        mapped: dict[str, RunData],
        schema: StateSchema,
        budget: int,
        names: Iterator[str],
        now_ms: int,
    ) -> Layout:
        """Take the merges under way further, newest first, reading about `budget` rows in all. What is written joins
        `mapped`."""
        for older in range(len(layout.merges) - 1, -1, -1):
            # Counted from the oldest, because finishing a newer merge removes it from the front.
            current = layout.merges[len(layout.merges) - 1 - older]
            inputs = [
                mapped[piece.file].batch.slice(first, end - first)
                for run in layout.inputs(current)
                for piece in run.pieces
                for first, end in [rows_of_piece(mapped[piece.file].batch, run, piece)]
            ]
            low = layout.inputs(current)[0].low
            end = cut_hash(inputs, low, budget)
            parts = [slice_hash_range(batch, low, HASH_MAX if end is None else end - 1) for batch in inputs]
            folded = fold(parts, schema, drop_deleted=layout.reaches_bottom(current), now_ms=now_ms)
            piece = None
            if folded.num_rows:
                piece, data = self._write_run(next(names), folded, schema)
                mapped[piece.file] = data
            layout = record_piece(layout, current, piece, end)
            budget -= sum(part.num_rows for part in parts)
            if budget <= 0:
                break
        return layout

    def write_restored(
        self,
        version: str,
        states: Mapping[str, pa.RecordBatch | Iterable[pa.RecordBatch]],
        now_ms: int,
        *,
        adopted: Iterable[Adopted] = (),
        below: Mapping[str, Sequence[tuple[int, Iterator[pa.RecordBatch]]]] | None = None,
        snapshot_id: int = 0,
        restored_from: str = "",
    ) -> OpenVersion:
        """One run per state, in pieces, and below it what lies there: see `ShardStore.write_restored`.

        Where nothing lies below, what is removed or has expired is not written.
        """
        taken_over = [(a, self._opened(a, now_ms)) for a in adopted]
        self._make_folder()
        with self._removed_if_it_fails(version):
            return self._write_restored(version, states, now_ms, taken_over, below or {}, snapshot_id, restored_from)

    def _write_restored(
        self,
        version: str,
        states: Mapping[str, pa.RecordBatch | Iterable[pa.RecordBatch]],
        now_ms: int,
        taken_over: Sequence[tuple[Adopted, OpenVersion]],
        below: Mapping[str, Sequence[tuple[int, Iterator[pa.RecordBatch]]]],
        snapshot_id: int,
        restored_from: str,
    ) -> OpenVersion:
        names = (f"{version}-{number}.arrow" for number in itertools.count())
        layouts: dict[str, Layout] = {}
        mapped: dict[str, dict[str, RunData]] = {}
        for state, schema in self._schemas.items():
            given = states.get(state, ())
            batches = [given] if isinstance(given, pa.RecordBatch) else given
            mapped[state] = {}
            # The bottom first: reading it brings what the top is read from.
            columns = [
                (low, [Run(self._write_pieces(rows, schema, names, mapped[state]))])
                for low, rows in below.get(state, ())
            ]
            if not taken_over and not columns:
                batches = (fold([batch], schema, drop_deleted=True, now_ms=now_ms) for batch in batches)
            pieces = self._write_pieces(batches, schema, names, mapped[state])
            for adopted, base in taken_over:
                columns += self._link(adopted, base, state, names, mapped[state])
            on_top = (Run(pieces),) if pieces else ()
            beside = side_by_side([[run for run in runs if run.pieces] for _, runs in sorted(columns, key=_low_end)])
            layouts[state] = Layout((*on_top, *beside))
        described = Version(
            version,
            "",
            layouts,
            snapshot_id if restored_from else self._stamp.snapshot_id,
            self._stamp.epoch,
            restored_from,
        )
        self._write_version(described)
        return OpenVersion(described, mapped, self._schemas, now_ms)

    def _write_pieces(
        self, batches: Iterable[pa.RecordBatch], schema: StateSchema, names: Iterator[str], mapped: dict[str, RunData]
    ) -> tuple[RunFile, ...]:
        """Sorted batches as the files of one run, mapped into memory again: what was written is not held."""
        pieces = []
        for batch in _pieces(batches, schema):
            file, _ = self._write_run(next(names), batch, schema)
            mapped[file.file] = read_run(pa.memory_map(str(self._folder / file.file)), file, schema)
            pieces.append(file)
        return tuple(pieces)

    @contextmanager
    def _removed_if_it_fails(self, version: str) -> Iterator[None]:
        """Leave no files of a version behind that was not finished: a full disk stays full otherwise."""
        try:
            yield
        except FileExistsError:
            raise  # there is such a version, and its files are not ours
        except Exception:
            for name in os.listdir(self._folder):
                if name.startswith((f"{version}-", f".tmp-{version}")):
                    (self._folder / name).unlink(missing_ok=True)
            raise

    def _opened(self, adopted: Adopted, now_ms: int) -> OpenVersion:
        """Only what is taken over is verified: after a rescale several shards share the files of one."""

        def is_wanted(state: str, file: RunFile) -> bool:
            return any(file.low <= high and low <= file.high for low, high in adopted.ranges.get(state, ()))

        shard = LocalShard(adopted.folder, self._schemas, self._clock)
        return shard._open(adopted.version, now_ms, True, is_wanted)

    def _link(
        self, adopted: Adopted, base: OpenVersion, state: str, names: Iterator[str], mapped: dict[str, RunData]
    ) -> list[tuple[int, list[Run]]]:
        """Take a state's files over. Per hash range its lower end, and the runs there, newest first."""
        columns = []
        for low, high in adopted.ranges.get(state, ()):
            runs = []
            for run in base.version.states.get(state, Layout()).runs:
                pieces = []
                for file in run.pieces:
                    first_hash, last_hash = max(low, run.low, file.low), min(high, file.high)
                    if first_hash > last_hash:
                        continue
                    clipped = replace(file, low=first_hash, high=last_hash)
                    data = base.mapped[state][file.file]
                    first, end = rows_of_piece(data.batch, run, clipped)
                    if first == end:
                        continue
                    name = next(names)
                    os.link(adopted.folder / file.file, self._folder / name, follow_symlinks=False)
                    pieces.append(replace(clipped, file=name))
                    mapped[name] = data
                if pieces:
                    runs.append(Run(tuple(pieces), 0, run.taken_ms))
            columns.append((low, runs))
        return columns

    def versions(self) -> list[StoredVersion]:
        """See `ShardStore.versions`."""
        try:
            self._check_folder()
            names = os.listdir(self._folder)
        except (OSError, ValueError):
            return []
        found = []
        for name in names:
            if name.endswith(".json") and _ID.match(name[:-5]):
                try:
                    v = self._read_version(name[:-5])
                except _UNREADABLE:
                    continue
                found.append(StoredVersion(v.version, v.snapshot_id, v.restored_from, sum(f.bytes for f in v.files)))
        return sorted(found, key=lambda v: (v.snapshot_id, v.version), reverse=True)

    def prune(self, keep: str, committed: str = "", *, epoch: str = "") -> None:
        """See `ShardStore.prune`."""
        versions = {name[:-5] for name in os.listdir(self._folder) if name.endswith(".json") and _ID.match(name[:-5])}
        kept_files: set[str] = set()
        old_files: set[str] = set()
        for version in versions:
            try:
                described = self._read_version(version)
            except _UNREADABLE:
                continue
            files = {file.file for file in described.files}
            if version in (keep, committed) or (described.parent == keep and epoch in ("", described.epoch)):
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

    def export(self, version: str) -> VersionFiles:
        """See `ShardStore.export`."""
        try:
            self._check_folder()
            body, described = self._read_description(version)
        except _UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        named = {file.file: self._digested(file) for file in described.files}
        files = tuple(LocalFile(f.file, f.bytes, f.digest, self._folder / f.file) for f in named.values())
        return VersionFiles(body.decode(), files)

    def _digested(self, file: RunFile) -> RunFile:
        """The file with its digest, for which it is read if need be. Raises LocalCopyUnusable."""
        if file.digest:
            return file
        try:
            body = self._checked(file)
        except (OSError, ValueError) as error:
            raise LocalCopyUnusable(f"{self._folder}: {error}") from error
        return replace(file, digest=hashlib.sha256(body).hexdigest())

    def install(self, version: str, description: str, files: Mapping[str, pa.Buffer]) -> None:
        """See `ShardStore.install`."""
        try:
            described = parse_description(description, version)
        except _UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version}: {error}") from error
        self._make_folder()
        for name in {file.file for file in described.files}:
            if name not in files:
                raise LocalCopyUnusable(f"version {version} lacks {name}")
            # Under a name of this process first: another task may install the same.
            temporary = self._folder / f".tmp-{version}-{os.getpid()}-{name}"
            try:
                _write_private(temporary, files[name])
                os.replace(temporary, self._folder / name)
            finally:
                temporary.unlink(missing_ok=True)
        self._write_description(version, description.encode())

    def discard(self) -> None:
        """Remove everything of this backend: another one serves now. Never fails."""
        try:
            self._check_folder()
            for name in os.listdir(self._folder):
                if _FILE.match(name) or (name.endswith(".json") and _ID.match(name[:-5])):
                    (self._folder / name).unlink(missing_ok=True)
        except (OSError, ValueError):
            return

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
        return self._read_description(version)[1]

    def _read_description(self, version: str) -> tuple[bytes, Version]:
        if not _ID.match(version):
            raise ValueError("not a version id")
        data = _read_no_follow(self._folder / f"{version}.json", _VERSION_BYTES_MAX)
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("the version file has another digest")
        return body, parse_description(body, version)

    def _write_version(self, described: Version) -> None:
        self._write_description(described.version, _described(described).encode())

    def _write_description(self, version: str, body: bytes) -> None:
        body = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        temporary = self._folder / f".tmp-{version}-{os.getpid()}.json"
        try:
            _write_private(temporary, body)
            os.replace(temporary, self._folder / f"{version}.json")
        finally:
            temporary.unlink(missing_ok=True)

    def _map(self, run: RunFile, schema: StateSchema, verify: bool) -> RunData:
        return read_run(self._checked(run, content=verify), run, schema)

    def _checked(self, file: RunFile, *, content: bool = True) -> pa.Buffer:
        """A file's bytes, mapped. Raises OSError or ValueError if they are not what was written, as far as that is
        looked at."""
        path = self._folder / file.file
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
            raise ValueError(f"{file.file} is not a file of {file.bytes} bytes")
        body = pa.memory_map(str(path)).read_buffer()
        if content and not _is_unaltered(body, file):
            raise ValueError(f"{file.file} was altered")
        return body

    def _write_run(self, name: str, batch: pa.RecordBatch, schema: StateSchema) -> tuple[RunFile, RunData]:
        order = due_order_of(batch) if schema.time == "due" else None
        data = RunData(batch, order)
        if order is not None:
            batch = pa.RecordBatch.from_arrays([*batch.columns, order], schema=_stored_schema(schema))
        written = _write_batch(self._folder / name, batch, digest=self._stored)
        hashes = hashes_of(batch)
        low, high = int(hashes[0]), int(hashes[-1])
        return RunFile(name, batch.num_rows, written.bytes, written.digest, low, high, written.check), data


def _write_batch(path: Path, batch: pa.RecordBatch, *, digest: bool) -> _HashedFile:
    """A batch as a new Arrow file; what was written."""
    descriptor = os.open(path, _NEW_FILE, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        sink = _HashedFile(file, digest)
        with pa.ipc.new_file(pa.PythonFile(sink, "w"), batch.schema) as writer:
            writer.write_batch(batch)
    return sink


def _is_unaltered(body: pa.Buffer, file: RunFile) -> bool:
    """Whether these bytes are those that were written."""
    if file.check:
        return bool(xxhash.xxh3_128_hexdigest(body) == file.check)
    return hashlib.sha256(body).hexdigest() == file.digest


class _HashedFile:
    """A file that is written once, and what was written: nothing is copied on the way."""

    def __init__(self, file: BinaryIO, digest: bool) -> None:
        self._file = file
        self._check = xxhash.xxh3_128()
        self._digest = hashlib.sha256() if digest else None
        self.bytes = 0
        self.closed = False

    def write(self, data: pa.Buffer | bytes) -> int:
        size = self._file.write(data)
        self._check.update(data)
        if self._digest is not None:
            self._digest.update(data)
        self.bytes += size
        return size

    def flush(self) -> None:
        """The owner of the file does it."""

    def close(self) -> None:
        """The owner of the file does it."""
        self.closed = True

    @property
    def check(self) -> str:
        return self._check.hexdigest()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest() if self._digest is not None else ""


def describe_whole(version: str, runs: Mapping[str, tuple[pa.Buffer, int]]) -> tuple[tuple[LocalFile, ...], str]:
    """The files and the description of a version that was never on a disk: per state one run (`encode_run`), and its
    rows."""
    layouts: dict[str, Layout] = {}
    files = []
    for number, (state, (body, rows)) in enumerate(runs.items()):
        digest, check = hashlib.sha256(body).hexdigest(), xxhash.xxh3_128_hexdigest(body)
        file = RunFile(f"{version}-{number}.arrow", rows, body.size, digest, check=check)
        layouts[state] = add_run(Layout(), file)
        files.append(LocalFile(file.file, file.bytes, file.digest, Path(file.file)))
    return tuple(files), _described(Version(version, "", layouts))


def _described(version: Version) -> str:
    return json.dumps({"format": _FORMAT, **fields_of(version)}, default=fields_of)


def encode_run(batch: pa.RecordBatch, schema: StateSchema) -> pa.Buffer:
    """The bytes of a run's file."""
    if schema.time == "due":
        batch = pa.RecordBatch.from_arrays([*batch.columns, due_order_of(batch)], schema=_stored_schema(schema))
    return _encoded(batch)


def _encoded(batch: pa.RecordBatch) -> pa.Buffer:
    # Counted first: a buffer that grows is copied each time.
    counted = pa.MockOutputStream()
    with pa.ipc.new_file(counted, batch.schema) as writer:
        writer.write_batch(batch)
    body = pa.allocate_buffer(counted.size())
    with pa.ipc.new_file(pa.FixedSizeBufferWriter(body), batch.schema) as writer:
        writer.write_batch(batch)
    return body


def read_run(source: pa.NativeFile | pa.Buffer, run: RunFile, schema: StateSchema) -> RunData:
    """The inverse of `encode_run`; the digest was compared before.

    Raises:
        ValueError, pyarrow.ArrowException: not such a file.
    """
    reader = pa.ipc.open_file(source)
    if reader.num_record_batches != 1:
        raise ValueError(f"{run.file} has {reader.num_record_batches} batches")
    batch = reader.get_batch(0)
    if not batch.schema.equals(_stored_schema(schema)) or batch.num_rows != run.rows:
        raise ValueError(f"{run.file} has other columns or rows")
    if schema.time != "due":
        return RunData(batch)
    return RunData(pa.RecordBatch.from_arrays(batch.columns[:-1], schema=schema.arrow), batch.columns[-1])


def parse_description(body: bytes | str, version: str) -> Version:
    """What a version consists of, from what the backend wrote of it.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError: it cannot be read.
    """
    described = json.loads(body)
    if described["format"] != _FORMAT or described["version"] != version:
        raise ValueError("another format or version")
    states = {str(state): _parse_layout(layout) for state, layout in described["states"].items()}
    found = Version(
        version,
        str(described["parent"]),
        states,
        int(described["snapshot_id"]),
        str(described["epoch"]),
        str(described["restored_from"]),
    )
    if any(not _FILE.match(file.file) for file in found.files):
        raise ValueError("a run has a foreign name")
    return found


def _stored_schema(schema: StateSchema) -> pa.Schema:
    """The columns of a local file."""
    return schema.arrow.append(pa.field(_DUE_ORDER, pa.int64())) if schema.time == "due" else schema.arrow


def cut_hash(inputs: Sequence[pa.RecordBatch], low: int, budget: int) -> int | None:
    """Where to end the next range of a merge, so that it reads about `budget` rows; None takes everything; pure.

    The hash is exclusive, and above `low`, so that every range makes progress. Found from evenly spaced samples.
    """
    total = sum(batch.num_rows for batch in inputs)
    if total <= budget:
        return None
    samples: list[Hashes] = []
    weights: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for batch in inputs:
        if batch.num_rows:
            picked = min(batch.num_rows, _SAMPLES)
            at = np.linspace(0, batch.num_rows - 1, picked).astype(np.int64)
            samples.append(hashes_of(batch)[at])
            weights.append(np.full(picked, batch.num_rows / picked))
    hashes = np.concatenate(samples)
    order = np.argsort(hashes)
    reached = np.searchsorted(np.cumsum(np.concatenate(weights)[order]), budget)
    later = hashes[order][int(reached) :]
    above = later[later > np.uint64(low)]
    return int(above[0]) if len(above) else None


def _newest_rows(layout: Layout) -> int:
    """Rows of the newest run that no merge writes."""
    outputs = {merge.start for merge in layout.merges}
    return next((run.rows for number, run in enumerate(layout.runs) if number not in outputs), 0)


def _low_end(column: tuple[int, list[Run]]) -> int:
    return column[0]


def _pieces(batches: Iterable[pa.RecordBatch], schema: StateSchema) -> Iterator[pa.RecordBatch]:
    """Batches put together to the pieces of one run."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            size += batch.nbytes
            # One that is large enough alone is not copied.
            if size >= _PIECE_BYTES or (len(waiting) == 1 and size >= _PIECE_BYTES // 4):
                yield waiting[0] if len(waiting) == 1 else concat(waiting, schema.arrow)
                waiting, size = [], 0
    if waiting:
        yield concat(waiting, schema.arrow)


def _parse_file(stored: Any) -> RunFile:
    low, high = int(stored["low"]), int(stored["high"])
    if not 0 <= low <= high <= HASH_MAX:
        raise ValueError("a run's range is none")
    file, digest, check = str(stored["file"]), str(stored["digest"]), str(stored.get("check", ""))
    return RunFile(file, int(stored["rows"]), int(stored["bytes"]), digest, low, high, check)


def _parse_layout(stored: Any) -> Layout:
    runs = tuple(
        Run(
            tuple(_parse_file(piece) for piece in run["pieces"]),
            int(run["low"]),
            None if run["taken_ms"] is None else int(run["taken_ms"]),
        )
        for run in stored["runs"]
    )
    merges = tuple(Merge(int(m["start"]), int(m["count"])) for m in stored["merges"])
    if any(not (m.start >= 0 and m.count > 0 and m.start + m.count < len(runs)) for m in merges):
        raise ValueError("a merge names runs that are not there")
    return Layout(runs, merges)


def _read_no_follow(path: Path, bytes_max: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise ValueError(f"{path.name} is too large")
    return body


def _write_private(path: Path, body: bytes | pa.Buffer) -> None:
    descriptor = os.open(path, _NEW_FILE, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
