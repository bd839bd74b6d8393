"""`MapState`: the interface of `pyspark.sql.streaming.stateful_processor.MapState`.

Each entry is a separate stored row, found by the hash of its map key: changes are logged entry by entry, and of a large
map only the entries that user code asks for are read. Two map keys are the same under Spark's grouping equality
(null is null, NaN is NaN, 0.0 is -0.0). Entries have no particular order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.processors.user.rows import row_class_of
from state_runtime.processors.user.scope import NO_GROUP, Collection, Scope, entries_batch
from state_runtime.processors.user.value_codec import ValueCodec
from state_runtime.state.keyhash import hash_rows, value_hasher
from state_runtime.state.reader import EntryFinder
from state_runtime.state.table import Hashes, Mask, Positions, StateSchema

__all__ = ["MapState", "entry_hashes"]

_CHUNK = 10_000  # entries of a large map in memory at once, as Spark hands them over
_REMEMBERED_MAX = 65_536
"""Number of look-up results for a large map that are kept while its key is current, about 250 bytes each."""

_ABSENT: Any = object()
_NO_MAP = NO_GROUP - 1  # differs from `NO_GROUP`, so that a call without a current key is noticed


class MapState(Collection):
    """A map per key. The first read loads the maps of many keys at once; of a large map only the requested entries."""

    def __init__(self, name: str, where: str, schema: StateSchema, scope: Scope, expires_ms: int | None) -> None:
        """
        Args:
            where: operator and state, for messages.
            expires_ms: when an entry that is written in this epoch expires; None for a state without TTL.
        """
        super().__init__(name, where, schema, scope)
        self._time_ms = expires_ms
        entries = schema.entries if schema.entries is not None else pa.schema([])
        self._key_codec = ValueCodec(entries, where, takes_bare=True)
        self._codec = ValueCodec(schema.values, where)
        self._width = self._codec.width
        # Keys of plain types are used as dictionary keys directly; the others are wrapped.
        self._wrap: Any = None if all(_hashes_plainly(f.type) for f in entries) else _EqualKey
        self._is_plain = self._codec.is_plain
        self._is_plain_key: Callable[[Any], bool] = self._key_codec.is_plain if self._wrap is None else _never
        self._fresh = self._codec.fresh
        self._fresh_key = self._key_codec.fresh or tuple
        self._hash_of = value_hasher(entries.types)
        self._make_value: Callable[[Any], Any] = partial(tuple.__new__, row_class_of(schema.values.names))
        self._logs: dict[int, dict[Any, Any]] = {}
        self._gains: dict[int, int | None] = {}
        self._at = _NO_MAP
        self._log: dict[Any, Any] = self._no_key
        self._base: Any = self._no_key
        self._read: Callable[[Any], Any] = self._no_key.get  # the base's value of a map key, or None
        self._keys: list[Any] = []
        self._values: list[Any] = []

    def exists(self) -> bool:
        """Return whether the map has an entry."""
        if self._scope.group != self._at:
            self._enter()
        log = self._log
        if any(value is not None for value in log.values()):
            return True
        base = self._base
        return any(key not in log for key in base) if log else bool(base)

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the value of a map key as a Row, or None; lists and maps inside it are copies for the caller."""
        if not self._is_plain_key(key):
            key = self._key_of(key, "getValue")
        if self._scope.group != self._at:
            self._enter()
        value = self._log.get(key, _ABSENT)
        if value is _ABSENT:
            value = self._read(key)
        if value is None:
            return None
        made: tuple[Any, ...] = self._make_value(value if self._fresh is None else self._fresh(value))
        return made

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Return whether the map has a key."""
        if not self._is_plain_key(key):
            key = self._key_of(key, "containsKey")
        if self._scope.group != self._at:
            self._enter()
        value = self._log.get(key, _ABSENT)
        return key in self._base if value is _ABSENT else value is not None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value of a map key.

        Raises:
            InvalidStateValue: key or value is not a tuple of its schema's fields and their types. A key of one field
                may also be given without the tuple.
        """
        if not self._is_plain_key(key):
            key = self._key_of(key, "updateValue")
        if not self._is_plain(value):
            value = self._codec.row_of(value, "updateValue")
        if self._scope.group != self._at:
            self._enter()
        self._log[key] = value

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Yield the entries as they are when the first one is fetched; iterators are independent."""
        fresh_key, fresh = self._fresh_key, self._fresh or tuple
        for key, value in self._items():
            yield fresh_key(key), fresh(value)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Yield the map keys, as `iterator`."""
        yield from map(self._fresh_key, (key for key, _ in self._items()))

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Yield the values, as `iterator`."""
        yield from map(self._fresh or tuple, (value for _, value in self._items()))

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove an entry, if it exists."""
        if not self._is_plain_key(key):
            key = self._key_of(key, "removeKey")
        if self._scope.group != self._at:
            self._enter()
        self._log[key] = None

    def clear(self) -> None:
        """Remove all entries, if there are any."""
        if self._scope.group != self._at:
            self._enter()
        if self._at not in self.cleared:
            self._lost += len(self._base) if type(self._base) is dict else 0
            self.cleared.add(self._at)
        self._log.clear()
        self._stand_on(_NOTHING)

    def _key_of(self, key: Any, method: str) -> Any:
        row = self._key_codec.row_of(key, method)
        return row if self._wrap is None else self._wrap(row)

    def _items(self) -> Iterator[tuple[Any, Any]]:
        if self._scope.group != self._at:
            self._enter()
        log, base = dict(self._log), self._base
        for key, value in base.items():
            if key not in log:
                yield key, value
        for key, value in log.items():
            if value is not None:
                yield key, value

    # --- for the passes ---

    def attach(self) -> None:
        self._attach()
        self._logs = {}
        self._gains = {}
        self._lost = 0
        self._at = _NO_MAP
        self._log = self._no_key

    def detach(self) -> None:
        self._logs = {}
        self.bases = {}
        self._at = _NO_MAP
        self._log = self._no_key
        self._stand_on(self._no_key)
        self._keys, self._values = [], []

    def changes(self) -> tuple[pa.RecordBatch, int]:
        """Return the changes of user code in the slice, as a sorted batch, and the live rows gained."""
        self._leave()
        markers = self._markers()
        ordered = sorted(group for group, log in self._logs.items() if log)
        if not ordered and not len(markers):
            return self._schema.empty(), -self._lost
        logs = [self._logs[group] for group in ordered]
        groups = np.repeat(np.array(ordered, dtype=np.int64), [len(log) for log in logs])
        keys = self._key_codec.columns(list(chain.from_iterable(logs)))
        rows = list(chain.from_iterable(log.values() for log in logs))
        gone = np.fromiter((row is None for row in rows), dtype=np.bool_, count=len(rows))
        entries = entry_hashes(keys) if rows else np.empty(0, dtype=np.uint64)
        gained, pointless = self._gained(ordered, groups, entries, keys, gone)
        if bool(pointless.any()):
            kept = pa.array(~pointless)
            groups, entries, gone = groups[~pointless], entries[~pointless], gone[~pointless]
            keys, rows = [k.filter(kept) for k in keys], [row for row, p in zip(rows, pointless.tolist()) if not p]
        times = None
        if self._schema.time:
            times = pa.array(np.full(len(rows), self._time_ms or 0, dtype=np.int64), mask=gone)
        values = self._codec.columns(rows, holes=bool(gone.any()))
        batch = entries_batch(self._schema, self._scope, groups, entries, gone, keys, values, times, markers)
        return batch, gained - self._lost

    def _gained(
        self, ordered: list[int], groups: Positions, entries: Hashes, keys: list[pa.Array], gone: Mask
    ) -> tuple[int, Mask]:
        """Return the live entries gained, and a mask of removals that concern no stored entry.

        For keys whose map was never read, the touched entries are looked up here, all at once.
        """
        known = [self._gains.get(group) for group in ordered]
        gained = sum(g for g in known if g is not None)
        pointless = np.zeros(len(groups), dtype=np.bool_)
        unread = np.array([group for group, gain in zip(ordered, known) if gain is None], dtype=np.int64)
        picked = np.flatnonzero(np.isin(groups, unread)) if len(unread) else unread
        if not len(picked):
            return gained, pointless
        stored = self._are_stored(groups[picked], entries[picked], [k.take(pa.array(picked)) for k in keys])
        removed = gone[picked]
        pointless[picked] = removed & ~stored
        return gained + int(np.count_nonzero(~removed & ~stored)) - int(np.count_nonzero(removed & stored)), pointless

    # --- the current key ---

    def _enter(self) -> None:
        """Switch to another current key: find its log and its stored entries."""
        group = self._scope.group
        if group == NO_GROUP:
            self._no_key.refuse()
        self._leave()
        log = self._logs.get(group)
        if log is None:
            log = self._logs[group] = {}
        self._at, self._log = group, log
        if group in self.cleared:
            self._stand_on(_NOTHING)
        else:
            base = self.bases.get(group)
            self._stand_on(_NotLoaded(self) if base is None else base)

    def _stand_on(self, base: Any) -> None:
        self._base = base
        self._read = base.get

    def _leave(self) -> None:
        """Record how many entries the current key gained, and drop pointless removals, while its stored entries are
        known."""
        if self._at == _NO_MAP or not self._log:
            return
        base = self._base
        if type(base) is dict:
            gained = 0
            pointless = []
            for key, value in self._log.items():
                if key in base:
                    gained -= value is None
                elif value is None:
                    pointless.append(key)  # removed before the stored entries were known
                else:
                    gained += 1
            for key in pointless:
                del self._log[key]
            self._gains[self._at] = gained
        else:
            self._gains.pop(self._at, None)

    def load(self) -> Any:
        """Load the stored entries of the current key."""
        self._stand_on(self._load(self._at))
        return self._base

    def _decode(self, batch: pa.RecordBatch) -> None:
        keys = self._key_codec.rows(self._schema.entry_columns_of(batch))
        self._keys = keys if self._wrap is None else list(map(self._wrap, keys))
        self._values = self._codec.rows(self._schema.values_of(batch))

    def _small(self, start: int, stop: int) -> dict[Any, Any]:
        return dict(zip(self._keys[start:stop], self._values[start:stop])) if start < stop else _NOTHING

    def _large(self, group: int) -> _LargeMap:
        return _LargeMap(self, self._scope, group)

    def entry_of(self, key: Any) -> int:
        """Return the `entry` of one map key.

        Raises:
            InvalidData: the key is beyond the range of its type.
        """
        if self._hash_of is None:
            return self._entry_by_column(key)
        try:
            return self._hash_of(key) or 1  # 0 is reserved for the clear marker
        except (ValueError, OverflowError):
            return self._entry_by_column(key)  # its error says why the key does not fit

    def _entry_by_column(self, key: Any) -> int:
        return int(entry_hashes(self._key_codec.columns([key]))[0])

    def view_of(self, batch: pa.RecordBatch) -> _StoredEntries:
        """Return a view of stored rows that decodes one row at a time."""
        keys = self._key_codec.row_at(self._schema.entry_columns_of(batch))
        return _StoredEntries(keys, self._codec.row_at(self._schema.values_of(batch)), self._wrap)

    def items_of(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, Any]]:
        """Return stored rows as entries."""
        self._decode(batch)
        return zip(self._keys, self._values)


