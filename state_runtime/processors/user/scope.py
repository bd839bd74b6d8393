"""Which keys user code can work on, and which of them is current; shared by the handle and all its states.

A task goes through *passes* (initial state, input, timers) and a pass through *slices* of keys. While user code runs,
every state is attached to the slice: it numbers the slice's keys 0, 1, … in the order of their hashes (a *group*
number), and user code always means the current group. Outside of that (in `init` and `close`) states are detached and
refuse to be used.
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
"""A list or map with more stored rows than this (an upper bound) is read on demand instead of together with other
keys'."""

_WINDOW_FIRST, _WINDOW_MAX = 4_096, 131_072
"""Stored rows that are made Python values at once: doubled from the first to the last while user code goes on reading.
About 1 µs and 200 bytes a row, so that one wanted key does not cost the values of all others."""


class Scope:
    """The slice that user code works on.

    Attributes:
        group: number of the current key; `NO_GROUP` where there is none.
        hashes, keys: of the slice's keys, sorted by hash.
        reader: the state before the slice, with the changes of earlier passes.
        order: the groups in the order in which user code gets them; None if that is 0, 1, … Groups may occur again.
        place: position of the current call in `order`; only kept where there is an order.
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
        """The key columns of one group, one row each."""
        return [k.slice(group, 1) for k in self.keys]

    def upcoming(self) -> Positions:
        """The groups that user code will get from now on, the current one first; some may occur twice."""
        if self.order is None:
            return np.arange(self.group, len(self.hashes))
        return self.order[self.place :]


class SliceState(Protocol):
    """What the passes ask of a state (and of the timers)."""

    name: str

    def attach(self) -> None:
        """The scope has entered a slice."""
        ...

    def changes(self) -> tuple[pa.RecordBatch, int]:
        """What user code changed in the slice, as a sorted batch, and the live rows gained."""
        ...

    def detach(self) -> None:
        """The scope leaves the slice."""
        ...


class NoKey(dict[Any, Any]):
    """Stands where a state keeps its keys' data while there is no key: whoever touches it is told so."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def refuse(self, *_: Any) -> NoReturn:
        """Say that there is no key."""
        raise InvalidStateUse(
            f"{self._where} is used where no key is current; states and timers belong into handleInputRows, "
            "handleExpiredTimer and handleInitialState"
        )

    __getitem__ = __setitem__ = get = pop = setdefault = __contains__ = refuse


class Collection:
    """What lists, maps and timers have in common: what is stored for the slice's keys, fetched many keys at a time.

    Attributes:
        bases: per group what is stored, as far as it is loaded; the form is the subclass's. Without an entry: not
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
        """Per group an upper bound of what is stored."""
        if self._bounds is None:
            self._bounds = self._scope.reader.entry_bounds(self.name, self._scope.hashes)
        return self._bounds

    def _attach(self) -> None:
        self.bases = {}
        self.cleared = set()
        self._bounds = None
        self._window = _WINDOW_FIRST

    def _load(self, group: int) -> Any:
        """What is stored for the current key; with it, what is stored for as many of the next ones as a window holds.

        Keys of earlier windows are forgotten; user code does not come back to them, or rarely.
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
        """Make Python values of a batch of stored rows, for `_small` to cut."""
        raise TypeError("a subclass says how")

    def _small(self, start: int, stop: int) -> Any:
        """What is stored for one key: decoded rows `start … stop`."""
        raise TypeError("a subclass says how")

    def _large(self, group: int) -> Any:
        """What is stored for a key with more rows than are loaded at once."""
        raise TypeError("a subclass says how")

    def _are_stored(self, groups: Positions, entries: Hashes, entry_columns: list[pa.Array]) -> Mask:
        """Which of some entries the state has, looked up at once; keys with nothing stored are not."""
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
        """The cleared groups for which something may be stored, sorted: what a clear marker is for."""
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
    """A sorted batch of the entries layout from rows in order of their groups, and clear markers.

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
