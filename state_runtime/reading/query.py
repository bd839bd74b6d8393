"""Queries of state: one key, or a filtered table, of any snapshot, without the job and without Spark.

Rows whose TTL had run out by the snapshot's batch time are not shown, even if they are still stored.

A query takes no lock and writes nothing; a snapshot is immutable, so the job may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from state_runtime.base.errors import CorruptManifest, InvalidConfiguration, MissingSnapshot
from state_runtime.changelog.versions import StateVersions
from state_runtime.reading.display_schema import DisplaySchema
from state_runtime.reading.key_parser import KeyParser, listed
from state_runtime.reading.lookup import StateLookup, repeated
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.state.ddl import DdlColumn
from state_runtime.state.table import HASH_MAX, same_keys
from state_runtime.store import Store, open_store

__all__ = ["StateView", "open_state", "query_state"]


def query_state(
    store: Store | str,
    job: str,
    operator: str | None,
    state: str,
    *,
    key: Mapping[str, Any] | None = None,
    entry: Mapping[str, Any] | None = None,
    where: Mapping[str, Any] | Any | None = None,
    hash_range: tuple[int, int] | None = None,
    columns: Sequence[str] | None = None,
    snapshot: int | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Read a state as of a snapshot; the same as `open_state(…).read(…)`, see there.

    Args:
        store: the store that holds the job root, or its URL.
        operator: uid; None if only one operator has a state of that name.
        snapshot: id; None for the newest.
    """
    view = open_state(store, job, state, operator=operator, snapshot=snapshot)
    return view.read(key=key, entry=entry, where=where, hash_range=hash_range, columns=columns, limit=limit)


def open_state(
    store: Store | str, job: str, state: str, *, operator: str | None = None, snapshot: int | None = None
) -> StateView:
    """Find a state in a snapshot; reads only the manifest.

    Raises:
        JobNotFound, MissingSnapshot: no such job or snapshot.
        InvalidConfiguration: no such operator or state (the message lists what exists), or several operators have it.
        CorruptManifest, UnsupportedFormat: the manifest cannot be trusted or read. StoreUnavailable: try again.
    """
    catalog = Catalog(open_store(store) if isinstance(store, str) else store, job)
    info = catalog.job_info()
    manifest = catalog.latest() if snapshot is None else catalog.manifest(snapshot)
    if manifest is None:
        raise MissingSnapshot(f"job {job!r} has no snapshot yet; the first epoch makes one")
    if manifest.job_uid != info.uid:
        raise CorruptManifest(
            f"snapshot {manifest.snapshot_id} in {catalog.root.url} belongs to job {manifest.job_uid}, job.json to "
            f"{info.uid}: files were swapped. Restore them from a copy of the job root"
        )
    where = f"snapshot {manifest.snapshot_id} of job {job!r}"
    found = _find_operator(manifest, operator, state, where)
    entry = found.state(state)
    if entry is None:
        raise InvalidConfiguration(
            f"{where}: operator {found.uid!r} has no state {state!r}; it has: {listed(s.name for s in found.states)}"
        )
    view = StateView(catalog.root, manifest, found, entry)
    try:
        view.versions  # noqa: B018 - raises here if the description cannot be read
    except CorruptManifest as error:
        raise CorruptManifest(f"{where}: {error}") from error
    return view


