"""Operators of a plain query in a checkpoint of Spark's, matched with those of the same query here; pure.

The same code gives the same plan, and Spark numbers its operators by their places in it. So an operator here is the one
of the same number, if it is of the same kind; names and types of all columns of its state are compared when they are
read. Columns of state here are SQL over Spark's own: `k0`, `k1`, … are the columns of its key, `v0`, `v1`, … those of
its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame

from state_runtime.base.errors import InvalidConfiguration
from state_runtime.importing.native_operators import WRITTEN, NativeOperator
from state_runtime.importing.native_slots import slots_of
from state_runtime.processors.builtin.aggregate import AggregateOperator
from state_runtime.processors.builtin.all_rows import ALL_ROWS
from state_runtime.processors.builtin.interval_join import IntervalJoinOperator
from state_runtime.processors.builtin.interval_join_plan import MATCHED
from state_runtime.processors.builtin.sessions import SessionOperator
from state_runtime.processors.operator import Operator
from state_runtime.processors.user.stateful import StatefulProcessorOperator
from state_runtime.processors.user.vectorized import VectorizedOperator
from state_runtime.reading.rows import RowLayout
from state_runtime.spark.group_state import GroupFunction
from state_runtime.spark.query_parts import Kept, NativeColumn
from state_runtime.spark.sql import quoted

__all__ = ["INDEX", "NativeRead", "match_kept", "read_of"]

INDEX: Final = NativeColumn("index", "bigint")
_MATCHED: Final = NativeColumn("matched", "boolean")
_TIMEOUT: Final = NativeColumn("timeoutTimestamp", "bigint")
_START: Final = NativeColumn("sessionStartTime", "timestamp")
_DUMMY: Final = NativeColumn("__dummy__", "void")
_EXPIRES: Final = NativeColumn("expiresAtMicros", "bigint")


@dataclass(frozen=True)
class NativeRead:
    """What is read of a native operator for one state, and what is made of it.

    Attributes:
        keys: the columns that its key must have.
        values: those that its value must have: one of these forms.
        columns: SQL for each column of the state here, as people see it.
        window, window_us: see `Kept`.
        is_session: the value has the grouping, and the key has the start of the session in it.
        store: of a join the name of Spark's store with the rows of a side; "" of others.
        rows: makes the side's columns here of Spark's; they are what `columns` are made of.
        where: SQL for the rows that are kept here, too.
    """

    keys: tuple[NativeColumn, ...]
    values: tuple[tuple[NativeColumn, ...], ...]
    columns: Mapping[str, str]
    window: str = ""
    window_us: int = 0
    is_session: bool = False
    store: str = ""
    rows: Callable[[DataFrame], DataFrame] | None = None
    where: str = "true"


def match_kept(
    native: Sequence[NativeOperator], kept: Mapping[str, Kept], chosen: Mapping[int, str] | None, where: str
) -> dict[int, str]:
    """Return the uid for each operator of a query, by its number.

    Args:
        kept: how Spark keeps the state of the job's operators, by uid.
        chosen: what the user said; it must be the same.

    Raises:
        InvalidConfiguration: the job has other operators than the query; the message says which.
    """
    own = {each.number: (uid, each.operator) for uid, each in kept.items()}
    if len(own) < len(kept):
        raise InvalidConfiguration(
            f"a checkpoint is of one query, and the job has several; import {where} into a job of one query"
        )
    for one in native:
        uid, operator = own.get(one.number, ("", ""))
        if operator != one.operator:
            has = f"is {_told(operator)} ({uid!r})" if uid else "is not there"
            raise InvalidConfiguration(
                f"operator {one.number} of the query in {where} is {_told(one.operator)}, and in the job it {has}. "
                "Give job.query the code that the query had; it can be changed after the import"
            )
    more = sorted(own.keys() - {one.number for one in native})
    if more:
        uid, operator = own[more[0]]
        raise InvalidConfiguration(
            f"the job has {_told(operator)} ({uid!r}) that the query in {where} does not have. Give job.query the code "
            "that the query had; it can be changed after the import"
        )
    for number, uid in (chosen or {}).items():
        if number in own and own[number][0] != uid:
            raise InvalidConfiguration(
                f"operator {number} is {own[number][0]!r} by its place in the query, and not {uid!r}; leave --operator "
                "out for a job.query"
            )
    return {number: uid for number, (uid, _) in own.items()}


def _told(operator: str) -> str:
    return WRITTEN.get(operator, f"of kind {operator!r}")


def read_of(kept: Kept, own: Operator, layout: RowLayout) -> NativeRead:
    """Return what to read for a state of an operator.

    Raises:
        InvalidConfiguration: a part of it cannot be made of what Spark keeps; the message names it.
    """
    if isinstance(own, IntervalJoinOperator):
        return _side_of_join(kept, own, layout)
    if isinstance(own, StatefulProcessorOperator) and isinstance(own.processor, GroupFunction):
        return _of_groups(kept, own, own.processor, layout)
    names = {role: shown for shown, role in layout.shown.roles().items()}
    columns = {names["key", name]: kept.own_keys.get(name, "true") for name in own.key_schema.names}
    if own.key_schema.names != [ALL_ROWS] and set(own.key_schema.names) != set(kept.own_keys):
        raise InvalidConfiguration(f"operator {own.uid!r} has keys {own.key_schema.names}, and its query others")
    buffers = tuple(column for each in kept.buffers.values() for column in each)
    if isinstance(own, SessionOperator | AggregateOperator):
        columns |= {names["value", slot]: sql for slot, sql in slots_of(own.plan, kept.buffers, own.uid).items()}
    if isinstance(own, SessionOperator):
        columns[names["start", "window.start"]] = f"{kept.window}.start"
        columns[names["value", "window.end"]] = end = f"{kept.window}.end"
        columns[names["time", "due"]] = _ms_up_of_micros(f"unix_micros({end})")
        others = tuple(key for place, key in enumerate(kept.keys) if f"k{place}" != kept.window)
        return NativeRead(
            keys=(*others, _START),
            values=((*kept.keys, *buffers),),
            columns=columns,
            window=kept.window,
            window_us=kept.window_us,
            is_session=True,
        )
    if isinstance(own, AggregateOperator):
        if own.event_time:
            columns[names["time", "due"]] = _ms_up(kept.own_keys[own.event_time], own.key_schema, own.event_time)
        # The first form of Spark's has the keys before the buffers, too.
        forms = tuple(dict.fromkeys((buffers, (*kept.keys, *buffers))))
        return NativeRead(kept.keys, forms, columns, kept.window, kept.window_us)
    is_within = kept.operator == "dedupeWithinWatermark"
    if layout.versions.time and isinstance(own, VectorizedOperator):
        time = own.event_time
        columns[names["time", "due"]] = (
            _ms_up_of_micros("v0") if is_within else _ms_up(kept.own_keys[time], own.key_schema, time)
        )
    return NativeRead(kept.keys, ((_EXPIRES if is_within else _DUMMY,),), columns)


def _of_groups(kept: Kept, own: StatefulProcessorOperator, code: GroupFunction, layout: RowLayout) -> NativeRead:
    """Return what to read for one of the states that an `applyInPandasWithState` has here: Spark keeps the value and
    the timeout of a key in one row, and the value is null of a key that has a timeout alone."""
    names = {role: shown for shown, role in layout.shown.roles().items()}
    columns = {names["key", name]: f"k{place}" for place, name in enumerate(own.key_schema.names)}
    has_timeout = own.time_mode != "none"
    timeout_ms = "coalesce(v1, -1L)" if has_timeout else "-1L"
    where = "true"
    if layout.state.kind == "timers":
        # There a timeout is due behind its time, here a timer is due at it.
        columns[names["time", "due"]], where = f"{timeout_ms} + 1", f"{timeout_ms} <> -1"
    elif layout.state.name == "known":
        columns |= {names["value", "is_defined"]: "v0 IS NOT NULL", names["value", "timeout_ms"]: timeout_ms}
    else:
        columns |= {names["value", field]: f"v0.{quoted(field)}" for field in code.schema.names}
        where = "v0 IS NOT NULL"
    value = (NativeColumn("groupState", code.schema.simpleString()),)
    return NativeRead(kept.keys, ((*value, _TIMEOUT) if has_timeout else value,), columns, where=where)


def _side_of_join(kept: Kept, own: IntervalJoinOperator, layout: RowLayout) -> NativeRead:
    """Return what to read of a side of a join: its rows, with the place that each has under its key."""
    names = {role: shown for shown, role in layout.shown.roles().items()}
    side = next(each for each in own.plan.sides.values() if each.name == layout.state.name)
    columns = {names["key", name]: quoted(name) for name in own.key_schema.names}
    columns |= {names["value", name]: quoted(name) for name in side.columns.names}
    columns[names["position", "position"]] = quoted(INDEX.name)
    if side.is_outer:
        columns[names["value", MATCHED]] = quoted(_MATCHED.name)
    due = "CAST(NULL AS BIGINT)"
    if side.stays_ms is not None:
        due = f"({_ms_up(quoted(side.time), side.columns, side.time)}) + {side.stays_ms}"
    columns[names["time", "due"]] = due
    # Rows that nothing can match any more: Spark keeps them, or has kept them until it read this batch.
    kept_here = [] if side.is_outer else [f"{quoted(name)} IS NOT NULL" for name in own.key_schema.names]
    if own.plan.terms.has_range:
        kept_here.append(f"{quoted(side.time)} IS NOT NULL")
    if own.plan.is_semi and side.name == "left":
        kept_here.append(f"NOT {quoted(_MATCHED.name)}")
    native = kept.sides[side.number]
    return NativeRead(
        keys=(*kept.keys, INDEX),
        values=((*native.columns, _MATCHED),),
        columns=columns,
        store=f"{side.name}-keyWithIndexToValue",
        rows=native.rows,
        where=" AND ".join(kept_here) or "true",
    )


def _ms_up(sql: str, schema: pa.Schema, name: str) -> str:
    """Return SQL for the first millisecond that is not before a time; null of null."""
    is_plain = schema.field(name).type.tz is None
    micros = (
        f"timestampdiff(MICROSECOND, TIMESTAMP_NTZ '1970-01-01 00:00:00', {sql})" if is_plain else f"unix_micros({sql})"
    )
    return _ms_up_of_micros(micros)


def _ms_up_of_micros(micros: str) -> str:
    return f"({micros}) div 1000 + CASE WHEN ({micros}) % 1000 > 0 THEN 1 ELSE 0 END"
