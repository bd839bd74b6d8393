"""Partial aggregates, a column at a time: reduce rows, merge partial results, finish; pure and vectorised.

A function keeps one or more *slots*, which are value columns of a state. Every function can

- `reduce` the rows of many groups to one partial result each,
- `merge` two equally long columns of partial results (the state's and the epoch's),
- `merge_groups`: merge partial results of many groups to one each (panes of a window, parts of a session),
- `finish`: make the output column.

Some can also `gather` them from rows that Spark aggregated before the shuffle.

Groups are contiguous ranges of rows, so numpy's `reduceat` reduces all groups of a column in one call. Merging is
associative. Functions that depend on the order of rows (`first`, `collect`) keep each value's place in the source with
it (`Groups.order`), so partial results may be merged in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData
from state_runtime.processors.builtin.lists import elements_of, elements_of_both, first_of_each, without_null
from state_runtime.processors.builtin.partial_rows import (
    LOWER_HALF,
    doubles_of_halves,
    longs_of_halves,
    slot_column,
    upper_column,
)
from state_runtime.state.table import Mask, Positions

__all__ = [
    "Chosen",
    "Collected",
    "Combine",
    "Groups",
    "Moments",
    "PartialFunction",
    "Scalar",
    "as_type",
    "order_given",
    "order_of",
    "reduce_column",
]

Combine = Literal["count", "sum", "min", "max"]
Doubles = npt.NDArray[np.float64]
# A row's place: epoch in the high bits, like the places of list elements (state/table.py); 2^28 rows a shard and epoch.
ORDER_BITS = 28


def order_of(epoch: int, sequence: Positions, first: int = 0) -> Positions:
    """Return each row's place among all rows of its key, over all epochs.

    Args:
        epoch: the epoch that read the rows.
        first: place of the first row in that epoch.
    """
    ranks = np.empty(len(sequence), dtype=np.int64)
    ranks[np.argsort(sequence, kind="stable")] = np.arange(len(sequence))
    if first + len(ranks) >= 1 << ORDER_BITS:
        raise InvalidData(f"{first + len(ranks):,} rows of one shard in one epoch; {1 << ORDER_BITS:,} is the limit")
    return ranks + first + (epoch << ORDER_BITS)


def order_given(order: Positions | None, name: str) -> Positions:
    """Return the order of rows for an aggregate function that needs it."""
    if order is None:
        raise InvalidData(f"aggregate {name!r} needs the order of the rows")
    return order


@dataclass(frozen=True)
class Groups:
    """Contiguous groups of rows; no group is empty.

    Attributes:
        starts: position of each group's first row, ascending from 0.
        rows: number of all rows.
    """

    starts: Positions
    rows: int

    @staticmethod
    def of(first: Mask) -> Groups:
        """Make groups from a mask of the rows that begin a group."""
        return Groups(np.flatnonzero(first), len(first))

    @property
    def count(self) -> int:
        return len(self.starts)

    @cached_property
    def sizes(self) -> Positions:
        return np.diff(self.starts, append=self.rows)

    @cached_property
    def group_of_row(self) -> Positions:
        return np.repeat(np.arange(self.count, dtype=np.int64), self.sizes)

    @property
    def all_single(self) -> bool:
        """Whether every group is one row."""
        return self.count == self.rows


class PartialFunction(Protocol):
    """An aggregate function over partial results.

    Attributes:
        slots: its columns in the state.
        columns: of the input; none for counting rows.
        output: type of the result.
        ordered: whether `reduce` uses `order`.
    """

    @property
    def slots(self) -> tuple[pa.Field, ...]: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def output(self) -> pa.DataType: ...

    @property
    def ordered(self) -> bool: ...

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        """Return partial results of rows, one per group."""
        ...

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merge two partial results per row; all of `old` is null where the state has no row."""
        ...

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Merge many partial results per group."""
        ...

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        """Return the result."""
        ...


# --- count, sum, min, max, avg -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """Slots that are each a count, sum, minimum or maximum of the column; `avg` divides the first by the second."""

    slots: tuple[pa.Field, ...]
    combines: tuple[Combine, ...]
    column: str | None
    output: pa.DataType
    divide: bool
    uid: str

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @property
    def ordered(self) -> bool:
        return False

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        values = None if self.column is None else rows.column(self.column)
        return [reduce_column(c, f.type, values, groups, self.uid) for f, c in zip(self.slots, self.combines)]

    def gather(self, rows: pa.RecordBatch, groups: Groups, first_slot: int) -> list[pa.Array]:
        """Do the same as `reduce` for partial rows (processors/builtin/partial_rows.py).

        Args:
            first_slot: number of the function's first slot among those of the operator.
        """
        return [
            self._gather_slot(how, slot.type, rows, groups, number)
            for number, (slot, how) in enumerate(zip(self.slots, self.combines), first_slot)
        ]

    def _gather_slot(
        self, how: Combine, data_type: pa.DataType, rows: pa.RecordBatch, groups: Groups, number: int
    ) -> pa.Array:
        values = rows.column(slot_column(number))
        if rows.schema.get_field_index(upper_column(number)) < 0:
            # Counts of parts add up.
            return reduce_column("sum" if how == "count" else how, data_type, values, groups, self.uid)
        upper, lower = (
            np.add.reduceat(_zeros_for_nulls(column), groups.starts)
            for column in (rows.column(upper_column(number)), values)
        )
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        nothing = np.add.reduceat(valid.astype(np.int64), groups.starts) == 0
        if pa.types.is_floating(data_type):
            return pa.array(doubles_of_halves(upper, lower), mask=nothing)
        longs = longs_of_halves(upper, lower)
        if longs is None:
            raise _overflow(self.uid)
        return pa.array(longs, mask=nothing)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return [_combine(c, o, n, self.uid) for c, o, n in zip(self.combines, old, new)]

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        if groups.all_single:
            return list(slots)
        return [
            # Counts of parts add up.
            reduce_column("sum" if c == "count" else c, f.type, s, groups, self.uid)
            for f, c, s in zip(self.slots, self.combines, slots)
        ]

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        if self.combines == ("count",):
            return pc.fill_null(slots[0], 0)  # null in rows that were stored before this count was added
        if not self.divide:
            return slots[0]
        return pc.divide(slots[0], pc.if_else(pc.equal(slots[1], 0), None, slots[1]).cast(pa.float64()))


def reduce_column(how: Combine, data_type: pa.DataType, values: pa.Array | None, groups: Groups, uid: str) -> pa.Array:
    """Reduce one column over groups; `values` is None for counting rows.

    Returns:
        One value per group; null where a group has only nulls (count: 0).
    """
    if values is None:
        return pa.array(groups.sizes)
    valid = None if values.null_count == 0 else values.is_valid().to_numpy(zero_copy_only=False)
    counts = groups.sizes if valid is None else np.add.reduceat(valid.astype(np.int64), groups.starts)
    if how == "count":
        return pa.array(counts)
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return _reduce_in_arrow(how, data_type, groups, values, uid)
    plain = values if valid is None else pc.fill_null(values, 0)
    if how == "sum" and pa.types.is_floating(data_type) and pa.types.is_integer(values.type):
        doubles = _sum_of_integers_as_doubles(_zeros_for_nulls(plain), groups)
        return pa.array(doubles, mask=None if valid is None else counts == 0)
    numbers = plain.cast(data_type).to_numpy(zero_copy_only=False)
    if how == "sum":
        reduced = np.add.reduceat(numbers, groups.starts)
        if pa.types.is_integer(data_type):
            _check_overflow(numbers, groups, reduced, uid)
    else:
        if valid is not None:
            numbers = np.where(valid, numbers, _neutral(how, numbers.dtype))
        # Spark orders NaN above every number: a maximum keeps NaN, a minimum skips it.
        ufunc = np.maximum if how == "max" else (np.fmin if numbers.dtype.kind == "f" else np.minimum)
        reduced = ufunc.reduceat(numbers, groups.starts)
        if how == "min" and valid is not None and numbers.dtype.kind == "f":
            reduced = _nan_where_only_nan(reduced, values, groups, counts)
    return pa.array(reduced, type=data_type, mask=None if valid is None else counts == 0)


def _sum_of_integers_as_doubles(numbers: Positions, groups: Groups) -> Doubles:
    """Return exact sums, rounded once: so the result does not depend on which rows were added up before the shuffle,
    nor on their order."""
    if _fit_a_long(numbers, groups):
        return np.add.reduceat(numbers, groups.starts).astype(np.float64)
    upper = np.add.reduceat(numbers >> 32, groups.starts)
    return doubles_of_halves(upper, np.add.reduceat(numbers & LOWER_HALF, groups.starts))


def _fit_a_long(numbers: Any, groups: Groups) -> bool:
    """Return whether no sum of a group's integers can leave the range of long."""
    largest = max(int(numbers.max(initial=0)), -int(numbers.min(initial=0)))
    return largest * int(groups.sizes.max(initial=0)) < 1 << 63


