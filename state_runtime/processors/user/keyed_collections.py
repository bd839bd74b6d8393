"""Lists and maps of many keys at once, in a `KeyedBatch`: what a processor reads of them and changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidData
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.places import Places
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Mask, Positions, StateSchema, first_of_groups, fold, in_order, removal_of

__all__ = ["Entries", "KeyedList", "KeyedMap", "ListOf", "MapOf"]


@dataclass(frozen=True)
class ListOf:
    """A list for each key, for `VectorizedProcessor.states`.

    Attributes:
        schema: columns of an element, as Spark's DDL or a StructType.
    """

    schema: Any


@dataclass(frozen=True)
class MapOf:
    """A map for each key, for `VectorizedProcessor.states`.

    Attributes:
        key: columns of a map's key, as Spark's DDL or a StructType.
        schema: columns of its value.
    """

    key: Any
    schema: Any


class Entries(NamedTuple):
    """The entries of the lists or maps of all keys, to be unpacked: `rows, starts, stops = …`.

    Attributes:
        rows: elements, in the order in which they were appended; of a map its key columns, then the value columns.
        starts, stops: key number k has the rows `starts[k]` up to (without) `stops[k]`; none, if they are equal.
    """

    rows: pa.RecordBatch
    starts: Positions
    stops: Positions


Fit = Callable[[pa.Schema, Any, int], list[pa.Array]]
"""Returns given columns in the types of a schema, as many rows as asked for; raises InvalidData."""


class _Collection:
    """What the lists and the maps of a batch have in common.

    Args:
        where: operator and state, for messages.
        rows: of the batch.
        reader: the state before the batch.
    """

    def __init__(
        self, where: str, name: str, schema: StateSchema, rows: GroupedRows, reader: StateReader, fit: Fit
    ) -> None:
        self._where = where
        self._name = name
        self._schema = schema
        self._rows = rows
        self._before = reader
        self._reader = reader
        self._fit = fit
        self.changes = schema.empty()
        self.gained = 0

    def read(self, where: Any = None) -> Entries:
        """Return all entries of all keys, or of those where a mask is true, with the changes of this call so far.

        They are read at once: for keys with very many entries ask for few keys.
        """
        mask = self._mask(where)
        batch, offsets = self._read(mask)
        starts = np.zeros(self._rows.groups, dtype=np.int64)
        stops = starts.copy()
        starts[mask], stops[mask] = offsets[:-1], offsets[1:]
        fields = [*(self._schema.entries or ()), *self._schema.values]
        columns = [*self._schema.entry_columns_of(batch), *self._schema.values_of(batch)]
        return Entries(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)), starts, stops)

    def clear(self, where: Any = None) -> None:
        """Remove all entries of all keys, or of those where a mask is true."""
        batch, _ = self._read(self._mask(where))
        self._change(removal_of(in_order(batch), self._schema), -batch.num_rows)

    def _read(self, mask: Mask) -> tuple[pa.RecordBatch, Positions]:
        at = np.flatnonzero(mask)
        keys = [key.take(pa.array(at)) for key in self._rows.keys]
        return self._reader.read_entries(self._name, self._rows.hashes[at], keys)

    def _mask(self, where: Any) -> Mask:
        mask = np.ones(self._rows.groups, dtype=np.bool_) if where is None else np.asarray(where)
        if mask.dtype != np.bool_ or mask.shape != (self._rows.groups,):
            raise InvalidData(
                f"{self._where}: where= needs {self._rows.groups} booleans, one per key, not {mask.dtype} of shape "
                f"{mask.shape}"
            )
        return mask

    def _numbers(self, key_of_row: Any) -> Positions:
        """Return the numbers of keys that a user gave, one per row."""
        numbers = np.asarray(key_of_row)
        is_whole = numbers.ndim == 1 and numbers.dtype.kind in "iu"
        if not is_whole or bool(np.any((numbers < 0) | (numbers >= self._rows.groups))):
            raise InvalidData(
                f"{self._where}: key_of_row needs a number of a key (0 to {self._rows.groups - 1}) for each row, as "
                "batch.key_of_row has"
            )
        return numbers.astype(np.int64)

    def _keys_of(self, numbers: Positions) -> list[pa.Array]:
        return [key.take(pa.array(numbers)) for key in self._rows.keys]

    def _change(self, newer: pa.RecordBatch, gained: int) -> None:
        self.changes = fold([newer, self.changes], self._schema, drop_deleted=False)
        self.gained += gained
        self._reader = self._before.overlaid({self._name: self.changes})


class KeyedList(_Collection):
    """The lists of a batch's keys."""

    def __init__(self, places: Places, *given: Any) -> None:
        super().__init__(*given)
        self._places = places

    def append(self, values: Any, key_of_row: Any) -> None:
        """Append elements, each to the list of its key, in their order.

        Args:
            values: all columns of an element, one row per element, as of `KeyedBatch.update`.
            key_of_row: per element the number of its key, as `batch.key_of_row`.

        Raises:
            InvalidData: a wrong column, length or type, a value that does not fit, or no such key.
        """
        numbers = self._numbers(key_of_row)
        columns = self._fit(self._schema.values, values, len(numbers))
        order = np.argsort(numbers, kind="stable")
        numbers, taken = numbers[order], pa.array(order)
        batch = self._schema.batch(
            self._rows.hashes[numbers],
            None,
            self._keys_of(numbers),
            [column.take(taken) for column in columns],
            entries=self._places.next(len(numbers)),
        )
        self._change(batch, len(numbers))


