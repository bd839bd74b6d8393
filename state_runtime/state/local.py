"""Local runs: the state of one shard of one operator on the host's disk, in immutable versions.

    <local dir>/state/<root id>-<job uid>/<operator>/<parallelism>-<shard>/
        <version>.json        the files of the version's runs (state/runs.py), with size, rows and check value
        <version>-<n>.arrow   Arrow IPC files, sorted by key hash (and entry), memory-mapped

A *version* is the state after one attempt of one task; its id is unique, and the driver learns it from the task's
acknowledgement. The manifest names the committed version. So a re-executed task (retry, speculation, stage re-run, or a
batch that is run again after a crash) starts from the right one, even if other versions are beside it.

Local versions are a copy: losing, truncating or altering them costs time, never data. Reading problems are reported as
`LocalCopyUnusable`, and the task restores from the primary store.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.base.clock import Clock
from state_runtime.base.limits import MIB
from state_runtime.state.backend import (
    NO_STAMP,
    NOTHING_BELOW,
    Adopted,
    Below,
    LocalCopyUnusable,
    LocalFile,
    Stamp,
    StoredVersion,
    VersionFiles,
)
from state_runtime.state.changed_rows import Changed, batches_of
from state_runtime.state.pieces import RunData, rows_of_piece
from state_runtime.state.reader import StateReader
from state_runtime.state.run_description import description_of, is_run_name, parse_description
from state_runtime.state.run_files import is_unaltered, read_run, write_run
from state_runtime.state.runs import (
    BUDGET_ROWS_MIN,
    Layout,
    Run,
    RunFile,
    Version,
    add_run,
    budget_rows,
    record_piece,
    side_by_side,
    start_merge,
)
from state_runtime.state.sealed_files import (
    UNREADABLE,
    check_private_folder,
    follows,
    is_abandoned,
    is_version_id,
    make_private_folder,
    read_sealed,
    sealed,
    stored_versions,
    write_private_file,
)
from state_runtime.state.table import (
    HASH_MAX,
    Hashes,
    StateSchema,
    bounded_slices,
    concat,
    fold,
    hashes_of,
    slice_hash_range,
)
from state_runtime.state.version import OpenVersion

__all__ = ["LocalShard", "cut_hash"]

_VERSION_BYTES_MAX = 1 << 20
# A restored run is written in pieces of this size, so that at most one piece of it is in private memory.
_PIECE_BYTES = 32 * MIB
_FIRST_NEW = 5000  # number of a version's first new run; lower numbers are outputs of merges
_SAMPLES = 128  # per file, to find where a merge's next range ends


class LocalShard:
    """The local versions of one shard of one operator.

    Several attempts of a task, also of different drivers, may use the folder at once: every file has one writer and a
    unique name, and `prune` only removes files that older versions name, or that were abandoned an hour ago.

    Args:
        with_digests: the SHA-256 of files is computed while they are written, because versions will be exported.
    """

    adopts_several = True  # files are stored beside each other
    lays_below = True  # in a separate run

    def __init__(
        self,
        folder: Path,
        schemas: Mapping[str, StateSchema],
        clock: Clock,
        *,
        stamp: Stamp = NO_STAMP,
        with_digests: bool = False,
        merge_rows_min: int = BUDGET_ROWS_MIN,
    ) -> None:
        self._stamp = stamp
        self._with_digests = with_digests
        self._merge_rows_min = merge_rows_min
        self._folder = folder
        self._schemas = schemas
        self._clock = clock

    def open(self, version: str, now_ms: int, *, verify: bool) -> OpenVersion:
        """Map a version's runs: see `ShardStore.open`."""
        return self._open(version, now_ms, verify, lambda state, file: True)

    def _open(self, version: str, now_ms: int, verify: bool, is_wanted: Callable[[str, RunFile], bool]) -> OpenVersion:
        """Map the wanted files of a version. Nothing is known of the others, and they must not be read."""
        try:
            check_private_folder(self._folder)
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
        except (*UNREADABLE, pa.ArrowException) as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        return OpenVersion(described, mapped, self._schemas, now_ms)

    def write(
        self,
        version: str,
        base: StateReader,
        changes: Mapping[str, Changed],
        *,
        now_ms: int,
        due_taken: Mapping[str, int],
        runs_max: int,
    ) -> None:
        """Write one new run per changed state: see `ShardStore.write`. A base that was not tidied is tidied first.

        The version file is written last, under a temporary name first: a crash leaves files that no version names.
        """
        base = self.tidied(version, base, now_ms=now_ms, runs_max=runs_max)
        make_private_folder(self._folder)
        with self._removed_if_it_fails(version):
            self._write(version, base, changes, due_taken)

    def tidied(self, version: str, base: StateReader, *, now_ms: int, runs_max: int) -> OpenVersion:
        """Do a bounded piece of the due merges: see `ShardStore.tidied`.

        Merges that reach the oldest run drop expired rows.
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
        make_private_folder(self._folder)
        names = (f"{version}-{number}.arrow" for number in itertools.count())
        mapped: dict[str, dict[str, RunData]] = {}
        with self._removed_if_it_fails(version):
            for state, layout in merging.items():
                # A budget as large as the newest epoch's changes keeps up with them.
                budget = budget_rows(layout, _newest_rows(layout), runs_max, self._merge_rows_min)
                mapped[state] = dict(base.mapped.get(state, {}))
                merging[state] = self._merge(layout, mapped[state], self._schemas[state], budget, names, now_ms)
        return base.tidied_as(version, merging, mapped)

    def _write(
        self,
        version: str,
        base: OpenVersion,
        changes: Mapping[str, Changed],
        due_taken: Mapping[str, int],
    ) -> None:
        names = (f"{version}-{number}.arrow" for number in itertools.count(_FIRST_NEW))
        states = dict(base.version.states)
        for state, through_ms in due_taken.items():
            # Before the new run is added: due rows that the epoch itself wrote were not handled yet.
            states[state] = states.get(state, Layout()).with_taken(through_ms)
        for state, change in changes.items():
            if change.num_rows == 0:
                continue
            files = [self._write_run(next(names), batch, self._schemas[state])[0] for batch in batches_of(change)]
            states[state] = add_run(states.get(state, Layout()), *files)
        if self._with_digests:
            # Computed once after the changelog was on, so that not every export has to.
            states = {state: layout.with_files(self._digested) for state, layout in states.items()}
        described = Version(
            version=version,
            parent=base.version.version,
            states=states,
            snapshot_id=self._stamp.snapshot_id,
            epoch=self._stamp.epoch,
        )
        self._write_version(described)

    def _merge(
        self,
        layout: Layout,
        mapped: dict[str, RunData],
        schema: StateSchema,
        budget: int,
        names: Iterator[str],
        now_ms: int,
    ) -> Layout:
        """Continue the merges under way, newest first, reading about `budget` rows in all. Written pieces are added to
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
            cut = list(itertools.islice(bounded_slices(parts), 2))
            if len(cut) > 1:
                parts, end = cut[0], min(int(hashes_of(batch)[0]) for batch in cut[1])
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
        below: Below = NOTHING_BELOW,
        snapshot_id: int = 0,
        restored_from: str = "",
    ) -> OpenVersion:
        """Write one run per state, in pieces, on top of the adopted files: see `ShardStore.write_restored`.

        Where nothing is below, removed and expired rows are not written.
        """
        taken_over = [(a, self._opened(a, now_ms)) for a in adopted]
        make_private_folder(self._folder)
        with self._removed_if_it_fails(version):
            return self._write_restored(version, states, now_ms, taken_over, below, snapshot_id, restored_from)

    def _write_restored(
        self,
        version: str,
        states: Mapping[str, pa.RecordBatch | Iterable[pa.RecordBatch]],
        now_ms: int,
        taken_over: Sequence[tuple[Adopted, OpenVersion]],
        below: Below,
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
            # The bottom first: reading it fetches the objects that the top is read from.
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
            version=version,
            parent="",
            states=layouts,
            snapshot_id=snapshot_id if restored_from else self._stamp.snapshot_id,
            epoch=self._stamp.epoch,
            restored_from=restored_from,
        )
        self._write_version(described)
        return OpenVersion(described, mapped, self._schemas, now_ms)

    def _write_pieces(
        self, batches: Iterable[pa.RecordBatch], schema: StateSchema, names: Iterator[str], mapped: dict[str, RunData]
    ) -> tuple[RunFile, ...]:
        """Write sorted batches as the files of one run, and map them into memory again, so that they are not held."""
        pieces = []
        for batch in _pieces(batches, schema):
            file, _ = self._write_run(next(names), batch, schema)
            mapped[file.file] = read_run(pa.memory_map(str(self._folder / file.file)), file, schema)
            pieces.append(file)
        return tuple(pieces)

    @contextmanager
    def _removed_if_it_fails(self, version: str) -> Iterator[None]:
        """Remove the files of a version that was not finished: a full disk would stay full otherwise."""
        try:
            yield
        except FileExistsError:
            raise  # the version exists already, and its files belong to another attempt
        except Exception:
            for name in os.listdir(self._folder):
                if name.startswith((f"{version}-", f".tmp-{version}")):
                    (self._folder / name).unlink(missing_ok=True)
            raise

    def _opened(self, adopted: Adopted, now_ms: int) -> OpenVersion:
        """Open an adopted version. Only its adopted files are verified: after a rescale several shards share files."""

        def is_wanted(state: str, file: RunFile) -> bool:
            return any(file.low <= high and low <= file.high for low, high in adopted.ranges.get(state, ()))

        shard = LocalShard(adopted.folder, self._schemas, self._clock)
        return shard._open(adopted.version, now_ms, True, is_wanted)

    def _link(
        self, adopted: Adopted, base: OpenVersion, state: str, names: Iterator[str], mapped: dict[str, RunData]
    ) -> list[tuple[int, list[Run]]]:
        """Take a state's files over. Return per hash range its lower end, and the runs there, newest first."""
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
            check_private_folder(self._folder)
            names = os.listdir(self._folder)
        except (OSError, ValueError):
            return []
        return stored_versions(_versions_of(names), self._read_version)

    def prune(self, keep: str, committed: str = "", *, epoch: str = "") -> None:
        """See `ShardStore.prune`."""
        versions = set(_versions_of(os.listdir(self._folder)))
        kept_files: set[str] = set()
        old_files: set[str] = set()
        for version in versions:
            try:
                described = self._read_version(version)
            except UNREADABLE:
                continue
            files = {file.file for file in described.files}
            if version in (keep, committed) or follows(described, keep, epoch):
                kept_files |= files | {f"{version}.json"}
            else:
                old_files |= files
        doomed = ({f"{v}.json" for v in versions} | old_files) - kept_files
        gone = {name[:16] for name in doomed if name.endswith(".json")}
        for name in os.listdir(self._folder):
            if not (is_run_name(name) or name.startswith(".tmp-")) or name in kept_files:
                continue
            if name[:16] in gone or is_abandoned(self._folder / name, self._clock):
                doomed.add(name)
        for name in doomed:
            (self._folder / name).unlink(missing_ok=True)

    def export(self, version: str) -> VersionFiles:
        """See `ShardStore.export`."""
        try:
            check_private_folder(self._folder)
            body, described = self._read_description(version)
        except UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        named = {file.file: self._digested(file) for file in described.files}
        files = tuple(LocalFile(f.file, f.bytes, f.digest, self._folder / f.file) for f in named.values())
        return VersionFiles(body.decode(), files)

    def _digested(self, file: RunFile) -> RunFile:
        """Return the file with its digest, reading it if needed. Raises LocalCopyUnusable."""
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
        except UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version}: {error}") from error
        make_private_folder(self._folder)
        for name in {file.file for file in described.files}:
            if name not in files:
                raise LocalCopyUnusable(f"version {version} lacks {name}")
            # Under a name of this process first: another task may install the same file.
            temporary = self._folder / f".tmp-{version}-{os.getpid()}-{name}"
            try:
                write_private_file(temporary, files[name])
                os.replace(temporary, self._folder / name)
            finally:
                temporary.unlink(missing_ok=True)
        self._write_description(version, description.encode())

    def discard(self) -> None:
        """Remove everything of this backend, because another one is used now. Never fails."""
        try:
            check_private_folder(self._folder)
            names = os.listdir(self._folder)
            for name in [*filter(is_run_name, names), *(f"{version}.json" for version in _versions_of(names))]:
                (self._folder / name).unlink(missing_ok=True)
        except (OSError, ValueError):
            return

    def _read_version(self, version: str) -> Version:
        return self._read_description(version)[1]

    def _read_description(self, version: str) -> tuple[bytes, Version]:
        if not is_version_id(version):
            raise ValueError("this is not a version id")
        body = read_sealed(self._folder / f"{version}.json", _VERSION_BYTES_MAX)
        return body, parse_description(body, version)

    def _write_version(self, described: Version) -> None:
        self._write_description(described.version, description_of(described).encode())

    def _write_description(self, version: str, body: bytes) -> None:
        temporary = self._folder / f".tmp-{version}-{os.getpid()}.json"
        try:
            write_private_file(temporary, sealed(body))
            os.replace(temporary, self._folder / f"{version}.json")
        finally:
            temporary.unlink(missing_ok=True)

    def _map(self, run: RunFile, schema: StateSchema, verify: bool) -> RunData:
        return read_run(self._checked(run, content=verify), run, schema)

    def _checked(self, file: RunFile, *, content: bool = True) -> pa.Buffer:
        """Return a file's bytes, mapped. Raises OSError or ValueError if the checked part differs from what was
        written."""
        path = self._folder / file.file
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
            raise ValueError(f"{file.file} is not a file of {file.bytes} bytes")
        body = pa.memory_map(str(path)).read_buffer()
        if content and not is_unaltered(body, file):
            raise ValueError(f"{file.file} was altered")
        return body

    def _write_run(self, name: str, batch: pa.RecordBatch, schema: StateSchema) -> tuple[RunFile, RunData]:
        return write_run(self._folder / name, batch, schema, digest=self._with_digests)


