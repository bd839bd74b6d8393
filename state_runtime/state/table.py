"""State tables as sorted Arrow batches: layout, look-up and folding; pure and vectorised.

A batch of a state has the columns

    key_hash   uint64   xxhash64 of the key columns, read as unsigned; the batch is sorted by it
    deleted    bool     a tombstone: the row's identity was removed
    entry      uint64   collections only: second sort column, see below
    key.<c>    …        the key columns
    entry.<c>  …        maps only: the columns of the map key
    value.<c>  …        the value columns; null in a tombstone
    expires    int64    states with a TTL: batch time (ms) from which the row is gone; null is never
    due        int64    states with an index by time: when the row is due (ms); null is never

A state has `expires` or `due` or neither. There are two layouts:

- *value*: one row per key.
- *entries* (lists, maps, timers, windows, buffered rows): many rows per key, sorted by (key_hash, entry). The identity
  of a row is its key, `entry` and the entry columns. `entry` orders the rows of a key: of a list it is the place (epoch
  in the high bits, so that appending need not read existing rows), of a map xxhash64 of the map key, of a timer its
  time (`entry_of_time`). `entry` 0 with `deleted` is a *clear marker*: it hides every row of its key in older batches,
  and nothing in its own batch, where it comes first. No other row has entry 0.

A batch holds each identity once. Look-up is a binary search of sorted hashes, followed by a comparison of the real
keys, because hashes collide. Equality is Spark's grouping equality: null equals null, NaN equals NaN, 0.0 equals -0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import CorruptSegment, InvalidData
from state_runtime.base.limits import FOLD_BYTES_MAX, GIB

__all__ = [
    "CLEAR_MARKER",
    "DELETED",
    "ENTRY",
    "HASH",
    "HASH_MAX",
    "StateSchema",
    "adapt",
    "bounded_slices",
    "check_names",
    "concat",
    "entries_of",
    "entry_of_time",
    "expired",
    "first_of_groups",
    "fold",
    "hashes_of",
    "in_order",
    "int64_values",
    "interleaved",
    "plain_numbers",
    "ranges",
    "removal_of",
    "same_keys",
    "slice_hash_range",
    "time_of_entry",
    "widened",
    "widens",
]

HASH = "key_hash"
HASH_MAX = (1 << 64) - 1
DELETED = "deleted"
ENTRY = "entry"
CLEAR_MARKER = 0
"""The `entry` of a clear marker."""

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Time = Literal["", "expires", "due"]


@dataclass(frozen=True)
class StateSchema:
    """Columns of one state, as Arrow fields without prefixes.

    Attributes:
        keys: the key columns.
        values: the value columns; may be empty.
        entries: None for the value layout; else the entry columns (of a map), empty for lists and timers.
        time: whether rows have a time, and its meaning.
    """

    keys: pa.Schema
    values: pa.Schema
    entries: pa.Schema | None = None
    time: Time = ""

    @staticmethod
    def of(stored: pa.Schema) -> StateSchema:
        """Return the schema of stored columns: the inverse of `arrow`, for tools that know only the stored state.

        Raises:
            CorruptSegment: the columns are not those of a state.
        """
        try:
            check_names(stored)
        except ValueError as error:
            raise CorruptSegment(f"a column of a state has a name that is no text: {error}") from error
        names = stored.names
        if names[:2] != [HASH, DELETED]:
            raise CorruptSegment(f"columns {names} are not those of a state")
        has_entries = len(names) > 2 and names[2] == ENTRY
        time: Time = "expires" if names[-1] == "expires" else "due" if names[-1] == "due" else ""
        keys, entries, values = (
            pa.schema([pa.field(f.name[len(prefix) :], f.type) for f in stored if f.name.startswith(prefix)])
            for prefix in ("key.", "entry.", "value.")
        )
        schema = StateSchema(keys, values, entries if has_entries else None, time)
        if not schema.arrow.equals(stored):
            raise CorruptSegment(f"columns {names} are not those of a state")
        return schema

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema of a batch."""
        fields = [pa.field(HASH, pa.uint64(), nullable=False), pa.field(DELETED, pa.bool_(), nullable=False)]
        if self.entries is not None:
            fields.append(pa.field(ENTRY, pa.uint64(), nullable=False))
        fields += [pa.field(f"key.{f.name}", f.type) for f in self.keys]
        fields += [pa.field(f"entry.{f.name}", f.type) for f in self.entries or ()]
        fields += [pa.field(f"value.{f.name}", f.type) for f in self.values]
        if self.time:
            fields.append(pa.field(self.time, pa.int64()))
        return pa.schema(fields)

    @property
    def _first_key(self) -> int:
        return 2 if self.entries is None else 3

    def batch(
        self,
        hashes: Hashes,
        deleted: Mask | None,
        keys: Sequence[pa.Array],
        values: Sequence[pa.Array],
        *,
        entries: Hashes | None = None,
        entry_columns: Sequence[pa.Array] = (),
        times: pa.Array | None = None,
    ) -> pa.RecordBatch:
        """Combine columns, which must already be sorted by (hash, entry).

        Args:
            entries, entry_columns: for the entries layout only, and required there.
            times: for states with a time only, and required there; int64, milliseconds.
        """
        gone = pa.array(deleted if deleted is not None else np.zeros(len(hashes), dtype=np.bool_))
        columns = [pa.array(hashes), gone]
        if entries is not None:
            columns.append(pa.array(entries, type=pa.uint64()))
        columns += [*keys, *entry_columns, *values]
        if times is not None:
            columns.append(times)
        return pa.RecordBatch.from_arrays(columns, schema=self.arrow)

    def keys_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the key columns of a batch."""
        return [batch.column(self._first_key + i) for i in range(len(self.keys))]

    def entry_columns_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the entry columns of a batch: of a map its map key."""
        first = self._first_key + len(self.keys)
        return [batch.column(first + i) for i in range(len(self.entries or ()))]

    def values_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the value columns of a batch."""
        first = self._first_key + len(self.keys) + len(self.entries or ())
        return [batch.column(first + i) for i in range(len(self.values))]

    def times_of(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the `expires` or `due` column of a batch; only for states that have one."""
        return batch.column(batch.num_columns - 1)

    def answers(self, columns: Sequence[str] | None) -> list[int]:
        """Return the numbers of the batch columns that a look-up returns: some value columns by name; None: all value
        columns, followed by the time if there is one."""
        first = self._first_key + len(self.keys) + len(self.entries or ())
        if columns is not None:
            return [first + self.values.get_field_index(name) for name in columns]
        return [*range(first, first + len(self.values) + bool(self.time))]

    def empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self.arrow)

    def check_batch(self, batch: pa.RecordBatch, where: str) -> pa.RecordBatch:
        """Return `batch` if it has this schema and is sorted; data from a store is trusted only after this check."""
        if not batch.schema.equals(self.arrow):
            raise CorruptSegment(
                f"{where} has columns {batch.schema.names}, expected {self.arrow.names}; types must match too"
            )
        if any(batch.column(number).null_count for number in range(self._first_key)):
            raise CorruptSegment(f"{where} has rows without a key hash, a mark of deletion or an entry")
        hashes = hashes_of(batch)
        if len(hashes) > 1:
            ordered = hashes[:-1] <= hashes[1:]
            if self.entries is not None:
                entries = entries_of(batch)
                ordered = (hashes[:-1] < hashes[1:]) | (ordered & (entries[:-1] <= entries[1:]))
            if not bool(np.all(ordered)):
                raise CorruptSegment(f"{where} is not sorted by key hash{' and entry' if self.entries else ''}")
        return batch


