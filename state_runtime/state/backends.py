"""Which backend keeps a shard's local state."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import Backend
from state_runtime.state.backend import NO_STAMP, ShardStore, Stamp
from state_runtime.state.local import LocalShard
from state_runtime.state.table import StateSchema

if TYPE_CHECKING:
    from state_runtime.state.rocksdb import RocksShard  # an extra: it may not be installed

__all__ = ["Backend", "backend_folder", "discard", "open_backend", "open_rocksdb"]


def backend_folder(kind: str, folder: Path) -> Path:
    """Return the folder of a backend's versions in a shard's folder."""
    return folder if kind == "arrow" else folder / "rocksdb"


def discard(kind: str, folder: Path, clock: Clock) -> None:
    """Remove a backend's files of a shard, because another backend is used now. Needs no library; never fails."""
    if kind == "arrow":
        LocalShard(folder, {}, clock).discard()
    else:
        shutil.rmtree(backend_folder(kind, folder), ignore_errors=True)


def open_backend(
    kind: str,
    folder: Path,
    schemas: Mapping[str, StateSchema],
    clock: Clock,
    stamp: Stamp = NO_STAMP,
    *,
    exported: bool = False,
) -> ShardStore:
    """Return the local versions of one shard. Nothing is read or written yet.

    Args:
        kind: "arrow" (state/local.py) or "rocksdb" (state/rocksdb.py). One does not find the versions of the other: it
            begins with a restore from the primary store, as after the loss of the host.
        folder: the shard's own; RocksDB uses a folder in it.
        stamp: mark of new versions.
        exported: versions will be exported, after each epoch that changes them. So that `export` need not read files
            for their digests, the Arrow backend computes them while it writes; RocksDB always does.

    Raises:
        InvalidConfiguration: no such backend, or its library is not installed.
    """
    if kind == "arrow":
        return LocalShard(folder, schemas, clock, stamp=stamp, with_digests=exported)
    if kind != "rocksdb":
        raise InvalidConfiguration(f"there is no backend {kind!r}: choose arrow or rocksdb")
    return open_rocksdb(folder, schemas, clock, stamp)


def open_rocksdb(folder: Path, schemas: Mapping[str, StateSchema], clock: Clock, stamp: Stamp = NO_STAMP) -> RocksShard:
    """Do the same as `open_backend`, for callers of `RocksReader.read_range`, which only RocksDB has."""
    try:
        from state_runtime.state.rocksdb import RocksShard
    except ModuleNotFoundError as error:
        if error.name != "rocksdict":
            raise
        raise InvalidConfiguration(
            "the backend rocksdb needs a library that is not installed here: pip install 'stillstate[rocksdb]'"
        ) from error
    return RocksShard(backend_folder("rocksdb", folder), schemas, clock, stamp)
