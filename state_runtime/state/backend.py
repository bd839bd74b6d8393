"""The port to what keeps a shard's state on the host: `LocalShard` (state/local.py) and RocksDB (state/rocksdb.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import pyarrow as pa

from state_runtime.state.changed_rows import Changed
from state_runtime.state.reader import StateReader

__all__ = [
    "NOTHING_BELOW",
    "NO_STAMP",
    "Adopted",
    "Below",
    "LocalCopyUnusable",
    "LocalFile",
    "ShardStore",
    "Stamp",
    "StoredVersion",
    "VersionFiles",
]


class LocalCopyUnusable(Exception):
    """The local copy cannot serve; the reason is for metrics. Never leaves the task: the primary serves instead."""


@dataclass(frozen=True)
class Stamp:
    """When a version is written; kept with it, so that later tasks can tell what it is.

    Attributes:
        snapshot_id: that the epoch will end in. If that snapshot's manifest names the version, it is the state as of
            it.
        epoch: the driver's attempt at the epoch.
    """

    snapshot_id: int = 0
    epoch: str = ""


NO_STAMP = Stamp()
"""Of versions that nobody looks for again."""


@dataclass(frozen=True)
class StoredVersion:
    """A version that lies in a shard's folder; what it says of itself is to be proven.

    Attributes:
        snapshot_id: see `Stamp`; of a restored version the snapshot that it was restored from.
        restored_from: commit id of the manifest that the version was restored from, and nothing else; "" for others.
    """

    version: str
    snapshot_id: int
    restored_from: str
    bytes: int


@dataclass(frozen=True)
class Adopted:
    """A version of some shard of the same operator on this host, of which a new version takes over what it holds.

    Attributes:
        folder: the shard's.
        ranges: per state the closed hash ranges that are taken over, in order.
    """

    folder: Path
    version: str
    ranges: Mapping[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class LocalFile:
    """One immutable file of a version; the digest is SHA-256."""

    name: str
    bytes: int
    digest: str
    path: Path


@dataclass(frozen=True)
class VersionFiles:
    """A version as it can be stored elsewhere: what the backend says of it, and its files. `ShardStore.install` is the
    inverse."""

    description: str
    files: tuple[LocalFile, ...]


Below: TypeAlias = Mapping[str, Sequence[tuple[int, Iterator[pa.RecordBatch]]]]
"""Per state what lies below its other rows: per hash range its lower end, and its rows in ascending order, no key
twice."""
NOTHING_BELOW: Final[Below] = MappingProxyType({})


class ShardStore(Protocol):
    """The local versions of one shard of one operator: a copy, which may be lost at any time.

    A version is the state after one attempt of one task; it never changes, and its id (16 hex characters) is unique.
    Several attempts, also of different drivers, may use one shard's folder at once. A crash leaves garbage, never a
    version that is half there.
    """

    @property
    def adopts_several(self) -> bool:
        """Whether a restored version can take over parts of several others, of each state other ranges."""
        ...

    @property
    def lays_below(self) -> bool:
        """Whether a restored version can have rows that lie below the others as they are: `write_restored(below=…)`."""
        ...

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

    def tidied(self, version: str, base: StateReader, *, now_ms: int, runs_max: int) -> StateReader:
        """Do a bounded part of the upkeep that is due (merges), before the epoch's work rather than in its checkpoint.

        Args:
            version: the one that will be written; files are given its name, and are garbage if it never is.
            base: what `open` or `write_restored` returned.

        Returns:
            The same state, for reading and for `write`.

        Raises:
            OSError: disk full, read-only, …; `base` still serves.
        """
        ...

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
        """Write the version that follows `base`, which `open` or `write_restored` returned.

        Args:
            changes: per state what changed, sorted, each identity once.
            now_ms: batch time: what expires by then need not be kept.
            due_taken: per state with an index by time the bound (ms, inclusive) up to which the epoch handled what was
                due in `base`; such rows are not looked at again. Rows of `changes` are not meant.
            runs_max: how many pieces of history a look-up may have to search, about.

        Raises:
            OSError: disk full, read-only, … The epoch goes on without a local copy.
        """
        ...

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
    ) -> StateReader:
        """Write a version from states that were rebuilt, and open it. A few batches are in memory at a time.

        Args:
            states: per state its rows in ascending order of hash, no hash in two batches. With `adopted` they lie on
                top of what is taken over, and may hold tombstones there.
            adopted: files that are taken over as they are, as hard links; their digests are compared first. At most one
                version, with the same ranges of every state, unless `adopts_several`.
            below: what `states` lies on top of; only if it `lays_below`. The ranges meet neither each other nor those
                that are adopted.
            snapshot_id, restored_from: see `StoredVersion`. Without a commit id the version is marked with the stamp,
                as any other.

        Raises:
            OSError: see `write`. LocalCopyUnusable: a version that was to be taken over cannot be; nothing was written.
        """
        ...

    def versions(self) -> list[StoredVersion]:
        """The versions in the folder, the newest snapshot first; damaged ones are left out. Never fails."""
        ...

    def export(self, version: str) -> VersionFiles:
        """The files of a version, which stay as long as the version does, with their digests.

        Raises:
            LocalCopyUnusable: it is not there, or damaged.
        """
        ...

    def install(self, version: str, description: str, files: Mapping[str, pa.Buffer]) -> None:
        """Lay a version down that was exported, perhaps on another host; nothing happens if it is there.

        Args:
            files: by name, of the right size and digest.

        Raises:
            OSError: see `write`. LocalCopyUnusable: the description cannot be read, or names other files.
        """
        ...

    def prune(self, keep: str, committed: str = "", *, epoch: str = "") -> None:
        """Remove versions that can no longer be a starting point: all but `keep` and those that follow from it.

        Called when the next epoch begins from `keep`. A concurrent attempt of the same epoch also follows from `keep`,
        so its files stay.

        Args:
            committed: the version of the newest checkpoint, from which a restart begins; it stays as well. It is older
                than `keep` where several epochs end in one checkpoint.
            epoch: if given, what follows from `keep` stays only if it was written in this attempt at an epoch: earlier
                ones were given up, and no manifest will name what they wrote.
        """
        ...
