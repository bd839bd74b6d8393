"""What tells whether two sets of rows are the same, whatever order, cuts, format or backend they come in; pure and
vectorised.

The digest of a row goes through all its columns: whether a value is there, then XXH64 of it as `state/keyhash.py`
hashes it, chained. Two such hashes with different seeds are 128 bits. The digest of many rows is the sum of theirs
(modulo 2^64 each), so it does not depend on their order, and those of disjoint sets add up. A row that is there twice
counts twice.

Equal are values that Spark's grouping takes for equal: 0.0 is -0.0, and NaN is NaN. Maps are equal whatever order their
entries have. It finds accidents (a lost row, a changed value, two states mixed up); it is no protection against
somebody who wants to deceive: there are digests of files for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_runtime.base.errors import InvalidData
from state_runtime.state.keyhash import chain_rows
from state_runtime.state.table import DELETED

__all__ = ["Fingerprint", "fingerprint"]

_Hashes = npt.NDArray[np.uint64]
_SEEDS = (0x9AE16A3B2F90404F, 0xC949D7C7509E6557)  # any two; part of no format
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Fingerprint:
    """Of some rows.

    Attributes:
        rows: how many.
        high, low: the halves of the digest.
    """

    rows: int = 0
    high: int = 0
    low: int = 0

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.high:016x}{self.low:016x}"

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {self.digest}"

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Of both sets of rows together."""
        return Fingerprint(self.rows + other.rows, (self.high + other.high) & _MASK, (self.low + other.low) & _MASK)

    @staticmethod
    def of(batch: pa.RecordBatch) -> Fingerprint:
        """Of a batch: of all columns in their order, but not of their names. `deleted` is left out: live rows are
        meant.

        Raises:
            InvalidData: a column's type has no hash here.
        """
        columns = [c for name, c in zip(batch.schema.names, batch.columns, strict=True) if name != DELETED]
        halves = []
        for seed in _SEEDS:
            hashes = np.full(batch.num_rows, seed, dtype=np.uint64)
            for column in columns:
                hashes = _chained(column, hashes)
            halves.append(int(np.add.reduce(hashes, dtype=np.uint64)))
        return Fingerprint(batch.num_rows, *halves)


def fingerprint(batches: Iterable[pa.RecordBatch]) -> Fingerprint:
    """Of all rows of some batches; see `Fingerprint.of`."""
    found = Fingerprint()
    for batch in batches:
        found = found + Fingerprint.of(batch)
    return found


def _chained(column: pa.Array, hashes: _Hashes) -> _Hashes:
    """The rows' hashes after one more column: unlike those of keys, they tell null from nothing, and lists from their
    elements."""
    kind = column.type
    if pa.types.is_null(kind):
        return chain_rows(pa.array(np.zeros(len(column), dtype=np.bool_)), hashes)
    hashes = chain_rows(column.is_valid(), hashes)
    if pa.types.is_struct(kind):
        for child in column.flatten():
            hashes = _chained(child, hashes)
        return hashes
    if pa.types.is_map(kind):
        return _with_elements(
            column, pa.StructArray.from_arrays([column.keys, column.items], ["k", "v"]), hashes, False
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _with_elements(column, column.values, hashes, True)
    return chain_rows(_plain(column), hashes)


def _with_elements(column: pa.Array, elements: pa.Array, hashes: _Hashes, ordered: bool) -> _Hashes:
    """After a list: its length, and the sum of its elements' hashes, each seeded with its place if the order counts."""
    offsets = np.asarray(column.offsets).astype(np.int64)
    starts, ends = offsets[:-1], offsets[1:]
    gone = column.is_null().to_numpy(zero_copy_only=False)
    ends = np.where(gone, starts, ends)
    lengths = ends - starts
    rows = np.repeat(np.arange(len(column)), lengths)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    taken = elements.take(pa.array(np.repeat(starts, lengths) + places))
    seeds = (places if ordered else np.zeros_like(places)).astype(np.uint64) + np.uint64(1)
    # Seeds that lie side by side give hashes that do not.
    each = _chained(taken, chain_rows(pa.array(seeds.view(np.int64)), seeds))
    sums = np.zeros(len(column), dtype=np.uint64)
    np.add.at(sums, rows, each)
    return chain_rows(pa.array(sums.view(np.int64)), chain_rows(pa.array(lengths), hashes))


def _plain(column: pa.Array) -> pa.Array:
    """A column of a type that keys can have, with the same values."""
    kind = column.type
    if pa.types.is_uint64(kind):
        return column.view(pa.int64())
    if pa.types.is_unsigned_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_duration(kind) or pa.types.is_time64(kind) or pa.types.is_date64(kind):
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind) and kind.unit != "us":
        return column.cast(pa.int64())
    if pa.types.is_dictionary(kind):
        raise InvalidData(f"a column of type {kind} has no digest; decode it first")
    return column
