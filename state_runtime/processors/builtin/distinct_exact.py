"""Exact distinct counts (`COUNT(DISTINCT x)`) and sets of values (`collect_set(x)`): per group the set of its values,
many sets at once; pure.

A set is a sorted list in the state, not a table with a row per value: so it is looked up with the other aggregates of
its key, and panes of a window and parts of a session are merged as for any aggregate. In return, an epoch writes the
whole list of each key that it touches, so there is a limit. For more values use a table: `deduplicate` by key and
value, followed by a count, writes each value once (docs/guide.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData
from state_runtime.processors.builtin.lists import without_null
from state_runtime.processors.builtin.partials import Groups, as_type
from state_runtime.processors.builtin.ranks import ranks_of
from state_runtime.processors.declared.aggregates import DISTINCT_LIMIT_MAX
from state_runtime.state.table import Positions

__all__ = ["DistinctValues"]


@dataclass(frozen=True)
class DistinctValues:
    """The number of different values without null, or these values in ascending order. As in Spark, NaN equals NaN, and
    -0.0 equals 0.0.

    Attributes:
        limit: a group with more values than this ends the run.
        counts: it gives the number.
    """

    name: str
    column: str
    element: pa.DataType
    limit: int
    uid: str
    counts: bool

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, self._sets_type),)

    @property
    def _sets_type(self) -> pa.DataType:
        return pa.list_(pa.field("element", self.element))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output(self) -> pa.DataType:
        return pa.int64() if self.counts else self._sets_type

    @property
    def ordered(self) -> bool:
        return False

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        values, group = as_type(rows.column(self.column), self.element), groups.group_of_row
        if values.null_count:
            there = values.is_valid()
            values, group = values.filter(there), group[there.to_numpy(zero_copy_only=False)]
        return self._sets(values, group, groups.count)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        both = pa.concat_arrays([old[0], new[0]])
        return self._regroup(both, np.tile(np.arange(len(new[0])), 2), len(new[0]))

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._regroup(slots[0], groups.group_of_row, groups.count)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        if self.counts:
            return pc.fill_null(pc.list_value_length(slots[0]), 0).cast(pa.int64())
        return without_null(slots[0])

    def _regroup(self, sets: pa.Array, group_of_set: Positions, count: int) -> list[pa.Array]:
        parents = pc.list_parent_indices(sets).to_numpy(zero_copy_only=False)
        return self._sets(pc.list_flatten(sets), group_of_set[parents], count)

    def _sets(self, values: pa.Array, group: Positions, count: int) -> list[pa.Array]:
        values = _one_of_equals(values)
        ranks, _ = ranks_of(values)
        order = np.lexsort((ranks, group))
        ranks, group = ranks[order], group[order]
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = (ranks[1:] != ranks[:-1]) | (group[1:] != group[:-1])
        sizes = np.bincount(group[first], minlength=count)
        if int(sizes.max(initial=0)) > self.limit:
            instead = "take count_distinct_approx, or count" if self.counts else "or put out each value once,"
            raise InvalidData(
                f"operator {self.uid!r}, aggregate {self.name!r}: a key has {int(sizes.max()):,} different values, and "
                f"the limit is {self.limit:,}. Raise it ({'count_distinct' if self.counts else 'collect_set'}(…, "
                f"limit=…), up to {DISTINCT_LIMIT_MAX:,}; stored state stays as it is), {instead} behind a deduplicate "
                "by key and value"
            )
        offsets = pa.array(np.concatenate(([0], np.cumsum(sizes))), type=pa.int32())
        return [pa.ListArray.from_arrays(offsets, values.take(pa.array(order[first])), type=self._sets_type)]


def _one_of_equals(values: pa.Array) -> pa.Array:
    """Return floats with one zero and one NaN, also inside of structs and lists: a set must not depend on which of two
    equal values came first."""
    if not _has_floats(values.type):
        return values
    nulls = values.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(values.type):
        fields = [_one_of_equals(field) for field in values.flatten()]
        return pa.StructArray.from_arrays(fields, fields=list(values.type), mask=pa.array(nulls))
    if pa.types.is_list(values.type):
        sizes = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate(([0], np.cumsum(sizes))), type=pa.int32())
        elements = _one_of_equals(pc.list_flatten(values))
        return pa.ListArray.from_arrays(offsets, elements, type=values.type, mask=pa.array(nulls))
    numbers = values.to_numpy(zero_copy_only=False)
    plain = np.where(np.isnan(numbers), np.nan, numbers + 0.0).astype(numbers.dtype)
    return pa.array(plain, type=values.type, mask=nulls)


def _has_floats(data_type: pa.DataType) -> bool:
    inner = [data_type.field(place).type for place in range(data_type.num_fields)]
    return pa.types.is_floating(data_type) or any(map(_has_floats, inner))
