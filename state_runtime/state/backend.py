"""The port to what keeps a shard's state on the host: `LocalShard` (state/local.py) and RocksDB (state/rocksdb.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import pyarrow as pa

from state_runtime.state.reader import StateReader

__all__ = ["LocalCopyUnusable", "ShardStore"]


class LocalCopyUnusable(Exception):
    """The local copy cannot serve; the reason is for metrics. Never leaves the task: the primary serves instead."""


class ShardStore(Protocol):
    """The local versions of one shard of one operator: a copy, which may be lost at any time.

    A version is the state after one attempt of one task; it never changes, and its id (16 hex characters) is unique. Several
    attempts, also of different drivers, may use one shard's folder at once. A crash leaves garbage, never a version that is
    half there.
    """

    def open(self, version: str, now_ms: int, *, verify: bool) -> StateReader:
        """Open a version for reading.

        Args:
            version: id from the manifest or from the previous epoch.
            now_ms: batch time: what expires by then is hidden.
            verify: also compare digests: the first time a driver uses a version that an earlier run wrote.

        Raises:
            LocalCopyUnusable: missing, partial, altered, or not ours to trust.
        """
        ...

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
        """Write the version that follows `base`, which `open` or `write_restored` returned.

        Args:
            changes: per state one sorted batch, each identity once.
            now_ms: batch time: what expires by then need not be kept.
            due_taken: per state with an index by time the bound (ms, inclusive) up to which the epoch handled what was due in
                `base`; such rows are not looked at again. Rows of `changes` are not meant.
            runs_max: how many pieces of history a look-up may have to search, about.

        Raises:
            OSError: disk full, read-only, … The epoch goes on without a local copy.
        """
        ...

    def write_restored(self, version: str, states: Mapping[str, pa.RecordBatch], now_ms: int) -> StateReader:
        """Write a version from states that were rebuilt from the primary store, and open it.

        Raises:
            OSError: see `write`.
        """
        ...

    def prune(self, keep: str) -> None:
        """Remove versions that can no longer be a starting point: all but `keep` and those that follow from it.

        Called when `keep` is committed and the next epoch begins from it. A concurrent attempt of the same epoch also
        follows from `keep`, so its files stay.
        """
        ...
