"""Timers: per key a set of times, stored as a separate state with an index by time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import index
from typing import Any

import numpy as np
import pyarrow as pa

from state_runtime.processors.user.scope import Collection, Scope, entries_batch
from state_runtime.processors.user.user_errors import InvalidStateValue
from state_runtime.state.table import StateSchema, entries_of, entry_of_time, time_of_entry

__all__ = ["TIMERS", "Timers", "timers_schema"]

TIMERS = "$timers"
"""Name of the state; users' states cannot begin with `$`."""

_CHUNK = 10_000
_EARLIEST, _END = -(1 << 63) + 1, 1 << 63
"""A timer's time is a long. The lowest long is refused: the state could not tell it from the next one."""


def timers_schema(key_schema: pa.Schema) -> StateSchema:
    """Return the columns of the timers' state: only the time."""
    return StateSchema(key_schema, pa.schema([]), pa.schema([]), "due")


class Timers(Collection):
    """The timers of the current key."""

    def __init__(self, where: str, schema: StateSchema, scope: Scope) -> None:
        super().__init__(TIMERS, where, schema, scope)
        self._own: dict[int, dict[int, bool]] = self._no_key
        self._times: list[int] = []

    def register(self, expiryTimestampMs: int) -> None:
        """Register a timer; repeated calls register it once. A time that has passed fires too.

        Raises:
            InvalidStateValue: not a whole number of milliseconds that fits a long.
        """
        if type(expiryTimestampMs) is not int or not _EARLIEST <= expiryTimestampMs < _END:
            expiryTimestampMs = self._time(expiryTimestampMs, "registerTimer")
        group = self._scope.group
        own = self._own.get(group)
        if own is None:
            self._own[group] = {expiryTimestampMs: True}
        else:
            own[expiryTimestampMs] = True

    def delete(self, expiryTimestampMs: int) -> None:
        """Delete a timer; nothing happens if it does not exist.

        Raises:
            InvalidStateValue: not a whole number of milliseconds that fits a long.
        """
        if type(expiryTimestampMs) is not int or not _EARLIEST <= expiryTimestampMs < _END:
            expiryTimestampMs = self._time(expiryTimestampMs, "deleteTimer")
        group = self._scope.group
        own = self._own.get(group)
        if own is None:
            self._own[group] = {expiryTimestampMs: False}
        else:
            own[expiryTimestampMs] = False

    def list(self) -> Iterator[int]:
        """Yield the current key's timers, ascending, as they are when the first one is fetched."""
        group = self._scope.group
        own = dict(self._own.get(group) or {})
        base = self.bases.get(group)
        stored: Iterable[int] = self._load(group) if base is None else base
        mine = sorted(time for time, there in own.items() if there)
        yield from heapq.merge((time for time in stored if time not in own), mine)

    def _time(self, given: Any, method: str) -> int:
        try:
            time = index(given)
        except TypeError:
            raise InvalidStateValue(
                f"{self._where}: {method}() got a {type(given).__name__}; give milliseconds since 1970 as an int"
            ) from None
        if not _EARLIEST <= time < _END:
            raise InvalidStateValue(f"{self._where}: {method}() got a time that does not fit a long of milliseconds")
        return time

    # --- for the passes ---

    def attach(self) -> None:
        self._attach()
        self._own = {}

    def detach(self) -> None:
        self._own = self._no_key
        self.bases = {}
        self._times = []

    def changes(self) -> tuple[pa.RecordBatch, int]:
        """Return the changes of user code in the slice, as a sorted batch, and the timers gained."""
        ordered = sorted(self._own)
        if not ordered:
            return self._schema.empty(), 0
        timers = [self._own[group] for group in ordered]
        groups = np.repeat(np.array(ordered, dtype=np.int64), [len(own) for own in timers])
        times = np.fromiter(chain.from_iterable(timers), dtype=np.int64, count=len(groups))
        there = np.fromiter(chain.from_iterable(own.values() for own in timers), dtype=np.bool_, count=len(groups))
        entries = entry_of_time(times)
        stored = self._are_stored(groups, entries, [])
        gained = int(np.count_nonzero(there & ~stored)) - int(np.count_nonzero(~there & stored))
        # Deleting a timer that was never stored writes nothing. A timer that is registered again is written again: it
        # may just have fired, and an epoch's taken timers are only read again if they are written again.
        kept = there | stored
        groups, times, entries, gone = groups[kept], times[kept], entries[kept], ~there[kept]
        if not len(groups):
            return self._schema.empty(), gained
        due = pa.array(times, mask=gone)
        none = np.empty(0, dtype=np.int64)
        return entries_batch(self._schema, self._scope, groups, entries, gone, [], [], due, none), gained

    # --- stored rows ---

    def _decode(self, batch: pa.RecordBatch) -> None:
        self._times = self._schema.times_of(batch).to_numpy(zero_copy_only=False).tolist()

    def _small(self, start: int, stop: int) -> Iterable[int]:
        return self._times[start:stop]

    def _large(self, group: int) -> Iterable[int]:
        return _ManyTimers(self._scope, group)


class _ManyTimers:
    """The stored timers of a key that has too many to be loaded."""

    __slots__ = ("_hash", "_key", "_reader")

    def __init__(self, scope: Scope, group: int) -> None:
        self._reader = scope.reader
        self._hash = int(scope.hashes[group])
        self._key = scope.key_of(group)

    def __iter__(self) -> Iterator[int]:
        for batch in self._reader.iter_entries(TIMERS, self._hash, self._key, _CHUNK):
            yield from time_of_entry(entries_of(batch)).tolist()