@dataclass(frozen=True)
class StateView:
    """One state of one operator as of one snapshot.

    `DisplaySchema` defines how columns are shown.
    """

    root: Store
    manifest: Manifest
    operator: OperatorEntry
    state: StateEntry

    @cached_property
    def versions(self) -> StateVersions:
        """The stored versions of the state and how they are read."""
        return StateVersions(self.operator, self.state)

    @property
    def keys(self) -> tuple[DdlColumn, ...]:
        """The key columns."""
        return self.versions.keys

    @property
    def entries(self) -> tuple[DdlColumn, ...]:
        """The columns of a map's key; empty for other states."""
        return self.versions.entries or ()

    @property
    def values(self) -> tuple[DdlColumn, ...]:
        """The value columns."""
        return self.versions.values

    @cached_property
    def shown(self) -> DisplaySchema:
        """The columns as people see them."""
        return DisplaySchema(self.versions, self.state.kind, self.operator.kind)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, as shown."""
        return self.shown.names

    def parse_key(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return a key for `read` from texts `column=value`; a column without `=` is null.

        Values are read by the column's type: numbers, true and false, text as it is, binary as hexadecimal digits,
        dates 2013-01-31, times 2013-01-31 12:00:00 (in UTC, unless they end with an offset), structs as JSON.

        Raises:
            InvalidConfiguration: an unknown column, or one twice. InvalidData: a value that its type cannot have.
        """
        return self._given.parsed(texts, "key column", {c.name: c for c in self.keys})

    def parse_entry(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return a map's key for `read` from texts, as `parse_key` reads them.

        Raises:
            InvalidConfiguration, InvalidData: as `parse_key`; also for a state that is no map.
        """
        self._check_map()
        return self._given.parsed(texts, "map key column", {c.name: c for c in self.entries})

    def parse_where(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return conditions for `read` from texts, as `parse_key` reads them, on any column."""
        return self._given.parsed(texts, "column", self.shown.by_name)

    def read(
        self,
        *,
        key: Mapping[str, Any] | None = None,
        entry: Mapping[str, Any] | None = None,
        where: Mapping[str, Any] | Any | None = None,
        hash_range: tuple[int, int] | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Read rows of the state, ordered by key hash; a key that is missing, removed or expired gives no row.

        A key of a list, a map or timers has many rows: those of a list are in its order, timers in that of their time.

        Args:
            key: value by key column, for all key columns: only data that overlaps the key's hash is read. Null equals
                null, NaN equals NaN, 0.0 equals -0.0, as in Spark's grouping.
            entry: of a map, value by map key column, for all of them: only that entry of the key, or of all keys.
            where: only rows with these values, by column as shown, with the same equality; or an Arrow expression
                (`pyarrow.compute.field("n") > 3`). It does not reduce the data that is read.
            hash_range: only keys whose unsigned hash is in this closed range.
            columns: the columns as shown, in this order; None: all.
            limit: maximum number of rows; None: all, in memory.

        Raises:
            InvalidConfiguration: an unknown column, or arguments that cannot be combined.
            InvalidData: a value that does not fit its column.
            MissingFile, CorruptSegment: stored data is damaged; the message names the file. StoreUnavailable: try
                again.
        """
        low, high = hash_range if hash_range is not None else (0, HASH_MAX)
        if not 0 <= low <= high <= HASH_MAX:
            raise InvalidConfiguration("hash_range must be two hashes from 0 to 2^64 - 1, the lower one first")
        if limit is not None and limit < 0:
            raise InvalidConfiguration(f"limit is {limit}; give 0 or more")
        self._check_columns([*(columns or ()), *(where if isinstance(where, Mapping) else ())])
        if key is not None and hash_range is not None:
            raise InvalidConfiguration("give a key or a hash_range, not both: a key has one hash")
        if entry is not None and self.state.kind != "map":
            raise InvalidConfiguration(
                f"{self._name} is no map (it is {self.state.kind}), so it has no entries to name"
            )
        wanted_entry = None if entry is None else self._given.one_row(entry, self.entries, "map key")
        rows_of = StateLookup(self.root, self.manifest, self.operator, self.state, self.versions)
        batches = rows_of.scan(low, high) if key is None else rows_of.one(self._given.one_row(key, self.keys, "key"))
        rows = self._collect(batches, wanted_entry, where, limit)
        return rows if columns is None else rows.select(list(columns))

    # --- rows ----------------------------------------------------------------------------------------------------

    def _collect(
        self, batches: Iterator[pa.RecordBatch], entry: Sequence[pa.Array] | None, where: Any, limit: int | None
    ) -> pa.Table:
        """Collect rows under their shown names; stop reading when the limit is reached."""
        conditions = [(len(self.keys) + i, column) for i, column in enumerate(entry or ())]
        conditions += self._given.conditions(where, self.shown.by_name) if isinstance(where, Mapping) else []
        parts: list[pa.Table] = []
        left = limit
        for batch in batches:
            part = self.shown.show(batch)
            for position, wanted in conditions:
                column = part.column(position).combine_chunks()
                part = part.filter(pa.array(same_keys([column], [repeated(wanted, len(column))])))
            if where is not None and not isinstance(where, Mapping):
                try:
                    part = part.filter(where)
                except (pa.ArrowException, TypeError) as error:
                    raise InvalidConfiguration(
                        f"{self._name}: the condition does not fit the columns {listed(self.columns)}: {error}"
                    ) from error
            parts.append(part if left is None else part.slice(0, left))
            if left is not None:
                left -= parts[-1].num_rows
                if left <= 0:
                    break
        # Every read yields at least one batch, of the stored types if any row is stored.
        return pa.concat_tables([p for p in parts if p.num_rows] or parts[:1])

    # --- columns and values --------------------------------------------------------------------------------------

    @property
    def _given(self) -> KeyParser:
        return KeyParser(self._name)

    @property
    def _name(self) -> str:
        return f"operator {self.operator.uid!r}, state {self.state.name!r}"

    def _check_map(self) -> None:
        if self.state.kind != "map":
            raise InvalidConfiguration(
                f"{self._name} is no map (it is {self.state.kind}), so it has no entries to name"
            )

    def _check_columns(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.columns:
                raise InvalidConfiguration(f"{self._name} has no column {name!r}; it has: {listed(self.columns)}")


def _find_operator(manifest: Manifest, uid: str | None, state: str, where: str) -> OperatorEntry:
    if uid is not None:
        for operator in manifest.operators:
            if operator.uid == uid:
                return operator
        raise InvalidConfiguration(
            f"{where} has no operator {uid!r}; it has: {listed(o.uid for o in manifest.operators)}"
        )
    having = [o for o in manifest.operators if any(s.name == state for s in o.states)]
    if len(having) == 1:
        return having[0]
    if having:
        raise InvalidConfiguration(
            f"{where}: several operators have a state {state!r}; name one of: {listed(o.uid for o in having)}"
        )
    known = [f"{s.name} (of {o.uid})" for o in manifest.operators for s in o.states]
    raise InvalidConfiguration(f"{where} has no state {state!r}; it has: {listed(known)}")
