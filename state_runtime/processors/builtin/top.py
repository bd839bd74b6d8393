"""The rows with the greatest or smallest values of a column, so many of each group: SQL's `ROW_NUMBER() … <= n`; pure.

The state keeps what each was chosen by and its place in the source, as `max_by` does (extremes.py), so that panes of a
window, parts of a session and epochs may meet in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidData
from state_runtime.processors.builtin.partials import Groups, as_type
from state_runtime.processors.builtin.ranks import ranks_of
from state_runtime.state.table import Positions

__all__ = ["Top"]


@dataclass(frozen=True)
class Top:
    """Values of the `n` rows with the greatest, or smallest, `by`: the first is what `max_by`, or `min_by`, gives.

    Rows whose `by` is null do not count; a value may be null. Of rows with equal `by` the later one in source order
    comes first. `<name>.by` and `<name>.at` are what each value was chosen by and its place.
    """

    name: str
    column: str
    by: str
    element: pa.DataType
    by_type: pa.DataType
    n: int
    greatest: bool

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        types = {self.name: self.element, f"{self.name}.by": self.by_type, f"{self.name}.at": pa.int64()}
        return tuple(pa.field(name, pa.list_(pa.field("element", kind))) for name, kind in types.items())

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.by)

    @property
    def output(self) -> pa.DataType:
        return self.slots[0].type

    @property
    def ordered(self) -> bool:
        return True

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        if order is None:
            raise InvalidData(f"aggregate {self.name!r} needs the order of the rows")
        by = as_type(rows.column(self.by), self.by_type)
        columns = [as_type(rows.column(self.column), self.element), by, pa.array(order)]
        group = groups.group_of_row
        if by.null_count:
            there = by.is_valid()
            columns = [column.filter(there) for column in columns]
            group = group[there.to_numpy(zero_copy_only=False)]
        return self._lists(columns, group, groups.count)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        both = [pa.concat_arrays([o, n]) for o, n in zip(old, new)]
        return self._regroup(both, np.tile(np.arange(len(new[0])), 2), len(new[0]))

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._regroup(slots, groups.group_of_row, groups.count)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        return slots[0]

    def _regroup(self, slots: Sequence[pa.Array], group_of_list: Positions, count: int) -> list[pa.Array]:
        parents = pc.list_parent_indices(slots[0]).to_numpy(zero_copy_only=False)
        return self._lists([pc.list_flatten(slot) for slot in slots], group_of_list[parents], count)

    def _lists(self, columns: Sequence[pa.Array], group: Positions, count: int) -> list[pa.Array]:
        """Of values, what they are chosen by and their places, each group's first `n`."""
        ranks, _ = ranks_of(columns[1])
        places = columns[2].to_numpy(zero_copy_only=False)
        # The complement turns an order around and, unlike the negative, always fits.
        order = np.lexsort((~places, ~ranks if self.greatest else ranks, group))
        sizes = np.bincount(group, minlength=count)
        within = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        picked = pa.array(order[within < self.n])
        offsets = pa.array(np.concatenate(([0], np.cumsum(np.minimum(sizes, self.n)))), type=pa.int32())
        return [
            pa.ListArray.from_arrays(offsets, column.take(picked), type=slot.type)
            for column, slot in zip(columns, self.slots, strict=True)
        ]
