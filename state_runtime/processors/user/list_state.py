"""`ListState`: the interface of `pyspark.sql.streaming.stateful_processor.ListState`.

An element's place is `(snapshot id << 28) | ordinal`, the ordinal counted per task and state: so an append need not
read the stored list, and elements appended later come later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidData
from state_runtime.processors.user.scope import Collection, Scope, entries_batch
from state_runtime.processors.user.user_errors import InvalidStateValue
from state_runtime.processors.user.value_codec import ValueCodec
from state_runtime.state.table import StateSchema

__all__ = ["ORDINAL_BITS", "ListState"]

ORDINAL_BITS = 28
"""2^28 elements per task and epoch, 2^36 epochs: a list that grows by one element per epoch and row never wraps."""

_CHUNK = 10_000  # elements of a long list in memory at once, as Spark hands them over


class ListState(Collection):
    """A list per key. Appending reads nothing; the first read loads the lists of many keys at once, long ones on
    demand."""

    def __init__(
        self, name: str, where: str, schema: StateSchema, scope: Scope, expires_ms: int | None, snapshot_id: int
    ) -> None:
        """
        Args:
            where: operator and state, for messages.
            expires_ms: when an element that is written in this epoch expires; None for a state without TTL.
            snapshot_id: of the epoch.
        """
        super().__init__(name, where, schema, scope)
        self._time_ms = expires_ms
        self._codec = ValueCodec(schema.values, where)
        self._is_plain = self._codec.is_plain
        self._first_place = snapshot_id << ORDINAL_BITS
        self._ordinal = 1
        self._own: dict[int, list[tuple[Any, ...]]] = self._no_key
        self._lost = 0
        self._rows: list[tuple[Any, ...]] = []

    def exists(self) -> bool:
        """Return whether the list has an element."""
        if self._own.get(self._scope.group):
            return True
        stored = self._stored()
        return bool(stored) if isinstance(stored, list) else bool(stored.exists())

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Yield the elements in order, as they are when the first one is fetched; iterators are independent.

        Lists and maps inside them are copies for the caller.
        """
        own = list(self._own.get(self._scope.group, ()))
        stored = self._stored()
        rows = stored if isinstance(stored, list) else stored.rows()
        fresh = self._codec.fresh
        if fresh is None:
            yield from rows
            yield from own
        else:
            yield from map(fresh, rows)
            yield from map(fresh, own)

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        """Replace the list.

        Raises:
            InvalidStateValue: no element, or one that does not fit.
        """
        rows = self._elements(newState, "put")
        self.clear()
        self._own[self._scope.group] = rows

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Add an element at the end.

        Raises:
            InvalidStateValue: not a tuple of the schema's fields.
        """
        if not self._is_plain(newState):
            newState = self._row(newState, "appendValue")
        self._own[self._scope.group].append(newState)

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        """Add elements at the end.

        Raises:
            InvalidStateValue: no element, or one that does not fit; then nothing is added.
        """
        rows = self._elements(newState, "appendList")
        self._own[self._scope.group].extend(rows)

    def clear(self) -> None:
        """Remove the list, if there is one."""
        group = self._scope.group
        self._own.pop(group, None)
        if group not in self.cleared:
            base = self.bases.get(group)
            self._lost += len(base) if isinstance(base, list) else 0
            self.cleared.add(group)

    def _elements(self, given: Any, method: str) -> list[tuple[Any, ...]]:
        if given is None or isinstance(given, str | bytes | dict):
            raise InvalidStateValue(f"{self._where}: {method}() got a {type(given).__name__}; give a list of tuples")
        rows = [self._row(element, method) for element in given]
        if not rows:
            raise InvalidStateValue(
                f"Error updating value state: [ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] {self._where}: {method}() "
                "got no element; clear() empties a list"
            )
        return rows

    def _row(self, element: Any, method: str) -> tuple[Any, ...]:
        if element is None:
            raise InvalidStateValue(
                f"Error updating value state: [ILLEGAL_STATE_STORE_VALUE.NULL_VALUE] {self._where}: {method}() got "
                "None as an element; an element is a tuple, of nulls perhaps"
            )
        return self._codec.row_of(element, method)

    # --- for the passes ---

    def attach(self) -> None:
        self._attach()
        self._own = defaultdict(list)
        self._lost = 0

    def detach(self) -> None:
        self._own = self._no_key
        self.bases = {}
        self._rows = []

    def changes(self) -> tuple[pa.RecordBatch, int]:
        """Return the changes of user code in the slice, as a sorted batch, and the live rows gained."""
        markers = self._markers()
        ordered = sorted(self._own)
        lists = [self._own[group] for group in ordered]
        sizes = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        rows = list(chain.from_iterable(lists))
        count = len(rows)
        if not count and not len(markers):
            return self._schema.empty(), -self._lost
        if self._ordinal + count > 1 << ORDINAL_BITS:
            raise InvalidData(
                f"{self._where}: more than {1 << ORDINAL_BITS:,} elements are appended by one task in one epoch; read "
                "fewer rows per epoch or raise the parallelism"
            )
        places = np.arange(count, dtype=np.uint64) + np.uint64(self._first_place + self._ordinal)
        self._ordinal += count
        times = None
        if self._schema.time:
            times = pa.array(np.full(count, self._time_ms or 0, dtype=np.int64))
        batch = entries_batch(
            self._schema,
            self._scope,
            np.repeat(np.array(ordered, dtype=np.int64), sizes),
            places,
            np.zeros(count, dtype=np.bool_),
            [],
            self._codec.columns(rows),
            times,
            markers,
        )
        return batch, count - self._lost

    # --- stored rows ---

    def _stored(self) -> Any:
        """Return the stored elements of the current key: a list, or a `_LongList`."""
        group = self._scope.group
        if group in self.cleared:
            return _NOTHING
        base = self.bases.get(group)
        return self._load(group) if base is None else base

    def _decode(self, batch: pa.RecordBatch) -> None:
        self._rows = self._codec.rows(self._schema.values_of(batch))

    def _small(self, start: int, stop: int) -> list[tuple[Any, ...]]:
        return self._rows[start:stop] if start < stop else _NOTHING

    def _large(self, group: int) -> _LongList:
        return _LongList(self, self._scope.hashes[group], self._scope.key_of(group), self._scope.reader)

    def rows_of(self, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        """Return stored rows as elements."""
        return self._codec.rows(self._schema.values_of(batch))


_NOTHING: list[tuple[Any, ...]] = []


class _LongList:
    """A stored list that is too long to be loaded: read from the state each time."""

    __slots__ = ("_hash", "_key", "_reader", "_state")

    def __init__(self, state: ListState, key_hash: Any, key: list[pa.Array], reader: Any) -> None:
        self._state = state
        self._hash = int(key_hash)
        self._key = key
        self._reader = reader

    def exists(self) -> bool:
        """Return whether an element is live: with a TTL all stored ones may have expired."""
        return any(batch.num_rows for batch in self._reader.iter_entries(self._state.name, self._hash, self._key, 1))

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the elements in order; the reader never changes, so the result does not change either."""
        for batch in self._reader.iter_entries(self._state.name, self._hash, self._key, _CHUNK):
            yield from self._state.rows_of(batch)
