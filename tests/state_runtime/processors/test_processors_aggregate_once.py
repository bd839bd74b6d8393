"""Aggregates keyed by event time, each emitted once, against a model that keeps every row of every key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_reader import MemoryReader
from model import HashOf, Key, canonical_key, examples, hash_functions, spread
from sliced import now_whole_now_sliced
from test_processors_windows import SECOND, A, B, compare, raw_epochs, with_places
from window_model import AGGREGATES, INPUT, KEYS, TIME, Row, batch_of_rows

from state_runtime import aggregates
from state_runtime.processors.builtin.aggregate import STATE, AggregateOperator, plan_aggregates
from state_runtime.processors.builtin.partial_rows import ROWS_COLUMN, slot_column
from state_runtime.processors.grouping import GroupedRows, group_rows
from state_runtime.processors.operator import EpochClock
from state_runtime.state.table import DELETED
from state_runtime.state.version import OpenVersion

BY_TIME = pa.schema([*KEYS, INPUT.field("at")])
Emitted = dict[tuple[Key, int], list[Row]]
AT_THE_END_MS = 1 << 40


@dataclass
class Model:
    """Every key with all of its rows."""

    keys: dict[tuple[Key, int | None], list[Row]] = field(default_factory=dict)

    def epoch(self, rows: Sequence[Row], watermark_ms: int, late_ms: int) -> tuple[Emitted, int]:
        """What is emitted, and the number of late rows."""
        late = 0
        for row in rows:
            if row.at_us is not None and row.at_us <= late_ms * 1000:
                late += 1
            else:
                self.keys.setdefault((row.key, row.at_us), []).append(row)
        passed = [(key, at) for key, at in self.keys if at is not None and at <= watermark_ms * 1000]
        return {(key, at): self.keys.pop((key, at)) for key, at in passed}, late


class Driven:
    """The operator over epochs; it reads its state from runs or from the plain `MemoryReader`, which both hold it."""

    def __init__(self, hash_of: HashOf = spread, *, runs: bool = True) -> None:
        plan = plan_aggregates(AGGREGATES, INPUT, "op")
        self.operator = AggregateOperator("op", tuple(BY_TIME.names), "", BY_TIME, plan, "", "at")
        self.schema = self.operator.state_schemas[STATE]
        self.reader = MemoryReader(self.operator.state_schemas)
        self.version = OpenVersion.of_batches("v", {STATE: self.schema.empty()}, self.operator.state_schemas, 0)
        self.hash_of = hash_of
        self.runs = runs
        self.number = 0
        self.live = 0
        self.late = 0

    def grouped(self, rows: Sequence[Row]) -> GroupedRows:
        hashes = np.array([self.hash_of((*row.key, row.at_us)) for row in rows], dtype=np.uint64)
        sequence = np.array([row.place * 7 for row in rows], dtype=np.int64)
        return group_rows(batch_of_rows(rows), hashes, sequence, BY_TIME.names, BY_TIME)

    def epoch(self, rows: Sequence[Row], watermark_ms: int = 0, late_ms: int = 0) -> dict[Any, dict[str, Any]]:
        """What is emitted, by key and time."""
        return self.process(self.grouped(rows), watermark_ms, late_ms)

    def process(self, rows: GroupedRows, watermark_ms: int, late_ms: int) -> dict[Any, dict[str, Any]]:
        self.number += 1
        clock = EpochClock(0, watermark_ms, late_ms, self.number)
        before = self.version.next_due(STATE)
        reader = self.version if self.runs else self.reader
        result = self.operator.process(now_whole_now_sliced(rows), reader, clock, 0)
        batches = list(result.outputs)
        self.schema.check_batch(result.changes[STATE], "changes")
        self.reader = self.reader.overlaid(result.changes)
        self.version = self.version.overlaid(result.changes, result.due_taken)
        self.live += result.rows_added
        self.late = result.late_rows
        stored = self.reader.rows(STATE)
        assert self.live == len(stored), "rows_added"
        assert result.due_taken == {STATE: watermark_ms}
        assert all(row["due"] is None or row["due"] > watermark_ms for row in stored)
        if rows.groups == 0 and (before is None or before > watermark_ms):
            assert not batches, "the runtime would not have visited the shard"
        emitted: dict[Any, dict[str, Any]] = {}
        for batch in batches:
            assert batch.schema.equals(self.operator.output_schema)
            columns = [column.to_pylist() for column in (batch["name"], batch["score"], batch["at"].cast(pa.int64()))]
            for number, (name, score, at) in enumerate(zip(*columns, strict=True)):
                key = (canonical_key(name, score), at)
                assert key not in emitted, f"{key} twice"
                emitted[key] = {name: batch[name][number].as_py() for name in AGGREGATES}
        return emitted


@pytest.mark.parametrize("step_us", [SECOND // 2, 150])
@given(epochs=raw_epochs, hash_of=hash_functions, runs=st.booleans())
@examples(100)
def test_keys_over_epochs_are_those_of_the_model(step_us: int, epochs: Any, hash_of: HashOf, runs: bool) -> None:
    """Late rows, null and negative times, equal hashes, epochs without rows, times between two milliseconds: what is emitted,
    counted and kept."""
    driven, model = Driven(hash_of, runs=runs), Model()
    watermark = late = 0
    for rows, forward in with_places(epochs, step_us):
        late, watermark = watermark, watermark + forward * step_us // 1000
        found = driven.epoch(rows, watermark, late)
        expected, late_rows = model.epoch(rows, watermark, late)
        compare(found, expected)
        assert driven.late == late_rows
    # In the end all are emitted but those without a time, which no watermark passes.
    found = driven.epoch([], AT_THE_END_MS, watermark)
    compare(found, model.epoch([], AT_THE_END_MS, watermark)[0])
    assert driven.live == len(model.keys)
    assert all(at is None for _, at in model.keys)


def test_the_watermark_passes_its_own_time_and_not_a_microsecond_more() -> None:
    """Spark compares `time <= watermark`, both for what is late and for what is emitted."""
    driven = Driven()
    rows = [Row(A, at, place=at) for at in (4_999_999, 5 * SECOND, 5 * SECOND + 1)]
    assert not driven.epoch(rows)
    assert set(driven.epoch([], 5_000)) == {(A, 4_999_999), (A, 5 * SECOND)}
    assert not driven.epoch(rows, 5_000, 5_000)
    assert driven.late == 2
    (found,) = driven.epoch([], 5_001, 5_000).values()
    assert found["rows"] == 2


def test_what_is_added_in_the_epoch_that_passes_it_counts_and_is_not_late() -> None:
    """Rows are late by the watermark of the epoch before; a key that comes and goes in one epoch is emitted, too."""
    driven = Driven()
    driven.epoch([Row(A, 3 * SECOND)])
    found = driven.epoch([Row(A, 3 * SECOND, place=1), Row(B, 4 * SECOND, place=2)], 5_000)
    assert {key: row["rows"] for key, row in found.items()} == {(A, 3 * SECOND): 2, (B, 4 * SECOND): 1}
    assert (driven.late, driven.live) == (0, 0)


def test_a_key_without_a_time_is_never_late_and_never_emitted() -> None:
    """As in Spark: it stays in the state."""
    driven = Driven()
    for _ in range(2):
        assert not driven.epoch([Row(A, None)], 9_000, 9_000)
    assert not driven.epoch([], AT_THE_END_MS, 9_000)
    (stored,) = driven.reader.rows(STATE)
    assert (stored["due"], stored["value.rows"], stored[DELETED]) == (None, 2, False)
    assert driven.operator.time_domain == "event"


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "Europe/Vienna")], ids=str)
def test_event_time_of_any_zone_and_of_none_counts(kind: pa.DataType) -> None:
    """Also Spark's `timestamp_ntz`."""
    zone = TIME if kind.tz else kind
    plan = plan_aggregates({"n": aggregates.count()}, pa.schema([("at", kind)]), "op")
    operator = AggregateOperator("op", ("at",), "", pa.schema([("at", zone)]), plan, "", "at")
    rows = pa.RecordBatch.from_arrays([pa.array([1_000, 2_000, 3_000, 3_000], kind)], names=["at"])
    hashes = np.array([10, 20, 30, 30], dtype=np.uint64)
    grouped = group_rows(rows, hashes, np.arange(4), ["at"], operator.key_schema)
    reader = MemoryReader(operator.state_schemas)
    result = operator.process(now_whole_now_sliced(grouped), reader, EpochClock(0, 3, 1), 0)
    emitted = pa.Table.from_batches(list(result.outputs))
    assert emitted.schema.field("at").type == zone
    assert sorted(zip(emitted["at"].cast(pa.int64()).to_pylist(), emitted["n"].to_pylist(), strict=True)) == [
        (2_000, 1),
        (3_000, 2),
    ]
    assert result.late_rows == 1


