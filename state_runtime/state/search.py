"""Look-up of many keys at once in one sorted batch of a state; pure and vectorised.

Sorted hashes are searched for in sorted hashes, and the real keys of the found rows are compared, because hashes
collide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from state_runtime.state.table import (
    CLEAR_MARKER,
    Hashes,
    Positions,
    StateSchema,
    entries_of,
    hashes_of,
    same_keys,
)

__all__ = ["hash_ranges", "lookup", "matches", "matches_of_entries"]


def lookup(run: pa.RecordBatch, schema: StateSchema, hashes: Hashes, keys: Sequence[pa.Array]) -> Positions:
    """Return for each wanted key its position in one sorted batch of the value layout, -1 if the batch lacks it; see
    `matches`."""
    found = np.full(len(hashes), -1, dtype=np.int64)
    wanted, positions = matches(run, schema, hashes, keys)
    found[wanted] = positions
    return found


def matches(
    run: pa.RecordBatch,
    schema: StateSchema,
    hashes: Hashes,
    keys: Sequence[pa.Array],
    rows: Positions | None = None,
) -> tuple[Positions, Positions]:
    """Find many keys in one sorted batch of the value layout.

    Args:
        run: a batch of the state.
        hashes: sorted, one per wanted key.
        keys: the wanted keys' columns.
        rows: positions of the wanted keys in `keys`, one per hash; by default they are all of them. Only keys whose
            hash the batch has are taken out of their columns.

    Returns:
        The numbers of the wanted keys that were found, ascending, and their positions in the batch.
    """
    stored = hashes_of(run)
    at, wanted = _search(stored, hashes)
    return _same(stored, None, at, wanted, hashes, None, schema.keys_of(run), keys, rows)


def matches_of_entries(
    run: pa.RecordBatch,
    schema: StateSchema,
    hashes: Hashes,
    keys: Sequence[pa.Array],
    entries: Hashes,
    entry_columns: Sequence[pa.Array],
    rows: Positions | None = None,
) -> tuple[Positions, Positions, Positions]:
    """Find many rows in one sorted batch of the entries layout: a search by hash, then one by entry.

    Args:
        hashes, entries: one per wanted row, sorted by hash.
        keys, entry_columns: the rest of the wanted rows' identity.
        rows: see `matches`.

    Returns:
        The numbers of the wanted rows that were found, ascending, and their positions in the batch; and the numbers of
        those whose key has a clear marker in the batch.
    """
    stored, stored_entries = hashes_of(run), entries_of(run)
    starts, wanted = _search(stored, hashes)
    ends = np.searchsorted(stored, hashes[wanted], side="right")
    at = _lower_bound(stored_entries, starts, ends, entries[wanted])
    there = np.flatnonzero(at < ends)
    there = there[stored_entries[at[there]] == entries[wanted[there]]]
    columns = [*schema.keys_of(run), *schema.entry_columns_of(run)]
    asked = [*keys, *entry_columns]
    found, positions = _same(stored, stored_entries, at[there], wanted[there], hashes, entries, columns, asked, rows)
    # A clear marker is the first row of its hash.
    marked = np.flatnonzero(stored_entries[starts] == CLEAR_MARKER)
    if len(marked) == 0:
        return found, positions, marked
    markers = np.zeros(len(hashes), dtype=np.uint64)
    own = schema.keys_of(run)
    cleared, _ = _same(stored, stored_entries, starts[marked], wanted[marked], hashes, markers, own, keys, rows)
    return found, positions, cleared


def hash_ranges(stored: Hashes, hashes: Hashes) -> tuple[Positions, Positions]:
    """Return for each wanted hash, sorted, where its rows begin among sorted ones, and their number."""
    starts, counts = np.zeros(len(hashes), dtype=np.int64), np.zeros(len(hashes), dtype=np.int64)
    at, wanted = _search(stored, hashes)
    starts[wanted] = at
    counts[wanted] = np.searchsorted(stored, hashes[wanted], side="right") - at
    return starts, counts


def _search(stored: Hashes, hashes: Hashes) -> tuple[Positions, Positions]:
    """Return where each wanted hash begins, and which wanted hashes exist."""
    if len(stored) == 0 or len(hashes) == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    at = np.searchsorted(stored, hashes, side="left")
    wanted = np.flatnonzero(stored[np.minimum(at, len(stored) - 1)] == hashes)
    return at[wanted], wanted


def _lower_bound(entries: Hashes, low: Positions, high: Positions, wanted: Hashes) -> Positions:
    """Return for each range the first position whose entry is not below the wanted one; all are halved at once."""
    low, high = low.copy(), high.copy()
    going = np.flatnonzero(low < high)
    while len(going):
        middle = (low[going] + high[going]) >> 1
        below = entries[middle] < wanted[going]
        low[going[below]] = middle[below] + 1
        high[going[~below]] = middle[~below]
        going = going[low[going] < high[going]]
    return low


def _same(
    stored: Hashes,
    stored_entries: Hashes | None,
    positions: Positions,
    wanted: Positions,
    hashes: Hashes,
    entries: Hashes | None,
    stored_columns: Sequence[pa.Array],
    columns: Sequence[pa.Array],
    rows: Positions | None,
) -> tuple[Positions, Positions]:
    """Select the candidates that are the wanted rows, by their real columns: wanted rows, ascending, and positions.

    Args:
        positions, wanted: candidate and wanted row, which agree in hash and entry.
        rows: positions of the wanted rows in `columns`; None: they are in order.
    """
    found: list[tuple[Positions, Positions]] = []
    while len(wanted):
        there = [k.take(pa.array(positions)) for k in stored_columns]
        taken = (
            None if rows is None and len(wanted) == len(hashes) else pa.array(wanted if rows is None else rows[wanted])
        )
        here = list(columns) if taken is None else [k.take(taken) for k in columns]
        same = same_keys(here, there) if columns else np.ones(len(wanted), dtype=np.bool_)
        if bool(same.all()):
            found.append((wanted, positions))
            break
        found.append((wanted[same], positions[same]))
        # The remaining rows met another key with their hash: look one further, as long as the hash is the same.
        wanted, positions = wanted[~same], positions[~same] + 1
        inside = positions < len(stored)
        wanted, positions = wanted[inside], positions[inside]
        going_on = stored[positions] == hashes[wanted]
        if stored_entries is not None and entries is not None:
            going_on &= stored_entries[positions] == entries[wanted]
        wanted, positions = wanted[going_on], positions[going_on]
    if len(found) <= 1:
        return found[0] if found else (wanted, positions)
    numbers, places = (np.concatenate(parts) for parts in zip(*found))
    order = np.argsort(numbers)
    return numbers[order], places[order]
