"""The built-in `aggregate`: keyed count, sum, min, max and avg, without a Python loop over rows or keys.

A shard's rows are sorted by key hash for the look-up anyway, so each group is one contiguous range and numpy's
`reduceat` reduces all groups of a column in one call. The partial results are then combined with the looked-up state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_runtime.aggregates import Aggregate
from state_runtime.errors import InvalidData, InvalidPipeline
from state_runtime.processors.grouping import GroupedRows
from state_runtime.processors.operator import EpochClock, ShardResult
from state_runtime.snapshot.manifest import OperatorEntry, StateEntry
from state_runtime.state.local import OpenVersion
from state_runtime.state.table import StateSchema

__all__ = ["STATE", "AggregateOperator", "plan_aggregates"]

STATE = "aggregate"
_SUM_PRECISION_MAX = 38


@dataclass(frozen=True)
class _Slot:
    """One value column of the state: a partial aggregate and how two of them combine."""

    name: str
    type: pa.DataType
    column: str | None
    combine: str  # "count" | "sum" | "min" | "max"


@dataclass(frozen=True)
class AggregatePlan:
    """Slots of the state, and the output fields computed from them."""

    slots: tuple[_Slot, ...]
    outputs: tuple[tuple[str, Aggregate, pa.DataType], ...]


def plan_aggregates(aggregates: Mapping[str, Aggregate], schema: pa.Schema, uid: str) -> AggregatePlan:
    """Types and state of the aggregates over an input schema.

    Raises:
        InvalidPipeline: a column is missing or has a type that the function cannot take.
    """
    slots: list[_Slot] = []
    outputs: list[tuple[str, Aggregate, pa.DataType]] = []
    for name, aggregate in aggregates.items():
        where = f"operator {uid!r}, aggregate {name!r}"
        if aggregate.column is not None and schema.get_field_index(aggregate.column) < 0:
            raise InvalidPipeline(
                f"{where}: there is no column {aggregate.column!r}; the input has {', '.join(schema.names)}"
            )
        data_type = schema.field(aggregate.column).type if aggregate.column is not None else None
        if aggregate.function == "count":
            slots.append(_Slot(name, pa.int64(), aggregate.column, "count"))
            outputs.append((name, aggregate, pa.int64()))
        elif aggregate.function == "sum":
            slots.append(_Slot(name, _sum_type(data_type, where), aggregate.column, "sum"))
            outputs.append((name, aggregate, slots[-1].type))
        elif aggregate.function == "avg":
            if not (pa.types.is_integer(data_type) or pa.types.is_floating(data_type)):
                raise InvalidPipeline(
                    f"{where}: avg takes integers and floats, not {data_type}; cast it to double first"
                )
            slots.append(_Slot(f"{name}.sum", pa.float64(), aggregate.column, "sum"))
            slots.append(_Slot(f"{name}.count", pa.int64(), aggregate.column, "count"))
            outputs.append((name, aggregate, pa.float64()))
        else:
            if pa.types.is_nested(data_type) or pa.types.is_null(data_type):
                raise InvalidPipeline(f"{where}: {aggregate.function} cannot order values of type {data_type}")
            slots.append(_Slot(name, data_type, aggregate.column, aggregate.function))
            outputs.append((name, aggregate, data_type))
    return AggregatePlan(tuple(slots), tuple(outputs))


def _sum_type(data_type: Any, where: str) -> pa.DataType:
    if pa.types.is_integer(data_type):
        return pa.int64()
    if pa.types.is_floating(data_type):
        return pa.float64()
    if pa.types.is_decimal128(data_type):
        return pa.decimal128(min(_SUM_PRECISION_MAX, data_type.precision + 10), data_type.scale)
    raise InvalidPipeline(f"{where}: sum takes numbers, not {data_type}")


@dataclass(frozen=True)
class AggregateOperator:
    """The operator; emits the new value of every key that the epoch touched (update mode)."""

    uid: str
    key_columns: tuple[str, ...]
    key_ddl: str
    key_schema: pa.Schema
    plan: AggregatePlan
    state_ddl: str

    @cached_property
    def output_schema(self) -> pa.Schema:
        return pa.schema([*self.key_schema, *(pa.field(name, t) for name, _, t in self.plan.outputs)])

    @cached_property
    def _schema(self) -> StateSchema:
        return StateSchema(self.key_schema, pa.schema([pa.field(s.name, s.type) for s in self.plan.slots]))

    @property
    def state_schemas(self) -> Mapping[str, StateSchema]:
        return {STATE: self._schema}

    def entry(self) -> OperatorEntry:
        """How a manifest describes the operator."""
        return OperatorEntry(self.uid, "aggregate", self.key_ddl, (StateEntry(STATE, "value", self.state_ddl),))

    def process(self, rows: GroupedRows, version: OpenVersion, clock: EpochClock, shard: int) -> ShardResult:
        """Reduce the epoch, combine with the state, emit."""
        result = ShardResult(iter(()))
        result.outputs = self._run(rows, version, result)
        return result

    def _run(self, rows: GroupedRows, version: OpenVersion, result: ShardResult) -> Iterator[pa.RecordBatch]:
        if rows.groups == 0:
            return
        found, before = version.find(STATE, rows.hashes, rows.keys)
        seen_any = bool(found.any())
        combined: list[pa.Array] = []
        for slot, old in zip(self.plan.slots, before):
            new = reduce_groups(slot.combine, slot.type, rows, slot.column, self.uid)
            combined.append(combine(slot.combine, old, new, self.uid) if seen_any else new)
        result.changes[STATE] = self._schema.batch(rows.hashes, None, rows.keys, combined)
        result.rows_added = int(rows.groups - np.count_nonzero(found))
        yield pa.RecordBatch.from_arrays([*rows.keys, *self._outputs(combined)], schema=self.output_schema)

    def _outputs(self, combined: Sequence[pa.Array]) -> Iterator[pa.Array]:
        columns = iter(combined)
        for _, aggregate, _ in self.plan.outputs:
            column = next(columns)
            if aggregate.function == "avg":
                counts = next(columns)
                column = pc.divide(column, pc.if_else(pc.equal(counts, 0), None, counts).cast(pa.float64()))
            yield column


def reduce_groups(how: str, data_type: pa.DataType, rows: GroupedRows, column: str | None, uid: str) -> pa.Array:
    """Reduce one column over the groups of sorted rows.

    Returns:
        One value per group; null where a group has only nulls (count: 0).
    """
    sizes = (rows.stops - rows.starts).astype(np.int64)
    if column is None:
        return pa.array(sizes)
    values = rows.rows.column(column)
    valid = None if values.null_count == 0 else values.is_valid().to_numpy(zero_copy_only=False)
    counts = sizes if valid is None else np.add.reduceat(valid.astype(np.int64), rows.starts)
    if how == "count":
        return pa.array(counts)
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return _reduce_in_arrow(how, data_type, rows, values, uid)
    plain = values if valid is None else pc.fill_null(values, 0)
    # Not safe: an average of longs beyond 2^53 is a double, as in Spark.
    numbers = plain.cast(data_type, safe=not pa.types.is_floating(data_type)).to_numpy(zero_copy_only=False)
    if how == "sum":
        reduced = np.add.reduceat(numbers, rows.starts)
        if pa.types.is_integer(data_type):
            _check_overflow(numbers, rows, reduced, uid)
    else:
        if valid is not None:
            numbers = np.where(valid, numbers, _neutral(how, numbers.dtype))
        # Spark orders NaN above every number: a maximum keeps NaN, a minimum passes it over.
        ufunc = np.maximum if how == "max" else (np.fmin if numbers.dtype.kind == "f" else np.minimum)
        reduced = ufunc.reduceat(numbers, rows.starts)
        if how == "min" and valid is not None and numbers.dtype.kind == "f":
            reduced = _nan_where_only_nan(reduced, values, rows, counts)
    return pa.array(reduced, type=data_type, mask=None if valid is None else counts == 0)


def _nan_where_only_nan(reduced: Any, values: pa.Array, rows: GroupedRows, counts: Any) -> Any:
    """Groups of nulls and NaN only: the stand-in for null (infinity) must not win over NaN."""
    nan = pc.fill_null(pc.is_nan(values), False).to_numpy(zero_copy_only=False)
    only_nan = np.add.reduceat(nan.astype(np.int64), rows.starts) == counts
    return np.where(only_nan & (counts > 0), np.nan, reduced)


def _neutral(how: str, dtype: Any) -> Any:
    if dtype.kind == "f":
        return -np.inf if how == "max" else np.inf
    return np.iinfo(dtype).min if how == "max" else np.iinfo(dtype).max


def _check_overflow(numbers: Any, rows: GroupedRows, reduced: Any, uid: str) -> None:
    """int64 wraps silently in numpy; a float sum tells whether it can have."""
    rough = np.add.reduceat(numbers.astype(np.float64), rows.starts)
    if bool(np.any(np.abs(rough - reduced.astype(np.float64)) > 1e18)):
        raise _overflow(uid)


def _overflow(uid: str) -> InvalidData:
    return InvalidData(
        f"operator {uid!r}: a sum leaves the range of long or of 38 digits (Spark's ARITHMETIC_OVERFLOW). Sum a double"
    )


def _reduce_in_arrow(how: str, data_type: pa.DataType, rows: GroupedRows, values: pa.Array, uid: str) -> pa.Array:
    """Strings, dates, timestamps, decimals, …: Arrow's hash aggregation over the group number."""
    sizes = rows.stops - rows.starts
    table = pa.table({"group": np.repeat(np.arange(rows.groups), sizes), "value": values})
    # One thread keeps the groups in order of appearance, which is ascending.
    if how == "sum":
        # Arrow's decimals wrap around at 38 digits; twice the width holds any sum, and the cast back is checked.
        table = table.set_column(1, "value", table.column("value").cast(pa.decimal256(76, data_type.scale)))
    reduced = table.group_by("group", use_threads=False).aggregate([("value", how)]).column(f"value_{how}")
    array = reduced.combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    try:
        return array.cast(data_type)
    except pa.ArrowInvalid as error:
        raise _overflow(uid) from error


def combine(how: str, old: pa.Array, new: pa.Array, uid: str) -> pa.Array:
    """The state's value and the epoch's, one per key; a null side leaves the other."""
    if how in ("count", "sum"):
        try:
            if pa.types.is_decimal(new.type):
                wide = pa.decimal256(40, new.type.scale)
                both = pc.add(old.cast(wide), new.cast(wide)).cast(new.type)
            else:
                both = pc.add_checked(old, new)
        except pa.ArrowInvalid as error:
            raise _overflow(uid) from error
    elif pa.types.is_floating(new.type):
        greater = pc.or_(pc.greater(old, new), pc.is_nan(old))
        smaller = pc.or_(pc.less(old, new), pc.is_nan(new))
        both = pc.if_else(greater if how == "max" else smaller, old, new)
    else:
        both = pc.if_else((pc.greater if how == "max" else pc.less)(old, new), old, new)
    if old.null_count == 0 and new.null_count == 0:
        return both
    return pc.coalesce(both, old, new)
