"""The input of a vectorised processor: the rows of one shard in one epoch, by key, and the state of their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidData, InvalidPipeline
from state_runtime.processors.columns import fit_column
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock
from state_runtime.processors.places import Places
from state_runtime.processors.user.keyed_collections import KeyedList, KeyedMap
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Mask, Positions, StateSchema, Time

__all__ = ["KeyedBatch", "KeyedState", "RowsByKey"]

Array = TypeVar("Array", bound="np.ndarray[Any, Any]")


class KeyedState(NamedTuple):
    """One state of a batch's keys, to be unpacked: `found, values = batch.state("totals")`.

    Attributes:
        found: whether the key has a value.
        values: the value columns, one row per key; null if it has none.
    """

    found: Mask
    values: pa.RecordBatch


class RowsByKey:
    """Rows of one shard in one epoch, by key: those of a key are adjacent, in source order; key number k has the rows
    `starts[k]` up to (without) `stops[k]`. All returned data is read-only."""

    def __init__(self, operator: str, rows: GroupedRows) -> None:
        self._operator = operator
        self._rows = rows

    @property
    def rows(self) -> pa.RecordBatch:
        """All input columns, the key columns too; equal keys together, a key's rows in source order."""
        return self._rows.rows

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self._rows.groups

    @cached_property
    def starts(self) -> Positions:
        """Per key, the position of its first row."""
        return _frozen(self._rows.starts)

    @cached_property
    def stops(self) -> Positions:
        """Per key, the position after its last row."""
        return _frozen(self._rows.stops)

    @cached_property
    def sizes(self) -> Positions:
        """Per key, the number of its rows."""
        return _frozen(self._rows.stops - self._rows.starts)

    @cached_property
    def key_of_row(self) -> Positions:
        """Per row, the number of its key."""
        return _frozen(np.repeat(np.arange(self.num_keys), self.sizes))

    @cached_property
    def row_in_key(self) -> Positions:
        """Per row, how many rows of its key come before it in this batch."""
        return _frozen(np.arange(self.rows.num_rows) - np.repeat(self.starts, self.sizes))

    @cached_property
    def sequence(self) -> Positions:
        """Per row, a number that orders the rows of all keys as the source had them (with gaps)."""
        return _frozen(self._rows.sequence)

    def per_row(self, values: Any) -> Any:
        """Repeat one value per key (numpy array, Arrow column or batch) for each of the key's rows.

        Raises:
            InvalidData: not one value per key.
        """
        if len(values) != self.num_keys:
            raise InvalidData(
                f"operator {self._operator!r}: per_row() got {len(values)} values for {self.num_keys} keys; give one "
                "per key"
            )
        return values[self.key_of_row] if isinstance(values, np.ndarray) else values.take(pa.array(self.key_of_row))

    def first_rows(self) -> pa.RecordBatch:
        """Return the first row of each key, aligned with `keys`; nulls for a key without rows."""
        return self.rows.take(pa.array(self.starts, mask=self.sizes == 0))

    def last_rows(self) -> pa.RecordBatch:
        """Return the last row of each key, aligned with `keys`; nulls for a key without rows."""
        return self.rows.take(pa.array(self.stops - 1, mask=self.sizes == 0))

    def reduce(self, function: Any, values: Any, initial: Any) -> Any:
        """Return one value per key, of those of its rows: `batch.reduce(np.add, amounts, 0)`.

        Args:
            function: a numpy function of two values (`np.add`, `np.maximum`, `np.logical_or`, …).
            values: a numpy array, one value per row.
            initial: the value of a key without rows (which `function.reduceat` does not know).

        Raises:
            InvalidData: not one value per row.
        """
        given = np.asarray(values)
        if len(given) != self.rows.num_rows:
            raise InvalidData(
                f"operator {self._operator!r}: reduce() got {len(given)} values for {self.rows.num_rows} rows; give "
                "one per row"
            )
        there = self.sizes > 0
        reduced = function.reduceat(given, self.starts[there]) if bool(there.any()) else given[:0]
        result = np.full(self.num_keys, initial, dtype=np.result_type(reduced, np.min_scalar_type(initial)))
        result[there] = reduced
        return result


