"""State tables as sorted Arrow batches: layout, look-up and folding; pure and vectorised.

A batch of a state has the columns

    key_hash   uint64   xxhash64 of the key columns, read as unsigned; the batch is sorted by it
    deleted    bool     a tombstone: the key was cleared
    key.<c>    …        the key columns
    value.<c>  …        the value columns; null in a tombstone

and holds each key once. Look-up is a binary search of sorted hashes, followed by a comparison of the real keys, because
hashes collide. Equality is Spark's grouping equality: null equals null, NaN equals NaN, 0.0 equals -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.errors import CorruptSegment, check
from state_runtime.limits import KEY_GROUP_BITS, MAX_PARALLELISM

__all__ = [
    "DELETED",
    "HASH",
    "HASH_MAX",
    "StateSchema",
    "concat",
    "first_of_groups",
    "fold",
    "hash_range_of_shard",
    "hashes_of",
    "lookup",
    "same_keys",
    "slice_hash_range",
]

HASH = "key_hash"
HASH_MAX = (1 << 64) - 1
DELETED = "deleted"

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StateSchema:
    """Key and value columns of one state, as Arrow fields without prefixes."""

    keys: pa.Schema
    values: pa.Schema

    @staticmethod
    def of(stored: pa.Schema) -> StateSchema:
        """The inverse of `arrow`: for tools that know a state only by what is stored of it.

        Raises:
            CorruptSegment: the columns are not those of a state.
        """
        if stored.names[:2] != [HASH, DELETED]:
            raise CorruptSegment(f"columns {stored.names} are not those of a state")
        keys = [pa.field(f.name[4:], f.type) for f in stored if f.name.startswith("key.")]
        values = [pa.field(f.name[6:], f.type) for f in stored if f.name.startswith("value.")]
        schema = StateSchema(pa.schema(keys), pa.schema(values))
        if not schema.arrow.equals(stored):
            raise CorruptSegment(f"columns {stored.names} are not those of a state")
        return schema

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema of a batch."""
        return pa.schema(
            [pa.field(HASH, pa.uint64(), nullable=False), pa.field(DELETED, pa.bool_(), nullable=False)]
            + [pa.field(f"key.{f.name}", f.type) for f in self.keys]
            + [pa.field(f"value.{f.name}", f.type) for f in self.values]
        )

    def batch(
        self, hashes: Hashes, deleted: Mask | None, keys: Sequence[pa.Array], values: Sequence[pa.Array]
    ) -> pa.RecordBatch:
        """Put columns together; they must already be sorted by hash."""
        gone = pa.array(deleted if deleted is not None else np.zeros(len(hashes), dtype=np.bool_))
        return pa.RecordBatch.from_arrays([pa.array(hashes), gone, *keys, *values], schema=self.arrow)

    def keys_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The key columns of a batch."""
        return [batch.column(2 + i) for i in range(len(self.keys))]

    def values_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The value columns of a batch."""
        return [batch.column(2 + len(self.keys) + i) for i in range(len(self.values))]

    def empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self.arrow)

    def check_batch(self, batch: pa.RecordBatch, where: str) -> pa.RecordBatch:
        """`batch` if it has this schema and is sorted; data from a store is not believed otherwise."""
        if not batch.schema.equals(self.arrow):
            raise CorruptSegment(
                f"{where} has columns {batch.schema.names}, expected {self.arrow.names}; types must match too"
            )
        hashes = hashes_of(batch)
        if len(hashes) > 1 and not bool(np.all(hashes[:-1] <= hashes[1:])):
            raise CorruptSegment(f"{where} is not sorted by key hash")
        return batch


def hashes_of(batch: pa.RecordBatch) -> Hashes:
    """The hash column, without a copy."""
    hashes: Hashes = batch.column(0).to_numpy(zero_copy_only=True)
    return hashes


