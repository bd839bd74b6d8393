"""Approximate distinct counts: Spark's HyperLogLog++ (`approx_count_distinct`), many sketches at once; pure.

The sketch of a group has 2^p registers. A value's 64-bit hash (xxhash64, seed 42) names a register by its first p bits.
The register keeps the highest rank: the position of the first 1 among the other bits. Registers are kept sparsely: a
sketch is the ascending list of the codes `register << 6 | rank` of the registers that are not 0. So a key with few
values takes few bytes, and merging is sorting: the last code of each register is the highest.

The estimate is Spark's, step by step: the raw estimate, corrected by the measured bias (its six nearest neighbours in
the tables of the HyperLogLog++ paper), and linear counting if few registers are filled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.processors.builtin.partials import Groups
from state_runtime.state.keyhash import hash_rows
from state_runtime.state.table import Positions

__all__ = ["RANK_BITS", "Distinct", "registers_log2"]

Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger[Any]]
RANK_BITS = 6
_RANK_MASK = (1 << RANK_BITS) - 1
_POWERS = np.exp2(-np.arange(1 << RANK_BITS, dtype=np.float32))  # each is exact
_NEIGHBOURS = 6
# For 2^4 to 2^14 registers: up to this estimate linear counting is better. The last number is Spark's, not the
# paper's (11,500).
_LINEAR_COUNTING_MAX = (10.0, 20.0, 40.0, 80.0, 220.0, 400.0, 900.0, 1800.0, 3100.0, 6500.0, 15500.0)
_BELOW_MANTISSA = 64 - 53


def registers_log2(rsd: float) -> int:
    """Return the logarithm of the number of registers for a relative standard deviation, as Spark computes it."""
    return max(4, math.ceil(2.0 * math.log(1.106 / rsd) / math.log(2.0)))


@dataclass(frozen=True)
class Distinct:
    """The function; `p` is the logarithm of the number of registers."""

    name: str
    column: str
    p: int

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, pa.list_(pa.field("element", self._code_type))),)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output(self) -> pa.DataType:
        return pa.int64()

    @property
    def ordered(self) -> bool:
        return False

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        values = rows.column(self.column)
        group = groups.group_of_row
        if values.null_count:
            there = values.is_valid()
            values, group = values.filter(there), group[there.to_numpy(zero_copy_only=False)]
        hashes = hash_rows([values])
        register = (hashes >> np.uint64(64 - self.p)).astype(np.int64)
        # A 1 after the last bit ends the search if all other bits are 0.
        rest = (hashes << np.uint64(self.p)) | np.uint64(1 << (self.p - 1))
        codes = (register << RANK_BITS | (_leading_zeros(rest) + 1)).astype(np.int32)
        packed = self._packed(codes, group, groups.count)
        packed.sort()
        return self._sketches(packed, groups.count)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        held, sizes = _codes_of(old[0])
        came, new_sizes = _codes_of(new[0])
        if len(held) == 0:
            return list(new)
        # An epoch has few values of a key compared with its sketch: each is searched for, nothing is sorted.
        group = np.arange(len(sizes))
        packed, wanted = (self._packed_lists(*codes, group, len(sizes)) for codes in ((held, sizes), (came, new_sizes)))
        at = np.searchsorted(packed, wanted & ~_RANK_MASK)
        there = packed[np.minimum(at, len(packed) - 1)]
        is_held = (at < len(packed)) & (there >> RANK_BITS == wanted >> RANK_BITS)
        higher = is_held & (wanted > there)
        merged = held.copy()
        merged[at[higher]] = came[higher]
        added = ~is_held
        merged = np.insert(merged, at[added], came[added])
        sizes = sizes + np.bincount(np.repeat(group, new_sizes)[added], minlength=len(sizes))
        return self._lists(merged, np.concatenate([[0], np.cumsum(sizes)]))

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        if groups.all_single:
            return list(slots)
        packed = self._packed_lists(*_codes_of(slots[0]), groups.group_of_row, groups.count)
        packed.sort()
        return self._sketches(packed, groups.count)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        """Return the estimates, rounded half up as Java's `Math.round`."""
        sketches = slots[0]
        codes, sizes = _codes_of(sketches)
        empty = (1 << self.p) - sizes
        # The sum of 2^-rank over all registers; empty ones have rank 0.
        inverse = empty.astype(np.float64)
        filled = np.flatnonzero(sizes)
        if len(filled):
            powers = _POWERS.take(codes & _RANK_MASK, mode="clip")  # skips the bounds check of each index
            inverse[filled] += np.add.reduceat(powers, (np.cumsum(sizes) - sizes)[filled], dtype=np.float64)
        return pa.array(np.floor(_estimate(self.p, inverse, empty) + 0.5).astype(np.int64))

    @property
    def _code_type(self) -> pa.DataType:
        return pa.int16() if self.p + RANK_BITS <= 15 else pa.int32()

    def _packed(self, codes: Integers, group: Positions, count: int) -> Integers:
        """Pack group and code into one number of the same order: of 32 bits, which are sorted twice as fast, if they
        are enough."""
        packed: Integers = self._in_front(group, count) | codes
        return packed

    def _packed_lists(self, codes: Integers, sizes: Positions, group_of_list: Positions, count: int) -> Integers:
        """Pack the codes of sketches, which are concatenated, in the same way."""
        packed = np.repeat(self._in_front(group_of_list, count), sizes)
        packed |= codes
        return packed

    def _in_front(self, group: Positions, count: int) -> Integers:
        bits = self.p + RANK_BITS
        in_front: Integers = (group << bits).astype(np.int32 if count << bits < 1 << 31 else np.int64)
        return in_front

    def _sketches(self, packed: Integers, count: int) -> list[pa.Array]:
        """Make one sketch per group from sorted numbers, each a group and a code."""
        bits = self.p + RANK_BITS
        register = packed >> RANK_BITS
        highest = np.ones(len(packed), dtype=np.bool_)
        highest[:-1] = register[:-1] != register[1:]
        packed = packed[highest]
        offsets = np.searchsorted(packed, np.arange(count + 1, dtype=np.int64) << bits)
        kept = (packed & ((1 << bits) - 1)).astype(self._code_type.to_pandas_dtype())
        return self._lists(kept, offsets)

    def _lists(self, codes: Integers, offsets: Positions) -> list[pa.Array]:
        return [pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), pa.array(codes), type=self.slots[0].type)]


