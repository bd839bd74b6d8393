"""Local runs: the state of one shard of one operator on the host's disk, in immutable versions.

    <local dir>/<job uid>/<operator>/<parallelism>-<shard>/
        <version>.json        which files make the version's runs (state/runs.py), with size, rows and digest
        <version>-<n>.arrow   Arrow IPC files, sorted by key hash, memory-mapped

A *version* is the state after one attempt of one task; its id is unique, and the driver learns it from the task's
acknowledgement. Which version is the committed one is written in the manifest, so a re-executed task (retry, speculation,
stage re-run, or a batch that is run again after a crash) starts from the right one, whatever lies beside it.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.clock import Clock
from state_runtime.state.runs import (
    BUDGET_ROWS_MIN,
    Layout,
    Merge,
    Run,
    RunFile,
    add_run,
    budget_rows,
    record_piece,
    start_merge,
)
from state_runtime.state.table import HASH_MAX, Hashes, Mask, StateSchema, fold, hashes_of, lookup, slice_hash_range

__all__ = ["LocalCopyUnusable", "LocalShard", "OpenVersion", "Version", "cut_hash"]

_FORMAT = 2
_ID = re.compile(r"[0-9a-f]{16}\Z")
_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,4}\.arrow\Z")
_VERSION_BYTES_MAX = 1 << 20
# Files that no version names are leavings of a killed attempt; a live attempt needs its files for minutes at most.
_ORPHAN_AGE_S = 3600.0
_SAMPLES = 128  # per file, to find where a merge's next range ends


# Whatever a damaged JSON file can do to its reader.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class LocalCopyUnusable(Exception):
    """The local copy cannot serve; the reason is for metrics. Never leaves the task: the primary serves instead."""


@dataclass(frozen=True)
class Version:
    """One version of a shard's states."""

    version: str
    parent: str
    states: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def files(self) -> tuple[RunFile, ...]:
        """Every file of the version."""
        return tuple(file for layout in self.states.values() for file in layout.files)