class KeyedMap(_Collection):
    """The maps of a batch's keys."""

    def get(self, keys: Any, key_of_row: Any) -> tuple[Mask, pa.RecordBatch]:
        """Look entries up, each in the map of its key.

        Args:
            keys: the columns of the maps' keys, one row per entry.
            key_of_row: per entry the number of the key whose map is meant.

        Returns:
            Per entry whether it is there, and the value columns, null where it is not.

        Raises:
            InvalidData: a wrong column, length or type, or no such key.
        """
        numbers = self._numbers(key_of_row)
        found, values = self._found(numbers, self._entry_columns(keys, numbers))
        return found, pa.RecordBatch.from_arrays(values, schema=self._schema.values)

    def put(self, keys: Any, values: Any, key_of_row: Any) -> None:
        """Set entries, each in the map of its key; of several with one map key the last one stays.

        Args:
            keys, key_of_row: as of `get`.
            values: all value columns, one row per entry.

        Raises:
            InvalidData: a wrong column, length or type, a value that does not fit, or no such key.
        """
        numbers = self._numbers(key_of_row)
        columns = self._fit(self._schema.values, values, len(numbers))
        entries = self._entry_columns(keys, numbers)
        last = self._last_of_each(numbers, entries)
        numbers, entries = numbers[last], [column.take(pa.array(last)) for column in entries]
        found, _ = self._found(numbers, entries)
        values_of = [column.take(pa.array(last)) for column in columns]
        self._change(self._batch(numbers, entries, values_of, None), int(np.count_nonzero(~found)))

    def remove(self, keys: Any, key_of_row: Any) -> None:
        """Remove entries; those that are not there are skipped.

        Args:
            keys, key_of_row: as of `get`.

        Raises:
            InvalidData: a wrong column, length or type, or no such key.
        """
        numbers = self._numbers(key_of_row)
        entries = self._entry_columns(keys, numbers)
        last = self._last_of_each(numbers, entries)
        numbers, entries = numbers[last], [column.take(pa.array(last)) for column in entries]
        found, _ = self._found(numbers, entries)
        at = pa.array(np.flatnonzero(found))
        nothing = [pa.nulls(len(at), field.type) for field in self._schema.values]
        gone = np.ones(len(at), dtype=np.bool_)
        self._change(self._batch(numbers[found], [c.take(at) for c in entries], nothing, gone), -len(at))

    def _entry_columns(self, keys: Any, numbers: Positions) -> list[pa.Array]:
        return self._fit(self._schema.entries or pa.schema([]), keys, len(numbers))

    def _last_of_each(self, numbers: Positions, entries: Sequence[pa.Array]) -> Positions:
        """Return the last of the rows of each map and map key."""
        hashes = hash_rows(entries)
        order = np.argsort(hashes, kind="stable")
        taken = pa.array(order)
        regroup, first = first_of_groups(hashes[order], [pa.array(numbers[order]), *(c.take(taken) for c in entries)])
        order = order if regroup is None else order[regroup]
        last: Positions = order[np.append(first[1:], True)[: len(order)]]
        return last

    def _found(self, numbers: Positions, entries: Sequence[pa.Array]) -> tuple[Mask, list[pa.Array]]:
        """Return per row whether its map has the entry, and the value columns."""
        order, hashes, places = self._sorted(numbers, entries)
        keys, taken = self._keys_of(numbers[order]), pa.array(order)
        found, values = self._reader.find_entries(
            self._name, hashes[order], keys, places[order], [column.take(taken) for column in entries]
        )
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return found[back], [column.take(pa.array(back)) for column in values[: len(self._schema.values)]]

    def _sorted(self, numbers: Positions, entries: Sequence[pa.Array]) -> tuple[Positions, Any, Any]:
        """Return the order of rows by (key hash, entry), the hashes, and the entries."""
        hashes = self._rows.hashes[numbers]
        places = np.maximum(hash_rows(entries), np.uint64(1))
        return np.lexsort((places, hashes)), hashes, places

    def _batch(
        self, numbers: Positions, entries: Sequence[pa.Array], values: Sequence[pa.Array], gone: Mask | None
    ) -> pa.RecordBatch:
        order, hashes, places = self._sorted(numbers, entries)
        taken = pa.array(order)
        return self._schema.batch(
            hashes[order],
            gone,
            self._keys_of(numbers[order]),
            [column.take(taken) for column in values],
            entries=places[order],
            entry_columns=[column.take(taken) for column in entries],
        )