class KeyedBatch(RowsByKey):
    """The rows of one shard in one epoch, by key, and the state of their keys.

    A key's rows are adjacent, in source order; key number k has the rows `starts[k]` up to (without) `stops[k]`, at
    least one. So `np.add.reduceat(column, batch.starts)` sums per key, and likewise with `np.maximum`,
    `np.logical_or`, … The order of the keys has no meaning. Equal keys are equal as in Spark's GROUP BY (null equals
    null, NaN equals NaN).

    All returned data is read-only; state changes only by `update` and `clear`, and `state` shows these changes at
    once.
    """

    def __init__(
        self,
        operator: str,
        key_schema: pa.Schema,
        schemas: Mapping[str, StateSchema],
        rows: GroupedRows,
        version: StateReader,
        clock: EpochClock,
        ttl_ms: Mapping[str, int],
        places: Places | None = None,
    ) -> None:
        super().__init__(operator, rows)
        self._places = places
        self._collections: dict[str, KeyedList | KeyedMap] = {}
        self._key_schema = key_schema
        self._schemas = schemas
        self._version = version
        self._ttl_ms = ttl_ms
        self._states: dict[str, _StateColumns] = {}
        self._written: dict[str, _Written] = {}
        self.batch_time_ms = clock.batch_time_ms
        """Spark's time of the batch, the same in every attempt of a task."""
        self.watermark_ms = clock.watermark_ms
        """Event time up to which all rows should have arrived: the highest of earlier epochs minus the allowed delay; 0
        at first."""
        self.late_watermark_ms = clock.late_watermark_ms
        """The watermark of the epoch before; rows at or below it are too late. In time mode "event" they have been
        removed."""

    def __repr__(self) -> str:
        return f"KeyedBatch({self.num_keys} keys, {self.rows.num_rows} rows)"

    @cached_property
    def keys(self) -> pa.RecordBatch:
        """The key columns, one row per key."""
        return pa.RecordBatch.from_arrays(self._rows.keys, schema=self._key_schema)

    def state(self, name: str) -> KeyedState:
        """Return the state of all keys, aligned with `keys`, with the changes of this call of `process` so far.

        Raises:
            InvalidPipeline: `states()` does not name it.
        """
        columns = self._columns(name)
        # The time column, if any, belongs to the runtime; it comes after the value columns.
        schema = columns.schema.values
        values = pa.RecordBatch.from_arrays(columns.values[: len(schema)], schema=schema)
        return KeyedState(_frozen(columns.found.copy()), values)

    def list_state(self, name: str) -> KeyedList:
        """Return the lists of all keys: a state that `states()` declares as `ListOf`.

        Raises:
            InvalidPipeline: it does not.
        """
        found = self._collection(name)
        if not isinstance(found, KeyedList):
            raise InvalidPipeline(
                f"operator {self._operator!r}: state {name!r} is a map; read it with batch.map_state()"
            )
        return found

    def map_state(self, name: str) -> KeyedMap:
        """Return the maps of all keys: a state that `states()` declares as `MapOf`.

        Raises:
            InvalidPipeline: it does not.
        """
        found = self._collection(name)
        if not isinstance(found, KeyedMap):
            raise InvalidPipeline(
                f"operator {self._operator!r}: state {name!r} is a list; read it with batch.list_state()"
            )
        return found

    def _collection(self, name: str) -> KeyedList | KeyedMap:
        schema = self._schemas.get(name)
        if schema is None or schema.entries is None or self._places is None:
            declared = sorted(each for each, s in self._schemas.items() if s.entries is not None)
            raise InvalidPipeline(
                f"operator {self._operator!r} has no list or map {name!r}; states() names "
                f"{', '.join(declared) or 'none'}"
            )
        if name not in self._collections:
            where = f"operator {self._operator!r}, state {name!r}"
            given = (where, name, schema, self._rows, self._version, partial(self._fit_rows, where))
            made = KeyedMap(*given) if len(schema.entries) else KeyedList(self._places, *given)
            self._collections[name] = made
        return self._collections[name]

    def update(self, name: str, values: Any, where: Any = None, *, due: Any = None) -> None:
        """Set the state of all keys, or of those where a mask is true.

        Args:
            values: all value columns of the state: a mapping of names to numpy arrays or Arrow columns, a record batch
                or a table. One row per key; with `where` also one row per key for which it is true.
            where: booleans, one per key.
            due: for a state with `due`, the time (ms) at which the keys fall due: one integer for all, or a column like
                those of `values`, where null is never. None: never.

        Raises:
            InvalidData: a wrong column, length or type, or a value that does not fit.
            InvalidPipeline: `states()` does not name the state.
        """
        columns = self._columns(name)
        mask = self._mask(name, "update", where)
        fitted = self._fit(name, columns.schema.values, values, mask)
        count = self.num_keys if mask is None else int(np.count_nonzero(mask))
        columns.put(mask, [*fitted, *self._times(name, columns.schema.time, due, mask, count)])

    def clear(self, name: str, where: Any = None) -> None:
        """Remove the state of all keys, or of those where a mask is true; keys without state are skipped.

        Raises:
            InvalidData: the mask is not one boolean per key.
            InvalidPipeline: `states()` does not name the state.
        """
        self._columns(name).clear(self._mask(name, "clear", where))

    def look_up(self, name: str, columns: Sequence[str] = ()) -> KeyedState:
        """Return which keys have a value, and only some of the value columns. For built-in processors, which do not
        call `state` for it."""
        found, values = self._version.find(name, self._rows.hashes, self._rows.keys, columns)
        schema = pa.schema([self._schemas[name].values.field(column) for column in columns])
        return KeyedState(found, pa.RecordBatch.from_arrays(values, schema=schema))

    def write(self, name: str, values: Any, where: Mask, found: Mask, *, due: Any = None) -> None:
        """Write new values, once in a call, instead of `update`. For built-in processors: the values are not read
        again, so they are not merged with the old ones.

        Args:
            values, where, due: see `update`.
            found: the result of `look_up`.
        """
        schema = self._schemas[name]
        fitted = self._fit(name, schema.values, values, where)
        times = self._times(name, schema.time, due, where, int(np.count_nonzero(where)))
        self._written[name] = _Written(schema, where, found, [*fitted, *times])

    def changes(self) -> tuple[dict[str, pa.RecordBatch], int]:
        """For the runtime: return per state the changes, as a sorted batch, and the live rows gained."""
        batches = {name: written.changes(self._rows) for name, written in self._written.items()}
        gained = sum(written.gained for written in self._written.values())
        for name, collection in self._collections.items():
            batches[name] = collection.changes
            gained += collection.gained
        for name, columns in self._states.items():
            batches[name] = columns.changes(self._rows)
            gained += int(np.count_nonzero(columns.found)) - int(np.count_nonzero(columns.existed))
        return batches, gained

    def start_due(self, name: str, values: list[pa.Array]) -> None:
        """For the runtime: set the state of all keys, which is known because it was found by its time."""
        self._states[name] = _StateColumns(self._schemas[name], np.ones(self.num_keys, dtype=np.bool_), values)

    def end_due(self, name: str) -> None:
        """For the runtime: remove values that were due and were not updated."""
        columns = self._states[name]
        columns.clear(~columns.touched)

    def _columns(self, name: str) -> _StateColumns:
        if name not in self._schemas:
            raise InvalidPipeline(
                f"operator {self._operator!r} has no state {name!r}; states() names {', '.join(sorted(self._schemas))}"
            )
        if self._schemas[name].entries is not None:
            way = "map" if len(self._schemas[name].entries or ()) else "list"
            raise InvalidPipeline(
                f"operator {self._operator!r}: state {name!r} has many values of a key; use batch.{way}_state({name!r})"
            )
        if name not in self._states:
            found, values = self._version.find(name, self._rows.hashes, self._rows.keys)
            self._states[name] = _StateColumns(self._schemas[name], found, values)
        return self._states[name]

    def _mask(self, name: str, method: str, where: Any) -> Mask | None:
        if where is None:
            return None
        mask = np.asarray(where)
        if mask.dtype != np.bool_ or mask.shape != (self.num_keys,):
            raise InvalidData(
                f"operator {self._operator!r}, state {name!r}: {method}(where=…) needs {self.num_keys} booleans, one "
                f"per key and none null, not {mask.dtype} of shape {mask.shape}"
            )
        return mask

    def _fit(self, name: str, schema: pa.Schema, values: Any, mask: Mask | None) -> list[pa.Array]:
        """Return the columns of an update in the declared types and order, only for the keys of the mask."""
        where = f"operator {self._operator!r}, state {name!r}"
        given = _named_columns(values, where)
        if sorted(given) != sorted(schema.names):
            raise InvalidData(
                f"{where}: update() got the columns {', '.join(sorted(given)) or 'none'}; the state has "
                f"{', '.join(schema.names)}, and an update sets all of them"
            )
        count = self.num_keys if mask is None else int(np.count_nonzero(mask))
        return [self._fit_column(where, f, given[f.name], mask, count) for f in schema]

    def _fit_rows(self, where: str, schema: pa.Schema, values: Any, count: int) -> list[pa.Array]:
        """Return columns of rows in the declared types and order."""
        given = _named_columns(values, where)
        if sorted(given) != sorted(schema.names):
            raise InvalidData(
                f"{where}: got the columns {', '.join(sorted(given)) or 'none'}, and it has {', '.join(schema.names)}"
            )
        columns = []
        for field in schema:
            column = _as_column(given[field.name], field, where)
            if len(column) != count:
                raise InvalidData(f"{where}: got {len(column)} values in column {field.name!r} for {count} rows")
            columns.append(fit_column(column, field, lambda: where))
        return columns

    def _fit_column(self, where: str, field: pa.Field, values: Any, mask: Mask | None, count: int) -> pa.Array:
        column = _as_column(values, field, where)
        if len(column) not in (count, self.num_keys):
            raise InvalidData(
                f"{where}: update() got {len(column)} values in column {field.name!r} for "
                f"{count} of {self.num_keys} keys; give one per key, or one per key of the mask"
            )
        if len(column) != count:
            column = column.filter(pa.array(mask))
        return fit_column(column, field, lambda: where)

    def _times(self, name: str, time: Time, due: Any, mask: Mask | None, count: int) -> list[pa.Array]:
        """Return the time column of an update, if the state has one."""
        where = f"operator {self._operator!r}, state {name!r}"
        if due is not None and time != "due":
            raise InvalidData(
                f"{where}: update() got due=…, and the state has none; declare it as TimedState(…, due=True)"
            )
        if time == "":
            return []
        if time == "expires":
            return [pa.array(np.full(count, self.batch_time_ms + self._ttl_ms[name]))]
        if due is None:
            return [pa.nulls(count, pa.int64())]
        if isinstance(due, int | np.integer):
            due = np.full(count, due)
        return [self._fit_column(where, pa.field("due", pa.int64()), due, mask, count)]


