"""Local runs: the state of one shard of one operator on the host's disk, in immutable versions.

    <local dir>/<job uid>/<operator>/<parallelism>-<shard>/
        <version>.json        which files make the version's runs (state/runs.py), with size, rows and digest
        <version>-<n>.arrow   Arrow IPC files, sorted by key hash (and entry), memory-mapped

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.clock import Clock
from state_runtime.state.backend import LocalCopyUnusable
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
    start_merge,
)
from state_runtime.state.table import HASH_MAX, Hashes, StateSchema, fold, hashes_of, slice_hash_range
from state_runtime.state.version import OpenVersion, RunData, Version, due_order_of

__all__ = ["LocalShard", "cut_hash"]

_FORMAT = 3
_DUE_ORDER = "due_order"  # only in local files: positions of the rows in order of `due`, see RunData
_ID = re.compile(r"[0-9a-f]{16}\Z")
_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,4}\.arrow\Z")
_VERSION_BYTES_MAX = 1 << 20
# Files that no version names are leavings of a killed attempt; a live attempt needs its files for minutes at most.
_ORPHAN_AGE_S = 3600.0
_SAMPLES = 128  # per file, to find where a merge's next range ends


# Whatever a damaged JSON file can do to its reader.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


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

    def open(self, version: str, now_ms: int, *, verify: bool) -> OpenVersion:
        """Map a version's runs: see `ShardStore.open`."""
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
        """One new run per changed state, and a bounded piece of the merges due: see `ShardStore.write`.

        The version file is written last, under a temporary name first: a crash leaves files that no version names. Merges that
        reach the oldest run drop what has expired.
        """
        if not isinstance(base, OpenVersion):
            raise TypeError(f"a version follows one that this backend opened, not a {type(base).__name__}")
        self._make_folder()
        names = (f"{version}-{number}.arrow" for number in itertools.count())
        states = dict(base.version.states)
        for state, through_ms in due_taken.items():
            # Before the new run is added: what the epoch itself wrote, nobody has looked at yet.
            states[state] = states.get(state, Layout()).with_taken(through_ms)
        for state, change in changes.items():
            if change.num_rows == 0:
                continue
            # Written after the merges: small states merge the new run away in the same epoch.
            new = RunFile(next(names), change.num_rows, 0, "")
            layout = start_merge(add_run(states.get(state, Layout()), new), runs_max)
            batches = {file: data.batch for file, data in base.mapped.get(state, {}).items()}
            batches[new.file] = change
            budget = budget_rows(layout, change.num_rows, runs_max, self._merge_rows_min)
            layout = self._merge(layout, batches, self._schemas[state], budget, names, now_ms)
            if new in layout.files:
                written, _ = self._write_run(new.file, change, self._schemas[state])
                layout = layout.with_file(new, written)
            states[state] = layout
        self._write_version(Version(version, base.version.version, states))

    def _merge(
        self,
        layout: Layout,
        batches: Mapping[str, pa.RecordBatch],
        schema: StateSchema,
        budget: int,
        names: Iterator[str],
        now_ms: int,
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
            folded = fold(parts, schema, drop_deleted=layout.reaches_bottom(current), now_ms=now_ms)
            piece = self._write_run(next(names), folded, schema)[0] if folded.num_rows else None
            layout = record_piece(layout, current, piece, end)
            budget -= sum(part.num_rows for part in parts)
            if budget <= 0:
                break
        return layout

    def write_restored(self, version: str, states: Mapping[str, pa.RecordBatch], now_ms: int) -> OpenVersion:
        """One run per state: see `ShardStore.write_restored`. What has expired is not written."""
        self._make_folder()
        layouts: dict[str, Layout] = {}
        mapped: dict[str, dict[str, RunData]] = {}
        for number, (state, schema) in enumerate(self._schemas.items()):
            layouts[state], mapped[state] = Layout(), {}
            batch = fold([states[state]] if state in states else [], schema, drop_deleted=True, now_ms=now_ms)
            if batch.num_rows:
                file, data = self._write_run(f"{version}-{number}.arrow", batch, schema)
                layouts[state], mapped[state] = add_run(Layout(), file), {file.file: data}
        described = Version(version, "", layouts)
        self._write_version(described)
        return OpenVersion(described, mapped, self._schemas, now_ms)

    def prune(self, keep: str) -> None:
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

    def _map(self, run: RunFile, schema: StateSchema, verify: bool) -> RunData:
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
        if not batch.schema.equals(_stored_schema(schema)) or batch.num_rows != run.rows:
            raise ValueError(f"{run.file} has other columns or rows")
        if schema.time != "due":
            return RunData(batch)
        return RunData(pa.RecordBatch.from_arrays(batch.columns[:-1], schema=schema.arrow), batch.columns[-1])

    def _write_run(self, name: str, batch: pa.RecordBatch, schema: StateSchema) -> tuple[RunFile, RunData]:
        order = due_order_of(batch) if schema.time == "due" else None
        data = RunData(batch, order)
        if order is not None:
            batch = pa.RecordBatch.from_arrays([*batch.columns, order], schema=_stored_schema(schema))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        body = sink.getvalue()
        _write_private(self._folder / name, body)
        return RunFile(name, batch.num_rows, body.size, hashlib.sha256(body).hexdigest()), data


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


def _parse_layout(stored: Any) -> Layout:
    runs = tuple(
        Run(
            tuple(RunFile(str(p["file"]), int(p["rows"]), int(p["bytes"]), str(p["digest"])) for p in run["pieces"]),
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
