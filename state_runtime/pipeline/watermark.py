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
from dataclasses import dataclass, field, replace
from typing import Literal

from pyspark.sql import types as T

from state_runtime.pipeline.graph import is_given
from state_runtime.processors.sides import LEFT_COLUMN, RIGHT_COLUMN
from state_runtime.snapshot.manifest import TimeEntry
from state_runtime.spark.columns import DELAY_METADATA
from state_runtime.spark.watermarks import WatermarkNode

__all__ = [
    "END_OF_TIME_MS",
    "LATENESS_METADATA",
    "POLICY_SETTING",
    "ClockInputs",
    "Clocks",
    "Policy",
    "WatermarkColumn",
    "event_time_column",
    "policy_of",
    "watermark_columns",
    "watermarks_of_inputs",
]

LATENESS_METADATA = "stillstate.allowedLatenessUs"
"""Metadata of a column that carries event time: how long after the watermark has passed its time a row may arrive."""

END_OF_TIME_MS = 253_402_300_799_999
"""The watermark after all input: the end of the year 9999, the last time that Python, Spark and Arrow can all hold."""

Policy = Literal["min", "max"]
POLICY_SETTING = "spark.sql.streaming.multipleWatermarkPolicy"


def policy_of(value: object) -> Policy:
    """Return how several watermarks are combined, by the value of Spark's own setting."""
    return "max" if str(value).lower() == "max" else "min"


@dataclass(frozen=True)
class WatermarkColumn:
    """A column of the source that `withWatermark` was called on.

    Attributes:
        name: path of the column, dots for fields of structs; for one of several inputs its number and its own name.
            Before it the name of the source, if that has one.
        sql: expression for its event time in milliseconds.
        node: Spark's `withWatermark` node that sees it, if no expression of the source's columns does.
        source: the name of its source.
        was: its name in snapshots until now, if that was another one.
        max_ahead_ms: how far a time may be ahead of processing time to count; None: any counts.
    """

    name: str
    sql: str
    delay_ms: int
    node: WatermarkNode | None = None
    source: str = ""
    was: str = ""
    max_ahead_ms: int | None = None

    def of_source(self, name: str, was: str | None) -> WatermarkColumn:
        """Return the column of a source with a name.

        Args:
            was: the name of the source until now; None: the same.
        """
        if was is None:  # a job whose only sources are the two sides of a join may have had these names for them
            side = "" if is_given(name) else RIGHT_COLUMN if name else LEFT_COLUMN
            before = f"{side}.{self.name}" if side else ""
        else:
            before = f"{was}.{self.name}" if was else self.name
        return replace(self, name=f"{name}.{self.name}" if name else self.name, source=name, was=before)

    def of_side(self, names: Sequence[str]) -> WatermarkColumn:
        """Return the column of one of the two sources that a join alone reads, by its name in the join's input.

        Args:
            names: of the left source and of the right one.
        """
        side, _, column = self.name.partition(".")
        source = names[side == RIGHT_COLUMN]
        return replace(self, source=source, was=f"{source}.{column}" if source else column)


def watermarks_of_inputs(nodes: Sequence[WatermarkNode]) -> tuple[WatermarkColumn, ...]:
    """Return a source's watermark columns if its inputs have their own watermarks: each with its delay, in order."""
    return tuple(
        WatermarkColumn(f"input {number}.{node.column}", "", node.delay_ms, node)
        for number, node in enumerate(nodes, 1)
    )


def watermark_columns(schema: T.StructType, prefix: str = "", *, inside: str = "") -> tuple[WatermarkColumn, ...]:
    """Return the columns that carry event time, also inside structs (the two sides of a join).

    Args:
        inside: SQL of the struct that has these columns in the frame on which event times are observed, with a dot.
    """
    found: list[WatermarkColumn] = []
    for column in schema.fields:
        name = f"{prefix}{column.name}"
        quoted = inside + ".".join(
            "`" + part.replace("`", "``") + "`" for part in (*prefix.split(".")[:-1], column.name)
        )
        delay_ms = column.metadata.get(DELAY_METADATA) if column.metadata else None
        if delay_ms is not None and isinstance(column.dataType, T.TimestampType):
            found.append(WatermarkColumn(name, f"unix_millis({quoted})", int(delay_ms)))
        elif delay_ms is not None and isinstance(column.dataType, T.TimestampNTZType):
            sql = f"timestampdiff(MILLISECOND, TIMESTAMP_NTZ '1970-01-01 00:00:00', {quoted})"
            found.append(WatermarkColumn(name, sql, int(delay_ms)))
        elif isinstance(column.dataType, T.StructType) and not prefix:
            found.extend(watermark_columns(column.dataType, f"{name}.", inside=inside))
    return tuple(found)


