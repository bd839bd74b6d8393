"""Values of the rows with the greatest or smallest value of another column: Spark's `max_by` and `min_by`; pure.

The state keeps that other value and the row's place in the source beside the value, so that panes of a window, parts of
a session and epochs may be merged in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.processors.builtin.partials import Groups, as_type, order_given
from state_runtime.processors.builtin.ranks import ranks_of
from state_runtime.state.table import Mask, Positions

__all__ = ["ByExtreme"]

_LOWEST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class ByExtreme:
    """The value of the row with the greatest, or smallest, `by`.

    Rows whose `by` is null do not count; the value may be null. Among rows with equal `by` the later one in source
    order wins, as it does in one partition of Spark. `<name>.by` and `<name>.at` are its `by` and its place; both are
    null if no row counted yet.
    """

    name: str
    column: str
    by: str
    output: pa.DataType
    by_type: pa.DataType
    greatest: bool

    @property
    def slots(self) -> tuple[pa.Field, ...]:
        return (
            pa.field(self.name, self.output),
            pa.field(f"{self.name}.by", self.by_type),
            pa.field(f"{self.name}.at", pa.int64()),
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.by)

    @property
    def ordered(self) -> bool:
        return True

    def reduce(self, rows: pa.RecordBatch, groups: Groups, order: Positions | None) -> list[pa.Array]:
        values, by = as_type(rows.column(self.column), self.output), as_type(rows.column(self.by), self.by_type)
        return self._choose(values, by, pa.array(order_given(order, self.name)), groups)

    def merge(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        count = len(new[0])
        # Ranks of texts are only comparable within one column, so both sides are ranked together.
        ranks, there = self._ranks(pa.concat_arrays([old[1], new[1]]))
        places = _places(old[2]), _places(new[2])
        after = (ranks[:count] > ranks[count:]) | ((ranks[:count] == ranks[count:]) & (places[0] > places[1]))
        keep = pa.array(there[:count] & (~there[count:] | after))
        return [pc.if_else(keep, o, n) for o, n in zip(old, new)]

    def merge_groups(self, slots: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        return list(slots) if groups.all_single else self._choose(slots[0], slots[1], slots[2], groups)

    def finish(self, slots: Sequence[pa.Array]) -> pa.Array:
        return slots[0]

    def _choose(self, values: pa.Array, by: pa.Array, at: pa.Array, groups: Groups) -> list[pa.Array]:
        ranks, there = self._ranks(by)
        best = np.maximum.reduceat(np.where(there, ranks, _LOWEST), groups.starts)
        # A value may have the lowest rank, too: rows that do not count get no place.
        places = np.where(there & (ranks == best[groups.group_of_row]), _places(at), -1)
        latest = np.maximum.reduceat(places, groups.starts)
        hits = np.flatnonzero(places == latest[groups.group_of_row])
        # Places differ, except those of rows that do not count: any of these will do, and the result is masked.
        picked = pa.array(hits[np.searchsorted(hits, groups.starts)], mask=latest < 0)
        return [values.take(picked), by.take(picked), pa.array(latest, mask=latest < 0)]

    def _ranks(self, by: pa.Array) -> tuple[Positions, Mask]:
        """Return ranks of which the greatest wins, and which rows have a value."""
        ranks, valid = ranks_of(by)
        there = np.ones(len(by), dtype=np.bool_) if valid is None else valid
        # The complement reverses the order and, unlike the negative, never overflows.
        return (ranks if self.greatest else ~ranks), there


def _places(at: pa.Array) -> Positions:
    places: Positions = pc.fill_null(at, -1).to_numpy(zero_copy_only=False)
    return places