@dataclass(frozen=True)
class _Written:
    """New values of some keys of one state, and their times if it has one.

    Attributes:
        where: the keys that are written.
        found: the keys that had a value before.
    """

    schema: StateSchema
    where: Mask
    found: Mask
    values: Sequence[pa.Array]

    @property
    def gained(self) -> int:
        """Return the number of live rows that did not exist before."""
        return int(np.count_nonzero(self.where & ~self.found))

    def changes(self, rows: GroupedRows) -> pa.RecordBatch:
        """Return the rows to log."""
        hashes, keys = rows.hashes, rows.keys
        if not bool(self.where.all()):
            at = pa.array(np.flatnonzero(self.where))
            hashes, keys = hashes[self.where], [k.take(at) for k in keys]
        count = len(self.schema.values)
        times = self.values[-1] if self.schema.time else None
        return self.schema.batch(hashes, None, keys, self.values[:count], times=times)


class _StateColumns:
    """One state of the batch's keys: its stored and its current values.

    Attributes:
        existed: which keys had a value when the epoch began.
        found: which keys have one now.
        values: the value columns now, and the time column if the state has one; null for keys without a value.
        touched: which keys were updated or cleared.
    """

    def __init__(self, schema: StateSchema, existed: Mask, values: list[pa.Array]) -> None:
        self.schema = schema
        self.existed = existed
        self.found = existed.copy()
        self.values = values
        self.touched = np.zeros(len(existed), dtype=np.bool_)

    def put(self, mask: Mask | None, values: list[pa.Array]) -> None:
        """Set new values, as many as the mask has true ones."""
        if mask is None:
            self.values = values
            self.found[:] = self.touched[:] = True
            return
        count = len(self.found)
        # Picking from the concatenated old and new values works for every type, nested ones too.
        at = np.arange(count)
        at[mask] = count + np.arange(np.count_nonzero(mask))
        picked = pa.array(at)
        self.values = [pa.concat_arrays([old, new]).take(picked) for old, new in zip(self.values, values)]
        self.found[mask] = self.touched[mask] = True

    def clear(self, mask: Mask | None) -> None:
        """Remove the values."""
        gone = np.ones(len(self.found), dtype=np.bool_) if mask is None else mask
        kept = pa.array(np.arange(len(gone)), mask=gone)
        self.values = [column.take(kept) for column in self.values]
        self.found[gone] = False
        self.touched[gone] = True

    def changes(self, rows: GroupedRows) -> pa.RecordBatch:
        """Return the rows to log; clearing a value that was never stored logs nothing."""
        changed = self.touched & (self.found | self.existed)
        gone = ~self.found
        hashes, keys, values = rows.hashes, rows.keys, self.values
        if not bool(changed.all()):
            at = np.flatnonzero(changed)
            taken = pa.array(at)
            hashes, gone = hashes[at], gone[at]
            keys, values = [k.take(taken) for k in keys], [v.take(taken) for v in values]
        times = values[-1] if self.schema.time else None
        return self.schema.batch(hashes, gone, keys, values[: len(self.schema.values)], times=times)


