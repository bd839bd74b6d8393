"""Look-up of single entries of one key, in the sorted batches that hold its rows; pure.

`search` looks many keys up at once. Here each call looks up one entry, because user code asks for single entries of a
large map. The work that is the same for all calls (where each run has the key's rows, how its columns are read) is done
once. A call is then one bisection in each run until one of them has the entry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from state_runtime.state.reader import EntryFinder, EntryView
from state_runtime.state.table import StateSchema, entries_of, plain_numbers, same_keys

__all__ = ["FoundInRuns"]

_GONE: Final = object()  # a newer run says that the entry was removed
_OPEN: Final = object()  # older rows have to be searched


class FoundInRuns:
    """Entries of one key in some runs, newest first, and in a finder below them: an `EntryFinder`.

    Args:
        runs: for each run its rows with the key's hash, without clear markers. Cleared rows of the key are left out.
        key: columns of one row.
        below: called for entries that no run answers; None if nothing is older.
    """

    def __init__(
        self,
        schema: StateSchema,
        runs: Sequence[pa.RecordBatch],
        key: Sequence[pa.Array],
        view: Callable[[pa.RecordBatch], EntryView],
        now_ms: int,
        below: EntryFinder | None,
    ) -> None:
        self._runs = [_Run(schema, rows, key, view(rows), now_ms) for rows in runs]
        self._below = below

    def __call__(self, entry: int, wanted: Any) -> Any:
        """See `EntryFinder`."""
        for run in self._runs:
            found = run.find(entry, wanted)
            if found is not _OPEN:
                return None if found is _GONE else found
        return None if self._below is None else self._below(entry, wanted)


class _Run:
    """The rows of one run that have the key's hash: rows of the key, and of other keys with the same hash."""

    __slots__ = ("_cells", "_columns", "_deleted", "_entries", "_key", "_now_ms", "_times", "_view")

    def __init__(
        self, schema: StateSchema, rows: pa.RecordBatch, key: Sequence[pa.Array], view: EntryView, now_ms: int
    ) -> None:
        self._entries = entries_of(rows).data  # gives Python numbers; numpy would make its own objects
        self._deleted = rows.column(1)
        self._times = schema.times_of(rows) if schema.time == "expires" else None
        self._columns = schema.keys_of(rows)
        self._key = key
        self._cells = [(_cell_of(column), _cell_of(one)(0)) for column, one in zip(self._columns, key)]
        self._view = view
        self._now_ms = now_ms

    def find(self, entry: int, wanted: Any) -> Any:
        entries = self._entries
        at = bisect_left(entries, entry)
        # Different map keys may have the same `entry`, and different keys the same hash.
        while at < len(entries) and entries[at] == entry:
            if self._view.is_at(at, wanted) and self._is_own(at):
                return self._view.value_at(at) if self._is_live(at) else _GONE
            at += 1
        return _OPEN

    def _is_own(self, at: int) -> bool:
        for cell, value in self._cells:
            if cell(at) != value:
                return bool(same_keys([column.slice(at, 1) for column in self._columns], self._key)[0])  # NaN is NaN
        return True

    def _is_live(self, at: int) -> bool:
        if self._deleted[at].as_py():
            return False
        expires_ms = None if self._times is None else self._times[at].as_py()
        return expires_ms is None or expires_ms > self._now_ms


def _cell_of(column: pa.Array) -> Callable[[int], Any]:
    """Return a function from a row's number to its value in a column."""
    numbers = plain_numbers(column)
    if numbers is not None:
        number: Callable[[int], Any] = numbers.item
        return number
    return lambda at: column[at].as_py()
