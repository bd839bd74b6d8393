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

How rows become keys and values is said in state/rocksdb_codec.py. Rows that have expired are
hidden from readers, and removed by a sweep over a bounded number of rows per epoch.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from state_runtime.base.clock import Clock
from state_runtime.base.digests import digest_of_file
from state_runtime.base.errors import check
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
from state_runtime.state.reader import StateReader
from state_runtime.state.rocksdb_codec import STATES_MAX, StateCodec
from state_runtime.state.rocksdb_database import database, open_read_only, settle, writing
from state_runtime.state.rocksdb_description import (
    RocksFile,
    RocksVersion,
    description_of,
    is_database_file,
    parse_description,
    with_new_states,
)
from state_runtime.state.rocksdb_reader import RocksReader
from state_runtime.state.rocksdb_writer import apply_changes, forget_due, keep_ranges, remove_keys
from state_runtime.state.sealed_files import (
    UNREADABLE,
    check_private_folder,
    follows,
    is_abandoned,
    is_version_id,
    make_private_folder,
    read_sealed,
    read_without_links,
    sealed,
    stored_versions,
    write_private_file,
)
from state_runtime.state.table import StateSchema, fold

__all__ = ["RocksShard"]

_FOLDER = re.compile(r"([0-9a-f]{16})\.rocksdb\Z")
_SCRATCH = re.compile(r"\.new-[0-9a-f]{16}(?:-[0-9]+)?\Z")
# rocksdict notes raw mode here, and writes the same again, in place, whenever a database is opened: another attempt may
# see any beginning of it. Other text could change how keys are read.
_CONFIG = "rocksdict-config.json"
_DESCRIPTION = "version.json"
_DESCRIPTION_BYTES_MAX = 1 << 22
_SWEEP_ROWS_MIN = 4096  # rows looked over per epoch for expired ones: a millisecond or two


