"""Rows that Spark aggregated before the shuffle: the names of their columns, and their use as partial results.

A *partial row* stands for the rows of one key (in windows: of one key and pane) in one Spark task. It has the key, in
windows an event time of the pane, the number of rows that it stands for (`ROWS_COLUMN`), and per slot of the operator's
state one column (`slot_column`). The sum of 64-bit integers has two columns, for their upper and lower halves. Neither
can leave the range of long, so a sum fails in exactly those cases in which it fails for the rows themselves. The SQL
that makes them is in pipeline/partial_rows.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_runtime.state.table import Positions

__all__ = [
    "LOWER_HALF",
    "ROWS_COLUMN",
    "SLOTS",
    "are_partial",
    "doubles_of_halves",
    "longs_of_halves",
    "rows_behind",
    "slot_column",
    "upper_column",
]

ROWS_COLUMN = "__stillstate_rows"
SLOTS = "__stillstate_slot_"
LOWER_HALF = (1 << 32) - 1
_INT_MAX = (1 << 31) - 1


def slot_column(number: int) -> str:
    """Return a slot's column, by the slot's number in the operator; with `upper_column`, the lower half's column."""
    return f"{SLOTS}{number}"


def upper_column(number: int) -> str:
    """Return the column of the sum of the upper halves, if a slot sums 64-bit integers."""
    return f"{SLOTS}{number}_upper"


def are_partial(rows: pa.RecordBatch) -> bool:
    """Return whether rows are partial: they have a column that only partial rows have."""
    return ROWS_COLUMN in rows.schema.names


def rows_behind(rows: pa.RecordBatch) -> Positions | None:
    """Return per partial row the number of rows that it stands for; None if rows are not partial."""
    return rows.column(ROWS_COLUMN).to_numpy(zero_copy_only=False) if are_partial(rows) else None


def longs_of_halves(upper: Positions, lower: Positions) -> Positions | None:
    """Return sums from the sums of their halves; None if one of them leaves the range of long."""
    upper, lower = _carried(upper, lower)
    if bool(np.any((upper > _INT_MAX) | (upper < -_INT_MAX - 1))):
        return None
    return (upper << 32) | lower


def doubles_of_halves(upper: Positions, lower: Positions) -> npt.NDArray[np.float64]:
    """Return the same as doubles, of any size. The sum is exact before it is rounded, as long as its upper half is
    below 2^53."""
    upper, lower = _carried(upper, lower)
    return upper.astype(np.float64) * float(1 << 32) + lower.astype(np.float64)


def _carried(upper: Positions, lower: Positions) -> tuple[Positions, Positions]:
    return upper + (lower >> 32), lower & LOWER_HALF
