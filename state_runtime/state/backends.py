"""Which backend keeps a shard's local state."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from state_runtime.base.clock import Clock
from state_runtime.base.errors import InvalidConfiguration
from state_runtime.base.settings import Backend
from state_runtime.state.backend import NO_STAMP, ShardStore, Stamp
from state_runtime.state.local import LocalShard
from state_runtime.state.table import StateSchema

__all__ = ["Backend", "backend_folder", "discard", "open_backend"]


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
    stored: bool = False,
) -> ShardStore:
    """The local versions of one shard. Nothing is read or written yet.

    Args:
        kind: "arrow" (state/local.py) or "rocksdb" (state/rocksdb.py). What one wrote, the other does not find: it
            begins with a restore from the primary store, as after the loss of the host.
        folder: the shard's own; RocksDB uses a folder in it.
        stamp: what new versions are marked with.
        stored: they will be exported, after each epoch that changes them.

    Raises:
        InvalidConfiguration: no such backend, or its library is not installed.
    """
    if kind == "arrow":
        return LocalShard(folder, schemas, clock, stamp=stamp, stored=stored)
    if kind != "rocksdb":
        raise InvalidConfiguration(f"there is no backend {kind!r}: choose arrow or rocksdb")
    try:
        from state_runtime.state.rocksdb import RocksShard
    except ModuleNotFoundError as error:
        if error.name != "rocksdict":
            raise
        raise InvalidConfiguration(
            "the backend rocksdb needs a library that is not installed here: pip install 'stillstate[rocksdb]'"
        ) from error
    return RocksShard(backend_folder(kind, folder), schemas, clock, stamp)
