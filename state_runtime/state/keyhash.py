"""Spark's `xxhash64` of keys, in Python: finds a key's place in the state without a Spark session; pure.

The hash of a key is a chain: each column's XXH64 takes the hash before it as its seed, the first one takes 42, and a
null leaves the hash unchanged. The hashed bytes of a value, little-endian for numbers:

    boolean                           4 bytes, 1 or 0
    tinyint, smallint, int, date      4 bytes, signed
    bigint, timestamp, timestamp_ntz  8 bytes, signed; times in microseconds
    float, double                     4 or 8 bytes of IEEE 754; -0.0 as 0.0, every NaN as the canonical one
    decimal up to 18 digits           8 bytes, the unscaled number
    decimal of more digits            the unscaled number as Java's BigInteger writes it: big-endian, minimal length
    string, binary                    the bytes (UTF-8)
    struct, array                     no bytes: the chain goes through its fields or elements

Spark has a separate function for 4 and for 8 bytes; both equal XXH64 of those bytes. `hash_key` is for one key and
takes XXH64 from a library. `value_hasher` makes a function that does it with Python's own values, under a microsecond
each. `hash_rows` does the same for many keys at once: about 5 ns a number and 25 ns a short string.
The library hashes one value a call and has no call for a column. For columns, XXH64 is written out here with numpy, and
a test compares it with the library's. A map has no hash, neither here nor in Spark.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from state_runtime.base.errors import InvalidData, check

__all__ = ["SEED", "chain_rows", "hash_key", "hash_rows", "value_hasher", "xxh64"]

SEED = 42  # of Spark's SQL function xxhash64

_MASK = (1 << 64) - 1
_PRIME_1 = 0x9E3779B185EBCA87
_PRIME_2 = 0xC2B2AE3D27D4EB4F
_PRIME_3 = 0x165667B19E3779F9
_PRIME_4 = 0x85EBCA77C2B2AE63
_PRIME_5 = 0x27D4EB2F165667C5
_LONG_DIGITS = 18  # a decimal of up to this number of digits fits a long
# The numbers of this many rows, a few times over, fit a core's cache.
_BLOCK_ROWS = 1 << 14
# A step of fewer rows than this costs more in numpy calls than calling the library for each row.
_VECTOR_ROWS_MIN = 12

_Hashes = npt.NDArray[np.uint64]
_Bytes = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.int64]


def hash_key(columns: Sequence[pa.Array]) -> int:
    """Return the unsigned `key_hash` of one key.

    Args:
        columns: the key columns in the operator's order, one row each, with the types that the state stores.

    Raises:
        InvalidData: a column's type cannot be part of a key.
    """
    hashed = SEED
    for column in columns:
        check(len(column) == 1, f"a key column of {len(column)} rows")
        hashed = _chain_one(column, hashed)
    return hashed


def hash_rows(columns: Sequence[pa.Array], seed: int = SEED) -> _Hashes:
    """Return the unsigned `key_hash` of many keys: for each row the result of `hash_key`.

    Args:
        columns: the key columns in the operator's order, equally long; slices are fine.
        seed: the hash that the chain starts with.

    Raises:
        InvalidData: a column's type cannot be part of a key.
    """
    check(len(columns) > 0, "a hash of no column")
    count = len(columns[0])
    hashes = np.full(count, seed, dtype=np.uint64)
    for column in columns:
        check(len(column) == count, f"key columns of {count} and of {len(column)} rows")
        hashes = _chain(column, hashes)
    return hashes


def chain_rows(column: pa.Array, seeds: _Hashes) -> _Hashes:
    """Return the hashes of many rows after one more column.

    Args:
        seeds: for each row the hash of the columns before.

    Raises:
        InvalidData: see `hash_rows`.
    """
    check(len(column) == len(seeds), f"a column of {len(column)} rows for {len(seeds)} hashes")
    return _chain(column, seeds)


def xxh64(data: bytes, seed: int) -> int:
    """Return XXH64 of some bytes, unsigned."""
    return xxhash.xxh64_intdigest(data, seed)


def _chain_one(column: pa.Array, hashed: int) -> int:
    if column.null_count:
        return hashed
    if pa.types.is_struct(column.type):
        for child in column.flatten():
            hashed = _chain_one(child, hashed)
        return hashed
    if _is_list(column.type):
        elements = column.flatten()
        for at in range(len(elements)):
            hashed = _chain_one(elements.slice(at, 1), hashed)
        return hashed
    return xxh64(_bytes_of(column), hashed)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _bytes_of(column: pa.Array) -> bytes:
    kind = column.type
    if pa.types.is_date32(kind):
        return _integer(column.cast(pa.int32())[0].as_py(), 4)
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return _integer(column.cast(pa.int64())[0].as_py(), 8)
    to_bytes = _to_bytes(kind)
    if to_bytes is None:
        raise _no_hash(kind)
    return to_bytes(column[0].as_py())


def _to_bytes(kind: pa.DataType) -> Callable[[Any], bytes] | None:
    """Return the conversion of a Python value to the bytes that are hashed; None if that depends on more than the
    value."""
    if pa.types.is_boolean(kind):
        return lambda value: int(value).to_bytes(4, "little")
    if pa.types.is_signed_integer(kind):
        size = 8 if kind.bit_width == 64 else 4
        return lambda value: value.to_bytes(size, "little", signed=True)
    if pa.types.is_float32(kind):
        return lambda value: _floating(value, "<f")
    if pa.types.is_float64(kind):
        return lambda value: _floating(value, "<d")
    if pa.types.is_decimal128(kind):
        return partial(_decimal, kind.precision, kind.scale)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str.encode
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return bytes
    return None


def value_hasher(kinds: Sequence[pa.DataType]) -> Callable[[Sequence[Any]], int] | None:
    """Return a function from a row of Python values, as Arrow gives them, to the hash of that key.

    The function raises OverflowError or another ValueError where a value does not fit its type.

    Returns:
        The function; None if one of the types has no such short way (times, structs and arrays).
    """
    found = [_to_bytes(kind) for kind in kinds]
    chain = [to_bytes for to_bytes in found if to_bytes is not None]
    if len(chain) < len(kinds):
        return None

    def hashed(values: Sequence[Any]) -> int:
        so_far = SEED
        for to_bytes, value in zip(chain, values):
            if value is not None:
                so_far = xxhash.xxh64_intdigest(to_bytes(value), so_far)
        return so_far

    return hashed


def _no_hash(kind: pa.DataType) -> InvalidData:
    return InvalidData(
        f"a key column of type {kind} has no hash; keys are booleans, signed numbers, strings, binary, dates, "
        "timestamps in microseconds, and structs and arrays of these"
    )


def _integer(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little", signed=True)


def _floating(value: float, layout: str) -> bytes:
    # Adding 0.0 turns -0.0 into 0.0; Java's floatToIntBits and doubleToLongBits know only one NaN, which is Python's.
    return struct.pack(layout, float("nan") if value != value else value + 0.0)


def _decimal(precision: int, scale: int, value: Decimal) -> bytes:
    unscaled = _unscaled(value, scale)
    if precision <= _LONG_DIGITS:
        return _integer(unscaled, 8)
    bits = (unscaled if unscaled >= 0 else ~unscaled).bit_length()
    return unscaled.to_bytes(bits // 8 + 1, "big", signed=True)


def _unscaled(value: Decimal, scale: int) -> int:
    # By digits: arithmetic on Decimal would round to the context's 28.
    sign, digits, exponent = value.as_tuple()
    check(isinstance(exponent, int), "a decimal column holds a number")
    number = int("".join(map(str, digits)) or "0") * int(10 ** (int(exponent) + scale))
    return -number if sign else number


# --- many rows at once -----------------------------------------------------------------------------------------------


def _chain(column: pa.Array, seeds: _Hashes) -> _Hashes:
    """Return the chain's next hashes, one per row; a null leaves its row's hash unchanged."""
    if column.null_count == len(column):
        return seeds
    kind = column.type
    if pa.types.is_struct(kind):
        # `flatten` passes a struct's null on to its fields: they leave the hash unchanged.
        for child in column.flatten():
            seeds = _chain(child, seeds)
        return seeds
    if _is_list(kind):
        return _chain_elements(column, seeds)
    hashes = np.empty_like(seeds)
    words, places, lengths = _inputs(column)
    for first in range(0, len(seeds), _BLOCK_ROWS):
        block = slice(first, first + _BLOCK_ROWS)
        if places is None:
            hash_words = _hash_halves if words.dtype.itemsize == 4 else _hash_words
            hashes[block] = hash_words(words[block], seeds[block])
        else:
            hashes[block] = _hash_strings(words, places[block], lengths[block], seeds[block])
    if column.null_count:
        np.copyto(hashes, seeds, where=column.is_null().to_numpy(zero_copy_only=False))
    return hashes


def _chain_elements(column: pa.Array, seeds: _Hashes) -> _Hashes:
    """Chain arrays: first the first element of all rows, then all second elements, and so on."""
    lengths = np.asarray(column.value_lengths().fill_null(0)).astype(np.int64)
    starts = np.asarray(column.offsets)[:-1].astype(np.int64)
    hashes = seeds.copy()
    for at in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > at)
        hashes[rows] = _chain(column.values.take(pa.array(starts[rows] + at)), hashes[rows])
    return hashes


def _inputs(column: pa.Array) -> tuple[npt.NDArray[np.unsignedinteger], _Places | None, _Places]:
    """Return the hashed bytes of each row.

    Returns:
        Words of 4 or 8 bytes, one per row; or bytes, with the place where each row's bytes begin and their number.
    """
    kind = column.type
    none = np.empty(0, dtype=np.int64)
    if pa.types.is_boolean(kind):
        return column.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint32), None, none
    if pa.types.is_signed_integer(kind) or pa.types.is_date32(kind):
        numbers = _fixed(column, kind.bit_width // 8)
        if kind.bit_width == 64:
            return numbers.view(np.uint64), None, none
        return numbers.astype(np.int32, copy=False).view(np.uint32), None, none
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return _fixed(column, 8).view(np.uint64), None, none
    if pa.types.is_float32(kind):
        return _canonical_bits(_fixed(column, 4).view(np.float32), np.uint32), None, none
    if pa.types.is_float64(kind):
        return _canonical_bits(_fixed(column, 8).view(np.float64), np.uint64), None, none
    if pa.types.is_decimal128(kind):
        halves = _fixed(column, 8, per_row=2).view(np.uint64).reshape(-1, 2)
        if kind.precision <= _LONG_DIGITS:
            return np.ascontiguousarray(halves[:, 0]), None, none
        return _big_integers(halves)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _strings(column, np.dtype(np.int32))
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _strings(column, np.dtype(np.int64))
    raise _no_hash(kind)


def _fixed(column: pa.Array, size: int, per_row: int = 1) -> npt.NDArray[np.signedinteger]:
    """Return a column's numbers as they are in memory, without a copy; those of null rows are undefined."""
    numbers = np.frombuffer(column.buffers()[1], dtype=f"<i{size}")
    return numbers[column.offset * per_row : (column.offset + len(column)) * per_row]


