"""Looking into state: one key, or a filtered table, of any snapshot, without the job and without Spark.

A key's place in the state is its hash, so one key costs the manifest, and newest first the index of a segment and the one
part of it that holds the hash, until the key is found; then the state tables. A table is read one hash range after the
other, as the stored files are cut, so that a limited read of a large state ends early.

Nothing is locked and nothing is written; a snapshot is immutable, so the job may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.changelog.reader import fetch_part, read_index, read_table
from state_runtime.errors import (
    CorruptManifest,
    CorruptSegment,
    InvalidConfiguration,
    InvalidData,
    MissingSnapshot,
)
from state_runtime.snapshot.catalog import Catalog
from state_runtime.snapshot.manifest import Manifest, OperatorEntry, StateEntry
from state_runtime.state.ddl import DdlColumn, parse_ddl
from state_runtime.state.keyhash import hash_key
from state_runtime.state.table import (
    DELETED,
    HASH_MAX,
    StateSchema,
    fold,
    hashes_of,
    lookup,
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
    return view.read(key=key, where=where, hash_range=hash_range, columns=columns, limit=limit)


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
    entry = next((s for s in found.states if s.name == state), None)
    if entry is None:
        raise InvalidConfiguration(
            f"{where}: operator {found.uid!r} has no state {state!r}; it has: {_listed(s.name for s in found.states)}"
        )
    try:
        keys = parse_ddl(found.key_schema)
        # A state may be its keys alone (deduplicate).
        values = parse_ddl(entry.schema) if entry.schema else ()
    except ValueError as error:
        raise CorruptManifest(f"{where}: the columns of {found.uid}/{state} cannot be read: {error}") from error
    return StateView(catalog.root, manifest, found, entry, keys, values)


@dataclass(frozen=True)
class StateView:
    """One state of one operator as of one snapshot.

    Columns are shown by their own names, keys first; where a key and a value column have the same name, they are
    `key.<name>` and `value.<name>`.
    """

    root: Store
    manifest: Manifest
    operator: OperatorEntry
    state: StateEntry
    keys: tuple[DdlColumn, ...]
    values: tuple[DdlColumn, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, as shown."""
        keys, values = [c.name for c in self.keys], [c.name for c in self.values]
        both = set(keys) & set(values)
        shown = [f"key.{n}" if n in both else n for n in keys] + [f"value.{n}" if n in both else n for n in values]
        if len(set(shown)) < len(shown):  # a column's own name begins with such a prefix
            shown = [f"key.{n}" for n in keys] + [f"value.{n}" for n in values]
        return tuple(shown)

    def parse_key(self, texts: Sequence[str]) -> dict[str, Any]:
        """A key for `read` from texts `column=value`; a column without `=` is null.

        Values are read by the column's type: numbers, true and false, text as it is, binary as hexadecimal digits, dates
        2013-01-31, times 2013-01-31 12:00:00 (in UTC, unless they end with an offset).

        Raises:
            InvalidConfiguration: another column, or one twice. InvalidData: a value that its type cannot have.
        """
        return self._parse(texts, "key column", {c.name: c for c in self.keys})

    def parse_where(self, texts: Sequence[str]) -> dict[str, Any]:
        """Conditions for `read` from texts, as `parse_key` reads them, on any column."""
        return self._parse(texts, "column", self._by_shown_name())

    def read(
        self,
        *,
        key: Mapping[str, Any] | None = None,
        where: Mapping[str, Any] | Any | None = None,
        hash_range: tuple[int, int] | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Rows of the state, ordered by key hash; a key that is not there, or was removed, gives no row.

        Args:
            key: value by key column, all of them: only what overlaps the key's hash is read. Null equals null, NaN equals
                NaN, 0.0 equals -0.0, as in Spark's grouping.
            where: only rows with these values, by column as shown, with the same equality; or an Arrow expression
                (`pyarrow.compute.field("n") > 3`). Does not narrow what is read.
            hash_range: only keys whose unsigned hash lies in this closed range.
            columns: which, as shown, in this order; None: all.
            limit: rows at most; None: all, in memory.

        Raises:
            InvalidConfiguration: a column that is not there, or arguments that do not go together.
            InvalidData: a value that does not fit its column.
            MissingFile, CorruptSegment: stored data is damaged; the message names the file. StoreUnavailable: try again.
        """
        low, high = hash_range if hash_range is not None else (0, HASH_MAX)
        if not 0 <= low <= high <= HASH_MAX:
            raise InvalidConfiguration("hash_range must be two hashes from 0 to 2^64 - 1, the lower one first")
        if limit is not None and limit < 0:
            raise InvalidConfiguration(f"limit is {limit}; give 0 or more")
        self._check_columns([*(columns or ()), *(where if isinstance(where, Mapping) else ())])
        if key is None:
            batches = self._scan(low, high)
        elif hash_range is None:
            batches = self._one(key)
        else:
            raise InvalidConfiguration("give a key or a hash_range, not both: a key has one hash")
        rows = self._collect(batches, where, limit)
        return rows if columns is None else rows.select(list(columns))

    # --- rows ----------------------------------------------------------------------------------------------------

    def _collect(self, batches: Iterator[pa.RecordBatch], where: Any, limit: int | None) -> pa.Table:
        """Rows under their shown names; stops to read where the limit is reached."""
        conditions = self._conditions(where) if isinstance(where, Mapping) else []
        names = list(self.columns)
        parts: list[pa.Table] = []
        left = limit
        for batch in batches:
            for position, wanted in conditions:
                column = batch.column(2 + position)
                batch = batch.filter(pa.array(same_keys([column], [_repeat(wanted, len(column))])))
            part = pa.Table.from_batches([batch]).select(range(2, 2 + len(names))).rename_columns(names)
            if where is not None and not isinstance(where, Mapping):
                try:
                    part = part.filter(where)
                except (pa.ArrowException, TypeError) as error:
                    raise InvalidConfiguration(
                        f"{self._name}: the condition does not fit the columns {_listed(names)}: {error}"
                    ) from error
            parts.append(part if left is None else part.slice(0, left))
            if left is not None:
                left -= parts[-1].num_rows
                if left <= 0:
                    break
        # Every read yields at least one batch, of the stored types where anything is stored.
        return pa.concat_tables([p for p in parts if p.num_rows] or parts[:1])

    def _one(self, key: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """The row of one key; newest first, so older files are not read once it is found."""
        wanted = self._key_columns(key)
        if not all(column.binary_equality for column in self.keys):
            # Spark hashes something else than the bytes of a string with a collation: look everywhere.
            for batch in self._scan(0, HASH_MAX):
                repeated = [_repeat(column, batch.num_rows) for column in wanted]
                yield batch.filter(pa.array(same_keys(batch.columns[2 : 2 + len(wanted)], repeated)))
            return
        hashed = hash_key(wanted)
        schema = self._declared()
        for source in self._sources(hashed, hashed):
            batch = slice_hash_range(self._load(source), hashed, hashed)
            schema = StateSchema.of(batch.schema)
            (position,) = lookup(batch, schema, np.array([hashed], dtype=np.uint64), wanted)
            if position >= 0:
                row = batch.slice(int(position), 1)
                yield schema.empty() if row.column(DELETED)[0].as_py() else row
                return
        yield schema.empty()

    def _scan(self, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Live rows of a hash range, folded one part of the range after the other."""
        sources = list(self._sources(low, high))
        if not sources:
            yield self._declared().empty()
            return
        cuts = sorted({low, *(source.low for source in sources if source.low > low)})
        cuts = cuts[:: -(-len(cuts) // _RANGES_MAX)]
        waiting = sorted(range(len(sources)), key=lambda number: sources[number].low, reverse=True)
        open_files: dict[int, pa.RecordBatch] = {}
        stored: pa.Schema | None = None
        for start, end in zip(cuts, [*(cut - 1 for cut in cuts[1:]), high], strict=True):
            while waiting and sources[waiting[-1]].low <= end:
                number = waiting.pop()
                batch = open_files[number] = self._load(sources[number])
                stored = batch.schema if stored is None else stored
                if not batch.schema.equals(stored):
                    raise CorruptSegment(f"{sources[number].path}: {self._name} has other types here than elsewhere")
            # Sources are numbered newest first, which is the order that folding needs.
            newest_first = [slice_hash_range(open_files[number], start, end) for number in sorted(open_files)]
            if stored is not None and newest_first:
                yield fold(newest_first, StateSchema.of(stored), drop_deleted=True)
            open_files = {number: batch for number, batch in open_files.items() if sources[number].high > end}

    # --- files ---------------------------------------------------------------------------------------------------

    def _sources(self, low: int, high: int) -> Iterator[_Source]:
        """The parts and tables of this state that overlap a hash range, newest first; indexes are read when asked for."""
        operator, state = self.operator.uid, self.state.name
        for segment in reversed(self.manifest.segments):
            for part in read_index(self.root, segment, self.manifest.job_uid).parts:
                if (part.kind, part.operator, part.state) == ("state", operator, state):
                    load = partial(fetch_part, self.root, segment.path, part)
                    source = _Source(part.path or segment.path, part.hash_low, part.hash_high, load)
                    if source.overlaps(low, high):
                        yield source
        for layer in reversed(self.manifest.layers):
            for table in layer.tables:
                if (table.operator, table.state) == (operator, state):
                    source = _Source(table.path, table.hash_low, table.hash_high, partial(read_table, self.root, table))
                    if source.overlaps(low, high):
                        yield source

    def _load(self, source: _Source) -> pa.RecordBatch:
        """A part or table, checked against the manifest's columns and its own range."""
        batch = source.load()
        try:
            # Values go to people and into other programs: offsets and text must be what they claim, whoever wrote them.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptSegment(f"{source.path}: {self._name} holds values that are none of their type") from error
        stored = StateSchema.of(batch.schema)
        for declared, fields in ((self.keys, stored.keys), (self.values, stored.values)):
            names_differ = [c.name for c in declared] != list(fields.names)
            if names_differ or any(
                c.type is not None and not c.is_nested and c.type != field.type for c, field in zip(declared, fields)
            ):
                raise CorruptSegment(
                    f"{source.path}: {self._name} has the columns {_fields(fields)} where the manifest says "
                    f"{_listed(f'{c.name} {c.type_text}' for c in declared)}"
                )
        hashes = hashes_of(batch)
        if len(hashes) and not (source.low <= int(hashes[0]) and int(hashes[-1]) <= source.high):
            raise CorruptSegment(f"{source.path}: {self._name} has keys outside of the hash range that it is named for")
        return batch

    # --- columns and values --------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"operator {self.operator.uid!r}, state {self.state.name!r}"

    def _declared(self) -> StateSchema:
        """The columns where nothing is stored; types that this reader does not know are null."""
        keys, values = (
            pa.schema([pa.field(c.name, pa.null() if c.type is None else c.type) for c in columns])
            for columns in (self.keys, self.values)
        )
        return StateSchema(keys, values)

    def _by_shown_name(self) -> dict[str, DdlColumn]:
        return dict(zip(self.columns, (*self.keys, *self.values), strict=True))

    def _check_columns(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.columns:
                raise InvalidConfiguration(f"{self._name} has no column {name!r}; it has: {_listed(self.columns)}")

    def _key_columns(self, key: Mapping[str, Any]) -> list[pa.Array]:
        names = [column.name for column in self.keys]
        for name in key:
            if name not in names:
                raise InvalidConfiguration(f"{self._name} has no key column {name!r}; it has: {_listed(names)}")
        missing = [name for name in names if name not in key]
        if missing:
            raise InvalidConfiguration(
                f"{self._name}: the key lacks {_listed(missing)}; a key has all of {_listed(names)}. "
                "To find rows by some of them, use `where`, which reads the whole state"
            )
        return [self._array(column, key[column.name], "key column") for column in self.keys]

    def _conditions(self, where: Mapping[str, Any]) -> list[tuple[int, pa.Array]]:
        """Positions and wanted values."""
        found = []
        for position, (name, column) in enumerate(self._by_shown_name().items()):
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
                parsed[name] = None if text == name else _parse_value(text[len(name) + 1 :], columns[name].type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
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
    """A part or a table: where it is, the closed range of hashes that it may hold, and how to read it."""

    path: str
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


def _parse_value(text: str, kind: pa.DataType | None) -> pa.Scalar:
    if kind is None or pa.types.is_nested(kind):
        raise ValueError("no text form")
    if pa.types.is_binary(kind):
        return pa.scalar(bytes.fromhex(text.removeprefix("0x")), kind)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        try:
            return pa.scalar(text).cast(pa.timestamp(kind.unit)).cast(pa.int64()).cast(kind)
        except pa.ArrowInvalid:
            pass  # it has an offset
    return pa.scalar(text).cast(kind)


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
    ):
        if is_kind(kind):
            return hint
    return ""


def _repeat(one: pa.Array, count: int) -> pa.Array:
    return pa.repeat(one[0], count)


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"


def _fields(schema: pa.Schema) -> str:
    return _listed(f"{field.name} {field.type}" for field in schema)
