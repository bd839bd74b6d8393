"""Looking into state: one key, or a filtered table, of any snapshot, without the job and without Spark.

A key's place in the state is its hash, so one key costs the manifest, and newest first the index of a segment and the
one part of it that holds the hash, until the key is found; then the state tables. A table is read one hash range after
the other, as the stored files are cut, so that a limited read of a large state ends early.

Rows whose TTL had run out by the snapshot's batch time are not shown, whether or not they are still stored.

Nothing is locked and nothing is written; a snapshot is immutable, so the job may run meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from state_runtime.base.errors import (
    CorruptManifest,
    CorruptSegment,
    InvalidConfiguration,
    InvalidData,
    MissingSnapshot,
)
from state_runtime.changelog.reader import fetch_part, read_index, read_table
from state_runtime.changelog.versions import StateVersions
from state_runtime.reading.shown import ShownColumns
from state_runtime.restore.uploaded_files import Bottom, direct, read_listing
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.state.ddl import DdlColumn, parse_value
from state_runtime.state.keyhash import hash_key
from state_runtime.state.table import (
    CLEAR_MARKER,
    HASH_MAX,
    StateSchema,
    concat,
    entries_of,
    hashes_of,
    same_keys,
    slice_hash_range,
)
from state_runtime.store import Store, open_store

__all__ = ["StateView", "open_state", "query_state"]

# A scan goes from one stored file's lower bound to the next; more steps than this only cost.
_RANGES_MAX = 1024


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
    """Read a state as of a snapshot: `open_state(…).read(…)` in one call; see there.

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
    """Find a state in a snapshot; reads the manifest and nothing else.

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
            f"{where}: operator {found.uid!r} has no state {state!r}; it has: {_listed(s.name for s in found.states)}"
        )
    view = StateView(catalog.root, manifest, found, entry)
    try:
        view.versions  # noqa: B018 - a description that cannot be read is found here
    except CorruptManifest as error:
        raise CorruptManifest(f"{where}: {error}") from error
    return view


@dataclass(frozen=True)
class StateView:
    """One state of one operator as of one snapshot.

    Columns are shown as `ShownColumns` says.
    """

    root: Store
    manifest: Manifest
    operator: OperatorEntry
    state: StateEntry

    @cached_property
    def versions(self) -> StateVersions:
        """How what is stored is read."""
        return StateVersions(self.operator, self.state)

    @property
    def keys(self) -> tuple[DdlColumn, ...]:
        """The key columns."""
        return self.versions.keys

    @property
    def entries(self) -> tuple[DdlColumn, ...]:
        """Of a map the columns of its key."""
        return self.versions.entries or ()

    @property
    def values(self) -> tuple[DdlColumn, ...]:
        """The value columns."""
        return self.versions.values

    @cached_property
    def shown(self) -> ShownColumns:
        """The columns as people see them."""
        return ShownColumns(self.versions, self.state.kind, self.operator.kind)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, as shown."""
        return self.shown.names

    def parse_key(self, texts: Sequence[str]) -> dict[str, Any]:
        """A key for `read` from texts `column=value`; a column without `=` is null.

        Values are read by the column's type: numbers, true and false, text as it is, binary as hexadecimal digits,
        dates 2013-01-31, times 2013-01-31 12:00:00 (in UTC, unless they end with an offset), structs as JSON.

        Raises:
            InvalidConfiguration: another column, or one twice. InvalidData: a value that its type cannot have.
        """
        return self._parse(texts, "key column", {c.name: c for c in self.keys})

    def parse_entry(self, texts: Sequence[str]) -> dict[str, Any]:
        """A map's key for `read` from texts, as `parse_key` reads them.

        Raises:
            InvalidConfiguration, InvalidData: as `parse_key`; also for a state that is no map.
        """
        self._check_map()
        return self._parse(texts, "map key column", {c.name: c for c in self.entries})

    def parse_where(self, texts: Sequence[str]) -> dict[str, Any]:
        """Conditions for `read` from texts, as `parse_key` reads them, on any column."""
        return self._parse(texts, "column", self.shown.by_name)

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
        """Rows of the state, ordered by key hash; a key that is not there, was removed or has expired gives no row.

        A key of a list, a map or timers has many rows: those of a list are in its order, timers in that of their time.

        Args:
            key: value by key column, all of them: only what overlaps the key's hash is read. Null equals null, NaN
                equals NaN, 0.0 equals -0.0, as in Spark's grouping.
            entry: of a map, value by map key column, all of them: only that entry of the key, or of all keys.
            where: only rows with these values, by column as shown, with the same equality; or an Arrow expression
                (`pyarrow.compute.field("n") > 3`). Does not narrow what is read.
            hash_range: only keys whose unsigned hash lies in this closed range.
            columns: which, as shown, in this order; None: all.
            limit: rows at most; None: all, in memory.

        Raises:
            InvalidConfiguration: a column that is not there, or arguments that do not go together.
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
        wanted_entry = None if entry is None else self._columns_of(entry, self.entries, "map key")
        batches = self._scan(low, high) if key is None else self._one(self._columns_of(key, self.keys, "key"))
        rows = self._collect(batches, wanted_entry, where, limit)
        return rows if columns is None else rows.select(list(columns))

    # --- rows ----------------------------------------------------------------------------------------------------

    def _collect(
        self, batches: Iterator[pa.RecordBatch], entry: Sequence[pa.Array] | None, where: Any, limit: int | None
    ) -> pa.Table:
        """Rows under their shown names; stops to read where the limit is reached."""
        conditions = [(len(self.keys) + i, column) for i, column in enumerate(entry or ())]
        conditions += self._conditions(where) if isinstance(where, Mapping) else []
        parts: list[pa.Table] = []
        left = limit
        for batch in batches:
            part = self.shown.show(batch)
            for position, wanted in conditions:
                column = part.column(position).combine_chunks()
                part = part.filter(pa.array(same_keys([column], [_repeat(wanted, len(column))])))
            if where is not None and not isinstance(where, Mapping):
                try:
                    part = part.filter(where)
                except (pa.ArrowException, TypeError) as error:
                    raise InvalidConfiguration(
                        f"{self._name}: the condition does not fit the columns {_listed(self.columns)}: {error}"
                    ) from error
            parts.append(part if left is None else part.slice(0, left))
            if left is not None:
                left -= parts[-1].num_rows
                if left <= 0:
                    break
        # Every read yields at least one batch, of the stored types where anything is stored.
        return pa.concat_tables([p for p in parts if p.num_rows] or parts[:1])

    def _one(self, wanted: Sequence[pa.Array]) -> Iterator[pa.RecordBatch]:
        """The rows of one key; newest first, so older files are not read once nothing in them can count."""
        if not all(column.binary_equality for column in self.keys):
            # Spark hashes something else than the bytes of a string with a collation: look everywhere.
            for batch in self._scan(0, HASH_MAX):
                yield _only_key(batch, wanted)
            return
        hashed = hash_key(wanted)
        newest_first: list[pa.RecordBatch] = []
        for source in self._sources(hashed, hashed):
            batch = _only_key(slice_hash_range(self._load(source), hashed, hashed), wanted)
            newest_first.append(batch)
            if batch.num_rows and (self.state.kind == "value" or CLEAR_MARKER in entries_of(batch)):
                break
        yield self._fold(newest_first)

    def _scan(self, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Live rows of a hash range, folded one part of the range after the other."""
        sources = list(self._sources(low, high))
        if not sources:
            yield self.versions.declared.empty()
            return
        cuts = sorted({low, *(source.low for source in sources if source.low > low)})
        cuts = cuts[:: -(-len(cuts) // _RANGES_MAX)]
        waiting = sorted(range(len(sources)), key=lambda number: sources[number].low, reverse=True)
        open_files: dict[int, pa.RecordBatch] = {}
        for start, end in zip(cuts, [*(cut - 1 for cut in cuts[1:]), high], strict=True):
            while waiting and sources[waiting[-1]].low <= end:
                number = waiting.pop()
                open_files[number] = self._load(sources[number])
            # Sources are numbered newest first, which is the order that folding needs.
            newest_first = [slice_hash_range(open_files[number], start, end) for number in sorted(open_files)]
            if newest_first:
                yield self._fold(newest_first)
            open_files = {number: batch for number, batch in open_files.items() if sources[number].high > end}

    def _fold(self, newest_first: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        now_ms = self.manifest.time.batch_time_ms if self.manifest.time is not None else None
        try:
            return self.versions.fold(newest_first, drop_deleted=True, now_ms=now_ms)
        except CorruptSegment as error:
            raise CorruptSegment(f"{self._name} has other types in one file than in another: {error}") from error

    # --- files ---------------------------------------------------------------------------------------------------

    def _sources(self, low: int, high: int) -> Iterator[_Source]:
        """The parts and tables of this state that overlap a hash range, newest first; indexes are read when asked
        for."""
        operator, state = self.operator.uid, self.state.name
        for segment in reversed(self.manifest.state_segments):
            if segment.snapshot_id < self.versions.since:
                continue
            for part in reversed(read_index(self.root, segment, self.manifest.job_uids).parts):
                if (part.kind, part.operator, part.state) == ("state", operator, state):
                    load = partial(fetch_part, self.root, segment.path, part)
                    source = _Source(
                        part.path or segment.path, segment.snapshot_id, part.hash_low, part.hash_high, load
                    )
                    if source.overlaps(low, high):
                        yield source
        for layer in reversed(self.manifest.layers):
            for table in layer.tables:
                newest = layer.newest_in(table)
                if (table.operator, table.state) == (operator, state) and newest >= self.versions.since:
                    load = partial(read_table, self.root, table)
                    source = _Source(table.path, newest, table.hash_low, table.hash_high, load)
                    if source.overlaps(low, high):
                        yield source

        objects = direct(self.root)
        listing = read_listing(objects, self.manifest)
        if listing is not None:
            bottom = Bottom(objects, listing, self.operator)
            for shard in bottom.shards(state, self.versions, low, high):
                for run in bottom.runs(shard, state, low, high):
                    load = partial(_whole, run, listing.schema(shard, state).arrow)
                    yield _Source(f"version {shard.version}", shard.snapshot_id, *shard.hash_range, load)

    def _load(self, source: _Source) -> pa.RecordBatch:
        """A part or table in the newest columns, checked against the manifest's and its own range."""
        batch = source.load()
        try:
            # Values go to people and into other programs: offsets and text must be what they claim, whoever wrote them.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptSegment(f"{source.path}: {self._name} holds values that are none of their type") from error
        hashes = hashes_of(batch)
        if len(hashes) and not (source.low <= int(hashes[0]) and int(hashes[-1]) <= source.high):
            raise CorruptSegment(f"{source.path}: {self._name} has keys outside of the hash range that it is named for")
        return self.versions.read(batch, source.snapshot_id, source.path)

    # --- columns and values --------------------------------------------------------------------------------------

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
                raise InvalidConfiguration(f"{self._name} has no column {name!r}; it has: {_listed(self.columns)}")

    def _columns_of(self, given: Mapping[str, Any], columns: Sequence[DdlColumn], what: str) -> list[pa.Array]:
        """A key or map key as columns of one row."""
        names = [column.name for column in columns]
        for name in given:
            if name not in names:
                raise InvalidConfiguration(f"{self._name} has no {what} column {name!r}; it has: {_listed(names)}")
        missing = [name for name in names if name not in given]
        if missing:
            raise InvalidConfiguration(
                f"{self._name}: the {what} lacks {_listed(missing)}; a {what} has all of {_listed(names)}. "
                "To find rows by some of them, use `where`, which reads the whole state"
            )
        return [self._array(column, given[column.name], f"{what} column") for column in columns]

    def _conditions(self, where: Mapping[str, Any]) -> list[tuple[int, pa.Array]]:
        """Positions and wanted values."""
        found = []
        for position, (name, column) in enumerate(self.shown.by_name.items()):
            if name in where:
                if column.is_nested or column.type is None:
                    raise InvalidConfiguration(
                        f"{self._name}: column {name!r} is {column.type_text}, which cannot be compared"
                    )
                found.append((position, self._array(column, where[name], "column")))
        return found

    def _array(self, column: DdlColumn, value: Any, what: str) -> pa.Array:
        """One value as a column of one row."""
        if column.type is None:
            raise self._misfit(column, what)
        try:
            return pa.array([value], type=column.type, from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise self._misfit(column, what) from None  # Arrow's own message holds the value

    def _parse(self, texts: Sequence[str], what: str, columns: Mapping[str, DdlColumn]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for text in texts:
            # A column's name may hold "=": the longest one that fits is meant.
            fits = [name for name in columns if text == name or text.startswith(f"{name}=")]
            if not fits:
                given = text.partition("=")[0][:80]
                raise InvalidConfiguration(
                    f"{self._name} has no {what} {given!r}; it has: {_listed(columns)}. "
                    f"Write {next(iter(columns))}=VALUE, or {next(iter(columns))} alone for null"
                )
            name = max(fits, key=len)
            if name in parsed:
                raise InvalidConfiguration(f"{self._name}: {what} {name!r} was given twice")
            try:
                parsed[name] = None if text == name else _from_text(text[len(name) + 1 :], columns[name].type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError):
                raise self._misfit(columns[name], what) from None
        return parsed

    def _misfit(self, column: DdlColumn, what: str) -> InvalidData:
        hint = _hint(column.type)
        return InvalidData(
            f"{self._name}: {what} {column.name!r} is {column.type_text}, and the given value does not fit"
            f"{'; write it like ' + hint if hint else ''}"
        )


@dataclass(frozen=True)
class _Source:
    """A part or a table: where it is, how new, the closed range of hashes that it may hold, and how to read it."""

    path: str
    snapshot_id: int
    low: int
    high: int
    load: Callable[[], pa.RecordBatch]

    def overlaps(self, low: int, high: int) -> bool:
        if not 0 <= self.low <= self.high <= HASH_MAX:
            raise CorruptSegment(f"{self.path} is named for a hash range that cannot be")
        return self.low <= high and self.high >= low


def _find_operator(manifest: Manifest, uid: str | None, state: str, where: str) -> OperatorEntry:
    if uid is not None:
        for operator in manifest.operators:
            if operator.uid == uid:
                return operator
        raise InvalidConfiguration(
            f"{where} has no operator {uid!r}; it has: {_listed(o.uid for o in manifest.operators)}"
        )
    having = [o for o in manifest.operators if any(s.name == state for s in o.states)]
    if len(having) == 1:
        return having[0]
    if having:
        raise InvalidConfiguration(
            f"{where}: several operators have a state {state!r}; name one of: {_listed(o.uid for o in having)}"
        )
    known = [f"{s.name} (of {o.uid})" for o in manifest.operators for s in o.states]
    raise InvalidConfiguration(f"{where} has no state {state!r}; it has: {_listed(known)}")


def _from_text(text: str, kind: pa.DataType | None) -> Any:
    """A value from its text: what is nested as JSON, whatever else as people write it."""
    if kind is None or not pa.types.is_nested(kind):
        return parse_value(text, kind)
    value = json.loads(text)
    # Arrow passes over fields that a struct does not have; a misspelled one must not be a null.
    if isinstance(value, dict) and pa.types.is_struct(kind) and not set(value) <= {field.name for field in kind}:
        raise ValueError("a field that the struct does not have")
    return pa.scalar(value, kind)


def _hint(kind: pa.DataType | None) -> str:
    if kind is None:
        return ""
    for is_kind, hint in (
        (pa.types.is_boolean, "true or false"),
        (pa.types.is_integer, "42"),
        (pa.types.is_floating, "1.5"),
        (pa.types.is_decimal, "1.50"),
        (pa.types.is_binary, "00ff7a"),
        (pa.types.is_date, "2013-01-31"),
        (pa.types.is_timestamp, "2013-01-31 12:00:00"),
        (pa.types.is_struct, 'JSON, {"field": 1}'),
    ):
        if is_kind(kind):
            return hint
    return ""


def _whole(run: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    return concat(list(run), schema)


def _only_key(batch: pa.RecordBatch, wanted: Sequence[pa.Array]) -> pa.RecordBatch:
    """The rows of one key, clear markers included."""
    stored = StateSchema.of(batch.schema).keys_of(batch)
    return batch.filter(pa.array(same_keys(stored, [_repeat(column, batch.num_rows) for column in wanted])))


def _repeat(one: pa.Array, count: int) -> pa.Array:
    return pa.repeat(one[0], count)


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"


def _fields(schema: pa.Schema) -> str:
    return _listed(f"{field.name} {field.type}" for field in schema)