def _codes_of(sketches: pa.Array) -> tuple[Integers, Positions]:
    """Return the concatenated codes of sketches, and the number of codes of each: 0 for a missing sketch."""
    sizes = pc.fill_null(pc.list_value_length(sketches), 0).to_numpy(zero_copy_only=False)
    return pc.list_flatten(sketches).to_numpy(zero_copy_only=False), sizes.astype(np.int64)


def _leading_zeros(numbers: npt.NDArray[np.uint64]) -> Positions:
    """Count the leading zeros of 64-bit numbers other than 0."""
    upper = numbers >> np.uint64(_BELOW_MANTISSA)
    # A double holds 53 bits exactly, so no number is rounded up to the next power of two.
    _, bits = np.frexp(np.where(upper > 0, upper, numbers).astype(np.float64))
    return np.where(upper > 0, 64 - _BELOW_MANTISSA, 64) - bits


def _estimate(p: int, inverse: Doubles, empty: Positions) -> Doubles:
    registers = float(1 << p)
    alpha = {4: 0.673, 5: 0.697, 6: 0.709}.get(p, 0.7213 / (1.0 + 1.079 / registers))
    raw = alpha * registers * registers / inverse
    corrected = np.where(raw < 5.0 * registers, raw - _bias(p, raw), raw)
    linear = registers * np.log(registers / np.maximum(empty, 1))
    use_linear = (empty > 0) & ((linear <= _LINEAR_COUNTING_MAX[p - 4]) | (raw <= 2.5 * registers))
    estimate: Doubles = np.where(use_linear, linear, corrected)
    return estimate


@cache
def _measured(p: int) -> tuple[Doubles, Doubles]:
    """Return the measured estimates of sketches with 2^p registers, and their biases."""
    tables = json.loads(files("state_runtime.processors.builtin").joinpath("hyperloglog.json").read_bytes())
    return np.array(tables["raw_estimate"][p - 4]), np.array(tables["bias"][p - 4])


def _bias(p: int, raw: Doubles) -> Doubles:
    """Return the mean bias of the six measured estimates around `raw`, chosen as Spark does."""
    estimates, bias = _measured(p)
    count = len(estimates)
    low = np.maximum(_binary_search(estimates, raw) - _NEIGHBOURS + 1, 0)
    high = np.minimum(low + _NEIGHBOURS, count)
    while True:
        further = np.square(raw - estimates[np.minimum(high, count - 1)])
        move = (high < count) & (further < np.square(raw - estimates[low]))
        if not bool(move.any()):
            break
        low, high = low + move, high + move
    total = np.zeros(len(raw))
    for step in range(_NEIGHBOURS):
        total += np.where(low + step < high, bias[np.minimum(low + step, count - 1)], 0.0)
    mean: Doubles = total / (high - low)
    return mean


def _binary_search(estimates: Doubles, wanted: Doubles) -> Positions:
    """Search as Java's `Arrays.binarySearch`: the estimates are not quite sorted, so the probe order matters."""
    low = np.zeros(len(wanted), dtype=np.int64)
    high = np.full(len(wanted), len(estimates) - 1, dtype=np.int64)
    while bool((low <= high).any()):
        middle = np.clip((low + high) >> 1, 0, len(estimates) - 1)
        going = low <= high
        found = estimates[middle]
        hit = going & (found == wanted)
        low = np.where(hit, middle, np.where(going & (found < wanted), middle + 1, low))
        high = np.where(hit, middle - 1, np.where(going & (found > wanted), middle - 1, high))
    return low
