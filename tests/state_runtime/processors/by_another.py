"""What tests of aggregates that choose rows by another column share: their rows, Spark's order, and two laws."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from sliced import now_whole_now_sliced

from state_runtime.processors.builtin.aggregate import STATE, AggregateOperator, AggregatePlan, plan_aggregates
from state_runtime.processors.builtin.partials import Groups
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import fold
from state_runtime.state.version import OpenVersion

KEYS = pa.schema([("k", pa.int64())])
Row = tuple[int, Any, Any]
"""Key, value, and what it is chosen by."""
Chosen = Callable[[list[tuple[Any, Any]]], tuple[Any, ...]]
"""From values and what they are chosen by, in source order, to the result of each aggregate."""

NAIVE = st.datetimes(dt.datetime.fromisoformat("1960-01-01"), dt.datetime.fromisoformat("2030-01-01"))
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1])),
    (pa.float64(), st.sampled_from([0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan])),
    (pa.float32(), st.sampled_from([0.0, -0.0, 1.5, math.nan])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.sampled_from(["", "a", "B", "ab", "ä", "\U0001f600", "\uffff"])),
    (pa.binary(), st.binary(max_size=2)),
    (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2030, 1, 1))),
    (pa.timestamp("us"), NAIVE),
    (pa.decimal128(38, 2), st.decimals(-999, 999, places=2)),
    (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.sampled_from([None, -1, 1]), "b": st.sampled_from([None, "", "a"])}),
    ),
    (pa.list_(pa.float64()), st.lists(st.sampled_from([None, -0.0, 0.0, 1.5, math.nan]), max_size=2)),
]
TYPE_IDS = [f"{number}-{kind}" for number, (kind, _) in enumerate(TYPES)]
FEW_ROWS = st.lists(
    st.tuples(st.none() | st.integers(0, 9), st.none() | st.sampled_from(["", "a", "b"])), min_size=1, max_size=12
)
"""Values and texts that choose among them."""


def order(value: Any) -> Any:
    """Spark's order: NaN above every number, texts by their bytes, and zeros are equal; null below all, inside of structs
    and arrays."""
    if value is None:
        return (-1, 0)
    if isinstance(value, dict | list):
        return (0, tuple(map(order, [value[name] for name in sorted(value)] if isinstance(value, dict) else value)))
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return (0, value.encode() if isinstance(value, str) else value)


def batch(rows: list[Row], value_type: pa.DataType, by_type: pa.DataType) -> pa.RecordBatch:
    types = (pa.int64(), value_type, by_type)
    return pa.RecordBatch.from_arrays(
        [pa.array([row[i] for row in rows], t) for i, t in enumerate(types)], names=["k", "v", "by"]
    )


def planned(value_type: pa.DataType, by_type: pa.DataType, wanted: dict[str, Aggregate]) -> AggregatePlan:
    return plan_aggregates(wanted, pa.schema([("k", pa.int64()), ("v", value_type), ("by", by_type)]), "op")


def epochs_of(drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Row]]]:
    row = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 9), st.none() | drawn)
    return st.lists(st.lists(row, min_size=1, max_size=14), min_size=1, max_size=4)


def check_epochs(epochs: list[list[Row]], by_type: pa.DataType, wanted: dict[str, Aggregate], chosen: Chosen) -> None:
    """Each epoch emits, of the keys that it touches, what the model chooses among all their rows so far."""
    operator = AggregateOperator("op", ("k",), "k long", KEYS, planned(pa.int64(), by_type, wanted), "")
    schema = operator.state_schemas[STATE]
    table = schema.empty()
    seen: dict[int, list[tuple[Any, Any]]] = {}
    for epoch, rows in enumerate(epochs, 1):
        for key, value, by in rows:
            seen.setdefault(key, []).append((value, by))
        hashes = np.array([k * 7919 for k, _, _ in rows], dtype=np.uint64)
        grouped = group_rows(batch(rows, pa.int64(), by_type), hashes, np.arange(len(rows)), ["k"], KEYS)
        version = OpenVersion.of_batches("v", {STATE: table}, {STATE: schema})
        result = operator.process(now_whole_now_sliced(grouped), version, EpochClock(0, epoch=epoch), 0)
        emitted = {r["k"]: tuple(r[name] for name in wanted) for output in result.outputs for r in output.to_pylist()}
        table = fold([result.changes[STATE], table], schema, drop_deleted=True)
        assert emitted == {key: chosen(seen[key]) for key, _, _ in rows}


def check_any_order(rows: list[tuple[Any, Any]], random: Any, wanted: dict[str, Aggregate], chosen: Chosen) -> None:
    """Panes and parts of sessions are merged as they are found: each row a part, in any order and any grouping."""
    plan = planned(pa.int64(), pa.string(), wanted)
    each = Groups(np.arange(len(rows)), len(rows))
    slots = plan.reduce(batch([(0, v, by) for v, by in rows], pa.int64(), pa.string()), each, np.arange(len(rows)))
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    slots = [slot.take(pa.array(shuffled)) for slot in slots]
    cut = random.randrange(len(rows) + 1)
    parts = [
        plan.merge_groups([s.slice(start, stop - start) for s in slots], Groups(np.array([0]), stop - start))
        for start, stop in ((0, cut), (cut, len(rows)))
        if stop > start
    ]
    merged = parts[0] if len(parts) == 1 else plan.merge(*parts)
    assert tuple(column.to_pylist()[0] for column in plan.finish(merged)) == chosen(rows)