class RocksShard:
    """The versions of one shard of one operator: a `ShardStore`.

    Several attempts of a task, also of different drivers, may use the folder at once: every version is written by one
    attempt in a folder of its own, and `prune` only removes what is older, or what was abandoned an hour ago.
    """

    adopts_several = False  # two databases cannot be put into one
    lays_below = False

    def __init__(self, folder: Path, schemas: Mapping[str, StateSchema], clock: Clock, stamp: Stamp = NO_STAMP) -> None:
        check(
            len(schemas) < STATES_MAX,
            f"an operator has {len(schemas)} states; this backend keeps fewer than {STATES_MAX}",
        )
        self._stamp = stamp
        self._folder = folder
        self._schemas = schemas
        self._clock = clock

    def open(self, version: str, now_ms: int, *, verify: bool) -> RocksReader:
        """Open a version's database, read-only: see `ShardStore.open`."""
        try:
            check_private_folder(self._folder)
            described = self._read_version(version)
            folder = self._folder / f"{version}.rocksdb" / "db"
            _check_files(folder, described, verify=verify)
            states = with_new_states(described.states, self._schemas)
        except UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        return RocksReader(open_read_only(folder), folder, replace(described, states=states), self._schemas, now_ms)

    def tidied(self, version: str, base: StateReader, *, now_ms: int, runs_max: int) -> StateReader:
        """RocksDB compacts when a version is written: see `ShardStore.tidied`."""
        return base

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
        """Apply an epoch's changes to a copy of `base`: see `ShardStore.write`.

        Costs what is changed, a sweep of about twice as many rows for expired ones, and a share of compaction.
        """
        if not isinstance(base, RocksReader):
            raise TypeError(f"a version follows one that this backend opened, not a {type(base).__name__}")
        described = base.described
        states = dict(described.states)
        with self._scratch(version) as scratch:
            _link(base.folder, scratch / "db", described.files)
            with database(scratch / "db", runs_max) as db:
                for state, schema in self._schemas.items():
                    codec = base.codecs[state]
                    change = changes.get(state)
                    if state in due_taken:
                        forget_due(db, codec, due_taken[state])
                    if schema.time == "expires":
                        rows = 2 * change.num_rows if change is not None else 0
                        doomed, cursor = base.sweep(state, states[state].cursor, max(_SWEEP_ROWS_MIN, rows), now_ms)
                        remove_keys(db, doomed)
                        states[state] = replace(states[state], cursor=cursor)
                    for batch in batches_of(change) if change is not None else ():
                        apply_changes(db, codec, batch)
                settle(db)
            written = RocksVersion(
                version=version,
                parent=described.version,
                config="",
                files=described.files,
                states=states,
                snapshot_id=self._stamp.snapshot_id,
                epoch=self._stamp.epoch,
            )
            self._publish(scratch, written, base.folder)

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
    ) -> RocksReader:
        """A new database, or one that begins with another's tables: see `ShardStore.write_restored`.

        What the other holds outside of the ranges is removed, a range at a time. Without another, what is removed or
        has expired is not written.
        """
        bases = [(a, self._opened(a, now_ms)) for a in adopted]
        check(len(bases) <= 1, f"{len(bases)} databases cannot be put into one")
        check(not below, "a database has no runs that could lie below its rows")
        base = bases[0][1] if bases else None
        numbered = with_new_states(base.described.states if base is not None else {}, self._schemas)
        files = base.described.files if base is not None else ()
        with self._scratch(version) as scratch:
            if base is not None:
                _link(base.folder, scratch / "db", files)
            with database(scratch / "db", 4 if base is not None else 1) as db:
                for state, schema in self._schemas.items():
                    codec = StateCodec(schema, numbered[state].number)
                    for taken, _ in bases:
                        keep_ranges(db, codec, taken.ranges.get(state, ()))
                    given = states.get(state, ())
                    for batch in [given] if isinstance(given, pa.RecordBatch) else given:
                        if base is None:
                            batch = fold([batch], schema, drop_deleted=True, now_ms=now_ms)
                        apply_changes(db, codec, batch)
                settle(db)
            written = RocksVersion(
                version=version,
                parent="",
                config="",
                files=files,
                states=numbered,
                snapshot_id=snapshot_id if restored_from else self._stamp.snapshot_id,
                epoch=self._stamp.epoch,
                restored_from=restored_from,
            )
            self._publish(scratch, written, base.folder if base is not None else None)
        try:
            return self.open(version, now_ms, verify=False)
        except LocalCopyUnusable as error:
            raise OSError(f"its own files cannot be read back: {error}") from error

    def _opened(self, adopted: Adopted, now_ms: int) -> RocksReader:
        return RocksShard(adopted.folder, self._schemas, self._clock).open(adopted.version, now_ms, verify=True)

    def export(self, version: str) -> VersionFiles:
        """See `ShardStore.export`."""
        try:
            check_private_folder(self._folder)
            body, described = self._read_description(version)
        except UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version} in {self._folder}: {error}") from error
        folder = self._folder / f"{version}.rocksdb" / "db"
        return VersionFiles(
            body.decode(), tuple(LocalFile(f.name, f.bytes, f.digest, folder / f.name) for f in described.files)
        )

    def install(self, version: str, description: str, files: Mapping[str, pa.Buffer]) -> None:
        """See `ShardStore.install`."""
        try:
            described = parse_description(description, version)
        except UNREADABLE as error:
            raise LocalCopyUnusable(f"version {version}: {error}") from error
        if missing := {file.name for file in described.files} - set(files):
            raise LocalCopyUnusable(f"version {version} lacks {sorted(missing)[0]}")
        final = self._folder / f"{version}.rocksdb"
        if final.exists():
            return
        with self._scratch(f"{version}-{os.getpid()}") as scratch:
            for file in described.files:
                write_private_file(scratch / "db" / file.name, files[file.name])
            write_private_file(scratch / _DESCRIPTION, sealed(description.encode()))
            try:
                os.rename(scratch, final)
            except OSError:
                if not final.exists():
                    raise
                shutil.rmtree(scratch, ignore_errors=True)  # another task was quicker

    def versions(self) -> list[StoredVersion]:
        """See `ShardStore.versions`."""
        try:
            check_private_folder(self._folder)
            named = [match[1] for name in os.listdir(self._folder) if (match := _FOLDER.match(name))]
        except (OSError, ValueError):
            return []
        return stored_versions(named, self._read_version)

    def prune(self, keep: str, committed: str = "", *, epoch: str = "") -> None:
        """See `ShardStore.prune`."""
        for name in os.listdir(self._folder):
            named = _FOLDER.match(name)
            if (named is not None and named[1] != committed and not self._is_kept(named[1], keep, epoch)) or (
                _SCRATCH.match(name) and is_abandoned(self._folder / name, self._clock)
            ):
                _remove_folder(self._folder / name)

    def _is_kept(self, version: str, keep: str, epoch: str) -> bool:
        if version == keep:
            return True
        try:
            return follows(self._read_version(version), keep, epoch)
        except UNREADABLE:
            return False

    def _read_version(self, version: str) -> RocksVersion:
        return self._read_description(version)[1]

    def _read_description(self, version: str) -> tuple[bytes, RocksVersion]:
        if not is_version_id(version):
            raise ValueError("this is not a version id")
        folder = self._folder / f"{version}.rocksdb"
        check_private_folder(folder)
        check_private_folder(folder / "db")
        body = read_sealed(folder / _DESCRIPTION, _DESCRIPTION_BYTES_MAX)
        return body, parse_description(body, version)

    @contextmanager
    def _scratch(self, version: str) -> Iterator[Path]:
        """A private folder that `_publish` renames; removed if that does not happen."""
        # The shard's own folder too: the other backend would find it open to others, and refuse it for good.
        self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_private_folder(self._folder)
        scratch = self._folder / f".new-{version}"
        scratch.mkdir(mode=0o700)
        try:
            (scratch / "db").mkdir(mode=0o700)
            with writing(scratch):
                yield scratch
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)  # whatever stays is removed by `prune` an hour later
            raise

    def _publish(self, scratch: Path, described: RocksVersion, base: Path | None) -> None:
        """Describe a closed database, and give it the name under which it is found; the rename is atomic."""
        config = read_without_links(scratch / "db" / _CONFIG, _DESCRIPTION_BYTES_MAX).decode()
        described = replace(described, config=config, files=_describe_files(scratch / "db", base, described.files))
        write_private_file(scratch / _DESCRIPTION, sealed(description_of(described).encode()))
        os.rename(scratch, self._folder / f"{described.version}.rocksdb")


