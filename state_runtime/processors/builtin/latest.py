"""The built-in `latest_by`: per key the row that comes last by some columns, without a Python loop over rows or
keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.builtin.ranks import has_order, ranks_of, ranks_of_rows
from state_runtime.processors.user.keyed_batch import KeyedBatch
from state_runtime.state.table import Mask, Positions

__all__ = ["LATEST", "LatestBy", "plan_latest"]

LATEST = "latest"


@dataclass(frozen=True)
class LatestBy:
    """Keeps one row per key and emits it whenever another row replaces it.

    Spark's order: NaN above every number, texts by their bytes. Null is below everything: it never replaces a value,
    and in an ascending column no value replaces it. Among equal rows the later one in source order wins, so the result
    does not depend on how the input is split into epochs.

    Attributes:
        kept: value columns of the state, the order columns first.
        ascending: per order column, compared from left to right, whether its smallest value is wanted.
    """

    kept: tuple[str, ...]
    ascending: tuple[bool, ...] = (False,)

    @property
    def order(self) -> tuple[str, ...]:
        """The order columns."""
        return self.kept[: len(self.ascending)]

    @property
    def modes(self) -> str:
        """The settings that cannot change while there is state: the order of rows. Empty for one descending column, for
        which earlier versions stored no modes."""
        if self.ascending == (False,):
            return ""
        named = (f"{name} {'ascending' if up else 'descending'}" for name, up in zip(self.order, self.ascending))
        return f"by {', '.join(named)}"

    def process(self, batch: KeyedBatch) -> pa.Table | None:
        """Choose the best row of the epoch per key, then compare it with the kept one."""
        order = [batch.rows.column(name) for name in self.order]
        best = self._last_greatest(order, batch)
        # The other columns of a kept row are not read: the row stays or is replaced as a whole.
        found, before = batch.look_up(LATEST, self.order)
        at = pa.array(best)
        wins = ~found | self._not_below([c.take(at) for c in order], before.columns)
        if not bool(wins.any()):
            return None
        winners = batch.rows.select(list(self.kept)).take(pa.array(best[wins]))
        batch.write(LATEST, winners, wins, found)
        keys = batch.keys if bool(wins.all()) else batch.keys.filter(pa.array(wins))
        return pa.table([*keys.columns, *winners.columns], names=[*keys.schema.names, *self.kept])

    def _last_greatest(self, order: Sequence[pa.Array], batch: KeyedBatch) -> Positions:
        """Return per key the position of the last of its rows with the greatest rank; if `valid` tells nulls from
        values, a null only if the key has no value."""
        ranks, valid = self._ranks(order)
        greatest = np.maximum.reduceat(ranks, batch.starts)
        candidate = ranks == batch.per_row(greatest)
        if valid is not None:
            # A null's rank may equal a value's: if a key has values, its nulls are excluded.
            candidate &= valid == batch.per_row(np.logical_or.reduceat(valid, batch.starts))
        positions = np.where(candidate, np.arange(len(ranks)), -1)
        last: Positions = np.maximum.reduceat(positions, batch.starts)
        return last

    def _not_below(self, new: Sequence[pa.Array], old: Sequence[pa.Array]) -> Mask:
        """Return, row by row, whether a new row replaces an old one."""
        count = len(new[0])
        # New values are in the session's time zone, the state's in UTC.
        new = [n if n.type == o.type else n.cast(o.type) for n, o in zip(new, old)]
        ranks, valid = self._ranks([pa.concat_arrays([o, n]) for o, n in zip(old, new)])
        above: Mask = ranks[count:] >= ranks[:count]
        if valid is None:
            return above
        was, now = valid[:count], valid[count:]
        takes_over: Mask = (now & ~was) | ((now == was) & above)
        return takes_over

    def _ranks(self, order: Sequence[pa.Array]) -> tuple[Positions, Mask | None]:
        """Return ranks of which the greatest is wanted; and for a single descending column which rows have a value, if
        not all do: ranks of several columns tell nulls from values."""
        if self.ascending == (False,):
            return ranks_of(order[0])
        return ranks_of_rows(order, self.ascending), None


def plan_latest(
    keys: Sequence[str],
    order: Sequence[str],
    columns: Sequence[str],
    schema: pa.Schema,
    uid: str,
    ascending: Sequence[bool] = (False,),
) -> LatestBy:
    """Choose the columns to keep.

    Args:
        columns: the columns to keep besides the keys and the order columns; empty means all.
        ascending: see `LatestBy`; one for each order column.

    Raises:
        InvalidPipeline: a column is missing, is named twice or is a key, or an order column's type has no order.
    """
    where = f"operator {uid!r}, latest_by"
    for name in (*order, *columns):
        if schema.get_field_index(name) < 0:
            raise InvalidPipeline(f"{where}: there is no column {name!r}; the input has {', '.join(schema.names)}")
        if name in keys:
            raise InvalidPipeline(f"{where}: {name!r} is a key column, which every output row has; do not name it")
    if len({*order, *columns}) < len(order) + len(columns):
        raise InvalidPipeline(f"{where}: {', '.join(map(repr, (*order, *columns)))} name a column twice")
    for name in order:
        data_type = schema.field(name).type
        if not has_order(data_type):
            raise InvalidPipeline(f"{where}: values of type {data_type} (column {name!r}) have no order")
    rest = columns or [name for name in schema.names if name not in keys and name not in order]
    return LatestBy((*order, *rest), tuple(ascending))