def _canonical_bits(
    numbers: npt.NDArray[np.floating], bits: type[np.unsignedinteger]
) -> npt.NDArray[np.unsignedinteger]:
    # Adding 0.0 turns -0.0 into 0.0; numpy's NaN is the one that Java knows.
    canonical = numbers + numbers.dtype.type(0)
    canonical[np.isnan(canonical)] = np.nan
    return canonical.view(bits)


def _big_integers(halves: npt.NDArray[np.uint64]) -> tuple[_Bytes, _Places, _Places]:
    """Return 128-bit numbers as Java's BigInteger writes them: the last bytes of the big-endian form, as few as
    possible."""
    low, high = halves[:, 0], halves[:, 1]
    sign = (high.view(np.int64) >> 63).view(np.uint64)
    low, high = low ^ sign, high ^ sign
    lengths = np.ones(len(halves), dtype=np.int64)
    for bits in range(8, 128, 8):
        # One bit of the written bytes is the sign.
        lengths += (high >> np.uint64(bits - 65) > 0) if bits > 64 else (high > 0) | (low >> np.uint64(bits - 1) > 0)
    written = np.ascontiguousarray(halves[:, ::-1]).astype(">u8").view(np.uint8).reshape(-1)
    return written, np.arange(16, len(written) + 16, 16, dtype=np.int64) - lengths, lengths