def _zeros_for_nulls(column: pa.Array) -> Positions:
    longs: Positions = pc.fill_null(column, 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return longs


def _nan_where_only_nan(reduced: Any, values: pa.Array, groups: Groups, counts: Any) -> Any:
    """Correct groups with nulls and NaN only: infinity, which replaces null, must not win over NaN."""
    nan = pc.fill_null(pc.is_nan(values), False).to_numpy(zero_copy_only=False)
    only_nan = np.add.reduceat(nan.astype(np.int64), groups.starts) == counts
    return np.where(only_nan & (counts > 0), np.nan, reduced)


def _neutral(how: Combine, dtype: Any) -> Any:
    if dtype.kind == "f":
        return -np.inf if how == "max" else np.inf
    return np.iinfo(dtype).min if how == "max" else np.iinfo(dtype).max


def _check_overflow(numbers: Any, groups: Groups, reduced: Any, uid: str) -> None:
    """Raise an error if a sum of int64 has wrapped, which numpy does silently. The check by a float sum is skipped if
    no sum can wrap."""
    if _fit_a_long(numbers, groups):
        return
    rough = np.add.reduceat(numbers.astype(np.float64), groups.starts)
    if bool(np.any(np.abs(rough - reduced.astype(np.float64)) > 1e18)):
        raise _overflow(uid)


def _overflow(uid: str) -> InvalidData:
    return InvalidData(
        f"operator {uid!r}: a sum leaves the range of long or of 38 digits (Spark's ARITHMETIC_OVERFLOW). Sum a double"
    )


def _reduce_in_arrow(how: Combine, data_type: pa.DataType, groups: Groups, values: pa.Array, uid: str) -> pa.Array:
    """Reduce strings, dates, timestamps, decimals, … with Arrow's hash aggregation over the group number."""
    if how == "sum":
        # Arrow's decimals wrap around at 38 digits; twice the width holds any sum, and the cast back is checked.
        values = values.cast(pa.decimal256(76, data_type.scale))
    table = pa.table({"group": groups.group_of_row, "value": values})
    # One thread keeps the groups in order of appearance, which is ascending.
    reduced = table.group_by("group", use_threads=False).aggregate([("value", how)]).column(f"value_{how}")
    array = _one_array(reduced)
    try:
        return array.cast(data_type)
    except pa.ArrowInvalid as error:
        raise _overflow(uid) from error


def as_type(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Cast to the state's type: Spark delivers timestamps in the session's time zone, stored ones are in UTC."""
    return column if column.type == data_type else column.cast(data_type)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)


def _combine(how: Combine, old: pa.Array, new: pa.Array, uid: str) -> pa.Array:
    """Combine the state's value and the epoch's, one per key; if one side is null, the other is taken."""
    if how in ("count", "sum"):
        try:
            if pa.types.is_decimal(new.type):
                wide = pa.decimal256(40, new.type.scale)
                both = pc.add(old.cast(wide), new.cast(wide)).cast(new.type)
            else:
                both = pc.add_checked(old, new)
        except pa.ArrowInvalid as error:
            raise _overflow(uid) from error
    elif pa.types.is_floating(new.type):
        greater = pc.or_(pc.greater(old, new), pc.is_nan(old))
        smaller = pc.or_(pc.less(old, new), pc.is_nan(new))
        both = pc.if_else(greater if how == "max" else smaller, old, new)
    else:
        both = pc.if_else((pc.greater if how == "max" else pc.less)(old, new), old, new)
    if old.null_count == 0 and new.null_count == 0:
        return both
    return pc.coalesce(both, old, new)


# --- variance and standard deviation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Central moments: count, mean and sum of squared distances from it (Spark's `CentralMomentAgg`).

    Attributes:
        sample: divide by n - 1, not n.
        root: the standard deviation.
    """

    name: str
    column: str
    sample: bool
    root: bool

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        doubles = (pa.field(f"{self.name}.{part}", pa.float64()) for part in ("mean", "m2"))
        return (pa.field(f"{self.name}.count", pa.int64()), *doubles)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output(self) -> pa.DataType:
        return pa.float64()

    @property
    def ordered(self) -> bool:
        return False

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        column = rows.column(self.column)
        counts = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        values = pc.fill_null(column, 0).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return self._arrays(*_moments(counts, values, np.zeros(len(values)), groups))

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        count, mean, m2 = self._numbers(old)
        more, other_mean, other_m2 = self._numbers(new)
        both = count + more
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.where((count > 0) & (more > 0), other_mean - mean, 0.0)
            part = distance * (more / np.maximum(both, 1))
            merged = np.where(count > 0, mean + part, other_mean)
            return self._arrays(both, merged, m2 + other_m2 + distance * part * count)

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._arrays(*_moments(*self._numbers(slots), groups))

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        count, _, m2 = self._numbers(slots)
        divisor = count - 1 if self.sample else count
        with np.errstate(invalid="ignore"):
            result = m2 / np.maximum(divisor, 1)
            result = np.sqrt(result) if self.root else result
        return pa.array(result, mask=divisor < 1)

    @staticmethod
    def _arrays(count: Positions, mean: Doubles, m2: Doubles) -> list[pa.Array]:
        return [pa.array(count), pa.array(mean), pa.array(m2)]

    @staticmethod
    def _numbers(slots: Sequence[pa.Array]) -> tuple[Positions, Doubles, Doubles]:
        count, mean, m2 = (pc.fill_null(s, 0).to_numpy(zero_copy_only=False) for s in slots)
        return count, mean, m2


def _moments(counts: Positions, means: Doubles, m2s: Doubles, groups: Groups) -> tuple[Positions, Doubles, Doubles]:
    """Compute in two passes, mean first: squares of distances lose no digits, however large the values are."""
    total = np.add.reduceat(counts, groups.starts)
    with np.errstate(invalid="ignore", over="ignore"):
        weighted = np.where(counts > 0, counts * means, 0.0)
        mean = np.add.reduceat(weighted, groups.starts) / np.maximum(total, 1)
        distance = np.where(counts > 0, means - mean[groups.group_of_row], 0.0)
        m2 = np.add.reduceat(m2s + counts * distance * distance, groups.starts)
    return total, mean, m2


# --- first and last ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """The first or last value by source order; `<name>.at` is its place, null if no row was seen yet."""

    name: str
    column: str
    output: pa.DataType
    latest: bool
    ignore_nulls: bool

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, self.output), pa.field(f"{self.name}.at", pa.int64()))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def ordered(self) -> bool:
        return True

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        values = as_type(rows.column(self.column), self.output)
        there = np.ones(len(values), dtype=np.bool_)
        if self.ignore_nulls and values.null_count:
            there = values.is_valid().to_numpy(zero_copy_only=False)
        return self._choose(values, np.where(there, order_given(order, self.name), self._nothing), groups)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        before, after = (self._places(slots[1]) for slots in (old, new))
        keep = pa.array(before > after if self.latest else before < after)
        return [pc.if_else(keep, o, n) for o, n in zip(old, new)]

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._choose(slots[0], self._places(slots[1]), groups)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        return slots[0]

    @property
    def _nothing(self) -> int:
        return -1 if self.latest else np.iinfo(np.int64).max

    def _places(self, at: pa.Array) -> Positions:
        places: Positions = pc.fill_null(at, self._nothing).to_numpy(zero_copy_only=False)
        return places

    def _choose(self, values: pa.Array, places: Positions, groups: Groups) -> list[pa.Array]:
        best = (np.maximum if self.latest else np.minimum).reduceat(places, groups.starts)
        # Places differ, except those of missing rows: any of these will do, so the first is taken.
        hits = np.flatnonzero(places == best[groups.group_of_row])
        first = np.searchsorted(hits, groups.starts)
        none = best == self._nothing
        picked = pa.array(hits[first], mask=none)
        return [values.take(picked), pa.array(best, mask=none)]


# --- collect -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """The first `limit` non-null values in source order; `<name>.at` has their places."""

    name: str
    column: str
    element: pa.DataType
    limit: int

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        return (
            pa.field(self.name, self.output),
            pa.field(f"{self.name}.at", pa.list_(pa.field("element", pa.int64()))),
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output(self) -> pa.DataType:
        return pa.list_(pa.field("element", self.element))

    @property
    def ordered(self) -> bool:
        return True

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        values = as_type(rows.column(self.column), self.element)
        there = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        kept = values.take(pa.array(there)) if values.null_count else values
        return self._lists(
            [kept, pa.array(order_given(order, self.name)[there])], groups.group_of_row[there], groups.count
        )

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return self._lists(*elements_of_both(old, new), len(new[0]))

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._lists(*elements_of(slots, groups.group_of_row), groups.count)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        return without_null(slots[0])

    def _lists(self, columns: Sequence[pa.Array], group: Positions, count: int) -> list[pa.Array]:
        places = columns[1].to_numpy(zero_copy_only=False)
        return first_of_each(columns, [places], group, count=count, limit=self.limit, fields=self.slots)
