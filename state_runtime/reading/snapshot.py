"""A snapshot for people and their programs: its content, and its states as tables; without Spark and without Java.

snapshot = reading.open("s3://bucket/state/flights")
for state in snapshot.states(): print(state.operator, state.name, state.kind, state.columns)
snapshot.state("legs", "seen").to_arrow(columns=["tailnum", "n"])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.changelog.versions import StateVersions
from state_runtime.reading.display_schema import DisplaySchema
from state_runtime.reading.fingerprint import Fingerprint
from state_runtime.reading.inflight import ReadableInflight
from state_runtime.reading.query import StateView
from state_runtime.reading.reader import ALL_HASHES, SnapshotReader
from state_runtime.snapshot.job_info import JobInfo
from state_runtime.snapshot.locate import Place, open_place
from state_runtime.snapshot.manifest import Manifest, StateKind
from state_runtime.store import Store

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ReadableSnapshot", "ReadableState", "open_snapshot_for_reading"]


def open_snapshot_for_reading(place: str, storage_options: Mapping[str, Any] | None = None) -> ReadableSnapshot:
    """Open a snapshot; see `state_runtime.reading.open`."""
    opened = open_place(place, storage_options)
    return ReadableSnapshot(opened.root, opened.info, opened.manifest)


@dataclass(frozen=True)
class ReadableSnapshot:
    """One snapshot; immutable, so a reader sees one moment while the job runs on.

    Unless it is pinned, it may expire while it is read: reading then raises `SnapshotExpired`.
    """

    root: Store
    info: JobInfo
    manifest: Manifest

    @property
    def place(self) -> str:
        """The place of the snapshot."""
        return str(Place(self.root.url, self.manifest.snapshot_id))

    @property
    def operators(self) -> tuple[str, ...]:
        """Uids of the operators that have state."""
        return tuple(operator.uid for operator in self.manifest.operators)

    def states(self, operator: str | None = None) -> tuple[ReadableState, ...]:
        """Return all states, or those of one operator."""
        return tuple(
            ReadableState(self, o.uid, s.name)
            for o in self.manifest.operators
            if operator is None or o.uid == operator
            for s in o.states
        )

    def state(self, operator: str, name: str) -> ReadableState:
        """Return one state.

        Raises:
            InvalidConfiguration: there is no such operator or state; the message lists the existing ones.
        """
        self.reader().find(operator, name)
        return ReadableState(self, operator, name)

    def inflight(self, operator: str) -> ReadableInflight:
        """Return the rows of an operator that are in flight: read by an epoch, and not processed.

        Raises:
            InvalidConfiguration: it has none; the message lists the operators that have some.
        """
        return ReadableInflight.of(self.root, self.manifest, operator)

    def reader(self) -> SnapshotReader:
        """Return a reader of the rows as they are stored; for one thread."""
        return SnapshotReader(self.root, self.manifest)


@dataclass(frozen=True)
class ReadableState:
    """One state as a table; the columns are those of `DisplaySchema`. Reading raises the errors of `SnapshotReader`."""

    snapshot: ReadableSnapshot
    operator: str
    name: str

    @cached_property
    def shown(self) -> DisplaySchema:
        """The columns and their roles."""
        operator, state = self.snapshot.reader().find(self.operator, self.name)
        return DisplaySchema(StateVersions(operator, state), state.kind, operator.kind)

    @property
    def kind(self) -> StateKind:
        """The kind of the state: value, list, map, timers, or rows of a built-in operator."""
        return self.snapshot.reader().find(self.operator, self.name)[1].kind

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns."""
        return self.shown.names

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Names of the key columns."""
        return tuple(name for name, (role, _) in self.shown.roles().items() if role == "key")

    def batches(
        self,
        columns: Sequence[str] | None = None,
        keys: Sequence[Mapping[str, Any]] | None = None,
        hash_range: tuple[int, int] = ALL_HASHES,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the live rows, some at a time, in order of key hash; large states too in bounded memory.

        Args:
            columns: the columns, in this order; None is all. Value columns that are not listed are not read.
            keys: only these, each with a value for every key column; for each key only the parts and tables that can
                hold it are read.
            hash_range: only keys whose unsigned hash is in this closed range.

        Raises:
            InvalidConfiguration: an unknown column, or both keys and a range. InvalidData: a key that does not fit its
                column.
        """
        wanted = self.wanted(columns)
        if keys is None:
            return self._scan(wanted, hash_range)
        if hash_range != ALL_HASHES:
            raise InvalidConfiguration("give keys or a hash_range, not both: a key has one hash")
        return self._of_keys(wanted, keys)

    def _scan(self, columns: Sequence[str], hash_range: tuple[int, int]) -> Iterator[pa.RecordBatch]:
        values = self.shown.values_of(columns)
        for batch in self.snapshot.reader().read(self.operator, self.name, hash_range, values):
            yield from self.shown.show(batch, columns).to_batches()

    def _of_keys(self, columns: Sequence[str], keys: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        operator, state = self.snapshot.reader().find(self.operator, self.name)
        view = StateView(self.snapshot.root, self.snapshot.manifest, operator, state)
        for key in keys:
            found = view.read(key=key, columns=columns)
            if found.num_rows:
                yield from found.to_batches()

    def to_arrow(
        self,
        columns: Sequence[str] | None = None,
        keys: Sequence[Mapping[str, Any]] | None = None,
        hash_range: tuple[int, int] = ALL_HASHES,
    ) -> pa.Table:
        """Return the same rows as a table in memory."""
        batches = list(self.batches(columns, keys, hash_range))
        if batches:
            return pa.Table.from_batches(batches)
        return self.schema(columns).empty_table()

    def to_pandas(
        self,
        columns: Sequence[str] | None = None,
        keys: Sequence[Mapping[str, Any]] | None = None,
        hash_range: tuple[int, int] = ALL_HASHES,
    ) -> pd.DataFrame:
        """Return the same rows as a pandas DataFrame."""
        frame: pd.DataFrame = self.to_arrow(columns, keys, hash_range).to_pandas()
        return frame

    def schema(self, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the columns' types if the manifest tells them; a type that it does not tell is null."""
        by_name = self.shown.by_name
        return pa.schema([pa.field(name, by_name[name].type or pa.null()) for name in self.wanted(columns)])

    def wanted(self, columns: Sequence[str] | None) -> list[str]:
        """Return the wanted columns; None is all.

        Raises:
            InvalidConfiguration: one that the state does not have.
        """
        for name in columns or ():
            if name not in self.columns:
                raise InvalidConfiguration(
                    f"operator {self.operator!r}, state {self.name!r} has no column {name!r}; it has: "
                    f"{', '.join(self.columns)}"
                )
        return list(self.columns if columns is None else columns)

    def fingerprint(self) -> Fingerprint:
        """Return number and digest of all live rows; see `SnapshotReader.fingerprint`."""
        return self.snapshot.reader().fingerprint(self.operator, self.name)
