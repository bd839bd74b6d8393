"""Spark's `xxhash64` of one key, in Python: finds a key's place in the state without a Spark session; pure.

The hash of a key is a chain: each column's XXH64 takes the hash before it as its seed, the first one takes 42, and a null
leaves the hash as it is. What is hashed of a value, little-endian where it is a number:

    boolean                           4 bytes, 1 or 0
    tinyint, smallint, int, date      4 bytes, signed
    bigint, timestamp, timestamp_ntz  8 bytes, signed; times in microseconds
    float, double                     4 or 8 bytes of IEEE 754; -0.0 as 0.0, every NaN as the canonical one
    decimal up to 18 digits           8 bytes, the unscaled number
    decimal of more digits            the unscaled number as Java's BigInteger writes it: big-endian, no byte too many
    string, binary                    the bytes (UTF-8)

Spark has a function of its own for 4 and for 8 bytes; both equal XXH64 of those bytes, so one function is here. It is
for one key at a time: about 10 µs a column.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Decimal

import pyarrow as pa

from state_runtime.errors import InvalidData, check

__all__ = ["SEED", "hash_key", "xxh64"]

SEED = 42  # of Spark's SQL function xxhash64

_MASK = (1 << 64) - 1
_PRIME_1 = 0x9E3779B185EBCA87
_PRIME_2 = 0xC2B2AE3D27D4EB4F
_PRIME_3 = 0x165667B19E3779F9
_PRIME_4 = 0x85EBCA77C2B2AE63
_PRIME_5 = 0x27D4EB2F165667C5
_LONG_DIGITS = 18  # a decimal of up to so many digits fits a long


def hash_key(columns: Sequence[pa.Array]) -> int:
    """The unsigned `key_hash` of one key.

    Args:
        columns: the key columns in the operator's order, one row each, with the types that the state stores.

    Raises:
        InvalidData: a column's type is none that a key can have.
    """
    hashed = SEED
    for column in columns:
        check(len(column) == 1, f"a key column of {len(column)} rows")
        if column.null_count == 0:
            hashed = xxh64(_bytes_of(column), hashed)
    return hashed


def xxh64(data: bytes, seed: int) -> int:
    """XXH64 of some bytes, unsigned."""
    length = len(data)
    at = 0
    if length >= 32:
        lanes = [seed + _PRIME_1 + _PRIME_2, seed + _PRIME_2, seed, seed - _PRIME_1]
        while at <= length - 32:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        rotated = zip(lanes, (1, 7, 12, 18), strict=True)
        hashed = sum(_rotate(lane, bits) for lane, bits in rotated) & _MASK
        for lane in lanes:
            hashed = ((hashed ^ _round(0, lane)) * _PRIME_1 + _PRIME_4) & _MASK
    else:
        hashed = (seed + _PRIME_5) & _MASK
    hashed = (hashed + length) & _MASK
    while at + 8 <= length:
        (word,) = struct.unpack_from("<Q", data, at)
        hashed = (_rotate(hashed ^ _round(0, word), 27) * _PRIME_1 + _PRIME_4) & _MASK
        at += 8
    if at + 4 <= length:
        (half,) = struct.unpack_from("<I", data, at)
        hashed = (_rotate(hashed ^ (half * _PRIME_1 & _MASK), 23) * _PRIME_2 + _PRIME_3) & _MASK
        at += 4
    for byte in data[at:]:
        hashed = _rotate(hashed ^ (byte * _PRIME_5 & _MASK), 11) * _PRIME_1 & _MASK
    hashed = (hashed ^ hashed >> 33) * _PRIME_2 & _MASK
    hashed = (hashed ^ hashed >> 29) * _PRIME_3 & _MASK
    return hashed ^ hashed >> 32


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _PRIME_2) & _MASK, 31) * _PRIME_1 & _MASK


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _bytes_of(column: pa.Array) -> bytes:
    kind = column.type
    if pa.types.is_boolean(kind):
        return int(column[0].as_py()).to_bytes(4, "little")
    if pa.types.is_signed_integer(kind):
        return _integer(column[0].as_py(), 8 if kind.bit_width == 64 else 4)
    if pa.types.is_date32(kind):
        return _integer(column.cast(pa.int32())[0].as_py(), 4)
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return _integer(column.cast(pa.int64())[0].as_py(), 8)
    if pa.types.is_float32(kind):
        return _floating(column[0].as_py(), "<f")
    if pa.types.is_float64(kind):
        return _floating(column[0].as_py(), "<d")
    if pa.types.is_decimal128(kind):
        unscaled = _unscaled(column[0].as_py(), kind.scale)
        if kind.precision <= _LONG_DIGITS:
            return _integer(unscaled, 8)
        bits = (unscaled if unscaled >= 0 else ~unscaled).bit_length()
        return unscaled.to_bytes(bits // 8 + 1, "big", signed=True)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return bytes(column[0].as_py().encode())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return bytes(column[0].as_py())
    raise InvalidData(f"a key column of type {kind} has no hash; keys are booleans, numbers, strings, binary and times")


def _integer(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little", signed=True)


def _floating(value: float, layout: str) -> bytes:
    # Adding 0.0 makes 0.0 of -0.0; Java's floatToIntBits and doubleToLongBits know one NaN only: Python's own.
    return struct.pack(layout, float("nan") if value != value else value + 0.0)


def _unscaled(value: Decimal, scale: int) -> int:
    # By digits: arithmetic on Decimal would round to the context's 28.
    sign, digits, exponent = value.as_tuple()
    check(isinstance(exponent, int), "a decimal column holds a number")
    number = int("".join(map(str, digits)) or "0") * int(10 ** (int(exponent) + scale))
    return -number if sign else number