def _strings(column: pa.Array, offset_type: np.dtype[np.signedinteger]) -> tuple[_Bytes, _Places, _Places]:
    _, offset_buffer, data = column.buffers()
    ends = np.frombuffer(offset_buffer, dtype=offset_type)[column.offset : column.offset + len(column) + 1]
    ends = ends.astype(np.int64)
    lengths = np.diff(ends)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return np.frombuffer(data if data is not None else b"", dtype=np.uint8), ends[:-1], lengths


def _hash_halves(halves: npt.NDArray[np.unsignedinteger], seeds: _Hashes) -> _Hashes:
    """Return XXH64 of 4 bytes each."""
    hashes = seeds + np.uint64((_PRIME_5 + 4) & _MASK)
    _mix_half(hashes, halves)
    return _avalanche(hashes)


def _hash_words(words: npt.NDArray[np.unsignedinteger], seeds: _Hashes) -> _Hashes:
    """Return XXH64 of 8 bytes each."""
    hashes = seeds + np.uint64((_PRIME_5 + 8) & _MASK)
    _mix_word(hashes, words)
    return _avalanche(hashes)


def _hash_strings(data: _Bytes, places: _Places, lengths: _Places, seeds: _Hashes) -> _Hashes:
    """Return XXH64 of each row's bytes, with a loop over the longest row's steps instead of one over the rows."""
    hashes = seeds + np.uint64(_PRIME_5)
    longest = _mix_stripes(hashes, data, places, lengths, seeds)
    hashes += lengths.view(np.uint64)
    at, left = places + (lengths & -32), lengths & 31
    for step in range(3):
        rows = _rows_where(left >= 8 * (step + 1))
        if len(rows):
            _mix_at(_mix_word, hashes, rows, _read(data, at[rows] + 8 * step, 8))
    at, left = at + (left & -8), left & 7
    rows = _rows_where(left >= 4)
    if len(rows):
        _mix_at(_mix_half, hashes, rows, _read(data, at[rows], 4))
    at, left = at + (left & 4), left & 3
    for step in range(3):
        rows = _rows_where(left > step)
        if len(rows):
            _mix_at(_mix_byte, hashes, rows, data[at[rows] + step])
    hashes = _avalanche(hashes)
    for row in longest.tolist():
        hashes[row] = xxh64(data[places[row] : places[row] + lengths[row]].tobytes(), int(seeds[row]))
    return hashes


