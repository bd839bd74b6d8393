"""The keys that user code can work on, and the current one; shared by the handle and all its states.

A task goes through *passes* (initial state, input, timers) and a pass through *slices* of keys. While user code runs,
every state is attached to the slice: it numbers the slice's keys 0, 1, … in the order of their hashes (a *group*
number), and user code always works on the current group. At other times (in `init` and `close`) states are detached
and refuse to be used.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa

from state_runtime.processors.user.user_errors import InvalidStateUse
from state_runtime.state.reader import StateReader
from state_runtime.state.table import Hashes, Mask, Positions, StateSchema

__all__ = ["ENTRIES_PER_KEY_MAX", "NO_GROUP", "Collection", "NoKey", "Scope", "SliceState", "entries_batch"]

NO_GROUP = -1

ENTRIES_PER_KEY_MAX = 4_096
"""A list or map with more stored rows than this (an upper bound) is read on demand; smaller ones are read together with
those of other keys."""

_WINDOW_FIRST, _WINDOW_MAX = 4_096, 131_072
"""Stored rows that are decoded to Python values at once; the number doubles from first to max while user code reads on.
A row takes about 1 µs and 200 bytes, so reading one key does not cost the values of all others."""


class Scope:
    """The slice that user code works on.

    Attributes:
        group: number of the current key; `NO_GROUP` if no key is current.
        hashes, keys: of the slice's keys, sorted by hash.
        reader: the state before the slice, with the changes of earlier passes.
        order: the groups in the order in which user code gets them; None if that is 0, 1, … Groups may be repeated.
        place: position of the current call in `order`; only kept if there is an order.
    """

    __slots__ = ("group", "hashes", "keys", "order", "place", "reader")

    def __init__(self, reader: StateReader) -> None:
        self.group = NO_GROUP
        self.place = 0
        self.order: Positions | None = None
        self.hashes: Hashes = np.empty(0, dtype=np.uint64)
        self.keys: list[pa.Array] = []
        self.reader = reader

    def enter(self, reader: StateReader, hashes: Hashes, keys: list[pa.Array], order: Positions | None = None) -> None:
        """Begin a slice; no key is current yet."""
        self.reader, self.hashes, self.keys, self.order = reader, hashes, keys, order
        self.group, self.place = NO_GROUP, 0

    def leave(self) -> None:
        """End the slice."""
        self.group = NO_GROUP

    def key_of(self, group: int) -> list[pa.Array]:
        """Return the key columns of one group, one row each."""
        return [k.slice(group, 1) for k in self.keys]

    def upcoming(self) -> Positions:
        """Return the groups that user code will get from now on, the current one first; some may occur twice."""
        if self.order is None:
            return np.arange(self.group, len(self.hashes))
        return self.order[self.place :]


class SliceState(Protocol):
    """The methods of a state (and of the timers) that the passes call."""

    name: str

    def attach(self) -> None:
        """Attach to the slice that the scope has entered."""
        ...

    def changes(self) -> tuple[pa.RecordBatch, int]:
        """Return the changes of user code in the slice, as a sorted batch, and the live rows gained."""
        ...

    def detach(self) -> None:
        """Detach from the slice that the scope leaves."""
        ...


class NoKey(dict[Any, Any]):
    """Placeholder for a state's per-key data while no key is current: every access raises an error."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def refuse(self, *_: Any) -> NoReturn:
        """Raise the error that no key is current."""
        raise InvalidStateUse(
            f"{self._where} is used where no key is current; states and timers belong into handleInputRows, "
            "handleExpiredTimer and handleInitialState"
        )

    __getitem__ = __setitem__ = get = pop = setdefault = __contains__ = refuse


