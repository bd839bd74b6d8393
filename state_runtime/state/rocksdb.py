"""The other backend: the state of one shard of one operator in RocksDB, in immutable versions.

    <local dir>/state/<root id>-<job uid>/<operator>/<parallelism>-<shard>/rocksdb/
        <version>.rocksdb/
            version.json    the version's files with size and digest, its parent, its states
            db/             a RocksDB database: CURRENT, MANIFEST, *.sst

For states that are much larger than what an epoch touches, and that do not fit the page cache: a look-up reads a few
blocks, an epoch writes what it changed and a share of compaction. The Arrow backend (state/local.py) is quicker where
most of the state is in memory. Both promise the same (state/backend.py) and exchange Arrow batches with the rest.

A version never changes. The next one begins as hard links to its table files, which RocksDB never alters, and copies of
the two small files that it does; it is opened, changed, flushed, compacted, closed, described and renamed to its final
name. A crash leaves a folder under another name.

Keys, big-endian, so that a scan is in order:

    rows     2·state, key hash (8), length of the key (4), key, and in the entries layout: entry (8), entry columns
    by time  2·state + 1, due (8, sign bit flipped), and the row's key from its hash on; no value

Key and entry columns are rows of `RowCodec` in canonical form: equal keys have equal bytes, so keys whose hashes
collide are told apart by RocksDB itself, and no key's rows begin with another key. A value is a row of the time, if the
state has one, and the value columns. An entry of the index by time is only believed if the row says so too: a row that
is overwritten or removed leaves its entry behind, until the time has come.

Rows that have expired are hidden from readers, and removed by a sweep over a bounded number of rows per epoch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DbClosedError,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from state_runtime.base.clock import Clock
from state_runtime.base.errors import check
from state_runtime.base.fields import fields_of
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
from state_runtime.state.rowcodec import (
    RowCodec,
    binary_of_bytes,
    bytes_of_rows,
    join_binary,
    numbers_of_rows,
    pieces_of_rows,
)
from state_runtime.state.table import (
    CLEAR_MARKER,
    HASH_MAX,
    Hashes,
    Mask,
    Positions,
    StateSchema,
    concat,
    entries_of,
    expired,
    fold,
    hashes_of,
    int64_values,
)
from state_runtime.state.version import OpenVersion

__all__ = ["RocksReader", "RocksShard"]

_FORMAT = 2
_ID = re.compile(r"[0-9a-f]{16}\Z")
_FOLDER = re.compile(r"([0-9a-f]{16})\.rocksdb\Z")
_SCRATCH = re.compile(r"\.new-[0-9a-f]{16}(?:-[0-9]+)?\Z")
_DB_FILE = re.compile(r"(?:CURRENT|MANIFEST-[0-9]{6,20}|[0-9]{6,20}\.sst)\Z")
# rocksdict notes raw mode here, and writes the same again, in place, whenever a database is opened: another attempt may
# see any beginning of it. Other text could change how keys are read.
_CONFIG = "rocksdict-config.json"
_DESCRIPTION = "version.json"
_DESCRIPTION_BYTES_MAX = 1 << 22
# Folders under another name are leavings of a killed attempt; a live attempt needs its own for minutes at most.
_ORPHAN_AGE_S = 3600.0

_PLACE_HASH, _PLACE_LENGTH, _PLACE_KEY = 2, 10, 14  # in a row's key
_PLACE_ROW = 10  # in an entry of the index by time
_SIGN = np.uint64(1 << 63)
_BATCH_ROWS = 1 << 16  # per RocksDB write batch: a few megabytes
_SWEEP_ROWS_MIN = 4096  # rows looked over per epoch for expired ones: a millisecond or two
_STALE_ROWS_FIRST, _STALE_ROWS_MAX = 16, 4096  # of the index by time that `next_due` looks past
_BLOCK_CACHE_BYTES = 32 << 20
_BLOOM_BITS = 10
_STATES_MAX = 1 << 14
_MARKS = "marks"  # a column family, see `_settle`

# Whatever a damaged JSON file can do to its reader.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class _File:
    """One file of the database; the digest is SHA-256."""

    name: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class _State:
    """One state of a version.

    Attributes:
        number: what its keys begin with; never given to another state of the shard.
        columns: its Arrow schema as text: another one is another state.
        cursor: where the sweep for expired rows goes on, a key in hexadecimal; "" is the beginning.
    """

    number: int
    columns: str
    cursor: str


@dataclass(frozen=True)
class _Version:
    version: str
    parent: str
    config: str
    files: tuple[_File, ...]
    states: Mapping[str, _State]
    snapshot_id: int = 0
    epoch: str = ""
    restored_from: str = ""


class RocksShard:
    """The versions of one shard of one operator: a `ShardStore`.

    Several attempts of a task, also of different drivers, may use the folder at once: every version is written by one
        attempt
    in a folder of its own, and `prune` only removes what is older, or what was abandoned an hour ago.
    """

    def __init__(self, folder: Path, schemas: Mapping[str, StateSchema], clock: Clock, stamp: Stamp = NO_STAMP) -> None:
        check(len(schemas) < _STATES_MAX, f"{len(schemas)} states of one operator")
        self._stamp = stamp
        self._folder = folder
        self._schemas = schemas
        self._clock = clock

    def open(self, version: str, now_ms: int, *, verify: bool) -> RocksReader:
        """Open a version's database, read-only: see `ShardStore.open`."""
        try:
            _check_private(self._folder)
            described = self._read_version(version)
            folder = self._folder / f"{version}.rocksdb" / "db"
            _check_files(folder, described, verify=verify)
            states = _with_new_states(described.states, self._schemas)
        except _UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        with _reading(folder):
            db = Rdict(str(folder), _options(), access_type=AccessType.read_only())
        return RocksReader(db, folder, replace(described, states=states), self._schemas, now_ms)

    def tidied(self, version: str, base: StateReader, *, now_ms: int, runs_max: int) -> StateReader:
        """RocksDB compacts when a version is written: see `ShardStore.tidied`."""
        return base

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
        """Apply an epoch's changes to a copy of `base`: see `ShardStore.write`.

        Costs what is changed, a sweep of about twice as many rows for expired ones, and a share of compaction.
        """
        if not isinstance(base, RocksReader):
            raise TypeError(f"a version follows one that this backend opened, not a {type(base).__name__}")
        described = base.described
        states = dict(described.states)
        with self._scratch(version) as scratch:
            _link(base.folder, scratch / "db", described.files)
            with _database(scratch / "db", runs_max) as db:
                for state, schema in self._schemas.items():
                    codec = base.codecs[state]
                    change = changes.get(state)
                    if state in due_taken:
                        _forget_due(db, codec, due_taken[state])
                    if schema.time == "expires":
                        rows = 2 * change.num_rows if change is not None else 0
                        doomed, cursor = base.sweep(state, states[state].cursor, max(_SWEEP_ROWS_MIN, rows), now_ms)
                        _remove(db, doomed)
                        states[state] = replace(states[state], cursor=cursor)
                    if change is not None:
                        _apply(db, codec, change)
                _settle(db)
            written = _Version(
                version, described.version, "", described.files, states, self._stamp.snapshot_id, self._stamp.epoch
            )
            self._publish(scratch, written, base.folder)

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
    ) -> RocksReader:
        """A new database, or one that begins with another's tables: see `ShardStore.write_restored`.

        At most one is taken over, with the same ranges of every state: two databases cannot be put into one. What it
            holds
        outside of the ranges is removed, a range at a time. Without one, what is removed or has expired is not written.
        """
        check(not below, "a database has no runs to lay anything below")
        bases = [(a, self._opened(a, now_ms)) for a in adopted]
        check(len(bases) <= 1, "one database is taken over at most")
        base = bases[0][1] if bases else None
        numbered = _with_new_states(base.described.states if base is not None else {}, self._schemas)
        files = base.described.files if base is not None else ()
        with self._scratch(version) as scratch:
            if base is not None:
                _link(base.folder, scratch / "db", files)
            with _database(scratch / "db", 4 if base is not None else 1) as db:
                for state, schema in self._schemas.items():
                    codec = _StateCodec(schema, numbered[state].number)
                    for taken, _ in bases:
                        _keep_ranges(db, codec, taken.ranges.get(state, ()))
                    given = states.get(state, ())
                    for batch in [given] if isinstance(given, pa.RecordBatch) else given:
                        if base is None:
                            batch = fold([batch], schema, drop_deleted=True, now_ms=now_ms)
                        _apply(db, codec, batch)
                _settle(db)
            known_as = snapshot_id if restored_from else self._stamp.snapshot_id
            written = _Version(version, "", "", files, numbered, known_as, self._stamp.epoch, restored_from)
            self._publish(scratch, written, base.folder if base is not None else None)
        try:
            return self.open(version, now_ms, verify=False)
        except LocalCopyUnusable as error:
            raise OSError(f"what was written cannot be read: {error}") from error

    def _opened(self, adopted: Adopted, now_ms: int) -> RocksReader:
        return RocksShard(adopted.folder, self._schemas, self._clock).open(adopted.version, now_ms, verify=True)

    def export(self, version: str) -> VersionFiles:
        """See `ShardStore.export`."""
        try:
            _check_private(self._folder)
            body, described = self._read_description(version)
        except _UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        folder = self._folder / f"{version}.rocksdb" / "db"
        return VersionFiles(
            body.decode(), tuple(LocalFile(f.name, f.bytes, f.digest, folder / f.name) for f in described.files)
        )

    def install(self, version: str, description: str, files: Mapping[str, pa.Buffer]) -> None:
        """See `ShardStore.install`."""
        try:
            described = _parse_description(description, version)
        except _UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version}: {error}") from error
        if missing := {file.name for file in described.files} - set(files):
            raise LocalCopyUnusable(f"version {version} lacks {sorted(missing)[0]}")
        final = self._folder / f"{version}.rocksdb"
        if final.exists():
            return
        with self._scratch(f"{version}-{os.getpid()}") as scratch:
            for file in described.files:
                _write_private(scratch / "db" / file.name, files[file.name])
            body = description.encode()
            _write_private(scratch / _DESCRIPTION, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            try:
                os.rename(scratch, final)
            except OSError:
                if not final.exists():
                    raise
                shutil.rmtree(scratch, ignore_errors=True)  # another task was quicker

    def versions(self) -> list[StoredVersion]:
        """See `ShardStore.versions`."""
        try:
            _check_private(self._folder)
            named = [match[1] for name in os.listdir(self._folder) if (match := _FOLDER.match(name))]
        except (OSError, ValueError):
            return []
        found = []
        for name in named:
            try:
                v = self._read_version(name)
            except _UNREADABLE:
                continue
            found.append(StoredVersion(v.version, v.snapshot_id, v.restored_from, sum(f.bytes for f in v.files)))
        return sorted(found, key=lambda v: (v.snapshot_id, v.version), reverse=True)

    def prune(self, keep: str, committed: str = "", *, epoch: str = "") -> None:
        """See `ShardStore.prune`."""
        now_s = self._clock.now_ms() / 1000
        for name in os.listdir(self._folder):
            named = _FOLDER.match(name)
            if named is not None and named[1] != committed and not self._is_kept(named[1], keep, epoch):
                _remove_folder(self._folder / name)
            elif _SCRATCH.match(name):
                try:
                    abandoned = now_s - (self._folder / name).lstat().st_mtime > _ORPHAN_AGE_S
                except FileNotFoundError:
                    continue  # its attempt has just ended
                if abandoned:
                    _remove_folder(self._folder / name)

    def _is_kept(self, version: str, keep: str, epoch: str) -> bool:
        if version == keep:
            return True
        try:
            described = self._read_version(version)
            return described.parent == keep and epoch in ("", described.epoch)
        except _UNREADABLE:
            return False

    def _read_version(self, version: str) -> _Version:
        return self._read_description(version)[1]

    def _read_description(self, version: str) -> tuple[bytes, _Version]:
        if not _ID.match(version):
            raise ValueError("not a version id")
        folder = self._folder / f"{version}.rocksdb"
        _check_private(folder)
        _check_private(folder / "db")
        data = _read_no_follow(folder / _DESCRIPTION, _DESCRIPTION_BYTES_MAX)
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("the version file has another digest")
        return body, _parse_description(body, version)

    @contextmanager
    def _scratch(self, version: str) -> Iterator[Path]:
        """A private folder that `_publish` renames; removed if that does not happen."""
        # The shard's own folder too: the other backend would find it open to others, and refuse it for good.
        self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        try:
            _check_private(self._folder)
        except ValueError as error:
            raise PermissionError(f"{self._folder}: {error}") from error
        scratch = self._folder / f".new-{version}"
        scratch.mkdir(mode=0o700)
        try:
            (scratch / "db").mkdir(mode=0o700)
            with _writing(scratch):
                yield scratch
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)  # whatever stays is removed by `prune` an hour later
            raise

    def _publish(self, scratch: Path, described: _Version, base: Path | None) -> None:
        """Describe a closed database, and give it the name under which it is found; the rename is atomic."""
        config = _read_no_follow(scratch / "db" / _CONFIG, _DESCRIPTION_BYTES_MAX).decode()
        described = replace(described, config=config, files=_describe_files(scratch / "db", base, described.files))
        body = json.dumps({"format": _FORMAT, **fields_of(described)}, default=fields_of).encode()
        body = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        _write_private(scratch / _DESCRIPTION, body)
        os.rename(scratch, self._folder / f"{described.version}.rocksdb")