def test_a_partial_row_is_late_as_often_as_rows_are_behind_it() -> None:
    plan = plan_aggregates({"n": aggregates.count()}, pa.schema([("at", TIME)]), "op")
    operator = AggregateOperator("op", ("at",), "", pa.schema([("at", TIME)]), plan, "", "at")
    rows = pa.RecordBatch.from_arrays(
        [pa.array([1_000, 2_000], TIME), pa.array([5, 3]), pa.array([5, 3])], names=["at", ROWS_COLUMN, slot_column(0)]
    )
    grouped = group_rows(rows, np.array([10, 20], dtype=np.uint64), np.arange(2), ["at"], operator.key_schema)
    reader = MemoryReader(operator.state_schemas)
    result = operator.process(now_whole_now_sliced(grouped), reader, EpochClock(0, 2, 1), 0)
    (emitted,) = (batch["n"].to_pylist() for batch in result.outputs)
    assert (emitted, result.late_rows) == ([3], 5)


def test_in_update_mode_event_time_is_a_key_like_any_other() -> None:
    """Rows behind the watermark count and keys stay: the mode promises the newest value of each key (docs/parity.md)."""
    plan = plan_aggregates({"n": aggregates.count()}, pa.schema([("at", TIME)]), "op")
    operator = AggregateOperator("op", ("at",), "", pa.schema([("at", TIME)]), plan, "")
    rows = pa.RecordBatch.from_arrays([pa.array([1_000, 9_000], TIME)], names=["at"])
    grouped = group_rows(rows, np.array([10, 20], dtype=np.uint64), np.arange(2), ["at"], operator.key_schema)
    reader = MemoryReader(operator.state_schemas)
    for number in (1, 2):
        result = operator.process(now_whole_now_sliced(grouped), reader, EpochClock(0, 9_000, 9_000), 0)
        emitted = pa.Table.from_batches(list(result.outputs))
        reader = reader.overlaid(result.changes)
        assert (sorted(emitted["n"].to_pylist()), result.late_rows) == ([number, number], 0)
    assert [row["value.n"] for row in reader.rows(STATE)] == [2, 2]
