"""Event time: how far the source has come, and the clock of an epoch that follows from it; pure except for SQL.

The user marks the event-time column with Spark's own `withWatermark`; Spark keeps the delay in the column's metadata,
through any projection. The highest event time is observed where the epoch's rows enter, so that rows which later steps
filter out still move the clock. Where Spark's `withWatermark` nodes see other rows than those (united inputs, each
with its own delay; a join with a table), their observations are used (spark/watermarks.py). Every manifest holds the
observations: a run that starts from a snapshot has the watermark that an uninterrupted run would have.

Rules of Spark (sql/execution/streaming/WatermarkTracker, IncrementalExecution; checked in the parity suite): the
watermark of an epoch is the highest event time of earlier epochs minus the delay, never falls, and is 0 at first;
several columns are combined by `spark.sql.streaming.multipleWatermarkPolicy`; rows are late by the watermark of the
epoch before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import types as T

from state_runtime.snapshot.manifest import TimeEntry
from state_runtime.spark.watermarks import WatermarkNode

__all__ = [
    "DELAY_METADATA",
    "END_OF_TIME_MS",
    "LATENESS_METADATA",
    "Policy",
    "WatermarkColumn",
    "advance",
    "event_time_column",
    "observed",
    "watermark_columns",
    "watermarks_of_inputs",
]

DELAY_METADATA = "spark.watermarkDelayMs"
"""Metadata of a column that carries event time: the allowed delay."""

LATENESS_METADATA = "stillstate.allowedLatenessUs"
"""Metadata of a column that carries event time: how long after the watermark has passed its time a row may arrive."""

END_OF_TIME_MS = 253_402_300_799_999
"""The watermark after all input: the end of the year 9999, the last time that Python, Spark and Arrow can all hold."""

Policy = Literal["min", "max"]


@dataclass(frozen=True)
class WatermarkColumn:
    """A column of the source that `withWatermark` was called on.

    Attributes:
        name: path of the column, dots for fields of structs; for one of several inputs its number and its own name.
        sql: expression for its event time in milliseconds.
        node: Spark's `withWatermark` node that sees it, if no expression of the source's columns does.
    """

    name: str
    sql: str
    delay_ms: int
    node: WatermarkNode | None = None


def watermarks_of_inputs(nodes: Sequence[WatermarkNode]) -> tuple[WatermarkColumn, ...]:
    """Return a source's watermark columns if its inputs have their own watermarks: each with its delay, in order."""
    return tuple(
        WatermarkColumn(f"input {number}.{node.column}", "", node.delay_ms, node)
        for number, node in enumerate(nodes, 1)
    )


def watermark_columns(schema: T.StructType, prefix: str = "") -> tuple[WatermarkColumn, ...]:
    """Return the columns that carry event time, also inside structs (the two sides of a join)."""
    found: list[WatermarkColumn] = []
    for field in schema.fields:
        name = f"{prefix}{field.name}"
        quoted = ".".join("`" + part.replace("`", "``") + "`" for part in (*prefix.split(".")[:-1], field.name))
        delay_ms = field.metadata.get(DELAY_METADATA) if field.metadata else None
        if delay_ms is not None and isinstance(field.dataType, T.TimestampType):
            found.append(WatermarkColumn(name, f"unix_millis({quoted})", int(delay_ms)))
        elif delay_ms is not None and isinstance(field.dataType, T.TimestampNTZType):
            sql = f"timestampdiff(MILLISECOND, TIMESTAMP_NTZ '1970-01-01 00:00:00', {quoted})"
            found.append(WatermarkColumn(name, sql, int(delay_ms)))
        elif isinstance(field.dataType, T.StructType) and not prefix:
            found.extend(watermark_columns(field.dataType, f"{name}."))
    return tuple(found)


def event_time_column(schema: T.StructType) -> str:
    """Return the top-level column of an operator's input that carries event time; "" if it has none."""
    for field in schema.fields:
        is_time = isinstance(field.dataType, T.TimestampType | T.TimestampNTZType)
        if is_time and field.metadata and DELAY_METADATA in field.metadata:
            return str(field.name)
    return ""


def advance(
    last: TimeEntry | None,
    batch_time_ms: int,
    columns: Sequence[WatermarkColumn],
    policy: Policy,
) -> TimeEntry:
    """Return the clock of the epoch after `last`, before its own rows are seen.

    Neither processing time nor the watermark ever falls, even if the machine's clock does.
    """
    if last is None:
        return TimeEntry(batch_time_ms)
    reached = [last.event_time_ms[c.name] - c.delay_ms if c.name in last.event_time_ms else 0 for c in columns]
    chosen = (min if policy == "min" else max)(reached, default=0)
    return TimeEntry(max(batch_time_ms, last.batch_time_ms), max(last.watermark_ms, chosen), dict(last.event_time_ms))


def observed(time: TimeEntry, event_time_ms: Mapping[str, int | None]) -> TimeEntry:
    """Return `time` after its epoch's rows were seen: the highest event time per column (None: it had no rows)."""
    merged = dict(time.event_time_ms)
    for name, value_ms in event_time_ms.items():
        if value_ms is not None:
            merged[name] = max(value_ms, merged.get(name, value_ms))
    return TimeEntry(time.batch_time_ms, time.watermark_ms, merged)
