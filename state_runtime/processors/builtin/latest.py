"""The built-in `latest_by`: of each key the row with the greatest value of a column, without a Python loop over rows or
keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.builtin.ranks import has_order, ranks_of
from state_runtime.processors.user.vectorized import KeyedBatch
from state_runtime.state.table import Mask, Positions

__all__ = ["LATEST", "LatestBy", "plan_latest"]

LATEST = "latest"


@dataclass(frozen=True)
class LatestBy:
    """Keeps one row per key and emits it whenever another takes its place.

    Spark's order: NaN above every number, texts by their bytes. Null is below everything. Of equal ones the later row
    in source order wins, so the result does not depend on how the input is split into epochs.

    Attributes:
        kept: value columns of the state, the order column first.
    """

    kept: tuple[str, ...]

    def process(self, batch: KeyedBatch) -> pa.Table | None:
        """The best row of the epoch per key, then against the kept one."""
        order = batch.rows.column(self.kept[0])
        best = last_greatest(order, batch)
        found, before = batch.state(LATEST)
        wins = ~found | not_below(order.take(pa.array(best)), before.column(0))
        if not bool(wins.any()):
            return None
        winners = batch.rows.select(list(self.kept)).take(pa.array(best[wins]))
        batch.update(LATEST, winners, where=None if bool(wins.all()) else wins)
        keys = batch.keys.filter(pa.array(wins))
        return pa.table([*keys.columns, *winners.columns], names=[*keys.schema.names, *self.kept])


def plan_latest(keys: Sequence[str], order: str, columns: Sequence[str], schema: pa.Schema, uid: str) -> LatestBy:
    """Which columns to keep.

    Args:
        columns: what to keep besides the keys and the order column; none named means all.

    Raises:
        InvalidPipeline: a column is missing, is named twice or is a key, or the order column's type has no order.
    """
    where = f"operator {uid!r}, latest_by"
    for name in (order, *columns):
        if schema.get_field_index(name) < 0:
            raise InvalidPipeline(f"{where}: there is no column {name!r}; the input has {', '.join(schema.names)}")
        if name in keys:
            raise InvalidPipeline(f"{where}: {name!r} is a key column, which every output row has; do not name it")
    if len({order, *columns}) <= len(columns):
        raise InvalidPipeline(f"{where}: {order!r}, {', '.join(map(repr, columns))} name a column twice")
    data_type = schema.field(order).type
    if not has_order(data_type):
        raise InvalidPipeline(f"{where}: values of type {data_type} (column {order!r}) have no order")
    rest = columns or [name for name in schema.names if name not in keys and name != order]
    return LatestBy((order, *rest))


def last_greatest(order: pa.Array, batch: KeyedBatch) -> Positions:
    """Per key the position of the last of its rows with the greatest value; a null only where there is nothing else."""
    ranks, valid = ranks_of(order)
    greatest = np.maximum.reduceat(ranks, batch.starts)
    candidate = ranks == batch.per_row(greatest)
    if valid is not None:
        # A null's rank may equal a value's: where a key has values, nulls are out.
        candidate &= valid == batch.per_row(np.logical_or.reduceat(valid, batch.starts))
    positions = np.where(candidate, np.arange(len(order)), -1)
    last: Positions = np.maximum.reduceat(positions, batch.starts)
    return last


def not_below(new: pa.Array, old: pa.Array) -> Mask:
    """Row by row, whether a new value takes the place of an old one."""
    if new.type != old.type:
        new = new.cast(old.type)  # the session's time zone; the state's is UTC
    ranks, valid = ranks_of(pa.concat_arrays([old, new]))
    count = len(old)
    above: Mask = ranks[count:] >= ranks[:count]
    if valid is None:
        return above
    was, now = valid[:count], valid[count:]
    takes_over: Mask = (now & ~was) | ((now == was) & above)
    return takes_over
