"""Fingerprints, which are equal for equal sets of rows in any order, cuts, format or backend; pure and vectorised.

The digest of a row chains all its columns: whether a value is there, then XXH64 of the value as `state/keyhash.py`
hashes it. Two such hashes with different seeds are 128 bits. The digest of many rows is the sum of theirs (modulo 2^64
each), so it does not depend on their order, and digests of disjoint sets add up. A row that occurs twice counts twice.

Values are equal if Spark's grouping takes them for equal: 0.0 is -0.0, and NaN is NaN. Maps are equal for any order of
their entries. A fingerprint finds accidents (a lost row, a changed value, two states mixed up). It does not protect
against intended forgery: the digests of files do.
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
_SEEDS = (0x9AE16A3B2F90404F, 0xC949D7C7509E6557)  # arbitrary; not part of a format
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of some rows.

    Attributes:
        rows: number of rows.
        high, low: the halves of the digest.
    """

    rows: int = 0
    high: int = 0
    low: int = 0

    @property
    def digest(self) -> str:
        """The digest as 32 hexadecimal digits."""
        return f"{self.high:016x}{self.low:016x}"

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {self.digest}"

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of both sets of rows together."""
        return Fingerprint(self.rows + other.rows, (self.high + other.high) & _MASK, (self.low + other.low) & _MASK)

    @staticmethod
    def of(batch: pa.RecordBatch) -> Fingerprint:
        """Make the fingerprint of a batch: of all columns in their order, but not of their names. `deleted` is left
        out, because all rows are live.

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
    """Return the fingerprint of all rows of some batches; see `Fingerprint.of`."""
    found = Fingerprint()
    for batch in batches:
        found = found + Fingerprint.of(batch)
    return found


def _chained(column: pa.Array, hashes: _Hashes) -> _Hashes:
    """Return the rows' hashes after one more column. Unlike hashes of keys, they tell null from no value, and lists
    from their elements."""
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
    """Chain a list: its length, and the sum of its elements' hashes, each seeded with its place if the order counts."""
    offsets = np.asarray(column.offsets).astype(np.int64)
    starts, ends = offsets[:-1], offsets[1:]
    gone = column.is_null().to_numpy(zero_copy_only=False)
    ends = np.where(gone, starts, ends)
    lengths = ends - starts
    rows = np.repeat(np.arange(len(column)), lengths)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    taken = elements.take(pa.array(np.repeat(starts, lengths) + places))
    seeds = (places if ordered else np.zeros_like(places)).astype(np.uint64) + np.uint64(1)
    # Hashing turns neighbouring seeds into unrelated ones.
    each = _chained(taken, chain_rows(pa.array(seeds.view(np.int64)), seeds))
    sums = np.zeros(len(column), dtype=np.uint64)
    np.add.at(sums, rows, each)
    return chain_rows(pa.array(sums.view(np.int64)), chain_rows(pa.array(lengths), hashes))


def _plain(column: pa.Array) -> pa.Array:
    """Return a column of a type that keys can have, with the same values."""
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
