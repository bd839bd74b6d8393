"""Partial aggregates over many overlapping ranges of rows: panes into sliding windows; pure and vectorised.

Numbers are not added up range by range. Counts and sums of integers are differences of running totals; minima and
maxima of a range are those of two stretches of 2^k rows that cover it; sums of floats combine such stretches, one per
bit of the range's length, because a difference of running totals would lose digits. So a range costs the logarithm of
its length. All other slots (strings, decimals, first and last, collections, …) are merged row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData
from state_runtime.processors.builtin.aggregate import AggregatePlan
from state_runtime.processors.builtin.partials import Combine, Groups, PartialFunction, Scalar
from state_runtime.state.table import Positions

__all__ = ["reduce_ranges"]

# Pairs of a range and a row that are merged at a time.
_PAIRS_MAX = 1 << 20

Ranges = Callable[[Positions, Positions], list[pa.Array]]


def reduce_ranges(plan: AggregatePlan, slots: Sequence[pa.Array]) -> Callable[[Positions, Positions], list[pa.Array]]:
    """Return a function from ranges (first row, row after the last; not empty) to one row of slots per range."""
    parts = [
        _numbers(function, part) if _is_numeric(function) else _rows(function, part)
        for function, part in plan.split(slots)
    ]
    return lambda low, high: [slot for part in parts for slot in part(low, high)]


def _is_numeric(function: PartialFunction) -> bool:
    return isinstance(function, Scalar) and all(
        pa.types.is_integer(slot.type) or pa.types.is_floating(slot.type) for slot in function.slots
    )


def _numbers(function: PartialFunction, slots: Sequence[pa.Array]) -> Ranges:
    assert isinstance(function, Scalar)
    columns = [
        _Column.of("sum" if combine == "count" else combine, values, function.uid)
        for combine, values in zip(function.combines, slots)
    ]
    return lambda low, high: [column.reduce(low, high) for column in columns]


def _rows(function: PartialFunction, slots: Sequence[pa.Array]) -> Ranges:
    def merged(low: Positions, high: Positions) -> list[pa.Array]:
        pieces = [
            function.merge_groups([slot.take(pa.array(rows)) for slot in slots], groups)
            for rows, groups in _pairs(low, high)
        ]
        return [pa.concat_arrays(columns) for columns in zip(*pieces)]

    return merged


def _pairs(low: Positions, high: Positions) -> Iterator[tuple[Positions, Groups]]:
    """Yield the rows of the ranges one after the other, about `_PAIRS_MAX` at a time."""
    stops = np.cumsum(high - low)
    at = 0
    while at < len(low):
        before = int(stops[at - 1]) if at else 0
        to = max(at + 1, int(np.searchsorted(stops, before + _PAIRS_MAX, side="right")))
        sizes = (high - low)[at:to]
        starts = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        yield np.repeat(low[at:to] - starts, sizes) + np.arange(total), Groups(starts, total)
        at = to


@dataclass(frozen=True)
class _Column:
    """A column of numbers without its nulls; `valid` counts the values before each row, None if there are no nulls."""

    combine: Combine
    type: pa.DataType
    numbers: Any
    valid: Positions | None
    uid: str

    @staticmethod
    def of(combine: Combine, values: pa.Array, uid: str) -> _Column:
        floating = pa.types.is_floating(values.type)
        valid = None
        if values.null_count:
            there = values.is_valid().to_numpy(zero_copy_only=False)
            valid = np.concatenate(([0], np.cumsum(there)))
            if combine == "sum":
                neutral: Any = 0
            elif floating:
                # Spark orders NaN above every number, so a minimum starts from NaN, which fmin skips.
                neutral = -np.inf if combine == "max" else np.nan
            else:
                limits = np.iinfo(values.type.to_pandas_dtype())
                neutral = limits.min if combine == "max" else limits.max
            values = pc.fill_null(values, pa.scalar(neutral, type=values.type))
        return _Column(combine, values.type, values.to_numpy(zero_copy_only=False), valid, uid)

    def reduce(self, low: Positions, high: Positions) -> pa.Array:
        with np.errstate(invalid="ignore", over="ignore"):
            if self.combine != "sum":
                reduced = self._extreme(low, high)
            elif self.numbers.dtype.kind == "f":
                reduced = self._sum(low, high)
            else:
                reduced = self._total(low, high)
        mask = None if self.valid is None else self.valid[high] == self.valid[low]
        return pa.array(reduced, type=self.type, mask=mask)

    def _total(self, low: Positions, high: Positions) -> Any:
        """Subtract running totals. They may wrap around; the result is right if it fits a long, which is checked."""
        totals = np.concatenate(([0], np.cumsum(self.numbers, dtype=np.int64)))
        result = totals[high] - totals[low]
        rows = int((high - low).max(initial=1))
        if max(abs(int(self.numbers.min(initial=0))), abs(int(self.numbers.max(initial=0)))) * rows >= 1 << 63:
            rough = self._doubling(self.numbers.astype(np.float64), low, high)
            if bool(np.any(np.abs(rough - result.astype(np.float64)) > 1e18)):
                raise InvalidData(
                    f"operator {self.uid!r}: the sum of a window leaves the range of long (Spark's "
                    "ARITHMETIC_OVERFLOW). Sum a double"
                )
        return result

    def _sum(self, low: Positions, high: Positions) -> Any:
        return self._doubling(self.numbers, low, high)

    @staticmethod
    def _doubling(stretch: Any, low: Positions, high: Positions) -> Any:
        """Return sums of ranges; `stretch[i]` is the sum of the 2^level rows from i on."""
        at, lengths = low.copy(), high - low
        result = np.zeros(len(low))
        width = 1
        while True:
            taken = np.flatnonzero(lengths & width)
            result[taken] += stretch[at[taken]]
            at[taken] += width
            width *= 2
            if width > int(lengths.max(initial=0)):
                return result
            stretch = stretch[: -width // 2] + stretch[width // 2 :]

    def _extreme(self, low: Positions, high: Positions) -> Any:
        if self.combine == "max":
            ufunc: Any = np.maximum
        else:
            ufunc = np.fmin if self.numbers.dtype.kind == "f" else np.minimum
        lengths = high - low
        result = np.empty(len(low), dtype=self.numbers.dtype)
        stretch, width = self.numbers, 1
        while True:
            taken = np.flatnonzero((lengths >= width) & (lengths < 2 * width))
            result[taken] = ufunc(stretch[low[taken]], stretch[high[taken] - width])
            if 2 * width > int(lengths.max(initial=0)):
                return result
            stretch = ufunc(stretch[:-width], stretch[width:])
            width *= 2