def check_names(stored: pa.Schema) -> None:
    """Check every name of a stored schema, also of nested fields. Arrow returns names as raw bytes, and the first
    access to one that is not UTF-8 would raise, wherever that is.

    Raises:
        ValueError: a name is not UTF-8.
    """
    waiting: list[pa.Field | pa.DataType] = list(stored)
    while waiting:
        found = waiting.pop()
        if isinstance(found, pa.Field):
            found.name.encode()
            found = found.type
        waiting += [found.field(number) for number in range(found.num_fields)]


def entries_of(batch: pa.RecordBatch) -> Hashes:
    """Return the `entry` column of a batch in the entries layout, without a copy."""
    entries: Hashes = batch.column(2).to_numpy(zero_copy_only=True)
    return entries


def entry_of_time(times_ms: npt.NDArray[np.int64]) -> Hashes:
    """Return times as `entry` values of the same order; the earliest long gets the next one's, because 0 is taken."""
    entries = times_ms.view(np.uint64) ^ np.uint64(1 << 63)
    shifted: Hashes = np.maximum(entries, np.uint64(1))
    return shifted


def time_of_entry(entries: Hashes) -> npt.NDArray[np.int64]:
    """Return the times of `entry` values: the inverse of `entry_of_time`."""
    times: npt.NDArray[np.int64] = (entries ^ np.uint64(1 << 63)).view(np.int64)
    return times


