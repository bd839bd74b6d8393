"""Aggregates that are added to, or taken from, an `aggregate(…)` with stored state: like columns of any other state."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from memory_reader import MemoryReader
from model import ALL_HASHES
from test_state_layouts_stored import Log

from state_runtime import aggregates, windows
from state_runtime.base.errors import InvalidPipeline
from state_runtime.pipeline.compatibility import reconcile
from state_runtime.processors.builtin.aggregate import STATE, AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.windows import plan_windows
from state_runtime.processors.declared.aggregates import Aggregate
from state_runtime.processors.declared.windows import SessionWindow
from state_runtime.processors.grouping import group_rows
from state_runtime.processors.operator import EpochClock, RowSlice
from state_runtime.snapshot.manifest import OperatorEntry
from tests.stored import read_states

MOMENT = pa.timestamp("us", "UTC")
KEYS = pa.schema([("k", pa.int64())])
INPUT = pa.schema([("k", pa.int64()), ("v", pa.float64()), ("b", pa.bool_())])
# Everything that there is, each with a column that it takes.
ALL: dict[str, Aggregate] = {
    "n": aggregates.count(),
    "n_v": aggregates.count("v"),
    "total": aggregates.sum("v"),
    "low": aggregates.min("v"),
    "high": aggregates.max("v"),
    "mean": aggregates.avg("v"),
    "some": aggregates.any("b"),
    "all": aggregates.every("b"),
    "one": aggregates.first("v"),
    "other": aggregates.last("v", True),
    "list": aggregates.collect("v"),
    "different": aggregates.count_distinct("v"),
    "set": aggregates.collect_set("v"),
    "distinct": aggregates.count_distinct_approx("v"),
    "of_most": aggregates.max_by("b", "v"),
    "of_least": aggregates.min_by("v", "b"),
    "spread": aggregates.stddev("v"),
    "spread_pop": aggregates.variance_pop("v"),
}
SPARK = {
    pa.int64(): "bigint", pa.int16(): "smallint", pa.int32(): "int", pa.float64(): "double", pa.bool_(): "boolean", pa.binary(): "binary",
}  # fmt: skip


def type_text(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{type_text(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{f.name}:{type_text(f.type)}' for f in kind)}>"
    return SPARK[kind]


class Job:
    """One `aggregate(…)` over restarts, its state in a log."""

    def __init__(self) -> None:
        self.log = Log([])
        self.log.manifest = replace(self.log.manifest, operators=())

    def start(self, wanted: dict[str, Aggregate]) -> None:
        plan = plan_aggregates(wanted, INPUT, "op")
        ddl = ", ".join(f"`{slot.name}` {type_text(slot.type)}" for slot in plan.slots)
        self.operator = AggregateOperator("op", ("k",), "`k` bigint", KEYS, plan, ddl)
        next_id = self.log.manifest.snapshot_id + 1
        (self.entry,) = reconcile(self.log.manifest, [self.operator.entry()], snapshot_id=next_id)

    def epoch(self, rows: list[tuple[int, Any, Any]]) -> dict[int, dict[str, Any]]:
        """What is emitted, by key."""
        schemas = self.operator.state_schemas
        data = pa.RecordBatch.from_arrays(
            [pa.array([row[i] for row in rows], f.type) for i, f in enumerate(INPUT)], schema=INPUT
        )
        hashes = np.array([row[0] for row in rows], dtype=np.uint64)
        grouped = group_rows(data, hashes, np.arange(len(rows), dtype=np.int64), ["k"], KEYS)
        states = read_states(self.log.root, self.log.manifest, self.entry, schemas, *ALL_HASHES)
        reader = MemoryReader(schemas, {STATE: [states[STATE]]})
        clock = EpochClock(0, epoch=self.log.manifest.snapshot_id + 1)
        result = self.operator.process([RowSlice(grouped)], reader, clock, 0)
        emitted = [row for batch in result.outputs for row in batch.to_pylist()]
        self.log.describe(self.entry)
        self.log.epoch(dict(result.changes))
        return {row.pop("k"): row for row in emitted}


OLD = [(1, 1.0, True), (2, 5.0, False), (2, None, None)]
NEW = [(1, 3.0, False), (1, 4.0, True), (3, 7.0, True)]


@pytest.mark.parametrize("name", sorted(set(ALL) - {"total"}))
@pytest.mark.parametrize("fold", ["", "major"])
def test_an_added_aggregate_begins_with_the_rows_after_it(name: str, fold: str) -> None:
    """Also of keys that are older than it; what was there goes on."""
    job, fresh = Job(), Job()
    job.start({"total": ALL["total"]})
    job.epoch(OLD)
    job.log.fold(fold)
    job.start({name: ALL[name], "total": ALL["total"]})
    fresh.start({name: ALL[name]})
    found, alone = job.epoch(NEW), fresh.epoch(NEW)
    assert {key: row[name] for key, row in found.items()} == {key: row[name] for key, row in alone.items()}
    assert {key: row["total"] for key, row in found.items()} == {1: 8.0, 3: 7.0}
    again, alone = job.epoch(OLD), fresh.epoch(OLD)
    assert again[2][name] == alone[2][name], "a key that only older rows had"
    assert again[2]["total"] == 10.0


@pytest.mark.parametrize("name", ALL)
def test_an_aggregate_that_was_taken_out_and_comes_back_begins_anew(name: str) -> None:
    other = "n" if name != "n" else "low"
    job, fresh = Job(), Job()
    job.start({name: ALL[name], other: ALL[other]})
    job.epoch(OLD)
    job.start({other: ALL[other]})
    job.epoch(NEW)
    job.start({other: ALL[other], name: ALL[name]})
    fresh.start({name: ALL[name]})
    assert {k: r[name] for k, r in job.epoch(OLD).items()} == {k: r[name] for k, r in fresh.epoch(OLD).items()}


def test_an_aggregate_that_means_something_else_under_its_name_is_refused() -> None:
    job = Job()
    job.start({"x": aggregates.max("v")})
    job.epoch(OLD)
    with pytest.raises(InvalidPipeline, match=r"operator 'op': 'x' is any\(b\) now, and max\(v\) in"):
        job.start({"x": aggregates.any("b")})


def entry_of(event_time: str) -> OperatorEntry:
    keys = pa.schema([("k", pa.timestamp("us", "UTC")), ("at", pa.timestamp("us", "UTC"))])
    plan = plan_aggregates({"n": aggregates.count()}, keys, "op")
    ddl = "`k` timestamp, `at` timestamp"
    return AggregateOperator("op", ("k", "at"), ddl, keys, plan, "`n` bigint", event_time).entry()


@pytest.mark.parametrize(("old", "new"), [("", "at"), ("at", ""), ("at", "k")])
def test_when_an_aggregate_emits_cannot_change(old: str, new: str) -> None:
    """What was emitted already would come once more, or what is stored would have no time at which it is emitted."""
    job = Job()
    before = replace(job.log.manifest, operators=(entry_of(old),))
    again = reconcile(before, [entry_of(old)], snapshot_id=before.snapshot_id + 1)
    assert [(o.modes, o.states[0].time) for o in again] == [(f"append by {old}" if old else "", "due" if old else "")]
    told = [f"append by {mode}" if mode else "none" for mode in (new, old)]
    with pytest.raises(InvalidPipeline, match=f"it runs as {told[0]} now, and as {told[1]} in .*new uid"):
        reconcile(before, [entry_of(new)], snapshot_id=before.snapshot_id + 1)


def session_entry(window: SessionWindow) -> OperatorEntry:
    keys = pa.schema([("k", pa.int64())])
    return plan_windows(
        uid="op",
        key_columns=("k",),
        key_ddl="`k` bigint",
        key_schema=keys,
        schema=pa.schema([*keys, ("at", MOMENT), ("ends", MOMENT), ("until", MOMENT)]),
        time_column="at",
        window=window,
        aggregates={"n": aggregates.count()},
        mode="append",
        ddl=lambda _: "`window.end` timestamp, `n` bigint",
    ).entry()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (windows.session("1 second"), windows.session("2 seconds")),
        (windows.session("1 second"), windows.session(end_column="ends")),
        (windows.session(end_column="ends"), windows.session("1 second")),
        (windows.session(end_column="ends"), windows.session(end_column="until")),
    ],
)
def test_when_a_session_ends_cannot_change(old: SessionWindow, new: SessionWindow) -> None:
    """Sessions that are stored would be merged by another rule than the one that made them."""
    before = replace(Job().log.manifest, operators=(session_entry(old),))
    assert reconcile(before, [session_entry(old)], snapshot_id=before.snapshot_id + 1) == (session_entry(old),)
    told = re.escape(new.text), re.escape(old.text)
    with pytest.raises(InvalidPipeline, match=f"it runs as append, {told[0]}.* now, and as append, {told[1]}.*new uid"):
        reconcile(before, [session_entry(new)], snapshot_id=before.snapshot_id + 1)


@pytest.mark.parametrize("name", ["n", "n_v", "total", "high", "different", "set", "list"])
def test_an_aggregate_that_was_added_after_the_last_row_of_a_key_is_one_of_no_rows(name: str) -> None:
    """Such a key, or a window, is emitted when the watermark passes it, although no row has come since."""
    plan = plan_aggregates({name: ALL[name]}, INPUT, "op")
    (found,) = plan.finish([pa.nulls(1, slot.type) for slot in plan.slots])
    of_no_rows = {"n": 0, "n_v": 0, "different": 0, "set": [], "list": []}
    assert found.to_pylist() == [of_no_rows.get(name)]
