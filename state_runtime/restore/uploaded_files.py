"""Files of shards that tasks uploaded because the changelog is off, read as the state of any hash range.

They are below all segments and tables. `snapshot/shard_files.py` is the listing that names them. Arrow runs are mapped
and sliced; a RocksDB database is written to a scratch folder and scanned. A restore of the same shape and backend needs
neither: there the files become a local version unchanged (`install_shard`).
"""

from __future__ import annotations

import base64
import binascii
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from state_runtime.base.errors import CorruptManifest, CorruptSegment
from state_runtime.base.limits import SHARD_FILES_BYTES_MAX
from state_runtime.changelog.versions import StateVersions, check_dropped
from state_runtime.restore.objects import HostObjects, WantedObject
from state_runtime.snapshot.manifest import Manifest, OperatorEntry
from state_runtime.snapshot.shard_files import ShardFiles, ShardListing, StoredFile
from state_runtime.state.backend import LocalCopyUnusable, ShardStore
from state_runtime.state.backends import open_rocksdb
from state_runtime.state.pieces import rows_of_piece
from state_runtime.state.run_description import parse_description
from state_runtime.state.run_files import read_run
from state_runtime.state.runs import Layout, Run
from state_runtime.state.table import StateSchema, slice_hash_range
from state_runtime.store import Store

__all__ = ["Bottom", "Objects", "Still", "direct", "install_shard", "read_listing", "stored_bytes"]

_ROWS = 1 << 17
_NAMED = "is named by a snapshot's listing of files"


class Still:
    """The clock of a reader that needs no time."""

    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return 0.0


class Objects(Protocol):
    """Reads objects below a job root; see `HostObjects.read`."""

    def read(self, wanted: WantedObject) -> pa.Buffer: ...


def direct(root: Store) -> HostObjects:
    """Return objects from the store itself, for tools without a folder on this host."""
    return HostObjects(lambda: root, None, 0, Still())


def read_listing(objects: Objects, manifest: Manifest) -> ShardListing | None:
    """Read the listing that a snapshot names; None if it names none.

    Raises:
        MissingFile, CorruptSegment, CorruptManifest: it cannot be trusted. StoreUnavailable: try again.
    """
    entry = manifest.shards
    if entry is None:
        return None
    wanted = WantedObject(entry.path, entry.bytes, entry.digest, SHARD_FILES_BYTES_MAX)
    return ShardListing.decode(objects.read(wanted).to_pybytes(), entry, manifest.job_uids)


def stored_bytes(objects: Objects, file: StoredFile) -> pa.Buffer:
    """Return a file of a version, checked.

    Raises:
        MissingFile, CorruptSegment: see `HostObjects.read`. CorruptManifest: the listing's own copy is damaged.
    """
    if file.path:
        return objects.read(WantedObject(file.path, file.bytes, file.digest))
    try:
        body = base64.b64decode(file.content, validate=True)
    except binascii.Error as error:
        raise CorruptManifest(f"file {file.name!r} {_NAMED}, which is damaged: {error}") from error
    if len(body) != file.bytes:
        raise CorruptManifest(f"file {file.name!r} {_NAMED}, which is damaged: it has {len(body)} bytes")
    return pa.py_buffer(body)


