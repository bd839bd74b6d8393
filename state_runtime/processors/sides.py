"""Two streams as one input: how their rows are told apart, and the rows of one of them among those of an epoch.

<key columns>        …        named as on the left side
__stillstate_side    int      0 left, 1 right
__stillstate_left    struct   the other columns of the left side; null for right rows
__stillstate_right   struct   the other columns of the right side; null for left rows
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from state_runtime.base.joining import SideName
from state_runtime.processors.event_time import Times, micros_of, millis_up
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import LATE_OF_SIDE, EpochClock, ShardResult
from state_runtime.state.table import Hashes, Mask, Positions

__all__ = ["LEFT_COLUMN", "RIGHT_COLUMN", "SIDE_COLUMN", "JoinSide", "SideRows"]

SIDE_COLUMN: Final = "__stillstate_side"
LEFT_COLUMN: Final = "__stillstate_left"
RIGHT_COLUMN: Final = "__stillstate_right"


@dataclass(frozen=True)
class JoinSide:
    """One of the two streams.

    Attributes:
        number: in the column that tells the sides apart.
        keys: its own names of the key columns.
        struct: the input's column with the side's other columns than keys.
        columns: those columns.
        time: the one with event time; "": the side has none.
        when: see `JoinTerms`.
        is_outer: rows without a match are emitted, with nulls for the other side.
        drops_late: rows at or below the watermark are late.
        stays_ms: how long after its own time a row is removed, in event time; None: never.
    """

    name: SideName
    number: int
    keys: tuple[str, ...]
    struct: str
    columns: pa.Schema
    time: str
    when: str
    is_outer: bool
    drops_late: bool
    stays_ms: int | None


@dataclass(frozen=True)
class SideRows:
    """The rows of one side among the rows of an epoch.

    Attributes:
        key_schema: of the join, with the names of `rows`.
        rows: of both sides.
    """

    side: JoinSide
    key_schema: pa.Schema
    rows: GroupedRows

    @cached_property
    def at(self) -> Positions:
        """Places of the side's rows."""
        tags = self.rows.rows.column(SIDE_COLUMN).to_numpy(zero_copy_only=False)
        return np.flatnonzero(tags == self.side.number)

    @cached_property
    def group(self) -> Positions:
        """Of each row the number of its key."""
        return np.repeat(np.arange(self.rows.groups), self.rows.stops - self.rows.starts)[self.at]

    @property
    def structs(self) -> pa.Array:
        """The side's other columns than keys, for the rows of both sides."""
        return self.rows.rows.column(self.side.struct)

    def column(self, name: str) -> pa.Array:
        """Return one of the side's other columns than keys."""
        return self.structs.field(self.structs.type.get_field_index(name)).take(pa.array(self.at))

    @cached_property
    def times(self) -> tuple[Times, Mask | None]:
        """Event times, 0 where there is none; and which rows have one (None: all)."""
        if not self.side.time:
            return np.zeros(len(self.at), dtype=np.int64), None
        return micros_of(self.column(self.side.time))

    @cached_property
    def has_no_key(self) -> Mask:
        """Of each key whether it is null, at least in part: then it is equal to no other one."""
        no_key = np.zeros(self.rows.groups, dtype=np.bool_)
        for key in self.rows.keys:
            if key.null_count:
                no_key |= key.is_null().to_numpy(zero_copy_only=False)
        return no_key

    def on_time(self, clock: EpochClock, result: ShardResult) -> Mask:
        """Return which rows are not late; the late ones are counted, and given to their side output."""
        if not self.side.time or not self.side.drops_late:
            return np.ones(len(self.at), dtype=np.bool_)
        micros, valid = self.times
        keep: Mask = millis_up(micros) > clock.late_watermark_ms
        if valid is not None:
            keep |= ~valid
        late = self.at[~keep]
        result.late_rows += len(late)
        if len(late):
            result.give(LATE_OF_SIDE[self.side.number], lambda: self._as_they_came(late))
        return keep

    def _as_they_came(self, at: Positions) -> pa.RecordBatch:
        taken = self.rows.rows.take(pa.array(at))
        values = taken.column(self.side.struct)
        keys = [taken.column(name) for name in self.key_schema.names]
        names = [*self.side.keys, *(field.name for field in values.type)]
        return pa.RecordBatch.from_arrays([*keys, *values.flatten()], names=names)

    def picked(self, keep: Mask) -> tuple[Hashes, list[pa.Array], list[pa.Array]]:
        """Return of some rows the hashes of their keys, the keys, and the other columns."""
        at = self.at if bool(keep.all()) else self.at[keep]
        taken = pa.array(at)
        values, kind = self.structs.take(taken).flatten(), self.structs.type
        return (
            np.repeat(self.rows.hashes, self.rows.stops - self.rows.starts)[at],
            [_as(self.rows.rows.column(field.name).take(taken), field.type) for field in self.key_schema],
            [_as(values[kind.get_field_index(field.name)], field.type) for field in self.side.columns],
        )


def _as(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    return column if column.type == data_type else column.cast(data_type)
