"""The live rows of a snapshot's states, as Arrow batches, of every format and backend; in bounded memory.

    SnapshotReader(root, manifest).read("legs", "seen", (0, (1 << 62) - 1), columns=["n"])

The code of a restore decides which row of a key counts (`changelog/snapshot_state.py`, `restore/sources.py`,
`restore/stream.py`): the newest wins, tombstones and clear markers hide older rows, rows of older columns are converted
to the newest, and rows that had expired by the snapshot's batch time are left out.

Only data that the rows need is fetched: manifest, the segments' indexes, and the parts, row groups, column chunks and
files of shards that overlap the hash range. Nothing is locked and nothing is written to the store. If the changelog's
tail of the range is longer than 32 MiB, it is written to unlinked temporary files of this host.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from state_runtime.base.errors import CorruptSegment, InvalidConfiguration, MissingFile, SnapshotExpired
from state_runtime.base.limits import MAX_PARALLELISM, MIB
from state_runtime.changelog.versions import StateVersions
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.reading.ranged import RangedObjects
from state_runtime.restore.sources import PrimaryStates
from state_runtime.restore.uploaded_files import Bottom, read_listing
from state_runtime.snapshot.expiry_boundary import read_boundary
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.snapshot.shard_files import ShardListing
from state_runtime.state.key_groups import hash_range_of_shard
from state_runtime.state.table import HASH_MAX, StateSchema, adapt
from state_runtime.store import Store

__all__ = ["ALL_HASHES", "SnapshotReader", "hash_ranges"]

ALL_HASHES = (0, HASH_MAX)
_Range = tuple[int, int]


def hash_ranges(count: int) -> list[_Range]:
    """Return all hashes as `count` closed ranges of equal width, for readers that work in parallel."""
    count = max(1, min(count, MAX_PARALLELISM))
    return [hash_range_of_shard(number, count) for number in range(count)]


class SnapshotReader:
    """One snapshot, read any number of times. Not thread-safe: make one for each thread.

    Every method that reads rows may raise:
        MissingFile, CorruptSegment, CorruptManifest: the snapshot is damaged; the message names the file.
        SnapshotExpired: it expired while it was read. StoreUnavailable: try again.

    Args:
        root: the job root (or a savepoint's folder, or any copy of one).
        manifest: of the snapshot.
        scratch: a folder of this host; None is the system's folder for temporary files.
        whole_bytes_max: tables up to this size are read by one request, and their digest is checked.
        gap_bytes: maximum gap between two ranges of an object that are read by one request.
    """

    def __init__(
        self,
        root: Store,
        manifest: Manifest,
        *,
        scratch: Path | None = None,
        whole_bytes_max: int = MIB,
        gap_bytes: int = MIB // 16,
    ) -> None:
        self.root = root
        self.manifest = manifest
        self._scratch = scratch
        self._objects = RangedObjects(root, whole_bytes_max=whole_bytes_max, gap_bytes=gap_bytes)
        self._listing: ShardListing | None = None

    @property
    def operators(self) -> tuple[OperatorEntry, ...]:
        """The operators that have state."""
        return self.manifest.operators

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store so far."""
        return self._objects.bytes_read

    def find(self, operator: str, state: str) -> tuple[OperatorEntry, StateEntry]:
        """Return the descriptions of a state.

        Raises:
            InvalidConfiguration: there is no such operator or state; the message lists the existing ones.
        """
        where = f"snapshot {self.manifest.snapshot_id} in {self.root.url}"
        found = next((o for o in self.operators if o.uid == operator), None)
        if found is None:
            known = ", ".join(o.uid for o in self.operators) or "none"
            raise InvalidConfiguration(f"{where} has no operator {operator!r}; it has: {known}")
        entry = found.state(state)
        if entry is None:
            known = ", ".join(s.name for s in found.states) or "none"
            raise InvalidConfiguration(f"{where}: operator {operator!r} has no state {state!r}; it has: {known}")
        return found, entry

    def versions(self, operator: str, state: str) -> StateVersions:
        """Return how the stored rows of a state are read.

        Raises:
            InvalidConfiguration: see `find`. CorruptManifest: the description cannot be read.
        """
        return StateVersions(*self.find(operator, state))

    def read(
        self,
        operator: str,
        state: str,
        hash_range: _Range = ALL_HASHES,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the live rows of a closed range of key hashes, as they are stored (docs/format.md, "State batches").

        Args:
            columns: names of the wanted value columns; None is all. Keys, map keys and times are always there.

        Yields:
            Batches in ascending order of hash (and entry), not empty, `deleted` false everywhere, all of one schema.
            All rows of one hash are in one batch. Without rows there is no batch.

        Raises:
            InvalidConfiguration: see `find`; or a column that the state does not have.
        """
        found, entry = self.find(operator, state)
        low, high = hash_range
        if not 0 <= low <= high <= HASH_MAX:
            raise InvalidConfiguration("hash_range must be two hashes from 0 to 2^64 - 1, the lower one first")
        versions = {s.name: StateVersions(found, s) for s in found.states}
        if columns is not None:
            known = [column.name for column in versions[state].values]
            unknown = [name for name in columns if name not in known]
            if unknown:
                raise InvalidConfiguration(
                    f"operator {operator!r}, state {state!r} has no value column {unknown[0]!r}; it has: "
                    f"{', '.join(known) or 'none'}"
                )
            versions[state] = versions[state].only(columns)
        return self._read(found, entry, versions, hash_range)

    def _read(
        self, operator: OperatorEntry, state: StateEntry, versions: dict[str, StateVersions], hash_range: _Range
    ) -> Iterator[pa.RecordBatch]:
        schema: StateSchema | None = None
        try:
            for batch in self._primary(operator, versions, hash_range).read(state.name, *hash_range, -1):
                schema = schema or StateSchema.of(batch.schema)
                # Files of different age may spell types inside nested columns differently.
                yield adapt(batch, schema)
        except MissingFile as error:
            if not read_boundary(self.root).keeps(self.manifest.snapshot_id):
                raise SnapshotExpired(
                    f"snapshot {self.manifest.snapshot_id} in {self.root.url} expired while it was read; choose a "
                    "newer one, and pin it before reading"
                ) from error
            raise
        except pa.ArrowException as error:
            raise CorruptSegment(
                f"{versions[state.name].name} has other types in one file than in another: {error}"
            ) from error

    def _primary(
        self, operator: OperatorEntry, versions: dict[str, StateVersions], hash_range: _Range
    ) -> PrimaryStates:
        scratch = self._scratch or Path(tempfile.gettempdir())
        if self._listing is None:
            self._listing = read_listing(self._objects, self.manifest)
        bottom = Bottom(self._objects, self._listing, operator, scratch) if self._listing is not None else None
        return PrimaryStates(
            objects=self._objects,
            manifest=self.manifest,
            pending=(),
            entry=operator,
            versions=versions,
            hash_range=hash_range,
            scratch=scratch,
            bottom=bottom,
            strict=True,
        )

    def schema(self, operator: str, state: str) -> StateSchema:
        """Return the columns of a state as they are stored now, if the manifest tells their types.

        Types that it does not tell (an interval, a user-defined type) are null.
        """
        return self.versions(operator, state).declared

    def fingerprint(self, operator: str, state: str, hash_range: _Range = ALL_HASHES) -> Fingerprint:
        """Return number and digest of the live rows, equal for any format, backend or cuts; those of ranges add up."""
        found = Fingerprint()
        for batch in self.read(operator, state, hash_range):
            found = found + Fingerprint.of(batch)
        return found

    def stored_bytes(self, operator: str, state: str) -> int:
        """Estimate how many bytes a full read of a state reads: its tables, and its share of the log and files that it
        shares with other states."""
        self.find(operator, state)
        tables = sum(
            t.bytes
            for layer in self.manifest.layers
            for t in layer.tables
            if (t.operator, t.state) == (operator, state)
        )
        states = max(1, sum(len(o.states) for o in self.operators))
        shards = self.manifest.shards
        shared = sum(s.total_bytes for s in self.manifest.state_segments) + (shards.total_bytes if shards else 0)
        return tables + shared // states