def _parse_description(body: bytes | str, version: str) -> _Version:
    described = json.loads(body)
    if described["format"] != _FORMAT or described["version"] != version:
        raise ValueError("another format or version")
    files = tuple(_File(str(f["name"]), int(f["bytes"]), str(f["digest"])) for f in described["files"])
    if any(not _DB_FILE.match(file.name) for file in files):
        raise ValueError("a file has a foreign name")
    states = {
        str(name): _State(int(s["number"]), str(s["columns"]), bytes.fromhex(s["cursor"]).hex())
        for name, s in described["states"].items()
    }
    if any(not 0 <= state.number < _STATES_MAX for state in states.values()):
        raise ValueError("a state has a foreign number")
    return _Version(
        version,
        str(described["parent"]),
        str(described["config"]),
        files,
        states,
        int(described["snapshot_id"]),
        str(described["epoch"]),
        str(described["restored_from"]),
    )


class RocksReader:
    """A version of a shard's states in RocksDB: a `StateReader`. Stays readable after the version's files are unlinked.

    Every method may raise LocalCopyUnusable: RocksDB compares a block's checksum when it reads it.

    Attributes:
        described: which version it is.
        folder: of the database.
        codecs: per state how it is stored.
    """

    def __init__(
        self, db: Rdict, folder: Path, described: _Version, schemas: Mapping[str, StateSchema], now_ms: int
    ) -> None:
        self._db = db
        self._schemas = schemas
        self._now_ms = now_ms
        self.folder = folder
        self.described = described
        self.codecs = {state: _StateCodec(schema, described.states[state].number) for state, schema in schemas.items()}

    def find(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[Mask, list[pa.Array]]:
        """See `StateReader.find`."""
        codec = self.codecs[state]
        return self._answer(codec, codec.row_keys(hashes, keys))

    def find_entries(
        self,
        state: str,
        hashes: Hashes,
        keys: Sequence[pa.Array],
        entries: Hashes,
        entry_columns: Sequence[pa.Array],
    ) -> tuple[Mask, list[pa.Array]]:
        """See `StateReader.find_entries`."""
        codec = self.codecs[state]
        return self._answer(codec, codec.row_keys(hashes, keys, entries, entry_columns))

    def _answer(self, codec: _StateCodec, row_keys: pa.Array) -> tuple[Mask, list[pa.Array]]:
        with _reading(self.folder):
            stored = self._get(bytes_of_rows(row_keys))
            found: Mask = stored.is_valid().to_numpy(zero_copy_only=False)
            columns = codec.values.decode(stored.drop_null())
        at = np.cumsum(found) - 1
        if codec.schema.time:
            # The time is stored first and answered last.
            columns = [*columns[1:], columns[0]]
        if codec.schema.time == "expires":
            gone = np.flatnonzero(found)[expired(columns[-1], self._now_ms)]
            found[gone] = False
        index = pa.array(at, mask=~found)
        return found, [column.take(index) for column in columns]

    def _get(self, keys: list[bytes]) -> pa.Array:
        wanted: list[Any] = keys  # of the types that rocksdict takes, one
        return pa.array(self._db.get(wanted) if keys else [], pa.large_binary())

    def entry_bounds(self, state: str, hashes: Hashes) -> Positions:
        """See `StateReader.entry_bounds`: exact but for expired rows and keys that share a hash."""
        codec = self.codecs[state]
        ends = self._scan_each(bytes_of_rows(codec.hash_prefixes(hashes)), [], None)
        counted = np.array([0, *ends], dtype=np.int64)
        return counted[1:] - counted[:-1]

    def read_entries(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[pa.RecordBatch, Positions]:
        """See `StateReader.read_entries`."""
        codec = self.codecs[state]
        stored: list[bytes] = []
        values: list[bytes] = []
        ends = self._scan_each(bytes_of_rows(codec.key_prefixes(hashes, keys)), stored, values)
        batch, live = self._batch(codec, stored, values)
        kept = np.concatenate(([0], np.cumsum(live)))
        return batch, kept[np.array([0, *ends], dtype=np.int64)].astype(np.int64)

    def iter_entries(
        self, state: str, key_hash: int, key: Sequence[pa.Array], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        """See `StateReader.iter_entries`."""
        check(rows_max > 0, f"rows_max is {rows_max}")
        codec = self.codecs[state]
        (prefix,) = bytes_of_rows(codec.key_prefixes(np.array([key_hash], dtype=np.uint64), key))
        for stored, values in self._scan(prefix, _after(prefix), rows_max):
            batch, _ = self._batch(codec, stored, values)
            if batch.num_rows:
                yield batch

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        """See `StateReader.due`."""
        codec = self.codecs[state]
        entries: list[bytes] = []
        for stored, _ in self._scan(codec.due_prefix, codec.due_bound(through_ms), None):
            entries += stored
        batch, _ = self._due_rows(codec, entries)
        order = np.lexsort((_entries(batch, codec.schema), hashes_of(batch), _times(batch)))
        return batch.take(pa.array(order))

    def next_due(self, state: str, after_ms: int | None = None) -> int | None:
        """See `StateReader.next_due`. Looks past rows that were removed since, but not past more than a few
        thousand."""
        codec = self.codecs[state]
        looked_at, last = 0, None
        start = codec.due_prefix if after_ms is None else codec.due_bound(after_ms)
        for stored, _ in self._scan(start, _after(codec.due_prefix), _STALE_ROWS_FIRST):
            batch, due = self._due_rows(codec, stored)
            if batch.num_rows:
                return int(_times(batch).min())
            looked_at, last = looked_at + len(stored), int(due[-1])
            if looked_at >= _STALE_ROWS_MAX:
                return last
        return None

    def whole(self, state: str) -> pa.RecordBatch:
        """See `StateReader.whole`."""
        return concat(list(self.read_range(state, 0, HASH_MAX, _BATCH_ROWS)), self._schemas[state].arrow)

    def read_range(self, state: str, low: int, high: int, rows_max: int) -> Iterator[pa.RecordBatch]:
        """The rows in a closed range of hashes, sorted by (hash, entry), so many at a time; expired ones are left out.

        Different keys of one hash are in order of their bytes, so their entries are sorted here: rows of one hash come
            together.
        """
        codec = self.codecs[state]
        start = codec.row_prefix + low.to_bytes(8, "big")
        end = codec.row_prefix + (high + 1).to_bytes(8, "big") if high < HASH_MAX else _after(codec.row_prefix)
        waiting: pa.RecordBatch | None = None
        for stored, values in self._scan(start, end, rows_max):
            batch, _ = self._batch(codec, stored, values)
            waiting = batch if waiting is None else concat([waiting, batch], codec.schema.arrow)
            hashes = hashes_of(waiting)
            whole = int(np.searchsorted(hashes, hashes[-1], side="left")) if len(hashes) else 0
            if whole:
                yield _in_order(waiting.slice(0, whole), codec.schema)
                waiting = waiting.slice(whole)
        if waiting is not None and waiting.num_rows:
            yield _in_order(waiting, codec.schema)

    def overlaid(
        self, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int] | None = None
    ) -> OpenVersion:
        """See `StateReader.overlaid`."""
        return OpenVersion.on_top_of(self, changes, self._schemas, self._now_ms, due_taken)

    def sweep(self, state: str, cursor: str, rows_max: int, now_ms: int) -> tuple[list[bytes], str]:
        """Look about `rows_max` rows over, from a cursor on.

        Returns:
            The keys of those that have expired, and the next cursor.
        """
        codec = self.codecs[state]
        start = max(bytes.fromhex(cursor), codec.row_prefix)
        for stored, values in self._scan(start, _after(codec.row_prefix), rows_max):
            with _reading(self.folder):
                (times,) = codec.values.decode(pa.array(values, pa.large_binary()), first=1)
            doomed = [stored[at] for at in np.flatnonzero(expired(times, now_ms)).tolist()]
            return doomed, (stored[-1] + b"\0").hex() if len(stored) == rows_max else ""
        return [], ""

    def _due_rows(self, codec: _StateCodec, entries: list[bytes]) -> tuple[pa.RecordBatch, Positions]:
        """The rows that some entries of the index by time stand for, if they are still due then; and all the entries'
        times."""
        with _reading(self.folder):
            index = pa.array(entries, pa.large_binary())
            due = (numbers_of_rows(index, 2, ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)
            rows = bytes_of_rows(codec.row_keys_of(index))
            values = self._get(rows)
            there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
            batch = codec.batch(pa.array(rows, pa.large_binary()).take(pa.array(there)), values.drop_null())
        times = batch.column(batch.num_columns - 1)
        still = (int64_values(times) == due[there]) & times.is_valid().to_numpy(zero_copy_only=False)
        return batch.filter(pa.array(still)), due

    def _batch(self, codec: _StateCodec, stored: list[bytes], values: list[bytes]) -> tuple[pa.RecordBatch, Mask]:
        """Stored rows as a batch of the live ones, and which those are."""
        with _reading(self.folder):
            batch = codec.batch(pa.array(stored, pa.large_binary()), pa.array(values, pa.large_binary()))
        if codec.schema.time != "expires":
            return batch, np.ones(batch.num_rows, dtype=np.bool_)
        live: Mask = ~expired(codec.schema.times_of(batch), self._now_ms)
        return batch.filter(pa.array(live)) if not bool(live.all()) else batch, live

    def _scan_each(self, prefixes: list[bytes], keys: list[bytes], values: list[bytes] | None) -> list[int]:
        """Read all rows with some prefixes; appends to `keys` and `values`.

        Returns:
            How many rows there are up to the end of each prefix.
        """
        ends, count = [], 0
        with _reading(self.folder):
            rows = self._db.iter()
            for prefix in prefixes:
                rows.seek(prefix)
                while rows.valid():
                    key = rows.key()
                    if not key.startswith(prefix):
                        break
                    count += 1
                    if values is not None:
                        keys.append(key)
                        values.append(rows.value())
                    rows.next()
                else:
                    # At the end, or before a block that is damaged: only the status tells.
                    rows.status()
                ends.append(count)
        return ends

    def _scan(self, start: bytes, end: bytes, rows_max: int | None) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and values from `start` up to, without, `end`, so many at a time; never none."""
        rows = self._db.iter()
        rows.seek(start)
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            with _reading(self.folder):
                while rows.valid() and (rows_max is None or len(keys) < rows_max):
                    key = rows.key()
                    if key >= end:
                        break
                    keys.append(key)
                    values.append(rows.value())
                    rows.next()
                if not rows.valid():
                    rows.status()
            if not keys:
                return
            yield keys, values


def _in_order(batch: pa.RecordBatch, schema: StateSchema) -> pa.RecordBatch:
    if schema.entries is None:
        return batch
    hashes, entries = hashes_of(batch), entries_of(batch)
    if bool(np.all((hashes[:-1] < hashes[1:]) | (entries[:-1] <= entries[1:]))):
        return batch
    return batch.take(pa.array(np.lexsort((entries, hashes))))


class _StateCodec:
    """How the rows of one state are stored: see the module's docstring."""

    def __init__(self, schema: StateSchema, number: int) -> None:
        self.schema = schema
        self.row_prefix = (2 * number).to_bytes(2, "big")
        self.due_prefix = (2 * number + 1).to_bytes(2, "big")
        self._keys = RowCodec([f.type for f in schema.keys], canonical=True)
        self._entries = RowCodec([f.type for f in schema.entries or ()], canonical=True)
        times = [pa.int64()] if schema.time else []
        self.values = RowCodec([*times, *(f.type for f in schema.values)])

    def hash_prefixes(self, hashes: Hashes) -> pa.Array:
        """What the rows of some hashes begin with."""
        head = np.empty((len(hashes), _PLACE_LENGTH), dtype=np.uint8)
        head[:, :_PLACE_HASH] = np.frombuffer(self.row_prefix, dtype=np.uint8)
        head[:, _PLACE_HASH:] = _big_endian(hashes)
        return binary_of_bytes(head)

    def key_prefixes(self, hashes: Hashes, keys: Sequence[pa.Array]) -> pa.Array:
        """What the rows of some keys begin with, and no other key's."""
        encoded = self._keys.encode(keys, len(hashes))
        lengths = np.array(encoded.buffers()[1]).view(np.int64) if len(hashes) else np.zeros(1, dtype=np.int64)
        head = np.diff(lengths[encoded.offset : encoded.offset + len(hashes) + 1]).astype(">u4")
        return join_binary(
            self.hash_prefixes(hashes), binary_of_bytes(head.view(np.uint8).reshape(len(hashes), 4)), encoded
        )

    def row_keys(
        self,
        hashes: Hashes,
        keys: Sequence[pa.Array],
        entries: Hashes | None = None,
        entry_columns: Sequence[pa.Array] = (),
    ) -> pa.Array:
        """The keys under which rows are stored."""
        prefixes = self.key_prefixes(hashes, keys)
        if entries is None:
            return prefixes
        encoded = self._entries.encode(entry_columns, len(hashes))
        return join_binary(prefixes, binary_of_bytes(_big_endian(entries)), encoded)

    def row_keys_of(self, index: pa.Array) -> pa.Array:
        """The rows' keys behind entries of the index by time."""
        rows = pieces_of_rows(index, _PLACE_ROW)
        return join_binary(_repeated(self.row_prefix, len(rows)), rows)

    def due_keys(self, due: Positions, row_keys: pa.Array) -> pa.Array:
        """The entries of the index by time for some rows."""
        times = binary_of_bytes(_big_endian(due.view(np.uint64) ^ _SIGN))
        return join_binary(_repeated(self.due_prefix, len(due)), times, pieces_of_rows(row_keys, _PLACE_HASH))

    def due_bound(self, through_ms: int) -> bytes:
        """Where the entries of the index by time that are due by then end."""
        return _after(self.due_prefix + (through_ms + (1 << 63)).to_bytes(8, "big"))

    def batch(self, rows: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Stored rows as a batch, in the order given.

        Raises:
            ValueError: not rows of this state.
        """
        schema = self.schema
        hashes = numbers_of_rows(rows, _PLACE_HASH, ">u8").astype(np.uint64)
        lengths = numbers_of_rows(rows, _PLACE_LENGTH, ">u4").astype(np.int64)
        keys = self._keys.decode(pieces_of_rows(rows, _PLACE_KEY, lengths))
        columns = self.values.decode(values)
        entries, entry_columns = None, []
        if schema.entries is not None:
            entries = numbers_of_rows(rows, _PLACE_KEY + lengths, ">u8").astype(np.uint64)
            entry_columns = self._entries.decode(pieces_of_rows(rows, _PLACE_KEY + 8 + lengths))
        times = columns.pop(0) if schema.time else None
        return schema.batch(hashes, None, keys, columns, entries=entries, entry_columns=entry_columns, times=times)


def _apply(db: Rdict, codec: _StateCodec, changes: pa.RecordBatch) -> None:
    """Write a sorted batch of changes. A clear marker comes before its key's rows, and is applied before them."""
    for first in range(0, changes.num_rows, _BATCH_ROWS):
        batch = changes.slice(first, _BATCH_ROWS)
        schema = codec.schema
        hashes, keys = hashes_of(batch), schema.keys_of(batch)
        deleted = batch.column(1).to_numpy(zero_copy_only=False)
        entries = entries_of(batch) if schema.entries is not None else None
        cleared = deleted & (entries == CLEAR_MARKER) if entries is not None else np.zeros(len(deleted), dtype=np.bool_)
        writes = WriteBatch(raw_mode=True)
        if bool(cleared.any()):
            for prefix in bytes_of_rows(codec.key_prefixes(hashes, keys).filter(pa.array(cleared))):
                writes.delete_range(prefix, _after(prefix))
        row_keys = codec.row_keys(hashes, keys, entries, schema.entry_columns_of(batch))
        for key in bytes_of_rows(row_keys.filter(pa.array(deleted & ~cleared))):
            writes.delete(key)
        live = batch.filter(pa.array(~deleted))
        live_keys = row_keys.filter(pa.array(~deleted))
        times = [schema.times_of(live)] if schema.time else []
        values = codec.values.encode([*times, *schema.values_of(live)], live.num_rows)
        for key, value in zip(bytes_of_rows(live_keys), bytes_of_rows(values), strict=True):
            writes.put(key, value)
        if schema.time == "due":
            ever = times[0].is_valid()
            for key in bytes_of_rows(codec.due_keys(int64_values(times[0].filter(ever)), live_keys.filter(ever))):
                writes.put(key, b"")
        db.write(writes, _unlogged())


def _keep_ranges(db: Rdict, codec: _StateCodec, ranges: Sequence[tuple[int, int]]) -> None:
    """Remove the rows outside of some closed ranges of hashes, which are in order.

    The index by time is in no order of hashes; of a row that is gone its entry is not believed, and goes when its time
    has come.
    """
    begin = codec.row_prefix
    for low, high in ranges:
        _remove_range(db, begin, codec.row_prefix + low.to_bytes(8, "big"))
        begin = codec.row_prefix + (high + 1).to_bytes(8, "big") if high < HASH_MAX else _after(codec.row_prefix)
    _remove_range(db, begin, _after(codec.row_prefix))


def _remove_range(db: Rdict, begin: bytes, end: bytes) -> None:
    if begin < end:
        db.delete_range(begin, end, _unlogged())


def _remove(db: Rdict, keys: list[bytes]) -> None:
    writes = WriteBatch(raw_mode=True)
    for key in keys:
        writes.delete(key)
    db.write(writes, _unlogged())


def _forget_due(db: Rdict, codec: _StateCodec, through_ms: int) -> None:
    """Take what was handled out of the index by time; the rows stay."""
    db.delete_range(codec.due_prefix, codec.due_bound(through_ms), _unlogged())


def _settle(db: Rdict) -> None:
    """Write out what is in memory, and wait for the compaction that is under way.

    Closing a database cancels its compactions, so that one which takes longer than an epoch would never end. A manual
    compaction is exclusive: it begins when those under way have ended, and none begins before it. That of a family
        which
    holds one key does nothing else.
    """
    db.flush()
    marks = db.get_column_family(_MARKS)
    marks.put(b"settled", b"", _unlogged())
    marks.flush()
    marks.compact_range(None, None)


def _options(runs_max: int = 4) -> Options:
    """Raw mode: bytes only. Without it, rocksdict would load pickles."""
    options = Options(raw_mode=True)
    blocks = BlockBasedOptions()
    blocks.set_bloom_filter(_BLOOM_BITS, False)
    blocks.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_level_zero_file_num_compaction_trigger(max(2, runs_max))
    options.set_keep_log_file_num(1)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    return options


def _unlogged() -> WriteOptions:
    """Without a write-ahead log: a version that was not finished is thrown away."""
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[assignment, method-assign]  # a property; rocksdict's stub says method
    return options


@contextmanager
def _database(folder: Path, runs_max: int) -> Iterator[Rdict]:
    families = {"default": _options(runs_max), _MARKS: _options(2)}
    db = Rdict(str(folder), _options(runs_max), column_families=families)
    try:
        yield db
    finally:
        db.close()


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """RocksDB's errors, and of what does not add up, as LocalCopyUnusable."""
    try:
        yield
    except Exception as error:
        if not _is_of_the_database(error) and not isinstance(error, ValueError | pa.ArrowException):
            raise
        raise LocalCopyUnusable(f"{folder}: {error}") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """RocksDB's errors, and of a base that cannot be read, as OSError."""
    try:
        yield
    except Exception as error:
        if not _is_of_the_database(error) and not isinstance(error, LocalCopyUnusable):
            raise
        raise OSError(f"{folder}: {error}") from error


def _is_of_the_database(error: Exception) -> bool:
    # rocksdict raises what RocksDB reports as plain exceptions.
    return type(error) is Exception or isinstance(error, DbClosedError)


# --- files -------------------------------------------------------------------------------------------------------


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{folder.name} is not a private folder of this user")


def _check_files(folder: Path, described: _Version, *, verify: bool) -> None:
    """The folder holds a version's files and no others: RocksDB would also replay a log that somebody put there."""
    names = set(os.listdir(folder))
    if names - {_CONFIG} != {file.name for file in described.files}:
        raise ValueError("the database has other files")
    config = _read_no_follow(folder / _CONFIG, _DESCRIPTION_BYTES_MAX) if _CONFIG in names else b""
    if not described.config.encode().startswith(config):
        raise ValueError(f"{_CONFIG} is not what was written")
    for file in described.files:
        status = (folder / file.name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
            raise ValueError(f"{file.name} is not a file of {file.bytes} bytes")
        # Tables have checksums of their own; the small files decide which tables count, and cost nothing.
        if (verify or not file.name.endswith(".sst")) and _digest(folder / file.name) != file.digest:
            raise ValueError(f"{file.name} has another digest")


def _link(base: Path, target: Path, files: Sequence[_File]) -> None:
    for file in files:
        if file.name.endswith(".sst"):
            os.link(base / file.name, target / file.name, follow_symlinks=False)
        else:
            _write_private(target / file.name, _read_no_follow(base / file.name, file.bytes))


def _describe_files(folder: Path, base: Path | None, known: Sequence[_File]) -> tuple[_File, ...]:
    """The files of a closed database. What only an open one needs is removed; linked tables keep their digest."""
    digests = {file.name: file.digest for file in known}
    files = []
    for name in sorted(os.listdir(folder)):
        if not _DB_FILE.match(name):
            (folder / name).unlink()
            continue
        path = folder / name
        linked = base is not None and name.endswith(".sst") and name in digests
        same = linked and base is not None and path.samefile(base / name)
        files.append(_File(name, path.lstat().st_size, digests[name] if same else _digest(path)))
    return tuple(files)


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another attempt is removing it too; what both leave, the next `prune` removes


def _digest(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_no_follow(path: Path, bytes_max: int) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise ValueError(f"{path.name} is too large")
    return body


def _write_private(path: Path, body: bytes | pa.Buffer) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)


def _with_new_states(stored: Mapping[str, _State], schemas: Mapping[str, StateSchema]) -> dict[str, _State]:
    """A version's states and those that the operator has got since.

    Raises:
        ValueError: a state has other columns by now.
    """
    states = dict(stored)
    for name, schema in schemas.items():
        columns = schema.arrow.to_string(truncate_metadata=False)
        if name not in states:
            number = 1 + max((state.number for state in states.values()), default=-1)
            states[name] = _State(number, columns, "")
        elif states[name].columns != columns:
            raise ValueError(f"state {name} has other columns")
    return states


# --- bytes -------------------------------------------------------------------------------------------------------


def _after(prefix: bytes) -> bytes:
    """The first key that is above every key with a prefix. There is one: no state has the largest number."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def _big_endian(numbers: Hashes) -> Any:
    return numbers.astype(">u8").view(np.uint8).reshape(len(numbers), 8)


def _repeated(prefix: bytes, count: int) -> pa.Array:
    return binary_of_bytes(np.tile(np.frombuffer(prefix, dtype=np.uint8), (count, 1)))


def _times(batch: pa.RecordBatch) -> Positions:
    return int64_values(batch.column(batch.num_columns - 1))


def _entries(batch: pa.RecordBatch, schema: StateSchema) -> Hashes:
    return entries_of(batch) if schema.entries is not None else np.zeros(batch.num_rows, dtype=np.uint64)
