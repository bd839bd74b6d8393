"""What an operator sees of its state: a version of one shard, to be looked up many keys at once.

Both backends implement it (`state/local.py`: Arrow runs; `state/rocksdb.py`), and so do states that exist only in
memory. A reader is bound to a batch time: rows with a TTL that has run out by then are not there, whether or not they
are still stored. Keys are always given as hashes, sorted, with the key columns beside them; equal hashes of different
keys may occur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from state_runtime.state.table import Hashes, Mask, Positions

__all__ = ["EntryFinder", "EntryView", "StateReader"]


class EntryView(Protocol):
    """Stored rows of the entries layout as the caller of `entry_finder` reads them, one at a time."""

    def is_at(self, at: int, wanted: Any) -> bool:
        """Whether the entry columns of a row are the wanted ones; `wanted` is the caller's."""
        ...

    def value_at(self, at: int) -> Any:
        """The values of a row, in the caller's form; not None."""
        ...


EntryFinder: TypeAlias = Callable[[int, Any], Any]
"""Of one key: from an `entry` and what `EntryView.is_at` compares with, to `EntryView.value_at` of the live row, or
None."""


class StateReader(Protocol):
    """A version of a shard's states, read-only.

    What is read stays valid after the version's files are gone. No method keeps more in private memory than what it
    returns and a constant; nothing of the state is loaded that is not asked for.
    """

    def whole(self, state: str) -> pa.RecordBatch:
        """All live rows of a state, sorted, each identity once: in private memory, so only where there is no other
        way."""
        ...

    def find(
        self, state: str, hashes: Hashes, keys: Sequence[pa.Array], columns: Sequence[str] | None = None
    ) -> tuple[Mask, list[pa.Array]]:
        """Value layout: look many keys up at once.

        Args:
            hashes: sorted, one per wanted key.
            keys: the wanted keys' columns.
            columns: the value columns to read; none, where it only matters which keys there are. All by default, and
                the time column last, if the state has one.

        Returns:
            Which keys have a live value, and the columns, one row per wanted key, null where there is none.
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
        """Entries layout: look many (key, entry) pairs up at once; one pair per row, sorted by (hash, entry).

        Returns:
            As `find`.
        """
        ...

    def entry_finder(
        self, state: str, key_hash: int, key: Sequence[pa.Array], view: Callable[[pa.RecordBatch], EntryView]
    ) -> EntryFinder:
        """Entries layout: for many look-ups of one entry each, all of one key (columns of one row).

        What they have in common is done here, once. A look-up costs about the same however many entries there are, and
        loads nothing but the row that it finds.

        Args:
            view: reads stored rows of this state; called once for each batch that has some of the key's.
        """
        ...

    def entry_bounds(self, state: str, hashes: Hashes) -> Positions:
        """Entries layout: of each hash an upper bound of the stored rows. Cheap: nothing but hashes is read. 0 is
        certain."""
        ...

    def read_entries(self, state: str, hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[pa.RecordBatch, Positions]:
        """Entries layout: all live entries of some keys, in memory.

        Returns:
            A batch of the state's schema, key after key as given and in order of `entry` within one; and `len(keys) +
            1` offsets: key number k has the rows from offsets[k] up to (without) offsets[k + 1].
        """
        ...

    def iter_entries(
        self, state: str, key_hash: int, key: Sequence[pa.Array], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        """Entries layout: the live entries of one key (columns of one row) in order, about `rows_max` at a time."""
        ...

    def due(self, state: str, through_ms: int) -> pa.RecordBatch:
        """Live rows whose `due` is at most `through_ms`, in order of (key_hash, entry).

        Rows that an earlier epoch has taken (`ShardResult.due_taken`) are not looked at again.
        """
        ...

    def next_due(self, state: str, after_ms: int | None = None) -> int | None:
        """A lower bound (ms) of the earliest `due` that was not taken yet; None if nothing can be due.

        Cheap, so it may be that of a row that was removed since.

        Args:
            after_ms: only later ones count.
        """
        ...

    def overlaid(
        self, changes: Mapping[str, pa.RecordBatch], due_taken: Mapping[str, int] | None = None
    ) -> StateReader:
        """This state with changes on top, in memory.

        Args:
            due_taken: per state the bound up to which the epoch has taken what was due here; `due` and `next_due` of
                the result pass over it, but not over rows of `changes`.
        """
        ...