class Collection:
    """Common base of lists, maps and timers: the stored rows of the slice's keys, fetched for many keys at a time.

    Attributes:
        bases: per group its stored rows if they are loaded, in the subclass's form. A group without an entry is not
            loaded.
        cleared: groups whose stored rows user code has removed.
    """

    def __init__(self, name: str, where: str, schema: StateSchema, scope: Scope) -> None:
        self.name = name
        self._where = where
        self._schema = schema
        self._scope = scope
        self._no_key = NoKey(where)
        self.bases: dict[int, Any] = {}
        self.cleared: set[int] = set()
        self._bounds: Positions | None = None
        self._window = _WINDOW_FIRST

    @property
    def bounds(self) -> Positions:
        """Per group an upper bound of the number of stored rows."""
        if self._bounds is None:
            self._bounds = self._scope.reader.entry_bounds(self.name, self._scope.hashes)
        return self._bounds

    def _attach(self) -> None:
        self.bases = {}
        self.cleared = set()
        self._bounds = None
        self._window = _WINDOW_FIRST

    def _load(self, group: int) -> Any:
        """Return the stored rows of the current key; load as many of the next keys with it as a window holds.

        Keys of earlier windows are dropped from memory; user code rarely returns to them.
        """
        bounds = self.bounds
        if bounds[group] > ENTRIES_PER_KEY_MAX:
            base = self._large(group)
            self.bases[group] = base
            return base
        groups = self._scope.upcoming()
        wanted = bounds[groups]
        small = wanted <= ENTRIES_PER_KEY_MAX
        end = int(np.searchsorted(np.cumsum(np.where(small, wanted, 0)), self._window, side="right"))
        self._window = min(2 * self._window, _WINDOW_MAX)
        picked = np.unique(groups[: max(end, 1)][small[: max(end, 1)]])
        self.bases = {}
        stored = picked[bounds[picked] > 0]
        for number in picked[bounds[picked] == 0].tolist():
            self.bases[number] = self._small(0, 0)
        if len(stored):
            self._fetch(stored)
        return self.bases[group]

    def _fetch(self, groups: Positions) -> None:
        scope = self._scope
        at = pa.array(groups)
        batch, offsets = scope.reader.read_entries(self.name, scope.hashes[groups], [k.take(at) for k in scope.keys])
        self._decode(batch)
        bounds = offsets.tolist()
        for number, group in enumerate(groups.tolist()):
            self.bases[group] = self._small(bounds[number], bounds[number + 1])

    def _decode(self, batch: pa.RecordBatch) -> None:
        """Decode a batch of stored rows to Python values, for `_small` to cut."""
        raise TypeError("a subclass says how")

    def _small(self, start: int, stop: int) -> Any:
        """Return the stored content of one key: decoded rows `start … stop`."""
        raise TypeError("a subclass says how")

    def _large(self, group: int) -> Any:
        """Return the stored content of a key with more rows than are loaded at once."""
        raise TypeError("a subclass says how")

    def _are_stored(self, groups: Positions, entries: Hashes, entry_columns: list[pa.Array]) -> Mask:
        """Return which of some entries the state has, in one look-up; keys without stored rows are skipped."""
        scope = self._scope
        stored = np.zeros(len(groups), dtype=np.bool_)
        asked = np.flatnonzero(self.bounds[groups] > 0)
        if len(asked):
            order = asked[np.lexsort((entries[asked], scope.hashes[groups[asked]]))]
            at, of = pa.array(order), pa.array(groups[order])
            stored[order], _ = scope.reader.find_entries(
                self.name,
                scope.hashes[groups[order]],
                [k.take(of) for k in scope.keys],
                entries[order],
                [c.take(at) for c in entry_columns],
            )
        return stored

    def _markers(self) -> Positions:
        """Return the cleared groups that may have stored rows, sorted: they need a clear marker."""
        if not self.cleared:
            return np.empty(0, dtype=np.int64)
        groups = np.array(sorted(self.cleared), dtype=np.int64)
        return groups[self.bounds[groups] > 0]


def entries_batch(
    schema: StateSchema,
    scope: Scope,
    groups: Positions,
    entries: Hashes,
    deleted: Any,
    entry_columns: list[pa.Array],
    values: list[pa.Array],
    times: pa.Array | None,
    markers: Positions,
) -> pa.RecordBatch:
    """Make a sorted batch of the entries layout, from rows in order of their groups and from clear markers.

    Args:
        groups, entries, deleted, entry_columns, values, times: one per row.
        markers: groups that get a clear marker, sorted.
    """
    if len(markers):
        count = len(markers)
        groups = np.concatenate((groups, markers))
        entries = np.concatenate((entries, np.zeros(count, dtype=np.uint64)))
        deleted = np.concatenate((deleted, np.ones(count, dtype=np.bool_)))
        entry_columns = [pa.concat_arrays([c, pa.nulls(count, c.type)]) for c in entry_columns]
        values = [pa.concat_arrays([c, pa.nulls(count, c.type)]) for c in values]
        times = None if times is None else pa.concat_arrays([times, pa.nulls(count, pa.int64())])
    hashes = scope.hashes[groups]
    at = pa.array(groups)
    if not _is_sorted(hashes, entries):
        order = np.lexsort((entries, hashes))
        rows = pa.array(order)
        hashes, entries, deleted, at = hashes[order], entries[order], deleted[order], at.take(rows)
        entry_columns = [c.take(rows) for c in entry_columns]
        values = [c.take(rows) for c in values]
        times = None if times is None else times.take(rows)
    keys = [k.take(at) for k in scope.keys]
    return schema.batch(hashes, deleted, keys, values, entries=entries, entry_columns=entry_columns, times=times)


def _is_sorted(hashes: Hashes, entries: Hashes) -> bool:
    if len(hashes) < 2:
        return True
    return bool(np.all((hashes[:-1] < hashes[1:]) | ((hashes[:-1] == hashes[1:]) & (entries[:-1] <= entries[1:]))))