def _check_files(folder: Path, described: RocksVersion, *, verify: bool) -> None:
    """The folder holds a version's files and no others: RocksDB would also replay a log that somebody put there."""
    names = set(os.listdir(folder))
    if names - {_CONFIG} != {file.name for file in described.files}:
        raise ValueError("the folder of the database has other files than the version names")
    config = read_without_links(folder / _CONFIG, _DESCRIPTION_BYTES_MAX) if _CONFIG in names else b""
    if not described.config.encode().startswith(config):
        raise ValueError(f"{_CONFIG} has another digest than when it was written")
    for file in described.files:
        status = (folder / file.name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
            raise ValueError(f"{file.name} is not a file of {file.bytes} bytes")
        # Tables have checksums of their own; the small files decide which tables count, and cost nothing.
        if (verify or not file.name.endswith(".sst")) and digest_of_file(folder / file.name) != file.digest:
            raise ValueError(f"{file.name} was altered: it has another digest")


def _link(base: Path, target: Path, files: Sequence[RocksFile]) -> None:
    for file in files:
        if file.name.endswith(".sst"):
            os.link(base / file.name, target / file.name, follow_symlinks=False)
        else:
            write_private_file(target / file.name, read_without_links(base / file.name, file.bytes))


def _describe_files(folder: Path, base: Path | None, known: Sequence[RocksFile]) -> tuple[RocksFile, ...]:
    """The files of a closed database. What only an open one needs is removed; linked tables keep their digest."""
    digests = {file.name: file.digest for file in known}
    files = []
    for name in sorted(os.listdir(folder)):
        if not is_database_file(name):
            (folder / name).unlink()
            continue
        path = folder / name
        linked = base is not None and name.endswith(".sst") and name in digests
        same = linked and base is not None and path.samefile(base / name)
        files.append(RocksFile(name, path.lstat().st_size, digests[name] if same else digest_of_file(path)))
    return tuple(files)


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another attempt is removing it too; what both leave, the next `prune` removes