_NOTHING: dict[Any, Any] = {}


def entry_hashes(keys: list[pa.Array]) -> Hashes:
    """Return the `entry` of map keys; 0 is reserved for the clear marker."""
    hashes: Hashes = np.maximum(hash_rows(keys), np.uint64(1))
    return hashes


def _never(key: Any) -> bool:
    return False


def _hashes_plainly(data_type: pa.DataType) -> bool:
    """Return whether equality and hashes of a type's Python values match those of the state's rows."""
    return not (pa.types.is_floating(data_type) or pa.types.is_nested(data_type))


class _EqualKey(tuple[Any, ...]):
    """A map key under Spark's grouping equality: NaN equals NaN; arrays and maps inside it are compared by content."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(_frozen(tuple(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and _frozen(tuple(self)) == _frozen(tuple(other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _frozen(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    if isinstance(value, dict):
        return frozenset((_frozen(k), _frozen(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple([_frozen(v) for v in value])
    return value


class _NotLoaded:
    """Placeholder for the stored entries of the current key until user code reads one."""

    __slots__ = ("_state",)

    def __init__(self, state: MapState) -> None:
        self._state = state

    def __contains__(self, key: Any) -> bool:
        return key in self._state.load()

    def __bool__(self) -> bool:
        return bool(self._state.load())

    def get(self, key: Any) -> Any:
        return self._state.load().get(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state.load())

    def items(self) -> Any:
        return self._state.load().items()


class _StoredEntries:
    """Rows of a batch as entries of a map: an `EntryView`."""

    __slots__ = ("_key_at", "_wrap", "value_at")

    def __init__(
        self, key_at: Callable[[int], Any], value_at: Callable[[int], Any], wrap: Callable[[Any], Any] | None
    ) -> None:
        self._key_at, self._wrap, self.value_at = key_at, wrap, value_at

    def is_at(self, at: int, wanted: Any) -> bool:
        key = self._key_at(at)
        return bool((key if self._wrap is None else self._wrap(key)) == wanted)


class _Remembered(dict[Any, Any]):
    """Results of a finder, None for a missing entry. Known results are read without a Python call."""

    def __init__(self, state: MapState, finder: Callable[[], EntryFinder]) -> None:
        super().__init__()
        self._state = state
        self._finder = finder
        self._find: EntryFinder | None = None

    def __missing__(self, key: Any) -> Any:
        if self._find is None:
            self._find = self._finder()
        if len(self) >= _REMEMBERED_MAX:
            self.clear()
        value = self[key] = self._find(self._state.entry_of(key), key)
        return value


class _LargeMap:
    """A stored map that is too large to be loaded: single entries are looked up, and iteration streams them."""

    __slots__ = ("_hash", "_key", "_reader", "_state", "get", "remembered")

    def __init__(self, state: MapState, scope: Scope, group: int) -> None:
        self._state = state
        self._reader = scope.reader
        self._hash = int(scope.hashes[group])
        self._key = scope.key_of(group)
        finder = partial(self._reader.entry_finder, state.name, self._hash, self._key, state.view_of)
        self.remembered = _Remembered(state, finder)
        self.get: Callable[[Any], Any] = self.remembered.__getitem__

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __bool__(self) -> bool:
        return any(batch.num_rows for batch in self._batches(1))

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        for batch in self._batches(_CHUNK):
            yield from self._state.items_of(batch)

    def _batches(self, rows_max: int) -> Iterator[pa.RecordBatch]:
        name = self._state.name
        return iter(self._reader.iter_entries(name, self._hash, self._key, rows_max))
