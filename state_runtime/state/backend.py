"""The port to a shard's state on the host. Its backends are `LocalShard` (state/local.py) and RocksDB
(state/rocksdb.py)."""

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
    """The local copy is not usable; the reason is for metrics. Never leaves the task, which then uses the primary."""


@dataclass(frozen=True)
class Stamp:
    """The context in which a version is written; stored with it, so that later tasks can identify it.

    Attributes:
        snapshot_id: that the epoch will end in. If that snapshot's manifest names the version, the version is the state
            as of that snapshot.
        epoch: the driver's attempt at the epoch.
    """

    snapshot_id: int = 0
    epoch: str = ""


NO_STAMP = Stamp()
"""For versions that are never looked for again."""


@dataclass(frozen=True)
class StoredVersion:
    """A version in a shard's folder, with its own, unproven description.

    Attributes:
        snapshot_id: see `Stamp`; of a restored version the snapshot that it was restored from.
        restored_from: commit id of the manifest, if the version was restored from that alone; "" for others.
    """

    version: str
    snapshot_id: int
    restored_from: str
    bytes: int


@dataclass(frozen=True)
class Adopted:
    """A version of some shard of the same operator on this host, whose files a new version takes over.

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
    """A version as it can be stored elsewhere: the backend's description, and its files. `ShardStore.install` is the
    inverse."""

    description: str
    files: tuple[LocalFile, ...]


Below: TypeAlias = Mapping[str, Sequence[tuple[int, Iterator[pa.RecordBatch]]]]
"""Per state the rows below its other rows: per hash range its lower end, and its rows in ascending order, each key
once."""
NOTHING_BELOW: Final[Below] = MappingProxyType({})


class ShardStore(Protocol):
    """The local versions of one shard of one operator: a copy, which may be lost at any time.

    A version is the state after one attempt of one task; it never changes, and its id (16 hex characters) is unique.
    Several attempts, also of different drivers, may use one shard's folder at once. A crash leaves garbage, never an
    incomplete version.
    """

    @property
    def adopts_several(self) -> bool:
        """Whether a restored version can take over parts of several others, with other ranges of each state."""
        ...

    @property
    def lays_below(self) -> bool:
        """Whether a restored version can have unchanged rows below the others: `write_restored(below=…)`."""
        ...

    def open(self, version: str, now_ms: int, *, verify: bool) -> StateReader:
        """Open a version for reading.

        Args:
            version: id from the manifest or from the previous epoch.
            now_ms: batch time: rows that expire by then are hidden.
            verify: also compare digests: at the driver's first use of a version that an earlier run wrote.

        Raises:
            LocalCopyUnusable: missing, partial, altered, or of another user.
        """
        ...

    def tidied(self, version: str, base: StateReader, *, now_ms: int, runs_max: int) -> StateReader:
        """Do a bounded part of the due upkeep (merges), before the epoch's work rather than in its checkpoint.

        Args:
            version: id of the version that will be written; files get its name, and are garbage if it never is.
            base: returned by `open` or `write_restored`.

        Returns:
            The same state, for reading and for `write`.

        Raises:
            OSError: disk full, read-only, …; `base` is still usable.
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
            changes: per state the changed rows, sorted, each identity once.
            now_ms: batch time: rows that expire by then need not be kept.
            due_taken: per state with an index by time the bound (ms, inclusive) up to which the epoch handled the due
                rows of `base`; they are not looked at again. Rows of `changes` are not included.
            runs_max: approximate maximum of the runs that a look-up has to search.

        Raises:
            OSError: disk full, read-only, … The epoch continues without a local copy.
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
        """Write a version from rebuilt states, and open it. A few batches are in memory at a time.

        Args:
            states: per state its rows in ascending order of hash, no hash in two batches. With `adopted` they are on
                top of the adopted files, and may hold tombstones there.
            adopted: files that are taken over unchanged, as hard links; their digests are compared first. At most one
                version, with the same ranges of every state, unless `adopts_several`.
            below: the rows below `states`; only if it `lays_below`. The ranges overlap neither each other nor the
                adopted ones.
            snapshot_id, restored_from: see `StoredVersion`. Without a commit id the version is marked with the stamp,
                like any other.

        Raises:
            OSError: see `write`. LocalCopyUnusable: a version cannot be taken over; nothing was written.
        """
        ...

    def versions(self) -> list[StoredVersion]:
        """Return the versions in the folder, the newest snapshot first; damaged ones are left out. Never fails."""
        ...

    def export(self, version: str) -> VersionFiles:
        """Return the files of a version, with their digests. They stay as long as the version does.

        Raises:
            LocalCopyUnusable: it is missing, or damaged.
        """
        ...

    def install(self, version: str, description: str, files: Mapping[str, pa.Buffer]) -> None:
        """Write an exported version, perhaps of another host; nothing happens if it is there already.

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
            epoch: if given, versions that follow from `keep` stay only if they were written in this attempt at an
                epoch: earlier attempts were abandoned, and no manifest will name their versions.
        """
        ...
