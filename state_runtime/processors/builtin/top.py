"""The `n` rows of each group with the greatest or smallest values of a column: SQL's `ROW_NUMBER() … <= n`; pure.

The state keeps each row's `by` and its place in the source, as `max_by` does (extremes.py), so that panes of a window,
parts of a session and epochs may be merged in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_runtime.processors.builtin.lists import elements_of, elements_of_both, first_of_each
from state_runtime.processors.builtin.partials import Groups, as_type, order_given
from state_runtime.processors.builtin.ranks import ranks_of
from state_runtime.state.table import Positions

__all__ = ["Top"]


@dataclass(frozen=True)
class Top:
    """Values of the `n` rows with the greatest, or smallest, `by`; the first is that of `max_by`, or `min_by`.

    Rows whose `by` is null do not count; a value may be null. Among rows with equal `by` the later one in source order
    comes first. `<name>.by` and `<name>.at` hold each value's `by` and its place.
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
        by = as_type(rows.column(self.by), self.by_type)
        columns = [as_type(rows.column(self.column), self.element), by, pa.array(order_given(order, self.name))]
        group = groups.group_of_row
        if by.null_count:
            there = by.is_valid()
            columns = [column.filter(there) for column in columns]
            group = group[there.to_numpy(zero_copy_only=False)]
        return self._lists(columns, group, groups.count)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        return self._lists(*elements_of_both(old, new), len(new[0]))

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._lists(*elements_of(slots, groups.group_of_row), groups.count)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        return slots[0]

    def _lists(self, columns: Sequence[pa.Array], group: Positions, count: int) -> list[pa.Array]:
        """Return each group's first `n` values, with their `by` and their places."""
        ranks, _ = ranks_of(columns[1])
        places = columns[2].to_numpy(zero_copy_only=False)
        # The complement reverses an order and, unlike the negative, never overflows.
        keys = [~places, ~ranks if self.greatest else ranks]
        return first_of_each(columns, keys, group, count=count, limit=self.n, fields=self.slots)