class LocalShard:
    """The local versions of one shard of one operator.

    Several attempts of a task, also of different drivers, may use the folder at once: every file has one writer and a
    unique name, and `prune` only removes what older versions name, or what was abandoned an hour ago.
    """

    def __init__(
        self,
        folder: Path,
        schemas: Mapping[str, StateSchema],
        clock: Clock,
        *,
        merge_rows_min: int = BUDGET_ROWS_MIN,
    ) -> None:
        self._merge_rows_min = merge_rows_min
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
                state: {file.file: self._map(file, schema, verify) for file in described.states[state].files}
                for state, schema in self._schemas.items()
                if state in described.states
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
        """Write the version that follows `base`: one new run per changed state, and a bounded piece of the merges due.

        The version file is written last, under a temporary name first: a crash leaves files that no version names.

        Raises:
            OSError: disk full, read-only, … The epoch goes on without a local copy.
        """
        self._make_folder()
        names = (f"{version}-{number}.arrow" for number in itertools.count())
        states = dict(base.version.states)
        for state, change in changes.items():
            if change.num_rows == 0:
                continue
            # Written after the merges: small states merge the new run away in the same epoch.
            new = RunFile(next(names), change.num_rows, 0, "")
            layout = start_merge(add_run(states.get(state, Layout()), new), runs_max)
            batches = {**base.mapped.get(state, {}), new.file: change}
            budget = budget_rows(layout, change.num_rows, runs_max, self._merge_rows_min)
            layout = self._merge(layout, batches, self._schemas[state], budget, names)
            if new in layout.files:
                layout = layout.with_file(new, self._write_run(new.file, change))
            states[state] = layout
        described = Version(version, base.version.version, states)
        self._write_version(described)
        return described

    def _merge(
        self,
        layout: Layout,
        batches: Mapping[str, pa.RecordBatch],
        schema: StateSchema,
        budget: int,
        names: Iterator[str],
    ) -> Layout:
        """Take the merges under way further, newest first, reading about `budget` rows in all."""
        for older in range(len(layout.merges) - 1, -1, -1):
            # Counted from the oldest, because finishing a newer merge removes it from the front.
            current = layout.merges[len(layout.merges) - 1 - older]
            inputs = [
                slice_hash_range(batches[piece.file], run.low, HASH_MAX)
                for run in layout.inputs(current)
                for piece in run.pieces
            ]
            low = layout.inputs(current)[0].low
            end = cut_hash(inputs, low, budget)
            parts = [slice_hash_range(batch, low, HASH_MAX if end is None else end - 1) for batch in inputs]
            folded = fold(parts, schema, drop_deleted=layout.reaches_bottom(current))
            piece = self._write_run(next(names), folded) if folded.num_rows else None
            layout = record_piece(layout, current, piece, end)
            budget -= sum(part.num_rows for part in parts)
            if budget <= 0:
                break
        return layout

    def write_restored(self, version: str, restored: OpenVersion) -> OpenVersion:
        """Write a version from states that were rebuilt from the primary store (`OpenVersion.of_batches`).

        Raises:
            OSError: see `write`.
        """
        self._make_folder()
        layouts: dict[str, Layout] = {}
        mapped: dict[str, dict[str, pa.RecordBatch]] = {}
        for number, state in enumerate(self._schemas):
            layouts[state], mapped[state] = Layout(), {}
            for batch in restored.batches(state):
                file = self._write_run(f"{version}-{number}.arrow", batch)
                layouts[state], mapped[state] = add_run(Layout(), file), {file.file: batch}
        described = Version(version, "", layouts)
        self._write_version(described)
        return OpenVersion(described, mapped, self._schemas)

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
            files = {file.file for file in described.files}
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
        states = {str(state): _parse_layout(layout) for state, layout in described["states"].items()}
        found = Version(version, str(described["parent"]), states)
        if any(not _FILE.match(file.file) for file in found.files):
            raise ValueError("a run has a foreign name")
        return found

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
    """A version's runs, mapped and ready for look-up. Values of the mapped batches stay valid after files are unlinked.

    Attributes:
        mapped: per state the batches by file name.
    """

    def __init__(
        self,
        version: Version,
        mapped: Mapping[str, Mapping[str, pa.RecordBatch]],
        schemas: Mapping[str, StateSchema],
    ) -> None:
        self.version = version
        self.mapped = mapped
        self._schemas = schemas

    @staticmethod
    def of_batches(
        version: str, states: Mapping[str, pa.RecordBatch], schemas: Mapping[str, StateSchema]
    ) -> OpenVersion:
        """A version that exists only in memory: freshly restored, or the empty state."""
        layouts = {
            state: add_run(Layout(), RunFile(state, batch.num_rows, batch.nbytes, "")) if batch.num_rows else Layout()
            for state, batch in states.items()
        }
        mapped = {state: {state: batch} for state, batch in states.items()}
        return OpenVersion(Version(version, "", layouts), mapped, schemas)

    def batches(self, state: str) -> list[pa.RecordBatch]:
        """The batches of a state that hold live rows, newest first; those of one run have disjoint hash ranges."""
        layout = self.version.states.get(state, Layout())
        live = (
            slice_hash_range(self.mapped[state][piece.file], run.low, HASH_MAX)
            for run in layout.runs
            for piece in run.pieces
        )
        return [batch for batch in live if batch.num_rows]

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
        for run in self.batches(state):
            if len(open_keys) == 0:
                break
            # Only the wanted keys inside the batch's hash range: pieces of one run have neighbouring ranges.
            stored = hashes_of(run)
            open_hashes = hashes if len(open_keys) == count else hashes[open_keys]
            first = int(np.searchsorted(open_hashes, stored[0], side="left"))
            last = int(np.searchsorted(open_hashes, stored[-1], side="right"))
            if first == last:
                continue
            inside = open_keys[first:last]
            wanted = list(keys) if len(inside) == count else [k.take(pa.array(inside)) for k in keys]
            at = lookup(run, schema, open_hashes[first:last], wanted)
            hit = at >= 0
            taken = pa.array(at[hit])
            # A tombstone ends the search for its key just as a value does.
            live = np.logical_not(run.column(1).take(taken).to_numpy(zero_copy_only=False))
            rows = np.flatnonzero(live)
            position[inside[hit][rows]] = offset + np.arange(len(rows))
            offset += len(rows)
            pieces.append([v.take(taken.take(pa.array(rows))) for v in schema.values_of(run)])
            open_keys = np.concatenate([open_keys[:first], inside[~hit], open_keys[last:]])
        found = position >= 0
        index = pa.array(position, mask=~found)
        values = [
            pa.concat_arrays([piece[i] for piece in pieces]).take(index) if offset else pa.nulls(count, f.type)
            for i, f in enumerate(schema.values)
        ]
        return found, values


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


def _parse_layout(stored: Any) -> Layout:
    runs = tuple(
        Run(
            tuple(RunFile(str(p["file"]), int(p["rows"]), int(p["bytes"]), str(p["digest"])) for p in run["pieces"]),
            int(run["low"]),
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