def hash_range_of_shard(shard: int, parallelism: int) -> tuple[int, int]:
    """The closed range of unsigned key hashes that a shard owns.

    Shard s of P owns the key groups g with floor(g·P / 32768) = s: contiguous, and together they are all hashes.
    """
    check(0 <= shard < parallelism <= MAX_PARALLELISM, f"shard {shard} of {parallelism}")
    shift = 64 - KEY_GROUP_BITS
    first = -(-shard * MAX_PARALLELISM // parallelism)
    end = -(-(shard + 1) * MAX_PARALLELISM // parallelism)
    return first << shift, (end << shift) - 1


def slice_hash_range(batch: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    """The rows of a sorted batch whose hash lies in the closed range; without a copy."""
    hashes = hashes_of(batch)
    start = int(np.searchsorted(hashes, np.uint64(low), side="left"))
    stop = int(np.searchsorted(hashes, np.uint64(high), side="right"))
    return batch.slice(start, stop - start)


def same_keys(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> Mask:
    """Row by row, whether two equally long lists of key columns hold the same key (grouping equality)."""
    length = len(left[0]) if left else 0
    same = np.ones(length, dtype=np.bool_)
    for a, b in zip(left, right, strict=True):
        equal = pc.fill_null(pc.equal(a, b), False).to_numpy(zero_copy_only=False)
        if a.null_count and b.null_count:
            equal = equal | (a.is_null().to_numpy(zero_copy_only=False) & b.is_null().to_numpy(zero_copy_only=False))
        if pa.types.is_floating(a.type):
            nan_a = pc.fill_null(pc.is_nan(a), False).to_numpy(zero_copy_only=False)
            nan_b = pc.fill_null(pc.is_nan(b), False).to_numpy(zero_copy_only=False)
            equal = equal | (nan_a & nan_b)
        same &= equal
    return same


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
    """A hashable stand-in under grouping equality."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    if isinstance(value, dict):
        return tuple((k, _canonical(v)) for k, v in value.items())
    if isinstance(value, list):
        return tuple(_canonical(v) for v in value)
    return value


def lookup(run: pa.RecordBatch, schema: StateSchema, hashes: Hashes, keys: Sequence[pa.Array]) -> Positions:
    """Positions of many keys in one sorted run.

    Args:
        run: a batch of the state.
        hashes: sorted, one per wanted key.
        keys: the wanted keys' columns, as long as `hashes`.

    Returns:
        One position per wanted key, -1 where the run does not have it.
    """
    found = np.full(len(hashes), -1, dtype=np.int64)
    if run.num_rows == 0 or len(hashes) == 0:
        return found
    stored = hashes_of(run)
    at = np.searchsorted(stored, hashes, side="left")
    wanted = np.flatnonzero((at < run.num_rows) & (stored[np.minimum(at, run.num_rows - 1)] == hashes))
    positions = at[wanted]
    run_keys = schema.keys_of(run)
    while len(wanted):
        there = [k.take(pa.array(positions)) for k in run_keys]
        here = [k.take(pa.array(wanted)) for k in keys] if len(wanted) < len(hashes) else list(keys)
        same = same_keys(here, there)
        found[wanted[same]] = positions[same]
        # What is left met another key with its hash: look one further, as long as the hash is the same.
        wanted, positions = wanted[~same], positions[~same] + 1
        inside = positions < run.num_rows
        wanted, positions = wanted[inside], positions[inside]
        going_on = stored[positions] == hashes[wanted]
        wanted, positions = wanted[going_on], positions[going_on]
    return found


def concat(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """One batch from many, in order."""
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return pa.concat_batches(batches)


def fold(newest_first: Sequence[pa.RecordBatch], schema: StateSchema, *, drop_deleted: bool) -> pa.RecordBatch:
    """Merge sorted batches; of each key the newest row stays.

    Args:
        newest_first: batches of one state; the same key in an earlier one wins.
        drop_deleted: also remove tombstones: right only if nothing older lies below the result.
    """
    batches = [b for b in newest_first if b.num_rows]
    if not batches:
        return schema.empty()
    merged = concat(batches, schema.arrow)
    if len(batches) > 1:
        hashes = hashes_of(merged)
        # Stable: of equal hashes the newest stays in front. numpy's stable sort finds the sorted runs and merges them.
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        tied = np.flatnonzero(ordered[1:] == ordered[:-1])
        at, after = pa.array(order[tied]), pa.array(order[tied + 1])
        keys = schema.keys_of(merged)
        same = same_keys([k.take(at) for k in keys], [k.take(after) for k in keys])
        if bool(same.all()):
            # Only rows that stay are moved: the first of each key.
            keep = np.ones(len(order), dtype=np.bool_)
            keep[tied + 1] = False
            merged = merged.take(pa.array(order[keep]))
        else:
            merged = merged.take(pa.array(order))
            regroup, starts = first_of_groups(hashes_of(merged), schema.keys_of(merged))
            merged = merged.take(pa.array(regroup)) if regroup is not None else merged
            merged = merged.filter(pa.array(starts))
    if drop_deleted:
        deleted = merged.column(1)
        if pc.any(deleted).as_py():
            merged = merged.filter(pc.invert(deleted))
    return merged
