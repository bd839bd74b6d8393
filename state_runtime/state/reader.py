"""An operator's view of its state: a version of one shard, in which many keys are looked up at once.

Both backends implement it (`state/local.py`: Arrow runs; `state/rocksdb.py`), and so do states that exist only in
memory. A reader is bound to a batch time: rows with a TTL that has run out by then are hidden, whether or not they are
still stored. Keys are always given as hashes, sorted, with the key columns beside them; different keys may have equal
hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from state_runtime.state.table import Hashes, Mask, Positions

__all__ = ["EntryFinder", "EntryView", "StateReader"]


class EntryView(Protocol):
    """The caller's view of stored rows of the entries layout, one row at a time; see `entry_finder`."""

    def is_at(self, at: int, wanted: Any) -> bool:
        """Return whether the entry columns of a row are the wanted ones; `wanted` has the caller's form."""
        ...

    def value_at(self, at: int) -> Any:
        """Return the values of a row, in the caller's form; not None."""
        ...


EntryFinder: TypeAlias = Callable[[int, Any], Any]
"""For one key: from an `entry` and the wanted value of `EntryView.is_at` to `EntryView.value_at` of the live row, or
None."""


class StateReader(Protocol):
    """A version of a shard's states, read-only.

    Results stay valid after the version's files are gone. No method keeps more in private memory than its result and a
    constant; only the requested part of the state is loaded.
    """

    def whole(self, state: str) -> pa.RecordBatch:
        """Return all live rows of a state, sorted, each identity once: in private memory, so only if there is no other
        way."""
        ...

    def iter_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        """Yield all live rows of a state in order, each identity once, a bounded part at a time.

        All rows of one hash are in one batch.
        """
        ...

    def find(
        self, state: str, hashes: Hashes, keys: Sequence[pa.Array], columns: Sequence[str] | None = None
    ) -> tuple[Mask, list[pa.Array]]:
        """Look many keys up at once, in the value layout.

        Args:
            hashes: sorted, one per wanted key.
            keys: the wanted keys' columns.
            columns: the value columns to read; an empty sequence if only the existence of keys matters. All by default,
                and the time column last, if the state has one.

        Returns:
            Which keys have a live value, and the columns, one row per wanted key, null for keys without a value.
        """
        ...

    def find_entries(
        self,
        state: str,
        hashes: Hashes,
        keys: Sequence[pa.Array],
        entries: Hashes,
        entry_columns: Sequence[pa.Array],
    ) -> tuple[Mask, list[pa.Array]]:
        """Look many (key, entry) pairs up at once, in the entries layout; one pair per row, sorted by (hash, entry).

        Returns:
            As `find`.
        """
        ...

    def entry_finder(
        self, state: str, key_hash: int, key: Sequence[pa.Array], view: Callable[[pa.RecordBatch], EntryView]
    ) -> EntryFinder:
        """Prepare many look-ups of one entry each, all of one key (columns of one row), in the entries layout.

        Their common work is done here, once. A look-up costs about the same for any number of entries, and loads only
        the row that it finds.

        Args:
            view: reads stored rows of this state; called once for each batch with rows of the key.
        """
        ...

    def entry_bounds(self, state: str, hashes: Hashes) -> Positions:
        """Return for each hash an upper bound of its stored rows, in the entries layout. Cheap: only hashes are read. 0
        is certain."""
        ...

    def read_entries(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[pa.RecordBatch, Positions]:
        """Return all live entries of some keys, in memory, in the entries layout.

        Returns:
            A batch of the state's schema, key after key as given and in order of `entry` within one key; and `len(keys)
            + 1` offsets: key number k has the rows from offsets[k] up to (without) offsets[k + 1].
        """
        ...

    def iter_entries(
        self, state: str, key_hash: int, key: Sequence[pa.Array], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the live entries of one key (columns of one row) in order, about `rows_max` at a time: entries layout
        only."""
        ...

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        """Return live rows whose `due` is at most `through_ms`, in order of (key_hash, entry).

        Rows that an earlier epoch has taken (`ShardResult.due_taken`) are not looked at again.
        """
        ...

    def next_due(self, state: str, after_ms: int | None = None) -> int | None:
        """Return a lower bound (ms) of the earliest `due` that was not taken yet; None if nothing can be due.

        Cheap, so it may belong to a row that was removed since.

        Args:
            after_ms: only later times count.
        """
        ...

    def overlaid(
        self, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int] | None = None
    ) -> StateReader:
        """Return this state with changes on top, in memory.

        Args:
            due_taken: per state the bound up to which the epoch has taken the due rows here; `due` and `next_due` of
                the result skip them, but not rows of `changes`.
        """
        ...