def event_time_column(schema: T.StructType) -> str:
    """Return the top-level column of an operator's input that carries event time; "" if it has none."""
    for column in schema.fields:
        is_time = isinstance(column.dataType, T.TimestampType | T.TimestampNTZType)
        if is_time and column.metadata and DELAY_METADATA in column.metadata:
            return str(column.name)
    return ""


@dataclass(frozen=True)
class ClockInputs:
    """Where the rows of an operator come from.

    Attributes:
        sources: names of the sources whose rows reach it through stateless steps only.
        operators: uids of the operators whose output does.
    """

    sources: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()

    def __or__(self, other: ClockInputs) -> ClockInputs:
        return ClockInputs(self.sources | other.sources, self.operators | other.operators)


@dataclass(frozen=True)
class Clocks:
    """What moves the clocks of a job's operators.

    An operator goes by the lowest clock of its inputs: of the sources that it reads, combined by the policy, and of the
    operators before it. So what those emit because their clock has passed it is never late for it. Rows of a join have
    waited in addition: what comes behind it is held back by as long as they may.

    Attributes:
        columns: all of the sources' columns with event time.
        policy: how several columns are combined.
        inputs: per operator uid, in topological order.
        idle_after_ms: per source how long no row of it may come before it is left out.
        held_back_ms: per operator uid how far the clock of its output is behind its own.
    """

    columns: tuple[WatermarkColumn, ...] = ()
    policy: Policy = "min"
    inputs: Mapping[str, ClockInputs] = field(default_factory=dict)
    idle_after_ms: Mapping[str, int] = field(default_factory=dict)
    held_back_ms: Mapping[str, int] = field(default_factory=dict)

    def advanced(self, last: TimeEntry | None, batch_time_ms: int) -> TimeEntry:
        """Return the clocks of the epoch after `last`, before its own rows are seen.

        Neither processing time nor any watermark ever falls, even if the machine's clock does. A source that is idle
        holds nothing back; if all inputs of an operator are idle, its clock stands.
        """
        if last is None:
            return TimeEntry(batch_time_ms)
        now_ms = max(batch_time_ms, last.batch_time_ms)
        awake = [column for column in self.columns if column.source not in last.idle]
        watermark_ms = max([last.watermark_ms, *self._reached(last, awake)])
        clocks: dict[str, int] = {}
        for uid, given in self.inputs.items():
            before = [each for each in given.operators if each in clocks]
            if not before and not any(c.source in given.sources for c in self.columns):
                continue  # no event time reaches it; if its code asks for a watermark, it gets the job's
            of_inputs = self._reached(last, [c for c in awake if c.source in given.sources])
            of_inputs += [clocks[each] - self.held_back_ms.get(each, 0) for each in before]
            clocks[uid] = max(last.watermark_of(uid), min(of_inputs, default=0))
        own = {uid: clock_ms for uid, clock_ms in clocks.items() if clock_ms != watermark_ms}
        return replace(last, batch_time_ms=now_ms, watermark_ms=watermark_ms, clocks=own)

    def _reached(self, last: TimeEntry, columns: Sequence[WatermarkColumn]) -> list[int]:
        """Return the watermark of columns; [] of none."""
        combined = min if self.policy == "min" else max
        return [combined(_reached(last.event_time_ms, column) for column in columns)] if columns else []

    def observed(self, time: TimeEntry, event_time_ms: Mapping[str, int | None], *, reads: bool = True) -> TimeEntry:
        """Return `time` after its epoch's rows were seen: the highest event time per column (None: it had no rows).

        Args:
            reads: the epoch read a batch. Only a batch shows that a source is silent, for it holds what each source
                had: while the driver sleeps or waits for a store, no source becomes idle.
        """
        if not reads:
            return time
        merged = dict(time.event_time_ms)
        seen_ms = {source: time.seen_ms.get(source, time.batch_time_ms) for source in self.idle_after_ms}
        of_source = {column.name: column.source for column in self.columns}
        for name, value_ms in event_time_ms.items():
            if value_ms is not None:
                merged[name] = max(value_ms, merged.get(name, value_ms))
                if of_source[name] in seen_ms:
                    seen_ms[of_source[name]] = time.batch_time_ms
        idle = [s for s, after_ms in self.idle_after_ms.items() if time.batch_time_ms - seen_ms[s] >= after_ms]
        return replace(time, event_time_ms=merged, seen_ms=seen_ms, idle=tuple(sorted(idle)))


def _reached(event_time_ms: Mapping[str, int], column: WatermarkColumn) -> int:
    """Return the watermark of a column; 0 while no row of it was seen."""
    highest_ms = event_time_ms.get(column.name, event_time_ms.get(column.was))
    return highest_ms - column.delay_ms if highest_ms is not None else 0
