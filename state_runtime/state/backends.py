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
    """Where a backend keeps its versions in a shard's folder."""
    return folder if kind == "arrow" else folder / "rocksdb"


def discard(kind: str, folder: Path, clock: Clock) -> None:
    """Remove what a backend kept of a shard: another one serves now. Needs no library; never fails."""
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
    """The local versions of one shard. Nothing is read or written yet.

    Args:
        kind: "arrow" (state/local.py) or "rocksdb" (state/rocksdb.py). What one wrote, the other does not find: it
            begins with a restore from the primary store, as after the loss of the host.
        folder: the shard's own; RocksDB uses a folder in it.
        stamp: what new versions are marked with.
        exported: they will be exported, after each epoch that changes them. So that `export` need not read files for
            their digests, the Arrow backend takes those while it writes; RocksDB always does.

    Raises:
        InvalidConfiguration: no such backend, or its library is not installed.
    """
    if kind == "arrow":
        return LocalShard(folder, schemas, clock, stamp=stamp, with_digests=exported)
    if kind != "rocksdb":
        raise InvalidConfiguration(f"there is no backend {kind!r}: choose arrow or rocksdb")
    return open_rocksdb(folder, schemas, clock, stamp)


def open_rocksdb(folder: Path, schemas: Mapping[str, StateSchema], clock: Clock, stamp: Stamp = NO_STAMP) -> RocksShard:
    """`open_backend` for who needs what only RocksDB has (`RocksReader.read_range`)."""
    try:
        from state_runtime.state.rocksdb import RocksShard
    except ModuleNotFoundError as error:
        if error.name != "rocksdict":
            raise
        raise InvalidConfiguration(
            "the backend rocksdb needs a library that is not installed here: pip install 'stillstate[rocksdb]'"
        ) from error
    return RocksShard(backend_folder("rocksdb", folder), schemas, clock, stamp)