def cut_hash(inputs: Sequence[pa.RecordBatch], low: int, budget: int) -> int | None:
    """Return where to end the next range of a merge, so that it reads about `budget` rows; None takes all rows; pure.

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


def _versions_of(names: Iterable[str]) -> list[str]:
    """Return the versions that a folder's files describe."""
    return [name[:-5] for name in names if name.endswith(".json") and is_version_id(name[:-5])]


def _newest_rows(layout: Layout) -> int:
    """Return the rows of the newest run that no merge writes."""
    outputs = {merge.start for merge in layout.merges}
    return next((run.rows for number, run in enumerate(layout.runs) if number not in outputs), 0)


def _low_end(column: tuple[int, list[Run]]) -> int:
    return column[0]


def _pieces(batches: Iterable[pa.RecordBatch], schema: StateSchema) -> Iterator[pa.RecordBatch]:
    """Combine batches to the pieces of one run."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            size += batch.nbytes
            # A batch that is large enough alone is not copied.
            if size >= _PIECE_BYTES or (len(waiting) == 1 and size >= _PIECE_BYTES // 4):
                yield waiting[0] if len(waiting) == 1 else concat(waiting, schema.arrow)
                waiting, size = [], 0
    if waiting:
        yield concat(waiting, schema.arrow)