def _named_columns(values: Any, where: str) -> dict[str, Any]:
    """Return the columns of an update by name."""
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, pa.Table | pa.RecordBatch):
        if len(set(values.schema.names)) < len(values.schema.names):
            raise InvalidData(f"{where}: update() got a column twice: {', '.join(values.schema.names)}")
        return dict(zip(values.schema.names, values.columns))
    raise InvalidData(
        f'{where}: update() got a {type(values).__name__}; give {{"column": array, …}}, a record batch or a table'
    )


def _as_column(values: Any, field: pa.Field, where: str) -> pa.Array:
    """Return one column as an Arrow array of its own type."""
    if isinstance(values, pa.ChunkedArray):
        if values.num_chunks == 1:
            return values.chunk(0)
        return pa.concat_arrays(values.chunks) if values.num_chunks else pa.nulls(0, values.type)
    if isinstance(values, pa.Array):
        return values
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError("not a column")
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise InvalidData(
            f"{where}: update() got a {type(values).__name__} for column {field.name!r} that Arrow makes no column of; "
            "give a one-dimensional numpy array or an Arrow array"
        ) from None  # Arrow's own message holds the value


def _frozen(array: Array) -> Array:
    """Return a read-only view: the runtime works on the same memory."""
    view: Array = array.view()
    view.flags.writeable = False
    return view
