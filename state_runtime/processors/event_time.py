"""Event time of rows: Spark's microseconds against watermarks in milliseconds; pure and vectorised.

Spark compares `event time <= watermark · 1000` in microseconds. The milliseconds *rounded up* give the same answer
against the watermark itself, so a `due` in milliseconds loses nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.base.errors import InvalidPipeline
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import ShardResult
from state_runtime.state.table import Mask

__all__ = ["check_event_time", "drop_late", "is_late", "micros_of", "millis_up", "nullable_millis", "plus"]

Times = npt.NDArray[np.int64]
_EARLIEST, _LATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_MICROS = pa.timestamp("us")


def check_event_time(schema: pa.Schema, column: str, where: str) -> None:
    """Refuse a column that cannot be event time.

    Raises:
        InvalidPipeline: there is no such column, or it is not a timestamp.
    """
    if schema.get_field_index(column) < 0:
        raise InvalidPipeline(f"{where}: there is no event-time column {column!r}; there is {', '.join(schema.names)}")
    if not pa.types.is_timestamp(schema.field(column).type):
        raise InvalidPipeline(
            f"{where}: event-time column {column!r} has type {schema.field(column).type}; cast it to timestamp"
        )


def micros_of(column: pa.Array) -> tuple[Times, Mask | None]:
    """Return the microseconds of a timestamp column, 0 where null; and which rows have a time (None: all)."""
    valid: Mask | None = None
    if column.type.unit != "us":
        column = column.cast(_MICROS if column.type.tz is None else pa.timestamp("us", column.type.tz))
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    return pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), valid


def millis_up(micros: Times) -> Times:
    """Convert to milliseconds, rounded up."""
    whole: Times = micros // 1000
    rounded: Times = whole + (micros != whole * 1000)
    return rounded


def plus(times: Times, duration: int) -> Times:
    """Add a duration; the sum stops at the ends of a long instead of wrapping around."""
    limited: Times = np.minimum(times, _LATEST - duration) if duration >= 0 else np.maximum(times, _EARLIEST - duration)
    return limited + duration


def is_late(times: pa.Array, late_watermark_ms: int) -> Mask:
    """Return which event times are at or below the watermark; a row without event time is not late."""
    micros, valid = micros_of(times)
    late: Mask = millis_up(micros) <= late_watermark_ms
    return late if valid is None else late & valid


def drop_late(rows: GroupedRows, column: str, late_watermark_ms: int, result: ShardResult) -> GroupedRows:
    """Return the rows that are not late (`is_late`); the late ones go to the result."""
    if not column or rows.groups == 0:
        return rows
    late = is_late(rows.rows.column(column), late_watermark_ms)
    return result.on_time(rows, late)


def nullable_millis(millis: Times, valid: Mask | None) -> pa.Array:
    """Return times as a `due` column; null (never) where there is no time."""
    return pa.array(millis, mask=None if valid is None else ~valid)