def _mix_stripes(hashes: _Hashes, data: _Bytes, places: _Places, lengths: _Places, seeds: _Hashes) -> _Places:
    """Mix rows of 32 bytes and more: four lanes through the whole stripes, then one hash of the four.

    Returns:
        A few rows that are longer than all others. Their hash is unfinished; the library has to compute it.
    """
    long = _rows_where(lengths >= 32)
    if len(long) == 0:
        return long
    # Longest first: rows that still have a stripe are then always the first ones, and no step has to gather lanes.
    long = long[np.argsort(-lengths[long])]
    at, stripes, seed = places[long], lengths[long] // 32, seeds[long]
    offsets = (_PRIME_1 + _PRIME_2, _PRIME_2, 0, -_PRIME_1)
    lanes = [seed + np.uint64(offset & _MASK) for offset in offsets]
    step, active = 0, len(long)
    while active >= _VECTOR_ROWS_MIN:
        for number, lane in enumerate(lanes):
            _round_into(lane[:active], _read(data, at[:active] + (32 * step + 8 * number), 8))
        step += 1
        active = int(np.searchsorted(-stripes, -step, side="left"))
    total = np.zeros(len(long), dtype=np.uint64)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        total += _rotated(lane, bits)
    for lane in lanes:
        word = np.zeros_like(lane)
        _round_into(word, lane)
        total ^= word
        total *= np.uint64(_PRIME_1)
        total += np.uint64(_PRIME_4)
    hashes[long] = total
    return long[:active]


def _rows_where(mask: npt.NDArray[np.bool_]) -> _Places:
    rows: _Places = np.flatnonzero(mask)
    return rows


def _read(data: _Bytes, places: _Places, size: int) -> npt.NDArray[np.unsignedinteger]:
    """Return little-endian words of `size` bytes that begin anywhere: a view with a word at every byte."""
    words = np.ndarray((len(data) - size + 1,), dtype=f"<u{size}", buffer=data, strides=(1,))
    return words[places]


def _mix_at(
    mix: Callable[[_Hashes, npt.NDArray[np.unsignedinteger]], None],
    hashes: _Hashes,
    rows: _Places,
    inputs: npt.NDArray[np.unsignedinteger],
) -> None:
    if len(rows) == len(hashes):
        mix(hashes, inputs)
        return
    some = hashes[rows]
    mix(some, inputs)
    hashes[rows] = some


def _mix_word(hashes: _Hashes, words: npt.NDArray[np.unsignedinteger]) -> None:
    rounded = np.zeros_like(hashes)
    _round_into(rounded, words)
    hashes ^= rounded
    _mixed(hashes, 27, _PRIME_1, _PRIME_4)


def _mix_half(hashes: _Hashes, halves: npt.NDArray[np.unsignedinteger]) -> None:
    hashes ^= halves * np.uint64(_PRIME_1)
    _mixed(hashes, 23, _PRIME_2, _PRIME_3)


def _mix_byte(hashes: _Hashes, some_bytes: npt.NDArray[np.unsignedinteger]) -> None:
    hashes ^= some_bytes * np.uint64(_PRIME_5)
    _mixed(hashes, 11, _PRIME_1, 0)


def _round_into(lanes: _Hashes, words: npt.NDArray[np.unsignedinteger]) -> None:
    lanes += words * np.uint64(_PRIME_2)
    _mixed(lanes, 31, _PRIME_1, 0)


def _mixed(hashes: _Hashes, bits: int, factor: int, term: int) -> None:
    """Rotate, multiply and add, in place."""
    np.copyto(hashes, _rotated(hashes, bits))
    hashes *= np.uint64(factor)
    if term:
        hashes += np.uint64(term)


def _rotated(hashes: _Hashes, bits: int) -> _Hashes:
    rotated = hashes << np.uint64(bits)
    rotated |= hashes >> np.uint64(64 - bits)
    return rotated


def _avalanche(hashes: _Hashes) -> _Hashes:
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(_PRIME_2)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(_PRIME_3)
    hashes ^= hashes >> np.uint64(32)
    return hashes