def hashes_of(batch: pa.RecordBatch) -> Hashes:
    """Return the hash column, without a copy."""
    hashes: Hashes = batch.column(0).to_numpy(zero_copy_only=True)
    return hashes


def int64_values(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the values of an int64 column without a copy; values of nulls are undefined."""
    values = np.frombuffer(column.buffers()[1], dtype=np.int64, count=column.offset + len(column))
    return values[column.offset :]


def plain_numbers(column: pa.Array) -> npt.NDArray[Any] | None:
    """Return the values of a column of numbers or times as they are in memory, times as integers, without a copy; None
    if it is of another kind or holds a null."""
    if column.null_count or not is_plain(column.type):
        return None
    kind = "f" if pa.types.is_floating(column.type) else "u" if pa.types.is_unsigned_integer(column.type) else "i"
    dtype = np.dtype(f"{kind}{column.type.bit_width // 8}")
    if len(column) == 0:
        return np.empty(0, dtype=dtype)
    return np.frombuffer(column.buffers()[1], dtype=dtype, count=column.offset + len(column))[column.offset :]


@lru_cache(maxsize=256)
def is_plain(kind: pa.DataType) -> bool:
    """Return whether a column is numbers or times: `plain_numbers` returns them if none is null."""
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or (types.is_temporal(kind) and not types.is_interval(kind))
    )


def expired(times: pa.Array, now_ms: int) -> Mask:
    """Return which rows are gone by a batch time, from their `expires` column."""
    gone: Mask = pc.fill_null(pc.less_equal(times, now_ms), False).to_numpy(zero_copy_only=False)
    return gone


def ranges(starts: Positions, counts: Positions) -> Positions:
    """Return the positions of many ranges, one after the other, without a loop."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    positions: Positions = np.repeat(starts - (ends - counts), counts) + np.arange(total, dtype=np.int64)
    return positions


def slice_hash_range(batch: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    """Return the rows of a sorted batch whose hash is in the closed range; without a copy."""
    hashes = hashes_of(batch)
    start = int(np.searchsorted(hashes, np.uint64(low), side="left"))
    stop = int(np.searchsorted(hashes, np.uint64(high), side="right"))
    return batch.slice(start, stop - start)


def same_keys(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> Mask:
    """Return, row by row, whether two equally long lists of key columns hold the same key (grouping equality)."""
    length = len(left[0]) if left else 0
    same = np.ones(length, dtype=np.bool_)
    for a, b in zip(left, right, strict=True):
        same &= _same_column(a, b)
    return same


def _same_column(a: pa.Array, b: pa.Array) -> Mask:
    equal: Mask
    if pa.types.is_struct(a.type):
        equal = same_keys(a.flatten(), b.flatten()) if a.type.num_fields else np.ones(len(a), dtype=np.bool_)
    elif pa.types.is_list(a.type) or pa.types.is_large_list(a.type):
        equal = _same_lists(a, b)
    elif a.type == b.type and (left := plain_numbers(a)) is not None and (right := plain_numbers(b)) is not None:
        equal = left == right
        if left.dtype.kind == "f":
            equal |= np.isnan(left) & np.isnan(right)
    else:
        equal = pc.fill_null(pc.equal(a, b), False).to_numpy(zero_copy_only=False)
        if pa.types.is_floating(a.type):
            nan_a = pc.fill_null(pc.is_nan(a), False).to_numpy(zero_copy_only=False)
            nan_b = pc.fill_null(pc.is_nan(b), False).to_numpy(zero_copy_only=False)
            equal = equal | (nan_a & nan_b)
    if a.null_count or b.null_count:
        null_a = a.is_null().to_numpy(zero_copy_only=False)
        null_b = b.is_null().to_numpy(zero_copy_only=False)
        equal = np.where(null_a | null_b, null_a & null_b, equal)
    return equal


def _same_lists(a: pa.Array, b: pa.Array) -> Mask:
    """Compare lengths, then elements; the caller handles nulls."""
    sizes_a, sizes_b = (pc.fill_null(pc.list_value_length(x), -1).to_numpy(zero_copy_only=False) for x in (a, b))
    equal: Mask = sizes_a == sizes_b
    filled = equal & (sizes_a > 0)
    picked = pa.array(filled)
    elements = _same_column(pc.list_flatten(a.filter(picked)), pc.list_flatten(b.filter(picked)))
    if len(elements):
        starts = np.concatenate(([0], np.cumsum(sizes_a[filled])[:-1]))
        equal[filled] = np.logical_and.reduceat(elements, starts)
    return equal


def first_of_groups(hashes: Hashes, keys: Sequence[pa.Array]) -> tuple[Positions | None, Mask]:
    """Group rows that are sorted by hash into runs of equal keys.

    Returns:
        A permutation to apply first (None where the order already groups equal keys, which is practically always), and
        a mask of the rows that begin a group in that order. The permutation is stable, so that rows of a key keep
        their order, and only moves rows within one hash.
    """
    count = len(hashes)
    starts = np.ones(count, dtype=np.bool_)
    if count < 2:
        return None, starts
    tied = np.flatnonzero(hashes[1:] == hashes[:-1])
    if len(tied) == 0:
        return None, starts
    before = [k.take(pa.array(tied)) for k in keys]
    after = [k.take(pa.array(tied + 1)) for k in keys]
    same = same_keys(before, after)
    starts[tied[same] + 1] = False
    if bool(same.all()):
        return None, starts
    # Two different keys share a hash (expected once in 2^64 / n^2 batches): group those few rows one hash at a time.
    order = np.arange(count, dtype=np.int64)
    collided = np.unique(hashes[tied[~same]])
    for value in collided:
        low, high = int(np.searchsorted(hashes, value, "left")), int(np.searchsorted(hashes, value, "right"))
        names: dict[Any, int] = {}
        rows = [tuple(_canonical(k[i].as_py()) for k in keys) for i in range(low, high)]
        ranks = np.array([names.setdefault(row, len(names)) for row in rows])
        inner = np.argsort(ranks, kind="stable")
        order[low:high] = low + inner
        sorted_ranks = ranks[inner]
        starts[low] = True
        starts[low + 1 : high] = sorted_ranks[1:] != sorted_ranks[:-1]
    return order, starts


def _canonical(value: Any) -> Any:
    """Return a hashable substitute under grouping equality."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    if isinstance(value, dict):
        return tuple((k, _canonical(v)) for k, v in value.items())
    if isinstance(value, list):
        return tuple(_canonical(v) for v in value)
    return value


def concat(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Combine batches into one, in order.

    Raises:
        InvalidData: a column would have more text or binary than Arrow's offsets reach, 2 GiB.
    """
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    try:
        return pa.concat_batches(batches)
    except pa.ArrowInvalid as error:
        size = sum(batch.nbytes for batch in batches)
        if size < 2 * GIB:
            raise
        raise InvalidData(
            f"{size:,} bytes in {sum(batch.num_rows for batch in batches):,} rows are to be held together, and a "
            "column of text or binary ends at 2 GiB. Give the job more shards (parallelism), its source a bound "
            "(maxFilesPerTrigger, maxOffsetsPerTrigger), or keep smaller values"
        ) from error


def bounded_slices(batches: Sequence[pa.RecordBatch], bytes_max: int | None = None) -> Iterator[list[pa.RecordBatch]]:
    """Yield sorted batches of one state, all cut at the same hashes, in ascending order; without a copy.

    Args:
        bytes_max: None: `FOLD_BYTES_MAX`.

    Yields:
        In the order of the batches their rows of some hashes: at most `bytes_max` together, or all of one hash.
    """
    filled = [batch for batch in batches if batch.num_rows]
    if not filled:
        return
    if bytes_max is None:
        bytes_max = FOLD_BYTES_MAX
    low, high = (select(int(hashes_of(b)[at]) for b in filled) for select, at in ((min, 0), (max, -1)))
    if low == high or sum(batch.nbytes for batch in filled) <= bytes_max:
        yield filled
        return
    middle = (low + high) // 2
    for first, last in ((low, middle), (middle + 1, high)):
        yield from bounded_slices([slice_hash_range(batch, first, last) for batch in filled], bytes_max)


def removal_of(rows: pa.RecordBatch, schema: StateSchema) -> pa.RecordBatch:
    """Return a tombstone for each of some rows."""
    return schema.batch(
        hashes_of(rows),
        np.ones(rows.num_rows, dtype=np.bool_),
        schema.keys_of(rows),
        [pa.nulls(rows.num_rows, field.type) for field in schema.values],
        entries=None if schema.entries is None else entries_of(rows),
        entry_columns=schema.entry_columns_of(rows),
        times=pa.nulls(rows.num_rows, pa.int64()) if schema.time else None,
    )


def in_order(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of the entries layout in the state's order, by (hash, entry): keys with equal hashes may have come
    one after the other."""
    return rows.take(pa.array(np.lexsort((entries_of(rows), hashes_of(rows)))))


def interleaved(batches: Sequence[pa.RecordBatch], schema: StateSchema) -> pa.RecordBatch:
    """Combine the rows of sorted batches into one sorted batch; no identity is in two of them."""
    filled = [batch for batch in batches if batch.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else schema.empty()
    merged = concat(filled, schema.arrow)
    if schema.entries is None:
        order = np.argsort(hashes_of(merged), kind="stable")
    else:
        order, _ = _entry_order(hashes_of(merged), entries_of(merged))
    return merged.take(pa.array(order))


def fold(
    newest_first: Sequence[pa.RecordBatch],
    schema: StateSchema,
    *,
    drop_deleted: bool,
    now_ms: int | None = None,
) -> pa.RecordBatch:
    """Merge sorted batches; the newest row of each identity stays.

    A clear marker hides its key's rows in older batches. Of several markers the newest stays, so that the result has
    the same effect on batches older than all of these.

    Args:
        newest_first: batches of one state; the same identity in an earlier one wins.
        drop_deleted: also remove tombstones and clear markers: right only if nothing older is below the result.
        now_ms: with `drop_deleted`, also remove rows that have expired by this batch time. (Without it they must stay,
            because they hide older ones.)
    """
    batches = [b for b in newest_first if b.num_rows]
    if len(batches) > 2 and sum(b.nbytes for b in batches) > FOLD_BYTES_MAX:
        # Versions of large values: outdated ones are removed before everything is combined.
        half = len(batches) // 2
        halves = [fold(part, schema, drop_deleted=False) for part in (batches[:half], batches[half:])]
        batches = [b for b in halves if b.num_rows]
    if not batches:
        return schema.empty()
    order = None
    if len(batches) == 1:
        merged = batches[0]
    elif schema.entries is None:
        merged = concat(batches, schema.arrow)
        order = _newest_values(merged, schema)
    else:
        # Oldest first: rows that were appended to lists then are in order once the batch is sorted by hash.
        merged = concat(batches[::-1], schema.arrow)
        order = _newest_entries(merged, schema, [b.num_rows for b in batches[::-1]])
    stays = _stays(merged, schema, now_ms) if drop_deleted else None
    if order is None:
        return merged if stays is None else merged.filter(pa.array(stays))
    # Only rows that stay are moved.
    return merged.take(pa.array(order if stays is None else order[stays[order]]))


def _stays(batch: pa.RecordBatch, schema: StateSchema, now_ms: int | None) -> Mask | None:
    """Return which rows are neither deleted nor expired; None if all stay."""
    gone: Mask = batch.column(1).to_numpy(zero_copy_only=False)
    if now_ms is not None and schema.time == "expires":
        gone = gone | expired(schema.times_of(batch), now_ms)
    return ~gone if bool(gone.any()) else None


def _newest_values(merged: pa.RecordBatch, schema: StateSchema) -> Positions:
    """Return where each key's first row is, in order, in concatenated batches of the value layout."""
    # Stable: of equal hashes the newest stays in front. numpy's stable sort finds the sorted runs and merges them.
    hashes = hashes_of(merged)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    tied = np.flatnonzero(ordered[1:] == ordered[:-1])
    at, after = pa.array(order[tied]), pa.array(order[tied + 1])
    keys = schema.keys_of(merged)
    keep = np.ones(len(order), dtype=np.bool_)
    if bool(same_keys([k.take(at) for k in keys], [k.take(after) for k in keys]).all()):
        keep[tied + 1] = False
    else:
        picked = pa.array(order)
        regroup, keep = first_of_groups(ordered, [k.take(picked) for k in keys])
        order = order if regroup is None else order[regroup]
    return order[keep]


def _newest_entries(merged: pa.RecordBatch, schema: StateSchema, counts: Sequence[int]) -> Positions:
    """Return where each identity's newest row is that no clear marker hides, in order, in concatenated batches of the
    entries layout, oldest first.

    Args:
        counts: rows of each batch.
    """
    order, ties = _entry_order(hashes_of(merged), entries_of(merged))
    identity = [*schema.keys_of(merged), *schema.entry_columns_of(merged)]
    at, after = pa.array(order[ties]), pa.array(order[ties + 1])
    if not bool(same_keys([c.take(at) for c in identity], [c.take(after) for c in identity]).all()):
        # Different rows with the same hash and entry: group those of one identity, oldest first as before.
        groups = np.ones(len(order), dtype=np.int64)
        groups[ties + 1] = 0
        picked = pa.array(order)
        regroup, starts = first_of_groups(np.cumsum(groups).view(np.uint64), [c.take(picked) for c in identity])
        order = order if regroup is None else order[regroup]
        ties = np.flatnonzero(~starts) - 1
    keep = np.ones(len(order), dtype=np.bool_)
    keep[ties] = False  # the last of each identity is the newest
    order = order[keep]
    if not bool((entries_of(merged) == CLEAR_MARKER).any()):
        return order
    ages = np.repeat(np.arange(len(counts))[::-1], counts)
    return order[~_hidden_by_clear_markers(merged, schema, order, ages[order])]


def _entry_order(hashes: Hashes, entries: Hashes) -> tuple[Positions, Positions]:
    """Return the stable permutation that sorts by (hash, entry), and the places in it after which the same pair
    repeats."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    # Entries matter only where a hash repeats.
    tied = np.flatnonzero(ordered[1:] == ordered[:-1])
    before, after = entries[order[tied]], entries[order[tied + 1]]
    falls = after < before
    if bool(falls.any()):
        # Only the rows of hashes whose entries are not in order yet.
        group = np.concatenate(([0], np.cumsum(tied[1:] != tied[:-1] + 1)))
        unsorted = np.zeros(int(group[-1]) + 1, dtype=np.bool_)
        unsorted[group[falls]] = True
        pairs = tied[unsorted[group]]
        picked = np.zeros(len(order), dtype=np.bool_)
        picked[pairs] = picked[pairs + 1] = True
        rows = np.flatnonzero(picked)
        order[rows] = order[rows[_order_by_entry(ordered[rows], entries[order[rows]])]]
        before, after = entries[order[tied]], entries[order[tied + 1]]
    return order, tied[before == after]


def _order_by_entry(hashes: Hashes, entries: Hashes) -> Positions:
    """Return the stable permutation that sorts rows by entry within those of one hash, which are adjacent already.

    The hash's number and the entry are sorted as one number: ten times as fast as numpy's lexicographic sort. For
    entries that are hashes the low bits do not fit; they are compared only where the rest did not decide.
    """
    above_least = entries - entries.min()
    groups = np.concatenate(([0], np.cumsum(hashes[1:] != hashes[:-1])))
    group_bits = int(groups[-1]).bit_length()
    cut = np.uint64(max(0, group_bits + int(above_least.max()).bit_length() - 64))
    order = np.argsort((groups.view(np.uint64) << np.uint64(64 - group_bits)) | (above_least >> cut), kind="stable")
    if cut:
        ordered = above_least[order]
        if bool(np.any((ordered[1:] < ordered[:-1]) & (groups[1:] == groups[:-1]))):
            order = np.lexsort((entries, groups))
    return order


def _hidden_by_clear_markers(merged: pa.RecordBatch, schema: StateSchema, order: Positions, ages: Positions) -> Mask:
    """Return which rows a clear marker of a newer batch hides.

    Args:
        order: rows sorted by (hash, entry), each identity once, so that a marker precedes the rows of its key.
        ages: number of each row's batch, 0 is the newest.
    """
    markers = np.flatnonzero(entries_of(merged)[order] == CLEAR_MARKER)
    hashes = hashes_of(merged)[order]
    behind = np.searchsorted(hashes, hashes[markers], side="right") - markers - 1
    rows = ranges(markers + 1, behind)
    marker = np.repeat(markers, behind)
    older = ages[rows] > ages[marker]
    rows, marker = rows[older], marker[older]
    at, by = pa.array(order[rows]), pa.array(order[marker])
    keys = schema.keys_of(merged)
    same = same_keys([k.take(at) for k in keys], [k.take(by) for k in keys])
    hidden = np.zeros(len(order), dtype=np.bool_)
    hidden[rows[same]] = True
    return hidden


# --- schema evolution --------------------------------------------------------------------------------------------

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Return whether every stored value of a type can be read as another: equal, a wider integer or decimal, float as
    double.

    Struct fields may be added (null in stored rows), removed and widened; elements of lists and values of maps may be
    widened. Whether nested values may be null makes no difference.
    """
    if old == new:
        return True
    if pa.types.is_list(old) and pa.types.is_list(new):
        return widens(old.value_type, new.value_type)
    if pa.types.is_map(old) and pa.types.is_map(new):
        return bool(old.key_type == new.key_type) and widens(old.item_type, new.item_type)
    if pa.types.is_decimal128(old) and pa.types.is_decimal128(new):
        return bool(old.scale <= new.scale and old.precision - old.scale <= new.precision - new.scale)
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return all(widens(old.field(f.name).type, f.type) for f in new if old.get_field_index(f.name) >= 0)
    if old in _INTEGERS and new in _INTEGERS:
        return _INTEGERS.index(old) < _INTEGERS.index(new)
    return bool(old == pa.float32() and new == pa.float64())


def adapt(
    batch: pa.RecordBatch, schema: StateSchema, defaults: Mapping[str, pa.Scalar] | None = None
) -> pa.RecordBatch:
    """Convert a batch that was stored with an older schema of the same state to the current schema; the same batch if
    they agree.

    Value columns are matched by name: added ones are null or have their default, dropped ones are left out, the others
    are reordered and widened (`widens`).

    Args:
        defaults: values of added columns, without prefix; tombstones stay null.

    Raises:
        CorruptSegment: keys, entry columns, time or a value column have other types, which is no evolution of this
            state.
        ValueError: a default is not a value of its column.
    """
    if batch.schema.equals(schema.arrow):
        return batch
    stored = StateSchema.of(batch.schema)
    if (stored.keys, stored.entries, stored.time) != (schema.keys, schema.entries, schema.time):
        raise CorruptSegment(
            f"stored columns {batch.schema.names} have other keys, entry columns or time than {schema.arrow.names}; "
            "types must match too"
        )
    values = dict(zip(stored.values.names, stored.values_of(batch), strict=True))
    alive = pc.invert(batch.column(1))
    columns = [*schema.keys_of(batch), *schema.entry_columns_of(batch)]
    for field in schema.values:
        if field.name not in values:
            columns.append(_added(field, alive, (defaults or {}).get(field.name)))
        elif widens(values[field.name].type, field.type):
            columns.append(widened(values[field.name], field.type))
        else:
            raise CorruptSegment(
                f"value column {field.name!r} is stored as {values[field.name].type} and cannot be read as {field.type}"
            )
    first = batch.columns[: 2 if schema.entries is None else 3]
    times = [schema.times_of(batch)] if schema.time else []
    return pa.RecordBatch.from_arrays([*first, *columns, *times], schema=schema.arrow)


def _added(field: pa.Field, alive: pa.Array, default: pa.Scalar | None) -> pa.Array:
    if default is None or not default.is_valid:
        return pa.nulls(len(alive), field.type)
    if default.type != field.type:
        raise ValueError(f"the default of value column {field.name!r} is of type {default.type}, not {field.type}")
    return pc.if_else(alive, default, pa.scalar(None, field.type))


def widened(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return a column as a type that its own `widens` to."""
    if column.type == wanted:
        return column
    if not pa.types.is_struct(wanted):
        return column.cast(wanted)
    stored = {f.name: column.field(i) for i, f in enumerate(column.type)}
    fields = [widened(stored[f.name], f.type) if f.name in stored else pa.nulls(len(column), f.type) for f in wanted]
    return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=column.is_null())