class Bottom:
    """One operator's states in files of shards. Every method may raise the errors of `read_listing` and `stored_bytes`.

    Args:
        entry: the description to read by.
        scratch: a folder of this host for databases; None: the system's folder for temporary files.
    """

    def __init__(
        self, objects: Objects, listing: ShardListing, entry: OperatorEntry, scratch: Path | None = None
    ) -> None:
        self._objects = objects
        self._listing = listing
        self._entry = entry
        self._scratch = scratch

    def wanted(self, low: int, high: int) -> list[WantedObject]:
        """Return the objects that hold rows of a range, to be fetched together."""
        shards = self._listing.of_operator(self._entry.uid, low, high)
        return [WantedObject(f.path, f.bytes, f.digest) for s in shards for f in s.files if f.path]

    def check(self, states: Collection[str]) -> None:
        """Check that all listed states are known, or were dropped.

        Raises:
            CorruptSegment: a listed state is unknown, and was not dropped.
        """
        for shard in self._listing.shards:
            if shard.operator == self._entry.uid and shard.snapshot_id >= self._entry.since:
                for state in shard.columns:
                    if state not in states:
                        check_dropped(self._entry, state, shard.snapshot_id, f"the listing of shard {shard.shard}")

    def sources(self, state: str, versions: StateVersions, low: int, high: int) -> list[Iterator[pa.RecordBatch]]:
        """Return a state in a closed range as sorted sources, newest first, in the newest columns, with tombstones."""
        columns = [
            [_current(batches, versions, shard) for batches in self.runs(shard, state, low, high)]
            for shard in self.shards(state, versions, low, high)
        ]
        depth = max((len(runs) for runs in columns), default=0)
        # Shards have neighbouring ranges, so their runs of the same age are one sorted source.
        return [_chained([runs[age] for runs in columns if age < len(runs)]) for age in range(depth)]

    def shards(self, state: str, versions: StateVersions, low: int, high: int) -> list[ShardFiles]:
        """Return the shards that hold rows of a state in a closed range."""
        listed = self._listing.of_operator(self._entry.uid, low, high)
        return [s for s in listed if state in s.columns and s.snapshot_id >= versions.since]

    def runs(self, shard: ShardFiles, state: str, low: int, high: int) -> list[Iterator[pa.RecordBatch]]:
        """Return a shard's sorted runs of a state in a closed range, newest first, in the columns that they were
        written with."""
        low, high = max(low, shard.hash_range[0]), min(high, shard.hash_range[1])
        if shard.backend == "rocksdb":
            return [self._scanned(shard, state, low, high)]
        where = _name(shard)
        schema = self._listing.schema(shard, state)
        try:
            layout = parse_description(shard.description, shard.version).states.get(state, Layout())
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptManifest(f"{where} {_NAMED}, which is damaged: {error}") from error
        files = {f.name: f for f in shard.files}
        return [self._mapped(run, files, schema, low, high, where) for run in layout.runs]

    def _mapped(
        self, run: Run, files: Mapping[str, StoredFile], schema: StateSchema, low: int, high: int, where: str
    ) -> Iterator[pa.RecordBatch]:
        for piece in run.pieces:
            if max(piece.low, run.low) > high or piece.high < low:
                continue
            if piece.file not in files:
                raise CorruptManifest(f"{where} {_NAMED} without its file {piece.file!r}")
            body = stored_bytes(self._objects, files[piece.file])
            try:
                batch = read_run(body, piece, schema).batch
                batch.validate(full=True)  # as for parts: no offset points out of its buffer
            except (ValueError, pa.ArrowException, OSError) as error:
                raise CorruptSegment(f"{files[piece.file].path or piece.file}: {where}: {error}") from error
            schema.check_batch(batch, files[piece.file].path or piece.file)
            first, end = rows_of_piece(batch, run, piece)
            rows = slice_hash_range(batch.slice(first, end - first), low, high)
            for start in range(0, rows.num_rows, _ROWS):
                yield rows.slice(start, _ROWS)

    def _scanned(self, shard: ShardFiles, state: str, low: int, high: int) -> Iterator[pa.RecordBatch]:
        schemas = {name: self._listing.schema(shard, name) for name in shard.columns}
        with _scratch_folder(self._scratch) as folder:
            store = open_rocksdb(folder, schemas, Still())
            try:
                install_shard(self._objects, shard, store)
                # The caller leaves expired rows out, because it knows the time for that.
                reader = store.open(shard.version, 0, verify=False)
                yield from reader.read_range(state, low, high, _ROWS)
            except LocalCopyUnusable as error:
                raise CorruptSegment(f"the database of shard {shard.shard} {_NAMED}, but: {error}") from error


def install_shard(objects: Objects, shard: ShardFiles, store: ShardStore, folder: Path | None = None) -> None:
    """Write the files of a shard as a local version.

    Args:
        folder: of the backend, made if needed.

    Raises:
        MissingFile, CorruptSegment: the primary is damaged. StoreUnavailable: try again.
        OSError: no room. LocalCopyUnusable: the description cannot be read.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    store.install(shard.version, shard.description, {f.name: stored_bytes(objects, f) for f in shard.files})


def _name(shard: ShardFiles) -> str:
    return f"shard {shard.shard} of operator {shard.operator}, version {shard.version}"


def _current(batches: Iterator[pa.RecordBatch], versions: StateVersions, shard: ShardFiles) -> Iterator[pa.RecordBatch]:
    return (versions.read(batch, shard.snapshot_id, _name(shard)) for batch in batches if batch.num_rows)


def _chained(parts: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        yield from part


@contextmanager
def _scratch_folder(parent: Path | None) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=".files-", dir=parent))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=".files-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
